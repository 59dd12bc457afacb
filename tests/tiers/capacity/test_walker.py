"""What a walk removes, and how much a collector counts as stored, for random roots and random orders of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.capacity.ages import AGE_S_MIN, AgeHistogram
from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import OWN_PREFIX, RECORD_BYTES
from kvtiers.tiers.capacity.usage import read_usage
from kvtiers.tiers.capacity.walker import (
    PAGE_KEYS,
    SAMPLE_BLOBS_MAX,
    CollectReport,
    Walker,
    Wanted,
    is_block,
)
from kvtiers.tiers.capacity.written import Writer
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts
from tests.identity import FakeSpec, block_key

MAPPER = FileMapper.from_offloading_spec("", FakeSpec())
LIMIT = 10_000
FAST = settings(deadline=None)


def name(number: int) -> str:
    return MAPPER.relative_name(block_key(number))


class AgedStore(MemoryStore):
    """Blobs without bytes, of given sizes and times."""

    def __init__(self, infos: list[KeyInfo]) -> None:
        super().__init__()
        self.infos = {info.key: info for info in infos}
        self.listed = 0

    def keys(self, prefix: str = "") -> Any:
        for info in list(self.infos.values()):
            if info.key.startswith(prefix) and info.key in self.infos:
                self.listed += 1
                yield info

    def delete(self, key: str) -> None:
        self.infos.pop(key, None)


# -- how much ----------------------------------------------------------------------------------------------------------


@FAST
@given(st.integers(1, LIMIT), st.integers(0, LIMIT), st.floats(0, 1e6), st.floats(0.01, 60))
def test_capacity_marks_leave_head_room_for_three_polls_of_puts(
    limit: int, block: int, rate: float, poll_s: float
) -> None:
    marks = CapacityPolicy(max_bytes=limit, block_bytes=block, poll_s=poll_s).marks(rate)
    assert marks is not None
    assert 0 <= marks.evict_bytes <= marks.full_bytes <= limit
    head_room = limit - marks.full_bytes
    assert head_room <= limit / 4
    assert head_room >= min(limit / 4, max(limit / 100, block, 3 * poll_s * rate)) - 1
    assert CapacityPolicy().marks(rate) is None


# -- which -------------------------------------------------------------------------------------------------------------


@FAST
@given(st.lists(st.tuples(st.floats(-10, 4e8), st.integers(1, 1000)), min_size=1, max_size=50), st.floats(0, 1))
def test_histogram_share_exceeds_the_wanted_share_by_one_bucket_at_most(
    blobs: list[tuple[float, int]], share: float
) -> None:
    histogram = AgeHistogram()
    for age_s, size in blobs:
        histogram.add(age_s, size)
    wanted = share * sum(size for _, size in blobs)
    edge_s = histogram.age_of_oldest(share)
    taken = sum(size for age_s, size in blobs if age_s >= edge_s)
    beyond = sum(size for age_s, size in blobs if age_s >= edge_s * 1.0114)
    if wanted > 0 and any(age_s >= AGE_S_MIN for age_s, _ in blobs):
        assert beyond <= wanted or beyond == 0
        assert taken >= min(wanted, sum(size for age_s, size in blobs if age_s >= AGE_S_MIN)) * 0.999
    elif wanted <= 0:
        assert taken == 0


NAMES = st.one_of(
    st.integers(0, 10_000).map(name),
    st.from_regex(r"[a-z0-9_]{1,12}(/[a-z0-9_.]{1,8}){0,3}", fullmatch=True),
    st.integers(0, 9).map(lambda n: f"{OWN_PREFIX}writers/{n}"),
    st.integers(0, 99).map(lambda n: f"below/{name(n)}"),
    st.integers(0, 99).map(lambda n: name(n).replace(".bin", ".tmp")),
)


@FAST
@given(
    st.dictionaries(NAMES, st.tuples(st.integers(0, 500), st.floats(-1e5, 1e6)), max_size=40),
    st.integers(0, LIMIT),
    st.floats(0, 1),
    st.sampled_from([float("inf"), 1e5, 10.0]),
    st.integers(1, 50),
)
def test_walk_removes_only_blocks_and_no_more_than_the_wanted_bytes(
    blobs: dict[str, tuple[int, float]], excess: int, share: float, ttl_s: float, keys_max: int
) -> None:
    now = 1e9
    store = AgedStore([KeyInfo(key, size, now - age_s) for key, (size, age_s) in blobs.items()])
    told: list[str] = []
    walker = Walker(store, grace_s=1.0, monotonic=lambda: 0.0, on_removed=lambda names, _: told.extend(names))
    before = dict(store.infos)
    for _ in range(3):
        report = CollectReport()
        left = excess
        while True:
            part = CollectReport()
            is_end = walker.step(Wanted(ttl_s, left, share), part, now=now, keys_max=keys_max)
            left -= part.removed_bytes["capacity"]
            for reason in ("ttl", "capacity"):
                report.removed_bytes[reason] += part.removed_bytes[reason]
                report.removed_blobs[reason] += part.removed_blobs[reason]
            if is_end:
                break
        gone = before.keys() - store.infos.keys()
        assert all(is_block(key) for key in gone)
        assert all(abs(before[key].mtime - now) >= 1.0 for key in gone)
        largest = max((info.size for info in before.values()), default=0)
        assert report.removed_bytes["capacity"] < excess + largest or excess == report.removed_bytes["capacity"] == 0
        last = walker.last
        assert last is not None
        counted = list(store.infos.values())
        assert last.bytes + last.young_bytes == sum(info.size for info in counted)
        assert last.blobs == len(counted) + sum(report.removed_blobs.values())
        kept_old = [info for info in counted if is_block(info.key) and abs(now - info.mtime) >= max(ttl_s, 1.0)]
        assert not kept_old
        before = dict(store.infos)
    assert len(told) == len(set(told))
    assert set(told) == blobs.keys() - store.infos.keys()


@FAST
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(2, 1e6)), min_size=1, max_size=60), st.floats(0, 1))
def test_small_root_loses_its_least_recently_used_blocks(blobs: list[tuple[int, float]], share: float) -> None:
    now = 1e9
    store = AgedStore([KeyInfo(name(n), size, now - age_s) for n, (size, age_s) in enumerate(blobs)])
    total = sum(size for size, _ in blobs)
    excess = int(share * total)
    walker = Walker(store, monotonic=lambda: 0.0)
    assert walker.step(Wanted(), CollectReport(), now=now)
    assert walker.knows_whole
    report = CollectReport()
    walker.step(Wanted(excess_bytes=excess, share=excess / total), report, now=now)
    assert report.removed_bytes["capacity"] >= excess * 0.999 - 1
    gone = [age_s for n, (_, age_s) in enumerate(blobs) if name(n) not in store.infos]
    for age_s in gone:  # the blocks that are older by more than a bucket were not enough
        assert sum(size for size, older_s in blobs if older_s > age_s * 1.0115) < max(1, excess)


def test_walk_step_lists_a_bounded_number_of_keys_for_any_root_size() -> None:
    for count in (10, 3 * PAGE_KEYS):
        store = AgedStore([KeyInfo(f"a{n}", 1, 1e9) for n in range(count)])
        walker = Walker(store)
        for _ in range(5):
            before = store.listed
            walker.step(Wanted(), CollectReport(), now=1e9, keys_max=50)
            assert store.listed - before <= 50


def test_large_root_loses_its_oldest_blocks_after_a_few_listed_pages() -> None:
    now = 1e9
    infos = [KeyInfo(name(n), 1, now - 10.0 - (n * 7919) % 50_021) for n in range(2 * SAMPLE_BLOBS_MAX)]
    store = AgedStore(infos)
    walker, report = Walker(store, monotonic=lambda: 0.0), CollectReport()
    walker.step(Wanted(excess_bytes=1000, share=0.125), report, now=now)
    assert 1000 <= report.removed_bytes["capacity"] < 1001 + PAGE_KEYS
    assert store.listed <= 12 * PAGE_KEYS
    youngest = min(now - info.mtime for info in infos if info.key not in store.infos)
    oldest_eighth = sorted(now - info.mtime for info in infos)[-len(infos) // 8]
    assert youngest >= oldest_eighth * 0.9


# -- what is stored ----------------------------------------------------------------------------------------------------


class Writers(RuleBasedStateMachine):
    """Three hosts put, some die, others delete, clocks step, and the collector always knows at least what is stored.

    Its sum is exact but for: what was put since its last listing began (which may count twice), what others deleted
    since, and what writers have not published yet.
    """

    uses_change_times = False

    @initialize(bound=st.sampled_from([20_000, 60_000, 1 << 40]))
    def begin(self, bound: int) -> None:
        self.now, self.storage_ahead_s = 1e9, 0.0
        self.store = MemoryStore(clock=lambda: self.now + self.storage_ahead_s)
        if self.uses_change_times:
            self.store.touch = self.touch  # type: ignore[attr-defined]
        self.policy = CapacityPolicy(max_bytes=bound, poll_s=1.0, every_s=30.0, grace_s=0.0, lease_s=20.0)
        self.writers = [self.writer() for _ in range(3)]
        self.collectors = [self.collector(), self.collector()]
        self.number = 0
        self.unpublished = 0

    def touch(self, key: str) -> None:
        blob = self.store._blobs.get(key)
        if blob is not None:
            self.store._blobs[key] = type(blob)(blob.data, self.now)

    def writer(self) -> Writer:
        return Writer(self.store, poll_s=1.0, clock=lambda: self.now)

    def collector(self) -> Collector:
        def clock() -> float:
            return self.now

        return Collector(self.store, self.policy, clock=clock, monotonic=clock, since_boot=clock)

    def block_bytes(self) -> int:
        return sum(info.size for info in self.store.keys() if is_block(info.key))  # noqa: SIM118 - not a dict

    @rule(who=st.integers(0, 2), sizes=st.lists(st.integers(1, 3000), max_size=4))
    def put(self, who: int, sizes: list[int]) -> None:
        for size in sizes:
            self.store.put(name(self.number), as_parts(bytes(size)))
            self.number += 1
            self.writers[who].note_put(size)

    @rule(who=st.integers(0, 1), size=st.integers(1, 3000))
    def put_beside_a_collector(self, who: int, size: int) -> None:
        self.store.put(name(self.number), as_parts(bytes(size)))
        self.number += 1
        self.collectors[who].note_put(size)

    @rule(numbers=st.lists(st.integers(0, 60), max_size=5))
    def use(self, numbers: list[int]) -> None:
        if self.uses_change_times:
            for number in numbers:
                self.touch(name(number))

    @rule(who=st.integers(0, 2))
    def replace_a_writer(self, who: int) -> None:
        self.writers[who].poll()  # what a dying writer has not published is unknown until the next listing
        self.writers[who] = self.writer()

    @rule(numbers=st.lists(st.integers(0, 60), max_size=5))
    def delete(self, numbers: list[int]) -> None:
        for number in numbers:
            self.store.delete(name(number))

    @rule(seconds=st.floats(0.1, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=st.integers(0, 1))
    def let_go(self, who: int) -> None:
        self.collectors[who].release()

    @rule(who=st.integers(0, 1))
    def die(self, who: int) -> None:
        self.collectors[who].poll()
        self.now += self.policy.lease_s
        self.collectors = [self.collector(), self.collector()]

    @rule(polls=st.integers(1, 5))
    def poll(self, polls: int) -> None:
        for _ in range(polls):
            self.now += 1.0
            for writer in self.writers:
                writer.poll()
            for collector in self.collectors:
                collector.poll()

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def sum_is_never_too_low(self) -> None:
        self.poll(2)  # in the first one, a collector may read a record before it is published
        for collector in self.collectors:
            if collector._works and collector.knows_bytes:
                assert collector._used() >= self.block_bytes()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for _ in range(200):
            self.now += 1.0
            for collector in self.collectors:
                collector.note_put(0)
                collector.poll()
        # Nobody puts any more: the sum is exact after a listing, but for the records, and the bound is kept.
        (working,) = [collector for collector in self.collectors if collector._works]
        # Some of those that the listing passed may be removed since.
        records = sum(info.size for info in self.store.keys(OWN_PREFIX)) + 4 * RECORD_BYTES
        assert 0 <= working._used() - self.block_bytes() <= records
        assert working.full == "" or self.block_bytes() == 0
        usage = read_usage(self.store)
        assert usage is not None
        assert usage.listed > 0
        assert usage.holder


class WritersWithUses(Writers):
    """The same where uses change times, as on file systems."""

    uses_change_times = True


@pytest.mark.parametrize("machine", [Writers, WritersWithUses])
def test_used_bytes_are_never_too_low_under_concurrent_writers(machine: type[Writers]) -> None:
    run_state_machine_as_test(
        machine,
        # Shrinking would take minutes, because each example ends with 200 polls.
        settings=settings(max_examples=20, stateful_step_count=20, deadline=None, phases=(Phase.generate,)),
    )


@settings(FAST, max_examples=20)  # of 2,400 possible; each takes 0.1 s
@given(st.integers(1, 5), st.integers(1, 12), st.integers(100, 400), st.integers(0, 3))
def test_overshoot_is_at_most_three_polls_of_all_writers_puts(hosts: int, puts: int, bound: int, late: int) -> None:
    """Each host puts as fast as it may, and some read the records one poll later than others."""
    now = [1e9]
    store = MemoryStore(clock=lambda: now[0])
    policy = CapacityPolicy(max_bytes=bound * 100, poll_s=1.0, grace_s=0.0)
    collector = Collector(store, policy, clock=lambda: now[0], monotonic=lambda: now[0], since_boot=lambda: now[0])
    writers = [Writer(store, poll_s=1.0, clock=lambda: now[0]) for _ in range(hosts)]
    number = highest = 0
    for second in range(60):
        now[0] += 1.0
        collector.poll()
        for index, writer in enumerate(writers):
            if (second + index) % (1 + late) == 0:
                writer.poll()
            for _ in range(puts if not (writer.usage and writer.usage.full) else 0):
                store.put(name(number), as_parts(bytes(100)))
                writer.note_put(100)
                number += 1
        highest = max(highest, sum(info.size for info in store.keys() if is_block(info.key)))  # noqa: SIM118
    assert highest <= policy.max_bytes + hosts * puts * 100 * (3 + late) if policy.max_bytes else False
