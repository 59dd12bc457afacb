"""What a root can hold at this moment, by the records of its writers and of its collector.

All writers together keep a bound (``account``) without a lock, on any store.

Records (``records``), each written by one process at a time::

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
writes, so it is done for a grant at a time, ``max_bytes`` / ``GRANT_SHARE``, when half of the last one is used up, and
for single blobs near the bound. What comes back beyond a grant (a batch whose blocks were there already) is published
as free once nothing is under way.

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

A record that cannot be believed (see ``records``), or that says what no storage can hold, is as good as
none. Without a measurement nothing is granted until the next one. A writer whose record is lost may have reserved any
number of bytes, so nothing is granted until it publishes the record anew, which it does before each grant, or is taken
for dead. Earlier versions kept records without a checksum in ``writers/`` and ``usage/``. Those are never read, and the
collector removes them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from kvtiers.tiers.capacity.records import (
    OWN_PREFIX,
    READ_ATTEMPTS_MAX,
    UNREADABLE,
    RecordKeys,
    get_record,
    put_record,
)
from kvtiers.tiers.daemon_pool import DaemonPool
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store

logger = get_logger(__name__)

MEASURED = f"{OWN_PREFIX}measured"
USAGE_PREFIX = f"{OWN_PREFIX}grants/"
WRITERS_PREFIX = f"{OWN_PREFIX}members/"
OLD_PREFIXES = (f"{OWN_PREFIX}usage/", f"{OWN_PREFIX}writers/")  # of versions whose records had no checksum
AT_S_MAX = 1e15  # no NaN, and nothing that a float cannot be subtracted from
BYTES_MAX = 1 << 63
READERS_MAX = 32  # records of other writers read at once, where each read waits for a network


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
