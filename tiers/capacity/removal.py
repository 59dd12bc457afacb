"""Removal: deletes the blobs that a collector chose, in batches; and CollectReport, the result of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtiers.tiers.store import KeyInfo

DELETE_BATCH_KEYS = 512
DELETE_WAIT_S_MAX = 1.0  # a block used after it was listed is removed all the same; below grace_s, so that this is rare


@dataclass(slots=True)
class CollectReport:
    """Result of a run; with ``dry_run``, what a run would have done.

    Attributes:
        blobs, bytes: totals of everything listed, except prefixes.
        removed_blobs, removed_bytes: totals by reason, "ttl" or "capacity".
        kept_by_error: number of blobs that could not be removed.
        own_bytes: bytes in the store's own folders, quarantine included.
        gave_up: another collector measured meanwhile, so nothing more was removed for capacity.
    """

    dry_run: bool = False
    blobs: int = 0
    bytes: int = 0
    removed_blobs: dict[str, int] = field(default_factory=lambda: {"ttl": 0, "capacity": 0})
    removed_bytes: dict[str, int] = field(default_factory=lambda: {"ttl": 0, "capacity": 0})
    kept_by_error: int = 0
    own_bytes: int = 0
    gave_up: bool = False
    seconds: float = 0.0


class Removal:
    """Removes blobs in batches of at most ``DELETE_BATCH_KEYS``; none waits longer than ``DELETE_WAIT_S_MAX``.

    Args:
        remove: removes blobs, and returns the blobs that are gone.
        report: counts the removed blobs.
        reason: "ttl" or "capacity".
        publish: called after each batch with the bytes removed so far.
        enough_bytes: a batch is removed at once when this many bytes are reached, if all of it can be removed.
        clock: monotonic seconds.

    Attributes:
        kept_bytes: bytes of blobs that could not be removed.
    """

    def __init__(
        self,
        remove: Callable[[list[KeyInfo]], list[KeyInfo]],
        report: CollectReport,
        reason: str,
        publish: Callable[[int], None] = lambda _: None,
        *,
        enough_bytes: float = float("inf"),
        clock: Callable[[], float],
    ) -> None:
        self._remove = remove
        self._report = report
        self._reason = reason
        self._publish = publish
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
        if not batch:
            return
        report = self._report
        gone = batch if report.dry_run else self._remove(batch)
        gone_bytes = sum(info.size for info in gone)
        self.kept_bytes += sum(info.size for info in batch) - gone_bytes
        report.kept_by_error += len(batch) - len(gone)
        report.removed_blobs[self._reason] += len(gone)
        report.removed_bytes[self._reason] += gone_bytes
        if not report.dry_run:
            self._publish(report.removed_bytes[self._reason])
