"""X5: only somebody with the key can write blocks that are accepted."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from kvtiers.tiers.blocks import protected_seal
from kvtiers.tiers.blocks.keyring import KEYS_MAX, KeyRing, load_keys, parse_keys
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.protected_seal import GcmSeal
from kvtiers.tiers.blocks.seal import TRAILER_BYTES, Seal
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.errors import ConfigError, SealError, SealReason
from kvtiers.tiers.server.process import seal_from_json
from tests.golden.make_golden import SEALED_FINGERPRINT, SEALED_KEY, SEALED_KEYS, SEALED_RANK, sealed_payload
from tests.identity import block_key

GOLDEN = Path(__file__).parents[2] / "golden"
FINGERPRINT = bytes(range(32))
KEY = block_key(1)
PAYLOAD = random.Random(1).randbytes(64 * 1024)
OLD, NEW, OTHER = (random.Random(seed).randbytes(32) for seed in (11, 12, 13))
RING = KeyRing(OLD)


def stored_by(seal: Seal, key: OffloadKey = KEY, payload: bytes = PAYLOAD) -> bytes:
    return b"".join(seal.seal_parts(key, memoryview(payload)))


def opened(seal: Seal, blob: bytes, key: OffloadKey = KEY) -> bytes:
    """The payload of a stored blob, as a load gets it."""
    slot = memoryview(bytearray(blob[:-TRAILER_BYTES]))
    seal.open_in_place(key, slot, blob[-TRAILER_BYTES:])
    return bytes(slot)


def reason(seal: Seal, blob: bytes, key: OffloadKey = KEY) -> SealReason:
    with pytest.raises(SealError) as caught:
        opened(seal, blob, key)
    foreign = (SealReason.UNSUPPORTED, SealReason.UNKNOWN_KEY, SealReason.VERSION)
    assert caught.value.foreign == (caught.value.reason in foreign)
    return caught.value.reason


def resealed(blob: bytes) -> bytes:
    """What an attacker who knows the format does last: makes both checksums right."""
    payload, tail = blob[:-TRAILER_BYTES], bytearray(blob[-TRAILER_BYTES:])
    tail[136:152] = xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + bytes(8)
    tail[208:216] = xxhash.xxh3_64_intdigest(bytes(tail[:208])).to_bytes(8, "little")
    return payload + bytes(tail)


@pytest.mark.parametrize("payload_bytes", [4096, 8192, 3 * 4096, 1 << 20])
def test_encrypted_block_opens_to_its_payload(payload_bytes: int) -> None:
    payload = random.Random(payload_bytes).randbytes(payload_bytes)
    blob = stored_by(GcmSeal(FINGERPRINT, 2, keys=RING), payload=payload)
    assert len(blob) == payload_bytes + TRAILER_BYTES
    assert opened(GcmSeal(FINGERPRINT, 2, keys=RING), blob) == payload
    assert blob[:payload_bytes] != payload


def test_golden_encrypted_block_is_still_read() -> None:
    blob = (GOLDEN / "sealed-1-gcm.bin").read_bytes()
    assert opened(GcmSeal(SEALED_FINGERPRINT, SEALED_RANK, keys=SEALED_KEYS), blob, SEALED_KEY) == sealed_payload()


def test_golden_gmac_block_is_unsupported_and_foreign() -> None:
    """Earlier versions wrote such blocks."""
    blob = (GOLDEN / "sealed-1-gmac.bin").read_bytes()
    for reader in (
        Seal(SEALED_FINGERPRINT, SEALED_RANK),
        GcmSeal(SEALED_FINGERPRINT, SEALED_RANK, keys=SEALED_KEYS),
    ):
        assert reason(reader, blob, SEALED_KEY) is SealReason.UNSUPPORTED


def test_encrypted_block_equals_one_shot_aes_gcm_output() -> None:
    """Against the one-shot interface."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    blob = stored_by(GcmSeal(FINGERPRINT, 2, keys=RING))
    tail = blob[-TRAILER_BYTES:]
    (key,) = RING.derive(b"AES-256-GCM", FINGERPRINT).values()
    associated = tail[:136] + bytes(16) + tail[152:192]
    assert AESGCM(key).encrypt(tail[180:192], PAYLOAD, associated) == blob[:-TRAILER_BYTES] + tail[192:208]


