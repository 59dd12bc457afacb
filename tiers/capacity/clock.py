"""Steps of the storage's clock, by which all blocks would look older than their ttl.

Each measurement notes the storage's time and this machine's time since its start, which nobody can set. The next
collector compares how much of both has passed, also in another process. After a step, ``ttl`` counts from the step: no
block that was used a moment before is removed. Blocks stay longer than they should, for one ttl or two.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

STEP_S_MIN = 5.0  # several systems round times to seconds
STEP_SHARE = 1 / 4  # of ttl; a smaller step makes blocks live for so much longer or shorter
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def since_boot() -> float:
    """Seconds since this machine started, including its sleep. Nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Identifies this machine and its last start; "" if unknown."""
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
        since_boot: seconds since that start.
        stepped_at: by the storage's clock, when a step was noticed last; None: not within a ttl.
    """

    storage: float
    boot: str
    since_boot: float
    stepped_at: float | None = None

    def after(self, before: ClockReading | None, *, host: float, ttl_s: float, gap_s_max: float) -> ClockReading:
        """This reading, which says whether the clock was stepped since another one, or before that.

        Args:
            before: the reading of the last measurement, perhaps by another machine.
            host: Unix seconds of this host's clock, against which a first reading is compared.
            ttl_s: age at which blocks are removed.
            gap_s_max: if more has passed since another machine's reading, it may have been a step.
        """
        margin = max(STEP_S_MIN, STEP_SHARE * ttl_s)
        stepped_at = None if before is None else before.stepped_at
        if before is None:
            is_step = abs(self.storage - host) > margin
        elif self.boot and self.boot == before.boot:
            is_step = abs((self.storage - before.storage) - (self.since_boot - before.since_boot)) > margin
        else:  # of another machine, or from before a restart: nobody knows how much time has passed
            is_step = not -margin <= self.storage - before.storage <= gap_s_max
        if is_step:
            stepped_at = self.storage
        elif stepped_at is not None and not 0 <= self.storage - stepped_at < ttl_s:
            stepped_at = None
        return ClockReading(self.storage, self.boot, self.since_boot, stepped_at)

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> ClockReading | None:
        """The inverse of ``to_json``; None if it is not one."""
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
    """For how many seconds no block is to be removed for its ttl; 0: ages can be believed."""
    return 0.0 if reading.stepped_at is None else max(0.0, ttl_s - (reading.storage - reading.stepped_at))
