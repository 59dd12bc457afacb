"""How a job's blocks are put in order and cut into batches: its first blocks are to be done first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter, methodcaller

from kvtiers.tiers.blocks.keys import GROUP_INDEX_BYTES, OffloadKey

Pair = tuple[OffloadKey, int]  # a key and its slot


def side_by_side(pairs: list[Pair]) -> list[Pair]:
    """Blocks of several KV groups, each in its order, with those of one part of the prompt together.

    Engines name one group after the other; a prefix is of use where the blocks of all groups are there.
    """
    if not pairs or all(map(methodcaller("endswith", pairs[0][0][-GROUP_INDEX_BYTES:]), map(itemgetter(0), pairs))):
        return pairs  # one group, as of most models
    groups: dict[bytes, list[Pair]] = {key[-GROUP_INDEX_BYTES:]: [] for key, _ in pairs}
    for pair in pairs:
        groups[pair[0][-GROUP_INDEX_BYTES:]].append(pair)
    placed = [((place + 1) / len(group), pair) for group in groups.values() for place, pair in enumerate(group)]
    return [pair for _, pair in sorted(placed, key=itemgetter(0))]


def deal(pairs: Sequence[Pair], size: int, num_threads: int) -> Iterator[Sequence[Pair]]:
    """Batches of at most ``size``, dealt out so that threads advance side by side from the first pair on.

    A prefix is of use up to its first gap. Where a job ends halfway (a deadline, a full disk, an engine that dies), its
    first blocks are done this way, and not the first ones of each batch.
    """
    for start in range(0, len(pairs), size * num_threads):
        hand = pairs[start : start + size * num_threads]
        num_batches = -(-len(hand) // size)
        yield from (hand[i::num_batches] for i in range(num_batches))
