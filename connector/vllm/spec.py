"""KVTiersSpec: runs kvtiers' region, tiers and copy handlers inside vLLM's OffloadingConnector.

KVTiersConnector uses this spec by default. ``deployment_from`` lists the accepted options. Works on CUDA and on vLLM's
CPU platform.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingMetricMetadata, RequestOffloadingContext
from vllm.v1.kv_offload.base import OffloadingManager as VllmManager
from vllm.v1.kv_offload.base import OffloadingSpec as VllmSpec
from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker
from vllm.v1.kv_offload.base import PrepareStoreOutput as VllmPrepareStoreOutput
from vllm.v1.kv_offload.base import TransferResult as VllmTransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec as VllmCPULoadStoreSpec

from ...tiers.blocks.keys import OffloadKey
from ...tiers.errors import ConfigError, RegionError
from ...tiers.plain_logs import get_logger
from ..base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from ..core.pacing import DRAIN_SHARE, SHUTDOWN_S, Pacer, drain
from ..spec import DeploymentSpec
from ..transfer.gpu_handler import create_handlers
from ..vllm_config import deployment_from, keeps_storage
from . import kv_groups, refusals, translate
from .contract import implements
from .handed import handed_over
from .metrics import StatsExporter, definitions
from .open_lookups import OpenLookups

logger = get_logger(__name__)

#: vLLM asserts that a transfer is accepted, so the handlers must never reach their limit. vLLM's blocks bound the jobs.
JOBS_MAX = 1 << 20

#: Engine steps that may be in flight at once, in addition to one per pipeline stage.
_STEPS_IN_FLIGHT = 3


@implements
class KVTiersSpec(VllmSpec):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Creates kvtiers' region, tiers and handlers for vLLM. The scheduler's and each worker's process have one object.

    Args:
        config: vLLM's OffloadingConfig.

    Raises:
        ConfigError: names the option of the deployment that is wrong or does not fit the engine.
    """

    def __init__(self, config: Any) -> None:
        self._handed = handed_over()
        translate.warn_of_adapters(self._handed.vllm_config)
        self.deployment = deployment_from(config.extra_config)
        self._keeps_storage = keeps_storage(config.extra_config)
        # vLLM's region keeps a single copy for MLA. In kvtiers' region every worker has a cell.
        config = dataclasses.replace(config, replicated_layout=False)
        self._layers = kv_groups.stored_layers(config, self._handed.kv_cache_config)
        cache = dataclasses.replace(config.cache, blocks_per_chunk=self._chunk_of(config))
        super().__init__(dataclasses.replace(config, cache=cache))
        if getattr(config, "canonical_layout", False):
            raise ConfigError("is not supported by KVTiersSpec; use KVTiersTier", field="canonical_layout")
        self._cell_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return definitions()

    def get_manager(self) -> KVTiersManager:
        spec = self._join(None)
        try:
            absent = spec.region.absent_workers()  # vLLM creates the scheduler after the workers
            if absent and self.deployment.tiers:
                raise refusals.several_hosts(
                    f"workers {absent} have not mapped the scheduler's region", self.config.extra_config
                )
            return KVTiersManager(
                spec,
                steps_in_flight=self.config.parallel.pp_size + _STEPS_IN_FLIGHT,
                keeps_storage=self._keeps_storage,
                role=translate.role_of(self._handed.vllm_config),
            )
        except BaseException:
            spec.shutdown()
            raise

    def get_worker(self, kv_caches: Any) -> KVTiersWorker:
        kv_groups.check_pages(kv_caches, self.config, self._handed.kv_cache_config)
        region = self._join(self.config.parallel.rank).region
        try:
            return KVTiersWorker(kv_caches, region, self.blocks_per_chunk, **self.deployment.handler.options())
        except BaseException:
            region.cleanup()
            raise

    def _chunk_of(self, config: Any) -> int:
        """Blocks per chunk: vLLM's option if set, else the deployment's; 1 for models with windows or states."""
        is_told = bool({"blocks_per_chunk", "block_size"} & set(config.extra_config))
        wanted: int = config.cache.blocks_per_chunk if is_told else self.deployment.blocks_per_chunk
        if wanted == 1:
            return 1
        if kv_groups.has_window(self._layers):
            if is_told and any(hasattr(group, "sliding_window_size_in_chunks") for group in config.groups):
                raise kv_groups.no_chunks_of_windows(wanted)  # 0.33 has already counted the window in such chunks
            why = "layers with a sliding window or chunked attention, for which vLLM stores incomplete chunks"
        elif kv_groups.has_states(self._layers):
            why = "layers with recurrent states, for which vLLM stores only the state at the end of a chunk"
        else:
            return wanted
        logger.warning("blocks_per_chunk is %d and 1 is used instead: this model has %s", wanted, why)
        return 1

    def _join(self, rank: int | None) -> DeploymentSpec:
        try:
            spec = translate.engine_spec(self.config, self._handed.vllm_config, in_worker=rank is not None)
            return DeploymentSpec(
                spec.config,
                self.deployment.model_copy(update={"blocks_per_chunk": self.blocks_per_chunk}),
                self._cell_bytes,
                rank=rank,
                in_process=False,
                blocks_per_token=kv_groups.blocks_per_token(
                    self.config, self._handed.kv_cache_config, self.blocks_per_chunk
                ),
                step_tokens_max=self._handed.vllm_config.scheduler_config.max_num_batched_tokens,
            )
        except RegionError as e:
            if self.config.parallel.pp_size > 1:
                e.add_note(
                    "With pipeline parallelism all ranks need the same KV bytes per block: every stage must have the "
                    "same number of layers (VLLM_PP_LAYER_PARTITION)."
                )
            raise


