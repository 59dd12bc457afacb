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
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvtiers.tiers.capacity.histogram import AgeHistogram, bucket_of
from kvtiers.tiers.capacity.lease import Lease
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import PREFIXES_FOLDER, UNREADABLE, RecordKeys
from kvtiers.tiers.capacity.removal import CollectReport, Removal
from kvtiers.tiers.capacity.room import FREE_HIGH, FREE_LOW, TRIAL_EVERY_S, Room
from kvtiers.tiers.capacity.usage import (
    MEASURED,
    USAGE_PREFIX,
    Baseline,
    Measured,
    forget_writers,
    held_and_wanted,
    publish_measured,
    read_baseline,
    read_measured,
    read_usage,
)
from kvtiers.tiers.errors import StoreConfigError, StoreError, StoreFullError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import KeyInfo, NamesBlocks, Store, SupportsSweep, SupportsTouch, delete_all
from kvtiers.tiers.tools.inventory import parse_block_name

logger = get_logger(__name__)

RENEW_EVERY_KEYS = 1024
_UNCOUNTED = f"{PREFIXES_FOLDER}/"
STAMP_S = 1.0  # S3 and some file systems truncate times to seconds, also the time at which the run began
HELD_SHARE_MAX = 0.5  # of max_bytes: what writers' records say they hold, or want, counts only up to this much
NO_TIMES = (
    "this storage (or its fsspec driver) does not say when a blob was written: ttl and max_bytes cannot work here"
)


