"""PrefixUses: notes uses of prefixes on storage, so that old files there are unused and may be removed."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from ...tiers.daemon_pool import DaemonPool
from .store import PrefixStore

NOTED_MAX = 16_384  # prompts; about 2 MB
HANGS_S = 1.0


class PrefixUses:
    """Notes uses of prefixes on a thread of its own. Only one thread may call it.

    A use covers a whole prefix, even if little of it is loaded: the rest is useless without the beginning, and the GPU
    usually has the beginning already. A prompt's use is noted once in the stores' ``use_noted_s``. If noting fails, the
    prompt's next use is noted.

    Args:
        stores: the stores of all ranks.
        clock: seconds, monotonic.
    """

    def __init__(self, stores: Sequence[PrefixStore], clock: Callable[[], float] = time.monotonic) -> None:
        self._stores = [store for store in stores if store.notes_uses]
        self._noted_s = min((store.use_noted_s for store in self._stores), default=0.0)
        self._clock = clock
        self._noted: OrderedDict[bytes, float] = OrderedDict()  # hash of last block -> when, oldest first
        self._failed: deque[bytes] = deque()  # hashes of last blocks; the pool's thread appends
        self._pool = DaemonPool(1, "kvtiers-prefix-uses")

    def note(self, hashes: Sequence[bytes]) -> None:
        """Note a use of the prefix of these blocks. It need not be on storage. Does not wait."""
        now = self._clock()
        while self._failed:
            self._noted.pop(self._failed.popleft(), None)
        if not hashes or not self._stores or now - self._noted.get(hashes[-1], float("-inf")) < self._noted_s:
            return
        if self._pool.hangs(HANGS_S):  # calls must not pile up behind a call that hangs
            return
        self._noted[hashes[-1]] = now
        self._noted.move_to_end(hashes[-1])
        if len(self._noted) > NOTED_MAX:
            self._noted.popitem(last=False)
        self._pool.submit(self._note, tuple(hashes))

    def shutdown(self) -> None:
        """End the thread. Uses still in the queue are not noted."""
        self._pool.shutdown(0.0)

    def _note(self, hashes: Sequence[bytes]) -> None:
        for store in self._stores:
            if not store.note_uses(store.match(hashes)):
                self._failed.append(hashes[-1])
