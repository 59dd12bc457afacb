"""Translates botocore's exceptions into ours: errors of S3, STS, SSO, the credential chain and connections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto_errors
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from ...errors import (
    StoreConfigError,
    StoreError,
    StorePermissionError,
    StoreThrottledError,
    StoreUnavailableError,
    printable,
    without_keys,
)
from .boto_http import AnswerTooLongError
from .errors import (
    CODES,
    NO_S3,
    CredentialsExpiredError,
    Place,
    connection_error,
    deadline_error,
    not_understood,
    proxy_error,
    server_error,
    tls_error,
)
from .proxies import name_proxy

#: Everything that a boto3 call may raise. If the response is not from S3, its parsers may raise any exception.
BOTO_ERRORS = (Exception,)


def translate(error: Exception, place: Place, timeout_s: float) -> StoreError:
    """Translate an exception of a request to S3 into ours. A StoreError stays as it is.

    Args:
        place: where the request went.
        timeout_s: the limit of an attempt, for the message.
    """
    if isinstance(error, StoreError):
        return error
    if isinstance(error, boto_errors.ClientError):
        code = code_of(error.response.get("Error", {}))
        answer = error.response.get("ResponseMetadata", {})
        if not is_from_s3(error):
            return _chain_error(error, answer.get("HTTPStatusCode", 403), code, place)
        status = answer.get("HTTPStatusCode", 500)
        headers = answer.get("HTTPHeaders", {})
        if code.isdigit():
            # MinIO with a configured region sends the header with every response, hence the check of the status.
            redirected = 300 <= status < 400 and "x-amz-bucket-region" in headers
            code = "PermanentRedirect" if redirected else ""
        return server_error(status, code, place=place, location=headers.get("location", ""))
    place = _place_of(error, place)
    if isinstance(error, boto_errors.SSLError):
        return tls_error(str(error), place)
    if isinstance(error, (boto_errors.ConnectTimeoutError, boto_errors.ReadTimeoutError)):
        return deadline_error(timeout_s, place)
    if isinstance(error, AnswerTooLongError):
        return StoreUnavailableError(f"endpoint: {place.endpoint_url} sends a longer answer than S3 ever does")
    if isinstance(error, boto_errors.ProxyConnectionError):
        place = replace(place, proxy=name_proxy(error.kwargs["proxy_url"]))
        refused = _TUNNEL.search(str(_cause_of(error)))
        return proxy_error(int(refused[1]), place) if refused else connection_error(place)
    for kinds, ours, hint in _UNANSWERED:
        if isinstance(error, kinds):
            return ours(hint.format(place.endpoint_url))
    if _is_connection_failure(error):
        return connection_error(place)
    if isinstance(error, boto_errors.PartialCredentialsError):
        return StorePermissionError(f"secret: {_text_of(error)} ({place.config_source})")
    if isinstance(error, boto_errors.BotoCoreError):
        what = "profile" if isinstance(error, boto_errors.ProfileNotFound) else "boto3"
        return StoreConfigError(f"{what}: {_text_of(error)} ({place.config_source})")
    if isinstance(error, OSError):
        return connection_error(place)
    return not_understood(error, place)


def translate_chain(error: Exception, place: Place, timeout_s: float) -> StoreError:
    """Translate an exception that the credential chain raised. Arguments as in ``translate``.

    The chain raises OSError if a token file or helper is missing, and RuntimeError if the refreshed credentials have
    expired, too. If it cannot parse the output of a helper, it may raise nearly any exception.
    """
    if isinstance(error, boto_errors.ProxyConnectionError):
        place = replace(place, endpoint_url="a server of boto3's credential chain")
    if isinstance(error, (StoreError, boto_errors.BotoCoreError, boto_errors.ClientError)):
        return translate(error, place, timeout_s)
    if isinstance(error, RuntimeError):
        return CredentialsExpiredError("secret: boto3's refreshed credentials have expired, too; renew them")
    if isinstance(error, OSError) and error.filename is None:
        return connection_error(place)
    if isinstance(error, OSError):
        return StorePermissionError(
            f"secret: boto3's credential chain cannot read or run {printable(str(error.filename))}, the web identity "
            f"token or credential_process ({place.config_source})"
        )
    return StorePermissionError(
        f"secret: boto3's credential chain cannot parse the credentials ({type(error).__name__}); check the output of "
        "credential_process"
    )


def code_of(error: Mapping[str, Any]) -> str:
    """The code in an error document; "" if it has none (botocore then may hold None, a dict or a list)."""
    code = error.get("Code")
    return code if isinstance(code, str) else ""


def is_from_s3(error: boto_errors.ClientError) -> bool:
    """Whether S3 sent the error. STS or SSO may send it instead: the credential chain may ask them in any request."""
    return _S3_OPERATION.search(error.operation_name) is not None


def _is_connection_failure(error: Exception) -> bool:
    """Whether a connection failed. HTTPClientError alone does not tell: botocore uses it for many causes."""
    if type(error) is boto_errors.HTTPClientError:
        return isinstance(_cause_of(error), (OSError, HTTPError, HTTPException))
    return isinstance(
        error, (boto_errors.ConnectionError, boto_errors.HTTPClientError, boto_errors.IncompleteReadError)
    )


def _cause_of(error: Exception) -> object:
    return getattr(error, "kwargs", {}).get("error")


def _text_of(error: boto_errors.BotoCoreError) -> str:
    """botocore's own message on one line, without logins in URLs."""
    if isinstance(error, boto_errors.HTTPClientError):
        # The error's cause may quote a header, such as the session token.
        return f"its HTTP client cannot send the request ({type(_cause_of(error)).__name__})"
    text = without_keys(printable(" ".join(str(error).split())))
    return _LOGIN.sub("//", text)[:TEXT_LENGTH_MAX]


