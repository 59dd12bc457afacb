"""Moves a blob's parts between memory and a file descriptor: all parts in few vectored calls, or piece by piece.

System calls go through the module-level name ``os``, as in ``posix``, so that tests can replace it. Functions raise
OSError unless their docstring says otherwise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence

from ..errors import BlobCorruptError
from ..store import Look, parts_size

IOV_COUNT_MAX = 1024  # Linux's UIO_MAXIOV: a vectored call with more buffers fails with EINVAL
READ_PIECE_BYTES = 1 << 20  # about the size of a core's cache; with smaller pieces, reads lose more than checksums gain
# A page cache folio is at most 2 MiB, and no larger than the write that fills it. Measured on ext4: with pieces of
# 1 MiB or less, every fourth run of writes took ten times as long.
WRITE_PIECE_BYTES = 2 << 20
RUN_SLACK_BYTES = 64 << 10  # a small piece shares a call with its neighbor


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    parts: Sequence[memoryview],
    offset: int = 0,
) -> int:
    """Move all parts, and continue after each partial transfer.

    Args:
        call: ``os.preadv``, ``os.pwritev`` or an equivalent for a socket.

    Returns:
        Bytes moved. This is less than the size of the parts only if a call moved 0 bytes: the end of a file or stream.
    """
    size = parts_size(parts)
    done = 0
    while done < size:
        moved = call(fd, parts[:IOV_COUNT_MAX], offset + done)
        if moved == 0:
            break
        done += moved
        if done < size:
            parts = _rest(parts, moved)
    return done


def _rest(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """The parts without their first ``done`` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part.cast("B")[done:], *parts[i + 1 :]]
        done -= part.nbytes
    return []


def runs(parts: Sequence[memoryview], piece_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut the parts into pieces and group them into runs, one run for each call. Yields (offset of the run, pieces)."""
    run: list[memoryview] = []
    run_at = size = 0
    for part in parts:
        flat = part.cast("B")
        for start in range(0, flat.nbytes, piece_bytes):
            piece = flat[start : start + piece_bytes]
            if size + piece.nbytes > piece_bytes + RUN_SLACK_BYTES:
                yield run_at, run
                run_at, run, size = run_at + size, [], 0
            run.append(piece)
            size += piece.nbytes
    yield run_at, run


def look_at(look: Look, offset: int, run: Sequence[memoryview]) -> None:
    """Call ``look`` for each piece of a run."""
    for piece in run:
        look(offset, piece)
        offset += piece.nbytes


def write_all(fd: int, parts: Sequence[memoryview], look: Look | None = None) -> None:
    """Write the parts to the start of an empty file. ``look``: see ``tiers.store.SupportsPieces``."""
    size = parts_size(parts)
    written = 0
    if look is None:
        written = transfer(os.pwritev, fd, parts)
    else:
        for offset, run in runs(parts, WRITE_PIECE_BYTES):
            look_at(look, offset, run)
            written += transfer(os.pwritev, fd, run, offset)
    if written != size:
        raise OSError(errno.EIO, "a write call wrote nothing")


def read_all(fd: int, parts: Sequence[memoryview], key: str, look: Look | None, size: int) -> None:
    """Fill the parts, ``size`` bytes in total, from the start of a file. ``look``: see ``tiers.store.SupportsPieces``.

    Raises:
        BlobCorruptError: the file ends before ``size`` bytes.
    """
    filled = 0
    if look is None:
        filled = transfer(os.preadv, fd, parts)
    else:
        for offset, run in runs(parts, READ_PIECE_BYTES):
            filled += transfer(os.preadv, fd, run, offset)
            look_at(look, offset, run)
    if filled != size:
        raise BlobCorruptError("the file was truncated while it was being read", key=key)
