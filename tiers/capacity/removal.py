"""Removal: the two listings of a collector's run, and how blobs are removed while they go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..plain_logs import get_logger
from ..store import KeyInfo, Store
from .ages import AgeHistogram, Ages, Cut
from .lease import Lease
from .records import PREFIXES_FOLDER
from .room import Room

logger = get_logger(__name__)

DELETE_BATCH_KEYS = 512
DELETE_WAIT_S_MAX = 1.0  # short: a block that is used between its listing and its removal is removed anyway
RENEW_EVERY_KEYS = 1024
RENEW_S_MAX = 5.0  # a slow storage may list fewer keys than RENEW_EVERY_KEYS before the lease ends
UNCOUNTED = f"{PREFIXES_FOLDER}/"


@dataclass(slots=True)
class CollectReport:
    """Result of a run; with ``dry_run``, what a run would have done.

    Attributes:
        blobs, bytes: totals of everything listed, except prefixes.
        removed_blobs, removed_bytes: totals by reason, "ttl" or "capacity".
        kept_by_error: number of blobs that could not be removed.
        own_bytes: bytes of the store's own files, quarantine included.
        leftovers: files of dead writers and quarantined blobs that were removed since the store was opened; with
            ``dry_run``, that a run would remove.
        gave_up: another collector measured meanwhile, so nothing more was removed for capacity.
        ttl_waits_s: seconds during which ttl removes nothing, because the storage's clock was stepped.
    """

    dry_run: bool = False
    blobs: int = 0
    bytes: int = 0
    removed_blobs: dict[str, int] = field(default_factory=lambda: {"ttl": 0, "capacity": 0})
    removed_bytes: dict[str, int] = field(default_factory=lambda: {"ttl": 0, "capacity": 0})
    kept_by_error: int = 0
    own_bytes: int = 0
    leftovers: int = 0
    gave_up: bool = False
    ttl_waits_s: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Blobs:
    """A root's blobs, as a collector lists and removes them: it renews its lease and reports its progress meanwhile.

    Attributes:
        on_removed, on_progress: see ``Collector``.
        clock: monotonic seconds.
    """

    store: Store
    lease: Lease
    room: Room
    is_block: Callable[[str], bool]
    on_removed: Callable[[list[str]], None]
    on_progress: Callable[[int], None]
    clock: Callable[[], float]

    def listing(self) -> Iterator[KeyInfo]:
        """All blobs that count."""
        self.lease.renew()
        self.on_progress(0)
        renewed_at = self.clock()
        for count, info in enumerate(self.store.keys(), 1):
            if not info.key.startswith(UNCOUNTED):
                yield info
            if count % RENEW_EVERY_KEYS == 0 or self.clock() - renewed_at > RENEW_S_MAX:
                self.lease.renew()
                self.on_progress(count)
                renewed_at = self.clock()

    def remove(self, infos: list[KeyInfo]) -> list[KeyInfo]:
        """Delete blobs; returns the blobs that no longer exist."""
        self.room.note_removing()
        outcomes = self.store.delete_many([info.key for info in infos])
        gone = [info for info, error in zip(infos, outcomes, strict=True) if error is None]
        error = next((error for error in outcomes if error is not None), None)
        if error is not None:
            logger.warning("%d of %d blocks could not be removed: %s", len(infos) - len(gone), len(infos), error)
        if gone:
            self.room.note_removed(sum(info.size for info in gone))
        self.lease.renew()
        self.on_removed([info.key for info in gone])
        return gone


class Removal:
    """Removes blobs in batches of at most ``DELETE_BATCH_KEYS``; none waits longer than ``DELETE_WAIT_S_MAX``.

    Args:
        remove: removes blobs, and returns the blobs that are gone.
        report: counts the removed blobs.
        reason: "ttl" or "capacity".
        clock: monotonic seconds.
        enough_bytes: a batch is removed at once when this many bytes are reached, if all of it can be removed.

    Attributes:
        kept_bytes: bytes of blobs that could not be removed.
    """

    def __init__(
        self,
        remove: Callable[[list[KeyInfo]], list[KeyInfo]],
        report: CollectReport,
        reason: str,
        clock: Callable[[], float],
        *,
        enough_bytes: float = float("inf"),
    ) -> None:
        self._remove = remove
        self._report = report
        self._reason = reason
        self._enough_bytes = enough_bytes
        self._batch: list[KeyInfo] = []
        self._batch_bytes = 0
        self._clock = clock
        self._begun_at = 0.0  # when the batch's first blob was added
        self.kept_bytes = 0

    def add(self, info: KeyInfo) -> None:
        """Add a blob to the batch; remove the batch if it is full or has enough bytes."""
        if not self._batch:
            self._begun_at = self._clock()
        self._batch.append(info)
        self._batch_bytes += info.size
        hoped_bytes = self._report.removed_bytes[self._reason] + self._batch_bytes
        if len(self._batch) >= DELETE_BATCH_KEYS or hoped_bytes >= self._enough_bytes:
            self.flush()

    def flush_late(self) -> None:
        """Remove the batch if it has waited long enough. Call this for each listed blob."""
        if self._batch and self._clock() - self._begun_at >= DELETE_WAIT_S_MAX:
            self.flush()

    def flush(self) -> None:
        """Remove the batch."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            gone = self._remove(batch)
            gone_bytes = sum(info.size for info in gone)
            self.kept_bytes += sum(info.size for info in batch) - gone_bytes
            self._report.kept_by_error += len(batch) - len(gone)
            self._report.removed_blobs[self._reason] += len(gone)
            self._report.removed_bytes[self._reason] += gone_bytes


