"""What a test left open."""

from __future__ import annotations

import contextlib
import gc
import os


def open_fds() -> set[tuple[str, str]]:
    """Descriptors of this process and what each is of.

    Compare with ``<=``: threads of earlier tests may close theirs meanwhile, and what a leak opens is new.
    """
    gc.collect()  # what earlier tests left in cycles
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found
