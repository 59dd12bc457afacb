"""Lease: one collector at a time for a root, whoever dies.

``_kvtiers/lease/<generation>`` is created only if absent, so each generation has one holder (where the store has
``exclusive_create``). The holder renews it by replacing it, and removes it when it is done. Another process that has
seen it unchanged for ``lease_s`` by its own clock takes its holder for dead and creates the next generation: no clocks
are compared, and of many takers one wins.

It keeps collectors from doing the same work twice; nothing depends on it. Two at once would remove the same blocks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from kvtiers.tiers.capacity.records import OWN_PREFIX, UNREADABLE, RecordKeys, get_record, put_record
from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import KeyInfo, Store

logger = get_logger(__name__)

LEASE_PREFIX = f"{OWN_PREFIX}lease/"
_DIGITS = 12
_NAME = re.compile(rf"{LEASE_PREFIX}0[0-9]{{{_DIGITS - 1}}}")  # with a 0: the next one has as many digits


class Lease:
    """One process's view of the lease. For one thread.

    Args:
        store: the shared one.
        owner: what tells this process from all others.
        lease_s: see ``CapacityPolicy``.
        clock: monotonic seconds.
        keys: what records are authenticated with.
    """

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        keys: RecordKeys | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock
        self._held: str | None = None
        self._renewals = 0
        self._renewed_at = 0.0
        self._seen: tuple[str, float] | None = None  # another's lease as it was, and since when

    def try_acquire(self) -> bool:
        """Become the holder, if nobody else is.

        Raises:
            StoreError: the store cannot be asked.
        """
        found = self._newest()
        if found is not None and self._may_be_held(found):
            return False
        generation = int(found.key.removeprefix(LEASE_PREFIX)) + 1 if found is not None else 1
        key = f"{LEASE_PREFIX}{generation:0{_DIGITS}}"
        put_record(self._store, key, self._content(), overwrite=False, keys=self._keys)
        if get_record(self._store, key, keys=self._keys) != self._content():
            return False  # another one was faster
        self._seen = None
        self._held = key
        self._renewed_at = self._clock()
        if found is not None:
            self._store.delete(found.key)
        return True

    @property
    def seconds_to_wait(self) -> float:
        """How long until a lease that is not renewed any more is taken over; 0 where none was seen."""
        return 0.0 if self._seen is None else max(0.0, self._lease_s - (self._clock() - self._seen[1]))

    def renew(self) -> None:
        """To be called often; writes when a third of the lease has passed."""
        if self._held is not None and self._clock() - self._renewed_at > self._lease_s / 3:
            self._renewals += 1
            self._renewed_at = self._clock()
            try:
                put_record(self._store, self._held, self._content(), keys=self._keys)
            except StoreError as e:
                logger.debug("the lease is not renewed: %s", e)  # another collector may begin, which does no harm

    def release(self) -> None:
        """Let the next one begin at once."""
        held, self._held = self._held, None
        if held is not None:
            self._store.delete(held)

    def storage_time(self) -> float | None:
        """Unix seconds by the clock that stamps blobs, as of ``try_acquire``; None where the lease is not held."""
        held = next((info for info in self._store.keys(LEASE_PREFIX) if info.key == self._held), None)
        return None if held is None else held.mtime

    def _may_be_held(self, found: KeyInfo) -> bool:
        """Whether another's lease has not been unchanged for long enough. One that cannot be believed is no lease."""
        try:
            content = get_record(self._store, found.key, keys=self._keys)
        except UNREADABLE:
            content = None
        if content == {}:
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
