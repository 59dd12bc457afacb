"""HttpFaultServer: a small S3 server on loopback that fails when a test asks it to, which no real server does.

``TinyS3`` executes the requests. The server around it records every request and injects faults::

    with HttpFaultServer() as server:
        server.inject(Fault.SLOW_DOWN, methods=("GET",), times=2)

A proxy in front of a real server would not be enough: most of these faults happen between the execution of a request
and its response, where only the server itself can inject them.
"""

from __future__ import annotations

import base64
import hashlib
import random
import socket
import ssl
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .hostile import Hostile, send_hostile
from .tiny_s3 import Answer, Request, TinyS3, error

LORIS_INTERVAL_S = 0.02  # pause between two bytes: much shorter than any read timeout
POLL_S = 0.05
LONGER_BYTES = 4096


class Fault(StrEnum):
    """A fault that the server can inject."""

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
    REDIRECT = "redirect"  # to https, as proxies do
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    QUOTA = "quota"
    HTML_WITH_200 = "html_with_200"
    RESET_BEFORE = "reset_before"
    STALL = "stall"
    LOST_ACK = "lost_ack"  # the request is executed, but the response never comes
    REFUSE_CHECKSUM = "refuse_checksum"  # rejects only requests with a checksum header
    REFUSE_CONDITION = "refuse_condition"  # rejects only requests with If-None-Match, as Backblaze B2 does
    REFUSE_UNSIGNED = "refuse_unsigned"  # rejects only requests whose payload is not signed, as a bucket policy may
    WANT_CHECKSUM = "want_checksum"  # rejects only PUTs without a checksum, as a bucket with default object lock does
    IGNORE_RANGE = "ignore_range"  # a 200 with the whole object, as RFC 9110 allows
    # The following faults damage only responses with an object's data; SLOW_LORIS affects every response with a body.
    RESET_INSIDE = "reset_inside"
    TRUNCATED = "truncated"
    LONGER = "longer"
    FLIPPED = "flipped"
    FLIPPED_WITH_CHECKSUM = "flipped_with_checksum"
    NO_LENGTH = "no_length"
    SLOW_LORIS = "slow_loris"


