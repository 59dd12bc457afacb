"""The collector over real files, memory and S3: what it removes, what it leaves, and who comes in between."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest

from kvtiers.connector.prefixes.place import place_of_prefixes
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.namespace import open_namespace
from kvtiers.tiers.capacity.account import Account, BoundedStore
from kvtiers.tiers.capacity.collector import Collector, is_block
from kvtiers.tiers.capacity.lease import LEASE_PREFIX, Lease
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.process import make_collector
from kvtiers.tiers.capacity.records import OWN_PREFIX, put_record
from kvtiers.tiers.capacity.removal import DELETE_BATCH_KEYS, CollectReport
from kvtiers.tiers.capacity.usage import MEASURED, USAGE_PREFIX, read_measured
from kvtiers.tiers.config.tier_options import FsTierConfig
from kvtiers.tiers.errors import StoreConfigError, StoreFullError, StorePermissionError, StoreUnavailableError
from kvtiers.tiers.store import KeyInfo, Store, parts_size
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
    """Blocks 0, 1, … of these ages."""
    for number, age_s in enumerate(ages_s):
        store.put(name(number), as_parts(bytes(size)))
        at = time.time() - age_s
        os.utime(f"{store.root_dir}/{name(number)}", (at, at))


def run(collector: Collector, *, dry_run: bool = False) -> CollectReport:
    """Where nobody else is at work."""
    report = collector.run(dry_run=dry_run)
    assert report is not None
    return report


def collect(store: Store, *, dry_run: bool = False, **policy: float) -> CollectReport:
    options = {name: int(value) if name == "max_bytes" else value for name, value in policy.items()}
    return run(Collector(store, CapacityPolicy(**options)), dry_run=dry_run)  # type: ignore[arg-type]


def test_ttl_removes_what_was_not_used_for_so_long(store: LocalStore) -> None:
    fill(store, [10, 100, 1000, 10_000])
    report = collect(store, ttl_s=500)
    assert blocks(store) == {name(0), name(1)}
    assert report.removed_blobs == {"ttl": 2, "capacity": 0}
    assert report.removed_bytes["ttl"] == 2 * SIZE
    store.touch(name(1))
    collect(store, ttl_s=50)
    assert blocks(store) == {name(0), name(1)}


def test_capacity_removes_the_least_recently_used(store: LocalStore) -> None:
    fill(store, [3600 * (n + 1) for n in range(20)])
    store.touch(name(19))
    report = collect(store, max_bytes=20 * SIZE, low=0.5)
    left = blocks(store)
    assert name(19) in left
    assert 8 <= len(left) <= 10
    assert left - {name(19)} == {name(n) for n in range(len(left) - 1)}
    assert report.removed_blobs["capacity"] == 20 - len(left)


def test_blocks_of_times_to_come_are_counted_and_go_last(store: LocalStore) -> None:
    """The clock was ahead, and was set back."""
    fill(store, [-30 * 86_400.0] * 6 + [3600.0] * 4)
    collect(store, max_bytes=10 * SIZE, low=0.8)
    assert {name(n) for n in range(6)} <= blocks(store) < {name(n) for n in range(10)}
    collect(store, max_bytes=6 * SIZE, low=0.5)
    assert 0 < len(blocks(store)) <= 3
    assert collect(store, ttl_s=31 * 86_400).removed_blobs["ttl"] == 0
    collect(store, ttl_s=7 * 86_400)
    assert blocks(store) == set()


def test_blocks_stay_where_other_peoples_files_alone_are_too_much(
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
    assert 1 <= len(blocks(store)) <= 2


def test_young_blocks_stay(store: LocalStore) -> None:
    fill(store, [0.0] * 10)
    report = collect(store, max_bytes=5 * SIZE, ttl_s=0.001, grace_s=60)
    assert report.removed_blobs == {"ttl": 0, "capacity": 0}
    assert len(blocks(store)) == 10


def test_only_blocks_are_removed(store: LocalStore, tmp_path: Path) -> None:
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
def test_which_names_are_blocks(key: str, expected: bool) -> None:
    assert is_block(key) is expected


def test_empty_folders_go_and_puts_find_their_way(store: LocalStore, tmp_path: Path) -> None:
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


def test_dry_run_says_what_a_run_then_does(store: LocalStore) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(40)])
    told, done = (
        collect(store, dry_run=dry_run, ttl_s=3600 * 30.5, max_bytes=30 * SIZE, low=0.5) for dry_run in (True, False)
    )
    assert told.removed_blobs["ttl"] == done.removed_blobs["ttl"] == 10
    # A run also has its own records to make room for.
    assert 0 <= done.removed_blobs["capacity"] - told.removed_blobs["capacity"] <= 1


def test_dry_run_counts_on_what_is_in_quarantine(store: LocalStore) -> None:
    fill(store, [10_000] * 100)
    for number in range(6):
        store.quarantine(name(number))
    told, done = (collect(store, dry_run=dry_run, max_bytes=104 * SIZE, low=0.9) for dry_run in (True, False))
    assert done.own_bytes == 0
    assert told.removed_blobs == done.removed_blobs


def test_dry_run_counts_on_what_its_ttl_frees(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, [10_000] * 20 + [1000] * 20)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: (90 - len(blocks(self))) * SIZE)
    told, done = (collect(store, dry_run=dry_run, ttl_s=5000, min_free_bytes=52 * SIZE) for dry_run in (True, False))
    assert told.removed_blobs == done.removed_blobs == {"ttl": 20, "capacity": 0}


def test_prefixes_beside_a_tiers_blocks_are_not_its_own(store: LocalStore) -> None:
    fill(store, [10_000] * 10)
    beside = place_of_prefixes(FsTierConfig(type="fs", root_dir=store.root_dir))
    assert isinstance(beside, FsTierConfig)
    prefixes = LocalStore(beside.root_dir)
    for number in range(30):
        prefixes.put(f"{MAPPER.name_prefix}/chunk/{number}.safetensors", as_parts(bytes(SIZE)))
    report = collect(store, max_bytes=30 * SIZE)
    assert (report.blobs, report.removed_blobs["capacity"]) == (10 + 1, 0)  # its lease
    account = Account(store, 30 * SIZE)
    for _ in range(10):
        account.take(SIZE, "key")
    assert len(list_keys(prefixes)) == 30


def test_bad_blocks_go_before_good_ones(store: LocalStore) -> None:
    fill(store, [10_000] * 12)
    for number in range(6):
        store.quarantine(name(number))
    report = collect(store, max_bytes=10 * SIZE, low=0.7)
    assert blocks(store) == {name(n) for n in range(6, 12)}
    assert report.own_bytes == 0


def test_quarantine_is_kept_for_its_time(store: LocalStore) -> None:
    fill(store, [10_000])
    store.quarantine(name(0))
    assert collect(store, ttl_s=1).own_bytes == SIZE
    assert collect(store, ttl_s=1, quarantine_s=0).own_bytes == 0


def test_free_space_of_the_file_system(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(10)])
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 100 * SIZE)
    collect(store, ttl_s=1e9, min_free_bytes=90 * SIZE)
    assert len(blocks(store)) == 10
    collect(store, ttl_s=1e9, min_free_bytes=82 * SIZE)
    assert len(blocks(store)) == 10
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 83 * SIZE)
    collect(store, ttl_s=1e9, min_free_bytes=70 * SIZE)
    assert len(blocks(store)) == 10
    now = [0.0]
    collector = Collector(store, CapacityPolicy(min_free_bytes=80 * SIZE), monotonic=lambda: now[0])
    # A large reserve does not cost a small cache all of its blocks; other people's files that fill the disk do.
    for free, left in ((83, 10), (80, 3), (70, 0)):
        monkeypatch.setattr(LocalStore, "free_bytes", lambda self, free=free: free * SIZE)
        now[0] += 3600.0
        collector.run()
        assert not left or not collector.is_due()
        assert blocks(store) == {name(n) for n in range(left)}


def test_reserve_above_the_size_of_the_disk_removes_nothing(
    store: LocalStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [3600.0] * 5)
    monkeypatch.setattr(LocalStore, "total_bytes", lambda self: 100 * SIZE)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 10 * SIZE)
    collector = Collector(store, CapacityPolicy(min_free_bytes=100 * SIZE))
    for _ in range(3):
        collector.run()
    assert len(blocks(store)) == 5
    assert not collector.is_due()
    (told,) = [record.getMessage() for record in caplog.records if "lower min_free" in record.getMessage()]
    assert told.startswith(f"min_free = {100 * SIZE} is not less than the size of the file system, {100 * SIZE} bytes")
    collect(store, min_free_bytes=99 * SIZE)
    assert blocks(store) == set()


def test_storage_that_reports_no_free_space_is_not_full(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, [3600.0] * 5)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: None)
    collector = Collector(store, CapacityPolicy(min_free_bytes=1 << 40))
    collector.run()
    assert len(blocks(store)) == 5
    assert not collector.is_due()


class LateStore(LocalStore):
    """Shows freed space late, as ZFS and btrfs do; 100 blocks' room is free at first."""

    def __init__(self, root: Path, late_s: float, now: list[float]) -> None:
        super().__init__(root)
        self.late_s, self.now = late_s, now
        self.freed: list[tuple[float, int]] = []
        self.taken = 0  # by others

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        self.freed.append((self.now[0], len(keys) * SIZE))
        return super().delete_many(keys)

    def free_bytes(self) -> int:
        shown = sum(size for at, size in self.freed if self.now[0] - at >= self.late_s)
        return 100 * SIZE + shown - self.taken


