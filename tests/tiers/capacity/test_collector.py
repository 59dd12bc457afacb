"""The collector over real files, memory and S3: what it removes and keeps, also while others change the storage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.capacity import walker
from kvtiers.tiers.capacity.collector import IDLE_S, STEP_S, Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.capacity.usage import USAGE, Usage, publish_usage, read_usage
from kvtiers.tiers.capacity.walker import CollectReport, is_block
from kvtiers.tiers.capacity.written import WRITERS_PREFIX, Writer, used_bytes
from kvtiers.tiers.errors import StoreConfigError, StoreFullError, StorePermissionError, StoreUnavailableError
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.store import KeyInfo, Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts, list_keys
from kvtiers.tiers.testing.faults import Fault, FaultyStore, SyscallFaults
from kvtiers.tiers.testing.servers import S3Server
from tests.identity import FakeSpec, block_key
from tests.s3_clients import use_credentials

ROOT = Path(__file__).parents[3]
MAPPER = FileMapper.from_offloading_spec("", FakeSpec())
SIZE = 4096


def name(number: int) -> str:
    return MAPPER.relative_name(block_key(number))


def blocks(store: Store) -> set[str]:
    return {key for key in list_keys(store) if is_block(key)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "kv")
    yield store
    store.close()


def fill(store: LocalStore, ages_s: Sequence[float], size: int = SIZE) -> None:
    """Store blocks 0, 1, … with these ages."""
    for number, age_s in enumerate(ages_s):
        store.put(name(number), as_parts(bytes(size)))
        at = time.time() - age_s
        os.utime(f"{store.root_dir}/{name(number)}", (at, at))


def holder(store: Store) -> str:
    """The collector that works; "": none."""
    usage = read_usage(store)
    assert usage is not None
    return usage.holder


def run(collector: Collector, *, dry_run: bool = False) -> CollectReport:
    """Run a collector where no other one works."""
    report = collector.run(dry_run=dry_run)
    assert report is not None
    return report


def collect(store: Store, *, dry_run: bool = False, **policy: float) -> CollectReport:
    options = {name: int(value) if name == "max_bytes" else value for name, value in policy.items()}
    return run(Collector(store, CapacityPolicy(**options)), dry_run=dry_run)  # type: ignore[arg-type]


def test_blocks_unused_for_ttl_s_are_removed(store: LocalStore) -> None:
    fill(store, [10, 100, 1000, 10_000])
    report = collect(store, ttl_s=500)
    assert blocks(store) == {name(0), name(1)}
    assert report.removed_blobs == {"ttl": 2, "capacity": 0}
    assert report.removed_bytes["ttl"] == 2 * SIZE
    store.touch(name(1))
    collect(store, ttl_s=50)
    assert blocks(store) == {name(0), name(1)}


def test_max_bytes_removes_the_least_recently_used_blocks(store: LocalStore) -> None:
    fill(store, [3600 * (n + 1) for n in range(20)])
    store.touch(name(19))
    report = collect(store, max_bytes=11 * SIZE)
    left = blocks(store)
    assert name(19) in left
    assert 9 <= len(left) <= 10
    assert left - {name(19)} == {name(n) for n in range(len(left) - 1)}
    assert report.removed_blobs["capacity"] == 20 - len(left)


def test_blocks_with_future_timestamps_are_counted_and_removed_last(store: LocalStore) -> None:
    """The clock was ahead and was set back."""
    fill(store, [-30 * 86_400.0] * 6 + [3600.0] * 4)
    collect(store, max_bytes=9 * SIZE)
    assert {name(n) for n in range(6)} <= blocks(store) < {name(n) for n in range(10)}
    collect(store, max_bytes=4 * SIZE)
    assert 0 < len(blocks(store)) <= 3
    assert collect(store, ttl_s=31 * 86_400).removed_blobs["ttl"] == 0
    collect(store, ttl_s=7 * 86_400)
    assert blocks(store) == set()


def test_no_block_is_removed_if_foreign_files_alone_exceed_max_bytes(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, [3600.0] * 10)
    store.put("theirs/data", as_parts(bytes(20 * SIZE)))
    collector = Collector(store, CapacityPolicy(max_bytes=12 * SIZE))
    for _ in range(2):
        collector.run()
    assert len(blocks(store)) == 10
    assert len([record for record in caplog.records if "no block is removed" in record.getMessage()]) == 1
    store.delete("theirs/data")
    store.put("theirs/data", as_parts(bytes(8 * SIZE)))
    collector.run()
    assert len(blocks(store)) == 3  # its records have some bytes, too


def test_blocks_younger_than_grace_s_are_kept(store: LocalStore) -> None:
    fill(store, [0.0] * 10)
    report = collect(store, max_bytes=5 * SIZE, ttl_s=0.001, grace_s=60)
    assert report.removed_blobs == {"ttl": 0, "capacity": 0}
    assert len(blocks(store)) == 10


def test_collector_removes_blocks_but_not_configs_or_foreign_files(store: LocalStore, tmp_path: Path) -> None:
    open_namespace(store, MAPPER)
    fill(store, [10_000, 10_000])
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    (tmp_path / "kv" / "other_r0").mkdir()
    (tmp_path / "kv" / "other_r0" / "a.bin").write_text("not ours")
    for path in (tmp_path / "kv").rglob("*"):
        os.utime(path, (0, 0))
    collect(store, ttl_s=10, max_bytes=1)
    assert {k for k in list_keys(store) if not k.startswith(OWN_PREFIX)} == {
        MAPPER.relative_config_name,
        "notes.txt",
        "other_r0/a.bin",
    }


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (name(1), True),
        ("model_0123456789ab_r12/abc/de_g0/abcde0.bin", True),
        ("model_0123456789ab/config.json", False),
        ("team-b/model_0123456789ab_r12/abc/de_g0/abcde0.bin", False),  # a root within this one
        ("notes_r1/abc/de_g0/abcdef.bin", False),
        ("0123456789ab_r0/abc/de_g0/abcde0.bin", False),
        ("model_0123456789ab_r0/abc/de_g0/123450.bin", False),
        ("_kvtiers/x_r0/abc/de_g0/abcde0.bin", False),
        ("model_r0/abc/de_g0/abcde0.tmp", False),
        ("model_r0/abc/abcde0.bin", False),
        ("model_r0/abc/de_g0/123450.bin", False),
    ],
)
def test_is_block_accepts_only_block_names(key: str, expected: bool) -> None:
    assert is_block(key) is expected


def test_emptied_folders_are_removed_and_later_puts_succeed(store: LocalStore, tmp_path: Path) -> None:
    fill(store, [10_000] * 5)
    collect(store, ttl_s=10)
    namespace = tmp_path / "kv" / MAPPER.block_prefix
    assert namespace.is_dir()
    assert list(namespace.iterdir()) == []
    store.put(name(0), as_parts(b"again"))
    assert blocks(store) == {name(0)}


def test_dry_run_changes_nothing(store: LocalStore, tmp_path: Path) -> None:
    fill(store, [10_000] * 10)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())
    report = collect(store, dry_run=True, ttl_s=10)
    assert report.removed_blobs["ttl"] == 10
    report = collect(store, dry_run=True, max_bytes=5 * SIZE)
    assert report.removed_blobs["capacity"] >= 5
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()) == before


# -- others at work ----------------------------------------------------------------------------------------------------


class Busy(FaultyStore):
    """Does something after each listed key."""

    def __init__(self, store: Store, meanwhile: Callable[[KeyInfo], None]) -> None:
        super().__init__(store)
        self.meanwhile = meanwhile

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for info in self.inner.keys(prefix):
            if not prefix:
                self.meanwhile(info)
            yield info


def test_blocks_deleted_by_another_process_during_a_pass_are_not_errors(store: LocalStore) -> None:
    fill(store, [10_000] * 10)
    report = collect(Busy(store, lambda info: store.delete(info.key)), ttl_s=10)
    assert blocks(store) == set()
    assert report.kept_by_error == 0


def test_two_collectors_at_once_remove_no_more_than_needed(store: LocalStore) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(20)])
    policy = CapacityPolicy(max_bytes=11 * SIZE)
    others: list[CollectReport] = []

    def another(info: KeyInfo) -> None:
        if not others and info.key == name(3):
            publish_usage(store, Usage())
            others.append(run(Collector(store, policy)))

    run(Collector(Busy(store, another), policy))
    assert len(others) == 1
    assert 8 <= len(blocks(store)) <= 10
    usage = read_usage(store)
    assert usage is not None
    assert usage.bytes >= SIZE * len(blocks(store))


def test_blocks_that_cannot_be_removed_are_reported_and_kept(store: LocalStore) -> None:
    fill(store, [10_000] * 4)
    faulty = FaultyStore(store, [Fault("delete_many", error=lambda: StorePermissionError("no"), count=None)])
    with pytest.raises(StorePermissionError):
        collect(faulty, ttl_s=10)
    assert not holder(store)
    with SyscallFaults() as dry:
        store.delete_many(["a"])
    number = dry.calls.index("unlink")
    with SyscallFaults(at=number, error=errno.EACCES):
        (error,) = store.delete_many([name(0)])
    assert isinstance(error, StorePermissionError)
    assert len(blocks(store)) == 4


def test_block_that_cannot_be_removed_is_counted_once(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, [1000.0] * 6)
    monkeypatch.setattr(
        LocalStore, "delete_many", lambda self, keys: [StorePermissionError("no") for _ in keys], raising=True
    )
    assert collect(store, ttl_s=10, max_bytes=2 * SIZE).kept_by_error == 6


def test_folder_that_cannot_be_removed_does_not_fail_the_removal_of_its_blocks(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [10_000] * 4)
    first, second, *_ = sorted(map(name, range(4)))

    def refuse(folder: str, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    monkeypatch.setattr(os, "rmdir", refuse)
    assert store.delete_many([second, first]) == [None, None]
    assert blocks(store) == {name(n) for n in range(4)} - {first, second}


def test_second_collector_finishes_after_the_first_is_killed(store: LocalStore) -> None:
    fill(store, [10_000] * 3000, size=1)
    code = (
        "import os, signal, sys\n"
        "from kvtiers.tiers.capacity.collector import Collector\n"
        "from kvtiers.tiers.capacity.policy import CapacityPolicy\n"
        "from kvtiers.tiers.stores.files.local import LocalStore\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Collector(LocalStore(sys.argv[1]), CapacityPolicy(ttl_s=10), on_removed=die).run()\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, store.root_dir], cwd=ROOT)
    assert killed.returncode == -9
    assert 0 < len(blocks(store)) < 3000
    now = [0.0]
    collector = Collector(store, CapacityPolicy(ttl_s=10), monotonic=lambda: now[0])
    assert collector.run() is None
    now[0] = 31.0
    assert collector.run() is not None
    assert blocks(store) == set()


# -- an engine's collector ---------------------------------------------------------------------------------------------


class World:
    """A storage and hosts that share it. Only the test moves its clock."""

    def __init__(self, store: Store | None = None, **policy: Any) -> None:
        self.now = 1e9
        self.store: Store = store or MemoryStore(clock=lambda: self.now)
        self.policy = CapacityPolicy(**{"poll_s": 1.0, **policy})
        self.number = 0
        self.highest = 0

    def collector(self, **options: Any) -> Collector:
        def clock() -> float:
            return self.now

        return Collector(
            options.pop("store", self.store),
            options.pop("policy", self.policy),
            clock=clock,
            monotonic=clock,
            since_boot=clock,
            **options,
        )

    def writer(self) -> Writer:
        return Writer(self.store, poll_s=self.policy.poll_s, writer_s=self.policy.writer_s, clock=lambda: self.now)

    def put(self, *counters: Collector | Writer, size: int = SIZE) -> None:
        self.store.put(name(self.number), as_parts(bytes(size)))
        self.number += 1
        for counter in counters:
            counter.note_put(size)

    def poll(self, *collectors: Collector, polls: int = 1) -> list[CollectReport]:
        """Advance the clock by one poll and let each collector poll until it is not urgent."""
        reports = []
        self.highest = max(self.highest, self.block_bytes())
        for _ in range(polls):
            self.now += self.policy.poll_s
            for collector in collectors:
                for _ in range(50):
                    report = collector.poll()
                    reports += [] if report is None else [report]
                    if not collector.is_urgent:
                        break
        return reports

    def block_bytes(self) -> int:
        return sum(info.size for info in self.store.keys() if is_block(info.key))  # noqa: SIM118 - not a dict


def test_root_stays_below_max_bytes_while_blocks_are_stored() -> None:
    world = World(max_bytes=400 * SIZE)
    collector = world.collector()
    assert not collector.full
    removed = 0
    for _ in range(300):
        for _ in range(10):
            if not collector.full:
                world.put(collector)
        removed += sum(report.removed_blobs["capacity"] for report in world.poll(collector))
    assert world.number == 3000  # never full, because it began to remove early enough
    assert 300 * SIZE <= world.block_bytes() <= world.highest <= 400 * SIZE
    assert removed == world.number - len(blocks(world.store))


def test_writers_stop_while_the_root_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(max_bytes=400 * SIZE, grace_s=1e9)  # nothing can be removed
    collector, writer = world.collector(), world.writer()
    while not writer.full():
        world.put(writer)
        if world.number % 5 == 0:
            world.poll(collector)
        assert world.number < 500
    # What one writer puts within a poll may come on top.
    assert 300 * SIZE < world.block_bytes() <= 405 * SIZE
    assert "of max_bytes = 1638400" in collector.full
    world.policy = replace(world.policy, grace_s=0.0)
    second = world.collector()
    collector.release()
    world.poll(second, polls=10)
    assert second.full == ""
    assert writer.full() == ""


def test_lowered_max_bytes_is_reached_without_a_put() -> None:
    world = World(max_bytes=400 * SIZE)
    first = world.collector()
    for _ in range(300):
        world.put(first)
    world.poll(first, polls=3)
    first.release()
    world.policy = replace(world.policy, max_bytes=200 * SIZE)
    world.poll(world.collector(), polls=5)
    assert 150 * SIZE <= world.block_bytes() <= 200 * SIZE


def test_idle_root_gets_no_requests_until_the_next_put() -> None:
    world = World(max_bytes=400 * SIZE)
    counting = FaultyStore(world.store)
    collectors = [world.collector(store=counting) for _ in range(3)]
    for _ in range(20):
        world.put(collectors[1])
    world.poll(*collectors, polls=int(IDLE_S) + 10)
    assert not holder(world.store)
    calls = dict(counting.calls)
    world.poll(*collectors, polls=10_000)
    assert dict(counting.calls) == calls
    world.put(collectors[2])
    world.poll(*collectors)
    assert holder(world.store)


def test_idle_root_with_ttl_is_listed_rarely_and_emptied() -> None:
    world = World(ttl_s=86_400.0, every_s=600.0, poll_s=5.0)
    collectors = [world.collector() for _ in range(2)]
    for _ in range(20):
        world.put()
    reports = world.poll(*collectors, polls=2 * 86_400 // 5)
    assert blocks(world.store) == set()
    assert sum(report.removed_blobs["ttl"] for report in reports) == 20
    # Each pass keeps its collector for as long as it needs for 20 blocks.
    assert len(reports) <= 2 * 86_400 / 600 * (IDLE_S / 5 + 2)


def test_second_collector_takes_over_when_the_first_dies() -> None:
    world = World(max_bytes=100 * SIZE)
    first, second = world.collector(), world.collector()
    for _ in range(60):
        world.put(first, second)
        reports = [len(world.poll(each)) for each in (first, second)]
        assert reports[1] == 0
    for _ in range(200):  # the first one is dead
        if not second.full:
            world.put(second)
        world.poll(second)
    assert world.block_bytes() <= 100 * SIZE
    assert world.poll(second)


def test_writers_stop_while_another_engines_collector_counts_nothing() -> None:
    world = World(max_bytes=1000 * SIZE)
    first, second = world.collector(), world.collector()
    for _ in range(20):
        world.put(second)
        world.poll(first, second)
    for _ in range(20):  # the first one hangs, or gets no processor
        world.put(second)
        world.poll(second)
        if second.full:
            break
    assert "another engine's collector of max_bytes has not counted" in second.full
    # A poll's puts and the head room, and what was put until the limit of three polls had passed.
    assert 33 <= world.number <= 37
    world.poll(first, second, polls=2)
    assert second.full == ""
    for _ in range(60):
        world.put(second)
        world.poll(second)
    assert holder(world.store) == second._owner
    assert second.full == ""


class ForeignRecord(FaultyStore):
    """A store in which one record belongs to another account."""

    foreign = ""

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key == self.foreign:
            raise StorePermissionError("another account's", key=key)
        super().get_into(key, parts)


def test_writer_whose_record_cannot_be_read_stores_again_after_listings() -> None:
    """The collector that works counts its bytes only by listing its blocks."""
    world = World(max_bytes=1000 * SIZE, every_s=60.0)
    store = ForeignRecord(world.store)
    first, second = world.collector(store=store), world.collector()
    store.foreign = f"{WRITERS_PREFIX}{second._writer.name}"
    world.put(first)
    world.poll(first)
    for _ in range(24):
        world.put(first, size=1)
        world.put(second)
        world.poll(first, second)
    assert "another engine's collector of max_bytes has not counted" in second.full
    for _ in range(130):
        world.put(first, size=1)
        world.poll(first, second)
    assert holder(world.store) == first._owner
    assert second.full == ""


def test_uncounted_puts_before_a_pause_do_not_stop_the_writer_after_the_pause() -> None:
    world = World(max_bytes=1000 * SIZE, writer_s=100.0)
    first, second = world.collector(), world.collector()
    world.put(first)
    world.poll(first)
    for _ in range(20):  # more than is always kept free
        world.put(second)
    world.poll(second, polls=int(IDLE_S) + 1)  # the first one hangs until the second one has nothing to do any more
    assert not second.full
    for _ in range(int(world.policy.writer_s)):
        world.put(first)
        world.poll(first)
    for _ in range(20):
        world.put(second)  # under a new name, of which nothing is counted
    world.poll(second)
    assert holder(world.store) == first._owner
    assert not second.full


@pytest.mark.parametrize(("limit", "is_full"), [(10_000, False), (300, True)])
def test_writers_stop_only_at_max_bytes_while_a_command_collects(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_full: bool
) -> None:
    monkeypatch.setattr(walker, "PAGE_KEYS", 10)
    world = World(max_bytes=limit * SIZE, grace_s=1e9)  # nothing can be removed
    command, engine = world.collector(), world.collector()
    for _ in range(200):
        world.put()
    keys = world.store.keys

    def list_slowly(prefix: str = "") -> Iterator[KeyInfo]:
        for info in keys(prefix):
            world.now += 0 if prefix else STEP_S / 10
            yield info

    monkeypatch.setattr(world.store, "keys", list_slowly)
    told: list[str] = []

    def go_on(_: int) -> None:
        for _ in range(0 if engine.full else limit // 60):
            world.put(engine)
        engine.poll()
        told.append(engine.full)

    command.run(on_progress=go_on)
    assert len(told) >= 20
    assert bool(told[-1]) is is_full
    assert not any("has counted nothing" in text for text in told)
    assert world.number <= 1.05 * limit


def test_collector_stops_after_another_takes_over() -> None:
    world = World(max_bytes=100 * SIZE)
    first, second = world.collector(), world.collector()
    world.put(first, second)
    world.poll(first)
    for _ in range(60):
        world.put(second)
        world.poll(second)
    for _ in range(20):
        world.put(first, second)
        world.poll(first, second)
    assert [len(world.poll(each)) for each in (first, second)] == [0, 1]


@pytest.mark.parametrize(("owner", "waits_s"), [("one", 0.0), ("another", 30.0)])
def test_dead_collector_is_replaced_at_once_by_its_owner_and_after_30_s_by_another(owner: str, waits_s: float) -> None:
    world = World(max_bytes=100 * SIZE)
    first = world.collector(owner="one")
    world.put(first)
    world.poll(first)
    second = world.collector(owner=owner)
    began = world.now
    while not world.poll(second):
        world.put(second)
    assert waits_s <= world.now - began - 1.0 <= waits_s + 1.0


@pytest.mark.parametrize("content", [b"", b"{}", b'{"holder":"one","beat":1}', b"\0" * 512])
def test_invalid_usage_record_does_not_stop_a_collector(content: bytes) -> None:
    world = World(max_bytes=100 * SIZE)
    world.store.put(USAGE, as_parts(content))
    assert len(world.poll(world.collector())) == 1


def test_exactly_one_of_five_collectors_replaces_a_dead_collector() -> None:
    world = World(max_bytes=100 * SIZE)
    dead = world.collector()
    world.put(dead)
    world.poll(dead)
    others = [world.collector() for _ in range(5)]
    for _ in range(40):
        world.put(*others)
        world.poll(*others)
    world.put(*others)
    assert len(world.poll(*others)) == 1


class SnapshotStore(LocalStore):
    """Its file system has 100 blocks of space. ``held``: what removed blocks still take."""

    held = 0.0
    keeps = 0.0

    def space(self) -> tuple[int, int]:
        return int((100 - self.held) * SIZE) - SIZE * len(blocks(self)), 100 * SIZE

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        self.held += self.keeps * len(keys)
        return super().delete_many(keys)


def test_min_free_removes_the_oldest_blocks_and_no_more_than_needed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "kv")
    world = World(store, min_free_bytes=20 * SIZE, grace_s=0.0)
    fill(store, [3600.0 * (n + 1) for n in range(85)])
    collector = Collector(store, world.policy)
    for _ in range(10):
        collector.poll()
    # The reserve, a twentieth of it as a margin, and one block.
    assert 20 * SIZE < store.space()[0] <= 23 * SIZE
    assert blocks(store) == {name(n) for n in range(len(blocks(store)))}


def test_removals_stop_with_one_warning_if_no_space_becomes_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot keeps what is removed."""
    store = SnapshotStore(tmp_path / "kv")
    store.keeps = 1.0
    world = World(store, min_free_bytes=20 * SIZE, grace_s=0.0, poll_s=20.0)
    fill(store, [3600.0 * (n + 1) for n in range(85)])
    collector = world.collector()
    collector.note_put(0)
    for _ in range(180):
        collector.note_put(0)
        world.poll(collector)
    assert 20 < len(blocks(store)) < 85
    assert len([record for record in caplog.records if "a snapshot may keep them" in record.getMessage()]) == 1


