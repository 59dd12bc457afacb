"""A host whose memory, network or proxy damages its reads must not destroy good blocks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.batches import BAD_READS_MAX
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.blocks.seal import TRAILER_BYTES
from kvtiers.tiers.errors import StoreError, StoreFullError, StorePermissionError
from kvtiers.tiers.store import KeyInfo
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.clock import Clock
from tests.identity import FakeSpec, block_key
from tests.tiers.server.in_threads import THREADS, in_threads

ROWS, ROW_BYTES = 16, 4096
BLOB_BYTES = ROW_BYTES + TRAILER_BYTES
KEYS = [block_key(n) for n in range(ROWS)]
PROBE_S = 5.0


class Storage(MemoryStore):
    """A good storage that this host may read wrongly.

    Attributes:
        flips_at: index of the byte that each read of a blob or of its end gets wrong; None: reads are good.
        lists: whether keys may be listed.
        on_replace: raised by a put that replaces a blob.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flips_at: int | None = None
        self.lists = True
        self.on_replace: type[StoreError] | None = None

    def put(self, key: str, parts: Sequence[memoryview], *, overwrite: bool = False) -> bool:
        if overwrite and self.on_replace is not None:
            raise self.on_replace("refused", key=key)
        return super().put(key, parts, overwrite=overwrite)

    def get_into(self, key: str, parts: Sequence[memoryview]) -> None:
        super().get_into(key, parts)
        if self.flips_at is not None and key.endswith(".bin"):
            part, at = (parts[0], self.flips_at) if self.flips_at < ROW_BYTES else (parts[1], self.flips_at - ROW_BYTES)
            part[at] ^= 1

    def get_tail(self, key: str, length: int) -> tuple[int, bytes] | None:
        found = super().get_tail(key, length)
        if found is None or self.flips_at is None or self.flips_at < ROW_BYTES:
            return found
        tail = bytearray(found[1])
        tail[self.flips_at - ROW_BYTES] ^= 1
        return found[0], bytes(tail)

    def keys(self, prefix: str = "") -> Iterator[KeyInfo]:
        if not self.lists:
            raise StorePermissionError("may not list")
        return super().keys(prefix)

    def blobs(self) -> dict[str, bytes]:
        found = {}
        for info in list(super().keys()):
            data = bytearray(info.size)
            super().get_into(info.key, [memoryview(data)])
            found[info.key] = bytes(data)
        return found


