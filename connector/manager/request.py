"""Request: what a request that missed the region waits for, and what it holds, as a state machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtiers.connector.manager.options import TieringOptions
from kvtiers.connector.manager.primary import Block, BlockState, CPUPrimaryTier
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey

EVERY_TIER = -1  # as a bit mask
_STEP_S_MAX = 0.1  # most of a gap between lookups that counts as waited; or half of lookup_deadline_s, if larger


class State(Enum):
    """State of a request. ``Request`` describes each state."""

    IDLE = auto()
    ASKING = auto()
    WAITING_FOR_SHARE = auto()
    WAITING_FOR_ROOM = auto()
    LOADING = auto()
    HELD = auto()
    ENDED = auto()


_NEXT = {
    # IDLE -> HELD: it looks up a block that is leaving the region, so only the blocks that it found are held.
    State.IDLE: (State.ASKING, State.LOADING, State.HELD, State.ENDED),
    State.ASKING: tuple(State),
    State.WAITING_FOR_SHARE: tuple(State),
    State.WAITING_FOR_ROOM: tuple(State),
    State.LOADING: (State.ASKING, State.HELD, State.IDLE, State.ENDED),
    State.HELD: (State.ASKING, State.LOADING, State.IDLE, State.ENDED),
    State.ENDED: (),
}


@dataclass(slots=True, eq=False)
class Request:
    """A request that missed the region. Scheduler thread only. Other classes read its fields; only its methods write.

    ::

                a tier owes an answer or has the key           end of step: hits without a slot
         IDLE ------------------------------------> ASKING ------------------------------> WAITING_FOR_SHARE
          | ^                                       ^ |  ^                                   | ^
          | |  it loads the blocks (``stop``),      | |  |  lookup of further keys           v |
          | |  or the hold time is over             | |  +----------------------- WAITING_FOR_ROOM
          | +----------- HELD ---- lookup ----------+ |                                      |
          |               ^                           | end of step: every hit has a slot    |
          |               |    every block arrived    v                                      |
          |               +------------------------ LOADING <--------------------------------+
          +--- a block is being filled already -------^

    A wait that ends without a block to wait for leads to HELD, or to IDLE if nothing is held: the tiers lack the keys,
    or the wait took too long, and the keys count as absent. Any state leads to ENDED (``end``), and every state but
    ENDED leads to IDLE when the request loads its blocks (``stop``). ``_NEXT`` lists all legal transitions.

    Each key of a request advances by itself: it is owed, then a hit, then coming, then held. The state of the request
    is the first of these that applies:

    - ENDED: the engine has finished the request, or the region was reset. The object is not used again.
    - WAITING_FOR_ROOM: the region had no slot for the next hit. For ``promotion_wait_s`` at most.
    - WAITING_FOR_SHARE: loads fill the shares of the region of the tiers with its hits. For ``load_deadline_s`` at most,
      and only while a load of the tier may end.
    - ASKING: a tier owes an answer, or has given one that was not looked up yet, or the end of this step will find slots
      for its hits. Bounded by ``lookup_deadline_s`` and ``lookup_total_s``.
    - LOADING: all hits have slots. Blocks are being filled, by loads of this or another request or by the engine.
    - HELD: it waits for nothing. Its blocks are pinned until it loads them, or its loads go on unawaited.
    - IDLE: it waits for nothing and holds nothing. Loads that it began before ``stop`` go on, for any request.

    What it holds: in all states but IDLE and ENDED, the pins of ``held``. In all states, the blocks of its unreported
    loads (``loading`` and those given up) count against their tiers' shares.

    Attributes:
        came_at: time of its first lookup in the tiers.
        barred: bit mask of the tiers that it must not load from.
        asked_at: time of its latest lookup.
        step: number of the step of its latest lookup.
        owed: keys that a tier owes an answer for.
        was_owed: ``owed`` as it was in the round of lookups before.
        owing: bit mask of the tiers that owe answers.
        waited_s: seconds it has waited for owed answers; long gaps between lookups count only in part.
        silences: tier -> (number of its answers so far, seconds without a new one); polled tiers only.
        gave_up: bit mask of the tiers whose answers it no longer waits for.
        expired: keys that are absent because it gave up waiting; used to count each key once.
        refused: key -> bit mask of the tiers whose copy cannot be loaded.
        hits: key -> tier; keys to promote that have no slot yet.
        hit_tiers: bit mask of the tiers that have hits. May include too many tiers until the hits are scanned again.
        starved_since: since when hits have waited for room; None if none does.
        starved_for: the first hit that got no room when hits were last scanned.
        capped_until: until when hits wait for their tiers' shares of the region; infinite if none waits for a share.
        coming: keys whose blocks are being filled; each block notifies the request when that ends. A hit that waits for
            a slot may also be here, because another request loads it.
        loading: number of blocks that tiers are loading for this request.
        held: blocks pinned for this request until it loads them, finishes, or ``held_until`` passes.
        has_news: an answer may have changed since the latest lookup.
        must_ask_again: every owed key must be looked up again: the request gave up waiting, or a tier is polled.
    """

    context: ReqContext
    primary: CPUPrimaryTier
    options: TieringOptions
    came_at: float
    barred: int = 0
    req_id: str = field(init=False)
    state: State = State.IDLE
    asked_at: float = field(init=False)
    step: int = -1
    owed: set[OffloadKey] = field(default_factory=set)
    was_owed: set[OffloadKey] = field(default_factory=set)
    owing: int = 0
    waited_s: float = 0.0
    silences: dict[int, tuple[int, float]] = field(default_factory=dict)
    gave_up: int = 0
    expired: set[OffloadKey] = field(default_factory=set)
    refused: dict[OffloadKey, int] = field(default_factory=dict)
    hits: dict[OffloadKey, int] = field(default_factory=dict)
    hit_tiers: int = 0
    starved_since: float | None = None
    starved_for: OffloadKey | None = None
    capped_until: float = math.inf
    coming: set[OffloadKey] = field(default_factory=set)
    loading: int = 0
    held: dict[OffloadKey, Block] = field(default_factory=dict)
    held_until: float = 0.0
    has_news: bool = False
    must_ask_again: bool = False

    def __post_init__(self) -> None:
        self.req_id = self.context.req_id
        self.asked_at = self.came_at

    # -- lookups and answers -----------------------------------------------------------------------------------------

    def begin_step(self, step: int, now: float, polled: int, num_answers: Sequence[int]) -> None:
        """Count the time since the latest lookup, and give up on tiers that took too long to answer.

        Only a part of a long time counts: an engine does not look up waiting requests while its batch is full, and the
        answers that tiers gave before may be too old to use by then.

        Args:
            polled: bit mask of the tiers that do not report which keys they have answered.
            num_answers: per tier, its answers so far to lookups that it had left open.
        """
        seconds = min(now - self.asked_at, max(_STEP_S_MAX, self.options.lookup_deadline_s / 2))
        self.step = step
        self.asked_at = now
        if self.owing & polled:
            self.has_news = self.must_ask_again = True
        if not self.owed:
            self.waited_s = 0.0
            self.silences.clear()
            return
        self.waited_s += seconds
        gave_up = EVERY_TIER if self.waited_s >= self.options.lookup_total_s else 0
        for index, count in enumerate(num_answers):
            if not self.owing & polled & 1 << index:
                continue
            before, silent_s = self.silences.get(index, (count, 0.0))
            silent_s = silent_s + seconds if before == count else 0.0
            self.silences[index] = count, silent_s
            if silent_s >= self.options.lookup_deadline_s:
                gave_up |= 1 << index
        if gave_up & ~self.gave_up:
            self.gave_up |= gave_up
            self.has_news = self.must_ask_again = True

    def begin_round(self) -> None:
        """Begin a round of lookups. Owed keys that tiers may have answered are looked up again."""
        self.has_news = False
        if self.must_ask_again:
            self.must_ask_again = False
            self.was_owed, self.owed = self.owed, set()
            self.owing = 0
        self._settle()

    def owe(self, key: OffloadKey, tiers: int) -> None:
        """Wait for the answers that the tiers of a bit mask owe for the key."""
        self.owed.add(key)
        self.owing |= tiers
        if not self.hits and self.state is not State.ASKING:
            self._enter(State.ASKING)

    def take_answers(self, keys: AbstractSet[OffloadKey]) -> None:
        """Note that a tier has answers for these keys; the next lookups get them."""
        self.owed -= keys
        self.has_news = True

    def expire(self, key: OffloadKey) -> bool:
        """Count the key as absent because the wait for its answer took too long. False if it was counted before."""
        is_new = key not in self.expired
        self.expired.add(key)
        return is_new

    def hit(self, key: OffloadKey, tier: int) -> None:
        """Load the key from the tier as soon as there is a slot; the end of the step looks for one."""
        if not self.hits and self.state is not State.ASKING:
            self._enter(State.ASKING)
        self.owed.discard(key)  # owed if the key was looked up twice in this round and the answer came in between
        self.hits[key] = tier
        self.hit_tiers |= 1 << tier

    def refuse(self, key: OffloadKey, tiers: int) -> None:
        """Never load the key from the tiers of a bit mask."""
        self.refused[key] = self.refused.get(key, 0) | tiers

    # -- slots for hits ----------------------------------------------------------------------------------------------

    def choose_hits(self, shares: list[int], room: int, now: float) -> list[OffloadKey]:
        """Return the hits to load now, in order. Other hits wait for their tiers' shares.

        Stops at one hit more than the region has room for: that hit waits for room. Drops hits that are in the region,
        which another request has loaded or is loading: the next lookup finds their blocks.

        Args:
            shares: per tier, how many blocks of it may be loaded now; changed.
            room: number of slots that may be filled now.
        """
        wanted: list[OffloadKey] = []
        # Hundreds of hits in each of hundreds of requests are too many to scan in every step without a chance to load.
        if any(free and self.hit_tiers >> tier & 1 for tier, free in enumerate(shares)):
            find = self.primary.find
            missed = self.starved_for  # a scan might pass many hits that wait for a share before it reaches this one
            if not room and missed in self.hits and shares[self.hits[missed]] and find(missed) is None:
                return [missed]
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
            if len(wanted) > room:
                return wanted  # other hits are checked against the shares once the region has room
        if len(wanted) == len(self.hits):
            self.capped_until = math.inf
        elif self.capped_until == math.inf:
            self.capped_until = now + self.options.load_deadline_s
        return wanted

    def take_slots(self, blocks: Iterable[Block], missed: OffloadKey | None, now: float) -> dict[int, list[Block]]:
        """Take the blocks that got slots out of the hits. Returns them by tier, to be loaded.

        Args:
            missed: the first hit that the region has no room for; None if there is none.
        """
        by_tier: dict[int, list[Block]] = {}
        for block in blocks:
            by_tier.setdefault(self.hits.pop(block.key), []).append(block)
            self.loading += 1
        if missed is None:
            self.starved_since = None
        else:
            self.starved_for = missed
            self.starved_since = now if self.starved_since is None else self.starved_since
        return by_tier

    def miss_hits(self, tiers: int) -> int:
        """Count the hits in the tiers of a bit mask as misses. Returns how many of them nobody else loads."""
        missed = [key for key, tier in self.hits.items() if tiers >> tier & 1]
        count = 0
        for key in missed:
            if self.primary.find(key) is None:  # otherwise another request loads or has loaded it
                self.refuse(key, tiers)
                count += 1
        self._drop_hits(missed)
        self.hit_tiers &= ~tiers
        return count

    def _drop_hits(self, keys: Iterable[OffloadKey]) -> None:
        for key in list(keys):
            del self.hits[key]
        if not self.hits:
            self.hit_tiers = 0
            self.starved_since, self.capped_until = None, math.inf
        self.has_news = True

    # -- blocks that are being filled --------------------------------------------------------------------------------

    def await_block(self, block: Block) -> None:
        """Wait until the block is no longer being filled."""
        self.owed.discard(block.key)
        if block.key not in self.coming:
            self.coming.add(block.key)
            block.add_waiter(self)
            if self.state in (State.IDLE, State.HELD):
                self._enter(State.LOADING)

    def filling_ended(self, key: OffloadKey) -> None:
        """Note that the key's block is no longer being filled."""
        self.coming.discard(key)
        self.has_news = True
        if not self.coming and self.state is State.LOADING:
            self._settle()

    def skip_block(self) -> None:
        """Do not wait for a block of a load that begins, because another load of it failed: look it up again."""
        self.has_news = True

    def load_ended(self, num_blocks: int, ready: Iterable[Block], now: float) -> None:
        """Note that a load of this request was reported or given up. Hold its ready blocks, unless the wait is over."""
        self.loading -= num_blocks
        if self.state not in (State.IDLE, State.ENDED):
            self.hold(ready)
            self.keep_held(self.options.promotion_hold_s, now)

    # -- held blocks -------------------------------------------------------------------------------------------------

    def keep_held(self, seconds: float, now: float) -> None:
        """Hold blocks for so long from now. Blocks are held longer while there are hits or running loads."""
        self.held_until = max(self.held_until, now + seconds)

    def hold(self, blocks: Iterable[Block]) -> None:
        """Pin blocks that are ready, so that the request need not wait for them again while it waits for others."""
        for block in blocks:
            if block.state is BlockState.READY and block.key not in self.held:
                self.primary.pin(block)
                self.held[block.key] = block
        self._settle()

    def let_go(self) -> None:
        """Unpin all held blocks."""
        for block in reversed(self.held.values()):  # so that a prefix's first blocks are evicted last
            self.primary.unpin(block)
        self.held = {}
        self._settle()

    def end_step(self, now: float) -> bool:
        """Let go of the held blocks when their time is over. Returns whether later steps must serve the request."""
        is_served = bool(self.hits or self.loading or (self.held and now < self.held_until))
        if is_served:
            self._settle()
        else:
            self.let_go()
        return is_served

    # -- ends --------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for nothing and hold nothing; a later wait starts from zero. Loads go on, and serve any request."""
        self._drop_hits(self.hits)
        self.owed.clear()
        self.was_owed.clear()
        self.owing = 0
        self.waited_s = 0.0
        self.silences.clear()
        self.gave_up = 0
        self.expired.clear()
        self.coming.clear()
        self.let_go()
        if self.state is not State.IDLE:  # its loads go on
            self._enter(State.IDLE)

    def end(self) -> None:
        """End a request that was stopped. Only its running loads may still report to it."""
        assert self.state is State.IDLE
        self._enter(State.ENDED)

    # -- state -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Enter the state that the fields call for, in the order of the class's docstring."""
        if self.hits:
            if self.starved_since is not None:
                state = State.WAITING_FOR_ROOM
            else:
                state = State.ASKING if self.capped_until == math.inf else State.WAITING_FOR_SHARE
        elif self.owed:
            state = State.ASKING
        elif self.coming:
            state = State.LOADING
        else:
            state = State.HELD if self.held or self.loading else State.IDLE
        if state is not self.state:
            self._enter(state)

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.req_id!r}: {self.state.name} -> {state.name}"
        self.state = state
