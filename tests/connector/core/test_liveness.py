"""L1 to L5 in real time: the real manager over tiers whose I/O hangs, all of it at once. The figures are reported.

What is asserted are generous limits, for busy machines; the pass lines are in the report (``record``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.slots import Slots
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.faults import Fault, FaultyStore
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec, block_key
from tests.promises import Record
from tests.soak.ledger import CallTimes, settled_heap
from tests.tiers.server.in_threads import in_threads
from tests.waiting import wait_for

ROW_BYTES = 4096
NUM_SLOTS = 64
JOB_DEADLINE_S = 1.0
BUSY_MACHINE_S = 60.0  # beyond the promised time; what really hangs, hangs for ever here
METHODS = ("put", "get_into", "get_tail", "size", "size_many")
KEYS = [block_key(number) for number in range(400)]


class Rig:
    """A manager over two tiers, in files and in memory, whose I/O hangs when told."""

    def __init__(self, root: Path) -> None:
        self.hang = threading.Event()
        self.spec = FakeSpec()
        self.region = SharedOffloadRegion.anonymous(NUM_SLOTS, ROW_BYTES)
        view = self.region.create_kv_memoryview()
        self.rows = np.frombuffer(view, np.int8).reshape(NUM_SLOTS, ROW_BYTES)
        self.stores = [FaultyStore(LocalStore(root)), FaultyStore(MemoryStore())]
        options = TierOptions(job_deadline_s=JOB_DEADLINE_S, circuit_probe_s=0.2)
        self.tiers = [
            StoreTierManager(
                self.spec, view, name, make_backend=in_threads(store), options=options,
                mapper=FileMapper.from_offloading_spec("", self.spec),
            )
            for name, store in zip(("files", "memory"), self.stores, strict=True)
        ]  # fmt: skip
        self.slots = Slots(NUM_SLOTS, metrics=self.spec.metrics)
        self.manager = BlockManager(self.slots, self.tiers)
        self.times = CallTimes(time.monotonic)
        self._requests = 0

    def hang_all(self) -> None:
        for store in self.stores:
            store.plan = [Fault(method, count=None, hang=self.hang) for method in METHODS]

    def heal(self) -> None:
        for store in self.stores:
            store.plan = []
        self.hang.set()

    def store(self, keys: Sequence[OffloadKey]) -> None:
        timed = self.times.timed
        output = timed("prepare_store", lambda: self.manager.prepare_store(keys, ReqContext("store")))
        if output is None:
            return
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        for key, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self.rows[slot] = key[0] % 127
        timed("complete_store", lambda: self.manager.complete_store(output.keys_to_store))

    def step(self) -> None:
        self.times.timed("on_schedule_end", self.manager.on_schedule_end)

    def all_tiers(self, *, closed: bool) -> bool:
        """One step, and whether the circuits of all tiers are closed, or none is."""
        self.step()
        return all((tier.circuit_state == "closed") is closed for tier in self.tiers)

    def ask(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bool | None]:
        """One round of questions, and the end of the step."""
        found = [self.times.timed("lookup", lambda key=key: self.manager.lookup(key, context)) for key in keys]  # type: ignore[misc]
        self.step()
        return found

    def seconds_until_known(self, keys: Sequence[OffloadKey]) -> tuple[float, list[bool | None]]:
        """How long until none of the answers is "ask again", and the answers."""
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        start_s = time.monotonic()
        answers = wait_for(lambda: None not in (found := self.ask(keys, context)) and found)
        assert answers
        took_s = time.monotonic() - start_s
        self.manager.on_request_finished(context)
        return took_s, answers

    def put_away(self, keys: Sequence[OffloadKey]) -> None:
        """Store keys to both tiers, and forget them in the region. Again, where a busy machine missed the deadline."""

        def are_stored() -> bool:
            self.store(keys)
            self.manager.drain()
            self.manager.reset_cache()
            names = [self.tiers[0].mapper.relative_name(key) for key in keys]
            is_stored = all(None not in map(store.size, names) for store in self.stores)
            return self.all_tiers(closed=True) and is_stored

        wait_for(are_stored)

    def forget_lookups(self) -> None:
        """As another engine would start: nothing is known to be present."""
        for tier in self.tiers:
            tier._lookup._answers.clear()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "root")
    yield rig
    rig.heal()
    rig.manager.shutdown()
    rig.region.cleanup()


@pytest.mark.parametrize("hang_s", [3.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_scheduler_calls_do_not_wait_while_all_storage_hangs(rig: Rig, record: Record, hang_s: float) -> None:
    """L1. Stores, lookups and loads go on; no call waits for the I/O they cause."""
    rig.put_away(KEYS[:16])
    rig.hang_all()
    contexts: deque[ReqContext] = deque()
    with settled_heap():
        end_s = time.monotonic() + hang_s
        number = 0
        while time.monotonic() < end_s or rig.times.count <= 1000:
            number += 1
            first = 16 + 4 * (number % 90)
            rig.store(KEYS[first : first + 4])
            contexts.append(ReqContext(f"hung-{number}"))
            rig.ask([*KEYS[:8], *KEYS[first : first + 8]], contexts[-1])
            if len(contexts) > 64:  # so many wait at once
                done = contexts.popleft()
                rig.times.timed("on_request_finished", lambda done=done: rig.manager.on_request_finished(done))  # type: ignore[misc]
            assert sum(rig.slots.counts()) == NUM_SLOTS
            time.sleep(0.001)
            rig.times.end_step()
    print(*rig.times.slow, sep="\n")
    assert rig.times.worst_s < BUSY_MACHINE_S
    record(
        "L1",
        hung_s=hang_s,
        calls=rig.times.count,
        p99_ms=1e3 * rig.times.percentile_s(99),
        worst_ms=1e3 * rig.times.worst_s,
    )


def test_lookups_are_misses_in_time_while_all_storage_hangs(rig: Rig, record: Record) -> None:
    """L2. A key in no region is a miss after the deadline; once the tiers are cut off, at once."""
    rig.put_away(KEYS[:4])
    rig.forget_lookups()
    rig.hang_all()
    took_s, answers = rig.seconds_until_known(KEYS[:4])
    assert not any(answers)
    assert took_s < 0.2 + BUSY_MACHINE_S
    for first in (8, 16, 24, 32):
        rig.seconds_until_known(KEYS[first : first + 4])
    wait_for(lambda: rig.all_tiers(closed=False))
    later_s, answers = rig.seconds_until_known(KEYS[40:44])
    assert not any(answers)
    record("L2", answered_after_s=took_s, cut_off_answered_after_ms=1e3 * later_s)


def test_hung_load_is_given_up_and_its_slots_are_quarantined(rig: Rig, record: Record) -> None:
    """L3. The request goes on; who hangs keeps the slots; they are free again when it has let go."""
    rig.put_away(KEYS[:8])
    rig.hang_all()
    took_s, answers = rig.seconds_until_known(KEYS[:8])
    assert not any(answers)
    assert took_s < 2 * (JOB_DEADLINE_S + 1) + BUSY_MACHINE_S
    quarantined = rig.slots.counts().quarantined
    assert quarantined >= 8
    rig.heal()
    start_s = time.monotonic()

    def is_idle() -> bool:
        rig.step()
        counts = rig.slots.counts()
        return not counts.pinned + counts.pending + counts.quarantined

    wait_for(is_idle)
    record(
        "L3",
        job_deadline_s=JOB_DEADLINE_S,
        tiers_tried=2,
        ended_after_s=took_s,
        slots_quarantined=quarantined,
        free_after_healing_s=time.monotonic() - start_s,
    )


def test_failing_tier_is_cut_off_and_used_again_after_recovery(rig: Rig, record: Record) -> None:
    """L4. By failures in a row here; by a deadline in the test above."""
    rig.put_away(KEYS[:8])

    def unavailable() -> Exception:
        return StoreUnavailableError("injected")

    for store in rig.stores:
        store.plan = [Fault(method, count=None, error=unavailable) for method in METHODS]
    stores = 0
    while any(tier.circuit_state == "closed" for tier in rig.tiers):
        rig.store(KEYS[100 + 4 * stores : 104 + 4 * stores])
        stores += 1
        rig.manager.drain()
        rig.step()
        assert stores < 20
    dropped = rig.spec.metrics.value("kvtiers_stores_dropped_total", "files", "StoreUnavailableError")
    rig.heal()
    start_s = time.monotonic()
    wait_for(lambda: rig.all_tiers(closed=True))
    back_s = time.monotonic() - start_s
    rig.forget_lookups()
    rig.manager.reset_cache()
    # A busy machine may miss the deadline of a lookup or a load: then it is a miss, and the next request finds it.
    wait_for(lambda: rig.seconds_until_known(KEYS[:8])[1] == [True] * 8)
    record("L4", stores_until_cut_off=stores, blocks_failed=int(dropped), probe_every_s=0.2, back_after_s=back_s)


def test_shutdown_ends_in_time_while_all_storage_hangs(rig: Rig, record: Record) -> None:
    """L5."""
    rig.put_away(KEYS[:8])
    rig.hang_all()
    rig.store(KEYS[16:48])
    rig.ask(KEYS[:8], ReqContext("load"))
    rig.ask(KEYS[:8], ReqContext("load"))
    wait_for(lambda: all(store.struck for store in rig.stores))
    start_s = time.monotonic()
    rig.manager.shutdown()
    took_s = time.monotonic() - start_s
    assert took_s < 5 + BUSY_MACHINE_S
    assert rig.slots.counts().quarantined > 0, "nobody may have them: the stuck threads may still write"
    record("L5", tiers=2, shutdown_s=took_s)


def test_rig_hangs_calls_of_both_stores_until_healed(rig: Rig) -> None:
    """Or the tests above would show nothing."""
    rig.hang_all()
    ended: list[object] = []
    calls: list[Callable[[], object]] = [
        lambda: rig.stores[0].size("f/a"),
        lambda: rig.stores[1].put("f/a", [memoryview(b"x")]),
    ]
    threads = [threading.Thread(target=lambda call=call: ended.append(call()), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    wait_for(lambda: rig.stores[0].struck and rig.stores[1].struck)
    assert not ended
    rig.heal()
    for thread in threads:
        thread.join(BUSY_MACHINE_S)
    assert len(ended) == 2
