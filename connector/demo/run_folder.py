"""Temporary folders of the demo: removed at its end or, if the demo was killed, by its next run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "kvtiers-demo-run-"
MARK = ".kvtiers-demo-run"  # an empty file in each of these folders: a folder of the user's own may have such a name


@contextlib.contextmanager
def run_folder(parent: Path) -> Iterator[Path]:
    """Make a new folder in ``parent``, locked while this process uses it. The kernel unlocks it if the process dies.

    Unlocked folders of this user that killed runs left are removed first.

    Raises:
        OSError: the folder cannot be made.
    """
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_unlocked(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # on NFS no process can lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            (folder / MARK).touch()
            break
        os.close(descriptor)  # another run has just removed it, as a folder that a killed run left
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_if_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = os.listdir(descriptor)
        if os.fstat(descriptor).st_uid == os.geteuid() and (MARK in names or not names):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
