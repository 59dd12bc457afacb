"""Promotion: loads of blocks from the tiers into slots of the region, from a request's hits to the end of each load."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from ...tiers.blocks.keys import OffloadKey
from .jobs import Job, TierJobs
from .options import TieringOptions
from .primary import Block, CPUPrimaryTier
from .request import EVERY_TIER, Request

JOB_BLOCKS_MIN = 64  # a smaller load is not split
_FAILED_MAX = 65_536  # failed blocks that are remembered, for requests that came before; the oldest are forgotten
_JOBS_PER_SHARE = 4  # so that a tier that ends one job has others to work on until that one is replaced
_RELEASE_SHARE = 0.1  # part of promotion_wait_s that the first starving request waits before others lose their holds


class PromotionRoom:
    """Gives hits slots of the region, and ends the wait of hits that get none in time. Scheduler thread only."""

    def __init__(self, primary: CPUPrimaryTier, loads: Loads, options: TieringOptions) -> None:
        self._primary = primary
        self._loads = loads
        self._wait_s = options.promotion_wait_s
        primary.metrics.inc("kvtiers_promotion_room_expired_total", by=0)  # a rate misses the first 1 of a new series

    def serve(self, request: Request, now: float) -> None:
        """Load the request's hits that get slots. Other hits wait on; they count as misses if they waited too long."""
        if not request.hits:
            return
        for tier in self._loads.by_tier:
            is_stuck = not tier.room and (now >= request.capped_until or not tier.is_awaited)
            if is_stuck and request.hit_tiers >> tier.index & 1 and self._miss_hits(request, 1 << tier.index):
                self._primary.log_once(
                    f"loads {tier.index}",
                    f"tier {tier.name}: loads that it has not reported fill its whole share of the region: "
                    "no more is loaded from it until it reports some (see kvtiers_promotion_room_expired_total)",
                )
        by_tier = request.take_slots([tier.room for tier in self._loads.by_tier], now)
        if request.starved_since is not None and now - request.starved_since >= self._wait_s:
            self._end_starving(request)
        for index, blocks in by_tier.items():
            self._loads.begin(request, index, blocks, now)

    def release_latest_holds(self, waiting: Iterable[Request], now: float) -> None:
        """Unpin the blocks held by the latest starving requests. Otherwise starving requests could block one another.

        Not immediately: room may come soon, and an unpinned block that no tier has would be lost if evicted.
        """
        if self._loads.are_awaited:
            return
        starving = [request for request in waiting if request.starved_since is not None]
        first_since = starving[0].starved_since if starving else None
        if first_since is None or now - first_since < _RELEASE_SHARE * self._wait_s:
            return
        wanted = min(len(starving[0].hits), sum(tier.room for tier in self._loads.by_tier))
        while len(starving) > 1 and self._primary.room < wanted:
            starving.pop().let_go()

    def _end_starving(self, request: Request) -> None:
        """Treat the request's hits as misses, because the region had no room for them in time."""
        needed = len(request.hits.keys() | request.held.keys()) + request.loading
        if needed > self._primary.num_blocks:
            self._primary.log_once(
                "load",
                f"region holds {self._primary.num_blocks} blocks, request {request.req_id!r} needs {needed}: "
                "nothing of it can be loaded beyond its first blocks that fit; make region.size larger",
            )
        self._miss_hits(request, EVERY_TIER)

    def _miss_hits(self, request: Request, tiers: int) -> int:
        """Treat the request's hits in the tiers of a bit mask as misses. Other tiers may have the keys."""
        count = request.miss_hits(tiers)
        self._primary.metrics.inc("kvtiers_promotion_room_expired_total", by=count)
        return count


