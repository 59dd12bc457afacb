"""What the groups of a model's KV cache, and how vLLM lays them out, rule out.

vLLM's OffloadingConfig does not say of what kind a group is; the KVCacheConfig that vLLM hands to a connector does.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtiers.connector.vllm import translate
from kvtiers.connector.vllm.handed import HandedOver
from kvtiers.tiers.errors import ConfigError

# R-SWA, of newer releases, keeps a window of what it has generated.
_RSWA = getattr(kv_cache_interface, "RSWASpec", ())
_WINDOWS = (ChunkedLocalAttentionSpec, SlidingWindowSpec, _RSWA)


def has_window(config: Any, kv_cache_config: Any) -> bool:
    """Whether a group keeps only the blocks of a window.

    Of such a group vLLM stores a chunk whose last block is there, though its first ones may be gone: what is stored in
    their place is whatever lay there. A chunk of one block is there or not.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.
    """
    return any(isinstance(kind, _WINDOWS) for kind in _layer_specs(config, kv_cache_config))


def has_states(config: Any, kv_cache_config: Any) -> bool:
    """Whether a group keeps recurrent states (Mamba, linear attention, short convolutions).

    vLLM keeps a state only at the token where a step of prefill ends. It offers that state to a connector only if a
    chunk ends at the same token. The last step of a prompt ends with the prompt's last whole block, so a chunk always
    ends there only if chunks have one block.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.
    """
    return any(isinstance(kind, MambaSpec) for kind in _layer_specs(config, kv_cache_config))


def no_chunks_of_windows(blocks_per_chunk: int) -> ConfigError:
    """The refusal of ``blocks_per_chunk`` for a model with ``has_window``."""
    return ConfigError(
        f"is {blocks_per_chunk}, and this model has layers with a sliding window or chunked attention: of those vLLM "
        "stores chunks that are not all there, and others would load them; set blocks_per_chunk: 1 for this model",
        field="blocks_per_chunk",
    )


def is_in_token_order(config: Any, handed: HandedOver) -> bool:
    """Whether blocks have their bytes in the order of tokens on every GPU, however CUDA's kernels cut them.

    So have blocks that no kernel cuts. (``config`` counts the tokens of all DCP ranks, a spec those of one.)

    Args:
        config: vLLM's OffloadingConfig.
    """
    specs = _layer_specs(config, handed.kv_cache_config)
    are_small = all(spec.block_size <= translate.KERNEL_BLOCK_TOKENS for spec in specs)
    return are_small or _is_plain_mla(config, specs, handed.vllm_config)


def _is_plain_mla(config: Any, specs: list[Any], vllm_config: Any) -> bool:
    """Whether all layers are MLA that keeps one vector a token, and nothing else.

    With one head a kernel's block is its tokens one after the other, and all of CUDA's backends write these by one
    function (``concat_and_cache_mla``). Before 0.29, which brought ``create_kv_cache_views``, a kernel's block could
    have all layers in it. The indexer of sparse attention is MLA to vLLM, too, but its kernels order blocks in their
    own way.
    """
    if not current_platform.is_cuda() or not hasattr(kv_cache_interface, "create_kv_cache_views"):
        return False
    head_size = vllm_config.model_config.get_head_size()
    is_plain = all(
        type(spec) is MLAAttentionSpec
        and spec.head_size == head_size  # an indexer's is another
        and spec.page_size_bytes == spec.block_size * head_size * spec.dtype.itemsize
        for spec in specs
    )
    # The scheduler has one layer's spec for a whole group: with an indexer among them the sizes do not add up.
    return is_plain and sum(spec.page_size_bytes for spec in specs) == config.worker_kv_bytes_per_block


def check_layout(config: Any, kv_cache_config: Any) -> None:
    """Refuse a layout of which vLLM hands over other bytes than a block's.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: says which layout to take.
    """
    layout = getattr(config, "kv_cache_layout", None)
    if layout == "LHBNC":
        raise ConfigError(
            f"is {layout}, in which a block is in as many places as there are heads, and vLLM hands over one of them: "
            "set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC, or leave it out",
            field="kv_cache_layout",
        )
    kinds = _layer_specs(config, kv_cache_config)
    if layout and layout.startswith("B") and kinds and all(isinstance(kind, MambaSpec) for kind in kinds):
        raise ConfigError(
            f"is {layout}, and this model has Mamba states only, of which vLLM hands over other rows in that layout: "
            "set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC, or leave it out",
            field="kv_cache_layout",
        )


def check_attention(config: Any, kv_cache_config: Any) -> None:
    """Refuse models whose KV depends on more than the tokens before it.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: says what may be done.
    """
    kinds = _layer_specs(config, kv_cache_config)
    if any(map(is_non_causal, kinds)):
        raise no_prefixes()
    if any(isinstance(kind, _RSWA) for kind in kinds) and not config.extra_config.get("offload_prompt_only", True):
        raise ConfigError(
            "is false, and this model (R-SWA) sees only a window of what it has generated, but all of a prompt: what "
            "was generated would be loaded for a prompt with the same tokens; leave it out",
            field="offload_prompt_only",
        )


def is_non_causal(kind: Any) -> bool:
    """Whether tokens of a prompt see later ones (prefix LM). vLLM turns its own prefix cache off, but no connector."""
    return bool(getattr(kind, "non_causal", False))


def no_prefixes() -> ConfigError:
    """The refusal of a model that ``is_non_causal``."""
    return ConfigError(
        "this model's attention is not causal, so KV of a prompt's beginning depends on its end and none of it can be "
        "reused: run it without a KV connector",
        field="kv_connector",
    )


def prefix_spec(kv_cache_config: Any) -> Any:
    """The spec of the one KV cache group of a model that SharedStorageConnector takes: all of a prompt stays in blocks.

    Raises:
        ConfigError: there are several groups, or it is not of full attention, or not causal.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds: list[Any] = []
    for group in groups:
        kinds += getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    # vLLM counts MLA as full attention. Other kinds give blocks up, and vLLM puts its null block, which all requests
    # share, in their place: nothing can be stored from it, loaded into it, or reported as failed.
    others = {type(kind).__name__ for kind in kinds if not isinstance(kind, FullAttentionSpec)}
    if len(groups) != 1 or others:
        raise ConfigError(
            f"the model has {len(groups)} KV cache groups of {', '.join(sorted(others)) or 'full attention'}; "
            "SharedStorageConnector takes one, of full attention or MLA; use KVTiersConnector",
            field="kv_connector",
        )
    if any(map(is_non_causal, kinds)):
        raise no_prefixes()
    return groups[0].kv_cache_spec


def check_pages(kv_caches: Any, config: Any, kv_cache_config: Any) -> None:
    """Refuse KV tensors that are not all of a block, whatever layout that comes from.

    Args:
        kv_caches: vLLM's canonical KV caches.
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: pages that are smaller than a block.
    """
    if len(config.groups) < len(kv_cache_config.kv_cache_groups):
        return  # a group that vLLM does not offload may have the rest
    page_bytes = sum(entry.page_size_bytes for entry in kv_caches.tensors)
    if page_bytes < config.worker_kv_bytes_per_block:
        raise ConfigError(
            f"vLLM hands over {page_bytes} bytes of a block that has {config.worker_kv_bytes_per_block}: the rest "
            "would be lost; try another VLLM_KV_CACHE_LAYOUT, or another --block-size",
            field="kv_cache_layout",
        )


def _layer_specs(config: Any, kv_cache_config: Any) -> list[Any]:
    """The kind of each offloaded layer."""
    specs: list[Any] = []
    for index, group in enumerate(config.groups):
        # Before 0.32 all groups are offloaded. A worker has the specs of each layer, the scheduler one for all.
        spec = kv_cache_config.kv_cache_groups[getattr(group, "group_id", index)].kv_cache_spec
        specs += getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec)).values()
    return specs
