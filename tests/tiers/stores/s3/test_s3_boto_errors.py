"""What boto3 finds in files and variables, and what it raises: told by name, and retried only where that helps."""

from __future__ import annotations

import logging
import re
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto_errors
from urllib3.exceptions import ProtocolError

from kvtiers.tiers.errors import (
    ConfigError,
    StoreConfigError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from kvtiers.tiers.stores.s3.boto_errors import translate, translate_chain
from kvtiers.tiers.stores.s3.errors import Place
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.session import S3Session
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import as_parts
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from tests.tiers.stores.s3.test_s3_config import _credentials as _credentials  # an autouse fixture
from tests.tiers.stores.s3.test_s3_config import make_program

PLACE = Place("bucket", "us-east-1", "http://storage.example", "profile 'p' of /etc/aws")
CONNECTION_ERRORS = (
    boto_errors.EndpointConnectionError,
    boto_errors.ConnectionClosedError,
    boto_errors.ConnectionError,
    boto_errors.IncompleteReadError,
    boto_errors.ProxyConnectionError,
    boto_errors.ResponseStreamingError,
)
TIMEOUTS = (boto_errors.ConnectTimeoutError, boto_errors.ReadTimeoutError)


@pytest.fixture
def client() -> str:
    """Nothing here depends on the client that moves blocks."""
    return "direct"


def subclasses(kind: type[Exception]) -> Iterator[type[Any]]:
    """Of botocore's own, and of nobody who inherits from them."""
    for one in kind.__subclasses__():
        if one.__module__ == "botocore.exceptions":
            yield one
            yield from subclasses(one)


def make(kind: type[Any]) -> Exception:
    names = [name for _, name, _, _ in string.Formatter().parse(kind.fmt) if name]
    error: Exception = kind(**{"last_response": None, **{name: f"the {name}" for name in names}})
    return error


@pytest.mark.parametrize("kind", list(subclasses(boto_errors.BotoCoreError)), ids=lambda kind: kind.__name__)
def test_only_connection_errors_and_timeouts_are_retryable(kind: type[Any]) -> None:
    told = translate(make(kind), PLACE, 1.0)
    is_of_connection = kind in CONNECTION_ERRORS
    assert told.retryable == (is_of_connection or kind in TIMEOUTS)
    assert bool(re.search("refused the connection|no connection to", str(told))) == is_of_connection


def test_unknown_botocore_error_keeps_botocores_words_without_credentials() -> None:
    class NewError(boto_errors.BotoCoreError):  # type: ignore[misc] # botocore has no types
        fmt = "The key {key} of\n{path} is odd; see https://user:password@storage.example/x"

    told = translate(NewError(key="color", path="/etc/aws"), PLACE, 1.0)
    assert isinstance(told, StoreConfigError)
    assert str(told) == (
        "boto3: The key color of /etc/aws is odd; see https://storage.example/x (profile 'p' of /etc/aws)"
    )


def test_http_client_error_is_unavailable_only_for_a_broken_connection() -> None:
    broken = boto_errors.HTTPClientError(error=ProtocolError("broken"))
    assert isinstance(translate(broken, PLACE, 1.0), StoreUnavailableError)
    told = translate(boto_errors.HTTPClientError(error=ValueError("Invalid header value b'token'")), PLACE, 1.0)
    assert isinstance(told, StoreConfigError)
    assert "cannot send the request (ValueError)" in str(told)
    assert "b'token'" not in str(told)


def test_proxy_without_connection_error_names_proxy_and_endpoint() -> None:
    error = boto_errors.ProxyConnectionError(proxy_url="http://***:***@proxy.example:3128")
    told = translate(error, PLACE, 1.0)
    assert isinstance(told, StoreUnavailableError)
    assert str(told).startswith(
        "proxy: no connection to http://storage.example through the proxy http://proxy.example:3128;"
    )


def test_proxy_error_of_credential_chain_does_not_name_bucket_endpoint() -> None:
    error = boto_errors.ProxyConnectionError(proxy_url="http://proxy.example:3128", error=OSError("no route"))
    told = translate_chain(error, PLACE, 1.0)
    assert str(told).startswith("proxy: no connection to a server of boto3's credential chain through the proxy")


@pytest.mark.parametrize("error", [ValueError("canary"), KeyError("canary"), OverflowError("canary"), RuntimeError()])
def test_unknown_exception_of_request_error_names_type_and_not_credentials(error: Exception) -> None:
    told = translate(error, PLACE, 1.0)
    assert isinstance(told, StoreConfigError)
    assert str(told).startswith(f"endpoint: the server's answer could not be understood ({type(error).__name__}); ")
    assert "canary" not in str(told)


@pytest.mark.parametrize("error", [ValueError("canary"), KeyError("canary"), IndexError("canary")])
def test_unknown_exception_of_credential_chain_error_names_credentials(error: Exception) -> None:
    told = translate_chain(error, PLACE, 1.0)
    assert isinstance(told, StorePermissionError)
    assert str(told).startswith(
        f"secret: boto3's credential chain cannot parse the credentials ({type(error).__name__}); "
    )
    assert "canary" not in str(told)


# -- credentials -------------------------------------------------------------------------------------------------------


FIELDS = {"AWS_ACCESS_KEY_ID": "access_key", "AWS_SECRET_ACCESS_KEY": "secret_key", "AWS_SESSION_TOKEN": "token"}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("canary\n", r"has the character '\\n'"),
        ("canary # prod", r"has the character ' '"),
        ("can\u200bary", r"has the character '\\u200b'"),
        ('"canary"', "is in quotes, which count as part of the value"),
        ("'canary'", "is in quotes, which count as part of the value"),
    ],
    ids=["newline", "comment", "zero width", "double quotes", "single quotes"],
)
def test_invalid_character_in_a_credential_variable_is_named(
    options: S3Options, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    store = S3Store(options)
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", as_parts(b"data")),
        lambda: store.size("a"),
        store.check,
    ]
    for call in calls:
        with pytest.raises(StorePermissionError, match=rf"^secret: the {FIELDS[name]} from env .*{says}") as caught:
            call()
        assert "canary" not in str(caught.value)
    store.close()


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"])
def test_variable_in_quotes_is_named(options: S3Options, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, '"https://id:canary@minio"')
    with pytest.raises(StoreConfigError, match=rf"{name} is in quotes, .*; remove the quotes$") as caught:
        S3Store(replace(options, endpoint_url=None, region=None)).check()
    assert "canary" not in str(caught.value)


