"""What stores on a file system share: a root folder that nothing leads out of, blobs in it, errno -> errors.

Everything below a root is reached from the root's own descriptor, and no symbolic link is followed on the way, so
whoever may write inside the root (a tenant, another pod) cannot make us read or write anywhere else.

Reading a blob is four system calls::

    openat2(root, key, O_RDONLY|O_NOFOLLOW|O_NONBLOCK|O_CLOEXEC, BENEATH|NO_SYMLINKS|NO_MAGICLINKS)
    fstat       a regular file of exactly the asked size, or the parts are not touched
    preadv      straight into the parts, until they are full
    close

O_NONBLOCK because opening a FIFO would wait for its writer. Writing is in ``publish``.

This module, ``vectored_io``, ``publish``, ``listing`` and ``cleanup`` make every system call of these stores, all
through the module-level names ``os``, ``openat2`` and ``link_open_file``: ``tiers.testing.faults.SyscallFaults``
replaces these to make the n-th call fail. Functions here raise OSError, unless they say otherwise; the store turns it
into a StoreError with ``store_error``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import struct
from collections.abc import Mapping, Sequence

from kvtiers.tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    InvalidKeyError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)
from kvtiers.tiers.store import Look, parts_size
from kvtiers.tiers.stores.vectored_io import read_all, transfer

FOLDER_MODE = 0o700
FILE_MODE = 0o600

# O_PATH: a folder we may search but not read will do, and a device is not opened by asking for its size.
OPEN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_LISTING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OPEN_STAT = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

STDERR = 2  # C libraries print to this descriptor, whatever is behind it

ERRORS: Mapping[int, type[StoreError]] = {
    errno.ENOENT: BlobNotFoundError,
    errno.ENOTDIR: BlobCorruptError,  # a file, or (stepwise) a symbolic link, where a folder should be
    errno.ELOOP: BlobCorruptError,  # a symbolic link
    errno.EISDIR: BlobCorruptError,
    errno.ENXIO: BlobCorruptError,  # a socket
    errno.ENODEV: BlobCorruptError,  # a device without a driver
    errno.ENAMETOOLONG: InvalidKeyError,  # a file system with a limit below check_key's
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EFBIG: StoreConfigError,  # RLIMIT_FSIZE, or what the file system takes: removing blocks gains nothing
    errno.EMLINK: StoreConfigError,  # a folder's limit of subfolders, likewise
    errno.EACCES: StorePermissionError,
    errno.EPERM: StorePermissionError,
    errno.EROFS: StorePermissionError,
    errno.EXDEV: StoreConfigError,  # another file system is mounted below the root
    errno.EOPNOTSUPP: StoreConfigError,  # a file system without hard links
    errno.ENOSYS: StoreConfigError,
}
"""errno -> error. What is not here (EIO, ESTALE, EMFILE, ENOMEM, …) may pass: StoreUnavailableError."""


def store_error(e: OSError, key: str) -> StoreError:
    """The StoreError for an OSError that was met while working on ``key``."""
    kind = ERRORS.get(e.errno or 0, StoreUnavailableError)
    return kind(f"{e.strerror or e} ({errno.errorcode.get(e.errno or 0, 'no errno')})", key=key)


def is_absent(e: OSError) -> bool:
    """Whether no file can be there: nothing is, or a file or a symbolic link is where a folder should be."""
    return e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


# ---- a folder that nothing leads out of ------------------------------------------------------------------------------

_OPENAT2 = 437  # the number is the same on every architecture Linux added it to in 5.6
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_AT_EMPTY_PATH = 0x1000
_HOW = struct.Struct("=QQQ")  # struct open_how: flags, mode, resolve


@functools.cache
def _how(flags: int) -> bytes:
    return _HOW.pack(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)


# ctypes lets other threads run during a call.
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall  # libc has no wrapper for openat2
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
_linkat = _libc.linkat  # os.link knows no AT_EMPTY_PATH
_linkat.restype = ctypes.c_int
_linkat.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]


def openat2(dir_fd: int, path: str, flags: int) -> int:
    """Open ``path`` below ``dir_fd``, following no symbolic link. Returns a descriptor."""
    while True:
        name = path.encode() if path.isascii() else os.fsencode(path)  # a third of the time
        fd: int = _syscall(_OPENAT2, dir_fd, name, _how(flags), _HOW.size)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)


def link_open_file(fd: int, name: str, dir_fd: int) -> None:
    """Give an open file a name. Before Linux 6.10 it takes CAP_DAC_READ_SEARCH; without it is ENOENT."""
    if _linkat(fd, b"", dir_fd, os.fsencode(name), _AT_EMPTY_PATH) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def open_stepwise(dir_fd: int, path: str, flags: int) -> int:
    """As ``openat2``, one component after the other: for kernels before 5.6 and sandboxes that refuse the call."""
    *folders, name = path.split("/")
    fd = dir_fd
    try:
        for folder in folders:
            outer, fd = fd, os.open(folder, OPEN_FOLDER, dir_fd=fd)
            if outer != dir_fd:
                close_reader(outer)
        return os.open(name, flags, dir_fd=fd)
    finally:
        if fd != dir_fd:
            close_reader(fd)


def openat2_works(dir_fd: int) -> bool:
    """Whether this kernel and sandbox have openat2."""
    try:
        close_reader(openat2(dir_fd, ".", OPEN_FOLDER))
    except OSError:
        return False
    return True


def occupy_standard_streams() -> None:
    """Have descriptors 0 to 2 lead to /dev/null where they are closed, for this process and those it starts.

    What is opened next would get such a number, also as the copy that ``mmap`` keeps, and what libraries print to
    stderr would overwrite it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def close_reader(fd: int) -> None:
    """Close a descriptor nothing was written through. It is gone whatever close returns, which then concerns nobody."""
    try:
        os.close(fd)
    except OSError:
        pass


