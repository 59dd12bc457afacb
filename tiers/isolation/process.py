"""The parent's side of a worker of ``store``: its process, the messages to it, and the memory shared with it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..blocks.keyring import KEY_VARIABLES
from ..errors import RegionError, StoreConfigError
from ..plain_logs import get_logger
from ..store import Store, parts_size
from ..stores.files.posix import STDERR, occupy_standard_streams
from ..stores.vectored_io import transfer
from .mapped_file import address_of, open_mapped_file
from .worker import (
    TAG_BYTES,
    FrameReader,
    StrayBytesError,
    decode_error,
    own_log_level,
    pack_frame,
)

logger = get_logger(__name__)

SCRATCH_KEEP_BYTES = 16 << 20  # a larger scratch file is truncated after the call
LOOK_S_MAX = 0.05  # between looks at a process that is about to end


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line of a fresh interpreter that calls ``main`` of a module, found by this process's ``sys.path``.

    The interpreter gets this interpreter's flags, such as -E and -X utf8, as in multiprocessing.
    """
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import main; main()"
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports ignore other types, such as a Path
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-c", start, *arguments, json.dumps(path)]


def environment_without(variables: Collection[str]) -> dict[str, str]:
    """This process's environment without some variables."""
    return {name: value for name, value in os.environ.items() if name not in variables}


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started with ``process_group=0``, and all processes that its libraries have started.

    Call it before the process is reaped: afterwards another group may have its number.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def reap_group(process: subprocess.Popen[Any]) -> None:
    """Wait until a process has ended; then kill what it has started (see ``kill_group``), and reap it."""
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):  # another thread has just reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    kill_group(process)
    process.wait()


@dataclass(frozen=True, slots=True)
class StoreRecipe:
    """How a worker creates its store: ``module.name(**options)``.

    Attributes:
        module: importable with this process's ``sys.path``.
        name: a subclass of Store, or a function that returns a store.
        options: keyword arguments: None, bool, numbers, text, paths, and lists, dicts and dataclasses of these.
    """

    module: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets

    @classmethod
    def of(cls, make_store: Callable[..., Store], **options: Any) -> StoreRecipe:
        """The recipe for ``make_store(**options)``. ``make_store`` is a store's class or a module-level function."""
        return cls(make_store.__module__, make_store.__qualname__, options)

    def encode(self) -> dict[str, Any]:
        """The recipe as JSON values.

        Raises:
            StoreConfigError: an option cannot be sent to another process; the message names it.
        """
        options = {name: _encode_option(name, value) for name, value in self.options.items()}
        return {"module": self.module, "name": self.name, "options": options}


