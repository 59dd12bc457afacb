"""Verify's worker processes: one per core, so that reads and checksums do not compete for one GIL.

A worker reads JSON lines from standard input (its configuration, then units) and answers each unit with one line:
``{"result": {…}}`` or ``{"error": "…"}``. It exits at the end of its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from ..blocks.keyring import KEY_VARIABLES
from ..daemon_pool import DaemonPool
from ..errors import StoreError, StoreUnavailableError
from ..processes import end_if_forked, environment_without, kill_group, own_output, python_command
from ..recipe import StoreRecipe, make_store
from .verify import ALL, Subset, UnitResult, Verifier, decode_result

KILLED_S_MAX = 5.0  # for threads to see that their workers were killed


def main() -> None:
    """Run a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    pid = os.getpid()
    output = own_output()
    config = json.loads(sys.stdin.readline())
    verifier: Verifier | None = None
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            if verifier is None:
                verifier = Verifier(make_store(config), subset=Subset(**config["subset"]))
            answer = {"result": asdict(verifier.check(json.loads(line)))}
        except StoreError as e:
            answer = {"error": str(e)}
        end_if_forked(pid)
        output.write(json.dumps(answer) + "\n")
        output.flush()


def verify_units(
    recipe: StoreRecipe, units: Sequence[str], *, n_workers: int, subset: Subset = ALL
) -> Iterator[UnitResult]:
    """Check units in worker processes; yields results as they arrive, in no particular order.

    Raises:
        StoreError: a unit could not be listed, or a worker died. Results already yielded remain valid.
    """
    config = json.dumps({**recipe.encode(), "subset": asdict(subset)})
    workers = [
        subprocess.Popen(
            python_command("kvtiers.tiers.tools.verify_processes"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_without(KEY_VARIABLES),
            process_group=0,
        )
        for _ in range(min(n_workers, len(units)))
    ]
    idle: SimpleQueue[tuple[subprocess.Popen[str], str]] = SimpleQueue()  # with what a worker must be told first
    for worker in workers:
        idle.put((worker, f"{config}\n"))
    pool = DaemonPool(len(workers), "kvtiers-verify")
    try:
        for result in as_completed([pool.submit(_check, unit, idle) for unit in units]):
            yield result.result()
    finally:
        for worker in workers:
            kill_group(worker)
        pool.shutdown(KILLED_S_MAX)
        for worker in workers:
            worker.communicate()


def _check(unit: str, idle: SimpleQueue[tuple[subprocess.Popen[str], str]]) -> UnitResult:
    """Have an idle worker check a unit."""
    worker, greeting = idle.get()
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(f"{greeting}{json.dumps(unit)}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        if not line.endswith("\n"):
            raise EOFError("its answer is incomplete")
        answer = json.loads(line)
        if "error" in answer:
            raise StoreUnavailableError(answer["error"])
        return decode_result(answer["result"])
    except (OSError, EOFError, ValueError, TypeError, KeyError) as e:
        raise StoreUnavailableError(f"the worker that checked {unit}* died: {type(e).__name__}: {e}") from e
    finally:
        idle.put((worker, ""))
