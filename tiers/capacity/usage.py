"""Usage: the record of a root's collector, with the stored bytes and whether writers must stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..plain_logs import get_logger
from ..store import Store
from .records import OWN_PREFIX, UNREADABLE, get_record, put_record

logger = get_logger(__name__)

USAGE = f"{OWN_PREFIX}usage"
BYTES_MAX = 1 << 63
AT_S_MAX = 1e15  # limit of plausible numbers, without NaN and integers too large for float arithmetic


@dataclass(frozen=True, slots=True)
class Usage:
    """The record of a root's collector.

    Attributes:
        holder: name of the collector that works; "": no collector works.
        beat: changes with each publication, which shows that the collector is alive.
        listed: number of complete listings; 0: ``bytes`` is only a lower bound.
        listed_at: end of the last complete listing, in Unix seconds of the collector's host.
        bytes: stored bytes: the bytes of the last listing, plus later puts, less later removals.
        blobs: number of blobs in the last complete listing.
        put: writer -> how many of its put bytes are included in ``bytes``; see ``written``.
        full: why writers must stop; "": writers may go on.
    """

    holder: str = ""
    beat: int = 0
    listed: int = 0
    listed_at: float = 0.0
    bytes: int = 0
    blobs: int = 0
    put: Mapping[str, int] = field(default_factory=dict)
    full: str = ""


def read_usage(store: Store) -> Usage | None:
    """Return the collector's last record; None: there is no record, or it is invalid or unreadable.

    Raises:
        StoreError: the storage does not answer.
    """
    try:
        record = get_record(store, USAGE)
    except UNREADABLE as e:
        logger.warning("the collector's record cannot be read: %s", e)
        return None
    match record:
        case {
            "holder": str(holder), "beat": beat, "listed": listed, "listed_at": int(at) | float(at), "bytes": size,
            "blobs": blobs, "put": dict(put), "full": str(full),
        } if abs(at) < AT_S_MAX and all(map(is_count, (beat, listed, size, blobs, *put.values()))):  # fmt: skip
            return Usage(holder, beat, listed, at, size, blobs, put, full)
    return None


def publish_usage(store: Store, usage: Usage) -> None:
    """Replace the collector's record.

    Raises:
        StoreError: as ``Store.put``.
    """
    put_record(store, USAGE, asdict(usage))


def is_count(count: object) -> bool:
    """Whether a value from a record is a plausible byte count. Records may be forged, and huge ints overflow floats."""
    return isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= BYTES_MAX
