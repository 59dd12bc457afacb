"""The file behind a SharedOffloadRegion, and the protocol by which an engine's processes create and join it.

File layout: ``num_blocks`` rows of ``row_stride`` bytes from offset 0, then one header page. The header comes last so
that rows are page-aligned at ``block * row_stride``, in the file as in memory.

Every step happens under an exclusive flock on the file, which the kernel releases when its holder dies:

1. The first process creates a file without a name (O_TMPFILE, 0600), writes the header (geometry, its pid), locks the
   file and links it to its name. Like O_EXCL, linkat fails if the name exists, even as a symlink. So a region never has
   a name before it has a header.
2. It allocates every page with fallocate and marks the header as sized. So too little memory is an error here and not
   a SIGBUS later.
3. Each process, including the first, maps the file, locks its seat for as long as it has the file open, and writes its
   pid there. There is one seat per worker and one for the scheduler. The process that takes the last seat removes the
   name. From then on nothing stays in /dev/shm, whichever process dies.
4. A region that still has its name belongs to an engine that is starting. If one of its processes is dead (its seat is
   taken but not locked), that start has failed. The next start removes the file and begins again. This also works
   across containers that share /dev/shm.

So every engine needs an ``instance_id`` of its own. If two engines start with the same id at the same time, an engine
that finds a seat taken gets a RegionError. But if their processes alternate and take different seats, each engine's
scheduler may end up with the other engine's worker, and neither engine can detect this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator

from ...tiers.config.values import human_bytes
from ...tiers.errors import ConfigError, RegionError
from ...tiers.plain_logs import get_logger
from .region_header import RegionGeometry, RegionHeader, mark_sized, write_header, write_seat

logger = get_logger(__name__)

FILE_PREFIX = "vllm_offload_"
FILE_SUFFIX = ".mmap"

_INSTANCE_ID = re.compile(r"[^\x00-\x1f\x7f/]+")
_INSTANCE_ID_BYTES_MAX = 255 - len(FILE_PREFIX) - len(FILE_SUFFIX)

# Long calls work in pieces: a signal makes fallocate undo the current piece, and madvise holds the GIL for one piece.
_PIECE_BYTES = 256 << 20
_POLL_S = 0.005
_REMOVE_TRIES = 10


def region_path(directory: str, instance_id: str) -> str:
    """Path of an engine's region file.

    Raises:
        ConfigError: ``instance_id`` cannot be part of a file name.
    """
    name = f"{FILE_PREFIX}{instance_id}{FILE_SUFFIX}"
    if _INSTANCE_ID.fullmatch(instance_id) is None or len(name.encode(errors="surrogatepass")) > 255:
        raise ConfigError(
            f"{instance_id!r} is not accepted; write 1 to {_INSTANCE_ID_BYTES_MAX} bytes without '/' and control "
            "characters",
            field="instance_id",
        )
    return os.path.join(directory, name)


def reap_stale_regions(directory: str = "/dev/shm") -> list[str]:
    """Remove region files of engines that died while starting. Returns their paths.

    Files of other users, of running processes and of other programs stay.
    """
    reaped = []
    for name in sorted(os.listdir(directory)):
        if not (name.startswith(FILE_PREFIX) and name.endswith(FILE_SUFFIX)):
            continue
        path = os.path.join(directory, name)
        try:
            fd = _open_existing(path)
        except (OSError, RegionError):
            continue
        try:
            header = RegionHeader.read(fd, path) if _try_lock(fd) else None
            if header is not None and header.is_stale(fd) and _unlink_if_same(path, fd):
                reaped.append(path)
        except (OSError, RegionError):  # unreadable, or of another kvtiers version, which has to remove it itself
            continue
        finally:
            os.close(fd)
    return reaped


def running_regions(directory: str = "/dev/shm", *, proc: str = "/proc") -> list[RegionHeader]:
    """Headers of the regions in ``directory`` that living engines have mapped, whether or not they have a name.

    Sees only processes that this process may inspect: those of the same user and PID namespace, or all for root.
    """
    found: dict[int, RegionHeader] = {}
    device = os.stat(directory).st_dev
    for pid in filter(str.isdecimal, os.listdir(proc)):
        with contextlib.suppress(OSError), os.scandir(os.path.join(proc, pid, "fd")) as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError, RegionError):  # the file was closed, or has another version's header
                    # Not by its name: the process that created the file knows it by its number.
                    if not os.readlink(descriptor.path).startswith(f"{directory}/"):
                        continue
                    fd = os.open(descriptor.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    try:
                        status = os.fstat(fd)
                        header = RegionHeader.read(fd, descriptor.path) if status.st_dev == device else None
                    finally:
                        os.close(fd)
                    if header is not None and header.sized:
                        found[status.st_ino] = header
    return list(found.values())


def allocate_anonymous(geometry: RegionGeometry) -> int:
    """Create a memfd of this geometry, sealed against resizing.

    Raises:
        RegionError: too little memory.
    """
    fd = os.memfd_create("kvtiers-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_header(fd, geometry)
        _allocate(fd, geometry, "")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def join_named(
    path: str,
    geometry: RegionGeometry,
    seat: int,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Create the file, or join it (steps 1 and 2).

    Returns:
        A descriptor of the sized, locked file. Map it, then call ``take_seat`` or ``remove_name``.

    Raises:
        RegionError: too little memory, a different geometry, a taken seat, a timeout, or a foreign file.
    """
    deadline = clock() + timeout_s
    while True:
        fd = _create(path, geometry)
        if fd is not None:
            return fd
        try:
            fd = _open_existing(path)
        except FileNotFoundError:
            continue
        try:
            while not _try_lock(fd):
                # Another process allocates or joins. A geometry mismatch is reported without waiting for it.
                header = RegionHeader.read(fd, path)
                if header is not None and header.is_creator_alive(fd):
                    header.check_geometry(geometry, path)
                if clock() >= deadline:
                    raise RegionError(f"region {path}: waited {timeout_s:g} s for process {header and header.creator}")
                sleep(_POLL_S)
            if _is_joinable(path, fd, geometry, seat):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def take_seat(fd: int, path: str, seat: int) -> None:
    """Record that this process has mapped the file, remove the name if all seats are taken, and unlock (step 3)."""
    header = RegionHeader.read(fd, path)
    assert header is not None
    write_seat(fd, header.geometry, seat)
    if all(pid for index, pid in enumerate(header.seats) if index != seat):
        _unlink_if_same(path, fd)
    fcntl.flock(fd, fcntl.LOCK_UN)


