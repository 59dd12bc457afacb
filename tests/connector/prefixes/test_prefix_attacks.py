"""PrefixStore on storage that others may write to: links, special files, forged manifests, and writers at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import xxhash
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.open_store import open_tool_store
from kvtiers.tiers.config.tier_options import BoundedTierConfig, FsTierConfig
from kvtiers.tiers.errors import SealError, StoreError
from kvtiers.tiers.stores.files.local import LocalStore

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="prefixes are tensors: pip install 'kvtiers[torch]'")
pytest.importorskip("safetensors", reason="prefixes are safetensors: pip install 'kvtiers[torch]'")

from kvtiers.connector.prefixes.chunks import ChunkStore
from kvtiers.connector.prefixes.format import CHUNK_BYTES_MAX, seal
from kvtiers.connector.prefixes.place import place_at, place_of_prefixes
from kvtiers.connector.prefixes.store import Chunk, PrefixStore
from tests.connector.prefixes.test_prefix_limits import FINGERPRINT, LAYERS, NAMESPACE, hashes_of, layers_of, store_at

HASHES = hashes_of(1, 2)
FOLDER = f"{NAMESPACE}_r0/{HASHES[0].hex()}"
MANIFEST = f"{FOLDER}/2-{HASHES[1].hex()}.json"
ATTEMPT = "a" * 32


def load(store: PrefixStore) -> dict[str, Any]:
    (chunk,) = store.match(HASHES)
    return {layer: tensor.clone() for layer, tensor in store.load(chunk, HASHES)}


def folder_store(root: Path) -> PrefixStore:
    return store_at(str(root))


def file_url_store(root: Path) -> PrefixStore:
    pytest.importorskip("fsspec")
    tier = parse_tier({"type": "fsspec", "url": f"file://{root}"})
    assert isinstance(tier, BoundedTierConfig)
    return PrefixStore(place_of_prefixes(tier), NAMESPACE, FINGERPRINT)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with other people's files, and with files that are named like a layer and a manifest."""
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    for name in ("thesis.tex", ".bashrc", "sub/kept", f"{LAYERS[0]}.safetensors", MANIFEST.rpartition("/")[2]):
        (home / name).write_text("mine")
    return home


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make_store", [folder_store, file_url_store])
@pytest.mark.parametrize("where", ["namespace", "chunk", "attempt", "layer", "manifest"])
def test_link_below_root_is_neither_read_nor_written_nor_emptied(
    tmp_path: Path, home: Path, make_store: Callable[[Path], PrefixStore], where: str
) -> None:
    root, before = tmp_path / "shared", contents(home)
    store = make_store(root)
    assert store.publish(HASHES, layers_of(2))
    if make_store is file_url_store:
        root /= "prefixes"
    (attempt,) = {path.parent for path in root.rglob("*.safetensors")}
    target, victim = {
        "namespace": (home, root / f"{NAMESPACE}_r0"),
        "chunk": (home, root / FOLDER),
        "attempt": (home, attempt),
        "layer": (home / f"{LAYERS[0]}.safetensors", attempt / f"{LAYERS[0]}.safetensors"),
        "manifest": (home / MANIFEST.rpartition("/")[2], root / MANIFEST),
    }[where]
    victim.rename(root / "moved")
    victim.symlink_to(target)
    mtimes = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    chunk = Chunk(MANIFEST, 2)
    store.note_uses([chunk])
    with pytest.raises((SealError, StoreError)):
        list(store.load(chunk, HASHES))
    assert store.match(HASHES) == []
    try:
        store.publish(HASHES, layers_of(2))
    except StoreError:
        assert where in ("namespace", "chunk"), "the next store must replace the chunk"
    else:
        assert load(make_store(tmp_path / "shared")).keys() == set(LAYERS)
    store.files.delete_layers(FOLDER)
    chunks = ChunkStore(open_tool_store(place_at(str(root))), lambda _: None)
    for key in (MANIFEST, str(attempt.relative_to(root))):  # as a collector does that listed them before
        with contextlib.suppress(StoreError):
            chunks.delete(key)
    assert contents(home) == before
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == mtimes


