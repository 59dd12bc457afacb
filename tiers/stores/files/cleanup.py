"""Operations of a collector below a root: remove many files, mark a file as used, sweep the store's own folders.

A file is removed with a plain unlinkat. The name disappears in one step, readers that have the file open can finish,
and later readers find nothing. Renaming the file first would only add a second step that might not be completed.

Folders that become empty are removed too, except for a namespace's top folder (the first component of a key). A put
that had opened such a folder gets ENOENT when it publishes, and starts again (``local``).

System calls go through the module-level name ``os``, as in ``posix``. Functions raise OSError.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping

from ..os_errors import is_absent
from .listing import Failures
from .posix import OPEN_FOLDER, OPEN_LISTING, RootFolder, close_reader
from .publish import PRIVATE_FOLDER, PRIVATE_NAME, QUARANTINE_FOLDER, QUARANTINED_NAME

#: The store's own folders, and the names of its files there.
OWN_FOLDERS: Mapping[str, re.Pattern[str]] = {PRIVATE_FOLDER: PRIVATE_NAME, QUARANTINE_FOLDER: QUARANTINED_NAME}

_IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY)


def remove_blobs(
    root: RootFolder, keys: Iterable[str], on_kept: Callable[[str, OSError], None]
) -> Mapping[str, OSError]:
    """Unlink files, folder by folder, and remove the folders that become empty.

    A blob mostly has a folder of its own, so each parent is opened and tried only once, not for every folder in it.

    Args:
        on_kept: called with a folder and the error if the folder could not be removed for another reason than being in
            use.

    Returns:
        key -> error, for the files that still exist.
    """
    by_parent: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        folder = key.rpartition("/")[0]
        by_parent.setdefault(folder.rpartition("/")[0], {}).setdefault(folder, []).append(key)
    failed: dict[str, OSError] = {}
    for parent, folders in by_parent.items():
        try:
            parent_fd = root.open(parent or ".", OPEN_FOLDER)
        except OSError as e:
            if not _is_gone(e):
                failed.update((key, e) for inside in folders.values() for key in inside)
            continue
        try:
            for folder, inside in folders.items():
                _remove_files(parent_fd, folder, inside, failed)
                if parent:
                    _remove_if_empty(parent_fd, folder, on_kept)
        finally:
            close_reader(parent_fd)
        while "/" in parent:
            folder, parent = parent, parent.rpartition("/")[0]
            try:
                parent_fd = root.open(parent, OPEN_FOLDER)
            except OSError as e:
                if not _is_gone(e):
                    on_kept(folder, e)
                break
            try:
                if not _remove_if_empty(parent_fd, folder, on_kept):
                    break
            finally:
                close_reader(parent_fd)
    return failed


def _remove_files(parent_fd: int, folder: str, keys: Iterable[str], failed: dict[str, OSError]) -> None:
    """Unlink files of one folder. Notes the errors of the files that still exist."""
    try:
        fd = os.open(folder.rpartition("/")[2] or ".", OPEN_FOLDER, dir_fd=parent_fd)
    except OSError as e:
        if not _is_gone(e):
            failed.update(dict.fromkeys(keys, e))
        return
    try:
        for key in keys:
            try:
                os.unlink(key.rpartition("/")[2], dir_fd=fd)
            except IsADirectoryError:
                pass
            except OSError as e:
                if not _is_gone(e):
                    failed[key] = e
    finally:
        close_reader(fd)


def _remove_if_empty(parent_fd: int, folder: str, on_kept: Callable[[str, OSError], None]) -> bool:
    """Remove a folder. Returns False if the folder is in use, is already gone, or could not be removed."""
    try:
        os.rmdir(folder.rpartition("/")[2], dir_fd=parent_fd)
    except OSError as e:
        if e.errno not in _IN_USE and not _is_gone(e):
            on_kept(folder, e)
        return False
    return True


def touch_blob(root: RootFolder, key: str) -> None:
    """Set a file's modification time to now, by the clock of the file system's server."""
    folder, _, name = key.rpartition("/")
    dir_fd = root.open(folder or ".", OPEN_FOLDER)
    try:
        os.utime(name, dir_fd=dir_fd, follow_symlinks=False)
    finally:
        close_reader(dir_fd)


def sweep_quarantine(root: RootFolder, now: float, age_s_max: float, *, remove: bool = True) -> int:
    """Remove bad blobs that were quarantined at least ``age_s_max`` before ``now`` (Unix seconds). 0: remove all.

    Args:
        remove: False: only count the files.

    Returns:
        How many files were removed.
    """
    count = 0

    def sweep_one(fd: int, name: str, status: os.stat_result) -> None:
        nonlocal count
        # A rename changes only ctime, so ctime is the time when the blob was moved here.
        if age_s_max <= 0 or now - status.st_ctime >= age_s_max:
            if remove:
                os.unlink(name, dir_fd=fd)
            count += 1

    _for_each(root, QUARANTINE_FOLDER, sweep_one, Failures())
    return count


def own_bytes(root: RootFolder) -> int:
    """Total bytes of the store's own files, which listings do not include."""
    total = 0
    failures = Failures()

    def count(_fd: int, _name: str, status: os.stat_result) -> None:
        nonlocal total
        total += status.st_size

    for folder in OWN_FOLDERS:
        _for_each(root, folder, count, failures)
    return total


def hidden_names(root: RootFolder) -> list[str]:
    """Names that listings leave out and that no store wrote: other dot names, and others' files in our own folders."""
    found = [name for name in _names_in(root, ".") if name[0] == "." and name not in OWN_FOLDERS]
    for folder, own in OWN_FOLDERS.items():
        found += [f"{folder}/{name}" for name in _names_in(root, folder) if own.fullmatch(name) is None]
    return found


def _names_in(root: RootFolder, folder: str) -> list[str]:
    try:
        fd = root.open(folder, OPEN_LISTING)
    except OSError as e:
        if is_absent(e) or isinstance(e, PermissionError):
            return []
        raise
    try:
        return os.listdir(fd)
    finally:
        close_reader(fd)


def _for_each(
    root: RootFolder, folder: str, call: Callable[[int, str, os.stat_result], None], failures: Failures
) -> None:
    """Call ``call`` with the folder's descriptor, and the name and status of each of the store's own files in it.

    Other programs may use folders with these names, so only files that are named like the store's own count. Stores
    write only regular files, but also quarantine links and special files. Unlinking these does not touch their targets.

    Skips folders, and files that were removed meanwhile. Also skips the folder or a file if permission is denied, such
    as for files of a command run as root: this user cannot remove them, and they must not stop the collection.
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
                if OWN_FOLDERS[folder].fullmatch(entry.name) is None:
                    continue
                try:
                    status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) or (
                        folder == QUARANTINE_FOLDER and not stat.S_ISDIR(status.st_mode)
                    ):
                        call(fd, entry.name, status)
                except (FileNotFoundError, PermissionError):
                    pass
                except OSError as e:
                    failures.note(e)
    finally:
        close_reader(fd)


def _is_gone(e: OSError) -> bool:
    return is_absent(e) or e.errno == errno.ESTALE
