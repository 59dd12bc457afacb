"""open_namespace: whether a namespace is new, and who owns its folder."""

from __future__ import annotations

import logging

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper, strict_fields
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.stores.memory import MemoryStore
from tests.identity import FakeSpec


def some_mapper() -> FileMapper:
    return FileMapper.from_offloading_spec("", FakeSpec(), extra_fields=strict_fields(FakeSpec()))


@pytest.mark.parametrize("read_only", [False, True])
def test_new_namespace_is_reported_as_new(read_only: bool, caplog: pytest.LogCaptureFixture) -> None:
    store, mapper = MemoryStore(), some_mapper()
    with caplog.at_level(logging.INFO):
        open_namespace(store, mapper, read_only=read_only)
    assert f"{mapper.get_config_file_path()} is new: nothing is stored for this engine yet" in caplog.text
    assert "kvtiers check" in caplog.text
    assert (store.size(mapper.relative_config_name) is None) == read_only


def test_known_namespace_is_not_reported_as_new(caplog: pytest.LogCaptureFixture) -> None:
    store, mapper = MemoryStore(), some_mapper()
    open_namespace(store, mapper)
    with caplog.at_level(logging.INFO):
        open_namespace(store, mapper)
    assert not caplog.records
