"""StoreTierManager: implements SecondaryTierManager for any Store.

This is the half of a tier in the engine: it keeps jobs, lookup answers, events and the circuit. A ``Channel`` passes
jobs and lookups to the other half (``tiers.server``). There a Seal checksums a block, and a Store keeps the block under
the name from FileMapper.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import JobMetadata, JobResult, OffloadingEvent, ReqContext, SecondaryTierManager
from ..blocks.batches import Batch
from ..blocks.file_mapper import FileMapper, strict_fields
from ..blocks.keys import OffloadKey, make_offload_key
from ..blocks.rows import Rows
from ..blocks.seal import TRAILER_BYTES, Seal
from ..capacity.link import CollectorLink
from ..errors import FOREIGN_REASONS, QueueFullError, StoreTimeoutError, StoreUnavailableError
from ..frames import Work
from ..metrics import Metrics
from ..plain_logs import get_logger
from ..store import Capabilities
from .channel import Backend, Channel, FinishedJob, Opened
from .circuit import Circuit, CircuitState, Kind
from .counts import TierCounts
from .events import UnreadEvents
from .health import REST_S, TierHealth
from .lookup import AsyncLookup, LookupCounts, LookupOptions

logger = get_logger(__name__)

REMOVED_KEYS_PER_STEP_MAX = 1024  # limit of the removals taken from the collector per scheduler step
DOUBT_SHARE = 0.25  # share of job_deadline_s; a task that has run for longer may hang
DRAIN_SHARE = 0.7  # share of shutdown_s in which accepted jobs may finish
BOOKED_KEYS_PER_CALL = 512  # keys of ended jobs per call, so that a large job does not delay a scheduler step
REASONS_MAX = 256  # limit of the reasons that wait for ``take_reasons``; the oldest are dropped
SAY_EVERY_S = 60.0
#: Capabilities assumed for a store that could not be created yet.
UNKNOWN = Capabilities(exclusive_create=False, shared=True, latency_bound=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Limits of a StoreTierManager.

    Attributes:
        name: label in metrics and logs; None: the tier's type.
        jobs_max, max_bytes_in_flight: a store job beyond these limits fails at once (D4).
        make_seal: called with the arguments of ``Seal``; may return a Seal that authenticates or encrypts.
        job_deadline_s: a block that has not started to move this long after its job was submitted fails (L3). A task
            that runs for longer cuts the tier off.
        circuit_failures: number of consecutive failures of loads, stores or lookups that cut the tier off.
        circuit_probe_s: how often to check whether a tier that was cut off works again.
        shutdown_s: time limit of shutdown. Accepted jobs get most of it to finish; then the rest are cancelled.
        lookup: limits of presence lookups.
        load: see ``SecondaryTierManager``.
        read_only: do not write to the store or remove from it: store jobs are refused, and bad blocks stay.
    """

    name: str | None = None
    jobs_max: int = 1024
    max_bytes_in_flight: int = 8 << 30
    make_seal: Callable[..., Seal] = Seal
    job_deadline_s: float = 10.0
    circuit_failures: int = 3
    circuit_probe_s: float = 5.0
    shutdown_s: float = 4.0
    lookup: LookupOptions = field(default_factory=LookupOptions)
    load: str = "auto"
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    keys: tuple[OffloadKey, ...]
    is_load: bool


