"""The built-in tiers as configs make them: all options reach the store, and impossible ones fail at the start."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

import kvtiers
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers import builtin
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.open_store import store_recipe
from kvtiers.tiers.config.tier_options import S3TierConfig
from kvtiers.tiers.errors import ConfigError, StoreConfigError, StoreError, StorePermissionError
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.testing.servers import S3Server, moto_server
from kvtiers.tiers.tier.circuit import CircuitState
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import FakeSpec, block_key
from tests.s3_clients import use_credentials
from tests.tier_limits import tier_limits
from tests.tiers.server.hostile_store import HeldStore
from tests.waiting import wait_for

ROWS, ROW_BYTES = 8, 8192
KEYS = [block_key(n) for n in range(ROWS)]

#: Every key of the s3 tier that its store is told, with a value that is not the default.
S3_KEYS: dict[str, tuple[Any, str]] = {
    "bucket": ("other", "bucket"),
    "prefix": ("a/b", "prefix"),
    "endpoint_url": ("https://minio:9000", "endpoint_url"),
    "region": ("eu-west-1", "region"),
    "profile": ("kv", "profile"),
    "ca_bundle": ("/etc/ca.pem", "ca_bundle"),
    "allow_insecure": (True, "allow_insecure"),
    "sse": ("AES256", "sse"),
    "storage_class": ("STANDARD_IA", "storage_class"),
    "job_deadline_s": (33.0, "request_timeout_s"),
    "n_read_threads": (64, "max_connections"),
}


@pytest.mark.parametrize("key", sorted(S3_KEYS))
def test_every_s3_key_reaches_the_store(key: str) -> None:
    value, field = S3_KEYS[key]
    plain, changed = (parse_tier({"type": "s3", "bucket": "kv-tests", **extra}) for extra in ({}, {key: value}))
    assert isinstance(plain, S3TierConfig)
    assert isinstance(changed, S3TierConfig)
    arrived = getattr(changed.store_options(), field)
    assert arrived != getattr(plain.store_options(), field)
    if key == "job_deadline_s":
        assert arrived == 22.0
    elif key != "n_read_threads":
        assert arrived == value


def test_log_line_at_the_start_names_the_version(caplog: pytest.LogCaptureFixture) -> None:
    rows = np.zeros((ROWS, ROW_BYTES), np.int8)
    with caplog.at_level("INFO", logger="kvtiers"):
        SecondaryTierFactory.create_secondary_tier({"type": "memory"}, rows.data, FakeSpec()).shutdown()
    (line,) = [line for line in caplog.messages if line.startswith("tier memory: started: ")]
    assert f", kvtiers {kvtiers.__version__}. A stored block has " in line


def test_kms_key_reaches_the_store() -> None:
    tier = parse_tier({"type": "s3", "bucket": "kv-tests", "sse": "alias/kv"})
    assert isinstance(tier, S3TierConfig)
    assert (tier.store_options().encryption, tier.store_options().kms_key) == ("aws:kms", "alias/kv")


def test_every_s3_store_option_has_a_tested_tier_key() -> None:
    told = {field for _, field in S3_KEYS.values()} | {"retries"}
    assert told == set(S3Options.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "bucket"),
        ({"bucket": "x"}, "bucket"),
        ({"bucket": "kv-tests", "endpoint_url": "http://10.0.0.1:9000"}, "endpoint_url"),
        ({"bucket": "kv-tests", "endpoint_url": "https://user:secret@host"}, "endpoint_url"),
        ({"bucket": "kv-tests", "sse": "aes-256"}, "sse"),
        ({"bucket": "kv-tests", "prefix": "/a"}, "prefix"),
        ({"bucket": "kv-tests", "access_key": "AKIA"}, "access_key"),
    ],
)
def test_invalid_s3_tier_option_error_names_the_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier({"type": "s3", **options})
    assert caught.value.field == field
    assert "secret@" not in str(caught.value)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as started:
        yield started


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use_credentials(monkeypatch, server)
    client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name=server.region)
    client.create_bucket(Bucket="kv-tests")
    return {"bucket": "kv-tests", "endpoint_url": server.endpoint_url, "job_deadline_s": 60}


@pytest.fixture
def region() -> np.ndarray[Any, Any]:
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    rows: np.ndarray[Any, Any] = np.frombuffer(view, np.int8).reshape(ROWS, ROW_BYTES)
    rows[:] = np.random.default_rng(1).integers(-128, 128, rows.shape, np.int8)
    return rows


def store_and_load(tier: StoreTierManager, region: np.ndarray[Any, Any]) -> None:
    original = region.copy()
    blocks = np.arange(ROWS, dtype=np.int32)
    tier.submit_store(JobMetadata(1, KEYS, blocks))
    tier.drain_jobs()
    assert [result.success for result in tier.get_finished()] == [True]
    region[:] = 0
    tier.submit_load(JobMetadata(2, KEYS, blocks))
    tier.drain_jobs()
    assert [result.success for result in tier.get_finished()] == [True]
    assert (region == original).all()


@pytest.mark.parametrize("kind", ["fs", "nfs", "fsspec"])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_tier_on_a_folder_stores_and_loads_blocks(
    tmp_path: Path, region: np.ndarray[Any, Any], kind: str, isolation: str
) -> None:
    place = {"url": f"file://{tmp_path}/kv"} if kind == "fsspec" else {"root_dir": str(tmp_path / "kv"), "min_free": 0}
    tier = BuiltInTier(FakeSpec(), region.data, kind, isolation=isolation, job_deadline_s=60.0, **place)
    try:
        assert bool(tier._channel.pids) == (isolation == "process")
        store_and_load(tier, region)
    finally:
        tier.shutdown()


def test_max_bytes_below_the_size_of_four_blocks_is_refused(tmp_path: Path) -> None:
    config = {"type": "fs", "root_dir": str(tmp_path), "min_free": 0, "max_bytes": "1MiB", "isolation": "thread"}
    SecondaryTierFactory.create_secondary_tier(config, np.zeros((2, 200 << 10), np.int8).data, FakeSpec()).shutdown()
    with pytest.raises(ConfigError) as caught:
        SecondaryTierFactory.create_secondary_tier(config, np.zeros((2, 1 << 20), np.int8).data, FakeSpec())
    assert str(caught.value) == (
        "tier fs: max_bytes: 1048576 bytes do not hold 4 blocks of 1052672 bytes; write at least 4210688"
    )


def test_s3_tier_stores_and_loads_blocks(s3: dict[str, Any], region: np.ndarray[Any, Any]) -> None:
    tier = BuiltInTier(FakeSpec(), region.data, "s3", **s3)
    try:
        store_and_load(tier, region)
    finally:
        tier.shutdown()


def test_wrong_bucket_stops_the_engine_with_one_line(s3: dict[str, Any], region: np.ndarray[Any, Any]) -> None:
    # In a process of its own, the clients would have 3 s on a busy machine: see use_credentials.
    config = s3 | {"bucket": "not-there", "isolation": "thread"}
    with pytest.raises((StoreConfigError, StorePermissionError), match="bucket") as caught:
        BuiltInTier(FakeSpec(), region.data, "s3", **config)
    assert "\n" not in str(caught.value)


def test_endpoint_that_does_not_answer_does_not_stop_the_engine(
    s3: dict[str, Any], region: np.ndarray[Any, Any]
) -> None:
    config = s3 | {"endpoint_url": "http://127.0.0.1:9"}
    tier = BuiltInTier(FakeSpec(), region.data, "s3", **config)
    tier.shutdown()


def test_lookups_do_not_wait_for_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that prefer loads also store, so all of them may be busy for seconds on a slow disk."""
    monkeypatch.setattr(builtin, "store_recipe", lambda config: (HeldStore, store_recipe(config)[1]))
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    options = {
        "type": "fs",
        "root_dir": str(tmp_path / "kv"),
        "min_free": 0,
        "lookup_deadline_s": 60,
        "job_deadline_s": 600,
    }
    tier = SecondaryTierFactory.create_secondary_tier(
        options | {"n_read_threads": 1, "n_write_threads": 1, "isolation": "process"}, view, FakeSpec()
    )
    assert isinstance(tier, StoreTierManager)
    tier.submit_store(JobMetadata(1, KEYS[:1], np.arange(1, dtype=np.int32)))
    tier.drain_jobs()
    hold = tmp_path / "kv.hold"
    hold.touch()
    try:
        for job_id in range(2, 6):
            tier.submit_store(JobMetadata(job_id, KEYS[job_id : job_id + 1], np.arange(1, dtype=np.int32)))
        tier._lookup.forget(KEYS[:1])

        def lookup() -> bool | None:
            found = tier.lookup(KEYS[0])
            tier.on_schedule_end()
            return found

        assert wait_for(lookup)
        assert len(list(tier.get_finished())) == 1  # the first; the others are held
    finally:
        hold.unlink()
        tier.shutdown()


