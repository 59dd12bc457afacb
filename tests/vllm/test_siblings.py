"""Connectors beside ours in vLLM's MultiConnector, whose loads may fail within a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.vllm import siblings, translate
from connector.vllm.shared_storage import SharedStorageConnector
from connector.vllm.tier import KVTiersTier
from tests.vllm.engines import BLOCK_BYTES, BLOCK_TOKENS, FULL, kv_cache_config, kv_caches, offloading_config
from tests.waiting import wait_for
from tiers.errors import ConfigError

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
OURS = {"kv_connector": "OffloadingConnector"}
PREFIXES = {"kv_connector": "SharedStorageConnector", "kv_connector_module_path": "connector.vllm.shared_storage"}
MAKES_UP = {"kv_connector": "DecodeBenchConnector"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1"}
BLOCKS = 4


class VllmConfig(SimpleNamespace):
    """Has the name that is looked for."""


def beside(*others: dict[str, Any]) -> VllmConfig:
    """The config of a MultiConnector; what is built beside a variable ``vllm_config`` with it sees it."""
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [*others, OURS]}}
    return VllmConfig(kv_transfer_config=SimpleNamespace(**transfer))


@pytest.fixture(autouse=True)
def no_config_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "find_vllm_config", lambda: None)


def tier_of(vllm_config: Any) -> KVTiersTier:
    """Made while a connector with this config is under construction."""
    assert vllm_config is not None
    spec = SimpleNamespace(config=offloading_config(), blocks_per_chunk=1)
    return KVTiersTier(spec, memoryview(bytearray(4096)).cast("B", (1, 4096)), "x", tier={"type": "memory"})


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (LMCACHE, "LMCacheConnectorV1"),
        ({"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": {"load_async": False}}, "Mooncake"),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "elsewhere"}, "NixlConnector"),
    ],
)
def test_way_tier_refuses_a_connector_beside_it_that_may_load_within_a_step(other: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"connectors: {named}.*SharedStorageConnector.*KVTiersSpec"):
        tier_of(beside(PREFIXES, other))


def test_way_tier_takes_connectors_beside_it_that_load_between_steps() -> None:
    others = ({"kv_connector": name} for name in ("NixlConnector", "LMCacheMPConnector", "MooncakeStoreConnector"))
    tier_of(beside(PREFIXES, *others)).shutdown()
    alone = VllmConfig(kv_transfer_config=SimpleNamespace(**OURS))
    tier_of(alone).shutdown()


def test_a_connector_that_makes_kv_up_is_refused_beside_ours(tmp_path: Path) -> None:
    vllm_config = beside(PREFIXES, MAKES_UP)
    with pytest.raises(ConfigError, match="DecodeBenchConnector"):
        tier_of(vllm_config)
    with pytest.raises(ConfigError, match="DecodeBenchConnector"):
        scheduler_of(vllm_config, spec_on(tmp_path, "refused"))
    with pytest.raises(ConfigError, match="DecodeBenchConnector"):
        SharedStorageConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config(FULL))


SEEN: list[list[str]] = []


class Probe(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Stands for ours inside vLLM's MultiConnector, which makes it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        SEEN.append(siblings.loading_within_steps())

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None


def several(*connectors: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


PROBE = {"kv_connector": "Probe", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
FILES = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (several(several(PROBE), FILES), ["ExampleConnector", "Probe"]),
        (several(FILES, several(several(PROBE))), ["ExampleConnector", "Probe"]),
        (several(several(FILES), PROBE), ["ExampleConnector", "Probe"]),
        (several(several({**OURS, "kv_role": "kv_both"}), PROBE), ["Probe"]),
    ],
)
def test_a_multiconnector_in_another_hides_no_connector(
    engine: dict[str, Any], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("example_connector.ExampleConnector", "offloading_connector.OffloadingConnector"):
        monkeypatch.setattr(f"{V1}.{name}.__init__", lambda *_: None)
    SEEN.clear()
    vllm_config = VllmConfig(
        kv_transfer_config=KVTransferConfig(**engine),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    MultiConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config(FULL))
    assert [sorted(each) for each in SEEN] == [named]


class Request(SimpleNamespace):
    """One of vLLM's, whose prompt is some blocks and a token."""

    def is_finished(self) -> bool:
        return bool(RequestStatus.is_finished(self.status))


def spec_on(root: Path, engine_id: str) -> Any:
    config = {
        "spec_name": "KVTiersSpec",
        "spec_module_path": "connector.vllm.spec",
        "cpu_bytes_to_use": 16 * BLOCK_BYTES,
        "tiers": [{"type": "fs", "root_dir": str(root), "min_free": 0}],
    }
    return OffloadingSpecFactory.create_spec(offloading_config(config, engine_id=engine_id))


def scheduler_of(vllm_config: Any, spec: Any) -> OffloadingConnectorScheduler:
    """Made while a connector with this config is under construction."""
    assert vllm_config is not None
    own = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        speculative_config=None,
    )
    return OffloadingConnectorScheduler(spec, own, kv_cache_config(FULL))


