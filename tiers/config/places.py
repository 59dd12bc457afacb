"""Where a tier keeps its blocks, so that two tiers in one place, or one inside another, are found."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from itertools import permutations

from kvtiers.tiers.config.tier_options import (
    AnyTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
)

RESOLVE_S_MAX = 2.0  # links of a root are followed for so long: a mount that hangs keeps its caller


@dataclass(frozen=True, slots=True)
class TierPlace:
    """Where a tier keeps its blocks.

    Attributes:
        name: of the field that says so.
        storage: paths of one storage can be compared.
        paths: in it, without a slash at the end: as it is spelled, and with links on the way followed where
            that does not hang.
    """

    name: str
    storage: object = field(repr=False)  # has a driver's options, and with them secrets
    paths: frozenset[str]

    def is_same(self, other: TierPlace) -> bool:
        """Whether both are one place."""
        return self.storage == other.storage and not self.paths.isdisjoint(other.paths)

    def is_inside(self, other: TierPlace) -> bool:
        """Whether it is below the other one."""
        return self.storage == other.storage and any(
            path.startswith(f"{above}/") for path in self.paths for above in other.paths
        )


def place_of(tier: AnyTierConfig) -> TierPlace | None:
    """Where a tier keeps its blocks; None for memory, and for whole tiers of other people."""
    if isinstance(tier, FsTierConfig):
        return TierPlace("root_dir", "files", frozenset((_spelled(tier.root_dir), _resolved(tier.root_dir))))
    if isinstance(tier, NfsTierConfig):
        return TierPlace("root_dir", "files", frozenset((_spelled(tier.root_dir),)))  # a mount may hang
    if isinstance(tier, S3TierConfig):
        storage = ("s3", tier.embedded, (tier.endpoint_url or "").rstrip("/"))
        path = "/".join(filter(None, (tier.bucket, tier.prefix)))
        return TierPlace("prefix" if tier.prefix else "bucket", storage, frozenset((path,)))
    if isinstance(tier, FsspecTierConfig):
        path = re.sub(r"^(file|local):(//)?", "", tier.url)  # as fsspec's driver of local files
        if "://" not in path and "::" not in path:
            return TierPlace("url", "files", frozenset((_spelled(path), _resolved(path))))
        return TierPlace("url", ("fsspec", tier.storage_options), frozenset((tier.url.rstrip("/"),)))
    if isinstance(tier, StoreTierConfig):  # nothing is known of its options: alike, they are one place
        return TierPlace("options", ("store", tier.module_path, tier.options), frozenset(("",)))
    return None


def shared_places(tiers: dict[int, AnyTierConfig]) -> list[tuple[str, str]]:
    """Places that are another tier's, or inside it: that one would count and remove their blocks as its own."""
    found = []
    places = {index: place for index, tier in tiers.items() if (place := place_of(tier)) is not None}
    for (index, place), (other, other_place) in permutations(places.items(), 2):
        if index > other and place.is_same(other_place):
            found.append((f"tiers[{index}].{place.name}", f"is the place of tiers[{other}].{other_place.name}, too"))
        elif place.is_inside(other_place):
            found.append((f"tiers[{index}].{place.name}", f"is inside tiers[{other}].{other_place.name}"))
    return [(field, f"{message}; write a place that is no other tier's, nor inside one") for field, message in found]


def _spelled(path: str) -> str:
    # abspath keeps a "//" in front, and of "/" nothing is to be left.
    return f"/{os.path.abspath(path).strip('/')}".rstrip("/")


def _resolved(path: str) -> str:
    """Links on the way are followed; a root is none itself. As it is spelled where a mount on the way hangs."""
    parent, name = os.path.split(_spelled(path))
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(os.path.realpath(parent)), name="kvtiers-resolve", daemon=True
    )
    thread.start()
    thread.join(RESOLVE_S_MAX)
    return _spelled(os.path.join(found[0] if found else parent, name))
