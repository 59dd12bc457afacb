"""All clients of S3 trust the same certificates, on each version of Python."""

from __future__ import annotations

import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.tiers.errors import StoreConfigError
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import as_parts, fetch, make_data
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.certificate import Style, make_certificate
from tests.s3_clients import use_credentials

DATA = make_data(3000)


@pytest.fixture
def options(boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> S3Options:
    use_credentials(monkeypatch)
    return S3Options(bucket="bucket", request_timeout_s=60.0, retries=0)


def serve_by_tls(folder: Path) -> HttpFaultServer:
    """A TLS server with the certificate that ``make_certificate`` made in the folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return HttpFaultServer(ssl_context=context)


@contextmanager
def forwarding_proxy(port: int) -> Iterator[str]:
    """A proxy whose tunnels all lead to a port of this machine. Yields its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            with socket.create_connection(("127.0.0.1", port)) as target:
                self.connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                ends = {self.connection: target, target: self.connection}
                with suppress(OSError):
                    while readable := select.select(list(ends), [], [])[0]:
                        for end in readable:
                            some = end.recv(1 << 16)
                            if not some:
                                return
                            ends[end].sendall(some)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("style", ["old", "strict", "intermediate", "self-signed"])
@pytest.mark.parametrize("source", ["ca_bundle", "profile", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_private_authority_is_trusted_by_all_clients(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: Style, source: str
) -> None:
    """Strict mode, Python's default since 3.13, refuses the old one. Without it, Python refuses the intermediate."""
    make_certificate(tmp_path, style=style)
    bundle = str(tmp_path / "ca.pem")
    if source == "profile":
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {bundle}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    elif source != "ca_bundle":
        monkeypatch.setenv(source, bundle)
    with serve_by_tls(tmp_path) as server:
        server.put_object("bucket", "f/a", DATA)
        trusting = replace(options, endpoint_url=server.endpoint_url)
        store = S3Store(replace(trusting, ca_bundle=bundle) if source == "ca_bundle" else trusting)
        store.check()
        store.put("f/b", as_parts(DATA))
        assert fetch(store, "f/a", len(DATA)) == DATA
        store.close()
        monkeypatch.undo()
        use_credentials(monkeypatch)
        untrusting = S3Store(trusting)
        for call in (untrusting.check, lambda: fetch(untrusting, "f/a", len(DATA))):
            with pytest.raises(
                StoreConfigError, match=r"^endpoint: the certificate of .* is not trusted; set ca_bundle"
            ):
                call()
        untrusting.close()


def test_certificate_behind_proxy_is_trusted_by_system_authorities(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with serve_by_tls(tmp_path) as server, forwarding_proxy(server.port) as proxy:
        monkeypatch.setenv("https_proxy", proxy)
        store = S3Store(replace(options, endpoint_url="https://127.0.0.1:1"))
        store.check()
        store.put("f/a", as_parts(DATA))
        assert fetch(store, "f/a", len(DATA)) == DATA
        store.close()
