"""RankTransfers: moves blocks between one rank's KV tensors and its own tier.

Blocks pass through the slots of a small region that belongs to this rank. So storage never touches a KV tensor: a read
that hangs may end at any later time, and then writes into its slot. No other transfer gets that slot until the tier has
reported the read. The tier does its I/O in other processes, or in threads of its own, and nothing here waits for it.

- A store copies blocks to slots. Then it has ended for the engine, which may reuse the blocks. Stores hold at most half
  of the slots. Blocks without a free slot are dropped and counted.
- A load waits for slots and takes them in pieces. Its blocks are copied to the KV tensors as they arrive.
- A load ends after ``load_deadline_s`` at the latest. The blocks that were not loaded are reported as failed.
- A load that still waits for slots is given up if no copy runs and every job in the tier is past its deadline: no slot
  will then become free until storage answers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...tiers.base import JobMetadata, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey
from ...tiers.errors import ConfigError
from ...tiers.metrics import Metrics
from ...tiers.plain_logs import get_logger
from ..base import CPULoadStoreSpec, GPULoadStoreSpec, OffloadingHandler
from ..core.guard import GuardedTier, shut_down_tiers
from ..core.pacing import DRAIN_SHARE, drain

logger = get_logger(__name__)

PIECE_BYTES_MAX = 64 << 20  # bytes of a load in one job of the tier: a piece is copied while the next pieces are read
STORE_SHARE = 0.5  # share of the slots for stores; the other slots are for loads only


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that has ended: nothing touches its KV blocks any more.

    Attributes:
        moved_bytes: copied between the KV tensors and slots.
        failed_blocks: ids of the KV blocks that a load did not fill.
    """

    job_id: int
    moved_bytes: int
    took_s: float
    failed_blocks: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Load:
    """A load. ``next_key``: index of the first key without a slot. ``given_up``: the reason; "": not given up."""

    job_id: int
    keys: Sequence[OffloadKey]
    target: GPULoadStoreSpec
    began_at: float
    done: list[bool]
    next_key: int = 0
    reads: int = 0
    copies: set[int] = field(default_factory=set)
    given_up: str = ""


@dataclass(slots=True, eq=False)
class _Part:
    """Keys with their slots, in the tier or in a copy. ``load``: the load whose keys they are, from ``first`` on.

    ``is_void``: a copy from KV blocks that may have been overwritten meanwhile. ``hangs_from``: time by which the tier
    should have reported the job.
    """

    keys: Sequence[OffloadKey]
    slots: list[int]
    load: _Load | None = None
    first: int = 0
    is_void: bool = False
    hangs_from: float = math.inf


