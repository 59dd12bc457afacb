"""One process of the demo: ``python -m kvtiers.connector.demo.worker``.

The process reads a ``WorkerTask`` as JSON from standard input. It writes JSON lines to standard output, each an object
with an "event": "progress" (stage, done, total; total 0: unknown), "result" (ProcessFigures) or "error" (message).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from ...tiers.config.deployment import DeploymentConfig, parse_config
from ...tiers.errors import ConfigError, KVTiersError
from ...tiers.processes import own_output
from ..base import CacheConfig, KVCacheGroup, ModelConfig, OffloadingConfig
from ..region.region_header import row_stride
from ..spec import DeploymentSpec
from .engine import Engine
from .model import LoadedModel, ModelSource, load_model
from .paged_cache import KVLayout, PagedKVCache
from .report import KV_TENSORS, REGION, Answer, Hop, ProcessFigures

ADDED_LINE = "This line was added in the middle of the text."
MIDDLE_SHARE = 10  # the line is added at the first line end after the middle, if it is within 1/10 of the text
PROMPT_BLOCKS_MIN = 2
WARNING_CHARS_MAX = 400


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The task of a process.

    Attributes:
        is_warm: whether to look for the prompt in the tiers, and to answer an edited prompt as well.
        deployment: as in the YAML, sizes in bytes. The region may be omitted.
        block_size: tokens in one of the engine's blocks.
        started_s: when this process was started, by the machine's monotonic clock, which all processes share.
    """

    is_warm: bool
    model: ModelSource
    document: str
    question: str
    deployment: dict[str, Any]
    max_new_tokens: int
    block_size: int
    started_s: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerTask:
        """The inverse of ``dataclasses.asdict``, through JSON."""
        return cls(**dict(data) | {"model": ModelSource(**data["model"])})


class Events:
    """Writes events to a stream, one JSON object a line.

    Attributes:
        prompt_name: suffix for the stages of the current prompt, to tell them from another prompt's. None: the stages
            are not reported.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.prompt_name: str | None = None

    def send(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._out.write(json.dumps({"event": event} | fields) + "\n")
        self._out.flush()

    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Report the progress of a stage."""
        self.send("progress", stage=stage, done=done, total=total)

    def request_progress(self, stage: str, done: int, total: int) -> None:
        """Report the progress of a request's stage."""
        if self.prompt_name is not None:
            self.progress(f"{stage}{self.prompt_name}", done, total)


class LastWarning(logging.StreamHandler[TextIO]):
    """Keeps the last warning or error of kvtiers, and still prints them all to standard error."""

    message = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep and print a record. Any thread."""
        self.message = record.getMessage()[:WARNING_CHARS_MAX]
        super().emit(record)


def serve(task: WorkerTask, events: Events) -> ProcessFigures:
    """Run the task.

    Raises:
        KVTiersError: bad input, or a region or storage that cannot be used.
    """
    events.progress("loading the model")
    model = load_model(task.model, events.progress)
    prompt = model.tokenize(task.document, task.question)
    edited = model.tokenize(add_line(task.document), task.question)
    chunk_tokens = task.block_size * int(task.deployment.get("blocks_per_chunk", 1))
    longest = max(len(prompt), len(edited)) + task.max_new_tokens
    _check_length(model, len(prompt), longest, chunk_tokens)

    events.progress("making room for KV")
    memory = PagedKVCache(
        KVLayout.of_model(model.module),
        num_blocks=-(-longest // task.block_size),
        block_size=task.block_size,
        device=model.device,
    )
    deployment = _with_region(task.deployment, memory)
    spec = make_spec(model, memory, deployment)
    engine = Engine(
        model,
        memory,
        spec,
        progress=events.request_progress,
        store_chunks_max=spec.region.geometry.num_blocks,
    )

    def answer(tokens: Sequence[int], name: str, *, load: bool, store: bool) -> Answer:
        events.prompt_name = name
        return _answer(engine, tokens, task.max_new_tokens, load=load, store=store)

    try:
        events.progress("warming up")
        engine.warm_up()
        start_s = time.monotonic() - task.started_s  # with imports, a large part of the start
        main_answer = answer(prompt, "", load=task.is_warm, store=True)
        hops = _hops(engine, spec)
        edited_answer = edited_cold = None
        if task.is_warm and _shared_tokens(prompt, edited) >= chunk_tokens:
            engine.reset_cache()  # otherwise the prefix would come from the region, not from the tiers
            # Not stored: if the folder is kept, the next run must again find only half of the edited prompt.
            edited_answer = answer(edited, ", edited", load=True, store=False)
            edited_cold = answer(edited, ", edited, cold", load=False, store=False)
    finally:
        engine.shutdown()
        spec.shutdown()
    return ProcessFigures(
        pid=os.getpid(),
        device=str(model.device),
        answer=main_answer,
        edited=edited_answer,
        edited_cold=edited_cold,
        hops=hops,
        start_s=start_s,
        peak_rss_bytes=peak_rss_bytes(),
        model_bytes=model.size_bytes,
        kv_bytes=memory.size_bytes,
        region_bytes=deployment.region.size,
    )


def add_line(document: str) -> str:
    """Return the document with one line added in the middle: after a nearby line end, or else within a line."""
    middle = len(document) // 2
    at = document.find("\n", middle, middle + len(document) // MIDDLE_SHARE) + 1
    if at:
        return f"{document[:at]}{ADDED_LINE}\n{document[at:]}"
    return f"{document[:middle]}\n{ADDED_LINE}\n{document[middle:]}"


def make_spec(model: LoadedModel, memory: PagedKVCache, deployment: DeploymentConfig) -> DeploymentSpec:
    """Create the offloading spec of a deployment, with this engine's identity."""
    names = memory.layer_names
    config = OffloadingConfig(
        model=ModelConfig(model.name, str(memory.layout.dtype).removeprefix("torch."), model.revision),
        cache=CacheConfig(memory.block_size, deployment.blocks_per_chunk, hash_algorithm="kvtiers-sha256"),
        groups=(KVCacheGroup(memory.block_size, names),),
        engine_id=f"kvtiers-demo-{os.getpid()}",
        kv_cache_layout="block-kv-token-head",
    )
    return DeploymentSpec(config, deployment, memory.block_bytes * deployment.blocks_per_chunk)


