"""Room: how much free space the storage itself has, independent of ``max_bytes``."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.errors import StoreError, StoreFullError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store, SupportsFreeBytes

logger = get_logger(__name__)

# The collector starts when less than 1.05 x min_free plus one block is free, because a put that would leave less than
# min_free is refused already.
FREE_HIGH, FREE_LOW = 1.05, 1.25
TRIAL = f"{OWN_PREFIX}trial"
TRIAL_BYTES_MAX = 4 << 20  # size limit of the trial put that is made each minute
TRIAL_EVERY_S = 60.0
LATE_S_MAX = 60.0  # ZFS shows freed space after 5 s, btrfs after 30 s
LATE_SHARE = 1 / 16  # of the removed bytes; if less than this is free at once, the rest becomes free late
# If the space never becomes free (a snapshot keeps it), removal pauses: FUTILE_S, doubled each time up to FUTILE_S_MAX.
FUTILE_S, FUTILE_S_MAX = 600.0, 3600.0


class Room:
    """Watches the storage's free space while blocks are removed. For the collector's thread.

    Args:
        store: the root, without a reserve of free space.
        policy: the limits.
        monotonic: monotonic seconds.

    Attributes:
        largest_bytes: size of the largest known block.
    """

    def __init__(self, store: Store, policy: CapacityPolicy, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._min_free_bytes = policy.min_free_bytes
        self._monotonic = monotonic
        self._tried_at = float("-inf")
        self._is_full = False
        self._tries_whole = False
        self._free_before_bytes = 0  # free before the removals
        self._removed_bytes = 0
        self._risen_bytes = 0  # largest increase of free space seen since
        self._removed_at = float("-inf")
        self._comes_late = False
        self._ended: tuple[int, int] | None = None  # previous removals: bytes removed, largest increase of free space
        self._left_bytes = 0  # stored at the last measurement, less what was removed since
        self._was_futile = False
        self._rest_s = 0.0
        self._rests_until = float("-inf")
        self.largest_bytes = policy.block_bytes

    def begin(self) -> None:
        """Start a run.

        Raises:
            StoreError: the free space cannot be read.
        """
        free = self._free_bytes()
        if free is not None and self._late_bytes(free) == 0:
            self._ended = self._removed_bytes, max(self._risen_bytes, free - self._free_before_bytes)
            self._free_before_bytes, self._removed_bytes, self._risen_bytes = free, 0, 0
            self._comes_late = False

    def note_stored(self, size: int) -> None:
        """Check whether the last removal made space, given the bytes stored now (after removing blocks past their ttl).

        Raises:
            StoreError: the free space cannot be read.
        """
        removed, risen = self._ended or (0, 0)
        self._ended = None
        taken = max(0, size - self._left_bytes)  # freed space that writers have used since
        self._left_bytes = size
        if not removed:
            return
        # Do not pause because others fill the disk: then more is missing than was removed, or it does not happen twice.
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
        """Bytes missing for ``share`` x the reserve plus one block to be free (or free soon); 0 or less: enough.

        Raises:
            StoreError: the free space cannot be read.
        """
        free = self._free_bytes()
        if free is None or self._rests():
            return 0
        return int(self._min_free_bytes * share) + self.largest_bytes - free - self._late_bytes(free)

    def note_removing(self) -> None:
        """Note the free space before the first removal, so that space used by others during the listing does not count.

        Raises:
            StoreError: the free space cannot be read.
        """
        if not self._removed_bytes:
            self._free_before_bytes = self._free_bytes() or 0

    def note_removed(self, size: int) -> None:
        """Book removed bytes, and see whether the free space grew.

        Raises:
            StoreError: the free space cannot be read.
        """
        self._is_full = False
        self._left_bytes -= size
        free = self._free_bytes()
        if free is not None:
            self._removed_bytes += size
            self._removed_at = self._monotonic()
            self._risen_bytes = max(self._risen_bytes, free - self._free_before_bytes)
            # Writers that use the freed space at once look nearly the same; they then wait up to LATE_S_MAX.
            self._comes_late = self._risen_bytes < LATE_SHARE * self._removed_bytes

    def _late_bytes(self, free: int) -> int:
        """Removed bytes that are not free yet but may become free."""
        if not self._comes_late or self._monotonic() - self._removed_at > LATE_S_MAX:
            return 0
        self._risen_bytes = max(self._risen_bytes, free - self._free_before_bytes)
        return max(0, self._removed_bytes - self._risen_bytes)

    def _free_bytes(self) -> int | None:
        """Free bytes; None: no reserve is configured, or the storage does not report free space."""
        if not self._min_free_bytes or not isinstance(self._store, SupportsFreeBytes):
            return None
        return self._store.free_bytes()

    def is_full(self, *, after_s: float = TRIAL_EVERY_S) -> bool:
        """Whether the storage refuses a block. Makes a trial put if the last answer is older than ``after_s``.

        The trial has at most ``TRIAL_BYTES_MAX``, or the size of the largest block if ``after_s`` is 0 or a trial
        has failed before. Only a trial finds exhausted inodes or a user's quota; free bytes do not show them. Buckets
        are not tried, because a bucket may keep every version of the trial.
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
        # Random bytes, because some file systems do not store zeros.
        piece = memoryview(os.urandom(min(size, TRIAL_BYTES_MAX)))
        count, rest = divmod(size, len(piece)) if whole else (1, 0)
        try:
            self._store.put(TRIAL, [*(count * [piece]), piece[:rest]], overwrite=True)
            self._store.delete(TRIAL)
        except StoreFullError as e:
            logger.info("the storage is full: %s", e)
            return True
        except StoreError as e:
            logger.debug("whether there is room is not known: %s", e)  # the error will show up elsewhere
        return False
