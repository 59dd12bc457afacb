"""Load: a load that can be given up.

Hung storage may block a thread forever, but a request must not wait for the thread. When the thread finally reads its
bytes, their target blocks may belong to another request, so they must not be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvtiers.tiers.errors import KVTiersError


class Load:
    """A load under way. Its thread writes into the paged buffers, but never after the load was given up.

    Attributes:
        blocks: ids of the blocks that the load fills.
        late_at: when to give up the load, on ``time.monotonic``.
        future: future of the loading call; set by the code that submits the call.
    """

    future: Future[None]

    def __init__(self, blocks: list[int], late_at: float) -> None:
        self.blocks = blocks
        self.late_at = late_at
        self._given_up = False
        self._writing = threading.Lock()

    def write(self, call: Callable[[], None]) -> None:
        """Run ``call``, which writes the blocks. It must only touch memory: ``give_up`` waits until it has ended.

        Raises:
            KVTiersError: the load was given up.
        """
        with self._writing:
            if self._given_up:
                raise KVTiersError("the load was given up")
            call()

    def give_up(self) -> bool:
        """Give up the load: its thread writes nothing after this call. Returns whether the load had begun."""
        had_begun = not self.future.cancel()
        with self._writing:
            self._given_up = True
        return had_begun
