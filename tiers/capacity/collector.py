"""Collector: keeps a root below its limits. Every engine has a collector; only one collector works at a time.

The bound is soft. Writers put blocks without asking, and publish the number of bytes every ``poll_s`` (``written``).
The collector adds these bytes to its last listing and subtracts the removed bytes. If the sum is above a first mark,
the collector removes blocks. Above a second mark it publishes "full", and writers stop until enough is removed. Both
marks leave a head room below ``max_bytes``, because writers go on until they have read "full"
(``CapacityPolicy.marks``).

A single walk (``walker``) measures the root and removes blocks. The number of keys that it passes in a poll does not
depend on the size of the root: a few keys while nothing must be removed, otherwise as many as ``STEP_S`` allows. The
closer the root comes to full, the larger the share of blocks that counts as the oldest.

A collector whose engine puts nothing does not access the storage. With a ``ttl``, it checks once per ``every_s``
whether a listing is due. Without a ``ttl``, it writes nothing to a root into which nobody puts.

The working collector publishes its name in a record (``usage``). Another collector takes over if the working collector
gives up, or if the record stays unchanged for ``lease_s``. The other collector measures this time with its own clock,
so no clocks are compared. A collector stops if it reads another collector's name in the record. Two collectors may
overlap for a few polls. Both then remove the oldest blocks, so at most twice the excess is removed.

Reading a removed block is a miss.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ..errors import StoreConfigError, StoreError, StoreFullError
from ..plain_logs import get_logger
from ..store import KeepsFiles, Store
from .policy import CapacityPolicy, Lag, Marks
from .room import Room
from .usage import USAGE, Usage, publish_usage, read_usage
from .walker import CollectReport, Walker, Wanted
from .written import Writer, WrittenBytes, since_boot

logger = get_logger(__name__)

NO_TIMES = (
    "this storage (or its fsspec driver) does not report when a blob was written, so ttl and max_bytes do not work"
)
IDLE_S = 10.0  # no collector is needed after this time, and four polls, without a put
KEYS_PER_S = 1000  # keys per poll while nothing must be removed: one request a second, or 1 % of a core for files
STEP_S = 1.0  # length of a walk while blocks must be removed; after each walk, uses and the record are written
RATE_HALF_S = 60.0  # the rate of puts is its last peak, halved every so many seconds
#: Share of the bytes that counts as the oldest, (just above the mark, near full), for files and across a network. A
#: smaller share is closer to least recently used, but more keys are passed for each removed block.
NEAR_SHARES, FAR_SHARES = (1 / 32, 1 / 2), (1 / 8, 1 / 2)
WHOLE_SHARES = (1 / 128, 1 / 128)  # share for a root so small that the ages of all its blocks are known
REST_S_MIN = 1.0  # pause after a pass that removed nothing, longer after each further such pass
LOOKS = 2  # first passes, which may remove nothing because they learn the ages
CLOCK_SHARE = 1 / 3  # part of lease_s between two reads of the storage's clock


class Collector:
    """Measures a root and removes blocks. For one thread, in any process.

    Args:
        store: the root, opened without a reserve of free space, because a full root must accept the collector's
            records.
        policy: the limits.
        on_removed: called with the names of removed blocks and the reason, batch by batch.
        owner: this collector's name in its record; None: a random name. A collector that replaces an ended collector
            works at once if it has the same name.
        clock: Unix seconds.
        monotonic: seconds.
        since_boot: see ``tiers.capacity.written``.

    Attributes:
        full: why writers must stop; "": writers may go on.
        is_urgent: whether ``poll`` should be called again at once.
    """

    def __init__(
        self,
        store: Store,
        policy: CapacityPolicy,
        *,
        on_removed: Callable[[list[str], str], None] = lambda names, reason: None,  # noqa: ARG005
        owner: str | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        since_boot: Callable[[], float] = since_boot,
    ) -> None:
        self._store = store
        self._policy = policy
        self._clock = clock
        self._monotonic = monotonic
        self._owner = owner or secrets.token_hex(8)
        self._writer = Writer(store, poll_s=policy.poll_s, writer_s=policy.writer_s, clock=since_boot)
        self._written = WrittenBytes(store, writer_s=policy.writer_s, clock=monotonic)
        self._idle_s = max(IDLE_S, 4 * policy.poll_s)
        self._walker = Walker(store, grace_s=policy.grace_s, on_removed=on_removed, monotonic=monotonic)
        self._room = Room(store, policy, monotonic)
        self._shares = FAR_SHARES if store.capabilities.latency_bound else NEAR_SHARES
        self._counts_puts = policy.max_bytes is not None or policy.min_free_bytes > 0
        self._lag = Lag(policy, monotonic)  # the record of another collector
        self.full = ""
        self.is_urgent = False
        now = monotonic()
        # As if this engine had just put, so that a limit lowered since the last start takes effect.
        self._active_at = now
        self._looks_at = now  # when to look next whether a listing is due
        self._heard = ("", 0), now  # another collector's name and last beat, and when this beat was first seen
        self._seen_listing: tuple[int, float] | None = None  # last complete listing, and when it was seen
        self._listing_put = -1, 0, 0  # number of a listing, bytes put before it, bytes put until it was seen
        self._told_foreign = False
        self._offset_s: float | None = None  # the storage's clock minus ``monotonic``
        self._take_up(Usage())
        self._seen_listing = None
        self._works = False

    # -- for an engine -----------------------------------------------------------------------------------------------

    def note_put(self, size: int) -> None:
        """Count bytes that this engine put."""
        self._writer.note_put(size)
        self._put += size
        self._active_at = self._monotonic()

    def note_refused(self) -> None:
        """Record that the storage refused a block because it is full."""
        self._room.note_refused()
        self._active_at = self._monotonic()

    def poll(self) -> CollectReport | None:
        """Do the work that is due, for at most about ``STEP_S``. None: nothing is due, or another collector works.

        Raises:
            StoreError: the storage does not answer, cannot be listed, or does not tell when blobs were written.
        """
        began = self._monotonic()
        self.is_urgent = False
        try:
            if not (self._works or (self._is_needed() and self._begin(self._writer.usage or Usage()))):
                return None
            report = self._work()
        except StoreError:
            self._active_at = began  # else a writer that stops because of the error would never hear of its end
            raise
        report.seconds = self._monotonic() - began
        return report

    @property
    def knows_bytes(self) -> bool:
        """Whether the root was listed completely at least once, by any collector."""
        return self._listed > 0

    def release(self) -> None:
        """Stop working, so that another collector may work."""
        if self._works:
            self._works = False
            self._publish("")

    @property
    def seconds_to_wait(self) -> float:
        """Time until another collector counts as dead if its record stays unchanged."""
        return max(0.0, self._policy.lease_s - (self._monotonic() - self._heard[1]))

    # -- for a command -----------------------------------------------------------------------------------------------

    def run(
        self, *, dry_run: bool = False, on_progress: Callable[[int], None] = lambda _: None
    ) -> CollectReport | None:
        """List the root, and remove blocks beyond the limits. None: another collector works, or died not long ago.

        A dry run writes nothing, so it cannot ask for the storage's time, and uses this host's clock.

        Args:
            on_progress: called with the number of blobs passed.

        Raises:
            StoreError: as for ``poll``.
        """
        began = self._monotonic()
        report = CollectReport(dry_run=dry_run)
        if dry_run:
            self._take_up(read_usage(self._store) or Usage())
            self._offset_s = self._clock() - began
        elif self._begin(read_usage(self._store) or Usage()):
            self._put += self._written.read(without=self._writer.name)
        else:
            return None
        try:
            for _ in range(1 if self._now() is not None else 2):  # the first one finds the newest blob
                self._run_pass(report, Wanted(self._ttl_s()), on_progress)
            freed, removed = report.removed_bytes["ttl"] if dry_run else 0, 1
            while removed and (excess := self._excess_bytes(freed=freed)[0]) > 0:
                share = excess / max(1, self._removable_bytes())
                part = CollectReport(dry_run=dry_run)
                self._run_pass(part, Wanted(self._ttl_s(), excess, share), on_progress)
                removed = part.removed_bytes["capacity"]
                report.removed_blobs["capacity"] += part.removed_blobs["capacity"]
                report.removed_bytes["capacity"] += removed
                report.kept_by_error = max(report.kept_by_error, part.kept_by_error)
                if dry_run:
                    break
        finally:
            if not dry_run:
                self.full = self._why_full()
                self.release()
        report.seconds = self._monotonic() - began
        return report

    def _run_pass(self, report: CollectReport, wanted: Wanted, on_progress: Callable[[int], None]) -> None:
        self._begin_pass(report)
        is_end = False
        while not is_end:
            until = self._monotonic() + STEP_S
            before = report.removed_bytes["capacity"]
            is_end = self._walker.step(wanted, report, now=self._now(), until=until)
            wanted = replace(
                wanted, excess_bytes=max(0, wanted.excess_bytes + before - report.removed_bytes["capacity"])
            )
            if self._walker.current is not None:
                on_progress(self._walker.current.blobs)
            if not report.dry_run and self._is_record_due():
                if self._counts_puts:
                    self._put += self._written.read(without=self._writer.name)
                self.full = self._why_full()
                self._publish(self._owner)
        self._end_pass(report)
        if report.dry_run and report.blobs and not (self._walker.last and self._walker.last.tells_times):
            raise StoreConfigError(NO_TIMES)  # a real run notices this when it publishes its record

    # -- whether to work ---------------------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        now = self._monotonic()
        is_active = bool(self.full) or now - self._active_at <= self._idle_s
        looks = self._policy.ttl_s is not None and now >= self._looks_at
        if not is_active and not looks:
            self._lag.note(0, 0)  # bytes put after the listing are not late yet
            return False
        if looks:
            self._looks_at = now + self._policy.every_s
        self._writer.poll(publishes=self._counts_puts)
        usage = self._writer.usage or Usage()
        counted = self._counted_by_others(usage)
        self._lag.note(self._writer.put_bytes if usage.holder not in ("", self._owner) else counted, counted)
        self.full = usage.full
        if late_s := self._lag.late_s:
            self.full = (
                f"another engine's collector of max_bytes has not counted this engine's blocks for {late_s:.0f} s"
            )
        is_due = self._is_listing_due(usage)
        return is_active or is_due

    def _counted_by_others(self, usage: Usage) -> int:
        """Number of this engine's bytes that another collector has counted, by this engine's record or by a listing.

        A collector that cannot read this engine's record still lists its blocks. Bytes that were put before a listing
        was seen are in the next listing, except those of about one poll.
        """
        listed, _, put = self._listing_put
        if usage.listed != listed:
            self._listing_put = usage.listed, put, self._writer.put_bytes
        return max(usage.put.get(self._writer.name, 0), self._listing_put[1])

    def _is_free(self, usage: Usage) -> bool:
        """Whether no other collector works, or the working collector has been silent for ``lease_s``."""
        if usage.holder in ("", self._owner):
            return True
        if (heard := (usage.holder, usage.beat)) != self._heard[0]:
            self._heard = heard, self._monotonic()
        return not self.seconds_to_wait

    def _is_listing_due(self, usage: Usage) -> bool:
        """Whether the last complete listing is ``every_s`` old, or there was no listing.

        The listing's timestamp comes from another host's clock, and is used only for the first record seen. Otherwise,
        if two hosts' clocks differ by more than ``every_s``, each host would consider the other's listings old.
        """
        now = self._monotonic()
        if self._seen_listing is None:
            self._seen_listing = usage.listed, now - abs(self._clock() - usage.listed_at)
        elif self._seen_listing[0] != usage.listed:
            self._seen_listing = usage.listed, now
        return not usage.listed or now - self._seen_listing[1] >= self._policy.every_s

    def _begin(self, usage: Usage) -> bool:
        """Begin to work, unless another collector works. Returns whether this collector works now."""
        if not self._is_free(usage):
            return False
        self._take_up(usage)
        self._works = True
        try:
            self._publish(self._owner)
        except StoreError:
            with suppress(StoreError):
                self.release()
            raise
        return True

    def _take_up(self, usage: Usage) -> None:
        """Continue with the numbers of the last collector's record."""
        self._beat, self._listed, self._listed_at, self._blobs = usage.beat, usage.listed, usage.listed_at, usage.blobs
        self._base = usage.bytes if usage.listed else 0
        self._put = self._put_at_pass = max(0, self._writer.put_bytes - usage.put.get(self._writer.name, 0))
        self._put_at_base = 0
        self._removed = 0  # changes since the listing that ``_base`` comes from
        self._written.begin(usage.put)
        self._counted_at: float | None = None
        self._put_at_count = self._put
        self._rate = 0.0
        self._published_at = self._clock_read_at = float("-inf")
        self._fruitless = 0  # passes in a row that removed nothing although blocks should have been removed
        self._rest_until = float("-inf")
        self._offset_s = None
        self._walker.forget()
        self._is_listing_due(usage)

    # -- work --------------------------------------------------------------------------------------------------------

    def _work(self) -> CollectReport:
        report = CollectReport()
        began = self._monotonic()
        listed = self._listed
        self._count()
        if not self._works:  # another collector does
            return report
        self._walk(report)
        was_full, self.full = self.full, self._why_full()
        if self.full != was_full or self._listed != listed or self._is_record_due():
            self._publish(self._owner)
        report.bytes, report.blobs = self._used(), self._blobs
        is_idle = not self.full and not self.is_urgent and self._walker.current is None
        if is_idle and began - self._active_at > self._idle_s:
            self.release()
        return report

    def _count(self) -> None:
        """Every ``poll_s``, read the writers' records, and whether another collector has begun to work."""
        now = self._monotonic()
        passed_s = float("inf") if self._counted_at is None else now - self._counted_at
        if passed_s < self._policy.poll_s:
            return
        self._writer.poll(publishes=self._counts_puts)
        usage = self._writer.usage
        if usage is not None and not self._is_free(usage):
            self._works = False
            return
        if not self._counts_puts:
            self._counted_at = now
            return
        put = self._written.read(without=self._writer.name)
        self._put += put
        if put:
            self._active_at = now
        if self._counted_at is not None:
            rate = (self._put - self._put_at_count) / passed_s
            self._rate = max(rate, self._rate * 0.5 ** (passed_s / RATE_HALF_S))
        self._counted_at, self._put_at_count = now, self._put

    def _walk(self, report: CollectReport) -> None:
        now = self._monotonic()
        excess, share = self._excess_bytes()
        lists_first = not self._listed and self._policy.max_bytes is not None
        is_short = excess > 0 or bool(
            self.full
        )  # full without an excess: another process may be able to remove blocks that this process cannot
        is_fast = lists_first or (is_short and now >= self._rest_until)
        usage = Usage(listed=self._listed, listed_at=self._listed_at)
        if not (is_fast or self._walker.current is not None or self._is_listing_due(usage)):
            return
        if self._walker.current is None:
            self._begin_pass(report)
        wanted = Wanted(self._ttl_s(), excess if is_fast else 0, share)
        keys_max = float("inf") if is_fast else max(1, int(KEYS_PER_S * self._policy.poll_s))
        until = now + STEP_S
        is_end = self._walker.step(wanted, report, now=self._now(), keys_max=keys_max, until=until)
        removed = sum(report.removed_bytes.values())
        self._removed += removed
        self._room.note_removed(removed)
        if is_end:
            removed_in_pass = self._walker.last.removed_bytes if self._walker.last is not None else 0
            self._end_pass(report)
            if removed_in_pass or not is_short:
                self._fruitless = 0
            elif is_fast:
                self._fruitless += 1
            if self._fruitless > LOOKS:  # all blocks are young or cannot be removed
                rest_s = max(self._policy.grace_s, REST_S_MIN) * 2.0 ** min(30, self._fruitless - LOOKS - 1)
                self._rest_until = self._monotonic() + min(self._policy.every_s, rest_s)
        still_missing = self._excess_bytes()[0] > 0 and self._monotonic() >= self._rest_until
        self.is_urgent = still_missing or (lists_first and not is_end)

    def _begin_pass(self, report: CollectReport) -> None:
        if isinstance(self._store, KeepsFiles):
            report.leftovers = self._store.sweep(remove=not report.dry_run)
        self._put_at_pass = self._put

    def _end_pass(self, report: CollectReport) -> None:
        """Use the sum of an ended pass as the number of stored bytes."""
        last = self._walker.last
        assert last is not None
        self._base, self._put_at_base, self._removed = last.bytes, self._put_at_pass, 0
        self._blobs = last.blobs
        self._listed += 1
        self._listed_at = self._clock()
        self._seen_listing = self._listed, self._monotonic()
        self._room.largest_bytes = max(self._room.largest_bytes, last.largest_bytes)
        report.blobs, report.bytes = last.blobs, last.bytes + sum(report.removed_bytes.values())

    def _used(self) -> int:
        """Bytes stored; a lower bound before the first complete listing."""
        if self._listed:
            return max(0, self._base + self._put - self._put_at_base - self._removed)
        current = self._walker.current
        return 0 if current is None else max(0, current.bytes + self._put - self._put_at_pass)

    def _removable_bytes(self) -> int:
        """Known bytes of blocks."""
        passed = self._walker.last or self._walker.current
        return max(1, self._used() - (0 if passed is None else passed.foreign_bytes))

    def _marks(self) -> Marks | None:
        return self._policy.marks(self._rate)

    def _excess_bytes(self, *, freed: int = 0) -> tuple[int, float]:
        """Return the bytes to remove (0 or less: none) and the share of the blocks' bytes that counts as the oldest.

        Args:
            freed: bytes that a dry run counts as removed.
        """
        used = self._used()
        excess, urgency = 0, 0.0
        marks = self._marks()
        if marks is not None and not self._is_foreign_too_much(marks):
            excess = used - marks.evict_bytes
            urgency = min(1.0, max(0.0, excess / max(1, marks.full_bytes - marks.evict_bytes)))
        missing = self._room.missing_bytes(put=self._put, used=used) - freed
        if missing > 0:
            excess = max(excess, missing)
        least, most = WHOLE_SHARES if self._walker.knows_whole else self._shares
        share = max(least + urgency * (most - least), excess / self._removable_bytes())
        return excess, min(1.0, share)

    def _is_foreign_too_much(self, marks: Marks) -> bool:
        """Whether files that are not blocks exceed the limit by themselves, so that removing blocks does not help."""
        passed = self._walker.last or self._walker.current
        foreign = 0 if passed is None else passed.foreign_bytes
        is_too_much = foreign > marks.full_bytes
        if is_too_much and not self._told_foreign:
            logger.warning(
                "files that are not blocks have %d bytes, more than max_bytes = %d allows: nothing is stored, and no "
                "block is removed to make room. Remove these files, or raise max_bytes",
                foreign, self._policy.max_bytes,
            )  # fmt: skip
        self._told_foreign = is_too_much
        return is_too_much

    def _why_full(self) -> str:
        marks = self._marks()
        used = self._used()
        if marks is None:
            return ""
        mark = (marks.evict_bytes + marks.full_bytes) // 2 if self.full else marks.full_bytes
        if used <= mark:
            return ""
        return f"{used} bytes are stored, of max_bytes = {self._policy.max_bytes}"

    def _is_record_due(self) -> bool:
        return self._monotonic() - self._published_at >= max(1.0, self._policy.poll_s)

    def _publish(self, holder: str) -> None:
        self._beat += 1
        now = self._published_at = self._monotonic()
        put = self._written.seen | ({self._writer.name: self._writer.put_bytes} if self._writer.put_bytes else {})
        usage = Usage(holder, self._beat, self._listed, self._listed_at, self._used(), self._blobs, put, self.full)
        is_published = True
        try:
            publish_usage(self._store, usage)
        except StoreFullError as e:
            is_published = False
            logger.debug("the collector's record was not written, because the storage is full: %s", e)
        if holder and now - self._clock_read_at >= CLOCK_SHARE * self._policy.lease_s:
            self._clock_read_at = now
            self._read_clock(is_published=is_published)

    # -- time --------------------------------------------------------------------------------------------------------

    def _now(self) -> float | None:
        """Unix seconds of the storage's clock; None: unknown, because there is no space for a record."""
        return None if self._offset_s is None else self._offset_s + self._monotonic()

    def _read_clock(self, *, is_published: bool) -> None:
        """Read the storage's clock from the record that was just published."""
        now = None
        if is_published:
            now = next((info.mtime for info in self._store.keys(USAGE) if info.key == USAGE), None)
        if now == 0.0:
            raise StoreConfigError(NO_TIMES)
        self._offset_s = None if now is None else now - self._monotonic()

    def _ttl_s(self) -> float:
        """The age at which blocks are removed. Infinite while the storage's time is unknown."""
        return float("inf") if self._policy.ttl_s is None or self._offset_s is None else self._policy.ttl_s
