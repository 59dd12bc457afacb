"""W4 on whole tiers on files: a failing system call fails only its own keys, and only while it fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.testing.faults import SyscallFaults
from kvtiers.tiers.tier.store_tier import StoreTierManager, TierOptions
from tests.identity import FakeSpec, block_key
from tests.promises import Record
from tests.tiers.server.in_threads import in_threads

ROWS, ROW_BYTES = 4, 4096
KEYS = [block_key(n) for n in range(ROWS)]
ERRNOS = (errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENOSPC)
OPERATIONS = ("load", "store", "store what is there")


class Tier:
    """A tier on a store. Key n is in row n; a job is one task after another."""

    def __init__(self, store: Store) -> None:
        self.rows = np.zeros((ROWS, ROW_BYTES), np.int8)
        self.stored = np.random.default_rng(1).integers(1, 128, self.rows.shape, np.int8)
        spec = FakeSpec()
        self.mapper = FileMapper.from_offloading_spec("", spec)
        options = TierOptions(circuit_failures=1_000_000, job_deadline_s=600.0)
        self.manager = StoreTierManager(
            spec, self.rows.data, "test", make_backend=in_threads(store), mapper=self.mapper, options=options
        )
        self._jobs = 0

    def load(self) -> set[int]:
        """Which keys are loaded; each of them has the bytes that were stored."""
        self.rows[:] = 0
        loaded = self._run(self.manager.submit_load)
        assert all(np.array_equal(self.rows[number], self.stored[number]) for number in loaded)
        return loaded

    def store(self) -> set[int]:
        self.rows[:] = self.stored
        return self._run(self.manager.submit_store)

    def forget(self) -> None:
        for key in KEYS:
            self.manager.store.delete(self.mapper.relative_name(key))

    def _run(self, submit: Callable[[JobMetadata], None]) -> set[int]:
        self._jobs += 1
        submit(JobMetadata(self._jobs, list(KEYS), np.arange(ROWS, dtype=np.int32)))
        self.manager.drain_jobs()
        (result,) = self.manager.get_finished()
        assert result.job_id == self._jobs
        assert result.success == (len(result.successful_keys) == ROWS)
        return {KEYS.index(key) for key in result.successful_keys}


@pytest.fixture(params=[LocalStore, NfsStore])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    tier = Tier(request.param(tmp_path / "kv"))
    yield tier
    tier.manager.shutdown()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_failed_system_call_fails_only_its_key(tier: Tier, operation: str, forever: bool, record: Record) -> None:
    run = tier.load if operation == "load" else tier.store
    everything = set(range(ROWS))
    assert tier.store() == everything
    if operation == "store":
        tier.forget()
    with SyscallFaults() as dry:
        assert run() == everything
    lost = 0
    for code in ERRNOS:
        for at in range(len(dry.calls)):
            if operation == "store":
                tier.forget()
            with SyscallFaults(at=at, error=code, forever=forever):
                done = run()
            failed = everything - done
            assert len(failed) <= 1 or forever, f"one {errno.errorcode[code]} at call {at} failed keys {failed}"
            lost += len(failed)
            there = tier.load()
            assert there >= done, "what was reported is not there"
            assert there == everything or operation == "store", "a good block was lost by an error"
            assert run() == everything, "it works again"
    assert lost
    record("W4", system_calls=len(dry.calls), faults=len(ERRNOS) * len(dry.calls), keys_that_failed=lost, wrong=0)
