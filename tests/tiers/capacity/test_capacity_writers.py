"""Two writer processes on one root with a bound (D1): the bound, the bytes and the engine's view of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from tests.files import files_below
from tests.tiers.capacity.capacity_writer import ROW_BYTES

ROOT = Path(__file__).parents[3]
MAX_BYTES = 48 << 20
BLOB_BYTES = ROW_BYTES + TRAILER_BYTES


def allocated_bytes(root: Path) -> int:
    """Bytes of the files below a folder, as the file system keeps them."""
    return sum(status.st_blocks * 512 for _, status in files_below(root))


def run_writers(root: Path, seconds: float) -> tuple[int, list[dict[str, int]]]:
    """The most that was seen stored, and what each of two writers met."""
    writers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.tiers.capacity.capacity_writer",
                str(root),
                str(MAX_BYTES),
                str(seconds),
                str(seed),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    highest = 0
    while any(writer.poll() is None for writer in writers):
        highest = max(highest, allocated_bytes(root))
        time.sleep(0.02)
    met = []
    for writer in writers:
        out, _ = writer.communicate(timeout=120)
        assert writer.returncode == 0
        met.append(json.loads(out))
    return highest, met


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_two_writers_stay_within_the_bound(tmp_path: Path, seconds: float) -> None:
    highest, met = run_writers(tmp_path / "kv", seconds)
    print(highest / MAX_BYTES, met)
    # D1: what both put until they hear that the root is full comes on top: three polls of 0.25 s, or more where the
    # collector, which has the lowest priority, gets no core.
    put_per_s = sum(one["stored"] for one in met) * BLOB_BYTES / seconds
    assert MAX_BYTES // 2 < highest <= MAX_BYTES + 3 * put_per_s
    for one in met:
        assert one.get("wrong", 0) == 0
        assert one["circuit_closed"] == 1
        # What does not fit is dropped and counted; nothing else fails.
        assert {name for name in one if name.startswith("error ")} <= {"error StoreFullError"}
        assert one["loaded"] > 0
    if seconds < 10:  # on a busy machine, the collector may not have had its turn
        return
    assert sum(one["removal_events"] for one in met) > 0
    # More went through than the root can hold, so room was made again and again.
    assert sum(one["stored"] for one in met) * BLOB_BYTES > 2 * MAX_BYTES
