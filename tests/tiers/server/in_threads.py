"""The servers of a tier over any store, in threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvtiers.tiers.blocks.rows import Rows
from kvtiers.tiers.frames import Seats, Work
from kvtiers.tiers.server.threads import ThreadBackend
from kvtiers.tiers.store import Store

THREADS = 2  # of each kind that moves blocks


def in_threads(
    store: Store,
    *,
    n_read_threads: int = THREADS,
    n_write_threads: int = THREADS,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[Work, Rows], ThreadBackend]:
    """``make_backend`` of a StoreTierManager."""
    return partial(_start, store, Seats(2, 1, n_read_threads, n_write_threads), clock)


def _start(store: Store, seats: Seats, clock: Callable[[], float], work: Work, rows: Rows) -> ThreadBackend:
    return ThreadBackend(store, rows, work, seats, clock)
