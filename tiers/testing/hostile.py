"""Hostile HTTP responses that use up a client's memory or time. Each of them has killed an engine.

No server sends them by mistake. ``HttpFaultServer`` accepts them like a ``Fault``. They are a separate enum, because
only clients with limits on memory and time can be tested with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Final

DRIP_S: Final = 0.05  # pause between two bytes: shorter than any socket timeout
HUGE_BYTES: Final = (1 << 63) - 1


class Hostile(StrEnum):
    """A response that never ends."""

    HUGE_LENGTH = "huge_length"
    HUGE_LENGTH_404 = "huge_length_404"
    ENDLESS_BODY = "endless_body"
    ENDLESS_BODY_404 = "endless_body_404"
    ENDLESS_BODY_503 = "endless_body_503"
    ENDLESS_CHUNK_SIZE = "endless_chunk_size"
    ENDLESS_CONTINUE = "endless_continue"
    ENDLESS_HEADERS = "endless_headers"
    ENDLESS_HEADER = "endless_header"
    DRIPPING_HEADERS = "dripping_headers"


_PIECE: Final = b"<a>" * (64 << 10)

_STATUS: Final = b"HTTP/1.1 %d Answer\r\n"
_HEADERS: Final = b'ETag: "e"\r\nLast-Modified: Thu, 26 Nov 2026 00:00:00 GMT\r\nContent-Type: application/xml\r\n'


def _huge_length(status: int) -> Iterator[bytes]:
    yield _STATUS % status + _HEADERS + b"Content-Length: %d\r\n\r\n<" % HUGE_BYTES
    yield from _drip()


def _endless_body(status: int) -> Iterator[bytes]:
    yield _STATUS % status + _HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"%x\r\n%b\r\n" % (len(_PIECE), _PIECE)


def _endless_chunk_size() -> Iterator[bytes]:
    yield _STATUS % 200 + _HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1" * len(_PIECE)


def _endless_continue() -> Iterator[bytes]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 1000


def _endless_headers() -> Iterator[bytes]:
    yield _STATUS % 200
    while True:
        yield b"x-header: value\r\n" * 1000


def _endless_header() -> Iterator[bytes]:
    yield _STATUS % 200 + b"x-header: "
    while True:
        yield b"v" * len(_PIECE)


def _dripping_headers() -> Iterator[bytes]:
    yield _STATUS % 200
    yield from _drip()


def _drip() -> Iterator[bytes]:
    while True:
        yield b"x"


#: fault -> endless pieces of its response
_ANSWERS: Mapping[Hostile, Callable[[], Iterator[bytes]]] = {
    Hostile.HUGE_LENGTH: lambda: _huge_length(200),
    Hostile.HUGE_LENGTH_404: lambda: _huge_length(404),
    Hostile.ENDLESS_BODY: lambda: _endless_body(200),
    Hostile.ENDLESS_BODY_404: lambda: _endless_body(404),
    Hostile.ENDLESS_BODY_503: lambda: _endless_body(503),
    Hostile.ENDLESS_CHUNK_SIZE: _endless_chunk_size,
    Hostile.ENDLESS_CONTINUE: _endless_continue,
    Hostile.ENDLESS_HEADERS: _endless_headers,
    Hostile.ENDLESS_HEADER: _endless_header,
    Hostile.DRIPPING_HEADERS: _dripping_headers,
}


def send_hostile(fault: Hostile, send: Callable[[bytes], object], stopping: threading.Event) -> None:
    """Send a hostile response until ``stopping`` is set or the client disconnects (``send`` raises OSError)."""
    for piece in _ANSWERS[fault]():
        if stopping.wait(DRIP_S if len(piece) == 1 else 0):
            return
        send(piece)
