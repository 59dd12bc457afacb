"""SideBySide: threads for questions to storage that is far, which one after the other would take too long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from kvtiers.tiers.daemon_pool import DaemonPool
from kvtiers.tiers.errors import StoreClosedError

T = TypeVar("T")

FILES_MIN = 4  # that a load reads at once, however large
#: That one load alone reads into; the n-th of those under way gets 1/n of it. Eight (LOAD_THREADS) come to 174 MiB.
BUFFERS_BYTES_MAX = 64 << 20


class SideBySide:
    """A pool whose threads the first call starts: many processes make one, and few ask. Any thread.

    Args:
        threads: of all.
        name: of them.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._starting = threading.Lock()  # guards these
        self._loads = 0
        self._pool: DaemonPool | None = None

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Begin it."""
        with self._starting:
            if self._pool is None:
                self._pool = DaemonPool(self._threads, self._name)
            return self._pool.submit(call, *arguments)

    @contextlib.contextmanager
    def files_at_once(self, biggest: int) -> Iterator[int]:
        """How many files one load may have in memory, while it is under way; ``biggest``: bytes of one."""
        with self._starting:
            self._loads += 1
            share = BUFFERS_BYTES_MAX // self._loads
        try:
            yield max(FILES_MIN, share // max(1, biggest))
        finally:
            with self._starting:
                self._loads -= 1

    def close(self) -> None:
        """Cancel what has not begun; waits for nothing."""
        with self._starting:
            if self._pool is not None:
                self._pool.shutdown(0.0)


def result_of(future: Future[T]) -> T:
    """What a call returned, or raises what it raised.

    Raises:
        StoreClosedError: it was cancelled.
    """
    try:
        return future.result()
    except CancelledError:
        raise StoreClosedError("the storage was closed") from None
