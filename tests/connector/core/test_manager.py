"""BlockManager against scripted tiers: cascade, promotion, bounded waiting, and tiers that misbehave."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.core import guard, waits
from kvtiers.connector.core.guard import JOB_DEADLINE_S, REPORT_S, GuardedTier
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import SlotCounts, Slots
from kvtiers.connector.core.stores import RETRY_S
from kvtiers.tiers.base import JobResult, OffloadingEvent, ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import Metrics
from tests.clock import Clock
from tests.connector.core.scripted_tier import PollingTier, ScriptedTier, job_keys, make_view, pattern, row
from tests.connector.core.simulated_engine import look_up
from tests.identity import block_key
from tests.promises import Record

KEYS = [block_key(number) for number in range(64)]
REQ = ReqContext("r")


class Engine:
    """A manager with scripted tiers, and the few things an engine does with it."""

    def __init__(self, num_blocks: int = 16, num_tiers: int = 1, *, auto: bool = True, **options: Any) -> None:
        self.clock = Clock()
        self.view = make_view(num_blocks)
        self.tiers = [ScriptedTier(self.view, f"tier{index}", auto=auto) for index in range(num_tiers)]
        self.slots = Slots(num_blocks)
        self.manager = BlockManager(self.slots, self.tiers, ManagerOptions(**options), clock=self.clock)

    def with_tiers(self, *tiers: ScriptedTier) -> BlockManager:
        """Replace the tiers."""
        self.tiers = list(tiers)
        self.manager = BlockManager(self.slots, tiers, clock=self.clock)
        return self.manager

    @property
    def tier(self) -> ScriptedTier:
        return self.tiers[0]

    @property
    def counts(self) -> SlotCounts:
        return self.slots.counts()

    def store(self, *keys: OffloadKey) -> None:
        output = self.manager.prepare_store(keys, REQ)
        assert output is not None
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        for key, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            row(self.view, slot)[:] = pattern(key)
        self.manager.complete_store(keys)

    def lookup(self, keys: Sequence[OffloadKey], req: ReqContext = REQ) -> list[bool | None]:
        """A step: in order, until the first miss."""
        answers = look_up(self.manager, keys, req)
        self.manager.on_schedule_end()
        return answers

    def lookup_until_known(self, keys: Sequence[OffloadKey], req: ReqContext = REQ, steps: int = 20) -> list[bool]:
        for _ in range(steps):
            answers = self.lookup(keys, req)
            if None not in answers:
                return [bool(answer) for answer in answers]
            self.clock.advance(0.05)
        raise AssertionError(f"still {answers} after {steps} steps")

    def load(self, keys: Sequence[OffloadKey], req: ReqContext = REQ) -> None:
        """Load ready keys and check their bytes."""
        spec = self.manager.prepare_load(keys, req)
        assert isinstance(spec, CPULoadStoreSpec)
        for key, slot in zip(keys, spec.block_ids.tolist(), strict=True):
            assert bytes(row(self.view, slot)) == pattern(key)
        self.manager.complete_load(keys)

    def counted(self, name: str, *labels: str) -> float:
        return self.manager.metrics.value(name, *labels)


# ---- cascade


def test_stored_block_is_pinned_until_stored_by_every_tier() -> None:
    engine = Engine(num_tiers=3, auto=False, store_backlog_share=1)
    engine.store(*KEYS[:4])
    assert [[job_keys(job) for job in tier.submitted] for tier in engine.tiers] == [[KEYS[:4]]] * 3
    job_ids = [next(iter(tier.jobs)) for tier in engine.tiers]
    assert len(set(job_ids)) == 3
    for tier, job_id in zip(engine.tiers, job_ids, strict=True):
        assert engine.counts.pinned == 4
        assert engine.lookup(KEYS[:4]) == [True] * 4  # loadable meanwhile
        tier.finish(job_id)
        engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=12, ready=4, pinned=0, pending=0, quarantined=0)
    assert all(tier.blobs == {key: pattern(key) for key in KEYS[:4]} for tier in engine.tiers)


def test_read_only_tier_gets_no_stores_and_its_hits_are_stored_to_earlier_tiers() -> None:
    engine = Engine(num_tiers=2)
    engine.tiers[1].takes_stores = False
    engine.manager = BlockManager(engine.slots, engine.tiers, ManagerOptions(), clock=engine.clock)
    engine.store(*KEYS[:3])
    engine.manager.on_schedule_end()
    engine.manager.touch(KEYS[:3])
    engine.manager.on_schedule_end()
    assert [job_keys(job) for job in engine.tiers[0].submitted] == [KEYS[:3]]
    engine.tiers[1].blobs[KEYS[5]] = pattern(KEYS[5])
    assert engine.lookup_until_known(KEYS[5:6]) == [True]
    engine.load(KEYS[5:6])
    assert engine.tiers[0].blobs.keys() == {*KEYS[:3], KEYS[5]}
    assert [job_keys(job) for job in engine.tiers[1].submitted] == [KEYS[5:6]]  # the load


def test_only_new_blocks_are_stored_to_tiers() -> None:
    engine = Engine()
    engine.store(*KEYS[:3])
    engine.store(*KEYS[1:5])
    assert [job_keys(job) for job in engine.tier.submitted] == [KEYS[:3], KEYS[3:5]]


def test_failed_store_reaches_no_tier() -> None:
    engine = Engine()
    engine.manager.prepare_store(KEYS[:3], REQ)
    engine.manager.complete_store(KEYS[:3], success=False)
    assert engine.tier.submitted == []
    assert engine.counts.free == 16


def test_stores_beyond_the_backlog_share_are_dropped_and_counted(
    caplog: pytest.LogCaptureFixture, record: Record
) -> None:
    engine = Engine(num_blocks=16, auto=False, store_backlog_share=0.5)
    engine.store(*KEYS[:6])
    engine.store(*KEYS[6:8])
    engine.store(*KEYS[8:11])  # half of the region is pinned already
    engine.store(*KEYS[11:12])
    assert len(engine.tier.submitted) == 2
    assert engine.counts.pinned == 8
    assert engine.counted("kvtiers_stores_dropped_total", "tier0", "backlog") == 4
    assert engine.counted("kvtiers_blocks_total", "tier0", "store", "dropped") == 4
    assert len([r for r in caplog.records if "wait for this tier" in r.message]) == 1
    assert engine.lookup(KEYS[8:12]) == [True] * 4
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.manager.on_schedule_end()
    engine.store(*KEYS[12:14])
    assert len(engine.tier.submitted) == 3
    record("D4", share_of_the_region=0.5, blocks_dropped_and_counted=4)


def test_refused_block_is_offered_again_at_its_next_use() -> None:
    """A prefix that never leaves the region would else never get there."""
    engine = Engine(num_tiers=2, auto=False, store_backlog_share=1)
    dead, good = engine.tiers
    engine.store(*KEYS[:4])
    dead.finish(next(iter(dead.jobs)), failing=KEYS[1:3])
    good.finish(next(iter(good.jobs)))
    engine.manager.on_schedule_end()
    engine.manager.touch(KEYS[:6])
    assert len(dead.submitted) == 1  # at once would be too soon: a dead tier would be asked with each request
    engine.clock.advance(RETRY_S)
    engine.manager.touch(KEYS[3:6])  # nothing of what it lacks
    engine.manager.touch([KEYS[2], KEYS[2], KEYS[0], KEYS[1]])
    engine.manager.touch(KEYS[:4])  # they are on their way
    assert [job_keys(job) for job in dead.submitted] == [KEYS[:4], [KEYS[2], KEYS[1]]]
    assert len(good.submitted) == 1
    dead.finish(next(iter(dead.jobs)))
    engine.manager.on_schedule_end()
    engine.clock.advance(RETRY_S)
    engine.manager.touch(KEYS[:4])
    assert len(dead.submitted) == 2
    assert dead.blobs.keys() == good.blobs.keys()
    assert engine.counts == SlotCounts(free=12, ready=4, pinned=0, pending=0, quarantined=0)


def test_dropped_block_is_offered_again_at_its_next_use() -> None:
    engine = Engine(num_blocks=16, auto=False, store_backlog_share=0.25)
    engine.store(*KEYS[:4])
    engine.store(*KEYS[4:8])
    engine.clock.advance(RETRY_S)
    engine.manager.touch(KEYS[4:8])  # it is still behind: for another while
    engine.tier.auto = True
    engine.manager.on_schedule_end()
    engine.manager.touch(KEYS[4:8])
    assert engine.tier.blobs.keys() == set(KEYS[:4])
    engine.clock.advance(RETRY_S)
    engine.manager.touch(KEYS[4:8])
    engine.manager.on_schedule_end()
    assert engine.tier.blobs.keys() == set(KEYS[:8])
    assert engine.counted("kvtiers_stores_dropped_total", "tier0", "backlog") == 8


def test_refused_block_is_offered_again_when_another_tier_loads_it() -> None:
    """Here from the tier before it; in a region that is smaller than what is used, nothing would stay until then."""
    engine = Engine(num_blocks=4, num_tiers=2, load_share=1, store_backlog_share=1)
    far = engine.tiers[1]
    far.auto = False
    engine.store(*KEYS[:2])
    far.finish(next(iter(far.jobs)), failing=KEYS[:2])
    far.auto = True
    engine.manager.on_schedule_end()
    engine.store(*KEYS[10:14])
    engine.manager.on_schedule_end()
    assert engine.slots.find(KEYS[0]) is None
    assert engine.lookup_until_known(KEYS[:1]) == [True]
    assert far.blobs.keys() == set(KEYS[10:14])  # at once would be too soon
    engine.clock.advance(RETRY_S)
    assert engine.lookup_until_known(KEYS[1:2]) == [True]
    engine.manager.touch(KEYS[:2])
    engine.manager.on_schedule_end()
    assert far.blobs.keys() == {*KEYS[:2], *KEYS[10:14]}
    stored = [key for job in engine.tier.submitted if not job.is_load for key in job_keys(job)]
    assert stored == [*KEYS[:2], *KEYS[10:14]]  # the tier before has it, and is not offered it


def test_evicted_unsent_block_is_offered_again_when_another_tier_loads_it() -> None:
    engine = Engine(num_blocks=8, num_tiers=2, load_share=1, store_backlog_share=0.25)
    far = engine.tiers[1]
    far.auto = False
    engine.store(*KEYS[:4])
    for _ in range(4):
        engine.manager.on_schedule_end()
    engine.store(*KEYS[10:17])  # evicts what waits
    far.auto = True
    for _ in range(8):
        engine.manager.on_schedule_end()
    assert not far.blobs.keys() & set(KEYS[1:4])
    engine.clock.advance(RETRY_S)
    assert engine.lookup_until_known(KEYS[:4]) == [True] * 4
    for _ in range(4):
        engine.manager.on_schedule_end()
    assert set(KEYS[:4]) <= far.blobs.keys()


def test_unsent_block_dropped_by_reset_is_offered_again_when_another_tier_loads_it() -> None:
    engine = Engine(num_blocks=8, num_tiers=2, load_share=1, store_backlog_share=0.25)
    engine.tier.put(*KEYS[:4])
    far = engine.tiers[1]
    far.auto = False
    engine.store(*KEYS[:4])
    engine.manager.reset_cache()
    far.auto = True
    engine.manager.on_schedule_end()
    assert far.blobs.keys() == {KEYS[0]}
    engine.clock.advance(RETRY_S)
    assert engine.lookup_until_known(KEYS[:4]) == [True] * 4
    for _ in range(4):
        engine.manager.on_schedule_end()
    assert far.blobs.keys() == set(KEYS[:4])


def test_block_that_a_tier_always_refuses_delays_no_other_blocks() -> None:
    engine = Engine(num_blocks=32, auto=False)
    bad = {KEYS[0], *KEYS[20:30]}

    def end_jobs(failing: Collection[OffloadKey]) -> None:
        for job_id in list(engine.tier.jobs):
            engine.tier.finish(job_id, failing)
        engine.manager.on_schedule_end()

    engine.store(*KEYS[:4])
    end_jobs(KEYS[:4])
    for second in range(60):
        engine.clock.advance(1.0)
        engine.manager.touch(KEYS[:1])
        if second % 7 == 0:
            engine.store(KEYS[20 + second // 7])
            engine.manager.touch(KEYS[1:4])
        end_jobs(bad)
    assert engine.tier.blobs.keys() == set(KEYS[1:4])
    assert [job_keys(job) for job in engine.tier.submitted].count(KEYS[:1]) == 6  # in 60 s


def test_refused_blocks_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.connector.core.stores.REFUSED_MAX", 4)
    engine = Engine(num_blocks=4)
    engine.tier.raising.add("submit_store")
    for key in KEYS[:10]:
        engine.store(key)
    assert list(engine.manager._stores._refused[0]) == KEYS[6:10]


def test_hung_tier_leaves_the_region_and_other_tiers_usable() -> None:
    engine = Engine(num_blocks=16, num_tiers=2, store_backlog_share=0.5)
    hung, good = engine.tiers
    hung.auto = False
    for key in KEYS[:60]:
        engine.store(key)
        engine.manager.on_schedule_end()
    assert engine.counts.pinned == 4
    assert good.blobs.keys() == set(KEYS[:60])
    assert engine.counted("kvtiers_stores_dropped_total", "tier0", "backlog") == 56


def test_large_store_is_sent_in_parts_within_the_share_of_each_tier() -> None:
    engine = Engine(num_blocks=16, num_tiers=2, store_backlog_share=0.5)
    hung, good = engine.tiers
    hung.auto = False
    engine.store(*KEYS[:15])
    for _ in range(4):
        engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=1, ready=11, pinned=4, pending=0, quarantined=0)
    assert good.blobs.keys() == set(KEYS[:15])
    assert [job_keys(job) for job in hung.submitted] == [KEYS[:4]]
    engine.store(*KEYS[20:30])  # evicts nine of the eleven that wait
    hung.auto = True
    for _ in range(4):
        engine.manager.on_schedule_end()
    assert len(hung.blobs) == 4 + 2
    # Ten came while it had no room, nine were evicted while they waited.
    assert engine.counted("kvtiers_stores_dropped_total", "tier0", "backlog") == 10 + 9
    assert engine.counts.pinned == 0


@pytest.mark.parametrize("end", ["drain", "shutdown"])
def test_unsent_blocks_are_sent_at_drain_and_shutdown(end: str) -> None:
    engine = Engine(num_blocks=16, num_tiers=2, auto=False, store_backlog_share=0.25)
    engine.store(*KEYS[:15])
    assert engine.counts.pinned == 2
    getattr(engine.manager, end)()
    for tier in engine.tiers:
        assert sorted(key for job in tier.submitted for key in job_keys(job)) == sorted(KEYS[:15])
    assert engine.counts.pinned == engine.counts.quarantined == 0


def test_unsent_blocks_of_a_raising_tier_are_sent_when_its_share_is_free() -> None:
    engine = Engine(num_blocks=16, store_backlog_share=0.1)
    engine.tier.raising.add("submit_store")
    engine.store(*KEYS[:15])
    assert engine.counts.pinned == 2  # it may have begun these, so they are kept for it a while
    engine.clock.advance(JOB_DEADLINE_S)
    for _ in range(3):
        engine.manager.on_schedule_end()
    assert engine.tier.calls.count("submit_store") == 2
    engine.tier.raising.clear()
    engine.clock.advance(JOB_DEADLINE_S)
    for _ in range(10):
        engine.manager.on_schedule_end()
    assert engine.tier.blobs.keys() == set(KEYS[4:15])
    assert engine.counts.pinned == 0
    assert engine.manager._stores._unsent == [type(engine.manager._stores._unsent[0])()]


def test_failing_stores_of_one_tier_do_not_delay_other_tiers() -> None:
    engine = Engine(num_tiers=2, auto=False)
    engine.store(*KEYS[:2])
    for tier, failing in zip(engine.tiers, (KEYS[:2], ()), strict=True):
        tier.finish(next(iter(tier.jobs)), failing)
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 0
    assert engine.tiers[1].blobs.keys() == set(KEYS[:2])


# ---- promotion


def test_hits_of_a_request_are_loaded_in_one_job_at_the_end_of_the_step() -> None:
    engine = Engine(auto=False)
    engine.tier.put(*KEYS[:8])
    a, b = ReqContext("a"), ReqContext("b")
    assert [engine.manager.lookup(key, a) for key in KEYS[:4]] == [None] * 4
    assert [engine.manager.lookup(key, b) for key in KEYS[2:7]] == [None] * 5
    assert engine.tier.submitted == []
    engine.manager.on_schedule_end()
    # What a already gets is not fetched again for b.
    assert [(job.is_load, job_keys(job), job.metadata.req_context) for job in engine.tier.submitted] == [
        (True, KEYS[:4], a),
        (True, KEYS[4:7], b),
    ]
    assert engine.lookup(KEYS[:4], a) == [None] * 4
    for job_id in list(engine.tier.jobs):
        engine.tier.finish(job_id)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:4], a) == [True] * 4
    assert engine.lookup([*KEYS[2:7], KEYS[40]], b) == [True] * 5 + [False]
    engine.load(KEYS[:4], a)
    engine.load(KEYS[2:7], b)
    assert engine.tier.submitted[2:] == []


def test_absent_key_is_a_miss_at_once() -> None:
    engine = Engine(num_tiers=2)
    assert engine.lookup([KEYS[0]]) == [False]
    assert engine.counts.free == 16


def test_block_in_several_tiers_is_loaded_from_the_first_tier() -> None:
    engine = Engine(num_tiers=3)
    engine.tiers[1].put(KEYS[0], KEYS[1])
    engine.tiers[2].put(KEYS[0], KEYS[2])
    assert engine.lookup_until_known(KEYS[:3]) == [True] * 3
    assert [[job_keys(job) for job in tier.submitted if job.is_load] for tier in engine.tiers] == [
        [],
        [KEYS[:2]],
        [KEYS[2:3]],
    ]
    assert KEYS[0] not in engine.tiers[2].asked  # once a tier has it, slower ones are not asked


def test_excluded_tier_is_not_asked() -> None:
    engine = Engine(num_tiers=2)
    for tier in engine.tiers:
        tier.put(KEYS[0])
    engine.tiers[0].put(KEYS[1])
    engine.manager.excluded_tiers = lambda context: 1 if context.req_id == "barred" else 0
    assert engine.lookup_until_known(KEYS[:2], ReqContext("barred")) == [True, False]
    assert not engine.tiers[0].asked
    assert [job_keys(job) for job in engine.tiers[1].submitted if job.is_load] == [[KEYS[0]]]
    assert engine.lookup_until_known(KEYS[:2], ReqContext("other")) == [True, True]
    assert engine.lookup_until_known(KEYS[:2], ReqContext("barred")) == [True, True]  # it is in the region now


def test_block_loaded_from_a_later_tier_is_stored_to_earlier_tiers() -> None:
    engine = Engine(num_tiers=3, store_backlog_share=1, load_share=1)
    engine.tiers[2].put(*KEYS[:4])
    assert engine.lookup_until_known(KEYS[:4]) == [True] * 4
    stores = [[job_keys(job) for job in tier.submitted if not job.is_load] for tier in engine.tiers]
    assert stores == [[KEYS[:4]], [KEYS[:4]], []]
    engine.load(KEYS[:4])
    engine.manager.on_schedule_end()
    assert engine.tiers[0].blobs == engine.tiers[2].blobs
    assert engine.counts.pinned == 0


def test_load_in_parts_is_stored_whole_to_earlier_tiers() -> None:
    engine = Engine(num_tiers=2)
    near, far = engine.tiers
    near.auto = False
    far.put(*KEYS[:12])
    assert engine.lookup_until_known(KEYS[:12]) == [True] * 12
    assert len([job for job in far.submitted if job.is_load]) > 1
    for _ in range(12):
        for job_id in list(near.jobs):
            near.finish(job_id)
        engine.manager.on_schedule_end()
    assert near.blobs == far.blobs
    assert engine.counted("kvtiers_stores_dropped_total", "tier0", "backlog") == 0


def test_all_tiers_are_asked_in_the_same_step() -> None:
    engine = Engine(num_tiers=2)
    for tier in engine.tiers:
        tier.answers_later = True
    engine.tiers[1].put(*KEYS[:2])
    assert engine.lookup(KEYS[:2]) == [None] * 2
    assert [tier.asked for tier in engine.tiers] == [KEYS[:2]] * 2
    assert engine.lookup_until_known(KEYS[:2]) == [True] * 2


def test_time_without_lookups_does_not_count_as_wait_for_a_tier() -> None:
    """vLLM looks up no waiting request while its batch is full."""
    engine = Engine()
    engine.tier.put(*KEYS[:4])
    engine.tier.silent = True
    assert engine.lookup(KEYS[:4]) == [None] * 4
    engine.clock.advance(61.0)
    assert engine.lookup(KEYS[:4]) == [None] * 4
    engine.tier.silent = False
    assert engine.lookup_until_known(KEYS[:4]) == [True] * 4
    assert engine.counted("kvtiers_deadline_expired_total", "tier0", "lookup") == 0


def test_wait_for_silent_tier_ends_after_few_rare_lookups() -> None:
    engine = Engine(lookup_total_s=2.0)
    engine.tier.silent = True
    seen = []
    for _ in range(3):
        seen.append(engine.lookup(KEYS[:1]))
        engine.clock.advance(10.0)
    assert seen == [[None], [None], [False]]


def test_open_lookups_are_repeated_when_take_answered_raises() -> None:
    """A tier that was cut off answers all of them as misses; what a tier answered while it raised is unknown."""
    engine = Engine()
    tier = engine.tier
    tier.put(*KEYS[:2])
    tier.answers_later = True
    tier.raising.add("take_answered")
    assert engine.lookup(KEYS[:3]) == [None] * 3
    assert engine.lookup(KEYS[:3]) == [None, None, False]
    assert engine.lookup_until_known(KEYS[:3]) == [True, True, False]
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "take_answered") > 0


def test_polling_tier_answers_in_the_step_after_its_storage() -> None:
    engine = Engine()
    tier = PollingTier(engine.view)
    manager = engine.with_tiers(tier)
    tier.put(*KEYS[:2])
    tier.answers_later = True
    assert engine.lookup(KEYS[:3]) == [None] * 3
    assert not manager.continue_wait(REQ.req_id)
    assert engine.lookup(KEYS[:3]) == [None, None, False]
    assert engine.lookup_until_known(KEYS[:3]) == [True, True, False]


def test_silent_polling_tier_is_a_miss_after_its_deadline_for_each_request() -> None:
    engine = Engine()
    tier = PollingTier(engine.view)
    tier.clock = engine.clock
    manager = engine.with_tiers(tier)
    tier.silent = True
    first, second = ReqContext("first"), ReqContext("second")
    for at_s in (0.0, 0.06, 0.12, 0.18):
        assert engine.lookup(KEYS[:2], first) == [None] * 2, at_s
        if at_s > 0.1:
            assert engine.lookup(KEYS[:2], second) == [None] * 2, at_s
        engine.clock.advance(0.06)
    assert engine.lookup(KEYS[:1], first) == [False]
    assert engine.lookup(KEYS[:1], second) == [None]
    tier.silent = False
    tier.put(KEYS[0])
    assert engine.lookup(KEYS[:1], first) == [None]  # it is there after all
    manager.on_request_finished(first)
    manager.on_request_finished(second)
    assert not tier._polls


def test_lookup_in_polling_tier_waits_during_other_answers_and_idle_time() -> None:
    engine = Engine()
    tier = PollingTier(engine.view)
    tier.clock = engine.clock
    engine.with_tiers(tier)
    waits = ReqContext("waits")
    tier.slow.add(KEYS[0])
    tier.answers_later = True
    for number in range(8):
        assert engine.lookup(KEYS[:1], waits) == [None]
        assert engine.lookup(KEYS[10 + number : 11 + number], ReqContext(f"other{number}"))
        engine.clock.advance(0.09)
    tier.silent = True
    engine.clock.advance(60.0)
    assert engine.lookup(KEYS[:1], waits) == [None]  # at most half of the deadline counts
    engine.clock.advance(60.0)
    assert engine.lookup(KEYS[:1], waits) == [False]


def test_poll_that_raises_ends_only_its_own_lookup() -> None:
    engine = Engine()
    tier = PollingTier(engine.view)
    tier.clock = engine.clock
    manager = engine.with_tiers(tier)
    good, bad = ReqContext("good"), ReqContext("bad")
    tier.silent = True
    assert engine.lookup(KEYS[:1], bad) == engine.lookup(KEYS[1:2], good) == [None]
    tier.broken.add(KEYS[0])
    engine.clock.advance(0.1)
    assert engine.lookup(KEYS[:1], bad) == [False]
    polls = len(tier.asked)
    for _ in range(2):
        assert engine.lookup(KEYS[1:2], good) == [None]
        engine.clock.advance(0.15)
    assert engine.lookup(KEYS[1:2], good) == [False]
    assert len(tier.asked) - polls <= 6
    assert manager.metrics.value("kvtiers_contained_errors_total", "scripted", "lookup") == 1


def test_answer_that_a_polling_tier_gives_only_once_is_a_hit() -> None:
    engine = Engine()
    tier = PollingTier(engine.view)
    engine.with_tiers(tier)
    tier.put(*KEYS[:2])
    tier.answers_once = True
    assert engine.lookup(KEYS[:2]) == [None] * 2
    assert engine.lookup_until_known(KEYS[:2]) == [True] * 2
    assert len(tier.asked) <= 4


def test_polling_tier_remembers_no_lookup_without_a_request() -> None:
    tier = PollingTier(make_view(1))
    tier.silent = True
    assert tier.lookup(KEYS[0]) is None
    assert tier.take_answered() == {}
    assert not tier._polls


def test_open_lookup_of_polling_tier_is_a_miss_in_time_despite_other_answers() -> None:
    tier = PollingTier(make_view(1))
    clock = Clock()
    tier.clock = clock
    tier._polled_at = clock()
    tier.slow.add(KEYS[0])
    waits = ReqContext("waits")
    assert tier.lookup(KEYS[0], waits) is None
    for number in range(151):
        tier.answers_later = True
        tier.lookup(KEYS[1 + number % 8], ReqContext(f"other{number}"))
        tier.on_schedule_end()
        clock.advance(0.1)
        answered = tier.take_answered()
        assert answered[f"other{number}"]
        tier._answered.clear()
        if answered["waits"]:
            break
    assert number in (149, 150)  # 15 s
    assert tier.lookup(KEYS[0], waits) is False
    assert not tier._polls["waits"].open


def test_failing_take_answered_repeats_only_open_lookups_of_that_tier() -> None:
    """50 requests that repeated 1,000 lookups each cost 130 ms a step."""
    engine = Engine(num_tiers=2)
    engine.tier.raising.add("take_answered")
    engine.tiers[1].silent = True
    assert engine.lookup(KEYS[:4]) == [None] * 4
    assert engine.manager.continue_wait(REQ.req_id)
    engine.tier.silent = True
    other = ReqContext("other")
    assert engine.lookup(KEYS[:4], other) == [None] * 4
    assert not engine.manager.continue_wait("other")


def test_drain_goes_on_while_jobs_end() -> None:
    engine = Engine(auto=False)

    def end_one() -> None:
        for job_id in list(engine.tier.jobs)[:1]:
            engine.tier.finish(job_id)

    engine.tier.drain_jobs = end_one  # type: ignore[method-assign]
    for key in KEYS[:4]:
        engine.store(key)
    engine.manager.drain()
    assert not engine.tier.jobs


@pytest.mark.parametrize("reported", [False, True])
def test_requests_that_awaited_a_failed_load_do_not_retry_in_turn(reported: bool) -> None:
    engine = Engine(num_blocks=64, auto=False, load_deadline_s=20.0)
    engine.tier.put(*KEYS[:8])
    requests = [ReqContext(f"r{n}") for n in range(6)]
    for _ in range(2):
        for request in requests:
            assert set(engine.lookup(KEYS[:8], request)) == {None}
    if reported:
        engine.clock.advance(19.0)
        (job_id,) = engine.tier.jobs
        engine.tier.finish(job_id, failing=KEYS[:8])
    else:
        engine.clock.advance(20.5)
    engine.manager.on_schedule_end()
    engine.clock.advance(0.1)
    assert [engine.lookup(KEYS[:8], request)[0] for request in requests] == [False] * 6
    assert engine.counts.quarantined == (0 if reported else 8)
    assert engine.lookup(KEYS[:8], ReqContext("later"))[0] is None  # it may be well again
    engine.clock.advance(31.0)
    for request in requests:
        engine.manager.on_request_finished(request)
    assert engine.lookup(KEYS[8:9], ReqContext("other"))[0] is False


def test_request_whose_load_failed_does_not_wait_for_later_loads_of_that_tier() -> None:
    """Or each request that comes after a failure, and tries again, would keep it waiting for another load."""
    engine = Engine(auto=False)
    engine.tier.liar = True
    first, waiting, later = (ReqContext(name) for name in ("first", "waiting", "later"))
    assert engine.lookup(KEYS[:1], first) == engine.lookup(KEYS[:1], waiting) == [None]
    engine.clock.advance(1.0)
    engine.tier.finish(next(iter(engine.tier.jobs)), failing=KEYS[:1])
    engine.manager.on_schedule_end()
    engine.clock.advance(1.0)
    assert engine.lookup(KEYS[:1], later) == [None]
    assert len(engine.tier.jobs) == 1
    assert engine.lookup(KEYS[:1], waiting) == engine.lookup(KEYS[:1], first) == [False]
    assert engine.lookup(KEYS[:1], later) == [None]


def test_failed_loads_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the region has slots at least: a request that retries loads that failed would never end."""
    monkeypatch.setattr("kvtiers.connector.core.loads._FAILED_MAX", 0)
    engine = Engine(num_blocks=8, auto=False)
    engine.tier.liar = True
    waiting = ReqContext("waiting")
    for key in KEYS[:9]:
        assert engine.lookup([key], waiting) == [None]
        engine.tier.finish(next(iter(engine.tier.jobs)), failing=[key])
        engine.manager.on_schedule_end()
    assert [engine.lookup([key], waiting) for key in KEYS[1:9]] == [[False]] * 8
    assert len(engine.manager._loads._failed) == 8


