"""Answer: one HTTP response, read from the socket straight into the caller's memory.

The usual response has a Content-Length and keeps the connection. Its headers are recognized in the first bytes that
arrive, because http.client takes 0.1 ms to parse headers, and all threads contend for the GIL at each return to Python.
http.client handles every other response.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

from ...store import parts_size
from ..vectored_io import transfer

FIRST_BYTES: Final = 16 << 10  # size of a TLS record; http.client gets responses with longer headers

_STATUS = re.compile(rb"http/1\.1 ([2-5][0-9][0-9]) ")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,19})[ \t]*(?=\r\n)")
_SPECIAL = re.compile(rb"\r\n(?:transfer-encoding|connection:(?![ \t]*keep-alive[ \t]*\r\n))")


class Answer:
    """The response to one request. The constructor receives its headers; one thread uses it.

    Args:
        first: bytes of the response that were already received.

    Attributes:
        status: HTTP status, 200 or more.
        announced: Content-Length; None: the server sent none.

    Raises:
        OSError: the connection broke.
        http.client.HTTPException: this is not HTTP.
        ValueError: a header has an invalid value.
    """

    def __init__(self, sock: socket.socket, method: str, first: bytes = b"") -> None:
        first = first or sock.recv(FIRST_BYTES)
        self._unread = _Unread(sock, first)
        self._response: http.client.HTTPResponse | None = None
        self._head = first[: first.find(b"\r\n\r\n") + 2]
        self._lower = self._head.lower()
        status, lengths = _STATUS.match(self._lower), _LENGTH.findall(self._lower)
        if len(set(lengths)) > 1:
            raise http.client.HTTPException("two lengths")
        has_length = len(lengths) == 1 or (not lengths and status is not None and status[1] == b"204")
        self.announced: int | None
        if status is not None and has_length and not _SPECIAL.search(self._lower):
            self._unread.skip(len(self._head) + 2)
            self.status = int(status[1])
            self.announced = int(lengths[0]) if lengths else 0
            self._left = 0 if method == "HEAD" else self.announced
            return
        response = http.client.HTTPResponse(self._unread, method=method)  # type: ignore[arg-type] # it calls makefile
        response.begin()  # skips 100
        if response.status < http.HTTPStatus.OK:
            raise http.client.HTTPException("an unexpected interim response (1xx)")
        self._response = response
        self.status = response.status
        self.announced = response.length
        if method == "HEAD":  # http.client would say that its body has 0 bytes
            length = response.getheader("content-length")
            self.announced = int(length) if length else None

    def header(self, name: str) -> str:
        """A header's value; "" if it is absent.

        Args:
            name: in lower case.
        """
        if self._response is not None:
            return self._response.getheader(name, "")
        start = self._lower.find(f"\r\n{name}:".encode()) + len(name) + 3
        if start < len(name) + 3:
            return ""
        return self._head[start : self._head.index(b"\r\n", start)].decode("iso-8859-1").strip()

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Receive the next bytes of the body, as many as the parts hold.

        Raises:
            http.client.IncompleteRead: the body ended early.
        """
        size = parts_size(parts)
        response = self._response
        if response is not None:
            filled = transfer(lambda _, some, __: response.readinto(some[0]), -1, parts)
        else:
            filled = transfer(self._unread.readinto_many, -1, parts) if size <= self._left else 0
            self._left -= filled
        if filled < size:
            raise http.client.IncompleteRead(b"")

    def read(self, bytes_max: int) -> bytes:
        """Receive the rest of the body, at most ``bytes_max``. If the connection breaks, return the received part."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            if self._response is not None:
                return self._response.read(bytes_max)
            body = bytearray(min(self._left, bytes_max))
            self._left -= (count := transfer(self._unread.readinto_many, -1, [memoryview(body)]))
            return bytes(body[:count])
        return b""

    @property
    def is_complete(self) -> bool:
        """Whether the whole response was received, so that the connection is ready for the next request."""
        if self._response is None:
            return self._left == 0 and not self._unread.first
        return not self._response.will_close and (self._response.isclosed() or self._response.length == 0)


class _Unread(io.RawIOBase):
    """The unread part of a response: its ``first`` bytes, already received, and the rest from the socket."""

    def __init__(self, sock: socket.socket, first: bytes) -> None:
        self.first = memoryview(first)
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)

    def skip(self, count: int) -> None:
        """Drop some of the first bytes."""
        self.first = self.first[count:]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.first:
            return self._sock.recv_into(buffer)
        count = min(len(self.first), len(buffer))
        buffer[:count] = self.first[:count]
        self.skip(count)
        return count

    def readinto_many(self, _: int, parts: Sequence[memoryview], done: int) -> int:  # noqa: ARG002 - as os.preadv
        """Fill some of the parts; returns the number of bytes, 0 at the end."""
        if self.first or self._is_tls:
            return self.readinto(parts[0])
        return self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - http.client calls it, as of a socket
        return io.BufferedReader(self)
