"""Store: the interface between a tier and one storage. Read this module first.

A Store is a flat, thread-safe map from a key to one immutable blob. It talks to one storage and knows nothing about
models, seals or jobs. Every store has the same six methods, and may override a few more. Everything optional is a
small Protocol, which callers check with isinstance and can do without.

Rules for every store. The contract suite, ``tiers.testing.contract``, tests all of them but one: joining parts shows
only in memory use and time.

- Calls block. The caller provides the threads for concurrency.
- Every reader sees a blob whole or not at all, even if the writer dies.
- Every operation is idempotent: repeating it changes nothing.
- Methods raise only ``StoreError`` and its subclasses.
- Bytes move directly between the storage and the caller's ``parts``; they are never joined into one buffer first.
- Parts are lent for one call: ``put`` gets read-only views, and no call keeps parts, whether it succeeds or fails.
- Nothing about a key is cached: a change made through another handle is visible as soon as the storage shows it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from .errors import (
    BlobCorruptError,
    BlobNotFoundError,
    InvalidKeyError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
)

T = TypeVar("T")

READ_ATTEMPTS_MAX = 8  # attempts of ``read_blob``
KEY_LENGTH_MAX = 1024  # S3's limit, in bytes
KEY_PART_LENGTH_MAX = 255  # NAME_MAX of every common file system, in bytes

# Components joined by single slashes, without control characters, backslash or a leading dot (reserved for the stores'
# own files; this also excludes "." and ".."). One pattern, because every call of every store runs it.
_KEY = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]+(?:/(?!\.)[^\x00-\x1f\x7f/\\]+)*")


class KeyInfo(NamedTuple):
    """One listed blob: its key, size in bytes and modification time in Unix seconds, by the storage's clock.

    Only ``put`` and ``touch`` change ``mtime``; ``size`` and reads do not.
    """

    # A named tuple takes half as long to create as a frozen dataclass, and a listing creates millions.
    key: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a store's storage.

    Attributes:
        exclusive_create: of several concurrent ``put(overwrite=False)`` calls for one key exactly one publishes, even
            across processes and hosts. False: the last call wins, which is harmless if the key determines the bytes.
        shared: other processes see the blobs that this process puts.
        latency_bound: an operation mostly waits (for a network), so callers give each blob its own task and use more
            threads than cores. False: it mostly copies, so callers use few threads with batches of blobs.
    """

    exclusive_create: bool
    shared: bool
    latency_bound: bool


