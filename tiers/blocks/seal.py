"""The block seal: a 4,096-byte trailer by which a stored block proves its identity and integrity. Does no I/O.

Format ``sealed-1``: the payload, then one trailer; the same bytes in every tier. The payload starts at offset 0 and
both lengths are multiples of 4,096, so that O_DIRECT stays possible. Little-endian::

    0    8  magic "KVSEAL1\\0"          66   64  block hash, zero padded
    8    2  version = 1                136   16  payload checksum
    10   2  trailer length = 4096      152   16  writer id
    12   2  checksum algorithm         168    8  written at, Unix nanoseconds
    14   2  authentication             176    4  authentication key id
    16   8  payload length             180   12  nonce
    24  32  namespace fingerprint      192   16  authentication tag
    56   4  KV cache group             208    8  xxh3_64 of bytes 0..208
    60   4  rank                       216    …  zero
    64   2  key length

(130..136 is padding. Authentication: 0 none, 2 AES-256-GCM, see ``protected_seal``; 1 was AES-256-GMAC.)

Every version keeps the magic, the version and the checksum at offset 208 in place. A reader checks this checksum before
it trusts any other field. Only a block with an intact trailer can belong to another version, and only such a block is
left alone.

Most wrong bytes reported for KV caches are not bit rot but mistaken identity: same path, same size, different meaning.
So a block carries its identity, and a reader compares the identity before it looks at the payload.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import xxhash

from ..errors import SealError, SealReason
from .keys import OffloadKey, get_offload_block_hash, get_offload_group_idx

MAGIC = b"KVSEAL1\0"
VERSION = 1
TRAILER_BYTES = 4096
BLOCK_HASH_BYTES_MAX = 64
PAYLOAD_MULTIPLE_BYTES = 4096

_HEAD = struct.Struct("<8sHHHHQ32sIIH64s6x16s16sQI12s16s")
_CHECK = struct.Struct("<Q")
_ZEROS = bytes(TRAILER_BYTES - _HEAD.size - _CHECK.size)
PAYLOAD_CHECKSUM_AT, TAG_AT, CHECK_AT = 136, 192, _HEAD.size
assert CHECK_AT == 208
TRAILER_FIELDS_BYTES = _HEAD.size + _CHECK.size  # the rest is zero


class Checksum(IntEnum):
    """Payload checksum algorithms of the format. This version neither writes nor reads CRC64NVME."""

    XXH3_64 = 1
    XXH3_128 = 2
    CRC64NVME = 3


class Authentication(IntEnum):
    """How a block proves that its writer had the key."""

    NONE = 0
    # 1 is reserved: it was AES-256-GMAC, and such blocks are still stored.
    AES_256_GCM = 2  # also encrypts the payload


#: Payload checksum functions. Each returns the field's 16 bytes, zero padded.
DIGESTS: dict[int, Callable[[memoryview], bytes]] = {
    # Both release the GIL (measured on xxhash 4.1).
    Checksum.XXH3_64: lambda payload: xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + bytes(8),
    Checksum.XXH3_128: lambda payload: xxhash.xxh3_128_intdigest(payload).to_bytes(16, "little"),
}


class RunningChecksum:
    """A payload's xxh3_64, which new blocks carry, computed piece by piece (see ``tiers.store.SupportsPieces``).

    Args:
        payload_length: bytes of the payload; the bytes after it are ignored.
    """

    def __init__(self, payload_length: int) -> None:
        self._payload_length = payload_length
        self._seen = 0
        self._hasher = xxhash.xxh3_64()

    def look(self, offset: int, piece: memoryview) -> None:
        """Add the next piece. Offset 0 starts over."""
        if offset == 0 and self._seen:
            self._seen = 0
            self._hasher.reset()
        if offset < self._payload_length:
            assert offset == self._seen, "pieces come in order"
            self._hasher.update(piece)
            self._seen += piece.nbytes

    def digest(self, algorithm: int, payload: memoryview) -> bytes:
        """The field's 16 bytes. If the algorithm differs or not all pieces were seen, computed from ``payload``."""
        if algorithm != Checksum.XXH3_64 or self._seen != payload.nbytes:
            return DIGESTS[algorithm](payload)
        # Little-endian, as in DIGESTS; xxhash's own digest() is big-endian.
        return bytes(self._hasher.digest()[::-1]).ljust(16, b"\0")


