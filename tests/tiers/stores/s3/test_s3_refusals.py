"""Puts that a server, gateway or proxy refuses: uploads made, refusals remembered, and causes named in errors."""

from __future__ import annotations

import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from kvtiers.tiers.errors import StoreConfigError, StoreError, StorePermissionError, StoreUnavailableError
from kvtiers.tiers.stores.s3.errors import CredentialsRefusedError, ProxyRefusedError
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.put_form import REMEMBERED_S
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing import tiny_s3
from kvtiers.tiers.testing.contract import as_parts, fetch, make_data
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.tiny_s3 import Answer, Request, TinyS3
from tests.s3_clients import use_credentials

DATA = make_data(3000)
#: Decides the answer to a request; None: the server's own.
Gate = Callable[[Request], Answer | None]


@pytest.fixture(autouse=True)
def _credentials(boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def store(server: HttpFaultServer, client: str, now: list[float]) -> Iterator[S3Store]:
    options = S3Options(bucket="bucket", endpoint_url=server.endpoint_url, request_timeout_s=60.0)
    store = S3Store(options, clock=lambda: now[0], sleep=lambda _: None, rng=lambda: 0.0)
    yield store
    store.close()


def set_gate(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    answer = TinyS3.answer
    monkeypatch.setattr(TinyS3, "answer", lambda self, request: gate(request) or answer(self, request))


def refuse_puts(*, having: str = "", status: int = 400, code: str = "") -> Gate:
    """Refuse puts, or only those with a header whose name contains ``having``."""
    refusal = tiny_s3.error(status, code) if code else Answer(status, b"<html>refused</html>")

    def gate(request: Request) -> Answer | None:
        return refusal if request.method == "PUT" and any(having in name for name in request.headers) else None

    return gate


def uploads_of(server: HttpFaultServer, call: Callable[[], object]) -> int:
    """Number of times that the call sends a blob."""
    before = len(server.requests("PUT"))
    with suppress(StoreError):
        call()
    return len(server.requests("PUT")) - before


# -- refusals of everything --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 406, 421, 451])
def test_put_refused_in_all_forms_is_sent_once_afterwards(
    store: S3Store, server: HttpFaultServer, now: list[float], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    set_gate(monkeypatch, refuse_puts(status=status))
    counts = [uploads_of(server, lambda: store.put("f/a", as_parts(DATA))) for _ in range(3)]
    assert counts == [6, 1, 1]
    now[0] += REMEMBERED_S  # the cause may be gone
    assert uploads_of(server, lambda: store.put("f/a", as_parts(DATA))) == 6


def test_put_after_the_end_of_a_full_refusal_uses_the_usual_form(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        set_gate(context, refuse_puts())
        assert uploads_of(server, lambda: store.put("f/a", as_parts(DATA))) == 6
    assert uploads_of(server, lambda: store.put("f/a", as_parts(DATA))) == 1
    assert "x-amz-checksum-crc64nvme" in server.requests("PUT")[-1].headers
    set_gate(monkeypatch, refuse_puts(having="checksum", code="InvalidRequest"))
    assert store.put("f/b", as_parts(DATA)) is True  # all ways are tried again


# -- refusals of some ways ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["", "SomethingOfAProxys", "InvalidRequest"])
@pytest.mark.parametrize(("having", "tries"), [("checksum", 3), ("if-none-match", 4)], ids=["checksum", "condition"])
def test_way_that_a_server_accepts_after_refusals_is_taken_for_a_while(
    store: S3Store,
    server: HttpFaultServer,
    now: list[float],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    having: str,
    tries: int,
) -> None:
    with monkeypatch.context() as context:
        set_gate(context, refuse_puts(having=having, status=406, code=code))
        counts = [uploads_of(server, lambda n=n: store.put(f"f/{n}", as_parts(DATA))) for n in range(3)]  # type: ignore[misc]
        assert counts == [tries, 1, 1]
        now[0] += REMEMBERED_S
        assert uploads_of(server, lambda: store.put("f/3", as_parts(DATA))) == tries
    assert all(server.get_object("bucket", f"f/{n}") == DATA for n in range(4))
    assert store.put("f/0", as_parts(DATA)) is False
    now[0] += REMEMBERED_S
    assert uploads_of(server, lambda: store.put("f/8", as_parts(DATA))) == 1
    assert {"x-amz-checksum-crc64nvme", "if-none-match"} <= server.requests("PUT")[-1].headers.keys()


# -- checksums refused as a wrong signature ----------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "AccessDenied"])
def test_put_whose_checksum_headers_are_refused_by_signature_gets_plain_form(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    set_gate(monkeypatch, refuse_puts(having="checksum", status=403, code=code))
    assert uploads_of(server, lambda: store.put("f/a", as_parts(DATA))) == 3
    assert uploads_of(server, lambda: store.put("f/b", as_parts(DATA))) == 1
    assert server.get_object("bucket", "f/a") == server.get_object("bucket", "f/b") == DATA
    assert store.checksum_refused
    assert fetch(store, "f/a", len(DATA)) == DATA


@pytest.mark.parametrize(("code", "tries"), [("SignatureDoesNotMatch", 3), ("InvalidAccessKeyId", 1)])
def test_put_with_wrong_secret_is_sent_once_from_then_on(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, code: str, tries: int
) -> None:
    set_gate(monkeypatch, lambda _: tiny_s3.error(403, code))
    with pytest.raises(CredentialsRefusedError, match=rf"^secret: .*\({code}, HTTP 403\)"):
        store.put("f/a", as_parts(DATA))
    assert len(server.requests("PUT")) == tries
    assert uploads_of(server, lambda: store.put("f/b", as_parts(DATA))) == 1
    assert not store.checksum_refused


# -- encryption --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (501, "NotImplemented"),
        (400, "InvalidRequest"),
        (400, "InvalidArgument"),
        (400, "InvalidEncryptionAlgorithmError"),
        (501, "KMSNotConfigured"),
        (400, "XMinioKMSNotConfigured"),
        (403, "AccessDenied"),
        (400, ""),
    ],
)
def test_put_with_refused_encryption_error_names_sse(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    set_gate(monkeypatch, refuse_puts(having="server-side-encryption", status=status, code=code))
    encrypted = S3Store(replace(store.options, sse="AES256"))
    with pytest.raises((StoreConfigError, StorePermissionError), match=r"\bsse: "):
        encrypted.put("f/a", as_parts(DATA))
    encrypted.close()
    assert store.put("f/a", as_parts(DATA)) is True


def test_put_with_refused_storage_class_error_names_the_storage_class(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gate(monkeypatch, refuse_puts(having="storage-class", status=501, code="NotImplemented"))
    cold = S3Store(replace(store.options, storage_class="STANDARD_IA"))
    with pytest.raises(StoreConfigError, match="storage_class: STANDARD_IA, which the server may not support"):
        cold.put("f/a", as_parts(DATA))
    cold.close()


def test_put_refused_without_encryption_error_does_not_name_sse(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gate(monkeypatch, refuse_puts(status=501, code="NotImplemented"))
    with pytest.raises(StoreConfigError) as caught:
        store.put("f/a", as_parts(DATA))
    assert "sse" not in str(caught.value)


# -- proxies -----------------------------------------------------------------------------------------------------------


@contextmanager
def tunnel_proxy(status: str) -> Iterator[tuple[int, list[str]]]:
    """A proxy that answers each CONNECT with a status. Yields its port and the requests' first lines."""
    asked: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode())
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            self.wfile.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1], asked
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "says"),
    [("407 Proxy Authentication Required", "requires a login"), ("403 Forbidden", "refuses to connect this machine")],
)
def test_proxy_that_refuses_connect_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, status: str, says: str
) -> None:
    with tunnel_proxy(status) as (port, asked):
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:canary@127.0.0.1:{port}")
        store = S3Store(S3Options(bucket="bucket", endpoint_url="https://storage.example"), sleep=lambda _: None)
        for call in (store.check, lambda: store.put("f/a", as_parts(DATA))):
            before = len(asked)
            with pytest.raises(ProxyRefusedError) as caught:
                call()
            assert str(caught.value).startswith(f"proxy: the proxy http://127.0.0.1:{port} (HTTPS_PROXY) {says}")
            assert "canary" not in str(caught.value)
            assert len(asked) == before + 1
        store.close()


@pytest.mark.parametrize("login", ["user:can/ary", "user:can?ary", "user:can#ary"])
def test_proxy_url_with_unquoted_login_is_refused_without_login(monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    monkeypatch.setenv("https_proxy", f"http://{login}@127.0.0.1:3128")
    store = S3Store(S3Options(bucket="bucket", endpoint_url="https://storage.example", retries=0))
    with pytest.raises(StoreError, match=r"^proxy: .* http://127\.0\.0\.1:3128 \(https_proxy\)") as caught:
        store.check()
    assert not re.search("can|ary", str(caught.value))
    store.close()


def test_proxy_without_listener_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with tunnel_proxy("") as (port, _):
        pass
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    store = S3Store(S3Options(bucket="bucket", endpoint_url="https://storage.example", retries=0))
    for call in (store.check, lambda: store.put("f/a", as_parts(DATA))):
        with pytest.raises(StoreUnavailableError, match=rf"^proxy: .* proxy http://127.0.0.1:{port} \(https_proxy\)"):
            call()
    store.close()


def test_refusal_behind_proxy_without_code_names_proxy(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gate(monkeypatch, lambda _: Answer(403, b"<html>blocked</html>"))
    with pytest.raises(StorePermissionError) as caught:
        store.put("f/a", as_parts(DATA))
    assert "proxy" not in str(caught.value)
    monkeypatch.setenv("http_proxy", server.endpoint_url)
    monkeypatch.setenv("no_proxy", "")
    behind = S3Store(replace(store.options, endpoint_url="http://localhost:1"))
    with pytest.raises(StorePermissionError, match=rf"the proxy {server.endpoint_url} \(http_proxy\) may have sent"):
        behind.put("f/a", as_parts(DATA))
    behind.close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_login_required_by_proxy_does_not_count_as_refused_put(
    store: S3Store, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    set_gate(monkeypatch, refuse_puts(status=407))
    with pytest.raises(ProxyRefusedError, match=r"^proxy: .* requires a login \(HTTP 407\)"):
        store.put("f/a", as_parts(DATA), overwrite=overwrite)
    assert len(server.requests("PUT")) == 1
