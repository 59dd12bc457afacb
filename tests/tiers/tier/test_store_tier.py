"""StoreTierManager over the memory and the local store, also with a store that fails or is corrupted."""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtiers.tiers.base import JobMetadata, JobResult
from kvtiers.tiers.blocks.file_mapper import FileMapper, strict_fields
from kvtiers.tiers.blocks.keys import OffloadKey, make_offload_key
from kvtiers.tiers.blocks.seal import CHECK_AT, TRAILER_BYTES
from kvtiers.tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    ConfigError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.server import block_mover, server
from kvtiers.tiers.store import Capabilities, Store
from kvtiers.tiers.stores import vectored_io
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import list_keys
from kvtiers.tiers.testing.faults import Fault, FaultyStore
from kvtiers.tiers.tier import channel, health, store_tier
from kvtiers.tiers.tier.circuit import CircuitState
from kvtiers.tiers.tier.health import REST_S
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.clock import Clock
from tests.identity import FakeSpec, block_key
from tests.promises import Record
from tests.tiers.server.in_threads import THREADS, in_threads
from tests.waiting import wait_for

ROWS, ROW_BYTES = 32, 8192
BLOB_BYTES = ROW_BYTES + TRAILER_BYTES
KEYS = [block_key(n) for n in range(ROWS)]
PATIENT = TierOptions(shutdown_s=400.0)


class Bench:
    """A region, and tiers over one store."""

    def __init__(self, make_store: Callable[[], Store]) -> None:
        self.make_store = make_store
        self.region = np.zeros((ROWS, ROW_BYTES), np.int8)
        self.tiers: list[StoreTierManager] = []
        self.clock: Callable[[], float] = time.monotonic
        self.job_id = 0

    def tier(
        self, spec: FakeSpec | None = None, store: Store | None = None, task_bytes: int = 3 * ROW_BYTES, **options: Any
    ) -> StoreTierManager:
        server.PIECE_BYTES_MIN = server.PIECE_BYTES_MAX = task_bytes  # type: ignore[misc]
        spec = spec or FakeSpec()
        threads = {name: options.pop(name) for name in ("n_read_threads", "n_write_threads") if name in options}
        lookup = LookupOptions(deadline_s=20, absent_ttl_s=0)  # tests wait for answers; deadlines have their own test
        made = StoreTierManager(
            spec,
            self.region.data,
            "test",
            make_backend=in_threads(store or self.make_store(), clock=self.clock, **threads),
            options=TierOptions(**{"lookup": lookup, "shutdown_s": 20.0, **options}),
            clock=self.clock,
        )
        self.tiers.append(made)
        return made

    def fill(self, seed: int) -> np.ndarray[Any, Any]:
        self.region[:] = np.random.default_rng(seed).integers(-128, 128, self.region.shape, np.int8)
        return self.region.copy()

    def job(self, keys: Sequence[OffloadKey], blocks: Sequence[int] | None = None) -> JobMetadata:
        self.job_id += 1
        return JobMetadata(
            self.job_id, list(keys), np.asarray(range(len(keys)) if blocks is None else blocks, np.int32)
        )

    def store(
        self, tier: StoreTierManager, keys: Sequence[OffloadKey], blocks: Sequence[int] | None = None
    ) -> JobResult:
        tier.submit_store(job := self.job(keys, blocks))
        return self.result(tier, job)

    def load(
        self, tier: StoreTierManager, keys: Sequence[OffloadKey], blocks: Sequence[int] | None = None
    ) -> JobResult:
        tier.submit_load(job := self.job(keys, blocks))
        return self.result(tier, job)

    def fail(self, what: str, tier: StoreTierManager, keys: Sequence[OffloadKey]) -> None:
        """Run a load, store or lookup that must fail."""
        if what == "lookup":
            assert not any(self.present(tier, key) for key in keys)
        else:
            assert not (self.load if what == "load" else self.store)(tier, keys).success

    @staticmethod
    def result(tier: StoreTierManager, job: JobMetadata) -> JobResult:
        tier.drain_jobs()
        (result,) = tier.get_finished()
        assert result.job_id == job.job_id
        return result

    @staticmethod
    def results(tier: StoreTierManager, count: int) -> dict[int, bool]:
        """Wait for the next jobs to end. Returns for each whether it succeeded."""
        ended: dict[int, bool] = {}

        def all_ended() -> bool:
            for result in tier.get_finished():
                assert result.job_id not in ended, "it was reported twice"
                ended[result.job_id] = result.success
            return len(ended) >= count

        wait_for(all_ended)
        return ended

    @staticmethod
    def first_result(tier: StoreTierManager) -> JobResult:
        """The result of the job that ends first."""
        (result,) = wait_for(lambda: list(tier.get_finished()))
        return result

    @staticmethod
    def told(tier: StoreTierManager) -> list[tuple[OffloadKey, bool]]:
        """The keys of all new events, each with whether it was removed."""
        return [(key, event.removed) for event in tier.take_events() for key in event.keys]

    @staticmethod
    def present(tier: StoreTierManager, key: OffloadKey) -> bool:
        def ask() -> list[bool]:
            answer = tier.lookup(key)
            tier.on_schedule_end()
            return [] if answer is None else [answer]

        return wait_for(ask)[0]

    @staticmethod
    def wait_until_closed(tier: StoreTierManager) -> None:
        def probed() -> bool:
            tier.on_schedule_end()
            return tier.circuit_state == "closed"

        wait_for(probed)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, and a long time for threads to end: otherwise a tier leaves its store open and its rows mapped.

    No search for other namespaces either: tests count calls of the store.
    """
    monkeypatch.setattr(channel, "END_S", 10.0)
    monkeypatch.setattr(server, "tell_nearest", lambda *_: None)
    monkeypatch.setattr(server, "PIECE_BYTES_MIN", 3 * ROW_BYTES)
    monkeypatch.setattr(server, "PIECE_BYTES_MAX", 3 * ROW_BYTES)


@pytest.fixture(params=["memory", "local", "local, piece by piece"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    if "piece" in request.param:
        monkeypatch.setattr(block_mover, "PIECEWISE_BYTES_MIN", 0)
        monkeypatch.setattr(vectored_io, "READ_PIECE_BYTES", ROW_BYTES // 2)
        monkeypatch.setattr(vectored_io, "WRITE_PIECE_BYTES", ROW_BYTES // 2)
        monkeypatch.setattr(vectored_io, "RUN_SLACK_BYTES", 0)
    memory = MemoryStore()
    made = Bench((lambda: memory) if request.param == "memory" else (lambda: LocalStore(str(tmp_path / "kv"))))
    yield made
    for tier in made.tiers:
        tier.shutdown()


#: For tests that bring a store of their own: with each of the three they would do the same again.
ONE_BENCH = pytest.mark.parametrize("bench", ["memory"], indirect=True)


def read(store: Store, name: str) -> bytes:
    size = store.size(name)
    assert size is not None
    data = bytearray(size)
    store.get_into(name, [memoryview(data)])
    return bytes(data)


def write(store: Store, name: str, data: bytes) -> None:
    store.delete(name)
    store.put(name, [memoryview(data)])


def spoil_payload(store: Store, name: str) -> None:
    """Only a load can find this damage, because the trailer is good."""
    data = read(store, name)
    write(store, name, bytes([data[0] ^ 1]) + data[1:])


def rot_payload(store: MemoryStore, name: str) -> None:
    """Like ``spoil_payload``, for a store that cannot delete."""
    data = read(store, name)
    store.put(name, [memoryview(bytes([data[0] ^ 1]) + data[1:])], overwrite=True)


def make_newer(store: Store, name: str) -> bytes:
    """Turn a block into one of a newer version. Returns its bytes."""
    blob = bytearray(read(store, name))
    blob[ROW_BYTES + 8] = 2
    fields = blob[ROW_BYTES : ROW_BYTES + CHECK_AT]
    blob[ROW_BYTES + CHECK_AT : ROW_BYTES + CHECK_AT + 8] = xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")
    write(store, name, bytes(blob))
    return bytes(blob)


def test_stored_blocks_load_in_another_tier_object(bench: Bench) -> None:
    writer, reader = bench.tier(), bench.tier()
    original = bench.fill(1)
    stored = bench.store(writer, KEYS)
    assert stored.success
    assert stored.transfer_bytes == ROWS * ROW_BYTES
    assert set(stored.successful_keys) == set(KEYS)
    assert all(bench.present(reader, key) for key in KEYS)
    bench.fill(2)
    order = random.Random(3).sample(range(ROWS), ROWS)
    loaded = bench.load(reader, [KEYS[i] for i in order], order)
    assert loaded.success
    assert loaded.transfer_bytes == ROWS * ROW_BYTES
    assert (bench.region == original).all()


def test_missing_key_is_a_miss_of_only_that_key(bench: Bench) -> None:
    tier = bench.tier()
    bench.fill(1)
    bench.store(tier, KEYS[:4])
    assert not bench.present(tier, KEYS[9])
    result = bench.load(tier, [KEYS[0], KEYS[9], KEYS[3]])
    assert not result.success
    assert set(result.successful_keys) == {KEYS[0], KEYS[3]}
    assert not bench.present(tier, KEYS[9])


def test_stored_blocks_are_not_written_again(bench: Bench) -> None:
    tier = bench.tier()
    bench.fill(1)
    bench.store(tier, KEYS[:3])
    blobs = [read(tier.store, tier.mapper.relative_name(key)) for key in KEYS[:3]]
    again = bench.store(tier, KEYS[:4])
    assert again.success
    assert again.transfer_bytes == ROW_BYTES
    assert [read(tier.store, tier.mapper.relative_name(key)) for key in KEYS[:3]] == blobs
    assert tier.metrics.value("kvtiers_blocks_total", "test", "store", "already_stored") == 3


def test_storing_a_present_block_counts_as_its_use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[OffloadKey] = []
    monkeypatch.setattr(StoreTierManager, "touch", lambda _, keys: used.extend(keys))
    tier = bench.tier()
    bench.store(tier, KEYS[:3])
    assert used == []
    bench.store(tier, KEYS[:3])
    assert sorted(used) == sorted(KEYS[:3])
    bench.load(tier, KEYS[:2])
    assert sorted(used[3:]) == sorted(KEYS[:2])


@pytest.mark.parametrize("cut", [-1, TRAILER_BYTES, BLOB_BYTES])
def test_store_replaces_a_blob_of_wrong_size_or_bad_trailer(bench: Bench, cut: int) -> None:
    tier = bench.tier()
    original = bench.fill(1)
    bench.store(tier, KEYS[:1])
    name = tier.mapper.relative_name(KEYS[0])
    blob = read(tier.store, name)
    bad = blob[:cut] if cut < BLOB_BYTES else blob[:-200] + b"\1" + blob[-199:]
    write(tier.store, name, bad)
    assert bench.store(tier, KEYS[:1]).transfer_bytes == ROW_BYTES
    assert tier.metrics.value("kvtiers_healed_blobs_total", "test") == 1
    bench.fill(2)
    assert bench.load(tier, KEYS[:1]).success
    assert (bench.region[0] == original[0]).all()


def test_bad_payload_is_a_miss_and_overwritten_by_the_next_store(bench: Bench) -> None:
    tier = bench.tier()
    original = bench.fill(1)
    bench.store(tier, KEYS[:2])
    name = tier.mapper.relative_name(KEYS[0])
    spoil_payload(tier.store, name)
    assert bench.present(tier, KEYS[0])  # its size and trailer are right
    result = bench.load(tier, KEYS[:2])
    assert result.successful_keys == (KEYS[1],)
    assert tier.metrics.value("kvtiers_verify_failures_total", "test", "payload_checksum") == 1
    assert tier.store.size(name) == BLOB_BYTES, "another host may be able to read it"
    assert not bench.present(tier, KEYS[0])
    bench.region[:] = original
    assert bench.store(tier, KEYS[:1]).success
    assert tier.metrics.value("kvtiers_healed_blobs_total", "test") == 1
    bench.fill(2)
    assert bench.load(tier, KEYS[:1]).success
    assert (bench.region[0] == original[0]).all()


@ONE_BENCH
def test_many_bad_blocks_are_overwritten_by_the_next_store_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "KEYS_MAX", 4)  # more of them than of blocks that cannot be read
    store = KeepsAll()
    tier = bench.tier(store=store)
    original = bench.fill(1)
    bench.store(tier, KEYS)
    for key in KEYS[1:]:
        rot_payload(store, tier.mapper.relative_name(key))
    assert bench.load(tier, KEYS).successful_keys == (KEYS[0],)
    assert not any(bench.present(tier, key) for key in KEYS[1:]), "their loads would fail again at once"
    assert tier.circuit_state == "closed"
    bench.region[:] = original
    assert bench.store(tier, KEYS).transfer_bytes == (ROWS - 1) * ROW_BYTES
    bench.fill(2)
    assert bench.load(tier, KEYS).success
    assert (bench.region == original).all()
    assert bench.store(tier, KEYS).transfer_bytes == 0


@ONE_BENCH
@pytest.mark.parametrize("error", [StoreFullError, StoreConfigError, StorePermissionError])
def test_bad_block_that_cannot_be_overwritten_is_deleted_first(bench: Bench, error: type[StoreError]) -> None:
    store = NeverReplaces(error)
    tier = bench.tier(store=store)
    original = bench.fill(1)
    bench.store(tier, KEYS[:2])
    spoil_payload(store, tier.mapper.relative_name(KEYS[0]))
    name = tier.mapper.relative_name(KEYS[1])
    write(store, name, read(store, name)[:-1] + b"x")  # the trailer's end, which a store sees without a load
    assert not bench.load(tier, KEYS[:1]).success
    bench.region[:] = original
    assert bench.store(tier, KEYS[:2]).success
    bench.fill(2)
    assert bench.load(tier, KEYS[:2]).success
    assert (bench.region[:2] == original[:2]).all()


def store_that_never_replaces(bench: Bench, error: type[StoreError]) -> tuple[NeverReplaces, StoreTierManager, str]:
    """A store with one block, its tier, and the block's name."""
    store = NeverReplaces(error)
    tier = bench.tier(store=store)
    bench.fill(1)
    bench.store(tier, KEYS[:1])
    return store, tier, tier.mapper.relative_name(KEYS[0])


