"""Room: how much free space the storage itself has, independent of ``max_bytes``.

``Freed`` tracks how much free space removals gain, and ``Patience`` pauses removals that gain none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import StoreError, StoreFullError
from ..plain_logs import get_logger
from ..store import Store, SupportsFreeBytes, SupportsTotalBytes
from .policy import CapacityPolicy
from .records import OWN_PREFIX

logger = get_logger(__name__)


class Margin(NamedTuple):
    """Free space beyond ``min_free`` and one block: shares of ``min_free`` and of the stored bytes, whichever is less.

    The second share keeps a large reserve from costing a small cache all of its blocks.
    """

    of_reserve: float
    of_stored: float


# Margins at which the collector starts, and up to which it removes. Puts that leave less than min_free are refused.
FREE_HIGH, FREE_LOW = Margin(0.05, 0.1), Margin(0.25, 0.5)
TRIAL = f"{OWN_PREFIX}trial"
TRIAL_BYTES_MAX = 4 << 20  # size limit of the trial put that is made each minute
TRIAL_EVERY_S = 60.0
LATE_S_MAX = 60.0  # ZFS shows freed space after 5 s, btrfs after 30 s
LATE_SHARE = 1 / 16  # of the removed bytes; if less than this is free at once, the rest becomes free late
# If the space never becomes free (a snapshot keeps it), removal pauses: FUTILE_S, doubled each time up to FUTILE_S_MAX.
FUTILE_S, FUTILE_S_MAX = 600.0, 3600.0


@dataclass(slots=True)
class Freed:
    """Removals, and how much the free space grew since. It may grow late, or others may use it at once.

    Attributes:
        before_bytes: free before the first removal.
        removed_bytes: removed since.
        risen_bytes: largest increase of free space seen since.
        removed_at: monotonic seconds.
        comes_late: nearly nothing was free at once.
    """

    before_bytes: int = 0
    removed_bytes: int = 0
    risen_bytes: int = 0
    removed_at: float = float("-inf")
    comes_late: bool = False

    def add(self, size: int, free: int, now: float) -> None:
        """Book a removal."""
        self.removed_bytes += size
        self.removed_at = now
        self.see(free)
        # Writers that use the freed space at once look nearly the same; they then wait up to LATE_S_MAX.
        self.comes_late = self.risen_bytes < LATE_SHARE * self.removed_bytes

    def see(self, free: int) -> None:
        """Note the free space."""
        self.risen_bytes = max(self.risen_bytes, free - self.before_bytes)

    def late_bytes(self, free: int, now: float) -> int:
        """Removed bytes that are not free yet but may become free."""
        if not self.comes_late or now - self.removed_at > LATE_S_MAX:
            return 0
        self.see(free)
        return max(0, self.removed_bytes - self.risen_bytes)


class Patience:
    """Pauses removals if the space of what was removed never becomes free, twice in a row."""

    def __init__(self) -> None:
        self._was_futile = False
        self._rest_s = 0.0
        self._until = float("-inf")

    def is_resting(self, now: float) -> bool:
        """Whether nothing should be removed to make room. ``now``: monotonic seconds."""
        return now < self._until

    def judge(self, freed: Freed, *, taken: int, missing: int, now: float) -> None:
        """Judge removals that had time to show.

        Args:
            taken: freed bytes that writers have used since.
            missing: bytes still missing.
        """
        # Do not pause because others fill the disk: then more is missing than was removed, or it does not happen twice.
        is_futile = freed.risen_bytes + taken < LATE_SHARE * freed.removed_bytes and 0 < missing <= freed.removed_bytes
        if is_futile and self._was_futile:
            self._rest_s = min(FUTILE_S_MAX, max(FUTILE_S, 2 * self._rest_s))
            self._until = now + self._rest_s
            logger.warning(
                "%d bytes of blocks were removed and their space is not free (does a snapshot keep it?): "
                "none is removed to make room for %.0f s", freed.removed_bytes, self._rest_s,
            )  # fmt: skip
        elif not is_futile:
            self._rest_s = 0.0
        self._was_futile = is_futile


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
        self._tried_at = float("-inf")  # when a put was last tried, and whether the storage refused it
        self._is_full = False
        self._tries_whole = False
        self._patience = Patience()
        self._freed = Freed()
        self._ended = Freed()  # earlier removals, not judged yet
        self._left_bytes = 0  # stored at the last measurement, less what was removed since
        self.largest_bytes = policy.block_bytes

    def begin(self) -> None:
        """Start a run.

        Raises:
            StoreError: the free space cannot be read.
        """
        self._check_reserve()
        free = self._free_bytes()
        if free is not None and self._freed.late_bytes(free, self._monotonic()) == 0:
            self._freed.see(free)
            self._ended, self._freed = self._freed, Freed(before_bytes=free)

    def note_stored(self, size: int) -> None:
        """Check whether the last removal made space, given the bytes stored now (after removing blocks past their ttl).

        Raises:
            StoreError: the free space cannot be read.
        """
        ended, self._ended = self._ended, Freed()
        taken = max(0, size - self._left_bytes)
        self._left_bytes = size
        if ended.removed_bytes:
            missing = self.missing_bytes(FREE_HIGH)
            self._patience.judge(ended, taken=taken, missing=missing, now=self._monotonic())

    def missing_bytes(self, margin: Margin) -> int:
        """Bytes missing for the reserve, one block and a margin to be free (or free soon); 0 or less: enough.

        Raises:
            StoreError: the free space cannot be read.
        """
        free = self._free_bytes()
        now = self._monotonic()
        if free is None or self._patience.is_resting(now):
            return 0
        spare = int(min(margin.of_reserve * self._min_free_bytes, margin.of_stored * self._left_bytes))
        wanted = self._min_free_bytes + self.largest_bytes + spare
        return wanted - free - self._freed.late_bytes(free, now)

    def note_removing(self) -> None:
        """Note the free space before the first removal, so that space used by others during the listing does not count.

        Raises:
            StoreError: the free space cannot be read.
        """
        if not self._freed.removed_bytes:
            self._freed.before_bytes = self._free_bytes() or 0

    def note_removed(self, size: int) -> None:
        """Book removed bytes, and see whether the free space grew.

        Raises:
            StoreError: the free space cannot be read.
        """
        self._is_full = False
        self._left_bytes -= size
        free = self._free_bytes()
        if free is not None:
            self._freed.add(size, free, self._monotonic())

    def _check_reserve(self) -> None:
        """Drop a reserve that no removal can reach: even with all blocks removed, no block could be stored."""
        total = self._store.total_bytes() if isinstance(self._store, SupportsTotalBytes) else None
        if total is not None and self._min_free_bytes >= total:
            logger.warning(
                "min_free = %d is not less than the size of the file system, %d bytes: nothing is stored, and no block "
                "is removed to make room; lower min_free", self._min_free_bytes, total,
            )  # fmt: skip
            self._min_free_bytes = 0

    def _free_bytes(self) -> int | None:
        """Free bytes; None: no reserve is configured, or the storage does not report free space."""
        if not self._min_free_bytes or not isinstance(self._store, SupportsFreeBytes):
            return None
        return self._store.free_bytes()

    def is_full(self, *, after_s: float = TRIAL_EVERY_S) -> bool:
        """Whether the storage refuses a block. Makes a trial put if the last answer is older than ``after_s``.

        Free bytes do not show exhausted inodes or a user's quota. The trial has at most ``TRIAL_BYTES_MAX``, or the
        size of the largest block if ``after_s`` is 0 or a trial has failed before. Buckets are not tried, because a
        bucket may keep every version of the trial.
        """
        if not isinstance(self._store, SupportsFreeBytes) or self._patience.is_resting(self._monotonic()):
            return False
        if self._monotonic() - self._tried_at >= after_s:
            self._is_full = self._try_put(max(1, self.largest_bytes), whole=self._tries_whole or after_s <= 0)
            self._tries_whole |= self._is_full
            self._tried_at = self._monotonic()
        return self._is_full

    def _try_put(self, size: int, *, whole: bool) -> bool:
        """Put a trial and remove it. Returns whether the storage has no room for it."""
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
