"""Events that nobody has taken yet, in bounded memory: an engine need not ask for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tiers.base import OffloadingEvent
from tiers.keys import OffloadKey

EVENT_KEYS_MAX = 262_144  # of a medium; some 50 MB


class UnreadEvents:
    """What appeared in and disappeared from one medium. Scheduler thread only.

    Args:
        medium: where the blocks are.
        keys_max: of more keys than these, in all events together, the oldest events go; never the last.
    """

    def __init__(self, medium: str, keys_max: int = EVENT_KEYS_MAX) -> None:
        self._medium = medium
        self._keys_max = keys_max
        self._events: deque[OffloadingEvent] = deque()
        self._num_keys = 0

    def add(self, keys: Iterable[OffloadKey], *, removed: bool) -> None:
        """Add one event, where there are keys."""
        event = OffloadingEvent(tuple(keys), self._medium, removed)
        if not event.keys:
            return
        self._events.append(event)
        self._num_keys += len(event.keys)
        while self._num_keys > self._keys_max and len(self._events) > 1:
            self._num_keys -= len(self._events.popleft().keys)

    def take(self) -> tuple[OffloadingEvent, ...]:
        """All of them, the oldest first; they are forgotten here."""
        events = tuple(self._events)
        self._events.clear()
        self._num_keys = 0
        return events
