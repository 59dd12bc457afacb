"""Detects steps of the storage's clock, after which all blocks may look older than their ttl.

Each measurement records the storage's time and this machine's time since boot, which nobody can set. The next
collector, also in another process, compares how far both clocks have advanced. After a step, ``ttl`` counts from the
step, so that recently used blocks are not removed. The price: blocks stay too long, by one ttl or two.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

STEP_S_MIN = 5.0  # several systems round times to seconds
STEP_SHARE = 1 / 4  # of ttl; a smaller step is ignored, so blocks live that much longer or shorter
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def since_boot() -> float:
    """Seconds since this machine started, including its sleep. Nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The id of this machine's current boot; "" if unknown."""
    try:
        with open(BOOT_ID, encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The storage's clock at a measurement.

    Attributes:
        storage: Unix seconds of the clock that stamps blobs.
        boot: see ``boot_id``.
        since_boot: seconds since that boot.
        stepped_at: the storage's time when the last step was noticed; None: no step within one ttl.
    """

    storage: float
    boot: str
    since_boot: float
    stepped_at: float | None = None

    def after(self, before: ClockReading | None, *, host: float, ttl_s: float, gap_s_max: float) -> ClockReading:
        """Return this reading with ``stepped_at`` set, by comparing it with the previous reading.

        Args:
            before: the reading of the last measurement, perhaps by another machine; None: there was none.
            host: Unix seconds of this host's clock, with which a first reading is compared.
            ttl_s: age at which blocks are removed.
            gap_s_max: a longer time since another machine's reading counts as a step.
        """
        margin = max(STEP_S_MIN, STEP_SHARE * ttl_s)
        stepped_at = None if before is None else before.stepped_at
        if before is None:
            is_step = abs(self.storage - host) > margin
        elif self.boot and self.boot == before.boot:
            is_step = abs((self.storage - before.storage) - (self.since_boot - before.since_boot)) > margin
        else:  # the previous reading is another machine's, or from before a reboot: the time between is unknown
            is_step = not -margin <= self.storage - before.storage <= gap_s_max
        if is_step:
            stepped_at = self.storage
        elif stepped_at is not None and not 0 <= self.storage - stepped_at < ttl_s:
            stepped_at = None
        return ClockReading(self.storage, self.boot, self.since_boot, stepped_at)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for a record."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> ClockReading | None:
        """The inverse of ``to_json``; None if the content is not a reading."""
        match content:
            case {
                "storage": int() | float() as storage,
                "boot": str(boot),
                "since_boot": int() | float() as passed,
                "stepped_at": None | int() | float() as stepped_at,
            } if all(math.isfinite(value) for value in (storage, passed, stepped_at or 0)):
                return cls(float(storage), boot, float(passed), stepped_at)
        return None


def held_s(reading: ClockReading, ttl_s: float) -> float:
    """Seconds during which no block may be removed by ttl; 0: ages can be trusted."""
    return 0.0 if reading.stepped_at is None else max(0.0, ttl_s - (reading.storage - reading.stepped_at))
