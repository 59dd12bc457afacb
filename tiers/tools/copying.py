"""Copying blocks from one tier's storage to another's.

A block is copied as it is stored, trailer and all: name and seal say which block it is in every tier alike, and what is
encrypted stays so. Only from one format to another it gets another name and seal (``conversion``). Each is
checked on its way; what fails is not copied. Nothing is removed from the source.

A block keeps its age (``SupportsAges``): to the target's collector it is as old as to the source's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvtiers.tiers.blocks.file_mapper import CONFIG_FILE_NAME, identity_file_name
from kvtiers.tiers.blocks.seal import NO_TRAILER, TRAILER_BYTES, Seal, fingerprint_in
from kvtiers.tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    SealError,
    StoreError,
    StoreFullError,
    StorePermissionError,
)
from kvtiers.tiers.store import KeyInfo, Store, SupportsAges, SupportsTail, sizes_of
from kvtiers.tiers.tools.block_reader import BlockReader, read_identities, read_small
from kvtiers.tiers.tools.conversion import Converter
from kvtiers.tiers.tools.inventory import BlockName, list_blocks

THREADS = 8  # reading or writing mostly waits, on one side at least
BATCH_BLOCKS = 256  # asked for at once, whether the target has them

Block = tuple[KeyInfo, BlockName]


class _Unusable(Exception):
    """One namespace or block cannot be copied; the others may."""


@dataclass(frozen=True, slots=True)
class _Move:
    info: KeyInfo
    name: BlockName
    target: str
    seal: Seal | None  # None: as it is stored
    fingerprint: bytes = b""  # of the block that the seal is for


@dataclass(slots=True)
class CopyReport:
    """What became of the source's blocks.

    Attributes:
        dry_run: nothing was written. ``copied`` is then what the target lacks and has room for; payloads were not read,
            so some of these blocks may turn out to be bad.
        copied, copied_bytes: with their trailers.
        present: blocks that the target had, of the same size and with a good trailer. (Of a store that cannot read a
            blob's end by itself, of the same size.)
        bad: blocks whose seal failed, that have none, or that only a newer version can judge.
        errors: blocks that could not be read or written, or whose names another engine's have in the target, or a newer
            version's.
        left_out: namespaces whose blocks are not copied, and why; these are among ``errors``.
        no_room: the target is full, or its bound reached; the rest was not looked at.
    """

    dry_run: bool = False
    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    bad: int = 0
    errors: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    no_room: bool = False

    @property
    def found_none(self) -> bool:
        """Whether there was nothing to copy."""
        return not (self.copied or self.present or self.bad or self.errors or self.no_room)


def find_blocks(store: Store, prefixes: Iterable[str]) -> Iterator[Block]:
    """The blocks whose names begin so; a whole name is its own beginning."""
    for prefix in prefixes:
        yield from list_blocks(store, prefix)


class Copier:
    """Copies blocks. For one thread; it has its own.

    Args:
        room_bytes: how much may be copied; None: until the target refuses.
        converter: where the target's format is another.
        takes_unverified: copy blocks without a seal, too.
        dry_run: only find out what would be copied; the target is only read.
        on_progress: called with the report now and then.
        now: Unix seconds.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        room_bytes: int | None = None,
        converter: Converter | None = None,
        takes_unverified: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[CopyReport], None] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._target = target
        self._tails = target if isinstance(target, SupportsTail) else None
        self._room_bytes = room_bytes
        self._on_progress = on_progress
        self._converter = converter
        # A protected block cannot be sealed anew without its key.
        as_stored = converter is None
        self._readers = [
            BlockReader(source, takes_unverified=takes_unverified, takes_protected=as_stored) for _ in range(THREADS)
        ]
        self._namespaces: set[str] = set()
        self._now = now
        self.report = CopyReport(dry_run=dry_run)

    def copy(self, blocks: Iterable[Block]) -> CopyReport:
        """Copy what the target does not have.

        Raises:
            StoreError: the storage refuses for good, or cannot be asked.
        """
        left = iter(blocks)
        with ThreadPoolExecutor(THREADS) as pool:
            while not self.report.no_room and (batch := list(islice(left, BATCH_BLOCKS))):
                moves = [move for block in batch if (move := self._plan(*block)) is not None]
                wanted = self._take_wanted(moves, self._look(moves, pool))
                if self.report.dry_run:
                    self.report.copied += len(wanted)
                    self.report.copied_bytes += sum(move.info.size for move in wanted)
                    wanted = []
                parts = [wanted[seat::THREADS] for seat in range(THREADS)]
                for report in pool.map(self._copy_some, parts, self._readers):
                    self._add(report)
                self._on_progress(self.report)
        return self.report

    def _look(self, moves: list[_Move], pool: ThreadPoolExecutor) -> list[Any]:
        """Size and end of what the target has, parallel to the moves; None where there is nothing, or an exception."""
        keys = [move.target for move in moves]
        found: list[Any] = list(sizes_of(self._target, keys, kept=StorePermissionError))
        parts = [(keys[seat::THREADS], found[seat::THREADS]) for seat in range(THREADS)]
        for seat, ends in enumerate(pool.map(lambda part: list(map(self._end, *part)), parts)):
            found[seat::THREADS] = ends
        return found

    def _end(self, key: str, size: Any) -> Any:
        if not isinstance(size, int):
            return size
        if self._tails is None:
            return size, None
        try:
            return self._tails.get_tail(key, TRAILER_BYTES)
        except BlobCorruptError:
            return None  # it is no blob any more
        except StoreError as e:
            # Not to be replaced: it may be a newer version's. A storage that is away fails when sizes are asked.
            return _Unusable(str(e)) if e.retryable else e

    def _take_wanted(self, moves: list[_Move], found: list[Any]) -> list[_Move]:
        """Those that the target lacks, or has damaged, and has room for."""
        wanted = []
        for move, there in zip(moves, found, strict=True):
            if isinstance(there, _Unusable) or _is_refused(there):
                self.report.errors += 1
                continue
            if isinstance(there, Exception):
                raise there
            is_present = there is not None and self._is_good(move, *there)
            if is_present is None:
                self.report.errors += 1
                continue
            if is_present:
                self.report.present += 1
                continue
            if move.seal is None and move.name.namespace in self.report.left_out:
                self.report.errors += 1
                continue
            more_bytes = move.info.size - (0 if there is None else there[0])
            if self._room_bytes is not None and more_bytes > self._room_bytes:
                self.report.no_room = True
                break
            try:
                if move.seal is None and move.name.namespace not in self._namespaces:
                    self._copy_namespace(move.name.namespace)
            except StoreFullError:
                self.report.no_room = True
                break
            except (_Unusable, StorePermissionError) as e:
                if not (isinstance(e, _Unusable) or _is_refused(e)):
                    raise
                self.report.left_out[move.name.namespace] = str(e)
                self.report.errors += 1
                continue
            if self._room_bytes is not None:
                self._room_bytes -= more_bytes
            wanted.append(move)
        return wanted

    def _plan(self, info: KeyInfo, name: BlockName) -> _Move | None:
        if self._converter is None:
            return _Move(info, name, info.key, None)
        try:
            found = self._converter.convert(info, name)
        except BlobNotFoundError:
            return None  # removed since it was listed
        except StoreFullError:
            self.report.no_room = True
            return None
        except StoreError as e:
            unreadable = isinstance(e, StorePermissionError) and e.key == info.key
            if not e.retryable and not unreadable:
                raise
            self.report.errors += 1
            return None
        if found is None:
            self.report.bad += 1
            return None
        return _Move(info, name, found.name.path, found.seal, found.fingerprint)

    def _is_good(self, move: _Move, size: int, tail: bytes | None) -> bool | None:
        """Whether that is the block in good order, by the checks of a store job.

        None: it is another engine's, or a newer version's, and never replaced.
        """
        if tail is None or tail == NO_TRAILER:  # a store shows this one only where its engines take it
            return size == move.info.size
        seal = move.seal or self._readers[0].seal_for(move.name, tail)
        if size != move.info.size:
            return None if seal.is_foreign(tail) else False
        try:
            seal.check_trailer(move.name.offload_key, tail, size - TRAILER_BYTES)
        except SealError as e:
            return None if e.foreign else False
        return True

    def _copy_namespace(self, namespace: str) -> None:
        identities = read_identities(self._source, namespace)
        if not identities:
            raise _Unusable(f"the source's {namespace}/{CONFIG_FILE_NAME} is missing or damaged")
        own = [identity_file_name(namespace, each) for each in identities if self._source.shares_folders]
        for key in (f"{namespace}/{CONFIG_FILE_NAME}", *own):
            data = read_small(self._source, key)
            if data is not None and not self.report.dry_run:
                self._target.put(key, [memoryview(data)])  # what is there stays
        is_new = self.report.dry_run and read_small(self._target, f"{namespace}/{CONFIG_FILE_NAME}") is None
        if not is_new and not read_identities(self._target, namespace):
            raise _Unusable(f"the target's {namespace}/{CONFIG_FILE_NAME} is damaged or another namespace's")
        self._namespaces.add(namespace)

    def _copy_some(self, moves: list[_Move], reader: BlockReader) -> CopyReport:
        report = CopyReport()
        for move in moves:
            try:
                try:
                    reason, _ = reader.read(move.info, move.name)
                except StorePermissionError:  # of one file, as by a command that was run by root: no reason to stop
                    report.errors += 1
                    continue
                if reason is not None:
                    report.bad += 1
                    continue
                payload, trailer = reader.data[:-TRAILER_BYTES], reader.data[-TRAILER_BYTES:]
                if move.seal is not None:
                    if fingerprint_in(trailer) != move.fingerprint:  # another engine's since it was planned
                        report.errors += 1
                        continue
                    trailer = memoryview(move.seal.trailer(move.name.offload_key, payload))
                self._put(move, [payload, trailer])
            except BlobNotFoundError:
                continue  # removed since it was listed
            except StoreFullError:
                report.no_room = True
                break
            except StoreError as e:
                if not (e.retryable or _is_refused(e)):
                    raise
                report.errors += 1
                continue
            report.copied += 1
            report.copied_bytes += move.info.size
        return report

    def _put(self, move: _Move, parts: list[memoryview]) -> None:
        """Replace what is there, which is no good block of this namespace."""
        used_at = self._source.used_at(move.info) if isinstance(self._source, SupportsAges) else move.info.mtime
        if used_at > 0 and isinstance(self._target, SupportsAges):
            self._target.put_aged(move.target, parts, used_at=min(used_at, self._now()))
        else:
            self._target.put(move.target, parts, overwrite=True)

    def _add(self, part: CopyReport) -> None:
        total = self.report
        for name in ("copied", "copied_bytes", "present", "bad", "errors"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.no_room |= part.no_room


def _is_refused(e: Any) -> bool:
    """Whether it is one file's rights, as of a folder that a command of another user made: no reason to stop.

    What a server refuses is mostly refused by its credentials, for all blobs alike.
    """
    return isinstance(e, StorePermissionError) and bool(e.key) and isinstance(e.__cause__, OSError)
