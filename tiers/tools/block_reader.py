"""BlockReader: a stored block's bytes, and whether it is the block its name says. For tools, which have no engine.

Who a block should be is told by its name (hash, group, rank) and by its namespace's files (fingerprint): its
``config.json``, or in a folder that vLLM named the ``kvtiers-<digest12>.json`` beside it.

A protected block's checksum is that of its stored bytes, so rot is found without a key. Who wrote it is for those to
judge who have one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvtiers.tiers.blocks.file_mapper import (
    CONFIG_FILE_NAME,
    IDENTITY_FILE_PREFIX,
    fingerprint_of,
    identity_file_name,
    namespace_of,
)
from kvtiers.tiers.blocks.namespace import CONFIG_BYTES_MAX, parse_json
from kvtiers.tiers.blocks.seal import PAYLOAD_MULTIPLE_BYTES, TRAILER_BYTES, Authentication, Seal, fingerprint_in
from kvtiers.tiers.errors import BlobCorruptError, BlobNotFoundError, SealError, SealReason
from kvtiers.tiers.store import KeyInfo, Store
from kvtiers.tiers.tools.inventory import BlockName

NO_IDENTITY = "no_identity"  # its namespace's config.json is missing or another one's
_AUTHENTICATIONS: dict[str, int] = {"gmac": Authentication.AES_256_GMAC, "aes-gcm": Authentication.AES_256_GCM}


class BlockReader:
    """Reads blocks into a buffer of its own. For one thread.

    Args:
        takes_unverified: blocks without a seal are good.
        takes_protected: so are protected ones whose checksum is right; else only another reader can judge them.

    Attributes:
        data: the last block that was read, payload and trailer as stored; valid until the next.
    """

    def __init__(self, store: Store, *, takes_unverified: bool = False, takes_protected: bool = True) -> None:
        self._store = store
        self._takes_protected = takes_protected
        self._takes_unverified = takes_unverified
        self._identities: dict[str, dict[bytes, dict[str, Any]]] = {}
        self._shared: set[str] = set()  # namespaces that vLLM named: engines with other fingerprints use the same names
        self._buffer = bytearray()
        self.data = memoryview(b"")

    def read(self, info: KeyInfo, name: BlockName) -> tuple[str | None, bool]:
        """Read a block and check its seal.

        Returns:
            Why it is bad, None where it is good; and whether only another reader can judge.

        Raises:
            BlobNotFoundError: it was removed since it was listed.
            StoreError: it cannot be read.
        """
        verdict = self._judge(info, name)
        if verdict[0] == SealReason.SIZE and (size := self._store.size(info.key)) != info.size:
            if size is None:
                raise BlobNotFoundError("removed since it was listed", key=info.key)
            verdict = self._judge(info._replace(size=size), name)  # healed since it was listed
        return verdict

    def seal_for(self, name: BlockName, trailer: bytes | memoryview) -> Seal:
        """What checks a block that has this trailer, here or in another store: its writer's seal, if it is known.

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
        for _ in range(2):  # twice: a block replaced under the reader happens once
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
        """Whether there is memory for so large a blob. A file may say any size; else a larger machine may judge it."""
        try:
            self._buffer = bytearray(size)
        except (MemoryError, OverflowError):
            return False
        return True


class _KeylessSeal(Seal):
    """Checks what can be checked of a protected block without its key: never to load by."""

    def __init__(self, *arguments: Any, protection: object, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._authentication = _AUTHENTICATIONS.get(str(protection), -1)  # -1: a newer version's

    def _other_means(self, checksum: int, authentication: int) -> SealError:
        if authentication == Authentication.NONE:
            return SealError(SealReason.AUTHENTICATION, "it is not authenticated, as its namespace's blocks are")
        return super()._other_means(checksum, authentication)


def read_identities(store: Store, namespace: str) -> dict[bytes, dict[str, Any]]:
    """Whose blocks a namespace may have: fields by fingerprint. Files that are damaged or another one's are left out.

    Beside ``config.json`` only where folders are shared: elsewhere no engine writes such a file, and who did could say
    that blocks which nothing protects are good.

    Raises:
        StoreError: they cannot be read.
    """
    identities = {}
    fields = _read_fields(store, f"{namespace}/{CONFIG_FILE_NAME}")
    # vLLM's own file in a folder that it named says nothing of who wrote a block.
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
    """A small blob as it is stored; None where there is none, or one that is empty or larger.

    Raises:
        StoreError: it cannot be read.
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