def test_request_whose_load_failed_waits_for_load_of_another_tier() -> None:
    engine = Engine(num_tiers=2, auto=False)
    for tier in engine.tiers:
        tier.put(KEYS[0])
    first, waiting = ReqContext("first"), ReqContext("waiting")
    assert engine.lookup(KEYS[:1], first) == engine.lookup(KEYS[:1], waiting) == [None]
    engine.clock.advance(1.0)
    engine.tier.finish(next(iter(engine.tier.jobs)), failing=KEYS[:1])
    engine.manager.on_schedule_end()
    engine.clock.advance(1.0)
    assert engine.lookup(KEYS[:1], first) == engine.lookup(KEYS[:1], waiting) == [None]
    engine.tiers[1].finish(next(iter(engine.tiers[1].jobs)))
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:1], waiting) == [True]


@pytest.mark.parametrize("has_it", [True, False])
def test_request_whose_load_failed_asks_next_tier_while_another_request_retries(has_it: bool) -> None:
    engine = Engine(num_tiers=2, auto=False)
    near, far = engine.tiers
    near.put(KEYS[0])
    if has_it:
        far.put(KEYS[0])
    far.silent = True  # its answer takes a step
    first, later = ReqContext("first"), ReqContext("later")
    assert engine.lookup(KEYS[:1], first) == [None]
    engine.clock.advance(0.2)
    near.finish(next(iter(near.jobs)), failing=KEYS[:1])
    engine.manager.on_schedule_end()
    engine.clock.advance(0.02)
    assert engine.lookup(KEYS[:1], first) == [None]
    far.silent = False
    assert engine.lookup(KEYS[:1], later) == [None]
    engine.clock.advance(0.02)
    assert engine.lookup(KEYS[:1], first) == [None if has_it else False]
    near.finish(next(iter(near.jobs)), failing=KEYS[:1])
    if has_it:
        assert engine.lookup(KEYS[:1], first) == [None]
        far.finish(next(iter(far.jobs)))
        assert engine.lookup_until_known(KEYS[:1], first) == [True]


