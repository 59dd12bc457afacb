"""Models with random weights, made on the machine that runs them: nothing is copied there or downloaded.

Prompts are token ids, so the models have no tokenizer.

Some kinds of KV run on GPUs only: on CPUs vLLM turns prefix caching off for latent attention (unless the CPU has AMX),
KV in 8 bits needs AVX-512 or AMX, and OlmoHybrid needs Triton.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.layer_kinds import GEMMA, GRANITE, MISTRAL, STEP_TOKENS, Model

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
        "mlp_only_layers": [0, 1, 2],  # vLLM demands a layer of experts
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
)
OLMO = Model(
    "OlmoHybrid",
    {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "head_dim": 128,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "pad_token_id": None,  # the default is larger than the vocabulary
        "eos_token_id": None,
    },
)


class MiMo(Model):
    """MiMo, which has a layer that predicts one more token (MTP).

    transformers does not know MiMo. The model is Qwen2 with that layer, so Qwen2's files are made and completed.
    """

    def made_in(self, folder: Path) -> Path:
        """Its folder, written if it is not there."""
        made = folder / "MiMo"
        if not made.exists():
            shutil.copytree(super().made_in(folder), made)
            config = json.loads((made / "config.json").read_text())
            layer, hidden = "model.mtp_layers.0.", config["hidden_size"]
            sizes = {f"{layer}{name}": size for name, size in _layer_sizes(config).items()}
            norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
            sizes |= {f"{layer}{name}.weight": (hidden,) for name in norms}
            sizes[f"{layer}input_proj.weight"] = (hidden, 2 * hidden)
            for name in ("q", "k", "v"):
                sizes[f"{layer}self_attn.{name}_proj.bias"] = sizes[f"{layer}self_attn.{name}_proj.weight"][:1]
            _save_random(made / "mtp.safetensors", sizes)
            _write_config(made, {**config, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1})
        return made


@dataclass(frozen=True)
class Kind:
    """A model whose KV is not that of plain full attention, and the options of its engine.

    Attributes:
        devices: those on which the rows run it.
    """

    name: str
    model: Model
    engine: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu", "cuda")


KINDS = (
    Kind("sliding windows beside full attention (Gemma3)", GEMMA),
    Kind("sliding windows only (Mistral)", MISTRAL),
    # The CPU kernels need one block a step (tests.e2e.layer_kinds).
    Kind("Mamba2 and attention (GraniteMoeHybrid)", GRANITE, {"max_num_batched_tokens": STEP_TOKENS}),
    Kind("latent attention (DeepseekV2)", DEEPSEEK, {"attention_backend": "TRITON_MLA"}, devices=("cuda",)),
    # The CPU's kernel takes only bfloat16. On GPUs Qwen3Next needs the kernels of experts, which the bundle leaves out.
    Kind("gated delta net (Qwen3Next)", QWEN_NEXT, {"dtype": "bfloat16"}, devices=("cpu",)),
    Kind("gated delta net (OlmoHybrid)", OLMO, devices=("cuda",)),
    Kind("KV in 8 bits (Llama)", LLAMA, {"kv_cache_dtype": "fp8"}, devices=("cuda",)),
    Kind(
        "a draft by n-grams (Llama)",
        LLAMA,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ),
    Kind("a draft model with KV of its own (EAGLE)", LLAMA, {"speculative_config": "eagle"}),
    Kind(
        "a layer that predicts one more token, with KV of its own (MTP, MiMo)",
        MiMo("Qwen2", {"num_hidden_layers": 4}),
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    ),
)


def make_8b(folder: Path) -> Path:
    """Write the configuration of ``LLAMA_8B``."""
    return _write_config(folder / "llama-8b", LLAMA_8B)


def make_eagle(folder: Path) -> Path:
    """Write an EAGLE draft of one layer for ``LLAMA``, with random weights."""
    made = folder / "eagle-llama"
    if made.exists():
        return made
    config = {
        **LLAMA.config,
        "architectures": ["LlamaForCausalLM"],  # vLLM makes EagleLlamaForCausalLM of it
        "model_type": "llama",
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    _write_config(made, config)
    hidden = LLAMA.config["hidden_size"]
    sizes = {f"layers.0.{name}": size for name, size in _layer_sizes(LLAMA.config).items()}
    _save_random(made / "model.safetensors", {"fc.weight": (hidden, 2 * hidden), **sizes})
    return made


def random_prompt(tokens: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Random token ids, without a repeating pattern."""
    return random.Random(seed).choices(range(3, vocabulary), k=tokens)


def _layer_sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """A transformer layer's weights, without the norm before attention: name -> shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }


def _save_random(path: Path, sizes: Mapping[str, tuple[int, ...]]) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(2)
    save_file({name: torch.randn(size, dtype=torch.bfloat16) * 0.1 for name, size in sizes.items()}, path)


def _write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
