"""SharedOffloadRegion: the CPU memory that every worker and the scheduler of one engine map.

``region_file`` describes how the processes of an engine create and join one file.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError, RegionError
from ...tiers.plain_logs import get_logger
from ...tiers.processes import occupy_standard_streams
from .region_file import (
    allocate_anonymous,
    join_named,
    pieces,
    region_path,
    remove_name,
    take_seat,
)
from .region_header import RegionGeometry, RegionHeader

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


class SharedOffloadRegion:
    """One mapping of (num_blocks, row_stride) bytes.

    The row of a block has one cell per worker, in rank order. Each cell has ``cpu_page_size`` bytes and holds the
    worker's canonical tensors one after another. One thread at a time may call the methods; any thread may use views.

    Args:
        instance_id: id shared by all processes of the engine and by no other engine. None: see ``anonymous``.
        num_blocks: rows, 1 or more.
        cpu_page_size: bytes of one worker's cell, 1 or more.
        num_workers: 1..495.
        rank: rank of the worker, or None for the scheduler.
        directory: a tmpfs.
        join_timeout_s: how long to wait for the first process, which allocates all of the memory (0.2 to 1 GB/s).
        clock, sleep: monotonic time in seconds, and a function that sleeps.

    Attributes:
        geometry: the region's shape.

    Raises:
        ConfigError: an argument is not accepted; the message names it.
        RegionError: too little memory, a different geometry under this id, a taken rank, a timeout, or a foreign file.
    """

    def __init__(
        self,
        instance_id: str | None,
        num_blocks: int,
        cpu_page_size: int,
        num_workers: int,
        rank: int | None,
        *,
        directory: str = "/dev/shm",
        join_timeout_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        started_at = clock()
        self.geometry = RegionGeometry(num_blocks, cpu_page_size, num_workers)
        if rank is not None and not 0 <= rank < num_workers:
            raise ConfigError(f"{rank} is not accepted; write 0..{num_workers - 1} or None", field="rank")
        self._rank = rank
        self._cell_used = 0
        self._path = None if instance_id is None else region_path(directory, instance_id)
        seat = num_workers if rank is None else rank
        what = self._path or "(anonymous)"
        try:
            occupy_standard_streams()
            if self._path is not None:
                self._fd = join_named(
                    self._path, self.geometry, seat, timeout_s=join_timeout_s, clock=clock, sleep=sleep
                )
            else:
                self._fd = allocate_anonymous(self.geometry)
            try:
                self._mmap: mmap.mmap | None = mmap.mmap(self._fd, self.geometry.size_bytes)
                if self._path is not None:
                    take_seat(self._fd, self._path, seat)
            except BaseException:
                self._close()
                raise
        except OSError as e:
            raise RegionError(f"region {what}: {e.strerror}") from e
        _populate(self._mmap, self.geometry.size_bytes)
        logger.info(
            "region %s: %d blocks of %d bytes (%s) ready in %.2f s",
            what,
            num_blocks,
            self.geometry.row_stride,
            human_bytes(self.geometry.size_bytes),
            clock() - started_at,
        )

    @classmethod
    def anonymous(cls, num_blocks: int, cpu_page_size: int) -> SharedOffloadRegion:
        """Create a region without a name, for one worker: a memfd sealed against resizing.

        Raises:
            ConfigError: an argument is not accepted; the message names it.
            RegionError: too little memory.
        """
        return cls(None, num_blocks, cpu_page_size, num_workers=1, rank=0)

    @property
    def fd(self) -> int:
        """Descriptor of the region, open until ``cleanup``."""
        self._mapping()
        return self._fd

    def absent_workers(self) -> list[int]:
        """Ranks that have not mapped this named region yet. A worker on another host maps that host's region instead.

        Raises:
            RegionError: the region was cleaned up.
        """
        self._mapping()
        assert self._path is not None, "an anonymous region has no seats"
        header = RegionHeader.read(self._fd, self._path)
        assert header is not None
        return [rank for rank, pid in enumerate(header.seats[: header.geometry.num_workers]) if not pid]

    def create_kv_memoryview(self) -> memoryview:
        """View of the whole region: shape (num_blocks, row_stride), format "b", C-contiguous, writable. Not a copy.

        Python does not support ``view[b]`` on a 2-D view: cast it to 1-D and slice at ``b * row_stride``.
        """
        return memoryview(self._mapping()).cast("b", (self.geometry.num_blocks, self.geometry.row_stride))

    def create_next_view(self, tensor_page_size: int) -> torch.Tensor:
        """View of this worker's cells for its next canonical tensor. Call it once per tensor, in order.

        Returns:
            int8 (num_blocks, tensor_page_size), stride (row_stride, 1), on the region's memory.

        Raises:
            RegionError: the tensors exceed the cell, or this is the scheduler.
        """
        import torch  # imported here because the scheduler and the tiers never need it

        geometry = self.geometry
        if self._rank is None:
            raise RegionError("the scheduler (rank None) has no cell; only workers have tensors")
        if tensor_page_size < 1 or self._cell_used + tensor_page_size > geometry.cpu_page_size:
            raise RegionError(
                f"tensor_page_size {tensor_page_size} does not fit: {self._cell_used} of the cell's "
                f"{geometry.cpu_page_size} bytes are used"
            )
        # torch keeps its buffer object alive but does not keep it exported. Only a memoryview prevents the unmapping.
        flat = torch.frombuffer(memoryview(self._mapping()), dtype=torch.int8)
        offset = self._rank * geometry.cpu_page_size + self._cell_used
        self._cell_used += tensor_page_size
        return flat.as_strided((geometry.num_blocks, tensor_page_size), (geometry.row_stride, 1), offset)

    def cleanup(self) -> None:
        """Remove the name if it is still there, unmap and close. Idempotent.

        While views are alive, their memory stays mapped; it is freed with the last view.
        """
        if self._mmap is None:
            return
        mapping, self._mmap = self._mmap, None
        try:
            mapping.close()
        except BufferError:
            logger.debug("region: views are still alive; its memory is freed with the last of them")
        self._close()

    def _close(self) -> None:
        if self._path is not None:
            remove_name(self._fd, self._path)
        os.close(self._fd)

    def _mapping(self) -> mmap.mmap:
        if self._mmap is None:
            raise RegionError("the region was cleaned up")
        return self._mmap


def _populate(mapping: mmap.mmap, size_bytes: int) -> None:
    """Map every page now, so that page faults do not slow down the first transfers."""
    for start, length in pieces(size_bytes):
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError:  # an older kernel
            return
