"""Jobs: unreported loads and stores of all tiers, and the share of the region that each tier's loads hold."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...tiers.base import JobMetadata, ReqContext
from ...tiers.blocks.keys import OffloadKey
from ...tiers.plain_logs import get_logger
from .decisions import Progress
from .guard import GuardedTier
from .slots import Block
from .waits import Wait

logger = get_logger(__name__)

JOB_BLOCKS_MIN = 64  # a smaller load is not split
_JOBS_PER_SHARE = 4  # jobs per window, so that a tier that ends a job has others to work on


@dataclass(slots=True, eq=False)
class Job:
    """A submitted job. A store pins its blocks. A load has the wait of its request.

    Attributes:
        begun_at: time of a load's submission.
        late_at: time at which a load is given up.
        moved: number of blocks that the tier had loaded, since its start, before a load's submission.
        took_s: seconds that the tier reports for a load; 0: it does not report them.
        is_over: the load was reported or given up.
    """

    tier: int
    blocks: list[Block]
    wait: Wait | None = None
    begun_at: float = 0.0
    late_at: float = 0.0
    moved: int = 0
    took_s: float = 0.0
    is_over: bool = False


class Jobs:
    """The unreported loads and stores of all tiers; ``Job.tier`` is an index of ``tiers``. Scheduler thread only."""

    def __init__(self, tiers: Sequence[GuardedTier]) -> None:
        self._tiers = tiers
        self._ids = itertools.count(1)
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def are_awaited(self) -> bool:
        """Whether a tier may still report a job."""
        return any(tier.is_awaited for tier in self._tiers)

    def submit(self, job: Job) -> bool:
        """Submit a job to its tier. False: the tier raised; see ``GuardedTier.raised``."""
        job_id = next(self._ids)
        self._jobs[job_id] = job
        keys = tuple(block.key for block in job.blocks)
        slots = np.array([block.slot for block in job.blocks], dtype=np.int32)
        tier = self._tiers[job.tier]
        if job.wait is None:
            return tier.submit_store(JobMetadata(job_id, keys, slots, ReqContext()))
        return tier.submit_load(JobMetadata(job_id, keys, slots, job.wait.context))

    def take_ended(self, index: int) -> Iterator[tuple[Job, frozenset[OffloadKey]]]:
        """Return the ended jobs of a tier, each with the keys that succeeded."""
        for result in self._tiers[index].take_ended():
            job = self._jobs.pop(result.job_id)
            job.took_s = result.transfer_time
            yield job, frozenset(result.successful_keys)

    def drain(self, take: Callable[[], None]) -> None:
        """Wait until the tiers have finished their jobs. Bounded by the tiers' own deadlines.

        Args:
            take: takes the ended jobs. It may submit stores of loaded blocks, or stores that waited for room.
        """
        before: set[int] | None = None
        while before is None or before != self._jobs.keys():
            before = set(self._jobs)
            for tier in self._tiers:
                tier.drain_jobs()
            take()
        if self._jobs:
            logger.warning("%d jobs of the tiers did not end when they were drained", len(self._jobs))


class TierShare:
    """The share of the region that the unreported loads of one tier hold. Scheduler thread only.

    A load that was given up still counts: its slots are out of use until the tier reports the load.

    Args:
        index: index of the tier.
        name: name of the tier, for logs and metrics.
        blocks_max: limit of the blocks in unreported loads, 1 or more.
        deadline_s: seconds from a load's submission until it is given up.

    Attributes:
        room: number of blocks that may be loaded now.
        progress: progress of the tier's loads.
        awaited: number of blocks in loads that were neither reported nor given up.
        job_blocks_max: limit of the blocks in one job. A larger load is split into several jobs. So the tier can report
            the jobs that it has not begun by their deadline on time, even if other jobs hang.
    """

    def __init__(self, index: int, name: str, blocks_max: int, deadline_s: float) -> None:
        self.index = index
        self.name = name
        self.deadline_s = deadline_s
        self.room = blocks_max
        self.progress = Progress()
        self.awaited = 0
        self.job_blocks_max = max(JOB_BLOCKS_MIN, blocks_max // _JOBS_PER_SHARE)
        self._jobs: deque[Job] = deque()  # in the order of their deadlines

    @property
    def is_awaited(self) -> bool:
        """Whether there are loads that were not given up."""
        return bool(self._jobs)

    def begin(self, blocks: list[Block], wait: Wait, now: float, job_blocks_max: float) -> list[Job]:
        """Make jobs that load these blocks, each with at most so many blocks. The caller has checked ``room``."""
        for block in blocks:
            block.tier = self.index
        size = int(min(self.job_blocks_max, job_blocks_max))
        # The first piece of a large load is one block, because samples of two sizes tell latency from bandwidth.
        starts = [0, *range(int(size < self.job_blocks_max), len(blocks), size)]
        jobs = [
            Job(self.index, blocks[start:end], wait, now, now + self.deadline_s, self.progress.moved)
            for start, end in pairwise([*dict.fromkeys(starts), len(blocks)])
        ]
        self._jobs.extend(jobs)
        self.room -= len(blocks)
        self.progress.unreported += len(blocks)
        self.awaited += len(blocks)
        return jobs

    def jobs_of(self, wait: Wait) -> list[Job]:
        """The request's loads that were neither reported nor given up."""
        return [job for job in self._jobs if job.wait is wait and not job.is_over]

    def take_late(self, now: float) -> list[Job]:
        """Return the loads to give up now, and forget loads that ended."""
        late = []
        while self._jobs and (self._jobs[0].is_over or now >= self._jobs[0].late_at):
            job = self._jobs.popleft()
            if not job.is_over:
                late.append(job)
        return late
