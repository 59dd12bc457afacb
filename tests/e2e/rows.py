"""The rows of the report: what is done to an engine and its storage, and what must come out.

Every row compares with the answers of an engine without any connector: whatever happens to the storage, the tokens
stay the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtiers.connector.vllm_config import vllm_config
from kvtiers.tiers.testing.fuse import FuseFault, FuseMount, why_no_fuse
from kvtiers.tiers.testing.servers import SeaweedServer
from tests.e2e.far import far
from tests.e2e.lab import ENGINE_S_MAX, EngineFailedError, Lab, Row, metric
from tests.e2e.server import VllmServer, two_hosts_work
from tests.e2e.ways import PATIENT, Place, on_cpu, shared_storage, way
from tests.files import files_below

Run = Callable[["Setting", str], Row]

BLOCK_TOKENS = 32
SHORT_REGION_BYTES = 40 << 20  # 28 blocks of SmolLM2: less than half of the prompt
AGAIN = 5
FILES_AT_KILL = 30  # of the document's 63, stored four at a time: its first ones are among them
SHARE_BLOCKS = {"0.32", "0.33"}
SLOW_READ_S = 0.05  # of 128 KiB: a block of SmolLM2 in float32 takes 12 of them
ABORTS_AFTER_S = (0.3, 2.0, 5.0)
_EMPTIED = [{"do": "reset_prefix_cache", "connector": True}]
FAR_S = 0.02
STALL_S_MAX = 15.0 + 60.0  # a tier's deadline on S3; the rest is for a busy machine


@dataclass(frozen=True)
class Prompts:
    """Token ids.

    Attributes:
        document: the long prompt.
        half: the first half of it, then other text.
        warm_up: shares nothing with the others.
        long: more than 32,000 tokens, for the tiny model.
    """

    document: list[int]
    half: list[int]
    warm_up: list[int]
    half_shared_blocks: int
    long: list[int]

    @property
    def full_blocks(self) -> int:
        """Blocks of the document that can be reused: its last token is always computed."""
        return (len(self.document) - 1) // BLOCK_TOKENS


@dataclass(frozen=True)
class Reference:
    """Answers of an engine without a connector, and how long the first token took."""

    document: list[int]
    half: list[int]
    cold_ttft_s: float
    step_p99_ms: float


@dataclass
class Setting:
    """What a row runs with.

    Attributes:
        written: by way, what an engine stored of the document; rows work on copies.
        tiny_tokens: the tiny model's answer under TP=2 without a connector, once it was asked.
        before: with another version of vLLM.
        extra: ``Place.extra`` of every place.
        on_gpu: ``Place.on_gpu`` of every place.
        files_at_kill: how many stored blocks of the document a writer that is killed has at least.
        writing: held while ``written`` is completed, because rows may run side by side.
    """

    lab: Lab
    prompts: Prompts
    reference: Reference
    scratch: Path
    server: SeaweedServer | None
    tiny_model: Path
    written: dict[str, Place] = field(default_factory=dict)
    tiny_tokens: list[int] = field(default_factory=list)
    before: Setting | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = False
    files_at_kill: int = FILES_AT_KILL
    writing: threading.Lock = field(default_factory=threading.Lock)

    def place(self, name: str) -> Place:
        """An empty folder and, where there is a server, an empty bucket."""
        slug = _slug(f"{name}-{self.lab.version}")
        if self.server is None:
            return Place(self.scratch / slug, extra=self.extra, on_gpu=self.on_gpu)
        bucket = f"e2e-{slug}"
        self.server.s3.client().create_bucket(Bucket=bucket)
        return Place(self.scratch / slug, self.server.s3.endpoint_url, bucket)

    def copy(self, place: Place, name: str) -> Place:
        """A place with what is in another."""
        copied = self.place(name)
        if place.folder.exists():
            shutil.copytree(place.folder, copied.folder)
        if self.server is None:
            return copied
        client = self.server.s3.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket):
            for found in page.get("Contents", ()):
                source = {"Bucket": place.bucket, "Key": found["Key"]}
                client.copy_object(Bucket=copied.bucket, Key=found["Key"], CopySource=source)
        return copied


def reference(lab: Lab, prompts: Prompts) -> Reference:
    """Ask an engine without a connector."""
    # Again and again for as many steps as the rows have: the p99 of a few is the worst of them.
    result = lab.run(None, [prompts.document, prompts.half, *[prompts.document] * AGAIN], warm_up=prompts.warm_up)
    document, half, *_ = result["answers"]
    return Reference(document["tokens"], half["tokens"], document["ttft_s"], _p99_ms([result], "working"))


def reuse(setting: Setting, name: str, *, place_suffix: str = "") -> Row:
    """A writer's process, then a fresh reader's: all full blocks of the shared prefix are hits."""
    row = Row(name, setting.lab.version)
    prompts = setting.prompts
    place = setting.place(f"{name}{place_suffix}")
    config = way(name, place)
    writer = _write(setting, row, config)
    cold = writer["answers"][0]
    setting.written.setdefault(name, setting.copy(place, f"{name}{place_suffix}-written"))
    # Emptied of all but its storage, the engine answers again: one answer alone says little on a busy machine.
    asked = [prompts.document, prompts.half, *[prompts.document] * AGAIN]
    resets = {str(index): _EMPTIED for index in range(2, len(asked))}
    result = setting.lab.run(config, asked, warm_up=prompts.warm_up, before=resets)
    warm, half, *again = result["answers"]
    for answer in again:
        row.expect(answer["tokens"] == setting.reference.document, "tokens differ after a reset")
        row.expect(answer["cached_tokens"] == warm["cached_tokens"], f"{answer['cached_tokens']} reused after a reset")
    row.expect(warm["tokens"] == setting.reference.document, "the reader's tokens differ")
    row.expect(half["tokens"] == setting.reference.half, "tokens of the half-shared prompt differ")
    row.expect(
        warm["cached_tokens"] == prompts.full_blocks * BLOCK_TOKENS,
        f"{warm['cached_tokens']} tokens were reused, not {prompts.full_blocks * BLOCK_TOKENS}",
    )
    hits = metric(result, "vllm:external_prefix_cache_hits")
    row.expect(hits > 0, "no external hits")
    step_p99_ms = _p99_ms([writer, result], "working")
    row.figures = {
        "cold_ttft_s": cold["ttft_s"],
        "warm_ttft_s": warm["ttft_s"],
        "speedup": cold["ttft_s"] / warm["ttft_s"],
        "warm_again_ttft_s": statistics.median(answer["ttft_s"] for answer in again),
        "reused_tokens": warm["cached_tokens"],
        "external_hit_tokens": hits,
        "shutdown_s": result["shutdown_s"],
        "step_p99_ms": step_p99_ms,
        "step_p99_over_none_ms": step_p99_ms - setting.reference.step_p99_ms,
        "idle_step_p99_ms": _p99_ms([writer, result], "idle"),
    }
    return row


def _p99_ms(results: list[dict[str, Any]], kind: str) -> float:
    """Of all scheduling steps of a kind; 0 where there was none."""
    steps_s = sorted(step_s for result in results for step_s in result["steps_s"][kind])
    return steps_s[int(0.99 * len(steps_s))] * 1e3 if steps_s else 0.0


def yardstick(setting: Setting, name: str) -> Row:
    """``reuse`` with a tier of vLLM's own: where that failed it is measured once more, and the row says so."""
    row = reuse(setting, name)
    if row.ok:
        return row
    again = reuse(setting, name, place_suffix="-again")
    again.figures["first_attempt"] = "; ".join(dict.fromkeys(row.failures))
    return again