def test_repeated_encryption_of_a_payload_shares_no_nonce_and_no_ciphertext() -> None:
    seal = GcmSeal(FINGERPRINT, 2, keys=RING)
    blobs = [stored_by(seal, payload=PAYLOAD[:4096]) for _ in range(1000)]
    assert len({blob[4096:][180:192] for blob in blobs}) == 1000
    assert len({blob[:4096] for blob in blobs}) == 1000


def test_derived_keys_differ_between_namespaces_and_from_the_master_key() -> None:
    derived = [
        *RING.derive(b"AES-256-GCM", FINGERPRINT).values(),
        *RING.derive(b"AES-256-GCM", bytes(32)).values(),
        OLD,
    ]
    assert len(set(derived)) == len(derived)


def test_encrypted_block_with_a_flipped_bit_in_any_trailer_byte_is_refused() -> None:
    seal = GcmSeal(FINGERPRINT, 2, keys=RING)
    blob = stored_by(seal, payload=PAYLOAD[:4096])
    for position in range(TRAILER_BYTES):
        flipped = bytearray(blob)
        flipped[4096 + position] ^= 1 << (position % 8)
        with pytest.raises(SealError):
            opened(seal, bytes(flipped))


def test_10000_forged_or_moved_blocks_are_refused() -> None:
    """An attacker who knows the format, has any number of good blocks, and no key."""
    dice = random.Random(5)
    seal = GcmSeal(FINGERPRINT, 2, keys=RING)
    mine, theirs = block_key(1), block_key(2)
    small = PAYLOAD[:8192]
    good, other = (stored_by(seal, key, small[::-1] if key == theirs else small) for key in (mine, theirs))

    def patched(blob: bytes, at: int, new: bytes) -> bytes:
        return resealed(blob[:at] + new + blob[at + len(new) :])

    def flipped(start: int, end: int) -> bytes:
        at = dice.randrange(start, end)
        return patched(good, at, bytes([good[at] ^ 1 << dice.randrange(8)]))

    def made_by(seal: Seal) -> bytes:
        return stored_by(seal, mine, small)

    tail = 8192
    proof = slice(tail + 180, tail + 208)
    attacks: list[Callable[[], bytes]] = [
        lambda: flipped(0, tail),
        lambda: flipped(tail + 152, tail + 176),  # another writer, another time
        lambda: patched(good, 0, dice.randbytes(8192)),
        lambda: patched(good, 0, good[4096:8192] + good[:4096]),
        lambda: patched(good, 0, other[:8192]),
        lambda: patched(good, proof.start, dice.randbytes(28)),
        lambda: patched(good, proof.start, other[proof]),
        lambda: patched(good, tail + 14, bytes([dice.choice([0, 1, 3])])),  # another kind of authentication
        lambda: other,
        # Good blocks of another key, rank or namespace, or sealed with the attacker's key, under the wanted name.
        lambda: patched(other, tail + 66, mine[:32]),
        lambda: patched(made_by(GcmSeal(FINGERPRINT, 1, keys=RING)), tail + 60, b"\2"),
        lambda: patched(made_by(GcmSeal(bytes(32), 2, keys=RING)), tail + 24, FINGERPRINT),
        lambda: patched(
            made_by(GcmSeal(FINGERPRINT, 2, keys=KeyRing(OTHER))), tail + 176, RING.ids[0].to_bytes(4, "little")
        ),
        lambda: made_by(Seal(FINGERPRINT, 2)),
    ]
    for number in range(10_000):
        forged = attacks[number % len(attacks)]()
        with pytest.raises(SealError):
            opened(seal, forged, mine)
    assert opened(seal, good, mine) == small


def test_forged_and_unauthenticated_blocks_fail_authentication() -> None:
    seal = GcmSeal(FINGERPRINT, 2, keys=RING)
    forged = bytearray(stored_by(seal))
    forged[100] ^= 1
    assert reason(seal, resealed(bytes(forged))) is SealReason.AUTHENTICATION
    assert reason(seal, stored_by(Seal(FINGERPRINT, 2))) is SealReason.AUTHENTICATION
    with pytest.raises(SealError, match="not authenticated"):
        seal.check_trailer(KEY, stored_by(Seal(FINGERPRINT, 2))[-TRAILER_BYTES:], len(PAYLOAD))


