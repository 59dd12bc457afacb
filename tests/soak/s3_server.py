"""The HTTP fault server in a process of its own, so that its threads do not take the soak's GIL.

    python -m tests.soak.s3_server

One JSON command a line on standard input, one JSON answer a line on standard output:
["faults", [[fault, methods or null, share], ...]] replaces the faults · ["forget", share] removes that part of the
objects · ["struck"] tells how often each fault struck. The end of its input ends it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer

BUCKET = "bucket"


def serve() -> None:
    """Obey until standard input ends."""
    chance = random.Random(0)
    with HttpFaultServer(buckets=(BUCKET,), requests_max=0) as server:
        _say(server.endpoint_url)
        for line in sys.stdin:
            match json.loads(line):
                case ["faults", faults]:
                    server.heal()
                    for fault, methods, share in faults:
                        server.inject(Fault(fault), methods=methods, share=share)
                    _say("done")
                case ["forget", share]:
                    _say(server.s3.remove_objects(BUCKET, _some_blocks(chance, share)))
                case ["struck"]:
                    _say(dict(server.struck))


def _some_blocks(chance: random.Random, share: float) -> Callable[[str], bool]:
    return lambda key: key.endswith(".bin") and chance.random() < share


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


class S3Process:
    """The other side: starts the server and talks to it. For one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.s3_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint_url: str = self._receive()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def set_faults(self, faults: Iterable[tuple[Fault, list[str] | None, float]]) -> None:
        """From now on: (fault, methods, share of the requests)."""
        self._ask(["faults", [[str(fault), methods, share] for fault, methods, share in faults]])

    def forget(self, share: float) -> int:
        """Remove a part of the objects; returns how many."""
        count: int = self._ask(["forget", share])
        return count

    def struck(self) -> dict[str, int]:
        """How often each fault struck."""
        struck: dict[str, int] = self._ask(["struck"])
        return struck

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the S3 server ended with status {self._process.wait()}")
        return json.loads(line)


if __name__ == "__main__":
    serve()
