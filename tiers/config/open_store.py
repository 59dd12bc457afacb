"""Build a tier's store from its options: for the tiers, and for tools that run without an engine.

The store's module is imported here, not at the top, so that a process loads only the clients it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..store import Store
from .tier_options import (
    FsspecTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
)

#: A function that makes a store, and its keyword arguments.
Recipe = tuple[Callable[..., Store], dict[str, Any]]


def store_recipe(config: TierConfig) -> Recipe:
    """The store's class (or a function that makes the store) and its keyword arguments.

    Raises:
        ConfigError: the tier type has no built-in store, or the options do not fit.
    """
    if isinstance(config, FsTierConfig):
        from ..stores.files.local import LocalStore

        return LocalStore, _folder_options(config)
    if isinstance(config, NfsTierConfig):
        from ..stores.files.nfs import NfsStore

        return NfsStore, _folder_options(config)
    if isinstance(config, MemoryTierConfig):
        from ..stores.memory import MemoryStore

        return MemoryStore, {"max_bytes": config.max_bytes}
    if isinstance(config, S3TierConfig):
        from ..stores.s3.store import S3Store

        return S3Store, {"options": config.store_options()}
    if isinstance(config, FsspecTierConfig):
        from ..stores.fsspec import FsspecStore

        options = {"url": config.url, "storage_options": config.storage_options, "read_only": config.read_only}
        return FsspecStore, options
    if isinstance(config, StoreTierConfig):
        from ..stores.custom import make_custom_store

        return make_custom_store, {"module_path": config.module_path, "options": config.options}
    raise ConfigError(f"{config.type!r} is not a type with a built-in store", field="type")


def _folder_options(config: FsTierConfig | NfsTierConfig) -> dict[str, Any]:
    return {"root_dir": config.root_dir, "read_only": config.read_only, "min_free_bytes": config.min_free}


def tool_recipe(config: TierConfig, *, read_only: bool = False) -> Recipe:
    """Like ``store_recipe``, for tools.

    The store keeps no reserve of free space, because a tool that frees space must be able to write.

    Args:
        read_only: open the store read-only even if the tier may write, so that opening it creates nothing.
    """
    make_store, options = store_recipe(config)
    for_tools = {"min_free_bytes": 0} | ({"read_only": True} if read_only else {})
    return make_store, options | {name: value for name, value in for_tools.items() if name in options}


def open_tool_store(config: TierConfig, *, read_only: bool = False) -> Store:
    """Open the store that ``tool_recipe`` describes."""
    make_store, options = tool_recipe(config, read_only=read_only)
    return make_store(**options)


def open_store(config: TierConfig) -> Store:
    """Open a tier's store without the tier (no threads, no worker process), for a tool that may write."""
    make_store, options = store_recipe(config)
    return make_store(**options)
