"""The collector's process and the tier it belongs to: uses, removals, deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.tiers.base import JobMetadata, OffloadingEvent
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.capacity.lease import LEASE_PREFIX, Lease
from kvtiers.tiers.capacity.link import CollectorLink
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.process import _note_uses
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.errors import StoreUnavailableError
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.processes import python_command
from kvtiers.tiers.recipe import StoreRecipe
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.store import SupportsTouch
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts, list_keys
from kvtiers.tiers.tier.counts import TierCounts
from kvtiers.tiers.tier.store_tier import StoreTierManager
from tests.files import files_below
from tests.identity import FakeSpec, block_key
from tests.processes import is_gone
from tests.waiting import HANG_S, wait_for

ROWS, ROW_BYTES = 8, 4096
KEYS = [block_key(n) for n in range(ROWS)]
MAPPER = FileMapper.from_offloading_spec("", FakeSpec())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def make_old(root: Path, age_s: float) -> None:
    at = time.time() - age_s
    for path, _ in files_below(root):
        if path.suffix == ".bin":
            with suppress(FileNotFoundError):  # the collector may remove what it finds old already
                os.utime(path, (at, at))


def start_link(root: Path, **policy: Any) -> CollectorLink:
    return CollectorLink(
        "test",
        StoreRecipe.of(LocalStore, root_dir=root),
        CapacityPolicy(**{"poll_s": 0.05, "every_s": 0.1, **policy}),
        MAPPER,
        notes_uses=issubclass(LocalStore, SupportsTouch),
    )


@pytest.fixture
def make_link(root: Path) -> Iterator[Callable[..., CollectorLink]]:
    """Starts links to collectors of the root, and closes them."""
    with ExitStack() as stack:
        yield lambda **policy: stack.enter_context(closing(start_link(root, **policy)))


@pytest.fixture
def link(make_link: Callable[..., CollectorLink]) -> CollectorLink:
    return make_link(ttl_s=1000.0)


@pytest.fixture
def make_tier(root: Path) -> Iterator[Callable[..., StoreTierManager]]:
    """Makes fs tiers on the root, and shuts them down."""
    with ExitStack() as stack:

        def make(spec: FakeSpec | None = None, **options: Any) -> StoreTierManager:
            rows = np.ones((ROWS, ROW_BYTES), np.int8)
            config = {"type": "fs", "root_dir": str(root), **options}
            tier = SecondaryTierFactory.create_secondary_tier(config, rows.data, spec or FakeSpec())
            assert isinstance(tier, StoreTierManager)
            stack.callback(tier.shutdown)
            return tier

        yield make


def test_removed_blocks_are_reported_to_the_engine(root: Path, link: CollectorLink) -> None:
    store = LocalStore(root)
    for key in KEYS:
        store.put(MAPPER.relative_name(key), as_parts(b"1"))
    other = MAPPER.relative_name(KEYS[0]).replace("_r0/", "_r1/")
    store.put(other, as_parts(b"1"))
    make_old(root, 2000)
    removed: list[bytes] = []

    def all_told() -> bool:
        removed.extend(link.take_removed(3)[0])
        return len(removed) == len(KEYS)

    wait_for(all_told)
    assert sorted(removed) == sorted(KEYS)
    wait_for(lambda: any("report" in report for report in link.take_reports()))
    wait_for(lambda: all(key.startswith(OWN_PREFIX) for key in list_keys(store)))  # the other one's may go later


def test_uses_are_recorded_and_keep_blocks(root: Path, link: CollectorLink) -> None:
    store = LocalStore(root)
    wait_for(lambda: bool(link.take_reports()))  # it runs
    path = root / MAPPER.relative_name(KEYS[0])
    store.put(MAPPER.relative_name(KEYS[0]), as_parts(b"1"))
    make_old(root, 900)
    link.touch([KEYS[0], KEYS[1]])  # one of them is not there
    wait_for(lambda: time.time() - path.stat().st_mtime < 100)
    # At most once in a quarter of the ttl.
    make_old(root, 900)
    link.touch([KEYS[0]])
    link.touch([KEYS[2]])
    assert time.time() - path.stat().st_mtime > 800


def test_dead_collector_is_restarted(root: Path, link: CollectorLink) -> None:
    wait_for(lambda: bool(link.take_reports()))
    process = link._process
    assert process is not None
    process.kill()
    wait_for(lambda: link._process is not None and link._process.pid != process.pid)
    assert [message["runs"] for message in link.take_reports() if "error" in message] == [1]  # its end
    wait_for(lambda: any("report" in message for message in link.take_reports()))


def store_with_program(root: str) -> LocalStore:
    """A store whose library starts a program and never stops it."""
    program = subprocess.Popen(["/bin/sleep", str(HANG_S)], stdout=subprocess.DEVNULL)
    Path(f"{root}.pid").write_text(str(program.pid), encoding="ascii")
    return LocalStore(root)


def test_program_that_a_collectors_library_runs_ends_with_the_collector(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.tiers.capacity.link.CLOSE_S", HANG_S)  # it ends by itself
    recipe = StoreRecipe.of(store_with_program, root=str(root))
    link = CollectorLink("test", recipe, CapacityPolicy(poll_s=0.05, ttl_s=1000.0), MAPPER, notes_uses=True)
    try:
        wait_for(lambda: any("report" in message for message in link.take_reports()))
    finally:
        link.close()
    stat = Path("/proc", Path(f"{root}.pid").read_text(encoding="ascii"), "stat")
    wait_for(lambda: not stat.exists() or stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z")


def test_hung_collector_is_killed_and_restarted(
    root: Path, link: CollectorLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if the thread that sends uses is blocked by the hanging process."""
    wait_for(lambda: any("report" in message for message in link.take_reports()))
    process = link._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    link.touch([block_key(n) for n in range(10_000)])  # more than a pipe holds
    monkeypatch.setattr("kvtiers.tiers.capacity.link.LISTEN_S", 0.01)
    link._silent_s = 0.1
    wait_for(lambda: not link.works)
    assert process.poll() is not None or process.wait(HANG_S) is not None
    wait_for(lambda: link.works)
    monkeypatch.setattr("kvtiers.tiers.capacity.link.LISTEN_S", 1.0)
    link._silent_s = HANG_S
    wait_for(lambda: any("report" in message for message in link.take_reports()))
    wait_for(lambda: not link._unnoted)
    assert f"its collector (process {process.pid}) has not answered for" in caplog.text


