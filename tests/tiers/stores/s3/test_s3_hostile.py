"""An S3 tier whose server wants the engine's memory, time or life (promise M1).

Every answer of ``tiers.testing.hostile`` to every kind of request, for each client and each isolation: the engine
lives, its memory and its workers' stay bounded, each job is reported by its deadline, and the tier works again once the
server does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtiers.tiers.testing.hostile import Hostile
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.s3_clients import use_credentials
from tests.waiting import wait_for

ENGINE_BYTES_MAX = 400 << 20  # an engine in order takes 120 MiB
WORKER_BYTES_MAX = 500 << 20  # 128 MiB that it may allocate, and what a worker starts with
JOB_DEADLINE_S = 8.0
IN_TIME_S = 2 * JOB_DEADLINE_S + 120  # on a busy machine; without a deadline there is no end
KINDS = ("load", "store", "lookup")
STORE_KINDS = ("head", "list", "size_many", "delete", "delete_many")  # asked where the store is in the engine's process

#: client (boto3 where the server is its own proxy), row_bytes, isolation, whether the region can be mapped.
#: One of those in processes and one of those in threads run in ``make test``.
WAYS = [
    pytest.param("direct", 64 << 10, "process", True, id="direct-process"),
    pytest.param("direct", 512 << 10, "process", True, id="direct-process-large", marks=pytest.mark.full),
    pytest.param("boto3", 64 << 10, "process", True, id="boto3-process", marks=pytest.mark.full),
    pytest.param("direct", 64 << 10, "thread", True, id="direct-thread", marks=pytest.mark.full),
    pytest.param("boto3", 64 << 10, "thread", True, id="boto3-thread", marks=pytest.mark.full),
    pytest.param("direct", 64 << 10, "auto", False, id="direct-unmappable", marks=pytest.mark.full),
    pytest.param("boto3", 64 << 10, "auto", False, id="boto3-unmappable", marks=pytest.mark.full),
]


class Engine:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str) -> tuple[Any, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer, seconds = self.hear()
        return answer, seconds

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine died: {self._process.wait(10)}"
        return json.loads(line)


@contextmanager
def engine(url: str, client: str, row_bytes: int, isolation: str, maps: bool) -> Iterator[Engine]:
    tier = {
        "type": "s3",
        "bucket": "bucket",
        "endpoint_url": url,
        "isolation": isolation,
        "n_read_threads": 2,
        "n_write_threads": 2,
        "job_deadline_s": JOB_DEADLINE_S,
    }
    s3 = {"request_timeout_s": 1.0, "retries": 1}
    config = json.dumps({"tier": tier, "s3": s3, "row_bytes": row_bytes, "maps": maps})
    command = [sys.executable, "-m", "tests.tiers.server.hostile_engine", config]
    proxy = {"http_proxy": url, "no_proxy": ""} if client == "boto3" else {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **proxy}
    ) as process:
        try:
            started = Engine(process)
            assert started.hear() == "started"
            yield started
        finally:
            process.kill()


@pytest.fixture
def server(boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaultServer]:
    use_credentials(monkeypatch)
    with HttpFaultServer(requests_max=100) as server:
        yield server


@pytest.mark.parametrize(("client", "row_bytes", "isolation", "maps"), WAYS)
def test_hostile_server_neither_fills_memory_nor_stops_the_engine(
    server: HttpFaultServer, client: str, row_bytes: int, isolation: str, maps: bool
) -> None:
    with engine(server.endpoint_url, client, row_bytes, isolation, maps) as started:
        wait_for(lambda: started.ask("store")[0])
        for fault in Hostile:
            server.inject(fault)
            for kind in KINDS if maps and isolation == "process" else KINDS + STORE_KINDS:
                answer, seconds = started.ask(kind)
                assert seconds < IN_TIME_S, (fault, kind)
                if kind == "load":
                    assert not answer, fault
            server.heal()
            wait_for(lambda: started.ask("load")[0])
        peak, _ = started.ask("peak")
        assert peak["engine"] < ENGINE_BYTES_MAX
        assert peak["worker"] < WORKER_BYTES_MAX
