"""Limits of what PrefixStore stores: chunks as the collector sees them, and writers that share a bound."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import hash_blocks
from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import RECORD_BYTES
from kvtiers.tiers.capacity.usage import Usage, publish_usage
from kvtiers.tiers.capacity.written import used_bytes
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.open_store import open_tool_store
from kvtiers.tiers.config.tier_options import REMOTE_POLL_S, BoundedTierConfig, ExternalTierConfig
from kvtiers.tiers.errors import BlobNotFoundError, ConfigError, StoreFullError, StoreUnavailableError
from kvtiers.tiers.store import KeyInfo, Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.stores.files.posix import RootFolder
from tests.files import files_below
from tests.identity import FakeSpec
from tests.tiers.stores.files import test_local_store
from tests.waiting import wait_for

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="prefixes are tensors: pip install '.[torch]'")
pytest.importorskip("safetensors", reason="prefixes are safetensors: pip install '.[torch]'")

from kvtiers.connector.prefixes.chunks import ChunkStore
from kvtiers.connector.prefixes.limits import PrefixLimits, use_noted_s
from kvtiers.connector.prefixes.place import place_at, place_of_prefixes
from kvtiers.connector.prefixes.store import PrefixStore

BLOCK = 4
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
NAMESPACE = "model_0123456789ab"
FINGERPRINT = bytes(range(32))
DAY_S = 86_400.0


def hashes_of(*tokens: int) -> list[bytes]:
    return list(hash_blocks([each for token in tokens for each in [token] * BLOCK], BLOCK))


def layers_of(blocks: int, columns: int = 6) -> dict[str, torch.Tensor]:
    return {layer: torch.zeros(blocks * BLOCK, columns) for layer in LAYERS}


@pytest.fixture(params=["fs", "nfs", "local", "memory", "s3", "s3fs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Where prefixes are, of each kind."""
    if request.param in ("s3", "s3fs"):
        url = f"{request.getfixturevalue('prefix_bucket')}/{tmp_path.name}"
        if request.param == "s3fs":
            pytest.importorskip("s3fs")
        yield place_at(url, None if request.param == "s3" else {"anon": False})
        return
    if request.param == "local":
        tier = parse_tier({"type": "fsspec", "url": f"file://{tmp_path}"})
        assert not isinstance(tier, ExternalTierConfig)
        yield place_of_prefixes(tier)
        return
    if request.param == "memory":
        fsspec = pytest.importorskip("fsspec")
        yield place_at(f"memory://limits-{os.getpid()}-{tmp_path.name}")
        fsspec.filesystem("memory").store.clear()
        return
    if request.param == "nfs":
        monkeypatch.setattr("kvtiers.connector.prefixes.place.file_system_type", lambda folder: "nfs4")
    yield place_at(str(tmp_path / "prefixes"))


def store_at(folder: str, **options: Any) -> PrefixStore:
    return PrefixStore(place_at(folder), NAMESPACE, FINGERPRINT, **options)


def chunks_at(folder: Path, sleep: Any = lambda _: None) -> ChunkStore:
    return ChunkStore(LocalStore(folder), sleep)


def listed_by(store: Store) -> dict[str, KeyInfo]:
    return {info.key: info for info in store.keys("")}


def age(path: Path, seconds: float) -> None:
    """Make a file so old, or all files below a folder."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (time.time() - seconds,) * 2)


def delete_many(chunks: ChunkStore, keys: Sequence[str]) -> list[Exception | None]:
    return chunks.delete_many(keys)


def collect(chunks: ChunkStore, **limits: Any) -> tuple[dict[str, int], int]:
    """Removed chunks by reason, and bytes that were listed, the collector's lease not among them."""
    report = Collector(chunks, CapacityPolicy(**{"grace_s": 60.0, **limits})).run()
    assert report is not None
    return report.removed_blobs, report.bytes - RECORD_BYTES


def bytes_below(folder: Path) -> int:
    return sum(status.st_size for path, status in files_below(folder) if "_kvtiers" not in path.parts)


