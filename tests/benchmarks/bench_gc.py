"""What listing, summing up and collecting cost at a million blocks: time and memory of each command's own process.

``python -m tests.benchmarks.bench_gc --root /dev/shm/kvtiers-bench --count 1000000``; the folder is made and removed.
Ten million take 10 GB of memory and, on tmpfs, ``mount -o nr_inodes=0``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.identity import FakeSpec
from tiers.file_mapper import FileMapper
from tiers.keys import make_offload_key

BLOB_BYTES = 64  # the cost is in the number of files, not in their bytes
AGE_S_MAX = 30 * 86_400


def fill(root: Path, count: int) -> float:
    """Make blocks of all ages up to 30 days, by plain system calls. Returns seconds."""
    mapper = FileMapper.from_offloading_spec("", FakeSpec())
    started_at = now = time.time()
    made: set[str] = set()
    for number in range(count):
        name = mapper.relative_name(make_offload_key(hashlib.sha256(number.to_bytes(8, "little")).digest(), 0))
        path = f"{root}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, BLOB_BYTES)  # without a page of its own: ten million fit into 10 GB of memory
        os.close(fd)
        at = now - number * (AGE_S_MAX / count) - 60
        os.utime(path, (at, at))
    return time.time() - started_at


def measure(config: Path, command: str, *flags: str) -> dict[str, Any]:
    """Run a command; its seconds, CPU seconds and peak memory."""
    arguments = (command, str(config), *flags)
    started_at = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "connector.cli", *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return _figures(" ".join((command, *flags)), time.monotonic() - started_at, usage)


def _figures(what: str, seconds: float, usage: resource.struct_rusage) -> dict[str, Any]:
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"what": what, "s": round(seconds, 1), "cpu_s": round(cpu_s, 1), "rss_mb": round(usage.ru_maxrss / 1024, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/kvtiers-bench-gc"))
    parser.add_argument("--count", type=int, default=1_000_000)
    options = parser.parse_args()
    options.root.mkdir()
    config = options.root.with_suffix(".yaml")
    try:
        # In a child: a process's peak memory begins with that of the one that started it.
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                fill_s = fill(options.root, options.count)
                print(json.dumps({"what": "fill", "s": round(fill_s, 1), "files": options.count}), flush=True)
                status = 0
            except OSError as e:
                print(f"{options.root} takes no more files: {e.strerror}; see df -i", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status == 0, "the folder could not be filled"
        limit = options.count * BLOB_BYTES
        config.write_text(
            f"region: {{size: 1MiB}}\ntiers:\n- {{type: fs, root_dir: {options.root}, max_bytes: {limit}, "
            "gc_low: 0.5, ttl: 29d}\n"
        )
        for command in (("du", "--json"), ("ls",), ("gc", "--dry-run", "--json"), ("gc", "--json")):
            print(json.dumps(measure(config, *command)), flush=True)
    finally:
        shutil.rmtree(options.root)
        config.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
