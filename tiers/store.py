"""Store: what a tier keeps its blobs in. Read this first.

A Store is a flat, thread-safe map from a key to one immutable blob. It knows one storage and nothing else: no models,
no seals, no jobs. It has six methods; whatever else a store can do is a small Protocol, which callers ask for with
isinstance and can do without.

Rules for every store. The contract suite, ``tiers.testing.contract``, tests all but one: that parts are not joined
shows in memory and time only.

- Blocking calls. Concurrency belongs to the caller, who brings the threads.
- A blob becomes visible whole or not at all, to every reader, also when the writer dies.
- Every operation is idempotent: doing it twice is doing it once.
- Only ``StoreError`` and its subclasses come out.
- The bytes of ``parts`` go from and to the caller's memory; they are never joined into one buffer first.
- Parts are lent for a call: a put does not write into them, and no call keeps one, whether it succeeds or fails.
- Nothing about a key is remembered: what another handle changed is seen as soon as the storage shows it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from kvtiers.tiers.errors import BlobCorruptError, InvalidKeyError, StoreClosedError, StoreError, StoreTimeoutError
from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

KEY_LENGTH_MAX = 1024  # S3's limit, in bytes
KEY_PART_LENGTH_MAX = 255  # NAME_MAX of every common file system, in bytes

# Components joined by single slashes, without control characters, backslash or a leading dot. (Dot names are a store's
# own; this bars "." and "..", too.) One pattern, because every call of every store pays for it.
_KEY = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]+(?:/(?!\.)[^\x00-\x1f\x7f/\\]+)*")


class KeyInfo(NamedTuple):
    """One listed blob: its key, its size in bytes and its last change in Unix seconds, by the storage's clock.

    Only a put and a touch change it; asking and reading do not.
    """

    # A named tuple, as it is made in half the time of a frozen dataclass, and a listing makes millions.
    key: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store's storage can and cannot do, as data.

    Attributes:
        exclusive_create: of concurrent ``put(overwrite=False)`` of one key exactly one publishes, also between
            processes and hosts. False: the last one wins, which is harmless where the key says what the bytes are.
        shared: other processes see what is put.
        latency_bound: an operation mostly waits (for a network): callers give each blob its own task and bring more
            threads than cores. False: it mostly copies, and callers bring few threads with batches of blobs.
    """

    exclusive_create: bool
    shared: bool
    latency_bound: bool


class Store(ABC):
    """A flat, thread-safe map from key to one immutable blob.

    Any thread may call any method at any time. Keys are relative paths with "/" (see ``check_key``). Parts are
    C-contiguous memoryviews of bytes; joined in order they are the blob.
    """

    #: What this storage can do. A class attribute or set in the constructor.
    capabilities: Capabilities

    #: Folders are named by vLLM, and files in one say which engines' blocks it holds (``format: vllm-raw``).
    shares_folders: bool = False

    @abstractmethod
    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        """Publish the joined parts under ``key``.

        # Behavior
        - ``overwrite=False``: publishes only if ``key`` is absent. If something is there already, be it a blob or not,
          it stays, and that is success.
        - ``overwrite=True``: replaces what is there in one step; readers see the old blob or the new one, never none
          (except where the file system moves an open file aside first, as NFS and libfuse do).
        - On error nothing is visible under ``key`` that was not there before.
        - The parts may change only after the call has returned.

        Returns:
            True: published. False: something was there already. Where a storage cannot tell (after a lost
            acknowledgement, say), either.

        Raises:
            StoreError: nothing was published (or, where an acknowledgement was lost, it was published whole).
        """

    @abstractmethod
    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        """Fill the parts with the blob, in order.

        # Behavior
        - A blob of another size than the parts' joined size is BlobCorruptError, and where the storage can tell
          beforehand, no byte of the parts is touched.
        - After an error the parts' content is undefined.
        - Something under the key that is no blob (a folder, a symlink, a device) is BlobCorruptError.

        Raises:
            BlobNotFoundError: nothing is stored under ``key``.
            BlobCorruptError: a blob of another size, or no blob.
        """

    @abstractmethod
    def size(self, key: str) -> int | None:
        """The blob's size in bytes; None where ``key`` has no blob. A folder of other keys is no blob."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove this blob, and none whose key only begins so. An absent key is success."""

    @abstractmethod
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs whose key starts with ``prefix`` (a string prefix, not a folder), in no particular order.

        # Behavior
        - The prefix is taken as it is written: no pattern, nothing quoted, no case folded.
        - Streams: memory does not grow with the number of blobs.
        - A blob put or deleted meanwhile may or may not be listed. The store's own files never are.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the store holds. Idempotent; calls after it raise StoreClosedError.

        A listing under way goes on, or raises that too.
        """


@runtime_checkable
class SupportsSizeMany(Protocol):
    """A store that answers many ``size`` questions for less than one by one.

    Here and in the next two, "many" has no limit: the store splits what its storage does not take in one request.
    """

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """Sizes parallel to ``keys``; for a key that could not be asked for, its StoreError."""
        ...


@runtime_checkable
class SupportsDeleteMany(Protocol):
    """A store that deletes many blobs for less than one by one."""

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """Errors parallel to ``keys``; None is success, and an absent key is success."""
        ...


@runtime_checkable
class SupportsGetMany(Protocol):
    """A store that fills many blobs' parts for less than one by one."""

    def get_many_into(self, requests: Sequence[tuple[str, Sequence[memoryview]]]) -> list[Exception | None]:
        """Outcomes parallel to ``requests``, each as ``get_into`` would raise it; None is success."""
        ...


