"""How fast KV moves between the engine's tensors and the region: ``python -m tests.benchmarks.bench_gpu``.

On CUDA next to one large pinned copy (the ceiling) and a loop of ``copy_``, with every method by itself, and what a
matmul beside it loses. On CPU next to one memcpy of the same bytes, and what a thread that wants to run every
millisecond loses. Jobs are timed from ``transfer_async`` to their end, stores, loads or both at once, several in a row
and one alone: handing them to a thread, planning and merging are in it. The goals are of jobs in a row, which say what
the link is used to; one alone says besides how long two threads take to wake one another. Figures are medians; ratios
are medians of ratios taken within one round, so that what else the machine does hits both sides.

Rows are written as they are measured. A shape that fails is said and left out, as is one that went by another method
than the one asked for; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import mmap
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from kvtiers.connector.transfer.gpu_copy import GpuCopier
from kvtiers.connector.transfer.gpu_handler import create_handlers
from tests import gpu_machine
from tests.benchmarks.gpu_report import KIB, Report, Row, print_report, save_png, target

LAYERS_MAX = 32
MIB, GB = 1 << 20, 1e9
MEMORY_BYTES_MIN = (
    256 * MIB
)  # of all tensors, and of the region: a cache that a CPU's L3 could hold is none of an engine
QUEUED_BYTES, QUEUED_JOBS_MAX = 128 * MIB, 64
REFERENCES_MAX = (
    4  # beside the jobs of one row: a ceiling of 256 MiB beside each of 64 jobs would take most of the time
)


@dataclass(frozen=True)
class Shape:
    """Pages of one job: ``layers`` tensors, ``blocks`` blocks of each."""

    page_bytes: int
    layers: int
    blocks: int

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.layers * self.blocks

    def __str__(self) -> str:
        return f"{self.page_bytes // KIB} KiB x {self.layers * self.blocks}"


class Bench:
    """Tensors, a region and handlers for jobs of one shape, with random ids."""

    def __init__(self, shape: Shape, device: torch.device, **options: Any) -> None:
        self.shape, self._rng = shape, np.random.default_rng(0)
        least = MEMORY_BYTES_MIN // (shape.layers * shape.page_bytes)
        self._num_blocks = max(2 * shape.blocks, least)
        self._num_slots = max(shape.blocks + shape.blocks // 2 + 1, least)
        tensors = [kv_tensor(self._num_blocks, shape.page_bytes, device) for _ in range(shape.layers)]
        row_bytes = -(-shape.layers * shape.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        region = host_bytes(self._num_slots * row_bytes).view(self._num_slots, row_bytes)
        views = [region[:, at * shape.page_bytes :][:, : shape.page_bytes] for at in range(shape.layers)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, shape.page_bytes) for tensor in tensors],
            [[CanonicalKVCacheRef(at, shape.page_bytes) for at in range(shape.layers)]],
        )
        self.region, self.region_bytes, self.tensors_bytes = region, region.nbytes, sum(t.nbytes for t in tensors)
        self.store, self.load = create_handlers(caches, views, 1, **options)

    def specs(self) -> tuple[TransferSpec, TransferSpec]:
        """A store and a load of random blocks and slots."""

        def ends() -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
            return (
                GPULoadStoreSpec(self._rng.choice(self._num_blocks, self.shape.blocks, replace=False)),
                CPULoadStoreSpec(self._rng.choice(self._num_slots, self.shape.blocks, replace=False)),
            )

        gpu, cpu = ends()
        other_gpu, other_cpu = ends()
        return (gpu, cpu), (other_cpu, other_gpu)

    def methods_used(self) -> list[str]:
        """Of stores and of loads (CUDA)."""
        copiers = [handler.copier for handler in (self.store, self.load)]
        return ["+".join(sorted(copier.methods_used)) for copier in copiers if isinstance(copier, GpuCopier)]

    def close(self) -> None:
        self.store.shutdown()
        self.load.shutdown()


def host_bytes(nbytes: int) -> torch.Tensor:
    """Touched, page-aligned memory of its own, as the region and an engine's large CPU tensors are."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.int8).fill_(1)


