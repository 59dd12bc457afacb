from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from kvtiers.tiers.tier.pool import Cancelled, DualQueueThreadPool, FinishedJob, Unfinished

from kvtiers.tiers.errors import QueueFullError
from kvtiers.tiers.tier import pool as pool_module
from tests.promises import Record
from tests.waiting import wait_for

Task = Callable[[], object]
Pool = DualQueueThreadPool[Task, object]


def call_each(tasks: Sequence[Task]) -> list[object]:
    return [task() for task in tasks]


class Gate:
    """A task that says when it runs and waits until it is let go."""

    def __init__(self, result: object = "gated") -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.result = result

    def __call__(self) -> object:
        self.entered.set()
        assert self.go.wait(120)
        return self.result


def wait_entered(*gates: Gate) -> None:
    """Until they all run."""
    for gate in gates:
        assert gate.entered.wait(120)


def let_go(*gates: Gate) -> None:
    """Have them end."""
    for gate in gates:
        gate.go.set()


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def build(
        reads: int = 1, writes: int = 1, jobs_max: int = 1000, cost_max: int = 1 << 40, reads_only: int = 0
    ) -> Pool:
        limits: dict[str, Any] = {"jobs_max": jobs_max, "cost_max": cost_max, "n_read_only_threads": reads_only}
        pools.append(Pool(reads, writes, run=call_each, name="test", **limits))
        return pools[-1]

    yield build
    for pool in pools:
        assert pool.shutdown(120)


def finish(pool: Pool) -> dict[int, FinishedJob[object]]:
    assert pool.wait_idle(120)
    return {job.job_id: job for job in pool.get_finished()}


def test_outcomes_are_parallel_to_tasks(make: Callable[..., Pool]) -> None:
    pool = make(3, 3)
    for job_id in range(50):
        pool.submit(job_id, [lambda n=n: n * n for n in range(20)], is_read=job_id % 2 == 0)  # type: ignore[misc]
    done = finish(pool)
    assert sorted(done) == list(range(50))
    for job in done.values():
        assert job.outcomes == tuple(n * n for n in range(20))
        assert job.duration_s >= 0
    assert pool.get_finished() == []


def test_each_kind_of_thread_takes_its_own_queue_first(make: Callable[..., Pool]) -> None:
    pool = make(1, 1)
    gates = [Gate(), Gate()]
    pool.submit(0, gates, is_read=True)
    wait_entered(*gates)
    order: list[tuple[str, str]] = []

    def note(kind: str) -> object:
        order.append((threading.current_thread().name.removeprefix("test-"), kind))
        return True

    for n in range(1, 6):
        pool.submit(n, [lambda: note("store")], is_read=False)
    for n in range(6, 11):
        pool.submit(n, [lambda: note("load")], is_read=True)
    # One thread only goes on; whichever it is, it does all of its own kind before any of the other's.
    gates[0].go.set()
    wait_for(lambda: len(order) == 10)
    gates[1].go.set()
    finish(pool)
    own = "load" if order[0][0] == "read0" else "store"
    assert len({thread for thread, _ in order}) == 1
    assert [kind for _, kind in order[:5]] == [own] * 5


@pytest.mark.parametrize("is_read", [True, False])
def test_either_kind_of_thread_drains_the_others_queue(make: Callable[..., Pool], is_read: bool) -> None:
    pool = make(1, 1)
    gates = [Gate(), Gate()]
    pool.submit(1, gates, is_read=is_read)
    for gate in gates:  # both run at once, so the thread of the other kind took one
        assert gate.entered.wait(120)
        gate.go.set()
    assert set(finish(pool)) == {1}


def test_a_read_does_not_wait_for_the_writes_that_run(make: Callable[..., Pool]) -> None:
    pool = make(2, 1, reads_only=1)
    stores, late = [Gate(), Gate(), Gate()], Gate()
    pool.submit(1, [*stores, late], is_read=False)
    wait_entered(*stores)
    for job_id in (2, 3):  # again and again
        pool.submit(job_id, [lambda: "loaded"] * 3, is_read=True)
        done: list[FinishedJob[object]] = []
        wait_for(lambda done=done: done.extend(pool.get_finished()) or done)  # type: ignore[misc]
        assert [job.job_id for job in done] == [job_id]
    assert not late.entered.is_set()
    let_go(*stores, late)
    assert set(finish(pool)) == {1}


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_any_exception_fails_its_task_only(make: Callable[..., Pool], error: BaseException) -> None:
    """S3: BaseException included; the thread lives on and the job is reported."""

    def fail() -> object:
        raise error

    pool = make(1, 1)
    pool.submit(1, [fail, lambda: "fine", fail], is_read=True)
    pool.submit(2, [lambda: "after"], is_read=False)
    done = finish(pool)
    assert done[1].outcomes == (error, "fine", error)
    assert done[2].outcomes == ("after",)
    assert error.__traceback__ is None


