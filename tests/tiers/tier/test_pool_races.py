"""DualQueueThreadPool under random interleavings of its threads."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from kvtiers.tiers.tier.pool import DualQueueThreadPool, Unfinished

from kvtiers.tiers.tier import pool as pool_module
from tests.promises import Record
from tests.tiers.tier.test_pool import Gate, let_go, wait_entered
from tests.waiting import wait_for

POOLS = 80
ROUNDS_PER_POOL = 25
Work = Gate | int  # an int: how often the task is run until it has ended


class YieldingDeque(deque[Any]):
    """Often lets other threads run between two looks at a queue."""

    def popleft(self) -> Any:
        try:
            return super().popleft()
        finally:
            self._yield()

    def __len__(self) -> int:
        length = super().__len__()
        self._yield()
        return length

    def _yield(self) -> None:
        if random.random() < 0.3:
            time.sleep(0)


@pytest.fixture
def yielding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pool_module, "deque", YieldingDeque)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


def run(tasks: Sequence[Work]) -> list[object]:
    return [
        task() if isinstance(task, Gate) else Unfinished(task - 1) if task > 1 else random.random() for task in tasks
    ]


def joins(first: Work) -> Callable[[Work], bool]:
    """Nothing joins a gate, as it would have to wait for it."""
    others = iter(range(3))
    return lambda task: not isinstance(first, Gate) and not isinstance(task, Gate) and next(others, None) is not None


class Rounds:
    """Submits random jobs to a pool of its own, and notes what the pool reports."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.generals = dice.randint(2, 4)
        self.reads_only = dice.randint(0, 2)
        n_reads = dice.randint(1, self.generals - 1)
        self.pool = DualQueueThreadPool[Work, object](
            n_reads,
            self.generals - n_reads,
            n_read_only_threads=self.reads_only,
            run=run,
            joins=joins,
            name="race",
            jobs_max=1 << 20,
            cost_max=1,
        )
        self.submitted = 0
        self.reported: list[int] = []

    def submit(self, works: Sequence[Work], *, is_read: bool) -> None:
        self.submitted += 1
        self.pool.submit(self.submitted, works, is_read=is_read)

    def submit_some(self, *, only_reads: bool = False) -> None:
        for _ in range(self.dice.randint(1, 12)):
            works = [self.dice.randint(1, 3) for _ in range(self.dice.randint(0, 4))]
            self.submit(works, is_read=only_reads or self.dice.random() < 0.5)
            if self.dice.random() < 0.1:
                self.pool.cancel_late(self.dice.choice([0.0, 0.001, 60.0]))
            if self.dice.random() < 0.3:
                self.note_reported()

    def note_reported(self) -> None:
        self.reported += [job.job_id for job in self.pool.get_finished()]

    def have_ended(self, *, but: int = 0) -> bool:
        self.note_reported()
        return len(self.reported) >= self.submitted - but

    def run_round(self) -> None:
        """All jobs end beside writes that hang, while a single thread is left that takes them."""
        gates = [Gate() for _ in range(self.dice.randint(0, self.generals - (not self.reads_only)))]
        for gate in gates:
            self.submit([gate], is_read=False)
        if self.dice.random() < 0.5:  # else threads become busy while reads come, and late gates may be cancelled
            wait_entered(*gates)
        self.submit_some(only_reads=len(gates) == self.generals)
        wait_for(lambda: self.have_ended(but=len(gates)))
        if self.dice.random() < 0.5:  # threads become free, and busy again, while jobs come
            let_go(*gates)
        self.submit_some(only_reads=len(gates) == self.generals)
        let_go(*gates)
        wait_for(self.have_ended)


@pytest.mark.usefixtures("yielding")
def test_no_job_is_lost_and_no_task_waits_while_a_thread_that_takes_it_is_idle(record: Record) -> None:
    dice, jobs = random.Random(7), 0
    for _ in range(POOLS):
        rounds = Rounds(dice)
        for _ in range(ROUNDS_PER_POOL):
            rounds.run_round()
        rounds.submit_some()
        assert rounds.pool.shutdown(120)
        rounds.note_reported()
        assert sorted(rounds.reported) == list(range(1, rounds.submitted + 1))
        jobs += rounds.submitted
    record("S3", jobs=jobs, missing=0, twice=0)
