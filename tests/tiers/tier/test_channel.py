"""Channel: every job and every lookup has exactly one result, whatever its servers do. The test plays the servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvtiers.tiers.blocks.batches import Batch
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.connections import CHECK_S, LIVED_S, PAUSE_S
from kvtiers.tiers.errors import QueueFullError, StoreThrottledError, StoreUnavailableError
from kvtiers.tiers.frames import Seats, encode_error, pack_frame
from kvtiers.tiers.testing.faults import run_in_child
from kvtiers.tiers.tier import channel as channel_module
from kvtiers.tiers.tier.channel import START_S, Channel, FinishedJob, Opened
from tests.clock import Clock
from tests.identity import block_key
from tests.promises import Record
from tests.tiers.tier.fake_servers import TIER, FakeBackend, FakeServer, settle
from tests.waiting import wait_for

DEADLINE_S = 10.0
JOBS_MAX, COST_MAX = 6, 100
READER, WRITER = Seats(1, 1, 2, 0), Seats(1, 0, 0, 2)
BOTH = Seats(2, 1, 2, 2)
KEYS = [block_key(n) for n in range(8)]


class Bench:
    """A channel to servers that the test plays."""

    def __init__(
        self,
        seats: Sequence[Seats] = (READER, WRITER),
        send_bytes: int | None = None,
        row_bytes: int = channel_module.PART_BYTES_MIN // 8,
    ) -> None:
        self.clock = Clock()
        self.backend = FakeBackend(seats, send_bytes)
        self.said: list[str] = []
        self.channel = Channel(
            self.backend,
            tier=TIER,
            row_bytes=row_bytes,
            jobs_max=JOBS_MAX,
            cost_max=COST_MAX,
            deadline_s=DEADLINE_S,
            tell=self.said.append,
            clock=self.clock,
        )
        self.settle()

    @property
    def made(self) -> list[FakeServer]:
        return self.backend.made

    def submit(
        self, job_id: int, count: int = 1, *, is_load: bool = True, cost: int = 1, to_replace: Sequence[OffloadKey] = ()
    ) -> None:
        pairs = [(KEYS[n % len(KEYS)], n) for n in range(count)]
        self.channel.submit(job_id, pairs, is_load=is_load, cost=cost, to_replace=to_replace)
        for server in self.made:
            server.read()

    def settle(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        settle(self.channel)

    def replace_with_start_that_hangs(self) -> None:
        """Have the first server die; the start of the next one waits for ``backend.may_start``."""
        starts = self.backend.starts
        self.backend.may_start.clear()
        self.made[0].die()
        for seconds in (PAUSE_S[1], 0.0):
            self.channel.poll()
            self.clock.advance(seconds)
        wait_for(lambda: self.backend.starts == starts + 1)

    def finished(self) -> dict[int, FinishedJob]:
        self.settle()
        jobs = self.channel.take_finished()
        assert len({job.job_id for job in jobs}) == len(jobs)
        return {job.job_id: job for job in jobs}

    def opened(self) -> Opened:
        """The answer to an opening, which must have come."""
        self.settle()
        opened = self.channel.take_opened()
        assert opened is not None
        return opened

    def end(self) -> None:
        for server in self.made:
            server.is_stuck, server.is_dead = False, True
        assert self.channel.shutdown(0.0)
        self.backend.release()


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*arguments: Any) -> Bench:
        benches.append(Bench(*arguments))
        return benches[-1]

    yield make
    for bench in benches:
        bench.end()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


@pytest.fixture
def single(make: Callable[..., Bench]) -> Bench:
    """With one server."""
    return make([BOTH])


def counts(job: FinishedJob) -> dict[str, int]:
    """A job's blocks by outcome."""
    return {name: count for batch in job.batches for name, count in batch.outcomes.items() if count}


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_server_answer_becomes_the_jobs_result(single: Bench) -> None:
    bench, (server,) = single, single.made
    bench.submit(1, 4)
    bench.submit(2, 2, is_load=False, to_replace=[KEYS[1]])
    assert [frame[0] for frame in server.frames] == ["load", "store"]
    assert [frame[2] for frame in server.frames] == [bench.clock.now + DEADLINE_S] * 2
    assert server.frames[1][3] == [1]
    assert bench.channel.jobs_in_flight == 2
    bench.clock.advance(1.5)
    partial = Batch(succeeded=KEYS[:1], gone=KEYS[1:4], outcomes={"moved": 1, "failed": 3})  # type: ignore[arg-type]
    first, second = server.asked
    server.send(server.answer(second))
    server.send(server.answer(first, partial))
    finished = bench.finished()
    assert list(finished) == [2, 1]  # as they end
    assert finished[1].batches == [partial]
    assert (finished[1].blocks, finished[1].duration_s) == (4, 1.5)
    assert finished[2].batches[0].succeeded == KEYS[:2]
    assert bench.channel.jobs_in_flight == 0
    assert bench.finished() == {}


