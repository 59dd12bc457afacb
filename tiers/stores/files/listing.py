"""Lists the blobs below a root folder.

System calls go through the module-level name ``os``, as in ``posix``. Functions raise OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from ...errors import InvalidKeyError
from ...store import KEY_PART_LENGTH_MAX, KeyInfo, check_key
from ..os_errors import is_absent
from .mounts import is_mount_point
from .posix import OPEN_LISTING, RootFolder, close_reader

T = TypeVar("T")

DAMAGED = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # ext4 and XFS report a wrong checksum with the last two
DAMAGED_MAX = 16  # damaged entries in one listing; more mean that the device or its connection is gone
#: Errors of a mount that has lost its server. From the root's own mount, they do not concern a single folder.
UNREACHABLE = (errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.ENODEV)


def walk(root: RootFolder, prefix: str, on_skipped: Callable[[str, OSError], None]) -> Iterator[KeyInfo]:
    """Yield the regular files below the root whose key starts with ``prefix``, in the order of the folders.

    One bad entry must not hide all others, so the listing skips:

    - dot names, symbolic links and names that are not valid keys;
    - folders that this user may not read: ``lost+found`` in a mount point, or folders left by a command run as root;
    - files and folders that are removed during the listing, by this host or another;
    - damaged files and folders: they fail twice while the root still answers. (EIO alone is not enough: on a soft mount
      every call fails with EIO while the server is away.) The listing of a damaged folder ends at the damage;
    - mounts that have lost their server.

    Holds one open listing (two descriptors) per level of folders, however many files there are.

    Args:
        on_skipped: called with the name, relative to the root, and the error of each entry that was skipped for lack of
            permission or because of damage. Such errors are raised for the root itself, for the folder that ``prefix``
            names, and for damage beyond ``DAMAGED_MAX`` entries.
    """
    start, slash, name_prefix = prefix.rpartition("/")
    if slash:
        try:
            check_key(start)
        except InvalidKeyError:
            return
    try:
        stack = [_Listing(root.open(start or ".", OPEN_LISTING), prefix[: len(start) + len(slash)], start.isascii())]
    except OSError as e:
        if is_absent(e):
            return
        raise
    damaged_count = 0

    def skip(name: str, e: OSError) -> None:
        nonlocal damaged_count
        is_damaged = e.errno in DAMAGED or (e.errno in UNREACHABLE and _is_mounted(root, name))
        damaged_count += is_damaged
        if isinstance(e, PermissionError) or (is_damaged and damaged_count <= DAMAGED_MAX):
            on_skipped(name, e)
        else:
            _raise_unless_stale(e, root)

    try:
        while stack:
            listing = stack[-1]
            try:
                entry = next(listing.entries, None)
            except OSError as e:
                if len(stack) == 1:
                    raise
                again = _retry_if_damaged(listing.read_again, e, root)
                if again is None:
                    raise  # the folder can be read after all, but the rest of it was not listed
                skip(listing.prefix.rstrip("/"), again)
                entry = None
            if entry is None:
                stack.pop().close()
            elif entry.name[0] == "." or (len(stack) == 1 and not entry.name.startswith(name_prefix)):
                continue
            else:
                found: KeyInfo | _Listing | OSError | None
                try:
                    found = listing.find(entry)
                except OSError as e:
                    found = _retry_if_damaged(partial(listing.find, entry), e, root)
                if isinstance(found, KeyInfo):
                    yield found
                elif isinstance(found, _Listing):
                    stack.append(found)
                elif found is not None:
                    skip(listing.prefix + entry.name, found)
    finally:
        for listing in stack:
            listing.close()


def folder_names(root: RootFolder) -> list[str]:
    """Names of the folders directly below the root that may hold blobs."""
    fd = root.open(".", OPEN_LISTING)
    try:
        with os.scandir(fd) as entries:
            return [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    finally:
        os.close(fd)


class Failures:
    """Counts the errors of single files while a folder is processed, so that a few bad files do not stop the rest."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, e: OSError) -> None:
        """Count an error. Raise it unless it is EBUSY or damage, and one of the first ``DAMAGED_MAX``."""
        self._count += 1
        if e.errno not in (*DAMAGED, errno.EBUSY) or self._count > DAMAGED_MAX:
            raise e


