"""The header, in the last page of a region's file: the region's geometry, its creator and the processes that mapped it.

The header comes after the rows, so that the rows are page-aligned in the file as in memory. It has one seat per worker
and one for the scheduler. A seat holds its process's pid, for messages. A lock on the seat's first byte (fcntl(2), open
file description lock) shows that the process lives. The kernel releases the lock when the last descriptor of that open
file is closed, including descriptors passed to the tiers' worker processes or inherited by a forked child. A pid
cannot show this: in containers that share /dev/shm but not a PID namespace, the pid may belong to no process or to
another process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Self

from ...tiers.errors import ConfigError, RegionError

NUM_WORKERS_MAX = 495  # a header page of 4 KiB has 496 seats: one per worker and one for the scheduler

_MAGIC = b"KVTREGN\0"
_VERSION = 2  # version 1 used pids to detect dead processes
_BEGIN = struct.Struct("<8sI")  # magic, version: the same in every version
_FIXED = struct.Struct("<8sIIQQQQ")  # magic, version, num_workers, num_blocks, cpu_page_size, row_stride, creator's pid
_CHECKSUM = struct.Struct("<I")  # crc32 of the fixed part, right after it: detects a torn or foreign header
_SIZED = struct.Struct("<Q")
_SIZED_OFFSET = 120
_SEAT = struct.Struct("<Q")  # pid; 0 is free
_SEATS_OFFSET = 128
_CREATOR_OFFSET = 0
_FLOCK = struct.Struct("@hhqqi0q")  # fcntl's struct flock: type, whence, start, length, pid


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a region.

    Attributes:
        num_blocks: rows.
        cpu_page_size: bytes of one worker's cell in a row.
        num_workers: cells in a row.

    Raises:
        ConfigError: a value is out of range; the message names the field and the accepted range.
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
    """Header of a region's file.

    Attributes:
        row_stride: bytes of a row, as computed by the creator.
        creator: pid of the process that created the file, in that process's PID namespace.
        sized: whether all of the region's memory is allocated.
        seats: pids of the workers by rank, then of the scheduler; 0: the seat is free.
    """

    geometry: RegionGeometry
    row_stride: int
    creator: int
    sized: bool
    seats: tuple[int, ...]

    @classmethod
    def read(cls, fd: int, what: str) -> Self | None:
        """Read a file's header. None: the file has no valid kvtiers header.

        Args:
            what: the file's path, for messages.

        Raises:
            RegionError: the header has another version.
        """
        offset = os.fstat(fd).st_size - mmap.PAGESIZE
        page = os.pread(fd, mmap.PAGESIZE, offset) if offset >= 0 else b""
        if len(page) != mmap.PAGESIZE:
            return None
        magic, version = _BEGIN.unpack_from(page)
        if magic != _MAGIC:
            return None
        if version != _VERSION:
            raise RegionError(
                f"region {what} has a header of version {version}, this program knows {_VERSION}: if no engine of the "
                "other program's version is starting, remove the file; else choose another instance_id"
            )
        fixed = page[: _FIXED.size]
        if _CHECKSUM.unpack_from(page, _FIXED.size)[0] != zlib.crc32(fixed):
            return None
        _, _, num_workers, num_blocks, cpu_page_size, stride, creator = _FIXED.unpack(fixed)
        seats = page[_SEATS_OFFSET : _SEATS_OFFSET + _SEAT.size * (num_workers + 1)]
        return cls(
            RegionGeometry(num_blocks, cpu_page_size, num_workers),
            stride,
            creator,
            bool(_SIZED.unpack_from(page, _SIZED_OFFSET)[0]),
            tuple(pid for (pid,) in _SEAT.iter_unpack(seats)),
        )

    def is_stale(self, fd: int) -> bool:
        """Whether the start of this region's engine has failed: a process died, or its creator ended before sizing it.

        Args:
            fd: a descriptor locked with flock, which the creator holds until the file is sized. It must hold no byte
                locks, because a descriptor does not see its own locks.
        """
        end = self.geometry.size_bytes
        taken = [end + _seat_offset(seat) for seat, pid in enumerate(self.seats) if pid]
        return not self.sized or not all(_is_held(fd, offset) for offset in (end + _CREATOR_OFFSET, *taken))

    def is_creator_alive(self, fd: int) -> bool:
        """Whether the process that created the region is alive. ``fd`` as in ``is_stale``."""
        return _is_held(fd, self.geometry.size_bytes + _CREATOR_OFFSET)

    def check_geometry(self, wanted: RegionGeometry, what: str) -> None:
        """Check that the region has the wanted geometry.

        Raises:
            RegionError: it differs; the message names the first field that differs.
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
                    f"region {what} has {field} {value} (made by process {self.creator}), this process has "
                    f"{getattr(wanted, field)}: two configs for one region"
                )


def write_header(fd: int, geometry: RegionGeometry) -> None:
    """Set the file's size (all holes), write the header, and mark the creator alive while ``fd`` is open."""
    fixed = _FIXED.pack(
        _MAGIC,
        _VERSION,
        geometry.num_workers,
        geometry.num_blocks,
        geometry.cpu_page_size,
        geometry.row_stride,
        os.getpid(),
    )
    os.ftruncate(fd, geometry.size_bytes + mmap.PAGESIZE)
    _hold(fd, geometry.size_bytes + _CREATOR_OFFSET)
    os.pwrite(fd, fixed + _CHECKSUM.pack(zlib.crc32(fixed)), geometry.size_bytes)


def mark_sized(fd: int, geometry: RegionGeometry) -> None:
    """Record that every page is allocated."""
    os.pwrite(fd, _SIZED.pack(1), geometry.size_bytes + _SIZED_OFFSET)


def write_seat(fd: int, geometry: RegionGeometry, seat: int) -> None:
    """Record that this process has mapped the file, and mark it alive while ``fd`` is open."""
    offset = geometry.size_bytes + _seat_offset(seat)
    _hold(fd, offset)  # lock before writing the pid: a taken seat without a lock means a dead process
    os.pwrite(fd, _SEAT.pack(os.getpid()), offset)


def _seat_offset(seat: int) -> int:
    return _SEATS_OFFSET + seat * _SEAT.size


def _hold(fd: int, offset: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))


def _is_held(fd: int, offset: int) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
