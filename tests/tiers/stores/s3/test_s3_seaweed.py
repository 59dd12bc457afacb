"""S3Store on a real S3 server: one that checks signatures and checksums, keeps to conditions, and can go away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kvtiers.tiers.errors import StoreError, StorePermissionError, StoreTimeoutError, StoreUnavailableError
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys, make_data
from kvtiers.tiers.testing.servers import SeaweedServer
from tests.s3_clients import use_credentials
from tests.waiting import wait_for

pytestmark = pytest.mark.full

RACERS = 16
_numbers = count()


@pytest.fixture(autouse=True)
def _credentials(seaweed: SeaweedServer, boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch, seaweed.s3)


@pytest.fixture(scope="module")
def behind(seaweed: SeaweedServer) -> Any:
    """A client of our own. One bucket for all tests, because each takes volumes: tests differ in their prefix."""
    client = seaweed.s3.client()
    client.create_bucket(Bucket="kvtiers")
    return client


@pytest.fixture
def options(seaweed: SeaweedServer, behind: Any, client: str) -> S3Options:
    return S3Options(
        bucket="kvtiers",
        prefix=f"test-{next(_numbers)}",
        endpoint_url=seaweed.s3.endpoint_url,
        request_timeout_s=60.0,
    )


@pytest.fixture
def store(options: S3Options) -> Iterator[S3Store]:
    store = S3Store(options)
    yield store
    store.close()


class TestContract(StoreContract):
    """The whole contract, on a bucket that is new for each test.

    Emptied is not enough: SeaweedFS keeps an emptied folder, in the way of a blob of its name.
    """

    no_fork = "an object is put by one request"

    @pytest.fixture(autouse=True)
    def _use_options(self, options: S3Options, behind: Any) -> Iterator[None]:
        self.options = replace(options, bucket=f"contract-{next(_numbers)}", prefix="")
        self.behind = behind
        behind.create_bucket(Bucket=self.options.bucket)
        yield
        behind.delete_bucket(Bucket=self.options.bucket)  # and gives back its volumes

    def make_store(self) -> S3Store:
        return S3Store(self.options)

    def reopen(self, store: Store) -> S3Store:
        return S3Store(self.options)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self.behind.put_object(Bucket=self.options.bucket, Key=self.options.object_key(key), Body=data)

    def test_key_below_another_blob_is_stored_or_refused_but_never_mixed_up(self, store: Store) -> None:
        pytest.skip(
            "SeaweedFS keeps objects in folders: a put of a/b can make a vanish. Our layout never asks for that"
        )

    def peek(self, store: Store, key: str) -> bytes | None:
        try:
            found = self.behind.get_object(Bucket=self.options.bucket, Key=self.options.object_key(key))
        except self.behind.exceptions.NoSuchKey:
            return None
        data = found["Body"].read()
        assert isinstance(data, bytes)
        return data


def test_wrong_secret_error_names_the_secret(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    store = S3Store(options)
    with pytest.raises(StorePermissionError, match=r"^secret: the secret access key is wrong for this access key id"):
        store.check()
    for call in (lambda: store.put("a", as_parts(b"1")), lambda: fetch(store, "a", 1), lambda: store.size("a")):
        with pytest.raises(StorePermissionError, match=r"^secret: "):
            call()
    store.close()


def test_unknown_key_id_error_names_the_key_id(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    store = S3Store(options)
    with pytest.raises(StorePermissionError, match=r"^secret: .* does not know this access key id"):
        store.check()
    store.close()


def test_put_changed_in_transit_is_refused(store: S3Store) -> None:
    """A proxy flips one bit of the payload: the checksum must give it away."""
    data = make_data(100_000)
    with _flipping_proxy(store.options.endpoint_url or "", data[50_000:50_016]) as url:
        spoiled = S3Store(replace(store.options, endpoint_url=url, retries=0))
        with pytest.raises(StoreError):
            spoiled.put("a", as_parts(data, 4096))
        spoiled.put("b", as_parts(data[:50_000]))  # what the proxy leaves alone arrives
        spoiled.close()
    assert store.size_many(["a", "b"]) == [None, 50_000]


def test_concurrent_puts_of_one_key_have_one_winner(store: S3Store) -> None:
    for round_ in range(3):
        versions = [make_data(70_000, seed) for seed in range(RACERS)]
        barrier = threading.Barrier(RACERS)

        def race(data: bytes, key: str = f"race/{round_}", barrier: threading.Barrier = barrier) -> bytes:
            barrier.wait(120)
            store.put(key, as_parts(data))
            return fetch(store, key, len(data))

        with ThreadPoolExecutor(RACERS) as pool:
            seen = set(pool.map(race, versions))
        assert len(seen) == 1  # whoever came back from put saw the one that won
        assert seen < set(versions)


def test_2500_blobs_are_listed_sized_and_deleted(store: S3Store, behind: Any) -> None:
    expected = {f"m/{i % 7}/{i:05d}": i % 3 for i in range(2500)}

    def plant(item: tuple[str, int]) -> None:
        behind.put_object(Bucket="kvtiers", Key=store.options.object_key(item[0]), Body=bytes(item[1]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(plant, expected.items()))
    assert {info.key: info.size for info in store.keys()} == expected  # noqa: SIM118 - no dict
    assert len(list_keys(store, "m/3/")) == len([key for key in expected if key.startswith("m/3/")])
    asked = [*expected, "m/3/99999", "x"]
    assert store.size_many(asked) == [expected.get(key) for key in asked]
    assert store.delete_many(list(expected)) == [None] * 2500
    assert list_keys(store) == []


def test_virtual_host_endpoint_reaches_the_bucket(
    store: S3Store, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server as its own proxy, so that kvtiers.s3.test need not resolve.
    monkeypatch.setenv("HTTP_PROXY", seaweed.s3.endpoint_url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    url = f"http://{store.options.bucket}.{seaweed.DOMAIN}"
    virtual = S3Store(replace(store.options, endpoint_url=url, allow_insecure=True))
    virtual.put("a", as_parts(b"by host"))
    assert fetch(virtual, "a", 7) == b"by host"
    assert list_keys(virtual) == ["a"]
    virtual.close()
    assert fetch(store, "a", 7) == b"by host"


def test_calls_fail_while_the_server_is_down_and_succeed_after_its_restart(
    store: S3Store, seaweed: SeaweedServer
) -> None:
    data = make_data(1 << 20)
    store.put("a", as_parts(data))
    seaweed.stop()
    try:
        for call in (
            lambda: store.put("b", as_parts(data)),
            lambda: fetch(store, "a", len(data)),
            lambda: store.size("a"),
        ):
            with pytest.raises(StoreUnavailableError):
                call()
    finally:
        seaweed.start()

    def put_again() -> bool:
        try:
            store.put("b", as_parts(data))
        except (StoreUnavailableError, StoreTimeoutError):
            return False
        return True

    wait_for(put_again)
    assert fetch(store, "a", len(data)) == data
    assert fetch(store, "b", len(data)) == data


@contextmanager
def _flipping_proxy(upstream: str, marker: bytes) -> Iterator[str]:
    """A TCP proxy that flips one bit of ``marker`` wherever a client sends it."""
    host, port = upstream.removeprefix("http://").split(":")
    flipped = bytes([marker[0] ^ 1]) + marker[1:]
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket, *, flip: bool) -> None:
        held = b""
        try:
            while chunk := source.recv(1 << 20):
                held += chunk
                if flip:
                    held = held.replace(marker, flipped)
                # What may be the marker's first half waits for the rest, unless it cannot be it.
                keep = next((n for n in range(len(marker) - 1, 0, -1) if flip and held.endswith(marker[:n])), 0)
                target.sendall(held[: len(held) - keep])
                held = held[len(held) - keep :]
        except OSError:
            pass
        finally:
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection((host, int(port)))
            threading.Thread(target=pump, args=(client, server), kwargs={"flip": True}, daemon=True).start()
            threading.Thread(target=pump, args=(server, client), kwargs={"flip": False}, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
