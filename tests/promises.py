"""The results of the tests that show the promises in docs/reliability.md, printed at the end of a run of pytest."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Promise -> what its tests measure or check. docs/reliability.md says what is promised.
PASS_LINES = {
    "W1": "10,000 corruptions of each kind of tier: none is loaded",
    "W2": "4,096 bytes of the payload and every byte of the trailer flipped, for each kind of tier: none is loaded",
    "W3": "200 SIGKILLs: 0 bad blocks, 0 left over",
    "W4": "every system call fails, once and for ever: only its keys are missing",
    "W5": "many writers and readers of the same keys: 0 wrong, 0 exceptions",
    "W6": "a block of another namespace is never loaded",
    "W7": "every bit of the trailer flipped, and bits of the payload, for each kind of tier: the next store heals all",
    "L1": "scheduler calls p99 <= 1 ms, worst <= 20 ms, with all I/O hung",
    "L2": "a lookup is a miss when the storage is silent for lookup_deadline_s (0.2 s)",
    "L3": "a load ends within job_deadline_s + 1 s: success, failure, or its slots quarantined",
    "L4": "cut off after 3 failures or 1 deadline, back at the first probe after healing",
    "L5": "shutdown <= 5 s with everything hung",
    "L6": "what is stored is found: 16,000 keys at 2,000 answers a second, or the prefix known after 15 s",
    "M1": "no answer of an S3 server takes the engine's memory or life",
    "S1": "slots are conserved after every operation: 2,000 x 60 steps",
    "S2": "10^6 operations at 5 % faults: nothing pinned at idle, nothing quarantined 30 s after healing",
    "S3": "one result per job, whatever a task raises",
    "S4": "nothing that a tier raises reaches the engine",
    "D1": "all writers of a root together stay within max_bytes and what they put within three polls",
    "D2": "private files of dead writers are swept: 0 left",
    "D3": "nothing left in /dev/shm after SIGKILL of all; 20 of 20 restarts",
    "D4": "queues bounded in jobs and bytes; excess stores dropped and counted",
    "X1": "stored bytes never run, and no trailer crashes its reader",
    "X2": "fs and nfs tiers stay below their root",
    "X3": "files 0600, folders 0700, under any umask",
    "X4": "secrets appear in no log, repr, traceback or dump",
    "X5": "10,000 forged or moved blocks: none is accepted",
}

Record = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures that one passed test measured."""

    promise: str
    figures: dict[str, object]
    test: str


@cache
def evidence() -> dict[str, dict[str, list[str]]]:
    """Section ("promises" or "faults") -> promise or fault -> the tests that show it, as pytest names them."""
    return tomllib.loads(Path(__file__).with_name("evidence.toml").read_text(encoding="utf-8"))


def without_case(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]


def summary(results: Mapping[str, Counter[str]]) -> list[str]:
    """The short report: a line for each promise that was tested, with the results of its tests."""
    shown = []
    for name, tests in evidence()["promises"].items():
        counts: Counter[str] = Counter()
        for test in tests:
            counts.update(results.get(test, {}))
        if counts:
            shown.append(f"{name}  {_in_words(counts)}: {PASS_LINES[name]}")
    return shown


def lines(results: Mapping[str, Counter[str]], measured: Sequence[Measured]) -> list[str]:
    """The report: each promise and fault that was tested, its tests, their results and what they measured.

    Args:
        results: test -> number of its cases by result ("passed", "failed", …).
        measured: all figures. The cases of one test share a line.
    """
    shown, missing = [], []
    for section, tests_of in evidence().items():
        for name, tests in tests_of.items():
            tested = [test for test in tests if test in results]
            if tested:
                shown.append(f"{name}  {PASS_LINES[name]}" if section == "promises" else name)
            elif section == "promises":
                missing.append(name)
            for test in tested:
                figures = [one.figures for one in measured if (one.promise, without_case(one.test)) == (name, test)]
                shown.append(f"      {_in_words(results[test])}: {test.removeprefix('tests/')}")
                shown += [f"          {_all_cases(figures)}"] if figures else []
    if shown and missing:
        shown.append(f"promises without a test in this run: {' '.join(missing)}")
    return shown


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {result}" for result, count in counts.items())


def _all_cases(cases: Sequence[dict[str, object]]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_together(name, cases)}" for name in cases[0])


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
