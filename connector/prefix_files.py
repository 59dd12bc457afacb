"""Files: where PrefixStore keeps its files: in a folder, or under any fsspec URL. Whole files, by relative path."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from tiers.errors import (
    BlobNotFoundError,
    ConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
    public_url,
)
from tiers.stores.fsspec_driver import ATOMIC_PUT, LOCAL, TEMPORARY_FOLDER, protocols_of, put_and_move

FILES_AT_ONCE = 16  # in memory, and requests under way on an object store


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
    def read(self, path: str, bytes_max: int | None = None) -> bytes:
        """All of it; at most ``bytes_max`` bytes."""

    def read_all(self, paths: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
        """(name, bytes) for each name -> path."""
        for name, path in paths.items():
            yield name, self.read(path)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """Each in one piece, in any order."""
        for path, data in files.items():
            self.write(path, data)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether it is there."""

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


class _LocalFiles(Files):
    """Files in a folder: 0600 in folders of 0700, written beside and renamed. Used last is modified last."""

    has_uses = True

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(os.path.expanduser(root))

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        part = f"{full}.{uuid.uuid4().hex}.part"
        with _storage_errors(path):
            _make_folders(os.path.dirname(full))
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(fd, "wb", buffering=0) as file:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                os.replace(part, full)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise

    def read(self, path: str, bytes_max: int | None = None) -> bytes:
        with _storage_errors(path):
            fd = os.open(self._full(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                return file.read(-1 if bytes_max is None else bytes_max)

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

    def read(self, path: str, bytes_max: int | None = None) -> bytes:
        with _storage_errors(path):
            data: bytes = self._fs.cat_file(self._full(path), start=0, end=bytes_max)
            return data

    def read_all(self, paths: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
        names = list(paths)
        for start in range(0, len(names), FILES_AT_ONCE):
            some = names[start : start + FILES_AT_ONCE]
            full = [self._full(paths[name]) for name in some]
            with _storage_errors(paths[some[0]]):
                found = self._fs.cat(full) if len(full) > 1 else {full[0]: self._fs.cat_file(full[0])}
            for name, path in zip(some, full, strict=True):
                yield name, found[path]

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


def _make_folders(path: str) -> None:
    """All folders of a path, 0700 where they are made now. (``os.makedirs`` gives the mode to the last one only.)"""
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def files_for(url: str, options: dict[str, Any]) -> Files:
    """A folder's or a URL's.

    Raises:
        ConfigError: it is neither, or fsspec does not know it.
    """
    if not isinstance(url, str) or not url:
        raise ConfigError(f"{url!r} is not accepted; write a folder or a URL such as s3://bucket/folder", field="url")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _LocalFiles(url)
    return _LocalFiles(rest) if scheme in LOCAL else _FsspecFiles(url, options)


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
