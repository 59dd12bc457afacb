"""Every key of S3Options changes what is sent, and no secret is ever shown."""

from __future__ import annotations

import base64
import gc
import hashlib
import importlib
import json
import logging
import mmap
import os
import socket
import ssl
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.utils import is_valid_endpoint_url, is_valid_ipv6_endpoint_url

from kvtiers.tiers.errors import (
    ConfigError,
    StoreConfigError,
    StoreError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.stores.chatty_loggers import cap_chatty_loggers
from kvtiers.tiers.stores.s3.clients import RENEW_EVERY_S
from kvtiers.tiers.stores.s3.control import S3Control
from kvtiers.tiers.stores.s3.direct import DirectClient
from kvtiers.tiers.stores.s3.errors import CredentialsExpiredError, CredentialsRefusedError, SignatureRefusedError
from kvtiers.tiers.stores.s3.options import S3Options, check_endpoint, without_bucket
from kvtiers.tiers.stores.s3.session import ASK_EVERY_S, ChainCredentials, S3Session
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing import tiny_s3
from kvtiers.tiers.testing.contract import as_parts, fetch
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from kvtiers.tiers.testing.tiny_s3 import Answer, Request
from tests.certificate import make_certificate
from tests.s3_clients import asks_once, be_patient
from tests.waiting import in_time, wait_for

SECRET = "CanarySecretWJalrXUtnFEMIK7MDENG"
TOKEN = "CanaryTokenFwoGZXIvYXdzEBY"
DATA = bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def _credentials(boto_models_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary credentials from the environment; no file of this machine is read."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIACANARY",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }.items():
        monkeypatch.setenv(name, value)
    be_patient(monkeypatch)


def put(options: S3Options, server: HttpFaultServer) -> Request:
    """The request that a put sends."""
    store = S3Store(options)
    store.put("f/a", as_parts(DATA, 4096))
    store.close()
    return server.requests("PUT")[-1]


def make_program(folder: Path, text: str) -> Path:
    """The ``credential_process`` of profile p."""
    program = folder / "get-credentials"
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "config").write_text(f"[profile p]\ncredential_process = {program}\n")
    return program


# -- where -------------------------------------------------------------------------------------------------------------


def test_put_with_default_options_sends_the_expected_headers(options: S3Options, server: HttpFaultServer) -> None:
    sent = put(options, server)
    assert (sent.path, sent.body) == ("/bucket/f/a", DATA)
    assert sent.headers["if-none-match"] == "*"
    assert sent.headers["content-length"] == str(len(DATA))
    assert "/us-east-1/s3/aws4_request" in sent.headers["authorization"]
    assert "Credential=AKIACANARY/" in sent.headers["authorization"]
    assert sent.headers["x-amz-security-token"] == TOKEN
    absent = {"x-amz-server-side-encryption", "x-amz-storage-class", "transfer-encoding"}
    assert not absent & sent.headers.keys()


def test_bucket_option_is_in_the_request_path(options: S3Options, server: HttpFaultServer) -> None:
    assert put(replace(options, bucket="other-bucket"), server).path == "/other-bucket/f/a"


def test_prefix_option_is_in_the_request_path(options: S3Options, server: HttpFaultServer) -> None:
    assert put(replace(options, prefix="team/kv"), server).path == "/bucket/team/kv/f/a"


def test_endpoint_url_option_selects_the_server(options: S3Options, server: HttpFaultServer) -> None:
    with HttpFaultServer() as second:
        put(replace(options, endpoint_url=second.endpoint_url), second)
    assert server.requests() == []


