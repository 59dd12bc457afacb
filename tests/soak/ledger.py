"""Ledger: what the soak knows must be true, kept apart from the code that it checks. Scheduler thread only."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtiers.tiers.base import JobMetadata, JobResult
from kvtiers.tiers.blocks.keys import OffloadKey

T = TypeVar("T")

VIOLATIONS_KEPT = 100  # the first ones; all are counted


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that a tier has not reported."""

    tier: str
    slots: tuple[int, ...]
    keys: frozenset[OffloadKey]
    is_load: bool
    since_s: float


class Ledger:
    """Who may touch which slot, which jobs are owed a result, and what went wrong.

    Args:
        clock: seconds, monotonic.

    Attributes:
        violations: kind -> how often.
        details: the first violations, in words.
        open_jobs: (tier, job id) -> the job.
        jobs: jobs submitted so far.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.violations: Counter[str] = Counter()
        self.details: list[str] = []
        self.open_jobs: dict[tuple[str, int], OpenJob] = {}
        self.jobs = 0
        self._clock = clock
        self._writers: dict[int, str] = {}
        self._readers: Counter[int] = Counter()

    def violate(self, kind: str, detail: str) -> None:
        """Something that must never happen happened."""
        self.violations[kind] += 1
        if len(self.details) < VIOLATIONS_KEPT:
            self.details.append(f"{kind}: {detail}")

    # -- bytes -------------------------------------------------------------------------------------------------------

    def check_bytes(self, what: str, found: NDArray[np.int8], stored: NDArray[np.int8]) -> None:
        """Every byte that is loaded is the one that was stored under the key."""
        if not np.array_equal(found, stored):
            first = int(np.argmax(found != stored))
            self.violate("wrong bytes", f"{what}: {int((found != stored).sum())} bytes differ, the first at {first}")

    # -- slots -------------------------------------------------------------------------------------------------------

    def check_sum(self, counts: Collection[int], num_slots: int) -> None:
        """Slots are conserved: those of all states together are the region's."""
        if sum(counts) != num_slots or min(counts) < 0:
            self.violate("slots not conserved", f"{counts} of {num_slots}")

    def write(self, slots: Iterable[int], who: str) -> None:
        """``who`` fills the slots from now on: nobody else may touch them."""
        for slot in slots:
            if slot in self._writers or self._readers[slot]:
                other = self._writers.get(slot) or f"{self._readers[slot]} readers"
                self.violate("slot in two hands", f"{who} fills slot {slot}, which {other} has")
            self._writers[slot] = who

    def end_write(self, slots: Iterable[int]) -> None:
        """The slots are filled, or given up."""
        for slot in slots:
            self._writers.pop(slot, None)

    def read(self, slots: Iterable[int], who: str) -> None:
        """``who`` reads the slots from now on: nobody may fill them."""
        for slot in slots:
            if slot in self._writers:
                self.violate("slot in two hands", f"{who} reads slot {slot}, which {self._writers[slot]} fills")
            self._readers[slot] += 1

    def end_read(self, slots: Iterable[int]) -> None:
        """They are read."""
        self._readers.subtract(slots)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submitted(self, tier: str, job: JobMetadata, *, is_load: bool) -> None:
        """A tier was given a job; it owes exactly one result."""
        slots = tuple(int(slot) for slot in job.block_ids)
        self.jobs += 1
        self.open_jobs[tier, job.job_id] = OpenJob(tier, slots, frozenset(job.keys), is_load, self._clock())
        (self.write if is_load else self.read)(slots, f"job {job.job_id} of {tier}")

    def reported(self, tier: str, result: JobResult) -> None:
        """A tier reported a job: it touches the slots no more."""
        job = self.open_jobs.pop((tier, result.job_id), None)
        if job is None:
            self.violate("job reported twice", f"job {result.job_id} of {tier} is unknown or was reported before")
            return
        if not job.keys.issuperset(result.successful_keys):
            self.violate("foreign keys in a result", f"job {result.job_id} of {tier}")
        (self.end_write if job.is_load else self.end_read)(job.slots)

    def check_idle(self, counts: Sequence[int], names: Sequence[str], num_slots: int) -> None:
        """After healing: every job was reported and no slot is out of use."""
        self.check_sum(counts, num_slots)
        for (tier, job_id), job in self.open_jobs.items():
            age_s = self._clock() - job.since_s
            self.violate("stuck job", f"job {job_id} of {tier} ({'load' if job.is_load else 'store'}), {age_s:.1f} s")
        for name, count in zip(names, counts, strict=True):
            if name not in ("free", "ready") and count:
                self.violate("leaked slots", f"{count} slots are {name} at idle")


