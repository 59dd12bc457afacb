"""Publishes blobs atomically on a file system: a blob is visible either complete or not at all, even if a writer dies.

Way 1, for a new blob on a file system with unnamed files (O_TMPFILE: ext4, XFS, Btrfs, tmpfs, overlayfs)::

    openat(root, folder)        created with its parents if missing, 0700
    openat(folder, O_TMPFILE)   0600; the file has no name, so a writer that dies leaves nothing
    pwritev                     directly from the parts, until all is written (in pieces if the caller passed ``look``)
    linkat(folder, name)        through /proc; publishes. EEXIST: the key was stored before, which is success
    close

Way 2, for a blob that replaces another (linkat never replaces), and for every blob without unnamed files (NFS, FUSE)::

    openat(<root>/.tmp, private name, O_CREAT|O_EXCL)
    pwritev
    close                       before publishing, because NFS reports a failed write only here
    renameat(private, name)     to replace; otherwise linkat(private, name) and unlinkat(private)

CPU cost per blob on tmpfs (Linux 6.18), beyond plain open, pwritev and close of the same file: unnamed 10 µs, private
and renamed 13 µs, private and linked 14 µs. Only way 1 leaves nothing behind when the writer is killed.

In way 2, a writer that dies leaves its private file. The file's name, ``<host>-<boot>-<pid namespace>-<pid>-<start
time>-<random>-<count>``, identifies the writer. The next store that opens the root removes the file: at once if the
writer was a process of this host that has ended, and after ``cleanup.STALE_AGE_S_MAX`` if it was on another host.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import StoreConfigError, StoreFullError
from .posix import (
    FILE_MODE,
    RootFolder,
    opened,
)

PRIVATE_FOLDER = ".tmp"
#: Names made by private_name and, with a leading dot, names made by ``stores.fsspec`` for the same folder.
PRIVATE_NAME = re.compile(r"(?:.+-[0-9a-f]{8}-[0-9]+)?-[0-9]+-[0-9]*-[0-9a-f]{8}-[0-9]+|\.[0-9a-f]{32}")

OPEN_UNNAMED = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
OPEN_PRIVATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
FDS = "/proc/self/fd"  # gives a name to an unnamed file
# EISDIR: the kernel does not support the flag. EINVAL: from some FUSE servers.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Publisher:
    """Publishes blobs below a root. Any thread may call. Holds no descriptor, so it works in forked children.

    Args:
        unnamed_files: use O_TMPFILE if the file system supports it. False: do not try, it is known to be unsupported.
    """

    def __init__(self, *, unnamed_files: bool = True) -> None:
        # Any thread may set this to False. A thread that still reads True finds out by its own failed attempt.
        self._unnamed_files = unnamed_files and os.path.isdir(FDS)  # /proc may be hidden

    def publish(self, root: RootFolder, key: str, write: Callable[[int], None], *, overwrite: bool) -> bool:
        """Store a file under ``key``. Returns False if the key exists and was left unchanged.

        Args:
            write: fills an empty file, given its descriptor. Its exceptions are passed on.

        Raises:
            FileNotFoundError: the root, or a folder on the path, was removed meanwhile.
            OSError: any other failure.
        """
        folder, _, name = key.rpartition("/")
        with opened(root.make_folder(folder)) as dir_fd:
            # This check only saves needless writes. If two writers both find no file, the link call decides.
            if not overwrite and os.access(name, os.F_OK, dir_fd=dir_fd, follow_symlinks=False):
                return False
            if not overwrite and self._unnamed_files and (fd := self._open_unnamed(dir_fd)) >= 0:
                return _publish_unnamed(root, fd, dir_fd, name, write)
            return _publish_private(root, dir_fd, name, write, overwrite=overwrite)

    def _open_unnamed(self, dir_fd: int) -> int:
        """Open an unnamed file and return its descriptor; -1 if this file system has no unnamed files."""
        try:
            return os.open(".", OPEN_UNNAMED, FILE_MODE, dir_fd=dir_fd)
        except OSError as e:
            if e.errno not in _NO_UNNAMED_FILES:
                raise
            self._unnamed_files = False
            return -1


def _publish_unnamed(root: RootFolder, fd: int, dir_fd: int, name: str, write: Callable[[int], None]) -> bool:
    """Write an unnamed file and link it. Closes ``fd``. Returns False if the name exists already."""
    published = False
    try:
        root.give(fd)
        write(fd)
        # With a dir_fd Python calls linkat with AT_SYMLINK_FOLLOW. AT_EMPTY_PATH in place of /proc would save 0.3 µs of
        # 20, but needs a capability before Linux 6.10.
        published = _link(f"{FDS}/{fd}", name, dst_dir_fd=dir_fd)
    finally:
        try:
            os.close(fd)
        except OSError:
            # A FUSE server may reject the data only at close, after the file was published.
            if published:
                _unlink_quietly(name, dir_fd)
            raise
    return published


def _publish_private(
    root: RootFolder, dir_fd: int, name: str, write: Callable[[int], None], *, overwrite: bool
) -> bool:
    with opened(_make_own_folder(root, PRIVATE_FOLDER)) as temp_fd:
        temp = private_name()
        fd = os.open(temp, OPEN_PRIVATE, FILE_MODE, dir_fd=temp_fd)
        renamed = False
        try:
            try:
                root.give(fd)
                write(fd)
            finally:
                os.close(fd)
            if not overwrite:
                return _link(temp, name, src_dir_fd=temp_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
            os.rename(temp, name, src_dir_fd=temp_fd, dst_dir_fd=dir_fd)
            renamed = True
            return True
        finally:
            if not renamed:
                _unlink_quietly(temp, temp_fd)


class FreeSpace:
    """Keeps this process's writers from using a reserve of free space. Any thread may call.

    Each put reads the free space. This does not cover other processes' puts in progress at that moment: one block for
    each of them, including the processes of a tier.
    """

    def __init__(self, min_free_bytes: int) -> None:
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self._in_flight_bytes = 0  # owned by the lock

    @contextlib.contextmanager
    def reserved(self, root: RootFolder, size: int, key: str) -> Iterator[None]:
        """Reserve room for a blob while it is being written.

        Raises:
            StoreFullError: the blob would use part of the reserve.
            OSError: the free space cannot be read.
        """
        with self._lock:
            # Bytes being written may be counted twice, as reserved and as written; this errs on the safe side.
            # A file system that does not report its size (all zeros) is not full: it refuses blocks by itself.
            free, _ = root.space() or (sys.maxsize, 0)
            if free - self._in_flight_bytes - size < self._min_free_bytes:
                raise StoreFullError(
                    f"{size} bytes would leave less than min_free_bytes = {self._min_free_bytes} free", key=key
                )
            self._in_flight_bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._in_flight_bytes -= size


def storage_time(root: RootFolder) -> float:
    """Unix seconds by the clock that sets files' times below a root: on NFS, the server's clock, not this host's."""
    with opened(_make_own_folder(root, PRIVATE_FOLDER)) as dir_fd:
        name = private_name()
        try:
            with opened(os.open(name, OPEN_PRIVATE, FILE_MODE, dir_fd=dir_fd)) as fd:
                return os.fstat(fd).st_mtime
        finally:
            _unlink_quietly(name, dir_fd)  # after the close: NFS renames a file that is unlinked while it is open


