"""``posix``, ``vectored_io`` and the reserve of ``publish``: opening below a root, parts, free space."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.errors import StoreFullError
from kvtiers.tiers.stores.files.posix import OPEN_FOLDER, OPEN_READ, RootFolder
from kvtiers.tiers.stores.files.publish import FreeSpace
from kvtiers.tiers.stores.vectored_io import transfer
from tests.leaks import open_fds

# ---- opening below a folder ------------------------------------------------------------------------------------------


def test_opens_what_is_below(tmp_path: Path) -> None:
    (tmp_path / "f" / "é").mkdir(parents=True)
    (tmp_path / "f" / "é" / "a").write_bytes(b"1")
    root = RootFolder(str(tmp_path), make=False)
    for path in ("f/é/a", ".", "f", "f/é"):
        fd = root.open(path, OPEN_READ if path.endswith("a") else OPEN_FOLDER)
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path / path))
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize(
    "path", ["link", "folder-link/a", "f/up/a", "absolute/etc/passwd", "proc/self/root/etc/passwd"]
)
def test_follows_no_link(tmp_path: Path, path: str) -> None:
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
        root.open(path, OPEN_READ)
    assert open_fds() <= fds


def test_missing_and_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    root = RootFolder(str(tmp_path), make=False)
    for path in ("b", "b/c", "b/c/d"):
        with pytest.raises(FileNotFoundError):
            root.open(path, OPEN_READ)
    with pytest.raises(NotADirectoryError):
        root.open("a/b", OPEN_READ)


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


# ---- the reserve of free space ---------------------------------------------------------------------------------------

GIB = 1 << 30


def test_reserve_counts_blobs_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk still says that all is free, as with delayed allocation."""
    have_free(monkeypatch, 11 * GIB)
    space = FreeSpace(10 * GIB)
    root = RootFolder(str(tmp_path), make=False)
    with space.reserved(root, GIB, "a"):
        with pytest.raises(StoreFullError) as caught, space.reserved(root, 1, "b"):
            pytest.fail("reached into the reserve")
        assert caught.value.key == "b"
    with space.reserved(root, GIB, "b"):
        pass


def have_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    status = os.statvfs_result((4096, 4096, 1 << 40, 0, free_bytes // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: status)


def test_reserve_gives_back_what_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_free(monkeypatch, 11 * GIB)
    space = FreeSpace(10 * GIB)
    root = RootFolder(str(tmp_path), make=False)
    for _ in range(3):
        with pytest.raises(KeyError), space.reserved(root, GIB, "a"):
            raise KeyError
