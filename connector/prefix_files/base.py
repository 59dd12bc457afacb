"""Files: where PrefixStore keeps its files: in a folder, in a bucket, or under any fsspec URL. By relative path."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from connector.daemon_pool import DaemonPool
from tiers.concurrency import Concurrency
from tiers.errors import (
    BlobNotFoundError,
    ConfigError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
    public_url,
)
from tiers.open_store import open_store
from tiers.stores.fsspec_driver import ATOMIC_PUT, TEMPORARY_FOLDER, protocols_of, put_and_move
from tiers.tier_config import BoundedTierConfig, FsspecTierConfig, FsTierConfig, NfsTierConfig, S3TierConfig

if TYPE_CHECKING:
    from tiers.stores.s3 import S3Store

T = TypeVar("T")

FOLDER_ATTEMPTS = 8
FILES_AT_ONCE = 16  # in memory, and requests under way on an object store
FILES_MIN = 4  # that are read at once, however large
BUFFERS_BYTES_MAX = 64 << 20  # that they are read into
THREADS_MAX = 32  # which live in the engine's process


class Files(ABC):
    """Files by relative path. Blocking; raises StoreError only.

    Attributes:
        has_uses: ``touch`` works: a time that says when a file was used last.
    """

    has_uses = False

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """In one piece: nobody ever reads a part of it."""

    @abstractmethod
    def read(self, path: str, bytes_max: int) -> bytes:
        """All of it; at most ``bytes_max`` bytes, and nobody says of which."""

    @abstractmethod
    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        """(name, bytes) for each name -> (path, its size), in order.

        The bytes are lent until the next ones are asked for: fresh memory for each file costs more than its reading.
        Of a file that has another size, other bytes may come, or BlobCorruptError.
        """

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """Each in one piece, in any order."""
        for path, data in files.items():
            self.write(path, data)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether it is there."""

    def present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """Of each run of files, how many are there without a gap, from the first on."""
        return [sum(1 for _ in takewhile(self.exists, run)) for run in runs]

    def reading(self, paths: Sequence[str], bytes_max: int) -> list[Callable[[], bytes]]:
        """What returns, or raises, what ``read`` does, for each path; begun at once where the storage is far."""
        return [partial(self.read, path, bytes_max) for path in paths]

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names of the files right in the folder; none where it is not there."""

    def unused_s(self, path: str) -> float:
        """Seconds since it was written or touched."""
        raise NotImplementedError

    def touch(self, path: str) -> None:
        """It is used. Absent is success."""
        raise NotImplementedError

    @abstractmethod
    def delete(self, path: str) -> None:
        """Absent is success."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """With its files; absent is success."""

    def prepare(self) -> None:  # noqa: B027 - not every storage has a first call that costs more
        """Make what the first call would make, without asking the storage. Raises nothing."""

    def check(self) -> None:  # noqa: B027 - not every storage can say
        """Ask the storage whether it can be used.

        Raises:
            StoreError: one line that says what is wrong and what to do about it.
        """

    def close(self) -> None:  # noqa: B027 - not every storage holds something
        """Release connections and threads. Asks no storage and waits for none; what is under way may fail."""


class _LocalFiles(Files):
    """Files in a folder: 0600 in folders of 0700, written beside and renamed. Used last is modified last.

    A write that would leave less than ``min_free_bytes`` free is StoreFullError.
    """

    has_uses = True

    def __init__(self, root: str, min_free_bytes: int) -> None:
        self._root = root
        self._min_free_bytes = min_free_bytes

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        part = f"{full}.{uuid.uuid4().hex}.part"
        with _storage_errors(path):
            fd = _create(part)
            try:
                with os.fdopen(fd, "wb", buffering=0) as file:
                    self._check_room(fd, len(data), path)
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                os.replace(part, full)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise

    def read(self, path: str, bytes_max: int) -> bytes:
        with _storage_errors(path), os.fdopen(self._open(path), "rb") as file:
            return file.read(bytes_max)

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        buffer = memoryview(bytearray(max((size for _, size in files.values()), default=0) + 1))
        for name, (path, size) in files.items():
            wanted = buffer[: size + 1]  # one more shows that there is more
            filled = 0
            with _storage_errors(path), os.fdopen(self._open(path), "rb", buffering=0) as file:
                while filled < len(wanted) and (count := file.readinto(wanted[filled:])):
                    filled += count
            yield name, wanted[:filled]

    def exists(self, path: str) -> bool:
        return os.path.exists(self._full(path))

    def names(self, folder: str) -> list[str]:
        with _storage_errors(folder):
            try:
                return sorted(entry.name for entry in os.scandir(self._full(folder)) if entry.is_file())
            except FileNotFoundError:
                return []

    def unused_s(self, path: str) -> float:
        with _storage_errors(path):
            return time.time() - os.stat(self._full(path)).st_mtime

    def touch(self, path: str) -> None:
        with _storage_errors(path), contextlib.suppress(FileNotFoundError):
            os.utime(self._full(path))

    def delete(self, path: str) -> None:
        with _storage_errors(path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._full(path))

    def delete_folder(self, folder: str) -> None:
        with _storage_errors(folder), contextlib.suppress(FileNotFoundError):
            for name in self.names(folder):
                self.delete(f"{folder}/{name}")
            os.rmdir(self._full(folder))

    def _check_room(self, fd: int, size: int, path: str) -> None:
        status = os.fstatvfs(fd)
        if status.f_bavail * status.f_frsize - size < self._min_free_bytes:
            text = f"{size} bytes would leave less than min_free = {self._min_free_bytes} bytes free"
            raise StoreFullError(text, key=path)

    def _open(self, path: str) -> int:
        return os.open(self._full(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


class _FsspecFiles(Files):
    """Files under an fsspec URL. Object stores show a put in one piece; elsewhere files are written and moved."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            import fsspec

            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as e:
            raise ConfigError(
                f"{public_url(url)!r} cannot be used: {e}; see the extra kvtiers[fsspec]", field="url"
            ) from e
        self._root = root.rstrip("/")
        self._is_atomic = bool(protocols_of(self._fs) & ATOMIC_PUT)

    def write(self, path: str, data: bytes) -> None:
        with _storage_errors(path):
            if self._is_atomic:
                self._fs.pipe_file(self._full(path), data)
            else:
                put_and_move(self._fs, self._full(path), [memoryview(data)], self._full(TEMPORARY_FOLDER))

    def read(self, path: str, bytes_max: int) -> bytes:
        with _storage_errors(path):
            data: bytes = self._fs.cat_file(self._full(path), start=0, end=bytes_max)
            return data

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        names = list(files)
        for start in range(0, len(names), FILES_AT_ONCE):
            some = names[start : start + FILES_AT_ONCE]
            full = [self._full(files[name][0]) for name in some]
            ends = [files[name][1] + 1 for name in some]  # one byte more shows that there is more
            with _storage_errors(files[some[0]][0]):
                # Not cat(), which takes a path with a bracket for a pattern.
                found = self._fs.cat_ranges(full, [0] * len(full), ends, on_error="raise")
            for name, data in zip(some, found, strict=True):
                yield name, memoryview(bytearray(data))  # which a tensor may lie over; nobody may write bytes

    def write_all(self, files: Mapping[str, bytes]) -> None:
        if not self._is_atomic:
            super().write_all(files)
        elif files:
            with _storage_errors(next(iter(files))):
                self._fs.pipe({self._full(path): data for path, data in files.items()})

    def exists(self, path: str) -> bool:
        with _storage_errors(path):
            try:
                self._fs.info(self._fresh(path))
            except FileNotFoundError:
                return False
            return True

    def names(self, folder: str) -> list[str]:
        with _storage_errors(folder):
            try:
                found = self._fs.ls(self._fresh(folder), detail=True)
            except FileNotFoundError:
                return []
            return sorted(entry["name"].rsplit("/", 1)[-1] for entry in found if entry["type"] == "file")

    def delete(self, path: str) -> None:
        with _storage_errors(path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def delete_folder(self, folder: str) -> None:
        for name in self.names(folder):
            self.delete(f"{folder}/{name}")
        if not self._is_atomic:  # else there are no folders
            with _storage_errors(folder), contextlib.suppress(FileNotFoundError):
                self._fs.rmdir(self._full(folder))

    def _fresh(self, path: str) -> str:
        full = self._full(path)
        self._fs.invalidate_cache(full)  # others write here, too; refresh=True is known to some file systems only
        return full

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


class _S3Files(Files):
    """Objects of a bucket. Layers are read and written side by side, by threads that the first such call starts.

    Args:
        threads: that read, at first.
        threads_max: of all.
    """

    def __init__(self, store: S3Store, threads: int, threads_max: int) -> None:
        self._store = store
        self._threads_max = max(threads, threads_max)
        self._reading = Concurrency(threads, threads_max)
        self._starting = threading.Lock()  # guards _pool
        self._pool: DaemonPool | None = None

    def write(self, path: str, data: bytes) -> None:
        self._store.put(path, [memoryview(data)], overwrite=True)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        writes = [self._submit(self.write, path, data) for path, data in files.items()]
        wait(writes)  # before any error comes out: nothing is to be written behind a caller who cleans up
        for done in writes:
            _result(done)

    def read(self, path: str, bytes_max: int) -> bytes:
        found = self._store.get_tail(path, bytes_max)  # its size need not be asked before
        if found is None:
            raise BlobNotFoundError("is not there", key=path)
        return found[1]

    def present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        asked = iter(self._store.size_many([path for run in runs for path in run], may_list=False))
        sizes = [list(islice(asked, len(run))) for run in runs]
        return [sum(1 for _ in takewhile(lambda size: isinstance(size, int), found)) for found in sizes]

    def reading(self, paths: Sequence[str], bytes_max: int) -> list[Callable[[], bytes]]:
        if len(paths) == 1:  # the caller waits for it at once
            return super().reading(paths, bytes_max)
        return [partial(_result, self._submit(self.read, path, bytes_max)) for path in paths]

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        biggest = max((size for _, size in files.values()), default=0)
        threads = self._reading.threads
        started, cpu_s = time.monotonic(), 0.0
        to_begin = iter(files.items())
        ahead: deque[tuple[str, memoryview, memoryview, Future[float]]] = deque()

        def begin(buffer: memoryview) -> None:
            for name, (path, size) in islice(to_begin, 1):
                read = self._submit(self._read_into, path, buffer[:size])
                ahead.append((name, buffer, buffer[:size], read))

        for _ in range(min(threads, len(files), max(FILES_MIN, BUFFERS_BYTES_MAX // max(1, biggest)))):
            begin(memoryview(bytearray(biggest)))
        try:
            while ahead:
                name, buffer, data, read = ahead.popleft()
                cpu_s += _result(read)
                yield name, data
                begin(buffer)
            self._reading.learn(threads, len(files), time.monotonic() - started, cpu_s)
        finally:
            for *_, read in ahead:
                read.cancel()

    def _read_into(self, path: str, data: memoryview) -> float:
        """Seconds of processor that it took."""
        started = time.thread_time()
        self._store.get_into(path, [data])
        return time.thread_time() - started

    def exists(self, path: str) -> bool:
        return self._store.size(path) is not None

    def names(self, folder: str) -> list[str]:
        return sorted(self._store.names_in(folder))

    def delete(self, path: str) -> None:
        self._store.delete(path)

    def delete_folder(self, folder: str) -> None:
        keys = [info.key for info in self._store.keys(f"{folder}/")]
        for error in self._store.delete_many(keys):
            if error is not None:
                raise error

    def prepare(self) -> None:
        self._store.prepare()

    def check(self) -> None:
        self._store.check()

    def close(self) -> None:
        self._store.close()
        with self._starting:
            if self._pool is not None:
                self._pool.shutdown(0.0)

    def _submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        with self._starting:
            if self._pool is None:
                self._pool = DaemonPool(self._threads_max, "kvtiers-prefix-s3")
            return self._pool.submit(call, *arguments)


def _make_folders(path: str) -> None:
    """All folders of a path, 0700 where they are made now. (``os.makedirs`` gives the mode to the last one only.)"""
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _create(path: str) -> int:
    """A descriptor of a new file, 0600, and its folders."""
    for attempt in count(1):
        try:
            _make_folders(os.path.dirname(path))
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a collector removes folders that are empty
            if attempt == FOLDER_ATTEMPTS:
                raise
    raise AssertionError("count ends")


def files_for(place: BoundedTierConfig) -> Files:
    """Those of a place (see ``connector.prefix_place``). Asks no storage.

    Raises:
        ConfigError: fsspec does not know the URL, or a package is missing.
    """
    if isinstance(place, S3TierConfig):
        store: Any = open_store(place)
        return _S3Files(store, max(place.n_read_threads, place.n_write_threads), min(THREADS_MAX, place.n_threads_max))
    if isinstance(place, FsspecTierConfig):
        return _FsspecFiles(place.url, place.storage_options)
    assert isinstance(place, FsTierConfig | NfsTierConfig)
    return _LocalFiles(place.root_dir, place.min_free)


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError:
        raise StoreClosedError("the storage was closed") from None


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as e:
        raise BlobNotFoundError("is not there", key=path) from e
    except PermissionError as e:
        raise StorePermissionError(str(e), key=path) from e
    except OSError as e:
        if e.errno in (28, 122):  # ENOSPC, EDQUOT
            raise StoreFullError(str(e), key=path) from e
        raise StoreUnavailableError(str(e), key=path) from e
    except Exception as e:  # fsspec's file systems raise what their clients raise
        raise StoreUnavailableError(f"{type(e).__name__}: {e}", key=path) from e
