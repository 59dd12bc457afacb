"""The contract suite finds stores that are subtly wrong: in what they keep, remember, or do at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TypeVar

import pytest

from kvtiers.tiers.errors import StoreError
from kvtiers.tiers.store import Capabilities, KeyInfo, Store
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import StoreContract, run_in_threads

Parts = Sequence[memoryview]


class Sound(MemoryStore):
    """A handle on memory that others share, and all in order."""

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=False)

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__()
        self._blobs, self._lock = memory._blobs, memory._lock

    def close(self) -> None:
        self._closed = True


class Rules(StoreContract):
    """The suite, to be called rule by rule."""

    def __init__(self, store_class: type[Sound]) -> None:
        self.store_class = store_class
        self.memory = MemoryStore()

    def make_store(self) -> Store:
        return self.store_class(self.memory)

    def reopen(self, store: Store) -> Store:
        return self.store_class(self.memory)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self.memory.put(key, [memoryview(data)], overwrite=True)

    def peek(self, store: Store, key: str) -> bytes | None:
        tail = self.memory.get_tail(key, 1 << 30)
        return None if tail is None else tail[1]


S = TypeVar("S", bound=type[Sound])
BAD: list[tuple[type[Sound], str]] = []


def breaks(rule: str) -> Callable[[S], S]:
    """The store is found by ``StoreContract.<rule>``."""

    def register(store_class: S) -> S:
        BAD.append((store_class, rule))
        return store_class

    return register


def check(store_class: type[Sound], rule: str) -> None:
    rules = Rules(store_class)
    store = rules.make_store()
    try:
        getattr(rules, rule)(store)
    finally:
        store.close()


# ---- put and get_into ------------------------------------------------------------------------------------------------


@breaks("test_put_lets_go_of_the_parts")
class KeepsTheListThatItPut(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        self.kept = parts
        return super().put(key, parts, overwrite=overwrite)


@breaks("test_get_into_lets_go_of_the_parts")
class KeepsTheListThatItFilled(Sound):
    def get_into(self, key: str, parts: Parts) -> None:
        self.kept = parts
        super().get_into(key, parts)


@breaks("test_get_into_lets_go_of_the_parts_when_it_fails")
class KeepsItsLastError(Sound):
    def get_into(self, key: str, parts: Parts) -> None:
        try:
            super().get_into(key, parts)
        except StoreError as e:
            self.error = e
            raise


@breaks("test_failed_put_keeps_the_old_blob_and_adds_no_key")
class MakesRoomFirst(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        if overwrite:
            self.delete(key)
        return super().put(key, parts, overwrite=overwrite)


# ---- keys ------------------------------------------------------------------------------------------------------------


@breaks("test_changes_by_another_handle_are_seen_at_once")
class RemembersItsListing(Sound):
    listed: list[KeyInfo] | None = None

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        self.listed = None
        return super().put(key, parts, overwrite=overwrite)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        if self.listed is None:
            self.listed = list(super().keys())
        return (info for info in self.listed if info.key.startswith(prefix))


# ---- several at once -------------------------------------------------------------------------------------------------


def a_moment() -> None:
    """Long enough for another thread to come in between, on a busy machine, too."""
    time.sleep(0.02)


@breaks("test_writers_of_one_key_leave_one_whole_blob")
class EverybodyWins(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        is_new = key not in self._blobs
        a_moment()
        return super().put(key, parts, overwrite=overwrite) or is_new


@breaks("test_writers_of_many_keys_leave_only_whole_blobs")
@breaks("test_blob_is_always_present_while_it_is_replaced")
class ListsWhatItWrites(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        super().put(f"{key}.tmp", [])
        a_moment()
        super().delete(f"{key}.tmp")
        return super().put(key, parts, overwrite=overwrite)


@breaks("test_blob_is_always_present_while_it_is_replaced")
class ReplacesInTwoSteps(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        if overwrite:
            self.delete(key)
            a_moment()
        return super().put(key, parts, overwrite=overwrite)


@breaks("test_changes_by_another_handle_are_seen_at_once")
class RemembersSizes(Sound):
    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory)
        self._sizes: dict[str, int | None] = {}

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        self._sizes.pop(key, None)
        return super().put(key, parts, overwrite=overwrite)

    def size(self, key: str) -> int | None:
        if key not in self._sizes:
            self._sizes[key] = super().size(key)
        return self._sizes[key]


@breaks("test_listing_of_a_closed_store_ends_or_is_refused")
class ListsWithoutItsHandle(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for info in list(super().keys(prefix)):
            if self._closed:
                raise AttributeError("'NoneType' object has no attribute 'fd'")
            yield info


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", sorted({rule for _, rule in BAD}))
def test_correct_store_passes(rule: str) -> None:
    check(Sound, rule)


def test_run_in_threads_fails_without_waiting_for_a_hanging_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # The time is up as soon as the other thread has ended.
    monkeypatch.setattr(
        "kvtiers.tiers.testing.contract.data.wait", lambda calls, _: wait(calls, return_when=FIRST_COMPLETED)
    )
    released = threading.Event()
    try:
        with pytest.raises(AssertionError, match="1 of 2 threads hang"):
            run_in_threads(released.wait, lambda: None)
    finally:
        released.set()


@pytest.mark.parametrize(("bad", "rule"), BAD, ids=lambda value: getattr(value, "__name__", value))
def test_store_that_breaks_a_rule_fails(bad: type[Sound], rule: str) -> None:
    with pytest.raises((AssertionError, AttributeError, BufferError, StoreError, pytest.fail.Exception)):
        check(bad, rule)
