"""translate: vLLM's values in ours, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium

from connector.vllm import translate
from tests.vllm.engines import keys, offloading_config, request
from tiers.base import JobResult, OffloadingEvent
from tiers.errors import ConfigError
from tiers.file_mapper import FileMapper, strict_fields


def test_the_installed_version_is_accepted() -> None:
    translate.check_version()
    translate.check_version(vllm.__version__)


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0", "0.3.2", "dev"])
def test_another_version_is_refused_with_the_list(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.28\.x, 0\.29\.x, 0\.30\.x, 0\.31\.x, 0\.32\.x, 0\.33\.x"):
        translate.check_version(version)


@pytest.mark.parametrize(
    ("version", "environ", "warns"),
    [
        ("0.28.0", {}, True),
        ("0.28.1", {"PYTHONHASHSEED": "random"}, True),
        ("0.28.0", {"PYTHONHASHSEED": "0"}, False),
        ("0.29.0", {}, False),
    ],
)
def test_hashes_that_no_other_process_has_are_warned_of(
    version: str, environ: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    translate.warn_of_seeded_hashes(version, environ)
    assert ("PYTHONHASHSEED" in caplog.text) == warns


def test_answers() -> None:
    assert translate.lookup_result(True) is LookupResult.HIT
    assert translate.lookup_result(False) is LookupResult.MISS
    assert translate.lookup_result(None) is LookupResult.RETRY


@pytest.mark.parametrize("ids", ["chunk_ids", "block_ids"])
def test_a_jobs_keys_and_ids_stay_parallel_under_either_name(ids: str) -> None:
    some = set(keys(5))
    job = SimpleNamespace(job_id=7, keys=some, req_context=request(), **{ids: np.arange(5, dtype=np.int32)})
    ours = translate.job_metadata(job)
    assert ours.job_id == 7
    assert list(ours.keys) == list(some)
    assert ours.block_ids.tolist() == [0, 1, 2, 3, 4]


def test_results_say_which_keys_succeeded_only_where_some_did_not() -> None:
    one, other = keys(2)
    whole = translate.job_result(JobResult(1, True, (one, other), 0.5, 10))
    assert (whole.success, whole.successful_keys, whole.transfer_time, whole.transfer_bytes) == (True, None, 0.5, 10)
    assert translate.job_result(JobResult(1, False, (one,))).successful_keys == (one,)
    assert translate.job_result(JobResult(1, False)).successful_keys is None


def test_events_carry_medium_and_locality() -> None:
    some = tuple(keys(2))
    ours = [OffloadingEvent(some, "s3", removed=False), OffloadingEvent(some, "CPU", removed=True)]
    stored, removed = translate.events(ours, Locality.REMOTE)
    assert (stored.keys, stored.medium, stored.removed) == (list(some), Medium.STORAGE, False)
    assert stored.locality is Locality.REMOTE
    assert (removed.medium, removed.removed) == (Medium.CPU, True)


def test_locality_is_the_types_unless_asked_otherwise() -> None:
    assert translate.locality("fs") is Locality.LOCAL
    assert translate.locality("s3") is Locality.REMOTE
    assert translate.locality("fs", "REMOTE") is Locality.REMOTE
    assert translate.locality("foreign") is None
    with pytest.raises(ConfigError, match="LOCAL or REMOTE"):
        translate.locality("fs", "elsewhere")


class VllmConfig(SimpleNamespace):
    """Has the name that is looked for."""


def built_by(vllm_config: Any, **changes: Any) -> translate.EngineSpec:
    """What a spec is that is made while a connector with this config is under construction."""
    assert vllm_config is not None
    return translate.engine_spec(SimpleNamespace(config=offloading_config(**changes)))


def some_vllm_config(**changes: Any) -> VllmConfig:
    model = {"revision": "main", "quantization": None, "hf_config": SimpleNamespace(_commit_hash=None)} | changes
    return VllmConfig(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=changes.get("algorithm", "sha256_cbor")),
    )


def test_revision_and_hash_algorithm_come_from_the_connectors_config() -> None:
    config = built_by(some_vllm_config()).config
    assert config.model.revision == "main"
    assert config.cache.hash_algorithm == "sha256_cbor"
    assert config.kv_cache_layout == "LBHNC"


def test_the_commit_counts_more_than_the_revision_and_quantization_is_part_of_it() -> None:
    commit = SimpleNamespace(_commit_hash="c0ffee")
    assert built_by(some_vllm_config(hf_config=commit)).config.model.revision == "c0ffee"
    assert built_by(some_vllm_config(hf_config=commit, quantization="fp8")).config.model.revision == "c0ffee+fp8"


def folder(spec: translate.EngineSpec) -> str:
    return FileMapper.from_offloading_spec("", spec, parallel_agnostic=True, extra_fields=strict_fields(spec)).base_path


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 2, "world_size": 2},
        {"pp_size": 2, "world_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"kv_cache_layout": "BLHNC"},
        {"canonical_layout": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_each_identity_field_alone_is_another_namespace(changes: dict[str, Any]) -> None:
    config = some_vllm_config()
    assert folder(built_by(config, **changes)) != folder(built_by(config))


def test_weights_and_hashes_are_part_of_the_namespace() -> None:
    folders = {
        folder(built_by(some_vllm_config(**changes)))
        for changes in ({}, {"revision": "v2"}, {"quantization": "fp8"}, {"algorithm": "xxhash_cbor"})
    }
    assert len(folders) == 4


def test_tp_sizes_share_blocks_only_in_the_canonical_layout() -> None:
    config = some_vllm_config()
    two = {"tp_size": 2, "world_size": 2, "is_parallelism_agnostic": True}
    assert folder(built_by(config, **two)) != folder(built_by(config, is_parallelism_agnostic=True))
    one = built_by(config, is_parallelism_agnostic=True, canonical_layout=True)
    assert folder(built_by(config, canonical_layout=True, **two)) == folder(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cpus_whose_kernels_pack_kv_in_another_order_share_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = some_vllm_config(dtype=dtype, get_head_size=lambda: 64)
    folders = set()
    for supports_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=supports_amx: answer)
        folders.add(folder(built_by(config)))
    assert len(folders) == (2 if dtype is torch.bfloat16 else 1)


def test_cpus_are_told_apart_where_vllm_does_not_say_what_its_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    platforms = set()
    for supports_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=supports_amx: answer)
        platforms.add(built_by(some_vllm_config(dtype=torch.bfloat16, get_head_size=lambda: 64)).config.platform)
    assert len(platforms) == 2
    assert all(str(each).startswith("cpu:") for each in platforms)


def test_a_platform_that_is_no_cpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_name="cuda"))
    assert built_by(some_vllm_config()).config.platform == "cuda"
