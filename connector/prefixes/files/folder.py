"""FolderFiles: the files of prefixes in a folder of a file system."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from ....tiers.errors import BlobCorruptError, BlobNotFoundError, StoreFullError
from ....tiers.stores.files.cleanup import touch_blob
from ....tiers.stores.files.posix import (
    FILE_MODE,
    OPEN_FOLDER,
    OPEN_LISTING,
    OPEN_READ,
    OPEN_STAT,
    RootFolder,
    blob_size,
    close_reader,
    opened,
    regular_size,
    remove_blob,
)
from ....tiers.stores.files.publish import NO_HARD_LINKS, OPEN_PRIVATE
from ....tiers.stores.os_errors import store_error
from ....tiers.stores.vectored_io import read_all, write_all
from ..format import LAYER_FILE
from .base import Files

T = TypeVar("T")

ATTEMPTS_MAX = 8  # of a call whose folder is removed meanwhile


class FolderFiles(Files):
    """Files with mode 0600 in folders with mode 0700. The modification time is the time of the last use.

    Nothing outside the folder is read, written or removed, even if other users put links into it (see
    ``tiers.stores.files.posix``). What is not a regular file counts as absent, and raises BlobCorruptError if it is
    read.

    A file is written under a temporary name and then renamed or linked. A write that would leave less than
    ``min_free_bytes`` free raises StoreFullError.

    Args:
        root: the folder. The first call opens it: if the file system hangs, only a thread that may hang waits for it.
        follow: the folder itself may be a symbolic link.
    """

    has_uses = True

    def __init__(self, root: str, min_free_bytes: int, *, follow: bool = True) -> None:
        self._path = root
        self._follow = follow
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()  # guards _root; never held during a system call
        self._root: RootFolder | None = None

    def write(self, path: str, data: bytes) -> None:
        self._call(path, lambda root: self._publish(root, path, data, overwrite=True), make=True)

    def create(self, path: str, data: bytes) -> bool:
        return self._call(path, lambda root: self._publish(root, path, data, overwrite=False), make=True)

    def read(self, path: str, bytes_max: int) -> bytes:
        def read(root: RootFolder) -> bytes:
            with opened(root.open(path, OPEN_READ)) as fd:
                data = bytearray(min(regular_size(fd, path), bytes_max))
                read_all(fd, [memoryview(data)], path, None, len(data))
                return bytes(data)

        return self._call(path, read)

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        buffer = bytearray()

        def read(root: RootFolder, path: str, size: int) -> memoryview:
            nonlocal buffer
            with opened(root.open(path, OPEN_READ)) as fd:
                stored = regular_size(fd, path)
                if stored != size:  # before memory of that size is allocated
                    raise BlobCorruptError(f"{stored} bytes are stored, {size} were asked for", key=path)
                if len(buffer) < size:
                    buffer = bytearray(size)
                data = memoryview(buffer)[:size]
                read_all(fd, [data], path, None, size)
                return data

        for name, (path, size) in files.items():
            yield name, self._call(path, partial(read, path=path, size=size))

    def exists(self, path: str) -> bool:
        return self._find(path, lambda root: blob_size(root, path)) is not None

    def names(self, folder: str) -> list[str]:
        return self._find(folder, lambda root: _regular_files(root, folder)) or []

    def unused_s(self, path: str) -> float:
        def read_time(root: RootFolder) -> float:
            with opened(root.open(path, OPEN_STAT)) as fd:
                return os.fstat(fd).st_mtime

        return time.time() - self._call(path, read_time)

    def touch(self, path: str) -> None:
        self._find(path, lambda root: touch_blob(root, path))

    def delete(self, path: str) -> None:
        self._find(path, lambda root: remove_blob(root, path))

    def delete_layers(self, folder: str) -> None:
        self._find(folder, lambda root: _remove_layers(root, folder))

    def close(self) -> None:
        with self._lock:
            self._root = None

    def _find(self, path: str, call: Callable[[RootFolder], T]) -> T | None:
        """As ``_call``; None if the path does not exist, or a file or a link is where a folder should be."""
        try:
            return self._call(path, call)
        except (BlobNotFoundError, BlobCorruptError):
            return None

    def _call(self, path: str, call: Callable[[RootFolder], T], *, make: bool = False) -> T:
        """Call with the root; with ``make``, create the root if it is missing.

        The call is repeated if the root was replaced meanwhile, or one of the folders that the call makes was removed.
        """
        for attempts_left in reversed(range(ATTEMPTS_MAX)):
            root = None
            try:
                root = self._use_root(make=make)
                return call(root)
            except OSError as e:
                if not attempts_left or root is None or not self._may_succeed_again(root, e, make=make):
                    raise store_error(e, path) from e
        raise AssertionError("the last attempt returns or raises")

    def _use_root(self, *, make: bool) -> RootFolder:
        root = self._root
        if root is None:
            root = RootFolder(self._path, make=make, follow=self._follow)
            with self._lock:
                self._root = root
        return root

    def _may_succeed_again(self, root: RootFolder, e: OSError, *, make: bool) -> bool:
        if e.errno not in (errno.ENOENT, errno.ESTALE):
            return False
        if not root.is_removed():
            return make  # a collector removed a folder while it was empty
        with self._lock:
            if self._root is root:
                self._root = None
        return True

    def _publish(self, root: RootFolder, path: str, data: bytes, *, overwrite: bool) -> bool:
        """Write a file. Returns False if it exists, unless it may be overwritten."""
        folder, _, name = path.rpartition("/")
        part = f"{name}.{uuid.uuid4().hex}.part"
        dir_fd = root.make_folder(folder)
        try:
            fd = os.open(part, OPEN_PRIVATE, FILE_MODE, dir_fd=dir_fd)
            is_renamed = False
            try:
                try:
                    root.give(fd)
                    self._check_room(root, len(data), path)
                    write_all(fd, [memoryview(data)], None)
                finally:
                    os.close(fd)
                if not overwrite and (was_linked := _link(part, name, dir_fd)) is not None:
                    return was_linked
                os.rename(part, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                is_renamed = True
                return True
            finally:
                if not is_renamed:
                    with contextlib.suppress(OSError):
                        os.unlink(part, dir_fd=dir_fd)
        finally:
            close_reader(dir_fd)

    def _check_room(self, root: RootFolder, size: int, path: str) -> None:
        space = root.space() if self._min_free_bytes else None  # None: not limited, or not reported
        if space is not None and space[0] - size < self._min_free_bytes:
            text = f"{size} bytes would leave less than min_free = {self._min_free_bytes} bytes free"
            raise StoreFullError(text, key=path)


def _link(part: str, name: str, dir_fd: int) -> bool | None:
    """Give a file its name. False: the name is taken. None: this file system has no hard links."""
    try:
        os.link(part, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in NO_HARD_LINKS:
            raise
        return None
    return True


def _regular_files(root: RootFolder, folder: str) -> list[str]:
    with opened(root.open(folder, OPEN_LISTING)) as fd, os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def _remove_layers(root: RootFolder, folder: str) -> None:
    """Remove the layers' files in a folder, and the folder if it is empty then. Other files stay."""
    parent, _, name = folder.rpartition("/")
    with opened(root.open(parent or ".", OPEN_FOLDER)) as parent_fd:
        fd = os.open(name, OPEN_LISTING, dir_fd=parent_fd)
        try:
            with os.scandir(fd) as entries:
                names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
            for layer in filter(LAYER_FILE.fullmatch, names):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(layer, dir_fd=fd)
        finally:
            close_reader(fd)
        try:
            os.rmdir(name, dir_fd=parent_fd)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
