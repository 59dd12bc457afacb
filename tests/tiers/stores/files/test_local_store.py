"""LocalStore: the contract on each way through it, and what only files have: modes, links, litter, vanishing roots."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import stat
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtiers.tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    ConfigError,
    StoreConfigError,
    StoreError,
    StoreFullError,
)
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files import cleanup, publish
from kvtiers.tiers.stores.files.listing import FOLDERS_DEEP_MAX
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.testing.contract import as_parts, fetch, list_keys
from kvtiers.tiers.testing.faults import run_in_child
from tests.leaks import open_fds
from tests.tiers.stores.files.root_folder import FolderContract, use_private_names


class TestLocalStore(FolderContract):
    def make_store(self) -> Store:
        return LocalStore(self.tmp_path / "root")


@pytest.fixture(params=["unnamed files", "private names"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalStore]:
    """A store on ``tmp_path / "root"``, on each of its ways."""
    store = LocalStore(tmp_path / "root")
    yield use_private_names(store) if request.param == "private names" else store
    store.close()


def tree(folder: Path) -> list[tuple[str, int, bytes | str]]:
    """Names, modes and contents of all there is below a folder."""
    found: list[tuple[str, int, bytes | str]] = []
    for path in sorted(folder.rglob("*")):
        content: bytes | str = b""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        found.append((str(path.relative_to(folder)), path.lstat().st_mode, content))
    return found


# ---- X3: modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("private", [False, True])
def test_files_and_folders_are_private_under_any_umask(tmp_path: Path, umask: int, private: bool) -> None:
    before = os.umask(umask)
    try:
        store = LocalStore(tmp_path / "not" / "yet" / "root")
        if private:
            use_private_names(store)
        store.put("f/g/a", as_parts(b"1"))
        store.put("f/g/a", as_parts(b"2"), overwrite=True)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    assert {path.name for path in modes} >= {"not", "yet", "root", "f", "g", "a", ".tmp"}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


# ---- X2: nothing outside the root is read or written -----------------------------------------------------------------

SECRET = b"a secret outside of the root"


def plant_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_PATH)  # a socket's path is limited to 107 bytes
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def plant_device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device takes CAP_MKNOD")


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link to file": lambda path, outside: path.symlink_to(outside / "secret"),
    "dangling link": lambda path, outside: path.symlink_to(outside / "not-there"),
    "relative link": lambda path, outside: path.symlink_to(os.path.relpath(outside / "secret", path.parent)),
    "link to folder": lambda path, outside: path.symlink_to(outside),
    "link to proc": lambda path, outside: path.symlink_to("/proc/self/mem"),
    "fifo": lambda path, outside: os.mkfifo(path),
    "socket": plant_socket,
    "device": plant_device,
    "folder": lambda path, outside: path.mkdir(),
}


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder beside the root that must be after the test as it was before."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    (folder / "sub").mkdir()
    (folder / "sub" / "secret").write_bytes(SECRET)
    before = tree(folder)
    yield folder
    assert tree(folder) == before


@pytest.mark.parametrize("plant", PLANTS)
def test_non_file_under_a_key_is_a_corrupt_blob(store: LocalStore, tmp_path: Path, outside: Path, plant: str) -> None:
    path = tmp_path / "root" / "f" / "a"
    path.parent.mkdir()
    PLANTS[plant](path, outside)
    fds = open_fds()

    for size in (0, 1, len(SECRET)):
        with pytest.raises(BlobCorruptError):
            fetch(store, "f/a", size)
    with pytest.raises(BlobCorruptError):
        store.get_tail("f/a", 4096)
    assert store.size("f/a") is None
    assert list_keys(store) == []
    store.put("f/a", as_parts(b"1"))  # taken for stored: whoever is to know reads the tail first
    assert not path.is_file() or path.is_symlink()

    if path.is_dir() and not path.is_symlink():
        path.rmdir()  # a folder may hold other keys, so the store leaves it
    store.delete("f/a")
    assert not os.path.lexists(path)
    assert store.get_tail("f/a", 4096) is None
    store.put("f/a", as_parts(b"healed"))
    assert fetch(store, "f/a", 6) == b"healed"
    assert open_fds() <= fds


@pytest.mark.parametrize("plant", PLANTS)
def test_overwrite_and_delete_replace_a_non_file(store: LocalStore, tmp_path: Path, outside: Path, plant: str) -> None:
    for key in ("f/a", "f/b"):
        path = tmp_path / "root" / key
        path.parent.mkdir(exist_ok=True)
        PLANTS[plant](path, outside)
    if plant == "folder":
        # A folder may hold other keys: it is never replaced, and deleting its key is success as for an absent one.
        with pytest.raises(BlobCorruptError):
            store.put("f/a", as_parts(b"1"), overwrite=True)
        store.delete("f/b")
        assert (tmp_path / "root" / "f" / "b").is_dir()
    else:
        store.put("f/a", as_parts(b"new"), overwrite=True)
        assert fetch(store, "f/a", 3) == b"new"
        store.delete("f/b")
        assert not os.path.lexists(tmp_path / "root" / "f" / "b")
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


@pytest.mark.parametrize("target", ["outside", "file", "dangling"])
def test_link_in_place_of_a_folder_is_not_followed(
    store: LocalStore, tmp_path: Path, outside: Path, target: str
) -> None:
    targets = {"outside": outside, "file": outside / "secret", "dangling": outside / "not-there"}
    (tmp_path / "root" / "f").symlink_to(targets[target])
    fds = open_fds()
    for key in ("f/secret", "f/sub/secret", "f/new", "f/new/new"):
        for overwrite in (False, True):
            with pytest.raises(BlobCorruptError):
                store.put(key, as_parts(b"1"), overwrite=overwrite)
        with pytest.raises(BlobCorruptError):
            fetch(store, key, len(SECRET))
        with pytest.raises(BlobCorruptError):
            store.get_tail(key, 4096)
        assert store.size(key) is None
        store.delete(key)
    assert [list_keys(store, prefix) for prefix in ("", "f/", "f/sub/")] == [[], [], []]
    assert open_fds() <= fds


def test_link_in_place_of_the_stores_own_folders_is_not_followed(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    store.put("f/a", as_parts(b"1"))
    own = tmp_path / "root" / ".tmp"
    if own.is_dir():
        own.rmdir()
    own.symlink_to(outside)
    with pytest.raises(StoreConfigError, match=r"\.tmp"):
        store.put("f/a", as_parts(b"2"), overwrite=True)
    assert fetch(store, "f/a", 1) == b"1"
    assert own.is_symlink()


def test_folder_exchanged_with_a_link_during_calls_is_not_followed(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    """Somebody exchanges a folder and a link to the outside, again and again, while we work below it."""
    folder, link = tmp_path / "root" / "f", tmp_path / "root" / "link"
    folder.mkdir()
    link.symlink_to(outside)
    renameat2 = ctypes.CDLL(None).renameat2
    ended = threading.Event()

    def exchange() -> None:
        while not ended.is_set():
            assert renameat2(-1, os.fsencode(folder), -1, os.fsencode(link), 2) == 0  # RENAME_EXCHANGE

    calls: list[Callable[[], object]] = [
        lambda: store.put("f/secret", as_parts(b"1" * len(SECRET))) in (True, False),
        lambda: store.put("f/sub/secret", as_parts(b"1" * len(SECRET)), overwrite=True),
        lambda: list_keys(store),
        lambda: store.get_tail("f/secret", 4096) in (None, (len(SECRET), b"1" * len(SECRET))),
        lambda: fetch(store, "f/secret", len(SECRET)) == b"1" * len(SECRET),
        lambda: fetch(store, "f/sub/secret", len(SECRET)) == b"1" * len(SECRET),
        lambda: store.delete("f/secret"),
        lambda: store.delete("f/sub/secret"),
    ]
    thread = threading.Thread(target=exchange)
    thread.start()
    done = refused = 0
    try:
        for _ in range(1500):
            for call in calls:
                try:
                    assert call() is not False
                    done += 1
                except StoreError:
                    refused += 1
    finally:
        ended.set()
        thread.join()
    assert done, "the folder was never met as a folder: the test shows nothing"
    assert refused, "the folder was never met as a link: the test shows nothing"


def test_root_that_is_a_link_or_a_file_is_refused(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").write_bytes(b"")
    fds = open_fds()
    for path in (tmp_path / "link", tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(StoreConfigError, match=str(path)):
            LocalStore(path)
    assert open_fds() <= fds


def test_link_above_the_root_is_followed(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "mnt")
    LocalStore(tmp_path / "cache" / "root").put("a", as_parts(b"1"))
    assert (tmp_path / "mnt" / "root" / "a").read_bytes() == b"1"


def test_root_replaced_by_a_link_while_running_is_not_followed(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    store.put("f/a", as_parts(b"1"))
    (tmp_path / "root").rename(tmp_path / "moved")
    (tmp_path / "root").symlink_to(outside)
    store.put("f/b", as_parts(b"2"))
    store.put("secret", as_parts(b"3"), overwrite=True)
    assert list_keys(store) == ["f/a", "f/b", "secret"]
    assert (tmp_path / "moved" / "f" / "b").read_bytes() == b"2"
    shutil.rmtree(tmp_path / "moved")
    with pytest.raises(BlobNotFoundError):
        fetch(store, "secret", len(SECRET))
    with pytest.raises(StoreConfigError):
        store.put("secret", as_parts(b"4"), overwrite=True)


# ---- roots that vanish -----------------------------------------------------------------------------------------------


def test_root_removed_while_running_is_made_again(store: LocalStore, tmp_path: Path) -> None:
    store.put("f/a", as_parts(b"1"))
    fds = open_fds()
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(BlobNotFoundError):
        fetch(store, "f/a", 1)
    assert store.size("f/a") is None
    assert store.get_tail("f/a", 1) is None
    assert list_keys(store) == []
    store.delete("f/a")
    assert not (tmp_path / "root").exists()
    store.put("f/b", as_parts(b"2"))
    assert (tmp_path / "root" / "f" / "b").read_bytes() == b"2"
    assert list_keys(store) == ["f/b"]
    assert len(open_fds()) <= len(fds)


MISSES: dict[str, Callable[[LocalStore], object]] = {
    "size": lambda store: store.size("f/a"),
    "get_into": lambda store: fetch(store, "f/a", 3),
    "get_tail": lambda store: store.get_tail("f/a", 1),
    "delete": lambda store: store.delete("f/a"),
    "keys": lambda store: list_keys(store),
}


@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "moved"])
def test_root_replaced_by_another_process_is_found_after_the_first_miss(
    store: LocalStore, tmp_path: Path, miss: str, is_removed: bool
) -> None:
    if is_removed:
        shutil.rmtree(tmp_path / "root")
    else:
        (tmp_path / "root").rename(tmp_path / "aside")
    LocalStore(tmp_path / "root").put("f/a", as_parts(b"new"))
    with contextlib.suppress(BlobNotFoundError):
        MISSES[miss](store)
    assert fetch(store, "f/a", 3) == b"new"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize("made_again", [False, True])
def test_overlayfs_root_removed_while_running_is_made_again(tmp_path: Path, made_again: bool) -> None:
    """overlayfs counts links to such a folder also when it was removed."""
    for name in ("lower/root", "upper", "work", "merged"):
        (tmp_path / name).mkdir(parents=True)
    layers = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    subprocess.run(["mount", "-t", "overlay", "none", "-o", layers, str(tmp_path / "merged")], check=True)
    try:
        root = tmp_path / "merged" / "root"
        store = LocalStore(root)
        store.put("f/a", as_parts(b"1"))
        shutil.rmtree(root)
        if made_again:
            LocalStore(root).put("f/a", as_parts(b"2"))
            store.size("f/a")
            assert fetch(store, "f/a", 1) == b"2"
        store.put("f/b", as_parts(b"3"))
        assert (root / "f" / "b").read_bytes() == b"3"
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "merged")], check=True)


def test_puts_succeed_after_the_root_was_removed_under_writers(store: LocalStore, tmp_path: Path) -> None:
    ended = threading.Event()

    def remove() -> None:
        while not ended.is_set():
            shutil.rmtree(tmp_path / "root", ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for i in range(300):
            try:
                store.put(f"f{i % 3}/g/{i}", as_parts(b"1234"), overwrite=bool(i % 2))
                assert fetch(store, f"f{i % 3}/g/{i}", 4) == b"1234"
            except StoreError:
                pass
    finally:
        ended.set()
        thread.join()
    store.put("f/a", as_parts(b"1"))
    assert fetch(store, "f/a", 1) == b"1"


# ---- litter ----------------------------------------------------------------------------------------------------------


def test_blocks_are_stored_although_proc_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "FDS", str(tmp_path / "no proc"))
    store = LocalStore(tmp_path / "kv")
    assert store.put("f/a", as_parts(b"x"))
    assert not store.put("f/a", as_parts(b"y"))
    assert fetch(store, "f/a", 1) == b"x"


def test_private_files_of_dead_writers_are_swept(tmp_path: Path) -> None:
    private = tmp_path / "root" / ".tmp"
    store = LocalStore(tmp_path / "root")
    store.put("a", as_parts(b"1"), overwrite=True)  # makes the folder

    def plant() -> str:
        (private / (name := publish.private_name())).write_bytes(b"half a blob")
        return name

    ours = plant()
    assert run_in_child(plant) == 0
    machine, pid, started, token, count = ours.rsplit("-", 4)
    reused = f"{machine}-{pid}-{int(started) - 1}-{token}-{count}"
    other_host = f"elsewhere-{ours}"
    without_proc = f"-{pid}--{token}-7"
    for name in (reused, other_host, without_proc):
        (private / name).write_bytes(b"half a blob")
    assert len(list(private.iterdir())) == 5

    LocalStore(tmp_path / "root")
    assert {path.name for path in private.iterdir()} == {ours, other_host, without_proc}
    long_ago = time.time() - cleanup.STALE_AGE_S_MAX - 60
    for path in private.iterdir():
        os.utime(path, (long_ago, long_ago))
    LocalStore(tmp_path / "root")
    assert list(private.iterdir()) == []
    assert list_keys(store) == ["a"]


@pytest.mark.parametrize("store_class", [LocalStore, NfsStore])
def test_foreign_files_in_the_stores_folders_are_kept_and_not_counted(
    tmp_path: Path, store_class: type[LocalStore]
) -> None:
    """Other programs may use folders with these names, too."""
    own = publish.private_name()
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    inside = tmp_path / "root" / ".tmp"
    inside.mkdir(parents=True)
    torn = own.rpartition("-")[0]
    for name in ("thesis.txt", "sample", f"{own}.txt", torn, "a-b-c-1-2-3-4", "-1-2-3-4", "x" * 250):
        (inside / name).write_bytes(b"mine")
    (inside / publish.private_name()).symlink_to(outside)
    os.mkfifo(inside / publish.private_name())
    (inside / publish.private_name()).mkdir()
    others = list(inside.iterdir())
    for path in others:
        os.utime(path, (0, 0), follow_symlinks=False)
    store = store_class(tmp_path / "root")
    assert store.sweep(remove=False) == store.sweep() == 0
    assert [path for path in others if not os.path.lexists(path)] == []
    assert outside.read_bytes() == b"mine"
    assert {name.rpartition("/")[2] for name in store.hidden_names()} >= {"thesis.txt", "sample"}


def test_leftovers_are_counted_before_and_after_they_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = LocalStore(root)
    store.put("f/a", as_parts(b"1"), overwrite=True)
    stale = root / ".tmp" / f"elsewhere-{publish.private_name()}"
    stale.write_bytes(b"half a blob")
    os.utime(stale, (0, 0))
    store = LocalStore(root, read_only=True)
    assert [store.sweep(remove=remove) for remove in (False, True, False)] == [1, 1, 1]
    assert stale.exists()
    store = LocalStore(root)  # opening removes what dead writers left
    assert not stale.exists()
    assert [store.sweep(remove=remove) for remove in (False, True, False)] == [1, 1, 1]
    assert store.hidden_names() == []


# ---- descriptors, threads, processes ---------------------------------------------------------------------------------


def test_listing_memory_does_not_grow_with_the_number_of_blobs(tmp_path: Path) -> None:
    def peak_bytes(count: int) -> int:
        root = tmp_path / str(count)
        (root / "f").mkdir(parents=True)
        for i in range(count):
            (root / "f" / f"{i:06d}").touch()
        store = LocalStore(root)
        tracemalloc.start()
        listed = sum(1 for _ in store.keys())  # noqa: SIM118 - a Store is no dict
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert listed == count
        return peak

    assert peak_bytes(4000) < peak_bytes(40) + 32_768


def test_deep_foreign_folders_do_not_fail_a_listing(store: LocalStore, tmp_path: Path) -> None:
    """A listing holds two descriptors for each folder on the way; earlier tests may have left some open, too."""
    deepest = "/".join(["f"] * FOLDERS_DEEP_MAX) + "/a"
    for key in ("b", deepest):
        store.put(key, as_parts(b"1"))
    (tmp_path / "root" / "d" / "/".join("d" * 300)).mkdir(parents=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = len(os.listdir("/proc/self/fd")) + 2 * FOLDERS_DEEP_MAX + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, limits[1]))
    try:
        assert sorted(list_keys(store)) == ["b", deepest]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_foreign_names_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("f/a", as_parts(b"1"))
    folder = os.fsencode(tmp_path / "root" / "f")
    for name in (b"new\nline", b"back\\slash", b"not \xff utf-8", b".hidden"):
        with open(folder + b"/" + name, "wb"):
            pass
        os.mkdir(folder + b"/d" + name)
        with open(folder + b"/d" + name + b"/file", "wb"):
            pass
    (tmp_path / "root" / ".tmp").mkdir()
    (tmp_path / "root" / ".tmp" / "b").touch()
    assert list_keys(store) == ["f/a", "f/d.hidden/file"]


def test_put_refused_by_min_free_bytes_creates_no_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root", min_free_bytes=1 << 60)
    with pytest.raises(StoreFullError, match="min_free_bytes") as caught:
        store.put("f/a", as_parts(b"1"))
    assert caught.value.key == "f/a"
    assert list((tmp_path / "root").iterdir()) == []


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="min_free_bytes: -1"):
        LocalStore(tmp_path / "root", min_free_bytes=-1)
    assert not (tmp_path / "root").exists()