@ONE_BENCH
@pytest.mark.parametrize("error", [StoreFullError, StorePermissionError])
def test_good_block_misread_by_one_read_is_not_deleted_to_make_room(bench: Bench, error: type[StoreError]) -> None:
    store, tier, name = store_that_never_replaces(bench, error)
    before = read(store, name)
    store.misread_tails = True
    assert bench.store(tier, KEYS[:1]).success
    assert read(store, name) == before


@ONE_BENCH
@pytest.mark.parametrize("error", [StoreFullError, StorePermissionError])
def test_block_that_can_be_neither_read_nor_overwritten_is_not_deleted(bench: Bench, error: type[StoreError]) -> None:
    """As with credentials that lack a permission: others may read the block, and nobody here knows what it is."""
    store, tier, name = store_that_never_replaces(bench, error)
    before = read(store, name)
    store.unreadable = StorePermissionError
    assert not bench.load(tier, KEYS[:1]).success
    assert not bench.store(tier, KEYS[:1]).success
    store.unreadable = None
    assert read(store, name) == before


@ONE_BENCH
def test_damaged_reads_lose_a_block_per_thread_at_most_where_deletions_make_no_room(bench: Bench) -> None:
    store = NeverReplaces(StoreFullError)
    tier = bench.tier(store=store, n_read_threads=1, n_write_threads=1)
    bench.fill(1)
    bench.store(tier, KEYS)
    stored = list_keys(store)
    store.misread_tails = store.misreads = store.is_full = True
    for _ in range(3):
        assert not bench.store(tier, KEYS).success
    assert len(stored) - 4 <= len(list_keys(store)) < len(stored)
    store.misread_tails = store.misreads = store.is_full = False
    assert bench.store(tier, KEYS).success
    assert list_keys(store) == stored


@ONE_BENCH
@pytest.mark.parametrize("tail_is_readable", [True, False])
def test_unreadable_block_is_healed_by_the_next_store(bench: Bench, tail_is_readable: bool) -> None:
    store = PartlyRefused()
    tier = bench.tier(store=store)
    original = bench.fill(1)
    bench.store(tier, KEYS[:2])
    name = tier.mapper.relative_name(KEYS[0])
    store.unreadable = {name: StoreUnavailableError}
    store.tail_refused = "" if tail_is_readable else name
    assert bench.load(tier, KEYS[:2]).successful_keys == (KEYS[1],)
    bench.region[:] = original
    assert bench.store(tier, KEYS[:2]).transfer_bytes == ROW_BYTES
    assert tier.metrics.value("kvtiers_healed_blobs_total", "test") == 1
    store.tail_refused = ""
    bench.fill(2)
    assert bench.load(tier, KEYS[:2]).success
    assert (bench.region[:2] == original[:2]).all()
    assert bench.store(tier, KEYS[:2]).transfer_bytes == 0  # once


