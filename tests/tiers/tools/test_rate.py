"""RateLimit, and a copy that it bounds."""

from __future__ import annotations

import threading
import time

import pytest

from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.tools.copying import Copier, CopyReport, RateLimit, find_blocks
from tests.connector.commands.test_verify_command import COUNT, SIZE, put_blocks

BLOB = SIZE + 4096


def test_rate_slots_are_consecutive_and_idle_time_is_not_credited() -> None:
    now = [50.0]
    rate = RateLimit(100, clock=lambda: now[0])
    assert [rate.reserve(200), rate.reserve(100), rate.reserve(100)] == [0.0, 2.0, 3.0]
    now[0] += 1
    assert rate.reserve(100) == 3.0
    now[0] += 1000
    assert [rate.reserve(100), rate.reserve(100)] == [0.0, 1.0]


def test_threads_share_the_rate_limit() -> None:
    rate = RateLimit(1000, clock=lambda: 0.0)
    waits: list[float] = []
    threads = [threading.Thread(target=lambda: waits.append(rate.reserve(500))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == [0.5 * number for number in range(20)]


def test_copy_takes_at_least_the_time_set_by_its_rate() -> None:
    source, target = MemoryStore(), MemoryStore()
    put_blocks(source)
    began = time.monotonic()
    report = Copier(source, target, rate=RateLimit(COUNT * BLOB)).copy(find_blocks(source, [""]))
    assert time.monotonic() - began >= (COUNT - 1) / COUNT  # the last block's slot begins then
    assert (report.copied, report.seen_bytes) == (COUNT, COUNT * BLOB)


def test_interrupted_copy_ends_soon_and_reports_its_copied_blocks() -> None:
    source, target = MemoryStore(), MemoryStore()
    put_blocks(source)

    def interrupt(report: CopyReport) -> None:
        raise KeyboardInterrupt

    copier = Copier(source, target, rate=RateLimit(1.0), on_progress=interrupt)  # hours for the second block
    with pytest.raises(KeyboardInterrupt):
        copier.copy(find_blocks(source, [""]))
    assert copier.report.copied == 1
    assert sum(info.key.endswith(".bin") for info in target.keys()) == 1  # noqa: SIM118 - not a dict
