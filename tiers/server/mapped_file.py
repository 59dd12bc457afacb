"""MappedRegion: finds the file behind a memory region that other code (vLLM, a test) has mapped.

Other processes can then map the same file.

``/proc/self/maps`` shows the device and inode of a mapping's file. The file is opened, in this order, through a
descriptor that this process already has (a memfd, or a file whose name was removed), by its name, or through
``/proc/self/map_files`` (which requires CAP_CHECKPOINT_RESTORE).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import RegionError
from ..processes import occupy_standard_streams


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    shared: bool
    offset: int
    device: int
    inode: int
    path: str


class MappedRegion:
    """A region's place in the file behind it.

    Args:
        view: the region, C-contiguous, of any shape.

    Attributes:
        fd: descriptor of the file, owned by this object; -1: closed.
        offset, length: place of the region in the file, in bytes.

    Raises:
        RegionError: the region is not a writable mapping of a single file, or the file cannot be opened.
        OSError: raised by the kernel.
    """

    def __init__(self, view: memoryview) -> None:
        occupy_standard_streams()
        self.length = view.nbytes
        self.fd, self.offset = _open_mapped_file(view.cast("B"))

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open_mapped_file(region: memoryview) -> tuple[int, int]:
    """Open the file behind a region: a descriptor, and the offset of the region's first byte in the file."""
    length = region.nbytes
    if region.readonly or not length:  # Python cannot tell the address of such a region
        raise RegionError("the region is empty or read-only")
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    mappings = [m for m in _mappings() if m.start < address + length and m.end > address]
    if not mappings or mappings[0].start > address or mappings[-1].end < address + length:
        raise RegionError("/proc/self/maps does not show the region")
    first = mappings[0]
    for mapping in mappings:
        if not mapping.shared or not mapping.inode:
            raise RegionError("the region is not a shared mapping of a file, so other processes cannot map it")
        # The kernel splits a mapping if its parts were given different advice (madvise) or memory policies.
        same = (mapping.device, mapping.inode) == (first.device, first.inode)
        if not same or mapping.offset - first.offset != mapping.start - first.start:
            raise RegionError("the region is made of several files")
    fd = _open(first)
    offset = first.offset + address - first.start
    try:
        before = offset % mmap.ALLOCATIONGRANULARITY
        mmap.mmap(fd, before + length, offset=offset - before).close()
    except (OSError, ValueError) as e:
        os.close(fd)
        raise RegionError(f"the region's file cannot be mapped a second time: {e}") from e
    return fd, offset


def _mappings() -> Iterator[_Mapping]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            # 7f00-7f80 rw-s 00000000 00:01 1029 /memfd:kvtiers-region (deleted)
            span, flags, offset, device, inode, *rest = line.rstrip("\n").split(maxsplit=5)
            start, end = (int(number, 16) for number in span.split("-"))
            major, minor = (int(number, 16) for number in device.split(":"))
            path = rest[0] if rest else ""
            yield _Mapping(start, end, "s" in flags, int(offset, 16), os.makedev(major, minor), int(inode), path)


def _open(mapping: _Mapping) -> int:
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    names = [mapping.path, f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}"]
    for path in (*descriptors, *names):
        try:
            # Check before opening: closing any descriptor of a file drops all POSIX locks of this process on the file.
            if not _is_file_of(mapping, os.stat(path)):
                continue
            if path in names:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            else:
                fd = os.dup(int(path.rpartition("/")[2]))
        except OSError:  # the descriptor was closed meanwhile, the name does not exist, or permission is missing
            continue
        if _is_file_of(mapping, os.fstat(fd)) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
            return fd
        os.close(fd)
    raise RegionError(f"the region's file {mapping.path!r} cannot be opened again")


def _is_file_of(mapping: _Mapping, status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == (mapping.device, mapping.inode)