def test_job_is_split_into_parts_and_ends_with_its_last_part(make: Callable[..., Bench]) -> None:
    bench = make([READER, READER], None, channel_module.PART_BYTES_MIN)
    bench.submit(1, 8)
    first, second = bench.made
    assert [len(keys) for server in bench.made for _, keys in server.asked.values()] == [4, 4]
    assert {key for server in bench.made for _, keys in server.asked.values() for key in keys} == {*KEYS}
    first.answer_all()
    assert bench.finished() == {}
    second.answer_all()
    (job,) = bench.finished().values()
    assert sorted(key for batch in job.batches for key in batch.succeeded) == sorted(KEYS)


def test_load_does_not_wait_behind_stores_nor_a_store_behind_loads(bench: Bench) -> None:
    reader, writer = bench.made
    bench.submit(1, 2, is_load=False)
    writer.answer_all()
    reader.answer_all()
    assert set(bench.finished()) == {1}
    bench.submit(1, 2, is_load=False)
    bench.submit(2, 1, is_load=True)
    bench.submit(3, 1, is_load=False)
    assert [kind for kind, _ in reader.asked.values()][-1] == "load"
    assert [kind for kind, _ in writer.asked.values()] == ["store", "store"]
    for server in bench.made:
        server.answer_all()
    assert set(bench.finished()) == {1, 2, 3}


def test_job_beyond_the_limits_is_refused_and_not_sent(single: Bench) -> None:
    single.submit(1, is_load=False, cost=60)
    with pytest.raises(QueueFullError, match="60 of 100"):
        single.submit(2, is_load=False, cost=50)
    with pytest.raises(ValueError, match="job 1 is already"):
        single.submit(1)
    single.submit(2, is_load=False, cost=40)
    for job_id in range(3, 20):  # loads are never refused, and take no room of stores
        single.submit(job_id, cost=1000)
    with pytest.raises(QueueFullError, match="6 jobs"):
        single.submit(20, is_load=False)
    assert len(single.made[0].asked) == 19
    single.made[0].answer_all()
    assert set(single.finished()) == set(range(1, 20))
    single.submit(21, is_load=False, cost=1000)  # alone, any size: or it could never run
    single.made[0].answer_all()
    assert set(single.finished()) == {21}


def test_log_messages_of_servers_are_passed_on(single: Bench) -> None:
    bench, (server,) = single, single.made
    bench.submit(1)
    bench.channel.look(KEYS)
    server.read()
    moved, looked = server.asked
    server.send(pack_frame(server.tag, ["moved", moved, {}, ["an error"]]))
    server.send(pack_frame(server.tag, ["looked", looked, ["another"]], bytes([0, 1, 2, 0, 0, 0, 0, 0])))
    assert set(bench.finished()) == {1}
    assert bench.said == ["an error", "another"]
    assert bench.channel.take_looked() == [(looked, [False, True, None, *[False] * 5])]


def test_cut_reaches_running_servers_and_servers_that_start_later(bench: Bench) -> None:
    bench.channel.cut("circuit_open")
    bench.channel.cut("circuit_open")
    for server in bench.made:
        server.read()
        assert server.frames == [["cut", "circuit_open"]]
    bench.made[0].die()
    bench.settle()
    bench.settle(PAUSE_S[1])
    bench.made[2].read()
    assert bench.made[2].cut == "circuit_open"
    bench.channel.cut("")
    for server in bench.made[1:]:
        server.read()
        assert server.cut == ""


def test_frames_wait_while_the_socket_is_full(make: Callable[..., Bench]) -> None:
    bench = make([BOTH], 4096)
    (server,) = bench.made
    pairs = [(KEYS[n % 8], n) for n in range(500)]
    for job_id in range(30):
        bench.channel.submit(job_id, pairs, is_load=True)
    server.send(b"")
    assert bench.channel._children[0].out
    bench.channel.look(KEYS)
    for _ in range(1000):
        if len(server.asked) == 31:
            break
        server.read(5000)
        bench.settle()
    assert [len(keys) for _, keys in server.asked.values()] == [500] * 30 + [8]
    server.answer_all()
    assert set(bench.finished()) == set(range(30))
    assert len(bench.channel.take_looked()) == 1
    assert server.kills == 0


# ---- servers that fail -----------------------------------------------------------------------------------------------

