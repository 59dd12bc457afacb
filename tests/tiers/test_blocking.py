"""BlockingTier: blocks in pieces, from several threads, in bounded time, whatever the storage does."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata, JobResult, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocking import GRACE_S, BlockingTier, Pieces, open_tier
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.testing.fuse import FuseFault, FuseMount, why_no_fuse
from tests.files import files_below
from tests.identity import FakeSpec, block_key

BLOCK_BYTES = 3 * 4096 + 100  # needs padding
ROW_BYTES = 4 * 4096
CUTS = [(1000, BLOCK_BYTES - 1000), (BLOCK_BYTES,), (1, 4096, BLOCK_BYTES - 4097)]
NEEDS_FUSE = pytest.mark.skipif(bool(why_no_fuse()), reason=str(why_no_fuse()))


@contextmanager
def tier_at(root: Path, *, rows: int = 8, **options: Any) -> Iterator[BlockingTier]:
    """A tier of files."""
    region = SharedOffloadRegion.anonymous(rows, ROW_BYTES)
    # A busy machine may be silent for longer than a lookup waits by default.
    config = {"type": "fs", "root_dir": str(root), "min_free": 0, "lookup_deadline_s": 5.0, **options}
    tier = open_tier(config, FakeSpec(), region.create_kv_memoryview(), block_bytes=BLOCK_BYTES)
    try:
        yield tier
    finally:
        tier.close()
        region.cleanup()


def content(count: int, seed: int = 1) -> list[np.ndarray[Any, Any]]:
    """Blocks of random bytes."""
    return list(np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), np.uint8))


def in_pieces(block: np.ndarray[Any, Any], number: int) -> Pieces:
    """A block in one to three parts."""
    ends = np.cumsum(CUTS[number % len(CUTS)])
    return [part.data for part in np.split(block, ends[:-1])]


def pieces_of(blocks: Sequence[np.ndarray[Any, Any]]) -> list[Pieces]:
    """All blocks, cut in turn."""
    return [in_pieces(block, number) for number, block in enumerate(blocks)]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_more_blocks_than_rows_in_pieces_load_unchanged(isolation: str, tmp_path: Path) -> None:
    keys = [block_key(number) for number in range(50)]
    stored = content(50)
    with tier_at(tmp_path, isolation=isolation) as tier:
        assert tier.store_many(keys, pieces_of(stored)) == [True] * 50
        assert tier.store_many(keys, pieces_of(stored)) == [True] * 50
    with tier_at(tmp_path, isolation=isolation) as tier:
        loaded = content(51, seed=2)
        wanted = [*keys[:20], block_key(999), *keys[20:]]
        assert tier.exists_many(wanted) == [number != 20 for number in range(51)]
        # The pieces of a load need not be those of the store.
        done = tier.load_many(wanted, [in_pieces(block, number + 1) for number, block in enumerate(loaded)])
        assert done == [number != 20 for number in range(51)]
        kept = content(51, seed=2)[20]
        assert np.array_equal(np.stack(loaded), np.stack([*stored[:20], kept, *stored[20:]]))


def test_lookup_of_prefix_finds_all_blocks_before_first_gap(tmp_path: Path) -> None:
    keys = [block_key(number) for number in range(700)]
    with tier_at(tmp_path, rows=700) as tier:
        present = [*keys[:600], *keys[601:650]]
        assert all(tier.store_many(present, pieces_of(content(len(present)))))
    with tier_at(tmp_path) as tier:
        assert tier.exists_many(keys, prefix_only=True).index(False) == 600
        assert tier.exists_many(keys) == [key in set(present) for key in keys]
        assert tier.exists_many([]) == []


def test_many_threads_at_once_get_their_own_blocks(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            keys = [block_key(1000 * number + each) for each in range(40)]
            blocks = content(40, seed=number)
            for _ in range(3):
                assert all(tier.store_many(keys, pieces_of(blocks)))
                assert all(tier.exists_many(keys))
                loaded = content(40, seed=99)
                assert all(tier.load_many(keys, pieces_of(loaded)))
                assert np.array_equal(np.stack(loaded), np.stack(blocks))
        except BaseException as e:
            failures.append(e)

    with tier_at(tmp_path) as tier:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_damaged_block_is_reported_as_false_and_leaves_memory_unchanged(tmp_path: Path) -> None:
    keys = [block_key(number) for number in range(3)]
    with tier_at(tmp_path) as tier:
        assert all(tier.store_many(keys, pieces_of(content(3))))
        path = next(path for path, _ in files_below(tmp_path) if path.name == f"{keys[1][:32].hex()}.bin")
        with path.open("r+b") as file:
            file.seek(2000)
            byte = file.read(1)[0]
            file.seek(2000)
            file.write(bytes([byte ^ 1]))
        loaded = content(3, seed=5)
        assert tier.load_many(keys, pieces_of(loaded)) == [True, False, True]
        assert np.array_equal(loaded[1], content(3, seed=5)[1])
        assert all(tier.store_many(keys, pieces_of(content(3))))
        assert tier.load_many(keys, pieces_of(loaded)) == [True, True, True]


@NEEDS_FUSE
def test_load_from_hung_mount_is_given_up_and_never_writes_into_the_engines_memory(tmp_path: Path) -> None:
    """L3: the pages' memory is reused right away; the read ends later, in a row that nobody uses."""
    keys = [block_key(number) for number in range(6)]
    (tmp_path / "real").mkdir()
    (tmp_path / "mount").mkdir()
    deadline_s = 1.0
    with FuseMount(tmp_path / "real", tmp_path / "mount") as mount:
        # In threads, a hung read cannot be killed: the harder case.
        limits = {"job_deadline_s": deadline_s, "isolation": "thread"}
        with tier_at(tmp_path / "mount", rows=4, **limits) as tier:
            assert all(tier.store_many(keys, pieces_of(content(6))))
            loaded = content(6, seed=5)
            with mount.stopped():
                began = time.monotonic()
                assert not any(tier.load_many(keys, pieces_of(loaded)))
                assert time.monotonic() - began < 2 * deadline_s + GRACE_S + 2
                began = time.monotonic()
                assert not any(tier.exists_many(keys))
                assert not any(tier.store_many(keys, pieces_of(content(6))))
                assert not any(tier.load_many(keys, pieces_of(loaded)))
                assert time.monotonic() - began < 2, "the tier is cut off, so calls end at once"
                for block in loaded:
                    block[:] = 7  # the engine uses the memory for something else
            until = time.monotonic() + 30
            again = content(6, seed=6)
            while not all(tier.load_many(keys, pieces_of(again))) and time.monotonic() < until:
                time.sleep(0.1)
            assert np.array_equal(np.stack(again), np.stack(content(6)))
            assert all((block == 7).all() for block in loaded)
            with tier._news:  # all rows have come back
                assert sorted(tier._free) == list(range(4))