@pytest.mark.parametrize("late_s", [0.0, 5.0, 30.0])
def test_what_becomes_free_late_is_not_removed_again_and_again(tmp_path: Path, late_s: float) -> None:
    now = [0.0]
    store = LateStore(tmp_path / "kv", late_s, now)
    fill(store, [3600.0 * (n + 1) for n in range(90)])
    policy = CapacityPolicy(ttl_s=1e9, min_free_bytes=96 * SIZE, every_s=1e6)
    collector = Collector(store, policy, monotonic=lambda: now[0])
    for number_left in (69, 48):  # 1.25 x 96 and one block's room: 121 blocks
        for _ in range(200):
            if collector.is_due():
                collector.run()
            now[0] += policy.poll_s
        assert len(blocks(store)) == number_left
        store.taken += 21 * SIZE


def runs_for(collector: Collector, now: list[float], seconds: float) -> None:
    until = now[0] + seconds
    while now[0] < until:
        if collector.is_due():
            collector.run()
        now[0] += 15.0


def test_what_never_becomes_free_is_not_removed_to_the_last_block(tmp_path: Path) -> None:
    now = [0.0]
    store = LateStore(tmp_path / "kv", float("inf"), now)
    fill(store, [3600.0 * (n + 1) for n in range(200)])
    policy = CapacityPolicy(ttl_s=1e9, min_free_bytes=96 * SIZE)
    collector = Collector(store, policy, monotonic=lambda: now[0])
    runs_for(collector, now, 300.0)
    assert len(blocks(store)) == 158  # twice: once it may be others who take what becomes free
    runs_for(collector, now, 3600.0)
    assert len(blocks(store)) >= 116
    store.late_s = 0.0  # the snapshot goes
    runs_for(collector, now, 3600.0)
    left = len(blocks(store))
    runs_for(collector, now, 3600.0)
    assert len(blocks(store)) == left


