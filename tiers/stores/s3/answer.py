"""Answer: one HTTP response, read from the socket straight into the caller's memory.

The usual response has one Content-Length. Its headers are recognized in the first bytes that arrive, because
http.client takes 0.1 ms to parse headers, and all threads contend for the GIL at each return to Python. http.client
handles every other response.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

from ...store import parts_size
from ..vectored_io import transfer

FIRST_BYTES: Final = 16 << 10  # of a TLS record. http.client gets responses with longer headers; S3's are under 1 KiB

_USUAL = re.compile(rb"http/1\.1 ([2-5]\d\d) ", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,19})[ \t]*(?=\r\n)")
_SPECIAL = re.compile(rb"\r\n(?:transfer-encoding|connection:(?![ \t]*keep-alive[ \t]*\r\n))")


class Answer:
    """The response to one request. The constructor receives its headers; one thread uses it.

    Attributes:
        status: HTTP status, 200 or more.
        announced: Content-Length; None: the server sent none.

    Raises:
        OSError: the connection broke.
        http.client.HTTPException: this is not HTTP.
        ValueError: a header is not what it should be.
    """

    def __init__(self, sock: socket.socket, method: str) -> None:
        self._unread = _Unread(sock, sock.recv(FIRST_BYTES))
        self._response: http.client.HTTPResponse | None = None
        self._head = _usual_head(self._unread.first)
        if self._head:
            self._unread.skip(len(self._head) + 2)
            self.status = int(self._head[9:12])
            has_none = self.status == http.HTTPStatus.NO_CONTENT
            self.announced: int | None = 0 if has_none else int(self.header("content-length"))
            self._left = 0 if method == "HEAD" else self.announced
            return
        self._response = http.client.HTTPResponse(self._unread, method=method)  # type: ignore[arg-type] # only makefile
        self._response.begin()
        self.status = self._response.status
        self.announced = self._response.length
        if method == "HEAD":  # http.client says that its body has 0 bytes
            length = self.header("content-length")
            self.announced = int(length) if length else None

    def header(self, name: str) -> str:
        """A header's value; "" if it is absent."""
        if self._response is not None:
            return self._response.getheader(name, "")
        found = re.search(rb"\r\n%b:[ \t]*([^\r\n]*)" % name.encode(), self._head, re.IGNORECASE)
        return found[1].decode("iso-8859-1").rstrip() if found else ""

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Receive the next bytes of the body, as many as the parts hold.

        Raises:
            http.client.IncompleteRead: the body ended early.
        """
        if self._response is not None:
            for part in parts:
                fill(self._response, part)
            return
        size = parts_size(parts)
        if size > self._left or transfer(self._unread.readinto_many, -1, parts, size=size) < size:
            raise http.client.IncompleteRead(b"")
        self._left -= size

    def read(self, bytes_max: int) -> bytes:
        """Receive the rest of the body, at most ``bytes_max``."""
        if self._response is not None:
            return self._response.read(bytes_max)
        body = bytearray(min(self._left, bytes_max))
        if body:
            self.fill([memoryview(body)])
        return bytes(body)

    @property
    def is_complete(self) -> bool:
        """Whether all of it was received, so that the connection is ready for the next request."""
        if self._response is None:
            return self._left == 0 and not self._unread.first
        return not self._response.will_close and (self._response.isclosed() or self._response.length == 0)


def _usual_head(first: memoryview) -> bytes:
    """The usual response's first line and headers; empty: another response, or its headers are incomplete."""
    head, end, _ = bytes(first).partition(b"\r\n\r\n")
    head += b"\r\n"
    low = head.lower()
    if not end or not low.startswith(b"http/1.1 ") or _SPECIAL.search(low):
        return b""
    lengths = 0 if low.startswith(b"http/1.1 204 ") else 1
    return head if len(_LENGTH.findall(low)) == lengths else b""


class _Unread(io.RawIOBase):
    """What is still to be read of a response: its ``first`` bytes, already received, and the rest from the socket."""

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
        self.first = self.first[count:]
        return count

    def readinto_many(self, _: int, parts: Sequence[memoryview], done: int) -> int:  # noqa: ARG002 - as os.preadv
        """Fill some of the parts; returns the number of bytes, 0 at the end."""
        if self.first or self._is_tls:
            return self.readinto(parts[0])
        return self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - http.client calls it, as of a socket
        return io.BufferedReader(self)


def fill(response: http.client.HTTPResponse, part: memoryview) -> None:
    """Receive a whole part of a body.

    Raises:
        http.client.IncompleteRead: the body ended early.
    """
    while part:
        count = response.readinto(part)
        if not count:
            raise http.client.IncompleteRead(b"", len(part))
        part = part[count:]
