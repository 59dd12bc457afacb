"""What is true of NfsStore on a real NFS mount. Runs inside the kernel that ``boot.sh`` boots; see test_real_nfs.py."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtiers.tiers.errors import BlobNotFoundError, StoreError
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.mounts import mount_findings
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys, make_data
from tests.tiers.server.process_bench import Bench
from tests.waiting import wait_for

SERVER, A, B = Path("/mnt/exported"), Path("/mnt/a"), Path("/mnt/b")
WAIT_S_MAX = 90.0
DATA = make_data((1 << 20) + 4096)


class TestContract(StoreContract):
    """Planted and peeked at in the server's own folder."""

    def make_store(self) -> Store:
        return NfsStore(A / self.tmp_path.name)

    def reopen(self, store: Store) -> Store:
        return NfsStore(B / self.tmp_path.name)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        path = SERVER / self.tmp_path.name / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def peek(self, store: Store, key: str) -> bytes | None:
        path = SERVER / self.tmp_path.name / key
        return path.read_bytes() if path.is_file() else None

    def test_blob_is_always_present_while_it_is_replaced(self, store: Store) -> None:
        pytest.skip("the kernel moves a file that is open here aside (.nfs...) before another takes its name")

    def test_changes_by_another_handle_are_seen_at_once(self, store: Store) -> None:
        pytest.skip("the kernel knows names and sizes for acregmin; contents are below")


@pytest.fixture
def name(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def _heal() -> Iterator[None]:
    yield
    for client in "ab":
        subprocess.run(["nfs-cut", client, "off"], check=True)
    subprocess.run(["nfs-server", "start"], check=True)
    subprocess.run(["nfs-netem", ""], check=True)


@pytest.fixture
def tier(name: str) -> Iterator[Bench]:
    """A tier of client A, whose blocks are stored."""
    bench = Bench(A / name, store_class=NfsStore)
    assert bench.works()
    yield bench
    bench.tier.shutdown()


def until_it_works(store: Store, key: str) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            assert fetch(store, key, len(DATA)) == DATA
            return
        except StoreError:
            if time.monotonic() > deadline:
                raise


def test_mount_findings_warn_of_nfs_version_3_but_not_of_lookupcache() -> None:
    found = "\n".join(mount_findings(A))
    assert ("vers=3" in found) == (os.environ["NFS_VERSION"] == "3")
    assert "lookupcache" not in found.partition("recommended")[0]


def test_blobs_stored_by_one_client_are_loaded_by_second_client(name: str) -> None:
    a, b = NfsStore(A / name), NfsStore(B / name)
    for i in range(20):
        a.put(f"f{i % 3}/{i}", as_parts(DATA))
        assert fetch(b, f"f{i % 3}/{i}", len(DATA)) == DATA
    assert len(list_keys(b)) == 20


def test_blob_looked_up_before_its_store_is_found_afterwards(name: str) -> None:
    """lookupcache=pos: absent is not remembered."""
    a, b = NfsStore(A / name), NfsStore(B / name)
    a.put("f/first", as_parts(b"1"))
    for i in range(10):
        assert b.size(f"f/{i}") is None
        a.put(f"f/{i}", as_parts(DATA))
        assert fetch(b, f"f/{i}", len(DATA)) == DATA


def test_first_put_of_a_key_wins_over_put_of_second_client(name: str) -> None:
    a, b = NfsStore(A / name), NfsStore(B / name)
    a.put("f/a", as_parts(b"from a"))
    b.put("f/a", as_parts(b"from b"))
    assert fetch(a, "f/a", 6) == fetch(b, "f/a", 6) == b"from a"


def test_blob_replaced_or_deleted_by_another_client_is_whole_or_absent(name: str) -> None:
    a, b = NfsStore(A / name), NfsStore(B / name)
    versions = [make_data(70_000, seed) for seed in range(4)]
    for i in range(20):
        a.put("f/a", as_parts(versions[i % 4]), overwrite=True)
        try:
            assert fetch(b, "f/a", 70_000) in versions
        except BlobNotFoundError:
            pass
        if i % 5 == 4:
            a.delete("f/a")


@pytest.mark.usefixtures("_heal")
def test_put_of_disconnected_client_times_out_and_works_after_reconnect(tier: Bench) -> None:
    subprocess.run(["nfs-cut", "a", "on"], check=True)
    started_at = time.monotonic()
    assert not tier.run("put", deadline_s=3.0).success
    assert time.monotonic() - started_at < WAIT_S_MAX
    subprocess.run(["nfs-cut", "a", "off"], check=True)
    wait_for(tier.works)


@pytest.mark.usefixtures("_heal")
def test_put_to_stopped_server_times_out_and_works_after_restart(tier: Bench, name: str) -> None:
    NfsStore(A / name).put("f/a", as_parts(DATA))
    subprocess.run(["nfs-server", "stop"], check=True)
    assert not tier.run("put", deadline_s=3.0).success
    subprocess.run(["nfs-server", "start"], check=True)
    wait_for(tier.works)
    assert fetch(NfsStore(B / name), "f/a", len(DATA)) == DATA


@pytest.mark.usefixtures("_heal")
@pytest.mark.parametrize(
    "network", ["delay 20ms 10ms", "delay 3ms loss 3%", "loss 5% duplicate 2% reorder 10% delay 2ms"]
)
def test_blobs_acknowledged_over_bad_network_are_not_lost(name: str, network: str) -> None:
    a, b = NfsStore(A / name), NfsStore(B / name)
    subprocess.run(["nfs-netem", network], check=True)
    stored, failed = [], 0
    for number in range(8):
        try:
            a.put(f"f/{number}", as_parts(DATA))
            stored.append(number)
        except StoreError:
            failed += 1
            continue
        try:
            assert fetch(b, f"f/{number}", len(DATA)) == DATA
        except StoreError:
            failed += 1
    subprocess.run(["nfs-netem", ""], check=True)
    print(f"{network}: {len(stored)} of 8 stored, {failed} errors")
    assert stored
    for number in stored:
        until_it_works(b, f"f/{number}")
        until_it_works(a, f"f/{number}")
