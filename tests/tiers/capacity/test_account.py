"""The account that writers of one root share: never more than the bound, whatever they and the collector interleave."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.capacity.account import GRANT_SHARE, Account, BoundedStore
from kvtiers.tiers.capacity.records import OWN_PREFIX, RecordKeys, get_record, put_record
from kvtiers.tiers.capacity.usage import (
    MEASURED,
    USAGE_PREFIX,
    WRITERS_PREFIX,
    Baseline,
    Measured,
    forget_writers,
    held_and_wanted,
    publish_measured,
    read_baseline,
    read_measured,
    used_bytes,
)
from kvtiers.tiers.errors import (
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.store import KeyInfo, Store
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts, list_keys
from kvtiers.tiers.testing.faults import Fault, FaultyStore, run_in_child
from tests.clock import Clock
from tests.waiting import wait_for

WRITER_S = 900.0
SIZES = st.sampled_from([7, 300, 700])


class InterruptedStore(MemoryStore):
    """Runs something else before the n-th call: another process that comes in between."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.calls_left = 0
        self.interruption: Callable[[], object] | None = None

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0 and self.interruption is not None:
            interruption, self.interruption = self.interruption, None
            interruption()

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self._count()
        return super().put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._count()
        super().get_into(key, parts)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        self._count()
        return super().keys(prefix)


def measure(store: Store, now: float, *, at: float = 0.0) -> Baseline:
    """What a collector does, in one go."""
    baseline = read_baseline(store, now=now, writer_s=WRITER_S)
    infos = [info for info in store.keys("") if not info.key.startswith(OWN_PREFIX)]
    measured = Measured(secrets.token_hex(4), sum(i.size for i in infos), len(infos), baseline.base, at)
    if publish_measured(store, measured, baseline.measured_id):
        forget_writers(store, baseline)
    return baseline


def read_blob(store: Store, key: str) -> bytes:
    data = bytearray(store.size(key) or 0)
    store.get_into(key, [memoryview(data)])
    return bytes(data)


def stored_bytes(store: Store) -> int:
    return sum(info.size for info in store.keys("") if not info.key.startswith(OWN_PREFIX))


