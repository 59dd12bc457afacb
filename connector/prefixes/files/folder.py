"""FolderFiles: the files of prefixes in a folder of a file system."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import count

from kvtiers.connector.prefixes.files.base import Files, storage_errors
from kvtiers.tiers.errors import StoreFullError
from kvtiers.tiers.stores.files.posix import make_folders

FOLDER_ATTEMPTS = 8


class FolderFiles(Files):
    """Files with mode 0600 in folders with mode 0700. The modification time is the time of the last use.

    A file is written under a temporary name and renamed. A write that would leave less than ``min_free_bytes`` free
    raises StoreFullError.
    """

    has_uses = True

    def __init__(self, root: str, min_free_bytes: int) -> None:
        self._root = root
        self._min_free_bytes = min_free_bytes

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        part = f"{full}.{uuid.uuid4().hex}.part"
        with storage_errors(path):
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
        with storage_errors(path), os.fdopen(self._open(path), "rb") as file:
            return file.read(bytes_max)

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        buffer = memoryview(bytearray(max((size for _, size in files.values()), default=0) + 1))
        for name, (path, size) in files.items():
            wanted = buffer[: size + 1]  # one byte more, to detect a file that is too long
            filled = 0
            with storage_errors(path), os.fdopen(self._open(path), "rb", buffering=0) as file:
                while filled < len(wanted) and (count := file.readinto(wanted[filled:])):
                    filled += count
            yield name, wanted[:filled]

    def exists(self, path: str) -> bool:
        return os.path.exists(self._full(path))

    def names(self, folder: str) -> list[str]:
        with storage_errors(folder):
            try:
                return sorted(entry.name for entry in os.scandir(self._full(folder)) if entry.is_file())
            except FileNotFoundError:
                return []

    def unused_s(self, path: str) -> float:
        with storage_errors(path):
            return time.time() - os.stat(self._full(path)).st_mtime

    def touch(self, path: str) -> None:
        with storage_errors(path), contextlib.suppress(FileNotFoundError):
            os.utime(self._full(path))

    def delete(self, path: str) -> None:
        with storage_errors(path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._full(path))

    def delete_folder(self, folder: str) -> None:
        with storage_errors(folder), contextlib.suppress(FileNotFoundError):
            for name in self.names(folder):
                self.delete(f"{folder}/{name}")
            os.rmdir(self._full(folder))

    def _check_room(self, fd: int, size: int, path: str) -> None:
        status = os.fstatvfs(fd)
        is_reported = status.f_blocks > 0
        if is_reported and status.f_bavail * status.f_frsize - size < self._min_free_bytes:
            text = f"{size} bytes would leave less than min_free = {self._min_free_bytes} bytes free"
            raise StoreFullError(text, key=path)

    def _open(self, path: str) -> int:
        return os.open(self._full(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


def _create(path: str) -> int:
    """Create a new file, mode 0600, and its folders. Returns its descriptor."""
    for attempt in count(1):
        try:
            if not os.path.isdir(folder := os.path.dirname(path)):  # this check costs an NFS server nothing
                make_folders(folder)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a collector removed the folder while it was empty
            if attempt == FOLDER_ATTEMPTS:
                raise
    raise AssertionError("count ends")
