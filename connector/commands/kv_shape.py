"""Compute how many bytes of KV cache a model's tokens take, from the fields of its Hugging Face ``config.json``.

A field that the file lacks is not guessed, and layers that the fields do not describe are refused: nobody would notice
a wrong number. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...tiers.errors import ConfigError
from ..identity.model_files import CONFIG_BYTES_MAX, hub_commit, hub_folder

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
#: Fields of models whose layers differ. Only ``layer_types`` says which layer is of which kind.
_LAYERS_DIFFER = re.compile(
    r"mamba_.*|ssm_.*|state_size|conv_.*|linear_.*|attn_layer_.*|full_att.*|attention_chunk_size|hybrid_.*|r?swa_.*"
    r"|yoco_.*|interleaved_sliding_window|(attention_)?window_.*|layer_group_size|layers_block_type|block_configs"
    r"|(layer|block|attn|attention)s?_(types|type_list)"
)
#: Fields of models that keep more or less than ``layer_types`` says: an index of tokens, one cache for several layers,
#: or heads of two sizes.
_UNKNOWN_CACHE = re.compile(
    r"index_(topk|n_heads|head_dim)|num_kv_shared_layers|use_cla|cross_attention_layers|per_layer_config"
    r"|(.*_)?(swa|global|local|sliding)_(.*_)?(heads|head_dim)"
)
#: Lists that may have one entry for each layer and say nothing about KV: of MLPs, of positions, of tokens.
_NOT_OF_KV = re.compile(
    r"layer_types|no_rope_layers|architectures|.*(moe|mlp|ffn|expert|intermediate|rope|rotary|token).*"
)
_MEASURE = "run the model: vLLM's log shows the size of a block, and so does `kvtiers check` after blocks are stored"
KV_DTYPE_BYTES: Mapping[str, int] = {
    "float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1
}  # fmt: skip


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
                f"is {tp_size}, and this model has {self.kv_heads} KV heads; write its divisor or multiple",
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
        raise ConfigError(f"{model[:200]!r} is not a path: {e}"[:400], field="--model") from e
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(CONFIG_BYTES_MAX))
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", field="--model") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid JSON: {e}", field="--model") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object; write a model's config.json", field="--model")
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
        raise ConfigError(f"{model!r} was not found; {accepted}", field="--model")
    return path


def kv_shape(config: Mapping[str, Any]) -> KVShape:
    """The shape of a model's KV cache, from the contents of its ``config.json``.

    Raises:
        ConfigError: a field is missing or not accepted, or the fields do not describe the layers' KV.
    """
    text = config
    if "num_hidden_layers" not in config:
        text = next((config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)), config)
    kinds = _layer_kinds(text)
    windows = kinds.count("window")
    is_mla = bool(text.get("kv_lora_rank"))
    if is_mla:
        heads, head_size = 1, _positive(text, "kv_lora_rank") + _positive(text, "qk_rope_head_dim")
    else:
        heads, head_size = _positive(text, "num_key_value_heads"), _head_size(text)
    window_field = "sliding_window" if text.get("attention_chunk_size") is None else "attention_chunk_size"
    return KVShape(
        full_layers=kinds.count("full"),
        window_layers=windows,
        window_tokens=_positive(text, window_field) if windows else 0,
        state_layers=kinds.count("state"),
        kv_heads=heads,
        head_size=head_size,
        is_mla=is_mla,
    )


def number_bytes(config: Mapping[str, Any], kv_cache_dtype: str) -> int:
    """Bytes of one number in the KV cache.

    Args:
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``; ``auto``: 16 bits, in which vLLM serves every checkpoint.

    Raises:
        ConfigError: the name is not accepted, or the checkpoint itself asks for a quantized KV cache.
    """
    accepted = " or ".join(KV_DTYPE_BYTES)
    if kv_cache_dtype == "auto":
        quantization = config.get("quantization_config")
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if isinstance(quantization, dict) and quantization.get(name):
                raise ConfigError(
                    f"is {quantization[name]!r}, so vLLM may quantize the KV cache by itself; say what it does with "
                    f"--kv-cache-dtype: {accepted}",
                    field=f"quantization_config.{name}",
                )
        return 2
    if kv_cache_dtype not in KV_DTYPE_BYTES:
        raise ConfigError(f"{kv_cache_dtype!r} is not accepted; write auto or {accepted}", field="--kv-cache-dtype")
    return KV_DTYPE_BYTES[kv_cache_dtype]


def _head_size(text: Mapping[str, Any]) -> int:
    if text.get("head_dim") is not None:
        size = _positive(text, "head_dim")
    else:
        size, rest = divmod(_positive(text, "hidden_size"), _positive(text, "num_attention_heads"))
        if rest:
            raise ConfigError("is missing from config.json; add it to a copy of the file", field="head_dim")
    if text.get("v_head_dim", size) != size:
        raise _unknown("v_head_dim", "keys and values differ in size")
    return size


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    layers = _positive(text, "num_hidden_layers")
    if layers > 10_000:
        raise ConfigError(f"is {layers}; accepted are at most 10,000", field="num_hidden_layers")
    if name := next((name for name in text if _UNKNOWN_CACHE.fullmatch(name) and text[name]), None):
        raise _unknown(name, "layers keep more or less than each token's K and V")
    named = text.get("layer_types")
    for name, value in text.items():
        # A field of a model type that nobody here has seen. A new kind of layer often comes with such a list.
        is_of_layers = isinstance(value, list) and len(value) == layers and not _is_uniform(value)
        if is_of_layers and value != named and not _NOT_OF_KV.fullmatch(name):
            raise _unknown(name, "its entries, one for each layer, differ")
    if named is not None:
        if not isinstance(named, list) or len(named) != layers:
            raise ConfigError(f"must be a list of {layers} layer types, one for each layer", field="layer_types")
        for name in named:
            if name not in _LAYER_KINDS:
                raise _unknown("layer_types", repr(name))
        return [_LAYER_KINDS[name] for name in named]
    for name, value in text.items():
        if _LAYERS_DIFFER.fullmatch(name) and value and not _is_uniform(value):
            raise _unknown(name, "layers differ, and there is no layer_types")
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return ["full"] * layers
    if text.get("sliding_window_pattern") is None:
        raise _unknown("sliding_window", "there is no layer_types that says which layers have the window")
    every = _positive(text, "sliding_window_pattern")
    return ["window" if (index + 1) % every else "full" for index in range(layers)]


def _is_uniform(value: object) -> bool:
    return isinstance(value, list) and all(entry == value[0] for entry in value)


def _unknown(field: str, why: str) -> ConfigError:
    return ConfigError(f"unknown layer kind ({why}); {_MEASURE}", field=field)


def _positive(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if value is None:
        raise ConfigError("is missing from config.json; add it to a copy of the file", field=name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"is {value!r}; accepted is a whole number of 1 or more", field=name)
    return value
