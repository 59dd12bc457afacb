"""DirectReader: objects received from the socket straight into the slot, where they are so large that a copy counts.

obstore hands out bytes of its own: one more copy, from memory that is new with each object. At 16 MiB that is a third
of the CPU, half of it under TLS. Here http.client's ``readinto`` fills the slot, and botocore signs the headers (45 us;
obstore could presign the URL in 9, but a bucket's policy may refuse that).

What is neither an object nor an error, such as a redirect, is left to obstore.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.httpsession import get_cert_path

from tiers.errors import BlobCorruptError
from tiers.stores.s3_errors import connection_error, deadline_error, server_error
from tiers.stores.s3_session import S3Session
from tiers.stores.watchdog import Watchdog

ERROR_BYTES_MAX: Final = 64 << 10

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")


class DirectReader:
    """One attempt at one GET. Any thread may call; ``_idle`` is a stack whose operations are atomic.

    All of it ends after ``attempt_timeout_s``, but for a name server that does not answer: the resolver has its own
    time for that.
    """

    def __init__(self, session: S3Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._options = session.options
        self._clock = clock
        parts = urlsplit(session.endpoint_url)
        bucket = self._options.bucket
        self._host = f"{bucket}.{parts.netloc}" if session.virtual_host else parts.netloc
        self._folder = parts.path.rstrip("/") + ("/" if session.virtual_host else f"/{bucket}/")
        self._scheme = parts.scheme
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = _tls_context(session) if parts.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False
        self._watchdog = Watchdog(self._options.attempt_timeout_s, clock)

    @staticmethod
    def usable(session: S3Session) -> bool:
        """Whether requests go to the endpoint itself, not through a proxy."""
        parts = urlsplit(session.endpoint_url)
        return not ({parts.scheme, "all"} & getproxies().keys()) or bool(proxy_bypass(parts.hostname or ""))

    def get_into(self, key: str, parts: Sequence[memoryview], size: int) -> bool:
        """Fill the parts, ``size`` bytes together. No byte is written before the server has announced that size.

        Returns:
            False if the server redirects or does not say how large the object is: no byte was written.

        Raises:
            StoreError: as ``DataPlane``'s.
        """
        path = self._folder + quote(key, safe="/-._~")
        headers = self._sign(path)
        deadline = self._clock() + self._options.attempt_timeout_s
        while True:
            reused = self._pop_idle()
            connection = reused or self._dial()
            sock = connection.sock  # which the connection forgets where the server says that it will close
            try:
                with self._watchdog.guard(partial(_shut, sock), deadline):
                    if reused is None and isinstance(sock, ssl.SSLSocket):
                        sock.do_handshake()
                    connection.request("GET", path, headers=headers)
                    filled, keeps = self._receive(connection.getresponse(), parts, size)
            except (OSError, http.client.HTTPException, ValueError):
                connection.close()
                if self._clock() >= deadline:
                    raise deadline_error(self._options.attempt_timeout_s, self._session.place) from None
                if reused is None:
                    raise connection_error(self._session.place) from None
            except BaseException:
                connection.close()
                raise
            else:
                # Only now: who takes it next must not be ended by our watchdog.
                if keeps and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.close()
                return filled

    def close(self) -> None:
        """Close idle connections and end the watchdog."""
        self._closed = True
        self._watchdog.close()
        while self._idle:
            self._idle.pop().close()

    def _receive(self, response: http.client.HTTPResponse, parts: Sequence[memoryview], size: int) -> tuple[bool, bool]:
        """Whether the parts are filled, and whether the connection can be used again."""
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            code = _CODE.search(response.read(ERROR_BYTES_MAX))
            raise server_error(response.status, code[1].decode() if code else "", place=self._session.place)
        if response.status != http.HTTPStatus.OK or response.length is None:
            return False, False
        if response.length != size:
            raise BlobCorruptError(f"{response.length} bytes are stored, {size} were asked for")
        for part in parts:
            _fill(response, part)
        response.close()
        return True, not response.will_close

    def _sign(self, path: str) -> dict[str, str]:
        found = self._session.credentials()
        headers = {"Host": self._host, "User-Agent": "kvtiers"}
        request = AWSRequest("GET", f"{self._scheme}://{self._host}{path}", headers)
        credentials = ReadOnlyCredentials(found["access_key_id"], found["secret_access_key"], found.get("token"))
        S3SigV4Auth(credentials, "s3", self._session.region).add_auth(request)
        return dict(request.headers.items())

    def _pop_idle(self) -> http.client.HTTPConnection | None:
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                if not poll.poll(0):
                    return connection
                connection.close()  # by the server
        return None

    def _dial(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host)
        try:
            addresses = socket.getaddrinfo(connection.host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            addresses = []
        for family, kind, protocol, _, address in addresses:
            connection.sock = socket.socket(family, kind, protocol)
            within_s = min(self._options.connect_timeout_s, self._options.attempt_timeout_s)
            connection.sock.settimeout(within_s / len(addresses))
            try:
                connection.sock.connect(address)
            except OSError:
                connection.sock.close()
                continue
            connection.sock.settimeout(None)  # from here on the watchdog sees to that
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A request with a session token is two packets; Nagle's algorithm would hold the second back for an ACK.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection.sock = self._tls.wrap_socket(
                    connection.sock, server_hostname=connection.host, do_handshake_on_connect=False
                )
            return connection
        raise connection_error(self._session.place)


def _tls_context(session: S3Session) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=session.ca_path or get_cert_path(True))
    if not session.options.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _fill(response: http.client.HTTPResponse, part: memoryview) -> None:
    while part:
        count = response.readinto(part)
        if not count:
            raise http.client.IncompleteRead(b"", len(part))
        part = part[count:]


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was complete at that very moment
        # Not SSLSocket's own: it ends decryption first, and the reader would take what is left for its plain bytes.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
