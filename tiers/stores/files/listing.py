"""Listing the blobs below a root folder.

System calls go through the module's name ``os``, as in ``posix``; functions raise OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from kvtiers.tiers.errors import InvalidKeyError
from kvtiers.tiers.store import KEY_PART_LENGTH_MAX, KeyInfo, check_key
from kvtiers.tiers.stores.files.mounts import is_mount_point
from kvtiers.tiers.stores.files.posix import OPEN_LISTING, RootFolder, close_reader, is_absent

T = TypeVar("T")

DAMAGED = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # by the last two ext4 and XFS say that a checksum does not fit
DAMAGED_MAX = 16  # in one listing; where there are more the device or its connection is gone, and nothing can be told
#: By which a mount says that it has lost its server. From the root's own mount it says nothing of one folder.
UNREACHABLE = (errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.ENODEV)


def walk(root: RootFolder, prefix: str, on_refused: Callable[[str, OSError], None]) -> Iterator[KeyInfo]:
    """Yield the regular files below the root whose key starts with ``prefix``, in the order of the folders.

    Dot names, symbolic links and names that are no keys are passed over, and so is what this user may not look into:
    a root that is a mount point has a ``lost+found``, and a command that was run by root leaves folders of root's. One
    such folder must not hide all others; nor must one that is removed meanwhile, here or by another host, nor what is
    damaged or a mount that has lost its server: a folder's listing ends there. Damaged is what fails twice while the
    root answers: by EIO soft mounts say of all that their server is away. Holds one listing (two descriptors) per level
    of folders and nothing else, however many files there are.

    Args:
        on_refused: told the name below the root of each that was refused or is damaged, and the error. The root itself,
            and the folder that ``prefix`` names, raise, and so does whatever is damaged beyond ``DAMAGED_MAX``.
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

    def pass_over(name: str, e: OSError) -> None:
        nonlocal damaged_count
        is_damaged = e.errno in DAMAGED or (e.errno in UNREACHABLE and _is_mounted(root, name))
        damaged_count += is_damaged
        if isinstance(e, PermissionError) or (is_damaged and damaged_count <= DAMAGED_MAX):
            on_refused(name, e)
        else:
            _check_is_gone(e, root)

    try:
        while stack:
            listing = stack[-1]
            try:
                entry = next(listing.entries, None)
            except OSError as e:
                if len(stack) == 1:
                    raise
                again = _ask_again(listing.read_again, e, root)
                if again is None:
                    raise  # the rest of it is there and was not listed
                pass_over(listing.prefix.rstrip("/"), again)
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
                    found = _ask_again(partial(listing.find, entry), e, root)
                if isinstance(found, KeyInfo):
                    yield found
                elif isinstance(found, _Listing):
                    stack.append(found)
                elif found is not None:
                    pass_over(listing.prefix + entry.name, found)
    finally:
        for listing in stack:
            listing.close()


def folder_names(root: RootFolder) -> list[str]:
    """Names of the folders right below the root that blobs may be in."""
    fd = root.open(".", OPEN_LISTING)
    try:
        with os.scandir(fd) as entries:
            return [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    finally:
        os.close(fd)


class Failures:
    """Of files in a folder that is gone through: a few that the disk cannot read, or that are busy, keep no others."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, e: OSError) -> None:
        """Raise it, unless it is one of a few."""
        self._count += 1
        if e.errno not in (*DAMAGED, errno.EBUSY) or self._count > DAMAGED_MAX:
            raise e


def _ask_again(ask: Callable[[], T], e: OSError, root: RootFolder) -> T | OSError:
    """The answer to what looked damaged, or the error.

    Raises:
        OSError: the root does not answer either. It is asked for its free space, which no client remembers.
    """
    if e.errno not in DAMAGED:
        return e
    os.fstatvfs(root.fd)
    try:
        return ask()
    except OSError as again:
        return again


def _check_is_gone(e: OSError, root: RootFolder) -> None:
    """Raise, unless NFS says by the error that another host removed what was looked at, and the root is still there."""
    if e.errno != errno.ESTALE:
        raise e
    os.fstat(root.fd)  # where all is gone, a listing that ends without an error would say that nothing is stored


def _is_mounted(root: RootFolder, name: str) -> bool:
    try:
        path = os.path.join(os.readlink(f"/proc/self/fd/{root.fd}"), name)
    except OSError:
        return False
    return is_mount_point(path)


# Folders on the way to a blob. Ours have a handful; a foreign tree that is deep must not take all descriptors.
FOLDERS_DEEP_MAX = 64


class _Listing:
    """A folder being listed; owns ``fd``.

    Attributes:
        is_plain: nothing in ``prefix`` needs a closer look. Where that is so of a name, too, the two joined are a key
            (see ``check_key``) unless they are too long.
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
        """A file's, or a folder's; None for what is neither."""
        name = entry.name
        # check_key for every file would take a tenth of a listing's time.
        is_plain = self.is_plain and name.isascii() and name.isprintable() and "\\" not in name
        if entry.is_dir(follow_symlinks=False):
            return self.enter(name, is_plain)
        return self.info(name, is_plain) if entry.is_file(follow_symlinks=False) else None

    def enter(self, name: str, is_plain: bool) -> _Listing | None:
        """A folder in this one; None where it was removed or replaced since it was listed, or is too deep for blobs."""
        if self.prefix.count("/") >= FOLDERS_DEEP_MAX:
            return None
        try:
            return _Listing(os.open(name, OPEN_LISTING, dir_fd=self.fd), f"{self.prefix}{name}/", is_plain)
        except OSError as e:
            if is_absent(e):
                return None
            raise

    def info(self, name: str, is_plain: bool) -> KeyInfo | None:
        """A file in this folder; None where it was removed since it was listed, or its name is no key."""
        key = self.prefix + name
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if not is_plain or len(key) > KEY_PART_LENGTH_MAX:
                check_key(key)
        except (FileNotFoundError, InvalidKeyError):
            return None
        return KeyInfo(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def read_again(self) -> None:
        """Go through all of it. What was found is not yielded, as a part of it was."""
        self.entries.close()  # both would share one place in the folder
        self.entries = os.scandir(self.fd)
        for _ in self.entries:
            pass

    def close(self) -> None:
        self.entries.close()
        close_reader(self.fd)
