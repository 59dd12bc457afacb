"""CollectorLink, the engine's end of the collector's process, and News, the process's end. The test plays the other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.capacity import link as link_module
from kvtiers.tiers.capacity import process
from kvtiers.tiers.capacity.collector import STEP_S
from kvtiers.tiers.capacity.link import CollectorLink
from kvtiers.tiers.capacity.policy import LAG_S, START_LAG_S, CapacityPolicy
from kvtiers.tiers.capacity.process import News
from kvtiers.tiers.capacity.walker import CollectReport
from kvtiers.tiers.child_process import ChildProcess
from kvtiers.tiers.connections import CHECK_S, PAUSE_S
from kvtiers.tiers.frames import FrameReader, pack_frame, pack_pairs, unpack_pairs
from kvtiers.tiers.recipe import StoreRecipe
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.testing.faults import run_in_child
from tests.clock import Clock
from tests.identity import FakeSpec, block_key
from tests.tiers.tier.fake_servers import TIER, FakeChild, settle

KEYS = [block_key(n) for n in range(8)]
MAPPER = FileMapper.from_offloading_spec("", FakeSpec())


class Bench:
    """A link to processes that the test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.clock = Clock()
        self.made: list[FakeChild] = []
        self.configs: list[dict[str, Any]] = []
        self.links: list[CollectorLink] = []
        monkeypatch.setattr(ChildProcess, "start", self.start)

    def start(self, _: str, config: dict[str, Any]) -> FakeChild:
        self.configs.append(config)
        self.made.append(FakeChild())
        return self.made[-1]

    def link(self, **policy: Any) -> CollectorLink:
        recipe = StoreRecipe.of(LocalStore, root_dir=Path("/none"))
        link = CollectorLink(TIER, recipe, CapacityPolicy(**policy), MAPPER, clock=self.clock)
        self.links.append(link)
        settle(link)
        return link

    def limit(self, name: str, value: float) -> None:
        self.monkeypatch.setattr(link_module, name, value)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        settle(self.links[0])

    def say(self, counted: int = 0, since: float = 0.0, removed: list[OffloadKey] | None = None, **news: Any) -> None:
        """Have the process send a frame."""
        content = [counted, since, *(news.get(name) for name in ("full", "report", "error"))]
        child = self.made[-1]
        child.send(pack_frame(child.tag, content, pack_pairs([(key, 0) for key in removed or ()])))
        self.wait(CHECK_S)

    def heard(self) -> list[tuple[list[OffloadKey], int | None, bool]]:
        """What the process has received: uses, bytes that were put, and whether a block was refused."""
        settle(self.links[0])
        return [([key for key, _ in unpack_pairs(raw)], *content) for content, raw in self.made[-1].received()]

    def used(self) -> list[OffloadKey]:
        return [key for keys, _, _ in self.heard() for key in keys]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    for link in bench.links:
        link.close()
    for child in bench.made:
        child.theirs.close()


@pytest.fixture
def link(bench: Bench) -> CollectorLink:
    return bench.link(ttl_s=1000.0)


# ---- uses ------------------------------------------------------------------------------------------------------------


def test_repeated_uses_of_a_block_are_sent_once_per_period(bench: Bench, link: CollectorLink) -> None:
    link.touch(KEYS[:2])
    link.touch(KEYS[1:3])
    assert bench.used() == KEYS[:3]
    bench.wait(1000.0 / 8)
    link.touch(KEYS[:1])  # it is remembered for one period more
    assert bench.used() == []
    bench.wait(1000.0 / 8)
    link.touch([*KEYS[:1], KEYS[3]])
    assert bench.used() == [KEYS[0], KEYS[3]]


def test_new_process_is_sent_all_uses_before_the_full_disk(bench: Bench, link: CollectorLink) -> None:
    bench.limit("USES_A_POLL", 2)
    bench.made[-1].die()
    bench.wait(0.0)
    link.touch(KEYS[:5])
    link.note_put(5)
    link.note_put(7)
    link.note_full()
    bench.wait(PAUSE_S[1])
    assert bench.heard() == [(KEYS[:2], 12, False), (KEYS[2:4], None, False), (KEYS[4:5], None, True)]
    assert [message["runs"] for message in link.take_reports() if "error" in message] == [1]


def test_put_is_sent_before_all_uses_are_sent(bench: Bench, link: CollectorLink) -> None:
    bench.limit("USES_A_POLL", 1)
    link.touch(KEYS[:3])
    link.note_put(0)
    assert bench.heard() == [(KEYS[:1], 0, False), (KEYS[1:2], None, False), (KEYS[2:3], None, False)]


