"""PromotionRoom: decides which hits of waiting requests get slots in the region, and which count as misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvtiers.connector.manager.guard import GuardedTier
from kvtiers.connector.manager.holds import Holds
from kvtiers.connector.manager.options import TieringOptions
from kvtiers.connector.manager.primary import Block, CPUPrimaryTier
from kvtiers.connector.manager.promotion import EVERY_TIER, Job, Request, TierLoads
from kvtiers.tiers.blocks.keys import OffloadKey

_RELEASE_SHARE = 0.1  # part of promotion_wait_s that the first starving request waits before others lose their holds


class PromotionRoom:
    """Gives hits slots of the region, and ends the wait of hits that get none. Scheduler thread only.

    If the region has no room, the request "starves" and its hits wait up to ``promotion_wait_s``. If only the tier's
    share of the region is used up, its hits wait up to ``load_deadline_s``.

    Args:
        loads: the TierLoads of each tier.
        log_once: takes a subject and a message; logs the message once per subject.
    """

    def __init__(
        self,
        primary: CPUPrimaryTier,
        tiers: Sequence[GuardedTier],
        loads: Sequence[TierLoads],
        holds: Holds,
        options: TieringOptions,
        log_once: Callable[[str, str], None],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._loads = loads
        self._holds = holds
        self._options = options
        self._log_once = log_once
        primary.metrics.inc("kvtiers_promotion_room_expired_total", by=0)  # a rate misses the first 1 of a new series

    def begin_loads(self, request: Request, now: float) -> list[Job]:
        """Reserve slots for the request's hits. Return jobs to submit for hits that got a slot; other hits wait on."""
        if not request.hits:
            return []
        wanted = self._within_shares(request, now)
        blocks = self._primary.reserve(wanted)
        by_tier: dict[int, list[Block]] = {}
        for block in blocks:
            by_tier.setdefault(request.hits.pop(block.key), []).append(block)
        request.loading += len(blocks)
        if len(blocks) < len(wanted):
            request.starved_for = wanted[len(blocks)]
            self._starve(request, now)
        else:
            request.starved_since = None
        return [
            job
            for index, its_blocks in by_tier.items()
            for job in self._loads[index].begin(its_blocks, index, request, now)
        ]

    def release_latest_holds(self, waiting: Iterable[Request], now: float) -> None:
        """Unpin the blocks held by the latest starving requests. Otherwise starving requests could block one another.

        Not immediately: room may come soon, and an unpinned block that no tier has would be lost if evicted.
        """
        if any(loads.is_awaited for loads in self._loads):
            return
        starving = [request for request in waiting if request.starved_since is not None]
        if not starving:
            return
        first = starving[0]
        assert first.starved_since is not None
        if now - first.starved_since < _RELEASE_SHARE * self._options.promotion_wait_s:
            return
        wanted = min(len(first.hits), sum(loads.room for loads in self._loads))
        while len(starving) > 1 and self._primary.room < wanted:
            self._holds.let_go(starving.pop())

    def _within_shares(self, request: Request, now: float) -> list[OffloadKey]:
        """Select hits that fit in their tiers' shares of the region. Other hits wait, unless their tier is stuck.

        Stops at one hit more than the region has room for, which tells the caller that the request starves.
        """
        room = [loads.room for loads in self._loads]
        for index, loads in enumerate(self._loads):
            waits = request.hit_tiers >> index & 1 and not room[index]
            if waits and (now >= request.capped_until or not loads.is_awaited):
                self._drop_hits_of(request, index)
        wanted = []
        # Hundreds of hits in each of hundreds of requests are too many to scan in every step without a chance to load.
        if any(free and request.hit_tiers >> index & 1 for index, free in enumerate(room)):
            missed = request.starved_for  # a scan might pass many hits that wait for a share before it reaches this one
            if (
                not self._primary.room
                and missed in request.hits
                and room[request.hits[missed]]
                and self._primary.find(missed) is None
            ):
                return [missed]
            hit_tiers = 0
            are_coming = []
            for key, index in request.hits.items():
                if self._primary.find(key) is not None:
                    are_coming.append(key)  # another request has loaded it or is loading it
                    continue
                hit_tiers |= 1 << index
                if room[index]:
                    room[index] -= 1
                    wanted.append(key)
                    if len(wanted) > self._primary.room:
                        break
            else:
                request.hit_tiers = hit_tiers
            for key in are_coming:
                del request.hits[key]
                request.has_news = True
            if len(wanted) > self._primary.room:
                return wanted  # other hits are checked against the shares once the region has room
        if len(wanted) == len(request.hits):
            request.capped_until = math.inf
        elif request.capped_until == math.inf:
            request.capped_until = now + self._options.load_deadline_s
        return wanted

    def _drop_hits_of(self, request: Request, index: int) -> None:
        """Treat the request's hits in this tier as misses, because its share is stuck. Another tier may have them."""
        if self._expire(request, 1 << index):
            self._log_once(
                f"loads {index}",
                f"tier {self._tiers[index].name}: loads that it has not reported fill its whole share of the region: "
                "no more is loaded from it until it reports some (see kvtiers_promotion_room_expired_total)",
            )

    def _starve(self, request: Request, now: float) -> None:
        """Note that the region has no room for the request. After ``promotion_wait_s``, treat its hits as misses."""
        if request.starved_since is None:
            request.starved_since = now
        if now - request.starved_since < self._options.promotion_wait_s:
            return
        needed = len(request.hits.keys() | request.held.keys()) + request.loading
        if needed > self._primary.num_blocks:
            self._log_once(
                "load",
                f"region holds {self._primary.num_blocks} blocks, request {request.context.req_id!r} needs {needed}: "
                "nothing of it can be loaded beyond its first blocks that fit; make region.size larger",
            )
        self._expire(request, EVERY_TIER)
        request.drop_hits()

    def _expire(self, request: Request, tiers: int) -> int:
        """Treat the request's hits in the tiers of a bit mask as misses. Returns how many of them nobody else loads."""
        request.hit_tiers &= ~tiers
        request.has_news = True
        expired = 0
        for key in [key for key, tier in request.hits.items() if tiers >> tier & 1]:
            del request.hits[key]
            if self._primary.find(key) is None:  # otherwise another request loads or has loaded it
                request.refused[key] = request.refused.get(key, 0) | tiers
                expired += 1
        self._primary.metrics.inc("kvtiers_promotion_room_expired_total", by=expired)
        return expired
