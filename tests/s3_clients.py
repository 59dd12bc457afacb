"""The ways S3Store moves bytes, as test parameters, the credentials it finds, and how often it asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtiers.tiers.errors import StoreTimeoutError
from kvtiers.tiers.stores.s3.options import Client
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.servers import S3Server
from tests.waiting import wait_for

CLIENTS: tuple[Client, ...] = ("obstore", "boto3")
#: How an object is read; "direct" is obstore's client with the way of large objects for all.
READERS = (*CLIENTS, "direct")


def choose(reader: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Have objects be read that way: the client to configure."""
    if reader != "direct":
        return "boto3" if reader == "boto3" else "obstore"
    monkeypatch.setattr("kvtiers.tiers.stores.s3.obstore_client.DIRECT_BYTES_MIN", 1)
    return "obstore"


def use_credentials(monkeypatch: pytest.MonkeyPatch, server: S3Server | None = None) -> None:
    """Have clients find a server's credentials, by default some that it does not look at, and no others."""
    for name, value in (server or S3Server("", "first", "secret")).environment.items():
        monkeypatch.setenv(name, value)
    be_patient(monkeypatch)


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a busy machine, which may take seconds to import boto3."""
    for limit in ("clients.CLIENTS_S_MIN", "store.CHECK_S_MAX", "store.TRY_S_MAX"):
        monkeypatch.setattr(f"kvtiers.tiers.stores.s3.{limit}", 60.0)


def asks_once(server: HttpFaultServer, call: Callable[[], object], match: str, *methods: str) -> None:
    """A call that times out has sent one request. A busy machine may send none in time: then it is made again."""

    def count_requests() -> int:
        before = len(server.requests(*methods))
        with pytest.raises(StoreTimeoutError, match=match):
            call()
        count = len(server.requests(*methods)) - before
        assert count <= 1
        return count

    wait_for(count_requests)
