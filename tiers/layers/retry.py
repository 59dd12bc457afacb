"""RetryStore: retries calls that failed with a temporary error.

For stores without retries of their own. ``S3Store`` retries internally, where it knows its deadline.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import StoreError
from ..store import Store
from .layer import Layer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Limits of a RetryStore.

    Attributes:
        attempts_max: maximum number of attempts per call, including the first.
        pause_s_first: upper bound of the pause after the first attempt; it doubles with each attempt.
        pause_s_max: upper bound of any pause.
        elapsed_s_max: no attempt starts later than this after the start of the call.
    """

    attempts_max: int = 4
    pause_s_first: float = 0.05
    pause_s_max: float = 2.0
    elapsed_s_max: float = 5.0


class RetryStore(Layer):
    """Retries errors whose class is ``retryable``; in a batch, only the keys with such an error.

    Every operation of a store is idempotent, so a call whose response was lost may be repeated. Listings are not
    retried, because keys that were already yielded cannot be taken back. Any thread may call; nothing changes after the
    constructor.

    Args:
        inner: the store.
        options: limits.
        clock: monotonic seconds.
        sleep: sleeps between attempts.
        rng: random numbers in 0..1; a pause is a random part of its upper bound, so that callers do not retry together.
    """

    def __init__(
        self,
        inner: Store,
        options: RetryOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self.options = options or RetryOptions()
        self._clock = clock
        self._sleep = sleep
        self._rng = rng

    def _around(self, method: str, call: Callable[[], T], size: int) -> T:  # noqa: ARG002
        started = self._clock()
        attempt = 1
        while True:
            try:
                return call()
            except StoreError as e:
                if not e.retryable or not self._pause(attempt, started):
                    raise
            attempt += 1

    def _around_batch(self, method: str, items: Sequence[Any], size: int) -> list[Any]:
        started = self._clock()
        outcomes = super()._around_batch(method, items, size)
        attempt = 1
        while True:
            again = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, StoreError) and outcome.retryable]
            if not again or not self._pause(attempt, started):
                return outcomes
            attempt += 1
            renewed: list[Any]
            try:
                renewed = getattr(self.inner, method)([items[i] for i in again])
            except StoreError as e:
                renewed = [e] * len(again)  # only for the retried keys: the others have outcomes
            for i, outcome in zip(again, renewed, strict=True):
                outcomes[i] = outcome

    def _pause(self, attempt: int, started: float) -> bool:
        """Wait before the next attempt. Returns False if there must not be another attempt."""
        options = self.options
        doublings = min(attempt - 1, 60)  # 2**1024 overflows a float; pause_s_max is reached long before
        pause_s = self._rng() * min(options.pause_s_max, options.pause_s_first * 2**doublings)
        if attempt >= options.attempts_max or self._clock() + pause_s > started + options.elapsed_s_max:
            return False
        self._sleep(pause_s)
        return True
