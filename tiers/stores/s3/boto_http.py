"""BoundedHttp: a deadline and a memory limit for every request of boto3's clients.

botocore's timeouts are per socket call, and it reads a response of any length into memory. A server could hold a
request forever with endless ``100 Continue`` responses or one header byte per second, or fill all memory with an
endless error document. Here a watchdog shuts the request's socket at the deadline, at any point from the TLS handshake
to the last byte of the response. A response that is too long is an error. An object is received into memory, too, if
its reader has declared a maximum size.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final

import botocore.session
from botocore import exceptions as boto_errors
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
)
from urllib3.exceptions import HTTPError

from ..watchdog import Watchdog
from .tls import set_trust

#: A page of a listing holds 1,000 URL-encoded names of at most 3 KiB each, plus half a KiB per name. Parsing can take
#: 100 times that memory if elements are nested.
ANSWER_BYTES_MAX: Final = 4 << 20
ERROR_BYTES_MAX: Final = 64 << 10
PIECE_BYTES: Final = 64 << 10


class AnswerTooLongError(boto_errors.HTTPClientError):  # type: ignore[misc]
    """The response is longer than any response from S3."""

    fmt = "The response of {endpoint_url} is longer than {bytes_max} bytes"


class BoundedHttp:
    """Bounds the requests of one S3Session's clients. Any thread may call; ``_call`` is thread-local.

    Args:
        timeout_s: limit of one client call with all its requests: boto3 follows a redirect to another region.
        clock: returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.watchdog = Watchdog(timeout_s, clock)
        self._timeout_s = timeout_s
        self._call = threading.local()

    def bound(self, client: Any) -> Any:
        """Bound a client's requests and return the client.

        Raises:
            AttributeError: the internals of this botocore version are different.
        """
        endpoint = client._endpoint
        endpoint.http_session._pool_classes_by_scheme.update(_POOLS)
        _trust_alike(endpoint.http_session)
        endpoint.http_session = _BoundedSession(endpoint.http_session, self)
        client.meta.events.register("before-call", self._begin_call)
        return client

    @contextlib.contextmanager
    def room_for(self, bytes_max: int) -> Iterator[None]:
        """Let responses to the calling thread have up to ``bytes_max`` bytes."""
        self._call.bytes_max = bytes_max
        try:
            yield
        finally:
            del self._call.bytes_max

    def bytes_max(self) -> int:
        """Maximum length of a successful response to the calling thread."""
        return int(getattr(self._call, "bytes_max", ANSWER_BYTES_MAX))

    def deadline(self) -> float:
        """The time by which the calling thread's current call must end."""
        return float(getattr(self._call, "deadline", self.clock() + self._timeout_s))

    def close(self) -> None:
        """End the watchdog as soon as no request is in progress."""
        self.watchdog.close()

    def _begin_call(self, model: Any, **_: Any) -> None:
        if model.name != "HeadBucket":  # botocore makes this request within a call, to find the bucket's region
            self._call.deadline = self.clock() + self._timeout_s


def _trust_alike(http_session: Any) -> None:
    """Make a client's connections follow the rule in ``tls``, including later connections through a proxy."""
    make = http_session._get_ssl_context

    def make_trusting() -> ssl.SSLContext:
        context: ssl.SSLContext = make()
        set_trust(context)
        return context

    http_session._get_ssl_context = make_trusting
    set_trust(http_session._manager.connection_pool_kw["ssl_context"])


class BoundedBotocoreSession(botocore.session.Session):  # type: ignore[misc]
    """A session whose clients are bounded, including the STS and SSO clients of its credential chain."""

    def __init__(self, http: BoundedHttp, **options: Any) -> None:
        super().__init__(**options)
        self._http = http

    def create_client(self, *args: Any, **kwargs: Any) -> Any:
        """See botocore."""
        return self._http.bound(super().create_client(*args, **kwargs))


