"""Files that fail: FuseMount itself, the file stores on it, and tiers whose processes hang in it.

The outcome of every fault is success or a StoreError, never wrong bytes that the store could know of, never a name for
half a blob, and the store works as soon as the fault is gone. Flipped bits and lost writes a store cannot know of: the
seal finds them, which is said here by comparing bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from kvtiers.tiers import connections
from kvtiers.tiers.base import JobResult
from kvtiers.tiers.errors import (
    BlobNotFoundError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)
from kvtiers.tiers.frames import Seats
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.testing.contract import as_parts, fetch, list_keys, make_data
from kvtiers.tiers.testing.fuse import OPERATIONS, FuseFault, FuseMount, why_no_fuse
from tests.tiers.server.process_bench import DEADLINE_S, SEATS, Bench
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=str(why_no_fuse()))

OLD, NEW = make_data(70_000, seed=1), make_data(70_000, seed=2)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FuseMount]:
    with FuseMount(tmp_path / "backing", tmp_path / "mount") as mount:
        yield mount


def make_local(root: Path) -> Store:
    return LocalStore(root)


def make_nfs(root: Path) -> Store:
    return NfsStore(root)


@pytest.fixture(params=[make_local, make_nfs])
def store(request: pytest.FixtureRequest, mount: FuseMount) -> Iterator[Store]:
    """Each store on the mount, with one blob."""
    make: Callable[[Path], Store] = request.param
    store = make(mount.path / "root")
    store.put("f/old", as_parts(OLD))
    yield store
    mount.plan = []
    store.close()


# ---- the mount itself ------------------------------------------------------------------------------------------------


def test_fuse_faults_apply_to_the_planned_calls_and_paths(mount: FuseMount) -> None:
    file = mount.path / "file"
    file.write_bytes(b"0123456789")
    mount.plan = [FuseFault("open", errno=errno.EIO, first=2, count=1, path="fil")]
    for expected in (0, errno.EIO, 0):
        assert error_of(file.read_bytes) == expected
    (mount.path / "other").write_bytes(b"")
    mount.plan = [FuseFault("open", errno=errno.ESTALE, path="other")]
    assert (error_of(file.read_bytes), error_of((mount.path / "other").read_bytes)) == (0, errno.ESTALE)
    assert mount.calls()["open"] >= 2  # Linux opens a stale name again
    mount.plan = [FuseFault("read", flip_bit=9)]
    assert file.read_bytes() == b"0323456789"
    mount.plan = [FuseFault("flush", errno=errno.EDQUOT)]
    with pytest.raises(OSError, match="quota"), file.open("wb") as f:
        f.write(b"x")
    mount.plan = []
    assert file.read_bytes() == b"x"
    with pytest.raises(ValueError, match="is not an operation"):
        FuseFault("fluhs")
    assert set(mount.calls()) <= set(OPERATIONS)


def test_fuse_fault_with_a_share_fails_that_share_of_operations(mount: FuseMount) -> None:
    file = mount.path / "file"
    file.write_bytes(b"x")
    mount.plan = [FuseFault("open", errno=errno.EIO, share=0.5), FuseFault("read", errno=errno.EIO, share=0.0)]
    failed = sum(error_of(file.read_bytes) == errno.EIO for _ in range(200))
    assert 50 < failed < 150
    assert mount.struck() == [failed, 0]
    mount.plan = mount.plan
    assert mount.struck() == [0, 0]
    with pytest.raises(ValueError, match="share"):
        FuseFault("read", share=1.5)


def error_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as e:
        return e.errno or -1
    return 0


def test_closed_fuse_mount_is_unmounted(tmp_path: Path) -> None:
    mount = FuseMount(tmp_path / "backing", tmp_path / "mount")
    assert os.path.ismount(mount.path)
    with mount.stopped():
        pass
    mount.close()
    mount.close()
    assert not os.path.ismount(mount.path)


# ---- errors ----------------------------------------------------------------------------------------------------------

PUT_FAULTS = [
    (FuseFault("write", errno=errno.ENOSPC), StoreFullError),
    (FuseFault("write", errno=errno.EIO), StoreUnavailableError),
    (FuseFault("write", errno=errno.EIO, first=2), StoreUnavailableError),
    (FuseFault("flush", errno=errno.EIO), StoreUnavailableError),
    (FuseFault("flush", errno=errno.EDQUOT), StoreFullError),
    (FuseFault("create", errno=errno.EROFS), StorePermissionError),
    (FuseFault("mkdir", errno=errno.ENOSPC), StoreFullError),
    (FuseFault("link", errno=errno.EIO), StoreUnavailableError),
    (FuseFault("getattr", errno=errno.EIO), StoreUnavailableError),
]


@pytest.mark.parametrize(("fault", "error"), PUT_FAULTS, ids=lambda value: str(getattr(value, "operation", "")))
def test_failed_put_publishes_no_blob(
    mount: FuseMount, store: Store, fault: FuseFault, error: type[StoreError]
) -> None:
    mount.plan = [fault, FuseFault("write", short_to=40_000)]
    with pytest.raises(error):
        store.put("g/new", as_parts(NEW, 65_536))
    mount.plan = []
    assert list_keys(store) == ["f/old"]
    assert list((mount.backing / "root" / ".tmp").iterdir()) == []
    store.put("g/new", as_parts(NEW, 65_536))
    assert (mount.backing / "root/g/new").read_bytes() == NEW


@pytest.mark.parametrize("operation", ["write", "flush", "rename"])
def test_failed_overwrite_keeps_the_old_blob(mount: FuseMount, store: Store, operation: str) -> None:
    mount.plan = [FuseFault(operation, errno=errno.EIO)]
    with pytest.raises(StoreUnavailableError):
        store.put("f/old", as_parts(NEW), overwrite=True)
    mount.plan = []
    assert fetch(store, "f/old", len(OLD)) == OLD


@pytest.mark.parametrize("operation", ["open", "read", "getattr"])
def test_failed_get_is_unavailable_and_a_later_get_succeeds(mount: FuseMount, store: Store, operation: str) -> None:
    mount.plan = [FuseFault(operation, errno=errno.EIO)]
    with pytest.raises(StoreUnavailableError):
        fetch(store, "f/old", len(OLD))
    mount.plan = []
    assert fetch(store, "f/old", len(OLD)) == OLD


@pytest.mark.parametrize("operation", ["open", "read"])
def test_nfs_get_retries_estale_once_and_then_reports_a_miss(mount: FuseMount, operation: str) -> None:
    """Opened once more, then a miss."""
    store = NfsStore(mount.path / "root")
    store.put("f/old", as_parts(OLD))
    # Linux itself opens a stale name again, once.
    mount.plan = [FuseFault(operation, errno=errno.ESTALE, count=2 if operation == "open" else 1)]
    assert fetch(store, "f/old", len(OLD)) == OLD
    mount.plan = [FuseFault(operation, errno=errno.ESTALE)]
    with pytest.raises(BlobNotFoundError):
        fetch(store, "f/old", len(OLD))


def test_short_reads_and_writes_are_continued(mount: FuseMount, store: Store) -> None:
    mount.plan = [FuseFault("write", short_to=9_999), FuseFault("read", short_to=9_999)]
    store.put("f/new", as_parts(NEW, 65_536))
    assert fetch(store, "f/new", len(NEW)) == NEW
    assert mount.calls()["write"] >= 8
    assert (mount.backing / "root/f/new").read_bytes() == NEW


def test_flipped_reads_and_dropped_writes_are_not_detected_by_a_store(mount: FuseMount, store: Store) -> None:
    mount.plan = [FuseFault("read", flip_bit=80_001, count=1)]
    damaged = fetch(store, "f/old", len(OLD))
    assert sum(a != b for a, b in zip(damaged, OLD, strict=True)) == 1
    mount.plan = [FuseFault("write", short_to=10_000), FuseFault("write", drop=True, first=2, count=1)]
    store.put("f/new", as_parts(NEW, 4096))
    mount.plan = []
    assert fetch(store, "f/new", len(NEW)) == NEW[:10_000] + bytes(10_000) + NEW[20_000:]
    assert fetch(store, "f/old", len(OLD)) == OLD


# ---- hangs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(mount: FuseMount, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Makes tiers on the mount, whose dead servers are started again soon; their blocks are stored."""
    monkeypatch.setattr(connections, "PAUSE_S", (0.01, 0.05))
    made: list[Bench] = []

    def make(seats: Sequence[Seats] = SEATS) -> Bench:
        made.append(Bench(mount.path / "root", seats, store_class=NfsStore))
        assert made[-1].works()
        return made[-1]

    yield make
    mount.plan = []
    for bench in made:
        bench.tier.shutdown()


