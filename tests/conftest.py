"""The report on the promises (see ``tests/promises.py``), and what holds for all tests."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from pathlib import Path

import pytest

from tests.promises import Measured, Record, evidence, lines, summary, without_case

pytest.register_assert_rewrite("kvtiers.tiers.testing.contract")

with contextlib.suppress(ImportError):  # what runs on a GPU has no hypothesis
    from hypothesis import HealthCheck, settings

    # By default a test fails whose example takes 200 ms, or whose examples are made slowly: any may on a busy machine.
    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")

#: Files that take 20 s or more of CPU or of waiting, the longest first: begun last, they would leave a core idle.
LONGEST = (
    "tiers/capacity/test_collector_process.py",
    "tiers/stores/s3/test_s3_faults.py",
    "tiers/stores/s3/test_s3_store.py",
    "tiers/stores/s3/test_s3_config.py",
    "tiers/server/test_server_process.py",
    "tiers/stores/s3/test_s3_hostile.py",
    "tiers/stores/files/test_fuse.py",
    "connector/demo/test_demo.py",
    "connector/commands/test_copy_commands.py",
    "soak/test_soak.py",
    "tiers/capacity/test_collector.py",
    "tiers/tier/test_wrong_bytes.py",
    "tiers/stores/test_custom_store.py",
    "tiers/stores/test_fsspec_store.py",
    "docs/test_writing_a_store.py",
    "tiers/stores/files/test_local_crash.py",
    "connector/commands/test_verify_command.py",
    "connector/region/test_region_processes.py",
)

_FIRST_CASES = "--first-cases"

_PROPERTY = "promise"  # of a test's report, which comes back from the process that ran it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _FIRST_CASES, action="store_true", help="run only the first case of each test: what differs between Pythons"
    )


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files; all else stays in its order (see ``make test``)."""
    if config.getoption(_FIRST_CASES):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        config.hook.pytest_deselected(items=list({*items} - {*first.values()}))
        items[:] = reversed(first.values())
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Collect once a module and not look at its survivors again: torch and the rest make each collection 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """``record("L5", shutdown_s=1.2)``: called last, by a test whose assertions all held."""

    def record(promise: str, **figures: object) -> None:
        assert without_case(request.node.nodeid) in evidence()["promises"][promise], "name it in tests/evidence.toml"
        request.node.user_properties.append((_PROPERTY, (promise, figures)))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.verbosity < 0:  # -q
        return
    reports = [
        (result, report)
        for result in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.getreports(result)
        if result != "passed" or report.when == "call"
    ]
    results: dict[str, Counter[str]] = {}
    for result, report in reports:
        results.setdefault(without_case(report.nodeid), Counter())[result] += 1
    measured = [
        Measured(value[0], value[1], report.nodeid)
        for result, report in reports
        if result == "passed"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    is_short = bool(terminalreporter.config.option.markexpr)  # as in `make test`
    if found := summary(results) if is_short else lines(results, measured):
        terminalreporter.section("promises of docs/reliability.md")
        if is_short:
            terminalreporter.write_line(
                "Each line has the results of this run, and what the whole test shows. Many tests ran in a short form; "
                "`make test-full` runs all of them and names them."
            )
        for line in found:
            terminalreporter.write_line(line)
