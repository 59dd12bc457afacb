"""The handlers over CPU tensors, byte for byte against a copy made one page at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
)
from kvtiers.connector.transfer import host_copy
from kvtiers.connector.transfer.gpu_handler import Completion, CopyHandler, create_handlers
from kvtiers.connector.transfer.host_copy import HostCompletion, HostCopier
from kvtiers.connector.transfer.transfer_plan import CopyPlan, Direction, TensorGeometry, TransferLayout
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
    wait_until,
)

ONE_GROUP = [[(0, 64), (1, 64)]]
# Of kvtiers.connector.transfer.host_copy.
ONE_PASS = {"LOOP_BYTES_MAX": 0, "RUN_BYTES_MIN": 0, "ITEM_BYTES_MIN": 0}
TWO_PASSES = {"LOOP_BYTES_MAX": 0, "RUN_BYTES_MIN": 1 << 40}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


class Handlers(transfer_cases.Handlers):
    """Handlers with these thresholds in force."""

    def __init__(self, world: World, **thresholds: int) -> None:
        super().__init__(world)
        self._patch = pytest.MonkeyPatch()
        for name, value in thresholds.items():
            self._patch.setattr(host_copy, name, value)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind)
        self._patch.undo()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("thresholds", [{}, ONE_PASS, TWO_PASSES], ids=["by size", "one pass", "two passes"])
@pytest.mark.parametrize("factor", [1, 4])  # the property below draws others
class TestAgainstReference:
    def test_transfer_of_random_block_ids_matches_the_reference(
        self, rng: np.random.Generator, factor: int, thresholds: dict[str, int], direction: Direction
    ) -> None:
        world = make_world(rng, pages=[64, 64], groups=ONE_GROUP, factor=factor)
        with Handlers(world, **thresholds) as handlers:
            for size in (1, factor, 3 * factor - 1, 20):
                check_transfer(handlers, make_job(rng, world, [size]), direction)

    def test_transfer_of_groups_with_unaligned_first_blocks_matches_the_reference(
        self, rng: np.random.Generator, factor: int, thresholds: dict[str, int], direction: Direction
    ) -> None:
        groups = [[(0, 48), (2, 96)], [(1, 80)], [(3, 16), (1, 80)]]
        world = make_world(rng, pages=[48, 80, 96, 16], groups=groups, factor=factor, num_slots=40)
        with Handlers(world, **thresholds) as handlers:
            for skip in range(factor):
                job = make_job(rng, world, [7, 0, 9], [skip, 5, factor * 3 + (skip * 5) % factor])
                check_transfer(handlers, job, direction)

    def test_transfer_of_padded_pages_matches_the_reference(
        self, rng: np.random.Generator, factor: int, thresholds: dict[str, int], direction: Direction
    ) -> None:
        groups = [[(0, 40), (1, 23)], [(0, 64)]]
        world = make_world(rng, pages=[64, 24], groups=groups, factor=factor, gap_bytes=13)
        with Handlers(world, **thresholds) as handlers:
            check_transfer(handlers, make_job(rng, world, [9, 5], [1, 2]), direction)

    def test_transfer_leaves_cells_of_another_worker_untouched(
        self, rng: np.random.Generator, factor: int, thresholds: dict[str, int], direction: Direction
    ) -> None:
        world = make_world(rng, pages=[64, 128], groups=[[(0, 64), (1, 128)]], factor=factor, num_workers=2, rank=1)
        with Handlers(world, **thresholds) as handlers:
            check_transfer(handlers, make_job(rng, world, [11], [factor - 1]), direction)

    def test_transfer_of_layers_sharing_a_storage_matches_the_reference(
        self, rng: np.random.Generator, factor: int, thresholds: dict[str, int], direction: Direction
    ) -> None:
        pages = [32, 64, 32]
        world = make_world(
            rng, pages=pages, groups=[list(enumerate(pages))], factor=factor, gap_bytes=32, shared_storage=True
        )
        with Handlers(world, **thresholds) as handlers:
            check_transfer(handlers, make_job(rng, world, [13], [3]), direction)


@pytest.mark.parametrize("direction", Direction)
def test_pages_of_several_lengths_are_copied_whole(
    rng: np.random.Generator, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: set[int] = set()
    indices = HostCopier._indices

    def spied(copier: HostCopier, offsets: Any, nbytes: Any, item: int) -> Any:
        items.add(item)
        return indices(copier, offsets, nbytes, item)

    monkeypatch.setattr(HostCopier, "_indices", spied)
    world = make_world(rng, pages=[64, 64], groups=[[(0, 64), (1, 64)], [(0, 63), (1, 61)]])
    with Handlers(world, **TWO_PASSES) as handlers:
        check_transfer(handlers, make_job(rng, world, [9, 5]), direction)
    assert items == {64, 63, 61}


@pytest.mark.parametrize("direction", Direction)
def test_transfer_of_real_page_sizes_matches_the_reference(rng: np.random.Generator, direction: Direction) -> None:
    pages = [49152] * 3
    world = make_world(rng, pages=pages, groups=[list(enumerate(pages))], factor=2, num_blocks=20, num_slots=12)
    with Handlers(world) as handlers:
        check_transfer(handlers, make_job(rng, world, [15], [1]), direction)


@pytest.mark.parametrize("direction", Direction)
def test_transfer_of_contiguous_ids_matches_the_reference(rng: np.random.Generator, direction: Direction) -> None:
    world = make_world(rng, pages=[1 << 20], groups=[[(0, 1 << 20)]], num_blocks=20, num_slots=20)
    job = Job(blocks=list(range(18)), slots=list(range(1, 19)), group_sizes=(18,), block_indices=(0,))
    with Handlers(world) as handlers:
        check_transfer(handlers, job, direction)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("thresholds", [{}, ONE_PASS, TWO_PASSES], ids=["by size", "one pass", "two passes"])
def test_transfer_with_region_between_the_tensors_matches_the_reference(
    rng: np.random.Generator, thresholds: dict[str, int], direction: Direction
) -> None:
    """numpy takes its address ranges for overlapping then, and must not copy or skip anything for it."""
    memory = torch.from_numpy(rng.integers(-128, 128, 3 * 40 * 256, dtype=np.int8)).view(3, 40, 256)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(memory[at, :, :128], 128) for at in (0, 2)],
        [[CanonicalKVCacheRef(0, 128), CanonicalKVCacheRef(1, 128)]],
    )
    region = memory[1]
    world = World(caches, [memory[0], memory[2]], region, [region[:, :128], region[:, 128:]], factor=1)
    with Handlers(world, **thresholds) as handlers:
        check_transfer(handlers, make_job(rng, world, [30]), direction)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[World, Job]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unit = draw(st.sampled_from([1, 8, 64]))
    pages = [unit * draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 4)))]
    layers = st.lists(st.integers(0, len(pages) - 1), min_size=1, max_size=len(pages), unique=True)
    groups = [
        [(tensor, draw(st.integers(1, pages[tensor]))) for tensor in draw(layers)]
        for _ in range(draw(st.integers(1, 3)))
    ]
    num_workers = draw(st.integers(1, 3))
    world = make_world(
        rng,
        pages=pages,
        groups=groups,
        factor=draw(st.sampled_from([1, 2, 3, 4, 8])),
        num_slots=36,
        gap_bytes=draw(st.integers(0, 9)),
        num_workers=num_workers,
        rank=draw(st.integers(0, num_workers - 1)),
        shared_storage=draw(st.booleans()),
    )
    sizes = [draw(st.integers(0, 10)) for _ in groups]
    return world, make_job(rng, world, sizes, [draw(st.integers(0, 20)) for _ in groups])


@settings(max_examples=30)
@given(transfers(), st.sampled_from(list(Direction)), st.sampled_from([{}, ONE_PASS, TWO_PASSES]))
def test_any_transfer_matches_the_reference(
    transfer: tuple[World, Job], direction: Direction, thresholds: dict[str, int]
) -> None:
    world, job = transfer
    with Handlers(world, **thresholds) as handlers:
        check_transfer(handlers, job, direction)


def test_stored_bytes_are_restored_by_a_load(rng: np.random.Generator) -> None:
    world = make_world(rng, pages=[4096, 512], groups=[[(0, 4096), (1, 512)]], factor=4)
    job = make_job(rng, world, [29], [2])
    with Handlers(world) as handlers:
        before = [kv.clone() for kv, _ in pages_of(world, job)]
        assert handlers.run(job, Direction.STORE).success
        for kv, _ in pages_of(world, job):
            kv.fill_(POISON)
        assert handlers.run(job, Direction.LOAD).success
        assert all(torch.equal(kv, old) for (kv, _), old in zip(pages_of(world, job), before, strict=True))


def test_many_concurrent_jobs_in_both_directions_match_the_expected_bytes(rng: np.random.Generator) -> None:
    pages = [8192] * 4
    world = make_world(rng, pages=pages, groups=[list(enumerate(pages))], num_blocks=128, num_slots=128)
    jobs = 16
    blocks, slots = rng.permutation(128).reshape(2, jobs, 4), rng.permutation(128).reshape(2, jobs, 4)
    expected = world.bytes_now()
    region, tensors = expected[-1], expected[:-1]
    for way in range(2):
        for block, slot in zip(blocks[way].ravel(), slots[way].ravel(), strict=True):
            for layer, tensor in enumerate(tensors):
                cell = region[slot, layer * 8192 : (layer + 1) * 8192]
                cell.copy_(tensor[block]) if way == 0 else tensor[block].copy_(cell)
    with Handlers(world) as handlers:
        for at in range(jobs):
            for way, direction in enumerate(Direction):
                job = Job(blocks[way, at].tolist(), slots[way, at].tolist(), (4,), (0,))
                handlers.submit(job, direction, at)
        for handler in (handlers.store, handlers.load):
            results = finish(handler, jobs)
            assert [result.job_id for result in results] == list(range(jobs))
            assert all(result.success for result in results)
    assert all(torch.equal(got, want) for got, want in zip(world.bytes_now(), expected, strict=True))


@pytest.mark.parametrize("direction", Direction)
def test_empty_transfer_succeeds(rng: np.random.Generator, direction: Direction) -> None:
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP, factor=4)
    before = world.bytes_now()
    with Handlers(world) as handlers:
        result = handlers.run(Job(block_indices=(3,)), direction)
    assert (result.success, result.transfer_size) == (True, 0)
    assert all(torch.equal(got, want) for got, want in zip(world.bytes_now(), before, strict=True))


GOOD_GPU = GPULoadStoreSpec([1, 2, 3])


@pytest.mark.parametrize(
    ("gpu", "cpu", "direction", "message"),
    [
        (
            GPULoadStoreSpec([1, 40]),
            CPULoadStoreSpec([1]),
            Direction.STORE,
            "GPU block id of group 0 40 is outside 0..39",
        ),
        (GPULoadStoreSpec([-1, 4]), CPULoadStoreSpec([1]), Direction.LOAD, "GPU block id of group 0 -1 is outside"),
        (GOOD_GPU, CPULoadStoreSpec([1, 24]), Direction.STORE, "CPU slot 24 is outside 0..23"),
        (GOOD_GPU, CPULoadStoreSpec([1, -5]), Direction.LOAD, "CPU slot -5 is outside"),
        (GOOD_GPU, CPULoadStoreSpec([7, 7]), Direction.STORE, "CPU slot 7 is a destination twice"),
        (
            GPULoadStoreSpec([9, 2, 9]),
            CPULoadStoreSpec([1, 2]),
            Direction.LOAD,
            "id of group 0 9 is a destination twice",
        ),
        (GOOD_GPU, CPULoadStoreSpec([1]), Direction.STORE, "1 CPU slots given; .* need 2"),
        (GOOD_GPU, CPULoadStoreSpec([1, 2, 3]), Direction.LOAD, "3 CPU slots given; .* need 2"),
        (GPULoadStoreSpec([1, 2, 3], None, [1]), CPULoadStoreSpec([1]), Direction.LOAD, "need 2"),
        (GPULoadStoreSpec([1, 2], [1, 1]), CPULoadStoreSpec([1, 2]), Direction.STORE, "2 group_sizes for 1 KV cache"),
        (CPULoadStoreSpec([1]), GPULoadStoreSpec([1]), Direction.STORE, "goes from GPU to CPU, not CPU to GPU"),
    ],
)
def test_invalid_transfer_is_refused_and_moves_nothing(
    rng: np.random.Generator, gpu: Any, cpu: Any, direction: Direction, message: str
) -> None:
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP, factor=2)
    before = world.bytes_now()
    with Handlers(world) as handlers:
        handler = handlers.store if direction is Direction.STORE else handlers.load
        with pytest.raises(ValueError, match=message):
            handler.transfer_async(1, (gpu, cpu) if direction is Direction.STORE else (cpu, gpu))
        assert handler.get_finished() == []
    assert all(torch.equal(got, want) for got, want in zip(world.bytes_now(), before, strict=True))


def test_load_of_one_block_by_two_groups_that_share_tensors_is_refused(rng: np.random.Generator) -> None:
    shared = make_world(rng, pages=[64], groups=[[(0, 64)], [(0, 32)]])
    apart = make_world(rng, pages=[64, 64], groups=[[(0, 64)], [(1, 64)]])
    spec = CPULoadStoreSpec([1, 2]), GPULoadStoreSpec([5, 5], [1, 1])
    with Handlers(shared) as handlers, pytest.raises(ValueError, match="GPU block id 5 is a destination twice"):
        handlers.load.transfer_async(1, spec)
    with Handlers(apart) as handlers:
        assert handlers.load.transfer_async(1, spec)
        assert finish(handlers.load, 1)[0].success


def test_one_source_may_be_copied_to_several_destinations(rng: np.random.Generator) -> None:
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP)
    with Handlers(world) as handlers:
        check_transfer(handlers, Job([3, 3], [1, 2], (2,), (0,)), Direction.STORE)
        check_transfer(handlers, Job([3, 4], [1, 1], (2,), (0,)), Direction.LOAD)


class Held:
    """A copier that copies only when it is let go, and then fails if it was told to."""

    def __init__(self, error: BaseException | None = None, *, at_end: bool = False) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.closed = threading.Event()
        self.copied: list[int] = []
        self.error = error
        self._at_end = at_end

    def mark(self) -> None:
        return None

    def copy(self, plan: CopyPlan, _mark: None, /) -> Completion:
        self.begun.set()
        assert self.go.wait(120)
        if self.error is not None and not self._at_end:
            raise self.error
        self.copied.append(len(plan))
        return HostCompletion(0.5) if self.error is None else FailedCompletion(self.error)

    def close(self) -> None:
        self.closed.set()


class FailedCompletion:
    """A copy that went wrong on its way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def seconds(self) -> float:
        raise self._error


