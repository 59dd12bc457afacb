"""Copies between a worker's KV tensors and its part of the CPU region: GPU -> CPU (store) and CPU -> GPU (load).

``CopyHandler`` serves both directions, for CUDA and for CPU tensors; only its copier differs. A transfer is checked on
the engine's thread. A worker thread, one per direction, turns it into copies and submits them (CUDA) or makes them
(CPU). A job is reported only when nothing can touch its blocks and slots any more.

The engine may use loaded blocks only after ``get_finished`` has returned the job, or ``wait`` for the job has returned:
loads run on their own stream, and the engine's stream does not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...tiers.plain_logs import get_logger
from ..base import (
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from .cuda_driver import CudaDriver
from .gpu_copy import (
    KERNEL_BYTES_MAX,
    KERNEL_COPIES_MIN,
    Allocation,
    GpuCopier,
    KernelCopy,
    Method,
)
from .host_copy import HostCopier
from .pinning import PinnedMemory, pieces_of
from .transfer_plan import CopyPlan, Direction, TensorGeometry, Transfer, TransferLayout

logger = get_logger(__name__)


class Completion(Protocol):
    """A job that was handed to a copier."""

    def done(self) -> bool:
        """Return whether the job has ended: nothing touches its memory any more."""

    def wait(self) -> None:
        """Wait until the job has ended."""

    def seconds(self) -> float:
        """Return the duration of the copy. Raises the error that made the job fail."""


class Copier(Protocol):
    """Makes the copies of a plan in one direction."""

    def mark(self) -> Any:
        """Return the point in the engine's work that the copy must come after. Called on the engine's thread."""

    def copy(self, plan: CopyPlan, mark: Any, /) -> Completion:
        """Make or submit the copies. Called on the worker thread."""

    def close(self) -> None:
        """Release everything. Called after the last job has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """Tuning options. Copy lengths and numbers are those after adjacent copies were merged.

    Attributes:
        jobs_max: transfers in flight per direction; more are not accepted.
        pin: page-lock the region (CUDA).
        pin_piece_bytes_max: largest piece of the region that is registered in one call.
        method: use "batch", "kernel" or "copy" for every job, if possible. None: choose for each job. CUDA only; see
            ``GpuCopier``.
    """

    jobs_max: int = 1024
    pin: bool = True
    pin_piece_bytes_max: int = 1 << 30
    method: Method | None = None

    def __post_init__(self) -> None:
        if self.method not in (None, "batch", "kernel", "copy"):
            raise ValueError(f"method {self.method!r} is not accepted; write 'batch', 'kernel', 'copy' or None")
        if self.jobs_max < 1 or self.pin_piece_bytes_max < 1:
            raise ValueError(f"jobs_max and pin_piece_bytes_max must be 1 or more in {self}")


@dataclass(slots=True)
class _Job:
    nbytes: int
    submitted: Future[Completion]

    def completion(self) -> Completion:
        """Return the copier's handle, once the copy was submitted. Raises if the copy could not be submitted."""
        if (error := self.submitted.exception()) is not None:
            raise RuntimeError(f"the copy was not submitted: {error!r}") from error
        return self.submitted.result()


