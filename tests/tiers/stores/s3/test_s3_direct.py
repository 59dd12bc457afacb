"""DirectClient: what is its own beside the promises of all clients (test_s3_store, test_s3_faults, test_s3_seaweed)."""

from __future__ import annotations

import errno
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from http.client import HTTPResponse
from pathlib import Path
from unittest import mock

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials

from kvtiers.tiers.errors import (
    BlobCorruptError,
    BlobNotFoundError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.stores.s3.connections import Connections
from kvtiers.tiers.stores.s3.direct import DirectClient
from kvtiers.tiers.stores.s3.options import IDLE_S_MAX, S3Options
from kvtiers.tiers.stores.s3.put_form import PutForm
from kvtiers.tiers.stores.s3.session import S3Session
from kvtiers.tiers.stores.s3.signer import UNSIGNED, Signer
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import as_parts, fetch, make_data
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from tests.certificate import make_certificate
from tests.s3_clients import use_credentials
from tests.waiting import in_time, wait_for

DATA, NEW = make_data(100_000), make_data(100_001, seed=2)


@pytest.fixture
def server() -> Iterator[HttpFaultServer]:
    with HttpFaultServer() as server:
        server.put_object("bucket", "f/a", DATA)
        yield server


@pytest.fixture
def store(server: HttpFaultServer, boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    use_credentials(monkeypatch)
    options = S3Options(bucket="bucket", endpoint_url=server.endpoint_url, retries=0, request_timeout_s=120.0)
    store = S3Store(options)
    yield store
    store.close()


def test_get_on_a_reused_connection_that_was_reset_is_sent_again(store: S3Store, server: HttpFaultServer) -> None:
    """As every client does: what was reset on a connection used before is asked again on a new one."""
    fetch(store, "f/a", len(DATA))
    server.inject(Fault.RESET_BEFORE, times=1)
    assert fetch(store, "f/a", len(DATA)) == DATA
    server.inject(Fault.RESET_BEFORE, times=2)
    with pytest.raises(StoreUnavailableError):
        fetch(store, "f/a", len(DATA))


def ports(server: HttpFaultServer) -> list[int]:
    """The client's, of each GET: which connection it came by."""
    return [request.client_port for request in server.requests("GET")]


def test_connection_that_was_idle_for_long_is_not_reused(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NAT may have forgotten it without a word."""
    now = [0.0]
    session = S3Session(store.options)
    reader = DirectClient(session, clock=lambda: now[0])
    parts = [memoryview(bytearray(len(DATA)))]
    both_asked = threading.Barrier(2)  # so there are two connections
    end = server.end

    def answer_together() -> None:
        both_asked.wait(120)
        end()

    with ThreadPoolExecutor(2) as pool, monkeypatch.context() as together:
        together.setattr(server, "end", answer_together)
        list(pool.map(lambda _: reader.get_into("f/a", parts, len(DATA)), range(2)))
    two = [sock for sock, _ in reader._connections._idle]
    assert len(two) == 2
    for now[0] in (IDLE_S_MAX, IDLE_S_MAX + 1, 2 * IDLE_S_MAX + 2):
        reader.get_into("f/a", parts, len(DATA))
    used = ports(server)[2:]
    assert used[0] == used[1] != used[2]
    assert [sock.fileno() for sock in two] == [-1, -1]  # the other one, too, which nobody used
    reader.close()
    session.close()


def test_timeout_on_a_reused_connection_drops_the_idle_connections(store: S3Store, server: HttpFaultServer) -> None:
    session = S3Session(replace(store.options, request_timeout_s=0.6))
    reader = DirectClient(session)
    server.answer_after_s = 0.05
    parts = [memoryview(bytearray(len(DATA)))]
    with ThreadPoolExecutor(2) as pool:

        def two_are_idle() -> bool:
            with suppress(StoreTimeoutError):
                list(pool.map(lambda _: reader.get_into("f/a", parts, len(DATA)), range(2)))
            return len(reader._connections._idle) == 2

        wait_for(two_are_idle)
    server.inject(Fault.STALL, times=1)
    with pytest.raises(StoreTimeoutError):
        reader.get_into("f/a", parts, len(DATA))
    assert not reader._connections._idle
    reader.close()
    session.close()


def test_connections_set_tcp_nodelay(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    dial = Connections._dial

    def note(connections: Connections, deadline: float) -> socket.socket:
        made.append(dial(connections, deadline))
        return made[-1]

    monkeypatch.setattr(Connections, "_dial", note)
    assert fetch(store, "f/a", len(DATA)) == DATA
    assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in made] == [1]


def test_gets_of_many_threads_return_the_right_bytes(store: S3Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fetch(store, "f/a", len(DATA)), range(200)))
    assert found == [DATA] * 200


def test_get_without_a_free_socket_is_unavailable_and_a_later_get_succeeds(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as scarce:
        scarce.setattr("kvtiers.tiers.stores.s3.connections.socket.socket", fail)
        with pytest.raises(StoreUnavailableError):
            fetch(store, "f/a", len(DATA))
    assert fetch(store, "f/a", len(DATA)) == DATA


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("http://LocalHost:80", "localhost"),
        ("https://localhost:443", "localhost"),
        ("http://127.0.0.1:443", "127.0.0.1:443"),
        ("http://[::1]:9000", "[::1]:9000"),
        ("http://[::1]:80", "[::1]"),
    ],
)
def test_signed_host_header_omits_only_the_default_port(store: S3Store, endpoint: str, host: str) -> None:
    """A proxy that hands on the host that it understood (nginx' $host) changes no other, and a signature covers it."""
    session = S3Session(replace(store.options, endpoint_url=endpoint))
    reader = DirectClient(session)
    assert f"\r\nhost:{host}\r\n".encode() in reader._signer.head("GET", "/bucket/f/a", session.credentials(), {})
    reader.close()
    session.close()


@contextmanager
def answer(*packets: bytes) -> Iterator[str]:
    """A server that sends these to its first client, and then nothing until that leaves; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                connection.recv(1 << 16)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for packet in packets:
                    connection.sendall(packet)
                    time.sleep(0.01)  # whether they arrive as one must not matter
                connection.settimeout(120)
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_get_whose_body_stops_times_out(store: S3Store, connection: bytes) -> None:
    """http.client forgets its socket where the server says that it will close: it must be shut all the same."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: %b\r\n\r\n" % (len(DATA), connection)
    with answer(head + b"few bytes") as url:
        hurried = S3Store(replace(store.options, endpoint_url=url, request_timeout_s=0.6))
        with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
            fetch(hurried, "f/a", len(DATA))
        hurried.close()


def test_get_after_its_clients_were_closed_still_times_out(store: S3Store, server: HttpFaultServer) -> None:
    """It had them before, and waited for credentials while another thread's had expired."""
    session = S3Session(replace(store.options, request_timeout_s=0.6))
    reader = DirectClient(session)
    parts = [memoryview(bytearray(len(DATA)))]
    in_time(lambda: reader.get_into("f/a", parts, len(DATA)))
    (watchdog,) = [thread for thread in threading.enumerate() if thread is reader._connections._watchdog._thread]
    reader.close()
    watchdog.join()
    in_time(lambda: reader.get_into("f/a", parts, len(DATA)))
    server.inject(Fault.STALL)
    with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
        reader.get_into("f/a", parts, len(DATA))
    session.close()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[HTTPResponse]:
    """The answers that http.client was given."""
    parsed: list[HTTPResponse] = []
    begin = HTTPResponse.begin

    def note(response: HTTPResponse) -> None:
        parsed.append(response)
        begin(response)

    monkeypatch.setattr(HTTPResponse, "begin", note)
    return parsed


LENGTH = b"Content-Length: %d\r\n" % len(DATA)
OBJECTS: dict[str, tuple[bytes, ...]] = {
    "usual": (b"HTTP/1.1 200 OK\r\n" + LENGTH + b"ETag: x\r\n\r\n", DATA),
    "one packet": (b"HTTP/1.1 200 OK\r\n" + LENGTH + b"\r\n" + DATA,),
    "lower case": (b"HTTP/1.1 200 OK\r\n" + LENGTH.lower() + b"\r\n", DATA),
    "kept alive": (b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive\r\n" + LENGTH + b"\r\n", DATA),
    "no reason": (b"HTTP/1.1 200 \r\n" + LENGTH + b"\r\n", DATA),
    "closed": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + LENGTH + b"\r\n", DATA),
    "old": (b"HTTP/1.0 200 OK\r\n" + LENGTH + b"\r\n", DATA),
    "length twice": (b"HTTP/1.1 200 OK\r\n" + LENGTH + LENGTH + b"\r\n", DATA),
    "length in the text of another": (b"HTTP/1.1 200 OK\r\nX: Content-Length: 1\r\n" + LENGTH + b"\r\n", DATA),
    "in two": (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: %d\r\n\r\n" % len(DATA), DATA),
    "long": (b"HTTP/1.1 200 OK\r\nX: " + 20_000 * b"x" + b"\r\n" + LENGTH + b"\r\n", DATA),
    "bare line feeds": (b"HTTP/1.1 200 OK\n" + LENGTH.replace(b"\r", b"") + b"\n", DATA),
    "after a 100": (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + LENGTH + b"\r\n", DATA),
}
RECOGNISED = {"usual", "one packet", "lower case", "kept alive", "no reason", "length in the text of another"}


@pytest.mark.parametrize("name", OBJECTS)
def test_get_reads_objects_from_every_valid_form_of_answer(
    store: S3Store, parsed: list[HTTPResponse], name: str
) -> None:
    with answer(*OBJECTS[name]) as url:
        reader = S3Store(replace(store.options, endpoint_url=url))
        assert fetch(reader, "f/a", len(DATA)) == DATA
        reader.close()
    if name != "in two":  # which may arrive as one
        assert bool(parsed) == (name not in RECOGNISED)


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: %d\r\n\r\n" % (len(DATA) - 1), BlobCorruptError),
        (b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 0%d\r\n\r\n" % (len(DATA) + 1), BlobCorruptError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(DATA) + 1), StoreUnavailableError),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", BlobNotFoundError),
        (b"HTTP/1.1 503 Slow\r\nContent-Length: 0\r\n\r\n", StoreThrottledError),
        (b"220 ftp.example.com ready\r\n\r\n", StoreUnavailableError),
        (b"HTTP/1.1 103 Early Hints\r\nContent-Length: %d\r\n\r\n" % len(DATA), StoreUnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Length: 1\r\n\r\n" % len(DATA), StoreUnavailableError),
    ],
)
def test_answers_without_the_expected_object_leave_the_parts_unchanged(
    store: S3Store, head: bytes, error: type[StoreError]
) -> None:
    buffer = bytearray(DATA)
    with answer(head + NEW) as url:
        reader = S3Store(replace(store.options, endpoint_url=url))
        with pytest.raises(error):
            reader.get_into("f/a", [memoryview(buffer)])
        reader.close()
    assert buffer == DATA


def test_get_into_more_parts_than_one_recvmsg_takes_fills_all_parts(store: S3Store, parsed: list[HTTPResponse]) -> None:
    """More than one call of recvmsg takes."""
    buffer = bytearray(len(DATA))
    view = memoryview(buffer)
    store.get_into("f/a", [view[start : start + 50] for start in range(0, len(DATA), 50)])
    assert buffer == DATA
    assert not parsed


def test_retried_get_passes_its_pieces_from_the_start_again(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.tiers.stores.s3.direct.PIECE_BYTES", 4096)
    monkeypatch.setattr("kvtiers.tiers.stores.vectored_io.RUN_SLACK_BYTES", 0)
    retrying = S3Store(replace(store.options, retries=1))
    server.inject(Fault.TRUNCATED, times=1)
    parts = [memoryview(bytearray(30_000)), memoryview(bytearray(len(DATA) - 30_000))]
    looked: list[tuple[int, bytes]] = []
    retrying.get_pieces_into("f/a", parts, lambda offset, piece: looked.append((offset, bytes(piece))))
    assert b"".join(parts) == DATA
    starts = [place for place, (offset, _) in enumerate(looked) if offset == 0]
    assert len(starts) == 2
    assert b"".join(piece for _, piece in looked[starts[1] :]) == DATA
    assert max(len(piece) for _, piece in looked) == 4096
    retrying.close()


@pytest.mark.parametrize("token", [None, "session/token+="])
@pytest.mark.parametrize("path", ["/bucket/f/a.bin", "/a%20b/%C3%A9~//x%3D..-_"])
@pytest.mark.parametrize(
    ("method", "headers", "payload"),
    [
        ("GET", {}, None),
        ("GET", {"range": "bytes=-4096"}, None),
        ("HEAD", {}, None),
        ("PUT", {"x-amz-storage-class": "STANDARD_IA", "if-none-match": "*"}, None),
        ("PUT", {"x-amz-meta-kvtiers-used-at": "1.5", "x-amz-checksum-crc64nvme": "AAAA"}, UNSIGNED),
    ],
)
def test_requests_are_signed_as_botocore_signs_them(
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    path: str,
    method: str,
    headers: dict[str, str],
    payload: str | None,
) -> None:
    now = datetime(2026, 11, 22, 23, 59, 59, tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: now)
    data = b"data" if method == "PUT" else b""
    given = headers | {"host": "store.example:9000"}
    expected = AWSRequest(method, f"http://store.example:9000{path}", given, data)
    expected.context["client_config"] = Config(s3={"payload_signing_enabled": payload is None})
    credentials = ReadOnlyCredentials("AKIA", "secret", token)
    S3SigV4Auth(credentials, "s3", "eu-west-3").add_auth(expected)
    seconds = [now.timestamp()]
    signer = Signer("store.example:9000", "eu-west-3", clock=lambda: seconds[-1])
    digest = payload or hashlib.sha256(data).hexdigest()

    def sign(credentials: ReadOnlyCredentials) -> str:
        return signer.head(method, path, credentials, headers, payload=digest, size=len(data) or None).decode()

    for _ in range(2):  # the second with the key of the first
        request = sign(credentials)
        assert request.startswith(f"{method} {path} HTTP/1.1\r\n")
        assert request.endswith("\r\n\r\n")
        sent = dict(line.split(":", 1) for line in request.split("\r\n")[1:-2])
        assert sent.pop("user-agent") == "kvtiers"
        assert sent.pop("content-length", "0") == str(len(data))
        assert sent == {name.lower(): value for name, value in expected.headers.items()}
    assert sign(ReadOnlyCredentials("AKIA", "other", token)) != request
    seconds.append(now.timestamp() + 86_400)
    assert sign(credentials) != request


def test_session_token_with_a_newline_is_refused_before_any_request(store: S3Store, server: HttpFaultServer) -> None:
    with mock.patch.dict("os.environ", {"AWS_SESSION_TOKEN": "a\nx-evil:1"}):
        theirs = S3Store(replace(store.options))
        with pytest.raises(StorePermissionError, match=r"the token from env .* has the character") as caught:
            fetch(theirs, "f/a", len(DATA))
        theirs.close()
    assert "evil" not in str(caught.value)
    assert not server.requests("GET")


def test_every_address_of_a_host_name_is_tried(store: S3Store, server: HttpFaultServer) -> None:
    """``localhost`` is ::1 and 127.0.0.1; the server listens on the second only."""
    named = S3Store(replace(store.options, endpoint_url=server.endpoint_url.replace("127.0.0.1", "localhost")))
    assert fetch(named, "f/a", len(DATA)) == DATA
    named.close()


# -- puts --------------------------------------------------------------------------------------------------------------


@contextmanager
def refuse(answer: bytes, certificate: Path | None = None) -> Iterator[str]:
    """A server that answers each request when it has its head, reads no body, and closes; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a reset may drop the answer
                if certificate is not None:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(certificate / "server.pem")
                    connection = context.wrap_socket(connection, server_side=True)
                with connection, suppress(OSError):
                    if not connection.recv(4096):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{port}"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as last:
            if certificate is not None:
                context = ssl.create_default_context(cafile=certificate / "ca.pem")
                last = context.wrap_socket(last, server_hostname="127.0.0.1")
            last.shutdown(socket.SHUT_WR)
            thread.join()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    ("head", "code", "error", "says"),
    [
        ("403 Forbidden", "QuotaExceeded", StoreFullError, "quota"),
        ("413 Too Large", "", StoreConfigError, "larger than the server"),
        ("503 Slow", "SlowDown", StoreThrottledError, "slow down"),
        ("507 Full\r\nContent-Length: 9999", "", StoreFullError, "disks are full"),  # and breaks off
        ("301 Moved\r\nLocation: https://other.example/x", "", StoreConfigError, "redirects to https://other.example"),
    ],
)
def test_put_refused_before_its_body_is_read_reports_the_reason(
    store: S3Store, tmp_path: Path, tls: bool, head: str, code: str, error: type[StoreError], says: str
) -> None:
    body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
    length = "" if "Length" in head else f"\r\nContent-Length: {len(body)}"
    answer = f"HTTP/1.1 {head}{length}\r\n\r\n".encode() + body
    certificate = make_certificate(tmp_path) if tls else None
    with refuse(answer, certificate) as url:
        ca_bundle = str(tmp_path / "ca.pem") if tls else None
        refused = S3Store(replace(store.options, endpoint_url=url, ca_bundle=ca_bundle))
        with pytest.raises(error, match=says):
            refused.put("f/b", as_parts(bytes(32 << 20)), overwrite=True)
        refused.close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_put_on_a_reused_connection_that_was_reset_is_sent_again(
    store: S3Store, server: HttpFaultServer, overwrite: bool
) -> None:
    """It may find its own object: to the caller that is one that somebody has stored."""
    for fault, published in ((Fault.RESET_BEFORE, True), (Fault.LOST_ACK, overwrite)):
        fetch(store, "f/a", len(DATA))  # over a connection that is kept
        server.inject(fault, times=1)
        key = f"f/{fault}"
        assert store.put(key, as_parts(DATA), overwrite=overwrite) is published
        assert server.get_object("bucket", key) == DATA
    server.inject(Fault.RESET_BEFORE, times=2)
    with pytest.raises(StoreUnavailableError):
        store.put("f/b", as_parts(DATA), overwrite=overwrite)


def test_put_of_more_parts_than_one_sendmsg_takes_stores_all_bytes(store: S3Store, server: HttpFaultServer) -> None:
    """More than one call of sendmsg takes, and more bytes than a socket buffers."""
    data = make_data(12 << 20)
    for size in (8192, 5 << 20):
        assert store.put(f"f/{size}", as_parts(data, size))
        assert server.get_object("bucket", f"f/{size}") == data


def test_connection_is_kept_after_misses_and_a_put_of_an_existing_key(store: S3Store, server: HttpFaultServer) -> None:
    assert store.put("f/a", as_parts(DATA)) is False
    with pytest.raises(BlobNotFoundError):
        fetch(store, "f/absent", 1)
    assert store.size("f/absent") is None
    assert store.get_tail("f/absent", 1) is None
    assert store.get_tail("f/a", 10) == (len(DATA), DATA[-10:])
    assert len({request.client_port for request in server.requests()}) == 1


def test_connection_is_not_kept_after_a_put_is_refused(store: S3Store, server: HttpFaultServer) -> None:
    """The server may have answered by the headers alone, and would take the body for the next request."""
    server.inject(Fault.SLOW_DOWN, times=1)
    with pytest.raises(StoreThrottledError):
        store.put("f/b", as_parts(DATA), overwrite=True)
    assert store.put("f/b", as_parts(DATA), overwrite=True)
    assert len({request.client_port for request in server.requests("PUT")}) == 2


def test_each_put_form_sends_its_checksum_headers(store: S3Store, server: HttpFaultServer) -> None:
    client = DirectClient(S3Session(store.options))
    for form, names in (
        (PutForm.CHECKED, {"x-amz-checksum-crc64nvme"}),
        (PutForm.SIGNED, {"x-amz-checksum-sha256"}),
        (PutForm.PLAIN, set()),
    ):
        assert client.put("f/b", as_parts(DATA, 4096), create=False, form=form)
        headers = server.requests("PUT")[-1].headers
        assert {name for name in headers if "checksum" in name} == names
        signed = UNSIGNED if form is PutForm.CHECKED else hashlib.sha256(DATA).hexdigest()
        assert headers["x-amz-content-sha256"] == signed
        assert "if-none-match" not in headers
    client.close()


@pytest.mark.parametrize(
    "range_", ["bytes 0-9/100000", "bytes 99990-99999/*", "bytes 99990-99998/100000", "bytes 99990-99999/99999", ""]
)
def test_get_tail_answer_with_another_range_is_refused(store: S3Store, range_: str) -> None:
    head = f"HTTP/1.1 206 Partial Content\r\nETag: x\r\nContent-Range: {range_}\r\nContent-Length: 10\r\n\r\n"
    with answer(head.encode() + DATA[-10:]) as url:
        client = DirectClient(S3Session(replace(store.options, endpoint_url=url)))
        with pytest.raises(StoreError, match=r"another range|Content-Range"):
            client.get_tail("f/a", 10)
        client.close()
