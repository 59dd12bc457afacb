"""Where a command works: the tiers of a YAML file, or a bare folder or URL, opened as stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from ...tiers.capacity.policy import CapacityPolicy
from ...tiers.config.deployment import DeploymentConfig, load_named, parse_config
from ...tiers.config.open_store import open_tool_store, tool_recipe
from ...tiers.config.tier_options import (
    BoundedTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    TierConfig,
    shown_place,
)
from ...tiers.errors import ConfigError, StoreConfigError, public_url
from ...tiers.registry import SecondaryTierFactory
from ...tiers.store import Store
from ...tiers.stores.os_errors import store_error
from ..ranks.place import place_at
from .output import note
from .session import session

BARE_REGION_BYTES = 1 << 30  # of a bare folder or URL, for bench
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
_YAML_ENDINGS = (".yaml", ".yml", ".json")


class FolderMissingError(StoreConfigError):
    """A tier's folder does not exist."""


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
            _check_is_there(self.config.root_dir)
        with closing(open_tool_store(self.config, read_only=not writes)) as store:
            yield store

    @property
    def policy(self) -> CapacityPolicy | None:
        """The tier's limits; None if it has none, or none that a command may enforce."""
        return self.config.capacity_policy() if isinstance(self.config, BoundedTierConfig) else None


def _check_is_there(folder: str) -> None:
    try:
        os.lstat(folder)
    except FileNotFoundError:
        raise FolderMissingError(f"root_dir {folder!r} does not exist; an engine creates it when it starts") from None
    except OSError as e:
        raise store_error(e, "") from e


def find_places(config: str, tier: str | None, *, tells: bool = True) -> list[Place]:
    """Find the tiers of a YAML file whose storage outlives a process, or the tier that a bare folder or URL stands for.

    Args:
        tier: name of the only tier to return; None: all tiers.
        tells: print a note that names the skipped tiers, if ``tier`` is None.

    Raises:
        ConfigError: the file is not accepted, there is no such tier, or commands cannot open its store.
    """
    found = []
    others = []
    for one in load_deployment(config).tiers:
        if not isinstance(one, TierConfig):
            others.append(one.type)
        elif not isinstance(one, MemoryTierConfig):
            found.append(Place(one.name or one.type, one, shown_place(one)))
    if not found:
        why = "a memory tier exists only inside its engine"
        if others:
            why = f"{', '.join(others)} is not a built-in tier type"
        raise ConfigError(f"{_shown(config)} has no tier that commands can read: {why}", field="tiers")
    if others and tier is None and tells:
        tell_skipped(others)
    if tier is not None:
        names = ", ".join(place.name for place in found)
        found = [place for place in found if place.name == tier]
        if not found:
            raise ConfigError(f"no tier {tier!r} in {_shown(config)}; accepted: {names}", field="--tier")
    for place in found:
        tool_recipe(place.config)  # fail now, not in the middle of the command, if tools cannot open this store
    return found


def tell_skipped(types: list[str]) -> None:
    """Print a note that the command skips the tiers of these types."""
    note(f"kvtiers {session().command}: skipping {', '.join(types)}, which is not a built-in tier type")


def is_bare(config: str) -> bool:
    """Whether a config argument is a folder or a URL instead of a YAML file."""
    return _URL.match(config) is not None or os.path.isdir(config)


def load_deployment(config: str) -> DeploymentConfig:
    """Load a YAML file, or describe the deployment that a bare folder or URL stands for: one tier without limits.

    A folder is a tier of type ``fs`` (``nfs`` on an NFS mount), s3:// of type ``s3``, another URL of type ``fsspec``.
    Credentials, keys and the endpoint come from the environment only.

    Raises:
        ConfigError: the file or URL is not accepted.
    """
    if is_bare(config):
        try:
            tier = place_at(config)
        except ConfigError as e:
            raise ConfigError(e.message, field=public_url(config)) from None
        return parse_config({"region": {"size": BARE_REGION_BYTES}}).model_copy(update={"tiers": (tier,)})
    try:
        return load_named(config, SecondaryTierFactory.tier_types())
    except ConfigError as e:
        if config.endswith(_YAML_ENDINGS) or os.path.lexists(config):
            raise
        text = f"{e.message}; accepted is a YAML file, an existing folder, or a URL such as s3://bucket/prefix"
        raise ConfigError(text, field=public_url(e.field)) from None  # perhaps a URL without its colon


def _shown(config: str) -> str:
    return public_url(config) if _URL.match(config) else config