@NEEDS_FUSE
def test_hung_mount_in_processes_ends_calls_in_time_and_the_tier_recovers(tmp_path: Path) -> None:
    keys = [block_key(number) for number in range(6)]
    (tmp_path / "real").mkdir()
    (tmp_path / "mount").mkdir()
    with (
        FuseMount(tmp_path / "real", tmp_path / "mount") as mount,
        tier_at(tmp_path / "mount", job_deadline_s=1.0) as tier,
    ):
        assert all(tier.store_many(keys, pieces_of(content(6))))
        with mount.stopped():
            began = time.monotonic()
            assert not any(tier.load_many(keys, pieces_of(content(6, seed=5))))
            assert time.monotonic() - began < 2 * 1.0 + GRACE_S + 2
        until = time.monotonic() + 40
        again = content(6, seed=6)
        while not all(tier.load_many(keys, pieces_of(again))) and time.monotonic() < until:
            time.sleep(0.1)
        assert np.array_equal(np.stack(again), np.stack(content(6)))


@NEEDS_FUSE
def test_full_disk_refuses_stores_and_still_loads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "mount").mkdir()
    keys = [block_key(number) for number in range(4)]
    with (
        FuseMount(tmp_path / "real", tmp_path / "mount") as mount,
        tier_at(tmp_path / "mount") as tier,
    ):
        assert all(tier.store_many(keys[:2], pieces_of(content(2))))
        mount.plan = [FuseFault("write", errno=errno.ENOSPC)]
        assert not any(tier.store_many(keys[2:], pieces_of(content(2))))
        assert all(tier.load_many(keys[:2], pieces_of(content(2, seed=3))))


