"""Moving the parts of a blob between memory and a descriptor, whole, in few calls, or piece by piece.

System calls go through the module's name ``os``, as in ``posix``; functions raise OSError, unless they say
otherwise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence

from kvtiers.tiers.errors import BlobCorruptError
from kvtiers.tiers.store import Look, parts_size

IOV_COUNT_MAX = 1024  # Linux' UIO_MAXIOV: more buffers in one vectored call are EINVAL
READ_PIECE_BYTES = 1 << 20  # about a core's own cache; with less the read loses more than the checksum gains
# A file system makes page cache folios no larger than the write that fills them, and 2 MiB at most. Measured on ext4:
# in pieces of 1 MiB or less every fourth run of writes took ten times as long.
WRITE_PIECE_BYTES = 2 << 20
RUN_SLACK_BYTES = 64 << 10  # what is small goes with its neighbour, in one call


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    parts: Sequence[memoryview],
    offset: int = 0,
    size: int | None = None,
) -> int:
    """Move all parts with ``os.preadv``, ``os.pwritev`` or their like for a socket, however often a call stops short.

    Args:
        size: of the parts, where it is known.

    Returns:
        Bytes moved: fewer than the parts have only where a call moved none, which is the end of a file or stream.
    """
    size = parts_size(parts) if size is None else size
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
    """What is left of the parts behind their first ``done`` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part.cast("B")[done:], *parts[i + 1 :]]
        done -= part.nbytes
    return []


def runs(parts: Sequence[memoryview], piece_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The parts cut into pieces, as many together as one call should move, with the offset of the first."""
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
    """Have a run's pieces looked at."""
    for piece in run:
        look(offset, piece)
        offset += piece.nbytes


def write_all(fd: int, parts: Sequence[memoryview], look: Look | None = None) -> None:
    """Write the parts to the start of an empty file. ``look``: see ``tiers.store.SupportsPieces``."""
    size = parts_size(parts)
    written = 0
    if look is None:
        written = transfer(os.pwritev, fd, parts, size=size)
    else:
        for offset, run in runs(parts, WRITE_PIECE_BYTES):
            look_at(look, offset, run)
            written += transfer(os.pwritev, fd, run, offset)
    if written != size:
        raise OSError(errno.EIO, "a write call wrote nothing")


def read_all(fd: int, parts: Sequence[memoryview], key: str, look: Look | None, size: int) -> None:
    """Fill the parts, which have so many bytes, from the start of a file. ``look``: see ``tiers.store.SupportsPieces``.

    Raises:
        BlobCorruptError: it ends before.
    """
    filled = 0
    if look is None:
        filled = transfer(os.preadv, fd, parts, size=size)
    else:
        for offset, run in runs(parts, READ_PIECE_BYTES):
            filled += transfer(os.preadv, fd, run, offset)
            look_at(look, offset, run)
    if filled != size:
        raise BlobCorruptError("it was cut while it was read", key=key)
