"""RankTiersSpec: gives each rank of an engine its own tier, inside vLLM's OffloadingConnector.

SharedStorageConnector uses this spec. It serves vLLM's scheduler as KVTiersSpec does, but the processes do not share a
region. So the ranks of an engine may be on several hosts:

- The scheduler has a tier of its own on the storage of rank 0, and only looks up blocks there. The scheduler decides
  which requests load blocks (``connector.ranks.loads``), and sends keys to the ranks.
- Each rank moves its own part of a block (``connector.ranks.transfers``), and reports which blocks it stored and lost.

The workers' configs differ from the scheduler's config: they have ranks, and loading a model changes them. So the
digest of the engine's options is not part of the ranks' namespace. It is part of every key, and only the scheduler
makes keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_offload.base import OffloadingMetricMetadata
from vllm.v1.kv_offload.base import OffloadingSpec as VllmSpec

from ...tiers.base import SecondaryTierManager
from ...tiers.errors import ConfigError
from ...tiers.registry import SecondaryTierFactory
from ..base import EngineSpec
from ..core.guard import GuardedTier, shut_down_tiers
from ..core.options import ManagerOptions
from ..core.pacing import SHUTDOWN_S
from ..ranks.place import LOAD_DEADLINE_S, rank_tier, seconds_of, staging_bytes
from ..ranks.transfers import check_slots
from ..region.region_header import row_stride
from ..region.shared_region import SharedOffloadRegion
from . import kv_groups, refusals, translate, weights
from .contract import implements
from .handed import handed_over
from .metrics import definitions
from .rank_manager import RankManager
from .rank_worker import RankWorker
from .spec import canonical_kv_caches


@implements
class RankTiersSpec(VllmSpec):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Creates the scheduler's and the workers' sides. The scheduler's and each worker's process have one object.

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
        vllm_config, kv_cache_config = self._handed.vllm_config, self._handed.kv_cache_config
        options = ManagerOptions(
            blocks_per_token=kv_groups.blocks_per_token(self.config, kv_cache_config, self.blocks_per_chunk),
            step_tokens_max=vllm_config.scheduler_config.max_num_batched_tokens,
        )
        return RankManager(tier, region, engine, apart, self._tier, options, vllm_config, self.extra_config)

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
        self, options: dict[str, Any], slots: int, apart: EngineSpec
    ) -> tuple[SharedOffloadRegion, SecondaryTierManager]:
        region = SharedOffloadRegion.anonymous(slots, self._slot_bytes)
        try:
            return region, SecondaryTierFactory.create_secondary_tier(options, region.create_kv_memoryview(), apart)
        except BaseException:
            region.cleanup()
            raise

    def _engine(self, *, in_worker: bool) -> EngineSpec:
        return translate.engine_spec(self.config, self._handed.vllm_config, in_worker=in_worker)

    def _apart(self, engine: EngineSpec) -> EngineSpec:
        """Return the identity of the ranks' namespace, which the scheduler and the workers see alike."""
        config = engine.config
        model = dataclasses.replace(config.model, revision=weights.without_config(config.model.revision) or None)
        groups = config.groups
        if config.parallel.pp_size > 1:  # a process knows only its own stage's layers
            groups = tuple(dataclasses.replace(group, layer_names=()) for group in groups)
        config = dataclasses.replace(config, model=model, groups=groups, engine={}, ranks_apart=True)
        return dataclasses.replace(engine, config=config)


def _own(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of SharedStorageConnector, without those that choose this spec."""
    return {name: value for name, value in extra_config.items() if name not in ("spec_name", "spec_module_path")}
