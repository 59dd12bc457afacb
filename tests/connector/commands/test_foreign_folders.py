"""Destructive commands on storage that kvtiers never wrote, or that it shares with others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.publish import private_name
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import as_parts
from kvtiers.tiers.testing.servers import moto_server
from tests.connector.commands.test_storage_commands import NAMES, NAMESPACE, ok, result_of, run, write_config
from tests.connector.commands.test_storage_commands import root as root  # a fixture
from tests.identity import FakeSpec
from tests.s3_clients import use_credentials

#: A date, as in names of backups, looks like a namespace's digest. Only the content shows whether it is a namespace.
DATED = "photos_202311271200"


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A folder that kvtiers never wrote, with some names that kvtiers uses, too."""
    strange = tmp_path / "strange"
    for name in (
        *(".tmp/thesis.txt", f"{DATED}/config.json", f"{DATED}_r0/000/00_g0/mine.bin"),
        *("prefixes/notes", "notes.bin", ".ssh/id_ed25519"),
    ):
        (strange / name).parent.mkdir(parents=True, exist_ok=True)
        (strange / name).write_text("{}")
        os.utime(strange / name, (0, 0))
    return strange


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS = [
    ("gc", "--ttl", "7d"),
    ("gc", "--ttl", "7d", "--dry-run"),
    ("gc", "--max-bytes", "1MiB"),
    ("verify", "--repair"),
    ("verify", "--repair", "--dry-run"),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kept", ["all", ".tmp", DATED, ".ssh"])
def test_destructive_command_refuses_folder_without_mark_of_kvtiers(
    strange: Path, command: tuple[str, ...], kept: str
) -> None:
    for path in list(strange.iterdir()):
        if kept not in ("all", path.name):
            path.rename(strange.parent / path.name)
    before = contents(strange)
    name, *options = command
    code, out = run(name, str(strange), *options)
    assert code == 2
    assert "is not a kvtiers storage, so nothing is changed: it holds " in out
    assert "no namespace with a config.json of kvtiers" in out
    assert contents(strange) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_destructive_command_keeps_foreign_files_beside_a_foreign_folder_named_kvtiers(
    strange: Path, command: tuple[str, ...]
) -> None:
    for name in ("notes", "usage", "members/notes", "writers/notes"):
        path = strange / "_kvtiers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        os.utime(path, (0, 0))
    before = contents(strange)
    name, *options = command
    code, _ = run(name, str(strange), *options)
    assert code in (0, 1)
    del before["_kvtiers/usage"]  # the collector's record has this name
    assert contents(strange).items() >= before.items()


@pytest.mark.parametrize("command", COMMANDS)
def test_destructive_command_accepts_empty_folder(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A cron job may run before the engine's first start."""
    (tmp_path / "kv" / "lost+found").mkdir(parents=True)
    name, *options = command
    ok(name, str(tmp_path / "kv"), *options)


@pytest.mark.parametrize("mark", ["identity", "records", "blocks", "leftovers"])
def test_gc_accepts_folder_with_any_mark_of_kvtiers(tmp_path: Path, mark: str) -> None:
    folder = tmp_path / "kv"
    store = LocalStore(folder)
    if mark == "identity":
        open_namespace(store, FileMapper.from_offloading_spec("", FakeSpec()))
    elif mark == "blocks":
        store.put(NAMES[0], as_parts(b"1"))
    elif mark == "records":
        ok("gc", str(folder), "--ttl", "7d")
        assert [path.name for path in folder.iterdir() if path.name[0] != "."] == ["_kvtiers"]
    else:
        (folder / ".tmp").mkdir()
        (folder / ".tmp" / private_name()).touch()
    if mark != "leftovers":
        (folder / ".ssh").mkdir()
        (folder / "notes.txt").write_text("mine")
    ok("gc", str(folder), "--ttl", "7d")
    assert mark == "leftovers" or (folder / "notes.txt").exists()


def test_gc_of_shared_folder_removes_only_own_files_and_dry_run_counts_them(root: Path, strange: Path) -> None:
    for name in contents(strange):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (strange / name).rename(root / name)
    before = contents(root).keys() - {*NAMES, "_kvtiers/measured"}
    own = root / ".tmp" / f"elsewhere-{private_name()}"
    own.write_bytes(b"12345")
    os.utime(own, (0, 0))
    config = write_config(root, "ttl: 1h")
    (result, *_) = result_of(ok("gc", config, "--dry-run", "--json"))["tiers"]
    assert result["leftovers"] == 1
    assert own.exists()
    (result, *_) = result_of(ok("gc", config, "--json"))["tiers"]
    assert result["leftovers"] == 1
    assert not own.exists()
    assert contents(root).keys() >= before
    assert not (root / NAMES[-1]).exists()


def test_engine_started_on_folder_with_foreign_files_keeps_them(strange: Path) -> None:
    before = contents(strange)
    store = LocalStore(strange)
    open_namespace(store, FileMapper.from_offloading_spec("", FakeSpec()))
    for name in NAMES:
        store.put(name, as_parts(b"1"))
    store.sweep()
    store.delete_many(NAMES)
    store.close()
    assert contents(strange).items() >= before.items()


@pytest.mark.parametrize("name", [DATED, "photos"])
def test_rm_keeps_foreign_folder_named_like_a_namespace(strange: Path, name: str) -> None:
    before = contents(strange)
    code, out = run("rm", str(strange), "--namespace", name, "--yes")
    assert code == 1
    assert f"{name} was not found" in out
    assert contents(strange) == before


def test_rm_removes_a_namespace_with_a_damaged_identity_and_blocks(root: Path) -> None:
    (root / NAMESPACE / "config.json").write_text("damaged")
    ok("rm", str(root), "--namespace", NAMESPACE, "--yes")
    assert list(root.glob(f"{NAMESPACE}*")) == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    with moto_server() as server:
        use_credentials(monkeypatch, server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region).create_bucket(Bucket="shared")
        from kvtiers.tiers.config.open_store import open_store
        from kvtiers.tiers.config.tier_options import S3TierConfig

        store = open_store(S3TierConfig(type="s3", bucket="shared"))
        assert isinstance(store, S3Store)
        yield store
        store.close()


def test_bucket_with_foreign_objects_is_refused_until_kvtiers_has_written_to_it(
    tmp_path: Path, bucket: S3Store
) -> None:
    others = [f"{DATED}_r0/a.jpg", f"{DATED}/config.json", ".tmp", "x/notes"]
    client = boto3.client("s3")
    for key in others:
        client.put_object(Bucket="shared", Key=key, Body=b"{}")
    config = tmp_path / "c.yaml"
    config.write_text("region: {size: 1MiB}\ntiers:\n- {type: s3, bucket: shared, ttl: 7d}\n")
    for command in (("gc",), ("verify", "--repair")):
        code, out = run(command[0], str(config), *command[1:])
        assert (code, "is not a kvtiers storage" in out) == (2, True)
    open_namespace(bucket, FileMapper.from_offloading_spec("", FakeSpec()))
    ok("gc", str(config))
    found = {item["Key"] for item in client.list_objects_v2(Bucket="shared")["Contents"]}
    assert found >= set(others)
