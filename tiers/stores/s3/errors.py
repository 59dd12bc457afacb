"""Maps S3 error codes and HTTP statuses to our exceptions, for both clients.

Messages never repeat text from the server or a client library, because that text may hold secrets. If a signature is
wrong, S3 echoes the canonical request with the session token; libraries quote the output of a credential process. So
every exception is raised ``from None``, with the code, the status and a hint of our own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from ...errors import (
    BlobCorruptError,
    BlobNotFoundError,
    StoreConfigError,
    StoreError,
    StoreFullError,
    StorePermissionError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)


class CredentialsRefusedError(StorePermissionError):
    """The server rejects these credentials; the credential chain may have new ones by now."""


class CredentialsExpiredError(CredentialsRefusedError):
    """The credentials have expired."""


class CredentialsLateError(StoreTimeoutError):
    """The credential chain hangs, so there are no credentials. A new chain may succeed."""


class BareRefusalError(StorePermissionError):
    """A 403 without an error code, such as the response to a HEAD, which has no body."""


class RequestRefusedError(StoreConfigError):
    """The server does not accept requests of this form. Another form (checksum, signature, header) may be accepted."""


class DigestRefusedError(StoreUnavailableError):
    """The server rejected the digest: the bytes changed in transit, or it does not accept this kind of digest."""


class MissingHeaderError(StoreUnavailableError):
    """The response lacks a header that S3 sends: it is a web page, or a proxy removed the header. Not worth a retry.

    (A worker process reports it as StoreUnavailableError, after its own attempts.)
    """

    retryable = False


class SignatureRefusedError(CredentialsRefusedError):
    """The server computes another signature: the secret is wrong, or the server does not sign all our headers."""


class ProxyRefusedError(StoreConfigError):
    """The proxy does not let this machine reach the endpoint."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request went, for the hints in error messages. Holds no secrets.

    Attributes:
        config_source: the profile and file that boto3 reads its configuration from.
        proxy: address of the proxy in use, and the variable that sets it; "" if there is none.
    """

    bucket: str
    region: str
    endpoint_url: str
    config_source: str = ""
    proxy: str = ""


_REDIRECTS = "endpoint: {endpoint_url} redirects to {target}; correct endpoint_url, or log in if that is a login page"
_RIGHTS = "grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on {bucket}"
_EXPIRED = "secret: the session token has expired; renew it (SSO: aws sso login), or let a role or profile renew it"
_REGION = "region: bucket {bucket} is not in {region}; set region, or endpoint_url if it is not at {endpoint_url}"
_SECRET = "secret: the secret access key is wrong for this access key id; correct AWS_SECRET_ACCESS_KEY or the profile"
_KEY_ID = "secret: {endpoint_url} does not know this access key id; correct AWS_ACCESS_KEY_ID or the profile's"
_TOKEN = "secret: the session token is not valid at this endpoint; correct or unset AWS_SESSION_TOKEN"
_CLOCK = "clock: this machine's clock is too far from the server's; run NTP (chronyc makestep)"
_BUCKET = "bucket: {bucket} does not exist at {endpoint_url}; create it or correct bucket"
_VIRTUAL = "endpoint: {endpoint_url} accepts buckets only as part of the host name; write {bucket}. before its host"
_KMS = "secret: the KMS key cannot be used; check sse and grant kms:GenerateDataKey and kms:Decrypt"
_SSE = "sse: the server cannot encrypt blobs in this way; correct sse, or give the server a KMS"
_TOO_LARGE = "the blob is larger than the server, or a proxy in front of it, accepts"
_FORM = "the server does not accept this request"

_UNTRUSTED = "endpoint: the certificate of {} is not trusted; set ca_bundle"
_OTHER_NAME = "endpoint: the certificate of {} is for another name; correct endpoint_url"
_NO_TLS = "endpoint: {} does not speak TLS; should its URL begin with http?"
_OTHER_TIME = "endpoint: the certificate of {} has expired, or this machine's clock is wrong"
#: Part of a client's error text -> hint.
_TLS_ERRORS = (
    ("WRONG_VERSION_NUMBER", _NO_TLS),  # OpenSSL's
    ("RECORD_LAYER_FAILURE", _NO_TLS),
    ("doesn't match", _OTHER_NAME),  # urllib3's
    ("Hostname mismatch", _OTHER_NAME),
    ("IP address mismatch", _OTHER_NAME),
    ("certificate has expired", _OTHER_TIME),
    ("certificate is not yet valid", _OTHER_TIME),
)

NO_S3 = "endpoint: {} does not answer like an S3 server; is the address right, or did a proxy answer?"

# Messages repeat only the scheme and host of a redirect's target.
_TARGET = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,255}(?=[/?#]|\Z)")

# Messages repeat only such a code from an error document, which may hold line breaks or the request's token.
_PLAIN_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")

#: S3 error code -> exception and hint. The codes come from AWS, MinIO (XMinio...), Ceph and STS.
CODES: Mapping[str, tuple[type[StoreError], str]] = {
    "AccessDenied": (StorePermissionError, f"secret: these credentials may not do this; {_RIGHTS}"),
    "AccountProblem": (StorePermissionError, "secret: the account has a problem; ask its owner"),
    "AllAccessDisabled": (StorePermissionError, "bucket: access to {bucket} was disabled; ask its owner"),
    "AuthorizationHeaderMalformed": (StoreConfigError, _REGION),
    "BadDigest": (DigestRefusedError, "the bytes changed in transit"),
    "BandwidthLimitExceeded": (StoreThrottledError, "the server asks to slow down"),
    "ConditionalRequestConflict": (StoreUnavailableError, "another writer is changing this key"),
    "EntityTooLarge": (StoreConfigError, _TOO_LARGE),
    "ExpiredToken": (CredentialsExpiredError, _EXPIRED),
    "IDPCommunicationError": (StoreUnavailableError, "STS cannot reach the identity provider"),
    "IllegalLocationConstraintException": (StoreConfigError, _REGION),
    "IncompleteBody": (StoreUnavailableError, "the connection broke before the body ended"),
    "InternalError": (StoreUnavailableError, "the server reports an internal error"),
    "InvalidAccessKeyId": (CredentialsRefusedError, _KEY_ID),
    "InvalidBucketName": (StoreConfigError, "bucket: {endpoint_url} does not accept the name {bucket}"),
    "InvalidClientTokenId": (CredentialsRefusedError, _KEY_ID),
    "InvalidDigest": (DigestRefusedError, "the bytes changed in transit"),
    "InvalidEncryptionAlgorithmError": (StoreConfigError, _SSE),
    "InvalidEncryptionMethod": (StoreConfigError, _SSE),
    "InvalidObjectState": (BlobCorruptError, "archived: its storage class cannot be read at once"),
    "InvalidRange": (BlobCorruptError, "the blob is shorter than the requested range"),
    "InvalidStorageClass": (StoreConfigError, "storage_class: the server does not have this class"),
    "InvalidToken": (CredentialsExpiredError, _TOKEN),
    "InvalidTokenId": (CredentialsExpiredError, _TOKEN),  # MinIO's
    "KMS.DisabledException": (StorePermissionError, _KMS),
    "KMS.KMSInvalidStateException": (StorePermissionError, _KMS),
    "KMS.NotFoundException": (StorePermissionError, _KMS),
    "KMSNotConfigured": (StoreConfigError, _SSE),  # MinIO's
    "NoSuchBucket": (StoreConfigError, _BUCKET),
    "NoSuchKey": (BlobNotFoundError, "not stored"),
    "OperationAborted": (StoreUnavailableError, "another writer is changing this key"),
    "PermanentRedirect": (StoreConfigError, _REGION),
    "QuotaExceeded": (StoreFullError, "bucket: the quota of {bucket} is used up"),
    "RequestExpired": (StorePermissionError, _CLOCK),
    "RequestLimitExceeded": (StoreThrottledError, "the server asks to slow down"),
    "RequestTimeTooSkewed": (StorePermissionError, _CLOCK),
    "RequestTimeout": (StoreUnavailableError, "the server waited too long for the body"),
    "SecondLevelDomainForbidden": (StoreConfigError, _VIRTUAL),  # Alibaba Cloud's
    "ServiceUnavailable": (StoreUnavailableError, "the server is out of service"),
    "SignatureDoesNotMatch": (SignatureRefusedError, _SECRET),
    "SlowDown": (StoreThrottledError, "the server asks to slow down"),
    "SlowDownRead": (StoreThrottledError, "the server asks to slow down"),
    "SlowDownWrite": (StoreThrottledError, "the server asks to slow down"),
    "TemporaryRedirect": (StoreConfigError, _REGION),
    "Throttling": (StoreThrottledError, "the server asks to slow down"),
    "ThrottlingException": (StoreThrottledError, "the server asks to slow down"),  # KMS'
    "TokenRefreshRequired": (CredentialsExpiredError, _EXPIRED),
    "XAmzContentChecksumMismatch": (DigestRefusedError, "the bytes changed in transit"),  # MinIO's
    "XAmzContentSHA256Mismatch": (DigestRefusedError, "the bytes changed in transit"),
    "XMinioAdminBucketQuotaExceeded": (StoreFullError, "bucket: the quota of {bucket} is used up"),
    "XMinioKMSKeyNotFoundException": (StoreConfigError, _SSE),
    "XMinioKMSNotConfigured": (StoreConfigError, _SSE),
    "XMinioStorageFull": (StoreFullError, "the server's disks are full"),
}

#: For responses without a known code: the response to a HEAD has no body, and proxies have their own codes.
_STATUSES: Mapping[int, tuple[type[StoreError], str]] = {
    **dict.fromkeys((301, 302, 303, 307, 308), (StoreConfigError, _REDIRECTS)),
    400: (RequestRefusedError, _FORM),
    401: (StorePermissionError, f"secret: the server rejects these credentials; {_RIGHTS}"),
    403: (BareRefusalError, f"secret: these credentials may not do this, or the clock is off; {_RIGHTS}"),
    404: (BlobNotFoundError, "not stored"),
    405: (RequestRefusedError, "endpoint: {endpoint_url} does not seem to speak S3"),
    408: (StoreUnavailableError, "the server waited too long for the body"),
    409: (StoreUnavailableError, "another writer is changing this key"),
    412: (StoreUnavailableError, "another writer is changing this key"),
    413: (StoreConfigError, _TOO_LARGE),
    416: (BlobCorruptError, "the blob is shorter than the requested range"),
    429: (StoreThrottledError, "the server asks to slow down"),
    501: (RequestRefusedError, _FORM),
    503: (StoreThrottledError, "the server asks to slow down"),
    507: (StoreFullError, "the server's disks are full"),
}


def server_error(status: int, code: str, *, place: Place, location: str = "") -> StoreError:
    """The exception for an error response.

    Args:
        status: HTTP status.
        code: from S3's error document; "" if it had none. Text that does not look like a code is ignored.
        location: the redirect's target, if known.
    """
    if not _PLAIN_CODE.fullmatch(code):
        code = ""
    fallback = (
        (StoreUnavailableError, "endpoint: {endpoint_url} reported an internal error, or another server answered")
        if status >= 500
        else (RequestRefusedError, _FORM)
    )
    error, hint = CODES.get(code) or _STATUSES.get(status) or fallback
    if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:  # only proxies send it
        return proxy_error(status, place)
    said = f"{code}, HTTP {status}" if code else f"HTTP {status}"
    if place.proxy and not code:
        said += f"; the proxy {place.proxy} may have sent this response"
    target = _TARGET.match(location)
    filled = hint.format(
        bucket=place.bucket,
        region=place.region,
        endpoint_url=place.endpoint_url,
        target=target[0] if target else "another page",
    )
    return error(f"{filled} ({said})")


def without_absence(error: StoreError, place: Place) -> StoreError:
    """Turn "not found" into a StoreConfigError, for requests to which S3 never answers that an object is absent."""
    if isinstance(error, BlobNotFoundError):
        return StoreConfigError(f"{NO_S3.format(place.endpoint_url)} (HTTP 404)")
    return error


def connection_error(place: Place) -> StoreError:
    """The exception for a request that got no response, or only part of one."""
    if place.proxy:
        return StoreUnavailableError(
            f"proxy: no connection to {place.endpoint_url} through the proxy {place.proxy}; is its address right, "
            "and can it reach the endpoint?"
        )
    return StoreUnavailableError(
        f"endpoint: {place.endpoint_url} refused the connection, broke it off or is an unknown host"
    )


def proxy_error(status: int | None, place: Place) -> StoreError:
    """The exception for a proxy that refuses to connect to the endpoint.

    Args:
        status: the HTTP status of its answer; None: unknown.
    """
    proxy = f"the proxy {place.proxy or f'in front of {place.endpoint_url}'}"
    said = f" (HTTP {status})" if status else ""
    if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        return ProxyRefusedError(
            f"proxy: {proxy} requires a login{said}; set the variable to http://user:password@host:port, or add the "
            "endpoint's host to NO_PROXY"
        )
    if status is not None and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return StoreUnavailableError(f"proxy: {proxy} cannot reach {place.endpoint_url}{said}")
    return ProxyRefusedError(
        f"proxy: {proxy} refuses to connect this machine to {place.endpoint_url}{said}; allow the endpoint there, set "
        "a login if the proxy requires one, or add the endpoint's host to NO_PROXY"
    )


def not_understood(error: Exception, place: Place) -> StoreError:
    """The exception for a response that a client fails to read. Names only the type: the text may quote the server."""
    return StoreConfigError(
        f"endpoint: the server's answer could not be understood ({type(error).__name__}); is {place.endpoint_url} the "
        "right address, or does a proxy change what S3 sends?"
    )


def missing_header(header: str, place: Place) -> MissingHeaderError:
    """The exception for a response that lacks a header which S3 sends."""
    return MissingHeaderError(
        f"endpoint: {place.endpoint_url} answers without the header {header}, which S3 sends; is that a proxy's page, "
        "or does a proxy remove it?"
    )


def tls_error(text: str, place: Place) -> StoreConfigError:
    """The exception for a TLS handshake that failed, chosen by the client's error text."""
    hint = next((hint for part, hint in _TLS_ERRORS if part in text), _UNTRUSTED)
    return StoreConfigError(hint.format(place.endpoint_url))


def deadline_error(timeout_s: float, place: Place) -> StoreError:
    """The exception for a response that was not complete in time."""
    return StoreTimeoutError(f"endpoint: {place.endpoint_url} did not answer within {timeout_s:g} s")
