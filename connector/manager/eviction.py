"""Which blocks leave the region first: LRU, or ARC (Megiddo and Modha, FAST 2003).

A policy knows keys, not slots and not bytes. It holds every resident key; pinned ones are kept apart, so that choosing
victims never walks over blocks that cannot leave. Scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container
from itertools import islice

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError

# OrderedDict, not dict: a plain dict that loses its first entries walks over their graves on every next(iter()).
_Order = OrderedDict[OffloadKey, None]


class EvictionPolicy(ABC):
    """Order of the resident keys. Every method but ``evict`` is O(1)."""

    @abstractmethod
    def insert(self, key: OffloadKey) -> None:
        """The key is resident from now on, and may be evicted."""

    @abstractmethod
    def touch(self, key: OffloadKey) -> None:
        """The resident key was used."""

    @abstractmethod
    def pin(self, key: OffloadKey) -> None:
        """The resident key may not be evicted until ``unpin``."""

    @abstractmethod
    def unpin(self, key: OffloadKey) -> None:
        """The key may be evicted again; it counts as just used."""

    @abstractmethod
    def discard(self, key: OffloadKey) -> None:
        """The resident, unpinned key is gone without having been evicted."""

    @abstractmethod
    def evict(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        """Make ``n`` unpinned keys that are not ``protected`` non-resident, the first to leave first.

        Returns:
            The n keys, or None, with nothing changed, where there are not as many.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Resident keys that are not pinned."""


class LRUPolicy(EvictionPolicy):
    """The least recently used block leaves first."""

    def __init__(self) -> None:
        self._order: _Order = OrderedDict()

    def insert(self, key: OffloadKey) -> None:
        self._order[key] = None

    def touch(self, key: OffloadKey) -> None:
        if key in self._order:  # pinned keys come back as the youngest anyway
            self._order.move_to_end(key)

    def pin(self, key: OffloadKey) -> None:
        del self._order[key]

    def unpin(self, key: OffloadKey) -> None:
        self._order[key] = None

    def discard(self, key: OffloadKey) -> None:
        del self._order[key]

    def evict(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        victims = list(islice((key for key in self._order if key not in protected), n))
        if len(victims) < n:
            return None
        for key in victims:
            del self._order[key]
        return victims

    def __len__(self) -> int:
        return len(self._order)


class ARCPolicy(EvictionPolicy):
    """Adaptive Replacement Cache: recency and frequency share the slots in proportions that the misses teach.

    T1 holds keys seen once lately, T2 keys seen again; B1 and B2 remember keys that left them. A key that comes back
    while B1 remembers it says that T1 is too small, one that B2 remembers that T2 is. A scan passes through T1 and
    leaves T2 alone. The paper's bounds hold: |T1| + |B1| <= c, and all four together <= 2c.

    Args:
        num_slots: the paper's c.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._t1: _Order = OrderedDict()
        self._t2: _Order = OrderedDict()
        self._b1: _Order = OrderedDict()
        self._b2: _Order = OrderedDict()
        self._pinned_t1: set[OffloadKey] = set()
        self._pinned_t2: set[OffloadKey] = set()
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
        self._forget()

    def touch(self, key: OffloadKey) -> None:
        if key in self._t2:
            self._t2.move_to_end(key)
        elif key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._pinned_t1:
            self._pinned_t1.remove(key)
            self._pinned_t2.add(key)

    def pin(self, key: OffloadKey) -> None:
        if key in self._t1:
            del self._t1[key]
            self._pinned_t1.add(key)
        else:
            del self._t2[key]
            self._pinned_t2.add(key)

    def unpin(self, key: OffloadKey) -> None:
        if key in self._pinned_t1:
            self._pinned_t1.remove(key)
            self._t1[key] = None
        else:
            self._pinned_t2.remove(key)
            self._t2[key] = None

    def discard(self, key: OffloadKey) -> None:
        if key in self._t1:
            del self._t1[key]
        else:
            del self._t2[key]

    def evict(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        from_t1 = (key for key in self._t1 if key not in protected)
        from_t2 = (key for key in self._t2 if key not in protected)
        t1_size = len(self._t1) + len(self._pinned_t1)
        victims: list[tuple[OffloadKey, bool]] = []
        # Chosen first and moved afterwards, so that too few of them changes nothing.
        for _ in range(n):
            prefer_t1 = t1_size > self._t1_target
            key = next(from_t1 if prefer_t1 else from_t2, None)
            is_t1 = prefer_t1
            if key is None:
                key = next(from_t2 if prefer_t1 else from_t1, None)
                is_t1 = not prefer_t1
            if key is None:
                return None
            t1_size -= is_t1
            victims.append((key, is_t1))
        for key, is_t1 in victims:
            resident, ghosts = (self._t1, self._b1) if is_t1 else (self._t2, self._b2)
            del resident[key]
            ghosts[key] = None
        return [key for key, _ in victims]

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def _forget(self) -> None:
        """Keep to the paper's bounds."""
        t1_size = len(self._t1) + len(self._pinned_t1)
        while self._b1 and t1_size + len(self._b1) > self._num_slots:
            self._b1.popitem(last=False)
        resident = t1_size + len(self._t2) + len(self._pinned_t2)
        while self._b2 and resident + len(self._b1) + len(self._b2) > 2 * self._num_slots:
            self._b2.popitem(last=False)


def create_policy(name: str, num_slots: int) -> EvictionPolicy:
    """The policy that a config names.

    Raises:
        ConfigError: neither "lru" nor "arc".
    """
    if name == "lru":
        return LRUPolicy()
    if name == "arc":
        return ARCPolicy(num_slots)
    raise ConfigError(f"{name!r} is no eviction policy; accepted: lru, arc", field="eviction_policy")
