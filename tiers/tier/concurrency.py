"""Concurrency: how many blocks a worker has under way at once, found by what its batches take.

A server 30 ms away that gives each connection 90 MB/s, as object stores do, needs a hundred requests under way before
a fast link is full; one that is near keeps the worker's processor busy with a few, and further threads only fight for
its GIL. A slow link is the other way round: what many requests share, none of them ends in time. So it begins with a
few, asks for more while the worker mostly waits and more bring more, and for fewer where a block takes seconds.
"""

from __future__ import annotations

import math
import threading
from typing import Final

GAIN_MIN: Final = 1.15  # twice as many threads are kept where they move so much more
BUSY_MAX: Final = 0.5  # of a processor; a worker that is busier has enough to do
WAITS_S_MAX: Final = 0.5  # a block that takes longer shares its link with enough others
SLOW_S: Final = 1.0  # a block that takes longer, with too many
TRIAL_BLOCKS: Final = 4  # of a batch, for each thread
SETTLED_BATCHES: Final = 50  # so many after which more are tried again


class Concurrency:
    """Of one direction of a tier. Any thread; ``_lock`` owns the rest.

    Args:
        first: threads to begin with.
        most: never more; ``first`` at least.
    """

    def __init__(self, first: int, most: int) -> None:
        self._lock = threading.Lock()
        self._threads = first
        self._most = max(first, most)
        self._fewer: tuple[int, float] | None = None  # before the last step up: threads, and blocks a second
        self._settled = 0
        self._has_learnt = False
        self._is_slow = False  # it was, at the last batch

    @property
    def threads(self) -> int:
        """For the next batch."""
        return self._threads

    @property
    def batch_blocks_max(self) -> float:
        """For the next batch: enough for all threads, and no more while it is not known how many they should be."""
        is_known = self._has_learnt and self._fewer is None and not self._is_slow
        return math.inf if is_known else TRIAL_BLOCKS * self._threads

    def learn(self, threads: int, blocks: int, seconds: float, cpu_s: float, *, failed: bool = False) -> None:
        """What a batch took.

        Args:
            threads: that it was given.
            blocks: how many it had.
            seconds: from its begin to its end.
            cpu_s: of the worker's processor, meanwhile.
            failed: some of the blocks did; a server that refuses is not to be asked for more.
        """
        at_once = min(threads, blocks)
        with self._lock:
            if threads != self._threads or not blocks or seconds <= 0:
                return  # another batch has taught us since
            self._has_learnt = True
            block_s = seconds * at_once / blocks
            if block_s > SLOW_S:
                if at_once > 1:  # a lone block has shared its link with none of ours
                    self._set(max(1, threads // 2))
                    self._is_slow = True
                return
            self._is_slow = False
            if at_once == threads and not failed:
                self._climb(blocks / seconds, waits=cpu_s < BUSY_MAX * seconds and block_s < WAITS_S_MAX)

    def _climb(self, rate: float, *, waits: bool) -> None:
        if self._fewer is not None and rate < GAIN_MIN * self._fewer[1]:
            self._set(self._fewer[0])
            self._settled = SETTLED_BATCHES
        elif self._settled:
            self._settled -= 1
        elif waits and self._threads < self._most:
            before = self._threads
            self._set(min(2 * before, self._most))
            self._fewer = (before, rate)
        else:
            self._fewer = None

    def _set(self, threads: int) -> None:
        self._threads = threads
        self._fewer = None
