"""Waiting for conditions in tests: bounded, and never a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tiers.layers.isolate import ProcessIsolatedStore

T = TypeVar("T")


def wait_for(get: Callable[[], T], *, within_s: float = 20.0) -> T:
    """Call ``get`` until it returns something true; return that. Fails when the time is up."""
    deadline = time.monotonic() + within_s
    while True:
        value = get()
        if value:
            return value
        assert time.monotonic() < deadline, f"nothing within {within_s} s from {get}"
        time.sleep(0.001)


@contextmanager
def deadline(store: ProcessIsolatedStore, deadline_s: float) -> Iterator[None]:
    """A deadline for calls that are to miss it; the others may have to wait for a worker's start on a busy machine."""
    before, store.deadline_s = store.deadline_s, deadline_s
    try:
        yield
    finally:
        store.deadline_s = before
