"""How much a root holds at most at this moment, from the records of its writers and of its collector.

With these records all writers together stay within a limit (``account``), without a lock, on any store.

Records (``records``), each written by one process at a time::

    measured          {id, bytes, base, …}  by the collector: sizes listed, less what it removed since
    grants/<writer>   {reserved, settled,   by that writer: bytes it may have put so far, bytes whose put has ended,
                       wanted}              and the size of its last refused put, or 0
    members/<writer>  {}                    by that writer, once: announces its record

    bytes stored  <=  measured.bytes + sum over the writers of (reserved - base[writer])

``base[writer]`` is the value of ``settled`` when the listing began. Bytes settled by then were listed. All other bytes
may have been stored after the listing passed them, so they are added. If they were listed as well, they count twice
until the next measurement: the sum may be too high, never too low.

Reserving: a writer reserves first and checks afterwards. It publishes the higher ``reserved``, then reads all records,
and uses the reservation only if the sum is within ``max_bytes``. If two writers do this at once, the one that published
last sees the other's reservation, so they never both take the last space. Reserving costs a few small reads and writes,
so a writer reserves a grant at a time (``max_bytes`` / ``GRANT_SHARE``) when half of the last grant is used up, and
single blobs near the limit. Unused space beyond a grant (from a batch whose blocks existed already) is published as
free when no put is running.

Dead writers: a writer that dies leaves its record. The collector sees that the record is not renewed any more, counts
all that it reserved as listed (``base = reserved``), and removes the record after that measurement is published. A
reader starts over if the measurement changed while it read the records. A writer renews its record while it puts. It
starts under a new name after two thirds of the time after which it would be considered dead, and also if its name was
removed: after a step of the clock that stamps blobs, or after a machine slept, a collector takes living writers for
dead. If such a writer has published in the meantime, the collector notices and keeps its record.

Refused writers: a collector also makes room when less than its high mark is used but a writer was refused the size it
``wanted``. Otherwise blobs larger than the space left above that mark would be refused forever.

Writers are found by listing ``members/``, where nothing is ever replaced: a listing may miss a name that is replaced
meanwhile (tmpfs moves it to another position in the folder).

Invalid records: a record that fails its checks (see ``records``), or states an impossible size, counts as missing.
Without a measurement nothing is granted until the next one. A writer whose record is lost may have reserved any number
of bytes, so nothing is granted until it publishes the record again (it does so before each grant) or counts as dead.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from ..daemon_pool import DaemonPool
from ..errors import StoreUnavailableError
from ..plain_logs import get_logger
from ..store import Store
from .clock import ClockReading
from .records import (
    OWN_PREFIX,
    READ_ATTEMPTS_MAX,
    UNREADABLE,
    RecordKeys,
    get_record,
    put_record,
)

logger = get_logger(__name__)

MEASURED = f"{OWN_PREFIX}measured"
USAGE_PREFIX = f"{OWN_PREFIX}grants/"
WRITERS_PREFIX = f"{OWN_PREFIX}members/"
WRITER_NAME = re.compile(r"[0-9a-f]{16}")
AT_S_MAX = 1e15  # excludes NaN and integers too large for float arithmetic
BYTES_MAX = 1 << 63
READERS_MAX = 32  # concurrent reads of other writers' records, if each read waits for a network


@dataclass(frozen=True, slots=True)
class Measured:
    """A collector's measurement of a root.

    Attributes:
        id: identifies the measurement; unchanged while the collector subtracts what it removes.
        bytes: total size of everything listed, less what was removed since.
        blobs: number of blobs.
        base: writer -> part of its ``reserved`` that ``bytes`` already contains; None: all of it, however much.
        at: Unix seconds of the collector's clock.
        clock: the storage's clock at the last measurement by a collector with a ttl; None: there was none.
    """

    id: str
    bytes: int
    blobs: int
    base: Mapping[str, int | None]
    at: float
    clock: ClockReading | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """The writers' records as they stood when a measurement began.

    Attributes:
        base: see ``Measured``.
        dead: writers whose records can be removed after the measurement is published.
        measured_id: ID of the previous measurement; None: there was none, or it cannot be read.
        clock: see ``Measured``, of the previous measurement.
    """

    base: dict[str, int | None] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    measured_id: str | None = None
    clock: ClockReading | None = None


def read_measured(store: Store, *, keys: RecordKeys | None = None) -> Measured | None:
    """The last measurement; None if there is none or it is invalid."""
    match get_record(store, MEASURED, keys=keys):
        case {"id": str(id_), "bytes": size, "blobs": blobs, "base": dict(base), "at": int(at) | float(at), **more}:
            counts = (size, blobs, *(count for count in base.values() if count is not None))
            if abs(at) < AT_S_MAX and all(map(_is_count, counts)):
                return Measured(id_, size, blobs, base, at, ClockReading.from_json(more.get("clock")))
    return None


def publish_measured(store: Store, measured: Measured, before: str | None, keys: RecordKeys | None = None) -> bool:
    """Publish a measurement, unless another one was published since its listing began. Returns whether it was.

    The older one would be wrong then: records of writers that died in the meantime may have been removed.

    Args:
        before: ``Baseline.measured_id``, or the measurement's own ID to subtract what was removed since.
    """
    last = read_last(store, keys)
    if (None if last is None else last.id) != before:
        return False
    content = {name: getattr(measured, name) for name in ("id", "bytes", "blobs", "base", "at")}
    if measured.clock is not None:
        content["clock"] = measured.clock.to_json()
    put_record(store, MEASURED, content, keys=keys)
    return True


def read_last(store: Store, keys: RecordKeys | None) -> Measured | None:
    """The last measurement; None also if it cannot be read (a bad sector): the next measurement replaces it."""
    try:
        return read_measured(store, keys=keys)
    except UNREADABLE as e:
        logger.warning("the last measurement cannot be read: %s", e)
        return None


def read_baseline(store: Store, *, now: float, writer_s: float, keys: RecordKeys | None = None) -> Baseline:
    """Read the writers' records. Call this before the listing begins.

    Args:
        now: Unix seconds by the clock that stamps blobs.
        writer_s: the writer of a record that was not renewed for this long is dead.
        keys: keys that records must be authenticated with.
    """
    last = read_last(store, keys)
    baseline = Baseline() if last is None else Baseline(measured_id=last.id, clock=last.clock)
    renewed_at = {info.key.removeprefix(USAGE_PREFIX): info.mtime for info in store.keys(USAGE_PREFIX)}
    for info in list(store.keys(WRITERS_PREFIX)):
        writer = info.key.removeprefix(WRITERS_PREFIX)
        # abs(): a clock that was ahead may have left timestamps in the future.
        dead = min(abs(now - at) for at in (info.mtime, renewed_at.get(writer, info.mtime))) > writer_s
        if dead and WRITER_NAME.fullmatch(writer):  # files with other names are not writers' records, and stay
            baseline.dead.append(writer)
        usage = _read_usage(store, writer, keys)
        if usage is UNKNOWN:
            if dead:
                baseline.base[writer] = None
        elif usage is not None:
            baseline.base[writer] = usage.reserved if dead else usage.settled
        # A living writer with an unreadable record gets no base, so all that is read of it later counts.
    return baseline


def forget_writers(store: Store, baseline: Baseline, *, keys: RecordKeys | None = None) -> None:
    """Remove dead writers' records. Call this only after a measurement without them is published."""
    for writer in baseline.dead:
        usage = _read_usage(store, writer, keys)
        if usage is UNKNOWN and baseline.base.get(writer) is not None:
            continue  # it was valid before the listing: perhaps only this read of it was damaged
        if usage is not None and usage is not UNKNOWN and usage.reserved != baseline.base.get(writer):
            continue  # alive: what it reserved in the meantime is in no measurement
        try:
            store.delete(WRITERS_PREFIX + writer)
            store.delete(USAGE_PREFIX + writer)
        except UNREADABLE as e:
            logger.warning("the record of a writer stays: %s", e)