class Writers(RuleBasedStateMachine):
    """Writers that come, put, die half-way; a collector whose listing takes its time; blobs that are removed."""

    MAX_BYTES = 2000
    CLOCK_STEPS = True
    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = InterruptedStore(self.clock)
        self.count = 0
        self.listing: Iterator[KeyInfo] | None = None
        self.listed = 0
        self.baseline = Baseline()
        measure(self.store, self.clock())

    @rule(target=writers)
    def come(self) -> Account:
        return Account(self.store, self.MAX_BYTES, writer_s=WRITER_S, clock=self.clock)

    @rule(writer=writers, size=SIZES)
    def put(self, writer: Account, size: int) -> None:
        self.count += 1
        try:
            BoundedStore(self.store, writer).put(f"b{self.count}", as_parts(bytes(size)))
        except StoreFullError:
            pass

    @rule(writer=writers, other=writers, size=SIZES, calls=st.integers(0, 12))
    def put_while_another_puts(self, writer: Account, other: Account, size: int, calls: int) -> None:
        if writer is not other:
            self.store.calls_left, self.store.interruption = calls, lambda: self.put(other, size)
        self.put(writer, size)
        self.store.interruption = None

    @rule(writer=writers, size=SIZES, calls=st.integers(0, 12))
    def put_while_it_is_measured(self, writer: Account, size: int, calls: int) -> None:
        self.store.calls_left, self.store.interruption = calls, lambda: measure(self.store, self.clock())
        self.put(writer, size)
        self.store.interruption = None

    @rule(writer=consumes(writers), size=SIZES, landed=st.booleans())
    def die_while_putting(self, writer: Account, size: int, landed: bool) -> None:
        self.count += 1
        try:
            writer.take(size, "b")
        except StoreFullError:
            return
        if landed:
            self.store.put(f"b{self.count}", as_parts(bytes(size)))

    @rule(writers=st.lists(writers, min_size=1, max_size=3, unique=True), size=SIZES, calls=st.integers(0, 12))
    def puts_of_what_is_there_while_it_is_measured(self, writers: list[Account], size: int, calls: int) -> None:
        self.store.calls_left, self.store.interruption = calls, lambda: measure(self.store, self.clock())
        taken: list[tuple[Account, str]] = []
        for writer in writers * 2:
            try:
                taken.append((writer, writer.take(size, "there")))
            except StoreFullError:
                pass
        for writer, ticket in taken:
            writer.settle(ticket, 0)
            writer.give_back(ticket, size)
        self.store.interruption = None
        for writer in writers:  # who has room left when the storage's clock is stepped does not ask before it is used
            self.put(writer, self.MAX_BYTES // GRANT_SHARE)

    @rule(number=st.integers(0, 10))
    def a_put_that_fails(self, number: int) -> None:
        writer = Account(self.store, self.MAX_BYTES, writer_s=WRITER_S, clock=self.clock)
        lost = FaultyStore(self.store, [Fault("put", error=lambda: StoreUnavailableError("lost"), error_after=True)])
        try:
            BoundedStore(lost, writer).put(f"lost{number}", as_parts(bytes(300)))
        except (StoreFullError, StoreUnavailableError):
            pass

    @rule(seconds=st.sampled_from([1.0, 100.0, 400.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(step_s=st.sampled_from([0.0, 0.0, 1000.0, -1000.0]))
    def begin_to_measure(self, step_s: float) -> None:
        """After a step of the storage's clock the living look dead."""
        step_s *= self.CLOCK_STEPS
        self.baseline = read_baseline(self.store, now=self.clock() + step_s, writer_s=WRITER_S)
        self.listing = iter(list(self.store.keys()))
        self.listed = 0

    @rule(count=st.integers(1, 20))
    def go_on_measuring(self, count: int) -> None:
        for _ in range(count):
            info = next(self.listing, None) if self.listing is not None else None
            if info is None:
                return
            if not info.key.startswith(OWN_PREFIX) and self.store.size(info.key) is not None:
                self.listed += info.size

    @rule()
    def end_to_measure(self) -> None:
        if self.listing is None:
            return
        self.go_on_measuring(10_000)
        self.listing = None
        measured = Measured(secrets.token_hex(4), self.listed, 0, self.baseline.base, 0.0)
        if publish_measured(self.store, measured, self.baseline.measured_id):
            forget_writers(self.store, self.baseline)

    @rule(position=st.integers(0, 50))
    def remove(self, position: int) -> None:
        """The collector removes a block between two listings, and says so."""
        blobs = [info for info in self.store.keys("") if not info.key.startswith(OWN_PREFIX)]
        measured = read_measured(self.store)
        if self.listing is None and blobs and measured is not None:
            info = blobs[position % len(blobs)]
            measure(self.store, self.clock())
            measured = read_measured(self.store)
            assert measured is not None
            self.store.delete(info.key)
            publish_measured(
                self.store,
                Measured(measured.id, measured.bytes - info.size, measured.blobs - 1, measured.base, measured.at),
                measured.id,
            )

    @invariant()
    def within_the_bound(self) -> None:
        stored = stored_bytes(self.store)
        assert stored <= self.MAX_BYTES
        used = used_bytes(self.store)
        assert used is not None
        assert used >= stored


class WritersOfSmallBlobs(Writers):
    """A grant holds several blobs, so more is asked for before it is used up.

    Without steps of the storage's clock: who has room left then does not ask before it is used.
    """

    CLOCK_STEPS = False

    @rule(writer=Writers.writers, count=st.integers(1, 8))
    def put_small(self, writer: Account, count: int) -> None:
        for _ in range(count):
            self.put(writer, 1)

    @rule(writer=Writers.writers, other=Writers.writers, size=SIZES, calls=st.integers(0, 12))
    def put_small_while_another_puts(self, writer: Account, other: Account, size: int, calls: int) -> None:
        if writer is not other:
            self.store.calls_left, self.store.interruption = calls, lambda: self.put(other, size)
        self.put_small(writer, 4)
        self.store.interruption = None

    @rule(writer=Writers.writers, calls=st.integers(0, 12))
    def put_small_while_it_is_measured(self, writer: Account, calls: int) -> None:
        self.store.calls_left, self.store.interruption = calls, lambda: measure(self.store, self.clock())
        self.put_small(writer, 4)
        self.store.interruption = None


@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize("machine", [Writers, WritersOfSmallBlobs])
def test_writers(machine: type[Writers], examples: int) -> None:
    limits = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=limits)


def make(max_bytes: int = 1000, **options: Any) -> tuple[MemoryStore, BoundedStore, Clock]:
    clock = Clock()
    store = MemoryStore(clock=clock)
    return store, BoundedStore(store, Account(store, max_bytes, clock=clock, **options)), clock


def test_nothing_is_stored_before_somebody_has_measured() -> None:
    store, bounded, clock = make()
    with pytest.raises(StoreFullError, match="max_bytes = 1000"):
        bounded.put("a", as_parts(b"1"))
    measure(store, clock())
    clock.now += 1
    bounded.put("a", as_parts(b"1"))
    assert stored_bytes(store) == 1


def test_the_bound_holds_over_a_store_that_does_not_say_whether_it_published(monkeypatch: pytest.MonkeyPatch) -> None:
    store, bounded, clock = make()
    measure(store, clock())
    put = store.put
    monkeypatch.setattr(
        store, "put", lambda key, parts, *, overwrite=False: put(key, parts, overwrite=overwrite) and None
    )
    for n in range(10):
        bounded.put(f"b{n}", as_parts(bytes(100)))
    with pytest.raises(StoreFullError):
        bounded.put("b10", as_parts(b"1"))


def test_the_bound_is_reached_and_not_passed() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    for n in range(10):
        bounded.put(f"b{n}", as_parts(bytes(100)))
    with pytest.raises(StoreFullError):
        bounded.put("b10", as_parts(b"1"))
    assert stored_bytes(store) == 1000
    # Room that the collector made can be used.
    store.delete("b0")
    measure(store, clock())
    clock.now += 1
    bounded.put("b10", as_parts(bytes(100)))


def test_a_full_root_is_not_asked_for_every_block() -> None:
    clock = Clock()
    store = FaultyStore(MemoryStore(clock=clock))
    bounded = BoundedStore(store, Account(store, 1000, clock=clock))
    measure(store, clock())
    for _ in range(100):
        with pytest.raises(StoreFullError):
            bounded.put("b", as_parts(bytes(2000)))
    assert store.calls["put"] < 10


def test_a_put_that_stored_nothing_gives_its_room_back() -> None:
    clock = Clock()
    memory = MemoryStore(clock=clock)
    store = FaultyStore(memory, [])
    bounded = BoundedStore(store, Account(memory, 1000, clock=clock))
    measure(memory, clock())
    store.plan = [Fault("put", count=50, error=lambda: StorePermissionError("no"))]
    for _ in range(50):
        with pytest.raises(StorePermissionError):
            bounded.put("b", as_parts(bytes(100)))
    bounded.put("b", as_parts(bytes(1000)))


def test_what_comes_back_beyond_a_grant_is_for_all() -> None:
    store, _, clock = make()
    measure(store, clock())
    account = Account(store, 100_000, clock=clock)
    batches = [account.take(10_000, "batch") for _ in range(8)]
    for batch in batches[:-1]:
        account.give_back(batch, 10_000)
        assert used_bytes(store) == 80_000  # whoever is busy would take it again
    account.settle(batches[-1], 1000)
    account.give_back(batches[-1], 9000)
    grant = 100_000 // GRANT_SHARE
    assert used_bytes(store) == 1000 + grant
    assert held_and_wanted(store) == (grant, 0)
    account.take(grant, "it has that still")
    assert used_bytes(store) == 1000 + grant


def test_room_that_cannot_be_published_as_free_is_no_error() -> None:
    clock = Clock()
    store = FaultyStore(MemoryStore(clock=clock))
    measure(store, clock())
    account = Account(store, 100_000, clock=clock)
    batch = account.take(10_000, "batch")
    store.plan = [Fault("put", count=None, error=lambda: StoreUnavailableError("lost"))]
    account.give_back(batch, 10_000)
    store.plan = []
    assert used_bytes(store) == 10_000
    account.take(1000, "b")
    assert used_bytes(store) == 1000


def test_a_dead_writers_room_comes_back() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    Account(store, 1000, clock=clock).take(900, "never put")
    with pytest.raises(StoreFullError):
        bounded.put("b", as_parts(bytes(200)))
    clock.now += WRITER_S + 1
    assert len(measure(store, clock()).dead) == 2  # this one too: it has not been heard of
    bounded.put("b", as_parts(bytes(200)))
    assert used_bytes(store) == 200


def test_a_dead_writers_room_comes_back_where_its_clock_was_ahead() -> None:
    store, bounded, clock = make()
    clock.now += 30 * 86_400
    measure(store, clock())
    Account(store, 1000, clock=clock).take(900, "never put")
    clock.now -= 30 * 86_400
    living = Account(store, 1000, clock=clock)
    living.take(50, "it is at work")
    assert len(measure(store, clock()).dead) == 1
    bounded.put("b", as_parts(bytes(200)))


def test_a_living_writer_that_was_taken_for_dead_goes_on_and_is_seen() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(bytes(300)))
    measure(store, clock() + WRITER_S + 1)  # the storage's clock was stepped
    assert list_keys(store) == [MEASURED, "a"]
    clock.now += WRITER_S / 3
    bounded.put("b", as_parts(bytes(300)))
    assert used_bytes(store) == 600
    assert len(list_keys(store, USAGE_PREFIX)) == 1
    other = BoundedStore(store, Account(store, 1000, clock=clock))
    with pytest.raises(StoreFullError):
        other.put("c", as_parts(bytes(500)))
    measure(store, clock())
    bounded.put("d", as_parts(bytes(100)))


def sleep_as_a_machine(seconds: int) -> None:
    """This process finds that the machine has slept. Takes root, and that it has no other threads.

    Raises:
        OSError: there are no time namespaces to be had.
    """
    time_namespace = 0x80
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(time_namespace):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"boottime {seconds} 0\n")
    with Path("/proc/self/ns/time_for_children").open() as f:
        if libc.setns(f.fileno(), time_namespace):
            raise OSError(ctypes.get_errno(), "setns")


def test_a_writer_whose_machine_slept_is_a_new_one() -> None:
    """It was taken for dead meanwhile, and what was left of its grant counts for nobody."""
    store = MemoryStore()
    measure(store, time.time())
    bounded = BoundedStore(store, Account(store, 1 << 20, writer_s=WRITER_S))
    no_namespaces = 77

    def use() -> None:
        bounded.put("a", as_parts(b"1"))
        try:
            sleep_as_a_machine(int(WRITER_S))
        except OSError:
            os._exit(no_namespaces)
        measure(store, time.time() + 2 * WRITER_S)
        bounded.put("b", as_parts(bytes(1000)))
        used = used_bytes(store)
        assert used is not None
        assert used >= stored_bytes(store)

    status = run_in_child(use)
    if status == no_namespaces:
        pytest.skip("takes root and time namespaces")
    assert status == 0


def test_what_the_seeming_dead_reserve_during_a_measurement_stays_counted() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(bytes(300)))
    baseline = read_baseline(store, now=clock() + WRITER_S + 1, writer_s=WRITER_S)
    assert len(baseline.dead) == 1
    bounded.put("b", as_parts(bytes(300)))  # the listing has passed
    assert publish_measured(store, Measured("m", 300, 1, baseline.base, 0.0), baseline.measured_id)
    forget_writers(store, baseline)
    assert used_bytes(store) == 600


