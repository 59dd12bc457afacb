"""FaultyStore: invisible without a plan, and exactly the plan with one."""

from __future__ import annotations

import threading

import pytest

from kvtiers.tiers.errors import BlobCorruptError, StoreUnavailableError
from kvtiers.tiers.store import Store, SupportsTail
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys
from kvtiers.tiers.testing.faults import Fault, FaultyStore


class TestWithoutPlan(StoreContract):
    def make_store(self) -> Store:
        self.inner = MemoryStore()
        return FaultyStore(self.inner)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self.inner.put(key, [memoryview(data)], overwrite=True)

    def peek(self, store: Store, key: str) -> bytes | None:
        size = self.inner.size(key)
        return None if size is None else fetch(self.inner, key, size)


def outcomes(store: Store, count: int) -> list[bool]:
    """Whether each of so many puts succeeded."""
    done = []
    for _ in range(count):
        try:
            store.put("a", as_parts(b"1"))
            done.append(True)
        except StoreUnavailableError:
            done.append(False)
    return done


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (1, 1, [False, True, True, True]),
        (2, 2, [True, False, False, True]),
        (3, None, [True, True, False, False]),
    ],
)
def test_faults_strike_the_planned_calls(first: int, count: int | None, expected: list[bool]) -> None:
    fault = Fault("put", first=first, count=count, error=lambda: StoreUnavailableError("planned"))
    store = FaultyStore(MemoryStore(), [fault])
    assert outcomes(store, 4) == expected
    assert store.calls["put"] == 4
    store.plan = ()
    assert outcomes(store, 1) == [True]


def test_error_comes_before_or_after_the_call() -> None:
    inner = MemoryStore()
    store = FaultyStore(
        inner,
        [
            Fault("put", first=1, error=lambda: StoreUnavailableError("refused")),
            Fault("put", first=2, error=lambda: StoreUnavailableError("lost"), error_after=True),
        ],
    )
    with pytest.raises(StoreUnavailableError, match="refused"):
        store.put("a", as_parts(b"1"))
    assert list_keys(inner) == []
    with pytest.raises(StoreUnavailableError, match="lost"):
        store.put("a", as_parts(b"1"))
    assert list_keys(inner) == ["a"]


@pytest.mark.parametrize("method", ["size", "keys", "close", "delete"])
def test_planned_base_exception_is_raised_by_any_method(method: str) -> None:
    store = FaultyStore(MemoryStore(), [Fault(method, error=SystemExit)])
    with pytest.raises(SystemExit):
        getattr(store, method)(*() if method in ("keys", "close") else "a")


def test_delay_uses_the_sleep_hook() -> None:
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), [Fault("size", count=2, delay_s=3.5)], sleep=slept.append)
    for _ in range(3):
        store.size("a")
    assert slept == [3.5, 3.5]


def test_planned_hang_ends_when_its_event_is_set() -> None:
    entered, let_go = threading.Event(), threading.Event()
    plan = [Fault("size", delay_s=1.0, hang=let_go)]
    store = FaultyStore(MemoryStore(), plan, sleep=lambda _: entered.set())
    thread = threading.Thread(target=store.size, args=("a",))
    thread.start()
    assert entered.wait(60)
    assert store.size("b") is None  # the second call is not struck
    assert thread.is_alive()
    let_go.set()
    thread.join(60)
    assert not thread.is_alive()


def test_planned_bit_flips_change_stored_and_read_bytes() -> None:
    store = FaultyStore(
        MemoryStore(), [Fault("put", flip_bit=9), Fault("get_into", flip_bit=-1), Fault("get_tail", flip_bit=0)]
    )
    store.put("a", as_parts(b"\x00\x00\x00", 1))
    buffer = bytearray(3)
    store.get_into("a", [memoryview(buffer)[:2], memoryview(buffer)[2:].cast("b")])
    assert buffer == b"\x00\x02\x80"
    assert fetch(store, "a", 3) == b"\x00\x02\x00"
    assert isinstance(store, SupportsTail)
    assert store.get_tail("a", 2) == (3, b"\x03\x00")
    assert store.get_tail("absent", 2) is None


def test_planned_truncation_cuts_stored_and_read_bytes() -> None:
    store = FaultyStore(MemoryStore(), [Fault("put", truncate_to=2), Fault("get_into", first=2, truncate_to=1)])
    store.put("a", as_parts(b"1234"))
    with pytest.raises(BlobCorruptError):
        fetch(store, "a", 4)
    assert fetch(store, "a", 2) == b"1\x00"
    assert fetch(store, "a", 2) == b"12"


def test_fault_with_a_share_fails_that_share_of_calls() -> None:
    fault = Fault("size", count=None, first=101, error=lambda: StoreUnavailableError("injected"), share=0.25)
    store = FaultyStore(MemoryStore(), [fault, Fault("size", count=None, share=0.0, error=KeyError)])
    failed = 0
    for _ in range(1100):
        try:
            store.size("f/a")
        except StoreUnavailableError:
            failed += 1
    assert 200 < failed < 300
    assert store.struck == {fault: failed}
