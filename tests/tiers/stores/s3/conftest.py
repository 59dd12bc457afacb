"""What most tests of S3 share: a server, and the clients that move blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.s3_clients import CLIENTS, use_client


@pytest.fixture
def server() -> Iterator[HttpFaultServer]:
    with HttpFaultServer(buckets=("bucket", "other-bucket")) as server:
        yield server


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each client in turn; stores made in the test have it."""
    use_client(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture
def options(server: HttpFaultServer, client: str) -> S3Options:
    """Of a store on the server."""
    return S3Options(bucket="bucket", endpoint_url=server.endpoint_url, retries=0, request_timeout_s=120.0)
