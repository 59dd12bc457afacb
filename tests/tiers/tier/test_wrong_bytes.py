"""W1, W2 and W6 on whole tiers of each kind: a load returns the stored bytes or fails.

The tiers are made as from a config file, and their blobs are changed behind their backs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.connector.base import KVCacheGroup, OffloadingConfig
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.file_mapper import block_name
from kvtiers.tiers.blocks.keyring import KeyRing
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.protected_seal import GcmSeal
from kvtiers.tiers.blocks.rows import Rows
from kvtiers.tiers.blocks.seal import TRAILER_BYTES, TRAILER_FIELDS_BYTES, Seal
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.open_store import open_store
from kvtiers.tiers.config.tier_options import TierConfig
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.server import block_mover
from kvtiers.tiers.server.block_mover import BlockMover
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores import vectored_io
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.http_faults import HttpFaultServer
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.identity import CONFIG, FakeSpec, block_key
from tests.promises import Record
from tests.s3_clients import CLIENTS, set_s3_options, use_client, use_credentials

ROWS, ROW_BYTES, PAGE_BYTES = 32, 8192, 4096
BLOB_BYTES = ROW_BYTES + TRAILER_BYTES
VERSION_AT = ROW_BYTES + 8
KEYS = [block_key(n) for n in range(ROWS)]
WAYS_OF_FILES = ("in threads", "in processes", "piece by piece")
IN_MEMORY = ("memory", "memory, encrypt: aes-gcm")
KINDS = [
    *IN_MEMORY,
    *(f"{kind} {way}" for kind in ("fs", "nfs") for way in WAYS_OF_FILES),
    *(f"fsspec {way}" for way in WAYS_OF_FILES[:2]),
    "fsspec by memory://",
    *(f"s3 in threads, by {reader}" for reader in CLIENTS),
    "s3 piece by piece",
    "s3 in processes",
]
#: One of each storage and way, for ``make test``; ``test-rest`` has all kinds.
SOME_KINDS = [
    *IN_MEMORY,
    "fs in threads",
    "fs in processes",
    "nfs piece by piece",
    "fsspec in processes",
    "s3 in threads, by direct",
    "s3 in processes",
]


def cases(kinds: Sequence[str], few: int, many: int) -> list[Any]:
    """Kinds of tiers, and how much to do: few for these in ``make test``, many for all of them in ``test-rest``."""
    return [*((kind, few) for kind in kinds), *(pytest.param(kind, many, marks=pytest.mark.full) for kind in KINDS)]


class Rig:
    """A region, and tiers of one kind on one storage. Key n is in row n.

    Args:
        config: of the tiers.
        root: where they keep their blobs, if in files.
        server: or if in a bucket. If in neither, what they keep is reached by their stores.
    """

    def __init__(
        self,
        config: dict[str, object],
        root: Path | None = None,
        server: HttpFaultServer | None = None,
    ) -> None:
        self.view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
        self.rows = np.frombuffer(self.view, np.int8).reshape(ROWS, ROW_BYTES)
        self.stored = self.rows.copy()
        self._config = config
        self._root = root
        self._server = server
        self._tiers: list[StoreTierManager] = []
        self._jobs = 0
        self._store: Store | None = None

    def tier(self, spec: FakeSpec | None = None) -> StoreTierManager:
        tier = SecondaryTierFactory.create_secondary_tier(self._config, self.view, spec or FakeSpec())
        assert isinstance(tier, StoreTierManager)
        in_processes = self._config["isolation"] == "process"
        assert bool(tier._channel.pids) == (tier.store is None) == in_processes
        self._tiers.append(tier)
        return tier

    def store(self, tier: StoreTierManager, seed: int, keys: Sequence[OffloadKey] = KEYS) -> list[bytes]:
        """Store random bytes under the keys, whatever is there; returns the blobs."""
        for key in keys:
            self._store_of(tier).delete(tier.mapper.relative_name(key))
        self.stored = np.random.default_rng(seed).integers(-128, 128, self.rows.shape, np.int8)
        self.rows[:] = self.stored
        assert self._run(tier, tier.submit_store, keys) == set(range(ROWS))
        return [self._read(tier, tier.mapper.relative_name(key)) for key in keys]

    def load(self, tier: StoreTierManager) -> set[int]:
        """Which keys are loaded; each of them has the bytes that were stored, or the test fails."""
        self.rows[:] = 0
        loaded = self._run(tier, tier.submit_load, KEYS)
        wrong = {number for number in loaded if not np.array_equal(self.rows[number], self.stored[number])}
        assert not wrong, f"blocks {wrong} were loaded with wrong bytes"
        return loaded

    def plant(self, tier: StoreTierManager, blobs: dict[int, bytes]) -> None:
        """Replace blobs behind the tier's back."""
        for number, blob in blobs.items():
            name = tier.mapper.relative_name(KEYS[number])
            if self._server is not None:
                self._server.put_object("bucket", name, blob)
            elif self._root is not None:
                path = self._root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(blob)
            else:
                self._store_of(tier).put(name, [memoryview(blob)], overwrite=True)

    def refuses(self, tier: StoreTierManager, bad: dict[int, bytes]) -> None:
        """Plant bad blobs. A load must read and reject each of them, and load all others."""
        self.plant(tier, bad)
        before = refused(tier)
        assert self.load(tier) == set(range(ROWS)) - bad.keys()
        assert refused(tier) - before == len(bad), "some were absent, which shows nothing"

    def heals(self, tier: StoreTierManager, bad: dict[int, bytes]) -> None:
        """Plant bad blobs. The next store heals each; if only a load can find the damage, after that load."""
        self.plant(tier, bad)
        if any(blob[:ROW_BYTES] != self.stored[number].tobytes() for number, blob in bad.items()):
            assert self.load(tier) == set(range(ROWS)) - bad.keys()
        self.rows[:] = self.stored
        assert self._run(tier, tier.submit_store, KEYS) == set(range(ROWS))
        assert self.load(tier) == set(range(ROWS))

    def in_memory(self) -> Rig:
        """Tiers with the same options in memory, a cheap way to make blobs to plant."""
        kept = ("encrypt", "keys_env", "n_read_threads", "n_write_threads", "job_deadline_s")
        config = {name: value for name, value in self._config.items() if name in kept}
        return Rig(config | {"type": "memory", "isolation": "thread"})

    def close(self) -> None:
        for tier in self._tiers:
            tier.shutdown()
        if self._store is not None:
            self._store.close()

    def _read(self, tier: StoreTierManager, name: str) -> bytes:
        data = bytearray(BLOB_BYTES)
        self._store_of(tier).get_into(name, [memoryview(data)])
        return bytes(data)

    def _store_of(self, tier: StoreTierManager) -> Store:
        """The tier's own store, or one on the same storage if the tier's processes have theirs."""
        if tier.store is not None:
            self._store = tier.store
        if self._store is None:
            config = parse_tier(self._config)
            assert isinstance(config, TierConfig)
            self._store = open_store(config)
        return self._store

    def _run(
        self, tier: StoreTierManager, submit: Callable[[JobMetadata], None], keys: Sequence[OffloadKey]
    ) -> set[int]:
        self._jobs += 1
        submit(JobMetadata(self._jobs, list(keys), np.arange(ROWS, dtype=np.int32)))
        tier.drain_jobs()
        (result,) = tier.get_finished()
        assert result.success == (len(result.successful_keys) == ROWS)
        return {keys.index(key) for key in result.successful_keys}


