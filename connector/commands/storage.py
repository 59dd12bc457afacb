"""``kvtiers ls``, ``du`` and ``gc``: list, sum up and remove stored blocks."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from ...tiers.blocks.file_mapper import BlockName
from ...tiers.builtin import key_ids, record_keys
from ...tiers.capacity.collector import Collector
from ...tiers.capacity.policy import CapacityPolicy
from ...tiers.capacity.walker import CollectReport
from ...tiers.capacity.written import used_bytes
from ...tiers.config.deployment import parse_tier
from ...tiers.config.tier_options import BoundedTierConfig, S3TierConfig, TierConfig
from ...tiers.errors import ConfigError, printable
from ...tiers.store import KeyInfo, Store
from ...tiers.tools.block_reader import read_identity
from ...tiers.tools.inventory import UNKNOWN_AGE, Inventory, Share, list_blocks
from ...tiers.tools.namespaces import (
    blocks_of,
    differences,
    differences_in_words,
    namespace_names,
)
from ...tiers.tools.neighbors import namespaces_in
from ...tiers.tools.ownership import check_is_ours
from ...tiers.tools.seal_kinds import count_misses, sample_seals
from .options import AsJson, Config, DryRun, TierName
from .output import (
    Results,
    Ticker,
    cell,
    counted,
    human_age,
    human_bytes,
    note,
    refuse,
    say,
    show,
)
from .places import (
    FolderMissingError,
    Place,
    PrefixPlace,
    find_places,
    find_prefixes,
    is_bare,
)
from .session import session

DAY_S = 86_400
YEAR_MAX = 9999  # of ISO 8601


class SortKey(StrEnum):
    """What ``ls`` sorts by."""

    NAME = "name"
    SIZE = "size"
    AGE = "age"


#: Ascending, as ``ls`` shows them: names from a to z, the largest first, the most recently used first.
_ORDERS: dict[SortKey, Callable[[tuple[KeyInfo, BlockName]], Any]] = {
    SortKey.NAME: lambda block: block[0].key,
    SortKey.SIZE: lambda block: (-block[0].size, block[0].key),
    SortKey.AGE: lambda block: (-block[0].mtime, block[0].key),
}


def ls(
    config: Config,
    tier: TierName = None,
    prefix: Annotated[str, typer.Option(help="List only names that start with this text.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of blocks per tier.")] = None,
    sort: Annotated[
        SortKey | None,
        typer.Option(
            help="Sort each tier's blocks: name from a to z, size from the largest, age from the last used. "
            "Holds all blocks in memory, or as many as --limit says; without --sort the list streams."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per block and line; the last line has the totals.")
    ] = False,
) -> None:
    """List the stored blocks: size, time of last use or write, tier, name. Totals go to standard error.

    Without --sort, any number of blocks is listed as a stream: memory does not grow.
    """
    results = Results()
    for place in find_places(config, tier):
        total = Share()
        with results.of(place), place.open() as store:
            for info, name in _in_order(place, list_blocks(store, prefix), sort, limit):
                total.add(info.size)
                if as_json:
                    line = {"tier": place.name, "key": info.key, "size": info.size, "mtime": info.mtime}
                    line |= {"rank": name.rank, "group": name.group}
                    print(json.dumps(line))
                else:
                    print(f"{info.size:>12} {utc(info.mtime)} {place.name} {printable(info.key)}")
            results.add(asdict(total))
            if not as_json:
                note(f"{place.name} at {place.where}: {counted(total.blobs)}, {human_bytes(total.bytes)}")
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


def du(config: Config, tier: TierName = None, as_json: AsJson = False) -> None:
    """Show the number and size of stored blocks: by namespace, rank and group, and by age.

    Namespaces of one model are told apart by the options in which they differ.
    """
    results = Results()
    for place in find_places(config, tier):
        inventory = Inventory()
        started_at = time.monotonic()
        now = time.time()
        with results.of(place):
            with place.open() as store, Ticker(f"listing {place.name}", unit="blobs") as ticker:
                for info in ticker.each(store.keys()):
                    inventory.add(info, now)
                seals = sample_seals(store)
                used = used_bytes(store)
                namespaces, _ = namespaces_in(store)
            limit = place.config.max_bytes if isinstance(place.config, BoundedTierConfig) else None
            took_s = time.monotonic() - started_at
            result = results.add(
                _du_result(inventory, used, limit, took_s)
                | {"namespaces": differences(namespaces), "sampled_seals": dict(seals)}
                | {"sampled_misses": {} if is_bare(config) else misses_of(place.config, seals)}
            )
            if not as_json:
                _show_du(result)
    done = [result for result in results.all if "error" not in result]
    if not as_json and len(done) > 1:
        blobs, size = (sum(result["blocks"][name] for result in done) for name in ("blobs", "bytes"))
        say(f"total of {len(done)} tiers: {counted(blobs)}, {human_bytes(size)}")
    results.end(as_json=as_json)


def gc(
    config: Config,
    tier: TierName = None,
    dry_run: DryRun = False,
    max_bytes: Annotated[
        str | None, typer.Option(help="The limit of a bare folder or URL, such as 200GiB. A YAML file has its own.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="The maximum age of blocks in a bare folder or URL, such as 7d.")
    ] = None,
    lifecycle: Annotated[
        bool,
        typer.Option(
            "--lifecycle",
            help="S3: also set a bucket rule that removes blocks one ttl after their write; without ttl, remove that "
            "rule.",
        ),
    ] = False,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="Remove chunks of SharedStorageConnector instead of the tiers' blocks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove blocks past their ttl and, above max_bytes, the least recently used blocks."""
    if prefixes and lifecycle:
        raise typer.BadParameter("applies only to blocks and excludes --prefixes", param_hint="--lifecycle")
    places = find_prefixes(config, tier) if prefixes else find_places(config, tier)
    places = _with_bounds(config, places, max_bytes, ttl)
    if lifecycle and not any(isinstance(place.config, S3TierConfig) for place in places):
        raise refuse("--lifecycle: accepted are tiers of type s3, whose buckets can remove blocks by themselves")
    if not dry_run:
        session().if_interrupted = lambda: "what was removed stays removed; run the same command again to continue"
    results = Results()
    for place in places:
        with results.of(place):
            result = results.add(_collect(place, dry_run=dry_run))
            if not as_json:
                _show_gc(result, "chunk" if prefixes else "block")
            if lifecycle and not dry_run and not place.read_only and isinstance(place.config, S3TierConfig):
                rules = _set_lifecycle(place, place.config.ttl)
                result.update(rules)
                if not as_json:
                    _show_lifecycle(place, **rules)
    results.end(as_json=as_json, failed=any(result.get("kept_by_error") for result in results.all))


