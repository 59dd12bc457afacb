"""vLLM alone, without kvtiers or any connector: an adapter changes a request that names none.

``python -m tests.e2e.adapters_on_cpu FOLDER`` answers one prompt twice with the base model, by itself and beside a LoRA
request. Both answers should be equal. With vLLM 0.32 on CPUs they differ; with 0.33 they are equal (docs/sharing.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> int:
    """Exit code 1 if the answers differ."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
        )
    )
    model.save_pretrained(folder)
    adapter = folder / "adapter"
    adapter.mkdir(exist_ok=True)
    layers = [f"base_model.model.model.layers.{layer}.self_attn.o_proj" for layer in range(2)]
    save_file(
        {f"{layer}.lora_{side}.weight": torch.randn(shape) for layer in layers for side, shape in _SHAPES.items()},
        adapter / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    llm = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=128,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=1,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    base, other = {"prompt_token_ids": list(range(40))}, {"prompt_token_ids": list(range(100, 140))}
    alone = llm.generate([base], params)[0].outputs[0].token_ids
    beside = llm.generate([base, other], params, lora_request=[None, LoRARequest("a", 1, str(adapter))])
    print("alone:                ", list(alone))
    print("beside a LoRA request:", list(beside[0].outputs[0].token_ids))
    return int(list(alone) != list(beside[0].outputs[0].token_ids))


_SHAPES = {"A": (8, 64), "B": (64, 8)}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
