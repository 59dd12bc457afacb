"""What each step of storing and loading a sealed file costs, beside the same files by plain calls.

    python -m tests.benchmarks.bench_steps [--where FOLDER ...] [--json FILE]

Each way adds one step to the one before, in one thread, without the tier: its last way is what no tier with our
promises can do better than, on this machine and in Python. Ways take turns within a round, and the medians of the
rounds are shown: µs a block, and the ratio of plain files to it. Files are deleted between rounds, outside the clock.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.stores.files.posix import (
    FILE_MODE,
    OPEN_FOLDER,
    OPEN_READ,
    RootFolder,
    close_reader,
    regular_size,
)
from kvtiers.tiers.stores.files.publish import OPEN_UNNAMED

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, 512 * KIB, MIB, 4 * MIB)
TOTAL_BYTES = 32 * MIB
ROUNDS = 30
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Blocks:
    """Blocks in memory of their own, and files for them below a folder."""

    def __init__(self, block_bytes: int, root: str) -> None:
        self.count = TOTAL_BYTES // block_bytes
        memory = mmap.mmap(-1, self.count * block_bytes)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
        view = memoryview(memory)
        self.rows = [view[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
        self.trailer = memoryview(bytearray(TRAILER_BYTES))
        self.root = root
        self.names = [f"model_r0/{n % 16:03x}/{n // 16 % 16:02x}_g0/{n:064x}.bin" for n in range(self.count)]
        self.paths = [f"{root}/{name}" for name in self.names]
        for path in self.paths:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self.below = RootFolder(root, make=False)

    # -- stores ----------------------------------------------------------------------------------------------------

    def plain_store(self) -> None:
        for path, row in zip(self.paths, self.rows, strict=True):
            fd = os.open(path, NEW, FILE_MODE)
            os.pwritev(fd, [row], 0)
            os.close(fd)

    def checksum_first(self) -> None:
        for path, row in zip(self.paths, self.rows, strict=True):
            xxhash.xxh3_64_intdigest(row)
            fd = os.open(path, NEW, FILE_MODE)
            os.pwritev(fd, [row], 0)
            os.close(fd)

    def with_trailer(self) -> None:
        for path, row in zip(self.paths, self.rows, strict=True):
            xxhash.xxh3_64_intdigest(row)
            fd = os.open(path, NEW, FILE_MODE)
            os.pwritev(fd, [row, self.trailer], 0)
            os.close(fd)

    def published_whole(self) -> None:
        for name, row in zip(self.names, self.rows, strict=True):
            xxhash.xxh3_64_intdigest(row)
            folder, _, last = name.rpartition("/")
            dir_fd = self.below.open(folder, OPEN_FOLDER)
            fd = os.open(".", OPEN_UNNAMED, FILE_MODE, dir_fd=dir_fd)
            os.pwritev(fd, [row, self.trailer], 0)
            os.link(f"/proc/self/fd/{fd}", last, dst_dir_fd=dir_fd)
            os.close(fd)
            close_reader(dir_fd)

    # -- loads -----------------------------------------------------------------------------------------------------

    def plain_load(self) -> None:
        for path, row in zip(self.paths, self.rows, strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.preadv(fd, [row], 0)
            os.close(fd)

    def trailer_too(self) -> None:
        for path, row in zip(self.paths, self.rows, strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.preadv(fd, [row, self.trailer], 0)
            os.close(fd)

    def checksum_after(self) -> None:
        for path, row in zip(self.paths, self.rows, strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.preadv(fd, [row, self.trailer], 0)
            os.close(fd)
            xxhash.xxh3_64_intdigest(row)

    def below_the_root(self) -> None:
        for name, row in zip(self.names, self.rows, strict=True):
            fd = self.below.open(name, OPEN_READ)
            regular_size(fd, name)
            os.preadv(fd, [row, self.trailer], 0)
            close_reader(fd)
            xxhash.xxh3_64_intdigest(row)

    def remove(self) -> None:
        for path in self.paths:
            os.unlink(path)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def take_turns(blocks: Blocks, ways: Iterable[Callable[[], None]], *, remove: bool) -> dict[str, float]:
    """Median µs a block of each way."""
    ways = list(ways)
    taken: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for round_number in range(ROUNDS):
        for way in ways if round_number % 2 else reversed(ways):
            started = time.perf_counter()
            way()
            taken[way.__name__].append((time.perf_counter() - started) / blocks.count * 1e6)
            if remove:
                blocks.remove()
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def measure(where: Path, block_bytes: int) -> dict[str, dict[str, float]]:
    """Stores and loads of one block size."""
    blocks = Blocks(block_bytes, tempfile.mkdtemp(prefix="kvtiers-bench-", dir=where))
    try:
        stores = take_turns(
            blocks,
            (blocks.plain_store, blocks.checksum_first, blocks.with_trailer, blocks.published_whole),
            remove=True,
        )
        blocks.with_trailer()
        loads = take_turns(
            blocks, (blocks.plain_load, blocks.trailer_too, blocks.checksum_after, blocks.below_the_root), remove=False
        )
    finally:
        blocks.close()
    return {"store": stores, "load": loads}


def show(where: str, found: dict[int, dict[str, dict[str, float]]]) -> None:
    """One table for stores and one for loads."""
    for op in ("store", "load"):
        names = list(next(iter(found.values()))[op])
        table = Table(title=f"{op}, {where}: µs a block (plain files' share of it)")
        for column in ("block", *(name.replace("_", " ") for name in names)):
            table.add_column(column, justify="right")
        for block_bytes, by_op in found.items():
            plain = by_op[op][names[0]]
            cells = [f"{by_op[op][name]:.1f} ({plain / by_op[op][name]:.2f})" for name in names]
            table.add_row(f"{block_bytes // KIB} KiB", *cells)
        Console().print(table)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--where", nargs="*", default=["/dev/shm"], help="folders to measure on")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    results = {}
    for where in args.where:
        found = {size: measure(Path(where), size) for size in SIZES}
        show(where, found)
        results[where] = found
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
