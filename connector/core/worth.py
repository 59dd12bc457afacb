"""Estimates how long loading and computing take, from the tiers' loads and the engine's steps. Imports no engine.

A request waits ``Way.seconds`` for a load. The engine would compute the same tokens in ``Prefill.seconds``. Both
estimates are sums of a few terms, whose coefficients are fitted to the latest loads and steps:

- a step of the engine: a + b * tokens + c * tokens * context
- a load: latency + seconds per block * blocks, with the blocks that the tier has to load before

The fit minimizes relative errors, so a short step counts as much as a long step. The time of a very slow sample, such
as a step with a pause in it, is capped.

Both estimates are optimistic: while there are few samples, the expected time is reduced, down to one half. So both
loading and computing are tried until the samples show which of them is slower.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

#: Ridge regression: each term is penalized by this share of its weight. The penalties matter if the samples do not
#: determine all coefficients. If all samples have the same size, the term proportional to the size gets all the time.
_RIDGE = 1e-6
_RIDGE_OF_OTHERS = 3e-3
SLOWER_MAX = 4.0
_MISFIT_MAX = 1.25  # after ``_MEMORY_JOBS`` loads, the most by which a load counts as slower or faster than expected
_MEMORY_STEPS = 32  # after this many full steps of the engine, the weight of a sample has dropped to about a third
_MEMORY_JOBS = 16  # the same for the loads of a tier
_DOUBT_MAX = 0.5
_STEPS_MAX = 64  # limit of the steps that have not ended; an engine has only a few

Terms = tuple[float, float, float]  # steps, tokens and work of a prefill
_NOTHING: Terms = (0.0, 0.0, 0.0)


class Fit:
    """Fits seconds as a sum of terms with coefficients of 0 or more, by least squares of relative errors.

    Args:
        num_terms: number of terms in a sample. The second term is the sample's size.
    """

    def __init__(self, num_terms: int) -> None:
        self._products = np.zeros((num_terms, num_terms))
        self._sums = np.zeros(num_terms)
        self._solved: NDArray[np.float64] | None = None

    def add(self, terms: Sequence[float], seconds: float, keep: float) -> None:
        """Add a sample. ``keep``: the share of their weight that earlier samples keep.

        Errors are relative to the expected time. A sample counts as at most ``SLOWER_MAX`` times the expected time.
        """
        if seconds <= 0:
            return
        scale_s = self.seconds(terms) or seconds
        shares = np.array(terms) / scale_s
        self._products = self._products * keep + np.outer(shares, shares)
        self._sums = self._sums * keep + shares * min(seconds / scale_s, SLOWER_MAX)
        self._solved = None

    def scale(self, factor: float) -> None:
        """Multiply the seconds of all samples."""
        self._products /= factor**2
        self._sums /= factor
        self._solved = None

    def seconds(self, terms: Sequence[float]) -> float:
        """Return the expected seconds for these terms; 0 without samples."""
        if self._solved is None:
            self._solved = self._solve()
        return float(self._solved.dot(terms))

    def _solve(self) -> NDArray[np.float64]:
        """Return the coefficients. A term whose coefficient would be negative is left out, with coefficient 0."""
        solved = np.zeros(len(self._sums))
        used = np.flatnonzero(self._products.diagonal() > 0)
        while used.size:
            scales = np.sqrt(self._products.diagonal()[used])
            matrix = self._products[np.ix_(used, used)] / np.outer(scales, scales)
            matrix += np.diag(np.where(used == 1, _RIDGE, _RIDGE_OF_OTHERS))
            found = np.linalg.solve(matrix, self._sums[used] / scales) / scales
            if found.min() >= 0:
                solved[used] = found
                break
            used = np.delete(used, found.argmin())
        return solved


class Prefill:
    """Estimates how long the engine takes to compute a prompt's tokens.

    Args:
        step_tokens_max: tokens that the engine computes in one step.
    """

    def __init__(self, step_tokens_max: int) -> None:
        self._step_tokens_max = step_tokens_max
        self._fit = Fit(3)
        self._tokens = 0  # total tokens of all samples

    def learn(self, tokens: int, work: float, seconds: float) -> None:
        """Add a step as a sample. ``work``: sum over its prompt tokens of the number of tokens before each token."""
        keep = math.exp(-tokens / (_MEMORY_STEPS * self._step_tokens_max))
        self._fit.add((1.0, tokens, work), seconds, keep)
        self._tokens += tokens

    def seconds(self, tokens: float, context: float) -> float:
        """Return the seconds to compute ``tokens`` after ``context`` other tokens; 0 without samples."""
        return self.seconds_of(self.terms(tokens, context))

    def terms(self, tokens: float, context: float) -> Terms:
        """Return steps, tokens and work of ``tokens`` after ``context`` other tokens. Terms of prompts can be added."""
        if tokens <= 0:
            return _NOTHING
        return math.ceil(tokens / self._step_tokens_max), tokens, tokens * (context + tokens / 2)

    def seconds_of(self, terms: Terms) -> float:
        """Return the seconds to compute these steps, tokens and work."""
        return self._fit.seconds(terms)

    def doubt(self, tokens: float) -> float:
        """Share of ``seconds`` by which the estimate may be too high."""
        return min(_DOUBT_MAX, tokens / (tokens + self._tokens)) if tokens > 0 else 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is any sample."""
        return self._tokens > 0


