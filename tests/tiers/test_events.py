"""UnreadEvents: bounded by keys, whatever the number of events. StoresBesideLoads: as long as the oldest load."""

from __future__ import annotations

import pytest

from tests.identity import block_key
from tiers.base import OffloadingEvent
from tiers.events import StoresBesideLoads, UnreadEvents

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


def test_what_was_stored_since_a_load_began_is_not_told_as_gone_and_is_kept_for_no_longer() -> None:
    stores = StoresBesideLoads()
    stores.end_store({KEYS[0]})
    stores.begin_load(1)
    stores.end_store({KEYS[1]})
    stores.begin_load(2)
    stores.end_store({KEYS[2]})
    assert stores.end_load(2, KEYS[:4]) == [KEYS[0], KEYS[1], KEYS[3]]
    stores.begin_load(3)
    assert stores.end_load(1, [*KEYS[:4], KEYS[0]]) == [KEYS[0], KEYS[3]]
    assert stores.end_load(3, KEYS[:4]) == KEYS[:4]
    stores.end_store({KEYS[0]})
    assert not stores._stores
