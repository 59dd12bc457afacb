"""local-fs through the whole tier (sealed and verified) next to the raw-file ceiling and memcpy.

    python -m tests.benchmarks.bench_fs [--quick] [--json FILE] [--where FOLDER ...] [--job-mib N ...]

Ratios are what counts: each round moves the blocks in jobs, each by raw files and by ours, who goes first in turn,
and the median of the rounds' ratios is reported, so that a machine whose speed drifts, or a host that is slow to give
pages, hits both. The raw ceiling is the same number of files of the same payload at the same paths, made and read in
batches by the same number of threads with plain open, pwritev / preadv and close: no seal, no check, no publish
protocol. "main busy" is the tier's speed beside a main thread that runs Python without a pause. Stores are measured
twice, each time into fresh roots: with each block's folders still to be made (both sides make them), and with folders
that are there. Nothing is deleted and written again: ext4 looks at each inode that was deleted in the last minutes
before it takes one, which decided everything else.
Before each job is stored as many pages are freed as it takes: a guest gives pages that were free for a second or two
back to its host, and to get them again costs more than to write them (1 MiB in 1.1 ms against 0.4).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.config.tier_options import default_threads
from tests.identity import FakeSpec, block_key
from tests.tier_limits import tier_limits

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB)
TASK_BYTES = 64 * MIB
JOB_BYTES = 64 * MIB  # one prompt's blocks: 512 tokens of a model with 128 KiB a token
STORE_GOAL, LOAD_GOAL, STALL_GOAL_MS = 0.85, 0.75, 5.0
LOOKUP_GOAL, CALL_GOAL_US = 50_000, 100.0


@dataclass(frozen=True)
class Row:
    """One block size on one file system. Speeds in MB/s, stalls in ms."""

    where: str
    job_bytes: int
    block_bytes: int
    raw_store: float
    store: float
    store_ratio: float
    new_folders_ratio: float
    raw_load: float
    load: float
    load_ratio: float
    memcpy: float
    stall_p50: float
    stall_p99: float
    stall_raw_p99: float
    busy_store: float
    busy_load: float
    call_p99_us: float
    rounds: dict[str, list[float]] = field(default_factory=dict)  # the speeds that raw_store, store, … are medians of


@dataclass(frozen=True)
class Options:
    """Of the tier under test."""

    threads: int
    isolation: str
    job_bytes: int


class Setup:
    """A region of ``count`` blocks and the keys for them."""

    def __init__(self, block_bytes: int, total_bytes: int, options: Options) -> None:
        self.count = max(4, total_bytes // block_bytes)
        self.block_bytes = block_bytes
        self.threads = options.threads
        self.isolation = options.isolation
        self.job_blocks = max(1, options.job_bytes // block_bytes)
        self.view = SharedOffloadRegion.anonymous(self.count, block_bytes).create_kv_memoryview()
        # Filled, so that no page is touched for the first time inside a measurement.
        self.region = np.asarray(self.view)
        self.region[:] = np.random.default_rng(1).integers(0, 256, self.region.shape, np.uint8).view(np.int8)
        self.blocks = np.arange(self.count, dtype=np.int32)
        self.keys = [block_key(n) for n in range(self.count)]
        self.job_id = 0

    def tier(self, root: Path) -> BuiltInTier:
        with tier_limits(max_bytes_in_flight=1 << 40):
            return BuiltInTier(
                FakeSpec(), self.view, "fs", root_dir=str(root), n_read_threads=self.threads,
                n_write_threads=self.threads, isolation=self.isolation, job_deadline_s=600, min_free=0,
            )  # fmt: skip

    def job(self, part: slice = slice(None)) -> JobMetadata:
        self.job_id += 1
        return JobMetadata(self.job_id, self.keys[part], self.blocks[part])

    def slices(self) -> list[slice]:
        size = self.job_blocks
        return [slice(start, min(start + size, self.count)) for start in range(0, self.count, size)]


def in_batches(setup: Setup, do: Callable[[int], None], part: slice) -> None:
    """Run ``do`` for every block of a part, in batches of TASK_BYTES, on the setup's threads."""
    # As many as the tier has: both of its kinds of threads help each other out.
    num_threads = 2 * setup.threads
    blocks = range(setup.count)[part]
    size = max(1, min(TASK_BYTES // setup.block_bytes, -(-len(blocks) // num_threads)))
    batches = iter([blocks[start : start + size] for start in range(0, len(blocks), size)])
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                batch = next(batches, None)
            if batch is None:
                return
            for index in batch:
                do(index)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raw_store(setup: Setup, paths: Sequence[str], part: slice) -> None:
    def write(index: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(paths[index], flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(paths[index]), exist_ok=True)
            fd = os.open(paths[index], flags, 0o600)
        assert os.pwritev(fd, [setup.region[index]], 0) == setup.block_bytes
        os.close(fd)

    in_batches(setup, write, part)


def raw_load(setup: Setup, paths: Sequence[str], part: slice = slice(None)) -> None:
    def read(index: int) -> None:
        fd = os.open(paths[index], os.O_RDONLY | os.O_CLOEXEC)
        assert os.preadv(fd, [setup.region[index]], 0) == setup.block_bytes
        os.close(fd)

    in_batches(setup, read, part)


def run_job(setup: Setup, tier: BuiltInTier, part: slice = slice(None), *, is_load: bool) -> None:
    (tier.submit_load if is_load else tier.submit_store)(setup.job(part))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert result.success


def load_thrice(setup: Setup, tier: BuiltInTier) -> None:
    for _ in range(3):
        run_job(setup, tier, is_load=True)


def raw_load_thrice(setup: Setup, paths: Sequence[str]) -> None:
    for _ in range(3):
        raw_load(setup, paths)


def speed(setup: Setup, run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return setup.count * setup.block_bytes / (time.perf_counter() - start) / 1e6


def memcpy_speed(setup: Setup) -> float:
    into = np.empty((min(64 * MIB, setup.region.nbytes) // setup.block_bytes, setup.block_bytes), np.int8)
    into[:] = 0
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        into[:] = setup.region[: len(into)]
        rounds.append(into.nbytes / (time.perf_counter() - start) / 1e6)
    return statistics.median(rounds)


@contextmanager
def fresh(where: Path) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="kvtiers-bench-", dir=where))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def placed(setup: Setup, where: Path, *, folders_made: bool = False) -> Iterator[tuple[BuiltInTier, list[str]]]:
    """A tier in a fresh root, and paths for the same blocks in another one."""
    with fresh(where) as raw_root, fresh(where) as our_root:
        tier = setup.tier(our_root)
        time.sleep(0.5)  # workers start and map the region while an engine loads its model
        names = [tier.mapper.relative_name(key) for key in setup.keys]
        if folders_made:
            for root in (raw_root, our_root):
                for name in names:
                    os.makedirs((root / name).parent, mode=0o700, exist_ok=True)
        try:
            yield tier, [f"{raw_root}/{name}" for name in names]
        finally:
            tier.shutdown()


def free_pages(rows: np.ndarray, where: Path) -> None:
    """Have as many pages just freed as the next run takes to store ``rows``: ours has a trailer to each block."""
    with tempfile.TemporaryFile(dir=where) as file:
        for row in rows:
            file.write(row)
            file.write(bytes(TRAILER_BYTES))


def stall_while(busy: Callable[[], None]) -> tuple[float, float]:
    """How late a thread with a period of 1 ms wakes up while ``busy`` runs on others: p50 and p99 in ms."""
    late: list[float] = []
    worker = threading.Thread(target=busy)
    worker.start()
    while worker.is_alive():
        start = time.perf_counter()
        time.sleep(0.001)
        late.append((time.perf_counter() - start) * 1e3 - 1)
    worker.join()
    return percentile(late, 50), percentile(late, 99)


def busy_speed(setup: Setup, tier: BuiltInTier, *, is_load: bool) -> float:
    """Speed of a job beside a main thread that runs Python all the time, as a scheduler does between two steps."""

    def run() -> None:
        (tier.submit_load if is_load else tier.submit_store)(setup.job())
        while not (results := list(tier.get_finished())):
            for _ in range(2000):  # about 0.1 ms
                pass
        assert results[0].success

    return speed(setup, run)


def percentile(values: Sequence[float], p: float) -> float:
    return float(np.percentile(values, p)) if values else float("nan")


def call_times_us(setup: Setup, tier: BuiltInTier, seconds: float) -> list[float]:
    """Times of scheduler-thread calls while loads keep the tier busy."""
    times: list[float] = []
    pending = 0
    end = time.perf_counter() + seconds
    few = slice(0, min(setup.count, 32))

    def timed(call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        value = call(*args)
        times.append((time.perf_counter() - start) * 1e6)
        return value

    while time.perf_counter() < end:
        if pending < 4:
            setup.job_id += 1
            timed(tier.submit_load, JobMetadata(setup.job_id, setup.keys[few], setup.blocks[few]))
            pending += 1
        for key in setup.keys[:16]:
            timed(tier.lookup, key)
        timed(tier.on_schedule_end)
        pending -= len(timed(tier.get_finished))
        time.sleep(0.001)
    tier.drain_jobs()
    tier.get_finished()
    return times


def measure(where: Path, label: str, block_bytes: int, total_bytes: int, rounds: int, options: Options) -> Row:
    setup = Setup(block_bytes, total_bytes, options)
    results: dict[str, list[float]] = {
        name: [] for name in ("raw_new", "new", "raw_store", "store", "raw_load", "load")
    }

    def run_pair(raw: str, raw_run: Callable[[slice], None], ours: str, our_run: Callable[[slice], None]) -> None:
        pair = ((raw, raw_run), (ours, our_run))
        seconds = dict.fromkeys((raw, ours), 0.0)
        for number, part in enumerate(setup.slices()):
            # Who goes first changes, so that neither profits from a warmer machine.
            for name, run in pair if (round_number + number) % 2 else reversed(pair):
                if "load" not in name:
                    free_pages(setup.region[part], where)
                started = time.perf_counter()
                run(part)
                seconds[name] += time.perf_counter() - started
        if round_number:
            for name, took in seconds.items():
                results[name].append(setup.count * setup.block_bytes / took / 1e6)

    for round_number in range(rounds + 1):  # the first one warms up
        with placed(setup, where) as (tier, paths):
            store = partial(run_job, setup, tier, is_load=False)
            run_pair("raw_new", partial(raw_store, setup, paths), "new", store)
        with placed(setup, where, folders_made=True) as (tier, paths):
            store = partial(run_job, setup, tier, is_load=False)
            run_pair("raw_store", partial(raw_store, setup, paths), "store", store)
            load = partial(run_job, setup, tier, is_load=True)
            run_pair("raw_load", partial(raw_load, setup, paths), "load", load)
            if round_number == rounds:
                stall_50, stall_99 = stall_while(partial(load_thrice, setup, tier))
                _, raw_99 = stall_while(partial(raw_load_thrice, setup, paths))
                calls = call_times_us(setup, tier, 1.0)
                busy_load = busy_speed(setup, tier, is_load=True)
    with placed(setup, where, folders_made=True) as (tier, _):
        free_pages(setup.region, where)
        busy_store = busy_speed(setup, tier, is_load=False)
    median = {name: statistics.median(values) for name, values in results.items()}
    return Row(
        where=label,
        job_bytes=options.job_bytes,
        block_bytes=block_bytes,
        raw_store=median["raw_store"],
        store=median["store"],
        store_ratio=statistics.median(a / b for a, b in zip(results["store"], results["raw_store"], strict=True)),
        new_folders_ratio=statistics.median(a / b for a, b in zip(results["new"], results["raw_new"], strict=True)),
        raw_load=median["raw_load"],
        load=median["load"],
        load_ratio=statistics.median(a / b for a, b in zip(results["load"], results["raw_load"], strict=True)),
        memcpy=memcpy_speed(setup),
        stall_p50=stall_50,
        stall_p99=stall_99,
        stall_raw_p99=raw_99,
        busy_store=busy_store,
        busy_load=busy_load,
        call_p99_us=percentile(calls, 99),
        rounds=results,
    )


def lookup_speeds(where: Path, options: Options) -> tuple[float, float]:
    """Keys per second: probed on the file system (half of them present), and answered from the cache."""
    setup = Setup(4 * KIB, 20_000 * 4 * KIB, options)
    with fresh(where) as root:
        tier = setup.tier(root)
        setup.keys, setup.blocks = setup.keys[::2], setup.blocks[::2]
        run_job(setup, tier, is_load=False)
        tier.shutdown()
        tier = setup.tier(root)
        keys = [block_key(n) for n in range(20_000)]

        def ask() -> list[OffloadKey]:
            return [key for key in keys if tier.lookup(key) is None]

        start = time.perf_counter()
        while ask():
            tier.on_schedule_end()
            time.sleep(0.001)
        probed = len(keys) / (time.perf_counter() - start)
        cached_rounds = []
        for _ in range(5):
            start = time.perf_counter()
            for key in setup.keys:
                tier.lookup(key)
            cached_rounds.append(len(setup.keys) / (time.perf_counter() - start))
        tier.shutdown()
    return probed, statistics.median(cached_rounds)


def show(rows: Sequence[Row], lookups: dict[str, tuple[float, float]], options: Options) -> None:
    console = Console(width=None if os.isatty(1) else 170)
    movers = f"{options.threads} + {options.threads} threads, isolation: {options.isolation}"
    table = Table(title=f"local-fs, sealed and verified, {movers}, MB/s (median of rounds)")
    columns = ("", "job", "block", "store", "raw", "ratio", "new folders", "load", "raw", "ratio", "memcpy")
    for column in (*columns, "store / load, main busy", "stall ms p50 / p99 (raw)", "call p99"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.where,
            f"{row.job_bytes // MIB} MiB",
            f"{row.block_bytes // KIB} KiB" if row.block_bytes < MIB else f"{row.block_bytes // MIB} MiB",
            f"{row.store:.0f}",
            f"{row.raw_store:.0f}",
            _judged(row.store_ratio, row.store_ratio >= STORE_GOAL),
            _judged(row.new_folders_ratio, row.new_folders_ratio >= STORE_GOAL),
            f"{row.load:.0f}",
            f"{row.raw_load:.0f}",
            _judged(row.load_ratio, row.load_ratio >= LOAD_GOAL),
            f"{row.memcpy:.0f}",
            f"{row.busy_store:.0f} / {row.busy_load:.0f}",
            f"{row.stall_p50:.2f} / {_judged(row.stall_p99, row.stall_p99 <= STALL_GOAL_MS)} ({row.stall_raw_p99:.2f})",
            f"{_judged(row.call_p99_us, row.call_p99_us <= CALL_GOAL_US, 0)} µs",
        )
    console.print(table)
    for label, (probed, cached) in lookups.items():
        console.print(
            f"lookups on {label}: {probed:,.0f} keys/s asked of the file system, "
            f"{_judged(cached, cached >= LOOKUP_GOAL, 0)} keys/s once warm"
        )
    console.print(
        f"goals: store >= {STORE_GOAL}, load >= {LOAD_GOAL} of raw; stall p99 <= {STALL_GOAL_MS} ms; "
        f">= {LOOKUP_GOAL:,} lookups/s; calls p99 <= {CALL_GOAL_US:.0f} µs. Missed goals are red."
    )


def _judged(value: float, reached: bool, digits: int = 2) -> str:
    text = f"{value:,.{digits}f}"
    return text if reached else f"[red]{text}[/red]"


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--isolation", default="auto", choices=("auto", "thread", "process"))
    parser.add_argument("--where", nargs="*", help="folders to measure on; default: tmpfs and the disk")
    parser.add_argument("--job-mib", type=int, nargs="+", default=[JOB_BYTES // MIB], help="size of jobs")
    args = parser.parse_args()
    total, rounds = (96 * MIB, 3) if args.quick else (256 * MIB, 5)
    places = (
        {name: Path(name) for name in args.where} if args.where else {"tmpfs": Path("/dev/shm"), "disk": Path.cwd()}
    )
    rows, lookups = [], {}
    for label, where in places.items():
        for job_mib in args.job_mib:
            options = Options(args.threads, args.isolation, job_mib * MIB)
            for size in SIZES:
                rows.append(measure(where, label, size, max(total, 2 * options.job_bytes), rounds, options))
        lookups[label] = lookup_speeds(where, options)
    show(rows, lookups, options)
    if args.json:
        args.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "lookups": lookups}, indent=1))


if __name__ == "__main__":
    main()
