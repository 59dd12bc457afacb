"""Rules for concurrent use: several handles, processes and threads, and calls after close."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest

from ...errors import BlobNotFoundError, StoreClosedError
from ...store import (
    KeepsFiles,
    Store,
    SupportsSpace,
    SupportsTail,
)
from ..faults import run_in_child, start_child, wait_child
from .data import (
    LARGE_BYTES,
    as_parts,
    calls_by_key,
    fetch,
    list_keys,
    make_data,
    run_in_threads,
)
from .place import StorePlace

KILLS = 5
RACERS, RACES = 4, 100  # number of processes, and of keys that each of them puts
KILL_S_MAX = 0.05  # limit of each of the two pauses before a kill; time for about ten puts
VISITS_MIN, PUTS_MAX = 3, 1000  # minimum of opened handles, and maximum of puts that wait for them


class SharingRules(StorePlace):
    """See ``StoreContract``."""

    # ---- another handle ------------------------------------------------------------------------------------

    def test_two_stores_of_one_place_see_blobs_of_each_other(self, store: Store) -> None:
        if not store.capabilities.shared:
            pytest.skip("not capabilities.shared")
        store.put("f/a", as_parts(b"from the first"))
        with closing(self.reopen(store)) as second:
            assert fetch(second, "f/a", 14) == b"from the first"
            second.put("f/a", as_parts(b"from the other"), overwrite=True)
            second.put("f/b", as_parts(b"b"))
        assert fetch(store, "f/a", 14) == b"from the other"
        assert list_keys(store) == ["f/a", "f/b"]

    def test_blobs_outlive_the_store(self, store: Store) -> None:
        if not store.capabilities.shared:
            pytest.skip("not capabilities.shared")
        store.put("f/a", as_parts(b"1234"))
        store.close()
        with closing(self.reopen(store)) as second:
            assert fetch(second, "f/a", 4) == b"1234"

    def test_changes_by_another_handle_are_seen_at_once(self, store: Store) -> None:
        """A store caches nothing about a key: not its size, its tail, its absence or a listing."""

        def look(key: str, size: int) -> list[object]:
            found: list[object] = [store.size(key), _fetched(store, key, size), list_keys(store)]
            if isinstance(store, SupportsTail):
                found.append(store.get_tail(key, 4))
            found += store.size_many([key])
            return found

        def seen(data: bytes | None) -> list[object]:
            size = None if data is None else len(data)
            found: list[object] = [size, data, [] if data is None else ["f/a"]]
            if isinstance(store, SupportsTail):
                found.append(None if data is None else (size, data[-4:]))
            found.append(size)
            return found

        absent = seen(None)
        with self._handles(store) as (_, other):
            assert look("f/a", 5) == absent
            other.put("f/a", as_parts(b"first"))
            assert look("f/a", 5) == seen(b"first")
            other.put("f/a", as_parts(b"replaced"), overwrite=True)
            assert look("f/a", 8) == seen(b"replaced")
            other.delete("f/a")
            assert look("f/a", 8) == absent
            assert store.put("f/a", as_parts(b"again")) is True
            assert look("f/a", 5) == seen(b"again")

    def test_opening_and_closing_handles_does_not_disturb_another_writer(self, store: Store) -> None:
        """Opening, sweeping and closing a handle does not touch files of a live writer."""
        if not store.capabilities.shared:
            pytest.skip("not capabilities.shared")
        data = make_data(LARGE_BYTES)
        ended = threading.Event()
        visits = 0

        def put() -> None:
            try:
                puts = 0
                while puts < 8 or (visits < VISITS_MIN and puts < PUTS_MAX):
                    parts = as_parts(data, *range(1 << 14, LARGE_BYTES, 1 << 14))
                    assert store.put("f/a", parts, overwrite=puts > 0) is True
                    puts += 1
            finally:
                ended.set()

        def come_and_go() -> None:
            nonlocal visits
            try:
                while not ended.is_set():
                    other = self.reopen(store)
                    if isinstance(other, KeepsFiles):
                        other.sweep()
                    other.close()
                    visits += 1
            finally:
                visits = VISITS_MIN  # otherwise the puts would wait for visits after a failure

        run_in_threads(put, come_and_go)
        assert store.put("f/b", as_parts(b"1")) is True
        assert self.peek(store, "f/a") == data
        assert list_keys(store) == ["f/a", "f/b"]

    # ---- another process -----------------------------------------------------------------------------------

    def test_another_process_sees_a_blob_as_soon_as_put_returns(self, store: Store) -> None:
        """A blob is visible as soon as put has returned: the other process ends without closing its store."""
        if not store.capabilities.shared:
            pytest.skip("not capabilities.shared")
        if self.no_fork:
            pytest.skip(self.no_fork)
        store.put("f/a", as_parts(b"from here"))

        def put() -> None:
            other = self.reopen(store)
            assert fetch(other, "f/a", 9) == b"from here"
            assert other.put("f/b", as_parts(b"from there")) is True

        assert run_in_child(put) == 0, "the other process failed; its error is on stderr"
        assert fetch(store, "f/b", 10) == b"from there"
        assert list_keys(store) == ["f/a", "f/b"]

    def test_exactly_one_of_several_processes_publishes_a_key(self, store: Store) -> None:
        if not (store.capabilities.shared and store.capabilities.exclusive_create):
            pytest.skip("not capabilities.shared or not capabilities.exclusive_create")
        if self.no_fork:
            pytest.skip(self.no_fork)
        keys = [f"f/{i}" for i in range(RACES)]
        versions = [make_data(70_000, number) for number in range(RACERS)]
        go, start = os.pipe()
        told, tell = os.pipe()

        def put(number: int) -> None:
            os.close(start)
            other = self.reopen(store)
            other.size("f/a")
            parts = as_parts(versions[number], 65_536)
            os.read(go, 1)  # returns when every process has closed the other end
            os.write(tell, bytes(other.put(key, parts) for key in keys))

        children = [start_child(partial(put, number)) for number in range(RACERS)]
        for fd in (go, start, tell):
            os.close(fd)
        with os.fdopen(told, "rb") as answers:
            ends = [wait_child(child) for child in children]
            assert ends == [0] * RACERS, "another process failed; its error is on stderr"
            published = answers.read()
        assert [sum(published[i::RACES]) for i in range(RACES)] == [1] * RACES
        assert all(fetch(store, key, 70_000) in versions for key in keys)

    def test_writer_process_killed_during_a_put_leaves_no_partial_blob(self, store: Store) -> None:
        """Whenever the writer is killed, a blob is complete or absent, and the other processes can go on."""
        if not store.capabilities.shared:
            pytest.skip("not capabilities.shared")
        if self.no_fork:
            pytest.skip(self.no_fork)
        versions = [make_data(LARGE_BYTES, seed) for seed in range(2)]

        def put(ready: int) -> None:
            other = self.reopen(store)
            other.size("f/a")
            os.write(ready, b".")
            while True:
                for data in versions:
                    other.put("f/a", as_parts(data, *range(1 << 16, LARGE_BYTES, 1 << 16)), overwrite=True)

        for _ in range(KILLS):
            readable, writable = os.pipe()
            child = start_child(partial(put, writable))
            os.close(writable)
            try:
                assert os.read(readable, 1), "the other process could not open the place"
                until = time.monotonic() + random.uniform(0, KILL_S_MAX)
                while time.monotonic() < until:
                    assert _fetched(store, "f/a", LARGE_BYTES) in (None, *versions)
                # If readers lock out writers, the child starts its put only after the last read. Without this pause,
                # each kill would hit the beginning of a put.
                time.sleep(random.uniform(0, KILL_S_MAX))
            finally:
                os.close(readable)
                os.kill(child, signal.SIGKILL)
                wait_child(child)
            with closing(self.reopen(store)) as after:
                for each in (store, after):
                    assert _listed(each) <= {("f/a", LARGE_BYTES)}
                    assert _fetched(each, "f/a", LARGE_BYTES) in (None, *versions)
        store.put("f/b", as_parts(b"mine"))
        assert fetch(store, "f/b", 4) == b"mine"

    # ---- close ---------------------------------------------------------------------------------------------

    def test_close_twice_then_every_call_is_refused(self, store: Store) -> None:
        store.put("a", as_parts(b"1"))
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [partial(call, "a") for call in calls_by_key(store).values()]
        calls.append(lambda: list(store.keys()))
        calls.append(lambda: store.size_many(["a"]))
        calls.append(lambda: store.delete_many(["a"]))
        if isinstance(store, KeepsFiles):
            calls.append(lambda: store.sweep())
        calls.append(store.folders)
        if isinstance(store, SupportsSpace):
            calls.append(store.space)
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()

    def test_listing_of_a_closed_store_ends_or_is_refused(self, store: Store) -> None:
        keys = {f"f{i % 3}/{i}" for i in range(20)}
        for key in keys:
            store.put(key, as_parts(b"1"))
        listing = store.keys()
        listed = [next(listing).key]
        store.close()
        try:
            listed += [info.key for info in listing]
        except StoreClosedError:
            pass
        assert set(listed) <= keys

    # ---- many threads --------------------------------------------------------------------------------------

    def test_writers_of_one_key_leave_one_whole_blob(self, store: Store) -> None:
        versions = [make_data(70_000, seed) for seed in range(8)]
        with self._handles(store) as handles:
            for round_ in range(5):
                key = f"f{round_}/a"
                seen: list[bytes] = []
                published: list[bool] = []

                def write(
                    number: int, key: str = key, seen: list[bytes] = seen, published: list[bool] = published
                ) -> None:
                    by = handles[number % 2]
                    published.append(by.put(key, as_parts(versions[number], 65_536)))
                    seen.append(fetch(by, key, 70_000))

                run_in_threads(*[lambda number=number: write(number) for number in range(8)])
                assert set(seen) <= set(versions)
                if store.capabilities.exclusive_create:
                    # After its put, every writer read the same blob, so no writer replaced the winner later.
                    assert len(set(seen)) == 1
                    assert self.peek(store, key) == seen[0]
                    assert published.count(True) == 1, published
                else:
                    assert self.peek(store, key) in versions

    def test_readers_of_many_keys_get_their_own_blobs(self, store: Store) -> None:
        whole = {f"f{i % 3}/{i}": make_data(70_000, seed=i) for i in range(8)}
        for key, data in whole.items():
            self.plant(store, key, data)

        def read(key: str) -> None:
            for _ in range(20):
                assert fetch(store, key, 70_000) == whole[key]

        run_in_threads(*[lambda key=key: read(key) for key in whole])

    def test_a_large_blob_is_never_seen_in_part(self, store: Store) -> None:
        data = make_data(LARGE_BYTES)
        ended = threading.Event()
        seen: set[int | None] = set()

        def look() -> None:
            while not ended.is_set():
                seen.add(store.size("f/a"))

        def put() -> None:
            try:
                for _ in range(5):
                    store.put("f/a", as_parts(data, *range(4096, LARGE_BYTES, 1 << 16)))
                    store.delete("f/a")
            finally:
                ended.set()

        run_in_threads(look, put)
        assert seen <= {None, LARGE_BYTES}

    def test_writers_of_many_keys_leave_only_whole_blobs(self, store: Store) -> None:
        whole = {(f"f{i % 4}/{writer}/{i}", 5000) for writer in range(8) for i in range(20)}
        ended: list[int] = []

        def write(writer: int) -> None:
            try:
                for i in range(20):
                    store.put(f"f{i % 4}/{writer}/{i}", as_parts(make_data(5000, seed=writer * 100 + i), 4096))
            finally:
                ended.append(writer)

        def look() -> None:
            while len(ended) < 8:
                assert _listed(store) <= whole
                assert {store.size(key) for key in ("f0/0/16", "f3/1/19", "f1/2/17")} <= {None, 5000}

        run_in_threads(look, *[lambda writer=writer: write(writer) for writer in range(8)])
        for writer in range(8):
            for i in range(20):
                assert self.peek(store, f"f{i % 4}/{writer}/{i}") == make_data(5000, seed=writer * 100 + i)

    def test_blob_is_always_present_while_it_is_replaced(self, store: Store) -> None:
        versions = [make_data(70_000, seed) for seed in range(2)]
        store.put("f/a", as_parts(versions[0]))
        ended = threading.Event()

        def overwrite() -> None:
            try:
                for i in range(30):
                    store.put("f/a", as_parts(versions[i % 2], 65_536), overwrite=True)
            finally:
                ended.set()

        def read() -> None:
            while not ended.is_set():
                assert fetch(store, "f/a", 70_000) in versions

        def ask() -> None:
            while not ended.is_set():
                assert store.size("f/a") == 70_000
                assert _listed(store) <= {("f/a", 70_000)}

        run_in_threads(overwrite, read, ask)

    def test_readers_during_overwrite_and_delete_see_whole_blobs(self, store: Store) -> None:
        versions = [make_data(70_000, seed) for seed in range(4)]
        ended = threading.Event()

        def overwrite() -> None:
            for i in range(60):
                store.put("f/a", as_parts(versions[i % 4], 65_536), overwrite=True)
            ended.set()

        def delete() -> None:
            while not ended.is_set():
                store.delete("f/a")

        def read() -> None:
            while not ended.is_set():
                try:
                    data = fetch(store, "f/a", 70_000)
                except BlobNotFoundError:
                    continue
                assert data in versions

        run_in_threads(overwrite, delete, read, read, read)
        store.put("f/a", as_parts(versions[0]), overwrite=True)
        assert self.peek(store, "f/a") == versions[0]


def _fetched(store: Store, key: str, size: int) -> bytes | None:
    try:
        return fetch(store, key, size)
    except BlobNotFoundError:
        return None


def _listed(store: Store) -> set[tuple[str, int]]:
    return {(info.key, info.size) for info in store.keys()}  # noqa: SIM118 - a Store is not a dict
