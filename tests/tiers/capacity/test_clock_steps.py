"""Steps of the storage's clock: blocks that a step makes look old stay for one more ttl."""

from __future__ import annotations

from typing import Any

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.capacity import clock as clock_module
from kvtiers.tiers.capacity.clock import ClockReading
from kvtiers.tiers.capacity.collector import Collector
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.walker import CollectReport, is_block
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts, list_keys
from tests.identity import FakeSpec, block_key

MAPPER = FileMapper.from_offloading_spec("", FakeSpec())
DAY_S = 86_400.0
TTL_S = 7 * DAY_S
STEP = "the storage's clock was stepped"


class Machine:
    """A storage with a clock of its own, and a host that collects it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = 0.0  # true time, which no step changes
        self.storage_offset_s, self.host_offset_s = 1e9, 1e9
        self.boot = "this start"
        monkeypatch.setattr("kvtiers.tiers.capacity.collector.boot_id", lambda: self.boot)
        self.store = MemoryStore(clock=lambda: self.storage_offset_s + self.passed_s)

    def put(self, number: int) -> None:
        self.store.put(MAPPER.relative_name(block_key(number)), as_parts(b"1"), overwrite=True)

    @property
    def stored(self) -> int:
        return len([key for key in list_keys(self.store) if is_block(key)])

    def collector(self, **policy: Any) -> Collector:
        return Collector(
            self.store,
            CapacityPolicy(**{"ttl_s": TTL_S, **policy}),
            clock=lambda: self.host_offset_s + self.passed_s,
            monotonic=lambda: self.passed_s,
            since_boot=lambda: self.passed_s,
        )

    def collect(self, **policy: Any) -> CollectReport:
        report = self.collector(**policy).run()
        assert report is not None
        return report


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("step_s", [2 * TTL_S, -4 * TTL_S, 3650 * DAY_S])
@pytest.mark.parametrize("same_process", [True, False])
def test_step_of_the_clock_removes_nothing_until_ttl_has_passed(
    machine: Machine, step_s: float, same_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    collector = machine.collector()
    for number in range(10):
        machine.put(number)
    machine.passed_s += 60.0
    collector.run()
    machine.storage_offset_s += step_s
    collector = collector if same_process else machine.collector()
    for _ in range(6):
        machine.passed_s += DAY_S
        report = collector.run()
        assert report is not None
        assert 0 < report.ttl_waits_s <= TTL_S
    assert machine.stored == 10
    assert caplog.text.count(STEP) == 1
    for number in range(3):
        machine.put(number)  # stored again meanwhile
    machine.passed_s += 2 * DAY_S
    report = machine.collect()
    assert report.ttl_waits_s == 0
    assert machine.stored == 3


def test_step_of_the_clock_that_is_reversed_removes_nothing(machine: Machine) -> None:
    """A wrong clock is corrected later. Blocks stored meanwhile then have timestamps in the future."""
    machine.put(0)
    machine.collect()
    machine.storage_offset_s += 30 * DAY_S
    machine.passed_s += 600.0
    machine.put(1)
    machine.collect()
    machine.storage_offset_s -= 30 * DAY_S
    machine.passed_s += 600.0
    machine.put(2)
    machine.collect()
    machine.passed_s += 6 * DAY_S
    machine.collect()
    assert machine.stored == 3
    machine.passed_s += 2 * DAY_S
    machine.collect()
    assert machine.stored == 0


def test_small_step_of_the_clock_changes_nothing(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.put(0)
    machine.collect()
    machine.storage_offset_s += TTL_S / 5
    machine.passed_s += TTL_S
    assert machine.collect().removed_blobs["ttl"] == 1
    assert STEP not in caplog.text


@pytest.mark.parametrize("boot", ["this start", "another machine"])
def test_root_measured_but_unused_for_ttl_is_emptied(machine: Machine, boot: str) -> None:
    """An engine measures the root regularly, or a command does on another machine with another clock."""
    machine.put(0)
    machine.collect()
    for _ in range(8):
        machine.boot, boot = boot, machine.boot
        machine.host_offset_s += 3600.0 if boot == "this start" else -3600.0
        machine.passed_s += DAY_S
        machine.collect()
    assert machine.stored == 0


def test_root_not_measured_for_ttl_is_emptied_on_the_same_machine(machine: Machine) -> None:
    machine.put(0)
    machine.collect()
    machine.passed_s += 30 * DAY_S
    assert machine.collect().removed_blobs["ttl"] == 1


def test_root_not_measured_for_ttl_waits_after_a_restart(machine: Machine) -> None:
    """The machine may have started with a wrong clock."""
    machine.put(0)
    machine.collect()
    machine.boot = "the next start"
    machine.passed_s += 30 * DAY_S
    assert machine.collect().ttl_waits_s == TTL_S
    machine.passed_s += TTL_S
    assert machine.collect().removed_blobs["ttl"] == 1


def test_ttl_shorter_than_the_time_between_two_machines_measurements_removes(machine: Machine) -> None:
    machine.put(0)
    for boot in ("a", "b", "a", "b"):
        machine.boot = boot
        machine.passed_s += 3600.0
        machine.collect(ttl_s=600.0, every_s=3600.0)
    assert machine.stored == 0


def test_first_collection_waits_if_storage_and_host_clocks_differ(machine: Machine) -> None:
    """Such as ``kvtiers gc`` after a step of the server's clock, on a root that was never measured."""
    machine.put(0)
    machine.storage_offset_s += 30 * DAY_S
    machine.passed_s += 600.0
    assert machine.collect().ttl_waits_s == TTL_S
    machine.passed_s += TTL_S / 2
    assert machine.collect().ttl_waits_s == TTL_S / 2
    assert machine.stored == 1
    machine.passed_s += TTL_S
    assert machine.collect().removed_blobs["ttl"] == 1  # a clock that stays wrong does not keep blocks forever


def test_step_during_a_collection_without_ttl_is_noticed_later(machine: Machine) -> None:
    machine.put(0)
    machine.collect()
    machine.storage_offset_s += 30 * DAY_S
    machine.collect(ttl_s=None, max_bytes=1 << 20)
    assert machine.collect().ttl_waits_s == TTL_S
    assert machine.stored == 1


@pytest.mark.parametrize("measured", [True, False])
def test_dry_run_uses_storage_clock_if_it_is_known(machine: Machine, measured: bool) -> None:
    if measured:
        machine.collect()
    machine.put(0)
    machine.host_offset_s += 30 * DAY_S  # the clock of the command's host is wrong
    report = machine.collector().run(dry_run=True)
    assert report is not None
    assert (report.removed_blobs["ttl"], report.ttl_waits_s) == ((0, 0.0) if measured else (1, 0.0))


@pytest.mark.parametrize(
    "content", [None, 5, {}, {"storage": "1", "boot": "b", "since_boot": 1, "stepped_at": None},
                {"storage": float("nan"), "boot": "b", "since_boot": 1, "stepped_at": None}],
)  # fmt: skip
def test_invalid_clock_reading_counts_as_none(content: object) -> None:
    assert ClockReading.from_json(content) is None


def test_boot_id_is_empty_if_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "BOOT_ID", "/nowhere")
    assert clock_module.boot_id() == ""
