"""SharedStorageConnector: layouts, and a scheduler and a worker that share prefixes through a folder."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtiers.connector.prefixes import worker as prefix_worker
from kvtiers.connector.prefixes.paged_buffer import extract_slots, inject_slots
from kvtiers.connector.vllm import translate
from kvtiers.connector.vllm.prefixes import connector as module
from kvtiers.connector.vllm.prefixes import steps as prefix_steps
from kvtiers.connector.vllm.prefixes.connector import SharedStorageConnector
from kvtiers.connector.vllm.prefixes.steps import SharedStorageMetadata
from kvtiers.tiers import daemon_pool
from kvtiers.tiers.blocks.keys import hash_blocks
from kvtiers.tiers.capacity.link import CollectorLink
from kvtiers.tiers.errors import ConfigError, StoreConfigError, StoreUnavailableError
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.clock import Clock
from tests.files import files_below
from tests.s3_clients import use_credentials
from tests.vllm.engines import LAYERS, VllmConfig, offloading_config
from tests.waiting import wait_for

BLOCKS, SIZE = 12, 4
# A busy machine misses the defaults. Tests of what is late set deadlines of their own.
PATIENT = {"lookup_deadline_s": 120.0, "load_deadline_s": 120.0}

ATTENTION = {"block_size": SIZE, "num_kv_heads": 3, "head_size": 5, "dtype": torch.float32}


class Rig:
    """A scheduler's and a worker's connector on one folder, and paged buffers of the worker's layers."""

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        kv_cache_spec: Any = None,
        extra: dict[str, Any] | None = None,
        layers: tuple[str, ...] = LAYERS,
        kv_role: str = "kv_both",
        model: Any = None,
        **parallel: Any,
    ) -> None:
        scheduler = offloading_config(**parallel)
        group = dataclasses.replace(scheduler.groups[0], layer_names=layers)
        configs = iter([scheduler, dataclasses.replace(scheduler, groups=(group,))])
        monkeypatch.setattr(module, "build_offloading_config", lambda *_: next(configs))
        monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda *_, **__: None)
        place = {} if extra and "tier" in extra else {"shared_storage_path": str(root)}
        transfer = SimpleNamespace(
            kv_connector_extra_config=PATIENT | place | (extra or {}),
            kv_load_failure_policy="recompute",
            kv_role=kv_role,
        )
        kv_cache_group = SimpleNamespace(kv_cache_spec=kv_cache_spec or FullAttentionSpec(**ATTENTION))
        cache = SimpleNamespace(kv_cache_groups=[kv_cache_group], num_blocks=BLOCKS)
        vllm_config = VllmConfig(kv_transfer_config=transfer, **({} if model is None else {"model_config": model}))
        self.scheduler, self.worker = (
            SharedStorageConnector(vllm_config, role, cache)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self.kv = {layer: torch.rand(BLOCKS, 3, SIZE, 10) for layer in layers}
        self.worker.register_kv_caches(self.kv)

    def matched(self, request: Any, computed: int = 0) -> tuple[int, bool]:
        def answer() -> tuple[int, bool] | None:
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            return None if tokens is None else (tokens, is_async)

        found = wait_for(answer)
        assert found is not None
        return found

    def work(self, meta: SharedStorageMetadata) -> None:
        """What a worker does in one step."""
        self.worker._connector_metadata = meta
        self.worker.start_load_kv(None)
        for layer in list(self.kv)[:1]:  # the other one is as if a captured graph had run it
            self.worker.save_kv_layer(layer, self.kv[layer], None)
        self.worker.wait_for_save()

    def loaded(self) -> tuple[set[str], set[int]]:
        def done() -> set[str] | None:
            return self.worker.get_finished(set())[1]

        finished = wait_for(done)
        assert finished is not None
        return finished, self.worker.get_block_ids_with_load_errors()

    def report(self, req_id: str, failed: set[int]) -> None:
        """What vLLM tells the scheduler's connector when a load has ended."""
        self.scheduler.update_connector_output(SimpleNamespace(finished_recving={req_id}, invalid_block_ids=failed))

    def stores(self, output: Any) -> list[tuple[int, int]]:
        """First and last block, exclusive, of each store of a step, which a worker does."""
        meta = self.scheduler.build_connector_meta(output)
        self.work(meta)
        return [(each.first_block, each.first_block + len(each.hashes)) for each in meta.requests if each.is_store]

    def saved(self) -> None:
        def idle() -> bool:
            self.worker.get_finished(set())
            return not self.worker._worker._saving

        wait_for(idle)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


@pytest.fixture
def rigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Rig] = []

    def make(**parallel: Any) -> Rig:
        made.append(Rig(tmp_path / "root", monkeypatch, **parallel))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def prompt(tokens: list[int], req_id: str = "r", **more: Any) -> Any:
    return SimpleNamespace(request_id=req_id, prompt_token_ids=tokens, prompt_embeds=None, **more)