@pytest.fixture
def held_store(rng: np.random.Generator) -> Iterator[tuple[CopyHandler, Held]]:
    yield from _held(rng, Held())


def _held(rng: np.random.Generator, copier: Held) -> Iterator[tuple[CopyHandler, Held]]:
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP)
    with Handlers(world) as handlers:
        assert isinstance(handlers.store, CopyHandler)
        handler = CopyHandler(Direction.STORE, handlers.store._layout, copier, jobs_max=3)
        yield handler, copier
        copier.go.set()
        handler.shutdown()


SPEC = (GPULoadStoreSpec([1]), CPULoadStoreSpec([1]))


def test_transfer_starts_no_new_thread(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submit that cannot start its thread raises and keeps the job, which would run untracked with the next one."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP)
    with Handlers(world) as handlers:
        monkeypatch.setattr(threading.Thread, "start", start)
        assert handlers.run(make_job(rng, world, [3]), Direction.STORE).success


@pytest.mark.parametrize("refused", Direction)
def test_failed_start_of_one_handler_shuts_down_the_other_handler(
    rng: np.random.Generator, refused: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HostCopier] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"kvtiers-{refused}"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(HostCopier, "close", lambda copier: closed.append(copier))
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="can't start new thread"):
        create_handlers(world.caches, world.views, world.factor)
    assert len({id(copier) for copier in closed}) == 2
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def test_submit_and_poll_do_not_wait_for_the_copy(held_store: tuple[CopyHandler, Held]) -> None:
    handler, copier = held_store
    assert handler.transfer_async(1, SPEC)
    assert copier.begun.wait(120)
    assert handler.get_finished() == []
    copier.go.set()
    assert finish(handler, 1) == [TransferResult(1, True, 128, 0.5)]
    assert handler.get_finished() == []


