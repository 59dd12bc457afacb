"""S3Store on moto's server: the contract with both clients, and what only an object store does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from kvtiers.tiers.errors import InvalidKeyError, StoreConfigError
from kvtiers.tiers.store import Store, SupportsTail
from kvtiers.tiers.stores.s3.options import S3Options
from kvtiers.tiers.stores.s3.store import S3Store
from kvtiers.tiers.testing.contract import StoreContract, as_parts, fetch, list_keys
from kvtiers.tiers.testing.faults import fork
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.testing.servers import S3Server
from tests.s3_clients import use_client, use_credentials

_bucket_numbers = count()


@pytest.fixture(autouse=True)
def _credentials(moto: S3Server, boto_models_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch, moto)


def backend() -> Any:
    """The memory of moto's server."""
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


@pytest.fixture
def options(moto: S3Server) -> S3Options:
    """Of a fresh bucket."""
    bucket = f"bucket-{next(_bucket_numbers)}"
    backend().create_bucket(bucket, "us-east-1")
    return S3Options(bucket=bucket, endpoint_url=moto.endpoint_url, request_timeout_s=120.0)


@pytest.fixture
def store(options: S3Options, client: str) -> Iterator[S3Store]:
    store = S3Store(options)
    yield store
    store.close()


def test_concurrent_creates_of_one_object_have_one_winner(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is on S3; moto looks and stores in two steps, between which ``moto_server`` lets nobody else look."""
    looked = threading.Barrier(2)
    look = type(backend()).get_object

    def look_together(*arguments: Any, **options: Any) -> Any:
        found = look(*arguments, **options)
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.5)
        return found

    monkeypatch.setattr(type(backend()), "get_object", look_together)
    with ThreadPoolExecutor(2) as threads:
        published = list(threads.map(lambda data: store.put("a", as_parts(data)), [b"1", b"2"]))
    assert sorted(published) == [False, True]


class S3Contract(StoreContract):
    """The contract, with moto's own memory behind the store's back."""

    no_fork = "the server is this process; an object is put by one request"

    @pytest.fixture(autouse=True)
    def _use_options(self, options: S3Options) -> None:
        self.options = options

    def reopen(self, store: Store) -> S3Store:
        assert isinstance(store, S3Store)
        return S3Store(store.options)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        backend().put_object(self.options.bucket, key, data)

    def peek(self, store: Store, key: str) -> bytes | None:
        found = backend().get_object(self.options.bucket, key)
        return None if found is None else bytes(found.value)


class TestDirectS3Store(S3Contract):
    def make_store(self) -> S3Store:
        return S3Store(self.options)

    # A thousand HEADs: 3 s of CPU.
    test_size_many_of_more_keys_than_a_request_takes = pytest.mark.full(
        StoreContract.test_size_many_of_more_keys_than_a_request_takes
    )


class TestBoto3S3Store(StoreContract):
    """On the small server, which takes less CPU than moto."""

    no_fork = S3Contract.no_fork
    test_size_many_of_more_keys_than_a_request_takes = (
        TestDirectS3Store.test_size_many_of_more_keys_than_a_request_takes
    )

    @pytest.fixture(autouse=True)
    def _use_server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        use_credentials(monkeypatch)
        use_client(monkeypatch, "boto3")
        with HttpFaultServer() as self.server:
            yield

    def make_store(self) -> S3Store:
        return S3Store(S3Options(bucket="bucket", endpoint_url=self.server.endpoint_url, request_timeout_s=120.0))

    def reopen(self, store: Store) -> S3Store:
        return self.make_store()

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self.server.put_object("bucket", key, data)

    def peek(self, store: Store, key: str) -> bytes | None:
        return self.server.get_object("bucket", key)


def test_s3_store_supports_tails_and_its_repr_names_the_bucket(store: S3Store) -> None:
    assert isinstance(store, SupportsTail)
    assert repr(store).startswith(f"S3Store('{store.options.bucket}'")


def test_store_with_a_prefix_sees_only_objects_below_the_prefix(options: S3Options) -> None:
    inner = S3Store(replace(options, prefix="team/kv"))
    outer = S3Store(options)
    inner.put("f/a", as_parts(b"inner"))
    outer.put("f/a", as_parts(b"the other"))
    outer.put("team/kv-not", as_parts(b"near by"))
    assert fetch(outer, "team/kv/f/a", 5) == b"inner"
    assert list_keys(inner) == ["f/a"]
    assert list_keys(inner, "f/") == ["f/a"]
    assert inner.get_tail("f/a", 2) == (5, b"er")
    assert inner.size_many(["f/a", "kv-not"]) == [5, None]
    assert inner.delete_many(["f/a", "kv-not"]) == [None, None]
    assert list_keys(outer) == ["f/a", "team/kv-not"]
    inner.close()
    outer.close()


def test_key_that_is_too_long_with_the_prefix_is_refused(options: S3Options) -> None:
    store = S3Store(replace(options, prefix="p" * 100))
    longest = "/".join(["d" * 203] * 4) + "/" + "n" * 208
    with pytest.raises(InvalidKeyError, match="with its prefix"):
        store.size(longest)
    assert isinstance(store.size_many([longest])[0], InvalidKeyError)
    store.close()


def test_objects_with_names_that_are_not_keys_are_not_listed(store: S3Store) -> None:
    for name in ("f/", "a//b", "a/./b", "f/.hidden", "line\nbreak"):
        backend().put_object(store.options.bucket, name, b"")
    store.put("f/a", as_parts(b"1"))
    assert list_keys(store) == ["f/a"]


class TestSizeMany:
    def test_size_many_returns_sizes_and_none_for_absent_keys(self, store: S3Store) -> None:
        stored = {f"m/{i:05d}.bin": i % 3 for i in range(0, 39, 3)}
        for key, size in stored.items():
            backend().put_object(store.options.bucket, key, bytes(size))
        asked = [f"m/{i:05d}.bin" for i in range(39)]
        assert store.size_many(asked) == [stored.get(key) for key in asked]

    def test_size_many_asks_for_keys_concurrently(self, store: S3Store) -> None:
        client: Any = store._attempts.current().get().data
        size = client.size
        all_ask = threading.Barrier(4)

        def ask_together(name: str) -> object:
            all_ask.wait(120)
            return size(name)

        client.size = ask_together
        assert store.size_many([f"k{i}" for i in range(4)]) == [None] * 4


def test_versions_are_kept_unless_a_rule_removes_them_below_the_prefix(moto: S3Server, options: S3Options) -> None:
    client = moto.client()
    client.create_bucket(Bucket="versions")
    store = S3Store(replace(options, bucket="versions", prefix="kv"))
    assert not store.keeps_versions()
    client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    assert store.keeps_versions()
    good = {"ID": "theirs", "Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 3}}
    tagged = {"Filter": {"And": {"Prefix": "kv/", "Tags": [{"Key": "a", "Value": "b"}]}}}
    for rule, kept in (
        (good | {"Filter": {"Prefix": "kv/"}}, False),
        (good | {"Prefix": ""}, False),
        (good | {"Filter": {"Prefix": "kv/m_r"}}, True),
        (good | tagged, True),
        (good | {"Filter": {"Prefix": ""}, "Status": "Disabled"}, True),
    ):
        client.put_bucket_lifecycle_configuration(Bucket="versions", LifecycleConfiguration={"Rules": [rule]})
        assert store.keeps_versions() == kept, rule
    store.close()


def test_s3_folders_are_the_top_level_folders_below_the_prefix(moto: S3Server, options: S3Options) -> None:
    store = S3Store(replace(options, prefix="folders"))
    for key in ("m/config.json", "m_r0/a/b", "m_r0/a/c", "plain"):
        store.put(key, as_parts(b"1"))
    moto.client().put_object(Bucket=options.bucket, Key="elsewhere/x", Body=b"")
    assert store.folders() == ["m", "m_r0"]
    store.close()


class TestCheck:
    def test_check_of_a_good_bucket_succeeds(self, store: S3Store) -> None:
        store.check()

    def test_check_of_a_missing_bucket_names_the_bucket(self, options: S3Options) -> None:
        store = S3Store(replace(options, bucket="no-such-bucket"))
        with pytest.raises(
            StoreConfigError, match=r"^bucket: no-such-bucket does not exist at http://127.0.0.1:\d+; create"
        ):
            store.check()
        store.close()


class TestFork:
    @pytest.mark.parametrize("used_before", [True, False])
    def test_store_works_in_a_forked_child(self, store: S3Store, used_before: bool) -> None:
        if used_before:
            store.put("a", as_parts(b"1234"))
        child = fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(300)
                store.put("b", as_parts(b"from the child"))
                if fetch(store, "b", 14) == b"from the child" and store.size_many(["a", "b"])[1] == 14:
                    code = 0
            except BaseException:
                traceback.print_exc()  # pytest shows it, if the test fails
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert fetch(store, "b", 14) == b"from the child"
