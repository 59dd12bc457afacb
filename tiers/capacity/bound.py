"""BoundedStore: refuses a put if all writers of the root together would then exceed the root's limit in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvtiers.tiers.capacity.account import Account
from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.isolation.mover import RunsInWorkers, WorkerFunction
from kvtiers.tiers.layers.layer import Layer
from kvtiers.tiers.store import Store, parts_size

T = TypeVar("T")


class BoundedStore(Layer):
    """Reserves space in an account before each put. Any thread may call; nothing changes after the constructor.

    A put that replaces a blob counts as new bytes until the next measurement, so the account overestimates and never
    underestimates. A batch of the inner store's workers (``tiers.isolation.mover``) reserves space for all its blobs
    at once, and gives back what it did not need.

    Args:
        inner: the store; closed with the layer.
        account: the account of the same root, over the same store.
    """

    def __init__(self, inner: Store, account: Account) -> None:
        super().__init__(inner)
        self._account = account
        if isinstance(inner, RunsInWorkers):
            # Set on the instance, because isinstance on the RunsInWorkers protocol looks for the attributes.
            self.maps_region, self.deadline_s, self.run = inner.maps_region, inner.deadline_s, self._run
            self.abandon = inner.abandon

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return self._put_within(key, parts, lambda: self.inner.put(key, parts, overwrite=overwrite))

    def _put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        inner: Any = self.inner
        return self._put_within(key, parts, lambda: inner.put_aged(key, parts, used_at=used_at))

    def _put_within(self, key: str, parts: Sequence[memoryview], put: Callable[[], bool]) -> bool:
        size = parts_size(parts)

        def put_bytes(published: bool) -> int:
            return 0 if published is False else size  # only an explicit False: a store may return None

        return self._within(size, key, put, put_bytes)

    def _run(self, function: WorkerFunction, argument: object, raw: bytes = b"", *, puts_bytes: int = 0) -> Any:
        inner: Any = self.inner
        if not puts_bytes:
            return inner.run(function, argument, raw)
        return self._within(
            puts_bytes, "", lambda: inner.run(function, argument, raw), lambda answer: answer["put_bytes"]
        )

    def _within(self, size: int, key: str, put: Callable[[], T], put_bytes: Callable[[T], int]) -> T:
        taken = self._account.take(size, key)
        try:
            result = put()
        except BaseException as e:
            # After a retryable error the blob may be stored: perhaps only the acknowledgement was lost.
            if isinstance(e, StoreError) and not e.retryable:
                self._account.give_back(taken, size)
            else:
                self._account.settle(taken, size)
            raise
        used = put_bytes(result)
        self._account.settle(taken, used)
        self._account.give_back(taken, size - used)
        return result
