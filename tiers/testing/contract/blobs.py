"""Rules for single blobs: put, get_into, size and delete."""

from __future__ import annotations

import gc

import pytest

from ...errors import BlobCorruptError, BlobNotFoundError, StoreError
from ...store import Capabilities, Store, SupportsTail
from .data import (
    LARGE_BYTES,
    PARTS_COUNT_LARGE,
    SIZES_BYTES,
    GuardedParts,
    as_parts,
    fetch,
    list_keys,
    make_data,
)
from .place import StorePlace


class BlobRules(StorePlace):
    """See ``StoreContract``."""

    # ---- the place -----------------------------------------------------------------------------------------

    def test_is_a_store_with_capabilities(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert isinstance(store.capabilities, Capabilities)

    def test_fresh_place_is_empty(self, store: Store) -> None:
        assert list(store.keys()) == []
        assert store.size("a") is None

    # ---- put -----------------------------------------------------------------------------------------------

    def test_put_stores_exactly_the_bytes(self, store: Store) -> None:
        for size in SIZES_BYTES:
            data = make_data(size)
            store.put(f"f/{size}", as_parts(data))
            assert self.peek(store, f"f/{size}") == data, size
            store.delete(f"f/{size}")

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

    def test_put_takes_any_sequence_of_parts_and_does_not_change_the_parts(self, store: Store) -> None:
        parts = as_parts(b"12345", 1, 3)
        for i, given in enumerate((parts, tuple(parts))):
            for overwrite in (False, False, True):
                store.put(f"f/{i}", given, overwrite=overwrite)
            assert self.peek(store, f"f/{i}") == b"12345"
            fetched = [memoryview(bytearray(2)), memoryview(bytearray(3))]
            store.get_into(f"f/{i}", tuple(fetched) if i else fetched)
            assert b"".join(fetched) == b"12345"
        assert [bytes(part) for part in parts] == [b"1", b"23", b"45"]

    def test_put_copies_before_it_returns(self, store: Store) -> None:
        data = make_data((1 << 20) + 4096)
        source = GuardedParts(1 << 20, 4096, fill=data)
        store.put("a", source.parts)
        for part in source.parts:
            part[:] = bytes(len(part))
        assert self.peek(store, "a") == data

    def test_put_lets_go_of_the_parts(self, store: Store) -> None:
        source = GuardedParts(4096, 4096, fill=make_data(8192))
        store.put("a", source.lend())
        store.put("a", source.lend())  # an existing key takes another code path in a store
        store.put("a", source.lend(), overwrite=True)
        assert source.joined() == make_data(8192), "put wrote into its caller's parts"
        source.assert_only_parts_touched()
        source.assert_not_held()

    def test_failed_put_keeps_the_old_blob_and_adds_no_key(self, store: Store) -> None:
        """The second part cannot be read, because it was released before the put."""
        self.plant(store, "f/old", b"old")
        bad = memoryview(b"gone")
        bad.release()
        for key in ("f/old", "f/new"):
            with pytest.raises((StoreError, ValueError, TypeError)):  # depends on the code that reads the part
                store.put(key, [memoryview(b"good"), bad], overwrite=True)
        assert self.peek(store, "f/old") == b"old"
        assert list_keys(store) == ["f/old"]

    def test_put_keeps_an_existing_blob(self, store: Store) -> None:
        assert store.put("f/a", as_parts(b"old")) is True
        assert store.put("f/a", as_parts(b"newer and longer")) is False
        assert self.peek(store, "f/a") == b"old"

    def test_put_keeps_a_blob_that_another_writer_stored(self, store: Store) -> None:
        self.plant(store, "f/a", b"old")
        store.put("f/a", as_parts(b"newer and longer"))
        assert self.peek(store, "f/a") == b"old"

    def test_put_overwrite_replaces(self, store: Store) -> None:
        self.plant(store, "f/a", b"older and longer")
        for data in (b"old", b"", b"newest", b"newest"):
            assert store.put("f/a", as_parts(data), overwrite=True) is True
            assert self.peek(store, "f/a") == data
            assert store.size("f/a") == len(data)

    def test_put_overwrite_of_absent_key(self, store: Store) -> None:
        assert store.put("f/a", as_parts(b"new"), overwrite=True) is True
        assert self.peek(store, "f/a") == b"new"

    def test_put_leaves_only_its_own_key(self, store: Store) -> None:
        for overwrite in (False, False, True, True):
            store.put("f/a", as_parts(make_data(5000)), overwrite=overwrite)
        assert list_keys(store) == ["f/a"]

    # ---- get_into ------------------------------------------------------------------------------------------

    def test_get_into_fills_exactly_the_parts(self, store: Store) -> None:
        for size in SIZES_BYTES:
            data = make_data(size)
            self.plant(store, f"f/{size}", data)
            target = GuardedParts(size)
            store.get_into(f"f/{size}", target.parts)
            assert target.joined() == data, size
            target.assert_only_parts_touched()
            store.delete(f"f/{size}")

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

    def test_get_into_without_parts_succeeds_only_for_an_empty_blob(self, store: Store) -> None:
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
        store.get_into("a", target.lend())
        target.assert_not_held()

    def test_get_into_lets_go_of_the_parts_when_it_fails(self, store: Store) -> None:
        self.plant(store, "a", make_data(8191))
        target = GuardedParts(4096, 4096)
        for key in ("a", "absent"):
            with pytest.raises((BlobCorruptError, BlobNotFoundError)):
                store.get_into(key, target.lend())
        gc.collect()  # frees errors whose frames refer to the memory
        target.assert_not_held()

    def test_get_into_refuses_another_size(self, store: Store) -> None:
        for stored in (0, 1, 4095, 8191, 8193, 12287):
            self.plant(store, f"f/{stored}", make_data(stored))
            target = GuardedParts(4096, 4096)
            with pytest.raises(BlobCorruptError) as caught:
                store.get_into(f"f/{stored}", target.parts)
            assert caught.value.key == f"f/{stored}"
            assert not caught.value.retryable
            target.assert_only_parts_touched()

    def test_get_into_of_absent_key(self, store: Store) -> None:
        store.put("f/ab", as_parts(b"1"))
        for key in ("f/a", "f/abc", "g/a", "f/x/a", "a"):
            with pytest.raises(BlobNotFoundError) as caught:
                fetch(store, key, 1)
            assert caught.value.key == key

    def test_large_blob_is_stored_and_read_whole(self, store: Store) -> None:
        data = make_data(LARGE_BYTES)
        store.put("f/a", as_parts(data, 5 << 20))
        assert self.peek(store, "f/a") == data
        target = GuardedParts(4096, LARGE_BYTES - 4096)
        store.get_into("f/a", target.parts)
        assert target.joined() == data
        target.assert_only_parts_touched()

    def test_get_into_twice(self, store: Store) -> None:
        store.put("a", as_parts(b"1234"))
        assert [fetch(store, "a", 4), fetch(store, "a", 4)] == [b"1234", b"1234"]

    # ---- size, delete --------------------------------------------------------------------------------------

    def test_size(self, store: Store) -> None:
        for size in SIZES_BYTES:
            names = (f"f/put{size}", f"f/planted{size}")
            store.put(names[0], as_parts(make_data(size)))
            self.plant(store, names[1], make_data(size))
            assert [store.size(name) for name in names] == [size, size]
            for name in names:
                store.delete(name)

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

    def test_folder_of_other_keys_is_not_a_blob(self, store: Store) -> None:
        """ "f" and "f/b" are not stored, even if the storage keeps other keys in such folders."""
        keys = ["f/a", "f/b/c", "f/b/d"]
        for key in keys:
            store.put(key, as_parts(b"1"))
        for folder in ("f", "f/b"):
            assert store.size(folder) is None
            with pytest.raises((BlobNotFoundError, BlobCorruptError)):
                fetch(store, folder, 1)
            store.delete(folder)
            if isinstance(store, SupportsTail):
                try:
                    assert store.get_tail(folder, 1) is None
                except BlobCorruptError:
                    pass
        assert list_keys(store) == keys
        assert [fetch(store, key, 1) for key in keys] == [b"1"] * 3