class Store(ABC):
    """A flat, thread-safe map from key to one immutable blob.

    Any thread may call any method at any time. Keys are relative paths with "/" (see ``check_key``). Parts are
    C-contiguous memoryviews of bytes; the blob is all parts joined in order.
    """

    #: What this storage can do. A class attribute, or set in the constructor.
    capabilities: Capabilities

    @abstractmethod
    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        """Publish the joined parts under ``key``.

        # Behavior
        - ``overwrite=False``: publishes only if ``key`` is absent. Anything already stored under ``key``, even if it is
          not a blob, stays unchanged; the call still succeeds.
        - ``overwrite=True``: replaces the content of ``key`` in one step. Readers always see the old blob or the new
          one (except on file systems that first move an open file aside, such as NFS and libfuse).
        - On error, nothing new is visible under ``key``.
        - The parts are read-only views.
        - The caller must not change the parts before the call has returned.

        Returns:
            True: published. False: something was already stored under ``key``. If the storage cannot tell (for example
            after a lost acknowledgement), either value.

        Raises:
            StoreError: nothing was published (or, if an acknowledgement was lost, the whole blob was).
        """

    @abstractmethod
    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        """Fill the parts with the blob, in order.

        # Behavior
        - If the storage knows before it reads that the blob's size differs from the total size of the parts, the parts
          stay unchanged. After any other error the content of the parts is undefined.
        - After the call has returned or raised, nothing may write into the parts. The caller takes them back, and waits
          while a thread of the store still holds a part.

        Raises:
            BlobNotFoundError: nothing is stored under ``key``.
            BlobCorruptError: the blob's size differs from the total size of the parts, or ``key`` holds something that
                is not a blob (a folder, a symlink, a device).
        """

    @abstractmethod
    def size(self, key: str) -> int | None:
        """The blob's size in bytes; None if ``key`` has no blob. A folder that holds other keys is not a blob."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove this blob, but no blob whose key merely starts with ``key``. Succeeds if the key is absent."""

    @abstractmethod
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs whose key starts with ``prefix`` (a string prefix, not a folder), in no particular order.

        # Behavior
        - The prefix is literal: no wildcards, no escapes, and case matters.
        - Streams: memory does not grow with the number of blobs.
        - Blobs put or deleted during the listing may or may not be listed. The store's own files are never listed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources. Idempotent. Other calls after ``close`` raise StoreClosedError.

        A listing in progress continues or raises StoreClosedError.
        """

    # ---- methods with a default, which a store overrides if it can do better

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """Sizes in the order of ``keys``: None for an absent blob, a StoreError for a key whose query failed.

        By default one ``size`` call for each key. ``keys`` may be of any length: the store splits what its storage does
        not accept at once.
        """
        return [_outcome(self.size, key) for key in keys]

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """Delete blobs. Errors in the order of ``keys``; None means success, also for an absent key.

        By default one ``delete`` call for each key. ``keys`` may be of any length.
        """
        return [_outcome(self.delete, key) for key in keys]

    def folders(self) -> list[str]:
        """The distinct first components of all keys that have several components.

        By default all keys are listed.
        """
        return list({key.partition("/")[0]: None for key, _, _ in self.keys() if "/" in key})

    def prepare(self) -> None:  # noqa: B027 - most stores have nothing to prepare
        """Do one-time work now, such as creating a client, without a request to the storage. By default nothing.

        Raises nothing: the first call reports errors.
        """


def _outcome(call: Callable[[str], T], key: str) -> T | Exception:
    try:
        return call(key)
    except StoreClosedError:
        raise
    except StoreError as e:
        return e


#: Callback that receives each piece of a blob: the piece's offset in the blob, and the piece.
Look = Callable[[int, memoryview], None]


@runtime_checkable
class SupportsPieces(Protocol):
    """A store that moves a blob in pieces and passes each piece to a callback while it is in the core's cache.

    Used for checksums: a large blob is then read from memory once, not twice. The pieces come in order; joined they
    are the parts; no piece spans two parts. A store that starts over does so at offset 0. An exception from ``look``
    propagates, and nothing is published.
    """

    def put_pieces(self, key: str, parts: Sequence[memoryview], look: Look, *, overwrite: bool = False) -> bool:
        """Like ``put``, but call ``look`` with each piece before the store reads the piece.

        ``look`` may still fill the bytes after its piece, so that a blob can end with the checksum of its own bytes.
        If ``key`` is already taken, the store need not call ``look``.
        """
        ...

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        """Like ``get_into``, but call ``look`` with each piece after it is filled."""
        ...


@runtime_checkable
class SupportsTail(Protocol):
    """A store that can read only the end of a blob, so that a writer can check the trailer of a stored block."""

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """The blob's size and its last ``min(length, size)`` bytes; None if nothing is stored under ``key``.

        Raises:
            BlobCorruptError: ``key`` holds something that is not a blob.
        """
        ...


@runtime_checkable
class SupportsTouch(Protocol):
    """A store that can record the use of a blob in the ``mtime`` that ``keys`` lists."""

    def touch(self, key: str) -> None:
        """Set the blob's ``mtime`` to now and change nothing else. An absent key stays absent, without an error."""
        ...