def test_submission_beyond_jobs_max_is_declined(held_store: tuple[CopyHandler, Held]) -> None:
    handler, copier = held_store
    assert [handler.transfer_async(job_id, SPEC) for job_id in range(4)] == [True, True, True, False]
    copier.go.set()
    assert [result.job_id for result in finish(handler, 3)] == [0, 1, 2]
    assert handler.transfer_async(3, SPEC)
    assert finish(handler, 1)[0].success


def test_job_id_in_flight_is_refused(held_store: tuple[CopyHandler, Held]) -> None:
    handler, copier = held_store
    assert handler.transfer_async(1, SPEC)
    with pytest.raises(ValueError, match="job 1 is in flight"):
        handler.transfer_async(1, SPEC)
    copier.go.set()
    assert len(finish(handler, 1)) == 1


def test_wait_returns_when_the_copy_ended_and_reports_nothing(held_store: tuple[CopyHandler, Held]) -> None:
    handler, copier = held_store
    assert handler.transfer_async(1, SPEC)
    assert handler.transfer_async(2, SPEC)
    threading.Timer(0.05, copier.go.set).start()
    handler.wait({1, 2, 99})
    assert copier.copied == [2, 2]
    assert [result.job_id for result in handler.get_finished()] == [1, 2]
    handler.wait({1, 2})


