"""SoakReport: what a soak found, as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

CALL_P99_GOAL_MS, CALL_WORST_GOAL_MS = 1.0, 20.0
SHUTDOWN_GOAL_S = 5.0


@dataclass(slots=True, kw_only=True)
class SoakReport:
    """Figures of one run. What is not zero in ``violations`` must not happen, on any machine.

    Attributes:
        tiers: name -> where it keeps its blocks.
        worst_call_ms, p99_call_ms: of the scheduler's calls into the manager.
        worst_wait_ms: of one of them, less the time in which no thread of the process had a core.
        slow_calls: the first of those of 20 ms and more, in words.
        healed_s: from the end of the faults until no job was owed and no slot was in use.
        counters: what the tiers themselves counted.
    """

    seconds: float
    tiers: dict[str, str]
    requests: int
    lookups: int
    blocks_loaded: int
    blocks_stored: int
    jobs: int
    calls: int
    worst_call_ms: float
    worst_call: str
    worst_wait_ms: float
    slow_calls: list[str]
    p99_call_ms: float
    healed_s: float
    shutdown_s: float
    rss_growth_bytes: int
    counters: dict[str, float]
    violations: Counter[str]
    details: list[str]
    faults: dict[str, int] = field(default_factory=dict)
    descriptors_leaked: int = 0
    threads_leaked: int = 0
    processes_leaked: int = 0

    @property
    def operations(self) -> int:
        """Blocks looked up, loaded and stored."""
        return self.lookups + self.blocks_loaded + self.blocks_stored

    @property
    def passed(self) -> bool:
        """Whether nothing happened that must not."""
        return not self.violations

    def judge(self, *, rss_growth_bytes_max: int, call_s_max: float, shutdown_s_max: float) -> None:
        """Count what is beyond its limit as violations."""
        for kind, value, limit in (
            ("scheduler call that waits", self.worst_wait_ms, 1e3 * call_s_max),
            ("memory that grows", self.rss_growth_bytes, rss_growth_bytes_max),
            ("slow shutdown", self.shutdown_s, shutdown_s_max),
            ("descriptors leaked", self.descriptors_leaked, 0),
            ("threads leaked", self.threads_leaked, 0),
            ("processes leaked", self.processes_leaked, 0),
        ):
            if value > limit:
                self.violations[kind] += 1
                self.details.append(f"{kind}: {value:,.0f}, the limit is {limit:,.0f}")
        if not self.blocks_loaded or not self.blocks_stored:
            self.violations["nothing was tested"] += 1
            self.details.append("nothing was tested: no block was loaded, or none stored")

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        figures = asdict(replace(self, violations=Counter()))  # asdict does not know how to copy a Counter
        return figures | {"violations": dict(self.violations), "operations": self.operations, "passed": self.passed}

    def print(self, console: Console) -> None:
        """For people."""
        table = Table(title=f"soak: {self.seconds:,.0f} s", show_header=False)
        for tier, description in self.tiers.items():
            table.add_row(f"tier {tier}", description)
        table.add_section()
        rows: list[tuple[str, str]] = [
            ("operations", f"{self.operations:,} blocks: {self.lookups:,} looked up, {self.blocks_loaded:,} loaded and "
             f"compared, {self.blocks_stored:,} stored"),
            ("requests, jobs of tiers", f"{self.requests:,}, {self.jobs:,}"),
            ("faults injected", f"{sum(self.faults.values()):,}, {'all' if self.passed else 'NOT all'} survived"),
            ("wrong bytes", f"{self.violations['wrong bytes']}"),
            ("leaked slots", f"{self.violations['leaked slots']}"),
            ("stuck jobs, lookups", f"{self.violations['stuck job']}, {self.violations['stuck lookup']}"),
            ("jobs reported twice", f"{self.violations['job reported twice']}"),
            ("slots in two hands", f"{self.violations['slot in two hands']}"),
            ("scheduler calls", f"{self.calls:,}: p99 {_goal(self.p99_call_ms, CALL_P99_GOAL_MS)} ms, worst "
             f"{_goal(self.worst_call_ms, CALL_WORST_GOAL_MS)} ms ({self.worst_call}); goals {CALL_P99_GOAL_MS:g} and "
             f"{CALL_WORST_GOAL_MS:g}"),
            ("idle after healing", f"{self.healed_s:.1f} s"),
            ("shutdown", f"{_goal(self.shutdown_s, SHUTDOWN_GOAL_S)} s; goal {SHUTDOWN_GOAL_S:g}"),
            ("RSS growth", f"{self.rss_growth_bytes / 2**20:,.1f} MiB"),
            ("leaked", f"{self.descriptors_leaked} descriptors, {self.threads_leaked} threads, "
             f"{self.processes_leaked} processes"),
        ]  # fmt: skip
        for name, value in rows:
            table.add_row(name, value)
        table.add_section()
        for kind, count in self.faults.items():
            table.add_row(f"  {kind}", f"{count:,}")
        console.print(table)
        for slow in self.slow_calls:
            console.print(f"slow call: {slow}", highlight=False)
        for detail in self.details:
            console.print(f"[red]violation[/red] {detail}", highlight=False)
        console.print("passed" if self.passed else f"[red]failed[/red]: {dict(self.violations)}")


def _goal(value: float, goal: float) -> str:
    return f"{value:.2f}" if value <= goal else f"[red]{value:.2f} (missed)[/red]"
