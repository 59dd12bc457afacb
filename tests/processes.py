"""Other processes in tests: whether they run."""

from __future__ import annotations

import psutil


def is_gone(pid: int) -> bool:
    """Whether a process runs no more; a zombie that a foreign parent has not reaped does not run."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