def test_wait_covers_a_submitted_job_though_a_later_job_was_refused(rng: np.random.Generator) -> None:
    class UnderWay(HostCompletion):
        def wait(self) -> None:
            waited.append(self)

    class Refusing(Held):
        def copy(self, plan: CopyPlan, _mark: None, /) -> Completion:
            if plan.gpu[0] != first:
                raise RuntimeError("refused")
            return under_way

    waited: list[HostCompletion] = []
    under_way = UnderWay(0.5)
    for handler, _ in _held(rng, Refusing()):
        first = handler._check(SPEC).plan().gpu[0]
        assert handler.transfer_async(1, SPEC)
        assert handler.transfer_async(2, (GPULoadStoreSpec([2]), CPULoadStoreSpec([2])))
        handler.wait({1, 2})
        assert waited == [under_way]
        assert [result.success for result in finish(handler, 2)] == [True, False]


@pytest.mark.parametrize(
    ("error", "at_end"),
    [
        (RuntimeError("illegal address"), False),
        (RuntimeError("late"), True),
        (MemoryError(), False),
        (SystemExit(3), False),
    ],
)
def test_error_fails_only_its_own_job(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture, error: BaseException, at_end: bool
) -> None:
    for handler, copier in _held(rng, Held(error, at_end=at_end)):
        assert handler.transfer_async(1, SPEC)
        copier.go.set()
        handler.wait({1})
        assert finish(handler, 1) == [TransferResult(1, False, 0, 0.0)]
        assert "store job 1 failed" in caplog.text
        copier.error = None
        assert handler.transfer_async(2, SPEC)
        assert finish(handler, 1)[0].success


