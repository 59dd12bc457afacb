"""Loads that can be given up.

Storage that hangs keeps a thread for good, and no request waits for one; so what such a thread reads in the end must
not get into blocks that belong to another request by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvtiers.tiers.errors import KVTiersError


class Load:
    """A load under way. Its thread writes into the paged buffers, but never after it was given up.

    Attributes:
        blocks: ids of the blocks that it fills.
        late_at: when it is given up, on ``time.monotonic``.
        future: of the call that does it; set by who submits it.
    """

    future: Future[None]

    def __init__(self, blocks: list[int], late_at: float) -> None:
        self.blocks = blocks
        self.late_at = late_at
        self._given_up = False
        self._writing = threading.Lock()

    def write(self, call: Callable[[], None]) -> None:
        """Let the thread write. Only memory is touched in ``call``: ``give_up`` waits for its end.

        Raises:
            KVTiersError: it was given up.
        """
        with self._writing:
            if self._given_up:
                raise KVTiersError("it was given up")
            call()

    def give_up(self) -> bool:
        """From here on its thread writes nothing. Returns whether it had begun."""
        had_begun = not self.future.cancel()
        with self._writing:
            self._given_up = True
        return had_begun