class Engine:
    """vLLM's scheduler side over our manager, with LMCache beside it; one step is under way at once."""

    def __init__(self, root: Path) -> None:
        engine_id = f"pytest-{os.getpid()}-{id(self)}"
        self.worker = spec_on(root, engine_id).get_worker(kv_caches(32)[1])
        self.scheduler = scheduler_of(beside(LMCACHE), spec_on(root, engine_id))
        self.requests = 0

    def ask(self, req_id: str, like: Request | None = None, *, on_gpu: int = 0, stored: int = 0) -> Request:
        """A request with the prompt of another or one of its own. ``on_gpu``: blocks that it has of that one;
        ``stored``: blocks behind them that storage has, and that it has loaded.
        """
        self.requests += 1
        block_ids = [10 * self.requests + block for block in range(BLOCKS + 1)]
        if like is not None:
            block_ids[:on_gpu] = like.block_ids[:on_gpu]
        request = Request(
            request_id=req_id,
            kv_transfer_params=None,
            kv_hints=None,
            block_hashes=[bytes([self.requests, block]) * 16 for block in range(BLOCKS)],
            num_tokens=BLOCKS * BLOCK_TOKENS + 1,
            num_prompt_tokens=BLOCKS * BLOCK_TOKENS + 1,
            num_computed_tokens=(on_gpu + stored) * BLOCK_TOKENS,
            block_ids=block_ids,
            skip_reading_prefix_cache=False,
            shared_prefix_boundary=None,
            status=RequestStatus.RUNNING,
        )
        if like is not None:
            request.block_hashes = like.block_hashes
        self.scheduler.on_new_request(request)

        def is_answered() -> bool:
            found, _ = self.scheduler.get_num_new_matched_tokens(request, on_gpu * BLOCK_TOKENS)
            if not found:
                self.step()
            return bool(found == stored * BLOCK_TOKENS)

        wait_for(is_answered)
        if stored:
            blocks = [KVCacheBlock(block_id) for block_id in block_ids]
            self.scheduler.update_state_after_alloc(request, KVCacheBlocks((blocks,)), stored * BLOCK_TOKENS)
            self.step()
            self.complete()
        return request

    def complete(self) -> None:
        """Workers have loaded and stored what there was to do."""
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(self.scheduler._jobs, 1))
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

    def step(self, *, new: Any = (), again: Any = (), loads: bool = False, ended: Any = ()) -> dict[str, int]:
        """What a step stores: request -> blocks."""
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens = {
            each.request_id: each.num_tokens - each.num_computed_tokens for each in (*new, *again)
        }
        step.scheduled_new_reqs = [
            SimpleNamespace(
                req_id=each.request_id,
                block_ids=(each.block_ids,),
                num_computed_tokens=each.num_computed_tokens,
            )
            for each in new
        ]
        step.finished_req_ids = {each.request_id for each in ended}
        step.has_sync_kv_loads = loads
        jobs = self.scheduler.build_connector_meta(step).store_jobs.values()
        return {job.req_id: len(job.src_spec.block_ids) for job in jobs}

    def load_failed(self) -> None:
        """vLLM hears of it, and asks for what there is to count."""
        kv_connector_output = KVConnectorOutput(invalid_block_ids={1})
        self.scheduler.get_stats()
        assert kv_connector_output

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(translate, "steps_max", lambda *_: 1)
    made = Engine(tmp_path)
    yield made
    made.close()


def test_way_spec_stores_what_stands_on_a_siblings_load_once_it_is_known_to_have_come(engine: Engine) -> None:
    loads, shares = engine.ask("loads"), engine.ask("shares")
    loads.num_computed_tokens = 2 * BLOCK_TOKENS
    assert engine.step(new=[loads, shares], loads=True) == {}
    loads.num_computed_tokens = 0  # it had not come: vLLM has it computed again
    assert engine.step(again=[loads, shares]) == {"loads": BLOCKS, "shares": BLOCKS}


def test_way_spec_stores_nothing_of_a_request_that_ends_with_a_siblings_load(engine: Engine) -> None:
    earlier, loads = engine.ask("earlier"), engine.ask("loads")
    assert engine.step(new=[earlier]) == {"earlier": BLOCKS}
    loads.num_computed_tokens = 2 * BLOCK_TOKENS
    assert engine.step(new=[loads], loads=True) == {}
    loads.status = RequestStatus.FINISHED_ERROR  # as kv_load_failure_policy says, where it has not come
    engine.load_failed()
    assert engine.step(ended=[loads]) == {}
    last = engine.ask("last")
    assert engine.step(new=[last]) == {"last": BLOCKS}


def test_way_spec_stores_what_was_computed_before_the_step_of_a_siblings_load(engine: Engine) -> None:
    ends, loads = engine.ask("ends"), engine.ask("loads")
    ends.num_tokens = BLOCKS * BLOCK_TOKENS - 1
    assert engine.step(new=[ends]) == {"ends": BLOCKS - 1}
    ends.num_tokens = BLOCKS * BLOCK_TOKENS + 1
    ends.status = RequestStatus.FINISHED_STOPPED
    assert engine.step(new=[loads], loads=True, ended=[ends]) == {"ends": 1}


