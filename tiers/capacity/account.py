"""Account: what a root holds at most, kept by all writers together without a lock, on any store.

Records (``tiers.capacity.records``), each written by one process at a time::

    measured          {id, bytes, base}     by the collector: the sizes it listed, less what it removed since
    grants/<writer>   {reserved, settled,   by that writer: bytes it may have put so far, bytes whose put has ended,
                       wanted}              and the size it was refused last, or 0
    members/<writer>  {}                    by that writer, once: that there is such a record

    what is stored  <=  measured.bytes + sum over the writers of (reserved - base[writer])

``base[writer]`` is ``settled`` as it stood when the listing began: what was settled by then was listed, everything
else may have come after the listing had passed. It is counted twice if it was listed as well, until the next
measurement: the sum errs to the safe side.

A writer that wants to put reserves first and looks afterwards: it publishes the higher ``reserved``, then reads all
records, and uses what it reserved only if the sum is within ``max_bytes``. Of two writers that do so at once, the one
that published last sees the other's, so they never both take the last room. Reserving costs a few small reads and
writes, so it is done for a grant at a time, ``GRANT_SHARE`` of ``max_bytes``, and for single blobs near the bound. What
comes back beyond a grant (a batch whose blocks were there already) is published as free once nothing is under way.

A writer that dies leaves its record. The collector sees that it is not renewed any more, counts all it reserved as
listed (``base = reserved``), and removes the record once that measurement is published; a reader that finds another
measurement after it has read the records than before begins again. A writer renews its record while it puts. After two
thirds of the time after which it is taken for dead it begins as a new one, and also where its name is gone: a step of
the clock that stamps blobs, or a machine that slept, makes a collector take the living for dead. What such a writer
has published meanwhile is seen, and its record stays.

A collector makes room also where less than its high mark is used but a writer was refused what it ``wanted``: blobs
larger than what is left above that mark would be refused for ever otherwise.

Writers are found by listing ``members/``, where nothing is ever replaced: a listing need not show a name that is
replaced meanwhile (tmpfs gives it a new place in the folder).

A record that cannot be believed (see ``tiers.capacity.records``), or that says what no storage can hold, is as good as
none. Without a measurement nothing is granted until the next one. A writer whose record is lost may have reserved any
number of bytes, so nothing is granted until it publishes the record anew, which it does before each grant, or is taken
for dead. Earlier versions kept records without a checksum in ``writers/`` and ``usage/``. Those are never read, and the
collector removes them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field

from tiers.capacity.records import (
    OWN_PREFIX,
    READ_ATTEMPTS_MAX,
    UNREADABLE,
    RecordKeys,
    get_record,
    put_record,
)
from tiers.daemon_pool import DaemonPool
from tiers.errors import StoreError, StoreFullError, StoreUnavailableError
from tiers.plain_logs import get_logger
from tiers.store import Store

logger = get_logger(__name__)

MEASURED = f"{OWN_PREFIX}measured"
USAGE_PREFIX = f"{OWN_PREFIX}grants/"
WRITERS_PREFIX = f"{OWN_PREFIX}members/"
OLD_PREFIXES = (f"{OWN_PREFIX}usage/", f"{OWN_PREFIX}writers/")  # of versions whose records had no checksum
GRANT_SHARE = 256
GRANT_BYTES_MAX = 256 << 20
AT_S_MAX = 1e15  # no NaN, and nothing that a float cannot be subtracted from
BYTES_MAX = 1 << 63
READERS_MAX = 32  # records of other writers read at once, where each read waits for a network
DENIED_S = 0.02  # after a refusal, so that a full root is not asked for every block; times 100 on a network


@dataclass(frozen=True, slots=True)
class Measured:
    """What a collector found.

    Attributes:
        id: of the measurement; stays while the collector takes off what it removes.
        bytes: sizes of everything listed, less what was removed since.
        blobs: how many.
        base: writer -> how much of its ``reserved`` is in ``bytes`` already; None: whatever it is.
        at: Unix seconds of the collector's clock.
    """

    id: str
    bytes: int
    blobs: int
    base: Mapping[str, int | None]
    at: float


@dataclass(frozen=True, slots=True)
class Baseline:
    """The writers' records as they stood when a measurement began.

    Attributes:
        base: for ``Measured``.
        dead: writers whose records can go once the measurement is published.
        old: records of versions whose records had no checksum, not renewed for as long; they can go as well.
        measured_id: of the last measurement before it; None: there was none, or none that can be read.
    """

    base: dict[str, int | None] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    old: list[str] = field(default_factory=list)
    measured_id: str | None = None


def read_measured(store: Store, *, keys: RecordKeys | None = None) -> Measured | None:
    """The last measurement; None where there is none that can be believed."""
    match get_record(store, MEASURED, keys=keys):
        case {"id": str(id_), "bytes": size, "blobs": blobs, "base": dict(base), "at": int(at) | float(at)}:
            counts = (size, blobs, *(count for count in base.values() if count is not None))
            if abs(at) < AT_S_MAX and all(map(_is_count, counts)):
                return Measured(id_, size, blobs, base, at)
    return None


def publish_measured(store: Store, measured: Measured, before: str | None, keys: RecordKeys | None = None) -> bool:
    """Make a measurement the one that counts, unless another was published since its listing began.

    An older one could not be believed then: the records of writers that died meanwhile may be gone.

    Args:
        before: ``Baseline.measured_id``, or the measurement's own id to take off what was removed since.
    """
    if _measured_id(store, keys) != before:
        return False
    content = {name: getattr(measured, name) for name in ("id", "bytes", "blobs", "base", "at")}
    put_record(store, MEASURED, content, keys=keys)
    return True


def _measured_id(store: Store, keys: RecordKeys | None) -> str | None:
    """None also where it cannot be read, as from a bad sector: the next measurement takes its place."""
    try:
        measured = read_measured(store, keys=keys)
    except UNREADABLE as e:
        logger.warning("the last measurement cannot be read: %s", e)
        return None
    return None if measured is None else measured.id


def read_baseline(store: Store, *, now: float, writer_s: float, keys: RecordKeys | None = None) -> Baseline:
    """To be read before the listing begins.

    Args:
        now: Unix seconds by the clock that stamps blobs.
        writer_s: a record not renewed for so long is a dead writer's.
        keys: what records are authenticated with.
    """
    baseline = Baseline(measured_id=_measured_id(store, keys))
    renewed_at = {info.key.removeprefix(USAGE_PREFIX): info.mtime for info in store.keys(USAGE_PREFIX)}
    for info in list(store.keys(WRITERS_PREFIX)):
        writer = info.key.removeprefix(WRITERS_PREFIX)
        # A name may be of a time to come, by a clock that was ahead.
        dead = min(abs(now - at) for at in (info.mtime, renewed_at.get(writer, info.mtime))) > writer_s
        if dead:
            baseline.dead.append(writer)
        usage = _read_usage(store, writer, keys)
        if usage is UNKNOWN:
            if dead:
                baseline.base[writer] = None
        elif usage is not None:
            baseline.base[writer] = usage.reserved if dead else usage.settled
        # A living writer of which nothing is known gets no base: all will count that is read of it later.
    for prefix in OLD_PREFIXES:
        baseline.old.extend(info.key for info in store.keys(prefix) if abs(now - info.mtime) > writer_s)
    return baseline


def forget_writers(store: Store, baseline: Baseline, *, keys: RecordKeys | None = None) -> None:
    """Remove the records of the dead; only once a measurement without them is published."""
    for writer in baseline.dead:
        usage = _read_usage(store, writer, keys)
        if usage is not None and usage is not UNKNOWN and usage.reserved != baseline.base.get(writer):
            continue  # it lives: what it reserved meanwhile is in no measurement
        _delete(store, WRITERS_PREFIX + writer, USAGE_PREFIX + writer)
    for key in baseline.old:
        _delete(store, key)


def _delete(store: Store, *keys: str) -> None:
    try:
        for key in keys:
            store.delete(key)
    except UNREADABLE as e:
        logger.warning("the record of a writer stays: %s", e)


def used_bytes(store: Store, *, own: tuple[str, int] | None = None, keys: RecordKeys | None = None) -> int | None:
    """The most that can be stored at this moment; None: nobody has measured yet, or nobody since a record was lost.

    Args:
        own: writer and its ``reserved``, which need not be read.
        keys: what records must be authenticated with.
    """
    usage = read_usage(store, own=own, keys=keys)
    return None if usage is None else usage[0]


def read_usage(
    store: Store, *, own: tuple[str, int] | None = None, keys: RecordKeys | None = None
) -> tuple[int, int] | None:
    """As ``used_bytes``, and the largest size that a writer was refused last."""
    for _ in range(READ_ATTEMPTS_MAX):
        measured = read_measured(store, keys=keys)
        if measured is None:
            return None
        used = measured.bytes
        wanted = 0
        reserved: dict[str, int | None] = {} if own is None else {own[0]: own[1]}
        for writer, usage in _usages(store, keys, without=tuple(reserved)):
            reserved[writer] = None if usage is UNKNOWN else usage.reserved
            wanted = max(wanted, usage.wanted)
        for writer, count in reserved.items():
            base = measured.base.get(writer, 0)
            if base is None:
                continue
            if count is None:
                return None
            used += max(0, count - base)
        again = read_measured(store, keys=keys)
        if again is not None and again.id == measured.id:
            return used - measured.bytes + again.bytes, wanted
    raise StoreUnavailableError("it is measured faster than it can be read", key=MEASURED)


def held_and_wanted(store: Store, *, dead: Container[str] = (), keys: RecordKeys | None = None) -> tuple[int, int]:
    """What living writers keep from each other: reserved and, by their records, neither stored nor given back.

    Returns:
        That, and the largest size that one of them was refused last.
    """
    held = wanted = 0
    for _, usage in _usages(store, keys, without=dead):
        held += usage.reserved - usage.settled
        wanted = max(wanted, usage.wanted)
    return held, wanted


@dataclass(frozen=True, slots=True)
class _Usage:
    """A writer's record. ``settled`` is never more than ``reserved``."""

    reserved: int
    settled: int
    wanted: int


