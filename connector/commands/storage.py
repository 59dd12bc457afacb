"""``kvtiers ls``, ``du`` and ``gc``: list, sum up and remove stored blocks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import typer
from rich.console import Console
from rich.table import Column, Table

from kvtiers.connector.commands.places import (
    EXIT_FAILED,
    Place,
    Ticker,
    cell,
    complain,
    find_places,
    find_prefixes,
    human_age,
    human_bytes,
    refuse,
    say,
)
from kvtiers.tiers.builtin import record_keys
from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.removal import CollectReport
from kvtiers.tiers.capacity.usage import used_bytes
from kvtiers.tiers.config.tier_options import BoundedTierConfig, S3TierConfig
from kvtiers.tiers.errors import ConfigError, KVTiersError, StoreError, printable
from kvtiers.tiers.tools.inventory import UNKNOWN_AGE, Inventory, block_beginnings, list_blocks

TELL_EVERY_BLOBS = 1000
DAY_S = 86_400
YEAR_MAX = 9999  # of ISO 8601

Config = Annotated[Path, typer.Argument(help="The YAML file of the deployment.")]
TierName = Annotated[str | None, typer.Option("--tier", help="Only the tier of this name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@runtime_checkable
class _Expires(Protocol):
    """A store whose storage can expire blobs by itself: ``tiers.stores.s3.store.S3Store``."""

    def folders(self) -> list[str]: ...

    def expire_after(self, days: int | None, beginnings: Sequence[str] = ()) -> bool: ...


def ls(
    config: Config,
    tier: TierName = None,
    prefix: Annotated[str, typer.Option(help="List only names that start with this text.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of blocks per tier.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the stored blocks: size, time of last use or write, name. Streams any number of blocks."""
    results = Results("ls")
    for place in open_places("ls", config, tier):
        with results.of(place), place.open() as store:
            for count, (info, name) in enumerate(list_blocks(store, prefix)):
                if limit is not None and count >= limit:
                    break
                if as_json:
                    line = {"tier": place.name, "key": info.key, "size": info.size, "mtime": info.mtime}
                    line |= {"rank": name.rank, "group": name.group}
                    print(json.dumps(line))
                else:
                    print(f"{info.size:>12} {_time(info.mtime)} {printable(info.key)}")
    results.end()


def du(config: Config, tier: TierName = None, as_json: AsJson = False) -> None:
    """Show the number and size of stored blocks: by namespace, rank and group, and by age."""
    results = Results("du")
    for place in open_places("du", config, tier):
        inventory = Inventory()
        started_at = time.monotonic()
        now = time.time()
        with results.of(place):
            with place.open() as store, Ticker(f"listing {place.name}", unit="blobs") as ticker:
                for count, info in enumerate(store.keys()):
                    inventory.add(info, now)
                    if count % TELL_EVERY_BLOBS == 0:
                        ticker.count(count)
                used = used_bytes(store)
            limit = place.config.max_bytes if isinstance(place.config, BoundedTierConfig) else None
            results.add(_du_result(place, inventory, used, limit, time.monotonic() - started_at))
            if not as_json:
                _show_du(results.last)
    results.end(as_json=as_json)