def refused(tier: StoreTierManager) -> int:
    """How many blobs were found bad so far."""
    samples = tier.metrics.snapshot()
    return sum(int(sample.value) for sample in samples if sample.name == "kvtiers_verify_failures_total")


@pytest.fixture
def rig(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boto_models_once: None
) -> Iterator[Rig]:
    kind, _, way = request.param.partition(" ")
    kind = kind.rstrip(",")
    root = tmp_path / "kv"
    config: dict[str, Any] = {
        "type": kind,
        "isolation": "process" if way.startswith("in processes") else "thread",
        "n_read_threads": 1,
        "n_write_threads": 1,
        "job_deadline_s": 120.0,  # a busy machine is no fault of the storage
    }
    if way == "piece by piece":
        monkeypatch.setattr(block_mover, "PIECEWISE_BYTES_MIN", 0)
        monkeypatch.setattr(vectored_io, "READ_PIECE_BYTES", PAGE_BYTES)
        monkeypatch.setattr(vectored_io, "WRITE_PIECE_BYTES", PAGE_BYTES)
        monkeypatch.setattr(vectored_io, "RUN_SLACK_BYTES", 0)
    if ": " in way:
        name, _, value = way.partition(": ")
        monkeypatch.setenv("KEYS_OF_THIS_TEST", bytes(range(32)).hex())
        config |= {name: value, "keys_env": "KEYS_OF_THIS_TEST"}
    if kind != "s3":
        by_memory = "memory" in request.param
        if kind == "fsspec":
            config["url"] = f"memory:/{root}" if by_memory else f"file://{root}"
        elif kind != "memory":
            config |= {"root_dir": str(root), "min_free": 0}
        made = Rig(config, None if by_memory else root)
        yield made
        made.close()
        return
    use_credentials(monkeypatch)
    with HttpFaultServer() as server:
        use_client(monkeypatch, way.rpartition(" ")[2])
        set_s3_options(monkeypatch, request_timeout_s=60.0)
        config |= {"bucket": "bucket", "endpoint_url": server.endpoint_url}
        made = Rig(config, server=server)
        yield made
        made.close()


