"""Models with random weights, made on the machine that runs them: nothing is copied there or downloaded.

Prompts are token ids, so the models have no tokenizer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.layer_kinds import GEMMA, GRANITE, MISTRAL, Model

VOCABULARY = 1024
LLAMA = Model(
    "Llama",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 65536,
    },
)
#: Llama 3.1 8B's shape. vLLM fills it with random weights (``load_format: dummy``).
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
DEEPSEEK = Model(
    "DeepseekV2",
    {
        "first_k_dense_replace": 2,  # no experts: the bundle leaves out their kernels
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 512,  # the kernels of latent attention are built for this size
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
QWEN_NEXT = Model(
    "Qwen3Next",
    {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mlp_only_layers": [0, 1, 2, 3],  # no experts
        "num_experts": 0,
    },
)


@dataclass(frozen=True)
class Kind:
    """A model whose KV is not that of plain full attention, and the options of its engine.

    Attributes:
        on_cpu: whether vLLM's CPU build runs it.
    """

    name: str
    model: Model
    engine: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: bool = True


KINDS = (
    Kind("sliding windows beside full attention (Gemma3)", GEMMA),
    Kind("sliding windows only (Mistral)", MISTRAL),
    Kind("Mamba2 and attention (GraniteMoeHybrid)", GRANITE, {"max_num_batched_tokens": 512}, on_cpu=False),
    Kind("latent attention (DeepseekV2)", DEEPSEEK, on_cpu=False),
    Kind("gated delta net (Qwen3Next)", QWEN_NEXT, on_cpu=False),
    Kind("KV in 8 bits (Llama)", LLAMA, {"kv_cache_dtype": "fp8", "calculate_kv_scales": False}, on_cpu=False),
    Kind(
        "a draft by n-grams (Llama)",
        LLAMA,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ),
    Kind("a draft model with KV of its own (EAGLE)", LLAMA, {"speculative_config": "eagle"}, on_cpu=False),
)


def make_8b(folder: Path) -> Path:
    """Write the configuration of ``LLAMA_8B``."""
    return _write_config(folder / "llama-8b", LLAMA_8B)


def make_eagle(folder: Path) -> Path:
    """Write an EAGLE draft of one layer for ``LLAMA``, with random weights."""
    import torch
    from safetensors.torch import save_file

    made = folder / "eagle-llama"
    if made.exists():
        return made
    shape = LLAMA.config
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    kv = shape["num_key_value_heads"] * head
    torch.manual_seed(2)
    sizes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (kv, hidden),
        "layers.0.self_attn.v_proj.weight": (kv, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    config = {
        **shape,
        "architectures": ["LlamaForCausalLMEagle"],  # vLLM prefixes its own name for drafts
        "model_type": "llama",
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    _write_config(made, config)
    save_file(
        {name: torch.randn(size, dtype=torch.bfloat16) * 0.1 for name, size in sizes.items()},
        made / "model.safetensors",
    )
    return made


def random_prompt(tokens: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Random token ids, without a repeating pattern."""
    return random.Random(seed).choices(range(3, vocabulary), k=tokens)


def _write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
