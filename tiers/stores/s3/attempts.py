"""Attempts: retries failed S3 requests, and renews the clients when the server refuses the credentials."""

from __future__ import annotations

import copy
import os
from collections.abc import Awaitable, Callable
from queue import Empty
from typing import Final, TypeVar

from ...errors import StoreClosedError, StoreError, StoreTimeoutError
from .clients import RENEW_EVERY_S, RENEW_S_MAX, Clients, ProcessClients
from .errors import CredentialsLateError, CredentialsRefusedError
from .options import S3Options

T = TypeVar("T")

BACKOFF_S_FIRST: Final = 0.05
BACKOFF_S_MAX: Final = 2.0


class Attempts:
    """Runs requests to one bucket with retries. Any thread may call.

    The first call makes the clients. ``_process`` is replaced after a fork and when credentials are refused. The latter
    last happened at ``_renewed_at`` and is not repeated within ``_renew_s``.

    Args:
        options: bucket, endpoint and request settings.
        clock: returns monotonic seconds.
        sleep: pauses between attempts.
        rng: returns numbers in 0..1 for the jitter.
    """

    def __init__(
        self,
        options: S3Options,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        rng: Callable[[], float],
    ) -> None:
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self._rng = rng
        self._closed = False
        self._renewed_at = float("-inf")
        self._renew_s = RENEW_EVERY_S
        self._process = ProcessClients(options, clock)

    def latest_start(self) -> float:
        """The latest time at which an operation that begins now may start an attempt."""
        return self._clock() + self._options.request_timeout_s / 2

    def run(
        self,
        key: str,
        action: Callable[[Clients], T],
        latest_start: float | None = None,
        failed: StoreError | None = None,
    ) -> T:
        """Attempt ``action`` until it succeeds, fails with a lasting error or runs out of time.

        Args:
            latest_start: inherited from the operation that this request belongs to; None: this is a new operation.
            failed: the error of the first attempt, made by ``try_now``.
        """
        if latest_start is None:
            latest_start = self.latest_start()
        elif failed is None and self._clock() > latest_start:
            raise StoreTimeoutError("no time is left for another request", key=key)
        attempt = 0
        while True:
            self.raise_if_closed(key)
            process = self.current()
            try:
                if failed is not None:
                    raise failed
                return self._attempt(action, process, latest_start)
            except StoreError as e:
                # A copy, which names the caller's key instead of the object. It is raised outside this handler to drop
                # the client's exception, which quotes the server and whose frames hold the caller's memory.
                error = type(e)(str(e), key=key)
                failed = e.__traceback__ = None  # breaks a reference cycle if a frame below keeps the exception
            if isinstance(error, (CredentialsRefusedError, CredentialsLateError)):
                self._renew(process)
            pause_s = self._rng() * min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2**attempt)
            out_of_time = isinstance(error, StoreTimeoutError) or self._clock() + pause_s > latest_start
            if not error.retryable or attempt == self._options.retries or out_of_time:
                raise copy.copy(error)  # ``error`` is in this frame; a traceback would refer back to it in a cycle
            attempt += 1
            self._sleep(pause_s)

    async def try_now(self, action: Callable[[Clients], Awaitable[T]]) -> T:
        """Attempt ``action`` once, as a coroutine (see ``polling``), without waiting for clients or other requests.

        Raises:
            OSError: it would have to wait; or from ``action``.
            StoreError: from ``action``.
        """
        process = self.current()
        if process.ready is None:
            raise BlockingIOError
        try:
            process.slots.get_nowait()
        except Empty:
            raise BlockingIOError from None
        try:
            return await action(process.ready)
        finally:
            process.slots.put(None)

    def current(self) -> ProcessClients:
        """The clients of this process."""
        process = self._process
        if process.pid != os.getpid():
            process = self._process = ProcessClients(self._options, self._clock)
        return process

    def replace(self, process: ProcessClients) -> None:
        """Make the next call create new clients, unless ``process`` was already replaced."""
        if self._process is process:
            self._process = ProcessClients(self._options, self._clock)
            if self._closed:  # another thread just replaced them, and may have closed only the old clients
                self._process.close()
        process.close()

    def raise_if_closed(self, key: str = "") -> None:
        """Raise StoreClosedError if the store is closed: nobody would close clients made now."""
        if self._closed:
            raise StoreClosedError(f"the store of bucket {self._options.bucket} is closed", key=key)

    def close(self) -> None:
        """Close the clients. Later calls raise StoreClosedError."""
        self._closed = True
        self._process.close()

    def _attempt(self, action: Callable[[Clients], T], process: ProcessClients, latest_start: float) -> T:
        try:
            process.slots.get(timeout=max(0.0, latest_start - self._clock()))
        except Empty:
            text = f"none of the {self._options.max_connections} connections became free in time"
            raise StoreTimeoutError(text) from None
        try:
            return action(process.get(latest_start))
        finally:
            process.slots.put(None)

    def _renew(self, process: ProcessClients) -> None:
        """Replace the clients, so that they read the credential chain again: its secrets may have been renewed."""
        now = self._clock()
        since_s = now - self._renewed_at
        if process is self._process and since_s >= self._renew_s:
            # Soon refused again: the chain has no better credentials, or the object key is the cause.
            helped = since_s >= 2 * RENEW_S_MAX
            self._renew_s = RENEW_EVERY_S if helped else min(2 * self._renew_s, RENEW_S_MAX)
            self._renewed_at = now
            self.replace(process)
