"""``posix``, ``vectored_io`` and the reserve of ``publish``: opening below a root, parts, free space."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.errors import StoreFullError
from kvtiers.tiers.stores.files.posix import (
    OPEN_FOLDER,
    OPEN_READ,
    RootFolder,
    open_stepwise,
    openat2,
    openat2_works,
)
from kvtiers.tiers.stores.files.publish import FreeSpace
from kvtiers.tiers.stores.vectored_io import IOV_COUNT_MAX, transfer
from tests.leaks import open_fds

# ---- opening below a folder ------------------------------------------------------------------------------------------

Opener = Callable[[int, str, int], int]


@pytest.fixture(params=[openat2, open_stepwise])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    if request.param is openat2:
        root = RootFolder(str(tmp_path), make=False)
        if not openat2_works(root.fd):
            pytest.skip("this kernel or sandbox has no openat2")
    chosen: Opener = request.param
    return chosen


def test_opens_what_is_below(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "f" / "é").mkdir(parents=True)
    (tmp_path / "f" / "é" / "a").write_bytes(b"1")
    root = RootFolder(str(tmp_path), make=False)
    for path in ("f/é/a", ".", "f", "f/é"):
        fd = opener(root.fd, path, OPEN_READ if path.endswith("a") else OPEN_FOLDER)
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path / path))
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize(
    "path", ["link", "folder-link/a", "f/up/a", "absolute/etc/passwd", "proc/self/root/etc/passwd"]
)
def test_follows_no_link(opener: Opener, tmp_path: Path, path: str) -> None:
    (tmp_path / "root" / "f").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"outside")
    (tmp_path / "root" / "a").write_bytes(b"inside")
    (tmp_path / "root" / "link").symlink_to("a")
    (tmp_path / "root" / "folder-link").symlink_to(".")
    (tmp_path / "root" / "f" / "up").symlink_to("../..")
    (tmp_path / "root" / "absolute").symlink_to("/")
    (tmp_path / "root" / "proc").symlink_to("/proc")
    root = RootFolder(str(tmp_path / "root"), make=False)
    fds = open_fds()
    with pytest.raises(OSError, match="symbolic links|Not a directory"):
        opener(root.fd, path, OPEN_READ)
    assert open_fds() <= fds


def test_missing_and_not_a_folder(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    root = RootFolder(str(tmp_path), make=False)
    for path in ("b", "b/c", "b/c/d"):
        with pytest.raises(FileNotFoundError):
            opener(root.fd, path, OPEN_READ)
    with pytest.raises(NotADirectoryError):
        opener(root.fd, "a/b", OPEN_READ)


def test_root_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RootFolder(str(tmp_path / "a" / "b"), make=False)
    root = RootFolder(str(tmp_path / "a" / "b"), make=True)
    assert not root.is_removed()
    (tmp_path / "a" / "b").rmdir()
    assert root.is_removed()
    with pytest.raises(FileNotFoundError):
        root.make_folder("f")


# ---- vectored I/O ----------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    steps=st.lists(st.integers(1, 120), min_size=1),
    offset=st.integers(0, 10),
)
def test_transfer_moves_everything_however_often_it_stops(sizes: list[int], steps: list[int], offset: int) -> None:
    data = bytes(i % 251 for i in range(sum(sizes)))
    source = memoryview(data)
    parts = []
    for size in sizes:
        parts.append(source[:size])
        source = source[size:]
    written = bytearray()
    pending = list(steps)

    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        assert fd == 99
        assert at == offset + len(written)
        moved = b"".join(buffers)[: pending.pop(0) if pending else None]
        written.extend(moved)
        return len(moved)

    assert transfer(call, 99, parts, offset) == len(data)
    assert bytes(written) == data


def test_transfer_ends_where_a_call_moves_nothing() -> None:
    moves = iter([3, 0])
    assert transfer(lambda fd, buffers, at: next(moves), 0, [memoryview(b"12345")]) == 3


def test_transfer_keeps_to_the_limit_of_buffers() -> None:
    counts = []

    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        counts.append(len(buffers))
        return sum(map(len, buffers))

    parts = [memoryview(b"1")] * (2 * IOV_COUNT_MAX + 1)
    assert transfer(call, 0, parts) == len(parts)
    assert counts == [IOV_COUNT_MAX, IOV_COUNT_MAX, 1]


# ---- the reserve of free space ---------------------------------------------------------------------------------------

GIB = 1 << 30


class Disk:
    """A file system that counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.asked = 0
        monkeypatch.setattr(os, "fstatvfs", self.fstatvfs)

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        self.asked += 1
        return os.statvfs_result((4096, 4096, 1 << 40, 0, self.free_bytes // 4096, 0, 0, 0, 0, 255))


def test_reserve_asks_seldom_when_there_is_plenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    disk = Disk(monkeypatch, 100 * GIB)
    space = FreeSpace(10 * GIB, lambda: now)
    root = RootFolder(str(tmp_path), make=False)
    for _ in range(10):
        with space.reserved(root, GIB, "a"):
            pass
    assert disk.asked == 1
    now = FreeSpace.PERIOD_S + 0.001
    with space.reserved(root, 1, "a"):
        pass
    assert disk.asked == 2


def test_reserve_counts_its_own_writes_between_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk still says that all is free, as with delayed allocation; the clock stands still."""
    disk = Disk(monkeypatch, 20 * GIB)
    space = FreeSpace(10 * GIB, lambda: 0.0)
    root = RootFolder(str(tmp_path), make=False)
    for _ in range(9):
        with space.reserved(root, GIB, "a"):
            pass
    assert disk.asked == 1
    disk.free_bytes = 11 * GIB
    with space.reserved(root, GIB, "a"):
        pass
    assert disk.asked == 2, "near the reserve every put asks"
    disk.free_bytes = 10 * GIB + 4096
    with pytest.raises(StoreFullError), space.reserved(root, 4097, "a"):
        pytest.fail("reached into the reserve")
    with space.reserved(root, 4096, "a"):
        pass
    assert disk.asked == 4


def test_reserve_counts_blobs_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, 11 * GIB)
    space = FreeSpace(10 * GIB, lambda: 0.0)
    root = RootFolder(str(tmp_path), make=False)
    with space.reserved(root, GIB, "a"):
        with pytest.raises(StoreFullError) as caught, space.reserved(root, 4096, "b"):
            pytest.fail("reached into the reserve")
        assert caught.value.key == "b"
    with space.reserved(root, GIB, "b"):
        pass


def test_reserve_gives_back_what_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, 11 * GIB)
    space = FreeSpace(10 * GIB, lambda: 0.0)
    root = RootFolder(str(tmp_path), make=False)
    for _ in range(3):
        with pytest.raises(KeyError), space.reserved(root, GIB, "a"):
            raise KeyError
