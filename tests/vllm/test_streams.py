"""Requests whose prompt comes in parts while they run (vLLM's streaming inputs, as its realtime API has them)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.request import Request

from kvtiers.connector.vllm.translate import hold_back_stream
from tests.vllm.engines import BLOCK_BYTES, BLOCK_TOKENS, FULL, kv_cache_config, offloading_config
from tests.waiting import wait_for

SPEC = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.vllm", "tiers": []}
TIER = {
    "spec_name": "TieringOffloadingSpec",
    "secondary_tiers": [{"type": "KVTiersTier", "module_path": "kvtiers.vllm", "tier": {"type": "memory"}}],
}
TABLE = [11, 12, 13, 14, 15]


def stored(scheduler: OffloadingConnectorScheduler, request: Request, blocks: int) -> dict[Any, int]:
    """What a step stores that has so many of the request's blocks, as its first one or after more input: key -> id."""
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {"stream": request.num_tokens - request.num_computed_tokens}
    new = SimpleNamespace(req_id="stream", block_ids=(TABLE[:blocks],), num_computed_tokens=request.num_computed_tokens)
    step.scheduled_new_reqs = [new]
    jobs = scheduler.build_connector_meta(step).store_jobs
    request.num_computed_tokens = request.num_tokens
    names = [make_offload_key(each, 0) for each in request.block_hashes]
    found: dict[Any, int] = {}
    for job_id, job in jobs.items():
        ordered = [name for name in names if name in scheduler._jobs[job_id].keys]
        found |= zip(ordered, map(int, job.src_spec.block_ids), strict=True)
    return found


@pytest.mark.parametrize("way", [SPEC, TIER], ids=["spec", "tier"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "plain"])
def test_blocks_of_streamed_prompt_are_stored_under_their_own_keys(way: dict[str, Any], is_stream: bool) -> None:
    init_none_hash(sha256)
    extra = {**way, "cpu_bytes_to_use": 16 * BLOCK_BYTES}
    config = offloading_config(extra, engine_id=f"pytest-{os.getpid()}-{way['spec_name']}-{is_stream}")
    own = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        speculative_config=None,
    )
    scheduler = OffloadingConnectorScheduler(OffloadingSpecFactory.create_spec(config), own, kv_cache_config(FULL))
    request = Request(
        "stream",
        list(range(2 * BLOCK_TOKENS + 1)),
        SamplingParams(max_tokens=99),
        None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        resumable=is_stream,
    )
    hold_back_stream(request)  # as KVTiersConnector does
    scheduler.on_new_request(request)

    def is_answered() -> bool:
        found, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.build_connector_meta(SchedulerOutput.make_empty())
        return bool(found == 0)

    wait_for(is_answered)
    places = stored(scheduler, request, 3)
    if is_stream:
        request.append_output_token_ids(list(range(2 * BLOCK_TOKENS)))
        request.num_prompt_tokens = request.num_tokens
        places |= stored(scheduler, request, 5)
    else:
        assert len(places) == 2
    right = dict(zip((make_offload_key(each, 0) for each in request.block_hashes), TABLE, strict=False))
    assert places.items() <= right.items()
    scheduler.shutdown()
