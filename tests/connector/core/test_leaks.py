"""S2: whatever fails, no slot stays in use. The real manager and tiers, on storage of which one call in 20 fails.

An operation is a block looked up, loaded or stored, as in the soak.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import SlotCounts, Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.errors import StoreFullError, StoreUnavailableError
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.faults import Fault, FaultyStore
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec
from tests.promises import Record
from tests.soak.engine import RecordedTier, SoakEngine
from tests.soak.ledger import Ledger
from tests.tiers.server.in_threads import in_threads

NUM_SLOTS, NUM_BLOCKS, ROW_BYTES = 48, 256, 4096
SHARE = 0.05
LATE_S = 0.2  # a call that takes so long is given up
LATE_SHARE = 0.005
HEALED_S_MAX = 120.0


def unavailable() -> BaseException:
    return StoreUnavailableError("injected")


def full() -> BaseException:
    return StoreFullError("injected")


PLAN = [
    *(Fault(method, count=None, error=unavailable, share=SHARE) for method in ("size", "size_many", "get_tail")),
    Fault("get_into", count=None, error=unavailable, share=0.4 * SHARE),
    Fault("get_into", count=None, error=SystemExit, share=0.2 * SHARE),
    Fault("get_into", count=None, flip_bit=4321, share=0.4 * SHARE),
    Fault("get_into", count=None, delay_s=LATE_S, share=LATE_SHARE),
    Fault("put", count=None, error=unavailable, share=0.2 * SHARE),
    Fault("put", count=None, error=unavailable, error_after=True, share=0.2 * SHARE),
    Fault("put", count=None, error=full, share=0.2 * SHARE),
    Fault("put", count=None, error=SystemExit, share=0.2 * SHARE),
    Fault("put", count=None, truncate_to=100, share=0.2 * SHARE),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("operations", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_no_slot_leaks(tmp_path: Path, operations: int, record: Record) -> None:
    spec = FakeSpec()
    region = SharedOffloadRegion.anonymous(NUM_SLOTS, ROW_BYTES)
    view = region.create_kv_memoryview()
    rows = np.frombuffer(view, np.int8).reshape(NUM_SLOTS, ROW_BYTES)
    contents = np.random.default_rng(1).integers(0, 127, (NUM_BLOCKS, ROW_BYTES), np.int8)
    ledger = Ledger(time.monotonic)
    inner: list[Store] = [LocalStore(tmp_path / "kv"), MemoryStore()]
    stores = [FaultyStore(store, PLAN) for store in inner]
    options = TierOptions(
        job_deadline_s=LATE_S / 2,
        circuit_probe_s=0.02,
        lookup=LookupOptions(deadline_s=1.0, present_ttl_s=0.01, absent_ttl_s=0.01),
    )
    mapper = FileMapper.from_offloading_spec("", spec)
    tiers = [
        RecordedTier(
            StoreTierManager(spec, view, name, make_backend=in_threads(store), mapper=mapper, options=options), ledger
        )
        for name, store in zip(("files", "memory"), stores, strict=True)
    ]
    slots = Slots(NUM_SLOTS, metrics=spec.metrics)
    manager = BlockManager(slots, tiers, ManagerOptions(load_deadline_s=LATE_S / 2))
    engine = SoakEngine(manager, rows, contents, ledger, seed=2, sleep=lambda _: time.sleep(0.0002))
    most = SlotCounts(0, 0, 0, 0, 0)

    def made() -> int:
        totals = engine.totals
        return totals.lookups + totals.blocks_loaded + totals.blocks_stored

    def done() -> bool:
        nonlocal most
        most = SlotCounts(*map(max, most, slots.counts()))
        return made() >= operations

    engine.run(done)
    struck = sum((store.struck for store in stores), Counter[Fault]()).total()
    calls = sum(store.calls.total() for store in stores)
    for store in stores:
        store.plan = []
    healed_s = engine.settle(HEALED_S_MAX)
    counts = slots.counts()
    manager.shutdown()
    assert not ledger.violations, ledger.details
    assert (counts.pinned, counts.pending, counts.quarantined) == (0, 0, 0)
    assert made() >= operations
    assert struck >= 0.8 * SHARE * calls
    assert min(most) > 0, f"not every state was seen: {most}"
    assert engine.totals.blocks_loaded
    record(
        "S2", operations=made(), calls_of_storage=calls, faults=struck, most_pinned=most.pinned,
        most_quarantined=most.quarantined, slots_in_use=0, healed_after_s=healed_s,
    )  # fmt: skip
