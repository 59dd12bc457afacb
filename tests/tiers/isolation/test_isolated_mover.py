"""IsolatedMover: whole batches in a worker say, count and leave behind what BlockMover does."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from kvtiers.tiers.isolation.mover import IsolatedMover, WorkerFunction, pack_pairs, unpack_pairs

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata, JobResult
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.builtin import FileSystemTierManager, S3TierManager
from kvtiers.tiers.config.tier_options import FsTierConfig, default_threads
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.isolation.store import ProcessIsolatedStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.servers import moto_server
from kvtiers.tiers.testing.tiny_s3 import Request
from kvtiers.tiers.tier import concurrency
from kvtiers.tiers.tier.batches import Pair
from kvtiers.tiers.tier.block_mover import Batch, MoveTask
from kvtiers.tiers.tier.circuit import Circuit
from kvtiers.tiers.tier.health import TierHealth
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import FakeSpec, block_key
from tests.s3_clients import use_credentials
from tests.waiting import PATIENT, wait_for

ROW_BYTES, ROWS = 8192, 16
KEYS = [block_key(n) for n in range(8)]


class Bench:
    """A tier on a region that other processes can map."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
        self.rows = np.asarray(self.view)
        options = {**PATIENT, **options}
        self.tier = FileSystemTierManager(FakeSpec(), self.view, "fs", str(root), 1, 1, min_free=0, **options)
        self.jobs = 0

    def run(self, keys: list[OffloadKey], blocks: list[int], *, is_load: bool) -> JobResult:
        self.jobs += 1
        job = JobMetadata(self.jobs, keys, np.array(blocks, np.int32))
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished()
        return result

    def fill(self, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
        self.rows[:] = np.random.default_rng(seed).integers(-128, 128, self.rows.shape, np.int8)
        return self.rows.copy()

    def path(self, key: OffloadKey) -> Path:
        return self.root / self.tier.mapper.relative_name(key)

    def value(self, name: str, *labels: str) -> float:
        return self.tier.metrics.value(name, "fs", *labels)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "kv")
    yield bench
    bench.tier.shutdown()


