"""DeploymentSpec: everything wired, from KV tensors through the region to a real tier and back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtiers.connector.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from kvtiers.connector.region.region_file import region_path
from kvtiers.connector.spec import DeploymentSpec
from kvtiers.connector.transfer.gpu_handler import create_handlers
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.config.deployment import HandlerConfig, parse_config
from kvtiers.tiers.errors import ConfigError, RegionError, StoreError
from tests.connector.core.scripted_tier import ScriptedTier
from tests.identity import CONFIG, block_key
from tests.waiting import PATIENT, wait_for

torch = pytest.importorskip("torch")

PAGE_BYTES = 3000  # no multiple of a memory page
BLOCKS_PER_CHUNK = 2
NUM_BLOCKS = 12
CELL_BYTES = 2 * PAGE_BYTES * BLOCKS_PER_CHUNK
ROW_BYTES = 12288
REQ = ReqContext("r")
KEYS = [block_key(number) for number in range(4)]

ENGINE_ID = f"test-spec-engine-{os.getpid()}"  # /dev/shm is the whole machine's
CHUNKED = dataclasses.replace(CONFIG, cache=dataclasses.replace(CONFIG.cache, blocks_per_chunk=BLOCKS_PER_CHUNK))


def deployment(*tiers: dict[str, Any], **region: Any) -> Any:
    return parse_config(
        {"blocks_per_chunk": BLOCKS_PER_CHUNK, "region": {"size": 8 * ROW_BYTES} | region, "tiers": list(tiers)}
    )


def kv_caches(seed: int) -> CanonicalKVCaches:
    """Two tensors of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 128, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8, generator=generator) for _ in range(2)
    ]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in tensors],
        [[CanonicalKVCacheRef(index, PAGE_BYTES) for index in range(2)]],
    )


class Worker:
    """The handlers of a spec, by direction."""

    def __init__(self, spec: DeploymentSpec, caches: CanonicalKVCaches) -> None:
        handlers = {(source, destination): handler for source, destination, handler in spec.get_handlers(caches)}
        self.store: OffloadingHandler = handlers[GPULoadStoreSpec, CPULoadStoreSpec]
        self.load: OffloadingHandler = handlers[CPULoadStoreSpec, GPULoadStoreSpec]

    @staticmethod
    def run(handler: OffloadingHandler, source: Any, destination: Any) -> None:
        assert handler.transfer_async(1, (source, destination))
        handler.wait([1])
        (result,) = handler.get_finished()
        assert result.success


def store(spec: DeploymentSpec, worker: Worker) -> None:
    """Store blocks 0..7 under the four keys, through to the tiers."""
    manager = spec.get_manager()
    output = manager.prepare_store(KEYS, REQ)
    assert output is not None
    worker.run(worker.store, GPULoadStoreSpec(range(8)), output.store_spec)
    manager.complete_store(KEYS)
    manager.drain()


def load(spec: DeploymentSpec, worker: Worker) -> None:
    """Load the four keys to blocks 4..11."""
    manager = spec.get_manager()
    wait_for(lambda: step(manager.lookup, manager.on_schedule_end) == [True] * 4)
    worker.run(worker.load, manager.prepare_load(KEYS, REQ), GPULoadStoreSpec(range(4, 12)))
    manager.complete_load(KEYS)
    manager.on_request_finished(REQ)


def step(lookup: Callable[[OffloadKey, ReqContext], bool | None], end: Callable[[], None]) -> list[bool | None]:
    answers = [lookup(key, REQ) for key in KEYS]
    end()
    return answers


