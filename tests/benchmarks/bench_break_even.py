"""Time to first token around the break-even: ``load: auto`` against ``always`` and ``never``, in vLLM on CPUs with S3.

    python -m tests.benchmarks.bench_break_even [--cell MB_PER_S:LATENCY_MS:TOKENS]... [--json FILE] [--png FILE]

Run it with an interpreter that has vLLM (``make bench-break-even``). The model has random weights: what counts is how
long its prefill takes and how many bytes of KV it has. For each cell, one engine stores the prompts. Then an engine of
each kind computes three prompts that are not stored and gets those that are. The first ten of these are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.far import far
from tests.soak.s3_server import BUCKET, S3Process

BLOCK_TOKENS = 32
CONNECTORS = ("KVTiersConnector", "SharedStorageConnector")
CELLS = ("20:5:2000", "50:5:2000", "1000:5:2000")
COLD, LEFT_OUT = 3, 10
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Answer a job's prompts in this process; returns the seconds to each first token, and the decisions."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    import transformers
    from vllm import LLM, SamplingParams

    sizes: dict[str, Any] = dict(SIZES, num_hidden_layers=8, vocab_size=1024, max_position_embeddings=16_384)
    model = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    model.save_pretrained(job["model"])
    tier = {"type": "s3", "bucket": BUCKET, "endpoint_url": job["endpoint_url"], "load": job["load"]}
    place: dict[str, Any] = {"tiers": [tier]} if job["connector"] == "KVTiersConnector" else {"tier": tier}
    llm = LLM(
        model=job["model"], load_format="dummy", skip_tokenizer_init=True, dtype="float32", seed=0,
        block_size=BLOCK_TOKENS, max_model_len=job["tokens"] + BLOCK_TOKENS, enforce_eager=True,
        distributed_executor_backend="uni", disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": job["connector"], "kv_connector_module_path": "kvtiers.vllm", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB", **place},
        },
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def first_token_s(number: int) -> float:
        chance = random.Random(number)
        tokens = [chance.randrange(1000) for _ in range(job["tokens"])]
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return float(output.metrics.first_token_latency)

    seconds = [first_token_s(number) for number in job["prompts"]]
    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    decided = {
        sample.labels["reason"]: sample.value
        for sample in manager.decisions.metrics.snapshot()
        if sample.name == "kvtiers_load_decisions_total" and sample.value
    }
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": seconds, "decided": decided}


def run(job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run ``engine`` in a process of its own."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else "tests.benchmarks.bench_break_even", "--engine"]
    done = subprocess.run(
        [*command, json.dumps(job)], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"the engine failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def measure(cell: str, prompts: int, model: str, connector: str) -> dict[str, Any]:
    """One cell: medians of the three kinds."""
    mb_per_s, latency_ms, tokens = (int(part) for part in cell.split(":"))
    row: dict[str, Any] = {"cell": cell}
    environment = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_EC2_METADATA_DISABLED": "true"}
    stored = list(range(COLD, COLD + LEFT_OUT + prompts))
    s3 = S3Process()
    try:
        job = {"model": model, "connector": connector, "tokens": tokens, "endpoint_url": s3.endpoint_url}
        run(job | {"load": "never", "prompts": stored}, environment)
        with far(s3.endpoint_url, latency_ms / 1000, mb_per_s * 1e6) as url:
            for load in ("auto", "always", "never"):
                cold = list(range(-COLD, 0)) if load == "auto" else [-1]
                result = run(job | {"endpoint_url": url, "load": load, "prompts": [*cold, *stored]}, environment)
                measured = result["seconds"][len(cold) + LEFT_OUT :]
                row[load] = statistics.median(measured)
                row[f"{load}_max"] = max(measured)
                row[f"{load}_decided"] = result["decided"]
    finally:
        s3.close()
    row["ratio"] = row["auto"] / min(row["always"], row["never"])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| MB/s : ms : tokens | auto | always | never | auto / better | decided |", "|---|---|---|---|---|---|"]
    for row in rows:
        decided = ", ".join(f"{reason} {int(count)}" for reason, count in row["auto_decided"].items())
        times = " | ".join(f"{row[load]:.3f} s" for load in ("auto", "always", "never"))
        lines.append(f"| {row['cell']} | {times} | {row['ratio']:.2f} | {decided} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """The medians as bars, by cell."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(max(4, 2 * len(rows)), 4))
    for offset, load in enumerate(("auto", "always", "never")):
        places = [index + 0.27 * (offset - 1) for index in range(len(rows))]
        axes.bar(places, [row[load] for row in rows], width=0.25, label=f"load: {load}")
    axes.set_xticks(range(len(rows)), [row["cell"] for row in rows])
    axes.set_xlabel("MB/s : latency in ms : tokens")
    axes.set_ylabel("first token, s (median)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure the cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", help=f"MB_PER_S:LATENCY_MS:TOKENS; default: {' '.join(CELLS)}")
    parser.add_argument(
        "--connector", default="KVTiersConnector", choices=("KVTiersConnector", "SharedStorageConnector")
    )
    parser.add_argument("--prompts", type=int, default=10, help="that are measured, after the first ten")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--png", help="file for a plot; needs matplotlib")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print("RESULT", json.dumps(engine(json.loads(args.engine))))
        return
    with tempfile.TemporaryDirectory() as model:
        rows = [measure(cell, args.prompts, model, args.connector) for cell in args.cell or CELLS]
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.png:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
