"""FsspecStore on memory, local files and S3 (s3fs on moto's server): the contract, and what drivers do differently."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from json import JSONDecodeError
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from kvtiers.tiers.config.open_store import open_store
from kvtiers.tiers.config.tier_options import FsspecTierConfig
from kvtiers.tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.store import Store, SupportsTail
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.fsspec import FsspecStore
from kvtiers.tiers.stores.fsspec_driver import check_drivers, lists_trees, mtime_of
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from kvtiers.tiers.testing.servers import S3Server
from tests.tiers.stores.files.root_folder import FolderContract
from tests.web_server import WebServer, serve_folder

pytestmark = pytest.mark.usefixtures("boto_models_once")

TOKEN = "CanaryTokenOfAStorageOption"
SECRET = "CanarySecretOfAStorageOption"
_numbers = count()


def backend() -> Any:
    """The memory of moto's server."""
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


def s3_options(server: S3Server) -> dict[str, Any]:
    return {"key": server.access_key, "secret": server.secret_key, "endpoint_url": server.endpoint_url}


class TestMemory(StoreContract):
    def make_store(self) -> FsspecStore:
        self.root = f"/place-{next(_numbers)}"
        return FsspecStore(f"memory:/{self.root}")

    def plant(self, store: Store, key: str, data: bytes) -> None:
        MemoryFileSystem().pipe_file(f"{self.root}/{key}", data)

    def peek(self, store: Store, key: str) -> bytes | None:
        try:
            return bytes(MemoryFileSystem().cat_file(f"{self.root}/{key}"))
        except FileNotFoundError:
            return None


class PlainFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A protocol that nobody knows to put in one step: sftp, hdfs, smb and the like."""

    protocol = "plain"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("plain://")))


class TestTemporaryNameAndMove(StoreContract):
    no_fork = "the place is this process' memory"

    @pytest.fixture(autouse=True)
    def _use_protocol(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # fsspec's exports the buffer, and a write by another thread meanwhile is a BufferError.
        monkeypatch.setattr(MemoryFile, "size", property(lambda file: len(file.getvalue())))
        fsspec.register_implementation("plain", PlainFileSystem, clobber=True)

    def make_store(self) -> FsspecStore:
        self.root = f"/place-{next(_numbers)}"
        return FsspecStore(f"plain:/{self.root}")

    def reopen(self, store: Store) -> FsspecStore:
        return FsspecStore(f"plain:/{self.root}")

    def plant(self, store: Store, key: str, data: bytes) -> None:
        PlainFileSystem().pipe_file(f"{self.root}/{key}", data)

    def peek(self, store: Store, key: str) -> bytes | None:
        found = PlainFileSystem.store.get(f"{self.root}/{key}")
        return None if found is None else bytes(found.getvalue())


class TestLocal(FolderContract):
    def make_store(self) -> FsspecStore:
        return FsspecStore(f"file://{self.root}")


@pytest.mark.full  # moto and s3fs take half a minute of CPU for it; what s3fs does otherwise is tested below
class TestS3(StoreContract):
    no_fork = "the server is this process; an object is put by one request"

    @pytest.fixture(autouse=True)
    def _use_server(self, moto: S3Server, boto_models_once: None) -> None:
        self.server = moto

    def make_store(self) -> FsspecStore:
        self.bucket = f"fsspec-{next(_numbers)}"
        backend().create_bucket(self.bucket, "us-east-1")
        return self.reopen(None)

    def reopen(self, store: Store | None) -> FsspecStore:
        return FsspecStore(f"s3://{self.bucket}/pre/fix", s3_options(self.server))

    def plant(self, store: Store, key: str, data: bytes) -> None:
        backend().put_object(self.bucket, f"pre/fix/{key}", data)

    def peek(self, store: Store, key: str) -> bytes | None:
        found = backend().get_object(self.bucket, f"pre/fix/{key}")
        return None if found is None else bytes(found.value)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[FsspecStore]:
    store = FsspecStore(f"file://{tmp_path}/kv")
    yield store
    store.close()


@pytest.fixture
def s3(moto: S3Server, boto_models_once: None) -> Iterator[FsspecStore]:
    bucket = f"fsspec-{next(_numbers)}"
    backend().create_bucket(bucket, "us-east-1")
    store = FsspecStore(f"s3://{bucket}", s3_options(moto))
    yield store
    store.close()


def test_capabilities_follow_the_protocol_of_the_url(local: FsspecStore, s3: FsspecStore) -> None:
    memory = FsspecStore("memory://kv")
    seen = {
        name: (store.capabilities.exclusive_create, store.capabilities.shared, store.capabilities.latency_bound)
        for name, store in (("memory", memory), ("local", local), ("s3", s3))
    }
    assert seen == {"memory": (False, False, False), "local": (False, True, False), "s3": (False, True, True)}
    assert isinstance(local, SupportsTail)


# -- publishing --------------------------------------------------------------------------------------------------------


def test_local_blob_is_never_seen_half_written(
    local: FsspecStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    replace = os.replace

    def spy(source: str, target: str) -> None:
        seen.append(list_keys(local))
        assert Path(source).read_bytes() == b"1234"
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    local.put("f/a", as_parts(b"1234", 2))
    assert seen[0] == []
    assert list_keys(local) == ["f/a"]
    assert list((tmp_path / "kv" / ".tmp").iterdir()) == []


@pytest.mark.parametrize(("place", "method"), [(os, "replace"), (LocalFileSystem, "open")])
def test_failed_fsspec_put_keeps_the_old_blob_and_leaves_no_file(
    local: FsspecStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, method: str
) -> None:
    local.put("f/a", as_parts(b"old"))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(place, method, fail)
        for overwrite, key in ((False, "f/b"), (True, "f/a")):
            with pytest.raises(StoreFullError):
                local.put(key, as_parts(b"new"), overwrite=overwrite)
    assert list_keys(local) == ["f/a"]
    assert fetch(local, "f/a", 3) == b"old"
    assert list((tmp_path / "kv" / ".tmp").iterdir()) == []


def test_temporary_files_of_dead_writers_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / ".tmp"
    folder.mkdir(parents=True)
    old, young = f".{'0a' * 16}", f".{'1b' * 16}"
    others = {"thesis.txt", ".old", f"{old}.bak", f".{'2c' * 16}"}
    for name in (old, young, *others):
        (folder / name).write_bytes(b"1")
    (folder / f".{'2c' * 16}").unlink()
    (folder / f".{'2c' * 16}").symlink_to(tmp_path)  # a link is nobody's temporary file
    for name in (old, *others):
        os.utime(folder / name, (time.time() - 4000,) * 2, follow_symlinks=False)
    FsspecStore(f"file://{tmp_path}/kv").close()
    assert {path.name for path in folder.iterdir()} == {young, *others}


def test_read_only_store_sweeps_nothing_and_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    litter = tmp_path / "kv" / ".tmp" / f".{'0a' * 16}"
    litter.parent.mkdir(parents=True)
    litter.write_bytes(b"1")
    os.utime(litter, (1, 1))
    open_store(FsspecTierConfig(url=f"file://{tmp_path}/kv", read_only=True)).close()
    with serve_folder(tmp_path) as server:
        server.status = 503
        open_store(FsspecTierConfig(url=f"{server.url}/kv", read_only=True)).close()
        assert caplog.text == ""
        open_store(FsspecTierConfig(url=f"{server.url}/kv")).close()
        assert "temporary files could not be removed" in caplog.text
    assert litter.exists()
    open_store(FsspecTierConfig(url=f"file://{tmp_path}/kv")).close()
    assert not litter.exists()


def test_store_opens_with_a_warning_although_the_server_never_answers(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        opened: list[FsspecStore] = []
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/kv"
        opening = threading.Thread(
            target=lambda: opened.append(FsspecStore(url, request_timeout_s=0.2)),
            daemon=True,  # one that hangs fails the test and not the run
        )
        opening.start()
        opening.join(120)
    assert len(opened) == 1
    assert "temporary files could not be removed: FSTimeoutError" in caplog.text


def test_temporary_files_without_a_timestamp_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kv" / ".tmp"
    folder.mkdir(parents=True)
    name = f".{'0a' * 16}"
    (folder / name).write_bytes(b"1")
    monkeypatch.setattr("kvtiers.tiers.stores.fsspec.mtime_of", lambda entry: 0.0)
    FsspecStore(f"file://{tmp_path}/kv").close()
    assert [path.name for path in folder.iterdir()] == [name]


def test_put_never_moves_a_blob_into_a_folder(local: FsspecStore, tmp_path: Path) -> None:
    local.put("a/b", as_parts(b"1"))
    with pytest.raises(BlobCorruptError, match="there is a folder"):
        local.put("a", as_parts(b"2"))
    assert [path.name for path in (tmp_path / "kv" / "a").iterdir()] == ["b"]


# -- caches ------------------------------------------------------------------------------------------------------------


def test_stores_do_not_share_an_instance_with_other_users_of_fsspec() -> None:
    FsspecStore("memory://kv")
    other = fsspec.filesystem("memory")
    assert other.dircache.use_listings_cache


# -- web servers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[FsspecStore, WebServer]]:
    """A store at a web server over the files of ``tmp_path / "kv"``."""
    (tmp_path / "kv").mkdir()
    with serve_folder(tmp_path) as server:
        yield FsspecStore(f"{server.url}/kv"), server


def test_sizes_missing_in_a_listing_are_queried(
    web: tuple[FsspecStore, WebServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.tiers.stores.fsspec.ASKED_AT_ONCE", 4)
    files = LocalStore(tmp_path / "kv")
    for i in range(10):
        files.put(f"n_r0/{i % 3:03x}/0{i}_g0/k.bin", as_parts(bytes(i)))
    for prefix in ("", "n_r0/", "n_r0/001", "n_r0/001/04_g0/k", "none/"):
        expected = [(info.key, info.size) for info in files.keys(prefix)]
        assert sorted((info.key, info.size) for info in web[0].keys(prefix)) == sorted(expected)
    web[1].status = 503
    with pytest.raises(StoreUnavailableError):
        list(web[0].keys())


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, StorePermissionError),
        (403, StorePermissionError),
        (429, StoreUnavailableError),
        (503, StoreUnavailableError),
        (404, None),
        (410, None),
        (None, StoreUnavailableError),  # nobody answers
    ],
)
def test_failed_request_to_a_web_server_is_not_a_miss(
    web: tuple[FsspecStore, WebServer], status: int | None, error: type[StoreError] | None
) -> None:
    store, server = web
    server.status = status
    if status is None:
        server.shutdown()
        server.server_close()
    (several,) = store.size_many(["a/b"])
    if error is None:
        assert [store.size("a/b"), store.get_tail("a/b", 1), several] == [None] * 3
    else:
        assert isinstance(several, error)
        for call in (lambda: store.size("a/b"), lambda: store.get_tail("a/b", 1)):
            with pytest.raises(error):
                call()
    with pytest.raises(error or BlobNotFoundError):
        fetch(store, "a/b", 1)


def test_failed_read_of_a_blob_that_is_then_absent_keeps_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FsspecStore(f"memory://kv-{next(_numbers)}")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(StoreUnavailableError):
        fetch(store, "a", 1)


def test_tail_is_read_from_a_server_without_range_requests(web: tuple[FsspecStore, WebServer], tmp_path: Path) -> None:
    (tmp_path / "kv" / "a").write_bytes(b"12345")
    for length, expected in ((2, b"45"), (5, b"12345"), (9, b"12345"), (0, b"")):
        assert web[0].get_tail("a", length) == (5, expected)


# -- listings ----------------------------------------------------------------------------------------------------------


class Refusals:
    """A driver's way to list a folder, that fails for folders with one of ``names`` in their path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: type, method: str) -> None:
        self.names: set[str] = set()
        self.error: OSError = OSError(errno.EIO, "broken")
        listed = getattr(driver, method)

        def ls(fs: Any, path: str, *args: Any, **options: Any) -> Any:
            if self.names & set(path.split("/")):
                raise self.error
            return listed(fs, path, *args, **options)

        async def ls_async(*args: Any, **options: Any) -> Any:
            return await ls(*args, **options)

        monkeypatch.setattr(driver, method, ls if method == "ls" else ls_async)