def test_block_encrypted_with_an_unknown_key_is_foreign() -> None:
    blob = stored_by(GcmSeal(FINGERPRINT, 2, keys=RING))
    stranger = GcmSeal(FINGERPRINT, 2, keys=KeyRing(OTHER))
    for reader in (Seal(FINGERPRINT, 2), stranger):
        expected = SealReason.UNKNOWN_KEY if reader is stranger else SealReason.UNSUPPORTED
        assert reason(reader, blob) is expected
        with pytest.raises(SealError, match=expected) as caught:  # a writer looks at the trailer only
            reader.check_trailer(KEY, blob[-TRAILER_BYTES:], len(PAYLOAD))
        assert caught.value.foreign


def test_key_rotation_reads_each_block_while_its_key_is_in_the_ring() -> None:
    """Add a key everywhere, make it the first, remove the old one: no block is destroyed on the way."""
    before, both_read, after, done = (
        GcmSeal(FINGERPRINT, 2, keys=KeyRing(*keys)) for keys in ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,))
    )
    old, new = stored_by(both_read), stored_by(after)
    for reader in (before, both_read, after):
        assert opened(reader, old) == PAYLOAD
    for reader in (both_read, after, done):
        assert opened(reader, new) == PAYLOAD
    assert reason(before, new) is SealReason.UNKNOWN_KEY
    assert reason(done, old) is SealReason.UNKNOWN_KEY


def test_flipped_bit_in_an_encrypted_payload_is_a_checksum_error() -> None:
    """The checksum is that of the stored bytes: a wrong one comes before the question for a key."""
    blob = bytearray(stored_by(GcmSeal(FINGERPRINT, 2, keys=RING)))
    blob[5] ^= 1
    assert reason(GcmSeal(FINGERPRINT, 2, keys=RING), bytes(blob)) is SealReason.PAYLOAD_CHECKSUM


def test_verify_does_not_change_encrypted_bytes() -> None:
    seal = GcmSeal(FINGERPRINT, 2, keys=RING)
    blob = stored_by(seal)
    stored = bytearray(blob[:-TRAILER_BYTES])
    seal.verify(KEY, memoryview(stored), blob[-TRAILER_BYTES:])
    assert stored == blob[:-TRAILER_BYTES]


def test_payload_changed_during_encryption_is_a_seal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = bytearray(PAYLOAD)
    seal = GcmSeal(FINGERPRINT, 2, keys=RING)
    associated = protected_seal._associated

    def late_write(trailer: bytearray) -> bytearray:
        slot[7] ^= 1
        return associated(trailer)

    monkeypatch.setattr(protected_seal, "_associated", late_write)
    with pytest.raises(SealError, match="changed while"):
        seal.seal_parts(KEY, memoryview(slot))


def test_seal_restored_from_json_makes_and_reads_blocks_without_master_keys() -> None:
    seal = GcmSeal(FINGERPRINT, 2, keys=KeyRing(NEW, OLD))
    told = json.loads(json.dumps(seal.to_json()))
    worker = seal_from_json(told)
    assert type(worker) is GcmSeal
    assert worker.to_json() == seal.to_json()
    assert opened(worker, stored_by(seal)) == opened(seal, stored_by(worker)) == PAYLOAD
    for master in (OLD, NEW):  # a worker gets no more than it needs: what was derived for this namespace
        assert master.hex() not in json.dumps(told)
    assert type(seal_from_json(json.loads(json.dumps(Seal(FINGERPRINT, 2).to_json())))) is Seal


def test_gcm_seal_refuses_to_make_a_trailer_for_a_plain_payload() -> None:
    with pytest.raises(TypeError, match="seal_parts"):
        GcmSeal(FINGERPRINT, 2, keys=RING).trailer(KEY, memoryview(PAYLOAD))


# ---- the ring --------------------------------------------------------------------------------------------------------


def test_keys_are_read_from_files_and_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(f"# the new one\n{NEW.hex()}  # since May\n\n{OLD.hex().upper()}\n")
    ring = load_keys(keys_file=str(path))
    assert ring.ids[0] == KeyRing(NEW).ids[0]
    assert repr(ring) == repr(load_keys(keys_env="K", environ={"K": f"{NEW.hex()},{OLD.hex()}"}))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o660, 0o777, 0o610])