@pytest.mark.full
class TestChunkStore(test_local_store.TestLocalStore):
    """What is no chunk is as in every other store."""

    def make_store(self) -> ChunkStore:
        return chunks_at(self.tmp_path / "root")


def test_a_chunk_is_one_blob_wherever_it_is(place: BoundedTierConfig) -> None:
    store = PrefixStore(place, NAMESPACE, FINGERPRINT)
    alike, other = hashes_of(1, 2, 3, 4), hashes_of(5, 6)
    for hashes in (alike, alike[:2], alike[:3], other):
        assert store.publish(hashes, layers_of(len(hashes)))
    inner, chunks = open_tool_store(place), ChunkStore(open_tool_store(place))
    files, listed = listed_by(inner), listed_by(chunks)
    assert listed.keys() == {name for name in files if name.endswith(".json")}
    assert len(listed) == 4
    assert sum(info.size for info in listed.values()) == sum(info.size for info in files.values())
    for name, info in listed.items():
        assert chunks.is_block(name)
        assert info.mtime == files[name].mtime
    sizes = {name.rpartition("/")[2].partition("-")[0]: info.size for name, info in listed.items()}
    assert 0 < 2 * sizes["2"] - sizes["4"] < 4096  # each has its own layers
    first = next(name for name in listed if "/3-" in name)
    chunks._sleep = lambda _: None
    assert delete_many(chunks, [first, first]) == [None, None]
    assert listed_by(chunks).keys() == listed.keys() - {first}
    left = sum(info.size for info in listed_by(inner).values())
    assert left == sum(info.size for info in files.values()) - listed[first].size
    assert [chunk.blocks for chunk in store.match(alike)] == [4]
    for hashes in (alike, other):
        (chunk,) = store.match(hashes)
        assert dict(store.load(chunk, hashes)).keys() == set(LAYERS)


def test_the_least_recently_used_chunks_go(tmp_path: Path) -> None:
    store = store_at(str(tmp_path))
    prompts = [hashes_of(10 * i + 1, 10 * i + 2) for i in range(10)]
    for i, hashes in enumerate(prompts):
        assert store.publish(hashes, layers_of(2, columns=4096))
        age(tmp_path / store.match(hashes)[0].path, 7200 - i * 600)
    store.note_uses(store.match(prompts[0]))
    whole = bytes_below(tmp_path)
    chunks = chunks_at(tmp_path)
    removed, listed = collect(chunks, max_bytes=2 * whole)
    assert listed == whole
    assert removed == {"ttl": 0, "capacity": 0}
    removed, _ = collect(chunks, max_bytes=int(0.87 * whole))
    assert removed == {"ttl": 0, "capacity": 2}
    assert bytes_below(tmp_path) <= 0.87 * whole
    found = [bool(store.match(hashes)) for hashes in prompts]
    assert found == [True, False, False, *[True] * 7]
    (namespace,) = tmp_path.glob("model_*")
    assert len(list(namespace.iterdir())) == 8  # no empty folders
    assert collect(chunks, max_bytes=int(0.87 * whole))[0] == {"ttl": 0, "capacity": 0}
    for hashes in prompts[3:]:
        (chunk,) = store.match(hashes)
        assert len(dict(store.load(chunk, hashes))) == len(LAYERS)
    assert store.publish(prompts[1], layers_of(2, columns=4096))  # and is stored again when it is computed