class Pulse:
    """A thread that beats. It is late where it got no core or not the GIL: a call's time says nothing then.

    A call that waits, for storage or for a lock, does not keep the pulse from beating.
    """

    EVERY_S = 0.01
    LATE_S = 0.1

    def __init__(self) -> None:
        self._late_s_and_beat_at = 0.0, time.monotonic()  # one object, as two threads read and write
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="soak-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def late_s(self) -> float:
        """By how much all beats so far were late, the next one included."""
        late_s, beat_at = self._late_s_and_beat_at
        since_s = time.monotonic() - beat_at
        return late_s + (since_s if since_s > self.LATE_S else 0.0)

    def _beat(self) -> None:
        while not self._ended.wait(self.EVERY_S):
            self._late_s_and_beat_at = self.late_s(), time.monotonic()


class CallTimes:
    """Times of the scheduler's calls, in bounded memory.

    Args:
        late_s: see ``Pulse``.
        slow_s: calls of this length and longer are told one by one, with two causes that are not theirs: the time that
            their thread was ready to run and had no core, and what Python's collector took, which runs in whatever call
            allocates next and takes longer the more the process imported.
    """

    STEP_S = 10e-6
    SLOW_KEPT = 20

    def __init__(
        self, clock: Callable[[], float], slow_s: float = 0.02, late_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._clock = clock
        self._late_s = late_s
        self._slow_s = slow_s
        self._steps: Counter[int] = Counter()
        self._start_s = clock()
        self._waited_s = 0.0
        self._collected_s = 0.0
        self.worst_s = 0.0
        self.worst_call = ""
        self.worst_wait_s = 0.0  # of a call, less what all threads of the process waited for a core
        self.slow: list[str] = []

    @property
    def count(self) -> int:
        """Calls timed."""
        return self._steps.total()

    def end_step(self) -> None:
        """A step ended: what a slow call of the next one waited for a core is counted from here."""
        self._waited_s, self._collected_s = waited_for_core_s(), _collector().total_s

    def timed(self, name: str, call: Callable[[], T]) -> T:
        """Make a call and book its time."""
        start_s, late_s = self._clock(), self._late_s()
        try:
            return call()
        finally:
            took_s = self._clock() - start_s
            self.worst_wait_s = max(self.worst_wait_s, took_s - (self._late_s() - late_s))
            self._steps[int(took_s / self.STEP_S)] += 1
            if took_s > self.worst_s:
                self.worst_s, self.worst_call = took_s, name
            if took_s >= self._slow_s and len(self.slow) < self.SLOW_KEPT:
                waited_ms = 1e3 * (waited_for_core_s() - self._waited_s)
                collected_ms = 1e3 * (_collector().total_s - self._collected_s)
                self.slow.append(
                    f"{name}: {1e3 * took_s:.0f} ms at {start_s - self._start_s:.1f} s; in its step {waited_ms:.0f} ms "
                    f"without a core, {collected_ms:.0f} ms in the collector"
                )

    def percentile_s(self, percent: float) -> float:
        """The time that ``percent`` of the calls did not exceed, to 10 µs."""
        left = self.count * percent / 100
        for step, count in sorted(self._steps.items()):
            left -= count
            if left <= 0:
                return (step + 1) * self.STEP_S
        return 0.0


def waited_for_core_s() -> float:
    """How long this thread has been ready to run without a core, ever."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as f:
        return int(f.read().split()[1]) / 1e9


class _Collector:
    """How long Python's collector ran, in all."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._start_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._start_s = now_s
        else:
            self.total_s += now_s - self._start_s


@functools.cache
def _collector() -> _Collector:
    return _Collector()


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """As engines do once they have started: what was imported and made so far is not looked through again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
