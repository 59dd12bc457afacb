"""Records: small JSON blobs that the processes of a shared root write for each other.

Records are ordinary blobs below ``_kvtiers/``, so every store can keep them. No block's name starts like that, because
a namespace's folder name ends in a digest. A record is replaced as a whole (``put(overwrite=True)``), so a reader sees
either the old record or the new one.

A record is a header line and a JSON object, padded with spaces::

    kvtiers-record 1 <checksum> - -\n{...}

The checksum (xxh3_128) covers the record's name and everything after the checksum. A corrupt record, and a record
stored under another record's name, count as missing. Records are not authenticated, even if blocks
are: a process that can write a record can also fill the root or remove blocks.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from ..blocks.namespace import parse_json
from ..errors import BlobCorruptError, StorePermissionError, StoreUnavailableError
from ..store import Store, read_blob

OWN_PREFIX = "_kvtiers/"
RECORD_BYTES = 512  # records are padded to a multiple of this, so that most readers guess the size and read once
RECORD_BYTES_MAX = 1 << 20
#: Errors of a single record (a bad sector, another account's object) that must not block all other writers.
UNREADABLE = (StorePermissionError, StoreUnavailableError)
MAGIC = b"kvtiers-record 1 "
FIELDS = b"- -\n"  # key ID and tag in earlier versions
HEADER_BYTES = len(MAGIC) + 32 + len(b" " + FIELDS)


def put_record(store: Store, key: str, content: dict[str, Any], *, overwrite: bool = True) -> None:
    """Publish a record.

    Raises:
        StoreError: as ``Store.put``.
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    covered = FIELDS + text + b" " * (-(len(text) + HEADER_BYTES) % RECORD_BYTES)
    store.put(key, [memoryview(b"%s%s %s" % (MAGIC, _checksum(key, covered), covered))], overwrite=overwrite)


def get_record(store: Store, key: str) -> dict[str, Any] | None:
    """Read a record's content; None if there is no record, {} if it is invalid.

    Raises:
        StoreError: as ``Store.get_into``.
    """
    try:
        data = read_blob(store, key, RECORD_BYTES_MAX, guess=RECORD_BYTES)
    except BlobCorruptError:  # too large
        return {}
    return None if data is None else _parse(key, data)


def _parse(name: str, data: bytes) -> dict[str, Any]:
    checksum, _, covered = data.removeprefix(MAGIC).partition(b" ")
    if not data.startswith(MAGIC) or checksum != _checksum(name, covered):
        return {}
    try:
        content = parse_json(covered.partition(b"\n")[2])
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _checksum(name: str, covered: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(name.encode() + b"\0" + covered).encode()