class Seal:
    """Creates and checks the trailers of one namespace and rank. Immutable; any thread may use it.

    Creates and accepts only unauthenticated blocks; ``protected_seal`` has the seal with keys.

    Args:
        fingerprint: SHA-256 of the namespace's canonical JSON fields, 32 bytes.
        rank: the rank whose bytes the blocks hold.
        writer_id: 16 bytes that identify this writer in its trailers; random by default.
        clock_ns: returns Unix time in nanoseconds.
    """

    #: The payload is stored unchanged, so its trailer can be created while the payload is written.
    stores_as_is = True
    _authentication: int = Authentication.NONE
    _checksum: int = Checksum.XXH3_64  # for new blocks; reading accepts every algorithm in DIGESTS
    _key_id = 0

    def __init__(
        self,
        fingerprint: bytes,
        rank: int,
        *,
        writer_id: bytes | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        writer_id = os.urandom(16) if writer_id is None else writer_id
        if len(fingerprint) != 32 or len(writer_id) != 16:
            raise ValueError("fingerprint must have 32 bytes and writer_id 16")
        self._fingerprint = fingerprint
        self._rank = rank
        self._writer_id = writer_id
        self._clock_ns = clock_ns

    def to_json(self) -> dict[str, Any]:
        """The fields for a child process to create the same trailers: see ``tiers.server.process``.

        For a seal with keys they include the keys.
        """
        return {
            "fingerprint": self._fingerprint.hex(),
            "rank": self._rank,
            "writer_id": self._writer_id.hex(),
        }

    def running_checksum(self, payload: memoryview) -> RunningChecksum:
        """Start the checksum of a payload that is moved in pieces."""
        return RunningChecksum(payload.nbytes)

    def trailer(self, key: OffloadKey, payload: memoryview, checksum: RunningChecksum | None = None) -> bytes:
        """Create the trailer for a payload.

        The checksum is computed over the slot before the write, so a load detects a slot that changed during the write.

        Args:
            payload: C-contiguous, a multiple of 4,096 bytes.
            checksum: a checksum that has seen each piece before the piece was written.

        Raises:
            ValueError: the length of the payload or of the block hash does not fit the format.
        """
        block_hash = get_offload_block_hash(key)
        if payload.nbytes % PAYLOAD_MULTIPLE_BYTES or not payload.nbytes:
            raise ValueError(f"payload has {payload.nbytes} bytes; accepted is a multiple of {PAYLOAD_MULTIPLE_BYTES}")
        if not 1 <= len(block_hash) <= BLOCK_HASH_BYTES_MAX:
            raise ValueError(f"block hash has {len(block_hash)} bytes; accepted are 1..{BLOCK_HASH_BYTES_MAX}")
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            TRAILER_BYTES,
            self._checksum,
            self._authentication,
            payload.nbytes,
            self._fingerprint,
            get_offload_group_idx(key),
            self._rank,
            len(block_hash),
            block_hash,
            _digest(self._checksum, payload, checksum),
            self._writer_id,
            self._clock_ns(),
            self._key_id,
            b"",
            b"",
        )
        return b"".join((head, _CHECK.pack(xxhash.xxh3_64_intdigest(head)), _ZEROS))

    def seal_parts(self, key: OffloadKey, payload: memoryview) -> tuple[memoryview, memoryview]:
        """The bytes to store for a payload: the payload in its stored form, and the trailer. Raises like ``trailer``.

        If the stored form is not the payload itself, it is in a buffer that the calling thread's next call reuses.
        """
        return payload, memoryview(self.trailer(key, payload))

    def check_trailer(self, key: OffloadKey, trailer: bytes | bytearray | memoryview, payload_length: int) -> None:
        """Check everything in a trailer except the payload checksum.

        Raises:
            SealError: the first check that failed, in the format's order.
        """
        self._check(key, trailer, payload_length)

    def verify(
        self,
        key: OffloadKey,
        payload: memoryview,
        trailer: bytes | bytearray | memoryview,
        seen: RunningChecksum | None = None,
    ) -> None:
        """Check that payload and trailer are the block ``key`` of this namespace and rank, complete and unchanged.

        Args:
            seen: a checksum that has seen each piece of the payload when the piece was read.

        Raises:
            SealError: the first check that failed, in the format's order.
        """
        checksum, expected = self._check(key, trailer, payload.nbytes)
        if _digest(checksum, payload, seen) != expected:
            raise SealError(SealReason.PAYLOAD_CHECKSUM, f"{payload.nbytes} payload bytes do not match their checksum")

    #: ``verify``, then convert the stored bytes into the payload, in place. Here they already are the payload.
    open_in_place = verify

    def _check(
        self, key: OffloadKey, trailer: bytes | bytearray | memoryview, payload_length: int
    ) -> tuple[int, bytes]:
        trailer = bytes(trailer)  # one small copy, because memoryviews are compared element by element
        if len(trailer) != TRAILER_BYTES:
            raise SealError(SealReason.SIZE, f"the trailer has {len(trailer)} bytes, not {TRAILER_BYTES}")
        (magic, version, trailer_length, checksum, authentication, length, fingerprint, group, rank, hash_length,
         block_hash, expected, _, _, _, _, _) = _HEAD.unpack_from(trailer)  # fmt: skip
        if magic != MAGIC:
            raise SealError(SealReason.MAGIC, f"the trailer starts with {magic!r}")
        # Checked before any field is trusted: a flipped bit must not look like a newer version, which is never healed.
        if not _is_sound(trailer):
            raise SealError(SealReason.TRAILER_CHECKSUM, "the trailer does not match its checksum")
        if version != VERSION:
            raise SealError(SealReason.VERSION, f"version {version}, but this reader supports version {VERSION}")
        if trailer[TRAILER_FIELDS_BYTES:] != _ZEROS:
            raise SealError(SealReason.TRAILER_CHECKSUM, "bytes after the trailer's fields are not zero")
        if trailer_length != TRAILER_BYTES or length != payload_length:
            raise SealError(
                SealReason.LENGTHS,
                f"the trailer says {length}+{trailer_length} bytes, stored are {payload_length}+{TRAILER_BYTES}",
            )
        if fingerprint != self._fingerprint:
            raise SealError(SealReason.FINGERPRINT, f"belongs to namespace {fingerprint.hex()[:12]}…")
        wanted = get_offload_block_hash(key)
        if hash_length != len(wanted) or block_hash[:hash_length] != wanted:
            raise SealError(SealReason.KEY, f"is block {block_hash[:hash_length].hex()}")
        if group != get_offload_group_idx(key):
            raise SealError(SealReason.GROUP, f"belongs to group {group}")
        if rank != self._rank:
            raise SealError(SealReason.RANK, f"belongs to rank {rank}, not {self._rank}")
        if checksum not in DIGESTS or authentication != self._authentication:
            raise self._other_means(checksum, authentication)
        return checksum, expected

    def _other_means(self, checksum: int, authentication: int) -> SealError:
        """The error for an intact block with an unsupported checksum or authentication: a miss, but never removed."""
        return SealError(SealReason.UNSUPPORTED, f"checksum {checksum}, authentication {authentication}")