def test_endpoint_that_is_not_a_url_is_named(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(StoreConfigError, match=r"^endpoint: AWS_ENDPOINT_URL is not a URL; write https://host:port$"):
        S3Store(replace(options, endpoint_url=None)).check()


def test_credential_with_a_quote_inside_is_accepted(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a'b\"")
    S3Store(options).check()


def test_file_of_a_credential_with_a_bad_character_is_named(options: S3Options, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[team]\naws_access_key_id = AKIATEAM ; of the team\naws_secret_access_key = s\n"
    )
    (tmp_path / "config").write_text("[profile team]\n")
    with pytest.raises(
        StorePermissionError,
        match=r"^secret: the access_key from shared-credentials-file \(see profile 'team' of .*has the character ' '",
    ):
        S3Store(replace(options, profile="team")).size("a")
    printed = r'{"Version":1,"AccessKeyId":"a","SecretAccessKey":"s","SessionToken":"t\n"}'
    make_program(tmp_path, f"#!{sys.executable}\nprint({printed!r})\n")
    with pytest.raises(StorePermissionError, match=r"^secret: the token from custom-process .* has the character"):
        S3Store(replace(options, profile="p")).size("a")


@pytest.mark.parametrize("role_in", ["profile", "source_profile"])
def test_role_with_mfa_is_refused(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role_in: str
) -> None:
    """botocore would ask for the code on the terminal and wait."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)

    def ask(*_: object) -> None:
        pytest.fail("asked on the terminal")

    monkeypatch.setattr("getpass.getpass", ask)
    role = "role_arn = arn:aws:iam::123456789012:role/kv\n"
    mfa = f"[profile mfa]\n{role}source_profile = base\nmfa_serial = arn:aws:iam::123456789012:mfa/me\n"
    outer = f"[profile outer]\n{role}source_profile = mfa\n"
    (tmp_path / "config").write_text(mfa + outer)
    (tmp_path / "credentials").write_text("[base]\naws_access_key_id = AKIABASE\naws_secret_access_key = s\n")
    store = S3Store(replace(options, profile="mfa" if role_in == "profile" else "outer"))
    with pytest.raises(
        StorePermissionError, match=rf"^secret: profile 'mfa' of {tmp_path}/config has mfa_serial, and nobody can type"
    ):
        store.size("a")
    store.close()


def test_credential_variables_are_used_although_the_profile_needs_mfa(options: S3Options, tmp_path: Path) -> None:
    """They come first in the chain."""
    (tmp_path / "config").write_text(
        "[default]\nrole_arn = arn:aws:iam::123456789012:role/kv\nsource_profile = default\nmfa_serial = mfa\n"
    )
    S3Session(options).close()


# -- region and profile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", ["eu-west-1 # Dublin", "eu-west-1 ; Dublin", "zg_publicru", "eu west", "1"])
def test_region_that_boto3_rejects_is_named_with_its_source(
    options: S3Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\nregion = {region}\n")
    with pytest.raises(
        StoreConfigError,
        match=rf"^region: region of profile 'default' of {tmp_path}/config: '{region}' is not accepted",
    ) as caught:
        S3Store(options).size("a")
    assert ("a comment needs a line of its own" in str(caught.value)) == (not {"#", ";"}.isdisjoint(region))
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    with pytest.raises(StoreConfigError, match=rf"^region: AWS_DEFAULT_REGION: '{region}' is not accepted"):
        S3Store(options).size("a")
    with pytest.raises(ConfigError) as refused:
        replace(options, region=region)
    assert refused.value.field == "region"


def test_empty_aws_variables_count_as_unset(
    options: S3Options, server: HttpFaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[default]\nregion = eu-south-2\n[profile team]\nregion = eu-north-1\n")
    empty = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE", "AWS_ENDPOINT_URL")
    for name in empty:
        monkeypatch.setenv(name, "")
    store = S3Store(options)
    store.put("a", as_parts(b"data"))
    assert "/eu-south-2/" in server.requests("PUT")[-1].headers["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "team")
    store = S3Store(options)
    store.put("b", as_parts(b"data"))
    assert "/eu-north-1/" in server.requests("PUT")[-1].headers["authorization"]


def test_missing_profile_error_names_profile_and_config_file(options: S3Options, tmp_path: Path) -> None:
    with pytest.raises(StoreConfigError, match=rf"^profile: .*\(absent\).*{tmp_path}/config"):
        S3Store(replace(options, profile="absent")).size("a")


def test_unparsable_aws_config_error_names_the_file(
    options: S3Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "config").write_text("region\n")
    with pytest.raises(StoreError, match=rf"^boto3: Unable to parse config file: {tmp_path}/config") as caught:
        S3Store(options).size("a")
    assert not caught.value.retryable
