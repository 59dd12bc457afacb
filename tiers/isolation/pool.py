"""WorkerPool: starts, lends and ends the worker processes of ``store``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..daemon_pool import DaemonPool
from ..errors import StoreClosedError, StoreUnavailableError
from ..plain_logs import get_logger
from .loaded_code import OWN_CODE
from .process import MappedRegion, WorkerProcess

logger = get_logger(__name__)


class WorkersUnavailableError(StoreUnavailableError):
    """No worker process can be started, or none lives long enough to take a call. The storage is not at fault."""


class WorkerPool:
    """Workers for calls, one call at a time each. Any thread of its process may call.

    A worker is in ``idle``, or belongs to the single thread that has taken it. ``_changed`` guards the tables.

    Args:
        config: sent to each worker at its start.
        region: memory that workers map.
        n_workers: number of workers; workers that end are replaced.

    Attributes:
        idle: workers are taken from the end. The worker used last is next, because its caches are warm; a worker that
            was just started comes last, because it must create its store first.
        workers: all workers, idle or not.
        stuck_calls: number of killed workers that are not reaped yet: they may still touch the parts of their calls.
        kills: number of workers that were killed, found dead, or given up in the middle of a listing so far.
        closed: whether ``close`` was called.
    """

    def __init__(self, config: Mapping[str, Any], *, region: MappedRegion | None, n_workers: int) -> None:
        self._config = config
        self._region = region
        self._n_workers = n_workers
        self._pid = os.getpid()
        # Reentrant, because the GC may end a listing's worker while this thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._starting = 0
        self._failures = 0  # how often a start failed and no worker was left
        self._failure = ""
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
        with self._changed:
            self._start_missing()

    def check_usable(self) -> None:
        """Raise StoreClosedError if the pool is closed, or belongs to the parent of this process."""
        if self.closed:
            raise StoreClosedError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreClosedError("the store's workers belong to the process that created it, not to its fork")

    def take(self, wait_s_max: float) -> WorkerProcess:
        """Take a worker for one call, to be returned with ``give_back`` or ``discard``.

        Callers are not served in order.

        Raises:
            TimeoutError: no worker was free in time.
            StoreClosedError: the pool is closed, or belongs to another process.
            StoreUnavailableError: no worker can be started.
        """
        with self._changed:
            self.check_usable()
            if not self.idle:
                self._start_missing()
            failures = self._failures
            self._changed.wait_for(lambda: self.idle or self.closed or self._failures > failures, wait_s_max)
            self.check_usable()
            if self.idle:
                return self.idle.pop()
            if self._failures > failures:  # the next caller starts more workers
                raise WorkersUnavailableError(self._failure)
            raise TimeoutError

    def give_back(self, worker: WorkerProcess) -> None:
        """Return a worker to the pool for the next call."""
        if not self._hand_on(worker):
            self.discard(worker)

    def discard(self, worker: WorkerProcess) -> None:
        """Kill, reap and replace a worker that was taken."""
        self._reap(worker)
        with self._changed:
            self.kills += 1
            if not self.closed:
                self._start_missing()

    def close(self, within_s: float) -> bool:
        """End all workers; running calls get half of the time to end. Workers that cannot be reaped are left to die.

        Returns:
            Whether this process may now close what it gives to workers (the region). False if a worker is still being
            started, in a fork, and at once if the pool was closed before.
        """
        if os.getpid() != self._pid:
            return False  # in a fork: the workers belong to the parent
        with self._changed:
            if self.closed:
                return False
            self.closed = True
            idle, self.idle = self.idle, []
            workers = set(self.workers)
            self._changed.notify_all()
        for worker in idle:
            worker.hang_up()
        started_at = time.monotonic()
        for kill_at in (started_at + within_s / 2, started_at + within_s):
            workers = {worker for worker in workers if not worker.wait(kill_at - time.monotonic())}
            for worker in workers:
                worker.kill()
        if workers:
            logger.error("%d workers cannot be reaped: %s", len(workers), sorted(w.process.pid for w in workers))
        try:
            # Starting a process reads the interpreter from its disk, which may take long. An empty call waits for that.
            self._starter.submit(int).result(max(0.1, started_at + within_s - time.monotonic()))
        except TimeoutError:
            logger.error("a worker is still being started; the region's file is left open")
            self._starter.shutdown(0.0)
            return False
        self._starter.shutdown(1.0)  # ends at once, because the starter is idle
        return True

    def _hand_on(self, worker: WorkerProcess, *, fresh: bool = False) -> bool:
        """Make a worker available for calls. False: the pool is closed."""
        with self._changed:
            if not self.closed:
                self.idle.insert(0 if fresh else len(self.idle), worker)
                self._changed.notify()
            return not self.closed

    def _reap(self, worker: WorkerProcess) -> None:
        """Kill a worker and wait until it is reaped."""
        with self._changed:
            self.stuck_calls += 1
        worker.kill()
        worker.hang_up()
        worker.wait()
        with self._changed:
            self.stuck_calls -= 1
            self.workers.discard(worker)

    def _start_missing(self) -> None:
        """Start replacements until there are ``n_workers``. Call it under the lock."""
        while len(self.workers) + self._starting < self._n_workers:
            self._starter.submit(self._start_idle)
            self._starting += 1

    def _start_idle(self) -> None:
        try:
            OWN_CODE.check()
            worker = WorkerProcess.start(self._config, self._region)
        except Exception as e:  # noqa: BLE001 - a thread's edge: waiting callers must get the error; later ones retry
            with self._changed:
                self._starting -= 1
                if not (self.workers or self._starting):  # a living worker will be free again for those who wait
                    self._failures += 1
                    self._failure = f"no worker could be started: {type(e).__name__}: {e}"
                    self._changed.notify_all()
            return
        with self._changed:
            self._starting -= 1
            self.workers.add(worker)
        if not self._hand_on(worker, fresh=True):
            self._reap(worker)
