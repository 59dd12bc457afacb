"""RankLoads: decides whether a request loads the ranks' blocks, and limits the load. Scheduler thread only.

``core.decisions`` decides, as for an engine with a region. But the scheduler sees only when a load begins and when its
slowest rank has ended:

- It decides about a request's whole load, before the first lookup and again when the number of hits is known.
- It does not see the progress of a load. So a load is given up if it takes twice as long as expected, and twice as long
  as computing would have taken. The ranks then end the load, and the engine computes the missing blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...tiers.metrics import Metrics
from ..core.decisions import LOADED, Decisions, Expected, Prompt
from ..core.guard import GuardedTier
from ..core.options import ManagerOptions

_LATE = 2.0  # multiple of the expected time
_TRIAL = 0.5  # multiple of the time to compute; a tier that has become fast takes less


@dataclass(slots=True)
class _Request:
    """A request whose load has not begun.

    Attributes:
        reason: reason of the latest decision.
        found: number of tokens that the lookups found; None: the lookups have not ended.
        limit_s: seconds after which the load is given up.
        answered_at: time of the latest answer that the lookups waited for; None: they have waited for no answer.
    """

    prompt: Prompt
    began_at: float
    reason: str
    found: int | None = None
    limit_s: float = math.inf
    answered_at: float | None = None


@dataclass(slots=True)
class _Load:
    """A request's load.

    Attributes:
        moved: number of blocks, since the engine's start, whose loads had ended when this load began.
        in_line: number of blocks that were being loaded when this load began, including its own.
    """

    blocks: int
    began_at: float
    moved: int
    in_line: int
    limit_s: float


class RankLoads:
    """Decides about the loads of all requests.

    Args:
        tier: the scheduler's own tier.
        options: for ``blocks_per_token`` and ``step_tokens_max``.
        metrics: counts the decisions.
        only_stores: do not load. Such an engine also looks up blocks, because it need not store existing blocks.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tier: GuardedTier,
        options: ManagerOptions,
        metrics: Metrics,
        *,
        only_stores: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions = Decisions([tier], options, metrics)
        self._name = tier.name
        self._blocks_per_token = options.blocks_per_token
        self._only_stores = only_stores
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, _Load] = {}
        self._moved = 0  # blocks whose loads have ended
        self._in_line = 0  # blocks whose loads have not

    def note_request(self, req_id: str, num_tokens: int, num_computed_tokens: int) -> None:
        """Note the length of the prompt that is looked up next. Repeated while the request waits.

        A request that was preempted has more tokens, so a new decision is made.
        """
        prompt = Prompt(num_tokens, num_computed_tokens)
        request = self._requests.get(req_id)
        if request is not None and request.prompt.tokens == num_tokens:
            request.prompt = prompt
            return
        self.decisions.steps.expect(req_id, num_tokens)
        expected = self._expect(req_id, prompt, self.decisions.blocks_of(prompt))
        reason = self.decisions.judge(0, expected, self.decisions.ways[0].lookup_s)
        self._requests[req_id] = _Request(prompt, self._clock(), reason)
        if reason == "slower" and not self._only_stores:
            self._decline(req_id, prompt, reason)

    def note_answers(self, req_id: str) -> None:
        """Note that the tier has answered lookups that a request waited for.

        The request itself may come back much later: it also waits for loads of the same blocks, and for its turn.
        """
        request = self._requests.get(req_id)
        if request is not None and request.found is None:
            request.answered_at = self._clock()

    def is_declined(self, req_id: str) -> bool:
        """Whether the tier need not be asked, because it is too slow even if it has the whole prompt."""
        request = self._requests.get(req_id)
        return request is not None and request.reason == "slower" and not self._only_stores

    def accept(self, req_id: str, tokens: int) -> bool:
        """Decide whether a request loads the ``tokens`` that its lookups found."""
        request = self._requests.get(req_id)
        if request is None or self._only_stores:
            return not self._only_stores
        if request.found != tokens and request.reason != "slower":
            if request.found is None and request.answered_at is not None:
                self.decisions.ways[0].learn_lookup(request.answered_at - request.began_at)
            request.found = tokens
            if tokens:
                self._judge(req_id, request, round(tokens * self._blocks_per_token))
        return request.reason in LOADED

    def _judge(self, req_id: str, request: _Request, blocks: int) -> None:
        expected = self._expect(req_id, request.prompt, blocks)
        if request.reason != "trial":
            request.reason = self.decisions.judge(0, expected)
        if request.reason not in LOADED:
            self._decline(req_id, request.prompt, request.reason)
            return
        self.decisions.count(self._name, request.reason)
        request.limit_s = math.inf
        if expected is not None and request.reason != "always":
            compute_s = expected.gain_s + expected.queue_s
            is_trial = request.reason == "trial"
            request.limit_s = _TRIAL * compute_s if is_trial else _LATE * max(expected.load_s, compute_s)

    def begin(self, req_id: str, blocks: int) -> None:
        """Note that a request's load begins."""
        request = self._requests.pop(req_id, None)
        self._in_line += blocks
        limit_s = request.limit_s if request is not None else math.inf
        self._loads[req_id] = _Load(blocks, self._clock(), self._moved, self._in_line, limit_s)

    def end(self, req_id: str, *, failed: bool) -> None:
        """Note that all ranks have ended a request's load."""
        load = self._loads.pop(req_id, None)
        if load is None:
            return
        self._in_line -= load.blocks
        if not failed:  # the time of a failed load says nothing about others, and few of its blocks may have been moved
            self._moved += load.blocks
            self.decisions.ways[0].learn(self._moved - load.moved, self._clock() - load.began_at)

    def take_late(self) -> list[str]:
        """Return the requests whose loads the ranks must end. Each is returned once."""
        now, late, way = self._clock(), [], self.decisions.ways[0]
        for req_id, load in self._loads.items():
            spent_s = now - load.began_at
            if spent_s < load.limit_s:
                continue
            load.limit_s = math.inf
            if spent_s > way.seconds(load.in_line):
                way.learn(load.in_line, spent_s)
            self.decisions.count(self._name, "behind")
            late.append(req_id)
        return late

    def forget(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(req_id, None)
        self.end(req_id, failed=True)
        self.decisions.steps.forget(req_id)

    def reset(self) -> None:
        """Forget all requests and loads, as the engine does when it resets its cache."""
        self._requests.clear()
        for req_id in list(self._loads):
            self.end(req_id, failed=True)

    def _expect(self, req_id: str, prompt: Prompt, blocks: int) -> Expected | None:
        if not blocks:
            return None
        return self.decisions.expect(0, self._in_line + blocks, req_id, prompt, 0, blocks)

    def _decline(self, req_id: str, prompt: Prompt, reason: str) -> None:
        self.decisions.steps.queue(req_id, prompt.computed)
        self.decisions.count(self._name, reason)
