"""TierCounts: updates the metrics of a StoreTierManager."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..blocks.batches import Batch
from ..errors import SealReason
from ..metrics import Metrics
from ..plain_logs import get_logger
from .circuit import Kind
from .lookup import LookupCounts

logger = get_logger(__name__)

SAY_EVERY_S = 60.0  # a full tier alternates between refusing and accepting; log only so often
#: Reasons that are already logged: by the circuit, at shutdown, or by BlockMover.
_LOGGED_ELSEWHERE = frozenset({"circuit_open", "shutdown", "StoreConfigError", "StorePermissionError"})

_INITIAL_SERIES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("kvtiers_blocks_total", tuple(("store", outcome) for outcome in ("moved", "already_stored", "failed", "dropped"))),
    ("kvtiers_circuit_opened_total", ((),)),
    ("kvtiers_deadline_expired_total", (("lookup",), ("job",))),
    ("kvtiers_lookup_probes_total", (("hit",), ("miss",), ("error",), ("deadline",))),
    ("kvtiers_stores_dropped_total", (("StoreFullError",), ("circuit_open",), ("queue_full",), ("deadline",))),
    ("kvtiers_verify_failures_total", tuple((reason,) for reason in SealReason)),
)


class TierCounts:
    """The metrics of one tier. Each series starts at 0: Prometheus sees no increase in a series that starts at 1.

    Args:
        metrics: holds the series.
        name: the tier's name, for labels and logs.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: Metrics, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._name = name
        self._clock = clock
        self._not_stored = 0  # blocks that were not stored since the last "stored again" in the log
        self._say_at = float("-inf")
        for series, values in _INITIAL_SERIES:
            for value in values:
                metrics.inc(series, name, *value, by=0)
        metrics.set("kvtiers_circuit_closed", name, value=1.0)

    def collects(self) -> None:
        """Create the collector's series, because the tier has a collector."""
        self.collector_works(True)
        for outcome in ("ok", "error"):
            self._metrics.inc("kvtiers_collector_runs_total", self._name, outcome, by=0)

    def looked_up(self, counts: LookupCounts) -> None:
        """Count lookups."""
        tier, metrics = self._name, self._metrics
        for result, count in (
            ("hit", counts.hits),
            ("miss", counts.misses),
            ("error", len(counts.failed)),
            ("deadline", counts.expired + counts.given_up),
        ):
            if count:
                metrics.inc("kvtiers_lookup_probes_total", tier, result, by=count)
        if late := counts.expired + counts.given_up:
            metrics.inc("kvtiers_deadline_expired_total", tier, "lookup", by=late)

    def collector_works(self, works: bool) -> None:
        """Set whether the collector's process runs and answers."""
        self._metrics.set("kvtiers_collector_up", self._name, value=float(works))

    def collected(self, message: dict[str, Any]) -> None:
        """Count polls in which the collector worked. ``message`` comes from ``CollectorLink.take_reports``."""
        tier, metrics = self._name, self._metrics
        report = message.get("report")
        metrics.inc("kvtiers_collector_runs_total", tier, "ok" if report else "error", by=message["runs"])
        if report:
            for reason, count in report["removed_blobs"].items():
                metrics.inc("kvtiers_collector_removed_blobs_total", tier, reason, by=count)
                size = report["removed_bytes"][reason]
                metrics.inc("kvtiers_collector_removed_bytes_total", tier, reason, by=size)
            if message["used"] is None:
                metrics.forget("kvtiers_storage_used_bytes", tier)
            else:
                metrics.set("kvtiers_storage_used_bytes", tier, value=message["used"])

    def refused(self, op: Kind, reason: str, blocks: int, full: str = "") -> None:
        """Count a job that was refused. ``full``: why the storage is full, if that is the reason."""
        if op == "store":
            self._metrics.inc("kvtiers_stores_dropped_total", self._name, reason, by=blocks)
            if reason == "StoreFullError":
                self._log_store_refusals(Batch(errors=Counter({reason: blocks}), full=full))
        self._metrics.inc("kvtiers_blocks_total", self._name, op, "dropped", by=blocks)
        self._metrics.inc("kvtiers_jobs_total", self._name, op, "failed")

    def moved(self, batch: Batch, op: Kind) -> None:
        """Count the results of a batch."""
        tier, metrics = self._name, self._metrics
        for outcome, count in batch.outcomes.items():
            metrics.inc("kvtiers_blocks_total", tier, op, outcome, by=count)
        for error, count in batch.errors.items():
            metrics.inc("kvtiers_store_errors_total", tier, op, error, by=count)
            if op == "store":
                metrics.inc("kvtiers_stores_dropped_total", tier, error, by=count)
        if op == "store":
            self._log_store_refusals(batch)
        for reason, count in batch.verify_failures.items():
            metrics.inc("kvtiers_verify_failures_total", tier, reason, by=count)
        if batch.healed:
            metrics.inc("kvtiers_healed_blobs_total", tier, by=batch.healed)

    def job_ended(self, op: Kind, outcome: str, duration_s: float, bytes_moved: int) -> None:
        """Count an accepted job that has ended."""
        tier, metrics = self._name, self._metrics
        metrics.inc("kvtiers_jobs_total", tier, op, outcome)
        metrics.inc("kvtiers_bytes_total", tier, op, by=bytes_moved)
        metrics.observe("kvtiers_job_seconds", tier, op, value=duration_s)

    def _log_store_refusals(self, batch: Batch) -> None:
        """Log when the storage begins to refuse blocks, and when it accepts them again."""
        errors = batch.errors.keys() - _LOGGED_ELSEWHERE
        self._not_stored += sum(batch.errors[error] for error in errors)
        if self._clock() < self._say_at:
            return
        if errors:
            logger.warning(
                "tier %s: %d blocks were not stored: %s%s",
                self._name,
                self._not_stored,
                ", ".join(sorted(errors)),
                f" ({batch.full})" if batch.full else "",
            )
        elif self._not_stored and batch.succeeded:
            logger.info(
                "tier %s: storing works again; %d blocks were not stored meanwhile", self._name, self._not_stored
            )
            self._not_stored = 0
        else:
            return
        self._say_at = self._clock() + SAY_EVERY_S
