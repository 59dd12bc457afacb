"""Slots: tracks the block in each slot of the region and its users, and evicts blocks to make room.

A slot is in one of five states. ``counts`` returns the number of slots in each state; their sum never changes:

    free -> pending -> ready <-> pinned          quarantined
      ^        |         |                            |
      +--------+---------+----------------------------+

- pending: being filled, by the engine (store) or by a tier (promotion).
- ready: loadable and evictable.
- pinned: loadable, but not evictable: the engine loads it, a tier's job uses it, or a waiting request holds it.
- quarantined: never loadable again, but the engine or a tier may still touch the bytes. Then the slot becomes free.

The module moves no bytes. Scheduler thread only. Every operation is O(1) per key, except sorting unordered keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from ...tiers.base import OffloadingEvent, ReqContext
from ...tiers.blocks.keys import OffloadKey
from ...tiers.errors import ConfigError
from ...tiers.metrics import Metrics
from ...tiers.plain_logs import get_logger
from ...tiers.tier.events import UnreadEvents
from ..base import CPULoadStoreSpec, PrepareStoreOutput
from .eviction import EvictionPolicy, LRUPolicy
from .record import Record

logger = get_logger(__name__)


class SlotCounts(NamedTuple):
    """Number of slots in each state."""

    free: int
    ready: int
    pinned: int
    pending: int
    quarantined: int


class BlockState(Enum):
    """State of a block."""

    STORING = auto()  # being filled by the engine
    LOADING = auto()  # being filled by a tier
    READY = auto()
    QUARANTINED = auto()  # never ready again, but the slot is still in use
    GONE = auto()  # no longer has a slot


class Waiter(Protocol):
    """An object that waits for a block that is being filled."""

    def filling_ended(self, key: OffloadKey) -> None:
        """Note that the key's block is no longer being filled: it is ready, quarantined or gone."""


@dataclass(slots=True, eq=False)
class Block:
    """A key in a slot. Only Slots changes it, except ``tier``; other classes hold it as a handle."""

    key: OffloadKey
    slot: int
    state: BlockState
    prepared: int  # number of the last slot reservation or load preparation; increases along a prefix
    loads: int = 0  # number of the engine's running loads
    pins: int = 0  # number of tier jobs and waiting requests that need the block
    promoted: bool = False  # it came from a tier, and ``touch`` has not been called yet for the use that loaded it
    tier: int = 0  # index of the tier that loads or loaded the block; set by ``TierShare``
    waiters: list[Waiter] | None = None  # to notify when the block is no longer being filled; None for most blocks

    def add_waiter(self, waiter: Waiter) -> None:
        """Notify the waiter once, when the block is no longer being filled."""
        if self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)

    def tell_waiters(self) -> None:
        """Notify the waiters: the block is no longer being filled."""
        if self.waiters is not None:
            waiters, self.waiters = self.waiters, None
            for waiter in waiters:
                waiter.filling_ended(self.key)


