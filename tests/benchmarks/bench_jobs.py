"""Small and large jobs through the local-fs tier, next to vLLM's own ``fs`` tier where vLLM is installed.

    python -m tests.benchmarks.bench_jobs [--rounds N] [--where FOLDER] [--json FILE]

Both tiers move the same blocks between the same memory and the same file system, in jobs that are all submitted at
once, as an engine does for several prompts. Ours seals and verifies each block; vLLM's does neither. vLLM's tier runs
its C extension with 2 + 2 threads. Who goes first changes each round, and the median over the rounds is printed.

- engine: what the main thread of this process does between two polls: "idle" sleeps, "busy" runs Python, "half" both.
- CPU: of this process and its workers, per block.
- jitter: how late a thread with a period of 1 ms wakes up in this process while the jobs run, 99th percentile. A
  scheduler's thread is delayed as much.
- latency: of a job of one block, from its submission until its result was taken, polled every 50 µs.

The first lines print the load average, the number of cores, and memcpy's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import psutil
from rich.console import Console
from rich.table import Table

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.config.tier_options import default_threads
from tests.benchmarks.bench_fs import MIB, Options, Setup, free_pages, fresh, memcpy_speed, percentile

KIB = 1 << 10
#: Block size, blocks in a job, blocks in all.
CASES = ((128 * KIB, 1, 256), (128 * KIB, 32, 1024), (MIB, 8, 256), (8 * MIB, 8, 64))
#: Seconds of sleep and of Python between two polls of the engine's thread.
ENGINES = {"idle": (0.0005, 0.0), "half": (0.0005, 0.0005), "busy": (0.0, 0.001)}
LATENCY_JOBS = 200
VLLM_THREADS = 2


class Side(Protocol):
    """A tier under test."""

    def submit(self, job: JobMetadata, *, is_load: bool) -> None:
        """Submit a job."""

    def finished(self) -> list[bool]:
        """Whether each job that ended since the last call succeeded."""

    def path(self, key: Any) -> str:
        """The file of a block."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Sample:
    """One direction of one case, one round. Speeds in MB/s, CPU in µs a block, jitter in ms."""

    speed: float
    cpu_us: float
    jitter_p99: float


@dataclass(frozen=True)
class Row:
    """Medians of one direction of one case."""

    engine: str
    operation: str
    block_bytes: int
    job_blocks: int
    jobs: int
    ours: Sample
    vllm: Sample | None
    ratio: float | None


class Ours:
    """kvtiers' tier."""

    def __init__(self, setup: Setup, root: Path) -> None:
        self._root = root
        self._tier = setup.tier(root)

    def submit(self, job: JobMetadata, *, is_load: bool) -> None:
        (self._tier.submit_load if is_load else self._tier.submit_store)(job)

    def finished(self) -> list[bool]:
        return [result.success for result in self._tier.get_finished()]

    def path(self, key: Any) -> str:
        return f"{self._root}/{self._tier.mapper.relative_name(key)}"

    def close(self) -> None:
        self._tier.shutdown()


class Vllm:
    """vLLM's tier."""

    def __init__(self, setup: Setup, root: Path) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False)
        config = SimpleNamespace(
            model=SimpleNamespace(name="bench", dtype="float16"),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
            groups=[],
            canonical_layout=False,
            kv_cache_layout=None,
            replicated_layout=False,
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1)
        self._tier = FileSystemTierManager(spec, setup.view, "fs", str(root), VLLM_THREADS, VLLM_THREADS)

    def submit(self, job: JobMetadata, *, is_load: bool) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        theirs = TransferJob(
            job_id=job.job_id, keys=list(job.keys), chunk_ids=job.block_ids, is_promotion=is_load, req_context=None
        )
        (self._tier.submit_load if is_load else self._tier.submit_store)(theirs)

    def finished(self) -> list[bool]:
        return [result.success for result in self._tier.get_finished_jobs()]

    def path(self, key: Any) -> str:
        return str(self._tier.file_mapper.get_file_name(key))

    def close(self) -> None:
        self._tier.shutdown()