def test_idle_collector_sends_heartbeats(
    monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    heard: list[bytes] = []
    lines = CollectorLink._lines

    def hear(self: CollectorLink, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        for line in lines(self, process):
            heard.append(line)
            yield line

    monkeypatch.setattr(CollectorLink, "_lines", hear)
    make_link(max_bytes=1 << 30, every_s=3600.0, poll_s=3600.0)
    wait_for(lambda: b"{}" in heard)


@pytest.mark.parametrize("is_own", [True, False])
def test_lease_of_a_dead_collector_is_taken_over_by_its_engine(
    root: Path, is_own: bool, monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    monkeypatch.setattr("kvtiers.tiers.capacity.link.RESTART_S", (0.01, 60.0))
    link = make_link(ttl_s=1000.0, lease_s=1e9)
    wait_for(lambda: bool(link.take_reports()))
    process = link._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    store = LocalStore(root)
    for key in list_keys(store, LEASE_PREFIX):
        store.delete(key)
    assert Lease(store, link._owner if is_own else "another engine's").try_acquire()  # as if killed within a run
    process.kill()
    wait_for(lambda: link._process is not process and link.works)
    link.take_reports()
    (root / MAPPER.relative_name(KEYS[0])).parent.mkdir(parents=True)
    (root / MAPPER.relative_name(KEYS[0])).write_bytes(b"1")
    make_old(root, 2000)
    if is_own:
        wait_for(lambda: link.take_removed(1) == ([KEYS[0]], []))
    else:
        link.touch([KEYS[0]])
        wait_for(lambda: not link._unnoted)  # it works, and waits
        assert list_keys(store, LEASE_PREFIX)


@pytest.mark.parametrize("policy", [{}, {"min_free_bytes": 1 << 20}])
def test_collector_without_max_bytes_and_ttl_starts_when_the_storage_is_full(
    policy: dict[str, Any], make_link: Callable[..., CollectorLink]
) -> None:
    link = make_link(**policy)
    link.touch(KEYS)
    link._touch_every_s = 0.0
    link.touch(KEYS)
    wait_for(lambda: link._uses.empty())
    assert link.works
    assert link._process is None
    assert len(link._unnoted) == len(KEYS)  # each use is remembered once
    link.note_full()
    wait_for(lambda: any("report" in message for message in link.take_reports()))
    wait_for(lambda: not link._unnoted)  # uses from before its start are noted, too
    make_link().close()  # one that never started


def test_uses_while_the_collector_is_down_are_recorded_by_the_next_one(
    root: Path, link: CollectorLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root)
    paths = [root / MAPPER.relative_name(key) for key in KEYS[:2]]
    for key in KEYS[:2]:
        store.put(MAPPER.relative_name(key), as_parts(b"1"))
    make_old(root, 900)
    wait_for(lambda: bool(link.take_reports()))
    process = link._process
    assert process is not None
    # One use is handed to a process that dies before it notes it, the other comes while there is none.
    process.send_signal(signal.SIGSTOP)
    link.touch([KEYS[0]])
    wait_for(lambda: len(link._unnoted) == 1)
    process.kill()
    wait_for(lambda: link._process is not process)
    link.touch([KEYS[1]])
    wait_for(lambda: all(time.time() - path.stat().st_mtime < 100 for path in paths))
    wait_for(lambda: not link._unnoted)


def test_uses_while_no_collector_can_be_started_are_recorded_later(
    root: Path, monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    monkeypatch.setattr("kvtiers.tiers.capacity.link.RESTART_S", (0.01, 60.0))
    real, may_start = subprocess.Popen, threading.Event()

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        if not may_start.is_set():
            raise BlockingIOError("no more processes")
        return real(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("kvtiers.tiers.capacity.link.UNNOTED_KEYS_MAX", 1)
    store = LocalStore(root)
    paths = [root / MAPPER.relative_name(key) for key in KEYS[:2]]
    for path in paths:
        store.put(str(path.relative_to(root)), as_parts(b"1"))
    make_old(root, 900)
    link = make_link(ttl_s=1000.0)
    link.touch([KEYS[0]])
    link.touch([KEYS[1]])  # there is no room for it now, so it is not taken for noted
    may_start.set()
    wait_for(lambda: time.time() - paths[0].stat().st_mtime < 100)
    wait_for(lambda: not link._unnoted)
    link.touch([KEYS[1]])
    wait_for(lambda: time.time() - paths[1].stat().st_mtime < 100)


def test_uses_before_the_collector_starts_are_bounded_and_the_latest_recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    """A disk may take weeks to fill up. By then the first uses are out of date."""
    monkeypatch.setattr("kvtiers.tiers.capacity.link.WAITING_KEYS_MAX", 2)
    link = make_link()  # only the disk is a limit
    for key in (*KEYS[:4], KEYS[0]):
        link.touch([key])
    wait_for(lambda: list(link._unnoted) == [KEYS[3], KEYS[0]])
    store = LocalStore(root)
    paths = [root / MAPPER.relative_name(key) for key in (KEYS[0], KEYS[1], KEYS[3])]
    for path in paths:
        store.put(str(path.relative_to(root)), as_parts(b"1"))
    make_old(root, 900)
    link.note_full()
    wait_for(lambda: link._process is not None and not link._unnoted)
    first, unused, last = paths
    assert all(time.time() - path.stat().st_mtime < 100 for path in (first, last))
    with suppress(FileNotFoundError):  # the disk is full, so it may be removed already
        assert time.time() - unused.stat().st_mtime > 100


class Untouchable(MemoryStore):
    """Recording a use of some blocks fails."""

    def __init__(self, bad: set[str]) -> None:
        super().__init__()
        self.bad = bad
        self.touched: list[str] = []

    def touch(self, key: str) -> None:
        if key in self.bad:
            raise StoreUnavailableError("Input/output error (EIO)", key=key)
        self.touched.append(key)


def test_uses_stay_queued_while_the_storage_is_down_but_not_for_one_failing_block() -> None:
    names = [f"b{n}" for n in range(20)]
    store = Untouchable(set(names))
    touches = deque(names)
    assert _note_uses(store, touches, 60.0) == 0
    assert list(touches) == names
    store.bad = {"b0", "b7"}
    assert _note_uses(store, touches, 60.0) == 20
    assert not touches
    assert store.touched == [name for name in names if name not in store.bad]


@pytest.mark.parametrize("said", ['{"removed": ["a', '{"used": 1}', "no JSON\\n", "5\\n"])
def test_collector_that_dies_within_a_message_is_restarted(
    monkeypatch: pytest.MonkeyPatch, said: str, make_link: Callable[..., CollectorLink]
) -> None:
    real, starts = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        starts.append(command)
        if len(starts) == 1:
            command = [sys.executable, "-c", f"print(end='{said}')"]
        return real(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("kvtiers.tiers.capacity.link.RESTART_S", (0.01, 60.0))
    link = make_link(ttl_s=1000.0)
    told: list[dict[str, Any]] = []

    def works() -> bool:
        told.extend(link.take_reports())
        return any("report" in message for message in told)

    wait_for(works)
    assert [message["runs"] for message in told if "error" in message] == [1]
    assert len(starts) == 2


def test_close_leaves_no_process_and_no_lease(
    root: Path, monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    monkeypatch.setattr(
        "kvtiers.tiers.capacity.link.CLOSE_S", HANG_S
    )  # a busy machine leaves a nice process little time
    link = make_link(ttl_s=1000.0)
    wait_for(lambda: bool(link.take_reports()))
    process = link._process
    assert process is not None
    link.close()
    assert process.poll() is not None
    assert not [key for key in list_keys(LocalStore(root)) if key.startswith(f"{OWN_PREFIX}lease/")]


@pytest.mark.parametrize("forks", [False, True])
def test_collector_process_ends_when_its_parent_dies(root: Path, forks: bool) -> None:
    """Also if another process of the parent still has the other end of its input open."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.tiers.capacity.test_collector_process import start_link\n"
        "link = start_link(Path(sys.argv[1]), ttl_s=1000.0)\n"
        "while not link.take_reports():\n"
        "    time.sleep(0.01)\n"
        "helper = os.fork() if int(sys.argv[2]) else 0\n"
        "if helper or not int(sys.argv[2]):\n"
        "    print(link._process.pid, helper, flush=True)\n"
        "time.sleep(3600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(int(forks))],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, helper = map(int, parent.stdout.readline().split())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    try:
        wait_for(lambda: is_gone(pid))
    finally:
        if helper:
            os.kill(helper, signal.SIGKILL)


def test_collector_process_ends_when_its_input_ends_within_a_line(root: Path) -> None:
    process = subprocess.Popen(
        python_command("kvtiers.tiers.capacity.process", str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    config = {
        **StoreRecipe.of(LocalStore, root_dir=root).encode(),
        "policy": {"ttl_s": 1000.0},
        "prefix": "m_",
        "log_level": 30,
    }
    try:
        process.communicate(f'{json.dumps(config)}\n["a block that was us', timeout=HANG_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_collector_process_reports_an_error_and_continues(root: Path, make_link: Callable[..., CollectorLink]) -> None:
    root.write_text("no folder")
    link = make_link(ttl_s=1000.0)
    assert "StoreConfigError" in wait_for(link.take_reports)[0]["error"]
    root.unlink()
    wait_for(lambda: any("report" in report for report in link.take_reports()))


def test_unread_reports_are_merged(link: CollectorLink) -> None:
    link.close()
    link._reader.join()  # what follows is the reader's
    link.take_reports()
    for number in range(1000):
        report = {"removed_blobs": {"ttl": 1, "capacity": 2}, "removed_bytes": {"ttl": 10, "capacity": 20}, "blobs": 5}
        link._hear({"report": report, "used": number})
        link._hear({"error": f"the {number}th"})
        assert len(link._reports) <= 2
    told = {"error" in message: message for message in link.take_reports()}
    assert told[True] == {"error": "the 999th", "runs": 1000}
    assert told[False]["report"]["removed_blobs"] == {"ttl": 1000, "capacity": 2000}
    assert told[False]["report"]["removed_bytes"] == {"ttl": 10_000, "capacity": 20_000}
    assert told[False]["used"] == 999
    assert told[False]["runs"] == 1000


# -- in a tier ---------------------------------------------------------------------------------------------------------


def store_all(tier: StoreTierManager) -> int:
    tier.submit_store(JobMetadata(1, KEYS, np.arange(ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    return len(result.successful_keys)


def test_tier_emits_removed_events_for_collected_blocks(
    root: Path, monkeypatch: pytest.MonkeyPatch, make_tier: Callable[..., StoreTierManager]
) -> None:
    monkeypatch.setattr("kvtiers.tiers.config.tier_options.LIST_EVERY_S", 1.0)
    spec = FakeSpec()
    tier = make_tier(spec=spec, min_free=0, ttl="1h", max_bytes="1MiB")
    wait_for(lambda: store_all(tier) == ROWS)
    list(tier.take_events())
    assert tier.lookup(KEYS[0])
    events: list[OffloadingEvent] = []

    def all_removed() -> bool:
        # Each time: a store that found blocks there used them, which the collector may note later than this.
        make_old(root, 7200)
        tier.on_schedule_end()
        events.extend(tier.take_events())
        return sum(len(event.keys) for event in events) == ROWS

    wait_for(all_removed)
    assert all(event.removed for event in events)
    assert {key for event in events for key in event.keys} == set(KEYS)
    assert tier.lookup(KEYS[0]) is None  # what was known of it is forgotten: it is asked again

    def counted() -> bool:
        tier.on_schedule_end()
        return spec.metrics.value("kvtiers_collector_removed_blobs_total", "fs", "ttl") == ROWS

    wait_for(counted)
    assert spec.metrics.value("kvtiers_storage_max_bytes", "fs") == 1 << 20


def test_block_stored_again_is_not_reported_as_removed(
    monkeypatch: pytest.MonkeyPatch, make_tier: Callable[..., StoreTierManager]
) -> None:
    """After an idle night more removals wait than one step reports."""
    monkeypatch.setattr("kvtiers.tiers.tier.store_tier.REMOVED_KEYS_PER_STEP_MAX", 1)
    tier = make_tier(min_free=0, ttl="1h")
    assert isinstance(tier._collector, CollectorLink)
    tier._collector._hear({"removed": [tier.mapper.relative_name(key) for key in KEYS]})
    tier.submit_store(JobMetadata(1, KEYS[1:], np.arange(1, ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert result.success
    for _ in KEYS:
        tier.on_schedule_end()
    told = [(event.removed, set(event.keys)) for event in tier.take_events()]
    assert told == [(False, set(KEYS[1:])), (True, {KEYS[0]})]


@pytest.mark.parametrize("is_there", [True, False])
def test_removal_reported_after_a_store_is_checked_in_the_storage(
    is_there: bool, make_tier: Callable[..., StoreTierManager]
) -> None:
    """A collector reports a batch of removals when the batch ends. Meanwhile a block may be stored again."""
    tier = make_tier(min_free=0, ttl="1h")
    assert isinstance(tier._collector, CollectorLink)
    began_at = time.monotonic()
    assert store_all(tier) == ROWS
    if not is_there:
        for key in KEYS:
            tier.store.delete(tier.mapper.relative_name(key))
    tier._collector._hear({"removed": [tier.mapper.relative_name(key) for key in KEYS], "since": began_at})

    def is_judged() -> bool:
        tier.on_schedule_end()
        return not tier._doubtful

    wait_for(is_judged)
    told = [(event.removed, set(event.keys)) for event in tier.take_events()]
    assert told[0] == (False, set(KEYS))
    assert all(removed for removed, _ in told[1:])
    assert sorted(key for _, keys in told[1:] for key in keys) == ([] if is_there else sorted(KEYS))


def test_removals_in_doubt_are_bounded_in_each_step(
    monkeypatch: pytest.MonkeyPatch, make_tier: Callable[..., StoreTierManager]
) -> None:
    """While the storage is slow, a step must not ask for all blocks that were removed in the meantime."""
    monkeypatch.setattr("kvtiers.tiers.tier.store_tier.REMOVED_KEYS_PER_STEP_MAX", 3)
    monkeypatch.setattr("kvtiers.tiers.tier.store_tier.DOUBTFUL_ASKED_MAX", 2)
    tier = make_tier(min_free=0, ttl="1h")
    assert isinstance(tier._collector, CollectorLink)
    began_at = time.monotonic()
    assert store_all(tier) == ROWS
    tier._collector._hear({"removed": [tier.mapper.relative_name(key) for key in KEYS], "since": began_at})
    asked: list[OffloadKey] = []
    with monkeypatch.context() as patch:
        patch.setattr(tier._lookup, "lookup_surely", asked.append)  # None: there is no answer yet
        for _ in range(5):
            tier.on_schedule_end()
    assert asked == list(KEYS[:2]) * 5
    assert list(tier._doubtful) == list(KEYS[:3])

    def are_judged() -> bool:
        tier.on_schedule_end()
        assert isinstance(tier._collector, CollectorLink)
        return not (tier._doubtful or tier._collector._removed)

    wait_for(are_judged)


def test_removal_after_the_last_store_is_reported_at_once(link: CollectorLink) -> None:
    link.close()
    link._reader.join()  # what follows is the reader's
    link.note_stored(KEYS[:2])
    link._hear({"removed": [MAPPER.relative_name(key) for key in KEYS[:3]], "since": time.monotonic()})
    assert link.take_removed(9) == (list(KEYS[:3]), [])


def test_removal_before_stores_that_are_not_remembered_is_in_doubt(
    link: CollectorLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.close()
    link._reader.join()  # what follows is the reader's
    monkeypatch.setattr("kvtiers.tiers.capacity.link.STORED_KEYS_MAX", 1)
    before = time.monotonic()
    link.note_stored(KEYS[:2])
    link._hear({"removed": [MAPPER.relative_name(KEYS[0])], "since": before})
    link._hear({"removed": [MAPPER.relative_name(KEYS[2])], "since": time.monotonic()})
    assert link.take_removed(9) == ([KEYS[2]], [KEYS[0]])


def test_removals_that_wait_are_bounded(link: CollectorLink, monkeypatch: pytest.MonkeyPatch) -> None:
    link.close()
    link._reader.join()  # what follows is the reader's
    monkeypatch.setattr("kvtiers.tiers.capacity.link.REMOVED_KEYS_MAX", 2)
    link._hear({"removed": [MAPPER.relative_name(key) for key in KEYS[:3]]})
    assert link.take_removed(9) == (list(KEYS[1:3]), [])


def test_used_bytes_metric_is_exported_once_it_is_known() -> None:
    metrics = Metrics()
    counts = TierCounts(metrics, "fs", collects=True)
    for used, shown in ((100, [100]), (None, []), (0, [0])):
        counts.collected({"report": {"removed_blobs": {}, "removed_bytes": {}}, "used": used, "runs": 1})
        assert [s.value for s in metrics.snapshot() if s.name == "kvtiers_storage_used_bytes"] == shown


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, with the mount options of the parameter."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"{request.param},mode=700", "kvtiers-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting takes root: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("small", "min_free"),
    [("size=2m,nr_inodes=1000", "1MiB"), ("size=1m,nr_inodes=1000", 0), ("size=64m,nr_inodes=60", 0)],
    indirect=["small"],
)
def test_full_disk_without_other_limits_loses_its_oldest_blocks(small: Path, min_free: object) -> None:
    """Three cases: min_free is reached, the disk is full, its inodes are used up."""
    region = np.ones((ROWS, 16 * ROW_BYTES), np.int8)
    config = {"type": "fs", "root_dir": str(small / "kv"), "min_free": min_free, "isolation": "thread"}
    tier = SecondaryTierFactory.create_secondary_tier(config, region.data, FakeSpec())
    assert isinstance(tier, StoreTierManager)
    assert isinstance(tier._collector, CollectorLink)
    numbers = count()

    def stores() -> bool:
        number = next(numbers)
        tier.submit_store(JobMetadata(number, [block_key(number)], np.zeros(1, np.int32)))
        tier.drain_jobs()
        tier.on_schedule_end()
        (result,) = tier.get_finished()
        return result.success

    try:
        while stores():
            assert tier._collector._process is None
        first_refused = next(numbers)
        wait_for(stores)
        removed: set[OffloadKey] = set()

        def are_told() -> bool:
            tier.on_schedule_end()
            removed.update(key for event in tier.take_events() if event.removed for key in event.keys)
            return bool(removed)

        wait_for(are_told)
        assert removed <= {block_key(number) for number in range(first_refused)}
    finally:
        tier.shutdown()


def test_tier_stores_where_the_file_system_reports_no_size(
    monkeypatch: pytest.MonkeyPatch, make_tier: Callable[..., StoreTierManager]
) -> None:
    nothing = os.statvfs_result((512, 512, *[0] * 7, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    monkeypatch.setattr(os, "fstatvfs", lambda _: nothing)
    tier = make_tier(isolation="thread")
    assert store_all(tier) == ROWS


def test_tier_refuses_stores_while_its_root_is_full(root: Path, make_tier: Callable[..., StoreTierManager]) -> None:
    spec = FakeSpec()
    tier = make_tier(spec=spec, min_free=0, max_bytes="1MiB")
    assert isinstance(tier._collector, CollectorLink)
    assert store_all(tier) == ROWS  # from the first moment on
    foreign = root / "theirs"
    foreign.write_bytes(bytes(1 << 20))
    tier._collector.note_put(1 << 20)
    wait_for(lambda: isinstance(tier._collector, CollectorLink) and tier._collector.is_full)
    assert store_all(tier) == 0
    assert "of max_bytes = 1048576" in tier.full
    assert spec.metrics.value("kvtiers_stores_dropped_total", "fs", "StoreFullError") == ROWS
    foreign.unlink()
    wait_for(lambda: isinstance(tier._collector, CollectorLink) and not tier._collector.is_full)
    wait_for(lambda: store_all(tier) == ROWS)


def test_engine_stops_to_put_if_its_collector_fails_for_long(
    root: Path, monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    monkeypatch.setattr("kvtiers.tiers.capacity.link.FAILING_S_MAX", 0.05)
    root.write_text("no folder")
    bounded, unbounded = make_link(max_bytes=1 << 20), make_link(ttl_s=1000.0)
    wait_for(lambda: bounded.is_full)
    assert "the collector has not worked for 0 s: StoreConfigError" in bounded.is_full
    wait_for(unbounded.take_reports)
    assert unbounded.is_full == ""
    root.unlink()
    wait_for(lambda: not bounded.is_full)


def test_config_of_the_namespace_is_written_where_nothing_may_be_stored_yet(
    root: Path, make_tier: Callable[..., StoreTierManager]
) -> None:
    tier = make_tier(min_free=0, max_bytes="1MiB")
    tier.shutdown()
    assert len(list(root.glob("*/config.json"))) == 1


def test_block_names_convert_back_to_keys() -> None:
    for key in (*KEYS, block_key(1, group=3)):
        assert MAPPER.key_of(MAPPER.relative_name(key)) == key
    good = MAPPER.relative_name(KEYS[0])
    for bad in (
        "",
        good + "x",
        good.replace("_r0", "_r1"),
        good.replace("_g0", "_g\u0663"),
        good.replace("_g0", "_g00"),
    ):
        assert MAPPER.key_of(bad) is None
    assert not isinstance(MemoryStore(), SupportsTouch)
