"""LMCache's L2 over kvtiers: its own factory, keys, memory objects and storage manager, objects on disk."""

from __future__ import annotations

import random
import select
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.distributed.l2_adapters.base", reason="LMCache is not installed: make test-engines")

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvtiers.connector.engines.lmcache import adapter as door
from kvtiers.connector.engines.release import Release
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.testing.fuse import FuseFault, FuseMount, why_no_fuse
from kvtiers.tiers.testing.servers import free_ports
from tests.engines.damage import damaged
from tests.engines.processes import in_two_processes, killing

NEEDS_FUSE = pytest.mark.skipif(bool(why_no_fuse()), reason=str(why_no_fuse()))
SHAPE = (2, 4, 16, 64)
WAIT_S = 60.0


@contextmanager
def opened(root: Path, tier: dict[str, Any] | None = None, **params: Any) -> Iterator[Any]:
    """An adapter, made by LMCache."""
    options = {"type": "fs", "root_dir": str(root), "min_free": 0, "lookup_deadline_s": 5.0, **(tier or {})}
    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvtiers.lmcache",
            "class_name": "KVTiersL2Adapter",
            "adapter_params": {"tier": options, "revision": "abc", "staging": "4MiB", **params},
        }
    )
    adapter = create_l2_adapter_from_registry(config)
    try:
        yield adapter
    finally:
        adapter.close()


def key_of(number: int, **fields: Any) -> ObjectKey:
    """A key of LMCache."""
    chunk = random.Random(number).randbytes(32)
    return ObjectKey(**{"chunk_hash": chunk, "model_name": "org/model", "kv_rank": 0x01000100, **fields})


def keys_of(count: int, **fields: Any) -> list[ObjectKey]:
    """Keys of a prompt."""
    return [key_of(number, **fields) for number in range(count)]


def memory(
    count: int, shape: Sequence[int] = SHAPE, seed: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[TensorMemoryObj]:
    """Memory objects of LMCache, zeros or random."""
    made = []
    generator = torch.Generator().manual_seed(seed or 0)
    for _ in range(count):
        value = torch.zeros(*shape) if seed is None else torch.randn(*shape, generator=generator)
        raw = value.to(dtype).contiguous().view(-1).view(torch.uint8)
        metadata = MemoryObjMetadata(torch.Size(shape), dtype, 0, raw.numel(), 1, fmt=MemoryFormat.KV_2LTD)
        made.append(TensorMemoryObj(raw, metadata, parent_allocator=None))
    return made


def layouts(shape: Sequence[int] = SHAPE, group: int = 0) -> dict[int, MemoryLayoutDesc]:
    """What LMCache says of a group of layers."""
    return {group: MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])}


def wait(fd: int, take: Any) -> Any:
    """Wait for a task's end as LMCache's controllers do."""
    until = time.monotonic() + WAIT_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while time.monotonic() < until:
        if (result := take()) is not None:
            return result
        if poll.poll(200):
            consume_fd(fd)
    raise AssertionError("no event came")


def store(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    done: dict[int, Any] = {}

    def take() -> Any:
        done.update(adapter.pop_completed_store_tasks())
        return done.get(task)

    return wait(adapter.get_store_event_fd(), take)


def look(adapter: Any, keys: list[ObjectKey], descriptions: dict[int, MemoryLayoutDesc] | None = None) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, layouts() if descriptions is None else descriptions)
    bitmap = wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None, "a result is given once"
    return [bitmap.test(number) for number in range(len(keys))]


