"""S3Store against a server that misbehaves: what each fault must become, with both clients.

An error is an error of that one operation, a wrong size touches no byte, a put is visible whole or not at all, and
nothing takes longer than ``request_timeout_s``: the tests of hanging servers end because of that and of nothing else.
"""

from __future__ import annotations

import gc
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.file_mapper import FileMapper, block_name, strict_fields
from kvtiers.tiers.blocks.rows import Rows
from kvtiers.tiers.blocks.seal import CHECK_AT, TRAILER_BYTES, Seal
from kvtiers.tiers.errors import (
    BlobCorruptError,
    SealError,
    SealReason,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.server.block_mover import BlockMover
from kvtiers.tiers.store import Look
from kvtiers.tiers.stores.s3.clients import RENEW_EVERY_S, ProcessClients
from kvtiers.tiers.stores.s3.errors import CredentialsExpiredError, RequestRefusedError
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.session import S3Session
from kvtiers.tiers.stores.s3.store import DELETERS_MAX, S3Store
from kvtiers.tiers.testing import http_faults, tiny_s3
from kvtiers.tiers.testing.contract import GuardedParts, as_parts, fetch, make_data
from kvtiers.tiers.testing.hostile import Hostile
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from kvtiers.tiers.testing.tiny_s3 import Answer, Request
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec, block_key
from tests.s3_clients import asks_once, use_credentials
from tests.tiers.server.in_threads import in_threads
from tests.waiting import PATIENT, in_time, wait_for

DATA = make_data(300_000)  # more than one piece of a streamed body

ERRORS = [
    (Fault.SLOW_DOWN, StoreThrottledError),
    (Fault.TOO_MANY_REQUESTS, StoreThrottledError),
    (Fault.INTERNAL_ERROR, StoreUnavailableError),
    (Fault.NOT_IMPLEMENTED, StoreConfigError),
    (Fault.EXPIRED_TOKEN, CredentialsExpiredError),
    (Fault.CLOCK_SKEW, StorePermissionError),
    (Fault.ACCESS_DENIED, StorePermissionError),
    (Fault.SIGNATURE, StorePermissionError),
    (Fault.BUCKET_GONE, StoreConfigError),
    (Fault.OTHER_REGION, StoreConfigError),
    (Fault.QUOTA, StoreFullError),
    (Fault.RESET_BEFORE, StoreUnavailableError),
]


@pytest.fixture(autouse=True)
def _credentials(boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def store(server: HttpFaultServer, client: str) -> Iterator[S3Store]:
    options = S3Options(bucket="bucket", endpoint_url=server.endpoint_url, request_timeout_s=60.0)
    store = S3Store(options, sleep=lambda _: None, rng=lambda: 0.0)
    yield store
    store.close()


def hurried(store: S3Store) -> S3Store:
    """The same place for somebody who does not wait for a server that hangs."""
    return S3Store(replace(store.options, request_timeout_s=0.6))


@pytest.fixture
def stored(store: S3Store, server: HttpFaultServer) -> S3Store:
    """The store, with DATA under "f/a"."""
    server.put_object("bucket", "f/a", DATA)
    return store


# -- errors ---------------------------------------------------------------------------------------------------------


def test_get_with_a_lasting_fault_raises_its_error_and_keeps_the_buffer(
    stored: S3Store, server: HttpFaultServer
) -> None:
    for fault, error in ERRORS:
        server.inject(fault)
        target = GuardedParts(len(DATA) - 4096, 4096)
        before = target.joined()
        asked = len(server.requests("GET"))
        with pytest.raises(error) as caught:
            stored.get_into("f/a", target.parts)
        assert caught.value.key == "f/a"
        assert target.joined() == before, fault
        target.assert_only_parts_touched()
        again = len(server.requests("GET")) - asked
        if fault is Fault.RESET_BEFORE:
            assert again in (4, 5)  # a request is sent again if a kept connection is reset
        elif fault is not Fault.OTHER_REGION:  # which boto3 follows by itself
            assert again == (4 if caught.value.retryable else 1), fault
        server.heal()
        stored.get_into("f/a", target.parts)
        assert target.joined() == DATA, fault


def test_put_with_a_lasting_fault_raises_its_error_and_stores_nothing(store: S3Store, server: HttpFaultServer) -> None:
    for number, (fault, error) in enumerate(ERRORS):
        server.inject(fault)
        for overwrite in (False, True):
            with pytest.raises(error):
                store.put(f"f/{number}", as_parts(DATA), overwrite=overwrite)
        assert server.get_object("bucket", f"f/{number}") is None, fault
        server.heal()
        store.put(f"f/{number}", as_parts(DATA))
        assert server.get_object("bucket", f"f/{number}") == DATA, fault


def test_delete_list_and_tail_with_a_lasting_fault_raise_its_error(stored: S3Store, server: HttpFaultServer) -> None:
    calls: list[Callable[[], object]] = [
        lambda: stored.delete("f/a"),
        lambda: list(stored.keys()),
        lambda: stored.get_tail("f/a", 10),
    ]
    for fault, error in ERRORS:
        server.inject(fault)
        for call in calls:
            with pytest.raises(error):
                call()
        (outcome,) = stored.delete_many(["f/a"])
        assert isinstance(outcome, error), fault
        if fault is Fault.BUCKET_GONE:
            assert stored.size("f/a") is None
        else:
            with pytest.raises(error):
                stored.size("f/a")
            assert isinstance(stored.size_many(["f/a"])[0], error), fault
        server.heal()
        assert stored.size("f/a") == len(DATA), fault


@pytest.mark.parametrize("code", [f"Denied for {tiny_s3.SECRET_ECHO}", "Denied\nforged line", "A" * 65])
def test_invalid_error_code_of_a_server_is_not_repeated(stored: S3Store, server: HttpFaultServer, code: str) -> None:
    server.answers[Fault.ACCESS_DENIED] = tiny_s3.error(403, code)
    server.inject(Fault.ACCESS_DENIED)
    calls: list[Callable[[], object]] = [lambda: fetch(stored, "f/a", 1), lambda: list(stored.keys()), stored.check]
    for call in calls:
        with pytest.raises(StorePermissionError, match=r"^secret: [ -~]* \(HTTP 403\)( \(key 'f/a'\))?\Z"):
            call()
    page = f"<DeleteResult><Error><Key>f/a</Key><Code>{code}</Code></Error></DeleteResult>"
    server.answers[Fault.ACCESS_DENIED] = Answer(200, page.encode())
    (outcome,) = stored.delete_many(["f/a"])
    assert str(outcome).endswith("or another server answered (HTTP 500) (key 'f/a')")


def test_failed_call_keeps_no_reference_to_its_callers_memory(stored: S3Store, server: HttpFaultServer) -> None:
    """Until the cyclic collector ran, whoever made the region could not unmap it."""
    stored.prepare()
    for fault in (
        Fault.SLOW_DOWN, Fault.ACCESS_DENIED, Fault.NOT_IMPLEMENTED, Fault.BUCKET_GONE, Fault.HTML_WITH_200,
    ):  # fmt: skip
        memory = bytearray(len(DATA))
        server.heal()
        server.inject(fault)
        gc.disable()
        try:
            for overwrite in (False, True):
                with suppress(StoreError):
                    stored.put("f/b", [memoryview(memory)], overwrite=overwrite)
            with suppress(StoreError):
                stored.get_into("f/a", [memoryview(memory)])
            memory.extend(b"x")  # a BufferError where somebody still has a view
        finally:
            gc.enable()


def test_exception_of_a_look_callback_keeps_no_reference_to_the_callers_memory(stored: S3Store) -> None:
    def look(offset: int, piece: memoryview) -> None:
        raise SealError(SealReason.PAYLOAD_CHECKSUM, "no")

    memory = bytearray(len(DATA))
    gc.disable()
    try:
        with suppress(SealError):
            stored.get_pieces_into("f/a", [memoryview(memory)], look)
        memory.extend(b"x")
    finally:
        gc.enable()


def calls_of(store: S3Store) -> list[Callable[[], object]]:
    """Every way in which it asks for something, of the control plane and of objects."""
    keys = ["f/a", "f/b"]
    return [
        lambda: store.put("f/b", as_parts(DATA)),
        lambda: fetch(store, "f/a", len(DATA)),
        lambda: store.get_tail("f/a", 10),
        lambda: store.size("f/a"),
        lambda: store.delete("f/a"),
        lambda: list(store.keys()),
        lambda: [outcome for outcome in store.delete_many(keys) if not isinstance(outcome, StoreError)],
        store.folders,
        store.check,
    ]


@pytest.mark.parametrize("status", [200, 403, 503])
def test_error_document_without_a_valid_code_raises_only_store_errors(
    stored: S3Store, server: HttpFaultServer, status: int
) -> None:
    server.inject(Fault.INTERNAL_ERROR)
    for code in ("<Code/>", "<Code><x/></Code>", "<Code>A</Code><Code>B</Code>", ""):
        document = Answer(status, f"<Error>{code}<Message>m</Message></Error>".encode())
        server.answers[Fault.INTERNAL_ERROR] = document
        for call in calls_of(stored):
            with suppress(StoreError):
                call()


def answer_listings(server: HttpFaultServer, content: str) -> None:
    page = f"<ListBucketResult><Name>bucket</Name>{content}</ListBucketResult>"
    server.answers[Fault.HTML_WITH_200] = Answer(200, page.encode())
    server.inject(Fault.HTML_WITH_200, methods=("GET",))


@pytest.mark.parametrize("client", ["direct"], indirect=True)
def test_listing_whose_token_repeats_is_an_error(stored: S3Store, server: HttpFaultServer) -> None:
    answer_listings(server, "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>")
    for listing in (lambda: list(stored.keys()), stored.folders):
        before = len(server.requests("GET"))
        with pytest.raises(StoreConfigError, match="cuts a listing off"):
            listing()
        assert len(server.requests("GET")) - before == 2


@pytest.mark.parametrize("client", ["direct"], indirect=True)
@pytest.mark.parametrize("token", ["", "<NextContinuationToken/>"])
def test_listing_that_is_cut_off_without_a_token_is_an_error(
    stored: S3Store, server: HttpFaultServer, token: str
) -> None:
    """A collector and ``copy`` would take it for all that there is."""
    answer_listings(server, f"<IsTruncated>true</IsTruncated>{token}")
    for listing in (lambda: list(stored.keys()), stored.folders):
        with pytest.raises(StoreConfigError, match="cuts a listing off"):
            listing()


def test_transient_fault_is_retried(stored: S3Store, server: HttpFaultServer) -> None:
    for fault in (
        Fault.SLOW_DOWN,
        Fault.TOO_MANY_REQUESTS,
        Fault.INTERNAL_ERROR,
        Fault.RESET_BEFORE,
        Fault.RESET_INSIDE,
        Fault.TRUNCATED,
    ):
        asked = len(server.requests("GET"))
        server.heal()
        server.inject(fault, times=3)
        assert fetch(stored, "f/a", len(DATA)) == DATA, fault
        assert len(server.requests("GET")) - asked == 4, fault
        server.inject(fault, times=3)
        stored.put(f"f/{fault}", as_parts(DATA))
        assert server.get_object("bucket", f"f/{fault}") == DATA
        assert stored.size(f"f/{fault}") == len(DATA)


def test_refused_connection_is_unavailable_and_names_the_endpoint(store: S3Store, server: HttpFaultServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = S3Store(replace(store.options, endpoint_url=f"http://127.0.0.1:{closed.getsockname()[1]}"))
        with pytest.raises(StoreUnavailableError, match=r"^endpoint: http://127\.0\.0\.1:\d+ refused"):
            refused.put("f/a", as_parts(DATA))
        with pytest.raises(StoreUnavailableError):
            fetch(refused, "f/a", 1)
        assert [type(answer) for answer in refused.size_many(["a", "b"])] == [StoreUnavailableError] * 2
        refused.close()


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.SLOW_LORIS])
def test_get_from_a_hanging_server_times_out_after_one_request(
    stored: S3Store, server: HttpFaultServer, fault: Fault
) -> None:
    """The trickling one sends a byte every 20 ms, far within any socket timeout, for most of an hour."""
    store = hurried(stored)
    server.inject(fault)
    target = GuardedParts(len(DATA))
    asks_once(server, lambda: store.get_into("f/a", target.parts), r"did not answer within 0\.3 s", "GET")
    target.assert_only_parts_touched()
    server.heal()
    in_time(lambda: store.get_into("f/a", target.parts))
    assert target.joined() == DATA
    store.close()


def test_put_size_tail_delete_list_and_check_on_a_hanging_server_time_out(
    stored: S3Store, server: HttpFaultServer
) -> None:
    store = hurried(stored)
    server.inject(Fault.STALL)
    calls: list[Callable[[], object]] = [
        lambda: store.put("f/b", as_parts(DATA)),
        lambda: store.size("f/a"),
        lambda: store.get_tail("f/a", 10),
        lambda: store.delete("f/a"),
        lambda: list(store.keys()),
        store.check,
    ]
    for call in calls:
        with pytest.raises(StoreTimeoutError, match=r"^endpoint: http://127\.0\.0\.1:\d+ did not answer"):
            call()
    server.heal()
    assert in_time(lambda: store.size("f/a")) == len(DATA)
    store.close()


def test_put_to_a_server_that_reads_slowly_times_out(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster than any time-out of a socket."""
    taken = 0

    def read_slowly(handler: http_faults._Handler) -> Request:
        nonlocal taken
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        while some := handler.rfile.read1(32 << 10):
            taken += len(some)
            server.stopping.wait(0.02)
        raise ConnectionResetError

    monkeypatch.setattr(http_faults._Handler, "_read_request", read_slowly)
    store = hurried(store)
    data = bytes(16 << 20)
    with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
        store.put("f/b", as_parts(data))
    assert taken < len(data) / 2
    store.close()


def test_control_calls_to_a_server_that_trickles_bytes_time_out(stored: S3Store, server: HttpFaultServer) -> None:
    """Within boto3's own time-outs: each byte of an answer ends the wait for one. The last one never comes."""
    store = hurried(stored)
    server.inject(Fault.SLOW_LORIS)
    calls: list[Callable[[], object]] = [lambda: list(store.keys()), store.folders, store.check]
    for call in calls:
        with pytest.raises(StoreTimeoutError, match=r"^endpoint: http://127\.0\.0\.1:\d+ did not answer within 0\.3 s"):
            call()
    (outcome,) = store.delete_many(["f/b"])
    assert isinstance(outcome, StoreTimeoutError)
    store.close()
    patient = S3Store(replace(stored.options, request_timeout_s=2.0))
    keys = [f"f/{i}" for i in range(13)]
    wait_for(lambda: patient.size_many(keys) == [None] * 13)  # by HEADs
    patient.close()


# -- too few threads ------------------------------------------------------------------------------------------------


def refuse_threads(monkeypatch: pytest.MonkeyPatch, names: str, started: int = 0) -> None:
    """No more threads of names that begin so are to be had, after so many."""
    start = threading.Thread.start
    left = [None] * started

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(names):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)


def test_get_has_a_deadline_after_an_earlier_failure_to_start_the_watchdog(
    stored: S3Store, server: HttpFaultServer, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hurried(stored)
    store.prepare()
    with monkeypatch.context() as scarce:
        refuse_threads(scarce, "kvtiers-s3-watchdog")
        with pytest.raises(StoreUnavailableError, match="cannot start another thread"):
            fetch(store, "f/a", len(DATA))
    clients: Any = store._attempts.current().get()
    watchdog = clients.session.http.watchdog if client == "boto3" else clients.data._connections._watchdog
    assert not watchdog._guarded
    assert in_time(lambda: fetch(store, "f/a", len(DATA))) == DATA
    assert watchdog._thread.is_alive()
    server.inject(Fault.SLOW_LORIS)
    with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
        fetch(store, "f/a", len(DATA))
    store.close()


@pytest.mark.parametrize("first", [True, False])
def test_calls_that_need_a_thread_are_unavailable_if_no_thread_can_start(
    stored: S3Store, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The clients', of a first call; or the watchdog of a request of the control plane."""
    if not first:
        stored.prepare()
    calls: list[Callable[[], object]] = [stored.check, lambda: list(stored.keys()), stored.keeps_versions]
    with monkeypatch.context() as scarce:
        refuse_threads(scarce, "kvtiers-s3-")
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="cannot start another thread"):
                call()
        if first:
            assert isinstance(stored.size_many(["f/a"])[0], StoreUnavailableError)
    stored.check()


@pytest.mark.parametrize("started", [0, 2])
def test_many_keys_are_sized_and_deleted_with_the_threads_that_can_start(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    keys = [f"{i}/a" for i in range(40)]
    for key in keys:
        server.put_object("bucket", key, b"1")
    server.inject(Fault.NOT_IMPLEMENTED, methods=("POST",))
    store.prepare()
    for names in ("kvtiers-s3-head", "kvtiers-s3-delete"):
        refuse_threads(monkeypatch, names, started)
    assert store.size_many(keys) == [1] * 40
    assert store.delete_many(keys) == [None] * 40
    assert [key for key in keys if server.get_object("bucket", key) is not None] == []


@pytest.mark.parametrize("idle_s_max", [-1.0, 60.0])
def test_boto3_does_not_reuse_connections_that_were_idle_for_long(
    stored: S3Store, server: HttpFaultServer, client: str, monkeypatch: pytest.MonkeyPatch, idle_s_max: float
) -> None:
    """Those of the control plane, and of boto3."""
    monkeypatch.setattr("kvtiers.tiers.stores.s3.session.IDLE_S_MAX", idle_s_max)
    for _ in range(3):
        list(stored.keys())
        if client == "boto3":
            fetch(stored, "f/a", len(DATA))
    ports = {request.client_port for request in server.requests("GET")}
    assert len(ports) == (1 if idle_s_max > 0 else len(server.requests("GET")))


# -- bodies ---------------------------------------------------------------------------------------------------------


def test_get_of_an_object_of_another_length_is_corrupt_and_keeps_the_buffer(
    stored: S3Store, server: HttpFaultServer
) -> None:
    server.inject(Fault.LONGER)
    target = GuardedParts(len(DATA))
    before = target.joined()
    with pytest.raises(BlobCorruptError):
        stored.get_into("f/a", target.parts)
    assert target.joined() == before
    target.assert_only_parts_touched()
    assert len(server.requests("GET")) == 1
    server.heal()
    stored.get_into("f/a", target.parts)
    assert target.joined() == DATA


def test_broken_body_is_unavailable_and_a_later_get_succeeds(stored: S3Store, server: HttpFaultServer) -> None:
    for fault in (Fault.RESET_INSIDE, Fault.TRUNCATED, Fault.NO_LENGTH):
        server.inject(fault)
        target = GuardedParts(len(DATA))
        with pytest.raises(StoreUnavailableError):
            stored.get_into("f/a", target.parts)
        target.assert_only_parts_touched()
        server.heal()
        stored.get_into("f/a", target.parts)
        assert target.joined() == DATA, fault


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.FLIPPED_WITH_CHECKSUM])
def test_flipped_body_is_caught_by_the_seal(store: S3Store, server: HttpFaultServer, fault: Fault) -> None:
    """The clients take it for good, with a checksum beside it or not: that is why blocks are sealed."""
    seal = Seal(bytes(32), 0)
    key, payload = block_key(1), memoryview(make_data(8192))
    store.put("f/a", [payload, memoryview(seal.trailer(key, payload))])
    server.inject(fault)
    slot, trailer = bytearray(8192), bytearray(TRAILER_BYTES)
    store.get_into("f/a", [memoryview(slot), memoryview(trailer)])
    assert slot != payload
    with pytest.raises(SealError, match="payload_checksum"):
        seal.verify(key, memoryview(slot), trailer)


def test_get_tail_works_on_a_server_that_ignores_ranges(stored: S3Store, server: HttpFaultServer) -> None:
    server.inject(Fault.IGNORE_RANGE)
    for size in (3 << 20, (1 << 20) + 4096, 5000, 100):
        data = make_data(size)
        server.put_object("bucket", "f/large", data)
        assert stored.get_tail("f/large", 4096) == (size, data[-4096:])


def test_newer_and_good_blocks_stay_where_the_server_ignores_ranges(store: S3Store, server: HttpFaultServer) -> None:
    keys, rows = [block_key(1), block_key(2)], np.zeros((2, 8192), np.int8)
    mover = BlockMover("s3", store, "m_r0", Seal(bytes(32), 0), Rows(rows.data), print)
    assert mover.store_batch([(keys[0], 0), (keys[1], 1)]).outcomes == {"moved": 2}
    name = block_name("m_r0", keys[0])
    blob = bytearray(server.get_object("bucket", name) or b"")
    blob[8192 + 8] = 2
    check = xxhash.xxh3_64_intdigest(blob[8192 : 8192 + CHECK_AT])
    blob[8192 + CHECK_AT : 8192 + CHECK_AT + 8] = check.to_bytes(8, "little")
    server.put_object("bucket", name, bytes(blob))
    server.inject(Fault.IGNORE_RANGE)
    assert mover.store_batch([(keys[0], 0), (keys[1], 1)]).outcomes == {"failed": 1, "already_stored": 1}
    assert server.get_object("bucket", name) == bytes(blob)


def test_get_tail_of_a_huge_object_from_a_server_that_ignores_ranges_is_refused(
    stored: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3Store, "_size", lambda *_: (1 << 63) - 1)
    server.inject(Fault.IGNORE_RANGE)
    with pytest.raises(BlobCorruptError, match="ignores ranges"):
        stored.get_tail("f/a", 4096)


def test_bucket_region_header_beside_an_error_is_not_a_redirect(stored: S3Store, server: HttpFaultServer) -> None:
    """MinIO with a region of its own names it in every answer."""
    server.change_headers = lambda _, headers: {**headers, "x-amz-bucket-region": "eu-west-1"}
    assert stored.size("f/a") == len(DATA)
    assert stored.size("f/absent") is None
    assert stored.size_many([f"f/{i}" for i in range(20)]) == [None] * 20
    server.inject(Fault.SLOW_DOWN, methods=("HEAD",))
    with pytest.raises(StoreThrottledError):
        stored.size("f/a")
    server.heal()
    server.inject(Fault.ACCESS_DENIED)
    with pytest.raises(StorePermissionError):
        stored.size("f/a")


def test_html_page_with_status_200_is_unavailable_and_not_a_corrupt_blob(
    stored: S3Store, server: HttpFaultServer
) -> None:
    """Status 200, of a login page or a sick proxy: what is taken for a corrupt block is deleted."""
    server.inject(Fault.HTML_WITH_200)
    target = GuardedParts(len(DATA))
    before = target.joined()
    calls: list[Callable[[], object]] = [
        lambda: stored.get_into("f/a", target.parts),
        lambda: stored.get_tail("f/a", 10),
        lambda: stored.size("f/a"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailableError):
            call()
    assert target.joined() == before
    target.assert_only_parts_touched()


@pytest.mark.parametrize("fault", [Fault.REDIRECT, Fault.NO_LENGTH])
def test_unusable_answer_is_not_requested_again(stored: S3Store, server: HttpFaultServer, fault: Fault) -> None:
    """A second request of the same attempt would take its time once more."""
    store = S3Store(replace(stored.options, retries=0))
    server.inject(fault)
    with pytest.raises((StoreConfigError, StoreUnavailableError)):
        fetch(store, "f/a", len(DATA))
    assert len(server.requests("GET")) == 1
    store.close()


# -- puts that somebody else, or we ourselves, did already ----------------------------------------------------------


def test_create_that_loses_to_another_writer_returns_false(store: S3Store, server: HttpFaultServer) -> None:
    server.inject(Fault.PRECONDITION)
    assert not store.put("f/a", as_parts(DATA))
    assert len(server.requests("PUT")) == 1
    with pytest.raises(StoreUnavailableError):
        store.put("f/a", as_parts(DATA), overwrite=True)


def test_create_that_meets_a_conflict_is_retried(store: S3Store, server: HttpFaultServer) -> None:
    """Of a 409 nobody knows what comes: the other operation may be a deletion."""
    server.inject(Fault.CONFLICT, times=1)
    assert store.put("f/a", as_parts(DATA))
    assert server.get_object("bucket", "f/a") == DATA
    server.inject(Fault.CONFLICT, times=1)
    assert not store.put("f/a", as_parts(DATA))
    server.inject(Fault.CONFLICT)
    with pytest.raises(StoreUnavailableError, match="another writer"):
        store.put("f/b", as_parts(DATA))


@pytest.mark.parametrize("overwrite", [False, True])
def test_put_and_delete_with_a_lost_answer_are_retried(
    store: S3Store, server: HttpFaultServer, overwrite: bool
) -> None:
    """The first attempt is done, but not heard of; the second meets 412, or does it again."""
    server.inject(Fault.LOST_ACK, times=1)
    store.put("f/a", as_parts(DATA), overwrite=overwrite)
    assert len(server.requests("PUT")) == 2
    assert server.get_object("bucket", "f/a") == DATA
    server.inject(Fault.LOST_ACK, times=1)
    store.delete("f/a")
    assert server.get_object("bucket", "f/a") is None


def test_put_answered_by_an_html_page_is_an_error(store: S3Store, server: HttpFaultServer) -> None:
    server.inject(Fault.HTML_WITH_200)
    with pytest.raises(StoreUnavailableError):
        store.put("f/a", as_parts(DATA))
    assert server.get_object("bucket", "f/a") is None


def test_put_sends_its_body_without_waiting_for_100_continue(store: S3Store, server: HttpFaultServer) -> None:
    """boto3 would wait a second for servers that never say "100 Continue"."""
    store.put("f/a", as_parts(DATA))
    assert [request.headers.get("expect") for request in server.requests("PUT")] == [None]


# -- credentials that come back -------------------------------------------------------------------------------------


def test_renewed_credentials_are_used_after_an_expiry(
    stored: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.inject(Fault.EXPIRED_TOKEN, times=1)
    with pytest.raises(CredentialsExpiredError, match=r"^secret: the session token has expired; renew it"):
        fetch(stored, "f/a", len(DATA))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    assert fetch(stored, "f/a", len(DATA)) == DATA
    used = [request.headers["authorization"].partition("Credential=")[2] for request in server.requests("GET")]
    assert [credential.partition("/")[0] for credential in used] == ["first", "second"]


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch"])
def test_rotated_access_keys_are_used_after_a_refusal(
    stored: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    server.answers[Fault.SIGNATURE] = tiny_s3.error(403, code)
    server.inject(Fault.SIGNATURE, times=1)
    with pytest.raises(StorePermissionError, match=rf"^secret: .*\({code}, HTTP 403\)"):
        fetch(stored, "f/a", len(DATA))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    assert fetch(stored, "f/a", len(DATA)) == DATA
    assert "Credential=second/" in server.requests("GET")[-1].headers["authorization"]


@pytest.mark.parametrize("fault", [Fault.EXPIRED_TOKEN, Fault.ACCESS_DENIED])
def test_refused_head_is_repeated_as_a_get_that_gives_the_reason(
    stored: S3Store, server: HttpFaultServer, fault: Fault
) -> None:
    """A HEAD's answer has no body, and an open circuit's probe is a HEAD."""
    assert stored.size("f/a") == len(DATA)
    assert stored.size("f/b") is None
    assert not server.requests("GET")
    server.inject(fault, methods=("HEAD",))
    assert stored.size("f/a") == len(DATA)
    server.put_object("bucket", "f/empty", b"")
    with pytest.raises((StoreConfigError, StorePermissionError), match=r"\(HTTP 40[03]\)"):
        stored.size("f/empty")
    server.inject(fault, methods=("GET",))
    with pytest.raises(StorePermissionError, match="ExpiredToken|AccessDenied"):
        stored.size("f/a")


def test_put_to_a_server_without_conditional_writes_checks_for_the_key_first(
    store: S3Store, server: HttpFaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Backblaze B2: 501 to a PUT with If-None-Match."""
    server.inject(Fault.REFUSE_CONDITION)
    server.put_object("bucket", "f/b", b"another's")
    assert store.put("f/b", as_parts(DATA)) is False
    promised = [store.capabilities.exclusive_create]  # of what refused it nothing is known yet
    assert store.put("f/a", as_parts(DATA)) is True
    assert [*promised, store.capabilities.exclusive_create] == [True, False]
    refused = len(server.requests("PUT"))
    assert store.put("f/a", as_parts(b"other")) is False
    assert store.put("f/c", as_parts(DATA)) is True
    assert len(server.requests("PUT")) == refused + 1
    assert store.put("f/a", as_parts(b"other"), overwrite=True) is True
    assert [server.get_object("bucket", key) for key in ("f/a", "f/b", "f/c")] == [b"other", b"another's", DATA]
    assert caplog.text.count("refuses If-None-Match") == 1
    assert "refuses crc64nvme" not in caplog.text


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("XAmzContentChecksumMismatch", StoreUnavailableError),
        ("InvalidDigest", StoreUnavailableError),
        ("ThrottlingException", StoreThrottledError),
    ],
)
def test_transient_fault_with_status_400_is_retried(
    store: S3Store, server: HttpFaultServer, code: str, error: type[StoreError]
) -> None:
    server.answers[Fault.INTERNAL_ERROR] = tiny_s3.error(400, code)
    server.inject(Fault.INTERNAL_ERROR, times=3)
    assert store.put("f/a", as_parts(DATA)) is True
    assert not store.checksum_refused
    server.inject(Fault.INTERNAL_ERROR)
    with pytest.raises(error):
        store.put("f/b", as_parts(DATA))


def test_blob_too_large_for_the_server_is_sent_once(store: S3Store, server: HttpFaultServer) -> None:
    page = Answer(413, b"<html>413 Request Entity Too Large</html>", {"Content-Type": "text/html"})
    server.answers[Fault.INTERNAL_ERROR] = page
    server.inject(Fault.INTERNAL_ERROR)
    with pytest.raises(StoreConfigError, match=r"^the blob is larger than the server, or a proxy in front of it"):
        store.put("f/a", as_parts(DATA))
    assert len(server.requests("PUT")) == 1


@pytest.mark.parametrize(("method", "refusal"), [("HEAD", Fault.ACCESS_DENIED), ("PUT", Fault.REFUSE_CHECKSUM)])
def test_second_form_of_a_refused_request_is_not_sent_late_in_the_timeout(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, method: str, refusal: Fault
) -> None:
    """A refusal in the second half of an operation's time leaves none for another request."""
    now = [0.0]
    slow = S3Store(store.options, clock=lambda: now[0])
    begin = server.begin

    def begin_late(request: Request) -> Fault | Hostile | None:
        now[0] += store.options.request_timeout_s * 0.6
        return begin(request)

    monkeypatch.setattr(server, "begin", begin_late)
    server.inject(refusal)
    with pytest.raises((StoreConfigError, StorePermissionError)):
        slow.size("f/a") if method == "HEAD" else slow.put("f/a", as_parts(DATA))
    assert [request.method for request in server.requests()] == [method]
    slow.close()


def test_renewed_credentials_are_found_by_lookups_alone(
    stored: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    store = S3Store(stored.options, clock=lambda: now[0])
    server.inject(Fault.EXPIRED_TOKEN)
    closed: list[S3Session] = []
    monkeypatch.setattr(S3Session, "close", lambda session: closed.append(session))
    for _ in range(5):
        with pytest.raises(CredentialsExpiredError, match=r"^secret: the session token has expired; renew it"):
            store.size("f/a")
    assert len(closed) == 1  # to read the chain again for each of them would be dear
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    now[0] += RENEW_EVERY_S
    with pytest.raises(CredentialsExpiredError):
        store.size("f/a")
    server.heal()
    assert store.size("f/a") == len(DATA)
    assert "Credential=second/" in server.requests("HEAD")[-1].headers["authorization"]
    store.close()


@pytest.mark.parametrize("client", ["direct"], indirect=True)
def test_lasting_refusal_renews_the_clients_ever_less_often(
    stored: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one key that a proxy mangles, whose signature is never right."""
    now = [0.0]
    store = S3Store(stored.options, clock=lambda: now[0])
    store.prepare()
    server.inject(Fault.SIGNATURE, path_contains="f/bad")
    made: list[float] = []
    monkeypatch.setattr(S3Session, "close", lambda _: made.append(now[0]))
    for now[0] in [*map(float, range(200)), 600.0, 601.0, 602.0]:
        with pytest.raises(StorePermissionError):
            fetch(store, "f/bad", 1)
        assert store.size("f/a") == len(DATA)
    assert made == [0, 2, 6, 14, 30, 62, 122, 182, 600, 602]
    store.close()


@pytest.mark.parametrize("renewed", [False, True])
def test_clients_made_while_the_store_closes_are_closed_too(
    stored: S3Store, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    store = S3Store(stored.options)
    current = store._attempts.current

    def close_first() -> ProcessClients:
        process = current()
        store.close()
        if renewed:  # by another call
            store._attempts._renew(process)
        return current()

    monkeypatch.setattr(store._attempts, "current", close_first)
    closed: list[S3Session] = []
    monkeypatch.setattr(S3Session, "close", lambda session: closed.append(session))
    assert store.size("f/a") == len(DATA)
    wait_for(lambda: len(closed) == 1)


# -- many questions -------------------------------------------------------------------------------------------------


def test_size_many_gives_up_on_a_server_that_stopped_answering(store: S3Store, server: HttpFaultServer) -> None:
    """1,000 keys of half a second each would be minutes; it is two rounds."""
    server.inject(Fault.STALL)
    store = S3Store(replace(store.options, request_timeout_s=0.2, max_connections=8))
    answers = store.size_many([f"{i}/a" for i in range(1000)])
    assert {type(answer) for answer in answers} == {StoreTimeoutError}
    assert len(server.requests("HEAD")) < 100


def test_size_many_answered_by_an_html_page_is_unavailable_for_all_keys(
    stored: S3Store, server: HttpFaultServer
) -> None:
    server.inject(Fault.HTML_WITH_200)
    answers = stored.size_many(["f/a", *(f"f/{i:02}" for i in range(13))])
    assert all(isinstance(answer, StoreUnavailableError) for answer in answers)


def test_denied_key_in_size_many_does_not_affect_other_keys(stored: S3Store, server: HttpFaultServer) -> None:
    server.inject(Fault.ACCESS_DENIED, path_contains="/f/b")
    absent, denied, present = stored.size_many(["f/c", "f/b", "f/a"])
    assert (absent, present) == (None, len(DATA))
    assert isinstance(denied, StorePermissionError)


# -- many deletions -------------------------------------------------------------------------------------------------


def test_blobs_are_deleted_one_by_one_where_batches_are_refused(store: S3Store, server: HttpFaultServer) -> None:
    """By servers without DeleteObjects, and by those that want Content-MD5 with it, which boto3 no longer sends."""
    keys = [f"f/{i}" for i in range(20)]
    for key in keys:
        server.put_object("bucket", key, DATA)
    server.inject(Fault.NOT_IMPLEMENTED, methods=("POST",))
    server.inject(Fault.ACCESS_DENIED, methods=("DELETE",), path_contains="/f/7")
    outcomes = store.delete_many(keys)
    assert [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not None] == ["f/7"]
    assert isinstance(outcomes[7], StorePermissionError)
    assert outcomes[7].key == "f/7"
    assert [key for key in keys if server.get_object("bucket", key) is not None] == ["f/7"]
    assert store.delete_many(["f/0", "f/absent"]) == [None, None]


def test_deletion_answered_by_an_html_page_is_an_error_and_deletes_nothing(
    stored: S3Store, server: HttpFaultServer
) -> None:
    server.inject(Fault.HTML_WITH_200)
    with pytest.raises(StoreConfigError, match="does not answer like an S3 server"):
        stored.delete("f/a")
    (outcome,) = stored.delete_many(["f/a"])
    assert isinstance(outcome, StoreConfigError)
    server.heal()
    assert stored.size("f/a") == len(DATA)
    assert stored.delete_many(["f/a"]) == [None]


def test_deletions_with_unusual_success_answers_succeed(stored: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is as quiet as it was not asked to be, and says 200 where S3 says 204."""
    answer = tiny_s3.TinyS3.answer

    def otherwise(self: tiny_s3.TinyS3, request: tiny_s3.Request) -> tiny_s3.Answer:
        made = answer(self, request)
        if request.method == "POST":
            return tiny_s3.Answer(200, b"<DeleteResult></DeleteResult>")
        if request.method == "DELETE":
            return tiny_s3.Answer(200, headers={"x-amz-request-id": "1"})
        return made

    monkeypatch.setattr(tiny_s3.TinyS3, "answer", otherwise)
    assert stored.delete_many(["f/a", "f/b"]) == [None, None]
    assert stored.size("f/a") is None


def test_refusal_of_every_deletion_does_not_end_the_use_of_batches(store: S3Store, server: HttpFaultServer) -> None:
    server.inject(Fault.NOT_IMPLEMENTED)
    outcomes = store.delete_many(["a", "b"])
    assert [type(outcome) for outcome in outcomes] == [RequestRefusedError] * 2
    server.heal()
    assert store.delete_many(["a", "b"]) == [None, None]
    assert len(server.requests("POST")) == 2


def test_single_deletions_on_a_hanging_server_are_given_up(store: S3Store, server: HttpFaultServer) -> None:
    hasty = hurried(store)
    server.inject(Fault.NOT_IMPLEMENTED, methods=("POST",))
    server.inject(Fault.STALL, methods=("DELETE",))
    outcomes = hasty.delete_many([f"f/{i}" for i in range(200)])
    assert {type(outcome) for outcome in outcomes} == {StoreTimeoutError}
    assert len(server.requests("DELETE")) <= DELETERS_MAX
    hasty.close()


# -- check ----------------------------------------------------------------------------------------------------------


def test_check_error_names_the_cause_of_each_fault(store: S3Store, server: HttpFaultServer) -> None:
    cases: list[tuple[Fault, type[StoreError], str]] = [
        (Fault.EXPIRED_TOKEN, StorePermissionError, "secret: the session token has expired"),
        (Fault.CLOCK_SKEW, StorePermissionError, "clock: this machine's clock"),
        (Fault.ACCESS_DENIED, StorePermissionError, "secret: these credentials may not do this; grant s3:GetObject"),
        (Fault.SIGNATURE, StorePermissionError, "secret: the secret access key is wrong for this access key id"),
        (Fault.BUCKET_GONE, StoreConfigError, "bucket: bucket does not exist at http://127.0.0.1"),
        (Fault.OTHER_REGION, StoreConfigError, "region: bucket bucket is not in us-east-1; set region"),
        (Fault.HTML_WITH_200, StoreConfigError, "endpoint: http://127.0.0.1"),
        (Fault.RESET_BEFORE, StoreUnavailableError, "endpoint: http://127.0.0.1"),
        (Fault.INTERNAL_ERROR, StoreUnavailableError, "the server reports an internal error"),
    ]
    for fault, error, says in cases:
        server.heal()
        store.check()
        server.inject(fault)
        with pytest.raises(error) as caught:
            store.check()
        assert str(caught.value).startswith(says)
        assert "\n" not in str(caught.value)


def test_redirect_error_names_its_target_after_at_most_two_requests(store: S3Store, server: HttpFaultServer) -> None:
    """As of a proxy that wants https. botocore asked by a HEAD where the bucket is, and for that HEAD's, 80 deep."""
    server.inject(Fault.REDIRECT)
    for call in (store.check, lambda: list(store.keys()), lambda: store.put("f/a", as_parts(DATA))):
        asked = len(server.requests())
        with pytest.raises(StoreConfigError, match=r"^endpoint: http://127\.0\.0\.1:\d+ redirects to ") as caught:
            call()
        assert len(server.requests()) - asked <= 2
        assert "session" not in str(caught.value)
    with pytest.raises(StoreConfigError, match=r"redirects to https://127\.0\.0\.1:9; correct endpoint_url"):
        store.check()


PAGES = {"html": b"<html><body><h1>Sorry</h1></body></html>", "json": b'{"detail": "Not Found"}', "none": b""}


@pytest.mark.parametrize("page", PAGES)
def test_check_error_says_that_another_service_answers_at_the_endpoint(
    store: S3Store, server: HttpFaultServer, page: str
) -> None:
    server.inject(Fault.HTML_WITH_200)
    for status in (200, 400, 401, 403, 404):
        server.answers[Fault.HTML_WITH_200] = Answer(status, PAGES[page])
        with pytest.raises(
            StoreError,
            match=r"^endpoint: http://127\.0\.0\.1:\d+ (does not answer like an S3|.* another server answered)",
        ):
            store.check()


@pytest.mark.parametrize("page", PAGES)
def test_404_answers_to_puts_rules_and_deletions_are_config_errors(
    store: S3Store, server: HttpFaultServer, page: str
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.put("f/a", as_parts(DATA)),
        lambda: store.put("f/a", as_parts(DATA), overwrite=True),
        store.keeps_versions,
    ]
    server.answers[Fault.HTML_WITH_200] = Answer(404, PAGES[page])
    for fault, says in (
        (Fault.HTML_WITH_200, r"^endpoint: http://127\.0\.0\.1:\d+ does not answer like an S3 server.*\(HTTP 404\)"),
        (Fault.BUCKET_GONE, r"^bucket: bucket does not exist at .*\(NoSuchBucket, HTTP 404\)"),
    ):
        server.heal()
        server.inject(fault)
        for call in calls:
            with pytest.raises(StoreConfigError, match=says):
                call()
        (outcome,) = store.delete_many(["f/a"])
        assert isinstance(outcome, StoreConfigError)
        assert re.match(says, str(outcome))


def test_check_does_not_wait_for_a_hung_server(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With patient options, the check's own limit ends it."""
    monkeypatch.setattr("kvtiers.tiers.stores.s3.store.CHECK_S_MAX", 0.2)
    server.inject(Fault.STALL)
    patient = S3Store(replace(store.options, request_timeout_s=600.0))
    patient.prepare()
    with pytest.raises(StoreTimeoutError, match=r"^endpoint: http://127\.0\.0\.1:\d+ did not answer within 0\.2 s"):
        patient.check()


# -- whole tiers (W4) ---------------------------------------------------------------------------------------------

ROWS, ROW_BYTES = 16, 8192
KEYS = [block_key(n) for n in range(ROWS)]


class Tier:
    """A StoreTierManager on the store, with KEYS stored, and what it loads."""

    def __init__(self, store: ImpatientStore) -> None:
        self.store = store
        self.region = np.random.default_rng(1).integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
        self.original = self.region.copy()
        spec = FakeSpec()
        self.mapper = FileMapper.from_offloading_spec("", spec, extra_fields=strict_fields(spec))
        options = TierOptions(job_deadline_s=PATIENT["job_deadline_s"])
        self.manager = StoreTierManager(
            spec, self.region.data, "s3", make_backend=in_threads(store), mapper=self.mapper, options=options
        )
        self.jobs = 0
        self.manager.submit_store(self.job())
        self.manager.drain_jobs()
        (result,) = self.manager.get_finished()
        assert result.success

    def job(self) -> JobMetadata:
        self.jobs += 1
        return JobMetadata(self.jobs, KEYS, np.arange(ROWS, dtype=np.int32))

    def load(self) -> set[int]:
        """Which blocks a load says are good; each of them is, or the test fails."""
        self.region[:] = 0
        self.manager.submit_load(self.job())
        self.manager.drain_jobs()
        (result,) = self.manager.get_finished()
        good = {KEYS.index(key) for key in result.successful_keys}
        for i in good:
            assert (self.region[i] == self.original[i]).all(), "a load succeeded with wrong bytes"
        return good

    def name(self, index: int) -> str:
        return self.mapper.relative_name(KEYS[index])


class ImpatientStore(S3Store):
    """Gives up soon on the objects in ``hurried``. For all others it has as long as a busy machine may need."""

    def __init__(self, options: S3Options) -> None:
        super().__init__(options)
        self.hurried: set[str] = set()
        self._hurried_store = hurried(self)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        if key in self.hurried:
            self._hurried_store.get_into(key, parts)
        else:
            super().get_into(key, parts)

    def get_pieces_into(self, key: str, parts: Sequence[memoryview], look: Look) -> None:
        if key in self.hurried:
            self._hurried_store.get_pieces_into(key, parts, look)
        else:
            super().get_pieces_into(key, parts, look)

    def close(self) -> None:
        self._hurried_store.close()
        super().close()


@pytest.fixture
def tier(store: S3Store) -> Iterator[Tier]:
    made = Tier(ImpatientStore(replace(store.options, retries=1)))
    yield made
    made.manager.shutdown()


@pytest.mark.parametrize(
    "fault",
    [
        Fault.FLIPPED,
        Fault.FLIPPED_WITH_CHECKSUM,
        Fault.LONGER,
        Fault.TRUNCATED,
        Fault.HTML_WITH_200,
        Fault.RESET_INSIDE,
        Fault.ACCESS_DENIED,
        Fault.INTERNAL_ERROR,
        Fault.STALL,
        Fault.SLOW_LORIS,
    ],
)
def test_s3_fault_is_a_miss_of_exactly_the_affected_keys(tier: Tier, server: HttpFaultServer, fault: Fault) -> None:
    """W4."""
    for i in (2, 5):
        server.inject(fault, methods=("GET",), path_contains=tier.name(i))
        if fault in (Fault.STALL, Fault.SLOW_LORIS):
            tier.store.hurried.add(tier.name(i))
    assert tier.load() == set(range(ROWS)) - {2, 5}


def test_html_page_for_a_block_is_a_miss_and_deletes_no_block(tier: Tier, server: HttpFaultServer) -> None:
    server.inject(Fault.HTML_WITH_200, methods=("GET",), path_contains=tier.name(2), times=4)
    assert tier.load() == set(range(ROWS)) - {2}
    server.heal()
    assert tier.load() == set(range(ROWS))
    assert not server.requests("DELETE")


def test_block_whose_puts_meet_conflicts_is_not_reported_as_stored(tier: Tier, server: HttpFaultServer) -> None:
    """W1: what is told to the engine as stored is there."""
    server.s3.remove_objects("bucket", lambda key: key == tier.name(2))
    server.inject(Fault.CONFLICT, methods=("PUT",), path_contains=tier.name(2))
    tier.manager.submit_store(tier.job())
    tier.manager.drain_jobs()
    (result,) = tier.manager.get_finished()
    assert set(result.successful_keys) == set(KEYS) - {KEYS[2]}


# -- answers without a header ------------------------------------------------------------------------------------------


def leave_out(server: HttpFaultServer, header: str, *methods: str) -> None:
    """Have the server answer these methods without a header, as some proxies do."""

    def change(method: str, headers: dict[str, str]) -> dict[str, str]:
        return {n: v for n, v in headers.items() if method not in methods or n != header}

    server.change_headers = change


def test_missing_content_length_error_names_the_header_and_is_not_retried(
    stored: S3Store, server: HttpFaultServer
) -> None:
    leave_out(server, "Content-Length", "GET", "HEAD")
    calls: dict[str, Callable[[], object]] = {
        "GET": lambda: fetch(stored, "f/a", len(DATA)),
        "HEAD": lambda: stored.size("f/a"),
    }
    for method, call in calls.items():
        before = len(server.requests(method))
        with pytest.raises(StoreError, match="without the header Content-Length") as caught:
            call()
        assert not caught.value.retryable
        assert "refused" not in str(caught.value)
        assert len(server.requests(method)) == before + 1


def test_answer_without_etag_is_told(stored: S3Store, server: HttpFaultServer) -> None:
    leave_out(server, "ETag", "HEAD", "PUT")
    calls: list[Callable[[], object]] = [lambda: stored.size("f/a"), lambda: stored.put("f/b", as_parts(DATA))]
    for call in calls:
        with pytest.raises(StoreError, match="without the header ETag"):
            call()
    assert len(server.requests("PUT")) == 1
