"""SecondaryTierManager: what the engine side calls of a tier, and the values that cross that border.

Threads: everything here is called on the engine's scheduler thread, so nothing here does I/O or waits, with two
exceptions that say so: ``drain_jobs`` and ``shutdown``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The request a call is made for.

    Attributes:
        req_id: the engine's request id; "" where there is none.
    """

    req_id: str = ""


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """A transfer between region slots and a tier.

    Attributes:
        job_id: unique among the jobs of a tier that are not yet reported.
        keys: the blocks, in the order of ``block_ids``, none twice.
        block_ids: (len(keys),) integers, the region slots. The engine side keeps them pinned until the job is reported.
    """

    job_id: int
    keys: Collection[OffloadKey]
    block_ids: NDArray[np.int32]
    req_context: ReqContext = field(default_factory=ReqContext)


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job. Reported exactly once, and only when nothing can touch the job's slots any more.

    Attributes:
        success: every key of the job succeeded.
        successful_keys: the keys that did, in the job's order, also when ``success`` is False.
        transfer_time: seconds from submission to the end of the last block.
        transfer_bytes: payload bytes moved (blocks that were already stored move none).
    """

    job_id: int
    success: bool
    successful_keys: tuple[OffloadKey, ...] = ()
    transfer_time: float = 0.0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks that appeared in or disappeared from a medium.

    Attributes:
        keys: the blocks.
        medium: where, such as "CPU" or a tier's type.
        removed: True for removed, False for stored.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    removed: bool


class SecondaryTierManager(ABC):
    """One tier behind the CPU region.

    Args:
        offloading_spec: the engine's identity, duck-typed (see ``FileMapper.from_offloading_spec``).
        primary_kv_view: the region, shape (num_chunks, row_bytes), C-contiguous, writable.
        tier_type: name under which the tier was registered; labels its logs and metrics.
        **options: the tier's own options.

    Attributes:
        job_deadline_s: by when the tier itself ends a job whose I/O can be ended; None: it does not say. Soon after it
            (or after 20 s) the engine side goes on without the job, whose slots stay out of use until it is reported.
            A job at which ``submit_store`` or ``submit_load`` raised may have begun, so its slots do, too; but such a
            job may be unknown to the tier, and is taken for ended then.
        takes_stores: False: it is only read; the engine side submits no stores to it.
        shutdown_s: how long ``shutdown`` may take, most of which it gives to what was accepted; the engine side may set
            less. None: it does not say, and is drained before.
    """

    job_deadline_s: float | None = None
    takes_stores: bool = True
    shutdown_s: float | None = None

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        if options:
            raise ConfigError(f"unknown option for tier type {tier_type!r}", field=next(iter(options)))
        self.offloading_spec = offloading_spec
        self.primary_kv_view = primary_kv_view
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """True: stored and thought good. False: not there. None: asked, call again in a later step."""

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[bool | None]:
        """``lookup`` of several keys, in the order in which the request needs them."""
        return [self.lookup(key, req_context) for key in keys]

    def take_answered(self) -> Mapping[str, Collection[OffloadKey]] | None:
        """Request ids and keys that may be told another answer than None by now, since the last call.

        A tier that says so is asked again for no other keys, and bounds how long it leaves a question unanswered.
        None: the tier does not say. It is asked in each step, and is waited for while it gives answers.
        """
        return None

    @abstractmethod
    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Start copying slots to the tier. The outcome, refusal included, comes from ``get_finished``."""

    @abstractmethod
    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Start filling slots from the tier. The outcome, refusal included, comes from ``get_finished``."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Results of jobs that ended since the last call, each job exactly once."""

    def touch(self, keys: Collection[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """The keys were used; a tier that evicts may keep them longer."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027 - optional hook
        """The request will not ask again."""

    def on_schedule_end(self) -> None:  # noqa: B027 - optional hook
        """A scheduler step ended: batched lookups are sent now."""

    def drain_jobs(self) -> None:  # noqa: B027 - optional hook
        """Wait until no job runs or waits. Results are still reported by ``get_finished``. May block."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call."""
        return ()

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Cancel what waits, end what runs, release everything. May block, within the tier's limit."""
