"""The report of measured promises, and the table of promises and faults in docs/reliability.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.promises import PASS_LINES, Measured, lines

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "reliability.md"
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?`")


def test_figures_are_put_together() -> None:
    report = lines(
        [
            Measured("W4", {"faults": 10, "wrong": 0}, "tests/a.py::test_x[put]"),
            Measured("W4", {"faults": 5, "wrong": 0}, "tests/a.py::test_x[get]"),
            Measured("L5", {"tiers": 2, "shutdown_s": 1.25}, "tests/b.py::test_y"),
            Measured("L1", {"hung_s": 3.0, "kind": "a"}, "tests/b.py::test_z[1]"),
            Measured("L1", {"hung_s": 60.0, "kind": "b"}, "tests/b.py::test_z[2]"),
        ]
    )
    assert "      2 cases: faults 15 in all, wrong 0  (a.py::test_x)" in report
    assert "      tiers 2, shutdown s 1.25  (b.py::test_y)" in report
    assert "      2 cases: hung s 60 at most, kind a b  (b.py::test_z)" in report
    assert report[report.index(f"D3  {PASS_LINES['D3']}") + 1].strip() == "not measured in this run"


@cache
def names_in(path: Path) -> frozenset[str]:
    """Tests of a file, and its classes' as "Class.test"."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return frozenset(names)


def rows() -> list[list[str]]:
    """The cells of every table's rows."""
    found = [line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found]


def test_each_row_names_tests_that_exist() -> None:
    for first_cell, *_, tests in rows():
        if first_cell in ("promise", "fault"):
            continue
        named = NAMED_TEST.findall(tests)
        assert named or tests.startswith("none: "), f"{first_cell}: names no test and does not say that there is none"
        for file, first, second in named:
            assert (ROOT / file).is_file(), f"{first_cell}: {file}"
            name = f"{first}.{second}" if second else first
            assert name in names_in(ROOT / file), f"{first_cell}: {file} has no {name}"


def test_each_measured_promise_is_in_the_table() -> None:
    described = {row[0] for row in rows()}
    assert set(PASS_LINES) <= described
