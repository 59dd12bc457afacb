"""``kvtiers check --model`` counts layers, heads and head sizes as the installed vLLM does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtiers.connector.commands import kv_shape as module
from kvtiers.connector.commands.kv_shape import kv_shape
from kvtiers.tiers.errors import ConfigError
from tests.connector.commands.model_configs import ALL

pytest.importorskip("vllm.config")  # first: the next module alone imports itself in a circle
convertors = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")
config_reader = pytest.importorskip("vllm.transformers_utils.config")
FULL = ("full_attention", "attention")


@pytest.mark.parametrize("name", ALL)
def test_kv_shape_matches_vllm(name: str, tmp_path: Path) -> None:
    contents = ALL[name][0]
    (tmp_path / "config.json").write_text(json.dumps(contents))
    hf_config = config_reader.get_config(str(tmp_path), trust_remote_code=False)
    text = config_reader.get_hf_text_config(hf_config)
    table = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    convertor = table.get(hf_config.model_type, convertors.ModelArchConfigConvertorBase)(hf_config, text)
    shape = kv_shape(contents)
    if shape.is_mla:
        assert convertor.is_deepseek_mla()
    else:
        assert convertor.get_total_num_kv_heads() == shape.kv_heads
    assert convertor.get_head_size() == shape.head_size
    layers = shape.full_layers + shape.window_layers + shape.state_layers
    assert convertor.get_num_hidden_layers() == layers
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        assert sum(kind in FULL for kind in kinds) == shape.full_layers
    if shape.window_layers:
        assert shape.window_tokens in (
            getattr(text, "sliding_window", None),
            getattr(text, "attention_chunk_size", None),
        )


MODEL_TYPES = (
    "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss",
    "granite", "granitemoehybrid", "jamba", "lfm2", "llama", "llama4_text", "minimax_m2", "mistral", "mixtral", "olmo3",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "starcoder2",
)  # fmt: skip
FIELDS = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 12}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_kv_shape_of_each_model_type_matches_vllm_or_is_refused(model_type: str) -> None:
    """Transformers fills in what a file leaves out. A shape that the fields do not tell is left to a measurement."""
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.for_model(model_type, **FIELDS)
    except ValueError:
        pytest.skip(f"Transformers does not know {model_type}")
    text = hf_config.get_text_config()
    try:
        shape = kv_shape(text.to_dict())
    except ConfigError:
        return
    table = convertors.MODEL_ARCH_CONFIG_CONVERTORS
    convertor = table.get(model_type, convertors.ModelArchConfigConvertorBase)(hf_config, text)
    assert convertor.get_head_size() == shape.head_size
    assert shape.is_mla or convertor.get_total_num_kv_heads() == shape.kv_heads
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        counted = (shape.full_layers, shape.window_layers, shape.state_layers)
        named = [module._LAYER_KINDS[kind] for kind in kinds]
        assert counted == tuple(named.count(kind) for kind in ("full", "window", "state"))
