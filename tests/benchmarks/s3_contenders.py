"""What bench_s3 lets race: tiers over S3 clients, NIXL, and two ceilings that know nothing of S3."""

from __future__ import annotations

import http.client
import importlib
import os
import re
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.file_mapper import FileMapper, strict_fields
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.frames import Seats
from kvtiers.tiers.recipe import StoreRecipe
from kvtiers.tiers.server.mapped_file import MappedRegion
from kvtiers.tiers.server.process import ProcessBackend
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.fsspec import FsspecStore
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.servers import STUB_BUCKET, S3Server
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec, block_key
from tests.tiers.server.in_threads import in_threads

THREADS = 8
CEILING = "http"
LOOK_S = 0.0005  # between looks for answers
HEADS_AT_ONCE = 128  # a prompt's blocks; a real server may answer them with a LIST, where the folder is not too full


class Region:
    """Blocks and their keys. Every round stores other keys, because a tier does not store twice.

    Args:
        job_blocks: a tier gets the blocks in jobs of so many, all submitted at once; None: in one job.
    """

    def __init__(self, block_bytes: int, total_bytes: int, job_blocks: int | None = None) -> None:
        self.count = max(2 * THREADS, total_bytes // block_bytes)
        self.job_blocks = job_blocks or self.count
        self.block_bytes = block_bytes
        self.view = SharedOffloadRegion.anonymous(self.count, block_bytes).create_kv_memoryview()
        self.rows = np.asarray(self.view)
        # Filled, so that no page is touched for the first time inside a measurement.
        self.rows[:] = np.random.default_rng(1).integers(-128, 128, self.rows.shape, np.int8)


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
    def heads(self, count: int) -> None:
        """Ask so often whether a block of round 0 is there, THREADS at a time."""

    def cpu_s(self) -> float:
        """CPU seconds so far, of all that runs on the client's side."""
        return time.process_time()

    @abstractmethod
    def remove(self, round_: int) -> None:
        """Delete the round's blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release what the constructor made."""


class TierContender(Contender):
    """A StoreTierManager over a store.

    Args:
        in_processes: as the built-in tier runs it, in two processes with THREADS threads that move blocks each way.
    """

    def __init__(
        self, name: str, recipe: tuple[type[Store], dict[str, Any]], region: Region, *, in_processes: bool
    ) -> None:
        self.name = name
        self._region = region
        store_class, arguments = recipe
        self._store = store_class(**arguments)
        spec = FakeSpec()
        options = TierOptions(
            job_deadline_s=3600,
            max_bytes_in_flight=1 << 40,
            lookup=LookupOptions(deadline_s=60.0, total_s=120.0),
        )
        self._mapper = FileMapper.from_offloading_spec("", spec, extra_fields=strict_fields(spec))
        make_tier = partial(StoreTierManager, spec, region.view, name, mapper=self._mapper, options=options)
        if in_processes:
            recipe_, mapped = StoreRecipe.of(store_class, **arguments), MappedRegion(region.view)
            seats = [Seats(1, 0, THREADS // 2, 0), Seats(1, 0, 0, THREADS // 2)]
            self._tier = make_tier(
                make_backend=lambda work, rows: ProcessBackend(recipe_, mapped, rows.row_bytes, work, seats, None)
            )
        else:
            # Both kinds of threads help each other out, so half of each are THREADS together.
            half = THREADS // 2
            self._tier = make_tier(make_backend=in_threads(self._store, n_read_threads=half, n_write_threads=half))
        self._job_id = 0

    def put(self, round_: int) -> None:
        self._run(self._tier.submit_store, round_)

    def get(self, round_: int) -> None:
        self._run(self._tier.submit_load, round_)

    def heads(self, count: int) -> None:
        for start in range(0, count, HEADS_AT_ONCE):
            places = [place % self._region.count for place in range(start, min(start + HEADS_AT_ONCE, count))]
            if self._tier.store is None:
                assert all(self._look_up([block_key(place) for place in places]))
            else:  # as a tier's lookups come
                sizes = self._tier.store.size_many([self._name(0, place) for place in places])
                assert all(isinstance(size, int) for size in sizes)

    def _look_up(self, keys: list[OffloadKey]) -> list[bool | None]:
        self._tier._lookup.forget(keys)
        while None in (found := [self._tier.lookup(key) for key in keys]):
            self._tier.on_schedule_end()
            time.sleep(LOOK_S)
        return found

    def cpu_s(self) -> float:
        return super().cpu_s() + sum(map(_cpu_s, self._tier._channel.pids))

    def prepare(self) -> None:
        """Make the store's clients."""
        self._store.prepare()

    def remove(self, round_: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._store.delete, [self._name(round_, i) for i in range(self._region.count)]))

    def close(self) -> None:
        self._tier.shutdown()
        self._store.close()

    def _name(self, round_: int, index: int) -> str:
        return self._mapper.relative_name(block_key(round_ * self._region.count + index))

    def _run(self, submit: Callable[[JobMetadata], None], round_: int) -> None:
        count, job_blocks = self._region.count, self._region.job_blocks
        for start in range(0, count, job_blocks):
            blocks = range(start, min(start + job_blocks, count))
            self._job_id += 1
            keys = [block_key(round_ * count + block) for block in blocks]
            submit(JobMetadata(self._job_id, keys, np.array(blocks, dtype=np.int32)))
        self._tier.drain_jobs()
        assert all(result.success for result in self._tier.get_finished()), f"{self.name} failed"


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class NixlContender(Contender):
    """NIXL's OBJ plugin, as vLLM's obj tier drives it: neither sealed nor verified."""

    name = "nixl"

    def __init__(self, reached: S3Server, region: Region) -> None:
        nixl = importlib.import_module("nixl._api")
        self._region = region
        self._client = reached.client()
        scheme, _, host = reached.endpoint_url.partition("://")
        self._agent = nixl.nixl_agent("bench", nixl.nixl_agent_config(backends=[]))
        options = {"bucket": STUB_BUCKET, "endpoint_override": host, "scheme": scheme, "num_threads": str(THREADS)}
        self._agent.create_backend("OBJ", options)
        address = region.rows.ctypes.data
        rows = [(address + i * region.block_bytes, region.block_bytes, 0) for i in range(region.count)]
        self._memory = self._agent.register_memory([(address, region.rows.nbytes, 0, "")], "DRAM")
        self._rows = self._agent.get_xfer_descs(rows, "DRAM")
        self._device = 1

    def put(self, round_: int) -> None:
        self._move("WRITE", round_)

    def get(self, round_: int) -> None:
        self._move("READ", round_)

    def heads(self, count: int) -> None:
        asked = [(0, 1, 0, self._name(0, index % self._region.count)) for index in range(count)]
        assert all(found is not None for found in self._agent.query_memory(asked, "OBJ", "OBJ"))

    def remove(self, round_: int) -> None:
        for start in range(0, self._region.count, 1000):
            names = range(start, min(start + 1000, self._region.count))
            keys = [{"Key": self._name(round_, index)} for index in names]
            self._client.delete_objects(Bucket=STUB_BUCKET, Delete={"Objects": keys})

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)

    def _name(self, round_: int, index: int) -> str:
        return f"nixl/{round_}/{index}"

    def _move(self, way: str, round_: int) -> None:
        count, size = self._region.count, self._region.block_bytes
        files = [(0, size, self._device + index, self._name(round_, index)) for index in range(count)]
        self._device += count
        registered = self._agent.register_memory(files, "OBJ")
        transfer = self._agent.initialize_xfer(way, self._rows, registered.trim(), "bench")
        state = self._agent.transfer(transfer)
        while state == "PROC":
            time.sleep(0.0005)
            state = self._agent.check_xfer_state(transfer)
        assert state == "DONE", state
        self._agent.release_xfer_handle(transfer)
        self._agent.deregister_memory(registered)


class PlainContender(Contender):
    """Blocks with trailers of zeros, by one connection per thread and no more than a subclass's three methods."""

    def __init__(self, url: str, region: Region) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._region = region
        self._tls = ssl.create_default_context(cafile=os.environ["AWS_CA_BUNDLE"]) if parts.scheme == "https" else None
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

    def heads(self, count: int) -> None:
        list(self._pool.map(lambda i: self._ask("HEAD", self._path(0, i % self._region.count)), range(count)))

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
            if self._tls is None:
                connection = http.client.HTTPConnection(*self._address)
            else:
                connection = http.client.HTTPSConnection(*self._address, context=self._tls)
            self._local.connection = connection
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


class BareObstoreContender(Contender):
    """obstore alone, on as many threads: nothing is sealed, checksummed or verified."""

    name = "bare obstore"

    def __init__(self, reached: S3Server, region: Region) -> None:
        self._reached = reached
        self._obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
        config = {
            "region": "us-east-1",
            "endpoint": reached.endpoint_url,
            "access_key_id": reached.access_key,
            "secret_access_key": reached.secret_key,
            "virtual_hosted_style_request": False,
            "unsigned_payload": True,
        }
        client: dict[str, Any] = {"allow_http": True, "pool_max_idle_per_host": str(THREADS)}
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = Path(bundle).read_bytes()
        self._client = stores.S3Store(STUB_BUCKET, config=config, client_options=client)
        self._region = region
        self._pool = ThreadPoolExecutor(THREADS)

    def put(self, round_: int) -> None:
        self._each(lambda i: self._put(i, round_))

    def _put(self, index: int, round_: int) -> None:
        name = self._name(round_, index)
        self._obstore.put(self._client, name, [self._row(index)], use_multipart=False)

    def get(self, round_: int) -> None:
        def get(index: int) -> None:
            row, filled = self._row(index), 0
            for chunk in self._obstore.get(self._client, self._name(round_, index)).stream(min_chunk_size=256 << 10):
                row[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

        self._each(get)

    def heads(self, count: int) -> None:
        names = [self._name(0, index % self._region.count) for index in range(count)]
        list(self._pool.map(lambda name: self._obstore.head(self._client, name), names))

    def remove(self, round_: int) -> None:
        client = self._reached.client()  # obstore deletes by DeleteObjects, which nginx has not
        self._each(lambda i: client.delete_object(Bucket=STUB_BUCKET, Key=self._name(round_, i)))

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, one: Callable[[int], None]) -> None:
        list(self._pool.map(one, range(self._region.count)))

    def _row(self, index: int) -> memoryview:
        return memoryview(self._region.rows[index]).cast("B")

    def _name(self, round_: int, index: int) -> str:
        return f"bare/{round_}/{index}"


def make_contender(name: str, reached: S3Server, region: Region) -> Contender:
    """A contender by its name; "kvtiers, threads" is in this process."""
    for plain in (HttpContender, SocketContender):
        if name == plain.name:
            return plain(reached.endpoint_url, region)
    if name == NixlContender.name:
        return NixlContender(reached, region)
    if name == BareObstoreContender.name:
        return BareObstoreContender(reached, region)
    if name == "s3fs":
        access = {"key": reached.access_key, "secret": reached.secret_key, "endpoint_url": reached.endpoint_url}
        where = {"url": f"s3://{STUB_BUCKET}/{name}", "storage_options": access}
        return TierContender(name, (FsspecStore, where), region, in_processes=False)
    options = S3Options(
        bucket=STUB_BUCKET,
        prefix=name.replace(", ", "-"),  # a folder of its own, or one client would find the blocks of another
        endpoint_url=reached.endpoint_url,
        request_timeout_s=60,
        max_connections=THREADS,
    )
    with mock.patch("kvtiers.tiers.stores.s3.clients.needs_boto3", return_value=name == "boto3"):
        made = TierContender(name, (S3Store, {"options": options}), region, in_processes=name == "kvtiers")
        made.prepare()
    return made