def step(
    new: dict[str, tuple[list[int], int, int]] | None = None,
    cached: dict[str, tuple[list[int], int, int]] | None = None,
    resumed: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """A scheduler's output: request -> (new block ids, tokens computed before, tokens scheduled)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={req_id: each[2] for req_id, each in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=req_id, block_ids=(blocks,), num_computed_tokens=computed)
            for req_id, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[(blocks,) if blocks else None for blocks, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        **more,
    )


def store_whole(rig: Rig, tokens: list[int], blocks: list[int], req_id: str = "w", **more: Any) -> None:
    request = prompt(tokens, req_id, **more)
    rig.matched(request)
    rig.work(rig.scheduler.build_connector_meta(step(new={req_id: (blocks, 0, len(tokens))})))
    rig.saved()
    rig.scheduler.request_finished(request, blocks)


def load(rig: Rig, request: Any, blocks: list[int], tokens: int) -> tuple[set[str], set[int]]:
    allocated = SimpleNamespace(get_block_ids=lambda: (blocks,))
    rig.scheduler.update_state_after_alloc(request, allocated, tokens)
    rig.work(rig.scheduler.build_connector_meta(step()))
    return rig.loaded()


TOKENS = list(range(100, 118))  # 4 blocks of 4 and 2 tokens


def test_another_engine_loads_what_was_stored(rigs: Any) -> None:
    writer, reader = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, set())
    for layer in LAYERS:
        assert torch.equal(reader.kv[layer][[2, 4, 6, 8]], writer.kv[layer][[3, 7, 1, 9]])
        assert not torch.equal(reader.kv[layer][10], writer.kv[layer][5])


def test_a_worker_of_another_cuda_device_loads_on_that_device(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    second = torch.device("cuda", 1)
    shape = {"ndim": 4, "shape": (BLOCKS, 3, SIZE, 10), "movedim": lambda *_: None, "nbytes": 0}
    reader.worker.register_kv_caches({"layer": SimpleNamespace(is_cuda=True, device=second, **shape)})
    assert reader.worker._worker._cuda == second
    reader.worker._worker._kv_caches = reader.kv
    current: list[torch.device] = []
    written_on: list[list[torch.device]] = []
    steps: list[str] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def inject(*arguments: Any) -> None:
        written_on.append(list(current))
        steps.append("write")
        inject_slots(*arguments)

    def stream(of: torch.device) -> Any:
        return SimpleNamespace(
            of=of,
            wait_event=lambda event: steps.append(f"wait for {event.recorded_on}"),
            synchronize=lambda: steps.append(f"synchronize {of}"),
        )

    class Event:
        def record(self, stream: Any) -> None:
            assert not current  # by the thread that submits the model's work
            self.recorded_on = stream.of

    monkeypatch.setattr(prefix_worker, "inject_slots", inject)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    request = prompt(TOKENS)
    reader.matched(request)
    assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, set())
    assert written_on == [[second]] * len(LAYERS)
    assert steps == [f"wait for {second}", *["write"] * len(LAYERS), f"synchronize {second}"]


@pytest.mark.parametrize("computed", [0, 8, 16])
def test_a_prefix_that_is_used_is_made_new_on_storage_though_the_gpu_has_it(
    rigs: Any, tmp_path: Path, computed: int
) -> None:
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (0, 0))
    reader = rigs()
    assert reader.matched(prompt(TOKENS), computed) == (16 - computed, computed < 16)
    reader.scheduler._uses._pool.submit(lambda: None).result(120)
    assert all(path.stat().st_mtime > 0 for path in files)
    for path in files:
        os.utime(path, (0, 0))
    reader.matched(prompt(TOKENS, "again within the hour"), computed)
    reader.scheduler._uses._pool.submit(lambda: None).result(120)
    assert not any(path.stat().st_mtime for path in files)


def test_a_producer_only_stores_and_a_consumer_only_loads(rigs: Any, tmp_path: Path) -> None:
    producer, consumer = rigs(kv_role="kv_producer"), rigs(kv_role="kv_consumer")
    store_whole(producer, TOKENS, [3, 7, 1, 9, 5])
    assert producer.worker._stores[0].counts.chunks_stored == 1
    other_producer = rigs(kv_role="kv_producer")
    assert other_producer.matched(prompt(TOKENS)) == (0, False)
    assert other_producer.stores(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)})) == []  # it knows that they are there
    request = prompt(TOKENS)
    assert consumer.matched(request) == (16, True)
    assert load(consumer, request, [2, 4, 6, 8, 10], 16) == ({"r"}, set())
    assert torch.equal(consumer.kv[LAYERS[0]][[2, 4, 6, 8]], producer.kv[LAYERS[0]][[3, 7, 1, 9]])
    files = sorted(tmp_path.rglob("*"))
    new = prompt([9, *TOKENS], "new")
    assert consumer.matched(new) == (0, False)
    assert consumer.stores(step(new={"new": ([0, 1, 2, 3, 4], 0, 19)})) == []
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"max_load_tokens": 9}, 8),
        ({"max_load_tokens": 100}, 16),
        ({"max_load_tokens": 3}, 0),
        ({"max_load_tokens": True}, 16),  # malformed, as vLLM has it
        ({"max_load_tokens": -1}, 16),
        ({"kv_load_tiers": []}, 0),
        ({"kv_load_tiers": [{"locality": "REMOTE"}]}, 0),
        ({"kv_load_tiers": [{"medium": "CPU"}]}, 0),
        ({"kv_load_tiers": [{"medium": "CPU"}, {"medium": "storage", "locality": "local"}]}, 16),
        ({"kv_load_tiers": [{"medium": "tape"}, 7]}, 16),
        ({"kv_load_tiers": [{"medium": "tape"}, {"medium": "CPU"}]}, 0),
        ({"kv_load_tiers": {"medium": "CPU"}}, 16),
    ],
)
def test_no_more_is_loaded_than_a_request_wants(rigs: Any, params: dict[str, Any], tokens: int) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    assert rig.matched(prompt(TOKENS, kv_transfer_params=params)) == (tokens, tokens > 0)
    assert rig.stores(step(new={"r": ([0, 2, 4, 6, 8], 0, 18)})) == []  # it knows that they are there
    if tokens == 8:
        assert rig.matched(prompt(TOKENS, "later", kv_transfer_params=params), computed=8) == (8, True)


@pytest.mark.parametrize(("limit", "blocks"), [(9, 2), (100, 4), (3, 0), ("9", 4)])
def test_no_more_is_stored_than_a_request_wants(rigs: Any, limit: Any, blocks: int) -> None:
    rig = rigs()
    request = prompt(TOKENS, kv_transfer_params={"max_offload_tokens": limit})
    assert rig.matched(request) == (0, False)
    stored = [(0, blocks)] if blocks else []
    assert rig.stores(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)})) == stored
    rig.saved()
    assert rig.matched(prompt(TOKENS, "other")) == (blocks * SIZE, blocks > 0)
    rest = [(blocks, 4)] if blocks < 4 else []
    assert rig.stores(step(new={"other": ([3, 7, 1, 9, 5], 0, 18)})) == rest


def test_what_is_past_its_ttl_is_removed_and_stored_again(rigs: Any, tmp_path: Path) -> None:
    extra = {"max_bytes": "1GiB", "ttl": "1h"}
    rig, consumer, reader = (
        rigs(extra=extra),
        rigs(extra=extra, kv_role="kv_consumer"),
        rigs(extra={**extra, "read_only": True}),
    )
    assert rig.worker._collector is None
    for other in (consumer, reader):  # limits are the writers' business
        assert other.scheduler._collector is None
    counts = rig.worker._stores[0].counts

    def stored() -> bool:
        store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
        return bool(counts.chunks_stored)

    wait_for(stored, within_s=240)  # refused before storage is measured, by a process that lets all others go first
    assert reader.matched(prompt(TOKENS, "before")) == (16, True)  # who may write notes a use, on a thread of its own
    for path, status in files_below(tmp_path / "root"):
        if path.suffix == ".json" and "_kvtiers" not in path.parts:
            os.utime(path, (status.st_mtime - 7200,) * 2)
    removed = dict.fromkeys(("chunks_removed", "bytes_removed"), 0)

    def told() -> bool:
        stats = rig.scheduler.get_kv_connector_stats()
        for name in removed:
            removed[name] += stats.data.get(name, 0) if stats is not None else 0
        return removed["chunks_removed"] > 0

    wait_for(told, within_s=240)
    assert removed["chunks_removed"] == 1
    assert removed["bytes_removed"] > 16 * 30 * 4 * len(LAYERS)
    assert not [path for path, _ in files_below(tmp_path / "root") if path.suffix == ".safetensors"]
    assert rig.matched(prompt(TOKENS, "after")) == (0, False)
    before = counts.chunks_stored
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    assert counts.chunks_stored == before + 1


def test_a_buckets_tier_is_its_place_and_is_looked_at_when_the_engine_starts(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_credentials(monkeypatch)
    with HttpFaultServer() as server:
        tier = {"type": "s3", "bucket": "bucket", "endpoint_url": server.endpoint_url, "job_deadline_s": 180.0}
        rig, reader = rigs(extra={"tier": tier}), rigs(extra={"tier": tier})
        store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
        request = prompt(TOKENS)
        assert reader.matched(request) == (16, True)
        assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, set())
        assert torch.equal(reader.kv[LAYERS[1]][[2, 4, 6, 8]], rig.kv[LAYERS[1]][[3, 7, 1, 9]])
        with pytest.raises(StoreConfigError, match="^bucket: elsewhere does not exist"):
            rigs(extra={"tier": {**tier, "bucket": "elsewhere"}})
    late = rigs(extra={"tier": {**tier, "job_deadline_s": 1.5}})  # the server is down
    assert "SharedStorageConnector starts without its storage: endpoint: " in caplog.text
    assert late.matched(prompt(TOKENS)) == (0, False)


def test_a_limit_that_is_none_is_named(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="max_bytes: '10 Gigs' is not a size; write a number and a unit"):
        rigs(extra={"max_bytes": "10 Gigs"})


def test_where_nothing_may_be_written_it_loads_and_a_bad_prefix_stays(rigs: Any, tmp_path: Path) -> None:
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    reader = rigs(extra={"read_only": True})
    assert reader.matched(prompt([9, *TOKENS], "new")) == (0, False)
    assert reader.stores(step(new={"new": ([0, 1, 2, 3, 4], 0, 19)})) == []
    layer = next(tmp_path.rglob("*.safetensors"))
    layer.write_bytes(layer.read_bytes()[:-1] + b"x")
    before = {path: path.stat().st_ctime_ns for path in tmp_path.rglob("*")}
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, {2, 4, 6, 8})
    assert {path: path.stat().st_ctime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)])
def test_whole_blocks_and_never_the_last_token(rigs: Any, length: int, expected: int) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    assert rig.matched(prompt(TOKENS[:length])) == (expected, expected > 0)


def test_tokens_beyond_those_computed(rigs: Any) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    request = prompt(TOKENS)
    assert rig.matched(request, computed=8) == (8, True)
    before = {layer: rig.kv[layer].clone() for layer in LAYERS}
    assert load(rig, request, [0, 2, 4, 6, 8], 8) == ({"r"}, set())
    for layer in LAYERS:
        assert torch.equal(rig.kv[layer][[4, 6]], before[layer][[1, 9]])
        assert torch.equal(rig.kv[layer][[0, 2]], before[layer][[0, 2]])  # those were computed: not touched
    assert rig.matched(prompt(TOKENS, "other"), computed=16) == (0, False)


def test_the_longest_stored_prefix_of_another_prompt_is_used(rigs: Any) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    assert rig.matched(prompt([*TOKENS[:8], 1, 2, 3, 4, 5])) == (8, True)
    assert rig.matched(prompt([1, *TOKENS[1:]], "elsewhere")) == (0, False)


def test_a_prompt_in_chunks_over_several_steps_is_stored_as_it_grows(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of one size, wherever steps end beside decodes: others are found one after the other, so too late."""
    monkeypatch.setattr(prefix_steps, "CHUNK_BLOCKS_MAX", 2)
    writer, reader = rigs(), rigs()
    request = prompt([*TOKENS, *range(7)], "w")
    writer.matched(request)
    assert writer.stores(step(new={"w": ([3, 7], 0, 6)})) == []
    assert writer.stores(step(cached={"w": ([1, 9], 6, 7)})) == [(0, 2)]
    assert writer.stores(step(cached={"w": ([5], 13, 5)})) == [(2, 4)]
    assert writer.stores(step(cached={"w": ([0, 2], 18, 5)})) == []
    assert writer.stores(step(cached={"w": ([], 23, 2)})) == [(4, 6)]
    writer.saved()
    again = writer.scheduler.build_connector_meta(step(cached={"w": ([], 25, 1)}))
    assert again.requests == []  # decoding stores nothing
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    load(reader, request, [2, 4, 6, 8, 10], 16)
    for layer in LAYERS:
        assert torch.equal(reader.kv[layer][[2, 4, 6, 8]], writer.kv[layer][[3, 7, 1, 9]])


def test_the_last_chunk_of_a_prompt_is_stored_though_it_is_not_whole(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_steps, "CHUNK_BLOCKS_MAX", 3)
    rig = rigs()
    rig.matched(prompt(TOKENS))
    assert rig.stores(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)})) == [(0, 3), (3, 4)]


