"""Shared by the two halves of a tier: a server's start parameters, and the frames on its stream socket.

A frame is two lengths (big-endian u32), the connection's tag, a JSON list, raw bytes, and the tag again::

    engine   ["load", number, deadline]            raw: pairs
             ["store", number, deadline, [places of blocks to overwrite]]   raw: pairs
             ["look", number, name prefix]         raw: pairs; slots are ignored. name prefix: of another namespace
             ["open", number]                      creates the store, and opens the namespace
             ["cut", reason]                       drops blocks that have not begun; "" lets them begin again
    server   ["moved", number, batch, said]          said: texts for the log
             ["looked", number, said]   raw: a byte per key, see ``FOUND``
             ["opened", number, capabilities, error]
             ["alive"]                             the server runs; blocks are moving
             ["nearest", namespace]                see ``SecondaryTierManager.nearest``

The tag is random, and only the two ends know it. So bytes that a library writes into the socket cannot be mistaken for
an answer or for a part of an answer. Frames hold no bytes of blocks: these are in the region.

Deadlines are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from . import errors
from .blocks.batches import BATCH_FIELDS, Batch, Pair
from .blocks.file_mapper import FileMapper
from .blocks.keys import OffloadKey
from .blocks.seal import Seal
from .errors import ConfigError, KVTiersError, StoreError

FRAME_BYTES_MAX: Final = 1 << 28  # a larger length does not come from kvtiers
TAG_BYTES: Final = 16
RECEIVE_BYTES: Final = 256 << 10
#: Byte -> whether a key is stored; None: its lookup failed.
FOUND: Final[tuple[bool | None, ...]] = (False, True, None)

_HEAD: Final = struct.Struct(f"!II{TAG_BYTES}s")
_COUNT: Final = struct.Struct("=I")
_KEY_FIELDS: Final = frozenset({"succeeded", "found", "gone", "unreadable", "bad"})
_COUNTERS: Final = frozenset({"outcomes", "errors", "verify_failures"})


@dataclass(frozen=True, slots=True)
class Seats:
    """The numbers of a server's threads, by the work that they take.

    Attributes:
        lookups: take lookups only.
        loads_only: take only loads, and only while all other threads are busy with stores.
        loads_first, stores_first: take loads (stores) first, and the other kind if there are none.
    """

    lookups: int = 1
    loads_only: int = 0
    loads_first: int = 0
    stores_first: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The properties of a tier that both halves know.

    Attributes:
        tier: the tier's name, for logs.
        read_only: write nothing, not even the namespace's fields.
    """

    tier: str
    mapper: FileMapper
    seal: Seal
    read_only: bool = False


# ---- frames ----------------------------------------------------------------------------------------------------------


class StrayBytesError(EOFError):
    """The other side sent bytes that are not a frame. All its later bytes are unusable."""


