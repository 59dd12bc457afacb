"""What is on its way from tiers to the region: requests that wait, jobs, and the part of it that a tier may hold."""

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
_FAILED_S = 30.0  # how long a failed load is remembered for those that came before it failed
_JOBS_PER_SHARE = 4  # a tier that has ended one has the next while that is replaced


@dataclass(slots=True, eq=False)
class Request:
    """A request that missed the region. It waits for the keys in ``owed``, ``hits`` and ``coming``.

    A key is in one of them, save that a hit that waits for room may be coming for another request.

    Attributes:
        came_at: when a key of it was first asked of the tiers.
        asked_at: and last.
        step: number of the step in which that was.
        owed: keys that a tier owes an answer for.
        was_owed: the same in the round of questions before.
        owing: bit mask of the tiers that owe answers.
        waited_s: for how long they have, as far as the request was asked of.
        silences: tier -> its answers so far and for how long it has given none; only of tiers that are polled.
        gave_up: bit mask of the tiers whose answers it does not wait for any more.
        expired: keys that are absent because it gave up, each counted once.
        barred: bit mask of the tiers that it may not load from.
        refused: key -> bit mask of the tiers whose copy cannot be loaded.
        hits: key -> tier, to be promoted.
        hit_tiers: bit mask of the tiers that have hits; may have others', until the hits are looked through.
        starved_since: since when hits wait for room.
        starved_for: the first of them that found none, when they were looked through last.
        capped_until: how long hits wait for their tiers' shares of the region; infinite where none does.
        coming: keys whose blocks are being filled; those blocks tell it when they are not any more.
        loading: blocks on their way from tiers that are loaded for this request.
        held: blocks pinned for this request until it loads them, finishes, or ``held_until`` passes.
        has_news: an answer to it may have changed since it was asked of.
        is_answered: all that is owed is to be asked anew: it gave up, or a tier does not say what it has answered.
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
    is_answered: bool = False

    def __post_init__(self) -> None:
        self.req_id = self.context.req_id

    def await_block(self, block: Block) -> None:
        """Wait until the block is not being filled any more."""
        self.owed.discard(block.key)
        if block.key not in self.coming:
            self.coming.add(block.key)
            block.add_waiter(self)

    def filling_ended(self, key: OffloadKey) -> None:
        """The key's block is not being filled any more."""
        self.coming.discard(key)
        self.has_news = True

    def drop_hits(self) -> None:
        """It waits for no room any more; should it again, it begins anew."""
        self.hits = {}
        self.hit_tiers = 0
        self.starved_since = None
        self.capped_until = math.inf
        self.has_news = True

    def stop_waiting(self) -> None:
        """It waits for nothing any more; should it again, it begins anew."""
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
        late_at: when a load is given up.
        ended: it was reported, or given up.
    """

    tier: int
    blocks: list[Block]
    request: Request | None = None
    late_at: float = 0.0
    ended: bool = False


class FailedLoads:
    """Loads that failed lately, for requests that came before. Scheduler thread only.

    Attributes:
        failed_at: by key and tier; the oldest first.
    """

    def __init__(self) -> None:
        self.failed_at: OrderedDict[tuple[OffloadKey, int], float] = OrderedDict()

    def add(self, job: Job, blocks: Iterable[Block], now: float) -> None:
        """The request of this job will not ask its tier for these blocks any more, nor will who has waited for them."""
        assert job.request is not None
        refused = job.request.refused
        failed_at = self.failed_at
        while failed_at and now - next(iter(failed_at.values())) >= _FAILED_S:
            failed_at.popitem(last=False)
        for block in blocks:
            refused[block.key] = refused.get(block.key, 0) | 1 << job.tier
            failed_at[block.key, job.tier] = now
            failed_at.move_to_end((block.key, job.tier))

    def refuse(self, request: Request, key: OffloadKey, tier: int) -> bool:
        """Whether the request does not ask the tier for the key."""
        refused = request.barred | request.refused.get(key, 0)
        return bool(refused >> tier & 1) or self.has_failed(request, key, tier)

    def has_failed(self, request: Request, key: OffloadKey, tier: int) -> bool:
        """Whether a load of the key from the tier failed since the request came."""
        return self.failed_at.get((key, tier), -math.inf) > request.came_at


class TierLoads:
    """The loads of one tier, in the order of their deadlines. Scheduler thread only.

    What the tier has not reported counts, also where it was given up: its slots are out of use until the tier lets go.

    Args:
        blocks_max: of the loads that the tier has not reported, 1 or more.
        deadline_s: from a load's submission until it is given up.

    Attributes:
        job_blocks_max: blocks of one job. Of a larger load, what a tier has not begun by its deadline is reported then,
            whatever became of the rest.
    """

    def __init__(self, blocks_max: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.job_blocks_max = max(JOB_BLOCKS_MIN, blocks_max // _JOBS_PER_SHARE)
        self._blocks_max = blocks_max
        self._unreported = 0  # blocks
        self._jobs: deque[Job] = deque()

    @property
    def room(self) -> int:
        """Blocks that may be loaded now."""
        return self._blocks_max - self._unreported

    @property
    def is_awaited(self) -> bool:
        """There are loads that were not given up."""
        return bool(self._jobs)

    def begin(self, blocks: list[Block], tier: int, request: Request, now: float) -> list[Job]:
        """Jobs for blocks there is room for."""
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
        """The tier reported it."""
        self._unreported -= len(job.blocks)

    def take_late(self, now: float) -> list[Job]:
        """Loads to be given up now. Those that ended are forgotten."""
        late = []
        while self._jobs and (self._jobs[0].ended or now >= self._jobs[0].late_at):
            job = self._jobs.popleft()
            if not job.ended:
                late.append(job)
        return late