class ForeignTier(SecondaryTierManager):
    """Reports and answers what a test says. Raises in submissions if told to."""

    job_deadline_s = 1.0

    def __init__(self, rows: memoryview, now: list[float]) -> None:
        super().__init__(None, rows, "foreign")
        self.now = now
        self.due: dict[int, float] = {}
        self.jobs: list[JobMetadata] = []
        self.results: list[JobResult] = []
        self.reports = self.raises = self.is_down = False
        self.waiting = threading.Event()

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        self.waiting.set()
        return None

    def take_answered(self) -> Mapping[str, Collection[OffloadKey]]:
        return {}

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.jobs.append(job_metadata)
        if self.reports:
            self.report(job_metadata)
        if self.raises:
            raise RuntimeError("a fault of the tier")
        self.waiting.set()

    submit_load = submit_store

    def report(self, job: JobMetadata) -> None:
        """Have a job reported as moved."""
        self.results.append(JobResult(job.job_id, True, tuple(job.keys)))

    def get_finished(self) -> list[JobResult]:
        results, self.results = self.results, []
        return results

    def touch(self, keys: Collection[OffloadKey]) -> None:
        assert not self.is_down

    def on_request_finished(self, req_context: ReqContext) -> None:
        assert not self.is_down

    def shutdown(self) -> None:
        self.is_down = True


class SlowTier(ForeignTier):
    """Reports each job shortly before its deadline."""

    def get_finished(self) -> list[JobResult]:
        done = [job for job in self.jobs if self.now[0] >= self.due[job.job_id]]
        for job in done:
            self.jobs.remove(job)
            self.report(job)
        return super().get_finished()

    def submit_store(self, job_metadata: JobMetadata) -> None:
        super().submit_store(job_metadata)
        self.due[job_metadata.job_id] = self.now[0] + 0.9 * self.job_deadline_s

    submit_load = submit_store


