"""Exports kvtiers' metrics in vLLM's Prometheus endpoint.

vLLM takes metric definitions once, in the API process too. The scheduler's process then sends increments by metric
name. kvtiers' metrics are named ``vllm:kvtiers_…``, because vLLM unregisters and re-registers only metrics with
"vllm" in their name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from ...tiers.metrics import METRICS, MetricKind, Metrics
from . import translate

_PREFIX = "vllm:"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Definitions of all kvtiers metrics. A histogram becomes a counter of its sum; ``…_jobs`` has its count."""
    return {
        _vllm_name(name): (
            OffloadingGaugeMetadata(documentation=metric.help, labelnames=metric.labels)
            if metric.kind is MetricKind.GAUGE
            else OffloadingCounterMetadata(documentation=metric.help, labelnames=metric.labels)
        )
        for name, metric in METRICS.items()
    }


def tiering_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Definitions of the metrics of vLLM's own tiering manager, which kvtiers also feeds under vLLM's names."""
    names = TieringOffloadingMetrics
    texts = {
        names.READ_BYTES: "Total bytes read from secondary tiers into the primary tier, labeled by tier.",
        names.READ_TIME: "Total time of jobs that read from secondary tiers, in seconds, labeled by tier.",
        names.WRITE_BYTES: "Total bytes written from the primary tier to secondary tiers, labeled by tier.",
        names.WRITE_TIME: "Total time of jobs that wrote to secondary tiers, in seconds, labeled by tier.",
        translate.CHUNK_QUERIES: "Chunks that requests looked up in a tier, each counted once, labeled by tier.",
        translate.CHUNK_HITS: "Looked-up chunks that the tier has, labeled by tier.",
        names.PROMOTION_JOB_FAILURES: "Failed secondary-tier promotion jobs, labeled by tier.",
        names.CASCADE_JOB_FAILURES: "Failed secondary-tier cascade jobs, labeled by tier.",
    }
    return {name: OffloadingCounterMetadata(documentation=text, labelnames=("tier",)) for name, text in texts.items()}


_MADE: dict[tuple[Any, str], Any] = {}


def shared_types(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return vLLM's classes of metrics, such that kvtiers' connectors in one MultiConnector share their metrics.

    vLLM makes the metrics of each connector, and Prometheus refuses a name that is made a second time.
    """

    def make(kind: Any, *, name: str, **options: Any) -> Any:
        try:
            made = kind(name=name, **options)
        except ValueError:  # a duplicate
            if (kind, name) not in _MADE:
                raise
            return _MADE[kind, name]
        _MADE[kind, name] = made
        return made

    return {kind: partial(make, theirs) for kind, theirs in metric_types.items()}


class StatsExporter:
    """Reports the series of a Metrics that changed since the last ``take`` or are new. Scheduler thread only.

    vLLM's endpoint shows a series only after the first report. So a new series is reported even at 0: Prometheus sees
    no increase in a series that starts at 500.

    Args:
        tiering_names: also feed vLLM's own ``kv_offload_tiering`` metrics.
    """

    def __init__(self, metrics: Metrics, *, tiering_names: bool = False) -> None:
        self._metrics = metrics
        self._tiering_names = tiering_names
        self._changed = metrics.watch()
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self) -> OffloadingConnectorStats | None:
        """Return the changes since the last call, or None if nothing changed. Costs nothing for other series."""
        stats = OffloadingConnectorStats()
        for key in self._changed:
            self._add(stats, *key)
        self._changed.clear()
        return None if stats.is_empty() else stats

    def _add(self, stats: OffloadingConnectorStats, name: str, labels: tuple[str, ...]) -> None:
        seen, value = self._seen.get((name, labels)), self._metrics.total(name, labels)
        # Plain str: a reason is a StrEnum, which vLLM's messages between processes may not accept.
        told = tuple(map(str, labels))
        if value is None:  # only gauges; vLLM's endpoint never drops a series and would keep the last value
            if self._seen.pop((name, labels), None) is not None:
                stats.set_gauge(_vllm_name(name), math.nan, told)
            return
        self._seen[name, labels] = value
        if METRICS[name].kind is MetricKind.GAUGE:
            if value != seen:
                stats.set_gauge(_vllm_name(name), value, told)
            return
        stats.increase_counter(_vllm_name(name), value - (seen or 0), told)
        if self._tiering_names:
            labels_by_name = dict(zip(METRICS[name].labels, told, strict=True))
            for vllms_name in _tiering_metrics(name, labels_by_name):
                stats.increase_counter(vllms_name, value - (seen or 0), (labels_by_name["tier"],))


def _vllm_name(name: str) -> str:
    # prometheus_client appends _total to a counter's name by itself.
    return _PREFIX + name.removesuffix("_total")


def _tiering_metrics(name: str, labels: Mapping[str, str]) -> Iterator[str]:
    names: Any = TieringOffloadingMetrics
    is_load = labels.get("op") == "load"
    match name:
        case "kvtiers_bytes_total":
            yield names.READ_BYTES if is_load else names.WRITE_BYTES
        case "kvtiers_job_seconds":
            yield names.READ_TIME if is_load else names.WRITE_TIME
        case "kvtiers_jobs_total" if labels["outcome"] != "ok":
            yield names.PROMOTION_JOB_FAILURES if is_load else names.CASCADE_JOB_FAILURES
        case "kvtiers_lookups_total":
            yield translate.CHUNK_QUERIES
            if labels["result"] == "hit":
                yield translate.CHUNK_HITS
