"""MeasureStore: reports the duration, size and outcome of every call of a store to an observer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..store import KeyInfo, Store
from .layer import Layer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observation:
    """One call of a store.

    Attributes:
        method: such as "put"; "keys" is a listing, from its start to its end or to where the caller stopped.
        outcome: "ok", or the class name of the exception; for a batch, of the first key's that failed.
        seconds: duration.
        keys: number of keys in the call; for a listing, number of keys returned.
        bytes: payload bytes moved; 0 if the call failed.
    """

    method: str
    outcome: str
    seconds: float
    keys: int
    bytes: int


class MeasureStore(Layer):
    """Passes calls on and reports an Observation of each. Any thread may call; nothing changes after the constructor.

    Args:
        inner: the store.
        observe: called after each call, by the thread that made the call; must be fast and must not raise.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        inner: Store,
        observe: Callable[[Observation], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._observe = observe
        self._clock = clock

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        started = self._clock()
        count = 0
        outcome = "ok"
        try:
            for info in self.inner.keys(prefix):
                count += 1
                yield info
        except GeneratorExit:
            raise  # the caller stopped early, which is not a failure
        except BaseException as e:
            outcome = type(e).__name__
            raise
        finally:
            self._observe(Observation("keys", outcome, self._clock() - started, count, 0))

    def _around(self, method: str, call: Callable[[], T], size: int, keys: int = 1) -> T:
        started = self._clock()
        outcome = "ok"
        try:
            answer = call()
            outcomes = answer if isinstance(answer, list) else ()
            outcome = next((type(e).__name__ for e in outcomes if isinstance(e, Exception)), "ok")
            return answer
        except BaseException as e:
            outcome = type(e).__name__
            raise
        finally:
            moved = size if outcome == "ok" else 0
            self._observe(Observation(method, outcome, self._clock() - started, keys, moved))

    def _around_batch(self, method: str, items: Sequence[Any], size: int) -> list[Any]:
        return self._around(method, lambda: getattr(self.inner, method)(items), size, len(items))
