"""A store of somebody else's, by docs/writing-a-store.md: blobs as rows of one SQLite file.

- type: store
  module_path: tests.tiers.stores.sqlite_store
  options: {path: /var/lib/kv.db}
  max_bytes: 10GiB
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvtiers import (
    BlobCorruptError,
    BlobNotFoundError,
    Capabilities,
    KeyInfo,
    Store,
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
    check_key,
    client_errors,
    fill_parts,
    parts_size,
)

BUSY_S = 5.0  # how long a writer waits for another one; then the call fails, and may be made again
PAGE_KEYS = 1000
SCHEMA = "CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, size INTEGER, mtime REAL, blob BLOB)"


def make_store(options: Mapping[str, Any]) -> Store:
    """What ``module_path`` names."""
    if options.keys() != {"path"} or not isinstance(options["path"], str):
        raise StoreConfigError(f"accepted is path, a file; not {', '.join(sorted(options)) or 'nothing'}")
    return SqliteStore(options["path"])


class SqliteStore(Store):
    """One file for all blobs, in WAL mode: readers do not wait for a writer. Each thread has a connection.

    Raises:
        StoreError: the file cannot be opened, or is no database.
    """

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=False)

    def __init__(self, path: str) -> None:
        self._path = path
        self._own = threading.local()
        self._lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []  # of all threads
        self._closed = False
        with self._connection("") as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(SCHEMA)

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        check_key(key)
        how = "REPLACE" if overwrite else "IGNORE"
        with self._connection(key) as connection, self._transaction(connection):
            row = connection.execute(
                f"INSERT OR {how} INTO blobs VALUES (?, ?, ?, zeroblob(?)) RETURNING rowid",
                (key, parts_size(parts), time.time(), parts_size(parts)),
            ).fetchone()
            if row is None:
                return False
            with connection.blobopen("blobs", "blob", row[0]) as blob:
                for part in parts:
                    blob.write(part)
        return True

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        check_key(key)
        # In a transaction, as the row may be replaced between the question and the reads.
        with self._connection(key) as connection, self._transaction(connection, "DEFERRED"):
            row = connection.execute("SELECT rowid, size FROM blobs WHERE key = ?", (key,)).fetchone()
            if row is None:
                raise BlobNotFoundError("not stored", key=key)
            if row[1] != parts_size(parts):
                raise BlobCorruptError(f"{row[1]} bytes are stored, {parts_size(parts)} were asked for", key=key)
            with connection.blobopen("blobs", "blob", row[0], readonly=True) as blob:
                for part in parts:
                    fill_parts([part], blob.read(part.nbytes), key=key)

    def size(self, key: str) -> int | None:
        check_key(key)
        with self._connection(key) as connection:
            row = connection.execute("SELECT size FROM blobs WHERE key = ?", (key,)).fetchone()
        return None if row is None else int(row[0])

    def delete(self, key: str) -> None:
        check_key(key)
        with self._connection(key) as connection, self._transaction(connection):
            connection.execute("DELETE FROM blobs WHERE key = ?", (key,))

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        after = ""
        while True:
            with self._connection(prefix) as connection:
                page = connection.execute(
                    "SELECT key, size, mtime FROM blobs WHERE key > ? AND substr(key, 1, ?) = ? ORDER BY key LIMIT ?",
                    (after, len(prefix), prefix, PAGE_KEYS),
                ).fetchall()
            if not page:
                return
            yield from (KeyInfo(*row) for row in page)
            after = page[-1][0]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def touch(self, key: str) -> None:
        """See ``SupportsTouch``: the collector then removes what was used least recently, and not what is oldest."""
        check_key(key)
        with self._connection(key) as connection, self._transaction(connection):
            connection.execute("UPDATE blobs SET mtime = ? WHERE key = ?", (time.time(), key))

    @contextmanager
    def _connection(self, key: str) -> Iterator[sqlite3.Connection]:
        """This thread's connection, its exceptions as ours."""
        with client_errors(lambda e: StoreClosedError if self._closed else classify(e), key=key):
            if self._closed:
                raise StoreClosedError("the store is closed", key=key)
            if not hasattr(self._own, "connection"):
                connection = sqlite3.connect(self._path, BUSY_S, isolation_level=None, check_same_thread=False)
                self._own.connection = connection
                with self._lock:
                    self._connections.append(connection)
            yield self._own.connection

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
        connection.execute(f"BEGIN {kind}")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def classify(error: Exception) -> type[StoreError] | None:
    """The one table from SQLite's errors to ours."""
    if not isinstance(error, sqlite3.Error):
        return None
    name = getattr(error, "sqlite_errorname", "")
    if name in ("SQLITE_FULL", "SQLITE_TOOBIG"):
        return StoreFullError
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return StorePermissionError
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_ERROR")):
        return StoreConfigError
    return StoreUnavailableError  # busy, locked, I/O errors, a file that cannot be opened now
