"""KVTiersTier behind vLLM's own TieringOffloadingManager, region and primary tier."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as VllmTier
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtiers.connector.core.guard import REPORT_S, SHUTDOWN_SHARE
from kvtiers.connector.vllm import translate
from kvtiers.connector.vllm.handed import handing_over
from kvtiers.connector.vllm_config import connector_options
from kvtiers.tiers.base import JobMetadata, JobResult, OffloadingEvent, PollingTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError, StoreUnavailableError
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tier.store_tier import DRAIN_SHARE, StoreTierManager
from tests.clock import Clock
from tests.tiers.server.in_threads import in_threads
from tests.vllm.engines import (
    FULL,
    VllmConfig,
    keys,
    kv_cache_config,
    offloading_config,
    request,
    spied_stores,
)
from tests.waiting import PATIENT, wait_for

NUM_CHUNKS = 16
STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=[])


class Engine:
    """vLLM's manager over one tier of ours, and the steps a scheduler makes."""

    def __init__(self, name: str, tier: dict[str, Any], **changes: Any) -> None:
        adapter = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", **tier}
        adapter = {name: value for name, value in adapter.items() if value is not None}
        extra = {"cpu_bytes_to_use": NUM_CHUNKS * 4096, "secondary_tiers": [adapter]}
        self.spec = TieringOffloadingSpec(offloading_config(extra, engine_id=name, **changes))
        manager = self.spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        (self.tier,) = manager.secondary_tiers
        self.view = manager.primary_tier.get_kv_memoryview().cast("B")

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)

    def store(self, some: list[OffloadKey], fill: int = 1) -> None:
        context = self.begin_store(some, fill)
        self.settle()
        self.manager.on_request_finished(context)

    def begin_store(self, some: list[OffloadKey], fill: int = 1) -> Any:
        context = request(f"store-{fill}")
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(some, context)
        assert output is not None
        for index, slot in enumerate(output.store_spec.block_ids):
            self.view[slot * 4096 : (slot + 1) * 4096] = bytes([fill + index]) * 4096
        self.manager.complete_store(set(some), context)
        return context

    def settle(self) -> None:
        def idle() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_for(idle)

    def find(self, some: list[OffloadKey], req_id: str = "load") -> list[LookupResult]:
        """Ask until nothing is pending any more."""
        context = request(req_id)
        self.manager.on_new_request(context)

        def answers() -> list[LookupResult] | None:
            found = [self.manager.lookup(key, context) for key in some]
            self.step()
            return None if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found) else found

        found = wait_for(answers)
        assert found is not None
        self.manager.on_request_finished(context)
        return found

    def read(self, key: OffloadKey) -> bytes:
        (slot,) = self.manager.prepare_load([key], request("read")).block_ids
        return bytes(self.view[slot * 4096 : (slot + 1) * 4096])

    def close(self) -> None:
        self.view.release()
        self.manager.shutdown()


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(name: str, tier: dict[str, Any], **changes: Any) -> Engine:
        made.append(Engine(f"pytest-{os.getpid()}-{len(made)}-{name}", tier, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def on_folder(root: Path) -> dict[str, Any]:
    return {"tier": {"type": "fs", "root_dir": str(root), "min_free": 0, **PATIENT}}


def as_role(kv_role: str) -> Any:
    """A context in which engines are made that have it."""
    return handing_over(VllmConfig(kv_transfer_config=SimpleNamespace(kv_role=kv_role)), kv_cache_config(FULL))


def test_producer_only_stores_and_consumer_only_loads(engines: Any, tmp_path: Path) -> None:
    some, others = keys(3), keys(6)[3:]
    with as_role("kv_producer"):
        engines("producer", on_folder(tmp_path)).store(some)
        assert engines("other-producer", on_folder(tmp_path)).find(some) == [LookupResult.MISS] * 3
    with as_role("kv_consumer"):
        consumer = engines("consumer", on_folder(tmp_path))
    assert consumer.find(some) == [LookupResult.HIT] * 3
    assert consumer.read(some[2]) == bytes([3]) * 4096
    consumer.store(others, fill=7)
    assert consumer.find(others) == [LookupResult.HIT] * 3  # in vLLM's region
    assert engines("later", on_folder(tmp_path)).find([*some, *others]) == [
        *[LookupResult.HIT] * 3,
        *[LookupResult.MISS] * 3,
    ]


def test_read_only_tier_stores_nothing_and_reports_no_failures(engines: Any, tmp_path: Path) -> None:
    some, others = keys(3), keys(6)[3:]
    engines("writer", on_folder(tmp_path)).store(some)
    files = sorted(path for path in tmp_path.rglob("*"))
    reader = engines("reader", {"tier": {**on_folder(tmp_path)["tier"], "read_only": True}})
    reader.store(others, fill=7)
    assert reader.find([*some, *others]) == [LookupResult.HIT] * 6
    assert sorted(path for path in tmp_path.rglob("*")) == files
    stats = reader.manager.get_stats()
    assert stats is not None
    assert not [name for name, count in stats.reduce().items() if "failure" in name.lower() and count]


def test_bytes_stored_by_one_engine_are_loaded_by_another(engines: Any, tmp_path: Path) -> None:
    some = keys(5)
    engines("writer", on_folder(tmp_path)).store(some)
    reader = engines("reader", on_folder(tmp_path))
    assert reader.find(some) == [LookupResult.HIT] * 5
    for index, key in enumerate(some):
        assert reader.read(key) == bytes([1 + index]) * 4096


def test_blocks_are_stored_in_the_order_of_their_prompt(engines: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """vLLM names them in a set, and says at which token each ends. Blocks whose place it does not know are last."""
    context = request("positions")
    if not hasattr(context, "set_offload_key_position"):
        pytest.skip("vLLM says so from 0.31 on")
    jobs = spied_stores(monkeypatch)
    writer, some = engines("writer", on_folder(tmp_path)), keys(12)
    for position, key in enumerate(some[:11]):
        context.set_offload_key_position(key, 32 * (position + 1))
    writer.manager.on_new_request(context)
    output = writer.manager.prepare_store(some, context)
    slots = dict(zip(output.keys_to_store, output.store_spec.block_ids, strict=True))
    writer.manager.complete_store(set(some), context)
    writer.settle()
    assert jobs[-1].keys == some
    assert list(jobs[-1].block_ids) == [slots[key] for key in some]


def test_damaged_blocks_are_misses_and_good_blocks_of_their_job_are_kept(engines: Any, tmp_path: Path) -> None:
    some = keys(4)
    writer = engines("writer", on_folder(tmp_path))
    writer.store(some)
    for key in (some[1], some[3]):
        path = Path(writer.tier.tier.mapper.get_file_name(key))
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    reader = engines("reader", on_folder(tmp_path))
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert reader.find(some) == [hit, miss, hit, miss]
    stats = reader.manager.get_stats()
    assert stats is not None
    failures = {name: value for name, value in stats.reduce().items() if "kvtiers_verify_failures" in name}
    assert sum(failures.values()) == 2


def test_tier_with_load_never_stores_and_answers_lookups_with_misses(engines: Any, tmp_path: Path) -> None:
    some, folder = keys(3), on_folder(tmp_path)
    engines("stores", {"tier": {**folder["tier"], "load": "never"}}).store(some)
    assert engines("never", {"tier": {**folder["tier"], "load": "never"}}).find(some) == [LookupResult.MISS] * 3
    assert engines("loads", folder).find(some) == [LookupResult.HIT] * 3


def test_engine_with_tp_2_finds_no_blocks_stored_with_tp_1(engines: Any, tmp_path: Path) -> None:
    some = keys(3)
    engines("one", on_folder(tmp_path)).store(some)
    other = engines("two", on_folder(tmp_path), tp_size=2, is_parallelism_agnostic=True)
    assert other.find(some) == [LookupResult.MISS] * 3


def test_tier_reports_stored_and_removed_blocks_as_events(engines: Any, tmp_path: Path) -> None:
    some = keys(2)
    writer = engines("writer", on_folder(tmp_path), enable_kv_cache_events=True)
    writer.store(some)
    stored = [event for event in writer.tier.take_events() if not event.removed]
    told = [event for event in stored if event.locality is not None]
    assert sorted(key for event in told for key in event.keys) == sorted(some)
    path = Path(writer.tier.tier.mapper.get_file_name(some[0]))
    path.write_bytes(b"\0" * path.stat().st_size)
    reader = engines("reader", on_folder(tmp_path), enable_kv_cache_events=True)
    reader.find(some)
    assert [event.keys for event in reader.tier.take_events() if event.removed] == [[some[0]]]


@pytest.mark.skipif(not hasattr(VllmTier, "cache_hit_source"), reason="vLLM asks for sources from 0.32 on")
def test_vllm_gets_the_kind_of_storage_of_a_tier(engines: Any, tmp_path: Path) -> None:
    assert engines("files", on_folder(tmp_path)).tier.cache_hit_source.value == "disk"
    memory = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": {"type": "memory"}}
    assert engines("memory", memory).tier.cache_hit_source.value == "host"
    assert translate.hit_source("s3").value == translate.hit_source("nfs").value == "external_unspecified"


def test_blocks_of_unavailable_storage_are_not_reported_as_removed(engines: Any, tmp_path: Path) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailableError("for a second")

    some, options = keys(3), on_folder(tmp_path)
    engines("writer", options).store(some)
    options["tier"]["isolation"] = "thread"
    reader = engines("reader", options, enable_kv_cache_events=True)
    reader.tier.tier.store.get_into = away
    assert reader.find(some) == [LookupResult.MISS] * 3
    assert list(reader.tier.take_events()) == []


def test_tier_reports_no_events_if_events_are_disabled(engines: Any, tmp_path: Path) -> None:
    writer = engines("writer", on_folder(tmp_path))
    writer.store(keys(2))
    assert list(writer.tier.take_events()) == []


def test_lookup_metrics_count_each_key_once_per_request(engines: Any, tmp_path: Path) -> None:
    engine = engines("reader", on_folder(tmp_path))
    for number in range(3):
        assert engine.find(keys(2), req_id=f"r{number}") == [LookupResult.MISS] * 2
    stats = engine.manager.get_stats()
    assert stats is not None
    assert stats.data["data"]["vllm:kvtiers_lookups"] == {("fs", "hit"): 0, ("fs", "miss"): 6}


def test_every_exported_metric_is_defined(engines: Any, tmp_path: Path) -> None:
    engine = engines("writer", on_folder(tmp_path))
    engine.store(keys(3))
    defined = TieringOffloadingSpec.build_metric_definitions(engine.spec.extra_config)
    stats = engine.manager.get_stats()
    assert stats is not None
    seen = stats.data["data"]
    assert "vllm:kvtiers_blocks" in seen
    for name, values in seen.items():
        assert name in defined
        for labels in values:
            assert len(labels) == len(defined[name].labelnames), name
    assert engine.tier.get_stats() is None  # only what changed is told


def test_shutdown_logs_number_of_blocks_not_stored(
    engines: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines("slow", on_folder(tmp_path))
    tier = engine.tier
    tier._stores[99] = keys(7)
    with caplog.at_level("WARNING", logger="kvtiers.connector.vllm.tier"):
        tier.shutdown()
    assert "7 blocks were not stored" in caplog.text


def test_shutdown_gives_the_tier_the_remaining_time(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives stores most of it to land. Drained before, it had too little left to end anything."""
    options = on_folder(tmp_path)
    options["tier"] |= {"isolation": "thread"}
    engine = engines("hung", options)
    engine.tier.tier.shutdown_s = 60.0
    given_s = hang_until_cut(engine.tier.tier, monkeypatch)
    context = request("stores")
    engine.manager.on_new_request(context)
    engine.manager.prepare_store(keys(2), context)
    engine.manager.complete_store(set(keys(2)), context)
    engine.tier._ending_s = 70.0
    engine.tier.shutdown()
    assert given_s == [pytest.approx(70 * SHUTDOWN_SHARE * DRAIN_SHARE)]
    assert engine.tier.tier._channel._cut == "shutdown"


def hang_until_cut(tier: StoreTierManager, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have a tier's puts hang until it is shut down. Returns how long it waits for them then, which nobody does."""
    given_s: list[float] = []
    really_wait = tier._channel.wait_idle

    def wait_idle(timeout_s: float) -> bool:
        if tier._channel._closing:
            return really_wait(timeout_s)
        given_s.append(timeout_s)
        return False

    monkeypatch.setattr(tier.store, "put", lambda *_, **__: wait_for(lambda: tier._channel._cut == "shutdown"))
    monkeypatch.setattr(tier._channel, "wait_idle", wait_idle)
    return given_s


@pytest.mark.parametrize("is_file", [False, True])
def test_unnamed_tiers_of_one_type_get_numbered_names(tmp_path: Path, is_file: bool) -> None:
    tiers = [on_folder(tmp_path / name)["tier"] for name in "ab"]
    path = tmp_path / "kvtiers.yaml"
    path.write_text(json.dumps({"region": {"size": "1MiB"}, "tiers": tiers}))
    options = {"config_file": str(path)} if is_file else {"cpu_bytes_to_use": "1MiB", "tiers": tiers}
    extra = connector_options({"way": "tier", **options})
    manager = TieringOffloadingSpec(offloading_config(extra, engine_id=f"pytest-{os.getpid()}-two")).get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    try:
        assert [tier.tier.name for tier in manager.secondary_tiers] == ["fs0", "fs1"]
        assert [tier.tier_type for tier in manager.secondary_tiers] == ["fs0", "fs1"]
        for tier, options in zip(manager.secondary_tiers, tiers, strict=True):
            assert tier.tier.mapper.base_path.startswith(options["root_dir"])
    finally:
        manager.shutdown()


def out_of_order(*_: Any) -> Any:
    raise RuntimeError("out of order")


def test_exceptions_of_a_tier_do_not_reach_the_engine(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("broken", on_folder(tmp_path))
    clock = Clock()
    monkeypatch.setattr(engine.tier._guard, "_clock", clock)
    for name in ("lookup", "submit_store", "submit_load"):
        setattr(engine.tier.tier, name, out_of_order)
    engine.begin_store(keys(2))
    for _ in range(3):
        engine.step()
        assert engine.manager.has_pending_work()  # it may have begun: its slots are nobody else's yet
    clock.advance(engine.tier.tier.job_deadline_s + REPORT_S)
    engine.settle()
    assert engine.find(keys(2, first=50)) == [LookupResult.MISS] * 2


def test_block_is_a_miss_for_next_request_after_failed_load_of_aborted_request(engines: Any, tmp_path: Path) -> None:
    """Where vLLM's tier asks storage anew for each request, ours remembers for all of them what is there.

    So the second request may hear of a hit while the first one's load has not failed yet. Its own load fails as well,
    and from the first failure on the block is a miss for all.
    """
    some = keys(1)
    engines("writer", on_folder(tmp_path)).store(some)
    tier = engines("reader", on_folder(tmp_path)).tier
    aborted, behind = request("aborted"), request("behind")

    def is_hit() -> bool:
        tier.on_schedule_end(STEP)
        return bool(tier.lookup(some[0], aborted) is LookupResult.HIT)

    wait_for(is_hit)
    next(tmp_path.rglob("*.bin")).unlink()
    tier.submit_load(TransferJob(7, some, np.array([0]), True, aborted))
    tier.on_request_finished(aborted)
    assert tier.lookup(some[0], behind) is LookupResult.HIT
    tier.submit_load(TransferJob(8, some, np.array([1]), True, behind))
    ended: list[Any] = []

    def have_ended() -> bool:
        ended.extend(tier.get_finished_jobs())
        return len(ended) == 2

    wait_for(have_ended)
    assert [(each.success, each.successful_keys) for each in ended] == [(False, None)] * 2
    assert tier.lookup(some[0], behind) is LookupResult.MISS
    assert tier.lookup(some[0], request("later")) is LookupResult.MISS


@pytest.mark.parametrize("end", ["reported", "deadline", "drained"])
@pytest.mark.parametrize("method", ["submit_store", "submit_load"])
def test_job_whose_submission_raised_is_reported_once_after_its_end(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, end: str
) -> None:
    engine = engines("late", on_folder(tmp_path))
    tier = engine.tier
    clock = Clock()
    monkeypatch.setattr(tier._guard, "_clock", clock)
    monkeypatch.setattr(tier.tier, method, out_of_order)
    monkeypatch.setattr(tier.tier, "get_finished", lambda: ())
    getattr(tier, method)(TransferJob(7, keys(2), np.arange(2), method == "submit_load", request("r")))
    assert list(tier.get_finished_jobs()) == []
    assert tier.has_pending_work()
    if end == "reported":
        monkeypatch.setattr(tier.tier, "get_finished", lambda: [JobResult(7, False, (keys(1)[0],))])
    elif end == "deadline":
        clock.advance(tier.tier.job_deadline_s + REPORT_S)
    else:
        monkeypatch.setattr(time, "sleep", clock.advance)
        tier.drain_jobs()  # vLLM reuses all slots then: what is not known to have ended is waited for
    (result,) = tier.get_finished_jobs()
    assert (result.job_id, result.success) == (7, False)
    assert set(result.successful_keys or ()) == (set(keys(1)) if end == "reported" else set())
    monkeypatch.setattr(tier.tier, "get_finished", lambda: [JobResult(7, True)])
    clock.advance(100)
    assert list(tier.get_finished_jobs()) == []
    assert not tier.has_pending_work()


@pytest.mark.parametrize("method", ["submit_store", "submit_load"])
def test_successful_keys_are_in_the_order_of_the_job_of_vllm(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A store is handed on in the order of its prompt, and a tier may name keys in any order."""
    tier = engines("order", on_folder(tmp_path)).tier
    some = keys(9)
    for key in reversed(some):
        tier.lookup(key, request("r"))
    monkeypatch.setattr(tier.tier, method, lambda job: None)
    monkeypatch.setattr(tier.tier, "get_finished", lambda: [JobResult(7, False, tuple(sorted(some[1:])))])
    getattr(tier, method)(TransferJob(7, some, np.arange(9), method == "submit_load", request("r")))
    (told,) = tier.get_finished_jobs()
    assert told.successful_keys == tuple(some[1:])


def test_malformed_events_and_answers_do_not_reach_vllm(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = engines("odd", on_folder(tmp_path), enable_kv_cache_events=True).tier
    monkeypatch.setattr(tier.tier, "get_finished", lambda: [JobResult(12345, True), JobResult([], True)])  # type: ignore[arg-type]
    assert list(tier.get_finished_jobs()) == []
    events = [OffloadingEvent(None, "X", removed=False), OffloadingEvent(tuple(keys(1)), "X", removed=False)]  # type: ignore[arg-type]
    monkeypatch.setattr(tier.tier, "take_events", lambda: events)
    assert [event.keys for event in tier.take_events()] == [keys(1)]
    monkeypatch.setattr(tier.tier, "lookup", lambda key, context: np.array([True, False]))
    assert tier.lookup(keys(1)[0], request("r")) is LookupResult.MISS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tier": {"type": "nosuch"}}, "not a tier type"),
        ({"tier": {"type": "memory", "n_threads": 0}}, "n_threads"),
    ],
)
def test_invalid_tier_option_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_tier(options)


class TheirTier(StoreTierManager):
    """Somebody else's, which states a deadline that is none."""

    def __init__(self, spec: Any, view: memoryview, tier_type: str) -> None:
        super().__init__(spec, view, tier_type, make_backend=in_threads(MemoryStore()))
        self.job_deadline_s = "soon"  # type: ignore[assignment]


class SilentTier(PollingTierManager):
    """Somebody else's, whose storage answers nothing."""

    clock = Clock()

    def poll(self, key: OffloadKey, req_context: Any) -> None:
        return None

    def submit_store(self, job_metadata: JobMetadata) -> None:
        raise AssertionError

    def submit_load(self, job_metadata: JobMetadata) -> None:
        raise AssertionError

    def get_finished(self) -> list[JobResult]:
        return []


def test_lookup_in_a_silent_polling_tier_is_a_miss_after_its_deadline() -> None:
    tier = make_tier({"tier": {"type": "SilentTier", "module_path": __name__}})
    answers = []
    for _ in range(7):
        answers.append(tier.lookup(keys(1)[0], request("waits")))
        tier.on_schedule_end(STEP)
        SilentTier.clock.advance(0.06)
    assert answers == [LookupResult.RETRY] * 5 + [LookupResult.MISS] * 2
    tier.shutdown()


def test_tier_refused_for_its_deadline_is_shut_down() -> None:
    with pytest.raises(ConfigError, match="TheirTier: job_deadline_s: 'soon' is not accepted"):
        make_tier({"tier": {"type": "TheirTier", "module_path": __name__}})
    wait_for(lambda: not any(each.name.startswith("kvtiers-TheirTier") for each in threading.enumerate()))


def make_tier(options: dict[str, Any]) -> Any:
    spec = type("Spec", (), {"config": offloading_config(), "blocks_per_chunk": 1})()
    view = memoryview(bytearray(4 * 4096)).cast("b", (4, 4096))
    adapter = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", **options}
    return SecondaryTierFactory.create_secondary_tier(adapter, view, spec)
