"""KVTiersSpec: our manager and worker, driven as vLLM's OffloadingConnector drives them."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import count, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.base import OffloadingManager as VllmManager
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtiers.connector.core.guard import SHUTDOWN_SHARE
from kvtiers.connector.core.pacing import DRAIN_SHARE as VLLM_DRAIN_SHARE
from kvtiers.connector.transfer.host_copy import HostCopier
from kvtiers.connector.vllm import spec as spec_module
from kvtiers.connector.vllm.connector import KVTiersConnector
from kvtiers.connector.vllm.handed import handing_over
from kvtiers.connector.vllm.spec import KVTiersManager, KVTiersSpec, KVTiersWorker
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.tier.store_tier import DRAIN_SHARE, StoreTierManager
from tests.clock import Clock
from tests.vllm.engines import (
    BLOCK_BYTES,
    FULL,
    VllmConfig,
    keys,
    kv_cache_config,
    kv_caches,
    offloading_config,
    request,
    spied_stores,
)
from tests.vllm.test_tier import hang_until_cut
from tests.waiting import PATIENT, wait_for

STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=[])
NUM_BLOCKS = 8


class Engine:
    """A scheduler and one worker of one engine, in one process."""

    def __init__(self, root: Path, engine_id: str, *, blocks: int = NUM_BLOCKS, **extra: Any) -> None:
        config = {
            "spec_name": "KVTiersSpec",
            "spec_module_path": "kvtiers.vllm",
            "cpu_bytes_to_use": blocks * BLOCK_BYTES,
            "tiers": [{"type": "fs", "root_dir": str(root), "min_free": 0, **PATIENT}],
            **extra,
        }
        config = {name: value for name, value in config.items() if value is not None}
        self.tensors, canonical = kv_caches(32)
        specs = [OffloadingSpecFactory.create_spec(offloading_config(config, engine_id=engine_id)) for _ in range(2)]
        worker, manager = specs[0].get_worker(canonical), specs[1].get_manager()
        assert isinstance(worker, KVTiersWorker)
        assert isinstance(manager, KVTiersManager)
        self.worker, self.manager = worker, manager
        self.jobs = 0

    def store(self, some: list[OffloadKey], blocks: list[int]) -> None:
        context = request("store")
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(some, context)
        assert output is not None
        taken = [block for key, block in zip(some, blocks, strict=True) if key in set(output.keys_to_store)]
        source = GPULoadStoreSpec(taken, group_sizes=[len(taken)], block_indices=[0])
        self.run(self.worker.submit_store, source, output.store_spec)
        self.manager.complete_store(set(output.keys_to_store), context)
        self.settle()

    def load(self, some: list[OffloadKey], blocks: list[int]) -> None:
        context = request("load")
        assert self.find(some) == [LookupResult.HIT] * len(some)
        spec = self.manager.prepare_load(some, context)
        target = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        self.run(self.worker.submit_load, spec, target)
        self.manager.complete_load(set(some), context)

    def run(self, submit: Any, source: Any, target: Any) -> None:
        self.jobs += 1
        assert submit(self.jobs, source, target)
        self.worker.wait({self.jobs})
        (result,) = wait_for(self.worker.get_finished)
        assert (result.job_id, result.success) == (self.jobs, True)
        assert result.transfer_size

    def settle(self) -> None:
        def idle() -> bool:
            self.manager.on_schedule_end(STEP)
            return not self.manager.has_pending_work()

        wait_for(idle)

    def find(self, some: list[OffloadKey], req_id: str = "load") -> list[LookupResult]:
        context = request(req_id)

        def answers() -> list[LookupResult] | None:
            found = [self.manager.lookup(key, context) for key in some]
            if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                self.manager.on_schedule_end(STEP)
                return None
            return found

        found = wait_for(answers)
        assert found is not None
        return found

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(tmp_path / "root", f"pytest-{os.getpid()}-{len(made)}", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_producer_only_stores_and_consumer_only_loads(engines: Any) -> None:
    some, others = keys(3), keys(6)[3:]

    def with_role(kv_role: str) -> Engine:
        with handing_over(VllmConfig(kv_transfer_config=SimpleNamespace(kv_role=kv_role)), kv_cache_config(FULL)):
            made = engines()
        assert isinstance(made, Engine)
        return made

    producer = with_role("kv_producer")
    producer.store(some, [3, 9, 4])
    assert producer.find(some) == [LookupResult.HIT] * 3  # in its region
    assert with_role("kv_producer").find(some) == [LookupResult.MISS] * 3
    consumer = with_role("kv_consumer")
    consumer.load(some, [0, 1, 2])
    for ours, theirs in zip(consumer.tensors, producer.tensors, strict=True):
        assert torch.equal(ours[[0, 1, 2]], theirs[[3, 9, 4]])
    consumer.store(others, [5, 6, 7])
    assert consumer.find(others) == [LookupResult.HIT] * 3
    assert with_role("kv_both").find([*some, *others]) == [*[LookupResult.HIT] * 3, *[LookupResult.MISS] * 3]


def test_slow_tier_is_closed_within_the_remaining_shutdown_time(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told nothing, it gave waiting stores more time than there was, and was left behind with its threads at work."""
    fs = {"type": "fs", "root_dir": str(tmp_path / "root"), "min_free": 0, "isolation": "thread"}
    engine = engines(tiers=[fs])
    (tier,) = (guarded.tier for guarded in engine.manager.core._tiers)
    tier.shutdown_s = 60.0
    given_s = hang_until_cut(tier, monkeypatch)
    context, some = request("store"), keys(2)
    engine.manager.on_new_request(context)
    engine.manager.prepare_store(some, context)
    engine.manager.complete_store(set(some), context)
    monkeypatch.setattr(spec_module, "drain", lambda *_: False)
    monkeypatch.setattr(spec_module, "SHUTDOWN_S", 200.0)
    engine.manager.shutdown()
    assert given_s == [pytest.approx(200 * (1 - VLLM_DRAIN_SHARE) * SHUTDOWN_SHARE * DRAIN_SHARE)]
    assert tier._channel._cut == "shutdown"


