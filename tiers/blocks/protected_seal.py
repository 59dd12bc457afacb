"""The seal with keys (the extra ``crypto``): it proves that a block's writer had the key, and encrypts the block.

AES-256-GCM. The payload checksum covers the stored (encrypted) bytes, so that a tool without keys can detect bit rot.
The tag covers the payload and, as associated data, bytes 0..192 of the trailer with zeros in place of that checksum,
which is known only after encryption.

Nonces are 96 random bits, and keys are derived per namespace. Up to 2^32 blocks per key and namespace (4 PiB at 1 MiB
per block) the probability of a repeated nonce is below 2^-32, the bound of NIST SP 800-38D. The tag is compared last,
after all cheaper checks. A block without a tag is never accepted. OpenSSL does the work, without the GIL.

A block whose key id is not in the ring is foreign: it is a miss, and no store replaces it. During a rotation, engines
get the new key one after the other. If foreign blocks were replaced, engines with the old and with the new key would
overwrite each other's blocks, and an attacker could have good blocks replaced. The price: if a key is lost, its blocks
stay misses until an operator removes them. So engines (once), ``check``, ``du`` and ``verify`` report unknown keys.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping
from typing import Any

import xxhash

from ..errors import ConfigError, SealError, SealReason
from .keyring import KeyRing, show_key_id
from .keys import OffloadKey
from .seal import (
    CHECK_AT,
    DIGESTS,
    PAYLOAD_CHECKSUM_AT,
    TAG_AT,
    Authentication,
    RunningChecksum,
    Seal,
)

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import GCM
except ImportError as e:
    raise ConfigError("needs cryptography: pip install '.[crypto]' in kvtiers' checkout", field="encrypt") from e

NONCE_BYTES = 12
TAG_BYTES = 16
_CHECKSUM = slice(PAYLOAD_CHECKSUM_AT, PAYLOAD_CHECKSUM_AT + 16)
_PROOF = struct.Struct("<I12s16s")
_PROOF_AT = 176
_CHECK = struct.Struct("<Q")

Trailer = bytes | bytearray | memoryview


class GcmSeal(Seal):
    """Encrypts and authenticates blocks. Immutable; any thread may use it.

    A slot cannot be encrypted in place, because the engine may load from it at the same time. So each storing thread
    has a buffer of one block's size. A loaded block is decrypted in its slot, because nothing reads the slot before the
    load has succeeded.

    Args:
        fingerprint, rank, options: see ``Seal``.
        keys: the ring, or the keys derived from it for this namespace: id -> 32 bytes; the first key seals new blocks.
            Only ``to_json`` reveals them.
    """

    _authentication = Authentication.AES_256_GCM
    stores_as_is = False

    def __init__(self, fingerprint: bytes, rank: int, *, keys: KeyRing | Mapping[int, bytes], **options: Any) -> None:
        super().__init__(fingerprint, rank, **options)
        if isinstance(keys, KeyRing):
            keys = keys.derive(b"AES-256-GCM", fingerprint)
        self._ciphers = {number: AES256(key) for number, key in keys.items()}
        self._key_id = next(iter(keys))

    def to_json(self) -> dict[str, Any]:
        keys = [(number, cipher.key.hex()) for number, cipher in self._ciphers.items()]
        return super().to_json() | {"keys": keys}

    def check_trailer(self, key: OffloadKey, trailer: Trailer, payload_length: int) -> None:
        super().check_trailer(key, trailer, payload_length)
        self._proof(trailer)

    def trailer(self, key: OffloadKey, payload: memoryview, checksum: RunningChecksum | None = None) -> bytes:  # noqa: ARG002
        """Always raises TypeError, because the trailer depends on the encrypted payload: use ``seal_parts``."""
        raise TypeError("an encrypted block's trailer belongs to its encrypted payload: use seal_parts")

    def seal_parts(self, key: OffloadKey, payload: memoryview) -> tuple[memoryview, memoryview]:
        """See ``Seal``.

        Raises:
            SealError: the payload changed during encryption. (Without encryption, the load detects the change, because
                both the checksum and the written bytes come from the slot. Here both come from the encrypted copy.)
        """
        trailer = bytearray(super().trailer(key, payload))
        checksum_before = trailer[_CHECKSUM]
        nonce = os.urandom(NONCE_BYTES)
        trailer[TAG_AT - NONCE_BYTES : TAG_AT] = nonce
        stored = _buffer(payload.nbytes)
        cipher = self._cipher(self._key_id, nonce).encryptor()
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
        """Verify the stored bytes and decrypt them in place. After an error their content is undefined."""
        super().verify(key, payload, trailer, seen)
        self._decrypt(payload, trailer, payload)

    def _cipher(self, key_id: int, nonce: bytes) -> Cipher[GCM]:
        return Cipher(self._ciphers[key_id], GCM(nonce))

    def _proof(self, trailer: Trailer) -> tuple[int, bytes, bytes]:
        """Read key id, nonce and tag from a trailer that has passed the other checks."""
        key_id, nonce, tag = _PROOF.unpack_from(trailer, _PROOF_AT)
        if key_id not in self._ciphers:
            known = ", ".join(map(show_key_id, self._ciphers))
            text = f"its key {show_key_id(key_id)} is not among this engine's keys ({known})"
            raise SealError(SealReason.UNKNOWN_KEY, text)
        return key_id, nonce, tag

    def _other_means(self, checksum: int, authentication: int) -> SealError:
        if authentication == Authentication.NONE:
            return SealError(SealReason.AUTHENTICATION, "it is not authenticated, which is required here")
        return super()._other_means(checksum, authentication)

    def _decrypt(self, stored: memoryview, trailer: Trailer, payload: memoryview) -> None:
        key_id, nonce, tag = self._proof(trailer)
        cipher = self._cipher(key_id, nonce).decryptor()
        cipher.authenticate_additional_data(_associated(trailer))
        cipher.update_into(stored, payload)
        try:
            cipher.finalize_with_tag(tag)
        except InvalidTag:
            text = f"its tag does not match key {show_key_id(key_id)}"
            raise SealError(SealReason.AUTHENTICATION, text) from None


# Shared by all seals, because one thread may store with several seals in turn.
_of_thread = threading.local()


def _buffer(length: int) -> memoryview:
    """The calling thread's buffer, of the block size it used last: each storing thread keeps one block of memory."""
    buffer: memoryview | None = getattr(_of_thread, "buffer", None)
    if buffer is None or buffer.nbytes != length:
        buffer = _of_thread.buffer = memoryview(bytearray(length))
    return buffer


def _associated(trailer: Trailer) -> bytearray:
    data = bytearray(memoryview(trailer)[:TAG_AT])
    data[_CHECKSUM] = bytes(16)
    return data


def _checked(trailer: bytearray) -> bytes:
    """The trailer with the checksum of its fields filled in."""
    _CHECK.pack_into(trailer, CHECK_AT, xxhash.xxh3_64_intdigest(memoryview(trailer)[:CHECK_AT]))
    return bytes(trailer)
