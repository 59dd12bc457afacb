"""Seals with a key (the extra ``crypto``): blocks that only somebody with the key can have written.

``GmacSeal``: the tag is AES-256-GMAC over bytes 0..192 of the trailer (all but the tag and what follows) and the
payload.

``GcmSeal``: the payload is stored encrypted by AES-256-GCM. The payload checksum is that of the stored bytes, so that a
tool without keys can tell rot from good; the tag covers the payload and, as associated data, bytes 0..192 of the
trailer with zeros for that checksum, which is known only once all is encrypted.

Nonces are 96 random bits, and keys are derived by namespace: up to 2^32 blocks a key and namespace (at 1 MiB a block
4 PiB) the chance of one nonce twice is below 2^-32, the bound of NIST SP 800-38D. The tag is compared last, after all
that is cheaper. A block without a tag is never taken; a block with a key id that the ring lacks is foreign: a miss that
is left alone.

OpenSSL does the work, without the GIL.
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import (
    CHECK_AT,
    DIGESTS,
    PAYLOAD_CHECKSUM_AT,
    TAG_AT,
    Authentication,
    Checksum,
    RunningChecksum,
    Seal,
)
from kvtiers.tiers.errors import ConfigError, SealError, SealReason

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import GCM
except ImportError as e:
    raise ConfigError("needs cryptography: pip install 'kvtiers[crypto]'", field="auth or encrypt") from e

NONCE_BYTES = 12
TAG_BYTES = 16
_CHECKSUM = slice(PAYLOAD_CHECKSUM_AT, PAYLOAD_CHECKSUM_AT + 16)
_PROOF = struct.Struct("<I12s16s")
_PROOF_AT = 176
_CHECK = struct.Struct("<Q")

Trailer = bytes | bytearray | memoryview


class _Proof(NamedTuple):
    key_id: int
    nonce: bytes
    tag: bytes


class Ciphers:
    """The keys of one purpose and namespace, by id; the first is for new blocks. Shows them nowhere but to ``to_json``.

    Args:
        keys: id -> 32 bytes, as ``KeyRing.derive`` gives them.
    """

    __slots__ = ("_by_id", "current_id")

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        self._by_id = {number: AES256(key) for number, key in keys.items()}
        self.current_id = next(iter(keys))

    def __contains__(self, key_id: int) -> bool:
        return key_id in self._by_id

    def cipher(self, key_id: int, nonce: bytes) -> Cipher[GCM]:
        """AES-256-GCM with a key."""
        return Cipher(self._by_id[key_id], GCM(nonce))

    def to_json(self) -> list[tuple[int, str]]:
        """The keys, for a worker process of this one."""
        return [(number, cipher.key.hex()) for number, cipher in self._by_id.items()]


def ciphers_from_json(keys: Sequence[tuple[int, str]]) -> Ciphers:
    """The other end of ``Ciphers.to_json``."""
    return Ciphers({number: bytes.fromhex(key) for number, key in keys})


class _KeyedSeal(Seal):
    """What both kinds share. Any thread; nothing changes.

    Args:
        fingerprint, rank, options: see ``Seal``.
        keys: the ring.
        ciphers: instead of ``keys``: what was derived from a ring for this purpose and namespace.
    """

    _purpose: bytes

    def __init__(
        self,
        fingerprint: bytes,
        rank: int,
        *,
        keys: KeyRing | None = None,
        ciphers: Ciphers | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fingerprint, rank, **options)
        if ciphers is None:
            assert keys is not None
            ciphers = Ciphers(keys.derive(self._purpose, fingerprint))
        self._ciphers = ciphers
        self._key_id = ciphers.current_id

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"authentication": int(self._authentication), "ciphers": self._ciphers.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Seal:
        return cls(
            bytes.fromhex(fields["fingerprint"]),
            fields["rank"],
            checksum=Checksum(fields["checksum"]),
            writer_id=bytes.fromhex(fields["writer_id"]),
            ciphers=ciphers_from_json(fields["ciphers"]),
            shares_folder=fields["shares_folder"],
        )

    def check_trailer(self, key: OffloadKey, trailer: Trailer, payload_length: int) -> None:
        super().check_trailer(key, trailer, payload_length)
        self._proof(trailer)

    def _proof(self, trailer: Trailer) -> _Proof:
        """What proves a block whose trailer is sound so far."""
        proof = _Proof(*_PROOF.unpack_from(trailer, _PROOF_AT))
        if proof.key_id not in self._ciphers:
            raise SealError(SealReason.UNSUPPORTED, f"its key {proof.key_id:08x} is not in the ring")
        return proof

    def _other_means(self, checksum: int, authentication: int) -> SealError:
        if authentication == Authentication.NONE:
            return SealError(SealReason.AUTHENTICATION, "it is not authenticated, which is required here")
        return super()._other_means(checksum, authentication)


class GmacSeal(_KeyedSeal):
    """Authenticated blocks. The payload is stored as it is."""

    _authentication = Authentication.AES_256_GMAC
    _purpose = b"AES-256-GMAC"

    def trailer(self, key: OffloadKey, payload: memoryview, checksum: RunningChecksum | None = None) -> bytes:
        trailer = bytearray(super().trailer(key, payload, checksum))
        nonce = os.urandom(NONCE_BYTES)
        trailer[TAG_AT - NONCE_BYTES : TAG_AT] = nonce
        trailer[TAG_AT : TAG_AT + TAG_BYTES] = self._tag(self._key_id, nonce, trailer, payload)
        return _checked(trailer)

    def verify(
        self, key: OffloadKey, payload: memoryview, trailer: Trailer, seen: RunningChecksum | None = None
    ) -> None:
        super().verify(key, payload, trailer, seen)
        proof = self._proof(trailer)
        if not hmac.compare_digest(self._tag(proof.key_id, proof.nonce, trailer, payload), proof.tag):
            raise SealError(SealReason.AUTHENTICATION, f"its tag is not that of key {proof.key_id:08x}")

    open_in_place = verify

    def _tag(self, key_id: int, nonce: bytes, trailer: Trailer, payload: memoryview) -> bytes:
        mac = self._ciphers.cipher(key_id, nonce).encryptor()
        mac.authenticate_additional_data(memoryview(trailer)[:TAG_AT])
        mac.authenticate_additional_data(payload)
        mac.finalize()
        return mac.tag


class GcmSeal(_KeyedSeal):
    """Encrypted and authenticated blocks.

    A slot cannot be encrypted where it lies, since the engine may load from it meanwhile: each storing thread has one
    buffer of a block's size. A loaded block is decrypted in its slot, which nobody reads before the load has succeeded.
    """

    _authentication = Authentication.AES_256_GCM
    _purpose = b"AES-256-GCM"
    stores_as_is = False

    def trailer(self, key: OffloadKey, payload: memoryview, checksum: RunningChecksum | None = None) -> bytes:  # noqa: ARG002
        """Not to be had for a payload that is stored as it is: use ``seal_parts``."""
        raise TypeError("an encrypted block's trailer belongs to its encrypted payload: use seal_parts")

    def seal_parts(self, key: OffloadKey, payload: memoryview) -> tuple[memoryview, memoryview]:
        """See ``Seal``.

        Raises:
            SealError: the payload changed meanwhile. (Without encryption that is found out on load: the checksum is of
                the slot, and the slot is what is written. Here both are of the copy.)
        """
        trailer = bytearray(super().trailer(key, payload))
        checksum_before = trailer[_CHECKSUM]
        nonce = os.urandom(NONCE_BYTES)
        trailer[TAG_AT - NONCE_BYTES : TAG_AT] = nonce
        stored = _buffer(payload.nbytes)
        cipher = self._ciphers.cipher(self._key_id, nonce).encryptor()
        cipher.authenticate_additional_data(_associated(trailer))
        cipher.update_into(payload, stored)
        cipher.finalize()
        digest = DIGESTS[self._checksum]
        if digest(payload) != checksum_before:
            raise SealError(SealReason.PAYLOAD_CHECKSUM, "the payload changed while it was encrypted")
        trailer[_CHECKSUM] = digest(stored)
        trailer[TAG_AT : TAG_AT + TAG_BYTES] = cipher.tag
        return stored, memoryview(_checked(trailer))

    def verify(
        self, key: OffloadKey, payload: memoryview, trailer: Trailer, seen: RunningChecksum | None = None
    ) -> None:
        super().verify(key, payload, trailer, seen)
        self._decrypt(payload, trailer, _buffer(payload.nbytes))

    def open_in_place(
        self, key: OffloadKey, payload: memoryview, trailer: Trailer, seen: RunningChecksum | None = None
    ) -> None:
        """Verify stored bytes and decrypt them where they lie. After an error their content is undefined."""
        super().verify(key, payload, trailer, seen)
        self._decrypt(payload, trailer, payload)

    def _decrypt(self, stored: memoryview, trailer: Trailer, payload: memoryview) -> None:
        proof = self._proof(trailer)
        cipher = self._ciphers.cipher(proof.key_id, proof.nonce).decryptor()
        cipher.authenticate_additional_data(_associated(trailer))
        cipher.update_into(stored, payload)
        try:
            cipher.finalize_with_tag(proof.tag)
        except InvalidTag:
            raise SealError(SealReason.AUTHENTICATION, f"its tag is not that of key {proof.key_id:08x}") from None


# Not a seal's own: a thread may store by several, one after the other.
_of_thread = threading.local()


def _buffer(length: int) -> memoryview:
    """The calling thread's, of the block size it met last: one block of memory for each thread that stores."""
    buffer: memoryview | None = getattr(_of_thread, "buffer", None)
    if buffer is None or buffer.nbytes != length:
        buffer = _of_thread.buffer = memoryview(bytearray(length))
    return buffer


def _associated(trailer: Trailer) -> bytearray:
    data = bytearray(memoryview(trailer)[:TAG_AT])
    data[_CHECKSUM] = bytes(16)
    return data


def _checked(trailer: bytearray) -> bytes:
    """The trailer with the checksum of its fields made right."""
    _CHECK.pack_into(trailer, CHECK_AT, xxhash.xxh3_64_intdigest(memoryview(trailer)[:CHECK_AT]))
    return bytes(trailer)
