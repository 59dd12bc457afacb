"""Store: what a tier keeps its blobs in. Read this first.

A Store is a flat, thread-safe map from a key to one immutable blob. It knows one storage and nothing else: not
models, not seals, not jobs. Six methods are the whole of it; everything a store can do beyond that is a small
Protocol that callers ask for with isinstance and can live without.

Rules for every store. The contract suite, ``tiers.testing.contract``, tests each but that parts are not joined, which
shows in memory and time alone:

- Blocking calls. Concurrency belongs to the caller, who brings the threads.
- A blob becomes visible whole or not at all, to every reader, also when the writer dies.
- Every operation is idempotent: doing it twice is doing it once.
- Only ``StoreError`` and its subclasses come out.
- The bytes of ``parts`` go from and to the caller's memory; they are never joined into one buffer first.
- Parts are lent for a call: a put writes nothing into them, and none is held after a call, also not by one that failed.
- Nothing that was once true of a key is remembered: what another handle changed is seen once the storage shows it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tiers.errors import InvalidKeyError, StoreError

KEY_LENGTH_MAX = 1024  # S3's limit, in bytes
KEY_PART_LENGTH_MAX = 255  # NAME_MAX of every common file system, in bytes

# Components of printable characters, joined by single slashes. No control characters, no backslash, and no leading dot:
# dot names are a store's own; this also bars "." and "..". One pattern, because every call of every store pays for it.
_KEY = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]+(?:/(?!\.)[^\x00-\x1f\x7f/\\]+)*")


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One listed blob: its key, its size in bytes and its last change in Unix seconds, by the storage's clock.

    Changed is what was put or touched; asking and reading change nothing.
    """

    key: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store's storage can and cannot do, as data.

    Attributes:
        exclusive_create: of many concurrent ``put(overwrite=False)`` of one key exactly one publishes, also among
            processes and hosts. Where False the last one wins, which for content-addressed blobs is the same bytes.
        shared: other processes see what is put.
        latency_bound: an operation's cost is mostly waiting (a network), so callers give each blob its own task
            and bring more threads than cores. False: mostly copying, so callers batch blobs and bring few threads.
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

    #: Its folders have vLLM's names, and files say which engines' blocks are in one (``format: vllm-raw``).
    shares_folders: bool = False

    @abstractmethod
    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        """Publish the joined parts under ``key``.

        # Behavior
        - ``overwrite=False``: publishes only if ``key`` is absent; already there is success and changes nothing. What
          is there may be anything, also no blob: who must know looks at it.
        - ``overwrite=True``: replaces what is there in one step; readers see the old blob or the new one, and never
          none (but where the file system itself moves an open file aside first, as NFS and libfuse do).
        - On error nothing is visible under ``key`` that was not there before.
        - The parts may change only after the call has returned.

        Returns:
            False: something was there already and stays. True: published. A storage that cannot tell the two apart
            (after a lost acknowledgement, say) may return either.

        Raises:
            StoreError: nothing was published (or, where an acknowledgement was lost, it was published whole).
        """

    @abstractmethod
    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        """Fill the parts with the blob, in order.

        # Behavior
        - The blob's size must be the parts' joined size; any other size is BlobCorruptError and, where the
          storage can tell beforehand, no byte of the parts is touched.
        - After an error the parts' content is undefined.
        - Something under the key that is no blob (a folder, a symlink, a device) is BlobCorruptError.

        Raises:
            BlobNotFoundError: nothing is stored under ``key``.
            BlobCorruptError: a blob of another size, or no blob.
        """

    @abstractmethod
    def size(self, key: str) -> int | None:
        """The blob's size in bytes, or None when there is no blob under ``key``; a folder of other keys is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the blob and no other, whatever its key begins with. An absent key is success."""

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

    Here as in the next two, "many" has no limit: what the storage takes in one request is the store's affair.
    """

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """Sizes parallel to ``keys``; a key that could not be asked has its StoreError in its place."""
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
    """A store that moves bytes piece by piece and lets its caller look at each while it is in the core's cache.

    Made for checksums: a large blob is read from memory once then, not twice. The pieces come in order, joined they
    are the parts, and none spans two of these. A store that must begin again begins at offset 0 again. What ``look``
    raises comes out, and nothing is published.
    """

    def put_pieces(self, key: str, parts: Sequence[memoryview], look: Look, *, overwrite: bool = False) -> bool:
        """As ``put``. Each piece is looked at before it is read; ``look`` may fill what comes behind it, so that a
        blob may end with the checksum of its bytes. Where something is there already there may be no look.
        """
        ...

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        """As ``get_into``. Each piece is looked at when it was filled."""
        ...


@runtime_checkable
class SupportsTail(Protocol):
    """A store that reads a blob's end without its rest: how a writer checks that a stored block has a good trailer."""

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """The blob's size and its last ``min(length, size)`` bytes; None when there is no blob under ``key``.

        Raises:
            BlobCorruptError: something is there that is no blob.
        """
        ...


@runtime_checkable
class SupportsQuarantine(Protocol):
    """A store that can move a bad blob aside, out of every key, where an operator can still look at it."""

    def quarantine(self, key: str) -> None:
        """Move what is stored under ``key`` aside, so that the key is absent. An absent key is success.

        Keys that only begin alike stay.
        """
        ...


@runtime_checkable
class SupportsPrepare(Protocol):
    """A store whose first call does something that later ones need not, such as making a client."""

    def prepare(self) -> None:
        """Do that now, without asking the storage. Raises nothing: what fails is for the first call to report."""
        ...


@runtime_checkable
class SupportsTouch(Protocol):
    """A store that can note that a blob was used, in the ``mtime`` that ``keys`` lists."""

    def touch(self, key: str) -> None:
        """Make the blob's ``mtime`` now and change nothing else. An absent key is success, and stays absent."""
        ...


@runtime_checkable
class SupportsSweep(Protocol):
    """A store that keeps things of its own beside the blobs: what writers left that died, and bad blobs."""

    def sweep(self, quarantine_s_max: float) -> int:
        """Remove what dead writers left and what has been in quarantine for so long; 0: all of it. No blob.

        Returns:
            Bytes of what is still there.
        """
        ...


@runtime_checkable
class NamesBlocks(Protocol):
    """A store whose blocks have other names than ``FileMapper``'s."""

    def is_block(self, key: str) -> bool:
        """Whether a listed name is a block's, which a collector may remove."""
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
    # Cheap exact test for the usual key (ASCII and short), byte lengths only where they can matter.
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
    for part in parts:  # twice as fast as a sum of a generator, and asked three times a block
        size += part.nbytes
    return size


# ---- one by one where a store lacks the extra ------------------------------------------------------------------------


def sizes_of(
    store: Store, keys: Sequence[str], *, kept: type[StoreError] = StoreError
) -> Iterator[int | Exception | None]:
    """As ``SupportsSizeMany.size_many``.

    Args:
        kept: asked one by one, the errors that do not end the asking.
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
    """Quarantine a bad blob; delete it where the store cannot."""
    if isinstance(store, SupportsQuarantine):
        store.quarantine(key)
    else:
        store.delete(key)
