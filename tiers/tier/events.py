"""Events that nobody has taken yet, in bounded memory: an engine need not ask for them. And which may still be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import chain, islice

from kvtiers.tiers.base import OffloadingEvent
from kvtiers.tiers.blocks.keys import OffloadKey

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


class KeysSinceJobStart:
    """Which keys others named while a job was under way: loads and stores of one block may overtake each other.

    Scheduler thread only. A job costs the same whatever number of keys it has, but for those that it is asked of.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, int] = {}  # job -> number of sets that were named when it began; the oldest first
        self._named: deque[AbstractSet[OffloadKey]] = deque()  # since the oldest job began
        self._dropped = 0  # sets that were named before

    def begin(self, job_id: int) -> None:
        """A job is under way."""
        self._jobs[job_id] = self._dropped + len(self._named)

    def name(self, keys: AbstractSet[OffloadKey]) -> None:
        """Name keys to the jobs that are under way."""
        if keys and self._jobs:
            self._named.append(keys)

    def end(self, job_id: int, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """A job is over: those of the keys that were named since it began."""
        asked = set(keys)
        began = self._jobs.pop(job_id) - self._dropped
        # By set: each key in each of them would take 0.3 s where 10,000 are gone beside a thousand stores.
        named = asked.intersection(chain.from_iterable(map(asked.intersection, islice(self._named, began, None))))
        oldest = next(iter(self._jobs.values()), self._dropped + len(self._named))
        while self._dropped < oldest:
            self._named.popleft()
            self._dropped += 1
        return named
