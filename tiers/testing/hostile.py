"""Hostile HTTP responses that use up a client's memory or time. Each of them has killed an engine.

No server sends them by mistake. ``HttpFaultServer`` accepts them like a ``Fault``. They are a separate enum, because
only clients with limits on memory and time can be tested with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

DRIP_S: Final = 0.05  # pause between two bytes: shorter than any socket timeout
HUGE_BYTES: Final = (1 << 63) - 1
PIECE_BYTES: Final = 3 << 16


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


_STATUS: Final = b"HTTP/1.1 %d Answer\r\n"
_HEADERS: Final = b'ETag: "e"\r\nLast-Modified: Thu, 26 Nov 2026 00:00:00 GMT\r\nContent-Type: application/xml\r\n'
_HUGE_BODY: Final = _STATUS + _HEADERS + b"Content-Length: %d\r\n\r\n<" % HUGE_BYTES
_CHUNKED: Final = _STATUS + _HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
_CHUNK: Final = b"%x\r\n%b\r\n" % (PIECE_BYTES, b"<a>" * (PIECE_BYTES // 3))

#: fault -> the beginning of its response, and the piece that is then sent again and again
_ANSWERS: Mapping[Hostile, tuple[bytes, bytes]] = {
    Hostile.HUGE_LENGTH: (_HUGE_BODY % 200, b"x"),
    Hostile.HUGE_LENGTH_404: (_HUGE_BODY % 404, b"x"),
    Hostile.ENDLESS_BODY: (_CHUNKED % 200, _CHUNK),
    Hostile.ENDLESS_BODY_404: (_CHUNKED % 404, _CHUNK),
    Hostile.ENDLESS_BODY_503: (_CHUNKED % 503, _CHUNK),
    Hostile.ENDLESS_CHUNK_SIZE: (_CHUNKED % 200, b"1" * PIECE_BYTES),
    Hostile.ENDLESS_CONTINUE: (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    Hostile.ENDLESS_HEADERS: (_STATUS % 200, b"x-header: value\r\n" * 1000),
    Hostile.ENDLESS_HEADER: (_STATUS % 200 + b"x-header: ", b"v" * PIECE_BYTES),
    Hostile.DRIPPING_HEADERS: (_STATUS % 200, b"x"),
}


def send_hostile(fault: Hostile, send: Callable[[bytes], object], stopping: threading.Event) -> None:
    """Send a hostile response until ``stopping`` is set or the client disconnects (``send`` raises OSError)."""
    beginning, piece = _ANSWERS[fault]
    send(beginning)
    while not stopping.wait(DRIP_S if len(piece) == 1 else 0):
        send(piece)
