"""From a tier's options to its store: for the tiers themselves, and for tools that need no engine.

The store's module is imported here and not before, so that a process pays only for the clients it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvtiers.tiers.blocks.file_mapper import FORMAT_VLLM_RAW
from kvtiers.tiers.config.tier_options import (
    FsspecTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
)
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store

logger = get_logger(__name__)

C = TypeVar("C", bound=TierConfig)


def store_recipe(config: TierConfig) -> tuple[Callable[..., Store], dict[str, Any]]:
    """The store's class, or a function that makes one, and its arguments.

    Raises:
        ConfigError: there is no such store.
    """
    if isinstance(config, FsTierConfig):
        options = _folder_options(config) | {"durability": config.durability}
        if config.format == FORMAT_VLLM_RAW:
            from kvtiers.tiers.stores.files.vllm_raw import VllmRawStore

            return VllmRawStore, options | {"unverified": config.unverified}
        from kvtiers.tiers.stores.files.local import LocalStore

        return LocalStore, options
    if isinstance(config, NfsTierConfig):
        from kvtiers.tiers.stores.files.nfs import NfsStore

        return NfsStore, _folder_options(config)
    if isinstance(config, MemoryTierConfig):
        from kvtiers.tiers.stores.memory import MemoryStore

        return MemoryStore, {"max_bytes": config.max_bytes}
    if isinstance(config, S3TierConfig):
        from kvtiers.tiers.stores.s3.store import S3Store

        if config.embedded:
            raise ConfigError("only kvtiers demo has such a server; give an endpoint_url", field="embedded")
        return S3Store, {"options": config.store_options()}
    if isinstance(config, FsspecTierConfig):
        from kvtiers.tiers.stores.fsspec import FsspecStore

        options = {"url": config.url, "storage_options": config.storage_options, "read_only": config.read_only}
        return FsspecStore, options
    if isinstance(config, StoreTierConfig):
        from kvtiers.tiers.stores.custom import make_custom_store

        return make_custom_store, {"module_path": config.module_path, "options": config.options}
    raise ConfigError(f"{config.type!r} has no store of ours", field="type")


def for_engine(config: C, name: str = "", why: str = "") -> C:
    """A tier's options for a store in the engine's own process, which no server's answer may end.

    obstore allocates what an answer's Content-Length says, and aborts its process where that cannot be had. So boto3
    takes its place, with the bounds of ``tiers.stores.s3.boto_http``.

    Args:
        name: whose store it is; "": this was logged before.
        why: the store is in this process.
    """
    if not isinstance(config, S3TierConfig) or config.client != "obstore":
        return config
    if name:
        logger.warning(
            "%s: boto3 moves blocks instead of obstore, at more CPU time: in the engine's own process (%s) a server's "
            "answer could make obstore abort the engine. Set isolation: process where workers can be had, or client: "
            "boto3",
            name,
            why,
        )
    return config.model_copy(update={"client": "boto3"})


def _folder_options(config: FsTierConfig | NfsTierConfig) -> dict[str, Any]:
    return {"root_dir": config.root_dir, "read_only": config.read_only, "min_free_bytes": config.min_free}


def tool_recipe(config: TierConfig, *, read_only: bool = False) -> tuple[Callable[..., Store], dict[str, Any]]:
    """As ``store_recipe``, for tools: without the reserve of free space, because what makes room must not be refused
    for want of it, and with blocks that have no seal, which a tool is to count.

    Args:
        read_only: the tool only looks, whatever the tier may: opening its store leaves nothing there.
    """
    make_store, options = store_recipe(config)
    for_tools = {"min_free_bytes": 0, "unverified": "allow"} | ({"read_only": True} if read_only else {})
    return make_store, options | {name: value for name, value in for_tools.items() if name in options}


def open_tool_store(config: TierConfig, *, read_only: bool = False) -> Store:
    """The store of ``tool_recipe``."""
    make_store, options = tool_recipe(config, read_only=read_only)
    return make_store(**options)


def open_store(config: TierConfig) -> Store:
    """A tier's store for a tool that may write, without the tier: no threads, and no process of its own."""
    make_store, options = store_recipe(config)
    return make_store(**options)
