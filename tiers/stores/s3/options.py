"""S3Options: all settings of an S3 store, without secrets. This module imports no client library."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...errors import ConfigError, quoted

# All names that S3 or a compatible server accepts, without any that would change the URL's meaning.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
# Host names that boto3 accepts (botocore.utils.is_valid_endpoint_url), except IPv6 addresses.
_HOST = re.compile(
    r"(?=.{1,255}\Z)((?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)[a-z0-9-]{1,63}(?<!-)\.?", re.IGNORECASE | re.ASCII
)
# Paths that both clients send unchanged.
_PATH = re.compile(r"(/(?!\.\.?(/|\Z))[A-Za-z0-9._~-]+)*/?")
# A host whose last label is such a number is an IPv4 address or invalid (WHATWG, "ends in a number").
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE | re.ASCII)
# Same rule as botocore.utils.validate_region_name.
_REGION = re.compile(r"(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_HEADER_TOKEN = re.compile(r"[A-Za-z0-9_:/.@+=,-]{1,512}")

_ALGORITHMS = (None, "AES256", "aws:kms")
_NO_KMS_KEY = re.compile("aes|aws:", re.IGNORECASE)  # a misspelt algorithm

PREFIX_LENGTH_MAX = 512  # bytes; leaves 511 of S3's 1,024 for the key
CONNECT_S_MAX = 2.0  # a server that is up accepts connections in milliseconds, or a few hundred across an ocean
# A connection that was idle for longer is not reused. A load balancer (after 60 s or more) or a NAT (240 to 350 s) may
# have dropped it silently, and a request on it would hang until its timeout. HTTP clients keep idle connections for 60
# to 90 s, urllib3 forever. A new connection every half minute costs almost nothing.
IDLE_S_MAX = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Bucket, endpoint and request settings of an S3 store.

    Credentials are not settings: they come from boto3's chain (environment, profile, SSO, assume-role, web identity,
    container and instance metadata, ``credential_process``), which also refreshes them.

    Attributes:
        bucket: must exist. A directory bucket (S3 Express, ``…--x-s3``) is accessed with boto3.
        prefix: folder inside the bucket; "" is the bucket's root.
        endpoint_url: of a server other than AWS; None: boto3's chain (``AWS_ENDPOINT_URL``, profile), otherwise AWS.
            See ``without_bucket``.
        region: None: boto3's chain, otherwise us-east-1.
        profile: name of a profile in ~/.aws/config.
        ca_bundle: PEM file of certificate authorities to trust in addition to the system's.
        allow_insecure: allow http to hosts other than this one.
        sse: server-side encryption of new blobs: AES256, aws:kms, or the KMS key for aws:kms.
        storage_class: of new blobs, such as ``STANDARD_IA``.
        request_timeout_s: limit for one operation with all its attempts. An attempt may take half of this time and
            starts in the first half only, so the limit holds. The credential chain also gets half, but at least 3 s.
        retries: further attempts after a 5xx, a 429 or a broken connection.
        max_connections: concurrent requests; further requests wait.

    Raises:
        ConfigError: a value is invalid. The error names the field.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    ca_bundle: str | None = None
    allow_insecure: bool = False
    sse: str | None = None
    storage_class: str | None = None
    request_timeout_s: float = 10.0
    retries: int = 3
    max_connections: int = 32

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket) or ".." in self.bucket:
            raise ConfigError(
                f"{quoted(self.bucket)} is not a valid bucket name; write 3..255 letters, digits, '.', '-' and '_'",
                field="bucket",
            )
        self._check_prefix()
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url, allow_insecure=self.allow_insecure)
        if self.region is not None:
            check_region(self.region)
        if self.sse is not None and self.kms_key == self.sse and _NO_KMS_KEY.match(self.sse):
            raise ConfigError(
                f"{quoted(self.sse)} is not accepted; write AES256, aws:kms, or a KMS key's ARN or id", field="sse"
            )
        for name in ("sse", "storage_class"):
            value = getattr(self, name)
            if value is not None and not _HEADER_TOKEN.fullmatch(value):
                raise ConfigError(f"{quoted(value)} is not accepted: letters, digits and _:/.@+=,- only", field=name)

    @property
    def encryption(self) -> str | None:
        """The algorithm of ``sse``."""
        return self.sse if self.kms_key is None else "aws:kms"

    @property
    def kms_key(self) -> str | None:
        """The KMS key of ``sse``; None: the bucket's, or none is needed."""
        return None if self.sse in _ALGORITHMS else self.sse

    @property
    def connect_timeout_s(self) -> float:
        """Limit for one connection.

        ``DirectClient`` gives each of the host's n addresses (AWS: 8) 1/n of it; boto3 gives each all of it.
        """
        return min(CONNECT_S_MAX, self.attempt_timeout_s)

    @property
    def attempt_timeout_s(self) -> float:
        """Time limit of a request, including the connection."""
        return self.request_timeout_s / 2

    def object_key(self, key: str) -> str:
        """The object's name in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def _check_prefix(self) -> None:
        if not self.prefix:
            return
        parts = self.prefix.split("/")
        bad = any(part in ("", ".", "..") or re.search(r"[\x00-\x1f\x7f\\]", part) for part in parts)
        if bad or len(self.prefix.encode(errors="replace")) > PREFIX_LENGTH_MAX:
            raise ConfigError(
                f"{quoted(self.prefix)} is not a valid prefix; accepted are folder names joined by single '/', at most "
                f"{PREFIX_LENGTH_MAX} bytes, without a slash at either end",
                field="prefix",
            )


def check_region(region: str) -> None:
    """Refuse a region that boto3 does not accept. boto3 builds host names from regions.

    Raises:
        ConfigError: for the field ``region``.
    """
    if not _REGION.fullmatch(region):
        raise ConfigError(
            f"{quoted(region)} is not accepted by boto3: write 1..63 letters, digits and '-', such as us-east-1",
            field="region",
        )


def without_bucket(url: str, bucket: str) -> tuple[str, bool]:
    """An endpoint without the bucket before its host, and whether it had the bucket there.

    A server that addresses buckets by host name (Alibaba OSS and Tencent COS have no other way) is written with the
    bucket: https://kv.oss-cn-hangzhou.aliyuncs.com. Every other server but AWS is sent the bucket in the path. If
    such a server's own name begins with the bucket's, the bucket is written behind the host: https://kv.example.com/kv.
    """
    scheme, _, rest = url.partition("://")
    host = urlsplit(url).hostname or ""
    is_address = ":" in host or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])
    if is_address or not rest.startswith(f"{bucket}."):
        return url, False
    if (path_style := rest.rstrip("/")).endswith(f"/{bucket}"):
        return f"{scheme}://{path_style.removesuffix(f'/{bucket}')}", False
    return f"{scheme}://{rest.removeprefix(f'{bucket}.')}", True


def check_endpoint(url: str, *, allow_insecure: bool) -> None:
    """Refuse an endpoint that is not a plain URL, holds credentials, or would send blocks unencrypted.

    Raises:
        ConfigError: for the field ``endpoint_url``. The message omits a URL that may hold a password.
    """
    field = "endpoint_url"
    if "@" in url:  # first of all, so that no error shows a password
        raise ConfigError("holds credentials; put them into the environment or ~/.aws/credentials", field=field)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError(f"is not a valid URL: {e}; write https://host or https://host:port", field=field) from None
    plain = url.isprintable() and not (parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not host or not plain:
        shown = url.partition("?")[0]  # a query may be a signature
        raise ConfigError(f"{shown!r} is not accepted: write https://host or https://host:port", field=field)
    if "%" in host:
        raise ConfigError(f"{url!r} is not accepted: write the IPv6 address without its zone (%)", field=field)
    if ":" not in host and not _HOST.fullmatch(host):
        raise ConfigError(
            f"{url!r} is not accepted by boto3: a host name is labels of 1..63 letters, digits and '-', joined by '.'",
            field=field,
        )
    if not _PATH.fullmatch(parts.path):
        raise ConfigError(
            f"{url!r} is not accepted: write a path of names of letters, digits and '._~-', each after one '/'; the "
            "clients encode other characters differently",
            field=field,
        )
    if parts.scheme == "http" and not allow_insecure and not is_loopback(host):
        raise ConfigError(
            f"{url!r} would send blocks and signatures unencrypted; use https, or set allow_insecure: true", field=field
        )


def is_loopback(host: str) -> bool:
    """Whether packets to this host name or address stay on this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
