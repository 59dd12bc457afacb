"""Account: one writer's share of a root's ``max_bytes``; BoundedStore refuses puts beyond it.

``usage`` documents the protocol between writers.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import StoreError, StoreFullError, StoreUnavailableError
from ..isolation.mover import RunsInWorkers, WorkerFunction
from ..plain_logs import get_logger
from ..store import Store, parts_size
from ..store_layer import Layer
from .clock import since_boot
from .records import RecordKeys, put_record
from .usage import USAGE_PREFIX, WRITERS_PREFIX, used_bytes

T = TypeVar("T")

logger = get_logger(__name__)

GRANT_SHARE = 256
GRANT_BYTES_MAX = 256 << 20
DENIED_S = 0.02  # pause after a refusal, so that a full root is not asked for every block; times 100 on a network


class Account:
    """Reserves space for one writer's puts. Any thread may call.

    Locks:

    - ``_lock`` owns all fields except those of ``_records``. It is never held during a storage call.
    - ``_records`` is held while this writer's records are read or written, and owns ``_named_at``, ``_wanted``,
      ``_denied_until`` and ``_refusal``. If both locks are needed, ``_records`` is taken first.

    The published ``reserved`` is never less than ``_reserved``. A put waits for ``_records`` only if the grant is used
    up or the record is old. To avoid that, a thread whose put ended asks for more early, while other threads go on.

    Args:
        store: the shared store.
        max_bytes: limit of the root.
        writer_s: see ``CapacityPolicy``.
        newcomer_s: how long other hosts may not see a new writer, because NFS caches names. A new writer gets no grant
            before this time has passed.
        clock: monotonic seconds, including the machine's sleep, because the other writers' time goes on meanwhile.
        keys: keys to authenticate records with.
    """

    def __init__(
        self,
        store: Store,
        max_bytes: int,
        *,
        writer_s: float = 900.0,
        newcomer_s: float = 0.0,
        clock: Callable[[], float] = since_boot,
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
        self._failures = 0  # count; callers that waited for ``_records`` during a failure fail with the same error
        self._failure = ""
        self._asks_ahead = True  # False after such a request was refused
        self._begin()

    def take(self, size: int, key: str) -> str:
        """Reserve space for a blob. Pass the result to ``settle`` or ``give_back``.

        Raises:
            StoreFullError: there is not enough space, or the root has not been measured yet.
            StoreError: the records cannot be read or written. Callers queued on the lock when the storage call fails
                get the same error.
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
            if failures != self._failures:  # else callers waiting for a hung storage would time out one by one
                raise StoreUnavailableError(f"the account cannot be asked: {self._failure}", key=key)
            try:
                if is_late:
                    self._publish()
                return self._reserve(size, key)
            except StoreError as e:
                self._note_failure(e)
                raise

    def settle(self, taken: str, size: int) -> None:
        """Report that a put ended and stored, or may have stored, the blob."""
        self._end(taken, settled=size)

    def give_back(self, taken: str, size: int) -> None:
        """Report that a put ended and stored nothing."""
        self._end(taken, returned=size)

    def _end(self, taken: str, *, settled: int = 0, returned: int = 0) -> None:
        """Book an ended put. Then publish the record or ask for a larger grant, if needed."""
        with self._lock:
            if taken != self._writer:
                return
            self._settled += settled
            self._available += returned
            age_s = self._clock() - self._renewed_at
            if age_s > self._name_s:
                return
            # Release more than one grant of unused space: an engine that stores nothing more would hold it for long.
            # Not while other puts are running, because a busy engine would reserve the space again.
            spare = self._available - self._grant_bytes
            is_spare = spare > 0 and self._reserved == self._settled + self._available
            if is_spare:
                self._reserved -= spare
                self._available -= spare
            # Do not ask ahead if a grant holds only a few blobs: it would be used up before the answer arrives.
            is_low = self._asks_ahead and 0 < 4 * settled <= self._grant_bytes > 2 * self._available
            is_old = age_s > self._renew_s / 2
        try:
            if is_spare:
                with self._records:
                    self._publish()
            elif (is_low or is_old) and self._records.acquire(blocking=False):  # else another thread is asking
                try:
                    if is_low:
                        self._reserve_ahead()
                    else:
                        self._publish()
                finally:
                    self._records.release()
        except StoreError as e:
            self._note_failure(e)
            # Others may read a larger value than is reserved, which is safe.
            logger.debug("the published reservation may be too high: %s", e)

    def _note_failure(self, error: StoreError) -> None:
        if error.retryable:
            self._failure = str(error)  # not the error itself, which would keep its frames alive
            self._failures += 1

    def _begin(self) -> None:
        """Start under a new writer's name, because others may consider the old one dead. Running puts count as its."""
        self._writer = secrets.token_hex(8)
        self._named_at: float | None = None
        self._reserved = self._settled = self._available = 0
        self._renewed_at = self._clock()

    def _reserve(self, size: int, key: str) -> str:
        """Under ``_records``: take the available bytes, and the rest out of a new grant."""
        if self._available < size:
            if self._clock() < self._denied_until:
                raise StoreFullError(f"{size} bytes are refused: {self._refusal}", key=key)
            self._renew_name()
        with self._lock:
            writer, own = self._writer, min(self._available, size)
            self._available -= own  # now, so that other threads do not take it while more is requested
        if own < size:
            try:
                self._grant(size, own, key)
            except StoreError:
                with self._lock:
                    self._available += own
                raise
        return writer

    def _grant(self, size: int, own: int, key: str) -> None:
        """Under ``_records``: reserve ``size`` less ``own``, and a whole grant if there is space."""
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
            self._refusal = f"max_bytes = {self._max_bytes} is set, and the storage is not measured yet"
        elif used <= self._max_bytes:
            self._refusal = f"for {self._newcomer_s:g} s the other hosts may not see this new writer yet"
        else:
            self._refusal = f"all writers together would store more than max_bytes = {self._max_bytes}"
        raise StoreFullError(f"{size} bytes are refused: {self._refusal}", key=key)

    def _reserve_ahead(self) -> None:
        """Under ``_records``: fill the grant up, if there is space."""
        self._renew_name()
        more = self._grant_bytes - self._available
        if more <= 0:  # space was given back meanwhile
            return
        self._asks_ahead, _ = self._ask(more)
        if not self._asks_ahead:
            self._publish()

    def _renew_name(self) -> None:
        """Under ``_records``: start as a new writer if a collector removed this one's name as dead."""
        if self._named_at is not None and self._store.size(WRITERS_PREFIX + self._writer) is None:
            self._store.delete(USAGE_PREFIX + self._writer)  # if it was renewed since, nobody else deletes it
            with self._lock:
                self._begin()

    def _ask(self, more: int, *, taken: int = 0) -> tuple[bool, int | None]:
        """Under ``_records``: publish a reservation of ``more`` bytes, then check whether there is space for it.

        Args:
            taken: bytes out of ``more`` that the caller uses at once.

        Returns:
            Whether it is granted, and an upper bound of the bytes stored then (None: not measured). If it is not
            granted, or if this raises, the published reservation is too high, which is safe.
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
        """Under ``_records``: write the record. Returns the time of its name and the published ``reserved``."""
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


class BoundedStore(Layer):
    """Reserves space in an account before each put. Any thread may call; nothing changes after the constructor.

    A put that replaces a blob counts as new bytes until the next measurement, so the account overestimates and never
    underestimates. A batch of the inner store's workers (``tiers.isolation.mover``) reserves space for all its blobs
    at once, and gives back what it did not need.

    Args:
        inner: the store; closed with the layer.
        account: the account of the same root, over the same store.
    """

    def __init__(self, inner: Store, account: Account) -> None:
        super().__init__(inner)
        self._account = account
        if isinstance(inner, RunsInWorkers):
            # Set on the instance, because isinstance on the RunsInWorkers protocol looks for the attributes.
            self.maps_region, self.deadline_s, self.run = inner.maps_region, inner.deadline_s, self._run
            self.abandon = inner.abandon

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        return self._put_within(key, parts, lambda: self.inner.put(key, parts, overwrite=overwrite))

    def _put_aged(self, key: str, parts: Sequence[memoryview], *, used_at: float) -> bool:
        inner: Any = self.inner
        return self._put_within(key, parts, lambda: inner.put_aged(key, parts, used_at=used_at))

    def _put_within(self, key: str, parts: Sequence[memoryview], put: Callable[[], bool]) -> bool:
        size = parts_size(parts)

        def put_bytes(published: bool) -> int:
            return 0 if published is False else size  # only an explicit False: a store may return None

        return self._within(size, key, put, put_bytes)

    def _run(self, function: WorkerFunction, argument: object, raw: bytes = b"", *, puts_bytes: int = 0) -> Any:
        inner: Any = self.inner
        if not puts_bytes:
            return inner.run(function, argument, raw)
        return self._within(
            puts_bytes, "", lambda: inner.run(function, argument, raw), lambda answer: answer["put_bytes"]
        )

    def _within(self, size: int, key: str, put: Callable[[], T], put_bytes: Callable[[T], int]) -> T:
        taken = self._account.take(size, key)
        try:
            result = put()
        except BaseException as e:
            # After a retryable error the blob may be stored: perhaps only the acknowledgement was lost.
            if isinstance(e, StoreError) and not e.retryable:
                self._account.give_back(taken, size)
            else:
                self._account.settle(taken, size)
            raise
        used = put_bytes(result)
        self._account.settle(taken, used)
        self._account.give_back(taken, size - used)
        return result