BAD: dict[str, Callable[[FakeServer, int], bytes]] = {
    "garbage": lambda server, number: os.urandom(64),
    "line": lambda server, number: b"WARNING: a library prints this line, which is long enough\n",
    "wrong tag": lambda server, number: pack_frame(os.urandom(16), ["moved", number, {}, []]),
    "in a frame": lambda server, number: pack_frame(server.tag, ["moved", number, {}, []])[:-5] + b"\n" * 99,
    "unknown number": lambda server, number: pack_frame(server.tag, ["moved", 10**6, {}, []]),
    "no number": lambda server, number: pack_frame(server.tag, ["moved"]),
    "list for number": lambda server, number: pack_frame(server.tag, ["moved", [number], {}, []]),
    "other kind": lambda server, number: pack_frame(server.tag, ["opened", number, None, None]),
    "no kind": lambda server, number: pack_frame(server.tag, []),
    "null": lambda server, number: pack_frame(server.tag, None),  # type: ignore[arg-type]
    "no batch": lambda server, number: pack_frame(server.tag, ["moved", number, None, []]),
    "too many blocks": lambda server, number: pack_frame(server.tag, ["moved", number, {"succeeded": [10**6]}, []]),
    "no texts": lambda server, number: pack_frame(server.tag, ["moved", number, {}, None]),
    "too short": lambda server, number: pack_frame(server.tag, ["moved", number, {}]),
    "twice": lambda server, number: 2 * pack_frame(server.tag, ["moved", number, {}, []]),
}


@pytest.mark.parametrize("how", BAD)
def test_server_that_sends_invalid_frames_is_killed_and_its_jobs_fail(bench: Bench, how: str) -> None:
    reader, writer = bench.made
    bench.submit(1, 2)
    bench.submit(2, 3, is_load=False)
    (number,) = reader.asked
    reader.send(BAD[how](reader, number))
    finished = bench.finished()
    assert list(finished) == [1]
    assert counts(finished[1]) == ({} if how == "twice" else {"failed": 2})
    assert (reader.kills, reader.closes, writer.kills) == (1, 1, 0)
    assert bench.channel.kills == 1
    if how != "twice":
        (batch,) = finished[1].batches
        assert batch.errors == {"StoreUnavailableError": 2}
        assert batch.perhaps_stored == 2
        assert "process failed" in batch.fault
    writer.answer_all()
    assert counts(bench.finished()[2]) == {"moved": 3}


@pytest.mark.parametrize("raw", [b"", b"\1" * 7, b"\1" * 9, b"\1" * 7 + b"\3"], ids=len)
def test_invalid_answer_to_a_lookup_is_a_failed_lookup(bench: Bench, raw: bytes) -> None:
    number = bench.channel.look(KEYS)
    server = bench.made[0]
    server.read()
    server.send(pack_frame(server.tag, ["looked", number, []], raw))
    assert bench.channel.take_looked() == [(number, [None] * 8)]
    assert server.kills == 1
    bench.settle()
    assert bench.channel.take_looked() == []


ODD_ANSWERS = [
    ["opened", 1, {"no_capability": 1}, None],
    ["opened", 1, None, ["NoSuchError", "text", "", ""]],
    ["opened", 1, None, ["annotations", "text", "", ""]],
    ["opened", 1, None, "text"],
    ["opened", 1, 5, None],
    ["looked", 1, []],
]


@pytest.mark.parametrize("content", ODD_ANSWERS, ids=str)
def test_invalid_answer_to_an_opening_is_a_failed_opening(bench: Bench, content: list[Any]) -> None:
    bench.channel.open()
    server = bench.made[0]
    server.read()
    server.send(pack_frame(server.tag, content))
    assert isinstance(bench.opened().error, StoreUnavailableError)
    assert server.kills == 1
    assert bench.channel.take_opened() is None


def test_opening_returns_the_servers_capabilities_or_error(bench: Bench) -> None:
    bench.channel.open()
    server = bench.made[0]
    server.answer_all()
    opened = bench.opened()
    assert opened.error is None
    assert opened.capabilities is not None
    assert opened.capabilities.exclusive_create
    bench.channel.open()
    server.read()
    (number,) = server.asked
    server.send(server.answer(number, error=encode_error(StoreThrottledError("slow down"))))
    assert isinstance(bench.opened().error, StoreThrottledError)


def test_answer_sent_before_a_servers_death_counts(single: Bench) -> None:
    bench, (server,) = single, single.made
    bench.submit(1)
    bench.submit(2, 2, is_load=False)
    number = bench.channel.look(KEYS)
    server.read()
    server.send(server.answer(min(server.asked)))
    server.die()
    finished = bench.finished()
    assert counts(finished[1]) == {"moved": 1}
    assert counts(finished[2]) == {"failed": 2}
    assert finished[2].batches[0].perhaps_stored == 2
    assert bench.channel.take_looked() == [(number, [None] * 8)]