def test_way_spec_stores_nothing_that_stands_on_a_failed_load_of_a_request_that_was_aborted(engine: Engine) -> None:
    loads = engine.ask("loads")
    loads.num_computed_tokens = 2 * BLOCK_TOKENS
    assert engine.step(new=[loads], loads=True) == {}
    loads.status = RequestStatus.FINISHED_ABORTED  # so vLLM keeps its blocks as good
    engine.load_failed()
    assert engine.step(ended=[loads]) == {}
    finds = engine.ask("finds", like=loads, on_gpu=BLOCKS)
    assert engine.step(new=[finds]) == {}
    assert engine.step(again=[finds]) == {}
    computes = engine.ask("computes", like=loads)
    assert engine.step(new=[computes]) == {"computes": BLOCKS}
    engine.complete()
    longer = engine.ask("longer", like=computes, on_gpu=BLOCKS)
    longer.block_hashes = [*computes.block_hashes, bytes(32)]
    longer.num_tokens = longer.num_prompt_tokens = (BLOCKS + 1) * BLOCK_TOKENS
    assert engine.step(new=[longer]) == {"longer": 1}


def test_way_spec_stores_nothing_that_stands_on_a_failed_load_though_it_loaded_what_is_behind(engine: Engine) -> None:
    """Of such a request vLLM offers what comes after its own load."""
    loads = engine.ask("loads")
    writes = engine.ask("writes", like=loads)
    writes.num_tokens -= BLOCK_TOKENS
    assert engine.step(new=[writes]) == {"writes": BLOCKS - 1}
    engine.complete()
    loads.num_computed_tokens = BLOCK_TOKENS
    loads.num_tokens -= (BLOCKS - 2) * BLOCK_TOKENS
    assert engine.step(new=[loads], loads=True) == {}
    loads.status = RequestStatus.FINISHED_ABORTED
    engine.load_failed()
    finds = engine.ask("finds", like=loads, on_gpu=2, stored=1)
    assert engine.step(new=[finds], ended=[loads]) == {}


def test_way_spec_stores_what_stands_on_blocks_that_the_gpu_had_before_a_failed_load(engine: Engine) -> None:
    """Most prompts of a server begin alike."""
    begins = engine.ask("begins")
    begins.num_tokens = 2 * BLOCK_TOKENS + 1
    assert engine.step(new=[begins]) == {"begins": 2}
    engine.complete()
    loads = engine.ask("loads", like=begins, on_gpu=2)
    loads.num_computed_tokens = (BLOCKS - 1) * BLOCK_TOKENS
    assert engine.step(new=[loads], loads=True) == {}
    loads.status = RequestStatus.FINISHED_ABORTED
    engine.load_failed()
    shares = engine.ask("shares", like=begins, on_gpu=2)
    assert engine.step(new=[shares], ended=[loads]) == {"shares": BLOCKS - 2}


def test_way_spec_stores_nothing_more_of_the_requests_of_a_step_whose_load_failed(engine: Engine) -> None:
    loads, other = engine.ask("loads"), engine.ask("other")
    assert engine.step(new=[loads, other], loads=True) == {}
    engine.load_failed()
    assert engine.step(again=[loads, other]) == {}
    last = engine.ask("last")
    assert engine.step(new=[last]) == {"last": BLOCKS}


def test_a_request_that_was_aborted_spoils_none_that_has_its_id_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "steps_max", lambda *_: 2)
    engine = Engine(tmp_path)
    loads = engine.ask("loads")
    loads.num_computed_tokens = 2 * BLOCK_TOKENS
    assert engine.step(new=[loads], loads=True) == {}
    loads.status = RequestStatus.FINISHED_ABORTED
    assert engine.step(ended=[loads]) == {}
    engine.load_failed()
    again = engine.ask("loads")
    engine.step()
    assert engine.step(new=[again]) == {"loads": BLOCKS}
    engine.close()


def test_a_block_of_a_failed_load_is_good_again_when_it_holds_another() -> None:
    untrusted = siblings.Untrusted(steps_max=2)
    untrusted.note([(1, b"1")])
    untrusted.begin_step()
    untrusted.note([(2, b"2")])
    assert not untrusted.has_any([(1, b"1"), (2, b"2")])
    untrusted.load_failed()
    assert untrusted.has_any([(1, b"1")])
    assert untrusted.has_any([(2, b"2")])
    assert not untrusted.has_any([(1, b"2"), (2, b"1"), (3, b"1")])


def test_way_spec_refuses_such_a_connector_where_vllm_does_not_say_which_steps_have_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "STEPS_SAY_SO", False)
    with pytest.raises(ConfigError, match=r"LMCacheConnectorV1.*0\.29"):
        scheduler_of(beside(LMCACHE), spec_on(tmp_path, "refused"))
