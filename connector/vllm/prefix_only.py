"""Refuses models in which the KV of a token depends on more than the tokens before it.

Blocks are named by a prompt's beginning. So KV that depends on a prompt's end, on its length, or on other requests
cannot be stored under such a name. ``kv_groups`` refuses attention that is not causal, which vLLM says per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...tiers.errors import ConfigError

#: Types of RoPE that depend only on a token's position, in Transformers. ``dynamic`` and ``longrope`` choose their
#: frequencies by the largest position in a step, which may belong to another request. Unknown types may do the same.
_ROPES_BY_POSITION = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})


def check_model(model: Any) -> None:
    """Check vLLM's ModelConfig.

    Raises:
        ConfigError: names the field:

            - ``pooler_config``: the pooler needs all tokens to be computed.
            - ``model``: vLLM does not reuse this model's KV either, such as that of encoder-decoder models.
            - ``rope_type``: the position embeddings depend on a prompt's length.
            - ``dual_chunk_attention_config``: the attention of a token depends on a prompt's length and its last
              tokens.
    """
    _check_reuse(model)
    _check_rope(model)
    if getattr(getattr(model, "hf_config", None), "dual_chunk_attention_config", None):
        raise ConfigError(
            "dual chunk attention scales by the length of a prompt and selects by its last tokens: KV of a prompt's "
            "beginning depends on its end, so it cannot be reused. Run the model without a KV connector, or without "
            "this attention (--hf-overrides '{\"dual_chunk_attention_config\": null}')",
            field="dual_chunk_attention_config",
        )


def _check_reuse(model: Any) -> None:
    if getattr(model, "is_prefix_caching_supported", True):
        return
    pooler: Any = getattr(model, "pooler_config", None)
    if pooler is not None:  # after a load a pooler sees only the end of a prompt, which ends vLLM's engine
        kinds = [str(getattr(pooler, name, None)) for name in ("seq_pooling_type", "tok_pooling_type")]
        raise ConfigError(
            f"this model's pooling ({' and '.join(kinds)}) needs all tokens of a prompt to be computed, so KV cannot "
            "be reused: run it without a KV connector, or pool by LAST",
            field="pooler_config",
        )
    if model.attn_type != "attention_free":  # Mamba: vLLM only calls it experimental
        raise ConfigError(
            f"vLLM cannot reuse the KV of {model.attn_type} models: it depends on more than the tokens before it; run "
            "this model without a KV connector",
            field="model",
        )


def _check_rope(model: Any) -> None:
    """Refuse position embeddings that Transformers computes by length. vLLM's own have one table for all lengths."""
    uses_transformers = getattr(model, "using_transformers_backend", None)
    if uses_transformers is None or not uses_transformers():
        return
    for rope in rope_parameters(getattr(model, "hf_text_config", None)):
        rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
        if rope_type not in _ROPES_BY_POSITION:
            raise ConfigError(
                f"is {rope_type}, which Transformers' implementation of this model may compute by the length of a "
                "prompt: KV of a prompt's beginning then depends on its end and cannot be reused. Use vLLM's "
                "implementation if there is one (--model-impl vllm), or run the model without a KV connector. Accepted "
                f"with Transformers' implementation: {', '.join(sorted(_ROPES_BY_POSITION))}",
                field="rope_type",
            )


def rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters in a model's config, under its new and its old name; some have one set per layer type."""
    for ropes in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        for rope in (ropes, *ropes.values()) if isinstance(ropes, Mapping) else ():
            if isinstance(rope, Mapping):
                yield rope