def test_requests_fail_at_once_while_no_server_runs(single: Bench) -> None:
    single.made[0].die()
    single.settle()
    with pytest.raises(QueueFullError, match="processes"):
        single.submit(1)
    number = single.channel.look(KEYS)
    assert single.channel.take_looked() == [(number, [None] * 8)]
    single.channel.open()
    assert isinstance(single.opened().error, StoreUnavailableError)
    assert single.channel.jobs_in_flight == 0


def test_dead_server_is_replaced_after_a_pause_that_grows(single: Bench) -> None:
    pauses = []
    for _ in range(12):
        single.made[-1].die()
        single.submit(1)
        assert counts(single.finished()[1]) == {"failed": 1}
        count, pause_s = len(single.made), 0.0
        while len(single.made) == count:
            single.settle(0.01 if pause_s < 1.0 else 0.5)
            pause_s += 0.01 if pause_s < 1.0 else 0.5
        pauses.append(pause_s)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 4 * PAUSE_S[0]
    assert PAUSE_S[1] - 1 <= pauses[-1] <= PAUSE_S[1] + 1
    single.settle(LIVED_S + 1)  # one that has lived is replaced soon
    single.made[-1].die()
    single.settle()
    single.settle(2 * PAUSE_S[0])
    assert not single.made[-1].is_dead


def test_hanging_server_start_does_not_block_jobs_of_other_servers(bench: Bench) -> None:
    bench.replace_with_start_that_hangs()
    for _ in range(20):
        bench.channel.poll()
        bench.clock.advance(PAUSE_S[1])
    assert bench.backend.starts == 3
    bench.submit(1)
    bench.made[1].answer_all()
    bench.channel.poll()
    assert len(bench.channel.take_finished()) == 1
    bench.backend.may_start.set()
    bench.settle()
    assert len(bench.made) == 3


# ---- servers that are late -------------------------------------------------------------------------------------------


def test_job_of_a_silent_server_fails_only_after_the_killed_server_has_ended(bench: Bench) -> None:
    reader, _ = bench.made
    reader.is_stuck = True
    bench.submit(1, 2)
    bench.settle(DEADLINE_S)
    assert reader.kills == 0
    bench.settle(0.1)
    assert reader.kills == 1
    for _ in range(5):
        bench.settle(DEADLINE_S)
        assert bench.finished() == {}  # it may still touch the slots
    assert bench.channel.jobs_in_flight == 1
    bench.channel.look(KEYS)
    with pytest.raises(ValueError, match="already"):
        bench.submit(1)
    reader.is_dead = True
    (batch,) = bench.finished()[1].batches
    assert batch.outcomes == {"failed": 2}
    assert batch.errors == {"StoreTimeoutError": 2}
    assert "more than 10 s" in batch.fault
    assert bench.channel.take_late_s() >= DEADLINE_S
    assert bench.channel.take_late_s() == 0.0
    assert reader.kills == 1


def test_answer_of_a_killed_server_is_ignored(bench: Bench) -> None:
    """It is late, and a fork of the server may have sent it."""
    reader, _ = bench.made
    reader.is_stuck = True
    bench.submit(1)
    bench.settle(DEADLINE_S + 1)
    assert reader.kills == 1
    reader.answer_all()
    bench.settle()
    assert bench.finished() == {}
    reader.is_dead = True
    assert counts(bench.finished()[1]) == {"failed": 1}


def test_server_that_reports_progress_gets_twice_the_deadline(bench: Bench) -> None:
    reader, _ = bench.made
    bench.submit(1)
    for _ in range(4):
        bench.settle(DEADLINE_S / 2)
        reader.send(pack_frame(reader.tag, ["alive"]))
        bench.settle()
        assert reader.kills == 0
    bench.settle(0.1)
    assert reader.kills == 1
    assert bench.finished()[1].batches[0].errors == {"StoreTimeoutError": 1}


def test_silent_server_gets_no_work_while_another_answers(make: Callable[..., Bench]) -> None:
    bench = make([BOTH, BOTH])
    silent, other = bench.made
    bench.submit(1)
    assert silent.asked
    bench.settle(DEADLINE_S / 2)
    assert bench.channel.silent_s == DEADLINE_S / 2
    for job_id in range(2, 6):
        bench.submit(job_id)
    bench.channel.look(KEYS)
    other.answer_all()
    assert set(bench.finished()) == {2, 3, 4, 5}
    assert len(bench.channel.take_looked()) == 1
    assert len(silent.asked) == 1


