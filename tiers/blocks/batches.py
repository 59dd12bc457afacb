"""Orders a job's blocks and cuts them into batches, so that first blocks are moved first; holds batch results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter, methodcaller

from .keys import GROUP_INDEX_BYTES, OffloadKey

Pair = tuple[OffloadKey, int]  # a key and its slot


def side_by_side(pairs: list[Pair]) -> list[Pair]:
    """Interleave the blocks of several KV groups, so that blocks of the same part of the prompt are together.

    Each group keeps its order. Engines list group after group, but a prefix needs the blocks of all groups.
    """
    if not pairs or all(map(methodcaller("endswith", pairs[0][0][-GROUP_INDEX_BYTES:]), map(itemgetter(0), pairs))):
        return pairs  # a single group, as in most models
    groups: dict[bytes, list[Pair]] = {key[-GROUP_INDEX_BYTES:]: [] for key, _ in pairs}
    for pair in pairs:
        groups[pair[0][-GROUP_INDEX_BYTES:]].append(pair)
    placed = [((place + 1) / len(group), pair) for group in groups.values() for place, pair in enumerate(group)]
    return [pair for _, pair in sorted(placed, key=itemgetter(0))]


def deal(pairs: Sequence[Pair], size: int, num_threads: int) -> Iterator[Sequence[Pair]]:
    """Deal the pairs into batches of at most ``size``, so that threads advance side by side from the first pair on.

    A prefix is only useful up to its first gap. If a job ends early (a deadline, a full disk, an engine that dies), the
    job's first blocks are done this way, rather than the first blocks of each batch.
    """
    for start in range(0, len(pairs), size * num_threads):
        hand = pairs[start : start + size * num_threads]
        num_batches = -(-len(hand) // size)
        yield from (hand[i::num_batches] for i in range(num_batches))


@dataclass(slots=True)
class Batch:
    """The result of a task. A pool thread fills it, and the scheduler's thread books it."""

    succeeded: list[OffloadKey] = field(default_factory=list)
    found: list[OffloadKey] = field(default_factory=list)  # stores: keys in ``succeeded`` that were already stored
    gone: list[OffloadKey] = field(default_factory=list)  # loads: absent, or not the block it should be
    unreadable: list[OffloadKey] = field(default_factory=list)  # loads: failed, perhaps only this block
    bad: list[OffloadKey] = field(
        default_factory=list
    )  # loads: blocks in ``gone`` that are bad, so the next store must overwrite them
    bytes_moved: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    verify_failures: Counter[str] = field(default_factory=Counter)
    healed: int = 0
    perhaps_stored: int = 0  # failed blocks that may be stored: a retryable error may be a lost acknowledgement
    fault: str = ""  # the last error that tells something about the storage's health
    full: str = ""  # the last error of a storage without room

    def add(self, other: Batch) -> None:
        """Add the results of another batch to this one."""
        for name in BATCH_FIELDS:
            if theirs := getattr(other, name):  # most are empty
                setattr(self, name, theirs if isinstance(theirs, str) else getattr(self, name) + theirs)


BATCH_FIELDS = tuple(each.name for each in fields(Batch))
