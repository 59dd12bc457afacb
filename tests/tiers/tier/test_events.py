"""UnreadEvents is bounded by its number of keys."""

from __future__ import annotations

import pytest

from kvtiers.tiers.base import OffloadingEvent
from kvtiers.tiers.tier.events import UnreadEvents
from tests.identity import block_key

KEYS = [block_key(number) for number in range(100)]


@pytest.mark.parametrize("keys_each", [1, 3, 10])
def test_oldest_events_are_dropped_if_nobody_reads_them(keys_each: int) -> None:
    events = UnreadEvents("CPU", keys_max=10)
    for start in range(0, 90, keys_each):
        events.add(KEYS[start : start + keys_each], removed=False)
    taken = events.take()
    assert len(taken) == 10 // keys_each
    assert [key for event in taken for key in event.keys] == KEYS[90 - len(taken) * keys_each : 90]
    assert events.take() == ()


def test_last_event_is_kept_at_any_size() -> None:
    events = UnreadEvents("CPU", keys_max=10)
    for _ in range(3):
        events.add(KEYS[:10], removed=False)
        assert len(events.take()) == 1
    events.add(KEYS[:2], removed=False)
    events.add(KEYS, removed=True)
    events.add([], removed=True)
    assert events.take() == (OffloadingEvent(tuple(KEYS), "CPU", removed=True),)
