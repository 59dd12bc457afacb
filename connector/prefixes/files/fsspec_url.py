"""FsspecFiles: the files of prefixes under any fsspec URL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any

from ....tiers.errors import ConfigError, StoreConfigError, StoreError, public_url
from ....tiers.stores.fsspec_driver import (
    ATOMIC_PUT,
    TEMPORARY_FOLDER,
    open_driver,
    protocols_of,
    put_and_move,
    translate,
)
from ..format import LAYER_FILE
from .base import FILES_AT_ONCE, Files
from .side_by_side import SideBySide, result_of


class FsspecFiles(Files):
    """Files under an fsspec URL. A put to an object store is atomic; elsewhere a file is written and then moved."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            self._fs, self._root = open_driver(url, options)
        except StoreConfigError as e:
            raise ConfigError(f"{public_url(url)!r}: {e}", field="url") from None
        self._side_by_side = SideBySide(FILES_AT_ONCE, "kvtiers-prefix-fsspec")
        self._is_atomic = bool(protocols_of(self._fs) & ATOMIC_PUT)

    def write(self, path: str, data: bytes) -> None:
        with driver_errors(path):
            if self._is_atomic:
                self._fs.pipe_file(self._full(path), data)
            else:
                put_and_move(self._fs, self._full(path), [memoryview(data)], self._full(TEMPORARY_FOLDER))

    def read(self, path: str, bytes_max: int) -> bytes:
        with driver_errors(path):
            data: bytes = self._fs.cat_file(self._full(path), start=0, end=bytes_max)
            return data

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        names = list(files)
        with self._side_by_side.files_at_once(max((size for _, size in files.values()), default=0)) as at_once:
            at_once = min(at_once, FILES_AT_ONCE)
            for start in range(0, len(names), at_once):
                some = names[start : start + at_once]
                full = [self._full(files[name][0]) for name in some]
                ends = [files[name][1] + 1 for name in some]  # one byte more, to detect a file that is too long
                with driver_errors(files[some[0]][0]):
                    # Not cat(): it treats a path with a bracket as a pattern.
                    found = self._fs.cat_ranges(full, [0] * len(full), ends, on_error="raise")
                for name, data in zip(some, found, strict=True):
                    yield name, memoryview(bytearray(data))  # a tensor over it needs writable memory; bytes are not

    def write_all(self, files: Mapping[str, bytes]) -> None:
        if not self._is_atomic:
            super().write_all(files)
        elif files:
            with driver_errors(next(iter(files))):
                self._fs.pipe({self._full(path): data for path, data in files.items()})

    def exists(self, path: str) -> bool:
        with driver_errors(path):
            try:
                self._fs.info(self._fresh(path))
            except FileNotFoundError:
                return False
            return True

    def present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        asked = [[self._side_by_side.submit(self.exists, path) for path in run] for run in runs]
        counts = []
        try:
            for run in asked:
                counts.append(sum(1 for _ in takewhile(result_of, run)))
                for question in run[counts[-1] :]:
                    question.cancel()  # questions of other lookups wait in line behind it
        finally:  # after an error, too
            for question in chain.from_iterable(asked[len(counts) :]):
                question.cancel()
        return counts

    def reading(self, paths: Sequence[str], bytes_max: int) -> list[Callable[[], bytes]]:
        if len(paths) == 1:  # the caller waits for this read right away, so a thread would not help
            return super().reading(paths, bytes_max)
        return [partial(result_of, self._side_by_side.submit(self.read, path, bytes_max)) for path in paths]

    def names(self, folder: str) -> list[str]:
        with driver_errors(folder):
            try:
                found = self._fs.ls(self._fresh(folder), detail=True)
            except FileNotFoundError:
                return []
            return sorted(entry["name"].rsplit("/", 1)[-1] for entry in found if entry["type"] == "file")

    def delete(self, path: str) -> None:
        with driver_errors(path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def delete_layers(self, folder: str) -> None:
        names = self.names(folder)
        layers = list(filter(LAYER_FILE.fullmatch, names))
        for name in layers:
            self.delete(f"{folder}/{name}")
        if not self._is_atomic and names == layers:  # object stores have no folders to remove
            with driver_errors(folder), contextlib.suppress(FileNotFoundError):
                self._fs.rmdir(self._full(folder))

    def close(self) -> None:
        self._side_by_side.close()

    def _fresh(self, path: str) -> str:
        full = self._full(path)
        self._fs.invalidate_cache(full)  # other processes write here, too; only some file systems know refresh=True
        return full

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextlib.contextmanager
def driver_errors(path: str) -> Iterator[None]:
    """Translate a driver's errors to StoreError, without their text, which may contain a URL with a signature."""
    try:
        yield
    except StoreError:
        raise
    except Exception as e:  # noqa: BLE001 - drivers raise what their clients raise
        raise translate(e, path) from None