def _with_bounds(config: str, places: list[Place], max_bytes: str | None, ttl: str | None) -> list[Place]:
    """Give a bare folder or URL the limits of the command line.

    Raises:
        ConfigError: a bare place has no limit, or a YAML file would have two.
    """
    given = {"max_bytes": max_bytes, "ttl": ttl}
    if not is_bare(config):
        if name := next((name for name, value in given.items() if value is not None), None):
            raise ConfigError(f"{config} sets its own limits; change {name} there", field=f"--{name.replace('_', '-')}")
        return places
    if max_bytes is None and ttl is None:
        raise ConfigError(f"{places[0].where} has no YAML file, so no limit is known; give --max-bytes, --ttl or both")
    (place,) = places
    options = place.config.model_dump(exclude_unset=True) | {
        k: value for k, value in given.items() if value is not None
    }
    try:
        limited = parse_tier(options)
    except ConfigError as e:
        option, _, mistake = str(e).partition(": ")
        raise ConfigError(mistake, field=f"--{option.replace('_', '-')}") from None
    assert isinstance(limited, TierConfig)
    if not isinstance(place, PrefixPlace):  # prefixes are never protected
        with place.open() as store:
            _refuse_protected(store, place)
    return [type(place)(place.name, limited, place.where)]


def _refuse_protected(store: Store, place: Place) -> None:
    """A collector without the keys of ``encrypt`` would leave records that no engine accepts."""
    for namespace in namespaces_in(store)[0]:
        if namespace.fields.get("protection"):
            raise ConfigError(
                f"{namespace.name} has protected blocks; give the YAML file of a tier with their keys",
                field=place.where,
            )