@pytest.fixture(params=["local", "web"])
def listed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of two blobs whose driver lists folder by folder, and what can go wrong with that."""
    for name in ("000", "001"):
        LocalStore(tmp_path / "kv").put(f"n_r0/{name}/00_g0/k.bin", as_parts(b"1"))
    if request.param == "local":
        yield FsspecStore(f"file://{tmp_path}/kv"), Refusals(monkeypatch, LocalFileSystem, "ls")
        return
    with serve_folder(tmp_path) as server:
        yield FsspecStore(f"{server.url}/kv"), Refusals(monkeypatch, HTTPFileSystem, "_ls")


@pytest.mark.parametrize("name", ["kv", "n_r0", "001", "00_g0"])
def test_folder_that_cannot_be_listed_fails_the_listing(listed: tuple[FsspecStore, Refusals], name: str) -> None:
    store, refusals = listed
    assert list_keys(store) == ["n_r0/000/00_g0/k.bin", "n_r0/001/00_g0/k.bin"]
    refusals.names = {name}
    with pytest.raises(StoreUnavailableError):
        list_keys(store)
    refusals.error = PermissionError(errno.EACCES, "expired")
    with pytest.raises(StorePermissionError):
        list_keys(store)
    refusals.error = FileNotFoundError(errno.ENOENT, "removed meanwhile")
    assert list_keys(store) == (["n_r0/000/00_g0/k.bin"] if name == "001" else [])


def test_only_drivers_with_tree_listings_are_asked_for_trees(local: FsspecStore, s3: FsspecStore) -> None:
    """A listing of S3 by folders would be thousands of requests."""
    stores = (local, s3, FsspecStore("memory://kv"), FsspecStore("http://host/kv", read_only=True))
    assert [lists_trees(store._fs) for store in stores] == [False, True, True, False]


@pytest.mark.parametrize("other", ["{root}x/a/b", "/elsewhere/a/b", "{root}/c/b"])
def test_listing_of_names_not_asked_for_is_refused(
    local: FsspecStore, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A collector would delete the blob that has the same key in this root."""
    local.put("a/b", as_parts(b"1"))
    entry = {"name": other.format(root=local._root), "size": 1, "type": "file"}
    ls = LocalFileSystem.ls
    monkeypatch.setattr(LocalFileSystem, "ls", lambda fs, path, **options: [entry, *ls(fs, path, **options)])
    with pytest.raises(StoreConfigError, match="lists names outside the requested prefix"):
        list_keys(local)