def test_record_misread_before_its_removal_stays() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(bytes(300)))
    baseline = read_baseline(store, now=clock() + WRITER_S + 1, writer_s=WRITER_S)
    (usage,) = list_keys(store, USAGE_PREFIX)
    record = read_blob(store, usage)
    store.put(usage, as_parts(bytes(len(record))), overwrite=True)
    assert publish_measured(store, Measured("m", 300, 1, baseline.base, 0.0), baseline.measured_id)
    forget_writers(store, baseline)
    assert list_keys(store, USAGE_PREFIX) == [usage]
    store.put(usage, as_parts(record), overwrite=True)
    assert used_bytes(store) == 300


def test_records_of_the_dead_are_removed() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("b", as_parts(bytes(200)))
    clock.now += WRITER_S + 1
    measure(store, clock())
    assert list_keys(store) == [MEASURED, "b"]
    assert used_bytes(store) == 200


@pytest.mark.parametrize("heals", [True, False])
def test_a_damaged_record_stops_stores_until_its_writer_publishes_or_is_dead(heals: bool) -> None:
    """It may have reserved anything, and it may go on with what it has."""
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(b"1"))
    (usage,) = list_keys(store, USAGE_PREFIX)
    store.put(usage, as_parts(b"\0" * 512), overwrite=True)
    other = BoundedStore(store, Account(store, 1000, clock=clock))
    assert used_bytes(store) is None
    measure(store, clock())
    with pytest.raises(StoreFullError, match="not measured"):
        other.put("b", as_parts(bytes(10)))
    if heals:
        bounded.put("c", as_parts(bytes(900)))
        assert used_bytes(store) == 902  # what it had stored before is counted twice until the next measurement
    else:
        clock.now += WRITER_S + 1
        assert len(measure(store, clock()).dead) == 2
        other.put("b", as_parts(bytes(900)))
        assert used_bytes(store) == 901


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_writer_whose_record_cannot_be_read_has_no_known_base(is_dead: bool) -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(b"1"))
    (usage,) = list_keys(store, USAGE_PREFIX)
    store.put(usage, as_parts(bytes(512)), overwrite=True)
    writer = usage.removeprefix(USAGE_PREFIX)
    clock.now += is_dead * (WRITER_S + 1)
    baseline = read_baseline(store, now=clock(), writer_s=WRITER_S)
    assert (writer in baseline.dead) == is_dead
    assert baseline.base == ({writer: None} if is_dead else {})


