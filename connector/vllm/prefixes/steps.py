"""Reads vLLM's requests and steps for SharedStorageConnector, and defines its message to the workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.kv_offload.base import Locality, Medium

from ....tiers.plain_logs import get_logger
from ...prefixes.format import CHUNK_BLOCKS_MAX
from ...prefixes.requests import Limits, Request, Stored, Transfer, transfer_of

logger = get_logger(__name__)


@dataclass
class SharedStorageMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """The scheduler's message to the workers, once per step.

    Attributes:
        requests: loads to start in this step, and stores.
        idle: no request is computed in this step.
        revision: the scheduler's ``model.revision``; workers use its digest of the config.
        drops_loads: running loads must not be used any more.
    """

    requests: list[Transfer] = field(default_factory=list)
    idle: bool = False
    revision: str | None = None
    drops_loads: bool = False


class PrefixSaves:
    """Chooses the chunks to store as prompts are computed, each chunk once. Scheduler thread only.

    Args:
        stores_any: False: store nothing.

    Attributes:
        stored: hashes of blocks that need not be stored.
    """

    def __init__(self, block_size: int, *, stores_any: bool) -> None:
        self.stored = Stored()
        self._block_size = block_size
        self._stores_any = stores_any

    def of_step(self, scheduler_output: Any, requests: Mapping[str, Request]) -> list[Transfer]:
        """Return the transfers that this step stores, and update the block ids of its requests."""
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
            if req_id in cached.resumed_req_ids:  # after a preemption, new_block_ids has all blocks of the request
                request.block_ids = list(new_ids[0]) if new_ids else []
            elif new_ids:
                request.block_ids += new_ids[0]
            saves += self._of_request(req_id, request, cached.num_computed_tokens[index] + scheduled[req_id])
        return saves

    def _of_request(self, req_id: str, request: Request, computed_tokens: int) -> list[Transfer]:
        if not self._stores_any:
            return []
        size = self._block_size
        end = min(len(request.hashes), request.limits.store_tokens_max // size)  # blocks that may be stored
        last = min(computed_tokens // size, len(request.block_ids), end)
        request.stored_blocks = self.stored.end_of(request.hashes, request.stored_blocks, last)
        # Lookups ask for chunks of one size at a time, but steps end anywhere. So only the last chunk may be smaller.
        blocks_min = 1 if last == end else CHUNK_BLOCKS_MAX
        saves = []
        while last - request.stored_blocks >= blocks_min:
            first, behind = request.stored_blocks, min(last, request.stored_blocks + CHUNK_BLOCKS_MAX)
            self.stored.add(request.hashes[first:behind])
            saves.append(transfer_of(req_id, request, request.block_ids, first, behind, size, is_store=True))
            request.stored_blocks = behind
        return saves


def salts_of(request: Any, block_size: int) -> list[tuple[int, bytes | None]]:
    """Return what a prompt's KV depends on besides its tokens: LoRA adapter, images, and the tenant's salt.

    Returns:
        (first block, salt) for each run of blocks with the same salt, starting at block 0. An image counts from the
        block in which it begins, so prompts share the blocks before the first image that differs.
    """
    lora: Any = getattr(request, "lora_request", None)
    before = [f"lora:{lora.lora_name}:{getattr(lora, 'lora_path', '')}"] if lora is not None else []
    behind = [f"salt:{request.cache_salt}"] if getattr(request, "cache_salt", None) else []
    pictures: dict[int, list[str]] = {0: []}
    for each in getattr(request, "mm_features", ()) or ():
        position = getattr(each, "mm_position", None)
        block = int(getattr(position, "offset", 0)) // block_size
        pictures.setdefault(block, []).append(f"mm:{each.identifier}:{position or ''}")
    salts: list[tuple[int, bytes | None]] = []
    seen: list[str] = []
    for block in sorted(pictures):
        seen += pictures[block]
        text = "\n".join((*before, *seen, *behind))
        salts.append((block, text.encode() if text else None))
    return salts


def limits_of(request: Any, locality: Locality) -> Limits:
    """Read the limits of a request. Like vLLM, ignore a malformed value with a warning.

    Args:
        locality: of the storage; ``kv_load_tiers`` may exclude it from loading.
    """
    params = getattr(request, "kv_transfer_params", None) or {}
    load_tokens_max, store_tokens_max = (_tokens(name, params) for name in ("max_load_tokens", "max_offload_tokens"))
    may_load = _may_load(params.get("kv_load_tiers"), locality)
    return Limits(load_tokens_max if may_load else 0, store_tokens_max)


def _tokens(name: str, params: Mapping[str, Any]) -> int:
    value = params.get(name)
    if type(value) is int and value >= 0:
        return value
    if value is not None:
        logger.warning("%s: %.80r is ignored; write a number of tokens, 0 or more", name, value)
    return sys.maxsize


def _may_load(wanted: Any, locality: Locality) -> bool:
    if not isinstance(wanted, list):
        if wanted is not None:
            logger.warning("kv_load_tiers: %.80r is ignored; write a list", wanted)
        return True
    names_us = []
    for entry in wanted:
        try:
            medium = Medium((entry.get("medium") or Medium.STORAGE.value).upper())
            place = Locality((entry.get("locality") or locality.value).upper())
        except (AttributeError, ValueError):
            logger.warning("kv_load_tiers: %.80r is ignored; write a medium, a locality or both", entry)
            continue
        names_us.append(medium is Medium.STORAGE and place is locality)
    return any(names_us) or bool(wanted and not names_us)
