"""A server in a process of its own: how the engine's half starts and ends it, and the process's ``main``.

A thread in a system call on a hung mount can be neither cancelled nor abandoned: it may still write into the slot that
it reads into. A process can be killed, and once it is reaped, it cannot touch memory any more.

The process is a fresh interpreter: a fork of a process with threads copies locks that no thread will release. It ends
with the engine's process, of which it holds a pidfd, even if a fork of the engine keeps the socket open. What a library
forks in it can neither answer nor write into the region: the region is not mapped in forks, and a fork ends when it
returns from the library, or at the latest with the process, which is killed with its process group.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any, Final

from ..blocks.file_mapper import FileMapper
from ..blocks.keyring import KEY_VARIABLES
from ..blocks.rows import Rows
from ..blocks.seal import Seal
from ..frames import TAG_BYTES, Seats, Work
from ..loaded_code import OWN_CODE
from ..plain_logs import get_logger
from ..processes import (
    STDERR,
    environment_without,
    kill_group,
    limit_memory,
    log_to_stderr,
    occupy_standard_streams,
    own_log_level,
    python_command,
)
from ..recipe import StoreRecipe, make_store
from .mapped_file import MappedRegion
from .server import Server

logger = get_logger(__name__)

NICENESS: Final = 10  # below the engine: without it, its threads were found to wake up 2.7 ms late instead of 1.75
CLOSE_S: Final = 1.0  # for the store's own close
_CONFIG_BYTES_MAX: Final = 1 << 24
_OUT_OF_MEMORY_STATUS: Final = 3
_MADV_POPULATE_WRITE: Final = 23  # not in the mmap module
_TOUCH_BYTES: Final = 64 << 20  # takes a millisecond or two, for which a request may have to wait


class ServerProcess:
    """A server's process, seen from the engine. No method but ``start`` blocks.

    A thread of its own reaps it, because reaping may wait in the kernel: 1.6 s were measured after a process was killed
    in a hung call, 7 s on a busy machine.

    Attributes:
        sock: the engine's end of the connection.
        tag: of the connection's frames.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, tag: bytes) -> None:
        self.process = process
        self.sock = sock
        self.tag = tag
        self._ending = threading.Lock()  # held to kill the group and to reap, so that no other group is killed
        self._is_reaping = False

    @classmethod
    def start(
        cls,
        recipe: StoreRecipe,
        region: MappedRegion,
        row_bytes: int,
        work: Work,
        seats: Seats,
        memory_bytes_max: int | None,
    ) -> ServerProcess:
        """Start a process. Reads the interpreter from its disk, which may block.

        Raises:
            OSError: no process can be started.
            StoreConfigError: the recipe cannot be encoded.
        """
        OWN_CODE.check()
        tag = os.urandom(TAG_BYTES)
        config = {
            **recipe.encode(),
            "tag": tag.hex(),
            "tier": work.tier,
            "mapper": work.mapper.to_json(),
            "seal": work.seal.to_json(),
            "read_only": work.read_only,
            "seats": astuple(seats),
            "region": [region.fd, region.offset, region.length],
            "row_bytes": row_bytes,
            "memory_bytes_max": memory_bytes_max,
            "log_level": own_log_level(),
        }
        occupy_standard_streams()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                parent = os.pidfd_open(os.getpid())
                try:
                    # If this process was started without stderr, that descriptor may be any file by now.
                    output = subprocess.DEVNULL if sys.__stderr__ is None else STDERR
                    process = subprocess.Popen(
                        python_command("kvtiers.tiers.server.process", str(theirs.fileno()), str(parent)),
                        pass_fds=[theirs.fileno(), parent, region.fd],
                        stdin=subprocess.DEVNULL,
                        stdout=output,  # what a library prints must not mix with the engine's output
                        stderr=output,
                        env=environment_without(KEY_VARIABLES),
                        # Not a session of its own: with autogroups, the scheduler would give it the share of a session.
                        process_group=0,
                    )
                finally:
                    os.close(parent)
            text = json.dumps(config).encode()
            with suppress(ConnectionError):  # it is dead already, which the first read will show
                ours.sendall(len(text).to_bytes(4, "big") + text)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return cls(process, ours, tag)

    def kill(self) -> bool:
        """Kill the process and all processes that it has started. Returns True: it can be killed."""
        if self._ending.acquire(blocking=False):  # else it has ended, and is being reaped
            try:
                kill_group(self.process)
            finally:
                self._ending.release()
        self._begin_reaping()
        return True

    def has_ended(self) -> bool:
        """Whether the process has ended and is reaped, after ``kill`` or ``close``."""
        self._begin_reaping()
        return self.process.returncode is not None

    def close(self) -> None:
        """Hang up, even if a fork of this process holds the socket; the server then ends."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._begin_reaping()

    def _begin_reaping(self) -> None:
        if self._is_reaping:
            return
        try:
            threading.Thread(target=self._reap, name="kvtiers-reap", daemon=True).start()
            self._is_reaping = True
        except RuntimeError as e:  # no thread can be started now; ``has_ended`` tries again
            logger.debug("process %d is not reaped yet: %s", self.process.pid, e)

    def _reap(self) -> None:
        """Wait for the process's end, kill what it has started, and reap it."""
        with suppress(ChildProcessError):  # somebody else has reaped it
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            kill_group(self.process)
            self.process.wait()