def kv_tensor(num_blocks: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return host_bytes(num_blocks * page_bytes).view(num_blocks, page_bytes)
    return torch.ones((num_blocks, page_bytes), dtype=torch.int8, device=device)


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def finished(handler: OffloadingHandler) -> list[TransferResult]:
    """What ended since the last call.

    Raises:
        RuntimeError: a transfer failed.
    """
    results = handler.get_finished()
    if not all(result.success for result in results):
        raise RuntimeError("a transfer failed; its cause was logged")
    return results


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds: from the first submit to the end of the last job, of the slowest copy as reported, of each submit."""

    all_s: float
    copy_s: float
    submits_s: list[float]


def transfer(jobs: Sequence[tuple[OffloadingHandler, TransferSpec]]) -> Taken:
    """Submit all, then wait for all."""
    submits = []
    started = time.perf_counter()
    for job_id, (handler, spec) in enumerate(jobs):
        submits.append(timed(lambda: handler.transfer_async(job_id, spec)))  # noqa: B023 - called here
    handlers = dict.fromkeys(handler for handler, _ in jobs)
    for handler in handlers:
        handler.wait(range(len(jobs)))
    ended = time.perf_counter()
    results = [result for handler in handlers for result in finished(handler)]
    assert len(results) == len(jobs)
    return Taken(ended - started, max(result.transfer_time for result in results), submits)


def measure(bench: Bench, rounds: int, method: str, reference: Callable[[str], float]) -> list[Row]:
    """Rows for store, load and both; ``reference(direction)`` is seconds for the bytes of one job."""
    shape = bench.shape
    queued = min(max(QUEUED_BYTES // shape.nbytes, 2), QUEUED_JOBS_MAX)

    def jobs(direction: str, count: int) -> Sequence[tuple[OffloadingHandler, TransferSpec]]:
        pairs = [pair for _ in range(count) for pair in zip((bench.store, bench.load), bench.specs(), strict=True)]
        return pairs if direction == "both" else pairs[direction == "load" :: 2]

    samples: dict[str, list[tuple[float, ...]]] = {"store": [], "load": [], "both": []}
    for each in range(rounds + 1):
        for direction, kept in samples.items():
            one, many = jobs(direction, 1), jobs(direction, queued)
            alone_reference_s, alone = reference(direction), transfer(one)
            references = min(queued, REFERENCES_MAX)
            reference_s = sum(reference(direction) for _ in range(references)) / references
            row = transfer(many)
            sample = (
                row.all_s / queued,
                reference_s,
                reference_s / row.all_s * queued,
                alone.all_s,
                alone_reference_s / alone.all_s,
                alone.copy_s,
                statistics.mean(alone.submits_s),
                statistics.median(row.submits_s[1:]),
            )
            if each:  # the first round warms up
                kept.append(sample)
    rows = []
    for direction, kept in samples.items():
        nbytes = shape.nbytes * (2 if direction == "both" else 1)
        took_s, reference_s, ratio, alone_s, alone_ratio, copy_s, submit_s, next_s = (
            statistics.median(column) for column in zip(*kept, strict=True)
        )
        rows.append(
            Row(
                method=method,
                direction=direction,
                page_bytes=shape.page_bytes,
                pages=shape.layers * shape.blocks,
                job_bytes=shape.nbytes,
                gb_s=nbytes / took_s / GB,
                reference_gb_s=nbytes / reference_s / GB,
                ratio=ratio,
                alone_gb_s=nbytes / alone_s / GB,
                alone_ratio=alone_ratio,
                copy_gb_s=nbytes / copy_s / GB,
                submit_us=submit_s * 1e6,
                submit_next_us=next_s * 1e6,
            )
        )
    return rows


def shapes(quick: bool) -> Iterator[Shape]:
    """Page sizes 4 KiB to 4 MiB, 1 to 4,096 pages a job, over at most 32 tensors; then the demo's cache."""
    bytes_max = (128 if quick else 1024) * MIB
    for page_bytes in (4 * KIB, 16 * KIB, 64 * KIB, 512 * KIB, 4 * MIB) if quick else (
        4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB,
    ):  # fmt: skip
        for pages in (1, 64, 1024) if quick else (1, 16, 256, 1024, 4096):
            layers = min(pages, LAYERS_MAX)
            if page_bytes * pages <= bytes_max:
                yield Shape(page_bytes, layers, pages // layers)
    yield Shape(48 * KIB, 30, 64)


# ---- CPU -------------------------------------------------------------------------------------------------------


class Memcpy:
    """One memcpy of a job's bytes, each time at another place in memory as large as the tensors' and the region's."""

    def __init__(self, bench: Bench) -> None:
        self._tensors, self._region = host_bytes(bench.tensors_bytes).numpy(), host_bytes(bench.region_bytes).numpy()
        self._nbytes, self._rng = bench.shape.nbytes, np.random.default_rng(1)

    def seconds(self, direction: str) -> float:
        tensors, region = self._piece_of(self._tensors), self._piece_of(self._region)
        dst, src = (tensors, region) if direction == "load" else (region, tensors)
        return timed(lambda: np.copyto(dst, src)) * (2 if direction == "both" else 1)

    def _piece_of(self, memory: NDArray[np.int8]) -> NDArray[np.int8]:
        start = int(self._rng.integers((len(memory) - self._nbytes) // mmap.PAGESIZE + 1)) * mmap.PAGESIZE
        return memory[start : start + self._nbytes]


def bench_cpu(quick: bool, report: Report) -> None:
    device = torch.device("cpu")
    for shape in shapes(quick):
        with report.measuring(str(shape)), closing(Bench(shape, device)) as bench:
            report.add("rows", measure(bench, 7 if quick else 15, "cpu", Memcpy(bench).seconds))
    with report.measuring("what a 1 ms thread loses"), closing(Bench(Shape(48 * KIB, 30, 64), device)) as bench:
        report.add("stall_ms", stall(bench, 2 if quick else 10))


def stall(bench: Bench, seconds: float) -> dict[str, float]:
    """How late a thread of 1 ms period runs: alone, and while copies in both directions never end."""

    def late_ms(busy: bool) -> list[float]:
        samples, job_id = [], 0
        handlers = (bench.store, bench.load)
        end = time.perf_counter() + seconds
        due = time.perf_counter()
        in_flight = 0
        while due < end:
            if busy and in_flight < 6:
                for handler, spec in zip(handlers, bench.specs(), strict=True):
                    in_flight += handler.transfer_async(job_id, spec)
                job_id += 1
            for handler in handlers:
                in_flight -= len(finished(handler))
            due = max(due + 1e-3, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            samples.append((time.perf_counter() - due) * 1e3)
        return samples

    idle, busy = np.array(late_ms(False)), np.array(late_ms(True))
    return {
        f"{name}_p{at}": float(np.percentile(samples, at))
        for name, samples in (("idle", idle), ("busy", busy))
        for at in (50, 99)
    }


# ---- CUDA ------------------------------------------------------------------------------------------------------


class Ceiling:
    """One pinned ``cudaMemcpyAsync`` of 256 MiB, scaled to a job's bytes."""

    def __init__(self, device: torch.device) -> None:
        nbytes = 256 * MIB
        self._host = [torch.ones(nbytes, dtype=torch.int8, pin_memory=True) for _ in range(2)]
        self._gpu = [torch.ones(nbytes, dtype=torch.int8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def seconds(self, direction: str, nbytes: int) -> float:
        """For ``nbytes`` each way."""
        ways = {"store": (0,), "load": (1,), "both": (0, 1)}[direction]
        torch.cuda.synchronize()

        def run() -> None:
            for way in ways:
                with torch.cuda.stream(self._streams[way]):
                    ends = (self._host[way], self._gpu[way]) if way == 0 else (self._gpu[way], self._host[way])
                    ends[0].copy_(ends[1], non_blocking=True)
            for way in ways:
                self._streams[way].synchronize()

        return timed(run) * nbytes / self._host[0].nbytes


def bench_cuda(quick: bool, report: Report) -> None:
    device = torch.device("cuda")
    ceiling = Ceiling(device)
    for shape in shapes(quick):
        for method in (None, "batch", "kernel", "copy"):
            if method == "copy" and shape.layers * shape.blocks > 1024:
                report.say("left out: more than 1,024 pages by copy")
                continue
            with report.measuring(f"{shape} by {method or 'the thresholds'}"):
                try:
                    bench = Bench(shape, device, method=method)
                except ValueError as error:
                    report.say(f"skipped: {error}")
                    continue
                with closing(bench):
                    report.add("rows", cuda_rows(bench, 7 if quick else 15, method, ceiling))
            torch.cuda.empty_cache()
    beside = []
    for page_kib in (8, 64, 512):
        shape = Shape(page_kib * KIB, 32, 2048 // page_kib)
        with report.measuring(f"a matmul beside {page_kib} KiB pages"), closing(Bench(shape, device)) as bench:
            beside.append(matmul_beside(bench, device))
            report.add("matmul", beside)


def cuda_rows(bench: Bench, rounds: int, method: str | None, ceiling: Ceiling) -> list[Row]:
    """Rows that say what copied.

    Raises:
        RuntimeError: a transfer failed, or went by another method than this one.
    """
    nbytes = bench.shape.nbytes
    rows = measure(bench, rounds, method or "auto", lambda direction: ceiling.seconds(direction, nbytes))
    used = bench.methods_used()
    if method is not None and used != [method, method]:
        raise RuntimeError(f"stores/loads went by {'/'.join(used)}; why was logged")
    copied_by = "/".join(used) + ("" if bench.region.is_pinned() else ", unpinned")
    return [replace(row, copied_by=copied_by) for row in rows]


def matmul_beside(bench: Bench, device: torch.device) -> dict[str, float]:
    """How much longer a bf16 matmul of 8192^3 takes while stores and loads never end, in turn with some alone."""
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device=device) for _ in range(2))
    handlers = (bench.store, bench.load)

    def matmul_ms(busy: bool) -> float:
        samples: list[float] = []
        in_flight = job_id = 0
        for _ in range(25):
            # The copies wait for what is queued before them; a few jobs ahead keep both directions busy throughout.
            while busy and in_flight < 16:
                for handler, spec in zip(handlers, bench.specs(), strict=True):
                    in_flight += handler.transfer_async(job_id, spec)
                job_id += 1
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            torch.mm(a, b)
            end.record()
            end.synchronize()
            samples.append(float(start.elapsed_time(end)))
            in_flight -= sum(len(finished(handler)) for handler in handlers)
        for handler in handlers:
            handler.wait(range(job_id))
            finished(handler)
        return statistics.median(samples[5:])

    rounds = [(matmul_ms(False), matmul_ms(True)) for _ in range(9)][1:]  # the first round warms up
    return {
        "page_bytes": bench.shape.page_bytes,
        "alone_ms": statistics.median(alone for alone, _ in rounds),
        "beside_ms": statistics.median(beside for _, beside in rounds),
        "slower": statistics.median(beside / alone for alone, beside in rounds) - 1,
    }


# ---- command ---------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    try:
        models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        models = []
    return f"{models[0] if models else platform.machine()} x{torch.get_num_threads()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--json", type=Path, help="file to write, or folder (then named after device and date)")
    parser.add_argument("--png", type=Path, help="likewise; needs matplotlib")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if args.device == "cuda":
        try:
            reason = gpu_machine.why_no_cuda()
        except gpu_machine.UnusableGpuError as error:
            console.print(f"FAILED: {error}", markup=False, soft_wrap=True)
            return 1
        if reason is not None:
            console.print(f"skipped: {reason}; --device cpu measures the CPU path")
            return 0
    facts = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "against": "one 256 MiB pinned copy" if args.device == "cuda" else "one memcpy of the same bytes",
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    path = None if args.json is None else target(args.json, facts, ".json")
    with console.status("measuring") as status:
        report = Report(facts, path, console, status)
        (bench_cuda if args.device == "cuda" else bench_cpu)(args.quick, report)
    print_report(report.data, console)
    if path is not None and path.exists():
        console.print(f"wrote {path}")
    if args.png is not None:
        save_png(report.data, target(args.png, facts, ".png"), console)
    return int(report.failed)


if __name__ == "__main__":
    faulthandler.enable()  # a driver may take the process with it
    sys.exit(main())
