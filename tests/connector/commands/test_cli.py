from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.connector.commands.session import ExitCode
from tests.connector.commands.test_storage_commands import run


def test_vllm_config(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"region: {{size: 1MiB}}\ntiers:\n- {{type: fs, root_dir: {tmp_path}}}\n")
    code, out = run("vllm-config", str(config))
    assert code == 0
    ways = json.loads(out)
    assert {"spec", "tier"} <= ways.keys()
    code, out = run("vllm-config", str(config), "--way", "spec")
    assert json.loads(out) == ways["spec"]
    assert run("vllm-config", str(config), "--way", "x")[0] == 2
    assert run("vllm-config", str(tmp_path / "none.yaml"))[0] == ExitCode.BAD_INPUT


def test_demo_refuses_bad_input(tmp_path: Path) -> None:
    assert run("demo", "--config", str(tmp_path / "none.yaml"))[0] == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    "arguments", [("check",), ("check", "--json"), ("gc",), ("verify", "--json"), ("ls", "-q"), ("--help",)]
)
def test_a_closed_output_is_no_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "kv").mkdir()
    config = tmp_path / "c.yaml"
    config.write_text(
        f"region: {{size: 1MiB}}\ntiers: [{{type: fs, root_dir: {tmp_path / 'kv'}, min_free: 0, ttl: 7d}}]\n"
    )
    command = shlex.join([sys.executable, "-m", "kvtiers.connector.commands.cli", *arguments, str(config)])
    ended = subprocess.run(["/bin/sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_refusal_is_one_line_in_a_pipe(tmp_path: Path) -> None:
    config = tmp_path / "a-name-that-is-long-enough-to-be-wrapped-at-eighty-columns" / "c.yaml"
    command = [sys.executable, "-m", "kvtiers.connector.commands.cli", "doctor", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr == f"kvtiers doctor: {config}: cannot be read: No such file or directory\n"


def test_an_output_that_takes_nothing_more_is_said_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "kvtiers.connector.commands.cli", "check", "--schema"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        2,
        "kvtiers: the output could not be written: No space left on device\n",
    )
