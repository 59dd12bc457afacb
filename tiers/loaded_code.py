"""Checks that the package on disk is unchanged since this process loaded it.

A tier's processes are fresh interpreters and import the package from disk. After an upgrade in place, the engine would
talk to processes of another release. Messages have no version, because both ends must belong to the same package.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress


class LoadedCode:
    """A digest of the package's source code, taken at import, so that it matches the code that was loaded.

    The digest covers the contents and not the version, because the contents may change without a new version. The
    replacement of a package in an archive, or without sources, is not detected. Any thread may call.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._loaded = self._digest()

    def check(self) -> None:
        """Call this before starting a process that imports the package.

        Raises:
            RuntimeError: the package was replaced or removed.
            OSError: the package cannot be read.
        """
        if self._digest() != self._loaded:
            raise RuntimeError("kvtiers was replaced on disk while this engine runs: restart it")

    def _digest(self) -> bytes:
        digest = hashlib.blake2b()
        for folder, folders, names in os.walk(self._package, onerror=_raise_unless_gone):
            folders.sort()
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    content = b""
                    # It is being replaced, so the digest differs; or it is an editor's lock, a link to nothing.
                    with suppress(FileNotFoundError), open(path, "rb", buffering=0) as f:
                        content = f.read()
                    digest.update(f"{path} {len(content)}\n".encode(errors="surrogateescape") + content)
        return digest.digest()


def _raise_unless_gone(e: OSError) -> None:
    # Other errors, such as a lack of descriptors, do not mean that the code was replaced.
    if not isinstance(e, FileNotFoundError):
        raise e


OWN_CODE = LoadedCode(os.path.dirname(os.path.abspath(__file__)))
