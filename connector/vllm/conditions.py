"""Decides whether an option counts that has an effect only in some engines.

The functions must give the same answer in every engine with the same options, so they use only the engine's config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...tiers.plain_logs import get_logger

logger = get_logger(__name__)

#: Values of ``compilation_config.backend`` that compile the model as it is. A function of a plug-in may change it.
_COMPILERS = ("", "eager", "inductor")

#: Values of ``--speculative-config``'s ``method`` that draft without a model, so that blocks contain no draft KV.
_DRAFTS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


def with_effect(config: Any) -> Iterator[tuple[str, Any]]:
    """Options in ``uncounted.IGNORED`` that have an effect in this engine, and therefore count."""
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
    """Name prefixes of options and variables that do not count in this engine, in addition to ``uncounted``."""
    drafts = getattr(config, "speculative_config", None)
    if getattr(drafts, "method", None) in _DRAFTS_WITHOUT_MODEL:
        yield "speculative_config."
    adapters = getattr(config, "lora_config", None)
    engine = getattr(config, "model_config", None)
    if adapters is not None and getattr(adapters, "lora_dtype", None) == getattr(engine, "dtype", ""):
        yield "lora_config.lora_dtype"
    if getattr(engine, "has_inner_state", True) is False:  # vLLM sets them according to the CPU, whatever the model
        yield from ("cache_config.mamba_", "VLLM_SSM_")


def _uses_transformers_model(engine: Any) -> bool:
    """Whether the model runs with code of Transformers, which may come from the model's repository."""
    try:
        return bool(engine.using_transformers_backend())
    except Exception as e:  # noqa: BLE001 - if the answer is unknown, the option counts
        logger.debug("vLLM does not say whether it uses the model's own code: %r", e)
        return True