def upgraded(setting: Setting, name: str) -> Row:
    """What another version of vLLM has stored is read by this one: a fleet is not upgraded at once."""
    assert setting.before is not None
    row = Row(f"{name}: stored by vLLM {setting.before.lab.version}", setting.lab.version)
    config = way(name, setting.copy(setting.before.written[name], row.name))
    result = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
    answer = result["answers"][0]
    row.expect(answer["tokens"] == setting.reference.document, "tokens differ")
    expected = {setting.prompts.full_blocks * BLOCK_TOKENS}
    if {setting.before.lab.version, setting.lab.version} != SHARE_BLOCKS:
        expected.add(0)  # they call the layout by other names, or have another
    row.expect(answer["cached_tokens"] in expected, f"{answer['cached_tokens']} tokens were reused")
    row.figures |= {"reused_tokens": answer["cached_tokens"], "first_token_s": answer["ttft_s"]}
    return row


def flipped(setting: Setting, name: str) -> Row:
    """One bit flipped in every stored block: the same tokens, no hit, every failure counted."""
    row = Row(f"{name}: a bit flipped in every block", setting.lab.version)
    place, config = stored_place(setting, name, row)
    files = files_of(place)
    for index, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[(index * 7919) % len(data)] ^= 1 << index % 8
        path.write_bytes(data)
    result = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
    answer = result["answers"][0]
    row.expect(answer["tokens"] == setting.reference.document, "tokens differ")
    row.expect(answer["cached_tokens"] == 0, f"{answer['cached_tokens']} tokens were reused")
    # vLLM counts what was promised. The ranks of SharedStorageConnector read only what the scheduler has promised.
    if not name.startswith("Shared"):
        row.expect(metric(result, "vllm:external_prefix_cache_hits") == 0, "external hits were counted")
    failures = metric(result, "vllm:kvtiers_verify_failures")
    row.expect(failures > 0, "no verify failures were counted")
    row.figures = {"files_flipped": len(files), "verify_failures": failures, "ttft_s": answer["ttft_s"]}
    return row


