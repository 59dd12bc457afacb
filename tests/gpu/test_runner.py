"""How the runner reports rows, without a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.lab import Row
from tests.gpu.runner import ROW_S_MIN, Report, _timed


@pytest.mark.parametrize(
    ("ok", "left_s", "reported"),
    [(True, 60.0, "row"), (False, 60.0, "row"), (True, 0.0, "row"), (False, 0.0, "skipped")],
)
def test_row_counts_as_skipped_only_if_ended_by_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ok: bool, left_s: float, reported: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    report = Report(tmp_path / "report.json", {})

    def run() -> Row:
        now[0] = ROW_S_MIN * 2 - left_s
        return Row("a row", "0.33", ok=ok)

    _timed(report, ROW_S_MIN * 2, ("1 a row", run))
    assert ([row.name for row in report.rows], report.skipped) == (
        (["a row"], []) if reported == "row" else ([], ["1 a row"])
    )