def test_wait_for_answer_of_an_earlier_tier_is_bounded() -> None:
    engine = Engine(num_tiers=2, lookup_total_s=0.2)
    engine.tiers[0].silent = True
    engine.tiers[1].put(KEYS[0])
    for _ in range(4):
        assert engine.lookup(KEYS[:2]) == [None, None]
        engine.clock.advance(0.049)
    assert engine.tiers[1].submitted == []
    engine.clock.advance(0.01)
    assert engine.lookup(KEYS[:2]) == [None, False]  # the hit is on its way, the other is nowhere
    assert engine.lookup(KEYS[:2]) == [None, False]
    assert engine.lookup(KEYS[:2]) == [True, False]
    assert engine.counted("kvtiers_deadline_expired_total", "tier0", "lookup") == 2


def test_hit_of_an_earlier_tier_does_not_wait_for_later_tiers() -> None:
    engine = Engine(num_tiers=2)
    engine.tiers[0].put(KEYS[0])
    engine.tiers[1].silent = True
    engine.lookup(KEYS[:1])
    assert [job_keys(job) for job in engine.tiers[0].submitted] == [KEYS[:1]]


def test_failed_load_is_tried_from_each_tier_and_then_a_miss() -> None:
    engine = Engine(num_tiers=2, auto=False)
    for tier in engine.tiers:
        tier.put(KEYS[0])
    for tier in engine.tiers:
        assert engine.lookup(KEYS[:1]) == [None]
        (job_id,) = tier.jobs
        tier.finish(job_id, KEYS[:1])
        engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:1]) == [False]
    assert [len([job for job in tier.submitted if job.is_load]) for tier in engine.tiers] == [1, 1]
    assert engine.lookup(KEYS[:1]) == [False]
    engine.manager.on_request_finished(REQ)
    assert engine.lookup(KEYS[:1]) == [None]  # another request may try again


def test_partly_failed_load_makes_the_good_keys_ready() -> None:
    engine = Engine(auto=False)
    engine.tier.put(*KEYS[:3])
    engine.lookup(KEYS[:3])
    engine.tier.finish(next(iter(engine.tier.jobs)), [KEYS[1]])
    engine.manager.on_schedule_end()
    assert [engine.manager.lookup(key, REQ) for key in KEYS[:3]] == [True, False, True]
    engine.load([KEYS[0], KEYS[2]])
    assert engine.counts.free == 14