def test_removals_wait_for_space_that_becomes_free_late(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "kv")
    store.keeps = 1.0
    world = World(store, min_free_bytes=20 * SIZE, grace_s=0.0)
    fill(store, [3600.0 * (n + 1) for n in range(85)])
    collector = world.collector()
    world.poll(collector, polls=30)
    left = len(blocks(store))
    assert 75 <= left < 85
    store.held = 0.0
    world.poll(collector, polls=100)
    assert left - 2 <= len(blocks(store))  # for a block of the size that is known by now


def test_reserve_above_the_size_of_the_disk_removes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SnapshotStore(tmp_path / "kv")
    world = World(store, min_free_bytes=100 * SIZE, grace_s=0.0)
    fill(store, [3600.0] * 50)
    collector = world.collector()
    for _ in range(100):
        collector.note_refused()
        world.poll(collector)
    assert len(blocks(store)) == 50
    assert len([record for record in caplog.records if "lower min_free" in record.getMessage()]) == 1


@pytest.mark.parametrize("helps", [True, False])
def test_refused_puts_remove_a_limited_number_of_oldest_blocks_until_puts_succeed(
    store: LocalStore, helps: bool
) -> None:
    """Inodes or a quota are used up, which free space does not show."""
    world = World(store, ttl_s=1e9, grace_s=0.0)
    fill(store, [3600.0 * (n + 1) for n in range(100)])
    collector = world.collector()
    world.poll(collector)
    collector.note_refused()
    world.poll(collector, polls=3)
    left = len(blocks(store))
    assert 93 <= left <= 96
    assert blocks(store) == {name(n) for n in range(left)}
    for _ in range(120):
        if helps:
            collector.note_put(SIZE)
        else:
            collector.note_refused()
        world.poll(collector)
    assert left - 20 <= len(blocks(store)) <= left
    assert (len(blocks(store)) == left) is helps