def test_tree_with_names_outside_the_folder_is_refused(s3: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("a/b/c/d", as_parts(b"1"))
    assert list_keys(s3) == ["a/b/c/d"]
    root = s3._root

    async def find(*_: object, **__: object) -> dict[str, dict[str, object]]:
        return {"other": {"name": f"{root}/a/x/c", "size": 1, "type": "file"}}

    monkeypatch.setattr(s3._fs, "_find", find)
    with pytest.raises(StoreConfigError, match="lists names outside the requested prefix"):
        list_keys(s3)


# -- lookups -----------------------------------------------------------------------------------------------------------


def test_fsspec_size_many_returns_sizes_and_none_for_absent_keys(s3: FsspecStore) -> None:
    for i in range(0, 60, 2):
        backend().put_object(s3._root, f"f/{i}", bytes(i))
    assert s3.size_many([f"f/{i}" for i in range(60)]) == [None if i % 2 else i for i in range(60)]


def test_size_many_error_names_the_failed_key() -> None:
    with HttpFaultServer() as server:
        store = FsspecStore("s3://bucket", {"key": "k", "secret": "s", "endpoint_url": server.endpoint_url})
        server.put_object("bucket", "a", b"1")
        server.inject(Fault.ACCESS_DENIED, path_contains="/bucket/b")
        good, denied, absent = store.size_many(["a", "b", "c"])
        assert (good, absent) == (1, None)
        assert isinstance(denied, StorePermissionError)
        assert denied.key == "b"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (FileNotFoundError(errno.ENOENT, SECRET), BlobNotFoundError),
        (PermissionError(errno.EACCES, SECRET), StorePermissionError),
        (OSError(errno.ENOSPC, SECRET), StoreFullError),
        (OSError(errno.EIO, SECRET), StoreUnavailableError),
        (OSError(SECRET), StoreUnavailableError),
        (ConnectionResetError(SECRET), StoreUnavailableError),
        (TimeoutError(SECRET), StoreTimeoutError),
        (NotImplementedError(SECRET), StoreConfigError),
        (ValueError(SECRET), StoreConfigError),
        (JSONDecodeError(SECRET, "", 0), StoreUnavailableError),
        (UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET), StoreUnavailableError),
        (type("DefaultCredentialsError", (Exception,), {})(SECRET), StorePermissionError),
        (type("DriverError", (Exception,), {})(SECRET), StoreUnavailableError),
    ],
)
def test_exceptions_of_a_driver_become_store_errors(
    raised: Exception, error: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsspecStore(f"memory://kv-{next(_numbers)}")
    store.put("a", as_parts(b"1"))

    def fail(*args: object, **kwargs: object) -> None:
        raise raised

    for method in ("info", "ls", "cat_file", "pipe_file", "rm_file", "find"):
        monkeypatch.setattr(MemoryFileSystem, method, fail)
    absent = error is BlobNotFoundError
    calls: list[tuple[Callable[[], object], type[StoreError] | None]] = [
        (lambda: fetch(store, "a", 1), error),
        (lambda: store.put("a", as_parts(b"1"), overwrite=True), StoreConfigError if absent else error),
        (lambda: store.size("a"), None if absent else error),
        (lambda: store.delete("a"), None if absent else error),
        (lambda: list(store.keys()), None if absent else error),
    ]
    for call, expected in calls:
        if expected is None:
            assert not call()
            continue
        with pytest.raises(expected) as caught:
            call()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert SECRET not in repr(caught.value.__context__)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.ACCESS_DENIED, StorePermissionError),
        (Fault.CLOCK_SKEW, StorePermissionError),
        (Fault.STALL, StoreTimeoutError),
    ],
)
def test_server_faults_become_matching_store_errors(fault: Fault, error: type[StoreError]) -> None:
    with HttpFaultServer() as server:
        store = FsspecStore(
            "s3://bucket",
            {"key": "k", "secret": SECRET, "endpoint_url": server.endpoint_url},
            request_timeout_s=0.5 if fault is Fault.STALL else 120.0,
        )
        server.put_object("bucket", "a", b"1")
        server.inject(fault)
        for call in (lambda: store.put("b", as_parts(b"1")), lambda: fetch(store, "a", 1), lambda: store.size("a")):
            with pytest.raises(error):
                call()