def _passes_by_rights() -> bool:
    """Whether CAP_DAC_OVERRIDE is in effect: who lacks it could not use what he has given away."""
    try:
        with open("/proc/thread-self/status") as f:
            return any(line.startswith("CapEff:") and int(line[7:], 16) >> 1 & 1 for line in f)
    except OSError:
        return False


class RootFolder:
    """A store's root, opened once. Immutable, so any thread may use it; descriptors it returns are the caller's.

    Its descriptor lives as long as somebody holds the object: a store that forgets its root on ``close`` leaves
    calls that are still under way on an open descriptor, never on a number that means another file by now. The
    descriptor works in forked children.

    What a process of root's makes in a folder of another user is given to that user, as far as the file system lets it:
    else a command that is run by root would lock the engine out of what it left.

    Args:
        path: the folder. May have symbolic links above it, but is none itself.
        make: make it where it is missing, with mode 0700, and its parents.

    Raises:
        OSError: it is missing, no folder, or cannot be made.
    """

    def __init__(self, path: str, *, make: bool) -> None:
        self.fd = -1
        self._path = path
        try:
            self.fd = os.open(path, OPEN_FOLDER)
        except FileNotFoundError:
            if not make:
                raise
            make_folders(path)
            self.fd = os.open(path, OPEN_FOLDER)
        self._openat2 = openat2_works(self.fd)
        self._owner: tuple[int, int] | None = None
        if os.geteuid() == 0 and _passes_by_rights():
            status = os.fstat(self.fd)
            if status.st_uid != 0:
                self._owner = status.st_uid, status.st_gid

    def __del__(self) -> None:
        if self.fd >= 0:
            close_reader(self.fd)

    def open(self, path: str, flags: int) -> int:
        """Open what is there; ``path`` is a checked key or one of the store's own names."""
        return openat2(self.fd, path, flags) if self._openat2 else open_stepwise(self.fd, path, flags)

    def make_folder(self, path: str) -> int:
        """Open a folder for use as ``dir_fd``; it and its parents are made where they are missing. "" is the root.

        Raises:
            FileNotFoundError: somebody removed one meanwhile, or the root itself is gone.
        """
        try:
            return self.open(path or ".", OPEN_FOLDER)
        except FileNotFoundError:
            if not path:
                raise
        parent, _, name = path.rpartition("/")
        parent_fd = self.make_folder(parent)
        try:
            try:
                os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
                if self._owner is not None:
                    with contextlib.suppress(OSError):  # whoever may write there has replaced it, or let nobody in
                        fd = os.open(name, OPEN_LISTING, dir_fd=parent_fd)  # an O_PATH one cannot be given
                        try:
                            self.give(fd)
                        finally:
                            close_reader(fd)
            except FileExistsError:
                pass
            return os.open(name, OPEN_FOLDER, dir_fd=parent_fd)
        finally:
            close_reader(parent_fd)

    def give(self, fd: int) -> None:
        """Give what this process has just made to the root's owner, where that is somebody else.

        By descriptor, so that nothing else can be put in its place; and only what is root's, not what a server took for
        another's (root_squash), nor what such a user has there already.
        """
        if self._owner is not None:
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_uid == 0:
                    os.fchown(fd, *self._owner)

    def is_removed(self) -> bool:
        """Whether the folder was removed or moved since it was opened: its path leads to another one now, if any."""
        try:
            opened = os.fstat(self.fd)
        except OSError:
            return True  # ESTALE is how NFS says it
        if opened.st_nlink == 0:
            return True
        # overlayfs counts links to a folder of an image's layer also when it was removed.
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # nobody knows
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)


