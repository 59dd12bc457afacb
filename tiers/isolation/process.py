"""The parent's side of a worker of ``store``: its process, the messages to it, and the memory shared with it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from kvtiers.tiers.errors import RegionError, StoreConfigError
from kvtiers.tiers.isolation.mapped_file import address_of, open_mapped_file
from kvtiers.tiers.isolation.worker import own_log_level, receive_frame, send_frame
from kvtiers.tiers.plain_logs import get_logger
from kvtiers.tiers.store import Store, parts_size
from kvtiers.tiers.stores.files.posix import STDERR, occupy_standard_streams
from kvtiers.tiers.stores.vectored_io import transfer

logger = get_logger(__name__)

INLINE_BYTES_MAX = 16 << 10  # of one blob, outside the region; up to this size a socket costs less than the bounce file
BOUNCE_KEEP_BYTES = 16 << 20  # a larger bounce file is truncated after the call


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
    """A worker process. One thread owns it and calls it; any thread may use ``wait`` and ``process``."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, bounce_fd: int, clock: Callable[[], float]
    ) -> None:
        self.process = process
        self.bounce_fd = bounce_fd
        self._pid = os.getpid()
        self._sock = sock
        self._clock = clock

    @classmethod
    def start(
        cls,
        config: Mapping[str, Any],
        region: MappedRegion | None,
        clock: Callable[[], float],
        hidden_variables: Collection[str] = (),
    ) -> WorkerProcess:
        occupy_standard_streams()
        ours, theirs = socket.socketpair()
        bounce_fd = -1
        try:
            with theirs:
                bounce_fd = os.memfd_create("kvtiers-bounce", os.MFD_CLOEXEC)
                passed = [theirs.fileno(), bounce_fd]
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
                    env=environment_without(hidden_variables),
                )
            worker = cls(process, ours, bounce_fd, clock)
        except BaseException:
            ours.close()
            if bounce_fd >= 0:
                os.close(bounce_fd)
            raise
        try:
            send_frame(ours, {**config, "bounce_fd": bounce_fd, "region": place, "log_level": own_log_level()})
        except ConnectionError:
            pass  # the worker is dead already; its first call will fail
        return worker

    def send(
        self, operation: str, arguments: list[Any], deadline: float, *, bounce_bytes: int = 0, raw: bytes = b""
    ) -> None:
        self._wait_until(deadline)
        send_frame(self._sock, [operation, arguments, bounce_bytes], raw)

    def receive(self, deadline: float) -> tuple[Any, memoryview]:
        return receive_frame(self._sock, lambda: self._wait_until(deadline))

    def hang_up(self) -> None:
        """Shut down the socket, even if a fork of this process holds it open; an idle worker then exits."""
        if self._pid == os.getpid():  # in a fork, the worker belongs to the parent
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self.bounce_fd >= 0:
            os.close(self.bounce_fd)
            self.bounce_fd = -1

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process is reaped. False: timed out."""
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - self._clock()
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
        address = address_of(self._view)
        try:
            if address is None:
                raise RegionError("the region is empty or read-only")
            occupy_standard_streams()
            self.fd, self.offset = open_mapped_file(address, self.length)
        except (OSError, RegionError) as e:
            logger.warning("workers cannot map the region (%s); every block is copied once more", str(e))
        self._start = address or 0

    def locate(self, part: memoryview) -> int | None:
        """Offset of a part in the region; None if the part lies outside."""
        address = address_of(part) if self.fd >= 0 else None
        if address is None:
            return None
        offset = address - self._start
        return offset if offset >= 0 and offset + part.nbytes <= self.length else None

    def close(self) -> None:
        self._view.release()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Message:
    """The blobs of one request. Parts in the region are sent as offsets; other parts are sent as bytes."""

    def __init__(self, region: MappedRegion | None) -> None:
        self.items: list[Any] = []
        self.raw = b""  # sent with a request that has no blobs
        self._region = region
        self._outside: list[list[memoryview]] = []  # parallel to items
        self._outside_bytes = 0
        self._bounced = False

    def add(self, head: list[Any], parts: Sequence[memoryview]) -> None:
        """Add one blob."""
        segments: list[tuple[int, int]] = []
        outside: list[memoryview] = []
        for part in parts:
            offset = self._region.locate(part) if self._region is not None else None
            if offset is None:
                outside.append(part.cast("B"))
                offset = -1
            segments.append((offset, part.nbytes))
        carried = parts_size(outside)
        self._outside.append(outside)
        self._outside_bytes += carried
        self._bounced = self._bounced or carried > INLINE_BYTES_MAX
        self.items.append([*head, segments])

    def send(self, worker: WorkerProcess, operation: str, deadline: float, *, give: bool) -> None:
        """Send the request. With ``give``, also send the bytes of the parts outside the region."""
        outside = [part for parts in self._outside for part in parts] if give else []
        if self._bounced:
            os.ftruncate(worker.bounce_fd, self._outside_bytes)
            transfer(os.pwritev, worker.bounce_fd, outside)
            worker.send(operation, self.items, deadline, bounce_bytes=self._outside_bytes)
        else:
            worker.send(operation, self.items, deadline, raw=self.raw or b"".join(outside))

    def fill_outside(self, worker: WorkerProcess, content: Any, raw: memoryview) -> None:
        """Copy the bytes read into the parts outside the region, except for blobs that failed."""
        start = 0
        for parts, failure in zip(self._outside, content[1], strict=False):
            if failure is None and self._bounced:
                transfer(os.preadv, worker.bounce_fd, parts, start)
            elif failure is None:
                at = start
                for part in parts:
                    part[:] = raw[at : at + part.nbytes]
                    at += part.nbytes
            start += parts_size(parts)

    def release(self, worker: WorkerProcess) -> None:
        """Free the memory of a large bounce file."""
        if self._outside_bytes > BOUNCE_KEEP_BYTES:
            os.ftruncate(worker.bounce_fd, 0)


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
