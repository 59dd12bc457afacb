"""What a hung tier costs the others, and what I/O in worker processes costs.

    python -m tests.benchmarks.bench_liveness [--hang-s 60] [--quick] [--json FILE] [--where FOLDER]

**Hung tier.** Two managers do the same work (half of the blocks stored, half loaded from the healthy tier): one has the
healthy tier alone, the other has a tier before it whose storage hangs all the time. They take turns of a few seconds;
the hung one runs for ``--hang-s`` in all. Reported are the healthy tier's bytes as a ratio, turn by turn and overall,
and the worst call on the scheduler's thread. Requests that found their blocks in the tier just before it hung wait for
its deadline; here they are all there is, so the first turns show that wait, and the median does not. Once with an nfs
tier (processes) and once with an fs tier (threads) as the hung one.

**Worker processes.** The nfs tier on a healthy folder, with isolation: process against isolation: thread: throughput of
jobs, and the time of a job of one block. Rounds alternate, the order within a round changes, the medians of the
rounds' ratios count. ``--where`` is a folder on the file system to measure on; default: tmpfs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.testing.fuse import FuseMount, why_no_fuse
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import FakeSpec, block_key
from tests.soak.ledger import CallTimes, settled_heap
from tests.tier_limits import tier_limits

KIB, MIB = 1 << 10, 1 << 20
HUNG_RATIO_GOAL, CALL_GOAL_MS = 0.95, 20.0
PROCESS_RATIO_GOAL, ADDED_GOAL_MS = 0.8, 0.5
BLOCK_BYTES = MIB
NUM_SLOTS = 64
REQUEST_BLOCKS = 4
REQUESTS_AT_ONCE = 3
RING_REQUESTS = 32  # of either kind, round and round: twice what the region holds
STEP_S = 0.001


@dataclass(frozen=True)
class HungRow:
    """The healthy tier next to a hung one. Speeds in MB/s."""

    hung: str
    alone: float
    beside: float
    ratio: float
    overall_ratio: float
    worst_turn_ratio: float
    first_turn_ratio: float
    p99_call_ms: float
    worst_call_ms: float
    worst_call: str
    alone_worst_call_ms: float
    shutdown_s: float
    slow_calls: list[str]


@dataclass(frozen=True)
class ProcessRow:
    """Worker processes against threads. Speeds in MB/s, times in ms."""

    block_bytes: int
    store_threads: float
    store_processes: float
    store_ratio: float
    load_threads: float
    load_processes: float
    load_ratio: float
    added_store_ms: float
    added_load_ms: float


# ---- a hung tier -----------------------------------------------------------------------------------------------------


class Work:
    """One manager and the requests it serves, on the scheduler's thread: stores and loads in equal parts."""

    def __init__(self, make_tiers: Callable[[FakeSpec, memoryview], list[SecondaryTierManager]]) -> None:
        self._region = SharedOffloadRegion.anonymous(NUM_SLOTS, BLOCK_BYTES)
        view = self._region.create_kv_memoryview()
        np.frombuffer(view, np.int8)[:] = np.random.default_rng(1).integers(0, 127, NUM_SLOTS * BLOCK_BYTES, np.int8)
        self.spec = FakeSpec()
        self._tiers = make_tiers(self.spec, view)
        healthy = self._tiers[-1]
        assert isinstance(healthy, StoreTierManager)
        self._healthy = healthy
        self.manager = BlockManager(Slots(NUM_SLOTS, metrics=self.spec.metrics), self._tiers)
        self.times = CallTimes(time.perf_counter)
        self._count = 0
        self._loading: list[tuple[ReqContext, list[OffloadKey]]] = []

    def turn(self, seconds: float) -> float:
        """Serve for so long; returns the MB/s of the healthy tier."""
        start, before = time.perf_counter(), self._bytes()
        while time.perf_counter() - start < seconds:
            self.step()
        return (self._bytes() - before) / (time.perf_counter() - start) / 1e6

    def store_ring(self) -> None:
        """What the loads find: written by the healthy tier alone, before anything hangs."""
        for index in range(RING_REQUESTS):
            assert self._store(self._keys(index))
            self.manager.drain()  # or the tier's share of the region would be full, and the rest dropped
        self.step(admit=False)
        assert self._bytes("store") == RING_REQUESTS * REQUEST_BLOCKS * BLOCK_BYTES
        self.manager.reset_cache()

    def step(self, *, admit: bool = True) -> None:
        """One step of the scheduler."""
        if admit:
            while len(self._loading) < REQUESTS_AT_ONCE:
                self._count += 1
                self._loading.append((ReqContext(f"load-{self._count}"), self._keys(self._count % RING_REQUESTS)))
            self._store_next()
        self._loading = [request for request in self._loading if not self._serve(*request)]
        self.times.timed("on_schedule_end", self.manager.on_schedule_end)
        time.sleep(STEP_S)
        self.times.end_step()

    def close(self) -> float:
        """Seconds the manager's shutdown took."""
        start = time.perf_counter()
        self.manager.shutdown()
        took_s = time.perf_counter() - start
        self._region.cleanup()
        return took_s

    def _serve(self, context: ReqContext, keys: list[OffloadKey]) -> bool:
        found = [self.times.timed("lookup", lambda key=key: self.manager.lookup(key, context)) for key in keys]  # type: ignore[misc]
        if any(answer is None for answer in found):
            return False
        if all(found):
            self.times.timed("prepare_load", lambda: self.manager.prepare_load(keys, context))
            self.times.timed("complete_load", lambda: self.manager.complete_load(keys))
        self.times.timed("on_request_finished", lambda: self.manager.on_request_finished(context))
        return True

    def _store_next(self) -> None:
        """Blocks nobody has: of a second ring, whose oldest blocks are removed behind the tier's back."""
        if self._bytes(op="store") > self._bytes(op="load"):
            return
        keys = self._keys(RING_REQUESTS + self._count % RING_REQUESTS)
        if any(self.manager.slots.find(key) is not None for key in keys):
            return
        for key in keys:
            self._healthy.store.delete(self._healthy.mapper.relative_name(key))
        self._store(keys)

    def _store(self, keys: list[OffloadKey]) -> bool:
        output = self.times.timed("prepare_store", lambda: self.manager.prepare_store(keys, ReqContext("store")))
        if output is None:
            return False
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        self.times.timed("complete_store", lambda: self.manager.complete_store(output.keys_to_store))
        return True

    def _keys(self, index: int) -> list[OffloadKey]:
        return [block_key(REQUEST_BLOCKS * index + number) for number in range(REQUEST_BLOCKS)]

    def _bytes(self, op: str = "") -> float:
        ops = (op,) if op else ("load", "store")
        return sum(self.spec.metrics.value("kvtiers_bytes_total", "healthy", name) for name in ops)


