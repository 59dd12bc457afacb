"""Leaving the GIL and the core to what loads and looks up, while the engine has nothing to compute.

vLLM steps on and on while requests wait for their lookups and loads. Its server process sleeps 1 ms between such
steps; an engine inside the caller's process does not, and then a loading thread gets the GIL only every 5 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHORT_STEP_S = 0.001  # no forward pass is that short, and a server's idle step is longer
PAUSE_S = 0.0003


class Pacer:
    """Pauses after a step that was too short to have computed anything. Scheduler thread only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._ended_at = float("-inf")
        self._asked = False

    def asked(self, answer: bool | None) -> None:
        """A lookup was made; None: somebody waits for its answer."""
        self._asked |= answer is None

    def step_ended(self, *, loading: bool) -> None:
        """Once a step; ``loading``: somebody waits for a load."""
        waiting, self._asked = loading or self._asked, False
        if waiting and self._clock() - self._ended_at < SHORT_STEP_S:
            self._sleep(PAUSE_S)
        self._ended_at = self._clock()