def start_mute_server(bench: Bench) -> FakeServer:
    """Have the first server die, and another start that does not say that it runs."""
    bench.backend.speak = False
    bench.made[0].die()
    bench.settle()
    bench.settle(PAUSE_S[1])
    return bench.made[-1]


def test_server_that_is_still_starting_gets_no_work_while_another_server_runs(bench: Bench) -> None:
    starting, other = start_mute_server(bench), bench.made[1]
    bench.submit(1)
    bench.submit(2, is_load=False)
    bench.channel.look(KEYS)
    other.answer_all()
    assert set(bench.finished()) == {1, 2}
    starting.read()
    assert not starting.asked
    starting.send(pack_frame(starting.tag, ["alive"]))
    bench.settle()
    bench.submit(3)
    assert starting.asked


def test_slow_start_of_a_server_does_not_count_toward_the_deadline_of_its_jobs(single: Bench) -> None:
    """On a busy machine a start takes longer than a deadline of seconds."""
    starting = start_mute_server(single)
    single.submit(1)
    single.submit(2)
    single.settle(START_S)
    assert starting.kills == 0
    starting.send(pack_frame(starting.tag, ["alive"]))
    single.settle()
    first, _ = starting.asked
    single.settle(DEADLINE_S)
    starting.send(starting.answer(first))
    assert set(single.finished()) == {1}
    assert starting.kills == 0
    single.settle(DEADLINE_S + 1)
    assert starting.kills == 1
    assert single.finished()[2].batches[0].errors == {"StoreTimeoutError": 1}


def test_server_that_never_reports_its_start_is_killed_and_its_job_fails(single: Bench) -> None:
    starting = start_mute_server(single)
    single.submit(1)
    single.settle(START_S)
    assert single.finished() == {}
    single.settle(1.0)
    assert starting.kills == 1
    assert single.finished()[1].batches[0].errors == {"StoreTimeoutError": 1}
    assert single.channel.take_late_s() > START_S
    single.settle(PAUSE_S[1])
    idle = single.made[-1]
    single.settle(START_S + 1)
    assert idle.kills == 1
    assert single.channel.take_late_s() == 0.0  # nobody waited for it


def test_job_in_threads_waits_for_its_answer_past_the_deadline(single: Bench) -> None:
    bench, (server,) = single, single.made
    server.has_threads = True
    bench.submit(1)
    for _ in range(5):
        bench.settle(DEADLINE_S)
    assert bench.finished() == {}
    assert bench.channel.take_late_s() > DEADLINE_S
    assert not bench.channel.shutdown(0.0)
    assert bench.finished() == {}
    server.answer_all()
    assert counts(bench.finished()[1]) == {"moved": 1}
    assert bench.channel.shutdown(0.0)
    assert bench.backend.is_closed


# ---- shutdown --------------------------------------------------------------------------------------------------------


def test_shutdown_reports_dropped_jobs(bench: Bench) -> None:
    reader, writer = bench.made
    bench.submit(1, 2)
    bench.submit(2, 3, is_load=False)
    writer.answer_all()
    number = bench.channel.look(KEYS)
    assert bench.channel.shutdown(0.0)
    assert bench.backend.is_closed
    finished = {job.job_id: job for job in bench.channel.take_finished()}
    assert counts(finished[1]) == {"dropped": 2}
    assert finished[1].batches[0].errors == {"shutdown": 2}
    assert counts(finished[2]) == {"moved": 3}
    assert bench.channel.take_looked() == [(number, [None] * 8)]
    assert (reader.cut, writer.cut) == ("", "")
    for server in bench.made:
        server.read()
        assert server.cut == "shutdown"
        assert server.closes
    with pytest.raises(QueueFullError, match="shut down"):
        bench.submit(3)
    assert bench.channel.shutdown(0.0)


def test_shutdown_does_not_report_jobs_whose_server_may_touch_slots(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "END_S", 0.0)
    reader, _ = bench.made
    reader.is_stuck = True
    bench.submit(1, 2)
    bench.submit(2, 3, is_load=False)
    assert not bench.channel.shutdown(0.0)
    assert not bench.backend.is_closed
    assert reader.kills > 0
    assert {job.job_id for job in bench.channel.take_finished()} == {2}
    bench.settle(2 * DEADLINE_S)
    assert bench.finished() == {}
    reader.is_dead = True
    assert counts(bench.finished()[1]) == {"dropped": 2}
    assert bench.channel.shutdown(0.0)
    assert [bench.backend.is_closed] == [True]
    assert len(bench.made) == 2  # nothing is started again