def _digest(algorithm: int, payload: memoryview, seen: RunningChecksum | None) -> bytes:
    return DIGESTS[algorithm](payload) if seen is None else seen.digest(algorithm, payload)


def _is_sound(trailer: bytes | bytearray | memoryview) -> bool:
    """Whether the fields of a trailer match their checksum."""
    return bool(_CHECK.unpack_from(trailer, CHECK_AT)[0] == xxhash.xxh3_64_intdigest(trailer[:CHECK_AT]))


def describe_trailer(trailer: bytes | bytearray | memoryview) -> dict[str, Any] | None:
    """A trailer's fields, for people; None if it is not a trailer that this version can read. Checks nothing else.

    Returns:
        version, checksum and authentication (names, or numbers if unknown), key_id, payload_bytes, fingerprint, group,
        rank, block_hash, writer_id (hexadecimal), written_at (Unix seconds).
    """
    trailer = bytes(trailer)
    if len(trailer) != TRAILER_BYTES or not trailer.startswith(MAGIC) or not _is_sound(trailer):
        return None
    (_, version, _, checksum, authentication, length, fingerprint, group, rank, hash_length,
     block_hash, _, writer_id, written_at_ns, key_id, _, _) = _HEAD.unpack_from(trailer)  # fmt: skip
    if version != VERSION:
        return None
    return {
        "version": version,
        "checksum": Checksum(checksum).name.lower() if checksum in list(Checksum) else checksum,
        "authentication": Authentication(authentication).name.lower()
        if authentication in list(Authentication)
        else authentication,
        "key_id": key_id,
        "payload_bytes": length,
        "fingerprint": fingerprint.hex(),
        "group": group,
        "rank": rank,
        "block_hash": block_hash[:hash_length].hex(),
        "writer_id": writer_id.hex(),
        "written_at": written_at_ns / 1e9,
    }
