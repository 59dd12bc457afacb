"""What bench_s3 lets race: tiers over S3 clients, and two ceilings that know nothing of S3."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.identity import FakeSpec, block_key
from tiers.base import JobMetadata
from tiers.file_mapper import FileMapper, strict_fields
from tiers.seal import TRAILER_BYTES
from tiers.store import Store
from tiers.store_tier import StoreTierManager, TierOptions
from tiers.stores.fsspec import FsspecStore
from tiers.stores.s3 import S3Store
from tiers.stores.s3_options import S3Options
from tiers.testing.servers import STUB_BUCKET, S3Server

THREADS = 8
CEILING = "http"


class Region:
    """Blocks and their keys. Every round stores other keys, because a tier does not store twice."""

    def __init__(self, block_bytes: int, total_bytes: int) -> None:
        self.count = max(2 * THREADS, total_bytes // block_bytes)
        self.block_bytes = block_bytes
        # Filled, so that no page is touched for the first time inside a measurement.
        self.rows = np.random.default_rng(1).integers(0, 256, (self.count, block_bytes), np.uint8).view(np.int8)


class Contender(ABC):
    """A client that moves all blocks of a region: what the driver below measures."""

    name: str

    @abstractmethod
    def put(self, round_: int) -> None:
        """Store every block under the round's keys."""

    @abstractmethod
    def get(self, round_: int) -> None:
        """Load every block of the round."""

    @abstractmethod
    def head(self, index: int) -> None:
        """Ask whether one block of round 0 is there."""

    @abstractmethod
    def remove(self, round_: int) -> None:
        """Delete the round's blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release what the constructor made."""


class TierContender(Contender):
    """A StoreTierManager over a store."""

    def __init__(self, name: str, store: Store, region: Region) -> None:
        self.name = name
        self._store = store
        self._region = region
        spec = FakeSpec()
        # Both kinds of pool threads help each other out, so half of each are THREADS together.
        options = TierOptions(
            n_read_threads=THREADS // 2, n_write_threads=THREADS // 2, job_deadline_s=3600, max_bytes_in_flight=1 << 40
        )
        mapper = FileMapper.from_offloading_spec("", spec, extra_fields=strict_fields(spec))
        self._mapper = mapper
        self._tier = StoreTierManager(spec, region.rows.data, name, store=store, mapper=mapper, options=options)
        self._job_id = 0

    def put(self, round_: int) -> None:
        self._run(self._tier.submit_store, round_)

    def get(self, round_: int) -> None:
        self._run(self._tier.submit_load, round_)

    def head(self, index: int) -> None:
        assert self._store.size(self._name(0, index % self._region.count)) is not None

    def remove(self, round_: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._store.delete, [self._name(round_, i) for i in range(self._region.count)]))

    def close(self) -> None:
        self._tier.shutdown()

    def _name(self, round_: int, index: int) -> str:
        return self._mapper.relative_name(block_key(round_ * self._region.count + index))

    def _run(self, submit: Callable[[JobMetadata], None], round_: int) -> None:
        count = self._region.count
        self._job_id += 1
        keys = [block_key(round_ * count + i) for i in range(count)]
        submit(JobMetadata(self._job_id, keys, np.arange(count, dtype=np.int32)))
        self._tier.drain_jobs()
        (result,) = self._tier.get_finished()
        assert result.success, f"{self.name} failed"


class PlainContender(Contender):
    """Blocks with trailers of zeros, by one connection per thread and no more than a subclass's three methods."""

    def __init__(self, url: str, region: Region) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._region = region
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(THREADS)
        self._trailer = bytes(TRAILER_BYTES)

    @abstractmethod
    def _put(self, path: str, row: memoryview) -> None:
        """Send a block."""

    @abstractmethod
    def _get(self, path: str, row: memoryview) -> None:
        """Receive a block into its row."""

    @abstractmethod
    def _ask(self, method: str, path: str) -> None:
        """A request without bodies."""

    def put(self, round_: int) -> None:
        self._each(lambda i: self._put(self._path(round_, i), self._row(i)))

    def get(self, round_: int) -> None:
        self._each(lambda i: self._get(self._path(round_, i), self._row(i)))

    def head(self, index: int) -> None:
        self._ask("HEAD", self._path(0, index % self._region.count))

    def remove(self, round_: int) -> None:
        self._each(lambda i: self._ask("DELETE", self._path(round_, i)))

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, one: Callable[[int], None]) -> None:
        list(self._pool.map(one, range(self._region.count)))

    def _row(self, index: int) -> memoryview:
        return memoryview(self._region.rows[index]).cast("B")

    def _path(self, round_: int, index: int) -> str:
        return f"/{STUB_BUCKET}/{self.name}/{round_}/{index}"


