from __future__ import annotations

import pytest

from kvtiers.tiers.metrics import METRICS, MetricKind, Metrics


def test_counters_gauges_and_histograms_record_their_values() -> None:
    metrics = Metrics()
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=10)
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=5)
    metrics.set("kvtiers_slots", "free", value=7)
    metrics.set("kvtiers_slots", "free", value=6)
    for value in (0.0005, 0.001, 0.003, 99.0):
        metrics.observe("kvtiers_job_seconds", "fs", "load", value=value)
    assert metrics.value("kvtiers_bytes_total", "fs", "load") == 15
    assert metrics.value("kvtiers_bytes_total", "s3", "load") == 0
    samples = {sample.name: sample for sample in metrics.snapshot()}
    assert samples["kvtiers_slots"].value == 6
    assert samples["kvtiers_bytes_total"].labels == {"tier": "fs", "op": "load"}
    histogram = samples["kvtiers_job_seconds"]
    assert histogram.value == 4
    assert histogram.total == pytest.approx(99.0045)
    bounds = METRICS["kvtiers_job_seconds"].bounds
    assert histogram.buckets[bounds.index(0.001)] == 2  # upper bounds are inclusive, as Prometheus counts
    assert histogram.buckets[bounds.index(0.005)] == 3
    assert histogram.buckets[-1] == 4


def test_watcher_lists_new_changed_and_forgotten_series() -> None:
    metrics = Metrics()
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=0)
    metrics.observe("kvtiers_job_seconds", "fs", "load", value=2.0)
    changed, other = metrics.watch(), metrics.watch()
    assert changed == {("kvtiers_bytes_total", ("fs", "load")), ("kvtiers_job_seconds", ("fs", "load"))}
    changed.clear()
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=0)
    metrics.set("kvtiers_slots", "free", value=7)
    assert changed == {("kvtiers_slots", ("free",))}
    changed.clear()
    metrics.set("kvtiers_slots", "free", value=7)
    assert not changed
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=5)
    metrics.observe("kvtiers_job_seconds", "fs", "load", value=3.0)
    metrics.forget("kvtiers_slots")
    totals = {key: metrics.total(*key) for key in changed}
    assert totals == {
        ("kvtiers_bytes_total", ("fs", "load")): 5,
        ("kvtiers_job_seconds", ("fs", "load")): 5.0,
        ("kvtiers_slots", ("free",)): None,
    }
    assert other == totals.keys()  # each watcher clears its own set


def test_unknown_metric_names_and_labels_raise_key_error() -> None:
    with pytest.raises(KeyError):
        Metrics().inc("kvtiers_nonsense_total")
    with pytest.raises(KeyError, match="takes the labels"):
        Metrics().inc("kvtiers_bytes_total", "fs")


def test_metrics_table_follows_prometheus_conventions() -> None:
    assert list(METRICS) == sorted(METRICS)
    for name, definition in METRICS.items():
        assert name.startswith("kvtiers_")
        assert definition.help.endswith(".")
        assert (definition.kind is MetricKind.COUNTER) == name.endswith("_total")
        assert list(definition.bounds) == sorted(definition.bounds)
