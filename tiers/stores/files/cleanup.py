"""What a collector does below a root: remove many files, note that one was used, sweep the store's own folders.

A file is removed by plain unlinkat: the name is gone in one step, whoever has the file open goes on reading it, and
a reader that comes later finds nothing. Renaming it first would only add a second step that can be left half done.

Folders left empty are removed too, except for a namespace's own (the first component of a key). A put that had opened
one gets ENOENT when it publishes and begins again (``folder_store``).

System calls go through the module's name ``os``, as in ``posix``; functions raise OSError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from kvtiers.tiers.stores.files.listing import Failures
from kvtiers.tiers.stores.files.posix import OPEN_FOLDER, OPEN_LISTING, RootFolder, close_reader, is_absent
from kvtiers.tiers.stores.files.publish import PRIVATE_FOLDER, QUARANTINE_FOLDER

_IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY)


def remove_blobs(
    root: RootFolder, keys: Iterable[str], on_kept: Callable[[str, OSError], None]
) -> Mapping[str, OSError]:
    """Unlink files, folder by folder, and the folders that are empty then.

    Args:
        on_kept: told each folder that could not be removed, or one above it, where it is empty, and the error.

    Returns:
        The errors of those that are still there.
    """
    failed: dict[str, OSError] = {}
    by_folder = sorted((key.rpartition("/")[0], key) for key in keys)
    for folder, pairs in groupby(by_folder, key=lambda pair: pair[0]):
        inside = [key for _, key in pairs]
        try:
            dir_fd = root.open(folder or ".", OPEN_FOLDER)
        except OSError as e:
            if not _is_gone(e):
                failed.update(dict.fromkeys(inside, e))
            continue
        try:
            for key in inside:
                try:
                    os.unlink(key[len(folder) :].lstrip("/"), dir_fd=dir_fd)
                except IsADirectoryError:
                    pass
                except OSError as e:
                    if not _is_gone(e):
                        failed[key] = e
        finally:
            close_reader(dir_fd)
        try:
            _remove_empty(root, folder)
        except OSError as e:
            on_kept(folder, e)
    return failed


def touch_blob(root: RootFolder, key: str) -> None:
    """Set a file's time of last change to now, by the clock of the file system's server."""
    folder, _, name = key.rpartition("/")
    dir_fd = root.open(folder or ".", OPEN_FOLDER)
    try:
        os.utime(name, dir_fd=dir_fd, follow_symlinks=False)
    finally:
        close_reader(dir_fd)


def sweep_quarantine(root: RootFolder, now: float, age_s_max: float) -> None:
    """Remove bad blobs that have been in quarantine for so long; with 0 s all, whatever ``now`` (Unix seconds) is."""

    def sweep_one(fd: int, name: str) -> None:
        # A rename changes ctime and nothing else: it is when the blob was moved here.
        if age_s_max <= 0 or now - os.stat(name, dir_fd=fd, follow_symlinks=False).st_ctime >= age_s_max:
            os.unlink(name, dir_fd=fd)

    _for_each(root, QUARANTINE_FOLDER, sweep_one, Failures())


def own_bytes(root: RootFolder) -> int:
    """Bytes of files in the store's own folders, which no listing shows."""
    total = 0
    failures = Failures()

    def count(fd: int, name: str) -> None:
        nonlocal total
        total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size

    for folder in (PRIVATE_FOLDER, QUARANTINE_FOLDER):
        _for_each(root, folder, count, failures)
    return total


def free_bytes(root: RootFolder) -> int:
    """Free space of the root's file system, as far as this user may use it."""
    status = os.fstatvfs(root.fd)
    return status.f_bavail * status.f_frsize


def _remove_empty(root: RootFolder, folder: str) -> None:
    while "/" in folder:
        parent, _, name = folder.rpartition("/")
        try:
            parent_fd = root.open(parent, OPEN_FOLDER)
            try:
                os.rmdir(name, dir_fd=parent_fd)
            finally:
                close_reader(parent_fd)
        except OSError as e:
            if e.errno not in _IN_USE and not _is_gone(e):
                raise
            return
        folder = parent


def _for_each(root: RootFolder, folder: str, call: Callable[[int, str], None], failures: Failures) -> None:
    """Call it with the folder's descriptor and the name of each thing in it. What is gone meanwhile is passed over.

    Another user's is as well, as of a command that was run by root: neither ours to sweep nor a reason to collect
    nothing.
    """
    try:
        fd = root.open(folder, OPEN_LISTING)
    except OSError as e:
        if is_absent(e) or isinstance(e, PermissionError):
            return
        raise
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    call(fd, entry.name)
                except (FileNotFoundError, IsADirectoryError, PermissionError):
                    pass
                except OSError as e:
                    failures.note(e)
    finally:
        close_reader(fd)


def _is_gone(e: OSError) -> bool:
    return is_absent(e) or e.errno == errno.ESTALE
