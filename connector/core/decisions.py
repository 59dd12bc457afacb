"""Decisions: whether a request loads a tier's blocks, or the engine computes them. Scheduler thread only.

A load is worth it if it is expected to end before the engine would have computed the same tokens::

    load     latency + seconds per block * (blocks that the tier loads before + the request's hits)
    compute  prompts that the engine has begun + prefill(with these hits missing) - prefill(with them loaded)

``worth`` learns the terms. While too little is known, hits are loaded. ``loads`` asks three times:

1. At a request's first lookup: a tier that is too slow even if it has the whole prompt is not asked.
2. When hits are known: they are loaded, or count as misses. The later tokens of a prompt are the dearer ones, so a
   tier's part of a prompt is worth loading whole or not at all.
3. While they are loaded: at the pace of this load, the rest takes longer than computing it. So that the pace shows, a
   load that is not much faster than computing is submitted piece by piece.

Every ``TRIAL_EVERY``-th request for which a tier is too slow loads from it anyway, until (3) ends the load. So a tier
that has become faster is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...tiers.metrics import Metrics
from .guard import GuardedTier
from .options import ManagerOptions
from .worth import Steps, Way

TRIAL_EVERY: Final = 16
_PIECES: Final = 8  # of a load that may turn out too slow
_MUCH_FASTER: Final = 0.05  # a load that takes this share of computing is submitted whole
_TRIAL_HASTE: Final = 4  # the late time of a trial counts so many times
_MARGIN: Final = 1.2  # rather than end a load too soon
_GRACE: Final = 1 / 16  # share of computing that a load may take before its pace counts

#: Why a request loads from a tier (the first four), or does not: labels of ``kvtiers_load_decisions_total``.
REASONS: Final = ("always", "faster", "trial", "unknown", "behind", "never", "slower")
LOADED: Final = REASONS[:4]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request.

    Attributes:
        tokens: all that the engine computes before the first token, if it has nothing of them.
        computed: those that the engine's own cache has.
    """

    tokens: int
    computed: int


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds expected of a tier's part of a request.

    Attributes:
        load_s: until it is loaded.
        is_known: False: ``load_s`` is only a lower bound.
        gain_s: to compute what the load replaces.
        queue_s: to compute the prompts that the engine has begun, which a request waits for in any case.
        doubt: share of ``gain_s`` that may be too much.
    """

    load_s: float
    is_known: bool
    gain_s: float
    queue_s: float
    doubt: float = 0.0


@dataclass(slots=True)
class Progress:
    """A tier's loads since its start.

    Attributes:
        moved: number of blocks whose loads it has reported, as loaded or failed.
        moved_at: time of the latest report.
        unreported: number of blocks that it is loading.
    """

    moved: int = 0
    moved_at: float = -math.inf
    unreported: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What was expected of a load when it was decided.

    Attributes:
        began_at: time of the decision.
        blocks: the request's hits in the tier.
        total: those and the blocks that the tier had to load before.
        moved: blocks that the tier had loaded by then, since its start.
    """

    expected: Expected
    began_at: float
    blocks: int
    total: int
    moved: int


@dataclass(frozen=True, slots=True)
class Declined:
    """Why a request does not load from a tier, or no longer does.

    Attributes:
        reason: one of ``REASONS``.
        load_s, compute_s: seconds that were expected.
        spent_s: seconds after which its load was given up; 0: no load had begun.
    """

    reason: str
    load_s: float
    compute_s: float
    spent_s: float = 0.0


