"""A bounded queue of events that the engine has not taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..base import OffloadingEvent
from ..blocks.keys import OffloadKey

EVENT_KEYS_MAX = 262_144  # per medium; about 50 MB


class UnreadEvents:
    """Stored and removed blocks of one medium. Bounded, because an engine need not take events. Scheduler thread only.

    Args:
        medium: where the blocks are.
        keys_max: with more keys in all events together, the oldest events are dropped, but never the newest.
    """

    def __init__(self, medium: str, keys_max: int = EVENT_KEYS_MAX) -> None:
        self._medium = medium
        self._keys_max = keys_max
        self._events: deque[OffloadingEvent] = deque()
        self._num_keys = 0

    def add(self, keys: Iterable[OffloadKey], *, removed: bool) -> None:
        """Add an event, unless ``keys`` is empty."""
        event = OffloadingEvent(tuple(keys), self._medium, removed)
        if not event.keys:
            return
        self._events.append(event)
        self._num_keys += len(event.keys)
        while self._num_keys > self._keys_max and len(self._events) > 1:
            self._num_keys -= len(self._events.popleft().keys)

    def take(self) -> tuple[OffloadingEvent, ...]:
        """Remove and return all events, the oldest first."""
        events = tuple(self._events)
        self._events.clear()
        self._num_keys = 0
        return events
