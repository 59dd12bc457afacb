"""Models and layouts of which a stored block would not be what its key says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingCacheConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtiers.connector.vllm import kv_groups
from kvtiers.connector.vllm.handed import handing_over
from kvtiers.connector.vllm.spec import KVTiersSpec
from kvtiers.tiers.errors import ConfigError
from tests.vllm import engines
from tests.vllm.engines import BLOCK_BYTES, CHUNKED, FULL, MAMBA, SLIDING, VllmConfig, offloading_config

CHUNK = 4
UNIFORM = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer0": SLIDING})

WINDOWS = pytest.mark.parametrize(
    ("kinds", "has_window"),
    [
        ([FULL], False),
        ([FULL, MAMBA], False),  # of a state vLLM stores and loads one block of a chunk
        ([SLIDING], True),
        ([UNIFORM], True),
        ([FULL, SLIDING], True),
        ([FULL, MAMBA, SLIDING], True),
        ([CHUNKED, FULL], True),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, list) else "",
)


def made_by(kv_cache_config: KVCacheConfig, make: Any) -> Any:
    """What is made while a connector with this config is under construction."""
    with handing_over(VllmConfig(), kv_cache_config):
        return make()


def config_of(kinds: list[Any], extra: dict[str, Any], blocks_per_chunk: int = CHUNK, **changes: Any) -> Any:
    cache = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk)
    return offloading_config(extra, groups=engines.groups(len(kinds)), cache=cache, **changes)


@pytest.mark.skipif(not hasattr(kv_cache_interface, "RSWASpec"), reason="this vLLM has no R-SWA")
def test_window_over_generated_tokens_counts_as_a_window() -> None:
    """It is full attention to vLLM, and what lies between the prompt and the window is freed all the same."""
    rswa = engines.attention(kv_cache_interface.RSWASpec, rswa_window=32)
    extra = {"cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": 1, "tiers": [{"type": "memory"}]}
    config = config_of([rswa], extra)
    assert kv_groups.has_window(kv_groups.stored_layers(config, engines.kv_cache_config(rswa)))


@pytest.mark.parametrize("told", [True, False], ids=["told", "from_the_file"])
@WINDOWS
def test_model_with_window_or_state_uses_chunks_of_one_block(
    kinds: list[Any], has_window: bool, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM offers a chunk of which a request has the last block, and hands over those that it has."""
    path = tmp_path / "config.yaml"
    path.write_text(f"blocks_per_chunk: {CHUNK}\nregion: {{size: 1MiB}}\ntiers: [{{type: memory}}]\n")
    extra = {"config_file": str(path)} | ({"blocks_per_chunk": CHUNK} if told else {})
    config = config_of(kinds, extra, CHUNK if told else 1)
    if has_window and told and hasattr(config.groups[0], "sliding_window_size_in_chunks"):
        with pytest.raises(ConfigError, match="set blocks_per_chunk: 1 for this model"):
            made_by(engines.kv_cache_config(*kinds), lambda: KVTiersSpec(config))
        return
    spec = made_by(engines.kv_cache_config(*kinds), lambda: KVTiersSpec(config))
    has_state = MAMBA in kinds  # a prompt's last one would not be at the end of a larger chunk
    assert spec.blocks_per_chunk == spec.config.cache.blocks_per_chunk == (1 if has_window or has_state else CHUNK)
    assert spec.config.groups == config.groups  # 0.33 has counted their windows in chunks of one block
    assert ("blocks_per_chunk is 4 and 1 is used" in caplog.text) == (has_window or has_state)


@pytest.mark.parametrize("blocks_per_chunk", [1, CHUNK])
@WINDOWS
def test_window_with_larger_chunks_is_refused_behind_vllm_spec(
    kinds: list[Any], has_window: bool, blocks_per_chunk: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": {"type": "memory"}}
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}
    spec = TieringOffloadingSpec(config_of(kinds, extra, blocks_per_chunk))
    if has_window and blocks_per_chunk > 1:
        with pytest.raises(ConfigError, match="set blocks_per_chunk: 1 for this model"):
            made_by(engines.kv_cache_config(*kinds), spec.get_manager)
    else:
        made_by(engines.kv_cache_config(*kinds), spec.get_manager).shutdown()
        assert ("most prompts will have no hits" in caplog.text) == (MAMBA in kinds and blocks_per_chunk > 1)


