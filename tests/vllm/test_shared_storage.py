"""SharedStorageConnector: vLLM's own scheduler over a tier of each rank, whose hosts have folders of their own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.config import OffloadingCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvtiers.connector.core.decisions import REASONS
from kvtiers.connector.ranks.blocks import BELIEVED_S
from kvtiers.connector.ranks.place import LOAD_DEADLINE_S
from kvtiers.connector.ranks.transfers import RankTransfers
from kvtiers.connector.vllm import shared_storage as module
from kvtiers.connector.vllm import translate, versions
from kvtiers.connector.vllm.connector import KVTiersConnector
from kvtiers.connector.vllm.rank_manager import FAILED_LOADS_MAX
from kvtiers.connector.vllm.shared_storage import SharedStorageConnector
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.clock import Clock
from tests.vllm.engines import (
    BLOCK_TOKENS,
    FULL,
    SLIDING,
    VllmConfig,
    groups,
    kv_cache_config,
    kv_caches,
    offloading_config,
)
from tests.waiting import PATIENT, wait_for

BLOCKS = 16
TOKENS = list(range(4 * BLOCK_TOKENS + 5))
IDS = [3, 7, 1, 9]


#: A model of which vLLM offloads two groups, or one of two.
TWO_GROUPS = {
    "kinds": (FULL, SLIDING),
    "groups": tuple(dataclasses.replace(each, tokens_per_block=BLOCK_TOKENS) for each in groups(2)),
}
ONE_OF_TWO = {"kinds": (FULL, SLIDING)}
Ids = list[int] | tuple[list[int], ...]  # blocks of a request, of each group if there are several


def by_group(ids: Ids) -> tuple[list[int], ...]:
    return ids if isinstance(ids, tuple) else (ids,)


def config_for(sizes: dict[str, Any], vllm_config: Any, _: Any) -> Any:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    cache = OffloadingCacheConfig(tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=extra["blocks_per_chunk"])
    return offloading_config(extra, cache=cache, **sizes)


class Rig:
    """An engine: a scheduler's connector and one of each rank, with the KV tensors of each rank.

    Args:
        roots: the folder of each rank's host; the scheduler is on the first host.
        changes: of ``offloading_config``; ``extra``: of ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        roots: list[Path],
        monkeypatch: pytest.MonkeyPatch,
        extra: dict[str, Any] | None = None,
        kinds: tuple[Any, ...] = (FULL,),
        executor: str = "mp",
        kv_role: str = "kv_both",
        policy: str = "recompute",
        **changes: Any,
    ) -> None:
        init_none_hash(sha256)
        self.ranks = len(roots)

        def connector(role: Any, root: Path, rank: int) -> Any:
            place = {"shared_storage_path": str(root), "min_free": 0, "cpu_bytes_to_use": 1 << 20, **(extra or {})}
            if {"tier", "config_file"} & place.keys():
                del place["shared_storage_path"], place["min_free"]
            transfer = SimpleNamespace(
                kv_connector="SharedStorageConnector", kv_connector_extra_config={"lookup_deadline_s": 60, **place},
                kv_load_failure_policy=policy, kv_role=kv_role,
            )  # fmt: skip
            config = VllmConfig(
                kv_transfer_config=transfer,
                cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
                speculative_config=None,
                parallel_config=SimpleNamespace(
                    distributed_executor_backend=executor, world_size=self.ranks, decode_context_parallel_size=1
                ),
            )
            sizes = {"world_size": self.ranks, "tp_size": self.ranks, "rank": rank, **changes}
            if changes.get("pp_size"):  # a process knows the layers of its own stage
                sizes["groups"] = tuple(
                    dataclasses.replace(group, layer_names=(f"{role}.{rank}",)) for group in offloading_config().groups
                )
            monkeypatch.setattr(offloading_connector, "build_offloading_config", partial(config_for, sizes))
            return SharedStorageConnector(config, role, kv_cache_config(*kinds))

        self.workers: list[Any] = []
        self.kv: list[list[torch.Tensor]] = []
        for rank, root in enumerate(roots):
            worker = connector(KVConnectorRole.WORKER, root, rank)
            tensors, canonical = kv_caches(BLOCKS)
            refs = canonical.group_data_refs * len(
                changes.get("groups", [None])
            )  # each group has its own blocks of all
            canonical = dataclasses.replace(canonical, group_data_refs=refs)
            for tensor in tensors:
                tensor += rank
            worker.connector_worker._init_worker(canonical)
            self.workers.append(worker)
            self.kv.append(tensors)
        self.scheduler = connector(KVConnectorRole.SCHEDULER, roots[0], 0)
        self.aggregator = KVOutputAggregator(self.ranks)
        self.loaded: set[str] = set()
        self.invalid: set[int] = set()
        self.failed: set[str] = set()
        self.asked: Any = None  # the last request of ``find``

    def write(self, req_id: str = "w", tokens: list[int] = TOKENS, **more: Any) -> None:
        """Answer a request, and store its prompt."""
        request = self.request(req_id, tokens, **more)
        self.matched(request)
        self.store(request)

    def find(self, req_id: str, tokens: list[int] = TOKENS, **more: Any) -> int:
        """Tokens that a new request can load."""
        self.asked = self.request(req_id, tokens, **more)
        return self.matched(self.asked)

    def read(self, ids: Ids) -> tuple[set[int], set[str]]:
        """Load four blocks for the last request of ``find``."""
        return self.load(self.asked, ids, 4 * BLOCK_TOKENS)

    def request(self, req_id: str, tokens: list[int] = TOKENS, **more: Any) -> Request:
        params = more.pop("params", None)
        request = Request(
            req_id,
            tokens,
            SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params}),
            None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            **more,
        )
        self.scheduler.on_new_request(request)
        return request

    def matched(self, request: Request, computed: int = 0) -> int:
        """Tokens that a request can load, when the storage has answered."""

        tokens: int | None
        while True:
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            assert is_async == bool(tokens)
            if tokens is not None:
                return tokens
            self.step()

    def step(
        self,
        new: dict[str, tuple[Ids, int]] | None = None,
        finished: set[str] | None = None,
        preempted: set[str] | None = None,
    ) -> None:
        """One step of the engine. ``new``: request -> its blocks, and the tokens that are computed."""
        step = SchedulerOutput.make_empty()
        requests: Any = [
            SimpleNamespace(req_id=req_id, block_ids=by_group(ids), num_computed_tokens=0)
            for req_id, (ids, _) in (new or {}).items()
        ]
        step.scheduled_new_reqs = requests
        step.scheduled_cached_reqs = CachedRequestData.make_empty()
        step.num_scheduled_tokens = {req_id: tokens for req_id, (_, tokens) in (new or {}).items()}
        step.finished_req_ids = finished or set()
        step.preempted_req_ids = preempted
        meta = self.scheduler.build_connector_meta(step)
        outputs = []
        for worker in self.workers:
            worker.bind_connector_metadata(meta)
            if meta.jobs_to_flush:
                worker.handle_preemptions(meta)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            done = KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=done))
        output = self.aggregator.aggregate(outputs)
        assert output is not None
        done = output.kv_connector_output
        self.scheduler.update_connector_output(done)
        self.loaded |= set(done.finished_recving or ())
        self.failed |= set(done.failed_recving or ())
        self.invalid |= done.invalid_block_ids

    def store(self, request: Request, ids: Ids = IDS) -> None:
        """Compute a prompt, and step until nothing is on its way."""
        request.num_computed_tokens = 0
        self.step({request.request_id: (ids, len(request.prompt_token_ids or ()))})
        self.settle()

    def settle(self) -> None:
        def idle() -> bool:
            self.step()
            return not self.scheduler.has_pending_push_work()

        wait_for(idle)

    def load(self, request: Request, ids: Ids, tokens: int) -> tuple[set[int], set[str]]:
        """Load a prompt's beginning. Returns the failed blocks and requests."""
        self.begin_load(request, ids, tokens)

        def done() -> bool:
            self.step()
            return request.request_id in self.loaded

        wait_for(done)
        return self.invalid, self.failed

    def begin_load(self, request: Request, ids: Ids, tokens: int) -> None:
        blocks = tuple(
            [SimpleNamespace(block_id=each, block_hash=None, is_null=not each) for each in group]
            for group in by_group(ids)
        )
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=blocks), tokens)
        self.loaded, self.invalid, self.failed = set(), set(), set()

    def equal(self, source: int, target: int) -> bool:
        return all(bool((layer[source] == layer[target]).all()) for tensors in self.kv for layer in tensors)

    def close(self) -> None:
        for each in (*self.workers, self.scheduler):
            each.shutdown()