def test_put_into_a_missing_bucket_is_a_config_error_and_size_is_none(moto: S3Server, boto_models_once: None) -> None:
    store = FsspecStore("s3://no-such-bucket", s3_options(moto))
    with pytest.raises(StoreConfigError, match="the bucket or the root does not exist"):
        store.put("a", as_parts(b"1"))
    assert store.size("a") is None


@pytest.mark.parametrize(
    ("info", "seconds"),
    [
        ({"mtime": 12.5}, 12.5),
        ({"LastModified": datetime(2026, 1, 2, tzinfo=UTC)}, 1767312000.0),
        ({"updated": "2026-01-02T00:00:00Z"}, 1767312000.0),
        ({"updated": "Jan 2 10:00"}, 0.0),
        ({"modificationTime": 1767312000500}, 1767312000.5),  # webhdfs
        ({"last_commit": {"oid": "1", "date": datetime(2026, 1, 2, tzinfo=UTC)}}, 1767312000.0),  # hf
        ({"last_commit": None}, 0.0),
        ({}, 0.0),
    ],
)
def test_mtime_is_read_from_each_drivers_own_field(info: dict[str, object], seconds: float) -> None:
    assert mtime_of(info) == seconds


def test_missing_driver_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreConfigError, match="the driver is not installed: pip install adlfs"):
        FsspecStore("abfs://container/kv")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StoreConfigError, match=r"pip install '\.\[fsspec\]'"):
        FsspecStore("memory://kv")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"{cache}::file:///nowhere/kv", f"{cache}:// is not accepted: its cache returns stale blocks")
        for cache in ("simplecache", "filecache", "blockcache", "cached")
    ]
    + [
        ("ftp://host/kv", "ftp:// is not accepted: its driver has one connection for all threads"),
        ("tar://kv::file:///nowhere/kv.tar", "tar:// is not accepted: its driver has one open file for all threads"),
        ("dir::file:///nowhere/kv", "dir:// is not accepted: the wrapped file system .* write its URL"),
        ("dir://kv::s3://bucket", "dir:// is not accepted"),
    ],
)
def test_protocols_that_break_promises_are_refused(url: str, expected: str) -> None:
    with pytest.raises(StoreConfigError, match=expected):
        check_drivers(url)
    with pytest.raises(StoreConfigError, match=expected):
        FsspecStore(url)


