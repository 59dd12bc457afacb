"""The ways S3Store moves bytes, as test parameters, the credentials it finds, and how often it asks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import botocore.httpsession
import botocore.session
import pytest

from kvtiers.tiers.config.tier_options import S3TierConfig
from kvtiers.tiers.errors import StoreTimeoutError
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.servers import S3Server
from tests.waiting import wait_for

CLIENTS = ("direct", "boto3")


def use_client(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """Have stores of this process move blocks by boto3, as behind a proxy, or else as they do by themselves."""
    if client == "boto3":
        monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.needs_boto3", lambda _: True)


def set_s3_options(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change options that an s3 tier's configuration does not have."""
    make = S3TierConfig.store_options
    monkeypatch.setattr(S3TierConfig, "store_options", lambda config: replace(make(config), **changes))


def use_credentials(monkeypatch: pytest.MonkeyPatch, server: S3Server | None = None) -> None:
    """Have clients find a server's credentials, by default some that it does not look at, and no others."""
    for name, value in (server or S3Server("", "first", "secret")).environment.items():
        monkeypatch.setenv(name, value)
    be_patient(monkeypatch)


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a busy machine, which may take seconds to import boto3, and spare it what each client reads anew."""
    for limit in ("clients.CLIENTS_S_MIN", "store.CHECK_S_MAX"):
        monkeypatch.setattr(f"kvtiers.tiers.stores.s3.{limit}", 60.0)
    use_light_sessions(monkeypatch)


def use_light_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all sessions of boto3 share the service models, and trust one certificate authority instead of 140.

    Parsing a megabyte of models and loading the authorities takes 0.2 s of CPU a session.
    """
    monkeypatch.setattr(botocore.session, "create_loader", _shared_loader)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)  # it would win
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(variable, _one_authority().name)


_shared_loader = functools.cache(botocore.session.create_loader)


@functools.cache
def _one_authority() -> IO[str]:
    """A file with the first authority of botocore's bundle, removed when this process ends."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    bundle = Path(botocore.httpsession.DEFAULT_CA_BUNDLE).read_text()
    first = bundle[bundle.index(begin) : bundle.index(end)] + end + "\n"
    file = tempfile.NamedTemporaryFile("w", prefix="kvtiers-tests-", suffix=".pem")  # noqa: SIM115 - see above
    file.write(first)
    file.flush()
    return file


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