class Loads:
    """The loads of all tiers, from their submission to their end. Scheduler thread only.

    Failed loads are remembered, for requests that came before the failure: they would retry and wait in turn.

    Attributes:
        by_tier: the unreported loads of each tier.
        num_failed: loads that failed or were given up.
    """

    def __init__(
        self, primary: CPUPrimaryTier, by_tier: Sequence[TierLoads], jobs: TierJobs, clock: Callable[[], float]
    ) -> None:
        self.by_tier = by_tier
        self.num_failed = 0
        # (key, tier) -> number of the last load in which it failed; the oldest first
        self._failed: OrderedDict[tuple[OffloadKey, int], int] = OrderedDict()
        self._primary = primary
        self._jobs = jobs
        self._clock = clock

    @property
    def are_awaited(self) -> bool:
        """Whether there are loads that were not given up."""
        return any(tier.is_awaited for tier in self.by_tier)

    def begin(self, request: Request, index: int, blocks: list[Block], now: float) -> None:
        """Load blocks from the tier of an index. The caller has checked the tier's ``room``."""
        for job in self.by_tier[index].begin(blocks, request, now):
            for block in job.blocks:
                if self.has_failed(request, block.key, index):
                    request.look_again()  # another request's load of it failed meanwhile: do not wait for this one
                else:
                    request.await_block(block)
            if not self._jobs.submit(job):
                self._give_up(job)

    def end(self, job: Job, succeeded: Collection[OffloadKey]) -> list[Block]:
        """End a load that its tier reported, or that raised and is past its deadline. Returns the ready blocks."""
        self.by_tier[job.tier].end(job)
        failed = [block for block in job.blocks if block.key not in succeeded]
        if not job.ended:
            self._note_failed(job, failed)
        self._primary.end_promotion(failed, success=False)
        ready = self._primary.end_promotion([block for block in job.blocks if block.key in succeeded], success=True)
        self._end_wait(job, ready)
        return ready

    def give_up_late(self, now: float) -> None:
        """Give up loads that are past their deadline."""
        for tier in self.by_tier:
            for job in tier.take_late(now):
                self._primary.metrics.inc("kvtiers_deadline_expired_total", tier.name, "load")
                # Not counted as a contained error: the storage hangs, which is not the tier's fault.
                message = f"tier {tier.name}: loads over {tier.deadline_s:g} s are given up"
                self._primary.log_once(f"late {tier.index}", message)
                self._give_up(job)

    def is_excluded(self, request: Request, key: OffloadKey, tier: int) -> bool:
        """Whether the request must not ask the tier for the key."""
        excluded = request.excluded_tiers | request.excluded.get(key, 0)
        return bool(excluded >> tier & 1) or self.has_failed(request, key, tier)

    def has_failed(self, request: Request, key: OffloadKey, tier: int) -> bool:
        """Whether a load of the key from the tier failed since the request came."""
        return self._failed.get((key, tier), 0) > request.came_after

    def _give_up(self, job: Job) -> None:
        """Wait for a load no longer. Its slots stay out of use until the tier reports the job."""
        self._note_failed(job, job.blocks)
        self._primary.quarantine(job.blocks)
        self._end_wait(job, ())

    def _end_wait(self, job: Job, ready: Iterable[Block]) -> None:
        assert job.request is not None
        if not job.ended:
            job.ended = True
            job.request.load_ended(len(job.blocks), ready, self._clock())

    def _note_failed(self, job: Job, blocks: Collection[Block]) -> None:
        """Exclude the job's tier for these blocks, for every request that came before: they would retry in turn."""
        self.num_failed += bool(blocks)
        for block in blocks:
            self._failed[block.key, job.tier] = self.num_failed
            self._failed.move_to_end((block.key, job.tier))
        while len(self._failed) > _FAILED_MAX:
            self._failed.popitem(last=False)


class TierLoads:
    """The loads of one tier, in the order of their deadlines. Scheduler thread only.

    A load that was given up still counts against the share: its slots are out of use until the tier reports the load.

    Args:
        index: of the tier.
        name: of the tier, for logs and metrics.
        blocks_max: limit of the blocks in unreported loads, 1 or more.
        deadline_s: seconds from a load's submission until it is given up.

    Attributes:
        job_blocks_max: limit of the blocks in one job. A larger load is split into several jobs, so that the jobs that
            the tier has not begun by their deadline are reported on time, whatever becomes of the other jobs.
    """

    def __init__(self, index: int, name: str, blocks_max: int, deadline_s: float) -> None:
        self.index = index
        self.name = name
        self.deadline_s = deadline_s
        self.job_blocks_max = max(JOB_BLOCKS_MIN, blocks_max // _JOBS_PER_SHARE)
        self._blocks_max = blocks_max
        self._unreported = 0  # blocks
        self._jobs: deque[Job] = deque()

    @property
    def room(self) -> int:
        """Number of blocks that may be loaded now."""
        return self._blocks_max - self._unreported

    @property
    def is_awaited(self) -> bool:
        """Whether there are loads that were not given up."""
        return bool(self._jobs)

    def begin(self, blocks: list[Block], request: Request, now: float) -> list[Job]:
        """Make jobs that load these blocks. The caller has checked ``room``."""
        for block in blocks:
            block.tier = self.index
        size = self.job_blocks_max
        jobs = [
            Job(self.index, blocks[start : start + size], request, late_at=now + self.deadline_s)
            for start in range(0, len(blocks), size)
        ]
        self._jobs.extend(jobs)
        self._unreported += len(blocks)
        return jobs

    def end(self, job: Job) -> None:
        """Note that the tier reported the job."""
        self._unreported -= len(job.blocks)

    def take_late(self, now: float) -> list[Job]:
        """Return the loads to give up now, and forget loads that ended."""
        late = []
        while self._jobs and (self._jobs[0].ended or now >= self._jobs[0].late_at):
            job = self._jobs.popleft()
            if not job.ended:
                late.append(job)
        return late
