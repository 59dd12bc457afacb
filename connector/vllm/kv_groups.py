"""Checks a model's KV cache groups and their layout, and refuses groups that kvtiers cannot store.

vLLM's OffloadingConfig does not contain a group's kind. The KVCacheConfig that a connector gets does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from ...tiers.errors import ConfigError

# R-SWA (newer releases only) keeps a window of the generated tokens.
_RSWA = getattr(kv_cache_interface, "RSWASpec", ())
_WINDOWS = (ChunkedLocalAttentionSpec, SlidingWindowSpec, _RSWA)
#: Kinds of KV whose blocks depend only on the tokens up to the block's end. Full attention includes MLA.
_BY_PREFIX = (FullAttentionSpec, MambaSpec, *_WINDOWS)


def stored_layers(config: Any, kv_cache_config: Any) -> list[Any]:
    """Return the KV cache spec of each offloaded layer.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        ConfigError: vLLM does not hand over the bytes of a block in this KV cache layout, or a token's KV depends on
            more than the tokens before it. Says what to change.
    """
    layers: list[Any] = []
    for index, group in enumerate(config.groups):
        # Before 0.32 all groups are offloaded. A worker has one spec per layer, the scheduler one spec per group.
        spec = kv_cache_config.kv_cache_groups[getattr(group, "group_id", index)].kv_cache_spec
        layers += getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec)).values()
    layout = getattr(config, "kv_cache_layout", None)
    if layout == "LHBNC":
        raise ConfigError(
            f"is {layout}, which splits a block into one piece per head, and vLLM hands over only one of the pieces: "
            "set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC, or leave it out",
            field="kv_cache_layout",
        )
    if layout and layout.startswith("B") and layers and all(isinstance(layer, MambaSpec) for layer in layers):
        raise ConfigError(
            f"is {layout}, and this model has only Mamba states, for which vLLM hands over the wrong rows in this "
            "layout: set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC, or leave it out",
            field="kv_cache_layout",
        )
    _refuse_unknown(layers)
    _refuse_non_causal(layers)
    if any(isinstance(layer, _RSWA) for layer in layers) and not config.extra_config.get("offload_prompt_only", True):
        raise ConfigError(
            "is false, and this model (R-SWA) sees a whole prompt, but only a window of the tokens that it generates. "
            "KV of generated tokens would be loaded for a prompt with the same tokens; leave it out",
            field="offload_prompt_only",
        )
    return layers


def has_window(layers: Iterable[Any]) -> bool:
    """Whether a layer keeps only the blocks of a window.

    vLLM stores a chunk of such a layer's group if the chunk's last block exists, even if its first blocks have left
    the window. vLLM would store arbitrary bytes in place of these blocks. One block per chunk avoids this.

    Args:
        layers: from ``stored_layers``.
    """
    return any(isinstance(layer, _WINDOWS) for layer in layers)


def has_states(layers: Iterable[Any]) -> bool:
    """Whether a layer keeps recurrent states (Mamba, linear attention, short convolutions).

    vLLM keeps a state only at the token where a step of prefill ends. It offers that state to a connector only if a
    chunk ends at the same token. The last step of a prompt ends with the prompt's last whole block, so a chunk always
    ends there only if chunks have one block.

    Args:
        layers: from ``stored_layers``.
    """
    return any(isinstance(layer, MambaSpec) for layer in layers)


def blocks_per_token(config: Any, kv_cache_config: Any, blocks_per_chunk: int) -> float:
    """Return the number of stored blocks per token of a long prompt, which only groups with full attention store.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig.
    """
    blocks = 0.0
    for index, group in enumerate(config.groups):
        spec = kv_cache_config.kv_cache_groups[getattr(group, "group_id", index)].kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", {"": spec}).values()
        if all(isinstance(layer, FullAttentionSpec) for layer in layers):
            blocks += 1 / (group.tokens_per_block * blocks_per_chunk)
    return blocks


def no_chunks_of_windows(blocks_per_chunk: int) -> ConfigError:
    """The error for ``blocks_per_chunk`` above 1 with a model for which ``has_window`` is true."""
    return ConfigError(
        f"is {blocks_per_chunk}, and this model has layers with a sliding window or chunked attention: vLLM stores "
        "incomplete chunks for these, and other requests would load them; set blocks_per_chunk: 1 for this model",
        field="blocks_per_chunk",
    )


def _refuse_unknown(layers: Iterable[Any]) -> None:
    """Refuse kinds of KV that are not known to depend only on the tokens before them.

    Cross-attention is such a kind: its KV is that of an encoder's input.
    """
    unknown = {type(layer).__name__ for layer in layers if not isinstance(layer, _BY_PREFIX)}
    if unknown:
        raise ConfigError(
            f"this model's KV cache has layers of {', '.join(sorted(unknown))}, and kvtiers does not know that their "
            "KV depends only on the tokens before it; run the model without a KV connector",
            field="kv_connector",
        )


def _refuse_non_causal(layers: Iterable[Any]) -> None:
    """Refuse prompt tokens that see later tokens (prefix LM). vLLM then turns off its own cache, but not connectors."""
    if any(getattr(layer, "non_causal", False) for layer in layers):
        raise ConfigError(
            "this model's attention is not causal: KV of a prompt's beginning depends on the prompt's end, so it "
            "cannot be reused; run the model without a KV connector",
            field="kv_connector",
        )


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