class RankTransfers:
    """The transfers of one rank. Only the engine's thread in the rank's worker may call it.

    Args:
        tier: the rank's tier, over the region of the slots. This object shuts it down.
        metrics: the metrics of ``tier``.
        handlers: copy from KV tensors to slots, and back. This object shuts them down.
        slots: number of slots; at least 2.
        slot_bytes: bytes of one slot.
        blocks_per_chunk: KV blocks in one slot.
        load_deadline_s: see the module.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        metrics: Metrics,
        handlers: tuple[OffloadingHandler, OffloadingHandler],
        *,
        slots: int,
        slot_bytes: int,
        blocks_per_chunk: int,
        load_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._guard = GuardedTier(tier, metrics, clock)
        self._metrics = metrics
        self._to_slots, self._to_blocks = handlers
        self._free = list(range(slots))
        self._for_stores = max(1, int(slots * STORE_SHARE))  # free slots that stores may take
        self._slot_bytes = slot_bytes
        self._factor = blocks_per_chunk
        self._piece = max(1, min(slots // 2, PIECE_BYTES_MAX // slot_bytes))
        self._load_deadline_s = load_deadline_s
        self._clock = clock
        self._ids = itertools.count(1)  # of copies and of the tier's jobs; 0 and below are a tier's own
        self._copying: dict[int, tuple[_Part, int | None]] = {}  # -> part, and the job if it is a store
        self._in_tier: dict[int, _Part] = {}
        self._loads: dict[int, _Load] = {}
        self._ended: list[Ended] = []
        self._stored: list[OffloadKey] = []
        self._lost: set[OffloadKey] = set()

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def store(self, job_id: int, keys: Sequence[OffloadKey], source: GPULoadStoreSpec) -> None:
        """Start to copy blocks to slots, and from there to the tier."""
        kept = keys[: min(self._for_stores, len(self._free))]
        if dropped := keys[len(kept) :]:
            self._drop(dropped, "staging_full")
        if not kept:
            self._ended.append(Ended(job_id, 0, 0.0))
            return
        part = _Part(kept, self._take(len(kept)))
        self._for_stores -= len(kept)
        copy_id = next(self._ids)
        self._copying[copy_id] = (part, job_id)
        blocks = part_of(source, self._factor, 0, len(kept))
        if not self._to_slots.transfer_async(copy_id, (blocks, CPULoadStoreSpec(part.slots))):
            self._end_copy(copy_id, succeeded=False)

    def drop_store(self, job_id: int, keys: Sequence[OffloadKey]) -> None:
        """End a store whose blocks may have been overwritten since the engine queued it."""
        self._drop(keys, "reset")
        self._ended.append(Ended(job_id, 0, 0.0))

    def drop_copies(self) -> None:
        """Void the running copies of stores. Their blocks are dropped: their KV may have been overwritten meanwhile."""
        for part, job_id in self._copying.values():
            part.is_void |= job_id is not None

    def load(self, job_id: int, keys: Sequence[OffloadKey], target: GPULoadStoreSpec) -> None:
        """Start to fill blocks from the tier."""
        self._loads[job_id] = _Load(job_id, keys, target, self._clock(), [False] * len(keys))
        self._advance()

    def give_up(self, job_id: int, why: str) -> None:
        """End a load when its running copies have ended. The blocks that have not arrived are reported as failed."""
        if (load := self._loads.get(job_id)) is not None:
            self._give_up(load, why)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Note that blocks are in use, without reading them."""
        self._guard.touch(keys)

    def take_ended(self) -> list[Ended]:
        """Advance all transfers, and return those that ended since the last call. Does not wait."""
        self._poll()
        ended, self._ended = self._ended, []
        return ended

    def take_report(self) -> tuple[list[OffloadKey], set[OffloadKey]]:
        """Return the stored and the lost keys since the last call.

        A key is lost if it could not be stored or loaded, or was removed from the tier.
        """
        stored, lost = self._stored, self._lost
        self._stored, self._lost = [], set()
        return [key for key in stored if key not in lost], lost

    def wait(self, job_ids: Collection[int]) -> None:
        """Wait until these jobs touch no KV block any more. Gives loads up, without waiting for storage."""
        for job_id in job_ids:
            if (load := self._loads.get(job_id)) is not None:
                self._give_up(load, "the engine took its blocks back")
                self._to_blocks.wait(load.copies)
        wanted = set(job_ids)
        self._to_slots.wait([copy_id for copy_id, (_, job_id) in self._copying.items() if job_id in wanted])

    def shutdown(self, within_s: float) -> None:
        """Finish stores for most of ``within_s``, then end all transfers and the tier."""

        def is_idle() -> bool:
            self._poll()
            return not self._copying and all(part.load is not None for part in self._in_tier.values())

        if not drain(is_idle, within_s * DRAIN_SHARE):
            parts = [part for part in self._in_tier.values() if part.load is None]
            parts += [part for part, job_id in self._copying.values() if job_id is not None]
            count = sum(len(part.keys) for part in parts)
            self._metrics.inc("kvtiers_stores_dropped_total", self._guard.name, "shutdown", by=count)
            logger.warning("%d blocks were not stored when the engine ended", count)
        for handler in (self._to_slots, self._to_blocks):
            handler.shutdown()
        shut_down_tiers([self._guard], within_s * (1 - DRAIN_SHARE))

    # -- privates ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        for handler in (self._to_slots, self._to_blocks):
            for copied in handler.get_finished():
                self._end_copy(copied.job_id, succeeded=copied.success, took_s=copied.transfer_time)
        self._guard.on_schedule_end()
        for result in self._guard.take_ended():
            self._end_part(self._in_tier.pop(result.job_id), frozenset(result.successful_keys))
        now = self._clock()
        for event in self._guard.take_events():
            if event.removed:
                self._lost.update(event.keys)
        for load in list(self._loads.values()):
            if not load.given_up and now >= load.began_at + self._load_deadline_s:
                self._metrics.inc("kvtiers_deadline_expired_total", self._guard.name, "load")
                self._doubt(load, f"the load took longer than load_deadline_s, {self._load_deadline_s:g} s")
        self._advance()

    def _advance(self) -> None:
        """Give free slots to loads in their order, and end the loads that have nothing left to do."""
        for load in list(self._loads.values()):
            while not load.given_up and self._free and load.next_key < len(load.keys):
                first = load.next_key
                keys = load.keys[first : first + min(self._piece, len(self._free))]
                load.next_key += len(keys)
                load.reads += 1
                self._submit(_Part(keys, self._take(len(keys)), load, first))
            if not load.given_up and load.next_key < len(load.keys) and self._hangs():
                self._metrics.inc("kvtiers_promotion_room_expired_total", by=len(load.keys) - load.next_key)
                self._doubt(load, "storage hangs, and late reads and stores hold all of cpu_bytes_to_use")
            if not load.copies and (load.given_up or (not load.reads and load.next_key == len(load.keys))):
                self._end_load(load)

    def _submit(self, part: _Part) -> None:
        job_id = next(self._ids)
        part.hangs_from = self._clock() + self._guard.deadline_s
        self._in_tier[job_id] = part
        job = JobMetadata(job_id, part.keys, np.asarray(part.slots, np.int32))
        (self._guard.submit_store if part.load is None else self._guard.submit_load)(job)

    def _end_copy(self, copy_id: int, *, succeeded: bool, took_s: float = 0.0) -> None:
        part, job_id = self._copying.pop(copy_id)
        if part.load is not None:
            part.load.copies.discard(copy_id)
            if succeeded:
                part.load.done[part.first : part.first + len(part.keys)] = [True] * len(part.keys)
            else:
                self._metrics.inc("kvtiers_blocks_total", self._guard.name, "load", "failed", by=len(part.keys))
                self._give_up(part.load, "a copy to the KV tensors failed")
            self._release(part)
            return
        assert job_id is not None
        self._ended.append(Ended(job_id, len(part.keys) * self._slot_bytes if succeeded else 0, took_s))
        if succeeded and not part.is_void:
            self._submit(part)
            return
        self._drop(part.keys, "reset" if part.is_void else "copy_failed")
        self._release(part)

    def _end_part(self, part: _Part, succeeded: Collection[OffloadKey]) -> None:
        """Note that the tier no longer uses the slots of a part."""
        self._lost.update(key for key in part.keys if key not in succeeded)
        if part.load is None:
            self._stored += [key for key in part.keys if key in succeeded]
            self._release(part)
            return
        part.load.reads -= 1
        count = next((i for i, key in enumerate(part.keys) if key not in succeeded), len(part.keys))
        if part.load.given_up:
            count = 0
        self._release(_Part((), part.slots[count:], part.load))
        if count:
            copied = _Part(part.keys[:count], part.slots[:count], part.load, part.first)
            copy_id = next(self._ids)
            self._copying[copy_id] = (copied, None)
            part.load.copies.add(copy_id)
            blocks = part_of(part.load.target, self._factor, part.first, part.first + count)
            if not self._to_blocks.transfer_async(copy_id, (CPULoadStoreSpec(copied.slots), blocks)):
                self._end_copy(copy_id, succeeded=False)
        if count < len(part.keys):  # later blocks of the prompt are useless
            self._give_up(part.load, "the tier does not have all blocks of the load")

    def _drop(self, keys: Collection[OffloadKey], reason: str) -> None:
        self._lost.update(keys)
        self._metrics.inc("kvtiers_stores_dropped_total", self._guard.name, reason, by=len(keys))

    def _give_up(self, load: _Load, why: str) -> None:
        """Read and copy no more blocks of a load. It ends when its running copies have ended."""
        load.given_up = load.given_up or why

    def _doubt(self, load: _Load, why: str) -> None:
        """Give up a load, and report its unread blocks as lost, so that the engine does not wait for them again."""
        self._give_up(load, why)
        for part in self._in_tier.values():
            if part.load is load:
                self._lost.update(part.keys)
        self._lost.update(load.keys[load.next_key :])

    def _hangs(self) -> bool:
        """Whether no slot will become free until storage answers again."""
        now = self._clock()
        return not self._copying and all(now >= part.hangs_from for part in self._in_tier.values())

    def _end_load(self, load: _Load) -> None:
        del self._loads[load.job_id]
        failed = [i for i, is_done in enumerate(load.done) if not is_done]
        blocks = [int(b) for i in failed for b in part_of(load.target, self._factor, i, i + 1).block_ids]
        if failed:
            logger.warning("%d of %d blocks were not loaded: %s", len(failed), len(load.keys), load.given_up)
        moved = (len(load.keys) - len(failed)) * self._slot_bytes
        self._ended.append(Ended(load.job_id, moved, self._clock() - load.began_at, tuple(blocks)))

    def _take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _release(self, part: _Part) -> None:
        self._free += part.slots
        self._for_stores += len(part.slots) if part.load is None else 0