def test_of_a_prompt_that_is_not_computed_to_its_end_whole_chunks_are_stored(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs()
    request = prompt(TOKENS)
    rig.matched(request)
    monkeypatch.setattr(prefix_steps, "CHUNK_BLOCKS_MAX", 3)
    assert rig.stores(step(new={"r": ([3, 7, 1, 9], 0, 15)})) == [(0, 3)]
    rig.saved()
    rig.scheduler.request_finished(request, [3, 7, 1, 9])
    assert rigs().matched(prompt(TOKENS, "elsewhere")) == (12, True)
    assert rig.matched(prompt(TOKENS, "again"), computed=12) == (0, False)
    assert rig.stores(step(new={"again": ([3, 7, 1, 9, 5], 12, 6)})) == [(3, 4)]


def preempted(rig: Rig, request: Any, ids: list[int]) -> None:
    """It was computed, and its blocks are another one's now."""
    rig.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), 0)
    rig.stores(step(new={request.request_id: (ids, 0, len(request.prompt_token_ids))}))
    rig.saved()


def test_a_preempted_request_loads_what_was_stored_while_it_ran(rigs: Any) -> None:
    rig, ids = rigs(), [3, 7, 1, 9, 5]
    request = prompt(TOKENS)
    assert rig.matched(request) == (0, False)
    preempted(rig, request, ids)
    for _ in range(module.FAILED_LOADS_MAX + 1):
        assert rig.matched(request) == (16, True)
        loaded, failed = load(rig, request, ids, 16)
        assert (loaded, failed) == ({"r"}, set())
        rig.report("r", failed)
        preempted(rig, request, ids)


def test_a_request_whose_loads_fail_is_computed_in_the_end(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    rig = rigs()
    monkeypatch.setattr(rig.worker._stores[0], "match", lambda _: [])
    request = prompt(TOKENS)
    for _ in range(module.FAILED_LOADS_MAX):
        assert rig.matched(request) == (16, True)
        _, failed = load(rig, request, [2, 4, 6, 8, 10], 16)
        assert failed == {2, 4, 6, 8}
        for ids in ({2}, {4}):  # of two ranks, in two steps
            rig.scheduler.update_connector_output(SimpleNamespace(finished_recving=None, invalid_block_ids=ids))
        rig.report("r", set())
    assert rig.matched(request) == (0, False)


def test_a_request_resumed_after_preemption_brings_all_its_blocks(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_steps, "CHUNK_BLOCKS_MAX", 2)
    rig = rigs()
    rig.matched(prompt(TOKENS, "w"))
    rig.work(rig.scheduler.build_connector_meta(step(new={"w": ([3, 7], 0, 8)})))
    meta = rig.scheduler.build_connector_meta(step(cached={"w": ([10, 11, 2, 6, 8], 0, 18)}, resumed=("w",)))
    (transfer,) = meta.requests
    assert transfer.first_block == 2  # the first two are on storage already
    assert transfer.slot_mapping.tolist() == [8, 9, 10, 11, 24, 25, 26, 27]
    assert transfer.hashes == list(hash_blocks(TOKENS, SIZE))[2:4]


def test_what_a_preempted_request_stores_still_is_not_copied_again(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ids = rigs(), [3, 7, 1, 9, 5]
    store, go_on = rig.worker._stores[0], threading.Event()
    publish = store.publish
    monkeypatch.setattr(store, "publish", lambda *chunk: (go_on.wait(120), publish(*chunk)))
    request = prompt(TOKENS)
    assert rig.matched(request) == (0, False)
    rig.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), 0)
    assert rig.stores(step(new={"r": (ids, 0, 18)})) == [(0, 4)]
    assert rig.matched(request, computed=8) == (0, False)
    assert rig.stores(step(cached={"r": (ids, 8, 10)}, resumed=("r",))) == []
    again = prompt(TOKENS, "again")  # to which the GPU's cache answers
    assert rig.matched(again, computed=16) == (0, False)
    assert rig.stores(step(new={"again": (ids, 16, 2)})) == []
    go_on.set()
    rig.saved()


