"""Bench: a tier whose servers are processes that tests provoke, kill and stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.base import JobMetadata, JobResult
from kvtiers.tiers.frames import Seats
from kvtiers.tiers.recipe import StoreRecipe
from kvtiers.tiers.server.mapped_file import MappedRegion
from kvtiers.tiers.server.process import ProcessBackend
from kvtiers.tiers.store import Store
from kvtiers.tiers.tier.lookup import LookupOptions
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec, block_key
from tests.tiers.server.hostile_store import HostileStore
from tests.waiting import wait_for

ROW_BYTES, ROWS = 64 << 10, 128
COUNT = 64  # blocks of a job: several pieces, see tiers.server.server
KEYS = [block_key(n) for n in range(COUNT)]
DEADLINE_S = 1.0  # of calls that hang
SEATS = [Seats(1, 1, 2, 2)]


class Bench:
    """A tier on a region that other processes can map. Blocks lie in its first half, and are loaded into the other.

    Args:
        root: the store's ``root_dir``.
    """

    def __init__(
        self,
        root: Path,
        seats: Sequence[Seats] = SEATS,
        memory_bytes_max: int | None = None,
        store_class: type[Store] = HostileStore,
    ) -> None:
        self.root = root
        self.view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
        self.rows = np.asarray(self.view)
        self.rows[:] = np.random.default_rng(1).integers(-128, 128, self.rows.shape, np.int8)
        self.job_id = 0
        region = MappedRegion(self.view)
        recipe = StoreRecipe.of(store_class, root_dir=root)
        self.tier = StoreTierManager(
            FakeSpec(),
            self.view,
            "test",
            options=TierOptions(
                job_deadline_s=120.0,
                circuit_probe_s=0.01,
                shutdown_s=20.0,
                lookup=LookupOptions(deadline_s=60.0, total_s=120.0, absent_ttl_s=0.0),
            ),
            make_backend=lambda work, rows: ProcessBackend(
                recipe, region, rows.row_bytes, work, seats, memory_bytes_max
            ),
        )

    @property
    def pids(self) -> list[int]:
        return self.tier._channel.pids

    @property
    def kills(self) -> int:
        return self.tier._channel.kills

    def has_lost(self, pid: int) -> bool:
        """Whether a server has ended and is reaped."""
        self.tier._channel.poll()
        return not psutil.pid_exists(pid)

    @property
    def how(self) -> Path:
        return Path(f"{self.root}.how")

    def submit(self, op: str) -> None:
        """Begin to store all blocks, or to load them."""
        self.job_id += 1
        blocks = np.arange(COUNT, dtype=np.int32) + (COUNT if op == "get" else 0)
        if op == "get":
            self.rows[COUNT:] = 0
        submit = self.tier.submit_load if op == "get" else self.tier.submit_store
        submit(JobMetadata(self.job_id, KEYS, blocks))

    def finished(self) -> list[JobResult]:
        """The jobs that have ended since the last call."""
        self.tier.on_schedule_end()
        return list(self.tier.get_finished())

    def run(self, op: str, deadline_s: float | None = None) -> JobResult:
        """Store all blocks, or load them; within a shorter deadline than a tier's usual one."""
        channel = self.tier._channel
        before = channel._deadline_s
        channel._deadline_s = before if deadline_s is None else deadline_s
        try:
            self.submit(op)
            (result,) = wait_for(self.finished)
        finally:
            channel._deadline_s = before
        assert result.job_id == self.job_id
        if op == "get":
            for key in result.successful_keys:
                place = KEYS.index(key)
                assert np.array_equal(self.rows[COUNT + place], self.rows[place])
        return result

    def find(self) -> bool:
        """Look all keys up. Whether all of them are there."""
        self.tier._lookup.forget(KEYS)

        def answers() -> list[bool | None]:
            self.tier.on_schedule_end()
            found = [self.tier.lookup(key) for key in KEYS]
            return [] if None in found else found

        return all(wait_for(answers))

    def works(self) -> bool:
        """Whether everything does."""
        return self.run("put").success and self.run("get").success and self.find()

    def provoke(self, method: str, what: str, deadline_s: float = 120.0) -> None:
        """Have the store do it."""
        self.how.write_text(f"{method} {what}")
        channel = self.tier._channel
        channel._deadline_s = deadline_s
        try:
            while self.how.exists():  # a busy machine may not begin a block in time
                self.find() if method == "size" else self.run(method)
                if method == "put":
                    self.remove_some()
        finally:
            channel._deadline_s = 120.0

    def remove_some(self) -> None:
        for key in KEYS[::2]:
            (self.root / self.tier.mapper.relative_name(key)).unlink(missing_ok=True)

    def forks(self) -> list[int]:
        path = Path(f"{self.root}.forks")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []
