"""Layers: the contract through each of them, exactly the inner store's protocols, and the one thing each changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest

from kvtiers.tiers.errors import (
    BlobNotFoundError,
    ConfigError,
    StoreClosedError,
    StoreError,
    StorePermissionError,
    StoreThrottledError,
    StoreUnavailableError,
)
from kvtiers.tiers.layers.layer import Layer
from kvtiers.tiers.layers.limit import LimitOptions, LimitStore
from kvtiers.tiers.layers.measure import MeasureStore, Observation
from kvtiers.tiers.layers.retry import RetryOptions, RetryStore
from kvtiers.tiers.store import (
    CountsLeftovers,
    HidesNames,
    KeyInfo,
    NamesBlocks,
    Store,
    SupportsDeleteMany,
    SupportsFolders,
    SupportsFreeBytes,
    SupportsGetMany,
    SupportsPrepare,
    SupportsQuarantine,
    SupportsSizeMany,
    SupportsSweep,
    SupportsTail,
    SupportsTotalBytes,
    SupportsTouch,
)
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys
from kvtiers.tiers.testing.faults import Fault, FaultyStore
from tests.clock import Clock
from tests.waiting import wait_for

LAYERS: dict[str, Callable[[Store], Layer]] = {
    "layer": Layer,
    "retry": RetryStore,
    "limit": LimitStore,
    "measure": lambda inner: MeasureStore(inner, lambda _: None),
    "faulty": FaultyStore,
    "all": lambda inner: MeasureStore(LimitStore(RetryStore(inner)), lambda _: None),
}

PROTOCOLS: dict[str, type] = {
    "size_many": SupportsSizeMany,
    "delete_many": SupportsDeleteMany,
    "get_many_into": SupportsGetMany,
    "get_tail": SupportsTail,
    "quarantine": SupportsQuarantine,
    "touch": SupportsTouch,
    "sweep": SupportsSweep,
    "leftovers": CountsLeftovers,
    "hidden_names": HidesNames,
    "free_bytes": SupportsFreeBytes,
    "total_bytes": SupportsTotalBytes,
    "folders": SupportsFolders,
    "is_block": NamesBlocks,
    "prepare": SupportsPrepare,
}


class BatchStore(MemoryStore):
    """A memory store with every optional protocol."""

    def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
        return [_outcome(self.size, key) for key in keys]

    def delete_many(self, keys: Sequence[str]) -> list[Exception | None]:
        return [_outcome(self.delete, key) for key in keys]

    def get_many_into(self, requests: Sequence[tuple[str, Sequence[memoryview]]]) -> list[Exception | None]:
        return [_outcome(self.get_into, *request) for request in requests]


def _outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except StoreClosedError:
        raise
    except StoreError as e:
        return e


class TestAllLayers(StoreContract):
    """The contract through all layers, one on the other."""

    def make_store(self) -> Store:
        self.bottom = BatchStore()
        return LAYERS["all"](self.bottom)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self.bottom.put(key, as_parts(data), overwrite=True)

    def peek(self, store: Store, key: str) -> bytes | None:
        size = self.bottom.size(key)
        return None if size is None else fetch(self.bottom, key, size)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_has_the_protocols_of_its_store_and_no_other(name: str) -> None:
    six = ("put", "get_into", "size", "delete", "keys", "close")
    for has in (c for n in (0, 1, 2, len(PROTOCOLS)) for c in combinations(PROTOCOLS, n)):
        inner = type("Inner", (Store,), dict.fromkeys((*six, *has), lambda *_: None))()
        inner.capabilities = MemoryStore.capabilities
        layer = LAYERS[name](inner)
        assert layer.capabilities is inner.capabilities
        assert tuple(method for method, protocol in PROTOCOLS.items() if isinstance(layer, protocol)) == has


# -- retry -------------------------------------------------------------------------------------------------------------


class SleepersClock(Clock):
    """Sleeping moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.advance(seconds)


def retrying(inner: Store, clock: SleepersClock, **options: Any) -> RetryStore:
    return RetryStore(inner, RetryOptions(**options), clock=clock, sleep=clock.sleep, rng=lambda: 1.0)


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a", as_parts(b"1")),
    "get_into": lambda store: fetch(store, "a", 1),
    "size": lambda store: store.size("a"),
    "delete": lambda store: store.delete("a"),
    "get_tail": lambda store: store.get_tail("a", 1),  # type: ignore[attr-defined]
    "quarantine": lambda store: store.quarantine("a"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("method", OPERATIONS)
def test_retry_makes_a_failed_call_again(method: str) -> None:
    clock = SleepersClock()
    inner = FaultyStore(MemoryStore(), [Fault(method, count=2, error=lambda: StoreUnavailableError("no"))])
    if method != "put":
        OPERATIONS["put"](inner)
    OPERATIONS[method](retrying(inner, clock))
    assert inner.calls[method] == 3
    assert clock.pauses == [0.05, 0.1]


def test_retry_of_a_lost_acknowledgement() -> None:
    inner = FaultyStore(MemoryStore(), [Fault("put", error=lambda: StoreUnavailableError("late"), error_after=True)])
    store = retrying(inner, SleepersClock())
    store.put("a", as_parts(b"1"))
    assert inner.calls["put"] == 2
    assert fetch(store, "a", 1) == b"1"


@pytest.mark.parametrize("error", [StorePermissionError, BlobNotFoundError, StoreError, ValueError])
def test_retry_leaves_lasting_errors_alone(error: type[Exception]) -> None:
    inner = FaultyStore(MemoryStore(), [Fault("put", error=lambda: error("no"))])
    with pytest.raises(error):
        retrying(inner, clock := SleepersClock()).put("a", as_parts(b"1"))
    assert inner.calls["put"] == 1
    assert clock.pauses == []


@pytest.mark.parametrize(
    ("options", "pauses"),
    [
        ({"attempts_max": 5, "pause_s_max": 0.3}, [0.05, 0.1, 0.2, 0.3]),
        ({"attempts_max": 99, "elapsed_s_max": 1.0}, [0.05, 0.1, 0.2, 0.4]),
        ({"attempts_max": 1}, []),
        ({"attempts_max": 1100, "pause_s_max": 0.0}, [0.0] * 1099),
    ],
)
def test_retry_ends_after_its_attempts_or_its_time(options: dict[str, Any], pauses: list[float]) -> None:
    inner = FaultyStore(MemoryStore(), [Fault("put", count=None, error=lambda: StoreUnavailableError("no"))])
    with pytest.raises(StoreUnavailableError):
        retrying(inner, clock := SleepersClock(), **options).put("a", as_parts(b"1"))
    assert clock.pauses == pauses
    assert inner.calls["put"] == len(pauses) + 1


def test_retry_asks_again_only_for_the_keys_that_failed() -> None:
    class Flaky(MemoryStore):
        asked: list[list[str]]

        def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
            self.asked.append(list(keys))
            answers: list[int | Exception | None] = [self.size(key) for key in keys]
            if len(self.asked) < 3:
                answers[-1] = StoreUnavailableError("the last one")
            if len(self.asked) == 1:
                answers[0] = StorePermissionError("never")
            return answers

    inner = Flaky()
    inner.asked = []
    inner.put("c", as_parts(b"123"))
    store = retrying(inner, SleepersClock())
    assert isinstance(store, SupportsSizeMany)
    first, *rest = store.size_many(["a", "b", "c"])
    assert isinstance(first, StorePermissionError)
    assert rest == [None, 3]
    assert inner.asked == [["a", "b", "c"], ["c"], ["c"]]


@pytest.mark.parametrize(("error", "calls"), [(StoreThrottledError, 4), (StorePermissionError, 2)])
def test_retry_that_fails_as_a_whole_leaves_the_other_keys_their_outcomes(error: type[StoreError], calls: int) -> None:
    class Refusing(MemoryStore):
        calls = 0

        def size_many(self, keys: Sequence[str]) -> list[int | Exception | None]:
            self.calls += 1
            if self.calls > 1:
                raise error("all of it")
            return [1, StoreUnavailableError("the last one")]

    inner = Refusing()
    first, second = retrying(inner, SleepersClock()).size_many(["a", "b"])  # type: ignore[attr-defined]
    assert first == 1
    assert isinstance(second, error)
    assert inner.calls == calls


# -- limit -------------------------------------------------------------------------------------------------------------


class GatedStore(MemoryStore):
    """Calls wait inside until the gate opens; counts how many do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.inside: list[str] = []

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        self.inside.append(key)
        assert self.gate.wait(60)
        return super().put(key, parts, overwrite=overwrite)


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_limit_of_calls(gated: GatedStore, pool: ThreadPoolExecutor) -> None:
    store = LimitStore(gated, LimitOptions(calls_max=2, wait_s_max=60))
    futures = [pool.submit(store.put, f"{i}", as_parts(b"1")) for i in range(5)]
    wait_for(lambda: len(gated.inside) == 2 and len(store._waiting) == 3)
    gated.gate.set()
    for future in futures:
        future.result(60)
    assert len(list_keys(store)) == 5
    assert (store._calls, store._bytes, len(store._waiting)) == (0, 0, 0)


def test_limit_of_bytes_lets_a_larger_one_go_alone(gated: GatedStore, pool: ThreadPoolExecutor) -> None:
    store = LimitStore(gated, LimitOptions(bytes_max=10, wait_s_max=60))
    futures = [pool.submit(store.put, "large", as_parts(bytes(99)))]
    wait_for(lambda: gated.inside == ["large"])
    futures.append(pool.submit(store.put, "small", as_parts(b"1")))
    wait_for(lambda: len(store._waiting) == 1)
    assert gated.inside == ["large"]
    gated.gate.set()
    for future in futures:
        future.result(60)


def test_limit_is_first_come_first_served(gated: GatedStore, pool: ThreadPoolExecutor) -> None:
    store = LimitStore(gated, LimitOptions(bytes_max=10, wait_s_max=60))
    futures = [pool.submit(store.put, "a", as_parts(bytes(6)))]
    wait_for(lambda: gated.inside == ["a"])
    futures.append(pool.submit(store.put, "large", as_parts(bytes(10))))
    wait_for(lambda: len(store._waiting) == 1)
    futures.append(pool.submit(store.put, "small", as_parts(bytes(1))))  # would fit, but came later
    wait_for(lambda: len(store._waiting) == 2)
    assert gated.inside == ["a"]
    gated.gate.set()
    for future in futures:
        future.result(60)
    assert gated.inside == ["a", "large", "small"]


def test_limit_refuses_who_waited_too_long_or_finds_too_many_waiting(
    gated: GatedStore, pool: ThreadPoolExecutor
) -> None:
    store = LimitStore(gated, LimitOptions(calls_max=1, wait_s_max=0.01))
    future = pool.submit(store.put, "a", as_parts(b"1"))
    wait_for(lambda: gated.inside)
    with pytest.raises(StoreThrottledError, match=r"not admitted within 0\.01 s: 1 calls with 1 bytes"):
        store.size("a")
    full = LimitStore(gated, LimitOptions(waiting_max=0))
    with pytest.raises(StoreThrottledError, match="0 calls are already waiting"):
        full.size("a")
    gated.gate.set()
    future.result(60)
    assert store.size("a") == 1


def test_failed_call_gives_its_place_back() -> None:
    inner = FaultyStore(MemoryStore(), [Fault("put", count=3, error=lambda: ValueError("no"))])
    store = LimitStore(inner, LimitOptions(calls_max=1, bytes_max=1))
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            store.put("a", as_parts(b"1"))
    store.put("a", as_parts(b"1"))


@pytest.mark.parametrize("name", ["calls_max", "bytes_max"])
def test_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 or more") as caught:
        LimitOptions(**{name: 0})
    assert caught.value.field == name


# -- measure -----------------------------------------------------------------------------------------------------------


def test_measure_sees_every_call() -> None:
    seen: list[Observation] = []
    ticks = iter(range(100))
    store = MeasureStore(BatchStore(), seen.append, clock=lambda: float(next(ticks)))
    store.put("a", as_parts(b"1234", 1))
    fetch(store, "a", 4)
    with pytest.raises(BlobNotFoundError):
        fetch(store, "b", 4)
    store.size("a")
    assert isinstance(store, SupportsSizeMany)
    store.size_many(["a", "b"])
    assert isinstance(store, SupportsGetMany)
    store.get_many_into([("a", [memoryview(bytearray(4))])])
    store.get_many_into([("a", [memoryview(bytearray(4))]), ("b", [memoryview(bytearray(4))])])
    list_keys(store)
    next(store.keys())
    store.delete("a")
    assert seen == [
        Observation("put", "ok", 1.0, 1, 4),
        Observation("get_into", "ok", 1.0, 1, 4),
        Observation("get_into", "BlobNotFoundError", 1.0, 1, 0),
        Observation("size", "ok", 1.0, 1, 0),
        Observation("size_many", "ok", 1.0, 2, 0),
        Observation("get_many_into", "ok", 1.0, 1, 4),
        Observation("get_many_into", "BlobNotFoundError", 1.0, 2, 0),
        Observation("keys", "ok", 1.0, 1, 0),
        Observation("keys", "ok", 1.0, 1, 0),
        Observation("delete", "ok", 1.0, 1, 0),
    ]


def test_measure_sees_a_listing_that_fails() -> None:
    class Broken(MemoryStore):
        def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
            yield KeyInfo("a", 1, 0.0)
            raise StoreUnavailableError("half way")

    seen: list[Observation] = []
    with pytest.raises(StoreUnavailableError):
        list_keys(MeasureStore(Broken(), seen.append, clock=lambda: 0.0))
    assert seen == [Observation("keys", "StoreUnavailableError", 0.0, 1, 0)]


def test_repr_shows_the_whole_stack() -> None:
    assert repr(LAYERS["all"](MemoryStore())).startswith(
        "MeasureStore(LimitStore(RetryStore(<kvtiers.tiers.stores.memory"
    )
