"""Engines that are refused for the hosts of their workers, or for the connectors beside ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtiers.connector.vllm import refusals
from kvtiers.connector.vllm.connector import KVTiersConnector
from kvtiers.connector.vllm.handed import handing_over
from kvtiers.connector.vllm.shared_storage import SharedStorageConnector
from kvtiers.connector.vllm.tier import KVTiersTier
from kvtiers.connector.vllm_config import connector_options
from kvtiers.tiers.errors import ConfigError
from tests.vllm.engines import FULL, kv_cache_config, offloading_config


def config(**changes: Any) -> Any:
    parallel = {"nnodes_within_dp": 1, "distributed_executor_backend": "mp", "world_size": 2, "placement_group": None}
    tiers = [{"type": "fs", "root_dir": "/kv"}]
    transfer = SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": "1GiB", "tiers": tiers})
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel | changes), kv_transfer_config=transfer)


@pytest.mark.parametrize(
    "fine",
    [
        config(),
        config(distributed_executor_backend="uni", world_size=1),
        config(distributed_executor_backend="external_launcher", world_size=1),
        config(distributed_executor_backend="ray"),
    ],
)
def test_engines_on_one_host_are_accepted(fine: Any) -> None:
    refusals.check_one_host(fine)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"nnodes_within_dp": 2},
            "tiers: --nnodes puts the workers on 2 hosts.*SharedStorageConnector.*/kv",
        ),
        ({"distributed_executor_backend": "external_launcher"}, "distributed_executor_backend: external_launcher"),
    ],
)
def test_engines_on_several_hosts_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        refusals.check_one_host(config(**changes))


SECRET = {"type": "fsspec", "url": "sftp://host/kv", "storage_options": {"password": "canary"}}
FS = {"type": "fs", "root_dir": "/kv"}
MEMORY = {"type": "memory", "max_bytes": "1GiB"}


@pytest.mark.parametrize(
    ("tiers", "instead"),
    [
        ([FS], {"tier": FS}),
        ([MEMORY, SECRET], {"config_file": "{file}", "index": 1}),
        ([SECRET], {"config_file": "{file}"}),
        ([MEMORY], None),
    ],
)
@pytest.mark.parametrize("way", ["spec", "tier", "inline"])
def test_options_in_the_error_of_several_hosts_are_accepted_and_hold_no_secret(
    tmp_path: Path, way: str, tiers: list[dict[str, Any]], instead: dict[str, Any] | None
) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(json.dumps({"region": {"size": "1GiB"}, "tiers": tiers}))
    engine = config(nnodes_within_dp=2)
    given = {"cpu_bytes_to_use": "1GiB", "tiers": tiers} if way == "inline" else {"way": way, "config_file": str(file)}
    engine.kv_transfer_config.kv_connector_extra_config = connector_options(given)
    with pytest.raises(ConfigError, match="on 2 hosts") as raised:
        refusals.check_one_host(engine)
    text = str(raised.value)
    assert "canary" not in text
    assert ("SharedStorageConnector" in text) == (instead is not None)
    if instead is not None:
        extra = json.loads(text.split("'")[-2])["kv_connector_extra_config"]
        path = "/path/to/kvtiers.yaml" if way == "inline" else str(file)
        assert extra == {name: path if value == "{file}" else value for name, value in instead.items()}
        if path == str(file):
            SharedStorageConnector.options_of(extra)


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        ({0: "here", 1: "here", 2: "elsewhere"}, False),  # the last bundle has no GPU: no worker is there
        ({0: "here", 1: "elsewhere", 2: "here"}, True),
        ({0: "elsewhere", 1: "elsewhere", 2: "here"}, True),  # all together, but not where the scheduler is
    ],
)
def test_ray_engine_is_refused_if_its_workers_are_on_another_node(
    monkeypatch: pytest.MonkeyPatch, places: dict[int, str], refused: bool
) -> None:
    """With Ray's answers made up; vLLM does not run with Ray on CPUs."""
    some = SimpleNamespace(bundle_specs=[{"GPU": 1.0}, {"GPU": 1.0, "CPU": 1.0}, {"CPU": 1.0}])
    util: Any = ModuleType("ray.util")
    util.placement_group_table = lambda group: {"bundles_to_node_id": places} if group is some else {}
    ray: Any = ModuleType("ray")
    ray.util = util
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    monkeypatch.setattr(refusals, "current_platform", SimpleNamespace(ray_device_key="GPU"))
    engine = config(distributed_executor_backend="ray", placement_group=some)
    if refused:
        with pytest.raises(ConfigError, match="Ray has put scheduler and workers on 2 nodes"):
            refusals.check_one_host(engine)
    else:
        refusals.check_one_host(engine)


