"""A small inference engine that drives the offloading interfaces in the same way as a large engine.

It has one thread, greedy decoding, and one request at a time. It does all that an engine must do for offloading: ask
which leading blocks exist, load them, compute the rest, store new blocks, report the end of every transfer, and close
each step. It does not know the implementation behind ``OffloadingSpec``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...tiers.base import ReqContext
from ...tiers.blocks.keys import OffloadKey, hash_blocks, make_offload_key
from ...tiers.errors import ConfigError
from ..base import GPULoadStoreSpec, OffloadingHandler, OffloadingSpec, TransferResult
from .model import LoadedModel
from .paged_cache import PagedKVCache, RequestCache

POLL_S = 0.0005  # short pause between polls while no prompt is computed; releases the GIL
PREFILL_CHUNK_TOKENS = 4096
STORE_WAIT_S_MAX = 30.0  # how long an answered request's blocks wait for room in the region

Progress = Callable[[str, int, int], None]


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, its progress and its answer. The engine owns every field.

    Attributes:
        tokens: the prompt, then the answer as it grows.
        block_ids: the engine's blocks that hold the KV of these tokens, in order.
        num_computed: leading tokens whose KV is in the engine's blocks.
        blocks_hit: offloaded blocks that ``lookup`` found, of ``blocks_total`` in the prompt.
        tokens_loaded: tokens whose KV was loaded and not computed.
        load_s: seconds from submission until the loaded KV was in place; 0: no KV was loaded.
        ttft_s: time to first token, from submission.
    """

    context: ReqContext
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    store: bool
    prefill_chunk_tokens: int
    submitted_s: float
    blocks_total: int
    block_ids: list[int]
    hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    blocks_hit: int = 0
    tokens_loaded: int = 0
    chunks_stored: int = 0
    load_s: float = 0.0
    ttft_s: float = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether the first token of the answer exists."""
        return len(self.tokens) > self.num_prompt_tokens

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]


@dataclass(slots=True)
class HopTotals:
    """Bytes moved in one direction and the seconds it took."""

    bytes: int = 0
    seconds: float = 0.0

    def add(self, result: TransferResult) -> None:
        """Add a transfer that has ended."""
        self.bytes += result.transfer_size
        self.seconds += result.transfer_time


class Engine:
    """Serves requests on one model, one after the other.

    The engine has one thread; only the handlers and tiers have threads of their own.

    Args:
        model: the model to run.
        memory: the engine's KV blocks. Every request uses them from the first block on.
        offloading: where to load KV from and store KV to.
        store_chunks_max: most chunks offered for storing at once, 1 or more; the region must hold as many.
        progress: called as (stage, done, total) for "reading the prompt" and "answering", in tokens.

    Attributes:
        loaded, stored: bytes and seconds of the copies between the region and the KV tensors.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: PagedKVCache,
        offloading: OffloadingSpec,
        *,
        store_chunks_max: int,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.model = model
        self.memory = memory
        self.blocks_per_chunk = offloading.blocks_per_chunk
        self.chunk_tokens = memory.block_size * self.blocks_per_chunk
        self.loaded, self.stored = HopTotals(), HopTotals()
        self._progress = progress
        self._store_chunks_max = store_chunks_max
        self._manager = offloading.get_manager()
        self._load_handler: OffloadingHandler
        self._store_handler: OffloadingHandler
        for source, _, handler in offloading.get_handlers(memory.canonical()):
            if issubclass(source, GPULoadStoreSpec):
                self._store_handler = handler
            else:
                self._load_handler = handler
        self._request: Request | None = None  # the last one
        self._stores: dict[int, Sequence[OffloadKey]] = {}  # job -> its keys; at most one job runs
        self._job_ids = itertools.count()
        self._request_ids = itertools.count()

    def run(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        load: bool = True,
        store: bool = True,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> Request:
        """Answer a prompt. Some of its blocks may not be stored yet: ``drain`` stores them, the next prompt drops them.

        Args:
            load: whether to look for the prompt's prefix in the tiers.
            store: whether to store the request's blocks there.
            prefill_chunk_tokens: most tokens computed in one forward. This bounds the activations of a long prompt.

        Raises:
            ConfigError: the prompt is empty, or can never fit.
        """
        blocks = -(-(len(prompt) + max_new_tokens) // self.memory.block_size)
        if not prompt or max_new_tokens < 1 or blocks > self.memory.num_blocks:
            raise ConfigError(
                f"{len(prompt)} tokens and {max_new_tokens} new ones; accepted are 1 or more each, and together at "
                f"most {self.memory.num_blocks * self.memory.block_size}",
                field="prompt",
            )
        request = Request(
            context=ReqContext(req_id=f"request-{next(self._request_ids)}"),
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            max_new_tokens=max_new_tokens,
            store=store,
            prefill_chunk_tokens=prefill_chunk_tokens,
            submitted_s=time.perf_counter(),
            blocks_total=len(prompt) // self.chunk_tokens,
            block_ids=self.memory.block_ids[:blocks],
        )
        self._end_stores()  # stores of the request before read the blocks that this request writes
        self._request = request
        if load:
            self._load(request)
            self._end_step()
        cache = RequestCache(self.memory, request.block_ids, lambda layer: self._report_prefill(request, layer))
        while not self._is_answered(request):
            self._forward(request, cache)
            if request.store and request.is_answering and not request.chunks_stored:
                # Only after the first token, so that a store never delays it.
                self._store(request)
            self._end_step()
        self._manager.on_request_finished(request.context)
        return request

    def warm_up(self) -> None:
        """Answer a short dummy prompt, so that the first real prompt does not pay for one-time initialization."""
        tokens = [index % 7 for index in range(2 * self.chunk_tokens)]
        # In two pieces: the second piece is computed after a prefix, as in a warm request.
        self.run(tokens, max_new_tokens=2, store=False, prefill_chunk_tokens=self.chunk_tokens)

    def drain(self) -> None:
        """Store the rest of the last request, and wait until every stored block is in every tier.

        The other chunks of a request wait until the tiers have the first chunks: tiers accept only a share of the
        region at once. They drop blocks beyond that share, and blocks that leave the region before their turn.
        """
        request = self._request
        self._end_stores()
        waits_since_s = time.perf_counter()
        while request and request.store and self._new_keys(request):
            self._manager.drain()
            if self._store(request):
                self._end_stores()
                waits_since_s = time.perf_counter()
            elif time.perf_counter() - waits_since_s < STORE_WAIT_S_MAX:
                time.sleep(POLL_S)
            else:
                break
        self._manager.drain()

    def reset_cache(self) -> None:
        """Wait until the tiers have the region's blocks, then make the region forget them."""
        self._manager.drain()
        self._manager.reset_cache()

    def shutdown(self) -> None:
        """Shut down the handlers, then the manager: handlers use the region. Blocks not yet drained may be lost."""
        self._store_handler.shutdown()
        self._load_handler.shutdown()
        self._manager.shutdown()

    # -- loads and stores --------------------------------------------------------------------------------------------

    def _lookup(self, request: Request) -> int | None:
        """Return the number of the prompt's leading blocks that exist, or None while a lookup is unanswered."""
        hits, pending = 0, False
        for key in self._keys(request)[: request.blocks_total]:
            found = self._manager.lookup(key, request.context)
            if found is False:
                break
            # Go on after an unanswered lookup: lookups are answered in batches.
            pending |= found is None
            hits += 1
        return None if pending else hits

    def _load(self, request: Request) -> None:
        """Load the prompt's leading blocks that exist. If the load fails, the whole prompt is computed."""
        while (hits := self._lookup(request)) is None:
            self._end_step()
            time.sleep(POLL_S)
        request.blocks_hit = hits
        # The last token is always computed: its logits are the first token of the answer.
        load_blocks = min(hits * self.blocks_per_chunk, (request.num_prompt_tokens - 1) // self.memory.block_size)
        if not load_blocks:
            return
        keys = self._keys(request)[: -(-load_blocks // self.blocks_per_chunk)]
        self._manager.touch(keys)
        source = self._manager.prepare_load(keys, request.context)
        job_id = next(self._job_ids)
        if self._load_handler.transfer_async(job_id, (source, GPULoadStoreSpec(request.block_ids[:load_blocks]))):
            self._load_handler.wait([job_id])
            (result,) = self._load_handler.get_finished()
            self.loaded.add(result)
            if result.success:
                request.num_computed = request.tokens_loaded = load_blocks * self.memory.block_size
                request.load_s = time.perf_counter() - request.submitted_s
        self._manager.complete_load(keys)

    def _store(self, request: Request) -> bool:
        """Start to store computed chunks that are not stored yet, as many as there is room for. False: no chunk."""
        new = self._new_keys(request)[: self._store_chunks_max]
        output = None
        while new and output is None:
            output = self._manager.prepare_store(new, request.context)
            if output is None:
                new = new[: len(new) // 2]  # loads under way occupy part of the region
        if output is None:
            return False
        first = request.chunks_stored
        request.chunks_stored += len(new)
        index_of = {key: first + offset for offset, key in enumerate(new)}
        block_ids = [
            request.block_ids[index_of[key] * self.blocks_per_chunk + offset]
            for key in output.keys_to_store
            for offset in range(self.blocks_per_chunk)
        ]
        if block_ids:
            job_id = next(self._job_ids)
            if self._store_handler.transfer_async(job_id, (GPULoadStoreSpec(block_ids), output.store_spec)):
                self._stores[job_id] = output.keys_to_store
            else:
                self._manager.complete_store(output.keys_to_store, False)
        return True

    def _end_stores(self) -> None:
        """Wait until the KV tensors are no longer read."""
        self._store_handler.wait(self._stores)
        self._end_step()

    def _end_step(self) -> None:
        """Report the stores that have ended, and close the step."""
        for result in self._store_handler.get_finished():
            self.stored.add(result)
            self._manager.complete_store(self._stores.pop(result.job_id), result.success)
        self._manager.on_schedule_end()

    def _new_keys(self, request: Request) -> list[OffloadKey]:
        """Return the keys of the chunks that are computed and not yet stored."""
        return self._keys(request)[request.chunks_stored : request.num_computed // self.chunk_tokens]

    def _keys(self, request: Request) -> list[OffloadKey]:
        """Return the keys of the request's full chunks: a chunk's last block hash covers all blocks before it."""
        size, factor = self.memory.block_size, self.blocks_per_chunk
        known = request.hashes
        known += hash_blocks(request.tokens[len(known) * size :], size, known[-1] if known else b"")
        return [make_offload_key(block_hash, 0) for block_hash in known[factor - 1 :: factor]]

    # -- model -------------------------------------------------------------------------------------------------------

    def _forward(self, request: Request, cache: RequestCache) -> None:
        """Compute the next piece of the prompt, or the last token. Sample a token if the end is reached."""
        start = request.num_computed
        tokens = request.tokens[start : start + request.prefill_chunk_tokens]
        cache.begin(start, len(tokens))
        with torch.inference_mode():
            logits = self.model.module(
                torch.tensor([tokens], device=self.memory.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            request.num_computed += len(tokens)
            if request.num_computed < len(request.tokens):
                return
            token = int(logits[0, -1].argmax())
        if not request.is_answering:
            request.ttft_s = time.perf_counter() - request.submitted_s
        request.tokens.append(token)
        self._progress("answering", len(request.answer), request.max_new_tokens)

    def _is_answered(self, request: Request) -> bool:
        has_stopped = request.is_answering and request.tokens[-1] in self.model.stop_token_ids
        return has_stopped or len(request.answer) == request.max_new_tokens

    def _report_prefill(self, request: Request, layer: int) -> None:
        if not request.is_answering:
            piece = min(request.prefill_chunk_tokens, request.num_prompt_tokens - request.num_computed)
            done = request.num_computed + piece * (layer + 1) // self.memory.layout.num_layers
            self._progress("reading the prompt", done, request.num_prompt_tokens)
