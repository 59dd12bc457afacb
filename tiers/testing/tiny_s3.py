"""TinyS3: the part of S3 that stores use, as a function from Request to Answer. In memory; ignores signatures.

Supports PUT with ``If-None-Match``, GET with ranges, HEAD, DELETE, batch delete, and ListObjectsV2 (also with a
delimiter), with path-style or virtual-host addresses.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import quote
from xml.sax.saxutils import escape, unescape

PAGE_KEYS = 1000
_QUOTES = {"&quot;": '"', "&apos;": "'"}
#: In the error for a wrong signature, S3 returns the request with its session token. Here, every error contains this.
SECRET_ECHO = "canonical-request-with-x-amz-security-token"


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Header names are in lower case."""

    method: str
    host: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    client_port: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One response. ``is_object``: the body is an object or a range of one."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_object: bool = False


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    mtime: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class TinyS3:
    """Buckets and their objects. Any thread may call; ``_lock`` owns the objects.

    Args:
        buckets: names of the existing buckets.
        region: region of every bucket.
    """

    def __init__(self, *, buckets: Collection[str], region: str) -> None:
        self.buckets = frozenset(buckets)
        self.region = region
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], _Object] = {}

    def get_object(self, bucket: str, key: str) -> bytes | None:
        """Return an object's data without a request; None if it does not exist."""
        with self._lock:
            found = self._objects.get((bucket, key))
        return None if found is None else found.data

    def put_object(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object without a request."""
        with self._lock:
            self._objects[bucket, key] = _Object(data, time.time())

    def remove_objects(self, bucket: str, which: Callable[[str], bool]) -> int:
        """Remove the objects whose keys ``which`` accepts, without a request. Returns their number."""
        with self._lock:
            places = [place for place in self._objects if place[0] == bucket and which(place[1])]
            for place in places:
                del self._objects[place]
        return len(places)

    def answer(self, request: Request) -> Answer:
        """Execute a request."""
        bucket, key = self._place(request)
        if bucket not in self.buckets:
            return error(404, "NoSuchBucket")
        if not key:
            return self._answer_for_bucket(request, bucket)
        if request.method == "PUT":
            return self._put((bucket, key), request)
        if request.method == "DELETE":
            with self._lock:
                self._objects.pop((bucket, key), None)
            return Answer(204)
        if request.method in ("GET", "HEAD"):
            with self._lock:
                found = self._objects.get((bucket, key))
            return error(404, "NoSuchKey") if found is None else _get(found, request.headers.get("range", ""))
        return error(405, "MethodNotAllowed")

    def _place(self, request: Request) -> tuple[str, str]:
        """Parse bucket and key from bucket.host/key or host/bucket/key."""
        path = request.path.removeprefix("/")
        first = request.host.partition(".")[0]
        if first in self.buckets:
            return first, path
        bucket, _, key = path.partition("/")
        return bucket, key

    def _put(self, place: tuple[str, str], request: Request) -> Answer:
        made = _Object(request.body, time.time())
        with self._lock:
            if request.headers.get("if-none-match") == "*" and place in self._objects:
                return error(412, "PreconditionFailed")
            self._objects[place] = made
        return Answer(200, headers={"ETag": made.etag})

    def _answer_for_bucket(self, request: Request, bucket: str) -> Answer:
        region = {"x-amz-bucket-region": self.region}
        if request.method == "HEAD":
            return Answer(200, headers=region)
        if request.method == "POST" and "delete" in request.query:
            keys = [unescape(key, _QUOTES) for key in re.findall(r"<Key>(.*?)</Key>", request.body.decode())]
            with self._lock:
                for key in keys:
                    self._objects.pop((bucket, key), None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return Answer(200, _xml("DeleteResult", deleted))
        if request.method == "GET" and request.query.get("list-type") == "2":
            return Answer(200, self._list(bucket, request.query), region)
        return error(501, "NotImplemented")

    def _list(self, bucket: str, query: Mapping[str, str]) -> bytes:
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        delimiter = query.get("delimiter", "")
        size = min(PAGE_KEYS, int(query.get("max-keys", PAGE_KEYS)))
        with self._lock:
            names = {
                _listed_as(key, prefix, delimiter): blob
                for (place, key), blob in self._objects.items()
                if place == bucket and key.startswith(prefix)
            }
        keys = sorted((key for key in names if key.encode() > after.encode()), key=str.encode)
        page, more = keys[:size], keys[size:]
        encode = quote if query.get("encoding-type") == "url" else escape
        parts = [f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount>"]
        parts.append(f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>")
        if "encoding-type" in query:
            parts.append("<EncodingType>url</EncodingType>")
        if more:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for key in page:
            if delimiter and delimiter in key[len(prefix) :]:
                parts.append(f"<CommonPrefixes><Prefix>{encode(key)}</Prefix></CommonPrefixes>")
                continue
            blob = names[key]
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.mtime))
            parts.append(
                f"<Contents><Key>{encode(key)}</Key><LastModified>{date}</LastModified><ETag>{escape(blob.etag)}</ETag>"
                f"<Size>{len(blob.data)}</Size></Contents>"
            )
        return _xml("ListBucketResult", "".join(parts))


def error(status: int, code: str, **headers: str) -> Answer:
    """Make an S3 error response."""
    content = f"<Code>{code}</Code><Message>no</Message><CanonicalRequest>{SECRET_ECHO}</CanonicalRequest>"
    return Answer(status, _xml("Error", content), {"Content-Type": "application/xml", **headers})


def _listed_as(key: str, prefix: str, delimiter: str) -> str:
    """A key's name in a listing: the whole key, or up to the first delimiter after the prefix."""
    first, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
    return prefix + first + found


def _get(found: _Object, range_: str) -> Answer:
    headers = {"ETag": found.etag, "Last-Modified": formatdate(found.mtime, usegmt=True), "Accept-Ranges": "bytes"}
    span = re.fullmatch(r"bytes=(\d*)-(\d*)", range_)
    if span is None:
        return Answer(200, found.data, headers, is_object=True)
    first, last = span.groups()
    size = len(found.data)
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1 if first and last else size)
    if start >= end:
        return error(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return Answer(206, found.data[start:end], headers, is_object=True)


def _xml(tag: str, content: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{content}</{tag}>'.encode()
