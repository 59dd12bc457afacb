"""What a collector decides by arithmetic alone: how much to remove, which blocks, when again, and whether it helped."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.tiers.capacity.ages import AGE_S_MIN, STAMP_S, AgeHistogram, Ages, bucket_of
from kvtiers.tiers.capacity.policy import HELD_SHARE_MAX, CapacityPolicy
from kvtiers.tiers.capacity.room import FUTILE_S, FUTILE_S_MAX, LATE_S_MAX, Freed, Patience
from kvtiers.tiers.capacity.schedule import Schedule
from kvtiers.tiers.capacity.usage import Measured

LIMIT = 10_000
BYTES = st.integers(0, 3 * LIMIT)
FAST = settings(deadline=None)


@st.composite
def policies(draw: st.DrawFn) -> CapacityPolicy:
    high = draw(st.floats(0.05, 1.0))
    return CapacityPolicy(max_bytes=LIMIT, high=high, low=draw(st.floats(0.01, high)))


# -- how much ----------------------------------------------------------------------------------------------------------


@FAST
@given(policies(), BYTES, BYTES, BYTES, BYTES)
def test_as_much_goes_as_makes_room(policy: CapacityPolicy, blocks: int, foreign: int, held: int, wanted: int) -> None:
    stored, most = blocks + foreign, int(HELD_SHARE_MAX * LIMIT)
    excess = policy.excess_bytes(stored, held=held, wanted=wanted, foreign=foreign)
    # A record may be forged, or of a writer with another max_bytes.
    assert excess == policy.excess_bytes(stored, held=min(held, most), wanted=min(wanted, most), foreign=foreign)
    used = stored + min(held, most)
    if foreign > LIMIT or not policy.is_short(used, wanted):
        assert excess <= 0
    else:
        assert used - max(0, excess) + min(wanted, most) <= LIMIT
        assert used - max(0, excess) <= max(policy.high * LIMIT, (foreign + LIMIT) / 2)


@FAST
@given(policies(), BYTES, BYTES)
def test_blocks_keep_half_of_what_foreign_files_leave(policy: CapacityPolicy, blocks: int, foreign: int) -> None:
    excess = policy.excess_bytes(blocks + foreign, held=0, wanted=0, foreign=foreign)
    if excess > 0:
        left = blocks - excess
        mark = policy.high * LIMIT
        assert left >= max(policy.low * LIMIT - foreign, ((mark if foreign < mark else LIMIT) - foreign) / 2) - 1


@FAST
@given(policies(), st.integers(1, LIMIT), st.floats(0.0, 1.0))
def test_a_full_storage_loses_no_more_than_half_of_its_blocks(
    policy: CapacityPolicy, stored: int, foreign_share: float
) -> None:
    foreign = int(foreign_share * stored)
    removed = stored - policy.low_bytes(stored, stored, foreign)
    assert 0 <= removed <= (stored - foreign) / 2 + 1


# -- which -------------------------------------------------------------------------------------------------------------


@FAST
@given(
    st.lists(st.tuples(st.floats(-10, 4e8), st.integers(1, 1000)), min_size=1, max_size=50),
    st.floats(0, 1.2),
    st.booleans(),
)
def test_the_oldest_go_and_no_more_than_needed(blobs: list[tuple[float, int]], share: float, equal_sizes: bool) -> None:
    blobs = [(age_s, 7 if equal_sizes else size) for age_s, size in blobs]
    histogram = AgeHistogram()
    for age_s, size in blobs:
        histogram.add(age_s, size)
    total = sum(size for _, size in blobs)
    wanted = int(share * total)
    cut = histogram.cut(wanted)
    age_s_min = cut.age_s_min
    taken: list[tuple[float, int]] = []
    left: list[tuple[float, int]] = []
    for age_s, size in blobs:
        (taken if cut.takes(age_s, size) else left).append((age_s, size))
    taken_bytes = sum(size for _, size in taken)
    assert min(wanted, total) <= taken_bytes < wanted + max(size for _, size in blobs)
    assert all(age_s >= age_s_min for age_s, _ in taken)
    if taken and left:
        assert max(bucket_of(age_s) for age_s, _ in left) <= min(bucket_of(age_s) for age_s, _ in taken)
    foretold_blobs, foretold_bytes = histogram.oldest(wanted)  # what a dry run says
    assert min(wanted, total) <= foretold_bytes <= total
    if equal_sizes:
        assert (foretold_blobs, foretold_bytes) == (len(taken), taken_bytes)


@given(st.floats(AGE_S_MIN, 1e9), st.floats(1.012, 10))
def test_older_is_a_later_bucket(age_s: float, factor: float) -> None:
    assert bucket_of(age_s) < bucket_of(age_s * factor)
    assert bucket_of(-1.0) == bucket_of(0.0) == 0


@given(st.floats(0, 2e9), st.floats(-1e6, 1e6), st.floats(0, 1e5))
def test_what_is_stored_or_used_during_a_run_has_no_age(now: float, older_s: float, passed_s: float) -> None:
    times = iter([0.0, passed_s])
    age_s = Ages(now, times.__next__).age_s(now - older_s)
    if -passed_s - STAMP_S < older_s < -1e-3:
        assert age_s == 0.0
    elif not -passed_s - STAMP_S - 1e-3 <= older_s <= 0.0:
        assert math.isclose(age_s, older_s, abs_tol=1e-3)


# -- when --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=20))
def test_runs_that_remove_nothing_rest_twice_as_long_each_time(runs: list[bool]) -> None:
    now, policy, rest_s = [0.0], CapacityPolicy(every_s=60.0), 0.0
    schedule = Schedule(policy, lambda: 0.0, lambda: now[0])
    for has_removed in runs:
        schedule.begin()
        schedule.end(has_removed=has_removed)
        rest_s = 0.0 if has_removed else min(60.0, max(0.25, 2 * rest_s))
        assert schedule.has_rested() is has_removed
        now[0] += rest_s
        assert schedule.has_rested()


@given(st.floats(-1e6, 1e6), st.lists(st.floats(1.0, 599.0), max_size=20))
def test_hosts_whose_clocks_differ_measure_no_more_often(ahead_s: float, pauses_s: list[float]) -> None:
    """At first sight, the time that another host wrote is all that there is; later only this host's clock counts."""
    now = [0.0]
    schedule = Schedule(CapacityPolicy(every_s=600.0), lambda: now[0] + ahead_s, lambda: now[0])
    assert schedule.is_old(Measured("first", 0, 0, {}, now[0])) is (abs(ahead_s) >= 600.0)
    for number, pause_s in enumerate(pauses_s):
        measured = Measured(str(number), 0, 0, {}, now[0])
        assert not schedule.is_old(measured)
        now[0] += pause_s
        assert not schedule.is_old(measured)
    last = Measured("last", 0, 0, {}, now[0])
    assert not schedule.is_old(last)
    now[0] += 600.001
    assert schedule.is_old(last)
    assert schedule.is_old(None)