def used_bytes(store: Store, *, own: tuple[str, int] | None = None, keys: RecordKeys | None = None) -> int | None:
    """Upper bound of the bytes stored at this moment; None: not measured yet, or not since a record was lost.

    Args:
        own: the calling writer and its ``reserved``, to save reading its record.
        keys: keys that records must be authenticated with.
    """
    usage = read_usage(store, own=own, keys=keys)
    return None if usage is None else usage[0]


def read_usage(
    store: Store, *, own: tuple[str, int] | None = None, keys: RecordKeys | None = None
) -> tuple[int, int] | None:
    """``used_bytes``, and the largest of the sizes that each writer was refused last."""
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
    """Bytes that living writers reserved and, by their records, have neither stored nor given back.

    Returns:
        These bytes, and the largest of the sizes that each writer was refused last.
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


UNKNOWN = _Usage(0, 0, 0)  # compared by identity: the writer has a record, but it is invalid or unreadable


def _usages(store: Store, keys: RecordKeys | None, *, without: Container[str]) -> Iterator[tuple[str, _Usage]]:
    """Announced writers and their records, except the writers in ``without``."""
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
    """A writer's record; None: there is none. UNKNOWN: invalid or unreadable."""
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
    """Whether a value from a record is a plausible byte count. It may be forged; huge ints overflow floats."""
    return isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= BYTES_MAX
