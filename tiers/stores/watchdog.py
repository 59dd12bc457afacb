"""Deadlines for clients whose own timeouts are per socket call.

Watchdog ends a request by its socket. Where a client hides that, ``begin`` makes the request in a thread that need not
be waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from kvtiers.tiers.errors import StoreUnavailableError

T = TypeVar("T")

IDLE_S: Final = 60.0


class Watchdog:
    """Calls a function whose time is up, such as one that shuts a socket and so ends its reader.

    One thread, which the first guard starts. It ends when nothing was guarded for ``IDLE_S``, and after ``close`` when
    nothing is; a later guard starts a new one. ``_changed`` owns every field. A block that ends in time, as nearly all
    do, does not wake it.

    Args:
        interval_s: it looks so often at least; best as long as deadlines usually are.
        clock: monotonic seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._changed = threading.Condition()
        self._guarded: dict[object, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")
        self._used_at = clock()
        self._closed = False

    @contextmanager
    def guard(self, end: Callable[[], None], deadline: float) -> Iterator[None]:
        """Have ``end`` called once if the block still runs at ``deadline``. It must not raise or wait.

        Raises:
            StoreUnavailableError: no thread can be started to do so; the block is not run.
        """
        guard = object()
        with self._changed:
            if self._thread is None:
                # It waits for the lock before it looks. Set only if it has started: else the next call tries again.
                self._thread = start("kvtiers-s3-watchdog", self._watch)
            elif deadline < self._wakes_at:
                self._changed.notify()
            self._guarded[guard] = deadline, end
            self._used_at = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._guarded.pop(guard, None)
                if self._closed:
                    self._changed.notify()

    def close(self) -> None:
        """End the thread as soon as nothing is guarded."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._guarded or not self._closed:
                now = self._clock()
                if not self._guarded and now - self._used_at > IDLE_S:
                    break
                for guard, (deadline, end) in list(self._guarded.items()):
                    if deadline <= now:
                        del self._guarded[guard]
                        end()
                self._wakes_at = min([now + self._interval_s, *(deadline for deadline, _ in self._guarded.values())])
                self._changed.wait(self._wakes_at - now)
            self._thread = None


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run it in a thread of its own.

    Raises:
        StoreUnavailableError: this process, its user or its container has as many threads as it may.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise StoreUnavailableError("this process cannot start another thread") from None
    return thread


def run_in_threads(name: str, count: int, work: Callable[[], None]) -> None:
    """Run it in so many threads, the caller's among them, or as many as can be started; returns when all are done."""
    threads = []
    with suppress(StoreUnavailableError):
        for i in range(1, count):
            threads.append(start(f"{name}-{i}", work))
    work()
    for thread in threads:
        thread.join()


def begin(name: str, call: Callable[[], T]) -> Future[T]:
    """Call it in a thread of its own, which need not be waited for.

    Raises:
        StoreUnavailableError: as ``start``'s.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as e:  # noqa: BLE001 - a thread's edge: whoever waits gets it
            future.set_exception(e)

    start(name, work)
    return future
