"""One run of the command line: its common options, its exit code, and how it ends early.

Imports only the standard library, so that ``kvtiers --version`` and ``--help`` start quickly.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum

CONFIG_VARIABLE = "KVTIERS_CONFIG"  # the default of every command's config argument; engines read it as well


class ExitCode(IntEnum):
    """Exit codes of commands; ``EXIT_CODES`` explains them."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERNAL = 70
    HUNG_UP = 129
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


EXIT_CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.FAILED: "the command ran and found something wrong: bad blocks, a problem, or storage that failed",
    ExitCode.BAD_INPUT: "bad usage or configuration, or the output could not be written",
    ExitCode.INTERNAL: "a bug in kvtiers; the option `-v` shows where",
    ExitCode.HUNG_UP: "the terminal was closed (SIGHUP)",
    ExitCode.INTERRUPTED: "Ctrl-C; the last line says what was done and how to continue",
    ExitCode.BROKEN_PIPE: "the program that read the output has ended, such as `head`",
    ExitCode.TERMINATED: "ended by SIGTERM",
}

_LEVELS = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


@dataclass(slots=True)
class Session:
    """State of one run of the command line. Used by the main thread only.

    Attributes:
        command: name of the running command.
        verbosity: number of ``-v`` minus number of ``-q``.
        log_level: the value of ``--log-level``; it takes precedence over ``verbosity``.
        shows_progress: whether progress may be shown.
        as_json: the command was asked for JSON, so errors are printed as JSON too.
        has_answered: the command has printed its JSON document.
        errors: the errors shown so far.
        if_interrupted: returns what was done and how to continue, for Ctrl-C.
    """

    command: str = ""
    verbosity: int = 0
    log_level: str | None = None
    shows_progress: bool = True
    as_json: bool = False
    has_answered: bool = False
    errors: list[str] = field(default_factory=list)
    if_interrupted: Callable[[], str] = lambda: "nothing was changed"

    def apply(self, *, verbose: int, quiet: int, log_level: str | None, no_progress: bool) -> None:
        """Take over the common options, which may come before the command's name and after it."""
        self.verbosity += verbose - quiet
        self.shows_progress = self.shows_progress and not no_progress and self.verbosity >= 0
        self.log_level = log_level or self.log_level
        if self.log_level is not None or self.verbosity:
            _LOGGER.setLevel(self._level())

    def _level(self) -> int:
        if self.log_level is not None:
            return logging.getLevelNamesMapping()[self.log_level.upper()]
        return _LEVELS[min(2, max(-1, self.verbosity))]


_LOGGER = logging.getLogger("kvtiers")
_CURRENT: ContextVar[Session | None] = ContextVar("kvtiers_session", default=None)


def session() -> Session:
    """The running session. Outside a run, such as in a test of one function, a new one."""
    return _CURRENT.get() or Session()


@contextmanager
def new_session() -> Iterator[Session]:
    """Make a session current, and show the log lines of kvtiers on standard error until its end."""
    current = Session()
    token = _CURRENT.set(current)
    level = _LOGGER.level
    handler = _LogLines()
    _LOGGER.addHandler(handler)
    try:
        yield current
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)
        _CURRENT.reset(token)


class _LogLines(logging.Handler):
    """Writes log lines to standard error. Any thread may log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"kvtiers: {record.levelname.lower()}: {self.format(record)}", file=sys.stderr)
        except (OSError, ValueError):  # standard error is closed
            pass


@contextmanager
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
