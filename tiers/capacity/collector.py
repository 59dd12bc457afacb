"""Collector: measures a root and removes blocks that are too old or too many, in constant memory.

A run lists everything twice at most, and a third time if blocks could not be removed:

1. Measure: sum the sizes, remove blocks past their ``ttl``, count bytes by age in a histogram. Publish the sum for the
   writers' accounts.
2. Shrink, only if needed: find the age beyond which blocks have the excess bytes in total, list again and remove the
   older ones. This is needed if one of these holds:

   - stored bytes plus what writers reserved and have not stored exceed ``high`` x ``max_bytes``;
   - they leave less than a writer was refused;
   - the file system is nearly full;
   - the storage refuses a block (inodes, a quota).

   Uses, stores and removals between the two listings do no harm: a block that was just used is too young by then (if
   ``on_progress`` records uses), and a block that is gone is gone.

Only blocks are removed: names made by FileMapper, or names that the store calls blocks (``NamesBlocks``).
``config.json``, records and foreign files are counted and kept. Prefixes next to a tier's blocks are not even counted,
because they have their own limit and collector.

A reader that asks for a removed block has a miss. Two collectors at once would remove the same blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from ..blocks.file_mapper import parse_block_name
from ..errors import StoreConfigError, StoreError, StoreFullError
from ..plain_logs import get_logger
from ..store import KeepsFiles, NamesBlocks, Store
from .ages import Ages
from .clock import ClockReading, boot_id, held_s, since_boot
from .lease import Lease
from .policy import CapacityPolicy
from .records import UNREADABLE, RecordKeys
from .removal import UNCOUNTED, Blobs, CollectReport, Listed, measure, shrink
from .room import FREE_HIGH, FREE_LOW, TRIAL_EVERY_S, Room
from .schedule import NO_TIMES, Schedule, StorageClock
from .usage import (
    USAGE_PREFIX,
    Baseline,
    Measured,
    forget_writers,
    held_and_wanted,
    publish_measured,
    read_baseline,
    read_last,
    read_measured,
    read_usage,
)

logger = get_logger(__name__)


class Collector:
    """Measures a root and removes blocks. For one thread, in any process.

    Args:
        store: the root, without a limit on puts, because a full root must accept the collector's records.
        policy: the limits.
        on_removed: called with the names of removed blocks, batch by batch.
        on_progress: called with the number of blobs listed so far, and with 0 before each listing.
        keys: keys to authenticate records with.
        owner: this collector's name in its lease, unique; None: a random one.
        dead_owners: names of collectors that are known to have ended, whose leases are taken over at once.
        clock: Unix seconds.
        monotonic: seconds.
        since_boot: see ``tiers.capacity.clock``.
    """

    def __init__(
        self,
        store: Store,
        policy: CapacityPolicy,
        *,
        on_removed: Callable[[list[str]], None] = lambda _: None,
        on_progress: Callable[[int], None] = lambda _: None,
        keys: RecordKeys | None = None,
        owner: str | None = None,
        dead_owners: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        since_boot: Callable[[], float] = since_boot,
    ) -> None:
        self._since_boot = since_boot
        self._told_stepped_at: float | None = None
        self._store = store
        self._keys = keys
        self._policy = policy
        self._clock = clock
        self.lease = Lease(
            store,
            owner or secrets.token_hex(8),
            lease_s=policy.lease_s,
            clock=monotonic,
            keys=keys,
            dead_owners=dead_owners,
        )
        self._room = Room(store, policy, monotonic)
        names = store.is_block if isinstance(store, NamesBlocks) else is_block
        self._blobs = Blobs(store, self.lease, self._room, names, on_removed, on_progress, monotonic)
        self._schedule = Schedule(policy, clock, monotonic)
        # A living writer's record is at most two thirds of ``writer_s`` old, so a smaller step does no harm.
        self._storage_clock = StorageClock(store, names, self.lease, step_s=policy.writer_s / 6)
        self._measured_id = ""  # of the last measurement that this collector published
        self._is_crammed = False  # there was no space to publish the last measurement
        # The measurement and the writers' records that last showed enough space.
        self._enough_for: tuple[str, int, set[tuple[str, int, float]]] | None = None
        self._stuck_bytes = 0  # bytes that the last run should have removed and could not
        self._told_foreign = False

    def is_due(self) -> bool:
        """Whether, by the records, a run would find something to do. Much cheaper than a run.

        If space is needed but the last run removed nothing (all blobs are young or foreign), the next run waits: twice
        as long each time, up to ``every_s``.

        Raises:
            StoreError: the records cannot be read.
        """
        try:
            measured = read_measured(self._store, keys=self._keys)
        except UNREADABLE:  # a run replaces the record; runs are expensive, so not each time the storage is down
            if not self._schedule.is_late():
                raise
            return True
        if self._schedule.is_old(measured) or measured is None:
            # If the storage was too full to publish the measurement, do not run again at once.
            return not self._is_crammed or self._schedule.has_rested(TRIAL_EVERY_S)
        # Only the collector that measured last tries a put, on behalf of all collectors of the root.
        is_full = measured.id == self._measured_id and self._room.is_full()
        if is_full or self._room.missing_bytes(FREE_HIGH) > 0 or self._want_room(measured):
            return self._schedule.has_rested()
        self._schedule.end_rest()
        return False

    def run(self, *, dry_run: bool = False) -> CollectReport | None:
        """Measure and remove. None: another collector is working, or died not long ago.

        A dry run writes nothing, so it cannot ask for the storage's time. It derives the time from the last measurement
        if that was made on this machine since its boot, and otherwise uses this host's clock. It lists once, and counts
        the blocks to remove for capacity by the histogram.

        If there is no space for a lease and no other way to learn the storage's time, no block counts as too old and no
        writer as dead: blocks are removed only for space.

        Raises:
            StoreError: the storage could not be listed, or does not tell when blobs were written.
        """
        if dry_run:
            last = read_last(self._store, self._keys)
            now = self._clock()
            if last is not None and last.clock is not None and last.clock.boot == boot_id() != "":
                now = last.clock.storage + self._since_boot() - last.clock.since_boot
            return self._run(CollectReport(dry_run=True), now, knows_time=True)
        try:
            if not self.lease.try_acquire():
                return None
        except StoreFullError:
            pass  # no space for a lease: all the more reason to run
        try:
            now, knows_time = self._storage_clock.read()
            return self._run(CollectReport(), now, knows_time=knows_time)
        finally:
            try:
                self.lease.release()
            except StoreError as e:
                logger.warning("the collector's lease stays until it expires: %s", e)

    def _run(self, report: CollectReport, now: float, *, knows_time: bool) -> CollectReport:
        ttl_s, writer_s = self._policy.ttl_s, self._policy.writer_s
        ages = Ages(now, self._blobs.clock)
        self._schedule.begin()
        if not knows_time or self._storage_clock.was_stepped(now, ages.began_at, writer_s):
            writer_s = float("inf")  # living writers renewed their records by the clock before the step
        self._room.begin()
        if isinstance(self._store, KeepsFiles):
            # A dry run keeps what is in quarantine; a read-only store also keeps what dead writers left.
            report.own_bytes = self._store.sweep(float("inf") if report.dry_run else self._policy.quarantine_s)
            report.leftovers = self._store.leftovers(self._policy.quarantine_s)
        baseline = read_baseline(self._store, now=now, writer_s=writer_s, keys=self._keys)
        clock = baseline.clock
        if ttl_s is not None and knows_time:
            clock = ClockReading(now, boot_id(), self._since_boot()).after(
                clock, host=self._clock(), ttl_s=ttl_s, gap_s_max=max(ttl_s, 2 * self._policy.every_s)
            )
            report.ttl_waits_s = held_s(clock, ttl_s)
            self._tell_step(clock, report.ttl_waits_s)
        if ttl_s is None or not knows_time or report.ttl_waits_s:
            ttl_s = float("inf")
        listed = measure(self._blobs, report, ages, ttl_s=ttl_s, grace_s=self._policy.grace_s)
        if report.dry_run and report.blobs and not listed.tells_times:
            raise StoreConfigError(NO_TIMES)  # a real run notices this from its lease
        kept = report.bytes + report.own_bytes - report.removed_bytes["ttl"]
        blobs = report.blobs - report.removed_blobs["ttl"]
        measured = Measured(secrets.token_hex(8), kept, blobs, baseline.base, self._clock(), clock)
        self._room.note_stored(kept)
        if report.dry_run or self._publish(measured, baseline):
            self._make_room(report, listed, measured, baseline, ages, ttl_s)
            self._schedule.end(has_removed=any(report.removed_blobs.values()))
        else:
            logger.info("another collector has measured meanwhile")
            report.gave_up = True
        report.seconds = self._blobs.clock() - ages.began_at
        return report

    def _tell_step(self, clock: ClockReading, waits_s: float) -> None:
        """Warn once about each step of the storage's clock."""
        if waits_s and clock.stepped_at != self._told_stepped_at:
            logger.warning(
                "the storage's clock was stepped, differs from this host's, or was not read for longer than ttl. The "
                "ages of blocks are unknown, so ttl = %.0f s removes no block for the next %.0f s. Check the clocks of "
                "the storage and of this host (NTP)", self._policy.ttl_s, waits_s,
            )  # fmt: skip
        self._told_stepped_at = clock.stepped_at

    def _make_room(
        self,
        report: CollectReport,
        listed: Listed,
        measured: Measured,
        baseline: Baseline,
        ages: Ages,
        ttl_s: float,
    ) -> None:
        """Remove bad blobs and the oldest blocks, if space is needed."""
        excess = self._excess_bytes(report, listed, measured, baseline)
        if excess <= 0:
            return
        if report.own_bytes and isinstance(self._store, KeepsFiles):
            left = 0 if report.dry_run else self._store.sweep(0.0)  # bad blocks go before good ones
            freed, report.own_bytes = report.own_bytes - left, left
            report.leftovers = self._store.leftovers(0.0)
            excess -= freed
            measured = replace(measured, bytes=max(0, measured.bytes - freed))
        if report.dry_run:
            report.removed_blobs["capacity"], report.removed_bytes["capacity"] = listed.histogram.oldest(excess)
        elif excess > 0:

            def shrink_by(cut_bytes: int) -> int:
                cut, subtract = listed.histogram.cut(cut_bytes), partial(self._subtract, measured, baseline)
                return shrink(
                    self._blobs, report, ages, cut, excess, subtract, ttl_s=ttl_s, grace_s=self._policy.grace_s
                )

            stuck_before, self._stuck_bytes = self._stuck_bytes, shrink_by(excess)
            removed = report.removed_bytes["capacity"]
            if stuck_before and self._stuck_bytes and not report.gave_up and removed < excess:
                # Blocks that cannot be removed are beyond the cut again; if they are the oldest, they fill all of it.
                # Cut deeper, but only after this run met them again: if deletions just failed for a while, a deeper cut
                # would remove younger blocks in their place. If other blocks were removed as well, their bytes are
                # exact, not a guess.
                kept, report.kept_by_error = report.kept_by_error, 0
                self._stuck_bytes = shrink_by(excess + (self._stuck_bytes if removed else stuck_before))
                report.kept_by_error = max(kept, report.kept_by_error)

    def _excess_bytes(self, report: CollectReport, listed: Listed, measured: Measured, baseline: Baseline) -> int:
        """How many bytes to remove; 0 or less: none."""
        is_foreign = self._policy.max_bytes is not None and listed.foreign_bytes > self._policy.max_bytes
        if is_foreign and not self._told_foreign:
            logger.warning(
                "files that are not blocks have %d bytes, more than max_bytes = %d: nothing is stored, and no block is "
                "removed to make room, until they are removed", listed.foreign_bytes, self._policy.max_bytes,
            )  # fmt: skip
        self._told_foreign = is_foreign
        excess = 0
        if self._policy.max_bytes is not None:
            # Not used_bytes(): it counts blobs stored since the listing began twice if they were listed as well.
            held, wanted = held_and_wanted(self._store, dead=baseline.dead, keys=self._keys)
            excess = self._policy.excess_bytes(measured.bytes, held=held, wanted=wanted, foreign=listed.foreign_bytes)
        # What a dry run would remove counts as removed, but still takes space.
        freed = report.removed_bytes["ttl"] if report.dry_run else 0
        if self._room.missing_bytes(FREE_HIGH) > freed:
            excess = max(excess, self._room.missing_bytes(FREE_LOW) - freed)
        if excess <= 0 and not report.dry_run and self._room.is_full(after_s=0.0):
            # The storage is full with what is stored now, so use that as its limit.
            return measured.bytes - self._policy.low_bytes(measured.bytes, measured.bytes, listed.foreign_bytes)
        return excess

    def _publish(self, measured: Measured, baseline: Baseline) -> bool:
        """Publish a measurement. False: another collector has published one meanwhile, which is the valid one now."""
        try:
            if not publish_measured(self._store, measured, baseline.measured_id, self._keys):
                return False
            self._measured_id, self._is_crammed = measured.id, False
            forget_writers(self._store, baseline, keys=self._keys)
        except StoreFullError as e:
            self._is_crammed = True
            logger.debug("no room for the measurement: %s", e)  # until then the writers' accounts are too high
        return True

    def _subtract(self, measured: Measured, baseline: Baseline, removed_bytes: int) -> bool:
        """Publish a measurement less what was removed since. False: as for ``_publish``."""
        # max(): removed blocks may include some that were stored after the measurement.
        left = replace(measured, bytes=max(0, measured.bytes - removed_bytes))
        # The measurement may not be published yet, because the storage was too full.
        is_published = self._measured_id == measured.id
        return self._publish(left, Baseline(measured_id=measured.id) if is_published else baseline)

    def _want_room(self, measured: Measured) -> bool:
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


def is_block(key: str) -> bool:
    """Whether a name has the form that FileMapper gives to blocks."""
    return parse_block_name(key) is not None


def listed_bytes(store: Store) -> int:
    """Bytes in a root as a collector counts them, without the store's own folders.

    Raises:
        StoreError: the root cannot be listed.
    """
    return sum(info.size for info in store.keys() if not info.key.startswith(UNCOUNTED))  # noqa: SIM118 - not a dict
