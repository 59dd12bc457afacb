"""Runs a tier's server in threads of the engine's process, if no other process can map the region.

The threads compete with the engine for the GIL, and cannot be killed. If the storage hangs, a job is reported only when
the storage answers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..blocks.rows import Rows
from ..frames import TAG_BYTES, Seats, Work
from ..store import Store
from .server import Server


class ServerThreads:
    """A running server in threads; see ``tiers.connections.Handle``."""

    pid = None

    def __init__(self, server: Server, sock: socket.socket, theirs: socket.socket, tag: bytes) -> None:
        self.sock = sock
        self.tag = tag
        self._server = server
        self._theirs = theirs
        server.say_alive()
        self._loop = threading.Thread(target=server.serve, name="kvtiers-server", daemon=True)
        self._loop.start()

    def kill(self) -> bool:
        """Threads cannot be killed."""
        return False

    def has_ended(self) -> bool:
        """Whether all threads of the server have ended."""
        if self._loop.is_alive() or not self._server.join(0.0):
            return False
        self._theirs.close()
        return True

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class ThreadBackend:
    """Starts a tier's only server in threads of this process.

    Args:
        store: closed when the server has ended.
        seats: threads of the server.
    """

    def __init__(
        self, store: Store, rows: Rows, work: Work, seats: Seats, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seats: Sequence[Seats] = (seats,)
        self.store = store
        self._rows = rows
        self._work = work
        self._clock = clock

    def start(self, seats: Seats) -> ServerThreads:
        """Start the server."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        tag = os.urandom(TAG_BYTES)
        server = Server(theirs, tag, lambda: self.store, self._rows, self._work, seats, clock=self._clock)
        return ServerThreads(server, ours, theirs, tag)

    def close(self) -> None:
        """Close the store."""
        self.store.close()
