from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.connector.base import CanonicalKVCacheRef, CPULoadStoreSpec, GPULoadStoreSpec
from kvtiers.connector.transfer.transfer_plan import (
    CopyPlan,
    Direction,
    TensorGeometry,
    TransferLayout,
    merge_neighbours,
)

GPU, CPU = 10_000_000, 90_000_000


def geometry(**changes: int) -> TensorGeometry:
    fields = {
        "gpu_address": GPU,
        "gpu_stride_bytes": 100,
        "num_blocks": 50,
        "page_size_bytes": 100,
        "cpu_address": CPU,
        "cpu_stride_bytes": 4096,
    }
    return TensorGeometry(**{**fields, **changes})


def layout(tensors: list[TensorGeometry], groups: list[list[tuple[int, int]]], factor: int = 1) -> TransferLayout:
    refs = [[CanonicalKVCacheRef(*ref) for ref in group] for group in groups]
    return TransferLayout(tensors, refs, num_slots=20, blocks_per_chunk=factor)


def rows(plan: CopyPlan) -> list[tuple[int, int, int]]:
    return list(zip((plan.gpu - GPU).tolist(), (plan.cpu - CPU).tolist(), plan.nbytes.tolist(), strict=True))


def copies(*triples: tuple[int, int, int], allocation: list[int] | None = None) -> CopyPlan:
    gpu, cpu, nbytes = (np.array(column, np.int64) for column in zip(*triples, strict=True))
    return CopyPlan(GPU + gpu, CPU + cpu, nbytes, np.array(allocation or [0] * len(triples), np.int64))


def test_blocks_lie_in_their_chunk_by_position() -> None:
    plan = (
        layout([geometry()], [[(0, 60)]], factor=4)
        .check(GPULoadStoreSpec([9, 3, 8], None, [6]), CPULoadStoreSpec([5, 1]), Direction.STORE)
        .plan()
    )
    assert rows(plan) == [(900, 5 * 4096 + 200, 60), (300, 5 * 4096 + 300, 60), (800, 1 * 4096, 60)]
    assert plan.total_bytes == 180


def test_copies_are_ordered_by_slot_tensor_and_position() -> None:
    """Slot after slot, in each the tensors as they lie there, in each the positions."""
    tensors = [geometry(gpu_address=GPU + 50_000, cpu_address=CPU + 200), geometry()]
    plan = (
        layout(tensors, [[(0, 100), (1, 100)]], factor=2)
        .check(GPULoadStoreSpec([1, 2, 3, 4]), CPULoadStoreSpec([7, 6]), Direction.LOAD)
        .plan()
    )
    assert rows(plan) == [
        (gpu + block * 100, slot * 4096 + cpu + position * 100, 100)
        for slot, blocks in ((7, (1, 2)), (6, (3, 4)))
        for gpu, cpu in ((0, 0), (50_000, 200))
        for position, block in enumerate(blocks)
    ]


def test_copies_merge_only_if_both_sides_are_contiguous() -> None:
    plan = copies(
        (0, 0, 10), (10, 10, 5), (15, 15, 5), (21, 20, 5), (26, 26, 4), (30, 30, 6), (36, 36, 6),
        allocation=[0, 0, 0, 0, 0, 1, 1],
    )  # fmt: skip
    assert rows(merge_neighbours(plan)) == [(0, 0, 20), (21, 20, 5), (26, 26, 4), (30, 30, 12)]


def test_merged_copies_do_not_cross_cuts() -> None:
    plan = copies(*((at * 10, at * 10, 10) for at in range(6)))
    assert rows(merge_neighbours(plan)) == [(0, 0, 60)]
    assert rows(merge_neighbours(plan, CPU + np.array([0, 20, 55]))) == [(0, 0, 20), (20, 20, 40)]


def test_copies_of_consecutive_blocks_in_a_chunk_merge() -> None:
    plan = (
        layout([geometry()], [[(0, 100)]], factor=8)
        .check(GPULoadStoreSpec(list(range(5, 17))), CPULoadStoreSpec([3, 9]), Direction.STORE)
        .plan()
    )
    assert rows(merge_neighbours(plan)) == [(500, 3 * 4096, 800), (1300, 9 * 4096, 400)]


@pytest.mark.parametrize(
    "block_ids",
    [
        [2**32 + 5],
        np.array([2**32 + 5]),
        np.array([1, 2**31]),
        np.array([2**32 - 1], np.uint32),
        np.array([1.5]),
        torch.tensor([2**32 + 5]),
    ],
    ids=str,
)
def test_block_id_that_is_not_an_int32_is_refused(block_ids: Any) -> None:
    with pytest.raises(ValueError, match="not an int32"):
        CPULoadStoreSpec(block_ids)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_block_ids_of_any_integer_type_become_int32(dtype: Any) -> None:
    block_ids = GPULoadStoreSpec(np.array([7, 0, 9], dtype)).block_ids
    assert block_ids.dtype == np.int32
    assert block_ids.tolist() == [7, 0, 9]


def test_checked_transfer_ignores_later_changes_of_its_specs() -> None:
    gpu, cpu = GPULoadStoreSpec(np.array([1, 2], np.int32)), CPULoadStoreSpec(np.array([3, 4], np.int32))
    transfer = layout([geometry()], [[(0, 100)]]).check(gpu, cpu, Direction.LOAD)
    gpu.block_ids[:] = 49
    cpu.block_ids[:] = 10_000
    assert rows(transfer.plan()) == [(100, 3 * 4096, 100), (200, 4 * 4096, 100)]
    assert transfer.total_bytes == 200


