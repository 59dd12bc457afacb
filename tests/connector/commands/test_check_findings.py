from __future__ import annotations

import errno
import json
import os
import resource
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtiers.connector.commands import check, findings, host_checks, storage_checks, tier_checks
from kvtiers.connector.commands.findings import Finding
from kvtiers.connector.commands.session import ExitCode
from kvtiers.connector.commands.storage_checks import examine_namespaces, try_store
from kvtiers.connector.region.region_file import region_path
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.capacity.usage import Usage, publish_usage
from kvtiers.tiers.config.deployment import DeploymentConfig, parse_config
from kvtiers.tiers.config.tier_options import FsTierConfig, MemoryTierConfig, TierConfig
from kvtiers.tiers.errors import (
    StoreConfigError,
    StoreFullError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.exporter import MetricsServer
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.store import Capabilities, KeyInfo
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.servers import S3Server, moto_server
from kvtiers.tiers.tools import neighbors
from tests.connector.commands.test_storage_commands import result_of, run
from tests.identity import FakeSpec
from tests.s3_clients import use_credentials


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to import a driver."""
    monkeypatch.setattr(check, "TIERS_S_MAX", 300.0)


def examine(of: DeploymentConfig, *, writes: bool = True) -> list[Finding]:
    return check.examine(of, writes=writes).findings


def deployment(*tiers: dict[str, Any], **more: Any) -> DeploymentConfig:
    return parse_config({"region": {"size": "1MiB"}, "tiers": list(tiers), **more})


def fs(root: Path, **options: Any) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), "min_free": 0, **options}


def levels(findings: Sequence[Finding], where: str = "") -> dict[str, str]:
    return {finding.check: finding.level for finding in findings if finding.part.startswith(where)}


def one(findings: Sequence[Finding], check: str, where: str = "") -> Finding:
    (found,) = [f for f in findings if f.check == check and f.part.startswith(where)]
    return found


def test_check_of_good_folder_has_no_problem_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    findings = examine(deployment(fs(root)))
    found = levels(findings, "tiers[0] fs")
    assert "problem" not in found.values()
    assert {"atomic rename", "clock", "rights", "min_free", "conditional put"} <= set(found)
    assert found["atomic rename"] == found["rights"] == found["conditional put"] == found["clock"] == "ok"
    assert not [path for path in root.rglob("*") if path.is_file()]
    assert not (root / tier_checks.TRIAL_FOLDER).exists()


def test_check_reports_open_mode_and_little_space_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    findings = examine(deployment(fs(tmp_path / "open"), fs(tmp_path / "full", min_free="900PiB")))
    mode = one(findings, "mode", "tiers[0]")
    assert (mode.level, "777" in mode.message) == ("problem", True)
    assert "chmod 700" in mode.fix
    space = one(findings, "min_free", "tiers[1]")
    assert space.level == "problem"
    assert "min_free" in space.fix
    assert one(findings, "rights", "tiers[1]").level == "ok"  # a used-up reserve is not a problem of rights


@pytest.mark.parametrize(("options", "level"), [({}, "problem"), ({"encrypt": "aes-gcm", "keys_env": "K"}, "note")])
def test_folder_open_to_or_owned_by_another_user_is_a_problem_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], level: str
) -> None:
    """Its owner may write there, whatever its mode says. With keys that costs blocks, not truth."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "theirs").mkdir(mode=0o755)
    tiers = [FsTierConfig(root_dir=str(tmp_path / name), **options) for name in ("open", "theirs")]
    owner_uid = give_to_another(tmp_path / "theirs", monkeypatch)
    mode = one(list(storage_checks.examine_folder(tiers[0])), "mode")
    owner = one(list(storage_checks.examine_folder(tiers[1])), "owner")
    assert (mode.level, owner.level) == (level, level)
    assert f"belongs to uid {owner_uid}" in owner.message


def give_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have a file belong to another user than this process seems to be, and not to root. Returns that one's uid."""
    if os.getuid() == 0:
        os.chown(path, 4711, -1)
    uid = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    return uid


def test_key_file_of_another_owner_or_open_mode_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32)
    keys.chmod(0o600)
    tier = FsTierConfig(root_dir=str(tmp_path), encrypt="aes-gcm", keys_file=str(keys))
    (good,) = tier_checks.keys(tier)
    assert good.level == "ok"
    for mode in (0o620, 0o604):
        keys.chmod(mode)
        (found,) = tier_checks.keys(tier)
        assert (found.level, f"mode {mode:04o}" in found.message) == ("problem", True)
    keys.chmod(0o600)
    uid = give_to_another(keys, monkeypatch)
    (found,) = tier_checks.keys(tier)
    assert (found.level, f"belongs to uid {uid}" in found.message) == ("problem", True)


