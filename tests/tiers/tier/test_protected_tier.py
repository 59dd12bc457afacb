"""``encrypt`` from the config to the bytes on storage."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml
from typer.testing import CliRunner

from kvtiers.connector.commands.cli import app
from kvtiers.connector.ranks.place import rank_tier
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.connector.vllm_config import vllm_config
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks import protected_seal
from kvtiers.tiers.blocks.file_mapper import fingerprint_of, namespace_of
from kvtiers.tiers.blocks.keyring import key_id, show_key_id
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import CHECK_AT, TRAILER_BYTES, Authentication, Seal
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.config.deployment import parse_config, parse_tier
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.server import block_mover
from kvtiers.tiers.stores import vectored_io
from kvtiers.tiers.stores.files.local import LocalStore
from tests.identity import FakeSpec, block_key
from tests.waiting import PATIENT, wait_for

ROWS, ROW_BYTES = 8, 8192
KEYS = [block_key(n) for n in range(ROWS)]
OLD, NEW, OTHER = (random.Random(seed).randbytes(32).hex() for seed in (21, 22, 23))

ENCRYPTED = {"encrypt": "aes-gcm"}


class Bench:
    """A region, and fs tiers over one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root / "kv"
        self.keys_file = root / "keys"
        self.keys_file.touch(mode=0o600)
        self.keys_file.write_text(OLD)
        self.view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
        self.region = np.frombuffer(self.view, np.int8).reshape(ROWS, ROW_BYTES)
        self.tiers: list[BuiltInTier] = []
        self.job_id = 0

    def tier(self, *keys: str, **options: Any) -> BuiltInTier:
        if keys:
            self.keys_file.write_text("\n".join(keys))
            options["keys_file"] = str(self.keys_file)
        tier = BuiltInTier(
            FakeSpec(), self.view, "fs", root_dir=str(self.root), n_read_threads=1, n_write_threads=1, min_free=0,
            **{"isolation": "thread"} | PATIENT | options,
        )  # fmt: skip
        self.tiers.append(tier)
        return tier

    def run(self, tier: BuiltInTier, operation: str, keys: list[OffloadKey]) -> set[OffloadKey]:
        """Run a job; returns the keys that succeeded. Key n is in row n."""
        self.job_id += 1
        rows = np.array([KEYS.index(key) for key in keys], np.int32)
        getattr(tier, f"submit_{operation}")(JobMetadata(self.job_id, keys, rows))
        tier.drain_jobs()
        (result,) = tier.get_finished()
        return set(result.successful_keys)

    def fill(self) -> np.ndarray[Any, Any]:
        self.region[:] = np.random.default_rng(7).integers(-128, 128, self.region.shape, np.int8)
        return self.region.copy()

    def files(self) -> list[Path]:
        return sorted(self.root.rglob("*.bin"))

    def loads(self, tier: BuiltInTier, expected: np.ndarray[Any, Any]) -> bool:
        """Whether all blocks load; none does with other bytes."""
        self.region[:] = 0
        loaded = self.run(tier, "load", KEYS)
        for number, key in enumerate(KEYS):
            if key in loaded:
                assert np.array_equal(self.region[number], expected[number])
        return len(loaded) == len(KEYS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for tier in made.tiers:
        tier.shutdown()


def failures(tier: BuiltInTier, reason: str) -> float:
    return tier.metrics.value("kvtiers_verify_failures_total", "fs", reason)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_unknown_key_is_logged_once_with_the_engines_keys(
    bench: Bench, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(bench.tier(OLD, **ENCRYPTED), "store", KEYS)
    after = bench.tier(NEW, isolation=isolation, **ENCRYPTED)
    for _ in range(2):
        assert bench.run(after, "load", KEYS) == set()
        assert bench.run(after, "store", KEYS) == set()
    old, new = (show_key_id(key_id(bytes.fromhex(key))) for key in (OLD, NEW))
    (said,) = [text for record in caplog.records if old in (text := record.getMessage())]
    assert f"its key {old} is not among this engine's keys ({new})" in said
    assert after.circuit_state == "closed"


def test_encrypted_blocks_load_after_key_rotation(bench: Bench) -> None:
    expected = bench.fill()
    first = bench.tier(OLD, **ENCRYPTED)
    assert bench.run(first, "store", KEYS) == set(KEYS)
    assert bench.loads(first, expected)
    assert bench.loads(bench.tier(NEW, OLD, **ENCRYPTED), expected)
    after = bench.tier(NEW, **ENCRYPTED)
    assert not bench.loads(after, expected)
    assert failures(after, "unknown_key") == ROWS
    assert len(bench.files()) == ROWS  # a block under a key that is not known is nobody's to throw away
    assert bench.run(after, "store", KEYS) == set()
    assert bench.loads(bench.tier(NEW, OLD, **ENCRYPTED), expected)


def test_piecewise_encryption_equals_whole_encryption(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bench.fill()
    whole = bench.tier(OLD, **ENCRYPTED)
    monkeypatch.setattr(block_mover, "PIECEWISE_BYTES_MIN", 0)
    monkeypatch.setattr(vectored_io, "READ_PIECE_BYTES", 4096)
    monkeypatch.setattr(vectored_io, "WRITE_PIECE_BYTES", 4096)
    pieces = bench.tier(OLD, **ENCRYPTED)
    assert bench.run(pieces, "store", KEYS) == set(KEYS)
    assert bench.loads(whole, expected)
    assert bench.loads(pieces, expected)
    for path in bench.files():
        blob = bytearray(path.read_bytes())
        blob[-TRAILER_BYTES - 1] ^= 1
        path.write_bytes(blob)
    assert bench.run(pieces, "load", KEYS) == set()
    assert failures(pieces, "payload_checksum") == ROWS


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_encrypted_blocks_contain_no_payload_bytes(bench: Bench, isolation: str) -> None:
    expected = bench.fill()
    tier = bench.tier(OLD, isolation=isolation, **ENCRYPTED)
    assert bench.run(tier, "store", KEYS) == set(KEYS)
    assert np.array_equal(bench.region, expected)  # a slot is not encrypted where it lies: the engine may read it
    stored = b"".join(path.read_bytes()[:-TRAILER_BYTES] for path in bench.files())
    assert len(stored) == ROWS * ROW_BYTES
    assert not any(expected[row, at : at + 16].tobytes() in stored for row in range(ROWS) for at in (0, 4096))
    assert bench.loads(tier, expected)
    assert bench.loads(bench.tier(OLD, **ENCRYPTED), expected)


def test_slot_changed_during_encryption_is_not_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill()
    tier = bench.tier(OLD, encrypt="aes-gcm")
    associated = protected_seal._associated

    def late_write(trailer: bytearray) -> bytearray:
        bench.region[0, 0] += 1
        return associated(trailer)

    monkeypatch.setattr(protected_seal, "_associated", late_write)
    assert bench.run(tier, "store", KEYS[:1]) == set()
    assert failures(tier, "payload_checksum") == 1
    assert not bench.files()


def test_tampered_block_is_a_miss_and_healed(bench: Bench) -> None:
    expected = bench.fill()
    tier = bench.tier(OLD, **ENCRYPTED)
    bench.run(tier, "store", KEYS)
    for path in bench.files():
        blob = bytearray(path.read_bytes())
        blob[10] ^= 1
        tail = memoryview(blob)[-TRAILER_BYTES:]
        tail[136:144] = xxhash.xxh3_64_intdigest(blob[:-TRAILER_BYTES]).to_bytes(8, "little")
        tail[208:216] = xxhash.xxh3_64_intdigest(bytes(tail[:208])).to_bytes(8, "little")
        path.write_bytes(blob)
    assert not bench.loads(tier, expected)
    assert failures(tier, "authentication") == ROWS
    assert tier.circuit_state == "closed", "the blocks were read as they are stored"
    bench.region[:] = expected
    assert bench.run(tier, "store", KEYS) == set(KEYS)
    assert bench.loads(tier, expected)


def test_planted_unauthenticated_blocks_are_not_loaded(bench: Bench) -> None:
    """An attacker who copies good blocks of the plain namespace into the protected one."""
    expected = bench.fill()
    plain, guarded = bench.tier(), bench.tier(OLD, **ENCRYPTED)
    bench.run(plain, "store", KEYS)
    for key in KEYS:
        path = bench.root / guarded.mapper.relative_name(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((bench.root / plain.mapper.relative_name(key)).read_bytes())
    assert not bench.loads(guarded, expected)
    assert failures(guarded, "fingerprint") == ROWS


def test_encrypted_and_plain_tiers_have_separate_namespaces(bench: Bench) -> None:
    expected = bench.fill()
    plain, guarded = bench.tier(), bench.tier(OLD, **ENCRYPTED)
    for tier in (plain, guarded):
        assert bench.run(tier, "store", KEYS) == set(KEYS)
        assert bench.loads(tier, expected)
        bench.region[:] = expected
    assert plain.mapper.base_path != guarded.mapper.base_path
    assert guarded.mapper.get_run_config()["protection"] == "aes-gcm"
    assert "protection" not in plain.mapper.get_run_config()  # the digest of those without keys stays as it was
    assert failures(plain, "unsupported") == failures(guarded, "authentication") == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"encrypt": "aes-gcm"}, "encrypt: aes-gcm needs keys; give keys_file or keys_env"),
        ({"keys_file": "/k"}, "keys_file: has no effect without encrypt: aes-gcm"),
        ({"encrypt": "aes-gcm", "keys_file": "/k", "keys_env": "K"}, "keys_env: is mutually exclusive with keys_file"),
        ({"encrypt": "aes"}, "encrypt: 'aes' is not accepted"),
        ({"encrypt": "aes-gcm", "keys_env": "A B"}, "keys_env: a text is not accepted; write a variable's name"),
    ],
)
@pytest.mark.parametrize("tier_type", ["fs", "s3", "memory"])
def test_invalid_encryption_option_error_names_the_option(
    options: dict[str, str], expected: str, tier_type: str
) -> None:
    base = {"fs": {"root_dir": "/kv"}, "s3": {"bucket": "kvb"}, "memory": {}}[tier_type]
    with pytest.raises(ConfigError) as caught:
        parse_tier({"type": tier_type, **base, **options})
    assert expected in str(caught.value)