@pytest.mark.parametrize("what", ["fifo", "folder"])
@pytest.mark.parametrize("where", ["layer", "manifest"])
def test_special_file_in_place_of_file_is_a_miss(tmp_path: Path, what: str, where: str) -> None:
    store = store_at(str(tmp_path))
    store.publish(HASHES, layers_of(2))
    path = tmp_path / MANIFEST if where == "manifest" else next(tmp_path.rglob("*.safetensors"))
    path.unlink()
    os.mkfifo(path) if what == "fifo" else path.mkdir()
    with pytest.raises((SealError, StoreError)):
        list(store.load(Chunk(MANIFEST, 2), HASHES))
    assert store.match(HASHES) == []
    if (what, where) != ("folder", "manifest"):
        assert store.publish(HASHES, layers_of(2))
        assert load(store).keys() == set(LAYERS)


def test_other_files_in_layers_folder_stay_when_chunk_is_removed(tmp_path: Path) -> None:
    store = store_at(str(tmp_path))
    store.publish(HASHES, layers_of(2))
    layer = next(tmp_path.rglob("*.safetensors"))
    others = [layer.with_name(name) for name in ("notes.txt", "model.safetensors.bak", "sub")]
    for other in others[:2]:
        other.write_text("mine")
    others[2].mkdir()
    layer.write_bytes(b"damaged")
    with pytest.raises(SealError):
        load(store)
    assert sorted(layer.parent.iterdir()) == sorted(others)
    store.publish(HASHES, layers_of(2))
    chunks = ChunkStore(LocalStore(tmp_path), lambda _: None)
    for info in list(chunks.keys()):
        if chunks.is_block(info.key):
            chunks.delete(info.key)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(others[:2])


def test_root_may_be_a_link_and_may_be_pointed_elsewhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    store = store_at(str(link))
    assert store.publish(HASHES, layers_of(2))
    assert load(store_at(str(tmp_path / "one"))).keys() == set(LAYERS)
    link.unlink()
    link.symlink_to(tmp_path / "two")
    assert not store.files.exists("not/there")  # a miss notices it
    assert store.publish(HASHES, layers_of(2))
    assert (tmp_path / "two" / MANIFEST).exists()


def test_prefixes_folder_of_a_tier_must_not_be_a_link(tmp_path: Path, home: Path) -> None:
    tier = parse_tier({"type": "fs", "root_dir": str(tmp_path / "shared")})
    assert isinstance(tier, BoundedTierConfig)
    store = PrefixStore(place_of_prefixes(tier), NAMESPACE, FINGERPRINT)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "prefixes").symlink_to(home)
    before = contents(home)
    with pytest.raises(StoreError):
        store.publish(HASHES, layers_of(2))
    assert store.match(HASHES) == []
    assert contents(home) == before


def test_root_that_is_missing_is_empty_and_is_made_by_the_first_store(tmp_path: Path) -> None:
    root = tmp_path / "later"
    reader = PrefixStore(place_at(str(root), read_only=True), NAMESPACE, FINGERPRINT)
    assert reader.match(HASHES) == []
    assert reader.counts.errors == 0
    assert not root.exists()
    store_at(str(root)).publish(HASHES, layers_of(2))
    assert load(reader).keys() == set(LAYERS)


def test_root_that_is_removed_and_made_again_is_used(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = store_at(str(root))
    store.publish(HASHES, layers_of(2))
    root.rename(tmp_path / "old")
    assert store.match(HASHES[1:]) == []
    assert store.publish(HASHES, layers_of(2))
    assert (root / MANIFEST).exists()
    assert load(store).keys() == set(LAYERS)


@pytest.mark.parametrize("url", ["file://{}", "local://{}"])
def test_local_folder_given_as_url_is_accessed_as_a_folder(tmp_path: Path, url: str) -> None:
    tier = parse_tier({"type": "fsspec", "url": url.format(tmp_path), "max_bytes": "1GiB", "read_only": True})
    place = place_of_prefixes(cast(BoundedTierConfig, tier))
    assert (place.type, place.max_bytes, place.read_only) == ("fs", 1 << 30, True)
    assert isinstance(place, FsTierConfig)
    assert place.root_dir == f"{tmp_path}/prefixes"


# ---- forged manifests ----

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(), max_size=300),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
CHECKSUM = xxhash.xxh3_128_hexdigest(b"")


def body(**changed: Any) -> dict[str, Any]:
    return {
        "format": "prefix-1",
        "identity": f"{FINGERPRINT.hex()}:0",
        "hashes": [block.hex() for block in HASHES],
        "attempt": ATTEMPT,
        "layers": {LAYERS[0]: [0, CHECKSUM]},
        **changed,
    }


