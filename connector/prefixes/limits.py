"""Limits on size and age of the prefixes in SharedStorageConnector's storage.

The limits are the options of ``tiers.config.tier_options.BoundedTierConfig``, and are enforced as for a tier: writers
reserve room from one account (``tiers.capacity.account``), and a collector in its own process removes ``chunks``.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ...tiers.blocks.file_mapper import FileMapper
from ...tiers.builtin import NFS_NEWCOMER_S, record_keys
from ...tiers.capacity.account import Account
from ...tiers.capacity.link import TOUCH_EVERY_S, CollectorLink
from ...tiers.capacity.policy import CapacityPolicy
from ...tiers.config.open_store import for_engine, open_tool_store, tool_recipe
from ...tiers.config.tier_options import BoundedTierConfig, NfsTierConfig
from ...tiers.isolation.process import StoreRecipe

USE_NOTED_S = 3600.0
GRACE_S = 60.0  # younger chunks are not removed: their layers may still be in transfer, or a load may be about to begin


class PrefixLimits:
    """Limits of a place, and the account of its writers. Any thread; ``_lock`` guards ``_account``.

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
        self._account: Account | None = None

    @classmethod
    def of(cls, place: BoundedTierConfig) -> PrefixLimits | None:
        """Return the limits of a place; None: it has no limits, or is read-only. Asks no storage."""
        policy = place.capacity_policy()
        return None if policy is None else cls(replace(policy, grace_s=GRACE_S), place)

    def account(self) -> Account | None:
        """Return the account from which chunks reserve their room; None: there is no ``max_bytes``.

        Raises:
            StoreError: the storage cannot be opened.
        """
        if self.policy.max_bytes is None:
            return None
        with self._lock:
            if self._account is None:
                newcomer_s = NFS_NEWCOMER_S if isinstance(self._place, NfsTierConfig) else 0.0
                store = open_tool_store(for_engine(self._place))
                keys = record_keys(self._place)
                self._account = Account(store, self.policy.max_bytes, newcomer_s=newcomer_s, keys=keys)
            return self._account

    def start_collector(self, mapper: FileMapper) -> CollectorLink:
        """Start the process that removes chunks that exceed the limits. The caller must close the returned link.

        Args:
            mapper: file mapper of the namespace.
        """
        make_store, options = tool_recipe(self._place)
        recipe = StoreRecipe(
            "kvtiers.connector.prefixes.chunks", "open_chunks", {"root": StoreRecipe.of(make_store, **options)}
        )
        return CollectorLink("prefixes", recipe, self.policy, mapper, notes_uses=False, keys=record_keys(self._place))


def use_noted_s(policy: CapacityPolicy | None) -> float:
    """Return for how many seconds a use need not be noted again: shorter than the age at which chunks are removed."""
    if policy is None or policy.waits:
        return USE_NOTED_S
    return min(USE_NOTED_S, TOUCH_EVERY_S, (policy.ttl_s or 4 * TOUCH_EVERY_S) / 4)