def test_no_flipped_bit_of_a_record_takes_a_root_beyond_its_bound() -> None:
    clock = Clock()
    for kind in (MEASURED, USAGE_PREFIX, WRITERS_PREFIX):
        store = MemoryStore(clock=clock)
        measure(store, clock())
        first, second = (BoundedStore(store, Account(store, 4000, clock=clock)) for _ in range(2))
        first.put("a", as_parts(bytes(500)))
        second.put("b", as_parts(bytes(400)))
        measure(store, clock())
        first.put("c", as_parts(bytes(400)))
        used = used_bytes(store)
        (key, *_) = list_keys(store, kind)
        good = read_blob(store, key)
        for bit in range(8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            store.put(key, as_parts(bytes(bad)), overwrite=True)
            assert get_record(store, key) == {}
            assert used_bytes(store) == (used if kind == WRITERS_PREFIX else None)
        store.put(key, as_parts(good), overwrite=True)
        assert used_bytes(store) == used


def test_a_record_under_another_ones_name_is_none() -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(bytes(900)))
    (usage,) = list_keys(store, USAGE_PREFIX)
    Account(store, 1000, clock=clock).take(10, "b")
    (other,) = set(list_keys(store, USAGE_PREFIX)) - {usage}
    store.put(usage, as_parts(read_blob(store, other)), overwrite=True)
    assert get_record(store, usage) == {}
    assert used_bytes(store) is None


