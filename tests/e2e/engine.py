"""One vLLM engine in one process: ``python -m tests.e2e.engine JOB.json``; prints the results as a JSON line.

The job is made by ``tests.e2e.runner``. Prompts are answered one by one, greedily, so that each one's time to first
token is its own. Those of ``at_once`` follow, all together.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULT_PREFIX = "E2E-RESULT "
ANSWER_TOKENS_MAX = 512
DEFAULTS = {"dtype": "float32", "block_size": 32, "enforce_eager": True}  # the job's ``engine`` overrides them


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Build the engine, answer the prompts, end the engine."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = job.get("kv_transfer_config")
    longest = max(map(len, [*job["prompts"], job.get("warm_up") or [], *job.get("at_once", [])]))
    started = time.monotonic()
    llm = LLM(
        model=job["model"],
        max_model_len=job.get("max_model_len", max(4096, longest + ANSWER_TOKENS_MAX)),
        disable_log_stats=False,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **DEFAULTS | job.get("engine", {}),
    )
    setup_s = time.monotonic() - started
    times = _SchedulerTimes.of(llm)
    params = SamplingParams(temperature=0.0, max_tokens=job.get("max_tokens", 16), ignore_eos=True)

    def answer(tokens: list[int], params: Any = params) -> Any:
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return output

    if job.get("warm_up"):  # the first forward of an engine pays for what no later one does
        answer(job["warm_up"])
    answers = []
    times.clear()
    for index, tokens in enumerate(job["prompts"]):
        for step in job.get("before", {}).get(str(index), ()):
            _act(step, llm)
        began = time.monotonic()
        output = answer(tokens)
        answers.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached_tokens": output.num_cached_tokens or 0,
                "ttft_s": output.metrics.first_token_latency if output.metrics else None,
                "total_s": time.monotonic() - began,
            }
        )
    at_once = _at_once(llm, job["at_once"], params) if "at_once" in job else None
    metrics = _metrics(llm)
    ended = time.monotonic()
    llm.llm_engine.engine_core.shutdown()
    return {
        "setup_s": setup_s,
        "answers": answers,
        "at_once": at_once,
        "metrics": metrics,
        "shutdown_s": time.monotonic() - ended,
        "steps_s": asdict(times),
    }


@dataclass
class _SchedulerTimes:
    """Seconds of each scheduling step and each digestion of its results; of none where they are in another process.

    Attributes:
        working: of steps with tokens to compute: what these take is taken from an answer.
        idle: of those without any, while loads or lookups are awaited. A connector may pause there on purpose.
    """

    working: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, llm: Any) -> _SchedulerTimes:
        """Begin to take times."""
        times = cls()
        core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
        if core is not None:
            scheduler = core.scheduler
            scheduler.schedule = times._timed(scheduler.schedule, lambda _, step: step)
            scheduler.update_from_output = times._timed(scheduler.update_from_output, lambda arguments, _: arguments[0])
        return times

    def clear(self) -> None:
        self.working.clear()
        self.idle.clear()

    def _timed(self, call: Any, step_of: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            took_s = time.perf_counter() - began
            works = step_of(args, result).total_num_scheduled_tokens > 0
            (self.working if works else self.idle).append(took_s)
            return result

        return timed


def _at_once(llm: Any, prompts: list[list[int]], params: Any) -> dict[str, Any]:
    began = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
    return {
        "took_s": time.monotonic() - began,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "ttft_s": [output.metrics.first_token_latency if output.metrics else None for output in outputs],
    }


def _act(step: dict[str, Any], llm: Any) -> None:
    match step["do"]:
        case "reset_prefix_cache":
            assert llm.reset_prefix_cache(reset_connector=step.get("connector", False)) is not False
        case "abort":
            _abort(llm, step["tokens"], step["after_s"])
        case "touch":
            Path(step["path"]).touch()
        case "wait_for":
            while not Path(step["path"]).exists():  # whoever has started this process ends it, if that never comes
                time.sleep(0.01)
        case other:
            raise ValueError(f"unknown step {other!r}")


def _abort(llm: Any, tokens: list[int], after_s: float) -> None:
    """Begin a request, and give it up while it waits for its KV."""
    from vllm import SamplingParams

    request_id = f"aborted after {after_s} s"
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": tokens}, SamplingParams(temperature=0.0, max_tokens=8))
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline:
        assert not llm.llm_engine.step(), "it was answered: nothing was loaded slowly"
    llm.llm_engine.abort_request([request_id])


def _metrics(llm: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if "kv_offload" in metric.name or "kvtiers" in metric.name or "prefix_cache" in metric.name:
            labels = {name: value for name, value in metric.labels.items() if name not in ("model_name", "engine")}
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            value: Any = getattr(metric, "value", None)
            if value is None:
                value = getattr(metric, "sum", 0.0)
            values[f"{metric.name}{{{shown}}}"] = float(value)
    return values


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    print(RESULT_PREFIX + json.dumps(run(job)), flush=True)
