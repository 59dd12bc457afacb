"""Runs a small engine of the installed vLLM and prints which calls its scheduler makes to KVTiersManager, in order.

``python -m tests.vllm.recorded_engine FOLDER`` puts a model's config into the folder and prints one JSON line: a list
of ``[call, request, keys, answer]``. The calls ``begin`` and ``step`` are the script's own: the name of a scene, and a
step of the engine that begins.

A process of its own, because ``test_call_order`` runs it with each release of vLLM that is at hand.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1")

import transformers
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from kvtiers.connector.vllm import spec

BLOCK_TOKENS = 32
GPU_BLOCKS = 8  # vLLM keeps one of them
STEPS_MAX = 2000
WITH_KEYS = ("lookup", "get_load_source", "prepare_load", "complete_load", "prepare_store", "complete_store", "touch")
#: What vLLM calls during a run, besides the polls ``get_stats`` and ``has_pending_work``.
RECORDED = (
    *WITH_KEYS,
    *("on_new_request", "on_request_finished", "on_schedule_end", "take_events", "reset_cache", "on_reset_flushed"),
)

calls: list[list[Any]] = []


def recorded(name: str) -> Callable[..., Any]:
    """The method of KVTiersManager, recorded."""
    method = getattr(spec.KVTiersManager, name)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        request = next((each.req_id for each in (*arguments, *named.values()) if hasattr(each, "req_id")), None)
        keys: Any = arguments[0] if name in WITH_KEYS else ()
        keys = [keys] if isinstance(keys, bytes) else keys
        calls.append([name, request, sorted(bytes(key).hex()[-12:] for key in keys), None])
        index = len(calls) - 1
        answer = method(self, *arguments, **named)
        if name == "prepare_store" and answer is not None:
            calls[index][3] = sorted(bytes(key).hex()[-12:] for key in answer.keys_to_store)
        elif name == "lookup":
            calls[index][3] = answer.name
        return answer

    return call


def main() -> None:
    """Run all scenes over one engine."""
    methods = {name: recorded(name) for name in RECORDED}
    vars(spec)["KVTiersManager"] = type("RecordedManager", (spec.KVTiersManager,), methods)
    options = {"cpu_bytes_to_use": "16MiB", "tiers": [{"type": "memory"}], "storage_after_reset": "keep"}
    transfer = {"kv_connector": "KVTiersConnector", "kv_connector_module_path": "kvtiers.vllm", "kv_role": "kv_both"}
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=2, architectures=["LlamaForCausalLM"], **sizes)
    model.save_pretrained(sys.argv[1])
    arguments = EngineArgs(
        model=sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=GPU_BLOCKS,
        max_model_len=BLOCK_TOKENS * (GPU_BLOCKS - 2),
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_transfer_config={**transfer, "kv_connector_extra_config": options},
    )
    engine = LLMEngine.from_engine_args(arguments)

    def add(name: str, first: int, blocks: int, tokens: int) -> None:
        prompt = {"prompt_token_ids": [(first + number) % 250 for number in range(blocks * BLOCK_TOKENS + 1)]}
        engine.add_request(
            name, prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        )

    def step() -> None:
        calls.append(["step", None, [], None])
        engine.step()

    def run() -> None:
        for _ in range(STEPS_MAX):
            if not engine.has_unfinished_requests():
                return
            step()
        raise AssertionError(calls[-20:])

    def step_until(call: str, request: str) -> None:
        for _ in range(STEPS_MAX):
            if any(name == call and str(of).startswith(request) for name, of, *_ in calls):
                return
            step()
        raise AssertionError(calls[-20:])

    def scene(name: str) -> None:
        calls.append(["begin", name, [], None])

    def abort(name: str, first: int, blocks: int, tokens: int, during: str) -> None:
        """Add a request, and abort it after this call for it."""
        add(name, first, blocks, tokens)
        step_until(during, name)
        engine.abort_request([name])

    def settle(name: str, first: int) -> None:
        """Run another request. Meanwhile the copies of earlier requests end."""
        add(name, first, 1, 40)
        run()

    scene("store")
    add("first", 0, 4, 2)
    run()
    settle("settles", 200)
    scene("load")
    engine.reset_prefix_cache()
    add("again", 0, 4, 2)
    run()
    scene("preemption")
    add("long", 20, 2, 3 * BLOCK_TOKENS)
    add("preempted", 60, 2, 3 * BLOCK_TOKENS)
    run()
    scene("abort while it stores")
    abort("aborted", 100, 3, 50, during="prepare_store")
    settle("settles too", 210)
    scene("abort while it loads")
    engine.reset_prefix_cache()
    abort("unloaded", 0, 4, 2, during="prepare_load")
    settle("settles again", 220)
    scene("reset while it stores")
    abort("reset", 140, 4, 10, during="prepare_store")
    engine.reset_prefix_cache(reset_connector=True)
    settle("last", 230)
    print("CALLS", json.dumps(calls))


if __name__ == "__main__":
    main()
