"""Connections: requests to the endpoint itself, without a proxy, each on a connection of a pool."""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from ..vectored_io import transfer
from ..watchdog import Watchdog
from .answer import FIRST_BYTES, Answer
from .errors import connection_error, deadline_error, tls_error
from .options import IDLE_S_MAX
from .polling import readable
from .session import S3Session
from .tls import make_context

T = TypeVar("T")

DIAL_S_MIN: Final = 0.001  # shortest timeout, because 0 would make the socket non-blocking
USUAL_PORTS: Final = {"http": 80, "https": 443}

_END: Final = re.compile(rb"\n\r?\n")  # longest headers of a response


class Connections:
    """Sends requests and receives their responses. Any thread may call.

    ``_idle`` is a stack of idle connections, each with the time at which it became idle; its operations are atomic.

    A request ends after ``attempt_timeout_s``, unless a name server hangs: the resolver has its own limit.

    Args:
        name: the server's host name or address.
    """

    def __init__(
        self, session: S3Session, name: str, port: int, *, is_tls: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = session.place
        self._options = session.options
        self._name = name
        self._port = port
        self._tls = make_context(session.ca_path) if is_tls else None
        self._clock = clock
        self._idle = deque[tuple[socket.socket, float]]()
        self._closed = False
        self._watchdog = Watchdog(self._options.attempt_timeout_s, clock)

    def exchange(
        self, method: str, head: bytes, receive: Callable[[Answer], T], *, body: Sequence[memoryview] = ()
    ) -> T:
        """Send a request and return the result of ``receive`` for the response.

        A connection that was used before may have been closed by the server in the meantime. Then the request is sent
        once more on a new connection. This is safe, because all requests of kvtiers are idempotent.

        Args:
            head: of the request.
            receive: reads the response. It may be called twice.

        Raises:
            StoreError: from ``receive``, or there was no response in time.
        """
        deadline = self._clock() + self._options.attempt_timeout_s
        reused = self._pop_idle(blocks=True)
        while True:
            sock = reused or self._dial(deadline)
            is_ready = reused is not None
            answer: Answer | None = None
            try:
                with self._watchdog.guard(partial(_shut, sock), deadline):
                    if not is_ready and isinstance(sock, ssl.SSLSocket):
                        sock.do_handshake()
                    is_ready = True
                    is_sent = _send(sock, [memoryview(head), *body])
                    answer = Answer(sock, method)
                    if not is_sent and answer.status < http.HTTPStatus.MULTIPLE_CHOICES:
                        raise ConnectionError
                    result = receive(answer)
            except (OSError, http.client.HTTPException, ValueError) as e:
                sock.close()
                if self._clock() >= deadline:
                    if reused is not None:  # a NAT or load balancer may have dropped all idle connections
                        self._close_idle()
                    raise deadline_error(self._options.attempt_timeout_s, self._place) from None
                if isinstance(e, ssl.SSLError) and not is_ready:
                    raise tls_error(str(e), self._place) from None
                if reused is None:
                    raise connection_error(self._place) from None
                reused = None
            except BaseException:
                self._put_back(sock, reusable=answer is not None and is_sent and _is_free(answer, method))
                raise
            else:
                self._put_back(sock, reusable=is_sent and _is_free(answer, method))
                return result

    async def ask(self, method: str, head: bytes, receive: Callable[[Answer], T]) -> T:
        """``exchange`` on an idle connection as a coroutine (see ``polling``), for requests and responses without body.

        Raises:
            OSError: no connection is idle, or it broke, or the response is unusual. ``exchange`` may succeed.
            StoreError: as ``exchange``.
        """
        sock = self._pop_idle(blocks=False)
        if sock is None:
            raise BlockingIOError
        deadline = self._clock() + self._options.attempt_timeout_s
        answer: Answer | None = None
        first = b""
        try:
            if sock.send(head) < len(head):
                raise ConnectionError  # an idle connection has room for more
            while not _END.search(first):
                if len(first) > FIRST_BYTES or self._clock() >= deadline:
                    raise ConnectionError
                await readable(sock, deadline)
                try:
                    some = sock.recv(FIRST_BYTES)
                except (BlockingIOError, ssl.SSLWantReadError):
                    continue  # the response is late, or a TLS record held no data
                if not some:
                    raise ConnectionError
                first += some
            answer = Answer(sock, method, first)
            result = receive(answer)
        except (OSError, http.client.HTTPException, ValueError):
            answer = None
            if self._clock() >= deadline:
                self._close_idle()  # see ``exchange``
                raise deadline_error(self._options.attempt_timeout_s, self._place) from None
            raise ConnectionError from None
        finally:
            self._put_back(sock, reusable=answer is not None and _is_free(answer, method))
        return result

    def close(self) -> None:
        """Close idle connections and end the watchdog."""
        self._closed = True
        self._watchdog.close()
        self._close_idle()

    def _put_back(self, sock: socket.socket, *, reusable: bool) -> None:
        """Keep a connection for the next request.

        Called after the guard has ended: a late watchdog would shut the socket down under its next user.
        """
        if reusable and not self._closed:
            self._idle.append((sock, self._clock()))
        else:
            sock.close()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    def _pop_idle(self, *, blocks: bool) -> socket.socket | None:
        """An idle connection. ``blocks``: whether calls on its socket block."""
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
                if not (poll.poll(0) or (isinstance(sock, ssl.SSLSocket) and sock.pending())):
                    if blocks != sock.getblocking():  # skip the system call if possible: it yields the GIL
                        sock.setblocking(blocks)
                    return sock
                sock.close()  # readable while idle: the server has closed it, or has sent too many bytes
        return None

    def _dial(self, deadline: float) -> socket.socket:
        within_s = max(DIAL_S_MIN, min(self._options.connect_timeout_s, deadline - self._clock()))
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
        raise connection_error(self._place)


def _send(sock: socket.socket, request: Sequence[memoryview]) -> bool:
    """Send a request. False: the connection broke, perhaps because the server refuses the body: see its response."""
    try:
        if isinstance(sock, ssl.SSLSocket):
            for part in request:
                sock.sendall(part)
        else:
            transfer(lambda _, parts, __: sock.sendmsg(parts), -1, request)
    except OSError:
        return False
    return True


def _is_free(answer: Answer, method: str) -> bool:
    """Whether the connection is ready for the next request.

    A server that refuses a put by its headers may leave the body unread and take it for the next request.
    """
    takes_body = method != "PUT" or answer.status in (http.HTTPStatus.OK, http.HTTPStatus.PRECONDITION_FAILED)
    return answer.is_complete and takes_body


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the request completed at this very moment
        # Not SSLSocket.shutdown, which ends decryption first: the reader would take encrypted bytes for plain ones.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
