"""How a blob becomes visible on a file system: whole, at once, or not at all, also when the writer dies.

A new blob, where the file system has unnamed files (O_TMPFILE: ext4, XFS, Btrfs, tmpfs, overlayfs)::

    openat2(root, folder)       made with its parents where missing, 0700
    openat(folder, O_TMPFILE)   0600; it has no name, so a writer that dies leaves nothing
    pwritev                     straight from the parts, until all is written (in pieces where each is looked at)
    [fdatasync]                 durability "data"
    linkat(folder, name)        publishes; EEXIST: the key was stored before, which is success
    close
    [fsync(folder)]             durability "data"

A blob that replaces another (linkat never replaces), and every blob where there are no unnamed files (NFS, FUSE)::

    openat(<root>/.tmp, private name, O_CREAT|O_EXCL)
    pwritev, [fdatasync]
    close                       before it is published: NFS reports a failed write only here
    renameat(private, name)     to replace; else linkat(private, name) and unlinkat(private)

Measured on tmpfs (Linux 6.18), in µs of CPU per blob beyond plain open, pwritev and close of the same file: unnamed 8.4
(10 where the name must go by /proc), private and renamed 13, private and linked 14. Only the first leaves nothing
behind when it is killed.

A writer that dies at the second leaves its private file. Its name, ``<host>-<boot>-<pid namespace>-<pid>-<start
time>-<store>-<count>``, says whose it is, and the next store that opens the root removes it: at once where that
process of this host is gone, after ``STALE_AGE_S_MAX`` where it was another host's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator

from kvtiers.tiers.errors import StoreConfigError, StoreFullError
from kvtiers.tiers.stores.files.listing import Failures
from kvtiers.tiers.stores.files.posix import (
    FILE_MODE,
    OPEN_FOLDER,
    OPEN_LISTING,
    RootFolder,
    close_reader,
    link_open_file,
)

PRIVATE_FOLDER = ".tmp"
QUARANTINE_FOLDER = ".quarantine"
STALE_AGE_S_MAX = 3600.0  # no writer takes an hour for one blob, and clocks of hosts are nearer than that

OPEN_UNNAMED = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
OPEN_PRIVATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
# EISDIR: a kernel that does not know the flag. EINVAL: some FUSE servers.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Publisher:
    """Writes blobs below a root. Any thread may call; holds no descriptor, so it works in forked children.

    Args:
        durable: a blob that was published survives a power cut.
        unnamed_files: use O_TMPFILE where the file system has it. False: it is known not to.
    """

    def __init__(self, *, durable: bool = False, unnamed_files: bool = True) -> None:
        self._durable = durable
        # Any thread may set it, to False only; one that still reads True finds out for itself.
        # Without /proc an unnamed file cannot be given a name.
        self._unnamed_files = unnamed_files and os.path.isdir("/proc/self/fd")
        self._link_open_file = True
        self._names = PrivateNames()

    def publish(self, root: RootFolder, key: str, write: Callable[[int], None], *, overwrite: bool) -> bool:
        """Store a file under ``key``. False: something is there and stays.

        Args:
            write: fills an empty file, given its descriptor; what it raises comes out.

        Raises:
            FileNotFoundError: a folder on the way, or the root, was removed meanwhile.
            OSError: anything else.
        """
        folder, _, name = key.rpartition("/")
        dir_fd = root.make_folder(folder)
        try:
            # Only to save the writing: of two who find nothing, one will find the other's at the end.
            if not overwrite and os.access(name, os.F_OK, dir_fd=dir_fd, follow_symlinks=False):
                published = False
            elif not overwrite and self._unnamed_files and (fd := self._open_unnamed(dir_fd)) >= 0:
                published = self._publish_unnamed(root, fd, dir_fd, name, write)
            else:
                published = self._publish_private(root, dir_fd, name, write, overwrite=overwrite)
            if self._durable:
                _sync_folder(dir_fd)
            return published
        finally:
            close_reader(dir_fd)

    def quarantine(self, root: RootFolder, key: str, *, count_max: int) -> str:
        """Move what is under ``key`` into the quarantine folder, or delete it where that fails or holds ``count_max``.

        Returns:
            Why it could not be moved; "" where it was, or the folder is full.

        Raises:
            FileNotFoundError: nothing is there.
            OSError: it can be neither moved nor deleted.
        """
        folder, _, name = key.rpartition("/")
        dir_fd = root.open(folder or ".", OPEN_FOLDER)
        try:
            try:
                if self._move_aside(root, dir_fd, name, count_max):
                    return ""
                why = ""
            except (OSError, StoreConfigError) as e:
                why = str(e)  # as text: the exception's frames hold the root
            # Also after ENOENT, which may be the quarantine folder's: this says whether the blob is there.
            try:
                os.unlink(name, dir_fd=dir_fd)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=dir_fd)
            return why
        finally:
            close_reader(dir_fd)

    def _move_aside(self, root: RootFolder, dir_fd: int, name: str, count_max: int) -> bool:
        """False: the quarantine folder is full."""
        aside_fd = _make_own_folder(root, QUARANTINE_FOLDER)
        try:
            if _count_entries(aside_fd) >= count_max:
                return False
            aside = f"{self._names.make()}-{name}".encode()[:255].decode(errors="ignore")  # NAME_MAX
            os.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=aside_fd)
            return True
        finally:
            close_reader(aside_fd)

    def _open_unnamed(self, dir_fd: int) -> int:
        """-1 where this file system has no unnamed files."""
        try:
            return os.open(".", OPEN_UNNAMED, FILE_MODE, dir_fd=dir_fd)
        except OSError as e:
            if e.errno not in _NO_UNNAMED_FILES:
                raise
            self._unnamed_files = False
            return -1

    def _publish_unnamed(self, root: RootFolder, fd: int, dir_fd: int, name: str, write: Callable[[int], None]) -> bool:
        """Owns ``fd``."""
        published = False
        try:
            self._write(root, fd, write)
            try:
                self._link(fd, name, dir_fd)
                published = True
            except FileExistsError:
                pass
            except OSError as e:
                _refuse_without_links(e)
                raise
        finally:
            try:
                os.close(fd)
            except OSError:
                # A FUSE server may refuse the bytes only now, when they are published.
                if published:
                    _unlink_quietly(name, dir_fd)
                raise
        return published

    def _link(self, fd: int, name: str, dir_fd: int) -> None:
        if self._link_open_file:
            try:
                link_open_file(fd, name, dir_fd)
                return
            except (FileNotFoundError, PermissionError):
                pass  # we are not let; or the folder was removed, which the next call says
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=dir_fd)
        self._link_open_file = False

    def _publish_private(
        self, root: RootFolder, dir_fd: int, name: str, write: Callable[[int], None], *, overwrite: bool
    ) -> bool:
        temp_fd = _make_own_folder(root, PRIVATE_FOLDER)
        try:
            temp = self._names.make()
            fd = os.open(temp, OPEN_PRIVATE, FILE_MODE, dir_fd=temp_fd)
            renamed = False
            try:
                try:
                    self._write(root, fd, write)
                finally:
                    os.close(fd)
                if overwrite:
                    os.rename(temp, name, src_dir_fd=temp_fd, dst_dir_fd=dir_fd)
                    renamed = True
                else:
                    try:
                        os.link(temp, name, src_dir_fd=temp_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
                    except FileExistsError:
                        return False
                    except OSError as e:
                        _refuse_without_links(e)
                        raise
                return True
            finally:
                if not renamed:
                    _unlink_quietly(temp, temp_fd)
        finally:
            close_reader(temp_fd)

    def _write(self, root: RootFolder, fd: int, write: Callable[[int], None]) -> None:
        root.give(fd)
        write(fd)
        if self._durable:
            os.fdatasync(fd)


class FreeSpace:
    """Keeps writers out of a reserve of free space.

    Asking the file system is a system call, so an answer is used for ``PERIOD_S``, less what was written since, as
    long as it is ``NEAR_BYTES`` above the reserve. Nearer than that every put asks. So what other processes write
    unseen (PERIOD_S long, at less than NEAR_BYTES per PERIOD_S) does not reach the reserve either. What they are
    writing at that very moment does: one block for each other process, the workers of a tier among them.

    Any thread may call; ``_lock`` owns the fields.
    """

    PERIOD_S = 0.25
    NEAR_BYTES = 1 << 30

    def __init__(self, min_free_bytes: int, clock: Callable[[], float]) -> None:
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._room_bytes = 0
        self._asked_at = float("-inf")
        self._in_flight_bytes = 0

    @contextlib.contextmanager
    def reserved(self, root: RootFolder, size: int, key: str) -> Iterator[None]:
        """Keep room for a blob while it is written.

        Raises:
            StoreFullError: it would reach into the reserve.
            OSError: the file system does not say.
        """
        with self._lock:
            now = self._clock()
            if now - self._asked_at > self.PERIOD_S or self._room_bytes - size < self.NEAR_BYTES:
                status = os.fstatvfs(root.fd)
                # What is being written may be counted twice, as reserved and as written: it errs to the safe side.
                self._room_bytes = status.f_bavail * status.f_frsize - self._min_free_bytes - self._in_flight_bytes
                self._asked_at = now
            if self._room_bytes < size:
                raise StoreFullError(
                    f"{size} bytes would leave less than min_free_bytes = {self._min_free_bytes} free", key=key
                )
            self._room_bytes -= size
            self._in_flight_bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._in_flight_bytes -= size


def sweep(root: RootFolder, now: Callable[[], float]) -> None:
    """Remove the private files of dead writers. ``now``: Unix seconds, asked for only where there may be such files."""
    try:
        fd = root.open(PRIVATE_FOLDER, OPEN_LISTING)
    except FileNotFoundError:
        return
    try:
        machine = _machine()
        now_s = now()
        failures = Failures()
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    age_s = now_s - os.stat(entry.name, dir_fd=fd, follow_symlinks=False).st_mtime
                    if age_s > STALE_AGE_S_MAX or _is_dead(entry.name, machine):
                        os.unlink(entry.name, dir_fd=fd)
                except (FileNotFoundError, IsADirectoryError):
                    pass  # swept by another store; or nothing of ours
                except OSError as e:
                    failures.note(e)
    finally:
        close_reader(fd)


def storage_time(root: RootFolder) -> float:
    """Unix seconds by the clock that stamps files below a root: on NFS the server's, which may not be this host's."""
    dir_fd = _make_own_folder(root, PRIVATE_FOLDER)
    try:
        name = PrivateNames().make()
        fd = os.open(name, OPEN_PRIVATE, FILE_MODE, dir_fd=dir_fd)
        try:
            return os.fstat(fd).st_mtime
        finally:
            close_reader(fd)
            _unlink_quietly(name, dir_fd)
    finally:
        close_reader(dir_fd)


class PrivateNames:
    """Names no other writer uses, for files in ``PRIVATE_FOLDER``."""

    def __init__(self) -> None:
        self._store = secrets.token_hex(4)  # a process may have several stores
        self._count = itertools.count()
        self._writer = (0, "")  # pid, and the part of the name that says so: a forked child has another one

    def make(self) -> str:
        pid, writer = self._writer
        if pid != os.getpid():
            pid = os.getpid()
            writer = f"{_machine()}-{pid}-{_start_time(pid)}-{self._store}"
            self._writer = pid, writer
        return f"{writer}-{next(self._count)}"


def _is_dead(name: str, machine: str) -> bool:
    """Whether the writer of a private file is known to be gone."""
    theirs, *rest = name.rsplit("-", 4)
    if len(rest) != 4 or not rest[0].isdecimal() or not machine or theirs != machine:
        return False
    # A pid that was given to another process since then has another start time.
    return _start_time(int(rest[0])) != rest[1]


def _machine() -> str:
    """Where a pid and a start time mean one process: host, boot and pid namespace. "" where /proc does not say."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        boot_id = _read_line("/proc/sys/kernel/random/boot_id")
    except FileNotFoundError:
        return ""
    return f"{os.uname().nodename}-{boot_id[:8]}-{namespace}".replace("/", "_")