FORGED: list[object] = [
    body(layers={LAYERS[0]: [2**40, CHECKSUM]}),
    body(layers={LAYERS[0]: [CHUNK_BYTES_MAX, CHECKSUM], LAYERS[1]: [1, CHECKSUM]}),
    body(layers={LAYERS[0]: [2**2000, CHECKSUM]}),
    body(layers={LAYERS[0]: [-1, CHECKSUM]}),
    body(layers={LAYERS[0]: [True, CHECKSUM]}),
    body(layers={"\ud800": [0, CHECKSUM]}),
    body(layers={"": [0, CHECKSUM]}),
    body(layers={"x" * 300: [0, CHECKSUM]}),
    body(layers=[[LAYERS[0], 0]]),
    body(hashes={block.hex(): 0 for block in HASHES}),
    body(hashes=HASHES[0].hex()),
    body(hashes=[block.hex() for block in HASHES] * 1000),
    body(attempt="../" * 10 + "aa"),
    body(attempt=["a"] * 32),
    body(identity=None),
    body(identity="\udfff"),
    body(format="x" * 100_000),
    body(format={}),
    [],
    None,
    "prefix-1",
]


def forge(root: Path, content: object) -> None:
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    (root / MANIFEST).write_bytes(text + f"\n{xxhash.xxh3_128_hexdigest(text)}\n".encode())


def check_is_replaced(root: Path) -> None:
    """Whatever the manifest says, it is a miss, and the next store replaces it."""
    store = store_at(str(root))
    store.note_uses([Chunk(MANIFEST, 2)])
    tracemalloc.start()
    try:
        for chunk in store.match(HASHES):
            with pytest.raises((SealError, StoreError)) as error:
                list(store.load(chunk, HASHES))
            assert len(str(error.value)) < 2000
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert store.match(HASHES) == []
    assert store.publish(HASHES, layers_of(2))
    assert load(store).keys() == set(LAYERS)


@pytest.mark.parametrize("content", FORGED, ids=range(len(FORGED)))
def test_forged_manifest_is_discarded_and_replaced_by_next_store(tmp_path: Path, content: object) -> None:
    forge(tmp_path, content)
    check_is_replaced(tmp_path)


@given(field=st.sampled_from(["format", "identity", "hashes", "attempt", "layers", "entry", "name", "all"]), value=JSON)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_manifest_is_discarded_and_replaced_by_next_store(tmp_path: Path, field: str, value: Any) -> None:
    assume((field, value) != ("layers", {}))  # a valid manifest, of a rank without layers
    content: object = {
        "entry": body(layers={LAYERS[0]: value}),
        "name": body(layers={str(value): [0, CHECKSUM]}),
        "all": value,
    }.get(field, body(**{field: value}))
    for path in tmp_path.rglob(f"{FOLDER}/*.json"):
        path.unlink()
    forge(tmp_path, content)
    check_is_replaced(tmp_path)


def forge_layer(root: Path, header: object, payload: bytes = b"\0" * 64) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + payload
    (root / FOLDER / ATTEMPT).mkdir(parents=True, exist_ok=True)
    (root / FOLDER / ATTEMPT / f"{LAYERS[0]}.safetensors").write_bytes(data)
    content = body(layers={LAYERS[0]: [len(data), xxhash.xxh3_128_hexdigest(data)]})
    (root / MANIFEST).write_bytes(seal(content))


GOOD = {"dtype": "F32", "shape": [8, 2], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    "entry",
    [
        {**GOOD, "dtype": "F4_UNKNOWN"},
        {**GOOD, "dtype": ["F32"]},
        {**GOOD, "dtype": "\ud800"},
        {**GOOD, "shape": []},
        {**GOOD, "shape": [2**80]},
        {**GOOD, "shape": [8, 3]},
        {**GOOD, "shape": "8"},
        {**GOOD, "shape": [1] * 1000},
        {**GOOD, "data_offsets": [0, 2**70]},
        {**GOOD, "data_offsets": [-64, -1]},
        {**GOOD, "data_offsets": [0]},
        {**GOOD, "data_offsets": None},
        {},
        None,
    ],
)
def test_forged_layer_is_discarded_and_replaced_by_next_store(tmp_path: Path, entry: object) -> None:
    forge_layer(tmp_path, {"kv": entry})
    check_is_replaced(tmp_path)


