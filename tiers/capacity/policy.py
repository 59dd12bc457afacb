"""CapacityPolicy: the limits of a root, and the marks at which its collector acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

HEAD_ROOM_SHARE = (0.01, 0.25)  # smallest and largest share of max_bytes that is kept free for blocks being written
#: Polls until a put has an effect: its writer publishes it, the collector reads the record, the writers read "full".
POLLS_TO_STOP = 3
REMOVAL_REASONS = ("ttl", "capacity")
FREE_MARGIN_SHARE = 0.05  # share of min_free: the collector removes blocks until this much more is free
LAG_S = 2.0  # twice the time between two records of a collector
START_LAG_S = 10.0  # limit for the first count of a collector: a busy machine takes seconds to start its process


class Marks(NamedTuple):
    """Sizes of a root at which its collector acts.

    Attributes:
        evict_bytes: above this size, blocks are removed until the root has this size.
        full_bytes: above this size, writers stop.
    """

    evict_bytes: int
    full_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPolicy:
    """Limits of one root. All of its writers should have the same policy.

    Attributes:
        max_bytes: total size of everything stored; None: no limit.
        ttl_s: blocks not used for this long are removed; None: never. If a store cannot record uses
            (``SupportsTouch``), the time since the block was written counts.
        min_free_bytes: free space to keep on the file system. Stores refuse puts that would use it; the collector
            starts to remove blocks shortly before.
        block_bytes: size of a block, if known before the first store. Space for one more block is also kept free.
        every_s: how long after a complete listing the next one begins, if there is a reason to list: writers that put,
            or a ``ttl``.
        poll_s: how often writers publish their put bytes, and how often the collector reads these records.
        grace_s: younger blocks are never removed, because their writer may be about to read them.
        lease_s: a collector that has published nothing for this long is considered dead.
        writer_s: the record of a writer that has not renewed it for this long is removed.
    """

    max_bytes: int | None = None
    ttl_s: float | None = None
    min_free_bytes: int = 0
    block_bytes: int = 0
    every_s: float = 600.0
    poll_s: float = 0.25
    grace_s: float = 2.0
    lease_s: float = 30.0
    writer_s: float = 900.0

    @property
    def waits(self) -> bool:
        """Whether the collector waits until the storage refuses a block, because only the disk is a limit."""
        return self.max_bytes is None and self.ttl_s is None

    def marks(self, bytes_per_s: float) -> Marks | None:
        """The marks below ``max_bytes``; None: ``max_bytes`` is not set.

        Args:
            bytes_per_s: rate at which all writers together put.
        """
        limit = self.max_bytes
        if limit is None:
            return None
        least, most = (share * limit for share in HEAD_ROOM_SHARE)
        head_room = int(min(max(least, self.block_bytes, POLLS_TO_STOP * self.poll_s * bytes_per_s), most))
        return Marks(limit - 2 * head_room, limit - head_room)


class Lag:
    """Decides whether a writer must stop because its collector does not keep up and cannot tell when the root is full.

    The writer must stop if more bytes than the smallest head room are uncounted, and no bytes were counted for
    ``LAG_S`` (``START_LAG_S``) or ``POLLS_TO_STOP`` polls. Only ``note`` decides this. Reading ``late_s`` does not: a
    writer that was idle does not know yet which bytes were counted meanwhile.

    Args:
        clock: monotonic seconds.

    Attributes:
        late_s: seconds for which no bytes were counted, if the writer must stop; 0: the writer may go on.
    """

    def __init__(self, policy: CapacityPolicy, clock: Callable[[], float]) -> None:
        limit = policy.max_bytes
        self._uncounted_bytes_max = float("inf") if limit is None else HEAD_ROOM_SHARE[0] * limit
        self._polls_s = POLLS_TO_STOP * policy.poll_s
        self._clock = clock
        self._counted_bytes = 0
        self._since: float | None = None  # when too many bytes became uncounted, or the last count since then
        self.late_s = 0.0

    def note(self, put_bytes: int, counted_bytes: int) -> None:
        """Note the total bytes that were put, and how many of them were counted."""
        now = self._clock()
        if put_bytes - counted_bytes <= self._uncounted_bytes_max:
            self._since = None
        elif self._since is None or counted_bytes != self._counted_bytes:
            self._since = now
        self._counted_bytes = counted_bytes
        late_s = 0.0 if self._since is None else now - self._since
        self.late_s = late_s if late_s > max(LAG_S if counted_bytes else START_LAG_S, self._polls_s) else 0.0