def _collect(place: Place, *, dry_run: bool) -> dict[str, Any]:
    policy = place.policy
    if policy is None:
        return {"skipped": "is read_only" if place.read_only else "has neither max_bytes nor ttl"}
    try:
        report = _collect_within(place, policy, dry_run=dry_run)
    except FolderMissingError:
        if not isinstance(place, PrefixPlace) or not place.is_beside_a_root():
            raise
        return {"skipped": "no prefixes are stored here yet"}
    return {"skipped": "another collector is at work"} if report is None else asdict(report)


def _collect_within(place: Place, policy: CapacityPolicy, *, dry_run: bool) -> CollectReport | None:
    with place.open() as store:  # not opened to write, because a store then removes the files of dead writers
        check_is_ours(store)
    with place.open(writes=not dry_run) as store, Ticker(f"collecting {place.name}", unit="blobs") as ticker:
        keys = None if dry_run else record_keys(place.config)  # a dry run needs no keys
        return _run(Collector(store, policy, keys=keys), dry_run, policy.lease_s, ticker.count)


def _set_lifecycle(place: Place, ttl_s: float | None) -> dict[str, Any]:
    """Set the bucket's lifecycle rules: expire blocks after ``ttl`` (None: remove the rule), and expire old versions.

    Returns the new rules.
    """
    from ...tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    days = None if ttl_s is None else math.ceil(ttl_s / DAY_S)
    with place.open(writes=True) as store:
        assert isinstance(store, S3Store)
        # A lifecycle rule removes everything that begins with a name, and folders of others may look like a namespace.
        own = [
            name
            for name in namespace_names(store)
            if read_identity(store, name) is not None or any(blocks_of(store, name))
        ]
        versions = store.expire_after(days, [f"{name}_r" for name in own])
    return {"expire_after_days": days, "expire_versions": versions}


def utc(mtime: float) -> str:
    """Format Unix seconds as UTC, or as a number if no calendar has the time."""
    try:
        at = time.gmtime(mtime)
    except (ValueError, OverflowError, OSError):  # written by a machine whose clock was far ahead
        return f"{mtime:.0f}"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", at) if 1 <= at.tm_year <= YEAR_MAX else f"{mtime:.0f}"


def _run(
    collector: Collector, dry_run: bool, lease_s: float, on_progress: Callable[[int], None]
) -> CollectReport | None:
    """Run the collector. If another one works, wait until it gives up or counts as dead."""
    deadline = time.monotonic() + 2 * lease_s
    while (report := collector.run(dry_run=dry_run, on_progress=on_progress)) is None and time.monotonic() < deadline:
        time.sleep(min(1.0, collector.seconds_to_wait + 0.05))
    return report


def misses_of(config: TierConfig, seals: Mapping[str, int]) -> dict[str, int]:
    """Blocks that engines with this configuration cannot load, by reason; see ``count_misses``."""
    return count_misses(seals, config.encrypt, key_ids(config))


def _du_result(inventory: Inventory, used: int | None, limit: int | None, seconds: float) -> dict[str, Any]:
    groups = [
        {"namespace": namespace, "rank": rank, "group": group, **asdict(share)}
        for (namespace, rank, group), share in sorted(inventory.blocks.items())
    ]
    return {
        "blocks": asdict(inventory.total),
        "groups": groups,
        "ages": {name: asdict(share) for name, share in inventory.ages.items()},
        "other": asdict(inventory.other),
        "used_bytes": used,
        "max_bytes": limit,
        "seconds": round(seconds, 3),
    }


