"""PrefixStore on a bucket by the S3 store: what is sent, what faults become, and what is looked at before a start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtiers.tiers.config.tier_options import BoundedTierConfig
from kvtiers.tiers.errors import (
    SealError,
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from kvtiers.tiers.testing.http_faults import Fault, HttpFaultServer
from kvtiers.tiers.testing.servers import S3Server
from tests.s3_clients import CLIENTS, set_s3_options, use_client, use_credentials
from tests.waiting import wait_for

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="prefixes are tensors: pip install '.[torch]'")
pytest.importorskip("safetensors", reason="prefixes are safetensors: pip install '.[torch]'")

from kvtiers.connector.prefixes.files import FILES_AT_ONCE
from kvtiers.connector.prefixes.format import unseal
from kvtiers.connector.prefixes.place import shared_place
from kvtiers.connector.prefixes.store import PrefixStore, blocks_in_all
from tests.connector.prefixes.test_prefix_limits import BLOCK, FINGERPRINT, NAMESPACE, hashes_of

LAYERS = [f"model.layers.{index}.attn" for index in range(2 * FILES_AT_ONCE + 3)]


def layers_of(blocks: int) -> dict[str, torch.Tensor]:
    return {layer: torch.rand(blocks * BLOCK, 6) for layer in LAYERS}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaultServer]:
    use_credentials(monkeypatch)
    with HttpFaultServer() as server:
        yield server


def place_at(server: HttpFaultServer, **options: Any) -> BoundedTierConfig:
    tier = {"type": "s3", "bucket": "bucket", "prefix": "kv", "endpoint_url": server.endpoint_url}
    patient = {"job_deadline_s": 180.0}  # requests are counted: none is to be made again on a busy machine
    return shared_place({"tier": tier | patient | options})


def store_at(server: HttpFaultServer, **options: Any) -> PrefixStore:
    return PrefixStore(place_at(server, **options), NAMESPACE, FINGERPRINT)


def names(server: HttpFaultServer) -> list[str]:
    listed = S3Server(server.endpoint_url, "first", "secret").client().list_objects_v2(Bucket="bucket")
    return [found["Key"] for found in listed.get("Contents", ())]


@pytest.mark.parametrize("client", CLIENTS)
def test_what_was_published_is_loaded_whole_and_in_order(
    server: HttpFaultServer, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, layers = hashes_of(1, 2, 3), layers_of(3)
    use_client(monkeypatch, client)
    store = store_at(server, storage_class="STANDARD_IA", sse="AES256")
    assert store.publish(hashes, layers)
    puts = server.requests("PUT")
    assert len(puts) == len(LAYERS) + 1
    assert puts[-1].path.endswith(".json")  # last: it makes the others visible
    for put in puts:
        assert put.headers["x-amz-storage-class"] == "STANDARD_IA"
        assert put.headers["x-amz-server-side-encryption"] == "AES256"
    (chunk,) = store.match(hashes)
    found = store.load(chunk, hashes)
    for layer in sorted(LAYERS):
        name, tensor = next(found)
        assert name == layer
        assert torch.equal(tensor, layers[layer])
    assert next(found, None) is None
    store.close()


def test_a_match_costs_one_listing_and_none_of_the_layers(server: HttpFaultServer) -> None:
    store, hashes = store_at(server), hashes_of(1, 2, 3)
    assert store.publish(hashes, layers_of(3))
    before = len(server.requests("GET"))
    assert [chunk.blocks for chunk in store.match(hashes)] == [3]
    (listing,) = server.requests("GET")[before:]
    assert listing.query["delimiter"] == "/"
    store.close()


def test_a_far_bucket_is_asked_for_many_chunks_and_for_all_ranks_at_once(server: HttpFaultServer) -> None:
    """One after the other they would take longer than lookup_deadline_s."""
    hashes = hashes_of(*range(24))
    place = place_at(server)
    stores = [PrefixStore(place, NAMESPACE, FINGERPRINT, rank=rank) for rank in range(4)]
    for store in stores:
        for start in range(0, 24, 2):
            assert store.publish(hashes[start : start + 2], {"layer": torch.ones(2 * BLOCK, 6)})
    server.answer_after_s, server.most_under_way = 1.0, 0
    before = len(server.requests())
    assert blocks_in_all(stores, hashes) == 24
    asked = server.requests()[before:]
    assert [request.method for request in asked if request.method != "HEAD"] == ["GET"]  # one listing
    assert len(asked) == 1 + 11 + 3 * 12
    assert server.most_under_way > 3
    found = stores[0].match(hashes)
    server.most_under_way = 0
    for chunk, manifest in zip(found, stores[0].manifests(found), strict=True):
        assert unseal(manifest(), chunk.path)["identity"]
    assert server.most_under_way > 3
    for store in stores:
        store.close()


def test_reads_that_a_close_has_cancelled_say_so(server: HttpFaultServer) -> None:
    store, hashes = store_at(server), hashes_of(1, 2)
    assert store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    manifests = store.manifests([chunk] * 2)
    assert manifests[1]()
    store.close()
    with pytest.raises(StoreClosedError):
        store.manifests([chunk] * 2)[1]()


@pytest.mark.parametrize(
    ("fault", "which"),
    [(Fault.ACCESS_DENIED, LAYERS[0]), (Fault.QUOTA, LAYERS[20]), (Fault.RESET_BEFORE, ".json")],
)
def test_a_publication_that_fails_leaves_nothing(
    server: HttpFaultServer, fault: Fault, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_s3_options(monkeypatch, retries=0)
    store, hashes = store_at(server), hashes_of(1, 2)
    # A put that is denied is made again with a signed payload, and then without a checksum. One whose connection breaks
    # is made again on a new connection.
    times = {Fault.ACCESS_DENIED: 3, Fault.RESET_BEFORE: 2}.get(fault, 1)
    server.inject(fault, methods=("PUT",), path_contains=which, times=times)
    with pytest.raises(StoreError):
        store.publish(hashes, layers_of(2))
    assert server.struck[fault] == times
    assert names(server) == []
    assert store.match(hashes) == []
    assert store.counts.errors == 1
    assert store.publish(hashes, layers_of(2))
    store.close()


@pytest.mark.parametrize(
    ("damage", "which"), [("flip", 0), ("truncate", 20), ("delete", 20), ("flip", -1), ("delete", -1)]
)
def test_damage_is_a_miss_and_the_next_store_heals_it(server: HttpFaultServer, damage: str, which: int) -> None:
    store, hashes, layers = store_at(server), hashes_of(1, 2), layers_of(2)
    assert store.publish(hashes, layers)
    name = names(server)[which]
    data = server.get_object("bucket", name)
    assert data is not None
    if damage == "delete":
        assert server.s3.remove_objects("bucket", lambda key: key == name) == 1
    else:
        flip = bytearray(data)
        flip[len(flip) // 2] ^= 4
        server.put_object("bucket", name, bytes(flip) if damage == "flip" else data[:-1])
    for chunk in store.match(hashes):
        with pytest.raises((StoreError, SealError)):
            list(store.load(chunk, hashes))
    assert store.match(hashes) == []
    assert store.publish(hashes, layers)
    (chunk,) = store.match(hashes)
    found = {layer: tensor.clone() for layer, tensor in store.load(chunk, hashes)}  # each is lent
    assert torch.equal(found[LAYERS[-1]], layers[LAYERS[-1]])
    store.close()


def test_a_server_that_fails_for_a_while_costs_a_miss_and_no_chunk(
    server: HttpFaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_s3_options(monkeypatch, retries=0)
    store, hashes = store_at(server), hashes_of(1, 2)
    assert store.publish(hashes, layers_of(2))
    before = names(server)
    (chunk,) = store.match(hashes)
    server.inject(Fault.INTERNAL_ERROR, methods=("GET",))
    assert store.match(hashes) == []
    with pytest.raises(StoreUnavailableError):
        list(store.load(chunk, hashes))
    server.heal()
    assert names(server) == before
    assert store.counts.verify_failures == 0
    assert len(dict(store.load(chunk, hashes))) == len(LAYERS)
    store.close()


def test_who_stops_reading_leaves_no_read_behind(server: HttpFaultServer) -> None:
    store, hashes = store_at(server), hashes_of(1, 2)
    assert store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    before = len(server.requests("GET"))
    reading = store.load(chunk, hashes)
    next(reading)
    reading.close()  # type: ignore[attr-defined]  # a generator
    files: Any = store.files
    assert wait_for(lambda: not files._side_by_side._pool._began)
    assert len(server.requests("GET")) - before <= 1 + 32  # the manifest, and s3's n_read_threads
    store.close()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (Fault.SIGNATURE, StorePermissionError, "^secret: "),
        (Fault.BUCKET_GONE, StoreConfigError, "^bucket: bucket does not exist"),
    ],
)
def test_a_check_says_what_is_wrong(server: HttpFaultServer, fault: Fault, error: type[StoreError], said: str) -> None:
    store = store_at(server)
    store.check()
    server.inject(fault)
    with pytest.raises(error, match=said):
        store.check()
    store.close()


def test_a_folder_needs_no_check(tmp_path: Path) -> None:
    store = PrefixStore(shared_place({"shared_storage_path": str(tmp_path / "new")}), NAMESPACE, FINGERPRINT)
    store.check()
    store.close()
    assert not (tmp_path / "new").exists()
