"""Layer: a Store that wraps another Store and changes one thing about its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from ..store import KeyInfo, Store

T = TypeVar("T")

#: Methods of the optional protocols that call the storage.
CALLING_METHODS: Final = (
    *("size_many", "delete_many", "get_tail", "touch", "sweep", "hidden_names", "space"),
    *("folders", "put_aged"),
)
#: Methods that make no storage call; layers pass them on unchanged.
PASSED_METHODS: Final = ("prepare",)


def _adds(store: Store, method: str) -> bool:
    """Whether a store has a method of its own: one that ``Store`` lacks, or that replaces ``Store``'s default."""
    found = getattr(store, method, None)
    return found is not None and getattr(found, "__func__", None) is not getattr(Store, method, None)


class Layer(Store):
    """Passes every call on. A subclass overrides the methods that it changes, or ``_around``.

    A layer supports the optional protocols of its inner store, and those that its class adds. The inner store's methods
    are set on the instance, because isinstance on a protocol looks for the attributes. The exception is
    ``SupportsPieces``, which is not passed on: behind a layer, blobs are checksummed whole.

    Args:
        inner: the store; closed with the layer.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        for name in CALLING_METHODS:
            if _adds(inner, name) and not _adds(self, name):
                setattr(self, name, partial(self._pass_on, name))
        for name in PASSED_METHODS:
            if _adds(inner, name) and not _adds(self, name):
                setattr(self, name, getattr(inner, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return self._around("put", lambda: self.inner.put(key, parts, overwrite=overwrite))

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._around("get_into", lambda: self.inner.get_into(key, parts))

    def size(self, key: str) -> int | None:
        return self._around("size", lambda: self.inner.size(key))

    def delete(self, key: str) -> None:
        self._around("delete", lambda: self.inner.delete(key))

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return self.inner.keys(prefix)

    def close(self) -> None:
        self.inner.close()

    def _pass_on(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._around(method, lambda: getattr(self.inner, method)(*arguments, **options))

    def _around(self, method: str, call: Callable[[], T]) -> T:  # noqa: ARG002 - for subclasses
        """Make one call of the method with this name."""
        return call()
