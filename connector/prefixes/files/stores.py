"""StoreFiles: the files of prefixes in a store: a bucket, or any fsspec URL."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from kvtiers.connector.prefixes.files.base import Files
from kvtiers.tiers.daemon_pool import DaemonPool
from kvtiers.tiers.errors import StoreClosedError
from kvtiers.tiers.tier.concurrency import Concurrency

if TYPE_CHECKING:
    from kvtiers.tiers.stores.fsspec import FsspecStore
    from kvtiers.tiers.stores.s3.store import S3Store


T = TypeVar("T")

FILES_MIN = 4  # files that a load reads at once, however large they are
#: Memory that a single load reads into. The n-th load under way gets 1/n; eight (LOAD_THREADS) have 174 MiB together.
BUFFERS_BYTES_MAX = 64 << 20


class SideBySide:
    """A pool whose threads start with the first call: many processes create a pool, but few use it. Any thread.

    Args:
        threads: number of threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._starting = threading.Lock()  # guards _loads and _pool
        self._loads = 0
        self._pool: DaemonPool | None = None

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run the call on a thread of the pool."""
        with self._starting:
            if self._pool is None:
                self._pool = DaemonPool(self._threads, "kvtiers-prefix-files")
            return self._pool.submit(call, *arguments)

    @contextlib.contextmanager
    def files_at_once(self, biggest: int) -> Iterator[int]:
        """Yield how many files one load may have in memory while it is under way. ``biggest``: bytes of the largest."""
        with self._starting:
            self._loads += 1
            share = BUFFERS_BYTES_MAX // self._loads
        try:
            yield max(FILES_MIN, share // max(1, biggest))
        finally:
            with self._starting:
                self._loads -= 1

    def close(self) -> None:
        """Cancel calls that have not begun. Does not wait."""
        with self._starting:
            if self._pool is not None:
                self._pool.shutdown(0.0)


def result_of(future: Future[T]) -> T:
    """Wait for a call; return its result or raise its error.

    Raises:
        StoreClosedError: the call was cancelled.
    """
    try:
        return future.result()
    except CancelledError:
        raise StoreClosedError("the storage was closed") from None


class StoreFiles(Files):
    """Files as blobs of a store. Layers are read and written in parallel, by threads that the first call starts.

    Args:
        threads: number of threads that read at first.
        threads_max: largest number of threads.
    """

    def __init__(self, store: S3Store | FsspecStore, threads: int, threads_max: int) -> None:
        self._store = store
        self._reading = Concurrency(threads, threads_max)
        self._side_by_side = SideBySide(max(threads, threads_max))

    def _use_store(self) -> S3Store | FsspecStore:
        return self._store

    def write_all(self, files: Mapping[str, bytes]) -> None:
        writes = [self._side_by_side.submit(self.write, path, data) for path, data in files.items()]
        wait(writes)  # before raising any error: no write may land after the caller has cleaned up
        for done in writes:
            result_of(done)

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
        threads = self._reading.threads
        started, cpu_s = time.monotonic(), 0.0
        to_begin = iter(files.items())
        ahead: deque[tuple[str, memoryview, memoryview, Future[float]]] = deque()

        def begin(buffer: memoryview) -> None:
            for name, (path, size) in islice(to_begin, 1):
                read = self._side_by_side.submit(self._read_into, path, buffer[:size])
                ahead.append((name, buffer, buffer[:size], read))

        with self._side_by_side.files_at_once(biggest) as at_once:
            for _ in range(min(threads, len(files), at_once)):
                begin(memoryview(bytearray(biggest)))
            try:
                while ahead:
                    name, buffer, data, read = ahead.popleft()
                    cpu_s += result_of(read)
                    yield name, data
                    begin(buffer)
                self._reading.learn(threads, len(files), time.monotonic() - started, cpu_s)
            finally:
                for *_, read in ahead:
                    read.cancel()

    def _read_into(self, path: str, data: memoryview) -> float:
        """Read an object into ``data``. Returns the CPU seconds that this took."""
        started = time.thread_time()
        self._store.get_into(path, [data])
        return time.thread_time() - started

    def names(self, folder: str) -> list[str]:
        return sorted(self._store.names_in(folder))

    def close(self) -> None:
        self._store.close()
        self._side_by_side.close()


class BucketFiles(StoreFiles):
    """Files in an S3 bucket."""

    _store: S3Store

    def prepare(self) -> None:
        self._store.prepare()

    def check(self) -> None:
        self._store.check()


class FsspecFiles(StoreFiles):
    """Files under an fsspec URL. Many drivers answer one question at a time, so each question has its own thread."""

    _store: FsspecStore

    def read(self, path: str, bytes_max: int) -> bytes:
        return self._store.get_head(path, bytes_max)  # ``get_tail`` takes two requests

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
