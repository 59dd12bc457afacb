"""Runs work in two processes at once."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_two_processes(work: Callable[[int], None]) -> None:
    """Call ``work(0)`` here and ``work(1)`` in a child process meanwhile. Fails if either does."""
    child = os.fork()
    if not child:
        try:
            work(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    work(0)
    assert os.waitpid(child, 0)[1] == 0
