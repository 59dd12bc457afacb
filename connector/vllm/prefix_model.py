"""Which models SharedStorageConnector takes: those that keep all of a prompt's KV in blocks of its own."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from connector.vllm import kv_groups
from tiers.errors import ConfigError


def kv_cache_spec_of(kv_cache_config: Any) -> Any:
    """The spec of the model's one KV cache group.

    Raises:
        ConfigError: there are several groups, or it is not of full attention, or not causal.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model has {len(groups)} KV cache groups, SharedStorageConnector takes 1; use KVTiersSpec or "
            "KVTiersTier",
            field="kv_connector",
        )
    kv_cache_spec = groups[0].kv_cache_spec
    for each in getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values():
        # MLA is full attention to vLLM, too. What others no longer need lies in vLLM's null block, which all
        # requests have: nothing can be stored from it, loaded into it, or reported as its failure.
        if not isinstance(each, FullAttentionSpec):
            raise ConfigError(
                f"the model's KV cache is {type(each).__name__}, SharedStorageConnector takes full attention and "
                "MLA; use KVTiersSpec or KVTiersTier",
                field="kv_connector",
            )
        if kv_groups.is_non_causal(each):
            raise kv_groups.no_prefixes()
    return kv_cache_spec
