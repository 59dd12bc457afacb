"""CPU time for each block, and memory, of the commands that list, sum up and collect; each is a process of its own.

``python -m tests.benchmarks.bench_gc --root /dev/shm/kvtiers-bench --counts 1000000``; the folder is made and removed.
Ten million take 10 GB of memory and, on tmpfs, ``mount -o nr_inodes=0``.

``find`` and a bare loop over os.scandir are the limits: both read the size and time of every file. Up to a million
blocks most folders have one block, so the cost of a block includes opening its folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import make_offload_key
from kvtiers.tiers.config.tier_options import MAX_BYTES_MIN
from tests.identity import FakeSpec

BLOB_BYTES_MIN = 64  # the cost is in the number of files, not in their bytes
AGE_S_MAX = 30 * 86_400
GOAL_US = 20.0
LOST = " \u2717"  # marks a goal that was missed
GOAL_COUNT, GOAL_S, GOAL_MIB = 1_000_000, 30.0, 150.0
SCANDIR = """
import os, sys
folders = [sys.argv[1]]
while folders:
    with os.scandir(folders.pop()) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                entry.stat(follow_symlinks=False)
"""


def blob_bytes(count: int) -> int:
    """The size of each block, so that all blocks together reach the smallest ``max_bytes`` that a tier accepts."""
    return max(BLOB_BYTES_MIN, -(-MAX_BYTES_MIN // count))


def fill(root: Path, count: int) -> None:
    """Make blocks of all ages up to 30 days, by plain system calls."""
    size = blob_bytes(count)
    mapper = FileMapper.from_offloading_spec("", FakeSpec())
    now = time.time()
    made: set[str] = set()
    for number in range(count):
        name = mapper.relative_name(make_offload_key(hashlib.sha256(number.to_bytes(8, "little")).digest(), 0))
        path = f"{root}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, size)  # sparse, so that ten million files fit into 10 GB of memory
        os.close(fd)
        at = now - number * (AGE_S_MAX / count) - 60
        os.utime(path, (at, at))


def measure(*arguments: str, rounds: int = 1) -> Figures:
    """Run a program so often; its round with the least CPU time."""
    found = []
    for _ in range(rounds):
        started_at = time.monotonic()
        with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, arguments
        cpu_s = usage.ru_utime + usage.ru_stime
        found.append(Figures(cpu_s, time.monotonic() - started_at, usage.ru_maxrss / 1024))
    return min(found)


class Figures(NamedTuple):
    """Of one process; ``peak_mib`` is its memory."""

    cpu_s: float
    seconds: float
    peak_mib: float


def write_config(path: Path, root: Path, max_bytes: int, ttl: str) -> str:
    """Of a tier with these limits."""
    tier = f"{{type: fs, root_dir: {root}, min_free: 0, max_bytes: {max_bytes}, ttl: {ttl}}}"
    path.write_text(f"region: {{size: 1MiB}}\ntiers:\n- {tier}\n")
    return str(path)


def show(root: Path, folder: Path, count: int, rounds: int) -> None:
    """Print a row for each limit and command."""
    total = count * blob_bytes(count)
    within = write_config(folder / "within.yaml", root, 4 * total, "365d")
    above = write_config(folder / "above.yaml", root, total, "29d")
    kvtiers = (sys.executable, "-m", "kvtiers.connector.commands.cli")
    start_s = measure(*kvtiers, "ls", within, "--limit", "1", rounds=rounds).cpu_s
    size = blob_bytes(count)
    print(f"\n{count:,} blocks of {size} bytes in {root}; of a command's time, {start_s:.2f} s are its start.")
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; least of {rounds} rounds, of the last row one.\n")
    print("| | CPU us a block, start left out | CPU s | s | MiB |\n|---|---:|---:|---:|---:|")
    rows = {
        "find": ("find", str(root), "-type", "f", "-printf", "%s %T@ %P\n"),
        "os.scandir": (sys.executable, "-S", "-c", SCANDIR, str(root)),
        "kvtiers du": (*kvtiers, "du", within),
        "kvtiers ls": (*kvtiers, "ls", within),
        "kvtiers ls --json": (*kvtiers, "ls", within, "--json"),
        "kvtiers gc, nothing to remove (lists once)": (*kvtiers, "gc", within, "--dry-run"),
        "kvtiers gc --dry-run, half to remove (lists once)": (*kvtiers, "gc", above, "--dry-run"),
        "kvtiers gc that removes half (lists twice)": (*kvtiers, "gc", above),
    }
    for name, arguments in rows.items():
        found = measure(*arguments, rounds=1 if arguments[-1] == above else rounds)
        ours = arguments[0:3] == kvtiers
        cpu_us = 1e6 * (found.cpu_s - (start_s if ours else 0.0)) / count
        cells = [f"{cpu_us:.1f}", f"{found.cpu_s:.1f}", f"{found.seconds:.1f}", ""]
        if ours:
            cells[0] += LOST * (cpu_us > GOAL_US)
            cells[2] += LOST * (count <= GOAL_COUNT and found.seconds > GOAL_S)
            # Only of commands: a small process shows the peak memory of this one, which started it.
            cells[3] = f"{found.peak_mib:.0f}{LOST * (found.peak_mib > GOAL_MIB)}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/kvtiers-bench-gc"))
    parser.add_argument("--counts", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for count in options.counts:
        options.root.mkdir()
        try:
            # In a child, or the memory that this takes would show as the peak of every process started later.
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    fill(options.root, count)
                    status = 0
                except OSError as e:
                    print(f"{options.root} takes no more files: {e.strerror}; see df -i", file=sys.stderr, flush=True)
                finally:
                    os._exit(status)
            _, status = os.waitpid(pid, 0)
            assert status == 0, "the folder could not be filled"
            with tempfile.TemporaryDirectory() as folder:
                show(options.root, Path(folder), count, options.rounds)
        finally:
            shutil.rmtree(options.root)


if __name__ == "__main__":
    main()
