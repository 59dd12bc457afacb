"""What the benchmark's columns are: a clock that only the handlers move."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from connector.base import TransferResult
from tests.benchmarks import bench_gpu
from tests.benchmarks.bench_gpu import GB, Shape, measure


class Handler:
    """1 s to submit, 10 s to wait for, and reports a copy of 4 s."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.success = True

    def transfer_async(self, job_id: int, spec: object) -> bool:
        self.clock[0] += 1
        return True

    def wait(self, job_ids: Collection[int]) -> None:
        self.clock[0] += 10

    def get_finished(self) -> list[TransferResult]:
        self.clock[0] += 100
        return [TransferResult(0, self.success, 1, 4.0)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = [0.0]
    monkeypatch.setattr(bench_gpu, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    specs = (None, None), (None, None)
    return SimpleNamespace(shape=Shape(4096, 2, 5), store=Handler(clock), load=Handler(clock), specs=lambda: specs)


def test_a_jobs_time_is_from_its_submit_to_its_end(bench: Any) -> None:
    store, load, both = measure(bench, 3, "auto", lambda _direction: 5.5)
    nbytes = bench.shape.nbytes
    for row in (store, load):
        assert (row.ratio, row.submit_us, row.submit_next_us) == (0.5, 1e6, 1e6)
        assert [row.gb_s * GB, row.copy_gb_s * GB] == pytest.approx([nbytes / 11, nbytes / 4])
    assert (both.ratio, both.submit_us) == (0.25, 1e6)
    assert [both.gb_s * GB, both.copy_gb_s * GB] == pytest.approx([2 * nbytes / 22, 2 * nbytes / 4])


def test_a_failed_transfer_is_no_figure(bench: Any) -> None:
    bench.load.success = False
    with pytest.raises(RuntimeError, match="a transfer failed"):
        measure(bench, 3, "auto", lambda _direction: 5.5)
