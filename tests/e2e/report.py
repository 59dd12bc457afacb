"""The report of an end-to-end run: Markdown for people, JSON for machines, the same figures in both."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.e2e.lab import Row


def write_report(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> Path:
    """Write ``e2e.md`` and ``e2e.json``; returns the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "cores": os.cpu_count(), **facts}
    facts["machine"] = platform.machine()
    (folder / "e2e.json").write_text(json.dumps({"facts": facts, "rows": [row.as_dict() for row in rows]}, indent=2))
    path = folder / "e2e.md"
    path.write_text(markdown(rows, facts))
    return path


def markdown(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """The report's text."""
    green = sum(row.ok for row in rows)
    lines = [
        "# End to end inside vLLM",
        "",
        f"{green} of {len(rows)} rows green. " + ", ".join(f"{name}: {value}" for name, value in facts.items()) + ".",
        "",
        "## Reuse: a writer's process, then a fresh reader's",
        "",
        "The last of the times is the median of five more answers of the reader, its caches emptied before each.",
        "A step of the scheduler, the writer's or the reader's, is idle while nothing can be computed: ours pause.",
        "",
        "| vLLM | way | cold first token s | warm first token s | speed-up | warm again s | tokens reused "
        "| scheduler step p99 ms (over none) | idle | ok |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    reuse = [row for row in rows if "warm_ttft_s" in row.figures]
    for row in reuse:
        figures = row.figures
        lines.append(
            f"| {row.version} | {row.name} | {figures['cold_ttft_s']:.3f} | {figures['warm_ttft_s']:.3f} "
            f"| {figures['speedup']:.1f} | {figures['warm_again_ttft_s']:.3f} | {figures['reused_tokens']} "
            f"| {figures['step_p99_ms']:.2f} ({figures['step_p99_over_none_ms']:+.2f}) "
            f"| {figures['idle_step_p99_ms']:.2f} | {_ok(row)} |"
        )
    lines += ["", "## Harm: what happens to the storage, and the tokens stay the same", ""]
    lines += ["| vLLM | what | figures | ok |", "|---|---|---|---|"]
    for row in rows:
        if row not in reuse:
            shown = ", ".join(f"{name} {_figure(value)}" for name, value in row.figures.items())
            lines.append(f"| {row.version} | {row.name} | {shown} | {_ok(row)} |")
    failed = [row for row in rows if not row.ok]
    if failed:
        lines += ["", "## What failed", ""]
        for row in failed:
            lines += [f"### vLLM {row.version}, {row.name}", "", *(f"    {line}" for line in _lines(row)), ""]
    return "\n".join(lines) + "\n"


def _lines(row: Row) -> list[str]:
    return [line for failure in row.failures for line in failure.splitlines()]


def _ok(row: Row) -> str:
    if not row.ok:
        return "NO"
    return "yes, at the second attempt" if "first_attempt" in row.figures else "yes"


def _figure(value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3f}" if isinstance(value, float) and not value.is_integer() else f"{value:g}"
