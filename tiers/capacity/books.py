"""Books: what a collector reads in the records of a root, and its own measurement there."""

from __future__ import annotations

from dataclasses import replace

from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import RecordKeys
from kvtiers.tiers.capacity.usage import (
    USAGE_PREFIX,
    Baseline,
    Measured,
    forget_writers,
    held_and_wanted,
    publish_measured,
    read_usage,
)
from kvtiers.tiers.errors import StoreFullError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store

logger = get_logger(__name__)


class Books:
    """One collector's view of the records. For the collector's thread.

    Attributes:
        measured_id: ID of the last measurement that this collector published.
        is_crammed: there was no space to publish the last measurement.
    """

    def __init__(self, store: Store, policy: CapacityPolicy, keys: RecordKeys | None) -> None:
        self._store = store
        self._policy = policy
        self._keys = keys
        self.measured_id = ""
        self.is_crammed = False
        # The measurement and the writers' records that last showed enough space.
        self._enough_for: tuple[str, int, set[tuple[str, int, float]]] | None = None

    def publish(self, measured: Measured, baseline: Baseline) -> bool:
        """Publish a measurement. False: another collector has published one meanwhile, which is the valid one now."""
        try:
            if not publish_measured(self._store, measured, baseline.measured_id, self._keys):
                return False
            self.measured_id, self.is_crammed = measured.id, False
            forget_writers(self._store, baseline, keys=self._keys)
        except StoreFullError as e:
            self.is_crammed = True
            logger.debug("no room for the measurement: %s", e)  # until then the writers' accounts are too high
        return True

    def subtract(self, measured: Measured, baseline: Baseline, removed_bytes: int) -> bool:
        """Publish a measurement less what was removed since. False: as for ``publish``."""
        # max(): removed blocks may include some that were stored after the measurement.
        left = replace(measured, bytes=max(0, measured.bytes - removed_bytes))
        # The measurement may not be published yet, because the storage was too full.
        is_published = self.measured_id == measured.id
        return self.publish(left, Baseline(measured_id=measured.id) if is_published else baseline)

    def want_room(self, measured: Measured) -> bool:
        """Whether writers need a collector to remove blocks before they can go on."""
        if self._policy.max_bytes is None:
            return False
        # Reading the writers' records takes a request each, so they are read only if one was replaced since.
        records = {(info.key, info.size, info.mtime) for info in self._store.keys(USAGE_PREFIX)}
        seen = measured.id, measured.bytes, records
        if seen == self._enough_for:
            return False
        usage = read_usage(self._store, keys=self._keys)
        is_short = usage is None or self._policy.is_short(*usage)
        self._enough_for = None if is_short else seen
        return is_short

    def excess_bytes(self, measured: Measured, baseline: Baseline, foreign_bytes: int) -> int:
        """How many bytes to remove for ``max_bytes``."""
        if self._policy.max_bytes is None:
            return 0
        # Not used_bytes(): it counts blobs stored since the listing began twice if they were listed as well.
        held, wanted = held_and_wanted(self._store, dead=baseline.dead, keys=self._keys)
        return self._policy.excess_bytes(measured.bytes, held=held, wanted=wanted, foreign=foreign_bytes)
