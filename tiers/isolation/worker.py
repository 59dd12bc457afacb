"""The worker's side of ``store``: a process that has one store and handles one request at a time.

A request is a function to call as ``function(store, region, argument, raw)``; the answer is what it returns. Both are
frames on a stream socket: two lengths (big-endian u32), a tag, a JSON text, raw bytes, the tag again. The texts::

    request  [module, function, argument, bytes used in the scratch file]
    answer   [value, error]      error: null, or what the function raised

Each request has a random tag, and its answer has the same tag. So bytes that a library writes into the socket cannot
pass for an answer or for a part of an answer. A process that a library forks can neither answer nor write into the
region: the region is not mapped in forks, and a fork ends when it returns from the library.

Before the first request, the parent sends the worker's configuration, which gets an empty answer. Bytes of blobs are
not in frames. They lie in the region or in the scratch file, a memfd that worker and parent share. A blob's parts are
segments ``[offset, length]`` of the region, and with offset -1 the next ``length`` bytes of the scratch file. ``raw``
is the scratch file's bytes if it is used, and otherwise the frame's raw bytes.

Import only the standard library and ``tiers.errors`` here: callers wait while a killed worker's replacement starts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from .. import errors
from ..errors import StoreError, StoreUnavailableError

_LOGGER = "kvtiers"  # the parent of all loggers of this package

FRAME_BYTES_MAX = 1 << 28  # a larger length does not come from kvtiers

TAG_BYTES = 16
_LENGTHS = struct.Struct("!II")
_HEAD_BYTES = _LENGTHS.size + TAG_BYTES
_RECEIVE_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23  # not in the mmap module
_THREAD_STACK_BYTES = 1 << 20  # not the usual 8 MiB, which count toward ``limit_memory`` although hardly used
_OUT_OF_MEMORY_STATUS = 3
_FORKED_STATUS = 4
_TOUCH_BYTES = 64 << 20  # takes a millisecond or two, for which a request may have to wait


# ---- frames ----------------------------------------------------------------------------------------------------------


class StrayBytesError(EOFError):
    """The other side sent bytes that are not the frame that was expected. Nothing that it sends can be used."""


def pack_frame(content: object, raw: bytes = b"", *, tag: bytes = bytes(TAG_BYTES)) -> bytes:
    """Encode one frame.

    Raises:
        TypeError, ValueError: ``content`` cannot be encoded as JSON.
    """
    text = _encode(content).encode()
    return b"".join((_LENGTHS.pack(len(text), len(raw)), tag, text, raw, tag))


def _as_plain(value: Any) -> object:
    """Convert a numpy number, which a store may return, to a Python number."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{type(value).__name__} is not JSON serializable") from None


# Created once: json.dumps with these options would create an encoder for each call.
_encode = json.JSONEncoder(separators=(",", ":"), default=_as_plain).encode


