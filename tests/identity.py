"""The identity of the engine in tests: one spec, and ways to change one field of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvtiers.connector.base import CacheConfig, KVCacheGroup, ModelConfig, OffloadingConfig, ParallelConfig
from kvtiers.tiers.blocks.keys import OffloadKey, make_offload_key
from kvtiers.tiers.metrics import Metrics

CONFIG = OffloadingConfig(
    model=ModelConfig(name="HuggingFaceTB/SmolLM2-135M-Instruct", dtype="torch.float32", revision="abc123"),
    cache=CacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
    parallel=ParallelConfig(),
    groups=(KVCacheGroup(32, ("model.layers.0", "model.layers.1")),),
    kv_cache_layout="NHD",
)


@dataclass
class FakeSpec:
    """What a tier needs of an engine's spec."""

    config: OffloadingConfig = CONFIG
    metrics: Metrics = field(default_factory=Metrics)

    def changed(self, part: str = "", **fields: Any) -> FakeSpec:
        """A copy with fields of ``config`` (or of ``config.<part>``) changed."""
        if part:
            fields = {part: replace(getattr(self.config, part), **fields)}
        return FakeSpec(replace(self.config, **fields))


def block_key(number: int, group: int = 0) -> OffloadKey:
    """A key whose hash looks like a real one: 32 bytes, spread over the folders."""
    import hashlib

    return make_offload_key(hashlib.sha256(number.to_bytes(8, "little")).digest(), group)
