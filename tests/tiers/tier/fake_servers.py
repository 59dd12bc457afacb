"""Servers that a test plays: each is the other end of a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvtiers.tiers.blocks.batches import Batch
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.connections import Connections
from kvtiers.tiers.frames import TAG_BYTES, FrameReader, Seats, encode_batch, pack_frame, unpack_pairs

TIER = "test"


class FakeChild:
    """A child, and its handle in the engine.

    Attributes:
        kills, closes: how often the engine has done that.
        is_stuck: a kill does not end it, like a process in an uninterruptible system call.
        is_stopped: only a kill ends it.
        has_threads: it runs in threads, which cannot be killed.
    """

    pid = None

    def __init__(self, send_bytes: int | None = None) -> None:
        self.tag = os.urandom(TAG_BYTES)
        self.sock, self.theirs = socket.socketpair()
        if send_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self.sock.setblocking(False)
        self.theirs.setblocking(False)
        self.reader = FrameReader(self.tag)
        self.to_send = b""
        self.kills = self.closes = 0
        self.is_stuck = self.is_stopped = self.is_dead = self.has_threads = False

    # ---- the engine's side

    def kill(self) -> bool:
        if self.has_threads:
            return False
        self.kills += 1
        self.is_dead = self.is_dead or not self.is_stuck
        return True

    def has_ended(self) -> bool:
        return self.is_dead

    def close(self) -> None:
        self.closes += 1
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.is_dead = self.is_dead or not (self.is_stuck or self.is_stopped)

    # ---- the test's side

    def received(self, bytes_max: int = 1 << 20) -> list[tuple[Any, bytes]]:
        """The frames that the engine has sent since the last call."""
        if self.theirs.fileno() >= 0:
            with suppress(BlockingIOError, ConnectionError):
                return list(self.reader.feed(self.theirs.recv(bytes_max)))
        return []

    def send(self, data: bytes, bytes_max: int | None = None) -> bool:
        """Queue ``data`` and send at most ``bytes_max`` bytes. Returns whether the queue is empty."""
        self.to_send += data
        part = self.to_send if bytes_max is None else self.to_send[:bytes_max]
        with suppress(ConnectionError):
            assert self.theirs.send(part) == len(part)
        self.to_send = self.to_send[len(part) :]
        return not self.to_send

    def die(self) -> None:
        """End by itself."""
        self.is_dead = not self.is_stuck
        self.theirs.close()


class FakeServer(FakeChild):
    """A server.

    Attributes:
        asked: unanswered requests: number -> kind and keys, oldest first.
        cut: the reason of the last "cut".
        speaks: said at its start that it runs.
    """

    def __init__(self, seats: Seats, send_bytes: int | None, speaks: bool) -> None:
        super().__init__(send_bytes)
        self.seats = seats
        self.speaks = speaks
        self.asked: dict[int, tuple[str, list[OffloadKey]]] = {}
        self.frames: list[list[Any]] = []
        self.cut = ""
        if speaks:
            self.send(pack_frame(self.tag, ["alive"]))

    def read(self, bytes_max: int = 1 << 20) -> None:
        """Read what the engine has sent."""
        for content, raw in self.received(bytes_max):
            self.frames.append(content)
            kind, *arguments = content
            if kind == "cut":
                (self.cut,) = arguments
                continue
            assert arguments[0] not in self.asked
            self.asked[arguments[0]] = kind, [key for key, _ in unpack_pairs(raw)] if raw else []

    def answer(
        self, number: int, batch: Batch | None = None, found: Sequence[int] | None = None, error: Any = None
    ) -> bytes:
        """The frame that answers a request, by default with success."""
        kind, keys = self.asked.pop(number)
        if kind == "look":
            raw = bytes([1] * len(keys) if found is None else found)
            return pack_frame(self.tag, ["looked", number, []], raw)
        if kind == "open":
            capabilities = {"exclusive_create": True, "shared": True, "latency_bound": False}
            return pack_frame(self.tag, ["opened", number, None if error else capabilities, error])
        batch = batch or Batch(succeeded=list(keys), outcomes={"moved": len(keys)})  # type: ignore[arg-type]
        return pack_frame(self.tag, ["moved", number, encode_batch(batch, keys), []])

    def answer_all(self) -> None:
        """Read, and answer everything with success."""
        self.read()
        for number in list(self.asked):
            self.send(self.answer(number))


class FakeBackend:
    """Starts fake servers.

    Attributes:
        made: all servers, in the order of their starts.
        start_error: raised by starts.
        may_start: starts wait for it.
        speak: servers say at their start that they run.
    """

    store = None

    def __init__(self, seats: Sequence[Seats], send_bytes: int | None = None) -> None:
        self.seats = seats
        self.made: list[FakeServer] = []
        self.start_error: Exception | None = None
        self.may_start = threading.Event()
        self.may_start.set()
        self.is_closed = False
        self.speak = True
        self.starts = 0
        self._send_bytes = send_bytes

    def start(self, seats: Seats) -> FakeServer:
        self.starts += 1
        assert self.may_start.wait(120)
        if self.start_error is not None:
            raise self.start_error
        self.made.append(FakeServer(seats, self._send_bytes, self.speak))
        return self.made[-1]

    def close(self) -> None:
        self.is_closed = True

    def release(self) -> None:
        """Close all sockets."""
        for server in self.made:
            server.sock.close()
            server.theirs.close()


def settle(channel: Connections[Any]) -> None:
    """Poll until all sent frames are read and all starting servers have started. The clock does not move."""
    for _ in range(3):
        channel.poll()
        for thread in threading.enumerate():
            if thread.name == f"kvtiers-{TIER}-start":
                thread.join(120)
    channel.poll()
