"""Room: what the storage itself still takes, whatever ``max_bytes`` says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from tiers.capacity.policy import CapacityPolicy
from tiers.capacity.records import OWN_PREFIX
from tiers.errors import StoreError, StoreFullError
from tiers.store import Store, SupportsFreeBytes

logger = logging.getLogger(__name__)

TRIAL = f"{OWN_PREFIX}trial"
TRIAL_BYTES_MAX = 4 << 20
TRIAL_EVERY_S = 60.0


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
        self.largest_bytes = policy.block_bytes

    def missing_bytes(self, share: float) -> int:
        """How much less is free than this share of the reserve and one block; 0 or less: enough.

        Raises:
            StoreError: the storage does not say.
        """
        if not self._min_free_bytes or not isinstance(self._store, SupportsFreeBytes):
            return 0
        return int(self._min_free_bytes * share) + self.largest_bytes - self._store.free_bytes()

    def is_full(self, *, after_s: float = TRIAL_EVERY_S) -> bool:
        """Whether the storage refused a block; tried again where the last answer is older than ``after_s``.

        Inodes, a user's quota and a bucket's are no free bytes that could be asked for, and are found by trying only.
        """
        if self._monotonic() - self._tried_at >= after_s:
            self._is_full = self._try()
            self._tried_at = self._monotonic()
        return self._is_full

    def note_removed(self) -> None:
        """Blocks were removed."""
        self._is_full = False

    def _try(self) -> bool:
        # No zeros: some file systems keep none of them.
        block = os.urandom(min(max(1, self.largest_bytes), TRIAL_BYTES_MAX))
        try:
            self._store.put(TRIAL, [memoryview(block)], overwrite=True)
            self._store.delete(TRIAL)
        except StoreFullError as e:
            logger.info("the storage is full: %s", e)
            return True
        except StoreError as e:
            logger.debug("whether there is room is not known: %s", e)  # what does not work will show elsewhere
        return False
