"""SideBySide: a thread pool for parallel requests to remote storage, which would take too long one after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from ....tiers.daemon_pool import DaemonPool
from ....tiers.errors import StoreClosedError

T = TypeVar("T")

FILES_MIN = 4  # files that a load reads at once, however large they are
#: Memory that a single load reads into. The n-th load under way gets 1/n; eight (LOAD_THREADS) have 174 MiB together.
BUFFERS_BYTES_MAX = 64 << 20


class SideBySide:
    """A pool whose threads start with the first call: many processes create a pool, but few use it. Any thread.

    Args:
        threads: number of threads.
        name: name of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._starting = threading.Lock()  # guards _loads and _pool
        self._loads = 0
        self._pool: DaemonPool | None = None

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run the call on a thread of the pool."""
        with self._starting:
            if self._pool is None:
                self._pool = DaemonPool(self._threads, self._name)
            return self._pool.submit(call, *arguments)

    @contextlib.contextmanager
    def files_at_once(self, biggest: int) -> Iterator[int]:
        """Yield how many files one load may have in memory while it is under way. ``biggest``: bytes of the largest."""
        with self._starting:
            self._loads += 1
            share = BUFFERS_BYTES_MAX // self._loads
        try:
            yield max(FILES_MIN, share // max(1, biggest))
        finally:
            with self._starting:
                self._loads -= 1

    def close(self) -> None:
        """Cancel calls that have not begun. Does not wait."""
        with self._starting:
            if self._pool is not None:
                self._pool.shutdown(0.0)


def result_of(future: Future[T]) -> T:
    """Wait for a call; return its result or raise its error.

    Raises:
        StoreClosedError: the call was cancelled.
    """
    try:
        return future.result()
    except CancelledError:
        raise StoreClosedError("the storage was closed") from None