class StoreTierManager(SecondaryTierManager):
    """A tier that keeps sealed blocks in a Store.

    The scheduler's thread calls every method and owns every field. There is no other thread and no lock.

    If the storage does not answer at the start, the engine does not wait: the tier starts cut off, and its namespace is
    opened when the storage is back.

    Args:
        make_backend: returns the ``Backend`` that starts the tier's servers; it is closed at shutdown.
        mapper: names the blocks and carries the namespace's identity. By default the identity includes the spec's
            ``strict_fields``. Without them, blocks of other weights or layouts would be taken for this engine's blocks.

    Attributes:
        store: the store that servers in threads of this process use; None: each server process has its own store.
        missing: why the storage did not answer at the start; None: it answered.

    Raises:
        ConfigError: the region's rows are not a multiple of 4,096 bytes, or the stored namespace has other fields.
        StoreError: the storage answered with a permanent error at the start.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        make_backend: Callable[[Work, Rows], Backend],
        mapper: FileMapper | None = None,
        options: TierOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        if mapper is None:
            mapper = FileMapper.from_offloading_spec("", offloading_spec, extra_fields=strict_fields(offloading_spec))
        options = options or TierOptions()
        # YAML parses ``name: 1`` as a number, but metrics accept only text.
        self.name = tier_type if options.name in (None, "") else str(options.name)
        self.job_deadline_s = options.job_deadline_s
        self.shutdown_s: float = options.shutdown_s
        self._rows = Rows(primary_kv_view)
        self.takes_stores = not options.read_only
        self.load = options.load
        self.mapper = mapper
        self._collector: CollectorLink | None = None
        self.metrics: Metrics = getattr(offloading_spec, "metrics", None) or Metrics()
        self._options = options
        self._clock = clock
        self._say_at = float("-inf")  # earliest time to log a server's next text
        seal = options.make_seal(mapper.fingerprint, mapper.rank)
        backend = make_backend(Work(self.name, mapper, seal, options.read_only), self._rows)
        self.store: Any = backend.store
        self._channel = Channel(
            backend,
            tier=self.name,
            row_bytes=self._rows.row_bytes,
            jobs_max=options.jobs_max,
            cost_max=options.max_bytes_in_flight,
            deadline_s=options.job_deadline_s,
            tell=self._log,
            clock=clock,
        )
        opened = self._open()
        self.missing = opened.error
        self.capabilities = opened.capabilities or UNKNOWN
        self._lookup = AsyncLookup(
            self._channel, options=options.lookup, is_far=self.capabilities.latency_bound, clock=clock
        )
        self._circuit = Circuit(
            self.name, failures_max=options.circuit_failures, probe_every_s=options.circuit_probe_s, clock=clock
        )
        self._open_namespace_at = math.inf if self.missing is None else -math.inf
        if self.missing is not None:
            self._circuit.trip(f"it starts without its storage: {self.missing}")
        self._health = TierHealth(self._circuit)
        self._in_flight: dict[int, _InFlight] = {}
        self._to_book: deque[FinishedJob] = deque()
        self._booking: Iterator[int] | None = None  # a partly booked job
        self._results: list[JobResult] = []
        self._events = UnreadEvents(self.name)
        self._reasons: deque[tuple[str, Sequence[OffloadKey]]] = deque(maxlen=REASONS_MAX)
        self._refusals: list[tuple[str, Sequence[OffloadKey]]] = []  # reasons of refused jobs in ``_results``
        self.full = ""  # why the storage last refused a block because it was full
        self._closed = False
        self._was_closed = True  # whether the circuit was closed at the last take_answered
        self._openings_counted = 0
        self._doubted = False
        self._probe_key = make_offload_key(bytes(32), 0)
        self._needs_extra_lookup = False
        self._counts = TierCounts(self.metrics, self.name, clock=clock)

    def _open(self) -> Opened:
        """Ask a server to open the namespace, and wait for the answer.

        Raises:
            ConfigError, StoreError: a permanent error.
            ChildProcessError: the server ended by itself before it could serve.
        """
        try:
            self._channel.open()
            until = time.monotonic() + self._options.job_deadline_s
            while (opened := self._channel.take_opened()) is None:
                self._channel.wait(0.05)
                if time.monotonic() > until:
                    text = f"it did not answer within {self._options.job_deadline_s:g} s"
                    opened = Opened(None, StoreTimeoutError(text))
                    break
            if isinstance(opened.error, StoreUnavailableError) and not self._channel.has_heard:
                raise ChildProcessError(str(opened.error))
            if opened.error is not None and not getattr(opened.error, "retryable", False):
                raise opened.error
        except BaseException:
            self._channel.shutdown(0.0)
            raise
        return opened

    def collect(self, collector: CollectorLink) -> None:
        """Use this collector, and close it at shutdown."""
        self._collector = collector
        self._counts.collects()

    def _log(self, text: str) -> None:
        """Log a server's text about an error that only an operator can fix, at most once a minute."""
        if self._clock() >= self._say_at:
            self._say_at = self._clock() + SAY_EVERY_S
            logger.warning("%s", text)

    # -- lookups ---------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        if not self._circuit.closed:
            return False
        if self._needs_extra_lookup:  # sent only together with a lookup that a request waits for
            self._needs_extra_lookup = False
            self._lookup.lookup(make_offload_key(os.urandom(32), 0))
        return self._lookup.lookup(key, "" if req_context is None else req_context.req_id)

    def explain_miss(self, key: OffloadKey, req_context: ReqContext) -> str:
        if not self._circuit.closed:
            return "lookup:circuit_open"
        why = self._lookup.why_absent(key, req_context.req_id)
        if not why and self.nearest is not None:
            self._lookup.look_elsewhere(key, f"{self.nearest['namespace']}_r{self.mapper.rank}")
        return why and f"lookup:{why}"

    def take_reasons(self) -> Iterable[tuple[str, Collection[OffloadKey]]]:
        if found := self._lookup.take_found_elsewhere():
            self._reasons.append(("other_namespace", found))
        reasons = list(self._reasons)
        self._reasons.clear()
        return reasons

    def take_answered(self) -> Mapping[str, Collection[OffloadKey]] | None:
        answered = self._lookup.take_answered()
        was_closed, self._was_closed = self._was_closed, self._circuit.closed
        return answered if self._circuit.closed or not was_closed else None  # just cut off: lookups return "absent"

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookup.finish(req_context.req_id)

    def on_schedule_end(self) -> None:
        self._channel.poll()
        self.nearest = self._channel.nearest
        is_late = self._note_silence()
        if not is_late and self._circuit.take_probe():
            # A random key, which no block has, sent as an ordinary lookup: any answer shows that the storage works.
            self._probe_key = make_offload_key(os.urandom(32), 0)
        if self._circuit.state is CircuitState.HALF_OPEN:
            self._lookup.lookup(self._probe_key)  # in every step, because only this call notices a passed deadline
        self._lookup.flush()
        if self._collector is not None:
            self._poll_collector(self._collector)
        counts = self._lookup.take_counts()
        self._check_health(counts, is_late=is_late)
        self._counts.looked_up(counts)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        if self._collector is not None:
            self._collector.touch(keys)

    def _poll_collector(self, collector: CollectorLink) -> None:
        reports = collector.take_reports()
        self._reasons.extend((f"removed:{reason}", keys) for reason, keys in collector.take_reasons())
        removed, doubtful = collector.take_removed(REMOVED_KEYS_PER_STEP_MAX)
        if removed or doubtful:
            self._lookup.forget((*removed, *doubtful))
        self._events.add(removed, removed=True)
        self._counts.collector_works(collector.works)
        for message in reports:
            self._counts.collected(message)

    @property
    def circuit_state(self) -> CircuitState:
        """Whether the tier is in use (closed), cut off (open), or being probed (half-open)."""
        return self._circuit.state

    def _note_silence(self) -> bool:
        """Doubt silent storage, and cut the tier off if a job is late. Returns whether a job is late."""
        silent_s, late_s = self._channel.silent_s, self._channel.take_late_s()
        # If the storage hangs, each request for a block that is cached as present would wait for a load's deadline.
        was_doubted, self._doubted = self._doubted, silent_s > DOUBT_SHARE * self._options.job_deadline_s
        if self._doubted and not was_doubted:
            self._lookup.doubt()
        if late_s:
            if self._circuit.closed:
                self.metrics.inc("kvtiers_deadline_expired_total", self.name, "job")
            self._circuit.trip(
                f"a load or store has not ended after {late_s:.1f} s (job_deadline_s: "
                f"{self._options.job_deadline_s:g} s)"
            )
        return late_s > 0

    def _check_health(self, counts: LookupCounts, *, is_late: bool) -> None:
        circuit = self._circuit
        if not is_late and self._health.looked_up(counts):
            self._needs_extra_lookup = True
        self._channel.cut("" if circuit.closed else "circuit_open")
        if (opened := self._channel.take_opened()) is not None:
            self._note_opened(opened)
        if circuit.closed and self._clock() >= self._open_namespace_at:
            self._open_namespace_at = math.inf
            self._channel.open()
        self.metrics.set("kvtiers_circuit_closed", self.name, value=float(circuit.closed))
        if circuit.openings > self._openings_counted:
            self.metrics.inc("kvtiers_circuit_opened_total", self.name, by=circuit.openings - self._openings_counted)
            self._openings_counted = circuit.openings

    def _note_opened(self, opened: Opened) -> None:
        """Note the opening of the namespace after a start without the storage."""
        if opened.error is None:
            return
        if getattr(opened.error, "retryable", False):
            self._open_namespace_at = self._clock() + self._options.circuit_probe_s
        else:  # seals keep foreign blocks out
            text = "tier %s: its namespace cannot be opened, so the next start will fail: %s"
            logger.error(text, self.name, opened.error)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata, is_load=True)

    def get_finished(self) -> Iterable[JobResult]:
        self._channel.poll()
        self._book_ended(math.inf if self._closed else BOOKED_KEYS_PER_CALL)
        results, self._results = self._results, []
        self._reasons.extend(self._refusals)  # together with the results, because the engine side uses the last reason
        self._refusals.clear()
        if results and self._collector is not None:
            self._collector.poll()  # perhaps no step follows, and the collector must know the put bytes
        return results

    def descriptors(self) -> Collection[int]:
        return self._channel.descriptors()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    def stop_collector(self) -> None:
        """Stop removing blocks, even if the disk is full. For benchmarks next to a deployment's blocks."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended. Give up when a task has run past ``job_deadline_s``: it may never end."""
        while not self._channel.wait_idle(timeout_s=0.5):
            if self._channel.silent_s > self._options.job_deadline_s:
                in_flight = self._channel.jobs_in_flight
                logger.warning("tier %s: the storage hangs; not waiting for %d jobs", self.name, in_flight)
                break
        self._book_ended(math.inf)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        limit_s = self.shutdown_s
        if self._circuit.closed:
            # Accepted jobs get most of the time to finish; blocks that have begun get the rest to end.
            self._channel.wait_idle(limit_s * DRAIN_SHARE)
        idle = self._channel.shutdown(limit_s * (1 - DRAIN_SHARE))
        if self._collector is not None:
            self._collector.close()
        if idle:
            self._rows.release()
        else:
            # A stuck thread may still use a descriptor of the store. After a close, another file could get its number.
            logger.error("tier %s: the storage hangs: its store and the region stay open after shutdown", self.name)

    def _submit(self, job: JobMetadata, *, is_load: bool) -> None:
        blocks = self._rows.check_ids(job.block_ids)
        if len(blocks) != len(job.keys):
            raise ValueError(f"job {job.job_id} has {len(job.keys)} keys for {len(blocks)} block_ids")
        # If a key is given twice, storing either copy is enough, but a load must fill both slots.
        pairs = list(zip(job.keys, blocks, strict=True))
        if not is_load:
            pairs = list(dict(pairs).items())
        keys = tuple(job.keys)
        refused = "circuit_open" if not self._circuit.closed else ""
        if not (is_load or self.takes_stores):
            refused = "read_only"
        elif not (is_load or refused or self._collector is None) and (full := self._collector.is_full):
            refused, self.full = "StoreFullError", full
        if not refused:
            try:
                to_replace = () if is_load else self._health.to_replace(keys)
                cost = len(pairs) * self._rows.row_bytes
                self._channel.submit(job.job_id, pairs, is_load=is_load, cost=cost, to_replace=to_replace)
            except QueueFullError as e:
                logger.debug("tier %s: job %d: %s", self.name, job.job_id, e)
                refused = "queue_full"
        if refused:
            self._counts.refused(_op(is_load), refused, len(keys), self.full)
            self._results.append(JobResult(job.job_id, success=not keys))
            self._refusals.append((f"{_op(is_load)}:{refused}", keys))
            return
        self._in_flight[job.job_id] = _InFlight(keys, is_load)

    def _book_ended(self, keys_max: float) -> None:
        """Book ended jobs: count them, note their keys, report them. Stop after about ``keys_max`` keys."""
        # A job stays in this queue until it is booked: if booking one raises, the others are not lost.
        self._to_book.extend(self._channel.take_finished())
        while keys_max > 0 and (self._booking is not None or self._to_book):
            booking = self._booking or self._book(self._to_book.popleft())
            self._booking = None
            booked = next(booking, None)
            if booked is not None:
                self._booking = booking
                keys_max -= booked
        self.metrics.set("kvtiers_jobs_in_flight", self.name, value=len(self._in_flight))

    def _book(self, finished: FinishedJob) -> Iterator[int]:
        """Book a job in parts, then report it. Yield the number of keys in each part."""
        job = self._in_flight.pop(finished.job_id)
        try:
            yield from self._book_outcomes(finished, job)
        except Exception:  # the job must be reported, whatever a task returned
            text = "tier %s: the result of job %d cannot be booked, so the job counts as failed"
            logger.exception(text, self.name, finished.job_id)
            self._results.append(JobResult(finished.job_id, success=False))

    def _book_outcomes(self, finished: FinishedJob, job: _InFlight) -> Iterator[int]:
        op = _op(job.is_load)
        batches = finished.batches
        for batch in batches:
            self._counts.moved(batch, op)
        self._health.moved(batches, op)
        succeeded = [key for batch in batches for key in batch.succeeded]
        found = [key for batch in batches for key in batch.found]
        ok = len(succeeded) == finished.blocks
        if job.is_load:
            # A key given twice has failed if either of its slots was not filled.
            if not ok and len(set(job.keys)) < len(job.keys):
                missing = Counter(job.keys) - Counter(succeeded)
                succeeded = [key for key in succeeded if key not in missing]
            yield from self._note_loaded(job.keys, () if ok else succeeded, batches, ok=ok)
        else:
            if self._collector is not None:
                blocks = sum(batch.outcomes["moved"] + batch.perhaps_stored for batch in batches)
                if blocks:
                    self._collector.note_put(blocks * (self._rows.row_bytes + TRAILER_BYTES))
            yield from self._note_stored(succeeded)
        used = succeeded if job.is_load else found  # an already stored block counts as used
        if used:
            self.touch(used)
        if full := next((batch.full for batch in batches if batch.full), ""):
            self.full = full
            if self._collector is not None:
                self._collector.note_full()
        self._note_reasons(op, job.keys, succeeded, batches)
        bytes_moved = sum(batch.bytes_moved for batch in batches)
        outcome = "ok" if ok else "partial" if succeeded else "failed"
        self._counts.job_ended(op, outcome, finished.duration_s, bytes_moved)
        in_order = job.keys
        if not ok:
            done = set(succeeded)
            in_order = tuple(key for key in job.keys if key in done)
        self._results.append(JobResult(finished.job_id, ok, in_order, finished.duration_s, bytes_moved))

    def _note_reasons(
        self, op: Kind, keys: Sequence[OffloadKey], succeeded: Sequence[OffloadKey], batches: Sequence[Batch]
    ) -> None:
        """Note why blocks were not moved. Of errors that do not name their blocks, the job's most frequent counts."""
        if len(succeeded) == len(keys):
            return
        failed = set(keys).difference(succeeded)
        for batch in batches:
            foreign = next((reason for reason in batch.verify_failures if reason in FOREIGN_REASONS), None)
            absent = set(batch.gone).difference(batch.bad)
            failed -= {*batch.gone, *batch.bad}
            for reason, some in (
                ("load:corrupt", batch.bad),
                (f"load:{foreign}" if foreign else "removed:elsewhere", absent),
            ):
                if some:
                    self._reasons.append((reason, list(some)))
        if failed:
            errors = sum((batch.errors for batch in batches), Counter[str]()) or Counter({"error": 1})
            self._reasons.append((f"{op}:{max(errors, key=errors.__getitem__)}", list(failed)))

    def _note_loaded(
        self,
        keys: Sequence[OffloadKey],
        succeeded: Sequence[OffloadKey],
        batches: Sequence[Batch],
        *,
        ok: bool,
    ) -> Iterator[int]:
        """Note which of a load's keys failed, and why. ``succeeded`` is only read if ``ok`` is False."""
        gone = [key for batch in batches for key in batch.gone]
        if not ok:
            done = set(succeeded)
            # A failed key counts as absent now, whatever the reason: answering "present" would loop (vllm#49176).
            for part in _parts([key for key in keys if key not in done]):
                self._lookup.mark(part, present=False)
                yield len(part)
        for batch in batches:
            self._lookup.mark((*batch.unreadable, *batch.bad), present=False, rest_s=REST_S)
        # Report "removed" only for blocks that are gone, not for every failed load: storage that is down for a second
        # still has its blocks, and nothing would announce them again.
        self._events.add(dict.fromkeys(gone), removed=True)
        yield len(gone)

    def _note_stored(self, stored: Sequence[OffloadKey]) -> Iterator[int]:
        """Note which blocks are present after a store."""
        for part in _parts(stored):
            self._lookup.mark(part, present=True)
            if self._collector is not None:
                self._collector.note_stored(part)  # otherwise an older removal could be reported after "stored"
            self._events.add(part, removed=False)
            yield len(part)


def _op(is_load: bool) -> Kind:
    return "load" if is_load else "store"


def _parts(keys: Sequence[OffloadKey]) -> Iterator[Sequence[OffloadKey]]:
    for start in range(0, len(keys), BOOKED_KEYS_PER_CALL):
        yield keys[start : start + BOOKED_KEYS_PER_CALL]