class Corruptor:
    """Makes bad blobs of good ones.

    Args:
        good: what is stored under each key.
        earlier: what was stored there before.
        foreign: for each of several other places, what is stored there under the same hashes.
    """

    def __init__(self, good: list[bytes], earlier: list[bytes], foreign: list[list[bytes]], seed: int) -> None:
        self._good = good
        self._earlier = earlier
        self._foreign = foreign
        self._random = random.Random(seed)
        self._ways = [
            self._flip_a_bit, self._truncate, self._extend, self._swap, self._lose_a_page, self._change_the_version,
            self._mix_with_an_earlier_one, self._mix_with_another, self._take_anothers, self._overwrite_some,
        ]  # fmt: skip

    def some(self) -> dict[int, bytes]:
        """Bad blobs for all keys but a few."""
        spared = self._random.sample(range(ROWS), self._random.randint(1, 3))
        return {
            number: bytes(self._random.choice(self._ways)(bytearray(self._good[number]), number))
            for number in set(range(ROWS)) - set(spared)
        }

    def _flip_a_bit(self, blob: bytearray, number: int) -> bytearray:
        blob[self._random.randrange(BLOB_BYTES)] ^= 1 << self._random.randrange(8)
        return blob

    def _truncate(self, blob: bytearray, number: int) -> bytearray:
        lengths = (0, 1, 4095, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 4095, BLOB_BYTES - 1)
        del blob[self._random.choice((*lengths, self._random.randrange(BLOB_BYTES))) :]
        return blob

    def _extend(self, blob: bytearray, number: int) -> bytearray:
        return blob + self._random.choice((b"\0", bytes(4095), bytes(4096), blob[-TRAILER_BYTES:], blob))

    def _swap(self, blob: bytearray, number: int) -> bytes:
        return self._good[(number + self._random.randrange(1, ROWS)) % ROWS]

    def _lose_a_page(self, blob: bytearray, number: int) -> bytearray:
        return self._page_of(bytes(BLOB_BYTES), blob)

    def _change_the_version(self, blob: bytearray, number: int) -> bytearray:
        blob[VERSION_AT] = self._random.choice((0, 2, self._random.randrange(3, 256)))
        return blob

    def _mix_with_an_earlier_one(self, blob: bytearray, number: int) -> bytearray:
        return self._page_of(self._earlier[number], blob)

    def _mix_with_another(self, blob: bytearray, number: int) -> bytearray:
        return self._page_of(self._good[(number + self._random.randrange(1, ROWS)) % ROWS], blob)

    def _take_anothers(self, blob: bytearray, number: int) -> bytes:
        return self._random.choice(self._foreign)[number]

    def _overwrite_some(self, blob: bytearray, number: int) -> bytearray:
        start = self._random.randrange(ROW_BYTES - 64)
        blob[start : start + 64] = self._random.randbytes(64)
        return blob

    def _page_of(self, other: bytes, blob: bytearray) -> bytearray:
        start = self._random.randrange(BLOB_BYTES // PAGE_BYTES) * PAGE_BYTES
        blob[start : start + PAGE_BYTES] = other[start : start + PAGE_BYTES]
        return blob


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rig", "count"), cases(SOME_KINDS, 93, 10_000), indirect=["rig"])
def test_corrupted_blocks_are_not_loaded(rig: Rig, count: int, record: Record) -> None:
    """W1: flip, truncate, extend, swap, zero page, stale version, other group, rank and model."""
    others = [FakeSpec().changed("model", revision="other"), FakeSpec().changed("parallel", rank=1)]
    memory = rig.in_memory()
    foreign = [memory.store(memory.tier(spec), 1) for spec in others]
    own = memory.tier()
    foreign.append(memory.store(own, 1, [block_key(n, group=1) for n in range(ROWS)]))
    earlier = memory.store(own, 2)
    memory.close()
    tier = rig.tier()
    good = rig.store(tier, 3)
    corruptor = Corruptor(good, earlier, foreign, seed=count)
    done = 0
    while done < count:
        bad = corruptor.some()
        rig.refuses(tier, bad)
        rig.plant(tier, {number: good[number] for number in bad})
        done += len(bad)
    assert rig.load(tier) == set(range(ROWS))
    record("W1", corruptions=done, wrong=0)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rig", "count"),
    cases([*IN_MEMORY, "fs in threads", "fs in processes", "s3 in threads, by direct"], 31, 4096),
    indirect=["rig"],
)
def test_block_with_any_flipped_bit_is_not_loaded(rig: Rig, count: int, record: Record) -> None:
    """W2: ``count`` bytes of each part. The trailer has 4,096 bytes."""
    dice = random.Random(2)
    tier = rig.tier()
    good = rig.store(tier, 1)
    fields_end = ROW_BYTES + TRAILER_FIELDS_BYTES
    parts = (range(ROW_BYTES), range(ROW_BYTES, fields_end), range(fields_end, BLOB_BYTES))
    places = [place for part in parts for place in dice.sample(part, min(count, len(part)))]
    dice.shuffle(places)
    for first in range(0, len(places), ROWS - 1):
        bad = {}
        for number, at in enumerate(places[first : first + ROWS - 1]):
            blob = bytearray(good[number])
            blob[at] ^= 1 << dice.randrange(8)
            bad[number] = bytes(blob)
        rig.refuses(tier, bad)
        rig.plant(tier, {number: good[number] for number in bad})
    record("W2", bytes_flipped=len(places), accepted=0)