@ONE_BENCH
@pytest.mark.parametrize("error", [StoreTimeoutError, StoreThrottledError])
def test_block_whose_load_timed_out_is_not_written_again(bench: Bench, error: type[StoreError]) -> None:
    store = PartlyRefused()
    tier = bench.tier(store=store)
    bench.fill(1)
    bench.store(tier, KEYS[:1])
    store.unreadable = {tier.mapper.relative_name(KEYS[0]): error}
    assert not bench.load(tier, KEYS[:1]).success
    assert bench.store(tier, KEYS[:1]).transfer_bytes == 0


@ONE_BENCH
def test_unreadable_block_of_a_newer_version_is_kept(bench: Bench) -> None:
    store = PartlyRefused()
    tier = bench.tier(store=store)
    bench.fill(1)
    bench.store(tier, KEYS[:1])
    name = tier.mapper.relative_name(KEYS[0])
    blob = make_newer(store, name)
    store.unreadable = {name: StoreUnavailableError}
    assert not bench.load(tier, KEYS[:1]).success
    assert not bench.store(tier, KEYS[:1]).success
    store.unreadable = {}
    assert read(store, name) == blob


def test_slot_changed_during_a_store_fails_its_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = bench.tier()
    if isinstance(tier.store, MemoryStore):
        pytest.skip("copies the slot in one step")
    bench.fill(1)
    write = os.pwritev

    def late_write(*arguments: Any) -> int:
        bench.region[0, -1] += 1
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", late_write)
        assert bench.store(tier, KEYS[:1]).success
    assert not bench.load(tier, KEYS[:1]).success
    assert tier.metrics.value("kvtiers_verify_failures_total", "test", "payload_checksum") == 1


def test_block_of_a_newer_version_is_a_miss_and_kept(bench: Bench) -> None:
    tier = bench.tier()
    bench.fill(1)
    bench.store(tier, KEYS[:1])
    name = tier.mapper.relative_name(KEYS[0])
    blob = make_newer(tier.store, name)
    assert not bench.load(tier, KEYS[:1]).success
    assert not bench.store(tier, KEYS[:1]).success
    assert read(tier.store, name) == blob


def test_duplicate_key_is_stored_once_and_loaded_into_both_slots(bench: Bench) -> None:
    tier = bench.tier()
    original = bench.fill(1)
    stored = bench.store(tier, [KEYS[0], KEYS[0]], [4, 4])
    assert stored.success
    assert stored.transfer_bytes == ROW_BYTES
    bench.fill(2)
    assert bench.load(tier, [KEYS[0], KEYS[0]], [1, 2]).success
    assert (bench.region[1] == original[4]).all()
    assert (bench.region[2] == original[4]).all()


@ONE_BENCH
def test_duplicate_key_fails_if_one_of_its_slots_is_not_filled(bench: Bench) -> None:
    gated = GatedStore()
    tier = bench.tier(store=gated, n_read_threads=1, n_write_threads=1)
    bench.fill(1)
    bench.store(tier, KEYS[:2])
    get_into, gets = gated.get_into, []

    def once(key: str, parts: Sequence[memoryview]) -> None:
        gets.append(key)
        if gets.count(key) > 1 and key == tier.mapper.relative_name(KEYS[0]):
            raise StoreUnavailableError("away")
        get_into(key, parts)

    gated.get_into = once  # type: ignore[method-assign]
    result = bench.load(tier, [KEYS[0], KEYS[1], KEYS[0]], [2, 3, 4])
    assert (result.success, result.successful_keys) == (False, (KEYS[1],))


def test_successful_keys_are_in_the_order_of_the_job(bench: Bench) -> None:
    """Threads take its blocks in turn, and pieces end in any order."""
    tier = bench.tier(n_write_threads=3, n_read_threads=3)
    assert bench.store(tier, KEYS).successful_keys == tuple(KEYS)
    assert bench.load(tier, KEYS[::-1]).successful_keys == tuple(KEYS[::-1])
    tier.store.delete(tier.mapper.relative_name(KEYS[1]))
    assert bench.load(tier, KEYS).successful_keys == (KEYS[0], *KEYS[2:])


def test_empty_job_succeeds(bench: Bench) -> None:
    tier = bench.tier()
    assert bench.store(tier, []).success
    assert bench.load(tier, []).success


@pytest.mark.parametrize(("keys", "blocks"), [(KEYS[:2], [0]), (KEYS[:1], [ROWS]), (KEYS[:1], [-1])])
def test_invalid_jobs_are_refused_before_any_block_moves(
    bench: Bench, keys: list[OffloadKey], blocks: list[int]
) -> None:
    tier = bench.tier()
    for submit in (tier.submit_load, tier.submit_store):
        with pytest.raises(ValueError, match="block"):
            submit(bench.job(keys, blocks))
    assert list(tier.get_finished()) == []


def test_store_emits_one_stored_event(bench: Bench) -> None:
    tier = bench.tier()
    bench.fill(1)
    bench.store(tier, KEYS[:2])
    (event,) = tier.take_events()
    assert set(event.keys) == set(KEYS[:2])
    assert (event.medium, event.removed) == ("test", False)
    assert list(tier.take_events()) == []


@ONE_BENCH
def test_failed_load_emits_removed_events_only_for_missing_blocks(bench: Bench) -> None:
    """After an outage of a second the blocks are still there, and nobody would take the event back."""
    gated = GatedStore()
    tier = bench.tier(store=gated)
    bench.fill(1)
    bench.store(tier, KEYS[:4])
    gated.delete(tier.mapper.relative_name(KEYS[0]))
    write(gated, tier.mapper.relative_name(KEYS[1]), bytes(BLOB_BYTES))
    write(gated, tier.mapper.relative_name(KEYS[2]), b"")
    list(tier.take_events())
    gated.error = StoreUnavailableError("away")
    assert not bench.load(tier, KEYS[:4]).success
    assert list(tier.take_events()) == []
    gated.error = None
    assert bench.load(tier, KEYS[:4]).successful_keys == (KEYS[3],)
    assert sorted(bench.told(tier)) == sorted((key, True) for key in KEYS[:3])


def test_stored_blocks_are_found_without_a_lookup(bench: Bench) -> None:
    tier = bench.tier()
    bench.fill(1)
    bench.store(tier, KEYS[:1])
    assert tier.lookup(KEYS[0]) is True


@ONE_BENCH
def test_jobs_beyond_the_limit_fail_at_once_and_are_counted(bench: Bench, record: Record) -> None:
    """D4."""
    gated = GatedStore()
    tier = bench.tier(store=gated, jobs_max=1)
    gated.gate.clear()
    bench.fill(1)
    tier.submit_store(first := bench.job(KEYS[:1]))
    tier.submit_store(second := bench.job(KEYS[1:3]))
    assert list(tier.get_finished()) == [JobResult(second.job_id, success=False)]
    assert tier.metrics.value("kvtiers_stores_dropped_total", "test", "queue_full") == 2
    assert tier.metrics.value("kvtiers_blocks_total", "test", "store", "dropped") == 2
    gated.gate.set()
    assert bench.result(tier, first).success
    record("D4", jobs_max=1, blocks_dropped_and_counted=2)


