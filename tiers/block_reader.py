"""BlockReader: a stored block's bytes, and whether it is the block its name says. For tools, which have no engine.

Who a block should be is told by its name (hash, group, rank) and by its namespace's ``config.json`` (fingerprint).
"""

from __future__ import annotations

import hashlib
import json

from tiers.errors import BlobCorruptError, BlobNotFoundError, SealError, SealReason
from tiers.file_mapper import CONFIG_FILE_NAME, DIGEST_HEX_DIGITS
from tiers.inventory import BlockName
from tiers.keys import make_offload_key
from tiers.seal import TRAILER_BYTES, Seal
from tiers.store import KeyInfo, Store

NO_IDENTITY = "no_identity"  # its namespace's config.json is missing or another one's
CONFIG_BYTES_MAX = 1 << 20


class BlockReader:
    """Reads blocks into a buffer of its own. For one thread.

    Attributes:
        data: the last block that was read, payload and trailer as stored; valid until the next.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fingerprints: dict[str, bytes | None] = {}
        self._buffer = bytearray()
        self.data = memoryview(b"")

    def read(self, info: KeyInfo, name: BlockName) -> tuple[str | None, bool]:
        """Read a block and check its seal.

        Returns:
            Why it is bad, None where it is good; and whether only a newer reader can judge.

        Raises:
            BlobNotFoundError: it was removed since it was listed.
            StoreError: it cannot be read.
        """
        if name.namespace not in self._fingerprints:
            self._fingerprints[name.namespace] = read_fingerprint(self._store, name.namespace)
        fingerprint = self._fingerprints[name.namespace]
        if fingerprint is None:
            return NO_IDENTITY, False
        if info.size <= TRAILER_BYTES or len(name.digits) % 2:
            return SealReason.SIZE, False
        seal = Seal(fingerprint, name.rank)
        key = make_offload_key(bytes.fromhex(name.digits), name.group)
        if len(self._buffer) < info.size:
            self._buffer = bytearray(info.size)
        self.data = memoryview(self._buffer)[: info.size]
        payload, trailer = self.data[:-TRAILER_BYTES], self.data[-TRAILER_BYTES:]
        failure: SealError | BlobCorruptError | None = None
        for _ in range(2):  # twice: a block replaced under the reader happens once
            try:
                self._store.get_into(info.key, [payload, trailer])
                seal.verify(key, payload, trailer)
                return None, False
            except (SealError, BlobCorruptError) as e:
                failure = e
        if isinstance(failure, SealError):
            return failure.reason, failure.foreign
        return SealReason.SIZE, False


def read_fingerprint(store: Store, namespace: str) -> bytes | None:
    """SHA-256 of the fields in a namespace's ``config.json``; None where there are none, or those of another one.

    Raises:
        StoreError: they cannot be read.
    """
    data = read_config(store, namespace)
    try:
        fields = json.loads(data or b"")
    except ValueError:
        return None
    fingerprint = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return fingerprint.digest() if namespace.endswith(fingerprint.hexdigest()[:DIGEST_HEX_DIGITS]) else None


def read_config(store: Store, namespace: str) -> bytes | None:
    """A namespace's ``config.json`` as it is stored; None where there is none.

    Raises:
        StoreError: it cannot be read.
    """
    key = f"{namespace}/{CONFIG_FILE_NAME}"
    size = store.size(key)
    if size is None or not 0 < size <= CONFIG_BYTES_MAX:
        return None
    data = bytearray(size)
    try:
        store.get_into(key, [memoryview(data)])
    except (BlobNotFoundError, BlobCorruptError):
        return None
    return bytes(data)
