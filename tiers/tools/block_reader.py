"""BlockReader: reads a stored block and checks that it is the block its name says. For tools, which have no engine.

The expected identity comes from the block's name (hash, group, rank) and from its namespace's files (fingerprint):
``config.json``, or, in a folder that vLLM named, ``kvtiers-<digest12>.json`` next to it.

A protected block's checksum covers the stored bytes, so corruption is found without a key. Only a reader with a key can
verify who wrote the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..blocks.file_mapper import (
    CONFIG_FILE_NAME,
    IDENTITY_FILE_PREFIX,
    fingerprint_of,
    identity_file_name,
    namespace_of,
)
from ..blocks.namespace import CONFIG_BYTES_MAX, parse_json
from ..blocks.seal import PAYLOAD_MULTIPLE_BYTES, TRAILER_BYTES, Authentication, Seal, fingerprint_in
from ..errors import BlobCorruptError, BlobNotFoundError, SealError, SealReason
from ..store import KeyInfo, Store
from .inventory import BlockName

NO_IDENTITY = "no_identity"  # the namespace's config.json is missing or belongs to another namespace
_AUTHENTICATIONS: dict[str, int] = {"gmac": Authentication.AES_256_GMAC, "aes-gcm": Authentication.AES_256_GCM}


class BlockReader:
    """Reads blocks into its own buffer. For one thread.

    Args:
        takes_unverified: accept blocks without a seal.
        takes_protected: accept protected blocks whose checksum is right; else only another reader can judge them.

    Attributes:
        data: the last block read, payload and trailer as stored; valid until the next read.
    """

    def __init__(self, store: Store, *, takes_unverified: bool = False, takes_protected: bool = True) -> None:
        self._store = store
        self._takes_protected = takes_protected
        self._takes_unverified = takes_unverified
        self._identities: dict[str, dict[bytes, dict[str, Any]]] = {}
        self._shared: set[str] = set()  # namespaces named by vLLM: engines with different fingerprints share them
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

    def seal_for(self, name: BlockName, trailer: bytes | memoryview) -> Seal:
        """The seal that checks a block with this trailer, here or in another store: its writer's seal, if known.

        Raises:
            StoreError: the namespace's files cannot be read.
        """
        identities = self._identities_of(name.namespace)
        found = fingerprint_in(trailer)
        wanted = found if found in identities else next(iter(identities), bytes(32))
        return self._seal(wanted, name, identities.get(wanted, {}))

    def _identities_of(self, namespace: str) -> dict[bytes, dict[str, Any]]:
        if namespace not in self._identities:
            identities = self._identities[namespace] = read_identities(self._store, namespace)
            if any(namespace_of(fields) != namespace for fields in identities.values()):
                self._shared.add(namespace)
        return self._identities[namespace]

    def _judge(self, info: KeyInfo, name: BlockName) -> tuple[str | None, bool]:
        identities = self._identities_of(name.namespace)
        if info.size <= TRAILER_BYTES or info.size % PAYLOAD_MULTIPLE_BYTES or len(name.digits) % 2:
            return SealReason.SIZE if identities else NO_IDENTITY, False
        if len(self._buffer) < info.size and not self._grow(info.size):
            return SealReason.SIZE, True
        self.data = memoryview(self._buffer)[: info.size]
        payload, trailer = self.data[:-TRAILER_BYTES], self.data[-TRAILER_BYTES:]
        failure: SealError | BlobCorruptError | None = None
        for _ in range(2):  # a second attempt, in case the block was replaced during the read
            try:
                self._store.get_into(info.key, [payload, trailer])
                self.seal_for(name, trailer).verify(name.offload_key, payload, trailer)
                return None, False
            except (SealError, BlobCorruptError) as e:
                failure = e
        if isinstance(failure, SealError):
            is_vllms = failure.reason is SealReason.UNVERIFIED and self._store.shares_folders
            if failure.foreign or is_vllms:
                return failure.reason, True
        if not identities:
            return NO_IDENTITY, False
        return failure.reason if isinstance(failure, SealError) else SealReason.SIZE, False

    def _seal(self, fingerprint: bytes, name: BlockName, fields: dict[str, Any]) -> Seal:
        make_seal: Callable[..., Seal] = Seal
        if self._takes_protected and "protection" in fields:
            make_seal = partial(_KeylessSeal, protection=fields["protection"])
        return make_seal(
            fingerprint,
            name.rank,
            takes_unverified=self._takes_unverified,
            shares_folder=name.namespace in self._shared,
        )

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
        self._authentication = _AUTHENTICATIONS.get(str(protection), -1)  # -1: from a newer version

    def _other_means(self, checksum: int, authentication: int) -> SealError:
        if authentication == Authentication.NONE:
            return SealError(SealReason.AUTHENTICATION, "it is not authenticated, unlike its namespace's blocks")
        return super()._other_means(checksum, authentication)


def read_identities(store: Store, namespace: str) -> dict[bytes, dict[str, Any]]:
    """Read the identities whose blocks a namespace may hold: fingerprint -> fields.

    Files that are damaged or belong to another namespace are left out. Files other than ``config.json`` are read only
    if the store shares folders: elsewhere no engine writes such files, and an attacker could use one to make
    unprotected blocks pass as good.

    Raises:
        StoreError: the files cannot be read.
    """
    identities = {}
    fields = _read_fields(store, f"{namespace}/{CONFIG_FILE_NAME}")
    # In a folder that vLLM named, config.json is vLLM's own and does not say who wrote a block.
    if fields is not None and namespace_of(fields) == namespace and "hash_block_size" in fields:
        identities[fingerprint_of(fields)] = fields
    if not store.shares_folders:
        return identities
    for info in store.keys(f"{namespace}/{IDENTITY_FILE_PREFIX}"):
        fields = _read_fields(store, info.key)
        if fields is not None and identity_file_name(namespace, fingerprint_of(fields)) == info.key:
            identities[fingerprint_of(fields)] = fields
    return identities


def _read_fields(store: Store, key: str) -> dict[str, Any] | None:
    try:
        fields = parse_json(read_small(store, key) or b"")
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("model_name"), str) else None


def read_small(store: Store, key: str, bytes_max: int = CONFIG_BYTES_MAX) -> bytes | None:
    """Read a small blob as stored; None if it is missing, empty, or larger than ``bytes_max``.

    Raises:
        StoreError: the blob cannot be read.
    """
    size = store.size(key)
    if size is None or not 0 < size <= bytes_max:
        return None
    data = bytearray(size)
    try:
        store.get_into(key, [memoryview(data)])
    except (BlobNotFoundError, BlobCorruptError):
        return None
    return bytes(data)