RING = KeyRing(b"k" * 32)
KEYS, OTHER_KEYS = RecordKeys.of(RING), RecordKeys.of(KeyRing(b"x" * 32))


@pytest.mark.parametrize("keys", [None, OTHER_KEYS])
@pytest.mark.parametrize("size", [-(10**9), -1, 0, 1])
def test_a_measurement_without_the_key_is_none(size: int, keys: RecordKeys | None) -> None:
    store = MemoryStore()
    put_record(store, MEASURED, {"id": "a", "bytes": size, "blobs": 0, "base": {}, "at": 0}, keys=keys)
    assert read_measured(store, keys=KEYS) is None
    with pytest.raises(StoreFullError, match="not measured"):
        Account(store, 1000, keys=KEYS).take(1, "b")


def test_writers_and_collector_with_one_of_the_keys_share_an_account() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    new_ring = RecordKeys.of(KeyRing(b"n" * 32, b"k" * 32))
    baseline = read_baseline(store, now=clock(), writer_s=WRITER_S, keys=KEYS)
    assert publish_measured(store, Measured("m", 0, 0, baseline.base, 0.0), None, keys=KEYS)
    for keys in (new_ring, RecordKeys.from_json(new_ring.to_json())):
        Account(store, 1000, clock=clock, keys=keys).take(400, "b")
    assert used_bytes(store, keys=new_ring) == 800
    assert used_bytes(store) == 800  # a tool without keys compares the checksums
    assert used_bytes(store, keys=KEYS) is None  # it does not know the new key


def test_a_writers_record_without_the_key_is_not_believed() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    assert publish_measured(store, Measured("m", 0, 0, {}, 0.0), None, keys=KEYS)
    account = Account(store, 1000, clock=clock, keys=KEYS)
    account.take(900, "b")
    put_record(store, USAGE_PREFIX + account._writer, {"reserved": 0, "settled": 0, "wanted": 0})
    assert used_bytes(store, keys=KEYS) is None


