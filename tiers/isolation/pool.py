"""WorkerPool: starts, lends and ends the worker processes of ``store``."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

from kvtiers.tiers.daemon_pool import DaemonPool
from kvtiers.tiers.errors import StoreClosedError, StoreUnavailableError
from kvtiers.tiers.isolation.loaded_code import OWN_CODE
from kvtiers.tiers.isolation.process import MappedRegion, WorkerProcess
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)


class WorkersUnavailableError(StoreUnavailableError):
    """No worker process can be started, or none lives long enough to take a call. The storage is not at fault."""


class WorkerPool:
    """Workers for calls, one call at a time each, and extra workers on request. Any thread of its process may call.

    A worker is in ``idle``, or belongs to the single thread that has taken it. ``_lock`` guards the tables.

    Args:
        config: sent to each worker at its start.
        region: memory that workers map.
        n_workers: number of workers for calls; workers that end are replaced.
        clock: monotonic seconds.
        hidden_variables: environment variables that are withheld from workers.

    Attributes:
        idle: workers are taken from the end. The worker used last is next, because its caches are warm; a worker that
            was just started comes last, because it must create its store first.
        workers: workers for calls, idle or not.
        stuck_calls: number of killed workers that are not reaped yet: they may still touch the parts of their calls.
        kills: number of workers for calls that were killed or found dead so far.
        closed: whether ``close`` was called.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        region: MappedRegion | None,
        n_workers: int,
        clock: Callable[[], float],
        hidden_variables: Collection[str] = (),
    ) -> None:
        self._config = config
        self._region = region
        self._n_workers = n_workers
        self._clock = clock
        self._hidden_variables = hidden_variables
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: the GC may end a listing's worker while this thread holds it
        self._waiting: deque[Future[WorkerProcess]] = deque()  # callers of ``take``, first come, first served
        self._starting = 0
        self._further: set[WorkerProcess] = set()  # extra workers, of ``start_further``
        self.idle: list[WorkerProcess] = []
        self.workers: set[WorkerProcess] = set()
        self.stuck_calls = 0
        self.kills = 0
        self.closed = False
        try:
            # A single thread for the pool's lifetime, because the kernel kills a worker when the thread that started it
            # ends. A daemon thread, because the interpreter joins all other threads before it calls atexit functions,
            # which may have blocks to store. It would wait for a start that hangs.
            self._starter = DaemonPool(1, "kvtiers-worker-starter")
        except RuntimeError as e:  # the thread limit is reached, or the interpreter is shutting down
            raise WorkersUnavailableError(f"no thread could be started: {e}") from e
        with self._lock:
            self._start_missing()

    def check_usable(self) -> None:
        """Raise StoreClosedError if the pool is closed, or belongs to the parent of this process."""
        if self.closed:
            raise StoreClosedError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreClosedError("the store's workers belong to the process that created it, not to its fork")

    def take(self, wait_s_max: float) -> WorkerProcess:
        """Take a worker for one call, to be returned with ``give_back`` or ``discard``.

        Raises:
            TimeoutError: no worker was free in time.
            StoreClosedError: the pool is closed, or belongs to another process.
            StoreUnavailableError: no worker can be started.
        """
        with self._lock:
            self.check_usable()
            if self.idle and not self._waiting:
                return self.idle.pop()
            place: Future[WorkerProcess] = Future()
            self._waiting.append(place)
            self._start_missing()
        try:
            return place.result(wait_s_max)
        except TimeoutError:
            if not place.cancel():
                return place.result()  # a worker arrived at the last moment
            raise
        except BaseException:
            if not place.cancel() and place.exception() is None:
                self.give_back(place.result())
            raise

    def give_back(self, worker: WorkerProcess) -> None:
        """Return a worker to the pool for the next call."""
        if not self._hand_on(worker):
            self.discard(worker)

    def discard(self, worker: WorkerProcess) -> None:
        """Kill, reap and replace a worker that was taken."""
        self._reap(worker, self.workers)
        with self._lock:
            self.kills += 1
            if not self.closed:
                self._start_missing()

    def start_further(self, wait_s_max: float) -> WorkerProcess:
        """Start an extra worker, to be ended with ``end_further``.

        Raises:
            TimeoutError: the worker did not start in time. If it starts later, it is ended.
            OSError: the worker cannot be started.
            RuntimeError: the pool is closed, or the worker would run different code than this process.
        """
        place = self._starter.submit(self._start, self._further)
        try:
            return place.result(wait_s_max)
        except CancelledError:
            raise RuntimeError("the store was closed") from None
        except TimeoutError:
            if not place.cancel():
                place.add_done_callback(self._end_late)
            raise

    def end_further(self, worker: WorkerProcess) -> None:
        """Kill and reap an extra worker."""
        self._reap(worker, self._further)

    def close(self, within_s: float) -> bool:
        """End all workers; running calls get half of the time to end. Workers that cannot be reaped are left to die.

        Returns:
            Whether this process may now close what it gives to workers (the region). False if a worker is still being
            started, in a fork, and at once if the pool was closed before.
        """
        if os.getpid() != self._pid:
            return False  # in a fork: the workers belong to the parent
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            idle, self.idle = self.idle, []
            workers = self.workers | self._further
            waiting = self._all_waiting()
        _refuse(waiting, StoreClosedError("the store was closed"))
        for worker in idle:
            worker.hang_up()
        started_at = self._clock()
        for kill_at in (started_at + within_s / 2, started_at + within_s):
            workers = {worker for worker in workers if not worker.wait(kill_at - self._clock())}
            for worker in workers:
                worker.process.kill()
        if workers:
            logger.error("%d workers cannot be reaped: %s", len(workers), sorted(w.process.pid for w in workers))
        try:
            # Starting a process reads the interpreter from its disk, which may take long. An empty call waits for that.
            self._starter.submit(int).result(max(0.1, started_at + within_s - self._clock()))
        except TimeoutError:
            logger.error("a worker is still being started; the region's file is left open")
            self._starter.shutdown(0.0)
            return False
        self._starter.shutdown(1.0)  # ends at once, because the starter is idle
        return True

    def _all_waiting(self) -> list[Future[WorkerProcess]]:
        """Remove and return all waiting callers. Call it under the lock."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _hand_on(self, worker: WorkerProcess, *, fresh: bool = False) -> bool:
        """Give a free worker to the caller that has waited longest, or keep it. False: the pool is closed."""
        with self._lock:
            while self._waiting:
                place = self._waiting.popleft()
                if place.set_running_or_notify_cancel():
                    place.set_result(worker)
                    return True
            if not self.closed:
                self.idle.insert(0 if fresh else len(self.idle), worker)
            return not self.closed

    def _reap(self, worker: WorkerProcess, table: set[WorkerProcess]) -> None:
        """Kill a worker and wait until it is reaped."""
        with self._lock:
            self.stuck_calls += 1
        worker.process.kill()
        worker.hang_up()
        worker.process.wait()
        with self._lock:
            self.stuck_calls -= 1
            table.discard(worker)

    def _end_late(self, place: Future[WorkerProcess]) -> None:
        if place.exception() is None:
            self.end_further(place.result())

    def _start_missing(self) -> None:
        """Start replacements until there are ``n_workers``. Call it under the lock."""
        while len(self.workers) + self._starting < self._n_workers:
            self._starter.submit(self._start_idle)
            self._starting += 1

    def _start_idle(self) -> None:
        try:
            worker = self._start(self.workers)
        except Exception as e:  # noqa: BLE001 - a thread's edge: waiting callers must get the error; later ones retry
            with self._lock:
                self._starting -= 1
                # A living worker will be free again for the waiting callers, and the next caller starts more workers.
                waiting = [] if self.workers or self._starting else self._all_waiting()
            _refuse(waiting, WorkersUnavailableError(f"no worker could be started: {type(e).__name__}: {e}"))
            return
        with self._lock:
            self._starting -= 1
        if not self._hand_on(worker, fresh=True):
            self._reap(worker, self.workers)

    def _start(self, table: set[WorkerProcess]) -> WorkerProcess:
        OWN_CODE.check()
        worker = WorkerProcess.start(self._config, self._region, self._clock, self._hidden_variables)
        with self._lock:
            table.add(worker)
        return worker


def _refuse(waiting: list[Future[WorkerProcess]], error: Exception) -> None:
    for place in waiting:
        if place.set_running_or_notify_cancel():
            place.set_exception(error)
