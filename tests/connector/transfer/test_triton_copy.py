"""The copy kernel without a GPU: Triton's interpreter runs it, and its compiler makes a GPU's program of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (extra: gpu)")

INTERPRETED = """
import numpy as np, torch
from kvtiers.connector.transfer import triton_copy
rng = np.random.default_rng(3)
device = torch.device("cpu")
triton_copy.compile_for(device)
src = torch.from_numpy(rng.integers(-128, 128, (40, 40_000), dtype=np.int8))
for step in (8, 16):
    dst = torch.zeros_like(src)
    order = rng.permutation(40)
    nbytes = rng.integers(1, 40_000 // step, 40) * step
    triton_copy.copy_pages(
        dst.data_ptr() + np.arange(40) * 40_000, src.data_ptr() + order * 40_000, nbytes, device
    )
    for row in range(40):
        assert torch.equal(dst[row, : nbytes[row]], src[order[row], : nbytes[row]])
        assert not dst[row, nbytes[row] :].any()
print("copied")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here (test_gpu_handler_cuda)")
def test_kernel_copies_right_bytes_in_triton_interpreter() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.stdout.strip() == "copied", ran.stderr


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtiers.connector.transfer.triton_copy import BLOCK_WORDS, copy_kernel
for architecture in (80, 90, 100):
    for wide, move in ((True, "global.v2.b64"), (False, "global.b64")):
        source = ASTSource(
            copy_kernel,
            signature={"table": "*i64", "count": "i32", "BLOCK": "constexpr", "WIDE": "constexpr"},
            constexprs={"BLOCK": BLOCK_WORDS, "WIDE": wide},
        )
        made = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 8}).asm
        assert made["cubin"]
        assert "ld." + move in made["ptx"] and "st." + move in made["ptx"], made["ptx"]
        assert wide or "v2.b64" not in made["ptx"]
print("compiled")
"""


def test_compiled_kernel_moves_16_bytes_at_once_where_aligned(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.stdout.strip() == "compiled", ran.stderr
