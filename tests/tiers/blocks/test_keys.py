from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.blocks.keys import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    hash_blocks,
    make_offload_key,
)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1))
def test_offload_key_splits_into_its_hash_and_group(block_hash: bytes, group: int) -> None:
    key = make_offload_key(block_hash, group)
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group


def test_key_is_hash_then_big_endian_group() -> None:
    assert make_offload_key(b"\xaa\xbb", 258) == OffloadKey(b"\xaa\xbb\x00\x00\x01\x02")


@pytest.mark.parametrize(("block_hash", "group"), [(b"", 0), (b"x", -1), (b"x", 2**32)])
def test_bad_key_parts_are_refused(block_hash: bytes, group: int) -> None:
    with pytest.raises(ValueError, match="block_hash|group_idx"):
        make_offload_key(block_hash, group)


def test_block_hashes_follow_the_documented_chain() -> None:
    tokens = [1, 2, 3, 4]
    first = hashlib.sha256(b"\0\0\0\0" + b"\1\0\0\0\2\0\0\0").digest()
    second = hashlib.sha256(b"\x20\0\0\0" + first + b"\3\0\0\0\4\0\0\0").digest()
    assert list(hash_blocks(tokens, 2)) == [first, second]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.integers(0, 40))
def test_block_hashes_are_equal_only_for_equal_prefixes(tokens: list[int], block_size: int, flip: int) -> None:
    hashes = list(hash_blocks(tokens, block_size))
    assert len(hashes) == len(tokens) // block_size
    assert len(set(hashes)) == len(hashes)
    if flip < len(tokens):
        other = list(tokens)
        other[flip] ^= 1
        changed = list(hash_blocks(other, block_size))
        same = flip // block_size
        assert changed[:same] == hashes[:same]
        assert not set(changed[same:]) & set(hashes)


def test_hash_chain_continues_from_a_parent_hash() -> None:
    tokens = list(range(12))
    whole = list(hash_blocks(tokens, 4))
    assert list(hash_blocks(tokens[4:], 4, parent=whole[0])) == whole[1:]


def test_different_salts_give_different_block_hashes() -> None:
    tokens = list(range(8))
    variants = [list(hash_blocks(tokens, 4, salt=salt)) for salt in (None, b"", b"a", b"b")]
    assert len({h for hashes in variants for h in hashes}) == 8


@pytest.mark.parametrize("tokens", [[-1, 2], [2**32, 0]])
def test_token_ids_out_of_range_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        list(hash_blocks(tokens, 2))


def test_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        list(hash_blocks([1], 0))