def test_unreadable_folders_in_root_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lost+found", "m_r0", "n\x1b_r0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name == "m_r0")  # root may look everywhere
    note, problem = storage_checks._refused_folders(str(tmp_path))
    assert (note.level, problem.level) == ("note", "problem")
    assert "lost+found" in note.message
    assert f"cannot read 1 of the folders in {tmp_path}: n\\x1b_r0;" in problem.message
    assert "chown" in problem.fix


@pytest.mark.parametrize("name", ["m_r0/0a1", "m_r0/0a1/0b_g0", "_kvtiers/usage"])
def test_unreadable_deep_folder_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("_kvtiers/usage", "m_r0/0a1/0b_g0", "m_r0/0a2/0b_g0"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(name))
    (problem,) = storage_checks._refused_folders(str(tmp_path))
    assert f"cannot read 1 of the folders in {tmp_path}: {name};" in problem.message


def test_folder_removed_by_engine_meanwhile_is_not_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m_r0").mkdir()

    def access(path: str, mode: int) -> bool:
        Path(path).rmdir()
        return False

    monkeypatch.setattr(os, "access", access)
    assert list(storage_checks._refused_folders(str(tmp_path))) == []


def test_number_of_folders_examined_in_a_large_root_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / "m_r0" / f"{number:03}" / "0b_g0").mkdir(parents=True)
    looked_at = []

    def access(path: str, mode: int) -> bool:
        looked_at.append(path)
        return True

    monkeypatch.setattr(storage_checks, "LISTED_MAX", 5)
    monkeypatch.setattr(os, "access", access)
    assert list(storage_checks._refused_folders(str(tmp_path))) == []
    assert len(looked_at) == 11  # those of a folder are looked at together


@pytest.mark.parametrize(("kind", "level"), [("overlay", "problem"), ("tmpfs", "note"), ("ext4", "ok"), ("", "ok")])
def test_file_system_kind_decides_level_of_its_finding(
    kind: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_checks, "file_system_type", lambda root: kind)
    assert one(examine(deployment(fs(tmp_path))), "file system").level == level


class Crooked(MemoryStore):
    """A store that does one thing wrong."""

    capabilities = Capabilities(exclusive_create=True, shared=True, latency_bound=True)
    always_replaces = never_replaces = refuses = hides = lists_nothing = False
    skew_s = 0.0

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> Any:
        if self.refuses:
            raise StorePermissionError("secret: AccessDenied for PutObject", key=key)
        return super().put(key, parts, overwrite=(overwrite or self.always_replaces) and not self.never_replaces)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if self.hides:
            raise StorePermissionError("secret: AccessDenied for GetObject", key=key)
        super().get_into(key, parts)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        for info in super().keys(prefix):
            if not self.lists_nothing:
                yield KeyInfo(info.key, info.size, 1000.0 + self.skew_s)


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ({"always_replaces": True}, "conditional put", "ignores If-None-Match"),
        ({"never_replaces": True}, "replace", "still has its old content"),
        ({"refuses": True}, "rights", "AccessDenied"),
        ({"hides": True}, "rights", "AccessDenied"),
        ({"lists_nothing": True}, "listing", "not listed"),
        ({"skew_s": 60.0}, "clock", "60 s ahead"),
        ({"skew_s": -900.0}, "clock", "900 s behind"),
    ],
)
def test_misbehavior_of_storage_is_the_only_problem_reported(fault: dict[str, Any], check: str, message: str) -> None:
    store = Crooked()
    for name, value in fault.items():
        setattr(store, name, value)
    findings = list(try_store(MemoryTierConfig(), store, now=lambda: 1000.0))
    found = one(findings, check)
    assert found.level == ("warning" if check == "conditional put" else "problem")  # it wastes writes only
    assert message in found.message
    assert found.fix
    assert [f.check for f in findings if f.level in ("warning", "problem")] == [check]
    assert not list(MemoryStore.keys(store))


