from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import yaml

from kvtiers.connector.commands import check, tier_checks
from kvtiers.connector.commands.session import ExitCode
from kvtiers.connector.spec import DeploymentSpec
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.config.tier_options import S3TierConfig
from kvtiers.tiers.errors import ConfigError, StoreError, StoreUnavailableError
from kvtiers.tiers.stores.files import mounts
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from tests.connector.commands.test_check_findings import deployment, fs
from tests.connector.commands.test_storage_commands import ok, result_of, run, write_tiers
from tests.connector.commands.test_verify_command import put_blocks
from tests.identity import CONFIG, FakeSpec, block_key
from tests.s3_clients import CLIENTS, use_client, use_credentials

CANARY = "CANARYCANARY"
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to import a driver."""
    monkeypatch.setattr(check, "TIERS_S_MAX", 300.0)


def test_check_describes_the_configured_region_and_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "c.yaml"
    text = (
        (CONFIGS / "local-fs.yaml")
        .read_text()
        .replace("size: 1GiB", "size: 1MiB")
        .replace("min_free: 1GiB", "min_free: 1")
    )
    config.write_text(text)
    code, out = run("check", str(config))
    assert code == 0
    for part in ("1 MiB", "LRU", "tiers[0]", "fs", "a checksum"):
        assert part in out
    assert out.splitlines()[-1] == f"{config} is usable"
    code, out = run("check", str(config), "--json")
    assert code == 0
    assert result_of(out)["config"]["region"]["size"] == 1 << 20


def texts(level: str, *given: dict[str, Any], writes: bool = False, **more: Any) -> list[str]:
    """What ``check`` finds in these tiers on this machine, as lines that begin with the option at fault."""
    findings = check.examine(deployment(*given, **more), writes=writes).findings
    return [f"{one.place}: {one.message}{one.fix and f'; {one.fix}'}" for one in findings if one.level == level]


def problems(*given: dict[str, Any], **more: Any) -> list[str]:
    return texts("problem", *given, **more)


EVIL = "k\\e[2J\\u202e\\x9b1m[red]\\nOK, all is good"  # of YAML


@pytest.mark.parametrize(
    "tier",
    [
        f'{{type: fs, root_dir: /x, "{EVIL}": 1}}',
        f'{{type: "{EVIL}"}}',
        f'{{type: fs, root_dir: "relative/{EVIL}", max_bytes: "{EVIL}"}}',
        f'{{type: fs, root_dir: /x, name: "{EVIL}", max_bytes: -1}}',
    ],
)
def test_check_of_bad_file_escapes_control_characters(tmp_path: Path, tier: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f'region: {{size: 1MiB}}\n"{EVIL}": 1\ntiers:\n- {tier}\n')
    code, out = run("check", str(config))
    assert code == ExitCode.BAD_INPUT
    shown = "k\\x1b[2J\\u202e\\x9b1m[red]\\nOK, all is good"
    assert f"  {shown}: is not a known key" in out
    assert all(line.isprintable() for line in out.split("\n"))
    assert not any(line.startswith("OK") for line in out.split("\n"))
    assert shown in json.loads(run("check", str(config), "--json")[1].splitlines()[-1])["errors"][0]


def test_check_of_good_file_escapes_control_characters_but_no_brackets(tmp_path: Path) -> None:
    place = f'"{tmp_path}/{EVIL}"'
    code, out = run("check", write_tiers(tmp_path / "[red]c.yaml", f"type: fs, root_dir: {place}, min_free: 1"))
    assert (code, "[red]c.yaml is usable" in out.replace("\n", "")) == (0, True)
    assert all(line.isprintable() for line in out.split("\n"))


def test_check_shows_limits_of_each_tier(tmp_path: Path) -> None:
    fs = f"type: fs, root_dir: {tmp_path}/kv, min_free: 1, max_bytes: 10GiB, ttl: 7d"
    url = f"type: fsspec, url: 'file://{tmp_path}/far', ttl: 12h"
    free = f"type: fs, name: free, root_dir: {tmp_path}/free, min_free: 1"
    code, out = run("check", write_tiers(tmp_path / "c.yaml", fs, url, free))
    assert code == 0
    out = " ".join(out.split())
    assert "all writers together store at most about 10 GiB: shortly before, the least recently used blocks" in out
    assert "blocks not used for 7d are removed" in out
    assert "blocks not written for 12h are removed" in out
    assert "nothing is ever removed; set max_bytes or ttl to bound it" in out


def test_check_names_field_of_each_mistake(tmp_path: Path) -> None:
    config = write_tiers(tmp_path / "c.yaml", "type: memory", "type: memory, max_bytes: 10 Gigs")
    code, out = run("check", config)
    assert code == ExitCode.BAD_INPUT
    assert "tiers[1].max_bytes: '10 Gigs' is not a size; write a number and a unit, such as 10GiB" in out
    code, out = run("check", config, "--json")
    assert code == ExitCode.BAD_INPUT
    assert (result_of(out)["verdict"], result_of(out)["config"]) == ("not_usable", None)
    document = json.loads(out.splitlines()[-1])
    assert not document["ok"]
    (error,) = document["errors"]
    assert error == "tiers[1].max_bytes: '10 Gigs' is not a size; write a number and a unit, such as 10GiB"
    assert out.splitlines()[0] == f"kvtiers check: {error}"  # on standard error


def test_check_without_a_readable_file_or_model_is_bad_input(tmp_path: Path) -> None:
    for options, said in (
        ((), "give a YAML file, --model or --schema"),
        (("--model", str(tmp_path), "--write"), "give a YAML file"),
        ((str(tmp_path / "none.yaml"), "--tp", "2"), "--tp, --kv-cache-dtype, --block-size and --prefill apply"),
    ):
        code, out = run("check", *options)
        assert (code, said in " ".join(out.split())) == (2, True), out
    code, out = run("check", str(tmp_path / "none.yaml"))
    assert code == ExitCode.BAD_INPUT
    assert "cannot be read" in out


def test_check_prints_schema_for_editors() -> None:
    code, out = run("check", "--schema")
    assert code == 0
    assert json.loads(out)["properties"].keys() == {
        *("region", "blocks_per_chunk", "tiers", "handler", "metrics", "identity", "trace_requests")
    }


def test_check_reports_problems_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    tiers = (fs(tmp_path / "file"), fs(tmp_path / "kv", min_free="900PiB"))
    shm, memory, *rest = problems(*tiers, region={"size": "900PiB"})
    assert shm.startswith("region.size: ")
    assert "--shm-size" in shm
    assert memory.startswith("region.size: ")
    assert [finding.split(":")[0] for finding in rest] == ["tiers[0].root_dir", "tiers[1].min_free"]


def test_check_reports_root_that_no_store_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    for root, message in ((tmp_path / "link", "is a symbolic link"), (tmp_path / ("a" * 300), "File name too long")):
        (found,) = problems(fs(root))
        assert found.startswith("tiers[0].root_dir: ")
        assert message in found

    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)  # a folder above it that may not be searched
    (found,) = problems(fs(tmp_path / "kv"))
    assert f"{tmp_path}/kv cannot be accessed by uid {os.getuid()}: Permission denied" in found


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (
            {"type": "memory", "encrypt": "aes-gcm", "keys_file": "/nowhere/keys"},
            ".keys_file: /nowhere/keys cannot be read: No such file or directory",
        ),
        (
            {"type": "memory", "encrypt": "aes-gcm", "keys_env": "NOT_SET"},
            ".keys_env: environment variable NOT_SET is not set",
        ),
        ({"type": "memory", "encrypt": "aes-gcm", "keys_env": "NO_KEYS"}, ".keys_env: key 1 is not accepted"),
        ({"type": "fsspec", "url": "nosuch://x/y"}, ".url: nosuch://: fsspec has no such driver"),
        ({"type": "fsspec", "url": "simplecache::abfs://x/y"}, ".url: abfs://: the driver is not installed: pip inst"),
        ({"type": "Tier", "module_path": "no_such_module"}, ".module_path: tier 'Tier' cannot be imported"),
        ({"type": "Tier", "module_path": "json"}, ".type: module 'json' has no class 'Tier'"),
        (
            {"type": "JSONDecoder", "module_path": "json"},
            ".type: <class 'json.decoder.JSONDecoder'> is not a Secondary",
        ),
        ({"type": "fs", "root_dir": "HERE/file/x"}, ".root_dir: HERE/file is not a folder"),
        ({"type": "nfs", "root_dir": "HERE/file"}, ".root_dir: HERE/file is not a folder"),
        ({"type": "nfs", "root_dir": "HERE/link"}, ".root_dir: HERE/link is a symbolic link"),
    ],
)
def test_check_reports_settings_that_an_engine_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: dict[str, Any], expected: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("NO_KEYS", "none")
    given = {
        name: value.replace("HERE", str(tmp_path)) if name == "root_dir" else value for name, value in tier.items()
    }
    monkeypatch.setattr(tier_checks, "missing_mount", lambda _: "")  # this folder is not on an NFS mount
    (found,) = problems(given)
    assert found.startswith("tiers[0]" + expected.replace("HERE", str(tmp_path)))
    spec = DeploymentSpec(CONFIG, deployment(given), 65_536)
    with pytest.raises((ConfigError, StoreError)):
        spec.get_manager()
    spec.shutdown()


@pytest.mark.parametrize(
    ("module", "config", "field"),
    [
        ("prometheus_client", {"metrics": {"port": 0}}, "metrics"),
        (
            "cryptography",
            {"tiers": [{"type": "memory", "encrypt": "aes-gcm", "keys_env": "KEYS"}]},
            "tiers[0].encrypt",
        ),
    ],
)
def test_check_names_missing_packages(
    monkeypatch: pytest.MonkeyPatch, module: str, config: dict[str, Any], field: str
) -> None:
    monkeypatch.setenv("KEYS", "a1" * 32)
    for name in [
        name
        for name in sys.modules
        if name.startswith((f"{module}.", "kvtiers.tiers.exporter", "kvtiers.tiers.blocks.protected"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    (found,) = problems({"type": "memory"}, **config)
    assert (found.split(": ")[0], "pip install '.[" in found) == (field, True)


@pytest.mark.parametrize(("kind", "is_told"), [("ext4", True), ("overlay", True), ("ceph", False), ("nfs4", False)])
def test_nfs_tier_without_its_mount_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, is_told: bool
) -> None:
    for module in ("kvtiers.connector.commands.tier_checks", "kvtiers.tiers.stores.files.mounts"):
        monkeypatch.setattr(f"{module}.file_system_type", lambda _: kind)
    tier = {"type": "nfs", "root_dir": str(tmp_path / "kv"), "min_free": 0, "isolation": "thread"}
    said = f"root_dir: {tmp_path}/kv is not on an NFS mount ({kind})"
    config = tmp_path / "c.json"
    config.write_text(deployment(tier).model_dump_json())
    code, out = run("check", str(config))
    assert (code, f"problem tiers[0] nfs, {said}" in out) == (ExitCode.FAILED if is_told else 0, is_told)
    spec = DeploymentSpec(CONFIG, deployment(tier), 65_536)
    spec.get_manager()
    spec.shutdown()
    assert len([r for r in caplog.records if f"tier nfs: {said}" in r.getMessage()]) == is_told


def test_check_examines_all_tiers_concurrently_and_reports_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that do not answer take seconds each."""
    all_asked = Barrier(3)

    def ask(tier: S3TierConfig) -> None:
        all_asked.wait(120)
        raise StoreUnavailableError(f"endpoint: {tier.name} does not answer; start it")

    monkeypatch.setattr(tier_checks, "_try_bucket", ask)
    found = problems(*({"type": "s3", "bucket": f"kv-{name}", "name": name} for name in "cab"))
    assert found == [f"tiers[{n}]: endpoint: {name} does not answer; start it" for n, name in enumerate("cab")]


