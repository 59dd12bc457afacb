"""Waits: the requests that missed the region, the keys that each request waits for, and the blocks that it holds.

An engine looks up all its waiting requests in every step, although usually nothing has changed. This module tracks the
changes: a tier tells which keys it has answered, and a block notifies its waiters when it is no longer being filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ...tiers.base import ReqContext
from ...tiers.blocks.keys import OffloadKey
from .decisions import Declined, Plan, Prompt
from .guard import GuardedTier
from .options import ManagerOptions
from .slots import Block, BlockState, Slots
from .worth import Way

EVERY_TIER = -1  # as a bit mask
Lookup = tuple[int, int, Callable[[OffloadKey, ReqContext], bool | None]]  # index of a tier, its bit, its ``lookup``
_GAP_S_MAX = 1.0  # longest time between two lookups that counts as waited: a full engine makes no lookups
#: If there are more unfinished requests, requests that were not looked up lately are forgotten. Their waits begin anew
#: at their next lookups.
REQUESTS_MAX = 65_536


@dataclass(slots=True, eq=False)
class Wait:
    """A request that missed the region, and its waits. Other classes read the fields; only the methods write them.

    Each key passes through these states by itself. Every wait has a limit; then the key counts as absent in the tiers::

        owed    tiers owe an answer         lookup_total_s
        hits    its block needs a slot      promotion_wait_s for room, its tier's load deadline for a share of it
        coming  its block is being filled   the load's deadline; an engine ends its stores
        held    its block is ready          promotion_hold_s

    The request is in ``served`` while the ends of steps must serve its hits, loads or held blocks. The blocks of its
    loads count against their tiers' shares until the tiers report them, even if the request has ended.
    """

    context: ReqContext
    slots: Slots
    options: ManagerOptions
    served: dict[Wait, None]  # shared by all requests, in the order in which they began to wait
    came_after: int  # number of the last failed load when the request came
    excluded_tiers: int  # bit mask of the tiers that the request must not load from
    prompt: Prompt | None = None  # None: unknown to the engine
    req_id: str = field(init=False)
    # Lookups
    step: int = -1  # step of the latest lookup
    asked_at: float = 0.0  # time of the latest lookup
    has_news: bool = False  # an answer may have changed since the latest lookup
    excluded: dict[OffloadKey, int] = field(default_factory=dict)  # key -> mask of tiers not to load from
    # Decisions; see ``decisions``
    lookups: Sequence[Lookup] = ()  # of the tiers, in the order in which they are asked
    tried: int = 0  # bit mask of the tiers on trial, although they are expected to be too slow
    plans: dict[int, Plan | None] = field(default_factory=dict)  # tier to load from -> the plan; None: no estimate
    declined_tiers: int = 0  # bit mask
    declined: dict[int, Declined] = field(default_factory=dict)  # tier -> its latest declined load
    judged: tuple[int, int, int] = 0, 0, 0  # tiers, hits and owed keys at the latest decision
    # Answers that tiers owe
    owed: set[OffloadKey] = field(default_factory=set)
    owing: int = 0  # bit mask of the tiers that owe answers; may include too many tiers
    owed_since: float = 0.0  # time of the first unanswered lookup
    left_open: bool = False  # tiers that owed answers after the latest lookups
    waited_s: float = 0.0  # seconds for which answers have been owed
    gave_up: bool = False  # the request no longer waits for answers
    # Hits: keys without a slot yet
    hits: dict[OffloadKey, int] = field(default_factory=dict)  # key -> tier
    hit_tiers: int = 0  # bit mask of the tiers with hits; may include too many tiers until the next scan
    capped_since: float | None = None  # since when hits have waited for their tiers' shares; None: no hit waits
    starved_since: float | None = None  # since when a hit has waited for room in the region; None: no hit waits
    starved_key: OffloadKey | None = None  # the first hit that waits for room
    # Blocks
    found: list[Block] = field(default_factory=list)  # in this round of lookups, before the request waits
    coming: set[OffloadKey] = field(default_factory=set)  # being filled; may include hits that other requests load
    loading: int = 0  # number of blocks that tiers load for the request
    held: dict[OffloadKey, Block] = field(default_factory=dict)
    held_until: float = 0.0  # blocks are held longer while there are hits or loads

    def __post_init__(self) -> None:
        self.req_id = self.context.req_id

    # -- lookups and answers -----------------------------------------------------------------------------------------

    def begin_step(self, step: int, now: float) -> None:
        """Count the time since the latest lookup, and give up waiting for tiers' answers after ``lookup_total_s``."""
        seconds = min(now - self.asked_at, _GAP_S_MAX)
        self.step, self.asked_at = step, now
        if self.coming or self.owed:
            self.stay()
        self.waited_s = self.waited_s + seconds if self.left_open else 0.0
        if self.waited_s >= self.options.lookup_total_s and self.left_open:
            self.gave_up = True
            self.ask_again()

    def begin_round(self) -> None:
        """Begin a round of lookups. Keys that tiers may have answered are looked up again."""
        self.has_news = False
        self.left_open = bool(self.owed)
        self.found = []

    def stay(self) -> None:
        """Add the request to ``served``, and hold the blocks that it finds."""
        self.served[self] = None
        self._hold_until(self.asked_at)
        if self.found:
            self._pin(self.found)
            self.found = []

    def note_found(self, block: Block) -> None:
        """Note a ready block, and hold it while the request waits for other blocks, because these need it."""
        if self in self.served:
            self._pin([block])
        else:
            self.found.append(block)

    def owe(self, key: OffloadKey, tiers: int = EVERY_TIER) -> None:
        """Wait for the answers for the key from the tiers of a bit mask."""
        self.owing = self.owing | tiers if self.owed else tiers
        if not self.owed:
            self.left_open = True
            self.owed_since = self.asked_at
            self.stay()
        self.owed.add(key)

    def take_answers(self, keys: AbstractSet[OffloadKey]) -> None:
        """Note that a tier has answers for these keys, for the next round of lookups."""
        self.owed -= keys
        self.has_news = True

    def ask_again(self, tiers: int = EVERY_TIER) -> None:
        """Note that the tiers of a bit mask may have answers for any key, for the next round of lookups."""
        if self.owed and self.owing & tiers:
            self.owed.clear()
            self.has_news = True

    def hit(self, key: OffloadKey, tier: int) -> None:
        """Load the key from the tier as soon as it gets a slot; the end of the step looks for a slot."""
        if not self.hits:
            self.stay()
        self.owed.discard(key)  # it is owed if an answer came between two lookups of the key in this round
        self.hits[key] = tier
        self.hit_tiers |= 1 << tier

    # -- slots for hits ----------------------------------------------------------------------------------------------

    def take_slots(self, rooms: list[int], now: float) -> dict[int, list[Block]]:
        """Reserve slots for hits, in their order. Hits of a tier with a full share wait, and do not delay other hits.

        Hits that are in the region by now are dropped, because another request loads or has loaded them. The next
        lookup finds them.

        Args:
            rooms: per tier, the number of blocks that may be loaded from it now. Reduced by this call.

        Returns:
            The blocks to load, by tier.
        """
        find, room, starved = self.slots.find, self.slots.room, self.starved_key
        if not room and starved in self.hits and rooms[self.hits[starved]] and find(starved) is None:
            return {}  # a search would pass all earlier hits that wait for a share
        self.starved_key = None
        wanted: list[OffloadKey] = []
        in_region = []
        capped = 0  # bit mask of tiers
        for key, tier in self.hits.items():
            if find(key) is not None:
                in_region.append(key)
                continue
            if not rooms[tier]:
                capped |= 1 << tier
                if not any(free and self.hit_tiers >> at & 1 for at, free in enumerate(rooms)):
                    break
            elif len(wanted) == room:
                self.starved_key = key
                break
            else:
                rooms[tier] -= 1
                wanted.append(key)
        else:
            self.hit_tiers = capped
        blocks = self.slots.reserve(wanted)
        by_tier: dict[int, list[Block]] = {}
        for block in blocks:
            by_tier.setdefault(self.hits.pop(block.key), []).append(block)
        self.loading += len(blocks)
        if in_region:
            self._drop_hits(in_region)
        self.capped_since = (now if self.capped_since is None else self.capped_since) if capped else None
        self.starved_since = (now if self.starved_since is None else self.starved_since) if self.starved_key else None
        return by_tier

    def miss_hits(self, tiers: int) -> int:
        """Count the hits in the tiers of a bit mask as misses. Returns how many of them no other request loads."""
        missed = [key for key, tier in self.hits.items() if tiers >> tier & 1]
        self._drop_hits(missed)
        absent = [key for key in missed if self.slots.find(key) is None]  # another request loads the other hits
        for key in absent:
            self.excluded[key] = self.excluded.get(key, 0) | tiers
        return len(absent)

    def _drop_hits(self, keys: Iterable[OffloadKey]) -> None:
        for key in list(keys):
            del self.hits[key]
        if not self.hits:
            self.hit_tiers, self.capped_since, self.starved_since, self.starved_key = 0, None, None, None
        self.has_news = True

    def choose_tiers(self, lookups: Sequence[Lookup], tried: int) -> None:
        """Ask these tiers, in this order. Load from the ``tried`` ones also if that is expected to take too long."""
        self.lookups, self.tried = lookups, tried

    def take_undecided(self) -> bool:
        """Whether there are hits without a decision, and more hits or answers than at the last call."""
        undecided = self.hit_tiers & ~sum(1 << tier for tier in self.plans)
        before, self.judged = self.judged, (undecided, len(self.hits), len(self.owed))
        return bool(undecided) and self.judged != before

    def plan(self, tier: int, plan: Plan | None) -> None:
        """Load hits from the tier. None: do not compare the pace of the load with computing."""
        self.plans[tier] = plan

    def decline(self, tier: int, declined: Declined) -> None:
        """Stop loading from the tier: its hits, and its blocks that are being filled, count as absent."""
        self.declined[tier] = declined
        self.declined_tiers |= 1 << tier
        self.plans.pop(tier, None)
        self._drop_hits([key for key, at in self.hits.items() if at == tier])
        for key in list(self.coming):
            block = self.slots.find(key)
            if block is not None and block.state is BlockState.LOADING and block.tier == tier:
                self.filling_ended(key)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def await_block(self, block: Block) -> None:
        """Wait until the block is no longer being filled."""
        self.owed.discard(block.key)
        if block.key not in self.coming:
            self.coming.add(block.key)
            block.add_waiter(self)

    def filling_ended(self, key: OffloadKey) -> None:
        """Note that the key's block is no longer being filled, or cannot become ready for this request."""
        self.coming.discard(key)
        self.has_news = True

    def load_ended(self, num_blocks: int, ready: Iterable[Block], now: float) -> None:
        """Note that a load of the request was reported or given up. Hold its ready blocks, unless the wait is over."""
        self.loading -= num_blocks
        if self in self.served:
            self._hold_until(now)
            self._pin(ready)

    def let_go(self) -> None:
        """Unpin all held blocks."""
        for block in reversed(self.held.values()):  # so that a prefix's first blocks are evicted last
            self.slots.unpin(block)
        self.held = {}

    def _hold_until(self, now: float) -> None:
        self.held_until = max(self.held_until, now + self.options.promotion_hold_s)

    def _pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.state is BlockState.READY and block.key not in self.held:
                self.slots.pin(block)
                self.held[block.key] = block

    # -- ends --------------------------------------------------------------------------------------------------------

    def end_step(self, now: float) -> None:
        """Unpin the held blocks if the request no longer waits for blocks that need them."""
        if self.hits or self.loading:
            self._hold_until(now)
        elif not self.held or now >= self.held_until:
            self.served.pop(self, None)
            self.let_go()

    def stop(self) -> None:
        """End all waits and unpin held blocks; a later wait starts from zero. Loads go on, and serve any request."""
        self.served.pop(self, None)
        self._drop_hits(self.hits)
        self.owed.clear()
        self.left_open = self.gave_up = False
        self.waited_s = 0.0
        self.found = []
        self.coming.clear()
        self.plans, self.declined_tiers, self.judged = {}, 0, (0, 0, 0)
        self.let_go()