def load(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    bitmap = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    return [bitmap.test(number) for number in range(len(keys))]


def equal(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return all(torch.equal(mine.tensor, theirs.tensor) for mine, theirs in zip(one, two, strict=True))


class Listener:
    """Notes what the adapter tells LMCache."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.accessed: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += keys

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        raise AssertionError("nothing is deleted")


def test_objects_stored_by_one_server_are_loaded_by_another_in_same_shape(tmp_path: Path) -> None:
    objects, listener = memory(20, seed=1), Listener()
    size = objects[0].get_size()
    with opened(tmp_path) as adapter:
        adapter.register_listener(listener)
        result = store(adapter, keys_of(20), objects)
        assert (result.is_successful(), result.bytes_transferred()) == (True, 20 * size)
        assert adapter.get_usage().total_bytes_used == 20 * size
        again = store(adapter, keys_of(20), objects)
        assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
        assert adapter.get_usage().total_bytes_used == 20 * size
        assert listener.stored == keys_of(20)
    with opened(tmp_path) as adapter:
        adapter.register_listener(listener)
        wanted = [*keys_of(10), key_of(99), *keys_of(20)[10:]]
        assert look(adapter, wanted) == [number != 10 for number in range(21)]
        filled = memory(21)
        assert load(adapter, wanted, filled) == [number != 10 for number in range(21)]
        assert equal(filled[:10] + filled[11:], objects)
        assert not filled[10].tensor.any()
        assert filled[0].tensor.shape == SHAPE
        assert listener.accessed == keys_of(20)
        adapter.submit_unlock(wanted)
        assert adapter.report_status()["is_healthy"]


def test_partial_last_chunk_comes_back_in_its_own_shape(tmp_path: Path) -> None:
    short = (2, 4, 5, 64)
    full, last = memory(3, seed=1), memory(1, short, seed=2)
    with opened(tmp_path) as adapter:
        assert store(adapter, keys_of(4), [*full, *last]).is_successful()
        assert look(adapter, keys_of(4), layouts()) == [True, True, True, False]
        assert look(adapter, keys_of(4), layouts(short)) == [False, False, False, True]
        filled = [*memory(3), *memory(1, short)]
        assert load(adapter, keys_of(4), filled) == [True] * 4
        assert equal(filled, [*full, *last])
        assert load(adapter, keys_of(4), memory(4, short)) == [False, False, False, True]


def test_metrics_of_each_layouts_tier_are_served_under_its_own_name(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with opened(tmp_path, metrics_port=port) as adapter:
        assert store(adapter, keys_of(3), memory(3, seed=1)).is_successful()
        assert store(adapter, [key_of(9)], memory(1, (2, 4, 5, 64), seed=2)).is_successful()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
    for name, count in (("fs_0", 3), ("fs_1", 1)):
        assert f'kvtiers_blocks_total{{op="store",outcome="moved",tier="{name}"}} {count}.0' in text


def test_each_adapter_has_three_distinct_event_descriptors(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        fds = {get() for a in (one, two) for get in (
            a.get_store_event_fd, a.get_load_event_fd, a.get_lookup_and_lock_event_fd)}  # fmt: skip
        assert len(fds) == 6
        assert isinstance(one, L2AdapterInterface)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, True),
        ({"cache_salt": "tenant-1"}, False),
        ({"kv_rank": 0x02000200}, False),
        ({"kv_rank": 0x02010201}, False),
        ({"object_group_id": 1}, False),
        ({"model_name": "org/other"}, False),
    ],
    ids=str,
)
def test_key_that_differs_in_one_field_finds_nothing(fields: dict[str, Any], found: bool, tmp_path: Path) -> None:
    """W6, and tenants by their salt."""
    descriptions = layouts() | layouts(group=1)
    with opened(tmp_path) as adapter:
        assert store(adapter, keys_of(3), memory(3, seed=1)).is_successful()
        assert look(adapter, keys_of(3, **fields), descriptions) == [found] * 3
        assert load(adapter, keys_of(3, **fields), memory(3)) == [found] * 3


def test_other_revision_layout_or_type_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as adapter:
        assert store(adapter, keys_of(3), memory(3, seed=1)).is_successful()
        assert look(adapter, keys_of(3), layouts((2, 4, 64, 16))) == [False] * 3
        assert load(adapter, keys_of(3), memory(3, dtype=torch.float16)) == [False] * 3
        assert look(adapter, keys_of(3), {}) == [False] * 3
    with opened(tmp_path, revision="def") as adapter:
        assert look(adapter, keys_of(3)) == [False] * 3


def test_model_without_known_weights_is_never_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, revision=None) as adapter:
        assert not store(adapter, keys_of(3), memory(3, seed=1)).is_successful()
        assert look(adapter, keys_of(3)) == [False] * 3
        assert not adapter.report_status()["is_healthy"]
    assert caplog.text.count("revision: is missing, and org/model is neither a folder nor in the hub cache") == 1
    assert not list(tmp_path.iterdir())


def test_ten_thousand_objects_stored_by_two_processes_load_equal(tmp_path: Path) -> None:
    count, batch, shape = 10_000, 250, (2, 1, 4, 16)

    def content(number: int) -> torch.Tensor:
        return torch.full(shape, float(number % 200), dtype=torch.bfloat16)

    def work(part: int) -> None:
        with opened(tmp_path) as adapter:
            for start in range(part * count // 2, (part + 1) * count // 2, batch):
                objects = memory(batch, shape)
                for place, each in enumerate(objects):
                    each.tensor.copy_(content(start + place))
                keys = [key_of(number) for number in range(start, start + batch)]
                assert store(adapter, keys, objects).is_successful()

    in_two_processes(work)
    with opened(tmp_path) as adapter:
        keys = keys_of(count)
        assert all(look(adapter, keys, layouts(shape)))
        for start in range(0, count, batch):
            objects = memory(batch, shape)
            assert all(load(adapter, keys[start : start + batch], objects))
            assert all(torch.equal(each.tensor, content(start + place)) for place, each in enumerate(objects))


@pytest.mark.parametrize("times", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_damaged_object_is_a_miss_until_stored_again(times: int, tmp_path: Path) -> None:
    """W1: a damaged object is a miss that leaves the memory as it was, and the next store heals it."""
    shape = (2, 1, 4, 16)
    objects, keys = memory(32, shape, seed=3), keys_of(32)
    by_name = {f"{door._key(key)[:32].hex()}.bin": number for number, key in enumerate(keys)}
    with opened(tmp_path) as adapter:
        assert store(adapter, keys, objects).is_successful()
        for name in damaged(tmp_path, times, seed=7):
            number = by_name[name]
            filled = memory(1, shape)
            assert load(adapter, [keys[number]], filled) == [False]
            assert not filled[0].tensor.any()
            assert store(adapter, [keys[number]], [objects[number]]).is_successful()
            assert load(adapter, [keys[number]], filled) == [True]
            assert torch.equal(filled[0].tensor, objects[number].tensor)


@NEEDS_FUSE
def test_tasks_on_hung_mount_fail_in_time_and_succeed_after_recovery(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").mkdir()
    objects = memory(8, seed=1)
    with (
        FuseMount(tmp_path / "real", tmp_path / "kv") as mount,
        opened(tmp_path / "kv", {"job_deadline_s": 1.0, "lookup_deadline_s": 0.5}) as adapter,
    ):
        assert store(adapter, keys_of(8), objects).is_successful()
        with mount.stopped():
            began = time.monotonic()
            filled = memory(8)
            assert not any(load(adapter, keys_of(8), filled))
            assert not any(look(adapter, keys_of(8)))
            assert not store(adapter, [key_of(n) for n in range(50, 58)], objects).is_successful()
            assert not adapter.report_status()["is_healthy"]
            assert time.monotonic() - began < 10
        until = time.monotonic() + 40
        while not all(load(adapter, keys_of(8), filled)) and time.monotonic() < until:
            time.sleep(0.1)
        assert equal(filled, objects)


@NEEDS_FUSE
def test_store_on_full_disk_fails_and_stored_objects_still_load(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").mkdir()
    with FuseMount(tmp_path / "real", tmp_path / "kv") as mount, opened(tmp_path / "kv") as adapter:
        assert store(adapter, keys_of(4), memory(4, seed=1)).is_successful()
        mount.plan = [FuseFault("write", errno=28)]
        assert not store(adapter, [key_of(n) for n in range(50, 54)], memory(4, seed=2)).is_successful()
        assert all(load(adapter, keys_of(4), memory(4)))


def test_loads_after_kills_of_tier_processes_return_right_bytes_or_miss(tmp_path: Path) -> None:
    objects, keys = memory(64, seed=1), keys_of(64)
    with opened(tmp_path) as adapter:
        store(adapter, keys, objects)
        ((opened_door, _),) = adapter._doors.values()
        with killing(lambda: opened_door.tier.tier._channel.pids[:1]):
            for _ in range(6):
                store(adapter, keys, objects)
                filled = memory(64)
                for number, is_loaded in enumerate(load(adapter, keys, filled)):
                    if is_loaded:
                        assert torch.equal(filled[number].tensor, objects[number].tensor)
        until = time.monotonic() + 60
        while not all(load(adapter, keys, filled)) and time.monotonic() < until:
            store(adapter, keys, objects)
            time.sleep(0.1)
        assert equal(filled, objects)


def test_close_with_tasks_in_progress_is_bounded_and_repeatable(tmp_path: Path) -> None:
    with opened(tmp_path) as adapter:
        adapter.submit_store_task(keys_of(20), memory(20, seed=1))
        adapter.submit_load_task(keys_of(20), memory(20))
        began = time.monotonic()
        adapter.close()
        adapter.close()
        assert time.monotonic() - began < 20


@NEEDS_FUSE
def test_close_of_several_tiers_on_hung_mount_takes_as_long_as_of_one_tier(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").mkdir()
    shutdown_s = 4.0
    with FuseMount(tmp_path / "real", tmp_path / "kv") as mount, opened(tmp_path / "kv") as adapter:
        shapes = [(2, 4, tokens, 64) for tokens in range(1, 6)]
        for shape in shapes:
            assert not any(look(adapter, keys_of(2), layouts(shape)))
        tiers = [opened_door.tier for opened_door, _ in adapter._doors.values()]
        with mount.stopped():
            for tier in tiers:  # more than LMCache's tasks could load at once
                with tier._news:
                    tier.tier.submit_load(JobMetadata(10_000, [door._key(key_of(9))], np.zeros(1, np.int32)))
            began = time.monotonic()
            adapter.close()
            assert time.monotonic() - began < 2 * shutdown_s + door.CLOSE_S


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"teir": 1}, "teir: is not an option of kvtiers; accepted are"),
        ({"staging": "lots"}, "staging: "),
        ({"tier": {"type": "memory"}}, "type: memory cannot be shared by processes"),
        ({"shared_storage_path": "/tmp/x"}, "shared_storage_path and tier is given"),
    ],
)
def test_wrong_option_is_refused_at_start(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=message):
        door.KVTiersL2Adapter({"tier": tier, **params})


def test_tested_release_is_accepted_and_error_for_changed_release_names_missing_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door.RELEASE.check(door.KVTiersL2Adapter)
    assert door.RELEASE.version in door.RELEASE.tested
    with pytest.raises(ConfigError, match=r"lmcache: version .* no_such cannot be imported|no_such is gone"):
        Release("lmcache", ("0.5.6",), {"lmcache.v1.platform": ["no_such()"]}).check()
    monkeypatch.delattr(L2AdapterInterface, "submit_unlock")
    with pytest.raises(ConfigError, match=r"L2AdapterInterface\.submit_unlock is gone"):
        door.RELEASE.check(door.KVTiersL2Adapter)
