"""Listing the blobs below a root folder.

System calls go through the module's name ``os``, as in ``tiers.posix``; functions raise OSError.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from tiers.errors import InvalidKeyError
from tiers.posix import OPEN_LISTING, RootFolder, close_reader, is_absent
from tiers.store import KeyInfo, check_key


def walk(root: RootFolder, prefix: str) -> Iterator[KeyInfo]:
    """Yield the regular files below the root whose key starts with ``prefix``, in the order of the folders.

    Dot names, symbolic links and names that are no keys are passed over. Holds one listing (two descriptors) per
    level of folders and nothing else, however many files there are.
    """
    start, slash, name_prefix = prefix.rpartition("/")
    if slash:
        try:
            check_key(start)
        except InvalidKeyError:
            return
    try:
        stack = [_Listing(root.open(start or ".", OPEN_LISTING), prefix[: len(start) + len(slash)])]
    except OSError as e:
        if is_absent(e):
            return
        raise
    try:
        while stack:
            listing = stack[-1]
            entry = next(listing.entries, None)
            if entry is None:
                stack.pop().close()
            elif entry.name.startswith(".") or (len(stack) == 1 and not entry.name.startswith(name_prefix)):
                continue
            elif entry.is_dir(follow_symlinks=False):
                inner = listing.enter(entry.name)
                if inner is not None:
                    stack.append(inner)
            elif entry.is_file(follow_symlinks=False):
                info = listing.info(entry.name)
                if info is not None:
                    yield info
    finally:
        for listing in stack:
            listing.close()


class _Listing:
    """A folder being listed; owns ``fd``."""

    def __init__(self, fd: int, prefix: str) -> None:
        self.fd = fd
        self.prefix = prefix
        try:
            self.entries = os.scandir(fd)
        except BaseException:
            close_reader(fd)
            raise

    def enter(self, name: str) -> _Listing | None:
        """A folder in this one; None where it was removed or replaced since it was listed."""
        try:
            return _Listing(os.open(name, OPEN_LISTING, dir_fd=self.fd), f"{self.prefix}{name}/")
        except OSError as e:
            if is_absent(e):
                return None
            raise

    def info(self, name: str) -> KeyInfo | None:
        """A file in this folder; None where it was removed since it was listed, or its name is no key."""
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            key = check_key(self.prefix + name)
        except (FileNotFoundError, InvalidKeyError):
            return None
        return KeyInfo(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def close(self) -> None:
        self.entries.close()
        close_reader(self.fd)
