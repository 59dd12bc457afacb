"""``kvtiers ls`` and ``kvtiers du``: list and sum up stored blocks."""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from ...tiers.blocks.file_mapper import BlockName
from ...tiers.builtin import key_ids
from ...tiers.capacity.written import used_bytes
from ...tiers.config.tier_options import BoundedTierConfig, TierConfig
from ...tiers.config.values import human_bytes
from ...tiers.errors import printable
from ...tiers.store import KeyInfo
from ...tiers.tools.inventory import UNKNOWN_AGE, Inventory, Share, list_blocks
from ...tiers.tools.namespaces import differences, differences_in_words
from ...tiers.tools.neighbors import namespaces_in
from ...tiers.tools.seal_kinds import count_misses, sample_seals
from .options import AsJson, Config, TierName
from .output import Ticker, cell, counted, note, say, show
from .places import Place, find_places, is_bare
from .results import Results, TierResult

YEAR_MAX = 9999  # latest year of ISO 8601

SortKey = Literal["name", "size", "age"]
#: Ascending, as ``ls`` shows them: names from a to z, the largest first, the most recently used first.
_ORDERS: dict[SortKey, Callable[[tuple[KeyInfo, BlockName]], Any]] = {
    "name": lambda block: block[0].key,
    "size": lambda block: (-block[0].size, block[0].key),
    "age": lambda block: (-block[0].mtime, block[0].key),
}


@dataclass(slots=True)
class BlockLine:
    """One line of ``ls --json``."""

    tier: str
    key: str
    bytes: int
    mtime: float
    rank: int
    group: int


@dataclass(kw_only=True)
class Listed(Share, TierResult):
    """The total of the listed blocks."""


def ls(
    config: Config,
    tier: TierName = None,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="List only names that start with this text.")] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="List at most this many blocks per tier.")
    ] = None,
    sort: Annotated[
        SortKey | None,
        typer.Option(
            metavar="ORDER",
            help="Sort each tier's blocks: name (a to z), size (largest first) or age (last used first). Sorting holds "
            "all blocks in memory, or --limit of them.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object on a line for each block, and one with the totals.")
    ] = False,
) -> None:
    """List the stored blocks: size, time of last use or write, tier, name. Totals go to standard error.

    Without --sort, any number of blocks is listed as a stream: memory does not grow.
    """
    results = Results[Listed]()
    for place in find_places(config, tier):
        total = Listed(tier=place.name, where=place.where)
        with results.of(place), place.open() as store:
            for info, name in _in_order(place, list_blocks(store, prefix), sort, limit):
                total.add(info.size)
                if as_json:
                    line = BlockLine(place.name, info.key, info.size, info.mtime, name.rank, name.group)
                    print(json.dumps(asdict(line)))
                else:
                    print(f"{info.size:>12} {utc(info.mtime)} {place.name} {printable(info.key)}")
            results.add(total)
            if not as_json:
                note(f"{place.name} at {place.where}: {counted(total.blocks)}, {human_bytes(total.bytes)}")
    results.end(as_json=as_json)


def _in_order(
    place: Place, blocks: Iterator[tuple[KeyInfo, BlockName]], sort: SortKey | None, limit: int | None
) -> Iterator[tuple[KeyInfo, BlockName]]:
    if sort is None:
        yield from itertools.islice(blocks, limit)
        return
    order = _ORDERS[sort]
    with Ticker(f"listing {place.name}", unit="blocks") as ticker:
        blocks = ticker.each(blocks)
        found = sorted(blocks, key=order) if limit is None else heapq.nsmallest(limit, blocks, key=order)
    yield from found


@dataclass(kw_only=True)
class GroupShare(Share):
    """The blocks of one group.

    Attributes:
        engine: the engine that stored them, such as "vllm"; "": the namespace's identity is missing.
    """

    namespace: str
    engine: str
    rank: int
    group: int


@dataclass(kw_only=True)
class Used(Share, TierResult):
    """The content of a tier's storage.

    Attributes:
        ages: by the time since the last use or write.
        other_blobs, other_bytes: number and size of blobs that are not blocks.
        used_bytes: stored bytes according to the collectors' records; None: no records.
        differing_fields: namespace -> its values of the fields in which namespaces of one model differ.
        sampled_seals: kinds of seal in a sample of the blocks.
        sampled_misses: blocks of the sample that engines with this configuration cannot load, by reason.
    """

    groups: list[GroupShare]
    ages: dict[str, Share]
    other_blobs: int
    other_bytes: int
    used_bytes: int | None
    max_bytes: int | None
    differing_fields: dict[str, dict[str, str]]
    sampled_seals: dict[str, int]
    sampled_misses: dict[str, int]
    seconds: float


