"""A copy kernel for many small pages. Imported only if triton and a GPU are available.

Host pages are read and written in place, so they must be page-locked and mapped. A copy engine has a cost per copy, a
kernel only per byte. But a kernel waits behind a busy GPU, and takes multiprocessors away from the model. So the kernel
is used only for small pages, and runs few programs: the link limits the speed, not the GPU.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from .transfer_plan import Int64s

WORD_BYTES = 8
"""Addresses and lengths must be multiples of this."""

# vLLM's figure for a very similar kernel: the fewest programs within 5% of the best speed on an H100 at 8-32 KiB a copy
# (vllm#42212). At 16 KiB in flight per program, they have over twice what a PCIe 5 link holds (55 GB/s x 1.5 µs).
_PROGRAMS = 12
BLOCK_WORDS = 2048


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def copy_kernel(table, count, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy each column of ``table``, (3, count) int64: destination, source, words. A program takes every n-th copy."""
    for page in range(tl.program_id(0), count, tl.num_programs(0)):
        dst = tl.load(table + page).to(tl.pointer_type(tl.int64))
        src = tl.load(table + count + page).to(tl.pointer_type(tl.int64))
        words = tl.load(table + 2 * count + page)
        if WIDE:  # these hints make the compiler move 16 bytes at once
            dst = tl.multiple_of(dst, 16)
            src = tl.multiple_of(src, 16)
            words = tl.multiple_of(words, 2)
        for start in range(0, words, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(dst + at, tl.load(src + at, mask=at < words), mask=at < words)


def copy_pages(dst: Int64s, src: Int64s, nbytes: Int64s, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Start the copies on the current stream.

    Args:
        dst, src, nbytes: (n,) device addresses and lengths, all multiples of ``WORD_BYTES``; n >= 1.

    Returns:
        Tensors to keep alive until the stream has run the copies.
    """
    table = torch.empty((3, len(dst)), dtype=torch.int64, pin_memory=device.type == "cuda")
    rows = table.numpy()
    rows[0], rows[1] = dst, src
    np.floor_divide(nbytes, WORD_BYTES, out=rows[2])
    wide = not ((dst | src | nbytes) % 16).any()
    on_device = table.to(device, non_blocking=True)
    copy_kernel[(min(len(dst), _PROGRAMS),)](on_device, len(dst), BLOCK=BLOCK_WORDS, WIDE=wide, num_warps=8)
    return table, on_device


def compile_for(device: torch.device) -> None:
    """Compile the kernels that ``copy_pages`` will launch, so that no job waits for the compiler."""
    memory = torch.zeros(4, dtype=torch.int64, device=device)
    for nbytes in (16, 8):
        dst, src = (np.array([memory.data_ptr() + offset]) for offset in (16, 0))
        copy_pages(dst, src, np.array([nbytes]), device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