def test_uses_dropped_at_the_limit_are_sent_when_repeated(bench: Bench, link: CollectorLink) -> None:
    bench.limit("UNSENT_KEYS_MAX", 2)
    link.touch(KEYS[:4])
    assert bench.used() == KEYS[:2]
    link.touch(KEYS[2:4])
    assert bench.used() == KEYS[2:4]


def test_latest_uses_are_kept_until_the_process_starts(bench: Bench) -> None:
    """A disk may take weeks to fill up. By then the first uses are out of date."""
    bench.limit("WAITING_KEYS_MAX", 3)
    link = bench.link()  # only the disk is a limit
    for key in (*KEYS[:5], KEYS[3]):
        link.touch([key])
        link.note_put(1)
    settle(link)
    assert link.works
    assert not bench.made
    link.note_full()
    settle(link)
    assert bench.heard() == [([KEYS[2], KEYS[4], KEYS[3]], None, True)]


def test_full_socket_does_not_block_the_link_and_loses_no_uses(bench: Bench, link: CollectorLink) -> None:
    keys = [block_key(n) for n in range(20_000)]
    link.touch(keys)
    for _ in range(100):
        link.poll()
    assert link._unsent
    got: list[OffloadKey] = []
    while len(got) < len(keys):
        got += bench.used()
    assert got == keys


# ---- what the process tells ------------------------------------------------------------------------------------------


def test_only_the_latest_unread_removals_are_kept(bench: Bench, link: CollectorLink) -> None:
    bench.limit("REMOVED_KEYS_MAX", 2)
    bench.say(removed=KEYS[:3])
    assert link.take_removed(9) == (KEYS[1:3], [])


def test_removal_is_in_doubt_if_a_later_store_may_have_been_forgotten(bench: Bench, link: CollectorLink) -> None:
    bench.limit("STORED_KEYS_MAX", 1)
    before = bench.clock.now
    bench.clock.advance(1.0)
    link.note_stored(KEYS[:2])
    bench.say(removed=KEYS[:1], since=before)
    bench.say(removed=KEYS[1:3], since=bench.clock.now)
    assert link.take_removed(9) == (KEYS[1:3], KEYS[:1])


@pytest.mark.parametrize("limit_s", [START_LAG_S, LAG_S], ids=["start", "later"])
@pytest.mark.parametrize("fault", ["silent", "failing", "ending"])
def test_engine_stops_storing_while_its_collector_counts_nothing(bench: Bench, fault: str, limit_s: float) -> None:
    link = bench.link(max_bytes=10_000)
    bench.say(full="so much is stored")
    assert link.is_full == "so much is stored"
    bench.say(full="")
    link.note_put(100)  # the head room, which is always kept free
    bench.wait(100.0)
    assert link.is_full == ""
    if limit_s == LAG_S:
        bench.say(counted=100, full="")
        link.note_put(100)
    link.note_put(1)
    bench.wait(0.0)
    why = "its process hangs"
    if fault == "failing":
        bench.say(error={"error": why, "runs": 1})
    elif fault == "ending":
        why = "it ended"
        bench.made[-1].die()
    bench.wait(limit_s - 0.2)
    assert link.is_full == ""
    bench.wait(0.3)
    assert f"the collector of max_bytes has not counted new blocks for {limit_s:.0f} s" in link.is_full
    assert why in link.is_full
    bench.wait(PAUSE_S[1])
    if fault == "ending":  # the next process counts what the first one did not
        assert sum(put or 0 for _, put, _ in bench.heard()) == 101
    bench.say(counted=1, full="")
    assert link.is_full == ""


def test_collector_that_counts_slowly_does_not_stop_the_engine(bench: Bench) -> None:
    link = bench.link(max_bytes=10_000)
    for _ in range(10):
        link.note_put(1000)
        bench.wait(0.9 * LAG_S)
        bench.say(counted=500, full="")
        assert link.is_full == ""


def test_idle_engine_is_not_stopped_by_puts_made_before_its_pause(bench: Bench) -> None:
    link = bench.link(max_bytes=10_000)
    link.note_put(1000)
    bench.wait(0.0)
    bench.clock.advance(3600.0)  # no step of the scheduler, so nobody polls
    assert link.is_full == ""
    bench.say(counted=1000, full="")
    assert link.is_full == ""


def test_recording_uses_and_one_walk_step_take_less_than_the_allowed_lag() -> None:
    assert process.NOTE_S_MAX + STEP_S < LAG_S


# ---- processes that fail ---------------------------------------------------------------------------------------------


