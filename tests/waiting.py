"""Waiting for conditions in tests: bounded, and never a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil

from tiers.errors import StoreTimeoutError
from tiers.layers.isolate import ProcessIsolatedStore

T = TypeVar("T")

#: Ends a test that hangs, before pytest's own limit does. Not less: beside two busy processes on two cores a collector,
#: which gives way to all others, gets a hundredth of a core, and takes a minute to start.
HANG_S = 600.0
#: Options of a tier in tests that are not about deadlines. A busy machine misses the defaults (0.2 s for a lookup).
PATIENT = {"lookup_deadline_s": 60.0, "lookup_total_s": 120.0, "job_deadline_s": 120.0}


def wait_for(get: Callable[[], T], *, within_s: float = HANG_S) -> T:
    """Call ``get`` until it returns something true; return that. The time limit only ends a test that hangs."""
    deadline = time.monotonic() + within_s
    while True:
        value = get()
        if value:
            return value
        assert time.monotonic() < deadline, f"nothing within {within_s} s from {get}"
        time.sleep(0.001)


def in_time(call: Callable[[], T], *, within_s: float = HANG_S) -> T:
    """Repeat a call while it raises StoreTimeoutError. A busy machine misses short deadlines without a fault."""
    end = time.monotonic() + within_s
    while True:
        try:
            return call()
        except StoreTimeoutError:
            if time.monotonic() > end:
                raise


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