def test_several_requests_in_one_step(rigs: Any) -> None:
    writer, reader = rigs(), rigs()
    prompts = {"a": list(range(9)), "b": list(range(50, 59))}
    for req_id, tokens in prompts.items():
        writer.matched(prompt(tokens, req_id))
    meta = writer.scheduler.build_connector_meta(step(new={"a": ([0, 1, 2], 0, 9), "b": ([5, 6, 7], 0, 9)}))
    assert [transfer.is_store for transfer in meta.requests] == [True, True]
    writer.work(meta)
    writer.saved()
    for req_id, tokens in prompts.items():
        assert reader.matched(prompt(tokens, req_id)) == (8, True)


def test_a_damaged_prefix_is_reported_as_failed_blocks_and_not_offered_again(rigs: Any, tmp_path: Path) -> None:
    writer, reader = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    path = sorted(tmp_path.rglob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, {2, 4, 6, 8})
    assert reader.matched(request) == (0, False)


def damage(root: Path) -> None:
    for path in root.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("computed", [0, 4], ids=["asked again", "its beginning is on the GPU and it is not"])
def test_what_was_damaged_is_stored_again_by_the_request_that_computes_it(
    rigs: Any, tmp_path: Path, computed: int
) -> None:
    writer, rig = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    damage(tmp_path)
    request, blocks = prompt(TOKENS), [2, 4, 6, 8, 10]
    assert rig.matched(request, computed) == (16 - computed, True)
    loaded, failed = load(rig, request, blocks, 16 - computed)
    rig.report(*loaded, failed)
    if not computed:
        assert rig.matched(request) == (0, False)
    assert rig.stores(step(new={"r": (blocks, computed, 18 - computed)})) == [(computed // SIZE, 4)]
    rig.saved()
    if not computed:
        assert rigs().matched(prompt(TOKENS)) == (16, True)


def test_a_load_that_failed_says_nothing_about_other_requests(rigs: Any, tmp_path: Path) -> None:
    other = list(range(50, 68))
    writer, rig = rigs(), rigs()
    store_whole(writer, other, [3, 7, 1, 9, 5])
    sound = prompt(other, "sound")
    assert rig.matched(sound) == (16, True)
    load(rig, sound, [0, 1, 3, 5, 7], 16)
    rig.report("sound", {2, 4, 6, 8})  # another one's
    assert rig.stores(step(new={"sound": ([0, 1, 3, 5, 7], 16, 2)})) == []
    rig.report("sound", {1, 3})  # those of a later owner
    assert rig.stores(step(cached={"sound": ([], 18, 1)})) == []


def test_a_load_that_fails_when_its_client_has_left_says_nothing_about_other_requests(rigs: Any) -> None:
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    rig = rigs()
    gone, other = prompt(TOKENS, "gone"), prompt(TOKENS[1:], "other")
    assert rig.matched(gone) == (16, True)
    assert rig.matched(other) == (0, False)
    rig.scheduler.update_state_after_alloc(gone, SimpleNamespace(get_block_ids=lambda: ([2, 4, 6, 8, 10],)), 16)
    rig.scheduler.build_connector_meta(step())
    rig.scheduler.request_finished(gone, [2, 4, 6, 8, 10])
    failed = SimpleNamespace(finished_recving=None, invalid_block_ids={2, 4})
    rig.scheduler.update_connector_output(failed)  # of one rank; the other one says so a step later
    rig.report("gone", {2, 4, 6, 8})
    assert rig.stores(step(new={"other": ([3, 7, 1, 9, 5], 0, 17)})) == [(0, 4)]
    assert not rig.scheduler._loading


def test_a_step_in_which_another_connector_loads_ends_the_engine(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="connectors: .* may load within a step"):
        rigs().scheduler.build_connector_meta(step(has_sync_kv_loads=True))


def test_loads_of_another_connector_that_no_step_waits_for_are_stored_as_they_come(rigs: Any) -> None:
    rig = rigs()
    assert rig.matched(prompt(TOKENS)) == (0, False)
    rig.scheduler.build_connector_meta(step())  # it waits outside the batch
    assert rig.stores(step(new={"r": ([3, 7, 1, 9, 5], 16, 2)})) == [(0, 4)]


def test_what_is_on_the_gpu_and_was_stored_is_not_copied_again(rigs: Any) -> None:
    rig = rigs()
    aligned = TOKENS[:16]  # storage is asked for less than all of it: never the last token
    store_whole(rig, aligned, [3, 7, 1, 9])
    for req_id in ("again", "and again"):
        request = prompt(aligned, req_id)
        assert rig.matched(request, computed=12) == (0, False)
        assert rig.stores(step(new={req_id: ([3, 7, 1, 9], 12, 4)})) == []
        rig.scheduler.request_finished(request, [])
    longer = prompt([*aligned, 1, 2, 3, 4, 5], "longer")
    assert rig.matched(longer, computed=16) == (0, False)
    assert rig.stores(step(new={"longer": ([3, 7, 1, 9, 2, 4], 16, 5)})) == [(4, 5)]


def test_what_storage_lost_is_stored_again_when_a_lookup_has_missed_it(rigs: Any, tmp_path: Path) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    for manifest in tmp_path.rglob("*.json"):
        manifest.unlink()
    assert rig.matched(prompt(TOKENS)) == (0, False)
    assert rig.stores(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)})) == [(0, 4)]


def test_after_a_reset_storage_is_used_no_more_as_weights_may_be_others(
    rigs: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    running = prompt(TOKENS[1:], "running")
    assert rig.matched(running) == (0, False)
    stored = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        assert rig.scheduler.reset_cache()
        assert rig.scheduler.get_num_new_matched_tokens(prompt(TOKENS), 0) == (0, False)
    cached = {"running": ([2, 4, 6, 8, 10], 0, 17)}
    assert rig.stores(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)}, cached=cached, resumed=("running",))) == []
    rig.scheduler.request_finished(running, [])
    assert sorted(tmp_path.rglob("*")) == stored
    assert caplog.text.count("write 'storage_after_reset': 'keep'") == 1
    assert rigs().matched(prompt(TOKENS)) == (16, True)


def test_storage_is_used_after_a_reset_where_it_is_kept(rigs: Any) -> None:
    rig = rigs(extra={"storage_after_reset": "keep"})
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5])
    rig.scheduler.reset_cache()
    assert rig.matched(prompt(TOKENS)) == (16, True)
    with pytest.raises(ConfigError, match="storage_after_reset: True is not accepted; write off or keep"):
        rigs(extra={"storage_after_reset": True})


