"""The rules of ``tiers.store`` as tests. Every store passes them; a store's author gets them by subclassing.

A backend's whole conformance test::

    class TestMyStore(StoreContract):
        def make_store(self) -> MyStore:
            return MyStore(self.tmp_path / "place")

        def reopen(self, store: MyStore) -> MyStore:
            return MyStore(self.tmp_path / "place")

        def plant(self, store: MyStore, key: str, data: bytes) -> None: ...  # without the store's own put

        def peek(self, store: MyStore, key: str) -> bytes | None: ...  # without the store's own get_into

``plant`` and ``peek`` go behind the store's back, so that a put and a get wrong in the same way cannot agree. What
a store can do beyond the six methods is asked for with isinstance, and tested where it is there.

In a project of its own, put ``pytest.register_assert_rewrite("tiers.testing.contract")`` into ``conftest.py``, or
a failing rule prints a bare AssertionError.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tiers.errors import BlobCorruptError, BlobNotFoundError, InvalidKeyError, StoreClosedError, StoreError
from tiers.store import (
    Capabilities,
    KeyInfo,
    Store,
    SupportsDeleteMany,
    SupportsGetMany,
    SupportsPieces,
    SupportsQuarantine,
    SupportsSizeMany,
    SupportsTail,
    check_key,
)

SIZES_BYTES = (0, 1, 4095, 4096, 4097, (1 << 20) + 4096)
WAIT_S_MAX = 60.0  # a thread of a test that runs longer hangs
PARTS_COUNT_LARGE = 1500  # more than IOV_MAX (1,024), where a vectored call must be split

GOOD_KEYS = (
    "a",
    "a.bin",
    "a b+c%2Fd?e#f&g=h:i*j'k\"l~m",
    "folder/sub folder/name.bin",
    "m_0123456789ab_r0/abc/de_g0/" + "f" * 64 + ".bin",
    "ключ/é/鍵",
    "n" * 255,
    "/".join(["d" * 203] * 4) + "/" + "n" * 208,  # 1,024 bytes
    "tail-dot./..x.".replace("..x", "x.."),
)

BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    ".hidden",
    "a/.hidden/b",
    "a\\b",
    "a\x00b",
    "a\nb",
    "a\x7fb",
    "n" * 256,
    "é" * 128,  # 256 bytes
    "d/" * 512 + "n",  # 1,025 bytes
    "\ud800",  # a lone surrogate has no UTF-8
)


def make_data(size: int, seed: int = 0) -> bytes:
    """``size`` reproducible random bytes."""
    return random.Random(seed).randbytes(size)


def as_parts(data: bytes, *cuts: int) -> list[memoryview]:
    """``data`` cut at the given offsets, without a copy."""
    edges = [0, *cuts, len(data)]
    return [memoryview(data)[start:end] for start, end in pairwise(edges)]


def fetch(store: Store, key: str, size: int) -> bytes:
    """The blob of ``size`` bytes under ``key``, through ``get_into``."""
    buffer = bytearray(size)
    store.get_into(key, [memoryview(buffer)])
    return bytes(buffer)


def list_keys(store: Store, prefix: str = "") -> list[str]:
    """The listed keys, sorted; a key that is listed twice is there twice."""
    return sorted(info.key for info in store.keys(prefix))


def _assert_in_order(pieces: Sequence[tuple[int, int]], part_ends: Sequence[int]) -> None:
    """Pieces (start, end) cover the parts without a gap, and none spans two of these."""
    edges = [0, *(end for _, end in pieces)]
    assert [start for start, _ in pieces] == edges[:-1]
    assert set(part_ends) <= set(edges)


class GuardedParts:
    """Writable parts inside one larger mapping, as slots lie in a region, with guard bytes around each."""

    GUARD = b"\xa5" * 64

    def __init__(self, *sizes: int, fill: bytes = b"") -> None:
        self.mapping = mmap.mmap(-1, sum(sizes) + len(self.GUARD) * (len(sizes) + 1))
        self.mapping.write(self.GUARD)
        whole = memoryview(self.mapping)
        self.parts: list[memoryview] = []
        for size in sizes:
            start = self.mapping.tell()
            self.parts.append(whole[start : start + size])
            self.mapping.seek(size, 1)
            self.mapping.write(self.GUARD)
        whole.release()
        for part in self.parts if fill else ():
            part[:] = fill[: len(part)]
            fill = fill[len(part) :]

    def joined(self) -> bytes:
        """The parts' bytes."""
        return b"".join(self.parts)

    def assert_only_parts_touched(self) -> None:
        """Every guard byte is as it was."""
        guard_size = len(self.GUARD)
        self.mapping.seek(0)
        for size in [*map(len, self.parts), 0]:
            assert self.mapping.read(guard_size) == self.GUARD, "bytes outside the parts were written"
            self.mapping.seek(size, 1)

    def assert_not_held(self) -> None:
        """Nobody holds the memory any more: a mapping with a live view of it refuses to close."""
        for part in self.parts:
            part.release()
        self.mapping.close()


