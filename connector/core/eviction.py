"""Eviction policies of the region: LRU, or ARC (Megiddo and Modha, FAST 2003).

A policy knows keys, but not slots or bytes. It holds every resident key. Pinned keys are kept apart, so that choosing
victims never walks over blocks that cannot be evicted. Scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container
from itertools import islice

from ...tiers.blocks.keys import OffloadKey
from ...tiers.errors import ConfigError

# OrderedDict, not dict: next(iter()) of a dict walks over the empty places of all first entries that were deleted.
_Order = OrderedDict[OffloadKey, None]


class EvictionPolicy(ABC):
    """Order in which resident keys are evicted. Every method except ``evict`` is O(1).

    Args:
        num_orders: number of lists that hold the keys which are not pinned.
    """

    def __init__(self, num_orders: int = 1) -> None:
        self._orders: list[_Order] = [OrderedDict() for _ in range(num_orders)]
        self._pinned: dict[OffloadKey, _Order] = {}  # pinned key -> the list that it returns to

    @abstractmethod
    def insert(self, key: OffloadKey) -> None:
        """Add a key. It may be evicted."""

    @abstractmethod
    def touch(self, key: OffloadKey) -> None:
        """Note that the key was used, if it is resident."""

    @abstractmethod
    def evict(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        """Remove ``n`` keys that are neither pinned nor ``protected``, in eviction order.

        Returns:
            The n keys; None, with nothing changed, if there are fewer than n such keys.
        """

    def pin(self, key: OffloadKey) -> None:
        """Keep the resident key from being evicted until ``unpin``."""
        for order in self._orders:
            if key in order:
                del order[key]
                self._pinned[key] = order
                return
        raise KeyError(key)

    def unpin(self, key: OffloadKey) -> None:
        """Allow the key to be evicted again; it counts as just used."""
        self._pinned.pop(key)[key] = None

    def discard(self, key: OffloadKey) -> None:
        """Remove a resident, unpinned key whose block was removed without eviction."""
        self.pin(key)
        del self._pinned[key]

    def __len__(self) -> int:
        """Number of resident keys that are not pinned."""
        return sum(map(len, self._orders))


class LRUPolicy(EvictionPolicy):
    """Evicts the least recently used block first."""

    def __init__(self) -> None:
        super().__init__()
        (self._order,) = self._orders

    def insert(self, key: OffloadKey) -> None:
        self._order[key] = None

    def touch(self, key: OffloadKey) -> None:
        if key in self._order:  # ``unpin`` makes a pinned key the most recently used anyway
            self._order.move_to_end(key)

    def evict(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        victims = list(islice((key for key in self._order if key not in protected), n))
        if len(victims) < n:
            return None
        for key in victims:
            del self._order[key]
        return victims


class ARCPolicy(EvictionPolicy):
    """Adaptive Replacement Cache: balances recency against frequency, learning the balance from the misses.

    T1 holds keys used once recently, T2 keys used again. B1 and B2 remember keys evicted from T1 and T2. If a key comes
    back while B1 remembers it, T1 is too small; if B2 remembers it, T2 is too small. A scan passes through T1 and
    does not disturb T2. The paper's bounds hold: |T1| + |B1| <= c, and all four together <= 2c.

    Args:
        num_slots: the paper's c.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(2)
        self._num_slots = num_slots
        self._t1, self._t2 = self._orders
        self._b1: _Order = OrderedDict()
        self._b2: _Order = OrderedDict()
        self._t1_size = 0  # with pinned keys
        self._t1_target = 0.0  # the paper's p

    def insert(self, key: OffloadKey) -> None:
        b1, b2 = self._b1, self._b2
        if key in b1:
            self._t1_target = min(self._num_slots, self._t1_target + max(1.0, len(b2) / len(b1)))
            del b1[key]
            self._t2[key] = None
        elif key in b2:
            self._t1_target = max(0.0, self._t1_target - max(1.0, len(b1) / len(b2)))
            del b2[key]
            self._t2[key] = None
        else:
            self._t1[key] = None
            self._t1_size += 1
        self._trim_ghosts()

    def touch(self, key: OffloadKey) -> None:
        if key in self._t2:
            self._t2.move_to_end(key)
        elif key in self._t1:
            del self._t1[key]
            self._t2[key] = None
            self._t1_size -= 1
        elif self._pinned.get(key) is self._t1:
            self._pinned[key] = self._t2
            self._t1_size -= 1

    def discard(self, key: OffloadKey) -> None:
        self._t1_size -= key in self._t1
        super().discard(key)

    def evict(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        from_t1 = (key for key in self._t1 if key not in protected)
        from_t2 = (key for key in self._t2 if key not in protected)
        t1_size = self._t1_size
        victims: list[tuple[OffloadKey, bool]] = []
        # Victims are chosen first and moved afterwards, so that nothing changes if there are too few.
        for _ in range(n):
            is_t1 = t1_size > self._t1_target
            key = next(from_t1 if is_t1 else from_t2, None)
            if key is None:
                is_t1 = not is_t1
                key = next(from_t1 if is_t1 else from_t2, None)
            if key is None:
                return None
            t1_size -= is_t1
            victims.append((key, is_t1))
        self._t1_size = t1_size
        for key, is_t1 in victims:
            resident, ghosts = (self._t1, self._b1) if is_t1 else (self._t2, self._b2)
            del resident[key]
            ghosts[key] = None
        return [key for key, _ in victims]

    def _trim_ghosts(self) -> None:
        """Shrink B1 and B2 to the paper's bounds."""
        while self._b1 and self._t1_size + len(self._b1) > self._num_slots:
            self._b1.popitem(last=False)
        resident = len(self) + len(self._pinned)
        while self._b2 and resident + len(self._b1) + len(self._b2) > 2 * self._num_slots:
            self._b2.popitem(last=False)


def create_policy(name: str, num_slots: int) -> EvictionPolicy:
    """Create the policy that a config names.

    Raises:
        ConfigError: the name is neither "lru" nor "arc".
    """
    if name == "lru":
        return LRUPolicy()
    if name == "arc":
        return ARCPolicy(num_slots)
    raise ConfigError(f"{name!r} is not an eviction policy; accepted: lru, arc", field="eviction_policy")
