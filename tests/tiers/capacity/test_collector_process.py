"""The collector's process and the tier it belongs to: uses, removals, deaths."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvtiers.tiers.base import JobMetadata, OffloadingEvent
from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.capacity.link import CollectorLink
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.capacity.usage import read_usage
from kvtiers.tiers.frames import pack_pairs
from kvtiers.tiers.metrics import Metrics
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


def polled(link: CollectorLink) -> CollectorLink:
    """For loops that wait: an engine polls in each step."""
    link.poll()
    return link


def tell_removed(tier: StoreTierManager, since: float) -> None:
    """As if the collector had told that it removed all blocks."""
    assert tier._collector is not None
    content = [0, since, None, None, None]
    tier._collector._hear(tier._collector._child, content, pack_pairs([(key, 0) for key in KEYS]))


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
        link.poll()
        removed.extend(link.take_removed(3)[0])
        return len(removed) == len(KEYS)

    wait_for(all_told)
    assert sorted(removed) == sorted(KEYS)
    wait_for(lambda: any("report" in report for report in link.take_reports()))
    wait_for(lambda: all(key.startswith(OWN_PREFIX) for key in list_keys(store)))  # the other one's may go later


def test_use_of_a_block_renews_its_mtime(root: Path, link: CollectorLink) -> None:
    store = LocalStore(root)
    wait_for(link.take_reports)  # it runs
    path = root / MAPPER.relative_name(KEYS[0])
    store.put(MAPPER.relative_name(KEYS[0]), as_parts(b"1"))
    make_old(root, 900)
    link.touch([KEYS[0], KEYS[1]])  # one of them is not there
    wait_for(lambda: polled(link) and time.time() - path.stat().st_mtime < 100)


def test_close_ends_the_collector_process_and_releases_its_lease(
    root: Path, monkeypatch: pytest.MonkeyPatch, make_link: Callable[..., CollectorLink]
) -> None:
    monkeypatch.setattr("kvtiers.tiers.capacity.link.CLOSE_S", HANG_S)  # a nice process gets little time when busy
    monkeypatch.setattr("kvtiers.tiers.capacity.process.EXIT_S", HANG_S)
    link = make_link(ttl_s=1000.0)
    wait_for(link.take_reports)
    (pid,) = link.pids
    link.close()
    assert not psutil.pid_exists(pid)
    assert (usage := read_usage(LocalStore(root))) is not None
    assert not usage.holder


def test_collector_process_ends_with_its_engine_although_a_fork_holds_its_socket(root: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from tests.tiers.capacity.test_collector_process import start_link
link = start_link(Path(sys.argv[1]), ttl_s=1000.0)
while not link.take_reports():
    time.sleep(0.01)
if helper := os.fork():
    print(*link.pids, helper, flush=True)
time.sleep(3600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, helper = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        wait_for(lambda: is_gone(pid))
    finally:
        os.kill(helper, signal.SIGKILL)


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
    tell_removed(tier, -math.inf)
    tier.submit_store(JobMetadata(1, KEYS[1:], np.arange(1, ROWS, dtype=np.int32)))
    tier.drain_jobs()
    (result,) = tier.get_finished()
    assert result.success
    for _ in KEYS:
        tier.on_schedule_end()
    told = [(event.removed, set(event.keys)) for event in tier.take_events()]
    assert told == [(False, set(KEYS[1:])), (True, {KEYS[0]})]


@pytest.mark.parametrize("is_there", [True, False])
def test_removal_reported_after_a_store_emits_no_event_and_causes_a_new_lookup(
    is_there: bool, make_tier: Callable[..., StoreTierManager]
) -> None:
    """A collector reports a batch of removals when the batch ends. Meanwhile a block may be stored again."""
    tier = make_tier(min_free=0, ttl="1h")
    began_at = time.monotonic()
    assert store_all(tier) == ROWS
    if not is_there:
        tier.store.delete(tier.mapper.relative_name(KEYS[0]))
    tell_removed(tier, began_at)
    tier.on_schedule_end()
    assert [(event.removed, set(event.keys)) for event in tier.take_events()] == [(False, set(KEYS))]

    def looked_up() -> list[bool]:
        tier.on_schedule_end()
        tier.take_answered()
        found = tier.lookup(KEYS[0])
        return [] if found is None else [found]

    assert wait_for(looked_up) == [is_there]


def test_used_bytes_metric_is_exported_only_while_used_bytes_are_known() -> None:
    metrics = Metrics()
    counts = TierCounts(metrics, "fs")
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
    assert tier._collector is not None
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
            assert not tier._collector.pids
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
    collector = tier._collector
    assert collector is not None
    assert store_all(tier) == ROWS  # from the first moment on
    foreign = root / "theirs"
    foreign.write_bytes(bytes(1 << 20))
    collector.note_put(1 << 20)
    wait_for(lambda: polled(collector).is_full)
    assert store_all(tier) == 0
    assert "of max_bytes = 1048576" in tier.full
    assert spec.metrics.value("kvtiers_stores_dropped_total", "fs", "StoreFullError") == ROWS
    foreign.unlink()
    wait_for(lambda: not polled(collector).is_full)
    wait_for(lambda: store_all(tier) == ROWS)


def test_collector_whose_storage_fails_reports_it_and_continues(
    root: Path, make_link: Callable[..., CollectorLink]
) -> None:
    root.write_text("no folder")
    link = make_link(ttl_s=1000.0)
    assert "StoreConfigError" in wait_for(link.take_reports)[0]["error"]
    root.unlink()
    wait_for(lambda: any("report" in report for report in link.take_reports()))


def test_namespace_config_is_written_although_the_tier_may_not_store_blocks_yet(
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