def test_what_others_write_while_a_run_lists_is_no_snapshot(tmp_path: Path) -> None:
    now = [0.0]
    store = LateStore(tmp_path / "kv", 0.0, now)
    fill(store, [3600.0 * (n + 1) for n in range(100)])
    policy = CapacityPolicy(ttl_s=1e9, min_free_bytes=96 * SIZE, grace_s=0.0)
    collector = Collector(store, policy, monotonic=lambda: now[0])
    keys, listings = store.keys, count(1)

    def list_all(prefix: str = "") -> Iterator[KeyInfo]:
        if not prefix and next(listings) == 2:
            store.taken += 20 * SIZE
        return keys(prefix)

    store.keys = list_all  # type: ignore[method-assign]
    collector.run()
    store.taken += 6 * SIZE
    runs_for(collector, now, 120.0)
    assert store.free_bytes() >= 97 * SIZE  # a block can be stored


@pytest.mark.parametrize(("inside", "more"), [(True, 0), (False, 0), (False, 60)])
def test_room_that_is_taken_at_once_is_made_again(tmp_path: Path, inside: bool, more: int) -> None:
    """By writers of the root, or by others, who fill the disk."""
    now = [0.0]
    store = LateStore(tmp_path / "kv", 0.0, now)
    fill(store, [3600.0 * (n + 1) for n in range(100)])
    policy = CapacityPolicy(ttl_s=1e9, min_free_bytes=96 * SIZE, grace_s=0.0)
    collector = Collector(store, policy, monotonic=lambda: now[0])
    delete_many = store.delete_many

    def take(keys: Sequence[str]) -> list[Exception | None]:
        outcomes = delete_many(keys)
        store.taken += (len(keys) + more) * SIZE
        for key in keys if inside else ():
            store.put(f"{key[:-8]}{secrets.token_hex(2)}.bin", as_parts(bytes(SIZE)))
        return outcomes

    store.delete_many = take  # type: ignore[method-assign]
    collector.run()
    before = blocks(store)
    now[0] += 61.0
    assert collector.is_due()
    collector.run()
    assert before - blocks(store)


@pytest.mark.parametrize(("size", "high"), [(1, 1.0), (3, 0.95), (8, 0.9)])
def test_writers_of_any_block_get_room_below_any_mark(store: LocalStore, size: int, high: float) -> None:
    """20 blocks' room and the records'; where less is left above the mark than a block needs, none would ever go."""
    policy = CapacityPolicy(max_bytes=21 * SIZE, high=high, grace_s=0.0, poll_s=0.0)
    collector = Collector(store, policy)
    collector.run()
    bounded = BoundedStore(store, Account(store, 21 * SIZE, clock=count(step=10).__next__))
    for number in range(60):
        block = name(number), as_parts(bytes(size * SIZE))
        try:
            bounded.put(*block)
        except StoreFullError:
            assert collector.is_due()
            collector.run()
            bounded.put(*block)
    assert blocks(store) >= {name(59)}
    assert not collector.is_due()
    collector.run()
    assert blocks(store) >= {name(59)}


def test_what_a_writer_was_refused_is_wanted_until_it_gets_it(store: LocalStore) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(90)])
    collector = Collector(store, CapacityPolicy(max_bytes=100 * SIZE, poll_s=0.0))
    collector.run()
    account = Account(store, 100 * SIZE, clock=count(step=10).__next__)
    for size in (1000, 15):  # the first can never be had
        with pytest.raises(StoreFullError):
            account.take(size * SIZE, "a")
        assert collector.is_due() is (size == 15)
    report = run(collector)
    assert 5 <= report.removed_blobs["capacity"] <= 6  # down to low: 85
    account.give_back(account.take(15 * SIZE, "a"), 15 * SIZE)
    assert not collector.is_due()


def test_an_idle_root_is_asked_twice_whatever_its_writers_are(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path / "kv"))
    collector = Collector(store, CapacityPolicy(max_bytes=1000 * SIZE))
    collector.run()
    accounts = [Account(store, 1000 * SIZE) for _ in range(20)]
    for account in accounts:
        account.settle(account.take(SIZE, "a"), SIZE)
    for used in (20, 900):
        assert collector.is_due() is (used == 900)
        before = store.calls.copy()
        assert collector.is_due() is (used == 900)
        calls = store.calls - before
        if used == 20:
            assert calls == {"get_into": 1, "keys": 1}  # the measurement, and which records were replaced
            accounts[7].take(880 * SIZE, "nearly all")
    collector.run()
    assert not collector.is_due()


def test_free_space_for_a_large_block(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(50)])
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 100 * SIZE)
    # 1.25 x 95, and one block
    assert collect(store, ttl_s=1e9, min_free_bytes=95 * SIZE).removed_blobs["capacity"] == 20
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 104 * SIZE)
    for block_bytes in (SIZE, 10 * SIZE):  # a tier knows it before any is stored
        policy = CapacityPolicy(ttl_s=1e9, min_free_bytes=95 * SIZE, block_bytes=block_bytes)
        assert Collector(store, policy).is_due() is (block_bytes > SIZE)
    store.put(name(50), as_parts(bytes(10 * SIZE)))
    # another such would be refused: 95 and one block, and half of the 40 that are stored
    assert collect(store, ttl_s=1e9, min_free_bytes=95 * SIZE).removed_blobs["capacity"] == 22