@pytest.fixture
def has_ended() -> Callable[[], bool]:
    """Whether no thread of a memory tier is left that the test began. Other tests' may end late."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("kvtiers-memory")}

    before = threads()
    return lambda: threads() <= before


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DeploymentSpec]]:
    """Makes specs with an fs tier and shuts them down."""
    made: list[DeploymentSpec] = []

    def make_spec(region: dict[str, Any] | None = None, **kwargs: Any) -> DeploymentSpec:
        root = {"type": "fs", "root_dir": str(tmp_path), "min_free": 0, "isolation": "thread", **PATIENT}
        config = dataclasses.replace(CHUNKED, engine_id=ENGINE_ID)
        spec = DeploymentSpec(config, deployment(root, **(region or {})), CELL_BYTES, **kwargs)
        made.append(spec)
        return spec

    yield make_spec
    for spec in reversed(made):
        spec.shutdown()


def test_kv_stored_by_one_engine_is_loaded_by_another_from_disk(make: Callable[..., DeploymentSpec]) -> None:
    first = make()
    caches = kv_caches(1)
    store(first, Worker(first, caches))
    first.shutdown()
    second = make()
    other = kv_caches(2)
    load(second, Worker(second, other))
    for stored, loaded in zip(caches.tensors, other.tensors, strict=True):
        assert torch.equal(loaded.tensor[4:12], stored.tensor[:8])
    counted = second.metrics.value
    assert counted("kvtiers_blocks_total", "fs", "load", "moved") == 4
    assert second.get_manager().slots.counts().free == 4


def test_scheduler_and_worker_share_a_named_region(make: Callable[..., DeploymentSpec]) -> None:
    instance_id = f"test-spec-{os.getpid()}"
    region = {"instance_id": instance_id}
    scheduler = make(region, rank=None, in_process=False)
    worker_side = make(region, rank=0, in_process=False)
    assert not os.path.exists(region_path("/dev/shm", instance_id))
    caches = kv_caches(1)
    before = [entry.tensor.clone() for entry in caches.tensors]
    worker = Worker(worker_side, caches)
    store(scheduler, worker)
    load(scheduler, worker)
    for stored, entry in zip(before, caches.tensors, strict=True):
        assert torch.equal(entry.tensor[4:12], stored[:8])


def test_engine_id_names_the_region_if_config_names_none(make: Callable[..., DeploymentSpec]) -> None:
    make(rank=None, in_process=False)
    path = region_path("/dev/shm", ENGINE_ID)
    assert os.path.exists(path)
    with pytest.raises(RegionError, match="two configs for one region"):
        make({"size": 4 * ROW_BYTES}, rank=0, in_process=False)


def test_handlers_get_options_of_the_config(
    make: Callable[..., DeploymentSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def handlers(*args: Any, **options: Any) -> tuple[OffloadingHandler, OffloadingHandler]:
        given.update(options)
        return create_handlers(*args, **options)

    monkeypatch.setattr("kvtiers.connector.transfer.gpu_handler.create_handlers", handlers)
    spec = make()
    spec.deployment = spec.deployment.model_copy(update={"handler": HandlerConfig(method="copy", pin=False)})
    Worker(spec, kv_caches(1))
    assert given == {"method": "copy", "pin": False}


def test_region_has_as_many_rows_as_fit_in_its_size(make: Callable[..., DeploymentSpec]) -> None:
    spec = make({"size": 3 * ROW_BYTES - 1})
    assert (spec.region.geometry.num_blocks, spec.region.geometry.row_stride) == (2, ROW_BYTES)
    assert spec.get_manager().slots.num_blocks == 2


def test_manager_gets_eviction_policy_and_promotion_wait_of_the_config(make: Callable[..., DeploymentSpec]) -> None:
    """ARC keeps the block that was used twice where LRU takes the oldest; no wait means a miss at once."""
    spec = make({"size": 2 * ROW_BYTES, "eviction_policy": "arc", "promotion_wait_s": 0})
    manager = spec.get_manager()
    assert manager is spec.get_manager()
    for key in KEYS[:2]:
        manager.prepare_store([key], REQ)
        manager.complete_store([key])
        manager.touch(KEYS[:1])
        manager.drain()
    output = manager.prepare_store(KEYS[2:3], REQ)
    assert output is not None
    assert output.evicted_keys == (KEYS[1],)
    manager.complete_store(KEYS[2:3])
    manager.drain()
    manager.prepare_load([KEYS[0], KEYS[2]], REQ)  # nothing can be evicted now

    def is_a_miss() -> bool:
        answer = manager.lookup(KEYS[1], REQ)
        manager.on_schedule_end()
        return answer is False

    wait_for(is_a_miss)
    assert spec.metrics.value("kvtiers_promotion_room_expired_total") == 1


def test_load_deadline_of_a_tier_follows_its_job_deadline_s(tmp_path: Path) -> None:
    tiers = [
        {"type": "fs", "root_dir": str(tmp_path / str(deadline_s)), "isolation": "thread", "job_deadline_s": deadline_s}
        for deadline_s in (5, 60)
    ]
    spec = DeploymentSpec(CHUNKED, deployment(*tiers), CELL_BYTES)
    assert [share.deadline_s for share in spec.get_manager()._loads.shares] == [6, 61]
    spec.shutdown()


def test_tier_without_deadline_gets_default_and_not_deadline_of_another_tier(their_tier: dict[str, Any]) -> None:
    spec = DeploymentSpec(CHUNKED, deployment(their_tier, {"type": "memory", "job_deadline_s": 600}), CELL_BYTES)
    assert [share.deadline_s for share in spec.get_manager()._loads.shares] == [20, 601]
    spec.shutdown()


@pytest.mark.parametrize(
    ("config", "region", "cell_bytes", "message"),
    [
        (CHUNKED, {"size": ROW_BYTES - 1}, CELL_BYTES, r"region\.size: .* do not hold one block; a block here has 12"),
        (CHUNKED, {}, 0, "cpu_page_size: 0 is not accepted"),
        (CONFIG, {}, CELL_BYTES, "blocks_per_chunk: is 2, the engine's is 1"),
        (
            dataclasses.replace(CHUNKED, parallel=dataclasses.replace(CONFIG.parallel, world_size=2)),
            {},
            CELL_BYTES,
            r"parallel\.world_size: is 2; an engine in one process has 1 worker",
        ),
    ],
)
def test_inconsistent_setting_is_refused_by_name(
    config: Any, region: dict[str, Any], cell_bytes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DeploymentSpec(config, deployment(**region), cell_bytes)


def test_failed_start_of_a_tier_shuts_down_earlier_tiers(tmp_path: Path, has_ended: Callable[[], bool]) -> None:
    (tmp_path / "file").touch()
    tiers: list[dict[str, Any]] = [{"type": "memory"}, {"type": "fs", "root_dir": str(tmp_path / "file" / "x")}]
    spec = DeploymentSpec(CHUNKED, deployment(*tiers), CELL_BYTES)
    with pytest.raises((ConfigError, StoreError)):
        spec.get_manager()
    wait_for(has_ended)
    spec.shutdown()
    spec.shutdown()


def test_failed_start_is_reported_and_tiers_shut_down_though_one_shutdown_raises(
    their_tier: dict[str, Any],
    tmp_path: Path,
    has_ended: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("never started")

    monkeypatch.setattr(TheirTier, "shutdown", refuse)
    (tmp_path / "file").touch()
    bad = {"type": "fs", "root_dir": str(tmp_path / "file" / "x")}
    spec = DeploymentSpec(CHUNKED, deployment(their_tier, {"type": "memory"}, bad), CELL_BYTES)
    with pytest.raises((ConfigError, StoreError)):
        spec.get_manager()
    wait_for(has_ended)
    assert "never started" in caplog.text
    spec.shutdown()


class TheirTier(ScriptedTier):
    """Somebody else's, with options that have our names and other meanings."""

    def __init__(
        self, spec: Any, view: memoryview, tier_type: str, lookup_deadline_s: Any = None, job_deadline_s: Any = None
    ) -> None:
        super().__init__(view, tier_type)
        self.job_deadline_s = job_deadline_s


