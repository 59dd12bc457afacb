"""SecondaryTierManager: the interface between the engine side and a tier, and its value types.

Threads: the engine's scheduler thread calls everything here, so these methods must not do I/O or block. The two
exceptions are ``drain_jobs`` and ``shutdown``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks.keys import OffloadKey
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The request of a call.

    Attributes:
        req_id: the engine's request id; "" if the call is not for a request.
    """

    req_id: str = ""


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """A transfer between region slots and a tier.

    Attributes:
        job_id: unique among the tier's unreported jobs.
        keys: the blocks, in the order of ``block_ids``, without duplicates.
        block_ids: the region slots, (len(keys),) integers. The engine side keeps them pinned until the job is reported.
    """

    job_id: int
    keys: Collection[OffloadKey]
    block_ids: NDArray[np.int32]
    req_context: ReqContext = field(default_factory=ReqContext)


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job. Reported exactly once, and only after the last access to the job's slots.

    Attributes:
        success: every key of the job succeeded.
        successful_keys: the keys that succeeded, in the job's order, even if ``success`` is False.
        transfer_time: seconds from submission to the end of the last block.
        transfer_bytes: payload bytes moved (a block that was already stored counts 0).
    """

    job_id: int
    success: bool
    successful_keys: tuple[OffloadKey, ...] = ()
    transfer_time: float = 0.0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks that were stored in or removed from a medium.

    Attributes:
        keys: the blocks.
        medium: "CPU" or a tier's type.
        removed: True: the blocks were removed. False: they were stored.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    removed: bool


class SecondaryTierManager(ABC):
    """One tier behind the CPU region.

    Args:
        offloading_spec: the engine's identity, duck-typed (see ``FileMapper.from_offloading_spec``).
        primary_kv_view: the region, shape (num_chunks, row_bytes), C-contiguous, writable.
        tier_type: the name under which the tier was registered; labels its logs and metrics.
        **options: the tier's own options.

    Attributes:
        name: labels its logs and metrics; "" means its type.
        job_deadline_s: time limit after which the tier itself ends a job, if its I/O can be ended; None: no limit. Soon
            after this limit (after 20 s if None) the engine side stops waiting for the job. It does not use the job's
            slots until the tier reports the job. If ``submit_store`` or ``submit_load`` raised, the tier may have begun
            the job, or may never report it. The engine side considers such a job ended soon after the limit, and does
            not use its slots before.
        takes_stores: False: the tier is read-only, and the engine side submits no stores to it.
        load: "always" or "never": the engine side loads all or none of the blocks that the tier has. "auto": the
            engine side loads blocks if loading is expected to be faster than computing.
        shutdown_s: time limit of ``shutdown``. Accepted jobs get most of this time. The engine side may lower the
            limit. None: no limit; the engine side drains the tier before it calls ``shutdown``.
        nearest: if this engine is the first of its namespace, the other namespace of its model that differs in the
            fewest fields, as texts: ``namespace``, ``begun`` and ``differs``. None: there is no such namespace, or the
            search has not ended.
    """

    name: str = ""
    job_deadline_s: float | None = None
    takes_stores: bool = True
    load: str = "auto"
    shutdown_s: float | None = None
    nearest: dict[str, str] | None = None

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        if options:
            raise ConfigError(f"unknown option for tier type {tier_type!r}", field=next(iter(options)))
        self.offloading_spec = offloading_spec
        self.primary_kv_view = primary_kv_view
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """True: stored and presumed good. False: absent. None: not known yet; ``take_answered`` will name the key.

        The tier limits how long it leaves a lookup open.
        """

    @abstractmethod
    def take_answered(self) -> Mapping[str, Collection[OffloadKey]] | None:
        """Return the keys answered since the previous call, by request id: ``lookup`` may no longer return None.

        The engine side looks up only these keys again. None: all open lookups may have been answered, for example
        because the tier was cut off. A tier that cannot report answered keys is a ``PollingTierManager``.
        """

    @abstractmethod
    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Start copying slots to the tier. ``get_finished`` reports the result, even if the job is refused."""

    @abstractmethod
    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Start filling slots from the tier. ``get_finished`` reports the result, even if the job is refused."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Results of the jobs that ended since the previous call, each job exactly once."""

    def touch(self, keys: Collection[OffloadKey]) -> None:  # noqa: B027 - optional hook
        """Note that the keys were used; a tier that evicts may keep them longer."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027 - optional hook
        """Note that the request has ended and makes no more lookups."""

    def on_schedule_end(self) -> None:  # noqa: B027 - optional hook
        """Note that a scheduler step has ended; a tier that batches lookups sends them now."""

    def descriptors(self) -> Collection[int]:
        """Descriptors that become readable when the tier may have results. Empty: the tier must be polled."""
        return ()

    def drain_jobs(self) -> None:  # noqa: B027 - optional hook
        """Wait until every submitted job has ended. ``get_finished`` still reports their results. May block."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the previous call."""
        return ()

    def explain_miss(self, key: OffloadKey, req_context: ReqContext) -> str:  # noqa: ARG002
        """Return why ``lookup`` has just said absent, such as ``lookup:circuit_open``. "": the tier lacks the block.

        The engine side calls this once for a request that misses. The tier may ask its storage for details about the
        key, and report them with ``take_reasons``.
        """
        return ""

    def take_reasons(self) -> Iterable[tuple[str, Collection[OffloadKey]]]:
        """Return the events of blocks since the previous call, as pairs of a reason and keys.

        Reasons are ``store:…`` and ``load:…`` with the cause of a failure, ``removed:…``, and ``other_namespace``. The
        engine side uses them to explain later misses of the keys.
        """
        return ()

    def shutdown(self) -> None:  # noqa: B027 - optional hook
        """Finish or cancel the accepted jobs and release all resources. May block, within the tier's limit."""


