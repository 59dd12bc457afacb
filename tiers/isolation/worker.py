"""The worker's side of ``store``: a process with one store, which does one request at a time.

Either side sends frames over a stream socket: two lengths (big-endian u32), a JSON text, raw bytes. The texts::

    request  [operation, arguments, bytes of the bounce file that are in use]
    answer   [value, errors]      errors: parallel to the blobs of a batch; null is success

A blob's parts are sent as segments ``[offset, length]``. With offset >= 0 they lie in the region; with -1 they are the
next ``length`` bytes outside of it: of the frame's raw bytes or, if that is too much for a socket, of the bounce file.

Imports the standard library and ``tiers.errors`` only: whoever had a worker killed waits for the start of the next.
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
from dataclasses import asdict
from itertools import islice
from typing import Any, TextIO

from kvtiers.tiers import errors
from kvtiers.tiers.errors import StoreError

_LOGGER = "kvtiers"  # the one above all of this package's

FRAME_BYTES_MAX = 1 << 28  # a length beyond it is no frame of ours
LISTING_PAGE_KEYS = 256
OPTIONAL_METHODS = ("get_tail", "quarantine", "folders")  # the parent has them only where the store does

_LENGTHS = struct.Struct("!II")
_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23  # not in the mmap module
_THREAD_STACK_BYTES = 1 << 20  # not the usual 8 MiB, which count for ``limit_memory`` though hardly used
_OUT_OF_MEMORY_STATUS = 3
_TOUCH_BYTES = 64 << 20  # takes a millisecond or two, which a request may have to wait for


# ---- frames ----------------------------------------------------------------------------------------------------------


def send_frame(sock: socket.socket, content: object, raw: bytes = b"") -> None:
    """Send one frame."""
    text = _encode(content).encode()
    sock.sendall(b"".join((_LENGTHS.pack(len(text), len(raw)), text, raw)))


def _as_plain(value: Any) -> object:
    """A number of numpy's, which a store may answer with, as one of Python's."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{type(value).__name__} is not JSON serializable") from None


_encode = json.JSONEncoder(separators=(",", ":"), default=_as_plain).encode  # json.dumps would make one each time


def receive_frame(sock: socket.socket, wait: Callable[[], None] = lambda: None) -> tuple[Any, memoryview]:
    """Receive one frame. ``wait`` is called before each receive, to set what is left of a timeout.

    Raises:
        EOFError: the other side is gone.
        OSError: as the socket raises it.
    """
    lengths = _receive(sock, _LENGTHS.size, wait)
    text_bytes, raw_bytes = _LENGTHS.unpack(lengths)
    if max(text_bytes, raw_bytes) > FRAME_BYTES_MAX:
        raise EOFError(f"a frame of {text_bytes} + {raw_bytes} bytes is none of ours")
    data = _receive(sock, text_bytes + raw_bytes, wait)
    return json.loads(str(data[:text_bytes], "utf-8")), data[text_bytes:]


def _receive(sock: socket.socket, size: int, wait: Callable[[], None]) -> memoryview:
    data = memoryview(bytearray(size))
    done = 0
    while done < size:
        wait()
        got = sock.recv_into(data[done:])
        if not got:
            raise EOFError
        done += got
    return data


def encode_error(error: BaseException) -> list[str]:
    """An error as ``[class, message, key]``; one that is no StoreError becomes one, as only those leave a store."""
    if isinstance(error, MemoryError):
        # By ``limit_memory``: the next call is to have a worker that has memory. The caller hears that this one died.
        os._exit(_OUT_OF_MEMORY_STATUS)
    if not isinstance(error, StoreError):
        return ["StoreError", f"{type(error).__name__}: {error}", ""]
    # Other people's stores may have subclasses of their own, which the parent may not know.
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    key = error.key if isinstance(error.key, str) else repr(error.key)
    return [name, str(error).removesuffix(f" (key {error.key!r})"), key]


def decode_error(encoded: Sequence[str]) -> StoreError:
    """What ``encode_error`` made a list of."""
    name, message, key = encoded
    error: StoreError = getattr(errors, name)(message, key=key)
    return error


def make_store(recipe: Mapping[str, Any]) -> Any:
    """The store of a recipe, as ``StoreRecipe.encode`` gives it."""
    options = {name: _decode_option(value) for name, value in recipe["options"].items()}
    return find_object(recipe["module"], recipe["name"])(**options)


