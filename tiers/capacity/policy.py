"""CapacityPolicy: how much a root may store and for how long, and how many bytes are too many."""

from __future__ import annotations

from dataclasses import dataclass

HELD_SHARE_MAX = 0.5  # of max_bytes: what writers' records say they hold, or want, counts only up to this much


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPolicy:
    """Limits of one root. All of its writers should have the same policy.

    Attributes:
        max_bytes: total size of everything stored; None: no limit.
        ttl_s: blocks not used for this long are removed; None: never. If a store cannot record uses
            (``SupportsTouch``), the time since the block was written counts.
        high, low: fractions of ``max_bytes``: the collector starts above ``high`` and removes down to ``low``.
        min_free_bytes: free space to keep on the file system; the collector starts when it is nearly reached, whatever
            the other limits are.
        block_bytes: size of one block, if known before any is stored: space for one more block is also kept free.
        every_s: how often the collector lists everything, whatever the account says.
        poll_s: how often the collector checks the account.
        grace_s: younger blocks are never removed, because their writer may be about to read them.
        quarantine_s: how long bad blobs are kept for inspection.
        lease_s: a collector that has not renewed its lease for this long is considered dead.
        writer_s: a writer that has not renewed its record for this long is considered dead.
    """

    max_bytes: int | None = None
    ttl_s: float | None = None
    high: float = 0.95
    low: float = 0.85
    min_free_bytes: int = 0
    block_bytes: int = 0
    every_s: float = 600.0
    poll_s: float = 0.25
    grace_s: float = 2.0
    quarantine_s: float = 7 * 86_400.0
    lease_s: float = 30.0
    writer_s: float = 900.0

    @property
    def waits(self) -> bool:
        """Whether the collector waits until the storage refuses a block, because only the disk is a limit."""
        return self.max_bytes is None and self.ttl_s is None

    def is_short(self, used: int, wanted: int) -> bool:
        """Whether a collector should look for bytes to remove.

        Args:
            used: upper bound of the bytes stored.
            wanted: the largest size that a writer was refused last.
        """
        limit = self.max_bytes
        return limit is not None and (
            used > self.high * limit or used + min(wanted, int(HELD_SHARE_MAX * limit)) > limit
        )

    def excess_bytes(self, stored: int, *, held: int, wanted: int, foreign: int) -> int:
        """How many bytes to remove; 0 or less: none.

        If foreign files alone exceed the limit, all blocks are kept: removing them would not allow stores.

        Args:
            stored: bytes stored, foreign files included.
            held: bytes that writers reserved and have not stored.
            wanted: the largest size that a writer was refused last.
            foreign: bytes of files that are not blocks.
        """
        limit = self.max_bytes
        if limit is None or foreign > limit:
            return 0
        used = stored + min(held, int(HELD_SHARE_MAX * limit))
        if not self.is_short(used, wanted):
            return 0
        missing = used + min(wanted, int(HELD_SHARE_MAX * limit)) - limit
        return max(used - self.low_bytes(limit, self.high * limit, foreign), missing)

    def low_bytes(self, limit: int, high: float, foreign: int) -> int:
        """Down to how many bytes a run removes if it starts above ``high`` bytes.

        If foreign files take nearly all of the limit, going down to ``low`` would remove every block each time.
        """
        return int(max(self.low * limit, (foreign + (high if foreign < high else limit)) / 2))
