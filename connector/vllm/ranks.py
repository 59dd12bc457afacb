"""RankTiersSpec: gives each rank of an engine a tier of its own, inside vLLM's OffloadingConnector.

SharedStorageConnector uses this spec. vLLM's scheduler decides which blocks to load and to store, as for KVTiersSpec.
But there is no region that all processes see. So the ranks of an engine may be on several hosts:

- The scheduler has a tier, too, on the storage of rank 0. It asks this tier only which blocks are there, and sends keys
  to the ranks.
- Each rank moves its own part of a block (``connector.ranks.transfers``), and reports what it stored and what it lost.

The workers' configs differ from the scheduler's: they have ranks, and loading a model changes them. So the digest of
the engine's options is not part of the ranks' namespace. It is in every key, and only the scheduler makes keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, OffloadingMetricMetadata, RequestOffloadingContext
from vllm.v1.kv_offload.base import OffloadingManager as VllmManager
from vllm.v1.kv_offload.base import OffloadingSpec as VllmSpec
from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker
from vllm.v1.kv_offload.base import PrepareStoreOutput as VllmPrepareStoreOutput
from vllm.v1.kv_offload.base import TransferResult as VllmTransferResult

from ...tiers.base import ReqContext, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from ...tiers.config.tier_options import BoundedTierConfig
from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from ...tiers.registry import SecondaryTierFactory
from ..base import CanonicalKVCaches
from ..core.guard import GuardedTier, shut_down_tiers
from ..core.pacing import SHUTDOWN_S, Pacer
from ..ranks.blocks import KEYS_MAX, RankBlocks
from ..ranks.place import LOAD_DEADLINE_S, rank_tier, seconds_of, staging_bytes
from ..ranks.transfers import RankTransfers, check_slots
from ..region.region_header import row_stride
from ..region.shared_region import SharedOffloadRegion
from ..transfer.gpu_handler import create_handlers
from ..vllm_config import keeps_storage
from . import kv_groups, refusals, translate, weights
from .contract import implements
from .handed import handed_over
from .metrics import StatsExporter, definitions
from .open_lookups import OpenLookups
from .spec import JOBS_MAX, canonical_kv_caches, gpu_blocks

logger = get_logger(__name__)

_K = TypeVar("_K")

FAILED_LOADS_MAX = 3  # of a request, which is then computed: a failed load need not mean that storage lost a block


@dataclass
class RankKeys(LoadStoreSpec):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """What the scheduler sends to the ranks for a transfer.

    Attributes:
        keys: the blocks' keys in the ranks' tiers, in the order of the transfer.
        req_id: the request.
        resets: see ``RankStep``.
    """

    keys: list[OffloadKey]
    req_id: str
    resets: int


@implements
@dataclass
class RankStep(OffloadingConnectorMetadata):  # type: ignore[misc]  # as above
    """What the scheduler sends to the ranks in each step.

    vLLM's workers queue stores for a step, and do not empty the queue when the engine resets its cache. By the next
    step the KV blocks may be overwritten. So a rank ends the stores of earlier resets as lost.

    Attributes:
        resets: how often the engine has reset its cache.
        uses: stored blocks that requests had already, in the GPU's cache. A tier's limits spare what is used.
    """

    resets: int = 0
    uses: list[OffloadKey] = field(default_factory=list)


@implements
@dataclass
class RankReport(OffloadingWorkerMetadata):  # type: ignore[misc]  # as above
    """What ranks tell the scheduler, with what vLLM's connector tells it.

    Attributes:
        stored: key -> ranks that stored it, as bits.
        lost: see ``RankBlocks.note``.
        failed: requests of which a rank did not load all blocks.
        revisions: revision of a model -> ranks that have it, as bits; once, in a rank's first report.
    """

    stored: dict[OffloadKey, int] = field(default_factory=dict)
    lost: set[OffloadKey] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    revisions: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Any:
        """Add the report of another rank."""
        theirs = vars(other)  # to vLLM, it is a report of any connector
        return report_of(
            super().aggregate(other),
            stored=_merged(self.stored, theirs["stored"]),
            lost=self.lost | theirs["lost"],
            failed=self.failed | theirs["failed"],
            revisions=_merged(self.revisions, theirs["revisions"]),
        )


def _merged(ranks: Mapping[_K, int], others: Mapping[_K, int]) -> dict[_K, int]:
    return {**ranks, **{key: ranks.get(key, 0) | bits for key, bits in others.items()}}


def report_of(meta: Any, **news: Any) -> RankReport | None:
    """Add the fields of a ``RankReport`` to vLLM's own report. None: neither says anything."""
    if meta is None and not any(news.values()):
        return None
    theirs = _fields(meta) if meta is not None else {}
    return RankReport(**theirs | news)