def third_deleted(setting: Setting, name: str) -> Row:
    """The third of the files that was written in the middle deleted: the same tokens, the blocks before it reused."""
    row = Row(f"{name}: a third of the blocks deleted", setting.lab.version)
    place, config = stored_place(setting, name, row)
    files = sorted(files_of(place), key=lambda path: path.stat().st_mtime_ns)
    deleted = files[len(files) // 3 : len(files) * 2 // 3]
    for path in deleted:
        path.unlink()
    result = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
    answer = result["answers"][0]
    row.expect(answer["tokens"] == setting.reference.document, "tokens differ")
    row.expect(answer["cached_tokens"] > 0, "nothing was reused, though a prefix is there")
    row.figures = {
        "files_deleted": len(deleted),
        "reused_tokens": answer["cached_tokens"],
        "ttft_s": answer["ttft_s"],
    }
    return row


def writer_killed(setting: Setting, name: str) -> Row:
    """SIGKILL to all of a writer's processes while it stores: nothing in /dev/shm; the same tokens after it, of which
    the first are reused."""
    row = Row(f"{name}: SIGKILL of the writer", setting.lab.version)
    place = setting.place(f"{name}-killed")
    config = way(name, place)
    before = set(os.listdir("/dev/shm"))
    running = setting.lab.start(config, [setting.prompts.document] * 3, warm_up=setting.prompts.warm_up, processes=True)
    try:
        deadline = time.monotonic() + ENGINE_S_MAX
        while len(files_of(place)) < len(setting.prompts.warm_up) // BLOCK_TOKENS + setting.files_at_kill:
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise EngineFailedError(f"the writer stored nothing; see {running.log}")
            time.sleep(0.01)
    finally:
        running.kill()
    stored = len(files_of(place))
    left = sorted(each for each in set(os.listdir("/dev/shm")) - before if each.startswith("vllm_offload_"))
    if not name.startswith(("vLLM", "tier")):  # behind vLLM's spec the region is vLLM's
        row.expect(not left, f"left in /dev/shm: {left}")
    for each in left:
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{each}")
    answer = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)["answers"][0]
    row.expect(answer["tokens"] == setting.reference.document, "tokens differ")
    row.expect(answer["cached_tokens"] > 0, "nothing was reused, though blocks are there")
    row.figures = {
        "files_at_kill": stored,
        "left_in_dev_shm": len(left),
        "reused_tokens": answer["cached_tokens"],
        "ttft_s": answer["ttft_s"],
    }
    return row


