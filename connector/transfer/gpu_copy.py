"""Makes the copies of a plan between a GPU and host memory, in stream order.

There are three methods. Each job uses one, chosen by direction, number and mean length of its merged copies:

- ``batch``: one ``cuMemcpyBatchAsync`` for thousands of copies. Uses copy engines; the model keeps the multiprocessors.
- ``kernel``: one Triton kernel over mapped host memory, for small pages, where a copy engine's cost per copy dominates.
- ``copy``: ``Tensor.copy_`` in a loop; needs only torch.

A method that fails is not tried again: that job and all later ones use the next method, in order kernel, batch, copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...tiers.plain_logs import get_logger
from .cuda_driver import ACCESS_ORDER_ANY, ACCESS_ORDER_STREAM, CudaDriver
from .pinning import PinnedMemory
from .transfer_plan import CopyPlan, Direction, Int64s, merge_neighbours

logger = get_logger(__name__)

Method = Literal["batch", "kernel", "copy"]
# vLLM's figures, tuned on an H100 with PCIe 5 (its swap_blocks_triton.py, vllm#42212); we measured none of them.
# Submitting a copy costs 0.5-0.6 µs of CPU in the driver; below 32 KiB, the copy itself is shorter (vllm#48434, H100).
# On another H100 and an A30, the kernel was faster with at least 16-64 copies of 8 KiB, or 64-256 copies of 28 KiB
# (vllm#57343, vllm#57555).
#: Largest mean copy length for which the kernel is used. Stores never use it: from the GPU the copy engine is faster,
#: and nothing waits for a store.
KERNEL_BYTES_MAX = {Direction.LOAD: (28 << 10) - 1, Direction.STORE: 0}
KERNEL_COPIES_MIN = 16
"""Fewer copies are not worth a kernel launch."""

_NEEDS = {
    "kernel": "triton and pinned memory that the device maps at the host's addresses",
    "batch": "a driver of CUDA 12.8 or newer, and pinned memory, if any, that the device maps at the host's addresses",
}
KernelCopy = Callable[[Int64s, Int64s, Int64s, torch.device], object]
"""(dst, src, nbytes, device) -> object to keep alive until the copies have run."""


def submitted_so_far(device: torch.device) -> torch.cuda.Event:
    """Return an event after all work submitted so far to the calling thread's current stream, to wait for elsewhere."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class Allocation:
    """A pair of allocations that copies run between. Each tensor covers its whole allocation: (n,) int8."""

    gpu: torch.Tensor
    cpu: torch.Tensor


