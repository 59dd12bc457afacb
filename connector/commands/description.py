"""Describes a deployment in words for ``kvtiers check``: the region, each tier, and the stored blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...tiers.config.deployment import DeploymentConfig
from ...tiers.config.mistakes import value_in_words
from ...tiers.config.tier_options import (
    BoundedTierConfig,
    ExternalTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    TierConfig,
    shown_place,
)
from ...tiers.config.values import human_bytes, show_duration
from .output import counted, human_age

#: Options that other lines show.
_SAID_OTHERWISE = {
    "type", "name", "root_dir", "url", "bucket", "prefix", "module_path", "n_read_threads", "n_write_threads",
    "children", "isolation", "job_deadline_s", "lookup_deadline_s", "encrypt", "keys_file", "keys_env", "read_only",
    "ttl",
}  # fmt: skip


def describe_deployment(path: Path, deployment: DeploymentConfig, blocks: list[dict[str, int]]) -> Iterator[str]:
    """The lines that the command prints.

    Args:
        blocks: per tier, the models with blocks in its storage, and the size of one block in bytes.
    """
    region = deployment.region
    yield f"An engine that uses {path} works like this:"
    yield ""
    yield (
        f"KV blocks pass through a CPU region of {human_bytes(region.size)}; when the region is full, "
        f"{region.eviction_policy.upper()} chooses the blocks to evict. A stored block has "
        f"{counted(deployment.blocks_per_chunk, 'engine block')}."
    )
    wait = show_duration(region.promotion_wait_s)
    yield f"A block found in a tier waits up to {wait} for room before it counts as a miss."
    yield ""
    if not deployment.tiers:
        return
    any_read_only = any(isinstance(tier, BoundedTierConfig) and tier.read_only for tier in deployment.tiers)
    written = "each of these tiers that is not read_only" if any_read_only else "all of these tiers"
    yield f"Every stored block goes to {written}; loads come from the first tier that has the block:"
    yield ""
    for index, (tier, sizes) in enumerate(zip(deployment.tiers, blocks, strict=True)):
        yield from _tier_in_words(f"tiers[{index}]", tier, sizes, region.size)
    yield ""


def _tier_in_words(
    place: str, tier: TierConfig | ExternalTierConfig, sizes: dict[str, int], region_bytes: int
) -> Iterator[str]:
    if isinstance(tier, ExternalTierConfig):
        yield f"{place} {tier.type}, from {tier.module_path or 'an entry point'}"
        return
    shown: dict[str, Any] = tier.model_dump()
    name = f" {tier.name}" if tier.name not in (None, tier.type) else ""
    where = "" if isinstance(tier, MemoryTierConfig) else f", {shown_place(tier)}"
    yield f"{place}{name}: {tier.type}{where}"
    runs_in = "the engine's process" if tier.isolation == "thread" else counted(tier.children, "process", "processes")
    yield (
        f"  moves blocks with {tier.n_read_threads} load + {tier.n_write_threads} store threads, in {runs_in} "
        f"(isolation {tier.isolation})"
    )
    yield (
        f"  gives up on a job after {show_duration(tier.job_deadline_s)}, and on unanswered lookups after "
        f"{show_duration(tier.lookup_deadline_s)}"
    )
    keys = f", keys from {tier.keys_file or f'the variable {tier.keys_env}'}" if tier.encrypt != "none" else ""
    yield f"  protects blocks with a checksum, encrypt {tier.encrypt}{keys}"
    if isinstance(tier, BoundedTierConfig):
        yield f"  {_bound_in_words(tier)}"
        shown.pop("max_bytes")
    schema = type(tier).model_json_schema()["properties"]
    # An option that all tiers have is shown if the file sets it.
    others = [
        f"{name} {value_in_words(schema[name], value)}"
        for name, value in shown.items()
        if name not in _SAID_OTHERWISE
        and value is not None
        and (name in tier.model_fields_set or name not in TierConfig.model_fields)
    ]
    if others:
        yield f"  other options: {', '.join(others)}"
    for model, size in sizes.items():
        room = f"the region has room for about {region_bytes // size:,}"
        yield f"  holds blocks of {model}, {human_bytes(size)} each: {room}"


def _bound_in_words(tier: BoundedTierConfig) -> str:
    if tier.read_only:
        return "only loads (read_only); the engines that write to its storage enforce the limits"
    notes_uses = isinstance(tier, FsTierConfig | NfsTierConfig)
    rules = []
    if tier.max_bytes is not None:
        unused = "least recently used" if notes_uses else "oldest"
        rules.append(
            f"all writers together store at most about {human_bytes(tier.max_bytes)}: shortly before, the {unused} "
            "blocks are removed"
        )
    if tier.ttl is not None:
        rules.append(f"blocks not {'used' if notes_uses else 'written'} for {human_age(tier.ttl)} are removed")
    return "; ".join(rules) or "nothing is ever removed; set max_bytes or ttl to bound it"