def longer_than_region(setting: Setting, name: str) -> Row:
    """A prompt that does not fit the region: the same tokens, and the log says so."""
    row = Row(f"{name}: prompt longer than the region", setting.lab.version)
    place = setting.place(f"{name}-long")
    config = way(name, place, region_bytes=SHORT_REGION_BYTES)
    for who in ("writer", "reader"):
        running = setting.lab.start(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
        answer = running.result()["answers"][0]
        row.expect(answer["tokens"] == setting.reference.document, f"the {who}'s tokens differ")
        row.figures[f"{who}_reused_tokens"] = answer["cached_tokens"]
        row.figures[f"{who}_ttft_s"] = answer["ttft_s"]
        if name.startswith("spec"):
            row.expect("make region.size larger" in running.log.read_text(errors="replace"), f"the {who} says nothing")
    return row


def reset(setting: Setting, name: str) -> Row:
    """``reset_prefix_cache``, the connector's too, between requests: the same tokens, reused from storage."""
    row = Row(f"{name}: reset_prefix_cache", setting.lab.version)
    place = setting.place(f"{name}-reset")
    steps = {
        "1": [{"do": "reset_prefix_cache"}],
        "2": [{"do": "reset_prefix_cache", "connector": True}],
        "3": [{"do": "reset_prefix_cache", "connector": True}],
    }
    result = setting.lab.run(
        way(name, place), [setting.prompts.document] * 4, warm_up=setting.prompts.warm_up, before=steps
    )
    for index, answer in enumerate(result["answers"]):
        row.expect(answer["tokens"] == setting.reference.document, f"tokens of answer {index} differ")
        row.figures[f"reused_tokens_{index}"] = answer["cached_tokens"]
        row.figures[f"ttft_{index}_s"] = answer["ttft_s"]
    row.expect(result["answers"][3]["cached_tokens"] > 0, "nothing was reused after a reset")
    return row


def aborted(setting: Setting, name: str) -> Row:
    """Abort requests while storage is slow (0.5 s a block): the next one reuses everything; ``spec`` leaks no slot."""
    row = Row(f"{name}: aborted while loads are slow", setting.lab.version)
    if reason := why_no_fuse():
        row.figures["skipped"] = reason
        return row
    place, _ = stored_place(setting, name, row)
    document, mark = setting.prompts.document, setting.scratch / f"{_slug(row.name)}-{setting.lab.version}"
    aborts = [{"do": "abort", "tokens": document, "after_s": seconds} for seconds in ABORTS_AFTER_S]
    steps = {"0": [*aborts, {"do": "touch", "path": str(mark)}], "1": _EMPTIED}
    with FuseMount(place.folder, setting.scratch / f"{mark.name}-mount") as mount:
        mount.plan = [FuseFault("read", delay_s=SLOW_READ_S)]
        running = setting.lab.start(
            way(name, replace(place, folder=mount.path)),
            [document, document],
            warm_up=setting.prompts.warm_up,
            before=steps,
        )
        running.wait_for(mark)
        slow_reads = mount.calls()["read"]
        mount.plan = []
        result = running.result()
    for index, answer in enumerate(result["answers"]):
        row.expect(answer["tokens"] == setting.reference.document, f"tokens of answer {index} differ")
        row.expect(
            answer["cached_tokens"] == setting.prompts.full_blocks * BLOCK_TOKENS,
            f"answer {index} reused {answer['cached_tokens']} tokens",
        )
        row.figures |= {f"reused_tokens_{index}": answer["cached_tokens"], f"ttft_{index}_s": answer["ttft_s"]}
    row.expect(slow_reads > 0, "nothing was read before the aborts")
    if name.startswith("spec"):
        row.expect(metric(result, "vllm:kvtiers_slots", "state=ready") > 0, "no slots are counted")
        for state in ("pinned", "pending", "quarantined"):
            slots = metric(result, "vllm:kvtiers_slots", f"state={state}")
            row.expect(not slots, f"{slots:g} slots are {state}")
    row.figures["slow_reads"] = slow_reads
    return row


def two_engines(setting: Setting, name: str) -> Row:
    """Two engines store and read one root at the same time: the same tokens from both, and from a third."""
    row = Row(f"{name}: two engines on one root", setting.lab.version)
    place = setting.place(f"{name}-two")
    config = way(name, place)
    both = [
        setting.lab.start(config, [setting.prompts.document, setting.prompts.half], warm_up=setting.prompts.warm_up)
        for _ in range(2)
    ]
    for running in both:
        document, half = running.result()["answers"]
        row.expect(document["tokens"] == setting.reference.document, "tokens differ")
        row.expect(half["tokens"] == setting.reference.half, "tokens of the half-shared prompt differ")
    answer = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)["answers"][0]
    row.expect(answer["tokens"] == setting.reference.document, "tokens of the third differ")
    row.expect(answer["cached_tokens"] == setting.prompts.full_blocks * BLOCK_TOKENS, "not all of it was reused")
    row.figures = {"reused_tokens": answer["cached_tokens"], "ttft_s": answer["ttft_s"]}
    return row


def server_killed(setting: Setting, name: str) -> Row:
    """The S3 server dies between two requests: the same tokens, no stall beyond the deadline; it comes back: hits."""
    row = Row(f"{name}: S3 server killed in mid-run", setting.lab.version)
    assert setting.server is not None
    place, _ = stored_place(setting, name, row)
    config = way(name, replace(place, deadlines={}))
    marks = {what: setting.scratch / f"{_slug(name)}-{setting.lab.version}-{what}" for what in ("up", "killed")}
    for mark in marks.values():
        mark.unlink(missing_ok=True)
    steps = {"1": [{"do": "touch", "path": str(marks["up"])}, {"do": "wait_for", "path": str(marks["killed"])}]}
    running = setting.lab.start(
        config, [setting.prompts.half, setting.prompts.document], warm_up=setting.prompts.warm_up, before=steps
    )
    try:
        running.wait_for(marks["up"])
        setting.server.stop()
        marks["killed"].touch()
        half, answer = running.result()["answers"]
    finally:
        setting.server.start()
    row.expect(half["tokens"] == setting.reference.half, "tokens differ while the server was there")
    row.expect(answer["tokens"] == setting.reference.document, "tokens differ without the server")
    stall_s = answer["ttft_s"] - setting.reference.cold_ttft_s
    row.expect(stall_s < STALL_S_MAX, f"stalled for {stall_s:.1f} s")
    row.figures = {
        "reused_tokens_before": half["cached_tokens"],
        "reused_tokens_after": answer["cached_tokens"],
        "ttft_without_server_s": answer["ttft_s"],
    }
    return row