def test_slow_listing_is_not_reported_as_clock_skew() -> None:
    clock = [1000.0]

    class Slow(Crooked):
        def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
            clock[0] += 60
            return super().keys(prefix)

    assert one(list(try_store(MemoryTierConfig(), Slow(), now=lambda: clock[0])), "clock").level == "ok"


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


def test_check_of_s3_tries_the_bucket_and_leaves_nothing(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtiers.tiers.stores.s3.store import S3Store

    options = s3_tier(moto, monkeypatch)
    findings = examine(deployment(options))
    found = levels(findings, "tiers[0] s3")
    assert "problem" not in found.values()
    assert found["bucket"] == found["rights"] == found["conditional put"] == "ok"
    assert "checksums" in found
    store = S3Store(s3_options(options))
    assert not list(store.keys(tier_checks.TRIAL_FOLDER))
    store.close()
    missing = examine(deployment({**options, "bucket": "no-such-bucket-here"}))
    assert "bucket" in one(missing, "storage", "tiers[0]").message


def test_bucket_with_versioning_is_a_problem_until_a_rule_expires_old_versions(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtiers.tiers.stores.s3.control import S3Control

    options = s3_tier(moto, monkeypatch) | {"bucket": "kv-versions"}
    moto.client().create_bucket(Bucket="kv-versions")
    moto.client().put_bucket_versioning(Bucket="kv-versions", VersioningConfiguration={"Status": "Enabled"})
    found = one(examine(deployment(options)), "versioning", "tiers[0]")
    assert (found.level, "noncurrent versions" in found.fix) == ("problem", True)
    rule = {"ID": "a", "Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 1}, "Prefix": ""}
    moto.client().put_bucket_lifecycle_configuration(Bucket="kv-versions", LifecycleConfiguration={"Rules": [rule]})
    assert "versioning" not in levels(examine(deployment(options)), "tiers[0] s3")

    def refuse(self: S3Control) -> bool:
        raise StorePermissionError("secret: AccessDenied")

    monkeypatch.setattr(S3Control, "keeps_versions", refuse)
    assert "versioning" not in levels(examine(deployment(options)), "tiers[0] s3")


def s3_options(options: dict[str, Any]) -> Any:
    tier = deployment(options).tiers[0]
    return tier.store_options()  # type: ignore[union-attr]


def s3_tier(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use_credentials(monkeypatch, moto)
    moto.client().create_bucket(Bucket="kv-check")
    return {"type": "s3", "bucket": "kv-check", "endpoint_url": moto.endpoint_url, "region": "us-east-1"}


def test_hung_storage_is_a_finding_and_earlier_findings_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, gate = threading.Event(), threading.Event()

    def hang(*_: Any) -> Iterator[Finding]:
        yield Finding("ok", "file system", "first")
        hangs.set()
        gate.wait(120)

    monkeypatch.setattr(storage_checks, "examine_folder", hang)
    join = threading.Thread.join

    def join_until_it_hangs(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("kvtiers-check"):
            hangs.wait(120)
            timeout = 0.0
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_until_it_hangs)
    try:
        findings = examine(deployment(fs(tmp_path)))
        assert "no answer within 300 s" in one(findings, "storage").message
        assert one(findings, "file system").message == "first"  # what was found before is not lost
    finally:
        gate.set()


def test_exception_in_a_check_is_a_finding_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Iterator[Finding]:
        yield Finding("ok", "file system", "first")
        raise ValueError("with a secret in it")

    monkeypatch.setattr(storage_checks, "examine_folder", fail)
    findings = examine(deployment(fs(tmp_path)))
    found = one(findings, "storage")
    assert (found.level, found.message[:33]) == ("problem", "could not be checked: ValueError ")
    assert "secret" not in found.message
    assert one(findings, "file system").message == "first"


def test_file_system_without_hard_links_is_not_reported_as_missing_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    findings = examine(deployment(fs(tmp_path)))
    (found,) = [f for f in findings if f.part.startswith("tiers") and f.level == "problem"]
    assert "no hard links" in found.message
    assert "give uid" not in found.fix


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, f"give uid {os.getuid()} the right to read and write HERE"),
        (errno.ENOSYS, "use another file system"),
        (errno.ENOSPC, "make room"),
        (errno.EIO, ""),
    ],
)
def test_failed_rename_gets_the_fix_for_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", refuse)
    (found,) = list(storage_checks.try_folder(str(tmp_path)))
    assert (found.level, found.fix) == ("problem", fix.replace("HERE", str(tmp_path)))


def test_namespaces_that_share_no_blocks_are_reported_with_the_differing_field(tmp_path: Path) -> None:
    view = memoryview(bytearray(4096)).cast("b", (1, 4096))
    for change in ({}, {"hash_algorithm": "xxhash"}):
        BuiltInTier(FakeSpec().changed("cache", **change), view, "fs", root_dir=str(tmp_path), min_free=0).shutdown()
    found = one(examine(deployment(fs(tmp_path))), "namespaces")
    assert found.level == "note"
    assert 'hash_algorithm: "sha256", "xxhash"' in found.message
    (torn := tmp_path / "x_0").mkdir()
    (torn / "config.json").write_bytes(b"{")
    assert one(examine(deployment(fs(tmp_path))), "namespaces") == found


def test_field_missing_in_one_namespace_is_named() -> None:
    store = MemoryStore()
    for digest, fields in ("a" * 12, {}), ("b" * 12, {"revision": None}):
        store.put(f"m_{digest}/config.json", [memoryview(json.dumps({"model_name": "m", **fields}).encode())])
    (found,) = examine_namespaces(*neighbors.namespaces_in(store))
    assert found.message == "m has 2 namespaces, which share no blocks. They differ in revision: not set, null"


def test_engine_options_that_separate_namespaces_are_named() -> None:
    store = MemoryStore()
    triton, flags = {"kernel_config.moe_backend": "triton"}, {"VLLM_USE_NEW_ROPE": "1"}
    for digest, engine in ("a" * 12, triton), ("b" * 12, triton | flags):
        fields = {"model_name": "m", "model_revision": f"c0ffee+engine:{digest}", "engine": engine}
        store.put(f"m_{digest}/config.json", [memoryview(json.dumps(fields).encode())])
    (found,) = examine_namespaces(*neighbors.namespaces_in(store))
    assert found.message == 'm has 2 namespaces, which share no blocks. They differ in VLLM_USE_NEW_ROPE: "1", not set'


def test_single_namespace_of_a_model_is_ok() -> None:
    store = MemoryStore()
    store.put("m_aaaaaaaaaaaa/config.json", [memoryview(json.dumps({"model_name": "m"}).encode())])
    for number in range(10):
        store.put(f"m_aaaaaaaaaaaa_r0/000/00_g0/{number}.bin", [memoryview(b"x")])
    (found,) = examine_namespaces(*neighbors.namespaces_in(store))
    assert found.level == "ok"


class InOrder(MemoryStore):
    """Lists by name, as a bucket does: a namespace's blocks come right after its config.json."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        for namespace, revision in ("m_aaaaaaaaaaaa", "abc"), ("m_bbbbbbbbbbbb", "def"):
            fields = json.dumps({"model_name": "m", "model_revision": revision}).encode()
            self.put(f"{namespace}/config.json", [memoryview(fields)])
            for number in range(blocks):
                self.put(f"{namespace}_r0/000/00_g0/{number}.bin", [memoryview(b"x")])

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        yield from sorted(super().keys(prefix), key=lambda info: info.key)


@pytest.mark.parametrize("blocks", [2, 20])
def test_namespaces_of_one_model_are_compared(blocks: int) -> None:
    (found,) = examine_namespaces(*neighbors.namespaces_in(InOrder(blocks)))
    assert found.message.startswith("m has 2 namespaces, which share no blocks. They differ in model_revision")


def test_unexamined_namespaces_make_the_finding_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "NAMESPACES_MAX", 1)
    for name in ("m_aaaaaaaaaaaa", "m_bbbbbbbbbbbb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_name": "m", "name": name}))
    assert one(examine(deployment(fs(tmp_path))), "namespaces").level == "note"


def test_control_characters_in_stored_names_are_escaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "m\x1b]0;t\x07\u202e[red]\nproblem all is lost"
    for name, value in (("m_aaaaaaaaaaaa", 1), ("m_bbbbbbbbbbbb", evil)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_name": evil, evil: value}))
    check.show_findings(examine(deployment(fs(tmp_path))))
    lines = capfd.readouterr().out.split("\n")
    (line,) = [line for line in lines if "namespaces" in line]
    shown = "m\\x1b]0;t\\x07\\u202e[red]\\nproblem all is lost"
    assert f"namespaces: {shown} has 2 namespaces, which share no blocks. They differ in {shown}: " in line
    assert all(line.isprintable() for line in lines)


def test_host_limits_and_hash_seed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    findings = examine(parse_config({"region": {"size": "900PiB"}, "tiers": [{"type": "memory"}]}))
    assert levels(findings, "host") == {
        "/dev/shm": "problem",
        "memory": "problem",
        "locked memory": "note",
        "open files": "problem",
    }
    assert all(finding.fix for finding in findings if finding.level == "problem")
    assert one(findings, "hash seed").level == "note"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert one(examine(deployment()), "hash seed").level == "ok"


def test_tmpfs_without_a_limit_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, *[0] * 7, 255)))  # size=0
    assert one(examine(deployment()), "/dev/shm").level == "ok"


def test_memory_limit_of_container_counts_as_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_checks, "CGROUP_MEMORY", str(limit))
    for text, level in (("1048576\n", "problem"), ("max\n", "ok")):
        limit.write_text(text)
        assert one(examine(deployment()), "memory").level == level


def test_metrics_port_taken_by_another_program_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        threading.Thread(
            target=answer_once, args=(taken, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi\n"), daemon=True
        ).start()
        found = one(examine(deployment(metrics={"port": port})), "metrics")
    assert (found.level, "cannot be used" in found.message) == ("problem", True)
    assert one(examine(deployment(metrics={"port": 0})), "metrics").level == "ok"
    assert "metrics" not in levels(examine(deployment()))


def answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(answer)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_metrics_port_taken_by_running_engine_is_ok(address: str) -> None:
    metrics = Metrics()
    metrics.set("kvtiers_storage_max_bytes", "fs", value=1)
    engine = MetricsServer([metrics], port=0, address=address)
    try:
        found = one(examine(deployment(metrics={"port": engine.port, "address": address})), "metrics")
    finally:
        engine.close()
    assert (found.level, "is in use by a running engine" in found.message) == ("ok", True)


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "free_bytes", lambda _: 0)


@pytest.fixture
def instance_id() -> Iterator[str]:
    name = f"check-{uuid.uuid4().hex}"
    yield name
    Path(region_path("/dev/shm", name)).unlink(missing_ok=True)


@pytest.mark.parametrize("started", [True, False], ids=["started", "starting"])
def test_shared_memory_that_running_engine_uses_is_ok(full_memory: None, instance_id: str, started: bool) -> None:
    scheduler = SharedOffloadRegion(instance_id, 61, 4096, 1, None)
    regions = [scheduler, *([SharedOffloadRegion(instance_id, 61, 4096, 1, 0)] if started else [])]
    assert os.path.exists(region_path("/dev/shm", instance_id)) != started
    size = scheduler.geometry.size_bytes
    try:
        found = [
            host_checks.shared_memory(region_bytes) for region_bytes in (size, size + 4095)
        ]  # a part of a row is left
        others = [host_checks.shared_memory(region_bytes) for region_bytes in (size - 1, size + 4096)]
    finally:
        for region in regions:
            region.cleanup()
    assert [finding.level for finding in (*found, *others)] == ["ok", "ok", "problem", "problem"]
    assert f"a running engine (pid {os.getpid()}) uses a region of this size" in found[0].message
    ended = host_checks.shared_memory(size)
    assert (ended.level, "run this command as the engine's user" in ended.fix) == ("problem", True)


def test_min_free_that_the_collector_restores_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "kv"
    tier = fs(root, min_free="1GiB", max_bytes="2GiB")
    status = os.statvfs_result((4096, 4096, 1 << 20, 1 << 17, 1 << 17, 1 << 20, 1 << 20, 1 << 20, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: status)  # 512 MiB free
    found = [finding for finding in examine(deployment(tier), writes=False) if finding.check == "min_free"]
    assert [finding.level for finding in found] == ["problem"]
    store = LocalStore(root)
    for stored, level in ((100 << 20, "problem"), (1 << 30, "ok")):
        publish_usage(store, Usage(bytes=stored, listed=1))
        for each in (tier, fs(root, min_free="1GiB")):  # min_free evicts without other limits, too
            found = [finding for finding in examine(deployment(each), writes=False) if finding.check == "min_free"]
            assert [finding.level for finding in found] == [level]
    store.close()


def test_key_file_that_is_missing_or_readable_by_others_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    tier = fs(tmp_path / "kv", encrypt="aes-gcm", keys_file=str(path))
    assert "cannot be read" in one(examine(deployment(tier)), "keys_file").message
    path.write_text("ab" * 32)
    path.chmod(0o644)
    found = one(examine(deployment(tier)), "keys_file")
    assert (found.level, found.fix) == ("problem", f"chmod 600 {path}")
    path.chmod(0o600)
    found = one(examine(deployment(tier)), "keys")
    assert found.level == "ok"
    assert "abab" not in repr(examine(deployment(tier)))


def test_nfs_mount_options_are_checked_before_the_mount_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noting(name: str, result: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            order.append(name)
            return result

        return call

    found = ["/mnt: hard: a call waits for ever", "/mnt: recommended: mount -t nfs -o softerr S:/E /mnt"]
    monkeypatch.setattr(tier_checks, "mount_findings", noting("options", found))
    monkeypatch.setattr(tier_checks, "_folder", noting("folder", iter(())))
    for module in ("connector.commands.storage_checks", "connector.commands.tier_checks", "tiers.stores.files.mounts"):
        monkeypatch.setattr(f"kvtiers.{module}.file_system_type", lambda root: "nfs4")
    monkeypatch.setattr(check, "open_tool_store", noting("store", MemoryStore()))
    monkeypatch.setattr(storage_checks, "examine_folder", lambda *_: iter(()))
    finding = one(examine(deployment({"type": "nfs", "root_dir": str(tmp_path)})), "mount options")
    assert (finding.level, finding.fix) == ("warning", "mount -t nfs -o softerr S:/E /mnt")
    assert order == ["options", "folder", "store"]


def test_memory_and_foreign_tiers_get_findings_without_a_trial() -> None:
    tiers: list[dict[str, Any]] = [
        {"type": "memory"},
        {"type": "X", "module_path": "m"},
    ]
    found = [f for f in examine(deployment(*tiers)) if f.part.startswith("tiers")]
    assert [(f.level, f.check) for f in found] == [
        ("note", "storage"),
        ("problem", "module_path"),
        ("note", "options"),
    ]


def test_check_write_shows_findings_with_fixes_as_text_and_json(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": [fs(tmp_path / "kv")]}))
    code, out = run("check", str(config), "--write")
    assert code in (0, ExitCode.FAILED)  # the machine's own limits may be a problem
    assert "atomic rename" in out
    code, out = run("check", str(config), "--write", "--json")
    found = result_of(out)["findings"]
    assert set(found[0]) == {"level", "part", "check", "message", "fix"}
    assert (code == ExitCode.FAILED) == any(f["level"] == "problem" for f in found)
    config.write_text(yaml.safe_dump({"region": {"size": "1MiB"}, "tiers": [fs(tmp_path / "kv", min_free="900PiB")]}))
    code, out = run("check", str(config))
    assert (code, "fix: make room, or lower min_free" in out) == (ExitCode.FAILED, True)
    assert run("check", str(tmp_path / "none.yaml"), "--write")[0] == ExitCode.BAD_INPUT


def test_each_problem_has_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    tiers: list[dict[str, Any]] = [
        {"type": "fs", "root_dir": f"{tmp_path}/link"},
        {"type": "fs", "root_dir": f"{tmp_path}/file/x"},
        fs(tmp_path / "kv", min_free="900PiB", ttl="1s", max_bytes="900PiB"),
        {"type": "nfs", "root_dir": f"{tmp_path}/none", "read_only": True},
        {"type": "memory", "encrypt": "aes-gcm", "keys_env": "X"},
        {"type": "s3", "bucket": "kvb", "endpoint_url": "http://127.0.0.1:9"},
        {"type": "fsspec", "url": "nosuch://x/y"},
        {"type": "Tier", "module_path": "no_such_module"},
        {"type": "store", "module_path": "no_such_module"},
    ]
    found = examine(deployment(*tiers), writes=False)
    problems = [finding for finding in found if finding.level == "problem"]
    assert {finding.part for finding in problems} == {f"tiers[{n}] {tier['type']}" for n, tier in enumerate(tiers)}
    assert [finding for finding in problems if not finding.fix] == []


def test_generic_fix_of_finding_holds_for_every_cause(tmp_path: Path) -> None:
    """Only an error knows its cause: the fix comes from its message, or holds for every error of its kind."""
    folder, s3, url, own = deployment(
        fs(tmp_path),
        {"type": "s3", "bucket": "kvb"},
        {"type": "fsspec", "url": "gs://b"},
        {"type": "store", "module_path": "m"},
    ).tiers
    rights = f"give uid {os.getuid()} the right to read and write {tmp_path}"
    remote = "check that the server is up, and that this machine can reach it"
    for tier, error, fix in (
        (folder, StorePermissionError("denied"), rights),
        (folder, PermissionError(13, "denied"), rights),
        (folder, StoreFullError("0 B"), "make room, or lower min_free"),
        (folder, OSError(5, "I/O error"), ""),
        (s3, StoreFullError("the quota is used up"), "make room in the storage"),
        (s3, StoreConfigError("ca_bundle: /ca.pem cannot be read: No such file or directory"), ""),
        (s3, StoreConfigError("bucket: it does not exist; create it"), "create it"),
        (s3, StorePermissionError("denied"), "docs/security.md has a policy with the required rights"),
        (s3, StoreTimeoutError("5 s"), remote),
        (s3, StoreThrottledError("the server asks to slow down"), ""),
        (url, StoreUnavailableError("the driver failed"), remote),
        (own, StoreConfigError("it failed"), ""),
        (own, StoreTimeoutError("5 s"), ""),
    ):
        assert isinstance(tier, TierConfig)
        assert findings.of_error(error, tier).fix == fix, error
    assert findings.of_error(StoreConfigError("it is wrong; write right")).fix == "write right"


def test_check_with_damaged_reads_reports_reads_as_the_only_problem() -> None:
    class Damaged(MemoryStore):
        def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
            super().get_into(key, parts)
            parts[0][7] ^= 1

    store = Damaged()
    found = list(try_store(MemoryTierConfig(), store))
    assert [one.check for one in found if one.level == "problem"] == ["reads"]
    assert list(store.keys()) == []