def test_room_is_made_for_what_writers_hold_and_no_more(store: LocalStore) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(90)])
    policy = CapacityPolicy(max_bytes=100 * SIZE)
    collector = Collector(store, policy)
    collector.run()
    assert not collector.is_due()
    assert len(blocks(store)) == 90
    Account(store, 100 * SIZE).take(8 * SIZE, "an engine that stores nothing more holds this")
    assert collector.is_due()
    report = run(collector)
    assert 13 <= report.removed_blobs["capacity"] <= 14  # 90 + 8 - 85, and the records' own bytes
    assert not collector.is_due()


class StoreWrittenTo(LocalStore):
    """Blocks come between the baseline and the listing, which then shows them."""

    def __init__(self, root: Path, bounded: BoundedStore) -> None:
        super().__init__(root)
        self.bounded = bounded

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        if not prefix:
            for number in range(80, 92):
                self.bounded.put(name(number), as_parts(bytes(SIZE)))
        return super().keys(prefix)


def test_what_is_stored_during_a_listing_is_not_counted_twice(store: LocalStore) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(80)])
    policy = CapacityPolicy(max_bytes=100 * SIZE, grace_s=0.0)
    Collector(store, policy).run()
    written_to = StoreWrittenTo(Path(store.root_dir), BoundedStore(store, Account(store, 100 * SIZE)))
    report = run(Collector(written_to, policy))
    assert report.removed_blobs["capacity"] == 0
    assert len(blocks(store)) == 92


class SlowlyListed(LocalStore):
    """A listing takes 4 s by ``monotonic``, in which a block is stored."""

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        if not prefix:
            self.put(name(100), as_parts(bytes(SIZE)))
            at = time.time() + 4
            os.utime(f"{self.root_dir}/{name(100)}", (at, at))
        return super().keys(prefix)

    def monotonic(self) -> float:
        return 5.0 * os.path.exists(f"{self.root_dir}/{name(100)}")


@pytest.mark.parametrize("policy", [{"ttl_s": 3.0}, {"max_bytes": 4 * SIZE, "low": 0.1}])
def test_what_is_stored_during_a_listing_that_outlasts_its_ttl_stays(tmp_path: Path, policy: dict[str, Any]) -> None:
    store = SlowlyListed(tmp_path / "kv")
    fill(store, [1000.0] * 4)
    Collector(store, CapacityPolicy(**policy), monotonic=store.monotonic).run()
    assert name(100) in blocks(store)
    assert len(blocks(store)) < 5


@pytest.mark.parametrize("step_s", [1000.0, -1000.0])
def test_a_step_of_the_storages_clock_makes_no_living_writer_dead(step_s: float) -> None:
    clock, now = [1e9], [0.0]
    store = MemoryStore(clock=lambda: clock[0])
    policy = CapacityPolicy(max_bytes=1 << 20)
    collector = Collector(store, policy, clock=lambda: clock[0], monotonic=lambda: now[0])
    collector.run()
    Account(store, 1 << 20, clock=lambda: now[0]).take(1, "it lives")
    for passed_s, living in ((100.0, 1), (600.0, 1), (1600.0, 0)):
        clock[0] += passed_s + step_s
        now[0] += passed_s
        step_s = 0.0
        collector.run()
        assert len(list_keys(store, USAGE_PREFIX)) == living


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


class StoreInUse(LocalStore):
    """Blocks are used when the first listing has passed them."""

    def __init__(self, root: Path, uses: deque[str]) -> None:
        super().__init__(root)
        self.uses = uses

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield from super().keys(prefix)
        if not prefix:
            self.uses.extend([name(0), name(1)])


