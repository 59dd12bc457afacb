"""ChainCredentials: credentials from boto3's chain, for threads that cannot wait long.

botocore refreshes credentials in the thread that signs a request, under a lock and without a time limit. A helper that
hangs would block all threads, although the old credentials are still valid for the last ten minutes before expiry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final

from botocore.credentials import Credentials, ReadOnlyCredentials

from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.stores.s3.errors import CredentialsLateError
from kvtiers.tiers.stores.watchdog import begin

# As in botocore: before credentials with less time left are used, the chain is asked for better ones.
GOOD_S_MIN: Final = 600.0
#: In the last 15 minutes before expiry, botocore would ask the chain on every request. That is useless if credentials
#: are issued for less time, or if the chain returns the same ones until 5 minutes before expiry.
ASK_EVERY_S: Final = 30.0


class ChainCredentials(Credentials):  # type: ignore[misc] # botocore has no types
    """Credentials for botocore's clients. Any thread may call; ``_lock`` guards ``_asked`` and ``_asked_at``.

    One thread at a time asks the chain on behalf of all; ``_frozen`` holds the last answer.

    Args:
        chain: botocore's credentials, which may refresh themselves.
        translate: turns an exception of the chain into ours.
        timeout_s: longest wait for the chain.
        clock: returns monotonic seconds.
        check: raises a StoreError for unusable credentials.
    """

    def __init__(
        self,
        chain: Any,
        translate: Callable[[Exception], StoreError],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[ReadOnlyCredentials, str], None] = lambda *_: None,
    ) -> None:
        super().__init__("", "", method=chain.method)
        self._check = check
        self._chain = chain
        self._translate = translate
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._frozen: ReadOnlyCredentials | None = None
        if not self._ends_within(None):
            self._ask()
        self._asked: Future[ReadOnlyCredentials] | None = None
        self._asked_at = 0.0

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Get credentials that are valid now, and for ``GOOD_S_MIN`` more if the chain answers in time.

        Raises:
            StoreError: the chain failed or is late, and its earlier credentials have expired.
        """
        with self._lock:
            is_idle = self._asked is None or self._asked.done()
            frozen = self._frozen  # read after ``is_idle``, or a new answer might be requested again
            if frozen is not None and not self._ends_within(None):
                return frozen
            is_good = frozen is not None and not self._ends_within(0)
            if is_good and is_idle and self._asked is not None and self._clock() - self._asked_at < ASK_EVERY_S:
                assert frozen is not None
                return frozen
            if self._asked is None or is_idle:
                self._asked = begin("kvtiers-s3-credentials", self._ask)
                self._asked_at = self._clock()
            asked = self._asked
            wait_s = self._asked_at + self._timeout_s - self._clock()
        if frozen is not None and not self._ends_within(GOOD_S_MIN):
            return frozen
        if wait([asked], max(0.0, wait_s)).done:
            error = asked.exception()  # not raised itself: its traceback would hold every waiting caller's memory
            if error is None:
                return asked.result()
            if frozen is not None and not self._ends_within(0):
                return frozen
            if isinstance(error, StoreError):
                raise type(error)(str(error))  # a copy for each caller: raising adds to the traceback
            raise self._translate(error)  # type: ignore[arg-type] # the chain raises only Exceptions
        if frozen is None or self._ends_within(0):
            raise CredentialsLateError(
                f"secret: boto3's credential chain did not end within {self._timeout_s:.3g} s (credential_process, "
                "SSO, STS or metadata)"
            )
        return frozen

    def _ask(self) -> ReadOnlyCredentials:
        frozen = self._chain.get_frozen_credentials()
        self._check(frozen, self.method)
        self._frozen = frozen
        return frozen

    def _ends_within(self, seconds: float | None) -> bool:
        """Whether the chain's credentials expire within ``seconds``; None: so soon that it would refresh them."""
        refresh_needed = getattr(self._chain, "refresh_needed", None)  # static credentials lack it
        return refresh_needed is not None and bool(refresh_needed(seconds))
