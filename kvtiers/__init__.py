"""KV-cache tiers for LLM servers: local files, NFS, S3 and any fsspec URL behind one verified block format.

This package exports the names that users of tiers and authors of stores need. Each name is imported on first use, so
that a process that needs one module, such as a process of a tier, does not load all of them. To read the code, start at
``kvtiers.tiers.store``. The names for a vLLM configuration are in ``kvtiers.vllm``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtiers.tiers.base import (
        JobMetadata,
        JobResult,
        OffloadingEvent,
        PollingTierManager,
        ReqContext,
        SecondaryTierManager,
    )
    from kvtiers.tiers.blocks.file_mapper import FileMapper
    from kvtiers.tiers.blocks.keys import (
        OffloadKey,
        get_offload_block_hash,
        get_offload_group_idx,
        hash_blocks,
        make_offload_key,
    )
    from kvtiers.tiers.config.deployment import load_config, parse_config
    from kvtiers.tiers.errors import (
        BlobCorruptError,
        BlobNotFoundError,
        ConfigError,
        InvalidKeyError,
        KVTiersError,
        StoreClosedError,
        StoreConfigError,
        StoreError,
        StoreFullError,
        StorePermissionError,
        StoreThrottledError,
        StoreTimeoutError,
        StoreUnavailableError,
    )
    from kvtiers.tiers.registry import SecondaryTierFactory
    from kvtiers.tiers.store import Capabilities, KeyInfo, Store, check_key, client_errors, fill_parts, parts_size

    __version__: str

_MODULES = {
    "tiers.base": (
        "JobMetadata",
        "JobResult",
        "OffloadingEvent",
        "PollingTierManager",
        "ReqContext",
        "SecondaryTierManager",
    ),
    "tiers.blocks.file_mapper": ("FileMapper",),
    "tiers.blocks.keys": (
        "OffloadKey",
        "get_offload_block_hash",
        "get_offload_group_idx",
        "hash_blocks",
        "make_offload_key",
    ),
    "tiers.config.deployment": ("load_config", "parse_config"),
    "tiers.errors": (
        "BlobCorruptError",
        "BlobNotFoundError",
        "ConfigError",
        "InvalidKeyError",
        "KVTiersError",
        "StoreClosedError",
        "StoreConfigError",
        "StoreError",
        "StoreFullError",
        "StorePermissionError",
        "StoreThrottledError",
        "StoreTimeoutError",
        "StoreUnavailableError",
    ),
    "tiers.registry": ("SecondaryTierFactory",),
    "tiers.store": ("Capabilities", "KeyInfo", "Store", "check_key", "client_errors", "fill_parts", "parts_size"),
}

__all__ = [
    "BlobCorruptError",
    "BlobNotFoundError",
    "Capabilities",
    "ConfigError",
    "FileMapper",
    "InvalidKeyError",
    "JobMetadata",
    "JobResult",
    "KVTiersError",
    "KeyInfo",
    "OffloadKey",
    "OffloadingEvent",
    "PollingTierManager",
    "ReqContext",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "Store",
    "StoreClosedError",
    "StoreConfigError",
    "StoreError",
    "StoreFullError",
    "StorePermissionError",
    "StoreThrottledError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "__version__",
    "check_key",
    "client_errors",
    "fill_parts",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "hash_blocks",
    "load_config",
    "make_offload_key",
    "parse_config",
    "parts_size",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = value = importlib.import_module("kvtiers.version").version()
        return value
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"kvtiers.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'kvtiers' has no attribute {name!r}")
