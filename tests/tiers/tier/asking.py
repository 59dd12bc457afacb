"""A storage for ``AsyncLookup``: threads call a function, in place of a tier's servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvtiers.tiers.blocks.keys import OffloadKey

Probe = Callable[[Sequence[OffloadKey]], Sequence[bool | None]]


class Asking:
    """Answers probes by calling ``probe``. If it raises, the lookups of all its keys have failed."""

    def __init__(self, probe: Probe, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.probe = probe
        self._clock = clock
        self._next = 0
        self._asked: SimpleQueue[tuple[int, Sequence[OffloadKey]] | None] = SimpleQueue()
        self._looked: SimpleQueue[tuple[int, Sequence[bool | None], float]] = SimpleQueue()
        self._threads = [threading.Thread(target=self._answer, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def look(self, keys: Sequence[OffloadKey]) -> int:
        self._next += 1
        self._asked.put((self._next, keys))
        return self._next

    def take_looked(self) -> list[tuple[int, Sequence[bool | None], float]]:
        return [self._looked.get() for _ in range(self._looked.qsize())]

    def is_empty(self) -> bool:
        return self._looked.empty()

    def end(self) -> bool:
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(120)
        return not any(thread.is_alive() for thread in self._threads)

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            number, keys = asked
            began_at = self._clock()
            found: Sequence[bool | None]
            try:
                found = self.probe(keys)
            except BaseException:
                found = [None] * len(keys)
            self._looked.put((number, found, self._clock() - began_at))
