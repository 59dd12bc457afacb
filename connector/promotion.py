"""What is on its way from tiers to the region: requests that wait, jobs, and the part of it that a tier may hold."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from connector.primary import Block
from tiers.base import ReqContext
from tiers.keys import OffloadKey

JOB_BLOCKS_MIN = 64  # a smaller load is not split
_JOBS_PER_SHARE = 4  # a tier that has ended one has the next while that is replaced


@dataclass(slots=True, eq=False)
class Request:
    """A request that missed the region.

    Attributes:
        came_at: when a key of it was first asked of the tiers.
        asked_at: and last.
        waited_s: time between its questions. A long one counts in part: engines ask nothing of a request while their
            batch is full, and what tiers had answered may be too old to be believed by then.
        asked: ``waited_s`` when a key was first asked of the tiers, while an answer is owed.
        refused: bit mask of the tiers whose copy of a key cannot be had.
        hits: key -> tier, to be promoted.
        hit_tiers: bit mask of the tiers that have hits; may have others', until the hits are looked through.
        starved_since: since when hits wait for room.
        capped_until: how long hits wait for their tiers' shares of the region; infinite where none does.
        loading: blocks on their way from tiers.
        held: blocks pinned for this request until it loads them, finishes, or ``held_until`` passes.
    """

    context: ReqContext
    came_at: float
    asked_at: float
    waited_s: float = 0.0
    asked: dict[OffloadKey, float] = field(default_factory=dict)
    refused: dict[OffloadKey, int] = field(default_factory=dict)
    hits: dict[OffloadKey, int] = field(default_factory=dict)
    hit_tiers: int = 0
    starved_since: float | None = None
    capped_until: float = math.inf
    loading: int = 0
    held: dict[OffloadKey, Block] = field(default_factory=dict)
    held_until: float = 0.0
    finished: bool = False


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
