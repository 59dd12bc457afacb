"""Verify: check the seals of all stored blocks, on threads. Neither reads nor checksums hold the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import xxhash

from ..blocks.file_mapper import BlockName, parse_block_name
from ..blocks.seal import TRAILER_BYTES
from ..daemon_pool import DaemonPool
from ..errors import BlobNotFoundError, StoreError
from ..store import KeyInfo, Store
from .block_reader import NO_IDENTITY, BlockReader
from .inventory import list_blocks, unreadable_count
from .seal_kinds import seal_kind

BAD_KEYS_MAX = 10_000  # bad blocks named in a report; further bad blocks are only counted
NETWORK_THREADS = 8  # threads per worker if reads mostly wait for a network
BATCH_BLOCKS = 256  # blocks given to the threads at once, so that a listing need not fit in memory
END_S = 5.0  # for threads to end their current blocks, after Ctrl-C; a thread that hangs is left behind


@dataclass(kw_only=True)
class VerifyReport:
    """Result of checking blocks.

    Attributes:
        bad: number of bad blocks.
        bad_blocks: name of a bad block -> reason, for up to ``BAD_KEYS_MAX`` of them.
        kept: bad blocks that a repair leaves alone, because the namespace's identity is missing.
        foreign: blocks that only a newer version can judge; they are left alone.
        seals: kind of seal (see ``seal_kinds``) -> number of blocks that are not bad.
        failed: blocks that could not be read, and files and folders that may not be read or that the disk cannot read.
    """

    blocks: int = 0
    bytes: int = 0
    bad: int = 0
    bad_blocks: dict[str, str] = field(default_factory=dict)
    foreign: int = 0
    failed: int = 0
    kept: int = 0
    seals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subset:
    """A share of all blocks, chosen by their hashes, so the same blocks belong to it in every run and tier.

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


class _Finding(NamedTuple):
    """The result for a block: why it is bad, whether only another version can judge it, and its kind of seal."""

    reason: str | None = None
    foreign: bool = False
    kind: str = ""
    failed: bool = False


def verify_blocks(
    store: Store, *, workers: int, subset: Subset = ALL, on_progress: Callable[[VerifyReport], None] = lambda _: None
) -> VerifyReport:
    """Check the blocks of a subset.

    Args:
        workers: threads, or ``NETWORK_THREADS`` times as many if reads mostly wait for a network.
        on_progress: called with the report now and then.

    Raises:
        StoreError: the blocks cannot be listed.
    """
    report = VerifyReport()
    own = threading.local()  # each thread's BlockReader

    def check(block: tuple[KeyInfo, BlockName]) -> _Finding:
        if not hasattr(own, "reader"):
            own.reader = BlockReader(store)
        return _check_block(own.reader, *block)

    blocks = (block for block in list_blocks(store) if subset.has(block[1]))
    pool = DaemonPool(workers * (NETWORK_THREADS if store.capabilities.latency_bound else 1), "kvtiers-verify")
    try:
        while batch := list(islice(blocks, BATCH_BLOCKS)):
            findings = [pool.submit(check, block) for block in batch]
            for (info, _), found in zip(batch, findings, strict=True):
                _count(report, info, found.result())
            on_progress(report)
    finally:
        pool.shutdown(END_S)
    report.failed += unreadable_count(store)
    return report


def _check_block(reader: BlockReader, info: KeyInfo, name: BlockName) -> _Finding:
    try:
        reason, foreign = reader.read(info, name)
    except BlobNotFoundError:  # removed since it was listed
        return _Finding()
    except StoreError:
        return _Finding(failed=True)
    kind = seal_kind(reader.data[-TRAILER_BYTES:]) if len(reader.data) == info.size else ""
    return _Finding(reason, foreign, kind)


def _count(report: VerifyReport, info: KeyInfo, found: _Finding) -> None:
    report.blocks += 1
    report.bytes += info.size
    report.failed += found.failed
    if found.reason is None or found.foreign:
        report.foreign += found.foreign
        if found.kind:
            report.seals[found.kind] = report.seals.get(found.kind, 0) + 1
        return
    report.bad += 1
    report.kept += found.reason == NO_IDENTITY
    if len(report.bad_blocks) < BAD_KEYS_MAX:
        report.bad_blocks[info.key] = str(found.reason)


@dataclass(slots=True)
class RepairResult:
    """Result of repairing blocks.

    Attributes:
        removed: bad blocks that were deleted.
        good_again: blocks that are good now, or absent: they were replaced, or the first read was damaged.
        failed: blocks that could not be read again or removed.
    """

    removed: int = 0
    good_again: int = 0
    failed: int = 0


def repair(store: Store, bad: Mapping[str, str]) -> RepairResult:
    """Read the bad blocks once more, and remove those that are still bad. The next store job then writes good blocks.

    Args:
        bad: ``VerifyReport.bad_blocks``.
    """
    done = RepairResult()
    reader = BlockReader(store)
    for key, was in bad.items():
        name = parse_block_name(key)
        if name is None or was == NO_IDENTITY:
            continue
        try:
            size = store.size(key)
            reason, foreign = (None, False) if size is None else reader.read(KeyInfo(key, size, 0.0), name)
            if reason is None or foreign:
                done.good_again += 1
            elif reason == NO_IDENTITY:
                done.failed += 1
            else:
                store.delete(key)
                done.removed += 1
        except BlobNotFoundError:
            done.good_again += 1
        except StoreError:
            done.failed += 1
    return done
