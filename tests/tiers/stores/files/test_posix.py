"""``posix`` and the reserve of ``publish``: opening below a root, free space."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtiers.tiers.errors import StoreFullError
from kvtiers.tiers.stores.files.posix import OPEN_READ, RootFolder
from kvtiers.tiers.stores.files.publish import FreeSpace
from tests.leaks import open_fds


@pytest.mark.parametrize(
    "path", ["link", "folder-link/a", "f/up/a", "absolute/etc/passwd", "proc/self/root/etc/passwd"]
)
def test_root_folder_follows_no_links(tmp_path: Path, path: str) -> None:
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


def test_root_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RootFolder(str(tmp_path / "a" / "b"), make=False)
    root = RootFolder(str(tmp_path / "a" / "b"), make=True)
    assert not root.is_removed()
    (tmp_path / "a" / "b").rmdir()
    assert root.is_removed()
    with pytest.raises(FileNotFoundError):
        root.make_folder("f")


GIB = 1 << 30


def test_reserve_counts_puts_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_failed_put_returns_its_reserved_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_free(monkeypatch, 11 * GIB)
    space = FreeSpace(10 * GIB)
    root = RootFolder(str(tmp_path), make=False)
    for _ in range(3):
        with pytest.raises(KeyError), space.reserved(root, GIB, "a"):
            raise KeyError
