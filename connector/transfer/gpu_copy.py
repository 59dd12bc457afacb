"""The copies of a plan between a GPU and host memory, in stream order.

Three ways, chosen per job by direction, number and mean length of its merged copies:

- ``batch``: one ``cuMemcpyBatchAsync`` for thousands of copies. Copy engines; the multiprocessors stay with the model.
- ``kernel``: one Triton kernel over mapped host memory, for small pages, where a copy engine's cost per copy dominates.
- ``copy``: ``Tensor.copy_`` in a loop; needs nothing but torch.

A way that is refused is not tried again: that job and those after it go by the next one: kernel, batch, copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvtiers.connector.transfer.cuda_driver import ACCESS_ORDER_ANY, ACCESS_ORDER_STREAM, CudaDriver
from kvtiers.connector.transfer.pinning import PinnedMemory
from kvtiers.connector.transfer.transfer_plan import CopyPlan, Direction, Int64s, merge_neighbours
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

Method = Literal["batch", "kernel", "copy"]
# vLLM's figures, tuned on an H100 with PCIe 5 (its swap_blocks_triton.py, vllm#42212); none is ours. To submit a copy
# takes the driver 0.5-0.6 µs of CPU, below 32 KiB more than to make it (vllm#48434, H100). On another H100 and an A30
# the kernel was ahead from 16-64 copies on at 8 KiB, from 64-256 on at 28 KiB (vllm#57343, vllm#57555).
LOAD_KERNEL_BYTES_MAX = (28 << 10) - 1
STORE_KERNEL_BYTES_MAX = 0
"""Never: from the GPU the copy engine wins, and nothing waits for a store."""
KERNEL_COPIES_MIN = 16
"""Fewer are not worth a launch."""

_NEEDS = {
    "kernel": "triton and pinned memory that the device has at the host's addresses",
    "batch": "a driver of CUDA 12.8 or newer, and pinned memory, if any, that the device has at the host's addresses",
}
KernelCopy = Callable[[Int64s, Int64s, Int64s, torch.device], object]
"""(dst, src, nbytes, device) -> what must live until the copies have run."""


def submitted_so_far(device: torch.device) -> torch.cuda.Event:
    """What has been submitted on the calling thread's current stream: for work of another stream to wait for."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class Allocation:
    """One pair of allocations that copies run between, each as all its bytes: (n,) int8."""

    gpu: torch.Tensor
    cpu: torch.Tensor


@dataclass(slots=True)
class GpuCompletion:
    """A job on its stream.

    Attributes:
        keep: what must live until ``end``.
        error: what went wrong while it was submitted; part of its copies may be under way all the same, so it too
            is over only after ``end``.
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
        """GPU time between the job's events.

        Raises:
            Exception: the job failed.
        """
        if self.error is not None:
            raise self.error
        return float(self.start.elapsed_time(self.end)) * 1e-3


class GpuCopier:
    """Copies plans in one direction on a stream of torch's.

    torch has 32 of a priority and gives them out in turn: whoever gets the same one waits for these copies as they wait
    for its work. Nothing but speed depends on having it alone.

    ``mark`` is called on the engine's thread, ``copy`` and ``close`` on the handler's worker: a driver call for
    thousands of copies, or an unpinned copy that blocks, is never the engine's time.

    Args:
        allocations: as ``CopyPlan.allocation`` counts them.
        driver: None where there is no libcuda.
        memory: the region's registration; None where it was not asked for.
        kernel_bytes_max, kernel_copies_min: mean copy length up to which and number of copies from which on the kernel
            is used, where it can be.
        method: use this one for every job that it can take; for the others what comes after it: kernel, batch, copy.
        kernel: the copy kernel, and the bytes its addresses must be multiples of; None where triton is not there.

    Attributes:
        methods_used: those that took jobs so far; what one refuses counts for the next.

    Raises:
        ValueError: the method asked for cannot work here.
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
        # Pinned memory that the device has at another address (WSL2) is not known to the driver by the host's.
        by_host_address = memory is None or memory.mapped or not memory.pinned
        can_batch = driver is not None and driver.has_batch and by_host_address
        here: dict[Method, bool] = {"kernel": self._kernel is not None, "batch": can_batch, "copy": True}
        if method is not None and not here[method]:
            raise ValueError(f"method {method!r} needs {_NEEDS[method]}; it is not here")
        ways = list(here)
        self._ways = [way for way in ways[ways.index(method or "kernel") :] if here[way]]
        self._always_kernel = method == "kernel"
        self.methods_used: set[Method] = set()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """What the engine has submitted so far on its current stream, and a job must come after.

        Stores, so that they read what the model has written; loads, so that they do not overwrite blocks that a step
        still in flight reads.
        """
        return submitted_so_far(self._device)

    def copy(self, plan: CopyPlan, mark: torch.cuda.Event) -> GpuCompletion:
        """Submit everything. What no way takes fails the job, after the copies submitted before it have ended."""
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
            except Exception as failure:  # noqa: BLE001 - any refusal must wait for what was already submitted
                error = failure
            try:
                end.record(self._stream)
            except Exception:
                # Nothing else tells when the copies end, and whoever hears of a failure gives their blocks away.
                self._stream.synchronize()
                raise
        return GpuCompletion(start, end, keep, error)

    def close(self) -> None:
        """Wait for the stream, then give the pinned memory back and let go of the tensors."""
        try:
            self._stream.synchronize()
        finally:
            if self._memory is not None:
                with torch.cuda.device(self._device):
                    self._memory.release()
            self._allocations = ()

    def choose(self, plan: CopyPlan) -> Method:
        """How a merged plan is copied."""
        return next(way for way in self._ways if way != "kernel" or self._is_for_kernel(plan))

    def _is_for_kernel(self, plan: CopyPlan) -> bool:
        assert self._kernel is not None
        small = plan.total_bytes <= self._kernel_bytes_max * len(plan) and len(plan) >= self._kernel_copies_min
        if not (small or self._always_kernel):
            return False
        # It moves whole words: what is no multiple would arrive cut off, whoever asked for the kernel.
        return not ((plan.gpu | plan.cpu | plan.nbytes) % self._kernel[1]).any()

    def _submit(self, plan: CopyPlan) -> object:
        while True:
            method = self.choose(plan)
            try:
                keep = self._submit_by(method, plan)
            except Exception as error:  # the driver's, torch's, or Triton's, which are no RuntimeErrors
                if method == "copy":
                    raise
                # The next way copies the whole job: the same bytes, and on this stream after what was begun.
                self._ways.remove(method)
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
            # ANY lets the engine read ahead, out of stream order: a slot is final when it is loaded. KV that is
            # stored is not: it may still be being written, so its reads keep to the stream and its wait for `mark`.
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
