"""WaitingRequests: the requests that missed the region, and what each is still waiting for.

An engine asks about all its waiting requests in each step, and mostly nothing has changed since the last one. This
module knows: a tier says which keys it has answered, and a block tells its waiters when it stops being filled.
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

_ASKED_LATELY_S = 5.0  # a request that was not asked of for so long may be forgotten
_STEP_S_MAX = 0.1  # of the time between two questions that counts as waited, at least


class WaitingRequests:
    """Remembers requests and tells whether an answer to one of their keys may have changed. Scheduler thread only.

    Attributes:
        by_id: the requests; the one asked of last is last.
        waiting: those that may have hits, loads or held blocks; an ordered set.
        asking: the one asked of last in this step.
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
        self._has_heard = False  # the tiers, in this step
        self._polled = 0  # bit mask of the tiers that do not say whom they have answered
        self._num_answers = [0] * len(tiers)  # of each tier, to questions that it had left open
        metrics.inc("kvtiers_lookups_refused_total", by=0)  # rates see no increase in what begins at 1

    @property
    def is_crowded(self) -> bool:
        """As many requests are remembered as there may be."""
        return len(self.by_id) >= self._options.requests_max

    def is_waiting(self, req_id: str) -> bool:
        """Whether ``lookup`` would answer the request as it did before. Counts as a question; O(1)."""
        request = self.by_id.get(req_id)
        if request is None:
            return False
        self._attend(request)
        return bool(request.owed or request.coming or request.hits) and not request.has_news

    def begin_round(self, request: Request) -> None:
        """The request is asked of. All that tiers owe it is asked anew where it may have been answered."""
        self._attend(request)
        self.asking = request
        request.has_news = False
        if request.is_answered:
            request.is_answered = False
            request.was_owed, request.owed = request.owed, set()
            request.owing = 0

    def remember(self, context: ReqContext) -> Request | None:
        """A new request; None where as many as there may be wait already.

        If it took the place of one that waits, that one would be new when it is asked of next and take the next one's
        place: nobody's wait would ever end.
        """
        now = self._clock()
        if self.is_crowded:
            oldest = next(iter(self.by_id.values()))
            if now - oldest.asked_at < _ASKED_LATELY_S:
                self._metrics.inc("kvtiers_lookups_refused_total")
                self._log_once(
                    "requests_max",
                    f"{len(self.by_id)} requests wait for the tiers: those that come now are computed "
                    "(see kvtiers_lookups_refused_total)",
                )
                return None
            self.finish(oldest.req_id)
        request = self.by_id[context.req_id] = Request(context, now, now)
        self.begin_round(request)
        return request

    def finish(self, req_id: str) -> None:
        """It will not ask again."""
        request = self.by_id.pop(req_id, None)
        if request is not None:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """It waits for nothing any more. Its loads go on, for whoever asks next."""
        request.stop_waiting()
        if self.asking is request:
            self.asking = None
        self.release(request)

    def forget_all(self) -> None:
        """Forget every request."""
        for req_id in list(self.by_id):
            self.finish(req_id)

    def release(self, request: Request) -> None:
        """Keep no blocks for it."""
        self.waiting.pop(request, None)
        self._holds.let_go(request)

    def wait(self, request: Request, held_until: float) -> None:
        """What it finds is held until then, and for as long as it has hits or loads under way."""
        request.held_until = max(request.held_until, held_until)
        self.waiting[request] = None

    def owe(self, request: Request, tiers: int) -> None:
        """The tiers of a bit mask owe the request answers."""
        request.owing |= tiers
        if request not in self.waiting:
            self.wait(request, self._clock() + self._options.lookup_deadline_s)

    def note_answer(self, tier: int) -> None:
        """A tier has answered what it had left open."""
        self._num_answers[tier] += 1

    def end_step(self) -> None:
        """From now on tiers may have news."""
        self._step += 1
        self._has_heard = False
        self.asking = None

    def _attend(self, request: Request) -> None:
        """Once a step: hear the tiers' news, and let the request's time pass."""
        if not self._has_heard:
            self._hear()
        if request.step == self._step:
            return
        request.step = self._step
        self.by_id.move_to_end(request.req_id)
        now = self._clock()
        self._pass_time(request, now)
        if request.owing & self._polled:
            request.has_news = request.is_answered = True
        if request.coming:
            self.wait(request, now + self._options.promotion_hold_s)
        elif request.owed:
            self.wait(request, now + self._options.lookup_deadline_s)

    def _hear(self) -> None:
        self._has_heard = True
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

    def _pass_time(self, request: Request, now: float) -> None:
        """A long time between two questions counts in part.

        Engines ask nothing of a request while their batch is full, and what tiers had answered may be too old to be
        believed by then.
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
            request.has_news = request.is_answered = True
