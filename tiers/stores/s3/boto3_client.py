"""Boto3Client: S3's data plane on AWS's own client, behind a proxy and for directory buckets.

It gives the same guarantees as ``DirectClient`` at two to six times the CPU:

- A put joins the parts.
- boto3's timeouts are per socket call, so a server that trickles bytes never triggers them. ``BoundedHttp`` ends late
  requests, and a watchdog in this module ends late bodies.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from botocore import exceptions as boto_errors
from urllib3.exceptions import HTTPError

from ...errors import BlobCorruptError, BlobNotFoundError
from ...store import Look
from ..vectored_io import look_at
from ..watchdog import Watchdog
from .answer import fill
from .boto_errors import BOTO_ERRORS, is_from_s3
from .checksums import crc64nvme, sha256
from .errors import connection_error, deadline_error, missing_header, without_absence
from .put_form import PutForm
from .session import S3Session

# Errors while reading a body from the socket, below botocore.
_BODY_ERRORS = (OSError, HTTPError, HTTPException, ValueError)


class Boto3Client:
    """Data plane on boto3; each method makes one attempt. Any thread may call.

    Only the watchdog has state, under a lock. Keys are the objects' whole names. Methods raise only StoreError.
    """

    def __init__(self, session: S3Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._client = session.client
        self._options = session.options
        self._clock = clock
        self._unsigned = session.make_client(sign_payload=False)
        self._watchdog = Watchdog(session.options.attempt_timeout_s, clock)
        self._put_arguments: dict[str, Any] = {
            name: value
            for name, value in (
                ("ServerSideEncryption", session.options.encryption),
                ("SSEKMSKeyId", session.options.kms_key),
                ("StorageClass", session.options.storage_class),
            )
            if value is not None
        }

    def put(
        self,
        key: str,
        parts: Sequence[memoryview],
        *,
        create: bool,
        form: PutForm,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """See ``DataPlane``."""
        arguments = dict(self._put_arguments)
        if create:
            arguments["IfNoneMatch"] = "*"
        if metadata:
            arguments["Metadata"] = metadata
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
        started = self._clock()
        answer = self._ask_about(key, self._client.get_object)
        self._read_body(answer, parts, size, started)
        if look is not None:
            look_at(look, 0, parts)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``DataPlane``."""
        started = self._clock()
        try:
            answer = self._ask_about(key, self._client.get_object, Range=f"bytes=-{length}")
        except BlobNotFoundError:
            return None
        tail = bytearray(min(length, answer.get("ContentLength", length)))
        self._read_body(answer, [memoryview(tail)] if tail else [], len(tail), started)
        size = str(answer.get("ContentRange", len(tail))).rpartition("/")[2]
        if not size.isdecimal():  # "*"
            raise missing_header("Content-Range", self._session.place)
        return int(size), bytes(tail)

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

    def close(self) -> None:
        """End the watchdog and close the client that the session does not own."""
        self._watchdog.close()
        self._unsigned.close()

    def _ask_about(self, key: str, call: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        try:
            answer = call(Bucket=self._options.bucket, Key=key, **arguments)
        except BOTO_ERRORS as e:
            raise self._session.translate(e) from None
        self._raise_unless_object(answer)
        return answer

    def _read_body(self, answer: Mapping[str, Any], parts: Sequence[memoryview], size: int, started: float) -> None:
        announced = answer.get("ContentLength")
        complete = False
        try:
            with answer["Body"] as raw:
                if announced is not None and announced != size:
                    raise BlobCorruptError(f"{announced} bytes are stored, {size} were asked for")
                if announced is None:
                    raise missing_header("Content-Length", self._session.place)
                with self._watchdog.guard(partial(_shut, raw), started + self._options.attempt_timeout_s):
                    for part in parts:
                        fill(raw, part)
                complete = True
                raw.release_conn()  # otherwise the with statement closes the connection
        except _BODY_ERRORS:
            complete = False
        # Do not trust a late body, even if it is complete: shutting a TLS socket ends decryption first, so encrypted
        # bytes may have been read as plain ones.
        if self._clock() - started >= self._options.attempt_timeout_s:
            raise deadline_error(self._options.attempt_timeout_s, self._session.place)
        if not complete:
            raise connection_error(self._session.place)

    def _raise_unless_object(self, answer: Mapping[str, Any]) -> None:
        """Refuse a web page with status 200 that is not from S3: it would look like an object of another size."""
        if "ETag" not in answer:
            if "Body" in answer:
                answer["Body"].close()
            raise missing_header("ETag", self._session.place)


def _shut(response: Any) -> None:
    try:
        response.shutdown()
    except (OSError, ValueError, RuntimeError):
        pass  # the response completed at this very moment
