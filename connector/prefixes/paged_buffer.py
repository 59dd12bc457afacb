"""Copies tokens' KV in and out of vLLM's paged buffers, for each known order of their dimensions."""

from __future__ import annotations

import torch

from ...tiers.errors import ConfigError, KVTiersError


class ShapeError(KVTiersError):
    """KV that is intact, but has another shape or dtype than this engine's."""


#: Candidate (page dimension, token dimension) pairs, by the buffer's number of dimensions.
_PAGE_AND_TOKEN_DIMS = {3: ((0, 1),), 4: ((0, 2), (0, 1), (1, 2)), 5: ((0, 2), (0, 1), (1, 2))}


def token_pages(layer: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """View a layer's paged buffer as (pages, tokens of a page, …), in whichever order vLLM keeps it.

    Known layouts: (pages, tokens, c) for MLA; (2, pages, tokens, heads, d) and (pages, 2, tokens, heads, d); and, since
    0.31, (pages, heads, tokens, c), with one head for MLA. A kernel's page may be smaller than a block.

    Raises:
        ConfigError: the buffer has none of these layouts.
    """
    for page_dim, token_dim in _PAGE_AND_TOKEN_DIMS.get(layer.ndim, ()):
        pages, tokens = layer.shape[page_dim], layer.shape[token_dim]
        if pages * tokens == num_blocks * block_size and block_size % tokens == 0:
            return layer.movedim((page_dim, token_dim), (0, 1))
    raise ConfigError(
        f"{tuple(layer.shape)} for {num_blocks} blocks of {block_size} tokens is not the shape of a known layout",
        field="kv_cache",
    )


def extract_slots(pages: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Copy the KV of tokens out of their slots. Returns (tokens, …), contiguous, on the CPU.

    From CUDA buffers the copy goes to pinned memory and is only submitted, to the current stream: wait for an event
    after it before reading the result. Work that is submitted to that stream later may overwrite the slots.

    Args:
        pages: (pages, tokens of a page, …).
        slot_mapping: the slots; on the buffer's device already, if many layers take the same ones.
    """
    slots = slot_mapping.to(pages.device)
    taken = pages[slots // pages.shape[1], slots % pages.shape[1]].detach().contiguous()
    if not taken.is_cuda:
        return taken
    on_host = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=True)
    return on_host.copy_(taken, non_blocking=True)


def inject_slots(pages: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
    """Write the KV of tokens into their slots; the inverse of ``extract_slots``.

    Raises:
        ShapeError: the values do not fit the buffer.
    """
    slots = slot_mapping.to(pages.device)
    if values.dtype != pages.dtype or values.shape[1:] != pages.shape[2:] or len(values) != len(slots):
        raise ShapeError(
            f"{tuple(values.shape)} {values.dtype} for {len(slots)} slots of {tuple(pages.shape)} {pages.dtype}"
        )
    pages[slots // pages.shape[1], slots % pages.shape[1]] = values.to(pages.device)
