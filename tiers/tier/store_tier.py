"""StoreTierManager: the one SecondaryTierManager for every Store.

It joins parts that know nothing of each other: FileMapper names a block, Seal proves it, a Store keeps it, BlockMover
moves it on the threads of a DualQueueThreadPool, and AsyncLookup says whether it is there.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtiers.tiers.base import JobMetadata, JobResult, OffloadingEvent, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.file_mapper import FileMapper, strict_fields
from kvtiers.tiers.blocks.keys import OffloadKey, make_offload_key
from kvtiers.tiers.blocks.namespace import open_namespace
from kvtiers.tiers.blocks.neighbors import tell_nearest
from kvtiers.tiers.blocks.seal import Checksum, Seal
from kvtiers.tiers.errors import QueueFullError
from kvtiers.tiers.isolation.mover import RunsInWorkers, make_mover
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store, SupportsGetMany
from kvtiers.tiers.tier.batches import deal, side_by_side
from kvtiers.tiers.tier.block_mover import Batch, MoveTask, Rows
from kvtiers.tiers.tier.circuit import Circuit, CircuitState, Kind
from kvtiers.tiers.tier.counts import TierCounts
from kvtiers.tiers.tier.events import KeysSinceJobStart, UnreadEvents
from kvtiers.tiers.tier.health import TierHealth
from kvtiers.tiers.tier.lookup import AsyncLookup, LookupCounts, LookupOptions
from kvtiers.tiers.tier.pool import DualQueueThreadPool, FinishedJob
from kvtiers.tiers.tracing import JobTrace

logger = get_logger(__name__)

TASK_BYTES_MIN = 1 << 20  # less is not worth another thread's wake-up
REMOVED_KEYS_PER_STEP_MAX = 1024  # of a collector's removals, so that they do not hold a scheduler step up
DOUBT_SHARE = 0.25  # of job_deadline_s; a task that has run for longer may hang
DRAIN_SHARE = 0.7  # of shutdown_s; for what was accepted to land
LOOKUPS_END_S = 0.5  # beyond shutdown_s; for lookups under way
BOOKED_KEYS_PER_CALL = 512  # of jobs that ended, so that a large one does not hold a scheduler step up
LOAD_ONLY_THREADS = 1  # beyond the others, which may all be busy with stores when a load comes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Limits of a StoreTierManager.

    Attributes:
        name: label in metrics and logs; None: the tier's type.
        n_read_threads, n_write_threads: threads that prefer loads, and stores.
        worker_threads, worker_threads_max: threads of a worker process, at first and at most, where a block mostly
            waits (see ``concurrency``).
        worker_begin_s: how long a worker begins blocks of a batch; None: for a part of its deadline.
        task_bytes, task_bytes_max: payload bytes of one pool task at most. A worker of many threads gets some blocks
            for each, up to ``task_bytes_max``; a store that is latency bound, one block a task.
        jobs_max, max_bytes_in_flight: a store job beyond them fails at once (D4).
        checksum: of new blocks.
        make_seal: called as ``Seal``; may make one that authenticates or encrypts.
        job_deadline_s: blocks that have not begun to move so long after their job's submission fail (L3); a task that
            runs for longer cuts the tier off.
        circuit_failures: so many failures in a row, of loads, stores or lookups, cut the tier off.
        circuit_probe_s: how often a tier that is cut off is asked whether it works again.
        shutdown_s: how long shutdown takes at most; most of it is for accepted jobs to land, the rest are cancelled.
        lookup: limits of presence lookups.
        trace_job: called on the scheduler's thread with each job that ended.
        read_only: nothing is written to the store or removed from it: store jobs are refused, bad blocks stay.
    """

    name: str | None = None
    n_read_threads: int = 2
    n_write_threads: int = 2
    worker_threads: int = 1
    worker_threads_max: int = 1
    worker_begin_s: float | None = None
    task_bytes: int = 64 << 20
    task_bytes_max: int = 1 << 30
    jobs_max: int = 1024
    max_bytes_in_flight: int = 8 << 30
    checksum: Checksum = Checksum.XXH3_64
    make_seal: Callable[..., Seal] = Seal
    job_deadline_s: float = 10.0
    circuit_failures: int = 3
    circuit_probe_s: float = 5.0
    shutdown_s: float = 4.0
    lookup: LookupOptions = field(default_factory=LookupOptions)
    trace_job: Callable[[JobTrace], None] | None = None
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    keys: tuple[OffloadKey, ...]
    is_load: bool
    submitted_ns: int
    batch_sizes: tuple[int, ...]  # blocks in each of its tasks


