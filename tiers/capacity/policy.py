"""CapacityPolicy: how much may be stored, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPolicy:
    """Limits of one root. All of its writers should be told the same.

    Attributes:
        max_bytes: joined size of everything stored; None: no limit.
        ttl_s: blocks not used for so long are removed; None: never. Where a store cannot record uses
            (``SupportsTouch``), since they were written.
        high, low: fractions of ``max_bytes``: the collector begins above ``high`` and removes down to ``low``.
        min_free_bytes: free space on the file system; the collector begins when it is nearly reached.
        block_bytes: of one block, so far as is known before any is stored: ``min_free_bytes`` and one are kept free.
        every_s: how often the collector looks at everything, whatever the account says.
        poll_s: how often it looks at the account.
        grace_s: younger blocks are never removed: their writer may be about to read them.
        quarantine_s: how long bad blobs are kept for somebody to look at.
        lease_s: a collector that has not renewed its lease for so long is taken to be dead.
        writer_s: a writer that has not renewed its record for so long is taken to be dead.
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
