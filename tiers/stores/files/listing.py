"""Lists the blobs below a root folder.

System calls go through the module-level name ``os``, as in ``posix``. Functions raise OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import TypeVar

from ...errors import InvalidKeyError
from ...store import KeyInfo, check_key
from ..os_errors import is_absent
from .posix import OPEN_LISTING, RootFolder, close_reader, opened

T = TypeVar("T")

#: Errors of a damaged file or folder, or of a mount whose server is away, while the root still answers. ext4 and XFS
#: report a wrong checksum with EUCLEAN and EBADMSG.
DAMAGED = (
    *(errno.EIO, errno.EUCLEAN, errno.EBADMSG),
    *(errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.ENODEV),
)
DAMAGED_MAX = 16  # damaged entries in one listing; more mean that the device or its connection is gone
# Maximum depth of folders. kvtiers uses only a few levels, and a deep foreign tree must not use up all descriptors.
FOLDERS_DEEP_MAX = 64


def walk(root: RootFolder, prefix: str, on_skipped: Callable[[str, OSError], None]) -> Iterator[KeyInfo]:
    """Yield the regular files below the root whose keys start with ``prefix``, folder by folder.

    One bad entry must not hide all others, so the listing skips:

    - dot names, symbolic links and names that are not valid keys;
    - folders that this user may not read: ``lost+found`` in a mount point, or folders left by a command run as root;
    - files and folders that are removed during the listing, by this host or another;
    - damaged files and folders: access fails twice with an error in ``DAMAGED``, while the root still answers. The
      listing of a damaged folder ends at the damage.

    Holds one open listing (two descriptors) per level of folders, however many files there are.

    Args:
        on_skipped: called for each entry that was skipped for lack of permission or because of damage, with its name
            relative to the root and the error. Such errors are raised for the root itself, for the folder that
            ``prefix`` names, and for damage beyond ``DAMAGED_MAX`` entries.
    """
    start, slash, name_prefix = prefix.rpartition("/")
    try:
        fd = root.open(check_key(start) if slash else ".", OPEN_LISTING)
    except InvalidKeyError:
        return
    except OSError as e:
        if is_absent(e):
            return
        raise
    yield from _Walk(root, on_skipped).list_folder(fd, start + slash, name_prefix)


def folder_names(root: RootFolder) -> list[str]:
    """Names of the folders directly below the root that may hold blobs."""
    with opened(root.open(".", OPEN_LISTING)) as fd, os.scandir(fd) as entries:
        return [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]


class _Walk:
    """One listing. See ``walk``."""

    def __init__(self, root: RootFolder, on_skipped: Callable[[str, OSError], None]) -> None:
        self._root = root
        self._on_skipped = on_skipped
        self._damaged_count = 0

    def list_folder(self, fd: int, prefix: str, name_prefix: str = "", depth: int = 0) -> Iterator[KeyInfo]:
        """Yield the files below an open folder whose keys start with ``prefix``, and close the folder."""
        try:
            with closing(_entries_of(fd)) as entries:
                found: KeyInfo | int | OSError | None
                while (entry := self._next(entries, fd, prefix, is_start=depth == 0)) is not None:
                    if entry.name[0] == "." or not entry.name.startswith(name_prefix):
                        continue
                    key = prefix + entry.name
                    try:
                        found = _look(fd, entry, key)
                    except OSError as e:
                        found = self._retry(partial(_look, fd, entry, key), e)
                    if isinstance(found, KeyInfo):
                        yield found
                    elif isinstance(found, OSError):
                        self._skip(key, found)
                    elif found is not None and depth >= FOLDERS_DEEP_MAX:
                        close_reader(found)
                    elif found is not None:
                        yield from self.list_folder(found, f"{key}/", depth=depth + 1)
        finally:
            close_reader(fd)

    def _next(
        self, entries: Iterator[os.DirEntry[str]], fd: int, prefix: str, *, is_start: bool
    ) -> os.DirEntry[str] | None:
        """Return the next entry of a folder. None: the folder has ended, or a subfolder is damaged from here on."""
        try:
            return next(entries, None)
        except OSError as e:
            if is_start:
                raise
            # Read the whole folder again to see whether it is damaged. Yield no entry: some were yielded before.
            again = self._retry(lambda: deque(_entries_of(fd), 0), e)
            if not isinstance(again, OSError):
                raise  # the folder can be read after all, but its remaining entries were not listed
            self._skip(prefix.rstrip("/"), again)
            return None

    def _retry(self, call: Callable[[], T], e: OSError) -> T | OSError:
        """Repeat a call that failed with an error in ``DAMAGED``; return its result or error. Return any other ``e``.

        Raises:
            OSError: the root does not answer either. (On a soft mount every call fails with EIO while the server is
                away.) Its free space is requested, because clients do not cache that.
        """
        if e.errno not in DAMAGED:
            return e
        os.fstatvfs(self._root.fd)
        try:
            return call()
        except OSError as again:
            return again

    def _skip(self, name: str, e: OSError) -> None:
        """Note an entry that cannot be listed, or raise its error."""
        if e.errno == errno.ESTALE:  # another host removed the entry
            os.fstat(self._root.fd)  # if the root is gone, a listing that ends without an error would be empty
            return
        if not isinstance(e, PermissionError):
            self._damaged_count += 1
            if e.errno not in DAMAGED or self._damaged_count > DAMAGED_MAX:
                raise e
        self._on_skipped(name, e)


def _entries_of(fd: int) -> Generator[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        yield from entries


def _look(fd: int, entry: os.DirEntry[str], key: str) -> KeyInfo | int | None:
    """Return a file's KeyInfo or a folder's descriptor. None: other kinds of entries, invalid keys, removed entries."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return os.open(entry.name, OPEN_LISTING, dir_fd=fd)
        if not entry.is_file(follow_symlinks=False):
            return None
        check_key(key)
        status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
    except InvalidKeyError:
        return None
    except OSError as e:
        if is_absent(e):
            return None
        raise
    return KeyInfo(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None