def _place_of(error: Exception, place: Place) -> Place:
    """Where the failed request was sent, which may be STS or another server of the credential chain."""
    told = getattr(error, "kwargs", {})
    asked = urlsplit(told.get("endpoint_url") or "")
    own = urlsplit(place.endpoint_url).netloc
    host = asked.netloc.rpartition("@")[2]
    if not host or (own and host.endswith(own)):  # the host may begin with the bucket's name
        return place
    return replace(place, endpoint_url=f"{asked.scheme}://{host}")


def _chain_error(error: boto_errors.ClientError, status: int, code: str, place: Place) -> StoreError:
    """Our exception for an STS or SSO error. A code that S3 does not have means that the role may not be assumed."""
    if error.operation_name.startswith("AssumeRole"):
        source = "STS"
        refused = "secret: STS does not let these credentials assume the role of the profile"
    else:
        source = f"{error.operation_name} of boto3's credential chain"
        refused = f"secret: {source} was refused; correct the profile's account and role, or run aws sso login"
    if code.startswith("ExpiredToken"):
        code = "ExpiredToken"
    elif code.startswith(("Throttl", "TooManyRequests")):
        code = "Throttling"
    elif code.isdigit():  # a proxy's
        code = ""
    elif str(error.response.get("Error", {}).get("Message")).startswith(_CLOCK_SAYS):
        code = "RequestTimeTooSkewed"
    passes = status >= 500 or status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
    if code == "AccessDenied" or not (passes or code in CODES):
        return StorePermissionError(refused)
    told = server_error(status, code, place=replace(place, endpoint_url=source))
    if isinstance(told, (StorePermissionError, StoreUnavailableError, StoreThrottledError)):
        return told
    # Codes about objects or buckets, such as NoSuchKey and HTTP 501, do not have their S3 meaning here.
    return (
        StoreUnavailableError(f"endpoint: {source} reported an internal error")
        if passes
        else StorePermissionError(refused)
    )


TEXT_LENGTH_MAX = 500
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})\b")  # http.client's words
_LOGIN = re.compile(r"//[^\s/]*@")

_CLOCK_SAYS = ("Signature expired", "Signature not yet current")

# Every S3 operation that kvtiers or botocore calls has one of these words in its name. No operation of the credential
# chain has.
_S3_OPERATION = re.compile("Object|Bucket|CreateSession")

#: botocore's exceptions without a response from the server -> our exception and message; the most specific first.
_UNANSWERED: tuple[tuple[tuple[type[Exception], ...], type[StoreError], str], ...] = (
    (
        (boto_errors.NoCredentialsError,),
        StorePermissionError,
        "secret: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
    ),
    (
        (
            boto_errors.SSOError,
            boto_errors.TokenRetrievalError,
            boto_errors.NoAuthTokenError,
            boto_errors.LoginError,
        ),
        CredentialsExpiredError,
        "secret: the SSO session is missing or has expired; run aws sso login",
    ),
    (
        (boto_errors.CredentialRetrievalError, boto_errors.MetadataRetrievalError, boto_errors.UnknownCredentialError),
        StorePermissionError,
        "secret: boto3's credential chain failed (credential_process or metadata); try `aws sts get-caller-identity`",
    ),
    ((ResponseParserError,), StoreConfigError, NO_S3),
)
