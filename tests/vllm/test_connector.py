"""KVTiersConnector: from what an operator writes to the spec or the tiers inside it."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from kvtiers.connector.ranks.place import ignored_options
from kvtiers.connector.vllm import translate
from kvtiers.connector.vllm.connector import KVTiersConnector
from kvtiers.connector.vllm.handed import handed_over
from kvtiers.connector.vllm_config import deployment_from
from kvtiers.connector.vllm_config import vllm_config as printed
from kvtiers.tiers.errors import ConfigError
from tests.tiny_model import make_model_dir
from tests.vllm.engines import FULL, VllmConfig, kv_cache_config

pytestmark = pytest.mark.outside

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
(ENTRY_POINT,) = (
    EntryPoint(name, value, "vllm.general_plugins")
    for name, value in PROJECT["entry-points"]["vllm.general_plugins"].items()
)


def config_of(extra: dict[str, Any]) -> VllmConfig:
    transfer = KVTransferConfig(kv_connector="KVTiersConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    return VllmConfig(kv_transfer_config=transfer)


def made(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A connector without vLLM's part of it; and the options that this part gets."""
    told: list[Any] = []

    def make_vllms_part(made: Any, vllm_config: Any, role: Any, kv_caches: Any) -> None:
        assert handed_over().vllm_config is vllm_config
        assert handed_over().kv_cache_config is kv_caches
        made.connector_scheduler = None
        told.append(vllm_config.kv_transfer_config.kv_connector_extra_config)

    monkeypatch.setattr(OffloadingConnector, "__init__", make_vllms_part)
    connector = KVTiersConnector(config_of(extra), KVConnectorRole.SCHEDULER, kv_cache_config(FULL))
    (options,) = told
    with pytest.raises(ConfigError):
        handed_over()  # only while it is made
    return connector, options


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtiers.yaml"
    tiers = [{"type": "fs", "root_dir": str(tmp_path / name)} for name in "ab"]
    path.write_text(f"region: {{size: 1GiB, eviction_policy: arc}}\nblocks_per_chunk: 4\ntiers: {json.dumps(tiers)}\n")
    return path


def test_connector_makes_kvtiers_spec_by_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"config_file": str(file), "offload_prompt_only": False}
    _, options = made(extra, monkeypatch)
    assert options == {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.vllm", **extra}


def test_config_file_in_environment_is_used_if_options_name_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERS_CONFIG", str(file))
    assert made({}, monkeypatch)[1]["config_file"] == str(file)
    assert made({"way": "tier"}, monkeypatch)[1]["cpu_bytes_to_use"] == 1 << 30
    inline = {"cpu_bytes_to_use": 1 << 20, "tiers": []}
    assert "config_file" not in made(inline, monkeypatch)[1]


def test_way_tier_makes_vllm_spec_with_an_entry_for_each_tier(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = made({"way": "tier", "config_file": str(file), "offload_prompt_only": False}, monkeypatch)
    entries = options.pop("secondary_tiers")
    assert options == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "eviction_policy": "arc",
        "blocks_per_chunk": 4,
        "offload_prompt_only": False,
    }
    entry = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "config_file": str(file)}
    assert entries == [{**entry, "index": index} for index in range(2)]


@pytest.mark.parametrize("way", ["spec", "tier"])
def test_identity_ignore_is_passed_on_in_both_ways(way: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"{file.read_text()}\nidentity: {{ignore: [VLLM_A]}}\n")
    inline = {"cpu_bytes_to_use": "1MiB", "tiers": [{"type": "memory"}], "identity": {"ignore": ["VLLM_A"]}}
    for extra in ({"config_file": str(file)}, inline, {"config_file": str(file), "identity": {"ignore": ["VLLM_A"]}}):
        _, options = made({"way": way, **extra}, monkeypatch)
        assert ignored_options(options) == ("VLLM_A",)


def test_unknown_option_is_passed_on_to_vllm_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("spec", "tier"):
        _, options = made({"way": way, "cpu_bytes_to_use": 1 << 20, "tiers": [], "unheard_of": 7}, monkeypatch)
        assert options["unheard_of"] == 7
    _, options = made({"way": "tier", "cpu_bytes_to_use": 1 << 20, "tiers": [], "backpressure": {"a": 1}}, monkeypatch)
    assert options["backpressure"] == {"a": 1}


def test_way_tier_accepts_inline_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"way": "tier", "cpu_bytes_to_use": "1MiB", "block_size": 64, "tiers": [{"type": "memory"}]}
    _, options = made(extra, monkeypatch)
    assert "blocks_per_chunk" not in options  # vLLM takes one of both
    assert options["block_size"] == 64
    (entry,) = options["secondary_tiers"]
    assert entry["tier"]["type"] == "memory"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"way": "shared_storage"}, "way"),
        ({"way": "spec", "spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1, "tiers": []}, "spec_name"),
        ({"way": "tier", "storage_after_reset": "keep", "cpu_bytes_to_use": 1, "tiers": []}, "storage_after_reset"),
        ({"way": "tier", "tierz": []}, "tierz"),
        ({"way": "tier"}, "cpu_bytes_to_use"),
        *[
            ({"way": way, name: 0, "cpu_bytes_to_use": 1, "tiers": []}, name)
            for way in ("spec", "tier")
            for name in (
                *("sync_load_budget_bytes", "store_threshold", "max_tracker_size", "tier_poll_interval_s"),
                *("cache_policy_module_path", "max_load_tokens", "max_offload_tokens", "kv_load_tiers"),
            )
        ],
        ({"backpressure": {}, "cpu_bytes_to_use": 1, "tiers": []}, "backpressure"),
    ],
)
def test_invalid_option_is_refused_by_name(extra: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIERS_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=f"^{field}: "):
        made(extra, monkeypatch)