def test_shutdown_finishes_running_job_cancels_queued_jobs_and_reports_all(
    held_store: tuple[CopyHandler, Held],
) -> None:
    handler, copier = held_store
    assert all(handler.transfer_async(job_id, SPEC) for job_id in range(3))
    assert copier.begun.wait(120)
    closing = threading.Thread(target=handler.shutdown)
    closing.start()
    wait_until(lambda: handler._closed)
    assert not copier.closed.is_set()
    copier.go.set()
    closing.join(120)
    assert copier.closed.is_set()
    assert [(result.job_id, result.success) for result in handler.get_finished()] == [(0, True), (1, False), (2, False)]
    assert copier.copied == [2]
    assert not handler.transfer_async(9, SPEC)
    handler.shutdown()


@pytest.mark.parametrize(
    ("tensor", "view", "message"),
    [
        (torch.zeros(4, 64, dtype=torch.uint8), None, r"KV tensor 0 is torch.uint8"),
        (torch.zeros(4, 2, 32, dtype=torch.int8), None, r"KV tensor 0 is"),
        (torch.zeros(4, 128, dtype=torch.int8)[:, ::2], None, "stride"),
        (torch.zeros(1, 64, dtype=torch.int8).expand(4, 64), None, "stride"),
        (None, torch.zeros(4, 64, dtype=torch.int8), r"region view 0 .* int8 \(n, 128\)"),
        (torch.zeros(4, 64, dtype=torch.int8, device="meta"), None, "accepted are cuda and cpu"),
    ],
)
def test_invalid_tensors_and_views_are_refused(
    tensor: torch.Tensor | None, view: torch.Tensor | None, message: str
) -> None:
    tensor = torch.zeros(4, 64, dtype=torch.int8) if tensor is None else tensor
    view = torch.zeros(4, 128, dtype=torch.int8) if view is None else view
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    with pytest.raises(ValueError, match=message):
        create_handlers(caches, [view], 2)