class ProcessBackend:
    """Starts a tier's servers in processes.

    Args:
        recipe: how a process creates the store.
        region: the memory in which the slots lie.
        memory_bytes_max: memory that a process may allocate beyond what it has at its start; None: no limit. A process
            that exceeds the limit dies.
    """

    store: Final = None  # each process has its own

    def __init__(
        self,
        recipe: StoreRecipe,
        region: MappedRegion,
        row_bytes: int,
        work: Work,
        seats: Sequence[Seats],
        memory_bytes_max: int | None,
    ) -> None:
        self.seats = seats
        self._region = region
        self._start = partial(ServerProcess.start, recipe, region, row_bytes, work, memory_bytes_max=memory_bytes_max)

    def start(self, seats: Seats) -> ServerProcess:
        """See ``ServerProcess.start``."""
        return self._start(seats=seats)

    def close(self) -> None:
        """Close the region's descriptor."""
        self._region.close()


def main() -> None:
    """Serve a connection until it ends. Arguments: its descriptor, and a pidfd of the engine's process."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C, and signals that systemd sends to a whole service, are for the engine to handle: it has stores to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICENESS)
    for each in (fd, parent):
        os.set_inheritable(each, False)  # programs that a library runs must not get it
    sock = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=sock.close)  # or the engine would not see this process's end
    config = json.loads(_receive(sock, int.from_bytes(_receive(sock, 4), "big")))
    log_to_stderr("kvtiers-tier", config["log_level"])
    mapping, rows = _map(config)
    mapper, seal = FileMapper.from_json(config["mapper"]), seal_from_json(config["seal"])
    work = Work(config["tier"], mapper, seal, config["read_only"])
    if config["memory_bytes_max"] is not None:
        importlib.import_module(config["module"])  # before the limit: some libraries need memory for each core
        limit_memory(config["memory_bytes_max"])
    tag, seats = bytes.fromhex(config["tag"]), Seats(*config["seats"])
    give_up = partial(os._exit, _OUT_OF_MEMORY_STATUS)
    server = Server(sock, tag, partial(make_store, config), rows, work, seats, give_up=give_up)
    # Before the store is created, which may end this process: the engine would take that for a start that failed, and
    # create the store in its own process.
    server.say_alive()
    threading.Thread(target=_prepare, args=(server, mapping), name="kvtiers-prepare", daemon=True).start()
    server.serve([parent])
    threading.Thread(target=server.close_store, daemon=True).start()
    server.join(CLOSE_S)
    os._exit(0)  # threads may hang in calls


def _receive(sock: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < min(count, _CONFIG_BYTES_MAX):
        if not (part := sock.recv(count - len(received))):
            os._exit(0)  # the engine is gone
        received += part
    return received


def _map(config: Mapping[str, Any]) -> tuple[mmap.mmap, Rows]:
    fd, offset, length = config["region"]
    before = offset % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, before + length, offset=offset - before)
    mapping.madvise(mmap.MADV_DONTFORK)  # a fork may outlive this process, and slots are reused then
    _drop_descriptors(os.fstat(fd))
    row_bytes = config["row_bytes"]
    return mapping, Rows(memoryview(mapping)[before:].cast("B", (length // row_bytes, row_bytes)))


def _drop_descriptors(file: os.stat_result) -> None:
    """Redirect a file's descriptors to /dev/null. A mmap object keeps one, and a library could write to it."""
    with open(os.devnull, "r+b", buffering=0) as null:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own
                if os.path.samestat(os.fstat(int(name)), file):
                    os.dup2(null.fileno(), int(name), inheritable=False)


def _prepare(server: Server, mapping: mmap.mmap) -> None:
    """Do work that the first blocks would otherwise wait for.

    An S3 client takes 0.3 s. Page tables are filled in advance, which costs 0.2 % of the region's size in memory.
    Otherwise a page fault per page halves the speed of the first pass over the region.
    """
    server.prepare()
    for start in range(0, len(mapping), _TOUCH_BYTES):
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_TOUCH_BYTES, len(mapping) - start))
        except (OSError, ValueError):  # before Linux 5.14
            return
        time.sleep(0)


def seal_from_json(fields: dict[str, Any]) -> Seal:
    """The inverse of ``Seal.to_json``. Imports cryptography only if the seal has keys."""
    identity = bytes.fromhex(fields["fingerprint"]), fields["rank"]
    writer_id = bytes.fromhex(fields["writer_id"])
    if "keys" not in fields:
        return Seal(*identity, writer_id=writer_id)
    from ..blocks.protected_seal import GcmSeal

    keys = {number: bytes.fromhex(key) for number, key in fields["keys"]}
    return GcmSeal(*identity, keys=keys, writer_id=writer_id)
