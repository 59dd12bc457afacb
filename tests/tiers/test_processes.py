"""What every process of the package does first."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.tiers.processes import python_command

ROOT = Path(__file__).parents[2]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)


def test_path_object_in_sys_path_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    command = python_command("json.tool")
    subprocess.run(command, input="{}", capture_output=True, text=True, check=True)


def test_fork_of_a_process_with_own_output_writes_nothing() -> None:
    """As the workers of ``verify``."""
    done = run("""
import os
from kvtiers.tiers.processes import end_if_forked, own_output
output, pid = own_output(), os.getpid()
child = os.fork()
end_if_forked(pid)
output.write(f"answer {os.waitpid(child, 0)[1] != 0}")
output.flush()
""")
    assert done.stdout == "answer True"


def test_log_line_of_a_process_names_process_and_time() -> None:
    done = run(f"""
import logging
from kvtiers.tiers.processes import log_to_stderr
log_to_stderr("kvtiers-tier", {logging.INFO})
logging.getLogger("kvtiers.tiers.capacity.room").info("the storage is full")
logging.getLogger("elsewhere").info("not of ours")
""")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"\(kvtiers-tier pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[.*:\d+\] the storage is full", line)


@pytest.mark.parametrize("module", ["kvtiers.tiers.server.process", "kvtiers.tiers.capacity.process"])
def test_child_process_imports_no_heavy_packages(module: str) -> None:
    """A process that is started again keeps an engine waiting. A file store needs none of these either."""
    heavy = {"torch", "pydantic", "numpy", "yaml", "botocore", "fsspec", "typer", "cryptography", "pytest"}
    loaded = set(run(f"import sys, {module}, kvtiers.tiers.stores.files.nfs; print(*sys.modules)").stdout.split())
    assert module in loaded
    assert not heavy & loaded
