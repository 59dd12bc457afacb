"""System calls shared by the stores on a file system: a confined root folder, and reading blobs.

Everything below a root is opened from the root's own descriptor, folder by folder, without following symbolic links. So
other users with write access to the root (a tenant, another pod) cannot make this process access files elsewhere.
(One openat2 call does the same, but sandboxes may deny it, and it saves only 2 µs.)

Reading a blob takes these system calls::

    openat      each folder of the key, with O_PATH|O_DIRECTORY|O_NOFOLLOW, then the file
    fstat       unless this is a regular file of exactly the requested size, the parts are not touched
    preadv      directly into the parts, until they are full
    close

The file is opened with O_NONBLOCK, because opening a FIFO would otherwise wait for its writer. Writing is in
``publish``.

``posix``, ``vectored_io``, ``publish``, ``listing`` and ``cleanup`` make all system calls of these stores through the
module-level name ``os``. ``tiers.testing.faults.SyscallFaults`` replaces it to make the n-th call fail. Functions here
raise OSError unless their docstring says otherwise; the store translates it with ``os_errors.store_error``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

from ...errors import BlobCorruptError
from ...store import Look, parts_size
from ..vectored_io import read_all, transfer

FOLDER_MODE = 0o700
FILE_MODE = 0o600

# O_PATH: works on a folder with only search permission, and can read the size of a device file without opening it.
OPEN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_LISTING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OPEN_STAT = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


# ---- a confined root folder ------------------------------------------------------------------------------------------


def close_reader(fd: int) -> None:
    """Close a descriptor that was not used for writing. Errors are ignored: the descriptor is freed in any case."""
    try:
        os.close(fd)
    except OSError:
        pass


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a block that does not write with it."""
    try:
        yield fd
    finally:
        close_reader(fd)


class RootFolder:
    """A store's root folder, opened once. Immutable, so any thread may use it. Callers own the descriptors it returns.

    The root's descriptor stays open as long as the object is referenced. When a store drops its root on ``close``,
    running calls keep a valid descriptor, and never use a number that has been reused for another file. The descriptor
    also works in forked children.

    If this process runs as root and the folder belongs to another user, new files and folders are given to that user,
    as far as the file system allows. Otherwise a command run as root would leave files that the engine cannot access.

    Args:
        path: the folder. Its parents may be symbolic links; the folder itself must not be one.
        make: create the folder and its parents with mode 0700 if they are missing.
        follow: the folder itself may be a symbolic link, too.

    Raises:
        OSError: the folder is missing, is not a folder, or cannot be created.
    """

    def __init__(self, path: str, *, make: bool, follow: bool = False) -> None:
        self.fd = -1
        self._path = path
        flags = OPEN_FOLDER & ~os.O_NOFOLLOW if follow else OPEN_FOLDER
        try:
            self.fd = os.open(path, flags)
        except FileNotFoundError:
            if not make:
                raise
            make_folders(path)
            self.fd = os.open(path, flags)
        status = os.fstat(self.fd)
        self._owner = (status.st_uid, status.st_gid) if os.geteuid() == 0 and status.st_uid != 0 else None

    def __del__(self) -> None:
        if self.fd >= 0:
            close_reader(self.fd)

    def open(self, path: str, flags: int) -> int:
        """Open a file or folder below the root. ``path`` is a checked key or one of the store's own names."""
        *folders, name = path.split("/")
        fd = self.fd
        try:
            for folder in folders:
                outer, fd = fd, os.open(folder, OPEN_FOLDER, dir_fd=fd)
                if outer != self.fd:
                    close_reader(outer)
            return os.open(name, flags, dir_fd=fd)
        finally:
            if fd != self.fd:
                close_reader(fd)

    def make_folder(self, path: str) -> int:
        """Open a folder for use as ``dir_fd``; create it and its parents if they are missing. "" is the root.

        Raises:
            FileNotFoundError: another process removed one of these folders meanwhile, or the root itself is gone.
        """
        try:
            return self.open(path or ".", OPEN_FOLDER)
        except FileNotFoundError:
            if not path:
                raise
        parent, _, name = path.rpartition("/")
        with opened(self.make_folder(parent)) as parent_fd:
            try:
                os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
                if self._owner is not None:
                    # Another writer may have replaced it or denied access to it. fchown accepts no O_PATH descriptors.
                    with contextlib.suppress(OSError), opened(os.open(name, OPEN_LISTING, dir_fd=parent_fd)) as fd:
                        self.give(fd)
            except FileExistsError:
                pass
            return os.open(name, OPEN_FOLDER, dir_fd=parent_fd)

    def give(self, fd: int) -> None:
        """Change the owner of a new file or folder to the root's owner, if the root belongs to another user.

        Works by descriptor, so that no other file can be put in its place. Changes only files that belong to root: not
        files that an NFS server gave to another user (root_squash), nor files that such a user already had there.
        """
        if self._owner is not None:
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_uid == 0:
                    os.fchown(fd, *self._owner)

    def space(self) -> tuple[int, int] | None:
        """Free bytes that this user may use and size of the file system; None: it reports no size (FUSE may not)."""
        status = os.fstatvfs(self.fd)
        return (status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize) if status.f_blocks else None

    def has_only_bytes(self) -> bool:
        """Whether the file system has free space, but all of its inodes are used up. False: not, or unknown."""
        try:
            status = os.fstatvfs(self.fd)
        except OSError:
            return False
        return status.f_bavail > 0 and status.f_files > 0 and status.f_favail == 0

    def is_removed(self) -> bool:
        """Whether the folder was removed or moved since it was opened, so its path is now absent or another folder."""
        try:
            opened = os.fstat(self.fd)
        except OSError:
            return True  # NFS reports a removed folder as ESTALE
        # Not the link count: on overlayfs, that of a folder from an image layer is not 0 even after it was removed.
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # unknown
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)


