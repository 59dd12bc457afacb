"""Deadlines for requests of clients whose own timeouts apply only to single socket calls.

Watchdog ends a request by shutting down its socket. For a client that hides the socket, ``begin`` makes the request in
a separate thread, which the caller can stop waiting for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ..errors import StoreUnavailableError

T = TypeVar("T")


class Watchdog:
    """Calls a function when a deadline passes, for example to end a blocked read by shutting its socket down.

    It has one thread, which the first guard starts. After ``close``, the thread ends as soon as no block is guarded. A
    guarded block that ends in time, as nearly all do, does not wake the thread. ``_changed`` owns every field.

    Args:
        interval_s: longest time between two checks of the deadlines. The usual length of a deadline is best.
        clock: monotonic seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._changed = threading.Condition()
        self._guarded: dict[object, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")
        self._closed = False

    @contextmanager
    def guard(self, end: Callable[[], None], deadline: float) -> Iterator[None]:
        """Call ``end`` once if the block still runs at ``deadline``. ``end`` must not raise or wait.

        Raises:
            StoreUnavailableError: the watchdog's thread cannot be started; the block does not run.
        """
        guard = object()
        with self._changed:
            if self._thread is None:
                # The thread waits for the lock before its first check. If the start fails, ``_thread`` stays None, so
                # the next call tries again.
                self._thread = start("kvtiers-s3-watchdog", self._watch)
            elif deadline < self._wakes_at:
                self._changed.notify()
            self._guarded[guard] = deadline, end
        try:
            yield
        finally:
            with self._changed:
                self._guarded.pop(guard, None)
                if self._closed:
                    self._changed.notify()

    def close(self) -> None:
        """End the thread as soon as no block is guarded."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._guarded or not self._closed:
                now = self._clock()
                for guard, (deadline, end) in list(self._guarded.items()):
                    if deadline <= now:
                        del self._guarded[guard]
                        end()
                ends = [deadline for deadline, _ in self._guarded.values()]
                self._wakes_at = min(now + self._interval_s, *ends) if ends else float("inf")
                self._changed.wait(self._wakes_at - now if ends else None)
            self._thread = None


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` in a new thread.

    Raises:
        StoreUnavailableError: this process, its user or its container has reached its limit of threads.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise StoreUnavailableError("this process cannot start another thread") from None
    return thread


def begin(name: str, call: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread. The caller may stop waiting for the returned future.

    Raises:
        StoreUnavailableError: see ``start``.
    """
    future: Future[T] = Future()
    start(name, partial(settle, future, call))
    return future


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Call a function, and give its result or exception to the future."""
    try:
        future.set_result(call())
    except BaseException as e:  # noqa: BLE001 - top of a thread: the exception goes to the future's waiter
        future.set_exception(e)
