"""PrefixStore: longest match, atomic publish, and what damage becomes."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvtiers.tiers.errors import (
    BlobNotFoundError,
    ConfigError,
    SealError,
    StoreClosedError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="prefixes are tensors: pip install '.[torch]'")
pytest.importorskip("safetensors", reason="prefixes are safetensors: pip install '.[torch]'")

from kvtiers.connector.prefixes import format as prefix_format
from kvtiers.connector.prefixes.files import FILES_AT_ONCE, files_for
from kvtiers.connector.prefixes.files.fsspec_url import FsspecFiles
from kvtiers.connector.prefixes.files.side_by_side import BUFFERS_BYTES_MAX, FILES_MIN, SideBySide
from kvtiers.connector.prefixes.format import CHUNK_BLOCKS_MAX
from kvtiers.connector.prefixes.limits import USE_NOTED_S
from kvtiers.connector.prefixes.place import place_at
from kvtiers.connector.prefixes.store import Chunk, PrefixStore, blocks_in_all
from kvtiers.connector.prefixes.uses import PrefixUses
from tests.connector.prefixes.test_prefix_limits import BLOCK, FINGERPRINT, LAYERS, hashes_of
from tests.waiting import wait_for


def layers_of(blocks: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    base = torch.arange(blocks * BLOCK * 6, dtype=torch.float32).reshape(blocks * BLOCK, 2, 3)
    return {layer: base + value + index * 1000 for index, layer in enumerate(LAYERS)}


@pytest.fixture(params=["folder", "local", "memory", "file system with folders", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "prefixes")
        return
    if request.param == "bucket":
        yield f"{request.getfixturevalue('prefix_bucket')}/{tmp_path.name}"
        return
    fsspec = pytest.importorskip("fsspec")
    if request.param != "memory":
        if request.param != "local":
            from fsspec.implementations.local import LocalFileSystem

            class Folders(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
                protocol = "folders"

                @classmethod
                def _strip_protocol(cls, path: object) -> object:
                    return super()._strip_protocol(str(path).removeprefix("folders://"))

            fsspec.register_implementation("folders", Folders, clobber=True)
        yield f"{'local' if request.param == 'local' else 'folders'}://{tmp_path}/prefixes"
        return
    yield f"memory://prefixes-{os.getpid()}-{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def store_at(url: str, fingerprint: bytes = FINGERPRINT, rank: int = 0, **options: Any) -> PrefixStore:
    return PrefixStore(place_at(url, **options), "model_abc", fingerprint, rank=rank)


def load(store: PrefixStore, chunk: Chunk, hashes: list[bytes]) -> dict[str, torch.Tensor]:
    return {layer: tensor.clone() for layer, tensor in store.load(chunk, hashes)}  # each is lent


def test_what_was_published_is_matched_and_loaded_by_another_process_view(url: str) -> None:
    hashes, layers = hashes_of(1, 2, 3), layers_of(3)
    assert store_at(url).publish(hashes, layers)
    store = store_at(url)
    (chunk,) = store.match(hashes)
    assert chunk.blocks == 3
    found = load(store, chunk, hashes)
    assert list(found) == list(LAYERS)
    for layer in LAYERS:
        assert torch.equal(found[layer], layers[layer])


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16"]
)
def test_every_kind_of_number_comes_back(tmp_path: Path, dtype: str) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    layers = {layer: (values / 7).to(getattr(torch, dtype)) for layer, values in layers_of(2).items()}
    assert store.publish(hashes, layers)
    (chunk,) = store.match(hashes)
    found = load(store, chunk, hashes)
    for layer in LAYERS:
        assert found[layer].dtype == layers[layer].dtype
        assert torch.equal(found[layer].view(torch.uint8), layers[layer].view(torch.uint8))


def test_a_chunk_is_stored_once(url: str) -> None:
    store = store_at(url)
    assert store.publish(hashes_of(1, 2), layers_of(2))
    assert not store.publish(hashes_of(1, 2), layers_of(2))
    assert store.counts.chunks_stored == 1


def test_chunks_form_a_chain(url: str) -> None:
    store, hashes = store_at(url), hashes_of(*range(7))
    store.publish(hashes[:3], layers_of(3))
    store.publish(hashes[3:5], layers_of(2))
    store.publish(hashes[6:], layers_of(1))  # block 5 is missing, so this one is out of reach
    assert [chunk.blocks for chunk in store.match(hashes)] == [3, 2]
    assert [chunk.blocks for chunk in store.match(hashes[:4])] == [3, 1]
    assert store.match(hashes[1:]) == []


def test_a_long_chain_of_equal_chunks_is_found_up_to_its_first_gap(url: str) -> None:
    store, hashes = store_at(url), hashes_of(*range(24))
    for start in [*range(0, 14, 2), *range(16, 24, 2)]:  # blocks 14 and 15 are missing
        store.publish(hashes[start : start + 2], layers_of(2))
    found = store.match(hashes)
    assert [chunk.blocks for chunk in found] == [2] * 7
    assert [chunk.blocks for chunk in store.match(hashes[:13])] == [2] * 6 + [1]
    store.publish(hashes[14:15], layers_of(1))
    store.publish(hashes[15:16], layers_of(1))
    assert [chunk.blocks for chunk in store.match(hashes)] == [2] * 7 + [1, 1] + [2] * 4
    manifests = store.manifests(found)
    for index, (chunk, manifest) in enumerate(zip(found, manifests, strict=True)):
        assert len(list(store.load(chunk, hashes[2 * index : 2 * index + 2], manifest))) == len(LAYERS)


def test_blocks_count_where_all_ranks_have_them(url: str) -> None:
    hashes = hashes_of(*range(12))
    stores = [store_at(url, rank=rank) for rank in range(3)]
    for store in stores:
        for start in range(0, 12, 3):
            store.publish(hashes[start : start + 3], layers_of(3))
    assert blocks_in_all(stores, hashes) == 12
    assert blocks_in_all(stores, hashes[:11]) == 11  # of a part of the last one
    assert blocks_in_all(stores, hashes_of(99)) == 0
    assert blocks_in_all(stores[:1], hashes) == 12
    other = store_at(url, rank=3)  # its steps were others
    for start, end in ((0, 4), (4, 7), (7, 9)):
        other.publish(hashes[start:end], layers_of(end - start))
    assert blocks_in_all([*stores, other], hashes) == 9
    stores[1].files.delete(stores[1].match(hashes)[2].path)
    assert blocks_in_all(stores, hashes) == 6
    assert blocks_in_all([*stores, other], hashes) == 6


def test_the_longest_of_several_chunks_wins(url: str) -> None:
    store, hashes = store_at(url), hashes_of(*range(6))
    store.publish(hashes[:2], layers_of(2))
    store.publish(hashes[:5], layers_of(5))
    assert [chunk.blocks for chunk in store.match(hashes)] == [5]
    assert [chunk.blocks for chunk in store.match(hashes[:3])] == [3]


def test_a_prompt_that_parts_inside_a_chunk_reuses_what_is_alike_and_goes_on_with_its_own(url: str) -> None:
    store = store_at(url)
    one, other = hashes_of(1, 2, 3, 4), hashes_of(1, 2, 8, 9)
    store.publish(one, layers_of(4))
    (chunk,) = store.match(other)
    assert chunk.blocks == 2
    found = load(store, chunk, other[:2])
    assert torch.equal(found[LAYERS[0]], layers_of(4)[LAYERS[0]])  # of the whole chunk; the caller takes the first two
    store.publish(other[2:], layers_of(2, 500.0))
    assert [chunk.blocks for chunk in store.match(other)] == [2, 2]


@pytest.mark.parametrize("changed", ["fingerprint", "rank", "namespace"])
def test_another_identity_never_reads_it(url: str, changed: str) -> None:
    hashes = hashes_of(1, 2)
    store_at(url).publish(hashes, layers_of(2))
    if changed == "namespace":
        assert PrefixStore(place_at(url), "model_other", FINGERPRINT).match(hashes) == []
    elif changed == "rank":
        assert store_at(url, rank=1).match(hashes) == []
    else:
        store = store_at(url, fingerprint=bytes(32))
        for chunk in store.match(hashes):  # the name may fit; the manifest does not
            with pytest.raises(SealError):
                load(store, chunk, hashes)


def test_a_manifest_whose_name_lies_is_not_loaded(tmp_path: Path) -> None:
    store, one, other = store_at(str(tmp_path)), hashes_of(1, 2), hashes_of(1, 3)
    store.publish(one, layers_of(2))
    (manifest,) = tmp_path.rglob("*.json")
    manifest.rename(manifest.with_name(f"2-{other[-1].hex()}.json"))
    (chunk,) = store.match(other)
    assert chunk.blocks == 2
    with pytest.raises(SealError, match="other blocks"):
        load(store, chunk, other)
    assert store.match(other) == []


def every_file(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty", "delete"])
@pytest.mark.parametrize("which", range(3))
def test_damage_to_any_file_is_a_miss_and_the_next_store_heals_it(tmp_path: Path, damage: str, which: int) -> None:
    store, hashes, layers = store_at(str(tmp_path)), hashes_of(1, 2), layers_of(2)
    store.publish(hashes, layers)
    path = every_file(tmp_path)[which]
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        flip = bytearray(data)
        flip[len(flip) // 2] ^= 4
        path.write_bytes({"flip": bytes(flip), "truncate": data[:-1], "extend": data + b"x", "empty": b""}[damage])
    for chunk in store.match(hashes):
        with pytest.raises((StoreError, SealError)):
            load(store, chunk, hashes)
    assert store.match(hashes) == []
    assert store.publish(hashes, layers)
    (chunk,) = store.match(hashes)
    assert torch.equal(load(store, chunk, hashes)[LAYERS[1]], layers[LAYERS[1]])


def test_every_byte_of_every_file_is_covered(tmp_path: Path) -> None:
    store, hashes, layers = store_at(str(tmp_path)), hashes_of(1), layers_of(1)
    store.publish(hashes, layers)
    stored = {path: path.read_bytes() for path in every_file(tmp_path)}
    for path, good in stored.items():
        step = max(1, len(good) // 97)
        for position in range(0, len(good), step):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            path.write_bytes(bad)
            chunk = Chunk(f"model_abc_r0/{hashes[0].hex()}/1-{hashes[0].hex()}.json", 1)
            with pytest.raises(SealError):
                load(store, chunk, hashes)
            for each, content in stored.items():  # a failure has removed them
                each.parent.mkdir(exist_ok=True)
                each.write_bytes(content)


def test_a_prefix_is_visible_when_all_its_layers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    rename, link, seen = os.rename, os.link, []

    def watch(call: Callable[..., None], *names: str, **options: Any) -> None:
        seen.append(store.match(hashes))
        call(*names, **options)

    monkeypatch.setattr(os, "rename", partial(watch, rename))
    monkeypatch.setattr(os, "link", partial(watch, link))
    store.publish(hashes, layers_of(2))
    assert len(seen) == 3  # two layers and the manifest, last
    assert seen == [[], [], []]
    assert len(store.match(hashes)) == 1


def test_a_failed_publish_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    rename, calls = os.rename, []

    def fail_second(source: str, target: str, **folders: int) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(StoreError, match="No space"):
        store.publish(hashes, layers_of(2))
    assert every_file(tmp_path) == []
    assert not [path for path in tmp_path.rglob("*") if len(path.name) == 32]  # nor an empty folder of its layers
    assert store.match(hashes) == []


def test_modes_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store_at(str(tmp_path / "root")).publish(hashes_of(1), layers_of(1))
    finally:
        os.umask(before)
    for path in (tmp_path / "root").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_layers_name_cannot_leave_its_folder(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path / "root")), hashes_of(1)
    layers = {"../../escaped": torch.ones(BLOCK, 1), "/etc/absolute": torch.zeros(BLOCK, 1)}
    store.publish(hashes, layers)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    (chunk,) = store.match(hashes)
    assert set(load(store, chunk, hashes)) == set(layers)


def test_a_symlink_is_not_followed(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path / "root")), hashes_of(1)
    store.publish(hashes, layers_of(1))
    layer = next((tmp_path / "root").rglob("*.safetensors"))
    layer.rename(tmp_path / "elsewhere")
    layer.symlink_to(tmp_path / "elsewhere")
    (chunk,) = store.match(hashes)
    with pytest.raises((SealError, StoreError)):
        load(store, chunk, hashes)


def test_a_foreign_manifest_is_a_miss(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    folder = tmp_path / "model_abc_r0" / hashes[0].hex()
    folder.mkdir(parents=True)
    for text in ("", "{}", json.dumps({"hashes": 3}), "\x00" * 100, "[" * 10_000):
        (folder / f"2-{'ab' * 32}.json").write_text(text)
        assert store.match(hashes) == []


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder or a URL"):
        place_at("")
    with pytest.raises(ConfigError, match="nosuch"):
        store_at("nosuch://bucket")
    with pytest.raises(ValueError, match="accepted are 1.."):
        store_at(str(tmp_path)).publish([b"x" * 32] * (CHUNK_BLOCKS_MAX + 1), {})
    with pytest.raises(ValueError, match="accepted are 1.."):
        store_at(str(tmp_path)).publish([], {})


def test_a_bad_chunk_leaves_no_files_behind(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    for _ in range(3):
        assert store.publish(hashes, layers_of(2))
        path = next(tmp_path.rglob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        (chunk,) = store.match(hashes)
        with pytest.raises(SealError):
            load(store, chunk, hashes)
        assert every_file(tmp_path) == []


def test_a_bad_chunk_that_cannot_be_removed_is_overwritten_by_the_next_store(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(url)
    store.publish(hashes_of(1, 2), layers_of(2))
    (chunk,) = store.match(hashes_of(1, 2))
    manifest = store.files.read(chunk.path, 1 << 20)
    store.files.write(chunk.path, manifest[:-2] + b"x\n")

    def refuse(path: str) -> None:
        raise StorePermissionError("cannot be deleted", key=path)

    monkeypatch.setattr(store.files, "delete", refuse)
    with pytest.raises(SealError):
        load(store, chunk, hashes_of(1, 2))
    assert store.publish(hashes_of(1, 2), layers_of(2))
    assert load(store, chunk, hashes_of(1, 2))
    assert not store.publish(hashes_of(1, 2), layers_of(2)), "once"


def publish_bad(store: PrefixStore, prompts: list[list[bytes]], folder: Path) -> None:
    """Publish chunks, and damage their layers."""
    for hashes in prompts:
        store.publish(hashes, layers_of(2))
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_second_bad_chunk_in_a_row_stays_until_the_next_store_overwrites_it(tmp_path: Path) -> None:
    store, prompts = store_at(str(tmp_path)), [hashes_of(1, 2), hashes_of(3, 4)]
    publish_bad(store, prompts, tmp_path)
    for hashes in prompts:
        with pytest.raises(SealError):
            load(store, store.match(hashes)[0], hashes)
    assert len(every_file(tmp_path)) == 1 + len(LAYERS)
    for hashes in prompts:
        assert store.publish(hashes, layers_of(2))
        assert load(store, store.match(hashes)[0], hashes)
    assert len(every_file(tmp_path)) == 2 * (1 + len(LAYERS)), "without the layers that were replaced"


def test_bad_chunk_that_another_engine_has_replaced_is_not_overwritten(tmp_path: Path) -> None:
    store, other = store_at(str(tmp_path)), store_at(str(tmp_path))
    prompts = [hashes_of(1, 2), hashes_of(3, 4)]
    publish_bad(store, prompts, tmp_path)
    for hashes in prompts:
        with pytest.raises(SealError):
            load(store, store.match(hashes)[0], hashes)
    with pytest.raises(SealError):
        load(other, other.match(prompts[1])[0], prompts[1])
    assert other.publish(prompts[1], layers_of(2))
    before = {path: path.read_bytes() for path in every_file(tmp_path)}
    assert not store.publish(prompts[1], layers_of(2))
    assert {path: path.read_bytes() for path in every_file(tmp_path)} == before


def test_chunk_that_is_good_when_read_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    read_all = store.files.read_all

    def damaged_once(files: Any) -> Iterator[tuple[str, memoryview]]:
        monkeypatch.undo()
        for layer, data in read_all(files):
            yield layer, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    monkeypatch.setattr(store.files, "read_all", damaged_once)
    with pytest.raises(SealError):
        load(store, chunk, hashes)
    assert load(store, chunk, hashes)


def test_damaged_reads_remove_and_replace_one_chunk_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(str(tmp_path))
    prompts = [hashes_of(10 * number, 10 * number + 1) for number in range(6)]
    for hashes in prompts:
        store.publish(hashes, layers_of(2))
    before = {path: path.read_bytes() for path in every_file(tmp_path)}
    read_all = store.files.read_all

    def damaged(files: Any) -> Iterator[tuple[str, memoryview]]:
        for layer, data in read_all(files):
            yield layer, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    monkeypatch.setattr(store.files, "read_all", damaged)
    for hashes in prompts:
        with pytest.raises(SealError):
            load(store, store.match(hashes)[0], hashes)
    for hashes in prompts[1:]:
        assert not store.publish(hashes, layers_of(2))
    left = {path: path.read_bytes() for path in every_file(tmp_path)}
    assert left.items() <= before.items()
    assert len(left) == (len(prompts) - 1) * (1 + len(LAYERS))
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert socket.gethostname() in error
    monkeypatch.undo()
    for hashes in prompts[1:]:
        assert load(store, store.match(hashes)[0], hashes)
    assert {path: path.read_bytes() for path in every_file(tmp_path)} == left


def test_good_manifests_do_not_clear_doubt_about_layers(tmp_path: Path) -> None:
    store, prompts = store_at(str(tmp_path)), [hashes_of(10 * n, 10 * n + 1) for n in range(4)]
    publish_bad(store, prompts, tmp_path)
    for hashes in prompts:
        with pytest.raises(SealError):
            load(store, store.match(hashes)[0], hashes)
        store.match(prompts[-1][:1])  # reads a manifest
    assert len(every_file(tmp_path)) == (len(prompts) - 1) * (1 + len(LAYERS))


def test_chunk_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    body = store._manifest(chunk.path)
    store.files.write(chunk.path, prefix_format.seal({**body, "format": "prefix-2"}))
    with pytest.raises(SealError):
        load(store, chunk, hashes)
    assert not store.publish(hashes, layers_of(2))


def test_a_bad_chunk_stays_where_nothing_may_be_written(tmp_path: Path) -> None:
    hashes = hashes_of(1, 2)
    store_at(str(tmp_path)).publish(hashes, layers_of(2))
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = {each: each.stat().st_ctime_ns for each in tmp_path.rglob("*")}
    reader = store_at(str(tmp_path), read_only=True)
    (chunk,) = reader.match(hashes)
    with pytest.raises(SealError):
        load(reader, chunk, hashes)
    assert {each: each.stat().st_ctime_ns for each in tmp_path.rglob("*")} == before


def find_damage_late(
    tmp_path: Path,
) -> tuple[PrefixStore, Chunk, list[bytes], Iterator[tuple[str, torch.Tensor]]]:
    """A load that is behind its first layer; the second is damaged, and another reader has removed the manifest."""
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    path = next(tmp_path.rglob(f"*{LAYERS[1]}.safetensors"))
    path.write_bytes(b"x" * path.stat().st_size)
    loading = store.load(chunk, hashes)
    next(loading)
    (tmp_path / chunk.path).unlink()
    return store, chunk, hashes, loading


def test_a_chunk_that_another_healed_meanwhile_stays(tmp_path: Path) -> None:
    store, chunk, hashes, loading = find_damage_late(tmp_path)
    store_at(str(tmp_path)).publish(hashes, layers_of(2, 7.0))
    with pytest.raises(SealError):
        list(loading)
    assert torch.equal(load(store, chunk, hashes)[LAYERS[0]], layers_of(2, 7.0)[LAYERS[0]])


def test_a_manifest_that_another_healed_while_it_was_judged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    manifest = tmp_path / chunk.path
    manifest.write_bytes(b"damaged")
    read = store.files.read

    def heal_after_reading(path: str, bytes_max: int) -> bytes:
        data = read(path, bytes_max)
        if data == b"damaged":
            manifest.unlink()
            store_at(str(tmp_path)).publish(hashes, layers_of(2, 7.0))
        return data

    monkeypatch.setattr(store.files, "read", heal_after_reading)
    with pytest.raises(SealError):
        load(store, chunk, hashes)
    assert torch.equal(load(store, chunk, hashes)[LAYERS[0]], layers_of(2, 7.0)[LAYERS[0]])


def test_a_chunk_that_is_gone_is_a_miss_and_nothing_is_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashes = store_at(url), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    store.files.delete(chunk.path)
    removed: list[str] = []
    monkeypatch.setattr(store.files, "delete", removed.append)
    with pytest.raises(BlobNotFoundError):
        load(store, chunk, hashes)
    assert removed == []
    assert store.counts.verify_failures == 0


def test_the_layers_of_a_damaged_chunk_go_though_another_has_removed_its_manifest(tmp_path: Path) -> None:
    *_, loading = find_damage_late(tmp_path)
    with pytest.raises(SealError):
        list(loading)
    assert every_file(tmp_path) == []


def test_of_two_writers_of_one_chunk_the_slower_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, hashes = store_at(str(tmp_path)), store_at(str(tmp_path)), hashes_of(1, 2)
    write_all = slow.files.write_all

    def be_overtaken(files: Mapping[str, bytes]) -> None:
        write_all(files)
        assert fast.publish(hashes, layers_of(2))

    monkeypatch.setattr(slow.files, "write_all", be_overtaken)
    assert not slow.publish(hashes, layers_of(2))
    assert slow.counts.chunks_stored == 0
    assert len(every_file(tmp_path)) == 1 + len(LAYERS)
    (chunk,) = fast.match(hashes)
    assert load(fast, chunk, hashes)


def test_file_systems_that_know_no_refresh_are_fine() -> None:
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Strict(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        protocol = "strict"

        def info(self, path: str) -> object:
            return super().info(path)

        def ls(self, path: str, detail: bool = True) -> object:
            return super().ls(path, detail=detail)

    fsspec.register_implementation("strict", Strict, clobber=True)
    store = store_at("strict://prefixes-strict")
    assert store.publish(hashes_of(1), layers_of(1))
    assert [chunk.blocks for chunk in store.match(hashes_of(1))] == [1]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tar://kv::file:///nowhere/kv.tar", "its driver has one open file for all threads"),
        ("simplecache::memory://kv", "its cache returns stale blocks"),
        ("ftp://host/kv", "its driver has one connection for all threads"),
        ("nosuch://kv", "no such driver"),
    ],
)
def test_protocols_that_break_promises_are_refused(url: str, expected: str) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match=expected) as caught:
        files_for(place_at(url))
    assert caught.value.field == "url"


@pytest.mark.parametrize("error", [OSError, ValueError, PermissionError, RuntimeError])
def test_no_error_shows_the_text_of_a_driver(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may contain a URL with a signature."""
    fsspec = pytest.importorskip("fsspec")
    files = FsspecFiles("memory://prefixes-secret", {})

    def fail(*_: object, **__: object) -> None:
        raise error("https://server/kv?X-Amz-Signature=secret")

    for name in ("pipe_file", "pipe", "put_file", "cat_file", "cat_ranges", "info", "ls", "rm_file", "mv"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, fail)
    calls: list[Callable[[], object]] = [
        lambda: files.write("a", b"x"),
        lambda: files.write_all({"a": b"x"}),
        lambda: files.read("a", 1),
        lambda: list(files.read_all({"a": ("a", 1)})),
        lambda: files.exists("a"),
        lambda: files.names("a"),
        lambda: files.delete("a"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None
    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises((StoreError, ConfigError)) as refused:
        FsspecFiles("memory://prefixes-secret", {})
    assert "Signature" not in str(refused.value)


def test_once_the_answer_is_known_no_question_stays_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    files, go_on = FsspecFiles("memory://prefixes-line", {}), threading.Event()

    def exists(path: str) -> bool:
        if path == "broken":
            raise StoreUnavailableError("connection refused")
        if path != "gone":
            go_on.wait(120)
        return path == "there"

    monkeypatch.setattr(files, "exists", exists)
    behind = [str(index) for index in range(50 * FILES_AT_ONCE)]
    assert files.present([["gone", *behind]]) == [0]
    assert files._side_by_side._pool is not None
    assert not files._side_by_side._pool._waiting
    go_on.set()
    assert files.present([["there", "gone", "there"], ["there"]]) == [1, 1]
    go_on.clear()
    with pytest.raises(StoreUnavailableError):
        files.present([["broken", *behind], behind])
    assert not files._side_by_side._pool._waiting
    go_on.set()
    files.close()


def test_far_file_systems_are_asked_for_many_chunks_and_all_ranks_at_once() -> None:
    """One after the other they would take longer than lookup_deadline_s."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    together = threading.Barrier(4)

    class Far(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        protocol = "far"
        is_far = False

        def info(self, path: str, **options: object) -> object:
            if Far.is_far:
                together.wait(120)  # as long as no three others are under way
            return super().info(path, **options)

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> object:
            if Far.is_far:
                together.wait(120)
            return super().cat_file(path, start, end, **options)

    fsspec.register_implementation("far", Far, clobber=True)
    hashes = hashes_of(*range(10))
    stores = [store_at("far://prefixes-far", rank=rank) for rank in range(5)]
    for store in stores:
        for start in range(0, 10, 2):
            assert store.publish(hashes[start : start + 2], layers_of(2))
    Far.is_far = True
    found = stores[0].match(hashes)
    assert [chunk.blocks for chunk in found] == [2] * 5
    assert [len(read()) > 0 for read in stores[0].manifests(found[:4])] == [True] * 4
    assert blocks_in_all(stores, hashes) == 10
    for store in stores:
        store.close()
    with pytest.raises(StoreClosedError):
        stores[0].manifests(found[:4])[0]()


def test_loads_under_way_share_the_memory_that_they_read_into() -> None:
    threads = SideBySide(1, "test")
    layer = BUFFERS_BYTES_MAX // 16
    share, large = threads.files_at_once, threads.files_at_once(BUFFERS_BYTES_MAX)
    with share(layer) as first, share(layer) as second, large as third:
        assert (first, second, third) == (16, 8, FILES_MIN)
    with threads.files_at_once(layer) as alone:
        assert alone == 16


def test_a_store_that_is_not_even_asked_for_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(str(tmp_path))

    def refuse(_: str) -> bool:
        raise StoreUnavailableError("connection refused")

    monkeypatch.setattr(store.files, "exists", refuse)
    with pytest.raises(StoreUnavailableError):
        store.publish(hashes_of(1), layers_of(1))
    assert store.counts.errors == 1


def test_what_is_used_is_made_new_once_an_hour(tmp_path: Path) -> None:
    store, hashes, others = store_at(str(tmp_path)), hashes_of(1, 2, 3, 4), hashes_of(5, 6)
    store.publish(hashes[:2], layers_of(2))
    store.publish(hashes[2:], layers_of(2))
    store.publish(others, layers_of(2))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    def make_old(seconds: float) -> None:
        at = time.time() - seconds
        for path in files:
            os.utime(path, (at, at))

    def new() -> set[Path]:
        return {path for path in files if time.time() - path.stat().st_mtime < 60}

    make_old(USE_NOTED_S + 100)
    store_at(str(tmp_path), read_only=True).note_uses(store.match(hashes))
    assert new() == set()
    store.note_uses(store.match(hashes))
    used = {path for path in files if hashes[0].hex() in path.parts or hashes[2].hex() in path.parts}
    assert new() == used
    assert len(used) == 2 * (1 + len(LAYERS))
    make_old(USE_NOTED_S - 100)
    store.note_uses(store.match(hashes))
    assert new() == set()


def test_a_use_of_what_is_gone_or_bad_is_not_noted_and_harmless(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    chunks = store.match(hashes)
    manifest = tmp_path / chunks[0].path
    manifest.write_bytes(b"x")
    os.utime(manifest, (0, 0))
    store.note_uses(chunks)
    manifest.unlink()
    store.note_uses(chunks)
    assert not store_at("memory://uses").notes_uses


def test_a_damaged_manifest_that_is_a_candidate_only_is_healed(url: str) -> None:
    """A prompt that ends with a block is asked for without that, so its own chunk is one that parts from it."""
    hashes = hashes_of(1, 2, 3)
    store = store_at(url)
    assert store.publish(hashes, layers_of(3))
    (chunk,) = store.match(hashes[:2])
    store.files.write(chunk.path, b"{")
    assert store.match(hashes[:2]) == []
    assert store.counts.verify_failures == 1
    assert store.publish(hashes, layers_of(3))
    assert sum(found.blocks for found in store.match(hashes[:2])) == 2


def test_what_a_collector_took_during_a_long_load_is_no_damage(url: str) -> None:
    hashes = hashes_of(1, 2)
    store = store_at(url)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    manifest = store.files.read(chunk.path, 1 << 20)
    folder = f"{chunk.path.rpartition('/')[0]}/{store._manifest(chunk.path)['attempt']}"
    store.files.delete(chunk.path)
    store.files.delete_layers(folder)
    with pytest.raises(BlobNotFoundError):
        list(store.load(chunk, hashes, lambda: manifest))
    assert store.counts.verify_failures == 0


def test_a_folder_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    hashes = hashes_of(1, 2)
    store = store_at(f"memory://{tmp_path.name}/run[1]/p")
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    assert list(load(store, chunk, hashes)) == list(LAYERS)


def test_a_use_that_could_not_be_noted_is_noted_with_the_next_one() -> None:
    calls: list[bool] = []

    class Store:
        notes_uses = True
        use_noted_s = 600.0

        def match(self, _: object) -> list[Chunk]:
            return []

        def note_uses(self, _: object) -> bool:
            calls.append(len(calls) > 0)
            return calls[-1]

    uses = PrefixUses([cast(PrefixStore, Store())], clock=lambda: 0.0)
    for expected in (1, 2):
        wait_for(lambda: not uses._pool._waiting and not uses._pool._began)
        uses.note([b"block"])
        wait_for(lambda expected=expected: len(calls) == expected)  # type: ignore[misc]
    wait_for(lambda: not uses._pool._began)
    uses.note([b"block"])
    uses.shutdown()
    assert calls == [False, True]
