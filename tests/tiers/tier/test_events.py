"""UnreadEvents: bounded by keys, whatever the number of events. KeysSinceJobStart: for as long as the oldest job."""

from __future__ import annotations

import pytest

from kvtiers.tiers.base import OffloadingEvent
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.tier.events import KeysSinceJobStart, UnreadEvents
from tests.identity import block_key

KEYS = [block_key(number) for number in range(100)]


@pytest.mark.parametrize("keys_each", [1, 3, 10])
def test_the_oldest_go_where_nobody_takes_them(keys_each: int) -> None:
    events = UnreadEvents("CPU", keys_max=10)
    for start in range(0, 90, keys_each):
        events.add(KEYS[start : start + keys_each], removed=False)
    taken = events.take()
    assert len(taken) == 10 // keys_each
    assert [key for event in taken for key in event.keys] == KEYS[90 - len(taken) * keys_each : 90]
    assert events.take() == ()


def test_what_was_taken_counts_no_longer_and_the_last_is_kept_however_large() -> None:
    events = UnreadEvents("CPU", keys_max=10)
    for _ in range(3):
        events.add(KEYS[:10], removed=False)
        assert len(events.take()) == 1
    events.add(KEYS[:2], removed=False)
    events.add(KEYS, removed=True)
    events.add([], removed=True)
    assert events.take() == (OffloadingEvent(tuple(KEYS), "CPU", removed=True),)


def test_what_was_named_since_a_job_began_is_known_and_is_kept_for_no_longer() -> None:
    meanwhile = KeysSinceJobStart()
    meanwhile.name({KEYS[0]})
    meanwhile.begin(1)
    meanwhile.name({KEYS[1]})
    meanwhile.begin(2)
    meanwhile.name({KEYS[2]})
    assert meanwhile.end(2, KEYS[:4]) == {KEYS[2]}
    meanwhile.begin(3)
    assert meanwhile.end(1, [*KEYS[:4], KEYS[1]]) == {KEYS[1], KEYS[2]}
    assert meanwhile.end(3, KEYS[:4]) == set()
    meanwhile.name({KEYS[0]})
    assert not meanwhile._named


def test_many_keys_that_are_gone_beside_many_stores_cost_what_the_stores_have() -> None:
    """A folder that somebody emptied, say: a look into each store for each key held the scheduler up for 0.3 s."""
    meanwhile = KeysSinceJobStart()
    meanwhile.begin(1)
    for number in range(1000):
        meanwhile.name({block_key(1000 + number)})
    gone = [OffloadKey(CountsHashes(block_key(number))) for number in range(500)]
    assert meanwhile.end(1, gone) == set()
    assert CountsHashes.hashed <= 4000


class CountsHashes(bytes):
    """A key that counts how often any is looked for."""

    hashed = 0

    def __hash__(self) -> int:
        CountsHashes.hashed += 1
        return super().__hash__()