class CollectorEnd(Protocol):
    """What a tier needs of its collector (``tiers.capacity.link``). Only ``close`` waits."""

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """The blocks were used."""

    def take_removed(self, count_max: int) -> list[OffloadKey]:
        """Blocks of this tier that it removed."""

    def note_stored(self, keys: Iterable[OffloadKey]) -> None:
        """The blocks are there now: forget removals of them that were not taken yet."""

    def take_reports(self) -> list[dict[str, Any]]:
        """What its ``runs`` since did: ``report`` and ``used``, or ``error``; one message of either kind at most."""

    def close(self) -> None:
        """End it."""


class StoreTierManager(SecondaryTierManager):
    """A tier that keeps sealed blocks in a Store.

    The scheduler's thread calls every method and owns every field; pool and probe threads see ``_mover`` and the slots
    of the job they work on.

    Args:
        store: where the blobs are; closed at shutdown.
        mapper: names the blocks and carries the namespace's identity. By default it has all that the spec says
            (``strict_fields``): with less, blocks of other weights or another layout would pass for this engine's.
        collector: removes blocks; closed at shutdown.

    Raises:
        ConfigError: the region's rows are no multiple of 4,096 bytes, or the namespace is another one's.
        StoreError: the storage refused for good at the start.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        store: Store,
        mapper: FileMapper | None = None,
        options: TierOptions | None = None,
        collector: CollectorEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        if mapper is None:
            mapper = FileMapper.from_offloading_spec("", offloading_spec, extra_fields=strict_fields(offloading_spec))
        options = options or TierOptions()
        # YAML makes a number of ``name: 1``, and metrics take text only.
        self.name = tier_type if options.name in (None, "") else str(options.name)
        self.job_deadline_s = options.job_deadline_s
        self.shutdown_s: float = options.shutdown_s
        self._rows = Rows(primary_kv_view)
        self.takes_stores = not options.read_only
        if open_namespace(store, mapper, read_only=options.read_only):
            tell_nearest(store, mapper, self.name)
        self.store = store
        self.mapper = mapper
        self._collector = collector
        self.metrics: Metrics = getattr(offloading_spec, "metrics", None) or Metrics()
        self._options = options
        seal = options.make_seal(mapper.fingerprint, mapper.rank, checksum=options.checksum)
        self._mover = make_mover(
            self.name,
            store,
            mapper.name_prefix,
            seal,
            self._rows,
            clock,
            worker_threads=options.worker_threads,
            worker_threads_max=options.worker_threads_max,
            begin_s=options.worker_begin_s,
            message_blocks_max=max(1, min(options.task_bytes, options.task_bytes_max) // self._rows.row_bytes),
        )
        self._mover.removes_bad = not options.read_only
        self._one_by_one = store.capabilities.latency_bound and not isinstance(store, SupportsGetMany)
        self._num_threads = options.n_read_threads + options.n_write_threads
        self._pool = DualQueueThreadPool[MoveTask, Batch](
            options.n_read_threads,
            options.n_write_threads,
            run=self._mover.move,
            joins=self._mover.joins,
            cancel=self._mover.cancel,
            name=f"kvtiers-{self.name}",
            jobs_max=options.jobs_max,
            cost_max=options.max_bytes_in_flight,
            n_read_only_threads=LOAD_ONLY_THREADS,
            clock=clock,
        )
        self._lookup = AsyncLookup(
            self._mover.probe,
            name=f"kvtiers-{self.name}",
            options=options.lookup,
            is_far=store.capabilities.latency_bound,
            clock=clock,
        )
        self._circuit = Circuit(
            self.name, failures_max=options.circuit_failures, probe_every_s=options.circuit_probe_s, clock=clock
        )
        self._health = TierHealth(self._circuit)
        self._mover.to_replace = self._health.to_replace
        self._clock = clock
        self._in_flight: dict[int, _InFlight] = {}
        self._published_beside_loads = KeysSinceJobStart()
        self._gone_beside_stores = KeysSinceJobStart()
        self._to_book: deque[FinishedJob[Batch]] = deque()
        self._booking: Iterator[int] | None = None  # the job that is booked in parts
        self._results: list[JobResult] = []
        self._events = UnreadEvents(self.name)
        self._closed = False
        self._was_closed = True  # the circuit, when take_answered was called last
        self._openings_counted = 0
        self._doubted = False
        self._trace_failed = False
        self._probe_key = make_offload_key(bytes(32), 0)
        self._asks_another = False
        self._counts = TierCounts(self.metrics, self.name, collects=collector is not None, clock=clock)

    # -- lookups ---------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        if not self._circuit.closed:
            return False
        if self._asks_another:  # now, so that it is asked beside a question whose answer somebody waits for
            self._asks_another = False
            self._lookup.lookup(make_offload_key(os.urandom(32), 0))
        return self._lookup.lookup(key, "" if req_context is None else req_context.req_id)

    def take_answered(self) -> Mapping[str, Collection[OffloadKey]] | None:
        answered = self._lookup.take_answered()
        was_closed, self._was_closed = self._was_closed, self._circuit.closed
        return answered if self._circuit.closed or not was_closed else None  # cut off: all are told "absent" now

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookup.finish(req_context.req_id)

    def on_schedule_end(self) -> None:
        if self._circuit.take_probe():
            # A key that nobody has, by the way of every lookup: any answer is good news.
            self._probe_key = make_offload_key(os.urandom(32), 0)
        if self._circuit.state is CircuitState.HALF_OPEN:
            self._lookup.lookup(self._probe_key)  # in each step, because asking is what notices a deadline
        self._lookup.flush()
        if self._collector is not None:
            self._hear_collector(self._collector)
        counts = self._lookup.take_counts()
        self._check_health(counts)
        self._counts.looked_up(counts)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        if self._collector is not None:
            self._collector.touch(keys)

    def _hear_collector(self, collector: CollectorEnd) -> None:
        removed = collector.take_removed(REMOVED_KEYS_PER_STEP_MAX)
        if removed:
            self._lookup.forget(removed)
            self._events.add(removed, removed=True)
        for message in collector.take_reports():
            self._counts.collected(message)

    @property
    def circuit_state(self) -> CircuitState:
        """Whether the tier is used."""
        return self._circuit.state

    def _check_health(self, counts: LookupCounts) -> None:
        circuit = self._circuit
        stuck_s = self._pool.longest_running_s()
        # If the storage hangs, requests for what is remembered as present would each wait for a load's deadline.
        was_doubted, self._doubted = self._doubted, stuck_s > DOUBT_SHARE * self._options.job_deadline_s
        if self._doubted and not was_doubted:
            self._lookup.doubt()
        if stuck_s > self._options.job_deadline_s:
            if circuit.closed:
                self.metrics.inc("kvtiers_deadline_expired_total", self.name, "job")
            circuit.trip(
                f"a task has been running for {stuck_s:.1f} s, job_deadline_s is {self._options.job_deadline_s}"
            )
        elif self._health.looked_up(counts):
            self._asks_another = True
        self._mover.cut = "" if circuit.closed else "circuit_open"
        self.metrics.set("kvtiers_circuit_closed", self.name, value=float(circuit.closed))
        if circuit.openings > self._openings_counted:
            self.metrics.inc("kvtiers_circuit_opened_total", self.name, by=circuit.openings - self._openings_counted)
            self._openings_counted = circuit.openings

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata, is_load=True)

    def get_finished(self) -> Iterable[JobResult]:
        if self._pool.longest_running_s() > self._options.job_deadline_s:
            self._pool.cancel_late(self._options.job_deadline_s)
        self._book_ended(math.inf if self._closed else BOOKED_KEYS_PER_CALL)
        results, self._results = self._results, []
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    def drain_jobs(self) -> None:
        """Wait until no job runs or waits, except for a stuck task, which may never end (past ``job_deadline_s``)."""
        while not self._pool.wait_idle(timeout_s=0.5):
            if self._pool.longest_running_s() > self._options.job_deadline_s:
                in_flight = self._pool.jobs_in_flight
                logger.warning("tier %s: I/O is stuck, %d jobs are not waited for", self.name, in_flight)
                break
        self._book_ended(math.inf)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        limit_s = self.shutdown_s
        if self._circuit.closed:
            # Most of the time is for what was accepted to land, the rest for what cannot be stopped.
            self._pool.wait_idle(limit_s * DRAIN_SHARE)
        self._mover.cut = "shutdown"  # a running batch ends after its current block
        idle = self._pool.shutdown(limit_s * (1 - DRAIN_SHARE))
        idle = self._lookup.shutdown(LOOKUPS_END_S if idle else 0.0) and idle
        if self._collector is not None:
            self._collector.close()
        if idle:
            self.store.close()
            self._rows.release()
        elif isinstance(self.store, RunsInWorkers):
            self.store.abandon()  # nobody else would end its processes
        else:
            # A stuck thread may still use a descriptor of the store, whose number must not become another file's.
            logger.error("tier %s: threads are stuck in I/O; its store is left open", self.name)

    def _submit(self, job: JobMetadata, *, is_load: bool) -> None:
        blocks = self._rows.check_ids(job.block_ids)
        if len(blocks) != len(job.keys):
            raise ValueError(f"job {job.job_id} has {len(job.keys)} keys for {len(blocks)} block_ids")
        # A key given twice: storing either copy will do, while a load must fill both slots.
        pairs = list(zip(job.keys, blocks, strict=True))
        if not is_load:
            pairs = list(dict(pairs).items())
        size = self._blocks_per_task(len(pairs), is_load=is_load)
        deadline = self._clock() + self._options.job_deadline_s
        batches = list(deal(side_by_side(pairs), size, self._num_threads))
        tasks = [MoveTask(is_load, batch, deadline) for batch in batches]
        keys = tuple(job.keys)
        submitted_ns = time.time_ns()
        refused = "circuit_open" if not self._circuit.closed else ""
        if not (is_load or self.takes_stores):
            refused = "read_only"
        if not refused:
            try:
                self._pool.submit(job.job_id, tasks, is_read=is_load, cost=len(pairs) * self._rows.row_bytes)
            except QueueFullError as e:
                logger.debug("tier %s: job %d: %s", self.name, job.job_id, e)
                refused = "queue_full"
        if refused:
            self._counts.refused(_op(is_load), refused, len(keys))
            self._results.append(JobResult(job.job_id, success=not keys))
            self._trace(_op(is_load), "failed", submitted_ns, 0.0, len(keys), 0)
            return
        self._in_flight[job.job_id] = _InFlight(keys, is_load, submitted_ns, tuple(map(len, batches)))
        (self._published_beside_loads if is_load else self._gone_beside_stores).begin(job.job_id)

    def _blocks_per_task(self, count: int, *, is_load: bool) -> int:
        """An equal share of the job for every thread, within TASK_BYTES_MIN and the limits of ``TierOptions``."""
        if self._one_by_one:
            return 1
        row_bytes, options = self._rows.row_bytes, self._options
        share = -(-count // self._num_threads)
        at_least, at_most = self._mover.batch_blocks(is_load=is_load)
        most = min(max(options.task_bytes // row_bytes, at_least), at_most, options.task_bytes_max // row_bytes)
        return max(1, int(min(max(share, TASK_BYTES_MIN // row_bytes), most)))

    def _book_ended(self, keys_max: float) -> None:
        """Book the jobs that ended, up to about so many keys now and the rest when it is called again."""
        # Kept until each is booked: if booking one raises, the others are not lost.
        self._to_book.extend(self._pool.get_finished())
        while keys_max > 0 and (self._booking is not None or self._to_book):
            booking = self._booking or self._book(self._to_book.popleft())
            self._booking = None
            booked = next(booking, None)
            if booked is not None:
                self._booking = booking
                keys_max -= booked
        self.metrics.set("kvtiers_jobs_in_flight", self.name, value=len(self._in_flight))

    def _book(self, finished: FinishedJob[Batch]) -> Iterator[int]:
        """Book a job, and then report it. Yields how many keys were booked since the last time."""
        job = self._in_flight.pop(finished.job_id)
        op = _op(job.is_load)
        batches = [batch for batch in finished.outcomes if isinstance(batch, Batch)]
        for error, size in zip(finished.outcomes, job.batch_sizes, strict=True):
            if isinstance(error, BaseException):
                self._counts.lost(error, op, size)
        for batch in batches:
            self._counts.moved(batch, op)
        self._lookup.forget(self._health.moved(batches, op))
        succeeded = [key for batch in batches for key in batch.succeeded]
        found = [key for batch in batches for key in batch.found]
        # A block that the store found there, and a load meanwhile found gone, is not stored.
        if not job.is_load and (overtaken := self._gone_beside_stores.end(finished.job_id, found)):
            succeeded = [key for key in succeeded if key not in overtaken]
        ok = len(succeeded) == sum(job.batch_sizes)
        if job.is_load:
            if not ok and len(set(job.keys)) < len(
                job.keys
            ):  # a key given twice has failed if either slot was not filled
                missing = Counter(job.keys) - Counter(succeeded)
                succeeded = [key for key in succeeded if key not in missing]
            yield from self._note_loaded(finished.job_id, job.keys, () if ok else succeeded, batches, ok=ok)
        else:
            yield from self._note_stored(succeeded, found)
        used = succeeded if job.is_load else found  # a store that finds its block is a use
        if used:
            self.touch(used)
        bytes_moved = sum(batch.bytes_moved for batch in batches)
        outcome = "ok" if ok else "partial" if succeeded else "failed"
        self._counts.job_ended(op, outcome, finished.duration_s, bytes_moved)
        in_order = job.keys
        if not ok:
            done = set(succeeded)
            in_order = tuple(key for key in job.keys if key in done)
        self._results.append(JobResult(finished.job_id, ok, in_order, finished.duration_s, bytes_moved))
        self._trace(op, outcome, job.submitted_ns, finished.duration_s, len(job.keys), bytes_moved)

    def _note_loaded(
        self,
        job_id: int,
        keys: Sequence[OffloadKey],
        succeeded: Sequence[OffloadKey],
        batches: list[Batch],
        *,
        ok: bool,
    ) -> Iterator[int]:
        """Note which of a load's keys did not come, and why. ``succeeded`` is read where not all did."""
        gone = [key for batch in batches for key in batch.gone]
        if not ok:
            done = set(succeeded)
            # Whatever the reason, such a key is absent now: believing "present" would loop (vllm#49176).
            for part in _parts([key for key in keys if key not in done]):
                self._lookup.mark(part, present=False)
                yield len(part)
        for batch in batches:
            for key in (*batch.unreadable, *batch.stuck):
                self._lookup.mark((key,), present=False, rest_s=self._health.rest_s(key))
        # "removed" is told of blocks that are gone, not of all that did not come: a storage that is away for a second
        # still has them, and nobody would tell of them again. Nor of what a store has published since the load began:
        # listeners go by what they hear last. What a store only found there was there before it was gone.
        published = self._published_beside_loads.end(job_id, gone)
        removed = [key for key in dict.fromkeys(gone) if key not in published]
        self._gone_beside_stores.name(set(removed))
        self._events.add(removed, removed=True)
        yield len(gone)

    def _note_stored(self, stored: Sequence[OffloadKey], found: Sequence[OffloadKey]) -> Iterator[int]:
        """Note which blocks are there since a store; those that it found there were there before."""
        were_there = set(found)
        for part in _parts(stored):
            self._lookup.mark(part, present=True)
            if self._collector is not None:
                self._collector.note_stored(part)  # else "removed" would be told after "stored"
            self._published_beside_loads.name(set(part) - were_there)
            self._events.add(part, removed=False)
            yield len(part)

    def _trace(self, *fields: Any) -> None:
        """Tell of a job, by ``JobTrace``'s fields."""
        if self._options.trace_job is None:
            return
        try:
            self._options.trace_job(JobTrace(*fields))
        except Exception:  # whatever an exporter raises, the job has ended
            if not self._trace_failed:
                self._trace_failed = True
                logger.exception("tier %s: a job was not traced; later ones that are not will not be told", self.name)


def _op(is_load: bool) -> Kind:
    return "load" if is_load else "store"


def _parts(keys: Sequence[OffloadKey]) -> Iterator[Sequence[OffloadKey]]:
    for start in range(0, len(keys), BOOKED_KEYS_PER_CALL):
        yield keys[start : start + BOOKED_KEYS_PER_CALL]
