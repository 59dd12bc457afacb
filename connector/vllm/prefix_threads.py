"""Threads that read and publish prefixes, and loads that can be given up.

Storage that hangs keeps a thread for good. So nothing waits for one: not the process at its end, and not a request; and
what such a thread reads in the end must not get into blocks that belong to another request by then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from tiers.errors import KVTiersError

T = TypeVar("T")


class DaemonPool:
    """A few threads for calls that may never return. ``ThreadPoolExecutor``'s are joined when the interpreter ends."""

    def __init__(self, threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run it when a thread is free."""
        future: Future[T] = Future()
        self._calls.put((future, partial(call, *arguments)))
        return future

    def shutdown(self, within_s: float) -> None:
        """Cancel what has not begun and end the threads; those that hang in a call are left behind."""
        with contextlib.suppress(queue.Empty):
            while waiting := self._calls.get_nowait():
                waiting[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:  # noqa: BLE001 - a thread's edge: whoever has the future sees it
                    future.set_exception(e)
            del waiting, future, call  # or an idle thread would keep the last one's tensors


class Load:
    """A load under way. Its thread writes into the paged buffers, but never after it was given up.

    Attributes:
        blocks: ids of the blocks that it fills.
        late_at: when it is given up, on ``time.monotonic``.
        future: of the call that does it; set by who submits it.
    """

    future: Future[None]

    def __init__(self, blocks: list[int], late_at: float) -> None:
        self.blocks = blocks
        self.late_at = late_at
        self._given_up = False
        self._writing = threading.Lock()

    def write(self, call: Callable[[], None]) -> None:
        """Let the thread write. Only memory is touched in ``call``: ``give_up`` waits for its end.

        Raises:
            KVTiersError: it was given up.
        """
        with self._writing:
            if self._given_up:
                raise KVTiersError("it was given up")
            call()

    def give_up(self) -> None:
        """From here on its thread writes nothing."""
        self.future.cancel()
        with self._writing:
            self._given_up = True
