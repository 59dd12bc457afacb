"""Connections: talks to the engine's children. It has no thread and no lock, and does not access storage.

A child is a process, or a group of threads if a process cannot do the work. Both ends send frames (``tiers.frames``).
``poll`` reads and writes all frames without blocking. A child that has ended, or was killed because it hangs, is reaped
and started again after a pause. The pause grows if children do not live long.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from .frames import RECEIVE_BYTES, FrameReader, pack_frame
from .plain_logs import get_logger

logger = get_logger(__name__)

PAUSE_S: Final = (0.05, 30.0)  # pause before a child is started again: the first, and the longest
LIVED_S: Final = 10.0  # a child that lived longer is started again after the first, shortest pause
CHECK_S: Final = 0.01  # between checks of deadlines, because a step of the scheduler polls several times


class Handle(Protocol):
    """A running child.

    Attributes:
        sock: the engine's end of the connection.
        tag: of the connection's frames.
    """

    sock: socket.socket
    tag: bytes

    @property
    def pid(self) -> int | None:
        """The child's process ID; None: the child is threads of this process."""

    def kill(self) -> bool:
        """End the child at once. False: it cannot be ended."""

    def has_ended(self) -> bool:
        """Whether the child has ended and cannot touch a slot any more."""

    def close(self) -> None:
        """Close the connection. The child ends when its threads end."""


@dataclass(slots=True, eq=False, kw_only=True)
class Child:
    """A child and its replacements.

    Attributes:
        start: starts the child. May block. Raises OSError, RuntimeError or KVTiersError.
    """

    start: Callable[[], Handle]
    handle: Handle | None = None
    reader: FrameReader | None = None
    out: bytearray = field(default_factory=bytearray)
    is_full: bool = False  # the socket did not take all of ``out``, so ``poll`` also waits until it can be written to
    started_at: float = -math.inf
    spoke_at: float | None = None  # time of its first frame; None: no frame yet
    heard_at: float = -math.inf  # time of the last frame of this child or its predecessor
    pause_s: float = PAUSE_S[0]
    start_at: float | None = None  # when to start it again; None: it runs, is ending or starting, or is not needed
    ending: str = ""  # why it was killed; set until it is reaped

    @property
    def runs(self) -> bool:
        """Whether frames can be sent to the child."""
        return self.handle is not None and not self.ending


C = TypeVar("C", bound=Child)