class CopyHandler(OffloadingHandler):
    """Makes transfers in one direction, in the order they were given.

    Only one thread at a time may call it; that thread owns ``_jobs``. The worker thread uses the plan and the copier.

    Attributes:
        copier: makes or submits the copies.
    """

    def __init__(self, direction: Direction, layout: TransferLayout, copier: Copier, *, jobs_max: int) -> None:
        self._direction = direction
        self._layout = layout
        self.copier = copier
        self._jobs_max = jobs_max
        self._jobs: dict[int, _Job] = {}
        self._closed = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kvtiers-{direction}")
        # Start the thread now. If it cannot start, submit raises but keeps the job: a later thread would run it unseen.
        self._worker.submit(lambda: None)

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a copy. False: ``jobs_max`` transfers are in flight, or the handler was shut down.

        The copy comes after all work submitted to the current stream before this call.

        Raises:
            ValueError: the transfer is impossible. Nothing was copied and no result will be reported.
        """
        transfer = self._check(spec)
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is in flight")
        if self._closed or len(self._jobs) >= self._jobs_max:
            return False
        submitted = self._worker.submit(self._copy, transfer, self.copier.mark())
        self._jobs[job_id] = _Job(transfer.total_bytes, submitted)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call. Failures are logged with their cause."""
        results = []
        for job_id, job in list(self._jobs.items()):
            if not job.submitted.done():
                break  # jobs end in order: there is one worker and one stream
            try:
                completion = job.completion()
                if not completion.done():
                    break
                result = TransferResult(job_id, True, job.nbytes, completion.seconds())
            except Exception as error:  # noqa: BLE001 - the engine must get a result, never an exception
                logger.error("%s job %d failed: %r", self._direction, job_id, error)
                result = TransferResult(job_id, False, 0, 0.0)
            del self._jobs[job_id]
            results.append(result)
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Wait until these transfers have ended, successfully or not. ``get_finished`` still reports them."""
        asked = set(job_ids)
        # Jobs end in order, so wait for the last one only: waking after each would take the GIL from the worker.
        for job in reversed([job for job_id, job in self._jobs.items() if job_id in asked]):
            try:
                job.completion().wait()
            except Exception as error:  # noqa: BLE001 - get_finished reports the error
                logger.debug("a %s failed: %r", self._direction, error)
            else:
                return

    def shutdown(self) -> None:
        """Cancel jobs that have not begun, wait for the others, release everything. ``get_finished`` reports them."""
        if self._closed:
            return
        self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self.wait(list(self._jobs))
        try:
            self.copier.close()
        except Exception as error:  # noqa: BLE001 - a dead device must not prevent the engine's shutdown
            logger.error("%s handler did not close cleanly: %r", self._direction, error)

    def _check(self, spec: TransferSpec) -> Transfer:
        gpu, cpu = spec if self._direction is Direction.STORE else spec[::-1]
        if not (isinstance(gpu, GPULoadStoreSpec) and isinstance(cpu, CPULoadStoreSpec)):
            wanted = "GPU to CPU" if self._direction is Direction.STORE else "CPU to GPU"
            raise ValueError(f"a {self._direction} goes from {wanted}, not {spec[0].medium()} to {spec[1].medium()}")
        return self._layout.check(gpu, cpu, self._direction)

    def _copy(self, transfer: Transfer, mark: Any) -> Completion:
        return self.copier.copy(transfer.plan(), mark)


def create_handlers(
    kv_caches: CanonicalKVCaches, region_views: Sequence[torch.Tensor], blocks_per_chunk: int, **options: Any
) -> tuple[CopyHandler, CopyHandler]:
    """Create the worker's store (GPU -> CPU) and load (CPU -> GPU) handlers.

    Args:
        kv_caches: tensors on one device, CUDA or CPU.
        region_views: one view per tensor of ``kv_caches``: int8 (num_slots, page_size_bytes * blocks_per_chunk), stride
            (row_stride, 1). GPU block j of a chunk starts at byte ``j * page_size_bytes`` of its row.
        blocks_per_chunk: GPU blocks in one slot.
        options: fields of ``HandlerOptions``.

    Raises:
        ValueError: tensors and views do not match, or an option's value is not accepted.
        TypeError: an unknown option.
        RuntimeError: a thread cannot be started.
    """
    chosen = HandlerOptions(**options)
    _check_tensors(kv_caches, region_views, blocks_per_chunk)
    device = kv_caches.tensors[0].tensor.device
    layout, allocations = lay_out(kv_caches, region_views, blocks_per_chunk)
    store: Copier
    load: Copier
    if device.type == "cpu":
        store, load = (HostCopier(layout, way, owner=allocations) for way in Direction)
    else:
        store, load = _gpu_copiers(device, allocations, region_views, chosen)
    copiers = [store, load]
    handlers: list[CopyHandler] = []
    try:
        for way, copier in zip(Direction, copiers, strict=True):
            handlers.append(CopyHandler(way, layout, copier, jobs_max=chosen.jobs_max))
    except RuntimeError:  # a thread cannot be started; without this cleanup the region would stay pinned
        for handler in handlers:
            handler.shutdown()
        for copier in copiers[len(handlers) :]:
            copier.close()
        raise
    return handlers[0], handlers[1]


def _check_tensors(kv_caches: CanonicalKVCaches, region_views: Sequence[torch.Tensor], blocks_per_chunk: int) -> None:
    if not kv_caches.tensors or len(kv_caches.tensors) != len(region_views):
        raise ValueError(f"{len(region_views)} region views for {len(kv_caches.tensors)} KV tensors; one for each")
    device, num_slots = kv_caches.tensors[0].tensor.device, region_views[0].shape[0]
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"KV tensors on {device}; accepted are cuda and cpu")
    for index, (entry, view) in enumerate(zip(kv_caches.tensors, region_views, strict=True)):
        _check_rows(f"KV tensor {index}", entry.tensor, entry.page_size_bytes, device)
        _check_rows(f"region view {index}", view, entry.page_size_bytes * blocks_per_chunk, torch.device("cpu"))
        if view.shape[0] != num_slots:
            raise ValueError(f"region view {index} has {view.shape[0]} slots, the first has {num_slots}")


def _check_rows(what: str, tensor: torch.Tensor, row_bytes: int, device: torch.device) -> None:
    fits = (
        tensor.dtype == torch.int8
        and tensor.ndim == 2
        and tensor.shape[0] > 0
        and tensor.shape[1] == row_bytes > 0
        and tensor.stride(1) == 1
        and tensor.stride(0) >= row_bytes
        and tensor.device == device
    )
    if not fits:
        raise ValueError(
            f"{what} is {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
            f"accepted is int8 (n, {row_bytes}), stride (at least {row_bytes}, 1), on {device}"
        )


def lay_out(
    kv_caches: CanonicalKVCaches, region_views: Sequence[torch.Tensor], blocks_per_chunk: int
) -> tuple[TransferLayout, list[Allocation]]:
    """Return the layout of matching tensors and views, and the allocations that its plans refer to by index."""
    pairs: dict[tuple[int, int], tuple[int, Allocation]] = {}
    tensors = []
    for entry, view in zip(kv_caches.tensors, region_views, strict=True):
        pair = Allocation(_all_bytes(entry.tensor), _all_bytes(view))
        allocation, _ = pairs.setdefault((pair.gpu.data_ptr(), pair.cpu.data_ptr()), (len(pairs), pair))
        tensors.append(
            TensorGeometry(
                gpu_address=entry.tensor.data_ptr(),
                gpu_stride_bytes=entry.tensor.stride(0),
                num_blocks=entry.tensor.shape[0],
                page_size_bytes=entry.page_size_bytes,
                cpu_address=view.data_ptr(),
                cpu_stride_bytes=view.stride(0),
                allocation=allocation,
            )
        )
    num_slots = region_views[0].shape[0]
    layout = TransferLayout(tensors, kv_caches.group_data_refs, num_slots=num_slots, blocks_per_chunk=blocks_per_chunk)
    return layout, [pair for _, pair in pairs.values()]


def _gpu_copiers(
    device: torch.device,
    allocations: Sequence[Allocation],
    region_views: Sequence[torch.Tensor],
    options: HandlerOptions,
) -> tuple[GpuCopier, GpuCopier]:
    driver = CudaDriver.load()
    memory = None
    with torch.cuda.device(device):
        if options.pin and driver is not None:
            torch.cuda.current_stream(device).synchronize()  # torch creates the context late; the driver calls need it
            pieces = _region_pieces(region_views, options.pin_piece_bytes_max)
            memory = PinnedMemory(driver, pieces, users=len(Direction))
        elif options.pin:
            logger.warning("cannot pin the region: there is no libcuda.so.1. Copies go on unpinned, which is slower.")
        kernel, kernel_error = _load_kernel(device) if memory is not None and memory.mapped else (None, None)
    try:
        store, load = (
            GpuCopier(
                way,
                device,
                allocations,
                driver=driver,
                memory=memory,
                kernel_bytes_max=KERNEL_BYTES_MAX[way],
                kernel_copies_min=KERNEL_COPIES_MIN,
                method=options.method,
                kernel=kernel,
            )
            for way in Direction
        )
    except ValueError as error:  # the requested method is not available here
        with torch.cuda.device(device):
            for _ in Direction:
                if memory is not None:
                    memory.release()
        if options.method == "kernel" and kernel_error is not None:
            raise ValueError(f"{error}: {kernel_error!r}") from kernel_error
        raise
    return store, load


def _region_pieces(region_views: Sequence[torch.Tensor], piece_bytes_max: int) -> list[tuple[int, int]]:
    pieces = []
    by_storage: dict[int, list[torch.Tensor]] = {}
    for view in region_views:
        by_storage.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    for views in by_storage.values():
        row_bytes = views[0].stride(0)
        if any(view.stride(0) != row_bytes for view in views):
            raise ValueError(
                f"region views of one region have strides {[view.stride(0) for view in views]}; one is accepted"
            )
        start = min(view.data_ptr() for view in views)
        end = max(view.data_ptr() + (len(view) - 1) * row_bytes + view.shape[1] for view in views)
        pieces += pieces_of(start, end - start, row_bytes, piece_bytes_max)
    return sorted(pieces)


def _all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _load_kernel(device: torch.device) -> tuple[tuple[KernelCopy, int] | None, Exception | None]:
    """Compile the copy kernel. Returns ((kernel, bytes of its word), None), or (None, the error)."""
    try:
        from . import triton_copy

        triton_copy.compile_for(device)
    except Exception as error:  # noqa: BLE001 - triton or its compiler is missing, or the device is unsupported
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        logger.log(logging.INFO if is_missing else logging.WARNING, "no copy kernel on %s: %r", device, error)
        return None, error
    return (triton_copy.copy_pages, triton_copy.WORD_BYTES), None