class WorkerProcess:
    """A worker process. One thread owns it and calls it; any thread may use ``kill``, ``wait`` and ``process``."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, scratch_fd: int) -> None:
        self.process = process
        self._scratch_fd = scratch_fd
        self._pid = os.getpid()
        self._sock = sock
        self._frames = FrameReader(sock)
        self._greeting: bytes | None = None  # the tag of the worker's first frame, until that frame has arrived
        self._arrived = select.poll()
        self._arrived.register(sock, select.POLLIN)
        self._ending = threading.Lock()  # held to kill the group and to reap, so that no other group is killed

    @classmethod
    def start(cls, config: Mapping[str, Any], region: MappedRegion | None) -> WorkerProcess:
        occupy_standard_streams()
        ours, theirs = socket.socketpair()
        scratch_fd = -1
        try:
            with theirs:
                scratch_fd = os.memfd_create("kvtiers-scratch", os.MFD_CLOEXEC)
                passed = [theirs.fileno(), scratch_fd]
                place = None
                if region is not None and region.fd >= 0:
                    passed.append(region.fd)
                    place = region.fd, region.offset, region.length
                # If this process was started without stderr, that descriptor may be any file by now.
                output = subprocess.DEVNULL if sys.__stderr__ is None else STDERR
                process = subprocess.Popen(
                    python_command("kvtiers.tiers.isolation.worker", str(theirs.fileno()), str(os.getpid())),
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # what a library prints must not mix with the parent's output
                    stderr=output,
                    env=environment_without(KEY_VARIABLES),
                    # Not a session of its own: with autogroups, the scheduler would give it the share of a whole
                    # session.
                    process_group=0,
                )
            worker = cls(process, ours, scratch_fd)
        except BaseException:
            ours.close()
            if scratch_fd >= 0:
                os.close(scratch_fd)
            raise
        worker._greeting = os.urandom(TAG_BYTES)
        sent = {**config, "scratch_fd": scratch_fd, "region": place, "log_level": own_log_level()}
        try:
            ours.sendall(pack_frame(sent, tag=worker._greeting))
        except ConnectionError:
            pass  # the worker is dead already; its first call will fail
        return worker

    def call(
        self,
        function: Callable[..., object],
        argument: object,
        deadline: float,
        *,
        given: Sequence[memoryview] = (),
        taken: Sequence[memoryview] = (),
    ) -> Any:
        """Call ``function(store, region, argument, raw)`` in the worker.

        Args:
            given: parts outside the region that the function reads. They are sent in the scratch file, whose bytes the
                function gets as ``raw``.
            taken: parts outside the region that the function fills. They are only filled if it raises nothing.

        Raises:
            TimeoutError: ``deadline`` has passed.
            OSError, EOFError: the worker died.
            StrayBytesError: the worker sent other bytes than the answer.
            StoreError: raised by the function. The worker can take another call; after other errors, discard it.
        """
        if self._greeting is not None:
            try:
                self._frames.receive(lambda: self._wait_until(deadline), tag=self._greeting)
            except StrayBytesError:
                raise
            except EOFError as e:
                raise ConnectionResetError("it ended before it could take a call") from e
            self._greeting = None
        # An end that arrives now is noticed by the send, so that the request goes to another worker.
        if not self._frames.is_empty() or (self._arrived.poll(0) and self._sock.recv(1, socket.MSG_PEEK)):
            raise StrayBytesError("it sent bytes although no request was open")
        scratch_bytes = parts_size(given) + parts_size(taken)
        if scratch_bytes:
            os.ftruncate(self._scratch_fd, scratch_bytes)
            transfer(os.pwritev, self._scratch_fd, given)
        tag = os.urandom(TAG_BYTES)
        frame = pack_frame((function.__module__, function.__qualname__, argument, scratch_bytes), tag=tag)
        self._wait_until(deadline)
        self._sock.sendall(frame)
        (value, error), *_ = self._frames.receive(lambda: self._wait_until(deadline), tag=tag)
        if error is None and taken:
            transfer(os.preadv, self._scratch_fd, taken)
        if scratch_bytes > SCRATCH_KEEP_BYTES:
            os.ftruncate(self._scratch_fd, 0)
        if error is not None:
            raise decode_error(error)
        return value

    @property
    def has_run(self) -> bool:
        """Whether the process started and reached the creation of its store."""
        return self._greeting is None

    def hang_up(self) -> None:
        """Shut down the socket, even if a fork of this process holds it open; an idle worker then exits."""
        if self._pid == os.getpid():  # in a fork, the worker belongs to the parent
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._scratch_fd >= 0:
            os.close(self._scratch_fd)
            self._scratch_fd = -1

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        with self._ending:
            kill_group(self.process)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until the process has ended; then kill the processes that it started, and reap it. False: timed out."""
        until = time.monotonic() + timeout_s
        look_s = 0.0005
        while not self._has_ended():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            look_s = min(2 * look_s, left_s, LOOK_S_MAX)
            time.sleep(look_s)
        with self._ending:
            kill_group(self.process)
            self.process.wait()
        return True

    def _has_ended(self) -> bool:
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has just reaped it
            return True

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)


class MappedRegion:
    """The region's address in this process, and its place in the file behind it.

    Attributes:
        fd: descriptor of the file, owned by this object; -1: other processes cannot map the region.
        offset, length: of the region in the file, in bytes.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("B")  # held, so that the region stays mapped at its address
        self.length = self._view.nbytes
        self.fd, self.offset = -1, 0
        try:
            occupy_standard_streams()
            self.fd, self.offset = open_mapped_file(self._view)
        except (OSError, RegionError) as e:
            logger.warning("workers cannot map the region (%s); every block is copied once more", str(e))
        self._start = address_of(self._view) or 0

    def locate(self, parts: Sequence[memoryview]) -> tuple[list[tuple[int, int]], list[memoryview]]:
        """A blob's parts as segments (see ``worker``), and those of its parts that lie outside the region."""
        segments, outside = [], []
        for part in parts:
            address = address_of(part) if self.fd >= 0 else None
            offset = -1 if address is None else address - self._start
            if offset < 0 or offset + part.nbytes > self.length:
                offset = -1
                outside.append(part.cast("B"))
            segments.append((offset, part.nbytes))
        return segments, outside

    def close(self) -> None:
        self._view.release()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _encode_option(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_encode_option(name, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _encode_option(f"{name}.{key}", item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        encoded = {f.name: _encode_option(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value) if f.init}
        return {**encoded, "$dataclass": (cls.__module__, cls.__qualname__)}
    raise StoreConfigError(
        f"option {name!r} of an isolated store cannot be sent to its worker processes: {type(value).__name__} is not "
        "accepted, only None, bool, numbers, text, paths, and lists, dicts and dataclasses of these"
    )
