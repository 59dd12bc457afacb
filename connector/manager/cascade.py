"""Cascade: what goes from the region to the tiers behind it.

A block that becomes loadable goes to every tier that takes stores, one job a tier. Its slot stays pinned, and loadable,
until every tier has reported. What is more than a tier's share of the region follows in later jobs.

A block that a tier did not take (it was cut off, full or behind) is offered to it again when it is used: a prefix that
never leaves the region would else never get there. So it is when it has left the region and comes back from another
tier. Not for ``RETRY_S`` after it was refused, though: a dead tier would be asked with each request. That time is each
block's own: one that a tier never takes keeps no others from it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from kvtiers.connector.manager.guard import GuardedTier
from kvtiers.connector.manager.primary import Block, BlockState, CPUPrimaryTier
from kvtiers.tiers.blocks.keys import OffloadKey

RETRY_S = 10.0
REFUSED_MAX = 65_536  # of a tier, or as many as the region has blocks; beyond, what was refused first is forgotten


class Cascade:
    """Stores to tiers. Scheduler thread only.

    Args:
        share: part of the region that blocks on their way to the tiers may pin, all of them together.
        submit: hands blocks, pinned, to the tier of an index as one job; ``end`` is called when it ended.
        clock: seconds, monotonic.
        log_once: takes a subject, and what is to be said of it once.
    """

    def __init__(
        self,
        primary: CPUPrimaryTier,
        tiers: Sequence[GuardedTier],
        share: float,
        submit: Callable[[int, list[Block]], None],
        clock: Callable[[], float],
        log_once: Callable[[str, str], None],
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._submit = submit
        self._clock = clock
        self._log_once = log_once
        self._backlog = [0] * len(tiers)  # blocks
        self._takers = [index for index, tier in enumerate(tiers) if getattr(tier.tier, "takes_stores", True)]
        self._backlog_max = share * primary.num_blocks / max(1, len(self._takers))
        self._unsent: list[deque[Block]] = [deque() for _ in tiers]  # of each tier, until its backlog has room
        # Of each tier: what it refused, and when it may be offered that again; the last refused is last.
        self._refused: list[OrderedDict[OffloadKey, float]] = [OrderedDict() for _ in tiers]
        self._refused_max = max(REFUSED_MAX, primary.num_blocks)
        self._closed = False
        for index in self._takers:
            self._drop(index, 0)  # rates see no increase in what begins at 1

    def add(self, blocks: list[Block], num_tiers: int) -> None:
        """Store blocks to the first ``num_tiers`` tiers, and to those behind that refused them.

        With fewer than all tiers they were loaded from the next one. A large load comes in several parts: what a tier
        has no room for when one ends waits for its turn, as the rest of one job does, in numbers up to the region's.
        """
        if blocks and not self._closed:
            are_loaded = num_tiers < len(self._tiers)
            for index in self._takers:
                if index < num_tiers:
                    self._offer(index, blocks, wait=are_loaded)
                else:
                    self._offer_again(index, blocks)

    def use(self, keys: Collection[OffloadKey]) -> None:
        """Blocks are used: offer them to the tiers that refused them."""
        if self._closed or not any(self._refused):
            return
        found = [self._primary.find(key) for key in dict.fromkeys(keys)]
        blocks = [block for block in found if block and block.state is BlockState.READY]
        for index in self._takers:
            self._offer_again(index, blocks)

    def send(self, index: int) -> None:
        """Submit what waits for a tier, as far as its backlog has room."""
        if not self._closed:
            self._send(index, self._backlog_max)

    def end(self, index: int, blocks: Sequence[Block], succeeded: Collection[OffloadKey]) -> None:
        """A job ended."""
        self._backlog[index] -= len(blocks)
        self._refuse(index, [block for block in blocks if block.key not in succeeded])
        for block in reversed(blocks):  # a prefix's first blocks are to be the last to leave
            self._primary.unpin(block)

    def drop_unsent(self) -> None:
        """What waits for its turn is not stored: the region is about to forget it."""
        for index, unsent in enumerate(self._unsent):
            if unsent:
                self._drop(index, len(unsent))
                self._refuse(index, unsent)
                unsent.clear()

    def close(self) -> None:
        """Submit all that waits: the region ends, so it need not be kept from them. From now on nothing is added."""
        for index in range(len(self._tiers)):
            self._send(index, self._primary.num_blocks)
        self._closed = True

    def _offer_again(self, index: int, blocks: list[Block]) -> None:
        refused = self._refused[index]
        if refused:
            now = self._clock()
            owed = [block for block in blocks if refused.get(block.key, math.inf) <= now]
            if owed:
                self._offer(index, owed)

    def _offer(self, index: int, blocks: list[Block], *, wait: bool = False) -> None:
        waits = wait and len(self._unsent[index]) + len(blocks) <= self._primary.num_blocks
        if self._backlog[index] >= self._backlog_max and not waits:
            name = self._tiers[index].name
            self._drop(index, len(blocks))
            self._refuse(index, blocks)
            self._log_once(
                f"backlog {index}",
                f"tier {name}: {self._backlog[index]} of the region's {self._primary.num_blocks} blocks "
                "wait for it: it gets no more until it has stored some (see kvtiers_stores_dropped_total)",
            )
            return
        if refused := self._refused[index]:
            for block in blocks:
                refused.pop(block.key, None)
        self._unsent[index].extend(blocks)
        self._send(index, self._backlog_max)

    def _send(self, index: int, backlog_max: float) -> None:
        """Up to a backlog of ``backlog_max`` blocks, rounded up."""
        unsent = self._unsent[index]
        while unsent and self._backlog[index] < backlog_max:
            batch: list[Block] = []
            while unsent and self._backlog[index] + len(batch) < backlog_max:
                block = unsent.popleft()
                if block.state is BlockState.READY:
                    self._primary.pin(block)
                    batch.append(block)
                else:  # it was evicted while it waited
                    self._drop(index, 1)
                    self._refuse(index, [block])
            if batch:
                self._backlog[index] += len(batch)
                self._submit(index, batch)

    def _refuse(self, index: int, blocks: Collection[Block]) -> None:
        refused = self._refused[index]
        retry_at = self._clock() + RETRY_S
        for block in blocks:
            refused[block.key] = retry_at
            refused.move_to_end(block.key)
        while len(refused) > self._refused_max:
            refused.popitem(last=False)

    def _drop(self, index: int, count: int) -> None:
        name = self._tiers[index].name
        self._primary.metrics.inc("kvtiers_stores_dropped_total", name, "backlog", by=count)
        self._primary.metrics.inc("kvtiers_blocks_total", name, "store", "dropped", by=count)
