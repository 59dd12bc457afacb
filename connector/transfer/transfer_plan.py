"""Turns the block ids of a transfer into a list of byte copies. Pure numpy: no tensor, no device, no thread.

``TransferLayout.check`` finds every error in a transfer before any byte moves: the plan of a checked transfer holds
only addresses inside the tensors and the region of its layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ..base import CanonicalKVCacheRef, CPULoadStoreSpec, GPULoadStoreSpec

Int64s = NDArray[np.int64]
Ids = NDArray[np.int32]

_FEW_IDS = 256
"""Up to this many ids, plain Python checks take half of numpy's time (measured): an engine's step leaves the CPU's
caches cold, and every numpy function called is more code to fetch."""


class Direction(StrEnum):
    """Direction of a transfer."""

    STORE = "store"  # GPU -> CPU
    LOAD = "load"  # CPU -> GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGeometry:
    """Addresses of one canonical tensor and of its part of the region.

    Attributes:
        gpu_address, gpu_stride_bytes: address of block 0, and distance from one block to the next.
        num_blocks: GPU blocks in the tensor.
        page_size_bytes: bytes of one block. GPU block j of a chunk is at ``j * page_size_bytes`` of its slot's part.
        cpu_address, cpu_stride_bytes: address of slot 0's part, and distance from one slot to the next.
        allocation: index of the pair (GPU allocation, CPU allocation). Copies merge only inside one pair: a driver
            rejects a copy that runs from one allocation into the next, even if the two are adjacent.
    """

    gpu_address: int
    gpu_stride_bytes: int
    num_blocks: int
    page_size_bytes: int
    cpu_address: int
    cpu_stride_bytes: int
    allocation: int = 0


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Byte copies whose destinations do not overlap.

    Attributes:
        gpu, cpu: (n,) addresses.
        nbytes: (n,) lengths.
        allocation: (n,) ``TensorGeometry.allocation`` of each copy.
    """

    gpu: Int64s
    cpu: Int64s
    nbytes: Int64s
    allocation: Int64s

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def of_length(self, nbytes: int) -> CopyPlan:
        """Return the copies of this length, in the same order."""
        chosen = self.nbytes == nbytes
        return CopyPlan(self.gpu[chosen], self.cpu[chosen], self.nbytes[chosen], self.allocation[chosen])


def merge_neighbours(plan: CopyPlan, cpu_cuts: Int64s | None = None) -> CopyPlan:
    """Join copies that are adjacent on both sides.

    Args:
        cpu_cuts: ascending addresses that no joined copy may cross.
    """
    if len(plan) < 2:
        return plan
    ends = plan.nbytes[:-1]
    joined = plan.gpu[1:] == plan.gpu[:-1] + ends
    joined &= plan.cpu[1:] == plan.cpu[:-1] + ends
    joined &= plan.allocation[1:] == plan.allocation[:-1]
    if cpu_cuts is not None:
        piece = np.searchsorted(cpu_cuts, plan.cpu, side="right")
        joined &= piece[1:] == piece[:-1]
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return CopyPlan(plan.gpu[first], plan.cpu[first], np.add.reduceat(plan.nbytes, first), plan.allocation[first])


