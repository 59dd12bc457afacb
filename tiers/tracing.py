"""Optional tracing: one OpenTelemetry span for each job of a tier.

This module uses only OpenTelemetry's API. The process chooses where spans go (an SDK, ``opentelemetry-instrument``,
vLLM's ``--otlp-traces-endpoint``). Without such a choice, spans are discarded and cost a few microseconds each, so
there is no option to turn them on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TRACER_NAME = "kvtiers"


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A job that has ended.

    Attributes:
        op: "load" or "store".
        outcome: "ok", "partial" or "failed", as in ``kvtiers_jobs_total``.
        started_ns: start time in Unix nanoseconds.
        blocks, bytes_moved: number of blocks in the job, and payload bytes that were moved.
    """

    op: str
    outcome: str
    started_ns: int
    duration_s: float
    blocks: int
    bytes_moved: int


def make_job_tracer(tier: str) -> Callable[[JobTrace], None] | None:
    """Return a function that records a tier's spans. It is cheap enough for the scheduler's thread.

    None: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    tracer = trace.get_tracer(TRACER_NAME)

    def record(job: JobTrace) -> None:
        attributes: dict[str, str | int] = {
            "kvtiers.tier": tier,
            "kvtiers.outcome": job.outcome,
            "kvtiers.blocks": job.blocks,
            "kvtiers.bytes_moved": job.bytes_moved,
        }
        span = tracer.start_span(
            f"kvtiers {job.op}", kind=trace.SpanKind.CLIENT, start_time=job.started_ns, attributes=attributes
        )
        if job.outcome != "ok":
            span.set_status(trace.StatusCode.ERROR, job.outcome)
        span.end(job.started_ns + round(job.duration_s * 1e9))

    return record
