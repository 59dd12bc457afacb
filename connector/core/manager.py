"""BlockManager: serves the engine's calls with the CPU region and any number of tiers behind it.

- Cascade: a block that the engine stores in the region is copied to every tier.
- Promotion: a key that is not in the region is looked up in the tiers, in order. A hit is loaded into a reserved slot,
  and ``lookup`` returns "ask again" until the block is ready. A block loaded from a later tier is also stored to the
  tiers before it.
- Every wait is bounded (``waits.Wait`` names the limits). When a limit passes, the key counts as absent.
- After a failed load, the tier's copy counts as absent for the request until the request ends, so no request retries
  forever. It also counts as absent for earlier requests, which would otherwise retry and wait one after the other.
- A tier's faults never reach the engine: exceptions, duplicate results and results of unknown jobs are only counted.

Scheduler thread only, except that ``shutdown`` calls each tier's shutdown on a thread of its own, to limit its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from ...tiers.base import OffloadingEvent, ReqContext, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey
from ...tiers.plain_logs import get_logger
from ..base import LoadStoreSpec, OffloadingManager, PrepareStoreOutput
from .decisions import Decisions, Prompt
from .guard import GuardedTier, shut_down_tiers
from .jobs import Jobs
from .loads import Loads
from .options import ManagerOptions
from .slots import BlockState, SlotCounts, Slots
from .stores import Stores
from .waits import Wait, Waits

logger = get_logger(__name__)


class BlockManager(OffloadingManager):
    """The region and its tiers as one OffloadingManager.

    Args:
        slots: the region's slots.
        tiers: lookups ask them in this order; stores go to all of them.
        clock: seconds, monotonic.

    Attributes:
        shutdown_s: time limit of ``shutdown``. May be lowered.
        excluded_tiers: returns the bit mask of the tiers that a request must not load from, by default 0. May be set.
        loads, stores: whether blocks are loaded from the tiers, and stored to the tiers. May be set.
    """

    def __init__(
        self,
        slots: Slots,
        tiers: Sequence[SecondaryTierManager] = (),
        options: ManagerOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self.metrics = slots.metrics
        self.excluded_tiers: Callable[[ReqContext], int] = lambda _: 0
        self.loads = self.stores = True
        options = options or ManagerOptions()
        self.shutdown_s = options.shutdown_s
        self._tiers = tuple(GuardedTier(tier, slots.metrics, clock) for tier in tiers)
        self._tier_lookups = [(index, 1 << index, tier.lookup) for index, tier in enumerate(self._tiers)]
        self._clock = clock
        slots.record.is_alone = not tiers
        self._jobs = Jobs(self._tiers)
        self.decisions = Decisions(self._tiers, options, slots.metrics)
        self._loads = Loads(slots, self._tiers, self._jobs, self.decisions, options, clock)
        self._waits = Waits(slots, self._tiers, self.decisions.ways, options, clock)
        self._stores = Stores(slots, self._tiers, options.store_backlog_share, self._jobs, clock)
        self._prompt_of, self._prompt = "", Prompt(0, 0)  # length of the prompt that is looked up next
        self._slots_told: SlotCounts | None = None
        self._closed = False

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        wait = self._waits.current
        if wait is not None and wait.req_id == req_context.req_id:
            if key in wait.coming:
                return None
            if key in wait.held:
                return True
            if self.slots.find(key) is None:
                is_known = key in wait.owed or key in wait.hits
                return None if is_known else self._lookup_tiers(key, wait)
        return self._lookup_region(key, req_context)

    def note_request(self, req_id: str, num_tokens: int, num_computed_tokens: int) -> None:
        """Note the length of the prompt that is looked up next. ``num_computed_tokens`` of its tokens need no load.

        Without this call, and without the calls of ``decisions.steps``, every hit is loaded.
        """
        self._prompt_of, self._prompt = req_id, Prompt(num_tokens, num_computed_tokens)
        self.decisions.steps.expect(req_id, num_tokens)

    def continue_wait(self, req_id: str) -> bool:
        """Continue a request's wait for a step without looking up its keys, because the answers would be the same.

        O(1). Call it before the step's first lookup of the request: answers that tiers give within a step count from
        the next step on. False: look the keys up, because there is news (an answer, a load, a deadline), or because
        the request does not wait.
        """
        return self._waits.continue_wait(req_id)

    def is_coming(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Whether the block of a key whose ``lookup`` returned None is being loaded. False: a tier owes an answer."""
        block = self.slots.find(key)
        if block is not None:
            return block.state in (BlockState.STORING, BlockState.LOADING)
        wait = self._waits.by_id.get(req_context.req_id)
        return wait is not None and key in wait.hits

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.slots.prepare_load(keys)
        self.slots.record.loads(req_context.req_id, keys)
        self._waits.stop(req_context.req_id)  # the wait is over, because the request loads all the blocks that it wants
        return spec

    def touch(self, keys: Collection[OffloadKey]) -> None:
        self.slots.touch(keys)
        if self.loads or self.stores:
            for tier in self._tiers:
                tier.touch(keys)
        if self.stores:
            self._stores.use(keys)

    def complete_load(self, keys: Collection[OffloadKey]) -> None:
        self.slots.complete_load(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return self.slots.prepare_store(keys, req_context)

    def complete_store(self, keys: Collection[OffloadKey], success: bool = True) -> None:
        ready = self.slots.end_store(keys, success)
        if self.stores:
            self._stores.add(ready, len(self._tiers))

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(self.slots.take_events())
        for tier in self._tiers:
            events += tier.take_events()
        return events

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._waits.end(req_context.req_id)
        self.slots.record.end(req_context.req_id)
        self.decisions.steps.forget(req_context.req_id)
        for tier in self._tiers:
            tier.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        """Take the tiers' results, submit this step's promotions and let the tiers send this step's lookups."""
        began = self._clock()
        self._take_results()
        served = self._waits.served
        if served or self._loads.are_awaited or self._loads.have_ended:
            now = self._clock()
            self._loads.begin_step(now)
            self._loads.release_latest_holds(served, now)
            for wait in list(served):
                self._loads.serve(wait, now)
                wait.end_step(now)
        else:
            self._loads.rest()
        self._waits.end_step()
        for tier in self._tiers:
            tier.on_schedule_end()
            self.slots.record.take(tier.name, tier.take_reasons(), tier.nearest())
        self.slots.record.look_at_use(tier.name for tier in self._tiers if tier.load != "never")
        slots = self.slots.counts()
        if slots != self._slots_told:
            self._slots_told = slots
            for state, count in slots._asdict().items():
                self.metrics.set("kvtiers_slots", state, value=count)
        self.metrics.observe("kvtiers_schedule_end_seconds", value=self._clock() - began)

    def has_jobs_to_await(self) -> bool:
        """Whether a tier may still report a job."""
        return self._jobs.are_awaited

    def drain(self) -> None:
        """Wait until the tiers have finished their jobs. Bounded by the tiers' own deadlines."""
        self._jobs.drain(self._take_results)

    def reset_cache(self) -> None:
        """Forget the region's blocks, except those that the engine is loading or storing. The tiers keep their blocks.

        Does not wait for the tiers' jobs, because storage may hang. The jobs continue in quarantined slots until they
        are reported. Blocks that they load never become ready; blocks that they store were computed before the reset.
        """
        self._waits.end_all()
        self._stores.drop_unsent()
        self.slots.reset_cache()

    def shutdown(self) -> None:
        """Shut everything down within ``shutdown_s``. Slots of unreported jobs stay quarantined."""
        if self._closed:
            return
        self._waits.end_all()
        self._stores.close()
        self._closed = True
        stuck = shut_down_tiers(self._tiers, self.shutdown_s, self._clock)
        self._take_results(but=stuck)
        if self._jobs:
            logger.error("shutdown: %d jobs were never reported; their slots stay quarantined", len(self._jobs))
        self.slots.shutdown()
        self._tiers, self._tier_lookups = (), []  # later calls of the engine reach no tier

    # -- lookups -----------------------------------------------------------------------------------------------------

    def _lookup_region(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Look up the first key of a request in a step, or a key that is in the region; a part of ``lookup``."""
        waits = self._waits
        wait = waits.by_id.get(req_context.req_id)
        if wait is not None and wait is not waits.current:
            waits.begin_round(wait)
        block = self.slots.find(key)
        if block is not None and block.state is BlockState.READY:
            if wait is None:
                waits.note_found(req_context.req_id, block)
            elif key not in wait.held:
                wait.note_found(block)
            return True
        if not (self._tiers and self.loads):
            if block is not None:
                return None
            self.slots.record.missed(req_context.req_id, key)
            return False
        if wait is None:
            prompt = self._prompt if self._prompt_of == req_context.req_id else None
            wait = waits.add(req_context, self._loads.num_failed, self.excluded_tiers(req_context), prompt)
            self._loads.judge_unasked(wait, self._tier_lookups)
        # Do not check ``wait.excluded``: a lack of room may exclude a hit, but this block already has a slot.
        if block is None or (
            block.state is BlockState.LOADING
            and (wait.declined_tiers >> block.tier & 1 or self._loads.has_failed(wait, key, block.tier))
        ):  # ask other tiers
            return None if key in wait.hits else self._lookup_tiers(key, wait)
        if block.state is not BlockState.QUARANTINED:
            wait.await_block(block)
        wait.stay()
        return None

    def _lookup_tiers(self, key: OffloadKey, wait: Wait) -> bool | None:
        hit: int | None = None
        owing = 0  # bit mask
        may_be_excluded = (
            wait.excluded_tiers | wait.declined_tiers or wait.excluded or self._loads.num_failed != wait.came_after
        )
        for index, bit, ask in wait.lookups:  # not enumerate, which would take a sixth of the time of this call
            if may_be_excluded and self._loads.is_excluded(wait, key, index):
                continue
            answer = ask(key, wait.context)
            if answer is None:
                owing |= bit
            elif answer:
                hit = index
                break
        # A tier that owes an answer precedes the tier with the hit and may be faster, so wait for a limited time.
        if owing and not wait.gave_up:
            wait.owe(key, owing)
            return None
        if owing:
            self._count_expired(key, wait, owing)
        if hit is None:
            if self.slots.record.is_new_miss(wait.req_id, key):
                self._note_miss(key, wait, owing)
            return False
        wait.hit(key, hit)
        return None

    def _note_miss(self, key: OffloadKey, wait: Wait, owing: int) -> None:
        """Record why a key is absent. ``owing``: bit mask of the tiers that did not answer."""
        record, req_id = self.slots.record, wait.req_id
        for index, tier in enumerate(self._tiers):
            if owing >> index & 1:
                return record.missed(req_id, key, "lookup:total", tier.name)
            if (declined := wait.declined.get(index)) is not None and wait.declined_tiers >> index & 1:
                facts = {
                    "expected_s": declined.load_s,
                    "compute_s": declined.compute_s,
                    "actual_s": declined.spent_s,
                }
                return record.missed(req_id, key, f"load:{declined.reason}", tier.name, **facts)
            if not self._loads.is_excluded(wait, key, index) and (reason := tier.explain_miss(key, wait.context)):
                return record.missed(req_id, key, reason, tier.name)
        every_tier = (1 << len(self._tiers)) - 1
        return record.missed(req_id, key, "lookup:request" if wait.excluded_tiers & every_tier == every_tier else "")

    def _count_expired(self, key: OffloadKey, wait: Wait, tiers: int) -> None:
        """Count that the request has stopped waiting for these tiers' answers."""
        for index, tier in enumerate(self._tiers):
            if tiers >> index & 1 and tier.note_answer(key, wait.context, hit=False):
                self.metrics.inc("kvtiers_deadline_expired_total", tier.name, "lookup")

    # -- tiers and their jobs ----------------------------------------------------------------------------------------

    def _take_results(self, but: Collection[int] = ()) -> None:
        for index in range(len(self._tiers)):
            if index not in but:
                for job, succeeded in self._jobs.take_ended(index):
                    if job.wait is None:
                        self._stores.end(job, succeeded)
                    else:
                        self._stores.add(self._loads.end(job, succeeded), index)
                self._stores.send(index)
