"""botocore's exceptions as ours: what S3, STS and SSO said, and how the credential chain and connections failed."""

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

from kvtiers.tiers.errors import (
    StoreConfigError,
    StoreError,
    StorePermissionError,
    StoreThrottledError,
    StoreUnavailableError,
    printable,
    without_keys,
)
from kvtiers.tiers.stores.s3.boto_http import AnswerTooLongError
from kvtiers.tiers.stores.s3.errors import (
    CODES,
    NO_S3,
    CredentialsExpiredError,
    Place,
    connection_error,
    deadline_error,
    server_error,
    tls_error,
)

#: Everything that a call of boto3 raises when something outside of this process is wrong. From its credential chain
#: come OSError (a token file or a helper is not there), RuntimeError (what was refreshed has expired all the same) and
#: ValueError (something cannot be parsed); TypeError comes of an error document whose code is no text.
BOTO_ERRORS = (
    boto_errors.BotoCoreError,
    boto_errors.ClientError,
    ResponseParserError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
)


def translate(error: Exception, place: Place, timeout_s: float) -> StoreError:
    """Our exception for one of botocore's.

    Args:
        place: what the request was about.
        timeout_s: of an attempt.
    """
    if isinstance(error, boto_errors.ClientError):
        code = code_of(error.response.get("Error", {}))
        answer = error.response.get("ResponseMetadata", {})
        if not is_of_s3(error):
            return _chain_error(error, answer.get("HTTPStatusCode", 403), code, place)
        status = answer.get("HTTPStatusCode", 500)
        headers = answer.get("HTTPHeaders", {})
        if code.isdigit():
            # MinIO with a region of its own sends the header with every answer.
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
    for kinds, ours, hint in _UNANSWERED:
        if isinstance(error, kinds):
            return ours(hint.format(place.endpoint_url))
    if _is_of_connection(error):
        return connection_error(place)
    if isinstance(error, boto_errors.PartialCredentialsError):
        return StorePermissionError(f"secret: {_text_of(error)} ({place.config_source})")
    if isinstance(error, boto_errors.BotoCoreError):
        what = "profile" if isinstance(error, boto_errors.ProfileNotFound) else "boto3"
        return StoreConfigError(f"{what}: {_text_of(error)} ({place.config_source})")
    if isinstance(error, RuntimeError):
        return CredentialsExpiredError("secret: what boto3's credential chain found anew has expired, too; renew it")
    if isinstance(error, OSError):
        if error.filename is None:
            return connection_error(place)
        return StorePermissionError(
            f"secret: boto3's credential chain misses a file, {printable(str(error.filename))}: the web identity's "
            f"token or credential_process ({place.config_source})"
        )
    return StorePermissionError(
        "secret: boto3's credential chain found what it cannot read; what does credential_process print?"
    )


def code_of(error: Mapping[str, Any]) -> str:
    """The code in an error document; "" if it has none, for which botocore may have None, a dict or a list."""
    code = error.get("Code")
    return code if isinstance(code, str) else ""


def is_of_s3(error: boto_errors.ClientError) -> bool:
    """Whether S3 said so, not STS or SSO, which the credential chain may ask amid any request."""
    return _OF_S3.search(error.operation_name) is not None


def _is_of_connection(error: Exception) -> bool:
    """Whether a connection failed; botocore has one class for whatever else its HTTP client raises."""
    if type(error) is boto_errors.HTTPClientError:
        return isinstance(_cause_of(error), (OSError, HTTPError, HTTPException))
    return isinstance(
        error, (boto_errors.ConnectionError, boto_errors.HTTPClientError, boto_errors.IncompleteReadError)
    )


def _cause_of(error: Exception) -> object:
    return getattr(error, "kwargs", {}).get("error")


def _text_of(error: boto_errors.BotoCoreError) -> str:
    """botocore's own words, on one line, without a login in a URL."""
    if isinstance(error, boto_errors.HTTPClientError):
        # Its cause may quote a header, such as the session token.
        return f"its HTTP client cannot send the request ({type(_cause_of(error)).__name__})"
    text = without_keys(printable(" ".join(str(error).split())))
    return _LOGIN.sub("//", text)[:TEXT_LENGTH_MAX]


def _place_of(error: Exception, place: Place) -> Place:
    """Where the request that failed was sent: the credential chain asks STS and others."""
    told = getattr(error, "kwargs", {})
    asked = urlsplit(told.get("endpoint_url") or told.get("proxy_url") or "")
    own = urlsplit(place.endpoint_url).netloc
    host = asked.netloc.rpartition("@")[2]
    if not host or (own and host.endswith(own)):  # the bucket's name may stand before it
        return place
    return replace(place, endpoint_url=f"{asked.scheme}://{host}")


def _chain_error(error: boto_errors.ClientError, status: int, code: str, place: Place) -> StoreError:
    """Our exception for STS's or SSO's. A code that S3 does not have means that the role may not be assumed."""
    if error.operation_name.startswith("AssumeRole"):
        source = "STS"
        refused = "secret: STS does not let these credentials assume role_arn"
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
    # What says something about an object or a bucket in S3, as NoSuchKey and HTTP 501 do, does not do so here.
    return StoreUnavailableError(f"endpoint: {source} has a fault") if passes else StorePermissionError(refused)


TEXT_LENGTH_MAX = 500
_LOGIN = re.compile(r"//[^\s/]*@")

_CLOCK_SAYS = ("Signature expired", "Signature not yet current")

# Each operation that we or botocore ask S3 for has one of these in its name, and none that the credential chain does.
_OF_S3 = re.compile("Object|Bucket|CreateSession")

#: botocore's exceptions without an answer from the server, most special first -> ours.
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
        "secret: the SSO session is not there or has expired; run aws sso login",
    ),
    (
        (boto_errors.CredentialRetrievalError, boto_errors.MetadataRetrievalError, boto_errors.UnknownCredentialError),
        StorePermissionError,
        "secret: boto3's credential chain failed (credential_process or metadata); try `aws sts get-caller-identity`",
    ),
    (
        (ResponseParserError, TypeError),
        StoreConfigError,
        NO_S3,
    ),
)