@pytest.mark.parametrize(
    ("kinds", "layout", "refused"),
    [
        ([FULL], "LHBNC", True),
        ([FULL], "LBHNC", False),
        ([FULL], "BLHNC", False),
        ([FULL, MAMBA], "BLHNC", False),
        ([MAMBA], "BLHNC", True),
        ([MAMBA, MAMBA], "BHLNC", True),
        ([MAMBA], "LBNHC", False),
    ],
)
def test_layouts_for_which_vllm_passes_wrong_bytes_are_refused(kinds: list[Any], layout: str, refused: bool) -> None:
    tier = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": {"type": "memory"}}
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}
    behind = TieringOffloadingSpec(config_of(kinds, extra, 1, kv_cache_layout=layout))
    ours = config_of(kinds, {"cpu_bytes_to_use": "1MiB"}, 1, kv_cache_layout=layout)
    for make in (lambda: KVTiersSpec(ours), behind.get_manager):
        if refused:
            with pytest.raises(ConfigError, match="kv_cache_layout: is .* set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"):
                made_by(engines.kv_cache_config(*kinds), make)
        else:
            made = made_by(engines.kv_cache_config(*kinds), make)
            getattr(made, "shutdown", lambda: None)()


def refusal(kind: Any, **extra: Any) -> str:
    """Of both ways."""
    config = config_of([kind], {"cpu_bytes_to_use": "1MiB", **extra}, 1)
    tier = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": {"type": "memory"}}
    behind = TieringOffloadingSpec(
        config_of([kind], {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier], **extra}, 1)
    )
    said = set()
    for make in (lambda: KVTiersSpec(config), behind.get_manager):
        with pytest.raises(ConfigError) as caught:
            made_by(engines.kv_cache_config(kind), make)
        said.add(str(caught.value))
    (one,) = said
    return one


@pytest.mark.skipif(not hasattr(FULL, "non_causal"), reason="this vLLM has no prefix LM")
def test_model_with_non_causal_attention_is_refused() -> None:
    """vLLM does without its own prefix cache there."""
    assert "attention is not causal" in refusal(replace(FULL, non_causal=True))


@pytest.mark.parametrize("kind", [CrossAttentionSpec, EncoderOnlyAttentionSpec])
def test_kind_of_kv_not_known_to_depend_on_prefix_alone_is_refused(kind: Any) -> None:
    """Any kind that a later vLLM adds is refused as well."""
    assert f"has layers of {kind.__name__}" in refusal(engines.attention(kind))


@pytest.mark.skipif(not hasattr(kv_cache_interface, "RSWASpec"), reason="this vLLM has no R-SWA")
def test_rswa_model_with_generated_blocks_offloaded_is_refused() -> None:
    rswa = engines.attention(kv_cache_interface.RSWASpec, rswa_window=32)
    assert refusal(rswa, offload_prompt_only=False).startswith("offload_prompt_only: is false")


def test_tensors_with_only_a_part_of_each_block_are_refused() -> None:
    _, whole = engines.kv_caches(4)
    part = CanonicalKVCaches(whole.tensors[:1], [whole.group_data_refs[0][:1]])
    one, two = (
        made_by(engines.kv_cache_config(*kinds), lambda: KVTiersSpec(offloading_config({"cpu_bytes_to_use": "1MiB"})))
        for kinds in ([FULL], [FULL, MAMBA])
    )
    with pytest.raises(ConfigError, match=f"only {BLOCK_BYTES // 2} of the {BLOCK_BYTES} bytes of a block"):
        one.get_worker(part)
    two.get_worker(part).shutdown()  # a second group, which vLLM does not offload, may have the rest