def make_folders(path: str) -> None:
    """Make a folder and those above it, each 0700. (``os.makedirs`` gives the mode to the last one only.)"""
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, FOLDER_MODE)
        except FileNotFoundError:
            make_folders(os.path.dirname(path))
            os.mkdir(path, FOLDER_MODE)


# ---- blobs -----------------------------------------------------------------------------------------------------------


def read_blob(root: RootFolder, key: str, parts: Sequence[memoryview], look: Look | None = None) -> None:
    """Fill the parts with a file of exactly their size. ``look``: see ``tiers.store.SupportsPieces``.

    Raises:
        OSError: ENOENT where nothing is there.
        BlobCorruptError: another size (the parts are untouched, unless it shrank meanwhile), or no regular file.
    """
    fd = root.open(key, OPEN_READ)
    try:
        stored = regular_size(fd, key)
        size = parts_size(parts)
        if stored != size:
            raise BlobCorruptError(f"{stored} bytes are stored, {size} were asked for", key=key)
        read_all(fd, parts, key, look, size)
    finally:
        close_reader(fd)


def read_tail(root: RootFolder, key: str, length: int) -> tuple[int, bytes]:
    """Size of a file and its last ``min(length, size)`` bytes. Raises as ``read_blob``."""
    fd = root.open(key, OPEN_READ)
    try:
        size = regular_size(fd, key)
        tail = bytearray(min(length, size))
        if transfer(os.preadv, fd, [memoryview(tail)], size - len(tail)) != len(tail):
            raise BlobCorruptError("it was cut while it was read", key=key)
        return size, bytes(tail)
    finally:
        close_reader(fd)


def blob_size(root: RootFolder, key: str) -> int | None:
    """Size of a file in bytes; None for what is no regular file."""
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
        raise BlobCorruptError("what is there is no regular file", key=key)
    return status.st_size


def remove_blob(root: RootFolder, key: str) -> None:
    """Unlink whatever is under ``key``, never what it leads to. A folder holds other keys and stays."""
    folder, _, name = key.rpartition("/")
    dir_fd = root.open(folder or ".", OPEN_FOLDER)
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        pass
    finally:
        close_reader(dir_fd)
