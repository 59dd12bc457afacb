"""Transfers to test with: worlds of KV tensors and region views, random jobs, and the slow obvious way to do them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
)
from kvtiers.connector.transfer.gpu_handler import create_handlers
from kvtiers.connector.transfer.transfer_plan import Direction

POISON = 0x5A
Groups = Sequence[Sequence[tuple[int, int]]]
"""Per group: (tensor, bytes of its page that are copied)."""


@dataclass
class World:
    """KV tensors, a region of several workers, and one worker's views of it.

    Attributes:
        storages: what the KV tensors lie in, padding and neighbours included.
        region: (num_slots, row_bytes) of all workers.
    """

    caches: CanonicalKVCaches
    storages: list[torch.Tensor]
    region: torch.Tensor
    views: list[torch.Tensor]
    factor: int

    @property
    def num_slots(self) -> int:
        return len(self.region)

    def blocks_of(self, group: int) -> int:
        return min(len(self.caches.tensors[ref.tensor_idx].tensor) for ref in self.caches.group_data_refs[group])

    def bytes_now(self) -> list[torch.Tensor]:
        """A copy of all memory: the storages, then the region."""
        return [memory.cpu().clone() for memory in (*self.storages, self.region)]


def make_world(
    rng: np.random.Generator,
    *,
    pages: Sequence[int],
    groups: Groups,
    factor: int = 1,
    num_blocks: int = 40,
    num_slots: int = 24,
    gap_bytes: int = 0,
    num_workers: int = 1,
    rank: int = 0,
    device: str = "cpu",
    shared_storage: bool = False,
) -> World:
    """Random bytes everywhere.

    Args:
        pages: page_size_bytes of each KV tensor.
        gap_bytes: between a tensor's blocks.
        shared_storage: the tensors' pages lie block by block in one storage.
    """
    storages, tensors = [], []
    if shared_storage:
        row = sum(pages) + gap_bytes
        storage = _random(rng, (num_blocks, row)).to(device)
        storages.append(storage)
        offsets = np.cumsum([0, *pages[:-1]]).tolist()
        tensors = [storage[:, offset : offset + page] for offset, page in zip(offsets, pages, strict=True)]
    else:
        for page in pages:
            storage = _random(rng, (num_blocks, page + gap_bytes)).to(device)
            storages.append(storage)
            tensors.append(storage[:, :page])
    cell_bytes = sum(pages) * factor
    row_bytes = -(-cell_bytes * num_workers // 4096) * 4096
    mapping = torch.frombuffer(mmap.mmap(-1, num_slots * row_bytes), dtype=torch.int8)  # page-aligned, as regions are
    region = mapping.view(num_slots, row_bytes).copy_(_random(rng, (num_slots, row_bytes)))
    views, offset = [], rank * cell_bytes
    for page in pages:
        views.append(region[:, offset : offset + page * factor])
        offset += page * factor
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)],
        group_data_refs=[[CanonicalKVCacheRef(*ref) for ref in refs] for refs in groups],
    )
    return World(caches, storages, region, views, factor)


def _random(rng: np.random.Generator, shape: tuple[int, int]) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-128, 128, shape, dtype=np.int8))


@dataclass(frozen=True)
class Job:
    """One transfer, in the form both ends' specs are made of."""

    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    group_sizes: tuple[int, ...] = (0,)
    block_indices: tuple[int, ...] = (0,)

    @property
    def gpu(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(self.blocks, self.group_sizes, self.block_indices)

    @property
    def cpu(self) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(self.slots)


def make_job(
    rng: np.random.Generator,
    world: World,
    sizes: Sequence[int],
    block_indices: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
) -> Job:
    """Random distinct blocks and slots; as many slots as the sizes need."""
    indices = tuple(block_indices or [0] * len(sizes))
    needed = [
        -(-(index % world.factor + size) // world.factor) if size else 0
        for size, index in zip(sizes, indices, strict=True)
    ]
    pool = np.arange(world.num_slots) if slots is None else np.array(slots)
    blocks = rng.permutation(min(world.blocks_of(group) for group in range(len(sizes))))
    return Job(
        blocks=blocks[: sum(sizes)].tolist(),
        slots=rng.permutation(pool)[: sum(needed)].tolist(),
        group_sizes=tuple(sizes),
        block_indices=indices,
    )


def pages_of(world: World, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(KV bytes, region bytes) of every page of the job, one at a time: the reference."""
    pairs = []
    blocks, slots = list(job.blocks), list(job.slots)
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        position = index % world.factor
        for at in range(size):
            if at == 0 or position == world.factor:
                slot = slots.pop(0)
                position = position if at == 0 else 0
            block = blocks.pop(0)
            for ref in world.caches.group_data_refs[group]:
                entry = world.caches.tensors[ref.tensor_idx]
                start = position * entry.page_size_bytes
                pairs.append(
                    (
                        entry.tensor[block, : ref.page_size_bytes],
                        world.views[ref.tensor_idx][slot, start : start + ref.page_size_bytes],
                    )
                )
            position += 1
    assert not blocks
    assert not slots
    return pairs


class Handlers:
    """A world's two handlers, shut down at the end of the block."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.store, self.load = create_handlers(world.caches, world.views, world.factor, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.store.shutdown()
        self.load.shutdown()

    def submit(self, job: Job, direction: Direction, job_id: int = 1) -> OffloadingHandler:
        handler = self.store if direction is Direction.STORE else self.load
        spec = (job.gpu, job.cpu) if direction is Direction.STORE else (job.cpu, job.gpu)
        assert handler.transfer_async(job_id, spec)
        return handler

    def run(self, job: Job, direction: Direction) -> TransferResult:
        (result,) = finish(self.submit(job, direction), 1)
        return result


def check_transfer(handlers: Handlers, job: Job, direction: Direction) -> None:
    """Runs the job; all memory must be as a page-by-page copy leaves it, destinations poisoned before."""
    world = handlers.world
    storing = direction is Direction.STORE
    pairs = pages_of(world, job)
    for kv, slot in pairs:
        (slot if storing else kv).fill_(POISON)
    before = world.bytes_now()
    for kv, slot in pairs:
        slot.copy_(kv) if storing else kv.copy_(slot)
    expected = world.bytes_now()
    for memory, old in zip((*world.storages, world.region), before, strict=True):
        memory.copy_(old)
    result = handlers.run(job, direction)
    assert result.success
    assert result.transfer_size == sum(kv.numel() for kv, _ in pairs)
    assert result.transfer_time > 0
    assert all(torch.equal(got, want) for got, want in zip(world.bytes_now(), expected, strict=True))


def finish(handler: OffloadingHandler, count: int, timeout_s: float = 120.0) -> list[TransferResult]:
    """The next ``count`` results."""
    results: list[TransferResult] = []

    def all_reported() -> bool:
        results.extend(handler.get_finished())
        return len(results) >= count

    wait_until(all_reported, timeout_s)
    return results


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Poll until the condition holds.

    Raises:
        TimeoutError: it does not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.0005)
