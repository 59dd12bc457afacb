"""``kvtiers verify``: checks the seals of all stored blocks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import typer

from ...tiers.builtin import key_ids
from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError
from ...tiers.tools.ownership import check_is_ours
from ...tiers.tools.seal_kinds import unknown_keys
from ...tiers.tools.verify import ALL, Subset, VerifyReport, repair, verify_blocks
from .options import AsJson, Config, DryRun, TierName, Yes
from .output import Ticker, confirm, counted, refuse, say
from .places import Place, find_places, is_bare
from .results import Results, TierResult
from .session import session
from .storage import misses_of

BAD_SHOWN_MAX = 20
#: --repair asks before it removes more bad blocks than both limits allow, or if no block is good. Storage damages
#: single blocks, but a host with bad memory or a bad network reads many good blocks as bad.
UNASKED_BLOCKS_MAX = 3
UNASKED_SHARE_MAX = 0.01


@dataclass(kw_only=True)
class Verified(VerifyReport, TierResult):
    """The result of verifying a tier, and of repairing it.

    Attributes:
        removed: number of bad blocks that were deleted.
        good_again: number of bad blocks that were good, or gone, when they were read again.
        stopped: True if nothing was removed because too many blocks are bad.
        misses: reason -> number of blocks that engines with this configuration cannot load.
        unknown_keys: ID of a key that the tier lacks -> number of blocks under this key.
        subset: the share of the blocks that was checked.
    """

    removed: int = 0
    good_again: int = 0
    stopped: bool = False
    misses: dict[str, int] = field(default_factory=dict)
    unknown_keys: dict[str, int] = field(default_factory=dict)
    subset: float
    dry_run: bool
    seconds: float = 0.0
    bytes_per_s: float = 0.0


def verify(
    config: Config,
    tier: TierName = None,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Check only this share of the blocks, such as 5%: the same blocks in each run and each tier.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63, metavar="N", help="Choose another subset, such as this week's number.")
    ] = 0,
    repairs: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Read bad blocks once more, and delete them if they are still bad. Asks first if more than 1% are "
            "bad, because this machine may read good blocks wrongly.",
        ),
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, metavar="N", help="Threads (8 times as many across a network). Default: one per core."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the seals of all stored blocks: that each block matches its name, and is complete and unchanged."""
    chosen = _parse_subset(subset, seed)
    places = find_places(config, tier)
    kept = [place.name for place in places if place.read_only]
    if repairs and not dry_run and kept:
        raise refuse(f"--repair: {', '.join(kept)} is read_only; choose another tier with --tier")
    if (dry_run or yes) and not repairs:
        option = "--dry-run" if dry_run else "--yes"
        raise refuse(f"{option} has no effect without --repair")
    n_workers = workers or len(os.sched_getaffinity(0))
    work = _Work(chosen, repairs and not dry_run, dry_run, yes, n_workers, is_bare(config))
    session().if_interrupted = lambda: _how_to_continue(work)
    results = Results[Verified]()
    for place in places:
        with results.of(place):
            if repairs:
                with place.open() as store:
                    check_is_ours(store)
            result = results.add(_verify_place(place, work, asks=not as_json))
            if not as_json:
                _show(result)
    results.end(as_json=as_json, failed=any(map(_has_problem, results.done)))


def _has_problem(result: Verified) -> bool:
    """Whether blocks are bad or cannot be read, or engines with this configuration cannot load them."""
    is_left = result.bad > result.removed + result.good_again
    none_loads = 0 < result.blocks == sum(result.misses.values())
    return bool(is_left or result.failed or result.unknown_keys or none_loads)


@dataclass(slots=True)
class _Work:
    """The options of a run, and its progress.

    Attributes:
        yes: remove bad blocks without asking.
        is_bare: the place was given without a configuration, so the engines' keys are unknown.
        n_blocks: blocks checked so far.
    """

    subset: Subset
    repair: bool
    dry_run: bool
    yes: bool
    n_workers: int
    is_bare: bool
    n_blocks: int = 0


def _parse_subset(text: str | None, seed: int) -> Subset:
    """Parse a share of the blocks: "5%" or "0.05%".

    Raises:
        ConfigError: the text is not a share, or a seed is given without a share.
    """
    if text is None:
        if seed:
            raise ConfigError("applies to --subset; give both", field="--seed")
        return ALL
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{text!r} is not accepted; write a share of the blocks, such as 5%", field="--subset")
    return Subset(share, seed)


