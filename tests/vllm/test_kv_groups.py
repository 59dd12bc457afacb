"""Models and layouts of which a stored block would not be what its key says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingCacheConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtiers.connector.vllm import kv_groups, translate
from kvtiers.connector.vllm.handed import handed_over, handing_over
from kvtiers.connector.vllm.spec import KVTiersSpec
from kvtiers.tiers.errors import ConfigError
from tests.vllm import engines
from tests.vllm.engines import BLOCK_BYTES, CHUNKED, FULL, MAMBA, SLIDING, VllmConfig, offloading_config
from tests.vllm.test_translate import some_vllm_config

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
def test_a_window_of_what_was_generated_is_one() -> None:
    """It is full attention to vLLM, and what lies between the prompt and the window is freed all the same."""
    rswa = engines.attention(kv_cache_interface.RSWASpec, rswa_window=32)
    extra = {"cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": 1, "tiers": [{"type": "memory"}]}
    config = config_of([rswa], extra)
    assert kv_groups.has_window(kv_groups.stored_layers(config, engines.kv_cache_config(rswa)))


@pytest.mark.parametrize("told", [True, False], ids=["told", "from_the_file"])
@WINDOWS
def test_a_window_is_stored_block_by_block(
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
def test_vllms_own_spec_is_told_to_store_a_window_block_by_block(
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
def test_layouts_of_which_vllm_hands_over_other_bytes_are_refused(kinds: list[Any], layout: str, refused: bool) -> None:
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
def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    """vLLM does without its own prefix cache there."""
    assert "attention is not causal" in refusal(replace(FULL, non_causal=True))


@pytest.mark.parametrize("kind", [CrossAttentionSpec, EncoderOnlyAttentionSpec])
def test_kind_of_kv_not_known_to_depend_on_prefix_alone_is_refused(kind: Any) -> None:
    """Any kind that a later vLLM adds is refused as well."""
    assert f"has layers of {kind.__name__}" in refusal(engines.attention(kind))


@pytest.mark.skipif(not hasattr(kv_cache_interface, "RSWASpec"), reason="this vLLM has no R-SWA")
def test_what_an_rswa_model_has_generated_is_not_stored() -> None:
    rswa = engines.attention(kv_cache_interface.RSWASpec, rswa_window=32)
    assert refusal(rswa, offload_prompt_only=False).startswith("offload_prompt_only: is false")


def test_pages_that_are_less_than_a_block_are_refused() -> None:
    _, whole = engines.kv_caches(4)
    part = CanonicalKVCaches(whole.tensors[:1], [whole.group_data_refs[0][:1]])
    one, two = (
        made_by(engines.kv_cache_config(*kinds), lambda: KVTiersSpec(offloading_config({"cpu_bytes_to_use": "1MiB"})))
        for kinds in ([FULL], [FULL, MAMBA])
    )
    with pytest.raises(ConfigError, match=f"only {BLOCK_BYTES // 2} of the {BLOCK_BYTES} bytes of a block"):
        one.get_worker(part)
    two.get_worker(part).shutdown()  # a second group, which vLLM does not offload, may have the rest


MLA = replace(engines.attention(MLAAttentionSpec), block_size=32)
MLA_BYTES = BLOCK_BYTES
MAMBA_OF_MANY = replace(MAMBA, block_size=32)
INDEXER = replace(MLA, head_size=132, dtype=torch.uint8)
SINCE_29 = pytest.mark.skipif(
    not hasattr(kv_cache_interface, "create_kv_cache_views"), reason="a kernel's block may have all layers in it"
)


def on_gpus(make: Any, kinds: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is made on two generations of GPUs, by engines with two attention backends, for a model of these kinds."""

    made = []
    for backend, capability in (("FLASHMLA", (9, 0)), ("CUTLASS_MLA", (10, 0))):
        cuda = SimpleNamespace(
            is_cpu=lambda: False,
            is_rocm=lambda: False,
            is_cuda=lambda: True,
            device_name="cuda",
            get_device_capability=lambda capability=capability: capability,
        )
        for module in (translate, kv_groups):
            monkeypatch.setattr(module, "current_platform", cuda)
        vllm_config = some_vllm_config(get_head_size=lambda: 64)
        vllm_config.attention_config = SimpleNamespace(backend=backend)
        vllm_config.parallel_config = SimpleNamespace(distributed_executor_backend="uni")
        with handing_over(vllm_config, engines.kv_cache_config(*kinds)):
            made.append(make())
    return made


def platforms_of(
    kinds: list[Any], tokens_per_block: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch, *, layers: int = 1
) -> set[str | None]:
    group = replace(engines.groups(1)[0], tokens_per_block=tokens_per_block, layer_names=tuple("ab"[:layers]))
    config = offloading_config(groups=(group,), worker_kv_bytes_per_block=block_bytes)

    def make() -> str | None:
        handed = handed_over()
        layers = kv_groups.stored_layers(config, handed.kv_cache_config)
        by_token = kv_groups.is_in_token_order(layers, config, handed.vllm_config)
        spec = translate.engine_spec(config, handed.vllm_config, by_token=by_token)
        return spec.config.platform

    return set(on_gpus(make, kinds, monkeypatch))


@SINCE_29
@pytest.mark.parametrize("way", ["tier", "spec"])
def test_blocks_of_plain_mla_have_one_namespace_on_all_gpus(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "min_free": 0}
    behind = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": tier}
    extra = {"secondary_tiers": [behind]} if way == "tier" else {"tiers": [tier]}

    def make() -> None:
        group = replace(engines.groups(1)[0], tokens_per_block=32)
        config = offloading_config({"cpu_bytes_to_use": 1 << 20} | extra, groups=(group,))
        if way == "tier":
            TieringOffloadingSpec(config).get_manager().shutdown()
            return
        spec = KVTiersSpec(config)
        worker = spec.get_worker(engines.kv_caches(4)[1])
        spec.get_manager().shutdown()
        worker.shutdown()

    on_gpus(make, [MLA], monkeypatch)
    (found,) = tmp_path.glob("*/config.json")
    assert json.loads(found.read_text())["platform"] == "cuda"


@SINCE_29
@pytest.mark.parametrize("layers", [1, 2])
def test_plain_mla_is_alike_on_all_gpus(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert platforms_of([MLA], 32, layers * MLA_BYTES, monkeypatch, layers=layers) == {"cuda"}
    wrapped = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict.fromkeys("ab"[:layers], MLA))
    assert platforms_of([wrapped], 32, layers * MLA_BYTES, monkeypatch, layers=layers) == {"cuda"}


def test_blocks_that_no_kernel_cuts_are_alike_however_many_ranks_share_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert platforms_of([FULL], 32, 2048, monkeypatch) == {"cuda"}


@pytest.mark.parametrize(
    ("kind", "layers", "block_bytes"),
    [
        (replace(FULL, block_size=32), 1, 2 * 32 * 64 * 2),
        (MLA, 2, MLA_BYTES + 32 * 132),  # one of the two layers is an indexer, which the scheduler is not shown
        (INDEXER, 2, MLA_BYTES + 32 * 132),
        (INDEXER, 1, 32 * 132),
        (replace(MLA, page_size_padded=2 * MLA_BYTES), 1, 2 * MLA_BYTES),
        (MAMBA_OF_MANY, 1, 32),
    ],
    ids=["heads", "indexer", "indexer-shown", "indexer-alone", "padded", "mamba"],
)
def test_what_kernels_may_order_is_kept_apart(
    kind: Any, layers: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(platforms_of([kind], kind.block_size, block_bytes, monkeypatch, layers=layers)) == 2