def test_stored_blocks_are_loaded_into_tensors_of_another_engine(engines: Any) -> None:
    some = keys(5)
    writer = engines()
    writer.store(some, [3, 9, 4, 20, 31])
    reader = engines()
    for tensor in reader.tensors:
        tensor.fill_(7)
    reader.load(some, [1, 2, 30, 5, 6])
    for stored, loaded in zip(writer.tensors, reader.tensors, strict=True):
        assert torch.equal(loaded[[1, 2, 30, 5, 6]], stored[[3, 9, 4, 20, 31]])
        assert (loaded[[0, 3, 4, *range(7, 30), 31]] == 7).all()  # and nothing else was touched


def test_blocks_are_stored_in_the_order_of_their_prompt(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names those that are in the region in a set."""
    jobs = spied_stores(monkeypatch)
    some = keys(12)
    engines(blocks=16).store(some, list(range(12)))
    assert [key for job in jobs for key in job.keys] == some


def test_blocks_that_are_offered_or_loaded_are_touched(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells nobody: a prefix that the GPU's cache has is offered by each request, and asked of nobody."""
    used: list[OffloadKey] = []
    monkeypatch.setattr(StoreTierManager, "touch", lambda _, keys: used.extend(keys))
    hot, other, new = keys(3), keys(3, first=3), keys(4, first=6)
    engine = engines()
    engine.store(hot, [1, 2, 3])
    engine.store(other, [4, 5, 6])
    assert used == []
    engine.manager.prepare_store(hot, request("again"))
    assert used == hot
    output = engine.manager.prepare_store(new, request("new"))
    assert list(output.evicted_keys) == other[:0:-1]
    engine.load(hot, [7, 8, 9])
    assert used == hot + hot


def test_lookup_of_sliding_window_loads_only_the_window(engines: Any) -> None:
    """vLLM's own lookup of such a group, whose questions say what is loaded."""
    blocks, window = 40, 2
    some = keys(blocks)
    engines(blocks=64).store(some[:20], list(range(20)))
    engines(blocks=64).store(some[20:], list(range(20)))
    manager, context = engines(blocks=64).manager, request("window")
    asker = SimpleNamespace(manager=manager)

    def hit() -> int | None:
        end: int | None = OffloadingConnectorScheduler._sliding_window_lookup(asker, some, window, context)
        manager.on_schedule_end(STEP)
        return end

    assert hit() is None
    (tier,) = manager.core._tiers  # answers in another order could be a window before the last one

    def is_known() -> bool:
        manager.on_schedule_end(STEP)
        return None not in [tier.lookup(key, context) for key in some]

    wait_for(is_known)
    assert wait_for(hit) == blocks
    samples = manager.core.metrics.snapshot()
    loaded = [each.value for each in samples if each.name == "kvtiers_blocks_total" and each.labels["op"] == "load"]
    assert sum(loaded) == window


def test_lookup_is_pending_hit_during_transfer_and_retry_until_answered(engines: Any) -> None:
    stored, storing = keys(2)
    engines().store([stored], [1])
    manager, context = engines().manager, request("asks")
    assert manager.prepare_store([storing], context) is not None
    assert manager.lookup(storing, context) is LookupResult.HIT_PENDING
    answers = []

    def is_hit() -> bool:
        answers.append(manager.lookup(stored, context))
        manager.on_schedule_end(STEP)
        return answers[-1] is LookupResult.HIT

    wait_for(is_hit)
    assert [each for each, _ in groupby(answers)] == [LookupResult.RETRY, LookupResult.HIT_PENDING, LookupResult.HIT]


@pytest.mark.skipif(not hasattr(VllmManager, "get_load_source"), reason="vLLM asks for sources from 0.32 on")
def test_vllm_gets_the_source_of_a_loaded_block(engines: Any) -> None:
    some = keys(2)
    engines().store(some, [1, 2])
    engine = engines()
    sources = []
    for _ in range(2):
        engine.load(some, [1, 2])
        sources.append([engine.manager.get_load_source(key, request("load")).value for key in some])
    assert sources == [["disk"] * 2, ["host"] * 2]


def test_waiting_request_is_looked_up_again_only_after_a_change(
    engines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    some = keys(6)
    engines(blocks=64).store(some, list(range(6)))
    tier = {"type": "fs", "root_dir": str(tmp_path / "root"), "min_free": 0, "isolation": "thread"}
    manager = engines(blocks=64, tiers=[{**tier, **PATIENT}]).manager
    context = request("waits")
    answers, size, rounds = threading.Event(), LocalStore.size, []

    def size_when_told(store: LocalStore, key: str) -> int | None:
        assert answers.wait(120)
        found: int | None = size(store, key)
        return found

    def look_up_as_vllm(*_: object) -> tuple[int | None, bool]:
        found = [manager.lookup(key, context) for key in some]
        rounds.append(found)
        return (24 if found == [LookupResult.HIT] * 6 else None), True

    monkeypatch.setattr(LocalStore, "size", size_when_told)
    monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", look_up_as_vllm)
    connector = object.__new__(KVTiersConnector)
    connector._open_lookups = manager.open_lookups

    def ask(num_computed_tokens: int) -> int | None:
        asked = SimpleNamespace(request_id="waits")
        tokens: int | None = connector.get_num_new_matched_tokens(asked, num_computed_tokens)[0]
        manager.on_schedule_end(STEP)
        return tokens

    assert [ask(0) for _ in range(50)] == [None] * 50
    assert rounds == [[LookupResult.RETRY] * 6]
    assert ask(4) is None
    assert len(rounds) == 2, "the GPU has more of it"
    answers.set()
    assert wait_for(lambda: ask(4)) == 24
    assert len(rounds) <= 2 + 2 * len(some), "it was looked up more often than something changed"
    manager.on_request_finished(context)
    assert not manager.open_lookups.continue_wait("waits", 4)


def test_trace_of_vllm_requests_counts_tokens_and_gives_reasons(
    engines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_role(kv_role: str) -> KVTiersManager:
        path = tmp_path / f"{kv_role}.yaml"
        tier = {"type": "fs", "root_dir": str(tmp_path / "root"), "min_free": 0, **PATIENT}
        content = {"region": {"size": 8 * BLOCK_BYTES}, "tiers": [tier], "trace_requests": str(tmp_path / kv_role)}
        path.write_text(json.dumps(content))
        options = {"config_file": str(path), "cpu_bytes_to_use": None, "tiers": None}
        with handing_over(VllmConfig(kv_transfer_config=SimpleNamespace(kv_role=kv_role)), kv_cache_config(FULL)):
            manager = engines(**options).manager
        assert isinstance(manager, KVTiersManager)
        return manager

    def ask(manager: KVTiersManager, req_id: str, num_tokens: int, num_computed: int, some: list[OffloadKey]) -> None:
        def look_up_as_vllm(*_: object) -> tuple[int | None, bool]:
            found = [manager.lookup(key, request(req_id)) for key in some]
            if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return None, False
            return found.count(LookupResult.HIT) * tokens, True

        monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", look_up_as_vllm)
        connector = object.__new__(KVTiersConnector)
        connector._open_lookups, connector._judging = manager.open_lookups, manager
        asked = SimpleNamespace(request_id=req_id, num_tokens=num_tokens)

        def is_known() -> bool:
            tokens: int | None = connector.get_num_new_matched_tokens(asked, num_computed)[0]
            manager.on_schedule_end(STEP)
            return tokens is not None

        wait_for(is_known)
        manager.on_request_finished(request(req_id))

    manager = with_role("kv_both")
    tokens = manager._block_tokens
    engines().store(keys(3)[1:], [1, 2])
    ask(manager, "misses", 6 * tokens, tokens, keys(4)[1:])
    ask(manager, "short", tokens // 2, 0, [])
    ask(manager, "own", 2 * tokens, tokens, [])
    manager.reset_cache()
    ask(manager, "reset", 6 * tokens, tokens, keys(2)[1:])
    manager.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "kv_both").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["not_stored", "too_short", "engine", "lookup:storage_off"]
    shown = {name: lines[0][name] for name in ("tokens", "engine_tokens", "loaded_tokens", "block_tokens")}
    assert shown == {"tokens": 6 * tokens, "engine_tokens": tokens, "loaded_tokens": 2 * tokens, "block_tokens": tokens}
    manager = with_role("kv_producer")
    ask(manager, "produces", 6 * tokens, tokens, keys(4)[1:])
    manager.shutdown()
    assert json.loads((tmp_path / "kv_producer").read_text())["reason"] == "lookup:role"


def test_connector_learns_prefill_from_time_between_schedule_and_output_of_a_step(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = engines().manager
    steps = manager.core.decisions.steps
    connector = object.__new__(KVTiersConnector)
    connector._judging, connector._open_lookups = manager, manager.open_lookups
    clock = Clock(0.0)
    monkeypatch.setattr("kvtiers.connector.vllm.connector.time.monotonic", clock)
    monkeypatch.setattr(OffloadingConnector, "build_connector_meta", lambda *_: None)
    monkeypatch.setattr(OffloadingConnector, "take_events", lambda _: ())
    monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", lambda *_: (0, False))

    def step(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]], took_s: float) -> None:
        """Run a step. Request -> tokens that it computes, and tokens computed before."""
        connector.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens={req_id: count for req_id, (count, _) in {**new, **cached}.items()},
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=req, num_computed_tokens=at) for req, (_, at) in new.items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(cached), num_computed_tokens=[at for _, at in cached.values()]
                ),
                has_sync_kv_loads=False,
            )
        )
        clock.advance(took_s)
        connector.take_events()

    for number in range(4):
        name = f"r{number}"
        connector.get_num_new_matched_tokens(SimpleNamespace(request_id=name, num_tokens=300), 0)
        step({name: (200, 0)}, {"generates": (1, 900)}, 0.4)
        assert steps.queued_s("") == pytest.approx(0.2, rel=0.05)
        step({}, {name: (100, 200), "generates": (1, 901)}, 0.2)
        step({}, {name: (1, 300), "generates": (1, 902)}, 9.0)
        clock.advance(60.0)
    assert steps.queued_s("") == 0
    assert steps.prefill.seconds(300, 0) == pytest.approx(0.6, rel=0.05)


