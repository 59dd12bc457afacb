"""One soak: makes the places and the tiers, runs the engine while things break, heals them, and counts what is left."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from numpy.typing import NDArray

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata, JobResult, SecondaryTierManager
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.testing.fuse import why_no_fuse
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec
from tests.soak.chaos import Chaos, FolderPlace, FusePlace, LayerPlace, Place, S3Place
from tests.soak.engine import RecordedTier, SoakEngine
from tests.soak.ledger import Ledger, Pulse, settled_heap
from tests.soak.report import SoakReport
from tests.soak.s3_server import BUCKET
from tests.tier_limits import tier_limits
from tests.tiers.server.in_threads import in_threads

ROW_BYTES = 64 << 10
NUM_SLOTS = 96
NUM_BLOCKS = 512
#: Short, because blocks are removed all the time: an old answer "present" would often be wrong.
TTLS: dict[str, Any] = {"present_ttl_s": 2.0, "absent_ttl_s": 0.2}
JOB_DEADLINE_S = 2.0
WARM_UP_SHARE = 0.25  # of the run, before memory counts
RSS_GROWTH_BYTES_MAX = 64 << 20
CALL_S_MAX = 2.0  # a scheduler call that waits for I/O takes as long as the hang, 3 s and more
SHUTDOWN_S_MAX = 65.0  # 5 s are promised; the rest is for a busy machine

#: What a tier of its own may do wrong, to see that the soak sees it.
SABOTAGES = ("wrong-bytes", "lost-job", "job-twice", "blocking-call")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """What to run.

    Attributes:
        share: part of the calls that fail.
        heal_s_max: everything that is in use when the faults end must be free by then (S2).
        tiers: of fs, nfs and s3.
        fuse: files are on FUSE mounts where that is possible.
        sabotage: one of ``SABOTAGES``, to be found.
        watch: entered with the run's metrics while it runs.
    """

    seconds: float = 600.0
    share: float = 0.05
    seed: int = 1
    heal_s_max: float = 30.0
    tiers: Sequence[str] = ("fs", "nfs", "s3")
    fuse: bool = True
    sabotage: str | None = None
    watch: Callable[[Metrics], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    descriptors: int
    threads: int
    processes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        process = psutil.Process()
        return cls(process.num_fds(), threading.active_count(), len(process.children(recursive=True)))

    @classmethod
    def settled(cls, before: Held, within_s: float = 120.0) -> Held:
        """Once nothing is more than before, or the time is up: the last connections close in the background."""
        deadline = time.monotonic() + within_s
        while True:
            now = cls.now()
            more = now.descriptors > before.descriptors or now.threads > before.threads
            if not (more or now.processes > before.processes) or time.monotonic() > deadline:
                return now
            time.sleep(0.1)


class Saboteur(RecordedTier):
    """A tier that breaks one promise, now and then."""

    def __init__(self, tier: SecondaryTierManager, rows: NDArray[np.int8], kind: str) -> None:
        super().__init__(tier, Ledger(time.monotonic))  # a book of its own: the real one is kept above it
        self._rows = rows
        self._kind = kind
        self._slots: dict[int, int] = {}
        self._count = 0

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._slots[job_metadata.job_id] = int(job_metadata.block_ids[0])
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        for result in super().get_finished():
            slot = self._slots.pop(result.job_id, None)
            if slot is None or not result.success:
                yield result
                continue
            self._count += 1
            due = self._count % 5 == 1
            if due and self._kind == "wrong-bytes":
                self._rows[slot][7] ^= 1
            if due and self._kind == "blocking-call":
                time.sleep(1.5 * CALL_S_MAX)
            if due and self._kind == "lost-job":
                continue
            yield result
            if due and self._kind == "job-twice":
                yield result


def run_soak(options: SoakOptions, progress: Callable[[str], None] = lambda _: None) -> SoakReport:
    """Run a soak; what went wrong is in the report's violations."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvtiers-soak-")))
        places = [_make_place(name, folder / name, fuse=options.fuse) for name in options.tiers]
        for place in places:
            cleanup.callback(place.close)
        environment = {
            "AWS_ACCESS_KEY_ID": "soak",
            "AWS_SECRET_ACCESS_KEY": "soak",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        cleanup.enter_context(mock.patch.dict("os.environ", environment))
        spared = [child.pid for child in psutil.Process().children(recursive=True)]
        progress("warming up")
        # Once without faults: what is made once a process (imports, a client's runtime) is no leak.
        _run(replace(options, seconds=1.0, share=0.0, sabotage=None, watch=contextlib.nullcontext), places, None)
        before = Held.now()
        chaos = Chaos(places, share=options.share, hang_s=1.5 * JOB_DEADLINE_S, spared=spared, seed=options.seed)
        report = _run(options, places, chaos, progress)
        held = Held.settled(before)
        report.faults = chaos.struck()
        report.descriptors_leaked = held.descriptors - before.descriptors
        report.threads_leaked = held.threads - before.threads
        report.processes_leaked = held.processes - before.processes
        report.judge(rss_growth_bytes_max=RSS_GROWTH_BYTES_MAX, call_s_max=CALL_S_MAX, shutdown_s_max=SHUTDOWN_S_MAX)
        return report


def _run(
    options: SoakOptions,
    places: Sequence[Place],
    chaos: Chaos | None,
    progress: Callable[[str], None] = lambda _: None,
) -> SoakReport:
    region = SharedOffloadRegion.anonymous(NUM_SLOTS, ROW_BYTES)
    try:
        with Pulse() as pulse:
            return _run_in(region.create_kv_memoryview(), options, places, chaos, pulse, progress)
    finally:
        region.cleanup()


def _run_in(
    view: memoryview,
    options: SoakOptions,
    places: Sequence[Place],
    chaos: Chaos | None,
    pulse: Pulse,
    progress: Callable[[str], None],
) -> SoakReport:
    clock = time.monotonic
    ledger = Ledger(clock)
    rows = np.frombuffer(view, np.int8).reshape(NUM_SLOTS, ROW_BYTES)
    contents = np.random.default_rng(options.seed).integers(0, 127, (NUM_BLOCKS, ROW_BYTES), np.int8)
    spec = FakeSpec()
    tiers: list[SecondaryTierManager] = []
    for place in places:
        tier = _make_tier(place, spec, view)
        if options.sabotage is not None and place is places[0]:
            tier = Saboteur(tier, rows, options.sabotage)
        tiers.append(RecordedTier(tier, ledger))
    manager = BlockManager(Slots(NUM_SLOTS, metrics=spec.metrics), tiers)
    engine = SoakEngine(manager, rows, contents, ledger, seed=options.seed, late_s=pulse.late_s)
    memory = _Memory(clock, options.seconds)
    start_s = clock()
    if chaos is not None:
        chaos.start()
    try:
        with options.watch(spec.metrics), settled_heap():
            engine.run(_Stopwatch(options.seconds, memory, engine, ledger, progress).is_over)
    finally:
        if chaos is not None:
            chaos.stop()
    progress("healed; waiting for what is still in use")
    healed_s = engine.settle(options.heal_s_max)
    rss_growth_bytes = memory.growth_bytes()
    shutdown_from_s = clock()
    manager.shutdown()
    totals, times = engine.totals, engine.times
    return SoakReport(
        seconds=clock() - start_s,
        tiers={place.name: _describe(place) for place in places},
        requests=totals.requests,
        lookups=totals.lookups,
        blocks_loaded=totals.blocks_loaded,
        blocks_stored=totals.blocks_stored,
        jobs=ledger.jobs,
        calls=times.count,
        worst_call_ms=1e3 * times.worst_s,
        worst_call=times.worst_call,
        worst_wait_ms=1e3 * times.worst_wait_s,
        slow_calls=times.slow,
        p99_call_ms=1e3 * times.percentile_s(99),
        healed_s=healed_s,
        shutdown_s=clock() - shutdown_from_s,
        rss_growth_bytes=rss_growth_bytes,
        counters={
            f"{sample.name}{{{', '.join(sample.labels.values())}}}": sample.value
            for sample in spec.metrics.snapshot()
            if sample.value and sample.name.endswith("_total")
        },
        violations=ledger.violations,
        details=ledger.details,
    )


class _Stopwatch:
    """Ends the run, and says once a second how far it is."""

    def __init__(
        self, seconds: float, memory: _Memory, engine: SoakEngine, ledger: Ledger, progress: Callable[[str], None]
    ) -> None:
        self._seconds = seconds
        self._memory = memory
        self._engine = engine
        self._ledger = ledger
        self._progress = progress
        self._start_s = self._said_s = time.monotonic()

    def is_over(self) -> bool:
        """Asked before each step."""
        self._memory.look()
        now = time.monotonic()
        if now - self._said_s > 1.0:
            self._said_s = now
            done = self._engine.totals
            self._progress(
                f"{now - self._start_s:,.0f} of {self._seconds:,.0f} s, {done.requests:,} requests, "
                f"{done.blocks_loaded:,} blocks loaded, {done.blocks_stored:,} stored, "
                f"{self._ledger.violations.total()} violations"
            )
        return now - self._start_s >= self._seconds


class _Memory:
    """Resident memory, from when the run has warmed up."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._warm_at = clock() + WARM_UP_SHARE * seconds
        self._process = psutil.Process()
        self._warm_bytes: int | None = None

    def look(self) -> None:
        """Called now and then."""
        if self._warm_bytes is None and self._clock() >= self._warm_at:
            self._warm_bytes = self._process.memory_info().rss

    def growth_bytes(self) -> int:
        """Since then."""
        return 0 if self._warm_bytes is None else self._process.memory_info().rss - self._warm_bytes


def _make_place(name: str, folder: Path, *, fuse: bool) -> Place:
    folder.mkdir()
    if name == "s3":
        return S3Place(name)
    if fuse and why_no_fuse() is None:
        return FusePlace(name, folder)
    return LayerPlace(name, folder / "blocks") if name == "fs" else FolderPlace(name, folder / "blocks")


def _describe(place: Place) -> str:
    return {
        FusePlace: "files on a FUSE mount" + (", in processes" if place.name == "nfs" else ", in threads"),
        LayerPlace: f"files behind the fault layer ({why_no_fuse() or 'FUSE not wanted'})",
        FolderPlace: f"files in a folder, in processes ({why_no_fuse() or 'FUSE not wanted'})",
        S3Place: "S3 on the HTTP fault server",
    }[type(place)]


def _make_tier(place: Place, spec: FakeSpec, view: memoryview) -> SecondaryTierManager:
    if isinstance(place, LayerPlace):
        tier_options = TierOptions(job_deadline_s=JOB_DEADLINE_S, circuit_probe_s=0.5, lookup=LookupOptions(**TTLS))
        mapper = FileMapper.from_offloading_spec(str(place.root), spec)
        return StoreTierManager(
            spec, view, "fs", make_backend=in_threads(place.open_store()), mapper=mapper, options=tier_options
        )
    config: dict[str, object] = {
        "type": place.name,
        "n_read_threads": 2,
        "n_write_threads": 2,
        "job_deadline_s": JOB_DEADLINE_S,
        "lookup_deadline_s": 0.2,
    }
    if isinstance(place, S3Place):
        config |= {"bucket": BUCKET, "endpoint_url": place.server.endpoint_url}
    else:
        assert isinstance(place, FusePlace | FolderPlace)
        config |= {"root_dir": str(place.root), "min_free": 0}
    with tier_limits(circuit_probe_s=0.5, lookup=TTLS):
        return SecondaryTierFactory.create_secondary_tier(config, view, spec)