def peak_rss_bytes() -> int:
    """Return this process's largest resident memory so far (VmHWM)."""
    with open("/proc/self/status", encoding="ascii") as f:
        fields = dict(line.split(":", 1) for line in f)
    return int(fields["VmHWM"].split()[0]) << 10


def main() -> int:
    """Entry point of the process; returns its exit code."""
    events = Events(own_output())
    warning = LastWarning()
    warning.setLevel(logging.WARNING)
    logging.getLogger("kvtiers").addHandler(warning)
    try:
        figures = serve(WorkerTask.from_json(json.load(sys.stdin)), events)
    except KVTiersError as e:
        events.send("error", message=str(e))
        return 2
    events.send("result", figures=asdict(replace(figures, last_warning=warning.message)))
    return 0


def _answer(engine: Engine, prompt: Sequence[int], max_new_tokens: int, *, load: bool, store: bool) -> Answer:
    """Answer a prompt and wait until its blocks are in every tier."""
    bytes_before = engine.loaded.bytes
    request = engine.run(prompt, max_new_tokens=max_new_tokens, load=load, store=store)
    engine.drain()
    return Answer(
        num_prompt_tokens=request.num_prompt_tokens,
        ttft_s=request.ttft_s,
        blocks_total=request.blocks_total,
        blocks_hit=request.blocks_hit,
        tokens_loaded=request.tokens_loaded,
        bytes_loaded=engine.loaded.bytes - bytes_before,
        load_s=request.load_s,
        token_ids=tuple(request.answer),
        text=engine.model.detokenize(request.answer),
    )


def _hops(engine: Engine, spec: DeploymentSpec) -> tuple[Hop, ...]:
    """Return the hops with bytes moved or blocks lost so far, in the order in which bytes pass them."""
    moved: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], float] = {}
    already_stored: dict[str, int] = {}
    lost: dict[tuple[str, str], dict[str, int]] = {}
    for sample in spec.metrics.snapshot():
        labels, value = sample.labels, int(sample.value)
        tier = labels.get("tier", "")
        way = tier, labels.get("op", "")
        if sample.name == "kvtiers_bytes_total":
            moved[way] = value
        elif sample.name == "kvtiers_job_seconds":
            seconds[way] = sample.total
        elif sample.name == "kvtiers_stores_dropped_total" and value and labels["reason"] != "read_only":
            lost.setdefault((tier, "store"), {})[labels["reason"]] = value
        elif sample.name == "kvtiers_blocks_total" and value and labels["outcome"] == "already_stored":
            already_stored[tier] = value
        elif sample.name == "kvtiers_blocks_total" and value and labels["outcome"] != "moved" and way[1] == "load":
            lost.setdefault(way, {})[labels["outcome"]] = value

    def of_tiers(op: str) -> list[Hop]:
        hops = []
        for way in sorted(seconds.keys() | lost.keys()):
            if way[1] == op:
                ends = (way[0], REGION) if op == "load" else (REGION, way[0])
                there = already_stored.get(way[0], 0) if op == "store" else 0
                hops.append(Hop(op, *ends, moved.get(way, 0), seconds.get(way, 0.0), there, lost.get(way, {})))
        return hops

    hops = (
        *of_tiers("load"),
        Hop("load", REGION, KV_TENSORS, engine.loaded.bytes, engine.loaded.seconds),
        Hop("store", KV_TENSORS, REGION, engine.stored.bytes, engine.stored.seconds),
        *of_tiers("store"),
    )
    return tuple(hop for hop in hops if hop.seconds or hop.lost)


def _check_length(model: LoadedModel, num_prompt_tokens: int, longest: int, chunk_tokens: int) -> None:
    if num_prompt_tokens < PROMPT_BLOCKS_MIN * chunk_tokens:
        raise ConfigError(
            f"{num_prompt_tokens} tokens are too few to show anything; the demo needs {PROMPT_BLOCKS_MIN} blocks of "
            f"{chunk_tokens} tokens or more",
            field="--prompt",
        )
    longest_accepted = getattr(model.module.config, "max_position_embeddings", None)
    if longest_accepted is not None and longest > longest_accepted:
        raise ConfigError(
            f"{num_prompt_tokens} tokens, {longest} with the answer; {model.name} accepts at most {longest_accepted}",
            field="--prompt",
        )


def _with_region(deployment: Mapping[str, Any], memory: PagedKVCache) -> DeploymentConfig:
    """Return the deployment with a region no larger than the engine's KV: the demo cannot fill a larger one."""
    blocks_per_chunk = int(deployment.get("blocks_per_chunk", 1))
    rows = -(-memory.num_blocks // blocks_per_chunk)
    size = row_stride(memory.block_bytes * blocks_per_chunk, 1) * rows
    region: dict[str, Any] = {"size": size} | deployment.get("region", {})
    return parse_config({**deployment, "region": region | {"size": min(size, region["size"])}})


def _shared_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


if __name__ == "__main__":
    sys.exit(main())
