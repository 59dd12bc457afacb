"""TierHealth: what a tier's circuit is told of its loads, stores and lookups. Pure.

A block that cannot be had (a bad sector's, one in a folder of somebody else's) fails at each request for it, and that
says nothing new of the storage. So an error of a block's own counts once, but where others fail with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.tier.block_mover import Batch
from kvtiers.tiers.tier.circuit import Circuit, Kind
from kvtiers.tiers.tier.lookup import FAILED_S_MIN, LookupCounts

KEYS_MAX = 64  # remembered of each kind: more are no single blocks
STUCK_KEYS_MAX = 65_536  # some 10 MB
TIMES_MAX = 32  # that are counted
REST_S_MAX = 60.0  # as long as other hosts' removals may go unnoticed


class TierHealth:
    """Scheduler thread only, save that any may ask what is in ``to_replace``.

    Attributes:
        to_replace: blocks whose last load ended in an error of their own, or found a bad block that could not be
            removed. The next store overwrites them.
    """

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        self._out_of_reach = FailedKeys(KEYS_MAX)
        self._unreadable = FailedKeys(KEYS_MAX)
        self._stuck = FailedKeys(STUCK_KEYS_MAX)
        self.to_replace = _AnyOf(self._unreadable, self._stuck)

    def looked_up(self, counts: LookupCounts) -> bool:
        """Lookups were answered, or not. True: only another key can tell whether it is the storage; ask for one."""
        is_news = self._out_of_reach.add(counts.failed)
        if counts.hits or counts.misses:
            self._circuit.succeed("lookup")  # some keys may be out of reach: that is no reason to miss all others
        elif counts.expired:
            self._circuit.fail("lookup", "lookups are not answered")
        elif is_news:
            self._circuit.fail("lookup", "lookups fail")
        elif counts.failed:
            return True
        elif counts.late:
            self._circuit.answer_late()
        return False

    def moved(self, batches: Iterable[Batch], op: Kind) -> list[OffloadKey]:
        """A job's batches ended. What arrived speaks for all of it: a batch may be one block, and three say little.

        Returns:
            Blocks that rest and need not: they failed in an outage of loads, which is over.
        """
        arrived = False
        faults = []
        for batch in batches:
            if op == "load":  # not where it was stored again: whether it can be read now is yet to be seen
                self._unreadable.forget(batch.succeeded)
            self._stuck.forget(batch.succeeded)
            self._stuck.add(batch.stuck)
            is_news = self._unreadable.add(batch.unreadable)
            arrived |= bool(batch.succeeded)
            if batch.fault and (is_news or batch.outcomes["failed"] > len(batch.gone) + len(batch.unreadable)):
                faults.append(batch.fault)
        if arrived:
            return self._unreadable.count_anew() if self._circuit.succeed(op) and op == "load" else []
        for fault in faults:
            self._circuit.fail(op, fault)
        return []

    def rest_s(self, key: OffloadKey) -> float:
        """How long a block that could not be read or removed is not loaded again: about as long as it has failed."""
        times = max(self._unreadable.times(key), self._stuck.times(key))
        return min(REST_S_MAX, FAILED_S_MIN * 2.0 ** max(0, times - 1))


class FailedKeys:
    """The last keys that failed, up to ``keys_max``."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._keys: OrderedDict[OffloadKey, int] = OrderedDict()  # how often

    def times(self, key: OffloadKey) -> int:
        """How often it has failed since it was forgotten."""
        return self._keys.get(key, 0)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[OffloadKey]) -> bool:
        """Whether any of them was not among the last."""
        is_news = False
        for key in keys:
            is_news |= key not in self._keys
            self._keys[key] = min(TIMES_MAX, self.times(key) + 1)
            self._keys.move_to_end(key)
            if len(self._keys) > self._keys_max:
                self._keys.popitem(last=False)
        return is_news

    def count_anew(self) -> list[OffloadKey]:
        """All of them: how often they failed says nothing. Where one fails again that is still no news."""
        self._keys.update(dict.fromkeys(self._keys, 0))
        return list(self._keys)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """They did not fail again."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)


class _AnyOf:
    """The keys that are in any of several."""

    def __init__(self, *parts: Container[object]) -> None:
        self._parts = parts

    def __contains__(self, key: object) -> bool:
        return any(key in part for part in self._parts)
