"""BoundedStore: refuses puts that would take a root, together with all its other writers, beyond a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.capacity.account import Account
from tiers.errors import StoreError
from tiers.layers.layer import Layer
from tiers.store import Store, parts_size


class BoundedStore(Layer):
    """Takes room from an account before each put. Any thread may call; nothing changes after the constructor.

    A put that stores nothing because the key is there, and one that replaces a blob, count as new bytes until the next
    measurement. Both are rare: a tier asks before it puts.

    Args:
        inner: closed with the layer.
        account: of the same root, over the same store.
    """

    def __init__(self, inner: Store, account: Account) -> None:
        super().__init__(inner)
        self._account = account

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> None:
        size = parts_size(parts)
        taken = self._account.take(size, key)
        try:
            self.inner.put(key, parts, overwrite=overwrite)
        except BaseException as e:
            # A retryable error may be a lost acknowledgement: the blob may be there.
            if isinstance(e, StoreError) and not e.retryable:
                self._account.give_back(taken, size)
            else:
                self._account.settle(taken, size)
            raise
        self._account.settle(taken, size)
