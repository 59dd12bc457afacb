"""S3Options: all settings of an S3 store, without secrets. This module imports no client library."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from ...errors import ConfigError, quoted

AddressingStyle = Literal["auto", "path", "virtual"]
Checksum = Literal["crc64nvme", "crc32c", "sha256", "none"]
Client = Literal["obstore", "boto3"]
Encryption = Literal["AES256", "aws:kms"]

# All names that S3 or a compatible server accepts, without any that would change the URL's meaning.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
# Host names that boto3 accepts (botocore.utils.is_valid_endpoint_url), except IPv6 addresses.
_HOST = re.compile(
    r"(?=.{1,255}\Z)((?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)[a-z0-9-]{1,63}(?<!-)\.?", re.IGNORECASE | re.ASCII
)
# Paths that boto3, obstore and DirectReader all send unchanged.
_PATH = re.compile(r"(/(?!\.\.?(/|\Z))[A-Za-z0-9._~-]+)*/?")
# A host whose last label is such a number is an IPv4 address or invalid (WHATWG, "ends in a number").
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE | re.ASCII)
# Same rule as botocore.utils.validate_region_name.
_REGION = re.compile(r"(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_HEADER_TOKEN = re.compile(r"[A-Za-z0-9_:/.@+=,-]{1,512}")

_CHOICES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("addressing_style", get_args(AddressingStyle)),
    ("sse", (None, *get_args(Encryption))),
    ("checksum", get_args(Checksum)),
    ("client", get_args(Client)),
)

DIRECTORY_BUCKET_SUFFIX = "--x-s3"  # AWS reserves it for directory buckets
PREFIX_LENGTH_MAX = 512  # bytes; leaves 511 of S3's 1,024 for the key
TIMEOUT_S_MAX = 3600
RETRIES_MAX = 20
CONNECTIONS_MAX = 1024
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
        bucket: must exist. Directory buckets (S3 Express, ``…--x-s3``) need ``client: boto3``.
        prefix: folder inside the bucket; "" is the bucket's root.
        endpoint_url: of a server other than AWS; None: boto3's chain (``AWS_ENDPOINT_URL``, profile), otherwise AWS.
        region: None: boto3's chain, otherwise us-east-1.
        addressing_style: ``path`` is endpoint/bucket/key, ``virtual`` is bucket.endpoint/key. ``auto`` is path, but
            virtual on AWS unless the bucket's name has dots (no wildcard certificate covers such a name).
        profile: name of a profile in ~/.aws/config.
        role_arn: role to assume through STS with the credentials that the chain finds.
        ca_bundle: PEM file of certificate authorities to trust in addition to the system's.
        verify: False accepts any certificate; only for a short test.
        allow_insecure: allow http to hosts other than this one.
        sse, sse_kms_key_id: server-side encryption of new blobs.
        storage_class: of new blobs, such as ``STANDARD_IA``.
        checksum: sent with each put for the server to verify. ``none`` signs the payload's SHA-256 instead, which every
            server accepts and AWS and MinIO verify. It is the most expensive setting: a put of 1 MiB takes 2.1 ms of
            CPU instead of 1.1 ms. If the server refuses the checksum or unsigned payloads, payloads are signed; if
            the server requires a checksum, SHA-256 is sent. ``crc32c`` needs ``client: boto3``.
        request_timeout_s: limit for one operation with all its attempts. An attempt may take half of this time and
            starts in the first half only, so the limit holds. The credential chain also gets half, but at least 3 s.
        connect_timeout_s: limit for one connection. obstore and ``DirectReader`` give each of the host's n addresses
            (AWS: 8) 1/n of this time; boto3 gives each address all of it.
        retries: further attempts after a 5xx, a 429 or a broken connection.
        max_connections: concurrent requests; further requests wait.
        client: ``obstore`` (Rust), or ``boto3`` where only AWS's own client is permitted. A proxy always gets boto3.

    Raises:
        ConfigError: a value is invalid. The error names the field.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: AddressingStyle = "auto"
    profile: str | None = None
    role_arn: str | None = None
    ca_bundle: str | None = None
    verify: bool = True
    allow_insecure: bool = False
    sse: Encryption | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None
    checksum: Checksum = "crc64nvme"
    request_timeout_s: float = 10.0
    connect_timeout_s: float = 2.0
    retries: int = 3
    max_connections: int = 32
    client: Client = "obstore"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES:
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{getattr(self, name)!r} is not accepted: write one of {', '.join(filter(None, choices))}",
                    field=name,
                )
        if not _BUCKET.fullmatch(self.bucket) or ".." in self.bucket:
            raise ConfigError(
                f"{quoted(self.bucket)} is not a valid bucket name; write 3..255 letters, digits, '.', '-' and '_'",
                field="bucket",
            )
        if self.bucket.endswith(DIRECTORY_BUCKET_SUFFIX) and self.client == "obstore":
            raise ConfigError(
                f"{self.bucket!r} is a directory bucket, which has endpoints of its own; set client: boto3",
                field="bucket",
            )
        self._check_prefix()
        if self.endpoint_url is not None:
            check_endpoint(
                self.endpoint_url, allow_insecure=self.allow_insecure, virtual=self.addressing_style == "virtual"
            )
        if self.region is not None:
            check_region(self.region)
        for name in ("role_arn", "sse_kms_key_id", "storage_class"):
            value = getattr(self, name)
            if value is not None and not _HEADER_TOKEN.fullmatch(value):
                raise ConfigError(f"{quoted(value)} is not accepted: letters, digits and _:/.@+=,- only", field=name)
        if self.sse_kms_key_id is not None and self.sse != "aws:kms":
            raise ConfigError(f"needs sse: aws:kms, sse is {self.sse!r}", field="sse_kms_key_id")
        if self.checksum == "crc32c" and self.client == "obstore":
            raise ConfigError(
                "obstore can send crc64nvme, sha256 or none; for crc32c set client: boto3", field="checksum"
            )
        for name, limit in (("request_timeout_s", TIMEOUT_S_MAX), ("connect_timeout_s", TIMEOUT_S_MAX)):
            if not 0 < getattr(self, name) <= limit:
                raise ConfigError(f"{getattr(self, name)} is not in 0..{limit:g} seconds", field=name)
        if not 0 <= self.retries <= RETRIES_MAX:
            raise ConfigError(f"{self.retries} is not in 0..{RETRIES_MAX}", field="retries")
        if not 1 <= self.max_connections <= CONNECTIONS_MAX:
            raise ConfigError(f"{self.max_connections} is not in 1..{CONNECTIONS_MAX}", field="max_connections")

    @property
    def attempt_timeout_s(self) -> float:
        """How long one request may take, connecting included."""
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


def check_endpoint(url: str, *, allow_insecure: bool, virtual: bool) -> None:
    """Refuse an endpoint that is not a plain URL, holds credentials, or would send blocks unencrypted.

    Args:
        virtual: buckets are addressed as bucket.endpoint, so the endpoint cannot be an IP address.

    Raises:
        ConfigError: for the field ``endpoint_url`` or ``addressing_style``. The message omits a URL that may hold a
            password.
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
    if virtual and (":" in host or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])):
        raise ConfigError(
            f"'virtual' puts the bucket before the host name, but {host} is an IP address; write path",
            field="addressing_style",
        )
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