@pytest.mark.parametrize(
    "usage",
    [
        {"reserved": -1, "settled": -1, "wanted": 0},
        {"reserved": 10, "settled": 11, "wanted": 0},
        {"reserved": 10, "settled": -5, "wanted": 0},
        {"reserved": 10, "settled": 0, "wanted": -1},
        {"reserved": 10.0, "settled": 0, "wanted": 0},
        {"reserved": True, "settled": 0, "wanted": 0},
        {"reserved": 10**400, "settled": 0, "wanted": 10**400},
        {"reserved": 10},
    ],
)
def test_a_record_that_no_writer_can_have_is_none(usage: dict[str, object]) -> None:
    store, bounded, clock = make()
    measure(store, clock())
    bounded.put("a", as_parts(b"1"))
    (key,) = list_keys(store, USAGE_PREFIX)
    put_record(store, key, usage)
    assert used_bytes(store) is None
    assert held_and_wanted(store) == (0, 0)


def test_a_measurement_without_a_checksum_is_not_believed() -> None:
    store, bounded, clock = make()
    store.put(MEASURED, as_parts(b'{"id":"a","bytes":-99999,"blobs":0,"base":{},"at":0}'.ljust(512)))
    with pytest.raises(StoreFullError, match="not measured"):
        bounded.put("a", as_parts(b"1"))
    measure(store, clock())
    clock.now += 1
    bounded.put("a", as_parts(bytes(1000)))
    assert used_bytes(store) == 1000


def test_record_keys_show_themselves_nowhere() -> None:
    assert "kkkk" not in repr(KEYS)
    assert (b"k" * 32).hex() not in json.dumps(KEYS.to_json())  # what a root's records are signed with opens no block


class BadSectors(MemoryStore):
    """Cannot read nor remove some records."""

    bad: frozenset[str] = frozenset()

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._check(key)
        super().get_into(key, parts)

    def delete(self, key: str) -> None:
        self._check(key)
        super().delete(key)

    def _check(self, key: str) -> None:
        if key in self.bad:
            raise StoreUnavailableError("Input/output error (EIO)", key=key)


def test_a_dead_writers_record_that_cannot_be_read_stops_nothing_for_long() -> None:
    clock = Clock()
    store = BadSectors(clock=clock)
    measure(store, clock())
    dead, living = (BoundedStore(store, Account(store, 1000, clock=clock)) for _ in range(2))
    dead.put("a", as_parts(b"1"))
    store.bad = frozenset(list_keys(store, USAGE_PREFIX))
    assert used_bytes(store) is None  # it may be anything
    assert measure(store, clock()).dead == []
    assert used_bytes(store) is None
    clock.now += WRITER_S + 1
    assert len(measure(store, clock()).dead) == 1
    assert used_bytes(store) == 1
    living.put("b", as_parts(bytes(900)))
    assert used_bytes(store) == 901


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"id": 1}', b"\xff" * 700, b"[" * 100_000])
def test_an_unreadable_measurement_is_none(garbage: bytes) -> None:
    store, _, _ = make()
    store.put(MEASURED, as_parts(garbage))
    assert read_measured(store) is None
    assert used_bytes(store) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 1},
        {"bytes": "1"},
        {"blobs": None},
        {"base": []},
        {"base": {"w": "1"}},
        {"at": "x"},
        {"at": float("nan")},
        {"at": 10**400},
        {"bytes": 10**400},
        {"blobs": -(10**400)},
        {"base": {"w": 10**400}},
        {"bytes": -1},
        {"bytes": True},
        {"bytes": 1.0},
        {"blobs": -1},
        {"base": {"w": -1}},
        {"base": {"w": 1.5}},
    ],
)
def test_a_measurement_of_wrong_types_is_none_and_the_next_one_counts(wrong: dict[str, object]) -> None:
    store, bounded, clock = make()
    good = {"id": "a", "bytes": 1, "blobs": 1, "base": {"w": 1, "dead": None}, "at": 0}
    put_record(store, MEASURED, good)
    assert read_measured(store) == Measured(**good)  # type: ignore[arg-type]
    put_record(store, MEASURED, {**good, **wrong})
    assert read_measured(store) is None
    with pytest.raises(StoreFullError, match="not measured yet"):
        bounded.put("a", as_parts(b"1"))
    measure(store, clock())
    clock.now += 1
    bounded.put("a", as_parts(b"1"))


def test_a_newcomer_on_a_storage_with_cached_names_waits() -> None:
    store, bounded, clock = make(newcomer_s=60.0)
    measure(store, clock())
    clock.now += 61  # it has no name yet that others could see
    with pytest.raises(StoreFullError, match="other hosts may not see"):
        bounded.put("a", as_parts(b"1"))
    with pytest.raises(StoreFullError, match="other hosts may not see"):
        bounded.put("a", as_parts(b"1"))
    clock.now += 61
    bounded.put("a", as_parts(b"1"))


