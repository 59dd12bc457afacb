"""Views KV tensors of any layout as (num_blocks, page_bytes) int8 tensors.

An engine's KV tensor is logically (2, num_blocks, …), (num_blocks, 2, …) or (num_blocks, …). Its order in memory is
the one that its attention kernel prefers. A copy needs one dense run of bytes for each block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

_VIEWS_MAX = 64  # per tensor; each costs a copy per block


def canonicalize_kv_caches(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    groups: Sequence[Sequence[str]],
    num_blocks: int,
    *,
    block_dims: Mapping[str, int] | None = None,
) -> CanonicalKVCaches:
    """View every layer's KV tensor as blocks of bytes; nothing is copied.

    - Dimensions that are dense inside the block, in any order, form its page. Any other dimension, such as the 2 of
      (2, num_blocks, …), splits the tensor: there is one view for each index of that dimension, in memory order.
    - Space between blocks (padding, or another layer's page) is not part of the page: the view's rows are strided.
    - Layers that share memory share one view; its page is as large as the largest page of these layers.

    Args:
        kv_caches: layer name -> its tensor, or its tensors if it has several. Each has one block dimension.
        groups: for each KV cache group, the names of its layers. Every layer is in a group.
        num_blocks: size of the block dimension.
        block_dims: layer name -> its block dimension, for tensors with several dimensions of that size.

    Raises:
        ValueError: a layer that is unknown or in no group, a block dimension that is missing or ambiguous, memory
            that two elements share, or blocks in more than 64 pieces.
    """
    names = [name for group in groups for name in group]
    unknown, left_out = sorted(set(names) - set(kv_caches)), sorted(set(kv_caches) - set(names))
    if unknown or left_out:
        raise ValueError(f"groups must name every layer of kv_caches; unknown: {unknown}, in no group: {left_out}")
    views: dict[tuple[torch.device, int, int], tuple[int, torch.Tensor]] = {}
    group_refs: list[list[CanonicalKVCacheRef]] = []
    for group in groups:
        refs: dict[int, int] = {}
        for name in group:
            entry = kv_caches[name]
            for tensor in (entry,) if isinstance(entry, torch.Tensor) else entry:
                for view in _split(name, tensor, num_blocks, (block_dims or {}).get(name)):
                    key = (view.device, view.data_ptr(), view.stride(0))
                    index, seen = views.get(key, (len(views), view))
                    views[key] = index, max(seen, view, key=lambda each: each.shape[1])
                    refs[index] = max(refs.get(index, 0), view.shape[1])
        group_refs.append([CanonicalKVCacheRef(index, nbytes) for index, nbytes in refs.items()])
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(view, view.shape[1]) for _, view in views.values()],
        group_data_refs=group_refs,
    )


def _split(name: str, tensor: torch.Tensor, num_blocks: int, block_dim: int | None) -> list[torch.Tensor]:
    """Return the tensor's (num_blocks, page_bytes) int8 views, in memory order."""
    if block_dim is None:
        fitting = [dim for dim, size in enumerate(tensor.shape) if size == num_blocks]
        if len(fitting) != 1:
            raise ValueError(
                f"layer {name}: shape {tuple(tensor.shape)} has {len(fitting)} dimensions of {num_blocks} blocks, "
                f"accepted is one; name it in block_dims"
            )
        block_dim = fitting[0]
    elif not (0 <= block_dim < tensor.ndim and tensor.shape[block_dim] == num_blocks):
        raise ValueError(
            f"layer {name}: dimension {block_dim} of shape {tuple(tensor.shape)} does not have {num_blocks} blocks"
        )
    size_of = tensor.element_size()
    # The stride of a dimension of size 1 has no meaning; a single block reaches to the tensor's end.
    block_stride = tensor.stride(block_dim) if num_blocks > 1 else tensor.numel()
    others = sorted(
        (tensor.stride(dim), size) for dim, size in enumerate(tensor.shape) if dim != block_dim and size != 1
    )
    page, offsets = 1, [0]
    for stride, size in others:
        if stride == page and stride < block_stride and len(offsets) == 1:
            page *= size
        elif stride < page:
            raise ValueError(f"layer {name}: dimensions of strides {tensor.stride()} share memory")
        else:
            offsets = [offset + index * stride for offset in offsets for index in range(size)]
    if len(offsets) > _VIEWS_MAX:
        raise ValueError(
            f"layer {name}: a block of shape {tuple(tensor.shape)}, strides {tensor.stride()} is {len(offsets)} "
            f"pieces of memory, accepted are {_VIEWS_MAX}"
        )
    if page > block_stride:
        raise ValueError(f"layer {name}: blocks of strides {tensor.stride()} share memory")
    return [
        torch.empty(0, dtype=torch.int8, device=tensor.device).set_(
            tensor.untyped_storage(),
            (tensor.storage_offset() + offset) * size_of,
            (num_blocks, page * size_of),
            (block_stride * size_of, 1),
        )
        for offset in sorted(offsets)
    ]
