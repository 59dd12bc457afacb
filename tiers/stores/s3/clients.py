"""The clients of an S3 store, made once per process, in a thread that callers need not wait for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

from ...errors import StoreError, StoreTimeoutError
from ...store import Look
from ..watchdog import begin
from .options import S3Options
from .put_form import PutForm

if TYPE_CHECKING:
    from .control import S3Control
    from .session import S3Session

# Shortest wait for the clients, whatever request_timeout_s: boto3 reads its models, half a second on a busy machine.
CLIENTS_S_MIN: Final = 3.0
# credential_process may hang and has no time limit. After MAKE_S_MAX, an attempt to make clients is abandoned and a new
# one starts. This wait doubles with each attempt that still hangs; at most MAKES_HUNG_MAX may hang.
MAKE_S_MAX: Final = 30.0
MAKES_HUNG_MAX: Final = 8
RENEW_S_MAX: Final = 60.0  # longest pause between useless renewals, because reading the models holds the GIL
RENEW_EVERY_S: Final = 2.0  # shortest time between renewals: the credential chain may start programs or ask servers


class DataPlane(Protocol):
    """Each method makes one attempt at one object. Keys are the objects' whole names. Raises only StoreError."""

    def put(self, key: str, parts: Sequence[memoryview], *, create: bool, form: PutForm) -> bool:
        """Put an object; with ``create``, only if it does not exist yet. False: it exists."""

    def get_into(self, key: str, parts: Sequence[memoryview], size: int, look: Look | None = None) -> None:
        """Fill the parts, ``size`` bytes in total. Writes no byte before the server has announced that size.

        Args:
            look: see ``tiers.store.SupportsPieces``; must not raise.
        """

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """Get the object's size and its last ``length`` bytes (at least 1); None if absent."""

    def size(self, key: str) -> int | None:
        """Get the object's size; None if absent."""

    async def ask_size(self, key: str) -> int | None:
        """``size`` as a coroutine (see ``polling``). Raises OSError if it would have to wait for a connection."""

    def close(self) -> None:
        """Close connections and end threads."""


@dataclass(frozen=True, slots=True)
class Clients:
    """The session with both planes: control (boto3, for rare requests) and data (for objects)."""

    session: S3Session
    control: S3Control
    data: DataPlane


class ProcessClients:
    """The clients of one process. They must not cross a fork, nor must locks that another thread may hold.

    Any thread may call. ``_lock`` guards ``_made`` (the clients, made or being made since ``_begun_at``), ``_hung``
    (abandoned attempts to make clients) and ``_closed``.

    Attributes:
        slots: a free one for each further request that may run. (A semaphore costs each request 10 µs with the GIL.)
        ready: the clients once they are made.
        pid: the process that these clients belong to.
    """

    def __init__(self, options: S3Options, clock: Callable[[], float]) -> None:
        self.slots = SimpleQueue[None]()
        for _ in range(options.max_connections):
            self.slots.put(None)
        self.pid = os.getpid()
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._made: Future[Clients] | None = None
        self.ready: Clients | None = None
        self._begun_at = 0.0
        self._hung: list[Future[Clients]] = []
        self._closed = False

    def get(self, until: float = 0.0) -> Clients:
        """Get the clients. They are made in a thread, because the credential chain may start programs or ask servers.

        Args:
            until: clock time at which to stop waiting, but never before ``CLIENTS_S_MIN`` have passed.

        Raises:
            StoreError: the clients could not be made, or not in time. An error that is not retryable is remembered for
                ``RENEW_EVERY_S``. After ``MAKE_S_MAX``, a new attempt replaces an attempt that hangs.
        """
        if self.ready is not None:
            return self.ready
        now = self._clock()
        with self._lock:
            made = self._made
            if made is None or self._is_due(made, now):
                before, made = made, begin("kvtiers-s3-clients", self._make)
                self._made, self._begun_at = made, now
                if before is not None:
                    self._hung.append(before)
                    before.add_done_callback(_close)  # waiting callers may still use it
                if self._closed:  # another thread did so since this call began
                    made.add_done_callback(_close)
        wait_s = max(CLIENTS_S_MIN, until - now)
        try:
            error = made.exception(wait_s)
        except TimeoutError:
            raise StoreTimeoutError(
                f"secret: boto3's credential chain did not end within {wait_s:.3g} s (credential_process, SSO, STS or "
                "metadata), or this machine is busy"
            ) from None
        if error is None:
            self.ready = made.result()
            return self.ready
        if isinstance(error, StoreError):
            error = type(error)(str(error))  # a copy for each caller: raising adds to the traceback
        raise error

    def close(self) -> None:
        """Close the clients once they are made. Does nothing in a forked child: they belong to the parent."""
        if self.pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            made = self._made
        if made is not None:
            made.add_done_callback(_close)

    def _is_due(self, made: Future[Clients], now: float) -> bool:
        """Whether to make the clients again: the attempt failed or takes too long."""
        age_s = now - self._begun_at
        if made.done():
            error = made.exception()
            return error is not None and (getattr(error, "retryable", False) or age_s >= RENEW_EVERY_S)
        self._hung = [hung for hung in self._hung if not hung.done()]
        return len(self._hung) < MAKES_HUNG_MAX and age_s >= MAKE_S_MAX * 2 ** len(self._hung)

    def _make(self) -> Clients:
        # botocore takes 20 MB and 0.2 s of CPU: too much for an engine whose requests are made by other processes.
        from .boto3_client import Boto3Client
        from .control import S3Control
        from .direct import DirectClient
        from .session import S3Session

        session = S3Session(self._options)
        data = Boto3Client(session) if needs_boto3(session) else DirectClient(session, clock=self._clock)
        return Clients(session, S3Control(session), data)


def needs_boto3(session: S3Session) -> bool:
    """Whether boto3 must move blocks: through a proxy, or for a bucket with its own endpoint and credentials."""
    # AWS reserves the suffix for directory buckets.
    return session.proxy is not None or session.options.bucket.endswith("--x-s3")


def _close(made: Future[Clients]) -> None:
    if made.exception() is None:
        made.result().data.close()
        made.result().session.close()
