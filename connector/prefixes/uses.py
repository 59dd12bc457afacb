"""Which prefixes are used, noted on storage: so what is old there may be removed."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from kvtiers.connector.prefixes.store import PrefixStore
from kvtiers.tiers.daemon_pool import DaemonPool

NOTED_MAX = 16_384  # prompts; some 2 MB
HANGS_S = 1.0


class PrefixUses:
    """Notes uses of prefixes on a thread of its own. For one caller's thread.

    What is used is a whole prefix, though little of it may be loaded: without its beginning the rest is of no use, and
    the beginning is what the GPU mostly has. Each prompt's is noted once in the stores' ``use_noted_s``. A use that
    could not be noted is noted with the prompt's next use.

    Args:
        stores: of all ranks.
        clock: seconds, monotonic.
    """

    def __init__(self, stores: Sequence[PrefixStore], clock: Callable[[], float] = time.monotonic) -> None:
        self._stores = [store for store in stores if store.notes_uses]
        self._noted_s = min((store.use_noted_s for store in self._stores), default=0.0)
        self._clock = clock
        self._noted: OrderedDict[bytes, float] = OrderedDict()  # last block -> when, those of last at the end
        self._failed: deque[bytes] = deque()  # last blocks, from the pool's thread
        self._pool = DaemonPool(1, "kvtiers-prefix-uses")

    def note(self, hashes: Sequence[bytes]) -> None:
        """A prefix of these blocks is used; it need not be on storage. Does not wait."""
        now = self._clock()
        while self._failed:
            self._noted.pop(self._failed.popleft(), None)
        if not hashes or not self._stores or now - self._noted.get(hashes[-1], float("-inf")) < self._noted_s:
            return
        if self._pool.hangs(HANGS_S):  # nothing is to pile up behind it
            return
        self._noted[hashes[-1]] = now
        self._noted.move_to_end(hashes[-1])
        if len(self._noted) > NOTED_MAX:
            self._noted.popitem(last=False)
        self._pool.submit(self._note, tuple(hashes))

    def shutdown(self) -> None:
        """What has not begun is not noted any more."""
        self._pool.shutdown(0.0)

    def _note(self, hashes: Sequence[bytes]) -> None:
        for store in self._stores:
            if not store.note_uses(store.match(hashes)):
                self._failed.append(hashes[-1])