def test_tier_that_reports_absent_blocks_as_present_causes_no_loop() -> None:
    engine = Engine(num_tiers=2)
    for tier in engine.tiers:
        tier.liar = True
    assert engine.lookup_until_known(KEYS[:3]) == [False]
    assert engine.counts.free == 16


def test_lookup_of_a_block_counts_once_per_request_and_tier() -> None:
    engine = Engine(num_tiers=2, lookup_total_s=0.2)
    engine.tiers[1].put(*KEYS[:3])

    def counted() -> list[float]:
        return [
            engine.counted("kvtiers_lookups_total", f"tier{index}", result)
            for index in range(2)
            for result in ("hit", "miss")
        ]

    shown = {sample.name for sample in engine.manager.metrics.snapshot() if sample.value == 0}
    assert "kvtiers_lookups_total" in shown  # rates see no increase in what begins at 1
    for number in range(1, 4):  # asked in several steps each
        request = ReqContext(f"r{number}")
        assert engine.lookup_until_known(KEYS[:5], request) == [True] * 3 + [False]
        engine.lookup(KEYS[3:5], request)
        assert counted() == [0, 4 * number, 3 * number, number]
        engine.manager.on_request_finished(request)
        engine.manager.reset_cache()
        engine.tiers[0].blobs.clear()
    engine.tiers[1].silent = True
    engine.lookup_until_known(KEYS[10:11])
    assert counted() == [0, 13, 9, 4]  # no answer in time is a miss too


def test_lookups_without_request_id_count_each_time() -> None:
    engine = Engine()
    for _ in range(3):
        assert engine.lookup(KEYS[:1], ReqContext()) == [False]
    assert engine.counted("kvtiers_lookups_total", "tier0", "miss") == 3


def test_hit_without_room_is_a_miss_after_promotion_wait_s() -> None:
    engine = Engine(num_blocks=4, auto=False, promotion_wait_s=0.5, store_backlog_share=1)
    engine.store(*KEYS[:3])
    engine.tier.put(*KEYS[10:13])
    assert engine.lookup(KEYS[10:13]) == [None] * 3
    assert [job_keys(job) for job in engine.tier.submitted if job.is_load] == [[KEYS[10]]]  # the one that fits
    for _ in range(4):
        engine.clock.advance(0.1)
        assert engine.lookup(KEYS[10:13]) == [None] * 3
    engine.tier.finish(list(engine.tier.jobs)[1])
    engine.clock.advance(0.11)
    engine.lookup(KEYS[10:13])
    assert engine.lookup(KEYS[10:13]) == [True, False]
    assert engine.counted("kvtiers_promotion_room_expired_total") == 2
    engine.load(KEYS[10:11])


def test_hit_is_loaded_when_room_comes_in_time() -> None:
    engine = Engine(num_blocks=4, auto=False, promotion_wait_s=0.5)
    engine.store(*KEYS[:4])
    engine.tier.put(*KEYS[10:12])
    assert engine.lookup(KEYS[10:12]) == [None] * 2
    engine.clock.advance(0.4)
    engine.tier.finish(next(iter(engine.tier.jobs)))  # the store that pinned the region
    engine.manager.on_schedule_end()
    assert [job_keys(job) for job in engine.tier.submitted if job.is_load] == [KEYS[10:12]]
    engine.tier.auto = True
    assert engine.lookup_until_known(KEYS[10:12]) == [True] * 2


def test_second_hit_without_room_is_a_miss_after_promotion_wait_s() -> None:
    engine = Engine(num_blocks=2, auto=False, promotion_wait_s=0.5)
    engine.tier.put(KEYS[10])
    assert engine.manager.prepare_store(KEYS[:2], ReqContext("fills the region")) is not None
    assert engine.lookup(KEYS[10:11]) == [None]
    engine.manager.prepare_load([], REQ)  # ends the wait
    assert engine.lookup(KEYS[10:11]) == [None]
    engine.clock.advance(0.6)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[10:11]) == [False]


def test_hit_without_room_is_a_miss_at_once_if_promotion_wait_s_is_0() -> None:
    engine = Engine(num_blocks=2, auto=False, promotion_wait_s=0, store_backlog_share=1)
    engine.store(*KEYS[:2])
    engine.tier.put(KEYS[10])
    assert engine.lookup([KEYS[10]]) == [None]
    assert engine.lookup([KEYS[10]]) == [False]


def test_load_does_not_evict_blocks_that_its_request_found() -> None:
    engine = Engine(num_blocks=6)
    for keys in (KEYS[:3], KEYS[20:23]):  # the second are younger: without protection the first would leave
        engine.store(*keys)
        engine.manager.on_schedule_end()
    engine.tier.put(*KEYS[3:6])
    assert engine.lookup_until_known(KEYS[:6]) == [True] * 6
    engine.load(KEYS[:6])
    assert len([job for job in engine.tier.submitted if job.is_load]) == 1


def test_found_blocks_are_held_while_load_of_another_request_is_awaited() -> None:
    engine = Engine(num_blocks=8, auto=False, promotion_hold_s=2.0)
    engine.store(*KEYS[:4])
    engine.tier.put(KEYS[4])
    engine.manager.on_schedule_end()
    for job_id in list(engine.tier.jobs):
        engine.tier.finish(job_id)
    other, waiting = ReqContext("other"), ReqContext("waiting")
    assert engine.lookup(KEYS[4:5], other) == [None]
    for _ in range(3):
        assert engine.lookup(KEYS[:5], waiting) == [True] * 4 + [None]
        assert engine.manager.prepare_store(KEYS[20:24], other) is None
        engine.clock.advance(1.5)
    assert engine.counts.pinned == 4
    engine.clock.advance(1.5)  # it does not come any more
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 0


def test_found_block_evicted_in_the_same_step_is_not_held() -> None:
    engine = Engine(num_blocks=2)
    engine.store(KEYS[0])
    engine.manager.on_schedule_end()
    engine.tier.put(KEYS[1])
    assert engine.manager.lookup(KEYS[0], REQ) is True
    assert engine.manager.prepare_store(KEYS[8:10], ReqContext("other")) is not None
    assert engine.manager.lookup(KEYS[1], REQ) is None  # only now it waits
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=0, ready=0, pinned=0, pending=2, quarantined=0)


def test_two_requests_too_large_for_the_region_together_both_continue() -> None:
    """Each has half of the region and waits for the other half: the wait is bounded, so neither waits for ever."""
    engine = Engine(num_blocks=8, promotion_wait_s=0.5)
    a, b = ReqContext("a"), ReqContext("b")
    engine.tier.put(*KEYS[:6], *KEYS[10:16])
    known: dict[str, int] = {}
    for _ in range(40):
        for req, keys in ((a, KEYS[:6]), (b, KEYS[10:16])):
            if req.req_id in known:
                continue
            answers = engine.lookup(keys, req)
            if None not in answers:
                found = answers.count(True)
                engine.load(keys[:found], req)
                engine.manager.on_request_finished(req)
                known[req.req_id] = found
        engine.clock.advance(0.05)
    assert known.keys() == {"a", "b"}
    assert max(known.values()) == 6
    assert engine.counts.pinned == engine.counts.pending == 0


def test_loaded_blocks_are_held_for_a_bounded_time() -> None:
    engine = Engine(num_blocks=2, promotion_hold_s=2.0, load_share=1)
    engine.tier.put(*KEYS[:2])
    engine.lookup(KEYS[:2])
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 2
    assert engine.manager.prepare_store([KEYS[9]], REQ) is None
    engine.clock.advance(2.1)
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=0, ready=2, pinned=0, pending=0, quarantined=0)
    assert engine.manager.prepare_store([KEYS[9]], REQ) is not None


@pytest.mark.parametrize("stores", [False, True])
def test_blocks_are_not_held_after_their_request_has_loaded(stores: bool) -> None:
    """An engine loads in the step in which it hears that all is there, and stores for others in it."""
    engine = Engine(num_blocks=4, load_share=1)
    engine.tier.put(*KEYS[:4])
    assert engine.lookup(KEYS[:4]) == [None] * 4
    engine.manager.on_schedule_end()
    assert [engine.manager.lookup(key, REQ) for key in KEYS[:4]] == [True] * 4
    engine.manager.prepare_load(KEYS[:4], REQ)
    if stores:
        assert engine.manager.prepare_store([KEYS[9]], ReqContext("other")) is None
    engine.manager.on_schedule_end()
    engine.manager.complete_load(KEYS[:4])
    assert engine.counts.pinned == 0


def test_blocks_loaded_for_one_request_are_not_loaded_again_for_another() -> None:
    """A tier's share of the region was full when the request came, so its hits waited while the other's loads ended."""
    engine = Engine(num_blocks=8, auto=False, load_share=0.25)
    first, second = ReqContext("first"), ReqContext("second")
    engine.tier.put(*KEYS[:4])
    assert [engine.manager.lookup(key, first) for key in KEYS[:4]] == [None] * 4
    assert engine.lookup(KEYS[:2], second) == [None] * 2
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:2], second) == [True] * 2
    engine.load(KEYS[:2], second)
    engine.manager.on_request_finished(first)
    engine.store(*KEYS[20:26])  # evicts what both have used
    engine.tier.auto = True
    for _ in range(3):
        engine.manager.on_schedule_end()
    assert [job_keys(job) for job in engine.tier.submitted if job.is_load] == [KEYS[:2], KEYS[2:4]]
    assert engine.counts.pinned == 0


def test_blocks_arriving_after_their_request_loaded_are_not_held() -> None:
    """It goes without what lies behind a miss: the next one that wants that finds it evictable."""
    engine = Engine(num_blocks=4, auto=False, load_share=1)
    engine.store(KEYS[0])
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.tier.put(*KEYS[2:5])
    assert engine.lookup([KEYS[0], *KEYS[2:5]]) == [True, None, None, None]
    assert engine.counts.pinned == 1
    engine.load(KEYS[:1])
    assert engine.counts.pinned == 0
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=0, ready=4, pinned=0, pending=0, quarantined=0)


def test_preempted_request_waits_again_from_zero() -> None:
    engine = Engine(num_blocks=4, promotion_wait_s=0.5)
    engine.store(*KEYS[:4])
    engine.manager.prepare_load(KEYS[:4], ReqContext("runs"))
    engine.tier.put(KEYS[4])
    assert engine.lookup([KEYS[0], KEYS[4]]) == [True, None]
    engine.load(KEYS[:1])
    engine.clock.advance(10.0)  # then it is preempted
    assert engine.lookup([KEYS[0], KEYS[4]]) == [True, None]
    engine.manager.complete_load(KEYS[:4])
    assert engine.lookup_until_known([KEYS[0], KEYS[4]]) == [True] * 2


def test_finished_request_holds_no_blocks() -> None:
    engine = Engine(auto=False)
    engine.tier.put(*KEYS[:4])
    engine.lookup(KEYS[:2])
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.manager.on_schedule_end()
    engine.lookup(KEYS[2:4])
    assert (engine.counts.pinned, engine.counts.pending) == (2, 2)
    engine.manager.on_request_finished(REQ)
    assert engine.counts.pinned == 0
    engine.tier.finish(next(iter(engine.tier.jobs)))  # goes on, for whoever asks next
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=12, ready=4, pinned=0, pending=0, quarantined=0)


