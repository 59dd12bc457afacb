"""When a collector works: Schedule says when a run is due, StorageClock what time it is where the blobs are."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import StoreConfigError, StoreError
from ..plain_logs import get_logger
from ..store import Store, SupportsTouch
from .lease import Lease
from .policy import CapacityPolicy
from .usage import MEASURED, Measured

logger = get_logger(__name__)

NO_TIMES = (
    "this storage (or its fsspec driver) does not say when a blob was written: ttl and max_bytes cannot work here"
)


class Schedule:
    """How long ago this collector ran, how long it rests, and how old the last measurement is. Without I/O.

    Args:
        policy: the limits.
        clock: Unix seconds of this host.
        monotonic: seconds.
    """

    def __init__(self, policy: CapacityPolicy, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._monotonic = monotonic
        self._began_at = self._ended_at = float("-inf")
        self._rest_s = 0.0
        self._seen: tuple[str, float] | None = None  # ID of the last measurement, and since when it is the last

    def begin(self) -> None:
        """Note that a run begins."""
        self._began_at = self._monotonic()

    def end(self, *, has_removed: bool) -> None:
        """Note the end of a run. If it removed nothing, the next rest is twice as long, up to ``every_s``."""
        longer_s = min(self._policy.every_s, max(self._policy.poll_s, 2 * self._rest_s))
        self._rest_s = 0.0 if has_removed else longer_s
        self._ended_at = self._monotonic()

    def end_rest(self) -> None:
        """Note that no space is needed."""
        self._rest_s = 0.0

    def has_rested(self, rest_s_max: float = float("inf")) -> bool:
        """Whether the rest after the last run is over."""
        return self._monotonic() - self._ended_at >= min(self._rest_s, rest_s_max)

    def is_late(self) -> bool:
        """Whether the last run began at least ``every_s`` ago."""
        return self._monotonic() - self._began_at >= self._policy.every_s

    def is_old(self, measured: Measured | None) -> bool:
        """Whether a new measurement is due: there is none, or the latest one is ``every_s`` seconds old or older.

        Its timestamp is another host's and is used only for the first measurement seen. If two hosts' clocks differ by
        more than ``every_s``, each host would otherwise consider all measurements of the other one old.
        """
        now = self._monotonic()
        if self._seen is None and measured is not None:
            self._seen = measured.id, now - abs(self._clock() - measured.at)
        elif self._seen is None or measured is None or self._seen[0] != measured.id:
            self._seen = "" if measured is None else measured.id, now
        return measured is None or now - self._seen[1] >= self._policy.every_s


class StorageClock:
    """The clock that stamps blobs. This host's clock never stands in for it: it may differ by hours.

    Args:
        store: the root.
        is_block: whether a name is a block's.
        lease: tells the time if it is held.
        step_s: a smaller step of the clock does not matter.
    """

    def __init__(self, store: Store, is_block: Callable[[str], bool], lease: Lease, *, step_s: float) -> None:
        self._store = store
        self._is_block = is_block
        self._lease = lease
        self._step_s = step_s
        self._offset_s: float | None = None  # storage's clock minus monotonic clock, at the last run
        self._stepped_at = float("-inf")

    def read(self) -> tuple[float, bool]:
        """Unix seconds, and whether that is the time. If not, it is when the newest block was written.

        That is no later than now, so ages seem shorter than they are, unless a clock was ahead.

        Raises:
            StoreConfigError: the storage does not tell when blobs were written.
            StoreError: the storage could not be listed.
        """
        now = self._lease.storage_time()
        if now is None:
            now = self._touch(MEASURED)
        knows_time = now is not None
        if now is None:  # never measured, or uses cannot be recorded
            blocks = (info for info in self._store.keys() if self._is_block(info.key))  # noqa: SIM118 - not a dict
            newest = max(blocks, key=lambda info: info.mtime, default=None)
            if newest is None:
                return 0.0, False  # nothing could be too old
            now = self._touch(newest.key)  # one block then counts as just used, and it was used last anyway
            knows_time = now is not None
            now = newest.mtime if now is None else now
        if now == 0.0:
            raise StoreConfigError(NO_TIMES)
        return now, knows_time

    def _touch(self, key: str) -> float | None:
        if not isinstance(self._store, SupportsTouch):
            return None
        try:
            self._store.touch(key)
        except StoreError as e:
            logger.debug("the storage's time is not known: %s", e)
            return None
        return next((info.mtime for info in self._store.keys(key) if info.key == key), None)

    def was_stepped(self, now: float, monotonic: float, within_s: float) -> bool:
        """Note the time; whether it was stepped within the last seconds. Only a previous call can show a step."""
        offset_s = now - monotonic
        if self._offset_s is not None and abs(offset_s - self._offset_s) > self._step_s:
            self._stepped_at = monotonic
        self._offset_s = offset_s
        return monotonic - self._stepped_at <= within_s