class Bench:
    def __init__(self) -> None:
        self.clock = Clock()
        self.storage = Storage()
        self.rows = np.random.default_rng(1).integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
        self.stored = self.rows.copy()
        self.tiers: list[StoreTierManager] = []
        self.jobs = 0

    def tier(self, threads: int = THREADS, **options: Any) -> StoreTierManager:
        lookup = LookupOptions(deadline_s=20, absent_ttl_s=0)
        made = StoreTierManager(
            FakeSpec(),
            self.rows.data,
            "test",
            make_backend=in_threads(self.storage, n_read_threads=threads, n_write_threads=threads, clock=self.clock),
            options=TierOptions(**{"lookup": lookup, "circuit_probe_s": PROBE_S, **options}),
            clock=self.clock,
        )
        self.tiers.append(made)
        return made

    def run(self, tier: StoreTierManager, keys: Sequence[OffloadKey], *, is_load: bool) -> set[OffloadKey]:
        """Move the blocks; returns the keys that succeeded. No load succeeds with wrong bytes."""
        self.jobs += 1
        blocks = [KEYS.index(key) for key in keys]
        self.rows[:] = 0 if is_load else self.stored
        (tier.submit_load if is_load else tier.submit_store)(
            JobMetadata(self.jobs, list(keys), np.asarray(blocks, np.int32))
        )
        tier.drain_jobs()
        (result,) = tier.get_finished()
        done = set(result.successful_keys)
        assert not is_load or all((self.rows[KEYS.index(key)] == self.stored[KEYS.index(key)]).all() for key in done)
        return done

    def store(self, tier: StoreTierManager, keys: Sequence[OffloadKey] = KEYS) -> set[OffloadKey]:
        return self.run(tier, keys, is_load=False)

    def load(self, tier: StoreTierManager, keys: Sequence[OffloadKey] = KEYS) -> set[OffloadKey]:
        return self.run(tier, keys, is_load=True)

    def rot(self, keys: Sequence[OffloadKey]) -> None:
        """Damage the blocks in the storage itself."""
        for key in keys:
            name = self.tiers[0].mapper.relative_name(key)
            blob = bytearray(self.storage.blobs()[name])
            blob[0] ^= 1
            self.storage.put(name, [memoryview(blob)], overwrite=True)

    def probe(self, tier: StoreTierManager) -> str:
        """Run a probe to its end; returns the circuit's state."""
        self.clock.advance(PROBE_S + 1)
        tier.on_schedule_end()
        tier.drain_jobs()
        tier.on_schedule_end()
        return str(tier.circuit_state)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for tier in made.tiers:
        tier.shutdown()


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("flips_at", [0, ROW_BYTES, BLOB_BYTES - 1])
@pytest.mark.parametrize("job_blocks", [1, ROWS])
def test_damaged_loads_cut_tier_off_and_leave_all_blocks(
    bench: Bench, flips_at: int, job_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = bench.tier(), bench.tier()
    bench.store(bad)
    before = bench.storage.blobs()
    bench.storage.flips_at = flips_at
    for first in range(0, ROWS, job_blocks):
        assert bench.load(bad, KEYS[first : first + job_blocks]) == set()
    bench.store(bad)
    assert bench.storage.blobs() == before
    assert bad.circuit_state == "open"
    (error,) = errors_in(caplog)
    assert socket.gethostname() in error
    assert "kvtiers verify" in error
    bench.storage.flips_at = None
    assert bench.load(good) == set(KEYS)


def test_tier_with_damaged_reads_is_used_again_once_a_probe_reads_a_good_block(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    tier = bench.tier()
    bench.store(tier)
    bench.storage.flips_at = 0
    bench.load(tier)
    assert [bench.probe(tier) for _ in range(3)] == ["open"] * 3
    bench.storage.flips_at = None
    assert bench.probe(tier) == "closed"
    assert bench.load(tier) == set(KEYS)
    assert len(errors_in(caplog)) == 1


def test_probe_of_reads_works_without_permission_to_list(bench: Bench) -> None:
    tier = bench.tier()
    bench.store(tier)
    bench.storage.flips_at, bench.storage.lists = 0, False
    bench.load(tier)
    assert bench.probe(tier) == "open"
    bench.storage.flips_at = None
    assert bench.probe(tier) == "closed"


def test_tier_whose_first_blocks_have_rotted_is_used_again_and_healed(bench: Bench) -> None:
    tier = bench.tier()
    bench.store(tier)
    rotten = KEYS[:BAD_READS_MAX]
    bench.rot(rotten)
    assert bench.load(tier, rotten) == set()
    assert tier.circuit_state == "open"
    while bench.probe(tier) != "closed":  # a probe reads a random sample
        pass
    assert bench.store(tier) == set(KEYS)
    assert bench.load(tier) == set(KEYS)


def test_probe_without_blocks_to_read_closes_the_circuit(bench: Bench) -> None:
    tier = bench.tier()
    bench.store(tier)
    bench.storage.flips_at = 0
    bench.load(tier)
    for name in bench.storage.blobs():
        bench.storage.delete(name)
    assert bench.probe(tier) == "closed"


def test_bad_blocks_below_limit_or_with_good_block_between_do_not_cut_tier_off(bench: Bench) -> None:
    tier = bench.tier()
    bench.store(tier)
    bench.rot(KEYS[:-1])
    for first in range(0, ROWS - 1, BAD_READS_MAX - 1):
        bench.load(tier, KEYS[first : first + BAD_READS_MAX - 1])
        assert bench.load(tier, KEYS[-1:]) == {KEYS[-1]}
    for _ in range(2 * BAD_READS_MAX):
        bench.load(tier, KEYS[:1])  # one bad block, asked for again and again
    assert bench.load(tier) == {KEYS[-1]}
    assert tier.circuit_state == "closed"


def test_damaged_trailers_found_by_stores_cut_tier_off(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    tier = bench.tier()
    bench.store(tier)
    bench.storage.flips_at = ROW_BYTES
    bench.store(tier)
    assert tier.circuit_state == "open"
    assert len(errors_in(caplog)) == 1
    bench.storage.flips_at = None
    assert bench.load(bench.tier()) == set(KEYS)


def test_storage_without_room_loses_no_more_than_a_few_blocks_to_damaged_reads(bench: Bench) -> None:
    """Where blocks cannot be replaced, a bad block is moved aside first. Damaged reads must not do so to all blocks."""
    tier = bench.tier(threads=1)
    bench.store(tier)
    name = tier.mapper.relative_name(KEYS[0])
    before = bench.storage.blobs()
    bench.storage.flips_at, bench.storage.on_replace = ROW_BYTES, StoreFullError
    bench.store(tier)
    changed = [key for key, blob in bench.storage.blobs().items() if blob != before[key]]
    assert 0 < len(changed) < BAD_READS_MAX
    assert bench.storage.blobs().keys() == before.keys()
    assert name in before


def test_good_block_misread_by_the_check_before_a_store_is_not_moved_aside(bench: Bench) -> None:
    tier = bench.tier()
    bench.store(tier)
    before = bench.storage.blobs()
    bench.storage.on_replace = StoreFullError
    read = bench.storage.get_into
    bench.storage.flips_at = ROW_BYTES

    def reads_well(key: str, parts: Sequence[memoryview]) -> None:
        bench.storage.flips_at = None
        read(key, parts)

    bench.storage.get_into = reads_well  # type: ignore[method-assign]
    assert bench.store(tier) == set(KEYS)
    assert bench.storage.blobs() == before