class Decisions:
    """Decides for all requests and tiers.

    Attributes:
        steps: the engine's steps; its connector reports them here.
        ways: by tier.
        metrics: where decisions are counted.
    """

    def __init__(self, tiers: Sequence[GuardedTier], options: ManagerOptions, metrics: Metrics) -> None:
        self.steps = Steps(options.step_tokens_max)
        self.ways = [Way() for _ in tiers]
        self._load = [tier.load for tier in tiers]
        self._blocks_per_token = options.blocks_per_token
        self.metrics = metrics
        self._slower = [0] * len(tiers)  # requests for which the tier was too slow, since the last trial
        for tier in tiers:
            for reason in REASONS:
                self.count(tier.name, reason, by=0)  # a rate misses the first 1 of a new series

    def count(self, name: str, reason: str, by: int = 1) -> None:
        """Count a decision about a request and a tier."""
        self.metrics.inc("kvtiers_load_decisions_total", name, reason, by=by)

    def blocks_of(self, prompt: Prompt) -> int:
        """Blocks that a request loads if tiers have its whole prompt."""
        return int((prompt.tokens - prompt.computed) * self._blocks_per_token)

    def expect(
        self, tier: int, total: int, req_id: str, prompt: Prompt | None, start: int, end: int
    ) -> Expected | None:
        """What is expected of a tier if it loads a request's blocks from number ``start`` to ``end``.

        Args:
            total: those and the blocks that it has to load before.

        Returns:
            None: nothing is known about the request or about the engine.
        """
        prefill = self.steps.prefill
        if prompt is None or not prefill.is_known:
            return None
        before, after = self._tokens_in(start, prompt), self._tokens_in(end, prompt)
        gain_s = self._compute_s(prompt, before) - self._compute_s(prompt, after)
        way = self.ways[tier]
        return Expected(
            way.seconds(total),
            way.knows(total),
            max(0.0, gain_s),
            self.steps.queued_s(req_id),
            prefill.doubt(after - before),
        )

    def _tokens_in(self, blocks: int, prompt: Prompt) -> float:
        tokens = prompt.tokens - prompt.computed
        return min(tokens, blocks / self._blocks_per_token) if self._blocks_per_token else tokens * bool(blocks)

    def _compute_s(self, prompt: Prompt, loaded: float) -> float:
        """Seconds to compute the prompt if so many of its tokens are loaded."""
        done = prompt.computed + loaded
        return self.steps.prefill.seconds(prompt.tokens - done, done)

    def order(self, totals: Sequence[int]) -> list[int]:
        """Tiers in the order in which to ask them: the soonest first if all are known, else as configured.

        Args:
            totals: blocks that each tier has to load until it has loaded a whole request.
        """
        if not all(way.knows(total) for way, total in zip(self.ways, totals, strict=True)):
            return list(range(len(totals)))
        return sorted(range(len(totals)), key=lambda at: self.ways[at].lookup_s + self.ways[at].seconds(totals[at]))

    def judge(self, tier: int, expected: Expected | None, lookup_s: float = 0.0, *, may_try: bool = True) -> str:
        """Decide about a tier's hits; returns a reason."""
        if self._load[tier] != "auto":
            return self._load[tier]
        if expected is None:
            return "unknown"
        load_s = (lookup_s + expected.load_s) * (1 - self.ways[tier].doubt)
        if load_s <= expected.queue_s + expected.gain_s * (1 - expected.doubt):
            return "faster" if expected.is_known else "unknown"
        self._slower[tier] += may_try
        if self._slower[tier] >= TRIAL_EVERY:
            self._slower[tier] = 0
            return "trial"
        return "slower"

    # -- while it loads ----------------------------------------------------------------------------------------------

    def window(self, tier: int, plan: Plan | None, moved: int, step_s: float) -> float:
        """Number of blocks that the tier may have at once of a request's load.

        Enough to keep the tier busy until the next step submits more: for twice its latency and the time of a step.
        While too little is known, twice as many as have arrived.
        """
        if plan is None:
            return math.inf
        load_s, gain_s = plan.expected.load_s, plan.expected.gain_s
        if not plan.expected.is_known:
            return max(2.0, plan.blocks / _PIECES, moved - plan.moved)
        if load_s <= _MUCH_FASTER * gain_s:
            return math.inf
        way = self.ways[tier]
        step_s = max(step_s, self.steps.running_s)
        busy_s = gain_s / _PIECES if load_s > gain_s else max(load_s / _PIECES, 2 * (way.latency_s + step_s))
        return 2.0 + way.blocks_in(busy_s)

    def is_behind(self, tier: int, req_id: str, plan: Plan, left: int, progress: Progress, now: float) -> bool:
        """Whether the rest of a load takes longer than computing the tokens of these blocks.

        Args:
            left: blocks of the request that the tier has not loaded yet.
        """
        gain_s = plan.expected.gain_s * left / plan.blocks
        if now - plan.began_at < _GRACE * plan.expected.gain_s:
            return False
        rest_s = self._rest_s(tier, plan, progress, now)
        return rest_s > gain_s and rest_s > gain_s + self.steps.queued_s(req_id)

    def _rest_s(self, tier: int, plan: Plan, progress: Progress, now: float) -> float:
        """Seconds that the rest of a load may take, cautiously.

        If the blocks under way are late, the other blocks are expected to be as much slower, and the blocks under way
        to take as long again as they are late.
        """
        expected, way = plan.expected, self.ways[tier]
        arrived = min(plan.total, progress.moved - plan.moved)
        late_s = now - max(plan.began_at, progress.moved_at) if progress.unreported else 0.0  # else it waits for room
        is_trial = expected.load_s > expected.gain_s + expected.queue_s
        if not is_trial and way.knows(plan.total):
            due_s = way.seconds(progress.unreported)
            slower = max(1.0, late_s / due_s) if due_s > 0 else 1.0
            rest_s = way.seconds(plan.total - arrived) * slower - late_s
            return max(rest_s / _MARGIN, late_s - due_s)
        done = min(plan.total, arrived + progress.unreported)
        rest_s = (now - plan.began_at) * (plan.total - done) / done if done >= 2 * progress.unreported > 0 else 0.0
        return max(rest_s, late_s * (_TRIAL_HASTE if is_trial else 1))
