"""Other processes in tests: whether they run, and the workers of an isolated store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from kvtiers.tiers.isolation.store import ProcessIsolatedStore
from tests.waiting import wait_for


@contextmanager
def deadline(store: ProcessIsolatedStore, deadline_s: float) -> Iterator[None]:
    """A deadline for calls that are to miss it; the others may have to wait for a worker's start on a busy machine."""
    before, store.deadline_s = store.deadline_s, deadline_s
    try:
        yield
    finally:
        store.deadline_s = before


def is_gone(pid: int) -> bool:
    """Whether a process runs no more; a zombie that a foreign parent has not reaped does not run."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_workers(store: ProcessIsolatedStore) -> None:
    """Kill the workers and wait until they are dead: one that is dying may take a request, which then fails."""
    workers = list(store._pool.workers)
    for worker in workers:
        worker.process.kill()
    wait_for(lambda: all(worker.process.poll() is not None for worker in workers))