def picture(name: str, offset: int) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=2))


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "tenant"},
        {"mm_features": [picture("one", 0)]},
    ],
    ids=["salt", "picture"],
)
def test_what_else_the_kv_depends_on_is_part_of_the_hash(rigs: Any, more: dict[str, Any]) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], **more)
    assert rig.matched(prompt(TOKENS)) == (0, False)
    assert rig.matched(prompt(TOKENS, "same", **more)) == (16, True)


def test_prompts_share_what_comes_before_the_first_picture_that_differs(rigs: Any) -> None:
    """A system prompt with whatever pictures, and the turns before the one with another picture."""
    rig = rigs()
    first, second = picture("first", 5), picture("second", 13)
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], mm_features=[first, second])
    assert rig.matched(prompt(TOKENS, "same", mm_features=[first, second])) == (16, True)
    assert rig.matched(prompt(TOKENS, "a turn before", mm_features=[first])) == (12, True)
    assert rig.matched(prompt(TOKENS, "another one", mm_features=[first, picture("third", 13)])) == (12, True)
    assert rig.matched(prompt(TOKENS, "others", mm_features=[picture("third", 5), second])) == (4, True)
    assert rig.matched(prompt(TOKENS, "elsewhere", mm_features=[picture("first", 6), second])) == (4, True)
    assert rig.matched(prompt(TOKENS, "none")) == (4, True)
    assert rig.matched(prompt(TOKENS, "tenant", mm_features=[first, second], cache_salt="x")) == (0, False)


def test_kv_that_a_step_computes_in_microbatches_is_stored_when_all_of_it_is(rigs: Any) -> None:
    """``--enable-dbo``: a layer is announced once for each, when the others' KV of it is not there yet."""
    rig = rigs()
    ids = [3, 7, 1, 9, 5]
    assert rig.matched(prompt(TOKENS)) == (0, False)
    meta = rig.scheduler.build_connector_meta(step(new={"r": (ids, 0, 18)}))
    rig.worker._connector_metadata = meta
    rig.worker.start_load_kv(None)
    for microbatch in (ids[:2], ids[2:]):
        for layer, cache in rig.kv.items():
            cache[microbatch] = torch.rand(cache[microbatch].shape)
            rig.worker.save_kv_layer(layer, cache, None)
    rig.worker.wait_for_save()
    rig.saved()
    reader = rigs()
    request = prompt(TOKENS, "reader")
    assert reader.matched(request) == (16, True)
    reader.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([0, 2, 4, 6, 8],)), 16)
    reader.work(reader.scheduler.build_connector_meta(step()))
    assert reader.loaded() == ({"reader"}, set())
    for layer, cache in reader.kv.items():
        assert torch.equal(cache[[0, 2, 4, 6]], rig.kv[layer][ids[:4]])


@pytest.mark.parametrize(
    ("width", "said"), [(6, "names a layer of more than"), (600, "does not fit this engine, and is removed")]
)
def test_chunks_of_another_form_make_room_for_those_that_fit(
    rigs: Any, caplog: pytest.LogCaptureFixture, width: int, said: str
) -> None:
    """One identity for engines whose KV differs is a fault of ours; each request would meet it, and none heal it."""
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    other = rigs()
    other.kv = {layer: torch.rand(BLOCKS, SIZE, width) for layer in other.kv}
    other.worker.register_kv_caches(other.kv)
    request = prompt(TOKENS, "a")
    assert other.matched(request) == (16, True)
    other.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([0, 2, 4, 6, 8],)), 16)
    other.work(other.scheduler.build_connector_meta(step()))
    assert other.loaded() == ({"a"}, {0, 2, 4, 6})
    assert said in caplog.text
    third = rigs()
    assert third.matched(prompt(TOKENS, "b")) == (0, False)


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(100_000))
    return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(folder))


def test_an_adapters_prompts_are_its_own(rigs: Any, adapter: Any) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], lora_request=adapter)
    assert rig.matched(prompt(TOKENS)) == (0, False)
    assert rig.matched(prompt(TOKENS, "same", lora_request=adapter)) == (16, True)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_was_trained_again_in_its_place_is_another_one(rigs: Any, adapter: Any, file: str) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], lora_request=adapter)
    path = Path(adapter.lora_path, file)
    path.write_bytes(path.read_bytes().replace(b"6", b"4").replace(b"\0", b"x"))
    assert rigs().matched(prompt(TOKENS, lora_request=adapter)) == (0, False)


def test_an_adapter_that_changes_under_an_engine_is_neither_loaded_nor_stored(
    rigs: Any, adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], lora_request=adapter)
    path = Path(adapter.lora_path, "adapter_model.safetensors")
    before = path.read_bytes()
    for data in (b"x" * len(before), before):  # what the engine has cached is not known from here on
        path.write_bytes(data)
        request = prompt(TOKENS, f"r{data[0]}", lora_request=adapter)
        assert rig.matched(request) == (0, False)
        assert rig.stores(step(new={request.request_id: ([3, 7, 1, 9, 5], 0, 18)})) == []
    assert caplog.text.count("were changed") == 1


def after_the_start(rig: Rig, change: Callable[[], Path]) -> None:
    """Change files until their time is later than the engine's start: file systems' clocks are coarse."""
    wait_for(lambda: change().lstat().st_ctime_ns > rig.scheduler._adapters.started_ns)


def weights_of(adapter: Any, fill: bytes) -> Path:
    path = Path(adapter.lora_path, "adapter_model.safetensors")
    path.write_bytes(fill * 100_000)
    return path


def moved(adapter: Any, trained: Path) -> Path:
    """The two folders change places; the files in them are as old as before."""
    place, aside = Path(adapter.lora_path), trained.with_name("aside")
    for source, target in ((place, aside), (trained, place), (aside, trained)):
        source.rename(target)
    return place


def linked(adapter: Any, trained: Path) -> Path:
    place = Path(adapter.lora_path)
    if place.is_symlink():
        place.unlink()
    else:
        place.rename(place.with_name("first"))
    place.symlink_to(trained)
    return place


