"""The small JSON blobs by which the processes that share a root know of each other.

They are ordinary blobs below ``_kvtiers/``, so that every store can keep them; no block's name begins like that, as a
namespace's folder ends in a digest. A record is replaced as a whole (``put(overwrite=True)``), so a reader sees the old
one or the new one.
"""

from __future__ import annotations

import json
from typing import Any

from tiers.errors import BlobCorruptError, BlobNotFoundError, StorePermissionError, StoreUnavailableError
from tiers.json_text import parse_json
from tiers.store import Store

OWN_PREFIX = "_kvtiers/"
#: Where SharedStorageConnector keeps its prefixes beside a tier's blocks, with a bound and a collector of their own.
PREFIXES_FOLDER = "prefixes"
RECORD_BYTES = 512  # records are padded to a multiple, so that most readers guess the size right and ask once
RECORD_BYTES_MAX = 1 << 20
#: A bad sector, or an object that another account has put: nothing that all others must wait for.
UNREADABLE = (StorePermissionError, StoreUnavailableError)
READ_ATTEMPTS_MAX = 8  # a record may be replaced by one of another size between the question and the read


def put_record(store: Store, key: str, content: dict[str, Any], *, overwrite: bool = True) -> None:
    """Publish a record.

    Raises:
        StoreError: as ``Store.put``.
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % RECORD_BYTES)
    store.put(key, [memoryview(text)], overwrite=overwrite)


def get_record(store: Store, key: str) -> dict[str, Any] | None:
    """A record's content; None where there is none, {} where what is there cannot be understood.

    Raises:
        StoreError: as ``Store.get_into``.
    """
    size: int | None = RECORD_BYTES
    for _ in range(READ_ATTEMPTS_MAX):
        if size is None:
            return None
        if not 0 < size <= RECORD_BYTES_MAX:
            return {}
        data = bytearray(size)
        try:
            store.get_into(key, [memoryview(data)])
        except BlobNotFoundError:
            return None
        except BlobCorruptError:
            size = store.size(key)
            continue
        try:
            content = parse_json(data)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}
    raise StoreUnavailableError("it changes faster than it can be read", key=key)
