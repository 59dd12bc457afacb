"""DirectReader: receives objects from the socket straight into the slot.

obstore returns new bytes objects, which costs one more copy from freshly allocated memory. This module takes half of
obstore's CPU time for an object of 4 KiB as for one of 1 MiB.

The usual response is an object of the expected size. Its headers are recognized in the first bytes that arrive, because
http.client takes 0.1 ms to parse headers, and all threads contend for the GIL at each return to Python. http.client
handles every other response.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import io
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlsplit

from ...errors import BlobCorruptError, StoreUnavailableError
from ...store import Look, parts_size
from ..vectored_io import look_at, runs, transfer
from ..watchdog import Watchdog
from .errors import (
    NO_S3,
    connection_error,
    deadline_error,
    missing_header,
    server_error,
    tls_error,
)
from .options import IDLE_S_MAX
from .session import S3Session
from .tls import make_context

ERROR_BYTES_MAX: Final = 64 << 10
PIECE_BYTES: Final = 512 << 10  # size of the pieces that ``look`` sees
FIRST_BYTES: Final = 16 << 10  # of a TLS record. http.client gets responses with longer headers; S3's are under 1 KiB

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?=\r\n)")
_SPECIAL = re.compile(rb"\r\n(?:transfer-encoding|connection:(?![ \t]*keep-alive[ \t]*\r\n))")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_NO_BODY: Final = hashlib.sha256().hexdigest()


class DirectReader:
    """Makes one attempt at a GET from the endpoint itself, without a proxy. Any thread may call.

    ``_idle`` is a stack of idle connections, each with the time at which it became idle; its operations are atomic.

    An attempt ends after ``attempt_timeout_s``, unless a name server hangs: the resolver has its own limit.
    """

    def __init__(self, session: S3Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._options = session.options
        self._clock = clock
        parts = urlsplit(session.endpoint_url)
        bucket = self._options.bucket
        subdomain, folder = (f"{bucket}.", "") if session.virtual_host else ("", f"/{bucket}")
        self._folder = f"{parts.path.rstrip('/')}{folder}/"
        self._name = subdomain + (parts.hostname or "")
        usual_port = 443 if parts.scheme == "https" else 80
        self._port = parts.port or usual_port
        self._tls = make_context(session.ca_path) if parts.scheme == "https" else None
        # The same header as the other clients send: a proxy may rewrite it, and the signature covers it.
        host = f"[{self._name}]" if ":" in self._name else self._name
        self._signer = ReadSigner(host if self._port == usual_port else f"{host}:{self._port}", session.region)
        self._idle = deque[tuple[socket.socket, float]]()
        self._closed = False
        self._watchdog = Watchdog(self._options.attempt_timeout_s, clock)

    def get_into(self, key: str, parts: Sequence[memoryview], size: int, look: Look | None = None) -> None:
        """See ``DataPlane``."""
        signed_by = self._session.credentials()
        path = self._folder + quote(key, safe="/-._~")
        request = self._signer.get(
            path, signed_by["access_key_id"], signed_by["secret_access_key"], signed_by.get("token")
        )
        deadline = self._clock() + self._options.attempt_timeout_s
        while True:
            reused = self._pop_idle()
            shaken = reused is not None
            sock = reused or self._dial()
            try:
                with self._watchdog.guard(partial(_shut, sock), deadline):
                    if reused is None and isinstance(sock, ssl.SSLSocket):
                        sock.do_handshake()
                    shaken = True
                    sock.sendall(request)
                    keeps = self._receive(sock, parts, size, look)
            except (OSError, http.client.HTTPException, ValueError) as e:
                sock.close()
                if self._clock() >= deadline:
                    if reused is not None:  # a NAT or load balancer may have dropped all idle connections
                        self._close_idle()
                    raise deadline_error(self._options.attempt_timeout_s, self._session.place) from None
                if isinstance(e, ssl.SSLError) and not shaken:
                    raise tls_error(str(e), self._session.place) from None
                if reused is None:
                    raise connection_error(self._session.place) from None
            except BaseException:
                sock.close()
                raise
            else:
                # After the guard has ended: our watchdog must not end the next user's request.
                if keeps and not self._closed:
                    self._idle.append((sock, self._clock()))
                else:
                    sock.close()
                return

    def close(self) -> None:
        """Close idle connections and end the watchdog."""
        self._closed = True
        self._watchdog.close()
        self._close_idle()

    def _receive(self, sock: socket.socket, parts: Sequence[memoryview], size: int, look: Look | None) -> bool:
        """Fill the parts. Returns whether the connection can be reused."""
        first = sock.recv(FIRST_BYTES)
        unread = _Unread(sock, first)
        pieces = [(0, parts)] if look is None else runs(parts, PIECE_BYTES)
        if head_bytes := _head_of_object(first, size):
            unread.first = unread.first[head_bytes:]
            for offset, run in pieces:
                if transfer(unread.readinto_many, -1, run) < parts_size(run):
                    raise http.client.IncompleteRead(b"")
                if look is not None:
                    look_at(look, offset, run)
            return not unread.first
        response = http.client.HTTPResponse(unread, method="GET")  # type: ignore[arg-type] # it calls makefile only
        with contextlib.closing(response):
            response.begin()
            if response.status >= http.HTTPStatus.MULTIPLE_CHOICES:
                code = _CODE.search(response.read(ERROR_BYTES_MAX))
                location = response.getheader("Location", "")
                raise server_error(
                    response.status, code[1].decode() if code else "", place=self._session.place, location=location
                )
            if response.status != http.HTTPStatus.OK:
                raise StoreUnavailableError(f"{NO_S3.format(self._session.endpoint_url)} (HTTP {response.status})")
            if response.length is None:
                raise missing_header("Content-Length", self._session.place)
            if response.length != size:
                if response.getheader("ETag") is None:  # a web page with status 200, not from S3
                    raise missing_header("ETag", self._session.place)
                raise BlobCorruptError(f"{response.length} bytes are stored, {size} were asked for")
            for offset, run in pieces:
                for piece in run:
                    fill(response, piece)
                if look is not None:
                    look_at(look, offset, run)
            return not response.will_close

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    def _pop_idle(self) -> socket.socket | None:
        oldest = self._clock() - IDLE_S_MAX
        with contextlib.suppress(IndexError):  # another thread took it
            while self._idle[0][1] < oldest:
                self._idle.popleft()[0].close()
            while True:
                sock, idle_since = self._idle.pop()
                if idle_since < oldest:
                    sock.close()
                    continue
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                if not poll.poll(0):
                    return sock
                sock.close()  # readable while idle: the server has closed it
        return None

    def _dial(self) -> socket.socket:
        within_s = self._options.connect_timeout_s
        with contextlib.suppress(OSError, ValueError):  # ValueError: the name is too long for IDNA
            addresses = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in addresses:
                with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as undo:
                    sock = undo.enter_context(socket.socket(family, kind, protocol))
                    sock.settimeout(within_s / len(addresses))
                    sock.connect(address)
                    sock.settimeout(None)  # from here the watchdog ends late requests
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    # A request with a session token is two packets, and Nagle's algorithm would make the second wait
                    # for an ACK.
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self._tls is not None:
                        # A host name to resolve may end with a dot; a name in a certificate may not (RFC 6066, 3).
                        name = self._name.rstrip(".")
                        sock = self._tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
                    undo.pop_all()
                    return sock
        raise connection_error(self._session.place)


def _head_of_object(first: bytes, size: int) -> int:
    """Size of the headers if they announce an object of ``size``. 0: another response, or incomplete headers."""
    head_bytes = first.find(b"\r\n\r\n") + 4
    head = first[:head_bytes].lower()
    if not head.startswith(b"http/1.1 200 ") or _SPECIAL.search(head) or _LENGTH.findall(head) != [b"%d" % size]:
        return 0
    return head_bytes


class _Unread(io.RawIOBase):
    """What is still to be read of a response: its ``first`` bytes, already received, and the rest from the socket."""

    def __init__(self, sock: socket.socket, first: bytes) -> None:
        self.first = memoryview(first)
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)

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


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the request completed at this very moment
        # Not SSLSocket.shutdown, which ends decryption first: the reader would take encrypted bytes for plain ones.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class ReadSigner:
    """Signs GETs with AWS Signature Version 4; botocore's 0.1 ms of Python would matter here. Any thread may call.

    It follows "Create a signed AWS API request" in the AWS IAM User Guide. It is short because our GETs have no query
    and no body, S3 does not normalize paths, and a signing key is valid for a day.

    Args:
        host: value of the Host header.
        region: the bucket's region.
        clock: returns seconds since 1970.
    """

    def __init__(self, host: str, region: str, *, clock: Callable[[], float] = time.time) -> None:
        self._host = host
        self._region = region
        self._clock = clock
        self._key = ("", "", b"")  # date, secret and their signing key; replaced as a whole

    def get(self, path: str, access_key: str, secret_key: str, token: str | None) -> bytes:
        """Make a GET's request line and headers.

        Args:
            path: percent-encoded, as sent.
            access_key, token: of printable ASCII characters, as ``BotoConfig.check`` ensures.
        """
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock()))
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        headers = f"host:{self._host}\nx-amz-content-sha256:{_NO_BODY}\nx-amz-date:{now}\n"
        names = "host;x-amz-content-sha256;x-amz-date"
        if token:
            headers += f"x-amz-security-token:{token}\n"
            names += ";x-amz-security-token"
        canonical = f"GET\n{path}\n\n{headers}\n{names}\n{_NO_BODY}"
        to_sign = f"{_ALGORITHM}\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._signing_key(now[:8], secret_key), to_sign.encode(), "sha256").hex()
        lines = (
            f"GET {path} HTTP/1.1",
            *headers.splitlines(),
            "user-agent:kvtiers",
            f"authorization:{_ALGORITHM} Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}",
        )
        return "\r\n".join((*lines, "\r\n")).encode()

    def _signing_key(self, date: str, secret_key: str) -> bytes:
        known_date, known_secret, key = self._key
        if (known_date, known_secret) != (date, secret_key):
            key = f"AWS4{secret_key}".encode()
            for scope in (date, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, scope.encode(), "sha256")
            self._key = date, secret_key, key
        return key
