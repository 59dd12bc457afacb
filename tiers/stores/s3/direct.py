"""DirectClient: S3's data plane on plain sockets, without a proxy.

Blocks move between the slot and the socket without a copy in between: a put sends the parts where they are, in one
vectored call, and a get receives into them. Other clients hand over new bytes objects.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, TypeVar
from urllib.parse import quote, urlsplit

from ...errors import BlobCorruptError, BlobNotFoundError, StoreError, StoreUnavailableError
from ...store import Look, parts_size
from ..vectored_io import look_at, runs
from .answer import Answer
from .checksums import crc64nvme, sha256
from .connections import USUAL_PORTS, Connections
from .errors import NO_S3, missing_header, server_error, without_absence
from .put_form import CHECKSUM, PutForm
from .session import S3Session
from .signer import EMPTY, UNSIGNED, Signer

T = TypeVar("T")

ERROR_BYTES_MAX: Final = 64 << 10
PIECE_BYTES: Final = 512 << 10  # size of the pieces that ``look`` sees

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


class DirectClient:
    """Data plane on sockets; each method makes one attempt. Any thread may call.

    It follows no redirect. Keys are the objects' whole names. Methods raise only StoreError.
    """

    def __init__(self, session: S3Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        options = session.options
        parts = urlsplit(session.endpoint_url)
        subdomain, folder = (f"{options.bucket}.", "") if session.virtual_host else ("", f"/{options.bucket}")
        self._folder = f"{parts.path.rstrip('/')}{folder}/"
        name = subdomain + (parts.hostname or "")
        port = parts.port or USUAL_PORTS[parts.scheme]
        self._connections = Connections(session, name, port, is_tls=parts.scheme == "https", clock=clock)
        # The same header as boto3 sends: a proxy may rewrite it, and the signature covers it.
        host = f"[{name}]" if ":" in name else name
        self._signer = Signer(host if port == USUAL_PORTS[parts.scheme] else f"{host}:{port}", session.region)
        self._put_headers = {
            name: value
            for name, value in (
                ("x-amz-server-side-encryption", options.encryption),
                ("x-amz-server-side-encryption-aws-kms-key-id", options.kms_key),
                ("x-amz-storage-class", options.storage_class),
            )
            if value is not None
        }

    def put(self, key: str, parts: Sequence[memoryview], *, create: bool, form: PutForm) -> bool:
        """See ``DataPlane``."""
        headers = dict(self._put_headers)
        if create:
            headers["if-none-match"] = "*"
        payload = UNSIGNED
        if form is PutForm.CHECKED:
            headers[f"x-amz-checksum-{CHECKSUM}"] = crc64nvme(parts)
        else:
            digest = sha256(parts)
            payload = digest.hex()
            if form is PutForm.SIGNED:
                headers["x-amz-checksum-sha256"] = base64.b64encode(digest).decode()

        def receive(answer: Answer) -> bool:
            if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                error = self._error(answer)
                if create and answer.status == HTTPStatus.PRECONDITION_FAILED:
                    return False
                raise without_absence(error, self._session.place)
            if not answer.header("etag"):
                raise missing_header("ETag", self._session.place)
            answer.read(ERROR_BYTES_MAX)
            return True

        head = self._head("PUT", key, headers, payload=payload, size=parts_size(parts))
        return self._connections.exchange("PUT", head, receive, body=parts)

    def get_into(self, key: str, parts: Sequence[memoryview], size: int, look: Look | None = None) -> None:
        """See ``DataPlane``."""

        def receive(answer: Answer) -> None:
            self._raise_unless(HTTPStatus.OK, answer)
            if answer.announced is None:
                raise missing_header("Content-Length", self._session.place)
            if answer.announced != size:
                self._raise_without_etag(answer)
                raise BlobCorruptError(f"{answer.announced} bytes are stored, {size} were asked for")
            for offset, run in [(0, parts)] if look is None else runs(parts, PIECE_BYTES):
                answer.fill(run)
                if look is not None:
                    look_at(look, offset, run)

        self._connections.exchange("GET", self._head("GET", key, {}), receive)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        """See ``DataPlane``."""

        def receive(answer: Answer) -> tuple[int, bytes]:
            if answer.status == HTTPStatus.OK:
                self._raise_without_etag(answer)
                raise BlobCorruptError("the server ignores ranges")
            self._raise_unless(HTTPStatus.PARTIAL_CONTENT, answer)
            self._raise_without_etag(answer)
            found = _RANGE.fullmatch(answer.header("content-range"))
            if found is None:
                raise missing_header("Content-Range", self._session.place)
            first, last, size = map(int, found.groups())
            tail = bytearray(min(size, length))
            if (first, last) != (size - len(tail), size - 1) or answer.announced not in (None, len(tail)):
                raise BlobCorruptError("the server sent another range than was asked for")
            answer.fill([memoryview(tail)])
            return size, bytes(tail)

        try:
            head = self._head("GET", key, {"range": f"bytes=-{length}"})
            return self._connections.exchange("GET", head, receive)
        except BlobNotFoundError:
            return None

    def size(self, key: str) -> int | None:
        """See ``DataPlane``."""
        return self._connections.exchange("HEAD", self._head("HEAD", key, {}), self._receive_size)

    async def ask_size(self, key: str) -> int | None:
        """See ``DataPlane``."""
        return await self._connections.ask("HEAD", self._head("HEAD", key, {}), self._receive_size)

    def close(self) -> None:
        """Close idle connections and end the watchdog."""
        self._connections.close()

    def _head(
        self, method: str, key: str, headers: Mapping[str, str], *, payload: str = EMPTY, size: int | None = None
    ) -> bytes:
        """The signed head of a request. See ``Signer.head``."""
        path = self._folder + quote(key, safe="/-._~")
        return self._signer.head(method, path, self._session.credentials(), headers, payload=payload, size=size)

    def _receive_size(self, answer: Answer) -> int | None:
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        self._raise_unless(HTTPStatus.OK, answer)
        if answer.announced is None:  # for example, a proxy compresses responses
            raise missing_header("Content-Length", self._session.place)
        self._raise_without_etag(answer)
        return answer.announced

    def _error(self, answer: Answer) -> StoreError:
        """Our exception for a response that is an error or a redirect."""
        found = _CODE.search(answer.read(ERROR_BYTES_MAX))
        code = found[1].decode() if found else ""
        location = answer.header("location")
        if not code and answer.status < HTTPStatus.BAD_REQUEST and answer.header("x-amz-bucket-region"):
            code = "PermanentRedirect"  # a HEAD's, without a body
        return server_error(answer.status, code, place=self._session.place, location=location)

    def _raise_unless(self, status: HTTPStatus, answer: Answer) -> None:
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise self._error(answer)
        if answer.status != status:
            raise StoreUnavailableError(f"{NO_S3.format(self._session.endpoint_url)} (HTTP {answer.status})")

    def _raise_without_etag(self, answer: Answer) -> None:
        """Refuse a web page with status 200 that is not from S3: it would look like an object of another size."""
        if not answer.header("etag"):
            raise missing_header("ETag", self._session.place)
