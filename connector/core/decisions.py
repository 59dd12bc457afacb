"""Decisions: whether a request loads a tier's blocks, or the engine computes them. Scheduler thread only.

A load is worthwhile if it is expected to end before the engine would have computed the same tokens::

    load     latency + seconds per block * (blocks that the tier loads before + the request's hits)
    compute  prompts that the engine has begun + prefill(with these hits missing) - prefill(with them loaded)

``worth`` learns the terms. While there are too few samples, hits are loaded. ``loads`` asks for a decision three times:

1. At a request's first lookup: a tier that is too slow even if it has the whole prompt is not asked.
2. When the hits are known: they are loaded, or they count as misses. Later tokens of a prompt are more expensive to
   compute than earlier tokens. So a tier's part of a prompt is loaded as a whole or not at all.
3. During the load: the load ends if, at its pace, the rest takes longer than computing the rest. A load that is not
   much faster than computing is submitted piece by piece, so that its pace can be measured.

Every ``TRIAL_EVERY``-th request for which a tier is too slow loads from the tier nevertheless, until (3) ends the load.
These trials show when the tier has become faster.
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
_PIECES: Final = 8  # number of pieces of a load that may turn out too slow
_MUCH_FASTER: Final = 0.05  # a load that takes less than this share of computing is submitted as a whole
_TRIAL_HASTE: Final = 4  # the late time of a trial counts so many times
_MARGIN: Final = 1.2  # margin, so that no load ends too soon
_GRACE: Final = 1 / 16  # share of computing that a load may take before its pace counts

#: Why a request loads from a tier (the first four), or does not: labels of ``kvtiers_load_decisions_total``.
REASONS: Final = ("always", "faster", "trial", "unknown", "behind", "never", "slower")
LOADED: Final = REASONS[:4]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request.

    Attributes:
        tokens: number of tokens to compute before the first generated token, if nothing is cached.
        computed: number of these tokens in the engine's own cache.
    """

    tokens: int
    computed: int


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected seconds to load, or to compute, a tier's part of a request.

    Attributes:
        load_s: seconds until the part is loaded.
        is_known: False: ``load_s`` is only a lower bound.
        gain_s: seconds to compute the tokens that the load replaces.
        queue_s: seconds to compute the prompts that the engine has begun. The request waits for them in any case.
        doubt: share of ``gain_s`` by which the estimate may be too high.
    """

    load_s: float
    is_known: bool
    gain_s: float
    queue_s: float
    doubt: float = 0.0


@dataclass(slots=True)
class Progress:
    """Progress of a tier's loads since its start.

    Attributes:
        moved: number of blocks that the tier has reported as loaded or failed.
        moved_at: time of the latest report.
        unreported: number of blocks that the tier is loading.
    """

    moved: int = 0
    moved_at: float = -math.inf
    unreported: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A decided load: the expected times and the tier's progress at the time of the decision.

    Attributes:
        began_at: time of the decision.
        blocks: the request's hits in the tier.
        total: ``blocks``, plus the blocks that the tier had to load before.
        moved: number of blocks that the tier had loaded since its start.
    """

    expected: Expected
    began_at: float
    blocks: int
    total: int
    moved: int


@dataclass(frozen=True, slots=True)
class Declined:
    """The reason why a request does not load, or no longer loads, from a tier.

    Attributes:
        reason: one of ``REASONS``.
        load_s, compute_s: expected seconds to load and to compute.
        spent_s: seconds after which the load was given up; 0: no load had begun.
    """

    reason: str
    load_s: float
    compute_s: float
    spent_s: float = 0.0


class Decisions:
    """Decides for all requests and tiers.

    Attributes:
        steps: the engine's steps; its connector reports them here.
        ways: estimates of each tier.
        metrics: where decisions are counted.
    """

    def __init__(self, tiers: Sequence[GuardedTier], options: ManagerOptions, metrics: Metrics) -> None:
        self.steps = Steps(options.step_tokens_max)
        self.ways = [Way() for _ in tiers]
        self._load = [tier.load for tier in tiers]
        self._blocks_per_token = options.blocks_per_token
        self.metrics = metrics
        self._slower = [0] * len(tiers)  # per tier, number of requests since the last trial for which it was too slow
        for tier in tiers:
            for reason in REASONS:
                self.count(tier.name, reason, by=0)  # start at 0, because a rate misses the first 1 of a new series

    def count(self, name: str, reason: str, by: int = 1) -> None:
        """Count a decision about a request and a tier."""
        self.metrics.inc("kvtiers_load_decisions_total", name, reason, by=by)

    def blocks_of(self, prompt: Prompt) -> int:
        """Number of blocks that a request loads if tiers have its whole prompt."""
        return int((prompt.tokens - prompt.computed) * self._blocks_per_token)

    def expect(
        self, tier: int, total: int, req_id: str, prompt: Prompt | None, start: int, end: int
    ) -> Expected | None:
        """Estimate the times if a tier loads a request's blocks from number ``start`` to ``end``.

        Args:
            total: number of these blocks, plus the blocks that the tier has to load before.

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
        """Return the seconds to compute the prompt if so many of its tokens are loaded."""
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
        """Return how many blocks of a request the tier may load at once.

        The number keeps the tier busy until the next step submits more: for twice its latency and the time of a step.
        Without enough samples, it is twice the number of blocks that have arrived.
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
            left: number of the request's blocks that the tier has not loaded yet.
        """
        gain_s = plan.expected.gain_s * left / plan.blocks
        if now - plan.began_at < _GRACE * plan.expected.gain_s:
            return False
        rest_s = self._rest_s(tier, plan, progress, now)
        return rest_s > gain_s and rest_s > gain_s + self.steps.queued_s(req_id)

    def _rest_s(self, tier: int, plan: Plan, progress: Progress, now: float) -> float:
        """Return a cautious estimate of the seconds that the rest of a load may take.

        If the blocks under way are late, the other blocks are expected to be slower by the same factor. The blocks
        under way are expected to take as long again as they are late.
        """
        expected, way = plan.expected, self.ways[tier]
        arrived = min(plan.total, progress.moved - plan.moved)
        late_s = now - max(plan.began_at, progress.moved_at) if progress.unreported else 0.0  # else waiting for room
        is_trial = expected.load_s > expected.gain_s + expected.queue_s
        if not is_trial and way.knows(plan.total):
            due_s = way.seconds(progress.unreported)
            slower = max(1.0, late_s / due_s) if due_s > 0 else 1.0
            rest_s = way.seconds(plan.total - arrived) * slower - late_s
            return max(rest_s / _MARGIN, late_s - due_s)
        done = min(plan.total, arrived + progress.unreported)
        rest_s = (now - plan.began_at) * (plan.total - done) / done if done >= 2 * progress.unreported > 0 else 0.0
        return max(rest_s, late_s * (_TRIAL_HASTE if is_trial else 1))