class Waits:
    """The requests that missed the region, by id. Scheduler thread only.

    An engine looks up all keys of a request, one after the other, before the keys of the next request.

    Attributes:
        by_id: requests by id, the most recently looked up last.
        served: requests that may have hits, loads or held blocks, in the order in which they began to wait.
        current: the request of the latest lookup in this step.
    """

    def __init__(
        self,
        slots: Slots,
        tiers: Sequence[GuardedTier],
        ways: Sequence[Way],
        options: ManagerOptions,
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._tiers = tiers
        self._ways = ways
        self._options = options
        self._clock = clock
        self.by_id: OrderedDict[str, Wait] = OrderedDict()
        self.served: dict[Wait, None] = {}
        self.current: Wait | None = None
        self._found: tuple[str, list[Block]] = "", []  # by the request of the latest lookup, if it is not remembered
        self._step = 0
        self._took_answers = False  # whether the tiers' answers were taken in this step

    def continue_wait(self, req_id: str) -> bool:
        """Begin a request's step without lookups. False: lookups may have new answers, or the request does not wait."""
        wait = self.by_id.get(req_id)
        if wait is None:
            return False
        self._begin_step(wait)
        return bool(wait.owed or wait.coming or wait.hits) and not wait.has_news

    def begin_round(self, wait: Wait) -> None:
        """Begin a request's lookups in this step."""
        self._begin_step(wait)
        self.current = wait
        wait.begin_round()

    def note_found(self, req_id: str, block: Block) -> None:
        """Note a ready block that an unremembered request found, in case the request misses the next block."""
        if self._found[0] != req_id:
            self._found = req_id, []
        self._found[1].append(block)

    def add(self, context: ReqContext, came_after: int, excluded_tiers: int, prompt: Prompt | None = None) -> Wait:
        """Remember a new request. If there are too many, forget the request whose latest lookup is the oldest.

        A request that is looked up in every step is not forgotten: at its next lookup it would be new and replace
        another request in turn, so no request's wait would ever end.
        """
        if len(self.by_id) >= REQUESTS_MAX:
            oldest = next(iter(self.by_id.values()))
            if oldest.step < self._step - 1:
                self.end(oldest.req_id)
        wait = Wait(context, self._slots, self._options, self.served, came_after, excluded_tiers, prompt)
        self.by_id[context.req_id] = wait
        self.begin_round(wait)
        if self._found[0] == context.req_id:
            wait.found = self._found[1]
        self._found = "", []
        return wait

    def _begin_step(self, wait: Wait) -> None:
        """Once per step, take the tiers' new answers and add to the request's waiting time."""
        if not self._took_answers:
            self._took_answers = True
            self._take_answers()
        if wait.step != self._step:
            self.by_id.move_to_end(wait.req_id)
            wait.begin_step(self._step, self._clock())

    def _take_answers(self) -> None:
        for index, tier in enumerate(self._tiers):
            answered = tier.take_answered()
            if answered is None:
                for wait in self.by_id.values():
                    wait.ask_again(1 << index)
                continue
            for req_id, keys in answered.items():
                if (asked := self.by_id.get(req_id)) is not None:
                    asked.take_answers(keys)
                    if keys and not asked.owed:
                        self._ways[index].learn_lookup(self._clock() - asked.owed_since)

    # -- ends --------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End the step: the next lookup takes the tiers' new answers first."""
        self._step += 1
        self._took_answers = False
        self.current = None
        self._found = "", []

    def stop(self, req_id: str) -> None:
        """End the wait of a request that loads its blocks: it needs no other blocks, and the load pins these."""
        wait = self.by_id.get(req_id)
        if wait is not None:
            wait.stop()
            if self.current is wait:
                self.current = None

    def end(self, req_id: str) -> None:
        """Forget a request that has finished. Its loads go on, and serve any request that looks up the blocks next."""
        self.stop(req_id)
        self.by_id.pop(req_id, None)

    def end_all(self) -> None:
        """Forget all requests and the blocks that they found."""
        for req_id in list(self.by_id):
            self.end(req_id)
        self._found = "", []
