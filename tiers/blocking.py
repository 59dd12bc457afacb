"""BlockingTier: a tier for engines that call and wait, from any thread, with blocks anywhere in their memory.

``open_tier`` opens a BlockingTier. It needs neither a region that all of an engine's processes see, nor an
OffloadingSpec.

Bytes pass through rows that belong to the tier, with one copy on the way. So storage never touches the engine's memory.
A read that hangs may end at any later time. It then writes into a row that stays out of use until the tier has reported
the read (L3). Without the copy, the engine's memory would have to stay out of use for this time, which no engine
offers, and a store that was given up could seal bytes that the engine has written later.

A waiting call also reads the tier's sockets. If several calls wait, one call reads for all. So the tier needs no thread
of its own.
"""

from __future__ import annotations

import itertools
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .base import JobMetadata, ReqContext, SecondaryTierManager
from .blocks.keys import OffloadKey
from .blocks.rows import Rows
from .errors import ConfigError
from .registry import SecondaryTierFactory

Pieces = Sequence[memoryview]
"""A block in the engine's memory: its parts in order, C-contiguous."""

JOB_BYTES_MAX = 16 << 20  # size of a job: its rows are copied while the next job's rows are read
JOB_KEYS_MAX = 256  # blocks of a job; fewer than a tier books in one call
LOOKED_MAX = 256  # keys asked for at once; after a miss, answers for a prefix's later keys are useless
STORE_SHARE = 0.5  # share of the rows for stores; the other rows are for loads only
JOB_S = 20.0  # for a tier without its own deadline
GRACE_S = 1.0  # time for the tier to report a job after its deadline
LISTEN_S = 0.05  # between checks of deadlines while no answer comes
POLL_S = 0.002  # between polls of a tier without descriptors


def open_tier(config: Mapping[str, Any], identity: Any, rows: memoryview, *, block_bytes: int) -> BlockingTier:
    """Open a tier.

    Args:
        config: ``type`` and the tier's options.
        identity: everything that the bytes depend on, in the form of an engine's spec: ``config``, optionally
            ``metrics``.
        rows: (rows, row_bytes), writable, for this tier only. ``row_bytes`` is a multiple of 4,096. Blocks that are
            shorter are padded with zeros. Memory of a file lets the tier work in processes of its own.
        block_bytes: size of every block.

    Raises:
        ConfigError: names the option that is wrong, or ``rows`` cannot hold blocks of this size.
        StoreError: the storage failed with a permanent error.
    """
    shape = Rows(rows)
    if not 0 < block_bytes <= shape.row_bytes or shape.num_rows < 2:
        text = f"has {shape.num_rows} rows of {shape.row_bytes} bytes; needs 2 or more of at least {block_bytes}"
        raise ConfigError(text, field="rows")
    tier = SecondaryTierFactory.create_secondary_tier(dict(config), rows, identity)
    return BlockingTier(tier, rows, block_bytes)


@dataclass(slots=True, eq=False)
class _Job:
    """A job of the tier.

    Attributes:
        first: index of its first block in the call.
        until: time at which the call gives the job up.
        done: the keys that succeeded. None: the tier may still use the rows.
        is_abandoned: no call waits for the job.
    """

    rows: list[int]
    first: int
    is_store: bool
    until: float = 0.0
    done: Collection[OffloadKey] | None = ()
    is_abandoned: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """A call of ``load_many`` or ``store_many``. Blocks from ``next`` on have no rows yet.

    Attributes:
        until: blocks without rows at this time are False in the result.
    """

    keys: Sequence[OffloadKey]
    blocks: Sequence[Pieces]
    is_store: bool
    until: float
    done: list[bool]
    next: int = 0
    jobs: list[_Job] = field(default_factory=list)