def test_collector_works_without_room_for_its_records(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "kv")
    fill(store, [60.0 * (n + 1) for n in range(40)])
    full = FaultyStore(store, [Fault("put", error=lambda: StoreFullError("no"), count=None)])
    world = World(full, max_bytes=20 * SIZE, ttl_s=600.0)
    collector = Collector(full, world.policy, clock=lambda: time.time() + 7200.0)
    for _ in range(10):
        collector.poll()
    # The host's clock is wrong, and without a record the storage does not tell its time, so nothing goes by age.
    assert blocks(store) == {name(n) for n in range(len(blocks(store)))}
    assert 15 <= len(blocks(store)) <= 20


@pytest.mark.parametrize("last", ["", "a collector that was killed"])
def test_full_disk_is_collected_although_the_usage_record_cannot_be_replaced(last: str) -> None:
    world = World()
    for _ in range(100):
        world.put()
    publish_usage(world.store, Usage(holder=last, beat=7))
    full = FaultyStore(world.store, [Fault("put", error=lambda: StoreFullError("no"), count=None)])
    collector = world.collector(store=full)
    for _ in range(2 * int(world.policy.lease_s)):
        collector.note_refused()
        world.poll(collector)
    assert len(blocks(world.store)) < 100
    assert holder(world.store) == last