class _BoundedSession:
    """Replaces a client's URLLib3Session."""

    def __init__(self, inner: Any, http: BoundedHttp) -> None:
        self._inner = inner
        self._http = http

    def send(self, request: Any) -> AWSResponse:
        """Send a request and receive its response.

        Raises:
            botocore's exceptions, including ReadTimeoutError at the deadline and AnswerTooLongError.
        """
        deadline = self._http.deadline()
        streams, request.stream_output = request.stream_output, True  # otherwise botocore reads a body of any size
        try:
            with _exchange() as exchange, self._http.watchdog.guard(exchange.end, deadline):
                answer = self._inner.send(request)
                is_error = answer.status_code >= HTTPStatus.MULTIPLE_CHOICES
                bytes_max = ERROR_BYTES_MAX if is_error else self._http.bytes_max()
                if streams and int(answer.headers.get("content-length", 0)) > bytes_max:
                    answer.raw.close()
                    answer.raw = _Received()  # the caller of ``room_for`` sees the header
                else:
                    answer.raw = _receive(answer, request, bytes_max)
        except boto_errors.BotoCoreError:
            self._raise_if_late(request, deadline)
            raise
        finally:
            request.stream_output = streams
        self._raise_if_late(request, deadline)  # a body cut off by the watchdog may look complete
        return answer

    def _raise_if_late(self, request: Any, deadline: float) -> None:
        if self._http.clock() >= deadline:
            raise boto_errors.ReadTimeoutError(endpoint_url=request.url) from None

    def close(self) -> None:
        """Close idle connections."""
        self._inner.close()


class _Received(io.BytesIO):
    """A received body in the form that AWSResponse reads."""

    def stream(self) -> Iterator[bytes]:
        yield self.read()


def _receive(answer: AWSResponse, request: Any, bytes_max: int) -> _Received:
    received = _Received()
    try:
        while piece := answer.raw.read(PIECE_BYTES):
            received.write(piece)
            if received.tell() > bytes_max:
                answer.raw.close()
                raise AnswerTooLongError(endpoint_url=request.url, bytes_max=bytes_max)
    except (HTTPError, HTTPException, OSError, ValueError) as e:
        answer.raw.close()
        raise boto_errors.ConnectionClosedError(error=e, request=request, endpoint_url=request.url) from None
    received.seek(0)
    return received


class _Exchange:
    """A request in progress. Any thread may call ``end``, which shuts its socket, including a socket opened later."""

    def __init__(self) -> None:
        self._ended = False
        self._twin: socket.socket | None = None

    def use(self, sock: Any) -> None:
        """Keep a duplicate of the socket: a TLS handshake moves the original descriptor to another object."""
        self.close()
        self._twin = socket.socket(fileno=os.dup(sock.fileno()))
        if self._ended:  # read after ``_twin`` is set; ``end`` sets and reads them in the other order
            self.end()

    def end(self) -> None:
        self._ended = True
        twin = self._twin
        if twin is not None:
            with contextlib.suppress(OSError):  # the server has closed the connection
                twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicate of the socket."""
        twin, self._twin = self._twin, None
        if twin is not None:
            twin.close()


class _UnderWay(threading.local):
    """The calling thread's current request."""

    exchange: _Exchange | None = None


_under_way = _UnderWay()


@contextlib.contextmanager
def _exchange() -> Iterator[_Exchange]:
    exchange = _Exchange()
    before, _under_way.exchange = _under_way.exchange, exchange
    try:
        yield exchange
    finally:
        _under_way.exchange = before
        exchange.close()


class _Watched:
    """A connection that reports its socket to the thread's ``_Exchange``."""

    sock: Any

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc]
        _watch(sock)
        return sock

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:
            _watch(self.sock)
        super().request(*args, **kwargs)  # type: ignore[misc]


def _watch(sock: Any) -> None:
    if _under_way.exchange is not None:
        _under_way.exchange.use(sock)


class _PlainConnection(_Watched, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Watched, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _PlainPool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _PlainConnection


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


_POOLS: Final = {"http": _PlainPool, "https": _TlsPool}
