"""What ``bench_gpu`` measured: rows, kept as they come, and shown at the end."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

KIB = 1 << 10


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        gb_s: of jobs in a row, from the first submit to the end of the last job.
        reference_gb_s: ceiling (CUDA) or memcpy (CPU).
        ratio: of this to the reference, in the same round.
        alone_gb_s, alone_ratio: of a job that nothing comes before or after.
        copy_gb_s: of that one by the time that the handler reports, of the copies; of both at once, the slower one's.
        submit_us: of that one, on the calling thread, right after the reference: it has driven this code out of the
            caches where the job is large.
        submit_next_us: of a job that follows another.
        copied_by: on CUDA, what stores/loads went by, and whether the region could not be pinned.
    """

    method: str
    direction: str
    page_bytes: int
    pages: int
    job_bytes: int
    gb_s: float
    reference_gb_s: float
    ratio: float
    alone_gb_s: float
    alone_ratio: float
    copy_gb_s: float
    submit_us: float
    submit_next_us: float
    copied_by: str = ""


class Report:
    """What was measured so far, kept in the file at ``path``; what goes on is said at once, also in a pipe.

    Attributes:
        failed: whether something could not be measured.
    """

    def __init__(self, facts: dict[str, Any], path: Path | None, console: Console, status: Status) -> None:
        self.data: dict[str, Any] = {**facts, "rows": []}
        self.failed = False
        self._path, self._console, self._status = path, console, status
        self._said: set[str] = set()

    def add(self, name: str, measured: Any) -> None:
        if name == "rows":
            self.data["rows"] += [asdict(row) for row in measured]
        else:
            self.data[name] = measured
        if self._path is not None:  # each time: a driver that takes the process with it must not take the rows
            self._path.write_text(json.dumps(self.data, indent=1) + "\n")

    def say(self, text: str) -> None:
        """Once, however many shapes it holds for."""
        if text not in self._said:
            self._said.add(text)
            self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """What fails inside is left out."""
        self._status.update(f"measuring {what}")
        if not self._console.is_terminal:  # where a status shows nothing
            self.say(f"measuring {what}")
        try:
            yield
        except RuntimeError as error:  # torch's and CUDA's, and a transfer that failed
            self.failed = True
            self.say(f"FAILED: {what}: {error}")


def print_report(report: dict[str, Any], console: Console) -> None:
    """A line a row at 120 columns."""
    title = f"{report['device']}, {report['date']}: GB/s in a row (of {report['against']}), alone; submit µs (next)"
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("page", "pages", "method", "store", "load", "both", "submit"):
        table.add_column(column, justify="right", no_wrap=True)
    grouped: dict[tuple[int, int, str], dict[str, Row]] = {}
    for fields in report["rows"]:
        row = Row(**fields)
        grouped.setdefault((row.page_bytes, row.pages, row.method), {})[row.direction] = row
    for (page_bytes, pages, method), ways in grouped.items():
        copied_by = ways["both"].copied_by
        how = f"{method}: {copied_by}" if method == "auto" or "unpinned" in copied_by else method
        cells = [f"{row.gb_s:.2f} ({row.ratio:.2f}), {row.alone_ratio:.2f}" for row in ways.values()]
        one, another = (max(getattr(ways[way], f"submit{of}_us") for way in ("store", "load")) for of in ("", "_next"))
        table.add_row(f"{page_bytes // KIB} KiB", str(pages), how, *cells, f"{one:.0f} ({another:.0f})")
    console.print(table)
    for beside in report.get("matmul", ()):
        console.print(f"matmul beside {beside['page_bytes'] // KIB} KiB pages: {beside['slower']:+.1%}")
    if "stall_ms" in report:
        console.print("a 1 ms thread is late by, ms:", {key: round(ms, 3) for key, ms in report["stall_ms"].items()})


def save_png(report: dict[str, Any], path: Path, console: Console) -> None:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        console.print("no PNG: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows = [Row(**fields) for fields in report["rows"]]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), sharey=True)
    for axis, direction in zip(axes, ("store", "load", "both"), strict=True):
        for method in dict.fromkeys(row.method for row in rows):
            best: dict[int, float] = {}
            for row in rows:
                if (row.method, row.direction) == (method, direction):
                    best[row.page_bytes] = max(best.get(row.page_bytes, 0.0), row.ratio)
            axis.plot([page / KIB for page in sorted(best)], [best[page] for page in sorted(best)], "o-", label=method)
        axis.set(xscale="log", xlabel="page, KiB", title=direction)
        axis.axhline(1.0, color="grey", linewidth=0.5)
    axes[0].set_ylabel(f"of {report['against']}, best of all job sizes")
    axes[0].legend()
    figure.suptitle(f"{report['device']}, {report['date']}")
    figure.savefig(path)
    console.print(f"wrote {path}")


def target(path: Path, report: dict[str, Any], suffix: str) -> Path:
    """The path itself, or where it is no such file's a folder, and in it a file named after the device and the date."""
    if path.suffix == suffix:
        return path
    path.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^A-Za-z0-9]+", "-", report["device"]).strip("-").lower()
    return path / f"gpu-{device}-{report['date']}{suffix}"