class Collector:
    """Measures a root and removes blocks. For one thread, in any process.

    Args:
        store: the root, without a limit on puts, because a full root must accept the collector's records.
        policy: the limits.
        on_removed: called with the names of removed blocks, batch by batch.
        on_progress: called with the number of blobs listed so far, and with 0 before each listing.
        keys: keys to authenticate records with.
        clock: Unix seconds.
        monotonic: seconds.
    """

    def __init__(
        self,
        store: Store,
        policy: CapacityPolicy,
        *,
        on_removed: Callable[[list[str]], None] = lambda _: None,
        on_progress: Callable[[int], None] = lambda _: None,
        keys: RecordKeys | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._is_block = store.is_block if isinstance(store, NamesBlocks) else is_block
        self._policy = policy
        self._on_removed = on_removed
        self._on_progress = on_progress
        self._clock = clock
        self._monotonic = monotonic
        self._began_at = float("-inf")
        self._ran_at = float("-inf")
        self._ttl_s = policy.ttl_s  # None also while the storage's time is unknown
        self._rest_s = 0.0  # after a run that removed nothing
        self._room = Room(store, policy, monotonic)
        self._seen: tuple[str, float] | None = None  # ID of the last measurement, and since when it is the last
        self._measured_id = ""  # ID of the last measurement that this collector published
        self._is_crammed = False  # the last run had no space to publish its measurement
        self._others_bytes = 0  # listed blobs that are not blocks
        self._told_others = False
        self._offset_s: float | None = None  # storage's clock minus monotonic clock, at the last run
        self._stepped_at = float("-inf")
        # The measurement and the writers' records that last showed enough space.
        self._enough_for: tuple[str, int, set[tuple[str, int, float]]] | None = None
        self._stuck_bytes = 0  # bytes that the last run should have removed and could not
        self.lease = Lease(store, secrets.token_hex(8), lease_s=policy.lease_s, clock=monotonic, keys=keys)

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
            if self._monotonic() - self._began_at < self._policy.every_s:
                raise
            return True
        if self._seen_s(measured) >= self._policy.every_s or measured is None:
            # If the storage was too full to publish the measurement, do not run again at once.
            return not self._is_crammed or self._monotonic() - self._ran_at >= min(self._rest_s, TRIAL_EVERY_S)
        # Only the collector that measured last tries a put, on behalf of all collectors of the root.
        is_full = measured.id == self._measured_id and self._room.is_full()
        if not is_full and not self._wants_room(measured):
            self._rest_s = 0.0
            return False
        return self._monotonic() - self._ran_at >= self._rest_s

    def _seen_s(self, measured: Measured | None) -> float:
        """For how many seconds a measurement has been the last one.

        Its timestamp is another host's and is used only for the first measurement seen. If two hosts' clocks differ by
        more than ``every_s``, each host would otherwise consider all measurements of the other one old.
        """
        now = self._monotonic()
        if self._seen is None and measured is not None:
            self._seen = measured.id, now - abs(self._clock() - measured.at)
        elif self._seen is None or measured is None or self._seen[0] != measured.id:
            self._seen = "" if measured is None else measured.id, now
        return now - self._seen[1]

    def run(self, *, dry_run: bool = False) -> CollectReport | None:
        """Measure and remove. None: another collector is working, or died not long ago.

        A dry run writes nothing, so it judges ages by this host's clock. If there is no space for a lease and no other
        way to learn the storage's time, no block is too old and no writer is dead: blocks are removed only for space.

        Raises:
            StoreError: the storage could not be listed, or does not tell when blobs were written.
        """
        if dry_run:
            return self._run(CollectReport(dry_run=True), self._clock())
        try:
            if not self.lease.try_acquire():
                return None
            now = self.lease.storage_time()
        except StoreFullError:
            now = None
        knows_time = True
        try:
            if now is None:  # no space for a lease: all the more reason to run
                now, knows_time = self._time_without_lease()
            if now == 0.0:
                raise StoreConfigError(NO_TIMES)
            return self._run(CollectReport(), now, knows_time=knows_time)
        finally:
            try:
                self.lease.release()
            except StoreError as e:
                logger.warning("the collector's lease stays until it expires: %s", e)

    def _time_without_lease(self) -> tuple[float, bool]:
        """Unix seconds, and whether they are the storage's current time. If not, ages are good for comparisons only.

        Raises:
            StoreError: the storage could not be listed.
        """
        if self._measured_at() is None:
            return self._clock(), True  # never measured: there is no record whose time could be read
        knows_time = isinstance(self._store, SupportsTouch)
        if isinstance(self._store, SupportsTouch):
            try:
                self._store.touch(MEASURED)
            except StoreError as e:
                logger.debug("the storage's time is not known: %s", e)
                knows_time = False
        measured_at = self._measured_at()
        return (self._clock(), False) if measured_at is None else (measured_at, knows_time)

    def _measured_at(self) -> float | None:
        return next((info.mtime for info in self._store.keys(MEASURED) if info.key == MEASURED), None)

    def _run(self, report: CollectReport, now: float, *, knows_time: bool = True) -> CollectReport:
        self._ttl_s, writer_s = (self._policy.ttl_s, self._policy.writer_s) if knows_time else (None, float("inf"))
        self._began_at = self._monotonic()
        if self._was_stepped(now):
            writer_s = float("inf")  # living writers renewed their records by the clock before the step
        self._room.begin()
        if isinstance(self._store, SupportsSweep):
            # A dry run keeps what is in quarantine; a read-only store also keeps what dead writers left.
            report.own_bytes = self._store.sweep(float("inf") if report.dry_run else self._policy.quarantine_s)
        baseline = read_baseline(self._store, now=now, writer_s=writer_s, keys=self._keys)
        histogram = self._measure(report, now)
        kept = report.bytes + report.own_bytes - report.removed_bytes["ttl"]
        self._room.note_stored(kept)
        blobs = report.blobs - report.removed_blobs["ttl"]
        measured = Measured(secrets.token_hex(8), kept, blobs, baseline.base, self._clock())
        if not report.dry_run and not self._publish(measured, baseline):
            logger.info("another collector has measured meanwhile")
            report.gave_up = True
            report.seconds = self._monotonic() - self._began_at
            return report
        excess = self._excess(measured, baseline, freed_bytes=report.removed_bytes["ttl"] if report.dry_run else 0)
        if excess <= 0 and not report.dry_run and self._room.is_full(after_s=0.0):
            # The storage is full with what is stored now, so use that as its limit.
            excess = measured.bytes - self._low_bytes(measured.bytes, measured.bytes)
        if excess > 0 and report.own_bytes and isinstance(self._store, SupportsSweep):
            left = 0 if report.dry_run else self._store.sweep(0.0)  # bad blocks go before good ones
            excess -= report.own_bytes - left
            measured = replace(measured, bytes=max(0, measured.bytes - (report.own_bytes - left)))
            report.own_bytes = left
        if excess > 0:
            stuck_bytes = self._stuck_bytes
            self._shrink(report, now, histogram.cut(excess), excess, measured, baseline)
            if stuck_bytes and self._stuck_bytes and not report.gave_up and report.removed_bytes["capacity"] < excess:
                # Blocks that cannot be removed are beyond the cut again; if they are the oldest, they fill all of it.
                # Cut deeper, but only after this run met them again: if deletions just failed for a while, a deeper cut
                # would remove younger blocks in their place.
                if report.removed_bytes["capacity"]:
                    stuck_bytes = self._stuck_bytes  # other blocks were removed as well, so this is exact, not a guess
                kept, report.kept_by_error = report.kept_by_error, 0
                self._shrink(report, now, histogram.cut(excess + stuck_bytes), excess, measured, baseline)
                report.kept_by_error = max(kept, report.kept_by_error)
        removed = any(report.removed_blobs.values())
        self._rest_s = 0.0 if removed else min(self._policy.every_s, max(self._policy.poll_s, 2 * self._rest_s))
        self._ran_at = self._monotonic()
        report.seconds = self._ran_at - self._began_at
        return report

    def _was_stepped(self, now: float) -> bool:
        """Whether the storage's clock was stepped within the last ``writer_s``. Only a previous run can show a step."""
        offset_s = now - self._began_at
        # A living writer's record is at most two thirds of ``writer_s`` old, so a smaller step does no harm.
        if self._offset_s is not None and abs(offset_s - self._offset_s) > self._policy.writer_s / 6:
            self._stepped_at = self._began_at
        self._offset_s = offset_s
        return self._began_at - self._stepped_at <= self._policy.writer_s

    def _measure(self, report: CollectReport, now: float) -> AgeHistogram:
        """List everything; remove blocks past their ttl."""
        histogram = AgeHistogram()
        tells_times = False
        self._others_bytes = 0
        ttl_s, grace_s = self._ttl_s, self._policy.grace_s
        removal = Removal(self.remove, report, "ttl", clock=self._monotonic)
        largest_bytes = self._room.largest_bytes
        for info in self._listing():
            removal.flush_late()
            report.blobs += 1
            report.bytes += info.size
            tells_times = tells_times or info.mtime != 0.0
            age_s = self._age_s(info, now)
            if not self._is_block(info.key):
                self._others_bytes += info.size
                continue
            if info.size > largest_bytes:
                largest_bytes = self._room.largest_bytes = info.size
            # Timestamps in the future (clock skew) are treated as equally far in the past.
            if abs(age_s) < grace_s:
                continue
            if ttl_s is not None and abs(age_s) >= ttl_s:
                removal.add(info)
            else:
                histogram.add(age_s, info.size)
        removal.flush()
        if report.dry_run and report.blobs and not tells_times:
            raise StoreConfigError(NO_TIMES)  # a real run notices this from its lease
        return histogram

    def _shrink(
        self,
        report: CollectReport,
        now: float,
        cut: tuple[int, int],
        excess: int,
        measured: Measured,
        baseline: Baseline,
    ) -> None:
        """List again; remove blocks beyond the cut, until ``excess`` bytes are gone."""
        bucket, bytes_left = cut
        grace_s = self._policy.grace_s
        # Blocks past their ttl are counted already. If they still exist, they could not be removed, or it is a dry run.
        counted_s = self._ttl_s if self._ttl_s is not None else float("inf")

        def publish(removed_bytes: int) -> None:
            # max(): removed blocks may include some that were stored after the measurement.
            left = replace(measured, bytes=max(0, measured.bytes - removed_bytes))
            # The measurement may not be published yet, because the storage was too full.
            is_published = self._measured_id == measured.id
            report.gave_up = not self._publish(left, Baseline(measured_id=measured.id) if is_published else baseline)

        removal = Removal(self.remove, report, "capacity", publish, enough_bytes=excess, clock=self._monotonic)
        for info in self._listing():
            removal.flush_late()
            age_s = self._age_s(info, now)
            found = bucket_of(age_s)
            if found < bucket or not grace_s <= abs(age_s) < counted_s or not self._is_block(info.key):
                continue
            if found == bucket:
                if bytes_left <= 0:
                    continue
                bytes_left -= info.size
            removal.add(info)
            if report.gave_up or report.removed_bytes["capacity"] >= excess:
                break
        removal.flush()
        # If no block could be removed, there may be many more such blocks: double the cut each time until others go.
        self._stuck_bytes = removal.kept_bytes if report.removed_bytes["capacity"] else 2 * removal.kept_bytes

    def _wants_room(self, measured: Measured) -> bool:
        if self._room.missing_bytes(FREE_HIGH) > 0:
            return True
        limit = self._policy.max_bytes
        if limit is None:
            return False
        # Reading the writers' records takes a request each, so they are read only if one was replaced since.
        records = {(info.key, info.size, info.mtime) for info in self._store.keys(USAGE_PREFIX)}
        seen = measured.id, measured.bytes, records
        if seen == self._enough_for:
            return False
        wants = self._writers_want_room(limit)
        self._enough_for = None if wants else seen
        return wants

    def _writers_want_room(self, limit: int) -> bool:
        usage = read_usage(self._store, keys=self._keys)
        if usage is None:
            return True
        used, wanted = usage
        return used > self._policy.high * limit or used + min(wanted, int(HELD_SHARE_MAX * limit)) > limit

    def _age_s(self, info: KeyInfo, now: float) -> float:
        """A blob's age when the run began: negative if a clock was ahead, 0 if it was stored or used since."""
        age_s = now - info.mtime
        if age_s >= 0.0:
            return age_s
        passed_s = self._monotonic() - self._began_at + STAMP_S
        return 0.0 if age_s >= -passed_s else age_s

    def _excess(self, measured: Measured, baseline: Baseline, *, freed_bytes: int) -> int:
        """How many bytes to remove.

        Args:
            freed_bytes: bytes that count as removed but still take space, because it is a dry run.
        """
        excess = 0
        limit = self._policy.max_bytes
        if limit is not None and not self._others_exceed(limit):
            # Not used_bytes(): it counts blobs stored since the listing began twice if they were listed as well.
            held, wanted = held_and_wanted(self._store, dead=baseline.dead, keys=self._keys)
            most = int(HELD_SHARE_MAX * limit)
            used = measured.bytes + min(held, most)
            missing = used + min(wanted, most) - limit
            high = self._policy.high * limit
            if used > high or missing > 0:
                excess = max(used - self._low_bytes(limit, high), missing)
        if self._room.missing_bytes(FREE_HIGH) > freed_bytes:
            excess = max(excess, self._room.missing_bytes(FREE_LOW) - freed_bytes)
        return excess

    def _low_bytes(self, limit: int, high: float) -> int:
        """Down to how many bytes a run removes if it starts above ``high``.

        If foreign files take nearly all of the limit, going down to ``low`` would remove every block each time.
        """
        others = self._others_bytes
        return int(max(self._policy.low * limit, (others + (high if others < high else limit)) / 2))

    def _others_exceed(self, limit: int) -> bool:
        """Whether foreign files alone exceed the limit. Blocks are kept then: removing them would not allow stores."""
        exceeds = self._others_bytes > limit
        if exceeds and not self._told_others:
            logger.warning(
                "files that are not blocks have %d bytes, more than max_bytes = %d: nothing is stored, and no block is "
                "removed to make room, until they are removed", self._others_bytes, limit,
            )  # fmt: skip
        self._told_others = exceeds
        return exceeds

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

    def _listing(self) -> Iterator[KeyInfo]:
        self.lease.renew()
        self._on_progress(0)
        for count, info in enumerate(self._store.keys(), 1):
            if not info.key.startswith(_UNCOUNTED):
                yield info
            if count % RENEW_EVERY_KEYS == 0:
                self.lease.renew()
                self._on_progress(count)

    def remove(self, infos: list[KeyInfo]) -> list[KeyInfo]:
        """Delete blobs; returns the blobs that no longer exist."""
        self._room.note_removing()
        outcomes = delete_all(self._store, [info.key for info in infos])
        gone = [info for info, error in zip(infos, outcomes, strict=True) if error is None]
        error = next((error for error in outcomes if error is not None), None)
        if error is not None:
            logger.warning("%d of %d blocks could not be removed: %s", len(infos) - len(gone), len(infos), error)
        if gone:
            self._room.note_removed(sum(info.size for info in gone))
        self.lease.renew()
        self._on_removed([info.key for info in gone])
        return gone


def is_block(key: str) -> bool:
    """Whether a name has the form that FileMapper gives to blocks."""
    return parse_block_name(key) is not None


def listed_bytes(store: Store) -> int:
    """Bytes in a root as a collector counts them, without the store's own folders.

    Raises:
        StoreError: the root cannot be listed.
    """
    return sum(info.size for info in store.keys() if not info.key.startswith(_UNCOUNTED))  # noqa: SIM118 - not a dict
