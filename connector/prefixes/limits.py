"""Limits on size and age of the prefixes in SharedStorageConnector's storage.

The limits are the options of ``tiers.config.tier_options.BoundedTierConfig``, and are kept as for a tier: writers
publish how much they put (``tiers.capacity.written``), and a collector in its own process removes ``chunks``.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ...tiers.blocks.file_mapper import FileMapper
from ...tiers.builtin import record_keys
from ...tiers.capacity.link import TOUCH_EVERY_S, CollectorLink
from ...tiers.capacity.policy import CapacityPolicy
from ...tiers.capacity.written import Writer
from ...tiers.config.open_store import tool_recipe
from ...tiers.config.tier_options import BoundedTierConfig
from ...tiers.recipe import StoreRecipe

USE_NOTED_S = 3600.0
GRACE_S = 60.0  # younger chunks are not removed: their layers may still be in transfer, or a load may be about to begin


class PrefixLimits:
    """Limits of a place, and this process as one of its writers. Any thread; ``_lock`` guards ``_writer``.

    Args:
        policy: the limits.
        place: storage of the prefixes; see module ``place``.

    Attributes:
        policy: as given.
    """

    def __init__(self, policy: CapacityPolicy, place: BoundedTierConfig) -> None:
        self.policy = policy
        self._place = place
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._collector: CollectorLink | None = None

    @classmethod
    def of(cls, place: BoundedTierConfig) -> PrefixLimits | None:
        """Return the limits of a place; None: it has no limits, or is read-only. Asks no storage."""
        policy = place.capacity_policy()
        return None if policy is None else cls(replace(policy, grace_s=GRACE_S), place)

    def full(self) -> str:
        """Return why nothing may be stored now; "": it may. Asks the storage every ``poll_s``.

        Raises:
            StoreError: the storage does not answer.
        """
        writer = self._writer_of_process()
        return "" if writer is None else writer.full()

    def note_put(self, size: int) -> None:
        """Count bytes that were stored, or may have been."""
        writer = self._writer_of_process()
        if writer is not None:
            writer.note_put(size)
        elif self._collector is not None:
            self._collector.note_put(size)

    def _writer_of_process(self) -> Writer | None:
        """Return this process's record; None: there is no ``max_bytes``."""
        if self.policy.max_bytes is None:
            return None
        with self._lock:
            if self._writer is None:
                make_store, arguments = tool_recipe(self._place)
                self._writer = Writer(make_store(**arguments), poll_s=self.policy.poll_s, keys=record_keys(self._place))
            return self._writer

    def start_collector(self, mapper: FileMapper) -> CollectorLink:
        """Start the process that removes chunks that exceed the limits. The caller must close the returned link.

        Args:
            mapper: file mapper of the namespace.
        """
        make_store, options = tool_recipe(self._place)
        recipe = StoreRecipe(
            "kvtiers.connector.prefixes.chunks", "open_chunks", {"root": StoreRecipe.of(make_store, **options)}
        )
        keys = record_keys(self._place)
        self._collector = CollectorLink("prefixes", recipe, self.policy, mapper, notes_uses=False, keys=keys)
        return self._collector


def use_noted_s(policy: CapacityPolicy | None) -> float:
    """Return for how many seconds a use need not be noted again: shorter than the age at which chunks are removed."""
    if policy is None or policy.waits:
        return USE_NOTED_S
    return min(USE_NOTED_S, TOUCH_EVERY_S, (policy.ttl_s or 4 * TOUCH_EVERY_S) / 4)