def test_root_of_young_blocks_is_listed_rarely() -> None:
    world = World(max_bytes=10 * SIZE, grace_s=1e6)
    counting = FaultyStore(world.store)
    collector = world.collector(store=counting)
    for _ in range(20):
        world.put(collector)
    world.poll(collector, polls=5)
    before = counting.calls["keys"]
    world.poll(collector, polls=600)
    assert world.block_bytes() == 20 * SIZE
    lists_of_records = 600 + 600 / 10  # the writers' each poll, the collector's own when it reads the clock
    assert counting.calls["keys"] - before <= lists_of_records + 25


@pytest.mark.parametrize("still", [0, 10])
def test_blocks_that_cannot_be_removed_do_not_protect_other_blocks(store: LocalStore, still: int) -> None:
    """The oldest blocks belong to another user or to a read-only namespace."""
    fill(store, [1000.0 * (n + 1) for n in range(40)])
    stay = {name(number) for number in range(40 - still, 40)}

    class Refusing(LocalStore):
        def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
            gone = iter(super().delete_many([key for key in keys if key not in stay]))
            return [StorePermissionError("no") if key in stay else next(gone) for key in keys]

    world = World(Refusing(store.root_dir), max_bytes=30 * SIZE)
    collector = world.collector()
    world.poll(collector, polls=30)
    left = blocks(store)
    assert stay <= left
    assert 25 <= len(left) <= 30
    assert left - stay == {name(n) for n in range(len(left) - still)}


