"""RankBlocks: the scheduler's knowledge about blocks of which every rank keeps its own part."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ...tiers.blocks.keys import OffloadKey

KEYS_MAX = 131_072  # keys of each kind; about 20 MB
#: After this time, the scheduler's tier is asked again whether a block that all ranks had is there, and a block that a
#: rank lacked may be loaded again. A tier's own answers are valid for as long.
BELIEVED_S = 60.0
#: A block's use is noted at most once in this time: each step's uses go to all ranks.
USED_S = 60.0

_T = TypeVar("_T")


class RankBlocks:
    """Tracks which blocks all ranks have, which are being stored, and which a rank lacks. Scheduler thread only.

    A block counts as stored when all ranks have stored it. An entry may be wrong: storage may have lost the block. A
    rank then fails to load its part and reports this. The block counts as doubtful, and is stored again when offered.

    A block counts as being stored until all ranks have reported it, which may be never if a rank's storage hangs.

    Args:
        ranks: number of ranks.
        news_s: time in which a rank reports a store, unless its storage hangs. An idle engine waits at most this long.
        clock: seconds, monotonic.
    """

    def __init__(self, ranks: int, news_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = (1 << ranks) - 1
        self._news_s = news_s
        self._clock = clock
        self._present: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> when the tier is asked again
        self._doubted: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> when it may be loaded again
        self._used: OrderedDict[OffloadKey, float] = OrderedDict()  # key -> until when another use does not count
        self._uses: list[OffloadKey] = []
        self._on_the_way: OrderedDict[OffloadKey, int] = OrderedDict()  # -> mask of ranks that have not stored it
        self._news_at = clock()

    @property
    def awaits_news(self) -> bool:
        """Whether ranks may still report the end of a store."""
        return bool(self._on_the_way) and self._clock() < self._news_at + self._news_s

    def is_absent(self, key: OffloadKey) -> bool:
        """Whether the block cannot be loaded now, regardless of the scheduler's own tier."""
        until = self._doubted.get(key)
        if until is not None and until <= self._clock():
            del self._doubted[key]
            until = None
        return until is not None or key in self._on_the_way

    def is_present(self, key: OffloadKey) -> bool:
        """Whether all ranks are known to have the block."""
        return self._present.get(key, -math.inf) > self._clock()

    def is_stale(self, key: OffloadKey) -> bool:
        """Whether all ranks had the block, and it is time to ask again."""
        return key in self._present and not self.is_present(key)

    def answered(self, key: OffloadKey, *, present: bool) -> None:
        """Note the answer of the scheduler's own tier."""
        if present:
            _note(self._present, key, self._clock() + BELIEVED_S)
        else:
            self._present.pop(key, None)

    def note_uses(self, keys: Iterable[OffloadKey]) -> None:
        """Note that a request has these blocks, loaded or computed."""
        now = self._clock()
        for key in keys:
            if key in self._present and self._used.get(key, -math.inf) <= now:
                _note(self._used, key, now + USED_S)
                self._uses.append(key)

    def take_uses(self) -> list[OffloadKey]:
        """Return the stored blocks that were used since the last call."""
        uses, self._uses = self._uses, []
        return uses

    def to_store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that must be stored, and note that they are being stored."""
        wanted = [key for key in keys if key not in self._present and key not in self._on_the_way]
        for key in reversed(keys):  # a prefix is useless without its beginning, so the beginning is forgotten last
            if key in self._present:
                self._present.move_to_end(key)
        if wanted:
            self._news_at = self._clock()
        for key in wanted:
            _note(self._on_the_way, key, self._all)
        return wanted

    def note(self, stored: Mapping[OffloadKey, int], lost: Collection[OffloadKey]) -> None:
        """Note the ranks' reports.

        Args:
            stored: key -> bit mask of the ranks that have stored it since their last report. A report may come late,
                when the block is being stored once more; the rank has the block nevertheless.
            lost: keys that a rank could not load or store, or that were removed there.
        """
        self._news_at = self._clock()
        for key in lost:
            self._on_the_way.pop(key, None)
            self._present.pop(key, None)
            _note(self._doubted, key, self._clock() + BELIEVED_S)
        for key, ranks in stored.items():
            left = self._on_the_way.get(key)
            if left is None:  # another rank could not store the block
                continue
            if left & ~ranks:
                self._on_the_way[key] = left & ~ranks
                continue
            del self._on_the_way[key]
            self._doubted.pop(key, None)
            _note(self._present, key, self._clock() + BELIEVED_S)


def _note(known: OrderedDict[OffloadKey, _T], key: OffloadKey, value: _T) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > KEYS_MAX:
        known.popitem(last=False)
