"""ScriptedTier: a tier in memory that does what a test says, when it says so. No threads, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from kvtiers.tiers.base import (
    JobMetadata,
    JobResult,
    OffloadingEvent,
    PollingTierManager,
    ReqContext,
    SecondaryTierManager,
)
from kvtiers.tiers.blocks.keys import OffloadKey

ROW_BYTES = 64


def make_view(num_blocks: int) -> memoryview:
    """A region in plain memory."""
    return memoryview(bytearray(num_blocks * ROW_BYTES)).cast("b", (num_blocks, ROW_BYTES))


def pattern(key: OffloadKey) -> bytes:
    """Bytes that only this key's slot may hold."""
    return (key * (ROW_BYTES // len(key) + 1))[:ROW_BYTES]


def row(view: memoryview, block_id: int) -> memoryview:
    """One slot's bytes."""
    return view.cast("B")[block_id * ROW_BYTES : (block_id + 1) * ROW_BYTES]


@dataclass
class Job:
    is_load: bool
    metadata: JobMetadata


class ScriptedTier(SecondaryTierManager):
    """Keeps blobs in a dict; jobs wait until ``finish``, or end by themselves where ``auto`` is set.

    Attributes:
        blobs: what is stored.
        jobs: submitted and not finished.
        auto: jobs end when results are asked for.
        silent: lookups are not answered.
        slow: keys whose lookups are not answered.
        answers_later: a lookup is answered only in a later step.
        liar: lookups answer "present" whatever is stored.
        raising: methods that raise; with "_late" behind them, once they have done their work.
        asked: keys looked up, in order.
        calls: names of methods called, in order.
    """

    def __init__(self, view: memoryview, tier_type: str = "scripted", *, auto: bool = True) -> None:
        super().__init__(None, view, tier_type)
        self.blobs: dict[OffloadKey, bytes] = {}
        self.jobs: dict[int, Job] = {}
        self.submitted: list[Job] = []
        self.auto = auto
        self.silent = False
        self.slow: set[OffloadKey] = set()
        self.answers_later = False
        self.liar = False
        self.raising: set[str] = set()
        self.asked: list[OffloadKey] = []
        self.calls: list[str] = []
        self.results: list[JobResult] = []
        self.events: list[OffloadingEvent] = []
        self.reports_at_shutdown = True
        self._answered: set[OffloadKey] = set()
        self._asked_this_step: set[OffloadKey] = set()
        self._open: dict[str, set[OffloadKey]] = {}

    def put(self, *keys: OffloadKey) -> None:
        """Store blobs as if an earlier engine had."""
        self.blobs.update((key, pattern(key)) for key in keys)

    def finish(self, job_id: int, failing: Collection[OffloadKey] = (), *, success: bool | None = None) -> JobResult:
        """Do a job's work now, all but the ``failing`` keys, whose slots get garbage."""
        job = self.jobs.pop(job_id)
        done = []
        for key, block_id in zip(job.metadata.keys, job.metadata.block_ids.tolist(), strict=True):
            slot = row(self.primary_kv_view, block_id)
            if key in failing or (job.is_load and key not in self.blobs):
                if job.is_load:
                    slot[:] = b"\xee" * ROW_BYTES
                continue
            if job.is_load:
                slot[:] = self.blobs[key]
            else:
                self.blobs[key] = bytes(slot)
            done.append(key)
        ok = len(done) == len(job.metadata.keys) if success is None else success
        result = JobResult(job_id, ok, tuple(done))
        self.results.append(result)
        return result

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        self._enter("lookup")
        self.asked.append(key)
        if self._is_open(key):
            if not self.silent:
                self._asked_this_step.add(key)
            self._open.setdefault(req_context.req_id if req_context else "", set()).add(key)
            return None
        return self.liar or key in self.blobs

    def take_answered(self) -> dict[str, set[OffloadKey]]:
        self._enter("take_answered")
        answered = {req_id: {key for key in keys if not self._is_open(key)} for req_id, keys in self._open.items()}
        for req_id, keys in answered.items():
            self._open[req_id] -= keys
        return {req_id: keys for req_id, keys in answered.items() if keys}

    def _is_open(self, key: OffloadKey) -> bool:
        return self.silent or key in self.slow or (self.answers_later and key not in self._answered)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(Job(False, job_metadata), "submit_store")

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(Job(True, job_metadata), "submit_load")

    def get_finished(self) -> Iterable[JobResult]:
        self._enter("get_finished")
        if self.auto:
            self._finish_all()
        results, self.results = self.results, []
        yield from results
        self._enter("get_finished_late")

    def touch(self, keys: Collection[OffloadKey]) -> None:
        self._enter("touch")

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._enter("on_request_finished")

    def on_schedule_end(self) -> None:
        self._answered |= self._asked_this_step
        self._asked_this_step.clear()
        self._enter("on_schedule_end")

    def drain_jobs(self) -> None:
        self._enter("drain_jobs")
        self._finish_all()

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._enter("take_events")
        events, self.events = self.events, []
        return events

    def explain_miss(self, key: OffloadKey, req_context: ReqContext) -> str:
        self._enter("explain_miss")
        return ""

    def take_reasons(self) -> Iterable[tuple[str, Collection[OffloadKey]]]:
        self._enter("take_reasons")
        return ()

    @property
    def nearest(self) -> dict[str, str] | None:  # type: ignore[override]
        self._enter("nearest")
        return None

    def shutdown(self) -> None:
        if self.reports_at_shutdown:
            for job_id, job in list(self.jobs.items()):
                self.finish(job_id, failing=job.metadata.keys)
        self._enter("shutdown")

    def _finish_all(self) -> None:
        for job_id in list(self.jobs):
            self.finish(job_id)

    def _submit(self, job: Job, method: str) -> None:
        self._enter(method)
        assert job.metadata.job_id not in self.jobs
        assert len(set(job.metadata.keys)) == len(job.metadata.keys) == len(job.metadata.block_ids)
        self.jobs[job.metadata.job_id] = job
        self.submitted.append(job)
        self._enter(f"{method}_late")

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if method in self.raising:
            raise RuntimeError(f"{method} was told to raise")


class PollingTier(ScriptedTier, PollingTierManager):
    """A tier that another project wrote, which cannot tell what it has answered.

    Attributes:
        broken: keys whose ``poll`` raises.
        answers_once: the first poll of a key is open, the second one has the answer, the third one is open again.
    """

    lookup = PollingTierManager.lookup
    take_answered = PollingTierManager.take_answered  # type: ignore[assignment]

    def __init__(self, view: memoryview, tier_type: str = "scripted", *, auto: bool = True) -> None:
        super().__init__(view, tier_type, auto=auto)
        self.broken: set[OffloadKey] = set()
        self.answers_once = False
        self._begun: set[OffloadKey] = set()

    def poll(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if key in self.broken:
            raise RuntimeError("poll was told to raise")
        answer = ScriptedTier.lookup(self, key, req_context)
        if self.answers_once:
            self._begun ^= {key}
            return None if key in self._begun else answer
        return answer

    def on_request_finished(self, req_context: ReqContext) -> None:
        PollingTierManager.on_request_finished(self, req_context)
        ScriptedTier.on_request_finished(self, req_context)


def job_keys(job: Any) -> list[OffloadKey]:
    """A job's keys."""
    return list(job.metadata.keys)
