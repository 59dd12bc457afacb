"""TierHealth: decides which results of loads, stores and lookups count as failures for a tier's circuit. No I/O.

A block that cannot be read (on a bad sector, or in another user's folder) fails at every request for it. The repetition
says nothing new about the storage. So an error of a single block counts once, unless other blocks fail, too.

A load whose blocks are all bad is a failure, too: this host's memory, its network or a proxy may damage every read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..blocks.batches import Batch
from ..blocks.keys import OffloadKey
from .circuit import Circuit, Kind
from .lookup import LookupCounts

KEYS_MAX = 64  # failed keys remembered per kind; more failed keys cannot be single bad blocks
BAD_KEYS_MAX = 65_536  # about 10 MB
REST_S = 10.0  # how long an unreadable or bad block counts as absent, because each load of it fails


class TierHealth:
    """Passes results to the circuit. Scheduler thread only."""

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        self._failed_lookups = FailedKeys(KEYS_MAX)
        self._unreadable = FailedKeys(KEYS_MAX)
        self._bad = FailedKeys(BAD_KEYS_MAX)

    def looked_up(self, counts: LookupCounts) -> bool:
        """Record lookups. True: only keys that had failed before failed; look up another key to test the storage."""
        is_news = self._failed_lookups.add(counts.failed)
        if counts.hits or counts.misses:
            self._circuit.succeed("lookup")  # if some keys cannot be looked up, the others can still be hits
        elif counts.expired:
            self._circuit.fail("lookup", "lookups are not answered")
        elif is_news:
            self._circuit.fail("lookup", "lookups fail")
        elif counts.failed:
            return True
        return False

    def moved(self, batches: Sequence[Batch], op: Kind) -> None:
        """Record the batches of a job that ended.

        One success counts for the whole job: a batch may be a single block, and three failed blocks say little.
        """
        arrived = False
        faults = []
        for batch in batches:
            if op == "load":  # a successful store does not show that the block can be read now
                self._unreadable.forget(batch.succeeded)
            self._bad.forget(batch.succeeded)
            is_news = self._bad.add(batch.bad) | self._unreadable.add(batch.unreadable)
            arrived |= bool(batch.succeeded)
            if batch.fault and (is_news or batch.outcomes["failed"] > len(batch.gone) + len(batch.unreadable)):
                faults.append(batch.fault)
        if arrived:
            self._circuit.succeed(op)
            return
        for fault in faults:
            self._circuit.fail(op, fault)

    def to_replace(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """The blocks that the next store must overwrite, because their last load failed.

        The load failed with an error that may concern only this block, or it found the block bad.
        """
        if not (self._unreadable or self._bad):
            return []
        return [key for key in keys if key in self._unreadable or key in self._bad]


class FailedKeys(OrderedDict[OffloadKey, None]):
    """Remembers the keys that failed most recently, up to ``keys_max``."""

    def __init__(self, keys_max: int) -> None:
        super().__init__()
        self._keys_max = keys_max

    def add(self, keys: Iterable[OffloadKey]) -> bool:
        """Add keys that failed. Returns whether any of them was not remembered."""
        is_news = False
        for key in keys:
            is_news |= key not in self
            self[key] = None
            self.move_to_end(key)
            if len(self) > self._keys_max:
                self.popitem(last=False)
        return is_news

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget keys that did not fail again."""
        if self:
            for key in keys:
                self.pop(key, None)
