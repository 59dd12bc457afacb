"""What each step of SharedStorageConnector stores, of the requests in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from connector.prefix_store import CHUNK_BLOCKS_MAX
from connector.vllm.prefix_requests import Request, Stored, Transfer, transfer_of
from connector.vllm.siblings import SiblingLoads, Untrusted


class PrefixSaves:
    """Chunks of prompts as they are computed, each once, and none that a failed load may have spoiled.

    Scheduler thread only.

    Args:
        steps_max: that are under way at once.
        stores_any: or nothing.

    Attributes:
        stored: what need not be stored.
        dropped_blocks: that no step has stored, as another connector's loads were in doubt to the request's end.
    """

    def __init__(self, block_size: int, steps_max: int, *, stores_any: bool) -> None:
        self.stored = Stored()
        self.dropped_blocks = 0
        self._block_size = block_size
        self._stores_any = stores_any
        self._siblings, self._untrusted = SiblingLoads(steps_max), Untrusted(steps_max)

    def asked(self, req_id: str, num_computed_tokens: int) -> None:
        """vLLM asks what storage has beyond these tokens of a request, which the GPU has."""
        self._siblings.asked(req_id, num_computed_tokens)

    def load_of_others_failed(self, requests: Iterable[Request]) -> None:
        """Store nothing more of these: with async scheduling vLLM may not set back what was computed over it."""
        self._untrusted.load_failed()
        for request in requests:
            request.stored_blocks = len(request.token_ids)

    def of_step(self, scheduler_output: Any, requests: Mapping[str, Request]) -> list[Transfer]:
        """What this step stores; notes the blocks that its requests have."""
        in_doubt = self._siblings.in_doubt(scheduler_output)
        self._untrusted.begin_step()
        scheduled = scheduler_output.num_scheduled_tokens
        saves: list[Transfer] = []
        for new in scheduler_output.scheduled_new_reqs:
            if (request := requests.get(new.req_id)) is not None:
                request.block_ids = list(new.block_ids[0])
                computed = new.num_computed_tokens + scheduled[new.req_id]
                saves += self._of_request(new.req_id, request, request.num_computed, computed, in_doubt)
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            if (request := requests.get(req_id)) is None:
                continue
            new_ids, before = cached.new_block_ids[index], cached.num_computed_tokens[index]
            on_gpu = before
            if req_id in cached.resumed_req_ids:  # after a preemption these are all of its blocks
                request.block_ids = list(new_ids[0]) if new_ids else []
                on_gpu = request.num_computed
            elif new_ids:
                request.block_ids += new_ids[0]
            saves += self._of_request(req_id, request, on_gpu, before + scheduled[req_id], in_doubt)
        return saves

    def request_finished(self, request: Request) -> None:
        """No later step will have it."""
        if request.doubted_blocks:
            stored = self.stored.end_of(request.hashes, request.stored_blocks, request.doubted_blocks)
            self.dropped_blocks += max(0, request.doubted_blocks - stored)

    def _of_request(
        self, req_id: str, request: Request, tokens_before: int, computed_tokens: int, in_doubt: bool
    ) -> list[Transfer]:
        """``tokens_before``: that neither this step nor a load of it gives."""
        if not self._stores_any:
            return []
        size = self._block_size
        computed = min(computed_tokens // size, len(request.hashes), len(request.block_ids))
        end = min(len(request.hashes), request.limits.store_tokens_max // size)  # of what may be stored
        last = min(computed, end)
        request.doubted_blocks = last if in_doubt else 0
        if in_doubt:
            self._untrusted.note(_blocks(request, tokens_before // size, computed))
            return []
        on_gpu = min(last, request.num_computed // size)
        if last > request.stored_blocks and self._untrusted.has_any(_blocks(request, 0, on_gpu)):
            request.stored_blocks = len(request.token_ids)
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


def _blocks(request: Request, first: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Id and hash of each."""
    return zip(request.block_ids[first:end], request.hashes[first:end], strict=True)
