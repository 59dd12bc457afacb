"""Verify: check the seals of all stored blocks, unit by unit, in worker processes.

A unit holds the blocks of one namespace and rank whose hashes start with the same two hexadecimal digits, 1/256 of all.
Units are independent, so they can be checked in parallel, and a finished unit is not repeated after an interruption.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, repeat

import xxhash

from ..blocks.file_mapper import BlockName, parse_block_name
from ..blocks.seal import TRAILER_BYTES
from ..errors import BlobNotFoundError, StoreError, StorePermissionError, StoreUnavailableError
from ..store import KeyInfo, Store
from .block_reader import NO_IDENTITY, BlockReader
from .inventory import Share, list_blocks
from .seal_kinds import seal_kind

UNIT_DIGITS = 2
DAMAGED_FOLDERS_MAX = 16  # that cannot be listed; more mean that the device or its connection is gone
BAD_KEYS_MAX = 10_000  # listed by name in a result; further bad blocks are only counted
NETWORK_THREADS = 8  # threads of a worker, if reads mostly wait for a network
BATCH_BLOCKS = 64  # given to the threads at once, so that a listing need not fit in memory


@dataclass(kw_only=True)
class VerifyReport:
    """Result of checking blocks.

    Attributes:
        bad: name and reason of each bad block, up to ``BAD_KEYS_MAX``.
        kept: bad blocks that a repair leaves alone, because the namespace's identity is missing.
        foreign: blocks that only a newer version can judge; they are left alone.
        seals: kind of seal (see ``seal_kinds``) -> number of blocks that are not bad.
        errors: blocks that could not be read, and files and folders that may not be read or that the disk cannot read.
    """

    blocks: int = 0
    bytes: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    bad_count: int = 0
    foreign: int = 0
    errors: int = 0
    kept: int = 0
    seals: dict[str, int] = field(default_factory=dict)

    def add(self, part: VerifyReport) -> None:
        """Add the result of other blocks."""
        for name in ("blocks", "bytes", "bad_count", "foreign", "errors", "kept"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for kind, count in part.seals.items():
            self.seals[kind] = self.seals.get(kind, 0) + count
        self.bad += part.bad[: BAD_KEYS_MAX - len(self.bad)]


@dataclass
class UnitResult(VerifyReport):
    """Result of checking a unit."""

    unit: str


@dataclass(frozen=True, slots=True)
class Subset:
    """A share of all blocks, chosen by their hashes: a block that was stored again, or to another tier, stays in it.

    Attributes:
        share: more than 0, up to 1.
        seed: chooses another subset of the same size.
    """

    share: float
    seed: int = 0

    def has(self, name: BlockName) -> bool:
        """Whether the block belongs to the subset."""
        return self.share >= 1 or xxhash.xxh3_64_intdigest(name.digits.encode(), self.seed) < self.share * 2**64


ALL = Subset(1.0)


def find_units(
    store: Store, on_progress: Callable[[int], None] = lambda _: None, subset: Subset = ALL
) -> dict[str, Share]:
    """Find the units that have blocks of the subset: prefix of the blocks' names -> total of the unit's part of it."""
    units: dict[str, Share] = {}
    for count, (info, name) in enumerate(list_blocks(store)):
        if subset.has(name):
            prefix = f"{name.namespace}_r{name.rank}/{name.digits[:UNIT_DIGITS]}"
            units.setdefault(prefix, Share()).add(info.size)
        if count % 1000 == 0:
            on_progress(count)
    return units


class Verifier:
    """Checks units. For one thread; it starts worker threads of its own if reads mostly wait for a network.

    Args:
        subset: the blocks to check.
    """

    def __init__(self, store: Store, *, subset: Subset = ALL) -> None:
        self._store = store
        self._subset = subset
        self._threads = NETWORK_THREADS if store.capabilities.latency_bound else 1
        self._own = threading.local()  # each thread's BlockReader
        self._lock = threading.Lock()  # guards a result
        self._damaged_folders = 0

    def check(self, unit: str) -> UnitResult:
        """Check the blocks of a unit.

        Raises:
            StoreError: the unit cannot be listed.
        """
        result = UnitResult(unit)
        damaged = damaged_count(self._store)
        with ThreadPoolExecutor(self._threads) as pool:
            blocks = (block for block in self._list(unit, result) if self._subset.has(block[1]))
            while batch := list(islice(blocks, BATCH_BLOCKS)):
                list(pool.map(self._check_block, batch, repeat(result)))
        result.errors += damaged_count(self._store) - damaged
        return result

    def _list(self, unit: str, result: UnitResult) -> Iterator[tuple[KeyInfo, BlockName]]:
        """List the unit. If listings cost no requests, list folder by folder, which avoids scanning their parent."""
        if self._store.capabilities.latency_bound:
            yield from list_blocks(self._store, unit)
            return
        for digit in range(16):
            try:
                yield from list_blocks(self._store, f"{unit}{digit:x}/")
            except StorePermissionError:
                result.errors += 1  # another user's folder; the other folders are still checked
            except StoreUnavailableError:
                self._damaged_folders += 1
                if self._damaged_folders > DAMAGED_FOLDERS_MAX:
                    raise
                result.errors += 1

    def _check_block(self, block: tuple[KeyInfo, BlockName], result: UnitResult) -> None:
        info, name = block
        if not hasattr(self._own, "reader"):
            self._own.reader = BlockReader(self._store)
        reader: BlockReader = self._own.reader
        reason: str | None = None
        foreign = failed = False
        kind = ""
        try:
            reason, foreign = reader.read(info, name)
            if len(reader.data) == info.size:
                kind = seal_kind(reader.data[-TRAILER_BYTES:])
        except BlobNotFoundError:
            pass  # removed since it was listed
        except StoreError:
            failed = True
        with self._lock:
            result.blocks += 1
            result.bytes += info.size
            result.errors += failed
            if reason is None or foreign:
                result.foreign += foreign
                if kind:
                    result.seals[kind] = result.seals.get(kind, 0) + 1
                return
            result.bad_count += 1
            result.kept += reason == NO_IDENTITY
            if len(result.bad) < BAD_KEYS_MAX:
                result.bad.append((info.key, str(reason)))


@dataclass(slots=True)
class RepairResult:
    """Result of repairing blocks.

    Attributes:
        removed: bad blocks that were deleted.
        good_again: blocks that are good now, or absent: they were replaced, or the first read was damaged.
        errors: blocks that could not be read again or removed.
    """

    removed: int = 0
    good_again: int = 0
    errors: int = 0


def repair(store: Store, results: Iterable[UnitResult]) -> RepairResult:
    """Read the bad blocks once more, and remove those that are still bad. The next store job then writes good ones."""
    done = RepairResult()
    reader = BlockReader(store)
    for key, was in (bad for result in results for bad in result.bad):
        name = parse_block_name(key)
        if name is None or was == NO_IDENTITY:
            continue
        try:
            size = store.size(key)
            reason, foreign = (None, False) if size is None else reader.read(KeyInfo(key, size, 0.0), name)
            if reason is None or foreign:
                done.good_again += 1
            elif reason == NO_IDENTITY:
                done.errors += 1
            else:
                store.delete(key)
                done.removed += 1
        except BlobNotFoundError:
            done.good_again += 1
        except StoreError:
            done.errors += 1
    return done


def damaged_count(store: Store) -> int:
    """How many files and folders a store's listings have skipped because the disk could not read them."""
    count: int = getattr(store, "damaged", 0)
    return count


def decode_result(content: Mapping[str, object]) -> UnitResult:
    """Decode a result from JSON."""
    result = UnitResult(**content)  # type: ignore[arg-type]
    result.bad = [(key, reason) for key, reason in result.bad]
    return result
