"""TierCounts: when refused blocks, and the end of refusals, are logged."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtiers.tiers.blocks.batches import Batch
from kvtiers.tiers.blocks.keys import make_offload_key
from kvtiers.tiers.metrics import Metrics
from kvtiers.tiers.tier.counts import SAY_EVERY_S, TierCounts
from tests.clock import Clock

KEY = make_offload_key(bytes(32), 0)


def refused(error: str, count: int = 1) -> Batch:
    return Batch(errors=Counter({error: count}), outcomes=Counter(failed=count))


def stored() -> Batch:
    return Batch(succeeded=[KEY], outcomes=Counter(moved=1))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counts(clock: Clock) -> TierCounts:
    return TierCounts(Metrics(), "fs", clock=clock)


def test_refused_blocks_are_logged_once_a_minute(
    counts: TierCounts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        counts.moved(refused("StoreFullError", 2), "store")
    assert caplog.messages == ["tier fs: 2 blocks were not stored: StoreFullError"]
    clock.advance(SAY_EVERY_S)
    counts.moved(refused("StoreFullError", 2), "store")
    assert caplog.messages[1:] == ["tier fs: 12 blocks were not stored: StoreFullError"]


def test_end_of_refusals_is_logged_once(counts: TierCounts, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    counts.moved(refused("StoreFullError"), "store")
    counts.moved(stored(), "store")
    assert len(caplog.messages) == 1
    clock.advance(SAY_EVERY_S)
    counts.moved(stored(), "load")
    assert len(caplog.messages) == 1
    for _ in range(2):
        counts.moved(stored(), "store")
        clock.advance(SAY_EVERY_S)
    assert caplog.messages[1:] == ["tier fs: storing works again; 1 blocks were not stored meanwhile"]


@pytest.mark.parametrize("reason", ["circuit_open", "shutdown", "StorePermissionError"])
def test_errors_logged_elsewhere_are_not_logged_again(
    reason: str, counts: TierCounts, caplog: pytest.LogCaptureFixture
) -> None:
    counts.moved(refused(reason), "store")
    assert not caplog.messages
