"""BlockReader: reads a stored block and checks that it is the block its name says. For tools, which have no engine.

The expected identity comes from the block's name (hash, group, rank) and from its namespace's ``config.json``
(fingerprint).

A protected block's checksum covers the stored bytes, so corruption is found without a key. Only a reader with a key can
verify who wrote the block.
"""

from __future__ import annotations

from typing import Any

from ..blocks.file_mapper import CONFIG_FILE_NAME, BlockName, fingerprint_of, namespace_of
from ..blocks.namespace import CONFIG_BYTES_MAX, parse_json
from ..blocks.seal import PAYLOAD_MULTIPLE_BYTES, TRAILER_BYTES, Authentication, Seal
from ..errors import BlobCorruptError, BlobNotFoundError, SealError, SealReason
from ..store import KeyInfo, Store, read_blob

NO_IDENTITY = "no_identity"  # the namespace's config.json is missing or belongs to another namespace
_AUTHENTICATIONS: dict[str, int] = {"aes-gcm": Authentication.AES_256_GCM}


class BlockReader:
    """Reads blocks into its own buffer. For one thread.

    Args:

    Attributes:
        data: the last block read, payload and trailer as stored; valid until the next read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._identities: dict[str, dict[str, Any] | None] = {}
        self._buffer = bytearray()
        self.data = memoryview(b"")

    def read(self, info: KeyInfo, name: BlockName) -> tuple[str | None, bool]:
        """Read a block and check its seal.

        Returns:
            Why the block is bad (None if it is good), and whether only another reader can judge it.

        Raises:
            BlobNotFoundError: the block was removed since it was listed.
            StoreError: the block cannot be read.
        """
        verdict = self._judge(info, name)
        if verdict[0] == SealReason.SIZE and (size := self._store.size(info.key)) != info.size:
            if size is None:
                raise BlobNotFoundError("removed since it was listed", key=info.key)
            verdict = self._judge(info._replace(size=size), name)  # replaced by a good block since it was listed
        return verdict

    def seal_for(self, name: BlockName) -> Seal:
        """The seal that checks a block, here or in another store.

        Raises:
            StoreError: the namespace's ``config.json`` cannot be read.
        """
        fields = self._identity_of(name.namespace)
        if fields is None:
            return Seal(bytes(32), name.rank)
        if "protection" in fields:
            return _KeylessSeal(fingerprint_of(fields), name.rank, protection=fields["protection"])
        return Seal(fingerprint_of(fields), name.rank)

    def _identity_of(self, namespace: str) -> dict[str, Any] | None:
        if namespace not in self._identities:
            self._identities[namespace] = read_identity(self._store, namespace)
        return self._identities[namespace]

    def _judge(self, info: KeyInfo, name: BlockName) -> tuple[str | None, bool]:
        has_identity = self._identity_of(name.namespace) is not None
        if info.size <= TRAILER_BYTES or info.size % PAYLOAD_MULTIPLE_BYTES or len(name.digits) % 2:
            return SealReason.SIZE if has_identity else NO_IDENTITY, False
        if len(self._buffer) < info.size and not self._grow(info.size):
            return SealReason.SIZE, True
        self.data = memoryview(self._buffer)[: info.size]
        payload, trailer = self.data[:-TRAILER_BYTES], self.data[-TRAILER_BYTES:]
        failure: SealError | BlobCorruptError | None = None
        for _ in range(2):  # a second attempt, in case the block was replaced during the read
            try:
                self._store.get_into(info.key, [payload, trailer])
                self.seal_for(name).verify(name.offload_key, payload, trailer)
                return None, False
            except (SealError, BlobCorruptError) as e:
                failure = e
        if isinstance(failure, SealError) and failure.foreign:
            return failure.reason, True
        if not has_identity:
            return NO_IDENTITY, False
        return failure.reason if isinstance(failure, SealError) else SealReason.SIZE, False

    def _grow(self, size: int) -> bool:
        """Grow the buffer. False: out of memory, so a larger machine must judge the blob (any size is possible)."""
        try:
            self._buffer = bytearray(size)
        except (MemoryError, OverflowError):
            return False
        return True


class _KeylessSeal(Seal):
    """Checks a protected block as far as possible without its key. Never use it to load blocks."""

    def __init__(self, *arguments: Any, protection: object, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._authentication = _AUTHENTICATIONS.get(str(protection), -1)  # -1: from another version

    def _other_means(self, checksum: int, authentication: int) -> SealError:
        if authentication == Authentication.NONE:
            return SealError(SealReason.AUTHENTICATION, "it is not authenticated, unlike its namespace's blocks")
        return super()._other_means(checksum, authentication)


def read_identity(store: Store, namespace: str) -> dict[str, Any] | None:
    """Read a namespace's fields; None if its ``config.json`` is missing, damaged, or another namespace's.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        fields = parse_json(read_blob(store, f"{namespace}/{CONFIG_FILE_NAME}", CONFIG_BYTES_MAX) or b"")
    except (ValueError, BlobCorruptError):
        return None
    # vLLM's own fs tier names its folders alike, and writes a config.json with other fields.
    if not (isinstance(fields, dict) and isinstance(fields.get("model_name"), str) and "hash_block_size" in fields):
        return None
    return fields if namespace_of(fields) == namespace else None
