"""read_only: a tier that only loads. Nothing in its storage changes, whatever happens."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata, JobResult
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError, NamespaceMismatchError, StoreConfigError
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.testing.servers import S3Server, SeaweedServer
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import FakeSpec, block_key
from tests.s3_clients import CLIENTS, use_client, use_credentials
from tests.tiers.tier.test_store_tier import Bench as StoreBench
from tests.waiting import PATIENT
from tests.web_server import serve_folder

ROWS, ROW_BYTES = 8, 8192
FEW_WORKERS = {"n_read_threads": 1, "n_write_threads": 1}
present = StoreBench.present
KEYS = [block_key(n) for n in range(ROWS)]
OTHERS = [block_key(100 + n) for n in range(ROWS)]


class Bench:
    """Tiers of one config on one region that other processes can map."""

    def __init__(self, **options: Any) -> None:
        self.view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
        self.rows = np.asarray(self.view)
        self.options = options
        self.tiers: list[StoreTierManager] = []
        self.jobs = 0

    def tier(self, **options: Any) -> StoreTierManager:
        made = SecondaryTierFactory.create_secondary_tier(
            PATIENT | FEW_WORKERS | self.options | options, self.view, FakeSpec()
        )
        assert isinstance(made, StoreTierManager)
        self.tiers.append(made)
        return made

    def fill(self, seed: int) -> np.ndarray[Any, Any]:
        self.rows[:] = np.random.default_rng(seed).integers(-128, 128, self.rows.shape, np.int8)
        return self.rows.copy()

    def run(self, tier: StoreTierManager, keys: list[OffloadKey], *, is_load: bool) -> JobResult:
        self.jobs += 1
        job = JobMetadata(self.jobs, keys, np.arange(len(keys), dtype=np.int32))
        (tier.submit_load if is_load else tier.submit_store)(job)
        tier.drain_jobs()
        (result,) = tier.get_finished()
        return result

    def close(self) -> None:
        for tier in self.tiers:
            tier.shutdown()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(type="fs", root_dir=str(tmp_path / "kv"), min_free=0, isolation="thread")
    yield made
    made.close()


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Everything in a folder, with inode, size and time of change."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(root))] = (status.st_ino, status.st_size, status.st_ctime_ns)
    return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_read_only_tier_loads_and_changes_nothing(bench: Bench, isolation: str, tmp_path: Path) -> None:
    stored = bench.fill(1)
    assert bench.run(bench.tier(), KEYS, is_load=False).success
    before = tree(tmp_path / "kv")
    # Everything is long past this ttl, and beyond this bound.
    reader = bench.tier(read_only=True, isolation=isolation, ttl=1, max_bytes="1MiB")
    time.sleep(1.5)
    assert not reader.takes_stores
    assert present(reader, KEYS[0])
    bench.fill(2)
    assert bench.run(reader, KEYS, is_load=True).success
    assert np.array_equal(bench.rows, stored)
    refused = bench.run(reader, OTHERS, is_load=False)
    assert (refused.success, refused.successful_keys) == (False, ())
    assert reader.metrics.value("kvtiers_stores_dropped_total", "fs", "read_only") == ROWS
    reader.touch(KEYS)
    reader.shutdown()
    assert tree(tmp_path / "kv") == before


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_read_only_tier_keeps_a_bad_block(
    bench: Bench, isolation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fill(1)
    writer = bench.tier()
    assert bench.run(writer, KEYS[:2], is_load=False).success
    path = tmp_path / "kv" / writer.mapper.relative_name(KEYS[0])
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    before = tree(tmp_path / "kv")
    reader = bench.tier(read_only=True, isolation=isolation)
    assert bench.run(reader, KEYS[:2], is_load=True).successful_keys == (KEYS[1],)
    for _ in range(3):
        assert bench.run(reader, KEYS[:2], is_load=True).successful_keys == (KEYS[1],)
    assert reader.metrics.value("kvtiers_verify_failures_total", "fs", "payload_checksum") == 4
    said = [record for record in caplog.records if "is not a valid copy of its block" in record.getMessage()]
    assert len(said) == 1, "once a minute"
    assert tree(tmp_path / "kv") == before


def test_read_only_tier_does_not_create_a_namespace(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    reader = bench.tier(read_only=True)
    assert not present(reader, KEYS[0])
    assert bench.run(reader, KEYS, is_load=True).successful_keys == ()
    assert tree(tmp_path / "kv") == {}


@pytest.mark.parametrize("kind", ["fs", "nfs"])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_read_only_tier_needs_its_folder_and_leaves_it_unchanged(
    bench: Bench, tmp_path: Path, kind: str, isolation: str
) -> None:
    with pytest.raises(StoreConfigError, match="root_dir .*kv' must be a folder"):  # a mount that is late, say
        bench.tier(type=kind, read_only=True, isolation=isolation)
    assert not (tmp_path / "kv").exists()
    bench.tier(type=kind, isolation=isolation).shutdown()
    litter = tmp_path / "kv" / ".tmp" / "other-host-1-2-3-4"
    litter.parent.mkdir(exist_ok=True)
    litter.write_bytes(b"x")
    os.utime(litter, (1, 1))
    before = tree(tmp_path / "kv")
    bench.tier(type=kind, read_only=True, isolation=isolation).shutdown()
    assert tree(tmp_path / "kv") == before


def test_read_only_tier_refuses_a_namespace_with_other_fields(bench: Bench, tmp_path: Path) -> None:
    config = tmp_path / "kv" / bench.tier().mapper.relative_config_name
    config.write_bytes(config.read_bytes().replace(b'"dtype": "float32"', b'"dtype": "float16"'))
    with pytest.raises(NamespaceMismatchError):
        bench.tier(read_only=True)


def test_read_only_memory_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="read_only"):
        Bench(type="memory").tier(read_only=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_read_only_tier_works_on_a_read_only_mount(
    tmp_path: Path, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without read_only, a tier also reads such a mount, but it tries to store and logs the error once a minute."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    bench = Bench(type="fs", root_dir=str(tmp_path / "kv"), min_free=0, isolation=isolation)
    try:
        bench.fill(1)
        assert bench.run(bench.tier(), KEYS, is_load=False).success
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        caplog.set_level(logging.WARNING)
        reader, as_before = bench.tier(read_only=True), bench.tier()
        for tier, lines in ((reader, 0), (as_before, 1)):
            caplog.clear()
            for keys in (OTHERS[:3], OTHERS[3:6], OTHERS[6:]):
                assert not bench.run(tier, keys, is_load=False).success
                assert bench.run(tier, KEYS, is_load=True).success
            assert len([record for record in caplog.records if "store failed" in record.getMessage()]) == lines
    finally:
        bench.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_read_only_tier_works_on_a_bucket(
    moto: S3Server, boto_models_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_credentials(monkeypatch, moto)
    behind = moto.client()
    behind.create_bucket(Bucket="kv-read-only")
    bench = Bench(type="s3", bucket="kv-read-only", endpoint_url=moto.endpoint_url, isolation="thread")

    def objects() -> dict[str, Any]:
        return {each["Key"]: each["ETag"] for each in behind.list_objects_v2(Bucket="kv-read-only").get("Contents", [])}

    try:
        empty = bench.tier(read_only=True)
        assert bench.run(empty, KEYS, is_load=False).successful_keys == ()
        assert objects() == {}
        stored = bench.fill(1)
        assert bench.run(bench.tier(), KEYS, is_load=False).success
        before = objects()
        bench.fill(2)
        assert bench.run(bench.tier(read_only=True, ttl=1), KEYS, is_load=True).success
        assert np.array_equal(bench.rows, stored)
        assert objects() == before
    finally:
        bench.close()


def test_read_only_tier_works_on_a_web_server(bench: Bench, tmp_path: Path) -> None:
    """A web server has neither machine-readable listings nor conditional writes."""
    stored = bench.fill(1)
    assert bench.run(bench.tier(), KEYS, is_load=False).success
    with serve_folder(tmp_path) as server:
        readers = Bench(type="fsspec", url=f"{server.url}/kv", read_only=True)
        try:
            reader = readers.tier()
            assert present(reader, KEYS[0])
            assert not present(reader, OTHERS[0])
            assert readers.run(reader, [*KEYS[:7], OTHERS[0]], is_load=True).successful_keys == tuple(KEYS[:7])
            assert np.array_equal(readers.rows[:7], stored[:7])
        finally:
            readers.close()


@pytest.mark.full
@pytest.mark.parametrize("client", CLIENTS)
def test_read_only_tier_works_with_credentials_that_may_only_read(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, client: str
) -> None:
    use_credentials(monkeypatch, seaweed.s3)
    bucket = f"kv-reader-{client}"
    seaweed.s3.client().create_bucket(Bucket=bucket)
    use_client(monkeypatch, client)
    bench = Bench(type="s3", bucket=bucket, endpoint_url=seaweed.s3.endpoint_url)
    try:
        stored = bench.fill(1)
        assert bench.run(bench.tier(), KEYS, is_load=False).success
        use_credentials(monkeypatch, seaweed.reader)
        refused = bench.run(bench.tier(), OTHERS, is_load=False)  # they really may not write
        assert refused.successful_keys == ()
        assert (
            bench.tiers[-1].metrics.value("kvtiers_store_errors_total", "s3", "store", "StorePermissionError") == ROWS
        )
        caplog.clear()
        bench.fill(2)
        reader = bench.tier(read_only=True)
        assert present(reader, KEYS[0])
        assert not present(reader, OTHERS[0])
        assert bench.run(reader, KEYS, is_load=True).success
        assert np.array_equal(bench.rows, stored)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    finally:
        bench.close()
