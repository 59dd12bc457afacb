"""Connectors beside ours in vLLM's MultiConnector, whose loads may fail within a step."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from connector.vllm import siblings
from connector.vllm.shared_storage import SharedStorageConnector
from connector.vllm.spec import KVTiersManager, KVTiersSpec
from connector.vllm.tier import KVTiersTier
from tests.vllm.engines import BLOCK_BYTES, FULL, VllmConfig, kv_cache_config, offloading_config
from tiers.errors import ConfigError

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
OURS = {"kv_connector": "OffloadingConnector"}
PREFIXES = {"kv_connector": "SharedStorageConnector", "kv_connector_module_path": "connector.vllm.shared_storage"}
MAKES_UP = {"kv_connector": "DecodeBenchConnector"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1"}


def beside(*others: dict[str, Any]) -> VllmConfig:
    """The config of a MultiConnector; what is built beside a variable ``vllm_config`` with it sees it."""
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [*others, OURS]}}
    return VllmConfig(kv_transfer_config=SimpleNamespace(**transfer))


def tier_of(vllm_config: Any) -> KVTiersTier:
    """Made while a connector with this config is under construction."""
    assert vllm_config is not None
    spec = SimpleNamespace(config=offloading_config(), blocks_per_chunk=1)
    return KVTiersTier(spec, memoryview(bytearray(4096)).cast("B", (1, 4096)), "x", tier={"type": "memory"})


def spec_of(vllm_config: Any) -> KVTiersManager:
    """As ``tier_of``."""
    assert vllm_config is not None
    config = offloading_config({"cpu_bytes_to_use": 16 * BLOCK_BYTES, "tiers": []}, engine_id=f"pytest-{os.getpid()}")
    return KVTiersSpec(config).get_manager()


LOADING_WITHIN_STEPS = pytest.mark.parametrize(
    ("other", "named"),
    [
        (LMCACHE, "LMCacheConnectorV1"),
        ({"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": {"load_async": False}}, "Mooncake"),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "elsewhere"}, "NixlConnector"),
    ],
)


@LOADING_WITHIN_STEPS
def test_way_tier_refuses_a_connector_beside_it_that_may_load_within_a_step(other: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"connectors: {named}.*SharedStorageConnector"):
        tier_of(beside(PREFIXES, other))


@LOADING_WITHIN_STEPS
def test_way_spec_refuses_a_connector_beside_it_that_may_load_within_a_step(other: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"connectors: {named}.*SharedStorageConnector"):
        spec_of(beside(PREFIXES, other))


def test_connectors_beside_ours_may_load_between_steps() -> None:
    names = ("NixlConnector", "LMCacheMPConnector", "MooncakeStoreConnector")
    others = beside(PREFIXES, *({"kv_connector": name} for name in names))
    tier_of(others).shutdown()
    tier_of(VllmConfig()).shutdown()
    spec_of(others).shutdown()


def test_a_connector_that_makes_kv_up_is_refused_beside_ours() -> None:
    vllm_config = beside(PREFIXES, MAKES_UP)
    with pytest.raises(ConfigError, match="DecodeBenchConnector"):
        tier_of(vllm_config)
    with pytest.raises(ConfigError, match="DecodeBenchConnector"):
        spec_of(vllm_config)
    with pytest.raises(ConfigError, match="DecodeBenchConnector"):
        SharedStorageConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config(FULL))


SEEN: list[list[str]] = []


class Probe(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Stands for ours inside vLLM's MultiConnector, which makes it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        SEEN.append(siblings.loading_within_steps())

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None


def several(*connectors: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


PROBE = {"kv_connector": "Probe", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
FILES = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (several(several(PROBE), FILES), ["ExampleConnector", "Probe"]),
        (several(FILES, several(several(PROBE))), ["ExampleConnector", "Probe"]),
        (several(several(FILES), PROBE), ["ExampleConnector", "Probe"]),
        (several(several({**OURS, "kv_role": "kv_both"}), PROBE), ["Probe"]),
    ],
)
def test_a_multiconnector_in_another_hides_no_connector(
    engine: dict[str, Any], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("example_connector.ExampleConnector", "offloading_connector.OffloadingConnector"):
        monkeypatch.setattr(f"{V1}.{name}.__init__", lambda *_: None)
    SEEN.clear()
    vllm_config = VllmConfig(
        kv_transfer_config=KVTransferConfig(**engine),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    MultiConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config(FULL))
    assert [sorted(each) for each in SEEN] == [named]


def test_a_block_of_a_failed_load_is_good_again_when_it_holds_another() -> None:
    untrusted = siblings.Untrusted(steps_max=2)
    untrusted.note([(1, b"1")])
    untrusted.begin_step()
    untrusted.note([(2, b"2")])
    assert not untrusted.has_any([(1, b"1"), (2, b"2")])
    untrusted.load_failed()
    assert untrusted.has_any([(1, b"1")])
    assert untrusted.has_any([(2, b"2")])
    assert not untrusted.has_any([(1, b"2"), (2, b"1"), (3, b"1")])
