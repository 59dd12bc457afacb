"""Compute how many bytes of KV cache a model's tokens take, from its Hugging Face ``config.json``.

The rules are those of vLLM's model code. A model type that is not in the tables below is refused, because nobody would
notice a wrong guess. So is a missing field for which Transformers' defaults differ between model types. Imports neither
torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..tiers.errors import ConfigError
from .model_files import CONFIG_BYTES_MAX, hub_commit, hub_folder

#: Model types whose ``head_dim`` is ``hidden_size / num_attention_heads`` where the file has none.
_DERIVED_HEAD_SIZE = frozenset((
    "cohere", "cohere2", "ernie4_5_moe", "granite", "granitemoe", "granitemoehybrid", "jamba", "lfm2", "llama",
    "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen2_vl",
    "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "smollm3", "stablelm", "starcoder2",
))  # fmt: skip
#: Model types whose file must have ``head_dim``.
_OWN_HEAD_SIZE = frozenset((
    "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "llama4_text",
    "minimax_m2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
    "qwen3_vl_text", "seed_oss",
))  # fmt: skip
#: Model types with multi-head latent attention: one vector per token and layer, whole on each rank.
_MLA = frozenset(("deepseek_v2", "deepseek_v3", "kimi_k2"))
#: Beginnings of model types whose ``sliding_window`` has an effect only with ``use_sliding_window: true``.
_OPTIONAL_WINDOW = ("qwen2", "qwen3")

#: Model types for which a missing field does not mean the same as null: Transformers' default is a window.
_WINDOW_BY_DEFAULT = {"mistral": "sliding_window", "llama4_text": "attention_chunk_size"}

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_LAYER_KINDS: Mapping[str, Literal["full", "window", "state"]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
}
DTYPE_BYTES: Mapping[str, int] = {"auto": 2, "float16": 2, "bfloat16": 2, "float32": 4}
KV_DTYPE_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class KVShape:
    """A model's KV cache.

    Attributes:
        full_layers: layers that keep every token.
        window_layers: layers with a sliding window or chunked attention.
        window_tokens: tokens of that window; 0 without such layers.
        state_layers: layers with a recurrent state (Mamba, linear attention, short convolution) in place of KV.
        kv_heads: of one layer; 1 for MLA.
        head_size: numbers of a head's K or V; for MLA ``kv_lora_rank + qk_rope_head_dim``.
        is_mla: K and V are one vector, which each rank holds whole.
    """

    model_type: str
    full_layers: int
    window_layers: int
    window_tokens: int
    state_layers: int
    kv_heads: int
    head_size: int
    is_mla: bool

    @property
    def is_uniform(self) -> bool:
        """Whether every layer keeps every token."""
        return not (self.window_layers or self.state_layers)

    def rank_bytes(self, layers: int, number_bytes: int, tp_size: int) -> int:
        """Bytes of one token in ``layers`` layers on one tensor-parallel rank.

        Raises:
            ConfigError: vLLM cannot divide the KV heads among ``tp_size`` ranks.
        """
        if self.is_mla:
            return layers * self.head_size * number_bytes
        if self.kv_heads % tp_size and tp_size % self.kv_heads:
            raise ConfigError(
                f"is {tp_size}, and this model has {self.kv_heads} KV heads; write a divisor or a multiple of these",
                field="--tp",
            )
        heads = max(1, self.kv_heads // tp_size)  # with fewer heads than ranks, vLLM gives each rank a copy of one
        return 2 * layers * heads * self.head_size * number_bytes


def read_model_config(model: str) -> dict[str, Any]:
    """Read a model's ``config.json``.

    Args:
        model: a folder that holds it, the file itself, or a hub id (``org/model``) that is in the local cache.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            path /= "config.json"
        elif not path.is_file():
            path = _cached(model)
    except (OSError, RuntimeError, ValueError) as e:  # too long, a NUL, or the home of an unknown user
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{model[:200]!r} is not a path: {e}"[:400], field="MODEL_OR_CONFIG") from e
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(CONFIG_BYTES_MAX))
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", field="MODEL_OR_CONFIG") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid JSON: {e}", field="MODEL_OR_CONFIG") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object; write a model's config.json", field="MODEL_OR_CONFIG")
    return data


