"""The plots of benchmarks show the spread of the rounds if the results have it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.container import BarContainer

from tests.benchmarks import bench_s3
from tests.docs import make_benchmarks


def fs_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((make_benchmarks.RESULTS / "fs.json").read_text())["rows"]
    return rows


def s3_rows() -> list[bench_s3.Row]:
    """Two clients with two block sizes on one server."""
    figures: dict[str, Any] = {
        f"{way}_{name}": 1.0 for way in ("put", "get") for name in ("ratio", "cpu_ms", "stall_p50", "stall_p99")
    }
    return [
        bench_s3.Row(where="nginx", client=client, block_bytes=size, put=100.0 + size, get=200.0, **figures)
        for client in ("http", "kvtiers")
        for size in (1, 2)
    ]


def whiskers(axis: Any) -> list[list[float]]:
    """The lower and the upper end of each bar's whisker, one after the other, by series."""
    found = []
    for bars in axis.containers:
        if isinstance(bars, BarContainer) and bars.errorbar is not None:
            (lines,) = bars.errorbar.lines[2]
            found.append([float(end[1]) for ends in lines.get_segments() for end in ends])
    return found


def test_file_plot_shows_slowest_and_fastest_round() -> None:
    rows = [
        row | {"rounds": {name: [0.5 * row[name], row[name], 2 * row[name]] for name in names}}
        for row in fs_rows()
        for names in [("raw_store", "store", "raw_load", "load")]
    ]
    axis = make_benchmarks.draw_fs(rows).axes[0]
    raw, ours = whiskers(axis)  # busy is one run
    shown = [row for row in rows if row["where"] == rows[0]["where"]][: len(ours)]
    assert ours == pytest.approx([factor * row["store"] for row in shown for factor in (0.5, 2)])
    assert raw == pytest.approx([factor * row["raw_store"] for row in shown for factor in (0.5, 2)])
    assert "whiskers" in axis.get_ylabel()


def test_s3_plot_shows_slowest_and_fastest_round() -> None:
    rows = [replace(row, put_rounds=[row.put - 1, row.put, row.put + 3], get_rounds=[row.get]) for row in s3_rows()]
    axis = bench_s3.draw(rows).axes[0]
    first = [row for row in rows if (row.where, row.client) == (rows[0].where, rows[0].client)]
    assert whiskers(axis)[0] == pytest.approx([row.put + change for row in first for change in (-1, 3)])


def test_plot_of_results_without_rounds_has_no_whiskers() -> None:
    rows = [{name: value for name, value in row.items() if name != "rounds"} for row in fs_rows()]
    axis = make_benchmarks.draw_fs(rows).axes[0]
    assert whiskers(axis) == []
    assert "whiskers" not in axis.get_ylabel()