def test_request_larger_than_the_region_loads_its_first_blocks_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(num_blocks=4)
    engine.tier.put(*KEYS[:10])
    assert engine.lookup_until_known(KEYS[:10]) == [True] * 4 + [False]
    engine.load(KEYS[:4])
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 1
    assert "region holds 4 blocks, request 'r' needs 10: only its first blocks can be loaded" in messages[0]


def test_blocks_of_two_requests_count_once_against_the_region(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(num_blocks=4, load_share=1)
    assert engine.manager.prepare_store(KEYS[40:42], REQ) is not None
    engine.tier.put(*KEYS[:3])
    assert [engine.manager.lookup(key, ReqContext("other")) for key in KEYS[1:3]] == [None] * 2
    assert engine.lookup_until_known(KEYS[:3]) == [False]
    assert engine.counted("kvtiers_promotion_room_expired_total") == 1
    assert caplog.records == []  # the region is large enough


def test_hit_that_the_engine_stores_meanwhile_is_not_loaded() -> None:
    engine = Engine()
    engine.tier.put(KEYS[0])
    assert engine.manager.lookup(KEYS[0], REQ) is None
    engine.manager.prepare_store([KEYS[0]], ReqContext("other"))
    engine.manager.on_schedule_end()
    assert engine.tier.submitted == []
    assert engine.lookup([KEYS[0]]) == [None]
    engine.manager.complete_store([KEYS[0]])
    assert engine.lookup([KEYS[0]]) == [True]


def test_remembered_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "REQUESTS_MAX", 3)
    engine = Engine(num_blocks=4)
    engine.tier.put(KEYS[0])
    engine.lookup([KEYS[0]], ReqContext("first"))
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 1
    for number in range(3):
        engine.lookup([KEYS[9]], ReqContext(str(number)))
    assert engine.counts.pinned == 0
    assert [*engine.manager._waits.by_id] == ["0", "1", "2"]


@pytest.mark.parametrize("storage", ["answers", "is silent", "hangs"])
def test_every_wait_ends_even_if_more_requests_wait_than_are_remembered(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "REQUESTS_MAX", 3)
    engine = Engine(num_blocks=4, load_share=1)
    waiting = {ReqContext(str(number)): KEYS[3 * number : 3 * number + 3] for number in range(8)}
    engine.tier.put(*KEYS[:24])
    engine.tier.auto = storage != "hangs"
    if storage == "is silent":
        monkeypatch.setattr(engine.tier, "lookup", lambda *_: None)
    for _ in range(1000):
        for request, keys in list(waiting.items()):
            answers = look_up(engine.manager, keys, request)
            if None not in answers:
                del waiting[request]
                engine.load(keys[: answers.count(True)], request)
                engine.manager.on_request_finished(request)
        engine.manager.on_schedule_end()
        engine.clock.advance(0.05)
    assert not waiting
    assert not engine.manager._waits.by_id


# ---- a tier's share of the region for loads


def hung_load(num_tiers: int = 2, hung: int = 0, **options: Any) -> tuple[Engine, ScriptedTier]:
    """A region of 20 slots, a prompt of 20 blocks in a tier that does not report, and a step in which it was asked."""
    engine = Engine(num_blocks=20, num_tiers=num_tiers, load_share=0.4, load_deadline_s=20.0, **options)
    tier = engine.tiers[hung]
    tier.auto = False
    tier.put(*KEYS[:20])
    assert engine.lookup(KEYS[:20], ReqContext("large")) == [None] * 20
    return engine, tier


def test_hung_load_leaves_room_in_the_region_for_other_tiers() -> None:
    engine, hung = hung_load(hung=1)
    assert [job_keys(job) for job in hung.submitted] == [KEYS[:4]]
    engine.tier.put(*KEYS[30:36])
    for number in range(8):  # before and after the load is given up
        request = ReqContext(f"small{number}")
        assert engine.lookup_until_known(KEYS[30:36], request) == [True] * 6
        engine.load(KEYS[30:36], request)
        engine.manager.on_request_finished(request)
        engine.store(KEYS[40 + number])
        engine.clock.advance(4.0)
    assert engine.counts.pending + engine.counts.quarantined == 4
    assert [job.is_load for job in hung.submitted].count(True) == 1


def test_hits_waiting_for_share_of_hung_tier_are_misses_when_its_load_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = hung_load(num_tiers=1)
    assert engine.counts.pending == 8
    late, again = ReqContext("late"), ReqContext("again")
    engine.clock.advance(19.9)
    assert engine.lookup(KEYS[8:10], late) == [None] * 2
    assert engine.lookup(KEYS[:20], ReqContext("large")) == [None] * 20
    engine.clock.advance(0.2)
    engine.manager.on_schedule_end()
    assert engine.counts.quarantined == 8
    assert engine.lookup(KEYS[:20], ReqContext("large")) == [False]
    assert engine.lookup(KEYS[8:10], late) == [False]
    assert engine.lookup(KEYS[8:10], again) == [None] * 2
    assert engine.lookup(KEYS[8:10], again) == [False]
    assert engine.counted("kvtiers_promotion_room_expired_total") == 12 + 2 + 2
    assert len([r for r in caplog.records if "whole share of the region" in r.message]) == 1


def test_hits_beyond_share_of_hung_tier_are_loaded_from_the_next_tier() -> None:
    engine, _ = hung_load()
    engine.tiers[1].put(*KEYS[:20])
    engine.clock.advance(20.1)
    engine.manager.on_schedule_end()
    assert engine.lookup_until_known(KEYS[4:20], ReqContext("large")) == [True] * 16
    assert engine.counts.quarantined == 4


def test_prompt_as_large_as_the_region_is_loaded_from_a_slow_tier() -> None:
    """However long its share waits for the tier, that is no wait for room in the region."""
    engine, slow = hung_load(num_tiers=1, promotion_wait_s=0.5)
    for _ in range(3):
        for _ in range(5):
            engine.clock.advance(1.0)
            assert None in engine.lookup(KEYS[:20], ReqContext("large"))
        (job_id,) = slow.jobs
        slow.finish(job_id)
        engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:20], ReqContext("large")) == [True] * 20
    engine.load(KEYS[:20], ReqContext("large"))
    assert [job_keys(job) for job in slow.submitted] == [KEYS[:8], KEYS[8:16], KEYS[16:20]]


def test_found_blocks_are_not_evicted_for_load_of_another_request() -> None:
    """In the step in which both come, too: of what no tier has the hit would be lost, and with it all behind."""
    engine = Engine(num_blocks=4, load_share=1)
    engine.tier.takes_stores = False
    engine.manager = BlockManager(engine.slots, engine.tiers, ManagerOptions(load_share=1), clock=engine.clock)
    engine.store(*KEYS[:2])
    engine.tier.put(*KEYS[2:8])
    first, second = ReqContext("first"), ReqContext("second")
    assert [engine.manager.lookup(key, first) for key in KEYS[4:8]] == [None] * 4
    assert [engine.manager.lookup(key, second) for key in KEYS[:3]] == [True, True, None]
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:2], second) == [True, True]
    assert [job_keys(job) for job in engine.tier.submitted] == [KEYS[4:6]]


@pytest.mark.parametrize("answers_later", [False, True])
def test_found_blocks_are_not_evicted_for_a_store_in_the_same_step(
    answers_later: bool,
) -> None:
    engine = Engine(num_blocks=4)
    engine.tier.takes_stores = False
    engine.tier.answers_later = answers_later  # as all do that ask a storage
    engine.manager = BlockManager(engine.slots, engine.tiers, ManagerOptions(), clock=engine.clock)
    engine.store(*KEYS[:3])
    engine.tier.put(KEYS[3])
    waits = ReqContext("waits")
    assert [engine.manager.lookup(key, waits) for key in [*KEYS[:2], KEYS[3]]] == [True, True, None]
    assert engine.manager.prepare_store(KEYS[4:7], REQ) is None
    output = engine.manager.prepare_store(KEYS[4:6], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[2],)
    assert engine.lookup(KEYS[:2], waits) == [True, True]


def test_latest_of_requests_that_fill_the_region_releases_its_blocks() -> None:
    """Each has found a quarter of it and wants as much besides: those that came last let go."""
    engine = Engine(num_blocks=8, promotion_wait_s=0.5)
    engine.tier.takes_stores = False
    engine.manager = BlockManager(engine.slots, engine.tiers, ManagerOptions(), clock=engine.clock)
    engine.store(*KEYS[:8])
    engine.tier.put(*KEYS[8:16])
    prompts = {ReqContext(str(at)): [*KEYS[2 * at : 2 * at + 2], *KEYS[8 + 2 * at : 10 + 2 * at]] for at in range(4)}
    came: dict[str, int] = {}
    for _ in range(40):
        for req in [req for req in prompts if req.req_id not in came]:
            answers: list[bool | None] = []
            while (not answers or answers[-1] is not False) and len(answers) < 4:
                answers.append(engine.manager.lookup(prompts[req][len(answers)], req))
            if None not in answers:
                came[req.req_id] = answers.count(True)
                engine.load(prompts[req][: came[req.req_id]], req)
                engine.manager.on_request_finished(req)
        engine.manager.on_schedule_end()
        engine.clock.advance(0.05)
    assert came.keys() == {"0", "1", "2", "3"}
    assert came["0"] == came["1"] == 4
    assert engine.counts.pinned == engine.counts.pending == 0


def test_hits_waiting_for_room_are_not_scanned_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 requests with 1,000 hits each held each step of the scheduler up for 0.15 s."""
    engine = Engine(num_blocks=4, promotion_wait_s=0.5, load_share=1)
    engine.store(*KEYS[:4])
    engine.manager.on_schedule_end()
    engine.manager.prepare_load(KEYS[:4], REQ)
    engine.tier.put(*KEYS[4:20])
    requests = [ReqContext(name) for name in ("a", "b")]
    for req in requests:
        assert all(engine.manager.lookup(key, req) is None for key in KEYS[4:20])
    looked_at: list[OffloadKey] = []
    find = engine.slots.find
    with monkeypatch.context() as patch:
        patch.setattr(engine.slots, "find", lambda key: looked_at.append(key) or find(key))  # type: ignore[func-returns-value]
        engine.manager.on_schedule_end()
    assert looked_at == [KEYS[4]] * 2
    engine.manager.complete_load(KEYS[:2])
    engine.manager.on_schedule_end()
    assert [job_keys(job) for job in engine.tier.submitted if job.is_load] == [KEYS[4:6]]
    engine.clock.advance(0.6)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[6:7], requests[1]) == [False]
    assert engine.counted("kvtiers_promotion_room_expired_total") == 14 + 14


def test_hit_loaded_by_another_request_is_not_counted_as_expired() -> None:
    engine = Engine(num_blocks=4, num_tiers=2, auto=False, load_share=1, promotion_wait_s=0.5)
    assert engine.manager.prepare_store(KEYS[40:43], REQ) is not None
    engine.tiers[0].put(*KEYS[:2])
    engine.tiers[1].put(KEYS[1])
    waits = ReqContext("waits")
    assert engine.manager.lookup(KEYS[1], ReqContext("loads")) is None
    for _ in range(2):
        assert engine.lookup(KEYS[:2], waits) == [None] * 2
        engine.clock.advance(0.6)
    assert engine.counted("kvtiers_promotion_room_expired_total") == 1
    engine.tiers[0].finish(next(iter(engine.tiers[0].jobs)), failing=KEYS[1:2])
    engine.manager.on_schedule_end()
    assert [engine.manager.lookup(key, waits) for key in KEYS[:2]] == [False, None]  # the other tier has it


def test_hits_waiting_for_share_of_one_tier_delay_no_other_tier_and_are_not_scanned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scan of 1,000 hits in each of 300 requests held each step of the scheduler up for 0.07 s."""
    engine = Engine(num_blocks=16, num_tiers=2, auto=False, load_share=0.5)
    near, far = engine.tiers
    far.put(*KEYS[:6])
    near.put(*KEYS[6:8])
    engine.lookup(KEYS[:8])
    assert [job_keys(job) for job in far.submitted] == [KEYS[:4]]
    assert [job_keys(job) for job in near.submitted if job.is_load] == [KEYS[6:8]]
    looked_at: list[OffloadKey] = []
    find = engine.slots.find
    with monkeypatch.context() as patch:
        patch.setattr(engine.slots, "find", lambda key: looked_at.append(key) or find(key))  # type: ignore[func-returns-value]
        engine.manager.on_schedule_end()
    assert looked_at == [KEYS[4]]
    far.finish(next(iter(far.jobs)))
    engine.manager.on_schedule_end()
    assert [job_keys(job) for job in far.submitted] == [KEYS[:4], KEYS[4:6]]


