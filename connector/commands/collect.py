"""``kvtiers gc``: removes blocks past their ttl and above max_bytes, as an engine's collector does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from ...tiers.capacity.collector import Collector
from ...tiers.capacity.policy import CapacityPolicy
from ...tiers.capacity.walker import CollectReport
from ...tiers.config.deployment import parse_tier
from ...tiers.config.tier_options import TierConfig
from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError
from ...tiers.tools.inventory import Share
from ...tiers.tools.ownership import check_is_ours
from .options import AsJson, Config, DryRun, TierName
from .output import Ticker, counted, human_age, say
from .places import Place, find_places, is_bare
from .results import Results, TierResult
from .session import session


@dataclass(kw_only=True)
class Skipped(TierResult):
    """Nothing was collected.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(kw_only=True)
class Collected(TierResult):
    """The removed blocks of a tier; with ``dry_run``, the blocks that would be removed.

    Attributes:
        blobs, blob_bytes: all that was listed, blocks and others.
        removed, removed_bytes: blocks.
        removed_by_reason: the same by reason, "ttl" or "capacity".
        failed: blocks that could not be removed.
        leftovers: files of dead writers that were removed.
    """

    dry_run: bool
    blobs: int
    blob_bytes: int
    removed: int
    removed_bytes: int
    removed_by_reason: dict[str, Share] = field(default_factory=dict)
    failed: int
    leftovers: int
    seconds: float


def gc(
    config: Config,
    tier: TierName = None,
    dry_run: DryRun = False,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For a folder or URL: its limit, such as 200GiB. A YAML file has its own."),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="DURATION", help="For a folder or URL: the maximum age of blocks, such as 7d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove blocks past their ttl and, above max_bytes, the least recently used blocks."""
    places = _with_bounds(config, find_places(config, tier), {"max_bytes": max_bytes, "ttl": ttl})
    if not dry_run:
        session().if_interrupted = lambda: "what was removed stays removed; run the same command again to continue"
    results = Results[Collected | Skipped]()
    for place in places:
        with results.of(place):
            result = results.add(_collect(place, dry_run=dry_run))
            if not as_json:
                _show(result)
    failed = any(isinstance(result, Collected) and result.failed for result in results.done)
    results.end(as_json=as_json, failed=failed)


def _with_bounds(config: str, places: list[Place], given: dict[str, str | None]) -> list[Place]:
    """Give a bare folder or URL the limits of the command line.

    Raises:
        ConfigError: a bare place has no limit, or a YAML file would have two.
    """
    limits = {name: value for name, value in given.items() if value is not None}
    if not is_bare(config):
        for name in limits:
            raise ConfigError(f"{config} sets its own limits; change {name} there", field=f"--{name.replace('_', '-')}")
        return places
    if not limits:
        raise ConfigError(f"{places[0].where} has no YAML file, so no limit is known; give --max-bytes, --ttl or both")
    (place,) = places
    try:
        limited = parse_tier(place.config.model_dump(exclude_unset=True) | limits)
    except ConfigError as e:
        option, _, mistake = str(e).partition(": ")
        raise ConfigError(mistake, field=f"--{option.replace('_', '-')}") from None
    assert isinstance(limited, TierConfig)
    return [Place(place.name, limited, place.where)]


def _collect(place: Place, *, dry_run: bool) -> Collected | Skipped:
    policy = place.policy
    report: CollectReport | None = None
    if policy is None:
        why = "the tier is read_only" if place.read_only else "nothing to do, because neither max_bytes nor ttl is set"
    else:
        why = "another collector is working here"
        report = _collect_within(place, policy, dry_run=dry_run)
    if report is None:
        return Skipped(tier=place.name, where=place.where, reason=why)
    counts, sizes = report.removed_blobs, report.removed_bytes
    return Collected(
        tier=place.name,
        where=place.where,
        dry_run=report.dry_run,
        blobs=report.blobs,
        blob_bytes=report.bytes,
        removed=sum(counts.values()),
        removed_bytes=sum(sizes.values()),
        removed_by_reason={reason: Share(count, sizes[reason]) for reason, count in counts.items()},
        failed=report.kept_by_error,
        leftovers=report.leftovers,
        seconds=round(report.seconds, 3),
    )


def _collect_within(place: Place, policy: CapacityPolicy, *, dry_run: bool) -> CollectReport | None:
    with place.open() as store:  # opening to write already removes the files of dead writers
        check_is_ours(store)
    with place.open(writes=not dry_run) as store, Ticker(f"collecting {place.name}", unit="blobs") as ticker:
        return _run(Collector(store, policy), dry_run, policy.lease_s, ticker.count)


def _run(
    collector: Collector, dry_run: bool, lease_s: float, on_progress: Callable[[int], None]
) -> CollectReport | None:
    """Run the collector. If another collector works, wait until it gives up or counts as dead."""
    deadline = time.monotonic() + 2 * lease_s
    while (report := collector.run(dry_run=dry_run, on_progress=on_progress)) is None and time.monotonic() < deadline:
        time.sleep(min(1.0, collector.seconds_to_wait + 0.05))
    return report


def _show(result: Collected | Skipped) -> None:
    place = f"{result.tier} at {result.where}"
    if isinstance(result, Skipped):
        say(f"{place}: {result.reason}")
        return
    verb = "would be removed" if result.dry_run else "removed"
    took = human_age(result.seconds) if result.seconds >= 1 else "less than 1s"
    say(f"{place}: {counted(result.blobs, 'blob')}, {human_bytes(result.blob_bytes)}, listed in {took}")
    for reason, share in result.removed_by_reason.items():
        say(f"  {verb} by {reason}: {counted(share.blocks)}, {human_bytes(share.bytes)}")
    if result.leftovers:
        say(f"  {verb}, left by dead writers: {counted(result.leftovers, 'file')}")
    if result.failed:
        say(f"  could not be removed: {counted(result.failed)}")
