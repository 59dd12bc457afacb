"""A process that stores and loads through a whole tier for some seconds, and then prints its counts.

``python -m tests.tiers.capacity.capacity_writer ROOT MAX_BYTES SECONDS SEED``
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter, deque

import numpy as np

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.identity import FakeSpec, block_key

ROWS, ROW_BYTES = 16, 256 << 10
LATE_S_MAX = 600.0


def content(number: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    return np.random.default_rng(number).integers(-128, 128, ROW_BYTES, np.int8)


def main() -> None:
    root, max_bytes, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    region = np.zeros((ROWS, ROW_BYTES), np.int8)
    spec = FakeSpec()
    config = {"type": "fs", "root_dir": root, "min_free": 0, "max_bytes": max_bytes}
    config["job_deadline_s"] = 120.0  # a busy machine is no fault of the storage
    tier = SecondaryTierFactory.create_secondary_tier(config, region.data, spec)
    collector = tier._collector  # type: ignore[attr-defined]
    while collector._child.spoke_at is None:  # its start takes seconds on a busy machine
        tier.on_schedule_end()
        time.sleep(0.01)
    met: Counter[str] = Counter()
    recent: deque[int] = deque(maxlen=64)
    number = seed * 1_000_000
    end = time.monotonic() + seconds
    job_id = 0
    # Each on its own more than the root can hold, however slow the machine is.
    enough, late = max_bytes // (ROW_BYTES + TRAILER_BYTES) + 1, end + LATE_S_MAX
    while (now := time.monotonic()) < end or (met["stored"] < enough and now < late):
        loading = bool(recent) and rng.random() < 0.5
        numbers = rng.sample(list(recent), min(8, len(recent))) if loading else list(range(number, number + 8))
        if loading:
            region[:] = 0
        else:
            number += 8
            for row, n in enumerate(numbers):
                region[row] = content(n)
        job_id += 1
        keys = [block_key(n) for n in numbers]
        job = JobMetadata(job_id, keys, np.arange(len(numbers), dtype=np.int32))
        (tier.submit_load if loading else tier.submit_store)(job)
        tier.drain_jobs()
        tier.on_schedule_end()
        (result,) = tier.get_finished()
        done = set(result.successful_keys)
        for row, (key, n) in enumerate(zip(keys, numbers, strict=True)):
            if key not in done:
                met["missed" if loading else "not_stored"] += 1
            elif not loading:
                met["stored"] += 1
                recent.append(n)
            elif np.array_equal(region[row], content(n)):
                met["loaded"] += 1
            else:
                met["wrong"] += 1
        met["removal_events"] += sum(len(event.keys) for event in tier.take_events() if event.removed)
    for sample in spec.metrics.snapshot():
        if sample.name == "kvtiers_store_errors_total":
            met[f"error {sample.labels['error']}"] += int(sample.value)
        elif sample.name == "kvtiers_collector_runs_total":
            met[f"runs {sample.labels['outcome']}"] += int(sample.value)
        elif sample.name == "kvtiers_circuit_closed":
            met["circuit_closed"] = int(sample.value)
    tier.shutdown()
    print(json.dumps(met))


if __name__ == "__main__":
    main()