def test_layers_on_one_tensor_are_copied_once() -> None:
    transfer = layout([geometry()], [[(0, 40), (0, 70)]]).check(
        GPULoadStoreSpec([1]), CPULoadStoreSpec([3]), Direction.STORE
    )
    assert rows(transfer.plan()) == [(100, 3 * 4096, 70)]
    assert transfer.total_bytes == 70


@given(st.data())
def test_merged_copies_write_the_same_bytes(data: st.DataObject) -> None:
    blocks, factor = 12, data.draw(st.sampled_from([1, 2, 4]))
    kv = np.random.default_rng(0).integers(0, 256, (2, blocks, 8), dtype=np.uint8)
    region = np.zeros((2, 12, 16 * factor), np.uint8)
    tensors = [
        TensorGeometry(
            gpu_address=kv[at].ctypes.data,
            gpu_stride_bytes=8,
            num_blocks=blocks,
            page_size_bytes=8,
            cpu_address=region[0].ctypes.data + at * 8 * factor,
            cpu_stride_bytes=16 * factor,
        )
        for at in range(2)
    ]
    ids = data.draw(st.lists(st.integers(0, blocks - 1), max_size=blocks, unique=True))
    if data.draw(st.booleans()):
        ids.sort()
    slots = data.draw(st.permutations(range(12)))[: -(-len(ids) // factor)]
    plan = (
        layout(tensors, [[(0, 8), (1, 8)]], factor)
        .check(GPULoadStoreSpec(ids), CPULoadStoreSpec(slots), Direction.STORE)
        .plan()
    )
    merged = merge_neighbours(plan)
    assert len(merged) <= len(plan)
    for copied, each in ((region[0], plan), (region[1], merged)):
        shift = copied.ctypes.data - region[0].ctypes.data
        for gpu, cpu, nbytes in zip(each.gpu.tolist(), each.cpu.tolist(), each.nbytes.tolist(), strict=True):
            ctypes.memmove(cpu + shift, gpu, nbytes)
    assert (region[0] == region[1]).all()


def test_unit_divides_every_address_and_size_of_a_plan() -> None:
    tensors = [geometry(gpu_address=GPU + 5_040), geometry(cpu_address=CPU + 480, page_size_bytes=60)]
    each = layout(tensors, [[(0, 100)], [(1, 20)]])
    assert each.unit_bytes == 4
    assert each.gpu_span == (GPU, GPU + 5_040 + 5_000)
    assert each.cpu_span == (CPU, CPU + 19 * 4096 + 540)


@pytest.mark.parametrize(
    ("groups", "factor", "message"),
    [
        ([[(1, 10)]], 1, "group 0 names tensor 1; there are 1"),
        ([[(0, 10)], [(0, 101)]], 1, "group 1 copies 101 bytes a page of tensor 0, whose pages have 100"),
        ([[(0, 0)]], 1, "copies 0 bytes"),
        ([[(0, 10)]], 0, "blocks_per_chunk 0 must be 1 or more"),
    ],
)
def test_impossible_groups_are_refused(groups: list[list[tuple[int, int]]], factor: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout([geometry()], groups, factor)


def test_block_ids_of_a_group_are_limited_by_its_smallest_tensor() -> None:
    each = layout([geometry(), geometry(num_blocks=9)], [[(0, 10)], [(0, 10), (1, 10)]])
    each.check(GPULoadStoreSpec([30], [1, 0]), CPULoadStoreSpec([1]), Direction.LOAD)
    with pytest.raises(ValueError, match=r"GPU block id of group 1 9 is outside 0\.\.8"):
        each.check(GPULoadStoreSpec([9], [0, 1]), CPULoadStoreSpec([1]), Direction.LOAD)


@pytest.mark.parametrize("direction", Direction)
def test_group_without_layers_copies_nothing(direction: Direction) -> None:
    """As on a pipeline stage that has layers of the other groups only. Its block ids mean nothing here."""
    each = layout([geometry()], [[(0, 60)], [], [(0, 60)]], factor=2)
    transfer = each.check(GPULoadStoreSpec([1, 2, 70, 71, 72, 3], [2, 3, 1]), CPULoadStoreSpec([4, 5, 6, 7]), direction)
    assert rows(transfer.plan()) == [(100, 4 * 4096, 60), (200, 4 * 4096 + 100, 60), (300, 7 * 4096, 60)]
    assert transfer.total_bytes == 180
    assert len(each.check(GPULoadStoreSpec([1], [0, 1, 0]), CPULoadStoreSpec([1]), direction).plan()) == 0
    with pytest.raises(ValueError, match="need 3"):
        each.check(GPULoadStoreSpec([1, 2, 3], [1, 1, 1]), CPULoadStoreSpec([1, 2]), direction)


def test_groups_sharing_tensors_refuse_double_write_beside_group_without_layers() -> None:
    each = layout([geometry()], [[(0, 60)], [], [(0, 60)]])
    ids = list(range(49)) * 2  # of the first and of the group without layers
    each.check(GPULoadStoreSpec([*ids, 49], [49, 49, 1]), CPULoadStoreSpec([0] * 99), Direction.LOAD)
    with pytest.raises(ValueError, match="GPU block id 7 is a destination twice"):
        each.check(GPULoadStoreSpec([*ids, 7], [49, 49, 1]), CPULoadStoreSpec([0] * 99), Direction.LOAD)