class TransferLayout:
    """Data that all transfers share: the tensors, their parts of the region and the groups' layers.

    One thread at a time may check stores, and another may check loads: each direction has its own scratch memory.

    Args:
        tensors: in the order of the refs' ``tensor_idx``.
        groups: for each KV cache group, the refs of its layers.
        num_slots: slots of the region.
        blocks_per_chunk: GPU blocks in one slot.

    Attributes:
        gpu_span, cpu_span: (lowest address, end) of all memory that a plan may touch.
        unit_bytes: divides every offset from the spans' starts and every length of every plan.

    Raises:
        ValueError: a ref names a tensor that does not exist, or more bytes than the tensor's page has.
    """

    def __init__(
        self,
        tensors: Sequence[TensorGeometry],
        groups: Sequence[Sequence[CanonicalKVCacheRef]],
        *,
        num_slots: int,
        blocks_per_chunk: int,
    ) -> None:
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk {blocks_per_chunk} must be 1 or more")
        self._factor = blocks_per_chunk
        self._num_slots = num_slots
        self._groups = tuple(_Group(tensors, refs, index) for index, refs in enumerate(groups))
        used = [tensor_idx for refs in groups for tensor_idx in {ref.tensor_idx for ref in refs}]
        self._groups_share_tensors = len(used) != len(set(used))
        self._every_group_has_layers = all(group.block_bytes for group in self._groups)
        self._slot_order = np.empty(num_slots, np.int64)
        self._block_order = np.empty(max((group.num_blocks for group in self._groups), default=0), np.int64)

        self.gpu_span = _span([(t.gpu_address, t.gpu_stride_bytes, t.num_blocks, t.page_size_bytes) for t in tensors])
        self.cpu_span = _span(
            [(t.cpu_address, t.cpu_stride_bytes, num_slots, t.page_size_bytes * blocks_per_chunk) for t in tensors]
        )
        self.unit_bytes = math.gcd(
            *(t.gpu_address - self.gpu_span[0] for t in tensors),
            *(t.cpu_address - self.cpu_span[0] for t in tensors),
            *(size for t in tensors for size in (t.gpu_stride_bytes, t.cpu_stride_bytes, t.page_size_bytes)),
            *(ref.page_size_bytes for refs in groups for ref in refs),
        )

    def check(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, direction: Direction) -> Transfer:
        """Check a transfer between these GPU blocks and these slots. Later changes of the specs do not affect it.

        Slots are ordered by group, too. Group i with n > 0 blocks uses ``ceil((skip + n) / blocks_per_chunk)`` slots,
        where ``skip = block_indices[i] % blocks_per_chunk``; an empty group uses none. A group whose layers are all on
        other pipeline stages copies nothing here, but its ids and slots still take their places in the lists.

        Raises:
            ValueError: counts that do not match, an id out of range, or a destination that is written twice.
        """
        if len(gpu.group_sizes) != len(self._groups):
            raise ValueError(f"{len(gpu.group_sizes)} group_sizes for {len(self._groups)} KV cache groups")
        block_ids, slot_ids = gpu.block_ids.copy(), cpu.block_ids.copy()
        parts = []
        blocks_end = slots_end = 0
        for group, size, index in zip(self._groups, gpu.group_sizes, gpu.block_indices, strict=True):
            if size:
                skip, blocks_start, slots_start = index % self._factor, blocks_end, slots_end
                blocks_end += size
                slots_end += -(-(skip + size) // self._factor)
                if group.block_bytes:
                    parts.append((group, block_ids[blocks_start:blocks_end], slot_ids[slots_start:slots_end], skip))
        if slots_end != len(slot_ids):
            raise ValueError(
                f"{len(slot_ids)} CPU slots given; group_sizes {gpu.group_sizes} with block_indices "
                f"{gpu.block_indices} and {self._factor} blocks per chunk need {slots_end}"
            )
        for group, blocks, _, _ in parts:
            _check_range(blocks, group.num_blocks, f"GPU block id of group {group.index}")
        _check_range(slot_ids, self._num_slots, "CPU slot")
        if direction is Direction.STORE:
            _check_distinct(slot_ids, self._slot_order, "CPU slot")
        elif self._groups_share_tensors:
            if not self._every_group_has_layers:
                block_ids = np.concatenate([block_ids[:0], *(blocks for _, blocks, _, _ in parts)])
            _check_distinct(block_ids, self._block_order, "GPU block id")
        else:
            for group, blocks, _, _ in parts:
                _check_distinct(blocks, self._block_order, f"GPU block id of group {group.index}")
        return Transfer(tuple(parts), self._factor)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A checked transfer. Work that grows with the number of pages is left to ``plan``, for another thread."""

    _parts: tuple[tuple[_Group, Ids, Ids, int], ...]
    _factor: int

    @property
    def total_bytes(self) -> int:
        return sum(len(blocks) * group.block_bytes for group, blocks, _, _ in self._parts)

    def plan(self) -> CopyPlan:
        """Return the copies, in the order of the slots."""
        columns = [group.expand(blocks, slots, skip, self._factor) for group, blocks, slots, skip in self._parts]
        if len(columns) == 1:
            return CopyPlan(*columns[0])
        none = np.empty(0, np.int64)
        return CopyPlan(*(np.concatenate(column) for column in zip((none,) * 4, *columns, strict=True)))


class _Group:
    """The layers of one KV cache group as columns, in the order in which they lie in a slot."""

    def __init__(self, tensors: Sequence[TensorGeometry], refs: Sequence[CanonicalKVCacheRef], index: int) -> None:
        for ref in refs:
            if not 0 <= ref.tensor_idx < len(tensors):
                raise ValueError(f"group {index} names tensor {ref.tensor_idx}; there are {len(tensors)}")
            if not 0 < ref.page_size_bytes <= tensors[ref.tensor_idx].page_size_bytes:
                raise ValueError(
                    f"group {index} copies {ref.page_size_bytes} bytes a page of tensor {ref.tensor_idx}, "
                    f"whose pages have {tensors[ref.tensor_idx].page_size_bytes}"
                )
        # Layers may share a tensor. Rows are in ascending order in the slot, so that adjacent copies can merge and one
        # call can write a whole slot.
        nbytes: dict[int, int] = {}
        for ref in refs:
            nbytes[ref.tensor_idx] = max(ref.page_size_bytes, nbytes.get(ref.tensor_idx, 0))
        rows = sorted(((tensors[at], size) for at, size in nbytes.items()), key=lambda row: row[0].cpu_address)
        self.index = index
        self.num_blocks = min((tensor.num_blocks for tensor, _ in rows), default=0)
        self.block_bytes = sum(size for _, size in rows)

        def column(values: list[int]) -> Int64s:
            return np.array(values, np.int64).reshape(1, -1, 1)

        self._gpu = column([tensor.gpu_address for tensor, _ in rows])
        self._gpu_stride = column([tensor.gpu_stride_bytes for tensor, _ in rows])
        self._cpu = column([tensor.cpu_address for tensor, _ in rows])
        self._cpu_stride = column([tensor.cpu_stride_bytes for tensor, _ in rows])
        self._page = column([tensor.page_size_bytes for tensor, _ in rows])
        self._nbytes = column([size for _, size in rows])
        self._allocation = column([tensor.allocation for tensor, _ in rows])

    def expand(self, blocks: Ids, slots: Ids, skip: int, factor: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return (gpu, cpu, nbytes, allocation) of every page, ordered by slot, then layer, then position."""
        positions = len(slots) * factor
        held: NDArray[np.bool_] | None = None
        if len(blocks) != positions:
            used = slice(skip, skip + len(blocks))
            held = np.zeros(positions, np.bool_)
            held[used] = True
            everywhere = np.zeros(positions, np.int32)
            everywhere[used] = blocks
            blocks = everywhere
        gpu = self._gpu + blocks.reshape(-1, 1, factor) * self._gpu_stride
        cpu = (self._cpu + slots.reshape(-1, 1, 1) * self._cpu_stride) + np.arange(factor) * self._page
        nbytes, allocation = (np.broadcast_to(column, gpu.shape) for column in (self._nbytes, self._allocation))
        if held is None:
            return gpu.ravel(), cpu.ravel(), nbytes.ravel(), allocation.ravel()
        mask = np.broadcast_to(held.reshape(-1, 1, factor), gpu.shape)
        return gpu[mask], cpu[mask], nbytes[mask], allocation[mask]


def _span(areas: list[tuple[int, int, int, int]]) -> tuple[int, int]:
    """Return (lowest address, end) of areas given as (address, stride, rows, row bytes)."""
    return (
        min((address for address, *_ in areas), default=0),
        max((address + stride * max(rows - 1, 0) + row for address, stride, rows, row in areas), default=0),
    )


def _check_range(ids: Ids, limit: int, what: str) -> None:
    if len(ids) <= _FEW_IDS:
        few = ids.tolist()
        inside = not few or (min(few) >= 0 and max(few) < limit)
    else:
        inside = bool(ids.view(np.uint32).max() < limit)  # a negative id is a large unsigned id
    if not inside:
        raise ValueError(f"{what} {ids[(ids < 0) | (ids >= limit)][0]} is outside 0..{limit - 1}")


def _check_distinct(ids: Ids, order: Int64s, what: str) -> None:
    """Raise if an id occurs twice. ``order`` is scratch with room for every id: one pass, no sort, no clearing."""
    if len(ids) <= _FEW_IDS and len(set(ids.tolist())) == len(ids):
        return
    positions = np.arange(len(ids))
    order[ids] = positions
    repeated = order[ids] != positions
    if repeated.any():
        raise ValueError(f"{what} {ids[repeated][0]} is a destination twice")
