"""DirectReader: what is its own beside the promises of all clients (test_s3_store, test_s3_faults, test_s3_seaweed)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from tests.s3_clients import choose
from tiers.errors import StoreTimeoutError, StoreUnavailableError
from tiers.stores.s3 import S3Store
from tiers.stores.s3_direct import DirectReader
from tiers.stores.s3_obstore import DIRECT_BYTES_MIN
from tiers.stores.s3_options import S3Options
from tiers.stores.s3_session import S3Session
from tiers.testing.contract import fetch, make_data
from tiers.testing.http_faults import Fault, HttpFaultServer
from tiers.testing.servers import S3Server

DATA = make_data(100_000)


@pytest.fixture
def server() -> Iterator[HttpFaultServer]:
    with HttpFaultServer() as server:
        server.put_object("bucket", "f/a", DATA)
        yield server


@pytest.fixture
def store(server: HttpFaultServer, boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    for name, value in S3Server("", "first", "secret").environment.items():
        monkeypatch.setenv(name, value)
    client = choose("direct", monkeypatch)
    store = S3Store(S3Options(bucket="bucket", endpoint_url=server.endpoint_url, client=client, retries=0))
    yield store
    store.close()


def by_us(server: HttpFaultServer) -> list[bool]:
    """Whether each GET came from DirectReader, which takes any type without saying so."""
    return ["accept" not in request.headers for request in server.requests("GET")]


def test_only_large_objects_are_received_directly(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(store, "f/a", len(DATA)) == DATA
    monkeypatch.undo()
    large = make_data(DIRECT_BYTES_MIN)
    server.put_object("bucket", "f/large", large)
    assert fetch(store, "f/large", len(large)) == large
    assert fetch(store, "f/a", len(DATA)) == DATA
    assert by_us(server) == [True, True, False]


def test_connection_that_the_server_gave_up_is_no_error(store: S3Store, server: HttpFaultServer) -> None:
    """As every client does: what was reset on a connection used before is asked again on a new one."""
    fetch(store, "f/a", len(DATA))
    server.inject(Fault.RESET_BEFORE, times=1)
    assert fetch(store, "f/a", len(DATA)) == DATA
    server.inject(Fault.RESET_BEFORE, times=2)
    with pytest.raises(StoreUnavailableError):
        fetch(store, "f/a", len(DATA))


def test_a_request_in_two_packets_waits_for_no_acknowledgement(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    dial = DirectReader._dial

    def note(reader: DirectReader) -> HTTPConnection:
        connection = dial(reader)
        made.append(connection.sock)
        return connection

    monkeypatch.setattr(DirectReader, "_dial", note)
    assert fetch(store, "f/a", len(DATA)) == DATA
    assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in made] == [1]


def test_many_threads_share_connections(store: S3Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fetch(store, "f/a", len(DATA)), range(200)))
    assert found == [DATA] * 200


@contextmanager
def half_an_answer(head: bytes) -> Iterator[str]:
    """A server that sends ``head`` and a few bytes, and then nothing until its client leaves; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head + b"few bytes")
                connection.settimeout(20)
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_body_that_stops_is_given_up_in_time(store: S3Store, connection: bytes) -> None:
    """http.client forgets its socket where the server says that it will close: it must be shut all the same."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: %b\r\n\r\n" % (len(DATA), connection)
    with half_an_answer(head) as url:
        hurried = S3Store(replace(store.options, endpoint_url=url, request_timeout_s=0.6))
        with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
            fetch(hurried, "f/a", len(DATA))
        hurried.close()


def test_every_address_of_a_name_is_tried(store: S3Store, server: HttpFaultServer) -> None:
    """``localhost`` is ::1 and 127.0.0.1; the server listens on the second only."""
    named = S3Store(replace(store.options, endpoint_url=server.endpoint_url.replace("127.0.0.1", "localhost")))
    assert fetch(named, "f/a", len(DATA)) == DATA
    assert by_us(server) == [True]
    named.close()


@pytest.mark.parametrize(
    ("variables", "usable"),
    [
        ({}, True),
        ({"http_proxy": "http://proxy.example:3128"}, False),
        ({"https_proxy": "http://proxy.example:3128"}, True),
        ({"all_proxy": "http://proxy.example:3128"}, False),
        ({"http_proxy": "http://proxy.example:3128", "no_proxy": "127.0.0.1"}, True),
    ],
)
def test_requests_through_a_proxy_are_left_to_obstore(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], usable: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    session = S3Session(store.options)
    assert DirectReader.usable(session) is usable
    session.close()
