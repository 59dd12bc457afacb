"""The collector's operations below a root: remove many files, mark a file as used, sweep the store's own folders.

A file is removed with a plain unlinkat. The name disappears in one step, readers that have the file open can finish,
and later readers find nothing. Renaming the file first would only add a second step that might not be completed.

Folders that become empty are removed too, except for a namespace's top folder (the first component of a key). A put
that had opened such a folder gets ENOENT when it publishes, and starts again (``local``).

System calls go through the module-level name ``os``, as in ``posix``. Functions raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..os_errors import is_absent
from .posix import OPEN_FOLDER, OPEN_LISTING, RootFolder, opened
from .publish import PRIVATE_FOLDER, PRIVATE_NAME, is_writer_dead

STALE_AGE_S_MAX = 3600.0  # no writer needs so long for a blob, and hosts' clocks differ by less


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
        with opened(fd):
            for key in inside:
                try:
                    os.unlink(key.rpartition("/")[2], dir_fd=fd)
                except IsADirectoryError:
                    pass
                except OSError as e:
                    if not _is_gone(e):
                        failed[key] = e
    folders = set(by_folder)
    while folders:
        folders = {folder.rpartition("/")[0] for folder in folders if "/" in folder and _remove_if_empty(root, folder)}
    return failed


def _remove_if_empty(root: RootFolder, folder: str) -> bool:
    """Remove a folder. Returns False if it is in use, or could not be removed: an empty folder does no harm."""
    parent, _, name = folder.rpartition("/")
    try:
        with opened(root.open(parent, OPEN_FOLDER)) as fd:
            os.rmdir(name, dir_fd=fd)
    except OSError:
        return False
    return True


def touch_blob(root: RootFolder, key: str) -> None:
    """Set a file's modification time to now, by the clock of the file system's server."""
    folder, _, name = key.rpartition("/")
    with opened(root.open(folder or ".", OPEN_FOLDER)) as dir_fd:
        os.utime(name, dir_fd=dir_fd, follow_symlinks=False)


def sweep(root: RootFolder, now: Callable[[], float], *, remove: bool = True) -> int:
    """Remove the private files of dead writers.

    A file that cannot be removed does not keep the others from being removed.

    Args:
        now: Unix seconds by the clock that sets files' times; called for files whose removal depends on their age.
        remove: False: only count the files.

    Returns:
        How many files were removed.
    """
    count = 0
    for fd, name in _names_in(root, PRIVATE_FOLDER):
        # Other programs may use a folder with this name, so only regular files with names like a store's own count.
        if PRIVATE_NAME.fullmatch(name) is None:
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, or damaged
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if is_writer_dead(name) or now() - status.st_mtime > STALE_AGE_S_MAX:
                if remove:
                    os.unlink(name, dir_fd=fd)
                count += 1
    return count


def hidden_names(root: RootFolder) -> list[str]:
    """Yield foreign names that listings skip: dot names, and foreign files in the store's own folder."""
    found = [name for _, name in _names_in(root, ".") if name[0] == "." and name != PRIVATE_FOLDER]
    inside = [
        f"{PRIVATE_FOLDER}/{name}" for _, name in _names_in(root, PRIVATE_FOLDER) if not PRIVATE_NAME.fullmatch(name)
    ]
    return found + inside


def _names_in(root: RootFolder, folder: str) -> Iterator[tuple[int, str]]:
    """The folder's descriptor, and each name in it. Nothing if the folder is absent, or this user may not read it.

    A command run as root may have left such a folder. It must not stop the collection.
    """
    try:
        fd = root.open(folder, OPEN_LISTING)
    except OSError as e:
        if is_absent(e) or isinstance(e, PermissionError):
            return
        raise
    with opened(fd), os.scandir(fd) as entries:
        for entry in entries:
            yield fd, entry.name


def _is_gone(e: OSError) -> bool:
    return is_absent(e) or e.errno == errno.ESTALE