def has_vllm() -> bool:
    """Whether vLLM's tier and its C extension can be imported."""
    try:
        import vllm.fs_io_C
        import vllm.v1.kv_offload.tiering.fs.manager  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def ticking(late_ms: list[float]) -> Iterator[None]:
    """Collect how late a thread with a period of 1 ms wakes up."""
    ends = threading.Event()

    def tick() -> None:
        while not ends.is_set():
            start = time.perf_counter()
            time.sleep(0.001)
            late_ms.append((time.perf_counter() - start) * 1e3 - 1)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def run_python(seconds: float) -> None:
    """Hold the GIL for so long, as a scheduler does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def run_jobs(setup: Setup, side: Side, engine: str, job_blocks: int, *, is_load: bool) -> Sample:
    """Submit all jobs at once and wait for them."""
    sleep_s, python_s = ENGINES[engine]
    late_ms: list[float] = []
    jobs = [setup.job(slice(start, start + job_blocks)) for start in range(0, setup.count, job_blocks)]
    with ticking(late_ms):
        cpu_before, start = cpu_s(), time.perf_counter()
        for job in jobs:
            side.submit(job, is_load=is_load)
        left = len(jobs)
        while left:
            ended = side.finished()
            assert all(ended), "a job failed"
            left -= len(ended)
            if not ended:
                time.sleep(sleep_s)
                run_python(python_s)
        seconds, used = time.perf_counter() - start, cpu_s() - cpu_before
    return Sample(setup.count * setup.block_bytes / seconds / 1e6, used / setup.count * 1e6, percentile(late_ms, 99))


def measure(where: Path, engine: str, block_bytes: int, job_blocks: int, count: int, rounds: int) -> list[Row]:
    """Both directions of one case."""
    setup = Setup(block_bytes, block_bytes * count, Options(default_threads(), "auto", job_blocks * block_bytes))
    makers: dict[str, Callable[[Setup, Path], Side]] = {"ours": Ours}
    if has_vllm():
        makers["vllm"] = Vllm
    samples: dict[tuple[str, bool], list[Sample]] = {}
    for number in range(rounds + 1):  # the first one warms up
        with fresh(where) as root:
            for name in makers:
                (root / name).mkdir()
            sides = {name: make(setup, root / name) for name, make in makers.items()}
            for side in sides.values():
                for key in setup.keys:
                    os.makedirs(os.path.dirname(side.path(key)), mode=0o700, exist_ok=True)
            time.sleep(0.5)  # workers start and map the region while an engine loads its model
            for is_load in (False, True):
                for name in sorted(sides, reverse=bool(number % 2)):
                    if not is_load:
                        free_pages(setup.region, where)
                    sample = run_jobs(setup, sides[name], engine, job_blocks, is_load=is_load)
                    if number:
                        samples.setdefault((name, is_load), []).append(sample)
            for side in sides.values():
                side.close()
    rows = []
    for is_load in (False, True):
        ours, theirs = samples["ours", is_load], samples.get(("vllm", is_load))
        ratio = None
        if theirs:
            ratio = statistics.median(a.speed / b.speed for a, b in zip(ours, theirs, strict=True))
        operation = "load" if is_load else "store"
        middle = median(theirs) if theirs else None
        rows.append(
            Row(engine, operation, block_bytes, job_blocks, -(-count // job_blocks), median(ours), middle, ratio)
        )
    return rows


def median(samples: list[Sample]) -> Sample:
    """The median of each field."""
    return Sample(*(statistics.median(values) for values in zip(*(asdict(s).values() for s in samples), strict=True)))


def latency_us(where: Path, make: Callable[[Setup, Path], Side]) -> float:
    """Of loading one block of 128 KiB by a job of its own."""
    setup = Setup(128 * KIB, 64 * 128 * KIB, Options(default_threads(), "auto", 128 * KIB))
    times = []
    with fresh(where) as root:
        side = make(setup, root)
        time.sleep(0.5)
        for number in range(LATENCY_JOBS + 1):
            start = time.perf_counter()
            side.submit(setup.job(slice(0, 1)), is_load=number > 0)
            while not (ended := side.finished()):
                time.sleep(0.00005)
            assert ended == [True]
            if number:
                times.append(time.perf_counter() - start)
            time.sleep(0.001)
        side.close()
    return statistics.median(times) * 1e6


def show(rows: list[Row], latencies: dict[str, float]) -> None:
    """Print the table."""
    table = Table(title="jobs submitted all at once, sealed and verified; vLLM's tier does neither; medians")
    for column in (
        "engine",
        "",
        "block",
        "jobs",
        "MB/s",
        "vLLM",
        "ratio",
        "CPU µs/block",
        "vLLM",
        "jitter p99 ms",
        "vLLM",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        theirs = row.vllm
        table.add_row(
            row.engine,
            row.operation,
            f"{row.block_bytes // KIB} KiB",
            f"{row.jobs} x {row.job_blocks}",
            f"{row.ours.speed:.0f}",
            f"{theirs.speed:.0f}" if theirs else "-",
            f"{row.ratio:.2f}" if row.ratio else "-",
            f"{row.ours.cpu_us:.0f}",
            f"{theirs.cpu_us:.0f}" if theirs else "-",
            f"{row.ours.jitter_p99:.2f}",
            f"{theirs.jitter_p99:.2f}" if theirs else "-",
        )
    console = Console(width=None if os.isatty(1) else 150)
    console.print(table)
    console.print("latency of loading one block: " + ", ".join(f"{n} {us:.0f} µs" for n, us in latencies.items()))


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--where", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    memcpy = memcpy_speed(Setup(MIB, 64 * MIB, Options(1, "auto", MIB)))
    load = os.getloadavg()[0]
    print(f"load {load:.2f} on {os.cpu_count()} cores, memcpy {memcpy:.0f} MB/s, {args.where}")
    if not has_vllm():
        print("vLLM is not installed in this environment: its columns are empty (make e2e-env makes one that has it)")
    rows = [row for engine in ENGINES for case in CASES for row in measure(args.where, engine, *case, args.rounds)]
    latencies = {"ours": latency_us(args.where, Ours)}
    if has_vllm():
        latencies["vLLM"] = latency_us(args.where, Vllm)
    show(rows, latencies)
    if args.json:
        measured = {"load": load, "cores": os.cpu_count(), "memcpy": memcpy, "latency_us": latencies}
        args.json.write_text(json.dumps(measured | {"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
