"""What stands in for an engine: requests over a fixed set of blocks, driven as a scheduler drives them.

Each key has its own bytes, so whatever is loaded can be compared. A load keeps its slots for some steps and is compared
when it begins and when it ends: a late read into a slot that was given away too early shows as a change in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kvtiers.connector.base import CPULoadStoreSpec
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.slots import SlotCounts
from kvtiers.tiers.base import JobMetadata, JobResult, OffloadingEvent, ReqContext, SecondaryTierManager
from kvtiers.tiers.blocks.keys import OffloadKey
from tests.identity import block_key
from tests.soak.ledger import CallTimes, Ledger

REQUESTS_AT_ONCE = 8
BLOCKS_PER_REQUEST_MAX = 12
TRANSFER_STEPS_MAX = 4
FAILED_STORES = 0.05  # of the engine's own copies into the region
STEP_S = 0.002  # a forward: the scheduler's thread is off the GIL meanwhile
LOOKUP_S_MAX = 120.0  # a request that has no answers by then is stuck


class RecordedTier(SecondaryTierManager):
    """A tier whose jobs are in the ledger's book. It changes nothing."""

    def __init__(self, tier: SecondaryTierManager, ledger: Ledger) -> None:
        super().__init__(tier.offloading_spec, tier.primary_kv_view, tier.tier_type)
        self.name: str = getattr(tier, "name", tier.tier_type)
        self.job_deadline_s = tier.job_deadline_s
        self._tier = tier
        self._ledger = ledger

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        return self._tier.lookup(key, req_context)

    def take_answered(self) -> Mapping[str, Collection[OffloadKey]] | None:
        return self._tier.take_answered()

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._ledger.submitted(self.name, job_metadata, is_load=False)
        self._tier.submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._ledger.submitted(self.name, job_metadata, is_load=True)
        self._tier.submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        for result in self._tier.get_finished():
            self._ledger.reported(self.name, result)
            yield result

    def touch(self, keys: Collection[OffloadKey]) -> None:
        self._tier.touch(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._tier.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        self._tier.on_schedule_end()

    def drain_jobs(self) -> None:
        self._tier.drain_jobs()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._tier.take_events()

    def shutdown(self) -> None:
        self._tier.shutdown()


class Stage(Enum):
    """Where a request is."""

    LOOKUP = auto()
    LOADING = auto()
    STORING = auto()
    DONE = auto()


@dataclass(eq=False, slots=True)
class Request:
    """A prompt: consecutive numbers of blocks."""

    context: ReqContext
    numbers: list[int]
    keys: list[OffloadKey]
    since_s: float
    stage: Stage = Stage.LOOKUP
    hits: int = 0
    slots: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)  # numbers of the blocks in ``slots``
    steps_left: int = 0


@dataclass(slots=True)
class Totals:
    """What the engine did, in blocks."""

    requests: int = 0
    lookups: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    stores_without_room: int = 0


