"""Who gets room in the region: which hits of requests that wait are loaded now, and which are none any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvtiers.connector.manager.guard import GuardedTier
from kvtiers.connector.manager.holds import Holds
from kvtiers.connector.manager.options import TieringOptions
from kvtiers.connector.manager.primary import Block, CPUPrimaryTier
from kvtiers.connector.manager.promotion import EVERY_TIER, Job, Request, TierLoads
from kvtiers.tiers.blocks.keys import OffloadKey

_LET_GO_SHARE = 0.1  # part of promotion_wait_s for which the first that starves leaves the others what they hold


class PromotionRoom:
    """Gives hits slots of the region, and ends the wait of those that get none. Scheduler thread only.

    There may be no room in the region, of which a request is said to starve, or in its tier's share of it. For the one
    a hit waits ``promotion_wait_s``, for the other ``load_deadline_s``.

    Args:
        loads: of each of the tiers.
        log_once: takes a subject, and what is to be said of it once.
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
        primary.metrics.inc("kvtiers_promotion_room_expired_total", by=0)  # rates see no increase in what begins at 1

    def begin_loads(self, request: Request, now: float) -> list[Job]:
        """Jobs to be submitted, for those of the request's hits that there is room for. The others age."""
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

    def let_last_go(self, waiting: Iterable[Request], now: float) -> None:
        """Of requests that starve, those that came last let go of what they hold: else all would wait for one another.

        Not at once: there may be room soon, and of what no tier has the hit would be lost.
        """
        if any(loads.is_awaited for loads in self._loads):
            return
        starving = [request for request in waiting if request.starved_since is not None]
        if not starving:
            return
        first = starving[0]
        assert first.starved_since is not None
        if now - first.starved_since < _LET_GO_SHARE * self._options.promotion_wait_s:
            return
        wanted = min(len(first.hits), sum(loads.room for loads in self._loads))
        while len(starving) > 1 and self._primary.room < wanted:
            self._holds.let_go(starving.pop())

    def _within_shares(self, request: Request, now: float) -> list[OffloadKey]:
        """The hits that their tiers' shares of the region have room for; others wait, but for no tier that is stuck.

        One more than the region has room for says that the request starves: it is not looked through for others then.
        """
        room = [loads.room for loads in self._loads]
        for index, loads in enumerate(self._loads):
            waits = request.hit_tiers >> index & 1 and not room[index]
            if waits and (now >= request.capped_until or not loads.is_awaited):
                self._bar(request, index)
        wanted = []
        # Hundreds of hits of each of hundreds of requests are too many to look through in each step to no purpose.
        if any(free and request.hit_tiers >> index & 1 for index, free in enumerate(room)):
            missed = request.starved_for  # it may lie behind any number of those that wait for a share
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
                    are_coming.append(key)  # another request has it loaded
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
                return wanted  # whether shares have room for the others will be seen when the region has
        if len(wanted) == len(request.hits):
            request.capped_until = math.inf
        elif request.capped_until == math.inf:
            request.capped_until = now + self._options.load_deadline_s
        return wanted

    def _bar(self, request: Request, index: int) -> None:
        """The request's hits in a tier whose share does not come free are none: another tier may have them."""
        if self._expire(request, 1 << index):
            self._log_once(
                f"loads {index}",
                f"tier {self._tiers[index].name} has not reported loads of its whole share of the region: nothing more "
                "is loaded from it until it has (see kvtiers_promotion_room_expired_total)",
            )

    def _starve(self, request: Request, now: float) -> None:
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
        """Its hits in the tiers of a bit mask are none any more. Returns how many it does without."""
        request.hit_tiers &= ~tiers
        request.has_news = True
        expired = 0
        for key in [key for key, tier in request.hits.items() if tiers >> tier & 1]:
            del request.hits[key]
            if self._primary.find(key) is None:  # else another request has it loaded
                request.refused[key] = request.refused.get(key, 0) | tiers
                expired += 1
        self._primary.metrics.inc("kvtiers_promotion_room_expired_total", by=expired)
        return expired
