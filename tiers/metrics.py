"""Counters, gauges and histograms as plain data. Exporters are in other modules.

One table names every metric; a name or label that is not in the table is a bug and raises KeyError. A ``Metrics`` has
one writer, the scheduler thread: worker threads return their counts with their results, so counting needs no lock.
Any thread may call ``snapshot``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """Kind of a metric, as in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDef:
    """Definition of a metric.

    Attributes:
        labels: label names, in the order in which label values are passed.
        bounds: upper bounds of a histogram's buckets, ascending, without +Inf.
    """

    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric. For a histogram: count, cumulative buckets and sum (``total``)."""

    name: str
    labels: dict[str, str]
    value: float
    buckets: tuple[int, ...] = ()
    total: float = 0.0


def _counter(text: str, *labels: str) -> MetricDef:
    return MetricDef(MetricKind.COUNTER, text, labels)


def _gauge(text: str, *labels: str) -> MetricDef:
    return MetricDef(MetricKind.GAUGE, text, labels)


_STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

METRICS: Mapping[str, MetricDef] = {
    "kvtiers_blocks_total": _counter(
        "Blocks by outcome: moved, already_stored, failed, dropped.", "tier", "op", "outcome"
    ),
    "kvtiers_build_info": _gauge("Always 1; the label has the version, with the git commit.", "version"),
    "kvtiers_bytes_total": _counter("Payload bytes moved.", "tier", "op"),
    "kvtiers_circuit_closed": _gauge("1: the tier is in use. 0: it is cut off.", "tier"),
    "kvtiers_circuit_opened_total": _counter("Times the tier was cut off.", "tier"),
    "kvtiers_collector_removed_blobs_total": _counter(
        "Blocks that this process's collector removed.", "tier", "reason"
    ),
    "kvtiers_collector_removed_bytes_total": _counter(
        "Bytes of the blocks that this process's collector removed.", "tier", "reason"
    ),
    "kvtiers_collector_runs_total": _counter(
        "Rounds of this process's collector, by outcome: ok, error.",
        "tier",
        "outcome",
    ),
    "kvtiers_collector_up": _gauge("1: this process's collector works or is not needed yet. 0: it is down.", "tier"),
    "kvtiers_contained_errors_total": _counter("Errors in a tier that did not reach the engine.", "tier", "where"),
    "kvtiers_deadline_expired_total": _counter("Deadlines that passed: lookup, job, load.", "tier", "what"),
    "kvtiers_healed_blobs_total": _counter("Bad blocks that a store replaced.", "tier"),
    "kvtiers_job_seconds": MetricDef(
        MetricKind.HISTOGRAM, "Seconds from a job's submission to its end.", ("tier", "op"), _SECONDS
    ),
    "kvtiers_jobs_in_flight": _gauge("Jobs that have not ended.", "tier"),
    "kvtiers_jobs_total": _counter("Jobs by outcome: ok, partial, failed.", "tier", "op", "outcome"),
    "kvtiers_load_decisions_total": _counter(
        "Requests with hits, by reason. Loaded: always, faster, trial, unknown. Computed: behind, never, slower.",
        "tier",
        "reason",
    ),
    "kvtiers_lookup_probes_total": _counter("Lookups sent to storage: hit, miss, error, deadline.", "tier", "result"),
    "kvtiers_lookups_total": _counter("Blocks that requests looked up in the tier: hit, miss.", "tier", "result"),
    "kvtiers_promotion_room_expired_total": _counter("Hits that became misses because no slot was free in time."),
    "kvtiers_requests_total": _counter("Requests, by the reason why no more was loaded (kvtiers explain).", "reason"),
    "kvtiers_schedule_end_seconds": MetricDef(
        MetricKind.HISTOGRAM,
        "Seconds that the scheduler's thread spends in kvtiers at the end of an engine step.",
        (),
        _STEP_SECONDS,
    ),
    "kvtiers_slots": _gauge("Slots of the region: free, ready, pinned, pending, quarantined.", "state"),
    "kvtiers_storage_max_bytes": _gauge("max_bytes, if it is set.", "tier"),
    "kvtiers_storage_used_bytes": _gauge("Bytes in the tier's root, as its collector counts them.", "tier"),
    "kvtiers_store_errors_total": _counter("Storage errors, by class.", "tier", "op", "error"),
    "kvtiers_stored_since_load_bytes": _gauge(
        "Bytes stored since the tier was last loaded from. Updated once a minute.", "tier"
    ),
    "kvtiers_stores_dropped_total": _counter("Blocks that were not stored, by reason.", "tier", "reason"),
    "kvtiers_verify_failures_total": _counter("Reads that failed verification, by reason.", "tier", "reason"),
}


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    total: float = 0.0


class Metrics:
    """The values of a table's metrics. One thread writes, any thread may read.

    Args:
        table: the metrics that may be used.
    """

    def __init__(self, table: Mapping[str, MetricDef] = METRICS) -> None:
        self.table = table
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], _Histogram] = {}
        self._watchers: list[set[tuple[str, tuple[str, ...]]]] = []

    def watch(self) -> set[tuple[str, tuple[str, ...]]]:
        """Return a set that collects name and labels of each new, changed or removed series.

        The set starts with all series. Only the thread that writes metrics reads and clears the set. So it need not
        check unchanged series.
        """
        watcher = {*self._values, *self._histograms}
        self._watchers.append(watcher)
        return watcher

    def total(self, name: str, labels: tuple[str, ...]) -> float | None:
        """Return the value of a counter or gauge, or the sum of a histogram; None: the series does not exist."""
        histogram = self._histograms.get((name, labels))
        return self._values.get((name, labels)) if histogram is None else histogram.total

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        key = self._key(name, labels)
        self._put(key, self._values.get(key, 0) + by)

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge."""
        self._put(self._key(name, labels), value)

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one observation to a histogram."""
        key = self._key(name, labels)
        bounds = self.table[name].bounds
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = _Histogram([0] * (len(bounds) + 1))
        histogram.counts[bisect_left(bounds, value)] += 1
        histogram.total += value
        self._tell(key)

    def forget(self, name: str, *labels: str) -> None:
        """Drop a gauge's samples whose labels begin with ``labels``, because their subject no longer exists."""
        for key in [key for key in self._values if key[0] == name and key[1][: len(labels)] == labels]:
            del self._values[key]
            self._tell(key)

    def value(self, name: str, *labels: str) -> float:
        """The value of a counter or gauge; 0 if it was never set."""
        return self._values.get(self._key(name, labels), 0)

    def snapshot(self) -> list[Sample]:
        """All samples, sorted by name and labels. Any thread may call it."""
        samples = [
            Sample(name, dict(zip(self.table[name].labels, labels, strict=True)), value)
            for (name, labels), value in self._values.copy().items()
        ]
        for (name, labels), histogram in self._histograms.copy().items():
            cumulative, count = [], 0
            for in_bucket in tuple(histogram.counts):
                count += in_bucket
                cumulative.append(count)
            named = dict(zip(self.table[name].labels, labels, strict=True))
            samples.append(Sample(name, named, count, tuple(cumulative), histogram.total))
        return sorted(samples, key=lambda sample: (sample.name, sorted(sample.labels.items())))

    def _put(self, key: tuple[str, tuple[str, ...]], value: float) -> None:
        if self._values.get(key) != value:
            self._values[key] = value
            self._tell(key)

    def _tell(self, key: tuple[str, tuple[str, ...]]) -> None:
        for watcher in self._watchers:
            watcher.add(key)

    def _key(self, name: str, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        if len(self.table[name].labels) != len(labels):
            raise KeyError(f"{name} takes the labels {self.table[name].labels}, not {labels}")
        return name, labels
