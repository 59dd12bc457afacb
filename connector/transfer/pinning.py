"""Page-locks host memory for a GPU, in bounded pieces: large single registrations fail on some drivers."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...tiers.plain_logs import get_logger
from .cuda_driver import CudaDriverError
from .transfer_plan import Int64s

logger = get_logger(__name__)

_OUT_OF_MEMORY_ADVICE = (
    " Raise the locked-memory limit (ulimit -l; in a container --ulimit memlock=-1) or make the region smaller."
)


class HostRegistry(Protocol):
    """The driver calls that pinning needs; see ``CudaDriver``."""

    def host_register(self, address: int, nbytes: int) -> None: ...

    def host_unregister(self, address: int) -> None: ...

    def device_address(self, address: int) -> int: ...


def pieces_of(address: int, nbytes: int, row_bytes: int, piece_bytes_max: int) -> list[tuple[int, int]]:
    """Split memory into pieces (address, bytes) that cover whole pages. Every row is inside one piece.

    Args:
        address, nbytes: the memory, from the first byte of the first row to the last byte of the last row; rows are
            ``row_bytes`` apart.
        piece_bytes_max: largest size of a piece; a larger row is a piece of its own. If rows are not separated by page
            boundaries, all rows are one piece.
    """
    page = mmap.PAGESIZE
    start, end = address // page * page, -(-(address + nbytes) // page) * page
    used_bytes = (nbytes - 1) % row_bytes + 1
    separate = row_bytes % page == 0 and address % page + used_bytes <= row_bytes
    step = max(1, piece_bytes_max // row_bytes) * row_bytes if separate else end - start
    return [(at, min(step, end - at)) for at in range(start, end, step)]


class PinnedMemory:
    """Registered pieces of host memory, held until the last user releases them.

    The calling thread must have the device's context, both here and in ``release``.

    Attributes:
        pinned: whether all pieces are registered. False: none is, and the reason was logged.
        mapped: whether a kernel may use host addresses unchanged.
        cuts: ascending addresses that no single copy may cross.
    """

    def __init__(
        self,
        driver: HostRegistry,
        pieces: Sequence[tuple[int, int]],
        *,
        users: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._users = users
        self._registered: list[int] = []
        self.pinned = self.mapped = False
        started = clock()
        total_bytes = sum(nbytes for _, nbytes in pieces)
        try:
            for address, nbytes in pieces:
                driver.host_register(address, nbytes)
                self._registered.append(address)
            self.mapped = all(driver.device_address(address) == address for address, _ in pieces)
            self.pinned = True
            logger.info(
                "pinned %.2f GiB of the region in %d pieces in %.2f s",
                total_bytes / 2**30,
                len(pieces),
                clock() - started,
            )
        except CudaDriverError as error:
            self._unregister()
            logger.warning(
                "cannot pin %.2f GiB of the region: %s. Copies go on unpinned, which is several times slower.%s",
                total_bytes / 2**30,
                error,
                _OUT_OF_MEMORY_ADVICE if "CUDA_ERROR_OUT_OF_MEMORY" in str(error) else "",
            )
        self.cuts: Int64s = np.array(self._registered, np.int64)

    def release(self) -> None:
        """Release the memory for one user. The last call unregisters it."""
        self._users -= 1
        if self._users == 0:
            self._unregister()

    def _unregister(self) -> None:
        for address in self._registered:
            try:
                self._driver.host_unregister(address)
            except CudaDriverError as error:
                logger.warning("cannot unpin memory at %#x: %s", address, error)
        self._registered = []
