"""SIGTERM and SIGHUP as an exception, for commands that have something to put away."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Make SystemExit of SIGTERM, and of SIGHUP (a lost connection) unless nohup has it ignored, so that what is
    temporary goes. Nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second one, of either kind, would end the clean-up of the first
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
