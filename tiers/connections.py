"""Connections: the engine's end of the connections to its children. It has no thread and no lock, and does no I/O.

A child is a process, or threads where no process can do the work. Both ends send frames (``tiers.frames``).
Everything is read and written by ``poll``, without blocking. A child that has ended, or was killed because it hangs, is
reaped, and started again after a pause that grows if it does not live long.
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

PAUSE_S: Final = (0.05, 30.0)  # before a child is started again: at first, and at most
LIVED_S: Final = 10.0  # a child that lived longer is started again without a longer pause
CHECK_S: Final = 0.01  # between checks of deadlines, at most: a step of the scheduler polls several times


class Handle(Protocol):
    """A child that runs.

    Attributes:
        sock: the engine's end of the connection.
        tag: of the connection's frames.
    """

    sock: socket.socket
    tag: bytes

    @property
    def pid(self) -> int | None:
        """The process; None: threads of this one."""

    def kill(self) -> bool:
        """End it at once. False: it cannot be ended."""

    def has_ended(self) -> bool:
        """Whether nothing of it can touch a slot any more."""

    def close(self) -> None:
        """Hang up. It ends when its threads do."""


@dataclass(slots=True, eq=False, kw_only=True)
class Child:
    """A child, and those that replace it.

    Attributes:
        start: starts it. May block. Raises OSError, RuntimeError or KVTiersError.
    """

    start: Callable[[], Handle]
    handle: Handle | None = None
    reader: FrameReader | None = None
    out: bytearray = field(default_factory=bytearray)
    is_full: bool = False  # its socket, when it was last written to
    started_at: float = -math.inf
    spoke_at: float | None = None  # when it first said something; None: it has not yet
    heard_at: float = -math.inf  # when it, or the one before it, last said something
    pause_s: float = PAUSE_S[0]
    start_at: float | None = None  # when to start it again; None: it runs, ends, is being started or is not needed
    ending: str = ""  # why it was killed; it is not reaped yet

    @property
    def runs(self) -> bool:
        """Whether it can be told something."""
        return self.handle is not None and not self.ending


C = TypeVar("C", bound=Child)


class Connections(ABC, Generic[C]):
    """The connections of one owner, which is a subclass. The scheduler's thread calls all methods.

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
        """Handle one frame. Any exception means that the child cannot be understood; it is killed."""

    @abstractmethod
    def _end_if_late(self, child: C, now: float) -> None:
        """Kill a child that runs if it has been silent for too long. Called every ``CHECK_S`` at most."""

    @abstractmethod
    def _lost(self, child: C, why: str) -> None:
        """Note that a child has ended, and can touch nothing any more, or that it could not be started."""

    @property
    def pids(self) -> list[int]:
        """Process IDs of the children."""
        return [child.handle.pid for child in self._children if child.handle is not None and child.handle.pid]

    def poll(self) -> None:
        """Send what waits, read what has come, and replace children that hang or have ended. Does not wait.

        Called several times in each step of the scheduler, so without news it is one system call.
        """
        if os.getpid() != self._pid:
            return  # this is a fork, and the messages are for its parent
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
        """``poll``, after waiting until something comes or time is over."""
        self._sockets.poll(1000 * min(timeout_s, 0.05))
        self._check_at = -math.inf
        self.poll()

    def descriptors(self) -> list[int]:
        """Of the sockets that ``poll`` reads."""
        return list(self._by_fd)

    def _write(self, child: C, content: Sequence[object], raw: bytes = b"") -> None:
        if child.handle is not None and not child.ending and os.getpid() == self._pid:
            child.out += pack_frame(child.handle.tag, content, raw)
            self._flush(child)

    def _end(self, child: C, why: str) -> None:
        """Kill a child that hangs, or cannot be understood, or has ended."""
        assert child.handle is not None
        if child.handle.kill():
            self.kills += 1
            self._stop_listening(child)
            child.ending = why
            child.out.clear()
            self._reap(child)

    def _hang_up(self, children: Iterable[C], timeout_s: float) -> bool:
        """Start nothing any more, hang up on these children, and wait for their end. Returns True if no child is left.

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
            child.out.clear()  # it has died, which the next read shows
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
        except Exception as e:  # noqa: BLE001 - a process's edge: whatever it sends, only its own work may fail
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
        """Before its socket is closed: another file may get the number of its descriptor."""
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
        """Start a child in a thread that ends with it: it reads the interpreter from its disk, which may hang."""
        child.start_at = None

        def start() -> None:
            try:
                self._started.put((child, child.start()))
            except BaseException as e:  # noqa: BLE001 - a thread's edge: it is tried again
                self._started.put((child, e))
            if self._closing:  # perhaps nobody polls any more
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
