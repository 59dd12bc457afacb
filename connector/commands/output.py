"""Prints the commands' results, errors, progress and JSON documents."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Generic, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.prompt import Confirm
from rich.table import Table

from ...tiers.config.values import human_bytes
from ...tiers.errors import printable, printable_lines
from ...version import version
from .session import ExitCode, session

QUIET_S = 2.0  # faster work shows no progress
TICK_S = 0.2
TABLE_CELLS_MAX = 10_000  # the widest row
COUNT_EVERY = 1000  # blobs: looking at the clock for each would slow a listing down

T = TypeVar("T")
R = TypeVar("R")


class _Console(Console):
    """A console that raises BrokenPipeError, so that the command line can exit quietly."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


class Ticker:
    """Shows progress on standard error once the work has taken ``QUIET_S``: amount, rate, and time left if known.

    Silent if standard error is not a terminal, or with ``--no-progress``.

    Args:
        what: the work, in a few words.
        total: total amount of work, in the same unit; None: not known.
        unit: unit of the amounts, such as "blocks"; "bytes" is shown as KiB, MiB, …
        done: work that was done before, which does not count for the rate.
    """

    def __init__(self, what: str, total: float | None = None, *, unit: str = "", done: float = 0) -> None:
        self._unit = unit
        self._done_before = done
        console = Console(stderr=True)
        is_known = total is not None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *([BarColumn()] if is_known else []),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            *([TextColumn("left:"), TimeRemainingColumn()] if is_known else []),
            console=console,
            get_time=time.monotonic,
            transient=True,
            disable=not console.is_terminal or not session().shows_progress,
        )
        self._task = self._progress.add_task(cell(what), total=total, completed=int(done), done="")
        self._started_at = self._told_at = time.monotonic()
        self._shown = False

    def __enter__(self) -> Ticker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def count(self, done: int) -> None:
        """Show that ``done`` units are done."""
        self.tell(done, human_bytes(done) if self._unit == "bytes" else f"{done:,} {self._unit}")

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and count them."""
        for count, item in enumerate(items, 1):
            yield item
            if count % COUNT_EVERY == 0:
                self.count(count)

    def tell(self, done: float, text: str) -> None:
        """Show ``text`` as the progress. Cheap enough to call for every thousandth blob."""
        now = time.monotonic()
        if now - self._told_at < TICK_S:
            return
        self._told_at = now
        took_s = now - self._started_at
        if self._unit:
            rate = (done - self._done_before) / took_s
            text += f", {human_bytes(rate)}/s" if self._unit == "bytes" else f", {rate:,.0f} {self._unit}/s"
        self._progress.update(self._task, completed=done, done=cell(text))  # also before it is shown, for the rate
        if not self._shown and took_s >= QUIET_S:
            self._progress.start()
            self._shown = True


def make_console() -> Console:
    """Create a console for standard output. In a pipe, lines are not wrapped, so each finding is one line."""
    return _Console(soft_wrap=not os.isatty(1))


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print to standard output or error, on one line even if the terminal is narrow."""
    _Console(soft_wrap=True, stderr=to_stderr).print(printable(text), markup=False, highlight=False)


def show(table: Table) -> None:
    """Print a table to standard output, one line for each row, so that names can be copied.

    Omits the lines around cells in a pipe, and if the table does not fit into the terminal.
    """
    console = _Console()
    width = console.measure(table, options=console.options.update(max_width=TABLE_CELLS_MAX)).maximum
    if not console.is_terminal or width > console.width:
        table.box = None
        table.pad_edge = False
    _Console(width=width, soft_wrap=True).print(table)


def cell(text: str) -> str:
    """Escape a text for rich, which would read text in brackets as markup."""
    return escape(printable(text))


def note(text: str) -> None:
    """Print a remark to standard error, unless ``--quiet``. It is not an error."""
    if session().verbosity >= 0:
        _to_stderr(text)


def complain(text: str) -> None:
    """Print an error to standard error, on one line even if the terminal is narrow. It also appears in the JSON."""
    current = session()
    current.errors.append(printable_lines(text))
    _to_stderr(f"kvtiers {current.command}: {text}" if current.command else f"kvtiers: {text}")


def _to_stderr(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(printable_lines(text), markup=False, highlight=False)


def refuse(text: str) -> typer.Exit:
    """Print an error for bad input, and return the exception for the caller to raise."""
    complain(text)
    return typer.Exit(ExitCode.BAD_INPUT)


def answer(result: object | None, *, ok: bool = True) -> None:
    """Print a command's JSON document: one line, in the same shape for each command.

    Args:
        result: a dataclass; None: the command ended before it had a result.
    """
    current = session()
    print(json.dumps(asdict(Document(current.command, version(), ok, result, current.errors))))
    current.has_answered = True


@dataclass(frozen=True, slots=True)
class Document(Generic[R]):
    """The ``--json`` output of each command, on one line, also after an error. Later versions may add fields.

    Attributes:
        ok: whether the exit code is 0.
        result: null if the command ended before it had a result.
        errors: the lines that were also printed to standard error.
    """

    command: str
    version: str
    ok: bool
    result: R | None
    errors: list[str]


def confirm(question: str) -> bool:
    """Ask on the terminal. Without a terminal nobody can answer, so the command is refused."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise refuse("cannot ask for confirmation, because standard input is not a terminal; give --yes")
    return Confirm.ask(cell(question), console=Console(stderr=True), default=False)


def human_age(seconds: float) -> str:
    """Format a duration, such as "3d"."""
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / unit_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def counted(count: int, unit: str = "block", units: str = "") -> str:
    """Format a number of things, such as "1 block" or "2,000 blocks". ``units``: the plural, if it is irregular."""
    return f"{count:,} {unit if count == 1 else units or f'{unit}s'}"
