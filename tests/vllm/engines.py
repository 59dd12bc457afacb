"""What vLLM hands to a spec, a tier and a connector, made by hand."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import block_key

BLOCK_TOKENS = 32
PAGE_BYTES = 2048
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
BLOCK_BYTES = PAGE_BYTES * len(LAYERS)


def offloading_config(extra: Mapping[str, Any] | None = None, **changes: Any) -> OffloadingConfig:
    """vLLM's OffloadingConfig of a model with two layers. ``changes`` are fields of it or of ``parallel``."""
    parallel: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    parallel |= {name: changes.pop(name) for name in list(changes) if name in parallel}
    known = {field.name for field in dataclasses.fields(OffloadingConfig)}
    fields = {
        "groups": (OffloadingGroupConfig(tokens_per_block=BLOCK_TOKENS, layer_names=LAYERS, group_id=0),),
        "worker_kv_bytes_per_block": BLOCK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": dict(extra or {}),
        "engine_id": f"test-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig(name="org/model", dtype="float32"),
        "cache": OffloadingCacheConfig(tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(**parallel),
        "kv_cache_layout": "LBHNC",
        **changes,
    }
    return OffloadingConfig(**{name: value for name, value in fields.items() if name in known})


def kv_cache_config(*kinds: KVCacheSpec) -> KVCacheConfig:
    """vLLM's KVCacheConfig of a model with a group of each kind."""
    groups = [KVCacheGroupSpec([f"layer{number}"], kind) for number, kind in enumerate(kinds)]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def attention(kind: type[AttentionSpec], **fields: Any) -> AttentionSpec:
    """One kind of attention in vLLM's words."""
    return kind(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16, **fields)


FULL = attention(FullAttentionSpec)
SLIDING = attention(SlidingWindowSpec, sliding_window=32)
CHUNKED = attention(ChunkedLocalAttentionSpec, attention_chunk_size=64)
MAMBA = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def groups(count: int) -> tuple[OffloadingGroupConfig, ...]:
    """As vLLM makes them of a ``kv_cache_config``."""
    return tuple(
        OffloadingGroupConfig(tokens_per_block=16, layer_names=(f"layer{number}",), group_id=number)
        for number in range(count)
    )


def kv_caches(num_blocks: int) -> tuple[list[torch.Tensor], CanonicalKVCaches]:
    """Two layers' KV tensors with distinct bytes, and vLLM's canonical form of them."""
    tensors = [
        torch.randint(-128, 127, (num_blocks, PAGE_BYTES), dtype=torch.int8, generator=torch.Generator().manual_seed(i))
        for i in range(len(LAYERS))
    ]
    canonical = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=PAGE_BYTES) for tensor in tensors],
        group_data_refs=[[CanonicalKVCacheRef(tensor_idx=i, page_size_bytes=PAGE_BYTES) for i in range(len(tensors))]],
    )
    return tensors, canonical


def request(req_id: str = "r1") -> ReqContext:
    """A request's context."""
    return ReqContext(req_id=req_id)


def keys(count: int, first: int = 0) -> list[OffloadKey]:
    """Keys that differ."""
    return [block_key(first + number) for number in range(count)]


def spied_stores(monkeypatch: pytest.MonkeyPatch) -> list[JobMetadata]:
    """The store jobs that tiers get from now on."""
    jobs: list[JobMetadata] = []
    submit = StoreTierManager.submit_store

    def spied(tier: StoreTierManager, job: JobMetadata) -> None:
        jobs.append(job)
        submit(tier, job)

    monkeypatch.setattr(StoreTierManager, "submit_store", spied)
    return jobs


@dataclasses.dataclass(init=False)
class VllmConfig(SimpleNamespace):
    """What kvtiers looks at of vLLM's. ``changes`` are its fields."""

    def __init__(self, **changes: Any) -> None:
        fields = {
            "model_config": SimpleNamespace(model="org/model", hf_config=SimpleNamespace(_commit_hash="c0ffee")),
            "kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector", kv_role="kv_both"),
            "parallel_config": SimpleNamespace(distributed_executor_backend="uni", world_size=1),
            "scheduler_config": SimpleNamespace(max_num_batched_tokens=8192),
        }
        super().__init__(**fields | changes)