class Way:
    """Estimates how long a tier takes to answer lookups and to load blocks.

    Attributes:
        lookup_s: moving average of the seconds until a request's lookups are answered.
    """

    def __init__(self) -> None:
        self.lookup_s = 0.0
        self._fit = Fit(2)
        self._jobs = 0  # number of samples
        self._sizes = math.inf, 0.0  # number of blocks in the smallest and the largest sample

    def learn(self, blocks: int, seconds: float) -> None:
        """Add a load as a sample.

        Either latency or bandwidth may explain a load that takes longer than expected. A link that becomes slower
        changes both. So both coefficients are first scaled by a quarter of the error.

        Args:
            blocks: number of blocks in all loads that ended between this load's submission and its end.
            seconds: time between the load's submission and its end.
        """
        expected_s = self._fit.seconds((1.0, blocks))
        if self._jobs >= _MEMORY_JOBS and self.knows(blocks) and expected_s > 0:
            factor = 1 + (min(seconds / expected_s, SLOWER_MAX) - 1) / 4
            self._fit.scale(factor)
            expected_s *= factor
            seconds = min(max(seconds, expected_s / _MISFIT_MAX), expected_s * _MISFIT_MAX)
        self._fit.add((1.0, blocks), seconds, 1 - 1 / _MEMORY_JOBS)
        self._sizes = min(self._sizes[0], blocks), max(self._sizes[1], blocks)
        self._jobs += 1

    def learn_late(self, blocks: int, moved: int, seconds: float) -> None:
        """Add a load that was given up after ``seconds``, when ``moved`` of its ``blocks`` had arrived.

        A load that was not slower than expected is ignored.
        """
        all_s = seconds * blocks / (moved + 1)
        if all_s > self.seconds(blocks):
            self.learn(blocks, all_s)

    def learn_lookup(self, seconds: float) -> None:
        """Add the seconds until a request's lookups were answered."""
        self.lookup_s += (seconds - self.lookup_s) / 4 if self.lookup_s else seconds

    def knows(self, blocks: int) -> bool:
        """Whether the samples tell how long so many blocks take: their sizes differ, or are similar to ``blocks``."""
        smallest, largest = self._sizes
        return largest >= 2 * smallest or smallest / 2 <= blocks <= largest * 2

    def seconds(self, blocks: int) -> float:
        """Return the seconds until so many blocks are loaded, if all are submitted at once.

        The result is a lower bound if ``knows`` is false.
        """
        if self.knows(blocks):
            return self._fit.seconds((1.0, blocks))
        smallest, largest = self._sizes
        if blocks > largest:
            return self._fit.seconds((1.0, largest))
        return self._fit.seconds((1.0, smallest)) * blocks / smallest

    def blocks_in(self, seconds: float) -> float:
        """Return the number of blocks that the tier loads in this time, without the latency."""
        per_block = self._fit.seconds((0.0, 1.0))
        return seconds / per_block if per_block > 0 else math.inf

    @property
    def latency_s(self) -> float:
        """The part of each load's time that does not depend on its size."""
        return self._fit.seconds((1.0, 0.0))

    @property
    def doubt(self) -> float:
        """Share of ``seconds`` by which the estimate may be too high."""
        return min(_DOUBT_MAX, 1 / (1 + self._jobs))


