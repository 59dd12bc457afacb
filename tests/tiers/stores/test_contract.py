"""The contract suite finds stores that are subtly wrong: for each rule, one that breaks it and little else."""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, TypeVar

import pytest

from kvtiers.tiers.errors import BlobCorruptError, StoreError
from kvtiers.tiers.store import Capabilities, KeyInfo, Store, parts_size
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import LARGE_BYTES, StoreContract, run_in_threads

Parts = Sequence[memoryview]


class Sound(MemoryStore):
    """A handle on memory that others share, with every optional protocol but pieces, and all in order."""

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=False)
    aside_bytes = 0

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__()
        self._blobs, self._lock = memory._blobs, memory._lock

    def close(self) -> None:
        self._closed = True

    def size_many(self, keys: Sequence[str]) -> list[Any]:
        return self._each(self.size, [(key,) for key in keys])

    def delete_many(self, keys: Sequence[str]) -> list[Any]:
        return self._each(self.delete, [(key,) for key in keys])

    def touch(self, key: str) -> None:
        tail = self.get_tail(key, 1 << 30)
        if tail is not None:
            super().put(key, [memoryview(tail[1])], overwrite=True)

    def quarantine(self, key: str) -> None:
        self.aside_bytes += self.size(key) or 0
        super().quarantine(key)

    def sweep(self, quarantine_s_max: float) -> int:
        self._raise_if_closed("")
        self.aside_bytes *= quarantine_s_max > 0
        return self.aside_bytes

    def leftovers(self, quarantine_s_max: float) -> int:
        return 0

    def hidden_names(self) -> list[str]:
        return []

    def space(self) -> tuple[int, int]:
        self._raise_if_closed("")
        return 1 << 30, 1 << 40

    def prepare(self) -> None:
        pass

    def _each(self, call: Callable[..., object], arguments: Sequence[Sequence[object]]) -> list[object]:
        self._raise_if_closed("")
        outcomes: list[object] = []
        for each in arguments:
            try:
                outcomes.append(call(*each))
            except StoreError as e:
                outcomes.append(e.with_traceback(None))
        return outcomes

    def _below(self, prefix: str) -> list[str]:
        return [info.key for info in MemoryStore.keys(self, prefix)]


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


@breaks("test_large_blob")
class FillsTwoMebibytes(Sound):
    def get_into(self, key: str, parts: Parts) -> None:
        if parts_size(parts) < LARGE_BYTES:
            return super().get_into(key, parts)
        tail = self.get_tail(key, 1 << 30)
        assert tail is not None
        data = tail[1][: 2 << 20].ljust(LARGE_BYTES, b"\0")
        for part in parts:
            part[:], data = data[: part.nbytes], data[part.nbytes :]
        return None


