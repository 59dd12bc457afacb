"""Copy blocks from one tier's storage to another tier's.

A block is copied as stored, including its trailer: its name and seal are the same in every tier, and an encrypted block
stays encrypted. Each block is verified during the copy, and bad blocks are not copied. Nothing is removed from the
source.

A blob in the target with a block's name is replaced if its size or trailer is wrong, as a store job does. A newer
version's block stays.

In a folder a block keeps its age (``SupportsAges``), so both collectors consider the block equally old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..blocks.file_mapper import CONFIG_FILE_NAME, BlockName
from ..blocks.namespace import CONFIG_BYTES_MAX
from ..blocks.seal import TRAILER_BYTES
from ..daemon_pool import DaemonPool
from ..errors import (
    BlobCorruptError,
    BlobNotFoundError,
    SealError,
    StoreError,
    StoreFullError,
    StorePermissionError,
)
from ..store import KeyInfo, Store, SupportsAges, SupportsTail, read_blob
from .block_reader import BlockReader, read_identity
from .inventory import list_blocks

THREADS = 8  # threads if reading or writing mostly waits
END_S = 5.0  # for threads to end their current blocks, after Ctrl-C; a thread that hangs is left behind
BATCH_BLOCKS = 256  # blocks looked up in the target at once

Block = tuple[KeyInfo, BlockName]


@dataclass(slots=True)
class CopyReport:
    """Result of a copy.

    Attributes:
        dry_run: nothing was written. ``copied`` then counts blocks that the target lacks and has space for. Payloads
            were not read, so some of these blocks may turn out to be bad.
        copied, copied_bytes: copied blocks, and their bytes including trailers.
        present: blocks that the target already had, with the same size and a good trailer. (If the target's store
            cannot read only a blob's end: with the same size.)
        bad: blocks whose seal check failed, and blocks that only a newer version can judge.
        failed: blocks that could not be read or written, or whose name in the target holds a newer version's block.
        left_out: namespaces whose blocks are not copied, and why.
        skipped: blocks of these namespaces, except those counted as ``present``. (None is ``present`` if the source's
            ``config.json`` is missing: it is needed to check the target's trailers.)
        no_room: the target is full or reached its limit; the remaining blocks were not checked.
        seen_bytes: bytes of all blocks that were looked at, as listed: copied, present, bad and others.
    """

    dry_run: bool = False
    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    bad: int = 0
    failed: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    no_room: bool = False
    seen_bytes: int = 0

    @property
    def found_none(self) -> bool:
        """Whether there were no blocks to copy."""
        return not (self.copied or self.present or self.bad or self.failed or self.skipped or self.no_room)


def find_blocks(store: Store, prefixes: Iterable[str]) -> Iterator[Block]:
    """The blocks whose names start with one of the prefixes; a prefix may be a complete name."""
    for prefix in prefixes:
        yield from list_blocks(store, prefix)


class RateLimit:
    """Delays threads so that they move at most ``bytes_per_s`` together. Any thread may call it.

    Each piece of work is given a time slot of its own, after the slots given before; a thread waits for its slot. Time
    in which nothing was moved is not made up for.

    Args:
        bytes_per_s: more than 0.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()  # guards _free_at; held for a few instructions
        self._free_at = clock()

    def reserve(self, size_bytes: int) -> float:
        """Take the next slot for ``size_bytes``. Returns the seconds until it begins."""
        with self._lock:
            now = self._clock()
            begins_at = max(now, self._free_at)
            self._free_at = begins_at + size_bytes / self._bytes_per_s
        return begins_at - now


class Copier:
    """Copies blocks. For one thread; it starts worker threads of its own.

    Args:
        room_bytes: maximum bytes to copy; None: until the target refuses.
        dry_run: only find the blocks to copy; the target is only read.
        rate: bounds how fast blocks are copied; None: no bound.
        on_progress: called with the report after each block and each batch.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        room_bytes: int | None = None,
        dry_run: bool = False,
        rate: RateLimit | None = None,
        on_progress: Callable[[CopyReport], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = target
        self._tails = target if isinstance(target, SupportsTail) else None
        self._room_bytes = room_bytes
        self._on_progress = on_progress
        self._rate = rate
        self._stopped = threading.Event()  # set at the end: threads stop between two blocks
        self._own = threading.local()  # each thread's BlockReader
        self._lock = threading.Lock()  # guards the report's counts
        self._namespaces: set[str] = set()
        self.report = CopyReport(dry_run=dry_run)

    def copy(self, blocks: Iterable[Block]) -> CopyReport:
        """Copy the blocks that the target lacks or has damaged.

        Raises:
            StoreError: a storage call failed for good, or the storage is unavailable.
        """
        left = iter(blocks)
        pool = DaemonPool(THREADS, "kvtiers-copy")
        try:
            while not self.report.no_room and (batch := list(islice(left, BATCH_BLOCKS))):
                self._copy_batch(batch, pool)
        finally:
            self._stopped.set()
            pool.shutdown(END_S)
        return self.report

    def _copy_batch(self, batch: list[Block], pool: DaemonPool) -> None:
        sizes = self._target.size_many([info.key for info, _ in batch])
        looks = [pool.submit(self._look, *look) for look in zip(batch, sizes, strict=True)]
        wanted = self._take_wanted(batch, sizes, (look.result() for look in looks))
        wanted_bytes = sum(info.size for info, _ in wanted)
        self._count(seen_bytes=sum(info.size for info, _ in batch) - wanted_bytes)
        if self.report.dry_run:
            self._count(copied=len(wanted), copied_bytes=wanted_bytes, seen_bytes=wanted_bytes)
        else:
            for copied in as_completed([pool.submit(self._copy_block, *block) for block in wanted]):
                copied.result()
                self._on_progress(self.report)
        self._on_progress(self.report)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self.report, name, getattr(self.report, name) + count)

    def _look(self, block: Block, size: int | Exception | None) -> bool | None:
        """Whether a block is wanted: the target, which reports this size, lacks it or has it damaged.

        None: the target's blob cannot be judged, and stays.
        """
        info, name = block
        if isinstance(size, Exception):
            if not _is_refused(size):
                raise size
            return None
        if size is None or len(name.digits) % 2:  # no block has such a name, which reading it will say
            return True
        if self._tails is None:
            return size != info.size
        try:  # a newer version's block may have another size
            _, trailer = self._tails.get_tail(info.key, TRAILER_BYTES) or (0, b"")
            self._reader.seal_for(name).check_trailer(name.offload_key, trailer, size - TRAILER_BYTES)
        except SealError as e:
            return None if e.foreign else True
        except BlobCorruptError:  # the key no longer holds a blob
            return True
        except StoreError as e:  # for example a bad sector; if the storage is down, sizes cannot be read either
            if not (e.retryable or _is_refused(e)):
                raise
            return None
        return size != info.size

    def _take_wanted(
        self, batch: list[Block], sizes: Sequence[int | Exception | None], looks: Iterable[bool | None]
    ) -> list[Block]:
        """The wanted blocks, as far as the target has space; counts the others."""
        wanted = []
        for (info, name), size, is_wanted in zip(batch, sizes, looks, strict=True):
            # Space that a replaced longer blob would free does not count, because a bad block does not replace it.
            more_bytes = max(0, info.size - (size if isinstance(size, int) else 0))
            if is_wanted is None:
                self.report.failed += 1
            elif not is_wanted:
                self.report.present += 1
            elif not self._has_namespace(name.namespace):
                self.report.skipped += 1
            elif self.report.no_room or (self._room_bytes is not None and more_bytes > self._room_bytes):
                self.report.no_room = True
                break
            else:
                if self._room_bytes is not None:
                    self._room_bytes -= more_bytes
                wanted.append((info, name))
        return wanted

    def _has_namespace(self, namespace: str) -> bool:
        """Whether the target has the namespace's identity, which is copied first; if not, notes why."""
        if namespace not in self._namespaces and namespace not in self.report.left_out:
            try:
                problem = self._copy_identity(namespace)
            except StoreFullError:
                self.report.no_room = True
                return True
            except StorePermissionError as e:
                if not _is_refused(e):
                    raise
                problem = str(e)
            if problem:
                self.report.left_out[namespace] = problem
            else:
                self._namespaces.add(namespace)
        return namespace in self._namespaces

    def _copy_identity(self, namespace: str) -> str:
        key = f"{namespace}/{CONFIG_FILE_NAME}"
        data = read_identity(self._source, namespace) and read_blob(self._source, key, CONFIG_BYTES_MAX)
        if not data:
            return f"the source's {key} is missing or damaged"
        if not self.report.dry_run:
            self._target.put(key, [memoryview(data)])  # an existing file is kept
        is_new = self.report.dry_run and self._target.size(key) is None
        if not is_new and read_identity(self._target, namespace) is None:
            return f"the target's {key} is damaged or belongs to another namespace"
        return ""

    def _copy_block(self, info: KeyInfo, name: BlockName) -> None:
        if self._stopped.wait(0.0 if self._rate is None else self._rate.reserve(info.size)):
            return
        self._count(seen_bytes=info.size)
        reader = self._reader
        try:
            try:
                reason, _ = reader.read(info, name)
            except StorePermissionError:  # one file, perhaps written by a command run as root: continue
                self._count(failed=1)
                return
            if reason is not None:
                self._count(bad=1)
                return
            self._put(info, [reader.data])
            self._count(copied=1, copied_bytes=info.size)
        except BlobNotFoundError:
            pass  # removed since it was listed
        except StoreFullError:
            self.report.no_room = True
            self._stopped.set()
        except StoreError as e:
            if not (e.retryable or _is_refused(e)):
                raise
            self._count(failed=1)

    @property
    def _reader(self) -> BlockReader:
        """The thread's reader of the source."""
        if not hasattr(self._own, "reader"):
            self._own.reader = BlockReader(self._source)
        reader: BlockReader = self._own.reader
        return reader

    def _put(self, info: KeyInfo, parts: list[memoryview]) -> None:
        if info.mtime > 0 and isinstance(self._target, SupportsAges):
            self._target.put_aged(info.key, parts, used_at=min(info.mtime, time.time()))
        else:
            self._target.put(info.key, parts, overwrite=True)


def _is_refused(e: Any) -> bool:
    """Whether the error is about one file's permissions (such as another user's folder), so that copying can continue.

    If a server refuses, the reason is mostly the credentials, which would fail for all blobs.
    """
    return isinstance(e, StorePermissionError) and bool(e.key) and isinstance(e.__cause__, OSError)