#: Is called with a piece's offset in its blob, and the piece.
Look = Callable[[int, memoryview], None]


@runtime_checkable
class SupportsPieces(Protocol):
    """A store that moves bytes piece by piece and shows its caller each while it is in the core's cache.

    For checksums: a large blob is then read from memory once, not twice. The pieces come in order, are the parts when
    joined, and none spans two parts. A store that begins again does so at offset 0. What ``look`` raises comes out, and
    nothing is published.
    """

    def put_pieces(self, key: str, parts: Sequence[memoryview], look: Look, *, overwrite: bool = False) -> bool:
        """As ``put``. Each piece is shown before it is read, and ``look`` may fill what comes after it: so a blob can
        end with the checksum of its bytes. Where something is there already, nothing need be shown.
        """
        ...

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        """As ``get_into``. Each piece is shown once it is filled."""
        ...


@runtime_checkable
class SupportsTail(Protocol):
    """A store that reads a blob's end alone: so a writer checks that a stored block has a good trailer."""

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """The blob's size and its last ``min(length, size)`` bytes; None when there is no blob under ``key``.

        Raises:
            BlobCorruptError: something is there that is no blob.
        """
        ...


@runtime_checkable
class SupportsQuarantine(Protocol):
    """A store that can move a bad blob aside: no key has it any more, and an operator can still look at it."""

    def quarantine(self, key: str) -> None:
        """Move what is stored under ``key`` aside, so that the key is absent. An absent key is success.

        Keys that only begin so stay.
        """
        ...


@runtime_checkable
class SupportsPrepare(Protocol):
    """A store whose first call does something once for all, such as making a client."""

    def prepare(self) -> None:
        """Do that now, without asking the storage. Raises nothing: the first call reports what failed."""
        ...


@runtime_checkable
class SupportsTouch(Protocol):
    """A store that can note that a blob was used, in the ``mtime`` that ``keys`` lists."""

    def touch(self, key: str) -> None:
        """Make the blob's ``mtime`` now and change nothing else. An absent key is success, and stays absent."""
        ...


@runtime_checkable
class SupportsAges(Protocol):
    """A store in which a copied blob keeps its age."""

    def put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        """As ``put`` with ``overwrite``, of a blob that was last used then (Unix seconds, not in the future)."""
        ...

    def used_at(self, info: KeyInfo) -> float:
        """When a listed blob was last used or, where that is not known, written; 0.0: nobody says.

        Its ``mtime``, where the storage's times can be set. Else what ``put_aged`` noted, which costs a request.
        """
        ...


