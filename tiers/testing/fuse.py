"""FuseMount: a mounted folder that fails by plan, for tests of code that stores files.

A FUSE server in a separate process passes every operation to a backing folder and injects the faults of its plan::

    with FuseMount(tmp_path / "backing", tmp_path / "mount") as mount:
        store = MyStore(mount.path)
        mount.plan = [FuseFault("write", errno=errno.ENOSPC, first=2)]
        ...
        mount.plan = []                    # healed
        with mount.stopped():              # every operation hangs, and the waiting processes can be killed
            ...

The server receives each read and write as it was made (``direct_io``). Nothing is cached, and all files are in the
backing folder, so ``plant`` and ``peek`` of a contract test work there.

There are two ways to hang:

- ``stopped`` stops the server with SIGSTOP. Requests wait in the kernel, and a process that waits can be killed, as on
  an NFS mount, unless its request is one of the few that a busy server had already taken.
- A fault with ``hang`` holds a request that the server has taken. Until the plan is replaced, even SIGKILL does not end
  a process that waits for this request (state D).

Needs Linux, /dev/fuse, libfuse (Debian: ``apt-get install libfuse2 fuse``), mfusepy (``pip install mfusepy``), and root
or fusermount. ``why_no_fuse`` returns what is missing, so that a test can skip.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ..processes import python_command

START_S_MAX = 120.0  # on a busy machine
ANSWER_S_MAX = 60.0

OPERATIONS = (
    "getattr", "open", "create", "read", "write", "flush", "release", "fsync", "truncate", "unlink", "rename", "link",
    "mkdir", "rmdir", "readdir", "symlink", "readlink", "chmod", "utimens", "statfs",
)  # fmt: skip
"""Operations that can fail. ``flush`` is called by close(2), and is the only operation whose error close returns."""


@dataclass(frozen=True, slots=True)
class FuseFault:
    """A fault in some calls of one operation. A fault without an effect only counts the calls.

    Attributes:
        operation: one of ``OPERATIONS``.
        first: number of the first affected call since the plan was set, from 1; counts only calls that match ``path``.
        count: number of affected calls. None: all further calls.
        path: matches if it is part of the file's path (for link and rename: of either path).
        errno: the call fails with this errno.
        short_to: ``read`` and ``write`` move at most this many bytes.
        flip_bit: number of a bit to flip in the data that ``read`` returns or ``write`` writes.
        drop: ``write`` reports success but leaves a hole.
        hang: the call hangs until the plan is replaced.
        delay_s: the call takes this much longer, or until the plan is replaced.
        share: probability from 0 to 1 with which each call between ``first`` and the end of ``count`` is affected.
    """

    operation: str
    _: KW_ONLY
    first: int = 1
    count: int | None = None
    path: str = ""
    errno: int = 0
    short_to: int | None = None
    flip_bit: int | None = None
    drop: bool = False
    hang: bool = False
    delay_s: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"{self.operation!r} is not an operation; accepted: {', '.join(OPERATIONS)}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share {self.share!r} is not accepted; write 0 to 1")


def why_no_fuse() -> str | None:
    """What this machine lacks for a FuseMount; None if nothing is missing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse"
    if not (ctypes.util.find_library("fuse") or ctypes.util.find_library("fuse3")):
        return "no libfuse (apt-get install libfuse2 fuse)"
    if importlib.util.find_spec("mfusepy") is None:
        return "no mfusepy (pip install mfusepy)"
    if os.geteuid() and not (shutil.which("fusermount") or shutil.which("fusermount3")):
        return "neither root nor fusermount (apt-get install fuse)"
    return None