def options_that_vllm_reads() -> set[str]:
    """Keys of ``kv_connector_extra_config`` that the installed release's OffloadingConnector and its specs read."""
    folder = Path(vllm.__file__).parent
    tiering = folder / "v1/kv_offload"
    files = [tiering / name for name in ("base.py", "factory.py", "cpu/spec.py", "tiering/spec.py")]
    files += (folder / "distributed/kv_transfer/kv_connector/v1/offloading").glob("*.py")
    return {
        name for file in files for name in re.findall(r"extra_config(?:\.get\(|\[)\s*[\"'](\w+)[\"']", file.read_text())
    }


@pytest.mark.parametrize("way", ["spec", "tier"])
def test_option_read_by_vllm_is_passed_on_or_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = options_that_vllm_reads()
    assert {"block_size", "offload_prompt_only", "store_threshold", "secondary_tiers"} <= names
    passed, refused = set(), set()
    for name in sorted(names):
        inline = {"way": way, "cpu_bytes_to_use": 1 << 20, "tiers": [], name: 1 << 20}
        if name == "eviction_policy":
            inline[name] = "arc"
        try:
            _, options = made(inline, monkeypatch)
            if way == "spec":
                deployment_from(options)  # as KVTiersSpec does
        except ConfigError as e:
            refused.add(e.field)
        else:
            passed |= {name} if options.get(name) == inline[name] else set()
    assert passed | refused == names
    assert passed >= {"cpu_bytes_to_use", "eviction_policy", "block_size", "offload_prompt_only"}
    assert refused >= {"store_threshold", "secondary_tiers"}


def test_connector_does_not_change_the_config_of_the_engine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"way": "tier", "config_file": str(file)}
    before = config_of(extra)
    with monkeypatch.context() as patch:
        patch.setattr(OffloadingConnector, "__init__", lambda made, *_: setattr(made, "connector_scheduler", None))
        KVTiersConnector(before, KVConnectorRole.WORKER, kv_cache_config(FULL))
    assert before.kv_transfer_config.kv_connector_extra_config == extra


def test_options_printed_for_a_file_are_accepted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = printed(file)
    for way in ("spec", "tier"):
        assert ways[way]["kv_connector"] == "KVTiersConnector"
        _, options = made(ways[way]["kv_connector_extra_config"], monkeypatch)
        assert options["spec_name"] == {"spec": "KVTiersSpec", "tier": "TieringOffloadingSpec"}[way]


def test_entry_point_registers_both_connectors_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    for _ in range(2):  # vLLM may call it several times
        ENTRY_POINT.load()()
    for name in ("KVTiersConnector", "SharedStorageConnector"):
        assert KVConnectorFactory.get_connector_class_by_name(name).__name__ == name


def test_step_with_load_of_another_connector_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _ = made({"cpu_bytes_to_use": 1 << 20, "tiers": []}, monkeypatch)
    monkeypatch.setattr(OffloadingConnector, "build_connector_meta", lambda _, step: step)
    step = SchedulerOutput.make_empty()
    assert connector.build_connector_meta(step) is step
    step.has_sync_kv_loads = True
    with pytest.raises(ConfigError, match="connectors: .* may load within a step"):
        connector.build_connector_meta(step)


@pytest.mark.skipif(not translate._MISTAKES_BLOCKS_OF_STREAMS, reason="this vLLM takes no block for another")
@pytest.mark.parametrize("call", ["on_new_request", "get_num_new_matched_tokens"])
def test_vllm_gets_streamed_request_with_stores_disabled(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _ = made({"cpu_bytes_to_use": 1 << 20, "tiers": []}, monkeypatch)
    seen: list[Any] = []
    monkeypatch.setattr(OffloadingConnector, call, lambda _, request, *__: seen.append(request.kv_transfer_params))
    for resumable in (True, False):
        request = SimpleNamespace(resumable=resumable, kv_transfer_params=None)
        getattr(connector, call)(request, *([0] if call != "on_new_request" else []))
    assert seen == [{"max_offload_tokens": 0}, None]


def test_api_process_gets_metrics_of_the_chosen_spec(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        OffloadingConnector,
        "build_prom_metrics",
        classmethod(lambda _, config, *__: config.kv_transfer_config.kv_connector_extra_config["spec_name"]),
    )
    config = config_of({"config_file": str(file)})
    assert KVTiersConnector.build_prom_metrics(config, {}, [], {}) == "KVTiersSpec"


@pytest.mark.parametrize(
    ("connector", "extra", "named"),
    [
        ("KVTiersConnector", {"cpu_bytes_to_use": "1GiB", "tiers": [{"type": "fs"}]}, r"tiers\[0\]\.root_dir"),
        (
            "KVTiersConnector",
            {"way": "tier", "cpu_bytes_to_use": "1GiB", "tiers": [{"type": "ftp"}]},
            r"tiers\[0\]\.type",
        ),
        (
            "KVTiersConnector",
            {"cpu_bytes_to_use": "1GiB", "tiers": [{"type": "memory"}], "storage_after_reset": "kep"},
            "storage_after_reset",
        ),
        ("SharedStorageConnector", {"shared_storage_path": "/kv", "max_byte": "1GiB"}, "max_byte"),
        ("SharedStorageConnector", {"shared_storage_path": "/kv", "load_deadline_s": "soon"}, "load_deadline_s"),
    ],
)
def test_wrong_option_stops_vllm_with_graph_capture_before_model_load(
    connector: str, extra: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda _: True))
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="kvtiers.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    engine = EngineArgs(
        model=str(make_model_dir(tmp_path / "model")),
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE"},
    )
    with pytest.raises(ValueError, match=named):
        engine.create_engine_config()
