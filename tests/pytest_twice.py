"""Runs pytest, and once more, alone, the tests that failed: ``python -m tests.pytest_twice [OPTION]...``.

For CI, where hundreds of tests run real processes and servers side by side. A real fault makes a test fail again. A
test that failed because the machine was busy passes, and its first failure stays in the log. Only failed tests run
again: a run that ended in any other way (a crash, a usage error, no tests) has failed.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

_SOME_TESTS_FAILED: Final = 1  # pytest.ExitCode.TESTS_FAILED
_FAILED_TESTS: Final = ("--last-failed", "--last-failed-no-failures", "none")


def main(options: list[str]) -> int:
    """Run pytest with these options. Returns pytest's exit status."""
    command = [sys.executable, "-m", "pytest", *options]
    status = subprocess.run(command, check=False).returncode
    if status != _SOME_TESTS_FAILED:
        return status
    print("Some tests failed. These tests run once more, alone.", file=sys.stderr, flush=True)
    alone = ("-n", "0") if "-n" in options else ()
    return subprocess.run([*command, *_FAILED_TESTS, *alone], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
