"""``check`` and ``doctor`` say good only where each client can move bytes; all clients trust the same authorities."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtiers.connector.commands import check
from kvtiers.tiers.config.deployment import parse_config
from kvtiers.tiers.errors import StoreConfigError, StoreError, StoreTimeoutError
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.session import S3Session
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.stores.s3.trial import TRIAL_BYTES, TRIAL_FOLDER
from kvtiers.tiers.testing import tiny_s3
from kvtiers.tiers.testing.contract import as_parts
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from tests.tiers.stores.s3.test_s3_config import _credentials as _credentials  # an autouse fixture

DATA = bytes(range(256))


def of_trial(server: HttpFaultServer, *methods: str) -> list[tuple[str, int]]:
    return [(r.method, len(r.body)) for r in server.requests(*methods) if TRIAL_FOLDER in r.path]


def test_each_client_moves_bytes(options: S3Options, server: HttpFaultServer) -> None:
    store = S3Store(options)
    store.try_out(read_only=False)
    assert of_trial(server) == [("PUT", TRIAL_BYTES), ("GET", 0), ("DELETE", 0)]
    assert list(store.keys()) == []
    store.close()


def test_nothing_is_written_where_nothing_may_be(options: S3Options, server: HttpFaultServer) -> None:
    store = S3Store(options)
    store.try_out(read_only=True)
    assert of_trial(server) == [("GET", 0)]
    server.inject(Fault.ACCESS_DENIED, path_contains=TRIAL_FOLDER)
    with pytest.raises(StoreError, match="AccessDenied"):
        store.try_out(read_only=True)
    store.close()


@pytest.mark.parametrize(
    ("method", "step"), [("PUT", "put"), ("GET", "get"), ("DELETE", "delete")], ids=["put", "get", "delete"]
)
def test_step_that_fails_is_named_and_nothing_stays(
    options: S3Options, server: HttpFaultServer, method: str, step: str
) -> None:
    server.inject(Fault.ACCESS_DENIED, methods=(method,), path_contains=TRIAL_FOLDER)
    store = S3Store(options)
    store.check()
    with pytest.raises(StoreError, match=rf"^secret: these credentials may not do this.*in the trial's {step}"):
        store.try_out(read_only=False)
    tier = {"type": "s3", "bucket": "bucket", "endpoint_url": server.endpoint_url}
    found = check.examine(parse_config({"region": {"size": "1MiB"}, "tiers": [tier]})).texts("problem")
    assert [problem for problem in found if "these credentials may not do this" in problem]
    if method != "DELETE":
        assert list(store.keys()) == []
    store.close()


def test_bytes_that_changed_are_told(options: S3Options, server: HttpFaultServer) -> None:
    server.inject(Fault.FLIPPED)
    store = S3Store(options)
    with pytest.raises(StoreError, match="returned other bytes than were written"):
        store.try_out(read_only=False)
    store.close()


def test_busy_machine_is_not_called_a_hung_chain(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.CLIENTS_S_MIN", 0.01)
    go_on = threading.Event()

    def hang(*_: object) -> None:
        go_on.wait(60)

    monkeypatch.setattr(S3Session, "__init__", hang)
    (tmp_path / "config").write_text("[profile q]\ncredential_process = true\n")
    (tmp_path / "credentials").write_text("[p]\naws_access_key_id = a\naws_secret_access_key = b\n")
    for profile, says in ((None, "clients were not made"), ("p", "clients were not made"), ("q", "credential chain")):
        store = S3Store(replace(options, profile=profile, request_timeout_s=0.02))
        with pytest.raises(StoreTimeoutError, match=says):
            store.size("a")
    go_on.set()


def test_server_that_wants_virtual_hosts_is_told(options: S3Options, server: HttpFaultServer) -> None:
    forbidden = tiny_s3.error(403, "SecondLevelDomainForbidden")
    server.answers[Fault.ACCESS_DENIED] = forbidden
    server.inject(Fault.ACCESS_DENIED)
    store = S3Store(options)
    calls: list[Callable[[], object]] = [
        store.check,
        lambda: store.size("a"),
        lambda: store.put("a", as_parts(DATA)),
    ]
    for call in calls:
        with pytest.raises(StoreConfigError, match=r"^endpoint: .*; write bucket\. before its host"):
            call()
    store.close()