@pytest.mark.parametrize(
    ("tiers", "code", "verdict"),
    [
        ([{}], 0, "usable"),
        ([], 0, "usable, with 1 warning"),
        ([{"max_bytes": "900PiB"}], 0, "usable, with 1 warning"),
        ([{"min_free": "900PiB"}], ExitCode.FAILED, "not usable: tiers[0].min_free"),
        (
            [{"encrypt": "aes-gcm", "keys_env": "NOT_SET", "min_free": "900PiB"}, {"min_free": "900PiB", "ttl": "1s"}],
            ExitCode.FAILED,
            "not usable: tiers[0].keys_env, tiers[0].min_free, tiers[1].min_free",
        ),
        ([{"max_bites": 1}, {"ttl": "soon"}], ExitCode.BAD_INPUT, "not usable: 2 mistakes"),
        ([{"root_dir": "server:/export"}], ExitCode.BAD_INPUT, "not usable: 1 mistake"),
    ],
)
def test_check_ends_with_the_verdict(
    tmp_path: Path, tiers: list[dict[str, Any]], code: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.yaml"
    written = [fs(tmp_path / f"kv{n}") | tier for n, tier in enumerate(tiers)]
    config.write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": written}))
    got, out = run("check", str(config))
    assert (got, out.splitlines()[-1]) == (code, f"{config} is {verdict}")
    got, out = run("check", str(config), "--json")
    assert (got, json.loads(out.splitlines()[-1])["ok"]) == (code, code == 0)
    words = {"usable": "usable", "usable_with_warnings": "usable, with ", "not_usable": "not usable: "}
    assert verdict.startswith(words[result_of(out)["verdict"]])
    found_problems = code == ExitCode.FAILED
    assert result_of(out)["problems"] == (verdict.partition(": ")[2].split(", ") if found_problems else [])


def test_warning_about_limit_beyond_the_disk_names_an_accepted_limit(tmp_path: Path) -> None:
    tier = fs(tmp_path / "kv") | {"max_bytes": "900PiB", "min_free": "1MiB"}
    (warning,) = texts("warning", tier)
    assert warning.startswith("tiers[0].max_bytes: 921600.0 TiB is more than the file system of ")
    limit = warning.rpartition("write at most ")[2]
    assert check.examine(deployment(tier | {"max_bytes": limit})).verdict == "usable"


def test_check_shows_isolation_deadlines_and_encryption_of_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", "a1" * 32)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.yaml"
    options = {"name": "near", "isolation": "thread", "job_deadline_s": "20s", "encrypt": "aes-gcm", "keys_env": "KEYS"}
    config.write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": [fs(Path("kv")) | options]}))
    code, out = run("check", "c.yaml")
    assert code == 0
    for part in (
        f"tiers[0] near: fs, {tmp_path}/kv", "in the engine's process (isolation thread)",
        "on a job after 20s", "lookups after 200ms",
        "encrypt aes-gcm, keys from the variable KEYS",
    ):  # fmt: skip
        assert part in " ".join(out.split())
    assert "a1a1" not in out


def test_check_says_where_store_threads_of_a_tier_run(tmp_path: Path) -> None:
    out = ok("check", write_tiers(tmp_path / "c.yaml", "type: memory, name: ram"))
    assert "tiers[0] ram: memory\n" in out
    assert "store threads, in the engine's process (isolation thread)" in out
    out = ok("check", write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {tmp_path}/kv, min_free: 1, children: 1"))
    assert "store threads, in 1 process (isolation auto)" in out


def test_check_shows_size_of_stored_blocks_and_room_in_the_region(tmp_path: Path) -> None:
    region = memoryview(bytearray(1 << 20)).cast("b", (1, 1 << 20))
    tier = BuiltInTier(FakeSpec(), region, "fs", root_dir=str(tmp_path / "kv"), min_free=0, isolation="thread")
    assert tier.store is not None
    tier.store.put(tier.mapper.relative_name(block_key(1)), [region])
    tier.shutdown()
    model = str(tier.mapper.get_run_config()["model_name"])
    config = tmp_path / "c.yaml"
    for size, room in (("4MiB", 4), ("64KiB", 0)):
        config.write_text(yaml.safe_dump({"region": {"size": size}, "tiers": [fs(tmp_path / "kv")]}))
        out = " ".join(run("check", str(config))[1].split())
        assert f"holds blocks of {model}, 1 MiB each: the region has room for about {room}" in out
        assert ("write at least 16MiB for this model" in out) == (room == 0)


@pytest.mark.parametrize("type_", ["fs", "nfs", "fsspec", "store"])
def test_check_without_write_changes_nothing_in_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str
) -> None:
    monkeypatch.setattr(tier_checks, "missing_mount", lambda _: "")
    kv = tmp_path / "kv"
    (tmp_path / "kvtiers_check_files.py").write_text(
        f"from kvtiers.tiers.stores.files.local import LocalStore\ndef make_store(_): return LocalStore({str(kv)!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    places = {"fsspec": {"url": f"file://{kv}"}, "store": {"module_path": "kvtiers_check_files"}}
    tier = {"type": type_, "max_bytes": "1GiB"} | places.get(type_, {"root_dir": str(kv), "min_free": 0})
    assert problems(tier) == []
    if type_ == "store":  # it makes its folder when it is opened
        (said,) = [text for text in texts("ok", tier) if text.startswith("tiers[0]: answers")]
        assert said.endswith("kvtiers_check_files opens this store and may create folders even without --write")
    else:
        assert not kv.exists()
    for has_blocks in (False, True):
        with closing(LocalStore(kv)) as store:
            if has_blocks:
                put_blocks(store)
        before = sorted(kv.rglob("*"))
        assert problems(tier) == []
        assert sorted(kv.rglob("*")) == before
    assert problems(tier, writes=True) == []
    assert type_ == "store" or not (kv / tier_checks.TRIAL_FOLDER).exists()


# ---- what an engine's first lookup, put and get would meet -----------------------------------------------------------


def s3fs(url: str = "s3://kvb/kv", **options: Any) -> dict[str, Any]:
    return {"type": "fsspec", "url": url, "storage_options": {"key": "k", "secret": "s", **options}}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Fault.BUCKET_GONE, "tiers[0].url: the bucket or container of s3://kvb/kv does not exist; create it"),
        (Fault.ACCESS_DENIED, "tiers[0]: access was denied to the driver (PermissionError); check its storage_options"),
    ],
)
def test_check_of_fsspec_url_whose_server_refuses_is_a_problem(code: Fault, expected: str) -> None:
    with HttpFaultServer() as server:
        server.inject(code)
        (found,) = problems(s3fs(endpoint_url=server.endpoint_url))
    assert found.startswith(expected)


