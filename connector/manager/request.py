"""Request: what a request that missed the region waits for, and the blocks that it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ...tiers.base import ReqContext
from ...tiers.blocks.keys import OffloadKey
from .options import TieringOptions
from .primary import Block, BlockState, CPUPrimaryTier

EVERY_TIER = -1  # as a bit mask
_GAP_S_MAX = 1.0  # limit of what counts as waited between two lookups


@dataclass(slots=True, eq=False)
class Request:
    """A request that missed the region. Other classes read its fields; only its methods write them. Scheduler thread.

    Each key advances by itself, and every wait has a limit, after which the tiers count as if they lacked the key::

        owed    tiers owe an answer         lookup_total_s
        hits    its block needs a slot      promotion_wait_s for room, load_deadline_s for a tier's share of the region
        coming  its block is being filled   the load's deadline; the engine ends its own stores
        held    its block is ready          promotion_hold_s

    It is in ``waiting`` while steps' ends must serve it, for hits, loads or held blocks. The blocks of its loads count
    against their tiers' shares until the tiers report them, whatever becomes of the request.
    """

    context: ReqContext
    primary: CPUPrimaryTier
    options: TieringOptions
    waiting: dict[Request, None]  # shared by all requests; in the order in which their waits began
    came_after: int  # number of the last load that had failed when it came
    excluded_tiers: int  # bit mask of the tiers that it must not load from
    req_id: str = field(init=False)
    # Lookups
    step: int = -1  # number of the step of its latest lookup
    asked_at: float = 0.0  # time of its latest lookup
    has_news: bool = False  # an answer may have changed since its latest lookup
    excluded: dict[OffloadKey, int] = field(default_factory=dict)  # key -> mask of tiers it must not be loaded from
    # Answers that tiers owe
    owed: set[OffloadKey] = field(default_factory=set)
    left_open: bool = False  # tiers owed answers after its latest lookups
    waited_s: float = 0.0  # seconds that answers have been owed for; long gaps between lookups count only in part
    gave_up: bool = False  # it no longer waits for answers
    # Hits, which have no slot yet
    hits: dict[OffloadKey, int] = field(default_factory=dict)  # key -> tier
    hit_tiers: int = 0  # bit mask of the tiers with hits; may include too many until the hits are scanned again
    capped_until: float = math.inf  # until when hits wait for their tiers' shares; infinite if none does
    starved_since: float | None = None  # since when hits wait for room in the region; None if none does
    starved_for: OffloadKey | None = None  # the first hit that got no room when hits were last scanned
    # Blocks
    coming: set[OffloadKey] = field(default_factory=set)  # being filled; may include hits that another request loads
    loading: int = 0  # number of blocks that tiers load for this request
    held: dict[OffloadKey, Block] = field(default_factory=dict)
    held_until: float = 0.0  # blocks are held longer while there are hits or loads

    def __post_init__(self) -> None:
        self.req_id = self.context.req_id

    # -- lookups and answers -----------------------------------------------------------------------------------------

    def begin_step(self, step: int, now: float) -> None:
        """Count the time since the latest lookup, and give up waiting for tiers' answers after ``lookup_total_s``.

        Only a part of a long time counts: an engine does not look up waiting requests while its batch is full.
        """
        seconds = min(now - self.asked_at, _GAP_S_MAX)
        self.step, self.asked_at = step, now
        if self.coming or self.owed:
            self.wait()
        self.waited_s = self.waited_s + seconds if self.left_open else 0.0
        if self.waited_s >= self.options.lookup_total_s and self.left_open:
            self.gave_up = True
            self.ask_again()

    def begin_round(self) -> None:
        """Begin a round of lookups. Keys that tiers may have answered are looked up again."""
        self.has_news = False
        self.left_open = bool(self.owed)

    def wait(self) -> None:
        """Have the request served at the ends of steps, and hold the blocks that it finds."""
        self.waiting[self] = None
        self.held_until = max(self.held_until, self.asked_at + self.options.promotion_hold_s)

    def owe(self, key: OffloadKey) -> None:
        """Wait for the answers that tiers owe for the key."""
        if not self.owed:
            self.left_open = True
            self.wait()
        self.owed.add(key)

    def take_answers(self, keys: AbstractSet[OffloadKey]) -> None:
        """Note that a tier has answers for these keys; the next round of lookups gets them."""
        self.owed -= keys
        self.has_news = True

    def ask_again(self) -> None:
        """Note that tiers may have answers for any key; the next round of lookups gets them."""
        if self.owed:
            self.owed.clear()
            self.has_news = True

    def hit(self, key: OffloadKey, tier: int) -> None:
        """Load the key from the tier as soon as it gets a slot; the end of the step looks for one."""
        if not self.hits:
            self.wait()
        self.owed.discard(key)  # owed if the key was looked up twice in this round and the answer came in between
        self.hits[key] = tier
        self.hit_tiers |= 1 << tier

    # -- slots for hits ----------------------------------------------------------------------------------------------

    def take_slots(self, shares: list[int], now: float) -> dict[int, list[Block]]:
        """Reserve slots for hits, in order. Returns the blocks to load, by tier. Other hits wait for a share or room.

        Args:
            shares: per tier, how many blocks of it may be loaded now; changed.
        """
        wanted = self._hits_within(shares)
        blocks = self.primary.reserve(wanted)
        by_tier: dict[int, list[Block]] = {}
        for block in blocks:
            by_tier.setdefault(self.hits.pop(block.key), []).append(block)
        self.loading += len(blocks)
        if len(blocks) < len(wanted):  # other hits are checked against the shares once the region has room
            self.starved_for = wanted[len(blocks)]
            self.starved_since = now if self.starved_since is None else self.starved_since
        else:
            self.starved_since = None
            self.capped_until = min(self.capped_until, now + self.options.load_deadline_s) if self.hits else math.inf
        return by_tier

    def _hits_within(self, shares: list[int]) -> list[OffloadKey]:
        """Hits within their tiers' shares, up to one more than the region has room for.

        Drops hits that are in the region, because another request loads or has loaded them: the next lookup finds them.
        """
        # Hundreds of hits in each of hundreds of requests are too many to scan in every step without a chance to load.
        if not any(free and self.hit_tiers >> tier & 1 for tier, free in enumerate(shares)):
            return []
        find, room = self.primary.find, self.primary.room
        missed = self.starved_for  # a scan might pass many hits that wait for a share before it reaches this one
        if not room and missed in self.hits and shares[self.hits[missed]] and find(missed) is None:
            return [missed]
        wanted = []
        hit_tiers = 0
        in_region = []
        for key, tier in self.hits.items():
            if find(key) is not None:
                in_region.append(key)
                continue
            hit_tiers |= 1 << tier
            if shares[tier]:
                shares[tier] -= 1
                wanted.append(key)
                if len(wanted) > room:
                    break
        else:
            self.hit_tiers = hit_tiers
        if in_region:
            self._drop_hits(in_region)
        return wanted

    def miss_hits(self, tiers: int) -> int:
        """Count the hits in the tiers of a bit mask as misses. Returns how many of them nobody else loads."""
        missed = [key for key, tier in self.hits.items() if tiers >> tier & 1]
        self._drop_hits(missed)
        self.hit_tiers &= ~tiers
        absent = [key for key in missed if self.primary.find(key) is None]  # others are loaded by another request
        for key in absent:
            self.excluded[key] = self.excluded.get(key, 0) | tiers
        return len(absent)

    def _drop_hits(self, keys: Iterable[OffloadKey]) -> None:
        for key in list(keys):
            del self.hits[key]
        if not self.hits:
            self.hit_tiers, self.capped_until, self.starved_since = 0, math.inf, None
        self.has_news = True

    # -- blocks that are being filled --------------------------------------------------------------------------------

    def await_block(self, block: Block) -> None:
        """Wait until the block is no longer being filled."""
        self.owed.discard(block.key)
        if block.key not in self.coming:
            self.coming.add(block.key)
            block.add_waiter(self)

    def look_again(self) -> None:
        """Look the keys up again in the next step, instead of waiting for a load that begins now."""
        self.has_news = True

    def filling_ended(self, key: OffloadKey) -> None:
        """Note that the key's block is no longer being filled."""
        self.coming.discard(key)
        self.has_news = True

    def load_ended(self, num_blocks: int, ready: Iterable[Block], now: float) -> None:
        """Note that a load of this request was reported or given up. Hold its ready blocks, unless the wait is over."""
        self.loading -= num_blocks
        if self in self.waiting:
            self.held_until = max(self.held_until, now + self.options.promotion_hold_s)
            self._pin(ready)

    # -- held blocks -------------------------------------------------------------------------------------------------

    def hold(self, found: dict[OffloadKey, Block], now: float) -> bool:
        """Hold blocks that the request found while it waits for others, or it would have to wait for them in turn.

        Returns False if the request holds nothing, because its hold time is over.
        """
        if self.hits or self.loading:
            self.held_until = max(self.held_until, now + self.options.promotion_hold_s)
        if now > self.held_until:
            return False
        if not found.keys() <= self.held.keys():  # usually it found the same blocks in an earlier step
            self._pin(found.values())
        return True

    def let_go(self) -> None:
        """Unpin all held blocks."""
        for block in reversed(self.held.values()):  # so that a prefix's first blocks are evicted last
            self.primary.unpin(block)
        self.held = {}

    def _pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.state is BlockState.READY and block.key not in self.held:
                self.primary.pin(block)
                self.held[block.key] = block

    # -- ends --------------------------------------------------------------------------------------------------------

    def end_step(self, now: float) -> None:
        """Let go of the held blocks if nothing that the request waits for needs them any longer."""
        if not (self.hits or self.loading or (self.held and now < self.held_until)):
            self.waiting.pop(self, None)
            self.let_go()

    def stop(self) -> None:
        """Wait for nothing and hold nothing; a later wait starts from zero. Loads go on, and serve any request."""
        self.waiting.pop(self, None)
        self._drop_hits(self.hits)
        self.owed.clear()
        self.left_open = False
        self.waited_s = 0.0
        self.gave_up = False
        self.coming.clear()
        self.let_go()