_INSTEAD: Mapping[Fault | Hostile, Answer] = {
    Fault.SLOW_DOWN: error(503, "SlowDown"),
    Fault.INTERNAL_ERROR: error(500, "InternalError"),
    Fault.TOO_MANY_REQUESTS: error(429, "TooManyRequests"),
    Fault.NOT_IMPLEMENTED: error(501, "NotImplemented"),
    Fault.EXPIRED_TOKEN: error(400, "ExpiredToken"),
    Fault.CLOCK_SKEW: error(403, "RequestTimeTooSkewed"),
    Fault.ACCESS_DENIED: error(403, "AccessDenied"),
    Fault.SIGNATURE: error(403, "SignatureDoesNotMatch"),
    Fault.BUCKET_GONE: error(404, "NoSuchBucket"),
    Fault.OTHER_REGION: error(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"}),
    Fault.REDIRECT: Answer(301, b"<html><hr></html>", {"Location": "https://127.0.0.1:9/bucket?session=1"}),
    Fault.CONFLICT: error(409, "ConditionalRequestConflict"),
    Fault.PRECONDITION: error(412, "PreconditionFailed"),
    Fault.QUOTA: error(403, "QuotaExceeded"),
    Fault.REFUSE_CHECKSUM: error(400, "InvalidRequest"),
    Fault.REFUSE_CONDITION: error(501, "NotImplemented"),
    Fault.REFUSE_UNSIGNED: error(403, "AccessDenied"),
    Fault.WANT_CHECKSUM: error(400, "InvalidRequest"),
    Fault.HTML_WITH_200: Answer(
        200, b"<html><body>Please log in to the hotel's network</body></html>", {"Content-Type": "text/html"}
    ),
}


@dataclass(slots=True)
class _Rule:
    fault: Fault | Hostile
    methods: Collection[str] | None
    path_contains: str
    times: int | None
    share: float

    def fits(self, request: Request) -> bool:
        return (
            self.times != 0
            and (self.methods is None or request.method in self.methods)
            and self.path_contains in request.path
            and _strikes(self.fault, request)
        )


def _strikes(fault: Fault | Hostile, request: Request) -> bool:
    """Whether a fault that depends on a request's headers affects this request; True for all other faults."""
    headers = request.headers
    proofs = [name for name in headers if name.startswith("x-amz-checksum-") or name == "content-md5"]
    if fault is Fault.REFUSE_CHECKSUM:
        return any("checksum" in name for name in headers)
    if fault is Fault.REFUSE_CONDITION:
        return "if-none-match" in headers
    if fault is Fault.REFUSE_UNSIGNED:
        return headers.get("x-amz-content-sha256") == "UNSIGNED-PAYLOAD"
    return fault is not Fault.WANT_CHECKSUM or (request.method == "PUT" and not proofs)


class HttpFaultServer:
    """The server, as a context manager. ``_lock`` owns the rules and the records.

    Args:
        buckets: names of the existing buckets.
        ssl_context: serve https with this context. None: http.
        region: region of every bucket.
        requests_max: maximum number of recorded requests, with their bodies; the oldest are dropped. None: no limit.

    Attributes:
        most_under_way: maximum number of requests that waited for their responses at the same time.
        struck: fault -> number of requests that it affected.
        answer_after_s: delay of each response, to simulate a distant server.
        answers: fault -> the response that is sent for it, for faults that replace the response; tests may change it.
        change_headers: called with the method and the headers of each response; returns the headers to send.
    """

    def __init__(
        self,
        *,
        buckets: Collection[str] = ("bucket",),
        ssl_context: ssl.SSLContext | None = None,
        region: str = "us-east-1",
        requests_max: int | None = None,
    ) -> None:
        self.s3 = TinyS3(buckets=buckets, region=region)
        self.stopping = threading.Event()
        self.answer_after_s = 0.0
        self.most_under_way = 0
        self.struck: Counter[Fault | Hostile] = Counter()
        self.answers: dict[Fault | Hostile, Answer] = {**_INSTEAD}
        self.change_headers: Callable[[str, dict[str, str]], dict[str, str]] = lambda _method, headers: headers
        self._random = random.Random(0)
        self._under_way = 0
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._requests: deque[Request] = deque(maxlen=requests_max)
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
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    @property
    def endpoint_url(self) -> str:
        """The server's URL, such as ``http://127.0.0.1:40001``."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def inject(
        self,
        fault: Fault | Hostile,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        times: int | None = None,
        share: float = 1.0,
    ) -> None:
        """Inject a fault into the next ``times`` matching requests. None: into all of them, until ``heal``.

        Args:
            share: probability from 0 to 1 with which each matching request is affected.
        """
        with self._lock:
            self._rules.append(_Rule(fault, methods, path_contains, times, share))

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._rules.clear()

    def requests(self, *methods: str) -> list[Request]:
        """Return the recorded requests; only those with the given methods, if any are given."""
        with self._lock:
            return [request for request in self._requests if not methods or request.method in methods]

    def get_object(self, bucket: str, key: str) -> bytes | None:
        """Return an object's data without a request; None if it does not exist."""
        return self.s3.get_object(bucket, key)

    def put_object(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object without a request."""
        self.s3.put_object(bucket, key, data)

    def begin(self, request: Request) -> Fault | Hostile | None:
        """For the handlers: record a request and return the first matching fault."""
        with self._lock:
            self._requests.append(request)
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
            fitting = (rule for rule in self._rules if rule.fits(request))
            rule = next((rule for rule in fitting if rule.share == 1 or self._random.random() < rule.share), None)
            if rule is None:
                return None
            if rule.times is not None:
                rule.times -= 1
            self.struck[rule.fault] += 1
            return rule.fault

    def end(self) -> None:
        """For the handlers: note that a request is about to be answered or dropped."""
        with self._lock:
            self._under_way -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: HttpFaultServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)

    def shutdown_request(self, request: Any) -> None:
        # No shutdown(SHUT_WR) before close: with SO_LINGER 0, the close alone sends the reset.
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that disconnect during a request are expected in these tests.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the requests are recorded."""

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

    def _read_request(self) -> Request:
        url = urlsplit(self.path)
        return Request(
            method=self.command,
            host=self.headers.get("Host", ""),
            path=unquote(url.path),
            query={name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            client_port=self.client_address[1],
        )

    def _answer(self, request: Request, fault: Fault | Hostile | None) -> None:
        self.server.owner.stopping.wait(self.server.owner.answer_after_s)
        if isinstance(fault, Hostile):
            self.close_connection = True
            send_hostile(fault, self.wfile.write, self.server.owner.stopping)
            return
        if fault is not None and fault in self.server.owner.answers:
            self._send(self.server.owner.answers[fault])
            return
        if fault is Fault.RESET_BEFORE:
            self._reset()
            return
        if fault is Fault.STALL:
            self._wait_until_client_leaves()
            return
        if fault is Fault.IGNORE_RANGE:
            headers = {name: value for name, value in request.headers.items() if name != "range"}
            request, fault = replace(request, headers=headers), None
        answer = self.server.owner.s3.answer(request)
        if fault is Fault.LOST_ACK:
            self._reset()
        elif fault is None or self.command == "HEAD" or not (answer.is_object or fault is Fault.SLOW_LORIS):
            self._send(answer)
        else:
            self._send_spoiled(answer, fault)

    def _send_spoiled(self, answer: Answer, fault: Fault) -> None:
        data = answer.body
        if fault is Fault.LONGER:
            self._send(replace(answer, body=data + bytes(LONGER_BYTES)))
        elif fault in (Fault.FLIPPED, Fault.FLIPPED_WITH_CHECKSUM):
            headers = dict(answer.headers)
            if fault is Fault.FLIPPED_WITH_CHECKSUM:
                headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(data).digest()).decode()
            self._send(replace(answer, body=bytes([data[0] ^ 1]) + data[1:], headers=headers))
        elif fault is Fault.NO_LENGTH:
            self._send_head(answer, {"Transfer-Encoding": "chunked"})
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self._send_half(answer, fault)

    def _send_half(self, answer: Answer, fault: Fault) -> None:
        data = answer.body
        half = len(data) // 2
        self._send_head(answer, {"Content-Length": str(len(data))})
        self.wfile.write(data[:half])
        if fault is Fault.SLOW_LORIS:
            for i in range(half, len(data) - 1):  # the last byte never comes
                if self.server.owner.stopping.wait(LORIS_INTERVAL_S):
                    break
                self.wfile.write(data[i : i + 1])
        if fault is Fault.RESET_INSIDE:
            self._reset()
        self.close_connection = True

    def _send(self, answer: Answer) -> None:
        self._send_head(answer, {"Content-Length": str(len(answer.body))})
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _send_head(self, answer: Answer, framing: Mapping[str, str]) -> None:
        self._end()  # before the client can send its next request
        self.send_response(answer.status)
        headers = self.server.owner.change_headers(self.command, {**answer.headers, **framing})
        if "Content-Length" in framing and "Content-Length" not in headers:
            self.close_connection = True  # without a length, only the end of the connection ends the body
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _end(self) -> None:
        if self._unanswered:
            self._unanswered = False
            self.server.owner.end()

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