def _start_time(pid: int) -> str:
    """Start of a process in clock ticks since boot; "" where there is no such process."""
    try:
        line = _read_line(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return line.rpartition(")")[2].split()[19]  # the program's name, in parentheses, may hold anything


def _read_line(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode(errors="replace").rstrip()
    finally:
        close_reader(fd)


def _refuse_without_links(e: OSError) -> None:
    """Raise where link(2) says that there are none: EPERM is no matter of rights there, which are EACCES."""
    if e.errno in _NO_HARD_LINKS:
        raise StoreConfigError(
            f"this file system has no hard links ({errno.errorcode[e.errno]}), by which blocks are published; "
            "use another one: vfat, exFAT and some FUSE mounts have none"
        ) from e


def _make_own_folder(root: RootFolder, name: str) -> int:
    try:
        return root.make_folder(name)
    except OSError as e:
        if e.errno in (errno.ENOTDIR, errno.ELOOP):  # not the key's fault, and not to be read as its absence
            raise StoreConfigError(f"{name!r} in the root must be a folder") from e
        raise


def _count_entries(dir_fd: int) -> int:
    fd = os.open(".", OPEN_LISTING, dir_fd=dir_fd)
    try:
        with os.scandir(fd) as entries:
            return sum(1 for _ in entries)
    finally:
        close_reader(fd)


def _sync_folder(dir_fd: int) -> None:
    fd = os.open(".", OPEN_LISTING, dir_fd=dir_fd)  # O_PATH descriptors cannot be synced
    try:
        os.fsync(fd)
    finally:
        close_reader(fd)


def _unlink_quietly(name: str, dir_fd: int) -> None:
    """Best effort: what stays in the private folder is swept when this process is gone."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError:
        pass
