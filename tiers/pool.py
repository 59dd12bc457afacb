"""DualQueueThreadPool: loads before stores, bounded, every job reported exactly once.

A job is a list of tasks. A task is a batch of blocks, because each costs a queue hop and a GIL hand-over: one block a
task was measured at half the throughput, with 70 ms stalls of the main thread (a GIL convoy).

Some threads take reads first, the others writes first, and each turns to the other queue when its own is empty: no
thread idles while anything waits, and neither kind starves the other. On a slow disk, tasks of stores may keep all of
these threads for seconds; further threads take reads only.

Who owns what: one thread (the scheduler's) calls submit, get_finished, wait_idle and shutdown, and owns the job table.
A worker owns the task it holds. Between them are deques and SimpleQueues, whose operations are atomic in CPython: there
is no lock that a worker could hold while the scheduler waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from tiers.errors import QueueFullError

T = TypeVar("T")


class Cancelled(Exception):
    """Outcome of a task that was never started because the pool shut down."""


@dataclass(frozen=True, slots=True)
class FinishedJob(Generic[T]):
    """A job whose tasks have all ended.

    Attributes:
        outcomes: parallel to the submitted tasks: what the task returned, what it raised, or Cancelled.
        duration_s: from submission to the end of the last task.
    """

    job_id: int
    outcomes: tuple[T | BaseException, ...]
    duration_s: float


@dataclass(slots=True)
class _Job(Generic[T]):
    job_id: int
    cost: int
    submitted_at: float
    outcomes: list[T | BaseException | None]
    remaining: int


@dataclass(slots=True)
class _Task(Generic[T]):
    job: _Job[T]
    index: int
    run: Callable[[], T]
    started_at: float = 0.0


class DualQueueThreadPool(Generic[T]):
    """Runs jobs on read-preferring and write-preferring threads, and on some for reads only.

    Args:
        n_read_threads: threads that prefer reads, at least 1.
        n_write_threads: threads that prefer writes, at least 1.
        n_read_only_threads: further threads, which take no writes, so that a read need not wait for one to end.
        name: prefix of the threads' names.
        jobs_max: jobs in flight, not yet returned by get_finished, beyond which writes are refused.
        cost_max: sum of the costs (the caller's unit, such as bytes) of writes in flight.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        n_read_threads: int,
        n_write_threads: int,
        *,
        name: str,
        jobs_max: int,
        cost_max: int,
        n_read_only_threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(n_read_threads, n_write_threads, jobs_max, cost_max) < 1:
            raise ValueError("n_read_threads, n_write_threads, jobs_max and cost_max are 1 or more")
        self._jobs_max = jobs_max
        self._cost_max = cost_max
        self._clock = clock
        self._jobs: dict[int, _Job[T]] = {}
        self._cost = 0
        self._reads: deque[_Task[T]] = deque()
        self._writes: deque[_Task[T]] = deque()
        # A token for each task, and for each thread at shutdown. Waiting is a call in C: idle threads cost nothing.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._read_tokens: SimpleQueue[None] = SimpleQueue()  # a read's second token, for the read-only threads
        self._ended: SimpleQueue[tuple[_Task[T], T | BaseException, float]] = SimpleQueue()
        self._finished: list[FinishedJob[T]] = []
        self._closing = False
        # The task that thread i runs; only that thread writes slot i.
        self._current: list[_Task[T] | None] = [None] * (n_read_threads + n_write_threads + n_read_only_threads)
        seats = iter(range(len(self._current)))
        self._threads = [
            threading.Thread(target=self._work, args=(next(seats), *queues), name=f"{name}-{kind}{i}", daemon=True)
            for kind, count, queues in (
                ("read", n_read_threads, (self._tokens, self._reads, self._writes)),
                ("write", n_write_threads, (self._tokens, self._writes, self._reads)),
                ("readonly", n_read_only_threads, (self._read_tokens, self._reads, deque[_Task[T]]())),
            )
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job_id: int, tasks: Sequence[Callable[[], T]], *, is_read: bool, cost: int = 0) -> None:
        """Queue a job. A job without tasks is finished at once.

        Reads are not limited: the region's slots bound them, and a read that is refused is a miss of what is there.

        Raises:
            QueueFullError: a limit is reached by a write, or the pool is closed; nothing was queued.
            ValueError: a job of this id is not yet reported.
        """
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is already in flight")
        if self._closing:
            raise QueueFullError("the pool is shut down")
        if is_read:
            cost = 0
        elif len(self._jobs) >= self._jobs_max:
            raise QueueFullError(f"{self._jobs_max} jobs in flight")
        elif self._cost + cost > self._cost_max and self._cost:
            raise QueueFullError(f"{self._cost} of {self._cost_max} bytes in flight, the job has {cost}")
        job = _Job[T](job_id, cost, self._clock(), [None] * len(tasks), len(tasks))
        self._jobs[job_id] = job
        self._cost += cost
        if not tasks:
            self._finish(job, job.submitted_at)
            return
        queue = self._reads if is_read else self._writes
        for index, run in enumerate(tasks):
            queue.append(_Task(job, index, run))
            self._wake_one(queue)

    def get_finished(self) -> list[FinishedJob[T]]:
        """Jobs that finished since the last call. Does not wait."""
        while True:
            try:
                ended = self._ended.get_nowait()
            except Empty:
                break
            self._account(*ended)
        finished, self._finished = self._finished, []
        return finished

    @property
    def jobs_in_flight(self) -> int:
        """Jobs not yet finished, as far as the owner has looked."""
        return len(self._jobs)

    def longest_running_s(self) -> float:
        """For how long the oldest running task has run; 0 where none runs."""
        started = [task.started_at for task in self._current if task is not None]
        return self._clock() - min(started) if started else 0.0

    def cancel_late(self, older_than_s: float) -> None:
        """Cancel tasks of older jobs that no thread has begun: where all threads hang, none ever would."""
        limit = self._clock() - older_than_s
        for queue in (self._reads, self._writes):
            while (task := _take(queue)) is not None:
                if task.job.submitted_at > limit:
                    queue.appendleft(task)
                    self._wake_one(queue)  # a thread may have looked while it was out of the queue
                    break
                self._account(task, Cancelled(), self._clock())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job finished; the results stay for get_finished. False: the time was up before."""
        deadline = self._clock() + timeout_s
        while self._jobs:
            left_s = deadline - self._clock()
            if left_s <= 0:
                return False
            try:
                self._account(*self._ended.get(timeout=left_s))
            except Empty:
                return False
        return True

    def shutdown(self, timeout_s: float) -> bool:
        """Cancel what waits, wait for what runs, end the threads. Idempotent.

        Returns:
            True when no thread runs any more. Otherwise some are stuck in a task, which may still touch its slots: its
            job is reported if it ever ends.
        """
        self._closing = True
        for queue in (self._reads, self._writes):
            while (task := _take(queue)) is not None:
                self._account(task, Cancelled(), self._clock())
        for _ in self._threads:
            self._wake_one(self._reads)
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while not self._ended.empty():
            self._account(*self._ended.get_nowait())
        return not self._threads

    def _wake_one(self, queue: deque[_Task[T]]) -> None:
        self._tokens.put(None)
        if queue is self._reads:
            self._read_tokens.put(None)

    def _account(self, task: _Task[T], outcome: T | BaseException, ended_at: float) -> None:
        job = task.job
        job.outcomes[task.index] = outcome
        job.remaining -= 1
        if not job.remaining:
            self._finish(job, ended_at)

    def _finish(self, job: _Job[T], ended_at: float) -> None:
        del self._jobs[job.job_id]
        self._cost -= job.cost
        outcomes = tuple(outcome for outcome in job.outcomes if outcome is not None)
        assert len(outcomes) == len(job.outcomes), "a task must return a value"
        self._finished.append(FinishedJob(job.job_id, outcomes, ended_at - job.submitted_at))

    def _work(self, seat: int, tokens: SimpleQueue[None], own: deque[_Task[T]], other: deque[_Task[T]]) -> None:
        while True:
            tokens.get()
            task = _take(own) or _take(other)
            while task is None and (own or other):  # a task came between the two looks; its token is another thread's
                task = _take(own) or _take(other)
            if task is None:
                if self._closing:
                    return
                continue  # the token's task was cancelled, or taken with its other token
            task.started_at = self._clock()
            self._current[seat] = task
            outcome: T | BaseException
            try:
                outcome = task.run()
            except BaseException as e:  # noqa: BLE001 - a thread's edge: whatever it was, the job must be reported
                # Without its traceback, whose frames would keep the region's memoryviews alive.
                outcome = e.with_traceback(None)
            self._current[seat] = None
            self._ended.put((task, outcome, self._clock()))
            del task, outcome


def _take(queue: deque[_Task[T]]) -> _Task[T] | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
