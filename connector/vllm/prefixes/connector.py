"""SharedStorageConnector: copies KV of prompt prefixes directly between vLLM's paged buffers and shared storage.

::

    {"kv_connector": "SharedStorageConnector", "kv_connector_module_path": "kvtiers.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"shared_storage_path": "s3://bucket/folder"}}

This connector is simple and has no CPU region; ``connector.vllm.tier`` and ``connector.vllm.spec`` are faster.
``connector.prefixes.store`` describes the stored format and how chunks are verified.

- Loads are asynchronous. The request waits outside the batch while a thread reads, verifies and injects the KV.
- Saves are copied to host memory after the forward pass. A thread publishes the copies.
- Failed loads: if a chunk is damaged or missing, or storage does not answer within ``load_deadline_s``, the connector
  reports its blocks to vLLM as failed. vLLM recomputes them under ``kv_load_failure_policy: recompute``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import Locality

from ....tiers.blocks.file_mapper import FileMapper, strict_fields
from ....tiers.capacity.link import CollectorLink
from ....tiers.daemon_pool import DaemonPool
from ....tiers.errors import ConfigError, StoreError
from ....tiers.plain_logs import get_logger
from ....vllm import register
from ...prefixes.format import FORMAT
from ...prefixes.limits import PrefixLimits
from ...prefixes.place import seconds_of, shared_place
from ...prefixes.requests import Request, Transfer, transfer_of
from ...prefixes.store import PrefixStore, blocks_in_all
from ...prefixes.uses import PrefixUses
from ...prefixes.worker import PrefixWorker
from ...vllm_config import ignored_options, keeps_storage
from .. import kv_groups, refusals, translate, weights
from ..contract import implements
from ..logs import log_as_vllm
from .metrics import PrefixPromMetrics, PrefixReporter, PrefixStats
from .steps import PrefixSaves, SharedStorageMetadata, limits_of, salts_of

logger = get_logger(__name__)

LOOKUP_DEADLINE_S = 1.0
LOAD_DEADLINE_S = 20.0
FAILED_LOADS_MAX = 3  # per request: if a bad chunk cannot be removed, the request must not load it again forever
SHUTDOWN_S = 4.0
THREADS_END_S = 0.5  # part of SHUTDOWN_S, for threads that are in a lookup or in a load or store that is too late
# With remote storage these threads mostly wait. A load holds some layers in memory and competes for the GIL.
LOOKUP_THREADS = 16
LOAD_THREADS = 8


@implements
class SharedStorageConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """Loads and stores prompt prefixes. One object in the scheduler's process, one in each worker's.

    ``kv_connector_extra_config`` accepts the storage location (see ``connector.prefixes.place.shared_place``),
    ``lookup_deadline_s``, ``load_deadline_s`` and ``storage_after_reset``.

    Threads: vLLM calls the connector from one thread in each process. A job on the pool gets a Transfer and returns a
    result.

    Raises:
        ConfigError: one of these:

            - the path is missing or cannot be used, or a limit is not accepted;
            - the model has several KV cache groups, or a group that is not of full attention;
            - a block's tokens are spread over several ranks;
            - another connector of the engine may load within a step.
        StorePermissionError, StoreConfigError: a bucket is not usable, see ``BuiltInTier``.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        log_as_vllm()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        self._place = shared_place(extra)
        self._locality = translate.locality(self._place.type) or Locality.REMOTE
        self._keeps_storage, self._is_off = keeps_storage(extra), False
        self._role = translate.role_of(vllm_config)
        stores_any = self._role.stores and not self._place.read_only
        self._limits = PrefixLimits.of(self._place) if stores_any else None
        kv_cache_spec = kv_groups.prefix_spec(kv_cache_config)
        if getattr(transfer, "kv_load_failure_policy", "recompute") == "fail":
            logger.warning(
                "kv_load_failure_policy is 'fail': a request that loads a damaged chunk will fail; write 'recompute'"
            )
        self._block_size = int(kv_cache_spec.block_size)
        self._lookup_deadline_s = seconds_of(extra, "lookup_deadline_s", LOOKUP_DEADLINE_S)
        self._load_deadline_s = seconds_of(extra, "load_deadline_s", LOAD_DEADLINE_S)
        self._spec = translate.engine_spec(
            build_offloading_config(vllm_config, kv_cache_config),
            vllm_config,
            by_token=True,
            in_worker=role != KVConnectorRole.SCHEDULER,
        )
        self._revision = self._spec.config.model.revision
        parallel = self._spec.config.parallel
        if parallel.dcp_size > 1 or parallel.pcp_size > 1:
            raise ConfigError(
                "SharedStorageConnector accepts only 1: with more, a block's tokens are spread over ranks; use "
                "KVTiersConnector",
                field="decode_context_parallel_size" if parallel.dcp_size > 1 else "prefill_context_parallel_size",
            )
        self._ranks = range(parallel.world_size) if role == KVConnectorRole.SCHEDULER else (parallel.rank,)
        self._collector: CollectorLink | None = None
        self._stores = self._open(self._spec)
        threads = LOOKUP_THREADS if role == KVConnectorRole.SCHEDULER else LOAD_THREADS
        self._pool = DaemonPool(threads, "kvtiers-prefix")
        if role == KVConnectorRole.SCHEDULER:
            self._check_storage()
        else:
            self._pool.submit(self._stores[0].prepare)
        # scheduler
        self._requests: dict[str, Request] = {}
        self._loading: dict[str, frozenset[int]] = {}  # request, even if aborted -> blocks that workers are filling
        self._loads: list[Transfer] = []  # not yet handed to the workers
        self._drops_loads = False
        self._saves = PrefixSaves(self._block_size, stores_any=stores_any)
        self._adapters = weights.Adapters()
        self._uses = PrefixUses(self._stores)
        num_blocks = int(kv_cache_config.num_blocks)
        self._worker = PrefixWorker(self._pool, num_blocks, self._block_size, self._load_deadline_s)
        self._reporter = PrefixReporter()
        self._lookups_given_up = 0
        self._removed = dict.fromkeys(("chunks_removed", "bytes_removed"), 0)
        # If only the disk is a limit, a worker starts the collector's process when the disk is full.
        if self._limits is not None and (role == KVConnectorRole.WORKER) is self._limits.policy.waits:
            self._collector = self._limits.start_collector(self._mapper(self._spec))

    def _open(self, spec: translate.EngineSpec) -> list[PrefixStore]:
        mapper = self._mapper(spec)
        stores = [
            PrefixStore(self._place, mapper.base_path, mapper.fingerprint, rank=rank, limits=self._limits)
            for rank in self._ranks
        ]
        for store in stores:
            store.on_full = self._note_full
        return stores

    def _note_full(self) -> None:
        if self._collector is not None:
            self._collector.note_full()

    def _check_storage(self) -> None:
        try:
            self._stores[0].check()
        except StoreError as e:
            if not e.retryable:
                raise
            logger.warning("SharedStorageConnector starts without its storage: %s", e)

    def _mapper(self, spec: translate.EngineSpec) -> FileMapper:
        fields = strict_fields(spec) | {"format": FORMAT}
        fields.pop("engine", None)  # may differ in a worker; the revision has the scheduler's digest
        if spec.config.parallel.pp_size > 1:
            # A process knows only its own stage's layers. Files are named by layer, so a missing file is noticed.
            groups = tuple(replace(group, layer_names=()) for group in spec.config.groups)
            spec = replace(spec, config=replace(spec.config, groups=groups))
        return FileMapper.from_offloading_spec("", spec, extra_fields=fields)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Any) -> bool:
        """Return False, because nothing is done layer by layer.

        With full CUDA graphs, vLLM asks this before it loads the model. So wrong options stop it within seconds.

        Raises:
            ConfigError: an option is missing or not accepted. vLLM's config wraps it in pydantic's ValidationError,
                which shows its text.
        """
        log_as_vllm()
        shared_place(extra_config)
        ignored_options(extra_config)
        keeps_storage(extra_config)
        seconds_of(extra_config, "lookup_deadline_s", LOOKUP_DEADLINE_S)
        seconds_of(extra_config, "load_deadline_s", LOAD_DEADLINE_S)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefixStats:
        """Create a PrefixStats from counts sent by another process."""
        return PrefixStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PrefixPromMetrics:
        """Create the metrics, in the process that exports them."""
        return PrefixPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> PrefixStats | None:
        """Return the counts that changed since the last step."""
        for told in self._collector.take_reports() if self._collector is not None else ():
            for count, by_reason in (("chunks_removed", "removed_blobs"), ("bytes_removed", "removed_bytes")):
                self._removed[count] += sum(told.get("report", {}).get(by_reason, {}).values())
        own = {
            "dropped_blocks": self._worker.dropped_blocks,
            "loads_failed": self._worker.loads_failed,
            "lookups_given_up": self._lookups_given_up,
            **self._removed,
        }
        return self._reporter.take((store.counts for store in self._stores), own)

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that storage has after the computed ones: whole blocks, but not the last token. None: ask again."""
        state = self._remember(request)
        if state is None or state.failed_loads >= FAILED_LOADS_MAX:
            return 0, False
        state.num_computed = num_computed_tokens
        limit_blocks = (len(request.prompt_token_ids) - 1) // self._block_size
        if limit_blocks * self._block_size <= num_computed_tokens:
            self._uses.note(state.hashes[:limit_blocks])  # a hit in the GPU's cache also counts as a use in storage
            return 0, False
        if state.matched is None:
            if self._pool.hangs(self._lookup_deadline_s):  # a lookup would not be answered in time
                return self._give_up(state)
            state.matched = self._pool.submit(self._match, state, limit_blocks)
            state.asked_at = time.monotonic()
            return None, False
        if not state.matched.done():
            if time.monotonic() - state.asked_at < self._lookup_deadline_s:
                return None, False
            if state.lora is None:  # with an adapter, the lookup also computes the hashes for storing the prompt
                state.matched.cancel()  # so that queued lookups of other requests start earlier
            return self._give_up(state)
        if state.found is None:
            failed = state.matched.cancelled() or state.matched.exception() is not None
            state.found = 0 if failed else state.matched.result()
            # Blocks that the request stored before a preemption may not be published yet.
            state.stored_blocks = max(state.stored_blocks, state.found)
            self._saves.stored.add(state.hashes[: state.found])
            self._saves.stored.discard(state.hashes[state.stored_blocks : limit_blocks])
            self._uses.note(state.hashes[: state.found])
        # From 0.31 on vLLM checks skip_reading_prefix_cache itself. An engine that only stores also makes the lookup,
        # so that it does not copy stored blocks again.
        if getattr(request, "skip_reading_prefix_cache", False) or not self._role.loads:
            return 0, False
        end = min(state.found, (num_computed_tokens + state.limits.load_tokens_max) // self._block_size)
        tokens = end * self._block_size - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Queue the load of a request that needs one. vLLM calls this for every request that it schedules."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        # If the request comes back after a preemption, look it up again.
        state.matched, state.found, state.is_given_up = None, None, False
        if num_external_tokens <= 0:
            return
        first = state.num_computed // self._block_size
        last = (state.num_computed + num_external_tokens) // self._block_size
        block_ids = list(blocks.get_block_ids()[0])
        size = self._block_size
        self._loads.append(transfer_of(request.request_id, state, block_ids, first, last, size, is_store=False))
        self._loading[request.request_id] = frozenset(block_ids[first:last])
        state.load_first = first
        state.load_began_at = time.monotonic()
        state.has_failed = False

    def update_connector_output(self, connector_output: Any) -> None:
        """Store failed blocks again once they are recomputed. After a load timeout, do not load the request again."""
        hung_since = time.monotonic() - self._load_deadline_s
        failed = set(connector_output.invalid_block_ids or ())
        for req_id, blocks in self._loading.items() if failed else ():
            if not blocks.isdisjoint(failed) and (state := self._requests.get(req_id)) is not None:
                state.stored_blocks = state.load_first
                state.has_failed = True
                if state.load_began_at <= hung_since:
                    state.failed_loads = FAILED_LOADS_MAX
                self._saves.stored.discard(state.hashes[state.load_first :])
        for req_id in connector_output.finished_recving or ():
            self._loading.pop(req_id, None)
            if (loaded := self._requests.get(req_id)) is not None:
                loaded.failed_loads += loaded.has_failed  # once per load: ranks may report it in several steps

    def build_connector_meta(self, scheduler_output: Any) -> SharedStorageMetadata:
        """Collect this step's loads and stores. Does not change ``scheduler_output``.

        Raises:
            ConfigError: another connector loads within this step.
        """
        refusals.check_step(scheduler_output)
        saves = self._saves.of_step(scheduler_output, self._requests)
        if self._collector is not None:
            if saves:
                self._collector.note_put(0)  # the workers publish how much they put
            self._collector.poll()
        transfers = self._loads + saves
        idle = not scheduler_output.num_scheduled_tokens
        meta = SharedStorageMetadata(transfers, idle, self._revision, self._drops_loads)
        self._loads, self._drops_loads = [], False
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Forget a request. Its blocks are free: each step copied the blocks that it stores."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.matched is not None:
            state.matched.cancel()
        return False, None

    def reset_cache(self) -> bool | None:
        """Stop using storage, unless it stays in use after a reset: forget all requests and drop running loads.

        Workers learn of the reset with the next step. A load that ends before is still used, like the KV of running
        requests. This is safe: vLLM resets during running steps only if forced to, and then reports that the reset
        failed, because the load's blocks are in use. Otherwise (pause, sleep) vLLM waits until no step is running.
        """
        if not self._keeps_storage and not self._is_off:
            translate.warn_of_reset()
            self._is_off = True
        if self._is_off:
            for state in self._requests.values():
                if state.matched is not None:
                    state.matched.cancel()
            self._requests.clear()
            self._drops_loads = True
        return True

    def _give_up(self, state: Request) -> tuple[int, bool]:
        self._lookups_given_up += not state.is_given_up
        state.is_given_up = True  # counted once: vLLM asks again while it has no room for the request
        return 0, False

    def _remember(self, request: Any) -> Request | None:
        state = self._requests.get(request.request_id)
        if state is None and not self._is_off:
            tokens = request.prompt_token_ids
            if not tokens or getattr(request, "prompt_embeds", None) is not None:
                return None
            salts = salts_of(request, self._block_size)
            adapter, limits = getattr(request, "lora_request", None), limits_of(request, self._locality)
            state = Request([], list(tokens), salts, adapter, limits)
            if state.lora is None:
                state.hash_blocks(self._block_size)
            self._requests[request.request_id] = state
        return state

    def _match(self, state: Request, limit_blocks: int) -> int:
        """Return the number of leading blocks that every rank has stored."""
        if state.lora is not None and not state.hashes:
            adapter = self._adapters.revision(state.lora)
            if adapter is None:
                logger.debug("the content of the adapter in %s is not known", state.lora.lora_path)
                return 0
            state.hash_blocks(self._block_size, adapter)
        return blocks_in_all(self._stores, state.hashes[:limit_blocks])

    # -- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the paged buffers, by layer. vLLM calls this after it has created all connectors of the process."""
        refusals.check_siblings()
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start this step's loads."""
        for transfer in self._transfers():
            if not transfer.is_store:
                self._worker.load(self._stores[0], transfer)
        if self._get_connector_metadata().drops_loads:
            self._worker.drop_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests join the batch only after all their layers are loaded."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Return the requests whose loads ended, successfully or not."""
        if self._collector is not None:
            self._collector.poll()
        return None, self._worker.ended(idle=self._get_connector_metadata().idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed to load."""
        return self._worker.failed_blocks()

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this for each microbatch, and not at all for layers in a captured graph."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step computed and stores, and hand them to the publishing thread."""
        stores = [transfer for transfer in self._transfers() if transfer.is_store]
        self._worker.publish(self._stores[0], stores)

    def shutdown(self) -> None:
        """Publish waiting saves for a bounded time, and count the blocks that were not published."""
        self._worker.shutdown(SHUTDOWN_S - THREADS_END_S, THREADS_END_S / 2)
        self._pool.shutdown(THREADS_END_S / 2)
        self._uses.shutdown()
        if self._collector is not None:
            self._collector.close()
        for store in self._stores:
            store.close()

    def _transfers(self) -> list[Transfer]:
        meta = self._get_connector_metadata()
        assert isinstance(meta, SharedStorageMetadata)
        if meta.revision != self._revision:
            self._agree(meta.revision)
        return meta.requests

    def _agree(self, revision: str | None) -> None:
        """Use the scheduler's digest of the config: loading a model changes the worker's config."""
        if weights.without_config(revision) == weights.without_config(self._revision):
            model = replace(self._spec.config.model, revision=revision)
            self._stores = self._open(replace(self._spec, config=replace(self._spec.config, model=model)))
        else:
            logger.warning(
                "this worker's weights or settings (%s) are not those that the scheduler sees (%s), so lookups find "
                "nothing; give all hosts the same files",
                self._revision,
                revision,
            )
        self._revision = revision  # so that this is logged once


register()  # when it reads stats, MultiConnector looks classes up by name only