@pytest.mark.parametrize(
    "change", [lambda adapter, _: weights_of(adapter, b"x"), moved, linked], ids=["written", "moved", "linked"]
)
def test_an_adapter_that_changed_between_the_start_and_its_first_request_is_neither_loaded_nor_stored(
    rigs: Any, adapter: Any, tmp_path: Path, change: Callable[[Any, Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    trained = tmp_path / "trained"
    shutil.copytree(adapter.lora_path, trained)
    weights_of(SimpleNamespace(lora_path=trained), b"x")
    rig = rigs()  # may have loaded the first weights by now
    after_the_start(rig, lambda: change(adapter, trained))
    for req_id in ("first", "second"):
        request = prompt(TOKENS, req_id, lora_request=adapter)
        assert rig.matched(request) == (0, False)
        assert rig.stores(step(new={req_id: ([3, 7, 1, 9, 5], 0, 18)})) == []
        rig.scheduler.request_finished(request, [])
    assert caplog.text.count("were changed after the engine's start") == 1
    again = rigs()
    store_whole(again, TOKENS, [3, 7, 1, 9, 5], lora_request=adapter)
    assert again.matched(prompt(TOKENS, lora_request=adapter)) == (16, True)


@pytest.mark.parametrize("commits", [1, 2])
def test_an_adapter_of_a_hub_whose_commit_changed_before_its_first_request_is_not_known(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="org/adapter")
    folder = tmp_path / "hub" / "models--org--adapter"
    for commit in ("c0ffee", "dec0de")[:commits]:
        (folder / "snapshots" / commit).mkdir(parents=True)
    rig, ref = rigs(), folder / "refs" / "main"
    ref.parent.mkdir()

    def update() -> Path:
        ref.write_text("c0ffee")
        return ref

    after_the_start(rig, update)
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], lora_request=hub)
    expected = (16, True) if commits == 1 else (0, False)  # one commit is what the engine itself has fetched
    assert rigs().matched(prompt(TOKENS, lora_request=hub)) == expected


def test_an_adapter_of_a_hub_is_known_by_its_commit_once_it_was_loaded(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="org/adapter")
    rig = rigs()
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], req_id="first", lora_request=hub)
    assert not list(tmp_path.rglob("*.safetensors"))
    ref = tmp_path / "hub" / "models--org--adapter" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("c0ffee")
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], req_id="second", lora_request=hub)
    assert rigs().matched(prompt(TOKENS, lora_request=hub)) == (16, True)
    ref.write_text("dec0de")
    assert rigs().matched(prompt(TOKENS, lora_request=hub)) == (0, False)


def test_the_files_of_an_adapter_keep_no_scheduler_waiting(
    rigs: Any, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs()
    let_go = threading.Event()
    revision = rig.scheduler._adapters.revision

    def hangs(lora: Any) -> Any:
        let_go.wait(120)
        return revision(lora)

    monkeypatch.setattr(rig.scheduler._adapters, "revision", hangs)
    rig.scheduler._lookup_deadline_s = 0.0
    request = prompt(TOKENS, lora_request=adapter)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert rig.stores(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)})) == []
    let_go.set()
    wait_for(rig.scheduler._requests["r"].matched.done)
    assert rig.stores(step(cached={"r": ([], 18, 1)})) == [(0, 4)]  # its blocks are still its own


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_request_that_reads_no_prefix_cache_loads_nothing_and_is_stored(
    rigs: Any, adapter: Any, has_adapter: bool
) -> None:
    rig = rigs()
    more = {"lora_request": adapter} if has_adapter else {}
    store_whole(rig, TOKENS, [3, 7, 1, 9, 5], skip_reading_prefix_cache=True, **more)
    assert rigs().matched(prompt(TOKENS, skip_reading_prefix_cache=True, **more)) == (0, False)  # prompt_logprobs, say
    assert rigs().matched(prompt(TOKENS, skip_reading_prefix_cache=False, **more)) == (16, True)


def test_a_config_that_models_change_in_workers_keeps_them_in_the_schedulers_namespace(
    rigs: Any,
) -> None:
    made = itertools.count()  # a scheduler's connector, a worker's, and so on
    hf_config = SimpleNamespace(_commit_hash=None, to_dict=lambda: {"max_model_len": next(made) % 2})
    model = SimpleNamespace(model="cache/ab12cd34", model_weights="s3://bucket/model", hf_config=hf_config)
    writer, reader = rigs(model=model), rigs(model=model)
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, set())


