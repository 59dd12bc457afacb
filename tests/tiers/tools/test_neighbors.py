"""What an engine with a new namespace logs about other namespaces of its model."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.blocks.file_mapper import FileMapper, strict_fields
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tools import neighbors
from kvtiers.tiers.tools.neighbors import tell_nearest
from tests.identity import FakeSpec
from tests.waiting import wait_for

BEGUN = 1_700_000_000.0


class FolderMemory(MemoryStore):
    """A memory store whose blobs are old, and which notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return (KeyInfo(info.key, info.size, BEGUN) for info in super().keys(prefix))

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        self.read.append(key)
        super().get_into(key, parts)


def mapper_of(engine: dict[str, str] | None = None, **fields: Any) -> FileMapper:
    extra = strict_fields(FakeSpec())
    if engine is not None:
        extra |= {"engine": engine, "model_revision": f"abc123+engine:{abs(hash(tuple(engine.items()))):x}"}
    return FileMapper.from_offloading_spec("", FakeSpec(), extra_fields=extra | fields)


def told(store: Any, mapper: FileMapper, caplog: pytest.LogCaptureFixture) -> str:
    """The line that is logged; "" for none."""
    before = set(threading.enumerate())
    caplog.clear()
    with caplog.at_level(logging.INFO):
        tell_nearest(store, mapper, "disk")
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
    return "\n".join(record.getMessage() for record in caplog.records)


def test_single_differing_option_is_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    store = FolderMemory()
    triton, auto = ({"kernel_config.moe_backend": each, "VLLM_A": "1"} for each in ("triton", "auto"))
    before = mapper_of(triton)
    open_namespace(store, before)
    store.put(f"{before.name_prefix}/000/00_g0/a.bin", [memoryview(b"a block")])
    own = mapper_of(auto)
    assert open_namespace(store, own)
    line = told(store, own, caplog)
    assert line.startswith(
        "tier disk: cold start: only kernel_config.moe_backend differs from the namespace "
        f"{before.base_path}, begun 2023-"
    )
    assert line.endswith(': kernel_config.moe_backend is "auto" here, "triton" there')
    assert not any("a.bin" in name for name in store.read)


def test_nearest_of_several_namespaces_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = FolderMemory()
    open_namespace(store, mapper_of(option1=0, option2=0, option3=0))
    open_namespace(store, mapper_of(option1=2))
    open_namespace(store, mapper_of(option1=1, option2=1))
    open_namespace(store, mapper_of(model_dtype="of an older release"))
    own = mapper_of(option1=2, option2=7)
    line = told(store, own, caplog)
    assert "only option2 differs" in line
    assert "option2 is 7 here, not set there" in line


def test_many_differing_fields_are_counted_and_the_first_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    store = FolderMemory()
    many: dict[str, Any] = {f"option{each}": "x" * 100 for each in range(8)}
    open_namespace(store, mapper_of(**many))
    line = told(store, mapper_of(), caplog)
    assert "8 fields differ from the nearest namespace of this model, " in line
    assert line.count(" here, ") == neighbors.SHOWN_FIELDS_MAX
    assert line.endswith("; …")
    assert "x" * 40 not in line


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"model_name": "another"}'])
def test_nothing_is_logged_without_another_namespace_of_the_model(
    content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    store, own = FolderMemory(), mapper_of()
    if content is not None:
        store.put(f"{own.base_path[:-12]}{'a' * 12}/config.json", [memoryview(content)])
    open_namespace(store, own)
    assert told(store, own, caplog) == ""


def test_search_reads_a_limited_number_of_namespaces_for_a_limited_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderMemory()
    for number in range(8):
        open_namespace(store, mapper_of(option=number))
    store.read.clear()
    monkeypatch.setattr(neighbors, "NAMESPACES_MAX", 3)
    assert "only option differs" in told(store, mapper_of(), caplog)
    assert len(store.read) == 4  # one more says that there are more
    monkeypatch.setattr(neighbors, "SEARCH_S_MAX", 0.0)
    assert told(store, mapper_of(), caplog) == ""


def test_hanging_or_failing_storage_neither_delays_the_start_nor_logs(caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()

    class Hanging(FolderMemory):
        def folders(self) -> list[str]:
            goes_on.wait(60)
            raise StoreUnavailableError("gone")

    own = mapper_of()
    with caplog.at_level(logging.INFO):
        tell_nearest(Hanging(), own, "disk")  # returns while the storage hangs
        (thread,) = [each for each in threading.enumerate() if each.name == "kvtiers-disk-nearest"]
        goes_on.set()
        thread.join(20)
    assert not thread.is_alive()
    assert not caplog.records


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_tier_logs_the_namespace_difference_at_its_start(
    isolation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    view = SharedOffloadRegion.anonymous(8, 4096).create_kv_memoryview()
    options = {"type": "fs", "root_dir": str(tmp_path), "min_free": 0, "isolation": isolation}
    heard = ""

    def said() -> str:
        """Texts in the log, or from the tier's processes."""
        nonlocal heard
        heard += capfd.readouterr().err
        return caplog.text if isolation == "thread" else heard

    def start(spec: FakeSpec, awaited: str = "") -> None:
        with caplog.at_level(logging.INFO):
            tier = SecondaryTierFactory.create_secondary_tier(dict(options), view, spec)
            wait_for(lambda: not any(each.name.endswith("-nearest") for each in threading.enumerate()))
            wait_for(lambda: awaited in said())
            tier.shutdown()

    start(FakeSpec())
    assert "cold start" not in said()
    (config,) = tmp_path.glob("*/config.json")
    os.utime(config, (BEGUN, BEGUN))
    start(FakeSpec().changed(kv_cache_layout="HND"), ", begun 2023-")
    assert said().count("cold start: only kv_cache_layout differs from the namespace ") == 1
    assert 'kv_cache_layout is "HND" here, "NHD" there' in said()
    start(FakeSpec())  # it is not new any more
    assert said().count("cold start") == 1
