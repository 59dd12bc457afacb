"""The handlers over CUDA tensors: every way to copy, the order against the engine's stream, the sanitizer.

``torch.cuda._sleep`` keeps the engine's stream busy while the test looks at what else goes on: the order of things is
tested, never their speed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvtiers.connector.transfer.cuda_driver import CudaDriver
from kvtiers.connector.transfer.gpu_copy import GpuCopier
from kvtiers.connector.transfer.transfer_plan import Direction
from tests import gpu_machine
from tests.connector.transfer import transfer_cases
from tests.connector.transfer.transfer_cases import (
    POISON,
    Job,
    World,
    check_transfer,
    finish,
    make_job,
    make_world,
    pages_of,
)

pytestmark = pytest.mark.gpu

LONG_CYCLES = 1_000_000_000  # about half a second


@pytest.fixture(scope="module", autouse=True)
def _cuda() -> None:
    gpu_machine.skip_without_cuda()


def keep_busy(cycles: int) -> None:
    """Queue work of that length on the engine's stream."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(params=["batch", "kernel", "copy"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every method, where this machine has it."""
    if request.param == "kernel":
        pytest.importorskip("triton", reason="needs triton (extra: gpu)")
    driver = CudaDriver.load()
    if request.param == "batch" and (driver is None or not driver.has_batch):
        pytest.skip("cuMemcpyBatchAsync needs a driver of CUDA 12.8 or newer")
    return {"method": request.param}


@pytest.fixture
def world(rng: np.random.Generator) -> World:
    pages = [8192, 8192, 1024]
    groups = [[(0, 8192), (2, 512)], [(1, 4096)]]
    return make_world(
        rng, pages=pages, groups=groups, factor=4, num_blocks=200, num_slots=60, gap_bytes=64, device="cuda"
    )


class Handlers(transfer_cases.Handlers):
    """Handlers that must use the method that was asked for.

    A driver may refuse it for memory that is not pinned; then a warning says so.
    """

    def __init__(self, world: World, *, pin: bool = True, **options: Any) -> None:
        super().__init__(world, pin=pin, **options)
        self.pin, self.method = pin, options.get("method")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind)
        if kind is None and self.method is not None:
            for direction, handler in zip(Direction, (self.store, self.load), strict=True):
                assert isinstance(handler.copier, GpuCopier)
                if others := handler.copier.methods_used - {self.method}:
                    said = f"a {direction} went by {', '.join(others)}, not by {self.method}"
                    assert not self.pin, said
                    warnings.warn(f"unpinned: {said}", stacklevel=2)


@pytest.fixture
def handlers(world: World, options: dict[str, Any]) -> Iterator[Handlers]:
    with Handlers(world, **options) as each:
        yield each


@pytest.mark.parametrize("direction", Direction)
def test_every_method_matches_the_reference(rng: np.random.Generator, handlers: Handlers, direction: Direction) -> None:
    for skip in range(4):
        check_transfer(handlers, make_job(rng, handlers.world, [41, 30], [skip, 7]), direction)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("more", [{"pin": False}, {"pin_piece_bytes_max": 40_000}], ids=["unpinned", "pieces"])
def test_transfer_of_unpinned_memory_and_memory_in_pieces_moves_right_bytes(
    rng: np.random.Generator, world: World, options: dict[str, Any], direction: Direction, more: dict[str, Any]
) -> None:
    if options["method"] == "kernel" and "pin" in more:
        pytest.skip("a kernel needs pinned memory")
    with Handlers(world, **options, **more) as each:
        check_transfer(each, make_job(rng, world, [60, 33]), direction)
        check_transfer(each, Job(list(range(100)), list(range(25)), (100, 0), (0, 0)), direction)


def test_region_is_pinned_until_both_handlers_are_shut_down(world: World) -> None:
    with Handlers(world) as each:
        assert world.region.is_pinned()
        each.store.shutdown()
        assert world.region.is_pinned()
    assert not world.region.is_pinned()


