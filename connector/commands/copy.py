"""``kvtiers warm`` and ``kvtiers migrate``: copy blocks from one tier to another."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...tiers.builtin import record_keys
from ...tiers.capacity.walker import listed_bytes
from ...tiers.capacity.written import Writer, used_bytes
from ...tiers.config.open_store import open_store, open_tool_store
from ...tiers.config.places import place_of
from ...tiers.config.tier_options import BoundedTierConfig, FsTierConfig, NfsTierConfig, TierConfig
from ...tiers.errors import ConfigError, StoreError
from ...tiers.store import Store, SupportsSpace
from ...tiers.stores.memory import MemoryStore
from ...tiers.tools.copying import Copier, CopyReport, RateLimit, find_blocks
from .options import AsJson, Config, size_option
from .output import Ticker, answer, complain, counted, human_bytes, refuse, say
from .places import Place, find_places
from .session import ExitCode, session

From = Annotated[str | None, typer.Option("--from", help="The tier to copy from.")]
To = Annotated[str | None, typer.Option("--to", help="The tier to copy to.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be copied; write nothing.")]
LimitRate = Annotated[
    str | None, typer.Option(help="Copy at most this many bytes per second, such as 50MiB or 50MiB/s.")
]


def warm(
    config: Config,
    from_tier: From = None,
    to_tier: To = None,
    namespace: Annotated[str | None, typer.Option(help="Copy only this namespace (the first column of du).")] = None,
    names: Annotated[
        Path | None,
        typer.Option(help="Copy only blocks whose names start with one of the lines of this file; - reads stdin."),
    ] = None,
    limit_rate: LimitRate = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy blocks from a far tier (default: the last) to a near tier (default: the first) until that tier is full."""
    places = find_places(config, None, tells=from_tier is None or to_tier is None)
    source, target = _choose(places, from_tier, -1), _choose(places, to_tier, 0)
    if len(places) == 1:
        raise refuse(
            f"{config} has only one tier that outlives its process, {source.name}; add a second tier to the file, or "
            f"copy from another place with kvtiers migrate SOURCE {config}",
        )
    if namespace is not None and names is not None:
        raise refuse("--namespace and --names are mutually exclusive")
    prefixes = _read_names(names) if names is not None else [f"{namespace}_r" if namespace else ""]
    _copy(source, target, prefixes, _How(as_json, dry_run, _rate(limit_rate), may_fill=True))


