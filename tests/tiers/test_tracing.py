"""Spans of jobs, as an SDK receives them."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.builtin import BuiltInTier
from tests.identity import FakeSpec, block_key

ROW_BYTES = 4096
KEYS = [block_key(n) for n in range(3)]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)  # a process's provider can be set only once
    return exporter


def make_tier(root: Path, **options: Any) -> BuiltInTier:
    region = np.zeros((4, ROW_BYTES), np.int8)
    return BuiltInTier(
        FakeSpec(),
        region.data,
        "fs",
        root_dir=str(root),
        n_read_threads=1,
        n_write_threads=1,
        min_free=0,
        name="disk",
        **options,
    )


@pytest.fixture
def tier(tmp_path: Path, spans: InMemorySpanExporter) -> Iterator[BuiltInTier]:
    made = make_tier(tmp_path / "kv")
    yield made
    made.shutdown()


def run(tier: BuiltInTier, job: JobMetadata, *, is_load: bool) -> None:
    (tier.submit_load if is_load else tier.submit_store)(job)
    tier.drain_jobs()
    tier.get_finished()


def test_each_job_is_a_span(tier: BuiltInTier, spans: InMemorySpanExporter) -> None:
    before = time.time_ns()
    run(tier, JobMetadata(1, KEYS[:2], np.array([0, 1], np.int32)), is_load=False)
    run(tier, JobMetadata(2, KEYS, np.array([0, 1, 2], np.int32)), is_load=True)
    run(tier, JobMetadata(3, KEYS[2:], np.array([0], np.int32)), is_load=True)
    stored, partial, failed = spans.get_finished_spans()
    assert stored.name == "kvtiers store"
    assert stored.attributes == {
        "kvtiers.tier": "disk",
        "kvtiers.outcome": "ok",
        "kvtiers.blocks": 2,
        "kvtiers.bytes_moved": 2 * ROW_BYTES,
    }
    assert stored.status.is_unset
    assert stored.start_time is not None
    assert stored.end_time is not None
    assert before <= stored.start_time <= stored.end_time <= time.time_ns()
    assert partial.attributes is not None
    assert (partial.name, partial.attributes["kvtiers.outcome"]) == ("kvtiers load", "partial")
    assert not partial.status.is_ok
    assert failed.status.description == "failed"


def test_a_job_that_is_refused_is_a_span_too(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    tier = make_tier(tmp_path / "kv")
    tier._circuit.trip("a test")
    run(tier, JobMetadata(1, KEYS, np.array([0, 1, 2], np.int32)), is_load=True)
    tier.shutdown()
    (refused,) = spans.get_finished_spans()
    assert refused.name == "kvtiers load"
    assert refused.attributes is not None
    assert refused.attributes["kvtiers.blocks"] == 3
    assert refused.status.description == "failed"


def test_tier_without_the_library_has_no_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "opentelemetry":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    tier = make_tier(tmp_path / "kv")
    run(tier, JobMetadata(1, KEYS, np.array([0, 1, 2], np.int32)), is_load=False)
    tier.shutdown()
    assert tier.metrics.value("kvtiers_jobs_total", "disk", "store", "ok") == 1