def _how_to_continue(work: _Work) -> str:
    done = f"{counted(work.n_blocks)} checked"
    if work.repair:
        done += "; bad blocks are deleted at the end"
    return f"{done}; run it again to start over (with --subset and --seed, a run checks only a part)"


def _verify_place(place: Place, work: _Work, *, asks: bool) -> Verified:
    started_at = time.monotonic()
    with place.open() as store, Ticker(f"verifying {place.name}", unit="bytes") as ticker:

        def on_progress(report: VerifyReport) -> None:
            work.n_blocks = before + report.blocks
            ticker.count(report.bytes)

        before = work.n_blocks
        report = verify_blocks(store, workers=work.n_workers, subset=work.subset, on_progress=on_progress)
    took_s = time.monotonic() - started_at
    total = Verified(
        tier=place.name,
        where=place.where,
        subset=work.subset.share,
        dry_run=work.dry_run,
        bytes_per_s=round(report.bytes / max(1e-9, took_s)),
        **vars(report),
    )
    if work.repair and total.bad > total.kept:
        total.stopped = not _may_remove(place, total, yes=work.yes, asks=asks)
        if not total.stopped:
            with place.open(writes=True) as store:
                fixed = repair(store, report.bad_blocks)
            total.removed, total.good_again = fixed.removed, fixed.good_again
            total.failed += fixed.failed
    if not work.is_bare:
        total.misses = misses_of(place.config, total.seals)
        total.unknown_keys = unknown_keys(total.seals, key_ids(place.config))
    total.seconds = round(time.monotonic() - started_at, 3)
    return total


def _may_remove(place: Place, total: VerifyReport, *, yes: bool, asks: bool) -> bool:
    """Whether bad blocks may be removed. Asks if there are so many that this machine may be at fault."""
    bad = total.bad - total.kept
    is_few = bad <= UNASKED_BLOCKS_MAX or bad <= UNASKED_SHARE_MAX * total.blocks
    if yes or (is_few and total.bad < total.blocks):
        return True
    if not asks or sys.stdin is None or not sys.stdin.isatty():
        return False
    return confirm(f"{place.name}: {_doubt(bad, total.blocks)} Remove {counted(bad)}?")


def _doubt(bad: int, blocks: int) -> str:
    return (
        f"{bad:,} of {counted(blocks)} are bad. Often the cause is not the storage but the machine that reads (memory, "
        f"network, proxy; this is {socket.gethostname()}). Run verify on another machine first."
    )


def _show(result: Verified) -> None:
    speed = f"{human_bytes(result.bytes_per_s)}/s"
    size = human_bytes(result.bytes)
    what = counted(result.blocks)
    part = "" if result.subset == 1 else f" (a subset of {result.subset * 100:.4g}%)"
    say(f"{result.tier} at {result.where}: {what}, {size} checked{part} at {speed}")
    for reason, count in Counter(result.bad_blocks.values()).items():
        say(f"  bad ({reason}): {counted(count)}")
    for key, reason in islice(result.bad_blocks.items(), BAD_SHOWN_MAX):
        say(f"    {key} ({reason})")
    if result.bad > BAD_SHOWN_MAX:
        say(f"    … and {result.bad - BAD_SHOWN_MAX:,} more; --json names them")
    if result.removed:
        say(f"  deleted: {counted(result.removed)}")
    if result.good_again:
        say(f"  good or gone when read again (replaced, or read wrongly before): {counted(result.good_again)}")
    if result.stopped:
        say(f"  nothing was removed: {_doubt(result.bad - result.kept, result.blocks)}")
        say("  If it finds the same blocks bad, repeat this command with --yes.")
    if result.dry_run and (would := result.bad - result.kept):
        say(f"  would be deleted: {counted(would)}")
    for reason, count in result.misses.items():
        say(f"  misses for engines with this configuration: {counted(count)} {reason}")
    if result.unknown_keys:
        say("  fix: add the key to this tier's keys, after the first one; or remove these blocks (docs/security.md)")
    if result.foreign:
        say(f"  from another version, not verified: {counted(result.foreign)}")
    if result.failed:
        say(f"  could not be read: {counted(result.failed)}")
    if not result.bad and not result.failed:
        if not result.blocks:
            say("  there are no blocks to verify")
        elif not result.foreign:
            say("  all blocks are intact" + (", but not all can be loaded" if result.misses else ""))
        elif result.foreign < result.blocks:
            say("  all other blocks are intact")
