"""Events that nobody has taken yet, in bounded memory: an engine need not ask for them. And which may still be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice

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


class StoresBesideLoads:
    """What was stored while loads were under way: of that a load that ends late must not tell that it is gone.

    Scheduler thread only. A load costs the same whatever number of keys it has.
    """

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}  # job -> number of stores that had ended when it began; the oldest first
        self._stores: deque[Collection[OffloadKey]] = deque()  # that ended since the oldest load began
        self._dropped = 0  # stores that ended before

    def begin_load(self, job_id: int) -> None:
        """A load is under way."""
        self._loads[job_id] = self._dropped + len(self._stores)

    def end_store(self, keys: Collection[OffloadKey]) -> None:
        """These keys are stored."""
        if self._loads:
            self._stores.append(keys)

    def end_load(self, job_id: int, gone: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys that a load found gone which were not stored since it began."""
        stores = list(islice(self._stores, self._loads.pop(job_id) - self._dropped, None))
        oldest = next(iter(self._loads.values()), self._dropped + len(self._stores))
        while self._dropped < oldest:
            self._stores.popleft()
            self._dropped += 1
        return [key for key in dict.fromkeys(gone) if not any(key in keys for keys in stores)]
