"""check_key compared with a second, slow implementation of its rules; and parts_size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.errors import InvalidKeyError
from kvtiers.tiers.store import check_key, parts_size
from kvtiers.tiers.testing.contract import BAD_KEYS, GOOD_KEYS


def is_good(key: str) -> bool:
    """The rules of check_key's docstring, one by one."""
    try:
        raw = key.encode()
    except UnicodeEncodeError:
        return False
    if not 1 <= len(raw) <= 1024:
        return False
    if any(ord(char) < 32 or char in "\x7f\\" for char in key):
        return False
    return all(part and not part.startswith(".") and len(part.encode()) <= 255 for part in key.split("/"))


def is_accepted(key: str) -> bool:
    try:
        assert check_key(key) is key
    except InvalidKeyError as e:
        assert e.key == key  # noqa: PT017 - the refusal is the answer here
        return False
    return True


nasty = st.text(st.sampled_from("a./\\\x00\x1f\x7f\n é鍵\ud800"), max_size=12)
long = st.lists(st.sampled_from(["n" * 255, "é" * 127, "é" * 128, "鍵" * 85, "d", "d" * 40]), min_size=1, max_size=6)


@pytest.mark.parametrize("key", [*GOOD_KEYS, *BAD_KEYS, "a\n"])  # the last one is what "$" in a pattern lets through
def test_listed_keys_are_checked_by_the_documented_rules(key: str) -> None:
    assert is_accepted(key) == is_good(key)


@given(nasty | st.text() | long.map("/".join) | st.integers(1, 600).map(lambda n: "d/" * (n - 1) + "d"))
def test_random_text_is_checked_by_the_documented_rules(key: str) -> None:
    assert is_accepted(key) == is_good(key)


def test_parts_size_is_the_sum_of_all_bytes() -> None:
    assert parts_size([]) == 0
    assert parts_size([memoryview(b"abc"), memoryview(b""), memoryview(bytes(24)).cast("b", (3, 8))]) == 27
