"""WorkerPool: the worker processes of ``store``: starts them, lends them, ends them."""

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
    """No worker process can be started, or none lives long enough to take a call. No fault of the storage's."""


class WorkerPool:
    """Workers for one call at a time each, and further ones on request. For any thread of the process that made it.

    A worker is in ``idle`` or belongs to the one thread that has taken it. ``_lock`` guards the tables.

    Args:
        config: what a worker is told at its start.
        region: memory that workers map.
        n_workers: workers for calls; those that end are replaced.
        clock: monotonic seconds.
        hidden_variables: environment variables that workers do not get.

    Attributes:
        idle: taken from the end. The one used last is next, as its caches are warm; one that was just started comes
            last, as it has to make its store first.
        workers: for calls, idle or not.
        stuck_calls: workers that were killed and are not reaped yet: they may still touch what they worked on.
        kills: workers for calls that were killed or found dead, so far.
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
        self._lock = threading.RLock()  # reentrant: a listing may be collected, and its worker ended, under it
        self._waiting: deque[Future[WorkerProcess]] = deque()  # who comes first is served first
        self._starting = 0
        self._further: set[WorkerProcess] = set()
        self.idle: list[WorkerProcess] = []
        self.workers: set[WorkerProcess] = set()
        self.stuck_calls = 0
        self.kills = 0
        self.closed = False
        try:
            # One thread for the pool's life, because the kernel kills a worker when the thread that started it ends. A
            # daemon, because the interpreter joins all others before it calls atexit's functions, which may have blocks
            # to store: it would wait for a start that hangs.
            self._starter = DaemonPool(1, "kvtiers-worker-starter")
        except RuntimeError as e:  # the limit of threads, or the interpreter is shutting down
            raise WorkersUnavailableError(f"no thread could be started: {e}") from e
        with self._lock:
            self._start_missing()

    def check_usable(self) -> None:
        """Raise StoreClosedError where no call may begin."""
        if self.closed:
            raise StoreClosedError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreClosedError("the store's workers belong to the process that made it, not to its fork")

    def take(self, wait_s_max: float) -> WorkerProcess:
        """Take a worker for one call, to be returned with ``give_back`` or ``discard``.

        Raises:
            TimeoutError: none was free in time.
            StoreClosedError: the pool is closed, or another process's.
            StoreUnavailableError: none can be started.
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
                return place.result()  # it came at the last moment
            raise
        except BaseException:
            if not place.cancel() and place.exception() is None:
                self.give_back(place.result())
            raise

    def give_back(self, worker: WorkerProcess) -> None:
        """Return a worker that can take the next call."""
        if not self._hand_on(worker):
            self.discard(worker)

    def discard(self, worker: WorkerProcess) -> None:
        """Kill and reap a worker that was taken, and have it replaced."""
        self._reap(worker, self.workers)
        with self._lock:
            self.kills += 1
            if not self.closed:
                self._start_missing()

    def start_further(self, wait_s_max: float) -> WorkerProcess:
        """Start a worker beside those for calls; ``end_further`` ends it.

        Raises:
            TimeoutError: it did not start in time; if it starts later, it is ended.
            OSError: it cannot be started.
            RuntimeError: the pool is closed, or its worker would run other code than this process.
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
        """Kill and reap it."""
        self._reap(worker, self._further)

    def close(self, within_s: float) -> bool:
        """End all workers; calls under way have half of the time to end. What cannot be reaped is left to die.

        Returns:
            Whether nothing is left that uses what workers were given. False, at once, where it was closed before.
        """
        if os.getpid() != self._pid:
            return False  # in a fork: they are the parent's
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
            # Starting a process waits for the disk that the interpreter is on, for as long as that takes.
            self._starter.submit(int).result(max(0.1, started_at + within_s - self._clock()))
        except TimeoutError:
            logger.error("a worker is still being started; what it was given is left open")
            self._starter.shutdown(0.0)
            return False
        self._starter.shutdown(1.0)  # it is at no call: at once
        return True

    def _all_waiting(self) -> list[Future[WorkerProcess]]:
        """Under the lock."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _hand_on(self, worker: WorkerProcess, *, fresh: bool = False) -> bool:
        """Give a free worker to who has waited longest, or keep it. False: the pool is closed."""
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
        """Kill a worker and wait until nothing of it runs."""
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
        """Under the lock."""
        while len(self.workers) + self._starting < self._n_workers:
            self._starter.submit(self._start_idle)
            self._starting += 1

    def _start_idle(self) -> None:
        try:
            worker = self._start(self.workers)
        except Exception as e:  # noqa: BLE001 - a thread's edge: who waits must hear of it, and the next one may try
            with self._lock:
                self._starting -= 1
                # A living worker will be free again for those who wait, and the next who waits has others started.
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