def test_check_of_fsspec_url_whose_server_is_silent_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_checks, "FSSPEC_CALL_S_MAX", 0.2)
    with HttpFaultServer() as server:
        server.inject(Fault.STALL)
        (found,) = problems(s3fs(endpoint_url=server.endpoint_url))
    assert found.startswith("tiers[0]: the driver did not finish in time")
    assert found.endswith("; check that the server is up, and that this machine can reach it")


def test_check_of_good_fsspec_url_has_no_problem_and_leaves_nothing() -> None:
    with HttpFaultServer(buckets=("kvb",)) as server:
        server.put_object("kvb", "kv/there", b"1")
        tier = s3fs(endpoint_url=server.endpoint_url)
        assert problems(tier | {"read_only": True}) == []
        assert server.requests("PUT") == []
        assert problems(tier) == []
        assert "tiers[0]: answers" in texts("ok", tier)
        assert server.requests("PUT") == []
        assert problems(tier, writes=True) == []
        assert left_by_puts(server) == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaultServer]:
    use_credentials(monkeypatch)
    with HttpFaultServer(buckets=("kvb",)) as server:
        yield server


def s3(server: HttpFaultServer, **options: Any) -> dict[str, Any]:
    return {"type": "s3", "bucket": "kvb", "endpoint_url": server.endpoint_url, "max_bytes": "1GiB", **options}