def test_limits_refuse_and_queue_nothing(make: Callable[..., Pool]) -> None:
    pool = make(1, 1, jobs_max=2, cost_max=100)
    gates = [Gate(), Gate()]
    pool.submit(1, [gates[0]], is_read=False, cost=60)
    with pytest.raises(QueueFullError, match="60 of 100"):
        pool.submit(2, [lambda: 1], is_read=False, cost=50)
    pool.submit(2, [gates[1]], is_read=False, cost=40)
    with pytest.raises(QueueFullError, match="2 jobs"):
        pool.submit(3, [lambda: 1], is_read=False)
    with pytest.raises(ValueError, match="job 2 is already"):
        pool.submit(2, [lambda: 1], is_read=True)
    let_go(*gates)
    assert set(finish(pool)) == {1, 2}
    pool.submit(3, [lambda: 1], is_read=False, cost=1000)  # alone, any size: or it could never run
    assert set(finish(pool)) == {3}


def test_reads_are_never_refused_and_take_no_room_from_writes(make: Callable[..., Pool]) -> None:
    pool = make(1, 1, jobs_max=4, cost_max=100)
    gate = Gate()
    pool.submit(1, [gate], is_read=False, cost=100)
    for job_id in (2, 3):
        pool.submit(job_id, [gate], is_read=True, cost=1000)
    with pytest.raises(QueueFullError, match="100 of 100"):
        pool.submit(4, [lambda: 1], is_read=False, cost=1)
    gate.go.set()
    assert set(finish(pool)) == {1, 2, 3}
    gate = Gate()
    for job_id in range(10):
        pool.submit(job_id, [gate], is_read=True, cost=1000)
    gate.go.set()
    assert set(finish(pool)) == set(range(10))
    pool.submit(11, [lambda: 1], is_read=False, cost=1000)
    assert set(finish(pool)) == {11}


def test_where_all_threads_hang_what_waits_too_long_is_cancelled(make: Callable[..., Pool]) -> None:
    pool = make(1, 1)
    gates = [Gate(), Gate()]
    pool.submit(1, [*gates, lambda: "never"], is_read=True)
    wait_entered(*gates)
    pool.submit(2, [lambda: "never"], is_read=True)
    pool.submit(3, [lambda: "never"] * 3, is_read=False)
    pool.cancel_late(60.0)
    assert pool.get_finished() == []
    pool.cancel_late(0.0)
    assert {job.job_id for job in pool.get_finished()} == {2, 3}
    let_go(*gates)
    (job,) = finish(pool).values()
    assert isinstance(job.outcomes[2], Cancelled)
    pool.submit(4, [lambda: "after"], is_read=True)
    assert finish(pool)[4].outcomes == ("after",)


