"""WaitingRequests: the requests that missed the region, and the answers and blocks that each still waits for.

An engine looks up all its waiting requests in every step, and usually nothing has changed since the last step. This
module knows: a tier reports which keys it has answered, and a block notifies its waiters when its filling ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtiers.connector.manager.guard import GuardedTier
from kvtiers.connector.manager.holds import Holds
from kvtiers.connector.manager.options import TieringOptions
from kvtiers.connector.manager.promotion import EVERY_TIER, Request
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.metrics import Metrics

_ASKED_LATELY_S = 5.0  # a request without lookups for this long may be forgotten
_STEP_S_MAX = 0.1  # most of a gap between lookups that counts as waited; or half of lookup_deadline_s, if larger


class WaitingRequests:
    """Remembers requests and knows whether an answer to one of their keys may have changed. Scheduler thread only.

    Attributes:
        by_id: the requests; the most recently looked up is last.
        waiting: requests that may have hits, loads or held blocks; an ordered set.
        asking: the request of the latest lookup in this step.
    """

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        holds: Holds,
        options: TieringOptions,
        metrics: Metrics,
        clock: Callable[[], float],
        log_once: Callable[[str, str], None],
    ) -> None:
        self._tiers = tiers
        self._holds = holds
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._log_once = log_once
        self.by_id: OrderedDict[str, Request] = OrderedDict()
        self.waiting: dict[Request, None] = {}
        self.asking: Request | None = None
        self._step = 0
        self._took_answers = False  # whether the tiers' answers were taken in this step
        self._polled = 0  # bit mask of the tiers that do not report which keys they have answered
        self._num_answers = [0] * len(tiers)  # per tier, answers to lookups that it had left open before
        metrics.inc("kvtiers_lookups_refused_total", by=0)  # a rate misses the first 1 of a new series

    @property
    def is_full(self) -> bool:
        """Whether ``requests_max`` requests are remembered."""
        return len(self.by_id) >= self._options.requests_max

    def is_waiting(self, req_id: str) -> bool:
        """Whether ``lookup`` would answer the request as before. Counts as a lookup of the request; O(1)."""
        request = self.by_id.get(req_id)
        if request is None:
            return False
        self._update(request)
        return bool(request.owed or request.coming or request.hits) and not request.has_news

    def begin_round(self, request: Request) -> None:
        """Begin a request's lookups in this step. Owed keys that tiers may have answered are looked up again."""
        self._update(request)
        self.asking = request
        request.has_news = False
        if request.must_ask_again:
            request.must_ask_again = False
            request.was_owed, request.owed = request.owed, set()
            request.owing = 0

    def remember(self, context: ReqContext) -> Request | None:
        """Add a new request. None: ``requests_max`` requests are remembered, and all had lookups recently.

        A new request must not replace one that still waits. The replaced request would be new at its next lookup and
        replace another one in turn, so no request's wait would ever end.
        """
        now = self._clock()
        if self.is_full:
            oldest = next(iter(self.by_id.values()))
            if now - oldest.asked_at < _ASKED_LATELY_S:
                self._metrics.inc("kvtiers_lookups_refused_total")
                self._log_once(
                    "requests_max",
                    f"{len(self.by_id)} requests wait for the tiers: new requests are computed, not loaded "
                    "(see kvtiers_lookups_refused_total)",
                )
                return None
            self.finish(oldest.req_id)
        request = self.by_id[context.req_id] = Request(context, now, now)
        self.begin_round(request)
        return request

    def finish(self, req_id: str) -> None:
        """Forget a request that has finished."""
        request = self.by_id.pop(req_id, None)
        if request is not None:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """End all waits of a request. Its loads go on, and serve any request that looks up the blocks next."""
        request.stop_waiting()
        if self.asking is request:
            self.asking = None
        self.release(request)

    def forget_all(self) -> None:
        """Forget every request."""
        for req_id in list(self.by_id):
            self.finish(req_id)

    def release(self, request: Request) -> None:
        """Keep no blocks for a request."""
        self.waiting.pop(request, None)
        self._holds.let_go(request)

    def wait(self, request: Request, held_until: float) -> None:
        """Hold blocks that the request finds until ``held_until``, and as long as it has hits or running loads."""
        request.held_until = max(request.held_until, held_until)
        self.waiting[request] = None

    def owe(self, request: Request, tiers: int) -> None:
        """Note that the tiers of a bit mask owe the request answers."""
        request.owing |= tiers
        if request not in self.waiting:
            self.wait(request, self._clock() + self._options.lookup_deadline_s)

    def note_answer(self, tier: int) -> None:
        """Count an answer of a tier to a lookup that it had left open."""
        self._num_answers[tier] += 1

    def end_step(self) -> None:
        """End the step: the next lookup takes the tiers' new answers first."""
        self._step += 1
        self._took_answers = False
        self.asking = None

    def _update(self, request: Request) -> None:
        """Once per step, take the tiers' new answers and add to the request's waiting time."""
        if not self._took_answers:
            self._take_answers()
        if request.step == self._step:
            return
        request.step = self._step
        self.by_id.move_to_end(request.req_id)
        now = self._clock()
        self._add_waited_time(request, now)
        if request.owing & self._polled:
            request.has_news = request.must_ask_again = True
        if request.coming:
            self.wait(request, now + self._options.promotion_hold_s)
        elif request.owed:
            self.wait(request, now + self._options.lookup_deadline_s)

    def _take_answers(self) -> None:
        self._took_answers = True
        self._polled = 0
        for index, tier in enumerate(self._tiers):
            answered = tier.take_answered()
            if answered is None:
                self._polled |= 1 << index
                continue
            for req_id, keys in answered.items():
                request = self.by_id.get(req_id)
                if request is not None:
                    request.owed -= keys
                    request.has_news = True

    def _add_waited_time(self, request: Request, now: float) -> None:
        """Add the time since the request's latest lookup, and give up on tiers that took too long to answer.

        Only a part of a long time counts: an engine does not look up waiting requests while its batch is full, and the
        answers that tiers gave before may be too old to use by then.
        """
        options = self._options
        seconds = min(now - request.asked_at, max(_STEP_S_MAX, options.lookup_deadline_s / 2))
        request.asked_at = now
        if not request.owed:
            request.waited_s = 0.0
            request.silences.clear()
            return
        request.waited_s += seconds
        gave_up = EVERY_TIER if request.waited_s >= options.lookup_total_s else 0
        for index, num_answers in enumerate(self._num_answers):
            if not request.owing & self._polled & 1 << index:
                continue
            before, silent_s = request.silences.get(index, (num_answers, 0.0))
            silent_s = silent_s + seconds if before == num_answers else 0.0
            request.silences[index] = num_answers, silent_s
            if silent_s >= options.lookup_deadline_s:
                gave_up |= 1 << index
        if gave_up & ~request.gave_up:
            request.gave_up |= gave_up
            request.has_news = request.must_ask_again = True
