from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from kvtiers.tiers.blocks.keys import make_offload_key
from kvtiers.tiers.blocks.seal import TRAILER_BYTES, Checksum, RunningChecksum, Seal
from kvtiers.tiers.errors import SealError, SealReason
from tests.golden.make_golden import SEALED_FINGERPRINT, SEALED_KEY, SEALED_RANK, sealed_payload
from tests.identity import block_key

GOLDEN = Path(__file__).parents[2] / "golden" / "sealed-1.bin"
FINGERPRINT = bytes(range(32))
KEY = block_key(1)
PAYLOAD = random.Random(1).randbytes(64 * 1024)


def seal(**changes: object) -> Seal:
    return Seal(**{"fingerprint": FINGERPRINT, "rank": 2, **changes})  # type: ignore[arg-type]


def trailer() -> bytes:
    return seal().trailer(KEY, memoryview(PAYLOAD))


def reason(made: Seal, key: object, payload: bytes, tail: bytes) -> SealReason:
    with pytest.raises(SealError) as caught:
        made.verify(key, memoryview(payload), tail)  # type: ignore[arg-type]
    return caught.value.reason


def test_golden_block_is_still_read_and_still_written() -> None:
    """What a released version wrote stays readable, and the same input still gives the same bytes."""
    blob = GOLDEN.read_bytes()
    payload, tail = blob[:-TRAILER_BYTES], blob[-TRAILER_BYTES:]
    assert payload == sealed_payload()
    reader = Seal(SEALED_FINGERPRINT, SEALED_RANK)
    reader.verify(SEALED_KEY, memoryview(payload), tail)
    writer = Seal(SEALED_FINGERPRINT, SEALED_RANK, writer_id=bytes(16), clock_ns=lambda: 1_700_000_000_000_000_000)
    assert writer.trailer(SEALED_KEY, memoryview(payload)) == tail


class WideSeal(Seal):
    """Writes blocks as an earlier version could; they are still read."""

    _checksum = Checksum.XXH3_128


@pytest.mark.parametrize("make_seal", [Seal, WideSeal])
def test_trailer_verifies_its_payload(make_seal: type[Seal]) -> None:
    made = make_seal(FINGERPRINT, 2)
    tail = made.trailer(KEY, memoryview(PAYLOAD))
    assert len(tail) == TRAILER_BYTES
    seal().verify(KEY, memoryview(PAYLOAD), tail)
    seal().verify(KEY, memoryview(PAYLOAD), bytearray(tail))


@pytest.mark.parametrize("make_seal", [Seal, WideSeal])
def test_piecewise_checksum_equals_the_whole_checksum(make_seal: type[Seal]) -> None:
    payload = memoryview(PAYLOAD)

    def looked(by: Seal, data: memoryview, last: int) -> RunningChecksum:
        running = by.running_checksum(payload)
        for begin in (data[:4096], data[:last]):  # the first one is begun again
            for at in range(0, len(begin), 1000):
                running.look(at, begin[at : at + 1000])
        running.look(len(payload), memoryview(b"a trailer"))
        return running

    writer, reader = make_seal(FINGERPRINT, 2, clock_ns=lambda: 1), seal()
    whole = len(payload)
    tail = writer.trailer(KEY, payload)
    assert writer.trailer(KEY, payload, looked(writer, payload, whole)) == tail
    reader.verify(KEY, payload, tail, looked(reader, payload, whole))
    bad = bytearray(payload)
    bad[-1] ^= 1
    with pytest.raises(SealError) as e:
        reader.verify(KEY, memoryview(bad), tail, looked(reader, memoryview(bad), whole))
    assert e.value.reason is SealReason.PAYLOAD_CHECKSUM
    # Where not all was seen the payload itself is looked at.
    reader.verify(KEY, payload, tail, looked(reader, payload, 5000))
    with pytest.raises(SealError):
        reader.verify(KEY, memoryview(bad), tail, looked(reader, payload, 5000))


def test_any_flipped_trailer_bit_is_refused() -> None:
    """W2, trailer: any flipped bit at any byte is refused."""
    made, flipped = seal(), bytearray(trailer())
    for position in range(TRAILER_BYTES):
        for bit in range(8):
            flipped[position] ^= 1 << bit
            with pytest.raises(SealError):
                made.verify(KEY, memoryview(PAYLOAD), flipped)
            flipped[position] ^= 1 << bit
    made.verify(KEY, memoryview(PAYLOAD), flipped)


def test_flipped_payload_bit_is_refused_at_4096_positions() -> None:
    """W2, payload."""
    tail, payload = trailer(), bytearray(PAYLOAD)
    positions = {0, len(payload) - 1, *random.Random(2).sample(range(len(payload)), 4094)}
    for position in positions:
        payload[position] ^= 0x10
        with pytest.raises(SealError, match="payload_checksum"):
            seal().verify(KEY, memoryview(payload), tail)
        payload[position] ^= 0x10
    seal().verify(KEY, memoryview(payload), tail)