def remove_name(fd: int, path: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Remove the name if it still exists and names this file, then unlock."""
    # A search for stale regions holds the lock only for a moment. A process that holds it for longer is joining an
    # engine that is about to lose this process, so do not wait for that one.
    for _ in range(_REMOVE_TRIES):
        if _try_lock(fd):
            _unlink_if_same(path, fd)
            fcntl.flock(fd, fcntl.LOCK_UN)
            return
        sleep(_POLL_S)


def free_bytes(directory: str) -> int | None:
    """Free bytes in a file system. None: it has no limit of its own, like a tmpfs mounted with size=0.

    Raises:
        OSError: statvfs failed.
    """
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the pieces in which memory is allocated and mapped."""
    for start in range(0, size_bytes, _PIECE_BYTES):
        yield start, min(_PIECE_BYTES, size_bytes - start)


def _create(path: str, geometry: RegionGeometry) -> int | None:
    """Create, lock and size the file (steps 1 and 2). None: the name exists."""
    if os.path.lexists(path):
        return None
    directory = os.path.dirname(path)
    for stale in reap_stale_regions(directory):
        logger.warning("region: removed %s, left by an engine that died while it was starting", stale)
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    linked = False
    try:
        os.fchmod(fd, 0o600)
        write_header(fd, geometry)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # CPython calls linkat with AT_SYMLINK_FOLLOW only if a directory descriptor is given.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        linked = True
        _allocate(fd, geometry, directory)
    except FileExistsError:
        os.close(fd)
        return None
    except BaseException:
        if linked:
            _unlink_if_same(path, fd)
        os.close(fd)
        raise
    return fd


def _is_joinable(path: str, fd: int, geometry: RegionGeometry, seat: int) -> bool:
    """Whether the locked file is the one to join. False: start again."""
    if not _is_same(path, fd):  # while this process waited for the lock, all seats were taken or the file was reaped
        return False
    header = RegionHeader.read(fd, path)
    if header is None and os.fstat(fd).st_size:
        raise RegionError(f"{path} exists and is not a kvtiers region; remove it or choose another instance_id")
    if header is None or header.is_stale(fd):
        os.unlink(path)
        logger.warning("region: removed %s, left by an engine that died while it was starting", path)
        return False
    header.check_geometry(geometry, path)
    pid = header.seats[seat]
    if pid:
        who = "the scheduler" if seat == geometry.num_workers else f"rank {seat}"
        raise RegionError(
            f"region {path}: {who} is process {pid} already, or a process that {pid} forked. Two engines share one "
            "instance_id, or a process of an ended engine still runs; end that process"
        )
    return True


def _allocate(fd: int, geometry: RegionGeometry, directory: str) -> None:
    """Allocate every page and record that in the header.

    Args:
        directory: the file's directory; "" for a memfd, which no file system limits.
    """
    size = geometry.size_bytes
    # Check the limits first: filling memory takes a second per GB, and if the machine runs out of memory, the OOM
    # killer acts.
    for place, free in _limits(directory):
        if size > free:
            raise RegionError(_too_large(size, place, free))
    try:
        for start, length in pieces(size):
            os.posix_fallocate(fd, start, length)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise RegionError(_too_large(size, *min(_limits(directory), key=lambda limit: limit[1]))) from e
    mark_sized(fd, geometry)


def _too_large(size: int, place: str, free: int) -> str:
    return (
        f"a region of {human_bytes(size)}, and a page for its header, does not fit: {place} has {human_bytes(free)} "
        "free. Make region.size smaller, or give it more room (docker: --shm-size; Kubernetes: memory limit, and "
        "sizeLimit of the memory volume on /dev/shm)"
    )


def _limits(directory: str) -> Iterator[tuple[str, int]]:
    """Yield the limits of a region's size: (place, free bytes)."""
    free = free_bytes(directory) if directory else None
    if free is not None:
        yield directory, free
    with open("/proc/meminfo", "rb") as f:
        kib = {line.split(b":")[0]: int(line.split()[1]) for line in f}
    yield "this machine", (kib[b"MemAvailable"] + kib[b"SwapFree"]) << 10
    try:
        with open("/sys/fs/cgroup/memory.max", "rb") as f:
            # The whole limit, not its free part: the kernel counts page cache as used, although it would be evicted.
            yield "the container's memory limit", int(f.read())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        pass


def _open_existing(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.EISDIR):
            raise RegionError(f"{path} is a symlink or a folder; remove it") from e
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise RegionError(f"{path} is not a private file of this user (regular, mode 0600); remove it")
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _unlink_if_same(path: str, fd: int) -> bool:
    """Remove the name if it names this file. Call only under the file's lock, so that no other process removes it."""
    same = _is_same(path, fd)
    if same:
        os.unlink(path)
    return same
