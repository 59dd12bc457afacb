"""TierHealth: decides which results of loads, stores and lookups count as failures for a tier's circuit. No I/O.

A block that cannot be read (on a bad sector, or in another user's folder) fails at every request for it, which says
nothing new about the storage. So an error that may concern a single block counts once, unless other blocks fail, too.

A bad block does not prove that the storage is damaged: this host's memory, its network or a proxy may have damaged the
read. ``BAD_READS_MAX`` different bad blocks without a good block between them are blamed on this host's reads. Then the
tier is cut off until a probe has read a good block, and nothing is removed: other hosts may read these blocks well.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..blocks.batches import BAD_READS_MAX, Batch
from ..blocks.keys import OffloadKey
from .circuit import Circuit, Kind
from .lookup import LookupCounts

KEYS_MAX = 64  # failed keys remembered per kind; with more, the cause is not single blocks
BAD_KEYS_MAX = 65_536  # about 10 MB
REST_S = 10.0  # how long a block that could not be read or is bad counts as absent: each load of it fails


class TierHealth:
    """Passes results to the circuit. Scheduler thread only.

    Attributes:
        doubts_reads: the tier was cut off because of bad blocks, and no good block was read since.
    """

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        self._failed_lookups = FailedKeys(KEYS_MAX)
        self._unreadable = FailedKeys(KEYS_MAX)
        self._bad = FailedKeys(BAD_KEYS_MAX)
        self._suspects: dict[Kind, dict[OffloadKey, None]] = {"load": {}, "store": {}}
        self.doubts_reads = False

    def looked_up(self, counts: LookupCounts) -> bool:
        """Record lookups. True: only keys that failed before have failed; look up another key to test the storage."""
        is_news = self._failed_lookups.add(counts.failed)
        if counts.hits or counts.misses:
            if not self.doubts_reads:
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
            self._bad.add(batch.bad)
            is_news = self._unreadable.add(batch.unreadable)
            arrived |= bool(batch.succeeded)
            if batch.fault and (is_news or batch.outcomes["failed"] > len(batch.gone) + len(batch.unreadable)):
                faults.append(batch.fault)
        self._judge_reads(batches, op)
        if not arrived:
            for fault in faults:
                self._circuit.fail(op, fault)
        elif not self.doubts_reads:
            self._circuit.succeed(op)

    def probed(self, batch: Batch) -> None:
        """Record a probe that has read blocks."""
        # One is good, or none is left to read.
        if batch.succeeded or not (batch.suspects or batch.fault):
            self._trust_reads()
            self._circuit.succeed("load")
        else:
            self._circuit.fail("load", "a probe has read no good block")

    @property
    def suspects(self) -> list[OffloadKey]:
        """Bad blocks read since the last good one, up to ``BAD_READS_MAX`` of loads and of stores."""
        return [key for keys in self._suspects.values() for key in keys]

    def _judge_reads(self, batches: Iterable[Batch], op: Kind) -> None:
        """Cut the tier off if too many blocks in a row were bad. One good block counts for the whole job.

        A store reads only a block's end, so a good end says nothing about loads.
        """
        suspects = self._suspects[op]
        for batch in batches:
            if batch.succeeded if op == "load" else batch.found:
                if op == "load":
                    self._trust_reads()
                suspects.clear()
                return
        for key in (key for batch in batches for key in batch.suspects):
            if len(suspects) < BAD_READS_MAX:
                suspects[key] = None
        if len(suspects) == BAD_READS_MAX and self._circuit.closed:
            self.doubts_reads = True
            self._circuit.trip(
                f"{BAD_READS_MAX} blocks in a row were bad, which suggests that reads on host {socket.gethostname()} "
                "are damaged. Nothing was removed. Check this host's memory and network (dmesg, ECC and NIC errors, "
                "proxies). If kvtiers verify finds the same blocks bad on another host, the storage is damaged: run "
                "kvtiers verify --repair there. The tier is used again when this host has read a good block",
                is_error=True,
            )

    def _trust_reads(self) -> None:
        self.doubts_reads = False
        for suspects in self._suspects.values():
            suspects.clear()

    def to_replace(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """The blocks that the next store must overwrite, because their last load failed.

        That load failed with an error that may be the block's alone, or found that the block is bad.
        """
        if not (self._unreadable or self._bad):
            return []
        return [key for key in keys if key in self._unreadable or key in self._bad]


class FailedKeys(OrderedDict[OffloadKey, None]):
    """The keys that failed most recently, up to ``keys_max``."""

    def __init__(self, keys_max: int) -> None:
        super().__init__()
        self._keys_max = keys_max

    def add(self, keys: Iterable[OffloadKey]) -> bool:
        """Add keys that failed. Returns whether any of them is new here."""
        is_news = False
        for key in keys:
            is_news |= key not in self
            self[key] = None
            self.move_to_end(key)
            if len(self) > self._keys_max:
                self.popitem(last=False)
        return is_news

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys that did not fail again."""
        if self:
            for key in keys:
                self.pop(key, None)