def test_tier_reads_encryption_keys_from_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bench.fill()
    bench.run(bench.tier(OLD, **ENCRYPTED), "store", KEYS)
    monkeypatch.setenv("KVTIERS_KEYS", OLD)
    assert bench.loads(bench.tier(keys_env="KVTIERS_KEYS", **ENCRYPTED), expected)
    monkeypatch.delenv("KVTIERS_KEYS")
    with pytest.raises(ConfigError, match="KVTIERS_KEYS is not set"):
        bench.tier(keys_env="KVTIERS_KEYS", **ENCRYPTED)


def test_tier_key_is_not_shown_in_logs_reprs_errors_or_metrics(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """X4: not in logs, reprs, errors, metrics or configs."""
    caplog.set_level(logging.DEBUG)
    bench.fill()
    tier = bench.tier(OLD, **ENCRYPTED)
    bench.run(tier, "store", KEYS)
    bench.files()[0].write_bytes(bytes(100))
    bench.run(tier, "load", KEYS)
    data = {
        "region": {"size": "1MiB"},
        "tiers": [{"type": "fs", "root_dir": str(bench.root), "encrypt": "aes-gcm", "keys_file": str(bench.keys_file)}],
    }
    config = parse_config(data)
    shown = [
        caplog.text,
        repr(tier),
        repr(vars(tier)),
        repr(tier.metrics.snapshot()),
        repr(config),
        config.model_dump_json(),
    ]
    with pytest.raises(ConfigError) as caught:
        bench.tier(OLD[:-1], **ENCRYPTED)
    shown += [str(caught.value), repr(caught.value)]
    for text in shown:
        assert OLD[:16] not in text
        assert repr(bytes.fromhex(OLD))[2:-1] not in text


def test_every_way_into_vllm_encrypts_blocks_of_a_protected_tier(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    tier = {"type": "fs", "root_dir": str(bench.root), "encrypt": "aes-gcm", "keys_file": str(bench.keys_file)}
    path.write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": [tier]}))
    ways = vllm_config(path)
    assert set(ways) == {"spec", "tier", "shared_storage"}
    options = ways["shared_storage"]["kv_connector_extra_config"]
    assert rank_tier(options).encrypt == "aes-gcm"
    assert rank_tier(options).keys_file == str(bench.keys_file)


@pytest.mark.parametrize(("near", "far"), [("none", "aes-gcm"), ("aes-gcm", "none")])
def test_copies_between_two_protections_are_refused(tmp_path: Path, near: str, far: str) -> None:
    """No engine of the target would find the copies, and plain blocks would lie next to encrypted ones."""
    options = {"none": "", "aes-gcm": ", encrypt: aes-gcm, keys_env: K"}
    config = tmp_path / "c.yaml"
    config.write_text(
        f"region: {{size: 1MiB}}\ntiers:\n- {{type: fs, name: near, root_dir: {tmp_path}/near{options[near]}}}\n"
        f"- {{type: fs, name: far, root_dir: {tmp_path}/far{options[far]}}}\n"
    )
    result = CliRunner().invoke(app, ["copy", str(config), "--from", "far", "--to", "near"])
    assert result.exit_code == 2
    assert f"(far has {far}, near {near})" in result.output


def verify(bench: Bench, folder: Path) -> dict[str, Any]:
    """What ``kvtiers verify`` reports of the encrypted tier, whose blocks are partly bad."""
    config = folder / "c.yaml"
    tiers = [{"type": "fs", "root_dir": str(bench.root), "keys_file": str(bench.keys_file), **ENCRYPTED}]
    config.write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": tiers}))
    result = CliRunner().invoke(app, ["verify", str(config), "--json"])
    assert result.exit_code == 1
    (report,) = json.loads(result.output)["result"]["tiers"]
    return dict(report)


def test_verify_finds_blocks_that_were_written_without_a_key(bench: Bench, tmp_path: Path) -> None:
    bench.fill()
    tier = bench.tier(OLD, **ENCRYPTED)
    bench.run(tier, "store", KEYS[:4])
    forger, seal = LocalStore(bench.root), Seal(tier.mapper.fingerprint, 0)
    for key in KEYS[4:]:
        payload = memoryview(bytes(ROW_BYTES))
        forger.put(tier.mapper.relative_name(key), [payload, memoryview(seal.trailer(key, payload))])
    report = verify(bench, tmp_path)
    assert list(report["bad_blocks"].values()) == ["authentication"] * 4


def test_verify_continues_past_blocks_of_an_unknown_protection(bench: Bench, tmp_path: Path) -> None:
    """Such as blocks of a newer version. Unprotected blocks still count as bad."""
    bench.fill()
    tier = bench.tier(OLD, **ENCRYPTED)
    bench.run(tier, "store", KEYS[:2])
    config_json = bench.root / tier.mapper.relative_config_name
    fields = json.loads(config_json.read_text()) | {"protection": "newer"}
    namespace = namespace_of(fields)
    store, seal = LocalStore(bench.root), Seal(fingerprint_of(fields), 0)
    store.put(f"{namespace}/{config_json.name}", [memoryview(json.dumps(fields).encode())])
    payload = memoryview(bytes(ROW_BYTES))
    for key, means in zip(KEYS[2:4], (Authentication.NONE, 9), strict=True):
        head = bytearray(seal.trailer(key, payload)[:CHECK_AT])
        head[14] = means
        trailer = head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
        name = tier.mapper.relative_name(key).replace(config_json.parent.name, namespace)
        store.put(name, [payload, memoryview(trailer.ljust(TRAILER_BYTES, b"\0"))])
    report = verify(bench, tmp_path)
    assert list(report["bad_blocks"].values()) == ["authentication"]
    assert (report["blocks"], report["foreign"]) == (4, 1)


@pytest.mark.parametrize("command", ["verify", "copy"])
@pytest.mark.parametrize("keeps_config", [True, False])
def test_planted_config_without_protection_does_not_make_plain_blocks_valid(
    bench: Bench, tmp_path: Path, command: str, keeps_config: bool
) -> None:
    """An attacker writes a second file next to config.json, with the fields of an engine without keys."""
    bench.fill()
    tier = bench.tier(OLD, **ENCRYPTED)
    bench.run(tier, "store", KEYS[:4])
    forger, config_json = LocalStore(bench.root), bench.root / tier.mapper.relative_config_name
    fields = json.loads(config_json.read_text())
    del fields["protection"]
    if not keeps_config:
        config_json.unlink()
    fingerprint = fingerprint_of(fields)
    planted = f"{config_json.parent.name}/kvtiers-{fingerprint.hex()[:12]}.json"
    forger.put(planted, [memoryview(json.dumps(fields).encode())])
    seal = Seal(fingerprint, 0)
    for key in KEYS[4:]:
        payload = memoryview(bytes(ROW_BYTES))
        forger.put(tier.mapper.relative_name(key), [payload, memoryview(seal.trailer(key, payload))])
    configs = []
    for root in (bench.root, tmp_path / "target"):
        tiers = [{"type": "fs", "root_dir": str(root), "min_free": 0, "keys_file": str(bench.keys_file), **ENCRYPTED}]
        configs.append(tmp_path / f"{root.name}.yaml")
        configs[-1].write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": tiers}))
    result = CliRunner().invoke(app, [command, *map(str, configs[: 1 + (command == "copy")]), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)["result"]
    if command == "copy":
        assert report["copied"] == 4 * keeps_config
        assert not (tmp_path / "target" / planted).exists()
    else:
        expected = ["fingerprint"] * 4 if keeps_config else ["no_identity"] * len(KEYS)
        assert list(report["tiers"][0]["bad_blocks"].values()) == expected


def test_processes_of_a_tier_do_not_get_keys_of_another_tier(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERS_SECRETS", OLD)
    keyed = {"type": "fs", "root_dir": "/mnt/other", "encrypt": "aes-gcm", "keys_env": "KVTIERS_SECRETS"}
    parse_config({"region": {"size": "1MiB"}, "tiers": [{"type": "memory"}, keyed]})
    tier = bench.tier(isolation="process", max_bytes="64MiB")
    collector: Any = tier._collector
    # A process that is still being started has its parent's environment.
    wait_for(lambda: collector.poll() or collector.pids)
    assert tier._channel.pids
    started: list[str] = []
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            started += (thread / "children").read_text().split()
    assert len(started) > 1  # a worker and the collector
    for pid in started:
        assert OLD.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