# -- whether it helped -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 2000), st.floats(0, 30)), min_size=1, max_size=20))
def test_no_more_is_waited_for_than_was_removed(removals: list[tuple[int, int, float]]) -> None:
    freed, now = Freed(before_bytes=5000), 0.0
    free = 5000
    for size, shown, pause_s in removals:
        freed.add(size, free, now)
        assert 0 <= freed.late_bytes(free, now) <= freed.removed_bytes
        now += pause_s
        free = min(free + shown, 5000 + freed.removed_bytes)
        assert freed.late_bytes(free, now) <= max(0, freed.removed_bytes - (free - 5000))
    assert freed.late_bytes(free, now + LATE_S_MAX + 1.0) == 0
    assert freed.late_bytes(5000 + freed.removed_bytes, now) == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(-1000, 3000)),
        max_size=30,
    )
)
def test_removals_pause_only_if_two_in_a_row_freed_nothing(rounds: list[tuple[int, int, int, int]]) -> None:
    patience, now, futile_in_a_row = Patience(), 0.0, 0
    for removed, risen, taken, missing in rounds:
        freed = Freed(removed_bytes=removed, risen_bytes=risen)
        patience.judge(freed, taken=taken, missing=missing, now=now)
        is_futile = 16 * (risen + taken) < removed and 0 < missing <= removed
        futile_in_a_row = futile_in_a_row + 1 if is_futile else 0
        rest_s = min(FUTILE_S_MAX, FUTILE_S * 2.0 ** (futile_in_a_row - 2)) if futile_in_a_row > 1 else 0.0
        assert patience.is_resting(now) is (rest_s > 0.0)
        now += rest_s
        assert not patience.is_resting(now)
