"""Checksums of a blob's parts. CRC-64/NVME comes from awscrt, as in botocore itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from awscrt import checksums


def crc64nvme(parts: Sequence[memoryview]) -> str:
    """The payload's CRC-64/NVME, as S3's header has it."""
    value = 0
    for part in parts:
        value = checksums.crc64nvme(part, value)
    return base64.b64encode(value.to_bytes(8, "big")).decode()


def sha256(parts: Sequence[memoryview]) -> bytes:
    """The payload's SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
