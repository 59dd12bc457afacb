"""The lease: one holder at a time, and another after it dies."""

from __future__ import annotations

import secrets

import pytest

from kvtiers.tiers.capacity.lease import LEASE_PREFIX, Lease
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts, list_keys
from kvtiers.tiers.testing.faults import Fault, FaultyStore


def lease(store: Store, owner: str, now: list[float]) -> Lease:
    return Lease(store, owner, lease_s=30.0, clock=lambda: now[0])


def test_one_holder_at_a_time_and_the_next_after_it() -> None:
    store, now = MemoryStore(), [0.0]
    first, second = lease(store, "a", now), lease(store, "b", now)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    assert list_keys(store) == []


def test_a_dead_holders_lease_is_taken_over() -> None:
    store, now = MemoryStore(), [0.0]
    assert lease(store, "dead", now).try_acquire()
    second, third = lease(store, "b", now), lease(store, "c", now)
    assert not second.try_acquire()
    assert not third.try_acquire()
    now[0] = 29.0
    assert not second.try_acquire()
    assert second.seconds_to_wait == 1.0
    now[0] = 31.0
    assert second.try_acquire()
    assert not third.try_acquire()
    assert len(list_keys(store)) == 1


@pytest.mark.parametrize("name", ["9" * 255, "9" * 12, "\u0663", "x"])
def test_blob_with_an_invalid_lease_name_is_ignored(name: str) -> None:
    """A foreign blob there must neither stop all collectors nor count as a newer lease."""
    store, now = MemoryStore(), [0.0]
    store.put(f"{LEASE_PREFIX}{name}", as_parts(b"{}"))
    first, second = lease(store, "a", now), lease(store, "b", now)
    assert first.try_acquire()
    assert not second.try_acquire()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"owner":"a","renewals":0}', b"\0" * 512])
def test_a_lease_that_cannot_be_believed_is_none(content: bytes) -> None:
    store = MemoryStore()
    store.put(f"{LEASE_PREFIX}{1:012}", as_parts(content))
    assert lease(store, "b", [0.0]).try_acquire()


def test_a_dead_holders_lease_that_cannot_be_read_is_taken_over() -> None:
    store, now = FaultyStore(MemoryStore()), [0.0]
    dead = lease(store, "dead", now)
    assert dead.try_acquire()
    store.plan = [Fault("get_into", first=2, count=2, error=lambda: StoreUnavailableError("EIO"))]
    second = lease(store, "b", now)
    assert not second.try_acquire()
    now[0] = 31.0
    assert second.try_acquire()


def test_living_holder_keeps_its_lease() -> None:
    store, now = MemoryStore(), [0.0]
    first, second = lease(store, "a", now), lease(store, "b", now)
    assert first.try_acquire()
    for _ in range(10):
        now[0] += 15.0
        first.renew()
        assert not second.try_acquire()


def test_one_of_many_candidates_gets_the_lease() -> None:
    store, now = MemoryStore(), [0.0]
    assert lease(store, "dead", now).try_acquire()
    takers = [lease(store, secrets.token_hex(4), now) for _ in range(5)]
    assert [taker.try_acquire() for taker in takers] == [False] * 5
    now[0] = 31.0
    assert sum(taker.try_acquire() for taker in takers) == 1


def test_overtaken_holder_notices_when_it_reads_the_storage_time() -> None:
    store, now = MemoryStore(), [0.0]
    first, second = lease(store, "slow", now), lease(store, "b", now)
    assert first.try_acquire()
    assert first.storage_time() is not None
    assert not second.try_acquire()
    now[0] = 31.0
    assert second.try_acquire()
    assert first.renew()  # it does not know yet
    assert first.storage_time() is None
    assert not first.is_held
    assert second.storage_time() is not None
    assert len(list_keys(store)) == 1
