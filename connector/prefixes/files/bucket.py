"""BucketFiles: the files of prefixes in an S3 bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from ....tiers.errors import BlobNotFoundError
from ..format import LAYER_FILE
from .base import Files
from .side_by_side import SideBySide, result_of

if TYPE_CHECKING:
    from ....tiers.stores.s3.store import S3Store


class BucketFiles(Files):
    """Files as objects in a bucket. Layers are read and written in parallel, by threads that the first call starts.

    Args:
        threads: number of threads that read.
    """

    def __init__(self, store: S3Store, threads: int) -> None:
        self._store = store
        self._threads = threads
        self._side_by_side = SideBySide(threads, "kvtiers-prefix-s3")

    def write(self, path: str, data: bytes) -> None:
        self._store.put(path, [memoryview(data)], overwrite=True)

    def create(self, path: str, data: bytes) -> bool:
        return self._store.put(path, [memoryview(data)], overwrite=False)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        writes = [self._side_by_side.submit(self.write, path, data) for path, data in files.items()]
        wait(writes)  # before raising any error: no write may land after the caller has cleaned up
        for done in writes:
            result_of(done)

    def read(self, path: str, bytes_max: int) -> bytes:
        found = self._store.get_tail(path, bytes_max)  # needs no separate request for the size
        if found is None:
            raise BlobNotFoundError("does not exist", key=path)
        return found[1]

    def present(self, runs: Sequence[Sequence[str]]) -> list[int]:
        asked = iter(self._store.size_many([path for run in runs for path in run]))
        sizes = [list(islice(asked, len(run))) for run in runs]
        return [sum(1 for _ in takewhile(lambda size: isinstance(size, int), found)) for found in sizes]

    def reading(self, paths: Sequence[str], bytes_max: int) -> list[Callable[[], bytes]]:
        if len(paths) == 1:  # the caller waits for this read right away, so a thread would not help
            return super().reading(paths, bytes_max)
        return [partial(result_of, self._side_by_side.submit(self.read, path, bytes_max)) for path in paths]

    def read_all(self, files: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, memoryview]]:
        biggest = max((size for _, size in files.values()), default=0)
        to_begin = iter(files.items())
        ahead: deque[tuple[str, memoryview, memoryview, Future[None]]] = deque()

        def begin(buffer: memoryview) -> None:
            for name, (path, size) in islice(to_begin, 1):
                read = self._side_by_side.submit(self._store.get_into, path, [buffer[:size]])
                ahead.append((name, buffer, buffer[:size], read))

        with self._side_by_side.files_at_once(biggest) as at_once:
            for _ in range(min(self._threads, len(files), at_once)):
                begin(memoryview(bytearray(biggest)))
            try:
                while ahead:
                    name, buffer, data, read = ahead.popleft()
                    result_of(read)
                    yield name, data
                    begin(buffer)
            finally:
                for *_, read in ahead:
                    read.cancel()

    def exists(self, path: str) -> bool:
        return self._store.size(path) is not None

    def names(self, folder: str) -> list[str]:
        return sorted(self._store.names_in(folder))

    def delete(self, path: str) -> None:
        self._store.delete(path)

    def delete_layers(self, folder: str) -> None:
        found = (info.key for info in self._store.keys(f"{folder}/"))
        keys = [key for key in found if LAYER_FILE.fullmatch(key.removeprefix(f"{folder}/"))]
        for error in self._store.delete_many(keys):
            if error is not None:
                raise error

    def prepare(self) -> None:
        self._store.prepare()

    def check(self) -> None:
        self._store.check()

    def close(self) -> None:
        self._store.close()
        self._side_by_side.close()
