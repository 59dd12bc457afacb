"""Finds tiers that keep their blocks in the same location, or inside another tier's location.

This finds mistakes in copied sections. Links are not followed. Two names, or two protocols, of the same server are not
recognized as the same location.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import permutations

from ..stores.fsspec_driver import LOCAL
from ..stores.s3.options import without_bucket
from .tier_options import (
    AnyTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
)


@dataclass(frozen=True, slots=True)
class TierPlace:
    """The location of a tier's blocks.

    Attributes:
        name: the config field that gives the location.
        storage: identifies the storage; only paths in the same storage can be compared.
        path: the location in the storage, without a trailing slash.
    """

    name: str
    storage: object = field(repr=False)  # not shown: holds a driver's options, which may be secret
    path: str

    def is_same(self, other: TierPlace) -> bool:
        """Whether both locations are the same."""
        return self.storage == other.storage and self.path == other.path

    def is_inside(self, other: TierPlace) -> bool:
        """Whether this location is inside the other location."""
        return self.storage == other.storage and self.path.startswith(f"{other.path}/")


def place_of(tier: AnyTierConfig) -> TierPlace | None:
    """Return the location of a tier's blocks; None for memory tiers and external tiers."""
    if isinstance(tier, FsTierConfig | NfsTierConfig):
        return TierPlace("root_dir", "files", _spelled(tier.root_dir))
    if isinstance(tier, S3TierConfig):
        endpoint, _ = without_bucket(tier.endpoint_url or _endpoint_of_environment(), tier.bucket)
        path = "/".join(filter(None, (tier.bucket, tier.prefix.strip("/"))))
        return TierPlace("prefix" if tier.prefix else "bucket", ("s3", endpoint), path)
    if isinstance(tier, FsspecTierConfig):
        protocol, _, path = tier.url.rpartition("::")[2].partition("://")
        if protocol in LOCAL:
            return TierPlace("url", "files", _spelled(path))
        return TierPlace("url", (protocol, tier.storage_options), path.strip("/"))
    if isinstance(tier, StoreTierConfig):  # custom options are opaque, so equal options count as the same location
        return TierPlace("options", ("store", tier.module_path, tier.options), "")
    return None


def _endpoint_of_environment() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def shared_places(tiers: dict[int, AnyTierConfig]) -> list[tuple[str, str]]:
    """Yield an error (field, message) for each tier in the same location as another tier, or inside it.

    The outer tier's collector would count the inner tier's blocks as its own and remove them.
    """
    found = []
    places = {index: place for index, tier in tiers.items() if (place := place_of(tier)) is not None}
    for (index, place), (other, other_place) in permutations(places.items(), 2):
        if index > other and place.is_same(other_place):
            found.append((f"tiers[{index}].{place.name}", f"is the place of tiers[{other}].{other_place.name}, too"))
        elif place.is_inside(other_place):
            found.append((f"tiers[{index}].{place.name}", f"is inside tiers[{other}].{other_place.name}"))
    return [(field, f"{message}; each tier needs its own location, not inside another's") for field, message in found]


def _spelled(path: str) -> str:
    # abspath keeps a leading "//"; "/" becomes "", so that every absolute path starts with it plus "/".
    return f"/{os.path.abspath(path).strip('/')}".rstrip("/")
