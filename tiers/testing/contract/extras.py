"""Rules for the optional protocols of a store; skipped for protocols that it does not support."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from ...errors import BlobCorruptError, BlobNotFoundError, InvalidKeyError
from ...store import (
    KeepsFiles,
    Store,
    SupportsAges,
    SupportsPieces,
    SupportsSpace,
    SupportsTail,
    SupportsTouch,
)
from .data import (
    KEYS_COUNT_LARGE,
    SIZES_BYTES,
    GuardedParts,
    as_parts,
    fetch,
    list_keys,
    make_data,
    wait_until,
)
from .place import StorePlace


class ExtraRules(StorePlace):
    """See ``StoreContract``."""

    # ---- one blob ------------------------------------------------------------------------------------------

    def test_put_pieces_and_get_pieces_into_pass_every_piece_in_order(self, store: Store) -> None:
        if not isinstance(store, SupportsPieces):
            pytest.skip("no SupportsPieces")
        for size in (*SIZES_BYTES, (4 << 20) + 1):
            self._check_pieces(store, f"f/{size}", size)
            store.delete(f"f/{size}")
        with pytest.raises(BlobNotFoundError):
            store.get_pieces_into("f/absent", GuardedParts(4).parts, lambda *_: None)

    def _check_pieces(self, store: Any, key: str, size: int) -> None:
        data = make_data(size)
        cut = size // 3
        blob = GuardedParts(cut, size - cut, 8, fill=data + bytes(8))
        looked: list[tuple[int, int]] = []  # start, end
        end = bytearray()

        def fill_the_end(offset: int, piece: memoryview) -> None:
            looked.append((offset, offset + piece.nbytes))
            if offset < size:  # bytes that ``look`` changes are stored with the change
                piece[:] = bytes(byte ^ 1 for byte in piece[:1]) + piece[1:]
            else:
                blob.parts[2][:] = b"the end."

        assert store.put_pieces(key, blob.parts, fill_the_end)
        _assert_in_order(looked, (cut, size, size + 8))
        blob.assert_only_parts_touched()
        assert self.peek(store, key) == blob.joined()
        assert blob.joined().endswith(b"the end.")
        assert not store.put_pieces(key, as_parts(b"other"), lambda *_: None)
        assert self.peek(store, key) == blob.joined()

        back = GuardedParts(size - cut, cut, 8)
        looked.clear()

        def see(offset: int, piece: memoryview) -> None:
            looked.append((offset, offset + piece.nbytes))
            end.extend(piece)

        store.get_pieces_into(key, back.parts, see)
        _assert_in_order(looked, (size - cut, size, size + 8))
        assert bytes(end) == back.joined() == blob.joined()
        back.assert_only_parts_touched()

        assert store.put_pieces(key, as_parts(b"other"), lambda *_: None, overwrite=True)
        assert self.peek(store, key) == b"other"
        with pytest.raises(BlobCorruptError):
            store.get_pieces_into(key, GuardedParts(4).parts, see)

    def test_put_pieces_and_get_pieces_into_let_go_of_the_parts(self, store: Store) -> None:
        if not isinstance(store, SupportsPieces):
            pytest.skip("no SupportsPieces")
        source, target = GuardedParts(4096, 4096, fill=make_data(8192)), GuardedParts(4096, 4096)
        store.put_pieces("a", source.lend(), lambda *_: None)
        store.get_pieces_into("a", target.lend(), lambda *_: None)
        assert source.joined() == target.joined() == make_data(8192)
        source.assert_not_held()
        target.assert_not_held()

    def test_exception_of_a_look_callback_is_raised_and_nothing_is_published(self, store: Store) -> None:
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

    def test_get_tail(self, store: Store) -> None:
        if not isinstance(store, SupportsTail):
            pytest.skip("no SupportsTail")
        for size in SIZES_BYTES:
            data = make_data(size)
            self.plant(store, f"f/{size}", data)
            for length in (0, 1, 4096, size, size + 1):
                assert store.get_tail(f"f/{size}", length) == (size, data[size - min(length, size) :])
        assert store.get_tail("f/absent", 4096) is None
        assert store.get_tail("g/absent", 0) is None

    def test_touch_renews_the_mtime_and_changes_nothing_else(self, store: Store) -> None:
        if not isinstance(store, SupportsTouch):
            pytest.skip("no SupportsTouch")
        self.plant(store, "f/a", b"1234")
        self.plant(store, "f/ab", b"5")

        def mtimes() -> dict[str, float]:
            return {info.key: info.mtime for info in store.keys()}  # noqa: SIM118 - a Store is not a dict

        def is_newer() -> bool:
            store.touch("f/a")
            return mtimes()["f/a"] != before["f/a"]

        before = mtimes()
        wait_until(is_newer)
        after = mtimes()
        assert after["f/a"] > before["f/a"]
        assert after["f/ab"] == before["f/ab"]
        for absent in ("f/absent", "g/absent", "f"):
            store.touch(absent)
            assert store.size(absent) is None
        assert [self.peek(store, key) for key in ("f/a", "f/ab")] == [b"1234", b"5"]
        assert list_keys(store) == ["f/a", "f/ab"]

    def test_put_aged_keeps_an_age_and_replaces(self, store: Store) -> None:
        if not isinstance(store, SupportsAges):
            pytest.skip("no SupportsAges")
        self.plant(store, "f/a", b"before")
        used_at = time.time() - 7 * 86_400.25
        store.put_aged("f/a", as_parts(b"1234"), used_at=used_at)
        assert self.peek(store, "f/a") == b"1234"
        (info,) = store.keys()
        assert abs(info.mtime - used_at) < 1e-3
        store.put("f/a", as_parts(b"5"), overwrite=True)
        (info,) = store.keys()
        assert info.mtime > used_at + 86_400

    # ---- the place -----------------------------------------------------------------------------------------

    def test_sweep_removes_files_of_the_store_but_no_blob(self, store: Store) -> None:
        if not isinstance(store, KeepsFiles):
            pytest.skip("no KeepsFiles")
        store.put("f/put", as_parts(b"1234"))
        self.plant(store, "f/planted", b"5")
        for remove in (False, True, True):
            assert store.sweep(remove=remove) == 0
        assert list_keys(store) == ["f/planted", "f/put"]
        assert [self.peek(store, key) for key in ("f/planted", "f/put")] == [b"5", b"1234"]

    def test_folders(self, store: Store) -> None:
        assert store.folders() == []
        for key in ("f/a", "f/b", "g/h/c", "d"):
            store.put(key, as_parts(b"1"))
        self.plant(store, "planted/e", b"2")
        assert sorted(store.folders()) == ["f", "g", "planted"]

    def test_space(self, store: Store) -> None:
        if not isinstance(store, SupportsSpace):
            pytest.skip("no SupportsSpace")
        assert (space := store.space()) is not None
        assert 0 < space[0] <= space[1]

    def test_prepare(self, store: Store) -> None:
        for _ in range(2):
            store.prepare()
        assert list_keys(store) == []
        store.put("a", as_parts(b"1"))
        store.prepare()
        assert fetch(store, "a", 1) == b"1"

    # ---- many blobs ----------------------------------------------------------------------------------------

    def test_size_many(self, store: Store) -> None:
        store.put("f/a", as_parts(b"123"))
        self.plant(store, "b", b"")
        *answers, bad = store.size_many(["absent", "f/a", "b", "f/absent", "f/a", "a//b"])
        assert answers == [None, 3, 0, None, 3]
        assert isinstance(bad, InvalidKeyError)
        assert store.size_many([]) == []

    def test_size_many_of_more_keys_than_a_request_takes(self, store: Store) -> None:
        sizes = {f"f/{i:04d}": 1 + i % 3 for i in range(0, KEYS_COUNT_LARGE, 7)}
        for key, size in sizes.items():
            self.plant(store, key, bytes(size))
        asked = [f"f/{i:04d}" for i in reversed(range(KEYS_COUNT_LARGE))]
        assert store.size_many(asked) == [sizes.get(key) for key in asked]

    def test_delete_many(self, store: Store) -> None:
        for key in ("f/a", "b", "f/c"):
            self.plant(store, key, b"1")
        *answers, bad = store.delete_many(["absent", "f/a", "b", "f/absent", "f/a", "a//b"])
        assert answers == [None] * 5
        assert isinstance(bad, InvalidKeyError)
        assert store.delete_many([]) == []
        assert list_keys(store) == ["f/c"]

    def test_delete_many_of_more_keys_than_a_request_takes(self, store: Store) -> None:
        keys = [f"f/{i:04d}" for i in range(KEYS_COUNT_LARGE)]
        for key in (*keys[::50], keys[-1], "f/00", "f/00000"):
            self.plant(store, key, b"1")
        assert store.delete_many(keys) == [None] * KEYS_COUNT_LARGE
        assert list_keys(store) == ["f/00", "f/00000"]


def _assert_in_order(pieces: Sequence[tuple[int, int]], part_ends: Sequence[int]) -> None:
    """Assert that the pieces (start, end) cover the parts without a gap, and that no piece spans two parts."""
    edges = [0, *(end for _, end in pieces)]
    assert [start for start, _ in pieces] == edges[:-1]
    assert set(part_ends) <= set(edges)