@pytest.mark.parametrize("pause_s", [10.0, 400.0, 590.0])
def test_a_writer_is_no_newcomer_again_while_it_puts(pause_s: float) -> None:
    store, bounded, clock = make(1_000_000, newcomer_s=60.0)
    measure(store, clock())
    with pytest.raises(StoreFullError):
        bounded.put("a", as_parts(b"1"))
    clock.now += 61
    for n in range(100):
        bounded.put(f"b{n}", as_parts(bytes(10)))  # of a grant of 3,906 bytes
        clock.now += pause_s
        if n % 10 == 0:
            assert not measure(store, clock()).dead


def test_a_writer_that_was_silent_for_long_is_a_newcomer() -> None:
    store, bounded, clock = make(newcomer_s=60.0)
    measure(store, clock())
    with pytest.raises(StoreFullError):
        bounded.put("a", as_parts(b"1"))
    clock.now += 61
    bounded.put("a", as_parts(b"1"))
    clock.now += WRITER_S - 100  # it may be taken for dead at any moment
    with pytest.raises(StoreFullError, match="other hosts may not see"):
        bounded.put("b", as_parts(b"1"))


class WatchedLock:
    """Counts who wanted it."""

    def __init__(self) -> None:
        self.wanted = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.wanted += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_who_waits_while_the_storage_does_not_answer_fails_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(MemoryStore())
    measure(store, 0.0)
    account = Account(store, 100_000)
    answer = threading.Event()
    store.plan = [Fault("put", hang=answer, error=lambda: StoreTimeoutError("no answer"), count=None)]
    asked = store.calls["put"]
    errors: list[StoreError] = []

    def take() -> None:
        try:
            account.take(1000, "b")
        except StoreError as e:
            errors.append(e)

    lock = WatchedLock()
    monkeypatch.setattr(account, "_records", lock)
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: lock.wanted == 4)
    answer.set()
    for thread in threads:
        thread.join()
    assert store.calls["put"] == asked + 1
    assert sorted(type(error).__name__ for error in errors) == ["StoreTimeoutError"] + 3 * ["StoreUnavailableError"]
    assert all("no answer" in str(error) for error in errors)
    store.plan = []
    account.take(1000, "b")


class FarStore(MemoryStore):
    """Answers no read of a writer's record before several are asked for at once, unless told to."""

    capabilities = replace(MemoryStore.capabilities, latency_bound=True)

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.meet: threading.Barrier | None = None
        self._at_once = at_once

    def hold(self) -> None:
        self.meet = threading.Barrier(self._at_once)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if self.meet is not None and key.startswith(USAGE_PREFIX):
            self.meet.wait(60)
        super().get_into(key, parts)


