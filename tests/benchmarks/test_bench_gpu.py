"""What the benchmark's columns are, by a clock that only the handlers move, and what it keeps, says and leaves out."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from kvtiers.connector.base import TransferResult
from tests import gpu_machine
from tests.benchmarks import bench_gpu
from tests.benchmarks.bench_gpu import GB, Memcpy, Shape, bench_cuda, measure
from tests.benchmarks.gpu_report import Report, Row, print_report


class Handler:
    """1 s to submit, 10 s to wait for each job, and reports copies of 4 s."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.success = True
        self.jobs: list[int] = []

    def transfer_async(self, job_id: int, spec: object) -> bool:
        self.clock[0] += 1
        self.jobs.append(job_id)
        return True

    def wait(self, job_ids: Collection[int]) -> None:
        assert set(self.jobs) <= set(job_ids)
        self.clock[0] += 10 * len(self.jobs)

    def get_finished(self) -> list[TransferResult]:
        self.clock[0] += 100
        jobs, self.jobs = self.jobs, []
        return [TransferResult(job_id, self.success, 1, 4.0) for job_id in jobs]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = [0.0]
    monkeypatch.setattr(bench_gpu, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    specs = (None, None), (None, None)
    return SimpleNamespace(shape=Shape(4096, 2, 5), store=Handler(clock), load=Handler(clock), specs=lambda: specs)


def test_job_time_spans_submit_to_end(bench: Any) -> None:
    store, load, both = measure(bench, 3, "auto", lambda _direction: 5.5)
    nbytes = bench.shape.nbytes
    for row in (store, load):
        assert (row.ratio, row.alone_ratio, row.submit_us, row.submit_next_us) == (0.5, 0.5, 1e6, 1e6)
        assert [row.gb_s * GB, row.alone_gb_s * GB, row.copy_gb_s * GB] == pytest.approx(
            [nbytes / 11, nbytes / 11, nbytes / 4]
        )
    assert (both.ratio, both.alone_ratio, both.submit_us, both.submit_next_us) == (0.25, 0.25, 1e6, 1e6)
    assert [both.gb_s * GB, both.alone_gb_s * GB, both.copy_gb_s * GB] == pytest.approx(
        [2 * nbytes / 22, 2 * nbytes / 22, 2 * nbytes / 4]
    )


@pytest.mark.parametrize("shape", [Shape(4096, 1, 1), Shape(1 << 20, 32, 1), Shape(1 << 20, 32, 8)])
def test_consecutive_jobs_number_2_to_64_and_aim_at_128_mib(bench: Any, shape: Shape) -> None:
    bench.shape, rows = shape, []
    submit = bench.store.transfer_async

    def count(job_id: int, spec: object) -> bool:
        rows.append(job_id + 1)
        return bool(submit(job_id, spec))

    bench.store.transfer_async = count
    measure(bench, 1, "auto", lambda _direction: 5.5)
    most = {4096: 64, 32 << 20: 4, 256 << 20: 2}[shape.nbytes]
    assert max(rows) == 2 * most - 1  # of both directions at once, in turn


def test_failed_transfer_raises_instead_of_giving_a_figure(bench: Any) -> None:
    bench.load.success = False
    with pytest.raises(RuntimeError, match="a transfer failed"):
        measure(bench, 3, "auto", lambda _direction: 5.5)


@pytest.mark.parametrize("direction", ["store", "load", "both"])
def test_reference_memcpy_moves_bytes_of_one_job_across_memory_of_all_jobs(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    moved: list[tuple[int, int]] = []

    def copyto(dst: Any, src: Any) -> None:
        assert dst.nbytes == src.nbytes == shape.nbytes
        moved.append((dst.ctypes.data, src.ctypes.data))

    shape = Shape(4096, 2, 10)
    memcpy = Memcpy(SimpleNamespace(shape=shape, tensors_bytes=2 * shape.nbytes, region_bytes=16 * 8192))  # type: ignore[arg-type]
    monkeypatch.setattr(np, "copyto", copyto)
    for _ in range(200):
        assert memcpy.seconds(direction) > 0
    reach = [max(at) - min(at) for at in zip(*moved, strict=True)]
    assert reach == ([shape.nbytes, 6 * 8192] if direction == "load" else [6 * 8192, shape.nbytes])


FACTS = {"device": "NVIDIA H100 80GB HBM3", "date": "2026-11-25", "against": "one 256 MiB pinned copy"}
SHAPES = [Shape(4096, 2, 1), Shape(8192, 2, 1), Shape(16384, 2, 1)]


def rows_of(bench: Any, method: str = "cpu") -> list[Row]:
    shape = bench.shape
    return [
        Row(method, way, shape.page_bytes, 2, shape.nbytes, 110.12, 112.6, 0.98, 110.12, 0.35, 110.12, 12345.6, 12345.6)
        for way in ("store", "load", "both")
    ]


@pytest.fixture
def run_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command over ``SHAPES``, of which the second is measured by what is given: status, page sizes kept."""
    monkeypatch.setattr(bench_gpu, "shapes", lambda _quick: SHAPES)
    monkeypatch.setattr(bench_gpu, "stall", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--device", "cpu", "--json", str(tmp_path / "rows.json")])

    def run(error: BaseException) -> tuple[object, list[int]]:
        def measured(bench: Any, *_: object) -> list[Row]:
            if bench.shape == SHAPES[1]:
                raise error
            return rows_of(bench)

        monkeypatch.setattr(bench_gpu, "measure", measured)
        try:
            status: object = bench_gpu.main()
        except BaseException as ended:
            status = ended
        kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
        return status, [row["page_bytes"] for row in kept if row["direction"] == "store"]

    return run


def test_failed_shape_is_reported_and_other_shapes_are_measured(
    run_cpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cpu(RuntimeError("a transfer failed; its cause was logged")) == (1, [4096, 16384])
    said = capsys.readouterr().out
    assert "measuring 4 KiB x 2\n" in said
    assert "FAILED: 8 KiB x 2: a transfer failed; its cause was logged" in said


def test_interrupted_benchmark_keeps_finished_rows(run_cpu: Any) -> None:
    end = KeyboardInterrupt()
    assert run_cpu(end) == (end, [4096])


def test_benchmark_fails_if_torch_cannot_use_gpu_and_skips_without_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_machine, "has_nvidia_gpu", lambda: True)
    assert bench_gpu.main() == 1
    assert "an NVIDIA GPU that torch" in capsys.readouterr().out
    monkeypatch.setattr(gpu_machine, "has_nvidia_gpu", lambda: False)
    assert bench_gpu.main() == 0
    assert "skipped: no CUDA device here" in capsys.readouterr().out


def test_row_names_the_copy_method_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver refuses every batch, and there is no triton."""

    class OnCuda:
        region = SimpleNamespace(is_pinned=lambda: False)

        def __init__(self, shape: Shape, _device: torch.device, *, method: str | None = None) -> None:
            if method == "kernel":
                raise ValueError("method 'kernel' needs triton")
            self.shape = shape

        def methods_used(self) -> list[str]:
            return ["copy", "copy"]

        def close(self) -> None:
            pass

    monkeypatch.setattr(bench_gpu, "shapes", lambda _quick: SHAPES)
    monkeypatch.setattr(bench_gpu, "Ceiling", lambda _device: None)
    monkeypatch.setattr(bench_gpu, "Bench", OnCuda)
    monkeypatch.setattr(bench_gpu, "measure", lambda bench, _rounds, method, _reference: rows_of(bench, method))
    monkeypatch.setattr(bench_gpu, "matmul_beside", lambda *_: {"page_bytes": 8192, "slower": 0.01})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    console = Console(file=io.StringIO(), width=120)
    report = Report(FACTS, None, console, console.status(""))
    bench_cuda(False, report)
    print_report(report.data, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert {(row["method"], row["copied_by"]) for row in report.data["rows"]} == {
        ("auto", "copy/copy, unpinned"),
        ("copy", "copy/copy, unpinned"),
    }
    assert report.failed
    assert "FAILED: 4 KiB x 2 by batch: stores/loads went by copy/copy; why was logged" in said
    assert said.count("skipped: method 'kernel' needs triton") == 1
    assert "auto: copy/copy, unpinned" in said