@pytest.mark.parametrize("op", ["put", "get"])
def test_job_on_a_hung_mount_ends_when_its_process_is_reaped(
    mount: FuseMount, make: Callable[..., Bench], op: str
) -> None:
    bench = make()
    (victim,) = bench.pids
    with mount.stopped():
        assert not bench.run(op, DEADLINE_S).success
        assert not psutil.pid_exists(victim)
    wait_for(bench.works)  # by a process that began on a hung mount


def test_shutdown_on_a_hung_mount_ends_processes_and_fails_their_jobs(
    mount: FuseMount, make: Callable[..., Bench]
) -> None:
    bench = make([Seats(1, 1, 1, 0), Seats(1, 0, 0, 1)])
    pids = bench.pids
    bench.tier.shutdown_s = 0.4
    with mount.stopped():
        bench.submit("get")
        job_id = bench.job_id
        bench.submit("put")
        bench.tier.shutdown()
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
    results = bench.finished()
    assert sorted(result.job_id for result in results) == [job_id, job_id + 1]
    assert not any(result.success for result in results)


def test_job_whose_process_cannot_be_killed_is_not_reported_before_it_ends(
    mount: FuseMount, make: Callable[..., Bench]
) -> None:
    """State D: no result, and no free slot, before nothing can touch it."""
    bench = make()
    mount.plan = [FuseFault("read", hang=True)]
    bench.tier._channel._deadline_s = DEADLINE_S
    bench.submit("get")
    results: list[JobResult] = []

    def poll() -> bool:
        results.extend(bench.finished())
        return bool(results)

    wait_for(lambda: poll() or bench.kills)
    for _ in range(200):
        poll()
    assert results == []
    mount.plan = []
    wait_for(poll)
    assert [(result.job_id, result.success) for result in results] == [(bench.job_id, False)]
    bench.tier._channel._deadline_s = 120.0
    wait_for(bench.works)
