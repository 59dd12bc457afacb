"""The soak in small, and that it sees what it is there to see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.tiers.base import JobMetadata, JobResult
from tests.identity import block_key
from tests.promises import Record
from tests.soak.ledger import CallTimes, Ledger
from tests.waiting import wait_for

RUN_S_MAX = 800
HEAL_S_MAX = 120  # the command's own limit is for a machine that does nothing else


def soak(json_file: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """In a process of its own: what other tests leave open is not the soak's."""
    command = [sys.executable, "-m", "tests.soak", "--json", str(json_file), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert json_file.exists(), ended.stderr
    return ended.returncode, json.loads(json_file.read_text())


@pytest.mark.parametrize(
    "options",
    [
        ("--seconds", "5"),
        pytest.param(("--seconds", "60"), marks=pytest.mark.full),
        pytest.param(("--seconds", "20", "--no-fuse"), marks=pytest.mark.full),
    ],
    ids="_".join,
)
def test_soak_of_all_tiers_finds_no_violation(tmp_path: Path, record: Record, options: tuple[str, ...]) -> None:
    status, report = soak(tmp_path / "report.json", *options, "--heal-s", str(HEAL_S_MAX))
    assert report["violations"] == {}, report["details"]
    assert status == 0
    assert set(report["tiers"]) == {"fs", "nfs", "s3"}
    assert report["blocks_loaded"] > 0  # the number depends on the machine's speed
    assert report["blocks_stored"] > 0
    assert sum(report["faults"].values()) > 0
    record(
        "S2", operations=report["operations"], faults=sum(report["faults"].values()), wrong_bytes=0, slots_in_use=0,
        healed_after_s=report["healed_s"], worst_call_ms=report["worst_call_ms"], p99_call_ms=report["p99_call_ms"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sabotage", "violations"),
    [
        ("wrong-bytes", {"wrong bytes"}),
        pytest.param("lost-job", {"stuck job", "leaked slots"}, marks=pytest.mark.full),
        pytest.param("job-twice", {"job reported twice"}, marks=pytest.mark.full),
        pytest.param("blocking-call", {"scheduler call that waits"}, marks=pytest.mark.full),
    ],
)
def test_soak_reports_each_sabotage_as_violation(tmp_path: Path, sabotage: str, violations: set[str]) -> None:
    # The fault layer stands in for FUSE where there is none: here it does everywhere.
    options = ("--seconds", "3", "--heal-s", "3", "--faults", "0", "--tiers", "fs", "--no-fuse", "--sabotage", sabotage)
    status, report = soak(tmp_path / "report.json", *options)
    assert status == 1
    assert not report["passed"]
    assert violations <= report["violations"].keys()
    assert any(detail.startswith(min(violations)) for detail in report["details"])


# ---- the ledger ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(lambda: 0.0)


def job(job_id: int, *slots: int) -> JobMetadata:
    return JobMetadata(job_id, tuple(block_key(slot) for slot in slots), np.array(slots, np.int32))


def test_ledger_reports_single_wrong_byte(ledger: Ledger) -> None:
    stored = np.arange(100, dtype=np.int8)
    ledger.check_bytes("block", stored.copy(), stored)
    assert not ledger.violations
    found = stored.copy()
    found[41] += 1
    ledger.check_bytes("block 3 in slot 4", found, stored)
    assert ledger.violations == {"wrong bytes": 1}
    assert ledger.details == ["wrong bytes: block 3 in slot 4: 1 bytes differ, the first at 41"]


def test_ledger_allows_concurrent_reads_of_slot_and_reports_concurrent_writes(ledger: Ledger) -> None:
    ledger.submitted("fs", job(1, 4, 5), is_load=True)
    ledger.read([6], "request")
    ledger.read([6], "another")
    assert not ledger.violations
    ledger.read([5], "request")
    ledger.submitted("nfs", job(2, 6), is_load=True)
    ledger.write([4], "request")
    assert ledger.violations == {"slot in two hands": 3}
    assert "job 1 of fs" in ledger.details[0]


def test_reported_job_releases_its_slots_and_second_report_is_a_violation(ledger: Ledger) -> None:
    ledger.submitted("fs", job(1, 4), is_load=True)
    ledger.submitted("fs", job(2, 5), is_load=False)
    ledger.reported("fs", JobResult(1, True))
    ledger.reported("fs", JobResult(2, False))
    ledger.write([4, 5], "request")
    assert not ledger.violations
    ledger.reported("fs", JobResult(2, False))
    ledger.reported("nfs", JobResult(1, True))
    assert ledger.violations == {"job reported twice": 2}


def test_ledger_reports_foreign_key_in_result(ledger: Ledger) -> None:
    ledger.submitted("fs", job(1, 4), is_load=True)
    ledger.reported("fs", JobResult(1, False, (block_key(5),)))
    assert ledger.violations == {"foreign keys in a result": 1}


def test_idle_check_reports_stuck_jobs_and_leaked_slots(ledger: Ledger) -> None:
    names = ("free", "ready", "pinned", "pending", "quarantined")
    ledger.check_idle((3, 5, 0, 0, 0), names, 8)
    assert not ledger.violations
    ledger.submitted("fs", job(1, 4), is_load=True)
    ledger.check_idle((2, 4, 1, 0, 2), names, 8)
    assert ledger.violations == {"slots not conserved": 1, "stuck job": 1, "leaked slots": 2}


def test_call_times_give_count_percentiles_and_slowest_call() -> None:
    now = iter([0.0] + [0.0, 0.001] * 98 + [0.0, 0.5] * 2)
    times = CallTimes(lambda: next(now))
    for number in range(100):
        assert times.timed("quick" if number < 98 else "slow", lambda: 7) == 7
    assert (times.count, times.worst_s, times.worst_call) == (100, 0.5, "slow")
    assert [slow.startswith("slow: 500 ms at 0.0 s") for slow in times.slow] == [True, True]
    assert times.percentile_s(50) == pytest.approx(0.001, abs=2e-5)
    assert times.percentile_s(99) == pytest.approx(0.5, abs=2e-5)
    assert times.worst_wait_s == 0.5


def test_call_wait_excludes_time_when_process_was_starved() -> None:
    now, late = [0.0], [0.0]
    times = CallTimes(lambda: now[0], late_s=lambda: late[0])

    def call() -> None:
        now[0] += 3.0
        late[0] += 2.9

    times.timed("starved", call)
    assert times.worst_s == 3.0
    assert times.worst_wait_s == pytest.approx(0.1)


def test_pulse_counts_stop_of_process_but_not_wait_of_call() -> None:
    script = (
        "import os, signal, sys, time; from tests.soak.ledger import Pulse\n"
        "with Pulse() as pulse:\n"
        "    began, late = time.monotonic(), pulse.late_s()\n"
        "    time.sleep(1) if sys.argv[1] == 'waits' else os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    print(time.monotonic() - began - (pulse.late_s() - late))\n"
    )
    command = [sys.executable, "-c", script]
    # Again, where a busy machine starves it.
    wait_for(lambda: float(subprocess.run([*command, "waits"], capture_output=True, check=True).stdout) > 0.9)
    with subprocess.Popen([*command, "stops"], stdout=subprocess.PIPE, text=True) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(2)
        process.send_signal(signal.SIGCONT)
        assert float(process.communicate()[0]) < 1
