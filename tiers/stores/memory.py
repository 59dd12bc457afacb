"""MemoryStore: keeps blobs in this process's memory and drops the least recently used when it is full.

Used for tests, for a second tier in a machine's memory, and as the smallest example of a store.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import BlobCorruptError, BlobNotFoundError, ConfigError, StoreClosedError, StoreFullError
from ..store import Capabilities, KeyInfo, Store, check_key, parts_size


@dataclass(frozen=True, slots=True)
class _Blob:
    """A stored blob. It never changes, so readers copy from it without the lock."""

    data: NDArray[np.uint8]
    mtime: float


class MemoryStore(Store):
    """Keeps blobs in a dict. Any thread may call; ``_lock`` owns every field except the blobs' bytes.

    numpy copies payloads outside the lock, so other threads can run meanwhile.

    Args:
        max_bytes: limit of all blobs together. Beyond it, the blobs with the oldest last put or read are dropped. The
            copy of a put in progress is not counted. None: no limit.
        clock: Unix seconds.

    Raises:
        ConfigError: ``max_bytes`` is negative.
    """

    capabilities = Capabilities(exclusive_create=True, shared=False, latency_bound=False)

    def __init__(self, max_bytes: int | None = None, *, clock: Callable[[], float] = time.time) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"{max_bytes} is not accepted; write 0 or more bytes", field="max_bytes")
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, _Blob] = OrderedDict()
        self._used_bytes = 0
        self._closed = False

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        check_key(key)
        size = parts_size(parts)
        if self._max_bytes is not None and size > self._max_bytes:
            self._raise_if_closed(key)
            raise StoreFullError(f"{size} bytes are more than max_bytes = {self._max_bytes}", key=key)
        if not overwrite and self._find(key) is not None:
            return False
        data = np.empty(size, np.uint8)
        for part, target in _pairs(parts, data):
            target[:] = part
        with self._lock:
            self._raise_if_closed(key)
            if not overwrite and key in self._blobs:
                return False
            self._drop(key)
            self._blobs[key] = _Blob(data, self._clock())
            self._used_bytes += size
            while self._max_bytes is not None and self._used_bytes > self._max_bytes:
                self._drop(next(iter(self._blobs)))
        return True

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        check_key(key)
        blob = self._find(key)
        if blob is None:
            raise BlobNotFoundError("not stored", key=key)
        size = parts_size(parts)
        if blob.data.size != size:
            raise BlobCorruptError(f"{blob.data.size} bytes are stored, {size} were asked for", key=key)
        for part, source in _pairs(parts, blob.data):
            part[:] = source

    def size(self, key: str) -> int | None:
        check_key(key)
        blob = self._find(key, used=False)
        return None if blob is None else blob.data.size

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._raise_if_closed(key)
            self._drop(key)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs. Holds a list of all keys, which is small compared to the blobs."""
        with self._lock:
            self._raise_if_closed("")
            keys = list(self._blobs)
        for key in keys:
            if key.startswith(prefix):
                blob = self._find(key, used=False)
                if blob is not None:
                    yield KeyInfo(key, blob.data.size, blob.mtime)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._blobs.clear()
            self._used_bytes = 0

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``SupportsTail``."""
        check_key(key)
        blob = self._find(key, used=False)
        if blob is None:
            return None
        size = blob.data.size
        return size, blob.data[size - min(length, size) :].tobytes()

    def _find(self, key: str, *, used: bool = True) -> _Blob | None:
        with self._lock:
            self._raise_if_closed(key)
            blob = self._blobs.get(key)
            if used and blob is not None:
                self._blobs.move_to_end(key)
            return blob

    def _drop(self, key: str) -> None:
        """Remove a blob if it exists. The caller holds the lock."""
        blob = self._blobs.pop(key, None)
        if blob is not None:
            self._used_bytes -= blob.data.size

    def _raise_if_closed(self, key: str) -> None:
        if self._closed:
            raise StoreClosedError("the memory store is closed", key=key)


def _pairs(
    parts: Sequence[memoryview], data: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield each non-empty part as bytes, with the matching slice of ``data``."""
    start = 0
    for part in parts:
        if part.nbytes:
            yield np.frombuffer(part, np.uint8), data[start : start + part.nbytes]
            start += part.nbytes