def test_request_left_open_by_vllm_is_looked_up_again(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, say, until another request's load of the same blocks is over."""
    some = keys(2)
    engine = engines()
    engine.store(some, [0, 1])
    rounds = []

    def look_up_as_vllm(*_: object) -> tuple[None, bool]:
        rounds.append([engine.manager.lookup(key, request("own")) for key in some])
        return None, False

    monkeypatch.setattr(OffloadingConnector, "get_num_new_matched_tokens", look_up_as_vllm)
    connector = object.__new__(KVTiersConnector)
    connector._open_lookups = engine.manager.open_lookups
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(SimpleNamespace(request_id="own"), 0) == (None, False)
    assert rounds == [[LookupResult.HIT] * 2] * 3


def test_no_file_is_left_in_dev_shm_once_scheduler_and_worker_have_joined(engines: Any) -> None:
    engines()
    assert not [name for name in os.listdir("/dev/shm") if f"pytest-{os.getpid()}" in name]


def test_worker_shutdown_releases_the_region_after_a_failed_copy(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed copy that nobody asked for any more holds what its frames held."""
    engine = engines()
    inode = str(os.fstat(engine.worker._region.fd).st_ino)  # other tests' regions may end late

    def broken(copier: HostCopier, *_: object) -> None:
        held = copier._owner
        assert held is None, "the copy engine is gone"

    def mappings() -> int:
        gc.collect()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum("/dev/shm/" in " ".join(line[5:]) and line[4] == inode for line in lines)

    monkeypatch.setattr(HostCopier, "copy", broken)
    output = engine.manager.prepare_store(keys(1), request("store"))
    source = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    assert engine.worker.submit_store(1, source, output.store_spec)
    assert mappings() == 2  # the worker's and the scheduler's
    engine.worker.shutdown()
    assert mappings() == 1
    assert not engine.worker.submit_store(2, source, output.store_spec)
    assert engine.worker.get_finished() == []


def test_reset_empties_the_region_and_storage_keeps_its_blocks(engines: Any) -> None:
    engine, some = engines(storage_after_reset="keep"), keys(4)
    engine.store(some, [1, 2, 3, 4])
    engine.manager.reset_cache()
    assert engine.manager.core.slots.counts().free == NUM_BLOCKS
    engine.load(some, [11, 12, 13, 14])
    for tensor in engine.tensors:
        assert torch.equal(tensor[[11, 12, 13, 14]], tensor[[1, 2, 3, 4]])


def test_storage_is_not_used_after_a_reset_by_default(
    engines: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, old, new = engines(), keys(4), keys(4, first=4)
    engine.store(old, [1, 2, 3, 4])
    stored = sorted(tmp_path.rglob("*.bin"))
    for _ in range(2):
        engine.manager.reset_cache()
        assert engine.find(old) == [LookupResult.MISS] * 4
    engine.store([*old[:2], *new], [5, 6, 7, 8, 9, 10])  # others' KV by now
    engine.load([*old[:2], *new], [11, 12, 13, 14, 15, 16])
    for tensor in engine.tensors:
        assert torch.equal(tensor[[11, 12, 13, 14, 15, 16]], tensor[[5, 6, 7, 8, 9, 10]])
    assert sorted(tmp_path.rglob("*.bin")) == stored
    assert caplog.text.count("write 'storage_after_reset': 'keep'") == 1
    assert engines().find([*old, *new]) == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 4


def test_blocks_in_copy_during_a_reset_are_stored_once_offered_again(engines: Any) -> None:
    engine, context, some = engines(storage_after_reset="keep"), request("runs"), keys(4)
    engine.store(some[:1], [1])
    manager = engine.manager
    assert engine.find(some[:1]) == [LookupResult.HIT]
    manager.prepare_load(some[:1], context)
    assert manager.prepare_store(some[1:], context) is not None
    manager.reset_cache()
    outputs = []

    def is_taken() -> bool:
        outputs.append(manager.prepare_store(some, context))  # as vLLM does after what was not taken
        manager.on_schedule_end(STEP)
        return outputs[-1] is not None

    wait_for(is_taken)
    assert outputs[:-1] == [None] * (len(outputs) - 1)
    assert outputs[-1].keys_to_store == some
    manager.complete_store(set(some), context)
    assert engine.find(some) == [LookupResult.HIT] * 4


def test_hung_store_does_not_keep_the_engine_stepping(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, context = engines(), request("stores")
    manager = engine.manager
    monkeypatch.setattr(StoreTierManager, "submit_store", lambda *_: None)
    output = manager.prepare_store(keys(3), context)
    manager.complete_store(set(output.keys_to_store), context)
    manager.on_schedule_end(STEP)
    assert manager.has_pending_work()
    monkeypatch.setattr(manager.core._tiers[0], "_clock", lambda: time.monotonic() + 3600)
    assert not manager.has_pending_work()
    assert manager.core.slots.counts().pinned == 3


@pytest.mark.parametrize("told", [True, False])
def test_slots_of_transfers_forgotten_by_reset_are_freed_once_workers_are_done(engines: Any, told: bool) -> None:
    engine, some = engines(), keys(6)
    engine.store(some[:2], [1, 2])
    manager, context = engine.manager, request("unfinished")
    assert manager.prepare_store(some[2:], context) is not None
    engine.find(some[:2])
    manager.prepare_load(some[:2], context)
    manager.reset_cache()  # from here on vLLM says nothing of them any more
    assert manager.has_pending_work()
    assert manager.core.slots.counts().free < NUM_BLOCKS - 3
    if told:
        manager.on_reset_flushed()
    engine.settle()
    counts = manager.core.slots.counts()
    assert counts.pending == counts.pinned == 0
    assert counts.free == NUM_BLOCKS
    assert engine.find(some) == [LookupResult.MISS] * 6


def test_request_larger_than_the_region_logs_advice_on_region_size(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(blocks=2)
    with caplog.at_level("WARNING"):
        output = engine.manager.prepare_store(keys(5), request())
    assert output is not None
    assert len(output.keys_to_store) == 2
    assert "make region.size larger" in caplog.text


def test_every_exported_metric_is_defined(engines: Any) -> None:
    writer = engines()
    writer.store(keys(3), [1, 2, 3])
    reader = engines()
    reader.load(keys(3), [1, 2, 3])
    defined = KVTiersSpec.build_metric_definitions({})
    for engine, op in ((writer, "store"), (reader, "load")):
        stats = engine.manager.get_stats()
        assert stats is not None
        seen = stats.data["data"]
        assert seen["vllm:kvtiers_bytes"][("fs", op)] == 3 * BLOCK_BYTES
        for name, values in seen.items():
            for labels in values:
                assert len(labels) == len(defined[name].labelnames), name


def test_vllm_lookup_metrics_count_each_key_once_per_request(engines: Any) -> None:
    engines().store(keys(3), [1, 2, 3])
    reader = engines(storage_after_reset="keep")
    for number in range(2):
        assert reader.find(keys(5), f"r{number}") == [LookupResult.HIT] * 3 + [LookupResult.MISS] * 2
        reader.manager.reset_cache()
    reader.manager.on_schedule_end(STEP)
    stats = reader.manager.get_stats()
    assert stats is not None
    assert stats.data["data"]["vllm:kvtiers_lookups"] == {("fs", "hit"): 6, ("fs", "miss"): 4}


def test_blocks_per_chunk_of_config_file_is_used_unless_overridden(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"blocks_per_chunk: 4\nregion: {{size: 1MiB}}\ntiers: [{{type: fs, root_dir: {tmp_path}}}]\n")
    spec = KVTiersSpec(offloading_config({"config_file": str(path)}))
    assert spec.blocks_per_chunk == spec.config.cache.blocks_per_chunk == 4
    assert KVTiersSpec(offloading_config({"config_file": str(path), "blocks_per_chunk": 1})).blocks_per_chunk == 1


def test_request_that_refuses_storage_gets_only_blocks_of_the_region(engines: Any) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium, TierFilter, TierMatcher

    engine, some = engines(storage_after_reset="keep"), keys(3)
    engine.store(some, [1, 2, 3])
    nothing, remote = TierFilter(), TierFilter(matchers=(TierMatcher(locality=Locality.REMOTE),))
    region = TierFilter(matchers=(TierMatcher(medium=Medium.CPU),))

    numbers = count()

    def answers(wanted: Any) -> list[LookupResult]:
        context = request(f"filtered {next(numbers)}")
        context.load_tier_filter = wanted
        return [engine.manager.lookup(key, context) for key in some]

    for refusing in (nothing, remote, region):
        assert answers(refusing) == [LookupResult.HIT] * 3
    engine.manager.reset_cache()
    for refusing in (nothing, remote, region):
        assert answers(refusing) == [LookupResult.MISS] * 3
    storage = TierFilter(matchers=(TierMatcher(medium=Medium.STORAGE, locality=Locality.LOCAL),))
    assert LookupResult.MISS not in answers(storage)
    assert engine.find(some) == [LookupResult.HIT] * 3


@pytest.mark.parametrize(("medium", "tier"), [("CPU", 1), ("STORAGE", 0)])
def test_request_that_refuses_one_tier_loads_from_another_tier(
    engines: Any, tmp_path: Path, medium: str, tier: int
) -> None:
    from vllm.v1.kv_offload.base import Medium, TierFilter, TierMatcher

    folder = {"type": "fs", "root_dir": str(tmp_path / "root"), "min_free": 0, "lookup_deadline_s": 20}
    engine, some = engines(storage_after_reset="keep", tiers=[folder, {"type": "memory"}]), keys(3)
    engine.store(some, [1, 2, 3])
    engine.manager.reset_cache()
    context = request("filtered")
    context.load_tier_filter = TierFilter(matchers=(TierMatcher(medium=Medium(medium)),))

    def found() -> bool:
        answers = [engine.manager.lookup(key, context) for key in some]
        assert LookupResult.MISS not in answers
        engine.manager.on_schedule_end(STEP)
        return answers == [LookupResult.HIT] * 3

    wait_for(found)
    assert {engine.manager.core.slots.find(key).tier for key in some} == {tier}


def test_invalid_option_layout_or_region_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage_after_reset: 'leave' is not accepted; write off or keep"):
        KVTiersSpec(offloading_config({"cpu_bytes_to_use": "1MiB", "storage_after_reset": "leave"}))
    with pytest.raises(ConfigError, match="canonical_layout"):
        KVTiersSpec(offloading_config({"cpu_bytes_to_use": "1MiB"}, canonical_layout=True))
    spec = KVTiersSpec(offloading_config({"cpu_bytes_to_use": BLOCK_BYTES}, worker_kv_bytes_per_block=2 * BLOCK_BYTES))
    with pytest.raises(ConfigError, match="region.size"):
        spec.get_manager()


@pytest.fixture
def of_two(tmp_path: Path) -> Iterator[Any]:
    """Makes one process' spec of an engine of two workers."""
    engine = {"engine_id": f"pytest-hosts-{os.getpid()}", "tp_size": 2, "world_size": 2}
    config = {
        "cpu_bytes_to_use": "1MiB",
        "tiers": [{"type": "fs", "root_dir": str(tmp_path / "root"), "min_free": 0, **PATIENT}],
    }

    def spec(rank: int, **changes: Any) -> KVTiersSpec:
        return KVTiersSpec(offloading_config(config | changes, **engine, rank=rank))

    yield spec
    assert not Path(f"/dev/shm/vllm_offload_{engine['engine_id']}.mmap").exists()


def test_workers_on_another_host_are_refused_if_there_are_tiers(of_two: Any) -> None:
    """Their part of the scheduler's region is zeros, and what tiers load never reaches them."""
    worker = of_two(0).get_worker(kv_caches(4)[1])
    with pytest.raises(ConfigError, match=r"tiers: workers \[1\] have not mapped .*SharedStorageConnector"):
        of_two(0).get_manager()
    worker.shutdown()


def test_workers_on_this_host_are_accepted(of_two: Any) -> None:
    workers = [of_two(rank).get_worker(kv_caches(4)[1]) for rank in range(2)]
    of_two(0).get_manager().shutdown()
    for worker in workers:
        worker.shutdown()


def test_workers_on_another_host_are_accepted_without_tiers(of_two: Any) -> None:
    worker = of_two(0, tiers=[]).get_worker(kv_caches(4)[1])
    of_two(0, tiers=[]).get_manager().shutdown()
    worker.shutdown()