def of_trial(server: HttpFaultServer) -> list[str]:
    return [request.method for request in server.requests() if f"/{tier_checks.TRIAL_FOLDER}/" in request.path]


def left_by_puts(server: HttpFaultServer) -> list[str]:
    puts = {put.path.partition("?")[0].removeprefix("/kvb/") for put in server.requests("PUT")}
    assert puts
    return [key for key in puts if server.get_object("kvb", key) is not None]


def test_check_of_bucket_sends_no_put_without_write(bucket: HttpFaultServer) -> None:
    for tier in (s3(bucket), s3(bucket, read_only=True)):
        assert problems(tier) == []
    assert of_trial(bucket) == ["GET", "GET"]  # by the client that moves blocks
    assert bucket.requests("PUT", "POST", "DELETE") == []


@pytest.mark.parametrize("client", CLIENTS)
def test_check_with_write_moves_bytes_by_each_client(
    bucket: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    use_client(monkeypatch, client)
    assert problems(s3(bucket), writes=True) == []
    assert {"PUT", "GET", "DELETE"} <= set(of_trial(bucket))
    assert bucket.requests("POST")  # DeleteObjects
    assert left_by_puts(bucket) == []


@pytest.mark.parametrize(("method", "writes"), [("PUT", True), ("GET", True), ("GET", False), ("DELETE", True)])
def test_check_reports_missing_bucket_permission(bucket: HttpFaultServer, method: str, writes: bool) -> None:
    bucket.inject(Fault.ACCESS_DENIED, methods=(method,), path_contains=tier_checks.TRIAL_FOLDER)
    (found,) = problems(s3(bucket), writes=writes)
    assert "these credentials may not do this" in found


def test_check_write_reports_corrupted_read_from_bucket(bucket: HttpFaultServer) -> None:
    bucket.inject(Fault.FLIPPED, path_contains=tier_checks.TRIAL_FOLDER)
    (found,) = problems(s3(bucket), writes=True)
    assert found.startswith("tiers[0].reads: ")


def test_check_of_read_only_fsspec_url_that_holds_nothing_is_a_problem() -> None:
    (found,) = problems({"type": "fsspec", "url": "memory://kvtiers-check-nothing", "read_only": True})
    assert (
        "holds nothing, and the tier is read_only: nothing can be loaded; use the URL of the engines that write"
        in found
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"endpiont_url": "http://127.0.0.1:9"},
            "check the names and values of storage_options (endpiont_url, secret)",
        ),
        ({"force_path_style": True}, "check the names and values of storage_options (force_path_style, secret)"),
        ({"client_kwargs": {"regoin": "x"}}, "check the names and values of storage_options (client_kwargs, secret)"),
        ({"key": 123}, "check the names and values of storage_options (key, secret)"),
        ({"asynchronous": True}, "asynchronous is not accepted, because kvtiers calls the driver from threads;"),
    ],
)
def test_check_of_wrong_driver_option_names_the_option(options: dict[str, Any], expected: str) -> None:
    (found,) = problems({"type": "fsspec", "url": "s3://kvb/kv", "storage_options": options | {"secret": CANARY}})
    assert found.startswith("tiers[0].storage_options: ")
    assert expected in found
    assert CANARY not in found