def test_what_is_not_used_for_its_time_goes_whole_and_other_peoples_files_stay(tmp_path: Path) -> None:
    store, old, new = store_at(str(tmp_path)), hashes_of(1, 2), hashes_of(3, 4)
    for hashes in (old, new):
        store.publish(hashes, layers_of(2))
    base = tmp_path / f"{NAMESPACE}_r0"
    age(base / old[0].hex(), 8 * DAY_S)
    others = [
        tmp_path / "notes.json",
        tmp_path / "mine" / "2-0123456789abcdef.json",
        base / "notes.txt",
        base / old[0].hex() / "notes.txt",
        base / old[0].hex() / "notes" / "model.safetensors",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        age(path, 30 * DAY_S)
    removed, _ = collect(chunks_at(tmp_path), ttl_s=7 * DAY_S)
    assert removed == {"ttl": 1, "capacity": 0}
    assert all(path.read_text() == "mine" for path in others)
    assert not store.match(old)
    assert list((base / old[0].hex()).rglob("*.safetensors")) == [others[-1]]
    assert store.match(new)


def test_what_dead_writers_left_goes_when_it_is_old(tmp_path: Path) -> None:
    store, hashes, stale = store_at(str(tmp_path)), hashes_of(1, 2), hashes_of(3)
    store.publish(hashes, layers_of(2))
    folder = tmp_path / f"{NAMESPACE}_r0" / hashes[0].hex()
    layers = folder / ("a" * 32)
    layers.mkdir()
    (layers / "model.safetensors").write_bytes(b"x" * 1000)
    (layers / f"model.safetensors.{'b' * 32}.part").write_bytes(b"x" * 100)
    half = folder / f"3-{stale[0].hex()}.json.{'c' * 32}.part"
    half.write_bytes(b"x")
    chunks = chunks_at(tmp_path)
    keys = {str(layers.relative_to(tmp_path)): 1100, str(half.relative_to(tmp_path)): 1}
    listed = {key: info.size for key, info in listed_by(chunks).items()}
    assert listed.items() >= keys.items()
    assert all(chunks.is_block(key) for key in keys)
    assert collect(chunks, ttl_s=DAY_S)[0]["ttl"] == 0
    for path in (layers, half):
        age(path, 2 * DAY_S)
    assert collect(chunks, ttl_s=DAY_S)[0]["ttl"] == 2
    assert not layers.exists()
    assert not half.exists()
    assert store.match(hashes)


def test_a_manifest_whose_layers_are_lost_is_listed_and_goes(tmp_path: Path) -> None:
    store, whole, lost = store_at(str(tmp_path)), hashes_of(1, 2), hashes_of(1, 2, 3)
    store.publish(lost, layers_of(3))
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert listed_by(chunks_at(tmp_path)).keys() == {chunk.path for chunk in store.match(lost)}
    store.publish(whole, layers_of(2))
    chunks = chunks_at(tmp_path)
    listed = listed_by(chunks)
    assert len(listed) == 2
    assert sum(info.size for info in listed.values()) == bytes_below(tmp_path)
    assert delete_many(chunks, [key for key in listed if "/3-" in key]) == [None]
    (chunk,) = store.match(whole)
    assert len(dict(store.load(chunk, whole))) == len(LAYERS)


def test_layers_that_a_manifest_names_by_now_stay(tmp_path: Path) -> None:
    """They were listed before their manifest was there."""
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (attempt,) = {path.parent for path in tmp_path.rglob("*.safetensors")}
    assert delete_many(chunks_at(tmp_path), [str(attempt.relative_to(tmp_path))]) == [None]
    (chunk,) = store.match(hashes)
    assert len(dict(store.load(chunk, hashes))) == len(LAYERS)


def test_who_has_begun_to_read_a_chunk_has_time_for_it(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    reading = store.load(chunk, hashes)
    read = [next(reading)[0]]
    paused: list[float] = []

    def read_on(seconds: float) -> None:
        paused.append(seconds)
        assert not store.match(hashes)  # nobody goes by it any more
        read.extend(layer for layer, _ in reading)

    chunks_at(tmp_path, read_on).delete(chunk.path)
    assert paused
    assert sorted(read) == sorted(LAYERS)
    assert not bytes_below(tmp_path)
    assert store.counts.verify_failures == 0


def test_a_chunk_whose_manifest_is_damaged_goes_in_two_steps(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    (tmp_path / chunk.path).write_bytes(b"no manifest")
    age(tmp_path / f"{NAMESPACE}_r0", 2 * DAY_S)
    chunks = chunks_at(tmp_path)
    for left in (True, False):
        assert collect(chunks, ttl_s=DAY_S)[0]["ttl"] == 1
        assert bool(list(tmp_path.rglob("*.safetensors"))) is left


def test_a_manifest_that_cannot_be_read_keeps_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sector is damaged, in a folder with another chunk."""
    store, whole, damaged, others = store_at(str(tmp_path)), hashes_of(1, 2), hashes_of(1, 2, 3), hashes_of(4)
    for hashes in (whole, damaged, others):
        store.publish(hashes, layers_of(len(hashes)))
    (manifest,) = (path.relative_to(tmp_path) for path in tmp_path.rglob("3-*.json"))
    read = LocalStore.get_into

    def refuse(self: LocalStore, key: str, parts: Sequence[memoryview]) -> None:
        if key == str(manifest):
            raise StoreUnavailableError("Input/output error (EIO)", key=key)
        read(self, key, parts)

    monkeypatch.setattr(LocalStore, "get_into", refuse)
    chunks = chunks_at(tmp_path)
    assert sum(info.size for info in listed_by(chunks).values()) == bytes_below(tmp_path)
    age(tmp_path / f"{NAMESPACE}_r0", 2 * DAY_S)
    collect(chunks, ttl_s=DAY_S)
    assert not store.match(others) + store.match(damaged)
    collect(chunks, ttl_s=DAY_S)
    assert not bytes_below(tmp_path)


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashes, others = store_at(str(tmp_path)), hashes_of(1, 2), hashes_of(3)
    for each in (hashes, others):
        store.publish(each, layers_of(len(each)))
    chunks = chunks_at(tmp_path)
    keys = sorted(listed_by(chunks))
    delete = LocalStore.delete_many

    def refuse(self: LocalStore, names: list[str]) -> list[Exception | None]:
        if any(keys[0].rpartition("/")[0] in name for name in names):
            return [StoreUnavailableError("no") for _ in names]
        return delete(self, names)

    monkeypatch.setattr(LocalStore, "delete_many", refuse)
    failed, done = delete_many(chunks, keys)
    assert isinstance(failed, StoreUnavailableError)
    assert done is None
    with pytest.raises(StoreUnavailableError):
        chunks.delete(str(next(tmp_path.rglob("*.safetensors")).parent.relative_to(tmp_path)))
    assert not store.match(hashes) + store.match(others)


def test_records_and_files_are_as_the_inner_store_has_them(tmp_path: Path) -> None:
    chunks = chunks_at(tmp_path)
    chunks.put("_kvtiers/lease/1", [memoryview(b"x")])
    assert [(info.key, info.size) for info in chunks.keys("_kvtiers/")] == [("_kvtiers/lease/1", 1)]
    assert not chunks.is_block("_kvtiers/lease/1")
    chunks.delete("_kvtiers/lease/1")
    assert listed_by(chunks) == {}


# ---- the bound -------------------------------------------------------------------------------------------------------


def limits_of(place: BoundedTierConfig) -> PrefixLimits:
    found = PrefixLimits.of(place)
    assert found is not None
    return found


def test_writers_publish_what_they_store_and_stop_while_the_root_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    limits = [limits_of(place_at(str(folder), max_bytes="8MiB")) for _ in range(3)]
    stores = [store_at(str(folder), limits=each) for each in limits]
    root = LocalStore(folder)
    for i, store in enumerate(stores):
        assert store.publish(hashes_of(i), layers_of(1, columns=16 << 10))  # 512 KiB
        assert not store.publish(hashes_of(i), layers_of(1, columns=16 << 10))
    for each in limits:
        each._writer_of_process().poll()  # type: ignore[union-attr]
    publish_usage(root, Usage(holder="a", listed=1))
    used = used_bytes(root)
    assert used is not None
    chunks = sum(info.size for info in root.keys(f"{NAMESPACE}_r0"))
    assert chunks <= used <= chunks + 3 * 8192  # what is there already is not counted again
    publish_usage(root, Usage(holder="a", listed=1, full="so much is stored"))
    for each in limits:
        each._writer_of_process().poll()  # type: ignore[union-attr]
    with pytest.raises(StoreFullError, match="so much is stored"):
        stores[0].publish(hashes_of(9), layers_of(1))
    assert stores[0].counts.chunks_refused == 1
    publish_usage(root, Usage(holder="a", listed=1))
    for each in limits:
        each._writer_of_process().poll()  # type: ignore[union-attr]
    assert stores[0].publish(hashes_of(9), layers_of(1))
    root.close()


def test_the_collectors_process_keeps_a_root_in_its_bound(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    limits = limits_of(place_at(str(folder), max_bytes="4MiB", ttl="1h"))
    store = store_at(str(folder), limits=limits)
    collector = limits.start_collector(FileMapper.from_offloading_spec("", FakeSpec()))
    layers = layers_of(1, columns=16 << 10)  # 512 KiB
    removed = 0

    def stored(hashes: list[bytes]) -> bool:
        try:
            return store.publish(hashes, layers)
        except StoreFullError:
            return False

    def told_of_removals(count: int) -> bool:
        nonlocal removed
        collector.note_put(0)  # as an engine at work does: a collector of an idle one stops after half a minute
        for told in collector.take_reports():
            removed += sum(told["report"]["removed_blobs"].values())
        return removed >= count

    try:
        for i in range(12):
            hashes = hashes_of(100 + i)
            collector.note_put(0)
            assert wait_for(partial(stored, hashes), within_s=240)
            (chunk,) = store.match(hashes)
            age(folder / chunk.path, 1800 - i)
            assert wait_for(partial(told_of_removals, i - 6), within_s=240)
            assert bytes_below(folder) <= 5 << 20  # and what was put since its last poll
        assert not store.match(hashes_of(100))
        assert store.match(hashes_of(111))
    finally:
        collector.close()


@pytest.mark.parametrize("options", [{}, {"storage_options": {"anon": False}}], ids=["s3", "s3fs"])
def test_a_bucket_has_a_bound_too(prefix_bucket: str, tmp_path: Path, options: dict[str, Any]) -> None:
    if options:
        pytest.importorskip("s3fs")
    place = place_at(f"{prefix_bucket}/{tmp_path.name}", **options, max_bytes="1MiB")
    chunks = ChunkStore(open_tool_store(place))
    store = PrefixStore(place, NAMESPACE, FINGERPRINT, limits=limits_of(place))
    prompts = [hashes_of(i) for i in range(4)]
    for hashes in prompts:
        assert store.publish(hashes, layers_of(1, columns=8 << 10))  # 256 KiB
    assert collect(chunks, max_bytes=1 << 20, grace_s=0.0)[0]["capacity"] > 0
    assert 0 < sum(bool(store.match(hashes)) for hashes in prompts) < 4


def removed_in(told: dict[str, Any]) -> dict[str, int]:
    """By reason, of what a collector told."""
    removed: dict[str, int] = told.get("report", {}).get("removed_blobs", {})
    return {reason: count for reason, count in removed.items() if count}


def test_the_collectors_process_removes_what_is_old_in_a_bucket(prefix_bucket: str, tmp_path: Path) -> None:
    place = place_at(f"{prefix_bucket}/{tmp_path.name}", ttl="1s")
    store = PrefixStore(place, NAMESPACE, FINGERPRINT)
    assert store.publish(hashes_of(1), layers_of(1))
    limits = limits_of(place)
    limits.policy = replace(limits.policy, grace_s=0.0, poll_s=0.1)
    time.sleep(2.2)  # old at the first look; a bucket's clock has whole seconds
    collector = limits.start_collector(FileMapper.from_offloading_spec("", FakeSpec()))
    try:
        # By its reports, not by asking moto, which is in this process. Collectors let all others go first.
        told = wait_for(lambda: [*filter(removed_in, collector.take_reports())], within_s=240)
        assert [removed_in(each) for each in told] == [{"ttl": 1}]
        assert not store.match(hashes_of(1))
        assert not [*open_tool_store(place).keys(NAMESPACE)]
    finally:
        collector.close()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_bytes": "10 Gigs"}, "max_bytes: '10 Gigs' is not a size; write a number and a unit"),
        ({"max_bytes": 1000}, "max_bytes: 1000 bytes do not hold a block"),
        ({"ttl": "soon"}, "ttl: 'soon' is not a duration"),
        ({"max_bytes": "1GiB", "gc_low": 0.9}, "gc_low"),
    ],
)
def test_a_limit_that_is_none_is_named(tmp_path: Path, limits: dict[str, Any], said: str) -> None:
    for place in (str(tmp_path), "s3://bucket/prefixes"):
        with pytest.raises(ConfigError, match=said):
            place_at(place, **limits)


def test_without_limits_nothing_is_bound(tmp_path: Path) -> None:
    at = partial(place_at, str(tmp_path))
    for limits in (limits_of(at()), limits_of(at(max_bytes=None, ttl=None, min_free=0))):
        assert limits.policy.waits
        assert limits.full() == ""
    assert PrefixLimits.of(place_at("s3://bucket/prefixes")) is None
    assert PrefixLimits.of(at(max_bytes="1GiB", read_only=True)) is None
    assert limits_of(at(ttl="7d")).full() == ""
    assert use_noted_s(at(ttl="20min").capacity_policy()) == 300
    assert use_noted_s(at(max_bytes="1GiB").capacity_policy()) == 600


def test_who_only_loads_notes_uses_as_often(tmp_path: Path) -> None:
    """It has no limits to keep, and what nobody else uses is to stay."""
    assert PrefixStore(place_at(str(tmp_path), ttl="20min"), NAMESPACE, FINGERPRINT, limits=None).use_noted_s == 300


@pytest.mark.parametrize("more", [{}, {"max_bytes": "1PiB"}, {"ttl": "7d"}])
def test_writers_stop_at_the_reserve(tmp_path: Path, more: dict[str, Any]) -> None:
    """D1, as a tier of the same options does."""
    place = place_at(str(tmp_path / "p"), min_free="1PiB", **more)
    limits = PrefixLimits.of(place)
    store = PrefixStore(place, NAMESPACE, FINGERPRINT, limits=limits)
    refused: list[bool] = []
    store.on_full = lambda: refused.append(True)
    with pytest.raises(StoreFullError, match="would leave less than min_free"):
        store.publish([b"a" * 32], {"layer": torch.zeros(16, 8)})
    assert refused == [True]
    assert not [path for path in (tmp_path / "p" / f"{NAMESPACE}_r0").rglob("*") if path.is_file()]


def test_a_folder_on_nfs_is_kept_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.connector.prefixes.place.file_system_type", lambda folder: "nfs4")
    limits = limits_of(place_at(str(tmp_path / "prefixes"), max_bytes="1GiB"))
    assert limits.policy.poll_s == REMOTE_POLL_S
    store = store_at(str(tmp_path / "prefixes"), limits=limits)
    assert store.publish(hashes_of(1), layers_of(1))  # from the first second on
    collect(ChunkStore(NfsStore(tmp_path / "prefixes")), max_bytes=1 << 30)


def test_a_folder_that_is_removed_before_its_file_is_there_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hashes, times = store_at(str(tmp_path)), hashes_of(1), iter(range(20))

    make_folder = RootFolder.make_folder

    def make_and_lose(root: RootFolder, path: str) -> int:
        made = make_folder(root, path)
        if len(os.path.basename(path)) == 32 and next(times) < 3:
            os.rmdir(tmp_path / path)
        return made

    monkeypatch.setattr(RootFolder, "make_folder", make_and_lose)
    assert store.publish(hashes, layers_of(1))
    (chunk,) = store.match(hashes)
    assert len(dict(store.load(chunk, hashes))) == len(LAYERS)


def test_a_chunk_that_went_between_its_match_and_its_load_is_a_miss(tmp_path: Path) -> None:
    store, hashes = store_at(str(tmp_path)), hashes_of(1, 2)
    store.publish(hashes, layers_of(2))
    (chunk,) = store.match(hashes)
    reading = store.load(chunk, hashes)
    next(reading)
    chunks_at(tmp_path).delete(chunk.path)
    with pytest.raises(BlobNotFoundError):
        list(reading)
    assert store.counts.verify_failures == 0
    assert store.publish(hashes, layers_of(2))