def tensor_parallel(setting: Setting, name: str) -> Row:
    """TP=2 reads nothing of what TP=1 wrote, and all of what TP=2 wrote."""
    row = Row(f"{name}: TP=2", setting.lab.version)
    place = setting.place(f"{name}-tp")
    prompts = setting.prompts
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    job: dict[str, Any] = {"warm_up": prompts.warm_up, "model": str(setting.tiny_model)}
    setting.lab.run(way(name, place), [prompts.document], **job)
    if not setting.tiny_tokens:
        answer = setting.lab.run(None, [prompts.document], processes=True, engine=two, **job)["answers"][0]
        setting.tiny_tokens = answer["tokens"]
    expected = setting.tiny_tokens
    row.expect(len(set(expected)) > 1, "the model says the same token again and again: this row shows nothing")
    for who, reused in (("first", 0), ("second", prompts.full_blocks * BLOCK_TOKENS)):
        answer = setting.lab.run(way(name, place), [prompts.document], processes=True, engine=two, **job)["answers"][0]
        row.expect(answer["tokens"] == expected, f"tokens of the {who} engine of TP=2 differ")
        row.expect(answer["cached_tokens"] == reused, f"the {who} reused {answer['cached_tokens']}, not {reused}")
        row.figures[f"{who}_reused_tokens"] = answer["cached_tokens"]
        row.figures[f"{who}_ttft_s"] = answer["ttft_s"]
    return row


def long_prompt(setting: Setting, name: str) -> Row:
    """A prompt of more than 32,000 tokens, on S3 that answers 20 ms later: all of it is found and reused."""
    row = Row(f"{name}: 32,100 tokens, 20 ms away", setting.lab.version)
    place = setting.place(f"{name}-far")
    prompts = setting.prompts
    job: dict[str, Any] = {
        "warm_up": prompts.warm_up,
        "model": str(setting.tiny_model),
        "max_model_len": len(prompts.long) + BLOCK_TOKENS,
    }
    with far(place.endpoint_url, FAR_S) as endpoint_url:
        config = way(name, replace(place, endpoint_url=endpoint_url, deadlines={}))
        expected = setting.lab.run(None, [prompts.long], **job)["answers"][0]
        row.expect(len(set(expected["tokens"])) > 1, "the model says the same token again and again")
        for who, reused in (("writer", 0), ("reader", (len(prompts.long) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)):
            answer = setting.lab.run(config, [prompts.long], **job)["answers"][0]
            row.expect(answer["tokens"] == expected["tokens"], f"the {who}'s tokens differ")
            row.expect(answer["cached_tokens"] == reused, f"the {who} reused {answer['cached_tokens']}, not {reused}")
            row.figures[f"{who}_reused_tokens"] = answer["cached_tokens"]
            row.figures[f"{who}_ttft_s"] = answer["ttft_s"]
    row.figures["cold_ttft_s"] = expected["ttft_s"]
    return row


def served(setting: Setting, name: str) -> Row:
    """``vllm serve`` with what ``kvtiers vllm-config`` prints: a server's blocks answer the next server's request."""
    row = Row(f"{name}: vllm serve", setting.lab.version)
    place = setting.place(f"{name}-serve")
    config = setting.scratch / f"{_slug(name)}-{setting.lab.version}.yaml"
    config.write_text(f"region: {{size: 300MiB}}\ntiers:\n- {json.dumps(place.fs)}\n")
    transfer = vllm_config(config)[{"spec": "spec", "tier": "tier"}.get(name.split()[0], "shared_storage")]
    for who in ("writer", "reader"):
        log = setting.lab.log / f"serve-{_slug(name)}-{who}.log"
        with VllmServer(setting.lab, on_cpu(transfer), log) as server:
            server.complete(setting.prompts.warm_up)
            hits = -server.metric("vllm:external_prefix_cache_hits_total")
            tokens, took_s = server.complete(setting.prompts.document)
            row.expect(tokens == setting.reference.document, f"the {who}'s tokens differ")
            row.figures |= {f"{who}_ready_s": server.ready_s, f"{who}_completion_s": took_s}
            if who == "reader":
                hits += server.metric("vllm:external_prefix_cache_hits_total")
                expected = setting.prompts.full_blocks * BLOCK_TOKENS
                row.expect(hits == expected, f"{hits:g} tokens were hits, not {expected}")
                row.figures["external_hit_tokens"] = hits
    return row


def several_connectors(setting: Setting, name: str) -> Row:
    """vLLM's MultiConnector of a way and SharedStorageConnector: what the first has lost, the second has."""
    row = Row(f"{name}: beside SharedStorageConnector in MultiConnector", setting.lab.version)
    place = setting.place(f"{name}-multi")
    prefixes = setting.scratch / _slug(f"{row.name}-{setting.lab.version}")
    connectors = [way(name, place), shared_storage(shared_storage_path=str(prefixes), **PATIENT)]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    _write(setting, row, config)
    for lost, who in ((prefixes, "first"), (place.folder, "second")):
        aside = lost.rename(lost.with_suffix(".aside"))
        result = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
        shutil.rmtree(lost, ignore_errors=True)
        aside.rename(lost)
        answer = result["answers"][0]
        row.expect(answer["tokens"] == setting.reference.document, f"tokens differ where the {who} has the blocks")
        row.expect(
            answer["cached_tokens"] == setting.prompts.full_blocks * BLOCK_TOKENS,
            f"{answer['cached_tokens']} tokens were reused from the {who}",
        )
        row.figures[f"{who}_ttft_s"] = answer["ttft_s"]
    return row


def sibling_refused(setting: Setting, name: str) -> Row:
    """Beside a connector that loads within a step the engine does not start, and says why."""
    row = Row(f"{name}: beside ExampleConnector in MultiConnector", setting.lab.version)
    place = setting.place(f"{name}-sibling")
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(place.folder / "example")},
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [way(name, place), example]},
    }
    try:
        setting.lab.run(config, [setting.prompts.warm_up])
    except EngineFailedError as e:
        row.expect("ExampleConnector may load within a step" in str(e), f"it ended with something else: {e}"[-500:])
    else:
        row.expect(False, "it started")
    return row


