"""What ``config.json`` of published models says about their KV cache. Other fields are left out."""

from __future__ import annotations

from typing import Any

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
QWEN3_8B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
MISTRAL_7B_V01 = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
JAMBA_MINI = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LLAMA4_SCOUT = {
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}

MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
MINIMAX_TEXT_01 = {
    "model_type": "minimax_text_01",
    "attn_type_list": ([0] * 7 + [1]) * 10,
    "head_dim": 128,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
NEMOTRON_NAS = {
    "model_type": "nemotron-nas",
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": index % 3 == 2}, "ffn": {"no_op": False}} for index in range(80)
    ],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": None,
}
RECURRENT_GEMMA_2B = {
    "model_type": "recurrent_gemma",
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "head_dim": 256,
    "hidden_size": 2560,
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
}
SMOLLM3_3B = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "layer_types": ["full_attention"] * 36,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
}

#: Name -> config, and (layers that keep every token, with a window, with a state), KV heads, head size.
ALL: dict[str, tuple[dict[str, Any], tuple[int, int, int], int, int]] = {
    "llama-8b": (LLAMA_8B, (32, 0, 0), 8, 128),
    "llama-70b": (LLAMA_70B, (80, 0, 0), 8, 128),
    "qwen3-8b": (QWEN3_8B, (36, 0, 0), 8, 128),
    "qwen2-7b": (QWEN2_7B, (28, 0, 0), 4, 128),
    "gpt-oss-20b": (GPT_OSS_20B, (12, 12, 0), 8, 64),
    "gemma3-27b": (GEMMA3_27B, (10, 52, 0), 16, 128),
    "deepseek-v3": (DEEPSEEK_V3, (61, 0, 0), 1, 576),
    "minimax-m2": (MINIMAX_M2, (62, 0, 0), 8, 128),
    "smollm3-3b": (SMOLLM3_3B, (36, 0, 0), 4, 128),
    "qwen3-next-80b": (QWEN3_NEXT_80B, (12, 0, 36), 2, 256),
}
