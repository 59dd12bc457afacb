"""What an engine that keeps prefixes on storage knows of its requests and of storage, and what its workers move."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtiers.tiers.blocks.keys import hash_blocks

STORED_MAX = 131_072  # blocks; some 20 MB


@dataclass(slots=True)
class Transfer:
    """What one request loads or stores in a step.

    Attributes:
        hashes: of the blocks meant; of a load, whose chunks may begin before them, of all the prompt's blocks up to the
            last one meant.
        first_block: index in the prompt of the first block meant.
        slot_mapping: (tokens,) slots in the paged buffer, block id * block size + offset.
        is_store: or a load.
    """

    req_id: str
    hashes: list[bytes]
    first_block: int
    slot_mapping: torch.Tensor
    is_store: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request asks for in its ``kv_transfer_params``, as vLLM's OffloadingConnector reads them.

    Attributes:
        load_tokens_max: tokens that may be loaded beyond those that the GPU has.
        store_tokens_max: tokens, from the prompt's beginning, that may be stored.
    """

    load_tokens_max: int = sys.maxsize
    store_tokens_max: int = sys.maxsize


@dataclass(slots=True)
class Request:
    """What the scheduler knows of a request.

    Attributes:
        hashes: of the prompt's blocks; with an adapter empty until a lookup has read its files, and for good where they
            do not say which it is: such a prompt is neither loaded nor stored.
        salts: (first block, salt) for each run of blocks with one salt, from block 0 on; what else their KV depends on.
        limits: how much of it may be loaded and stored.
        matched: the lookup.
        asked_at: when it was asked.
        is_given_up: it was not waited for to its end.
        found: its answer, leading blocks; None before there is one.
        stored_blocks: leading blocks that are on storage, or on their way.
        load_first: index in the prompt of the first block that was loaded last.
        load_began_at: when that load was asked for.
        has_failed: of some rank, that load.
        failed_loads: that have ended.
    """

    hashes: list[bytes]
    token_ids: list[int]
    salts: list[tuple[int, bytes | None]]
    lora: Any = None
    limits: Limits = Limits()
    block_ids: list[int] = field(default_factory=list)
    matched: Future[int] | None = None
    asked_at: float = 0.0
    is_given_up: bool = False
    found: int | None = None
    num_computed: int = 0
    stored_blocks: int = 0
    load_first: int = 0
    load_began_at: float = 0.0
    has_failed: bool = False
    failed_loads: int = 0

    def hash_blocks(self, block_size: int, adapter: str = "") -> None:
        """Name the prompt's blocks. ``adapter``: what its weights are known by."""
        ends = [first for first, _ in self.salts[1:]] + [len(self.token_ids)]
        hashes: list[bytes] = []
        for (first, salt), end in zip(self.salts, ends, strict=True):
            if salt and adapter:
                salt += f"\nadapter:{adapter}".encode()
            tokens = self.token_ids[first * block_size : end * block_size]
            hashes += hash_blocks(tokens, block_size, hashes[-1] if hashes else b"", salt)
        self.hashes = hashes


def transfer_of(
    req_id: str, state: Request, block_ids: Sequence[int], first: int, last: int, block_size: int, *, is_store: bool
) -> Transfer:
    """Of the prompt's blocks from ``first`` to ``last``, exclusive."""
    ids = torch.tensor(block_ids[first:last], dtype=torch.int64)
    slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()
    return Transfer(req_id, state.hashes[first if is_store else 0 : last], first, slots, is_store)


class Stored:
    """Hashes of blocks that are on storage or on their way, those used last.

    Nobody asks storage about a prompt that is on the GPU still, and it need not be copied again. What is believed here
    and is not true, because a store failed or files were removed, is found out by the next lookup or load.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Sequence[bytes]) -> None:
        """These are."""
        for block in reversed(hashes):  # a prefix is of no use without its beginning, so that is forgotten last
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > STORED_MAX:
            self._hashes.popitem(last=False)

    def discard(self, hashes: Sequence[bytes]) -> None:
        """These may not be."""
        for block in hashes:
            self._hashes.pop(block, None)

    def end_of(self, hashes: Sequence[bytes], first: int, last: int) -> int:
        """Index behind the blocks from ``first`` to ``last`` that are there without a gap."""
        end = first
        while end < last and hashes[end] in self._hashes:
            end += 1
        self.add(hashes[first:end])
        return end
