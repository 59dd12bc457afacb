"""What ``encrypt: aes-gcm`` costs: the fs tier with it, next to it without, and the seal alone.

    python -m tests.benchmarks.bench_seal [--rounds N] [--json FILE] [--where FOLDER]

Each round measures both one after the other on the same blocks; the median of the rounds' ratios is reported, so
that a machine whose speed drifts does not decide. Goal: loads at 0.6 or more of those without.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.protected_seal import GcmSeal
from kvtiers.tiers.blocks.seal import Seal
from kvtiers.tiers.builtin import BuiltInTier
from tests.identity import FakeSpec, block_key

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB)
KINDS: dict[str, dict[str, str]] = {"none": {}, "aes-gcm": {"encrypt": "aes-gcm"}}
TOTAL_BYTES = 256 * MIB
LOAD_GOAL = 0.6
KEY = bytes(range(32))  # a benchmark has no secrets
SEALS: dict[str, Callable[..., Seal]] = {
    "none": Seal,
    "aes-gcm": partial(GcmSeal, keys=KeyRing(KEY)),
}


class Bench:
    """A region of one block size, and what is measured on it. Seconds for all of it."""

    def __init__(self, block_bytes: int, where: Path) -> None:
        self.count = max(4, TOTAL_BYTES // block_bytes)
        self.region = np.random.default_rng(1).integers(0, 256, (self.count, block_bytes), np.uint8).view(np.int8)
        self.keys = [block_key(n) for n in range(self.count)]
        self.where = where
        self.keys_file = where / "keys"
        self.keys_file.touch(mode=0o600)
        self.keys_file.write_text(KEY.hex())

    def tier_round(self, kind: str) -> dict[str, float]:
        """Store and load everything."""
        root = self.where / kind
        options: dict[str, Any] = dict(KINDS[kind])
        if options:
            options["keys_file"] = str(self.keys_file)
        tier = BuiltInTier(
            FakeSpec(),
            self.region.data,
            "fs",
            root_dir=str(root),
            n_read_threads=1,
            n_write_threads=1,
            min_free=0,
            **options,
        )
        try:
            return {"store": self._job(tier.submit_store, tier), "load": self._job(tier.submit_load, tier)}
        finally:
            tier.shutdown()
            shutil.rmtree(root)

    def seal_round(self, kind: str) -> dict[str, float]:
        """Seal and open every row in one thread, no storage."""
        seal = SEALS[kind](bytes(32), 0)
        rows = [memoryview(row).cast("B") for row in self.region]
        slot = memoryview(bytearray(self.region.shape[1]))
        began = time.perf_counter()
        for key, row in zip(self.keys, rows, strict=True):
            seal.seal_parts(key, row)
        sealed = time.perf_counter()
        stored = [memoryview(bytes(part)) for part in seal.seal_parts(self.keys[0], rows[0])]
        opening_s = 0.0
        for _ in self.keys:
            slot[:] = stored[0]
            start = time.perf_counter()
            seal.open_in_place(self.keys[0], slot, stored[1])
            opening_s += time.perf_counter() - start
        return {"seal": sealed - began, "open": opening_s}

    def _job(self, submit: Callable[[JobMetadata], None], tier: BuiltInTier) -> float:
        began = time.perf_counter()
        submit(JobMetadata(1, self.keys, np.arange(self.count, dtype=np.int32)))
        tier.drain_jobs()
        took = time.perf_counter() - began
        (result,) = tier.get_finished()
        if not result.success:
            raise RuntimeError("a block was not moved")
        return took


def measure(block_bytes: int, where: Path, rounds: int) -> dict[str, Any]:
    """MB/s without, and the other kinds as ratios of it."""
    bench = Bench(block_bytes, where)
    taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS:
            found = bench.tier_round(kind) | bench.seal_round(kind)
            if number:  # the first round warms up
                taken[kind].append(found)
    size = bench.region.nbytes / 1e6
    row: dict[str, Any] = {"block_bytes": block_bytes}
    for what in ("store", "load", "seal", "open"):
        row[f"{what}_mb_s"] = round(size / statistics.median(found[what] for found in taken["none"]))
        ratios = [plain[what] / other[what] for plain, other in zip(taken["none"], taken["aes-gcm"], strict=True)]
        row[f"{what}_aes-gcm"] = round(statistics.median(ratios), 2)
    return row


def main() -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--where", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.where) as folder:
            rows.append(measure(size, Path(folder), arguments.rounds))
    table = Table("block", "store MB/s", "aes-gcm", "load MB/s", "aes-gcm", "open GB/s", "aes-gcm")
    for row in rows:
        met = "" if row["load_aes-gcm"] >= LOAD_GOAL else " ✗"
        table.add_row(
            f"{row['block_bytes'] // KIB} KiB",
            f"{row['store_mb_s']:,}", f"{row['store_aes-gcm']:.2f}",
            f"{row['load_mb_s']:,}", f"{row['load_aes-gcm']:.2f}{met}",
            f"{row['open_mb_s'] / 1000:.1f}", f"{row['open_aes-gcm']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