@ONE_BENCH
def test_large_job_is_booked_in_parts_and_reported_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a large job would delay a scheduler step."""
    monkeypatch.setattr(store_tier, "BOOKED_KEYS_PER_CALL", 3)
    tier = bench.tier()
    bench.fill(1)
    noted: list[int] = []
    mark = tier._lookup.mark
    monkeypatch.setattr(
        tier._lookup,
        "mark",
        lambda keys, **fate: noted.append(len(keys)) or mark(keys, **fate),  # type: ignore[func-returns-value]
    )
    tier.submit_store(large := bench.job(KEYS[:10]))
    tier.submit_store(small := bench.job(KEYS[10:12]))
    assert tier._channel.wait_idle(120)
    results: list[JobResult] = []
    calls = 0
    while len(results) < 2:
        before = len(noted)
        results += tier.get_finished()
        calls += 1
        assert sum(noted[before:]) <= 2 * 3
    assert calls > 3
    assert {result.job_id for result in results} == {large.job_id, small.job_id}
    assert sorted(key for result in results for key in result.successful_keys) == sorted(KEYS[:12])
    assert sorted(bench.told(tier)) == sorted((key, False) for key in KEYS[:12])
    tier.submit_load(again := bench.job(KEYS[:10]))
    assert bench.result(tier, again).success  # all at once where the engine waits for it


@ONE_BENCH
def test_loads_are_accepted_while_the_queue_of_stores_is_full(bench: Bench) -> None:
    """A load is bounded by its slots. A refused load would be a miss of a stored block, again and again."""
    gated = GatedStore()
    tier = bench.tier(store=gated, jobs_max=1, max_bytes_in_flight=1)
    bench.fill(1)
    assert bench.store(tier, KEYS[:2]).success
    gated.gate.clear()
    tier.submit_store(waiting := bench.job(KEYS[2:3]))
    loads = [bench.job(KEYS[:2]) for _ in range(3)]
    for job in loads:
        tier.submit_load(job)
    assert list(tier.get_finished()) == []
    gated.gate.set()
    tier.drain_jobs()
    assert {result.job_id: result.success for result in tier.get_finished()} == dict.fromkeys(
        [waiting.job_id, *(job.job_id for job in loads)], True
    )


@ONE_BENCH
def test_shutdown_reports_every_job_once(bench: Bench) -> None:
    gated = GatedStore()
    tier = bench.tier(store=gated, n_read_threads=1, n_write_threads=1, shutdown_s=0.05)
    bench.fill(1)
    gated.hold()
    jobs = [bench.job(KEYS) for _ in range(3)]
    for job in jobs:
        tier.submit_store(job)
    wait_for(lambda: gated.entered == 2)
    tier.shutdown()
    assert not gated.closed  # threads are in it
    early = list(tier.get_finished())
    assert jobs[0].job_id not in {result.job_id for result in early}
    gated.gate.set()
    results = bench.results(tier, len(jobs) - len(early)) | {result.job_id: result.success for result in early}
    assert results == dict.fromkeys((job.job_id for job in jobs), False)
    assert list(tier.get_finished()) == []
    tier.submit_store(bench.job(KEYS[:1]))
    assert [result.success for result in tier.get_finished()] == [False]


class _LateQueue(deque[Any]):
    """A piece comes just after the first look for one."""

    def popleft(self) -> Any:
        if not self:
            self.append(("part", []))
            raise IndexError
        return super().popleft()


@ONE_BENCH
def test_piece_queued_after_a_threads_search_is_still_moved(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token took the piece of another kind for which the thread had come."""
    handle: Any = bench.tier()._channel._children[0].handle
    ended: list[Any] = []
    monkeypatch.setattr(handle._server, "_moved", lambda part, pairs: part)
    monkeypatch.setattr(handle._server, "_end_piece", lambda part, batch: ended.append(part))
    tokens: SimpleQueue[bool] = SimpleQueue()
    thread = threading.Thread(target=handle._server._move_pieces, args=(tokens, (_LateQueue(), deque())))
    thread.start()
    tokens.put(True)
    wait_for(lambda: ended)
    tokens.put(False)
    thread.join()
    assert ended == ["part"]


@ONE_BENCH
def test_shutdown_cancels_running_batches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "DRAIN_SHARE", 0.001)
    slow = GatedStore()
    tier = bench.tier(store=slow, n_read_threads=1, n_write_threads=1)
    slow.hold()
    tier.submit_store(bench.job(KEYS))
    wait_for(lambda: slow.entered == 2)  # each of the two threads stores the first block of a batch of three
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(tier.shutdown)
        try:
            wait_for(lambda: tier._channel._children[0].handle._server._cut)  # type: ignore[union-attr]
        finally:
            slow.gate.set()
        ending.result(120)
    assert slow.closed
    assert slow.entered == 2
    (result,) = tier.get_finished()
    assert len(result.successful_keys) == 2
    assert tier.metrics.value("kvtiers_blocks_total", "test", "store", "moved") == 2
    assert tier.metrics.value("kvtiers_blocks_total", "test", "store", "dropped") == ROWS - 2
    assert tier.metrics.value("kvtiers_stores_dropped_total", "test", "shutdown") == ROWS - 2


@ONE_BENCH
@pytest.mark.parametrize("error", [StoreFullError("full"), StoreUnavailableError("io"), SystemExit(1), MemoryError()])
def test_store_errors_fail_only_their_job(bench: Bench, error: BaseException) -> None:
    broken = GatedStore()
    tier = bench.tier(store=broken, circuit_failures=1000)
    bench.fill(1)
    broken.error = error
    assert not bench.store(tier, KEYS).success
    assert tier.metrics.value("kvtiers_blocks_total", "test", "store", "failed") == ROWS
    assert tier.metrics.value("kvtiers_stores_dropped_total", "test", type(error).__name__) == ROWS
    assert not bench.load(tier, KEYS).success
    assert not bench.present(tier, KEYS[0])
    broken.error = None
    assert bench.store(tier, KEYS).success
    assert bench.load(tier, KEYS).success


@ONE_BENCH
def test_corrupt_tail_is_replaced(bench: Bench) -> None:
    odd = GatedStore()
    tier = bench.tier(store=odd)
    bench.fill(1)
    assert bench.store(tier, KEYS[:1]).success
    odd.tail_error = BlobCorruptError("a folder")
    assert bench.store(tier, KEYS[:1]).success
    assert tier.metrics.value("kvtiers_healed_blobs_total", "test") == 1


def test_rows_that_are_not_a_multiple_of_4096_bytes_are_refused(bench: Bench) -> None:
    bench.region = np.zeros((2, 5000), np.int8)
    with pytest.raises(ConfigError, match="rows of 5000 bytes; must be a multiple of 4096"):
        bench.tier()


def test_readonly_or_flat_view_is_refused() -> None:
    spec = FakeSpec()
    mapper = FileMapper.from_offloading_spec("", spec)
    for view in (memoryview(bytes(8192)).cast("b", (2, 4096)), memoryview(bytearray(8192))):
        with pytest.raises(ConfigError, match="primary_kv_view"):
            StoreTierManager(spec, view, "test", make_backend=in_threads(MemoryStore()), mapper=mapper)


class GatedStore(Store):
    """A memory store that can be paused or made to fail."""

    capabilities = Capabilities(exclusive_create=True, shared=False, latency_bound=False)

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = 0
        self.error: BaseException | None = None
        self.tail_error: StoreError | None = None
        self.closed = False

    def hold(self) -> None:
        """Pause all calls from now on, and count them."""
        self.gate.clear()
        self.entered = 0

    def _pass(self, call: str, key: str) -> None:
        self.entered += 1
        assert self.gate.wait(120)
        if self.error:
            raise self.error

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._pass("put", key)
        return self.inner.put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._pass("get", key)
        self.inner.get_into(key, parts)

    def size(self, key: str) -> int | None:
        self._pass("size", key)
        return self.inner.size(key)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        if self.tail_error:
            raise self.tail_error
        return self.inner.get_tail(key, length)

    def delete(self, key: str) -> None:
        self._pass("delete", key)
        self.inner.delete(key)

    def keys(self, prefix: str = "") -> Iterator[Any]:
        return self.inner.keys(prefix)

    def close(self) -> None:
        self.closed = True
        self.inner.close()


class BareStore(GatedStore):
    """A store with the six methods and nothing else. ``says``: whether ``put`` tells if it published."""

    says = True
    get_tail = None  # type: ignore[assignment]

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        published = super().put(key, parts, overwrite=overwrite)
        return published if self.says else None  # type: ignore[return-value]


@ONE_BENCH
def test_default_mapper_separates_model_revisions(bench: Bench) -> None:
    """W6, for tiers that do not give a mapper."""

    def tier(revision: str) -> StoreTierManager:
        spec = FakeSpec().changed("model", revision=revision)
        bench.tiers.append(StoreTierManager(spec, bench.region.data, "theirs", make_backend=in_threads(store)))
        return bench.tiers[-1]

    store = MemoryStore()
    bench.fill(1)
    first, second = tier("a"), tier("b")
    assert bench.store(first, KEYS).success
    assert not bench.present(second, KEYS[0])
    second.submit_load(job := bench.job(KEYS))
    assert bench.result(second, job).successful_keys == ()


