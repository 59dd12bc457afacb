"""Signer: writes the head of a request to S3, signed with AWS Signature Version 4."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
EMPTY: Final = hashlib.sha256().hexdigest()  # the hash of no payload

_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class Signer:
    """Signs requests for objects; botocore's 0.1 ms of Python would matter here. Any thread may call.

    It follows "Create a signed AWS API request" in the AWS IAM User Guide. It is short because our requests have no
    query, S3 does not normalize paths, and a signing key is valid for a day.

    Args:
        host: value of the Host header.
        region: the bucket's region.
        clock: returns seconds since 1970.
    """

    def __init__(self, host: str, region: str, *, clock: Callable[[], float] = time.time) -> None:
        self._host = host
        self._region = region
        self._clock = clock
        self._key = ("", "", b"")  # date, secret and their signing key; replaced as a whole

    def head(
        self,
        method: str,
        path: str,
        credentials: ReadOnlyCredentials,
        headers: Mapping[str, str],
        *,
        payload: str = EMPTY,
        size: int | None = None,
    ) -> bytes:
        """Write a request's line and headers.

        Args:
            path: percent-encoded, as sent.
            credentials: of printable ASCII characters, as ``BotoConfig.check`` ensures.
            headers: to sign and send, besides those of the signature; their names are in lower case.
            payload: the SHA-256 of the body in hex digits, or ``UNSIGNED``.
            size: bytes of the body; None: the method has none.
        """
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock()))
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        signed = {"host": self._host, "x-amz-content-sha256": payload, "x-amz-date": now, **headers}
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names = sorted(signed)
        lines = [f"{name}:{signed[name]}" for name in names]
        joined = ";".join(names)
        canonical = "\n".join((method, path, "", *lines, "", joined, payload))
        to_sign = f"{_ALGORITHM}\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._signing_key(now[:8], credentials.secret_key), to_sign.encode(), "sha256").hex()
        lines.append("user-agent:kvtiers")
        if size is not None:
            lines.append(f"content-length:{size}")
        lines.append(
            f"authorization:{_ALGORITHM} Credential={credentials.access_key}/{scope}, SignedHeaders={joined}, "
            f"Signature={signature}\r\n\r\n"
        )
        return "\r\n".join((f"{method} {path} HTTP/1.1", *lines)).encode()

    def _signing_key(self, date: str, secret_key: str) -> bytes:
        known_date, known_secret, key = self._key
        if (known_date, known_secret) != (date, secret_key):
            key = f"AWS4{secret_key}".encode()
            for scope in (date, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, scope.encode(), "sha256")
            self._key = date, secret_key, key
        return key
