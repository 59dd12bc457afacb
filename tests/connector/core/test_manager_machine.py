"""S1: a state machine over region, BlockManager and scripted tiers, against a small reference model.

The model knows which slots somebody may be touching and what bytes each ready key must have. After every step: the
slot counts add up and match a count by hand, no slot is in two hands, every ready block holds its key's bytes, and the
fields of each waiting request agree with the blocks that it holds and with the stores and loads that are under way.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.core.eviction import create_policy
from kvtiers.connector.core.guard import JOB_DEADLINE_S as OWN_DEADLINE_S
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import BlockState, SlotCounts, Slots
from kvtiers.connector.core.waits import Wait
from kvtiers.tiers.base import JobResult, ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from tests.clock import Clock
from tests.connector.core.scripted_tier import PollingTier, ScriptedTier, make_view, pattern, row
from tests.identity import block_key
from tests.promises import Record

KEYS = [block_key(number) for number in range(24)]
REQUESTS = [ReqContext(name) for name in ("", "a", "b", "c")]
# Of requests that wait together; the first two share a prefix.
PROMPTS = [(REQUESTS[1], KEYS[:8]), (REQUESTS[2], [*KEYS[:4], *KEYS[8:14]]), (REQUESTS[3], KEYS[14:22])]
RAISING = ["lookup", "submit_store", "submit_load", "get_finished", "get_finished_late", "touch", "on_schedule_end"]
RAISING += ["on_request_finished", "take_answered", "take_events"]
LOAD_DEADLINE_S = 5.0
HOLD_S = 1.0
ROOM_WAIT_S = 0.5
LOOKUP_TOTAL_S = 2.0
STEPS = 60

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
some_request = st.sampled_from(REQUESTS)
some_tier = st.integers(0, 1)


@dataclass
class Transfer:
    """A store or load of the engine under way: which slots its worker touches."""

    keys: list[OffloadKey]
    slots: list[int]


class TieringMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 12),
        num_tiers=st.integers(0, 2),
        policy=st.sampled_from(["lru", "arc"]),
        load_share=st.sampled_from([0.4, 1.0]),
        stored=st.booleans(),
        polls=st.booleans(),
    )
    def start(self, num_blocks: int, num_tiers: int, policy: str, load_share: float, stored: bool, polls: bool) -> None:
        self.num_blocks = num_blocks
        self.load_share = load_share
        self.clock = Clock()
        self.view = make_view(num_blocks)
        kind = PollingTier if polls else ScriptedTier
        self.tiers = [kind(self.view, f"tier{index}", auto=False) for index in range(num_tiers)]
        for tier in self.tiers:
            tier.put(*KEYS[::2] if stored else ())
        self.slots = Slots(num_blocks, create_policy(policy, num_blocks))
        self.manager = BlockManager(
            self.slots,
            self.tiers,
            ManagerOptions(
                promotion_hold_s=HOLD_S,
                promotion_wait_s=ROOM_WAIT_S,
                lookup_total_s=LOOKUP_TOTAL_S,
                load_deadline_s=LOAD_DEADLINE_S,
                load_share=load_share,
            ),
            clock=self.clock,
        )
        self.stores: list[Transfer] = []
        self.loads: list[Transfer] = []
        self.resident: set[OffloadKey] = set()  # by the events, as somebody outside sees it
        self.undecided: dict[
            str, set[OffloadKey]
        ] = {}  # of each request, what it was told to ask again in its last round
        self.forgotten: set[int] = set()  # jobs that a tier will never report
        self.waits: set[Wait] = set()  # all that the manager ever remembered

    # -- the engine

    @rule(keys=some_keys, req=some_request)
    def begin_store(self, keys: list[OffloadKey], req: ReqContext) -> None:
        output = self.manager.prepare_store(keys, req)
        if output is None:
            return
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        slots = output.store_spec.block_ids.tolist()
        assert len(set(output.keys_to_store)) == len(slots) <= len(set(keys))
        for slot in slots:
            row(self.view, slot)[:] = bytes(len(row(self.view, slot)))  # half written
        if slots:
            self.stores.append(Transfer(list(output.keys_to_store), slots))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.booleans(), twice=st.booleans())
    def end_store(self, data: st.DataObject, success: bool, twice: bool) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self._end_store(store, success)
        if twice:
            self.manager.complete_store(store.keys, not success)

    def _end_store(self, store: Transfer, success: bool) -> None:
        for key, slot in zip(store.keys, store.slots, strict=True):
            row(self.view, slot)[:] = pattern(key)
        self.manager.complete_store(store.keys * 2, success)

    @rule(keys=some_keys, req=some_request)
    def lookup(self, keys: list[OffloadKey], req: ReqContext) -> None:
        self._take_events()
        self.undecided[req.req_id] = undecided = set()
        for key in keys:
            answer = self.manager.lookup(key, req)
            assert (answer is True) == (key in self.resident)
            if answer is None:
                undecided.add(key)

    @rule(req=some_request)
    def ask_only_if_there_is_news(self, req: ReqContext) -> None:
        """A request of which the manager says that it is waiting is told nothing new.

        When it is asked about for the first time in a step: what tiers answer within one is heard in the next.
        """
        self.manager.on_schedule_end()
        continues = self.manager.continue_wait(req.req_id)
        undecided = self.undecided.get(req.req_id, set())
        stored = {key for key in undecided if key in self.resident or self.slots.find(key)}  # by the engine meanwhile
        if continues:
            assert all(self.manager.lookup(key, req) is None for key in undecided - stored)

    @rule(stored=st.lists(some_keys, min_size=1, max_size=6), tiers_work=st.booleans())
    def engine_runs(self, stored: list[list[OffloadKey]], tiers_work: bool) -> None:
        """Its requests ask for their prompts in each step, and load when they know; what it computes it stores."""
        for computed in stored:
            for req, keys in PROMPTS:
                answers = []
                for key in keys:
                    answers.append(self.manager.lookup(key, req))
                    if answers[-1] is False:
                        break
                self.undecided[req.req_id] = {key for key, answer in zip(keys, answers, strict=False) if answer is None}
                if None not in answers and True in answers:
                    self.begin_load(keys[: answers.count(True)], req)
                    self.manager.complete_load(self.loads.pop().keys)
            self.begin_store(computed, REQUESTS[0])
            if self.stores:
                self._end_store(self.stores.pop(), success=True)
            self.what_requests_wait_for_is_accounted_for()
            self.end_step()
            self.clock.advance(0.05)
            for tier in self.tiers if tiers_work else ():
                for job_id in tier.jobs.keys() - self.forgotten:
                    tier.finish(job_id)

    @rule(keys=some_keys, req=some_request)
    def begin_load(self, keys: list[OffloadKey], req: ReqContext) -> None:
        self._take_events()
        known = set(keys) <= self.resident
        try:
            spec = self.manager.prepare_load(keys, req)
        except KeyError:
            assert not known
            return
        assert known
        assert isinstance(spec, CPULoadStoreSpec)
        self.loads.append(Transfer(keys, spec.block_ids.tolist()))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.manager.complete_load(load.keys)

    @rule(keys=some_keys, req=some_request, success=st.booleans(), step_ends=st.booleans())
    def request_waits_for_a_store(
        self, keys: list[OffloadKey], req: ReqContext, success: bool, step_ends: bool
    ) -> None:
        """A request looks up what the engine stores in that moment."""
        before = len(self.stores)
        self.begin_store(keys, REQUESTS[0])
        if len(self.stores) > before:
            self.lookup(keys, req)
            self.what_requests_wait_for_is_under_way()
            if step_ends:
                self.end_step()
            self._end_store(self.stores.pop(), success)

    @rule(keys=some_keys, success=st.booleans())
    def complete_nonsense(self, keys: list[OffloadKey], success: bool) -> None:
        busy = {key for transfer in (*self.loads, *self.stores) for key in transfer.keys}
        nonsense = [key for key in keys if key not in busy]
        self.manager.complete_load(nonsense)
        self.manager.complete_store(nonsense, success)

    @rule(keys=some_keys)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.manager.touch(keys)

    @rule(req=some_request)
    def finish_request(self, req: ReqContext) -> None:
        self.manager.on_request_finished(req)

    @rule()
    def end_step(self) -> None:
        self.manager.on_schedule_end()
        now = self.clock()
        for wait in self.manager._waits.by_id.values():
            if wait.hits:  # the step's end has looked for slots
                assert wait in self.manager._waits.served
                first = next(iter(wait.hits.values()))
                share = self.manager._loads.shares[first]
                if wait.starved_since is not None:
                    assert self.slots.counts().free == 0
                    assert now - wait.starved_since < ROOM_WAIT_S
                else:
                    assert wait.capped_since is not None
                    assert not share.room or wait.has_news  # hits of another tier were missed in this step
                    assert now - wait.capped_since < share.deadline_s

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.5, LOAD_DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: not self.forgotten)
    @rule()
    def drain(self) -> None:
        self.manager.drain()

    @rule(drains=st.booleans())
    def reset(self, drains: bool) -> None:
        if drains and not self.forgotten:
            self.manager.drain()
        self.manager.reset_cache()
        assert all(self.manager.lookup(key, ReqContext("after")) is not True for key in KEYS)
        self.manager.on_request_finished(ReqContext("after"))

    # -- the tiers

    @precondition(lambda self: self.tiers)
    @rule(index=some_tier, data=st.data())
    def tier_finishes(self, index: int, data: st.DataObject) -> None:
        tier = self.tiers[index % len(self.tiers)]
        jobs = [job_id for job_id in tier.jobs if job_id not in self.forgotten]
        if jobs:
            job_id = data.draw(st.sampled_from(jobs))
            keys = list(tier.jobs[job_id].metadata.keys)
            result = tier.finish(job_id, data.draw(st.sets(st.sampled_from(keys))))
            if data.draw(st.integers(0, 3)) == 0:
                tier.results.append(result)
            if data.draw(st.integers(0, 3)) == 0:
                tier.results.append(JobResult(10**9, success=True, successful_keys=tuple(keys)))

    @precondition(lambda self: self.tiers)
    @rule(index=some_tier, data=st.data())
    def tier_forgets_a_job(self, index: int, data: st.DataObject) -> None:
        tier = self.tiers[index % len(self.tiers)]
        if tier.jobs and len(self.forgotten) < 2:
            self.forgotten.add(data.draw(st.sampled_from(list(tier.jobs))))

    @precondition(lambda self: self.tiers)
    @rule(index=some_tier, keys=some_keys)
    def another_engine_stores(self, index: int, keys: list[OffloadKey]) -> None:
        self.tiers[index % len(self.tiers)].put(*keys)

    @precondition(lambda self: self.tiers)
    @rule(index=some_tier, mood=st.sampled_from(["answers_later", "silent", "liar"]), on=st.booleans())
    def tier_changes_its_mood(self, index: int, mood: str, on: bool) -> None:
        setattr(self.tiers[index % len(self.tiers)], mood, on)

    @precondition(lambda self: self.tiers)
    @rule(
        index=some_tier,
        methods=st.sets(st.sampled_from(RAISING)),
    )
    def tier_raises_from_now_on(self, index: int, methods: set[str]) -> None:
        self.tiers[index % len(self.tiers)].raising = methods

    # -- what must always hold

    @invariant()
    def slots_are_conserved(self) -> None:
        counts = self.slots.counts()
        assert sum(counts) == self.num_blocks
        assert min(counts) >= 0
        blocks = self.slots._blocks.values()
        states = Counter(
            "pinned" if block.state is BlockState.READY and (block.pins or block.loads) else block.state.name
            for block in blocks
        )
        quarantined = states["QUARANTINED"] + self.num_blocks - len(blocks) - len(self.slots._free)
        pending = states["STORING"] + states["LOADING"]
        assert counts == SlotCounts(len(self.slots._free), states["READY"], states["pinned"], pending, quarantined)
        taken = [*self.slots._free, *(block.slot for block in blocks)]
        assert len(set(taken)) == len(taken)

    @invariant()
    def no_slot_is_in_two_hands(self) -> None:
        writers = [slot for store in self.stores for slot in store.slots]
        readers = {slot for load in self.loads for slot in load.slots}
        for tier in self.tiers:
            for job in tier.jobs.values():
                if job.is_load:
                    writers += job.metadata.block_ids.tolist()
                else:
                    readers |= set(job.metadata.block_ids.tolist())
        assert len(set(writers)) == len(writers)
        assert not readers & set(writers)
        assert not {*writers, *readers} & set(self.slots._free)

    @invariant()
    def what_is_read_has_the_right_bytes(self) -> None:
        for load in self.loads:
            for key, slot in zip(load.keys, load.slots, strict=True):
                assert bytes(row(self.view, slot)) == pattern(key)
        for block in self.slots._blocks.values():
            if block.state is BlockState.READY:
                assert bytes(row(self.view, block.slot)) == pattern(block.key)
        for tier in self.tiers:
            assert all(blob == pattern(key) for key, blob in tier.blobs.items())
            for job in tier.jobs.values():
                if not job.is_load:
                    for key, slot in zip(job.metadata.keys, job.metadata.block_ids.tolist(), strict=True):
                        assert bytes(row(self.view, slot)) == pattern(key)

    @invariant()
    def events_tell_what_is_there(self) -> None:
        self._take_events()
        ready = {key for key, block in self.slots._blocks.items() if block.state is BlockState.READY}
        assert self.resident == ready

    @invariant()
    def what_requests_wait_for_is_accounted_for(self) -> None:
        jobs = self.manager._jobs._jobs.values()
        pins = Counter(block for job in jobs if job.wait is None for block in job.blocks)
        waits = self.manager._waits
        for wait in waits.by_id.values():
            pins.update(wait.held.values())
            assert wait in waits.served or not (wait.hits or wait.held)
            for key in wait.coming:
                block = self.slots.find(key)
                assert block is not None
                assert block.state in (BlockState.STORING, BlockState.LOADING)
                assert wait in (block.waiters or ())
            assert not wait.owed & (wait.hits.keys() | wait.coming)
            assert wait.loading == len(self._loading_for(wait))
        assert all(block.pins == pins[block] for block in (*self.slots._blocks.values(), *pins))
        assert waits.served.keys() <= set(waits.by_id.values())
        for index, share in enumerate(self.manager._loads.shares):
            unreported = sum(len(job.blocks) for job in jobs if job.wait is not None and job.tier == index)
            blocks_max = math.ceil(self.load_share * self.num_blocks / len(self.tiers))
            assert blocks_max - share.room == unreported <= blocks_max

    @invariant()
    def what_requests_wait_for_is_under_way(self) -> None:
        remembered = set(self.manager._waits.by_id.values())
        for wait in self.waits - remembered:
            assert not any((wait.owed, wait.hits, wait.coming, wait.held))
        self.waits |= remembered
        jobs = self.manager._jobs._jobs
        reported = {result.job_id for tier in self.tiers for result in tier.results}
        at_tiers = {job_id for tier in self.tiers for job_id, job in tier.jobs.items() if job.is_load}
        under_way = {job_id: job for job_id, job in jobs.items() if job.wait is not None and not job.is_over}
        assert under_way.keys() <= reported | at_tiers
        loaded = {block for job in under_way.values() for block in job.blocks}
        stored = {key for store in self.stores for key in store.keys}
        for wait in remembered:
            if wait.held or wait.hits:
                assert wait in self.manager._waits.served
            if not wait.hits:
                assert wait.starved_since is None
                assert wait.capped_since is None
            for key in wait.coming:
                assert key in stored or self.slots.find(key) in loaded
            for key, block in wait.held.items():
                assert self.slots.find(key) is block
                assert block.state is BlockState.READY
                assert block.pins

    def _loading_for(self, wait: Wait) -> list[OffloadKey]:
        """Keys of the request's own loads under way."""
        jobs = self.manager._jobs._jobs.values()
        return [block.key for job in jobs if job.wait is wait and not job.is_over for block in job.blocks]

    def _take_events(self) -> None:
        for event in self.manager.take_events():
            if event.removed:
                assert set(event.keys) <= self.resident
                self.resident -= set(event.keys)
            else:
                assert not set(event.keys) & self.resident
                self.resident |= set(event.keys)

    # -- the end: everything that was started ends, and nothing is left over

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for load in self.loads:
            self.manager.complete_load(load.keys)
        for store in self.stores:
            self.manager.complete_store(store.keys, success=False)
        self.loads, self.stores = [], []
        self._every_lookup_ends()
        for req in (*REQUESTS, ReqContext("last")):
            self.manager.on_request_finished(req)
        for tier in self.tiers:
            tier.raising = set()
            for job_id in [job_id for job_id in tier.jobs if job_id not in self.forgotten]:
                tier.finish(job_id)
        for _ in range(2):  # what was loaded may be stored to another tier
            self.manager.on_schedule_end()
            for tier in self.tiers:
                for job_id in [job_id for job_id in tier.jobs if job_id not in self.forgotten]:
                    tier.finish(job_id)
        self.clock.advance(OWN_DEADLINE_S)  # until then slots of jobs whose submission raised are out of use
        self.manager.on_schedule_end()
        counts = self.slots.counts()
        assert counts.pinned + counts.pending + counts.quarantined == len(self._held())
        for tier in self.tiers:
            tier.reports_at_shutdown = not self.forgotten
        self.manager.shutdown()
        held = self._held()  # what waited for a tier that forgot a job was handed to it at last
        assert self.slots.counts() == SlotCounts(self.num_blocks - len(held), 0, 0, 0, len(held))

    def _held(self) -> set[int]:
        return {slot for tier in self.tiers for job in tier.jobs.values() for slot in job.metadata.block_ids.tolist()}

    def _every_lookup_ends(self) -> None:
        """Whatever the tiers do, requests that wait together get definite answers within the deadlines."""
        prompts = [*PROMPTS, (ReqContext("last"), KEYS)]
        began = self.clock()
        while undecided := [key for req, keys in prompts for key in keys if self.manager.lookup(key, req) is None]:
            assert self.clock() - began < (2 * len(self.tiers) + 1) * LOAD_DEADLINE_S, f"{len(undecided)} undecided"
            self.manager.on_schedule_end()
            self.clock.advance(HOLD_S / 2)  # what is held for one stays while it asks


def run(examples: int, record: Record) -> None:
    run_state_machine_as_test(
        TieringMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    record("S1", runs=examples, steps_each=STEPS, slots_lost=0)


def test_slots_are_conserved(record: Record) -> None:
    run(50, record)


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_slots_are_conserved_at_length(part: int, record: Record) -> None:
    """2,000 x 60 steps, in parts that stay below the suite's time-outs."""
    run(250, record)