class FrameReader:
    """Receives frames from a socket. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()

    def is_empty(self) -> bool:
        """Whether nothing of the next frame has been received yet."""
        return not self._received

    def receive(
        self, wait: Callable[[], None] = lambda: None, *, tag: bytes | None = None
    ) -> tuple[Any, memoryview, bytes]:
        """Receive one frame: its content, its raw bytes and its tag.

        Args:
            wait: called before each receive, to set the time left of a timeout.
            tag: the tag that the frame must have; None: any.

        Raises:
            StrayBytesError: the bytes that arrived are not such a frame.
            EOFError: the other side has closed the socket.
            OSError: raised by the socket.
        """
        self._receive(_HEAD_BYTES, wait)
        text_bytes, raw_bytes = _LENGTHS.unpack_from(self._received)
        found = bytes(self._received[_LENGTHS.size : _HEAD_BYTES])
        if found != (tag or found) or max(text_bytes, raw_bytes) > FRAME_BYTES_MAX:
            raise StrayBytesError("the bytes that arrived are not the requested answer")
        raw_at = _HEAD_BYTES + text_bytes
        end = raw_at + raw_bytes
        self._receive(end + TAG_BYTES, wait)
        frame, self._received = self._received, self._received[end + TAG_BYTES :]
        view = memoryview(frame)
        if view[end : end + TAG_BYTES] != found:
            raise StrayBytesError("other bytes arrived in the middle of a frame")
        return json.loads(str(view[_HEAD_BYTES:raw_at], "utf-8")), view[raw_at:end], found

    def _receive(self, size: int, wait: Callable[[], None]) -> None:
        """Receive until there are ``size`` bytes, and what comes with them: mostly a whole frame at once."""
        while len(self._received) < size:
            wait()
            received = self._sock.recv(_RECEIVE_BYTES)
            if not received:
                raise EOFError
            self._received += received


def encode_error(error: BaseException) -> list[str]:
    """Encode an error as ``[class, message, key]``. Other exceptions become StoreError, all that a store may raise."""
    if isinstance(error, MemoryError):
        # Due to ``limit_memory``. The next call needs a worker with free memory; this caller is told its worker died.
        os._exit(_OUT_OF_MEMORY_STATUS)
    if not isinstance(error, StoreError):
        return ["StoreError", f"{type(error).__name__}: {error}", ""]
    # Custom stores may raise their own subclasses, which the parent may not know.
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    key = error.key if isinstance(error.key, str) else repr(error.key)
    return [name, str(error).removesuffix(f" (key {error.key!r})"), key]


def decode_error(encoded: Sequence[str]) -> StoreError:
    """Decode the list of ``encode_error``."""
    name, message, key = encoded
    error: StoreError = getattr(errors, name)(message, key=key)
    return error


def make_store(recipe: Mapping[str, Any]) -> Any:
    """Create the store of a recipe that was encoded by ``StoreRecipe.encode``."""
    options = {name: _decode_option(value) for name, value in recipe["options"].items()}
    return find_object(recipe["module"], recipe["name"])(**options)


def _decode_option(value: Any) -> Any:
    """Decode an option of a recipe: create dataclasses again, keep other JSON values."""
    if isinstance(value, list):
        return [_decode_option(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _decode_option(item) for name, item in value.items()}
    place = fields.pop("$dataclass", None)
    return find_object(*place)(**fields) if place else fields


def find_object(module: str, name: str) -> Any:
    """The class or function that a recipe names."""
    return getattr(importlib.import_module(module), name)


# ---- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve requests from a socket until its other end is closed. Arguments: the descriptor and the parent's PID."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    # Ctrl-C, and signals that systemd sends to a whole service, are for the parent to handle: it has stores to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pid = os.getpid()
    os.set_inheritable(fd, False)  # programs that a library runs must not get it
    with socket.socket(fileno=fd) as sock:
        os.register_at_fork(after_in_child=sock.close)  # or the parent would not see this process's end
        try:
            frames = FrameReader(sock)
            config, _, tag = frames.receive()
            sock.sendall(pack_frame(None, tag=tag))  # from now on, an early end is the store's fault
            log_to_stderr("kvtiers-worker", config["log_level"])
            worker = _Worker(config)
            worker.open_early()
            preparing = worker.prepare()
            requests = select.poll()  # select() accepts no descriptor beyond 1023, and engines have many
            requests.register(sock, select.POLLIN)
            while True:
                while frames.is_empty() and not requests.poll(0) and next(preparing, None):
                    pass
                end_if_forked(pid)
                request, raw, tag = frames.receive()
                answer = worker.serve(request, raw, tag)
                end_if_forked(pid)
                sock.sendall(answer)
        except (EOFError, ConnectionError):
            return


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    A process in a hung call does not notice that its pipe or socket closes, and a fork of the parent may keep it open.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before prctl
        sys.exit()


def end_if_forked(pid: int) -> None:
    """End this process at once if it is not process ``pid``, but a fork that a library made and returned from.

    Call it before each message to or from the parent, which would otherwise get two answers.
    """
    if os.getpid() != pid:
        os._exit(_FORKED_STATUS)


def log_to_stderr(process_name: str, level: int) -> None:
    """Log to standard error, in the format of an engine's log lines: process, level, time, file and line.

    Args:
        level: the level of kvtiers' loggers in the parent.
    """
    text = f"({process_name} pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    logging.basicConfig(format=text, datefmt="%m-%d %H:%M:%S")
    logging.getLogger(_LOGGER).setLevel(level)


def own_log_level() -> int:
    """This process's log level, to be passed to ``log_to_stderr`` in a child process."""
    return logging.getLogger(_LOGGER).getEffectiveLevel()