@pytest.mark.parametrize("url", ["nosuch://kv", "s3://"])
def test_url_with_unknown_protocol_or_without_bucket_is_refused(url: str) -> None:
    with pytest.raises(StoreConfigError):
        FsspecStore(url)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, SECRET), StoreUnavailableError),
        (TimeoutError(SECRET), StoreTimeoutError),
        (PermissionError(errno.EACCES, SECRET), StorePermissionError),
        (FileNotFoundError(errno.ENOENT, SECRET), StoreConfigError),
        (EOFError(SECRET), StoreUnavailableError),
    ],
)
def test_failed_connection_at_opening_is_a_store_error(
    raised: Exception, expected: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise raised

    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)
    monkeypatch.setattr(PlainFileSystem, "__init__", connect)
    with pytest.raises(expected, match=r"^FsspecStore\('plain://host/kv'\): ") as caught:
        FsspecStore("plain://host/kv")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_fsspec_secrets_are_not_shown_in_errors_reprs_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with HttpFaultServer() as server:
        access = {"key": "k", "secret": SECRET, "token": TOKEN, "endpoint_url": server.endpoint_url}
        store = FsspecStore("s3://bucket/kv", access)
        assert repr(store) == "FsspecStore('s3://bucket/kv')"
        server.inject(Fault.SIGNATURE)
        with pytest.raises(StorePermissionError) as caught:
            store.put("a", as_parts(b"1"), overwrite=True)
        shown = "".join(traceback.format_exception(caught.value)) + caplog.text
        assert SECRET not in shown
        assert TOKEN not in shown
        assert server.requests("PUT")[0].headers["x-amz-security-token"] == TOKEN
    assert repr(FsspecStore(f"memory://user:p/{SECRET}@host/kv")) == "FsspecStore('memory://***@host/kv')"
    with pytest.raises(StoreConfigError) as refused:
        FsspecStore(f"nosuch://user:{SECRET}@host/kv")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_hugging_face_url_is_opened_without_stale_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    store = FsspecStore("hf://datasets/org/repo/kv")
    listed: list[str] = []

    def info(driver: Any, path: str) -> dict[str, Any]:
        assert not driver.dircache  # what an earlier call has listed may be stale
        listed.append(path)
        driver.dircache["datasets/org/repo/kv"] = []
        return {"type": "file", "size": len(listed)}

    monkeypatch.setattr(hub.HfFileSystem, "info", info)
    assert [store.size("a"), store.size("b")] == [1, 2]
    assert store.size_many(["c"]) == [3]


# -- what an operator gets wrong, and what drivers tell ----------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("s3//bucket/x", "gs:bucket/x", "s3:/bucket/x", "s3:", "bucket/x", "kv", "", "://bucket/x", "memory"),
        *("zip://a::s3//bucket/x", "gs:bucket::s3://bucket/x", "~/kv", "./kv", "/kv", "file:/kv", "zip://a::/kv.zip"),
        *("file://kv", "file://./kv", "local://kv", "zip://a::file://kv.zip"),
    ],
)
def test_url_that_fsspec_would_take_for_a_path_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec takes it for a path, and writes into the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreConfigError):
        check_drivers(url)
    with pytest.raises(StoreConfigError):
        FsspecStore(url)
    assert list(tmp_path.iterdir()) == []


def test_drivers_log_nothing_at_debug(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not fsspec, not a driver, not a library that a driver uses; whenever their loggers are made."""
    (tmp_path / "kvtiers_test_library.py").write_text("")
    (tmp_path / "kvtiers_test_driver.py").write_text(
        "import logging\n"
        "import kvtiers_test_library\n"
        "from fsspec.implementations.memory import MemoryFileSystem\n"
        "logger = logging.getLogger(__name__ + '.inner')\n"
        "logger.setLevel(logging.DEBUG)\n"
        "class Driver(MemoryFileSystem):\n"
        "    protocol = 'talkative'\n"
        "    def __init__(self, *args, **options):\n"
        "        logger.debug('connecting with %s', options)\n"
        "        super().__init__(*args, **options)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fsspec.register_implementation("talkative", "kvtiers_test_driver.Driver", clobber=True)
    caplog.set_level(logging.DEBUG)
    FsspecStore("talkative://kv", {"password": SECRET})
    for name in ("fsspec", "fsspec.memory", "kvtiers_test_driver", "kvtiers_test_library.http", "s3fs", "urllib3"):
        logging.getLogger(name).debug(SECRET)
    assert SECRET not in caplog.text


def test_loggers_of_a_drivers_libraries_are_capped() -> None:
    check_drivers("s3://bucket")
    for name in ("aiohttp.client", "aiobotocore", "fsspec.asyn"):
        assert not logging.getLogger(name).isEnabledFor(logging.DEBUG)
