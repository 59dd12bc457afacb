"""What each step of SharedStorageConnector stores, of the requests in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector.prefix_store import CHUNK_BLOCKS_MAX
from connector.vllm.prefix_requests import Request, Stored, Transfer, transfer_of


class PrefixSaves:
    """Chunks of prompts as they are computed, each once. Scheduler thread only.

    Args:
        stores_any: or nothing.

    Attributes:
        stored: what need not be stored.
    """

    def __init__(self, block_size: int, *, stores_any: bool) -> None:
        self.stored = Stored()
        self._block_size = block_size
        self._stores_any = stores_any

    def of_step(self, scheduler_output: Any, requests: Mapping[str, Request]) -> list[Transfer]:
        """What this step stores; notes the blocks that its requests have."""
        scheduled = scheduler_output.num_scheduled_tokens
        saves: list[Transfer] = []
        for new in scheduler_output.scheduled_new_reqs:
            if (request := requests.get(new.req_id)) is not None:
                request.block_ids = list(new.block_ids[0])
                saves += self._of_request(new.req_id, request, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            if (request := requests.get(req_id)) is None:
                continue
            new_ids = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:  # after a preemption these are all of its blocks
                request.block_ids = list(new_ids[0]) if new_ids else []
            elif new_ids:
                request.block_ids += new_ids[0]
            saves += self._of_request(req_id, request, cached.num_computed_tokens[index] + scheduled[req_id])
        return saves

    def _of_request(self, req_id: str, request: Request, computed_tokens: int) -> list[Transfer]:
        if not self._stores_any:
            return []
        size = self._block_size
        end = min(len(request.hashes), request.limits.store_tokens_max // size)  # of what may be stored
        last = min(computed_tokens // size, len(request.block_ids), end)
        request.stored_blocks = self.stored.end_of(request.hashes, request.stored_blocks, last)
        # Chunks of one size are asked for side by side, and steps end anywhere. So before the end, whole ones.
        blocks_min = 1 if last == end else CHUNK_BLOCKS_MAX
        saves = []
        while last - request.stored_blocks >= blocks_min:
            first, behind = request.stored_blocks, min(last, request.stored_blocks + CHUNK_BLOCKS_MAX)
            self.stored.add(request.hashes[first:behind])
            saves.append(transfer_of(req_id, request, request.block_ids, first, behind, size, is_store=True))
            request.stored_blocks = behind
        return saves