def test_a_worker_with_other_weights_than_the_scheduler_sees_says_so_and_keeps_to_its_own(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digest = f"config:{'a' * 24}"
    revisions = itertools.cycle([f"files:one+{digest}", f"files:two+{digest}"])
    monkeypatch.setattr(translate, "kv_revision", lambda _: next(revisions))
    rig = rigs()
    for tokens in (TOKENS, TOKENS[1:]):
        store_whole(rig, tokens, [3, 7, 1, 9, 5])
    assert rigs().matched(prompt(TOKENS)) == (0, False)
    assert caplog.text.count("are not those that the scheduler sees") == 1


def test_worker_that_takes_the_schedulers_digest_still_starts_the_collector_of_a_full_disk(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[bool] = []
    monkeypatch.setattr(CollectorLink, "note_full", lambda _: refused.append(True))
    worker = rigs(extra={"tier": {"type": "fs", "root_dir": str(tmp_path / "disk"), "min_free": "1MiB"}}).worker
    before = worker._stores[0]
    worker._agree(worker._revision)
    assert worker._stores[0] is not before
    worker._stores[0].on_full()
    assert refused == [True]


def test_another_tp_size_reads_nothing_of_it(rigs: Any) -> None:
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    assert rigs(tp_size=2).matched(prompt(TOKENS)) == (0, False)


@pytest.mark.parametrize("sizes", [{"dcp_size": 2}, {"pcp_size": 2}])
def test_blocks_whose_tokens_are_on_several_ranks_are_refused(rigs: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="context_parallel_size"):
        rigs(**sizes)


WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=64)
STATE = MambaSpec(block_size=SIZE, shapes=((2, 3),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    "spec",
    [
        WINDOW,
        ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
        STATE,
        UniformTypeKVCacheSpecs(block_size=SIZE, kv_cache_specs={"a": FullAttentionSpec(**ATTENTION), "b": WINDOW}),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_models_whose_prompts_lose_blocks_are_refused(rigs: Any, spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes one, of full attention or MLA; use KVTiersConnector"):
        rigs(kv_cache_spec=spec)


@pytest.mark.skipif("non_causal" not in FullAttentionSpec.__dataclass_fields__, reason="this vLLM has no prefix LM")
def test_a_model_whose_tokens_see_later_ones_is_refused(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="attention is not causal"):
        rigs(kv_cache_spec=FullAttentionSpec(**ATTENTION, non_causal=True))


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(**ATTENTION | {"num_kv_heads": 1}),
        UniformTypeKVCacheSpecs(block_size=SIZE, kv_cache_specs={"a": FullAttentionSpec(**ATTENTION)}),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_models_that_keep_all_of_a_prompt_are_taken(rigs: Any, spec: Any) -> None:
    assert rigs(kv_cache_spec=spec).matched(prompt(TOKENS)) == (0, False)


def test_every_rank_must_have_it(rigs: Any) -> None:
    first, second = rigs(tp_size=2, world_size=2), rigs(tp_size=2, world_size=2, rank=1)
    store_whole(first, TOKENS, [3, 7, 1, 9, 5])
    assert first.matched(prompt(TOKENS)) == (0, False)
    store_whole(second, TOKENS[:9], [3, 7, 1])
    assert first.matched(prompt(TOKENS, "again")) == (8, True)


def test_stages_of_a_pipeline_store_and_find_their_own_layers(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = {"pp_size": 2, "world_size": 2}
    last = ("model.layers.2.attn", "model.layers.3.attn")
    first, second = rigs(**pipeline), rigs(**pipeline, rank=1, layers=last)
    store_whole(first, TOKENS, [3, 7, 1, 9, 5])
    assert first.matched(prompt(TOKENS)) == (0, False)
    store_whole(second, TOKENS, [3, 7, 1, 9, 5])
    request = prompt(TOKENS, "again")
    assert second.matched(request) == (16, True)
    assert load(second, request, [2, 4, 6, 8, 10], 16) == ({"again"}, set())
    for layer in last:
        assert torch.equal(second.kv[layer][[2, 4, 6, 8]], second.kv[layer][[3, 7, 1, 9]])
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    assert rigs(**pipeline).matched(prompt(TOKENS)) == (0, False)


def test_nothing_waits_for_ever_and_prompts_without_tokens_are_left_alone(rigs: Any) -> None:
    rig = rigs()
    assert rig.scheduler.get_num_new_matched_tokens(prompt([]), 0) == (0, False)
    embeds = prompt(TOKENS)
    embeds.prompt_embeds = torch.zeros(1)
    assert rig.scheduler.get_num_new_matched_tokens(embeds, 0) == (0, False)
    rig.scheduler._lookup_deadline_s = 0.0
    request = prompt(TOKENS, "late")
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


class Hung:
    """Storage that answers when it is let go, and then as the files do."""

    def __init__(self, files: Any, let_go: threading.Event) -> None:
        self._files = files
        self._let_go = let_go

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name != "close":  # which asks no storage
                self._let_go.wait(120)
            return getattr(self._files, name)(*arguments)

        return call


@contextmanager
def hanging(*connectors: SharedStorageConnector) -> Iterator[threading.Event]:
    let_go = threading.Event()
    for each in connectors:
        for store in each._stores:
            store.files = Hung(store.files, let_go)  # type: ignore[assignment]
    yield let_go
    let_go.set()


def test_a_load_that_hangs_is_reported_and_its_late_end_touches_no_block(rigs: Any) -> None:
    writer, reader = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    reader.worker._worker._load_deadline_s = 0.0
    before = {layer: tensor.clone() for layer, tensor in reader.kv.items()}
    with hanging(reader.worker):
        assert load(reader, request, [2, 4, 6, 8, 10], 16) == ({"r"}, {2, 4, 6, 8})
    reader.worker._pool.shutdown(120)  # the read has come to its end
    assert reader.worker.get_finished(set()) == (None, None)
    for layer in LAYERS:
        assert torch.equal(reader.kv[layer], before[layer])


def test_a_load_waits_for_no_store(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, rig = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    files, let_go = rig.worker._stores[0], threading.Event()
    publish = files.publish
    monkeypatch.setattr(files, "publish", lambda *arguments: (let_go.wait(120), publish(*arguments)))
    for first in range(3):
        request = prompt([first, *TOKENS], f"w{first}")
        rig.matched(request)
        assert rig.stores(step(new={request.request_id: ([3, 7, 1, 9, 5], 0, 19)})) == [(0, 4)]
    request = prompt(TOKENS)
    assert rig.matched(request) == (16, True)
    assert load(rig, request, [2, 4, 6, 8, 10], 16) == ({"r"}, set())
    let_go.set()
    rig.saved()


def test_a_bursts_lookups_and_loads_are_made_side_by_side(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, most would be late: what waits in line is under the same deadline."""
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    rig = rigs()
    for connector, count in ((rig.scheduler, 16), (rig.worker, 8)):
        store = connector._stores[0]
        together, match = threading.Barrier(count), store.match
        monkeypatch.setattr(store, "match", lambda hashes, b=together, m=match: (b.wait(120), m(hashes))[1])
    asked = [prompt(TOKENS, f"r{index}") for index in range(16)]
    for request in asked:
        assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert [rig.matched(request) for request in asked] == [(16, True)] * 16
    for request in asked[:8]:
        rig.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([2, 4, 6, 8],)), 16)
    rig.work(rig.scheduler.build_connector_meta(step()))
    wait_for(lambda: all(each.future.done() for each in rig.worker._worker._loading.values()))
    assert rig.loaded() == ({request.request_id for request in asked[:8]}, set())


def test_a_lookup_that_is_late_in_line_makes_none_behind_it_late(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKUP_THREADS", 1)
    rig = rigs()
    first, second = prompt(TOKENS, "first"), prompt(TOKENS, "second")
    with hanging(rig.scheduler):
        for request in (first, second):
            assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        wait_for(lambda: len(rig.scheduler._pool._began) == 1)
        rig.scheduler._lookup_deadline_s = 0.0
        for _ in range(2):  # as vLLM does while it has no room for them
            for request in (first, second):
                assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert not rig.scheduler._pool._waiting
        assert rig.scheduler.get_kv_connector_stats().data["lookups_given_up"] == 2
    rig.scheduler._lookup_deadline_s = PATIENT["lookup_deadline_s"]
    rig.scheduler.update_state_after_alloc(second, SimpleNamespace(get_block_ids=lambda: ([0],)), 0)
    assert rig.matched(second) == (0, False)
    assert rig.scheduler.get_kv_connector_stats() is None


def test_a_load_that_waited_in_line_says_so(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOAD_THREADS", 1)
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    rig = rigs()
    ids = {"first": [0, 1, 2, 3], "second": [4, 5, 6, 7]}
    with hanging(rig.worker):
        for name, blocks in ids.items():
            request = prompt(TOKENS, name)
            rig.matched(request)
            allocated = SimpleNamespace(get_block_ids=lambda blocks=blocks: (blocks,))
            rig.scheduler.update_state_after_alloc(request, allocated, 16)
        rig.work(rig.scheduler.build_connector_meta(step()))
        wait_for(lambda: len(rig.worker._worker._pool._began) == 1 and len(rig.worker._worker._pool._waiting) == 1)
        for each in rig.worker._worker._loading.values():
            each.late_at = 0.0
        assert rig.loaded() == ({"first", "second"}, set(range(8)))
    assert "request first: its prefix was not loaded and is computed: with its wait in line storage took" in caplog.text
    assert (
        "request second: its prefix was not loaded and is computed: it waited in line behind others for" in caplog.text
    )
    assert rig.worker.get_kv_connector_stats().data["loads_failed"] == 2


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_load_that_a_reset_overtakes_has_failed(rigs: Any, has_ended: bool) -> None:
    """vLLM resets when weights were changed: what is read is KV of those before."""
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    rig = rigs()
    request = prompt(TOKENS)
    rig.matched(request)
    with hanging(rig.worker) as let_go:
        rig.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([2, 4, 6, 8],)), 16)
        rig.work(rig.scheduler.build_connector_meta(step()))
        if has_ended:
            let_go.set()
            wait_for(lambda: rig.worker._worker._loading["r"].future.done())
        rig.scheduler.reset_cache()
        rig.work(rig.scheduler.build_connector_meta(step()))
        assert rig.loaded() == ({"r"}, {2, 4, 6, 8})
    assert not rig.scheduler.build_connector_meta(step()).drops_loads


def test_shutdown_waits_for_no_lookup_and_no_load_that_hangs(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHUTDOWN_S", module.THREADS_END_S)
    writer, reader = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    request = prompt(TOKENS)
    assert reader.matched(request) == (16, True)
    with hanging(reader.scheduler, reader.worker):
        assert reader.scheduler.get_num_new_matched_tokens(prompt(TOKENS, "other"), 0) == (None, False)
        reader.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([2, 4, 6, 8],)), 16)
        reader.work(reader.scheduler.build_connector_meta(step()))
        ending = threading.Thread(target=reader.close, daemon=True)
        ending.start()
        ending.join(120)
        assert not ending.is_alive()


def test_a_lookup_nobody_waits_for_any_more_is_not_made(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKUP_THREADS", 2)
    rig = rigs()
    with hanging(rig.scheduler):
        asked = [prompt(TOKENS, f"r{index}") for index in range(3)]  # one more than there are threads
        for request in asked:
            rig.scheduler.get_num_new_matched_tokens(request, 0)
        last = rig.scheduler._requests["r2"].matched
        rig.scheduler.request_finished(asked[2], [])
        assert last.cancelled()


def test_while_storage_hangs_no_request_waits_and_none_that_ended_is_kept(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOKUP_THREADS", 2)
    rig = rigs()
    with hanging(rig.scheduler) as let_go:
        asked = [prompt(TOKENS, f"r{index}") for index in range(3)]
        for request in asked:
            assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        ended = weakref.ref(rig.scheduler._requests["r2"].matched)
        rig.scheduler.request_finished(asked[2], [])
        gc.collect()
        assert ended() is None
        rig.scheduler._lookup_deadline_s = 0.0
        wait_for(lambda: rig.scheduler._pool.hangs(0.0))
        assert rig.scheduler.get_num_new_matched_tokens(prompt(TOKENS, "at once"), 0) == (0, False)
        let_go.set()
        wait_for(lambda: not rig.scheduler._pool.hangs(0.0))
    rig.scheduler._lookup_deadline_s = PATIENT["lookup_deadline_s"]
    assert rig.matched(prompt(TOKENS, "at once")) == (0, False)
    assert rig.scheduler._requests["at once"].found == 0


def test_what_was_done_is_counted_in_vllms_endpoint(rigs: Any, tmp_path: Path) -> None:
    writer, reader = rigs(), rigs()
    store_whole(writer, TOKENS, [3, 7, 1, 9, 5])
    first = writer.worker.get_kv_connector_stats()
    assert first is not None
    assert first.data["chunks_stored"] == 1
    assert first.data["bytes_stored"] > 0
    assert writer.worker.get_kv_connector_stats() is None  # nothing since
    (manifest,) = tmp_path.rglob("*.json")
    asked = prompt(TOKENS)
    assert reader.matched(asked) == (16, True)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    load(reader, asked, [2, 4, 6, 8, 10], 16)
    seen = reader.worker.get_kv_connector_stats()
    assert seen is not None
    assert seen.data["verify_failures"] == 1
    sent = SharedStorageConnector.build_kv_connector_stats(json.loads(json.dumps(first.to_dict())))
    registry = CollectorRegistry()
    types = {Counter: partial(Counter, registry=registry)}
    vllm_config = SimpleNamespace(kv_transfer_config=None)
    metrics = SharedStorageConnector.build_prom_metrics(vllm_config, _Types(types), ["engine"], {0: ["0"]})
    metrics.observe(sent.aggregate(seen).to_dict(), 0)
    shown = generate_latest(registry).decode()
    assert 'vllm:kvtiers_prefix_chunks_stored_total{engine="0"} 1.0' in shown
    assert 'vllm:kvtiers_prefix_verify_failures_total{engine="0"} 1.0' in shown
    assert 'vllm:kvtiers_prefix_errors_total{engine="0"} 0.0' in shown


@pytest.mark.parametrize("call", ["read", "read_all"])
def test_errors_of_the_storage_are_counted_in_loads(rigs: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    rig = rigs()
    request = prompt(TOKENS)
    rig.matched(request)

    def refuse(*_: Any) -> Any:
        raise StoreUnavailableError("connection refused")

    monkeypatch.setattr(rig.worker._stores[0].files, call, refuse)
    assert load(rig, request, [2, 4, 6, 8, 10], 16) == ({"r"}, {2, 4, 6, 8})
    counted = rig.worker.get_kv_connector_stats().data
    assert (counted["errors"], counted["loads_failed"]) == (1, 1)


def test_multi_connector_reads_its_counts() -> None:
    """It looks the classes of its connectors up by name only, in the process that exports metrics."""
    sent = MultiConnector.build_kv_connector_stats({"SharedStorageConnector": {"chunks_stored": 2}})
    assert sent["SharedStorageConnector"].data == {"chunks_stored": 2}


class _Types(dict[Any, Any]):
    """vLLM asks for gauges and histograms as well."""

    def __missing__(self, key: Any) -> Any:
        return key


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"max_byte": "1GiB"}, "max_byte"),
        ({"lookup_deadline_s": "soon"}, "lookup_deadline_s"),
        ({"load_deadline_s": -1}, "load_deadline_s"),
        ({"load_deadline_s": float("nan")}, "load_deadline_s"),
    ],
    ids=str,
)
def test_options_that_would_do_nothing_are_refused(rigs: Any, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rigs(extra=extra)
    assert caught.value.field == field


def test_a_buffer_of_an_unknown_order_ends_the_engine_at_its_start(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="is not the shape of a known layout"):
        rigs().worker.register_kv_caches({"layer": torch.rand(BLOCKS + 1, 3, SIZE, 10)})


def test_storage_that_hangs_delays_a_request_by_one_deadline(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks again about a request of which nothing could be loaded."""
    monkeypatch.setattr(module, "LOAD_THREADS", 2)
    clock = Clock()
    for each in (module, prefix_worker, daemon_pool):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=clock))
    store_whole(rigs(), TOKENS, [3, 7, 1, 9, 5])
    reader, began = rigs(extra={"load_deadline_s": 1.0}), clock.now
    pool = reader.worker._worker._pool
    wait_for(lambda: not pool._waiting and not pool._began)  # what it does first
    loads = dict.fromkeys("abc", 0)
    allocated = SimpleNamespace(get_block_ids=lambda: ([2, 4, 6, 8, 10],))
    with hanging(reader.worker):
        for name in loads:
            request = prompt(TOKENS, name)
            while reader.matched(request)[0]:
                loads[name] += 1
                reader.scheduler.update_state_after_alloc(request, allocated, 16)
                reader.work(reader.scheduler.build_connector_meta(step()))
                if name != "c":  # for which no thread is left
                    wait_for(lambda: len(pool._began) == sum(loads.values()))
                    assert reader.worker.get_finished(set())[1] is None
                    clock.advance(1.0)
                finished, failed = reader.loaded()
                assert (finished, failed) == ({name}, {2, 4, 6, 8})
                reader.report(name, failed)
    assert loads == {"a": 1, "b": 1, "c": module.FAILED_LOADS_MAX}
    assert clock.now - began == 2.0, "where both threads hang a load fails at once"


def test_what_is_beyond_the_bound_is_not_even_copied(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    copied: list[int] = []
    extract = extract_slots

    def note(*arguments: Any) -> Any:
        copied.append(1)
        return extract(*arguments)

    monkeypatch.setattr(prefix_worker, "extract_slots", note)
    monkeypatch.setattr(prefix_worker, "SAVE_BYTES_MAX", 100)
    rig.matched(prompt(TOKENS))
    rig.work(rig.scheduler.build_connector_meta(step(new={"r": ([3, 7, 1, 9, 5], 0, 18)})))
    assert (copied, rig.worker._worker.dropped_blocks) == ([], 4)
