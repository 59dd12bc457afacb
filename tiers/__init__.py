"""kvtiers' tiers: KV blocks in local files, NFS, S3 and any fsspec URL. Imports neither vLLM nor torch.

Start reading at ``tiers.store``. The names a tier's user or author needs are here; each is imported when it is first
asked for, so that a process that needs one module (a worker of ``tiers.layers.isolate``) does not pay for all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiers.base import JobMetadata, JobResult, OffloadingEvent, ReqContext, SecondaryTierManager
    from tiers.file_mapper import FileMapper
    from tiers.keys import (
        OffloadKey,
        get_offload_block_hash,
        get_offload_group_idx,
        hash_blocks,
        make_offload_key,
    )
    from tiers.registry import SecondaryTierFactory
    from tiers.store import Capabilities, KeyInfo, Store

__all__ = [
    "Capabilities",
    "FileMapper",
    "JobMetadata",
    "JobResult",
    "KeyInfo",
    "OffloadKey",
    "OffloadingEvent",
    "ReqContext",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "Store",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "hash_blocks",
    "make_offload_key",
]

_MODULES = {
    "base": ("JobMetadata", "JobResult", "OffloadingEvent", "ReqContext", "SecondaryTierManager"),
    "file_mapper": ("FileMapper",),
    "keys": ("OffloadKey", "get_offload_block_hash", "get_offload_group_idx", "hash_blocks", "make_offload_key"),
    "registry": ("SecondaryTierFactory",),
    "store": ("Capabilities", "KeyInfo", "Store"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"tiers.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'tiers' has no attribute {name!r}")
