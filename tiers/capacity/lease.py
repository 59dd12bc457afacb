"""Lease: lets one collector at a time work on a root, and expires if that collector dies.

``_kvtiers/lease/<generation>`` is created only if absent, so each generation has one holder (if the store has
``exclusive_create``). The holder renews the lease by replacing it, and removes it when it is done. A process that has
seen the lease unchanged for ``lease_s``, by its own clock, considers the holder dead and creates the next generation.
So no clocks are compared, and only one of several candidates wins.

The lease saves collectors from doing the same work twice. Correctness does not depend on it: two collectors at once
would remove the same blocks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection

from ..errors import StoreError
from ..plain_logs import get_logger
from ..store import KeyInfo, Store
from .records import OWN_PREFIX, UNREADABLE, RecordKeys, get_record, put_record

logger = get_logger(__name__)

LEASE_PREFIX = f"{OWN_PREFIX}lease/"
_DIGITS = 12
_NAME = re.compile(rf"{LEASE_PREFIX}0[0-9]{{{_DIGITS - 1}}}")  # leading 0: the next one has as many digits


class Lease:
    """One process's view of the lease. For one thread.

    Args:
        store: the shared store.
        owner: unique ID of this process.
        lease_s: see ``CapacityPolicy``.
        clock: monotonic seconds.
        keys: keys to authenticate records with.
        dead_owners: processes that are known to have ended.
    """

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        keys: RecordKeys | None = None,
        dead_owners: Collection[str] = (),
    ) -> None:
        self._store = store
        self._dead_owners = dead_owners
        self._keys = keys
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock
        self._held: str | None = None
        self._renewals = 0
        self._renewed_at = 0.0
        self._seen: tuple[str, float] | None = None  # last seen state of another's lease, and since when

    def try_acquire(self) -> bool:
        """Become the holder, unless another process holds the lease. Returns whether it succeeded.

        Raises:
            StoreError: a storage call failed.
        """
        found = self._newest()
        if found is not None and self._may_be_held(found):
            return False
        generation = int(found.key.removeprefix(LEASE_PREFIX)) + 1 if found is not None else 1
        key = f"{LEASE_PREFIX}{generation:0{_DIGITS}}"
        put_record(self._store, key, self._content(), overwrite=False, keys=self._keys)
        if get_record(self._store, key, keys=self._keys) != self._content():
            return False  # another process was faster
        self._seen = None
        self._held = key
        self._renewed_at = self._clock()
        if found is not None:
            self._store.delete(found.key)
        return True

    @property
    def seconds_to_wait(self) -> float:
        """Time until another's lease expires if it is not renewed; 0 if none was seen."""
        return 0.0 if self._seen is None else max(0.0, self._lease_s - (self._clock() - self._seen[1]))

    def renew(self) -> bool:
        """Renew the lease if a third of its time has passed. Call this often. Returns whether it did."""
        if self._held is None or self._clock() - self._renewed_at <= self._lease_s / 3:
            return False
        self._renewals += 1
        self._renewed_at = self._clock()
        try:
            put_record(self._store, self._held, self._content(), keys=self._keys)
        except StoreError as e:
            logger.debug("the lease is not renewed: %s", e)  # another collector may start, which is harmless
        return True

    def release(self) -> None:
        """Remove the lease, so that the next collector can start at once."""
        held, self._held = self._held, None
        if held is not None:
            self._store.delete(held)

    def storage_time(self) -> float | None:
        """Unix seconds of the storage's clock when the lease was last written.

        Returns None if the lease is not held, or was taken over because it had not been renewed in time. Then it is
        held no longer.
        """
        newest = self._newest()
        if newest is not None and newest.key == self._held:
            return newest.mtime
        self.release()
        return None

    @property
    def is_held(self) -> bool:
        """Whether this process is the holder, as far as it knows."""
        return self._held is not None

    def _may_be_held(self, found: KeyInfo) -> bool:
        """Whether another's lease is still valid: it changed within ``lease_s``. An invalid record is not a lease."""
        try:
            content = get_record(self._store, found.key, keys=self._keys)
        except UNREADABLE:
            content = None
        if content == {} or (content and content.get("owner") in self._dead_owners):
            return False
        state = f"{found.key} {found.mtime} {content}"
        if self._seen is None or self._seen[0] != state:
            self._seen = state, self._clock()
            return True
        return self._clock() - self._seen[1] < self._lease_s

    def _newest(self) -> KeyInfo | None:
        leases = (info for info in self._store.keys(LEASE_PREFIX) if _NAME.fullmatch(info.key))
        return max(leases, key=lambda info: info.key, default=None)

    def _content(self) -> dict[str, object]:
        return {"owner": self._owner, "renewals": self._renewals}
