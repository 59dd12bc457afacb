"""What the GPU's tests and benchmark need of a machine, and what they say where it has a GPU that torch cannot use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu_machine
from tests.connector.transfer.test_gpu_handler_cuda import run_to_the_last
from tests.processes import is_gone
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
OTHER_DEPENDENCIES = (
    *("boto3", "botocore", "pydantic", "yaml", "typer", "xxhash", "fsspec", "s3fs", "safetensors", "moto"),
    *("transformers", "prometheus_client", "opentelemetry", "cryptography", "hypothesis", "matplotlib", "psutil"),
)
UNUSABLE = f"has an NVIDIA GPU that torch {torch.__version__} cannot use"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPU")
@pytest.mark.parametrize(
    ("listed", "wanted", "outcome", "said"),
    [
        ("GPU 0: NVIDIA H100", "1", "failed", UNUSABLE),
        ("GPU 0: NVIDIA H100", "", "skipped", UNUSABLE),
        ("No devices were found", "1", "skipped", "no CUDA device here"),
    ],
    ids=["a GPU", "a GPU, make test", "none"],
)
def test_gpu_tests_fail_if_torch_cannot_use_gpu_and_skip_without_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, wanted: str, outcome: str, said: str
) -> None:
    monkeypatch.setenv("KVTIERS_TEST_GPU", wanted)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {listed}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    raised = pytest.fail.Exception if outcome == "failed" else pytest.skip.Exception
    with pytest.raises(raised, match=re.escape(said)):
        gpu_machine.skip_without_cuda()


def test_gpu_of_driver_too_old_for_torch_is_reported_as_unusable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_machine, "CONTROL_DEVICE", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(gpu_machine.UnusableGpuError, match="too old"):
        gpu_machine.why_no_cuda()


@pytest.mark.full
def test_gpu_tests_import_only_torch_numpy_pytest_and_rich() -> None:
    code = f"""
import sys
for name in {OTHER_DEPENDENCIES!r}:
    sys.modules[name] = None
import pytest
import tests.benchmarks.bench_gpu
files = ["tests/connector/transfer/test_gpu_handler_cuda.py", "tests/connector/transfer/test_triton_copy.py"]
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_timeout_kills_processes_started_by_a_launcher() -> None:
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    for timeout_s in (3, 60):
        status, output = run_to_the_last(command, env={"PATH": os.environ["PATH"]}, timeout_s=timeout_s)
        assert status == -9
        pid, said = output.split("\n", 1)
        assert f"killed after {timeout_s} s" in said
        if pid:  # a busy machine may take longer to start a shell
            break

    wait_for(lambda: is_gone(int(pid)))
