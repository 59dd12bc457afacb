"""The CUDA copier on a machine without one: streams and events record what happens, the driver copies host memory."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvtiers.connector import transfer
from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.connector.transfer.cuda_driver import ACCESS_ORDER_ANY, ACCESS_ORDER_STREAM, CudaDriver
from kvtiers.connector.transfer.gpu_copy import GpuCopier
from kvtiers.connector.transfer.gpu_handler import Copier, CopyHandler, HandlerOptions, _gpu_copiers, lay_out
from kvtiers.connector.transfer.host_copy import HostCopier
from kvtiers.connector.transfer.pinning import PinnedMemory
from kvtiers.connector.transfer.transfer_plan import CopyPlan, Direction, Int64s, merge_neighbours
from tests.connector.transfer.test_cuda_driver import NO_VERSION, FakeCuda
from tests.connector.transfer.transfer_cases import POISON, Job, World, finish, make_job, make_world, pages_of

ENGINE_STREAM = 1
Log = list[tuple[str, int]]


class FakeStream:
    def __init__(self, log: Log, handle: int) -> None:
        self.log, self.cuda_stream = log, handle

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait", event.number))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.cuda_stream))


class FakeEvent:
    """Done once it was recorded, unless ``pending``."""

    def __init__(self, log: Log, number: int) -> None:
        self.log, self.number = log, number
        self.stream = 0
        self.error: Exception | None = None

    def record(self, stream: FakeStream) -> None:
        if self.error is not None:
            raise self.error
        self.stream = stream.cuda_stream
        self.log.append(("record", self.number))

    def query(self) -> bool:
        return self.stream != 0

    def synchronize(self) -> None:
        assert self.stream

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.stream == end.stream
        return 250.0


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log: Log = []
    streams, events = iter(range(ENGINE_STREAM + 1, 99)), iter(range(999))
    engine = FakeStream(log, ENGINE_STREAM)

    def event(*, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(log, next(events))

    def scope(_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: FakeStream(log, next(streams)))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "stream", scope)
    monkeypatch.setattr(torch.cuda, "device", scope)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: engine)
    return log


class Copies:
    """One direction over a world of CPU tensors that are taken for CUDA ones."""

    def __init__(self, world: World, direction: Direction, cuda: FakeCuda | None, **options: Any) -> None:
        self.world, self.direction = world, direction
        self.layout, allocations = lay_out(world.caches, world.views, world.factor)
        self.copier = GpuCopier(
            direction,
            torch.device("cuda"),
            allocations,
            driver=None if cuda is None else CudaDriver(cuda),
            memory=options.pop("memory", None),
            kernel_bytes_max=options.pop("kernel_bytes_max", 0),
            **options,
        )
        self.handler: OffloadingHandler = CopyHandler(direction, self.layout, self.copier, jobs_max=9)

    def plan(self, job: Job) -> CopyPlan:
        return self.layout.check(job.gpu, job.cpu, self.direction).plan()

    def run(self, job: Job) -> bool:
        """Whether it succeeded, having checked the bytes if so."""
        storing = self.direction is Direction.STORE
        for kv, slot in pages_of(self.world, job):
            (slot if storing else kv).fill_(POISON)
        assert self.handler.transfer_async(1, (job.gpu, job.cpu) if storing else (job.cpu, job.gpu))
        self.handler.wait({1})
        (result,) = finish(self.handler, 1)
        if result.success:
            assert all(torch.equal(kv, slot) for kv, slot in pages_of(self.world, job))
            assert result.transfer_time == 0.25
        return result.success


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def world(rng: np.random.Generator) -> World:
    return make_world(rng, pages=[64, 64], groups=[[(0, 64), (1, 48)]], factor=4)


Make = Callable[..., Copies]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes Copies, and shuts them down."""
    made: list[Copies] = []

    def make(*arguments: Any, **options: Any) -> Copies:
        made.append(Copies(*arguments, **options))
        return made[-1]

    yield make
    for copies in made:
        copies.handler.shutdown()


@pytest.mark.parametrize(
    ("direction", "order"), [(Direction.STORE, ACCESS_ORDER_STREAM), (Direction.LOAD, ACCESS_ORDER_ANY)]
)
def test_job_is_one_batch_between_its_events(
    rng: np.random.Generator, world: World, log: Log, make: Make, direction: Direction, order: int
) -> None:
    cuda = FakeCuda()
    cuda.before_batch = lambda: log.append(("batch", 0))
    copies = make(world, direction, cuda)
    job = make_job(rng, world, [11], [2])
    assert copies.run(job)
    assert cuda.batches == [(order, 0, ENGINE_STREAM + 1, len(merge_neighbours(copies.plan(job))))]
    mark, start, end = 0, 1, 2
    assert log == [("record", mark), ("wait", mark), ("record", start), ("batch", 0), ("record", end)]