def test_hit_without_room_behind_hits_without_share_is_a_miss_in_time() -> None:
    engine = Engine(num_blocks=4, num_tiers=2, auto=False, load_share=1.0, promotion_wait_s=0.5)
    for tier in engine.tiers:
        tier.takes_stores = False
    near, far = engine.tiers
    engine.manager = BlockManager(
        engine.slots, engine.tiers, ManagerOptions(load_share=1.0, promotion_wait_s=0.5), clock=engine.clock
    )
    engine.store(*KEYS[10:12])
    engine.manager.prepare_load(KEYS[10:12], ReqContext("runs"))
    far.put(*KEYS[:4])
    near.put(KEYS[4])
    assert engine.lookup(KEYS[:5]) == [None] * 5  # far's share is two blocks, and so is the region's room
    looked_at: list[OffloadKey] = []
    find = engine.slots.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.slots, "find", lambda key: looked_at.append(key) or find(key))  # type: ignore[func-returns-value]
        engine.manager.on_schedule_end()
    assert looked_at == [KEYS[4]]
    engine.clock.advance(0.6)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:3]) == [None, None, False]


def test_wait_for_room_does_not_count_as_wait_for_a_share() -> None:
    engine = Engine(num_blocks=4, auto=False, load_share=0.5, promotion_wait_s=30.0, load_deadline_s=5.0)
    engine.tier.takes_stores = False
    options = ManagerOptions(load_share=0.5, promotion_wait_s=30.0, load_deadline_s=5.0)
    engine.manager = BlockManager(engine.slots, engine.tiers, options, clock=engine.clock)
    engine.store(*KEYS[:4])
    engine.manager.prepare_load(KEYS[:4], ReqContext("runs"))
    engine.tier.put(*KEYS[10:14])
    first, second = ReqContext("first"), ReqContext("second")
    for _ in range(8):
        assert engine.lookup(KEYS[10:12], first) == [None] * 2
        assert engine.lookup(KEYS[12:14], second) == [None] * 2
        engine.clock.advance(1.0)
    engine.manager.complete_load(KEYS[:4])
    for _ in range(2):  # the first one's loads have all of the share
        assert engine.lookup(KEYS[12:14], second) == [None] * 2
    engine.tier.auto = True
    assert engine.lookup_until_known(KEYS[12:14], second) == [True] * 2


def late_report(after_s: float, **options: Any) -> Engine:
    """``hung_load`` whose first job is reported after so many seconds, so its share has room once."""
    engine, slow = hung_load(**options)
    engine.clock.advance(after_s)
    slow.finish(next(iter(slow.jobs)))
    engine.manager.on_schedule_end()
    return engine


def test_wait_for_share_of_a_tier_is_bounded() -> None:
    engine = late_report(10.0, num_tiers=1)
    engine.clock.advance(9.9)
    assert engine.lookup(KEYS[16:20], ReqContext("large")) == [None] * 4
    engine.clock.advance(0.2)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[16:20], ReqContext("large")) == [False]
    assert engine.lookup(KEYS[:16], ReqContext("large")) == [True] * 8 + [None] * 8  # not given up


def test_wait_for_own_slow_load_does_not_count_as_wait_for_a_share() -> None:
    engine = Engine(num_blocks=64, auto=False, load_share=0.25, load_deadline_s=20.0, blocks_per_token=1 / 16)
    steps, (way,) = engine.manager.decisions.steps, engine.manager.decisions.ways
    for blocks in (1, 4, 16) * 10:
        steps.prefill.learn(640, 640 * 320, 100.0)
        way.learn(blocks, 1.5 * blocks)
    engine.tier.put(*KEYS[:60])
    engine.manager.note_request("slow", 640, 0)
    slow, other = ReqContext("slow"), ReqContext("other")
    for _ in range(14):  # 21 s, in which one job after the other ends
        assert False not in engine.lookup(KEYS[:40], slow)
        engine.clock.advance(1.5)
        engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.lookup(KEYS[40:60], other)
    assert engine.lookup(KEYS[40:60], other) == [None] * 20  # its loads take what is left of the share
    assert not engine.manager._loads.shares[0].room
    assert False not in engine.lookup(KEYS[:40], slow)


def test_end_of_wait_for_share_of_one_tier_keeps_hits_of_other_tiers() -> None:
    engine = late_report(19.0, hung=1)
    engine.clock.advance(1.1)
    engine.tier.put(KEYS[30])
    assert engine.lookup([*KEYS[8:20], KEYS[30]], ReqContext("large")) == [None] * 13
    assert engine.lookup_until_known([KEYS[30]], ReqContext("large")) == [True]
    assert engine.lookup(KEYS[8:20], ReqContext("large")) == [False]


def test_share_freed_at_the_end_of_its_wait_is_used() -> None:
    engine = late_report(20.1, num_tiers=1)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[:20], ReqContext("large")) == [True] * 8 + [None] * 8 + [False]


def test_hung_job_of_a_large_load_keeps_only_its_own_slots() -> None:
    keys = [block_key(number) for number in range(1000, 1300)]
    engine = Engine(num_blocks=400, auto=False, load_share=1, load_deadline_s=20.0)
    engine.tier.put(*keys)
    engine.lookup(keys)
    sizes = [len(job.metadata.keys) for job in engine.tier.submitted]
    assert sizes == [100] * 3
    assert [key for job in engine.tier.submitted for key in job_keys(job)] == keys
    engine.clock.advance(19.0)
    for job_id in list(engine.tier.jobs)[1:]:  # it has not begun these
        engine.tier.finish(job_id, failing=keys)
    engine.clock.advance(2.0)
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=300, ready=0, pinned=0, pending=0, quarantined=100)


# ---- tiers that misbehave (S3, S4)

#: All that the guard contains; ``shutdown_s`` is read within ``shutdown``, and "_late" raises after some results.
METHODS = [*sorted({*get_args(guard._Guarded)} - {"shutdown_s"}), "get_finished_late"]


@pytest.mark.parametrize("method", METHODS)
def test_exception_of_a_tier_does_not_reach_the_engine_and_loses_no_slot(
    method: str, caplog: pytest.LogCaptureFixture, record: Record
) -> None:
    """Every call of an engine, with a bad tier before a good one; the good one serves, and no slot is lost."""
    engine = Engine(num_tiers=2, load_deadline_s=0.3)
    bad, good = engine.tiers
    bad.raising.add(method)
    where = "get_finished" if method == "get_finished_late" else method
    samples = engine.manager.metrics.snapshot()
    shown = {tuple(s.labels.values()) for s in samples if s.name == "kvtiers_contained_errors_total" and not s.value}
    assert ("tier0", where) in shown  # an alert would miss the first increase of what begins at 1
    bad.put(KEYS[10])
    good.put(KEYS[10], KEYS[11])
    engine.store(*KEYS[:3])
    answers = engine.lookup_until_known([*KEYS[:3], *KEYS[10:13]])
    if method == "get_finished":
        assert engine.counts.quarantined == 1  # of the load it never reported; the other tier was tried instead
        assert engine.counts.pinned == 5
        bad.raising.clear()
    assert answers == [True] * 5 + [False]
    engine.load(KEYS[10:12])
    engine.manager.touch(KEYS[:3])
    engine.manager.take_events()
    engine.manager.on_request_finished(REQ)
    engine.manager.on_schedule_end()
    engine.manager.drain()
    if method.startswith("submit"):  # it may have begun the job that it did not take
        assert engine.counts.quarantined + engine.counts.pinned == {"submit_load": 1, "submit_store": 4}[method]
        engine.clock.advance(JOB_DEADLINE_S)
        engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=11, ready=5, pinned=0, pending=0, quarantined=0)
    engine.manager.reset_cache()
    engine.manager.shutdown()
    assert engine.counts.free == 16
    assert engine.counted("kvtiers_contained_errors_total", "tier0", where) >= 1
    assert len([r for r in caplog.records if f"tier0: {where}" in r.message]) == 1
    assert good.blobs.keys() == {*KEYS[:3], *KEYS[10:12]}
    record("S4", raising=method, reached_the_engine=0, slots_lost=0)


def test_tier_that_never_answers_is_a_miss_after_lookup_total_s() -> None:
    engine = Engine(lookup_total_s=0.2)
    engine.tier.silent = True
    assert engine.lookup_until_known(KEYS[:1]) == [False]


def test_unreported_load_is_given_up_and_its_slot_is_not_reused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(num_blocks=4, num_tiers=2, auto=False, load_deadline_s=20.0, store_backlog_share=1, load_share=1)
    hung, good = engine.tiers
    for tier in engine.tiers:
        tier.put(*KEYS[:2])
    good.auto = True
    assert engine.lookup(KEYS[:2]) == [None] * 2
    engine.clock.advance(19.9)
    assert engine.lookup(KEYS[:2]) == [None] * 2
    engine.clock.advance(0.2)
    assert engine.lookup_until_known(KEYS[:2]) == [True] * 2
    engine.load(KEYS[:2])
    assert engine.counts == SlotCounts(free=0, ready=0, pinned=2, pending=0, quarantined=2)
    assert engine.counted("kvtiers_deadline_expired_total", "tier0", "load") == 1
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "submit_load") == 0  # no code failed
    assert "tier tier0: loads that took longer than 20 s were given up" in caplog.text
    late, *stores = hung.jobs
    hung.finish(late)
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=2, ready=0, pinned=2, pending=0, quarantined=0)
    for job_id in stores:
        hung.finish(job_id)
    engine.manager.on_schedule_end()
    assert engine.counts == SlotCounts(free=2, ready=2, pinned=0, pending=0, quarantined=0)
    good.put(KEYS[2])
    assert engine.lookup_until_known(KEYS[:3]) == [True] * 3
    hung.auto = True
    engine.clock.advance(10)  # the late report has not left the request waiting for ever
    engine.lookup(KEYS[:3])
    assert engine.counts == SlotCounts(free=1, ready=3, pinned=0, pending=0, quarantined=0)


def test_load_is_given_up_soon_after_job_deadline_of_its_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedTier, "job_deadline_s", 2.0)
    engine = Engine(num_blocks=4, auto=False, load_deadline_s=20.0)
    engine.tier.put(*KEYS[:2])
    assert engine.lookup(KEYS[:2]) == [None] * 2
    engine.clock.advance(2.9)
    assert engine.lookup(KEYS[:2]) == [None] * 2
    engine.clock.advance(0.2)
    assert engine.lookup_until_known(KEYS[:2]) == [False]
    assert engine.counts.quarantined == 2


