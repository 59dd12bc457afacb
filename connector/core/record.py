"""Record: the latest events of blocks, and why requests did not load more blocks. ``kvtiers explain`` shows it.

Memory is bounded: the latest blocks, as hashes of their keys, and the requests that have not ended.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ...tiers.blocks.keys import OffloadKey
from ...tiers.metrics import Metrics
from ...tiers.plain_logs import get_logger
from .reasons import RequestRecord, meaning, why

logger = get_logger(__name__)

BLOCKS_MAX = 32_768  # blocks in each of two generations, about 5 MB in total
REQUESTS_MAX = 8192  # unfinished requests; older requests are not explained
REASONS_MAX = 128  # limit of the reasons that are counted, because third-party stores may name any errors
BLOCK_DIGITS_BYTES = 8  # digits of a block's hash in a request's record
UNUSED_BYTES = 10 << 30  # bytes stored to a tier without any load before a warning
UNUSED_S = 3600.0  # shortest time without a load before a warning, and between two warnings
LOOK_S = 60.0  # pause between two checks by ``look_at_use``


class Fate(NamedTuple):
    """The latest event of a block."""

    reason: str
    tier: str
    at: float
    facts: Mapping[str, Any]


class _Fates:
    """Maps the latest keys to their fates. When a generation is full, the generation before is forgotten."""

    def __init__(self) -> None:
        self._new: dict[int, Fate] = {}
        self._old: dict[int, Fate] = {}

    def get(self, key: OffloadKey) -> Fate | None:
        hashed = hash(key)
        return self._new.get(hashed) or self._old.get(hashed)

    def put(self, keys: Iterable[OffloadKey], fate: Fate) -> None:
        self._new.update(dict.fromkeys(map(hash, keys), fate))
        if len(self._new) > BLOCKS_MAX:
            self._old, self._new = self._new, {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)


@dataclass(slots=True)
class _Request:
    """A request that has not ended. All fields but the last four are those of RequestRecord.

    Attributes:
        promoted: tier -> number of blocks that it loaded for the request.
        notes: hash of a key -> why the block is absent for this request only.
        missed: the first block that the last lookups did not find.
        miss: why the lookups did not find it.
    """

    tokens: int | None = None
    engine_tokens: int | None = None
    loaded_tokens: int | None = None
    block_tokens: int | None = None
    loaded: int = 0
    computed: int = 0
    promoted: Counter[str] = field(default_factory=Counter)
    notes: dict[int, Fate] = field(default_factory=dict)
    missed: OffloadKey | None = None
    miss: Fate | None = None


@dataclass(slots=True)
class _Use:
    """A tier's total bytes at its latest load, or at the first check."""

    stored: float
    loaded: float
    since: float
    warned_at: float = float("-inf")