UNKNOWN = _Usage(0, 0, 0)  # told by identity: the writer has a record, and it cannot be believed


def _usages(store: Store, keys: RecordKeys | None, *, without: Container[str]) -> Iterator[tuple[str, _Usage]]:
    """Writers that have a name, and what they published; those of some are not read."""
    writers = [info.key.removeprefix(WRITERS_PREFIX) for info in store.keys(WRITERS_PREFIX)]
    writers = [writer for writer in writers if writer not in without]
    readers = min(READERS_MAX, len(writers)) if store.capabilities.latency_bound else 1
    if readers > 1:
        pool = DaemonPool(readers, "kvtiers-account")
        try:
            reading = [pool.submit(_read_usage, store, writer, keys) for writer in writers]
            found = [each.result() for each in reading]
        finally:
            pool.shutdown(0)
    else:
        found = [_read_usage(store, writer, keys) for writer in writers]
    for writer, usage in zip(writers, found, strict=True):
        if usage is not None:
            yield writer, usage


def _read_usage(store: Store, writer: str, keys: RecordKeys | None) -> _Usage | None:
    """What a writer published; None: nothing."""
    try:
        record = get_record(store, USAGE_PREFIX + writer, keys=keys)
        match record:
            case None:
                return None
            case {"reserved": reserved, "settled": settled, "wanted": wanted}:
                if all(map(_is_count, (reserved, settled, wanted))) and settled <= reserved:
                    return _Usage(reserved, settled, wanted)
        logger.warning("the record of the writer %s is damaged or was not written by a writer of this root", writer)
    except UNREADABLE as e:
        logger.warning("the record of the writer %s cannot be read: %s", writer, e)
    return UNKNOWN