def _as_plain(value: Any) -> object:
    """Convert a numpy number, which a store may return, to a Python number."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{type(value).__name__} is not JSON serializable") from None


# Created once: json.dumps with these options would create an encoder for each call, and json.loads guesses an encoding.
_to_json = json.JSONEncoder(separators=(",", ":"), default=_as_plain).encode
_from_json = json.JSONDecoder().decode


def pack_frame(tag: bytes, content: Sequence[object], raw: bytes = b"") -> bytes:
    """Encode one frame.

    Raises:
        TypeError, ValueError: ``content`` cannot be encoded as JSON.
    """
    text = _to_json(content).encode()
    return b"".join((_HEAD.pack(len(text), len(raw), tag), text, raw, tag))


class FrameReader:
    """Cuts received bytes into frames.

    Args:
        tag: the tag that each frame must have.
    """

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._received = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[Any, bytes]]:
        """Yield the content and the raw bytes of each frame that is complete now.

        Raises:
            StrayBytesError: the bytes are not such frames.
        """
        buffer = self._received
        buffer += received
        start = 0
        try:
            while len(buffer) - start >= _HEAD.size:
                text_bytes, raw_bytes, tag = _HEAD.unpack_from(buffer, start)
                if tag != self._tag or max(text_bytes, raw_bytes) > FRAME_BYTES_MAX:
                    raise StrayBytesError("the bytes that arrived are not a frame")
                raw_at = start + _HEAD.size + text_bytes
                end = raw_at + raw_bytes
                if len(buffer) < end + TAG_BYTES:
                    return
                if buffer[end : end + TAG_BYTES] != tag:
                    raise StrayBytesError("other bytes arrived in the middle of a frame")
                try:
                    content = _from_json(buffer[start + _HEAD.size : raw_at].decode())
                except (ValueError, RecursionError) as e:
                    raise StrayBytesError(f"a frame is not JSON: {e}") from e
                start = end + TAG_BYTES
                yield content, bytes(buffer[raw_at:end])
        finally:
            del buffer[:start]


# ---- keys and slots --------------------------------------------------------------------------------------------------


def pack_pairs(pairs: Sequence[Pair]) -> bytes:
    """Encode keys and slots as bytes. Encoding 64 pairs as JSON took a tenth as long as moving them."""
    blocks, lengths = [block for _, block in pairs], [len(key) for key, _ in pairs]
    head = struct.pack(f"=I{len(pairs)}I{len(pairs)}H", len(pairs), *blocks, *lengths)
    return b"".join((head, *(key for key, _ in pairs)))


def unpack_pairs(data: bytes) -> list[Pair]:
    """Decode the bytes of ``pack_pairs``."""
    (count,) = _COUNT.unpack_from(data)
    head = struct.Struct(f"={count}I{count}H")
    numbers = head.unpack_from(data, _COUNT.size)
    blocks, lengths = numbers[:count], numbers[count:]
    ends = accumulate(lengths, initial=_COUNT.size + head.size)
    keys = [OffloadKey(data[start:end]) for start, end in pairwise(ends)]
    return list(zip(keys, blocks, strict=True))


# ---- batches ---------------------------------------------------------------------------------------------------------


def encode_batch(batch: Batch, keys: Sequence[OffloadKey]) -> dict[str, Any]:
    """Encode the non-empty fields, with keys as indexes of ``keys``. Without "succeeded", all blocks succeeded."""
    answer = {name: value for name in BATCH_FIELDS if (value := getattr(batch, name))}
    if len(batch.succeeded) == len(keys):
        answer.pop("succeeded", None)
    else:
        answer.setdefault("succeeded", [])
    if answer.keys() & _KEY_FIELDS:
        places = {key: place for place, key in enumerate(keys)}
        for name in answer.keys() & _KEY_FIELDS:
            answer[name] = [places[key] for key in answer[name] if key in places]
    return answer


def decode_batch(answer: dict[str, Any], keys: list[OffloadKey]) -> Batch:
    """The inverse of ``encode_batch``.

    Raises:
        ValueError: the answer is not a Batch.
    """
    batch = Batch()
    try:
        for name, value in answer.items():
            expected = getattr(batch, name)
            if name in _KEY_FIELDS:
                value = [keys[place] for place in value]
            elif name in _COUNTERS:
                value = Counter(value)
            if not isinstance(value, type(expected)):
                raise TypeError(f"{name} is a {type(value).__name__}")
            setattr(batch, name, value)
        if "succeeded" not in answer:
            batch.succeeded = keys
    except (AttributeError, IndexError, TypeError) as e:
        raise ValueError(f"the answer is not a Batch: {e}") from e
    return batch


# ---- errors ----------------------------------------------------------------------------------------------------------


def encode_error(error: BaseException) -> list[str]:
    """Encode an error as ``[class, message, key, field]``. Other exceptions become StoreError, as all stores raise."""
    if not isinstance(error, KVTiersError):
        return ["StoreError", f"{type(error).__name__}: {error}", "", ""]
    # Custom stores may raise their own subclasses, which the engine's half may not know.
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    if isinstance(error, ConfigError):
        field = error.field or ""
        return [name, str(error).removeprefix(f"{field}: "), "", field]
    key = getattr(error, "key", "")
    return [name, str(error).removesuffix(f" (key {key!r})"), key if isinstance(key, str) else repr(key), ""]


def decode_error(encoded: Sequence[str]) -> StoreError | ConfigError:
    """Decode the list of ``encode_error``."""
    name, message, key, field = encoded
    kind = getattr(errors, name)
    error: StoreError | ConfigError
    error = kind(message, field=field) if issubclass(kind, ConfigError) else kind(message, key=key)
    return error