@dataclass(slots=True)
class _Poll:
    """A request's lookups.

    Attributes:
        open: keys without an answer, in the order of the lookups.
        answers: answers found by ``take_answered`` and not looked up yet.
        given_up: keys that count as absent.
        open_s: seconds for which lookups have been open.
        silent_s: the part of ``open_s`` in which the tier answered no request.
    """

    context: ReqContext
    open: dict[OffloadKey, None] = field(default_factory=dict)
    answers: dict[OffloadKey, bool] = field(default_factory=dict)
    given_up: set[OffloadKey] = field(default_factory=set)
    open_s: float = 0.0
    silent_s: float = 0.0


class PollingTierManager(SecondaryTierManager):
    """A tier that cannot report which lookups it has answered. Its open lookups are repeated in every step.

    Implement ``poll`` instead of ``lookup``. ``__init__`` and ``on_request_finished`` must be called if overridden.

    Attributes:
        lookup_deadline_s: if the tier has answered nothing for this long, open lookups count as absent until their
            requests finish, or until ``poll`` answers. Between two steps at most half of this time counts, because an
            engine with a full batch does not wait for lookups.
        lookup_total_s: a request's lookups are repeated for at most this long while the tier answers other lookups.
    """

    lookup_deadline_s: float = 0.2
    lookup_total_s: float = 15.0
    clock = staticmethod(time.monotonic)

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, **options)
        self._polls: dict[str, _Poll] = {}  # request id -> lookups
        self._polled_at = self.clock()

    @abstractmethod
    def poll(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: stored and presumed good. False: absent. None: not known yet; call again in a later step."""

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        context = ReqContext() if req_context is None else req_context
        poll = self._polls.get(context.req_id)
        if poll is not None and key in poll.answers:
            return poll.answers.pop(key)
        answer = self.poll(key, context)
        if answer is not None or not context.req_id:  # without a request id, ``take_answered`` cannot report the key
            return answer
        poll = poll or self._polls.setdefault(context.req_id, _Poll(context))
        if key in poll.given_up:
            return False
        poll.open[key] = None
        return None

    def take_answered(self) -> Mapping[str, Collection[OffloadKey]]:
        now = self.clock()
        seconds = min(now - self._polled_at, self.lookup_deadline_s / 2)
        self._polled_at = now
        answered = {
            req_id: [key for key in poll.open if self._is_answered(key, poll)] for req_id, poll in self._polls.items()
        }
        is_silent = not any(answered.values())
        for req_id, poll in self._polls.items():
            poll.open_s = poll.open_s + seconds if poll.open else 0.0
            poll.silent_s = poll.silent_s + seconds if is_silent and poll.open else 0.0
            if poll.silent_s >= self.lookup_deadline_s or poll.open_s >= self.lookup_total_s:
                poll.given_up.update(key for key in poll.open if key not in poll.answers)
                answered[req_id] = list(poll.open)
            for key in answered[req_id]:
                del poll.open[key]
        return answered

    def _is_answered(self, key: OffloadKey, poll: _Poll) -> bool:
        try:
            answer = self.poll(key, poll.context)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - the next lookup of the key raises again; other keys go on
            return True
        if answer is not None:
            poll.answers[key] = answer
        return answer is not None

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._polls.pop(req_context.req_id, None)
