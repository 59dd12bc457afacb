"""TieringOffloadingManager: the CPU region in front, any number of tiers behind it.

- Cascade (``cascade``): a block that the engine stores in the region is copied to every tier.
- Promotion: a key that is not in the region is looked up in the tiers, in order. A hit is loaded into a reserved slot;
  ``lookup`` says "ask again" until then. A block loaded from a later tier is also stored to the tiers before it.
- Every wait is bounded (``request.State`` names the limits). When a limit passes, the key counts as absent.
- After a failed load, that tier's copy counts as absent for the request until it finishes, so no request retries
  forever. The same holds for requests that came before the failure, or they would retry in turn and wait in turn.
- A tier's faults never reach the engine: exceptions, duplicate results and results of unknown jobs are only counted.

Scheduler thread only, except that ``shutdown`` calls each tier's shutdown on a thread of its own, to limit its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from ...tiers.base import OffloadingEvent, ReqContext, SecondaryTierManager
from ...tiers.blocks.keys import OffloadKey
from ...tiers.plain_logs import get_logger
from ..base import LoadStoreSpec, OffloadingManager, PrepareStoreOutput
from .cascade import Cascade
from .guard import GuardedTier, load_deadline_s, shut_down_tiers
from .jobs import TierJobs
from .options import TieringOptions
from .primary import BlockState, CPUPrimaryTier, SlotCounts
from .promotion import Loads, PromotionRoom, TierLoads
from .request import Request
from .waiting import WaitingRequests

logger = get_logger(__name__)


class TieringOffloadingManager(OffloadingManager):
    """The region and its tiers as one OffloadingManager.

    Args:
        primary: the region's slots.
        tiers: lookups ask them in this order; stores go to all of them.
        clock: seconds, monotonic.

    Attributes:
        shutdown_s: time limit of ``shutdown``; may be lowered.
        excluded_tiers: returns the bit mask of the tiers that a request must not load from; may be set. 0 by default.
    """

    def __init__(
        self,
        primary: CPUPrimaryTier,
        tiers: Sequence[SecondaryTierManager] = (),
        options: TieringOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.primary = primary
        self._tiers = tuple(GuardedTier(tier, primary.metrics) for tier in tiers)
        self._tier_lookups = [(index, 1 << index, tier.lookup) for index, tier in enumerate(self._tiers)]
        self.metrics = primary.metrics
        self._options = options or TieringOptions()
        self._clock = clock
        self.shutdown_s = self._options.shutdown_s
        self.excluded_tiers: Callable[[ReqContext], int] = lambda _: 0
        load_blocks_max = math.ceil(self._options.load_share * primary.num_blocks / max(1, len(self._tiers)))
        deadlines_s = [load_deadline_s(tier) for tier in tiers]
        self._jobs = TierJobs(self._tiers, deadlines_s, clock)
        by_tier = [
            TierLoads(index, tier.name, load_blocks_max, min(self._options.load_deadline_s, own_s))
            for index, (tier, own_s) in enumerate(zip(self._tiers, deadlines_s, strict=True))
        ]
        self._loads = Loads(primary, by_tier, self._jobs, clock)
        self._room = PromotionRoom(primary, self._loads, self._options)
        self._requests = WaitingRequests(primary, self._tiers, self._options, clock)
        self._cascade = Cascade(primary, self._tiers, self._options.store_backlog_share, self._jobs, clock)
        self._slots_told: SlotCounts | None = None
        self._closed = False

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        request = self._requests.current
        if request is not None and request.req_id == req_context.req_id:
            if key in request.coming:
                return None
            if key in request.held:
                return True
            if self.primary.find(key) is None:
                is_known = key in request.owed or key in request.hits
                return None if is_known else self._lookup_tiers(key, request)
        return self._lookup_region(key, req_context)

    def is_waiting(self, req_id: str) -> bool:
        """Whether ``lookup`` would give the request the same answers as last time: no answer, load or deadline is new.

        Call it before the step's first lookup of the request: answers that tiers give within a step count from the next
        step on. O(1). Counts as a lookup of the request. False if the request waits for nothing or is unknown.
        """
        return self._requests.is_waiting(req_id)

    def is_coming(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Whether a key whose ``lookup`` returned None is on its way into the region; False: a tier owes an answer."""
        block = self.primary.find(key)
        if block is not None:
            return block.state in (BlockState.STORING, BlockState.LOADING)
        request = self._requests.by_id.get(req_context.req_id)
        return request is not None and key in request.hits

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary.prepare_load(keys, req_context)
        self._requests.stop(req_context.req_id)  # its wait is over: it loads all the blocks that it wants
        return spec

    def touch(self, keys: Collection[OffloadKey]) -> None:
        self.primary.touch(keys)
        for tier in self._tiers:
            tier.touch(keys)
        self._cascade.use(keys)

    def complete_load(self, keys: Collection[OffloadKey]) -> None:
        self.primary.complete_load(keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self._requests.hold_new_finds()
        return self.primary.prepare_store(keys, req_context)

    def complete_store(self, keys: Collection[OffloadKey], success: bool = True) -> None:
        self._cascade.add(self.primary.end_store(keys, success), len(self._tiers))

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(self.primary.take_events())
        for tier in self._tiers:
            events += tier.take_events()
        return events

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.end(req_context.req_id)
        for tier in self._tiers:
            tier.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        """Take the tiers' results, submit this step's promotions and let the tiers send this step's lookups."""
        began = self._clock()
        self._take_results()
        waiting = self._requests.waiting
        if waiting or self._loads.are_awaited:
            now = self._clock()
            self._loads.give_up_late(now)
            self._requests.hold_finds(now)
            self._room.release_latest_holds(waiting, now)
            for request in list(waiting):
                self._room.serve(request, now)
                request.end_step(now)
        self._requests.end_step()
        for tier in self._tiers:
            tier.on_schedule_end()
        slots = self.primary.slot_counts()
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
        self._requests.end_all()
        self._cascade.drop_unsent()
        self.primary.reset_cache()

    def shutdown(self) -> None:
        """Shut everything down within ``shutdown_s``. Slots of unreported jobs stay quarantined."""
        if self._closed:
            return
        self._requests.end_all()
        self._cascade.close()
        self._closed = True
        stuck = shut_down_tiers(self._tiers, self.shutdown_s, self._clock)
        self._take_results(but=stuck)
        if self._jobs:
            logger.error("shutdown: %d jobs were never reported; their slots stay quarantined", len(self._jobs))
        self.primary.shutdown()
        self._tiers, self._tier_lookups = (), []  # later calls of the engine reach no tier

    # -- promotion ---------------------------------------------------------------------------------------------------

    def _lookup_region(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """The part of ``lookup`` for the first key of a request in a step, and for keys that are in the region."""
        requests = self._requests
        request = requests.by_id.get(req_context.req_id)
        if request is not None and request is not requests.current:
            requests.begin_round(request)
        block = self.primary.find(key)
        if block is not None and block.state is BlockState.READY:
            if request is None or key not in request.held:
                requests.note_found(req_context.req_id, block)
            return True
        if not self._tiers:
            return False if block is None else None
        if request is None:
            if block is not None and requests.is_full:
                return None
            request = requests.remember(req_context, self._loads.num_failed, self.excluded_tiers(req_context))
            if request is None:
                return False
        # Not ``request.excluded``: a hit may also be excluded for lack of room, and this block already has a slot.
        if block is None or (
            block.state is BlockState.LOADING and self._loads.has_failed(request, key, block.tier)  # ask other tiers
        ):
            return None if key in request.hits else self._lookup_tiers(key, request)
        if block.state is not BlockState.QUARANTINED:
            request.await_block(block)
        request.wait()
        return None

    def _lookup_tiers(self, key: OffloadKey, request: Request) -> bool | None:
        hit: int | None = None
        owing = 0  # bit mask
        may_be_excluded = request.excluded_tiers or request.excluded or self._loads.num_failed != request.came_after
        for index, bit, ask in self._tier_lookups:  # enumerate would take a sixth of the time of this call
            if may_be_excluded and self._loads.is_excluded(request, key, index):
                continue
            answer = ask(key, request.context)
            if answer is None:
                owing |= bit
            elif answer:
                hit = index
                break
        # A tier that owes an answer comes before the tier with the hit and may be faster: worth a bounded wait.
        if owing and not request.gave_up:
            request.owe(key)
            return None
        if owing:
            self._count_expired(key, request, owing)
        if hit is None:
            return False
        request.hit(key, hit)
        return None

    def _count_expired(self, key: OffloadKey, request: Request, tiers: int) -> None:
        """Count that the request has given up waiting for these tiers' answers."""
        for index, tier in enumerate(self._tiers):
            if tiers >> index & 1 and tier.note_answer(key, request.context, hit=False):
                self.metrics.inc("kvtiers_deadline_expired_total", tier.name, "lookup")

    # -- tiers and their jobs ----------------------------------------------------------------------------------------

    def _take_results(self, but: Collection[int] = ()) -> None:
        for index in range(len(self._tiers)):
            if index not in but:
                for job, succeeded in self._jobs.take_ended(index):
                    if job.request is None:
                        self._cascade.end(index, job.blocks, succeeded)
                    else:
                        self._cascade.add(self._loads.end(job, succeeded), index)
                self._cascade.send(index)
