"""Writes docs/benchmarks.md and its plots from the last results: ``python -m tests.docs.make_benchmarks``.

The results are in tests/benchmarks/results: ``fs.json``, ``s3.json`` and ``lookups.json`` by the benchmarks'
``--json``, ``e2e.json`` by ``make e2e``, and ``by_hand.md``, which is text. The plots need matplotlib.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtiers.tiers.tier.lookup import LookupOptions
from tests.benchmarks import bench_engine_lookups, bench_fs, bench_s3
from tests.benchmarks.bench_fs import MIB
from tests.benchmarks.s3_contenders import THREADS
from tests.e2e.lab import Row
from tests.e2e.report import markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
DOCS = ROOT / "docs"
LOST = " ✗"

HEAD = f"""\
# Benchmarks

Written by `python -m tests.docs.make_benchmarks` from the results in `tests/benchmarks/results`, all of one virtual
machine with 2 cores whose speed drifts: within a run, ratios are what counts. A goal that was missed is marked{LOST}.
Speeds are MB/s, medians of rounds.

**Measured before a change.** The figures of `fs`, `nfs` and `s3` tiers on this page are older than the two processes in
which a tier's I/O runs since 28 November 2026 (before: a process a thread). Measured side by side on two cores and
tmpfs, in jobs of up to 8 MiB with blocks of 128 KiB, 1 MiB and 8 MiB, the tier now stores 1.20, 1.22 and 1.15 times as
much beside an engine that runs Python all the time, and loads 2.07, 1.53 and 1.90 times as much. Beside an engine that
sleeps it stores 0.83, 0.84 and 0.88 times as much, and loads 0.92, 0.88 and 0.95 times as much.

## Files (`make bench-fs`)

Sealed and verified, through the whole tier. Goals: store {bench_fs.STORE_GOAL} and load {bench_fs.LOAD_GOAL} of the
same files by plain open, pwritev / preadv and close; meanwhile a thread that should wake every millisecond is late by
{bench_fs.STALL_GOAL_MS:g} ms at most (p99), and a scheduler's call takes {bench_fs.CALL_GOAL_US:g} µs. `busy`: store /
load while the engine's thread runs Python all the time. A job is submitted when the one before has ended: its way to
the worker processes and back, 1.5 ms, counts.
"""
FS_HEAD = ("", "job", "store", "of raw", "load", "of raw", "memcpy", "busy", "stall p99 ms", "call p99 µs")
S3_TEXT = f"""
## S3 (`make bench-s3`)

{THREADS} threads. `http` and `socket` are ceilings that know nothing of S3: http.client, and requests written by hand.
`nixl` is NIXL's OBJ plugin, which neither seals nor verifies. Rows `obstore` were measured when kvtiers moved blocks by
obstore; `make bench-s3` measures the client that it has now. Goals of `kvtiers` (in worker processes, as the tier runs
it): {bench_s3.HTTP_GOAL} of `http` from 1 MiB, {bench_s3.BOTO3_GOAL:g}x boto3 at 256 KiB, NIXL's speed,
{bench_s3.CPU_GOAL_MS} ms of CPU a 256 KiB block, stalls of {bench_s3.STALL_GOAL_MS:g} ms (p99).
"""
LOOKUPS_TEXT = f"""
## Lookups (`make bench-lookups`)

What an engine gets: requests wait in `BlockManager`, whose tier is on files (`fs`) or on storage that
answers so many lookups a second. CPU is the scheduler thread's. In the first step all keys are new. In a later one each
key is asked for again, answers that came included. In a quiet one each request is only asked whether it is waiting.
`a dict` is the same loop over a dictionary. Goals: all found, or the prefix known after {LookupOptions().total_s:g} s;
{bench_engine_lookups.OWED_GOAL_US:g} µs a key; {bench_engine_lookups.FIRST_GOAL_MS:g} and
{bench_engine_lookups.LATER_GOAL_MS:g} ms with 32 requests.
"""
S3_HEAD = ("", "PUT", "of http", "GET", "of http", "CPU ms a block", "stall p99 ms")

Judge = Callable[[float], bool]


def _cell(value: float, form: str = ",.0f", good: Judge = lambda _: True) -> str:
    return f"{value:{form}}" + ("" if good(value) else LOST)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1), *(f"| {' | '.join(row)} |" for row in rows)]


def fs_rows(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """One a file system and block size."""
    for row in rows:
        yield (
            f"{row['where']}, {bench_s3.size_text(row['block_bytes'])}",
            f"{row['job_bytes'] // MIB} MiB",
            _cell(row["store"]),
            _cell(row["store_ratio"], ".2f", lambda ratio: ratio >= bench_fs.STORE_GOAL),
            _cell(row["load"]),
            _cell(row["load_ratio"], ".2f", lambda ratio: ratio >= bench_fs.LOAD_GOAL),
            _cell(row["memcpy"]),
            f"{row['busy_store']:,.0f} / {row['busy_load']:,.0f}",
            _cell(row["stall_p99"], ".1f", lambda ms: ms <= bench_fs.STALL_GOAL_MS),
            _cell(row["call_p99_us"], ".0f", lambda us: us <= bench_fs.CALL_GOAL_US),
        )


def lookup_rows(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """One a storage and number of keys; what is not judged has no goal."""
    for row in rows:
        cells = bench_engine_lookups.cells(bench_engine_lookups.Row(**row))
        many = row["requests"] > 1
        bad = {
            2: row["found"] < row["requests"] * row["keys"] and row["seconds"] < LookupOptions().total_s,
            5: many and row["first_ms"] > bench_engine_lookups.FIRST_GOAL_MS,
            6: many and row["later_ms"] > bench_engine_lookups.LATER_GOAL_MS,
            7: row["later_us"] > bench_engine_lookups.OWED_GOAL_US,
        }
        yield [cell + (LOST if bad.get(place) else "") for place, cell in enumerate(cells)]


def s3_rows(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """One a server, block size and client; the goals are kvtiers'."""
    for row in rows:
        ours = row["client"] in ("kvtiers", "obstore")
        large = row["block_bytes"] >= MIB

        def ratio(name: str, row: dict[str, Any] = row, judged: bool = ours and large) -> str:
            value = row[name]
            return "" if value is None else _cell(value, ".2f", lambda r: not judged or r >= bench_s3.HTTP_GOAL)

        def stall(name: str, row: dict[str, Any] = row, judged: bool = ours) -> str:
            return _cell(row[name], ".1f", lambda ms: not judged or ms <= bench_s3.STALL_GOAL_MS)

        yield (
            f"{row['where']}, {bench_s3.size_text(row['block_bytes'])}, {row['client']}",
            _cell(row["put"]),
            ratio("put_ratio"),
            _cell(row["get"]),
            ratio("get_ratio"),
            f"{row['put_cpu_ms']:.2f} / {row['get_cpu_ms']:.2f}",
            f"{stall('put_stall_p99')} / {stall('get_stall_p99')}",
        )


