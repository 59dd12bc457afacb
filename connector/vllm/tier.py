"""KVTiersTier: runs a kvtiers tier behind vLLM's own, unpatched TieringOffloadingSpec.

KVTiersConnector adds one entry to vLLM's ``secondary_tiers`` for each tier. vLLM looks up and stores blocks in each
tier separately.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingMetricMetadata, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult as VllmJobResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as VllmTier

from ...tiers.base import JobResult, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey
from ...tiers.config.deployment import load_named
from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from ...tiers.registry import SecondaryTierFactory
from ..core.guard import GuardedTier, shut_down_tiers
from ..core.pacing import DRAIN_SHARE, SHUTDOWN_S, Pacer, drain
from . import kv_groups, refusals, translate
from .contract import implements
from .handed import handed_over
from .metrics import StatsExporter, definitions

logger = get_logger(__name__)

_DRAIN_POLL_S = 0.01


@implements
class KVTiersTier(VllmTier):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Adapts one kvtiers tier to vLLM's SecondaryTierManager. Scheduler thread only.

    After the start no exception of the tier reaches the engine. A lookup that raises is a miss. A job may already be
    running when its submission raises, and vLLM reuses the slots of a job once it is reported. So kvtiers reports such
    a job as failed only after the tier's own deadline, unless the tier reports the job earlier.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: from vLLM.
        tier: the tier's options, including ``type``.
        config_file: a deployment's YAML, instead of ``tier``.
        index: position of the tier in ``config_file``.

    Raises:
        ConfigError: names the option that is wrong.
        StoreError: the storage failed with an error that a retry cannot fix.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,  # noqa: ARG002 - vLLM passes it, but ``tier`` has a more specific type
        backpressure_detector: Any = None,
        *,
        tier: dict[str, Any] | None = None,
        config_file: str | None = None,
        index: int = 0,
    ) -> None:
        handed = handed_over()
        vllm_config = handed.vllm_config
        refusals.check_one_host(vllm_config)
        layers = kv_groups.stored_layers(offloading_spec.config, handed.kv_cache_config)
        if offloading_spec.blocks_per_chunk > 1:
            if kv_groups.has_window(layers):
                raise kv_groups.no_chunks_of_windows(offloading_spec.blocks_per_chunk)
            if kv_groups.has_states(layers):
                logger.warning(
                    "blocks_per_chunk is %d, and this model has layers with recurrent states, for which vLLM stores "
                    "only the state at the end of a chunk: most prompts will have no hits; set blocks_per_chunk: 1",
                    offloading_spec.blocks_per_chunk,
                )
        self._role = translate.role_of(vllm_config)
        if tier is None:
            assert config_file is not None
            tier = dict(load_named(config_file, SecondaryTierFactory.tier_types()).tiers[index])
        options = tier
        own_type = str(options.get("name") or options["type"])
        # vLLM labels its metrics with the type. The tier's own name or type says more than KVTiersTier.
        detector = () if backpressure_detector is None else (backpressure_detector,)  # vLLM passes it from 0.31 on
        if not detector and getattr(offloading_spec, "extra_config", {}).get("backpressure"):
            raise ConfigError("is not read by vLLM before 0.31; leave it out", field="backpressure")
        super().__init__(offloading_spec, primary_kv_view, own_type, *detector)
        self.locality = translate.locality(str(options["type"]))
        if hasattr(self, "cache_hit_source"):  # from 0.32 on; vLLM's default calls every storage a disk
            self.cache_hit_source = translate.hit_source(str(options["type"]))
        translate.warn_of_adapters(vllm_config)
        spec = translate.engine_spec(offloading_spec.config, vllm_config)
        self.tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(options, primary_kv_view, spec)
        # vLLM shuts its tiers down one after the other, so each gets a share of the time.
        self._ending_s = SHUTDOWN_S / max(1, len(getattr(offloading_spec, "secondary_tier_configs", ())))
        self._guard = GuardedTier(self.tier, spec.metrics)
        try:
            self._guard.check_values()
        except BaseException:
            shut_down_tiers([self._guard], self._ending_s)  # vLLM never gets this tier, so it will not shut it down
            raise
        self._metrics = spec.metrics
        self._stats = StatsExporter(spec.metrics)
        self._publishes = bool(getattr(offloading_spec.config, "enable_kv_cache_events", False))
        self._pacer = Pacer()
        self._loads: set[int] = set()
        self._stores: dict[int, list[OffloadKey]] = {}  # job -> its keys in vLLM's order, which the result must follow
        self._ended: list[VllmJobResult] = []
        self._not_stored = 0  # blocks of stores that ended while the tier was shut down

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return definitions()

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        if not self._role.loads or self._guard.load == "never":
            return LookupResult.MISS
        answer = self._guard.lookup(key, req_context)
        self._pacer.asked(answer)
        return translate.lookup_result(answer)

    def submit_store(self, job_metadata: Any) -> None:
        job = translate.job_metadata(job_metadata)
        if not (self._role.stores and self.tier.takes_stores):
            self._ended.append(translate.job_result(JobResult(job.job_id, success=True)))  # configured to store nothing
            return
        keys = list(job.keys)
        places = translate.prompt_order(keys, job.req_context)
        job = replace(job, keys=[keys[i] for i in places], block_ids=np.asarray(job.block_ids)[places])
        self._stores[job.job_id] = keys
        self._guard.submit_store(job)

    def submit_load(self, job_metadata: Any) -> None:
        job = translate.job_metadata(job_metadata)
        self._loads.add(job.job_id)
        self._guard.submit_load(job)

    def get_finished_jobs(self) -> Iterable[VllmJobResult]:
        self._hear_tier()
        results, self._ended = self._ended, []
        return results

    def _hear_tier(self) -> None:
        for result in self._guard.take_ended():
            self._loads.discard(result.job_id)
            keys = self._stores.pop(result.job_id, None)
            if keys is not None:
                done = set(result.successful_keys)
                result = replace(result, successful_keys=tuple(key for key in keys if key in done))
            self._ended.append(translate.job_result(result))

    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores or self._ended)

    def take_events(self) -> Iterable[Any]:
        events = self._guard.take_events()
        return translate.events(events, self.locality) if self._publishes else ()

    def touch(self, keys: Collection[OffloadKey], req_context: Any) -> None:  # noqa: ARG002
        self._guard.touch(keys)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._guard.on_request_finished(req_context)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        self._guard.on_schedule_end()
        self._guard.take_answered()  # for a PollingTierManager, which then gives up lookups of silent storage
        self._pacer.step_ended(loading=bool(self._loads))

    def drain_jobs(self) -> None:
        self._guard.drain_jobs()
        self._hear_tier()
        while self._guard.raised:  # vLLM is about to reuse all slots, and assumes that every job was reported
            time.sleep(_DRAIN_POLL_S)
            self._hear_tier()

    def get_stats(self) -> Any:
        return self._stats.take()

    def shutdown(self) -> None:
        """Shut down within this tier's share of ``SHUTDOWN_S``. Running stores get most of that time.

        Blocks reported as stored are on storage. The others are logged and counted.
        """
        rest_s = self._ending_s
        if not self._guard.limit_shutdown(rest_s):
            drain(self._is_idle, rest_s * DRAIN_SHARE)
            rest_s *= 1 - DRAIN_SHARE
        if not shut_down_tiers([self._guard], rest_s):
            self._is_idle()
        unreported = sum(map(len, self._stores.values()))
        lost = unreported + self._not_stored  # the tier itself has counted the blocks in _not_stored
        self._stores.clear()
        if lost:
            self._metrics.inc("kvtiers_stores_dropped_total", self.tier_type, "shutdown", by=unreported)
            logger.warning("tier %s: %d blocks were not stored when the engine ended", self.tier_type, lost)

    def _is_idle(self) -> bool:
        for result in self._guard.take_ended():
            keys = self._stores.pop(result.job_id, [])
            self._not_stored += len(keys) - len(result.successful_keys) if keys else 0
        return self._stores.keys() <= self._guard.raised.keys()
