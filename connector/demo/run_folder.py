"""Temporary folders of the demo: removed at its end, and by the next run where it was killed before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "kvtiers-demo-run-"


@contextlib.contextmanager
def run_folder(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``, locked as long as this process uses it: the kernel takes the lock of the dead back.

    Unlocked ones of this user, which a killed run left, are removed first.

    Raises:
        OSError: the folder cannot be made.
    """
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_unlocked(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # on NFS a folder cannot be locked, by nobody
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            break
        os.close(descriptor)  # another run began just now and took it for one that was left
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_if_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