def test_stopped_server_without_work_is_killed_at_shutdown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "END_S", 0.01)
    reader, writer = bench.made
    reader.is_stopped = True
    assert bench.channel.shutdown(0.0)
    assert bench.backend.is_closed
    assert (reader.kills, writer.kills) == (1, 0)


def test_server_whose_start_completes_after_the_shutdown_is_ended(bench: Bench) -> None:
    bench.replace_with_start_that_hangs()
    assert bench.channel.shutdown(0.0)
    bench.backend.may_start.set()
    wait_for(lambda: len(bench.made) == 3)
    wait_for(lambda: bench.made[2].closes)


def test_failed_start_in_the_constructor_ends_servers_already_started() -> None:
    class SecondFails(FakeBackend):
        def start(self, seats: Seats) -> FakeServer:
            if self.made:
                raise OSError("too many open files")
            return super().start(seats)

    backend = SecondFails([READER, WRITER])
    with pytest.raises(OSError, match="too many"):
        Channel(backend, tier=TIER, row_bytes=4096, jobs_max=1, cost_max=1, deadline_s=1.0)
    assert backend.made[0].closes
    assert backend.is_closed
    backend.release()


def test_fork_of_the_engine_neither_ends_servers_nor_takes_answers(bench: Bench) -> None:
    def use() -> None:
        bench.channel.poll()
        assert bench.channel.take_finished() == []
        assert not bench.channel.wait_idle(60.0)
        assert not bench.channel.shutdown(60.0)

    bench.submit(1)
    bench.made[0].answer_all()
    assert run_in_child(use) == 0
    assert counts(bench.finished()[1]) == {"moved": 1}
    assert not any(server.closes for server in bench.made)


# ---- everything at random --------------------------------------------------------------------------------------------

MACHINE_JOBS = [0, 0]  # jobs and servers killed, of all runs


