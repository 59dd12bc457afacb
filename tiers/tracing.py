"""Optional tracing: one OpenTelemetry span for each job of a tier.

This module uses only OpenTelemetry's API. The process chooses where spans go (an SDK, ``opentelemetry-instrument``,
vLLM's ``--otlp-traces-endpoint``). Without such a choice, spans are discarded and cost a few microseconds each, so
there is no option to turn them on.
"""

from __future__ import annotations

from collections.abc import Callable

TRACER_NAME = "kvtiers"


#: op ("load" or "store"), outcome ("ok", "partial" or "failed"), start in Unix nanoseconds, duration in seconds, number
#: of blocks, payload bytes moved
TraceJob = Callable[[str, str, int, float, int, int], None]


def make_job_tracer(tier: str) -> TraceJob | None:
    """Return a function that records a tier's spans. It is cheap enough for the scheduler's thread.

    None: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    tracer = trace.get_tracer(TRACER_NAME)

    def record(op: str, outcome: str, started_ns: int, duration_s: float, blocks: int, bytes_moved: int) -> None:
        attributes: dict[str, str | int] = {
            "kvtiers.tier": tier,
            "kvtiers.outcome": outcome,
            "kvtiers.blocks": blocks,
            "kvtiers.bytes_moved": bytes_moved,
        }
        span = tracer.start_span(
            f"kvtiers {op}", kind=trace.SpanKind.CLIENT, start_time=started_ns, attributes=attributes
        )
        if outcome != "ok":
            span.set_status(trace.StatusCode.ERROR, outcome)
        span.end(started_ns + round(duration_s * 1e9))

    return record
