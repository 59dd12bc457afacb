"""W5: many processes store and load the same blocks on one root, while another removes, cuts and flips them."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.testing.faults import start_child, wait_child
from tests.files import files_below
from tests.identity import FakeSpec, block_key
from tests.promises import Record
from tests.tier_limits import tier_limits

NUM_KEYS, ROW_BYTES = 16, 16 << 10
PROCESSES, SECONDS = 8, 60.0
KEYS = [block_key(number) for number in range(NUM_KEYS)]
CONTENT = np.random.default_rng(5).integers(-128, 128, (NUM_KEYS, ROW_BYTES), np.int8)


def engine(root: Path, seed: int, until: float, note: Path) -> None:
    """Stores and loads some of the blocks, again and again."""
    rows = np.zeros((NUM_KEYS, ROW_BYTES), np.int8)
    options = {"type": "fs", "root_dir": str(root), "min_free": 0, "job_deadline_s": 60.0}
    with tier_limits(circuit_failures=1000):
        tier = SecondaryTierFactory.create_secondary_tier(options, rows.data, FakeSpec())
    choices = random.Random(seed)
    jobs = loaded = 0
    while time.monotonic() < until:
        some = choices.sample(range(NUM_KEYS), choices.randrange(1, NUM_KEYS))
        keys = [KEYS[number] for number in some]
        is_load = choices.random() < 0.6
        rows[some] = 0 if is_load else CONTENT[some]
        jobs += 1
        (tier.submit_load if is_load else tier.submit_store)(JobMetadata(jobs, keys, np.array(some, np.int32)))
        tier.drain_jobs()
        (result,) = tier.get_finished()
        if is_load:
            loaded += len(result.successful_keys)
            for number in some:
                if KEYS[number] in result.successful_keys:
                    assert np.array_equal(rows[number], CONTENT[number]), f"block {number} came back wrong"
    samples = tier.metrics.snapshot()  # type: ignore[attr-defined]
    failures = sum(sample.value for sample in samples if sample.name == "kvtiers_verify_failures_total")
    tier.shutdown()
    assert loaded
    note.write_text(f"{loaded} {failures:.0f}")


def vandal(root: Path, seed: int, until: float) -> None:
    """Removes, truncates, flips and replaces stored files without using a store."""
    choices = random.Random(seed)
    while time.monotonic() < until:
        for path, _ in files_below(root):
            if path.suffix != ".bin":
                continue
            with contextlib.suppress(OSError):
                match choices.randrange(40):
                    case 0:
                        path.unlink()
                    case 1:
                        os.truncate(path, choices.randrange(ROW_BYTES))
                    case 2:
                        with path.open("r+b") as file:
                            file.seek(choices.randrange(ROW_BYTES))
                            file.write(b"\x55")
                    case 3:
                        other = choices.choice([path for path, _ in files_below(root) if path.suffix == ".bin"])
                        os.link(other, f"{path}.other")
                        os.replace(f"{path}.other", path)
        time.sleep(0.002)


@pytest.mark.full
def test_engines_sharing_a_root_with_a_damaging_process_load_no_wrong_block(tmp_path: Path, record: Record) -> None:
    root = tmp_path / "root"
    until = time.monotonic() + SECONDS
    notes = [tmp_path / f"note{seed}" for seed in range(PROCESSES - 1)]
    work = [functools.partial(engine, root, seed, until, note) for seed, note in enumerate(notes)]
    children = [start_child(call) for call in (*work, functools.partial(vandal, root, 99, until))]
    assert [wait_child(child) for child in children] == [0] * PROCESSES
    loaded, failures = (
        sum(column) for column in zip(*(map(int, note.read_text().split()) for note in notes), strict=True)
    )
    assert failures  # the vandal was there
    record(
        "W5", seconds=SECONDS, processes=PROCESSES, keys=NUM_KEYS, blocks_loaded=loaded, caught=failures, wrong=0,
        exceptions=0,
    )  # fmt: skip