def measure(blobs: Blobs, report: CollectReport, ages: Ages, *, ttl_s: float, grace_s: float) -> Listed:
    """List everything into a report; remove blocks past their ttl."""
    listed = Listed()
    removal = Removal((lambda infos: infos) if report.dry_run else blobs.remove, report, "ttl", blobs.clock)
    age_of, is_block, histogram = ages.age_s, blobs.is_block, listed.histogram
    for info in blobs.listing():
        removal.flush_late()
        report.blobs += 1
        report.bytes += info.size
        if info.mtime != 0.0:
            listed.tells_times = True
        if not is_block(info.key):
            listed.foreign_bytes += info.size
            continue
        if info.size > blobs.room.largest_bytes:
            blobs.room.largest_bytes = info.size
        age_s = age_of(info.mtime)
        # Timestamps in the future (clock skew) are treated as equally far in the past.
        if abs(age_s) < grace_s:
            continue
        if abs(age_s) >= ttl_s:
            removal.add(info)
        else:
            histogram.add(age_s, info.size)
    removal.flush()
    return listed


@dataclass(slots=True)
class Listed:
    """What ``measure`` found.

    Attributes:
        histogram: blocks that may be removed for capacity.
        foreign_bytes: of blobs that are not blocks.
        tells_times: at least one blob had a time.
    """

    histogram: AgeHistogram = field(default_factory=AgeHistogram)
    foreign_bytes: int = 0
    tells_times: bool = False


def shrink(
    blobs: Blobs,
    report: CollectReport,
    ages: Ages,
    cut: Cut,
    excess: int,
    subtract: Callable[[int], bool],
    *,
    ttl_s: float,
    grace_s: float,
) -> int:
    """List again; remove blocks within the cut until ``excess`` bytes are gone.

    Args:
        subtract: called after each batch with the bytes removed so far. False: give up.
        ttl_s: blocks past their ttl are counted already. If they still exist, they could not be removed.

    Returns:
        Bytes to cut deeper for next time, because blocks of so many bytes could not be removed.
    """

    def remove(infos: list[KeyInfo]) -> list[KeyInfo]:
        gone = blobs.remove(infos)
        gone_bytes = sum(info.size for info in gone)
        report.gave_up = not subtract(report.removed_bytes["capacity"] + gone_bytes)
        return gone

    removal = Removal(remove, report, "capacity", blobs.clock, enough_bytes=excess)
    age_s_min = cut.age_s_min
    for info in blobs.listing():
        removal.flush_late()
        age_s = ages.age_s(info.mtime)
        if age_s < age_s_min or not grace_s <= abs(age_s) < ttl_s or not blobs.is_block(info.key):
            continue
        if cut.takes(age_s, info.size):
            removal.add(info)
        if report.gave_up or report.removed_bytes["capacity"] >= excess:
            break
    removal.flush()
    # If no block could be removed, there may be many more such blocks: double the cut each time until others go.
    return removal.kept_bytes if report.removed_bytes["capacity"] else 2 * removal.kept_bytes
