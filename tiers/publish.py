"""How a blob becomes visible on a file system: whole, at once, or not at all, also when the writer dies.

Where the file system has unnamed files (O_TMPFILE: ext4, XFS, Btrfs, tmpfs, overlayfs)::

    openat2(root, folder)           made with its parents where missing, 0700
    openat(folder, O_TMPFILE)       0600; no name, so a writer that dies leaves nothing
    pwritev                         straight from the parts, until all is written
    [fdatasync]                     durability "data"
    linkat(folder, name)            publishes. EEXIST: somebody stored the key before; that is success
    close
    [fsync(folder)]                 durability "data"

To replace a blob, the file is linked under a private name in ``<root>/.tmp`` and renamed over the old one: linkat
alone never replaces.

Where it has none (NFS, FUSE), the file is made under a private name with O_EXCL in ``<root>/.tmp``, written, closed
(NFS reports a failed write there), and linked to its name and unlinked, or renamed over the old blob.

Measured on tmpfs with 128 KiB blobs by 2 threads: unnamed + linkat is as fast as a private name + renameat2, and
faster than a private name + link + unlink; only the first leaves nothing behind when it is killed.

A private name is ``<host>-<boot>-<pid namespace>-<pid>-<start time>-<store>-<count>``. Files of dead writers are
removed when the next store opens the root: at once where the writer was on this host (its pid is gone, or belongs to
a process that started at another time), after ``STALE_AGE_S_MAX`` where it was not.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Sequence

from tiers.posix import FILE_MODE, OPEN_FOLDER, OPEN_LISTING, RootFolder, write_all

PRIVATE_FOLDER = ".tmp"
QUARANTINE_FOLDER = ".quarantine"
STALE_AGE_S_MAX = 3600.0  # no writer takes an hour for one blob, and clocks of hosts are nearer than that

OPEN_UNNAMED = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
OPEN_NAMED = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
# EISDIR: a kernel that does not know the flag. EINVAL: some FUSE servers.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


class Publisher:
    """Writes blobs below a root. Any thread may call; holds no descriptor, so it works in forked children.

    Args:
        durable: a blob that was published survives a power cut.
        unnamed_files: use O_TMPFILE where the file system has it. False: it is known not to.
    """

    def __init__(self, *, durable: bool = False, unnamed_files: bool = True) -> None:
        self._durable = durable
        # Any thread may set it, to False only; one that still reads True finds out for itself.
        # Without /proc an unnamed file cannot be given a name.
        self._unnamed_files = unnamed_files and os.path.isdir("/proc/self/fd")
        self._names = PrivateNames()

    def publish(self, root: RootFolder, key: str, parts: Sequence[memoryview], *, overwrite: bool) -> None:
        """Store the joined parts under ``key``.

        Raises:
            FileNotFoundError: a folder on the way, or the root, was removed meanwhile.
            OSError: anything else.
        """
        folder, _, name = key.rpartition("/")
        dir_fd = root.make_folder(folder)
        try:
            fd = self._open_unnamed(dir_fd) if self._unnamed_files else -1
            if fd < 0:
                self._publish_named(root, dir_fd, name, parts, overwrite)
            elif overwrite:
                self._replace_unnamed(root, fd, dir_fd, name, parts)
            else:
                self._publish_unnamed(fd, dir_fd, name, parts)
            if self._durable:
                _sync_folder(dir_fd)
        finally:
            os.close(dir_fd)

    def quarantine(self, root: RootFolder, key: str, *, count_max: int) -> None:
        """Move what is under ``key`` into the quarantine folder, or delete it where that has ``count_max`` entries.

        Raises:
            FileNotFoundError: nothing is there.
        """
        folder, _, name = key.rpartition("/")
        dir_fd = root.open(folder or ".", OPEN_FOLDER)
        try:
            aside_fd = root.make_folder(QUARANTINE_FOLDER)
            try:
                if _entry_count(aside_fd) >= count_max:
                    os.unlink(name, dir_fd=dir_fd)
                else:
                    aside = f"{self._names.make()}-{name}".encode()[:255].decode(errors="ignore")  # NAME_MAX
                    os.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=aside_fd)
            finally:
                os.close(aside_fd)
        finally:
            os.close(dir_fd)

    def _open_unnamed(self, dir_fd: int) -> int:
        """-1 where this file system has no unnamed files."""
        try:
            return os.open(".", OPEN_UNNAMED, FILE_MODE, dir_fd=dir_fd)
        except OSError as e:
            if e.errno not in _NO_UNNAMED_FILES:
                raise
            self._unnamed_files = False
            return -1

    def _publish_unnamed(self, fd: int, dir_fd: int, name: str, parts: Sequence[memoryview]) -> None:
        """Owns ``fd``."""
        published = False
        try:
            self._write(fd, parts)
            try:
                os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=dir_fd)
                published = True
            except FileExistsError:
                pass
        finally:
            try:
                os.close(fd)
            except OSError:
                # Only FUSE can fail here; its bytes may be missing from what was just published.
                if published:
                    _unlink_quietly(name, dir_fd)
                raise

    def _replace_unnamed(
        self, root: RootFolder, fd: int, dir_fd: int, name: str, parts: Sequence[memoryview]
    ) -> None:
        """Owns ``fd``."""
        try:
            self._write(fd, parts)
            temp_fd = root.make_folder(PRIVATE_FOLDER)
            try:
                temp = self._names.make()
                os.link(f"/proc/self/fd/{fd}", temp, dst_dir_fd=temp_fd)
                self._rename(temp, temp_fd, name, dir_fd)
            finally:
                os.close(temp_fd)
        finally:
            os.close(fd)

    def _publish_named(
        self, root: RootFolder, dir_fd: int, name: str, parts: Sequence[memoryview], overwrite: bool
    ) -> None:
        temp_fd = root.make_folder(PRIVATE_FOLDER)
        try:
            temp = self._names.make()
            fd = os.open(temp, OPEN_NAMED, FILE_MODE, dir_fd=temp_fd)
            try:
                try:
                    self._write(fd, parts)
                finally:
                    os.close(fd)
                if overwrite:
                    os.rename(temp, name, src_dir_fd=temp_fd, dst_dir_fd=dir_fd)
                else:
                    self._link
            except BaseException:
                _unlink_quietly(temp, temp_fd)
                raise
        finally:
            os.close(temp_fd)
