"""A bounded queue of events that the engine has not taken, and a record of keys that changed while a job ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import chain, islice

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


class KeysSinceJobStart:
    """Tells which keys were named while a job ran, because loads and stores of one block may overtake each other.

    Scheduler thread only. The cost per job depends on the keys passed to ``end``, not on the size of the job.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, int] = {}  # job id -> number of sets named before it began; the oldest job first
        self._named: deque[AbstractSet[OffloadKey]] = deque()  # sets named since the oldest running job began
        self._dropped = 0  # number of sets named before that

    def begin(self, job_id: int) -> None:
        """Record that a job begins."""
        self._jobs[job_id] = self._dropped + len(self._named)

    def name(self, keys: AbstractSet[OffloadKey]) -> None:
        """Record a set of keys for all running jobs."""
        if keys and self._jobs:
            self._named.append(keys)

    def end(self, job_id: int, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Record that a job has ended, and return which of ``keys`` were named since it began."""
        asked = set(keys)
        began = self._jobs.pop(job_id) - self._dropped
        # Intersect whole sets: testing each key with each set would take 0.3 s for 10,000 keys and 1,000 stores.
        named = asked.intersection(chain.from_iterable(map(asked.intersection, islice(self._named, began, None))))
        oldest = next(iter(self._jobs.values()), self._dropped + len(self._named))
        while self._dropped < oldest:
            self._named.popleft()
            self._dropped += 1
        return named