def page() -> str:
    """docs/benchmarks.md."""
    fs, s3, e2e, lookups = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("fs", "s3", "e2e", "lookups")
    )
    asked = [
        f"Lookups asked of the file system on {where}: {probed:,.0f} keys/s.  "
        for where, (probed, _) in fs["lookups"].items()
    ]
    places = dict.fromkeys(one["where"] for one in s3["heads"])
    checks = {
        where: ", ".join(f"{one['client']} {one['per_second']:,.0f}" for one in s3["heads"] if one["where"] == where)
        for where in places
    }
    vllm = markdown([Row(**row) for row in e2e["rows"]], e2e["facts"]).replace("\n## ", "\n### ")
    return "\n".join(
        [
            HEAD,
            *_table(FS_HEAD, fs_rows(fs["rows"])),
            "",
            *asked,
            "",
            "![Files](benchmarks-fs.png)",
            LOOKUPS_TEXT,
            f"Measured beside other work: load {lookups['load']:.1f} on {lookups['cores']} cores.",
            "",
            *_table(bench_engine_lookups.HEAD, lookup_rows(lookups["rows"])),
            S3_TEXT,
            f"TCP's congestion control: {s3['congestion_control']}.",
            "",
            *_table(S3_HEAD, s3_rows(s3["rows"])),
            "",
            *(f"Existence checks a second on {where}: {shown}.  " for where, shown in checks.items()),
            "",
            "![S3](benchmarks-s3.png)",
            "",
            vllm.replace("# End to end inside vLLM", "## vLLM (`make e2e`)", 1),
            (RESULTS / "by_hand.md").read_text(),
        ]
    )


def draw_fs(rows: Sequence[dict[str, Any]]) -> Any:
    """Bars of plain files and of kvtiers, for each file system and way; needs matplotlib."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    places = list(dict.fromkeys(row["where"] for row in rows))
    figure, axes = pyplot.subplots(len(places), 2, figsize=(11, 4 * len(places)), squeeze=False)
    for i, where in enumerate(places):
        here = [row for row in rows if row["where"] == where and row["job_bytes"] == bench_fs.JOB_BYTES]
        for axis, way in zip(axes[i], ("store", "load"), strict=True):
            shown = (
                (f"raw_{way}", "plain files, no seal"),
                (way, "kvtiers"),
                (f"busy_{way}", "kvtiers, busy: the engine's thread runs Python meanwhile (one run)"),
            )
            for k, (name, label) in enumerate(shown):
                at = [x + 0.27 * k for x in range(len(here))]
                rounds = [row.get("rounds", {}).get(name, ()) for row in here]
                bench_s3.bars(axis, at, [row[name] for row in here], rounds, width=0.27, label=label)
            axis.set_xticks([x + 0.27 for x in range(len(here))], [bench_s3.size_text(r["block_bytes"]) for r in here])
            bench_s3.name_axes(axis, f"{way}, {where}", recorded=all(row.get("rounds") for row in here))
            axis.legend(fontsize="x-small", loc="upper left")
    figure.tight_layout()
    return figure


def main() -> None:
    """Write them."""
    (DOCS / "benchmarks.md").write_text(page())
    try:
        draw_fs(json.loads((RESULTS / "fs.json").read_text())["rows"]).savefig(DOCS / "benchmarks-fs.png", dpi=100)
        rows = [bench_s3.Row(**row) for row in json.loads((RESULTS / "s3.json").read_text())["rows"]]
        bench_s3.plot(rows, DOCS / "benchmarks-s3.png")
    except ImportError:
        print("no plots: matplotlib is not installed")


if __name__ == "__main__":
    main()
