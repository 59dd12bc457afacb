"""RateLimit: bounds the bytes that several threads move in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Delays threads so that they move at most ``bytes_per_s`` together. Any thread may call it.

    Each piece of work is given a time slot of its own, after the slots given before; a thread waits for its slot. Time
    in which nothing was moved is not made up for.

    Args:
        bytes_per_s: more than 0.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()  # guards _free_at; held for a few instructions
        self._free_at = clock()

    def reserve(self, size_bytes: int) -> float:
        """Take the next slot for ``size_bytes``. Returns the seconds until it begins."""
        with self._lock:
            now = self._clock()
            begins_at = max(now, self._free_at)
            self._free_at = begins_at + size_bytes / self._bytes_per_s
        return begins_at - now
