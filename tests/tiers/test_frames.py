"""The frames between the two halves of a tier: each frame arrives as it was sent, and other bytes are rejected."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers import errors
from kvtiers.tiers.blocks.batches import Batch
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import (
    BlobCorruptError,
    ConfigError,
    StoreConfigError,
    StoreError,
    StoreThrottledError,
    StoreUnavailableError,
)
from kvtiers.tiers.frames import (
    FRAME_BYTES_MAX,
    TAG_BYTES,
    FrameReader,
    StrayBytesError,
    decode_batch,
    decode_error,
    encode_batch,
    encode_error,
    pack_frame,
    pack_pairs,
    unpack_pairs,
)
from tests.identity import block_key

TAG = bytes(range(TAG_BYTES))
KEYS = [block_key(n) for n in range(6)]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
frames = st.tuples(st.lists(json_values, max_size=4), st.binary(max_size=200))
offload_keys = st.binary(min_size=4, max_size=68).map(OffloadKey)


def read(data: bytes, *, tag: bytes = TAG) -> list[tuple[Any, bytes]]:
    return list(FrameReader(tag).feed(data))


# ---- frames ----------------------------------------------------------------------------------------------------------


@given(sent=st.lists(frames, max_size=4), data=st.data())
def test_frames_arrive_in_order_for_any_cuts(sent: list[tuple[list[Any], bytes]], data: st.DataObject) -> None:
    stream = b"".join(pack_frame(TAG, content, raw) for content, raw in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader(TAG)
    arrived: list[Any] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        arrived += reader.feed(stream[start:end])
    assert arrived == sent


def test_frames_arrive_when_cut_at_any_byte() -> None:
    sent: list[tuple[list[Any], bytes]] = [
        (["moved", 1, {"succeeded": [0]}, []], b""),
        (["looked", 2, []], bytes(40)),
        (["alive"], b""),
    ]
    stream = b"".join(pack_frame(TAG, content, raw) for content, raw in sent)
    for cut in range(len(stream) + 1):
        reader = FrameReader(TAG)
        assert [*reader.feed(stream[:cut]), *reader.feed(stream[cut:])] == sent
    reader = FrameReader(TAG)
    assert [each for byte in stream for each in reader.feed(bytes([byte]))] == sent


def test_incomplete_frame_yields_nothing() -> None:
    stream = pack_frame(TAG, ["alive"], b"raw")
    for length in range(len(stream)):
        assert read(stream[:length]) == []


@given(stray=st.binary(min_size=TAG_BYTES + 8))
def test_bytes_that_are_not_a_frame_are_rejected(stray: bytes) -> None:
    if stray[8:24] == TAG:
        return
    with pytest.raises(StrayBytesError):
        read(stray)


def test_frames_before_stray_bytes_are_yielded() -> None:
    arriving = FrameReader(TAG).feed(pack_frame(TAG, ["alive"]) + b"\n" * 64)
    assert next(arriving) == (["alive"], b"")
    with pytest.raises(StrayBytesError):
        next(arriving)


@given(frame=frames, stray=st.binary(min_size=1, max_size=40), data=st.data())
def test_foreign_bytes_within_a_frame_are_rejected(
    frame: tuple[list[Any], bytes], stray: bytes, data: st.DataObject
) -> None:
    """At any place in the stream. Only frames that were sent come out."""
    stream = pack_frame(TAG, *frame)
    at = data.draw(st.integers(0, len(stream)))
    changed = stream[:at] + stray + stream[at:]
    try:
        arrived = read(changed)
    except StrayBytesError:
        return
    assert arrived in (
        [],
        [frame],
    )  # [frame]: the stray bytes are behind it or equal its last ones; []: it is incomplete


def test_frame_of_another_connection_is_rejected() -> None:
    with pytest.raises(StrayBytesError, match="not a frame"):
        read(pack_frame(TAG[::-1], ["alive"]))


@pytest.mark.parametrize("lengths", [(FRAME_BYTES_MAX + 1, 0), (0, FRAME_BYTES_MAX + 1), (2**32 - 1, 2**32 - 1)])
def test_frame_of_impossible_length_is_rejected(lengths: tuple[int, int]) -> None:
    with pytest.raises(StrayBytesError, match="not a frame"):
        read(struct.pack("!II", *lengths) + TAG)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"nothing"])
def test_frame_without_json_is_rejected(text: bytes) -> None:
    with pytest.raises(StrayBytesError, match="not JSON"):
        read(struct.pack("!II", len(text), 0) + TAG + text + TAG)


def test_numpy_numbers_are_encoded_and_other_objects_rejected() -> None:
    stream = pack_frame(TAG, [np.int64(3), np.float64(0.5), np.bool_(True)])
    assert read(stream) == [([3, 0.5, True], b"")]
    for odd in (object(), {1, 2}, b"bytes", np.zeros(3)):
        with pytest.raises(TypeError, match="not JSON serializable"):
            pack_frame(TAG, [odd])


# ---- keys and slots --------------------------------------------------------------------------------------------------


@given(pairs=st.lists(st.tuples(offload_keys, st.integers(0, 2**32 - 1))))
def test_pairs_survive_encoding(pairs: list[tuple[OffloadKey, int]]) -> None:
    assert unpack_pairs(pack_pairs(pairs)) == pairs


@given(pairs=st.lists(st.tuples(offload_keys, st.integers(0, 2**32 - 1)), min_size=1), data=st.data())
def test_truncated_pairs_are_rejected(pairs: list[tuple[OffloadKey, int]], data: st.DataObject) -> None:
    packed = pack_pairs(pairs)
    numbers = 4 + 6 * len(pairs)
    with pytest.raises(struct.error):
        unpack_pairs(packed[: data.draw(st.integers(0, numbers - 1))])


# ---- batches ---------------------------------------------------------------------------------------------------------

key_lists = st.lists(st.sampled_from(KEYS), unique=True)
counters = st.dictionaries(st.text(max_size=8), st.integers(1, 9), max_size=3).map(Counter)
batches = st.builds(
    Batch,
    **{
        each.name: {
            "list[OffloadKey]": key_lists,
            "Counter[str]": counters,
            "int": st.integers(0, 2**40),
            "str": st.text(max_size=8),
        }[str(each.type)]
        for each in fields(Batch)
    },
)


@given(batch=batches)
def test_batches_survive_encoding(batch: Batch) -> None:
    ((content, _),) = read(pack_frame(TAG, [encode_batch(batch, KEYS)]))
    arrived = decode_batch(content[0], KEYS)
    assert sorted(arrived.succeeded) == sorted(batch.succeeded)
    batch.succeeded = arrived.succeeded
    assert arrived == batch


def test_fully_successful_batch_encodes_to_few_bytes() -> None:
    assert encode_batch(Batch(succeeded=list(KEYS)), KEYS) == {}
    assert decode_batch({}, KEYS) == Batch(succeeded=KEYS)
    assert decode_batch(encode_batch(Batch(), KEYS), KEYS) == Batch()


@pytest.mark.parametrize(
    "answer",
    [
        {"no_field": 1},
        {"add": 1},
        {"succeeded": [6]},
        {"succeeded": ["0"]},
        {"succeeded": None},
        {"succeeded": 3},
        {"outcomes": 3},
        {"bytes_moved": "3"},
        {"bytes_moved": None},
        {"fault": ["text"]},
        [],
        None,
        "text",
    ],
    ids=str,
)
def test_invalid_batch_is_rejected(answer: Any) -> None:
    with pytest.raises(ValueError, match="not a Batch"):
        decode_batch(answer, KEYS)


# ---- errors ----------------------------------------------------------------------------------------------------------

ALL_ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StoreError)]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_store_errors_survive_encoding(kind: type[StoreError]) -> None:
    for error in (kind("as told", key="a/b"), kind("as told")):
        arrived = decode_error(encode_error(error))
        assert isinstance(arrived, StoreError)
        assert (type(arrived), str(arrived), arrived.key) == (kind, str(error), error.key)


def test_config_errors_keep_their_field() -> None:
    for error in (ConfigError("must be 1", field="jobs_max"), StoreConfigError("no folder")):
        arrived = decode_error(encode_error(error))
        assert (type(arrived), str(arrived)) == (type(error), str(error))
        assert getattr(arrived, "field", None) == getattr(error, "field", None)


def test_custom_errors_arrive_as_their_base_class() -> None:
    class TheirError(StoreThrottledError):
        """Does not call its base's constructor."""

        def __init__(self) -> None:
            pass

    assert type(decode_error(encode_error(TheirError()))) is StoreThrottledError
    for error in (ZeroDivisionError("x"), SystemExit(3), KeyboardInterrupt()):
        arrived = decode_error(encode_error(error))
        assert type(arrived) is StoreError
        assert type(error).__name__ in str(arrived)
    odd = decode_error(encode_error(BlobCorruptError("bad", key=b"bytes")))  # type: ignore[arg-type]
    assert isinstance(odd, BlobCorruptError)
    assert odd.key == "b'bytes'"
    assert isinstance(decode_error(encode_error(StoreUnavailableError("Input/output error"))), StoreUnavailableError)
