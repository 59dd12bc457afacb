"""Short pauses of the scheduler thread during loads and lookups, and a bounded wait for stores at shutdown.

vLLM keeps stepping while requests wait for their lookups and loads. Its server process sleeps 1 ms between such
steps. An engine inside the caller's process does not sleep, so a loading thread gets the GIL only every 5 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHORT_STEP_S = 0.001  # every forward pass, and a server's idle step, takes longer
PAUSE_S = 0.0003

#: vLLM kills its engine 5 s after asking it to end, and the engine has more than kvtiers to shut down.
SHUTDOWN_S = 4.0
#: Share of ``SHUTDOWN_S`` in which running stores may finish. The rest is for threads in the middle of a block.
DRAIN_SHARE = 0.7
_POLL_S = 0.005


class Pacer:
    """Pauses after steps that were too short for a forward pass. Scheduler thread only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._ended_at = float("-inf")
        self._asked = False

    def asked(self, answer: bool | None) -> None:
        """Note the answer of a lookup. None: a request waits for the answer."""
        self._asked |= answer is None

    def step_ended(self, *, loading: bool) -> None:
        """Pause if the step was short and a request waits; once per step. ``loading``: a request waits for a load."""
        waiting, self._asked = loading or self._asked, False
        if waiting and self._clock() - self._ended_at < SHORT_STEP_S:
            self._sleep(PAUSE_S)
        self._ended_at = self._clock()


def drain(is_idle: Callable[[], bool], within_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Poll ``is_idle`` until it returns True. Returns False if the time ran out first."""
    deadline = clock() + within_s
    while not is_idle():
        if clock() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
