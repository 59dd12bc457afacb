"""TierJobs: jobs that were submitted to the tiers and are not reported yet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...tiers.base import JobMetadata, ReqContext
from ...tiers.blocks.keys import OffloadKey
from ...tiers.plain_logs import get_logger
from .guard import GuardedTier
from .primary import Block
from .request import Request

logger = get_logger(__name__)


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


Ended = tuple[Job, frozenset[OffloadKey]]
"""A job, and the keys of it that succeeded."""


class TierJobs:
    """The unreported jobs of all tiers; each job ends exactly once. Scheduler thread only.

    Args:
        tiers: ``Job.tier`` is the index into this sequence.
        deadlines_s: for each tier, the seconds within which it is expected to end a job.
        clock: seconds, monotonic.
    """

    def __init__(self, tiers: Sequence[GuardedTier], deadlines_s: Sequence[float], clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._deadlines_s = deadlines_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._raised: dict[int, float] = {}  # jobs whose submission raised, and when each is taken as ended
        self._reports_until = -math.inf  # when all jobs should be reported, unless storage hangs

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def are_awaited(self) -> bool:
        """Whether a tier may still report a job. Tiers report jobs before their deadline, unless storage hangs."""
        return len(self._jobs) > len(self._raised) and self._clock() < self._reports_until

    def submit(self, job: Job) -> bool:
        """Submit a job to its tier.

        Returns:
            False if the tier raised. It may have begun some blocks before that. If their slots were freed now, the tier
            could overwrite the slots' next owner. So the job stays until the tier reports it or its deadline passes.
        """
        job_id = next(self._ids)
        until = self._clock() + self._deadlines_s[job.tier]
        self._jobs[job_id] = job
        self._reports_until = max(self._reports_until, until)
        keys = tuple(block.key for block in job.blocks)
        slots = np.array([block.slot for block in job.blocks], dtype=np.int32)
        is_load = job.request is not None
        context = ReqContext() if job.request is None else job.request.context
        if self._tiers[job.tier].submit(JobMetadata(job_id, keys, slots, context), is_load=is_load):
            return True
        self._raised[job_id] = until
        return False

    def take_ended(self, index: int) -> Iterator[Ended]:
        """The jobs that a tier reports, and jobs that raised and are past their deadline, to free their slots too."""
        tier = self._tiers[index]
        for result in tier.get_finished():
            job = tier.job_of(result, self._jobs)
            if job is None or job.tier != index:
                tier.contain_unknown(result)
                continue
            self._forget(result.job_id)
            yield job, tier.succeeded_in(result, [block.key for block in job.blocks])
        now = self._clock()
        for job_id, until in list(self._raised.items()):
            if now >= until and self._jobs[job_id].tier == index:
                yield self._forget(job_id), frozenset()

    def drain(self, take: Callable[[], None]) -> None:
        """Wait until the tiers have finished their jobs. Bounded by the tiers' own deadlines.

        Args:
            take: takes the jobs that ended. It may submit stores of loaded blocks, or stores that waited for room.
        """
        before: frozenset[int] | None = None
        while True:
            for tier in self._tiers:
                tier.drain_jobs()
            take()
            left = frozenset(self._jobs)
            if not left:
                return
            if left == before:
                logger.warning("%d jobs of the tiers did not end when they were drained", len(left))
                return
            before = left

    def _forget(self, job_id: int) -> Job:
        self._raised.pop(job_id, None)
        return self._jobs.pop(job_id)
