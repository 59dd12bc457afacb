"""TraceFile: appends lines to a file of bounded size. The scheduler's thread never waits for the disk."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Final

from ...tiers.plain_logs import get_logger

logger = get_logger(__name__)

FILE_BYTES_MAX: Final = 64 << 20  # then the file is renamed to PATH.1, and a new file begins
LINES_MAX: Final = 4096  # lines that wait to be written; if the disk hangs, the oldest lines are dropped
CLOSE_S: Final = 1.0


class TraceFile:
    """A file that is written by its own thread, which sleeps while there are no lines to write.

    The scheduler's thread calls ``write`` and ``close``. If the file cannot be written, that is logged once.

    Args:
        path: the file. It is opened for each write, so it may be moved away. Only the owner can read a new file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._has_lines = threading.Event()
        self._is_closed = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="kvtiers-trace-requests", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Append a line soon. Does not wait."""
        self._lines.append(line)
        self._has_lines.set()

    def close(self) -> None:
        """Write the lines that wait. Gives up after ``CLOSE_S``."""
        self._is_closed = True
        self._has_lines.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not (self._is_closed and not self._lines):
            self._has_lines.wait()
            self._has_lines.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._append("".join(f"{line}\n" for line in lines))
            except OSError as e:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning("trace_requests: %s cannot be written: %s", self._path, e.strerror)

    def _append(self, text: str) -> None:
        if not text:
            return
        data = text.encode()
        with suppress(FileNotFoundError):
            if os.path.getsize(self._path) + len(data) > FILE_BYTES_MAX:
                os.replace(self._path, f"{self._path}.1")
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