def check_slots(size: int, slot_bytes: int) -> int:
    """Return how many slots fit into ``size`` bytes.

    Raises:
        ConfigError: fewer than 2, one for stores and one for loads.
    """
    if size < 2 * slot_bytes:
        raise ConfigError(f"{size} bytes do not hold two blocks of {slot_bytes} bytes", field="cpu_bytes_to_use")
    return size // slot_bytes


def part_of(blocks: GPULoadStoreSpec, factor: int, first: int, end: int) -> GPULoadStoreSpec:
    """Return the KV blocks of the slots from ``first`` to ``end``, exclusive. ``factor``: KV blocks in a slot."""
    ids: list[int] = []
    sizes, indices = [], []
    for of_slots, at, size, index in _groups(blocks, factor):
        low, high = max(first - of_slots.start, 0), min(end, of_slots.stop) - of_slots.start
        skip = index % factor
        begin = max(0, low * factor - skip)
        stop = min(size, high * factor - skip)
        sizes.append(max(0, stop - begin))
        indices.append(index + begin if sizes[-1] else 0)
        ids += blocks.block_ids[at + begin : at + begin + sizes[-1]].tolist()
    return GPULoadStoreSpec(ids, sizes, indices)


def _groups(blocks: GPULoadStoreSpec, factor: int) -> Iterator[tuple[range, int, int, int]]:
    """Yield for each KV cache group: its slots, its first block's place, its number of blocks, its block index."""
    slot = at = 0
    for size, index in zip(blocks.group_sizes, blocks.block_indices, strict=True):
        slots = -(-(index % factor + size) // factor) if size else 0
        yield range(slot, slot + slots), at, size, index
        slot += slots
        at += size
