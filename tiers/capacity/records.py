"""Records: small JSON blobs through which the processes that share a root know of each other.

They are ordinary blobs below ``_kvtiers/``, so every store can keep them. No block's name starts like that, because a
namespace's folder name ends in a digest. A record is replaced as a whole (``put(overwrite=True)``), so a reader sees
either the old record or the new one.

A record is a header line and a JSON object, padded with spaces::

    kvtiers-record 1 <checksum> <key id> <tag>\n{...}

- The checksum (xxh3_128) covers the record's name and everything after the checksum. A corrupt record, and a record
  stored under another record's name, count as missing.
- The tag (HMAC-SHA256) covers the record's name and everything after the tag. It is present if the tier has keys
  (``encrypt``). A reader with keys rejects records without a valid tag. Without keys both fields are ``-``.

An attacker who kept an older record can put it back: a tag proves who wrote a record, not when.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ..blocks.keyring import KeyRing
from ..blocks.namespace import parse_json
from ..errors import BlobCorruptError, StorePermissionError, StoreUnavailableError
from ..store import Store, read_blob

OWN_PREFIX = "_kvtiers/"
RECORD_BYTES = 512  # records are padded to a multiple of this, so that most readers guess the size and read once
RECORD_BYTES_MAX = 1 << 20
#: Errors of a single record (a bad sector, another account's object) that must not block all other writers.
UNREADABLE = (StorePermissionError, StoreUnavailableError)
MAGIC = b"kvtiers-record 1 "
HEADER_BYTES = len(MAGIC) + 32 + len(b" - -\n")
KEYED_HEADER_BYTES = len(MAGIC) + 32 + len(b" %08x " % 0) + 64 + len(b"\n")


class RecordKeys:
    """Keys to authenticate records with. Immutable. Only ``to_json`` reveals the keys.

    Args:
        keys: ID -> 32 bytes; the first key is used for new records, all keys for reading.
    """

    __slots__ = ("_keys", "current_id")

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        self._keys = dict(keys)
        self.current_id = next(iter(keys))

    @classmethod
    def of(cls, ring: KeyRing) -> RecordKeys:
        """Derive the keys for records from a ring. They are the same for all roots, because roots have no names."""
        return cls(ring.derive(b"records", b""))

    def to_json(self) -> list[tuple[int, str]]:
        """The keys, to hand them to a child process."""
        return [(number, key.hex()) for number, key in self._keys.items()]

    @classmethod
    def from_json(cls, keys: Sequence[tuple[int, str]]) -> RecordKeys:
        """Parse the output of ``to_json``."""
        return cls({number: bytes.fromhex(key) for number, key in keys})

    def header(self, name: str, text: bytes) -> bytes:
        """Key ID and tag for a new record."""
        return self._header(name, text, self.current_id)

    def accepts(self, name: str, text: bytes, header: bytes) -> bool:
        """Whether somebody with one of the keys wrote the record."""
        try:
            return hmac.compare_digest(self._header(name, text, int(header.partition(b" ")[0], 16)), header)
        except (KeyError, ValueError):
            return False  # an unknown key, or no key ID

    def _header(self, name: str, text: bytes, key_id: int) -> bytes:
        tag = hmac.digest(self._keys[key_id], name.encode() + b"\0" + text, "sha256")
        return b"%08x %s" % (key_id, tag.hex().encode())


def put_record(
    store: Store, key: str, content: dict[str, Any], *, overwrite: bool = True, keys: RecordKeys | None = None
) -> None:
    """Publish a record.

    Args:
        keys: keys to authenticate it with.

    Raises:
        StoreError: as ``Store.put``.
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + (HEADER_BYTES if keys is None else KEYED_HEADER_BYTES)) % RECORD_BYTES)
    covered = (b"- -" if keys is None else keys.header(key, text)) + b"\n" + text
    store.put(key, [memoryview(b"%s%s %s" % (MAGIC, _checksum(key, covered), covered))], overwrite=overwrite)


def get_record(store: Store, key: str, *, keys: RecordKeys | None = None) -> dict[str, Any] | None:
    """Read a record's content; None if there is no record, {} if it is invalid.

    Args:
        keys: keys that it must be authenticated with; None: only the checksum is verified.

    Raises:
        StoreError: as ``Store.get_into``.
    """
    try:
        data = read_blob(store, key, RECORD_BYTES_MAX, guess=RECORD_BYTES)
    except BlobCorruptError:  # too large
        return {}
    return None if data is None else _parse(key, data, keys)


def _parse(name: str, data: bytes, keys: RecordKeys | None) -> dict[str, Any]:
    checksum, _, covered = data.removeprefix(MAGIC).partition(b" ")
    header, _, text = covered.partition(b"\n")
    if not data.startswith(MAGIC) or checksum != _checksum(name, covered):
        return {}
    if keys is not None and not keys.accepts(name, text, header):
        return {}
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _checksum(name: str, covered: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(name.encode() + b"\0" + covered).encode()