class Record:
    """Records events of blocks, and how many blocks each request loaded. Scheduler thread only.

    Args:
        metrics: counts the requests by reason.
        clock: Unix seconds.

    Attributes:
        write: called with a line for each request that ended; must not block. None: no lines are written.
        expects_loads: whether a tier that is stored to and never loaded from is worth a warning.
        is_alone: the region has no tiers behind it, so blocks that leave it are lost.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self.write: Callable[[str], None] | None = None
        self.expects_loads = True
        self.is_alone = True
        self._metrics = metrics
        self._clock = clock
        self._fates = _Fates()
        self._late = _Fates()  # tiers may report these events after a request missed a block and stored it again
        self._ended: dict[str, dict[str, list[OffloadKey]]] = {}  # tier -> reason -> blocks, since the last step
        self._nearest: dict[str, dict[str, str]] = {}  # tier -> its nearest namespace
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._reasons: Counter[str] = Counter()  # reasons of requests, since the last load from any tier
        self._counted: set[str] = set()
        self._uses: dict[str, _Use] = {}
        self._look_at = 0.0

    # -- blocks ------------------------------------------------------------------------------------------------------

    def blocks(self, reason: str, keys: Collection[OffloadKey], tier: str = "", **facts: Any) -> None:
        """Note an event of blocks, for all requests that will miss them."""
        if keys:
            fate = Fate(reason, tier, self._clock(), facts)
            self._fates.put(keys, fate)
            if reason == "other_namespace" or reason.startswith("removed:"):
                self._late.put(keys, fate)

    def ended(self, tier: str, reason: str, keys: Collection[OffloadKey]) -> None:
        """Note how a tier's job ended for these blocks. ``take`` records all blocks of a step at once."""
        if keys:
            self._ended.setdefault(tier, {}).setdefault(reason, []).extend(keys)

    def left_region(self, reason: str, keys: Collection[OffloadKey]) -> None:
        """Note that blocks have left the region. A known fate is kept, because it says more."""
        self.blocks(reason, [key for key in keys if self._fates.get(key) is None])

    def take(
        self, tier: str, reasons: Iterable[tuple[str, Collection[OffloadKey]]], nearest: dict[str, str] | None
    ) -> None:
        """Note ``take_reasons`` and ``nearest`` of a tier (see ``SecondaryTierManager``)."""
        for outcome, blocks in self._ended.pop(tier, {}).items():
            self.blocks(outcome, blocks, tier)
        for reason, keys in reasons:
            self.blocks(reason, keys, tier)
        if nearest is not None:
            self._nearest.setdefault(tier, nearest)

    # -- requests ----------------------------------------------------------------------------------------------------

    def note(self, req_id: str, reason: str, keys: Collection[OffloadKey], tier: str = "", **facts: Any) -> None:
        """Note why blocks are absent for this request only. Its next lookups miss them."""
        self._request(req_id).notes.update(dict.fromkeys(map(hash, keys), Fate(reason, tier, self._clock(), facts)))

    def is_new_miss(self, req_id: str, key: OffloadKey) -> bool:
        """Whether the last call of ``missed`` had another key: engines repeat the lookups of a waiting request."""
        request = self._requests.get(req_id)
        return request is None or request.missed != key

    def missed(self, req_id: str, key: OffloadKey, reason: str = "", tier: str = "", **facts: float) -> None:
        """Note that a block is absent for a request, and that the request's lookups end there.

        Args:
            reason: why tiers were not asked or did not answer; "": the tiers were asked and lack the block.
        """
        request = self._request(req_id)
        now = self._clock()
        request.missed = key
        fate = request.notes.get(hash(key)) or (Fate(reason, tier, now, facts) if reason else self._fates.get(key))
        if fate is None:
            fate = Fate("not_stored", "", 0.0, {})
        elif fate.reason == "stored":
            fate = fate._replace(reason="removed:elsewhere")
        request.miss = fate

    def ignores_tiers(self, req_id: str, reason: str) -> None:
        """Note that the engine asks no tier for this request, only the region."""
        self._request(req_id).miss = Fate(reason, "", 0.0, {})

    def promoted(self, req_id: str, tier: str, num_blocks: int) -> None:
        """Note that a tier has loaded blocks into the region for a request."""
        if num_blocks:
            self._request(req_id).promoted[tier] += num_blocks

    def loads(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """Note that the engine loads blocks from the region."""
        request = self._request(req_id)
        request.loaded += len(keys)
        if request.missed is not None and request.missed in keys:  # the block came after all
            request.missed = request.miss = None

    def computed(self, req_id: str, num_blocks: int) -> None:
        """Note that the engine stores new blocks of a request."""
        request = self._requests.get(req_id)
        if request is not None:
            request.computed += num_blocks

    def prompt(self, req_id: str, *, tokens: int, engine_tokens: int, loaded_tokens: int, block_tokens: int) -> None:
        """Note the engine's numbers for a prompt after its lookups; for the fields see ``RequestRecord``."""
        request = self._request(req_id)
        request.tokens, request.engine_tokens = tokens, engine_tokens
        request.loaded_tokens, request.block_tokens = loaded_tokens, block_tokens

    def end(self, req_id: str) -> None:
        """Count a request that has ended, and write its line."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        reason, tier, at, facts = self._reason_of(request)
        counted = reason if reason in self._counted or len(self._counted) < REASONS_MAX else "other"
        self._counted.add(counted)
        self._reasons[counted] += 1
        self._metrics.inc("kvtiers_requests_total", counted)
        if self.write is None:
            return
        now = self._clock()
        found = {place: min(count, request.loaded) for place, count in request.promoted.items()}
        if (in_region := request.loaded - sum(found.values())) > 0:
            found = {"region": in_region, **found}
        record = RequestRecord(
            time=round(now, 3),
            request=req_id,
            tokens=request.tokens,
            engine_tokens=request.engine_tokens,
            loaded_tokens=request.loaded_tokens,
            block_tokens=request.block_tokens,
            asked=request.loaded + (request.missed is not None),
            found=found,
            loaded=request.loaded,
            computed=request.computed,
            reason=reason,
            tier=tier,
            block="" if request.missed is None else request.missed[:BLOCK_DIGITS_BYTES].hex(),
            facts={**facts, "ago": _ago(now - at)} if at else dict(facts),
        )
        self.write(json.dumps(asdict(record), default=str))

    def _reason_of(self, request: _Request) -> Fate:
        if request.miss is None:
            asked = request.loaded or request.promoted
            if asked:
                return Fate("found" if request.loaded else "unused", "", 0.0, {})
            if request.tokens is None or request.block_tokens is None:
                return Fate("unused", "", 0.0, {})
            if request.engine_tokens:
                return Fate("engine", "", 0.0, {})
            short = request.tokens <= request.block_tokens
            return Fate("too_short" if short else "unused", "", 0.0, {"block_tokens": request.block_tokens})
        fate = request.miss
        if fate.reason in ("not_stored", "removed:elsewhere") and request.missed is not None:
            late = self._late.get(request.missed)
            if late is not None and late.at >= fate.at:
                fate = late
        if fate.reason == "other_namespace":
            fate = fate._replace(facts=self._nearest.get(fate.tier, {}))
        return fate

    def _request(self, req_id: str) -> _Request:
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = _Request()
            if len(self._requests) > REQUESTS_MAX:
                self._requests.popitem(last=False)
        return request

    # -- tiers that are never loaded from ----------------------------------------------------------------------------

    def look_at_use(self, tiers: Iterable[str]) -> None:
        """Warn of a tier that stores blocks and never loads any. Checks once a minute; other calls do nothing.

        Args:
            tiers: names of the tiers that may be loaded from.
        """
        now = self._clock()
        if 0 <= self._look_at - now <= LOOK_S:  # even if the clock was set back, checks must go on
            return
        self._look_at = now + LOOK_S
        for tier in tiers:
            stored, loaded = (self._metrics.total("kvtiers_bytes_total", (tier, op)) or 0.0 for op in ("store", "load"))
            use = self._uses.get(tier)
            if use is None or loaded != use.loaded:
                use = self._uses[tier] = _Use(stored, loaded, now)
                if loaded:
                    self._reasons.clear()
            unused = stored - use.stored
            self._metrics.set("kvtiers_stored_since_load_bytes", tier, value=unused)
            is_due = unused >= UNUSED_BYTES and now - use.since >= UNUSED_S and now - use.warned_at >= UNUSED_S
            if is_due and self.expects_loads:
                use.warned_at = now
                self._warn_of_use(tier, unused, now - use.since)

    def _warn_of_use(self, tier: str, unused: float, seconds: float) -> None:
        likely, told = self._reasons.most_common(1), "no request has asked for blocks"
        if likely:
            ((reason, count),) = likely
            advice = meaning(reason).advice
            told = f"of {self._reasons.total():,} requests, {count:,} say: {why(reason, tier)}"
            told += f"; {advice}" if advice else ""
        logger.warning(
            "tier %s: stored %.1f GB in %s, loaded 0. The likeliest reason: %s", tier, unused / 1e9, _ago(seconds), told
        )


def _ago(seconds: float) -> str:
    """A duration in words."""
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
