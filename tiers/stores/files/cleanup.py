"""Operations of a collector below a root: remove many files, mark a file as used, sweep the store's own folders.

A file is removed with a plain unlinkat. The name disappears in one step, readers that have the file open can finish,
and later readers find nothing. Renaming the file first would only add a second step that might not be completed.

Folders that become empty are removed too, except for a namespace's top folder (the first component of a key). A put
that had opened such a folder gets ENOENT when it publishes, and starts again (``local``).

System calls go through the module-level name ``os``, as in ``posix``. Functions raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..os_errors import is_absent
from .posix import OPEN_FOLDER, OPEN_LISTING, RootFolder, close_reader
from .publish import PRIVATE_FOLDER, PRIVATE_NAME, QUARANTINE_FOLDER, QUARANTINED_NAME, is_writer_dead

#: The store's own folders, and the names of its files there.
OWN_FOLDERS: Mapping[str, re.Pattern[str]] = {PRIVATE_FOLDER: PRIVATE_NAME, QUARANTINE_FOLDER: QUARANTINED_NAME}
STALE_AGE_S_MAX = 3600.0  # no writer needs an hour for one blob, and hosts' clocks differ by less than an hour


def remove_blobs(root: RootFolder, keys: Iterable[str]) -> Mapping[str, OSError]:
    """Unlink files, folder by folder, and remove the folders that become empty, each once.

    Returns:
        key -> error, for the files that still exist.
    """
    by_folder: dict[str, list[str]] = {}
    for key in keys:
        by_folder.setdefault(key.rpartition("/")[0], []).append(key)
    failed: dict[str, OSError] = {}
    for folder, inside in by_folder.items():
        try:
            fd = root.open(folder or ".", OPEN_FOLDER)
        except OSError as e:
            if not _is_gone(e):
                failed.update(dict.fromkeys(inside, e))
            continue
        try:
            for key in inside:
                try:
                    os.unlink(key.rpartition("/")[2], dir_fd=fd)
                except IsADirectoryError:
                    pass
                except OSError as e:
                    if not _is_gone(e):
                        failed[key] = e
        finally:
            close_reader(fd)
    folders = set(by_folder)
    while folders:
        folders = {folder.rpartition("/")[0] for folder in folders if "/" in folder and _remove_if_empty(root, folder)}
    return failed


def _remove_if_empty(root: RootFolder, folder: str) -> bool:
    """Remove a folder. Returns False if it is in use, or could not be removed: an empty folder does no harm."""
    parent, _, name = folder.rpartition("/")
    try:
        fd = root.open(parent, OPEN_FOLDER)
    except OSError:
        return False
    try:
        os.rmdir(name, dir_fd=fd)
    except OSError:
        return False
    finally:
        close_reader(fd)
    return True


def touch_blob(root: RootFolder, key: str) -> None:
    """Set a file's modification time to now, by the clock of the file system's server."""
    folder, _, name = key.rpartition("/")
    dir_fd = root.open(folder or ".", OPEN_FOLDER)
    try:
        os.utime(name, dir_fd=dir_fd, follow_symlinks=False)
    finally:
        close_reader(dir_fd)


def sweep(root: RootFolder, now: Callable[[], float], quarantine_s_max: float, *, remove: bool = True) -> int:
    """Remove the private files of dead writers, and bad blobs that were quarantined long enough ago.

    A file that cannot be removed does not keep the others from being removed.

    Args:
        now: Unix seconds by the clock that sets files' times; called for files whose removal depends on their age.
        quarantine_s_max: age of the bad blobs that are removed, in seconds. 0: remove all; inf: none.
        remove: False: only count the files.

    Returns:
        How many files were removed.
    """
    count = 0
    for folder in OWN_FOLDERS if quarantine_s_max < math.inf else (PRIVATE_FOLDER,):
        for fd, name, status in _own_files(root, folder):
            if folder == PRIVATE_FOLDER:
                is_leftover = is_writer_dead(name) or now() - status.st_mtime > STALE_AGE_S_MAX
            else:  # a rename changes only ctime, so ctime is the time when the blob was moved here
                is_leftover = quarantine_s_max <= 0 or now() - status.st_ctime >= quarantine_s_max
            if is_leftover:
                with contextlib.suppress(OSError):
                    if remove:
                        os.unlink(name, dir_fd=fd)
                    count += 1
    return count


def own_bytes(root: RootFolder) -> int:
    """Total bytes of the store's own files, which listings do not include."""
    return sum(status.st_size for folder in OWN_FOLDERS for _, _, status in _own_files(root, folder))


def hidden_names(root: RootFolder) -> list[str]:
    """Names that listings leave out and that no store wrote: other dot names, and others' files in our own folders."""
    found = [name for _, name in _names_in(root, ".") if name[0] == "." and name not in OWN_FOLDERS]
    for folder, own in OWN_FOLDERS.items():
        found += [f"{folder}/{name}" for _, name in _names_in(root, folder) if own.fullmatch(name) is None]
    return found


def _names_in(root: RootFolder, folder: str) -> Iterator[tuple[int, str]]:
    """The folder's descriptor, and each name in it. Nothing if the folder is absent, or this user may not read it.

    Such a folder belongs to a command run as root. It must not stop the collection.
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
                yield fd, entry.name
    finally:
        close_reader(fd)


def _own_files(root: RootFolder, folder: str) -> Iterator[tuple[int, str, os.stat_result]]:
    """The folder's descriptor, and the name and status of each of the store's own files in it.

    Other programs may use folders with these names, so only files that are named like the store's own count. Stores
    write only regular files, but also quarantine links and special files. Unlinking these does not touch their targets.
    """
    for fd, name in _names_in(root, folder):
        if OWN_FOLDERS[folder].fullmatch(name) is None:
            continue
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:  # removed meanwhile, or damaged
            continue
        is_file = stat.S_ISREG(status.st_mode)
        if is_file or (folder == QUARANTINE_FOLDER and not stat.S_ISDIR(status.st_mode)):
            yield fd, name, status


def _is_gone(e: OSError) -> bool:
    return is_absent(e) or e.errno == errno.ESTALE
