"""ls, du and gc over real folders and S3."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from kvtiers.connector.commands.cli import app
from kvtiers.connector.commands.json_schemas import document_schema
from kvtiers.connector.commands.output import human_age
from kvtiers.connector.commands.session import ExitCode
from kvtiers.tiers.blocks.file_mapper import FileMapper, parse_block_name
from kvtiers.tiers.capacity.usage import Usage, publish_usage
from kvtiers.tiers.config.values import human_bytes
from kvtiers.tiers.errors import StorePermissionError
from kvtiers.tiers.server.namespace import open_namespace
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.publish import private_name
from kvtiers.tiers.testing.contract import as_parts
from kvtiers.tiers.testing.servers import S3Server, moto_server
from tests.identity import FakeSpec, block_key
from tests.s3_clients import use_credentials

SIZE = 4096
NAMES = [FileMapper.from_offloading_spec("", FakeSpec()).relative_name(block_key(n, group=n % 2)) for n in range(10)]
NAMESPACE = NAMES[0].partition("/")[0].removesuffix("_r0")


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output


def result_of(out: str) -> dict[str, Any]:
    """The result in the JSON document that a command printed, perhaps between lines of standard error."""
    (line,) = (line for line in out.splitlines() if line.startswith('{"command"'))
    document = json.loads(line)
    jsonschema.validate(document, document_schema(document["command"]))
    assert isinstance(document["result"], dict)
    return document["result"]


def ok(*args: str) -> str:
    code, out = run(*args)
    assert code == 0, out
    return out


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten blocks, block n last used n hours ago."""
    store = LocalStore(tmp_path / "kv")
    open_namespace(store, FileMapper.from_offloading_spec("", FakeSpec()))
    for number, name in enumerate(NAMES):
        store.put(name, as_parts(bytes(SIZE)))
        at = time.time() - 3600 * number
        os.utime(tmp_path / "kv" / name, (at, at))
    store.close()
    return tmp_path / "kv"


def write_tiers(path: Path, *tiers: str) -> str:
    """Write the YAML file of a deployment with tiers of these options. Returns its path."""
    path.write_text("\n".join(["region: {size: 1MiB}", "tiers:", *(f"- {{{tier}}}" for tier in tiers), ""]))
    return str(path)


def write_config(root: Path, *options: str) -> str:
    return write_tiers(root.parent / "c.yaml", f"type: fs, root_dir: {root}, {', '.join(options)}", "type: memory")


def test_du_counts_blocks_without_times_as_unknown_age(root: Path) -> None:
    for name in NAMES[:3]:
        os.utime(root / name, (0, 0))
    config = write_config(root)
    assert "of unknown age: 3 blocks" in ok("du", config)
    (found, *_) = result_of(ok("du", config, "--json"))["tiers"]
    assert (found["ages"]["unknown"]["blocks"], found["ages"]["older"]["blocks"]) == (3, 0)


@pytest.mark.parametrize(
    "command", [("ls",), ("du",), ("verify",), ("copy", "--from", "a", "--to", "b"), ("gc", "--dry-run")]
)
def test_read_commands_create_nothing_in_an_nfs_root(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A folder that root's command made would keep the engine of another user from starting."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tiers = [f"type: nfs, min_free: 0, ttl: 1h, name: {name}, root_dir: {tmp_path / name}" for name in ("a", "b")]
    ok(*command, write_tiers(tmp_path / "c.yaml", *tiers))
    assert [list((tmp_path / name).iterdir()) for name in ("a", "b")] == [[], []]


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("gc", "--dry-run")])
def test_read_commands_keep_leftovers_of_dead_writers(root: Path, command: tuple[str, ...]) -> None:
    (root / ".tmp").mkdir()
    left = root / ".tmp" / f"elsewhere-{private_name()}"
    left.write_bytes(bytes(SIZE))
    os.utime(left, (0, 0))
    out = run(*command, write_config(root, "ttl: 9h"))[1]
    assert left.exists()
    if command[0] == "gc":
        assert "would be removed, left by dead writers: 1 file" in out


def test_ls_lists_blocks_as_text_and_json_with_prefix_and_limit(root: Path) -> None:
    config = write_config(root)
    result = CliRunner().invoke(app, ["ls", config])
    lines = result.stdout.splitlines()
    assert sorted(line.split()[3] for line in lines) == sorted(NAMES)
    assert all(line.split()[::2] == [str(SIZE), "fs"] for line in lines)
    assert result.stderr == f"fs at {root}: 10 blocks, 40 KiB\n"
    out = ok("ls", config, "--json")
    *found, _ = [json.loads(line) for line in out.splitlines()]
    assert {(item["key"], item["group"], item["tier"]) for item in found} == {
        (name, number % 2, "fs") for number, name in enumerate(NAMES)
    }
    for item in found:
        jsonschema.validate(item, document_schema("ls"))
    assert result_of(out)["tiers"] == [{"tier": "fs", "where": str(root), "blocks": 10, "bytes": 10 * SIZE}]
    assert len(ok("ls", config, "--limit", "3", "-q").splitlines()) == 3
    assert ok("ls", config, "--prefix", NAMES[4], "-q").split()[3:] == [NAMES[4]]
    assert ok("ls", config, "--prefix", "nobody", "-q") == ""


