"""Exports SharedStorageConnector's counts in vLLM's Prometheus endpoint, as ``vllm:kvtiers_prefix_…``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ...prefixes.store import PrefixCounts
from ..contract import implements

PREFIX = "vllm:kvtiers_prefix_"
#: Help texts for the fields of PrefixCounts and for the connector's own counts.
HELP = {
    "chunks_stored": "Chunks of prompt prefixes that were stored.",
    "chunks_refused": "Chunks that were not stored because max_bytes was reached.",
    "chunks_loaded": "Chunks of prompt prefixes that were loaded.",
    "bytes_stored": "Bytes of stored chunks.",
    "bytes_loaded": "Bytes of loaded chunks.",
    "verify_failures": "Chunks that did not match their manifest, and invalid manifests.",
    "errors": "Storage errors.",
    "chunks_removed": "Chunks that this engine's collector removed, by ttl or max_bytes.",
    "bytes_removed": "Bytes of chunks that this engine's collector removed.",
    "lookups_given_up": "Lookups that exceeded lookup_deadline_s, or were skipped because all threads hung.",
    "loads_failed": "Loads that failed, exceeded load_deadline_s or were ended by a reset. vLLM computes their blocks.",
    "dropped_blocks": "Blocks that were not stored because too many bytes were waiting to be stored.",
}


@implements
class PrefixStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Changes of the counts, by name."""

    def reset(self) -> None:
        """Forget all changes."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: PrefixStats) -> PrefixStats:
        """Add the changes of another rank or a later step."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the changes for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not any(self.data.values())


class PrefixReporter:
    """Reports the counts that changed since the last ``take``. For one thread."""

    def __init__(self) -> None:
        self._said = dict.fromkeys(HELP, 0)

    def take(self, counts: Iterable[PrefixCounts], own: Mapping[str, int]) -> PrefixStats | None:
        """Return the changes, or None if nothing changed. ``own``: the connector's own counts."""
        now = dict.fromkeys(HELP, 0) | dict(own)
        for each in counts:
            for name, count in asdict(each).items():
                now[name] += count
        changes = {name: count - self._said[name] for name, count in now.items() if count != self._said[name]}
        self._said = now
        return PrefixStats(data=changes) if changes else None


@implements
class PrefixPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """The Prometheus counters, in the process that exports vLLM's metrics."""

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
        """Add the changes of a PrefixStats to the counters."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