def gc(
    config: Config,
    tier: TierName = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    lifecycle: Annotated[
        bool,
        typer.Option("--lifecycle", help="S3: also set a bucket rule that removes blocks one ttl after their write."),
    ] = False,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="Remove chunks of SharedStorageConnector instead of the tiers' blocks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove blocks past their ttl and, above gc_high x max_bytes, the least recently used blocks."""
    if prefixes and lifecycle:
        raise typer.BadParameter("applies only to blocks and excludes --prefixes", param_hint="--lifecycle")
    places = open_places("gc", config, tier, find_prefixes if prefixes else find_places)
    if lifecycle and not any(isinstance(place.config, S3TierConfig) for place in places):
        raise refuse("gc", "--lifecycle: accepted are tiers of type s3, whose buckets can remove blocks by themselves")
    results = Results("gc")
    for place in places:
        with results.of(place):
            result = {"tier": place.name, "where": place.where, **_collect(place, dry_run=dry_run)}
            results.add(result)
            if not as_json:
                _show_gc(result, "chunks" if prefixes else "blocks")
            if lifecycle and not dry_run and not place.read_only and isinstance(place.config, S3TierConfig):
                rules = _set_lifecycle(place, place.config.ttl)
                result.update(rules)
                if not as_json:
                    _show_lifecycle(place, **rules)
    results.end(as_json=as_json, failed=any(result.get("kept_by_error") for result in results.all))


def _collect(place: Place, *, dry_run: bool) -> dict[str, Any]:
    policy = place.policy
    if policy is None:
        return {"skipped": "is read_only" if place.read_only else "has neither max_bytes nor ttl"}
    with place.open(writes=not dry_run) as store, Ticker(f"collecting {place.name}", unit="listed") as ticker:
        keys = None if dry_run else record_keys(place.config)  # a dry run needs no keys
        report = _run(Collector(store, policy, on_progress=ticker.count, keys=keys), dry_run, policy.lease_s)
    return {"skipped": "another collector is at work"} if report is None else asdict(report)


def _set_lifecycle(place: Place, ttl_s: float | None) -> dict[str, Any]:
    """Set the bucket's lifecycle rules: expire blocks after ``ttl`` (None: remove the rule), and expire old versions.

    Returns the new rules.
    """
    days = None if ttl_s is None else math.ceil(ttl_s / DAY_S)
    with place.open(writes=True) as store:
        assert isinstance(store, _Expires)
        versions = store.expire_after(days, block_beginnings(store.folders()))
    return {"expire_after_days": days, "expire_versions": versions}


def _time(mtime: float) -> str:
    try:
        at = time.gmtime(mtime)
    except (ValueError, OverflowError, OSError):  # written by a machine whose clock was far ahead
        return f"{mtime:.0f}"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", at) if 1 <= at.tm_year <= YEAR_MAX else f"{mtime:.0f}"


def _run(collector: Collector, dry_run: bool, lease_s: float) -> CollectReport | None:
    """Run the collector. If another process holds the lease, wait until it is released or its holder counts as dead."""
    deadline = time.monotonic() + 2 * lease_s
    while (report := collector.run(dry_run=dry_run)) is None and time.monotonic() < deadline:
        time.sleep(min(1.0, collector.lease.seconds_to_wait + 0.05))
    return report


def open_places(
    command: str,
    config: Path,
    tier: str | None,
    find: Callable[[Path, str | None, Callable[[str], None]], list[Place]] = find_places,
    *,
    tells: bool = True,
) -> list[Place]:
    """Call ``find``. Bad input ends the command.

    Args:
        tells: print a message that names the skipped tiers.
    """
    try:
        return find(config, tier, partial(complain, command) if tells else lambda _: None)
    except KVTiersError as e:
        raise refuse(command, str(e)) from e


class Results:
    """A command's results, tier by tier. A storage error is printed at once, and the command goes on to other tiers."""

    def __init__(self, command: str) -> None:
        self._command = command
        self.all: list[dict[str, Any]] = []

    @property
    def last(self) -> dict[str, Any]:
        """The last result."""
        return self.all[-1]

    def add(self, result: dict[str, Any]) -> None:
        """Add a result."""
        self.all.append(result)

    @contextmanager
    def of(self, place: Place) -> Iterator[None]:
        """Context for work on a place: a storage error becomes the place's result."""
        try:
            yield
        except (StoreError, ConfigError) as e:
            complain(self._command, f"tier {place.name} at {place.where}: {e}")
            self.add({"tier": place.name, "where": place.where, "error": str(e)})

    def end(self, *, as_json: bool = False, failed: bool = False) -> None:
        """Print all results as JSON if asked; exit with ``EXIT_FAILED`` if the command or a storage failed."""
        if as_json:
            print(json.dumps({"tiers": self.all}))
        if failed or any("error" in result for result in self.all):
            raise typer.Exit(EXIT_FAILED)


def _du_result(
    place: Place, inventory: Inventory, used: int | None, limit: int | None, seconds: float
) -> dict[str, Any]:
    groups = [
        {"namespace": namespace, "rank": rank, "group": group, **asdict(share)}
        for (namespace, rank, group), share in sorted(inventory.blocks.items())
    ]
    return {
        "tier": place.name,
        "where": place.where,
        "blocks": asdict(inventory.total),
        "groups": groups,
        "ages": {name: asdict(share) for name, share in inventory.ages.items()},
        "other": asdict(inventory.other),
        "used_bytes": used,
        "max_bytes": limit,
        "seconds": round(seconds, 3),
    }


def _show_du(result: dict[str, Any]) -> None:
    blocks = result["blocks"]
    bound = ""
    if result["max_bytes"] is not None:
        known = "not measured yet" if result["used_bytes"] is None else f"{human_bytes(result['used_bytes'])} accounted"
        bound = f", {known} of max_bytes {human_bytes(result['max_bytes'])}"
    say(f"{result['tier']} at {result['where']}: {blocks['blobs']:,} blocks, {human_bytes(blocks['bytes'])}{bound}")
    table = Table(Column("namespace", overflow="fold"), "rank", "group", "blocks", "size")
    for group in result["groups"]:
        numbers = (str(group["rank"]), str(group["group"]), f"{group['blobs']:,}", human_bytes(group["bytes"]))
        table.add_row(cell(group["namespace"]), *numbers)
    if result["groups"]:
        Console(soft_wrap=True).print(table)
    lower = "0"
    for age, share in result["ages"].items():
        label = {"older": f"older than {lower}", UNKNOWN_AGE: "of unknown age"}.get(age, f"up to {age}")
        if share["blobs"]:
            say(f"  {label}: {share['blobs']:,} blocks, {human_bytes(share['bytes'])}")
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
    say(f"{place}: {result['blobs']:,} blobs, {human_bytes(result['bytes'])}, listed in {took}")
    for reason, count in result["removed_blobs"].items():
        size = human_bytes(result["removed_bytes"][reason])
        say(f"  {verb} by {reason}: {count:,} {unit}, {size}")
    if result["gave_up"]:
        say("  another collector has measured meanwhile, and enforces max_bytes")
    if result["kept_by_error"]:
        say(f"  could not be removed: {result['kept_by_error']:,} {unit}")
    if result["own_bytes"]:
        say(f"  quarantined and partly written: {human_bytes(result['own_bytes'])}")