def test_mark_is_recorded_on_the_stream_of_the_engine(world: World, make: Make) -> None:
    copies = make(world, Direction.STORE, FakeCuda())
    mark: Any = copies.copier.mark()
    assert mark.stream == ENGINE_STREAM


def test_job_refused_by_every_method_fails_after_its_submitted_copies(
    rng: np.random.Generator, world: World, log: Log, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    copies = make(world, Direction.STORE, cuda)
    cuda.fail_at = 2

    def dead(*_: object, **_options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", dead)
        assert not copies.run(make_job(rng, world, [9]))
    assert log[-1] == ("record", 2), "its end is recorded, so it is reported only when its first copies have ended"
    assert "cuMemcpyBatchAsync at copy 2" in caplog.text
    assert "an illegal memory access" in caplog.text
    assert copies.run(make_job(rng, world, [9]))


def test_job_whose_end_cannot_be_marked_fails_after_its_copies(
    rng: np.random.Generator, world: World, log: Log, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    copies = make(world, Direction.STORE, cuda)
    new_event: Any = torch.cuda.Event

    def no_end(*, enable_timing: bool = False) -> Any:
        event = new_event(enable_timing=enable_timing)
        if event.number == 2:  # after the mark and the start
            event.error = RuntimeError("CUDA error: out of memory")
        return event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", no_end)
        assert not copies.run(make_job(rng, world, [9]))
    assert len(cuda.batches) == 1
    assert log[-1] == ("synchronize", ENGINE_STREAM + 1)
    assert "CUDA error: out of memory" in caplog.text
    assert copies.run(make_job(rng, world, [9]))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("fail_at", [0, 2, -1])
def test_refused_batch_falls_back_to_single_copies_and_is_not_tried_again(
    rng: np.random.Generator,
    world: World,
    make: Make,
    caplog: pytest.LogCaptureFixture,
    direction: Direction,
    fail_at: int,
) -> None:
    cuda = FakeCuda()
    cuda.fail_at = fail_at
    copies = make(world, direction, cuda)
    assert copies.run(make_job(rng, world, [9]))
    assert copies.run(make_job(rng, world, [5]))
    assert len(cuda.batches) == 1
    assert caplog.text.count(f"{direction} by batch on cuda is not tried again: ") == 1
    assert "cuMemcpyBatchAsync" in caplog.text
    assert copies.copier.methods_used == {"copy"}


class CompilationError(Exception):
    """Triton's are no RuntimeErrors."""


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), CompilationError("at 1:0:")]
)
def test_job_falls_back_from_kernel_to_batch_to_single_copies(
    rng: np.random.Generator, world: World, make: Make, direction: Direction, error: Exception
) -> None:
    cuda, kernel = FakeCuda(), Kernel()
    kernel.error = error
    memory = pinned(world, cuda)
    copies = make(world, direction, cuda, memory=memory, kernel=(kernel, 8), method="kernel")
    assert copies.run(make_job(rng, world, [9]))
    assert copies.run(make_job(rng, world, [9]))
    assert (len(kernel.jobs), len(cuda.batches)) == (1, 2)
    assert copies.copier.methods_used == {"batch"}
    cuda.fail_at = 1
    assert copies.run(make_job(rng, world, [9]))
    assert copies.run(make_job(rng, world, [9]))
    assert (len(kernel.jobs), len(cuda.batches)) == (1, 3)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("cuda", [None, FakeCuda(batch_since=NO_VERSION)], ids=["no driver", "old driver"])
def test_driver_without_batch_call_uses_single_copies(
    rng: np.random.Generator,
    world: World,
    make: Make,
    caplog: pytest.LogCaptureFixture,
    direction: Direction,
    cuda: FakeCuda | None,
) -> None:
    copies = make(world, direction, cuda)
    with caplog.at_level(logging.INFO):
        assert copies.run(make_job(rng, world, [11], [2]))
        assert copies.run(make_job(rng, world, [3]))
    assert caplog.text.count(f"{direction} by copy on cuda") == 1


