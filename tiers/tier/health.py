"""TierHealth: decides which results of loads, stores and lookups count as failures for a tier's circuit. No I/O.

A block that cannot be read (on a bad sector, or in another user's folder) fails at every request for it, which says
nothing new about the storage. So an error that may concern a single block counts once, unless other blocks fail, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.tier.block_mover import Batch
from kvtiers.tiers.tier.circuit import Circuit, Kind
from kvtiers.tiers.tier.lookup import FAILED_S_MIN, LookupCounts

KEYS_MAX = 64  # failed keys remembered per kind; with more, the cause is not single blocks
STUCK_KEYS_MAX = 65_536  # about 10 MB
TIMES_MAX = 32  # failures of one key are counted up to this number
REST_S_MAX = 60.0  # removals by other hosts may go unnoticed for as long


class TierHealth:
    """Passes results to the circuit. Scheduler thread only, except that any thread may call ``must_replace``."""

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        self._failed_lookups = FailedKeys(KEYS_MAX)
        self._unreadable = FailedKeys(KEYS_MAX)
        self._stuck = FailedKeys(STUCK_KEYS_MAX)

    def looked_up(self, counts: LookupCounts) -> bool:
        """Record lookups. True: only keys that failed before have failed; look up another key to test the storage."""
        is_news = self._failed_lookups.add(counts.failed)
        if counts.hits or counts.misses:
            self._circuit.succeed("lookup")  # if some keys cannot be looked up, the others can still be hits
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
        """Record the batches of a job that ended.

        One success counts for the whole job: a batch may be a single block, and three failed blocks say little.

        Returns:
            Blocks to load again at once: they failed in an outage of loads that is over now.
        """
        arrived = False
        faults = []
        for batch in batches:
            if op == "load":  # a successful store does not show that the block can be read now
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

    def must_replace(self, key: OffloadKey) -> bool:
        """Whether the next store must overwrite a block, because its last load failed.

        That load failed with an error that may be the block's alone, or found a bad block that could not be removed.
        """
        return key in self._unreadable or key in self._stuck

    def rest_s(self, key: OffloadKey) -> float:
        """How long a block that could not be read or removed counts as absent: about as long as it has been failing."""
        times = max(self._unreadable.times(key), self._stuck.times(key))
        return min(REST_S_MAX, FAILED_S_MIN * 2.0 ** max(0, times - 1))


class FailedKeys:
    """The keys that failed most recently, up to ``keys_max``."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._keys: OrderedDict[OffloadKey, int] = OrderedDict()  # key -> number of failures

    def times(self, key: OffloadKey) -> int:
        """How often a key has failed since ``forget`` or ``count_anew``."""
        return self._keys.get(key, 0)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[OffloadKey]) -> bool:
        """Add keys that failed. Returns whether any of them is new here."""
        is_news = False
        for key in keys:
            is_news |= key not in self._keys
            self._keys[key] = min(TIMES_MAX, self.times(key) + 1)
            self._keys.move_to_end(key)
            if len(self._keys) > self._keys_max:
                self._keys.popitem(last=False)
        return is_news

    def count_anew(self) -> list[OffloadKey]:
        """Reset the count of every key, and return all keys. They stay known: failing again is not news."""
        self._keys.update(dict.fromkeys(self._keys, 0))
        return list(self._keys)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys that did not fail again."""
        if self._keys:
            for key in keys:
                self._keys.pop(key, None)
