from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os
from pathlib import Path

def test_passes():
    with open("passed", "a") as f:
        f.write("once ")

def test_fails_at_first():
    first = not os.path.exists("tried")
    Path("tried").touch()
    assert not first

def test_fails():
    assert "fault" not in os.environ

def test_crashes():
    if "crash" in os.environ:
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("env", "options", "status", "runs"),
    [
        ({}, ["-n", "2"], 0, 2),
        ({"fault": "1"}, ["-n", "2"], 1, 2),
        ({}, ["--no-such-option"], 4, 1),
        ({}, ["-k", "no_such_test"], 5, 1),
        ({"crash": "1"}, ["-n", "0"], 5, 2),  # the second run finds no failed test
    ],
    ids=["busy machine", "fault", "usage error", "no tests", "crash"],
)
def test_only_failed_tests_run_again_and_without_workers(
    tmp_path: Path, env: dict[str, str], options: list[str], status: int, runs: int
) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests.pytest_twice", "-p", "xdist", *options]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("test session starts") + done.stderr.count("no-such-option") == runs
    if runs == 2 and "crash" not in env:
        assert (tmp_path / "passed").read_text() == "once "
        assert "bringing up nodes" not in done.stdout.split("test session starts")[2]