@pytest.mark.parametrize("type_", ["fs", "nfs", "fsspec"])
@pytest.mark.parametrize("below", ["", "/deeper/kv"])
def test_check_of_root_below_dangling_link_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str, below: str
) -> None:
    monkeypatch.setattr(tier_checks, "missing_mount", lambda _: "")
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    root = f"{tmp_path}/data/kv{below}"
    place = {"url": f"file://{root}"} if type_ == "fsspec" else {"root_dir": root}
    expected = (
        f"tiers[0].{next(iter(place))}: {tmp_path}/data is a symbolic link to {tmp_path}/disk, which does not exist; "
        "mount the disk that it leads to, or correct the link"
    )
    assert problems({"type": type_, **place}) == [expected]


def test_check_warns_of_root_below_link_to_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    warning = f"tiers[0].root_dir: a symbolic link leads to {tmp_path}/disk, which is empty and not a mount point"
    assert [text.partition(";")[0] for text in texts("warning", fs(tmp_path / "data" / "kv"))] == [warning]
    (tmp_path / "disk" / "kv").mkdir()  # it has been used
    for root in (tmp_path / "data" / "kv", tmp_path / "disk" / "new"):
        assert texts("warning", fs(root)) == []


def test_check_of_root_below_mount_point_that_is_not_mounted_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    fstab = tmp_path / "fstab"
    monkeypatch.setattr(mounts.unmounted_point, "__kwdefaults__", {"mountinfo": mounts.MOUNTINFO, "fstab": str(fstab)})
    fstab.write_text(f"# a comment\n/dev/sdb1 {tmp_path}/disk/ xfs noauto 0 0\nproc /proc proc defaults 0 0\nshort\n")
    (found,) = problems(fs(tmp_path / "disk" / "kv"))
    assert found == (
        f"tiers[0].root_dir: {tmp_path}/disk/kv is below {tmp_path}/disk, which is in /etc/fstab and is not mounted; "
        f"mount {tmp_path}/disk"
    )
    assert problems(fs(tmp_path / "disk2" / "kv")) == []


