"""A small inference engine that drives the offloading interfaces in the same way as a large engine.

It has one thread, greedy decoding, and one forward per request and step. It does all that an engine must do for
offloading: ask which leading blocks exist, load them, compute the rest, store new blocks, report the end of every
transfer, and close the step (see ``Engine.step``). It knows nothing of the implementation behind ``OffloadingSpec``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from kvtiers.connector.base import (
    GPULoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    TransferSpec,
)
from kvtiers.connector.demo.model import LoadedModel
from kvtiers.connector.demo.paged_cache import PagedKVCache, RequestCache
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey, hash_blocks, make_offload_key
from kvtiers.tiers.errors import ConfigError

POLL_S = 0.0005  # pause between polls of transfers while there is nothing to compute: short, and releases the GIL
PREFILL_CHUNK_TOKENS = 4096
STORE_WAIT_S_MAX = 30.0  # how long an answered request's blocks wait for room in the region

Progress = Callable[[str, int, int], None]


class Status(Enum):
    """Stage of a request."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, its progress and its answer. The engine owns every field.

    Attributes:
        tokens: the prompt, then the answer as it grows.
        num_computed: leading tokens whose KV is in the engine's blocks.
        blocks_hit: offloaded blocks that ``lookup`` found, of ``blocks_total`` in the prompt.
        tokens_loaded: tokens whose KV was loaded and not computed.
        load_s: from submission until the loaded KV was in place; 0 if nothing was loaded.
        ttft_s: time to first token, from submission.
        store_waits_since_s: when the request was answered, or last got room for blocks, whichever is later.
    """

    context: ReqContext
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    load: bool
    store: bool
    prefill_chunk_tokens: int
    submitted_s: float
    blocks_total: int
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cache: RequestCache | None = None
    num_computed: int = 0
    blocks_hit: int = 0
    tokens_loaded: int = 0
    chunks_stored: int = 0
    jobs_running: int = 0
    load_s: float = 0.0
    ttft_s: float = 0.0
    store_waits_since_s: float = 0.0

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


@dataclass(frozen=True, slots=True)
class _Job:
    request: Request
    keys: Sequence[OffloadKey]
    is_load: bool
    num_tokens: int = 0


class Engine:
    """Serves requests on one model.

    The engine has one thread; only the handlers and tiers have threads of their own.

    Args:
        model: the model to run.
        memory: the engine's KV blocks.
        offloading: where to load KV from and store KV to; None: nowhere.
        progress: called as (stage, done, total) for "reading the prompt" and "answering", in tokens.
        store_chunks_max: most chunks offered for storing at once, 1 or more; the region must hold as many. None: all
            chunks of a request.
        clock, sleep: monotonic seconds, and a function that waits.

    Attributes:
        loaded, stored: bytes and seconds of the copies between the region and the KV tensors.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: PagedKVCache,
        offloading: OffloadingSpec | None = None,
        *,
        progress: Progress = lambda *_: None,
        store_chunks_max: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self.memory = memory
        self.blocks_per_chunk = offloading.blocks_per_chunk if offloading else 1
        self.chunk_tokens = memory.block_size * self.blocks_per_chunk
        self.loaded, self.stored = HopTotals(), HopTotals()
        self._progress = progress
        self._store_chunks_max = store_chunks_max
        self._clock = clock
        self._sleep = sleep
        self._manager: OffloadingManager | None = None
        self._load_handler: OffloadingHandler | None = None
        self._store_handler: OffloadingHandler | None = None
        if offloading is not None:
            self._manager = offloading.get_manager()
            for source, destination, handler in offloading.get_handlers(memory.canonical()):
                if issubclass(destination, GPULoadStoreSpec):
                    self._load_handler = handler
                elif issubclass(source, GPULoadStoreSpec):
                    self._store_handler = handler
        self._requests: list[Request] = []
        self._jobs: dict[int, _Job] = {}
        self._job_ids = itertools.count()
        self._request_ids = itertools.count()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        load: bool = True,
        store: bool = True,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> Request:
        """Queue a prompt.

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
            load=load and self._load_handler is not None,
            store=store and self._store_handler is not None,
            prefill_chunk_tokens=prefill_chunk_tokens,
            submitted_s=self._clock(),
            blocks_total=len(prompt) // self.chunk_tokens,
        )
        self._requests.append(request)
        return request

    def run(self, request: Request) -> Request:
        """Step until the request is answered. Its stores may still be running; see ``drain``."""
        while request.status is not Status.FINISHED:
            if not self.step():
                self._sleep(POLL_S)
        return request

    def warm_up(self) -> None:
        """Answer a short dummy prompt, so that the first real prompt does not pay for one-time initialization."""
        tokens = [index % 7 for index in range(2 * self.chunk_tokens)]
        # In two pieces: the second piece is computed after a prefix, as in a warm request.
        self.run(self.submit(tokens, max_new_tokens=2, store=False, prefill_chunk_tokens=self.chunk_tokens))

    def step(self) -> bool:
        """Run one step of the scheduler and the model. False: there was nothing to do but wait."""
        busy = self._poll_transfers()
        for request in self._requests:
            if request.status is Status.WAITING:
                busy |= self._schedule(request)
            if request.store and request.is_answering:
                # Only after the first token, so that a store never delays it.
                busy |= self._store_new_chunks(request)
        if self._manager is not None:
            self._manager.on_schedule_end()
        for request in self._requests:
            if request.status is Status.RUNNING:
                self._forward(request)
                busy = True
        self._retire()
        return busy

    def drain(self) -> None:
        """Step until all requests have ended, then wait until every stored block is in every tier."""
        while self._requests:
            if not self.step():
                self._sleep(POLL_S)
        if self._manager is not None:
            self._manager.drain()

    def reset_cache(self) -> None:
        """Wait until the tiers have the region's blocks, then make the region forget them."""
        if self._manager is not None:
            self._manager.drain()
            self._manager.reset_cache()

    def shutdown(self) -> None:
        """Shut down the handlers, then the manager: handlers use the region. Blocks not yet drained may be lost."""
        for handler in (self._store_handler, self._load_handler):
            if handler is not None:
                handler.shutdown()
        if self._manager is not None:
            self._manager.shutdown()

    # -- scheduling --------------------------------------------------------------------------------------------------

    def _schedule(self, request: Request) -> bool:
        """Move a waiting request to LOADING or RUNNING. False: it must keep waiting."""
        hits = self._lookup(request) if request.load else 0
        if hits is None:
            return False
        if not request.block_ids:
            needed = -(-(request.num_prompt_tokens + request.max_new_tokens) // self.memory.block_size)
            block_ids = self.memory.allocate(needed)
            if block_ids is None:
                return False
            request.block_ids = block_ids
            request.cache = RequestCache(self.memory, block_ids, lambda layer: self._report_prefill(request, layer))
        request.blocks_hit = hits
        request.status = Status.RUNNING
        # The last token is always computed: its logits are the first token of the answer.
        load_blocks = min(hits * self.blocks_per_chunk, (request.num_prompt_tokens - 1) // self.memory.block_size)
        if load_blocks:
            self._start_load(request, load_blocks)
        return True

    def _lookup(self, request: Request) -> int | None:
        """Return the number of the prompt's leading blocks that exist, or None while a lookup is unanswered."""
        assert self._manager is not None
        hits, pending = 0, False
        for key in self._keys(request)[: request.blocks_total]:
            found = self._manager.lookup(key, request.context)
            if found is False:
                break
            # Go on after an unanswered lookup: lookups are answered in batches.
            pending |= found is None
            hits += 1
        return None if pending else hits

    def _start_load(self, request: Request, load_blocks: int) -> None:
        assert self._manager is not None
        assert self._load_handler is not None
        keys = self._keys(request)[: -(-load_blocks // self.blocks_per_chunk)]
        self._manager.touch(keys)
        source = self._manager.prepare_load(keys, request.context)
        target = GPULoadStoreSpec(request.block_ids[:load_blocks])
        job = _Job(request, keys, True, load_blocks * self.memory.block_size)
        if self._submit(self._load_handler, job, (source, target)):
            request.status = Status.LOADING

    def _store_new_chunks(self, request: Request) -> bool:
        """Store the chunks that were completed since the last call, as many as there is room for.

        The first chunks are stored after the first token. The others wait until the request is answered and the tiers
        have the first: tiers accept only a share of the region at once. They drop blocks beyond that share, and blocks
        that leave the region before their turn.
        """
        assert self._manager is not None
        assert self._store_handler is not None
        new = self._keys(request)[request.chunks_stored : request.num_computed // self.chunk_tokens]
        if request.chunks_stored and new:
            if request.status is not Status.FINISHED or request.jobs_running:
                return False
            self._manager.drain()
        new = new[: self._store_chunks_max]
        output = None
        while new and output is None:
            output = self._manager.prepare_store(new, request.context)
            if output is None:
                new = new[: len(new) // 2]  # loads under way occupy part of the region
        if output is None:
            return False
        request.store_waits_since_s = self._clock()
        first = request.chunks_stored
        request.chunks_stored += len(new)
        index_of = {key: first + offset for offset, key in enumerate(new)}
        block_ids = [
            request.block_ids[index_of[key] * self.blocks_per_chunk + offset]
            for key in output.keys_to_store
            for offset in range(self.blocks_per_chunk)
        ]
        if block_ids:
            job = _Job(request, output.keys_to_store, False)
            self._submit(self._store_handler, job, (GPULoadStoreSpec(block_ids), output.store_spec))
        return True

    def _keys(self, request: Request) -> list[OffloadKey]:
        """Return the keys of the request's full chunks: a chunk's last block hash covers all blocks before it."""
        size, factor = self.memory.block_size, self.blocks_per_chunk
        known = request.hashes
        known += hash_blocks(request.tokens[len(known) * size :], size, known[-1] if known else b"")
        return [make_offload_key(block_hash, 0) for block_hash in known[factor - 1 :: factor]]

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _submit(self, handler: OffloadingHandler, job: _Job, spec: TransferSpec) -> bool:
        job_id = next(self._job_ids)
        if not handler.transfer_async(job_id, spec):
            self._complete(job, False)
            return False
        self._jobs[job_id] = job
        job.request.jobs_running += 1
        return True

    def _poll_transfers(self) -> bool:
        finished = False
        for handler, totals in ((self._load_handler, self.loaded), (self._store_handler, self.stored)):
            for result in handler.get_finished() if handler else ():
                job = self._jobs.pop(result.job_id)
                job.request.jobs_running -= 1
                totals.bytes += result.transfer_size
                totals.seconds += result.transfer_time
                self._complete(job, result.success)
                finished = True
        return finished

    def _complete(self, job: _Job, success: bool) -> None:
        assert self._manager is not None
        request = job.request
        if not job.is_load:
            self._manager.complete_store(job.keys, success)
            return
        self._manager.complete_load(job.keys)
        request.status = Status.RUNNING  # if the load failed, the whole prompt is computed
        if success:
            request.num_computed = request.tokens_loaded = job.num_tokens
            request.load_s = self._clock() - request.submitted_s

    # -- model -------------------------------------------------------------------------------------------------------

    def _forward(self, request: Request) -> None:
        """Compute the next piece of the prompt, or the last token. Sample a token if the end is reached."""
        assert request.cache is not None
        start = request.num_computed
        tokens = request.tokens[start : start + request.prefill_chunk_tokens]
        request.cache.begin(start, len(tokens))
        with torch.inference_mode():
            logits = self.model.module(
                torch.tensor([tokens], device=self.memory.device),
                past_key_values=request.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            request.num_computed += len(tokens)
            if request.num_computed < len(request.tokens):
                return
            token = int(logits[0, -1].argmax())
        if not request.is_answering:
            request.ttft_s = self._clock() - request.submitted_s
        request.tokens.append(token)
        self._progress("answering", len(request.answer), request.max_new_tokens)
        if token in self.model.stop_token_ids or len(request.answer) == request.max_new_tokens:
            request.status = Status.FINISHED
            request.store_waits_since_s = self._clock()
            if self._manager is not None:
                self._manager.on_request_finished(request.context)

    def _report_prefill(self, request: Request, layer: int) -> None:
        if not request.is_answering:
            piece = min(request.prefill_chunk_tokens, request.num_prompt_tokens - request.num_computed)
            done = request.num_computed + piece * (layer + 1) // self.memory.layout.num_layers
            self._progress("reading the prompt", done, request.num_prompt_tokens)

    def _retire(self) -> None:
        """Remove requests that are answered and stored, and release their blocks."""
        for request in list(self._requests):
            if request.status is Status.FINISHED and not self._is_storing(request):
                self._requests.remove(request)
                self.memory.release(request.block_ids)

    def _is_storing(self, request: Request) -> bool:
        waits = request.store and request.chunks_stored < request.num_computed // self.chunk_tokens
        return request.jobs_running > 0 or (waits and self._clock() - request.store_waits_since_s < STORE_WAIT_S_MAX)
