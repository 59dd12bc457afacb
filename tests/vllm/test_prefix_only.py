"""Models in which the KV of a token depends on more than the tokens before it are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import ModelConfig
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvtiers.connector.vllm import prefix_only, weights
from kvtiers.tiers.errors import ConfigError
from tests.tiny_model import make_model_dir

ORIGINAL_TOKENS = 64
FIELDS: dict[str, dict[str, Any]] = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def rope_of(rope_type: str) -> dict[str, Any]:
    common = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_TOKENS}
    return {"rope_type": rope_type} | common | FIELDS.get(rope_type, {})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def model_config(folder: Path, rope: Any, model_impl: str) -> ModelConfig:
    return ModelConfig(
        model=str(folder), max_model_len=64, model_impl=model_impl, hf_overrides={"rope_parameters": rope}
    )


def is_refused(model: Any) -> bool:
    try:
        prefix_only.check_model(model)
    except ConfigError as e:
        return e.field == "rope_type"
    return False


@pytest.mark.parametrize("rope_type", ["default", *sorted(ROPE_INIT_FUNCTIONS)])
def test_transformers_rope_is_refused_if_dependent_on_later_tokens(rope_type: str, model_folder: Path) -> None:
    """Compares the same position in a short and in a long prompt."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": ORIGINAL_TOKENS}
    embedding = LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, rope_parameters=rope_of(rope_type)))
    some = torch.zeros(1, 1, 32)
    short, _ = embedding(some, torch.arange(8)[None])
    long, _ = embedding(some, torch.arange(4 * ORIGINAL_TOKENS)[None])
    depends = not torch.equal(short, long[:, :8])
    assert is_refused(model_config(model_folder, rope_of(rope_type), "transformers")) == depends
    assert depends == (rope_type in ("dynamic", "longrope"))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_of_vllm_is_accepted(rope_type: str, model_folder: Path) -> None:
    """It has one table for all lengths. The choice of table counts in the revision (``weights._by_length``)."""
    assert not is_refused(model_config(model_folder, rope_of(rope_type), "vllm"))


def test_rope_refusal_names_accepted_types(model_folder: Path) -> None:
    """All three ways ask for the revision when they start."""
    model = model_config(model_folder, rope_of("dynamic"), "transformers")
    with pytest.raises(ConfigError, match=r"^rope_type: is dynamic, .*--model-impl vllm.* linear, llama3, "):
        weights.kv_revision(SimpleNamespace(model_config=model))


def with_rope(transformers_backend: bool = True, **config: Any) -> Any:
    return SimpleNamespace(
        using_transformers_backend=lambda: transformers_backend, hf_text_config=SimpleNamespace(**config)
    )


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "dynamic-yarn"}},  # not known
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
    ids=["unknown", "old name", "one kind of layers"],
)
def test_rope_under_old_nested_or_unknown_name_is_refused(config: dict[str, Any]) -> None:
    assert is_refused(with_rope(**config))
    assert not is_refused(with_rope(False, **config))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_parameters": None, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}},
    ],
)
def test_rope_by_position_alone_is_accepted(config: dict[str, Any]) -> None:
    assert not is_refused(with_rope(**config))


@pytest.mark.parametrize(
    ("attn_type", "refused"),
    [("encoder_decoder", True), ("encoder_only", True), ("attention_free", False), ("unheard of", True)],
)
def test_model_whose_kv_vllm_does_not_reuse_is_refused(attn_type: str, refused: bool) -> None:
    model = SimpleNamespace(attn_type=attn_type, is_prefix_caching_supported=False, pooler_config=None)
    if refused:
        with pytest.raises(ConfigError, match=f"^model: vLLM cannot reuse the KV of {attn_type} models"):
            prefix_only.check_model(model)
    else:
        prefix_only.check_model(model)


@pytest.mark.parametrize(("config", "refused"), [({"chunk_size": 262144}, True), (None, False)])
def test_dual_chunk_attention_is_refused_unless_disabled(config: Any, refused: bool) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(dual_chunk_attention_config=config))
    if refused:
        with pytest.raises(ConfigError, match="^dual_chunk_attention_config: .*--hf-overrides"):
            prefix_only.check_model(model)
    else:
        prefix_only.check_model(model)


def test_hash_of_block_with_part_of_an_image_covers_the_whole_image() -> None:
    """So models whose image tokens see all of their image (Gemma 3, PaliGemma) can be stored."""

    def names_of(image: str) -> list[Any]:
        feature = SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=16, length=40))
        request: Any = SimpleNamespace(
            mm_features=[feature], lora_request=None, cache_salt=None, prompt_embeds=None, num_prompt_tokens=64
        )
        return [generate_block_hash_extra_keys(request, first, first + 16, 0)[0] for first in range(0, 64, 16)]

    one, other = names_of("one"), names_of("other")
    assert [a != b for a, b in zip(one, other, strict=True)] == [False, True, True, True]
