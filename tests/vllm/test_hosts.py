from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from connector.vllm import hosts
from connector.vllm.handed import handing_over
from connector.vllm.tier import KVTiersTier
from tests.vllm.engines import FULL, kv_cache_config, offloading_config
from tiers.errors import ConfigError


def config(**changes: Any) -> Any:
    parallel = {"nnodes_within_dp": 1, "distributed_executor_backend": "mp", "world_size": 2, "placement_group": None}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel | changes))


@pytest.mark.parametrize(
    "fine",
    [
        config(),
        config(distributed_executor_backend="uni", world_size=1),
        config(distributed_executor_backend="external_launcher", world_size=1),
        config(distributed_executor_backend="ray"),
    ],
)
def test_engines_on_one_host_are_taken(fine: Any) -> None:
    hosts.check_one_host(fine)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nnodes_within_dp": 2}, "--nnodes puts the workers on 2 hosts"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_engines_on_several_hosts_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"tiers: {why}.*SharedStorageConnector"):
        hosts.check_one_host(config(**changes))


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        ({0: "here", 1: "here", 2: "elsewhere"}, False),  # the last bundle has no GPU: no worker is there
        ({0: "here", 1: "elsewhere", 2: "here"}, True),
        ({0: "elsewhere", 1: "elsewhere", 2: "here"}, True),  # all together, but not where the scheduler is
    ],
)
def test_rays_nodes_are_looked_up(monkeypatch: pytest.MonkeyPatch, places: dict[int, str], refused: bool) -> None:
    """With Ray's answers made up; vLLM does not run with Ray on CPUs."""
    some = SimpleNamespace(bundle_specs=[{"GPU": 1.0}, {"GPU": 1.0, "CPU": 1.0}, {"CPU": 1.0}])
    util: Any = ModuleType("ray.util")
    util.placement_group_table = lambda group: {"bundles_to_node_id": places} if group is some else {}
    ray: Any = ModuleType("ray")
    ray.util = util
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    monkeypatch.setattr(hosts, "current_platform", SimpleNamespace(ray_device_key="GPU"))
    engine = config(distributed_executor_backend="ray", placement_group=some)
    if refused:
        with pytest.raises(ConfigError, match="Ray has put scheduler and workers on 2 nodes"):
            hosts.check_one_host(engine)
    else:
        hosts.check_one_host(engine)


def test_a_tier_asks() -> None:
    with (
        handing_over(config(nnodes_within_dp=2), kv_cache_config(FULL)),
        pytest.raises(ConfigError, match="on 2 hosts"),
    ):
        KVTiersTier(offloading_config(), memoryview(bytearray(4096)), "KVTiersTier", tier={"type": "memory"})