class Kernel:
    """Copies as a kernel would, or raises ``error``; keeps what it was asked for."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.error: Exception | None = None

    def __call__(self, dst: Int64s, src: Int64s, nbytes: Int64s, device: torch.device) -> object:
        self.jobs.append(len(dst))
        if self.error is not None:
            raise self.error
        whole_words = nbytes // 8 * 8
        CudaDriver(FakeCuda()).memcpy_batch(dst, src, whole_words, access_order=ACCESS_ORDER_ANY, stream=1)
        return object()


def pinned(world: World, cuda: FakeCuda) -> PinnedMemory:
    return PinnedMemory(CudaDriver(cuda), [(view.data_ptr(), 1) for view in world.views])


@pytest.mark.parametrize("direction", Direction)
def test_small_copies_use_the_kernel_and_large_copies_the_batch(
    rng: np.random.Generator, world: World, make: Make, direction: Direction
) -> None:
    cuda, kernel = FakeCuda(), Kernel()
    memory = pinned(world, cuda)
    copies = make(world, direction, cuda, memory=memory, kernel=(kernel, 8), kernel_bytes_max=56)
    apart = Job([1, 5, 9], [3], (3,), (0,))
    assert copies.run(apart)
    assert (kernel.jobs, cuda.batches) == ([6], [])
    together = Job([0, 1, 2, 3], [3], (4,), (0,))  # 64-byte pages that merge, and 48-byte pages that do not
    assert copies.run(together)
    assert (len(kernel.jobs), len(cuda.batches)) == (1, 1)


@pytest.mark.parametrize("options", [{"kernel_bytes_max": 999}, {"method": "kernel"}], ids=["small", "asked for"])
def test_copies_at_addresses_unfit_for_the_kernel_use_the_batch(
    rng: np.random.Generator, make: Make, options: dict[str, Any]
) -> None:
    odd = make_world(rng, pages=[60], groups=[[(0, 60)]])
    cuda, kernel = FakeCuda(), Kernel()
    copies = make(odd, Direction.STORE, cuda, memory=pinned(odd, cuda), kernel=(kernel, 8), **options)
    assert copies.run(make_job(rng, odd, [5]))
    assert (kernel.jobs, len(cuda.batches)) == ([], 1)


def test_jobs_of_few_copies_use_the_batch_and_not_the_kernel(
    rng: np.random.Generator, world: World, make: Make
) -> None:
    cuda, kernel = FakeCuda(), Kernel()
    limits = {"kernel_bytes_max": 64, "kernel_copies_min": 6}
    copies = make(world, Direction.LOAD, cuda, memory=pinned(world, cuda), kernel=(kernel, 8), **limits)
    assert copies.run(Job([1, 5], [3], (2,), (0,)))
    assert (kernel.jobs, len(cuda.batches)) == ([], 1)
    assert copies.run(Job([1, 5, 9], [3], (3,), (0,)))
    assert (kernel.jobs, len(cuda.batches)) == ([6], 1)


def test_pinned_memory_at_another_device_address_is_copied_by_torch(
    rng: np.random.Generator, world: World, make: Make
) -> None:
    cuda, kernel = FakeCuda(), Kernel()
    cuda.mapped_by = 1 << 40
    memory = pinned(world, cuda)
    copies = make(world, Direction.LOAD, cuda, memory=memory, kernel=(kernel, 8), kernel_bytes_max=999)
    assert copies.run(make_job(rng, world, [9]))
    assert (kernel.jobs, cuda.batches) == ([], [])
    for method in ("kernel", "batch"):
        with pytest.raises(ValueError, match=f"method '{method}' needs .* maps at the host's addresses"):
            Copies(world, Direction.LOAD, cuda, memory=memory, kernel=(kernel, 8), method=method)


def test_unpinned_memory_is_copied_by_batch(rng: np.random.Generator, world: World, make: Make) -> None:
    cuda = FakeCuda()
    cuda.register_code = 2
    copies = make(world, Direction.STORE, cuda, memory=pinned(world, cuda))
    assert copies.run(make_job(rng, world, [9]))
    assert len(cuda.batches) == 1


def test_copies_do_not_cross_borders_of_registered_memory_pieces(rng: np.random.Generator, make: Make) -> None:
    """Slots and blocks that follow each other would be one copy; each row is its own piece here."""
    rows = make_world(rng, pages=[4096], groups=[[(0, 4096)]])
    cuda = FakeCuda()
    start = rows.region.data_ptr()
    job = Job([4, 5, 6], [1, 2, 3], (3,), (0,))
    memory = PinnedMemory(CudaDriver(cuda), [(start + row * 4096, 4096) for row in range(len(rows.region))])
    assert make(rows, Direction.STORE, cuda).run(job)
    assert make(rows, Direction.STORE, cuda, memory=memory).run(job)
    assert [batch[-1] for batch in cuda.batches] == [1, 3]


@pytest.mark.parametrize(
    ("method", "cuda", "message"),
    [
        ("kernel", FakeCuda(), "method 'kernel' needs triton and pinned memory"),
        ("batch", None, "method 'batch' needs a driver of CUDA 12.8"),
    ],
)
def test_unavailable_copy_method_is_refused(world: World, method: str, cuda: FakeCuda | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Copies(world, Direction.LOAD, cuda, method=method)


@pytest.mark.parametrize("method", ["batch", "kernel", "copy"])
def test_requested_copy_method_is_used(rng: np.random.Generator, world: World, make: Make, method: str) -> None:
    cuda, kernel = FakeCuda(), Kernel()
    memory = pinned(world, cuda)
    copies = make(world, Direction.LOAD, cuda, memory=memory, kernel=(kernel, 8), method=method)
    job = make_job(rng, world, [11])
    assert copies.run(job)
    assert (len(kernel.jobs), len(cuda.batches)) == {"batch": (0, 1), "kernel": (1, 0), "copy": (0, 0)}[method]
    assert copies.copier.methods_used == {method}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, log: Log) -> FakeCuda:
    """The machine's driver."""
    cuda = FakeCuda()
    monkeypatch.setattr(CudaDriver, "load", lambda: CudaDriver(cuda))
    return cuda