def test_mismatch_of_any_single_identity_field_is_refused_with_its_reason() -> None:
    """W6."""
    tail = trailer()
    assert reason(seal(fingerprint=bytes(32)), KEY, PAYLOAD, tail) is SealReason.FINGERPRINT
    assert reason(seal(rank=0), KEY, PAYLOAD, tail) is SealReason.RANK
    assert reason(seal(), block_key(2), PAYLOAD, tail) is SealReason.KEY
    assert reason(seal(), block_key(1, group=1), PAYLOAD, tail) is SealReason.GROUP
    assert reason(seal(), make_offload_key(KEY[:-5], 0), PAYLOAD, tail) is SealReason.KEY
    assert reason(seal(), KEY, PAYLOAD[:-4096], tail) is SealReason.LENGTHS
    assert reason(seal(), KEY, PAYLOAD, tail[:-1]) is SealReason.SIZE


def test_changed_trailer_bytes_are_accepted_only_outside_identity_fields() -> None:
    """Each byte of the fields changed, and the trailer's own checksum made right."""
    accepted = 0
    for offset in range(208):
        with suppress(SealError):
            seal().check_trailer(KEY, _resealed(offset, trailer()[offset] ^ 1), len(PAYLOAD))
            accepted += 1
    # What is behind a hash of 32 bytes, padding, digest, writer, time, key id, nonce, tag.
    assert accepted == 32 + 6 + 16 + 16 + 8 + 4 + 12 + 16


def test_trailer_with_unknown_version_checksum_or_authentication_is_foreign() -> None:
    for offset, value, expected in (
        (8, 2, SealReason.VERSION),
        (12, Checksum.CRC64NVME, SealReason.UNSUPPORTED),
        (14, 1, SealReason.UNSUPPORTED),
    ):
        error = refusal(_resealed(offset, value))
        assert (error.reason, error.foreign) == (expected, True)


def test_trailer_with_a_flipped_bit_is_not_foreign() -> None:
    """A foreign block is never healed."""
    flipped = bytearray(trailer())
    for bit in range(8 * TRAILER_BYTES):
        flipped[bit // 8] ^= 1 << bit % 8
        assert not refusal(flipped).foreign, f"bit {bit}"
        flipped[bit // 8] ^= 1 << bit % 8


def refusal(tail: bytes | bytearray, by: Seal | None = None) -> SealError:
    with pytest.raises(SealError) as caught:
        (by or seal()).verify(KEY, memoryview(PAYLOAD), tail)
    return caught.value


def _resealed(offset: int, value: int) -> bytes:
    import xxhash

    tail = bytearray(trailer())
    tail[offset] = value
    tail[208:216] = xxhash.xxh3_64_intdigest(bytes(tail[:208])).to_bytes(8, "little")
    return bytes(tail)


def test_zero_page_and_all_zero_blob_are_refused() -> None:
    tail = trailer()
    holed = bytearray(PAYLOAD)
    holed[4096:8192] = bytes(4096)
    assert reason(seal(), KEY, bytes(holed), tail) is SealReason.PAYLOAD_CHECKSUM
    assert reason(seal(), KEY, bytes(len(PAYLOAD)), bytes(TRAILER_BYTES)) is SealReason.MAGIC


def test_fuzzed_trailers_never_crash() -> None:
    """X1: 10^5 trailers with mutated heads, their own checksum made right for half of them."""
    import xxhash

    dice = random.Random(3)
    good, reader = trailer(), seal()
    for _ in range(100_000):
        tail = bytearray(good)
        for _ in range(dice.randrange(1, 6)):
            tail[dice.randrange(216)] = dice.randrange(256)
        if dice.random() < 0.5:
            tail[208:216] = xxhash.xxh3_64_intdigest(bytes(tail[:208])).to_bytes(8, "little")
        # The payload is left out: these test the parser, and the checksum's field may legitimately survive.
        try:
            reader.check_trailer(KEY, tail, len(PAYLOAD))
        except SealError:
            pass


@pytest.mark.parametrize(("payload_bytes", "hash_bytes"), [(0, 32), (4095, 32), (4097, 32), (4096, 65)])
def test_payload_or_hash_size_outside_the_format_is_refused(payload_bytes: int, hash_bytes: int) -> None:
    with pytest.raises(ValueError, match="accepted"):
        seal().trailer(make_offload_key(bytes(hash_bytes), 0), memoryview(bytes(payload_bytes)))


def test_invalid_fingerprint_or_writer_id_is_refused() -> None:
    for bad in ({"fingerprint": b"short"}, {"writer_id": b"x"}):
        with pytest.raises(ValueError, match="must have"):
            seal(**bad)
