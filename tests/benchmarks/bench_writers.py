"""By how much real writers exceed a root's ``max_bytes``: ``python -m tests.benchmarks.bench_writers ROOT``.

Each writer is a process with a whole tier, as an engine has one, and stores new blocks as fast as the tier takes them.
Meanwhile this process sums up the sizes of the files, independently of the collector. ``--answer-after-ms`` delays
every call of the storage, so that it behaves like a remote one: polls of 5 s instead of 0.25 s.

Prints the largest overshoot, also without the first 30 s, and the bytes that the writers put in three polls at their
mean rate. Promise D1 allows three polls once the collector has started, and 10 s of puts before: the run must be much
longer than that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.capacity.policy import POLLS_TO_STOP
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.testing.store_layer import Layer
from tests.identity import FakeSpec, block_key

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
BLOCK_BYTES = MIB
ROWS = 32
JOB_BLOCKS = 8
START_S = 30.0
FAR_POLL_S, NEAR_POLL_S = 5.0, 0.25

T = TypeVar("T")


class FarStore(Layer):
    """Files that answer late."""

    def __init__(self, root: str, answer_after_s: float) -> None:
        super().__init__(LocalStore(root))
        self._answer_after_s = answer_after_s

    def keys(self, prefix: str = "") -> Iterator[Any]:
        for number, info in enumerate(self.inner.keys(prefix)):
            if number % 1000 == 0:  # as many as a page of S3's listing has
                time.sleep(self._answer_after_s)
            yield info

    def _around(self, method: str, call: Callable[[], T]) -> T:
        time.sleep(self._answer_after_s)
        return super()._around(method, call)


def make_store(options: dict[str, Any]) -> FarStore:
    return FarStore(options["root"], options["answer_after_s"])


def tier_config(root: str, max_bytes: int, answer_after_s: float) -> dict[str, Any]:
    config: dict[str, Any] = {"max_bytes": max_bytes, "job_deadline_s": 120.0}
    if not answer_after_s:
        return {"type": "fs", "root_dir": root, "min_free": 0, **config}
    options = {"root": root, "answer_after_s": answer_after_s}
    return {"type": "store", "module_path": "tests.benchmarks.bench_writers", "options": options, **config}


def write(config: dict[str, Any], seed: int) -> None:
    """A writer: store new blocks until standard input ends, and then print how many were stored and how many not."""
    region = np.random.default_rng(seed).integers(-128, 128, (ROWS, BLOCK_BYTES), np.int8)
    tier = SecondaryTierFactory.create_secondary_tier(config, region.data, FakeSpec())
    os.set_blocking(0, False)
    free = list(range(0, ROWS, JOB_BLOCKS))
    rows: dict[int, int] = {}
    number, stored = seed * 1_000_000_000, 0
    first = number
    job_id = 0
    while not _has_ended():
        while free:
            job_id += 1
            rows[job_id] = row = free.pop()
            keys = [block_key(number + one) for one in range(JOB_BLOCKS)]
            number += JOB_BLOCKS
            tier.submit_store(JobMetadata(job_id, keys, np.arange(row, row + JOB_BLOCKS, dtype=np.int32)))
        tier.on_schedule_end()
        for result in tier.get_finished():
            stored += len(result.successful_keys)
            free.append(rows.pop(result.job_id))
        for _ in tier.take_events():
            pass
        time.sleep(0.005)
    print(json.dumps({"stored": stored, "not_stored": number - first - stored}))
    tier.shutdown()


def _has_ended() -> bool:
    try:
        return os.read(0, 1) == b""
    except BlockingIOError:
        return False


def allocated_bytes(folder: str) -> int:
    """Bytes of the files below a folder, as the file system keeps them."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += allocated_bytes(entry.path)
            else:
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def measure(root: Path, writers: int, seconds: float, max_bytes: int, answer_after_s: float) -> dict[str, Any]:
    config = tier_config(str(root), max_bytes, answer_after_s)
    command = [sys.executable, "-m", "tests.benchmarks.bench_writers", "--writer", json.dumps(config)]
    processes = [
        subprocess.Popen([*command, str(seed)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for seed in range(1, writers + 1)
    ]
    began = time.monotonic()
    sizes: list[tuple[float, int]] = []
    while time.monotonic() < began + seconds:
        sizes.append((time.monotonic() - began, allocated_bytes(str(root))))
        time.sleep(0.05)
    outcomes = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    took_s = time.monotonic() - began
    stored = sum(each["stored"] for each in outcomes)
    highest, later = max(size for _, size in sizes), [size for at_s, size in sizes if at_s >= START_S]
    poll_s = FAR_POLL_S if answer_after_s else NEAR_POLL_S
    return {
        "writers": writers,
        "answer_after_ms": answer_after_s * 1000,
        "seconds": round(took_s),
        "max_bytes": max_bytes,
        "put_bytes_per_s": round(stored * BLOCK_BYTES / took_s),
        "dropped_share": round(sum(each["not_stored"] for each in outcomes) / max(1, stored), 2),
        "overshoot_bytes": max(0, highest - max_bytes),
        "three_polls_bytes": round(POLLS_TO_STOP * poll_s * stored * BLOCK_BYTES / took_s),
        "highest_of_max_bytes": round(highest / max_bytes, 3),
        "highest_after_start": round(max(later, default=0) / max_bytes, 3),
        "time_above_max_bytes": round(sum(size > max_bytes for size in later) / max(1, len(later)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, help="an empty folder, on tmpfs")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--max-mib", type=int, default=4096)
    parser.add_argument("--answer-after-ms", type=float, default=0.0)
    parser.add_argument("--writer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.writer:
        write(json.loads(args.writer[0]), int(args.writer[1]))
        return
    if args.root is None or any(args.root.glob("*")):
        parser.error("ROOT must be an empty folder")
    row = measure(args.root, args.writers, args.seconds, args.max_mib * MIB, args.answer_after_ms / 1000)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
