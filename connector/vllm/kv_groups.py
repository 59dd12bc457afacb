"""Checks a model's KV cache groups and their layout, and refuses those that kvtiers cannot store.

vLLM's OffloadingConfig does not tell a group's kind; the KVCacheConfig that vLLM hands to a connector does.
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

# R-SWA (newer releases only) keeps a window of the generated tokens.
_RSWA = getattr(kv_cache_interface, "RSWASpec", ())
_WINDOWS = (ChunkedLocalAttentionSpec, SlidingWindowSpec, _RSWA)


def has_window(config: Any, kv_cache_config: Any) -> bool:
    """Whether a group keeps only the blocks of a window.

    For such a group vLLM stores a chunk whose last block exists, even if its first blocks have left the window. In
    their place vLLM would store arbitrary bytes. With one block per chunk this cannot happen.

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
    """The error for ``blocks_per_chunk`` above 1 with a model for which ``has_window`` is true."""
    return ConfigError(
        f"is {blocks_per_chunk}, and this model has layers with a sliding window or chunked attention: vLLM stores "
        "incomplete chunks for these, and other requests would load them; set blocks_per_chunk: 1 for this model",
        field="blocks_per_chunk",
    )


def is_in_token_order(config: Any, handed: HandedOver) -> bool:
    """Whether the bytes of a block are in token order on every GPU, whatever block size CUDA's kernels use.

    This is also true of blocks that no kernel splits. A layer's spec counts the tokens of one DCP rank, ``config``
    those of all ranks; the check uses the specs.

    Args:
        config: vLLM's OffloadingConfig.
    """
    specs = _layer_specs(config, handed.kv_cache_config)
    are_small = all(spec.block_size <= translate.KERNEL_BLOCK_TOKENS for spec in specs)
    return are_small or _is_plain_mla(config, specs, handed.vllm_config)


def _is_plain_mla(config: Any, specs: list[Any], vllm_config: Any) -> bool:
    """Whether all layers are MLA with one vector per token and nothing else.

    With one head, a kernel's block is a sequence of tokens, and all CUDA backends write tokens with the same function
    (``concat_and_cache_mla``). Before 0.29, which added ``create_kv_cache_views``, a kernel's block could contain all
    layers. vLLM also describes the indexer of sparse attention as MLA, but the indexer's kernels use another order.
    """
    if not current_platform.is_cuda() or not hasattr(kv_cache_interface, "create_kv_cache_views"):
        return False
    head_size = vllm_config.model_config.get_head_size()
    is_plain = all(
        type(spec) is MLAAttentionSpec
        and spec.head_size == head_size  # an indexer has another head size
        and spec.page_size_bytes == spec.block_size * head_size * spec.dtype.itemsize
        for spec in specs
    )
    # The scheduler has only one layer's spec for a whole group. If the group has an indexer, the sizes do not add up.
    return is_plain and sum(spec.page_size_bytes for spec in specs) == config.worker_kv_bytes_per_block


def check_layout(config: Any, kv_cache_config: Any) -> None:
    """Refuse KV cache layouts for which vLLM does not hand over the bytes of a block.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: names the layouts that are accepted.
    """
    layout = getattr(config, "kv_cache_layout", None)
    if layout == "LHBNC":
        raise ConfigError(
            f"is {layout}, which splits a block into one piece per head, and vLLM hands over only one of the pieces: "
            "set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC, or leave it out",
            field="kv_cache_layout",
        )
    kinds = _layer_specs(config, kv_cache_config)
    if layout and layout.startswith("B") and kinds and all(isinstance(kind, MambaSpec) for kind in kinds):
        raise ConfigError(
            f"is {layout}, and this model has only Mamba states, for which vLLM hands over the wrong rows in this "
            "layout: set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC, or leave it out",
            field="kv_cache_layout",
        )


def check_attention(config: Any, kv_cache_config: Any) -> None:
    """Refuse models in which a token's KV depends on more than the tokens before it.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: says what to change.
    """
    kinds = _layer_specs(config, kv_cache_config)
    if any(map(is_non_causal, kinds)):
        raise no_prefixes()
    if any(isinstance(kind, _RSWA) for kind in kinds) and not config.extra_config.get("offload_prompt_only", True):
        raise ConfigError(
            "is false, and this model (R-SWA) sees a whole prompt, but only a window of the tokens that it generates. "
            "KV of generated tokens would be loaded for a prompt with the same tokens; leave it out",
            field="offload_prompt_only",
        )


def is_non_causal(kind: Any) -> bool:
    """Whether prompt tokens see later tokens (prefix LM). vLLM turns off its own prefix cache, but not connectors."""
    return bool(getattr(kind, "non_causal", False))


def no_prefixes() -> ConfigError:
    """The error for a model for which ``is_non_causal`` is true."""
    return ConfigError(
        "this model's attention is not causal: KV of a prompt's beginning depends on the prompt's end, so it cannot be "
        "reused; run the model without a KV connector",
        field="kv_connector",
    )


def prefix_spec(kv_cache_config: Any) -> Any:
    """Return the spec of a model's only KV cache group, which must be causal full attention or MLA.

    SharedStorageConnector needs such a group, because all of a prompt then stays in its blocks.

    Raises:
        ConfigError: there are several groups, or the group is not of full attention, or not causal.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds: list[Any] = []
    for group in groups:
        kinds += getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    # vLLM counts MLA as full attention. Other kinds release blocks early, and vLLM replaces these by its null block,
    # which all requests share. The null block cannot be stored, loaded into, or reported as failed.
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
    """Refuse KV tensors that do not cover a whole block, whatever layout causes it.

    Args:
        kv_caches: vLLM's canonical KV caches.
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: the pages together are smaller than a block.
    """
    if len(config.groups) < len(kv_cache_config.kv_cache_groups):
        return  # the rest may belong to a group that vLLM does not offload
    page_bytes = sum(entry.page_size_bytes for entry in kv_caches.tensors)
    if page_bytes < config.worker_kv_bytes_per_block:
        raise ConfigError(
            f"vLLM hands over only {page_bytes} of the {config.worker_kv_bytes_per_block} bytes of a block: the rest "
            "would be lost; try another VLLM_KV_CACHE_LAYOUT, or another --block-size",
            field="kv_cache_layout",
        )


def _layer_specs(config: Any, kv_cache_config: Any) -> list[Any]:
    """The KV cache spec of each offloaded layer."""
    specs: list[Any] = []
    for index, group in enumerate(config.groups):
        # Before 0.32 all groups are offloaded. A worker has one spec per layer, the scheduler one spec per group.
        spec = kv_cache_config.kv_cache_groups[getattr(group, "group_id", index)].kv_cache_spec
        specs += getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec)).values()
    return specs