@pytest.fixture
def their_tier(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType("their_tiers")
    module.TheirTier = TheirTier  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {"type": "TheirTier", "module_path": module.__name__}


@pytest.mark.parametrize("value", ["200ms", None, [1], -1])
def test_option_of_foreign_tier_named_lookup_deadline_s_is_not_read(their_tier: dict[str, Any], value: Any) -> None:
    spec = DeploymentSpec(
        CHUNKED, deployment({"type": "memory"}, their_tier | {"lookup_deadline_s": value}), CELL_BYTES
    )
    assert spec.get_manager()._waits._options.lookup_total_s == 15.0
    spec.shutdown()


@pytest.mark.parametrize("value", ["soon", float("nan"), 0, [1]])
def test_failed_creation_of_manager_shuts_down_its_tiers(
    their_tier: dict[str, Any], has_ended: Callable[[], bool], value: Any
) -> None:
    spec = DeploymentSpec(CHUNKED, deployment({"type": "memory"}, their_tier | {"job_deadline_s": value}), CELL_BYTES)
    with pytest.raises(ConfigError, match=r"TheirTier: job_deadline_s: .* is not accepted; a tier states seconds"):
        spec.get_manager()
    wait_for(has_ended)
    spec.shutdown()


def test_scheduler_side_works_without_torch() -> None:
    """A scheduler that imports torch pays a second and 200 MB for nothing."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvtiers.connector.spec import DeploymentSpec\n"
        "from kvtiers.connector.region.shared_region import SharedOffloadRegion\n"
        "SharedOffloadRegion.anonymous(1, 4096).create_kv_memoryview()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