def test_unknown_duplicate_and_foreign_results_are_contained() -> None:
    engine = Engine(num_tiers=2, auto=False)
    first, second = engine.tiers
    engine.store(*KEYS[:2])
    (first_id,), (second_id,) = first.jobs, second.jobs
    first.results.append(JobResult(second_id, success=True))  # the other tier's job
    first.results.append(JobResult(999, success=True))
    first.results.append("nonsense")  # type: ignore[arg-type]
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 2
    result = first.finish(first_id)
    first.results += [result, result]
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 2  # the second tier still reads
    second.finish(second_id)
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 0
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "get_finished") == 5


def raising_late(method: str) -> Engine:
    """With a tier that has begun a job when it raises: ``executor.submit`` does where no more threads can be had."""
    engine = Engine(num_blocks=2, auto=False, load_share=1, store_backlog_share=1)
    engine.tier.raising.add(f"{method}_late")
    return engine


def test_slots_of_load_whose_submission_raised_are_not_used_until_its_report() -> None:
    engine = raising_late("submit_load")
    tier = engine.tier
    tier.put(*KEYS[:2])
    assert engine.lookup_until_known(KEYS[:2]) == [False]  # nobody waits for it
    assert engine.counts.quarantined == 2
    assert engine.manager.prepare_store(KEYS[20:22], REQ) is None
    tier.finish(next(iter(tier.jobs)))
    engine.manager.on_schedule_end()
    assert engine.counts.free == 2
    engine.clock.advance(2 * JOB_DEADLINE_S)
    engine.manager.on_schedule_end()  # it is not ended twice
    assert engine.counts.free == 2


def test_slots_of_store_whose_submission_raised_stay_pinned_until_its_report() -> None:
    engine = raising_late("submit_store")
    tier = engine.tier
    engine.store(KEYS[0])
    assert engine.counts.pinned == 1
    assert engine.lookup(KEYS[:1]) == [True]
    assert engine.manager.prepare_store(KEYS[20:22], REQ) is None
    tier.finish(next(iter(tier.jobs)))
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 0
    assert tier.blobs == {KEYS[0]: pattern(KEYS[0])}


@pytest.mark.parametrize("own_s", [None, float("inf"), 40.0])
@pytest.mark.parametrize("method", ["submit_load", "submit_store"])
def test_slots_of_job_whose_submission_raised_are_free_after_tier_deadline(
    method: str, own_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedTier, "job_deadline_s", own_s)
    engine = raising_late(method)
    tier = engine.tier
    tier.put(KEYS[1])
    if method == "submit_load":
        engine.lookup(KEYS[1:2])
    else:
        engine.store(KEYS[0])
    engine.clock.advance((own_s + REPORT_S if own_s == 40.0 else JOB_DEADLINE_S) - 0.1)
    engine.manager.on_schedule_end()
    assert engine.counts.quarantined + engine.counts.pinned == 1
    engine.clock.advance(0.2)
    engine.manager.on_schedule_end()
    assert engine.counts.quarantined + engine.counts.pinned == 0
    tier.finish(next(iter(tier.jobs)))
    engine.manager.on_schedule_end()
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "get_finished") == 1


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("nothing to be said")


class PanicError(BaseException):
    """As a Rust extension's PanicException is."""


@pytest.mark.parametrize("error", [asyncio.CancelledError(), PanicError("x"), NoRepr()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("method", METHODS)
def test_exception_of_any_type_in_a_tier_is_contained(
    method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.tier.put(KEYS[9])

    def fail(*_: object) -> None:
        raise error

    method = method.removesuffix("_late")
    monkeypatch.setattr(ScriptedTier, method, property(fail) if method == "nearest" else fail)
    engine.store(KEYS[0])
    engine.lookup(KEYS[9:10])
    engine.lookup(KEYS[9:11])
    engine.manager.touch(KEYS[:1])
    assert list(engine.manager.take_events()) is not None
    engine.manager.on_request_finished(REQ)
    engine.manager.drain()
    engine.manager.shutdown()
    assert engine.counted("kvtiers_contained_errors_total", "tier0", method) >= 1


@pytest.mark.parametrize("signals", [KeyboardInterrupt, SystemExit])
def test_exceptions_of_signal_handlers_reach_the_engine(signals: type[BaseException]) -> None:
    """What a signal's handler raises, vLLM's own among them, comes out of wherever the engine is."""
    engine = Engine()

    def interrupt(*_: object) -> None:
        raise signals

    for method in ("lookup", "touch", "get_finished"):
        setattr(engine.tier, method, interrupt)
    with pytest.raises(signals):
        engine.manager.lookup(KEYS[0], REQ)
    with pytest.raises(signals):
        engine.manager.touch(KEYS[:1])
    with pytest.raises(signals):
        engine.manager.on_schedule_end()


@pytest.mark.parametrize(
    ("keys", "medium", "removed"),
    [
        (None, "X", False),
        (7, "X", False),
        ([7], "X", False),
        ((KEYS[0],), None, False),
        ((KEYS[0],), "X", np.array([True, False])),
    ],
)
def test_malformed_event_is_contained_and_other_events_are_returned(keys: Any, medium: Any, removed: Any) -> None:
    engine = Engine()
    good = OffloadingEvent((KEYS[1],), "X", removed=True)
    engine.tier.events = [OffloadingEvent(keys, medium, removed), good]
    assert list(engine.manager.take_events()) == [good]
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "take_events") == 1


def test_event_keys_may_be_any_iterable() -> None:
    engine = Engine()
    engine.tier.events = [OffloadingEvent(iter(KEYS[:2]), "X", removed=False)]  # type: ignore[arg-type]
    assert list(engine.manager.take_events()) == [OffloadingEvent(tuple(KEYS[:2]), "X", removed=False)]


@pytest.mark.parametrize(
    ("success", "keys", "contained"),
    [
        (False, (KEYS[5], KEYS[6]), 0),  # of another job
        (False, None, 0),
        (False, 7, 1),
        (False, ([],), 1),
        (np.array([True, False]), tuple(KEYS[:2]), 1),  # no truth value
    ],
    ids=str,
)
def test_result_without_known_successful_keys_is_a_failure(success: Any, keys: Any, contained: int) -> None:
    engine = Engine(auto=False)
    engine.tier.put(*KEYS[:2])
    engine.lookup(KEYS[:2])
    (job_id,) = engine.tier.jobs
    del engine.tier.jobs[job_id]
    engine.tier.results.append(JobResult(job_id, success, keys))
    engine.manager.on_schedule_end()
    assert [engine.manager.lookup(key, REQ) for key in KEYS[5:7]] == [False, False]
    assert engine.lookup(KEYS[:2]) == [False]
    assert engine.counts.free == 16
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "get_finished") == contained


MALFORMED_IDS: tuple[Any, ...] = ([], ([],), np.array([1, 2]))


@pytest.mark.parametrize("malformed", [None, *(JobResult(each, success=True) for each in MALFORMED_IDS)], ids=str)
def test_results_after_a_malformed_result_count(malformed: Any) -> None:
    engine = Engine(auto=False)
    for key in KEYS[:3]:
        engine.store(key)
    for job_id in list(engine.tier.jobs):
        engine.tier.finish(job_id)
    engine.tier.results.insert(1, malformed)
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 0
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "get_finished") == 1


def test_lookup_answer_without_truth_value_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(engine.tier, "lookup", lambda key, req_context: np.array([1, 2]))
    assert engine.lookup(KEYS[:1]) == [False]
    assert engine.counted("kvtiers_contained_errors_total", "tier0", "lookup") == 1
    monkeypatch.setattr(engine.tier, "lookup", lambda key, req_context: np.True_)
    assert engine.lookup(KEYS[1:2]) == [None]


def test_slots_of_unreported_job_stay_out_of_use() -> None:
    engine = Engine(num_blocks=4, auto=False, promotion_wait_s=0.5)
    engine.tier.reports_at_shutdown = False
    engine.tier.put(KEYS[9])
    engine.store(*KEYS[:2])
    engine.lookup([KEYS[9]])
    for number in range(20, 40):  # whatever comes, it goes through the one slot that is left
        engine.clock.advance(1)
        engine.lookup([KEYS[number]])
        engine.store(KEYS[number])
    assert engine.counts == SlotCounts(free=0, ready=1, pinned=2, pending=0, quarantined=1)
    engine.manager.reset_cache()
    assert engine.counts == SlotCounts(free=1, ready=0, pinned=0, pending=0, quarantined=3)
    engine.manager.shutdown()
    assert engine.counts == SlotCounts(free=1, ready=0, pinned=0, pending=0, quarantined=3)


# ---- the rest of the interface


def test_reset_removes_blocks_of_the_region_and_keeps_blocks_of_tiers() -> None:
    engine = Engine()
    engine.store(*KEYS[:4])
    engine.manager.reset_cache()
    engine.manager.on_schedule_end()
    assert engine.counts.free == 16
    assert engine.tier.blobs.keys() == set(KEYS[:4])
    assert engine.lookup_until_known(KEYS[:4]) == [True] * 4
    engine.load(KEYS[:4])


def test_request_waiting_during_a_reset_is_looked_up_again() -> None:
    engine = Engine(auto=False)
    engine.tier.put(*KEYS[:2])
    engine.lookup(KEYS[:2])
    engine.manager.reset_cache()
    assert engine.counts.quarantined == 2
    engine.tier.auto = True
    assert engine.lookup_until_known(KEYS[:2]) == [True] * 2


def test_reset_does_not_wait_for_tiers_and_old_jobs_change_nothing() -> None:
    engine = Engine(num_blocks=16, auto=False, store_backlog_share=0.25)
    tier = engine.tier
    tier.put(KEYS[20])
    engine.lookup(KEYS[20:21])
    engine.store(*KEYS[:6])
    (load, store) = tier.submitted
    assert (job_keys(load), job_keys(store)) == (KEYS[20:21], KEYS[:4])
    tier.silent = True
    engine.manager.reset_cache()
    assert "drain_jobs" not in tier.calls
    assert engine.counts == SlotCounts(free=11, ready=0, pinned=0, pending=0, quarantined=5)
    assert engine.counted("kvtiers_stores_dropped_total", "tier0", "backlog") == 2
    engine.store(*KEYS[:1])  # of other weights by now, in a slot that no job is at
    old_slots = {*load.metadata.block_ids.tolist(), *store.metadata.block_ids.tolist()}
    block = engine.slots.find(KEYS[0])
    assert block is not None
    assert block.slot not in old_slots
    for job in (load, store):
        tier.finish(job.metadata.job_id)
    engine.manager.on_schedule_end()
    assert tier.submitted == [load, store]
    assert engine.lookup(KEYS[:1]) == [True]
    assert all(engine.manager.lookup(key, REQ) is not True for key in (KEYS[20], *KEYS[1:6]))
    assert engine.counts == SlotCounts(free=15, ready=1, pinned=0, pending=0, quarantined=0)


def test_jobs_are_awaited_until_the_deadline_of_their_tier() -> None:
    engine = Engine(num_tiers=2, auto=False)
    slow, hung = engine.tiers
    slow.job_deadline_s, hung.job_deadline_s = 20.0, 10.0
    engine.with_tiers(slow, hung)
    assert not engine.manager.has_jobs_to_await()
    engine.store(*KEYS[:2])
    engine.clock.advance(10 + 2 * REPORT_S)
    assert engine.manager.has_jobs_to_await()
    slow.finish(next(iter(slow.jobs)))
    engine.manager.on_schedule_end()
    assert not engine.manager.has_jobs_to_await()
    hung.finish(next(iter(hung.jobs)))
    engine.manager.on_schedule_end()
    assert engine.counts.pinned == 0
    engine.store(KEYS[3])
    assert engine.manager.has_jobs_to_await()


