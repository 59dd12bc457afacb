"""An engine with a tier, for ``test_s3_hostile`` and ``test_builtin``: a process of its own, which may be aborted.

It reads commands from standard input, one a line, and answers each with a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.tiers import builtin
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.identity import FakeSpec, block_key
from tests.tier_limits import tier_limits

BLOCKS = 4
NEVER_S = 240.0  # far beyond any deadline of the tier's


def main() -> None:
    """Serve standard input until it ends. The argument is JSON: ``tier``, ``s3``, ``row_bytes`` and ``maps``."""
    config = json.loads(sys.argv[1])
    if "s3" in config:
        from tests.s3_clients import set_s3_options  # here, because it imports boto3

        set_s3_options(pytest.MonkeyPatch(), **config["s3"])
    changes: list[str] = []  # of the C library's environment, which other threads may be reading
    for name in ("putenv", "unsetenv"):
        setattr(os, name, lambda *arguments, name=name: changes.append(f"{name} {arguments[0]!r}"))
    row_bytes = config["row_bytes"]
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if config["maps"] else mmap.MAP_PRIVATE)
    rows: Any = np.frombuffer(mmap.mmap(-1, BLOCKS * row_bytes, flags), np.uint8).reshape(BLOCKS, row_bytes)
    builtin.WORKER_BYTES = 128 << 20
    with tier_limits(circuit_probe_s=0.1):
        tier: Any = SecondaryTierFactory.create_secondary_tier(config["tier"], memoryview(rows), FakeSpec())
    keys = [block_key(i) for i in range(BLOCKS)]
    jobs = iter(range(1, 1_000_000))

    def run(submit: Callable[[JobMetadata], None]) -> bool:
        job_id = next(jobs)
        submit(JobMetadata(job_id, keys, np.arange(BLOCKS, dtype=np.int32)))
        until = time.monotonic() + NEVER_S
        while time.monotonic() < until:
            tier.on_schedule_end()
            for result in tier.get_finished():
                assert result.job_id == job_id
                return bool(result.success)
            time.sleep(0.005)
        raise TimeoutError("the job was not reported")

    def store() -> bool:
        rows[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None]
        return run(tier.submit_store)

    def load() -> bool | list[list[int]]:
        """Whether the blocks were loaded; the bytes of each row if they are not those stored."""
        rows[:] = 255
        if not run(tier.submit_load):
            return False
        loaded = [np.unique(row).tolist() for row in rows]
        return loaded == [[block] for block in range(BLOCKS)] or loaded

    def fails(call: Callable[[], object]) -> bool:
        try:
            outcome = call()
        except StoreError:
            return True
        return isinstance(outcome, list) and any(isinstance(each, StoreError) for each in outcome)

    names = [tier.mapper.relative_name(key) for key in keys]
    store_here: Any = tier.store  # None: the tier has processes, which only move blocks and look keys up

    def lookup() -> list[bool]:
        tier._lookup.forget(keys)
        until = time.monotonic() + NEVER_S
        while None in (found := [tier.lookup(key) for key in keys]) and time.monotonic() < until:
            tier.on_schedule_end()
            time.sleep(0.005)
        return found

    def touch() -> None:
        tier.touch(keys)
        tier.on_schedule_end()

    commands: dict[str, Callable[[], object]] = {
        "store": store,
        "load": load,
        "lookup": lookup,
        "head": lambda: fails(lambda: store_here.size(names[0])),
        "list": lambda: fails(lambda: list(store_here.keys())),
        "size_many": lambda: fails(lambda: store_here.size_many(names * 8)),
        "delete": lambda: fails(lambda: store_here.delete("nothing")),
        "delete_many": lambda: fails(lambda: store_here.delete_many(["nothing", "of", "all"])),
        "peak": _peak_bytes,
        "touch": touch,
        "seen": lambda: [sorted({name.partition(".")[0] for name in sys.modules}), changes],
    }
    print(json.dumps("started"), flush=True)
    for line in sys.stdin:
        started = time.monotonic()
        answer = commands[line.strip()]()
        print(json.dumps([answer, time.monotonic() - started]), flush=True)
    ctypes.CDLL(None)._exit(0)


def _peak_bytes() -> dict[str, int]:
    """The most memory that this process and its largest child that lives or was reaped have had."""
    import resource

    status = Path("/proc/self/status").read_text()
    own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return {"engine": own << 10, "worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10}


if __name__ == "__main__":
    main()