def roles(setting: Setting, name: str) -> Row:
    """Engines that only store and one that only loads, by their ``kv_role``."""
    row = Row(f"{name}: producer and consumer", setting.lab.version)
    prompts, place = setting.prompts, setting.place(f"{name}-roles")
    producer, consumer = ({**way(name, place), "kv_role": role} for role in ("kv_producer", "kv_consumer"))
    _write(setting, row, producer)
    again = _write(setting, row, producer)["answers"][0]
    row.expect(again["cached_tokens"] == 0, f"a producer reused {again['cached_tokens']} tokens")
    stored = files_of(place)
    result = setting.lab.run(consumer, [prompts.document, prompts.half], warm_up=prompts.warm_up)
    document, half = result["answers"]
    row.expect(document["tokens"] == setting.reference.document, "the consumer's tokens differ")
    row.expect(half["tokens"] == setting.reference.half, "the consumer's tokens of the half-shared prompt differ")
    row.expect(
        document["cached_tokens"] == prompts.full_blocks * BLOCK_TOKENS,
        f"the consumer reused {document['cached_tokens']} tokens",
    )
    row.expect(bool(stored) and files_of(place) == stored, "the consumer stored something")
    row.figures |= {"producer_reused": again["cached_tokens"], "consumer_reused": document["cached_tokens"]}
    return row


def bounded(setting: Setting, name: str) -> Row:
    """Three prompts where two and a half have room: never more than the bound is stored, the answers are the same."""
    row = Row(f"{name}: max_bytes", setting.lab.version)
    document, place = setting.prompts.document, setting.place(f"{name}-bounded")
    prompts = [document, *([turn, *document] for turn in (1000, 1001))]
    stored = stored_place(setting, name, row)[0].bytes_stored
    bound = stored * 5 // 2
    config = way(name, place, limits={"max_bytes": bound})
    running = setting.lab.start(config, prompts, warm_up=setting.prompts.warm_up)
    most = 0
    while running.process.poll() is None:
        most = max(most, place.bytes_stored)
        time.sleep(0.05)
    written = running.result()["answers"]
    most = max(most, place.bytes_stored)
    # The last one first: what is stored of the first ones then removes what is used next.
    read = setting.lab.run(config, prompts[::-1], warm_up=setting.prompts.warm_up)["answers"]
    row.expect(written[0]["tokens"] == setting.reference.document, "tokens differ")
    for index, (first, second) in enumerate(zip(written[::-1], read, strict=True)):
        row.expect(first["tokens"] == second["tokens"], f"tokens of prompt {index} differ")
    reused = sum(answer["cached_tokens"] for answer in read)
    row.expect(reused >= setting.prompts.full_blocks * BLOCK_TOKENS, f"{reused} tokens reused")
    row.expect(stored < most <= bound, f"{most} bytes stored")
    row.figures = {"max_bytes": bound, "most_bytes_stored": most, "bytes_of_one": stored, "reused_tokens": reused}
    return row


