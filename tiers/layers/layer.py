"""Layer: a Store that wraps another Store and changes one thing about every call.

Order of the layers, from the caller inward, and why:

- measure: outermost, so that it measures the calls that the caller made.
- retry: outside limit, so that a call gives up its place while it waits for the next attempt, and so that a call that
  limit refused is retried.
- limit, then the store. A timeout outside retry would cut off an attempt that was about to succeed, so stores have
  their own deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from ..store import KeyInfo, Store, parts_size

T = TypeVar("T")

#: Methods of the optional protocols. A batch method returns a key's error at the key's position, and does not raise it.
BATCH_METHODS: Final = ("size_many", "delete_many", "get_many_into")
SINGLE_METHODS: Final = (
    *("get_tail", "quarantine", "touch", "sweep", "leftovers", "hidden_names", "free_bytes", "total_bytes", "folders"),
    "used_at",
)
#: Methods that make no storage call; layers pass them on unchanged.
PASSED_METHODS: Final = ("is_block", "prepare")


class Layer(Store):
    """Passes every call on. A subclass overrides ``_around``, and ``_around_batch`` or ``keys`` if it must.

    A layer supports exactly the optional protocols of its inner store. Their methods are set on the instance, because
    isinstance on a protocol looks for the attributes. The exception is ``SupportsPieces``, which is not passed on:
    behind a layer, blobs are checksummed whole.

    Args:
        inner: the store; closed with the layer.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.shares_folders = inner.shares_folders
        for name in SINGLE_METHODS:
            if hasattr(inner, name):
                setattr(self, name, partial(self._single, name))
        for name in BATCH_METHODS:
            if hasattr(inner, name):
                setattr(self, name, partial(self._batch, name))
        for name in PASSED_METHODS:
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        if hasattr(inner, "put_aged"):
            self.put_aged = self._put_aged

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return self._around("put", lambda: self.inner.put(key, parts, overwrite=overwrite), parts_size(parts))

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self._around("get_into", lambda: self.inner.get_into(key, parts), parts_size(parts))

    def size(self, key: str) -> int | None:
        return self._around("size", lambda: self.inner.size(key), 0)

    def delete(self, key: str) -> None:
        self._around("delete", lambda: self.inner.delete(key), 0)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return self.inner.keys(prefix)

    def close(self) -> None:
        self.inner.close()

    def _put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        inner: Any = self.inner
        published: bool = self._around(
            "put_aged", lambda: inner.put_aged(key, parts, used_at=used_at), parts_size(parts)
        )
        return published

    def _single(self, method: str, *arguments: Any) -> Any:
        return self._around(method, lambda: getattr(self.inner, method)(*arguments), 0)

    def _batch(self, method: str, items: Sequence[Any]) -> list[Any]:
        size = sum(parts_size(parts) for _, parts in items) if method == "get_many_into" else 0
        return self._around_batch(method, items, size)

    def _around(self, method: str, call: Callable[[], T], size: int) -> T:  # noqa: ARG002 - for subclasses
        """Make one call.

        Args:
            method: the method's name.
            call: makes the call.
            size: payload bytes that the call moves if it succeeds.
        """
        return call()

    def _around_batch(self, method: str, items: Sequence[Any], size: int) -> list[Any]:
        """Make one call for many keys; returns outcomes parallel to ``items``."""
        return self._around(method, lambda: getattr(self.inner, method)(items), size)
