"""WaitingRequests: the requests that missed the region, the tiers' answers for them, and the blocks that they found.

An engine looks up all its waiting requests in every step, and usually nothing has changed since the last step. This
module knows: a tier reports which keys it has answered, and a block notifies its waiters when its filling ends.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from ...tiers.base import ReqContext
from ...tiers.blocks.keys import OffloadKey
from .guard import GuardedTier
from .options import TieringOptions
from .primary import Block, CPUPrimaryTier
from .request import Request

_ASKED_LATELY_S = 5.0  # a request without lookups for this long may be forgotten


class WaitingRequests:
    """Remembers requests and knows whether an answer to one of their keys may have changed. Scheduler thread only.

    Attributes:
        by_id: the requests; the most recently looked up is last.
        waiting: requests that may have hits, loads or held blocks, in the order in which their waits began.
        current: the request of the latest lookup in this step.
    """

    def __init__(
        self, primary: CPUPrimaryTier, tiers: Sequence[GuardedTier], options: TieringOptions, clock: Callable[[], float]
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._options = options
        self._clock = clock
        self.by_id: OrderedDict[str, Request] = OrderedDict()
        self.waiting: dict[Request, None] = {}
        self.current: Request | None = None
        self._found: defaultdict[str, dict[OffloadKey, Block]] = defaultdict(dict)  # in this step, by request id
        self._may_hold = False  # whether a request found blocks or may have begun to wait since ``hold_new_finds``
        self._step = 0
        self._took_answers = False  # whether the tiers' answers were taken in this step
        primary.metrics.inc("kvtiers_lookups_refused_total", by=0)  # a rate misses the first 1 of a new series

    # -- lookups -----------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether ``requests_max`` requests are remembered."""
        return len(self.by_id) >= self._options.requests_max

    def is_waiting(self, req_id: str) -> bool:
        """Whether ``lookup`` would answer the request as before. Counts as a lookup of the request; O(1)."""
        request = self.by_id.get(req_id)
        if request is None:
            return False
        self._begin_step(request)
        return bool(request.owed or request.coming or request.hits) and not request.has_news

    def begin_round(self, request: Request) -> None:
        """Begin a request's lookups in this step. Owed keys that tiers may have answered are looked up again."""
        self._begin_step(request)
        self.current = request
        self._may_hold = True
        request.begin_round()

    def remember(self, context: ReqContext, came_after: int, excluded_tiers: int) -> Request | None:
        """Add a new request. None: ``requests_max`` requests are remembered, and all had lookups recently.

        A new request must not replace one that still waits. The replaced request would be new at its next lookup and
        replace another one in turn, so no request's wait would ever end.
        """
        now = self._clock()
        if self.is_full:
            oldest = next(iter(self.by_id.values()))
            if now - oldest.asked_at < _ASKED_LATELY_S:
                self._primary.metrics.inc("kvtiers_lookups_refused_total")
                self._primary.log_once(
                    "requests_max",
                    f"{len(self.by_id)} requests wait for the tiers: new requests are computed, not loaded "
                    "(see kvtiers_lookups_refused_total)",
                )
                return None
            self.end(oldest.req_id)
        request = Request(context, self._primary, self._options, self.waiting, came_after, excluded_tiers)
        self.by_id[context.req_id] = request
        self.begin_round(request)
        return request

    def _begin_step(self, request: Request) -> None:
        """Once per step, take the tiers' new answers and add to the request's waiting time."""
        if not self._took_answers:
            self._take_answers()
        if request.step != self._step:
            self.by_id.move_to_end(request.req_id)
            request.begin_step(self._step, self._clock())

    def _take_answers(self) -> None:
        self._took_answers = True
        for tier in self._tiers:
            answered = tier.take_answered()
            if answered is None:
                for request in self.by_id.values():
                    request.ask_again()
                continue
            for req_id, keys in answered.items():
                if (found := self.by_id.get(req_id)) is not None:
                    found.take_answers(keys)

    # -- found blocks ------------------------------------------------------------------------------------------------

    def note_found(self, req_id: str, block: Block) -> None:
        """Note that a request found a block. The block must stay while the request waits for others."""
        self._found[req_id][block.key] = block
        self._may_hold = True

    def hold_new_finds(self) -> None:
        """Hold the blocks that waiting requests found, before a store evicts them."""
        if self._may_hold:  # without this check, each of a step's thousand stores would scan a thousand requests
            self._may_hold = False
            now = self._clock()
            for req_id in list(self._found):
                request = self.by_id.get(req_id)
                if request in self.waiting and request.hold(self._found[req_id], now):
                    del self._found[req_id]

    def hold_finds(self, now: float) -> None:
        """Hold the blocks that waiting requests found in this step, before any request's load evicts them."""
        for request in self.waiting:
            request.hold(self._found.get(request.req_id, {}), now)

    # -- ends --------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End the step: the next lookup takes the tiers' new answers first."""
        self._step += 1
        self._took_answers = False
        self.current = None
        self._found.clear()

    def stop(self, req_id: str) -> None:
        """End the wait of a request that loads its blocks: it needs no others, and the load itself keeps them."""
        self._found.pop(req_id, None)
        request = self.by_id.get(req_id)
        if request is not None:
            request.stop()
            if self.current is request:
                self.current = None

    def end(self, req_id: str) -> None:
        """Forget a request that has finished. Its loads go on, and serve any request that looks up the blocks next."""
        self.stop(req_id)
        if req_id in self.by_id:
            del self.by_id[req_id]

    def end_all(self) -> None:
        """Forget every request, and all that requests found."""
        for req_id in list(self.by_id):
            self.end(req_id)
        self._found.clear()