class Machine(RuleBasedStateMachine):
    """Random actions of servers, compared with a model of the results that the engine must see.

    A job's keys are in no other job, so that the model knows whose block a server has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_job = 0
        self.jobs: dict[int, tuple[int, int]] = {}  # in flight: cost and number of blocks
        self.looks: dict[int, int] = {}
        self.is_opening = False
        self.moved: dict[OffloadKey, bool] = {}  # answered: whether it succeeded
        self.ended: set[OffloadKey] = set()  # keys of jobs that were reported
        self.job_keys: dict[int, list[OffloadKey]] = {}
        self.made_at: dict[FakeServer, float] = {}
        self.read_at: dict[tuple[FakeServer, int], float] = {}  # when a server read a request
        self.heard_at: dict[FakeServer, float] = {}
        self.up_at: dict[FakeServer, float] = {}  # when the engine first heard a server
        self.fresh: set[FakeServer] = set()  # have sent bytes since the last poll
        self.faulty: set[FakeServer] = set()  # will be killed when the engine looks

    @initialize(seats=st.sampled_from([[BOTH], [READER, WRITER], [READER, READER, WRITER]]), small=st.booleans())
    def start(self, seats: list[Seats], small: bool) -> None:
        self.bench = Bench(seats, 2048 if small else None, channel_module.PART_BYTES_MIN // 8)
        self.channel, self.clock = self.bench.channel, self.bench.clock
        self.made_at = dict.fromkeys(self.bench.made, self.clock.now)
        self.submit([(5, True, 0), (120, False, 60), (1, True, 0)])

    @property
    def running(self) -> list[FakeServer]:
        return [server for server in self.bench.made if not server.kills and not server.closes]

    def pick(self, place: int) -> FakeServer | None:
        """One of the servers that have something to answer."""
        asked = [server for server in self.running if server.asked and server not in self.faulty]
        return asked[place % len(asked)] if asked else None

    # ---- the engine

    @rule(
        jobs=st.lists(st.tuples(st.integers(0, 120), st.booleans(), st.integers(0, 60)), min_size=1, max_size=4),
        serves=st.booleans(),
    )
    def submit(self, jobs: list[tuple[int, bool, int]], serves: bool = False) -> None:
        for count, is_load, cost in jobs:
            self.submit_one(count, is_load, 0 if is_load else cost)
        for server in self.running if serves else ():
            if server not in self.faulty:
                self.read_of(server)

    def submit_one(self, count: int, is_load: bool, cost: int) -> None:
        self.next_job += 1
        keys = [block_key(1000 * self.next_job + n) for n in range(count)]
        costs = [each for each, blocks in self.jobs.values() if blocks]  # a job without blocks ends at once
        total = sum(costs)
        is_full = not is_load and (len(costs) >= JOBS_MAX or (total and total + cost > COST_MAX))
        try:
            self.channel.submit(self.next_job, [(key, 0) for key in keys], is_load=is_load, cost=cost)
        except QueueFullError:
            assert is_full or not self.running
            return
        assert self.running
        assert not is_full
        MACHINE_JOBS[0] += 1
        self.jobs[self.next_job] = cost, count
        self.job_keys[self.next_job] = keys

    @rule(count=st.integers(1, 60))
    def look(self, count: int) -> None:
        number = self.channel.look([block_key(n) for n in range(count)])
        assert number not in self.looks
        self.looks[number] = count

    @precondition(lambda self: not self.is_opening)
    @rule()
    def open(self) -> None:
        self.channel.open()
        self.is_opening = True

    @rule(why=st.sampled_from(["", "circuit_open"]))
    def cut(self, why: str) -> None:
        self.channel.cut(why)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 3.0, 6.0, DEADLINE_S, 2 * DEADLINE_S + 1, PAUSE_S[1]]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # ---- the servers

    @rule(place=st.integers(0, 5), bytes_max=st.sampled_from([1, 100, 3000, 1 << 20]))
    def read(self, place: int, bytes_max: int) -> None:
        servers = [server for server in self.running if server not in self.faulty]
        if servers:
            self.read_of(servers[place % len(servers)], bytes_max)

    def read_of(self, server: FakeServer, bytes_max: int = 1 << 20) -> None:
        before = set(server.asked)
        server.read(bytes_max)
        for number in set(server.asked) - before:
            self.read_at[server, number] = self.clock.now
            assert not set(server.asked[number][1]) & self.ended, "a job was reported, but a server still has its block"

    @rule(place=st.integers(0, 5), succeeds=st.booleans(), late=st.booleans(), cut=st.none() | st.integers(0, 60))
    def answer(self, place: int, succeeds: bool, late: bool, cut: int | None) -> None:
        server = self.pick(place)
        if server is None:
            return
        number = (list if late else sorted)(server.asked)[-1 if late else 0]
        kind, keys = server.asked[number]
        batch = None if succeeds else Batch(outcomes={"failed": len(keys)})  # type: ignore[arg-type]
        if cut != 0:
            self.fresh.add(server)
        if kind not in ("look", "open"):
            for key in keys:
                self.moved[key] = succeeds
        server.send(server.answer(number, batch), cut)

    @rule(place=st.integers(0, 5))
    def send_rest(self, place: int) -> None:
        waiting = [server for server in self.running if server.to_send and server not in self.faulty]
        if waiting:
            self.fresh.add(waiting[place % len(waiting)])
            waiting[place % len(waiting)].send(b"")

    @rule(place=st.integers(0, 5))
    def say_alive(self, place: int) -> None:
        if server := self.pick(place):
            self.fresh.add(server)
            server.send(pack_frame(server.tag, ["alive"]))

    @rule(place=st.integers(0, 5), how=st.sampled_from(sorted(set(BAD) - {"twice", "in a frame"})))
    def misbehave(self, place: int, how: str) -> None:
        server = self.pick(place)
        if server is not None:
            self.fresh.add(server)
            self.faulty.add(server)
            number = min(server.asked)
            kind, _ = server.asked[number]
            if how == "other kind" and kind == "open":
                how = "unknown number"
            server.send(BAD[how](server, number))

    @rule(place=st.integers(0, 5))
    def answer_twice(self, place: int) -> None:
        server = self.pick(place)
        if server is None:
            return
        self.fresh.add(server)
        self.faulty.add(server)
        number = min(server.asked)
        kind, keys = server.asked[number]
        for key in keys if kind not in ("look", "open") else ():
            self.moved[key] = True
        server.send(2 * server.answer(number))

    @rule(place=st.integers(0, 5), stuck=st.booleans())
    def die(self, place: int, stuck: bool) -> None:
        servers = [server for server in self.running if server not in self.faulty]
        if servers:
            server = servers[place % len(servers)]
            server.is_stuck = stuck
            self.faulty.add(server)
            server.die()

    @rule(place=st.integers(0, 5))
    def get_stuck(self, place: int) -> None:
        if self.running:
            self.running[place % len(self.running)].is_stuck = True

    @rule()
    def unstick(self) -> None:
        for server in self.bench.made:
            server.is_stuck = False
            server.is_dead = server.is_dead or bool(server.kills)

    @rule(fails=st.booleans(), speak=st.booleans())
    def let_starts_fail(self, fails: bool, speak: bool) -> None:
        self.bench.backend.start_error = OSError("no process") if fails else None
        self.bench.backend.speak = speak

    # ---- what must hold

    @rule()
    def poll(self) -> None:
        settle(self.channel)
        now = self.clock.now
        for server in self.bench.made:
            if server in self.fresh:
                self.heard_at[server] = now
            if server in self.fresh or server.speaks:
                self.up_at.setdefault(server, now)
            if server in self.faulty:
                assert server.kills, vars(server)
            elif server.kills:
                assert now - self.made_at[server] > (DEADLINE_S if server in self.up_at else START_S)
            elif server not in self.up_at:
                assert now - self.made_at.get(server, now) <= START_S + CHECK_S
            elif server.asked:
                oldest = min(self.read_at[server, number] for number in server.asked)
                oldest = max(oldest, self.up_at[server])
                assert now - max(oldest, self.heard_at.get(server, oldest)) <= DEADLINE_S + CHECK_S
                assert now - oldest <= 2 * DEADLINE_S + CHECK_S
            self.made_at.setdefault(server, now)
        self.fresh.clear()
        self.check()

    def check(self) -> None:
        for job in self.channel.take_finished():
            self.book(job)
        for number, found in self.channel.take_looked():
            assert len(found) == self.looks.pop(number)
        for job in self.channel.take_finished():
            self.book(job)
        if self.channel.take_opened() is not None:
            assert self.is_opening
            self.is_opening = False
        assert self.channel.jobs_in_flight == len(self.jobs)

    def book(self, job: FinishedJob) -> None:
        _, blocks = self.jobs.pop(job.job_id)  # KeyError: it was reported twice
        assert job.blocks == blocks
        succeeded = [key for batch in job.batches for key in batch.succeeded]
        outcomes = sum(sum(batch.outcomes.values()) for batch in job.batches)
        answered_empty = sum(len(batch.succeeded) for batch in job.batches if not batch.outcomes)
        assert outcomes + answered_empty == blocks
        assert len(set(succeeded)) == len(succeeded)
        keys = self.job_keys[job.job_id]
        assert all(self.moved.get(key) for key in succeeded)
        self.ended |= set(keys)
        done = set(succeeded)
        for server in self.bench.made:
            if server.is_dead:
                continue
            for kind, asked in server.asked.values():
                assert kind == "look" or not self.ended & set(asked), "a server that lives may touch the slots"
        if not any(server.kills for server in self.bench.made):
            assert all((key in done) == self.moved[key] for key in keys)

    def teardown(self) -> None:
        if not hasattr(self, "channel"):
            return
        self.unstick()
        self.let_starts_fail(False, True)
        for _ in range(4):  # the late are killed, the dead are replaced
            settle(self.channel)
            self.check()
            for server in self.running:
                if server not in self.faulty:
                    server.is_stuck = False
                    server.send(pack_frame(server.tag, ["alive"]))
            self.clock.advance(PAUSE_S[1])
        settle(self.channel)
        self.unstick()
        settle(self.channel)
        self.check()
        assert not self.jobs
        assert not self.looks
        assert not self.is_opening
        self.clock.advance(PAUSE_S[1])
        settle(self.channel)
        assert len(self.running) == len(self.bench.backend.seats)
        self.channel.submit(-5, [(key, 0) for key in KEYS], is_load=True)
        self.channel.submit(-6, [(key, 0) for key in KEYS], is_load=False)
        for _ in range(20):
            settle(self.channel)
            for server in self.running:
                server.answer_all()
        settle(self.channel)
        assert {job.job_id for job in self.channel.take_finished()} == {-5, -6}
        MACHINE_JOBS[1] += sum(bool(server.kills) for server in self.bench.made)
        self.bench.end()
        assert self.channel.take_finished() == []


def test_every_job_has_exactly_one_result_for_any_server_behavior(record: Record) -> None:
    MACHINE_JOBS[:] = 0, 0
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=40, phases=[Phase.generate])
    )
    jobs, killed = MACHINE_JOBS
    assert jobs
    assert killed
    record("S3", jobs=jobs, servers_killed=killed, missing=0, twice=0)


@pytest.mark.full
def test_every_job_has_exactly_one_result_for_any_server_behavior_in_long_runs() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=300, stateful_step_count=60, phases=[Phase.generate])
    )


def test_wait_idle_returns_false_at_its_timeout_and_true_after_the_last_answer(bench: Bench) -> None:
    bench.submit(1)
    assert not bench.channel.wait_idle(0.01)
    server = bench.made[0]
    thread = threading.Timer(0.01, server.answer_all)
    thread.start()
    assert bench.channel.wait_idle(120)
    thread.join()
    assert bench.channel.jobs_in_flight == 0
