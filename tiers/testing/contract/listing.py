"""Rules for keys and listings."""

from __future__ import annotations

import time

import pytest

from ...errors import BlobCorruptError, BlobNotFoundError, InvalidKeyError, StoreError
from ...store import KeyInfo, Store, check_key
from .data import (
    BAD_KEYS,
    GOOD_KEYS,
    KEYS_COUNT_LARGE,
    as_parts,
    calls_by_key,
    fetch,
    list_keys,
    wait_until,
)
from .place import StorePlace

CLOCKS_APART_S_MAX = 900.0  # between the storage and this host: S3's limit


class ListingRules(StorePlace):
    """See ``StoreContract``."""

    # ---- keys of the map -----------------------------------------------------------------------------------

    def test_valid_keys_are_stored_listed_and_deleted(self, store: Store) -> None:
        for key in GOOD_KEYS:
            store.put(key, as_parts(b"1234"))
            assert self.peek(store, key) == b"1234", key
            assert fetch(store, key, 4) == b"1234"
            assert store.size(key) == 4
            assert [(info.key, info.size) for info in store.keys()] == [(key, 4)]  # noqa: SIM118 - not a dict
            store.delete(key)
            assert self.peek(store, key) is None

    def test_similar_keys_are_different_keys(self, store: Store) -> None:
        keys = ["a", "A", "a ", "aa", "a.", "%61", "b/a", "b/A", "é", "e\u0301"]
        for key in keys:
            store.put(key, as_parts(key.encode()))
        assert [self.peek(store, key) for key in keys] == [key.encode() for key in keys]

    def test_bad_keys_are_refused_everywhere(self, store: Store) -> None:
        for key in BAD_KEYS:
            for name, call in calls_by_key(store).items():
                try:
                    call(key)
                except InvalidKeyError:
                    continue
                pytest.fail(f"{name} accepts the key {key!r}; expected InvalidKeyError")
        assert list(store.keys()) == []

    def test_key_below_another_blob_is_stored_or_refused_but_never_mixed_up(self, store: Store) -> None:
        """A store may refuse to store both "a" and "a/b", but it never mixes them up."""
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
        # The storage's clock may differ, but by less than the offset of another time zone.
        assert all(abs(info.mtime - time.time()) < CLOCKS_APART_S_MAX for info in listed)
        assert all(check_key(info.key) for info in listed)

    def test_keys_prefix_is_a_string_prefix(self, store: Store) -> None:
        keys = ("a", "ab", "b/a", "b/c/d", "b/cd")
        for key in keys:
            store.put(key, as_parts(b"1"))
        below_b = ("b", "b/", "b/c", "b/c/", "b/c/d", "b/c/d/", "b//")
        for prefix in ("", "a", "ab", "abc", *below_b, "c", "/", "../", "."):
            assert list_keys(store, prefix) == [key for key in keys if key.startswith(prefix)], prefix

    def test_keys_lists_more_than_one_page(self, store: Store) -> None:
        expected = {f"f{i % 7}/{i:04d}" for i in range(KEYS_COUNT_LARGE)}
        for key in expected:
            self.plant(store, key, b"")
        assert list_keys(store) == sorted(expected)
        assert list_keys(store, "f") == sorted(expected)

    def test_keys_prefix_is_compared_literally(self, store: Store) -> None:
        """A prefix is not a pattern, is not unquoted, and is compared without folding case or composing accents."""
        keys = (
            "b/a",
            "b/A",
            "B/a",
            "b/a+c",
            "b/a c",
            "b/%61",
            "b/[a]",
            "b/*",
            "b/?",
            "b/a_",
            "b/é",
            "b/e\u0301",
            "b/\U0001f600",
        )
        for key in keys:
            self.plant(store, key, b"1")
        for prefix in (*keys, "b/", "b/[", "b/%", "b/a%20", "b%2F", "b/e", "%62/", "B", "?", "*"):
            assert list_keys(store, prefix) == sorted(key for key in keys if key.startswith(prefix)), prefix

    def test_mtime_changes_only_when_the_blob_is_replaced(self, store: Store) -> None:
        def mtime() -> float:
            (info,) = store.keys()
            return info.mtime

        def is_newer() -> bool:
            store.put("f/a", as_parts(b"newer"), overwrite=True)
            return mtime() != first

        store.put("f/a", as_parts(b"first"))
        first = mtime()
        store.put("f/a", as_parts(b"other"))
        fetch(store, "f/a", 5)
        assert mtime() == first
        wait_until(is_newer)  # storage clocks have steps, up to one second in S3
        assert mtime() > first

    def test_keys_streams_and_may_be_left_early(self, store: Store) -> None:
        for i in range(20):
            store.put(f"f{i % 3}/{i}", as_parts(b"1"))
        listing = store.keys()
        assert iter(listing) is listing
        assert next(listing).size == 1
        del listing
        assert len(list(store.keys())) == 20

    def test_keys_lists_lasting_blobs_and_ends_while_blobs_are_put_and_deleted(self, store: Store) -> None:
        stays = {f"f{i % 5}/{i}" for i in range(0, 40, 2)}
        goes = {f"f{i % 5}/{i}" for i in range(1, 40, 2)}
        for key in stays | goes:
            store.put(key, as_parts(b"1"))
        listed = set()
        for count, info in enumerate(store.keys()):
            listed.add(info.key)
            while goes:
                store.delete(goes.pop())
            if not info.key.startswith("new/"):  # a listing sorted by name yields these too, and would never end
                store.put(f"new/{info.key}", as_parts(b"1"))
            if count > 200:
                pytest.fail("a listing must end even if blobs are put meanwhile")
        assert stays <= listed

    def test_keys_lists_every_blob_while_the_reader_deletes_listed_blobs(self, store: Store) -> None:
        """A collector does so. Pages defined by position, not by key, would skip as many keys as were deleted."""
        stored = {f"f{i % 7}/{i:04d}" for i in range(KEYS_COUNT_LARGE)}
        for key in stored:
            self.plant(store, key, b"")
        listed = set()
        for info in store.keys():  # noqa: SIM118 - a Store is not a dict
            listed.add(info.key)
            if len(listed) <= KEYS_COUNT_LARGE - 1000:
                store.delete(info.key)
        assert listed == stored
