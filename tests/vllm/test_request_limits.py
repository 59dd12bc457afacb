"""What a request asks for in its ``kv_transfer_params``, honored by vLLM's own scheduler over our spec and our tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.request import Request

from kvtiers.connector.vllm import versions
from tests.vllm.engines import BLOCK_BYTES, BLOCK_TOKENS, FULL, kv_cache_config, kv_caches, offloading_config
from tests.waiting import wait_for

BLOCKS = 4
STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=[])
LIMITED_LOADS = pytest.mark.skipif((versions.release() or (0, 31)) < (0, 31), reason="this vLLM has no max_load_tokens")


def options_of(way: str) -> dict[str, Any]:
    if way == "spec":
        own = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.vllm", "storage_after_reset": "keep"}
        return {**own, "tiers": [{"type": "memory"}]}
    entry = {"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": {"type": "memory"}}
    return {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [entry]}


class Engine:
    """vLLM's scheduler side over one of our ways, with one tier in memory."""

    def __init__(self, way: str, engine_id: str) -> None:
        init_none_hash(sha256)
        extra = {**options_of(way), "cpu_bytes_to_use": 16 * BLOCK_BYTES}
        config = offloading_config(extra, engine_id=engine_id)
        own = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
            speculative_config=None,
        )
        worker = OffloadingSpecFactory.create_spec(config)
        self.worker = worker.get_worker(kv_caches(8)[1]) if way == "spec" else None  # vLLM's own takes no CPU
        self.scheduler = OffloadingConnectorScheduler(
            OffloadingSpecFactory.create_spec(config), own, kv_cache_config(FULL)
        )
        self.manager = self.scheduler.manager

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()

    def request(self, req_id: str, params: dict[str, Any] | None = None) -> Request:
        request = Request(
            req_id,
            list(range(BLOCKS * BLOCK_TOKENS + 1)),
            SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params}),
            None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.scheduler.on_new_request(request)
        return request

    def store(self, request: Request) -> None:
        """As if another request had stored the prompt, which now is on storage and not in the region."""
        context = ReqContext("writer")
        keys = [make_offload_key(each, 0) for each in request.block_hashes]
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(set(keys), context)
        self.manager.on_request_finished(context)
        wait_for(self.is_idle)
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # from 0.33 on nothing is loaded before it
            self.manager.on_reset_flushed()

    def is_idle(self) -> bool:
        self.manager.on_schedule_end(STEP)
        return not self.manager.has_pending_work()

    def found_tokens(self, request: Request) -> int:
        def answer() -> int | None:
            tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            self.scheduler.build_connector_meta(SchedulerOutput.make_empty())
            return None if tokens is None else tokens + 1  # 0 is an answer, too

        found = wait_for(answer)
        assert found is not None
        return found - 1

    def num_stored(self, request: Request) -> int:
        """Blocks that are stored of a step in which all of the prompt is computed."""
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens = {request.request_id: request.num_tokens}
        new = SimpleNamespace(req_id=request.request_id, block_ids=([*range(1, BLOCKS + 2)],), num_computed_tokens=0)
        step.scheduled_new_reqs = [new]
        jobs = self.scheduler.build_connector_meta(step).store_jobs
        return sum(len(job.src_spec.block_ids) for job in jobs.values())


@pytest.fixture(params=["spec", "tier"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(request.param, f"pytest-limits-{os.getpid()}-{request.param}")
    yield made
    made.shutdown()


@LIMITED_LOADS
@pytest.mark.parametrize(("limit", "blocks"), [(None, 4), (10**6, 4), (2 * BLOCK_TOKENS + 5, 2), (0, 0)])
def test_max_load_tokens_limits_load_of_a_request(engine: Engine, limit: int | None, blocks: int) -> None:
    request = engine.request("r", None if limit is None else {"max_load_tokens": limit})
    engine.store(request)
    assert engine.found_tokens(request) == blocks * BLOCK_TOKENS


@pytest.mark.parametrize(("limit", "blocks"), [(None, 4), (10**6, 4), (2 * BLOCK_TOKENS + 5, 2), (0, 0)])
def test_max_offload_tokens_limits_store_of_a_request(engine: Engine, limit: int | None, blocks: int) -> None:
    request = engine.request("r", None if limit is None else {"max_offload_tokens": limit})
    assert engine.found_tokens(request) == 0
    assert engine.num_stored(request) == blocks


@pytest.mark.parametrize(
    ("wanted", "blocks"), [(None, 4), ([{"locality": "local"}], 4), ([{"locality": "REMOTE"}], 0), ([], 0)]
)
def test_kv_load_tiers_limits_storage_used_for_a_request(engine: Engine, wanted: Any, blocks: int) -> None:
    request = engine.request("r", {"kv_load_tiers": wanted})
    engine.store(request)
    assert engine.found_tokens(request) == blocks * BLOCK_TOKENS
