"""Lookups of many keys: HEADs that one thread sends on idle connections, and what it leaves to other threads."""

from __future__ import annotations

import errno
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtiers.tiers.errors import (
    StoreClosedError,
    StoreError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
)
from kvtiers.tiers.stores.s3.connections import Connections
from kvtiers.tiers.stores.s3.errors import MissingHeaderError
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.polling import AT_ONCE_FIRST, run_all
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import fetch
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from tests.certificate import make_certificate
from tests.s3_clients import use_credentials
from tests.waiting import wait_for

KEYS = [f"f/{i}" for i in range(60)]
SIZES: list[int | None] = [i if i % 3 else None for i in range(60)]  # a third is absent


@pytest.fixture(autouse=True)
def _credentials(boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def server() -> Iterator[HttpFaultServer]:
    with HttpFaultServer() as server:
        fill(server)
        yield server


def fill(server: HttpFaultServer) -> None:
    for key, size in zip(KEYS, SIZES, strict=True):
        if size is not None:
            server.put_object("bucket", key, bytes(size))


@pytest.fixture
def store(server: HttpFaultServer) -> Iterator[S3Store]:
    """Has no connection yet, and retries nothing."""
    with open_store(server.endpoint_url) as store:
        yield store


@contextmanager
def open_store(url: str, **changes: Any) -> Iterator[S3Store]:
    options = S3Options(bucket="bucket", endpoint_url=url, retries=0, request_timeout_s=120.0)
    store = S3Store(replace(options, **changes), sleep=lambda _: None, rng=lambda: 0.0)
    yield store
    store.close()


@pytest.fixture
def left_over(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of requests that one thread did not send side by side."""
    methods: list[str] = []
    exchange = Connections.exchange

    def note(connections: Connections, method: str, *arguments: Any, **named: Any) -> object:
        methods.append(method)
        return exchange(connections, method, *arguments, **named)

    monkeypatch.setattr(Connections, "exchange", note)
    return methods


def connect(store: S3Store, count: int = AT_ONCE_FIRST) -> None:
    """Have so many idle connections."""
    together = threading.Barrier(count)
    receive = store._attempts.current().get().data._receive_size  # type: ignore[attr-defined]

    def receive_together(answer: Any) -> int | None:
        together.wait(120)
        size: int | None = receive(answer)
        return size

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(count) as pool:
        patched.setattr(store._attempts.current().get().data, "_receive_size", receive_together)
        list(pool.map(store.size, KEYS[:count]))


def note_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads that are started from now on."""
    started: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    return started


def test_lookup_starts_no_threads_while_connections_are_idle(
    store: S3Store, server: HttpFaultServer, left_over: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(store)
    started = note_threads(monkeypatch)

    def ask() -> bool:
        left_over.clear()
        started.clear()
        assert store.size_many(KEYS) == SIZES
        return not (left_over or started)  # a busy machine may be taken for a server far away

    wait_for(ask)


def test_later_lookups_reuse_the_connections_of_the_first_lookup(store: S3Store, server: HttpFaultServer) -> None:
    for _ in range(3):
        assert store.size_many(KEYS) == SIZES
    assert len({request.client_port for request in server.requests()}) <= store.options.max_connections


def test_slow_server_gets_more_concurrent_lookups_up_to_max_connections(
    store: S3Store, server: HttpFaultServer
) -> None:
    server.answer_after_s = 0.1

    def ask() -> bool:
        assert store.size_many(KEYS) == SIZES
        return server.most_under_way > AT_ONCE_FIRST

    wait_for(ask)
    assert server.most_under_way <= store.options.max_connections


@pytest.mark.parametrize("limit", [1, 3])
def test_lookups_of_several_threads_stay_within_max_connections(server: HttpFaultServer, limit: int) -> None:
    server.answer_after_s = 0.002
    with open_store(server.endpoint_url, max_connections=limit) as store, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(store.size_many, [KEYS] * 4)) == [SIZES] * 4
    assert server.most_under_way == limit
    assert len({request.client_port for request in server.requests()}) <= limit


def test_each_lookup_answer_belongs_to_its_key_while_connections_break(server: HttpFaultServer) -> None:
    with open_store(server.endpoint_url, retries=100) as store:
        connect(store)
        server.inject(Fault.RESET_BEFORE, share=0.1)
        server.inject(Fault.SLOW_DOWN, share=0.1)
        for _ in range(10):
            assert store.size_many(KEYS) == SIZES
    assert min(server.struck.values()) > 10


def test_lookup_succeeds_after_the_server_closed_idle_connections(server: HttpFaultServer) -> None:
    with open_store(server.endpoint_url, retries=AT_ONCE_FIRST) as store:  # a new connection may get a fault, too
        connect(store)
        server.inject(Fault.RESET_BEFORE, times=AT_ONCE_FIRST)
        assert store.size_many(KEYS) == SIZES
    assert server.struck[Fault.RESET_BEFORE] == AT_ONCE_FIRST


@pytest.mark.parametrize(
    ("fault", "error", "heads", "gets"),
    [
        (Fault.SLOW_DOWN, StoreThrottledError, 4, 0),
        (Fault.ACCESS_DENIED, StorePermissionError, 1, 1),
        (Fault.HTML_WITH_200, MissingHeaderError, 1, 0),
    ],
)
def test_failed_lookup_is_retried_as_often_as_other_requests(
    server: HttpFaultServer, fault: Fault, error: type[StoreError], heads: int, gets: int
) -> None:
    with open_store(server.endpoint_url, retries=3) as store:
        connect(store)
        server.inject(fault, path_contains="/f/5")  # and f/50 to f/59
        answers = store.size_many(KEYS)
    bad = [i for i, key in enumerate(KEYS) if key.startswith("f/5")]
    assert [answers[i] for i in range(60) if i not in bad] == [SIZES[i] for i in range(60) if i not in bad]
    for i in bad:
        found = answers[i]
        assert isinstance(found, error)
        assert found.key == KEYS[i]
        asked = [request.method for request in server.requests() if request.path.endswith(KEYS[i])]
        known = i < AT_ONCE_FIRST  # by ``connect``
        assert (asked.count("HEAD") - known, asked.count("GET")) == (heads, gets)


def test_lookup_continues_while_a_name_server_hangs(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(store)
    known = len(server.requests())
    released = threading.Event()
    resolve = socket.getaddrinfo

    def hang(*arguments: Any, **named: Any) -> Any:
        released.wait(600)
        return resolve(*arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    server.answer_after_s = 0.02  # as if far away, so more connections are wanted
    most_hung = store.options.max_connections - AT_ONCE_FIRST
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.size_many, KEYS)
        try:
            wait_for(lambda: len(server.requests()) - known >= len(KEYS) - most_hung)
            assert not asked.done()
        finally:
            released.set()
        assert asked.result() == SIZES


def test_lookup_ends_when_the_store_is_closed_and_keeps_no_connection(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(store)
    data: Any = store._attempts.current().get().data
    receive = data._receive_size

    def close_and_receive(answer: Any) -> int | None:
        store.close()
        size: int | None = receive(answer)
        return size

    monkeypatch.setattr(data, "_receive_size", close_and_receive)
    answers = store.size_many(KEYS)
    closed = [answer for answer in answers if isinstance(answer, StoreClosedError)]
    assert closed
    assert all(answer in closed or answer == size for answer, size in zip(answers, SIZES, strict=True))
    assert not data._connections._idle


def test_interrupted_lookup_does_not_reuse_connections_with_pending_answers(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer would be taken for that of another key."""

    def interrupt() -> float:  # once all requests are sent
        raise KeyboardInterrupt

    def run_interrupted(work: Any, names: Any, at_once_max: int, _: object) -> object:
        return run_all(work, names, at_once_max, interrupt)

    connect(store)
    known = len(server.requests())
    server.answer_after_s = 0.3
    with monkeypatch.context() as interrupted:
        interrupted.setattr("kvtiers.tiers.stores.s3.store.run_all", run_interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.size_many(KEYS[:AT_ONCE_FIRST])
    others = slice(60 - AT_ONCE_FIRST, 60)
    assert store.size_many(KEYS[others]) == SIZES[others]
    ports: dict[bool, set[int]] = {True: set(), False: set()}
    for request in server.requests()[known:]:
        ports[int(request.path.rpartition("/")[2]) < AT_ONCE_FIRST].add(request.client_port)
    assert ports[False]
    assert not ports[True] & ports[False]


def test_lookups_of_several_threads_succeed_without_descriptors_for_threads(
    server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for a connection must not hold others of them."""

    def fail(*_: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    server.answer_after_s = 0.01
    with open_store(server.endpoint_url, max_connections=2, request_timeout_s=20.0) as store:
        store.prepare()
        monkeypatch.setattr(socket, "socketpair", fail)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(store.size_many, [KEYS] * 2)) == [SIZES] * 2


def test_lookup_with_refused_heads_starts_at_most_max_connections_threads(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.inject(Fault.ACCESS_DENIED, methods=("HEAD",))
    store.prepare()
    started = note_threads(monkeypatch)
    assert store.size_many(KEYS) == SIZES
    assert 0 < started.count("kvtiers-s3-head") <= store.options.max_connections < len(KEYS)


# -- answers of a server that is not S3's best ---------------------------------------------------------------------


@contextmanager
def serve(answer: Callable[[int], Iterable[bytes]], certificate: Path | None = None) -> Iterator[str]:
    """A server that sends these packets for the key ``f/<number>``, and yields its URL.

    It closes the connection after an empty packet.
    """
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "server.pem")

    def talk(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as requests:
                while line := requests.readline():
                    while requests.readline() not in (b"\r\n", b""):
                        pass
                    for packet in answer(int(line.split()[1].rpartition(b"/")[2])):
                        if not packet:
                            return
                        connection.sendall(packet)
                        time.sleep(0.001)  # whether they arrive as one must not matter

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def head_of(number: int) -> bytes:
    """S3's answer."""
    size = SIZES[number]
    if size is None:
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: %d\r\n\r\n" % size


OTHER = b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 99\r\n\r\n"
ANSWERS: dict[str, Callable[[int], Sequence[bytes]]] = {
    "usual": lambda number: [head_of(number)],
    "in pieces": lambda number: [head_of(number)[:20], head_of(number)[20:-1], b"\n"],
    "after a 100": lambda number: [b"HTTP/1.1 100 Continue\r\n\r\n", head_of(number)],
    "after a 100 in one packet": lambda number: [b"HTTP/1.1 100 Continue\r\n\r\n" + head_of(number)],
    "old": lambda number: [head_of(number).replace(b"/1.1", b"/1.0"), b""],
    "closed": lambda number: [head_of(number).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b""],
    "closed without notice": lambda number: [head_of(number), b""],
    "bare line feeds": lambda number: [head_of(number).replace(b"\r", b"")],
    "long": lambda number: [head_of(number).replace(b"\r\n\r\n", b"\r\nX: " + 20_000 * b"x" + b"\r\n\r\n")],
    "with another answer": lambda number: [head_of(number) + OTHER],
    "with a body": lambda number: [head_of(number) + bytes(SIZES[number] or 0)],
    "half of it another": lambda number: [head_of(number) + OTHER[:20], OTHER[20:]],
}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("name", ANSWERS)
def test_lookup_reads_sizes_from_every_form_of_answer(tmp_path: Path, name: str, tls: bool) -> None:
    certificate = make_certificate(tmp_path) if tls else None
    ca_bundle = str(tmp_path / "ca.pem") if tls else None
    with serve(ANSWERS[name], certificate) as url, open_store(url, ca_bundle=ca_bundle) as store:
        for _ in range(2):
            assert store.size_many(KEYS) == SIZES


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("name", ["usual", "in pieces"])
def test_one_thread_reads_all_usual_lookup_answers(tmp_path: Path, left_over: list[str], name: str, tls: bool) -> None:
    certificate = make_certificate(tmp_path) if tls else None
    ca_bundle = str(tmp_path / "ca.pem") if tls else None
    with serve(ANSWERS[name], certificate) as url, open_store(url, ca_bundle=ca_bundle) as store:

        def ask() -> bool:
            left_over.clear()
            assert store.size_many(KEYS) == SIZES
            return not left_over  # more connections are wanted while a busy machine answers late

        wait_for(ask)


def test_tls_record_without_data_is_not_taken_for_an_answer(
    tmp_path: Path, left_over: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a new key, or the first half of a record."""
    receive = ssl.SSLSocket.recv
    woken = itertools.count()

    def receive_data_every_other_time(sock: ssl.SSLSocket, *arguments: Any) -> bytes:
        if sock.gettimeout() == 0 and next(woken) % 2 == 0:
            raise ssl.SSLWantReadError
        return receive(sock, *arguments)

    monkeypatch.setattr(ssl.SSLSocket, "recv", receive_data_every_other_time)
    certificate = make_certificate(tmp_path)
    with serve(ANSWERS["usual"], certificate) as url, open_store(url, ca_bundle=str(tmp_path / "ca.pem")) as store:

        def ask() -> bool:
            left_over.clear()
            assert store.size_many(KEYS) == SIZES
            return not left_over

        wait_for(ask)
    assert next(woken) > len(KEYS)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_lookup_answer_that_stops_times_out_and_does_not_affect_other_keys(tmp_path: Path, tls: bool) -> None:
    def answer(number: int) -> Sequence[bytes]:
        return [head_of(number)[:20]] if is_sick and number == 7 else [head_of(number)]

    is_sick = False
    certificate = make_certificate(tmp_path) if tls else None
    ca_bundle = str(tmp_path / "ca.pem") if tls else None
    others = SIZES[:7] + SIZES[8:]
    with (
        serve(answer, certificate) as url,
        open_store(url, ca_bundle=ca_bundle, request_timeout_s=1.0) as store,
    ):
        wait_for(lambda: store.size_many(KEYS) == SIZES)
        is_sick = True

        def ask() -> bool:
            answers = store.size_many(KEYS)
            late = answers.pop(7)
            assert isinstance(late, StoreTimeoutError)
            assert late.key == "f/7"
            return "did not answer within 0.5 s" in str(late) and answers == others

        wait_for(ask)


def test_endless_headers_are_cut_off_before_they_fill_memory(left_over: list[str]) -> None:
    sent = 0

    def answer(number: int) -> Iterator[bytes]:
        nonlocal sent
        if not is_sick:
            yield head_of(number)
            return
        yield b"HTTP/1.1 200 OK\r\n"
        while True:
            sent += 1 << 16
            yield b"X: " + (1 << 16) * b"x"

    is_sick = False
    with serve(answer) as url, open_store(url) as store:
        assert store.size_many(KEYS) == SIZES
        is_sick = True
        (found,) = store.size_many(["f/1"])
    assert isinstance(found, StoreError)
    assert sent < 16 << 20


def test_connection_with_surplus_tls_data_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is already decrypted, so the socket has nothing to read."""
    head = b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 5\r\n\r\n"
    dialed: list[None] = []
    dial = Connections._dial

    def note(connections: Connections, deadline: float) -> socket.socket:
        dialed.append(None)
        return dial(connections, deadline)

    monkeypatch.setattr(Connections, "_dial", note)
    certificate = make_certificate(tmp_path)
    with (
        serve(lambda _: [head, b"block" + OTHER], certificate) as url,
        open_store(url, ca_bundle=str(tmp_path / "ca.pem")) as store,
    ):
        for _ in range(2):
            assert fetch(store, "f/1", 5) == b"block"
    assert len(dialed) == 2
