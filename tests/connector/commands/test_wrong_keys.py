"""Lost or rotated keys: intact blocks are misses, and no command may call such a storage good."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keyring import KeyRing, key_id, show_key_id
from kvtiers.tiers.blocks.protected_seal import GcmSeal
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.tools import seal_kinds
from tests.connector.commands.test_storage_commands import result_of, run, write_tiers
from tests.identity import FakeSpec, block_key

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
OLD_ID, NEW_ID = (show_key_id(key_id(key)) for key in (OLD, NEW))
COUNT, SIZE = 24, 4096


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A tier that has the key of all stored blocks."""
    mapper = FileMapper.from_offloading_spec("", FakeSpec(), extra_fields={"protection": "aes-gcm"})
    seal = GcmSeal(mapper.fingerprint, mapper.rank, keys=KeyRing(OLD))
    with closing(LocalStore(tmp_path / "kv")) as store:
        open_namespace(store, mapper)
        for number in range(COUNT):
            key = block_key(number)
            payload = memoryview(random.Random(number).randbytes(SIZE))
            store.put(mapper.relative_name(key), seal.seal_parts(key, payload))
    use_keys(tmp_path, OLD)
    options = f"type: fs, root_dir: {tmp_path}/kv, encrypt: aes-gcm, keys_file: {tmp_path}/keys"
    return write_tiers(tmp_path / "c.yaml", options)


def use_keys(folder: Path, *keys: bytes) -> None:
    path = folder / "keys"
    path.write_text("\n".join(key.hex() for key in keys))
    path.chmod(0o600)


def findings(config: str, check: str) -> list[dict[str, Any]]:
    return [one for one in result_of(run("check", config, "--json")[1])["findings"] if one["check"] == check]


def test_verify_counts_blocks_under_unknown_keys_and_fails(config: str, tmp_path: Path) -> None:
    assert run("verify", config)[0] == 0
    use_keys(tmp_path, NEW, OLD)
    assert run("verify", config)[0] == 0
    use_keys(tmp_path, NEW)
    code, out = run("verify", config)
    assert code == 1
    assert f"{COUNT} blocks under key {OLD_ID}, which this tier lacks" in out
    (tier,) = result_of(run("verify", config, "--json")[1])["tiers"]
    assert (tier["unknown_keys"], tier["bad"]) == ({OLD_ID: COUNT}, 0)


def test_sample_of_seals_includes_each_namespace(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_kinds, "SAMPLED_FROM_MAX", 8)  # the protected namespace alone has more blocks
    with closing(LocalStore(tmp_path / "kv")) as store:
        for name in ("a_000000000000_r0", "z_000000000000_r0"):
            store.put(f"{name}/000/00_g0/{'0' * 64}.bin", [memoryview(bytes(2 * SIZE))])
    (tier,) = result_of(run("du", config, "--json")[1])["tiers"]
    assert set(tier["sampled_seals"]) == {f"aes-gcm {OLD_ID}", "other"}
    assert tier["sampled_seals"]["other"] == 2
    (found,) = findings(config, "blocks")
    assert "2 of 4 sampled blocks are of another version or damaged" in found["message"]


def test_verify_of_a_folder_without_config_does_not_judge_keys(config: str, tmp_path: Path) -> None:
    use_keys(tmp_path, NEW)
    assert run("verify", str(tmp_path / "kv"))[0] == 0


def test_verify_fails_if_all_blocks_have_another_protection(config: str, tmp_path: Path) -> None:
    write_tiers(Path(config), f"type: fs, root_dir: {tmp_path}/kv")
    code, out = run("verify", config)
    assert code == 1
    assert f"{COUNT} blocks with encrypt aes-gcm, where this tier has none" in out


def test_check_samples_keys_of_stored_blocks(config: str, tmp_path: Path) -> None:
    assert [one["level"] for one in findings(config, "blocks")] == ["ok"]
    use_keys(tmp_path, NEW)
    (finding,) = findings(config, "blocks")
    assert finding["level"] == "problem"
    assert f"16 of 16 sampled blocks are under key {OLD_ID}" in finding["message"]


def test_du_names_keys_of_a_sample(config: str, tmp_path: Path) -> None:
    code, out = run("du", config)
    assert (code, f"aes-gcm {OLD_ID} (16)" in out, "misses" in out) == (0, True, False)
    use_keys(tmp_path, NEW)
    assert f"16 of the sampled blocks are under key {OLD_ID}" in run("du", config)[1]


def test_show_names_the_key_of_a_block(config: str) -> None:
    out = run("show", config, block_key(0)[:8].hex())[1]
    assert f"with key {OLD_ID}" in out
