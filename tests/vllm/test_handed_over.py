"""A spec or a tier that does not see vLLM's whole config: KV of different models would be mixed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from kvtiers.connector.vllm.handed import handed_over, handing_over
from kvtiers.connector.vllm.spec import KVTiersSpec
from kvtiers.connector.vllm.tier import KVTiersTier
from kvtiers.tiers.errors import ConfigError
from tests.vllm import engines
from tests.vllm.engines import offloading_config

pytestmark = pytest.mark.outside

BOTH = (engines.VllmConfig(), engines.kv_cache_config(engines.FULL))


def spec() -> None:
    made = KVTiersSpec(offloading_config({"cpu_bytes_to_use": 1 << 20, "tiers": []}))
    made.get_worker(engines.kv_caches(4)[1]).shutdown()
    made.get_manager().shutdown()


def tier() -> None:
    offloading_spec = SimpleNamespace(config=offloading_config(), blocks_per_chunk=1)
    view = memoryview(bytearray(4096)).cast("B", (1, 4096))
    KVTiersTier(offloading_spec, view, "KVTiersTier", tier={"type": "memory"}).shutdown()


@pytest.mark.parametrize("make", [spec, tier])
def test_spec_or_tier_outside_a_connector_is_refused_with_the_options_to_write(make: Any) -> None:
    with handing_over(*BOTH):
        make()
    with pytest.raises(ConfigError, match='kv_connector: .*"kv_connector": "KVTiersConnector"'):
        make()


@pytest.mark.parametrize("make", [spec, tier])
@pytest.mark.parametrize("handed", [(None, BOTH[1]), (BOTH[0], None)])
def test_spec_or_tier_with_part_of_the_config_is_refused(make: Any, handed: Any) -> None:
    with handing_over(*handed), pytest.raises(ConfigError, match="whole config"):
        make()


def test_each_of_several_connectors_hands_over_its_own_config() -> None:
    outer, inner = (engines.VllmConfig(kv_transfer_config=SimpleNamespace(kv_role=role)) for role in ("a", "b"))
    with handing_over(outer, BOTH[1]):
        with handing_over(inner, BOTH[1]):
            assert handed_over().vllm_config is inner
        assert handed_over().vllm_config is outer