def _retry_if_damaged(call: Callable[[], T], e: OSError, root: RootFolder) -> T | OSError:
    """Repeat a call that failed with an error in ``DAMAGED``. Returns its result or error; any other ``e`` as it is.

    Raises:
        OSError: the root does not answer either. Its free space is requested, because clients do not cache that.
    """
    if e.errno not in DAMAGED:
        return e
    os.fstatvfs(root.fd)
    try:
        return call()
    except OSError as again:
        return again


def _raise_unless_stale(e: OSError, root: RootFolder) -> None:
    """Raise unless the error is NFS's for a file or folder that another host removed, and the root still exists."""
    if e.errno != errno.ESTALE:
        raise e
    os.fstat(root.fd)  # if the root is gone, a listing that ends without an error would mean that nothing is stored


def _is_mounted(root: RootFolder, name: str) -> bool:
    try:
        path = os.path.join(os.readlink(f"/proc/self/fd/{root.fd}"), name)
    except OSError:
        return False
    return is_mount_point(path)


# Maximum depth of folders. kvtiers uses only a few levels, and a deep foreign tree must not use up all descriptors.
FOLDERS_DEEP_MAX = 64


class _Listing:
    """A folder being listed; owns ``fd``.

    Attributes:
        is_plain: ``prefix`` has only characters that need no check. If a name has only such characters too, prefix and
            name joined are a valid key (see ``check_key``) unless they are too long.
    """

    __slots__ = ("entries", "fd", "is_plain", "prefix")

    def __init__(self, fd: int, prefix: str, is_plain: bool) -> None:
        self.fd = fd
        self.prefix = prefix
        self.is_plain = is_plain
        try:
            self.entries = os.scandir(fd)
        except BaseException:
            close_reader(fd)
            raise

    def find(self, entry: os.DirEntry[str]) -> KeyInfo | _Listing | None:
        """Return a file's KeyInfo or a folder's _Listing; None for anything else."""
        name = entry.name
        # Calling check_key for every file would take a tenth of a listing's time.
        is_plain = self.is_plain and name.isascii() and name.isprintable() and "\\" not in name
        if entry.is_dir(follow_symlinks=False):
            return self.enter(name, is_plain)
        return self.info(name, is_plain) if entry.is_file(follow_symlinks=False) else None

    def enter(self, name: str, is_plain: bool) -> _Listing | None:
        """Open a subfolder; None if it was removed or replaced since it was listed, or is too deep for blobs."""
        if self.prefix.count("/") >= FOLDERS_DEEP_MAX:
            return None
        try:
            return _Listing(os.open(name, OPEN_LISTING, dir_fd=self.fd), f"{self.prefix}{name}/", is_plain)
        except OSError as e:
            if is_absent(e):
                return None
            raise

    def info(self, name: str, is_plain: bool) -> KeyInfo | None:
        """Return the KeyInfo of a file; None if it was removed since it was listed, or its name is not a valid key."""
        key = self.prefix + name
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if not is_plain or len(key) > KEY_PART_LENGTH_MAX:
                check_key(key)
        except (FileNotFoundError, InvalidKeyError):
            return None
        return KeyInfo(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def read_again(self) -> None:
        """Read the whole folder again. Its entries are not yielded, because some of them were yielded before."""
        self.entries.close()  # two iterators on one descriptor would share their position
        self.entries = os.scandir(self.fd)
        for _ in self.entries:
            pass

    def close(self) -> None:
        self.entries.close()
        close_reader(self.fd)