def test_mismatched_views_and_invalid_options_are_refused(rng: np.random.Generator) -> None:
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP)
    with pytest.raises(ValueError, match="1 region views for 2 KV tensors"):
        create_handlers(world.caches, world.views[:1], 1)
    with pytest.raises(ValueError, match="region view 1 has 5 slots"):
        create_handlers(world.caches, [world.views[0], world.views[1][:5]], 1)
    with pytest.raises(TypeError, match="pinn"):
        create_handlers(world.caches, world.views, 1, pinn=True)
    with pytest.raises(ValueError, match="method 'dma' is not accepted"):
        create_handlers(world.caches, world.views, 1, method="dma")
    with pytest.raises(ValueError, match="jobs_max"):
        create_handlers(world.caches, world.views, 1, jobs_max=0)


@pytest.mark.parametrize("direction", Direction)
def test_tensors_at_far_ends_of_the_address_space_are_copied(rng: np.random.Generator, direction: Direction) -> None:
    """As many items of a page as there are places for one would be more than numpy can count."""
    page = 4 << 20
    kv, region = (rng.integers(0, 256, (2, page), dtype=np.uint8) for _ in range(2))
    near, far = (
        TensorGeometry(
            gpu_address=address,
            gpu_stride_bytes=page,
            num_blocks=2,
            page_size_bytes=page,
            cpu_address=region.ctypes.data,
            cpu_stride_bytes=page,
        )
        for address in (kv.ctypes.data, kv.ctypes.data % 8 + 8)
    )
    layout = TransferLayout([near, far], [[CanonicalKVCacheRef(0, page)]], num_slots=2, blocks_per_chunk=1)
    transfer = layout.check(GPULoadStoreSpec([1]), CPULoadStoreSpec([0]), direction)
    HostCopier(layout, direction, owner=(kv, region)).copy(transfer.plan(), None)
    assert (kv[1] == region[0]).all()
    assert (kv[0] != region[1]).any()


def test_host_copier_measures_its_copy(rng: np.random.Generator) -> None:
    world = make_world(rng, pages=[64, 64], groups=ONE_GROUP)
    ticks = iter([1.0, 3.5])
    with Handlers(world) as handlers:
        assert isinstance(handlers.store, CopyHandler)
        layout = handlers.store._layout
    copier = HostCopier(layout, Direction.STORE, owner=world, clock=lambda: next(ticks))
    job = make_job(rng, world, [4])
    assert copier.copy(layout.check(job.gpu, job.cpu, Direction.STORE).plan(), None).seconds() == 2.5