def make_folders(path: str) -> None:
    """Create a folder and its parents, each with mode 0700. (``os.makedirs`` applies the mode only to the last one.)"""
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, FOLDER_MODE)
        except FileNotFoundError:
            make_folders(os.path.dirname(path))
            os.mkdir(path, FOLDER_MODE)


# ---- blobs -----------------------------------------------------------------------------------------------------------


def read_blob(root: RootFolder, key: str, parts: Sequence[memoryview], look: Look | None = None) -> int:
    """Fill the parts with a file of exactly their size, and return it. ``look``: see ``tiers.store.SupportsPieces``.

    Raises:
        OSError: ENOENT if the file does not exist.
        BlobCorruptError: the file has another size (the parts are untouched, unless it shrank while it was being read),
            or is not a regular file.
    """
    fd = root.open(key, OPEN_READ)
    try:
        stored = regular_size(fd, key)
        size = parts_size(parts)
        if stored != size:
            raise BlobCorruptError(f"{stored} bytes are stored, {size} were asked for", key=key)
        read_all(fd, parts, key, look, size)
        return size
    finally:
        close_reader(fd)


def read_tail(root: RootFolder, key: str, length: int) -> tuple[int, bytes]:
    """Return the size of a file and its last ``min(length, size)`` bytes. Raises the same errors as ``read_blob``."""
    with opened(root.open(key, OPEN_READ)) as fd:
        size = regular_size(fd, key)
        tail = bytearray(min(length, size))
        if transfer(os.preadv, fd, [memoryview(tail)], size - len(tail)) != len(tail):
            raise BlobCorruptError("the file was truncated while it was being read", key=key)
        return size, bytes(tail)


def blob_size(root: RootFolder, key: str) -> int | None:
    """Size of a file in bytes; None if it is not a regular file."""
    fd = root.open(key, OPEN_STAT)
    try:
        status = os.fstat(fd)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    finally:
        close_reader(fd)


def regular_size(fd: int, key: str) -> int:
    """Size of an open regular file in bytes."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BlobCorruptError("it is not a regular file", key=key)
    return status.st_size


def remove_blob(root: RootFolder, key: str) -> None:
    """Unlink the file or link under ``key``, never the target of a link. A folder holds other keys and stays."""
    folder, _, name = key.rpartition("/")
    with opened(root.open(folder or ".", OPEN_FOLDER)) as dir_fd, contextlib.suppress(IsADirectoryError):
        os.unlink(name, dir_fd=dir_fd)