def measure_hung(kind: str, where: Path, hang_s: float, turn_s: float) -> HungRow:
    """The healthy tier beside a hung one of this kind, and alone."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvtiers-bench-", dir=where)))
        mount = cleanup.enter_context(FuseMount(folder / "backing", folder / "mount"))

        def healthy(name: str) -> Callable[[FakeSpec, memoryview], SecondaryTierManager]:
            root = str(folder / name)

            def make(spec: FakeSpec, view: memoryview) -> SecondaryTierManager:
                with tier_limits(lookup={"present_ttl_s": 3600.0}):
                    return BuiltInTier(
                        spec, view, "fs", root_dir=root, n_read_threads=2, n_write_threads=2, name="healthy", min_free=0
                    )

            return make

        def hung(spec: FakeSpec, view: memoryview) -> SecondaryTierManager:
            root = str(mount.path / "blocks")
            return BuiltInTier(
                spec, view, kind, root_dir=root, name="hung", min_free=0, n_read_threads=2, n_write_threads=2
            )

        alone = Work(lambda spec, view: [healthy("alone")(spec, view)])
        beside = Work(lambda spec, view: [hung(spec, view), healthy("beside")(spec, view)])
        for work in (alone, beside):
            work.store_ring()
        alone_mb_s: list[float] = []
        beside_mb_s: list[float] = []
        hanging = contextlib.ExitStack()
        for work in (alone, beside):
            work.turn(turn_s)  # warm up; the tier that will hang works
        for work in (alone, beside):
            work.times = CallTimes(time.perf_counter)
        hanging.enter_context(settled_heap())
        hanging.enter_context(mount.stopped())
        with hanging:
            for number in range(max(1, round(hang_s / turn_s))):
                turns = [(alone, alone_mb_s), (beside, beside_mb_s)]
                for work, speeds in turns if number % 2 else reversed(turns):
                    speeds.append(work.turn(turn_s))
            shutdown_s = beside.close()
        alone.close()
        ratios = [b / a for a, b in zip(alone_mb_s, beside_mb_s, strict=True)]
        return HungRow(
            hung=kind,
            alone=statistics.median(alone_mb_s),
            beside=statistics.median(beside_mb_s),
            ratio=statistics.median(ratios),
            overall_ratio=sum(beside_mb_s) / sum(alone_mb_s),
            worst_turn_ratio=min(ratios),
            first_turn_ratio=ratios[0],
            p99_call_ms=1e3 * beside.times.percentile_s(99),
            worst_call_ms=1e3 * beside.times.worst_s,
            worst_call=beside.times.worst_call,
            alone_worst_call_ms=1e3 * alone.times.worst_s,
            shutdown_s=shutdown_s,
            slow_calls=beside.times.slow,
        )


# ---- worker processes ------------------------------------------------------------------------------------------------


class Jobs:
    """An nfs tier and jobs for all of its region, or for one block."""

    def __init__(self, root: Path, isolation: str, view: memoryview, threads: int) -> None:
        assert view.shape is not None
        with tier_limits(max_bytes_in_flight=1 << 40):
            self.tier = BuiltInTier(
                FakeSpec(), view, "nfs", root_dir=str(root), isolation=isolation, min_free=0, job_deadline_s=600.0,
                n_read_threads=threads, n_write_threads=threads,
            )  # fmt: skip
        self._slots = np.arange(view.shape[0], dtype=np.int32)
        self._keys = [block_key(number) for number in range(len(self._slots))]
        self._bytes = view.nbytes
        self._job_id = 0

    def run(self, *, is_load: bool, blocks: slice = slice(None)) -> float:
        """Seconds of one job."""
        self._job_id += 1
        job = JobMetadata(self._job_id, self._keys[blocks], self._slots[blocks])
        start = time.perf_counter()
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        took_s = time.perf_counter() - start
        (result,) = self.tier.get_finished()
        assert result.success
        return took_s

    def speed(self, *, is_load: bool) -> float:
        """MB/s of a job of every block; stores find none of them there."""
        if not is_load:
            self.forget()
        return self._bytes / self.run(is_load=is_load) / 1e6

    def forget(self, blocks: slice = slice(None)) -> None:
        """Remove the blocks, outside of any measurement."""
        for key in self._keys[blocks]:
            self.tier.store.delete(self.tier.mapper.relative_name(key))

    def one(self, index: int, *, is_load: bool) -> float:
        """ms of a job of one block."""
        blocks = slice(index, index + 1)
        if not is_load:
            self.forget(blocks)
        return 1e3 * self.run(is_load=is_load, blocks=blocks)


def measure_processes(where: Path, block_bytes: int, total_bytes: int, rounds: int, threads: int) -> ProcessRow:
    """One block size."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvtiers-bench-", dir=where)))
        region = SharedOffloadRegion.anonymous(max(4, total_bytes // block_bytes), block_bytes)
        cleanup.callback(region.cleanup)
        view = region.create_kv_memoryview()
        np.frombuffer(view, np.int8)[:] = 7
        sides = {name: Jobs(folder / name, name, view, threads) for name in ("thread", "process")}
        for jobs in sides.values():
            cleanup.callback(jobs.tier.shutdown)
        speeds: dict[tuple[str, bool], list[float]] = {(name, op): [] for name in sides for op in (False, True)}
        singles: dict[tuple[str, bool], list[float]] = {(name, op): [] for name in sides for op in (False, True)}
        for number in range(rounds + 1):  # the first one warms up
            for is_load in (False, True):
                for name in sides if number % 2 else reversed(sides):
                    value = sides[name].speed(is_load=is_load)
                    if number:
                        speeds[name, is_load].append(value)
        for number in range(20 * rounds + 4):
            for is_load in (False, True):
                for name in sides if number % 2 else reversed(sides):
                    value = sides[name].one(number % 4, is_load=is_load)
                    if number >= 4:
                        singles[name, is_load].append(value)

    def ratio(is_load: bool) -> float:
        pairs = zip(speeds["process", is_load], speeds["thread", is_load], strict=True)
        return statistics.median(process / thread for process, thread in pairs)

    def added(is_load: bool) -> float:
        return statistics.median(singles["process", is_load]) - statistics.median(singles["thread", is_load])

    return ProcessRow(
        block_bytes=block_bytes,
        store_threads=statistics.median(speeds["thread", False]),
        store_processes=statistics.median(speeds["process", False]),
        store_ratio=ratio(False),
        load_threads=statistics.median(speeds["thread", True]),
        load_processes=statistics.median(speeds["process", True]),
        load_ratio=ratio(True),
        added_store_ms=added(False),
        added_load_ms=added(True),
    )


# ---- out -------------------------------------------------------------------------------------------------------------


def show_hung(console: Console, rows: Sequence[HungRow], hang_s: float) -> None:
    """Print what a hung tier costs."""
    table = Table(title=f"one tier hung for {hang_s:g} s, the fs tier behind it (1 MiB blocks, medians of the turns)")
    for column in (
        "hung",
        "alone MB/s",
        "beside MB/s",
        "ratio",
        "overall",
        "first turn",
        "worst turn",
        "calls p99 ms",
        "worst ms",
    ):
        table.add_column(column, justify="right")
    for column in ("alone: worst ms", "shutdown s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.hung} ({'processes' if row.hung == 'nfs' else 'threads'})",
            f"{row.alone:,.0f}",
            f"{row.beside:,.0f}",
            _judged(row.ratio, row.ratio >= HUNG_RATIO_GOAL),
            f"{row.overall_ratio:.2f}",
            f"{row.first_turn_ratio:.2f}",
            f"{row.worst_turn_ratio:.2f}",
            f"{row.p99_call_ms:.2f}",
            f"{_judged(row.worst_call_ms, row.worst_call_ms <= CALL_GOAL_MS)} ({row.worst_call})",
            f"{row.alone_worst_call_ms:.2f}",
            f"{row.shutdown_s:.2f}",
        )
    console.print(table)
    for row in rows:
        for slow in row.slow_calls:
            console.print(f"beside {row.hung}: slow call: {slow}", highlight=False)
    console.print(
        f"goals: ratio >= {HUNG_RATIO_GOAL}, worst scheduler call <= {CALL_GOAL_MS:g} ms. Missed ones say so."
    )


def show_processes(console: Console, rows: Sequence[ProcessRow], threads: int) -> None:
    """Print what processes cost."""
    table = Table(title=f"nfs tier in worker processes against threads, {threads} + {threads}, MB/s (median of rounds)")
    for column in ("block", "store", "threads", "ratio", "load", "threads", "ratio", "added ms: store", "load"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = row.block_bytes >= MIB  # the goal is for these
        table.add_row(
            f"{row.block_bytes // KIB} KiB" if row.block_bytes < MIB else f"{row.block_bytes // MIB} MiB",
            f"{row.store_processes:,.0f}",
            f"{row.store_threads:,.0f}",
            _judged(row.store_ratio, not counts or row.store_ratio >= PROCESS_RATIO_GOAL),
            f"{row.load_processes:,.0f}",
            f"{row.load_threads:,.0f}",
            _judged(row.load_ratio, not counts or row.load_ratio >= PROCESS_RATIO_GOAL),
            _judged(row.added_store_ms, row.added_store_ms <= ADDED_GOAL_MS),
            _judged(row.added_load_ms, row.added_load_ms <= ADDED_GOAL_MS),
        )
    console.print(table)
    console.print(
        f"goals: >= {PROCESS_RATIO_GOAL} of the threads' at 1 MiB and above, <= {ADDED_GOAL_MS} ms added to a job of "
        "one block. Missed ones say so."
    )


def _judged(value: float, reached: bool) -> str:
    return f"{value:,.2f}" if reached else f"[red]{value:,.2f} missed[/red]"


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--turn-s", type=float, default=5.0)
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--where", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    console = Console(width=None if os.isatty(1) else 150)
    total, rounds = (64 * MIB, 5) if args.quick else (256 * MIB, 9)
    hung: list[HungRow] = []
    missing = why_no_fuse()
    if missing:
        console.print(f"hung tiers are not measured: {missing}")
    else:
        hung = [measure_hung(kind, args.where, args.hang_s, args.turn_s) for kind in ("nfs", "fs")]
        show_hung(console, hung, args.hang_s)
    sizes = (64 * KIB, MIB, 4 * MIB, 16 * MIB)
    processes = [measure_processes(args.where, size, total, rounds, args.threads) for size in sizes]
    show_processes(console, processes, args.threads)
    if args.json:
        rows: dict[str, Any] = {"hung": [asdict(row) for row in hung], "processes": [asdict(row) for row in processes]}
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
