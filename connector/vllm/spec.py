"""KVTiersSpec: region, primary tier, tiering and handlers of ours inside vLLM's OffloadingConnector.

KVTiersConnector makes it where its options do not ask for another way. ``deployment_from`` says what is accepted. Works
on CUDA and on vLLM's CPU platform.
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

from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
)
from kvtiers.connector.manager.pacing import DRAIN_SHARE, SHUTDOWN_S, Pacer, drain
from kvtiers.connector.region.shared_region import reap_stale_regions
from kvtiers.connector.spec import TieringOffloadingSpec
from kvtiers.connector.transfer.gpu_handler import create_handlers
from kvtiers.connector.vllm import kv_groups, refusals, translate
from kvtiers.connector.vllm.contract import implements
from kvtiers.connector.vllm.handed import handed_over
from kvtiers.connector.vllm.metrics import StatsExporter, definitions, tiering_definitions
from kvtiers.connector.vllm_config import deployment_from, keeps_storage
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError, RegionError
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

#: vLLM asserts that a transfer is accepted, so the handlers' own limit must not be met; vLLM's blocks bound the jobs.
_JOBS_MAX = 1 << 20

#: Engine steps that may be on their way at once, beyond one a pipeline stage.
_STEPS_IN_FLIGHT = 3


@implements
class KVTiersSpec(VllmSpec):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Wires our region, tiering and handlers for vLLM. Made once in the scheduler's process and once in each worker's.

    Args:
        config: vLLM's OffloadingConfig.

    Raises:
        ConfigError: names what is wrong in the deployment or does not fit the engine.
    """

    def __init__(self, config: Any) -> None:
        self._handed = handed_over()
        translate.warn_of_adapters(self._handed.vllm_config)
        self.deployment = deployment_from(config.extra_config)
        self._keeps_storage = keeps_storage(config.extra_config)
        # vLLM's single-copy region for MLA is not ours: here every worker has a cell.
        config = dataclasses.replace(config, replicated_layout=False)
        kv_groups.check_layout(config, self._handed.kv_cache_config)
        kv_groups.check_attention(config, self._handed.kv_cache_config)
        cache = dataclasses.replace(config.cache, blocks_per_chunk=self._chunk_of(config))
        super().__init__(dataclasses.replace(config, cache=cache))
        if getattr(config, "canonical_layout", False):
            raise ConfigError("is not supported by KVTiersSpec; use KVTiersTier", field="canonical_layout")
        self._cell_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self._manager: KVTiersManager | None = None
        self._worker: KVTiersWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return definitions() | tiering_definitions()

    def get_manager(self) -> KVTiersManager:
        if self._manager is None:
            pp_size = self.config.parallel.pp_size
            spec = self._join(None)
            self._check_workers(spec)
            self._manager = KVTiersManager(
                spec,
                steps_in_flight=pp_size + _STEPS_IN_FLIGHT,
                tier_types=[tier.type for tier in self.deployment.tiers],
                keeps_storage=self._keeps_storage,
                role=translate.role_of(self._handed.vllm_config),
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> KVTiersWorker:
        if self._worker is None:
            kv_groups.check_pages(kv_caches, self.config, self._handed.kv_cache_config)
            region = self._join(self.config.parallel.rank).region
            try:
                self._worker = KVTiersWorker(
                    kv_caches, region, self.blocks_per_chunk, **self.deployment.handler.options()
                )
            except BaseException:
                region.cleanup()
                raise
        return self._worker

    def _chunk_of(self, config: Any) -> int:
        """Blocks of a chunk: what vLLM was told, else what the deployment says; one for windows and states."""
        is_told = bool({"blocks_per_chunk", "block_size"} & set(config.extra_config))
        wanted: int = config.cache.blocks_per_chunk if is_told else self.deployment.blocks_per_chunk
        if wanted == 1:
            return 1
        if kv_groups.has_window(config, self._handed.kv_cache_config):
            if is_told and any(hasattr(group, "sliding_window_size_in_chunks") for group in config.groups):
                raise kv_groups.no_chunks_of_windows(wanted)  # 0.33 has counted the window in such chunks
            why = (
                "layers with a sliding window or chunked attention, of which vLLM stores chunks that are not all there"
            )
        elif kv_groups.has_states(config, self._handed.kv_cache_config):
            why = "layers with recurrent states, of which vLLM stores those at the end of a chunk only"
        else:
            return wanted
        logger.warning("blocks_per_chunk is %d and 1 is taken: this model has %s", wanted, why)
        return 1

    def _check_workers(self, spec: TieringOffloadingSpec) -> None:
        """Refuse workers that have not mapped the scheduler's region. vLLM makes the scheduler when all could have."""
        absent = spec.region.absent_workers()
        if absent and self.deployment.tiers:
            spec.shutdown()
            raise refusals.several_hosts(f"workers {absent} have not mapped the scheduler's region")

    def _join(self, rank: int | None) -> TieringOffloadingSpec:
        for path in reap_stale_regions():
            logger.warning("removed %s: its engine died while it was starting", path)
        try:
            by_token = kv_groups.is_in_token_order(self.config, self._handed)
            return TieringOffloadingSpec(
                translate.engine_spec(self, self._handed.vllm_config, by_token=by_token).config,
                self.deployment.model_copy(update={"blocks_per_chunk": self.blocks_per_chunk}),
                self._cell_bytes,
                rank=rank,
                in_process=False,
            )
        except RegionError as e:
            if self.config.parallel.pp_size > 1:
                e.add_note(
                    "With pipeline parallelism all ranks need the same KV bytes a block: KVTiersSpec takes no split "
                    "that gives one stage more layers than another (VLLM_PP_LAYER_PARTITION)."
                )
            raise


@implements
class KVTiersManager(VllmManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """TieringOffloadingManager of ours, spoken to in vLLM's words. Scheduler thread only.

    When vLLM resets its cache it forgets its transfers, and never tells how those under way ended. So they are
    remembered here, and ended as failed once no worker can be at them any more: when vLLM says so
    (``on_reset_flushed``, 0.33), or when every step that was on its way has been followed by another.

    From 0.32 on vLLM tells no manager which blocks are used. Used is what a request loads, and what it offers to be
    stored though it is there: as each request does with what the GPU's own cache has.

    Args:
        spec: makes the manager; shut down with this one.
        steps_in_flight: engine steps after which a worker has seen a reset.
        tier_types: of its tiers.
        keeps_storage: whether the tiers stay in use after a reset.
        role: what the tiers are used for; the region is used for all.
    """

    def __init__(
        self,
        spec: TieringOffloadingSpec,
        *,
        steps_in_flight: int,
        tier_types: Iterable[str] = (),
        keeps_storage: bool = False,
        role: translate.Role | None = None,
    ) -> None:
        self._spec = spec
        self._role = role or translate.Role()
        self._keeps_storage = keeps_storage
        self._tier_types = list(tier_types)
        places = [(translate.medium(each), translate.locality(each)) for each in self._tier_types]
        try:
            self.tiering = spec.get_manager()
        except BaseException:
            spec.shutdown()
            raise
        self.tiering.barred = partial(translate.barred, places)
        self._blocks: OffloadingManager = self.tiering  # the region alone once storage is off
        self._steps_in_flight = steps_in_flight
        self._pacer = Pacer()
        self._left_open = False  # a lookup had no answer yet since ``is_waiting`` last returned False
        self._open: dict[str, int] = {}  # waiting request -> tokens that the GPU had when it was looked up
        self._from_tiers: dict[OffloadKey, int] = {}  # key -> tier that it was read from, in the latest prepare_load
        self._stats = StatsExporter(self.tiering.metrics, tiering_names=True)
        self._stores: set[OffloadKey] = set()
        self._loads: Counter[OffloadKey] = Counter()
        self._stale_stores: set[OffloadKey] = set()
        self._stale_loads: Counter[OffloadKey] = Counter()
        self._stale_steps = 0

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        answer = (self._blocks if self._role.loads else self.tiering.primary).lookup(key, req_context)
        self._pacer.asked(answer)
        self._left_open |= answer is None
        return translate.lookup_result(answer, is_coming=answer is None and self.tiering.is_coming(key, req_context))

    def note_asked(self, req_id: str, num_computed_tokens: int, *, is_open: bool) -> None:
        """Remember the outcome of the lookups that vLLM just made for a request.

        Args:
            num_computed_tokens: tokens of the request that the GPU already had.
            is_open: vLLM does not know the result yet and will ask again.
        """
        if is_open and self._left_open:
            self._open[req_id] = num_computed_tokens
        else:
            self._open.pop(req_id, None)

    def is_waiting(self, req_id: str, num_computed_tokens: int) -> bool:
        """Whether nothing has changed since vLLM's last lookups for a request, so that they would be left open again.

        O(1). If it returns False, let vLLM look the keys up and then call ``note_asked``.
        """
        if self._open.get(req_id) != num_computed_tokens or not self.tiering.is_waiting(req_id):
            self._left_open = False
            return False
        self._pacer.asked(None)
        return True

    def get_load_source(self, key: OffloadKey, req_context: Any) -> Any:  # noqa: ARG002
        """Where a block of the latest ``prepare_load`` came from. vLLM asks from 0.32 on."""
        tier = self._from_tiers.get(key)
        return translate.hit_source("CPU" if tier is None else self._tier_types[tier])

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> VllmCPULoadStoreSpec:
        spec = self._blocks.prepare_load(keys, req_context)
        assert isinstance(spec, CPULoadStoreSpec)
        find = self.tiering.primary.find
        self._from_tiers = {key: block.tier for key in keys if (block := find(key)) is not None and block.promoted}
        self._blocks.touch(keys)
        self._loads.update(keys)
        return VllmCPULoadStoreSpec(spec.block_ids.tolist())

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        self._loads -= Counter(keys)
        self._blocks.complete_load(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> VllmPrepareStoreOutput | None:
        if self._stale_steps and any(key in self._stale_stores or key in self._stale_loads for key in keys):
            return None  # vLLM offers them again in its next step; what it is told is there it takes for stored
        found = [key for key in keys if self.tiering.primary.find(key) is not None]
        output = self._blocks.prepare_store(keys, req_context)
        self._blocks.touch(found)
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
        (self._blocks if self._role.stores else self.tiering.primary).complete_store(keys, success)

    def touch(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        self._blocks.touch(keys)

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._open.pop(req_context.req_id, None)
        self.tiering.on_request_finished(req_context)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        if self._stale_steps:
            self._stale_steps -= 1
            if not self._stale_steps:
                self._end_stale()
        self.tiering.on_schedule_end()
        # Slots that a tier fills are pending; so are those of stores, and then a pause does no harm either.
        self._pacer.step_ended(loading=self.tiering.primary.slot_counts().pending > 0)

    def has_pending_work(self) -> bool:
        # Not whatever is pinned: a store that hangs would keep an idle engine stepping for as long.
        is_filling = self.tiering.primary.slot_counts().pending > 0
        return bool(is_filling or self._loads or self._stale_steps or self.tiering.has_jobs_to_await())

    def take_events(self) -> Iterable[Any]:
        return translate.events(self.tiering.take_events())

    def reset_cache(self) -> None:
        self.tiering.reset_cache()
        if not self._keeps_storage and self._blocks is self.tiering:
            translate.warn_of_reset()
            self._blocks = self.tiering.primary
        self._stale_stores |= self._stores
        self._stale_loads += self._loads
        self._stores.clear()
        self._loads.clear()
        if self._stale_stores or self._stale_loads:
            self._stale_steps = self._steps_in_flight

    def on_reset_flushed(self) -> None:
        """From vLLM 0.33: no worker is at a forgotten transfer any more."""
        self._end_stale()

    def get_stats(self) -> Any:
        return self._stats.take()

    def shutdown(self) -> None:
        """End in time. Stores under way get most of it; the rest is counted."""

        def is_idle() -> bool:
            self.tiering.on_schedule_end()
            return not self.has_pending_work()

        if not drain(is_idle, SHUTDOWN_S * DRAIN_SHARE):
            counts = self.tiering.primary.slot_counts()
            logger.warning("%d blocks were on their way when the engine ended", counts.pinned + counts.pending)
        self.tiering.shutdown_s = SHUTDOWN_S * (1 - DRAIN_SHARE)
        self._spec.shutdown()

    def _end_stale(self) -> None:
        self._stale_steps = 0
        if self._stale_stores:
            self.tiering.complete_store(tuple(self._stale_stores), success=False)
        if self._stale_loads:
            self.tiering.complete_load(tuple(self._stale_loads.elements()))
        self._stale_stores = set()
        self._stale_loads = Counter()


def canonical_kv_caches(kv_caches: Any) -> CanonicalKVCaches:
    """vLLM's canonical KV caches, as ours."""
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

    A copy that failed is reported as failed, on which vLLM ends the worker: it has no way to take the blocks back, and
    going on would serve bytes that were never copied.

    Args:
        kv_caches: vLLM's canonical KV caches.
        region: has ``create_next_view(page_bytes)`` or, vLLM's own, ``create_next_worker_view(page_bytes)``, and
            ``cleanup()``; belongs to the worker from now on.
        blocks_per_chunk: engine blocks in one slot.
        options: fields of ``connector.transfer.gpu_handler.HandlerOptions``.
    """

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int, **options: Any) -> None:
        canonical = canonical_kv_caches(kv_caches)
        create_view = getattr(region, "create_next_view", None) or region.create_next_worker_view
        views = [create_view(entry.page_size_bytes * blocks_per_chunk) for entry in canonical.tensors]
        self._region = region
        self._store: OffloadingHandler | None
        self._load: OffloadingHandler | None
        self._store, self._load = create_handlers(canonical, views, blocks_per_chunk, jobs_max=_JOBS_MAX, **options)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        spec = (_gpu(src_spec), CPULoadStoreSpec(dst_spec.block_ids))
        return self._store is not None and self._store.transfer_async(job_id, spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        spec = (CPULoadStoreSpec(src_spec.block_ids), _gpu(dst_spec))
        return self._load is not None and self._load.transfer_async(job_id, spec)

    def get_finished(self) -> list[VllmTransferResult]:
        return [
            VllmTransferResult(result.job_id, result.success, result.transfer_size, result.transfer_time)
            for handler in (self._load, self._store)
            if handler is not None
            for result in handler.get_finished()
        ]

    def wait(self, job_ids: Collection[int]) -> None:
        for handler in (self._store, self._load):
            if handler is not None:
                handler.wait(job_ids)

    def shutdown(self) -> None:
        """End the copies, then the region. What is not reported by then is not reported any more."""
        if self._store is not None and self._load is not None:
            self._store.shutdown()
            self._load.shutdown()
        self._store = self._load = None  # a failed copy's traceback holds views of the region
        self._region.cleanup()


def _gpu(spec: Any) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)