class FuseMount:
    """A mounted folder, as a context manager. For one thread.

    Args:
        backing: the folder that holds the files; created if it is missing.
        path: the mount point; created if it is missing.

    Raises:
        RuntimeError: the server did not start; the message has its exit status.
    """

    def __init__(self, backing: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        self.backing = Path(backing)
        self.path = Path(path)
        self._plan: tuple[FuseFault, ...] = ()
        self.backing.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = str(theirs.fileno()), str(self.backing), str(self.path)
            self._server = subprocess.Popen(
                python_command("kvtiers.tiers.testing.fuse", *arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._lines = self._control.makefile("r")
        try:
            self._control.settimeout(START_S_MAX)
            self._receive()
            self._control.settimeout(ANSWER_S_MAX)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def plan(self) -> Sequence[FuseFault]:
        """The planned faults. Setting the plan resets all counts and releases hanging calls."""
        return self._plan

    @plan.setter
    def plan(self, faults: Sequence[FuseFault]) -> None:
        self._plan = tuple(faults)
        self._ask([asdict(fault) for fault in faults])

    @property
    def server_pid(self) -> int:
        """Process ID of the FUSE server."""
        return self._server.pid

    def calls(self) -> Counter[str]:
        """Operation -> number of calls since the plan was set."""
        return Counter(self._ask("calls"))

    def struck(self) -> list[int]:
        """Number of calls that each fault of the plan affected, in the order of the plan."""
        struck: list[int] = self._ask("struck")
        return struck

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Make every operation hang; processes that wait for one can be killed."""
        os.kill(self._server.pid, signal.SIGSTOP)
        # Wait until all threads are stopped: a running thread may take a request, whose waiter SIGKILL cannot end.
        os.waitid(os.P_PID, self._server.pid, os.WSTOPPED)
        try:
            yield
        finally:
            os.kill(self._server.pid, signal.SIGCONT)

    def close(self) -> None:
        """Unmount. Calls that wait for the server fail with ENOTCONN. Idempotent."""
        if self._server.returncode is None:
            self._server.kill()  # works even if the server is stopped; unmounting first would wait for the server
            self._server.wait()
            tool = ["umount", "-l"] if not os.geteuid() else [shutil.which("fusermount") or "fusermount3", "-u", "-z"]
            subprocess.run([*tool, str(self.path)], check=False, stderr=subprocess.DEVNULL)
        self._lines.close()
        self._control.close()

    def _ask(self, question: object) -> Any:
        self._control.sendall(json.dumps(question).encode() + b"\n")
        return self._receive()

    def _receive(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"the FUSE server of {self.path} ended with status {self._server.wait()}")
        return json.loads(line)


# ---- the server's process --------------------------------------------------------------------------------------------


class _Plan:
    """The faults and the number of calls of each operation. Any thread may call; ``_lock`` owns the fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[FuseFault] = []
        self._met: list[int] = []
        self._struck: list[int] = []
        self._random = random.Random(0)
        self._calls: Counter[str] = Counter()
        self._replaced = threading.Event()

    def replace(self, faults: list[FuseFault]) -> None:
        with self._lock:
            self._faults, self._met, self._struck = faults, [0] * len(faults), [0] * len(faults)
            self._calls.clear()
            self._replaced.set()
            self._replaced = threading.Event()

    def calls(self) -> dict[str, int]:
        with self._lock:
            return dict(self._calls)

    def struck(self) -> list[int]:
        with self._lock:
            return list(self._struck)

    def meet(self, operation: str, *paths: str | None) -> list[FuseFault]:
        """Count a call, and wait or fail as planned. Returns the faults that affect the call."""
        with self._lock:
            self._calls[operation] += 1
            replaced = self._replaced
            striking = []
            for i, fault in enumerate(self._faults):
                if fault.operation == operation and any(fault.path in path for path in paths if path is not None):
                    self._met[i] += 1
                    due = self._met[i] - fault.first
                    if 0 <= due < (math.inf if fault.count is None else fault.count) and (
                        fault.share == 1 or self._random.random() < fault.share
                    ):
                        self._struck[i] += 1
                        striking.append(fault)
        for fault in striking:
            if fault.hang or fault.delay_s:
                replaced.wait(None if fault.hang else fault.delay_s)
            if fault.errno:
                raise OSError(fault.errno, os.strerror(fault.errno))
        return striking


class _PassThrough:
    """The operations, as mfusepy calls them: paths begin with "/", errors are OSError."""

    use_ns = True

    def __init__(self, backing: str, plan: _Plan, control: socket.socket) -> None:
        self._backing = backing
        self._plan = plan
        self._control = control

    def init(self, path: str) -> None:  # noqa: ARG002
        threading.Thread(target=self._answer_control, daemon=True).start()
        self._control.sendall(b'"ready"\n')

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        self._plan.meet("getattr", path)
        found = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino", "st_blocks")
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {**{name: getattr(found, name) for name in names}, **times}

    def readdir(self, path: str, fh: int) -> list[str]:  # noqa: ARG002
        self._plan.meet("readdir", path)
        return [".", "..", *os.listdir(self._real(path))]

    def open(self, path: str, flags: int) -> int:
        self._plan.meet("open", path)
        return os.open(self._real(path), flags)

    def create(self, path: str, mode: int, flags: int) -> int:
        self._plan.meet("create", path)
        return os.open(self._real(path), flags | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        faults = self._plan.meet("read", path)
        return bytes(_damage(faults, bytearray(os.pread(fh, size, offset))))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        faults = self._plan.meet("write", path)
        changed = _damage(faults, bytearray(data))
        if any(fault.drop for fault in faults):
            os.truncate(fh, max(os.fstat(fh).st_size, offset + len(changed)))
            return len(changed)
        return os.pwrite(fh, changed, offset)

    def flush(self, path: str, fh: int) -> int:  # noqa: ARG002
        self._plan.meet("flush", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        self._plan.meet("release", path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._plan.meet("fsync", path)
        (os.fdatasync if datasync else os.fsync)(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._plan.meet("truncate", path)
        os.truncate(self._real(path) if fh is None else fh, length)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._plan.meet("mkdir", path)
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        self._plan.meet("rmdir", path)
        os.rmdir(self._real(path))
        return 0

    def unlink(self, path: str) -> int:
        self._plan.meet("unlink", path)
        os.unlink(self._real(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        self._plan.meet("rename", old, new)
        os.rename(self._real(old), self._real(new))
        return 0

    def link(self, new: str, old: str) -> int:
        self._plan.meet("link", old, new)
        os.link(self._real(old), self._real(new), follow_symlinks=False)
        return 0

    def symlink(self, new: str, target: str) -> int:
        self._plan.meet("symlink", new)
        os.symlink(target, self._real(new))
        return 0

    def readlink(self, path: str) -> str:
        self._plan.meet("readlink", path)
        return os.readlink(self._real(path))

    def chmod(self, path: str, mode: int) -> int:
        self._plan.meet("chmod", path)
        os.chmod(self._real(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        self._plan.meet("utimens", path)
        os.utime(self._real(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        self._plan.meet("statfs", path)
        found = os.statvfs(self._real(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def _real(self, path: str) -> str:
        return self._backing + path

    def _answer_control(self) -> None:
        """Answer requests on the control socket until its other end closes; then unmount, because no one else would."""
        with self._control.makefile("r") as lines:
            for line in lines:
                match json.loads(line):
                    case "calls":
                        answer: object = self._plan.calls()
                    case "struck":
                        answer = self._plan.struck()
                    case faults:
                        self._plan.replace([FuseFault(**fault) for fault in faults])
                        answer = "done"
                self._control.sendall(json.dumps(answer).encode() + b"\n")
        os.kill(os.getpid(), signal.SIGTERM)  # libfuse unmounts and ends


def _damage(faults: Sequence[FuseFault], data: bytearray) -> bytearray:
    for fault in faults:
        if fault.short_to is not None:
            del data[fault.short_to :]
        if fault.flip_bit is not None and data:
            position, bit = divmod(fault.flip_bit % (8 * len(data)), 8)
            data[position] ^= 1 << bit
    return data


def main() -> None:
    """Entry point of the server's process."""
    import mfusepy

    control_fd, backing, path = sys.argv[1:]
    with socket.socket(fileno=int(control_fd)) as control:
        mfusepy.FUSE(
            _PassThrough(backing, _Plan(), control),
            path,
            foreground=True,
            fsname="kvtiers-faults",
            direct_io=True,  # the server gets each read and write as it was made, and may answer with fewer bytes
            hard_remove=True,  # without it, libfuse renames an open file instead of removing it
            attr_timeout=0,
            entry_timeout=0,
            negative_timeout=0,
        )
