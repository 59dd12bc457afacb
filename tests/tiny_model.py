"""A tiny Llama with random weights, and a folder with it and a tokenizer of single bytes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def make_tiny_llama(*, vocab_size: int = 64, num_layers: int = 3) -> Any:
    """The model. Its weights are larger than usual, so that the next token depends on all of the prompt."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
    )
    model_class: Any = transformers.LlamaForCausalLM  # untyped
    return model_class(config).eval()


def make_model_dir(folder: Path) -> Path:
    """As a hub would give it."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    make_tiny_llama(vocab_size=256, num_layers=2).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast  # untyped
    tokenizer_class(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