def test_what_is_used_during_a_run_stays(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.capacity.process.NOTE_S_MAX", 120.0)
    fill(store, [1000 - n for n in range(20)])
    uses: deque[str] = deque()
    in_use = StoreInUse(Path(store.root_dir), uses)
    report = run(make_collector(in_use, CapacityPolicy(max_bytes=20 * SIZE), uses, lambda _: None))
    assert 0 < report.removed_blobs["capacity"] <= 4
    assert {name(0), name(1)} <= blocks(store)
    assert name(2) not in blocks(store)


class VastStore(LocalStore):
    """Listed at ten blobs a second by ``now``; notes how long listed blocks waited for their removal at most."""

    def __init__(self, root: Path, now: list[float]) -> None:
        super().__init__(root)
        self.now = now
        self.listed_at: dict[str, float] = {}
        self.waited_s = 0.0

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for info in super().keys(prefix):
            self.listed_at[info.key] = self.now[0]
            yield info
            self.now[0] += 0.1

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        self.waited_s = max(self.waited_s, *(self.now[0] - self.listed_at[key] for key in keys))
        return super().delete_many(keys)


@pytest.mark.parametrize("policy", [{"ttl_s": 5000.0}, {"max_bytes": 100 * SIZE, "low": 0.5}])
def test_what_is_chosen_goes_before_the_listing_ends(tmp_path: Path, policy: dict[str, Any]) -> None:
    """It may be used meanwhile, and a listing may take an hour."""
    now = [0.0]
    store = VastStore(tmp_path / "kv", now)
    fill(store, [10_000.0 if number % 20 == 0 else 1000.0 for number in range(100)])
    report = run(Collector(store, CapacityPolicy(**policy), monotonic=lambda: now[0]))
    assert sum(report.removed_blobs.values()) >= 5
    assert 0 < store.waited_s < 1.5


class StoreInConstantUse(LocalStore):
    """For each use that is noted, which takes a while, two more come."""

    def __init__(self, root: Path, uses: deque[str], now: list[float]) -> None:
        super().__init__(root)
        self.uses = uses
        self.now = now

    def touch(self, key: str) -> None:
        super().touch(key)
        self.now[0] += 0.001
        self.uses.extend([key, key])


def test_uses_that_come_faster_than_they_are_noted_keep_nobody_from_collecting(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [1000] * 3000, size=1)
    now = [0.0]
    monkeypatch.setattr("kvtiers.tiers.capacity.process.time", SimpleNamespace(monotonic=lambda: now[0]))
    uses = deque([name(0)] * 5000, maxlen=10_000)
    in_use = StoreInConstantUse(Path(store.root_dir), uses, now)
    run(make_collector(in_use, CapacityPolicy(ttl_s=500), uses, lambda _: None))
    assert blocks(store) == {name(0)}
    assert uses


def test_blocks_that_vanish_meanwhile_do_no_harm(store: LocalStore) -> None:
    fill(store, [10_000] * 10)
    report = collect(Busy(store, lambda info: store.delete(info.key)), ttl_s=10)
    assert blocks(store) == set()
    assert report.kept_by_error == 0


def test_two_collectors_at_once_do_no_harm(store: LocalStore) -> None:
    fill(store, [3600.0 * (n + 1) for n in range(20)])
    policy = CapacityPolicy(max_bytes=20 * SIZE, low=0.5)
    others: list[CollectReport] = []

    def another(info: KeyInfo) -> None:
        if not others and info.key == name(3):
            for lost in list(store.keys(LEASE_PREFIX)):
                store.delete(lost.key)
            others.append(run(Collector(store, policy)))

    run(Collector(Busy(store, another), policy))
    assert len(others) == 1
    assert 8 <= len(blocks(store)) <= 10
    measured = read_measured(store)
    assert measured is not None
    assert measured.bytes >= SIZE * len(blocks(store))


def test_who_is_overtaken_leaves_the_rest_to_the_other(store: LocalStore) -> None:
    fill(store, [3600.0] * 700, size=16)

    def overtake(_: list[str]) -> None:
        put_record(store, MEASURED, {"id": "another's", "bytes": 0, "blobs": 0, "base": {}, "at": time.time()})

    report = run(Collector(store, CapacityPolicy(max_bytes=1600), on_removed=overtake))
    assert report.gave_up
    assert len(blocks(store)) == 700 - DELETE_BATCH_KEYS


def test_blocks_that_cannot_be_removed_are_counted_and_stay_measured(store: LocalStore) -> None:
    fill(store, [10_000] * 4)
    faulty = FaultyStore(store, [Fault("delete_many", error=lambda: StorePermissionError("no"), count=None)])
    with pytest.raises(StorePermissionError):
        collect(faulty, ttl_s=10)
    assert list(store.keys(LEASE_PREFIX)) == []
    with SyscallFaults() as dry:
        store.delete_many(["a"])
    number = dry.calls.index("unlink")
    with SyscallFaults(at=number, error=errno.EACCES):
        (error,) = store.delete_many([name(0)])
    assert isinstance(error, StorePermissionError)
    assert len(blocks(store)) == 4


def test_blocks_that_cannot_be_removed_keep_no_others(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are another user's, or their namespace was made read-only: all that a run chooses."""
    fill(store, [1000.0 * (n + 1) for n in range(20)])
    delete_many = LocalStore.delete_many
    stay = {name(number) for number in range(10, 20)}

    def refuse(self: LocalStore, keys: Sequence[str]) -> list[Exception | None]:
        gone = iter(delete_many(self, [key for key in keys if key not in stay]))
        return [StorePermissionError("no") if key in stay else next(gone) for key in keys]

    monkeypatch.setattr(LocalStore, "delete_many", refuse)
    collector = Collector(store, CapacityPolicy(max_bytes=20 * SIZE, low=0.8))
    reports = [report for _ in range(4) if (report := collector.run()) is not None]
    assert [report.removed_blobs["capacity"] > 0 for report in reports] == [False, True, False, False]
    assert 4 <= reports[1].removed_blobs["capacity"] <= 5
    assert blocks(store) == stay | {name(n) for n in range(10 - reports[1].removed_blobs["capacity"])}


@pytest.mark.parametrize("still", [0, 1])
def test_after_a_while_without_deletions_the_oldest_go(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, still: int
) -> None:
    """Credentials without the right to delete, say. All blocks were tried by then, and some still cannot be removed."""
    fill(store, [3600.0 * 1.5**n for n in range(20)])
    collector = Collector(store, CapacityPolicy(max_bytes=20 * SIZE))
    delete_many = LocalStore.delete_many
    stay = {name(number) for number in range(20)}

    def refuse(self: LocalStore, keys: Sequence[str]) -> list[Exception | None]:
        gone = iter(delete_many(self, [key for key in keys if key not in stay]))
        return [StorePermissionError("no") if key in stay else next(gone) for key in keys]

    monkeypatch.setattr(LocalStore, "delete_many", refuse)
    for _ in range(6):
        collector.run()
    stay.intersection_update(name(19 - number) for number in range(still))
    report = run(collector)
    assert blocks(store) == stay | {name(n) for n in range(20 - still - report.removed_blobs["capacity"])}
    assert 16 <= len(blocks(store)) < 20


def test_after_a_while_without_deletions_no_more_goes_than_is_to_go(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [10.0 * (n + 1) for n in range(60)])
    collector = Collector(store, CapacityPolicy(max_bytes=62 * SIZE))
    with monkeypatch.context() as failing:
        failing.setattr(LocalStore, "delete_many", lambda self, keys: [StoreUnavailableError("no") for _ in keys])
        for _ in range(5):  # then all are tried
            collector.run()
    assert len(blocks(store)) == 60
    for wanted in ({7, 8}, {0}):
        report = run(collector)
        assert report.removed_blobs["capacity"] in wanted
    number_left = len(blocks(store))
    fill(store, [1.0 + 10.0 * (n + 1) for n in range(60)])
    collector.run()
    assert blocks(store) == {name(n) for n in range(number_left)}  # the least recently used go again


def test_a_block_that_stays_past_its_ttl_is_counted_once(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, [1000.0] * 6)
    monkeypatch.setattr(
        LocalStore, "delete_many", lambda self, keys: [StorePermissionError("no") for _ in keys], raising=True
    )
    assert collect(store, ttl_s=10, max_bytes=2 * SIZE).kept_by_error == 6


def test_a_folder_that_stays_hides_no_block_that_stays(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, [10_000] * 4)
    first, second, *_ = sorted(map(name, range(4)))

    def refuse(folder: str, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    monkeypatch.setattr(os, "rmdir", refuse)
    assert store.delete_many([second, first]) == [None, None]
    assert blocks(store) == {name(n) for n in range(4)} - {first, second}
    assert f"{first.rpartition('/')[0]} is kept, even if it is empty: Input/output error" in caplog.text


def test_a_full_storage_is_collected_too(store: LocalStore) -> None:
    """No room for a lease or a measurement is no reason not to make room."""
    fill(store, [10_000] * 10)
    full = FaultyStore(store, [Fault("put", error=lambda: StoreFullError("no"), count=None)])
    collect(full, max_bytes=5 * SIZE)
    assert len(blocks(store)) <= 4


class StoreWithQuota(LocalStore):
    """No more files than so many, whatever is free: inodes or a quota are used up."""

    files_max = 0

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if len(list_keys(self)) >= self.files_max:
            raise StoreFullError("no space left on device")
        return super().put(key, parts, overwrite=overwrite)


@pytest.mark.parametrize("policy", [{"max_bytes": 1 << 30}, {"ttl_s": 1e9}, {"ttl_s": 1e9, "min_free_bytes": 1}])
def test_a_storage_that_is_full_by_its_own_measure_is_collected(tmp_path: Path, policy: dict[str, Any]) -> None:
    store, now = StoreWithQuota(tmp_path / "kv"), [0.0]
    store.files_max = 1000
    fill(store, [3600.0 * (n + 1) for n in range(40)])
    collector = Collector(store, CapacityPolicy(**policy, poll_s=0.0), monotonic=lambda: now[0])
    collector.run()
    assert len(blocks(store)) == 40
    store.files_max = 41  # what is there, and the measurement
    assert not collector.is_due()
    now[0] += 61.0
    assert collector.is_due()
    report = run(collector)
    assert 6 <= report.removed_blobs["capacity"] <= 7  # down to 85 %
    assert blocks(store) == {name(n) for n in range(40 - report.removed_blobs["capacity"])}
    collector.run()
    now[0] += 61.0
    assert not collector.is_due()
    store.put(name(100), as_parts(bytes(SIZE)))


class StoreWithQuotaOfBytes(LocalStore):
    """Holds no more bytes than so many, and does not say so."""

    bytes_max = 0

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if sum(info.size for info in self.keys()) + parts_size(parts) > self.bytes_max:
            raise StoreFullError("disk quota exceeded")
        return super().put(key, parts, overwrite=overwrite)


def test_a_quota_with_room_for_less_than_a_large_block_is_collected(tmp_path: Path) -> None:
    store, now = StoreWithQuotaOfBytes(tmp_path / "kv"), [0.0]
    size = 9 << 20
    store.bytes_max = 6 * size + (6 << 20)
    fill(store, [3600.0 * (n + 1) for n in range(6)], size)
    collector = Collector(store, CapacityPolicy(ttl_s=1e9), monotonic=lambda: now[0])
    collector.run()
    assert len(blocks(store)) == 5
    store.put(name(5), as_parts(bytes(size)))
    now[0] += 61.0
    assert collector.is_due()  # and not only once all is looked at again
    collector.run()
    store.put(name(6), as_parts(bytes(size)))


def test_a_storage_too_full_for_the_measurement_is_collected_to_the_end(tmp_path: Path) -> None:
    store = StoreWithQuota(tmp_path / "kv")
    fill(LocalStore(tmp_path / "kv"), [3600.0] * 2 * DELETE_BATCH_KEYS, 16)
    store.files_max = DELETE_BATCH_KEYS // 2  # what the first batch leaves is taken at once, by others
    report = collect(store, max_bytes=16 * DELETE_BATCH_KEYS // 4, low=0.5)
    assert not report.gave_up
    assert len(blocks(store)) <= DELETE_BATCH_KEYS // 8
    measured = read_measured(store)
    assert measured is not None
    assert measured.bytes == 16 * len(blocks(store))


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EMLINK])
def test_what_no_removal_mends_removes_nothing(store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A limit of a file's size (``ulimit -f``) below a block's, or of a folder's subfolders."""
    fill(store, [3600.0] * 10)
    now = [0.0]
    collector = Collector(store, CapacityPolicy(max_bytes=1 << 30, poll_s=0.0), monotonic=lambda: now[0])
    write = os.pwritev

    def refuse_blocks(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if sum(buffer.nbytes for buffer in buffers) >= SIZE:
            raise OSError(code, os.strerror(code))
        return write(fd, buffers, offset)

    collector.run()
    monkeypatch.setattr(os, "pwritev", refuse_blocks)
    for _ in range(5):
        now[0] += 61.0
        if collector.is_due():
            collector.run()
    assert len(blocks(store)) == 10


class BucketWithQuota(StoreWithQuota):
    """Cannot note uses, so that nobody can ask for its time."""

    touch: Any = None


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
@pytest.mark.parametrize("store_class", [StoreWithQuota, BucketWithQuota])
def test_a_full_storage_is_not_judged_by_the_hosts_clock(
    tmp_path: Path, store_class: type[StoreWithQuota], ahead_s: float, measured: bool
) -> None:
    """There is no room for a lease, which would tell the storage's time."""
    store = store_class(tmp_path / "kv")
    store.files_max = 1000
    fill(store, [60.0 * (n + 1) for n in range(40)])
    policy = CapacityPolicy(max_bytes=1 << 30, ttl_s=3600.0)
    if measured:
        Collector(store, policy).run()
        Account(store, 1 << 30).take(1, "it lives")
    store.files_max = len(list_keys(store))
    report = run(Collector(store, policy, clock=lambda: time.time() + ahead_s))
    assert report.removed_blobs["ttl"] == 0
    assert 6 <= report.removed_blobs["capacity"] <= 7
    assert blocks(store) == {name(n) for n in range(40 - report.removed_blobs["capacity"])}
    assert len(list_keys(store, USAGE_PREFIX)) == measured


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("store_class", [StoreWithQuota, BucketWithQuota])
def test_a_full_storage_loses_what_is_too_old_where_its_time_can_be_had(
    tmp_path: Path, store_class: type[StoreWithQuota], measured: bool
) -> None:
    store = store_class(tmp_path / "kv")
    store.files_max = 1000
    fill(store, [3600.0 * n + 60.0 for n in range(40)])
    if measured:
        Collector(store, CapacityPolicy(max_bytes=1 << 30)).run()
    store.files_max = len(list_keys(store))
    policy = CapacityPolicy(ttl_s=3600.0 * 30)
    report = run(Collector(store, policy, clock=lambda: time.time() + 5 * 3600.0))
    assert report.removed_blobs["ttl"] == (10 if store_class is StoreWithQuota else 0)
    assert blocks(store) == {name(n) for n in range(40 - sum(report.removed_blobs.values()))}


def test_a_full_storage_of_young_blocks_is_not_listed_all_the_time(tmp_path: Path) -> None:
    store, now = StoreWithQuota(tmp_path / "kv"), [0.0]
    store.files_max = 1000
    fill(store, [0.0] * 4)
    policy = CapacityPolicy(max_bytes=1 << 30, grace_s=1e6)
    collector = Collector(store, policy, monotonic=lambda: now[0])
    collector.run()
    assert not collector.is_due()
    store.files_max = 5
    now[0] += 61.0
    for rest_s in (0.25, 0.5, 1.0):
        assert collector.is_due()
        collector.run()
        now[0] += rest_s / 2
        assert not collector.is_due()
        now[0] += rest_s / 2


@pytest.mark.parametrize("measured", [False, True])
def test_a_storage_too_full_for_any_measurement_is_not_listed_all_the_time(tmp_path: Path, measured: bool) -> None:
    """By other people's files. Nothing can be stored before the root is measured, so it is not long before that."""
    store, now = StoreWithQuota(tmp_path / "kv"), [1000.0]
    collector = Collector(store, CapacityPolicy(max_bytes=1 << 30), monotonic=lambda: now[0])
    if measured:
        store.files_max = 1000
        collector.run()
        now[0] += 600.0
    else:
        LocalStore(store.root_dir).put("theirs", as_parts(b"1"))
    store.files_max = 1
    runs = 0
    for _ in range(4 * 3600):
        now[0] += 0.25
        if collector.is_due():
            collector.run()
            runs += 1
    assert runs <= 60 + 10
    store.files_max = 1000
    now[0] += 60.0
    assert collector.is_due()
    collector.run()
    assert not collector.is_due()


def test_a_root_that_was_emptied_while_it_was_full_of_young_blocks_is_measured_at_once(store: LocalStore) -> None:
    """Nothing can be stored before."""
    now = [1000.0]
    collector = Collector(store, CapacityPolicy(max_bytes=10 * SIZE), monotonic=lambda: now[0])
    fill(store, [0.0] * 10)
    for _ in range(8):
        now[0] += 600.0
        assert collector.is_due()
        collector.run()
    for key in [*blocks(store), MEASURED]:
        store.delete(key)
    now[0] += 1.0
    assert collector.is_due()


def test_of_many_collectors_one_tries_whether_there_is_room(store: LocalStore) -> None:
    now = [0.0]
    counting = FaultyStore(store)
    first, second = (Collector(counting, CapacityPolicy(ttl_s=1e9), monotonic=lambda: now[0]) for _ in range(2))
    first.run()
    puts = counting.calls["put"]
    for _ in range(10):
        now[0] += 61.0
        assert not first.is_due()
        assert not second.is_due()
    assert counting.calls["put"] == puts + 10


# -- the lease ---------------------------------------------------------------------------------------------------------


def lease(store: Store, owner: str, now: list[float]) -> Lease:
    return Lease(store, owner, lease_s=30.0, clock=lambda: now[0])


def test_one_holder_at_a_time_and_the_next_after_it() -> None:
    store, now = MemoryStore(), [0.0]
    first, second = lease(store, "a", now), lease(store, "b", now)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    assert list_keys(store) == []


def test_a_dead_holders_lease_is_taken_over() -> None:
    store, now = MemoryStore(), [0.0]
    assert lease(store, "dead", now).try_acquire()
    second, third = lease(store, "b", now), lease(store, "c", now)
    assert not second.try_acquire()
    assert not third.try_acquire()
    now[0] = 29.0
    assert not second.try_acquire()
    assert second.seconds_to_wait == 1.0
    now[0] = 31.0
    assert second.try_acquire()
    assert not third.try_acquire()
    assert len(list_keys(store)) == 1


@pytest.mark.parametrize("name", ["9" * 255, "9" * 12, "\u0663", "x"])
def test_a_name_that_no_holder_gives_its_lease_is_none(name: str) -> None:
    """One that somebody else puts there would otherwise keep all collectors away, or follow every one of ours."""
    store, now = MemoryStore(), [0.0]
    store.put(f"{LEASE_PREFIX}{name}", as_parts(b"{}"))
    first, second = lease(store, "a", now), lease(store, "b", now)
    assert first.try_acquire()
    assert not second.try_acquire()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"owner":"a","renewals":0}', b"\0" * 512])
def test_a_lease_that_cannot_be_believed_is_none(content: bytes) -> None:
    store = MemoryStore()
    store.put(f"{LEASE_PREFIX}{1:012}", as_parts(content))
    assert lease(store, "b", [0.0]).try_acquire()


def test_a_dead_holders_lease_that_cannot_be_read_is_taken_over() -> None:
    store, now = FaultyStore(MemoryStore()), [0.0]
    dead = lease(store, "dead", now)
    assert dead.try_acquire()
    store.plan = [Fault("get_into", first=2, count=2, error=lambda: StoreUnavailableError("EIO"))]
    second = lease(store, "b", now)
    assert not second.try_acquire()
    now[0] = 31.0
    assert second.try_acquire()


def test_a_living_holder_keeps_it() -> None:
    store, now = MemoryStore(), [0.0]
    first, second = lease(store, "a", now), lease(store, "b", now)
    assert first.try_acquire()
    for _ in range(10):
        now[0] += 15.0
        first.renew()
        assert not second.try_acquire()


def test_of_many_takers_one_wins() -> None:
    store, now = MemoryStore(), [0.0]
    assert lease(store, "dead", now).try_acquire()
    takers = [lease(store, secrets.token_hex(4), now) for _ in range(5)]
    assert [taker.try_acquire() for taker in takers] == [False] * 5
    now[0] = 31.0
    assert sum(taker.try_acquire() for taker in takers) == 1


def test_a_collector_killed_at_work_is_followed_by_another(store: LocalStore) -> None:
    fill(store, [10_000] * 3000, size=1)
    code = (
        "import os, signal, sys\n"
        "from kvtiers.tiers.capacity.collector import Collector\n"
        "from kvtiers.tiers.capacity.policy import CapacityPolicy\n"
        "from kvtiers.tiers.stores.files.local import LocalStore\n"
        "die = lambda names: os.kill(os.getpid(), signal.SIGKILL)\n"
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


def test_a_measurement_that_cannot_be_read_is_replaced() -> None:
    store, now = BadSector(), [0.0]
    policy = CapacityPolicy(max_bytes=10 * SIZE)
    collector = Collector(store, policy, monotonic=lambda: now[0])
    collector.run()
    account = Account(store, 10 * SIZE)
    store.bad = MEASURED
    with pytest.raises(StoreUnavailableError):
        account.take(SIZE, "a")
    with pytest.raises(StoreUnavailableError):  # it may pass
        collector.is_due()
    now[0] += policy.every_s
    assert collector.is_due()
    report = run(collector)
    assert not report.gave_up
    account.take(SIZE, "a")
    assert not collector.is_due()


# -- object storage ----------------------------------------------------------------------------------------------------


def test_s3_is_bounded_and_collected(moto: S3Server, boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtiers.tiers.stores.s3.options import S3Options
    from kvtiers.tiers.stores.s3.store import S3Store

    use_credentials(monkeypatch, moto)
    bucket = "collector-tests"
    boto3.client("s3", endpoint_url=moto.endpoint_url, region_name=moto.region).create_bucket(Bucket=bucket)
    plain = S3Store(S3Options(bucket=bucket, endpoint_url=moto.endpoint_url))
    policy = CapacityPolicy(max_bytes=10 * SIZE, high=0.8, low=0.6, grace_s=-2.0)  # an object's time has whole seconds
    collector = Collector(plain, policy)
    assert collector.is_due()
    assert collector.run() is not None
    assert not collector.is_due()
    bounded = BoundedStore(plain, Account(plain, 10 * SIZE))
    stored = 0
    with pytest.raises(StoreFullError):  # noqa: PT012 - which put it is depends on the records' own bytes
        for number in range(11):
            bounded.put(name(number), as_parts(bytes(SIZE)))
            stored += 1
    assert len(blocks(plain)) == stored
    assert 8 <= len(blocks(plain)) <= 10
    assert collector.is_due()
    report = run(collector)
    assert report.removed_blobs["capacity"] > 0
    assert len(blocks(plain)) <= 6
    assert not list(plain.keys(LEASE_PREFIX))
    plain.close()


def test_fsspec_is_collected(tmp_path: Path) -> None:
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
def test_a_storage_without_times_is_refused(dry_run: bool) -> None:
    store = TimelessStore()
    store.put(name(0), as_parts(bytes(SIZE)))
    with pytest.raises(StoreConfigError, match="when a blob was written"):
        collect(store, dry_run=dry_run, ttl_s=3600)
    assert list_keys(store) == [name(0)]