class BlockingTier:
    """Stores, loads and looks up blocks, and waits for the end. Any thread may call, several at once.

    A call ends within little more than twice the tier's ``job_deadline_s``, even if the storage hangs: blocks wait that
    long for rows, and jobs that long for the storage. Blocks that are not done by then are False in the result. A load
    that was given up keeps its rows until the tier reports it, and never writes to the caller's memory.

    An exception that the tier raises passes through. The tier may have begun a job whose submission raised, and may
    never report it, so the job's rows stay out of use until its deadline.

    Args:
        tier: closed by ``close``. Only this object may call it.
        rows: see ``open_tier``.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        rows: memoryview,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.block_bytes = block_bytes
        count = rows.shape[0] if rows.shape else 0
        self._memory = np.frombuffer(rows.cast("B"), np.uint8).reshape(count, -1)
        self._clock = clock
        self._news = threading.Condition()  # guards the tier and all fields below
        self._is_listening = False
        self._free = list(range(count))
        self._for_stores = max(1, int(count * STORE_SHARE))  # rows that stores may still take
        self._jobs: dict[int, _Job] = {}  # id -> job, until the tier reports the job
        self._raised: dict[int, _Job] = {}  # ids of jobs whose submission raised
        self._held: set[_Job] = set()  # all jobs that hold rows
        self._ids = itertools.count(1)
        self._answered: dict[str, bool] = {}  # whether a lookup in progress has new answers
        self._job_s = JOB_S if tier.job_deadline_s is None else tier.job_deadline_s
        self._job_rows_max = max(1, min(JOB_KEYS_MAX, JOB_BYTES_MAX // max(1, self._memory.shape[1])))
        self._is_closed = False

    # ---- what engines call -----------------------------------------------------------------------------------------

    def exists_many(self, keys: Sequence[OffloadKey], *, prefix_only: bool = False) -> list[bool]:
        """Whether each key is stored.

        Args:
            prefix_only: keys after the first absent key may be given as False.
        """
        found = [False] * len(keys)
        with self._news:
            if self._is_closed:
                return found
            self._pump()
            context = ReqContext(f"call {next(self._ids)}")
            self._answered[context.req_id] = False
            until = self._clock() + 2 * self._job_s
            try:
                for start in range(0, len(keys), LOOKED_MAX):
                    some = self._look(keys[start : start + LOOKED_MAX], context, until, prefix_only=prefix_only)
                    found[start : start + LOOKED_MAX] = some
                    if prefix_only and not all(some):
                        break
            finally:
                del self._answered[context.req_id]
                if not self._is_closed:
                    self.tier.on_request_finished(context)
        return found

    def load_many(self, keys: Sequence[OffloadKey], blocks: Sequence[Pieces]) -> list[bool]:
        """Fill blocks. Where the result is False, a block has its former content."""
        return self._move(keys, blocks, is_store=False)

    def store_many(self, keys: Sequence[OffloadKey], blocks: Sequence[Pieces]) -> list[bool]:
        """Store blocks. True: the block is stored, perhaps by another engine. A read-only tier stores nothing."""
        if not self.tier.takes_stores:
            return [False] * len(keys)
        return self._move(keys, blocks, is_store=True)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Note that blocks were used: a bounded tier removes other blocks before them."""
        with self._news:
            if not self._is_closed:
                self.tier.touch(keys)

    def close(self) -> None:
        """Finish the accepted jobs within the tier's limit. Calls in progress end, and later calls do nothing."""
        with self._news:
            if not self._is_closed:
                self._is_closed = True
                self.tier.shutdown()
                self._news.notify_all()

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def _move(self, keys: Sequence[OffloadKey], blocks: Sequence[Pieces], *, is_store: bool) -> list[bool]:
        for pieces in blocks:
            if (size := sum(piece.nbytes for piece in pieces)) != self.block_bytes:
                raise ValueError(f"a block has {size} bytes; all blocks of this tier have {self.block_bytes}")
        call = _Call(keys, blocks, is_store, self._clock() + self._job_s, [False] * len(keys))
        with self._news:
            self._pump()  # rows may have come back since the last call
        try:
            while not self._is_closed and (call.jobs or call.next < len(keys)):
                if (job := self._take_rows(call)) is not None:
                    self._begin(call, job)
                    continue
                ended = self._take_ended(call)
                for job in ended:
                    self._end(call, job)
                if not ended and not call.jobs and not self._may_get_rows(call):
                    break
        finally:
            with self._news:
                for job in list(call.jobs):
                    self._leave(call, job)
        return call.done

    def _take_rows(self, call: _Call) -> _Job | None:
        """Take free rows for a call's next blocks. None: all blocks have had rows, or no row is free."""
        with self._news:
            if self._is_closed or call.next == len(call.keys) or not self._has_rows(call):
                return None
            count = min(len(call.keys) - call.next, len(self._free), self._job_rows_max)
            if call.is_store:
                count = min(count, self._for_stores)
            seen: set[OffloadKey] = set()
            for key in call.keys[call.next : call.next + count]:
                if key in seen:  # a job has each key only once; the next job begins with this key
                    break
                seen.add(key)
            count = len(seen)
            job = _Job(self._free[:count], call.next, call.is_store)
            del self._free[:count]
            self._held.add(job)
            self._for_stores -= count if call.is_store else 0
            call.next += count
            call.jobs.append(job)
            return job

    def _begin(self, call: _Call, job: _Job) -> None:
        keys = call.keys[job.first : job.first + len(job.rows)]
        if call.is_store:
            for row, pieces in zip(job.rows, call.blocks[job.first : job.first + len(job.rows)], strict=True):
                at, memory = 0, self._memory[row]
                for piece in pieces:
                    np.copyto(memory[at : at + piece.nbytes], np.frombuffer(piece, np.uint8))
                    at += piece.nbytes
                memory[at:] = 0
        with self._news:
            if self._is_closed:
                return
            job_id = next(self._ids)
            metadata = JobMetadata(job_id, keys, np.asarray(job.rows, np.int32))
            job.until = self._clock() + self._job_s + GRACE_S
            job.done = None
            self._jobs[job_id] = job
            self._raised[job_id] = job  # removed below unless the submission raises
            (self.tier.submit_store if call.is_store else self.tier.submit_load)(metadata)
            del self._raised[job_id]
            self._pump()

    def _take_ended(self, call: _Call) -> list[_Job]:
        """Wait for a job's end, or for free rows if it has no job. Return the jobs that ended or were given up."""
        with self._news:
            until = min((job.until for job in call.jobs), default=call.until)

            def is_over() -> bool:
                if self._is_closed or any(job.done is not None for job in call.jobs):
                    return True
                if call.next == len(call.keys):
                    return False
                return self._has_rows(call) or not (call.jobs or self._may_get_rows(call))

            self._wait(is_over, until)
            now = self._clock()
            return [job for job in call.jobs if job.done is not None or now >= job.until]

    def _may_get_rows(self, call: _Call) -> bool:
        """Whether the call may take rows, or soon may. Rows of jobs that were given up may stay out of use for long."""
        with self._news:
            if self._has_rows(call):
                return True
            return self._clock() < call.until and any(not job.is_abandoned for job in self._held)

    def _has_rows(self, call: _Call) -> bool:
        """Whether the call may take rows: some are free, and it has not waited for too long."""
        return bool(self._free) and (not call.is_store or self._for_stores > 0) and self._clock() < call.until

    def _end(self, call: _Call, job: _Job) -> None:
        """Copy the loaded blocks, and free rows unless the tier may still use them."""
        keys = call.keys[job.first : job.first + len(job.rows)]
        for index, (row, key) in enumerate(zip(job.rows, keys, strict=True), job.first):
            if job.done is None or key not in job.done:
                continue
            if not call.is_store:
                at, memory = 0, self._memory[row]
                for piece in call.blocks[index]:
                    np.copyto(np.frombuffer(piece, np.uint8), memory[at : at + piece.nbytes])
                    at += piece.nbytes
            call.done[index] = True
        with self._news:
            self._leave(call, job)

    def _leave(self, call: _Call, job: _Job) -> None:
        call.jobs.remove(job)
        job.is_abandoned = True
        if job.done is not None:
            self._release(job)

    def _release(self, job: _Job) -> None:
        self._free += job.rows
        self._held.remove(job)
        self._for_stores += len(job.rows) if job.is_store else 0
        self._news.notify_all()

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def _look(self, keys: Sequence[OffloadKey], context: ReqContext, until: float, *, prefix_only: bool) -> list[bool]:
        found = [False] * len(keys)
        left = list(range(len(keys)))
        while left and not self._is_closed:
            self._answered[context.req_id] = False
            unknown = []
            for index in left:
                answer = self.tier.lookup(keys[index], context)
                if answer is None:
                    unknown.append(index)
                else:
                    found[index] = answer
                    if prefix_only and not answer:
                        break
            left = unknown
            if left:
                self._pump()
                self._wait(lambda: self._answered[context.req_id] or self._is_closed, until)
                if self._clock() >= until:
                    break
        return found

    # ---- the tier --------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Make the calls that an engine makes in a step."""
        if self._is_closed:
            return
        self.tier.on_schedule_end()
        while results := list(self.tier.get_finished()):
            for result in results:
                self._note_end(result.job_id, result.successful_keys)
        if self._raised:
            now = self._clock()
            for job_id in [job_id for job_id, job in self._raised.items() if now >= job.until]:
                self._note_end(job_id, ())
        answered = self.tier.take_answered()
        for req_id in self._answered if answered is None else answered.keys() & self._answered.keys():
            self._answered[req_id] = True
        for _ in self.tier.take_events():
            pass

    def _note_end(self, job_id: int, done: Collection[OffloadKey]) -> None:
        self._raised.pop(job_id, None)
        if (job := self._jobs.pop(job_id, None)) is not None:
            job.done = frozenset(done)
            if job.is_abandoned:
                self._release(job)

    def _wait(self, is_over: Callable[[], bool], until: float) -> None:
        """Wait while the tier works. The first of several waiting calls listens for all."""
        while not is_over() and (left_s := until - self._clock()) > 0:
            if self._is_listening:
                self._news.wait(min(left_s, LISTEN_S))
                continue
            listener = select.poll()
            descriptors = self.tier.descriptors()
            for fd in descriptors:
                listener.register(fd, select.POLLIN)
            self._is_listening = True
            try:  # a signal's exception may come after any of these calls
                self._news.release()
                listener.poll(1000 * min(left_s, LISTEN_S if descriptors else POLL_S))
            finally:
                self._is_listening = False
                self._news.acquire()
            self._pump()
            self._news.notify_all()
