"""Verify's worker processes: one per core, so that reads and checksums do not compete for one GIL.

A worker reads JSON lines from standard input (its configuration, then units) and answers each unit with one line:
``{"result": {…}}`` or ``{"error": "…"}``. It exits at the end of its input.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any

from kvtiers.tiers.blocks.keyring import KEY_VARIABLES
from kvtiers.tiers.errors import StoreError, StoreUnavailableError
from kvtiers.tiers.isolation.process import StoreRecipe, environment_without, python_command
from kvtiers.tiers.isolation.worker import make_store, own_output
from kvtiers.tiers.tools.verify import ALL, Subset, UnitResult, Verifier, decode_result


def main() -> None:
    """Run a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    output = own_output()
    config = json.loads(sys.stdin.readline())
    verifier: Verifier | None = None
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            if verifier is None:
                verifier = Verifier(make_store(config), repair=config["repair"], subset=Subset(**config["subset"]))
            answer = {"result": asdict(verifier.check(json.loads(line)))}
        except StoreError as e:
            answer = {"error": str(e)}
        output.write(json.dumps(answer) + "\n")
        output.flush()


def verify_units(
    recipe: StoreRecipe, units: Sequence[str], *, n_workers: int, repair: bool, subset: Subset = ALL
) -> Iterator[UnitResult]:
    """Check units in worker processes; yields results as they arrive, in no particular order.

    Raises:
        StoreError: a unit could not be listed, or a worker died. Results already yielded remain valid.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    for unit in units:
        waiting.put(unit)
    answers: SimpleQueue[UnitResult | StoreError | None] = SimpleQueue()
    config = json.dumps({**recipe.encode(), "repair": repair, "subset": asdict(subset)})
    processes = [
        subprocess.Popen(
            python_command("kvtiers.tiers.tools.verify_processes"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_without(KEY_VARIABLES),
        )
        for _ in range(min(n_workers, len(units)))
    ]
    threads = [
        threading.Thread(target=_serve, args=(process, config, waiting, answers), daemon=True) for process in processes
    ]
    for thread in threads:
        thread.start()
    try:
        left = len(threads)
        while left:
            answer = answers.get()
            if isinstance(answer, StoreError):
                raise answer
            if answer is None:
                left -= 1
            else:
                yield answer
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            process.wait()


def _serve(
    process: subprocess.Popen[str],
    config: str,
    waiting: SimpleQueue[str],
    answers: SimpleQueue[UnitResult | StoreError | None],
) -> None:
    """Give units to one worker until none are left."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            process.stdin.write(config + "\n")
            while True:
                try:
                    unit = waiting.get_nowait()
                except Empty:
                    break
                process.stdin.write(json.dumps(unit) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line.endswith("\n"):  # end of output, or an incomplete line
                    answers.put(StoreUnavailableError(f"the worker that checked {unit}* died"))
                    return
                answer = json.loads(line)
                if "error" in answer:
                    answers.put(StoreUnavailableError(answer["error"]))
                    return
                answers.put(decode_result(answer["result"]))
    except Exception as e:  # noqa: BLE001 - a thread's edge: whatever it was, the command waits for an answer
        answers.put(StoreUnavailableError(f"a worker died: {type(e).__name__}: {e}"))
        return
    answers.put(None)
