"""LimitStore: limits the concurrent calls of a store, and the bytes that they move."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ConfigError, StoreThrottledError
from ..store import Store
from .layer import Layer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits of a LimitStore.

    Below a tier, a refused call counts as a failure of the storage, and three failures in a row cut the tier off. To
    avoid that, allow as many calls as the tier has threads (by default 7, two of them for lookups), or set
    ``wait_s_max`` to more than the time that so many calls take one after the other.

    Attributes:
        calls_max: maximum number of concurrent calls.
        bytes_max: maximum payload bytes of concurrent puts and gets; a call with more runs without other puts and gets.
        wait_s_max: how long a call waits for its turn before it is refused.
        waiting_max: maximum number of waiting calls; further calls are refused at once.
    """

    calls_max: int = 32
    bytes_max: int = 1 << 30
    wait_s_max: float = 5.0
    waiting_max: int = 1024

    def __post_init__(self) -> None:
        for name in ("calls_max", "bytes_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)} is not accepted: 1 or more", field=name)


class LimitStore(Layer):
    """Admits calls in the order they came, so that small calls do not overtake a large call forever.

    A refused call raises StoreThrottledError. Listings are not limited, because their callers may pause in the middle.
    Any thread may call. ``_changed`` owns every field below it.

    Args:
        inner: the store.
        options: limits.
    """

    def __init__(self, inner: Store, options: LimitOptions | None = None) -> None:
        super().__init__(inner)
        self.options = options or LimitOptions()
        self._changed = threading.Condition()
        self._calls = 0
        self._bytes = 0
        self._waiting: deque[object] = deque()

    def _around(self, method: str, call: Callable[[], T], size: int) -> T:
        size = min(size, self.options.bytes_max)
        self._enter(method, size)
        try:
            return call()
        finally:
            with self._changed:
                self._calls -= 1
                self._bytes -= size
                self._changed.notify_all()

    def _enter(self, method: str, size: int) -> None:
        options = self.options
        ticket = object()
        with self._changed:
            if len(self._waiting) >= options.waiting_max:
                raise StoreThrottledError(f"{method} was refused: {options.waiting_max} calls are already waiting")
            self._waiting.append(ticket)
            try:
                if not self._changed.wait_for(lambda: self._is_next(ticket, size), options.wait_s_max):
                    raise StoreThrottledError(
                        f"{method} was not admitted within {options.wait_s_max:g} s: {self._calls} calls with "
                        f"{self._bytes} bytes are running"
                    )
                self._calls += 1
                self._bytes += size
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _is_next(self, ticket: object, size: int) -> bool:
        fits = self._calls < self.options.calls_max and self._bytes + size <= self.options.bytes_max
        return fits and self._waiting[0] is ticket
