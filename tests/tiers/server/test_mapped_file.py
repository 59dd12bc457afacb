"""MappedRegion: the file behind a region is found, whatever it is, and looking for it harms nothing."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvtiers.tiers.errors import RegionError
from kvtiers.tiers.server.mapped_file import MappedRegion


def test_region_maps_memfds_and_files_from_inside_a_page(tmp_path: Path) -> None:
    fd = os.memfd_create("r", os.MFD_CLOEXEC)
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    (tmp_path / "file").write_bytes(bytes(3 * mmap.PAGESIZE))
    file_fd = os.open(tmp_path / "file", os.O_RDWR)
    for kind, mapping in (
        ("memfd", mmap.mmap(fd, 2 * mmap.PAGESIZE, offset=mmap.PAGESIZE)),
        ("file", mmap.mmap(file_fd, 3 * mmap.PAGESIZE)),
    ):
        view = memoryview(mapping)[100:]
        try:
            region = MappedRegion(view)
        except RegionError:
            if kind != "file":  # overlayfs and btrfs show another device in /proc/self/maps than fstat does
                raise
            continue
        view[:5] = b"hello"
        assert region.length == len(view)
        assert os.pread(region.fd, 5, region.offset) == b"hello"
        region.close()
        region.close()
    os.close(fd)
    os.close(file_fd)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (memoryview(bytearray(100)), "not a shared mapping"),
        (memoryview(bytes(100)), "read-only"),
        (memoryview(bytearray()), "empty"),
    ],
    ids=["private", "read-only", "empty"],
)
def test_private_read_only_or_empty_memory_is_refused_as_a_region(view: memoryview, why: str) -> None:
    with pytest.raises(RegionError, match=why):
        MappedRegion(view)


def test_search_for_the_regions_file_keeps_file_locks_of_the_process(tmp_path: Path) -> None:
    probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    fd = os.memfd_create("r", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    nameless = mmap.mmap(-1, mmap.PAGESIZE)  # shared memory without a name or descriptor: all of them are looked at
    with (tmp_path / "lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for mapping in (mmap.mmap(fd, mmap.PAGESIZE), nameless):
            with suppress(RegionError):  # it takes a capability
                MappedRegion(memoryview(mapping)).close()
            done = subprocess.run([sys.executable, "-c", probe, file.name], stderr=subprocess.PIPE, check=False)
            assert b"BlockingIOError" in done.stderr
    os.close(fd)
