"""The copies of a plan between two places in host memory, near the speed of one thread's memcpy.

numpy moves items of any fixed size, but indexes only one side in one pass, and a copy indexes both. What saves the
second pass: a slot's bytes lie one after another in the region, so one side is a plain slice per slot.

- Loads scatter the slice: ``gpu[ids] = slice``. numpy lets go of the GIL for it from 500 items on; a slice of fewer
  has the GIL as long as its bytes take.
- Stores gather into it: ``np.take(gpu, ids, out=slice)``, always without the GIL. That wants its source contiguous, so
  its items are as long as the tensors' addresses have a divisor in common: 4,096 bytes where they come from mmap.
  Shorter ones are too slow.
- Where a slice is small, a call for each costs more than it moves, and where items are short there is no gain: then
  both sides are indexed, by way of a buffer that stays in the cache: ``destination[ids] = source[ids]``.
- A job of a few short copies is over before numpy has begun: it is a memmove each.

Measured against one memcpy of the same bytes (thread CPU time, random ids, pages from 64 KiB): in one pass loads
0.9-1.2, stores 0.8-1.1, and 0.7 where a slice is a single page of 64 KiB; in two passes 0.4-0.7.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtiers.connector.transfer.transfer_plan import CopyPlan, Direction, Int64s, TransferLayout

RUN_BYTES_MIN = 64 << 10
"""Mean bytes of a slice from which on a call for each is worth it (measured: 57 KiB)."""

ITEM_BYTES_MIN = 2048
"""Shorter items in one pass lose to whole pages in two (measured)."""

LOOP_BYTES_MAX = 1 << 20
"""Jobs of at most so many bytes and 32 copies are faster in a loop (measured: 6 times for one copy, 1.2 for 32)."""

_LOOP_COPIES_MAX = 32
_BUFFER_BYTES = 512 << 10  # half of a usual L2

# With the GIL: 1 MiB takes some 100 µs, which numpy's calls would hold it for as well, and to get it back from a thread
# that computes costs up to 5 ms, after each copy (measured: 20 ms a job).
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
    """Copies plans of one layout in one direction. Any one thread at a time.

    Args:
        owner: kept as long as the copier: whatever owns the memory of the layout.
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
        # Views of address space. What lies between the tensors is never touched: a plan holds checked addresses only.
        self._gpu = _AddressSpace(layout.gpu_span)
        self._cpu = _AddressSpace(layout.cpu_span)
        # numpy refuses an array whose items add up to more than 2^63 bytes, overlapping or not.
        span_bytes = max(end - start for start, end in (layout.gpu_span, layout.cpu_span))
        self._item_bytes_max = (1 << 62) * self._unit // span_bytes

    def mark(self) -> None:
        """Host memory needs no ordering: what was written before the call is there."""

    def copy(self, plan: CopyPlan, _mark: None, /) -> HostCompletion:
        """Copy everything now.

        Raises:
            MemoryError: no room for the indices.
        """
        started = self._clock()
        if len(plan) <= _LOOP_COPIES_MAX and plan.total_bytes <= LOOP_BYTES_MAX:
            self._copy_each(plan)
        elif self._unit >= ITEM_BYTES_MIN:
            self._copy_many(plan)
        else:
            # Items that divide all lengths are too short: those of one length are whole pages.
            for page in np.unique(plan.nbytes).tolist():
                self._copy_many(plan.of_length(page))
        return HostCompletion(self._clock() - started)

    def close(self) -> None:
        """Let go of the memory."""
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
        """In one pass; a slice of the region ends before each copy of ``cuts``."""
        ids = self._indices(plan.gpu - self._gpu.start, plan.nbytes, item)
        ends = np.cumsum(plan.nbytes // item)[np.append(cuts, len(plan)) - 1].tolist()
        starts = ((plan.cpu[np.append(0, cuts)] - self._cpu.start) // self._unit).tolist()
        gpu, cpu, step = self._gpu.items(item, self._unit), self._cpu.items(item, self._unit), item // self._unit
        assert self._loading or gpu.flags.c_contiguous  # else np.take would copy the address space first
        at = 0
        for start, end in zip(starts, ends, strict=True):
            row = cpu[start : start + (end - at) * step : step]
            if self._loading:
                gpu[ids[at:end]] = row
            else:
                np.take(gpu, ids[at:end], out=row, mode="clip")  # "raise" would buffer the output
            at = end

    def _copy_twice(self, plan: CopyPlan, item: int) -> None:
        """In two passes, a bufferful at a time."""
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
        """Index, in units, of each item of the copies that begin at ``offsets``."""
        starts, counts, step = offsets // self._unit, nbytes // item, item // self._unit
        most = int(counts.max())
        if most == 1:
            return starts
        if most == int(counts.min()):
            return (starts[:, None] + np.arange(0, most * step, step)).ravel()
        before = np.cumsum(counts) - counts
        return np.repeat(starts - before * step, counts) + np.arange(int(counts.sum())) * step


class _AddressSpace:
    """Memory from ``span[0]`` to ``span[1]`` as arrays of items, which may overlap each other."""

    def __init__(self, span: tuple[int, int]) -> None:
        self.start = span[0]
        memory = (ctypes.c_char * (span[1] - span[0])).from_address(span[0])
        self._memory = np.frombuffer(memoryview(memory), np.uint8)

    def items(self, item: int, stride: int) -> NDArray[np.void]:
        """All items of that size that begin ``stride`` bytes after one another."""
        count = (len(self._memory) - item) // stride + 1
        return np.ndarray((count,), f"V{item}", self._memory, strides=(stride,))