def test_many_concurrent_jobs_in_both_directions_move_right_bytes(rng: np.random.Generator, handlers: Handlers) -> None:
    world, jobs = handlers.world, 6
    blocks = rng.permutation(192).reshape(2, jobs, 16)
    slots = rng.permutation(48).reshape(2, jobs, 4)
    work = {
        (direction, at): Job(blocks[way, at].tolist(), slots[way, at].tolist(), (16, 0), (0, 0))
        for way, direction in enumerate(Direction)
        for at in range(jobs)
    }
    sources = {
        key: [(kv if key[0] is Direction.STORE else slot).cpu().clone() for kv, slot in pages_of(world, job)]
        for key, job in work.items()
    }
    for (direction, at), job in work.items():
        handlers.submit(job, direction, at)
    for handler in (handlers.store, handlers.load):
        assert [(result.job_id, result.success) for result in finish(handler, jobs)] == [
            (at, True) for at in range(jobs)
        ]
    for (direction, at), job in work.items():
        for (kv, slot), source in zip(pages_of(world, job), sources[direction, at], strict=True):
            assert torch.equal((slot if direction is Direction.STORE else kv).cpu(), source)


def test_store_reads_kv_written_by_work_queued_before(rng: np.random.Generator, handlers: Handlers) -> None:
    """The KV is written by work that is still queued when the store is submitted."""
    world = handlers.world
    for value in (11, 12, 13):
        job = make_job(rng, world, [50, 40])
        keep_busy(LONG_CYCLES // 10)
        for storage in world.storages:
            storage.fill_(value)
        (result,) = finish(handlers.submit(job, Direction.STORE), 1)
        assert result.success
        assert all((slot == value).all() for _, slot in pages_of(world, job))


def test_load_does_not_overwrite_blocks_the_engine_still_reads(rng: np.random.Generator, handlers: Handlers) -> None:
    """Blocks handed to a load may still be read by a step that was queued before."""
    world = handlers.world
    before = [storage.clone() for storage in world.storages]
    torch.cuda.synchronize()
    keep_busy(LONG_CYCLES // 10)
    read = [storage.clone() for storage in world.storages]
    (result,) = finish(handlers.submit(make_job(rng, world, [50, 40]), Direction.LOAD), 1)
    assert result.success
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got, want in zip(read, before, strict=True))


def test_slot_may_change_once_its_load_is_reported(rng: np.random.Generator, handlers: Handlers) -> None:
    world = handlers.world
    for value in range(1, 6):
        job = make_job(rng, world, [50, 40])
        world.region.fill_(value)
        (result,) = finish(handlers.submit(job, Direction.LOAD), 1)
        world.region.fill_(POISON)
        assert result.success
        torch.cuda.synchronize()
        assert all((kv == value).all() for kv, _ in pages_of(world, job))


@pytest.mark.parametrize("direction", Direction)
def test_submit_does_not_wait_for_the_stream_of_the_engine(
    rng: np.random.Generator, handlers: Handlers, direction: Direction
) -> None:
    keep_busy(LONG_CYCLES)
    behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
    behind.record(torch.cuda.current_stream())
    handler = handlers.submit(make_job(rng, handlers.world, [20, 20]), direction)
    assert handler.get_finished() == []
    assert not behind.query(), "the submit waited for the stream"  # type: ignore[no-untyped-call]
    handler.wait({1})
    assert behind.query()  # type: ignore[no-untyped-call]
    assert [result.success for result in handler.get_finished()] == [True]


@pytest.mark.parametrize("direction", Direction)
def test_shutdown_waits_for_jobs_in_flight_and_reports_them(
    rng: np.random.Generator, handlers: Handlers, direction: Direction
) -> None:
    keep_busy(LONG_CYCLES // 2)
    job = make_job(rng, handlers.world, [20, 20])
    handler = handlers.submit(job, direction)
    handler.shutdown()
    (result,) = handler.get_finished()
    if result.success:  # else it was cancelled before it was submitted
        assert all(torch.equal(kv.cpu(), slot) for kv, slot in pages_of(handlers.world, job))


def run_to_the_last(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit status and output. Nothing that it started is left, as a launcher's child would be when that is killed."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nkilled after {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def test_sanitizer_finds_no_invalid_access() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # What these ask for must not bring pools back, inside which no access is a bad one.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    environment = {name: value for name, value in os.environ.items() if name not in allocator}
    status, output = run_to_the_last(
        [
            *(sanitizer, "--error-exitcode", "86", "--target-processes", "application-only"),
            *("--report-api-errors", "no"),  # libraries probe with calls that may fail; none is a bad access
            # Few, for it takes minutes: not the copies that torch makes.
            *(sys.executable, "-m", "pytest", "-q", __file__, "-k", "reference and not copy"),
        ],
        env=environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        timeout_s=240,
    )
    if "Device not supported" in output:  # the sanitizer's words, under a sandbox's driver
        pytest.skip("compute-sanitizer does not know this device here")
    assert status == 0, output[-7000:]
    assert " passed" in output, output[-7000:]
