"""Concurrency: adapts how many blocks a worker moves at once to how long its batches take.

A server 30 ms away that limits each connection to 90 MB/s, as object stores do, needs a hundred requests in flight to
fill a fast link. With a server nearby, a few requests keep the worker's CPU busy, and more threads only compete for its
GIL. On a slow link that many requests share, none of them finishes in time. So a worker starts with few threads. It
gets more while it mostly waits and more threads raise the throughput, and fewer when a block takes seconds.
"""

from __future__ import annotations

import threading
from typing import Final

GAIN_MIN: Final = 1.15  # doubled threads are kept if the throughput grows by at least this factor
BUSY_MAX: Final = 0.5  # CPU share of one core; a busier worker gets no more threads
WAITS_S_MAX: Final = 0.5  # if a block takes longer, enough others share its link
SLOW_S: Final = 1.0  # if a block takes longer, too many others share its link
SETTLED_BATCHES: Final = 50  # batches after a failed increase before the next attempt


class Concurrency:
    """The number of threads for one direction (loads or stores) of a tier. Any thread; ``_lock`` guards all changes.

    Args:
        first: initial number of threads.
        most: maximum number of threads, if it is more than ``first``.
    """

    def __init__(self, first: int, most: int) -> None:
        self._lock = threading.Lock()
        self._threads = first
        self._most = max(first, most)
        self._before_step: tuple[int, float] | None = None  # threads and blocks/s before an increase on trial
        self._settled = 0  # batches left until the next increase is tried

    @property
    def threads(self) -> int:
        """Number of threads for the next batch."""
        return self._threads

    def learn(self, threads: int, blocks: int, seconds: float, cpu_s: float, *, failed: bool = False) -> None:
        """Adapt the number of threads to the result of a batch.

        Args:
            threads: number of threads that moved it.
            blocks: number of blocks in it.
            seconds: its duration.
            cpu_s: CPU time that the worker used meanwhile.
            failed: whether some blocks failed. Then threads are not added: do not push a server that refuses.
        """
        at_once = min(threads, blocks)
        with self._lock:
            if threads != self._threads or not blocks or seconds <= 0:
                return  # the number has changed since this batch began, or the batch says nothing
            block_s = seconds * at_once / blocks
            if block_s > SLOW_S:
                if at_once > 1:  # a single block did not share its link with other blocks of ours
                    self._set(max(1, threads // 2))
                return
            if at_once == threads and not failed:
                self._climb(blocks / seconds, waits=cpu_s < BUSY_MAX * seconds and block_s < WAITS_S_MAX)

    def _climb(self, rate: float, *, waits: bool) -> None:
        if self._before_step is not None and rate < GAIN_MIN * self._before_step[1]:
            self._set(self._before_step[0])
            self._settled = SETTLED_BATCHES
        elif self._settled:
            self._settled -= 1
        elif waits and self._threads < self._most:
            before = self._threads
            self._set(min(2 * before, self._most))
            self._before_step = (before, rate)
        else:
            self._before_step = None

    def _set(self, threads: int) -> None:
        self._threads = threads
        self._before_step = None