def data_parallel(setting: Setting, name: str) -> Row:
    """Two engines behind one server: what one has stored, the other finds."""
    row = Row(f"{name}: data parallel", setting.lab.version)
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if setting.lab.version == "0.33" and nodes < 2:
        row.figures["skipped"] = f"0.33 gives each engine on CPUs a NUMA node of its own, here are {nodes}"
        return row
    # One engine asks for what the other is storing: what was absent is to be asked for again soon.
    place = replace(setting.place(f"{name}-dp"), deadlines={})
    log = setting.lab.log / f"dp-{_slug(name)}.log"
    expected = setting.prompts.full_blocks * BLOCK_TOKENS
    options = ("--data-parallel-size", "2")
    with VllmServer(setting.lab, way(name, place), log, model=setting.tiny_model, options=options) as server:
        answers = []
        for _ in range(6):  # the server chooses the engine
            answers.append(server.complete(setting.prompts.document)[0])
            hits = server.metric("vllm:external_prefix_cache_hits_total")
            if hits:
                break
    row.expect(len(answers) > 1 and all(tokens == answers[0] for tokens in answers), "tokens differ")
    row.expect(hits == expected, f"{hits:g} tokens were hits, not {expected}")
    row.figures |= {"external_hit_tokens": hits, "requests": len(answers)}
    return row


def two_hosts(setting: Setting, name: str) -> Row:
    """Workers on two hosts, one without the scheduler: refused, or their blocks are good."""
    row = Row(f"{name}: two hosts", setting.lab.version)
    if not two_hosts_work():
        row.figures["skipped"] = "no process can be given a /dev/shm of its own: it takes root"
        return row
    config = way(name, setting.place(f"{name}-hosts"))
    expected = setting.prompts.full_blocks * BLOCK_TOKENS
    answers = []
    for who, reused in (("first", 0), ("second", expected)):
        log = setting.lab.log / f"hosts-{_slug(name)}-{who}.log"
        try:
            with VllmServer(setting.lab, config, log, model=setting.tiny_model, hosts=2) as server:
                answers.append(server.complete(setting.prompts.document)[0])
                hits = server.metric("vllm:external_prefix_cache_hits_total")
        except EngineFailedError:
            said = log.read_text(errors="replace")
            refused = "ConfigError: tiers: " in said and '"kv_connector": "SharedStorageConnector"' in said
            row.expect(refused and "SharedStorageConnector" not in name, f"it did not start: {log}")
            row.figures["refused"] = refused
            return row
        row.expect(hits == reused, f"{hits:g} tokens were hits in the {who}, not {reused}")
        row.figures[f"{who}_hit_tokens"] = hits
    row.expect("SharedStorageConnector" in name, "it was not refused")
    row.expect(answers[0] == answers[1], "tokens differ")
    return row


def own_folders(setting: Setting, name: str) -> Row:
    """Two hosts (mount namespaces) with folders of their own, one of them harmed: the same tokens, at most a recompute.

    A server computes the document again after a harm, and the next server finds what that one has stored.
    """
    row = Row(f"{name}: two hosts with folders of their own", setting.lab.version)
    why_not = why_no_fuse() if two_hosts_work() else "no process can be given a /dev/shm of its own: it takes root"
    if why_not:
        row.figures["skipped"] = why_not
        return row
    place = setting.place(f"{name}-own")
    other = place.folder.with_suffix(".of-second")  # the second host's disk, which it sees in the place of the first's
    for folder in (place.folder, other):
        folder.mkdir(parents=True, exist_ok=True)
    config = way(name, place)
    config["kv_connector_extra_config"]["load_deadline_s"] = deadline_s = 15.0
    expected = setting.prompts.full_blocks * BLOCK_TOKENS
    answers: dict[str, list[int]] = {}
    took_s: dict[str, float] = {}
    dropped: dict[str, float] = {}

    def answer(who: str, mounts: str) -> float:
        log = setting.lab.log / f"own-{_slug(name)}-{who}.log"
        with VllmServer(setting.lab, config, log, model=setting.tiny_model, hosts=2, mounts=mounts) as server:
            answers[who], took_s[who] = server.complete(setting.prompts.document)
            row.figures[f"{who}_completion_s"] = took_s[who]
            row.figures[f"{who}_hit_tokens"] = server.metric("vllm:external_prefix_cache_hits_total")
            server.complete(setting.prompts.warm_up)
            dropped[who] = server.metric("vllm:kvtiers_stores_dropped_total", 'tier="fs_r1"')
            return server.metric("vllm:kvtiers_blocks_total", 'op="load"', 'outcome="moved"', 'tier="fs_r1"')

    def blocks(folder: Path) -> list[Path]:
        return sorted(path for path, _ in files_below(folder) if path.suffix == ".bin")

    bound = f"mount --bind {other} {place.folder}"
    full = f"mount -t tmpfs -o size=256k tmpfs {place.folder}"
    loaded = {"first": answer("first", bound), "second": answer("second", bound)}
    fits = loaded["first"] == 0 and loaded["second"] >= setting.prompts.full_blocks  # and those of the warm-up
    row.expect(fits, f"the second host loaded {loaded}")
    hits = row.figures["second_hit_tokens"]
    row.expect(hits == expected, f"{hits:g} tokens were hits in the second, not {expected}")
    for path in blocks(other):
        path.unlink()
    answer("emptied", bound)
    row.expect(len(blocks(other)) >= setting.prompts.full_blocks, "the emptied folder was not filled again")
    for path in blocks(other)[::8]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    answer("damaged", bound)
    answer("full", full)
    with FuseMount(other, other.with_suffix(".mounted")) as mount:
        mount.plan = [FuseFault("read", path=".bin", count=None, hang=True)]
        answer("hung", f"mount --bind {mount.path} {place.folder}")
        mount.plan = []
    row.expect(all(tokens == answers["first"] for tokens in answers.values()), f"tokens differ: {answers}")
    row.expect(dropped["full"] > 0 == dropped["first"], f"stores dropped by the second host: {dropped}")
    # A request waits once, and not for each of its blocks. The rest of the bound is for a busy machine.
    row.expect(took_s["hung"] <= 2 * deadline_s + took_s["first"], f"the document took {took_s['hung']:.1f} s")
    return row