def _fields(meta: Any) -> dict[str, Any]:
    return {each.name: getattr(meta, each.name) for each in dataclasses.fields(meta)}


@implements
class RankTiersSpec(VllmSpec):  # type: ignore[misc]  # as above
    """Creates the scheduler's and the workers' sides. One object in the scheduler's and in each worker's process.

    Args:
        config: vLLM's OffloadingConfig.

    Raises:
        ConfigError: names the option that is wrong or does not fit the engine.
    """

    def __init__(self, config: Any) -> None:
        self._handed = handed_over()
        vllm_config, kv_cache_config = self._handed.vllm_config, self._handed.kv_cache_config
        config = dataclasses.replace(config, replicated_layout=False)  # every rank stores
        super().__init__(config)
        self._tier = rank_tier(_own(config.extra_config))
        self._layers = kv_groups.stored_layers(config, kv_cache_config)
        refusals.check_one_scheduler(vllm_config)
        if getattr(config, "canonical_layout", False):
            raise ConfigError("is not supported here; use KVTiersTier", field="canonical_layout")
        for name in ("dcp_size", "pcp_size"):
            if getattr(config.parallel, name) > 1:
                raise ConfigError(
                    "SharedStorageConnector accepts only 1: with more, a block's tokens are spread over ranks; use "
                    "KVTiersConnector",
                    field="decode_context_parallel_size" if name == "dcp_size" else "prefill_context_parallel_size",
                )
        # vLLM may not offload all of them, but takes failed blocks only if there is no other.
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        if self._num_groups > 1 and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
            raise ConfigError(
                f"the model has {self._num_groups} KV cache groups, for which this vLLM takes no failed loads; "
                "use KVTiersConnector, or a later release",
                field="kv_connector",
            )
        if self.blocks_per_chunk > 1 and (kv_groups.has_window(self._layers) or kv_groups.has_states(self._layers)):
            raise ConfigError(
                f"is {self.blocks_per_chunk}, and this model has layers with windows or recurrent states, of which "
                "vLLM keeps no whole chunks; set blocks_per_chunk: 1 for this model",
                field="blocks_per_chunk",
            )
        self._slot_bytes = row_stride(config.worker_kv_bytes_per_block * self.blocks_per_chunk, 1)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return definitions()

    def get_manager(self) -> RankManager:
        engine = self._engine(in_worker=False)
        apart = self._apart(engine)
        # Read-only, because this tier only looks up. The ranks' tiers write, remove, and enforce the limits.
        region, tier = self._open({**dict(self._tier), "read_only": True}, 1, apart)
        return RankManager(tier, region, engine, apart, self._tier, self._handed.vllm_config, self.extra_config)

    def get_worker(self, kv_caches: Any) -> RankWorker:
        kv_groups.check_pages(kv_caches, self.config, self._handed.kv_cache_config)
        apart = self._apart(self._engine(in_worker=True))
        name = f"{self._tier.name or self._tier.type}_r{apart.config.parallel.rank}"
        slots = check_slots(staging_bytes(self.extra_config), self._slot_bytes)
        region, tier = self._open({**dict(self._tier), "name": name}, slots, apart)
        try:
            return RankWorker(
                tier,
                region,
                apart,
                canonical_kv_caches(kv_caches),
                blocks_per_chunk=self.blocks_per_chunk,
                load_deadline_s=seconds_of(self.extra_config, "load_deadline_s", LOAD_DEADLINE_S),
                fails_requests=self._num_groups > 1,
            )
        except BaseException:
            shut_down_tiers([GuardedTier(tier, apart.metrics)], SHUTDOWN_S)
            region.cleanup()
            raise

    def _open(
        self, options: dict[str, Any], slots: int, apart: translate.EngineSpec
    ) -> tuple[SharedOffloadRegion, SecondaryTierManager]:
        region = SharedOffloadRegion.anonymous(slots, self._slot_bytes)
        try:
            return region, SecondaryTierFactory.create_secondary_tier(options, region.create_kv_memoryview(), apart)
        except BaseException:
            region.cleanup()
            raise

    def _engine(self, *, in_worker: bool) -> translate.EngineSpec:
        vllm_config = self._handed.vllm_config
        by_token = kv_groups.is_in_token_order(self._layers, self.config, vllm_config)
        return translate.engine_spec(self.config, vllm_config, by_token=by_token, in_worker=in_worker)

    def _apart(self, engine: translate.EngineSpec) -> translate.EngineSpec:
        """Return the identity of the ranks' namespace, which the scheduler and the workers see alike."""
        config = engine.config
        model = dataclasses.replace(config.model, revision=weights.without_config(config.model.revision) or None)
        groups = config.groups
        if config.parallel.pp_size > 1:  # a process knows only its own stage's layers
            groups = tuple(dataclasses.replace(group, layer_names=()) for group in groups)
        config = dataclasses.replace(config, model=model, groups=groups, engine={}, ranks_apart=True)
        return dataclasses.replace(engine, config=config)