@given(header=JSON | st.binary(max_size=64), entry=st.none() | JSON, field=st.sampled_from(sorted(GOOD)))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_layer_loads_or_is_discarded(tmp_path: Path, header: Any, entry: Any, field: str) -> None:
    forge_layer(tmp_path, header if entry is None else {"kv": {**GOOD, field: entry}})
    store = store_at(str(tmp_path))
    try:
        found = load(store)
    except SealError:
        assert store.match(HASHES) == []
    else:
        assert found[LAYERS[0]].ndim
        assert found[LAYERS[0]].nbytes <= 64


def test_layer_larger_than_the_engines_is_discarded_before_memory_is_allocated(tmp_path: Path) -> None:
    huge = 1 << 30
    forge_layer(tmp_path, {"kv": GOOD})
    (layer,) = tmp_path.rglob("*.safetensors")
    os.truncate(layer, huge)  # sparse
    (tmp_path / MANIFEST).write_bytes(seal(body(layers={LAYERS[0]: [huge, CHECKSUM]})))
    store = store_at(str(tmp_path))
    (chunk,) = store.match(HASHES)
    tracemalloc.start()
    try:
        with pytest.raises(SealError, match="names a layer of more than"):
            list(store.load(chunk, HASHES, block_bytes_max=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert store.match(HASHES) == []


def test_layer_as_large_as_the_engines_is_loaded(tmp_path: Path) -> None:
    store, layers = store_at(str(tmp_path)), layers_of(2)
    store.publish(HASHES, layers)
    (chunk,) = store.match(HASHES)
    block_bytes = layers[LAYERS[0]].nbytes // 2
    assert len(list(store.load(chunk, HASHES, block_bytes_max=block_bytes))) == len(LAYERS)
    (chunk,) = store.match(HASHES[:1])
    assert len(list(store.load(chunk, HASHES[:1], block_bytes_max=block_bytes))) == len(LAYERS)


# ---- writers at once ----


@pytest.mark.parametrize("kind", ["folder", "bucket", "s3fs", "memory"])
def test_writer_that_loses_removes_its_own_layers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    options = None
    if kind == "memory":
        pytest.importorskip("fsspec")
        url = f"memory://lose-{os.getpid()}-{tmp_path.name}"
    elif kind == "folder":
        url = str(tmp_path)
    else:
        url = f"{request.getfixturevalue('prefix_bucket')}/{tmp_path.name}"
        if kind == "s3fs":
            pytest.importorskip("s3fs")
            options = {"anon": False}
    place = place_at(url, options)
    stores = [PrefixStore(place, NAMESPACE, FINGERPRINT) for _ in range(2)]
    layers = {layer: tensor + 1 for layer, tensor in layers_of(2).items()}
    put = stores[0]._put_manifest

    def put_second(*arguments: Any) -> bool:  # the first writer has written its layers, but not its manifest
        assert stores[1].publish(HASHES, layers)
        return put(*arguments)

    monkeypatch.setattr(stores[0], "_put_manifest", put_second)
    assert not stores[0].publish(HASHES, layers_of(2))
    assert stores[0].counts.chunks_stored == 0
    (chunk,) = stores[0].match(HASHES)
    found = {layer: tensor.clone() for layer, tensor in stores[0].load(chunk, HASHES)}
    assert all(torch.equal(found[layer], layers[layer]) for layer in LAYERS)
    names = [info.key for info in open_tool_store(place).keys()]  # noqa: SIM118 - not a dict
    assert sorted(name.rpartition("/")[2] for name in names) == sorted(
        [MANIFEST.rpartition("/")[2], *(f"{layer}.safetensors" for layer in LAYERS)]
    )


def test_writer_whose_request_was_repeated_has_stored_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(str(tmp_path))
    create = store.files.create

    def create_twice(path: str, data: bytes) -> bool:
        assert create(path, data)
        return create(path, data)

    monkeypatch.setattr(store.files, "create", create_twice)
    assert store.publish(HASHES, layers_of(2))
    assert load(store).keys() == set(LAYERS)


def test_folder_without_hard_links_stores_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = store_at(str(tmp_path))
    assert store.publish(HASHES, layers_of(2))
    assert load(store).keys() == set(LAYERS)
