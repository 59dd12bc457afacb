"""The report of what was measured of the promises; see ``tests/promises.py``."""

from __future__ import annotations

import contextlib
import gc

import pytest

from tests.promises import PASS_LINES, Measured, Record, lines

pytest.register_assert_rewrite("tiers.testing.contract")

with contextlib.suppress(ImportError):  # where only a part of the tests runs
    from hypothesis import HealthCheck, settings

    # By default an example that takes 0.2 s, or one that takes long to draw, fails its test: a busy machine's do.
    settings.register_profile("kvtiers", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("kvtiers")

_PROPERTY = "promise"  # of a test's report, which comes back from the process that ran it


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Collect once a module and not look at its survivors again: torch and the rest make each collection 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """``record("L5", shutdown_s=1.2)``: called last, by a test whose assertions all held."""

    def record(promise: str, **figures: object) -> None:
        assert promise in PASS_LINES
        request.node.user_properties.append((_PROPERTY, (promise, figures)))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = [
        Measured(value[0], value[1], report.nodeid)
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if measured:
        terminalreporter.section("promises, as measured")
        for line in lines(measured):
            terminalreporter.write_line(line)
