"""What vLLM is told of our metrics."""

from __future__ import annotations

import math

import pytest

from kvtiers.connector.vllm.metrics import StatsExporter
from kvtiers.tiers.errors import SealReason
from kvtiers.tiers.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.inc("kvtiers_verify_failures_total", "fs", SealReason.AUTHENTICATION, by=0)
    metrics.set("kvtiers_jobs_in_flight", "fs", value=0)
    return metrics


def test_each_series_is_exported_once_at_zero(metrics: Metrics) -> None:
    """vLLM's endpoint has a series once it is told of it. Prometheus sees no increase in one that begins at 500."""
    exporter = StatsExporter(metrics)
    first = exporter.take()
    assert first is not None
    assert first.data["data"] == {
        "vllm:kvtiers_verify_failures": {("fs", "authentication"): 0},
        "vllm:kvtiers_jobs_in_flight": {("fs",): 0},
    }
    assert {type(label) for values in first.data["data"].values() for labels in values for label in labels} == {str}
    assert exporter.take() is None
    metrics.inc("kvtiers_verify_failures_total", "fs", "authentication", by=500)
    second = exporter.take()
    assert second is not None
    assert second.data["data"] == {"vllm:kvtiers_verify_failures": {("fs", "authentication"): 500}}


def test_only_changed_series_are_exported(metrics: Metrics) -> None:
    exporter = StatsExporter(metrics)
    exporter.take()
    for _ in range(2):
        metrics.set("kvtiers_jobs_in_flight", "fs", value=3)
        metrics.inc("kvtiers_bytes_total", "fs", "load", by=0)
        stats = exporter.take()
        told = {} if stats is None else stats.data["data"]
        metrics.inc("kvtiers_bytes_total", "fs", "load", by=10)
    assert told == {"vllm:kvtiers_bytes": {("fs", "load"): 10}}


def test_unchanged_series_are_not_read(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for stats in every step of its scheduler, so the call must be cheap."""
    exporter = StatsExporter(metrics)
    exporter.take()
    metrics.inc("kvtiers_bytes_total", "fs", "load", by=10)
    read = []
    total = metrics.total

    def counting(name: str, labels: tuple[str, ...]) -> float | None:
        read.append((name, labels))
        return total(name, labels)

    monkeypatch.setattr(metrics, "snapshot", None)
    monkeypatch.setattr(metrics, "total", counting)
    assert exporter.take() is not None
    assert exporter.take() is None
    assert read == [("kvtiers_bytes_total", ("fs", "load"))]


def test_forgotten_gauge_is_exported_once_as_nan(metrics: Metrics) -> None:
    """vLLM's endpoint shows what it was told last for ever."""
    exporter = StatsExporter(metrics)
    metrics.set("kvtiers_storage_used_bytes", "fs", value=5)
    exporter.take()
    metrics.forget("kvtiers_storage_used_bytes", "fs")
    stats = exporter.take()
    assert stats is not None
    ((labels, value),) = stats.data["data"]["vllm:kvtiers_storage_used_bytes"].items()
    assert (labels, math.isnan(value)) == (("fs",), True)
    assert exporter.take() is None  # once
    metrics.set("kvtiers_storage_used_bytes", "fs", value=5)
    stats = exporter.take()
    assert stats is not None
    assert stats.data["data"] == {"vllm:kvtiers_storage_used_bytes": {("fs",): 5}}