def test_used_bytes_reflect_outside_deletions_after_the_next_listing() -> None:
    world = World(max_bytes=100 * SIZE, every_s=60.0)
    collector = world.collector()
    for _ in range(90):
        world.put(collector)
    world.poll(collector, polls=3)
    for number in range(80):
        world.store.delete(name(number))
    world.put(collector)
    for _ in range(70):
        collector.note_put(0)
        world.poll(collector)
    assert 11 * SIZE <= collector._used() <= 12 * SIZE


class BadSector(MemoryStore):
    """A blob cannot be read until it is replaced."""

    bad = ""

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key == self.bad:
            raise StoreUnavailableError("Input/output error (EIO)", key=key)
        super().get_into(key, parts)

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self.bad = "" if key == self.bad else self.bad
        return super().put(key, parts, overwrite=overwrite)


def test_unreadable_usage_record_is_replaced() -> None:
    store = BadSector()
    world = World(store, max_bytes=10 * SIZE)
    world.poll(world.collector(), polls=2)
    store.bad = USAGE
    assert read_usage(store) is None
    world.poll(world.collector(), polls=2)
    assert read_usage(store) is not None


def test_failed_collector_retries_without_a_put() -> None:
    world = World(max_bytes=100 * SIZE)
    faulty = FaultyStore(world.store)
    collector = world.collector(store=faulty)
    world.poll(collector, polls=int(IDLE_S) + 10)
    world.put(collector)
    faulty.plan = [Fault("keys", error=lambda: StoreUnavailableError("away"), count=None)]
    for _ in range(100):
        world.now += 1.0
        with pytest.raises(StoreUnavailableError):
            collector.poll()
    faulty.plan = []
    assert world.poll(collector)