def test_endpoint_from_the_environment_is_used_unless_the_option_is_set(
    options: S3Options, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    assert put(replace(options, endpoint_url=None), server).path == "/bucket/f/a"
    with HttpFaultServer() as second:  # the option wins
        put(replace(options, endpoint_url=second.endpoint_url), second)


def test_insecure_endpoint_from_the_environment_is_refused(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://storage.example")
    store = S3Store(replace(options, endpoint_url=None))
    with pytest.raises(StoreConfigError, match=r"^endpoint: .*allow_insecure"):
        store.size("a")


def test_endpoint_from_the_environment_that_is_not_a_url_is_refused(
    options: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "storage.example")
    with pytest.raises(StoreConfigError, match=r"^endpoint: "):
        S3Store(replace(options, endpoint_url=None)).size("a")


def test_region_option_overrides_the_environment(
    options: S3Options, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert "/eu-north-1/s3/" in put(options, server).headers["authorization"]
    assert "/eu-west-3/s3/" in put(replace(options, region="eu-west-3"), server).headers["authorization"]


def test_bucket_in_the_endpoint_host_selects_virtual_host_requests(
    options: S3Options, server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a proxy the server is asked for any host, so no name has to resolve.
    monkeypatch.setenv("HTTP_PROXY", server.endpoint_url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    clone = replace(options, endpoint_url="http://s3.test", allow_insecure=True)
    sent = put(clone, server)
    assert (sent.host, sent.path) == ("s3.test", "/bucket/f/a")
    sent = put(replace(clone, endpoint_url="http://bucket.s3.test"), server)
    assert (sent.host, sent.path) == ("bucket.s3.test", "/f/a")
    sent = put(replace(clone, endpoint_url="http://bucket.s3.test/bucket"), server)  # a server that has this name
    assert (sent.host, sent.path) == ("bucket.s3.test", "/bucket/f/a")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://bucket.s3.test")
    sent = put(replace(clone, endpoint_url=None), server)
    assert (sent.host, sent.path) == ("bucket.s3.test", "/f/a")


@pytest.mark.parametrize(
    ("url", "base", "in_host"),
    [
        ("https://kv.oss-cn-hangzhou.aliyuncs.com", "https://oss-cn-hangzhou.aliyuncs.com", True),
        ("https://kv.minio:9000/s3", "https://minio:9000/s3", True),
        ("https://kv", "https://kv", False),
        ("https://kv.example:9000/kv/", "https://kv.example:9000", False),
        ("https://kv-2.minio", "https://kv-2.minio", False),
        ("https://minio.kv.example", "https://minio.kv.example", False),
    ],
)
def test_without_bucket_removes_the_bucket_from_an_endpoint_host_or_path(url: str, base: str, in_host: bool) -> None:
    assert without_bucket(url, "kv") == (base, in_host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1.", "127.1", "127.0X7F", "[::1]"])
def test_without_bucket_leaves_ip_address_hosts_unchanged(host: str) -> None:
    for bucket in ("127", "[", "::1"):
        assert without_bucket(f"https://{host}:9000", bucket) == (f"https://{host}:9000", False)


@pytest.mark.parametrize(
    ("endpoint_url", "bucket", "virtual"),
    [
        (None, "bucket", True),
        (None, "dotted.bucket", False),
        ("https://bucket.s3.eu-west-1.amazonaws.com", "bucket", True),
    ],
)
def test_aws_endpoints_use_virtual_hosts_except_for_dotted_buckets(
    endpoint_url: str | None, bucket: str, virtual: bool
) -> None:
    session = S3Session(S3Options(bucket=bucket, endpoint_url=endpoint_url, region="eu-west-1"))
    assert session.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    assert session.virtual_host is virtual
    url = session.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
    assert url.startswith(f"https://{bucket}.s3." if virtual else f"https://s3.eu-west-1.amazonaws.com/{bucket}/")


def test_directory_bucket_requests_go_to_the_zone_endpoint_through_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the zone's own endpoint; our own client would ask the region's."""
    bucket = "kv--usw2-az1--x-s3"
    asked: list[str] = []

    def send(_: object, request: Any) -> None:
        asked.append(urlsplit(request.url).hostname or "")
        raise EndpointConnectionError(endpoint_url="")

    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", send)
    store = S3Store(S3Options(bucket=bucket, region="us-west-2", retries=0))
    for call in (lambda: store.put("a", as_parts(DATA)), lambda: fetch(store, "a", 1), lambda: store.size("a")):
        with pytest.raises(StoreUnavailableError):
            call()
    assert set(asked) == {f"{bucket}.s3express-usw2-az1.us-west-2.amazonaws.com"}
    store.close()


# -- who ---------------------------------------------------------------------------------------------------------------


def test_profile_option_selects_credentials_and_region(
    options: S3Options, server: HttpFaultServer, tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = AKIATEAM\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text("[profile team]\nregion = eu-south-2\n")
    assert "Credential=AKIATEAM/" in put(replace(options, profile="team"), server).headers["authorization"]
    assert "/eu-south-2/" in put(replace(options, profile="team"), server).headers["authorization"]
    assert "Credential=AKIACANARY/" in put(options, server).headers["authorization"]
    with pytest.raises(StoreConfigError, match=r"^profile: "):
        S3Store(replace(options, profile="no-such")).size("a")


def test_credential_process_supplies_credentials_and_its_failure_hides_secrets(
    options: S3Options, server: HttpFaultServer, tmp_path: Path
) -> None:
    answer = {"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "s"}
    script = make_program(tmp_path, f"#!{sys.executable}\nprint('''{json.dumps(answer)}''')\n")
    assert "Credential=AKIAPROCESS/" in put(replace(options, profile="p"), server).headers["authorization"]
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('{SECRET}')\n")
    with pytest.raises(StorePermissionError, match=r"^secret: .*credential chain failed") as caught:
        S3Store(replace(options, profile="p")).size("a")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


PROCESS_RUINS: dict[str, tuple[str | None, str]] = {
    "no program": (None, "cannot read or run"),
    "no JSON": ("please log in", "cannot parse the credentials"),
    "other JSON": ("[]", "cannot parse the credentials"),
    "expired": (
        '{"Version":1,"AccessKeyId":"a","SecretAccessKey":"s","SessionToken":"t","Expiration":"2020-01-01T00:00:00Z"}',
        "have expired, too; renew them",
    ),
}


@pytest.mark.parametrize("ruin", PROCESS_RUINS)
def test_broken_credential_process_is_a_store_error(options: S3Options, tmp_path: Path, ruin: str) -> None:
    """Of whatever call, and of check; botocore raises OSError, ValueError, AttributeError and RuntimeError there."""
    printed, says = PROCESS_RUINS[ruin]
    program = make_program(tmp_path, f"#!{sys.executable}\nprint({printed!r})\n")
    if printed is None:
        program.unlink()
    store = S3Store(replace(options, profile="p"))
    calls = (
        lambda: store.put("a", as_parts(DATA)),
        lambda: fetch(store, "a", len(DATA)),
        lambda: store.size("a"),
        lambda: store.get_tail("a", 10),
        lambda: store.delete("a"),
        lambda: list(store.keys()),
        lambda: store.keeps_versions(),
        store.check,
    )
    for call in calls:
        with pytest.raises(StorePermissionError, match=rf"^secret: .*{says}"):
            call()
    for outcome in (*store.size_many(["a"]), *store.delete_many(["a"])):
        assert isinstance(outcome, StorePermissionError)
    store.prepare()
    store.close()


def test_failed_credential_chain_is_asked_once_for_all_keys_and_again_after_a_pause(
    options: S3Options, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    make_program(tmp_path, f"#!/bin/sh\necho >> {asked}\nexit 1\n")
    now = [0.0]
    store = S3Store(replace(options, profile="p"), clock=lambda: now[0])
    for times in (1, 2):
        for answer in store.size_many([f"a{i}" for i in range(40)]):
            assert isinstance(answer, StorePermissionError)
        with pytest.raises(StorePermissionError, match=r"^secret: .*credential chain failed"):
            store.put("a", as_parts(DATA))
        assert len(asked.read_text()) == times
        now[0] += RENEW_EVERY_S
    store.close()


def test_hanging_credential_chain_error_names_the_chain_and_its_late_answer_is_used(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.CLIENTS_S_MIN", 0.1)
    monkeypatch.setattr("kvtiers.tiers.stores.s3.store.CHECK_S_MAX", 0.1)
    os.mkfifo(tmp_path / "answer")
    (tmp_path / "config").write_text(f"[profile p]\ncredential_process = cat {tmp_path / 'answer'}\n")
    store = S3Store(replace(options, profile="p", request_timeout_s=0.2))
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", as_parts(DATA)),
        lambda: store.size("a"),
        store.check,
    ]
    for call in calls:
        with pytest.raises(StoreTimeoutError, match=r"^secret: boto3's credential chain did not end within 0\.1 s"):
            call()
    monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.CLIENTS_S_MIN", 120.0)
    (tmp_path / "answer").write_text('{"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "s"}')
    store.prepare()
    monkeypatch.setattr("kvtiers.tiers.stores.s3.store.CHECK_S_MAX", 120.0)
    store.check()
    store.close()


@pytest.mark.parametrize("client", ["direct"], indirect=True)
def test_hanging_credential_chain_is_asked_again_after_growing_pauses(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After twice the time for each that hangs; what hangs is bounded, and what it gets too late is closed."""
    monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.CLIENTS_S_MIN", 0.1)
    monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.MAKES_HUNG_MAX", 2)
    answer = '{"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "s"}'
    asked = tmp_path / "asked"
    os.mkfifo(tmp_path / "answer")
    to_helpers = os.open(tmp_path / "answer", os.O_RDWR)  # so that nobody waits for the other end
    hangs = f"#!/bin/sh\necho >> {asked}\nread answer < {tmp_path / 'answer'}\necho '{answer}'\n"
    script = make_program(tmp_path, hangs)
    now = [0.0]
    store = S3Store(replace(options, profile="p", request_timeout_s=0.2), clock=lambda: now[0])
    for now[0], times in ((0.0, 1), (29.0, 1), (30.0, 2), (89.0, 2), (90.0, 3), (9000.0, 3)):
        with pytest.raises(StoreTimeoutError, match=r"^secret: boto3's credential chain did not end"):
            store.size("a")
        wait_for(asked.exists)
        wait_for(lambda: len(asked.read_text()) == times)  # noqa: B023 - called at once
    closed: list[S3Session] = []
    monkeypatch.setattr(S3Session, "close", lambda session: closed.append(session))
    script.write_text(f"#!/bin/sh\necho '{answer}'\n")
    os.write(to_helpers, b"go\n" * 3)
    monkeypatch.setattr("kvtiers.tiers.stores.s3.clients.CLIENTS_S_MIN", 120.0)
    store._attempts.current().get()
    wait_for(lambda: len(closed) >= 2)  # more where a busy machine makes the current one late, too
    store.close()
    wait_for(lambda: len(closed) >= 3)
    os.close(to_helpers)


def answers_for_a_while(folder: Path) -> Path:
    """The program of profile p; what it prints expires so soon that each request asks it again."""
    soon = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
    answer = {"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": soon}
    return make_program(folder, f"#!{sys.executable}\nprint('{json.dumps(answer)}')\n")


def test_failed_credentials_refresh_keeps_no_reference_to_its_callers_memory(
    options: S3Options, tmp_path: Path
) -> None:
    """The region's slots, whose memory an engine must be able to release."""
    script = answers_for_a_while(tmp_path)
    store = S3Store(replace(options, profile="p"))
    store.prepare()
    script.write_text("#!/bin/sh\nexit 1\n")
    calls: list[Callable[[list[memoryview]], object]] = [
        lambda parts: store.put("a", parts),
        lambda parts: store.get_into("a", parts),
    ]
    for call in calls:
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        with pytest.raises(StorePermissionError, match=r"^secret: boto3's credential chain failed [^:]*$"):
            call([memoryview(memory)])
        gc.collect()
        memory.close()
    store.close()


def test_hanging_credentials_refresh_blocks_no_call_while_credentials_are_valid(
    options: S3Options, server: HttpFaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is goes on while it is good; when it has expired, a chain made anew is asked."""
    server.put_object("bucket", "f/a", DATA)
    script = answers_for_a_while(tmp_path)
    answers = script.read_text()
    store = S3Store(replace(options, profile="p", request_timeout_s=2.0))
    in_time(lambda: store.size("f/a"))
    os.mkfifo(tmp_path / "never")
    to_helpers = os.open(tmp_path / "never", os.O_RDWR)
    script.write_text(f"#!/bin/sh\nread answer < {tmp_path / 'never'}\n")
    calls: list[Callable[[], object]] = [
        lambda: fetch(store, "f/a", len(DATA)),
        lambda: store.get_tail("f/a", 1),
        lambda: store.put("f/b", as_parts(DATA)),
        lambda: list(store.keys()),
    ]
    with suppress(StoreTimeoutError):  # who waits first may have no time left
        store.size("f/a")
    for call in calls:
        in_time(call)
    with monkeypatch.context() as expired:
        expired.setattr("kvtiers.tiers.stores.s3.session.ChainCredentials._ends_within", lambda *_: True)
        with pytest.raises(StoreTimeoutError, match=r"^secret: boto3's credential chain did not end within 1 s"):
            fetch(store, "f/a", len(DATA))
    script.write_text(answers)
    assert in_time(lambda: fetch(store, "f/a", len(DATA))) == DATA
    store.close()
    os.close(to_helpers)


def test_credential_chain_is_asked_once_for_all_waiting_threads() -> None:
    now, left_s, asked = [0.0], [0.0], []
    together, goes_on = threading.Barrier(9), threading.Event()

    class Chain:
        method = "custom"

        def refresh_needed(self, seconds: float | None) -> bool:
            return left_s[0] < (900 if seconds is None else seconds)

        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            asked.append(now[0])
            goes_on.wait(120)
            left_s[0] = 901.0
            return ReadOnlyCredentials(f"key{len(asked)}", "s", None)

    credentials = ChainCredentials(Chain(), lambda _: StoreConfigError("translated"), 20.0, lambda: now[0])

    def get(_: int) -> str:
        together.wait(120)
        return str(credentials.get_frozen_credentials().access_key)

    with ThreadPoolExecutor(8) as pool:
        found = pool.map(get, range(8))
        together.wait(120)
        wait_for(lambda: asked)
        goes_on.set()
        assert set(found) == {"key1"}
    assert (credentials.get_frozen_credentials().access_key, len(asked)) == ("key1", 1)
    goes_on.clear()
    left_s[0] = 899.0
    assert (credentials.get_frozen_credentials().access_key, len(asked)) == ("key1", 1)  # it was asked just now
    now[0] = ASK_EVERY_S  # it is asked, and nobody waits
    assert credentials.get_frozen_credentials().access_key == "key1"
    wait_for(lambda: len(asked) == 2)
    left_s[0] = 599.0
    now[0] += 21.0  # it should have answered by now
    assert credentials.get_frozen_credentials().access_key == "key1"
    left_s[0] = -1.0
    with pytest.raises(StoreTimeoutError, match=r"did not end within 20 s"):
        credentials.get_frozen_credentials()
    goes_on.set()
    wait_for(lambda: left_s[0] > 900)
    wait_for(lambda: credentials.get_frozen_credentials().access_key == "key2")
    assert len(asked) == 2


def test_credentials_valid_for_minutes_are_not_refreshed_for_each_request() -> None:
    """STS gives out 15 minutes at the least, and helpers the same until 5 minutes before their end."""
    now, asked, fails = [0.0], [], [False]

    class Chain:
        method = "custom"

        def refresh_needed(self, seconds: float | None) -> bool:
            return 540 - now[0] < (900 if seconds is None else seconds)

        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            asked.append(now[0])
            if fails[0]:
                raise RuntimeError("the helper's")
            return ReadOnlyCredentials(f"key{len(asked)}", "s", None)

    credentials = ChainCredentials(Chain(), lambda _: StorePermissionError("translated"), 20.0, lambda: now[0])
    for _ in range(100):
        assert credentials.get_frozen_credentials().access_key == "key1"
    assert len(asked) == 1
    now[0] = 31.0
    assert credentials.get_frozen_credentials().access_key == "key2"
    now[0] = 70.0
    fails[0] = True
    assert credentials.get_frozen_credentials().access_key == "key2"  # it is good all the same
    assert len(asked) == 3
    now[0] = 541.0
    with pytest.raises(StorePermissionError, match="translated"):
        credentials.get_frozen_credentials()


def test_missing_web_identity_token_error_names_the_file(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/such/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kv")
    store = S3Store(options)
    for call in (lambda: store.size("a"), lambda: list(store.keys()), store.check):
        with pytest.raises(StorePermissionError, match=r"^secret: .*cannot read or run /no/such/token"):
            call()
    store.close()


def test_check_raises_unexpected_exceptions_unchanged(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours is no server that is slow."""

    def fail(_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(S3Control, "check", fail)
    with pytest.raises(KeyError, match="ours"):
        S3Store(options).check()


@pytest.fixture
def with_role(options: S3Options, tmp_path: Path) -> S3Options:
    """With a profile that assumes a role with the credentials of the environment."""
    role = "role_arn = arn:aws:iam::123456789012:role/kv\ncredential_source = Environment\n"
    (tmp_path / "config").write_text(f"[profile kv]\n{role}")
    return replace(options, profile="kv")


def test_role_of_a_profile_is_assumed_through_sts(
    with_role: S3Options, server: HttpFaultServer, moto_sts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto_sts)
    sent = put(with_role, server)
    assert "Credential=ASIA" in sent.headers["authorization"]  # what STS hands out
    assert sent.headers["x-amz-security-token"] != TOKEN


def test_refused_role_error_names_sts(with_role: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    with HttpFaultServer() as sts:
        sts.inject(Fault.ACCESS_DENIED)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint_url)
        store = S3Store(with_role)
        with pytest.raises(StorePermissionError, match=r"^secret: STS does not let"):
            store.size("a")


@pytest.fixture(scope="module")
def session() -> Iterator[S3Session]:
    """For what needs a session's words alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        session = S3Session(S3Options(bucket="bucket", endpoint_url="http://127.0.0.1:9"))
    yield session
    session.close()


@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "says"),
    [
        (503, "ServiceUnavailable", "", StoreUnavailableError, "the server is out of service"),
        (500, "InternalFailure", "", StoreUnavailableError, "endpoint: STS reported an internal error"),
        (502, "502", "Bad Gateway", StoreUnavailableError, "endpoint: STS reported an internal error"),
        (400, "Throttling", "", StoreThrottledError, "the server asks to slow down"),
        (400, "ThrottlingException", "", StoreThrottledError, "the server asks to slow down"),
        (400, "TooManyRequestsException", "", StoreThrottledError, "the server asks to slow down"),
        (429, "429", "Too Many Requests", StoreThrottledError, "the server asks to slow down"),
        (408, "408", "Request Timeout", StoreUnavailableError, "the server waited too long"),
        (400, "IDPCommunicationError", "", StoreUnavailableError, "STS cannot reach"),
        (403, "RequestExpired", "", StorePermissionError, "clock: "),
        (403, "SignatureDoesNotMatch", "Signature expired: 1 is now earlier than 2", StorePermissionError, "clock: "),
        (403, "SignatureDoesNotMatch", "", SignatureRefusedError, "secret: the secret access key is wrong"),
        (403, "InvalidClientTokenId", "", CredentialsRefusedError, "secret: STS does not know this access key id"),
        (400, "ValidationError", "", StorePermissionError, "secret: STS does not let"),
    ],
)
def test_sts_errors_become_matching_store_errors(
    session: S3Session, status: int, code: str, message: str, kind: type[StoreError], says: str
) -> None:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = ClientError(answer, "AssumeRoleWithWebIdentity")
    translated = session.translate(error)
    assert type(translated) is kind
    assert str(translated).startswith(says)


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (
            404,
            "ResourceNotFoundException",
            StorePermissionError,
            "secret: GetRoleCredentials of boto3's credential chain",
        ),
        (412, "PreconditionFailed", StorePermissionError, "secret: GetRoleCredentials of boto3's"),  # or a put has lost
        (429, "TooManyRequestsException", StoreThrottledError, "the server asks to slow down"),
        (500, "InternalServerException", StoreUnavailableError, "endpoint: GetRoleCredentials of boto3's"),
    ],
)
def test_sso_errors_are_credential_or_server_errors_and_never_a_missing_object(
    options: S3Options,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    kind: type[StoreError],
    says: str,
) -> None:
    """A 404 was an absent blob, and its deletion a success."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(tmp_path))
    start = "https://example.awsapps.com/start"
    (tmp_path / "config").write_text(
        f"[default]\nsso_start_url = {start}\nsso_region = us-east-1\nsso_account_id = 1\nsso_role_name = kv\n"
    )
    cached = tmp_path / f"{hashlib.sha1(start.encode(), usedforsecurity=False).hexdigest()}.json"
    cached.write_text(json.dumps({"startUrl": start, "accessToken": TOKEN, "expiresAt": "2999-01-01T00:00:00Z"}))
    answer = Answer(status, json.dumps({"__type": code}).encode(), {"x-amzn-ErrorType": code})
    with HttpFaultServer() as sso:
        sso.answers[Fault.HTML_WITH_200] = answer
        sso.inject(Fault.HTML_WITH_200)
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", sso.endpoint_url)
        store = S3Store(options)
        calls: list[Callable[[], object]] = [
            lambda: store.put("a", as_parts(DATA)),
            lambda: fetch(store, "a", len(DATA)),
            lambda: store.size("a"),
            lambda: store.delete("a"),
            lambda: list(store.keys()),
            store.check,
        ]
        for call in calls:
            with pytest.raises(kind) as caught:
                call()
            assert type(caught.value) is kind
            assert str(caught.value).startswith(says)
        for outcome in (*store.size_many(["a"]), *store.delete_many(["a"])):
            assert type(outcome) is kind
        store.close()


def test_unreachable_sts_error_names_the_endpoint_without_its_password(
    with_role: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://user:{SECRET}@127.0.0.1:9")
    store = S3Store(with_role)
    with pytest.raises(StoreUnavailableError, match=r"^endpoint: http://127\.0\.0\.1:9 refused the connection"):
        store.check()


def test_expired_source_of_a_role_is_an_expired_credentials_error(session: S3Session) -> None:
    error = ClientError({"Error": {"Code": "ExpiredToken", "Message": TOKEN}}, "AssumeRole")
    translated = session.translate(error)
    assert isinstance(translated, CredentialsExpiredError)  # so the chain is read again
    assert str(translated).startswith("secret: the session token has expired; renew it")


@pytest.fixture
def moto_sts(moto: Any) -> str:
    return str(moto.endpoint_url)


def test_missing_credentials_error_names_the_variables(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store = S3Store(options)
    with pytest.raises(StorePermissionError, match=r"^secret: no credentials found; set AWS_ACCESS_KEY_ID"):
        store.size("a")


# -- how the connection is made ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def serve_by_tls(folder: Path) -> HttpFaultServer:
    """With what ``make_certificate`` made there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return HttpFaultServer(ssl_context=context)


@pytest.fixture
def https(certificate: Path) -> Iterator[HttpFaultServer]:
    with serve_by_tls(certificate) as server:
        yield server


def test_ca_bundle_option_makes_a_private_certificate_trusted(
    options: S3Options, https: HttpFaultServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = replace(options, endpoint_url=https.endpoint_url)
    with pytest.raises((StoreUnavailableError, StoreConfigError), match=r"^endpoint: "):
        put(secure, https)
    with pytest.raises(StoreConfigError, match=r"^endpoint: the certificate .* is not trusted; set ca_bundle"):
        S3Store(secure).check()
    assert https.requests() == []
    assert put(replace(secure, ca_bundle=str(certificate / "ca.pem")), https).body == DATA
    S3Store(replace(secure, ca_bundle=str(certificate / "ca.pem"))).check()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate / "ca.pem"))
    assert put(secure, https).body == DATA


def test_https_reads_need_a_trusted_certificate_and_keep_deadlines(
    options: S3Options, https: HttpFaultServer, certificate: Path
) -> None:
    https.put_object("bucket", "f/a", DATA)
    options = replace(options, endpoint_url=https.endpoint_url)
    untrusting = S3Store(options)
    with pytest.raises((StoreUnavailableError, StoreConfigError), match=r"^endpoint: "):
        fetch(untrusting, "f/a", len(DATA))
    trusting = S3Store(replace(options, ca_bundle=str(certificate / "ca.pem"), request_timeout_s=0.6))
    assert in_time(lambda: fetch(trusting, "f/a", len(DATA))) == DATA
    https.inject(Fault.SLOW_LORIS)
    with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
        fetch(trusting, "f/a", len(DATA))
    https.heal()
    assert in_time(lambda: fetch(trusting, "f/a", len(DATA))) == DATA
    for store in (untrusting, trusting):
        store.close()


@pytest.mark.parametrize(
    ("host", "days", "says"),
    [
        ("127.0.0.1", 1, "is for another name; correct endpoint_url"),
        ("localhost", 1, "is for another name; correct endpoint_url"),
        ("localhost", -0.5, "has expired, or this machine's clock is wrong"),
    ],
)
def test_certificate_error_names_wrong_host_or_expiry(
    options: S3Options, tmp_path: Path, host: str, days: float, says: str
) -> None:
    make_certificate(tmp_path, "storage.example", days)
    with serve_by_tls(tmp_path) as server:
        url = f"https://{host}:{server.port}"
        store = S3Store(replace(options, endpoint_url=url, ca_bundle=str(tmp_path / "ca.pem")))
        with pytest.raises(StoreConfigError, match=f"^endpoint: the certificate of {url} {says}"):
            store.check()
        store.close()


def test_https_to_an_http_server_error_says_that_tls_is_missing(options: S3Options, server: HttpFaultServer) -> None:
    store = S3Store(replace(options, endpoint_url=server.endpoint_url.replace("http", "https")))
    with pytest.raises(StoreConfigError, match=r"^endpoint: .* does not speak TLS; should its URL begin with http\?"):
        store.check()
    store.close()


def test_host_with_a_trailing_dot_matches_its_certificate(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path, "storage.example")
    resolve = socket.getaddrinfo
    monkeypatch.setattr("socket.getaddrinfo", lambda _, *rest, **more: resolve("127.0.0.1", *rest, **more))
    with serve_by_tls(tmp_path) as server:
        server.put_object("bucket", "f/a", DATA)
        url = f"https://storage.example.:{server.port}"
        reader = DirectClient(S3Session(replace(options, endpoint_url=url, ca_bundle=str(tmp_path / "ca.pem"))))
        filled = bytearray(len(DATA))
        reader.get_into("f/a", [memoryview(filled)], len(DATA))
        assert filled == DATA
        reader.close()


def test_ca_bundle_with_comments_is_accepted(
    options: S3Options, https: HttpFaultServer, certificate: Path, tmp_path: Path
) -> None:
    """As those that distributions ship have: names of authorities in any script."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# Főtanúsítvány\n".encode() + (certificate / "ca.pem").read_bytes())
    https.put_object("bucket", "f/a", DATA)
    store = S3Store(replace(options, endpoint_url=https.endpoint_url, ca_bundle=str(bundle)))
    assert fetch(store, "f/a", len(DATA)) == DATA
    store.close()
    broken = "-----BEGIN CERTIFICATE-----\nMIIBszCC\n-----END CERTIFICATE-----\n"
    for text in ("hello", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", broken, broken[:40]):
        bundle.write_text(text)
        with pytest.raises(StoreConfigError, match=r"^ca_bundle: .* does not hold valid certificates in PEM form"):
            S3Store(store.options).size("a")


def test_missing_ca_bundle_error_names_the_file(options: S3Options) -> None:
    with pytest.raises(StoreConfigError, match=r"^ca_bundle: /no/such\.pem cannot be read"):
        S3Store(replace(options, ca_bundle="/no/such.pem")).size("a")


def test_http_endpoint_needs_allow_insecure_except_on_loopback_hosts() -> None:
    with pytest.raises(ConfigError, match=r"^endpoint_url: .*allow_insecure"):
        S3Options(bucket="bucket", endpoint_url="http://storage.example:9000")
    S3Options(bucket="bucket", endpoint_url="http://storage.example:9000", allow_insecure=True)
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "[::1]", "bucket.localhost"):
        S3Options(bucket="bucket", endpoint_url=f"http://{host}:9000")


def test_request_timeout_ends_a_stalled_call_without_a_retry(options: S3Options, server: HttpFaultServer) -> None:
    server.inject(Fault.STALL)
    store = S3Store(replace(options, request_timeout_s=0.5, retries=5))
    # A late answer is not asked for again: half of the time is gone.
    asks_once(server, lambda: store.size("a"), r"did not answer within 0\.25 s")


def test_connection_that_is_not_accepted_ends_at_the_connect_timeout(
    options: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an address that takes no connection: the listener's backlog is full."""
    with ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(3):
            filler = open_sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        monkeypatch.setattr("kvtiers.tiers.stores.s3.options.CONNECT_S_MAX", 0.2)
        store = S3Store(replace(options, endpoint_url=f"http://127.0.0.1:{address[1]}", request_timeout_s=60.0))
        with pytest.raises((StoreTimeoutError, StoreUnavailableError), match=r"^endpoint: "):
            store.size("a")


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_option_sets_the_number_of_retries_with_growing_pauses(
    options: S3Options, server: HttpFaultServer, retries: int
) -> None:
    pauses: list[float] = []
    store = S3Store(replace(options, retries=retries), sleep=pauses.append, rng=lambda: 1.0)
    server.inject(Fault.INTERNAL_ERROR)
    with pytest.raises(StoreUnavailableError, match="InternalError, HTTP 500"):
        fetch(store, "a", 1)
    assert len(server.requests("GET")) == retries + 1
    assert pauses == [0.05, 0.1, 0.2][:retries]


@pytest.mark.parametrize("limit", [1, 3])
def test_max_connections_option_limits_concurrent_connections(
    options: S3Options, server: HttpFaultServer, limit: int
) -> None:
    store = S3Store(replace(options, max_connections=limit))
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for j in range(5):
                store.put(f"{i}/{j}", as_parts(DATA))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert errors == []
    assert len(server.requests("PUT")) == 40
    assert server.most_under_way <= limit
    assert len({request.client_port for request in server.requests("PUT")}) <= limit  # they are used again


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_sse_option_sets_the_encryption_headers(options: S3Options, server: HttpFaultServer) -> None:
    assert put(replace(options, sse="AES256"), server).headers["x-amz-server-side-encryption"] == "AES256"
    sent = put(replace(options, sse="aws:kms"), server).headers
    assert sent["x-amz-server-side-encryption"] == "aws:kms"
    assert "x-amz-server-side-encryption-aws-kms-key-id" not in sent
    key_id = "arn:aws:kms:us-east-1:123456789012:key/abcd"
    sent = put(replace(options, sse=key_id), server).headers
    assert sent["x-amz-server-side-encryption"] == "aws:kms"
    assert sent["x-amz-server-side-encryption-aws-kms-key-id"] == key_id


def test_storage_class_option_sets_its_header(options: S3Options, server: HttpFaultServer) -> None:
    assert put(replace(options, storage_class="STANDARD_IA"), server).headers["x-amz-storage-class"] == "STANDARD_IA"


def test_put_sends_a_signed_crc64nvme_checksum(options: S3Options, server: HttpFaultServer) -> None:
    crc64 = importlib.import_module("awscrt.checksums").crc64nvme(DATA)
    sent = put(options, server).headers
    assert base64.b64decode(sent["x-amz-checksum-crc64nvme"]) == crc64.to_bytes(8, "big")
    assert sent["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert "x-amz-checksum-crc64nvme" in sent["authorization"]  # signed, so nobody on the way replaces it


def test_checksum_refused_by_the_server_is_left_out_of_later_puts(
    options: S3Options, server: HttpFaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.inject(Fault.REFUSE_CHECKSUM)
    store = S3Store(options)
    for key in ("a", "b", "c"):
        store.put(key, as_parts(DATA))
        assert server.get_object("bucket", key) == DATA
    assert len(server.requests("PUT")) == 5  # two of them refused
    assert server.requests("PUT")[-1].headers["x-amz-content-sha256"] == hashlib.sha256(DATA).hexdigest()
    assert [record.getMessage() for record in caplog.records if "refuses crc64nvme" in record.getMessage()] == [
        f"{store!r}: the server refuses crc64nvme; payloads are signed instead"
    ]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, ""),
        (403, "SignatureDoesNotMatch"),
        (400, "InvalidRequest"),
        (501, "NotImplemented"),
        (400, "XAmzContentSHA256Mismatch"),
    ],
)
def test_unsigned_payload_refused_by_the_server_is_signed_in_later_puts(
    options: S3Options,
    server: HttpFaultServer,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str,
) -> None:
    """By a bucket's policy, or a server that cannot verify them."""
    server.answers[Fault.REFUSE_UNSIGNED] = tiny_s3.error(status, code)
    server.inject(Fault.REFUSE_UNSIGNED)
    store = S3Store(options)
    for key in ("a", "b", "c"):
        assert store.put(key, as_parts(DATA)) is True
        assert server.get_object("bucket", key) == DATA
    assert fetch(store, "a", len(DATA)) == DATA
    assert (store.size("a"), len(list(store.keys()))) == (len(DATA), 3)
    assert store.delete_many(["b", "c"]) == [None, None]
    store.delete("a")
    assert server.struck[Fault.REFUSE_UNSIGNED] == 1
    assert len(server.requests("PUT")) == 4
    last = server.requests("PUT")[-1].headers
    assert last["x-amz-content-sha256"] == hashlib.sha256(DATA).hexdigest()
    assert base64.b64decode(last["x-amz-checksum-sha256"]) == hashlib.sha256(DATA).digest()
    assert caplog.text.count("refuses crc64nvme with unsigned payloads; payloads are signed instead") == 1
    store.close()


@pytest.mark.parametrize("unsigned", [True, False], ids=["unsigned", "no unsigned"])
def test_bucket_with_object_lock_gets_a_checksum(options: S3Options, server: HttpFaultServer, unsigned: bool) -> None:
    server.inject(Fault.WANT_CHECKSUM)
    if not unsigned:
        server.inject(Fault.REFUSE_UNSIGNED)
    store = S3Store(options)
    for key in ("a", "b"):
        assert store.put(key, as_parts(DATA)) is True
    assert sum(server.struck.values()) == (not unsigned)
    store.close()


def test_put_without_permission_reports_the_first_refusal(options: S3Options, server: HttpFaultServer) -> None:
    server.inject(Fault.ACCESS_DENIED, methods=("PUT",))
    store = S3Store(options)
    with pytest.raises(StorePermissionError, match="AccessDenied, HTTP 403"):
        store.put("a", as_parts(DATA))
    assert len(server.requests("PUT")) == 3  # one of each form
    with pytest.raises(StorePermissionError, match="AccessDenied, HTTP 403"):
        store.put("a", as_parts(DATA))
    assert len(server.requests("PUT")) == 4  # a permission that is missing is not the form's fault
    assert not store.checksum_refused
    store.close()


# -- bad values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("bucket", "", "is not a valid bucket name"),
        ("bucket", "a", "is not a valid bucket name"),
        ("bucket", "a/b/c", "is not a valid bucket name"),
        ("bucket", "../x", "is not a valid bucket name"),
        ("bucket", "a..b", "is not a valid bucket name"),
        ("bucket", "bucket\n", "is not a valid bucket name"),
        ("prefix", "/a", "is not a valid prefix"),
        ("prefix", "a/", "is not a valid prefix"),
        ("prefix", "a//b", "is not a valid prefix"),
        ("prefix", "a/../b", "is not a valid prefix"),
        ("prefix", "a\x00b", "is not a valid prefix"),
        ("prefix", "p" * 513, "is not a valid prefix"),
        ("endpoint_url", "storage.example", "write https://host"),
        ("endpoint_url", "ftp://storage.example", "write https://host"),
        ("endpoint_url", "https://", "write https://host"),
        ("endpoint_url", "https://h:99999", "is not a valid URL"),
        ("endpoint_url", "https://h/?a=b", "write https://host"),
        ("endpoint_url", "https://a_b.c:9000", "not accepted by boto3"),
        ("endpoint_url", "https://minio..svc", "not accepted by boto3"),
        ("endpoint_url", "https://.minio", "not accepted by boto3"),
        ("endpoint_url", f"https://{'a' * 64}.example", "not accepted by boto3"),
        ("region", "us east", "not accepted"),
        ("sse", "aes256", "write AES256, aws:kms, or a KMS key's ARN or id"),
        ("sse", "aws:kms:dsse", "write AES256, aws:kms, or a KMS key's ARN or id"),
        ("sse", "arn\r\nx: y", "not accepted"),
        ("storage_class", "", "not accepted"),
    ],
)
def test_invalid_s3_option_error_names_the_option(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        S3Options(**{"bucket": "bucket", key: value})
    assert caught.value.field == key


@pytest.mark.parametrize(
    "host",
    [
        *(
            "minio",
            "a.b-c.example",
            "a.b.",
            "127.0.0.1",
            "[::1]",
            "xn--mnchen-3ya.example",
            "9",
            f"{'a' * 63}.b",
            "a.b" * 85,
        ),
        *("a_b.c", "a..b", ".a", "a.-b", "a-.b", "a" * 64, "a." * 130 + "a", "münchen.example", "a b", "a\tb"),
    ],
)
def test_endpoint_host_is_accepted_exactly_if_boto3_accepts_it(host: str) -> None:
    """So that what is wrong is named as the configuration's, and not the environment's."""
    url = f"https://{host}:9000"
    if is_valid_endpoint_url(url) or is_valid_ipv6_endpoint_url(url):
        check_endpoint(url, allow_insecure=False)
    else:
        with pytest.raises(ConfigError, match=r"^endpoint_url: .* not accepted"):
            check_endpoint(url, allow_insecure=False)


@pytest.mark.parametrize("path", ["", "/", "/s3", "/s3/", "/a~b/.c/..d/e-f_g"])
def test_path_of_an_endpoint_precedes_the_bucket_in_requests(
    options: S3Options, server: HttpFaultServer, path: str
) -> None:
    store = S3Store(replace(options, endpoint_url=f"{server.endpoint_url}{path}"))
    for call in (lambda: store.put("a", as_parts(DATA)), lambda: fetch(store, "a", 1), lambda: list(store.keys())):
        with suppress(StoreError):  # the server has no bucket there
            call()
    under = path.rstrip("/")
    assert {request.path for request in server.requests()} == {f"{under}/bucket/a", f"{under}/bucket"}
    store.close()


@pytest.mark.parametrize("path", ["/a b", "/%7Ea", "/é", "//", "/a//b", "/a/./b", "/..", "/a;b=1", "/a+b"])
def test_endpoint_path_that_clients_encode_differently_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^endpoint_url: .* not accepted: write a path of names"):
        S3Options(bucket="bucket", endpoint_url=f"https://storage.example{path}")


def test_ipv6_zone_in_an_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^endpoint_url: .* without its zone"):
        S3Options(bucket="bucket", endpoint_url="https://[fe80::1%25eth0]:9000")


def test_password_in_an_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        S3Options(bucket="bucket", endpoint_url=f"https://user:{SECRET}@storage.example")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


# -- answers that no test server gives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_gone", [True, False])
def test_deletion_with_a_bare_200_succeeds_only_if_the_object_is_gone(options: S3Options, is_gone: bool) -> None:
    """Of a server without request ids; a proxy's page looks alike."""

    def head(**_: Any) -> dict[str, Any]:
        if is_gone:
            raise ClientError({"Error": {"Code": "404"}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "HeadObject")
        return {"ContentLength": 1}

    bare = {"ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {}}}
    session = S3Session(options)
    session._client = SimpleNamespace(delete_object=lambda **_: bare, head_object=head)
    with ExitStack() as stack:
        if not is_gone:
            stack.enter_context(pytest.raises(StoreConfigError, match="not answer like an S3 server"))
        S3Control(session).delete("a")


def test_batch_deletion_error_without_a_key_fails_all_keys(options: S3Options) -> None:
    session = S3Session(options)
    session._client = SimpleNamespace(delete_objects=lambda **_: {"Errors": [{"Code": "InternalError"}]})
    failed = S3Control(session).delete_batch(["a", "b"])
    assert [type(failed[key]) for key in ("a", "b")] == [StoreUnavailableError] * 2


# -- secrets (X4) ------------------------------------------------------------------------------------------------------


def test_s3_secrets_are_not_shown_in_errors_or_logs(
    options: S3Options, server: HttpFaultServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every kind of call and of failure, with every logger at DEBUG."""
    caplog.set_level(logging.DEBUG)
    for name in ("botocore.auth", "botocore.endpoint", "urllib3.connectionpool"):
        caplog.set_level(logging.DEBUG, logger=name)
    shown: list[str] = []
    raised: list[StoreError] = []
    store = S3Store(options)
    store.put("a", as_parts(DATA))
    calls = (
        lambda: store.put("b", as_parts(DATA)),
        lambda: fetch(store, "a", len(DATA)),
        lambda: store.size("a"),
        lambda: store.get_tail("a", 10),
        lambda: store.delete("a"),
        lambda: list(store.keys()),
        lambda: store.size_many(["a"]),
        lambda: store.delete_many(["a"]),
        store.check,
    )
    for fault in (*Fault, None):
        if fault in (Fault.STALL, Fault.SLOW_LORIS):
            continue  # half the timeout each, and nothing is said by the server
        server.heal()
        if fault is not None:
            server.inject(fault)
        for call in calls:
            try:
                shown.append(repr(call()))
            except StoreError as e:
                raised.append(e)
    assert not [e for e in raised if e.__context__ or e.__cause__]
    shown += [line for e in raised for line in traceback.format_exception(e)]
    process = store._attempts.current()
    shown += [
        repr(store),
        repr(options),
        repr(process),
        str(vars(store)),
        str(vars(store._attempts)),
        caplog.text,
        *capfd.readouterr(),
    ]
    everything = "\n".join(shown)
    for secret in (SECRET, TOKEN, "x-amz-security-token"):
        assert secret not in everything
    assert "InternalError, HTTP 500" in everything


def test_output_of_a_credential_process_is_not_logged(
    options: S3Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At a refresh: botocore warns with the exception, whose text is the process' own."""
    script = answers_for_a_while(tmp_path)
    session = S3Session(replace(options, profile="p"))
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('{SECRET}')\n")
    with pytest.raises(StorePermissionError, match=r"^secret: .*credential chain failed"):
        session.credentials()
    session.close()
    assert SECRET not in caplog.text
    assert "Refreshing temporary credentials failed during mandatory refresh period." in caplog.text


def test_boto3_and_urllib3_loggers_stay_capped_after_later_level_changes() -> None:
    child = logging.getLogger("botocore.some.child")
    child.setLevel(logging.DEBUG)
    cap_chatty_loggers()
    level = logging.root.level
    try:
        logging.root.setLevel(logging.DEBUG)
        for name in ("boto3", "botocore", "botocore.auth", "botocore.some.child", "urllib3", "urllib3.connectionpool"):
            assert not logging.getLogger(name).isEnabledFor(logging.DEBUG)
    finally:
        logging.root.setLevel(level)


def test_virtual_hosts_required_by_the_server_error_says_how_to_write_the_endpoint(
    options: S3Options, server: HttpFaultServer
) -> None:
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
