"""``kvtiers copy``: copies blocks from one tier to another."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...tiers.capacity.walker import listed_bytes
from ...tiers.capacity.written import Writer, used_bytes
from ...tiers.config.open_store import open_store, open_tool_store
from ...tiers.config.places import place_of
from ...tiers.config.tier_options import BoundedTierConfig, FsTierConfig, NfsTierConfig, TierConfig
from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError, StoreError
from ...tiers.store import Store, SupportsSpace
from ...tiers.stores.memory import MemoryStore
from ...tiers.tools.copying import Copier, CopyReport, RateLimit, find_blocks
from ...tiers.tools.inventory import unreadable_count
from .options import AsJson, Config, DryRun, size_option
from .output import Ticker, answer, complain, counted, refuse, say
from .places import Place, find_places
from .session import ExitCode, session


@dataclass(kw_only=True)
class Copied(CopyReport):
    """Result of a copy.

    Attributes:
        source, target: folder, bucket or URL.
    """

    source: str
    target: str
    seconds: float


def copy(
    config: Config,
    target_config: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="The target's YAML file, folder or URL. Default: the same file."),
    ] = None,
    from_tier: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="The tier to copy from. Default: the only tier of the file."),
    ] = None,
    to_tier: Annotated[
        str | None,
        typer.Option("--to", metavar="NAME", help="The tier to copy to. Default: the only tier of the target's file."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Copy only this namespace (the first column of du).")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Copy only blocks whose names start with a line of this file; - reads stdin."
        ),
    ] = None,
    until_full: Annotated[
        bool,
        typer.Option("--until-full", help="Exit with 0 if the target becomes full, as when a near tier is filled."),
    ] = False,
    limit_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Copy at most this many bytes per second, such as 50MiB.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy blocks from one tier to another, in the same or another file. Removes nothing from the source.

    Exits with 1 unless all blocks are in the target at the end. Run again, it copies the blocks that are missing.
    """
    places = find_places(config, None, tells=from_tier is None)
    targets = places if target_config is None else find_places(target_config, None, tells=to_tier is None)
    if target_config is None and len(places) == 1:
        raise refuse(
            f"{config} has only one tier that commands can read, {places[0].name}; give a TARGET, or add a second "
            "tier to the file"
        )
    source, target = _choose(places, from_tier, "--from"), _choose(targets, to_tier, "--to")
    if namespace is not None and names is not None:
        raise refuse("--namespace and --names are mutually exclusive")
    prefixes = _read_names(names) if names is not None else [f"{namespace}_r" if namespace else ""]
    _check_may_copy(source, target)
    rate = _rate(limit_rate)
    started_at = time.monotonic()
    try:
        report, damaged = _copy(source, target, prefixes, dry_run=dry_run, rate=rate)
    except (StoreError, ConfigError) as e:
        complain(f"{source.name} at {source.where} to {target.name} at {target.where}: {e}")
        raise typer.Exit(ExitCode.BAD_INPUT if isinstance(e, ConfigError) else ExitCode.FAILED) from e
    seconds = round(time.monotonic() - started_at, 3)
    result = Copied(**asdict(report), source=source.where, target=target.where, seconds=seconds)
    if not as_json:
        _show(result)
    for left_out, why in report.left_out.items():
        complain(f"{left_out} is skipped: {why}")
    if damaged:
        complain(f"{source.name} at {source.where} has {damaged} folders or files that cannot be read")
    found_none = report.found_none and prefixes != [""]
    if found_none and not damaged:
        complain(f"{source.name} at {source.where} has no block with such a name; du shows the namespaces")
    left = report.bad or report.failed or report.skipped or (report.no_room and not until_full)
    failed = damaged or found_none or left
    if as_json:
        answer(result, ok=not failed)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _rate(text: str | None) -> RateLimit | None:
    if text is None:
        return None
    bytes_per_s = size_option("--limit-rate", text.removesuffix("/s"))
    if not bytes_per_s:
        raise ConfigError("0 bytes per second would copy nothing; write 1MiB or more", field="--limit-rate")
    return RateLimit(bytes_per_s)


def _choose(places: list[Place], name: str | None, option: str) -> Place:
    """The tier of a name. It may be left out where there is only one, so that no direction is ever guessed."""
    if name is None and len(places) == 1:
        return places[0]
    for place in places:
        if place.name == name:
            return place
    wrong = "say which tier" if name is None else f"no tier {name!r}"
    raise refuse(f"{option}: {wrong}; accepted: {', '.join(place.name for place in places)}")


def _read_names(path: Path) -> list[str]:
    try:
        if str(path) == "-" and sys.stdin is None:
            raise OSError("standard input is closed")
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise refuse(f"--names: {e}") from e
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise refuse(f"--names: {path} is empty; write the beginning of a block's name on each line")
    return names


def _check_may_copy(source: Place, target: Place) -> None:
    if _is_one_place(source, target):
        raise refuse(f"{source.name} and {target.name} are the same place, {source.where}; choose two tiers")
    if target.read_only:
        raise refuse(f"{target.name} is read_only; choose a tier that is not")
    protections = source.config.encrypt, target.config.encrypt
    if protections[0] != protections[1]:
        kinds = f"{source.name} has {protections[0]}, {target.name} {protections[1]}"
        raise refuse(f"both tiers must have the same encrypt, or engines find no blocks ({kinds})")


