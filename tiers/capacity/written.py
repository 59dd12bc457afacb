"""Counts the bytes that writers put into a root: each writer publishes a small record, and the collector reads them.

``_kvtiers/writers/<name>`` holds ``{"put": bytes}``, the bytes that this writer has put since it began. While it puts,
the writer replaces its record every few seconds, and then also reads the collector's record (``usage``). Nothing waits
for these records. If a writer dies between a put and its record, the next listing finds the bytes.

The collector removes a record that stays unchanged for ``writer_s``. So a writer that was silent for nearly as long
continues under a new name. No clocks are compared.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from ..daemon_pool import DaemonPool
from ..errors import StoreFullError
from ..plain_logs import get_logger
from ..store import KeyInfo, Store
from .records import OWN_PREFIX, UNREADABLE, get_record, put_record
from .usage import Usage, is_count, read_usage

logger = get_logger(__name__)

WRITERS_PREFIX = f"{OWN_PREFIX}writers/"
WRITER_NAME = re.compile(r"[0-9a-f]{16}")
SILENT_SHARE = 0.5  # share of writer_s after which a silent writer takes a new name
SURE_S = 2.0  # a record is read again until unchanged for so long, because its time may be in whole seconds
READERS_MAX = 32  # limit of concurrent reads of records across a network


def since_boot() -> float:
    """Seconds since this machine started, including its sleep. This clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Writer:
    """Counts and publishes the bytes that this process puts, and tells whether the root is full.

    Any thread may call; ``_lock`` owns the fields. Only ``poll`` calls the storage, without the lock.

    Args:
        store: the root, without a limit.
        poll_s, writer_s: see ``CapacityPolicy``.
        clock: monotonic seconds, including the machine's sleep.

    Attributes:
        name: name of this writer's record.
        usage: the collector's last record; None: no record was read.
    """

    def __init__(
        self,
        store: Store,
        *,
        poll_s: float,
        writer_s: float = 900.0,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._silent_s_max = SILENT_SHARE * writer_s
        self._clock = clock
        self._lock = threading.Lock()
        self._polled_at = float("-inf")
        self._put_bytes = self._published_bytes = 0
        self._published_at = clock()
        self.name = secrets.token_hex(8)
        self.usage: Usage | None = None

    @property
    def put_bytes(self) -> int:
        """Bytes put under ``name``."""
        return self._put_bytes

    def note_put(self, size: int) -> None:
        """Count bytes that were put or may have been put."""
        with self._lock:
            self._put_bytes += size

    def full(self) -> str:
        """Return why the root is full, or "". Polls first if the last poll is ``poll_s`` old.

        Raises:
            StoreError: the records cannot be read or written.
        """
        with self._lock:
            is_due = self._clock() - self._polled_at >= self._poll_s
        if is_due:
            self.poll()
        return "" if self.usage is None else self.usage.full

    def poll(self, *, publishes: bool = True) -> None:
        """Publish the count if it has changed, and read ``usage``.

        Args:
            publishes: False: only read ``usage``.

        Raises:
            StoreError: the records cannot be read or written.
        """
        with self._lock:
            now = self._polled_at = self._clock()
            before = ""
            if self._published_bytes and now - self._published_at > self._silent_s_max:
                before, self.name = self.name, secrets.token_hex(8)
                self._put_bytes -= self._published_bytes
                self._published_bytes = 0
            name, put_bytes = self.name, self._put_bytes
            is_changed = publishes and put_bytes != self._published_bytes
        if before:
            self._store.delete(WRITERS_PREFIX + before)
        if is_changed:
            try:
                put_record(self._store, WRITERS_PREFIX + name, {"put": put_bytes})
            except StoreFullError as e:
                logger.debug("the writer's record was not written: %s", e)  # the next listing finds its blocks
            else:
                with self._lock:
                    if name == self.name:
                        self._published_bytes, self._published_at = put_bytes, now
        self.usage = read_usage(self._store)


class WrittenBytes:
    """Reads the writers' records and adds up the put bytes. For the collector's thread.

    Args:
        store: the root.
        writer_s: see ``CapacityPolicy``.
        clock: monotonic seconds.

    Attributes:
        seen: writer -> number of its bytes in the sums that ``read`` has returned.
    """

    def __init__(
        self,
        store: Store,
        *,
        writer_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._writer_s = writer_s
        self._clock = clock
        self._found: dict[str, tuple[KeyInfo, float, float]] = {}  # name -> entry, since when, last count
        self.seen: dict[str, int] = {}

    def begin(self, seen: Mapping[str, int]) -> None:
        """Continue with another collector's ``seen``."""
        self.seen = dict(seen)
        self._found.clear()

    def read(self, *, without: str = "") -> int:
        """Read the changed records; return the number of bytes put since the last call.

        Args:
            without: name of the writer whose bytes the caller counts itself.

        Raises:
            StoreError: the records cannot be listed.
        """
        now = self._clock()
        changed = []
        found = {}
        for info in self._store.keys(WRITERS_PREFIX):
            name = info.key.removeprefix(WRITERS_PREFIX)
            if name == without or not WRITER_NAME.fullmatch(name):
                continue
            before, since, read_at = self._found.get(name, (None, now, now))
            if info != before:
                since = read_at = now
            if now - since > self._writer_s:
                self._store.delete(info.key)
                continue
            if read_at - since < SURE_S:
                changed.append(name)
                read_at = now
            found[name] = info, since, read_at
        self._found = found
        self.seen = {name: count for name, count in self.seen.items() if name in found or name == without}
        put_bytes = 0
        for name, count in zip(changed, self._counts(changed), strict=True):
            if count is not None:
                put_bytes += max(0, count - self.seen.get(name, 0))
                self.seen[name] = max(count, self.seen.get(name, 0))
        return put_bytes

    def _counts(self, names: list[str]) -> list[int | None]:
        readers = min(READERS_MAX, len(names)) if self._store.capabilities.latency_bound else 1
        if readers <= 1:
            return [self._count(name) for name in names]
        pool = DaemonPool(readers, "kvtiers-written")
        try:
            return [each.result() for each in [pool.submit(self._count, name) for name in names]]
        finally:
            pool.shutdown(0)

    def _count(self, name: str) -> int | None:
        """Return a writer's count; None: its record is absent, bad or unreadable. The next listing finds its blobs."""
        try:
            record = get_record(self._store, WRITERS_PREFIX + name)
        except UNREADABLE as e:
            logger.warning("the record of the writer %s cannot be read: %s", name, e)
            return None
        if record is None:
            return None
        count = record.get("put")
        if is_count(count):
            assert isinstance(count, int)
            return count
        logger.warning("the record of the writer %s is damaged or was not written by a writer of this root", name)
        return None


def used_bytes(store: Store) -> int | None:
    """Return the stored bytes according to the records; None: no collector has listed the root yet.

    Raises:
        StoreError: the records cannot be read.
    """
    usage = read_usage(store)
    if usage is None or not usage.listed:
        return None
    written = WrittenBytes(store)
    written.begin(usage.put)
    return usage.bytes + written.read()
