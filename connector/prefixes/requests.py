"""State of requests in an engine that keeps prefixes on storage: requests, transfers, and the blocks on storage."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ...tiers.blocks.keys import hash_blocks

STORED_MAX = 131_072  # blocks; some 20 MB


@dataclass(slots=True)
class Transfer:
    """The load or store of one request in one step.

    Attributes:
        hashes: for a store, hashes of the blocks to store. For a load, hashes of all the prompt's blocks up to the last
            one to load, because a chunk may begin before the first block to load.
        first_block: index in the prompt of the first block to move.
        slot_mapping: (tokens,) slots in the paged buffer, block id * block size + offset.
        is_store: True: a store. False: a load.
    """

    req_id: str
    hashes: list[bytes]
    first_block: int
    slot_mapping: torch.Tensor
    is_store: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits from a request's ``kv_transfer_params``, with the meaning that vLLM's OffloadingConnector gives them.

    Attributes:
        load_tokens_max: how many tokens may be loaded, not counting those already on the GPU.
        store_tokens_max: how many tokens may be stored, from the prompt's beginning.
    """

    load_tokens_max: int = sys.maxsize
    store_tokens_max: int = sys.maxsize


@dataclass(slots=True)
class Request:
    """The scheduler's state of a request.

    Attributes:
        hashes: hashes of the prompt's blocks. With an adapter, empty until a lookup has read the adapter's files; if
            the files do not identify the adapter, the list stays empty, and the prompt is neither loaded nor stored.
        salts: (first block, salt) for each run of blocks with one salt, from block 0: inputs of the KV besides tokens.
        limits: how many tokens may be loaded and stored.
        matched: the lookup.
        asked_at: when the lookup began.
        is_given_up: whether the lookup was given up before its end.
        found: the lookup's result in leading blocks; None before it ends.
        stored_blocks: leading blocks that are on storage, or on their way.
        load_first: index in the prompt of the first block of the last load.
        load_began_at: when the last load was requested.
        has_failed: whether the last load failed on any rank.
        failed_loads: number of failed loads that have ended.
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
        """Compute the hashes of the prompt's blocks. ``adapter``: identity of the adapter's weights."""
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
    """Create the transfer of the prompt's blocks from ``first`` to ``last``, exclusive."""
    ids = torch.tensor(block_ids[first:last], dtype=torch.int64)
    slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()
    return Transfer(req_id, state.hashes[first if is_store else 0 : last], first, slots, is_store)


class Stored:
    """Hashes of the most recently used blocks that are on storage or on their way there.

    A prompt that is still on the GPU causes no lookup; these hashes show that it need not be stored again. An entry can
    be wrong, because a store failed or files were removed. The next lookup or load corrects it.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Sequence[bytes]) -> None:
        """Note that these blocks are on storage or on their way."""
        for block in reversed(hashes):  # a prefix is useless without its beginning, so the beginning is forgotten last
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > STORED_MAX:
            self._hashes.popitem(last=False)

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Note that these blocks may not be on storage."""
        for block in hashes:
            self._hashes.pop(block, None)

    def end_of(self, hashes: Sequence[bytes], first: int, last: int) -> int:
        """Return the index after the last block that is known, counting from ``first`` up to ``last`` without a gap."""
        end = first
        while end < last and hashes[end] in self._hashes:
            end += 1
        self.add(hashes[first:end])
        return end
