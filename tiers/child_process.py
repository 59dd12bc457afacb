"""A child process of the engine: its start, its connection to the engine, and its end.

A thread in a system call on a hung mount can be neither cancelled nor abandoned, because it may still write into the
slot that it fills. A process can be killed, and once it is reaped, it cannot touch memory any more.

A child holds a pidfd of the engine's process and ends with it, even if a fork of the engine keeps the socket open.
A process that a library forks inside the child ends as soon as the library returns, or is killed with the child's
process group.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from .blocks.keyring import KEY_VARIABLES
from .frames import RECEIVE_BYTES, TAG_BYTES, FrameReader
from .loaded_code import OWN_CODE
from .plain_logs import get_logger
from .processes import (
    STDERR,
    environment_without,
    kill_group,
    log_to_stderr,
    occupy_standard_streams,
    own_log_level,
    python_command,
)

logger = get_logger(__name__)

_CONFIG_BYTES_MAX: Final = 1 << 24


# ---- in the engine ---------------------------------------------------------------------------------------------------


class ChildProcess:
    """A child process; see ``tiers.connections.Handle``. Only ``start`` may block.

    A separate thread reaps the process, because reaping may wait in the kernel: 1.6 s were measured after a process was
    killed in a hung call, 7 s on a busy machine.

    Attributes:
        sock: the engine's end of the connection.
        tag: tag of the connection's frames.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, tag: bytes) -> None:
        self._process = process
        self.pid = process.pid
        self.sock = sock
        self.tag = tag
        self._ending = threading.Lock()  # held to kill and to reap, so that no other group is killed
        self._is_reaping = False

    @classmethod
    def start(cls, module: str, config: Mapping[str, Any], fds: Sequence[int] = ()) -> ChildProcess:
        """Start a process. Reads the interpreter from its disk, which may block.

        Args:
            module: a module whose ``main`` calls ``connect_to_engine``.
            config: the config that ``connect_to_engine`` returns, as JSON. It is not passed on the command line, where
                other users could read keys.
            fds: descriptors that the process gets, with the same numbers.

        Raises:
            OSError: no process can be started.
            RuntimeError: this package was replaced on disk.
        """
        OWN_CODE.check()
        tag = os.urandom(TAG_BYTES)
        text = json.dumps({**config, "tag": tag.hex(), "log_level": own_log_level()}).encode()
        occupy_standard_streams()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                parent = os.pidfd_open(os.getpid())
                try:
                    # If this process was started without stderr, descriptor 2 may be any file by now.
                    output = subprocess.DEVNULL if sys.__stderr__ is None else STDERR
                    process = subprocess.Popen(
                        python_command(module, str(theirs.fileno()), str(parent)),
                        pass_fds=[theirs.fileno(), parent, *fds],
                        stdin=subprocess.DEVNULL,
                        stdout=output,  # output of libraries must not mix with the engine's output
                        stderr=output,
                        env=environment_without(KEY_VARIABLES),
                        # Not a new session: with autogroups, the kernel would give the process a whole session's share
                        # of the CPU.
                        process_group=0,
                    )
                finally:
                    os.close(parent)
            with suppress(ConnectionError):  # the process has died, which the first read will show
                ours.sendall(len(text).to_bytes(4, "big") + text)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return cls(process, ours, tag)

    def kill(self) -> bool:
        """Kill the process and all processes that it has started. Always returns True."""
        if self._ending.acquire(blocking=False):  # otherwise the process has ended and is being reaped
            try:
                kill_group(self._process)
            finally:
                self._ending.release()
        self._begin_reaping()
        return True

    def has_ended(self) -> bool:
        """Whether the process has ended and is reaped, after ``kill`` or ``close``."""
        self._begin_reaping()
        return self._process.returncode is not None

    def close(self) -> None:
        """Shut the connection down, even if a fork of this process holds the socket. The child then ends."""
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
            logger.debug("process %d is not reaped yet: %s", self.pid, e)

    def _reap(self) -> None:
        """Wait for the process's end, kill the processes that it has started, and reap it."""
        with suppress(ChildProcessError):  # other code has reaped the process
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            kill_group(self._process)
            self._process.wait()


# ---- in the child ----------------------------------------------------------------------------------------------------


def connect_to_engine(name: str, niceness: int) -> tuple[socket.socket, bytes, int, Any]:
    """Take up the connection to the engine. A child calls this first.

    Args:
        name: of the process, in its log lines.
        niceness: added to the engine's niceness.

    Returns:
        The socket, the tag of its frames, a pidfd that is readable when the engine's process has ended, and the config.
    """
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    # The engine handles Ctrl-C and signals that systemd sends to a whole service, because it has stores to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(niceness)
    for each in (fd, parent):
        os.set_inheritable(each, False)  # programs that a library runs must not inherit the socket
    sock = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=sock.close)  # otherwise the engine would not see this process's end
    config = json.loads(_receive(sock, int.from_bytes(_receive(sock, 4), "big")))
    log_to_stderr(name, config["log_level"])
    return sock, bytes.fromhex(config["tag"]), parent, config


def _receive(sock: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < min(count, _CONFIG_BYTES_MAX):
        if not (part := sock.recv(count - len(received))):
            os._exit(0)  # the engine is gone
        received += part
    return received


def receive(
    sock: socket.socket, tag: bytes, ends: Iterable[int] = (), idle_s: Callable[[], float | None] = lambda: None
) -> Iterator[Iterator[tuple[Any, bytes]]]:
    """Yield batches of received frames until the other end hangs up, or a descriptor in ``ends`` is readable.

    Args:
        idle_s: after this time without frames, yield an empty batch; None: wait.

    Raises:
        EOFError: the bytes are not frames.
        OSError: the connection is broken.
    """
    reader = FrameReader(tag)
    poll = select.poll()  # select() accepts no descriptor beyond 1023, and engines have many
    for fd in (sock.fileno(), *ends):
        poll.register(fd, select.POLLIN)
    while True:
        received = b""
        wait_s = idle_s()
        for fd, _ in poll.poll(None if wait_s is None else 1000 * wait_s):
            if fd != sock.fileno() or not (received := sock.recv(RECEIVE_BYTES)):
                return
        yield reader.feed(received)