@pytest.fixture
def rigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Rig] = []

    def make(ranks: int = 1, hosts: int = 1, **options: Any) -> Rig:
        roots = [tmp_path / f"host{min(rank, hosts - 1)}" for rank in range(ranks)]
        made.append(Rig(roots, monkeypatch, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def files_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*.bin"))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


# ---- two hosts -------------------------------------------------------------------------------------------------------


def test_next_engine_loads_blocks_stored_by_two_hosts_in_separate_folders(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(2, 2)
    rig.write()
    assert len(files_of(tmp_path / "host0")) == len(files_of(tmp_path / "host1")) == 4
    again = rigs(2, 2)
    assert again.find("r") == 4 * BLOCK_TOKENS
    assert again.read([10, 11, 12, 13]) == (set(), set())
    assert all(again.equal(source, target) for source, target in zip(IDS, (10, 11, 12, 13), strict=True))


@pytest.mark.parametrize("harm", ["emptied", "damaged"])
def test_block_lost_by_another_host_fails_once_and_is_stored_again(rigs: Any, tmp_path: Path, harm: str) -> None:
    rig = rigs(2, 2)
    rig.write()
    lost = files_of(tmp_path / "host1")[0]
    if harm == "emptied":
        lost.unlink()
    else:
        damage(lost)
    rig = rigs(2, 2)
    assert rig.find("r") == 4 * BLOCK_TOKENS
    before = [layer[13].clone() for layer in rig.kv[1]]
    failed, _ = rig.read(ids := [10, 11, 12, 13])
    assert sorted(failed) == ids[-len(failed) :]  # it and what follows
    assert all(bool((layer[13] == old).all()) for layer, old in zip(rig.kv[1], before, strict=True))
    reading = rig.asked
    # The scheduler has forgotten it, although its own host has it.
    assert rig.find("at once") == (4 - len(failed)) * BLOCK_TOKENS
    rig.store(reading, ids)
    assert len(files_of(tmp_path / "host1")) == 4
    assert rig.find("later") == 4 * BLOCK_TOKENS
    assert rig.read([2, 4, 5, 6]) == (set(), set())


@pytest.mark.parametrize(
    ("model", "written", "read"),
    [(TWO_GROUPS, (IDS, [2, 4, 5, 6]), ([10, 11, 12, 13], [0, 0, 0, 15])), (ONE_OF_TWO, IDS, [10, 11, 12, 13])],
    ids=["both offloaded", "one offloaded"],
)
def test_failed_load_of_model_with_two_groups_is_reported_by_request_not_by_block(
    rigs: Any, tmp_path: Path, model: dict[str, Any], written: Ids, read: Ids
) -> None:
    rig = rigs(2, 2, **model)
    rig.matched(request := rig.request("w"))
    rig.store(request, written)
    stored = len(files_of(tmp_path / "host1"))
    rig = rigs(2, 2, **model)
    assert rig.find("whole") == 4 * BLOCK_TOKENS
    assert rig.read(read) == (set(), set())
    for group in zip(by_group(written), by_group(read), strict=True):
        assert all(rig.equal(source, target) for source, target in zip(*group, strict=True) if target)
    for path in files_of(tmp_path / "host1"):
        path.unlink()
    rig = rigs(2, 2, **model)
    assert rig.find("r") == 4 * BLOCK_TOKENS
    assert rig.read(read) == (set(), {"r"})
    rig.store(rig.asked, written)
    assert len(files_of(tmp_path / "host1")) == stored


def test_block_counts_as_stored_only_when_every_rank_has_it(rigs: Any, tmp_path: Path) -> None:
    (tmp_path / "host1").mkdir()
    rig = rigs(2, 2)
    shutil.rmtree(tmp_path / "host1")
    (tmp_path / "host1").write_text("in the way")
    rig.write()
    wait_for(lambda: rig.step() or len(files_of(tmp_path / "host0")) == 4)
    assert rig.find("r") == 0


def test_blocks_removed_by_collector_of_another_host_are_forgotten(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(2, 2)
    rig.write()
    assert rig.find("r") == 4 * BLOCK_TOKENS
    tier = rig.workers[1]._rank_worker._transfers._guard.tier
    lost = tuple(tier.mapper.key_of(str(path.relative_to(tmp_path / "host1"))) for path in files_of(tmp_path / "host1"))
    tier._events.add(lost, removed=True)
    rig.step()
    assert rig.find("after") == 0


def test_hung_host_fails_the_load_within_its_deadline_and_delays_no_step(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(2, 2)
    rig.write()
    assert rig.find("r") == 4 * BLOCK_TOKENS
    transfers = rig.workers[1]._rank_worker._transfers
    transfers._clock = clock = Clock()  # a step that waits for this host would never end
    monkeypatch.setattr(transfers._guard.tier, "submit_load", lambda job: None)
    rig.begin_load(rig.asked, [10, 11, 12, 13], 4 * BLOCK_TOKENS)
    rig.step()
    clock.advance(LOAD_DEADLINE_S - 0.1)
    rig.matched(meanwhile := rig.request("meanwhile", TOKENS[1:]))
    meanwhile.num_computed_tokens = 0
    rig.step({"meanwhile": (IDS, len(TOKENS))})
    wait_for(lambda: rig.step() or len(files_of(tmp_path)) == 16)
    assert not rig.loaded
    clock.advance(0.1)
    wait_for(lambda: rig.step() or rig.loaded)
    assert rig.invalid == {10, 11, 12, 13}
    assert rig.find("next") == 0  # nobody waits for that host again


def test_hung_storage_delays_one_request_by_one_deadline_and_no_later_request(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = rigs(2, 2)
    prompts = {"a": TOKENS, "b": TOKENS[1:], "c": TOKENS[2:]}
    for req_id, tokens in prompts.items():
        writer.write(req_id, tokens)
    rig = rigs(2, 2)
    transfers = rig.workers[1]._rank_worker._transfers
    transfers._clock = clock = Clock()
    transfers._free = transfers._free[:4]
    monkeypatch.setattr(transfers._guard.tier, "submit_load", lambda job: None)
    loads = dict.fromkeys(prompts, 0)
    for req_id, tokens in prompts.items():
        request = rig.request(req_id, tokens)
        while rig.matched(request):  # vLLM asks again about a request of which nothing could be loaded
            loads[req_id] += 1
            rig.begin_load(request, ids := [10, 11, 12, 13], 4 * BLOCK_TOKENS)
            rig.step()
            if transfers._loads:
                assert req_id == "a", "late reads hold all slots, and this load waits for one"
                clock.advance(LOAD_DEADLINE_S)
            wait_for(lambda: rig.step() or rig.loaded)
            assert rig.invalid == set(ids)
    assert loads == dict.fromkeys(prompts, 1)


def test_request_is_computed_after_a_bounded_number_of_failed_loads(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(2, 2)
    rig.write()
    for worker in rig.workers:
        monkeypatch.setattr(worker._rank_worker._transfers._to_blocks, "transfer_async", lambda *_: False)
    loads = 0
    assert rig.find("r") == 4 * BLOCK_TOKENS
    while rig.matched(rig.asked):  # no block is lost, and vLLM asks again
        loads += 1
        assert loads <= FAILED_LOADS_MAX
        assert rig.read(ids := [10, 11, 12, 13]) == (set(ids), set())
    assert loads == FAILED_LOADS_MAX
    rig.step({"r": ([], 0)}, finished={"r"})
    assert rig.find("other") == 4 * BLOCK_TOKENS
    assert rig.scheduler._rank_manager._failed_loads == {}


# ---- load or compute -------------------------------------------------------------------------------------------------


def teach(rig: Rig, *, token_s: float, block_s: float) -> None:
    """Have the scheduler believe that computing and loading take so long."""
    decisions = rig.scheduler._rank_manager.decisions
    for tokens in (32, 64, 128) * 20:
        decisions.steps.prefill.learn(tokens, tokens * tokens / 2, tokens * token_s)
        decisions.ways[0].learn(tokens // BLOCK_TOKENS, tokens // BLOCK_TOKENS * block_s)


def decided(rig: Rig) -> dict[str, float]:
    metrics = rig.scheduler._rank_manager._guard._metrics
    counts = {reason: metrics.value("kvtiers_load_decisions_total", "fs", reason) for reason in REASONS}
    return {reason: count for reason, count in counts.items() if count}


def test_request_is_computed_without_lookups_if_that_takes_less_time(rigs: Any) -> None:
    rig = rigs(2, 2)
    rig.write()
    teach(rig, token_s=0.001, block_s=1.0)
    asked = rig.scheduler._rank_manager._guard.lookup = Mock()
    assert rig.find("r") == 0
    assert not asked.called
    assert decided(rig)["slower"] == 1
    rig.scheduler._rank_manager.on_request_finished(SimpleNamespace(req_id="r"))
    assert "r" not in rig.scheduler._rank_manager.loads._requests


def test_request_loads_if_that_takes_less_time(rigs: Any) -> None:
    rig = rigs(2, 2)
    rig.write()
    teach(rig, token_s=1.0, block_s=0.001)
    assert rig.find("r") == 4 * BLOCK_TOKENS
    assert rig.find("r") == 4 * BLOCK_TOKENS  # vLLM asks again while it has no room for the request
    assert rig.read([10, 11, 12, 13]) == (set(), set())
    assert decided(rig)["faster"] == 1
    assert rig.scheduler._rank_manager.loads._loads == {}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_load_that_takes_much_longer_than_computing_is_given_up_if_vllm_recomputes(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    rig = rigs(2, 2, policy=policy)
    rig.write()
    teach(rig, token_s=1.0, block_s=0.001)
    assert rig.find("r") == 4 * BLOCK_TOKENS
    loads = rig.scheduler._rank_manager.loads
    loads._clock = clock = Clock()
    monkeypatch.setattr(rig.workers[1]._rank_worker._transfers._guard.tier, "submit_load", lambda job: None)
    rig.begin_load(rig.asked, [10, 11, 12, 13], 4 * BLOCK_TOKENS)
    rig.step()
    clock.advance(3 * 4 * BLOCK_TOKENS)
    for _ in range(10):
        rig.step()
    if policy == "fail":
        assert not rig.loaded
        return
    wait_for(lambda: rig.step() or rig.loaded)
    assert rig.invalid == {10, 11, 12, 13}
    assert decided(rig)["behind"] == 1
    assert not rig.scheduler._rank_manager._blocks._doubted  # its blocks are not lost


def test_load_that_is_late_before_its_step_reaches_the_ranks_is_given_up(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(2, 2)
    rig.write()
    teach(rig, token_s=1.0, block_s=0.001)
    loads = rig.scheduler._rank_manager.loads
    loads._clock = clock = Clock()
    assert rig.find("r") == 4 * BLOCK_TOKENS
    for worker in rig.workers:
        monkeypatch.setattr(worker._rank_worker._transfers._guard.tier, "submit_load", lambda job: None)
    rig.begin_load(rig.asked, [10, 11, 12, 13], 4 * BLOCK_TOKENS)
    clock.advance(3 * 4 * BLOCK_TOKENS)
    for _ in range(3):
        rig.step()
    assert rig.loaded == {"r"}
    assert rig.invalid == {10, 11, 12, 13}


def test_wait_for_another_requests_load_does_not_count_as_time_of_lookups(rigs: Any) -> None:
    rig = rigs(2, 2)
    rig.write()
    loads = rig.scheduler._rank_manager.loads
    loads._clock = clock = Clock()
    assert rig.find("first") == 4 * BLOCK_TOKENS
    before = loads.decisions.ways[0].lookup_s
    rig.begin_load(rig.asked, [10, 11, 12, 13], 4 * BLOCK_TOKENS)
    second = rig.request("second")
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    clock.advance(5.0)
    wait_for(lambda: rig.step() or rig.loaded)
    assert rig.matched(second) == 4 * BLOCK_TOKENS
    assert loads.decisions.ways[0].lookup_s == before


def test_time_of_lookups_ends_with_the_answer_even_if_vllm_asks_later(rigs: Any) -> None:
    rigs(2, 2).write()
    rig = rigs(2, 2)
    manager = rig.scheduler._rank_manager
    manager.loads._clock = clock = Clock()
    request = rig.request("r")
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.advance(0.5)
    wait_for(lambda: rig.step() or not list(manager.open_lookups))
    clock.advance(5.0)
    assert rig.matched(request) == 4 * BLOCK_TOKENS
    assert manager.loads.decisions.ways[0].lookup_s == 0.5


def test_load_never_loads_nothing_and_copies_nothing_that_is_stored(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rigs(2, 2).write()
    rig = rigs(2, 2, extra={"load": "never"})
    for worker in rig.workers:
        monkeypatch.setattr(worker._rank_worker._transfers, "store", Mock(side_effect=AssertionError))
    rig.write("r")
    assert decided(rig) == {"never": 1}


# ---- the engine's options --------------------------------------------------------------------------------------------


def test_producer_only_stores_and_consumer_only_loads(rigs: Any, tmp_path: Path) -> None:
    producer = rigs(kv_role="kv_producer")
    producer.write()
    assert producer.find("again") == 0
    consumer = rigs(kv_role="kv_consumer")
    assert consumer.find("r") == 4 * BLOCK_TOKENS
    assert consumer.read([10, 11, 12, 13]) == (set(), set())
    other = consumer.request("other", TOKENS[1:])
    consumer.matched(other)
    consumer.store(other)
    assert len(files_of(tmp_path)) == 4


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_producer"])
def test_all_blocks_lost_by_storage_are_stored_again_by_the_next_request(
    rigs: Any, tmp_path: Path, kv_role: str
) -> None:
    rig = rigs(2, 2, kv_role=kv_role)
    rig.write()
    rig.step({"w": ([], 0)}, finished={"w"})
    for path in files_of(tmp_path):
        path.unlink()
    known = rig.scheduler._rank_manager._blocks
    known._clock = lambda: time.monotonic() + BELIEVED_S
    rig.scheduler._rank_manager._guard.tier._lookup.forget(list(known._present))  # the tier's own answers expire, too
    rig.write("later")
    assert len(files_of(tmp_path)) == 8


def test_producer_does_not_copy_blocks_stored_by_another_engine(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rigs(2, 2, kv_role="kv_producer").write()
    stores: list[int] = []
    monkeypatch.setattr(RankTransfers, "store", lambda _, job, keys, source: stores.append(len(keys)))
    other = rigs(2, 2, kv_role="kv_producer")
    assert other.find("there") == 0
    other.store(other.asked)
    assert stores == []


def test_read_only_storage_is_read_and_its_bad_block_is_kept(rigs: Any, tmp_path: Path) -> None:
    rig = rigs()
    rig.write()
    damage(files_of(tmp_path)[0])
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    reader = rigs(extra={"read_only": True})
    assert reader.find("r") == 4 * BLOCK_TOKENS
    assert 13 in reader.read([10, 11, 12, 13])[0]
    reader.store(reader.asked, [10, 11, 12, 13])
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


def test_protected_blocks_are_read_with_their_key_only(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography", reason="aes-gcm needs cryptography: pip install '.[crypto]'")
    monkeypatch.setenv("KV_KEYS", "11" * 32)
    options = {"type": "fs", "root_dir": str(tmp_path / "safe"), "min_free": 0, **PATIENT}
    protected = {"tier": {**options, "encrypt": "aes-gcm", "keys_env": "KV_KEYS"}}
    rig = rigs(extra=protected)
    rig.write()
    plain = rig.kv[0][0][IDS[0]].numpy().tobytes()
    assert not any(plain[:64] in path.read_bytes() for path in files_of(tmp_path))
    again = rigs(extra=protected)
    assert again.find("r") == 4 * BLOCK_TOKENS
    assert again.read([10, 11, 12, 13]) == (set(), set())
    assert rigs(extra={"tier": options}).find("r") == 0


def test_blocks_of_a_chunk_are_stored_as_one_block(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(extra={"blocks_per_chunk": 2})
    rig.write()
    assert len(files_of(tmp_path)) == 2
    again = rigs(extra={"blocks_per_chunk": 2})
    assert again.find("r") == 4 * BLOCK_TOKENS
    assert again.read([10, 11, 12, 13]) == (set(), set())
    assert all(again.equal(source, target) for source, target in zip(IDS, (10, 11, 12, 13), strict=True))


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"max_load_tokens": 2 * BLOCK_TOKENS + 3}, 2 * BLOCK_TOKENS),
        ({"kv_load_tiers": [{"medium": "CPU"}]}, 0),
        ({"kv_load_tiers": [{"medium": "STORAGE", "locality": "REMOTE"}]}, 0),
        ({"kv_load_tiers": [{"medium": "STORAGE", "locality": "LOCAL"}]}, 4 * BLOCK_TOKENS),
    ],
)
def test_limits_of_a_request_apply_to_its_load(rigs: Any, params: dict[str, Any], tokens: int) -> None:
    if "max_load_tokens" in params and (versions.release() or (0, 31)) < (0, 31):
        pytest.skip("this vLLM has no max_load_tokens")
    rig = rigs()
    rig.write()
    assert rig.find("r", params=params) == tokens


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_consumer"])
def test_prefix_found_in_gpu_cache_gets_a_new_time_on_storage(rigs: Any, tmp_path: Path, kv_role: str) -> None:
    rigs(2, 2).write()
    for path in files_of(tmp_path):
        os.utime(path, (0, 0))
    rig = rigs(2, 2, kv_role=kv_role, extra={"max_bytes": "1GiB"})
    assert rig.find("r") == 4 * BLOCK_TOKENS
    rig.matched(rig.request("hit"), 4 * BLOCK_TOKENS)
    assert not any(path.stat().st_mtime for path in files_of(tmp_path))
    rig.step({"hit": (IDS, len(TOKENS))})
    wait_for(lambda: rig.step() or all(path.stat().st_mtime for path in files_of(tmp_path)))


def test_max_offload_tokens_limits_store_of_a_request(rigs: Any, tmp_path: Path) -> None:
    rig = rigs()
    rig.write(params={"max_offload_tokens": 2 * BLOCK_TOKENS + 3})
    assert len(files_of(tmp_path)) == 2


def test_waiting_request_is_looked_up_again_only_after_an_answer_of_the_tier(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs()
    tier = rig.scheduler._rank_manager._guard.tier
    asked: list[Any] = []
    lookup = tier.lookup

    def spied(key: Any, context: Any) -> Any:
        asked.append(key)
        return lookup(key, context)

    monkeypatch.setattr(tier, "lookup", spied)
    monkeypatch.setattr(tier, "take_answered", dict)  # it has answered nothing
    request = rig.request("r")
    for _ in range(3):
        assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        rig.step()
    assert len(asked) == 4
    monkeypatch.setattr(tier, "take_answered", lambda: None)  # anything may be answered
    assert rig.matched(request) == 0


def test_stored_blocks_are_not_copied_again(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    rig.write()
    stores: list[int] = []
    monkeypatch.setattr(RankTransfers, "store", lambda _, job, keys, source: stores.append(len(keys)))
    rig.step({"w": ([], 0)}, finished={"w"})
    request = rig.request("same")  # whose blocks are in the GPU's cache
    rig.matched(request, 4 * BLOCK_TOKENS)
    rig.step({"same": (IDS, len(TOKENS))})
    rig.step()
    assert stores == []


def test_blocks_of_preempted_request_are_copied_before_their_reuse(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    rig.matched(request := rig.request("w"))
    tier = rig.workers[0]._rank_worker._transfers._guard.tier
    held: list[Any] = []
    monkeypatch.setattr(tier, "submit_store", held.append)  # the storage hangs
    rig.step({"w": (IDS, len(TOKENS))})
    rig.step(preempted={"w"})
    before = [layer[IDS].clone() for layer in rig.kv[0]]
    for layer in rig.kv[0]:
        layer[IDS] = 0
    wait_for(lambda: rig.step() or held)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)  # it does not wait for the storage
    monkeypatch.undo()
    StoreTierManager.submit_store(tier, held[0])
    rig.settle()
    assert rig.find("r") == 4 * BLOCK_TOKENS
    assert rig.read([10, 11, 12, 13]) == (set(), set())
    for layer, old in zip(rig.kv[0], before, strict=True):
        assert bool((layer[[10, 11, 12, 13]] == old).all())


def test_storage_is_not_used_after_a_reset_by_default(rigs: Any, tmp_path: Path) -> None:
    rig = rigs()
    rig.write()
    rig.scheduler.reset_cache()
    assert rig.find("r") == 0
    rig.matched(other := rig.request("other", TOKENS[1:]))
    rig.store(other)
    assert len(files_of(tmp_path)) == 4


def test_storage_is_used_after_a_reset_if_storage_after_reset_is_keep(rigs: Any) -> None:
    rig = rigs(extra={"storage_after_reset": "keep"})
    rig.write()
    rig.scheduler.reset_cache()
    assert rig.find("r") == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("storage_after_reset", ["off", "keep"])
def test_store_running_during_a_reset_is_dropped(rigs: Any, tmp_path: Path, storage_after_reset: str) -> None:
    rig = rigs(2, 2, extra={"storage_after_reset": storage_after_reset})
    rig.matched(request := rig.request("w"))
    request.num_computed_tokens = 0
    rig.step({"w": (IDS, len(TOKENS))})  # vLLM's workers have queued the store
    rig.scheduler.reset_cache()
    for tensors in rig.kv:
        for layer in tensors:
            layer.zero_()  # as by a sleep, or by a request that got these blocks
    rig.step()
    rig.settle()
    assert files_of(tmp_path) == []
    again = rigs(2, 2)
    assert again.find("r") == 0
    again.store(again.asked)
    assert len(files_of(tmp_path)) == 8


def test_prompt_computed_again_after_a_reset_is_stored_if_storage_is_kept(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(extra={"storage_after_reset": "keep"})
    rig.matched(request := rig.request("w"))
    request.num_computed_tokens = 0
    rig.step({"w": (IDS, len(TOKENS))})
    rig.scheduler.reset_cache()
    rig.step()
    rig.settle()
    rig.write("later")
    assert len(files_of(tmp_path)) == 4


def test_load_running_during_a_reset_fails(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    rig.write()
    request = rig.request("r")
    assert rig.matched(request) == 4 * BLOCK_TOKENS
    tier = rig.workers[0]._rank_worker._transfers._guard.tier
    held: list[Any] = []
    monkeypatch.setattr(tier, "submit_load", held.append)
    blocks = [SimpleNamespace(block_id=each, block_hash=None, is_null=False) for each in (10, 11, 12, 13)]
    rig.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=(blocks,)), 4 * BLOCK_TOKENS)
    rig.step()
    rig.scheduler.reset_cache()
    monkeypatch.undo()
    StoreTierManager.submit_load(tier, held[0])
    before = [layer[10].clone() for layer in rig.kv[0]]
    rig.loaded, rig.invalid = set(), set()
    wait_for(lambda: rig.step() or "r" in rig.loaded)
    assert rig.invalid == {10, 11, 12, 13}
    wait_for(lambda: rig.step() or not rig.workers[0]._rank_worker._transfers._in_tier)
    assert all(bool((layer[10] == old).all()) for layer, old in zip(rig.kv[0], before, strict=True))


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(100_000))
    return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(folder))


def stored_with(rig: Rig, lora: Any, req_id: str = "w") -> None:
    rig.matched(request := rig.request(req_id, lora_request=lora))
    rig.store(request)


def test_prompts_of_an_adapter_are_found_only_with_that_adapter(rigs: Any, adapter: Any) -> None:
    rig = rigs()
    stored_with(rig, adapter)
    assert rig.find("plain") == 0
    assert rig.find("same", lora_request=adapter) == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_with_changed_files_finds_no_blocks(rigs: Any, adapter: Any, file: str) -> None:
    stored_with(rigs(), adapter)
    path = Path(adapter.lora_path, file)
    path.write_bytes(path.read_bytes().replace(b"6", b"4").replace(b"\0", b"x"))
    rig = rigs()
    assert rig.find("r", lora_request=adapter) == 0


def test_adapter_changed_under_a_running_engine_is_neither_loaded_nor_stored(
    rigs: Any, adapter: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    stored_with(rig, adapter)
    path = Path(adapter.lora_path, "adapter_model.safetensors")
    before = path.read_bytes()
    for data in (b"x" * len(before), before):  # what the engine has cached is not known from here on
        path.write_bytes(data)
        stored_with(rig, adapter, f"r{data[0]}")
        assert rig.find(f"again{data[0]}", lora_request=adapter) == 0
    assert len(files_of(tmp_path)) == 4
    assert caplog.text.count("were changed") == 1


def test_adapter_changed_before_its_first_request_is_not_stored(rigs: Any, adapter: Any, tmp_path: Path) -> None:
    rig = rigs()  # may have loaded the first weights by now
    path = Path(adapter.lora_path, "adapter_model.safetensors")

    def write() -> int:
        path.write_bytes(b"x" * 100_000)
        return path.lstat().st_ctime_ns

    wait_for(lambda: write() > rig.scheduler._adapters.started_ns)
    stored_with(rig, adapter)
    assert files_of(tmp_path) == []


def test_scheduler_does_not_wait_for_files_of_an_adapter(
    rigs: Any, adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs()
    let_go = threading.Event()
    monkeypatch.setattr(rig.scheduler._adapters, "revision", lambda _: let_go.wait(120))
    request = rig.request("r", lora_request=adapter)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    monkeypatch.setattr(module, "ADAPTER_DEADLINE_S", -1.0)
    rig.scheduler.request_finished_all_groups(request, ([],))
    assert rig.scheduler._asked == {}  # nothing is kept of a request that was given up
    late = rig.request("late", lora_request=adapter)
    assert rig.matched(late) == 0
    rig.store(late)
    assert files_of(tmp_path) == []
    let_go.set()


def test_hung_adapter_files_delay_only_its_first_request_and_no_other_adapter(
    rigs: Any, adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(adapter.lora_path, tmp_path / "other")
    other = SimpleNamespace(lora_name="b", lora_int_id=2, lora_path=str(tmp_path / "other"))
    rig = rigs()
    clock, let_go, revision = Clock(), threading.Event(), rig.scheduler._adapters.revision
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))

    def read(lora: Any) -> str | None:
        if lora is adapter:
            let_go.wait(120)
        return str(revision(lora))

    monkeypatch.setattr(rig.scheduler._adapters, "revision", read)
    first = rig.request("first", lora_request=adapter)
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (None, False)
    clock.advance(module.ADAPTER_DEADLINE_S)
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    for number in range(20):
        later = rig.request(f"later{number}", lora_request=adapter)
        assert rig.scheduler.get_num_new_matched_tokens(later, 0) == (0, False)
    wait_for(lambda: not rig.scheduler._adapter_pool._waiting)  # one read of these files waits for them, not 21
    stored_with(rig, other)
    assert rig.find("same", lora_request=other) == 4 * BLOCK_TOKENS
    let_go.set()


# ---- identity --------------------------------------------------------------------------------------------------------


def test_worker_with_config_changed_by_the_model_stores_for_its_scheduler(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter("aabbccdd")  # of each process
    monkeypatch.setattr(translate, "kv_revision", lambda _: f"commit+config:{next(digests) * 24}")
    monkeypatch.setattr(translate, "identity_digest", lambda _: None)
    rig = rigs()
    rig.write()
    assert rig.find("r") == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("changed", ["config", "engine", "commit"])
def test_engine_with_other_options_or_weights_finds_no_blocks(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    parts = {"commit": "one", "config": f"config:{'a' * 24}", "engine": f"engine:{'a' * 24}"}
    monkeypatch.setattr(translate, "kv_revision", lambda _: "+".join(parts.values()))
    monkeypatch.setattr(translate, "identity_digest", lambda _: None)
    rig = rigs()
    rig.write()
    assert rigs().find("r") == 4 * BLOCK_TOKENS
    parts[changed] = "two" if changed == "commit" else f"{changed}:{'b' * 24}"
    assert rigs().find("r") == 0


def test_prompt_computed_before_weights_are_reported_is_stored_by_the_next_step(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(2, 2)
    request = rig.request("w")
    request.num_computed_tokens = 0
    rig.step({"w": (IDS, len(TOKENS))})
    rig.settle()
    assert files_of(tmp_path) == []
    request.num_computed_tokens = len(TOKENS)
    rig.step({"w": ([], 1)})
    rig.settle()
    assert len(files_of(tmp_path)) == 8


def test_nothing_is_stored_until_each_rank_has_reported_its_weights(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(2, 2)
    first, second = (worker._rank_worker for worker in rig.workers)
    told, second._revisions = second._revisions, {}
    again = dict(first._revisions)
    rig.step()
    first._revisions = again  # a second report of the first rank does not count for the second rank
    request = rig.request("w")
    request.num_computed_tokens = 0
    rig.step({"w": (IDS, len(TOKENS))})
    request.num_computed_tokens = len(TOKENS)
    rig.step({"w": ([], 1)})
    rig.settle()
    assert files_of(tmp_path) == []
    second._revisions = told
    rig.step()
    rig.step({"w": ([], 1)})
    rig.settle()
    assert len(files_of(tmp_path)) == 8


def test_engine_with_other_weights_in_a_worker_warns_and_neither_loads_nor_stores(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    revisions = iter(["one", "one", "one", "one", "two", "one"])  # of each process: two ranks and a scheduler
    monkeypatch.setattr(translate, "kv_revision", lambda _: next(revisions))
    rigs(2, 2).write()
    before = files_of(tmp_path)
    rig = rigs(2, 2)
    other = rig.request("other", TOKENS[1:])
    other.num_computed_tokens = 0
    rig.step({"other": (IDS, len(TOKENS))})  # before the scheduler has heard of any rank
    rig.settle()
    rig.write("later", TOKENS[2:])
    assert rig.find("r") == 0
    assert files_of(tmp_path) == before
    assert caplog.text.count("are not those that the scheduler sees") == 1


def test_stages_of_a_pipeline_store_and_find_their_own_layers(rigs: Any) -> None:
    rigs(2, pp_size=2, tp_size=1).write()
    again = rigs(2, pp_size=2, tp_size=1)
    assert again.find("r") == 4 * BLOCK_TOKENS
    assert again.read([10, 11, 12, 13]) == (set(), set())
    assert all(again.equal(source, target) for source, target in zip(IDS, (10, 11, 12, 13), strict=True))


def test_engine_with_another_tp_size_finds_no_blocks(rigs: Any) -> None:
    rig = rigs(2, 1)
    rig.write()
    assert rigs().find("r") == 0


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["dcp_size", "pcp_size"])
def test_context_parallel_engine_is_refused(rigs: Any, size: str) -> None:
    with pytest.raises(ConfigError, match="context_parallel_size: SharedStorageConnector accepts only 1"):
        rigs(2, **{size: 2})


def test_external_launcher_is_refused(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="distributed_executor_backend: external_launcher"):
        rigs(2, executor="external_launcher")


@pytest.mark.skipif("non_causal" not in FullAttentionSpec.__dataclass_fields__, reason="this vLLM has no prefix LM")
def test_model_with_non_causal_attention_is_refused(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="not causal"):
        rigs(kinds=(dataclasses.replace(FULL, non_causal=True),))


@pytest.mark.parametrize("model", [TWO_GROUPS, ONE_OF_TWO], ids=["both offloaded", "one offloaded"])
def test_model_of_two_groups_is_refused_if_vllm_accepts_no_failed_requests(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    with pytest.raises(ConfigError, match="kv_connector: the model has 2 KV cache groups"):
        rigs(**model)


def test_chunks_of_several_blocks_are_refused_for_model_with_windows(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="blocks_per_chunk: is 2"):
        rigs(kinds=(FULL, SLIDING), groups=groups(2), extra={"blocks_per_chunk": 2})


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"max_byte": "1GiB"}, "max_byte"),
        ({"tier": {"type": "memory"}}, "tier.type"),
        ({"tier": {"type": "fsspec", "url": "simplecache::memory://kv"}}, "tier.url"),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 4096}, "cpu_bytes_to_use"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"load_deadline_s": 0}, "load_deadline_s"),
        ({"lookup_deadline_s": "soon"}, "lookup_deadline_s"),
        ({"kv_load_tiers": []}, "kv_load_tiers"),
        ({"storage_after_reset": "kep"}, "storage_after_reset"),
    ],
)
def test_wrong_option_is_refused_by_name(rigs: Any, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        rigs(extra=extra)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_of_vllm_endpoint_name_each_rank_and_the_scheduler(rigs: Any) -> None:
    registry = CollectorRegistry()
    types = {
        kind: lambda kind=kind, **options: kind(registry=registry, **options) for kind in (Counter, Gauge, Histogram)
    }
    rig = rigs(2, 2)
    extra = {"shared_storage_path": "/kv"}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    metrics = SharedStorageConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    theirs = {"cpu_bytes_to_use": 1 << 30, "tiers": [{"type": "fs", "root_dir": "/kv"}]}
    beside = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=theirs))
    KVTiersConnector.build_prom_metrics(beside, types, ["engine"], {0: ["0"]})  # in one MultiConnector
    rig.write()
    stats = rig.workers[0].get_kv_connector_stats().aggregate(rig.workers[1].get_kv_connector_stats())
    metrics.observe(stats.aggregate(rig.scheduler.get_kv_connector_stats()).data, 0)
    shown = generate_latest(registry).decode()
    for rank in (0, 1):
        assert f'vllm:kvtiers_blocks_total{{engine="0",op="store",outcome="moved",tier="fs_r{rank}"}} 4.0' in shown
    assert 'vllm:kvtiers_lookups_total{engine="0",result="miss",tier="fs"} ' in shown
