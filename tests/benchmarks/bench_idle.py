"""What a connector that finds nothing costs a step of vLLM: ``python -m tests.benchmarks.bench_idle``.

Run it with an interpreter that has vLLM (``make bench-idle``). An engine on CPUs generates for 64 requests at once,
none of which was stored. Each kind of connector has a process of its own, and they take turns. Shown are the medians
of a step, and of the part of it that is spent in the connector's methods. The machine's speed drifts, so the share of
a step that is spent in the connector is more exact than the ratio of two processes' steps.

The model has random weights. Its steps are as long as those of a model of 8B on a GPU, some 10 to 30 ms.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

KINDS = ("none", "KVTiersConnector", "SharedStorageConnector")
REQUESTS, PROMPT_TOKENS, LEFT_OUT, STEPS = 64, 200, 80, 400
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}


def options(kind: str, root: str) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config`` for a kind."""
    if kind == "none":
        return None
    tier = {"type": "fs", "root_dir": root, "max_bytes": "20GiB"}
    extra: dict[str, dict[str, Any]] = {
        "KVTiersConnector": {"cpu_bytes_to_use": "1GiB", "tiers": [tier]},
        "SharedStorageConnector": {"cpu_bytes_to_use": "1GiB", "tier": tier},
    }
    return {
        "kv_connector": kind,
        "kv_connector_module_path": "kvtiers.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra[kind],
    }


class Spent:
    """Seconds in the methods of connectors."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def watch(self, connector: Any) -> None:
        """Count the time in each public method that vLLM may call."""
        for name in dir(type(connector)):
            if not name.startswith("_") and isinstance(inspect.getattr_static(connector, name), types.FunctionType):
                setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return call


def engine(kind: str, folder: str) -> dict[str, float]:
    """Generate in this process; returns the medians of a step, and of its part in the connector, in seconds."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1")
    import transformers
    from vllm import LLM, SamplingParams
    from vllm.distributed import kv_transfer

    sizes: dict[str, Any] = dict(SIZES, num_hidden_layers=8, vocab_size=1024, max_position_embeddings=4096)
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(f"{folder}/model")
    llm = LLM(
        model=f"{folder}/model", load_format="dummy", skip_tokenizer_init=True, dtype="float32", seed=0,
        block_size=32, max_model_len=1024, max_num_seqs=REQUESTS, enforce_eager=True,
        distributed_executor_backend="uni", kv_transfer_config=options(kind, f"{folder}/{kind}"),
    )  # fmt: skip
    params = SamplingParams(max_tokens=LEFT_OUT + STEPS, temperature=0, ignore_eos=True, detokenize=False)
    chance = random.Random(1)
    for number in range(REQUESTS):
        tokens = [chance.randrange(1000) for _ in range(PROMPT_TOKENS)]
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
    spent = Spent()
    if kind != "none":
        spent.watch(llm.llm_engine.engine_core.engine_core.scheduler.connector)
        spent.watch(kv_transfer.get_kv_transfer_group())
    steps, inside = [], []
    while llm.llm_engine.has_unfinished_requests():
        began, before = time.perf_counter(), spent.seconds
        llm.llm_engine.step()
        steps.append(time.perf_counter() - began)
        inside.append(spent.seconds - before)
    shares = [part / step for part, step in zip(inside, steps, strict=True)]
    llm.llm_engine.engine_core.shutdown()
    chosen = slice(LEFT_OUT, LEFT_OUT + STEPS - 20)
    return {
        "step_s": statistics.median(steps[chosen]),
        "inside_s": statistics.median(inside[chosen]),
        "share": statistics.median(shares[chosen]),
        "mean_share": sum(inside[chosen]) / sum(steps[chosen]),
    }


def run(kind: str, folder: str) -> dict[str, float]:
    """Run ``engine`` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_idle", "--engine", kind, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"the engine failed:\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main() -> None:
    """Let the kinds take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print("RESULT", json.dumps(engine(*args.engine)))
        return
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                results[kind].append(run(kind, folder))
    print(f"| {REQUESTS} requests, {args.rounds} rounds | step | in the connector | its share | its mean share |")
    print("|---|---|---|---|---|")
    for kind, rounds in results.items():
        step, inside, share, mean = (
            statistics.median(each[name] for each in rounds) for name in ("step_s", "inside_s", "share", "mean_share")
        )
        print(f"| {kind} | {step * 1e3:.2f} ms | {inside * 1e6:.0f} µs | {share:.2%} | {mean:.2%} |")


if __name__ == "__main__":
    main()
