"""Account: one writer's part in keeping what a root holds within ``max_bytes``. ``usage`` says how."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from kvtiers.tiers.capacity.records import RecordKeys, put_record
from kvtiers.tiers.capacity.usage import USAGE_PREFIX, WRITERS_PREFIX, used_bytes
from kvtiers.tiers.errors import StoreError, StoreFullError, StoreUnavailableError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store

logger = get_logger(__name__)

GRANT_SHARE = 256
GRANT_BYTES_MAX = 256 << 20
DENIED_S = 0.02  # after a refusal, so that a full root is not asked for every block; times 100 on a network


def _since_boot() -> float:
    """Monotonic seconds, the machine's sleep among them: nobody else waits for that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Account:
    """One writer's part. Any thread may call.

    ``_lock`` owns the fields, but for those named below, and is never held while the storage is asked. ``_records`` is
    held while this writer's records are read or written, and is taken first where both are; it owns ``_named_at``,
    ``_wanted``, ``_denied_until`` and ``_refusal``. What is published as ``reserved`` is never less than ``_reserved``.

    A put waits for ``_records`` only when the grant is used up, or the record is old. Before that, the thread whose
    put ended asks for more while the others go on.

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
        self._records = threading.Lock()
        self._denied_until = float("-inf")
        self._refusal = ""
        self._wanted = 0
        self._failures = 0  # whoever waited for ``_records`` during one fails with it
        self._failure = ""
        self._asks_ahead = True  # until that is refused
        self._begin()

    def take(self, size: int, key: str) -> str:
        """Reserve room for a blob. What it returns goes to ``settle`` or ``give_back``.

        Raises:
            StoreFullError: there is none, or nobody knows yet.
            StoreError: the records cannot be read or written. Who has waited for that gets the same error.
        """
        failures = self._failures
        with self._lock:
            if self._available >= size and self._clock() - self._renewed_at <= self._renew_s:
                self._available -= size
                return self._writer
        with self._records:
            with self._lock:
                if self._clock() - self._renewed_at > self._name_s:
                    self._begin()
                is_late = self._named_at is not None and self._clock() - self._renewed_at > self._renew_s
                if not is_late and self._available >= size:
                    self._available -= size
                    return self._writer
            if failures != self._failures:  # or those who wait for a hung storage would time out one after another
                raise StoreUnavailableError(f"the account cannot be asked: {self._failure}", key=key)
            try:
                if is_late:
                    self._publish()
                return self._reserve(size, key)
            except StoreError as e:
                self._note_failure(e)
                raise

    def settle(self, taken: str, size: int) -> None:
        """The put has ended, and may have stored the blob."""
        self._end(taken, settled=size)

    def give_back(self, taken: str, size: int) -> None:
        """The put has stored nothing."""
        self._end(taken, returned=size)

    def _end(self, taken: str, *, settled: int = 0, returned: int = 0) -> None:
        """A put has ended. Its thread then publishes, or asks for more, if the grant needs that."""
        with self._lock:
            if taken != self._writer:
                return
            self._settled += settled
            self._available += returned
            age_s = self._clock() - self._renewed_at
            if age_s > self._name_s:
                return
            # An engine that stores nothing more would keep for long what is beyond a grant. Not while others are under
            # way: one that is busy would reserve it again.
            spare = self._available - self._grant_bytes
            is_spare = spare > 0 and self._reserved == self._settled + self._available
            if is_spare:
                self._reserved -= spare
                self._available -= spare
            # Not where a grant holds few blobs: it would be used up before more is there.
            is_low = self._asks_ahead and 0 < 4 * settled <= self._grant_bytes > 2 * self._available
            is_old = age_s > self._renew_s / 2
        try:
            if is_spare:
                with self._records:
                    self._publish()
            elif (is_low or is_old) and self._records.acquire(blocking=False):  # else it is being asked already
                try:
                    if is_low:
                        self._reserve_ahead()
                    else:
                        self._publish()
                finally:
                    self._records.release()
        except StoreError as e:
            self._note_failure(e)
            logger.debug("what others may read is more than is reserved: %s", e)  # it errs to the safe side

    def _note_failure(self, error: StoreError) -> None:
        if error.retryable:
            self._failure = str(error)  # the error itself would keep its frames
            self._failures += 1

    def _begin(self) -> None:
        """As a new writer: others may have taken the old one for dead. What is under way was counted as its."""
        self._writer = secrets.token_hex(8)
        self._named_at: float | None = None
        self._reserved = self._settled = self._available = 0
        self._renewed_at = self._clock()

    def _reserve(self, size: int, key: str) -> str:
        """Under ``_records``: take what is there, and what is missing out of a new grant."""
        if self._available < size:
            if self._clock() < self._denied_until:
                raise StoreFullError(f"{size} bytes are refused: {self._refusal}", key=key)
            self._renew_name()
        with self._lock:
            writer, own = self._writer, min(self._available, size)
            self._available -= own  # or others would take it while more is asked for
        if own < size:
            try:
                self._grant(size, own, key)
            except StoreError:
                with self._lock:
                    self._available += own
                raise
        return writer

    def _grant(self, size: int, own: int, key: str) -> None:
        """Under ``_records``: reserve what is missing of ``size``, and the rest of a grant if there is room."""
        for target in sorted({max(size, self._grant_bytes), size}, reverse=True):
            is_granted, used = self._ask(target - own, taken=size - own)
            if is_granted:
                self._asks_ahead = True
                return
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

    def _reserve_ahead(self) -> None:
        """Under ``_records``: fill the grant up, if there is room for that."""
        self._renew_name()
        more = self._grant_bytes - self._available
        if more <= 0:  # given back meanwhile
            return
        self._asks_ahead, _ = self._ask(more)
        if not self._asks_ahead:
            self._publish()

    def _renew_name(self) -> None:
        """Under ``_records``: begin as a new writer where others took this one for dead."""
        if self._named_at is not None and self._store.size(WRITERS_PREFIX + self._writer) is None:
            self._store.delete(USAGE_PREFIX + self._writer)  # if renewed since, nobody else would
            with self._lock:
                self._begin()

    def _ask(self, more: int, *, taken: int = 0) -> tuple[bool, int | None]:
        """Under ``_records``: publish that so much more is reserved, and look whether there is room for it.

        Args:
            taken: by whoever asks, out of ``more``.

        Returns:
            Whether it is granted, and the most that can be stored then (None: nobody knows). If it is not granted, or
            if this raises, what others may read is too much, which errs to the safe side.
        """
        self._wanted = 0
        named_at, reserved = self._publish(more)
        used = used_bytes(self._store, own=(self._writer, reserved), keys=self._keys)
        is_young = self._clock() - named_at < self._newcomer_s
        if used is None or used > self._max_bytes or is_young:
            return False, used
        with self._lock:
            self._reserved += more
            self._available += more - taken
        return True, used

    def _publish(self, more: int = 0) -> tuple[float, int]:
        """Under ``_records``. Returns since when the writer has a name, and what it says that it reserved."""
        renewed_at = self._clock()
        named_at = self._named_at
        if named_at is None:
            put_record(self._store, WRITERS_PREFIX + self._writer, {}, overwrite=False, keys=self._keys)
            named_at = self._named_at = renewed_at
        with self._lock:
            reserved = self._reserved + more
            content = {"reserved": reserved, "settled": self._settled, "wanted": self._wanted}
        put_record(self._store, f"{USAGE_PREFIX}{self._writer}", content, keys=self._keys)
        with self._lock:
            self._renewed_at = renewed_at
        return named_at, reserved