@implements
class RankManager(VllmManager):  # type: ignore[misc]  # as above
    """Knows which blocks all ranks have. Scheduler thread only.

    Args:
        tier: the scheduler's own tier, for lookups. This object shuts it down, and then frees ``region``.
        engine: the engine's identity; part of every key.
        apart: the identity of the ranks' namespace.
        place: the ranks' tier.

    Attributes:
        adapters: request id -> revision of its LoRA adapter; None: not known, so nothing is loaded or stored.
        loads: whether what lookups find may be loaded. An engine that only stores looks up what it need not store.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        region: SharedOffloadRegion,
        engine: translate.EngineSpec,
        apart: translate.EngineSpec,
        place: BoundedTierConfig,
        vllm_config: Any,
        extra_config: Mapping[str, Any],
    ) -> None:
        self.adapters: dict[str, str | None] = {}
        self._resets = 0
        self._guard = GuardedTier(tier, apart.metrics)
        self._region = region
        self._revision = str(apart.config.model.revision)
        # Ranks that have not reported their model's revision, as bits. Nothing is stored before all have.
        self._unknown = (1 << engine.config.parallel.world_size) - 1
        self._salt = hashlib.sha256(f"ranks\n{engine.config.model.revision}\n".encode())
        role = translate.role_of(vllm_config)
        self.loads = role.loads and place.load != "never"
        self._stores = role.stores
        self._is_read_only = place.read_only
        self._places = [(base.Medium.STORAGE, translate.locality(place.type))]
        self._keeps_storage = keeps_storage(extra_config)
        self._is_off = False
        self._blocks = RankBlocks(engine.config.parallel.world_size, self._guard.deadline_s)
        self._pacer = Pacer()
        self._loading: dict[str, bool] = {}  # request -> whether a rank has failed to load a block for it
        self._failed_loads: dict[str, int] = {}  # by request
        self.open_lookups = OpenLookups(self._pacer)
        self._name = lru_cache(KEYS_MAX)(self._make_name)  # a waiting request's keys are looked up again and again
        self._stats = StatsExporter(apart.metrics)

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        if self._is_off or translate.excluded_tiers(self._places, req_context):
            return LookupResult.MISS
        if self._failed_loads.get(req_context.req_id, 0) >= FAILED_LOADS_MAX:
            return LookupResult.MISS
        named = self._named(key, req_context)
        if named is None or self._blocks.is_absent(named):
            return LookupResult.MISS
        if self._blocks.is_present(named):
            self._guard.note_answer(named, req_context, hit=True)
            return LookupResult.HIT
        answer = self._guard.lookup(named, req_context)
        self.open_lookups.asked(answer)
        if answer is not None:
            self._blocks.answered(named, present=answer)
        return translate.lookup_result(answer)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: Any) -> RankKeys:
        self._loading[req_context.req_id] = False
        named = [name for key in keys if (name := self._named(key, req_context)) is not None]
        assert len(named) == len(keys), "a block that cannot be named was found"
        return self._keys(named, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        if self._loading.pop(req_context.req_id, False):
            self._failed_loads[req_context.req_id] = self._failed_loads.get(req_context.req_id, 0) + 1

    def prepare_store(self, keys: Collection[OffloadKey], req_context: Any) -> VllmPrepareStoreOutput | None:
        named = {} if self._is_off or self._is_read_only else {key: self._named(key, req_context) for key in keys}
        if self._unknown and named:
            return None  # vLLM offers them again in its next step
        names = [name for name in named.values() if name is not None]
        self._blocks.note_uses(names)
        wanted = set(self._blocks.to_store(names)) if self._stores else set()
        chosen = {key: name for key, name in named.items() if name is not None and name in wanted}
        spec = self._keys(list(chosen.values()), req_context)
        return VllmPrepareStoreOutput(keys_to_store=list(chosen), store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: Any, success: bool = True) -> None:
        """Do nothing: the blocks are in the ranks' slots now. The ranks report when they are stored."""

    def step_of(self, meta: Any) -> RankStep:
        """Add to vLLM's own metadata of a step. Call this when its stores have been prepared."""
        return RankStep(**_fields(meta), resets=self._resets, uses=self._blocks.take_uses())

    def note(self, report: Mapping[str, Any]) -> None:
        """Take what ranks report: the fields of a ``RankReport``."""
        self._blocks.note(report["stored"], report["lost"])
        for revision, ranks in report["revisions"].items():
            self._unknown &= ~ranks
            if revision != self._revision:
                self._refuse_rank(revision)
        for req_id in report["failed"]:  # ranks may report it in several steps, and it counts once
            if req_id in self._loading:
                self._loading[req_id] = True

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        # Blocks that were loaded are offered, too: a rank may have failed to load them, and they are stored again.
        return RequestOffloadingContext(policy=base.OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        self.adapters.pop(req_context.req_id, None)
        self._loading.pop(req_context.req_id, None)
        self._failed_loads.pop(req_context.req_id, None)
        self.open_lookups.forget(req_context.req_id)
        self._guard.on_request_finished(req_context)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        self._guard.on_schedule_end()
        answered = self._guard.take_answered()
        for req_id, keys in (answered or {}).items():
            self._note_answers(req_id, keys)
        for req_id in list(self.open_lookups) if answered is None else answered:
            self.open_lookups.forget(req_id)
        self._pacer.step_ended(loading=bool(self._loading) or self._blocks.awaits_news)

    def has_pending_work(self) -> bool:
        return self._blocks.awaits_news

    def reset_cache(self) -> None:
        self._resets += 1
        if not self._keeps_storage and not self._is_off:
            translate.warn_of_reset()
            self._is_off = True
        self._loading.clear()  # vLLM forgets them
        self.open_lookups.clear()

    def get_stats(self) -> Any:
        return self._stats.take()

    def shutdown(self) -> None:
        shut_down_tiers([self._guard], SHUTDOWN_S)
        self._region.cleanup()

    def _refuse_rank(self, revision: str) -> None:
        """Use storage no more. The KV of every rank depends on the weights of all, and would be stored as the model's.

        The engine goes on, as it would without storage.
        """
        self._is_off = True
        logger.error(
            "a worker's weights or settings (%s) are not those that the scheduler sees (%s), so this engine neither "
            "loads nor stores KV; give all hosts the same files",
            revision,
            self._revision,
        )

    def _note_answers(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """Note what the tier says of blocks that it had: a block that it lost is stored again when it is offered.

        vLLM asks for all blocks of a prompt, but reads no answer after the first block that is missing.
        """
        for key in keys:
            if self._blocks.is_stale(key):
                answer = self._guard.lookup(key, ReqContext(req_id))
                if answer is not None:
                    self._blocks.answered(key, present=answer)

    def _named(self, key: OffloadKey, req_context: Any) -> OffloadKey | None:
        """Return the key of a block in the ranks' tiers. None: it depends on an adapter that is not known."""
        adapter = self.adapters.get(req_context.req_id, "")
        return None if adapter is None else self._name(key, adapter)

    def _make_name(self, key: OffloadKey, adapter: str) -> OffloadKey:
        name = self._salt.copy()
        name.update(f"adapter:{adapter}\n".encode())
        name.update(get_offload_block_hash(key))
        return make_offload_key(name.digest(), get_offload_group_idx(key))

    def _keys(self, keys: list[OffloadKey], req_context: Any) -> RankKeys:
        return RankKeys(keys, req_context.req_id, self._resets)


@implements
class RankWorker(VllmWorker):  # type: ignore[misc]  # as above
    """A rank's transfers. The worker's thread only.

    vLLM asserts that transfers succeed. So a load that failed is reported as ended, and its blocks as failed.

    Args:
        tier: this rank's, over ``region``. This object shuts both down.
        apart: the identity of the rank's namespace.
        kv_caches: the KV tensors.
        fails_requests: report requests that failed to load, because blocks of several groups may have the same ids.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        region: SharedOffloadRegion,
        apart: translate.EngineSpec,
        kv_caches: CanonicalKVCaches,
        *,
        blocks_per_chunk: int,
        load_deadline_s: float,
        fails_requests: bool,
    ) -> None:
        self._region = region
        self._rank_bit = 1 << apart.config.parallel.rank
        self._revisions = {str(apart.config.model.revision): self._rank_bit}  # for the first report
        self._resets = 0
        self._stats = StatsExporter(apart.metrics)
        self._fails_requests = fails_requests
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failed: set[str] = set()  # requests, for the next report
        self._loading: dict[int, str] = {}  # job -> request
        views = [region.create_next_view(each.page_size_bytes * blocks_per_chunk) for each in kv_caches.tensors]
        self._transfers = RankTransfers(
            tier,
            apart.metrics,
            create_handlers(kv_caches, views, blocks_per_chunk, jobs_max=JOBS_MAX),
            slots=region.geometry.num_blocks,
            slot_bytes=region.geometry.row_stride,
            blocks_per_chunk=blocks_per_chunk,
            load_deadline_s=load_deadline_s,
        )

    def note_resets(self, resets: int) -> None:
        """Take a step's ``RankStep.resets``, before its transfers are submitted."""
        if resets != self._resets:
            self._resets = resets
            self._transfers.drop_copies()

    def note_uses(self, keys: Collection[OffloadKey]) -> None:
        """Take a step's ``RankStep.uses``."""
        self._transfers.touch(keys)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        if dst_spec.resets != self._resets:
            self._transfers.drop_store(job_id, dst_spec.keys)
            return True
        self._transfers.store(job_id, dst_spec.keys, gpu_blocks(src_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        self._loading[job_id] = src_spec.req_id
        self._transfers.load(job_id, src_spec.keys, gpu_blocks(dst_spec))
        return True

    def get_finished(self) -> list[VllmTransferResult]:
        results = []
        for ended in self._transfers.take_ended():
            req_id = self._loading.pop(ended.job_id, "")
            if ended.failed_blocks:
                self._failed.add(req_id)
                if self._fails_requests:
                    self._failed_requests.add(req_id)
                else:
                    self._failed_blocks.update(ended.failed_blocks)
            results.append(VllmTransferResult(ended.job_id, True, ended.moved_bytes, ended.took_s))
        return results

    def take_failed_blocks(self) -> set[int]:
        """Return the ids of blocks that were not loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests that were not loaded since the last call; empty unless ``fails_requests``."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self, meta: Any) -> RankReport | None:
        """Add what happened on this rank to vLLM's own report."""
        stored, lost = self._transfers.take_report()
        failed, self._failed = self._failed, set()
        revisions, self._revisions = self._revisions, {}
        ranks = dict.fromkeys(stored, self._rank_bit)
        return report_of(meta, stored=ranks, lost=lost, failed=failed, revisions=revisions)

    def take_stats(self) -> Any:
        """Return the changes of this rank's metrics."""
        return self._stats.take()

    def wait(self, job_ids: Collection[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Store what waits, for a bounded time, and end everything."""
        self._transfers.shutdown(SHUTDOWN_S)
        self._region.cleanup()


def _own(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of SharedStorageConnector, without those that choose this spec."""
    return {name: value for name, value in extra_config.items() if name not in ("spec_name", "spec_module_path")}