@pytest.mark.parametrize("text", ["{{ .Values.root }}", "<your-folder>", "%(root)s", "%POD_NAME%"])
def test_check_warns_of_placeholder(tmp_path: Path, text: str) -> None:
    (warning,) = texts("warning", fs(tmp_path / text / "kv"))
    assert warning.startswith(f"tiers[0].root_dir: holds {text}, which looks like a placeholder")
    assert texts("warning", fs(tmp_path / "100%_a<b" / "kv")) == []


def test_check_warns_of_variable_where_variables_are_not_replaced(tmp_path: Path) -> None:
    tier = {"type": "fsspec", "url": f"file://{tmp_path}/kv"}
    for value in ("$MKDIR", "${MKDIR:-1}", "$(MKDIR)"):
        (warning,) = texts("warning", tier | {"storage_options": {"auto_mkdir": value}})
        assert f"auto_mkdir is {value}, but variables are not replaced in storage_options" in warning
    assert texts("warning", tier | {"storage_options": {"x": f"pa$word-{CANARY}"}}) == []


def test_check_of_custom_store_names_wrong_module_or_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kvtiers_check_needs.py").write_text("import no_such_client")
    (tmp_path / "kvtiers_check_store.py").write_text("def make_store(options): raise ValueError(options['x'])")
    for module_path, expected in (
        ("no_such_module", ".module_path: no_such_module cannot be imported: ModuleNotFoundError: No module named "),
        ("kvtiers_check_needs", ".module_path: kvtiers_check_needs cannot be imported: ModuleNotFoundError: No modul"),
        ("kvtiers_check_store:nope", ".module_path: kvtiers_check_store has no function nope(options) that returns"),
        ("kvtiers_check_store", ".options: kvtiers_check_store failed with its options: ValueError: 1"),
    ):
        (found,) = problems({"type": "store", "module_path": module_path, "options": {"x": 1}})
        assert found.startswith(f"tiers[0]{expected}")
        assert "storage answers" not in found


