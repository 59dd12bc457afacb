"""DaemonPool: threads for calls that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool:
    """A fixed number of daemon threads for calls that may never return. Any thread may use it.

    Unlike with ``ThreadPoolExecutor``, the interpreter exits without waiting for them. Cancelled calls keep no data.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._changed = threading.Condition()  # guards the two fields below
        self._waiting: dict[Future[Any], Callable[[], Any]] = {}  # in order of submission
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run ``call`` when a thread is free. After ``shutdown`` the returned future is cancelled at once."""
        future: Future[T] = Future()
        with self._changed:
            if self._ended:
                future.cancel()
                return future
            self._waiting[future] = partial(call, *arguments)
            self._changed.notify()
        future.add_done_callback(self._forget)
        return future

    def shutdown(self, within_s: float) -> None:
        """Cancel calls that have not begun and end the threads. Threads that hang in a call are left behind."""
        with self._changed:
            self._ended = True
            cancelled = list(self._waiting)
            self._changed.notify_all()
        for future in cancelled:
            future.cancel()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                future, call = next(iter(self._waiting.items()))
                del self._waiting[future]
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:  # noqa: BLE001 - nothing catches it in a thread; the future passes it on
                    future.set_exception(e)
            del future, call  # so that an idle thread does not keep its last call's tensors alive

    def _forget(self, future: Future[Any]) -> None:
        with self._changed:
            self._waiting.pop(future, None)
