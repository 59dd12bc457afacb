"""DualQueueThreadPool: loads before stores, bounded, every job reported exactly once.

A job is a list of tasks. A task is a batch of blocks, because each costs a queue hop and a GIL hand-over: one block a
task was measured at half the throughput, with 70 ms stalls of the main thread (a GIL convoy). Where many small jobs
wait, a thread may take several tasks at once, up to its share of the queue, if the caller says that they go together.

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

from kvtiers.tiers.errors import QueueFullError

P = TypeVar("P")  # what the caller submits as a task
T = TypeVar("T")  # what a task returns


class Cancelled(Exception):
    """Outcome of a task that was cancelled, where the pool was not told another one."""


@dataclass(frozen=True, slots=True)
class Unfinished(Generic[P]):
    """Outcome of a task that has more to do. The pool queues the rest before everything else that waits.

    Attributes:
        rest: replaces the task.
    """

    rest: P


@dataclass(frozen=True, slots=True)
class FinishedJob(Generic[T]):
    """A job whose tasks have all ended.

    Attributes:
        outcomes: parallel to the submitted tasks: what each returned or raised, or what ``cancel`` returned for it.
        duration_s: from submission to the end of the last task.
    """

    job_id: int
    outcomes: tuple[T | BaseException, ...]
    duration_s: float


@dataclass(slots=True)
class _Job(Generic[T]):
    job_id: int
    is_read: bool
    cost: int
    submitted_at: float
    outcomes: list[T | BaseException | None]
    remaining: int


@dataclass(slots=True, eq=False)  # compared by identity, so that deque.remove runs no Python code and is atomic
class _Task(Generic[P, T]):
    job: _Job[T]
    index: int
    work: P


class DualQueueThreadPool(Generic[P, T]):
    """Runs jobs on read-preferring and write-preferring threads, and on some for reads only.

    Args:
        run: does some tasks of one kind; returns what each came to. What it raises fails all of them.
        joins: whether a task should be given to ``run`` together with others.
        cancel: the outcome of a task, or of the rest of one, that will not be run. Any thread.
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
        run: Callable[[Sequence[P]], Sequence[T | Unfinished[P]]],
        joins: Callable[[Sequence[P], P], bool] = lambda tasks, task: False,  # noqa: ARG005 - each task alone
        cancel: Callable[[P], T | BaseException] = lambda task: Cancelled(),  # noqa: ARG005
        name: str,
        jobs_max: int,
        cost_max: int,
        n_read_only_threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(n_read_threads, n_write_threads, jobs_max, cost_max) < 1:
            raise ValueError("n_read_threads, n_write_threads, jobs_max and cost_max are 1 or more")
        self._run = run
        self._joins = joins
        self._cancel = cancel
        self._jobs_max = jobs_max
        self._cost_max = cost_max
        self._clock = clock
        self._jobs: dict[int, _Job[T]] = {}
        self._cost = 0
        self._reads: deque[_Task[P, T]] = deque()
        self._writes: deque[_Task[P, T]] = deque()
        # A token for each task, which a thread gets before it takes a task, and for each thread at shutdown. Waiting is
        # a call in C: idle threads cost nothing.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        # For the read-only threads: they are woken only for reads that wait while all other threads are busy.
        self._read_tokens: SimpleQueue[None] = SimpleQueue()
        self._newest = object()  # replaced after a task was queued and before its token is
        self._ended: SimpleQueue[tuple[_Task[P, T], T | BaseException, float]] = SimpleQueue()
        self._finished: list[FinishedJob[T]] = []
        self._closing = False
        # When thread i began what it runs; only that thread writes slot i. Read-only threads come last.
        self._general_count = n_read_threads + n_write_threads
        self._began: list[float | None] = [None] * (n_read_threads + n_write_threads + n_read_only_threads)
        seats = iter(range(len(self._began)))
        general, reads_only = self._work, self._work_reads_only
        self._threads = [
            threading.Thread(target=work, args=(next(seats), *queues), name=f"{name}-{kind}{i}", daemon=True)
            for kind, count, work, queues in (
                ("read", n_read_threads, general, (self._reads, self._writes)),
                ("write", n_write_threads, general, (self._writes, self._reads)),
                ("readonly", n_read_only_threads, reads_only, ()),
            )
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job_id: int, tasks: Sequence[P], *, is_read: bool, cost: int = 0) -> None:
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
        job = _Job[T](job_id, is_read, cost, self._clock(), [None] * len(tasks), len(tasks))
        self._jobs[job_id] = job
        self._cost += cost
        if not tasks:
            self._finish(job, job.submitted_at)
            return
        queue = self._reads if is_read else self._writes
        queue.extend([_Task(job, index, work) for index, work in enumerate(tasks)])
        for _ in tasks:  # last: threads that wake up want the GIL
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
        began = [at for at in self._began if at is not None]
        return self._clock() - min(began) if began else 0.0

    def cancel_late(self, older_than_s: float) -> None:
        """Cancel tasks of older jobs that no thread has begun: where all threads hang, none ever would."""
        limit = self._clock() - older_than_s
        for queue in (self._reads, self._writes):
            for task in queue.copy():  # whole, because the rests in front are in no order
                if task.job.submitted_at <= limit and _remove(queue, task):
                    self._account(task, self._cancel(task.work), self._clock())

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
                self._account(task, self._cancel(task.work), self._clock())
        for _ in self._threads:
            self._tokens.put(None)
            self._read_tokens.put(None)
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while not self._ended.empty():
            self._account(*self._ended.get_nowait())
        return not self._threads

    def _wake_one(self, queue: deque[_Task[P, T]]) -> None:
        """Wake a thread for a task that was queued."""
        self._newest = object()
        self._tokens.put(None)
        if queue is self._reads:
            self._offer_read()

    def _offer_read(self) -> None:
        """Wake a read-only thread if a read waits and all other threads are busy.

        Called after a read was queued and after a thread became busy, so that the later of the two sees the other.
        """
        if self._reads and None not in self._began[: self._general_count]:
            self._read_tokens.put(None)

    def _account(self, task: _Task[P, T], outcome: T | BaseException, ended_at: float) -> None:
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

    def _work(self, seat: int, own: deque[_Task[P, T]], other: deque[_Task[P, T]]) -> None:
        while True:
            self._tokens.get()
            # If there is nothing, the token's task was cancelled.
            if not self._run_some(seat, self._next_tasks(own, other)) and self._closing:
                self._tokens.put(None)  # for the next thread's end
                return

    def _work_reads_only(self, seat: int) -> None:
        while True:
            self._read_tokens.get()
            has_run = False
            if self._take_token():  # else the threads that have the tokens are about to take tasks
                has_run = self._run_some(seat, self._take_some(self._reads))
                if not has_run:
                    self._tokens.put(None)  # it may be a write's
                    self._offer_read()  # another read-only thread may have found no token meanwhile
            if not has_run and self._closing:
                self._read_tokens.put(None)  # for the next thread's end
                return

    def _run_some(self, seat: int, tasks: Sequence[_Task[P, T]]) -> bool:
        """Run tasks together. False: there are none."""
        if not tasks:
            return False
        self._began[seat] = self._clock()
        self._offer_read()
        outcomes: Sequence[T | Unfinished[P] | BaseException]
        try:
            outcomes = self._run([task.work for task in tasks])
        except BaseException as e:  # noqa: BLE001 - a thread's edge: whatever it was, the jobs must be reported
            # Without its traceback, whose frames would keep the region's memoryviews alive.
            outcomes = [e.with_traceback(None)] * len(tasks)
        self._began[seat] = None
        self._end_or_requeue(tasks, outcomes)
        return True

    def _end_or_requeue(
        self, tasks: Sequence[_Task[P, T]], outcomes: Sequence[T | Unfinished[P] | BaseException]
    ) -> None:
        ended_at = self._clock()
        rests = []
        for task, outcome in zip(tasks, outcomes, strict=True):
            if not isinstance(outcome, Unfinished):
                self._ended.put((task, outcome, ended_at))
            elif self._closing:
                self._ended.put((task, self._cancel(outcome.rest), ended_at))
            else:
                task.work = outcome.rest
                rests.append(task)
        queue = self._reads if tasks[0].job.is_read else self._writes
        queue.extendleft(reversed(rests))
        for _ in rests:
            self._wake_one(queue)

    def _next_tasks(self, own: deque[_Task[P, T]], other: deque[_Task[P, T]]) -> list[_Task[P, T]]:
        """The tasks that a thread runs next; none if both queues were empty at the same time.

        If a task is queued between the two looks, another thread may use its token to take the task that this thread
        was woken for. Then only this thread can take the new task.
        """
        while True:
            newest = self._newest
            tasks = self._take_some(own) or self._take_some(other)
            if tasks or newest is self._newest:
                return tasks

    def _take_some(self, queue: deque[_Task[P, T]]) -> list[_Task[P, T]]:
        """The next task, for which the caller has a token, and those that join it, up to a thread's share."""
        task = _take(queue)
        if task is None:
            return []
        tasks, work = [task], [task.work]
        for _ in range(len(queue) // len(self._began)):
            try:
                task = queue[0]
            except IndexError:
                break
            # A task whose token is gone is left to the thread that has the token.
            if not (self._joins(work, task.work) and self._take_token()):
                break
            if not _remove(queue, task):
                self._tokens.put(None)
                break
            tasks.append(task)
            work.append(task.work)
        return tasks

    def _take_token(self) -> bool:
        try:
            self._tokens.get_nowait()
        except Empty:
            return False
        return True


def _take(queue: deque[_Task[P, T]]) -> _Task[P, T] | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


def _remove(queue: deque[_Task[P, T]], task: _Task[P, T]) -> bool:
    """Take this task out. False: another thread has taken it."""
    try:
        queue.remove(task)
    except ValueError:
        return False
    return True
