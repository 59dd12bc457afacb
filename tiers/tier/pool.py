"""DualQueueThreadPool: a bounded thread pool with a read and a write queue; reports every job exactly once.

A job is a list of tasks. A task is a batch of blocks, because each task costs a queue hop and a GIL hand-over: with one
block per task, throughput was measured at half, with 70 ms stalls of the main thread (a GIL convoy). When many small
jobs wait, a thread may take several tasks at once, up to its share of the queue, if the caller allows it (``joins``).

Some threads take reads first, the others take writes first. Each takes from the other queue when its own is empty, so
no thread idles while a task waits, and neither kind starves the other. On a slow disk, stores may occupy all of these
threads for seconds, so additional threads take only reads.

Ownership: one thread (the scheduler's) calls submit, get_finished, wait_idle and shutdown, and owns the job table. A
pool thread owns the tasks it holds. They exchange tasks through deques and SimpleQueues, whose operations are atomic in
CPython, so there is no lock that a pool thread could hold while the scheduler waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ..errors import QueueFullError

P = TypeVar("P")  # what the caller submits as a task
T = TypeVar("T")  # what a task returns


class Cancelled(Exception):
    """Outcome of a cancelled task, unless the pool has a ``cancel`` function that returns another one."""


@dataclass(frozen=True, slots=True)
class Unfinished(Generic[P]):
    """Outcome of a task that has more to do. The pool puts the rest at the front of the queue.

    Attributes:
        rest: the remaining work; replaces the task.
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
    """Runs jobs on threads that prefer reads, threads that prefer writes, and read-only threads.

    Args:
        run: runs one or more tasks, all reads or all writes; returns their outcomes in order. If it raises, all fail.
        joins: takes a task, and returns a function that is called with each task behind it in the queue. While that
            returns True, the tasks go to ``run`` together.
        cancel: returns the outcome of a task, or the rest of a task, that will not run. Called on any thread.
        n_read_threads: threads that prefer reads, at least 1.
        n_write_threads: threads that prefer writes, at least 1.
        n_read_only_threads: additional threads that take no writes, so that a read need not wait for a write to end.
        name: prefix of the threads' names.
        jobs_max: writes are refused while this many jobs are in flight (not yet returned by get_finished).
        cost_max: maximum total cost (in the caller's unit, such as bytes) of the writes in flight.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        n_read_threads: int,
        n_write_threads: int,
        *,
        run: Callable[[Sequence[P]], Sequence[T | Unfinished[P]]],
        joins: Callable[[P], Callable[[P], bool]] = lambda first: lambda task: False,  # noqa: ARG005 - each task alone
        cancel: Callable[[P], T | BaseException] = lambda task: Cancelled(),  # noqa: ARG005
        name: str,
        jobs_max: int,
        cost_max: int,
        n_read_only_threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(n_read_threads, n_write_threads, jobs_max, cost_max) < 1:
            raise ValueError("n_read_threads, n_write_threads, jobs_max and cost_max must be 1 or more")
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
        # One token per task, which a thread gets before it takes a task, and one per thread at shutdown. Threads wait
        # for tokens inside a C call, so idle threads cost nothing.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        # Wakes the read-only threads, and only when a read waits while all other threads are busy.
        self._read_tokens: SimpleQueue[None] = SimpleQueue()
        self._newest = object()  # replaced after a task is queued and before its token is
        self._ended: SimpleQueue[tuple[_Task[P, T], T | BaseException, float]] = SimpleQueue()
        self._finished: list[FinishedJob[T]] = []
        self._closing = False
        # When thread i started the tasks it runs; only that thread writes entry i. Read-only threads come last.
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

        Reads are not limited: the region's slots bound them, and a refused read would be a miss of a stored block.

        Raises:
            QueueFullError: a write exceeds a limit, or the pool is closed; nothing was queued.
            ValueError: a job with this id is still in flight.
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
        for _ in tasks:  # last, because threads that wake up compete for the GIL
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
        """Number of jobs not yet known to have finished; get_finished and wait_idle update it."""
        return len(self._jobs)

    def longest_running_s(self) -> float:
        """For how long the oldest running task has run; 0 if no task is running."""
        began = [at for at in self._began if at is not None]
        return self._clock() - min(began) if began else 0.0

    def cancel_late(self, older_than_s: float) -> None:
        """Cancel tasks that no thread has started, of jobs older than this. If all threads hang, none would start."""
        limit = self._clock() - older_than_s
        for queue in (self._reads, self._writes):
            for task in queue.copy():  # the whole queue, because requeued tasks at the front are not ordered by age
                if task.job.submitted_at <= limit and _remove(queue, task):
                    self._account(task, self._cancelled(task), self._clock())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job has finished; get_finished returns the results. False: timed out."""
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
        """Cancel waiting tasks, wait for running tasks, and end the threads. Idempotent.

        Returns:
            True if all threads have ended. False: some are stuck in a task, which may still touch its slots. Its job is
            reported if the task ever ends.
        """
        self._closing = True
        for queue in (self._reads, self._writes):
            while (task := _take(queue)) is not None:
                self._account(task, self._cancelled(task), self._clock())
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
        """Wake a thread for a task that was just queued."""
        self._newest = object()
        self._tokens.put(None)
        if queue is self._reads:
            self._offer_read()

    def _offer_read(self) -> None:
        """Wake a read-only thread if a read waits and all other threads are busy.

        Call it after queuing a read and after a thread becomes busy, so that whichever happens later sees the other.
        """
        if self._reads and None not in self._began[: self._general_count]:
            self._read_tokens.put(None)

    def _account(self, task: _Task[P, T], outcome: T | BaseException, ended_at: float) -> None:
        job = task.job
        job.outcomes[task.index] = TypeError("a task must return a value") if outcome is None else outcome
        job.remaining -= 1
        if not job.remaining:
            self._finish(job, ended_at)

    def _finish(self, job: _Job[T], ended_at: float) -> None:
        del self._jobs[job.job_id]
        self._cost -= job.cost
        outcomes = tuple(outcome for outcome in job.outcomes if outcome is not None)
        self._finished.append(FinishedJob(job.job_id, outcomes, ended_at - job.submitted_at))

    def _work(self, seat: int, own: deque[_Task[P, T]], other: deque[_Task[P, T]]) -> None:
        while True:
            self._tokens.get()
            # If the queues are empty, the token's task was cancelled.
            if not self._run_some(seat, self._next_tasks(own, other)) and self._closing:
                self._tokens.put(None)  # so that the next thread ends, too
                return

    def _work_reads_only(self, seat: int) -> None:
        while True:
            self._read_tokens.get()
            has_run = False
            if self._take_token():  # otherwise the threads that have the tokens are about to take the tasks
                has_run = self._run_some(seat, self._take_some(self._reads))
                if not has_run:
                    self._tokens.put(None)  # the token may belong to a write
                    self._offer_read()  # meanwhile another read-only thread may have found no token
            if not has_run and self._closing:
                self._read_tokens.put(None)  # so that the next thread ends, too
                return

    def _run_some(self, seat: int, tasks: Sequence[_Task[P, T]]) -> bool:
        """Run tasks together. False: there are no tasks."""
        if not tasks:
            return False
        self._began[seat] = self._clock()
        self._offer_read()
        outcomes: Sequence[T | Unfinished[P] | BaseException]
        try:
            outcomes = list(self._run([task.work for task in tasks]))
            if len(outcomes) != len(tasks):
                raise TypeError(f"{len(outcomes)} outcomes of {len(tasks)} tasks")
        except BaseException as e:  # noqa: BLE001 - a thread's edge: the jobs must be reported in any case
            # Drop the traceback, whose frames would keep the region's memoryviews alive.
            outcomes = [e.with_traceback(None)] * len(tasks)
        self._began[seat] = None
        self._end_or_requeue(tasks, outcomes)
        return True

    def _end_or_requeue(
        self, tasks: Sequence[_Task[P, T]], outcomes: Sequence[T | Unfinished[P] | BaseException]
    ) -> None:
        """Pass outcomes on, and requeue the tasks that have more to do. Raises nothing: the tasks would be lost."""
        ended_at = self._clock()
        rests = []
        for task, outcome in zip(tasks, outcomes, strict=True):
            if not isinstance(outcome, Unfinished):
                self._ended.put((task, outcome, ended_at))
                continue
            task.work = outcome.rest
            if self._closing:
                self._ended.put((task, self._cancelled(task), ended_at))
            else:
                rests.append(task)
        queue = self._reads if tasks[0].job.is_read else self._writes
        queue.extendleft(reversed(rests))
        for _ in rests:
            self._wake_one(queue)

    def _cancelled(self, task: _Task[P, T]) -> T | BaseException:
        """The outcome of a task that will not run. Raises nothing: the task is in no queue any more."""
        try:
            return self._cancel(task.work)
        except BaseException as e:  # noqa: BLE001 - the job must be reported in any case
            return e.with_traceback(None)

    def _next_tasks(self, own: deque[_Task[P, T]], other: deque[_Task[P, T]]) -> list[_Task[P, T]]:
        """Take the tasks that a thread runs next. Empty if both queues were empty at the same time.

        If a task is queued between the checks of the two queues, another thread may use its token to take the task
        that this thread was woken for. Then only this thread can take the new task, so it checks again.
        """
        while True:
            newest = self._newest
            tasks = self._take_some(own) or self._take_some(other)
            if tasks or newest is self._newest:
                return tasks

    def _take_some(self, queue: deque[_Task[P, T]]) -> list[_Task[P, T]]:
        """Take the next task, for which the caller has a token, and tasks that join it, up to a thread's share."""
        task = _take(queue)
        if task is None:
            return []
        tasks = [task]
        try:
            joins = self._joins(task.work)
            for _ in range(len(queue) // len(self._began)):
                try:
                    task = queue[0]
                except IndexError:
                    break
                # If another thread has the task's token, leave the task to that thread.
                if not (joins(task.work) and self._take_token()):
                    break
                if not _remove(queue, task):
                    self._tokens.put(None)
                    break
                tasks.append(task)
        except BaseException as e:  # noqa: BLE001 - a thread's edge: the tasks are in no queue any more
            self._end_or_requeue(tasks, [e.with_traceback(None)] * len(tasks))
            return []
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
    """Remove this task from the queue. False: another thread has taken it."""
    try:
        queue.remove(task)
    except ValueError:
        return False
    return True