def test_drain_ends_stores_of_loaded_blocks() -> None:
    engine = Engine(num_tiers=2, auto=False)
    engine.tiers[1].put(*KEYS[:2])
    engine.lookup(KEYS[:2])
    engine.manager.drain()
    assert engine.tiers[0].blobs.keys() == set(KEYS[:2])
    assert engine.counts.pending == 0


def test_events_of_the_region_and_the_tiers_are_returned_together() -> None:
    engine = Engine()
    engine.store(KEYS[0])
    engine.tier.events.append(OffloadingEvent((KEYS[0],), "tier0", removed=False))
    assert list(engine.manager.take_events()) == [
        OffloadingEvent((KEYS[0],), "CPU", removed=False),
        OffloadingEvent((KEYS[0],), "tier0", removed=False),
    ]
    assert list(engine.manager.take_events()) == []


def test_slot_counts_are_in_the_metrics() -> None:
    engine = Engine(num_blocks=8)
    engine.store(*KEYS[:3])
    engine.manager.on_schedule_end()
    states = ("free", "ready", "pinned", "pending", "quarantined")
    assert [engine.counted("kvtiers_slots", state) for state in states] == [5, 3, 0, 0, 0]


def test_calls_after_shutdown_do_nothing() -> None:
    engine = Engine(num_tiers=2, auto=False)
    engine.store(*KEYS[:2])
    engine.tiers[1].put(KEYS[5])
    engine.lookup([KEYS[5]])
    engine.manager.prepare_load(KEYS[:1], REQ)
    engine.manager.prepare_store([KEYS[9]], REQ)
    engine.manager.shutdown()
    engine.manager.shutdown()
    assert engine.counts.free == 16
    calls = [list(tier.calls) for tier in engine.tiers]
    engine.manager.complete_load(KEYS[:1])
    engine.manager.complete_store([KEYS[9]])
    engine.manager.touch(KEYS[:1])
    engine.manager.on_request_finished(REQ)
    assert engine.lookup(KEYS[:1]) == [False]
    assert engine.manager.prepare_store(KEYS[:1], REQ) is None
    assert list(engine.manager.take_events())[-1:] != []
    assert [tier.calls for tier in engine.tiers] == calls
    assert engine.counts.free == 16


def test_block_loaded_during_shutdown_is_stored_to_no_tier() -> None:
    engine = Engine(num_tiers=2, auto=False)
    engine.tiers[1].put(KEYS[0])
    engine.lookup(KEYS[:1])
    engine.tiers[1].reports_at_shutdown = False
    engine.tiers[1].auto = True
    engine.manager.shutdown()
    assert engine.tiers[0].submitted == []
    assert engine.counts.free == 16


def test_shutdown_with_a_stuck_tier_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    join = threading.Thread.join

    def join_the_good_one_however_late_it_is(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, 120 if thread.name == "kvtiers-shutdown-good" else timeout)

    monkeypatch.setattr(threading.Thread, "join", join_the_good_one_however_late_it_is)

    class Stuck(ScriptedTier):
        def shutdown(self) -> None:
            release.wait(120)

    view = make_view(8)
    stuck, good = Stuck(view, "stuck", auto=False), ScriptedTier(view, "good", auto=False)
    slots = Slots(8)
    manager = BlockManager(slots, [stuck, good], ManagerOptions(shutdown_s=0.05))
    manager.prepare_store(KEYS[:2], REQ)
    manager.complete_store(KEYS[:2])
    manager.shutdown()
    assert "shutdown" in good.calls
    assert slots.counts() == SlotCounts(free=6, ready=0, pinned=0, pending=0, quarantined=2)
    assert manager.metrics.value("kvtiers_contained_errors_total", "stuck", "shutdown") == 1
    release.set()


def test_shutdown_shortens_longer_shutdown_s_of_tiers() -> None:
    """Its own limit may be longer than what an engine has left; one that says nothing is asked nothing."""
    engine = Engine(num_tiers=3)
    for tier, own_s in zip(engine.tiers, (4.0, 0.1, None), strict=True):
        tier.shutdown_s = own_s
    engine.manager.shutdown_s = 1.0
    engine.manager.shutdown()
    assert [tier.shutdown_s for tier in engine.tiers] == [0.8, 0.1, None]


def test_shutdown_does_not_set_shorter_shutdown_s_of_a_tier() -> None:
    class Fixed(ScriptedTier):
        @property
        def shutdown_s(self) -> float:  # type: ignore[override]
            return 0.5

    manager = BlockManager(Slots(8), [Fixed(make_view(8), "fixed")], clock=Clock())
    manager.shutdown()
    assert not manager.metrics.value("kvtiers_contained_errors_total", "fixed", "shutdown_s")


@pytest.mark.parametrize("own", [np.float32(3), np.int64(3), 3])
def test_job_deadline_s_may_be_any_number(own: Any) -> None:
    tier = ScriptedTier(make_view(8), "numbers")
    tier.job_deadline_s = own
    assert GuardedTier(tier, Metrics()).deadline_s == 3 + REPORT_S


def test_job_whose_submission_raised_is_not_awaited() -> None:
    """It may still report it; nobody will, mostly, and an idle engine would step until its deadline."""
    engine = Engine(auto=False)
    engine.tier.raising.add("submit_store")
    engine.store(KEYS[0])
    assert engine.counts.pinned == 1
    assert not engine.manager.has_jobs_to_await()
    engine.manager.shutdown()
    engine.clock.advance(3600)
    engine.manager.on_schedule_end()  # late: there is no tier any more


def test_hits_already_loaded_by_another_request_are_not_counted_as_expired() -> None:
    engine = Engine(num_blocks=40, num_tiers=2, auto=False, load_share=0.4)  # 8 blocks a tier
    engine.tiers[1].put(*KEYS[:16])
    whole, beginning = ReqContext("whole"), ReqContext("beginning")
    for req, keys in ((whole, KEYS[:16]), (beginning, KEYS[:8])):
        for key in keys:
            engine.manager.lookup(key, req)
    engine.manager.on_schedule_end()
    for job in list(engine.tiers[1].jobs):
        engine.tiers[1].finish(job)
    engine.manager.on_schedule_end()  # the rest of the whole takes the share, and hangs
    engine.manager.on_request_finished(whole)
    engine.clock.advance(60)
    engine.manager.on_schedule_end()
    assert engine.counted("kvtiers_promotion_room_expired_total") == 0


def test_manager_without_tiers_keeps_blocks_in_the_region() -> None:
    engine = Engine(num_tiers=0, num_blocks=4)
    engine.store(*KEYS[:4])
    assert engine.lookup(KEYS[:5]) == [True] * 4 + [False]
    engine.load(KEYS[:4])
    engine.store(*KEYS[4:6])
    assert engine.counts == SlotCounts(free=0, ready=4, pinned=0, pending=0, quarantined=0)


@pytest.mark.parametrize(
    "option",
    [
        {"promotion_wait_s": -1},
        {"lookup_total_s": float("nan")},
        {"store_backlog_share": 0},
        {"store_backlog_share": 1.1},
        {"load_share": 0},
        {"step_tokens_max": 0},
    ],
)
def test_invalid_option_error_names_the_option(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as e:
        ManagerOptions(**option)
    assert e.value.field == next(iter(option))


def test_tiers_are_shut_down_although_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(num_tiers=2)
    engine.store(*KEYS[:4])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    engine.manager.shutdown()
    assert all("shutdown" in tier.calls for tier in engine.tiers)
    assert engine.counts.pinned == 0


def test_tier_name_is_text_in_metrics() -> None:
    engine = Engine()
    engine.tier.name = 1  # type: ignore[assignment]
    engine.tier.raising.add("touch")
    manager = BlockManager(engine.slots, [engine.tier])
    manager.touch(KEYS[:1])
    assert engine.counted("kvtiers_contained_errors_total", "1", "touch") == 1


def test_request_without_room_waits_for_load_of_another_request() -> None:
    engine = Engine(num_blocks=4, auto=False, promotion_wait_s=0.5, store_backlog_share=1)
    engine.store(*KEYS[:3])  # the tier has not taken them yet, so they hold their slots
    engine.tier.put(*KEYS[10:13])
    waits, loads = ReqContext("waits"), ReqContext("loads")
    assert engine.lookup(KEYS[10:13], waits) == [None] * 3
    engine.clock.advance(0.6)
    engine.lookup(KEYS[10:13], waits)
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.clock.advance(0.1)
    engine.manager.on_schedule_end()
    assert engine.lookup(KEYS[10:13], loads) == [None] * 3
    assert engine.lookup(KEYS[10:13], waits)[:2] == [None, None]


def test_request_does_not_await_its_load_if_load_of_another_request_failed() -> None:
    engine = Engine(num_blocks=2, auto=False, load_share=1, promotion_wait_s=5.0)
    assert engine.manager.prepare_store(KEYS[40:42], REQ) is not None
    engine.tier.put(KEYS[1])
    waits = ReqContext("waits")
    assert engine.lookup(KEYS[1:2], waits) == [None]
    engine.clock.advance(0.1)
    loads = engine.manager._loads  # a load of another request
    loads.num_failed += 1
    loads._failed[KEYS[1], 0] = loads.num_failed
    engine.manager.complete_store(KEYS[40:42], success=False)
    engine.manager.on_schedule_end()
    assert [job_keys(job) for job in engine.tier.jobs.values()] == [KEYS[1:2]]
    assert not engine.manager.continue_wait(waits.req_id)
    for _ in range(2):
        assert engine.lookup(KEYS[1:2], waits) == [False]
    assert engine.manager.lookup(KEYS[1], ReqContext("later")) is None


def test_hit_waiting_for_a_share_is_not_looked_up_during_load_by_another_request() -> None:
    engine = Engine(num_blocks=4, num_tiers=2, auto=False, load_share=0.5)
    near, far = engine.tiers
    far.put(KEYS[0], KEYS[1], KEYS[5])
    waits, other, later = (ReqContext(name) for name in ("waits", "other", "later"))
    assert engine.lookup(KEYS[5:6], other) == [None]  # its load is all of the far tier's share
    assert engine.lookup([KEYS[1], KEYS[0]], waits) == [None] * 2
    request = engine.manager._waits.by_id[waits.req_id]
    assert KEYS[0] in request.hits
    engine.clock.advance(0.1)
    loads = engine.manager._loads  # a load of another request
    loads.num_failed += 1
    loads._failed[KEYS[0], 0] = loads.num_failed
    engine.clock.advance(0.1)
    near.put(KEYS[0])
    assert engine.lookup(KEYS[:1], later) == [None]
    assert [job_keys(job) for job in near.jobs.values()] == [KEYS[:1]]
    far.silent = True
    assert engine.lookup([KEYS[1], KEYS[0]], waits) == [None] * 2
    assert KEYS[0] in request.hits
    assert not request.owed


def test_blocks_of_load_ending_after_its_request_loaded_stay_unpinned() -> None:
    """Also if the request has looked up blocks of the region in between."""
    engine = Engine(auto=False)
    engine.store(KEYS[1])
    engine.tier.finish(next(iter(engine.tier.jobs)))
    engine.tier.put(KEYS[0])
    assert engine.lookup(KEYS[:1]) == [None]
    engine.load(KEYS[1:2])
    assert engine.lookup(KEYS[1:2]) == [True]
    engine.tier.finish(next(iter(engine.tier.jobs)))
    for _ in range(3):
        engine.manager.on_schedule_end()
        engine.clock.advance(500.0)
    assert engine.counts.pinned == 0
    assert engine.manager._waits.by_id[REQ.req_id] not in engine.manager._waits.served
