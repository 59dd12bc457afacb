"""Inventory: totals of a root's blocks, summed while listing. Memory grows with namespaces and groups, not blocks."""

from __future__ import annotations

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..blocks.file_mapper import NAMESPACE, BlockName, parse_block_name
from ..store import KeyInfo, Store

_FOLDER = re.compile(rf"({NAMESPACE})_r[0-9]+")

#: Upper bounds of the age classes, in seconds.
AGES_S = {"1h": 3600.0, "1d": 86_400.0, "7d": 7 * 86_400.0, "30d": 30 * 86_400.0, "older": float("inf")}
UNKNOWN_AGE = "unknown"
_AGE_NAMES, _AGE_BOUNDS_S = tuple(AGES_S), tuple(AGES_S.values())[:-1]


def block_beginnings(folders: Iterable[str]) -> list[str]:
    """Prefixes of the names of all blocks, one per namespace found in a root's folders.

    Only blocks have these prefixes: ``config.json`` is in the folder named after the namespace alone.
    """
    return sorted({f"{found[1]}_r" for folder in folders if (found := _FOLDER.fullmatch(folder))})


@dataclass(slots=True)
class Share:
    """Number of blocks, and their bytes."""

    blocks: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count one block."""
        self.blocks += 1
        self.bytes += size


@dataclass(slots=True)
class Inventory:
    """Totals of a listing.

    Attributes:
        blocks: by namespace, rank and group.
        ages: by time since the last use or, if the store does not record uses, since the write. Unknown if the server
            does not report times.
        other_blobs, other_bytes: blobs that are not blocks: ``config.json``, records, foreign files.
    """

    blocks: defaultdict[tuple[str, int, int], Share] = field(default_factory=lambda: defaultdict(Share))
    ages: dict[str, Share] = field(default_factory=lambda: {name: Share() for name in (*AGES_S, UNKNOWN_AGE)})
    other_blobs: int = 0
    other_bytes: int = 0

    def add(self, info: KeyInfo, now: float) -> None:
        """Count one blob. ``now``: Unix seconds."""
        name = parse_block_name(info.key)
        if name is None:
            self.other_blobs += 1
            self.other_bytes += info.size
            return
        self.blocks[name[:3]].add(info.size)
        if info.mtime == 0.0:  # the driver does not report the time
            self.ages[UNKNOWN_AGE].add(info.size)
            return
        self.ages[_AGE_NAMES[bisect(_AGE_BOUNDS_S, now - info.mtime)]].add(info.size)

    @property
    def total(self) -> Share:
        """All blocks."""
        shares = self.blocks.values()
        return Share(sum(share.blocks for share in shares), sum(share.bytes for share in shares))


def list_blocks(store: Store, prefix: str = "") -> Iterator[tuple[KeyInfo, BlockName]]:
    """The blocks below a prefix."""
    for info in store.keys(prefix):
        name = parse_block_name(info.key)
        if name is not None:
            yield info, name


def unreadable_count(store: Store) -> int:
    """Number of namespaces' folders and files that a store's listings skipped because they cannot be read."""
    skipped: Iterable[str] = getattr(store, "skipped", ())
    return sum(_FOLDER.fullmatch(name.partition("/")[0]) is not None for name in skipped)
