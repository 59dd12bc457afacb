from __future__ import annotations

import logging

import pytest

from kvtiers.tiers.tier.circuit import Circuit


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def circuit(now: list[float]) -> Circuit:
    return Circuit("fs", failures_max=3, probe_every_s=5, clock=lambda: now[0])


def test_circuit_opens_only_after_consecutive_failures(circuit: Circuit) -> None:
    for _ in range(5):
        circuit.fail("lookup", "io")
        circuit.fail("lookup", "io")
        circuit.succeed("lookup")
    assert circuit.closed
    for _ in range(3):
        circuit.fail("lookup", "io")
    assert circuit.state == "open"


def test_failed_loads_are_reset_only_by_loads_and_failed_stores_by_any_answer(
    circuit: Circuit, now: list[float]
) -> None:
    for _ in range(2):
        circuit.fail("load", "io")
        circuit.fail("store", "io")
        circuit.succeed("load")
        circuit.fail("store", "io")
        circuit.fail("store", "io")
        circuit.succeed("lookup")
    assert circuit.closed
    for _ in range(3):
        circuit.fail("load", "io")
        circuit.succeed("lookup")
        circuit.succeed("store")
    assert circuit.state == "open"
    now[0] += 5
    assert circuit.take_probe()
    circuit.succeed("lookup")
    assert circuit.closed
    circuit.fail("load", "still")
    assert circuit.state == "open"


def test_circuit_probes_and_closes_by_itself(circuit: Circuit, now: list[float]) -> None:
    circuit.trip("stuck")
    assert circuit.state == "open"
    assert not circuit.take_probe()
    for _ in range(3):  # the probe fails: it stays open and is probed again
        now[0] += 5
        assert circuit.take_probe()
        assert not circuit.take_probe()
        circuit.fail("lookup", "still")
        assert circuit.state == "open"
    now[0] += 5
    assert circuit.take_probe()
    circuit.succeed("lookup")
    assert circuit.closed
    circuit.fail("lookup", "one")
    assert circuit.closed


def test_late_success_of_an_old_operation_does_not_close_the_circuit(circuit: Circuit) -> None:
    circuit.trip("stuck")
    circuit.succeed("lookup")
    assert circuit.state == "open"


def test_stuck_probe_reopens_the_circuit(circuit: Circuit, now: list[float]) -> None:
    circuit.trip("stuck")
    now[0] += 5
    assert circuit.take_probe()
    circuit.trip("still stuck")
    assert circuit.state == "open"


def test_each_change_of_state_is_logged_once(
    circuit: Circuit, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(10):
        circuit.fail("lookup", "io")
    now[0] += 5
    circuit.take_probe()
    circuit.fail("lookup", "io")
    now[0] += 5
    circuit.take_probe()
    circuit.succeed("lookup")
    assert [record.getMessage() for record in caplog.records] == [
        "tier fs: circuit open: 3 failures in a row, the last: io",
        "tier fs: circuit closed: the storage answers again",
    ]