def test_auto_isolation_uses_threads_if_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    options = {"type": "fs", "root_dir": str(tmp_path / "kv"), "min_free": 0}
    with pytest.raises(ConfigError, match="isolation: no process can be started"):
        SecondaryTierFactory.create_secondary_tier(options | {"isolation": "process"}, view, FakeSpec())
    tier = SecondaryTierFactory.create_secondary_tier(options, view, FakeSpec())
    assert "isolation: auto uses threads of this process" in caplog.text
    for is_load in (False, True):
        job = JobMetadata(int(is_load), KEYS, np.arange(ROWS, dtype=np.int32))
        (tier.submit_load if is_load else tier.submit_store)(job)
        tier.drain_jobs()
        assert [result.success for result in tier.get_finished()] == [True]
    tier.shutdown()


@pytest.mark.parametrize("kind", ["fs", "nfs", "memory", "s3", "fsspec", "store"])
def test_engine_process_loads_no_client_and_keeps_its_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default isolation. Other threads of an engine may be reading the C library's environment."""
    root = str(tmp_path / "root")
    options: dict[str, dict[str, Any]] = {
        "fs": {"root_dir": root, "min_free": 0},
        "nfs": {"root_dir": root, "min_free": 0},
        "memory": {"max_bytes": "64MiB"},
        "fsspec": {"url": f"file://{root}", "max_bytes": "1GiB"},
        "store": {"module_path": f"{HeldStore.__module__}:make_local", "options": {"root": root}},
    }
    with contextlib.ExitStack() as stack:
        if kind == "s3":
            use_credentials(monkeypatch)
            endpoint = stack.enter_context(moto_server()).endpoint_url
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="bucket")
            options["s3"] = {"bucket": "bucket", "endpoint_url": endpoint, "max_bytes": "1GiB"}
        config = {"type": kind, "lookup_deadline_s": 60.0, "job_deadline_s": 60.0, **options[kind]}
        program = [sys.executable, "-m", "tests.tiers.server.hostile_engine"]
        engine = stack.enter_context(
            subprocess.Popen(
                [*program, json.dumps({"tier": config, "row_bytes": ROW_BYTES, "maps": True})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        )
        said, _ = engine.communicate("store\nload\nlookup\ntouch\nseen\n", timeout=300)
        started, stored, loaded, found, _, (seen, _) = map(json.loads, said.splitlines())
    assert (started, stored[0], loaded[0], found[0]) == ("started", True, True, [True] * 4)
    modules, changes = seen
    assert changes == []
    assert not {"botocore", "awscrt", "s3fs", "aiobotocore"} & set(modules)
    assert kind == "fsspec" or "fsspec" not in modules


@pytest.mark.parametrize("how", ["hang", "exit", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "ConnectionError"])
def test_tier_whose_store_cannot_be_made_starts_cut_off_and_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    file = tmp_path / "root.how"
    file.write_text(how)
    options = {"root": str(tmp_path / "root")}
    config = {"type": "store", "module_path": f"{HeldStore.__module__}:make_local", "options": options}
    # On a busy machine a worker takes seconds to start.
    limits = {"job_deadline_s": 2.0 if how == "hang" else 60.0, "lookup_deadline_s": 60.0}
    caplog.set_level("INFO", "kvtiers")
    create = partial(SecondaryTierFactory.create_secondary_tier, {**config, **limits}, view, FakeSpec())
    if how == "ConnectionError":  # as before: an error that says what is wrong refuses the start
        with pytest.raises(StoreConfigError, match="ConnectionError: as told"):
            create()
        return
    with tier_limits(circuit_probe_s=0.1):
        tier: Any = create()
    try:
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith("tier store: circuit open: it starts without its storage: ")
        assert (how in warning) == (how not in ("hang", "exit"))
        assert "tier store: started" not in caplog.text
        assert "tier store: waits for its storage" in caplog.text
        assert tier.lookup(KEYS[0]) is False
        tier.submit_store(JobMetadata(1, KEYS, np.arange(ROWS, dtype=np.int32)))
        assert [result.success for result in tier.get_finished()] == [False]
        file.unlink()

        def is_back() -> bool:
            tier.on_schedule_end()
            return bool(tier.circuit_state is CircuitState.CLOSED)

        wait_for(is_back)
        assert "tier store: circuit closed: the storage answers again" in caplog.text
        wait_for(lambda: is_back() and list((tmp_path / "root").glob("**/config.json")))
        if how != "hang":  # the other's deadline is short
            store_and_load(tier, np.asarray(view))
    finally:
        tier.shutdown()


def test_bounded_tier_started_without_storage_opens_its_namespace_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit refuses everything until a collector has measured."""
    monkeypatch.setattr(builtin, "_start_collector", lambda *_: None)
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    file = tmp_path / "root.how"
    file.write_text("SystemExit")
    options = {"root": str(tmp_path / "root")}
    config = {"type": "store", "module_path": f"{HeldStore.__module__}:make_local", "options": options}
    limits = {"max_bytes": "1GB", "lookup_deadline_s": 60.0}
    with tier_limits(circuit_probe_s=0.1):
        tier: Any = SecondaryTierFactory.create_secondary_tier({**config, **limits}, view, FakeSpec())
    try:
        file.unlink()

        def is_opened() -> bool:
            tier.on_schedule_end()
            return any((tmp_path / "root").glob("**/config.json"))

        wait_for(is_opened)
    finally:
        tier.shutdown()


@pytest.mark.parametrize("how", ["SystemExit", "ValueError"])
def test_store_that_raises_while_it_is_made_in_the_engine_is_a_store_error(
    tmp_path: Path, region: np.ndarray[Any, Any], how: str
) -> None:
    (tmp_path / "root.how").write_text(how)
    options = {"root": str(tmp_path / "root")}
    config = {"type": "store", "module_path": f"{HeldStore.__module__}:make_local", "options": options}
    with pytest.raises(StoreError, match=f"{how}: as told"):
        SecondaryTierFactory.create_secondary_tier({**config, "isolation": "thread"}, region.data, FakeSpec())
