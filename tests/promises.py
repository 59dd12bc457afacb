"""What the tests measured of the promises in docs/reliability.md, shown at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Promise -> its pass line. Their words are in docs/reliability.md.
PASS_LINES = {
    "L1": "scheduler calls p99 <= 1 ms, worst <= 20 ms, with all I/O hung",
    "L2": "a lookup is a miss when the storage is silent for lookup_deadline_s (0.2 s)",
    "L3": "a load ends within job_deadline_s + 1 s: success, failure, or its slots quarantined",
    "L4": "cut off after 3 failures or 1 deadline, back at the first probe after healing",
    "L5": "shutdown <= 5 s with everything hung",
    "L6": "what is stored is found: 16,000 keys at 2,000 answers a second, or the prefix known after 15 s",
    "S1": "slots are conserved after every operation: 2,000 x 60 steps",
    "S2": "10^6 operations at 5 % faults: nothing pinned at idle, nothing quarantined 30 s after healing",
    "S3": "one result per job, whatever a task raises",
    "S4": "nothing that a tier raises reaches the engine",
    "D2": "private files of dead writers are swept: 0 left",
    "D3": "nothing left in /dev/shm after SIGKILL of all; 20 of 20 restarts",
    "D4": "queues bounded in jobs and bytes; excess stores dropped and counted",
    "W1": "10,000 corruptions of each kind of tier: none is loaded",
    "W2": "4,096 bytes of the payload and every byte of the trailer flipped, for each kind of tier: none is loaded",
    "W3": "200 SIGKILLs: 0 bad blocks, 0 left over",
    "W4": "every system call fails, once and for ever: only its keys are missing",
    "W5": "many writers and readers of the same keys: 0 wrong, 0 exceptions",
    "W7": "every bit of the trailer flipped, and bits of the payload, for each kind of tier: the next store heals all",
}

Record = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures that one passed test measured."""

    promise: str
    figures: dict[str, object]
    test: str


def lines(measured: Sequence[Measured]) -> list[str]:
    """The report: each promise, its pass line, and what was measured where. The cases of one test share a line."""
    shown = []
    for promise, pass_line in PASS_LINES.items():
        shown.append(f"{promise}  {pass_line}")
        by_test: dict[str, list[dict[str, object]]] = {}
        for one in measured:
            if one.promise == promise:
                by_test.setdefault(one.test.partition("[")[0].removeprefix("tests/"), []).append(one.figures)
        for test, cases in by_test.items():
            prefix = f"{len(cases)} cases: " if len(cases) > 1 else ""
            figures = ", ".join(f"{name.replace('_', ' ')} {_together(name, cases)}" for name in cases[0])
            shown.append(f"      {prefix}{figures}  ({test})")
        if not by_test:
            shown.append("      not measured in this run")
    return shown


def _together(name: str, cases: Sequence[dict[str, object]]) -> str:
    """What all cases have in common, or else the sum of counts, the largest of times and the list of texts."""
    values = [case[name] for case in cases]
    if len(set(values)) == 1:
        return _show(values[0]) + (" each" if len(cases) > 1 and values[0] else "")
    if all(isinstance(value, int) for value in values):
        return f"{_show(sum(value for value in values if isinstance(value, int)))} in all"
    if all(isinstance(value, float) for value in values):
        return f"{_show(max(value for value in values if isinstance(value, float)))} at most"
    return " ".join(map(_show, values))


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