@pytest.mark.parametrize(
    "make_seal",
    [Seal, partial(GcmSeal, keys=KeyRing(bytes(32)))],
    ids=["none", "aes-gcm"],
)
def test_block_with_any_flipped_trailer_bit_is_healed(make_seal: Callable[[bytes, int], Seal], record: Record) -> None:
    """W7: the next store replaces the block. With keys, a store checks the same fields, so fewer bits are enough."""
    payload = np.random.default_rng(7).integers(-128, 128, (1, PAGE_BYTES), np.int8)
    seal = make_seal(bytes(32), 0)
    store = MemoryStore()
    mover = BlockMover("test", store, "test_r0", seal, Rows(payload.data), print)
    name = block_name("test_r0", KEYS[0])
    pairs = [(KEYS[0], 0)]
    assert mover.store_batch(pairs).outcomes == {"moved": 1}
    blob = bytearray(PAGE_BYTES + TRAILER_BYTES)
    store.get_into(name, [memoryview(blob)])
    bits = range(8 * TRAILER_BYTES)
    if make_seal is not Seal:
        bits = range(8 * TRAILER_FIELDS_BYTES)
    for bit in bits:
        blob[PAGE_BYTES + bit // 8] ^= 1 << bit % 8
        store.put(name, [memoryview(blob)], overwrite=True)
        blob[PAGE_BYTES + bit // 8] ^= 1 << bit % 8
        batch = mover.store_batch(pairs)
        assert (batch.outcomes, batch.healed) == ({"moved": 1}, 1), f"bit {bit}"
    assert mover.store_batch(pairs).outcomes == {"already_stored": 1}
    before = payload.copy()
    assert mover.load_batch(pairs).succeeded == KEYS[:1]
    assert (payload == before).all()
    record("W7", bits_flipped=len(bits), not_healed=0)


@pytest.mark.timeout(3600)  # ends a hang: three kinds of S3 side by side on two cores take over 20 minutes
@pytest.mark.parametrize(
    ("rig", "count"),
    [
        *((kind, 31) for kind in (*IN_MEMORY, "fs in processes", "nfs in processes", "fsspec in threads")),
        *(pytest.param(kind, 8 * TRAILER_BYTES, marks=pytest.mark.full) for kind in KINDS),
    ],
    indirect=["rig"],
)
def test_block_with_any_flipped_bit_is_healed(rig: Rig, count: int, record: Record) -> None:
    """W7: all bits of the trailer's first fields, and so many of each other part."""
    dice = random.Random(7)
    tier = rig.tier()
    good = rig.store(tier, 1)
    identity_end, fields_end = 8 * (ROW_BYTES + 24), 8 * (ROW_BYTES + TRAILER_FIELDS_BYTES)
    parts = (range(identity_end, fields_end), range(fields_end, 8 * BLOB_BYTES))
    of_trailer = [*range(8 * ROW_BYTES, identity_end)]
    for part in parts:
        of_trailer += dice.sample(part, min(count, len(part)))
    of_payload = dice.sample(range(8 * ROW_BYTES), min(count, 8 * ROW_BYTES))
    for bits in (of_trailer, of_payload):  # a store sees the one kind, only a load the other
        for first in range(0, len(bits), ROWS - 1):
            bad = {}
            for number, bit in enumerate(bits[first : first + ROWS - 1]):
                blob = bytearray(good[number])
                blob[bit // 8] ^= 1 << bit % 8
                bad[number] = bytes(blob)
            rig.heals(tier, bad)
    record("W7", bits_flipped=len(of_trailer) + len(of_payload), not_healed=0)


@dataclass(frozen=True)
class ConfigOnPlatform(OffloadingConfig):
    """A config with the field that vLLM's translation adds."""

    platform: str | None = None


SPEC = FakeSpec(ConfigOnPlatform(**{field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)}))
#: Part of the config, its field, another value.
IDENTITY: list[tuple[str, str, Any]] = [
    ("", "groups", (KVCacheGroup(16, CONFIG.groups[0].layer_names),)),
    ("", "groups", (KVCacheGroup(CONFIG.groups[0].tokens_per_block, ("model.layers.7",)),)),
    ("", "groups", CONFIG.groups * 2),
    ("", "canonical_layout", True),
    ("", "kv_cache_layout", "HND"),
    ("", "platform", "another"),
    ("", "inference_engine", "another"),
    ("", "engine", {"option": "another"}),
    ("", "ranks_apart", True),
    ("model", "name", "another/model"),
    ("model", "dtype", "torch.float16"),
    ("model", "revision", "def456"),
    ("cache", "tokens_per_hash", 64),
    ("cache", "blocks_per_chunk", 2),
    ("cache", "hash_algorithm", "xxhash"),
    *(("parallel", name, 2) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "rank")),
]
#: Says who an engine is and what it was told, not what its blocks mean.
NO_IDENTITY = {"engine_id", "extra_config", "replicated_layout", "world_size", "is_parallelism_agnostic"}


def test_every_config_field_is_part_of_the_identity_or_listed_as_excluded() -> None:
    parts = {part for part, _, _ in IDENTITY} - {""}
    configs: list[Any] = [SPEC.config, *(getattr(SPEC.config, part) for part in parts)]
    found = {field.name for config in configs for field in fields(config)}
    assert found == NO_IDENTITY | parts | {name for _, name, _ in IDENTITY}


@pytest.mark.parametrize("rig", ["fs in threads"], indirect=True)
@pytest.mark.parametrize(("part", "name", "value"), IDENTITY)
def test_blocks_of_another_identity_are_not_loaded(rig: Rig, part: str, name: str, value: object) -> None:
    """W6: each identity field changed alone."""
    good = rig.store(rig.tier(SPEC), 1)
    other = rig.tier(SPEC.changed(part, **{name: value}))
    assert rig.load(other) == set()
    assert refused(other) == 0, "it looked at blobs of another namespace"
    own = rig.store(other, 2)
    rig.refuses(other, {number: good[number] for number in range(1, ROWS)})
    rig.plant(other, dict(enumerate(own)))
    assert rig.load(other) == set(range(ROWS))
