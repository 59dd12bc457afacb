"""Limits of a TieringOffloadingManager."""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.tiers.errors import ConfigError

LOOKUP_DEADLINE_S = 0.2
LOOKUP_TOTAL_S = 15.0
LOAD_DEADLINE_S = 20.0
LOAD_GRACE_S = 1.0  # beyond a tier's own deadline, to end its I/O and report


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringOptions:
    """Limits of a TieringOffloadingManager.

    Attributes:
        promotion_wait_s: how long a hit waits for room in the region before it counts as a miss. After a tenth of it,
            and where nothing is being loaded, requests that came later let go of what they hold.
        lookup_deadline_s: what a tier is asked counts as absent when it gives no answer for so long. Only of tiers that
            do not bound it themselves (see ``SecondaryTierManager.take_answered``).
        lookup_total_s: how long a request waits for the tiers' answers at most. Then it uses the prefix that is known.
        load_deadline_s: a load not reported by then is a miss, and one second past the tier's own ``job_deadline_s``
            where that is sooner: I/O that cannot be ended holds its slots, but not its request.
        store_backlog_share: part of the region that blocks on their way to tiers may pin, in equal parts for each tier;
            a tier that has used its part up gets no more. Of a job beyond that part the rest waits unpinned, and may be
            evicted meanwhile. So a hung tier takes neither the region nor the others' share.
        load_share: part of the region that loads may hold which tiers have not reported, in equal parts for each tier.
            Of a larger load the rest follows as they are reported, and is a miss after ``load_deadline_s``, or at once
            where all of them were given up. By default less than ``store_backlog_share`` leaves: there is room also
            where every tier hangs.
        promotion_hold_s: how long blocks loaded for a request are kept for it to come and use them.
        requests_max: requests remembered. One more takes the place of one that was not asked of for 5 s; while there is
            none, it is a miss.
        shutdown_s: bound of ``shutdown``. vLLM kills its engine after 5 s.
    """

    promotion_wait_s: float = 0.5
    lookup_deadline_s: float = LOOKUP_DEADLINE_S
    lookup_total_s: float = LOOKUP_TOTAL_S
    load_deadline_s: float = LOAD_DEADLINE_S
    store_backlog_share: float = 0.5
    load_share: float = 0.4
    promotion_hold_s: float = 2.0
    requests_max: int = 8192
    shutdown_s: float = 4.8

    def __post_init__(self) -> None:
        for name in (
            *("promotion_wait_s", "lookup_deadline_s", "lookup_total_s", "load_deadline_s"),
            *("promotion_hold_s", "shutdown_s"),
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{getattr(self, name)!r} is not accepted; write 0 or more seconds", field=name)
        for name in ("store_backlog_share", "load_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{getattr(self, name)!r}: accepted is above 0, up to 1", field=name)
        if self.requests_max < 1:
            raise ConfigError(f"{self.requests_max!r} is not accepted; write 1 or more", field="requests_max")
