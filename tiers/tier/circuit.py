"""Circuit: a circuit breaker. Cuts off a tier that fails, and lets it back in on its own. No I/O but log lines.

- closed (in use) -> open (cut off): after ``failures_max`` consecutive failures of one kind of operation, or at once
  when a task overran its deadline.
- open -> half-open: every ``probe_every_s``, to probe the storage with one harmless lookup.
- half-open -> closed: the probe was answered. In LMCache#4368, a circuit that never closed again left pods without
  their cache for 45 hours.
- half-open -> open: the probe failed.

Loads are counted separately. If a network passes only small packets, lookups are answered but each load waits for its
deadline. If this host's memory or network damages reads, lookups are answered but all loaded blocks are bad. The probe
is a lookup, so it does not reset the count of failed loads: the next load shows whether loads work again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

from ..plain_logs import get_logger

logger = get_logger(__name__)


Kind = Literal["lookup", "load", "store"]


class CircuitState(StrEnum):
    """Whether a tier is in use (closed), cut off (open) or being probed (half-open)."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """State of one tier's circuit. Scheduler thread only.

    Args:
        name: the tier's name, for the log.
        failures_max: consecutive failures of one kind that open the circuit.
        probe_every_s: seconds between probes while the circuit is open.
        clock: seconds, monotonic.

    Attributes:
        closed: True if the tier is in use.
        openings: how often the circuit went from closed to open.
    """

    def __init__(
        self, name: str, *, failures_max: int, probe_every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._failures_max = failures_max
        self._probe_every_s = probe_every_s
        self._clock = clock
        self._failures: Counter[Kind] = Counter()
        self._probe_at = 0.0
        self.state = CircuitState.CLOSED
        self.closed = True  # not a property, for speed: each lookup reads it
        self.openings = 0

    def succeed(self, kind: Kind) -> None:
        """Record that an operation or the probe was answered.

        Any answer also resets the count of failed stores, because storage that cannot be written may still be read.
        """
        self._failures[kind] = self._failures["store"] = 0
        if self.state is CircuitState.HALF_OPEN:
            self._become(CircuitState.CLOSED, "the storage answers again", logger.info)

    def fail(self, kind: Kind, why: str) -> None:
        """Record that an operation or the probe failed."""
        self._failures[kind] += 1
        if self.state is CircuitState.HALF_OPEN or self._failures[kind] >= self._failures_max:
            self.trip(f"{self._failures[kind]} failures in a row, the last: {why}")

    def trip(self, why: str) -> None:
        """Open at once: an operation overran its deadline."""
        if self.state is CircuitState.OPEN:
            return
        self._probe_at = self._clock() + self._probe_every_s
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN  # not logged: it tells nothing new
        else:
            self.openings += 1
            self._become(CircuitState.OPEN, why, logger.warning)

    def take_probe(self) -> bool:
        """Whether the caller must probe the storage now. True once every ``probe_every_s`` while open."""
        if self.state is not CircuitState.OPEN or self._clock() < self._probe_at:
            return False
        self.state = CircuitState.HALF_OPEN  # not logged: it tells nothing new
        return True

    def _become(self, state: CircuitState, why: str, log: Callable[..., None]) -> None:
        self.state = state
        self.closed = state is CircuitState.CLOSED
        log("tier %s: circuit %s: %s", self._name, state, why)