def limit_memory(bytes_max: int) -> None:
    """Limit the private memory that this process may allocate from now on. Allocations beyond the limit fail.

    Shared memory, such as the region, does not count. If the process aborts, no core file is written.
    """
    threading.stack_size(_THREAD_STACK_BYTES)
    os.environ.setdefault("RUST_BACKTRACE", "0")  # if obstore panics, it prints a line and not a screen
    with open("/proc/self/status", encoding="ascii") as f:
        used_kib = next(int(line.split()[1]) for line in f if line.startswith("VmData:"))
    for kind, limit in ((resource.RLIMIT_DATA, (used_kib << 10) + bytes_max), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


def own_output() -> TextIO:
    """Reserve standard output for this process's messages: from now on, output of libraries goes to standard error."""
    fd = os.dup(1)
    os.register_at_fork(after_in_child=lambda: os.close(fd))  # or the parent would not see this process's end
    output = os.fdopen(fd, "w", encoding="utf-8")
    os.dup2(2, 1)
    return output


class _Worker:
    """The process's store and its mapping of the region.

    Args:
        config: ``module``, ``name`` and ``options`` of the store; ``scratch_fd``; ``region``: [descriptor, offset,
            length] or null; ``memory_bytes_max``: see ``limit_memory``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        os.set_inheritable(config["scratch_fd"], False)
        self._store: Any = None
        self._region = memoryview(b"")
        self._mapping: mmap.mmap | None = None
        if config["region"] is not None:
            fd, offset, length = config["region"]
            before = offset % mmap.ALLOCATIONGRANULARITY
            self._mapping = mmap.mmap(fd, before + length, offset=offset - before)
            self._mapping.madvise(mmap.MADV_DONTFORK)  # a fork may outlive this process, and slots are reused then
            self._region = memoryview(self._mapping)[before:]
            os.close(fd)

    def prepare(self) -> Iterator[bool]:
        """Do work that the first batch would otherwise wait for, in small steps while there is no request.

        An S3 client takes 0.3 s. Page tables are filled in advance, which costs 0.2 % of the region's
        size in memory. Otherwise a page fault per page halves the speed of the first pass over the region.
        """
        with suppress(Exception):  # the first request gets the error again, and reports it
            self._store.prepare()
        yield True
        for start in range(0, len(self._mapping or ()), _TOUCH_BYTES):
            assert self._mapping is not None
            try:
                self._mapping.madvise(_MADV_POPULATE_WRITE, start, min(_TOUCH_BYTES, len(self._mapping) - start))
            except (OSError, ValueError):  # before Linux 5.14
                return
            yield True

    def open_early(self) -> None:
        """Create the store before the first request. If that fails, a request tries again and reports the error."""
        if self._config["memory_bytes_max"] is not None:
            importlib.import_module(self._config["module"])  # before the limit: libraries may need a lot
            limit_memory(self._config["memory_bytes_max"])
        try:
            self._open()
        except Exception:  # noqa: BLE001 - the next request raises the error again, and reports it
            pass

    def serve(self, request: Any, raw: memoryview, tag: bytes) -> bytes:
        """Handle a request; returns the answer's frame."""
        module, name, argument, scratch_bytes = request
        try:
            self._open()
            if scratch_bytes:
                # Not closed here: after an error its traceback still refers to the mapping.
                mapping = mmap.mmap(self._config["scratch_fd"], scratch_bytes)
                mapping.madvise(mmap.MADV_DONTFORK)
                raw = memoryview(mapping)
            return pack_frame((find_object(module, name)(self._store, self._region, argument, raw), None), tag=tag)
        except Exception as e:  # noqa: BLE001 - a process's edge: the caller must get the error
            return pack_frame((None, encode_error(e)), tag=tag)

    def _open(self) -> None:
        if self._store is None:
            try:
                self._store = make_store(self._config)
            except Exception:
                raise
            except BaseException as e:  # such as SystemExit: a library that gives up must not end this process
                name = f"{self._config['module']}.{self._config['name']}"
                raise StoreUnavailableError(f"{name} raised {type(e).__name__}: {e}") from e