def test_du_sums_blocks_by_namespace_group_and_age(root: Path) -> None:
    out = ok("du", write_config(root, "max_bytes: 1MiB"))
    assert "10 blocks, 40 KiB, 4% of max_bytes 1 MiB (no collector has counted yet)" in out
    assert NAMESPACE[:20] in out
    (tier,) = result_of(ok("du", write_config(root), "--json"))["tiers"]
    assert (tier["blocks"], tier["bytes"]) == (10, 10 * SIZE)
    names = ("namespace", "engine", "rank", "group", "blocks")
    assert [tuple(group[name] for name in names) for group in tier["groups"]] == [
        (NAMESPACE, "vllm", 0, 0, 5),
        (NAMESPACE, "vllm", 0, 1, 5),
    ]
    assert tier["ages"]["1h"]["blocks"] == 1
    assert tier["ages"]["1d"]["blocks"] == 9
    assert tier["other_blobs"] == 1  # config.json


@pytest.mark.parametrize(("columns", "terminal"), [("20", ""), ("300", ""), ("20", "1")])
def test_du_keeps_each_namespace_on_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, columns: str, terminal: str
) -> None:
    """Names must be easy to copy, and output in a pipe easy to parse."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", terminal)
    monkeypatch.setenv("TERM", "dumb")
    lines = ok("du", write_config(root)).splitlines()
    rows = [line.split() for line in lines if NAMESPACE in line]
    assert rows == [[NAMESPACE, "vllm", "0", group, "5", "20", "KiB"] for group in ("0", "1")]


def test_gc_removes_blocks_older_than_ttl_and_dry_run_none(root: Path) -> None:
    config = write_config(root, "ttl: 5.5h")
    assert "would be removed by ttl: 4 blocks, 16 KiB" in ok("gc", config, "--dry-run")
    assert len(list(root.rglob("*.bin"))) == 10
    assert "removed by ttl: 4 blocks, 16 KiB" in ok("gc", config)
    assert {str(path.relative_to(root)) for path in root.rglob("*.bin")} == set(NAMES[:6])
    (tier,) = result_of(ok("gc", config, "--json"))["tiers"]
    assert tier["removed_by_reason"] == {reason: {"blocks": 0, "bytes": 0} for reason in ("ttl", "capacity")}
    assert " counted)" in ok("du", write_config(root, "max_bytes: 1MiB"))


@pytest.mark.parametrize(
    "command", [("ls",), ("du",), ("gc",), ("gc", "--dry-run"), ("verify",), ("copy", "--from", "nfs", "--to", "fs")]
)
def test_missing_root_folder_is_reported_and_not_created(command: tuple[str, ...], tmp_path: Path) -> None:
    here, mistyped = tmp_path / "here", tmp_path / "mistyped"
    config = write_tiers(
        tmp_path / "c.yaml", f"type: fs, root_dir: {here}", f"type: nfs, root_dir: {mistyped}, ttl: 1h"
    )
    LocalStore(here).close()
    code, out = run(*command, config)
    assert code == 1
    assert f"'{mistyped}' does not exist" in out
    assert not mistyped.exists()


def test_gc_fails_if_blocks_cannot_be_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = StorePermissionError("Permission denied (EACCES)")
    monkeypatch.setattr(LocalStore, "delete_many", lambda self, keys: [refused for _ in keys])
    code, out = run("gc", write_config(root, "ttl: 5.5h"))
    assert code == 1
    assert "could not be removed: 4 blocks" in out


def test_gc_without_limits_warns_and_removes_nothing(root: Path) -> None:
    config = write_tiers(root.parent / "c.yaml", f"type: fsspec, url: 'file://{root}'")
    assert "neither max_bytes nor ttl is set" in ok("gc", config)
    assert len(list(root.rglob("*.bin"))) == 10


def test_gc_with_min_free_alone_makes_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ok("gc", write_config(root, "min_free: 1MiB"))
    assert len(list(root.rglob("*.bin"))) == 10
    monkeypatch.setattr(LocalStore, "space", lambda self: ((1 << 20) - SIZE, 1 << 30))
    assert "removed by capacity" in ok("gc", write_config(root, "min_free: 1MiB"))
    assert 0 < len(list(root.rglob("*.bin"))) < 10


def test_gc_skips_tier_while_another_collector_works(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.connector.commands.collect._run", lambda collector, *_: collector.run())
    publish_usage(LocalStore(root), Usage(holder="another"))
    assert "another collector is working here" in ok("gc", write_config(root, "ttl: 1s"))
    (result,) = result_of(ok("gc", write_config(root, "ttl: 1s"), "--json"))["tiers"]
    assert result["reason"] == "another collector is working here"
    assert len(list(root.rglob("*.bin"))) == 10


def test_tier_option_selects_a_tier_with_persistent_storage(root: Path) -> None:
    config = write_config(root, "name: near")
    assert "near" in ok("du", config, "--tier", "near")
    for command in ("ls", "du", "gc"):
        code, out = run(command, config, "--tier", "memory")
        assert code == 2
        assert "accepted: near" in out
        assert run(command, str(root / "none.yaml"))[0] == 2
    code, out = run("du", write_tiers(root / "memory.yaml", "type: memory, max_bytes: 1MiB"))
    assert code == 2
    assert "no tier that commands can read: a memory tier exists only inside its engine" in out
    code, out = run("du", write_tiers(root / "theirs.yaml", "type: Mine, module_path: mine"))
    assert code == 2
    assert "no tier that commands can read: Mine is not a built-in tier type" in out


def test_du_fails_if_root_is_a_file_or_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    code, out = run("du", write_config(tmp_path / "kv"))
    assert code == 1
    assert "must be a folder" in out
    code, out = run("du", write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {tmp_path}/kv/below"))
    assert code == 1
    assert "Not a directory" in out  # rather than that it is not there: as where a folder above may not be read


def test_du_ls_gc_and_rm_on_s3_leave_other_objects_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    with moto_server() as server:
        assert isinstance(server, S3Server)
        use_credentials(monkeypatch, server)
        client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region)
        client.create_bucket(Bucket="bucket")
        for name in NAMES:
            client.put_object(Bucket="bucket", Key=f"p/{name}", Body=bytes(SIZE))
        for name in (f"p/{NAMESPACE}/config.json", "p/notes_r1/plan.txt", "other-team/results"):
            client.put_object(Bucket="bucket", Key=name, Body=b"precious")
        tier = f"type: s3, bucket: bucket, prefix: p, endpoint_url: '{server.endpoint_url}'"
        config = write_tiers(tmp_path / "c.yaml", f"{tier}, ttl: 10d")
        assert "s3 at s3://bucket/p: 10 blocks, 40 KiB" in ok("du", config)
        ok("gc", config)
        assert len(ok("ls", config, "-q").splitlines()) == 10
        ok("rm", config, "--namespace", NAMESPACE, "-y")
        assert ok("ls", config, "-q") == ""
        left = {found["Key"] for found in client.list_objects_v2(Bucket="bucket")["Contents"]}
        assert {"p/notes_r1/plan.txt", "other-team/results"} <= left


@pytest.mark.parametrize("command", ["du", "ls", "gc", "verify"])
def test_commands_report_failing_tier_and_show_other_tiers(root: Path, command: str) -> None:
    near = f"type: fs, name: near, root_dir: {root.parent}/absent, ttl: 9h"
    config = write_tiers(root.parent / "two.yaml", near, f"type: nfs, name: far, root_dir: {root}, ttl: 9d")
    code, out = run(command, config)
    assert code == 1
    assert "tier near at " in out
    assert "does not exist; an engine creates it" in out.replace("\n", " ")
    assert (NAMES[0] if command == "ls" else "far at ") in out
    if command != "ls":
        near_result, far_result = result_of(run(command, config, "--json")[1])["tiers"]
        assert "does not exist" in near_result["error"]
        assert "error" not in far_result


def test_ls_shows_time_beyond_the_calendar_in_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = LocalStore.keys
    monkeypatch.setattr(
        LocalStore, "keys", lambda self, prefix="": (KeyInfo(i.key, i.size, 1e15) for i in keys(self, prefix))
    )
    lines = ok("ls", write_config(root), "-q").splitlines()
    assert [line.split()[1] for line in lines] == 10 * ["1000000000000000"]


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0.5, "1970-01-01T00:00:00Z"),
        (1_794_787_199.9, "2026-11-15T23:59:59Z"),
        (-1.0, "1969-12-31T23:59:59Z"),
        (253_402_300_799.0, "9999-12-31T23:59:59Z"),
        (253_402_300_800.0, "253402300800"),
    ],
)
def test_ls_shows_times_in_utc(root: Path, monkeypatch: pytest.MonkeyPatch, at: float, text: str) -> None:
    monkeypatch.setattr(LocalStore, "keys", lambda *_: iter([KeyInfo(NAMES[0], SIZE, at)]))
    assert ok("ls", write_config(root), "-q").split() == [str(SIZE), text, "fs", NAMES[0]]


OTHERS = "m_0123456789ab"


@pytest.mark.parametrize(
    "name",
    [
        "x",
        f"{OTHERS}/abc/de_g0/abcde.bin",
        f"{OTHERS}_r0/abc/de_g0/abcde.tmp",
        f"{OTHERS}_r0/abc/de_g0/abcdf.bin",
        f"{OTHERS}_r0/abc/de_g0/abdde.bin",
        f"{OTHERS}_r0/abc/de_g0/abcd.bin",
        f"{OTHERS}_r0/abc/de_g0/abcde{'0' * 124}.bin",
        f"{OTHERS}_r0/abc/de_g0/abcdeG.bin",
        f"{OTHERS}_r0/abc/de_g0/abcde.bin\n",
        f"{OTHERS}_r4294967296/abc/de_g0/abcde.bin",
        f"{OTHERS}_r0/abc/de_g4294967296/abcde.bin",
        f"a/{OTHERS}_r0/abc/de_g0/abcde.bin",
    ],
)
def test_invalid_block_name_is_not_parsed(name: str) -> None:
    assert parse_block_name(name) is None


def test_block_name_is_parsed_into_namespace_rank_group_and_hash() -> None:
    found = parse_block_name(f"{OTHERS}_r4294967295/abc/de_g07/abcde{'0' * 123}.bin")
    assert found == (OTHERS, 4294967295, 7, f"abcde{'0' * 123}")


def test_sizes_and_ages_are_shown_with_units() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert [human_age(s) for s in (-1, 90, 600, 7300, 172_800)] == ["0s", "90s", "10min", "2h", "2d"]


def write_theirs(root: Path, name: str = "theirs.yaml") -> str:
    """A tier that is not ours, and two that are."""
    LocalStore(f"{root}-2").close()
    fs = [
        f"type: fs, name: {tier}, root_dir: {path}, min_free: 0"
        for tier, path in (("near", root), ("far", f"{root}-2"))
    ]
    return write_tiers(root.parent / name, "type: Mine, module_path: mine", *fs)


@pytest.mark.parametrize("command", ["ls", "du", "verify", "copy"])
def test_commands_name_the_skipped_foreign_tier(root: Path, command: str) -> None:
    config = write_theirs(root)
    result = CliRunner().invoke(app, [command, config])
    assert f"kvtiers {command}: skipping Mine, which is not a built-in tier type" in result.stderr
    assert "left out" not in result.stdout
    if command != "copy":
        assert "left out" not in CliRunner().invoke(app, [command, config, "--tier", "near"]).stderr


def test_copy_names_skipped_tier_of_each_file_whose_tier_is_not_named(root: Path) -> None:
    one, other = write_theirs(root), write_theirs(root, "others.yaml")
    both = ("--from", "far", "--to", "near")
    for arguments, told in (
        ((one, *both), 0),
        ((one, "--to", "near"), 1),
        ((one, other, *both), 0),
        ((one, other, "--to", "far"), 1),
        ((one, other), 2),
    ):
        assert CliRunner().invoke(app, ["copy", *arguments]).stderr.count("skipping Mine") == told, arguments


@pytest.mark.parametrize("command", ["ls", "du", "verify", "copy"])
def test_control_characters_in_file_names_are_escaped(root: Path, command: str) -> None:
    """C1 controls, which begin a terminal's commands as ESC does, and letters that turn the rest of a line about."""
    odd = root / NAMES[0].replace(NAMESPACE, f"\x9b2J\u202e[bold]{NAMESPACE}")
    odd.parent.mkdir(parents=True)
    odd.write_bytes(bytes(2 * SIZE))
    config = write_config(root)
    other = write_tiers(root.parent / "other.yaml", f"type: fs, root_dir: {root.parent}/other, min_free: 0")
    _, out = run(command, config, *([other] if command == "copy" else []))
    assert "\\x9b2J\\u202e[bold]" in out
    assert out.replace("\n", "").isprintable()


def test_invalid_option_found_by_a_store_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strict_store.py").write_text(
        "from kvtiers.tiers.errors import ConfigError\n"
        "def make_store(options): raise ConfigError('write 3', field='options.shelves')\n"
    )
    code, out = run("gc", write_tiers(tmp_path / "c.yaml", "type: store, module_path: strict_store, ttl: 1h"))
    assert (code, "options.shelves: write 3" in out) == (2, True)


def test_error_for_url_without_colon_does_not_show_its_login(tmp_path: Path) -> None:
    for url in ("s3//me:CANARY@bucket/kv", "s3:me:CANARY@bucket/kv"):
        code, out = run("du", url)
        assert (code, "CANARY" in out) == (ExitCode.BAD_INPUT, False)
        assert "accepted is a YAML file, an existing folder, or a URL such as s3://bucket/prefix" in out
