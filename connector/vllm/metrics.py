"""Exports kvtiers' metrics in vLLM's Prometheus endpoint.

vLLM takes metric definitions once, in the API process too. The scheduler's process then sends increments by metric
name. kvtiers' metrics are named ``vllm:kvtiers_…``, because vLLM unregisters and re-registers only metrics with
"vllm" in their name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from ...tiers.metrics import METRICS, MetricKind, Metrics

_PREFIX = "vllm:"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the definitions of all metrics. A histogram becomes a counter of its sum, and a counter ``…_jobs``."""
    return {
        _vllm_name(name): (
            OffloadingGaugeMetadata(documentation=metric.help, labelnames=metric.labels)
            if metric.kind is MetricKind.GAUGE
            else OffloadingCounterMetadata(documentation=metric.help, labelnames=metric.labels)
        )
        for name, metric in METRICS.items()
    }


_MADE: dict[tuple[Any, str], Any] = {}


def shared_types(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return vLLM's metric classes, changed so that kvtiers' connectors in a MultiConnector share their metrics.

    vLLM creates the metrics of each connector, and Prometheus refuses to register a name twice.
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
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
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


def _vllm_name(name: str) -> str:
    # prometheus_client appends _total to a counter's name by itself.
    return _PREFIX + name.removesuffix("_total")