def _decode_option(value: Any) -> Any:
    """A recipe's option as the parent had it: dataclasses are made anew, all else is as in JSON."""
    if isinstance(value, list):
        return [_decode_option(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _decode_option(item) for name, item in value.items()}
    place = fields.pop("$dataclass", None)
    return find_object(*place)(**fields) if place else fields


def find_object(module: str, name: str) -> Any:
    """What a recipe names."""
    return getattr(importlib.import_module(module), name)


# ---- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve the socket whose descriptor is the first argument, until its other end is closed."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    # Ctrl-C, and what systemd sends to a whole service, are the parent's to handle: it has stores to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=fd) as sock:
        try:
            config, _ = receive_frame(sock)
            log_to_stderr("kvtiers-worker", config["log_level"])
            worker = _Worker(config)
            worker.open_early()
            preparing = worker.prepare()
            requests = select.poll()  # select() takes no descriptor beyond 1023, and engines have many
            requests.register(sock, select.POLLIN)
            while True:
                while not requests.poll(0) and next(preparing, None):
                    pass
                worker.serve(sock, *receive_frame(sock))
        except (EOFError, ConnectionError):
            return


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends.

    A hung call does not see its pipe or socket close, which a fork of the parent may hold open besides.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent was gone before
        sys.exit()


def log_to_stderr(process_name: str, level: int) -> None:
    """Log what this process has to say as an engine's lines are: with process, level, time and place.

    Args:
        level: of the loggers of kvtiers in the parent.
    """
    text = f"({process_name} pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    logging.basicConfig(format=text, datefmt="%m-%d %H:%M:%S")
    logging.getLogger(_LOGGER).setLevel(level)


def own_log_level() -> int:
    """For ``log_to_stderr`` in a child of this process."""
    return logging.getLogger(_LOGGER).getEffectiveLevel()


def limit_memory(bytes_max: int) -> None:
    """Let this process have so much more memory of its own: what a library asks for beyond it makes the process fail.

    Shared memory, such as the region, does not count. Nor is a core file written when it is aborted.
    """
    threading.stack_size(_THREAD_STACK_BYTES)
    os.environ.setdefault("RUST_BACKTRACE", "0")  # obstore's last words are a line then, not a screen
    with open("/proc/self/status", encoding="ascii") as f:
        used_kib = next(int(line.split()[1]) for line in f if line.startswith("VmData:"))
    for kind, limit in ((resource.RLIMIT_DATA, (used_kib << 10) + bytes_max), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


def own_output() -> TextIO:
    """Standard output, for this process's messages alone; what libraries print goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return output


class _Worker:
    """The process's store and what it maps.

    Args:
        config: ``module``, ``name`` and ``options`` of the store, ``bounce_fd``, ``region``: [descriptor, offset,
            length] or null, ``imports``: modules that ``run`` will want, and ``memory_bytes_max`` for
            ``limit_memory``, or null.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._store: Any = None
        self._region = memoryview(b"")
        self._mapping: mmap.mmap | None = None
        if config["region"] is not None:
            fd, offset, length = config["region"]
            before = offset % mmap.ALLOCATIONGRANULARITY
            self._mapping = mmap.mmap(fd, before + length, offset=offset - before)
            self._region = memoryview(self._mapping)[before:]
            os.close(fd)

    def prepare(self) -> Iterator[bool]:
        """Do what the first batch would else wait for, a piece at each step, while there is no request.

        Imports take 0.1 s, a client of S3 0.3 s. Without page tables, which cost 0.2 % of the region's size, a fault a
        page halves the speed of the first pass over it.
        """
        for module in self._config["imports"]:
            importlib.import_module(module)
            yield True
        if hasattr(self._store, "prepare"):  # kvtiers.tiers.store.SupportsPrepare
            with suppress(Exception):  # the first request meets and reports it
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
        """Make the store before anybody waits for it. If that fails, a request will hear why."""
        if self._config["memory_bytes_max"] is not None:
            for module in self._config["imports"]:  # before: numpy's threads take what the number of cores needs
                importlib.import_module(module)
            limit_memory(self._config["memory_bytes_max"])
        try:
            self._open()
        except Exception:  # noqa: BLE001 - the next request raises it again, and reports it
            pass

    def serve(self, sock: socket.socket, request: Any, raw: memoryview) -> None:
        operation, arguments, bounce_bytes = request
        if operation == "keys":
            for page in self._pages(*arguments):
                if not _send_answer(sock, page):
                    return
            return
        n_outcomes = len(arguments) if operation == "get" else 1
        answer: tuple[object, object]
        back = b""
        try:
            self._open()
        except Exception as e:  # noqa: BLE001 - a process's edge: whatever it was, the caller must hear of it
            answer = None, [encode_error(e)] * n_outcomes
        else:
            if bounce_bytes:
                with mmap.mmap(self._config["bounce_fd"], bounce_bytes) as bounce:
                    answer, _ = self._answer(operation, arguments, memoryview(bounce))
            else:
                answer, back = self._answer(operation, arguments, raw)
        _send_answer(sock, answer, back, n_outcomes)

    def _open(self) -> None:
        if self._store is None:
            self._store = make_store(self._config)

    def _answer(self, operation: str, arguments: Any, outside: memoryview) -> tuple[tuple[object, object], bytes]:
        store = self._store
        if operation == "get":
            return self._get(arguments, outside)
        if operation == "describe":
            extras = [name for name in OPTIONAL_METHODS if hasattr(store, name)]
            return ((asdict(store.capabilities), extras), [None]), b""
        try:
            if operation == "run":
                module, name, argument = arguments
                value = find_object(module, name)(store, self._region, argument, outside)
            elif operation == "put":
                ((key, overwrite, segments),) = arguments
                parts, _ = self._parts(segments, outside)
                value = store.put(key, parts, overwrite=overwrite)
            elif operation == "get_tail":
                size, tail = store.get_tail(*arguments) or (None, b"")
                return (size, [None]), tail
            else:
                value = getattr(self, f"_{operation}")(*arguments)
        except Exception as e:  # noqa: BLE001 - a process's edge: whatever it was, the caller must hear of it
            return (None, [encode_error(e)]), b""
        return (value, [None]), b""

    def _get(self, arguments: Any, outside: memoryview) -> tuple[tuple[object, object], bytes]:
        bounced = len(outside) > 0
        if not bounced:
            size = sum(length for _, segments in arguments for offset, length in segments if offset < 0)
            outside = memoryview(bytearray(size))
        rest = outside
        requests = []
        for key, segments in arguments:
            parts, rest = self._parts(segments, rest)
            requests.append((key, parts))
        if len(requests) > 1 and hasattr(self._store, "get_many_into"):
            try:
                many = self._store.get_many_into(requests)
                failures = [None if failure is None else encode_error(failure) for failure in many]
            except Exception as e:  # noqa: BLE001 - a process's edge: whatever it was, the caller must hear of it
                failures = [encode_error(e)] * len(requests)
        else:
            failures = [_outcome(self._store.get_into, key, parts) for key, parts in requests]
        return (None, failures), b"" if bounced else bytes(outside)

    def _parts(self, segments: Any, outside: memoryview) -> tuple[list[memoryview], memoryview]:
        parts = []
        for offset, length in segments:
            if offset >= 0:
                assert offset + length <= len(self._region), "a part must lie inside the region"
                parts.append(self._region[offset : offset + length])
            else:
                parts.append(outside[:length])
                outside = outside[length:]
        return parts, outside

    # ---- operations of one result ------------------------------------------------------------------------------------

    def _size_many(self, keys: list[str]) -> list[object]:
        if hasattr(self._store, "size_many"):
            return [encode_error(size) if isinstance(size, Exception) else size for size in self._store.size_many(keys)]
        return [_value_or_error(self._store.size, key) for key in keys]

    def _delete_many(self, keys: list[str]) -> list[object]:
        if hasattr(self._store, "delete_many"):
            return [None if failure is None else encode_error(failure) for failure in self._store.delete_many(keys)]
        return [_outcome(self._store.delete, key) for key in keys]

    def _quarantine(self, key: str) -> None:
        self._store.quarantine(key)

    def _folders(self) -> list[str]:
        return list(self._store.folders())

    def _first_page(self, prefix: str) -> list[tuple[str, int, float]] | None:
        """The whole listing if it fits a page, else None."""
        page = [(info.key, info.size, info.mtime) for info in islice(self._store.keys(prefix), LISTING_PAGE_KEYS + 1)]
        return page if len(page) <= LISTING_PAGE_KEYS else None

    def _pages(self, prefix: str) -> Iterator[tuple[object, object]]:
        try:
            self._open()
            listing = iter(self._store.keys(prefix))
            while page := [(info.key, info.size, info.mtime) for info in islice(listing, LISTING_PAGE_KEYS)]:
                yield page, [None]
        except Exception as e:  # noqa: BLE001 - a process's edge: whatever it was, the caller must hear of it
            yield None, [encode_error(e)]
        else:
            yield [], [None]


def _send_answer(sock: socket.socket, answer: tuple[object, object], raw: bytes = b"", n_outcomes: int = 1) -> bool:
    """Send an answer. False: it cannot be sent, and the reason was sent in its place."""
    try:
        send_frame(sock, answer, raw)
    except (TypeError, ValueError) as e:  # nothing was sent: the whole frame is made before
        send_frame(sock, (None, [encode_error(e)] * n_outcomes))
        return False
    return True


def _outcome(call: Callable[..., object], *arguments: Any) -> list[str] | None:
    try:
        call(*arguments)
    except Exception as e:  # noqa: BLE001 - a process's edge: whatever it was, the caller must hear of it
        return encode_error(e)
    return None


def _value_or_error(call: Callable[[str], object], key: str) -> object:
    try:
        return call(key)
    except Exception as e:  # noqa: BLE001 - a process's edge: whatever it was, the caller must hear of it
        return encode_error(e)
