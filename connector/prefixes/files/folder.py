"""FolderFiles: the files of prefixes in a folder of a file system."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvtiers.connector.prefixes.files.base import Files
from kvtiers.tiers.config.open_store import open_store
from kvtiers.tiers.config.tier_options import FsTierConfig, NfsTierConfig
from kvtiers.tiers.stores.files.posix import store_error


class FolderFiles(Files):
    """Files in a folder. The modification time is the time of the last use.

    The first call opens the store: if the file system hangs, only a thread that may hang waits for it.

    Args:
        place: the folder. It may be a symbolic link, unlike a store's root.
    """

    has_uses = True

    def __init__(self, place: FsTierConfig | NfsTierConfig) -> None:
        self._place = place
        self._opening = threading.Lock()  # held to set _store
        self._store: Any = None

    def _use_store(self) -> Any:
        with self._opening:
            if self._store is None:
                root = os.path.realpath(self._place.root_dir)
                self._store = open_store(self._place.model_copy(update={"root_dir": root}))
            return self._store

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        buffer = memoryview(bytearray(max((size for _, size in files.values()), default=0)))
        for name, (path, size) in files.items():
            self._use_store().get_into(path, [buffer[:size]])
            yield name, buffer[:size]

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._full(folder)) if entry.is_file())
        except FileNotFoundError:
            return []
        except OSError as e:
            raise store_error(e, folder) from e

    def unused_s(self, path: str) -> float:
        try:
            return time.time() - os.stat(self._full(path)).st_mtime
        except OSError as e:
            raise store_error(e, path) from e

    def touch(self, path: str) -> None:
        self._use_store().touch(path)

    def close(self) -> None:
        store = self._store  # without the lock, which a call that hangs may hold
        if store is not None:
            store.close()

    def _full(self, path: str) -> str:
        return f"{self._place.root_dir}/{path}"
