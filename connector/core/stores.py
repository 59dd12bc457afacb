"""Stores: copies blocks from the region to the tiers behind it.

A block that becomes loadable goes to every tier that takes stores, in one job per tier. Its slot stays pinned, and
loadable, until every tier has reported. Blocks beyond a tier's share of the region follow in later jobs.

A tier may refuse a block because the tier is cut off, full or behind. The block is offered to that tier again when it
is used, because a prefix that never leaves the region would otherwise never reach the tier. It is also offered again
when it has left the region and comes back from another tier. A refused block is not offered again for ``RETRY_S``, or
every request would try a dead tier. Each block has its own wait, so a block that is always refused delays no other
block.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from ...tiers.blocks.keys import OffloadKey
from .guard import GuardedTier
from .jobs import Job, Jobs
from .slots import Block, BlockState, Slots

RETRY_S = 10.0
REFUSED_MAX = 65_536  # keys remembered per tier (or the region's number of blocks if larger); the oldest are forgotten


class Stores:
    """The stores to the tiers. Scheduler thread only.

    Args:
        share: share of the region that blocks on their way to tiers may pin, for all tiers together.
        jobs: submits the stores. The caller calls ``end`` when a store ends.
        clock: seconds, monotonic.
    """

    def __init__(
        self, slots: Slots, tiers: Sequence[GuardedTier], share: float, jobs: Jobs, clock: Callable[[], float]
    ) -> None:
        self._slots = slots
        self._tiers = tiers
        self._jobs = jobs
        self._clock = clock
        self._backlog = [0] * len(tiers)  # blocks
        self._takers = [index for index, tier in enumerate(tiers) if tier.tier.takes_stores]
        self._backlog_max = share * slots.num_blocks / max(1, len(self._takers))
        self._unsent: list[deque[Block]] = [deque() for _ in tiers]  # per tier, until its backlog has room
        # Per tier: the keys it refused, and when each may be offered again; the latest refusal is last.
        self._refused: list[OrderedDict[OffloadKey, float]] = [OrderedDict() for _ in tiers]
        self._refused_max = max(REFUSED_MAX, slots.num_blocks)
        for index in self._takers:
            self._drop(index, ())  # start the series at 0, because a rate misses its first value

    def add(self, blocks: list[Block], num_tiers: int) -> None:
        """Store blocks to the first ``num_tiers`` tiers, and to later tiers that refused them before.

        If ``num_tiers`` is less than the number of tiers, the blocks were loaded from the next tier. A large load ends
        in several parts. So loaded blocks wait unsent if a tier's backlog is full, at most as many as the region has
        slots.
        """
        are_loaded = num_tiers < len(self._tiers)
        if self._tiers and not self._takers and not are_loaded:
            self._slots.record.blocks("store:read_only", [block.key for block in blocks])
        for index in self._takers if blocks else ():
            if index < num_tiers:
                self._offer(index, blocks, may_wait=are_loaded)
            else:
                self._offer_again(index, blocks)

    def use(self, keys: Collection[OffloadKey]) -> None:
        """Offer used blocks again to the tiers that refused them."""
        if any(self._refused):
            found = [self._slots.find(key) for key in dict.fromkeys(keys)]
            blocks = [block for block in found if block and block.state is BlockState.READY]
            for index in self._takers:
                self._offer_again(index, blocks)

    def send(self, index: int) -> None:
        """Submit a tier's unsent blocks, as far as its backlog has room."""
        self._send(index, self._backlog_max)

    def end(self, job: Job, succeeded: Collection[OffloadKey]) -> None:
        """End a job: unpin its blocks and note the refused ones."""
        self._backlog[job.tier] -= len(job.blocks)
        refused = [block for block in job.blocks if block.key not in succeeded]
        self._note_refused(job.tier, refused)
        name = self._tiers[job.tier].name
        self._slots.record.ended(name, "stored", succeeded)
        if refused:
            self._slots.record.ended(name, "store:error", [block.key for block in refused])
        for block in reversed(job.blocks):  # in reverse order, so that a prefix's first blocks are evicted last
            self._slots.unpin(block)

    def drop_unsent(self) -> None:
        """Drop the unsent blocks, because the region is about to forget them."""
        for index, unsent in enumerate(self._unsent):
            if unsent:
                self._drop(index, unsent)
                unsent.clear()

    def close(self) -> None:
        """Submit all unsent blocks, ignoring the backlog limit, because the region is about to end. Accept no more."""
        for index in self._takers:
            self._send(index, self._slots.num_blocks)
        self._takers = []

    def _offer_again(self, index: int, blocks: list[Block]) -> None:
        refused = self._refused[index]
        if refused:
            now = self._clock()
            due = [block for block in blocks if refused.get(block.key, math.inf) <= now]
            if due:
                self._offer(index, due)

    def _offer(self, index: int, blocks: list[Block], *, may_wait: bool = False) -> None:
        waits = may_wait and len(self._unsent[index]) + len(blocks) <= self._slots.num_blocks
        if self._backlog[index] >= self._backlog_max and not waits:
            self._drop(index, blocks)
            self._slots.log_once(
                f"backlog {index}",
                f"tier {self._tiers[index].name}: {self._backlog[index]} of the region's {self._slots.num_blocks} "
                "blocks wait for this tier, which gets no more until it has stored some "
                "(see kvtiers_stores_dropped_total)",
            )
            return
        if refused := self._refused[index]:
            for block in blocks:
                refused.pop(block.key, None)
        self._unsent[index].extend(blocks)
        self._send(index, self._backlog_max)

    def _send(self, index: int, backlog_max: float) -> None:
        """Submit unsent blocks until the backlog has ``backlog_max`` blocks, rounded up."""
        unsent = self._unsent[index]
        batch: list[Block] = []
        while unsent and self._backlog[index] < backlog_max:
            block = unsent.popleft()
            if block.state is BlockState.READY:
                self._slots.pin(block)
                self._backlog[index] += 1
                batch.append(block)
            else:  # the block was evicted while it waited
                self._drop(index, [block])
        if batch:
            self._jobs.submit(Job(index, batch))

    def _drop(self, index: int, blocks: Collection[Block]) -> None:
        """Count blocks that the tier does not get now, and offer them again later."""
        name = self._tiers[index].name
        self._slots.record.blocks("store:backlog", [block.key for block in blocks], name)
        self._slots.metrics.inc("kvtiers_stores_dropped_total", name, "backlog", by=len(blocks))
        self._slots.metrics.inc("kvtiers_blocks_total", name, "store", "dropped", by=len(blocks))
        self._note_refused(index, blocks)

    def _note_refused(self, index: int, blocks: Collection[Block]) -> None:
        refused = self._refused[index]
        retry_at = self._clock() + RETRY_S
        for block in blocks:
            refused[block.key] = retry_at
            refused.move_to_end(block.key)
        while len(refused) > self._refused_max:
            refused.popitem(last=False)