def no_kernel(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """No triton, or one that compiles nothing."""

    def compile_for(_device: torch.device) -> None:
        assert error is not None
        raise error

    for name in ("triton", "kvtiers.connector.transfer.triton_copy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(transfer, "triton_copy", raising=False)
    if error is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        fake: Any = ModuleType("kvtiers.connector.transfer.triton_copy")
        fake.compile_for = compile_for
        monkeypatch.setitem(sys.modules, "kvtiers.connector.transfer.triton_copy", fake)


def made(world: World, **options: Any) -> tuple[GpuCopier, GpuCopier]:
    _layout, allocations = lay_out(world.caches, world.views, world.factor)
    return _gpu_copiers(torch.device("cuda"), allocations, world.views, HandlerOptions(**options))


@pytest.mark.parametrize(
    ("error", "level", "cause"),
    [
        (None, logging.INFO, "No module named 'triton'|import of triton halted"),
        (RuntimeError("fatal error: Python.h: No such file"), logging.WARNING, "Python.h"),
        (ModuleNotFoundError("No module named 'distutils'", name="distutils"), logging.WARNING, "distutils"),
    ],
    ids=["no triton", "no compiler", "half a triton"],
)
def test_reason_for_missing_kernel_is_logged_and_in_the_error(
    world: World,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    level: int,
    cause: str,
) -> None:
    no_kernel(monkeypatch, error)
    with caplog.at_level(logging.INFO):
        for copier in made(world):
            copier.close()
    assert [record.levelno for record in caplog.records if "no copy kernel" in record.message] == [level]
    with pytest.raises(ValueError, match=f"method 'kernel' needs triton .*({cause})"):
        made(world, method="kernel")
    assert cuda.registered == {}


def test_region_that_cannot_be_pinned_without_a_driver_is_logged(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CudaDriver, "load", lambda: None)
    made(world, pin=False)
    assert "cannot pin" not in caplog.text
    made(world)
    assert "cannot pin the region: there is no libcuda.so.1" in caplog.text


def test_shutdown_waits_for_the_stream_and_unpins(world: World, log: Log) -> None:
    cuda = FakeCuda()
    copies = Copies(world, Direction.LOAD, cuda, memory=pinned(world, cuda))
    copies.handler.shutdown()
    assert log == [("synchronize", ENGINE_STREAM + 1)]
    assert cuda.registered == {}


@pytest.mark.parametrize("of_gpu", [True, False])
def test_shutdown_releases_every_view_of_the_region(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture, of_gpu: bool
) -> None:
    region = SharedOffloadRegion.anonymous(4, 64)
    tensor = CanonicalKVCacheTensor(torch.zeros(4, 64, dtype=torch.int8), 64)
    caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 64)]])
    layout, allocations = lay_out(caches, [region.create_next_view(64)], 1)
    copier: Copier
    if of_gpu:
        copier = GpuCopier(
            Direction.LOAD, torch.device("cuda"), allocations, driver=None, memory=None, kernel_bytes_max=0
        )
    else:
        copier = HostCopier(layout, Direction.LOAD, owner=allocations)
    handler = CopyHandler(Direction.LOAD, layout, copier, jobs_max=9)
    del allocations
    assert handler.transfer_async(1, (CPULoadStoreSpec([1]), GPULoadStoreSpec([2])))
    handler.wait([1])
    handler.shutdown()
    with caplog.at_level(logging.DEBUG):
        region.cleanup()
    assert "views are still alive" not in caplog.text
    assert [result.success for result in handler.get_finished()] == [True]