def test_auto_is_process_where_the_region_can_be_mapped(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtiers.tiers.builtin")
    assert isinstance(bench.tier.store, ProcessIsolatedStore)
    assert isinstance(bench.tier._mover, IsolatedMover)
    private = np.zeros((ROWS, ROW_BYTES), np.int8)
    tier = FileSystemTierManager(FakeSpec(), private.data, "fs", str(tmp_path / "other"), 1, 1, min_free=0)
    try:
        assert not isinstance(tier.store, ProcessIsolatedStore)
    finally:
        tier.shutdown()
    (said,) = [record.getMessage() for record in caplog.records if "isolation: auto" in record.getMessage()]
    assert "tier fs" in said
    assert "the region is not a shared mapping of a file" in said


def test_thread_counts_that_nobody_gave_fit_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be a process; a count that is given is taken."""
    made: list[FsTierConfig] = []
    monkeypatch.setattr("kvtiers.tiers.builtin._start", lambda *args: made.append(args[-1]))
    for given in ({}, {"n_read_threads": 16}):
        FileSystemTierManager(FakeSpec(), memoryview(b""), "fs", str(tmp_path), **given)
    fitting = default_threads()
    assert [(tier.n_read_threads, tier.n_write_threads) for tier in made] == [(fitting, fitting), (16, fitting)]


def test_what_is_stored_comes_back(bench: Bench) -> None:
    before = bench.fill(1)
    stored = bench.run(KEYS, list(range(8)), is_load=False)
    assert (stored.success, stored.transfer_bytes) == (True, 8 * ROW_BYTES)
    bench.rows[:] = 0
    loaded = bench.run([*KEYS, KEYS[0]], [*range(8, 16), 0], is_load=True)  # one key into two slots
    assert (loaded.success, loaded.transfer_bytes) == (True, 9 * ROW_BYTES)
    assert np.array_equal(bench.rows[8:], before[:8])
    assert np.array_equal(bench.rows[0], before[0])
    assert bench.value("kvtiers_blocks_total", "load", "moved") == 9


def test_a_block_that_is_there_is_not_written_again(bench: Bench) -> None:
    bench.fill(1)
    assert bench.run(KEYS[:2], [0, 1], is_load=False).success
    stamp = bench.path(KEYS[0]).stat().st_mtime_ns
    assert bench.run(KEYS[:2], [0, 1], is_load=False).success
    assert bench.path(KEYS[0]).stat().st_mtime_ns == stamp
    assert bench.value("kvtiers_blocks_total", "store", "already_stored") == 2
    task = MoveTask(is_load=False, pairs=[(KEYS[2], 2), (KEYS[1], 1)], deadline=time.monotonic() + 600)
    (batch,) = bench.tier._mover.move([task])
    assert isinstance(batch, Batch)
    assert (batch.succeeded, batch.found) == ([KEYS[2], KEYS[1]], [KEYS[1]])


def test_a_changed_block_is_a_miss_and_healed(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    before = bench.fill(1)
    assert bench.run(KEYS[:3], [0, 1, 2], is_load=False).success
    for count, offset in enumerate((0, ROW_BYTES - 1, ROW_BYTES + 30), start=1):
        data = bytearray(bench.path(KEYS[1]).read_bytes())
        data[offset] ^= 4
        bench.path(KEYS[1]).write_bytes(data)
        result = bench.run(KEYS[:3], [3, 4, 5], is_load=True)
        assert not result.success
        assert set(result.successful_keys) == {KEYS[0], KEYS[2]}
        assert bench.path(KEYS[1]).exists()
        assert "is not the block it should be" in caplog.text
        assert bench.run(KEYS[:3], [0, 1, 2], is_load=False).success
        assert bench.value("kvtiers_healed_blobs_total") == count
        bench.rows[3:6] = 0
        assert bench.run(KEYS[:3], [3, 4, 5], is_load=True).success
        assert np.array_equal(bench.rows[3:6], before[:3])


def test_bad_blocks_in_a_row_stay_and_cut_tier_off_until_a_block_is_good(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "kv", circuit_probe_s=0.001)
    before = bench.fill(1)
    blocks = list(range(8))
    assert bench.run(KEYS, blocks, is_load=False).success
    for key in KEYS:
        data = bytearray(bench.path(key).read_bytes())
        data[0] ^= 1
        bench.path(key).write_bytes(data)
    assert bench.run(KEYS, blocks, is_load=True).successful_keys == ()
    assert bench.tier.circuit_state == "open"
    bench.tier.on_schedule_end()
    bench.tier.drain_jobs()
    assert bench.tier.circuit_state == "open"
    data = bytearray(bench.path(KEYS[0]).read_bytes())
    data[0] ^= 1
    bench.path(KEYS[0]).write_bytes(data)

    def is_closed() -> bool:
        bench.tier.on_schedule_end()
        return bench.tier.circuit_state == "closed"

    wait_for(is_closed)
    bench.rows[:] = before
    assert bench.run(KEYS, blocks, is_load=False).success
    bench.rows[:] = 0
    assert bench.run(KEYS, blocks, is_load=True).success
    assert np.array_equal(bench.rows[:8], before[:8])
    bench.tier.shutdown()


def test_blocks_that_were_not_begun_teach_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that has turned slow lets few blocks of a batch begin: these took the time, not all of them."""
    mover = bench.tier._mover
    assert isinstance(mover, IsolatedMover)
    learnt: list[tuple[int, ...]] = []

    class Learner(concurrency.Concurrency):
        def learn(self, threads: int, blocks: int, *_: Any, **__: Any) -> None:
            learnt.append((threads, blocks))

    mover.loading, mover.storing = Learner(2, 2), Learner(2, 2)
    bench.fill(1)
    assert bench.run(KEYS, list(range(8)), is_load=False).success
    mover.begin_s = 0.0
    assert not bench.run(KEYS, list(range(8)), is_load=True).success
    assert sum(blocks for _, blocks in learnt) == len(KEYS)


def test_absent_keys_fail_alone(bench: Bench) -> None:
    bench.fill(1)
    assert bench.run(KEYS[:4], [0, 1, 2, 3], is_load=False).success
    result = bench.run(KEYS, list(range(8, 16)), is_load=True)
    assert set(result.successful_keys) == set(KEYS[:4])
    removed = [key for event in bench.tier.take_events() if event.removed for key in event.keys]
    assert sorted(removed) == sorted(KEYS[4:])


def test_after_workers_died_the_next_batches_are_served(bench: Bench) -> None:
    bench.fill(1)
    assert bench.run(KEYS, list(range(8)), is_load=False).success
    store = bench.tier.store
    assert isinstance(store, ProcessIsolatedStore)
    for worker in list(store._pool.workers):
        worker.process.kill()
        worker.process.wait()
    wait_for(lambda: bench.run(KEYS, list(range(8)), is_load=True).success)


def test_a_block_that_cannot_be_stored_fails_alone(bench: Bench) -> None:
    bench.fill(1)
    bench.path(KEYS[0]).parent.parent.mkdir(parents=True)
    bench.path(KEYS[0]).parent.touch()  # a file where its folder should be
    result = bench.run(KEYS[:2], [0, 1], is_load=False)
    assert set(result.successful_keys) == {KEYS[1]}
    assert bench.value("kvtiers_blocks_total", "store", "failed") == 1


def test_what_is_there_takes_no_room_of_a_bound(tmp_path: Path) -> None:
    bound = 1 << 20
    bench = Bench(tmp_path / "kv", max_bytes=bound)
    blob = ROW_BYTES + TRAILER_BYTES
    try:
        assert isinstance(bench.tier._mover, IsolatedMover)
        # Nothing is stored before the root was measured.
        wait_for(lambda: bench.run(KEYS[:1], [0], is_load=False).success)
        for _ in range(bound // (8 * blob) + 1):  # as new bytes they would be more than the bound
            assert bench.run(KEYS, list(range(8)), is_load=False).success
    finally:
        bench.tier.shutdown()


def test_what_the_storage_refuses_takes_no_room_of_a_bound(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "kv", max_bytes=1 << 20)
    try:
        wait_for(lambda: bench.run(KEYS[:1], [0], is_load=False).success)
        folders = {bench.path(key).parent for key in KEYS[1:]}
        for folder in folders:  # a file, where a folder should be
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.write_bytes(b"")
        for _ in range(40):  # together more than the bound
            assert not bench.run(KEYS[1:], list(range(7)), is_load=False).success
        for folder in folders:
            folder.unlink()
        assert bench.run(KEYS, list(range(8)), is_load=False).success
    finally:
        bench.tier.shutdown()


@pytest.mark.parametrize("bound", [{}, {"max_bytes": 64 << 20}], ids=["unbound", "bound"])
def test_a_tier_that_ends_amid_hung_calls_leaves_no_process(tmp_path: Path, bound: dict[str, int]) -> None:
    before = {child.pid for child in psutil.Process().children()}
    bench = Bench(tmp_path / "kv", shutdown_s=0.4, **bound)
    store: Any = bench.tier.store
    workers = getattr(store, "inner", store).worker_pids
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)  # as if its system call did not return
    bench.tier.submit_load(JobMetadata(99, KEYS, np.arange(8, dtype=np.int32)))
    bench.tier.shutdown()
    wait_for(lambda: not {child.pid for child in psutil.Process().children()} - before)
    assert not any(psutil.pid_exists(pid) for pid in workers)


class UnreadableBlob(MemoryStore):
    """Its blobs are moved by "workers" in this process. One cannot be read until something is put over it."""

    maps_region = True
    deadline_s = 10.0
    unreadable = ""

    def __init__(self, region: memoryview) -> None:
        super().__init__()
        self.region = region

    def run(self, function: WorkerFunction, argument: object, raw: bytes = b"", *, puts_bytes: int = 0) -> Any:
        answer = function(self, self.region, json.loads(json.dumps(argument)), memoryview(raw))
        return json.loads(json.dumps(answer))

    def abandon(self) -> None:
        pass

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key == self.unreadable:
            raise StoreUnavailableError("Input/output error", key=key)
        super().get_into(key, parts)

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if overwrite and key == self.unreadable:
            self.unreadable = ""
        return super().put(key, parts, overwrite=overwrite)


def test_a_block_that_cannot_be_read_cuts_nothing_off_and_is_healed() -> None:
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    store = UnreadableBlob(view.cast("B"))
    tier = StoreTierManager(FakeSpec(), view, "test", store=store)
    assert isinstance(tier._mover, IsolatedMover)

    def run(submit: Callable[[JobMetadata], None], *keys: OffloadKey) -> JobResult:
        submit(JobMetadata(1, keys, np.arange(len(keys), dtype=np.int32)))
        tier.drain_jobs()
        (result,) = tier.get_finished()
        return result

    assert run(tier.submit_store, *KEYS).success
    store.unreadable = tier.mapper.relative_name(KEYS[3])
    for _ in range(5):
        assert not run(tier.submit_load, KEYS[3]).success
    assert tier.circuit_state == "closed"
    assert set(run(tier.submit_load, *KEYS).successful_keys) == {*KEYS} - {KEYS[3]}
    assert run(tier.submit_store, *KEYS).transfer_bytes == ROW_BYTES
    assert run(tier.submit_load, *KEYS).success
    tier.shutdown()


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "store"])
def test_blocks_that_a_worker_could_not_begin_in_time_are_sent_again(
    is_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    store = UnreadableBlob(view.cast("B"))
    now_s, messages = 0.0, list[int]()

    def take_time(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            nonlocal now_s
            now_s += 0.6
            return call(*arguments, **options)

        return slow

    def count(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(function: WorkerFunction, argument: Any, *rest: Any, **options: Any) -> Any:
            messages.append(sum(blocks for blocks, _ in argument["batches"]))
            return call(function, argument, *rest, **options)

        return counted

    tier = StoreTierManager(FakeSpec(), view, "test", store=store)
    mover = tier._mover
    assert isinstance(mover, IsolatedMover)
    mover.begin_s = 1.0
    job = JobMetadata(1, KEYS, np.arange(len(KEYS), dtype=np.int32))
    if is_load:
        tier.submit_store(job)
        tier.drain_jobs()
        assert [result.success for result in tier.get_finished()] == [True]
    monkeypatch.setattr(store, "run", count(store.run))
    monkeypatch.setattr(store, "get_into", take_time(store.get_into))
    monkeypatch.setattr(store, "put", take_time(store.put))
    clock = SimpleNamespace(monotonic=lambda: now_s, process_time=lambda: now_s)
    monkeypatch.setattr("kvtiers.tiers.isolation.mover.time", clock)
    (tier.submit_load if is_load else tier.submit_store)(job)
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert result.success
    assert sorted(result.successful_keys) == sorted(KEYS)
    assert messages == [8, 6, 4, 2]
    tier.shutdown()


@pytest.fixture
def in_process() -> Iterator[tuple[StoreTierManager, UnreadableBlob]]:
    """A tier whose messages are answered in this process, so that tests see and change them."""
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    store = UnreadableBlob(view.cast("B"))
    tier = StoreTierManager(FakeSpec(), view, "test", store=store)
    yield tier, store
    tier.shutdown()


def move_tasks(tier: StoreTierManager, deadlines: Sequence[float], *, is_load: bool = False) -> list[Batch]:
    """One message with a task of two blocks for each deadline, given in seconds from now."""
    now = time.monotonic()
    tasks = [
        MoveTask(is_load, [(block_key(2 * n), 2 * n), (block_key(2 * n + 1), 2 * n + 1)], now + within_s)
        for n, within_s in enumerate(deadlines)
    ]
    batches = [outcome for outcome in tier._mover.move(tasks) if isinstance(outcome, Batch)]
    assert len(batches) == len(deadlines)
    return batches


@pytest.mark.parametrize("late", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("is_load", [True, False], ids=["load", "store"])
def test_a_late_task_fails_no_other_one_of_its_message(
    in_process: tuple[StoreTierManager, UnreadableBlob], late: tuple[int, ...], is_load: bool
) -> None:
    tier, _ = in_process
    if is_load:
        move_tasks(tier, [60.0] * 3)
    batches = move_tasks(tier, [-1.0 if n in late else 60.0 for n in range(3)], is_load=is_load)
    for n, batch in enumerate(batches):
        assert batch.outcomes == ({"dropped": 2} if n in late else {"moved": 2})
        assert len(batch.succeeded) == batch.outcomes["moved"]


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "store"])
def test_a_message_that_is_not_answered_is_one_failure_of_the_storage(
    in_process: tuple[StoreTierManager, UnreadableBlob], is_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies is no reason to cut the tier off, however many jobs were in its message."""
    tier, store = in_process

    def die(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("worker 1 died during the call")

    monkeypatch.setattr(store, "run", die)
    health = TierHealth(circuit := Circuit("test", failures_max=3, probe_every_s=5.0))
    for messages in range(1, 4):
        for batch in move_tasks(tier, [60.0] * 5, is_load=is_load):
            assert batch.outcomes == {"failed": 2}
            assert batch.errors == {"StoreUnavailableError": 2}
            health.moved([batch], "load" if is_load else "store")
        assert circuit.closed == (messages < 3)


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "store"])
def test_what_was_moved_of_a_task_is_reported_where_its_rest_is_cancelled(
    in_process: tuple[StoreTierManager, UnreadableBlob], is_load: bool
) -> None:
    tier, store = in_process
    job = JobMetadata(1, KEYS, np.arange(len(KEYS), dtype=np.int32))
    if is_load:
        tier.submit_store(job)
        tier.drain_jobs()
        assert [result.success for result in tier.get_finished()] == [True]
        list(tier.take_events())
    run = store.run

    def begin_two(function: WorkerFunction, argument: Any, raw: bytes = b"", *, puts_bytes: int = 0) -> Any:
        """The worker begins two blocks, and then the pool begins no task any more."""
        pairs = unpack_pairs(memoryview(raw))
        two = argument | {"batches": [(2, 60.0)]}
        answer = run(function, two, pack_pairs(pairs[:2]), puts_bytes=puts_bytes)
        answer["batches"][0] |= {"rest": list(range(2, len(pairs))), "succeeded": [0, 1]}
        tier._pool._closing = True
        return answer

    store.run = begin_two  # type: ignore[method-assign]
    (tier.submit_load if is_load else tier.submit_store)(job)
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert not result.success
    assert set(result.successful_keys) == {*KEYS[:2]}
    op = "load" if is_load else "store"
    assert tier.metrics.value("kvtiers_blocks_total", "test", op, "dropped") == len(KEYS) - 2
    if not is_load:
        (event,) = tier.take_events()
        assert set(event.keys) == {*KEYS[:2]}


def test_tasks_join_a_message_up_to_its_limit_and_are_counted_once(
    in_process: tuple[StoreTierManager, UnreadableBlob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvtiers.tiers.isolation.mover.JOINED_S", 1e9
    )  # what a block takes on a busy machine says nothing
    tier, _ = in_process
    mover = tier._mover
    assert isinstance(mover, IsolatedMover)
    counts = 0

    class Pairs(list[Pair]):
        def __len__(self) -> int:
            nonlocal counts
            counts += 1
            return super().__len__()

    def task(blocks: int) -> MoveTask:
        return MoveTask(is_load=False, pairs=Pairs((block_key(n), n) for n in range(blocks)), deadline=60.0)

    assert not mover.joins(task(1))(task(1))  # before it is known how long a block takes
    move_tasks(tier, [60.0])
    mover.message_blocks_max = 1000
    tasks = [task(1) for _ in range(1000)]
    counts = 0
    joins = mover.joins(tasks[0])
    assert [joins(each) for each in tasks[1:]] == [True] * 999
    assert counts == len(tasks)
    assert not joins(task(1))
    assert not mover.joins(task(2))(task(999))
    assert mover.joins(task(2))(task(998))


def test_packed_pairs_are_the_pairs() -> None:
    pairs = [(block_key(n, group=n), n * 7) for n in range(5)] + [(OffloadKey(b"x" * 64 + bytes(4)), 2**32 - 1)]
    assert unpack_pairs(memoryview(pack_pairs(pairs))) == pairs
    assert unpack_pairs(memoryview(pack_pairs([]))) == []


def test_a_tier_on_s3_moves_batches_by_many_threads_of_few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    rows = np.asarray(view)
    rows[:] = np.random.default_rng(6).integers(-128, 128, rows.shape, np.int8)
    before = rows.copy()
    with moto_server() as server:
        use_credentials(monkeypatch, server)
        client = server.client()
        client.create_bucket(Bucket="bucket")
        options = {"bucket": "bucket", "endpoint_url": server.endpoint_url, "request_timeout": 60.0, **PATIENT}
        tier = S3TierManager(FakeSpec(), view, "s3", **options)

        def run(blocks: range, *, is_load: bool) -> JobResult:
            job = JobMetadata(1, KEYS, np.array(blocks, np.int32))
            (tier.submit_load if is_load else tier.submit_store)(job)
            tier.drain_jobs()
            (result,) = tier.get_finished()
            return result

        def present() -> list[bool | None]:
            answers = [tier.lookup(key) for key in KEYS]
            tier.on_schedule_end()
            return [] if None in answers else answers

        try:
            assert isinstance(tier._mover, IsolatedMover)
            assert tier._mover.batch_blocks(is_load=True) == (16, 32)
            stored = run(range(8), is_load=False)
            assert (stored.success, stored.transfer_bytes) == (True, 8 * ROW_BYTES)
            name = tier.mapper.relative_name(KEYS[3])
            client.put_object(Bucket="bucket", Key=name, Body=bytes(ROW_BYTES + TRAILER_BYTES))
            client.delete_object(Bucket="bucket", Key=tier.mapper.relative_name(KEYS[5]))
            rows[:] = 0
            loaded = run(range(8, 16), is_load=True)
            assert set(loaded.successful_keys) == {*KEYS} - {KEYS[3], KEYS[5]}
            for number in {*range(8)} - {3, 5}:
                assert np.array_equal(rows[8 + number], before[number])
            assert tier.metrics.value("kvtiers_verify_failures_total", "s3", "magic") == 1
            assert wait_for(present) == [number not in (3, 5) for number in range(8)]
            rows[:] = before
            assert run(range(8), is_load=False).transfer_bytes == 2 * ROW_BYTES
            assert run(range(8, 16), is_load=True).success
        finally:
            tier.shutdown()


def test_far_storage_is_asked_for_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, at in (("GAIN_MIN", 0.0), ("BUSY_MAX", 1e9), ("WAITS_S_MAX", 1e9), ("SLOW_S", 1e9)):
        monkeypatch.setattr(concurrency, constant, at)  # what is measured on a busy machine says nothing
    count = 64
    view = SharedOffloadRegion.anonymous(count, ROW_BYTES).create_kv_memoryview()
    keys = [block_key(n) for n in range(count)]
    with HttpFaultServer() as server:
        use_credentials(monkeypatch)
        options = {"n_read_threads": 1, "n_write_threads": 1, "n_threads_max": 16, "request_timeout": 60.0, **PATIENT}
        begin, many = server.begin, threading.Event()

        def begin_with_many(request: Request) -> Any:
            """Answer none before there are more under way than two workers that ask for one at a time have."""
            fault = begin(request)
            if server.most_under_way > 4:
                many.set()
            many.wait(60)
            return fault

        tier = S3TierManager(FakeSpec(), view, "s3", bucket="bucket", endpoint_url=server.endpoint_url, **options)
        assert isinstance(tier._mover, IsolatedMover)
        try:
            for submit, is_load in ((tier.submit_store, False), (tier.submit_load, True)):
                server.answer_after_s = 0.05
                job = 0
                while tier._mover.batch_blocks(is_load=is_load)[0] < 2 * 16:
                    job += 1
                    assert job < 20
                    submit(JobMetadata(job, keys[:16], np.arange(16, dtype=np.int32)))
                    tier.drain_jobs()
                    assert [result.success for result in tier.get_finished()] == [True]
                server.most_under_way = 0
                many.clear()
                with monkeypatch.context() as together:
                    together.setattr(server, "begin", begin_with_many)
                    submit(JobMetadata(99, keys, np.arange(count, dtype=np.int32)))
                    tier.drain_jobs()
                assert [result.success for result in tier.get_finished()] == [True]
                assert many.is_set()
        finally:
            tier.shutdown()