@pytest.mark.parametrize("by_link", [False, True])
def test_key_file_that_other_users_may_read_or_change_is_refused(tmp_path: Path, mode: int, by_link: bool) -> None:
    path = keys_with(tmp_path, mode)
    if by_link:  # as Kubernetes' secrets are: ..data/keys
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with pytest.raises(ConfigError, match=rf"keys_file: .*\(mode {mode:04o}\).*chmod 600 {path}"):
        load_keys(keys_file=str(path))
    path.chmod(0o400)
    assert load_keys(keys_file=str(path)).ids[0] == KeyRing(NEW).ids[0]


def test_key_file_must_belong_to_the_reader_or_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keys_with(tmp_path, 0o600)
    uid = path.stat().st_uid
    status = os.fstat
    owner = 0

    def owned(fd: int) -> os.stat_result:
        fields = list(status(fd))
        fields[stat.ST_UID] = owner
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    for mode in (0o400, 0o440, 0o640):  # a Kubernetes secret with fsGroup is read by its group
        path.chmod(mode)
        load_keys(keys_file=str(path))
    for mode in (0o644, 0o660, 0o444):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="defaultMode: 0400.*chmod 600"):
            load_keys(keys_file=str(path))
    path.chmod(0o600)
    owner = uid + 2
    with pytest.raises(ConfigError, match=f"belongs to uid {owner}.*chown {uid + 1} {path}"):
        load_keys(keys_file=str(path))


def keys_with(folder: Path, mode: int) -> Path:
    path = folder / "keys"
    path.write_text(NEW.hex())
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "0 keys"),
        (NEW.hex()[:-2], "key 1 is not accepted: write 64 hex digits"),
        (f"{NEW.hex()} nothex", "key 2 is not accepted"),
        (f"{NEW.hex()} {NEW.hex()}", "a key is listed twice"),
        (" ".join(random.Random(n).randbytes(32).hex() for n in range(KEYS_MAX + 1)), f"{KEYS_MAX + 1} keys"),
    ],
)
def test_invalid_key_ring_error_names_file_but_not_content(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="keys_file") as caught:
        parse_keys(text, "keys_file")
    assert expected in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(word in shown for word in text.split() if word)


def test_missing_or_unusable_key_sources_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.touch(mode=0o600)
    large.write_bytes(bytes(1 << 17))
    os.mkfifo(tmp_path / "fifo")
    for options, expected in (
        ({"keys_file": str(tmp_path / "none")}, "cannot be read"),
        ({"keys_file": str(tmp_path)}, "cannot be read"),
        ({"keys_file": str(tmp_path / "fifo")}, "is not a regular file"),  # whose writer would be waited for
        ({"keys_file": "/dev/zero"}, "is not a regular file"),
        ({"keys_file": str(large)}, "larger than"),
        ({"keys_env": "KVTIERS_NO_SUCH"}, "KVTIERS_NO_SUCH is not set"),
        ({}, "required"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_keys(**options, environ={})


@pytest.mark.parametrize("text", ["$K", " {}", "{}\n", "{0},{0}", "0x{}"])
@pytest.mark.parametrize("option", ["keys_file", "keys_env"])
def test_key_given_as_keys_file_or_keys_env_is_not_shown_in_the_error(
    option: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K", OLD.hex())
    with pytest.raises(ConfigError) as caught:
        parse_tier({"type": "fs", "root_dir": "/x", "encrypt": "aes-gcm", option: text.format(OLD.hex())})
    assert OLD.hex() not in "".join(traceback.format_exception(caught.value))


def test_encryption_keys_are_not_shown_in_errors_reprs_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    """X4."""
    caplog.set_level(logging.DEBUG)
    ring = KeyRing(OLD)
    seal = GcmSeal(FINGERPRINT, 2, keys=ring)
    blob = bytearray(stored_by(seal))
    blob[0] ^= 1
    try:
        opened(seal, resealed(bytes(blob)))
    except SealError as e:
        shown = "".join(traceback.format_exception(e))
    shown += repr(ring) + str(ring) + repr(seal) + caplog.text
    for secret in (OLD, *ring.derive(b"AES-256-GCM", FINGERPRINT).values()):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
        assert secret not in bytes(blob)
    with pytest.raises(TypeError):
        ring.__reduce__()


def test_missing_cryptography_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from kvtiers.tiers.errors import ConfigError\n"
        "try:\n    import kvtiers.tiers.blocks.protected_seal\nexcept ConfigError as e:\n    print(e)"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "pip install '.[crypto]'" in out.stdout
