"""Runs coroutines side by side in the caller's thread. They wait for sockets and threads only."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import coroutine
from typing import Any, Final, TypeVar

from ...errors import StoreError, StoreUnavailableError
from ..watchdog import settle, start

T = TypeVar("T")

# A server nearby needs few requests at once, and so few connections. If nothing happens for SILENCE_S, the server is
# far away, and twice as many are made at once. (SeaweedFS answered 64 keys in 28 ms by 8 at once, in 21 by 16.)
AT_ONCE_FIRST: Final = 16
SILENCE_S: Final = 0.002

_ENDLESS: Final = float("inf")


@coroutine
def readable(sock: socket.socket, until: float) -> Generator[tuple[int, float], None, None]:
    """Wait until the socket is readable (also at its end, or after an error), or until a time of the clock."""
    yield sock.fileno(), until


@coroutine
def _alone() -> Generator[None, None, None]:
    """Wait until no coroutine waits for a socket."""
    yield


class Threads:
    """Threads for calls that block, started as needed and used again. Only the thread of ``run_all`` uses it.

    Args:
        name: of each thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._all: list[_Helper] = []
        self._free: list[_Helper] = []

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, each after its current call. Does not wait for them."""
        for helper in self._all:
            helper.calls.put(None)
            helper.ended.close()

    async def run(self, call: Callable[[], T]) -> T:
        """Wait for a call that blocks.

        If no further thread can be started, the call runs in the caller's thread, but only once all other coroutines
        wait for the same: those that wait for sockets may hold connections, for which the call may wait.
        """
        if self._free:
            helper = self._free.pop()
        else:
            try:
                helper = _Helper(self._name)
            except (OSError, StoreUnavailableError):  # too many descriptors or threads
                await _alone()
                return call()
            self._all.append(helper)
        called: Future[T] = Future()
        helper.calls.put(partial(settle, called, call))
        await readable(helper.ended, _ENDLESS)
        helper.ended.recv(1)
        self._free.append(helper)
        return called.result()


class _Helper:
    """A thread that runs one call after another.

    Attributes:
        calls: must not raise. None ends the thread.
        ended: gets a byte for each call that has ended.
    """

    def __init__(self, name: str) -> None:
        self.calls = SimpleQueue[Callable[[], None] | None]()
        self.ended, self._ending = socket.socketpair()
        try:
            start(name, self._run)
        except StoreUnavailableError:
            self.ended.close()
            self._ending.close()
            raise

    def _run(self) -> None:
        with self._ending, contextlib.suppress(OSError):  # OSError: ``ended`` was closed
            while (call := self.calls.get()) is not None:
                call()
                self._ending.send(b"\0")


def run_all(
    work: Callable[[str], Coroutine[Any, Any, T]], names: Iterable[str], at_once_max: int, clock: Callable[[], float]
) -> dict[str, T | StoreError]:
    """Run ``work`` for each name, at most ``at_once_max`` at once. Returns its results or StoreErrors by name."""
    outcomes: dict[str, T | StoreError] = {}
    waiting: dict[int, tuple[str, Coroutine[Any, Any, T], float]] = {}  # descriptor -> coroutine that waits for it
    last: deque[tuple[str, Coroutine[Any, Any, T]]] = deque()  # each waits until ``waiting`` is empty
    rest = iter(names)
    limit = min(AT_ONCE_FIRST, at_once_max)

    def go_on(name: str, each: Coroutine[Any, Any, T]) -> None:
        try:
            if (wait := each.send(None)) is None:
                last.append((name, each))
            else:
                fd, until = wait
                waiting[fd] = name, each, until
        except StopIteration as e:
            outcomes[name] = e.value
        except StoreError as e:
            outcomes[name] = e.with_traceback(None)  # the traceback refers to ``outcomes``

    try:
        while True:
            while len(waiting) + len(last) < limit and (name := next(rest, None)) is not None:
                go_on(name, work(name))
            if not waiting:
                if not last:
                    return outcomes
                go_on(*last.popleft())
                continue
            poller = select.poll()
            for fd in waiting:
                poller.register(fd, select.POLLIN)
            wait_s = max(0.0, min(until for _, _, until in waiting.values()) - clock())
            if len(waiting) == limit < at_once_max:
                wait_s = min(wait_s, SILENCE_S)
            woken = {fd for fd, _ in poller.poll(None if wait_s == _ENDLESS else wait_s * 1e3)}
            if not woken:
                limit = min(2 * limit, at_once_max)
            now = clock()
            woken.update([fd for fd, (_, _, until) in waiting.items() if until <= now])
            for fd in woken:
                name, each, _ = waiting.pop(fd)
                go_on(name, each)
    finally:
        for each in [each for _, each, _ in waiting.values()] + [each for _, each in last]:
            each.close()
