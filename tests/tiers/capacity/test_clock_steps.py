"""Steps of the storage's clock: what they would make look old stays for a ttl."""

from __future__ import annotations

from typing import Any

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper
from kvtiers.tiers.capacity import clock as clock_module
from kvtiers.tiers.capacity.clock import ClockReading
from kvtiers.tiers.capacity.collector import Collector, is_block
from kvtiers.tiers.capacity.policy import CapacityPolicy
from kvtiers.tiers.capacity.removal import CollectReport
from kvtiers.tiers.capacity.usage import MEASURED, read_measured
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
        self.passed_s = 0.0  # in truth
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


def test_step_that_is_taken_back_removes_nothing(machine: Machine) -> None:
    """A wrong clock is corrected. What was stored meanwhile is from the future."""
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
def test_root_that_nobody_uses_for_its_ttl_is_emptied_at_once(machine: Machine, boot: str) -> None:
    """Its engine measures it all the time, or a command does on another machine, whose clock need not be this one's."""
    machine.put(0)
    machine.collect()
    for _ in range(8):
        machine.boot, boot = boot, machine.boot
        machine.host_offset_s += 3600.0 if boot == "this start" else -3600.0
        machine.passed_s += DAY_S
        machine.collect()
    assert machine.stored == 0


def test_root_that_was_not_measured_for_its_ttl_is_emptied_on_the_machine_that_measured_it(machine: Machine) -> None:
    machine.put(0)
    machine.collect()
    machine.passed_s += 30 * DAY_S
    assert machine.collect().removed_blobs["ttl"] == 1


def test_root_that_was_not_measured_for_its_ttl_waits_after_a_restart(machine: Machine) -> None:
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


def test_first_collection_waits_if_the_storages_clock_is_wrong(machine: Machine) -> None:
    """By hand, say: a server's clock has been stepped, and nothing was measured before."""
    machine.put(0)
    machine.storage_offset_s += 30 * DAY_S
    machine.passed_s += 600.0
    assert machine.collect().ttl_waits_s == TTL_S
    machine.passed_s += TTL_S / 2
    assert machine.collect().ttl_waits_s == TTL_S / 2
    assert machine.stored == 1
    machine.passed_s += TTL_S
    assert machine.collect().removed_blobs["ttl"] == 1  # a clock that stays wrong keeps no block for ever


def test_collector_without_ttl_leaves_a_step_to_be_noticed(machine: Machine) -> None:
    machine.put(0)
    machine.collect()
    machine.storage_offset_s += 30 * DAY_S
    machine.collect(ttl_s=None, max_bytes=1 << 20)
    assert machine.collect().ttl_waits_s == TTL_S
    assert machine.stored == 1


@pytest.mark.parametrize("measured", [True, False])
def test_dry_run_goes_by_the_storages_clock_if_it_is_known(machine: Machine, measured: bool) -> None:
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


def test_clock_reading_is_kept_in_the_measurement(machine: Machine) -> None:
    machine.collect()
    measured = read_measured(machine.store)
    assert measured is not None
    assert measured.clock == ClockReading(1e9, "this start", 0.0)
    assert ClockReading.from_json(measured.clock.to_json()) == measured.clock
    assert MEASURED in list_keys(machine.store)


def test_boot_id_is_empty_if_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "BOOT_ID", "/nowhere")
    assert clock_module.boot_id() == ""
