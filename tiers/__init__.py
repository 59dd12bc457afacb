"""kvtiers' tiers: KV blocks in local files, NFS, S3 and any fsspec URL. Imports neither vLLM nor torch.

Start reading at ``tiers.store``. The names a tier's user or author needs are here.
"""

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
