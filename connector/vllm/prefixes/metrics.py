"""SharedStorageConnector's counts in vLLM's Prometheus endpoint, as ``vllm:kvtiers_prefix_…``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtiers.connector.prefixes.store import PrefixCounts
from kvtiers.connector.vllm.contract import implements

PREFIX = "vllm:kvtiers_prefix_"
#: Fields of PrefixCounts, and what the connector itself counts.
HELP = {
    "chunks_stored": "Chunks of prompt prefixes that were stored.",
    "chunks_refused": "Chunks that were not stored, because max_bytes is reached.",
    "chunks_loaded": "Chunks of prompt prefixes that were loaded.",
    "bytes_stored": "Bytes of stored chunks.",
    "bytes_loaded": "Bytes of loaded chunks.",
    "verify_failures": "Chunks that were not what their manifest says, or manifests that were none.",
    "errors": "Errors of the storage.",
    "chunks_removed": "Chunks that this engine's collector removed, by ttl or max_bytes.",
    "bytes_removed": "Bytes of these.",
    "lookups_given_up": "Lookups that lookup_deadline_s ended, or that were not made because all threads hung.",
    "loads_failed": "Loads that failed, or that load_deadline_s or a reset ended; their blocks are computed.",
    "dropped_blocks": "Blocks that were not stored, because too many bytes waited to be stored.",
}


@implements
class PrefixStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """What changed: counts by name."""

    def reset(self) -> None:
        """Forget it."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: PrefixStats) -> PrefixStats:
        """Add another one's, of another rank or a later step."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not any(self.data.values())


class PrefixReporter:
    """Says what changed since it was last asked. For one thread."""

    def __init__(self) -> None:
        self._said = dict.fromkeys(HELP, 0)

    def take(self, counts: Iterable[PrefixCounts], own: Mapping[str, int]) -> PrefixStats | None:
        """The changes, or None where there are none. ``own``: what the connector itself counts."""
        now = dict.fromkeys(HELP, 0) | dict(own)
        for each in counts:
            for name, count in asdict(each).items():
                now[name] += count
        changes = {name: count - self._said[name] for name, count in now.items() if count != self._said[name]}
        self._said = now
        return PrefixStats(data=changes) if changes else None


@implements
class PrefixPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """The counters, in the process that vLLM exports from."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in HELP.items():
            counter = metric_types[Counter](name=PREFIX + name, documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what a PrefixStats says."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