def test_silent_process_is_killed_and_its_successor_gets_twice_the_time(
    bench: Bench, link: CollectorLink, caplog: pytest.LogCaptureFixture
) -> None:
    def silence() -> int:
        """How many rounds a process may be silent for."""
        count, rounds = len(bench.made), 0
        while not bench.made[count - 1].kills:
            bench.wait(link_module.LISTEN_S)
            rounds += 1
        assert not link.works
        bench.wait(PAUSE_S[1])
        return rounds

    bench.wait(100 * link_module.SILENT_S)  # this process was stopped, or had nothing to do: one round
    first = silence()
    assert link_module.SILENT_S - 2 <= first <= link_module.SILENT_S
    assert "the collector (process None) has not answered for" in caplog.text
    assert silence() >= 2 * first
    bench.say(report={"report": {}, "used": 1, "runs": 1})
    assert silence() >= 4 * first - 2  # a storage that is slow once is slow again
    assert len({config["owner"] for config in bench.configs}) == 1


@pytest.mark.parametrize("content", [None, 5, [0], [0, 0, None, None, 5], ["a", 0, None, None, None]], ids=str)
def test_process_that_sends_invalid_messages_is_replaced(bench: Bench, link: CollectorLink, content: Any) -> None:
    child = bench.made[-1]
    child.send(pack_frame(child.tag, content, pack_pairs([])))
    bench.wait(0.0)
    assert child.kills
    bench.wait(PAUSE_S[1])
    assert link.works
    assert len(bench.made) == 2


def test_close_in_a_fork_of_the_engine_does_not_end_the_collector_process(bench: Bench, link: CollectorLink) -> None:
    assert run_in_child(link.close) == 0
    bench.say(full="it is still heard")
    assert link.is_full


# ---- the process's end -----------------------------------------------------------------------------------------------


class Engine:
    """The other end of a News."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.theirs = theirs
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.news = News(theirs, bytes(16), MAPPER)
        self.reader = FrameReader(bytes(16))

    def read(self) -> list[tuple[list[Any], list[OffloadKey]]]:
        """All that is sent."""
        frames: list[tuple[list[Any], list[OffloadKey]]] = []
        self.sock.setblocking(False)
        while True:
            self.news.send()
            try:
                received = self.sock.recv(1 << 16)
            except BlockingIOError:
                return frames
            frames += [(content, [key for key, _ in unpack_pairs(raw)]) for content, raw in self.reader.feed(received)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.sock.close()
    engine.theirs.close()


def removal(count: int) -> CollectReport:
    report = CollectReport()
    report.removed_blobs["ttl"], report.removed_bytes["ttl"] = count, 10 * count
    return report


def test_news_unread_by_the_engine_is_merged_and_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without requests may read nothing for a week."""
    monkeypatch.setattr(process, "REMOVED_KEYS_A_FRAME", 100)
    keys = [block_key(n) for n in range(5000)]
    for number in range(1000):
        engine.news.poll_began_at = float(number)
        engine.news.add_removed([MAPPER.relative_name(key) for key in keys[5 * number : 5 * number + 5]], "ttl")
        engine.news.add_error(f"the {number}th")
        engine.news.add_poll(removal(2), number, "", 3)
        engine.news.add_poll(None, None, "full", 0)
        engine.news.send()
    frames = engine.read()
    assert len(frames) < 200
    assert sum(content[0] for content, _ in frames) == 3000
    assert [key for _, removed in frames for key in removed] == keys
    assert all(content[1] <= keys.index(removed[0]) / 5 for content, removed in frames if removed)
    reports = [content[3] for content, _ in frames if content[3]]
    assert sum(report["runs"] for report in reports) == 1000
    assert sum(report["report"]["removed_blobs"]["ttl"] for report in reports) == 2000
    assert sum(report["report"]["removed_bytes"]["ttl"] for report in reports) == 20_000
    errors = [content[4] for content, _ in frames if content[4]]
    assert sum(error["runs"] for error in errors) == 1000
    assert (reports[-1]["used"], errors[-1]["error"], frames[-1][0][2]) == (999, "the 999th", "full")


def test_process_without_news_sends_alive_messages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.read() == [([0, 0.0, None, None, None], [])]
    assert engine.read() == []
    monkeypatch.setattr(process, "ALIVE_EVERY_S", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    engine.news.add_removed(
        ["theirs", MAPPER.relative_name(KEYS[0]).replace("_r0/", "_r1/")], "ttl"
    )  # not of this engine
    assert engine.sock.recv(1 << 16)