# -- object storage ----------------------------------------------------------------------------------------------------


def test_s3_bucket_is_kept_within_max_bytes(
    moto: S3Server, boto_models_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtiers.tiers.stores.s3.options import S3Options
    from kvtiers.tiers.stores.s3.store import S3Store

    use_credentials(monkeypatch, moto)
    bucket = "collector-tests"
    boto3.client("s3", endpoint_url=moto.endpoint_url, region_name=moto.region).create_bucket(Bucket=bucket)
    store = S3Store(S3Options(bucket=bucket, endpoint_url=moto.endpoint_url))
    policy = CapacityPolicy(max_bytes=10 * SIZE, grace_s=-2.0, poll_s=0.0)  # an object's time has whole seconds
    collector, writer = Collector(store, policy), Writer(store, poll_s=0.0)
    for number in range(20):
        store.put(name(number), as_parts(bytes(SIZE)))
        writer.note_put(SIZE)
        writer.poll()
        for _ in range(3):
            collector.poll()
        assert len(blocks(store)) <= 10
        assert writer.full() == ""
    assert len(blocks(store)) >= 6
    collector.release()
    assert not holder(store)
    assert used_bytes(store) is not None
    store.close()


def test_ttl_removes_old_blocks_of_an_fsspec_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    from kvtiers.tiers.stores.fsspec import FsspecStore

    store = FsspecStore(f"file://{tmp_path}/kv")
    for number in range(4):
        store.put(name(number), as_parts(bytes(SIZE)))
        os.utime(tmp_path / "kv" / name(number), (0, 1e9 if number % 2 else time.time()))
    collect(store, ttl_s=3600)
    assert blocks(store) == {name(0), name(2)}
    store.close()


class TimelessStore(MemoryStore):
    """As fsspec drivers that do not say when a file was written."""

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return (KeyInfo(info.key, info.size, 0.0) for info in super().keys(prefix))


@pytest.mark.parametrize("dry_run", [False, True])
def test_storage_without_timestamps_is_refused(dry_run: bool) -> None:
    store = TimelessStore()
    store.put(name(0), as_parts(bytes(SIZE)))
    with pytest.raises(StoreConfigError, match="when a blob was written"):
        collect(store, dry_run=dry_run, ttl_s=3600)
    assert blocks(store) == {name(0)}
    assert dry_run or not holder(store)