def test_a_task_that_comes_between_two_looks_is_not_left_behind(
    make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread finds nothing of its own kind; before it looks for the other kind, another one takes that."""
    pool = make(1, 1)
    gate, held, looked = Gate(), threading.Event(), threading.Event()
    names: list[str] = []

    def busy() -> object:
        names.append(threading.current_thread().name)
        return gate()

    pool.submit(1, [busy], is_read=True)
    assert gate.entered.wait(120)
    busy_reads = "read" in names[0]
    take = pool_module._take

    def slowly(queue: Any) -> Any:
        task = take(queue)
        if task is None and not looked.is_set() and threading.current_thread().name != names[0]:
            looked.set()
            assert held.wait(120)
        return task

    monkeypatch.setattr(pool_module, "_take", slowly)
    second = Gate()
    pool.submit(2, [second], is_read=busy_reads)
    assert looked.wait(120)
    gate.go.set()
    pool.submit(3, [lambda: "third"], is_read=not busy_reads)
    assert second.entered.wait(120)  # by the one that was busy: its kind comes first
    held.set()
    second.go.set()
    assert set(finish(pool)) == {1, 2, 3}


def test_a_thread_waits_only_where_both_queues_were_empty_at_once(
    make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread looks, three others take tasks of the other kind than the tasks that woke them."""
    steps: list[tuple[deque[Any], Callable[[], None]]] = []
    looker: list[threading.Thread] = []

    def next_step(queue: deque[Any]) -> None:
        if steps and queue is steps[0][0] and threading.current_thread() in looker:
            steps.pop(0)[1]()

    class Watched(deque[Any]):
        def popleft(self) -> Any:
            try:
                return super().popleft()
            finally:
                next_step(self)

        def __bool__(self) -> bool:
            waits = len(self) > 0
            next_step(self)
            return waits

    monkeypatch.setattr(pool_module, "deque", Watched)
    pool = make(2, 2)
    threads: dict[str, threading.Thread] = {}
    gates = {}

    class Named(Gate):
        def __call__(self) -> object:
            thread = threading.current_thread()
            gates[thread.name], threads[thread.name] = self, thread
            return super().__call__()

    busy = [Named() for _ in range(4)]
    pool.submit(0, busy, is_read=True)
    wait_entered(*busy)
    looker.append(threads["test-read0"])
    late = {job_id: Gate() for job_id in range(1, 5)}

    def submit_read_and_free(job_id: int, thread: str) -> None:
        """``thread`` takes the task that was submitted before, which it prefers."""
        pool.submit(job_id, [late[job_id]], is_read=job_id % 2 == 0)
        gates[thread].go.set()
        assert late[job_id - 1].entered.wait(120)

    steps += [
        (pool._reads, lambda: submit_read_and_free(2, "test-write0")),
        (pool._writes, lambda: submit_read_and_free(3, "test-read1")),
        (pool._reads, lambda: submit_read_and_free(4, "test-write1")),
    ]
    gates["test-read0"].go.set()
    wait_for(lambda: pool._began[0] is None)
    pool.submit(1, [late[1]], is_read=False)
    wait_entered(late[4])
    let_go(*late.values())
    assert set(finish(pool)) == {0, 1, 2, 3, 4}


def test_tasks_that_join_are_run_together_and_each_has_its_outcome() -> None:
    gates = [Gate(), Gate()]
    groups: list[list[int | Gate]] = []

    def run(tasks: Sequence[int | Gate]) -> list[object]:
        groups.append(list(tasks))
        return [task() if isinstance(task, Gate) else task * 10 for task in tasks]

    def joins(_: int | Gate) -> Callable[[int | Gate], bool]:
        others = iter(range(2))
        return lambda task: isinstance(task, int) and next(others, None) is not None

    pool = DualQueueThreadPool[int | Gate, object](
        1, 1, run=run, joins=joins, name="test", jobs_max=1000, cost_max=1000, n_read_only_threads=1
    )
    pool.submit(100, [*gates, third := Gate()], is_read=True)
    wait_entered(*gates, third)
    for job_id in range(10):
        pool.submit(job_id, [2 * job_id, 2 * job_id + 1], is_read=True)
    gates[0].go.set()  # one thread does all that waits
    done: dict[int, FinishedJob[object]] = {}
    wait_for(lambda: done.update({job.job_id: job for job in pool.get_finished()}) or len(done) == 10)
    assert all(done[job_id].outcomes == (20 * job_id, 20 * job_id + 10) for job_id in range(10))
    sizes = [len(group) for group in groups[3:]]
    assert max(sizes) == 3
    assert sum(sizes) == 20
    # Each further thread still hears of what comes next.
    late = [Gate(), Gate(), Gate()]
    let_go(gates[1], third)
    pool.submit(200, list(late), is_read=True)
    wait_entered(*late)
    let_go(*late)
    assert pool.shutdown(120)


def test_what_is_unfinished_comes_before_what_waits() -> None:
    order: list[int] = []

    def run(tasks: Sequence[list[int]]) -> list[object]:
        (left,) = tasks
        order.append(left[0])
        return [Unfinished(left[1:]) if left[1:] else "done"]

    pool = DualQueueThreadPool[list[int], object](1, 1, run=run, name="test", jobs_max=10, cost_max=10)
    pool.submit(1, [[1, 2, 3]], is_read=False)
    done = finish(pool)  # type: ignore[arg-type]
    assert done[1].outcomes == ("done",)
    assert order == [1, 2, 3]
    assert pool.shutdown(120)


Steps = list[Task]  # a task that runs its first step and leaves the others unfinished


def run_first_steps(tasks: Sequence[Steps]) -> list[object]:
    done = [steps[0]() for steps in tasks]
    return [Unfinished(steps[1:]) if steps[1:] else result for steps, result in zip(tasks, done, strict=True)]


def cancel_steps(steps: Steps) -> object:
    return f"{len(steps)} cancelled"


def test_a_late_rest_is_cancelled_also_behind_the_rest_of_a_younger_job() -> None:
    now_s = 0.0
    pool = DualQueueThreadPool[Steps, object](
        1,
        2,
        run=run_first_steps,
        cancel=cancel_steps,
        name="test",
        jobs_max=10,
        cost_max=10,
        clock=lambda: now_s,
    )
    busy: dict[str, Gate] = {}

    class Busy(Gate):
        def __call__(self) -> object:
            busy[threading.current_thread().name] = self
            return super().__call__()

    gates = [Busy() for _ in range(3)]
    pool.submit(0, [[gate] for gate in gates], is_read=True)
    wait_entered(*gates)
    old, young, *hung = (Gate() for _ in range(4))
    for job_id, gate, thread in ((1, old, "test-write0"), (2, young, "test-write1")):
        pool.submit(job_id, [[gate, lambda: "never", lambda: "never"]], is_read=True)
        busy[thread].go.set()
        wait_entered(gate)
        now_s += 5.0
    for job_id, first, second in ((3, old, hung[0]), (4, young, hung[1])):
        pool.submit(job_id, [[second]], is_read=False)
        first.go.set()
        wait_entered(second)
    pool.cancel_late(7.0)
    assert {job.job_id: job.outcomes for job in pool.get_finished()} == {1: ("2 cancelled",)}
    tokens = pool._tokens.qsize()
    for _ in range(3):  # in each step of the scheduler, while everything hangs
        pool.cancel_late(7.0)
    assert pool._tokens.qsize() == tokens
    pool.cancel_late(2.0)
    assert {job.job_id: job.outcomes for job in pool.get_finished()} == {2: ("2 cancelled",)}
    let_go(*gates, *hung)
    assert pool.shutdown(120)


def test_rests_of_one_message_keep_their_order() -> None:
    gate = Gate()
    order: list[int] = []

    def note(job_id: int) -> object:
        order.append(job_id)
        return "noted"

    def joins(first: Steps) -> Callable[[Steps], bool]:
        others = iter(range(2))
        return lambda task: len(task) > 1 and first[0] is gate and next(others, None) is not None

    pool = DualQueueThreadPool[Steps, object](
        1, 1, run=run_first_steps, joins=joins, name="test", jobs_max=100, cost_max=10
    )
    both = [Gate(), Gate()]
    pool.submit(100, [[each] for each in both], is_read=True)
    wait_entered(*both)
    pool.submit(0, [[gate, partial(note, 0)]], is_read=True)
    for job_id in (1, 2):
        pool.submit(job_id, [[lambda: "first", partial(note, job_id)]], is_read=True)
    for job_id in range(3, 8):  # so that a thread's share is several
        pool.submit(job_id, [[partial(note, job_id)]], is_read=True)
    both[0].go.set()
    wait_entered(gate)
    gate.go.set()
    wait_for(lambda: len(order) == 8)
    assert order == [*range(8)]
    both[1].go.set()
    assert pool.shutdown(120)


def test_shutdown_reports_what_is_unfinished() -> None:
    entered, go = threading.Event(), threading.Event()

    def run(tasks: Sequence[int]) -> list[object]:
        entered.set()
        assert go.wait(120)
        return [Unfinished(task) for task in tasks]

    pool = DualQueueThreadPool[int, object](1, 1, run=run, name="test", jobs_max=10, cost_max=10)
    pool.submit(1, [7], is_read=True)
    assert entered.wait(120)
    assert not pool.shutdown(0.0)
    go.set()
    assert pool.shutdown(120)
    (job,) = pool.get_finished()
    assert isinstance(job.outcomes[0], Cancelled)


def test_empty_job_is_finished_at_once(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.submit(1, [], is_read=True)
    assert [job.outcomes for job in pool.get_finished()] == [()]


def test_shutdown_cancels_what_waits_and_reports_everything_once(make: Callable[..., Pool]) -> None:
    pool = make(1, 1)
    gates = [Gate(), Gate()]
    pool.submit(1, [*gates, lambda: "never"], is_read=True)
    wait_entered(*gates)
    pool.submit(2, [lambda: "never"], is_read=False)
    assert not pool.shutdown(0.0)  # both threads are stuck
    assert {job.job_id for job in pool.get_finished()} == {2}  # job 1 may still touch its slots
    with pytest.raises(QueueFullError, match="shut down"):
        pool.submit(3, [lambda: 1], is_read=True)
    let_go(*gates)
    assert pool.shutdown(120)
    (job,) = pool.get_finished()
    assert job.job_id == 1
    assert job.outcomes[:2] == ("gated", "gated")
    assert isinstance(job.outcomes[2], Cancelled)
    assert pool.shutdown(0.0)
    assert pool.get_finished() == []


def test_wait_idle_gives_up(make: Callable[..., Pool]) -> None:
    pool = make()
    gate = Gate()
    pool.submit(1, [gate], is_read=True)
    assert not pool.wait_idle(0.01)
    gate.go.set()
    assert pool.wait_idle(120)
    assert pool.jobs_in_flight == 0


def test_every_job_is_reported_exactly_once_under_load(make: Callable[..., Pool], record: Record) -> None:
    dice = random.Random(4)
    pool = make(3, 2, jobs_max=3000, reads_only=1)
    reported: list[int] = []

    def task() -> object:
        if dice.random() < 0.1:
            raise OSError("injected")
        return True

    for job_id in range(3000):
        pool.submit(job_id, [task] * dice.randrange(4), is_read=dice.random() < 0.5)
        reported += [job.job_id for job in pool.get_finished()]
    pool.shutdown(120)
    reported += [job.job_id for job in pool.get_finished()]
    assert sorted(reported) == list(range(3000))
    record("S3", jobs=3000, missing=0, twice=0)


@pytest.mark.parametrize("bad", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_limits_below_one_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        Pool(bad[0], bad[1], run=call_each, name="x", jobs_max=bad[2], cost_max=bad[3])


class TestCallbacksThatRaise:
    """If the tier's callbacks raise, the job is still reported and the thread goes on."""

    @staticmethod
    def outcomes(**callbacks: Any) -> list[tuple[object, ...]]:
        """Outcomes of two jobs: the callbacks fail in the first, and work in the second."""
        pool = Pool(1, 1, name="test", jobs_max=9, cost_max=9, **{"run": call_each, **callbacks})
        try:
            pool.submit(1, [lambda: 1] * 40, is_read=True)
            first = finish(pool)[1].outcomes
            pool.submit(2, [lambda: 2], is_read=False)
            return [first, finish(pool)[2].outcomes]
        finally:
            assert pool.shutdown(120)

    @pytest.mark.parametrize("outcomes", [[], [1, 2], None, 5])
    def test_run_with_wrong_number_of_outcomes_fails_its_tasks(self, outcomes: Any) -> None:
        first, second = self.outcomes(run=lambda tasks: outcomes if tasks[0]() == 1 else [2])
        assert all(isinstance(each, TypeError) for each in first)
        assert second == (2,)

    def test_run_that_returns_none_as_an_outcome_fails_its_task(self) -> None:
        first, second = self.outcomes(run=lambda tasks: [None if task() == 1 else 2 for task in tasks])
        assert all(isinstance(each, TypeError) for each in first)
        assert second == (2,)

    @pytest.mark.parametrize("error", [ValueError("in joins"), SystemExit()])
    def test_joins_that_raises_fails_the_task(self, error: BaseException) -> None:
        def joins(first: Task) -> Callable[[Task], bool]:
            if first() == 1:
                raise error
            return lambda task: False

        first, second = self.outcomes(joins=joins)
        assert set(map(type, first)) == {type(error)}
        assert second == (2,)

    @pytest.mark.parametrize("how", ["shutdown", "late", "rest"])
    def test_cancel_that_raises_is_the_outcome(self, how: str) -> None:
        def cancel(task: Task) -> object:
            raise SystemExit

        gate = Gate(Unfinished(gated := lambda: 1))
        pool = Pool(1, 1, run=call_each, cancel=cancel, name="test", jobs_max=9, cost_max=9)
        others = [Gate(), gate]
        pool.submit(1, others, is_read=True)
        wait_entered(gate, others[0])
        pool.submit(2, [gated, gated], is_read=True)
        if how == "late":
            pool.cancel_late(0.0)
            (late,) = pool.get_finished()
            assert [type(each) for each in late.outcomes] == [SystemExit] * 2
        ending = threading.Thread(target=pool.shutdown, args=(120,))
        ending.start()
        wait_for(lambda: pool._closing)
        let_go(gate, others[0])
        ending.join()
        outcomes = {job.job_id: job.outcomes for job in pool.get_finished()}
        assert [type(each) for each in outcomes[1]] == [str, SystemExit]
        assert how == "late" or [type(each) for each in outcomes[2]] == [SystemExit] * 2