def test_the_records_of_other_writers_are_read_at_once_from_a_far_storage() -> None:
    store = FarStore(at_once=4)
    publish_measured(store, Measured("m", 0, 0, {}, 0.0), None)
    others = [Account(store, 10_000) for _ in range(4)]
    for size, other in enumerate(others, 1):
        other.take(size, "k")
    store.hold()
    assert used_bytes(store) == sum(max(size, 10_000 // GRANT_SHARE) for size in range(1, 5))


def test_puts_go_on_while_more_room_is_asked_for() -> None:
    store = FaultyStore(MemoryStore())
    measure(store, 0.0)
    account = Account(store, 1000 * GRANT_SHARE)
    for _ in range(5):
        account.take(100, "under way")
    answer = threading.Event()
    store.plan = [Fault("put", hang=answer, count=None)]
    asked = store.calls["put"]
    ending = threading.Thread(target=account.settle, args=(account.take(100, "b"), 100))
    ending.start()
    wait_for(lambda: store.calls["put"] > asked)
    for _ in range(4):
        account.settle(account.take(100, "b"), 100)
    late = threading.Thread(target=account.take, args=(100, "beyond the grant"))
    late.start()
    assert ending.is_alive()
    answer.set()
    ending.join()
    late.join()
    assert used_bytes(store) == 1600  # what was left when it was asked, 400, was filled up to 1000
    assert store.calls["put"] == asked + 1


def test_a_grant_is_filled_up_before_it_is_used_up() -> None:
    store, _, clock = make()
    measure(store, clock())
    account = Account(store, 1000 * GRANT_SHARE, clock=clock)
    for n in range(100):
        taken = account.take(100, "b")
        assert used_bytes(store) == max(1000, (n // 6 * 6 + 10) * 100)
        account.settle(taken, 100)
    assert held_and_wanted(store)[0] <= 1000


def test_blobs_of_which_a_grant_holds_few_are_reserved_one_by_one() -> None:
    store, _, clock = make()
    measure(store, clock())
    account = Account(store, 1000 * GRANT_SHARE, clock=clock)
    for n in range(10):
        account.settle(account.take(1500, "b"), 1500)
        assert used_bytes(store) == 1500 * (n + 1)
        account.give_back(account.take(1500, "there already"), 1500)
        assert held_and_wanted(store)[0] <= 1500


def test_what_is_refused_ahead_is_nothing_that_others_must_make_room_for() -> None:
    store, _, clock = make()
    measure(store, clock())
    first, second = (Account(store, 1000 * GRANT_SHARE, clock=clock) for _ in range(2))
    second.take(254_500, "nearly all")
    taken = [first.take(100, "b") for _ in range(6)]
    for each in taken:
        first.settle(each, 100)
    assert used_bytes(store) == 255_500
    assert held_and_wanted(store) == (255_400, 0)  # settled when it was refused: the first
    for _ in range(4):
        first.settle(first.take(100, "b"), 100)  # what it has is still good
    assert first.take(500, "the last room")
    with pytest.raises(StoreFullError):
        first.take(100, "b")


def test_a_record_is_renewed_before_a_put_has_to_wait_for_that() -> None:
    clock = Clock()
    store = FaultyStore(MemoryStore(clock=clock))
    measure(store, clock())
    account = Account(store, 1000 * GRANT_SHARE, writer_s=WRITER_S, clock=clock)
    account.settle(account.take(1, "b"), 1)
    for _ in range(20):
        clock.now += WRITER_S / 10
        asked = store.calls["put"]
        taken = account.take(1, "b")
        assert store.calls["put"] == asked
        account.settle(taken, 1)
        assert store.calls["put"] == asked + 1
    assert not read_baseline(store, now=clock(), writer_s=WRITER_S).dead


def test_a_put_that_ended_is_no_failure_where_more_cannot_be_asked_for() -> None:
    store = FaultyStore(MemoryStore())
    measure(store, 0.0)
    account = Account(store, 1000 * GRANT_SHARE)
    taken = account.take(600, "b")
    store.plan = [Fault("put", count=None, error=lambda: StoreUnavailableError("lost"))]
    for _ in range(3):
        account.settle(taken, 200)
    account.take(400, "what is left of the grant")
    with pytest.raises(StoreUnavailableError, match="lost"):
        account.take(1, "b")


def test_threads_together_keep_the_bound() -> None:
    store = MemoryStore()
    measure(store, 0.0)
    bounded = BoundedStore(store, Account(store, 100_000))
    refused = []

    def put(thread: int) -> None:
        for n in range(400):
            try:
                bounded.put(f"b{thread}-{n}", as_parts(bytes(90)))
            except StoreFullError:
                refused.append(n)

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = used_bytes(store)
    assert used is not None
    assert 99_000 < stored_bytes(store) <= used <= 100_000
    assert len(refused) == 1600 - stored_bytes(store) // 90


def test_room_that_comes_back_while_more_is_asked_for_stays_reserved() -> None:
    """A batch finds its blocks stored already, so that more than a grant is there when the grant is to be filled up."""
    memory = MemoryStore()
    store = FaultyStore(memory)
    measure(store, 0.0)
    account = Account(store, 1000 * GRANT_SHARE)
    batch = account.take(3000, "batch")
    taken = [account.take(size, "b") for size in (200, 400)]
    is_named, is_measured = threading.Event(), threading.Event()
    store.plan = [Fault("size", hang=is_named, count=None), Fault("get_into", hang=is_measured, count=None)]
    asked = store.calls.copy()
    ending = threading.Thread(target=account.settle, args=(taken[0], 200))
    ending.start()
    wait_for(lambda: store.calls["size"] > asked["size"])
    account.give_back(batch, 3000)
    is_named.set()
    wait_for(lambda: store.calls["get_into"] > asked["get_into"] or not ending.is_alive())
    account.take(3400, "all that is there")
    try:
        assert used_bytes(memory) == 4000
    finally:
        is_measured.set()
        ending.join()