@runtime_checkable
class SupportsSweep(Protocol):
    """A store that keeps things of its own beside the blobs: what dead writers left, and bad blobs."""

    def sweep(self, quarantine_s_max: float) -> int:
        """Remove what dead writers left, and what has been in quarantine for so long (0: all of that); no blob.

        Returns:
            Bytes of the store's own things that are still there.
        """
        ...


@runtime_checkable
class NamesBlocks(Protocol):
    """A store whose blocks have other names than ``FileMapper``'s."""

    def is_block(self, key: str) -> bool:
        """Whether a listed name is a block's, which a collector may remove."""
        ...


@runtime_checkable
class SupportsFolders(Protocol):
    """A store that knows its keys' first components without listing the keys."""

    def folders(self) -> list[str]:
        """The first components of all keys that have several, each once.

        Raises:
            StoreError: they cannot be listed.
        """
        ...


@runtime_checkable
class SupportsFreeBytes(Protocol):
    """A store whose storage says how much more it can take."""

    def free_bytes(self) -> int:
        """Free bytes, for this user."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if a store may be asked for it.

    Accepted: 1..1024 bytes of UTF-8, components joined by single "/", each of 1..255 bytes without control
    characters or backslash and not starting with "." (dot names are the stores' own).

    Raises:
        InvalidKeyError: says which rule the key breaks.
    """
    if _KEY.fullmatch(key) is None:
        raise InvalidKeyError(
            'accepted are non-empty components joined by single "/", none starting with ".", '
            "without control characters or backslash",
            key=key,
        )
    # Byte lengths are counted only where they can matter: the usual key is ASCII and short.
    if len(key) > KEY_PART_LENGTH_MAX or not key.isascii():
        try:
            raw = key.encode()
        except UnicodeEncodeError as e:
            raise InvalidKeyError("not encodable as UTF-8", key=key) from e
        if len(raw) > KEY_LENGTH_MAX or max(map(len, raw.split(b"/"))) > KEY_PART_LENGTH_MAX:
            raise InvalidKeyError(
                f"accepted are {KEY_LENGTH_MAX} bytes, {KEY_PART_LENGTH_MAX} bytes a component", key=key
            )
    return key


def parts_size(parts: Sequence[memoryview]) -> int:
    """Joined size of parts in bytes."""
    size = 0
    for part in parts:  # twice as fast as sum() of a generator; called three times a block
        size += part.nbytes
    return size


def fill_parts(parts: Sequence[memoryview], blob: bytes | bytearray | memoryview, *, key: str) -> None:
    """Copy a blob into parts, for a storage whose client returns it whole.

    Raises:
        BlobCorruptError: it has another size than the parts together; none of them was changed.
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
    """Turn the exceptions of a storage's client into StoreErrors, by one table for all calls.

    Args:
        classify: the StoreError that an exception of the client's is; None: it is not the client's, and stays as it is.
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


# ---- one by one where a store lacks the extra ------------------------------------------------------------------------


def sizes_of(
    store: Store, keys: Sequence[str], *, kept: type[StoreError] = StoreError
) -> Iterator[int | Exception | None]:
    """As ``SupportsSizeMany.size_many``.

    Args:
        kept: errors of single questions that are answers and do not end the asking.
    """
    if isinstance(store, SupportsSizeMany):
        yield from store.size_many(keys)
        return
    for key in keys:
        try:
            yield store.size(key)
        except kept as e:
            yield e


def delete_all(store: Store, keys: Sequence[str]) -> list[Exception | None]:
    """As ``SupportsDeleteMany.delete_many``."""
    if isinstance(store, SupportsDeleteMany):
        return store.delete_many(keys)
    outcomes: list[Exception | None] = []
    for key in keys:
        try:
            store.delete(key)
            outcomes.append(None)
        except StoreError as e:
            outcomes.append(e)
    return outcomes


def put_aside(store: Store, key: str) -> None:
    """Quarantine a bad blob; delete it where the store cannot, or where that fails.

    Raises:
        StoreError: the blob may still be there.
    """
    if isinstance(store, SupportsQuarantine):
        try:
            store.quarantine(key)
            return
        except (StoreClosedError, StoreTimeoutError):  # a deletion would end the same way
            raise
        except StoreError as e:
            logger.debug("%s could not be moved aside and is deleted: %s", key, str(e))
    store.delete(key)
