"""Whether torch can use a GPU here. Where there is one and it cannot, that is no reason to skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

CONTROL_DEVICE = Path("/dev/nvidiactl")


class UnusableGpuError(RuntimeError):
    """There is an NVIDIA GPU, and torch cannot use it."""


def why_no_cuda() -> str | None:
    """None where torch can use a CUDA device, else why what needs one is skipped.

    Raises:
        UnusableGpuError: it should not be skipped; says what torch says.
    """
    if torch.cuda.is_available():
        return None
    if not has_nvidia_gpu():
        return "no CUDA device here"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        cause: object = "torch.cuda.is_available() is false"
    except Exception as error:
        cause = error
    raise UnusableGpuError(
        f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use: {cause} "
        "(CUDA_VISIBLE_DEVICES= hides it)"
    )


def has_nvidia_gpu() -> bool:
    """Whether the driver has one; not where ``CUDA_VISIBLE_DEVICES`` hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if CONTROL_DEVICE.exists():
        return True
    smi = shutil.which("nvidia-smi")  # WSL has it and no such device
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False, timeout=60)
    return "GPU 0" in listed.stdout


def skip_without_cuda() -> None:
    """Skip the running test where there is no CUDA device.

    If there is a GPU that torch cannot use, fail the test where ``KVTIERS_TEST_GPU`` is 1, as in ``make test-gpu``.
    """
    try:
        reason = why_no_cuda()
    except UnusableGpuError as error:
        if os.environ.get("KVTIERS_TEST_GPU") == "1":
            pytest.fail(str(error), pytrace=False)
        reason = str(error)
    if reason is not None:
        pytest.skip(reason)
