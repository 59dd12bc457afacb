"""Shared parts of the commands: opening a configuration's tiers as stores, output, progress, and exit codes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtiers.connector.prefixes.chunks import ChunkStore
from kvtiers.connector.prefixes.limits import PrefixLimits
from kvtiers.connector.prefixes.place import place_of_prefixes
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.config.deployment import load_config
from kvtiers.tiers.config.open_store import open_tool_store, tool_recipe
from kvtiers.tiers.config.tier_options import (
    BoundedTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    TierConfig,
)
from kvtiers.tiers.errors import ConfigError, StoreConfigError, printable, printable_lines
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.posix import store_error

EXIT_FAILED = 1  # the command ran and found something wrong
EXIT_BAD_INPUT = 2
QUIET_S = 2.0  # faster work shows no progress
TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """One tier's storage.

    Attributes:
        name: the tier's name, or its type if it has no name.
        where: folder, bucket or URL.
    """

    name: str
    config: TierConfig
    where: str

    @property
    def read_only(self) -> bool:
        """Whether the tier is configured not to write."""
        return isinstance(self.config, BoundedTierConfig) and self.config.read_only

    @contextmanager
    def open(self, *, writes: bool = False) -> Iterator[Store]:
        """Open the tier's store, and close it at the end.

        Args:
            writes: the command may write or remove. If False, opening writes nothing, not even the file that asks a
                file server for its time.

        Raises:
            StoreError: the store cannot be opened, or its folder does not exist. Commands do not create the folder: it
                would belong to the command's user instead of the engine's, and the path may be a mistake.
        """
        if isinstance(self.config, FsTierConfig | NfsTierConfig):
            _check_is_there(self.config.root_dir, "root_dir")
        with closing(open_tool_store(self.config, read_only=not writes)) as store:
            yield store

    @property
    def policy(self) -> CapacityPolicy | None:
        """The tier's limits; None if it has none, or none that a command may enforce."""
        return self.config.capacity_policy() if isinstance(self.config, BoundedTierConfig) else None


class PrefixPlace(Place):
    """The prefixes that SharedStorageConnector keeps beside a tier's blocks."""

    @contextmanager
    def open(self, *, writes: bool = False) -> Iterator[Store]:
        """Open a store whose blocks are the chunks of prefixes."""
        with super().open(writes=writes) as store:
            yield ChunkStore(store)

    @property
    def policy(self) -> CapacityPolicy | None:
        assert isinstance(self.config, BoundedTierConfig)
        limits = PrefixLimits.of(self.config)
        return None if limits is None else limits.policy


def _check_is_there(folder: str, name: str) -> None:
    try:
        os.lstat(folder)
    except FileNotFoundError:
        raise StoreConfigError(f"{name} {folder!r} is not there; an engine makes it when it starts") from None
    except OSError as e:
        raise store_error(e, "") from e


def find_prefixes(config: Path, tier: str | None, tell: Callable[[str], None]) -> list[Place]:
    """Find the prefixes of SharedStorageConnector beside the blocks of ``find_places``.

    Raises:
        ConfigError: see ``find_places``; or none of these tiers can hold prefixes.
    """
    found: list[Place] = []
    reasons = []
    for place in find_places(config, tier, tell):
        try:
            prefixes = place_of_prefixes(place.config)
        except ConfigError as e:
            reasons.append(f"{place.name}: {e}")
            continue
        found.append(PrefixPlace(place.name, prefixes, _where(prefixes)))
    if not found:
        raise ConfigError(f"{config} has no place for prefixes: {'; '.join(reasons)}", field="--prefixes")
    return found


def find_places(config: Path, tier: str | None, tell: Callable[[str], None]) -> list[Place]:
    """Find the tiers of a YAML file whose storage outlives a process.

    Args:
        tier: name of the only tier to return; None: all tiers.
        tell: called with a message that names the skipped tiers, if ``tier`` is None.

    Raises:
        ConfigError: the file is not accepted, there is no such tier, or commands cannot open its store.
    """
    found = []
    others = []
    for one in load_config(config, SecondaryTierFactory.tier_types()).tiers:
        if not isinstance(one, TierConfig):
            others.append(one.type)
        elif not isinstance(one, MemoryTierConfig):
            found.append(Place(one.name or one.type, one, _where(one)))
    if not found:
        what = "whose storage outlives its process"
        if others:
            what = f"that commands can read: {', '.join(others)} is not a tier type of kvtiers"
        raise ConfigError(f"{config} has no tier {what}", field="tiers")
    if others and tier is None:
        tell(f"skipped: {', '.join(others)}, which is not a tier type of kvtiers")
    if tier is not None:
        names = ", ".join(place.name for place in found)
        found = [place for place in found if place.name == tier]
        if not found:
            raise ConfigError(f"no tier {tier!r} in {config}; accepted: {names}", field="--tier")
    for place in found:
        tool_recipe(place.config)  # fail now, not in the middle of the command, if tools cannot open this store
    return found


def _where(config: TierConfig) -> str:
    options: dict[str, Any] = config.model_dump()
    if "bucket" in options:
        return f"s3://{options['bucket']}/{options['prefix']}".rstrip("/")
    return str(options.get("root_dir") or options.get("url") or options["module_path"])


class Ticker:
    """Shows progress on standard error once the work has taken ``QUIET_S``. Silent if stderr is not a terminal.

    Args:
        what: the work, in a few words.
        total: total amount of work; None: not known.
        unit: the unit of ``count``.
    """

    def __init__(self, what: str, total: float | None = None, *, unit: str = "") -> None:
        self._unit = unit
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *([BarColumn()] if total is not None else []),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(cell(what), total=total, done="")
        self._started_at = self._told_at = time.monotonic()
        self._shown = False

    def __enter__(self) -> Ticker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def count(self, done: int) -> None:
        """Show that ``done`` units are done."""
        self.tell(done, f"{done:,} {self._unit}")

    def tell(self, done: float, text: str) -> None:
        """Show ``text`` as the progress. Cheap enough to call for every thousandth blob."""
        now = time.monotonic()
        if now - self._started_at < QUIET_S or now - self._told_at < TICK_S:
            return
        self._told_at = now
        if not self._shown:
            self._progress.start()
            self._shown = True
        self._progress.update(self._task, completed=done, done=cell(text))


def make_console() -> Console:
    """Create a console for standard output. In a pipe, lines are not wrapped, so each finding is one line."""
    return Console(soft_wrap=not os.isatty(1))


def say(text: str) -> None:
    """Print to standard output, on one line even if the terminal is narrow."""
    Console(soft_wrap=True).print(printable(text), markup=False, highlight=False)


def cell(text: str) -> str:
    """Escape a text for rich, which would read text in brackets as markup."""
    return escape(printable(text))


def complain(command: str, text: str) -> None:
    """Print to standard error, on one line even if the terminal is narrow."""
    Console(stderr=True, soft_wrap=True).print(
        f"kvtiers {command}: {printable_lines(text)}", markup=False, highlight=False
    )


def refuse(command: str, text: str) -> typer.Exit:
    """Print an error for bad input, and return the exception for the caller to raise."""
    complain(command, text)
    return typer.Exit(EXIT_BAD_INPUT)


def human_bytes(size: float) -> str:
    """Format bytes, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_age(seconds: float) -> str:
    """Format a duration, such as "3d"."""
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / unit_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
