"""Room: what the storage itself still takes, whatever ``max_bytes`` says."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.errors import StoreError, StoreFullError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store, SupportsFreeBytes

logger = get_logger(__name__)

# The collector begins when less than 1.05 x min_free and one block is free, because a put that would leave less than
# min_free is refused already.
FREE_HIGH, FREE_LOW = 1.05, 1.25
TRIAL = f"{OWN_PREFIX}trial"
TRIAL_BYTES_MAX = 4 << 20  # of a trial that is made each minute
TRIAL_EVERY_S = 60.0
LATE_S_MAX = 60.0  # ZFS shows freed space after 5 s, btrfs after 30 s
LATE_SHARE = 1 / 16  # of what was removed; where less than that is free at once, the rest comes late
# Where it never comes (a snapshot keeps it), nothing more is removed for so long; twice as long each time, up to this.
FUTILE_S, FUTILE_S_MAX = 600.0, 3600.0


class Room:
    """For one thread: the collector's.

    Args:
        store: the root, without a reserve of free space.
        policy: the limits.
        monotonic: seconds.

    Attributes:
        largest_bytes: of the blocks that the collector knows of.
    """

    def __init__(self, store: Store, policy: CapacityPolicy, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._min_free_bytes = policy.min_free_bytes
        self._monotonic = monotonic
        self._tried_at = float("-inf")
        self._is_full = False
        self._tries_whole = False
        self._free_before_bytes = 0  # what was free before removals, the bytes of these, the most that then became free
        self._removed_bytes = 0
        self._risen_bytes = 0
        self._removed_at = float("-inf")
        self._comes_late = False
        self._ended: tuple[int, int] | None = None  # what was removed before, and the most that then became free
        self._left_bytes = 0  # that were stored, and not removed since
        self._was_futile = False
        self._rest_s = 0.0
        self._rests_until = float("-inf")
        self.largest_bytes = policy.block_bytes

    def begin(self) -> None:
        """A run begins.

        Raises:
            StoreError: the storage does not say what is free.
        """
        free = self._free_bytes()
        if free is not None and self._late_bytes(free) == 0:
            self._ended = self._removed_bytes, max(self._risen_bytes, free - self._free_before_bytes)
            self._free_before_bytes, self._removed_bytes, self._risen_bytes = free, 0, 0
            self._comes_late = False

    def note_stored(self, size: int) -> None:
        """So much is stored, after what was too old went: has the last removal made room?

        Raises:
            StoreError: the storage does not say what is free.
        """
        removed, risen = self._ended or (0, 0)
        self._ended = None
        taken = max(0, size - self._left_bytes)  # by writers, of what had become free
        self._left_bytes = size
        if not removed:
            return
        # Others who fill the disk are no reason to rest: then more is missing than was removed, or not so twice.
        is_futile = risen + taken < LATE_SHARE * removed and 0 < self.missing_bytes(FREE_HIGH) <= removed
        if is_futile and self._was_futile:
            self._rest_s = min(FUTILE_S_MAX, max(FUTILE_S, 2 * self._rest_s))
            self._rests_until = self._monotonic() + self._rest_s
            logger.warning(
                "%d bytes of blocks were removed and their space is not free (does a snapshot keep it?): "
                "none is removed to make room for %.0f s", removed, self._rest_s,
            )  # fmt: skip
        elif not is_futile:
            self._rest_s = 0.0
        self._was_futile = is_futile

    def _rests(self) -> bool:
        return self._monotonic() < self._rests_until

    def missing_bytes(self, share: float) -> int:
        """How much less is free, or soon will be, than this share of the reserve and one block; 0 or less: enough.

        Raises:
            StoreError: the storage does not say.
        """
        free = self._free_bytes()
        if free is None or self._rests():
            return 0
        return int(self._min_free_bytes * share) + self.largest_bytes - free - self._late_bytes(free)

    def note_removing(self) -> None:
        """Blocks are about to be removed: what others took while the run listed has nothing to do with them.

        Raises:
            StoreError: the storage does not say what is free.
        """
        if not self._removed_bytes:
            self._free_before_bytes = self._free_bytes() or 0

    def note_removed(self, size: int) -> None:
        """Blocks of so many bytes were removed.

        Raises:
            StoreError: the storage does not say what is free.
        """
        self._is_full = False
        self._left_bytes -= size
        free = self._free_bytes()
        if free is not None:
            self._removed_bytes += size
            self._removed_at = self._monotonic()
            self._risen_bytes = max(self._risen_bytes, free - self._free_before_bytes)
            # Writers who take what becomes free at once look nearly the same; they then wait for LATE_S_MAX.
            self._comes_late = self._risen_bytes < LATE_SHARE * self._removed_bytes

    def _late_bytes(self, free: int) -> int:
        """Bytes that were removed and are not free yet."""
        if not self._comes_late or self._monotonic() - self._removed_at > LATE_S_MAX:
            return 0
        self._risen_bytes = max(self._risen_bytes, free - self._free_before_bytes)
        return max(0, self._removed_bytes - self._risen_bytes)

    def _free_bytes(self) -> int | None:
        """None: nothing is reserved, or the storage knows no such figure."""
        if not self._min_free_bytes or not isinstance(self._store, SupportsFreeBytes):
            return None
        return self._store.free_bytes()

    def is_full(self, *, after_s: float = TRIAL_EVERY_S) -> bool:
        """Whether the storage refused a block; tried again where the last answer is older than ``after_s``.

        A block of more than ``TRIAL_BYTES_MAX`` is tried whole at 0 s, and always once the storage was full.

        Inodes and a user's quota are no free bytes that could be asked for, and are found by trying only. Not in a
        bucket, though, which may keep every version of what is put there.
        """
        if not isinstance(self._store, SupportsFreeBytes) or self._rests():
            return False
        if self._monotonic() - self._tried_at >= after_s:
            self._is_full = self._try(whole=self._tries_whole or after_s <= 0)
            self._tries_whole |= self._is_full
            self._tried_at = self._monotonic()
        return self._is_full

    def _try(self, *, whole: bool) -> bool:
        size = max(1, self.largest_bytes)
        # No zeros: some file systems keep none of them.
        piece = memoryview(os.urandom(min(size, TRIAL_BYTES_MAX)))
        count, rest = divmod(size, len(piece)) if whole else (1, 0)
        try:
            self._store.put(TRIAL, [*(count * [piece]), piece[:rest]], overwrite=True)
            self._store.delete(TRIAL)
        except StoreFullError as e:
            logger.info("the storage is full: %s", e)
            return True
        except StoreError as e:
            logger.debug("whether there is room is not known: %s", e)  # what does not work will show elsewhere
        return False
