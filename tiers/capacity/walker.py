"""Walker: goes through a root's listing piece by piece, measures it, and removes the oldest blocks on the way.

A pass is one walk through the whole listing, in as many steps as the caller likes. It sums sizes and samples ages. The
same pass removes blocks past their ``ttl``. It also removes the oldest blocks until enough bytes are removed: the
sample tells the age from which blocks belong to the wanted share of bytes. Neither the memory nor the cost of a step
grows with the root.

The sum of a pass leaves out blobs that are younger than the pass, because their writers' records count them
(``written``). If the store records uses as times, a young blob may be an old blob that was used. Then the pass sums
all blobs, and blobs put during the pass may count twice until the next pass. The sum may be too high, never too low.

Only blocks are removed, which are blobs with names made by FileMapper. Records, ``config.json`` and foreign files are
counted and kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ..blocks.file_mapper import parse_block_name
from ..errors import StoreError
from ..plain_logs import get_logger
from ..store import KeyInfo, Store, SupportsTouch
from .ages import AgeHistogram

logger = get_logger(__name__)

PAGE_KEYS = 1000  # keys between two looks at the clock, as many as an object store lists with a request
SAMPLE_BLOBS_MIN, SAMPLE_BLOBS_MAX = 1000, 16_384  # passed blocks in a sample; in a small root, all blocks
STUCK_KEYS_MAX = 65_536
STUCK_S = 600.0
STAMP_S = 1.0  # S3 and some file systems truncate times to seconds


@dataclass(slots=True)
class CollectReport:
    """A collector's actions since its last report; with ``dry_run``, the actions that it would have taken.

    Attributes:
        blobs, bytes: totals of the last complete listing, 0 before the first.
        removed_blobs, removed_bytes: totals by reason, "ttl" or "capacity".
        kept_by_error: number of blobs that could not be removed.
        leftovers: number of dead writers' files removed since the store was opened; with ``dry_run``, the number of
            files to remove.
    """

    dry_run: bool = False
    blobs: int = 0
    bytes: int = 0
    removed_blobs: dict[str, int] = field(default_factory=lambda: {"ttl": 0, "capacity": 0})
    removed_bytes: dict[str, int] = field(default_factory=lambda: {"ttl": 0, "capacity": 0})
    kept_by_error: int = 0
    leftovers: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which blocks a step should remove.

    Attributes:
        ttl_s: remove blocks of this age; infinite: no block.
        excess_bytes: stop removing the oldest blocks after so many bytes.
        share: remove only the oldest blocks, which hold this share of the bytes.
    """

    ttl_s: float = float("inf")
    excess_bytes: int = 0
    share: float = 0.0


@dataclass(slots=True)
class Pass:
    """One walk through the listing.

    Attributes:
        began: Unix seconds of the storage's clock.
        blobs, bytes: number and size of the blobs that were passed and kept.
        young_bytes: bytes of blobs younger than the pass, which are not in ``bytes``.
        foreign_bytes: bytes of blobs that are not blocks; part of ``bytes``.
        removed_bytes: bytes removed in this pass.
        largest_bytes: size of the largest block.
        tells_times: at least one blob had a time.
    """

    began: float
    blobs: int = 0
    bytes: int = 0
    young_bytes: int = 0
    foreign_bytes: int = 0
    removed_bytes: int = 0
    largest_bytes: int = 0
    tells_times: bool = False