@breaks("test_put_overwrite_replaces")
@breaks("test_put_overwrite_of_absent_key")
class SaysNothingOfAReplacement(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        published = super().put(key, parts, overwrite=overwrite)
        return None if overwrite else published  # type: ignore[return-value]


@breaks("test_put_takes_any_sequence_and_leaves_it_as_it_is")
class TakesThePartsAway(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        data = b""
        while parts:
            data += parts.pop(0)  # type: ignore[attr-defined]
        return super().put(key, [memoryview(data)], overwrite=overwrite)


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


@breaks("test_put_that_fails_leaves_what_was_there")
class MakesRoomFirst(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        if overwrite:
            self.delete(key)
        return super().put(key, parts, overwrite=overwrite)


# ---- size, delete ----------------------------------------------------------------------------------------------------


@breaks("test_folder_of_other_keys_is_no_blob")
class DeletesTrees(Sound):
    def delete(self, key: str) -> None:
        for each in [key, *self._below(f"{key}/")]:
            super().delete(each)


# ---- keys ------------------------------------------------------------------------------------------------------------


@breaks("test_keys_prefix_is_taken_as_it_is_written")
class TakesAPattern(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return (info for info in super().keys("") if fnmatch.fnmatchcase(info.key, f"{prefix}*"))


@breaks("test_keys_lists_more_than_one_page")
class ForgetsThePrefixesSecondPage(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for number, info in enumerate(super().keys(prefix)):
            if not prefix or number < 1000:
                yield info


@breaks("test_keys_whose_reader_deletes_what_it_read")
class CountsItsPages(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        at = 0
        while page := list(super().keys(prefix))[at : at + 1000]:
            yield from page
            at += 1000


@breaks("test_what_another_handle_changed_is_seen_at_once")
class RemembersItsListing(Sound):
    listed: list[KeyInfo] | None = None

    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        self.listed = None
        return super().put(key, parts, overwrite=overwrite)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        if self.listed is None:
            self.listed = list(super().keys())
        return (info for info in self.listed if info.key.startswith(prefix))


@breaks("test_keys_while_blobs_come_and_go")
class BeginsAgainWhenSomethingIsPut(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        at = 0
        while at < len(listed := list(super().keys(prefix))):
            yield listed[at]
            at = at + 1 if len(self._blobs) == len(listed) else 0


@breaks("test_mtime_changes_when_the_blob_does")
class TimeOfTheListing(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return (KeyInfo(info.key, info.size, time.time()) for info in super().keys(prefix))


@breaks("test_keys_lists_every_blob_once")
class LocalTime(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        return (KeyInfo(info.key, info.size, info.mtime + 3600) for info in super().keys(prefix))


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


@breaks("test_writers_of_many_keys")
@breaks("test_blob_that_is_replaced_is_always_there")
class ListsWhatItWrites(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        super().put(f"{key}.tmp", [])
        a_moment()
        super().delete(f"{key}.tmp")
        return super().put(key, parts, overwrite=overwrite)


@breaks("test_blob_that_is_replaced_is_always_there")
class ReplacesInTwoSteps(Sound):
    def put(self, key: str, parts: Parts, *, overwrite: bool = False) -> bool:
        if overwrite:
            self.delete(key)
            a_moment()
        return super().put(key, parts, overwrite=overwrite)


@breaks("test_what_another_handle_changed_is_seen_at_once")
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


@breaks("test_close_during_a_listing")
class ListsWithoutItsHandle(Sound):
    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for info in list(super().keys(prefix)):
            if self._closed:
                raise AttributeError("'NoneType' object has no attribute 'fd'")
            yield info


# ---- optional protocols ----------------------------------------------------------------------------------------------


@breaks("test_quarantine")
class QuarantinesWhatBeginsAlike(Sound):
    def quarantine(self, key: str) -> None:
        for each in [key, *self._below(key)]:
            self.delete(each)


@breaks("test_touch_makes_the_mtime_new_and_changes_nothing_else")
class TouchCreates(Sound):
    def touch(self, key: str) -> None:
        self.put(key, [], overwrite=True)


@breaks("test_sweep_takes_what_is_the_stores_own_and_no_blob")
class SweepsBlobs(Sound):
    def sweep(self, quarantine_s_max: float) -> int:
        self._blobs.clear()
        return 0


@breaks("test_space")
class DoesNotKnowWhatIsFree(Sound):
    def space(self) -> tuple[int, int]:
        return None  # type: ignore[return-value]


@breaks("test_prepare")
class PreparesOnce(Sound):
    prepared = False

    def prepare(self) -> None:
        if self.prepared:
            raise BlobCorruptError("there is a client already")
        self.prepared = True


@breaks("test_size_many_of_more_keys_than_a_request_takes")
class AsksForAThousand(Sound):
    def size_many(self, keys: Sequence[str]) -> list[Any]:
        return super().size_many(keys[:1000]) + [None] * len(keys[1000:])


@breaks("test_delete_many_of_more_keys_than_a_request_takes")
class DeletesAThousand(Sound):
    def delete_many(self, keys: Sequence[str]) -> list[Any]:
        return super().delete_many(keys[:1000]) + [None] * len(keys[1000:])


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", sorted({rule for _, rule in BAD}))
def test_correct_store_passes(rule: str) -> None:
    check(Sound, rule)


def test_hanging_thread_fails_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