@dataclass(slots=True)
class GpuCompletion:
    """A job that was submitted to its stream.

    Attributes:
        start, end: events before and after its copies.
        keep: object to keep alive until ``end``.
        error: error while submitting. Some copies may still be under way, so a failed job also ends only at ``end``.
    """

    start: torch.cuda.Event
    end: torch.cuda.Event
    keep: object
    error: Exception | None

    def done(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.end.synchronize()

    def seconds(self) -> float:
        """Return the GPU time between ``start`` and ``end``.

        Raises:
            Exception: the job failed.
        """
        if self.error is not None:
            raise self.error
        return float(self.start.elapsed_time(self.end)) * 1e-3


class GpuCopier:
    """Copies plans in one direction, on one torch stream.

    torch has 32 streams per priority and hands them out in turn. If other code gets the same stream, its work and these
    copies wait for each other. This costs only speed.

    ``mark`` and ``close`` are called on the engine's thread. ``copy`` is called on the handler's worker thread, so that
    a driver call for thousands of copies, or an unpinned copy that blocks, never takes the engine's time.

    Args:
        allocations: the pairs that ``CopyPlan.allocation`` refers to by index.
        driver: None if there is no libcuda.
        memory: the region's registration; None if pinning was not requested, or there is no libcuda.
        kernel_bytes_max, kernel_copies_min: largest mean copy length and smallest number of copies for which the kernel
            is used, if it is available.
        method: use this method for every job that it can copy, and the methods after it for the other jobs.
        kernel: the copy kernel, and the number of bytes that addresses and lengths must be multiples of; None if the
            kernel cannot be compiled here.

    Attributes:
        methods_used: methods that have copied jobs so far. A job that a method refused counts for the next method.

    Raises:
        ValueError: the requested method cannot work here.
    """

    def __init__(
        self,
        direction: Direction,
        device: torch.device,
        allocations: Sequence[Allocation],
        *,
        driver: CudaDriver | None,
        memory: PinnedMemory | None,
        kernel_bytes_max: int,
        kernel_copies_min: int = 1,
        method: Method | None = None,
        kernel: tuple[KernelCopy, int] | None = None,
    ) -> None:
        self._direction = direction
        self._device = device
        self._allocations = allocations
        self._driver = driver
        self._memory = memory
        self._kernel_bytes_max = kernel_bytes_max
        self._kernel_copies_min = kernel_copies_min
        self._kernel = kernel if memory is not None and memory.mapped else None
        # If the device maps pinned memory at another address (WSL2), the driver does not know it by the host's address.
        by_host_address = memory is None or memory.mapped or not memory.pinned
        can_batch = driver is not None and driver.has_batch and by_host_address
        available: dict[Method, bool] = {"kernel": self._kernel is not None, "batch": can_batch, "copy": True}
        if method is not None and not available[method]:
            raise ValueError(f"method {method!r} needs {_NEEDS[method]}; it is not available here")
        methods = list(available)
        self._methods = [each for each in methods[methods.index(method or "kernel") :] if available[each]]
        self._always_kernel = method == "kernel"
        self.methods_used: set[Method] = set()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Return an event after the engine's work so far on its current stream. The job must come after this event.

        Stores must read what the model has written. Loads must not overwrite blocks that a step in flight still reads.
        """
        return submitted_so_far(self._device)

    def copy(self, plan: CopyPlan, mark: torch.cuda.Event) -> GpuCompletion:
        """Submit all copies. If no method accepts them, the job fails, once the copies submitted before have ended."""
        merged = merge_neighbours(plan, None if self._memory is None else self._memory.cuts)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        keep: object = None
        error: Exception | None = None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            start.record(self._stream)
            try:
                if len(merged):
                    keep = self._submit(merged)
            except Exception as failure:  # noqa: BLE001 - after any error, copies already submitted must end first
                error = failure
            try:
                end.record(self._stream)
            except Exception:
                # Without ``end`` nothing tells when the copies end, and the blocks of a failed job are reused.
                self._stream.synchronize()
                raise
        return GpuCompletion(start, end, keep, error)

    def close(self) -> None:
        """Wait for the stream, then release the pinned memory and the tensors."""
        try:
            self._stream.synchronize()
        finally:
            if self._memory is not None:
                with torch.cuda.device(self._device):
                    self._memory.release()
            self._allocations = ()

    def choose(self, plan: CopyPlan) -> Method:
        """Return the method that copies this merged plan."""
        return next(method for method in self._methods if method != "kernel" or self._is_for_kernel(plan))

    def _is_for_kernel(self, plan: CopyPlan) -> bool:
        assert self._kernel is not None
        small = plan.total_bytes <= self._kernel_bytes_max * len(plan) and len(plan) >= self._kernel_copies_min
        if not (small or self._always_kernel):
            return False
        # The kernel moves whole words: another length would arrive cut off, even if the kernel was requested.
        return not ((plan.gpu | plan.cpu | plan.nbytes) % self._kernel[1]).any()

    def _submit(self, plan: CopyPlan) -> object:
        while True:
            method = self.choose(plan)
            try:
                keep = self._submit_by(method, plan)
            except Exception as error:  # from the driver, torch or Triton; Triton's are not RuntimeErrors
                if method == "copy":
                    raise
                # The next method copies the whole job: the same bytes, on this stream, after the copies already begun.
                self._methods.remove(method)
                logger.warning("%s by %s on %s is not tried again: %r", self._direction, method, self._device, error)
                continue
            if method not in self.methods_used:
                self.methods_used.add(method)
                logger.info(
                    "%s by %s on %s: %d copies of %d bytes in the first job",
                    self._direction,
                    method,
                    self._device,
                    len(plan),
                    plan.total_bytes // len(plan),
                )
            return keep

    def _submit_by(self, method: Method, plan: CopyPlan) -> object:
        storing = self._direction is Direction.STORE
        dst, src = (plan.cpu, plan.gpu) if storing else (plan.gpu, plan.cpu)
        if method == "kernel" and self._kernel is not None:
            return self._kernel[0](dst, src, plan.nbytes, self._device)
        if method == "batch" and self._driver is not None:
            # ANY lets the copy engine read ahead, out of stream order. That is safe for loads: their slots are final.
            # A store's KV may not be written yet, so its reads must stay in stream order, after the wait for `mark`.
            order = ACCESS_ORDER_STREAM if storing else ACCESS_ORDER_ANY
            stream = self._stream.cuda_stream
            self._driver.memcpy_batch(dst, src, plan.nbytes, access_order=order, stream=stream)
            return None
        for gpu, cpu, nbytes, index in zip(
            plan.gpu.tolist(), plan.cpu.tolist(), plan.nbytes.tolist(), plan.allocation.tolist(), strict=True
        ):
            allocation = self._allocations[index]
            on_gpu = allocation.gpu.narrow(0, gpu - allocation.gpu.data_ptr(), nbytes)
            on_cpu = allocation.cpu.narrow(0, cpu - allocation.cpu.data_ptr(), nbytes)
            if storing:
                on_cpu.copy_(on_gpu, non_blocking=True)
            else:
                on_gpu.copy_(on_cpu, non_blocking=True)
        return None
