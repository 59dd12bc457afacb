"""Waiting for conditions in tests: bounded, and never a fixed sleep."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from kvtiers.tiers.errors import StoreTimeoutError

T = TypeVar("T")

#: Ends a test that hangs, before pytest's own limit does. Not less: beside two busy processes on two cores a collector,
#: which gives way to all others, gets a hundredth of a core, and takes a minute to start.
HANG_S = 600.0
#: Options of a tier in tests that are not about deadlines. A busy machine misses the defaults (0.2 s for a lookup).
PATIENT = {"lookup_deadline_s": 60.0, "job_deadline_s": 120.0}


def wait_for(get: Callable[[], T], *, within_s: float = HANG_S) -> T:
    """Call ``get`` until it returns something true; return that. The time limit only ends a test that hangs."""
    began = time.monotonic()
    while True:
        value = get()
        if value:
            return value
        waited_s = time.monotonic() - began
        if waited_s >= within_s and sys.__stderr__ is not None:
            faulthandler.dump_traceback(file=sys.__stderr__)  # of all threads: what hangs is mostly elsewhere
        assert waited_s < within_s, f"nothing within {within_s} s from {get}"
        time.sleep(min(max(0.001, waited_s / 20), 0.02))  # ever longer: what the test waits for needs the CPU, too


def in_time(call: Callable[[], T], *, within_s: float = HANG_S) -> T:
    """Repeat a call while it raises StoreTimeoutError. A busy machine misses short deadlines without a fault."""
    end = time.monotonic() + within_s
    while True:
        try:
            return call()
        except StoreTimeoutError:
            if time.monotonic() > end:
                raise
