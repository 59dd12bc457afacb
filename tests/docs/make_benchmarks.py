"""Writes docs/benchmarks.md and its plot from the last results: ``python -m tests.docs.make_benchmarks``.

The results are in tests/benchmarks/results: ``fs.json`` and ``lookups.json`` by the benchmarks' ``--json``,
``e2e.json`` by ``make e2e``, ``gpu-prompt.json`` by ``make bench-gpu-prompt`` and ``vllm-cuda.json`` by
``make gpu-vllm``. The text, with the figures that no result file holds, is in ``benchmarks_template.md``. The plot
needs matplotlib.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.benchmarks import bench_engine_lookups, bench_fs, bench_s3

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
DOCS = ROOT / "docs"
LOST = " ✗"

VLLM_VERSION = "0.33"
VLLM_HEAD = ("storage", "vLLM's own tier", "kvtiers, `tier`", "kvtiers, `spec`")
#: Storage -> the rows of ``make e2e`` in the columns of VLLM_HEAD.
VLLM_ROWS = {
    "files": ("vLLM's fs tier", "tier on fs", "spec on fs"),
    "S3": ("vLLM's obj tier", "tier on S3", "spec on S3"),
    "files in front of S3": ("", "tier on fs in front of S3", ""),
}
FS_HEAD = ("block", "tmpfs: store", "tmpfs: load", "disk: store", "disk: load")
SHORT_PROMPT_KEYS = 127
GPU_HEAD = ("prompt", "H200, disk", "H200, tmpfs", "H100, `spec`", "H100, `tier`", "H100, vLLM's own")
GPU_ROWS = ("spec on fs", "tier on fs", "vLLM's fs tier")  # of ``make gpu-vllm``, in the last columns of GPU_HEAD

Table = Iterator[Sequence[str]]


def results(name: str) -> Any:
    """A file of tests/benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def prompts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The figures of the rows of ``make e2e`` that time a prompt, by name."""
    return {
        row["name"]: row["figures"] for row in rows if "speedup" in row["figures"] and row["version"] == VLLM_VERSION
    }


def vllm_table(prompts: Mapping[str, Mapping[str, Any]]) -> Table:
    """One a storage. SharedStorageConnector was measured in a former format only, and is left out."""
    for storage, names in VLLM_ROWS.items():
        yield storage, *(first_token(prompts.get(name)) for name in names)


def first_token(figures: Mapping[str, Any] | None) -> str:
    """A prompt's two times to first token, and how many times sooner the second is."""
    if figures is None:
        return "–"
    cold_s, warm_s = figures["cold_ttft_s"], figures["warm_ttft_s"]
    times = cold_s / warm_s
    return f"{cold_s:#.3g} → {warm_s:#.3g} ({times:.{0 if times > 9.5 else 1}f}x)"


def fs_rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One a block size: shares of the speed of plain files. The plot has MB/s."""
    for size, of_size in groupby(sorted(rows, key=lambda row: row["block_bytes"]), lambda row: row["block_bytes"]):
        cells = []
        for row in of_size:  # tmpfs, then disk: sorted() keeps their order
            for way, goal in (("store", bench_fs.STORE_GOAL), ("load", bench_fs.LOAD_GOAL)):
                ratio = row[f"{way}_ratio"]
                cells.append(f"{ratio:.2f}{LOST if ratio < goal else ''}")
        yield (bench_s3.size_text(size), *cells)


def gpu_table(rows: Sequence[Mapping[str, Any]], vllm: Sequence[Mapping[str, Any]]) -> Table:
    """Prompts of a large model, by transformers (H200) and by vLLM (H100), and of a small model by vLLM."""
    on_vllm = {row["name"]: row["figures"] for row in vllm}
    for tokens in sorted({row["tokens"] for row in rows}):
        name = f"{tokens:,} tokens"
        by_root = {row["root"].startswith("/dev/shm"): row for row in rows if row["tokens"] == tokens}
        others = [on_vllm.get(f"{way}: {name}") for way in GPU_ROWS]
        yield f"8B, {name}", *map(first_token, [by_root[False], by_root[True], *others])
    yield "small, 4,097 tokens", *map(first_token, [None, None, *map(on_vllm.get, GPU_ROWS)])


def table(head: Sequence[str], rows: Table) -> str:
    """A Markdown table: a name, and then figures to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def span(values: Iterable[float], form: str) -> str:
    """The least and the most, as "1 to 2"."""
    values = sorted(values)
    return f"{values[0]:{form}} to {values[-1]:{form}}"


def page() -> str:
    """docs/benchmarks.md."""
    fs, lookups, prompts = results("fs")["rows"], results("lookups")["rows"], prompts_of(results("e2e")["rows"])
    shown = {name: prompts[name]["step_p99_over_none_ms"] for names in VLLM_ROWS.values() for name in names if name}
    many = [row for row in lookups if row["requests"] > 1]
    template = Path(__file__).with_name("benchmarks_template.md").read_text(encoding="utf-8")
    return template.format(
        lost=LOST,
        vllm_version=VLLM_VERSION,
        vllm_table=table(VLLM_HEAD, vllm_table(prompts)),
        step_ms=span((ms for name, ms in shown.items() if "vLLM" not in name), ".1f"),
        step_vllm_ms=span((ms for name, ms in shown.items() if "vLLM" in name), ".1f"),
        store_goal=bench_fs.STORE_GOAL,
        load_goal=bench_fs.LOAD_GOAL,
        files_table=table(FS_HEAD, fs_rows(fs)),
        gpu_table=table(GPU_HEAD, gpu_table(results("gpu-prompt")["rows"], results("vllm-cuda")["rows"])),
        first_ms=span((row["first_ms"] for row in many), ".0f"),
        first_goal=f"{bench_engine_lookups.FIRST_GOAL_MS:g}",
        later_ms=span((row["later_ms"] for row in many), ".0f"),
        later_goal=f"{bench_engine_lookups.LATER_GOAL_MS:g}",
        owed_us=span((row["later_us"] for row in lookups if row["keys"] == SHORT_PROMPT_KEYS), ".1f"),
        owed_goal=f"{bench_engine_lookups.OWED_GOAL_US:g}",
        call_us=f"{max(row['call_p99_us'] for row in fs):.0f}",
        call_goal=f"{bench_fs.CALL_GOAL_US:g}",
        stall_ms=f"{max(row['stall_p99'] for row in fs):.1f}",
        stall_goal=f"{bench_fs.STALL_GOAL_MS:g}",
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
    (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
    try:
        draw_fs(results("fs")["rows"]).savefig(DOCS / "benchmarks-fs.png", dpi=100)
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
