"""Decides whether options count that have an effect only in some engines, or that name what vLLM would choose anyway.

The functions must give the same answer in every engine with the same options, so they use only the engine's config and
the platform.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ...tiers.plain_logs import get_logger

logger = get_logger(__name__)

#: Values of ``compilation_config.backend`` that compile the model as it is. A function of a plug-in may change it.
_COMPILERS = ("", "eager", "inductor")

#: Values of ``--speculative-config``'s ``method`` that draft without a model, so blocks have no KV of a draft.
_DRAFTS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


def with_effect(config: Any) -> Iterator[tuple[str, Any]]:
    """Options that ``uncounted.IGNORED`` lists, but that have an effect in this engine and therefore count."""
    engine = getattr(config, "model_config", None)
    if str(getattr(getattr(config, "load_config", None), "load_format", "")) == "dummy":
        seed = getattr(engine, "seed", None)
        if seed:
            yield "model_config.seed", seed
    if getattr(engine, "trust_remote_code", False) and getattr(getattr(engine, "hf_config", None), "auto_map", None):
        code_revision = getattr(engine, "code_revision", None)
        if code_revision is not None:
            yield "model_config.code_revision", code_revision
        if _uses_transformers_model(engine):
            yield "model_config.trust_remote_code", True
    compiler = getattr(getattr(config, "compilation_config", None), "backend", "")
    if compiler not in _COMPILERS:
        yield "compilation_config.backend", str(compiler)


def without_effect(config: Any) -> Iterator[str]:
    """Name prefixes of options and variables that do not count in this engine, though ``uncounted`` lacks them."""
    drafts = getattr(config, "speculative_config", None)
    if getattr(drafts, "method", None) in _DRAFTS_WITHOUT_MODEL:
        yield "speculative_config."
    adapters = getattr(config, "lora_config", None)
    engine = getattr(config, "model_config", None)
    if adapters is not None and getattr(adapters, "lora_dtype", None) == getattr(engine, "dtype", ""):
        yield "lora_config.lora_dtype"
    if getattr(engine, "has_inner_state", True) is False:  # vLLM sets them by the CPU, whatever the model
        yield from ("cache_config.mamba_", "VLLM_SSM_")
    named = getattr(getattr(config, "attention_config", None), "backend", None)
    if named is not None and _is_chosen_anyway(named, config):
        yield "attention_config.backend"


def _uses_transformers_model(engine: Any) -> bool:
    """Whether the model's code is Transformers', which may come from the model's repository."""
    try:
        return bool(engine.using_transformers_backend())
    except Exception as e:  # noqa: BLE001 - if vLLM does not say, the option counts
        logger.debug("vLLM does not say whether it uses the model's own code: %r", e)
        return True


def _is_chosen_anyway(named: Any, config: Any) -> bool:
    """Whether vLLM would choose this attention backend for every layer, if no backend were named.

    A model's layers may have sinks or a sliding window. The config does not say which, so vLLM is asked for each kind.
    A kind that no backend supports is not in this model. Where layers may differ in other ways, vLLM is not asked.
    """
    log = logging.getLogger("vllm")
    level = log.level
    try:
        import vllm.config
        import vllm.v1.attention.selector

        engine, blocks, attention = config.model_config, config.cache_config, config.attention_config
        drafts = config.speculative_config
        has_draft = drafts is not None and drafts.method not in _DRAFTS_WITHOUT_MODEL
        if has_draft or engine.quantization or attention.backend_per_kind or blocks.kv_cache_dtype_skip_layers:
            return False
        unnamed = copy.copy(config)
        unnamed.attention_config = copy.copy(attention)
        unnamed.attention_config.backend = None
        log.setLevel(logging.ERROR)  # vLLM logs what it chooses, and would do so once more
        with vllm.config.set_current_vllm_config(unnamed):
            chosen = set(_choices(vllm.v1.attention.selector.get_attn_backend, engine, blocks.cache_dtype))
        return chosen == {named.get_class()}
    except Exception as e:  # noqa: BLE001 - if vLLM cannot be asked, the option counts
        logger.debug("vLLM does not say which attention backend it would choose: %r", e)
        return False
    finally:
        log.setLevel(level)


def _choices(select: Callable[..., type], engine: Any, cache_dtype: Any) -> Iterator[type]:
    """The backend that vLLM chooses for each kind of layer that has one."""
    for has_sink, has_sliding_window in itertools.product((False, True), repeat=2):
        with suppress(ImportError, NotImplementedError, ValueError):
            yield select(
                engine.get_head_size(),
                engine.dtype,
                cache_dtype,
                use_mla=engine.use_mla,
                use_sparse=hasattr(engine.hf_text_config, "index_topk"),
                use_mm_prefix=engine.is_mm_prefix_lm,
                has_sink=has_sink,
                has_sliding_window=has_sliding_window,
            )