def _copy(
    source: Place, target: Place, prefixes: Sequence[str], *, dry_run: bool, rate: RateLimit | None
) -> tuple[CopyReport, int]:
    """Copy. Also returns the number of folders and files that could not be read."""
    with source.open() as from_store, closing(_open_target(target, dry_run=dry_run)) as to_store:
        room = _room(target.config, to_store, dry_run=dry_run)
        total = _estimated_bytes(from_store) if prefixes == [""] else None
        with Ticker(f"{source.name} to {target.name}", total, unit="bytes") as ticker:
            progress = _Progress(target, to_store, ticker, dry_run=dry_run)
            copier = Copier(
                from_store, to_store, room_bytes=room, dry_run=dry_run, rate=rate, on_progress=progress.show
            )
            session().if_interrupted = lambda: _how_to_continue(copier.report)
            report = copier.copy(find_blocks(from_store, prefixes))
            progress.end()
    return report, unreadable_count(from_store)


def _estimated_bytes(store: Store) -> int | None:
    """Stored bytes by the collector's records, for the time left. A listing would be exact but slow."""
    try:
        return used_bytes(store)
    except StoreError:
        return None


def _how_to_continue(report: CopyReport) -> str:
    if report.dry_run:
        return "nothing was changed"
    done = f"{counted(report.copied)}, {human_bytes(report.copied_bytes)} copied"
    return f"{done}; run the same command again to continue: it skips blocks that the target has"


def _open_target(place: Place, *, dry_run: bool) -> Store:
    """Open the target's store, which keeps its reserve of free space.

    A dry run writes nothing. A missing root folder then counts as empty: a copy would create it.
    """
    config = place.config
    if not dry_run:
        return open_store(config)
    if isinstance(config, FsTierConfig | NfsTierConfig) and not os.path.lexists(config.root_dir):
        return MemoryStore()
    return open_tool_store(config, read_only=True)


def _room(config: TierConfig, store: Store, *, dry_run: bool) -> int | None:
    """Number of bytes that may be copied; None: no limit is known.

    What is left of ``max_bytes`` follows from the collector's records; without any, from a listing.
    """
    rooms = []
    if isinstance(config, BoundedTierConfig) and config.max_bytes is not None:
        used = used_bytes(store)
        rooms.append(config.max_bytes - (listed_bytes(store) if used is None else used))
    if dry_run and isinstance(config, FsTierConfig | NfsTierConfig) and isinstance(store, SupportsSpace):
        space = store.space()  # a store that may write looks at it itself
        rooms += [] if space is None else [space[0] - config.min_free]
    return max(0, min(rooms)) if rooms else None


class _Progress:
    """Shows a copy's progress, and publishes the put bytes, as every writer of a bounded root does."""

    def __init__(self, target: Place, store: Store, ticker: Ticker, *, dry_run: bool) -> None:
        policy = None if dry_run else target.policy
        self._ticker = ticker
        self._noted_bytes = 0
        self._writer: Writer | None = None
        if policy is not None and policy.max_bytes is not None:
            self._writer = Writer(store, poll_s=policy.poll_s)

    def show(self, report: CopyReport) -> None:
        text = f"{counted(report.copied)}, {human_bytes(report.copied_bytes)} copied"
        self._ticker.tell(report.seen_bytes, text)
        if self._writer is not None:
            self._writer.note_put(report.copied_bytes - self._noted_bytes)
            self._noted_bytes = report.copied_bytes
            self._writer.full()

    def end(self) -> None:
        """Publish the rest."""
        if self._writer is not None:
            self._writer.poll()


def _is_one_place(one: Place, other: Place) -> bool:
    place, another_place = place_of(one.config), place_of(other.config)
    if place is not None and another_place is not None and place.is_same(another_place):
        return True
    folder, another = (getattr(place.config, "root_dir", None) for place in (one, other))
    try:
        return (
            folder is not None and another is not None and os.path.samefile(folder, another)
        )  # such as two mounts of one folder
    except OSError:
        return False  # one does not exist yet


def _show(result: Copied) -> None:
    what = f"{counted(result.copied)}, {human_bytes(result.copied_bytes)}"
    say(f"{result.source} to {result.target}:")
    if result.dry_run:
        say(f"  would be copied: {what}")
    else:
        say(f"  copied: {what} at {human_bytes(result.copied_bytes / max(1e-9, result.seconds))}/s")
    for count, text in (
        (result.present, "already present"),
        (result.bad, "not copied, because the seal is bad or from a newer version (see kvtiers verify)"),
        (result.failed, "failed, because they could not be read or written, or the target has a newer version's block"),
        (result.skipped, "not copied, because their namespace is skipped"),
    ):
        if count:
            say(f"  {text}: {counted(count)}")
    if result.no_room:
        would = "would stop" if result.dry_run else "stopped"
        say(f"  {would}: the target is full (max_bytes, or its reserve of free space)")
