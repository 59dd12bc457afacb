"""CapacityPolicy: how much a root may store, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPolicy:
    """Limits of one root. All of its writers should have the same policy.

    Attributes:
        max_bytes: total size of everything stored; None: no limit.
        ttl_s: blocks not used for this long are removed; None: never. If a store cannot record uses
            (``SupportsTouch``), the time since the block was written counts.
        high, low: fractions of ``max_bytes``: the collector starts above ``high`` and removes down to ``low``.
        min_free_bytes: free space to keep on the file system; the collector starts when it is nearly reached.
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