class Sample:
    """Samples the ages of the blocks passed last, to tell which of the blocks ahead are the oldest.

    Keys are hashes. So passed blocks, removed or not, are a fair sample of the blocks ahead, with their ages at the
    time of the pass. A root that is smaller than a sample is known as a whole. Then only the blocks that stayed are
    ahead, and they have aged since.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._kept, self._removed = AgeHistogram(), AgeHistogram()  # ages since the last full sample
        self._full: AgeHistogram | None = None
        self._whole_at: float | None = None  # time at which ``_full`` was the whole root
        self._found: tuple[float, float] | None = None  # the last share that was asked for, and the answer

    def add(self, age_s: float, size: int) -> None:
        """Add a block that stays."""
        self._kept.add(age_s, size)

    def add_removed(self, age_s: float, size: int) -> None:
        """Add a block that is removed."""
        self._removed.add(age_s, size)

    def roll_over(self, *, is_end: bool) -> None:
        """Begin a new sample if this sample has enough blocks, or holds the whole root at the end of a pass."""
        is_large = self._kept.blobs + self._removed.blobs >= SAMPLE_BLOBS_MAX
        if is_large:
            self._kept.add_all(self._removed)
        if is_large or (is_end and (self._full is None or self._whole_at is not None)):
            self._full, self._whole_at = self._kept, None if is_large else self._monotonic()
            self._found = None
            self._kept, self._removed = AgeHistogram(), AgeHistogram()

    @property
    def is_usable(self) -> bool:
        """Whether the sample is large enough to tell which blocks are the oldest."""
        blobs = self._kept.blobs + self._removed.blobs if self._full is None else self._full.blobs
        return blobs >= (SAMPLE_BLOBS_MIN if self._full is None else 1)

    @property
    def is_whole(self) -> bool:
        """Whether the ages of all blocks of the root are known."""
        return self._whole_at is not None

    def age_of_oldest(self, share: float, *, knows_time: bool = True) -> float:
        """Return the age from which a block ahead belongs to the oldest ``share`` of bytes; infinite: unknown.

        Args:
            knows_time: False: ages count from the newest block, so they do not grow.
        """
        if self._full is not None:
            older_s = 0.0 if self._whole_at is None or not knows_time else self._monotonic() - self._whole_at
            if self._found is None or self._found[0] != share:
                self._found = share, self._full.age_of_oldest(share)
            return self._found[1] + older_s
        if not self.is_usable:
            return float("inf")
        both = AgeHistogram()
        both.add_all(self._kept)
        both.add_all(self._removed)
        return both.age_of_oldest(share)


class Walker:
    """Walks through one root. For one thread.

    Args:
        store: the root.
        grace_s: blocks younger than this stay.
        on_removed: called with the names of removed blocks and the reason, batch by batch.
        monotonic: seconds.

    Attributes:
        current: the pass under way; None: the next step begins one.
        last: the last complete pass since ``forget``.
        newest: the latest time of a blob so far; 0.0: no blob was listed.
    """

    def __init__(
        self,
        store: Store,
        *,
        grace_s: float = 0.0,
        on_removed: Callable[[list[str], str], None] = lambda names, reason: None,  # noqa: ARG005
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._grace_s = grace_s
        self._on_removed = on_removed
        self._monotonic = monotonic
        self._sums_young = isinstance(store, SupportsTouch)
        self._listing: Iterator[KeyInfo] = iter(())
        self._sample = Sample(self._monotonic)
        self._stuck: set[str] = set()  # blocks that could not be removed, which would hide the others
        self._stuck_until = float("-inf")  # when to try to remove these blocks again
        self.current: Pass | None = None
        self.last: Pass | None = None
        self.newest = 0.0

    def forget(self) -> None:
        """Forget everything, because another collector worked meanwhile."""
        self._listing = iter(())
        self._sample = Sample(self._monotonic)
        self.current = self.last = None

    def step(
        self,
        wanted: Wanted,
        report: CollectReport,
        *,
        now: float | None,
        keys_max: float = float("inf"),
        until: float = float("inf"),
    ) -> bool:
        """Continue the pass until it ends, the excess is removed, ``keys_max`` keys are passed, or ``until``.

        Args:
            wanted: the blocks to remove.
            report: counts the removed blobs.
            now: Unix seconds of the storage's clock; None: unknown, so ages count from the newest blob.
            until: time limit, by ``monotonic``.

        Returns:
            Whether the pass has ended.

        Raises:
            StoreError: the root cannot be listed; the next step begins a new pass.
        """
        if self.current is None:
            self._listing = self._store.keys()
            self.current = Pass(float("inf") if now is None else now)
            if self._monotonic() >= self._stuck_until:
                self._stuck.clear()
                self._stuck_until = self._monotonic() + STUCK_S
        began_at = self._monotonic()
        removed_before = report.removed_bytes["capacity"]
        walked = 0
        try:
            while walked < keys_max and self._monotonic() < until:
                now_s = None if now is None else now + self._monotonic() - began_at
                before = report.removed_bytes["capacity"]
                excess = wanted.excess_bytes - before + removed_before
                keys = int(min(PAGE_KEYS, keys_max - walked))
                count = self._pass_page(self.current, replace(wanted, excess_bytes=excess), report, now_s, keys)
                walked += count
                if count > 0 and wanted.excess_bytes > 0 >= excess - report.removed_bytes["capacity"] + before:
                    return False
                if count == 0:
                    self.last, self.current = self.current, None
                    return True
        except StoreError:
            self.current = None
            raise
        return False

    @property
    def knows_whole(self) -> bool:
        """Whether the root is so small that the ages of all its blocks are known."""
        return self._sample.is_whole

    def _pass_page(self, current: Pass, wanted: Wanted, report: CollectReport, now: float | None, keys_max: int) -> int:
        """Pass up to ``keys_max`` keys; return their number. 0: the listing has ended."""
        excess = wanted.excess_bytes
        age_s_min = float("inf")
        if excess > 0:
            age_s_min = self._sample.age_of_oldest(wanted.share, knows_time=now is not None)
        reference_s = self.newest if now is None else now
        grace_s = self._grace_s if now is not None else 0.0 if reference_s else float("inf")
        doomed: dict[str, list[KeyInfo]] = {"ttl": [], "capacity": []}
        count = doomed_bytes = 0
        sums_young, sample, stuck = self._sums_young, self._sample, self._stuck
        for info in self._listing:
            count += 1
            key, size, mtime = info
            current.blobs += 1
            if sums_young or mtime <= current.began + STAMP_S:
                current.bytes += size
            else:
                current.young_bytes += size
            if mtime > self.newest:
                self.newest = mtime
            current.tells_times |= mtime != 0.0
            if is_block(key):
                if size > current.largest_bytes:
                    current.largest_bytes = size
                age_s = reference_s - mtime
                if -STAMP_S < age_s < 0.0:
                    age_s = 0.0
                # For ttl, a block dated 1 h in the future counts as 1 h old, because its clock was wrong by 1 h.
                if abs(age_s) >= grace_s:
                    if abs(age_s) >= wanted.ttl_s:
                        doomed["ttl"].append(info)
                    elif key in stuck:
                        pass
                    elif age_s >= age_s_min and doomed_bytes < excess:
                        doomed["capacity"].append(info)
                        doomed_bytes += size
                        sample.add_removed(age_s, size)
                    else:
                        sample.add(age_s, size)
            else:
                current.foreign_bytes += size
            if count >= keys_max:
                break
        sample.roll_over(is_end=count == 0)
        for reason, infos in doomed.items():
            if infos:
                self._remove(infos, reason, current, report)
        return count

    def _remove(self, infos: list[KeyInfo], reason: str, current: Pass, report: CollectReport) -> None:
        if report.dry_run:
            gone = infos
        else:
            outcomes = self._store.delete_many([info.key for info in infos])
            gone = [info for info, error in zip(infos, outcomes, strict=True) if error is None]
            kept = [info.key for info, error in zip(infos, outcomes, strict=True) if error is not None]
            self._stuck.update(kept[: STUCK_KEYS_MAX - len(self._stuck)])
            error = next((error for error in outcomes if error is not None), None)
            if error is not None:
                logger.warning("%d of %d blocks could not be removed: %s", len(infos) - len(gone), len(infos), error)
        gone_bytes = sum(info.size for info in gone)
        current.bytes -= gone_bytes
        current.removed_bytes += gone_bytes
        report.removed_blobs[reason] += len(gone)
        report.removed_bytes[reason] += gone_bytes
        report.kept_by_error += len(infos) - len(gone)
        if not report.dry_run:
            self._on_removed([info.key for info in gone], reason)


def is_block(key: str) -> bool:
    """Whether a name has the form that FileMapper gives to blocks."""
    return parse_block_name(key) is not None


def listed_bytes(store: Store) -> int:
    """Bytes in a root as a collector counts them, without the store's own folders.

    Raises:
        StoreError: the root cannot be listed.
    """
    return sum(info.size for info in store.keys())  # noqa: SIM118 - not a dict