def migrate(
    config: Config,
    target_config: Annotated[
        str | None, typer.Argument(help="The target's YAML file, folder or URL; default: the same file.")
    ] = None,
    from_tier: From = None,
    to_tier: To = None,
    limit_rate: LimitRate = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy all blocks from one tier to another, in the same or another file. Removes nothing from the source."""
    by_default = from_tier is None or (to_tier is None and target_config is None)
    places = find_places(config, None, tells=by_default)
    source = _choose(places, from_tier, 0)
    targets = places if target_config is None else find_places(target_config, None, tells=to_tier is None)
    target = _choose(targets, to_tier, -1)
    _copy(source, target, [""], _How(as_json, dry_run, _rate(limit_rate), may_fill=False))


@dataclass(frozen=True, slots=True)
class _How:
    """How to copy.

    Attributes:
        may_fill: a full target is success, as for warm, which filled it. For migrate, which is then incomplete, it is
            a failure.
    """

    as_json: bool
    dry_run: bool
    rate: RateLimit | None
    may_fill: bool


def _rate(text: str | None) -> RateLimit | None:
    if text is None:
        return None
    bytes_per_s = size_option("--limit-rate", text.removesuffix("/s"))
    if not bytes_per_s:
        raise ConfigError("0 bytes per second would copy nothing; write 1MiB or more", field="--limit-rate")
    return RateLimit(bytes_per_s)


def _choose(places: list[Place], name: str | None, default: int) -> Place:
    if name is None:
        return places[default]
    for place in places:
        if place.name == name:
            return place
    raise refuse(f"no tier {name!r}; accepted: {', '.join(place.name for place in places)}")


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


def _copy(source: Place, target: Place, prefixes: Sequence[str], how: _How) -> None:
    dry_run = how.dry_run
    if _is_one_place(source, target):
        raise refuse(f"{source.name} and {target.name} are the same place, {source.where}; choose two tiers")
    if target.read_only:
        raise refuse(f"{target.name} is read_only; choose a tier that is not")
    protections = source.config.encrypt, target.config.encrypt
    if protections[0] != protections[1]:
        kinds = f"{source.name} has {protections[0]}, {target.name} {protections[1]}"
        raise refuse(f"both tiers must have the same encrypt, or engines find no blocks ({kinds})")
    started_at = time.monotonic()
    try:
        with source.open() as from_store:
            to_store, room = _look_into_target(target) if dry_run else _open_target(target)
            try:
                total = _estimated_bytes(from_store) if prefixes == [""] else None
                with Ticker(f"{source.name} to {target.name}", total, unit="bytes") as ticker:
                    progress = _Progress(target, to_store, ticker, dry_run=dry_run)
                    copier = Copier(
                        from_store,
                        to_store,
                        room_bytes=room,
                        dry_run=dry_run,
                        rate=how.rate,
                        on_progress=progress.show,
                    )
                    session().if_interrupted = lambda: _how_to_continue(copier.report)
                    report = copier.copy(find_blocks(from_store, prefixes))
                    progress.end()
            finally:
                to_store.close()
    except (StoreError, ConfigError) as e:
        complain(f"{source.name} at {source.where} to {target.name} at {target.where}: {e}")
        raise typer.Exit(ExitCode.BAD_INPUT if isinstance(e, ConfigError) else ExitCode.FAILED) from e
    result = {"from": source.where, "to": target.where, **asdict(report)}
    result["seconds"] = round(time.monotonic() - started_at, 3)
    if not how.as_json:
        _show(result)
    for left_out, why in report.left_out.items():
        complain(f"{left_out} is skipped: {why}")
    damaged = getattr(from_store, "damaged", 0)
    if damaged:
        complain(f"{source.name} at {source.where} has {damaged} folders or files that cannot be read")
    found_none = report.found_none and prefixes != [""]
    if found_none and not damaged:
        complain(f"{source.name} at {source.where} has no block with such a name; du shows the namespaces")
    failed = damaged or found_none or report.bad or report.errors or (report.no_room and not how.may_fill)
    if how.as_json:
        answer(result, ok=not failed)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _estimated_bytes(store: Store) -> int | None:
    """What the collector's records say, for the time left; a listing would be exact, but may take minutes."""
    try:
        return used_bytes(store)
    except StoreError:
        return None


def _how_to_continue(report: CopyReport) -> str:
    if report.dry_run:
        return "nothing was changed"
    done = f"{counted(report.copied)}, {human_bytes(report.copied_bytes)} copied"
    return f"{done}; run the same command again to continue: it skips blocks that the target has"


def _open_target(place: Place) -> tuple[Store, int | None]:
    """Open the target's store, which keeps its reserve of free space. Also return how many bytes may be copied.

    What is left of ``max_bytes`` follows from the collector's records; without any, from a listing.
    """
    config = place.config
    store = open_store(config)
    try:
        return store, _room_below_bound(config, store)
    except BaseException:
        store.close()
        raise


def _room_below_bound(config: TierConfig, store: Store) -> int | None:
    if not isinstance(config, BoundedTierConfig) or config.max_bytes is None:
        return None
    used = used_bytes(store, keys=record_keys(config))
    return max(0, config.max_bytes - (listed_bytes(store) if used is None else used))


class _Progress:
    """Shows a copy's progress, and publishes what it puts, as every writer of a bounded root does."""

    def __init__(self, target: Place, store: Store, ticker: Ticker, *, dry_run: bool) -> None:
        policy = None if dry_run else target.policy
        self._ticker = ticker
        self._noted_bytes = 0
        self._writer: Writer | None = None
        if policy is not None and policy.max_bytes is not None:
            self._writer = Writer(store, poll_s=policy.poll_s, keys=record_keys(target.config))

    def show(self, report: CopyReport) -> None:
        _tell(self._ticker, report)
        if self._writer is not None:
            self._writer.note_put(report.copied_bytes - self._noted_bytes)
            self._noted_bytes = report.copied_bytes
            self._writer.full()

    def end(self) -> None:
        """Publish the rest."""
        if self._writer is not None:
            self._writer.poll()


def _look_into_target(place: Place) -> tuple[Store, int | None]:
    """Like ``_open_target``, but writes nothing. A missing root folder counts as empty: a copy would create it."""
    config = place.config
    if isinstance(config, FsTierConfig | NfsTierConfig) and not os.path.lexists(config.root_dir):
        store: Store = MemoryStore()
    else:
        store = open_tool_store(config, read_only=True)
    try:
        rooms = []
        if isinstance(config, FsTierConfig | NfsTierConfig) and isinstance(store, SupportsSpace):
            space = store.space()
            rooms += [] if space is None else [space[0] - config.min_free]
        if (room := _room_below_bound(config, store)) is not None:
            rooms.append(room)
        return store, max(0, min(rooms)) if rooms else None
    except BaseException:
        store.close()
        raise


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


def _tell(ticker: Ticker, report: CopyReport) -> None:
    ticker.tell(report.seen_bytes, f"{counted(report.copied)}, {human_bytes(report.copied_bytes)} copied")


def _show(result: dict[str, Any]) -> None:
    speed = human_bytes(result["copied_bytes"] / max(1e-9, result["seconds"]))
    say(f"{result['from']} to {result['to']}:")
    if result["dry_run"]:
        say(f"  would be copied: {counted(result['copied'])}, {human_bytes(result['copied_bytes'])}")
    else:
        say(f"  copied: {counted(result['copied'])}, {human_bytes(result['copied_bytes'])} at {speed}/s")
    for name, text in (
        ("present", "already present"),
        ("bad", "not copied, because the seal is bad or from a newer version (see kvtiers verify)"),
        ("errors", "could not be read or written"),
    ):
        if result[name]:
            say(f"  {text}: {counted(result[name])}")
    if result["no_room"]:
        would = "would stop" if result["dry_run"] else "stopped"
        say(f"  {would}: the target is full (max_bytes, or its reserve of free space)")
