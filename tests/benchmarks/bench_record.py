"""What it costs a scheduler's step to record why blocks are absent (``connector.core.record``).

    python -m tests.benchmarks.bench_record [--seconds N] [--where FOLDER]

64 requests run. In each step, four of them have filled a block, which is stored to an fs tier; every 16th step, one
ends and another comes, whose prompt of 64 blocks is not found. Two managers with a tier each take turns, step by step:
one has a record, the other has one that does nothing. Both do the same calls at about the same time, so other load
of the machine affects both alike. Figures: CPU time of the scheduler's thread in kvtiers' calls of a step, as a median
and as a mean; the ratio; and the difference as a part of a step with a forward pass of 5 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.record import Record
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.registry import SecondaryTierFactory
from tests.identity import FakeSpec, block_key
from tests.waiting import PATIENT

ROW_BYTES, SLOTS = 4096, 4096
RUNNING, FILLED_A_STEP, STEPS_A_REQUEST, PROMPT_BLOCKS = 64, 4, 16, 64
FORWARD_S = 0.005


class NoRecord(Record):
    """Records nothing."""

    def blocks(self, reason: str, keys: Collection[OffloadKey], tier: str = "", **facts: Any) -> None:
        pass

    def ended(self, tier: str, reason: str, keys: Collection[OffloadKey]) -> None:
        pass

    def left_region(self, reason: str, keys: Collection[OffloadKey]) -> None:
        pass

    def take(self, tier: str, reasons: Iterable[tuple[str, Collection[OffloadKey]]], nearest: Any) -> None:
        pass

    def is_new_miss(self, req_id: str, key: OffloadKey) -> bool:
        return False

    def missed(self, req_id: str, key: OffloadKey, reason: str = "", tier: str = "", **facts: float) -> None:
        pass

    def loads(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        pass

    def computed(self, req_id: str, num_blocks: int) -> None:
        pass

    def end(self, req_id: str) -> None:
        pass

    def look_at_use(self, tiers: Iterable[str]) -> None:
        pass


class Engine:
    """Requests that run, come and go, over one manager."""

    def __init__(self, root: str, record: type[Record]) -> None:
        self.region = SharedOffloadRegion.anonymous(SLOTS, ROW_BYTES)
        slots = Slots(SLOTS)
        slots.record = record(slots.metrics)
        options = {"type": "fs", "root_dir": root, "min_free": 0, **PATIENT}  # or it is cut off on a busy machine
        spec = FakeSpec(metrics=slots.metrics)
        tier = SecondaryTierFactory.create_secondary_tier(options, self.region.create_kv_memoryview(), spec)
        self.manager = BlockManager(slots, [tier])
        self.contexts = [ReqContext(f"first-{number}") for number in range(RUNNING)]
        self.keys = iter(range(10**9))
        self.waiting: tuple[ReqContext, list[OffloadKey]] | None = None
        self.took_s: list[float] = []

    def step(self, number: int) -> None:
        """One step of the scheduler."""
        filled = [(self.contexts[(number * FILLED_A_STEP + i) % RUNNING], block_key(next(self.keys))) for i in range(4)]
        comes = number % STEPS_A_REQUEST == 0
        if comes:
            self.waiting = ReqContext(f"request-{number}"), [block_key(next(self.keys)) for _ in range(PROMPT_BLOCKS)]
        manager = self.manager
        began = time.thread_time()
        if comes:
            manager.on_request_finished(self.contexts[number % RUNNING])
        if self.waiting is not None:
            context, keys = self.waiting
            answer: bool | None = None
            for key in keys:
                answer = manager.lookup(key, context)
                if answer is False:
                    break
            if answer is not None:
                self.contexts[number % RUNNING] = context
                self.waiting = None
                self._store(keys, context)
        for context, key in filled:
            self._store([key], context)
        manager.on_schedule_end()
        self.took_s.append(time.thread_time() - began)

    def _store(self, keys: list[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            self.manager.complete_store(output.keys_to_store)

    def close(self) -> None:
        self.manager.shutdown()
        self.region.cleanup()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--where", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-", dir=args.where) as root:
        engines = [Engine(f"{root}/{kind.__name__}", kind) for kind in (Record, NoRecord)]
        until, number = time.monotonic() + args.seconds, 0
        while time.monotonic() < until:
            for engine in engines if number % 2 else reversed(engines):
                engine.step(number)
            time.sleep(FORWARD_S)
            number += 1
        for engine in engines:
            engine.close()
    on, off = (engine.took_s[number // 10 :] for engine in engines)
    for name, middle in (("median", statistics.median), ("mean", statistics.fmean)):
        with_s, without_s = middle(on), middle(off)
        print(
            f"{name}: {with_s * 1e6:.1f} µs a step with the record, {without_s * 1e6:.1f} µs without: "
            f"{with_s / without_s:.3f}x, {(with_s - without_s) / (FORWARD_S + without_s):.2%} of a step"
        )
    print(f"{number} steps each")


if __name__ == "__main__":
    main()
