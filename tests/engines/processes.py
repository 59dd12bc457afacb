"""Runs work in two processes at once, and kills processes meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress


def in_two_processes(work: Callable[[int], None]) -> None:
    """Call ``work(0)`` here and ``work(1)`` in a child process meanwhile. Fails if either does."""
    child = os.fork()
    if not child:
        try:
            work(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    work(0)
    assert os.waitpid(child, 0)[1] == 0


@contextmanager
def killing(pids: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Kill processes three times a second."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.3):
            for pid in pids():
                with suppress(ProcessLookupError):  # it ended by itself
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()