def _write(setting: Setting, row: Row, config: dict[str, Any]) -> dict[str, Any]:
    """What a writer's process found."""
    result = setting.lab.run(config, [setting.prompts.document], warm_up=setting.prompts.warm_up)
    row.expect(result["answers"][0]["tokens"] == setting.reference.document, "the writer's tokens differ")
    return result


def stored_place(setting: Setting, name: str, row: Row) -> tuple[Place, dict[str, Any]]:
    """A place of the row's own, with what a writer of this way stored."""
    with setting.writing:
        if name not in setting.written:  # only some rows were asked for
            place = setting.place(f"{name}-written")
            _write(setting, row, way(name, place))
            setting.written[name] = place
    place = setting.copy(setting.written[name], row.name)
    return place, way(name, place)


def files_of(place: Place) -> list[Path]:
    """Stored blocks."""
    return sorted(path for path, _ in files_below(place.folder) if path.suffix == ".bin")


def _slug(text: str) -> str:
    """As a bucket may be called: at most 63 letters, digits and dashes, and no dash at its end."""
    kept = "".join(letter if letter.isalnum() else "-" for letter in text.lower())
    readable = "-".join(part for part in kept.split("-") if part)[:40]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


#: (row, ways it is run on)
HARM: tuple[tuple[Run, tuple[str, ...]], ...] = (
    (flipped, ("tier on fs", "spec on fs", "SharedStorageConnector on a folder")),
    (third_deleted, ("tier on fs", "spec on fs", "SharedStorageConnector on a folder")),
    (writer_killed, ("tier on fs", "spec on fs")),
    (longer_than_region, ("tier on fs", "spec on fs")),
    (reset, ("tier on fs", "spec on fs")),
    (two_engines, ("tier on fs", "spec on fs")),
    (aborted, ("spec on fs", "tier on fs", "SharedStorageConnector on a folder")),
    (server_killed, ("tier on S3", "spec on S3", "SharedStorageConnector on S3")),
    (tensor_parallel, ("spec on fs", "tier on fs", "SharedStorageConnector on a folder")),
    (long_prompt, ("spec on S3", "tier on S3")),
    (served, ("spec on fs", "tier on fs", "SharedStorageConnector on a folder")),
    (several_connectors, ("spec on fs", "tier on fs")),
    (sibling_refused, ("spec on fs", "tier on fs", "SharedStorageConnector on a folder")),
    (roles, ("spec on fs", "tier on fs", "SharedStorageConnector on a folder")),
    (bounded, ("SharedStorageConnector on a folder", "spec on fs", "tier on fs")),
    (data_parallel, ("spec on fs",)),
    (two_hosts, ("spec on fs", "tier on fs", "SharedStorageConnector on a folder", "SharedStorageConnector on S3")),
    (own_folders, ("SharedStorageConnector on a folder",)),
)
#: A minute and a half a way: all ways on the first version, one on the others, none in the reduced run.
SLOW = (
    *(aborted, tensor_parallel, long_prompt, served, several_connectors, roles, bounded, data_parallel, two_hosts),
    own_folders,
)


def attempt(run: Run, setting: Setting, name: str, *, title: str = "") -> Row:
    """Run a row; an engine that fails is a failed row, and the rest still runs.

    Args:
        title: of a row that fails by an exception; made of the names by default.
    """
    began = time.monotonic()
    try:
        row = run(setting, name)
    except Exception as e:
        title = title or (name if run in (reuse, yardstick) else f"{name}: {run.__name__}")
        row = Row(title, setting.lab.version, ok=False, failures=[f"{type(e).__name__}: {e}"[:2000]])
    row.took_s = time.monotonic() - began
    return row
