"""Room: makes free space on the storage, and pauses if removed blocks do not become free space."""

from __future__ import annotations

from collections.abc import Callable

from ..plain_logs import get_logger
from ..store import Store, SupportsSpace
from .policy import FREE_MARGIN_SHARE, CapacityPolicy

logger = get_logger(__name__)

REFUSED_SHARE = 0.05  # share of the stored bytes to remove if storage with free space refuses blocks
GAINED_SHARE = 1 / 16  # share of the removed bytes; if less space was gained, removing does not help
#: Pauses after removals that gained nothing, doubled each time. ZFS shows freed space after 5 s, btrfs after 30 s.
PAUSE_S, PAUSE_S_MAX = 60.0, 3600.0


class Room:
    """Computes how many bytes to remove so that the storage accepts blocks. For the collector's thread.

    Blocks are removed in rounds. If a round gains neither free space nor puts (a snapshot keeps the blocks, or a quota
    does not count them), a pause follows.

    Args:
        store: the root.
        policy: the limits.
        monotonic: seconds.
    """

    def __init__(self, store: Store, policy: CapacityPolicy, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._policy = policy
        self._monotonic = monotonic
        self._was_refused = False
        self._is_hopeless: bool | None = None  # None: not known yet
        self._target = self._removed = 0  # bytes of the current round; target 0: no round
        self._free_before = self._put_before = 0
        self._is_for_refusal = False  # then free space says nothing
        self._pause_s = 0.0
        self._until: float | None = None  # end of the pause
        self.largest_bytes = policy.block_bytes

    def note_refused(self) -> None:
        """Record that the storage refused a block because it is full."""
        self._was_refused = True

    def note_removed(self, size: int) -> None:
        """Count removed bytes, whatever the reason of the removal."""
        self._removed += size if self._target else 0

    def missing_bytes(self, *, put: int, used: int) -> int:
        """Return the number of bytes to remove now.

        Args:
            put: bytes put so far, by a counter that only grows.
            used: bytes stored.

        Raises:
            StoreError: the free space cannot be read.
        """
        if not (self._policy.min_free_bytes or self._was_refused or self._target) or self._gives_up():
            return 0
        space = self._space()
        free = None if space is None else space[0]
        if self._target and self._removed >= self._target and not self._ends_round(put, free or 0):
            return 0
        missing = 0
        if self._policy.min_free_bytes and free is not None:
            reserve = self._policy.min_free_bytes
            missing = int(reserve + self.largest_bytes + min(FREE_MARGIN_SHARE * reserve, used / 10)) - free
        is_for_refusal = missing <= 0 and self._was_refused
        if is_for_refusal:
            missing = self._target - self._removed if self._target else int(REFUSED_SHARE * used) + self.largest_bytes
        if missing <= 0:
            self._target = self._removed = 0
            return 0
        if not self._target:
            self._target, self._free_before, self._put_before = missing, free or 0, put
            self._is_for_refusal = is_for_refusal
        return min(missing, self._target - self._removed)

    def _ends_round(self, put: int, free: int) -> bool:
        """Check whether a finished round gained space or puts. False: pause."""
        gained = put - self._put_before + (0 if self._is_for_refusal else max(0, free - self._free_before))
        now = self._monotonic()
        if gained >= GAINED_SHARE * self._removed:
            self._pause_s, self._was_refused = 0.0, False
        elif self._until is None:
            self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, 2 * self._pause_s))
            self._until = now + self._pause_s
            if self._pause_s == 2 * PAUSE_S:
                logger.warning(
                    "removing %d bytes of blocks freed no space (a snapshot may keep them), so no block is removed for "
                    "space in the next %.0f s", self._removed, self._pause_s,
                )  # fmt: skip
            return False
        elif now < self._until:
            return False
        self._target = self._removed = 0
        self._until = None
        return True

    def _gives_up(self) -> bool:
        """Whether even an empty root would not make room, because the reserve is as large as the file system."""
        if self._is_hopeless is None:
            space = self._space()
            self._is_hopeless = space is not None and space[1] <= self._policy.min_free_bytes
            if self._is_hopeless:
                logger.warning(
                    "min_free = %d is not less than the size of the file system, %d bytes: nothing is stored, and no "
                    "block is removed to make room; lower min_free", self._policy.min_free_bytes, space and space[1],
                )  # fmt: skip
        return self._is_hopeless

    def _space(self) -> tuple[int, int] | None:
        return self._store.space() if isinstance(self._store, SupportsSpace) else None
