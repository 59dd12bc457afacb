"""Seal kinds: how stored blocks were sealed, and which blocks a tier's configuration cannot load.

Tools check blocks without keys. So a block can be intact and still be a miss for every engine: no key file has its key
any more, or another version of kvtiers wrote it. A tool that says "all blocks are intact" must report such blocks as
well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from heapq import nsmallest
from itertools import islice

from ..blocks.file_mapper import parse_block_name
from ..blocks.keyring import show_key_id
from ..blocks.seal import TRAILER_BYTES, describe_trailer
from ..errors import StoreError
from ..store import Store, SupportsTail
from .inventory import block_beginnings

SAMPLE_BLOCKS = 16
SAMPLED_FROM_MAX = 2000  # blocks listed to choose a sample from; a check must not list a bucket of millions
OTHER, PLAIN = "other", "none"
_PROTECTIONS = {"aes_256_gcm": "aes-gcm"}


def seal_kind(trailer: bytes | bytearray | memoryview) -> str:
    """Return how a block was sealed: "none" (no key), "aes-gcm 1a2b3c4d" (protection and key ID) or "other".

    "other": the seal is damaged, or another version of kvtiers wrote it.
    """
    fields = describe_trailer(trailer)
    if fields is None:
        return OTHER
    if fields["authentication"] == "none":
        return PLAIN
    protection = _PROTECTIONS.get(fields["authentication"])
    return OTHER if protection is None else f"{protection} {show_key_id(fields['key_id'])}"


def sample_seals(store: Store) -> Counter[str]:
    """Count the kinds of seal of some blocks. Empty if the store cannot read only the end of a block.

    Each namespace gets an equal part of the sample. From a namespace, the blobs that are listed first are candidates,
    and the blocks with the smallest hashes are taken, which is an even choice.

    Raises:
        StoreError: the blocks cannot be listed.
    """
    kinds: Counter[str] = Counter()
    if not isinstance(store, SupportsTail):
        return kinds
    beginnings = block_beginnings(store.folders())[:SAMPLE_BLOCKS]
    for beginning in beginnings:
        names = (info.key for info in islice(store.keys(beginning), SAMPLED_FROM_MAX // len(beginnings)))
        blocks = ((block.digits, name) for name in names if (block := parse_block_name(name)) is not None)
        for _, name in nsmallest(SAMPLE_BLOCKS // len(beginnings), blocks):
            try:
                found = store.get_tail(name, TRAILER_BYTES)
            except StoreError:  # ``kvtiers verify`` counts unreadable blocks
                continue
            if found is not None and len(found[1]) == TRAILER_BYTES:
                kinds[seal_kind(found[1])] += 1
    return kinds


def count_misses(kinds: Mapping[str, int], protection: str, key_ids: Container[str] | None) -> dict[str, int]:
    """Count the blocks that no engine with this configuration can load, by reason.

    Args:
        kinds: kind of seal -> number of blocks.
        protection: the tier's ``encrypt``: "none" or "aes-gcm".
        key_ids: IDs of the tier's keys; None: unknown, so no key counts as missing.
    """
    misses: Counter[str] = Counter()
    for kind, count in kinds.items():
        how, _, key = kind.partition(" ")
        if kind == OTHER:
            misses["of another version or damaged"] += count
        elif how != protection:
            misses[f"with encrypt {how}, where this tier has {protection}"] += count
        elif key and key_ids is not None and key not in key_ids:
            misses[f"under key {key}, which this tier lacks"] += count
    return dict(misses)


def unknown_keys(kinds: Mapping[str, int], key_ids: Container[str] | None) -> dict[str, int]:
    """Number of blocks under each key that is not in ``key_ids``."""
    if key_ids is None:
        return {}
    found = ((kind.partition(" ")[2], count) for kind, count in kinds.items())
    return {key: count for key, count in found if key and key not in key_ids}