def run_in_threads(*calls: Callable[[], object]) -> None:
    """Run the calls at once, each in its own thread; raise what the first failing one raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait(WAIT_S_MAX)
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(run, call) for call in calls]:
            future.result(WAIT_S_MAX)


class StoreContract(ABC):
    """Subclass it, name the subclass ``Test…``, fill in the four methods. Each test has a fresh place.

    Attributes:
        tmp_path: an empty folder of the running test's own, for places on a file system.
    """

    tmp_path: Path

    @abstractmethod
    def make_store(self) -> Store:
        """A store on a fresh, empty place. Called once in a test."""

    def reopen(self, store: Store) -> Store:
        """A second store on the place of ``store``. Called only where ``capabilities.shared``."""
        raise NotImplementedError("a store with capabilities.shared needs reopen() in its contract test")

    @abstractmethod
    def plant(self, store: Store, key: str, data: bytes) -> None:
        """Put a blob behind the store's back."""

    @abstractmethod
    def peek(self, store: Store, key: str) -> bytes | None:
        """Read a blob behind the store's back; None where there is none."""

    @pytest.fixture(autouse=True)
    def _use_tmp_path(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    @pytest.fixture
    def store(self, _use_tmp_path: None) -> Iterator[Store]:
        store = self.make_store()
        yield store
        store.close()

    # ---- the place -----------------------------------------------------------------------------------------

    def test_is_a_store_with_capabilities(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert isinstance(store.capabilities, Capabilities)

    def test_fresh_place_is_empty(self, store: Store) -> None:
        assert list(store.keys()) == []
        assert store.size("a") is None

    def test_second_store_sees_what_the_first_put(self, store: Store) -> None:
        if not store.capabilities.shared:
            pytest.skip("the store says that nobody else sees what it stores")
        store.put("f/a", as_parts(b"from the first"))
        second = self.reopen(store)
        try:
            assert fetch(second, "f/a", 14) == b"from the first"
            second.put("f/a", as_parts(b"from the other"), overwrite=True)
            second.put("b", as_parts(b"b"))
        finally:
            second.close()
        assert fetch(store, "f/a", 14) == b"from the other"
        assert list_keys(store) == ["b", "f/a"]

    def test_blobs_outlive_the_store(self, store: Store) -> None:
        if not store.capabilities.shared:
            pytest.skip("the store says that nobody else sees what it stores")
        store.put("f/a", as_parts(b"1234"))
        store.close()
        second = self.reopen(store)
        try:
            assert fetch(second, "f/a", 4) == b"1234"
        finally:
            second.close()

    # ---- put -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES_BYTES)
    def test_put_stores_exactly_the_bytes(self, store: Store, size: int) -> None:
        data = make_data(size)
        store.put("f/a", as_parts(data))
        assert self.peek(store, "f/a") == data

    def test_put_joins_parts_in_order(self, store: Store) -> None:
        data = make_data(3 * 4096 + 5)
        source = GuardedParts(4096, 0, 1, 8192, 4, fill=data)
        store.put("a", source.parts)
        assert self.peek(store, "a") == data

    def test_put_takes_empty_parts(self, store: Store) -> None:
        store.put("none", [])
        store.put("empty", as_parts(b"", 0, 0))
        store.put("between", as_parts(b"ab", 0, 1, 1))
        assert [self.peek(store, key) for key in ("none", "empty", "between")] == [b"", b"", b"ab"]

    def test_put_takes_many_parts(self, store: Store) -> None:
        data = make_data(3 * PARTS_COUNT_LARGE)
        store.put("a", as_parts(data, *range(3, len(data), 3)))
        assert self.peek(store, "a") == data

    def test_put_takes_read_only_and_signed_bytes(self, store: Store) -> None:
        store.put("a", [memoryview(b"read-only"), memoryview(bytearray(b"\xff\x01")).cast("b")])
        assert self.peek(store, "a") == b"read-only\xff\x01"

    def test_put_copies_before_it_returns(self, store: Store) -> None:
        data = make_data((1 << 20) + 4096)
        source = GuardedParts(1 << 20, 4096, fill=data)
        store.put("a", source.parts)
        for part in source.parts:
            part[:] = bytes(len(part))
        assert self.peek(store, "a") == data

    def test_put_lets_go_of_the_parts(self, store: Store) -> None:
        source = GuardedParts(4096, 4096, fill=make_data(8192))
        store.put("a", source.parts)
        store.put("a", source.parts)  # already there is a way of its own through a store
        store.put("a", source.parts, overwrite=True)
        source.assert_only_parts_touched()
        source.assert_not_held()

    def test_put_keeps_what_is_there(self, store: Store) -> None:
        assert store.put("f/a", as_parts(b"old")) is True
        assert store.put("f/a", as_parts(b"newer and longer")) is False
        assert self.peek(store, "f/a") == b"old"

    def test_put_keeps_what_somebody_else_put(self, store: Store) -> None:
        self.plant(store, "f/a", b"old")
        store.put("f/a", as_parts(b"newer and longer"))
        assert self.peek(store, "f/a") == b"old"

    def test_put_overwrite_replaces(self, store: Store) -> None:
        self.plant(store, "f/a", b"older and longer")
        for data in (b"old", b"", b"newest", b"newest"):
            store.put("f/a", as_parts(data), overwrite=True)
            assert self.peek(store, "f/a") == data
            assert store.size("f/a") == len(data)

    def test_put_overwrite_of_absent_key(self, store: Store) -> None:
        store.put("f/a", as_parts(b"new"), overwrite=True)
        assert self.peek(store, "f/a") == b"new"

    def test_put_leaves_nothing_else(self, store: Store) -> None:
        for overwrite in (False, False, True, True):
            store.put("f/a", as_parts(make_data(5000)), overwrite=overwrite)
        assert list_keys(store) == ["f/a"]

    # ---- get_into ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES_BYTES)
    def test_get_into_fills_exactly_the_parts(self, store: Store, size: int) -> None:
        data = make_data(size)
        self.plant(store, "f/a", data)
        target = GuardedParts(size)
        store.get_into("f/a", target.parts)
        assert target.joined() == data
        target.assert_only_parts_touched()

    def test_get_into_fills_parts_in_order(self, store: Store) -> None:
        data = make_data((1 << 20) + 4096)
        self.plant(store, "a", data)
        target = GuardedParts(4097, 0, (1 << 20) - 4097, 1, 4095, 0)
        store.get_into("a", target.parts)
        assert target.joined() == data
        target.assert_only_parts_touched()

    def test_get_into_takes_many_parts(self, store: Store) -> None:
        data = make_data(3 * PARTS_COUNT_LARGE)
        self.plant(store, "a", data)
        target = GuardedParts(*[3] * PARTS_COUNT_LARGE)
        store.get_into("a", target.parts)
        assert target.joined() == data
        target.assert_only_parts_touched()

    def test_get_into_takes_signed_bytes(self, store: Store) -> None:
        self.plant(store, "a", b"\xff\x01")
        buffer = bytearray(2)
        store.get_into("a", [memoryview(buffer).cast("b")])
        assert buffer == b"\xff\x01"

    def test_get_into_no_parts(self, store: Store) -> None:
        self.plant(store, "empty", b"")
        store.get_into("empty", [])
        self.plant(store, "a", b"a")
        with pytest.raises(BlobCorruptError):
            store.get_into("a", [])
        with pytest.raises(BlobNotFoundError):
            store.get_into("absent", [])

    def test_get_into_lets_go_of_the_parts(self, store: Store) -> None:
        self.plant(store, "a", make_data(8192))
        target = GuardedParts(4096, 4096)
        store.get_into("a", target.parts)
        target.assert_not_held()

    @pytest.mark.parametrize("stored", [0, 1, 4095, 8191, 8193, 12287])
    def test_get_into_refuses_another_size(self, store: Store, stored: int) -> None:
        self.plant(store, "f/a", make_data(stored))
        target = GuardedParts(4096, 4096)
        with pytest.raises(BlobCorruptError) as caught:
            store.get_into("f/a", target.parts)
        assert caught.value.key == "f/a"
        assert not caught.value.retryable
        target.assert_only_parts_touched()

    def test_get_into_of_absent_key(self, store: Store) -> None:
        store.put("f/ab", as_parts(b"1"))
        for key in ("f/a", "f/abc", "g/a", "f/x/a", "a"):
            with pytest.raises(BlobNotFoundError) as caught:
                fetch(store, key, 1)
            assert caught.value.key == key

    def test_get_into_twice(self, store: Store) -> None:
        store.put("a", as_parts(b"1234"))
        assert [fetch(store, "a", 4), fetch(store, "a", 4)] == [b"1234", b"1234"]

    # ---- size, delete --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES_BYTES)
    def test_size(self, store: Store, size: int) -> None:
        store.put("f/put", as_parts(make_data(size)))
        self.plant(store, "f/planted", make_data(size))
        assert store.size("f/put") == size
        assert store.size("f/planted") == size

    def test_size_of_absent_key(self, store: Store) -> None:
        store.put("f/ab", as_parts(b"1"))
        assert [store.size(key) for key in ("f/a", "f/abc", "g/a", "f/x/a", "a")] == [None] * 5

    def test_delete(self, store: Store) -> None:
        self.plant(store, "f/a", b"1")
        store.put("f/b", as_parts(b"2"))
        store.delete("f/a")
        assert self.peek(store, "f/a") is None
        assert store.size("f/a") is None
        with pytest.raises(BlobNotFoundError):
            fetch(store, "f/a", 1)
        assert list_keys(store) == ["f/b"]

    def test_delete_of_absent_key_is_success(self, store: Store) -> None:
        store.put("f/a", as_parts(b"1"))
        for key in ("f/b", "g/a", "f/a", "f/a"):
            store.delete(key)
        assert self.peek(store, "f/a") is None

    def test_deleted_key_can_be_put_again(self, store: Store) -> None:
        for data in (b"first", b"second"):
            store.put("f/a", as_parts(data))
            assert self.peek(store, "f/a") == data
            store.delete("f/a")

    # ---- keys of the map -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", GOOD_KEYS)
    def test_good_keys(self, store: Store, key: str) -> None:
        store.put(key, as_parts(b"1234"))
        assert self.peek(store, key) == b"1234"
        assert fetch(store, key, 4) == b"1234"
        assert store.size(key) == 4
        assert [(info.key, info.size) for info in store.keys()] == [(key, 4)]  # noqa: SIM118 - no dict
        store.delete(key)
        assert self.peek(store, key) is None

    def test_alike_keys_are_different_keys(self, store: Store) -> None:
        keys = ["a", "A", "a ", "aa", "a.", "%61", "b/a", "b/A", "é", "e\u0301"]
        for key in keys:
            store.put(key, as_parts(key.encode()))
        assert [self.peek(store, key) for key in keys] == [key.encode() for key in keys]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused_everywhere(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, as_parts(b"1")),
            lambda: store.put(key, as_parts(b"1"), overwrite=True),
            lambda: fetch(store, key, 1),
            lambda: store.size(key),
            lambda: store.delete(key),
        ]
        if isinstance(store, SupportsTail):
            calls.append(lambda: store.get_tail(key, 1))
        if isinstance(store, SupportsQuarantine):
            calls.append(lambda: store.quarantine(key))
        for call in calls:
            with pytest.raises(InvalidKeyError):
                call()
        assert list(store.keys()) == []

    def test_blob_under_a_blob(self, store: Store) -> None:
        """Whether "a" and "a/b" can be stored together is the store's affair; it never mixes them up."""
        store.put("a", as_parts(b"1234"))
        try:
            store.put("a/b", as_parts(b"56"))
        except StoreError:
            assert store.size("a/b") is None
            with pytest.raises((BlobNotFoundError, BlobCorruptError)):
                fetch(store, "a/b", 2)
        else:
            assert fetch(store, "a/b", 2) == b"56"
        assert fetch(store, "a", 4) == b"1234"

    # ---- keys() --------------------------------------------------------------------------------------------

    def test_keys_lists_every_blob_once(self, store: Store) -> None:
        sizes = {"a": 1, "ab": 0, "b/a": 5000, "b/c/d": 3, "b/cd": 4}
        for key, size in sizes.items():
            (self.plant(store, key, bytes(size)) if size % 2 else store.put(key, as_parts(bytes(size))))
        listed = list(store.keys())
        assert all(isinstance(info, KeyInfo) for info in listed)
        assert sorted((info.key, info.size) for info in listed) == sorted(sizes.items())
        # A day of slack: the storage's clock need not be ours.
        assert all(abs(info.mtime - time.time()) < 86_400 for info in listed)
        assert all(check_key(info.key) for info in listed)

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            ("", {"a", "ab", "b/a", "b/c/d", "b/cd"}),
            ("a", {"a", "ab"}),
            ("ab", {"ab"}),
            ("abc", set()),
            ("b", {"b/a", "b/c/d", "b/cd"}),
            ("b/", {"b/a", "b/c/d", "b/cd"}),
            ("b/c", {"b/c/d", "b/cd"}),
            ("b/c/", {"b/c/d"}),
            ("b/c/d", {"b/c/d"}),
            ("b/c/d/", set()),
            ("c", set()),
            ("/", set()),
            ("../", set()),
            ("b//", set()),
            (".", set()),
        ],
    )
    def test_keys_prefix_is_a_string_prefix(self, store: Store, prefix: str, expected: set[str]) -> None:
        for key in ("a", "ab", "b/a", "b/c/d", "b/cd"):
            store.put(key, as_parts(b"1"))
        assert list_keys(store, prefix) == sorted(expected)

    def test_keys_lists_more_than_one_page(self, store: Store) -> None:
        expected = {f"f{i % 7}/{i:04d}" for i in range(1100)}  # S3 pages at 1,000
        for key in expected:
            self.plant(store, key, b"")
        assert list_keys(store) == sorted(expected)

    def test_keys_streams_and_may_be_left_early(self, store: Store) -> None:
        for i in range(20):
            store.put(f"f{i % 3}/{i}", as_parts(b"1"))
        listing = store.keys()
        assert iter(listing) is listing
        assert next(listing).size == 1
        del listing
        assert len(list(store.keys())) == 20

    def test_keys_while_blobs_come_and_go(self, store: Store) -> None:
        stays = {f"f{i % 5}/{i}" for i in range(0, 40, 2)}
        goes = {f"f{i % 5}/{i}" for i in range(1, 40, 2)}
        for key in stays | goes:
            store.put(key, as_parts(b"1"))
        listed = set()
        for info in store.keys():  # noqa: SIM118 - a Store is no dict
            listed.add(info.key)
            for key in goes:
                store.delete(key)
            store.put(f"new/{info.key}", as_parts(b"1"))
            if len(listed) > 200:
                pytest.fail("a listing must end although blobs are put meanwhile")
        assert stays <= listed

    # ---- close ---------------------------------------------------------------------------------------------

    def test_close_twice_then_every_call_is_refused(self, store: Store) -> None:
        store.put("a", as_parts(b"1"))
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.put("a", as_parts(b"1")),
            lambda: store.put("b", as_parts(b"1"), overwrite=True),
            lambda: fetch(store, "a", 1),
            lambda: store.size("a"),
            lambda: store.delete("a"),
            lambda: list(store.keys()),
        ]
        if isinstance(store, SupportsTail):
            calls.append(lambda: store.get_tail("a", 1))
        if isinstance(store, SupportsQuarantine):
            calls.append(lambda: store.quarantine("a"))
        if isinstance(store, SupportsSizeMany):
            calls.append(lambda: store.size_many(["a"]))
        if isinstance(store, SupportsDeleteMany):
            calls.append(lambda: store.delete_many(["a"]))
        if isinstance(store, SupportsGetMany):
            calls.append(lambda: store.get_many_into([("a", [memoryview(bytearray(1))])]))
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()

    # ---- many threads --------------------------------------------------------------------------------------

    def test_writers_of_one_key_leave_one_whole_blob(self, store: Store) -> None:
        versions = [make_data(70_000, seed) for seed in range(8)]
        for round_ in range(5):
            key = f"f{round_}/a"
            seen: list[bytes] = []

            def write(data: bytes, key: str = key, seen: list[bytes] = seen) -> None:
                store.put(key, as_parts(data, 65_536))
                seen.append(fetch(store, key, len(data)))

            run_in_threads(*[lambda data=data: write(data) for data in versions])
            assert set(seen) <= set(versions)
            if store.capabilities.exclusive_create:
                # Whoever returned from put saw the winner; nobody replaced it later.
                assert len(set(seen)) == 1
                assert self.peek(store, key) == seen[0]
            else:
                assert self.peek(store, key) in versions

    def test_writers_of_many_keys(self, store: Store) -> None:
        def write(writer: int) -> None:
            for i in range(20):
                store.put(f"f{i % 4}/{writer}/{i}", as_parts(make_data(5000, seed=writer * 100 + i), 4096))

        run_in_threads(*[lambda writer=writer: write(writer) for writer in range(8)])
        for writer in range(8):
            for i in range(20):
                assert self.peek(store, f"f{i % 4}/{writer}/{i}") == make_data(5000, seed=writer * 100 + i)

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

    # ---- optional extras -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [*SIZES_BYTES, (4 << 20) + 1])
    def test_pieces(self, store: Store, size: int) -> None:
        if not isinstance(store, SupportsPieces):
            pytest.skip("no SupportsPieces")
        data = make_data(size)
        cut = size // 3
        blob = GuardedParts(cut, size - cut, 8, fill=data + bytes(8))
        looked: list[tuple[int, int]] = []  # start, end
        end = bytearray()

        def fill_the_end(offset: int, piece: memoryview) -> None:
            looked.append((offset, offset + piece.nbytes))
            if offset < size:  # bytes that change before they are written are stored as they are then
                piece[:] = bytes(byte ^ 1 for byte in piece[:1]) + piece[1:]
            else:
                blob.parts[2][:] = b"the end."

        assert store.put_pieces("f/a", blob.parts, fill_the_end)
        _assert_in_order(looked, (cut, size, size + 8))
        blob.assert_only_parts_touched()
        assert self.peek(store, "f/a") == blob.joined()
        assert blob.joined().endswith(b"the end.")
        assert not store.put_pieces("f/a", as_parts(b"other"), lambda *_: None)
        assert self.peek(store, "f/a") == blob.joined()

        back = GuardedParts(size - cut, cut, 8)
        looked.clear()

        def see(offset: int, piece: memoryview) -> None:
            looked.append((offset, offset + piece.nbytes))
            end.extend(piece)

        store.get_pieces_into("f/a", back.parts, see)
        _assert_in_order(looked, (size - cut, size, size + 8))
        assert bytes(end) == back.joined() == blob.joined()
        back.assert_only_parts_touched()

        assert store.put_pieces("f/a", as_parts(b"other"), lambda *_: None, overwrite=True)
        assert self.peek(store, "f/a") == b"other"
        with pytest.raises(BlobCorruptError):
            store.get_pieces_into("f/a", GuardedParts(4).parts, see)
        with pytest.raises(BlobNotFoundError):
            store.get_pieces_into("f/absent", GuardedParts(4).parts, see)

    def test_what_a_look_raises_comes_out_and_nothing_is_published(self, store: Store) -> None:
        if not isinstance(store, SupportsPieces):
            pytest.skip("no SupportsPieces")

        def refuse(_offset: int, _piece: memoryview) -> None:
            raise ValueError("seen enough")

        with pytest.raises(ValueError, match="seen enough"):
            store.put_pieces("f/a", as_parts(b"data"), refuse)
        assert self.peek(store, "f/a") is None
        assert list_keys(store) == []
        self.plant(store, "f/a", b"old")
        with pytest.raises(ValueError, match="seen enough"):
            store.put_pieces("f/a", as_parts(b"data"), refuse, overwrite=True)
        assert self.peek(store, "f/a") == b"old"

    @pytest.mark.parametrize("size", SIZES_BYTES)
    def test_get_tail(self, store: Store, size: int) -> None:
        if not isinstance(store, SupportsTail):
            pytest.skip("no SupportsTail")
        data = make_data(size)
        self.plant(store, "f/a", data)
        for length in (0, 1, 4096, size, size + 1):
            assert store.get_tail("f/a", length) == (size, data[size - min(length, size) :])
        assert store.get_tail("f/absent", 4096) is None
        assert store.get_tail("g/absent", 0) is None

    def test_quarantine(self, store: Store) -> None:
        if not isinstance(store, SupportsQuarantine):
            pytest.skip("no SupportsQuarantine")
        self.plant(store, "f/bad", b"bad")
        store.put("f/good", as_parts(b"good"))
        for _ in range(2):  # twice is once
            store.quarantine("f/bad")
            assert self.peek(store, "f/bad") is None
            assert store.size("f/bad") is None
        store.quarantine("g/absent")
        assert list_keys(store) == ["f/good"]
        # Healed by the next put, and bad again: the second one must not meet the first one's place.
        store.put("f/bad", as_parts(b"healed"))
        assert self.peek(store, "f/bad") == b"healed"
        store.quarantine("f/bad")
        assert self.peek(store, "f/bad") is None

    def test_size_many(self, store: Store) -> None:
        if not isinstance(store, SupportsSizeMany):
            pytest.skip("no SupportsSizeMany")
        store.put("f/a", as_parts(b"123"))
        self.plant(store, "b", b"")
        *answers, bad = store.size_many(["absent", "f/a", "b", "f/absent", "f/a", "a//b"])
        assert answers == [None, 3, 0, None, 3]
        assert isinstance(bad, InvalidKeyError)
        assert store.size_many([]) == []

    def test_delete_many(self, store: Store) -> None:
        if not isinstance(store, SupportsDeleteMany):
            pytest.skip("no SupportsDeleteMany")
        for key in ("f/a", "b", "f/c"):
            self.plant(store, key, b"1")
        *answers, bad = store.delete_many(["absent", "f/a", "b", "f/absent", "f/a", "a//b"])
        assert answers == [None] * 5
        assert isinstance(bad, InvalidKeyError)
        assert store.delete_many([]) == []
        assert list_keys(store) == ["f/c"]

    def test_get_many_into(self, store: Store) -> None:
        if not isinstance(store, SupportsGetMany):
            pytest.skip("no SupportsGetMany")
        first, second = make_data(5000), make_data(4097, seed=1)
        self.plant(store, "f/a", first)
        self.plant(store, "b", second)
        targets = [
            GuardedParts(4096, 904),
            GuardedParts(1),
            GuardedParts(4097),
            GuardedParts(8),
            GuardedParts(1),
        ]
        keys = ["f/a", "absent", "b", "f/a", "a//b"]
        requests: Sequence[tuple[str, Sequence[memoryview]]] = [
            (key, target.parts) for key, target in zip(keys, targets, strict=True)
        ]
        answers = store.get_many_into(requests)
        assert answers[0] is None
        assert targets[0].joined() == first
        assert isinstance(answers[1], BlobNotFoundError)
        assert answers[2] is None
        assert targets[2].joined() == second
        assert isinstance(answers[3], BlobCorruptError)
        assert isinstance(answers[4], InvalidKeyError)
        for target in targets:
            target.assert_only_parts_touched()
        assert store.get_many_into([]) == []
