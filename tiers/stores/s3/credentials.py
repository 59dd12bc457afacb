"""ChainCredentials: what boto3's credential chain says, for threads that have little time.

botocore refreshes in the thread of whoever signs a request, under a lock and without a time limit. A helper that hangs
would hang all threads, and that in the ten minutes before the expiry, when the old credentials are still good.
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

# As in botocore: credentials that are good for less are not used before the chain was asked for better ones.
GOOD_S_MIN: Final = 600.0
#: With less than 15 minutes left, botocore would ask the chain for each request. That is in vain where credentials are
#: issued for less than that, or the same ones until 5 minutes before their end.
ASK_EVERY_S: Final = 30.0


class ChainCredentials(Credentials):  # type: ignore[misc] # botocore has no types
    """Credentials as botocore's clients want them. Any thread may call; ``_lock`` owns ``_asked`` and ``_asked_at``.

    One thread at a time asks the chain, on behalf of all; ``_frozen`` is the last answer.

    Args:
        chain: botocore's, which may refresh itself.
        translate: our exception for one of the chain's.
        timeout_s: how long an answer is waited for.
        clock: monotonic seconds.
        check: raises a StoreError for credentials that cannot be used.
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
        """Credentials that are good now, and for ``GOOD_S_MIN`` unless the chain does not answer in time.

        Raises:
            StoreError: the chain failed or is late, and what it said before has expired.
        """
        with self._lock:
            is_idle = self._asked is None or self._asked.done()
            frozen = self._frozen  # read after that, so that an answer which has just come is not asked for again
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
            error = asked.exception()  # not raised: its traceback would hold the memory of all who wait
            if error is None:
                return asked.result()
            if frozen is not None and not self._ends_within(0):
                return frozen
            if isinstance(error, StoreError):
                raise type(error)(str(error))  # one for each caller: raising adds to a traceback
            raise self._translate(error)  # type: ignore[arg-type] # what is no Exception does not come from the chain
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
        """Whether the chain's expire within so many seconds; None: so soon that it would ask for new ones."""
        refresh_needed = getattr(self._chain, "refresh_needed", None)  # static ones have none
        return refresh_needed is not None and bool(refresh_needed(seconds))
