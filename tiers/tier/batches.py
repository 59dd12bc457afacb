"""Orders a job's blocks and cuts them into batches, so that its first blocks are moved first. No I/O, no state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter, methodcaller

from ..blocks.keys import GROUP_INDEX_BYTES, OffloadKey

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
