"""What vLLM must hand over before an engine starts: without it KV of different models would be mixed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from connector.vllm import translate
from connector.vllm.spec import KVTiersSpec
from connector.vllm.tier import KVTiersTier
from tests.vllm import engines
from tests.vllm.engines import offloading_config
from tiers.errors import ConfigError

pytestmark = pytest.mark.bare_stack


def spec() -> None:
    made = KVTiersSpec(offloading_config({"cpu_bytes_to_use": 1 << 20, "tiers": []}))
    made.get_worker(engines.kv_caches(4)[1]).shutdown()
    made.get_manager().shutdown()


def tier() -> None:
    offloading_spec = SimpleNamespace(config=offloading_config(), blocks_per_chunk=1)
    view = memoryview(bytearray(4096)).cast("B", (1, 4096))
    KVTiersTier(offloading_spec, view, "KVTiersTier", tier={"type": "memory"}).shutdown()


def between(vllm_config: Any, kv_cache_config: Any, make: Any) -> None:
    """Make something below a frame that has these."""
    assert (vllm_config or kv_cache_config) is not None
    make()


@pytest.mark.parametrize("make", [spec, tier])
@pytest.mark.parametrize("missing", ["vllm_config", "kv_cache_config"])
def test_a_start_that_does_not_see_the_whole_config_is_refused(make: Any, missing: str) -> None:
    found = {"vllm_config": engines.VllmConfig(), "kv_cache_config": engines.kv_cache_config(engines.FULL)}
    between(**found, make=make)
    translate.warn_of_adapters.cache_clear()
    with pytest.raises(ConfigError, match=f"^{missing}: .* was expected to call kvtiers with"):
        between(**found | {missing: None}, make=make)


@pytest.mark.skipif(not translate._MISTAKES_BLOCKS_OF_STREAMS, reason="this vLLM takes no block for another")
def test_a_request_that_is_not_handed_over_is_an_error() -> None:
    with pytest.raises(ConfigError, match="^request: "):
        translate.new_request_context()
