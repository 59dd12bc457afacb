"""LoadedCode: whether a package on disk is still the one that this process runs.

Worker processes are fresh interpreters and import what is on disk. An engine whose package was upgraded in place would
talk to workers of another release: what they send each other has no versions, because both ends are one package.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress

from kvtiers.tiers.plain_logs import get_logger

logger = get_logger(__name__)

LOOK_EVERY_S = 5.0  # while it is another one's: with few workers left every call asks for more


class LoadedCode:
    """The package's source as it was when this was made: at import, so that it is what was loaded.

    By its contents, because a version does not change with each change, nor the contents with each new installation.
    A package in an archive, or without sources, never shows that it was replaced.
    Any thread may call: two at once look twice.
    """

    def __init__(self, package: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._package = package
        self._clock = clock
        self._refused_until = float("-inf")
        self._told = False
        self._loaded = self._digest()

    def check(self) -> None:
        """To be called before a process is started that imports the package.

        Raises:
            RuntimeError: another one, or none, is there now.
            OSError: it cannot be read.
        """
        if self._clock() >= self._refused_until:
            if self._digest() == self._loaded:
                return
            self._refused_until = self._clock() + LOOK_EVERY_S
        text = "kvtiers was replaced on disk while this engine runs: restart it"
        if not self._told:
            self._told = True
            logger.error("%s; until then no worker process is started, and a tier without any is cut off", text)
        raise RuntimeError(text)

    def _digest(self) -> bytes:
        digest = hashlib.blake2b()
        for folder, folders, names in os.walk(self._package, onerror=_raise_unless_gone):
            folders.sort()
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    content = b""
                    # What is being replaced at this moment differs as well.
                    with (
                        suppress(FileNotFoundError, NotADirectoryError, PermissionError),
                        open(path, "rb", buffering=0) as f,
                    ):
                        content = f.read()
                    digest.update(f"{path} {len(content)}\n".encode(errors="surrogateescape") + content)
        return digest.digest()


def _raise_unless_gone(e: OSError) -> None:
    # Out of descriptors, or a disk that fails: no other code is there for that.
    if not isinstance(e, FileNotFoundError | NotADirectoryError | PermissionError):
        raise e


OWN_CODE = LoadedCode(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
