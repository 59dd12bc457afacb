"""Our metrics in vLLM's Prometheus endpoint.

vLLM takes definitions by name once, in the API process too, and then increments from the scheduler's process. Ours
are called ``vllm:kvtiers_…``: vLLM unregisters and re-registers only what has its name in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtiers.connector.vllm import translate
from kvtiers.tiers.metrics import METRICS, MetricKind, Metrics, Sample

_PREFIX = "vllm:"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All our metrics. A histogram becomes the sum of its observations: how many there were is in ``…_jobs``."""
    return {
        _vllm_name(name): (
            OffloadingGaugeMetadata(metric.help, metric.labels)
            if metric.kind is MetricKind.GAUGE
            else OffloadingCounterMetadata(metric.help, metric.labels)
        )
        for name, metric in METRICS.items()
    }


def tiering_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics that vLLM's own tiering manager has and ours feeds too, under vLLM's names."""
    names = TieringOffloadingMetrics
    texts = {
        names.READ_BYTES: "Total bytes read from secondary tiers into the primary tier, labeled by tier.",
        names.READ_TIME: "Total time of jobs that read from secondary tiers, in seconds, labeled by tier.",
        names.WRITE_BYTES: "Total bytes written from the primary tier to secondary tiers, labeled by tier.",
        names.WRITE_TIME: "Total time of jobs that wrote to secondary tiers, in seconds, labeled by tier.",
        translate.CHUNK_QUERIES: "Chunks that requests asked a tier for, each once, labeled by tier.",
        translate.CHUNK_HITS: "Those of them that the tier has, labeled by tier.",
        names.PROMOTION_JOB_FAILURES: "Failed secondary-tier promotion jobs, labeled by tier.",
        names.CASCADE_JOB_FAILURES: "Failed secondary-tier cascade jobs, labeled by tier.",
    }
    return {name: OffloadingCounterMetadata(text, ("tier",)) for name, text in texts.items()}


class StatsExporter:
    """What changed in a Metrics since the last ``take``, and each new series. Scheduler thread only.

    vLLM's endpoint shows a series from when it is told of it, so one that has counted nothing yet is told as well:
    Prometheus sees no increase in a series that begins at 500.

    Args:
        tiering_names: also feed vLLM's own ``kv_offload_tiering`` metrics.
    """

    def __init__(self, metrics: Metrics, *, tiering_names: bool = False) -> None:
        self._metrics = metrics
        self._tiering_names = tiering_names
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self) -> OffloadingConnectorStats | None:
        """The changes, or None where there are none."""
        stats = OffloadingConnectorStats()
        gone = set(self._seen)
        for sample in self._metrics.snapshot():
            metric = METRICS[sample.name]
            # Plain texts, which any message between vLLM's processes takes: a reason is a StrEnum.
            labels = tuple(str(sample.labels[name]) for name in metric.labels)
            value = sample.total if metric.kind is MetricKind.HISTOGRAM else sample.value
            gone.discard((sample.name, labels))
            seen = self._seen.get((sample.name, labels))
            change = value - (seen or 0)
            if not change and seen is not None:
                continue
            self._seen[sample.name, labels] = value
            if metric.kind is MetricKind.GAUGE:
                stats.set_gauge(_vllm_name(sample.name), value, labels)
                continue
            stats.increase_counter(_vllm_name(sample.name), change, labels)
            if self._tiering_names:
                for name in _tiering_metrics(sample):
                    stats.increase_counter(name, change, (sample.labels["tier"],))
        for name, labels in gone:  # gauges only; vLLM's endpoint drops none, and would show the last value for ever
            del self._seen[name, labels]
            stats.set_gauge(_vllm_name(name), math.nan, labels)
        return None if stats.is_empty() else stats


def _vllm_name(name: str) -> str:
    # prometheus_client appends _total to a counter's name by itself.
    return _PREFIX + name.removesuffix("_total")


def _tiering_metrics(sample: Sample) -> Iterator[str]:
    names: Any = TieringOffloadingMetrics
    is_load = sample.labels.get("op") == "load"
    match sample.name:
        case "kvtiers_bytes_total":
            yield names.READ_BYTES if is_load else names.WRITE_BYTES
        case "kvtiers_job_seconds":
            yield names.READ_TIME if is_load else names.WRITE_TIME
        case "kvtiers_jobs_total" if sample.labels["outcome"] != "ok":
            yield names.PROMOTION_JOB_FAILURES if is_load else names.CASCADE_JOB_FAILURES
        case "kvtiers_lookups_total":
            yield translate.CHUNK_QUERIES
            if sample.labels["result"] == "hit":
                yield translate.CHUNK_HITS
