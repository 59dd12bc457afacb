"""Inventory: totals of a root's blocks, summed while listing. Memory grows with namespaces and groups, not blocks."""

from __future__ import annotations

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..blocks.file_mapper import DIGEST_HEX_DIGITS, block_name
from ..blocks.keys import GROUP_INDEX_MAX, OffloadKey, make_offload_key
from ..store import KeyInfo, Store

#: Pattern of a namespace's name: a single folder, because a namespace in a subfolder belongs to another root.
NAMESPACE = rf"[^/]+_[0-9a-f]{{{DIGEST_HEX_DIGITS}}}"
_NAME = re.compile(rf"({NAMESPACE})_r([0-9]+)/([0-9a-f]{{3}})/([0-9a-f]{{2}})_g([0-9]+)/(\3\4[0-9a-f]{{0,123}})\.bin")
_FOLDER = re.compile(rf"({NAMESPACE})_r[0-9]+")

#: Upper bounds of the age classes, in seconds.
AGES_S = {"1h": 3600.0, "1d": 86_400.0, "7d": 7 * 86_400.0, "30d": 30 * 86_400.0, "older": float("inf")}
UNKNOWN_AGE = "unknown"
_AGE_NAMES, _AGE_BOUNDS_S = tuple(AGES_S), tuple(AGES_S.values())[:-1]


class BlockName(NamedTuple):
    """The parts of a block's name, as FileMapper writes it.

    Attributes:
        namespace: ``<model>_<digest12>``.
        digits: the block hash in hexadecimal.
    """

    namespace: str
    rank: int
    group: int
    digits: str

    @property
    def offload_key(self) -> OffloadKey:
        """The block's key. Raises ValueError if ``digits`` has an odd number of digits."""
        return make_offload_key(bytes.fromhex(self.digits), self.group)

    @property
    def path(self) -> str:
        """The complete name."""
        return block_name(f"{self.namespace}_r{self.rank}", self.offload_key)


def parse_block_name(key: str) -> BlockName | None:
    """Parse a block's name; None if the name is not a block's."""
    found = _NAME.fullmatch(key)
    if found is None:
        return None
    namespace, rank_digits, group_digits, digits = found.group(1, 2, 5, 6)
    rank, group = int(rank_digits), int(group_digits)
    if rank > GROUP_INDEX_MAX or group > GROUP_INDEX_MAX:  # a seal has 32 bits for each
        return None
    return BlockName(namespace, rank, group, digits)


def block_beginnings(folders: Iterable[str]) -> list[str]:
    """Prefixes of the names of all blocks, one per namespace found in a root's folders.

    Only blocks have these prefixes: ``config.json`` is in the folder named after the namespace alone.
    """
    return sorted({f"{found[1]}_r" for folder in folders if (found := _FOLDER.fullmatch(folder))})


@dataclass(slots=True)
class Share:
    """Number of blobs, and their bytes."""

    blobs: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count one blob."""
        self.blobs += 1
        self.bytes += size


@dataclass(slots=True)
class Inventory:
    """Totals of a listing.

    Attributes:
        blocks: by namespace, rank and group.
        ages: by time since the last use or, if the store does not record uses, since the write; unknown if the server
            does not tell.
        other: blobs that are not blocks: ``config.json``, records, foreign files.
    """

    blocks: defaultdict[tuple[str, int, int], Share] = field(default_factory=lambda: defaultdict(Share))
    ages: dict[str, Share] = field(default_factory=lambda: {name: Share() for name in (*AGES_S, UNKNOWN_AGE)})
    other: Share = field(default_factory=Share)

    def add(self, info: KeyInfo, now: float) -> None:
        """Count one blob. ``now``: Unix seconds."""
        name = parse_block_name(info.key)
        if name is None:
            self.other.add(info.size)
            return
        self.blocks[name[:3]].add(info.size)
        if info.mtime == 0.0:  # the driver does not tell
            self.ages[UNKNOWN_AGE].add(info.size)
            return
        self.ages[_AGE_NAMES[bisect(_AGE_BOUNDS_S, now - info.mtime)]].add(info.size)

    @property
    def total(self) -> Share:
        """All blocks."""
        shares = self.blocks.values()
        return Share(sum(share.blobs for share in shares), sum(share.bytes for share in shares))


def list_blocks(store: Store, prefix: str = "") -> Iterator[tuple[KeyInfo, BlockName]]:
    """The blocks below a prefix."""
    for info in store.keys(prefix):
        name = parse_block_name(info.key)
        if name is not None:
            yield info, name