def _show_du(result: dict[str, Any]) -> None:
    blocks, limit = result["blocks"], result["max_bytes"]
    bound = ""
    if limit is not None:
        used = result["used_bytes"]
        known = "not accounted yet" if used is None else f"{human_bytes(used)} accounted"
        stored = blocks["bytes"] + result["other"]["bytes"]
        bound = f", {stored / limit:.0%} of max_bytes {human_bytes(limit)} ({known})"
    what = counted(blocks["blobs"])
    say(f"{result['tier']} at {result['where']}: {what}, {human_bytes(blocks['bytes'])}{bound}")
    apart = result["namespaces"]
    differs = any(apart.get(group["namespace"]) for group in result["groups"])
    table = Table("namespace", "rank", "group", "blocks", "size")
    if differs:
        table.add_column("differs from its siblings by")
    for group in result["groups"]:
        numbers = (str(group["rank"]), str(group["group"]), f"{group['blobs']:,}", human_bytes(group["bytes"]))
        by = (cell(differences_in_words(apart.get(group["namespace"], {}))),) if differs else ()
        table.add_row(cell(group["namespace"]), *numbers, *by)
    if result["groups"]:
        show(table)
    sampled = result["sampled_seals"]
    if any(" " in kind for kind in sampled):
        of = f"of {counted(sum(sampled.values()), 'sampled block')}"
        say(f"  keys {of}: {', '.join(f'{kind} ({count})' for kind, count in sorted(sampled.items()))}")
    for reason, count in result["sampled_misses"].items():
        say(f"  misses for engines with this configuration: {count} of the sampled blocks are {reason}")
    lower = "0"
    for age, share in result["ages"].items():
        label = {"older": f"older than {lower}", UNKNOWN_AGE: "of unknown age"}.get(age, f"up to {age}")
        if share["blobs"]:
            say(f"  {label}: {counted(share['blobs'])}, {human_bytes(share['bytes'])}")
        lower = age
    other = result["other"]
    if other["blobs"]:
        kind = "file (not a block)" if other["blobs"] == 1 else "files (not blocks)"
        say(f"  {other['blobs']:,} other {kind}, {human_bytes(other['bytes'])}")


def _show_lifecycle(place: Place, expire_after_days: int | None, expire_versions: bool) -> None:
    where = f"{place.name} at {place.where}"
    versions = "; it removes noncurrent versions of blocks after a day" if expire_versions else ""
    if expire_after_days is None:
        say(f"{where}: the bucket has no kvtiers rule that removes blocks{versions}")
    else:
        say(f"{where}: the bucket removes blocks {expire_after_days} days after they were written{versions}")


def _show_gc(result: dict[str, Any], unit: str) -> None:
    place = f"{result['tier']} at {result['where']}"
    if "skipped" in result:
        say(f"{place}: {result['skipped']}")
        return
    verb = "would be removed" if result["dry_run"] else "removed"
    took = human_age(result["seconds"]) if result["seconds"] >= 1 else "less than 1s"
    say(f"{place}: {counted(result['blobs'], 'blob')}, {human_bytes(result['bytes'])}, listed in {took}")
    for reason, count in result["removed_blobs"].items():
        size = human_bytes(result["removed_bytes"][reason])
        say(f"  {verb} by {reason}: {counted(count, unit)}, {size}")
    if result["ttl_waits_s"]:
        wait = human_age(result["ttl_waits_s"])
        say(f"  nothing is removed by ttl for another {wait}: the storage's clock was stepped, so ages are not known")
    if result["leftovers"]:
        say(f"  {verb}, left by dead writers or in quarantine: {counted(result['leftovers'], 'file')}")
    if result["kept_by_error"]:
        say(f"  could not be removed: {counted(result['kept_by_error'], unit)}")
    if result["own_bytes"]:
        say(f"  quarantined and partly written: {human_bytes(result['own_bytes'])}")