class Slots:
    """The region's slots.

    BlockManager passes the engine's calls to the first half of the methods. These calls come from outside. So wrong
    calls are counted, logged once and ignored, and cannot corrupt the accounting. The second half works on Blocks.

    Within one call, the first keys count as the most valuable (a prefix is useless without its first blocks), so the
    last keys are evicted first. ``complete_load`` and ``end_store`` may name keys in any order (vLLM passes sets):
    the order in which the blocks were prepared counts.

    Args:
        num_blocks: slots, 1 or more.
        policy: eviction policy; LRU by default.

    Attributes:
        record: events of blocks and requests. The classes that use the region also write to it.
    """

    def __init__(
        self, num_blocks: int, policy: EvictionPolicy | None = None, *, metrics: Metrics | None = None
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"{num_blocks} is not accepted; write 1 or more", field="num_blocks")
        self.num_blocks = num_blocks
        self.metrics = Metrics() if metrics is None else metrics
        self.record = Record(self.metrics)
        self._policy = LRUPolicy() if policy is None else policy  # not "or", because an empty policy is falsy
        self._blocks: dict[OffloadKey, Block] = {}  # never replaced, because ``find`` is bound to it
        #: Returns the key's block in any state. Not a method, for speed: called for each key of each waiting request.
        self.find: Callable[[OffloadKey], Block | None] = self._blocks.get
        self._free = list(reversed(range(num_blocks)))  # taken from the end, so that a fresh region fills in order
        self._pinned = self._pending = self._quarantined = 0
        self._numbers = itertools.count()
        self._events = UnreadEvents(CPULoadStoreSpec.medium())
        self._logged: set[str] = set()
        self._closed = False
        for call in ("complete_load", "complete_store"):
            self.metrics.inc("kvtiers_contained_errors_total", "engine", call, by=0)  # as in GuardedTier

    def counts(self) -> SlotCounts:
        """Number of slots in each state, in O(1)."""
        return SlotCounts(len(self._free), len(self._policy), self._pinned, self._pending, self._quarantined)

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey]) -> CPULoadStoreSpec:
        """See ``OffloadingManager``."""
        blocks = [self._blocks[key] for key in keys]
        for block in blocks:
            if block.state is not BlockState.READY:
                raise KeyError(block.key)
        for block in blocks:
            self._begin_use(block)
            block.loads += 1
            block.prepared = next(self._numbers)
        return CPULoadStoreSpec([block.slot for block in blocks])

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Note that the keys were used."""
        for key in reversed(list(keys)):
            block = self._blocks.get(key)
            if block is not None and block.promoted:
                block.promoted = False
                if block.loads or block.pins:
                    continue  # the use that loaded it; counted twice, the block would be frequent for ARC
            self._policy.touch(key)

    def complete_load(self, keys: Collection[OffloadKey]) -> None:
        """Note that the engine's loads of these keys have ended."""
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                self._ignore("complete_load", key)
            else:
                blocks.append(block)
        for block in sorted(blocks, key=_when_prepared, reverse=True):
            if not block.loads:
                self._ignore("complete_load", block.key)
                continue
            block.loads -= 1
            if block.state is BlockState.QUARANTINED and not block.loads:
                del self._blocks[block.key]
            self._end_use(block)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve room for keys that are not in the region. Keys beyond the number of slots are ignored."""
        if self._closed:
            return None
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > self.num_blocks:
            self.log_once(
                "store",
                f"region holds {self.num_blocks} blocks, request {req_context.req_id!r} needs {len(wanted)}: only "
                f"its first {self.num_blocks} blocks can be stored; make region.size larger",
            )
            self.record.blocks("store:too_small", wanted[self.num_blocks :])
            wanted = wanted[: self.num_blocks]
        new = [key for key in wanted if key not in self._blocks]
        evicted = self._make_room(len(new), protected=set(wanted))
        if evicted is None:
            self.record.blocks("store:no_room", new)
            return None
        self.record.computed(req_context.req_id, len(new))
        blocks = self._fill(new, BlockState.STORING)
        return PrepareStoreOutput(tuple(new), CPULoadStoreSpec([block.slot for block in blocks]), tuple(evicted))

    def end_store(self, keys: Collection[OffloadKey], success: bool = True) -> list[Block]:
        """End the engine's stores of these keys; return the blocks that became ready."""
        ended = []
        for key in dict.fromkeys(keys):
            block = self._blocks.get(key)
            if block is None or block.state is not BlockState.STORING:
                self._ignore("complete_store", key)
            else:
                ended.append(block)
        if not success:
            self.record.blocks("store:copy_failed", [block.key for block in ended])
        return self._end_filling(sorted(ended, key=_when_prepared), success)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call."""
        return self._events.take()

    def reset_cache(self) -> None:
        """Forget every block, except those the engine is storing.

        Blocks that tiers use are quarantined until the tiers' jobs end. Blocks that the engine loads are quarantined
        too, but keep their keys until ``complete_load`` names them; until then those keys are neither found nor stored.
        """
        removed = [block for block in self._blocks.values() if block.state is not BlockState.STORING]
        ready = [block.key for block in removed if block.state is BlockState.READY]
        self._events.add(ready, removed=True)
        self.record.left_region("region:reset", ready)
        for block in removed:
            if not block.loads:
                del self._blocks[block.key]
            self._drop(block)

    def shutdown(self) -> None:
        """Free every slot except those that a tier may still touch. After this call no slot can be reserved."""
        self._closed = True
        blocks = list(self._blocks.values())
        self._blocks.clear()
        for block in blocks:
            while block.loads:
                block.loads -= 1
                self._end_use(block)
            self._drop(block)

    # -- calls of BlockManager ---------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Number of slots that are free or whose blocks may be evicted."""
        return len(self._free) + len(self._policy)

    def reserve(self, keys: Sequence[OffloadKey]) -> list[Block]:
        """Reserve slots to promote absent keys, for as many of the first keys as there is room for."""
        if self._closed:
            return []
        keys = keys[: self.room]
        self._make_room(len(keys))
        return self._fill(keys, BlockState.LOADING)

    def end_promotion(self, blocks: Iterable[Block], success: bool) -> list[Block]:
        """End the load into these slots; return the blocks that became ready."""
        ended = []
        for block in blocks:
            if block.state is BlockState.QUARANTINED:
                self._release(block)
            else:
                assert block.state is BlockState.LOADING
                ended.append(block)
        ready = self._end_filling(ended, success)
        for block in ready:
            block.promoted = True
        return ready

    def quarantine(self, blocks: Iterable[Block]) -> None:
        """Forget blocks whose promotion was given up. ``end_promotion`` frees their slots when the promotion ends."""
        for block in blocks:
            if block.state is BlockState.LOADING:
                del self._blocks[block.key]
                self._drop(block)

    def pin(self, block: Block) -> None:
        """Keep a ready block until ``unpin``. A block needs one ``unpin`` per ``pin``."""
        assert block.state is BlockState.READY
        self._begin_use(block)
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Undo one ``pin``."""
        block.pins -= 1
        assert block.pins >= 0
        self._end_use(block)

    # -- slots -------------------------------------------------------------------------------------------------------

    def _make_room(self, n: int, protected: Container[OffloadKey] = ()) -> list[OffloadKey] | None:
        """Evict until n slots are free; return the evicted keys, or None if too few can be freed."""
        short = n - len(self._free)
        if short <= 0:
            return []
        evicted = self._policy.evict(short, protected)
        if evicted is None:
            return None
        for key in evicted:
            self._release(self._blocks.pop(key))
        self._events.add(evicted, removed=True)
        if self.record.is_alone:
            self.record.left_region("region:evicted", evicted)
        return evicted

    def _fill(self, keys: Iterable[OffloadKey], state: BlockState) -> list[Block]:
        blocks = [Block(key, self._free.pop(), state, next(self._numbers)) for key in keys]
        for block in blocks:
            self._blocks[block.key] = block
        self._pending += len(blocks)
        return blocks

    def _end_filling(self, blocks: list[Block], success: bool) -> list[Block]:
        self._pending -= len(blocks)
        for block in reversed(blocks):
            if success:
                block.state = BlockState.READY
                self._policy.insert(block.key)
            else:
                del self._blocks[block.key]
                self._release(block)
        for block in blocks:
            block.tell_waiters()
        if not success:
            return []
        self._events.add([block.key for block in blocks], removed=False)
        return blocks

    def _begin_use(self, block: Block) -> None:
        if not block.loads and not block.pins:
            self._policy.pin(block.key)
            self._pinned += 1

    def _end_use(self, block: Block) -> None:
        if block.loads or block.pins:
            return
        if block.state is BlockState.QUARANTINED:
            self._release(block)
        else:
            self._policy.unpin(block.key)
            self._pinned -= 1

    def _drop(self, block: Block) -> None:
        """Free the slot of a forgotten block, or quarantine the slot while the engine or a tier may touch it."""
        if block.state in (BlockState.QUARANTINED, BlockState.GONE):
            return
        in_use = block.state is BlockState.LOADING or block.loads > 0 or block.pins > 0
        if block.state is not BlockState.READY:
            self._pending -= 1
            block.tell_waiters()
        else:
            if in_use:
                self._policy.unpin(block.key)
                self._pinned -= 1
            self._policy.discard(block.key)
        if in_use:
            block.state = BlockState.QUARANTINED
            self._quarantined += 1
        else:
            self._release(block)

    def _release(self, block: Block) -> None:
        if block.state is BlockState.QUARANTINED:
            self._quarantined -= 1
        block.state = BlockState.GONE
        self._free.append(block.slot)

    def _ignore(self, call: str, key: OffloadKey) -> None:
        self.metrics.inc("kvtiers_contained_errors_total", "engine", call)
        self.log_once(call, f"{call}: ignored key {key!r}, which was not prepared for it")

    def log_once(self, what: str, message: str) -> None:
        """Log a warning once per ``what``, also for the classes that serve the region's requests and tiers."""
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("%s", message)


def _when_prepared(block: Block) -> int:
    return block.prepared