class HttpContender(PlainContender):
    """http.client, the plain HTTP of Python."""

    name = CEILING

    def _put(self, path: str, row: memoryview) -> None:
        connection = self._connection()
        headers = {"Content-Length": str(len(row) + TRAILER_BYTES)}
        connection.request("PUT", path, body=iter((row, self._trailer)), headers=headers)
        self._end(connection.getresponse())

    def _get(self, path: str, row: memoryview) -> None:
        connection = self._connection()
        connection.request("GET", path)
        response = connection.getresponse()
        while row:
            row = row[response.readinto(row) :]
        self._end(response)

    def _ask(self, method: str, path: str) -> None:
        connection = self._connection()
        connection.request(method, path)
        self._end(connection.getresponse())

    @staticmethod
    def _end(response: http.client.HTTPResponse) -> None:
        assert response.status < 300, response.status
        response.read()

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(*self._address)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class SocketContender(PlainContender):
    """Requests written by hand, answers read no further than needed."""

    name = "socket"

    def _put(self, path: str, row: memoryview) -> None:
        connection = self._connection()
        head = self._head("PUT", path, f"Content-Length: {len(row) + TRAILER_BYTES}\r\n")
        rest = [memoryview(head), row, memoryview(self._trailer)]
        while rest:
            sent = connection.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]
        self._answer(connection, None)

    def _get(self, path: str, row: memoryview) -> None:
        connection = self._connection()
        connection.sendall(self._head("GET", path))
        self._answer(connection, row)

    def _ask(self, method: str, path: str) -> None:
        connection = self._connection()
        connection.sendall(self._head(method, path))
        if method == "HEAD":
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        else:
            self._answer(connection, None)

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = socket.create_connection(self._address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    @staticmethod
    def _head(method: str, path: str, headers: str = "") -> bytes:
        return f"{method} {path} HTTP/1.1\r\nHost: stub\r\n{headers}\r\n".encode()

    @staticmethod
    def _answer(connection: socket.socket, into: memoryview | None) -> None:
        """Read one answer; its body into ``into``, the trailer elsewhere."""
        start = connection.recv(1 << 16)
        while (end := start.find(b"\r\n\r\n")) < 0:
            start += connection.recv(1 << 16)
        assert start.startswith(b"HTTP/1.1 2"), start[:100]
        body = start[end + 4 :]
        if into is None:
            announced = re.search(rb"\r\nContent-Length: *(\d+)", start[:end])
            while len(body) < (int(announced[1]) if announced else 0):
                body += connection.recv(1 << 16)
            return
        into[: len(body)] = body[: len(into)]
        into = into[len(body) :]
        while into:
            into = into[connection.recv_into(into) :]
        left = TRAILER_BYTES
        while left:
            left -= len(connection.recv(left))


def make_contender(name: str, reached: S3Server, region: Region) -> Contender:
    for plain in (HttpContender, SocketContender):
        if name == plain.name:
            return plain(reached.endpoint_url, region)
    if name == "s3fs":
        access = {"key": reached.access_key, "secret": reached.secret_key, "endpoint_url": reached.endpoint_url}
        return TierContender(name, FsspecStore(f"s3://{STUB_BUCKET}/{name}", access), region)
    client: Any = name
    options = S3Options(
        bucket=STUB_BUCKET,
        prefix=name,  # a folder of its own, or one client would find the blocks of another
        endpoint_url=reached.endpoint_url,
        client=client,
        request_timeout_s=60,
        max_connections=THREADS,
    )
    return TierContender(name, S3Store(options), region)
