"""Removal: what a collector has chosen, on its way out; and the report of what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtiers.tiers.store import KeyInfo

DELETE_BATCH_KEYS = 512
DELETE_WAIT_S_MAX = 1.0  # who uses a block after it was listed finds it gone; below grace_s, so that few are met


@dataclass(slots=True)
class CollectReport:
    """What a run saw and did; with ``dry_run``, what it would have done.

    Attributes:
        blobs, bytes: of everything listed but prefixes.
        removed_blobs, removed_bytes: by reason: "ttl" or "capacity".
        kept_by_error: blobs that could not be removed.
        own_bytes: in the store's own folders, quarantine included.
        gave_up: another collector has measured meanwhile, so nothing more was removed for capacity.
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
    """Blobs on their way out, in batches of ``DELETE_BATCH_KEYS`` that wait no longer than ``DELETE_WAIT_S_MAX``.

    No batch goes on once there is enough.

    Args:
        remove: removes blobs, and returns those that are gone.
        report: counts them.
        reason: "ttl" or "capacity".
        publish: told the bytes that were removed so far, after each batch.
        enough_bytes: when so many are removed, or hoped to be, a batch waits no longer.
        clock: seconds, monotonic.

    Attributes:
        kept_bytes: of those that could not be removed.
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
        self._begun_at = 0.0  # when the batch's first was added
        self.kept_bytes = 0

    def add(self, info: KeyInfo) -> None:
        """It is to go."""
        if not self._batch:
            self._begun_at = self._clock()
        self._batch.append(info)
        self._batch_bytes += info.size
        hoped_bytes = self._report.removed_bytes[self._reason] + self._batch_bytes
        if len(self._batch) >= DELETE_BATCH_KEYS or hoped_bytes >= self._enough_bytes:
            self.flush()

    def flush_late(self) -> None:
        """Remove a batch that has waited long enough; to be called for each blob that is listed."""
        if self._batch and self._clock() - self._begun_at >= DELETE_WAIT_S_MAX:
            self.flush()

    def flush(self) -> None:
        """Remove what waits."""
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
