"""Circuit: cuts off a tier that does not work, and lets it back by itself. Pure, but for one log line per change.

closed -> open, when ``failures_max`` operations of a kind failed in a row, or at once when one overran its deadline;
open -> half-open, every ``probe_every_s``: one harmless question is put to the storage;
half-open -> closed when it is answered, -> open when it is not. (A circuit that never closed again left other people's
pods without their cache for 45 hours: LMCache#4368.) If the answer comes after all, the next question follows at once:
what held it up is over, such as a credential chain that was asked anew.

Loads are counted apart from all else: where small packets pass and large ones do not, lookups are answered and each
load waits for its deadline. Nor does the probe, a lookup, forgive them: the next load tells whether they work again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)


Kind = Literal["lookup", "load", "store"]


class CircuitState(StrEnum):
    """Whether a tier is used."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """State of one tier's circuit. Scheduler thread only.

    Args:
        name: the tier, for the log.
        failures_max: failures of a kind in a row that open it.
        probe_every_s: seconds between probes while it is open.
        clock: seconds, monotonic.

    Attributes:
        closed: True: the tier is used.
        openings: how often it went from closed to open.
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
        self._probe_failed = False  # since it is open
        self.state = CircuitState.CLOSED
        self.closed = True  # not a property: each lookup reads it
        self.openings = 0

    def succeed(self, kind: Kind) -> bool:
        """An operation or the probe was answered.

        Any answer forgives failed stores: storage to which nothing can be written is still read.

        Returns:
            Whether as many of its kind had failed in a row as cut a tier off.
        """
        ends_outage = self._failures[kind] >= self._failures_max
        self._failures[kind] = self._failures["store"] = 0
        if self.state is CircuitState.HALF_OPEN:
            self._become(CircuitState.CLOSED, "it answers again")
        return ends_outage

    def fail(self, kind: Kind, why: str) -> None:
        """An operation or the probe failed."""
        self._failures[kind] += 1
        if self.state is CircuitState.HALF_OPEN:
            self._open(None)
        elif self.state is CircuitState.CLOSED and self._failures[kind] >= self._failures_max:
            self._open(f"{self._failures[kind]} failures in a row, the last: {why}")

    def trip(self, why: str) -> None:
        """An operation overran its deadline: whoever comes next would wait as long."""
        if self.state is CircuitState.CLOSED:
            self._open(why)
        elif self.state is CircuitState.HALF_OPEN:
            self._open(None)

    def answer_late(self) -> None:
        """A lookup was answered after its deadline."""
        if self._probe_failed:  # else it was no probe: a tier that is slow under load is let rest
            self._probe_at = self._clock()

    def take_probe(self) -> bool:
        """True once every ``probe_every_s`` while open: the caller must now put one question to the storage."""
        if self.state is not CircuitState.OPEN or self._clock() < self._probe_at:
            return False
        self.state = CircuitState.HALF_OPEN  # not logged: it says nothing new
        return True

    def _open(self, why: str | None) -> None:
        self._probe_at = self._clock() + self._probe_every_s
        self._probe_failed = why is None
        if why is None:
            self.state = CircuitState.OPEN
        else:
            self.openings += 1
            self._become(CircuitState.OPEN, why)

    def _become(self, state: CircuitState, why: str) -> None:
        self.state = state
        self.closed = state is CircuitState.CLOSED
        log = logger.info if state is CircuitState.CLOSED else logger.warning
        log("tier %s: circuit %s: %s", self._name, state, why)
