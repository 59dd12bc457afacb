"""Ending within vLLM's patience: it kills its engine 5 s after it asked it to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tiers.plain_logs import get_logger

logger = get_logger(__name__)

#: All of our ending; the engine has more to end than us.
BUDGET_S = 4.0
#: The part of it in which stores under way may finish. What is left is for threads that are at a block.
DRAIN_SHARE = 0.7

_POLL_S = 0.005


def drain(is_idle: Callable[[], bool], within_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Call ``is_idle`` until it says so. False: it did not in time."""
    deadline = clock() + within_s
    while not is_idle():
        if clock() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def call_within(call: Callable[[], object], within_s: float, what: str) -> bool:
    """Run a call that may be stuck in I/O. False: it still is, in a daemon thread that dies with the process."""

    def run() -> None:
        try:
            call()
        except Exception as e:  # noqa: BLE001 - a thread's edge
            logger.warning("%s did not end cleanly: %r", what, e)

    thread = threading.Thread(target=run, name="kvtiers-ending", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there is none to be had, of so many processes or at the interpreter's end
        run()
        return True
    thread.join(within_s)
    if thread.is_alive():
        logger.warning("%s did not end within %.1f s and is left behind", what, within_s)
    return not thread.is_alive()
