"""Turns SIGTERM and SIGHUP into an exception, for commands that must clean up."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP (a lost connection), so that temporary files are removed.

    SIGHUP stays ignored under nohup. Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second signal would interrupt the clean-up
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