@implements
class KVTiersManager(VllmManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Adapts kvtiers' BlockManager to vLLM's OffloadingManager. Scheduler thread only.

    When vLLM resets its cache, it forgets its running transfers and never reports their ends. This class remembers the
    transfers. It ends them as failed when no worker can still be copying: when vLLM calls ``on_reset_flushed`` (from
    0.33 on), or after ``steps_in_flight`` more steps.

    From 0.32 on vLLM does not tell managers which blocks are used. This class counts a block as used if a request
    loads the block, or offers it to be stored although the region has it. Each request offers the blocks that it found
    in the GPU's own cache.

    Args:
        spec: creates kvtiers' manager and has the deployment; shut down together with this object.
        steps_in_flight: engine steps after which every worker has seen a reset.
        keeps_storage: whether the tiers stay in use after a reset.
        role: whether the tiers are used for loads, stores or both. The region is always used for both.
    """

    def __init__(
        self, spec: DeploymentSpec, *, steps_in_flight: int, keeps_storage: bool, role: translate.Role
    ) -> None:
        self._spec = spec
        self._role = role
        self._keeps_storage = keeps_storage
        self._tier_types = [tier.type for tier in spec.deployment.tiers]
        places = [(translate.medium(each), translate.locality(each)) for each in self._tier_types]
        self.core = spec.get_manager()
        self.core.excluded_tiers = partial(translate.excluded_tiers, places)
        self.decisions, self.note_request = self.core.decisions, self.core.note_request
        self.core.loads, self.core.stores = role
        self._is_off = False  # the tiers are not used any more, because of a reset
        self._record = self.core.slots.record
        self._record.expects_loads = role.loads
        self._block_tokens = spec.config.cache.tokens_per_hash * spec.blocks_per_chunk
        self._steps_in_flight = steps_in_flight
        self._pacer = Pacer()
        self.open_lookups = OpenLookups(self._pacer, self.core.continue_wait)
        self._from_tiers: dict[OffloadKey, int] = {}  # keys of the latest prepare_load -> tier they were read from
        self._stats = StatsExporter(self.core.metrics)
        self._stores: set[OffloadKey] = set()
        self._loads: Counter[OffloadKey] = Counter()
        self._stale_stores: set[OffloadKey] = set()
        self._stale_loads: Counter[OffloadKey] = Counter()
        self._stale_steps = 0

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        answer = self.core.lookup(key, req_context)
        self.open_lookups.asked(answer)
        return translate.lookup_result(answer, is_coming=answer is None and self.core.is_coming(key, req_context))

    def note_prompt(self, req_id: str, *, tokens: int, engine_tokens: int, loaded_tokens: int) -> None:
        """Note the outcome of a request's lookups, for ``kvtiers explain``; for the fields see ``RequestRecord``."""
        self._record.prompt(
            req_id,
            tokens=tokens,
            engine_tokens=engine_tokens,
            loaded_tokens=loaded_tokens,
            block_tokens=self._block_tokens,
        )
        if tokens - engine_tokens - loaded_tokens <= self._block_tokens:
            return
        if not self._role.loads:
            self._record.ignores_tiers(req_id, "lookup:role")
        elif self._is_off:
            self._record.ignores_tiers(req_id, "lookup:storage_off")

    def get_load_source(self, key: OffloadKey, req_context: Any) -> Any:  # noqa: ARG002
        """Return where a block of the latest ``prepare_load`` came from. vLLM calls this from 0.32 on."""
        tier = self._from_tiers.get(key)
        return translate.hit_source("CPU" if tier is None else self._tier_types[tier])

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> VllmCPULoadStoreSpec:
        spec = self.core.prepare_load(keys, req_context)
        assert isinstance(spec, CPULoadStoreSpec)
        find = self.core.slots.find
        self._from_tiers = {key: block.tier for key in keys if (block := find(key)) is not None and block.promoted}
        self.core.touch(keys)
        self._loads.update(keys)
        return VllmCPULoadStoreSpec(spec.block_ids.tolist())

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        self._loads -= Counter(keys)
        self.core.complete_load(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> VllmPrepareStoreOutput | None:
        if self._stale_steps and any(key in self._stale_stores or key in self._stale_loads for key in keys):
            return None  # vLLM offers them again in its next step; a key reported as present would count as stored
        found = [key for key in keys if self.core.slots.find(key) is not None]
        output = self.core.prepare_store(keys, req_context)
        self.core.touch(found)
        if output is None:
            return None
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        self._stores.update(output.keys_to_store)
        return VllmPrepareStoreOutput(
            keys_to_store=list(output.keys_to_store),
            store_spec=VllmCPULoadStoreSpec(output.store_spec.block_ids.tolist()),
            evicted_keys=list(output.evicted_keys),
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: Any, success: bool = True) -> None:  # noqa: ARG002
        self._stores.difference_update(keys)
        if success and not self._role.stores:
            self._record.blocks("store:role", keys)
        self.core.complete_store(keys, success)

    def touch(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        self.core.touch(keys)

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self.open_lookups.forget(req_context.req_id)
        self.core.on_request_finished(req_context)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        if self._stale_steps:
            self._stale_steps -= 1
            if not self._stale_steps:
                self._end_stale()
        self.core.on_schedule_end()
        # A slot is pending while a tier fills it. Slots of running stores are pending, too; a pause is harmless then.
        self._pacer.step_ended(loading=self.core.slots.counts().pending > 0)

    def has_pending_work(self) -> bool:
        # Pinned slots do not count: a hanging store would keep an idle engine stepping.
        is_filling = self.core.slots.counts().pending > 0
        return bool(is_filling or self._loads or self._stale_steps or self.core.has_jobs_to_await())

    def take_events(self) -> Iterable[Any]:
        return translate.events(self.core.take_events())

    def reset_cache(self) -> None:
        self.core.reset_cache()
        if not self._keeps_storage and not self._is_off:
            translate.warn_of_reset()
            self._is_off = True
            self.core.loads = self.core.stores = False
        self._stale_stores |= self._stores
        self._stale_loads += self._loads
        self._stores.clear()
        self._loads.clear()
        if self._stale_stores or self._stale_loads:
            self._stale_steps = self._steps_in_flight

    def on_reset_flushed(self) -> None:
        """End the forgotten transfers, because no worker copies any more. vLLM calls this from 0.33 on."""
        self._end_stale()

    def get_stats(self) -> Any:
        return self._stats.take()

    def shutdown(self) -> None:
        """Shut down within ``SHUTDOWN_S``. Running stores get most of that time; unfinished blocks are logged."""

        def is_idle() -> bool:
            self.core.on_schedule_end()
            return not self.has_pending_work()

        if not drain(is_idle, SHUTDOWN_S * DRAIN_SHARE):
            counts = self.core.slots.counts()
            logger.warning("%d blocks were still being copied when the engine ended", counts.pinned + counts.pending)
        self.core.shutdown_s = SHUTDOWN_S * (1 - DRAIN_SHARE)
        self._spec.shutdown()

    def _end_stale(self) -> None:
        self._stale_steps = 0
        if self._stale_stores:
            self.core.complete_store(tuple(self._stale_stores), success=False)
        if self._stale_loads:
            self.core.complete_load(tuple(self._stale_loads.elements()))
        self._stale_stores = set()
        self._stale_loads = Counter()


def canonical_kv_caches(kv_caches: Any) -> CanonicalKVCaches:
    """Convert vLLM's canonical KV caches to kvtiers' type."""
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(entry.tensor, entry.page_size_bytes) for entry in kv_caches.tensors],
        group_data_refs=[
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


@implements
class KVTiersWorker(VllmWorker):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Copies between a worker's KV tensors and its cells of a region. The worker's thread only.

    A failed copy is reported as failed, and vLLM then ends the worker. vLLM cannot take the blocks back, and continuing
    would serve bytes that were never copied.

    Args:
        kv_caches: vLLM's canonical KV caches.
        region: has ``cleanup()`` and ``create_next_view(page_bytes)``. The worker owns it from now on.
        blocks_per_chunk: engine blocks in one slot.
        options: fields of ``connector.transfer.gpu_handler.HandlerOptions``.
    """

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int, **options: Any) -> None:
        canonical = canonical_kv_caches(kv_caches)
        views = [region.create_next_view(entry.page_size_bytes * blocks_per_chunk) for entry in canonical.tensors]
        self._region = region
        self._store: OffloadingHandler | None
        self._load: OffloadingHandler | None
        self._store, self._load = create_handlers(canonical, views, blocks_per_chunk, jobs_max=JOBS_MAX, **options)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        spec = (gpu_blocks(src_spec), CPULoadStoreSpec(dst_spec.block_ids))
        return self._store is not None and self._store.transfer_async(job_id, spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        spec = (CPULoadStoreSpec(src_spec.block_ids), gpu_blocks(dst_spec))
        return self._load is not None and self._load.transfer_async(job_id, spec)

    def get_finished(self) -> list[VllmTransferResult]:
        return [
            VllmTransferResult(
                job_id=result.job_id,
                success=result.success,
                transfer_size=result.transfer_size,
                transfer_time=result.transfer_time,
            )
            for handler in (self._load, self._store)
            if handler is not None
            for result in handler.get_finished()
        ]

    def wait(self, job_ids: Collection[int]) -> None:
        for handler in (self._store, self._load):
            if handler is not None:
                handler.wait(job_ids)

    def shutdown(self) -> None:
        """Stop the copies, then release the region. Copies not reported before this call are never reported."""
        if self._store is not None and self._load is not None:
            self._store.shutdown()
            self._load.shutdown()
        self._store = self._load = None  # the traceback of a failed copy holds views of the region
        self._region.cleanup()


def gpu_blocks(spec: Any) -> GPULoadStoreSpec:
    """Convert the KV blocks of a transfer to kvtiers' type."""
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)
