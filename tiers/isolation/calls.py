"""What a ``ProcessIsolatedStore`` calls in its workers, one function for each method of its store.

Arguments and results are JSON values; see ``worker`` for the segments of blobs. For several keys, the result is
parallel to them and has the list of ``encode_error`` where a key failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from .worker import encode_error

LISTING_PAGE_KEYS = 256
# The parent's store has these only if the worker's store does.
OPTIONAL_METHODS = ("get_tail", "quarantine", "folders", "check")


def describe(store: Any, _region: memoryview, _argument: None, _raw: memoryview) -> tuple[object, list[str]]:
    """The store's capabilities and optional methods."""
    return asdict(store.capabilities), [name for name in OPTIONAL_METHODS if hasattr(store, name)]


def put(store: Any, region: memoryview, argument: Any, scratch: memoryview) -> bool | None:
    """Put a blob: ``[key, overwrite, segments]``."""
    key, overwrite, segments = argument
    parts = [part.toreadonly() for part in _parts(segments, region, scratch)]
    published: bool | None = store.put(key, parts, overwrite=overwrite)
    return published


def get(store: Any, region: memoryview, argument: Any, scratch: memoryview) -> None:
    """Read a blob: ``[key, segments]``."""
    key, segments = argument
    store.get_into(key, _parts(segments, region, scratch))


def _parts(segments: Any, region: memoryview, scratch: memoryview) -> list[memoryview]:
    """The parts of a blob."""
    parts = []
    for offset, length in segments:
        if offset >= 0:
            assert offset + length <= len(region), "a part must lie inside the region"
            parts.append(region[offset : offset + length])
        else:
            parts.append(scratch[:length])
            scratch = scratch[length:]
    return parts


def get_tail(store: Any, _region: memoryview, argument: Any, _raw: memoryview) -> tuple[int, str] | None:
    """A blob's size, and its last bytes in hexadecimal: ``[key, length]``."""
    found = store.get_tail(*argument)
    return None if found is None else (found[0], found[1].hex())


def quarantine(store: Any, _region: memoryview, key: str, _raw: memoryview) -> None:
    """Move a blob aside."""
    store.quarantine(key)


def check(store: Any, _region: memoryview, _argument: None, _raw: memoryview) -> None:
    """Verify that the storage can be used."""
    store.prepare()  # a check has a short time limit, and all workers create their clients now
    store.check()


def folders(store: Any, _region: memoryview, _argument: None, _raw: memoryview) -> list[str]:
    """The store's folders."""
    return list(store.folders())


def size_many(store: Any, _region: memoryview, keys: list[str], _raw: memoryview) -> list[object]:
    """The size of each blob, None, or an error."""
    return [_size(size) for size in store.size_many(keys)]


def delete_many(store: Any, _region: memoryview, keys: list[str], _raw: memoryview) -> list[list[str] | None]:
    """Delete blobs; returns an error or None for each."""
    return [None if failure is None else encode_error(failure) for failure in store.delete_many(keys)]


def first_page(store: Any, _region: memoryview, prefix: str, _raw: memoryview) -> list[tuple[str, int, float]] | None:
    """The whole listing if it fits on one page, else None."""
    page = _page(store.keys(prefix), LISTING_PAGE_KEYS + 1)
    return page if len(page) <= LISTING_PAGE_KEYS else None


_listings: dict[str, Iterator[Any]] = {}  # at most one: a worker whose listing does not end is discarded


def next_page(store: Any, _region: memoryview, prefix: str, _raw: memoryview) -> list[tuple[str, int, float]]:
    """The next page of a listing; after the last one, an empty one."""
    if prefix not in _listings:
        _listings[prefix] = iter(store.keys(prefix))
    page = _page(_listings[prefix], LISTING_PAGE_KEYS)
    if not page:
        del _listings[prefix]
    return page


def _page(listing: Iterable[Any], count: int) -> list[tuple[str, int, float]]:
    return [(info.key, info.size, info.mtime) for info in islice(listing, count)]


def _size(size: object) -> object:
    """Encode a size for the answer. A list would be decoded as an error, so it is replaced by a TypeError."""
    if isinstance(size, list | tuple | dict):
        size = TypeError(f"a size is a number or None, not a {type(size).__name__}")
    return encode_error(size) if isinstance(size, Exception) else size
