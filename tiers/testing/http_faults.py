"""A small S3 server on loopback that misbehaves on request: what no real server does when a test asks it to.

It speaks the part of S3 that stores use (PUT with ``If-None-Match``, GET with ranges, HEAD, DELETE, batch delete,
ListObjectsV2, path and virtual-host style), keeps its objects in memory, checks no signatures and records every
request. ``inject`` makes requests fail in the ways of ``Fault``::

    with HttpFaultServer() as server:
        server.inject(Fault.SLOW_DOWN, methods=("GET",), times=2)

A proxy in front of a real server would not do: most of these faults are about what happens between the work and the
answer, which only the server itself can place.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE_KEYS = 1000
LORIS_INTERVAL_S = 0.02  # between two bytes: far below any read timeout
POLL_S = 0.05
SECRET_ECHO = "canonical-request-with-x-amz-security-token"


class Fault(StrEnum):
    """A way to misbehave."""

    SLOW_DOWN = "slow_down"
    INTERNAL_ERROR = "internal_error"
    TOO_MANY_REQUESTS = "too_many_requests"
    NOT_IMPLEMENTED = "not_implemented"
    EXPIRED_TOKEN = "expired_token"
    CLOCK_SKEW = "clock_skew"
    ACCESS_DENIED = "access_denied"
    SIGNATURE = "signature"
    BUCKET_GONE = "bucket_gone"
    OTHER_REGION = "other_region"
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    QUOTA = "quota"
    HTML_WITH_200 = "html_with_200"
    RESET_BEFORE = "reset_before"
    STALL = "stall"
    LOST_ACK = "lost_ack"  # the work is done, the answer never comes
    REFUSE_CHECKSUM = "refuse_checksum"  # only requests that carry a checksum header
    IGNORE_RANGE = "ignore_range"  # a 200 with the whole object, as RFC 9110 allows
    # What follows spoils the body of a good GET.
    RESET_INSIDE = "reset_inside"
    TRUNCATED = "truncated"
    LONGER = "longer"
    FLIPPED = "flipped"
    FLIPPED_WITH_CHECKSUM = "flipped_with_checksum"
    NO_LENGTH = "no_length"
    SLOW_LORIS = "slow_loris"


_ERRORS: Mapping[Fault, tuple[int, str]] = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.INTERNAL_ERROR: (500, "InternalError"),
    Fault.TOO_MANY_REQUESTS: (429, "TooManyRequests"),
    Fault.NOT_IMPLEMENTED: (501, "NotImplemented"),
    Fault.EXPIRED_TOKEN: (400, "ExpiredToken"),
    Fault.CLOCK_SKEW: (403, "RequestTimeTooSkewed"),
    Fault.ACCESS_DENIED: (403, "AccessDenied"),
    Fault.SIGNATURE: (403, "SignatureDoesNotMatch"),
    Fault.BUCKET_GONE: (404, "NoSuchBucket"),
    Fault.OTHER_REGION: (301, "PermanentRedirect"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.PRECONDITION: (412, "PreconditionFailed"),
    Fault.QUOTA: (403, "QuotaExceeded"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request. Header names are in lower case."""

    method: str
    host: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    client_port: int


@dataclass(slots=True)
class _Rule:
    fault: Fault
    methods: Collection[str] | None
    path_contains: str
    times: int | None