class SoakEngine:
    """Drives a manager. One thread, the scheduler's, owns everything.

    Args:
        rows: (slots, row_bytes), the region.
        contents: (blocks, row_bytes): the bytes of each block's key.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: NDArray[np.int8],
        contents: NDArray[np.int8],
        ledger: Ledger,
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.manager = manager
        self.times = CallTimes(clock, late_s=late_s)
        self.totals = Totals()
        self._rows = rows
        self._contents = contents
        self._keys = [block_key(number) for number in range(len(contents))]
        self._ledger = ledger
        self._random = random.Random(seed)
        self._clock = clock
        self._sleep = sleep
        self._requests: list[Request] = []

    def run(self, until: Callable[[], bool]) -> None:
        """Serve requests until told to stop, then finish those under way."""
        while not until():
            while len(self._requests) < REQUESTS_AT_ONCE:
                self._requests.append(self._new_request())
            self.step()
        while self._requests:
            self.step()

    def settle(self, within_s: float) -> float:
        """Step without requests until no job is owed and no slot is in use; returns how long that took."""
        start_s = self._clock()
        while self._clock() - start_s < within_s:
            self.step()
            counts = self._counts()
            if not self._ledger.open_jobs and not counts.pinned + counts.pending + counts.quarantined:
                break
        self._ledger.check_idle(self._counts(), SlotCounts._fields, len(self._rows))
        return self._clock() - start_s

    def step(self) -> None:
        """One step of the scheduler."""
        for request in self._requests:
            self._advance(request)
        self._requests = [request for request in self._requests if request.stage is not Stage.DONE]
        self.times.timed("on_schedule_end", self.manager.on_schedule_end)
        self.times.timed("take_events", lambda: list(self.manager.take_events()))
        self._ledger.check_sum(self._counts(), len(self._rows))
        self._sleep(STEP_S)
        self.times.end_step()

    def _counts(self) -> SlotCounts:
        return self.manager.slots.counts()

    def _new_request(self) -> Request:
        count = self._random.randint(1, BLOCKS_PER_REQUEST_MAX)
        first = self._random.randrange(len(self._contents) - count)
        numbers = list(range(first, first + count))
        self.totals.requests += 1
        context = ReqContext(f"request-{self.totals.requests}")
        return Request(context, numbers, [self._keys[number] for number in numbers], self._clock())

    def _advance(self, request: Request) -> None:
        match request.stage:
            case Stage.LOOKUP:
                hits = self._lookup(request)
                if hits is None:
                    if self._clock() - request.since_s > LOOKUP_S_MAX:
                        self._ledger.violate("stuck lookup", f"{request.context.req_id} has no answers")
                        self._finish(request)
                    return
                request.hits = hits
                self._begin_load(request) if hits else self._begin_store(request)
            case Stage.LOADING:
                request.steps_left -= 1
                if request.steps_left < 0:
                    self._end_load(request)
                    self._begin_store(request)
            case Stage.STORING:
                request.steps_left -= 1
                if request.steps_left < 0:
                    self._end_store(request)
                    self._finish(request)

    def _lookup(self, request: Request) -> int | None:
        hits, pending = 0, False
        for key in request.keys:
            found = self.times.timed("lookup", lambda key=key: self.manager.lookup(key, request.context))  # type: ignore[misc]
            self.totals.lookups += 1
            if found is False:
                break
            pending |= found is None
            hits += 1
        return None if pending else hits

    def _begin_load(self, request: Request) -> None:
        keys = request.keys[: request.hits]
        self.times.timed("touch", lambda: self.manager.touch(keys))
        spec = self.times.timed("prepare_load", lambda: self.manager.prepare_load(keys, request.context))
        assert isinstance(spec, CPULoadStoreSpec)
        request.slots, request.moving = spec.block_ids.tolist(), request.numbers[: request.hits]
        request.steps_left = self._random.randint(0, TRANSFER_STEPS_MAX)
        request.stage = Stage.LOADING
        self._ledger.read(request.slots, request.context.req_id)
        self._compare(request)

    def _end_load(self, request: Request) -> None:
        self._compare(request)
        self.totals.blocks_loaded += len(request.slots)
        self._ledger.end_read(request.slots)
        self.times.timed("complete_load", lambda: self.manager.complete_load(request.keys[: request.hits]))

    def _compare(self, request: Request) -> None:
        for slot, number in zip(request.slots, request.moving, strict=True):
            self._ledger.check_bytes(f"block {number} in slot {slot}", self._rows[slot], self._contents[number])

    def _begin_store(self, request: Request) -> None:
        missing = request.keys[request.hits :]
        request.stage = Stage.STORING
        request.slots, request.moving = [], []
        if not missing:
            return
        output = self.times.timed("prepare_store", lambda: self.manager.prepare_store(missing, request.context))
        if output is None:
            self.totals.stores_without_room += 1
            return
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        number_of = dict(zip(request.keys, request.numbers, strict=True))
        request.slots = output.store_spec.block_ids.tolist()
        request.moving = [number_of[key] for key in output.keys_to_store]
        request.steps_left = self._random.randint(0, TRANSFER_STEPS_MAX)
        self._ledger.write(request.slots, request.context.req_id)
        for slot in request.slots:
            self._rows[slot] = -1  # half written: whoever sees it now sees wrong bytes

    def _end_store(self, request: Request) -> None:
        if not request.slots:
            return
        success = self._random.random() >= FAILED_STORES
        if success:
            for slot, number in zip(request.slots, request.moving, strict=True):
                self._rows[slot] = self._contents[number]
        self.totals.blocks_stored += len(request.slots)
        self._ledger.end_write(request.slots)
        keys = [self._keys[number] for number in request.moving]
        self.times.timed("complete_store", lambda: self.manager.complete_store(keys, success))

    def _finish(self, request: Request) -> None:
        request.stage = Stage.DONE
        self.times.timed("on_request_finished", lambda: self.manager.on_request_finished(request.context))