def du(config: Config, tier: TierName = None, as_json: AsJson = False) -> None:
    """Show the number and size of stored blocks: by namespace, rank and group, and by age.

    Namespaces of one model are told apart by the options in which they differ.
    """
    results = Results[Used]()
    for place in find_places(config, tier):
        with results.of(place):
            result = results.add(_measure(place, has_config=not is_bare(config)))
            if not as_json:
                _show(result)
    if not as_json and len(results.done) > 1:
        total = sum_of(results.done)
        say(f"total of {len(results.done)} tiers: {counted(total.blocks)}, {human_bytes(total.bytes)}")
    results.end(as_json=as_json)


def _measure(place: Place, *, has_config: bool) -> Used:
    inventory = Inventory()
    started_at, now = time.monotonic(), time.time()
    with place.open() as store, Ticker(f"listing {place.name}", unit="blobs") as ticker:
        for info in ticker.each(store.keys()):
            inventory.add(info, now)
        seals = dict(sample_seals(store))
        used = used_bytes(store)
        namespaces, _ = namespaces_in(store)
    engines = {each.name: str(each.fields.get("inference_engine", "")) for each in namespaces}
    total = inventory.total
    return Used(
        tier=place.name,
        where=place.where,
        blocks=total.blocks,
        bytes=total.bytes,
        groups=[
            GroupShare(
                namespace=namespace,
                engine=engines.get(namespace, ""),
                rank=rank,
                group=group,
                blocks=share.blocks,
                bytes=share.bytes,
            )
            for (namespace, rank, group), share in sorted(inventory.blocks.items())
        ],
        ages=inventory.ages,
        other_blobs=inventory.other_blobs,
        other_bytes=inventory.other_bytes,
        used_bytes=used,
        max_bytes=place.config.max_bytes if isinstance(place.config, BoundedTierConfig) else None,
        differing_fields=differences(namespaces),
        sampled_seals=seals,
        sampled_misses=misses_of(place.config, seals) if has_config else {},
        seconds=round(time.monotonic() - started_at, 3),
    )


def sum_of(shares: Iterable[Share]) -> Share:
    """The sum of some shares."""
    total = Share()
    for share in shares:
        total.blocks += share.blocks
        total.bytes += share.bytes
    return total


def utc(mtime: float) -> str:
    """Format Unix seconds as UTC, or as a number if no calendar has the time."""
    try:
        at = time.gmtime(mtime)
    except (ValueError, OverflowError, OSError):  # written by a machine whose clock was far ahead
        return f"{mtime:.0f}"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", at) if 1 <= at.tm_year <= YEAR_MAX else f"{mtime:.0f}"


def misses_of(config: TierConfig, seals: Mapping[str, int]) -> dict[str, int]:
    """Blocks that engines with this configuration cannot load, by reason; see ``count_misses``."""
    return count_misses(seals, config.encrypt, key_ids(config))


def _show(result: Used) -> None:
    bound = ""
    if result.max_bytes is not None:
        known = (
            "no collector has counted yet" if result.used_bytes is None else f"{human_bytes(result.used_bytes)} counted"
        )
        share = (result.bytes + result.other_bytes) / result.max_bytes
        bound = f", {share:.0%} of max_bytes {human_bytes(result.max_bytes)} ({known})"
    say(f"{result.tier} at {result.where}: {counted(result.blocks)}, {human_bytes(result.bytes)}{bound}")
    apart = result.differing_fields
    differs = any(apart.get(group.namespace) for group in result.groups)
    table = Table("namespace", "engine", "rank", "group", "blocks", "size")
    if differs:
        table.add_column("differs from its siblings by")
    for group in result.groups:
        numbers = (str(group.rank), str(group.group), f"{group.blocks:,}", human_bytes(group.bytes))
        by = (cell(differences_in_words(apart.get(group.namespace, {}))),) if differs else ()
        table.add_row(cell(group.namespace), cell(group.engine), *numbers, *by)
    if result.groups:
        show(table)
    sampled = result.sampled_seals
    if any(" " in kind for kind in sampled):
        of = f"of {counted(sum(sampled.values()), 'sampled block')}"
        say(f"  keys {of}: {', '.join(f'{kind} ({count})' for kind, count in sorted(sampled.items()))}")
    for reason, count in result.sampled_misses.items():
        say(f"  misses for engines with this configuration: {count} of the sampled blocks are {reason}")
    lower = "0"
    for age, share_of_age in result.ages.items():
        label = {"older": f"older than {lower}", UNKNOWN_AGE: "of unknown age"}.get(age, f"up to {age}")
        if share_of_age.blocks:
            say(f"  {label}: {counted(share_of_age.blocks)}, {human_bytes(share_of_age.bytes)}")
        lower = age
    if result.other_blobs:
        kind = "file (not a block)" if result.other_blobs == 1 else "files (not blocks)"
        say(f"  {result.other_blobs:,} other {kind}, {human_bytes(result.other_bytes)}")
