"""One long prompt, computed and then loaded from files: ``python -m tests.benchmarks.bench_gpu_prompt ROOT``.

A model of Llama 3.1 8B's shape with random weights answers a random prompt on the demo's engine, with transformers'
attention. Its KV goes through the region into an ``fs`` tier below ROOT. The engine's KV is then overwritten and
everything of kvtiers is made anew: the second answer has nothing but the files. The bytes of the loaded KV must equal
those of the first answer. Its tokens may differ: logits of random weights are close to each other, and a prompt that is
computed after a loaded prefix is rounded differently. The files were just written, so they are in the page cache: the
figures are those of the path, not of a disk.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvtiers.connector.demo.engine import Engine
from kvtiers.connector.demo.model import LoadedModel
from kvtiers.connector.demo.paged_cache import KVLayout, PagedKVCache
from kvtiers.connector.demo.worker import make_spec
from kvtiers.connector.region.region_header import row_stride
from kvtiers.tiers.config.deployment import parse_config

BLOCK_SIZE, BLOCKS_PER_CHUNK, NEW_TOKENS = 16, 16, 8
GB, GIB = 1e9, 1 << 30
NEVER = frozenset[int]()


def make_model(layers: int, hidden: int, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Random weights in the shape of Llama 3.1 8B, but for its number of layers and its width."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 1),
        head_dim=128,
        vocab_size=128_256 if device.type == "cuda" else 1024,
        max_position_embeddings=131_072,
    )
    torch.manual_seed(20261127)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            module = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    module.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
    return LoadedModel("random-llama", "20261127", module, None, NEVER)


def run(model: LoadedModel, memory: PagedKVCache, prompt: Sequence[int], root: str, *, load: bool) -> dict[str, Any]:
    """Answer the prompt with a region and a tier of its own; the KV of the prompt's chunks is in ``kv`` afterwards."""
    rows = memory.num_blocks // BLOCKS_PER_CHUNK
    deployment = parse_config(
        {
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            "region": {"size": rows * row_stride(memory.block_bytes * BLOCKS_PER_CHUNK, 1)},
            "tiers": [{"type": "fs", "root_dir": root}],
        }
    )
    spec = make_spec(model, memory, deployment)
    engine = Engine(model, memory, spec, store_chunks_max=rows)
    try:
        engine.warm_up()
        request = engine.run(prompt, max_new_tokens=NEW_TOKENS, load=load, store=not load)
        blocks = len(prompt) // engine.chunk_tokens * BLOCKS_PER_CHUNK
        kv = [tensor[request.block_ids[:blocks]].view(torch.int8) for tensor in memory.tensors]
        answered = time.perf_counter()
        engine.drain()
        return {
            "ttft_s": request.ttft_s,
            "load_s": request.load_s,
            "tokens_loaded": request.tokens_loaded,
            "answer": request.answer,
            "kv": kv,
            "kv_bytes": sum(each.nbytes for each in kv),
            "stored_after_s": time.perf_counter() - answered,
            "copy_s": engine.loaded.seconds if load else engine.stored.seconds,
        }
    finally:
        engine.shutdown()
        spec.shutdown()


def measure(model: LoadedModel, tokens: int, root: Path, device: torch.device) -> dict[str, Any]:
    """The figures of one length of prompt.

    Raises:
        RuntimeError: not all of the prompt was loaded, or its bytes differ.
    """
    chunk = BLOCK_SIZE * BLOCKS_PER_CHUNK
    blocks = math.ceil((tokens + NEW_TOKENS) / chunk) * BLOCKS_PER_CHUNK
    layout = KVLayout.of_model(model.module)
    memory = PagedKVCache(layout, num_blocks=blocks + 2 * BLOCKS_PER_CHUNK, block_size=BLOCK_SIZE, device=device)
    prompt = np.random.default_rng(tokens).integers(0, model.module.config.vocab_size, tokens).tolist()
    with tempfile.TemporaryDirectory(dir=root) as folder:
        cold = run(model, memory, prompt, folder, load=False)
        for tensor in memory.tensors:
            tensor.zero_()
        warm = run(model, memory, prompt, folder, load=True)
    loadable = (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE // chunk * chunk
    if warm["tokens_loaded"] < loadable:
        raise RuntimeError(f"{warm['tokens_loaded']} of {tokens} tokens were loaded")
    loaded_blocks = warm["tokens_loaded"] // BLOCK_SIZE
    if not all(
        torch.equal(old[:loaded_blocks], new[:loaded_blocks]) for old, new in zip(cold["kv"], warm["kv"], strict=True)
    ):
        raise RuntimeError("loaded KV is not the KV that was stored")
    return {
        "tokens": tokens,
        "kv_gib": cold["kv_bytes"] / GIB,
        "cold_ttft_s": cold["ttft_s"],
        "warm_ttft_s": warm["ttft_s"],
        "times_sooner": cold["ttft_s"] / warm["ttft_s"],
        "load_s": warm["load_s"],
        "load_gb_s": warm["kv_bytes"] / warm["load_s"] / GB,
        "load_copy_gb_s": warm["kv_bytes"] / warm["copy_s"] / GB,
        "stored_after_s": cold["stored_after_s"],
        "store_copy_gb_s": cold["kv_bytes"] / cold["copy_s"] / GB,
        "answers_equal": cold["answer"] == warm["answer"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("root", type=Path, nargs="+", help="folders for the files, one after the other")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_000, 32_000])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096, help="4096 has the 8 KV heads of Llama 3.1 8B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    report: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "layers": args.layers, "hidden": args.hidden, "rows": [],
    }  # fmt: skip
    model = make_model(args.layers, args.hidden, torch.bfloat16, device)
    for root in args.root:
        root.mkdir(parents=True, exist_ok=True)
        measure(model, args.tokens[0], root, device)  # warms up
        for tokens in args.tokens:
            report["rows"].append({"root": str(root), **measure(model, tokens, root, device)})
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in report["rows"][-1].items()}))
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
