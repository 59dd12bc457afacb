"""Rows that tests/e2e does not have: long prompts on a large model, many requests at once, and other kinds of KV.

As in tests/e2e, every row runs each engine in its own process and compares it with an engine without a connector.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.e2e.lab import REPOSITORY, EngineFailedError, Row, metric
from tests.e2e.rows import BLOCK_TOKENS, Setting, files_of, stored_place
from tests.e2e.ways import way
from tests.gpu.models import KINDS, Kind, make_eagle, random_prompt

#: In the error of an engine whose configuration kvtiers refuses. An engine that ends with another error has failed.
REFUSED = "ConfigError: "
CONTEXT_TOKENS = 512  # room after the prompt, for the answer
_making = threading.Lock()  # rows that run side by side share a model's folder


@dataclass(frozen=True)
class Scale:
    """Sizes of the rows: for some minutes on a GPU, or for a rehearsal on two CPU cores.

    Attributes:
        long_model: folder of the model of ``long_prompt`` and ``crowd``.
        long_engine: options of that model's engines.
        vocabulary: number of tokens in that model's vocabulary.
        crowd: number of requests at once.
        crowd_shared: number of tokens with which all these requests begin.
        crowd_own: number of further tokens that each request has to itself.
    """

    long_model: Path
    long_engine: Mapping[str, Any]
    vocabulary: int
    long_tokens: int
    long_region_bytes: int
    crowd: int
    crowd_shared: int
    crowd_own: int


@dataclass
class GpuSetting(Setting):
    """A setting without an S3 server, in which blocks are stored in folders.

    Attributes:
        cold: the engine's extra options -> time to first token of a long prompt without a connector.
    """

    scale: Scale | None = None
    cold: dict[str, float] = field(default_factory=dict)


def long_prompt(setting: GpuSetting, name: str, **engine: Any) -> Row:
    """Measure the time to first token of a long prompt: without a connector, of a writer, and of a new reader."""
    scale = _scale(setting)
    row = Row(f"{name}: {scale.long_tokens:,} tokens{_told(engine)}", setting.lab.version)
    job = _long_job(scale, engine)
    prompt = random_prompt(scale.long_tokens, 1, scale.vocabulary)
    told = _told(engine)
    if told not in setting.cold:
        setting.cold[told] = setting.lab.run(None, [prompt], **job)["answers"][0]["ttft_s"]
    config = way(name, setting.place(row.name), region_bytes=scale.long_region_bytes)
    writer = setting.lab.run(config, [prompt], **job)["answers"][0]
    reader = setting.lab.run(config, [prompt], **job)["answers"][0]
    row.expect(writer["cached_tokens"] == 0, f"the writer found {writer['cached_tokens']} tokens in an empty folder")
    row.expect(reader["cached_tokens"] > scale.long_tokens * 9 // 10, f"{reader['cached_tokens']} tokens were reused")
    row.figures = {
        "cold_ttft_s": setting.cold[told],
        "writer_ttft_s": writer["ttft_s"],
        "warm_ttft_s": reader["ttft_s"],
        "speedup": setting.cold[told] / reader["ttft_s"],
        "reused_tokens": reader["cached_tokens"],
        "tokens_equal": int(writer["tokens"] == reader["tokens"]),  # logits of made-up weights lie close together
    }
    return row


def crowd(setting: GpuSetting, name: str) -> Row:
    """Measure the throughput of many requests with a long shared prefix: without a connector, without and with hits.

    As in production, the engine's own prefix cache holds the shared prefix after it was computed or loaded once.
    """
    scale = _scale(setting)
    row = Row(f"{name}: {scale.crowd} requests share {scale.crowd_shared:,} tokens", setting.lab.version)
    shared = random_prompt(scale.crowd_shared, 2, scale.vocabulary)
    prompts = [shared + random_prompt(scale.crowd_own, 100 + index, scale.vocabulary) for index in range(scale.crowd)]
    job = _long_job(scale, {}) | {"at_once": prompts}
    config = way(name, setting.place(row.name), region_bytes=scale.long_region_bytes)
    for who, transfer in (("none", None), ("no_hit", config), ("all_hits", config)):
        result = setting.lab.run(transfer, [], **job)["at_once"]
        row.figures |= {
            f"{who}_requests_per_s": len(prompts) / result["took_s"],
            f"{who}_ttft_s": statistics.median(result["ttft_s"]),
            f"{who}_reused_tokens": result["cached_tokens"],
        }
        row.expect(len(result["tokens"]) == len(prompts), f"{who}: {len(result['tokens'])} requests were answered")
    for who in ("no_hit", "all_hits"):
        row.figures[f"{who}_of_none"] = float(row.figures[f"{who}_requests_per_s"]) / float(
            row.figures["none_requests_per_s"]
        )
    return row


def truncated(setting: Setting, name: str) -> Row:
    """Truncate every stored file between the writer and the reader. Expects equal tokens, and nothing reused."""
    row = Row(f"{name}: every file truncated", setting.lab.version)
    place, config = stored_place(setting, name, row)
    files = files_of(place)
    for index, path in enumerate(files):
        size = path.stat().st_size
        with path.open("r+b") as opened:
            opened.truncate((0, 1, 4095, size // 2, size - 1)[index % 5])
    result = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
    answer = result["answers"][0]
    row.expect(answer["tokens"] == setting.reference.document, "tokens differ")
    row.expect(answer["cached_tokens"] == 0, f"{answer['cached_tokens']} tokens were reused")
    row.figures = {"files": len(files), "hits": metric(result, "vllm:external_prefix_cache_hits")}
    return row


def kv_of(kind: Kind, setting: GpuSetting, name: str) -> Row:
    """Run a model with another kind of KV. Expects the tokens of an engine without a connector, or a refusal."""
    row = Row(f"{name}: {kind.name}", setting.lab.version)
    engine = dict(kind.engine)
    with _making:
        model = kind.model.made_in(setting.scratch)
        if engine.get("speculative_config") == "eagle":
            draft = {"method": "eagle", "model": str(make_eagle(setting.scratch)), "num_speculative_tokens": 2}
            engine["speculative_config"] = draft
    prompt = random_prompt(30 * BLOCK_TOKENS + 7, 3, 256)
    job: dict[str, Any] = {"model": str(model), "engine": engine}
    # Larger chunks of a model with sliding windows are refused.
    config = way(name, replace(setting.place(row.name), extra={"blocks_per_chunk": 1}))
    answers = {}
    for who in ("writer", "reader"):
        try:
            answers[who] = setting.lab.run(config, [prompt], **job)["answers"][0]
        except EngineFailedError as e:
            if REFUSED in str(e):
                row.figures["refused"] = str(e).rpartition(REFUSED)[2].splitlines()[0][:300]
            else:
                row.expect(False, f"the {who} ended: {e}"[-1500:])
            return row
        row.figures[f"{who}_reused_tokens"] = answers[who]["cached_tokens"]
    row.expect(answers["writer"]["cached_tokens"] == 0, "the writer found tokens in an empty folder")
    row.expect(answers["reader"]["cached_tokens"] > 0, "the reader reused nothing, so its tokens prove nothing")
    # The second answer comes over the engine's own prefix cache, which rounds as a loaded prefix does.
    accepted = [answer["tokens"] for answer in setting.lab.run(None, [prompt, prompt], **job)["answers"]]
    row.expect(len(set(accepted[0])) > 1, "the model repeats one token, so equal tokens prove nothing")
    for who, answer in answers.items():
        row.expect(answer["tokens"] in accepted, f"the {who}'s tokens differ")
    return row


def command(arguments: Sequence[str], setting: GpuSetting, name: str) -> Row:
    """Run one of the repository's commands. Expects exit code 0."""
    row = Row(name, setting.lab.version)
    log = setting.lab.log / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as opened:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            env=setting.lab.environment | {"KVTIERS_TEST_GPU": "1"},
            stdout=opened,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, setting.lab.ends_at - time.monotonic()),
        )
    lines = log.read_text(errors="replace").splitlines()
    row.expect(done.returncode == 0, "\n".join([f"it ended with {done.returncode}:", *lines[-25:]]))
    row.figures["last_line"] = next((line for line in reversed(lines) if line.strip()), "")[:200]
    return row


def kinds(on_cpu: bool) -> tuple[Kind, ...]:
    """The kinds of KV that the rows run on the device."""
    return tuple(kind for kind in KINDS if ("cpu" if on_cpu else "cuda") in kind.devices)


def _scale(setting: GpuSetting) -> Scale:
    assert setting.scale is not None
    return setting.scale


def _told(engine: Mapping[str, Any]) -> str:
    return "".join(f", {name} {value}" for name, value in engine.items())


def _long_job(scale: Scale, engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(scale.long_model),
        "warm_up": random_prompt(scale.long_tokens, 0, scale.vocabulary),  # of the same length: kernels are tuned by it
        "max_model_len": max(scale.long_tokens, scale.crowd_shared + scale.crowd_own) + CONTEXT_TOKENS,
        "engine": {**scale.long_engine, **engine},
    }