CUSTOM = """
from dataclasses import replace
from kvtiers.tiers.errors import StorePermissionError
from kvtiers.tiers.stores.memory import MemoryStore


class Refused(MemoryStore):
    def put(self, key, parts, *, overwrite=False):
        raise StorePermissionError("denied", key=key)


class Raw(MemoryStore):
    def size(self, key):
        raise KeyError("CANARYCANARY")


class Forgets(MemoryStore):
    def get_into(self, key, parts):
        pass


def make_store(options):
    return globals()[options["class"]]()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"class": "Refused"}, "tiers[0].rights: denied"),
        ({"class": "Refused", "read_only": True}, None),
        (
            {"class": "Raw"},
            "tiers[0]: could not be checked: KeyError in kvtiers_check_custom.py:14; change the store of kv",
        ),
        ({"class": "Forgets"}, "tiers[0].reads: host "),
        ({"class": "MemoryStore"}, None),
        ({"class": "MemoryStore", "isolation": "auto"}, "tiers[0].isolation: needs other processes, but only the pr"),
        ({"class": "MemoryStore", "max_bytes": "1GiB"}, "tiers[0].max_bytes: needs other processes, but only the pr"),
    ],
)
def test_check_of_custom_store_makes_the_calls_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str | None
) -> None:
    (tmp_path / "kvtiers_check_custom.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = {"type": "store", "module_path": "kvtiers_check_custom", "options": {"class": options["class"]}}
    tier = place | {"isolation": "thread"} | {name: value for name, value in options.items() if name != "class"}
    found = problems(tier, writes=True)
    assert len(found) == (expected is not None)
    assert all(each.startswith(expected or "") and CANARY not in each for each in found)
