"""FsspecStore: blobs under any URL that fsspec supports: s3://, gs://, abfs://, hf://, sftp://, file://, memory:// …

fsspec supports the most storage systems, but is not the fastest client. Its calls take and return one bytes object, so
a put to an object store joins the parts and a get copies the data once. Prefer kvtiers' own stores (``fs``, ``nfs``,
``s3``) where they support the protocol.

An object store publishes a blob with one put. On all other storage, the blob is written under a temporary name in the
root's ``.tmp`` folder and then moved. The next process that opens the root removes temporary files older than an hour.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from ..errors import (
    BlobCorruptError,
    BlobNotFoundError,
    InvalidKeyError,
    StoreClosedError,
    StoreConfigError,
    StoreError,
    public_url,
)
from ..plain_logs import get_logger
from ..store import Capabilities, KeyInfo, Store, check_key, parts_size
from .chatty_loggers import cap_chatty_loggers
from .fsspec_driver import (
    ATOMIC_PUT,
    LOCAL,
    TEMPORARY_FOLDER,
    TEMPORARY_NAME,
    explain_options,
    lists_trees,
    mtime_of,
    open_driver,
    protocols_of,
    put_and_move,
    size_of,
    translate,
)
from .os_errors import is_absent

logger = get_logger(__name__)

T = TypeVar("T")

TEMPORARY_S_MAX: Final = 3600.0
# Folders above this depth are listed one by one. A folder at this depth is listed with its whole tree in one call, if
# the driver can. The layout has 4,096 folders at depth 2, so a listing holds 1/4096 of a namespace in memory.
LISTED_DEPTH: Final = 2
ASKED_AT_ONCE: Final = 128  # keys in one batch of concurrent requests


class FsspecStore(Store):
    """Stores blobs below a URL. Any thread may call, but not in forked children.

    Args:
        url: URL of the root folder, as the driver takes it, including chains with ``::``. Protocols in ``REFUSED``,
            such as caches, are not accepted.
        storage_options: options of the driver. They may hold secrets, so they are never logged or shown.
        request_timeout_s: limit of one operation; only for asynchronous drivers, such as all drivers of object stores.
        read_only: opening the store removes nothing. (Callers make no writing calls.)

    Raises:
        StoreConfigError: fsspec or the driver is not installed, or the URL, its protocol or an option is not accepted.
        StoreError: the driver connects when it is created (as ``sftp`` does), and the connection failed.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        request_timeout_s: float = 30.0,
        read_only: bool = False,
    ) -> None:
        self._url = url
        self._storage_options = dict(storage_options or {})
        self._timeout_s = request_timeout_s
        self._closed = False
        self._fs, self._root = self._connect()
        protocols = protocols_of(self._fs)
        self._is_atomic = bool(protocols & ATOMIC_PUT)
        self._lists_trees = lists_trees(self._fs)
        self._keeps_listings = _turn_off_listings(self._fs)
        if not self._root and self._is_atomic and "memory" not in protocols:
            raise StoreConfigError(f"{self!r} does not name a bucket; write protocol://bucket/folder")
        self.capabilities = Capabilities(
            exclusive_create=False,  # most drivers have no conditional put
            shared="memory" not in protocols,
            latency_bound=not protocols & {*LOCAL, "memory"},
        )
        if not self._is_atomic and not read_only:
            self._sweep()

    def __repr__(self) -> str:
        return f"FsspecStore({public_url(self._url)!r})"

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        path = self._path(key)
        if not overwrite and self.size(key) is not None:
            return False
        try:
            if self._is_atomic:
                self._run(key, lambda: self._call("pipe_file", path, b"".join(parts)))
            else:
                self._run(key, lambda: put_and_move(self._driver(), path, parts, self._below(TEMPORARY_FOLDER)))
            return True
        except BlobNotFoundError:
            raise StoreConfigError(f"{self!r}: the bucket or the root does not exist; create it", key=key) from None

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        path = self._path(key)
        plain = [part.cast("B") for part in parts if part.nbytes]
        self._run(key, lambda: self._read(path, plain, parts_size(plain)))

    def size(self, key: str) -> int | None:
        path = self._path(key)
        return self._run(key, lambda: self._size(path))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._run(key, lambda: self._call("rm_file", path))
        except (BlobNotFoundError, BlobCorruptError):
            pass

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        """List blobs. Holds about 1/4096 of them in memory.

        A web server lists only names. Each blob's size is then requested, and names without a size are skipped.
        """
        self._check_open("")
        folder = prefix.rpartition("/")[0]
        if any(part in ("", "..", ".") for part in folder.split("/") if folder):
            return
        unsized: dict[str, float] = {}
        for info in self._walk(self._below(folder) if folder else self._root, 0, self._below(prefix)):
            key = info["name"].removeprefix(self._root).removeprefix("/")
            try:
                check_key(key)
            except InvalidKeyError:
                continue
            if not key.startswith(prefix):
                continue
            if info["size"] is not None:
                yield KeyInfo(key, info["size"], mtime_of(info))
                continue
            unsized[key] = mtime_of(info)
            if len(unsized) == ASKED_AT_ONCE:
                yield from self._with_sizes(unsized)
                unsized = {}
        yield from self._with_sizes(unsized)

    def close(self) -> None:
        self._closed = True

    # -- optional protocols ----------------------------------------------------------------------------------------

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``SupportsTail``."""
        path = self._path(key)
        size = self._run(key, lambda: self._size(path))
        start = max(0, (size or 0) - length)
        if size is None or start == size:
            return None if size is None else (size, b"")
        tail = self._run(key, lambda: self._call("cat_file", path, start=start, end=size))
        if len(tail) == size:
            tail = tail[start:]  # a web server may ignore the range and send the whole blob
        return size, bytes(tail)

    def folders(self) -> list[str]:
        """See ``Store``."""
        try:
            entries = self._list(self._root)
        except BlobNotFoundError:
            return []
        names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        return [name.rpartition("/")[2] for name in names if name != self._root and not _is_hidden(name)]

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        """See ``Store``. Requests run concurrently if the driver is asynchronous, else one by one."""
        if not self._fs.async_impl:
            return super().size_many(keys)
        return self._many(keys, "info", size_of, BlobNotFoundError)

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        """See ``Store``. Requests run as in ``size_many``."""
        if not self._fs.async_impl:
            return super().delete_many(keys)
        return self._many(keys, "rm_file", _raise_if_error, BlobNotFoundError, BlobCorruptError)

    def has_container(self) -> bool | None:
        """Whether the root's bucket or container exists; None: the root has none, or the driver cannot tell."""
        container = self._root.partition("/")[0]
        if not container or not self._is_atomic:
            return None
        try:
            self._run("", lambda: self._call("info", container))  # not "exists", which is False on any error
        except BlobNotFoundError:
            return False
        except StoreError:
            return None
        return True

    def _connect(self) -> tuple[Any, str]:
        try:
            made = open_driver(self._url, self._storage_options)
        except StoreError as e:
            raise type(e)(f"{self!r}: {e}") from None
        cap_chatty_loggers()  # S3 drivers have created their loggers by now
        return made

    def _driver(self) -> Any:
        """The driver, for one call. A driver with a cache of listings of its own works on it during a call."""
        return self._connect()[0] if self._keeps_listings else self._fs

    def _check_open(self, key: str) -> None:
        if self._closed:
            raise StoreClosedError(f"{self!r} is closed", key=key)

    def _path(self, key: str) -> str:
        """The path of a blob. Checks the key, and that the store is open."""
        self._check_open(check_key(key))
        return self._below(key)

    def _below(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _list(self, path: str) -> list[Mapping[str, Any]]:
        self._check_open("")
        return self._run("", lambda: self._call("ls", path, detail=True))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the driver, with a deadline if it is asynchronous. A late call can change only its own bytes."""
        fs = self._driver()
        if not fs.async_impl:
            return getattr(fs, method)(*arguments, **options)
        from fsspec.asyn import sync

        try:
            return sync(fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=self._timeout_s, **options)
        except Exception as e:
            # The driver's frames refer to the exception, and its traceback to the frames. Break this cycle, or it keeps
            # the caller's parts alive until the next garbage collection.
            error: BaseException | None = e
            while error is not None and error.__traceback__ is not None:
                error.__traceback__ = None
                error = error.__cause__ or error.__context__
            raise

    def _many(
        self, keys: Sequence[str], method: str, read: Callable[[Any], Any], *absent: type[StoreError]
    ) -> list[Any]:
        """Call a method for many keys and convert each result with ``read``. Returns outcomes parallel to ``keys``.

        An outcome is None if the error is in ``absent``, and the StoreError for any other error.
        """
        self._check_open("")
        answers: dict[str, Any] = {}
        good: list[str] = []
        for key in dict.fromkeys(keys):
            try:
                good.append(check_key(key))
            except InvalidKeyError as e:
                answers[key] = e
        for key, found in zip(good, self._call_many(method, [self._below(key) for key in good]), strict=True):
            try:
                answers[key] = self._run(key, partial(read, found))
            except absent:
                answers[key] = None
            except StoreError as e:
                answers[key] = e
        return [answers[key] for key in keys]

    def _call_many(self, method: str, paths: Sequence[str]) -> list[Any]:
        """Return the driver's result or exception for each path."""
        from fsspec.asyn import _run_coros_in_chunks, sync  # private, but drivers import it, too

        fs = self._driver()
        limits = {"batch_size": fs.batch_size or ASKED_AT_ONCE, "timeout": self._timeout_s}
        asked = [getattr(fs, f"_{method}")(path) for path in paths]
        found: list[Any] = sync(fs.loop, partial(_run_coros_in_chunks, asked, return_exceptions=True, **limits))
        return found

    def _size(self, path: str) -> int | None:
        """Return a blob's size; None if there is no blob. Passes on the driver's exceptions."""
        try:
            return size_of(self._call("info", path))
        except OSError as e:
            if isinstance(translate(e, ""), BlobNotFoundError) or is_absent(e):
                return None
            raise

    def _read(self, path: str, parts: Sequence[memoryview], size: int) -> None:
        """Read a blob with one request. Requests one byte too many, to detect a blob that is too long."""
        try:
            data = self._call("cat_file", path, start=0, end=size + 1)
        except FileNotFoundError:
            raise
        except OSError:
            # No byte range of an empty object is valid, and some drivers raise an error for such a range.
            actual = self._size(path)
            if actual == 0 == size:
                return
            if actual is not None and actual != size:
                raise BlobCorruptError(f"{actual} bytes are stored, {size} were asked for") from None
            raise
        if len(data) != size:
            stored = f"{len(data)} bytes are" if len(data) < size else f"more than {size} bytes are"
            raise BlobCorruptError(f"{stored} stored, {size} were asked for")
        source = np.frombuffer(data, np.uint8)
        for part in parts:
            np.frombuffer(part, np.uint8)[:] = source[: len(part)]  # numpy releases the GIL while it copies
            source = source[len(part) :]

    def _walk(self, path: str, depth: int, wanted: str) -> Iterator[Mapping[str, Any]]:
        """Yield the files below ``path``. Folders that cannot hold a path that starts with ``wanted`` are skipped."""
        if depth == LISTED_DEPTH and self._lists_trees:
            found = self._run("", lambda: self._call("find", path, detail=True, withdirs=False))
            for entry in found.values():
                if not self._is_folder_itself(entry, path):
                    yield entry
            return
        try:
            entries = self._list(path)
        except BlobNotFoundError:
            return
        for entry in entries:
            name = entry["name"].rstrip("/")  # folder names of web servers end with a slash
            if self._is_folder_itself(entry, path):
                continue  # some drivers include the folder in its own listing
            if entry["type"] != "directory":
                yield entry
            elif (name.startswith(wanted) or wanted.startswith(f"{name}/")) and not _is_hidden(name):
                yield from self._walk(name, depth + 1, wanted)

    def _is_folder_itself(self, entry: Mapping[str, Any], path: str) -> bool:
        """Whether an entry is the listed folder.

        Raises:
            StoreConfigError: the entry is not below the folder. A caller might delete another blob by such a name.
        """
        name, folder = entry["name"].strip("/"), path.strip("/")
        if name != folder and folder and not name.startswith(f"{folder}/"):
            raise StoreConfigError(f"{self!r}: the driver lists names outside the requested prefix")
        return bool(name == folder)

    def _with_sizes(self, mtimes: Mapping[str, float]) -> Iterator[KeyInfo]:
        """Yield the blobs among keys that were listed without a size, after a request for each key's size."""
        for (key, mtime), size in zip(mtimes.items(), self.size_many(list(mtimes)), strict=True):
            if isinstance(size, Exception):
                raise size
            if size is not None:
                yield KeyInfo(key, size, mtime)

    def _sweep(self) -> None:
        """Remove temporary files of dead writers. Checks names, because other programs may use such a folder, too."""
        try:
            folder = self._below(TEMPORARY_FOLDER)
            for entry in self._call("ls", folder, detail=True):
                if entry["type"] != "file" or not TEMPORARY_NAME.fullmatch(entry["name"].rpartition("/")[2]):
                    continue
                written_at = mtime_of(entry)
                if written_at and time.time() - written_at > TEMPORARY_S_MAX:  # 0.0: unknown; the writer may be alive
                    self._call("rm_file", entry["name"])
        except Exception as e:  # noqa: BLE001 - drivers may raise anything, and leftover files must not prevent a start
            if not isinstance(e, FileNotFoundError):
                logger.warning("%r: temporary files could not be removed: %s", self, type(e).__name__)

    def _run(self, key: str, call: Callable[[], T]) -> T:
        """Run a driver call. Any exception becomes a StoreError without the driver's message."""
        try:
            return call()
        except StoreError as e:
            error = type(e)(str(e), key=key)
        except Exception as e:  # noqa: BLE001 - drivers may raise anything
            error = translate(e, key, explain_options(self._storage_options))
        raise copy.copy(error)  # ``error`` is in this frame; a traceback would refer back to it in a cycle


def _turn_off_listings(fs: Any) -> bool:
    """Turn off fsspec's cache of listings. Returns whether the driver has its own, which cannot be turned off (hf)."""
    from fsspec.dircache import DirCache

    cache = getattr(fs, "dircache", None)
    if isinstance(cache, DirCache):
        cache.use_listings_cache = False
        return False
    return isinstance(cache, MutableMapping)


def _raise_if_error(outcome: Any) -> None:
    if isinstance(outcome, BaseException):
        raise outcome


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2].startswith(".")
