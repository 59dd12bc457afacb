"""Loads: reads a request's hits from tiers into slots of the region, and follows each load until it ends."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from ...tiers.blocks.keys import OffloadKey
from ...tiers.plain_logs import get_logger
from .decisions import LOADED, Decisions, Declined, Expected, Plan
from .guard import GuardedTier
from .jobs import Job, Jobs, TierShare
from .options import ManagerOptions
from .slots import Block, Slots
from .waits import EVERY_TIER, Lookup, Wait

logger = get_logger(__name__)

_FAILED_MAX = 65_536  # failed blocks that are remembered for earlier requests; the oldest are forgotten
_TOGETHER = 0.1  # two loads count as ended together if their times differ by less than this share
_RELEASE_SHARE = 0.1  # share of promotion_wait_s after which a starving request takes other requests' holds


class Loads:
    """Gives slots to hits and loads them. Ends the wait of hits that get no slot in time. Scheduler thread only.

    Remembers failed loads, so that requests from before the failure do not retry the load one after the other.

    Attributes:
        shares: share of each tier.
        num_failed: number of loads that failed or were given up.
    """

    def __init__(
        self,
        slots: Slots,
        tiers: Sequence[GuardedTier],
        jobs: Jobs,
        decisions: Decisions,
        options: ManagerOptions,
        clock: Callable[[], float],
    ) -> None:
        blocks_max = math.ceil(options.load_share * slots.num_blocks / max(1, len(tiers)))
        self.shares = [
            TierShare(index, tier.name, blocks_max, min(options.load_deadline_s, tier.deadline_s))
            for index, tier in enumerate(tiers)
        ]
        self.num_failed = 0
        self._slots = slots
        self._jobs = jobs
        self._decisions = decisions
        self._clock = clock
        self._step_s = 0.0  # recent time from the end of a step to the end of the next step
        self._step_ended_at: float | None = None  # end of the latest step, if it had requests to serve
        self._ended: list[tuple[Job, float]] = []  # loads that ended since the last step, and their seconds
        self._queued: list[set[OffloadKey]] | None = None  # per tier, hits that wait for slots; see ``_queue``
        self._room_wait_s = options.promotion_wait_s
        # (key, tier) -> number of the last load in which the key failed; the oldest first
        self._failed: OrderedDict[tuple[OffloadKey, int], int] = OrderedDict()
        slots.metrics.inc("kvtiers_promotion_room_expired_total", by=0)  # a rate misses the first 1 of a new series

    @property
    def are_awaited(self) -> bool:
        """Whether there are loads that were not given up."""
        return any(share.is_awaited for share in self.shares)

    @property
    def have_ended(self) -> bool:
        """Whether loads ended since the last ``begin_step``."""
        return bool(self._ended)

    def begin_step(self, now: float) -> None:
        """Learn from the loads that ended, and give up late ones. Call it before ``serve``."""
        self._learn()
        self._queued = None
        if self._step_ended_at is not None:
            self._step_s += (now - self._step_ended_at - self._step_s) / 4
        self._step_ended_at = now
        self.give_up_late(now)

    def _learn(self) -> None:
        """Take the times of the loads that ended since the last step.

        A long step hides when the loads ended, so the tier's own report counts. Loads that shared the tier's bandwidth
        and ended at about the same time count as one load.
        """
        for share in self.shares:
            ended = sorted(
                (job.begun_at + took_s, took_s, number)
                for number, (job, took_s) in enumerate(self._ended)
                if job.tier == share.index
            )
            times = [ended_at for ended_at, _, _ in ended]
            moved = list(accumulate(len(self._ended[number][0].blocks) for _, _, number in ended))
            for ended_at, took_s, number in ended:
                later = moved[-1] - moved[bisect_right(times, ended_at + _TOGETHER * took_s) - 1]
                job = self._ended[number][0]
                self._decisions.ways[share.index].learn(share.progress.moved - later - job.moved, took_s)
        self._ended.clear()

    def rest(self) -> None:
        """Note that this step has no requests to serve."""
        self._step_ended_at = None

    # -- decisions ---------------------------------------------------------------------------------------------------

    def judge_unasked(self, wait: Wait, lookups: Sequence[Lookup]) -> None:
        """Choose the tiers that a new request does not ask, and the order of the others; see ``decisions``.

        Args:
            lookups: of the tiers.
        """
        decisions, prompt, tried = self._decisions, wait.prompt, 0
        known = len(wait.found)
        blocks = decisions.blocks_of(prompt) if prompt is not None else 0
        for share in self.shares:
            index, total = share.index, share.progress.unreported + blocks - known
            expected = decisions.expect(index, total, wait.req_id, prompt, known, blocks) if blocks > known else None
            reason = decisions.judge(index, expected, decisions.ways[index].lookup_s)
            if reason == "trial":
                tried |= 1 << index
            elif reason not in LOADED:
                self._decline(wait, index, reason, expected)
        if prompt is not None and len(self.shares) > 1:
            order = decisions.order([share.progress.unreported + blocks - known for share in self.shares])
            lookups = [lookups[index] for index in order]
        wait.choose_tiers(lookups, tried)

    def _judge(self, wait: Wait, now: float) -> None:
        """Decide about the hits of undecided tiers. While answers are missing, hits can only be accepted."""
        if not wait.take_undecided():
            return
        parts: dict[int, tuple[int, list[OffloadKey]]] = {}  # tier -> number of its first hit, and its hits
        for number, (key, tier) in enumerate(wait.hits.items()):
            parts.setdefault(tier, (number, []))[1].append(key)
        known = len(wait.found) + len(wait.held) + len(wait.coming)
        end = known + len(wait.hits)
        for index, (first, keys) in sorted(parts.items(), key=lambda part: -part[1][0]):
            if index in wait.plans:
                continue
            share, queued = self.shares[index], self._queue(wait.served)[index]
            total = share.progress.unreported + len(queued) + sum(key not in queued for key in keys)
            # A request uses only a prefix, so without these hits it could not use the later hits.
            expected = self._decisions.expect(index, total, wait.req_id, wait.prompt, known + first, end)
            tried = wait.tried >> index & 1
            reason = "trial" if tried else self._decisions.judge(index, expected, may_try=not wait.owed)
            if reason in LOADED:
                plan = None
                if expected is not None and reason != "always":
                    plan = Plan(expected, now, len(keys), total, share.progress.moved)
                wait.plan(index, plan)
                queued.update(keys)
                self._decisions.count(share.name, reason)
            elif not wait.owed:
                self._decline(wait, index, reason, expected)
                end = known + first

    def _queue(self, served: Iterable[Wait]) -> list[set[OffloadKey]]:
        """Return per tier the hits that were accepted for loading and have no slot yet.

        Collected once per step, because a step may decide about hundreds of requests with thousands of hits each.
        """
        if self._queued is None:
            self._queued = [set() for _ in self.shares]
            for wait in served:
                for index in wait.plans:
                    self._queued[index].update(key for key, tier in wait.hits.items() if tier == index)
        return self._queued

    def _end_behind(self, wait: Wait, now: float) -> None:
        """End the request's loads from tiers that are slower than computing the rest. Arrived blocks are used."""
        for index, plan in list(wait.plans.items()):
            if plan is None:
                continue
            share, way = self.shares[index], self._decisions.ways[index]
            left = min(plan.blocks, len(wait.hits) + len(wait.coming))
            is_behind = left > 0 and self._decisions.is_behind(index, wait.req_id, plan, left, share.progress, now)
            if left and not is_behind:
                continue
            wait.plan(index, None)
            if is_behind:
                spent_s = now - plan.began_at
                for job in share.jobs_of(wait):  # other requests may wait for its blocks
                    self._give_up(job, "load:behind", expected_s=plan.expected.load_s, actual_s=spent_s)
                way.learn_late(plan.total, share.progress.moved - plan.moved, spent_s)
                self._decline(wait, index, "behind", plan.expected, spent_s)

    def _decline(self, wait: Wait, index: int, reason: str, expected: Expected | None, spent_s: float = 0.0) -> None:
        load_s = compute_s = 0.0
        if expected is not None:
            load_s, compute_s = expected.load_s, expected.gain_s + expected.queue_s
        wait.decline(index, Declined(reason, load_s, compute_s, spent_s))
        if wait.prompt is not None and not wait.plans and not wait.owed:
            self._decisions.steps.queue(wait.req_id, wait.prompt.computed)
        self._decisions.count(self.shares[index].name, reason)

    # -- slots for hits ----------------------------------------------------------------------------------------------

    def serve(self, wait: Wait, now: float) -> None:
        """Load the request's hits that get slots. Other hits wait, or count as misses after too long a wait."""
        if wait.plans:
            self._end_behind(wait, now)
        if wait.hits:
            self._judge(wait, now)
        if not wait.hits:
            return
        windows = {
            index: self._decisions.window(index, plan, self.shares[index].progress.moved, self._step_s)
            for index, plan in wait.plans.items()
        }
        rooms = [self._room(share, windows.get(share.index, 0), len(wait.hits)) for share in self.shares]
        for index, blocks in wait.take_slots(rooms, now).items():
            self._begin(wait, index, blocks, now, max(1.0, windows[index] / 2))
        if wait.starved_since is not None and now - wait.starved_since >= self._room_wait_s:
            self._end_starving(wait, now)
        for share in self.shares:
            if wait.capped_since is None or share.room or not wait.hit_tiers >> share.index & 1:
                continue
            is_stuck = now - wait.capped_since >= share.deadline_s or not share.is_awaited
            if is_stuck and self._miss_hits(wait, 1 << share.index, "region:tier_share"):
                self._slots.log_once(
                    f"loads {share.index}",
                    f"tier {share.name}: unreported loads fill the tier's whole share of the region. No more blocks "
                    "are loaded from this tier until it reports some (see kvtiers_promotion_room_expired_total)",
                )

    def release_latest_holds(self, served: Iterable[Wait], now: float) -> None:
        """Unpin the blocks held by the latest starving requests. Otherwise starving requests could block one another.

        Waits a while before that, because room may become free soon, and an unpinned block that no tier has may be
        evicted and lost.
        """
        if self.are_awaited:
            return
        starving = [wait for wait in served if wait.starved_since is not None]
        first_since = starving[0].starved_since if starving else None
        if first_since is None or now - first_since < _RELEASE_SHARE * self._room_wait_s:
            return
        wanted = min(len(starving[0].hits), sum(share.room for share in self.shares))
        while len(starving) > 1 and self._slots.room < wanted:
            starving.pop().let_go()

    def _end_starving(self, wait: Wait, now: float) -> None:
        """Treat the request's hits as misses, because the region had no room for them in time.

        While the engine computes other requests, the hits go on waiting: after a miss, the request would have to wait
        for these other requests anyway.
        """
        since = wait.starved_since
        if since is not None and now - since < self._room_wait_s + self._decisions.steps.queued_s(wait.req_id):
            return
        reason = "region:no_room"
        needed = len(wait.hits.keys() | wait.held.keys()) + wait.loading
        if needed > self._slots.num_blocks:
            self._slots.log_once(
                "load",
                f"region holds {self._slots.num_blocks} blocks, request {wait.req_id!r} needs {needed}: "
                "only its first blocks can be loaded; make region.size larger",
            )
            reason = "region:too_small"
        self._miss_hits(wait, EVERY_TIER, reason, needed=needed, has=self._slots.num_blocks)

    def _miss_hits(self, wait: Wait, tiers: int, reason: str, **facts: int) -> int:
        """Treat the request's hits in the tiers of a bit mask as misses. Other tiers may still have the keys."""
        for share in self.shares:
            if tiers >> share.index & 1:
                keys = [key for key, tier in wait.hits.items() if tier == share.index]
                self._slots.record.note(wait.req_id, reason, keys, share.name, **facts)
        count = wait.miss_hits(tiers)
        self._slots.metrics.inc("kvtiers_promotion_room_expired_total", by=count)
        return count

    # -- loads -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _room(share: TierShare, window: float, wanted: int) -> int:
        """Number of blocks to load from the tier now. 0 until half a window, or all wanted blocks, may be loaded."""
        free = window - share.awaited
        return int(min(share.room, free)) if free >= min(wanted, window / 2) else 0

    def _begin(self, wait: Wait, index: int, blocks: list[Block], now: float, job_blocks_max: float) -> None:
        for job in self.shares[index].begin(blocks, wait, now, job_blocks_max):
            for block in job.blocks:
                wait.await_block(block)
                if self.has_failed(wait, block.key, index):
                    wait.filling_ended(block.key)  # another request's load failed meanwhile: do not wait for this one
            if not self._jobs.submit(job):
                self._give_up(job, "load:error")

    def end(self, job: Job, succeeded: Collection[OffloadKey]) -> list[Block]:
        """End a load that was reported, or whose submission raised and whose deadline passed. Returns ready blocks."""
        share = self.shares[job.tier]
        share.room += len(job.blocks)
        share.progress.unreported -= len(job.blocks)
        share.progress.moved += len(job.blocks)
        share.progress.moved_at = self._clock()
        if len(succeeded) == len(job.blocks):
            seen_s = self._clock() - job.begun_at
            self._ended.append((job, job.took_s if 0 < job.took_s < seen_s else seen_s))
        failed = [block for block in job.blocks if block.key not in succeeded]
        if not job.is_over:
            self._note_failed(job, failed)
            self._slots.record.blocks("load:error", [block.key for block in failed], self.shares[job.tier].name)
        self._slots.end_promotion(failed, success=False)
        ready = self._slots.end_promotion([block for block in job.blocks if block.key in succeeded], success=True)
        if job.wait is not None:
            self._slots.record.promoted(job.wait.req_id, self.shares[job.tier].name, len(ready))
        self._end_wait(job, ready)
        return ready

    def give_up_late(self, now: float) -> None:
        """Give up loads that are past their deadline."""
        for share in self.shares:
            for job in share.take_late(now):
                self._slots.metrics.inc("kvtiers_deadline_expired_total", share.name, "load")
                # Not counted as a contained error: the storage hangs, which is not the tier's fault.
                message = f"tier {share.name}: loads that took longer than {share.deadline_s:g} s were given up"
                self._slots.log_once(f"late {share.index}", message)
                self._give_up(job, "load:late", deadline_s=share.deadline_s)

    def _give_up(self, job: Job, reason: str, **facts: float) -> None:
        """Stop waiting for a load. Its slots stay out of use until the tier reports the job."""
        self._slots.record.blocks(reason, [block.key for block in job.blocks], self.shares[job.tier].name, **facts)
        self._note_failed(job, job.blocks)
        self._slots.quarantine(job.blocks)
        self._end_wait(job, ())

    def _end_wait(self, job: Job, ready: Iterable[Block]) -> None:
        assert job.wait is not None
        if not job.is_over:
            job.is_over = True
            self.shares[job.tier].awaited -= len(job.blocks)
            job.wait.load_ended(len(job.blocks), ready, self._clock())

    # -- failures ----------------------------------------------------------------------------------------------------

    def is_excluded(self, wait: Wait, key: OffloadKey, tier: int) -> bool:
        """Whether the request must not load the key from the tier."""
        excluded = wait.excluded_tiers | wait.declined_tiers | wait.excluded.get(key, 0)
        return bool(excluded >> tier & 1) or self.has_failed(wait, key, tier)

    def has_failed(self, wait: Wait, key: OffloadKey, tier: int) -> bool:
        """Whether a load of the key from the tier failed since the request came."""
        return self._failed.get((key, tier), 0) > wait.came_after

    def _note_failed(self, job: Job, blocks: Collection[Block]) -> None:
        self.num_failed += bool(blocks)
        for block in blocks:
            self._failed[block.key, job.tier] = self.num_failed
            self._failed.move_to_end((block.key, job.tier))
        while len(self._failed) > max(_FAILED_MAX, self._slots.num_blocks):  # enough for any request
            self._failed.popitem(last=False)
