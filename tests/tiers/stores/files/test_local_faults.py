"""LocalStore when the system fails under it (W4).

The outcome is success or the mapped StoreError, never a wrong or half blob, never a descriptor or a file left behind,
and the store works again as soon as the fault is gone.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.tiers.base import JobMetadata, JobResult
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.usage import read_usage
from kvtiers.tiers.errors import (
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)
from kvtiers.tiers.stores.files import cleanup as folder_cleanup
from kvtiers.tiers.stores.files import listing as folder_listing
from kvtiers.tiers.stores.files import publish
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.stores.os_errors import ERRORS
from kvtiers.tiers.testing.contract import as_parts, fetch, list_keys, make_data
from kvtiers.tiers.testing.faults import SyscallFaults, run_in_child
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import FakeSpec, block_key
from tests.promises import Record
from tests.tiers.server.in_threads import in_threads
from tests.tiers.stores.files.root_folder import use_private_names

OLD = make_data(5000, seed=1)
NEW = make_data(9000, seed=2)

ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EINTR,
    errno.EACCES,
    errno.EROFS,
    errno.EMFILE,
)


@dataclass(frozen=True)
class Operation:
    """A call on a store that holds OLD under "f/old" and "f/other".

    Attributes:
        call: returns what must equal ``answer`` where it succeeds.
        key: what it is about; the store's other blobs never change.
        after: what is under ``key`` when it succeeded.
        after_failure: what may be there when it did not.
        again: what ``call`` returns where its work had been done already; None: ``answer`` too.
        passes_over: what this user may not read or is damaged is missing in the answer, and no error.
    """

    call: Callable[[LocalStore], object]
    key: str
    after: bytes | None
    after_failure: tuple[bytes | None, ...]
    answer: object = None
    again: bool | None = None
    passes_over: bool = False


def put_new(key: str) -> Operation:
    return Operation(lambda store: store.put(key, as_parts(NEW, 4096)), key, NEW, (None, NEW), True, again=False)


OPERATIONS = {
    "put": put_new("f/new"),
    "put into a new folder": put_new("g/h/new"),
    "put what is there": Operation(lambda store: store.put("f/old", as_parts(NEW)), "f/old", OLD, (OLD,), False),
    "overwrite": Operation(
        lambda store: store.put("f/old", as_parts(NEW, 4096), overwrite=True), "f/old", NEW, (OLD, NEW), True
    ),
    "get": Operation(lambda store: fetch(store, "f/old", len(OLD)), "f/old", OLD, (OLD,), OLD),
    "size": Operation(lambda store: store.size("f/old"), "f/old", OLD, (OLD,), len(OLD)),
    "size of nothing": Operation(lambda store: store.size("f/new"), "f/new", None, (None,)),
    "tail": Operation(lambda store: store.get_tail("f/old", 4096), "f/old", OLD, (OLD,), (len(OLD), OLD[-4096:])),
    "delete": Operation(lambda store: store.delete("f/old"), "f/old", None, (OLD, None)),
    "delete nothing": Operation(lambda store: store.delete("f/new"), "f/new", None, (None,)),
    "list": Operation(list_keys, "f/old", OLD, (OLD,), ["f/old", "f/other"], passes_over=True),
    "open": Operation(lambda store: LocalStore(store.root_dir).close(), "f/old", OLD, (OLD,)),
}

WAYS = ("unnamed files", "private names", "with a reserve")


class Place:
    """A store on one of its ways, made anew for every fault."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder = folder
        self._way = way
        self._count = 0
        self.root = folder

    def make(self) -> LocalStore:
        """A store that holds OLD under "f/old" and "f/other", and has its private folder."""
        self._count += 1
        self.root = self.folder / str(self._count)
        (self.root / "f").mkdir(parents=True)
        (self.root / ".tmp").mkdir()
        for name in ("old", "other"):
            (self.root / "f" / name).write_bytes(OLD)
        if self._way == "with a reserve":
            return LocalStore(self.root, min_free_bytes=1)
        return use_private_names(LocalStore(self.root), self._way == "private names")

    def content(self, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    gc.collect()  # of descriptors that earlier tests left in cycles: they would vanish in the middle of a check
    # In memory where there is some: it is thousands of stores.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Place(Path(folder), request.param)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def calls_of(place: Place, operation: Operation) -> list[str]:
    """The system calls the operation makes where nothing fails; fails the test where it does not do its work."""
    store = place.make()
    with SyscallFaults() as dry:
        assert operation.call(store) == operation.answer
    assert place.content(operation.key) == operation.after
    return dry.calls


def check(place: Place, operation: Operation, faults: SyscallFaults, expected: type[StoreError]) -> bool:
    """Do the operation with the fault and check all that was promised. Returns whether it succeeded."""
    store = place.make()
    fds = open_fds()
    try:
        with faults:
            answer = operation.call(store)
        succeeded = True
    except expected:
        succeeded = False
    assert open_fds() <= fds, f"{faults.calls} left a descriptor"
    if succeeded:
        if operation.passes_over and faults._error in (errno.EACCES, errno.EIO):
            assert isinstance(answer, list)
            assert isinstance(operation.answer, list)
            assert set(answer) <= set(operation.answer)
        else:
            assert answer == operation.answer
        assert place.content(operation.key) == operation.after
    else:
        assert place.content(operation.key) in operation.after_failure
    assert place.content("f/other") == OLD
    # What cannot be unlinked stays until this process is gone: then the next store sweeps it.
    if "unlink" not in faults.failed:
        assert list((place.root / ".tmp").iterdir()) == [], f"{faults.calls} left a file"
    # Healed: the same call on the same store does its work.
    done = place.content(operation.key) == operation.after
    assert operation.call(store) == (operation.again if done and operation.again is not None else operation.answer)
    assert place.content(operation.key) == operation.after
    store.close()
    return succeeded


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_failure_of_any_system_call_leaves_the_old_or_the_new_blob(
    place: Place, name: str, forever: bool, record: Record
) -> None:
    operation = OPERATIONS[name]
    calls = calls_of(place, operation)
    assert calls
    failed = 0
    for code in ERRNOS:
        expected = ERRORS.get(code, StoreUnavailableError)
        for n in range(len(calls)):
            faults = SyscallFaults(at=n, error=code, forever=forever)
            failed += not check(place, operation, faults, expected)
    assert failed
    record("W4", system_calls=len(calls), faults=len(calls) * len(ERRNOS), calls_that_failed=failed, wrong=0)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_short_read_or_write_at_any_system_call_is_not_an_error(place: Place, name: str, forever: bool) -> None:
    """A short read or write is legal and not an error."""
    operation = OPERATIONS[name]
    for n in range(len(calls_of(place, operation))):
        assert check(place, operation, SyscallFaults(at=n, short=True, forever=forever), StoreError)


@pytest.mark.parametrize("name", ["put", "overwrite"])
def test_blob_whose_close_fails_is_not_published(place: Place, name: str) -> None:
    """A failed close may have lost the bytes, so the old blob must stay."""
    operation = OPERATIONS[name]
    calls = calls_of(place, operation)
    written_then_closed = calls.index("close", calls.index("pwritev"))
    store = place.make()
    before = place.content(operation.key)
    with SyscallFaults(at=written_then_closed, error=errno.EIO), pytest.raises(StoreUnavailableError):
        operation.call(store)
    assert place.content(operation.key) == before


# ---- the real thing --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """The root of a file system with 1 MiB and 32 inodes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=32,mode=700", "kvtiers-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting takes root: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(store: LocalStore, data: bytes, reason: str) -> None:
    """Put copies, each in a folder of its own, until the store is full for the given reason."""
    with pytest.raises(StoreFullError, match=reason):  # noqa: PT012 - which of the puts is the first one refused varies
        for i in range(100):
            store.put(f"f{i}/a", as_parts(data))


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@pytest.mark.parametrize("private", [False, True])
def test_full_disk_refuses_puts_and_keeps_stored_blobs(small: Path, private: bool) -> None:
    with closing(LocalStore(small / "root")) as store:
        use_private_names(store, private)
        data = make_data(100_000)
        fill(store, data, "ENOSPC")
        stored = list_keys(store)
        assert 5 < len(stored) < 11
        for key in stored:
            assert fetch(store, key, len(data)) == data
        before = free_bytes(small)
        for _ in range(3):
            with pytest.raises(StoreFullError):
                store.put("f/new", as_parts(data))
            with pytest.raises(StoreFullError):
                store.put(stored[0], as_parts(data), overwrite=True)
        assert free_bytes(small) == before
        assert fetch(store, stored[0], len(data)) == data
        store.delete(stored[1])
        store.put("f/new", as_parts(data))
        assert fetch(store, "f/new", len(data)) == data


def test_disk_without_free_inodes_refuses_puts_and_keeps_stored_blobs(small: Path) -> None:
    with closing(LocalStore(small / "root")) as store:
        fill(store, b"1", "ENOSPC.*no free inodes")
        stored = list_keys(store)
        assert 10 < len(stored) < 20
        assert all(fetch(store, key, 1) == b"1" for key in stored)
        store.delete(stored[0])
        store.put(stored[0], as_parts(b"2"))
        assert fetch(store, stored[0], 1) == b"2"


def test_bad_block_is_healed_without_free_inodes(small: Path) -> None:
    """No second file can be created next to the bad one."""
    with closing(LocalStore(small / "root")) as store:
        region = np.random.default_rng(1).integers(-128, 128, (2, 4096), np.int8)
        good = region.copy()
        tier = StoreTierManager(FakeSpec(), region.data, "test", make_backend=in_threads(store))
        keys = [block_key(n) for n in range(2)]
        assert run(tier, tier.submit_store, keys).success
        fill(store, b"", "ENOSPC")
        for number, offset in enumerate((0, 4096 + 8)):  # the payload; the trailer, which a store reads
            path = small / "root" / tier.mapper.relative_name(keys[number])
            data = bytearray(path.read_bytes())
            data[offset] ^= 1
            with path.open("r+b") as file:
                file.write(data)
        assert run(tier, tier.submit_load, keys[:1]).successful_keys == ()
        region[:] = good
        assert run(tier, tier.submit_store, keys).success
        region[:] = 0
        assert run(tier, tier.submit_load, keys).success
        assert (region == good).all()
        tier.shutdown()


def run(tier: StoreTierManager, submit: Callable[[JobMetadata], None], keys: Sequence[OffloadKey]) -> JobResult:
    submit(JobMetadata(1, list(keys), np.arange(len(keys), dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    return result


@pytest.mark.parametrize("store_class", [LocalStore, NfsStore])
def test_collector_makes_room_without_free_inodes(small: Path, store_class: type[LocalStore | NfsStore]) -> None:
    store = store_class(small / "root")
    try:
        mapper = FileMapper.from_offloading_spec("", FakeSpec())
        blocks = [mapper.relative_name(block_key(n)) for n in range(4)]
        for block in blocks:
            store.put(block, as_parts(bytes(100)))
            os.utime(small / "root" / block, (0, 0))
        with pytest.raises(OSError, match="No space"):  # noqa: PT012 - which of them is the first one refused varies
            for n in range(32):
                (small / f"somebody_else's_{n}").touch()
        collector = Collector(store, CapacityPolicy(ttl_s=60.0))
        collector.note_refused()
        while collector.poll() is None or collector.is_urgent:
            pass
        store.put(blocks[0], as_parts(b"1"))
    finally:
        store.close()


def test_puts_leave_min_free_bytes_free(small: Path) -> None:
    with closing(LocalStore(small / "root", min_free_bytes=500_000)) as store:
        fill(store, make_data(50_000), "min_free_bytes")
        assert 500_000 <= free_bytes(small) < 560_000
        store.delete("f0/a")
        store.put("f0/a", as_parts(make_data(50_000)))
        assert free_bytes(small) >= 500_000


def test_read_only_file_system_is_read_and_refuses_changes(small: Path) -> None:
    LocalStore(small / "root").put("f/a", as_parts(b"1"))
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with closing(LocalStore(small / "root")) as store:
        assert fetch(store, "f/a", 1) == b"1"
        calls: list[Callable[[], object]] = [
            lambda: store.put("f/b", as_parts(b"1")),
            lambda: store.put("g/b", as_parts(b"1")),
            lambda: store.put("f/a", as_parts(b"1"), overwrite=True),
            lambda: store.delete("f/a"),
        ]
        for call in calls:
            with pytest.raises(StorePermissionError, match="EROFS"):
                call()
        assert fetch(store, "f/a", 1) == b"1"
    with pytest.raises(StorePermissionError, match="not-there"):
        LocalStore(small / "not-there")


def test_file_system_mounted_below_the_root_is_used_but_overwrites_are_refused(small: Path, tmp_path: Path) -> None:
    """Reading goes on; what would have to be renamed across is an error that says so."""
    (small / "a").write_bytes(b"1")
    with closing(LocalStore(tmp_path)) as store:
        assert fetch(store, "small/a", 1) == b"1"
        store.put("small/b", as_parts(b"2"))
        assert fetch(store, "small/b", 1) == b"2"
        with pytest.raises(StoreConfigError, match="EXDEV"):
            store.put("small/a", as_parts(b"2"), overwrite=True)
        assert fetch(store, "small/a", 1) == b"1"
        store.delete("small/a")
        assert store.size("small/a") is None


@pytest.mark.parametrize("private", [False, True])
def test_blob_above_the_file_size_limit_is_refused_and_leaves_no_file(tmp_path: Path, private: bool) -> None:
    def use() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        store = use_private_names(LocalStore(tmp_path / "root"), private)
        with pytest.raises(StoreConfigError, match="EFBIG"):
            store.put("f/a", as_parts(make_data(20_000)))
        assert store.size("f/a") is None
        assert list_keys(store) == []
        store.put("f/a", as_parts(make_data(8192)))
        assert fetch(store, "f/a", 8192) == make_data(8192)

    assert run_in_child(use) == 0
    assert sorted(path.name for path in (tmp_path / "root").rglob("*") if path.is_file()) == ["a"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("store_class", [LocalStore, NfsStore])
def test_file_system_without_hard_links_error_names_hard_links(
    tmp_path: Path, store_class: type[LocalStore | NfsStore], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here EPERM is not about permissions, as it is everywhere else."""

    def link(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    store = store_class(tmp_path)
    with pytest.raises(StoreConfigError, match="no hard links"):
        store.put("f/a", as_parts(b"1"))
    assert not list_keys(store)


def owners(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
@pytest.mark.parametrize("store_class", [LocalStore, NfsStore])
def test_files_made_by_root_belong_to_the_root_folders_owner(
    tmp_path: Path, store_class: type[LocalStore | NfsStore]
) -> None:
    """Such as files of ``kvtiers check --write``, ``gc`` and ``copy``. The engine must be able to use them."""
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o711)
    store = store_class(root)
    for key in ("f/g/a", "f/g/b", "_own/c"):
        store.put(key, as_parts(b"1"))
        store.put(key, as_parts(b"2"), overwrite=True)
    store.sweep()
    assert {path.name for path in root.iterdir()} == {"f", "_own", ".tmp"}
    assert owners(root) == {65534}

    def use() -> None:
        os.setgid(65534)
        os.setuid(65534)
        store = store_class(root)
        for key in ("f/g/a", "f/g/b", "_own/c", "f/h/d"):
            store.put(key, as_parts(b"3"), overwrite=True)
            assert fetch(store, key, 1) == b"3"
        store.delete("f/g/a")
        assert store.sweep() == 0

    assert run_in_child(use) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
def test_root_changes_the_owner_only_of_files_it_made(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    LocalStore(root).put("mine/a", as_parts(b"1"))
    outside.mkdir()
    os.chown(root, 65534, 65534)
    (root / "link").symlink_to(outside)
    store = LocalStore(root)
    store.put("mine/b", as_parts(b"1"))
    with pytest.raises(StoreError):
        store.put("link/c", as_parts(b"1"))
    owner = {name: (root / name).stat().st_uid for name in ("mine", "mine/a", "mine/b")}
    assert owner == {"mine": 0, "mine/a": 0, "mine/b": 65534}
    assert owners(outside) == {0}


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
def test_put_succeeds_if_the_owner_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a user namespace without that owner, or on a server that forbids chown."""
    os.chown(tmp_path, 65534, 65534)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    store = LocalStore(tmp_path)
    store.put("f/a", as_parts(b"1"))
    assert fetch(store, "f/a", 1) == b"1"


def test_unreadable_folders_are_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as lost+found, or folders left by a command that root ran. Everything else is listed and swept."""
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o711)

    def use() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        store = LocalStore(tmp_path / "root")
        for key in ("f/a", "f/theirs/b", "g/c", "theirs/d"):
            store.put(key, as_parts(b"1"))
        (tmp_path / "root" / ".tmp").mkdir(exist_ok=True)
        for name, mode in (("f/theirs", 0), ("theirs", 0), ("g", 0o600), (".tmp", 0)):
            (tmp_path / "root" / name).chmod(mode)
        for _ in range(2):
            assert list_keys(store) == list_keys(store, "f") == ["f/a"]
        store.sweep()
        told = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
        assert sorted(text.split()[1] for text in told) == ["f/theirs", "g/c", "theirs"]
        for prefix in ("theirs/", "f/theirs/b"):  # what was asked for by name
            with pytest.raises(StorePermissionError, match="EACCES"):
                list_keys(store, prefix)
        for name in ("f/theirs", "theirs", "g", ".tmp"):
            (tmp_path / "root" / name).chmod(0o700)

    assert run_in_child(use) == 0


class Damaged:
    """The module ``os`` on a file system where a damaged folder cannot be opened, nor a file's inode read."""

    def __init__(self, names: set[str], code: int) -> None:
        self.names, self.code = names, code

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, **options: Any) -> int:
        self._check(path)
        return os.open(path, flags, **options)

    def stat(self, path: str, **options: Any) -> os.stat_result:
        self._check(path)
        return os.stat(path, **options)

    def unlink(self, path: str, **options: Any) -> None:
        self._check(path)
        os.unlink(path, **options)

    def _check(self, path: str) -> None:
        if path in self.names:
            raise OSError(self.code, os.strerror(self.code))


def test_sweep_continues_past_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    names = [f"elsewhere-{publish.private_name()}" for _ in range(40)]
    (tmp_path / ".tmp").mkdir()
    for name in names:
        (tmp_path / ".tmp" / name).write_bytes(b"x")
        os.utime(tmp_path / ".tmp" / name, (0, 0))
    monkeypatch.setattr(folder_cleanup, "os", Damaged({names[7], names[23]}, errno.EIO))
    assert store.sweep() == 38
    assert len(list((tmp_path / ".tmp").iterdir())) == 2


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN, errno.ENOTCONN])
def test_damaged_files_are_skipped_and_counted(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOTCONN: a mount below the root that has lost its server."""
    store = LocalStore(tmp_path)
    folder = "x\nERROR all is lost\x1b[2J"  # whoever may write below the root names it
    for key in ("a/1", "a/2", "b/1", "c/3"):
        store.put(key, as_parts(b"1"))
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(folder_listing, "os", Damaged({"b", "2", folder}, code))
    for _ in range(2):
        assert list_keys(store) == ["a/1", "c/3"]
    assert store.skipped == {"a/2", "b", folder}
    told = [record.getMessage() for record in caplog.records]
    assert sorted(text.split()[1] for text in told) == ["a/2", "b", "x\\nERROR"]
    assert all("is skipped, it cannot be read: " in text and text.isprintable() for text in told)


class Away:
    """The module ``os`` on a mount that says EIO while its server is away (NFS with ``soft``, many a FUSE file system).

    It goes when the folder ``name`` is opened or, with ``reads``, halfway through it, and is back after so many calls.
    """

    def __init__(self, name: str, calls: int, *, reads: bool) -> None:
        self.name, self.calls, self.reads = name, calls, reads
        self.fd = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, **options: Any) -> int:
        if path == self.name and not self.reads:
            self.ask()
        fd = os.open(path, flags, **options)
        if path == self.name:
            self.fd = fd
        return fd

    def scandir(self, fd: int) -> Any:
        return AwayHalfway(os.scandir(fd), self.ask) if fd == self.fd and self.reads else os.scandir(fd)

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        self.ask()
        return os.fstatvfs(fd)

    def ask(self) -> None:
        if self.calls > 0:
            self.calls -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class AwayHalfway:
    def __init__(self, entries: Any, ask: Callable[[], None]) -> None:
        self._entries, self._ask = entries, ask
        self._count = 0

    def __enter__(self) -> AwayHalfway:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.close()

    def __iter__(self) -> AwayHalfway:
        return self

    def __next__(self) -> Any:
        if self._count == 1:
            self._ask()
        self._count += 1
        return next(self._entries)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("calls", [1, 2, 100])
def test_short_outage_is_not_taken_for_a_damaged_folder(
    tmp_path: Path, calls: int, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are in one folder. If it were skipped, the root would count as empty and be filled once more."""
    policy = CapacityPolicy(max_bytes=1_000_000)
    store = LocalStore(tmp_path)
    names = [FileMapper.from_offloading_spec("", FakeSpec()).relative_name(block_key(n)) for n in range(20)]
    for name in names:
        store.put(name, as_parts(bytes(1000)))
    report = Collector(store, policy).run()
    assert report is not None
    usage = read_usage(store)
    assert usage is not None
    away = Away(names[0].partition("/")[0], calls, reads=reads)
    monkeypatch.setattr(folder_listing, "os", away)
    try:
        again = Collector(store, policy).run()
    except StoreUnavailableError:
        after = read_usage(store)
        assert after is not None
        assert (after.bytes, after.listed) == (usage.bytes, usage.listed)
    else:
        assert again is not None
        assert again.bytes >= report.bytes
    away.calls = 0
    last = Collector(store, policy).run()
    assert last is not None
    assert last.bytes >= report.bytes
    assert not store.skipped


def test_listing_fails_if_many_folders_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is gone. What it still lists must not count as the whole root."""
    store = LocalStore(tmp_path)
    names = {f"f{number}" for number in range(20)}
    for name in sorted(names):
        store.put(f"{name}/1", as_parts(b"1"))
    monkeypatch.setattr(folder_listing, "os", Damaged(names, errno.EIO))
    with pytest.raises(StoreUnavailableError, match="EIO"):
        list_keys(store)