def foreign(rows: int = 4, kind: type[ForeignTier] = ForeignTier) -> tuple[ForeignTier, BlockingTier, list[float]]:
    """A foreign tier, its calls, and their clock: each reading takes 10 ms."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    memory = np.zeros((rows, ROW_BYTES), np.uint8).data
    tier = kind(memory, now)
    return tier, BlockingTier(tier, memory, BLOCK_BYTES, clock), now


@pytest.mark.parametrize("is_store", [True, False])
def test_rows_of_job_whose_submission_raised_are_freed_after_its_deadline(is_store: bool) -> None:
    tier, calls, now = foreign()
    move = calls.store_many if is_store else calls.load_many
    keys = [block_key(number) for number in range(2)]
    tier.raises = True
    with pytest.raises(RuntimeError, match="a fault of the tier"):
        move(keys, pieces_of(content(2)))
    assert len(calls._free) == 2, "the tier may have begun the job"
    tier.raises, tier.reports = False, True
    now[0] += 1.0 + GRACE_S
    assert move(keys, pieces_of(content(2))) == [True, True]
    assert sorted(calls._free) == list(range(4))
    tier.report(tier.jobs[0])  # the first job, after all
    assert move(keys, pieces_of(content(2))) == [True, True]
    assert sorted(calls._free) == list(range(4))


def test_rows_of_job_that_raised_are_freed_when_tier_reports_the_job() -> None:
    tier, calls, _ = foreign()
    tier.raises = tier.reports = True
    with pytest.raises(RuntimeError, match="a fault of the tier"):
        calls.load_many([block_key(1)], pieces_of(content(1)))
    tier.raises = False
    assert calls.load_many([block_key(1)], pieces_of(content(1))) == [True]
    assert sorted(calls._free) == list(range(4))


def test_job_that_is_never_reported_bounds_its_call_and_keeps_its_rows() -> None:
    """L3: the tier may still use the rows, so they stay out of use; the other rows still move blocks."""
    tier, calls, now = foreign()
    assert calls.load_many([block_key(1)], pieces_of(content(1))) == [False]
    assert now[0] < 2 * 1.0 + GRACE_S + 1
    tier.reports = True
    for _ in range(3):
        assert calls.load_many([block_key(2)], pieces_of(content(1))) == [True]
    assert len(calls._free) == 3


@pytest.mark.parametrize("is_store", [True, False])
def test_call_with_many_more_blocks_than_rows_ends_in_time_when_storage_is_slow(is_store: bool) -> None:
    _, calls, now = foreign(kind=SlowTier)
    keys = [block_key(number) for number in range(40)]
    done = (calls.store_many if is_store else calls.load_many)(keys, pieces_of(content(40)))
    assert now[0] < 2 * 1.0 + GRACE_S + 1
    moved = done.index(False)
    assert moved >= 2
    assert not any(done[moved:])
    assert sorted(calls._free) == list(range(4))


@pytest.mark.parametrize("is_store", [True, False])
def test_key_given_twice_is_in_two_jobs(is_store: bool) -> None:
    tier, calls, _ = foreign(rows=8)
    tier.reports = True
    keys = [block_key(1), block_key(2), block_key(1)]
    move = calls.store_many if is_store else calls.load_many
    assert move(keys, pieces_of(content(3))) == [True] * 3
    assert [list(job.keys) for job in tier.jobs] == [keys[:2], keys[2:]]


def test_read_only_tier_is_given_no_stores() -> None:
    tier, calls, _ = foreign()
    tier.takes_stores, tier.reports = False, True
    assert calls.store_many([block_key(1)], pieces_of(content(1))) == [False]
    assert not tier.jobs
    assert calls.load_many([block_key(1)], pieces_of(content(1))) == [True]


def test_key_given_twice_fills_both_blocks(tmp_path: Path) -> None:
    keys, stored = [block_key(1), block_key(2)], content(2)
    loaded = content(3, seed=5)
    with tier_at(tmp_path) as tier:
        assert all(tier.store_many(keys, pieces_of(stored)))
        assert tier.load_many([*keys, keys[0]], pieces_of(loaded)) == [True] * 3
    assert np.array_equal(np.stack(loaded), np.stack([*stored, stored[0]]))


@pytest.mark.parametrize("name", ["exists_many", "load_many", "store_many"])
def test_call_that_waits_ends_when_tier_is_closed(name: str) -> None:
    tier, calls, _ = foreign()
    calls._clock = time.monotonic
    calls._job_s = 600.0
    done: list[list[bool]] = []
    arguments = [[block_key(1)]] if name == "exists_many" else [[block_key(1)], pieces_of(content(1))]
    waiting = threading.Thread(target=lambda: done.append(getattr(calls, name)(*arguments)), daemon=True)
    waiting.start()
    assert tier.waiting.wait(30)
    calls.close()
    waiting.join(30)
    assert done == [[False]]
    calls.touch([block_key(1)])
    assert calls.exists_many([block_key(1)]) == [False]


def test_closed_tier_answers_false(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        keys = [block_key(1)]
        assert tier.store_many(keys, pieces_of(content(1))) == [True]
        tier.close()
        assert tier.exists_many(keys) == tier.load_many(keys, pieces_of(content(1))) == [False]
        assert tier.store_many(keys, pieces_of(content(1))) == [False]


def test_block_of_another_size_is_refused(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier, pytest.raises(ValueError, match=rf"has 5 bytes.* have {BLOCK_BYTES}"):
        tier.store_many([block_key(1)], [[memoryview(bytearray(5))]])


def test_rows_too_small_for_block_are_refused(tmp_path: Path) -> None:
    rows = np.zeros((4, 4096), np.int8)
    with pytest.raises(ConfigError, match="rows: has 4 rows of 4096 bytes; needs 2 or more of at least 5000"):
        open_tier({"type": "fs", "root_dir": str(tmp_path)}, FakeSpec(), rows.data, block_bytes=5000)