class Steps:
    """Records which prompt tokens each engine step computed, and how long the step took. Scheduler thread only.

    A step's time counts from its scheduling, or from the end of the step before, if that is later: an engine may
    schedule a step while it computes the step before. So pauses between steps do not count.

    Attributes:
        prefill: learned from the steps with prompt tokens.
    """

    def __init__(self, step_tokens_max: int) -> None:
        self.prefill = Prefill(step_tokens_max)
        self._sizes: dict[str, int] = {}  # request -> number of its prompt tokens, until all are computed
        self._left: dict[str, Terms] = {}  # request that is computed, or only waits for it -> its remaining terms
        self._queued = _NOTHING  # sum of ``_left``, because hundreds of requests may ask for it in one step
        self._running: deque[tuple[float, int, float]] = deque(maxlen=_STEPS_MAX)  # begin, prompt tokens, work
        self._ended_at = -math.inf

    def expect(self, req_id: str, num_tokens: int) -> None:
        """Note the tokens of a request that is about to be scheduled."""
        self._sizes[req_id] = num_tokens

    @property
    def are_decodes(self) -> bool:
        """Whether all steps only generate: no known request has prompt tokens left to compute."""
        return not self._sizes

    def began(self, scheduled: Iterable[tuple[str, int, int]], now: float) -> None:
        """Note a step.

        Args:
            scheduled: of each request its id, the number of its tokens in this step, and the number of its tokens
                computed before. Requests that only generate may be left out.
        """
        tokens, work = 0, 0.0
        for req_id, count, computed in scheduled:
            size = self._sizes.get(req_id)
            if size is None:
                continue
            tokens += count
            work += count * (computed + count / 2)
            if computed + count >= size:
                self.forget(req_id)
            else:
                self._leave(req_id, self.prefill.terms(size - computed - count, computed + count))
        self._running.append((now, tokens, work))

    def ended(self, now: float) -> None:
        """Note the end of the oldest step that has not ended yet."""
        if self._running:
            began, tokens, work = self._running.popleft()
            if tokens:
                self.prefill.learn(tokens, work, now - max(began, self._ended_at))
        self._ended_at = now

    def queue(self, req_id: str, computed: int) -> None:
        """Note that the request waits only for the engine to compute it."""
        if req_id in self._sizes:
            self._leave(req_id, self.prefill.terms(self._sizes[req_id] - computed, computed))

    def forget(self, req_id: str) -> None:
        """Note that no prompt tokens of the request are left to compute."""
        self._sizes.pop(req_id, None)
        self._queued = self._queued_but(req_id)
        self._left.pop(req_id, None)

    def _leave(self, req_id: str, terms: Terms) -> None:
        self._queued = self._queued_but(req_id, terms)
        self._left[req_id] = terms

    def _queued_but(self, req_id: str, terms: Terms = _NOTHING) -> Terms:
        """Return ``_queued`` as it would be if these terms were left of the request."""
        before = self._left.get(req_id, _NOTHING)
        steps, tokens, work = (total - old + new for total, old, new in zip(self._queued, before, terms, strict=True))
        return steps, tokens, work

    def queued_s(self, req_id: str) -> float:
        """Return the seconds to compute all other prompts that are begun or wait only for the engine."""
        return self.prefill.seconds_of(self._queued_but(req_id))

    @property
    def running_s(self) -> float:
        """Return the expected seconds of the steps that have not ended."""
        return sum(self.prefill.seconds_of((1, tokens, work)) for _, tokens, work in self._running if tokens)