@dataclass(slots=True)
class _Object:
    data: bytes
    mtime: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class HttpFaultServer:
    """The server, as a context manager. ``_lock`` owns the rules, the records and the objects.

    Args:
        buckets: that exist.
        ssl_context: serve https with it.
        region: of every bucket.
    """

    def __init__(
        self,
        *,
        buckets: Collection[str] = ("bucket",),
        ssl_context: ssl.SSLContext | None = None,
        region: str = "us-east-1",
    ) -> None:
        self.buckets = set(buckets)
        self.region = region
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []
        self._objects: dict[tuple[str, str], _Object] = {}
        self._under_way = 0
        self.most_under_way = 0
        self.stopping = threading.Event()
        self._server = _Server(self)
        if ssl_context is not None:
            self._server.socket = ssl_context.wrap_socket(self._server.socket, server_side=True)
        self._scheme = "http" if ssl_context is None else "https"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True)

    def __enter__(self) -> HttpFaultServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def endpoint_url(self) -> str:
        """Such as ``http://127.0.0.1:40001``."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def inject(
        self, fault: Fault, *, methods: Collection[str] | None = None, path_contains: str = "", times: int | None = None
    ) -> None:
        """Make the next ``times`` requests that fit fail; None: all of them, until ``heal``."""
        with self._lock:
            self._rules.append(_Rule(fault, methods, path_contains, times))

    def heal(self) -> None:
        """Drop every fault."""
        with self._lock:
            self._rules.clear()

    def requests(self, *methods: str) -> list[Request]:
        """The recorded requests, of these methods if any are given."""
        with self._lock:
            return [request for request in self._requests if not methods or request.method in methods]

    def get_object(self, bucket: str, key: str) -> bytes | None:
        """What is stored."""
        with self._lock:
            found = self._objects.get((bucket, key))
        return None if found is None else found.data

    def put_object(self, bucket: str, key: str, data: bytes) -> None:
        """Store behind the clients' back."""
        with self._lock:
            self._objects[bucket, key] = _Object(data)

    # -- for the handlers ------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Fault | None:
        """Record a request and take the first fault that fits."""
        with self._lock:
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
            self._requests.append(request)
            for rule in self._rules:
                if rule.times == 0 or (rule.methods is not None and request.method not in rule.methods):
                    continue
                if rule.path_contains not in request.path:
                    continue
                if rule.fault is Fault.REFUSE_CHECKSUM and not _checksum_headers(request.headers):
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule.fault
        return None

    def end(self) -> None:
        """A request is about to be answered, or dropped."""
        with self._lock:
            self._under_way -= 1

    def edit(self, change: Callable[[dict[tuple[str, str], _Object]], Any]) -> Any:
        """Run ``change`` on the objects, alone."""
        with self._lock:
            return change(self._objects)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: HttpFaultServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)

    def shutdown_request(self, request: Any) -> None:
        # No shutdown(SHUT_WR) before close: with SO_LINGER 0 the close alone sends the reset.
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left in the middle is what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the requests are recorded."""

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        request = self._read_request()
        owner = self.server.owner
        fault = owner.begin(request)
        self._unanswered = True
        try:
            self._answer(request, fault)
        finally:
            self._end()

    def _end(self) -> None:
        if self._unanswered:
            self._unanswered = False
            self.server.owner.end()

    def _read_request(self) -> Request:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        return Request(
            method=self.command,
            host=self.headers.get("Host", ""),
            path=unquote(url.path),
            query={name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(length),
            client_port=self.client_address[1],
        )

    # -- faults ----------------------------------------------------------------------------------------------------

    def _answer(self, request: Request, fault: Fault | None) -> None:
        if fault is not None and fault in _ERRORS:
            self._send_error(*_ERRORS[fault])
        elif fault is Fault.REFUSE_CHECKSUM:
            self._send_error(400, "InvalidRequest")
        elif fault is Fault.HTML_WITH_200:
            self._send(
                200, b"<html><body>Please log in to the hotel's network</body></html>", {"Content-Type": "text/html"}
            )
        elif fault is Fault.RESET_BEFORE:
            self._reset()
        elif fault is Fault.STALL:
            self._wait_until_client_leaves()
        elif fault is Fault.LOST_ACK:
            self._serve(request, None, silent=True)
            self._reset()
        else:
            self._serve(request, fault)

    def _send_spoiled(self, data: bytes, headers: dict[str, str], fault: Fault) -> None:
        flipped = bytes([data[0] ^ 1]) + data[1:] if data else b"\x01"
        half = data[: len(data) // 2]
        if fault is Fault.LONGER:
            self._send(200, data + bytes(4096), headers)
        elif fault is Fault.FLIPPED:
            self._send(200, flipped, headers)
        elif fault is Fault.FLIPPED_WITH_CHECKSUM:
            digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
            self._send(200, flipped, {**headers, "x-amz-checksum-sha256": digest})
        elif fault is Fault.NO_LENGTH:
            self._head(200, {**headers, "Transfer-Encoding": "chunked"})
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self._head(200, {**headers, "Content-Length": str(len(data))})
            self.wfile.write(half)
            if fault is Fault.SLOW_LORIS:
                rest = data[len(half) : -1]  # the last byte never comes
                for i in range(len(rest)):
                    if self.server.owner.stopping.wait(LORIS_INTERVAL_S):
                        break
                    self.wfile.write(rest[i : i + 1])
            if fault is Fault.RESET_INSIDE:
                self._reset()
            self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _wait_until_client_leaves(self) -> None:
        self.close_connection = True
        self.connection.settimeout(POLL_S)
        while not self.server.owner.stopping.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    # -- S3 --------------------------------------------------------------------------------------------------------

    def _serve(self, request: Request, fault: Fault | None, *, silent: bool = False) -> None:
        send = _ignore if silent else self._send
        bucket, key = self._place(request)
        owner = self.server.owner
        if bucket not in owner.buckets:
            self._send_error(404, "NoSuchBucket")
        elif not key:
            self._serve_bucket(request, bucket, send)
        elif request.method == "PUT":
            create = request.headers.get("if-none-match") == "*"
            made = _Object(request.body)
            there = owner.edit(lambda objects: _insert(objects, (bucket, key), made, create=create))
            if silent:
                return
            if there is not made:
                self._send_error(412, "PreconditionFailed")
            else:
                self._send(200, b"", {"ETag": made.etag})
        elif request.method == "DELETE":
            owner.edit(lambda objects: objects.pop((bucket, key), None))
            send(204, b"", {})
        elif request.method in ("GET", "HEAD"):
            found = owner.edit(lambda objects: objects.get((bucket, key)))
            if found is None:
                self._send_error(404, "NoSuchKey")
            else:
                self._serve_object(request, found, fault)
        else:
            self._send_error(405, "MethodNotAllowed")

    def _serve_object(self, request: Request, found: _Object, fault: Fault | None) -> None:
        headers = {
            "ETag": found.etag,
            "Last-Modified": self.date_time_string(int(found.mtime)),
            "Accept-Ranges": "bytes",
        }
        size = len(found.data)
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if fault is Fault.IGNORE_RANGE:
            span, fault = None, None
        if span is None:
            if fault is not None:
                self._send_spoiled(found.data, headers, fault)
            else:
                self._send(200, found.data, headers)
            return
        first, last = span.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1 if first and last else size)
        if start >= end:
            self._send_error(416, "InvalidRange")
        else:
            self._send(206, found.data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _serve_bucket(self, request: Request, bucket: str, send: Callable[[int, bytes, dict[str, str]], None]) -> None:
        owner = self.server.owner
        region = {"x-amz-bucket-region": owner.region}
        if request.method == "HEAD":
            send(200, b"", region)
        elif request.method == "POST" and "delete" in request.query:
            keys = re.findall(r"<Key>(.*?)</Key>", request.body.decode())
            owner.edit(lambda objects: [objects.pop((bucket, _unescape(key)), None) for key in keys])
            send(200, _xml("DeleteResult", ""), {})
        elif request.method == "GET" and request.query.get("list-type") == "2":
            send(200, _list(owner, bucket, request.query), region)
        else:
            self._send_error(501, "NotImplemented")

    def _place(self, request: Request) -> tuple[str, str]:
        """Bucket and key, from bucket.host/key or from host/bucket/key."""
        path = request.path.removeprefix("/")
        first = request.host.partition(".")[0]
        if first in self.server.owner.buckets:
            return first, path
        bucket, _, key = path.partition("/")
        return bucket, key

    # -- answers ---------------------------------------------------------------------------------------------------

    def _send_error(self, status: int, code: str) -> None:
        # S3 echoes the canonical request, session token included, when a signature is wrong.
        body = _xml(
            "Error", f"<Code>{code}</Code><Message>injected</Message><CanonicalRequest>{SECRET_ECHO}</CanonicalRequest>"
        )
        headers = {"Content-Type": "application/xml"}
        if code == "PermanentRedirect":
            headers["x-amz-bucket-region"] = "eu-west-1"
        self._send(status, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self._end()  # before the client can send its next one
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _ignore(status: int, body: bytes, headers: dict[str, str]) -> None:
    """Do not answer."""


def _insert(objects: dict[tuple[str, str], _Object], place: tuple[str, str], made: _Object, *, create: bool) -> _Object:
    if create:
        return objects.setdefault(place, made)
    objects[place] = made
    return made


def _checksum_headers(headers: Mapping[str, str]) -> list[str]:
    return [name for name in headers if name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum"))]


def _list(owner: HttpFaultServer, bucket: str, query: Mapping[str, str]) -> bytes:
    prefix = query.get("prefix", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    page = min(PAGE_KEYS, int(query.get("max-keys", PAGE_KEYS)))
    found = owner.edit(
        lambda objects: sorted(
            (key.encode(), key, blob)
            for (place, key), blob in objects.items()
            if place == bucket and key.startswith(prefix) and key.encode() > after.encode()
        )
    )
    encode = quote if query.get("encoding-type") == "url" else escape
    more = found[page:]
    parts = [
        f"<Name>{bucket}</Name><IsTruncated>{'true' if more else 'false'}</IsTruncated>",
        f"<KeyCount>{len(found[:page])}</KeyCount>",
    ]
    if "encoding-type" in query:
        parts.append("<EncodingType>url</EncodingType>")
    if more:
        parts.append(f"<NextContinuationToken>{escape(found[page - 1][1])}</NextContinuationToken>")
    for _, key, blob in found[:page]:
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.mtime))
        parts.append(
            f"<Contents><Key>{encode(key)}</Key><LastModified>{date}</LastModified><ETag>{escape(blob.etag)}</ETag>"
            f"<Size>{len(blob.data)}</Size></Contents>"
        )
    return _xml("ListBucketResult", "".join(parts))


def _xml(tag: str, content: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{content}</{tag}>'.encode()


def _unescape(text: str) -> str:
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        text = text.replace(entity, char)
    return text
