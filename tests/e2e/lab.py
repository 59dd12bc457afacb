"""Starting engines in processes of their own, and what a row found out."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.engine import RESULT_PREFIX

ENGINE_S_MAX = 600.0  # only ends a hang
#: For vLLM's CPU build on a small machine.
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "2",
}
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """One line of the report.

    Attributes:
        ok: every expectation held.
        failures: those that did not.
        figures: what was measured, by name; seconds end in ``_s``.
        took_s: the whole row, its engines' starts included.
    """

    name: str
    version: str
    ok: bool = True
    failures: list[str] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)
    took_s: float = 0.0

    def expect(self, holds: bool, what: str) -> None:
        """Note an expectation that did not hold."""
        if not holds:
            self.ok = False
            self.failures.append(what)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return asdict(self)


class EngineFailedError(RuntimeError):
    """An engine's process ended without a result."""


class Lab:
    """Runs engines of one vLLM version.

    Args:
        version: such as "0.32".
        overlay: folder of its files; None for the installed version.
        model: folder of the model.
        environment: further variables, such as S3 credentials.
        engine: default options of every engine; a job may override them.
        ends_at: time, by ``time.monotonic``, at which running engines are ended.
    """

    def __init__(
        self,
        version: str,
        overlay: Path | None,
        model: Path,
        environment: Mapping[str, str],
        *,
        engine: Mapping[str, Any] | None = None,
        ends_at: float = math.inf,
    ) -> None:
        self.version = version
        self.model = model
        self.engine = dict(engine or {})
        self.ends_at = ends_at
        self.environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "NIXL_TELEMETRY_ENABLE": "1",  # without it vLLM's obj tier ends the engine
            "PYTHONPATH": os.pathsep.join(
                [*([str(overlay)] if overlay else []), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
            ).strip(os.pathsep),
            **({"PYTHONHASHSEED": "0"} if version == "0.28" else {}),  # which seeds its block hashes at random
            **environment,
        }
        self.log = Path(tempfile.mkdtemp(prefix="kvtiers-e2e-log-"))
        self._runs = itertools.count(1)

    def start(
        self, transfer: dict[str, Any] | None, prompts: list[list[int]], *, processes: bool = False, **job: Any
    ) -> Running:
        """Start an engine that answers the prompts.

        Args:
            processes: a process for the engine and one for each worker, as a server has them; else one for all.
        """
        engine = self.engine | job.pop("engine", {})
        if not processes:
            engine.setdefault("distributed_executor_backend", "uni")
        path = self.log / f"{next(self._runs):03}.json"
        model = job.pop("model", self.model)
        path.write_text(
            json.dumps(
                {"model": str(model), "kv_transfer_config": transfer, "prompts": prompts, "engine": engine, **job}
            )
        )
        environment = dict(self.environment, VLLM_ENABLE_V1_MULTIPROCESSING="1" if processes else "0")
        output = path.with_suffix(".log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.engine", str(path)],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Running(process, path.with_suffix(".log"), self.ends_at)

    def run(self, transfer: dict[str, Any] | None, prompts: list[list[int]], **job: Any) -> dict[str, Any]:
        """Start an engine and wait for its results."""
        return self.start(transfer, prompts, **job).result()


class Running:
    """An engine under way."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ends_at: float = math.inf) -> None:
        self.process = process
        self.log = log
        self.ends_at = min(ends_at, time.monotonic() + ENGINE_S_MAX)

    def result(self) -> dict[str, Any]:
        """Its results.

        Raises:
            EngineFailedError: it ended without any, or took too long; carries the end of its log.
        """
        try:
            self.process.wait(max(0.0, self.ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(RESULT_PREFIX):
                found: dict[str, Any] = json.loads(line.removeprefix(RESULT_PREFIX))
                return found
        tail = self.log.read_text(errors="replace")[-3000:]
        raise EngineFailedError(f"the engine ended with {self.process.returncode} and no result; {self.log}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, path: Path, within_s: float = ENGINE_S_MAX) -> None:
        """Until a file is there.

        Raises:
            EngineFailedError: it did not come, or the engine ended before.
        """
        deadline = time.monotonic() + within_s
        while not path.exists():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise EngineFailedError(f"{path} did not come; see {self.log}")
            time.sleep(0.02)


def metric(result: Mapping[str, Any], name: str, *needles: str) -> float:
    """Sum of a metric over the label sets that contain all of the needles."""
    return float(
        sum(
            value
            for shown, value in result["metrics"].items()
            if shown.startswith(f"{name}{{") and all(needle in shown for needle in needles)
        )
    )