def _is_count(count: object) -> bool:
    """Whether it may be a storage's bytes: others may have written it, and what is far beyond fits no float."""
    return isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= BYTES_MAX


def _since_boot() -> float:
    """Monotonic seconds, the machine's sleep among them: nobody else waits for that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Account:
    """One writer's part. Any thread may call; ``_lock`` owns the fields and is held while records are read and written.
    Who has waited for it while that failed gets the same error.

    Args:
        store: the shared one.
        max_bytes: what the root may hold.
        writer_s: see ``CapacityPolicy``.
        newcomer_s: how long other writers may not see that this one exists: names are cached on NFS. Nothing is
            granted before.
        clock: monotonic seconds, the machine's sleep among them.
        keys: what records are authenticated with.
    """

    def __init__(
        self,
        store: Store,
        max_bytes: int,
        *,
        writer_s: float = 900.0,
        newcomer_s: float = 0.0,
        clock: Callable[[], float] = _since_boot,
        keys: RecordKeys | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._max_bytes = max_bytes
        self._grant_bytes = min(GRANT_BYTES_MAX, max_bytes // GRANT_SHARE)
        self._name_s = writer_s * 2 / 3
        self._renew_s = writer_s / 6
        self._newcomer_s = newcomer_s
        self._denied_s = DENIED_S * (100 if store.capabilities.latency_bound else 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._denied_until = float("-inf")
        self._refusal = ""
        self._wanted = 0
        self._failures = 0
        self._failure = ""
        self._begin()

    def take(self, size: int, key: str) -> str:
        """Reserve room for a blob. What it returns goes to ``settle`` or ``give_back``.

        Raises:
            StoreFullError: there is none, or nobody knows yet.
            StoreError: the records cannot be read or written.
        """
        failures = self._failures
        with self._lock:
            now = self._clock()
            if now - self._renewed_at > self._name_s:
                self._begin()
            late = self._named_at is not None and now - self._renewed_at > self._renew_s
            if late or self._available < size:
                if failures != self._failures:  # or those who wait for a hung storage would time out one after another
                    raise StoreUnavailableError(f"the account cannot be asked: {self._failure}", key=key)
                try:
                    if late:
                        self._publish()
                    if self._available < size:
                        if now < self._denied_until:
                            raise StoreFullError(f"{size} bytes are refused: {self._refusal}", key=key)
                        self._reserve(size, key)
                except StoreError as e:
                    self._note_failure(e)
                    raise
            self._available -= size
            return self._writer

    def settle(self, taken: str, size: int) -> None:
        """The put has ended, and may have stored the blob."""
        with self._lock:
            if taken == self._writer:
                self._settled += size
                self._trim()

    def give_back(self, taken: str, size: int) -> None:
        """The put has stored nothing."""
        with self._lock:
            if taken == self._writer:
                self._available += size
                self._trim()

    def _trim(self) -> None:
        """Let others have what is beyond a grant: an engine that stores nothing more would keep it for long.

        Only when nothing is under way, as one that is busy would reserve it again.
        """
        spare = self._available - self._grant_bytes
        under_way = self._reserved - self._settled - self._available
        if spare <= 0 or under_way or self._clock() - self._renewed_at > self._name_s:
            return
        self._reserved -= spare
        self._available -= spare
        try:
            self._publish()
        except StoreError as e:
            self._note_failure(e)
            logger.debug("what others may read is more than is reserved: %s", e)  # it errs to the safe side

    def _note_failure(self, error: StoreError) -> None:
        if error.retryable:
            self._failures += 1
            self._failure = str(error)  # the error itself would keep its frames

    def _begin(self) -> None:
        """As a new writer: others may have taken the old one for dead. What is under way was counted as its."""
        self._writer = secrets.token_hex(8)
        self._named_at: float | None = None
        self._reserved = self._settled = self._available = 0
        self._renewed_at = self._clock()

    def _reserve(self, size: int, key: str) -> None:
        if self._named_at is not None and self._store.size(WRITERS_PREFIX + self._writer) is None:
            self._store.delete(USAGE_PREFIX + self._writer)  # if renewed since, nobody else would
            self._begin()
        before = self._reserved
        self._wanted = 0
        for more in sorted({max(size, self._grant_bytes), size}, reverse=True):
            self._reserved = before + more - self._available
            try:
                named_at = self._publish()
                used = used_bytes(self._store, own=(self._writer, self._reserved), keys=self._keys)
            except StoreError:
                self._reserved = before  # what others may read is more: it errs to the safe side
                raise
            young = self._clock() - named_at < self._newcomer_s
            if used is not None and used <= self._max_bytes and not young:
                self._available = more
                return
        self._reserved = before
        self._denied_until = self._clock() + self._denied_s
        if used is not None and used > self._max_bytes >= size:
            self._wanted = size
        self._publish()
        if used is None:
            self._refusal = f"what is stored is not measured yet, and max_bytes = {self._max_bytes} binds it"
        elif used <= self._max_bytes:
            self._refusal = f"for {self._newcomer_s:g} s the other hosts may not see this new writer yet"
        else:
            self._refusal = f"together it would be more than max_bytes = {self._max_bytes}"
        raise StoreFullError(f"{size} bytes are refused: {self._refusal}", key=key)

    def _publish(self) -> float:
        """Returns since when the writer has a name."""
        renewed_at = self._clock()
        named_at = self._named_at
        if named_at is None:
            put_record(self._store, WRITERS_PREFIX + self._writer, {}, overwrite=False, keys=self._keys)
            named_at = self._named_at = renewed_at
        content = {"reserved": self._reserved, "settled": self._settled, "wanted": self._wanted}
        put_record(self._store, f"{USAGE_PREFIX}{self._writer}", content, keys=self._keys)
        self._renewed_at = renewed_at
        return named_at
