"""The last page of a region's file: what the region is, who made it, and who has mapped it.

Behind the rows, so that they are page-aligned in the file as in memory. A process is its pid and its start time, which
together name one process for good; a seat is one a worker, and one for the scheduler.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Self

from tiers.errors import ConfigError, RegionError

NUM_WORKERS_MAX = 247  # seats (workers and scheduler) that fit in a header page of 4 KiB

_MAGIC = b"KVTREGN\0"
_VERSION = 1
_FIXED = struct.Struct("<8sIIQQQQQ")  # magic, version, num_workers, num_blocks, cpu_page_size, row_stride, pid, start
_CHECKSUM = struct.Struct("<I")  # crc32 of the fixed part, right after it: a torn or foreign header is none
_SIZED = struct.Struct("<Q")
_SIZED_OFFSET = 120
_SEAT = struct.Struct("<QQ")  # pid, start time in clock ticks since boot; (0, 0) is free
_SEATS_OFFSET = 128


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a region.

    Attributes:
        num_blocks: rows.
        cpu_page_size: bytes of one worker's cell in a row.
        num_workers: cells in a row.

    Raises:
        ConfigError: names the field and what is accepted.
    """

    num_blocks: int
    cpu_page_size: int
    num_workers: int

    def __post_init__(self) -> None:
        for field, largest in (("num_blocks", 1 << 40), ("cpu_page_size", 1 << 40), ("num_workers", NUM_WORKERS_MAX)):
            value: object = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                raise ConfigError(f"{value!r} is not accepted; write an integer in 1..{largest}", field=field)
        if self.size_bytes >= 1 << 62:
            raise ConfigError(f"{self.num_blocks} rows of {self.row_stride} bytes exceed 2**62", field="num_blocks")

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next: all cells, rounded up to pages."""
        return row_stride(self.cpu_page_size, self.num_workers)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_blocks * self.row_stride


def row_stride(cpu_page_size: int, num_workers: int) -> int:
    """Bytes of one row: ``num_workers`` cells, rounded up to the page size."""
    return -(-cpu_page_size * num_workers // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """What a region's file says of itself.

    Attributes:
        row_stride: as its maker counted it.
        creator: pid and start time of the process that made it.
        sized: all its memory is allocated.
        seats: of each worker, then of the scheduler; pid 0 is free.
    """

    geometry: RegionGeometry
    row_stride: int
    creator: tuple[int, int]
    sized: bool
    seats: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, fd: int) -> Self | None:
        """None: no header of ours.

        Raises:
            RegionError: another version's header.
        """
        offset = os.fstat(fd).st_size - mmap.PAGESIZE
        page = os.pread(fd, mmap.PAGESIZE, offset) if offset >= 0 else b""
        if len(page) != mmap.PAGESIZE:
            return None
        fixed = page[: _FIXED.size]
        magic, version, num_workers, num_blocks, cpu_page_size, stride, pid, start = _FIXED.unpack(fixed)
        if magic != _MAGIC or _CHECKSUM.unpack_from(page, _FIXED.size)[0] != zlib.crc32(fixed):
            return None
        if version != _VERSION:
            raise RegionError(f"region header has version {version}, this program knows {_VERSION}")
        return cls(
            RegionGeometry(num_blocks, cpu_page_size, num_workers),
            stride,
            (pid, start),
            bool(_SIZED.unpack_from(page, _SIZED_OFFSET)[0]),
            tuple(_SEAT.iter_unpack(page[_SEATS_OFFSET : _SEATS_OFFSET + _SEAT.size * (num_workers + 1)])),
        )

    def is_stale(self) -> bool:
        """Whether the start of this engine has failed. Under the lock only, where "not sized" says so too."""
        taken = [seat for seat in self.seats if seat[0]]
        return not self.sized or not all(_is_alive(*process) for process in (self.creator, *taken))

    def is_creator_alive(self) -> bool:
        """Whether the process that made the region runs."""
        return _is_alive(*self.creator)

    def check_geometry(self, wanted: RegionGeometry, what: str) -> None:
        """Check that it is the region we want.

        Raises:
            RegionError: it is not; names the first field that differs.
        """
        theirs = {
            "num_workers": self.geometry.num_workers,
            "cpu_page_size": self.geometry.cpu_page_size,
            "num_blocks": self.geometry.num_blocks,
            "row_stride": self.row_stride,
        }
        for field, value in theirs.items():
            if value != getattr(wanted, field):
                raise RegionError(
                    f"region {what} has {field} {value} (made by process {self.creator[0]}), this process has "
                    f"{getattr(wanted, field)}: two configs for one region"
                )


def write_header(fd: int, geometry: RegionGeometry) -> None:
    """Give the file its size, all holes, and its header."""
    fixed = _FIXED.pack(
        _MAGIC,
        _VERSION,
        geometry.num_workers,
        geometry.num_blocks,
        geometry.cpu_page_size,
        geometry.row_stride,
        *_this_process(),
    )
    os.ftruncate(fd, geometry.size_bytes + mmap.PAGESIZE)
    os.pwrite(fd, fixed + _CHECKSUM.pack(zlib.crc32(fixed)), geometry.size_bytes)


def mark_sized(fd: int, geometry: RegionGeometry) -> None:
    """Say that every page is allocated."""
    os.pwrite(fd, _SIZED.pack(1), geometry.size_bytes + _SIZED_OFFSET)


def write_seat(fd: int, geometry: RegionGeometry, seat: int) -> None:
    """Say that this process has mapped the file."""
    os.pwrite(fd, _SEAT.pack(*_this_process()), geometry.size_bytes + _SEATS_OFFSET + seat * _SEAT.size)


def _this_process() -> tuple[int, int]:
    pid = os.getpid()
    start = _start_ticks(pid)
    if start is None:
        raise RegionError("/proc is not mounted: a region tells living processes from dead ones by it")
    return pid, start


def _is_alive(pid: int, start_ticks: int) -> bool:
    return _start_ticks(pid) == start_ticks


def _start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot. With the pid it names a process for good."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