class Connections(ABC, Generic[C]):
    """Base class for the owner of some children. The scheduler's thread calls all methods.

    Args:
        name: the tier's name, for logs and thread names.
        clock: seconds, monotonic.
    """

    def __init__(self, name: str, children: Sequence[C], clock: Callable[[], float]) -> None:
        self._name = name
        self._children = children
        self._clock = clock
        self._pid = os.getpid()
        self._check_at = -math.inf
        self._sockets = select.poll()
        self._by_fd: dict[int, C] = {}
        self._started: SimpleQueue[tuple[C, Handle | BaseException]] = SimpleQueue()
        self._closing = False
        self.kills = 0
        """How many children were killed or found dead."""

    # ---- for the owner -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _begun(self, child: C) -> None:
        """Note that a child was started."""

    @abstractmethod
    def _hear(self, child: C, content: Any, raw: bytes) -> None:
        """Handle one frame. If it raises, the frame is invalid, and the child is killed."""

    @abstractmethod
    def _end_if_late(self, child: C, now: float) -> None:
        """Kill a running child if it has been silent for too long. Called at most every ``CHECK_S``."""

    @abstractmethod
    def _lost(self, child: C, why: str) -> None:
        """Note that a child has ended and touches no memory any more, or that it could not be started."""

    @property
    def pids(self) -> list[int]:
        """Process IDs of the children."""
        return [child.handle.pid for child in self._children if child.handle is not None and child.handle.pid]

    def poll(self) -> None:
        """Send and receive frames, and replace children that hang or have ended. Does not wait.

        Called several times in each step of the scheduler. Without news it makes only one system call.
        """
        if os.getpid() != self._pid:
            return  # this process is a fork, and the frames are for its parent
        now = self._clock()
        for fd, events in self._sockets.poll(0):
            child = self._by_fd[fd]
            if events & select.POLLOUT:
                self._flush(child)
            if events & ~select.POLLOUT:
                self._receive(child, now)
        if now >= self._check_at:
            self._check()

    def wait(self, timeout_s: float) -> None:
        """Wait until a frame comes, or for ``timeout_s`` at most; then ``poll``."""
        self._sockets.poll(1000 * min(timeout_s, 0.05))
        self._check_at = -math.inf
        self.poll()

    def descriptors(self) -> list[int]:
        """Descriptors of the sockets that ``poll`` reads."""
        return list(self._by_fd)

    def _write(self, child: C, content: Sequence[object], raw: bytes = b"") -> None:
        if child.handle is not None and not child.ending and os.getpid() == self._pid:
            child.out += pack_frame(child.handle.tag, content, raw)
            self._flush(child)

    def _end(self, child: C, why: str) -> None:
        """Kill a child that hangs, sent an invalid frame or has ended."""
        assert child.handle is not None
        if child.handle.kill():
            self.kills += 1
            self._stop_listening(child)
            child.ending = why
            child.out.clear()
            self._reap(child)

    def _hang_up(self, children: Iterable[C], timeout_s: float) -> bool:
        """Start no more children, close these children's connections, and wait. Returns True if all have ended.

        Children that have not ended after half of ``timeout_s`` are killed.
        """
        self._closing = True
        self._take_started()
        for child in children:
            if child.handle is not None:
                self._stop_listening(child)
                child.handle.close()
                child.ending = "shutdown"
        for _ in range(2):
            until = time.monotonic() + timeout_s / 2
            while hung := [child.handle for child in self._children if child.ending and not self._reap(child)]:
                if time.monotonic() >= until:
                    break
                time.sleep(0.002)
            for handle in hung:
                assert handle is not None
                handle.kill()
        return all(child.handle is None for child in self._children)

    # ---- frames ------------------------------------------------------------------------------------------------------

    def _flush(self, child: C) -> None:
        assert child.handle is not None
        sock = child.handle.sock
        try:
            while child.out:
                del child.out[: sock.send(child.out)]
        except BlockingIOError:
            pass
        except OSError:
            child.out.clear()  # the child has died, which the next read shows
        if bool(child.out) != child.is_full:
            child.is_full = not child.is_full
            self._sockets.register(sock, select.POLLIN | (select.POLLOUT if child.is_full else 0))

    def _receive(self, child: C, now: float) -> None:
        assert child.handle is not None
        assert child.reader is not None
        try:
            received = child.handle.sock.recv(RECEIVE_BYTES)
            if not received:
                raise EOFError("its process ended")
            child.heard_at = now
            if child.spoke_at is None:
                child.spoke_at = now
            for content, raw in child.reader.feed(received):
                self._hear(child, content, raw)
        except BlockingIOError:
            pass
        except Exception as e:  # noqa: BLE001 - a process's edge: bad frames may fail only the child's own work
            self._end(child, f"{e}" or type(e).__name__)

    # ---- starts and ends ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._take_started()
        now = self._clock()
        for child in self._children:
            if child.ending:
                self._reap(child)
            elif child.handle is not None:
                self._end_if_late(child, now)
            elif child.start_at is not None and now >= child.start_at and not self._closing:
                self._start_again(child)
        self._check_at = now + CHECK_S if all(child.runs for child in self._children) else -math.inf

    def _adopt(self, child: C, handle: Handle) -> None:
        child.handle = handle
        child.reader = FrameReader(handle.tag)
        child.started_at = self._clock()
        child.spoke_at = child.start_at = None
        child.is_full = False
        self._by_fd[handle.sock.fileno()] = child
        self._sockets.register(handle.sock, select.POLLIN)
        self._begun(child)

    def _stop_listening(self, child: C) -> None:
        """Stop polling a socket. Call it before the close, after which another file may get the descriptor's number."""
        assert child.handle is not None
        if self._by_fd.pop(child.handle.sock.fileno(), None) is not None:
            self._sockets.unregister(child.handle.sock)
        self._check_at = -math.inf

    def _reap(self, child: C) -> bool:
        """Note the end of a child that was killed or hung up on. False: it has not ended yet."""
        assert child.handle is not None
        if not child.handle.has_ended():
            return False
        why, child.ending = child.ending, ""
        child.handle.close()
        child.handle = child.reader = None
        lived = self._clock() - child.started_at > LIVED_S
        self._pause(child, PAUSE_S[0] if lived else 2 * child.pause_s)
        logger.debug("tier %s: a child ended: %s", self._name, why)
        self._lost(child, why)
        return True

    def _pause(self, child: C, pause_s: float) -> None:
        child.pause_s = min(PAUSE_S[1], pause_s)
        child.start_at = self._clock() + child.pause_s

    def _start_again(self, child: C) -> None:
        """Start a child in a separate thread, because reading the interpreter from its disk may hang."""
        child.start_at = None

        def start() -> None:
            try:
                self._started.put((child, child.start()))
            except BaseException as e:  # noqa: BLE001 - a thread's edge: the start is tried again
                self._started.put((child, e))
            if self._closing:  # perhaps ``poll`` is never called again
                self._take_started()

        try:
            threading.Thread(target=start, name=f"kvtiers-{self._name}-start", daemon=True).start()
        except RuntimeError:  # no thread can be started now
            child.start_at = self._clock() + PAUSE_S[1]

    def _take_started(self) -> None:
        while True:
            try:
                child, handle = self._started.get_nowait()
            except Empty:
                return
            if isinstance(handle, BaseException):
                self._pause(child, 2 * child.pause_s)
                self._lost(child, f"no process could be started: {handle}")
            elif self._closing:
                handle.kill()
                handle.close()
            else:
                self._adopt(child, handle)