def _cached(model: str) -> Path:
    accepted = "write a model's folder, its config.json, or the hub id of a model in the local cache"
    try:
        commit = hub_commit(model, None)
        path = hub_folder(model) / "snapshots" / (commit or "") / "config.json"
    except ImportError:
        accepted = "write a model's folder or its config.json; hub ids need huggingface_hub, which is not installed"
        commit = None
    if commit is None or not path.is_file():
        raise ConfigError(f"{model!r} was not found; {accepted}", field="MODEL_OR_CONFIG")
    return path


def kv_shape(config: Mapping[str, Any]) -> KVShape:
    """The shape of a model's KV cache, from the contents of its ``config.json``.

    Raises:
        ConfigError: the model type is not known, or a field is missing or not accepted.
    """
    text = config
    if "num_hidden_layers" not in config:
        text = next((config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)), config)
    model_type = str(text.get("model_type", config.get("model_type", "")))
    is_mla = model_type in _MLA
    if not is_mla and model_type not in _DERIVED_HEAD_SIZE | _OWN_HEAD_SIZE:
        known = ", ".join(sorted(_DERIVED_HEAD_SIZE | _OWN_HEAD_SIZE | _MLA))
        raise ConfigError(
            f"{model_type!r} is not a model type whose KV cache this command can compute; accepted: {known}",
            field="model_type",
        )
    kinds = _layer_kinds(text, model_type)
    windows = kinds.count("window")
    if is_mla:
        heads, head_size = 1, _positive(text, "kv_lora_rank") + _positive(text, "qk_rope_head_dim")
    else:
        heads, head_size = _kv_heads(text, model_type), _head_size(text, model_type)
    return KVShape(
        model_type=model_type,
        full_layers=kinds.count("full"),
        window_layers=windows,
        window_tokens=_positive(text, _window_field(model_type)) if windows else 0,
        state_layers=kinds.count("state"),
        kv_heads=heads,
        head_size=head_size,
        is_mla=is_mla,
    )


