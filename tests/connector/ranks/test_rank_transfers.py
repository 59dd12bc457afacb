"""RankTransfers: one rank's blocks on their way between KV tensors and a tier that the tests control."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
import torch

from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)
from kvtiers.connector.ranks import transfers as module
from kvtiers.connector.ranks.transfers import Ended, RankTransfers, check_slots, part_of
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.connector.transfer.gpu_handler import create_handlers
from kvtiers.tiers.base import JobMetadata, JobResult, OffloadingEvent, SecondaryTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import Metrics
from tests.clock import Clock
from tests.identity import FakeSpec, block_key
from tests.waiting import wait_for

BLOCKS, PAGE = 24, 64
SLOTS = 8
DEADLINE_S = 20.0
TIER_S = 6.0  # the deadline of the tier below, and a second to report


class HeldTier(SecondaryTierManager):
    """Ends jobs when a test says so. ``data``: key -> its stored bytes."""

    job_deadline_s = 5.0
    shutdown_s = 1.0

    def __init__(self, view: memoryview) -> None:
        super().__init__(FakeSpec(), view, "held")
        self.rows = view.cast("B")
        self.row_bytes = view.nbytes // len(view)
        self.data: dict[OffloadKey, bytes] = {}
        self.jobs: dict[int, tuple[JobMetadata, bool]] = {}
        self.results: list[JobResult] = []
        self.events: list[OffloadingEvent] = []
        self.raises = False
        self.at_once = True

    def lookup(self, key: OffloadKey, req_context: Any = None) -> bool | None:
        raise AssertionError("a rank looks nothing up")

    def take_answered(self) -> None:
        return None

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata, is_load=True)

    def _submit(self, job: JobMetadata, *, is_load: bool) -> None:
        self.jobs[job.job_id] = (job, is_load)
        if self.raises:
            raise RuntimeError("it may have begun")
        if self.at_once:
            self.end(job.job_id)

    def end(self, job_id: int | None = None, lacks: Collection[OffloadKey] = ()) -> None:
        """End a job, by default the oldest one, without the blocks in ``lacks``."""
        job, is_load = self.jobs.pop(next(iter(self.jobs)) if job_id is None else job_id)
        done = []
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
            if key in lacks or (is_load and key not in self.data):
                continue
            row = self.rows[slot * self.row_bytes : (slot + 1) * self.row_bytes]
            if is_load:
                row[:] = self.data[key]
            else:
                self.data[key] = bytes(row)
            done.append(key)
        self.results.append(JobResult(job.job_id, len(done) == len(job.keys), tuple(done)))

    def get_finished(self) -> Iterable[JobResult]:
        results, self.results = self.results, []
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events


class Rank:
    """One rank with two layers of ``BLOCKS`` blocks, each with bytes of its own."""

    def __init__(self, factor: int = 1, slots: int = SLOTS) -> None:
        self.clock = Clock()
        self.kv = [torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(2)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(each, PAGE) for each in self.kv], [[CanonicalKVCacheRef(i, PAGE) for i in range(2)]]
        )
        self.region = SharedOffloadRegion.anonymous(slots, 2 * PAGE * factor)
        views = [self.region.create_next_view(PAGE * factor) for _ in self.kv]
        self.tier = HeldTier(self.region.create_kv_memoryview())
        self.metrics = Metrics()
        self.factor = factor
        self.transfers = RankTransfers(
            self.tier,
            self.metrics,
            create_handlers(caches, views, factor),
            slots=slots,
            slot_bytes=self.region.geometry.row_stride,
            blocks_per_chunk=factor,
            load_deadline_s=DEADLINE_S,
            clock=self.clock,
        )
        self.jobs = iter(range(1000))

    def store(self, keys: list[OffloadKey], blocks: list[int]) -> int:
        job = next(self.jobs)
        self.transfers.store(job, keys, GPULoadStoreSpec(blocks))
        return job

    def load(self, keys: list[OffloadKey], blocks: list[int], index: int = 0) -> int:
        job = next(self.jobs)
        self.transfers.load(job, keys, GPULoadStoreSpec(blocks, None, (index,)))
        return job

    def ended(self, job: int) -> Ended:
        """Wait until a job ends. Other jobs may not end meanwhile."""
        (only,) = wait_for(self.transfers.take_ended)
        assert only.job_id == job
        return only

    def free_slots(self) -> int:
        return len(self.transfers._free)

    def block(self, number: int) -> list[bytes]:
        return [each[number].numpy().tobytes() for each in self.kv]

    def close(self) -> None:
        self.transfers.shutdown(0.5)
        self.region.cleanup()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def keys_of(count: int, first: int = 0) -> list[OffloadKey]:
    return [block_key(first + number) for number in range(count)]


def test_stored_blocks_are_loaded_unchanged(rank: Rank) -> None:
    keys = keys_of(3)
    job = rank.store(keys, [5, 7, 2])
    assert rank.ended(job).failed_blocks == ()
    wait_for(lambda: rank.transfers.take_ended() or len(rank.tier.data) == 3)
    rank.transfers.take_ended()
    assert rank.transfers.take_report() == (keys, set())
    job = rank.load(keys, [10, 11, 12])
    ended = rank.ended(job)
    assert ended.failed_blocks == ()
    assert ended.moved_bytes == 3 * rank.region.geometry.row_stride
    for source, target in ((5, 10), (7, 11), (2, 12)):
        assert rank.block(source) == rank.block(target)
    assert rank.free_slots() == SLOTS


def test_load_beginning_inside_chunk_skips_earlier_blocks() -> None:
    rank = Rank(factor=3)
    try:
        keys = keys_of(2)
        rank.ended(rank.store(keys, [0, 1, 2, 3, 4, 5]))
        wait_for(lambda: rank.transfers.take_ended() or len(rank.tier.data) == 2)
        job = rank.load(keys, [20, 21, 22, 23], index=2)
        assert rank.ended(job).failed_blocks == ()
        for source, target in ((2, 20), (3, 21), (4, 22), (5, 23)):
            assert rank.block(source) == rank.block(target)
    finally:
        rank.close()


def test_store_ends_for_engine_once_copied_and_is_reported_once_stored_by_tier(rank: Rank) -> None:
    rank.tier.at_once = False
    keys = keys_of(2)
    rank.ended(rank.store(keys, [1, 2]))
    rank.kv[0].zero_()  # the engine reuses its blocks
    assert rank.transfers.take_report() == ([], set())
    rank.tier.end(lacks=keys[1:])
    rank.transfers.take_ended()
    assert rank.transfers.take_report() == (keys[:1], set(keys[1:]))
    assert rank.free_slots() == SLOTS
    assert any(rank.tier.data[keys[0]][:PAGE])


def test_stores_beyond_half_of_the_slots_are_dropped_counted_and_reported_as_lost(rank: Rank) -> None:
    rank.tier.at_once = False
    keys = keys_of(6)
    rank.ended(rank.store(keys, list(range(6))))
    assert rank.ended(rank.store(keys_of(2, 10), [8, 9])).moved_bytes == 0
    assert rank.transfers.take_report() == ([], {*keys[4:], *keys_of(2, 10)})
    assert rank.metrics.total("kvtiers_stores_dropped_total", ("held", "staging_full")) == 4
    rank.tier.data[block_key(50)] = bytes(rank.tier.row_bytes)
    job = rank.load([block_key(50)], [20])  # the other half is for loads
    rank.tier.end(list(rank.tier.jobs)[-1])
    assert rank.ended(job).failed_blocks == ()


def test_stores_whose_blocks_may_be_overwritten_do_not_reach_the_tier_and_are_counted(rank: Rank) -> None:
    keys = keys_of(3)
    job = rank.store(keys[:2], [1, 2])
    rank.transfers.drop_copies()
    assert rank.ended(job).failed_blocks == ()
    rank.transfers.drop_store(7, keys[2:])
    assert rank.ended(7).moved_bytes == 0
    assert rank.tier.data == {}
    assert rank.transfers.take_report() == ([], set(keys))
    assert rank.metrics.total("kvtiers_stores_dropped_total", ("held", "reset")) == 3
    assert rank.free_slots() == SLOTS
    rank.ended(rank.store(keys, [1, 2, 3]))
    wait_for(lambda: rank.transfers.take_ended() or len(rank.tier.data) == 3)


@pytest.mark.parametrize("accepted", [False, True])
def test_store_with_failed_copy_ends_once_loses_its_blocks_and_frees_its_slots(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    copies: list[int] = []

    def refuse(copy_id: int, spec: Any) -> bool:
        copies.append(copy_id)
        return accepted

    def failed() -> list[TransferResult]:
        return [TransferResult(copies.pop(), False, 0, 0.0)] if copies and accepted else []

    monkeypatch.setattr(rank.transfers._to_slots, "transfer_async", refuse)
    monkeypatch.setattr(rank.transfers._to_slots, "get_finished", failed)
    keys = keys_of(2)
    job = rank.store(keys, [1, 2])
    assert [(ended.job_id, ended.moved_bytes) for ended in rank.transfers.take_ended()] == [(job, 0)]
    assert rank.transfers.take_report() == ([], set(keys))
    assert rank.transfers.take_ended() == []
    assert rank.transfers.take_report() == ([], set())
    assert rank.metrics.total("kvtiers_stores_dropped_total", ("held", "copy_failed")) == 2
    assert rank.free_slots() == SLOTS
    assert rank.tier.data == {}


def test_load_larger_than_all_slots_is_split(rank: Rank) -> None:
    keys = keys_of(20)
    for number, key in enumerate(keys):
        rank.tier.data[key] = bytes([number]) * rank.tier.row_bytes
    assert rank.ended(rank.load(keys, list(range(20)))).failed_blocks == ()
    for number in range(20):
        assert rank.block(number) == [bytes([number]) * PAGE] * 2
    assert rank.free_slots() == SLOTS


def test_load_with_missing_block_loads_blocks_before_gap_and_fails_the_rest(rank: Rank) -> None:
    keys = keys_of(4)
    for key in (keys[0], keys[1], keys[3]):
        rank.tier.data[key] = bytes(rank.tier.row_bytes)
    before = rank.block(13), rank.block(14)
    ended = rank.ended(rank.load(keys, [11, 12, 13, 14]))
    assert ended.failed_blocks == (13, 14)
    assert rank.block(11) == rank.block(12) == [bytes(PAGE)] * 2
    assert (rank.block(13), rank.block(14)) == before
    assert rank.transfers.take_report() == ([], {keys[2]})
    assert rank.free_slots() == SLOTS


def test_load_with_failed_copy_ends_and_counts_its_blocks_but_not_as_lost(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(2)
    rank.tier.data.update(dict.fromkeys(keys, bytes(rank.tier.row_bytes)))
    monkeypatch.setattr(rank.transfers._to_blocks, "transfer_async", lambda *_: False)
    assert rank.ended(rank.load(keys, [3, 4])).failed_blocks == (3, 4)
    assert rank.transfers.take_report() == ([], set())  # storage has them
    assert rank.metrics.total("kvtiers_blocks_total", ("held", "load", "failed")) == 2
    assert rank.free_slots() == SLOTS


def test_load_past_its_deadline_fails_and_its_late_bytes_touch_no_block(rank: Rank) -> None:
    rank.tier.at_once = False
    key = block_key(1)
    rank.tier.data[key] = bytes(rank.tier.row_bytes)
    job = rank.load([key], [3])
    assert rank.transfers.take_ended() == []
    before = rank.block(3)
    rank.clock.now += DEADLINE_S
    assert rank.ended(job).failed_blocks == (3,)
    assert rank.metrics.total("kvtiers_deadline_expired_total", ("held", "load")) == 1
    assert rank.transfers.take_report() == ([], {key})
    assert rank.free_slots() == SLOTS - 1  # the read may still write into the slot
    rank.tier.end()
    assert rank.transfers.take_ended() == []
    assert rank.block(3) == before
    assert rank.free_slots() == SLOTS


def test_loads_wait_for_slots_in_order_of_submission(rank: Rank) -> None:
    rank.tier.at_once = False
    keys = keys_of(SLOTS + 2)
    for key in keys:
        rank.tier.data[key] = bytes(rank.tier.row_bytes)
    jobs = [rank.load(keys[:SLOTS], list(range(SLOTS))), *(rank.load([keys[n]], [n]) for n in (SLOTS, SLOTS + 1))]
    ended: list[Ended] = []

    def copied() -> bool:
        ended.extend(rank.transfers.take_ended())
        return not rank.transfers._copying

    while rank.tier.jobs:
        assert sum(len(job.keys) for job, _ in rank.tier.jobs.values()) <= SLOTS
        rank.tier.end()
        wait_for(copied)
    assert [(each.job_id, each.failed_blocks) for each in ended] == [(job, ()) for job in jobs]


def test_load_past_its_deadline_reports_blocks_without_slot_as_lost(rank: Rank) -> None:
    rank.transfers._load_deadline_s = TIER_S / 2  # so that no read is late
    rank.tier.at_once = False
    jobs = [rank.load(keys_of(SLOTS), list(range(SLOTS))), rank.load(keys_of(1, 100), [20])]
    rank.clock.now += TIER_S / 2
    assert [each.job_id for each in rank.transfers.take_ended()] == jobs
    assert rank.transfers.take_report() == ([], {*keys_of(SLOTS), block_key(100)})  # or the engine would ask again


def test_load_fails_at_once_while_late_reads_hold_all_slots(rank: Rank) -> None:
    rank.tier.at_once = False
    first = rank.load(keys_of(SLOTS), list(range(SLOTS)))
    rank.clock.now += TIER_S - 1
    waiting = rank.load(keys_of(2, 100), [20, 21])
    assert rank.transfers.take_ended() == []
    rank.clock.now += 1  # the tier should have ended the reads
    assert rank.ended(waiting).failed_blocks == (20, 21)
    assert rank.transfers.take_report() == ([], set(keys_of(2, 100)))
    rank.clock.now += DEADLINE_S
    assert rank.ended(first).failed_blocks == tuple(range(SLOTS))
    assert rank.ended(rank.load(keys_of(1, 200), [22])).failed_blocks == (22,)
    assert rank.metrics.total("kvtiers_promotion_room_expired_total", ()) == 3
    assert rank.metrics.total("kvtiers_deadline_expired_total", ("held", "load")) == 1
    while rank.tier.jobs:
        rank.tier.end()
    rank.transfers.take_ended()
    rank.tier.at_once = True
    rank.tier.data[block_key(300)] = bytes(rank.tier.row_bytes)
    assert rank.ended(rank.load([block_key(300)], [23])).failed_blocks == ()


def test_wait_fails_a_load_that_the_tier_has_not_finished(rank: Rank) -> None:
    rank.tier.at_once = False
    key = block_key(1)
    rank.tier.data[key] = bytes(rank.tier.row_bytes)
    job = rank.load([key], [3])
    before = rank.block(3)
    rank.transfers.wait({job, 77})
    rank.tier.end()
    assert rank.ended(job).failed_blocks == (3,)
    assert rank.block(3) == before
    assert rank.transfers.take_report() == ([], set())  # it is not the storage's fault


def test_wait_returns_when_a_store_is_copied_though_the_tier_hangs(rank: Rank) -> None:
    rank.tier.at_once = False
    job = rank.store(keys_of(2), [1, 2])
    rank.transfers.wait({job})
    assert [each.job_id for each in rank.transfers.take_ended()] == [job]


def test_slots_of_submission_that_raised_stay_unused_until_tier_deadline(rank: Rank) -> None:
    rank.tier.raises = True
    job = rank.load([block_key(1)], [3])
    assert rank.transfers.take_ended() == []
    assert rank.free_slots() == SLOTS - 1
    rank.clock.now += 6.0  # the tier's deadline and a second
    assert rank.ended(job).failed_blocks == (3,)
    assert rank.transfers.take_report() == ([], {block_key(1)})
    assert rank.free_slots() == SLOTS
    assert rank.metrics.total("kvtiers_contained_errors_total", ("held", "submit_load")) == 1


def test_removed_blocks_are_reported_as_lost_and_unknown_results_are_contained(rank: Rank) -> None:
    rank.tier.events = [OffloadingEvent((block_key(1),), "fs", True), OffloadingEvent((block_key(2),), "fs", False)]
    rank.tier.results = [JobResult(99, True)]
    assert rank.transfers.take_ended() == []
    assert rank.transfers.take_report() == ([], {block_key(1)})
    assert rank.metrics.total("kvtiers_contained_errors_total", ("held", "get_finished")) == 1


def test_shutdown_finishes_stores_and_is_bounded_while_the_tier_hangs(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.store(keys_of(2), [1, 2])
    rank.close()
    assert set(rank.tier.data) == set(keys_of(2))
    assert "were not stored" not in caplog.text
    rank = Rank()
    rank.tier.at_once = False
    rank.store(keys_of(2), [1, 2])
    rank.close()
    assert "2 blocks were not stored when the engine ended" in caplog.text
    assert rank.metrics.total("kvtiers_stores_dropped_total", ("held", "shutdown")) == 2


def test_jobs_ending_in_any_order_give_right_bytes_and_free_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", 2 * 4096)
    for seed in range(20):
        choice = random.Random(seed)
        rank = Rank()
        rank.tier.at_once = False
        keys = keys_of(30)
        for number, key in enumerate(keys[:25]):
            rank.tier.data[key] = bytes([number]) * rank.tier.row_bytes
        wanted: dict[int, tuple[list[OffloadKey], list[int]]] = {}
        ends: dict[int, Ended] = {}
        free = list(range(BLOCKS))
        for _ in range(60):
            count = choice.randint(1, 6)
            if choice.random() < 0.3 and len(free) >= count:
                chosen = choice.sample(keys, count)
                blocks, free = free[:count], free[count:]
                wanted[rank.load(chosen, blocks)] = chosen, blocks
            elif rank.tier.jobs:
                job_id = choice.choice(list(rank.tier.jobs))
                rank.tier.end(job_id, lacks=choice.sample(keys, 2))
            rank.clock.now += choice.choice([0.0, 0.1, 3.0])
            ends |= {ended.job_id: ended for ended in rank.transfers.take_ended()}
        while rank.tier.jobs or len(ends) < len(wanted):
            if rank.tier.jobs:
                rank.tier.end()
            ends |= {ended.job_id: ended for ended in rank.transfers.take_ended()}
        for job, (chosen, blocks) in wanted.items():
            for key, block in zip(chosen, blocks, strict=True):
                if block not in ends[job].failed_blocks:
                    assert rank.block(block) == [bytes([keys.index(key)]) * PAGE] * 2
        assert rank.free_slots() == SLOTS
        rank.close()


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_part_of_transfer_of_several_groups_has_blocks_of_its_slots(factor: int) -> None:
    for seed in range(50):
        choice = random.Random(seed)
        sizes = [choice.randint(0, 7) for _ in range(3)]
        indices = [choice.randint(0, 5) for _ in range(3)]
        ids = list(range(sum(sizes)))
        whole = GPULoadStoreSpec(ids, sizes, indices)
        slots: list[list[tuple[int, int]]] = []  # of each slot: (block id, position in the slot)
        at = 0
        for size, index in zip(sizes, indices, strict=True):
            by_slot: dict[int, list[tuple[int, int]]] = {}
            for number in range(size):
                place = index % factor + number
                by_slot.setdefault(place // factor, []).append((at + number, place % factor))
            slots += by_slot.values()
            at += size
        first = choice.randint(0, len(slots))
        end = choice.randint(first, len(slots))
        part = part_of(whole, factor, first, end)
        assert part.block_ids.tolist() == [block for slot in slots[first:end] for block, _ in slot]
        at = 0
        starts = {slot[0][0]: slot[0][1] for slot in slots}
        for size, index in zip(part.group_sizes, part.block_indices, strict=True):
            if size:
                assert index % factor == starts[part.block_ids.tolist()[at]] or first == end
            at += size


def test_staging_smaller_than_two_blocks_error_names_option() -> None:
    assert check_slots(3 * 4096, 4096) == 3
    with pytest.raises(ConfigError, match="^cpu_bytes_to_use: 8191 bytes do not hold two blocks of 4096 bytes"):
        check_slots(8191, 4096)