def test_tier_of_engine_on_several_hosts_is_refused() -> None:
    with (
        handing_over(config(nnodes_within_dp=2), kv_cache_config(FULL)),
        pytest.raises(ConfigError, match="on 2 hosts"),
    ):
        KVTiersTier(offloading_config(), memoryview(bytearray(4096)), "KVTiersTier", tier={"type": "memory"})


# ---- connectors beside ours --------------------------------------------------------------------------------------


def fake(name: str, module: str = "vllm.elsewhere", **extra: Any) -> Any:
    """A connector of a class with this name."""
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    return type(name, (SimpleNamespace,), {"__module__": module})(_kv_transfer_config=transfer)


def several(*connectors: Any) -> Any:
    multi = fake("MultiConnector")
    multi._connectors = list(connectors)
    return multi


@pytest.fixture(params=["KVTiersConnector", "SharedStorageConnector"])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(OffloadingConnector, "register_kv_caches", lambda *_: None)
    cls: Any = {"KVTiersConnector": KVTiersConnector, "SharedStorageConnector": SharedStorageConnector}[request.param]
    connector = cls.__new__(cls)
    connector._worker = SimpleNamespace(register=lambda _: None)
    connector._kv_transfer_config = SimpleNamespace(kv_connector_extra_config={})
    return connector


def in_worker(top: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "get_kv_transfer_group", lambda: top)
    monkeypatch.setattr(refusals, "has_kv_transfer_group", lambda: True)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (fake("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (fake("DecodeBenchConnector"), "DecodeBenchConnector"),
        (fake("NobodyKnowsIt"), "NobodyKnowsIt"),
        (fake("MooncakeStoreConnector", load_async=False), "MooncakeStoreConnector"),
        (fake("OffloadingConnector", sync_load_budget_bytes=1), "OffloadingConnector"),
        (fake("NixlConnector", "elsewhere"), "NixlConnector"),
        (several(several(fake("ExampleConnector"))), "ExampleConnector"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_second_connector_that_may_load_within_a_step_is_refused_at_start(
    ours: Any, other: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_worker(several(fake("NixlConnector"), ours, other), monkeypatch)
    with pytest.raises(
        ConfigError, match=f"^connectors: {named} may load within a step.*Take it out of MultiConnector"
    ):
        ours.register_kv_caches({})


def test_second_connector_that_loads_between_steps_is_accepted(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NixlConnector", "LMCacheMPConnector", "MooncakeStoreConnector", "OffloadingConnector")
    for top in (several(ours, *map(fake, names)), several(several(ours), fake("NixlConnector")), ours):
        in_worker(top, monkeypatch)
        ours.register_kv_caches({})


def test_second_kvtiers_connector_is_refused_before_its_region_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (
        fake("KVTiersConnector", KVTiersConnector.__module__),
        several(fake("KVTiersConnector", "kvtiers.connector.vllm.x")),
    ):
        ours = fake("KVTiersConnector", KVTiersConnector.__module__)
        in_worker(several(ours, fake("NixlConnector"), other), monkeypatch)
        with pytest.raises(
            ConfigError,
            match="^connectors: MultiConnector holds KVTiersConnector 2 times.*one KVTiersConnector with the tiers",
        ):
            KVTiersConnector.register_kv_caches(ours, {})