def number_bytes(config: Mapping[str, Any], *, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes of one number in the KV cache.

    Args:
        dtype: vLLM's ``--dtype``. vLLM serves every checkpoint in 16 bits unless it is told float32.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``; ``auto``: the model's.

    Raises:
        ConfigError: a name is not accepted, or the checkpoint itself asks for a quantized KV cache.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{dtype!r} is not accepted; write {' or '.join(DTYPE_BYTES)}", field="--dtype")
    if kv_cache_dtype == "auto":
        quantization = config.get("quantization_config")
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if isinstance(quantization, dict) and quantization.get(name):
                raise ConfigError(
                    f"is {quantization[name]!r}, so vLLM may quantize the KV cache by itself; say what it does with "
                    f"--kv-cache-dtype: {' or '.join(KV_DTYPE_BYTES)}",
                    field=f"quantization_config.{name}",
                )
        return DTYPE_BYTES[dtype]
    if kv_cache_dtype not in KV_DTYPE_BYTES:
        raise ConfigError(
            f"{kv_cache_dtype!r} is not accepted; write auto or {' or '.join(KV_DTYPE_BYTES)}", field="--kv-cache-dtype"
        )
    return KV_DTYPE_BYTES[kv_cache_dtype]


def _kv_heads(text: Mapping[str, Any], model_type: str) -> int:
    if text.get("num_key_value_heads") is None and model_type == "llama":
        return _positive(text, "num_attention_heads")  # files from before grouped-query attention
    return _positive(text, "num_key_value_heads")


def _head_size(text: Mapping[str, Any], model_type: str) -> int:
    if text.get("head_dim") is not None or model_type not in _DERIVED_HEAD_SIZE:
        return _positive(text, "head_dim")
    return _positive(text, "hidden_size") // _positive(text, "num_attention_heads")


def _layer_kinds(text: Mapping[str, Any], model_type: str) -> list[str]:
    layers = _positive(text, "num_hidden_layers")
    if layers > 10_000:
        raise ConfigError(f"is {layers}; accepted are at most 10,000", field="num_hidden_layers")
    named = text.get("layer_types")
    if named is None:
        return _kinds_by_type(text, model_type, layers)
    if not isinstance(named, list) or len(named) != layers:
        raise ConfigError(f"must be a list of {layers} layer types, one for each layer", field="layer_types")
    for name in named:
        if name not in _LAYER_KINDS:
            raise ConfigError(f"{name!r} is not known; accepted: {', '.join(_LAYER_KINDS)}", field="layer_types")
    return [_LAYER_KINDS[name] for name in named]


def _kinds_by_type(text: Mapping[str, Any], model_type: str, layers: int) -> list[str]:
    """The layers' kinds where the file has no ``layer_types``, as Transformers and vLLM work them out."""
    if model_type in _WINDOW_BY_DEFAULT and _window_field(model_type) not in text:
        raise ConfigError(
            "is missing from config.json; add it to a copy of the file, as null if the model has none",
            field=_window_field(model_type),
        )
    every: int | None = None  # every n-th layer is of full attention
    other = "window"
    match model_type:
        case "gemma2":
            every = 2
        case "gemma3_text":
            every = _pattern(text, ("sliding_window_pattern", "_sliding_window_pattern"), 6)
        case "cohere2":
            every = _pattern(text, ("sliding_window_pattern", "_sliding_window_pattern"), 4)
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            every, other = _pattern(text, ("full_attention_interval",), 4), "state"
        case "jamba":
            period, offset = _positive(text, "attn_layer_period"), text.get("attn_layer_offset")
            if not isinstance(offset, int) or isinstance(offset, bool):
                raise ConfigError("is missing, or not a whole number", field="attn_layer_offset")
            return ["full" if index % period == offset else "state" for index in range(layers)]
        case "llama4_text":
            return _kinds_of_llama4(text, layers)
        case "gpt_oss" | "exaone4" | "olmo3" | "granitemoehybrid" | "lfm2":
            raise ConfigError(f"is missing; {model_type} has layers of several kinds", field="layer_types")
    if every is not None:
        return [other if (index + 1) % every else "full" for index in range(layers)]
    if text.get("sliding_window") is None or (
        model_type.startswith(_OPTIONAL_WINDOW) and not text.get("use_sliding_window")
    ):
        return ["full"] * layers
    if model_type.startswith(_OPTIONAL_WINDOW):
        raise ConfigError(
            "is true, and the file does not say which layers have a window; add layer_types", field="use_sliding_window"
        )
    return ["window"] * layers


def _kinds_of_llama4(text: Mapping[str, Any], layers: int) -> list[str]:
    if text.get("attention_chunk_size") is None:
        return ["full"] * layers
    rotary = text.get("no_rope_layers") or []
    if not rotary:
        every = _pattern(text, ("no_rope_layer_interval",), 4)
        rotary = [int((index + 1) % every != 0) for index in range(layers)]
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise ConfigError(f"must be a list of {layers} numbers, one for each layer", field="no_rope_layers")
    return ["window" if is_rotary else "full" for is_rotary in rotary]


def _window_field(model_type: str) -> str:
    return _WINDOW_BY_DEFAULT.get(model_type, "sliding_window")


def _pattern(text: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    return next((_positive(text, name) for name in names if text.get(name) is not None), default)


def _positive(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if value is None:
        raise ConfigError("is missing from config.json; add it to a copy of the file", field=name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"is {value!r}; accepted is a whole number of 1 or more", field=name)
    return value