class TestNamespace:
    """``config.json`` is written once and compared at each start."""

    def test_config_json_is_written_once_and_accepted_again(self, bench: Bench) -> None:
        tier = bench.tier()
        assert b'"model_revision": "abc123"' in read(tier.store, tier.mapper.relative_config_name)
        bench.tier()

    @pytest.mark.parametrize(
        ("content", "error", "text"),
        [
            (b"{", ConfigError, "torn or foreign"),
            (b"[]", ConfigError, "foreign"),
            (b"\xff\xfe", ConfigError, "torn or foreign"),
            (b"[" * 100_000, ConfigError, "torn or foreign .it is nested too deeply"),
            (bytes((1 << 20) + 1), ConfigError, "1048577 bytes"),
        ],
    )
    def test_invalid_config_json_is_refused_and_kept(
        self, bench: Bench, content: bytes, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = bench.tier()
        write(tier.store, tier.mapper.relative_config_name, content)
        puts: list[str] = []
        store = bench.make_store()
        monkeypatch.setattr(store, "put", lambda key, *_, **__: puts.append(key))
        with pytest.raises(error, match=text):
            bench.tier(store=store)
        assert not puts

    @pytest.mark.parametrize("content", [b"", bytes(700)])
    def test_empty_or_zeroed_config_json_is_written_again(
        self, bench: Bench, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = bench.tier()
        name = tier.mapper.relative_config_name
        good = read(tier.store, name)
        write(tier.store, name, content)
        bench.tier(read_only=True)
        assert read(tier.store, name) == content
        bench.tier()
        assert read(tier.store, name) == good
        assert "as after a power cut: it is written again" in caplog.text

    def test_config_json_mismatch_error_names_the_field(self, bench: Bench) -> None:
        tier = bench.tier()
        name = tier.mapper.relative_config_name
        write(tier.store, name, read(tier.store, name).replace(b'"dtype": "float32"', b'"dtype": "float16"'))
        with pytest.raises(ConfigError, match="'float16', this process would write 'float32'") as caught:
            bench.tier()
        assert caught.value.field == "dtype"

    def test_config_json_mismatch_error_is_short_and_printable(self, bench: Bench) -> None:
        tier = bench.tier()
        name = tier.mapper.relative_config_name
        content = json.loads(read(tier.store, name)) | {"\x1b[2J\nINFO all is well": "a" * 100_000}
        write(tier.store, name, json.dumps(content).encode())
        with pytest.raises(ConfigError, match=r"\\x1b\[2J\\nINFO all is well: .* says 'aaa") as caught:
            bench.tier()
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()

    @ONE_BENCH
    def test_unavailable_or_full_storage_does_not_stop_the_engine(self, bench: Bench) -> None:
        for error in (StoreUnavailableError("hung"), StoreFullError("full")):
            broken = GatedStore()
            broken.error = error
            bench.tier(store=broken)

    @ONE_BENCH
    def test_permission_error_stops_the_engine(self, bench: Bench) -> None:
        broken = GatedStore()
        broken.error = StorePermissionError("no")
        with pytest.raises(StorePermissionError):
            bench.tier(store=broken)


class InStepStore(GatedStore):
    """A store that accepts puts of two threads in rounds, until it is full."""

    def __init__(self, rounds_max: int) -> None:
        super().__init__()
        self.rounds_left = rounds_max
        self.both = threading.Barrier(2, self._begin_round)

    def _begin_round(self) -> None:
        self.rounds_left -= 1

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if key.endswith(".bin"):
            self.both.wait(120)
            if self.rounds_left < 0:
                raise StoreFullError("full")
        return super().put(key, parts, overwrite=overwrite)


@ONE_BENCH
class TestLiveness:
    """L3, L4: each job ends, and a dead tier is cut off and used again later. Only the test moves the clock."""

    @pytest.fixture
    def clock(self, bench: Bench) -> Clock:
        bench.clock = clock = Clock()
        return clock

    def test_hung_store_is_cut_off_and_used_again_later(self, bench: Bench, clock: Clock) -> None:
        hung = GatedStore()
        tier = bench.tier(store=hung, n_read_threads=1, n_write_threads=1, circuit_probe_s=5, job_deadline_s=10)
        bench.fill(1)
        assert bench.store(tier, KEYS[:2]).success
        hung.hold()
        stuck, *waiting = (bench.job(KEYS[:6]) for _ in range(3))
        for job in (stuck, *waiting):
            tier.submit_load(job)
        wait_for(lambda: hung.entered == 2)  # each of the two threads is stuck in a read into a slot
        clock.now += 20.5  # twice the deadline: the server may have told before that the others are too late
        tier.on_schedule_end()
        assert tier.circuit_state == "open"
        assert tier.metrics.value("kvtiers_deadline_expired_total", "test", "job") == 1
        assert tier.metrics.value("kvtiers_circuit_closed", "test") == 0
        assert tier.metrics.value("kvtiers_circuit_opened_total", "test") == 1
        # Cut off: misses and refusals at once, but the stuck job is not reported: its slots may still be written.
        assert tier.lookup(KEYS[0]) is False
        tier.submit_store(refused := bench.job(KEYS[:3]))
        assert bench.results(tier, 3) == dict.fromkeys((job.job_id for job in (refused, *waiting)), False)
        assert tier.metrics.value("kvtiers_stores_dropped_total", "test", "circuit_open") == 3
        hung.gate.set()
        tier.drain_jobs()
        assert [result.job_id for result in tier.get_finished()] == [stuck.job_id]
        clock.now += 5
        bench.wait_until_closed(tier)
        assert bench.present(tier, KEYS[0])
        bench.load(tier, KEYS[:2])

    def test_load_does_not_wait_for_running_stores(self, bench: Bench) -> None:
        gated = GatedStore()
        tier = bench.tier(store=gated)
        bench.fill(1)
        bench.store(tier, KEYS[:4])
        gated.hold()
        tier.submit_store(stores := bench.job(KEYS[4:]))
        wait_for(lambda: gated.entered == 2 * THREADS)
        held, gated.gate = gated.gate, threading.Event()
        gated.gate.set()
        tier.submit_load(load := bench.job(KEYS[:4], [0, 1, 2, 3]))
        (result,) = wait_for(lambda: list(tier.get_finished()))
        assert (result.job_id, result.success) == (load.job_id, True)
        held.set()
        assert bench.result(tier, stores).success

    def test_cached_hits_are_invalidated_while_a_load_hangs(self, bench: Bench, clock: Clock) -> None:
        """Otherwise each request before the cut-off would wait for a load that cannot end."""
        hung = GatedStore()
        tier = bench.tier(store=hung, n_read_threads=1, n_write_threads=1, lookup=LookupOptions(deadline_s=0.2))
        bench.fill(1)
        assert bench.store(tier, KEYS[:2]).success
        assert tier.lookup(KEYS[0]) is True
        hung.hold()
        tier.submit_load(bench.job(KEYS[:1]))
        wait_for(lambda: hung.entered == 1)
        clock.now += 2
        tier.on_schedule_end()
        assert tier.lookup(KEYS[1]) is True  # a slow load is no hang
        clock.now += 1
        tier.on_schedule_end()
        assert tier.lookup(KEYS[1]) is None
        tier.on_schedule_end()
        clock.now += 0.3
        tier.on_schedule_end()
        assert tier.lookup(KEYS[1]) is False  # as for any question that is not answered: L2
        assert tier.circuit_state == "closed"
        hung.gate.set()

    def test_queued_blocks_are_dropped_when_the_tier_is_cut_off(self, bench: Bench, clock: Clock) -> None:
        hung = GatedStore()
        tier = bench.tier(store=hung, n_read_threads=1, n_write_threads=1)
        bench.fill(1)
        hung.hold()
        tier.submit_store(job := bench.job(KEYS))
        wait_for(lambda: hung.entered == 2)
        clock.now += 11
        tier.on_schedule_end()
        hung.gate.set()
        result = bench.result(tier, job)
        assert not result.success
        assert len(result.successful_keys) == 2  # the two that were under way
        assert hung.entered == 2
        assert tier.metrics.value("kvtiers_blocks_total", "test", "store", "dropped") == ROWS - 2
        assert "dropped" in tier.metrics.table["kvtiers_blocks_total"].help

    def test_drain_does_not_wait_for_stuck_jobs(self, bench: Bench, clock: Clock) -> None:
        hung = GatedStore()
        tier = bench.tier(store=hung, n_read_threads=1, n_write_threads=1, job_deadline_s=10)
        hung.hold()
        tier.submit_load(bench.job(KEYS))
        wait_for(lambda: hung.entered == 2)
        clock.now += 11
        tier.drain_jobs()
        assert list(tier.get_finished()) == []
        hung.gate.set()

    @pytest.mark.parametrize("op", ["load", "store"])
    def test_jobs_queued_behind_stuck_jobs_end_at_the_deadline(self, bench: Bench, clock: Clock, op: str) -> None:
        """Nothing touches their slots. Without an end, the region would lose them while the storage hangs."""
        hung = GatedStore()
        tier = bench.tier(store=hung, n_read_threads=1, n_write_threads=1, job_deadline_s=10)
        hung.hold()
        stuck = [bench.job(KEYS[n : n + 1]) for n in range(2)]
        waiting = [bench.job(KEYS[n : n + 1]) for n in range(2, 5)]
        for job in (*stuck, *waiting):
            (tier.submit_load if op == "load" else tier.submit_store)(job)
        wait_for(lambda: hung.entered == 2)
        assert list(tier.get_finished()) == []
        clock.now += 11
        assert bench.results(tier, 3) == dict.fromkeys((job.job_id for job in waiting), False)
        assert tier.metrics.value("kvtiers_blocks_total", "test", op, "dropped") == 3
        assert tier.metrics.value("kvtiers_stores_dropped_total", "test", "deadline") == 3 * (op == "store")
        hung.gate.set()
        tier.drain_jobs()
        assert {result.job_id for result in tier.get_finished()} == {job.job_id for job in stuck}

    def test_blocks_that_wait_past_the_deadline_fail(self, bench: Bench, clock: Clock) -> None:
        tier = bench.tier(job_deadline_s=10)
        bench.fill(1)
        slow = GatedStore()
        slow_tier = bench.tier(store=slow, job_deadline_s=10)
        slow.gate.clear()
        slow_tier.submit_store(job := bench.job(KEYS))
        clock.now += 10.5  # nobody looked in between, so the circuit is closed
        slow.gate.set()
        result = bench.result(slow_tier, job)
        assert not result.success
        assert slow_tier.metrics.value("kvtiers_stores_dropped_total", "test", "deadline") > 0
        assert bench.store(tier, KEYS).success

    @pytest.mark.parametrize("what", ["load", "store", "lookup"])
    def test_three_consecutive_failures_cut_the_tier_off(self, bench: Bench, what: str) -> None:
        broken = GatedStore()
        tier = bench.tier(store=broken, circuit_failures=3, circuit_probe_s=1000)
        bench.fill(1)
        broken.error = StoreUnavailableError("reset")
        for n in range(3):
            assert tier.circuit_state == "closed"
            bench.fail(what, tier, KEYS[n : n + 1])
        tier.on_schedule_end()
        assert tier.circuit_state == "open"

    def test_failing_loads_cut_the_tier_off_although_lookups_and_stores_work(self, bench: Bench) -> None:
        """If only small packets pass, each load would wait for its deadline."""
        # The first read is the start's: if it failed, the tier would start cut off.
        fault = Fault("get_into", first=2, count=None, error=lambda: StoreUnavailableError("timed out"))
        deaf = FaultyStore(bench.make_store(), [fault])
        tier = bench.tier(store=deaf, circuit_failures=3)
        bench.fill(1)
        assert bench.store(tier, KEYS[:3]).success
        for n in range(3):
            assert tier.circuit_state == "closed"
            assert not bench.load(tier, KEYS[n : n + 1]).success
            tier.on_schedule_end()
            assert not bench.present(tier, KEYS[20 + n])
            bench.store(tier, KEYS[10 + n : 11 + n])
        assert tier.circuit_state == "open"

    def test_loads_of_only_bad_blocks_cut_tier_off_and_remove_no_block(self, bench: Bench, clock: Clock) -> None:
        """As on a host whose memory or network damages each read: other hosts may read the blocks well."""
        store = FlippingStore()
        tier = bench.tier(store=store, circuit_failures=3)
        original = bench.fill(1)
        bench.store(tier, KEYS)
        stored = list_keys(store)
        store.flips = True
        for _ in range(5):
            assert not bench.load(tier, KEYS[:1]).success
        assert tier.circuit_state == "closed", "one bad block says little, however often it is asked for"
        for key in KEYS[1:3]:
            assert not bench.load(tier, [key]).success
        assert tier.circuit_state == "open"
        assert list_keys(store) == stored
        clock.now += 5
        bench.wait_until_closed(tier)
        assert not bench.load(tier, KEYS[3:4]).success
        assert tier.circuit_state == "open", "the probe is a lookup, which says nothing about loads"
        store.flips = False
        clock.now += 5
        bench.wait_until_closed(tier)
        bench.fill(2)
        assert bench.load(tier, KEYS).success
        assert (bench.region == original).all()

    @pytest.mark.parametrize("what", ["load", "store"])
    def test_partly_successful_job_is_not_a_failure_of_the_storage(self, bench: Bench, what: str) -> None:
        """If each block is a batch, three consecutive failures mean little: a server that sheds load refuses many."""
        faults = [
            Fault(operation, first=number, error=lambda: StoreThrottledError("slow down"))
            for number in (5, 6, 7, 8)
            for operation in ("put" if what == "store" else "get_into",)
        ]
        store = FaultyStore(bench.make_store(), faults if what == "store" else [])
        tier = bench.tier(store=store, task_bytes=ROW_BYTES, n_read_threads=1, n_write_threads=1)
        bench.fill(1)
        result = bench.store(tier, KEYS[:20])
        if what == "load":
            assert result.success
            store.plan = faults
            result = bench.load(tier, KEYS[:20])
        assert len(result.successful_keys) == 16
        assert tier.metrics.value("kvtiers_circuit_opened_total", "test") == 0
        assert tier.circuit_state == "closed"
        store.plan = [Fault("put", count=None, error=lambda: StoreThrottledError("slow down"))]
        for key in KEYS[20:23]:
            bench.store(tier, [key])
        assert tier.circuit_state == "open"

    def test_job_that_ends_early_has_stored_its_first_blocks(self, bench: Bench) -> None:
        """A prefix is only useful up to its first gap."""
        tier = bench.tier(store=InStepStore(rounds_max=5), n_read_threads=1, n_write_threads=1)
        bench.fill(1)
        stored = bench.store(tier, KEYS[:30]).successful_keys
        assert sorted(KEYS.index(key) for key in stored) == list(range(10))

    def test_blocks_of_several_kv_groups_are_stored_side_by_side(self, bench: Bench) -> None:
        """A prefix needs the blocks of all groups. A sliding window's group has fewer blocks."""
        full, window = KEYS[:20], [make_offload_key(bytes([n]) * 32, 1) for n in range(10)]
        tier = bench.tier(store=InStepStore(rounds_max=9), n_read_threads=1, n_write_threads=1)
        bench.fill(1)
        stored = bench.store(tier, [*full, *window]).successful_keys
        assert set(stored) == {*full[:12], *window[:6]}

    def test_full_storage_is_still_read(self, bench: Bench) -> None:
        full = GatedStore()
        tier = bench.tier(store=full, circuit_failures=1)
        bench.fill(1)
        assert bench.store(tier, KEYS[:1]).success
        full.error = StoreFullError("full")
        for _ in range(5):
            assert not bench.store(tier, KEYS[1:4]).success
        full.error = None
        assert tier.circuit_state == "closed"
        assert bench.load(tier, KEYS[:1]).success

    def test_misses_do_not_cut_the_tier_off(self, bench: Bench) -> None:
        tier = bench.tier(circuit_failures=1)
        for n in range(5):
            assert not bench.present(tier, KEYS[n])
            assert not bench.load(tier, KEYS[n : n + 1]).success
        assert tier.circuit_state == "closed"

    def test_forbidden_keys_are_misses_of_only_those_keys(self, bench: Bench) -> None:
        """Another user's folder must not cut off all other blocks."""
        store = PartlyRefused()
        tier = bench.tier(store=store, circuit_failures=1)
        bench.fill(1)
        assert bench.store(tier, KEYS[:4]).success
        store.refused = tier.mapper.relative_name(KEYS[0])
        tier._lookup.forget(KEYS)
        for _ in range(3):
            assert [tier.lookup(key) for key in KEYS[:4]] == [None] * 4
            tier.on_schedule_end()
            assert [bench.present(tier, key) for key in KEYS[:4]] == [False, True, True, True]
            tier._lookup.forget(KEYS)
        assert tier.circuit_state == "closed"

    def test_one_unreadable_block_does_not_cut_the_tier_off(self, bench: Bench) -> None:
        """Also if it cannot be read after it was written again."""
        store = PartlyRefused()
        store.heals = False
        tier = bench.tier(store=store, circuit_failures=3)
        bench.fill(1)
        assert bench.store(tier, KEYS[:4]).success
        store.unreadable = {tier.mapper.relative_name(KEYS[0]): StoreUnavailableError}
        for _ in range(6):
            assert not bench.load(tier, KEYS[:1]).success
            bench.store(tier, KEYS[:1])
        assert tier.circuit_state == "closed"
        store.unreadable |= {tier.mapper.relative_name(key): StoreUnavailableError for key in KEYS[1:3]}
        for key in KEYS[1:3]:
            assert not bench.load(tier, [key]).success
        assert tier.circuit_state == "open"

    def test_timed_out_load_counts_although_its_batch_has_an_unreadable_block(self, bench: Bench) -> None:
        store = PartlyRefused()
        tier = bench.tier(store=store, circuit_failures=3)
        bench.fill(1)
        assert bench.store(tier, KEYS[:2]).success
        names = [tier.mapper.relative_name(key) for key in KEYS[:2]]
        store.unreadable = dict(zip(names, (StorePermissionError, StoreTimeoutError), strict=True))
        for _ in range(3):
            assert tier.circuit_state == "closed"
            assert not bench.load(tier, KEYS[:2]).success
        assert tier.circuit_state == "open"

    def test_one_forbidden_key_that_is_asked_alone_does_not_cut_the_tier_off(self, bench: Bench) -> None:
        """A quiet engine has all other answers cached. Each cut-off would cost other blocks 5 s."""
        store = PartlyRefused()
        tier = bench.tier(store=store, circuit_failures=3)
        store.refused = tier.mapper.relative_name(KEYS[0])
        for _ in range(6):
            assert not bench.present(tier, KEYS[0])
            tier._lookup.forget(KEYS)
        assert tier.circuit_state == "closed"
        # A success between the failures that follow would begin their count anew.
        while tier._lookup._under_way:
            tier.on_schedule_end()
        store.refused = tier.mapper.name_prefix  # of all
        for key in KEYS[1:4]:
            assert not bench.present(tier, key)
        tier.on_schedule_end()
        assert tier.circuit_state == "open"

    @pytest.mark.parametrize("count", [1, 20])
    def test_dead_tier_is_cut_off_although_all_requests_ask_for_one_prompt(self, bench: Bench, count: int) -> None:
        """Each request asks for the first block only, or for many if its engine does not stop at the first miss."""
        store = PartlyRefused()
        tier = bench.tier(store=store, circuit_failures=3, circuit_probe_s=1000)
        store.refused = tier.mapper.name_prefix  # of all

        def answered() -> bool:
            answers = [tier.lookup(key) for key in KEYS[:count]]
            tier.on_schedule_end()
            return None not in answers

        for _ in range(6):  # requests
            wait_for(answered)
            tier._lookup.forget(KEYS)
            tier.on_schedule_end()
        assert tier.circuit_state == "open"

    @pytest.mark.parametrize("task_blocks", [1, 3, 20])
    def test_failing_reads_cut_the_tier_off_again_after_a_probe(
        self, bench: Bench, clock: Clock, task_blocks: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Lookups work, so the probe closes the circuit. There are more blocks than the tier remembers."""
        monkeypatch.setattr(health, "KEYS_MAX", 10)
        store = PartlyRefused()
        tier = bench.tier(store=store, circuit_failures=3, circuit_probe_s=5, task_bytes=task_blocks * ROW_BYTES)
        bench.fill(1)
        assert bench.store(tier, KEYS[:20]).success
        store.unreadable = {tier.mapper.relative_name(key): StoreUnavailableError for key in KEYS[:20]}
        for _ in range(3):  # request after request
            bench.load(tier, KEYS[:20])
        assert tier.circuit_state == "open"
        for _ in range(3):
            clock.now += 5
            bench.wait_until_closed(tier)
            bench.load(tier, KEYS[:20])
            assert tier.circuit_state == "open"

    @pytest.mark.parametrize("task_blocks", [1, 20])
    @pytest.mark.parametrize("count", [1, 3, 20])
    def test_unreadable_blocks_of_a_read_only_tier_are_rarely_loaded_again(
        self, bench: Bench, clock: Clock, count: int, task_blocks: int
    ) -> None:
        """In a read-only tier, which heals nothing. Some blocks are unreadable, or all."""
        store = PartlyRefused()
        options: dict[str, Any] = {
            "circuit_failures": 3,
            "circuit_probe_s": 5,
            "task_bytes": task_blocks * ROW_BYTES,
            "lookup": LookupOptions(deadline_s=0.5, present_ttl_s=5, absent_ttl_s=0.5),
        }
        bench.fill(1)
        assert bench.store(bench.tier(store=store), KEYS[:20]).success
        tier = bench.tier(store=store, read_only=True, **options)
        store.unreadable = {tier.mapper.relative_name(key): StoreUnavailableError for key in KEYS[:count]}

        def request(keys: Sequence[OffloadKey]) -> bool:
            clock.now += 1
            tier.on_schedule_end()
            if tier.circuit_state == "half_open":
                bench.wait_until_closed(tier)
            present = [key for key in keys if bench.present(tier, key)]
            return len(present) == len(keys) and bench.load(tier, keys).success

        opened = []
        loads = 0
        for _ in range(600):
            before = tier.metrics.value("kvtiers_blocks_total", "test", "load", "failed")
            assert not request(KEYS[:count])
            loads += tier.metrics.value("kvtiers_blocks_total", "test", "load", "failed") > before
            opened.append(tier.circuit_state != "closed")
        assert loads <= 6 + 600 / REST_S + 1
        assert not any(opened[10:])  # once it was news
        store.unreadable = {}
        assert any(request(KEYS[:count]) for _ in range(int(REST_S) + 1))

    def test_few_unreadable_blocks_of_a_prompt_do_not_cut_the_tier_off(self, bench: Bench) -> None:
        store = PartlyRefused()
        tier = bench.tier(store=store, circuit_failures=3, task_bytes=ROW_BYTES)
        bench.fill(1)
        assert bench.store(tier, KEYS[:20]).success
        store.unreadable = {tier.mapper.relative_name(KEYS[n]): StoreUnavailableError for n in (5, 11, 17)}
        for _ in range(6):
            assert len(bench.load(tier, KEYS[:20]).successful_keys) == 17
        assert tier.circuit_state == "closed"
        assert tier.metrics.value("kvtiers_circuit_opened_total", "test") == 0

    def test_unanswered_probe_is_sent_again(self, bench: Bench, clock: Clock) -> None:
        hung = GatedStore()
        tier = bench.tier(store=hung, circuit_failures=1, circuit_probe_s=5, lookup=LookupOptions(deadline_s=1))
        hung.error = StoreUnavailableError("reset")
        assert not bench.present(tier, KEYS[0])
        tier.on_schedule_end()
        assert tier.circuit_state == "open"
        hung.error = None
        hung.hold()
        clock.now += 5
        tier.on_schedule_end()
        wait_for(lambda: hung.entered == 1)
        assert tier.circuit_state == "half_open"
        clock.now += 1
        tier.on_schedule_end()
        assert tier.circuit_state == "open"
        clock.now += 5
        tier.on_schedule_end()
        wait_for(lambda: hung.entered == 2)  # by the other thread: the first may never come back
        hung.gate.set()
        bench.wait_until_closed(tier)

    @pytest.mark.parametrize("what", ["load", "store", "lookup"])
    def test_permission_errors_are_logged_once_a_minute(
        self, bench: Bench, clock: Clock, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        refused = GatedStore()
        tier = bench.tier(store=refused, circuit_failures=1000)
        bench.fill(1)
        refused.error = StorePermissionError("secret: the session token has expired")
        for n in range(ROWS):
            if n == ROWS // 2:
                clock.now += 60
            bench.fail(what, tier, KEYS[n : n + 1])
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said == [f"tier test: {what} failed: secret: the session token has expired"] * 2


class PartlyRefused(MemoryStore):
    """Single blobs fail. Replacing an unreadable blob makes it readable."""

    refused = tail_refused = ""
    heals = True

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: dict[str, type[StoreError]] = {}

    def size(self, key: str) -> int | None:
        if self.refused and key.startswith(self.refused):
            raise StorePermissionError("somebody else's", key=key)
        return super().size(key)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key in self.unreadable:
            raise self.unreadable[key]("cannot be read", key=key)
        super().get_into(key, parts)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        if key == self.tail_refused:
            raise StorePermissionError("somebody else's", key=key)
        return super().get_tail(key, length)

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        published = super().put(key, parts, overwrite=overwrite)
        if published and self.heals:
            self.unreadable.pop(key, None)
        return published


class FlippingStore(MemoryStore):
    """``flips``: each read of a blob gets a bit wrong."""

    flips = False

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        super().get_into(key, parts)
        if self.flips:
            parts[0][0] ^= 1


class KeepsAll(MemoryStore):
    """No blob can be deleted."""

    def delete(self, key: str) -> None:
        raise StorePermissionError("cannot be deleted", key=key)


class NeverReplaces(MemoryStore):
    """A store without room for a new blob while the blob that it replaces exists.

    Attributes:
        is_full: there is no room without that blob either.
        misread_tails, misreads: reads of a blob's end, and of a blob, get a bit wrong.
        unreadable: raised by reads.
    """

    is_full = misread_tails = misreads = False
    unreadable: type[StoreError] | None = None

    def __init__(self, error: type[StoreError]) -> None:
        super().__init__()
        self._error = error

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if overwrite or (self.is_full and self.size(key) is None):
            raise self._error("no room", key=key)
        return super().put(key, parts)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if self.unreadable is not None:
            raise self.unreadable("cannot be read", key=key)
        super().get_into(key, parts)
        if self.misreads:
            parts[0][0] ^= 1

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        if self.unreadable is not None:
            raise self.unreadable("cannot be read", key=key)
        found = super().get_tail(key, length)
        return found and (found[0], found[1][:-1] + b"x" if self.misread_tails else found[1])


@ONE_BENCH
@pytest.mark.parametrize("says", [True, False])
def test_blocks_of_a_store_without_optional_methods_are_healed(bench: Bench, says: bool) -> None:
    store = BareStore()
    store.says = says
    tier = bench.tier(store=store)
    original = bench.fill(1)
    assert bench.store(tier, KEYS[:2]).transfer_bytes == 2 * ROW_BYTES
    write(tier.store, tier.mapper.relative_name(KEYS[0]), b"short")
    again = bench.store(tier, KEYS[:2])
    assert again.success
    assert tier.metrics.value("kvtiers_healed_blobs_total", "test") == 1
    bench.fill(2)
    assert bench.load(tier, KEYS[:2]).success
    assert (bench.region[:2] == original[:2]).all()


def test_region_can_be_unmapped_after_shutdown(bench: Bench) -> None:
    area = mmap.mmap(-1, ROWS * ROW_BYTES)
    view = memoryview(area).cast("B", (ROWS, ROW_BYTES))
    bench.region = np.frombuffer(area, np.int8).reshape(ROWS, ROW_BYTES)
    spec = FakeSpec()
    mapper = FileMapper.from_offloading_spec("", spec, extra_fields=strict_fields(spec))
    tier = StoreTierManager(
        spec, view, "test", make_backend=in_threads(bench.make_store()), mapper=mapper, options=PATIENT
    )
    assert bench.store(tier, KEYS[:2]).success
    tier.shutdown()
    del bench.region
    view.release()
    area.close()


@pytest.mark.parametrize("damage", [b"", b"short"])
def test_bad_block_keeps_no_view_of_the_region(damage: bytes) -> None:
    """After each bad block the region could not be unmapped until the garbage collector ran."""
    store = MemoryStore()
    rows = bytearray(ROWS * ROW_BYTES)
    view = memoryview(rows).cast("b", (ROWS, ROW_BYTES))
    tier = StoreTierManager(FakeSpec(), view, "test", make_backend=in_threads(store), options=PATIENT)
    del view
    bench = Bench(lambda: store)
    assert bench.store(tier, KEYS[:1]).success
    name = tier.mapper.relative_name(KEYS[0])
    blob = bytearray(store.size(name) or 0)
    store.get_into(name, [memoryview(blob)])
    blob[0] ^= 1
    store.put(name, [memoryview(damage or blob)], overwrite=True)
    gc.disable()
    try:
        assert not bench.load(tier, KEYS[:1]).success
        tier.primary_kv_view.release()
        tier.shutdown()
        rows.extend(b"x")  # a BufferError where somebody still has a view
    finally:
        gc.enable()


@pytest.mark.parametrize(("name", "label"), [(1, "1"), (0, "0"), (None, "test"), ("", "test")])
def test_name_of_a_tier_is_text_for_any_yaml_value(name: Any, label: str) -> None:
    tier = Bench(MemoryStore).tier(name=name)
    assert tier.name == label
    tier.shutdown()


class KeepingStore(MemoryStore):
    """Keeps a call's parts after the call, as a library with threads may."""

    def __init__(self, keep: Callable[[memoryview], object]) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self._keep = keep
        self.error: type[BaseException] | None = None
        self.read_only: set[bool] = set()

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self.read_only |= {part.readonly for part in parts}
        return super().put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        super().get_into(key, parts)
        if not key.endswith(".json"):
            self.kept += map(self._keep, parts[:1])
            if self.error is not None:
                raise self.error


ERRORS = [None, StoreUnavailableError, ValueError, SystemExit]


@ONE_BENCH
@pytest.mark.parametrize("error", ERRORS)
def test_store_that_keeps_parts_cannot_write_into_them_after_the_job(
    bench: Bench, error: type[BaseException] | None
) -> None:
    store = KeepingStore(lambda part: part)
    tier = bench.tier(store=store)
    bench.fill(1)
    assert bench.store(tier, KEYS[:2]).success
    assert bench.store(tier, KEYS[:2]).success  # the blocks are present already
    assert store.read_only == {True}
    store.error = error
    assert bench.load(tier, KEYS[:2]).success == (error is None)
    assert len(store.kept) >= 1
    for part in store.kept:
        with pytest.raises(ValueError, match="released"):
            part[0] = 1


@ONE_BENCH
@pytest.mark.parametrize("error", ERRORS)
def test_load_is_reported_only_after_the_store_has_released_its_slot(
    bench: Bench, error: type[BaseException] | None
) -> None:
    store = KeepingStore(np.frombuffer)  # its memory stays reachable although the part is released
    tier = bench.tier(store=store)
    bench.fill(1)
    assert bench.store(tier, KEYS[:1]).success
    store.error = error
    tier.submit_load(job := bench.job(KEYS[:1]))
    wait_for(lambda: store.kept)
    assert not tier._channel.wait_idle(0.3)
    store.kept.clear()
    assert bench.result(tier, job).success == (error is None)


class ErrorKeepingStore(MemoryStore):
    """Keeps the errors that it raises, and with their tracebacks the frames that have a load's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: type[StoreError] = BlobNotFoundError
        self.kept: list[StoreError] = []

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        try:
            self._read(parts)
        except OSError as e:
            error = self.raises("refused")
            self.kept.append(error)
            raise error from e

    def _read(self, parts: Sequence[memoryview]) -> None:
        raise OSError(f"{len(parts)} parts")


@ONE_BENCH
@pytest.mark.parametrize("error", [StoreUnavailableError, BlobNotFoundError, BlobCorruptError])
def test_load_whose_error_is_kept_by_store_and_by_log_handler_is_reported(
    bench: Bench, error: type[StoreError], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvtiers")  # this handler keeps records with their arguments
    store = ErrorKeepingStore()
    tier = bench.tier(store=store)
    bench.fill(1)
    assert bench.store(tier, KEYS[:2]).success
    store.raises = error
    tier.submit_load(job := bench.job(KEYS[:2]))
    was_idle = tier._channel.wait_idle(20.0)
    for each in [*store.kept]:  # else the test would hang where it fails
        each.__traceback__ = each.__cause__.__traceback__ = None  # type: ignore[union-attr]
    assert was_idle
    assert not bench.result(tier, job).success


@ONE_BENCH
def test_job_that_cannot_be_booked_is_reported_as_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = bench.tier()
    bench.fill(1)
    with monkeypatch.context() as patch:
        patch.setattr(tier._lookup, "mark", lambda *_, **__: 1 / 0)
        assert not bench.store(tier, KEYS[:2]).success
        assert not bench.load(tier, KEYS[2:3]).success
    assert caplog.text.count("cannot be booked") == 2
    assert bench.load(tier, KEYS[:2]).success
    assert bench.store(tier, KEYS[2:4]).success


@ONE_BENCH
def test_tier_started_with_failing_storage_is_cut_off_and_opens_its_namespace_later(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    clock = bench.clock = Clock()
    inner = MemoryStore()
    faulty = FaultyStore(inner, [Fault("size", count=1, error=lambda: StoreUnavailableError("refused"))])
    tier = bench.tier(store=faulty)
    assert caplog.messages == ["tier test: circuit open: it starts without its storage: refused"]
    assert tier.circuit_state is CircuitState.OPEN
    assert not list(inner.keys(""))
    clock.advance(10.0)

    def is_closed_after_a_step() -> bool:
        tier.on_schedule_end()
        return bool(tier.circuit_state is CircuitState.CLOSED)

    wait_for(is_closed_after_a_step)
    wait_for(lambda: any(info.key.endswith("config.json") for info in inner.keys("")))
    bench.fill(1)
    assert bench.store(tier, KEYS[:1]).success


class NoConfig(MemoryStore):
    """The file with the namespace's fields cannot be read, such as on a bad sector."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    def size(self, key: str) -> int | None:
        if key.endswith("config.json"):
            self.tries += 1
            raise StoreUnavailableError("EIO")
        return super().size(key)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key.endswith("config.json"):
            self.size(key)
        super().get_into(key, parts)


@ONE_BENCH
def test_failed_opening_of_a_namespace_is_retried_once_per_probe(bench: Bench) -> None:
    clock = bench.clock = Clock()
    store = NoConfig()
    tier = bench.tier(store=store, circuit_probe_s=5.0)

    def tries_after_steps() -> int:
        for _ in range(50):
            tier.on_schedule_end()
            while tier._channel._children[0].owed:
                tier._channel.wait(0.05)
        return store.tries

    at_start = store.tries
    clock.advance(6.0)
    bench.wait_until_closed(tier)
    assert tries_after_steps() == at_start + 1
    clock.advance(6.0)
    assert tries_after_steps() == at_start + 2
