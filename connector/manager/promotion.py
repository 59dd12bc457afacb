"""State of promotions from the tiers to the region: waiting requests, jobs, failed loads, and each tier's share."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtiers.connector.manager.primary import Block
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey

EVERY_TIER = -1  # as a bit mask
JOB_BLOCKS_MIN = 64  # a smaller load is not split
_FAILED_S = 30.0  # how long a failed load is remembered, for requests that came before it failed
_JOBS_PER_SHARE = 4  # so that a tier that ends one job has others to work on until that one is replaced


@dataclass(slots=True, eq=False)
class Request:
    """A request that missed the region. It waits for the keys in ``owed``, ``hits`` and ``coming``.

    A key is in only one of the three, except that a hit that waits for room may be in ``coming`` for another request.

    Attributes:
        came_at: time of its first lookup in the tiers.
        asked_at: time of its latest lookup.
        step: number of the step of its latest lookup.
        owed: keys that a tier owes an answer for.
        was_owed: ``owed`` as it was in the round of lookups before.
        owing: bit mask of the tiers that owe answers.
        waited_s: seconds it has waited for owed answers; long gaps between lookups count only in part.
        silences: tier -> (number of its answers so far, seconds without a new one); polled tiers only.
        gave_up: bit mask of the tiers whose answers it no longer waits for.
        expired: keys that are absent because it gave up waiting; used to count each key once.
        barred: bit mask of the tiers that it must not load from.
        refused: key -> bit mask of the tiers whose copy cannot be loaded.
        hits: key -> tier; keys to promote that have no slot yet.
        hit_tiers: bit mask of the tiers that have hits. May include too many tiers until the hits are scanned again.
        starved_since: since when hits have waited for room; None if none does.
        starved_for: the first hit that got no room when hits were last scanned.
        capped_until: until when hits wait for their tiers' shares of the region; infinite if none waits for a share.
        coming: keys whose blocks are being filled. Each block notifies the request when that ends.
        loading: number of blocks that tiers are loading for this request.
        held: blocks pinned for this request until it loads them, finishes, or ``held_until`` passes.
        has_news: an answer may have changed since the latest lookup.
        must_ask_again: every owed key must be looked up again: the request gave up waiting, or a tier is polled.
    """

    context: ReqContext
    came_at: float
    asked_at: float
    req_id: str = field(init=False)
    step: int = -1
    owed: set[OffloadKey] = field(default_factory=set)
    was_owed: set[OffloadKey] = field(default_factory=set)
    owing: int = 0
    waited_s: float = 0.0
    silences: dict[int, tuple[int, float]] = field(default_factory=dict)
    gave_up: int = 0
    expired: set[OffloadKey] = field(default_factory=set)
    barred: int = 0
    refused: dict[OffloadKey, int] = field(default_factory=dict)
    hits: dict[OffloadKey, int] = field(default_factory=dict)
    hit_tiers: int = 0
    starved_since: float | None = None
    starved_for: OffloadKey | None = None
    capped_until: float = math.inf
    coming: set[OffloadKey] = field(default_factory=set)
    loading: int = 0
    held: dict[OffloadKey, Block] = field(default_factory=dict)
    held_until: float = 0.0
    has_news: bool = False
    must_ask_again: bool = False

    def __post_init__(self) -> None:
        self.req_id = self.context.req_id

    def await_block(self, block: Block) -> None:
        """Wait until the block is no longer being filled."""
        self.owed.discard(block.key)
        if block.key not in self.coming:
            self.coming.add(block.key)
            block.add_waiter(self)

    def filling_ended(self, key: OffloadKey) -> None:
        """Note that the key's block is no longer being filled."""
        self.coming.discard(key)
        self.has_news = True

    def drop_hits(self) -> None:
        """Stop waiting for room. A later wait starts from zero."""
        self.hits = {}
        self.hit_tiers = 0
        self.starved_since = None
        self.capped_until = math.inf
        self.has_news = True

    def stop_waiting(self) -> None:
        """Stop waiting for anything. A later wait starts from zero."""
        self.drop_hits()
        self.owed.clear()
        self.was_owed.clear()
        self.owing = 0
        self.waited_s = 0.0
        self.silences.clear()
        self.gave_up = 0
        self.expired.clear()
        self.coming.clear()


@dataclass(slots=True, eq=False)
class Job:
    """A submitted job. A store pins its blocks; a load has a request.

    Attributes:
        late_at: time at which a load is given up.
        ended: the load was reported or given up.
    """

    tier: int
    blocks: list[Block]
    request: Request | None = None
    late_at: float = 0.0
    ended: bool = False


class FailedLoads:
    """Loads that failed recently, remembered for requests that came before the failure. Scheduler thread only.

    Attributes:
        failed_at: (key, tier) -> time of the failure; the oldest first.
    """

    def __init__(self) -> None:
        self.failed_at: OrderedDict[tuple[OffloadKey, int], float] = OrderedDict()

    def add(self, job: Job, blocks: Iterable[Block], now: float) -> None:
        """Exclude the job's tier for these blocks: for the job's request, and for every request that came before."""
        assert job.request is not None
        refused = job.request.refused
        failed_at = self.failed_at
        while failed_at and now - next(iter(failed_at.values())) >= _FAILED_S:
            failed_at.popitem(last=False)
        for block in blocks:
            refused[block.key] = refused.get(block.key, 0) | 1 << job.tier
            failed_at[block.key, job.tier] = now
            failed_at.move_to_end((block.key, job.tier))

    def is_excluded(self, request: Request, key: OffloadKey, tier: int) -> bool:
        """Whether the request must not ask the tier for the key."""
        refused = request.barred | request.refused.get(key, 0)
        return bool(refused >> tier & 1) or self.has_failed(request, key, tier)

    def has_failed(self, request: Request, key: OffloadKey, tier: int) -> bool:
        """Whether a load of the key from the tier failed since the request came."""
        return self.failed_at.get((key, tier), -math.inf) > request.came_at


class TierLoads:
    """The loads of one tier, in the order of their deadlines. Scheduler thread only.

    A load that was given up still counts against the share: its slots are out of use until the tier reports the load.

    Args:
        blocks_max: limit of the blocks in unreported loads, 1 or more.
        deadline_s: seconds from a load's submission until it is given up.

    Attributes:
        job_blocks_max: limit of the blocks in one job. A larger load is split into several jobs, so that the jobs that
            the tier has not begun by their deadline are reported on time, whatever becomes of the other jobs.
    """

    def __init__(self, blocks_max: int, deadline_s: float) -> None:
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

    def begin(self, blocks: list[Block], tier: int, request: Request, now: float) -> list[Job]:
        """Make jobs that load these blocks. The caller has checked ``room``."""
        for block in blocks:
            block.tier = tier
        size = self.job_blocks_max
        jobs = [
            Job(tier, blocks[start : start + size], request, late_at=now + self.deadline_s)
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
