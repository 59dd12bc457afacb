"""MemoryStore: the contract, and eviction in order of last use."""

from __future__ import annotations

import pytest

from kvtiers.tiers.errors import ConfigError, StoreFullError
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys


class TestMemoryStore(StoreContract):
    def make_store(self) -> Store:
        return MemoryStore()

    def plant(self, store: Store, key: str, data: bytes) -> None:
        store.put(key, [memoryview(data)], overwrite=True)  # nothing is behind this store

    def peek(self, store: Store, key: str) -> bytes | None:
        assert isinstance(store, MemoryStore)
        blob = store._blobs.get(key)
        return None if blob is None else blob.data.tobytes()


def test_least_recently_used_blobs_are_evicted() -> None:
    store = MemoryStore(max_bytes=10)
    for key in ("a", "b", "c"):
        store.put(key, as_parts(b"123"))
    fetch(store, "a", 3)
    store.size("b")  # asking is not using
    store.put("d", as_parts(b"1234"))
    assert list_keys(store) == ["a", "c", "d"]
    store.put("c", as_parts(b"already there, but used"[:3]))
    store.put("e", as_parts(b"12"))
    assert list_keys(store) == ["c", "d", "e"]


def test_overwrite_and_delete_free_their_bytes() -> None:
    store = MemoryStore(max_bytes=10)
    for _ in range(3):
        store.put("a", as_parts(b"1234567890"), overwrite=True)
        store.put("a", as_parts(b"1"), overwrite=True)
        store.put("b", as_parts(b"123456789"))
        store.delete("b")
        store.put("c", as_parts(b"123456789"))
        store.delete("c")
    assert list_keys(store) == ["a"]


def test_blob_larger_than_the_limit_is_refused_and_nothing_evicted() -> None:
    store = MemoryStore(max_bytes=10)
    store.put("a", as_parts(b"12345"))
    with pytest.raises(StoreFullError) as caught:
        store.put("a", as_parts(b"12345678901"), overwrite=True)
    assert caught.value.key == "a"
    assert fetch(store, "a", 5) == b"12345"


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes: -1"):
        MemoryStore(max_bytes=-1)
