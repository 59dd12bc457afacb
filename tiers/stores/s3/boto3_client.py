"""Boto3Client: S3's data plane on AWS's own client, behind a proxy and for directory buckets.

It gives the same guarantees as ``DirectClient`` at several times the CPU, and copies each block once.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from botocore import exceptions as boto_errors

from ...errors import BlobCorruptError, BlobNotFoundError
from ...store import Look
from ..vectored_io import look_at
from .boto_errors import BOTO_ERRORS, is_from_s3
from .checksums import crc64nvme, sha256
from .errors import missing_header, without_absence
from .put_form import PutForm
from .session import S3Session


class Boto3Client:
    """Data plane on boto3; each method makes one attempt. Any thread may call.

    Keys are the objects' whole names. Methods raise only StoreError.
    """

    def __init__(self, session: S3Session) -> None:
        self._session = session
        self._client = session.client
        self._options = session.options
        self._unsigned = session.make_client(sign_payload=False)
        self._put_arguments: dict[str, Any] = {
            name: value
            for name, value in (
                ("ServerSideEncryption", session.options.encryption),
                ("SSEKMSKeyId", session.options.kms_key),
                ("StorageClass", session.options.storage_class),
            )
            if value is not None
        }

    def put(self, key: str, parts: Sequence[memoryview], *, create: bool, form: PutForm) -> bool:
        """See ``DataPlane``."""
        arguments = dict(self._put_arguments)
        if create:
            arguments["IfNoneMatch"] = "*"
        client = self._client
        if form is PutForm.CHECKED:
            client = self._unsigned
            arguments["ChecksumCRC64NVME"] = crc64nvme(parts)
        elif form is PutForm.SIGNED:
            arguments["ChecksumSHA256"] = base64.b64encode(sha256(parts)).decode()
        try:
            answer = client.put_object(Bucket=self._options.bucket, Key=key, Body=b"".join(parts), **arguments)
        except boto_errors.ClientError as e:
            status = e.response["ResponseMetadata"]["HTTPStatusCode"]
            if not (create and status == HTTPStatus.PRECONDITION_FAILED and is_from_s3(e)):
                raise without_absence(self._session.translate(e), self._session.place) from None
            return False
        except BOTO_ERRORS as e:
            raise self._session.translate(e) from None
        self._raise_unless_object(answer)
        return True

    def get_into(self, key: str, parts: Sequence[memoryview], size: int, look: Look | None = None) -> None:
        """See ``DataPlane``."""
        body = memoryview(self._get(key, size)[1])
        if len(body) < size:
            raise BlobCorruptError(f"{len(body)} bytes are stored, {size} were asked for")
        for part in parts:
            part[:], body = body[: len(part)], body[len(part) :]
        if look is not None:
            look_at(look, 0, parts)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``DataPlane``."""
        try:
            answer, tail = self._get(key, length, Range=f"bytes=-{length}")
        except BlobNotFoundError:
            return None
        size = str(answer.get("ContentRange", len(tail))).rpartition("/")[2]
        if not size.isdecimal():  # "*"
            raise missing_header("Content-Range", self._session.place)
        return int(size), tail

    def size(self, key: str) -> int | None:
        """See ``DataPlane``."""
        try:
            answer = self._ask_about(key, self._client.head_object)
        except BlobNotFoundError:
            return None
        size = answer.get("ContentLength")
        if size is None:  # for example, a proxy compresses responses
            raise missing_header("Content-Length", self._session.place)
        return int(size)

    async def ask_size(self, key: str) -> int | None:  # noqa: ARG002
        """See ``DataPlane``. boto3 always waits."""
        raise BlockingIOError

    def close(self) -> None:
        """Close the client that the session does not own."""
        self._unsigned.close()

    def _ask_about(self, key: str, call: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        try:
            answer = call(Bucket=self._options.bucket, Key=key, **arguments)
        except BOTO_ERRORS as e:
            raise self._session.translate(e) from None
        self._raise_unless_object(answer)
        return answer

    def _get(self, key: str, bytes_max: int, **arguments: Any) -> tuple[Mapping[str, Any], bytes]:
        """The response to a GET and its body."""
        with self._session.http.room_for(bytes_max):
            answer = self._ask_about(key, self._client.get_object, **arguments)
        announced = answer.get("ContentLength")
        if announced is None:
            raise missing_header("Content-Length", self._session.place)
        if announced > bytes_max:
            raise BlobCorruptError(f"{announced} bytes are stored, {bytes_max} were asked for")
        try:
            return answer, answer["Body"].read()
        except BOTO_ERRORS as e:  # the body ended early
            raise self._session.translate(e) from None

    def _raise_unless_object(self, answer: Mapping[str, Any]) -> None:
        """Refuse a web page with status 200 that is not from S3: it would look like an object of another size."""
        if "ETag" not in answer:
            if "Body" in answer:
                answer["Body"].close()
            raise missing_header("ETag", self._session.place)
