"""The report on the promises and faults in docs/reliability.md, and the list of the tests that show them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.promises import PASS_LINES, Measured, evidence, lines, summary

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
CRASH = (
    "tests/tiers/stores/files/test_local_crash.py::test_store_killed_at_random_leaves_whole_blobs_and_no_private_files"
)
FAULTS = "tests/tiers/stores/files/test_local_faults.py::test_failure_of_any_system_call_leaves_the_old_or_the_new_blob"


def test_report_shows_results_and_figures_of_each_tested_promise() -> None:
    report = lines(
        {FAULTS: Counter(passed=2, skipped=1), CRASH: Counter(failed=1), "tests/a.py::test_x": Counter(passed=1)},
        [
            Measured("W4", {"faults": 10, "hung_s": 3.0, "kind": "a", "wrong": 0}, f"{FAULTS}[put]"),
            Measured("W4", {"faults": 5, "hung_s": 60.0, "kind": "b", "wrong": 0}, f"{FAULTS}[get]"),
        ],
    )
    place = report.index(f"W4  {PASS_LINES['W4']}")
    assert report[place + 1 : place + 3] == [
        f"      2 passed, 1 skipped: {FAULTS.removeprefix('tests/')}",
        "          faults 15 in all, hung s 60 at most, kind a b, wrong 0",
    ]
    assert f"      1 failed: {CRASH.removeprefix('tests/')}" in report
    assert "Failed system call" in report
    assert re.search(r"without a test in this run: W1 W2 W5 .*X5$", report[-1])


def test_short_report_has_one_line_for_each_tested_promise() -> None:
    results = {FAULTS: Counter(passed=2, skipped=1), CRASH: Counter(failed=1), "tests/a.py::test_x": Counter(passed=1)}
    assert summary(results) == [
        f"W3  1 failed: {PASS_LINES['W3']}",
        f"W4  2 passed, 1 skipped: {PASS_LINES['W4']}",
        f"D2  1 failed: {PASS_LINES['D2']}",
    ]


def test_report_is_empty_without_a_test_of_a_promise() -> None:
    results = {"tests/a.py::test_x": Counter(passed=1)}
    assert lines(results, []) == summary(results) == []


@cache
def names_in(path: Path) -> frozenset[str]:
    """Tests of a file, and its classes' as "Class::test"."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return frozenset(names)


@pytest.mark.parametrize("section", ["promises", "faults"])
def test_evidence_names_tests_that_exist(section: str) -> None:
    named = {test for tests in evidence()[section].values() for test in tests}
    assert all(evidence()[section].values()), "a promise or fault without a test"
    assert [test for test in sorted(named) if not _exists(test)] == []


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and name in names_in(ROOT / file)


def test_page_and_evidence_have_the_same_promises() -> None:
    assert re.findall(r"^- \*\*([A-Z]\d)\*\*", PAGE, re.MULTILINE) == [*evidence()["promises"]]
    assert [*PASS_LINES] == [*evidence()["promises"]]


def test_each_fault_of_the_page_has_evidence() -> None:
    parts = re.split(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    faults = [
        fault
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
        if title not in ("Promises", "Hostile servers")
        for fault in re.findall(r"^- \*\*(.+?)\*\*: ", text, re.MULTILINE)
    ]
    assert faults
    assert [fault for fault in faults if fault not in evidence()["faults"]] == []