@runtime_checkable
class SupportsAges(Protocol):
    """A store in which a copied blob keeps its age, because clients may set the ``mtime``."""

    def put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        """Like ``put`` with ``overwrite``, for a blob last used at ``used_at`` (Unix seconds, not in the future)."""
        ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A store that writes a blob under a private name first. A writer that dies may leave such a file."""

    def sweep(self, *, remove: bool = True) -> int:
        """Remove the files that dead writers left.

        Args:
            remove: False: only count them.

        Returns:
            How many were removed since the store was opened, including those that are only counted now.
        """
        ...

    def hidden_names(self) -> list[str]:
        """The files and folders that kvtiers did not write and that no key can name, relative to the root."""
        ...


@runtime_checkable
class SupportsSpace(Protocol):
    """A store whose storage reports its size."""

    def space(self) -> tuple[int, int] | None:
        """Bytes available to the current user, and the storage's size in bytes, used or not; None: not reported."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if it is a valid store key.

    Accepted: 1..1024 bytes of UTF-8, components joined by single "/", each of 1..255 bytes without control
    characters or backslash and not starting with "." (reserved for the stores' own files).

    Raises:
        InvalidKeyError: says which rule the key breaks.
    """
    if _KEY.fullmatch(key) is None:
        raise InvalidKeyError(
            'accepted are non-empty components joined by single "/", none starting with ".", '
            "without control characters or backslash",
            key=key,
        )
    # Count bytes only if they can exceed a limit: most keys are short and ASCII.
    if len(key) > KEY_PART_LENGTH_MAX or not key.isascii():
        try:
            raw = key.encode()
        except UnicodeEncodeError as e:
            raise InvalidKeyError("not encodable as UTF-8", key=key) from e
        if len(raw) > KEY_LENGTH_MAX or max(map(len, raw.split(b"/"))) > KEY_PART_LENGTH_MAX:
            raise InvalidKeyError(
                f"accepted are {KEY_LENGTH_MAX} bytes, {KEY_PART_LENGTH_MAX} bytes per component", key=key
            )
    return key


def parts_size(parts: Sequence[memoryview]) -> int:
    """The total size of all parts in bytes."""
    size = 0
    for part in parts:  # twice as fast as sum() over a generator; called three times per block
        size += part.nbytes
    return size


def read_blob(store: Store, key: str, bytes_max: int, *, guess: int | None = None) -> bytes | None:
    """Read a small blob as it was at one moment, even if it is replaced meanwhile. None: nothing is stored.

    Args:
        guess: the size that the blob probably has, which saves a call of ``size``.

    Raises:
        BlobCorruptError: the blob is larger than ``bytes_max``.
        StoreUnavailableError: its size changes faster than it can be read.
        StoreError: the blob cannot be read.
    """
    size = store.size(key) if guess is None else guess
    for _ in range(READ_ATTEMPTS_MAX):
        if size is None:
            return None
        if size > bytes_max:
            raise BlobCorruptError(f"{size} bytes are stored, accepted are at most {bytes_max}", key=key)
        data = bytearray(size)
        try:
            if size:
                store.get_into(key, [memoryview(data)])
            return bytes(data)
        except BlobNotFoundError:
            return None
        except BlobCorruptError:
            size = store.size(key)
    raise StoreUnavailableError("it changes faster than it can be read", key=key)


def fill_parts(parts: Sequence[memoryview], blob: bytes | bytearray | memoryview, *, key: str) -> None:
    """Copy a whole blob into parts, for a client that returns blobs as one buffer.

    Raises:
        BlobCorruptError: the blob's size differs from the total size of the parts; the parts are unchanged.
    """
    source = memoryview(blob).cast("B")
    size = parts_size(parts)
    if source.nbytes != size:
        raise BlobCorruptError(f"{source.nbytes} bytes are stored, {size} were asked for", key=key)
    start = 0
    for part in parts:
        part.cast("B")[:] = source[start : start + part.nbytes]
        start += part.nbytes


@contextmanager
def client_errors(classify: Callable[[Exception], type[StoreError] | None], *, key: str = "") -> Iterator[None]:
    """Translate a storage client's exceptions into StoreErrors, by one table for all calls.

    Args:
        classify: returns the StoreError subclass for an exception, or None for an exception to raise unchanged because
            it is not the client's.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as e:
        kind = classify(e)
        if kind is None:
            raise
        raise kind(f"{type(e).__name__}: {e}", key=key) from e
