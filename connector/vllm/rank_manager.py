"""RankManager: the scheduler's side of RankTiersSpec."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.base import OffloadingManager as VllmManager
from vllm.v1.kv_offload.base import PrepareStoreOutput as VllmPrepareStoreOutput

from ...tiers.base import ReqContext, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from ...tiers.config.tier_options import BoundedTierConfig
from ...tiers.plain_logs import get_logger
from ..base import EngineSpec
from ..core.guard import GuardedTier, shut_down_tiers
from ..core.options import ManagerOptions
from ..core.pacing import SHUTDOWN_S, Pacer
from ..ranks.blocks import KEYS_MAX, RankBlocks
from ..ranks.loads import RankLoads
from ..region.shared_region import SharedOffloadRegion
from ..vllm_config import keeps_storage
from . import translate
from .contract import implements
from .metrics import StatsExporter
from .open_lookups import OpenLookups
from .rank_messages import RankKeys, RankStep, fields_of

logger = get_logger(__name__)

FAILED_LOADS_MAX = 3  # loads per request before it is computed: a failed load need not mean a lost block


@implements
class RankManager(VllmManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Knows which blocks all ranks have. Scheduler thread only.

    Args:
        tier: the scheduler's own tier, for lookups. This object shuts it down, and then frees ``region``.
        engine: the engine's identity; part of every key.
        apart: the identity of the ranks' namespace.
        place: the ranks' tier.
        options: settings for learning how long the engine computes.

    Attributes:
        adapters: request id -> revision of its LoRA adapter; None: not known, so nothing is loaded or stored.
        loads: decides which requests load the blocks that their lookups find.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        region: SharedOffloadRegion,
        engine: EngineSpec,
        apart: EngineSpec,
        place: BoundedTierConfig,
        options: ManagerOptions,
        vllm_config: Any,
        extra_config: Mapping[str, Any],
    ) -> None:
        self.adapters: dict[str, str | None] = {}
        self._resets = 0
        self._guard = GuardedTier(tier, apart.metrics)
        self._region = region
        self._revision = str(apart.config.model.revision)
        # Bit mask of the ranks that have not reported their model's revision. No block is stored before all ranks have.
        self._unknown = (1 << engine.config.parallel.world_size) - 1
        self._salt = hashlib.sha256(f"ranks\n{engine.config.model.revision}\n".encode())
        role = translate.role_of(vllm_config)
        self.loads = RankLoads(self._guard, options, apart.metrics, only_stores=not role.loads)
        self.decisions, self.note_request = self.loads.decisions, self.loads.note_request
        self._stores = role.stores
        self._is_read_only = place.read_only
        self._places = [(base.Medium.STORAGE, translate.locality(place.type))]
        self._keeps_storage = keeps_storage(extra_config)
        self._is_off = False
        self._blocks = RankBlocks(engine.config.parallel.world_size, self._guard.deadline_s)
        # Under another policy, a request whose load fails ends with an error.
        transfer = vllm_config.kv_transfer_config
        self._may_give_up = getattr(transfer, "kv_load_failure_policy", "") == "recompute"
        self._pacer = Pacer()
        self._loading: dict[str, bool] = {}  # request -> whether a rank has failed to load a block for it
        self._failed_loads: dict[str, int] = {}  # request -> number of its failed loads
        self.open_lookups = OpenLookups(self._pacer)
        self._name = lru_cache(KEYS_MAX)(self._make_name)  # a waiting request's keys are looked up again and again
        self._stats = StatsExporter(apart.metrics)

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        if self._is_off or translate.excluded_tiers(self._places, req_context):
            return LookupResult.MISS
        req_id = req_context.req_id
        if self._failed_loads.get(req_id, 0) >= FAILED_LOADS_MAX or self.loads.is_declined(req_id):
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
        self.loads.begin(req_context.req_id, len(named))
        return self._keys(named, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        failed = self._loading.pop(req_context.req_id, False)
        self.loads.end(req_context.req_id, failed=failed)
        if failed:
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
        late = self.loads.take_late() if self._may_give_up else []
        return RankStep(**fields_of(meta), resets=self._resets, uses=self._blocks.take_uses(), late=late)

    def note(self, report: Mapping[str, Any]) -> None:
        """Process the ranks' reports: the fields of a ``RankReport``."""
        self._blocks.note(report["stored"], report["lost"])
        for revision, ranks in report["revisions"].items():
            self._unknown &= ~ranks
            if revision != self._revision:
                self._refuse_rank(revision)
        for req_id in report["failed"]:  # several ranks may report the same request, which counts once
            if req_id in self._loading:
                self._loading[req_id] = True

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        # vLLM also offers loaded blocks. Blocks that a rank failed to load are then stored again.
        return RequestOffloadingContext(policy=base.OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        self.adapters.pop(req_context.req_id, None)
        self._loading.pop(req_context.req_id, None)
        self.loads.forget(req_context.req_id)
        self._failed_loads.pop(req_context.req_id, None)
        self.open_lookups.forget(req_context.req_id)
        self._guard.on_request_finished(req_context)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        self._guard.on_schedule_end()
        answered = self._guard.take_answered()
        for req_id, keys in (answered or {}).items():
            if keys:
                self.loads.note_answers(req_id)
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
        self.loads.reset()
        self.open_lookups.clear()

    def get_stats(self) -> Any:
        return self._stats.take()

    def shutdown(self) -> None:
        shut_down_tiers([self._guard], SHUTDOWN_S)
        self._region.cleanup()

    def _refuse_rank(self, revision: str) -> None:
        """Stop using storage, because every rank's KV depends on the weights of all ranks.

        The engine continues without storage.
        """
        self._is_off = True
        logger.error(
            "a worker's weights or settings (%s) are not those that the scheduler sees (%s), so this engine neither "
            "loads nor stores KV; give all hosts the same files",
            revision,
            self._revision,
        )

    def _note_answers(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """Note the tier's answers for blocks that it had. A lost block is stored again when vLLM offers it.

        vLLM asks for all blocks of a prompt, but reads no answer after the first block that is missing.
        """
        for key in keys:
            if self._blocks.is_stale(key):
                answer = self._guard.lookup(key, ReqContext(req_id))
                if answer is not None:
                    self._blocks.answered(key, present=answer)

    def _named(self, key: OffloadKey, req_context: Any) -> OffloadKey | None:
        """Return the key of a block in the ranks' tiers. None: the revision of its adapter is unknown."""
        adapter = self.adapters.get(req_context.req_id, "")
        return None if adapter is None else self._name(key, adapter)

    def _make_name(self, key: OffloadKey, adapter: str) -> OffloadKey:
        name = self._salt.copy()
        name.update(f"adapter:{adapter}\n".encode())
        name.update(get_offload_block_hash(key))
        return make_offload_key(name.digest(), get_offload_group_idx(key))

    def _keys(self, keys: list[OffloadKey], req_context: Any) -> RankKeys:
        return RankKeys(keys, req_context.req_id, self._resets)
