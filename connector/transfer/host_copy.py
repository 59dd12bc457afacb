"""Makes the copies of a plan between two places in host memory, near the speed of one thread's memcpy.

A copy has ids on both sides, but numpy indexes only one side per pass. One pass is still enough, because a slot's bytes
are contiguous in the region: the region's side is a plain slice per slot.

- Loads scatter the slice: ``gpu[ids] = slice``. numpy releases the GIL from 500 items upward; a scatter of fewer items
  holds the GIL during the copy.
- Stores gather into the slice: ``np.take(gpu, ids, out=slice)``, always without the GIL. ``np.take`` needs a contiguous
  source, so an item is as long as the common divisor of the tensors' addresses: 4,096 bytes if they come from mmap.
  Shorter items are too slow.
- If slices are small, a call per slice costs more than the copy; if items are short, one pass is not faster. Then both
  sides are indexed, in two passes through a buffer that stays in the cache: ``destination[ids] = source[ids]``.
- A job of a few short copies uses one memmove per copy, which ends before numpy would have begun.

Speed relative to one memcpy of the same bytes (measured: thread CPU time, random ids, pages of 64 KiB and more): one
pass: loads 0.9-1.2, stores 0.8-1.1, and 0.7 if a slice is a single page of 64 KiB; two passes: 0.4-0.7.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .transfer_plan import CopyPlan, Direction, Int64s, TransferLayout

RUN_BYTES_MIN = 64 << 10
"""Smallest mean bytes of a slice for which a call per slice pays off (measured: 57 KiB)."""

ITEM_BYTES_MIN = 2048
"""With shorter items, one pass is slower than two passes over whole pages (measured)."""

LOOP_BYTES_MAX = 1 << 20
"""Jobs of at most this many bytes and 32 copies are faster in a loop (measured: 6 times for one copy, 1.2 for 32)."""

_LOOP_COPIES_MAX = 32
_BUFFER_BYTES = 512 << 10  # half of a typical L2 cache

# PyDLL keeps the GIL. 1 MiB takes about 100 µs, for which numpy's calls would hold the GIL as well. Getting the GIL
# back from a computing thread takes up to 5 ms, after each copy (measured: 20 ms a job).
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


@dataclass(frozen=True, slots=True)
class HostCompletion:
    """A copy that has ended."""

    elapsed_s: float

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def seconds(self) -> float:
        return self.elapsed_s


class HostCopier:
    """Copies plans of one layout in one direction. Any thread, but one at a time.

    Args:
        owner: owns the memory of the layout; kept alive as long as the copier.
    """

    def __init__(
        self,
        layout: TransferLayout,
        direction: Direction,
        *,
        owner: object,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._owner = owner
        self._loading = direction is Direction.LOAD
        self._clock = clock
        self._unit = layout.unit_bytes
        # Views of address ranges. Memory between the tensors is never touched: a plan holds only checked addresses.
        self._gpu = _AddressSpace(layout.gpu_span)
        self._cpu = _AddressSpace(layout.cpu_span)
        # numpy rejects an array whose items add up to more than 2^63 bytes, even if they overlap.
        span_bytes = max(end - start for start, end in (layout.gpu_span, layout.cpu_span))
        self._item_bytes_max = (1 << 62) * self._unit // span_bytes

    def mark(self) -> None:
        """Do nothing: host memory needs no ordering. Bytes written before the call are visible."""

    def copy(self, plan: CopyPlan, _mark: None, /) -> HostCompletion:
        """Copy everything before returning.

        Raises:
            MemoryError: there is not enough memory for the indices.
        """
        started = self._clock()
        if len(plan) <= _LOOP_COPIES_MAX and plan.total_bytes <= LOOP_BYTES_MAX:
            self._copy_each(plan)
        elif self._unit >= ITEM_BYTES_MIN:
            self._copy_many(plan)
        else:
            # Items that divide all lengths are too short. Among copies of one length, an item is a whole page.
            for page in np.unique(plan.nbytes).tolist():
                self._copy_many(plan.of_length(page))
        return HostCompletion(self._clock() - started)

    def close(self) -> None:
        """Release the memory."""
        self._owner = None

    def _copy_each(self, plan: CopyPlan) -> None:
        dst, src = (plan.gpu, plan.cpu) if self._loading else (plan.cpu, plan.gpu)
        for copy in zip(dst.tolist(), src.tolist(), plan.nbytes.tolist(), strict=True):
            _memmove(*copy)

    def _copy_many(self, plan: CopyPlan) -> None:
        page = int(plan.nbytes[0])
        uniform = page <= self._item_bytes_max and bool((plan.nbytes == page).all())
        whole = page if uniform else self._unit
        item = whole if self._loading else self._unit
        breaks = plan.cpu[1:] != plan.cpu[:-1] + plan.nbytes[:-1]
        runs = int(np.count_nonzero(breaks)) + 1
        if item >= ITEM_BYTES_MIN and plan.total_bytes >= runs * RUN_BYTES_MIN:
            self._copy_slices(plan, item, np.flatnonzero(breaks) + 1)
        else:
            self._copy_twice(plan, whole)

    def _copy_slices(self, plan: CopyPlan, item: int, cuts: NDArray[np.intp]) -> None:
        """Copy in one pass. A new slice of the region begins at each copy in ``cuts``."""
        ids = self._indices(plan.gpu - self._gpu.start, plan.nbytes, item)
        ends = np.cumsum(plan.nbytes // item)[np.append(cuts, len(plan)) - 1].tolist()
        starts = ((plan.cpu[np.append(0, cuts)] - self._cpu.start) // self._unit).tolist()
        gpu, cpu, step = self._gpu.items(item, self._unit), self._cpu.items(item, self._unit), item // self._unit
        assert self._loading or gpu.flags.c_contiguous  # otherwise np.take would copy the whole address range first
        at = 0
        for start, end in zip(starts, ends, strict=True):
            row = cpu[start : start + (end - at) * step : step]
            if self._loading:
                gpu[ids[at:end]] = row
            else:
                np.take(gpu, ids[at:end], out=row, mode="clip")  # "raise" would buffer the output
            at = end

    def _copy_twice(self, plan: CopyPlan, item: int) -> None:
        """Copy in two passes, one bufferful at a time."""
        gpu, cpu = self._gpu.items(item, self._unit), self._cpu.items(item, self._unit)
        chunk = (np.cumsum(plan.nbytes) - plan.nbytes) // _BUFFER_BYTES
        cuts = (np.flatnonzero(chunk[1:] != chunk[:-1]) + 1).tolist()
        for first, end in zip([0, *cuts], [*cuts, len(plan)], strict=True):
            nbytes = plan.nbytes[first:end]
            gpu_ids = self._indices(plan.gpu[first:end] - self._gpu.start, nbytes, item)
            cpu_ids = self._indices(plan.cpu[first:end] - self._cpu.start, nbytes, item)
            if self._loading:
                gpu[gpu_ids] = cpu[cpu_ids]
            else:
                cpu[cpu_ids] = gpu[gpu_ids]

    def _indices(self, offsets: Int64s, nbytes: Int64s, item: int) -> Int64s:
        """Return the index, in units, of each item of the copies that begin at ``offsets``."""
        starts, counts, step = offsets // self._unit, nbytes // item, item // self._unit
        most = int(counts.max())
        if most == 1:
            return starts
        if most == int(counts.min()):
            return (starts[:, None] + np.arange(0, most * step, step)).ravel()
        before = np.cumsum(counts) - counts
        return np.repeat(starts - before * step, counts) + np.arange(int(counts.sum())) * step


class _AddressSpace:
    """Memory from ``span[0]`` to ``span[1]`` as arrays of items. Items may overlap each other."""

    def __init__(self, span: tuple[int, int]) -> None:
        self.start = span[0]
        memory = (ctypes.c_char * (span[1] - span[0])).from_address(span[0])
        self._memory = np.frombuffer(memoryview(memory), np.uint8)

    def items(self, item: int, stride: int) -> NDArray[np.void]:
        """Return all items of this size; each begins ``stride`` bytes after the item before it."""
        count = (len(self._memory) - item) // stride + 1
        return np.ndarray((count,), f"V{item}", self._memory, strides=(stride,))