def private_name() -> str:
    """A file name for ``PRIVATE_FOLDER`` that no other writer uses."""
    return f"{_writer(os.getpid())}-{next(_count)}"


_count = itertools.count()


@functools.cache
def _writer(pid: int) -> str:
    """The part of a private file's name that identifies the process. Computed anew in a forked child."""
    return f"{_machine()}-{pid}-{_start_time(pid)}-{secrets.token_hex(4)}"


def is_writer_dead(name: str) -> bool:
    """Whether the writer of a private file is known to have ended: it was a process of this host and pid namespace."""
    theirs, *rest = name.rsplit("-", 4)
    # If the pid was reused for another process, the start time differs.
    return len(rest) == 4 and theirs == _machine() and _start_time(int(rest[0])) != rest[1]


def _machine() -> str:
    """ID of host, boot and pid namespace, in which pid and start time identify one process."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    boot_id = _read_line("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename}-{boot_id[:8]}-{namespace}".replace("/", "_")


def _start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "" if there is no such process."""
    try:
        line = _read_line(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return line.rpartition(")")[2].split()[19]  # the program's name, in parentheses, may contain any character


def _read_line(path: str) -> str:
    with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return os.read(fd, 4096).decode(errors="replace").rstrip()


def _link(source: str, name: str, **folders: Any) -> bool:
    """Give a file a name. Returns False if the name exists already."""
    try:
        os.link(source, name, **folders)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno in NO_HARD_LINKS:  # from link(2), EPERM means this too; missing rights are EACCES
            raise StoreConfigError(
                f"this file system has no hard links ({errno.errorcode[e.errno]}), which kvtiers needs to publish "
                "blocks; use another file system (vfat, exFAT and some FUSE mounts have no hard links)"
            ) from e
        raise
    return True


def _make_own_folder(root: RootFolder, name: str) -> int:
    try:
        return root.make_folder(name)
    except OSError as e:
        if e.errno in (errno.ENOTDIR, errno.ELOOP):  # callers would take this errno for an absent key
            raise StoreConfigError(f"{name!r} in the root must be a folder") from e
        raise


def _unlink_quietly(name: str, dir_fd: int) -> None:
    """Unlink, ignoring errors: a file left in the private folder is swept after this process has ended."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError:
        pass
