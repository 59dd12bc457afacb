"""TierHealth by itself. ``test_store_tier`` has its effects on a tier."""

from __future__ import annotations

import pytest

from kvtiers.tiers.blocks.batches import Batch
from kvtiers.tiers.tier import health
from kvtiers.tiers.tier.circuit import Circuit
from kvtiers.tiers.tier.health import REST_S_MAX, TierHealth
from kvtiers.tiers.tier.lookup import FAILED_S_MIN
from tests.identity import block_key

KEYS = [block_key(n) for n in range(3)]


def test_rest_of_an_unreadable_block_doubles_until_it_is_read() -> None:
    tier = TierHealth(Circuit("test", failures_max=3, probe_every_s=5))
    rests = []
    for _ in range(100):
        tier.moved([Batch(unreadable=KEYS[:1])], "load")
        rests.append(tier.rest_s(KEYS[0]))
    assert rests[:4] == [FAILED_S_MIN * 2**n for n in range(4)]
    assert rests[-1] == REST_S_MAX
    tier.moved([Batch(succeeded=KEYS[:1])], "store")  # whether it can be read now is yet to be seen
    assert tier.to_replace(KEYS[:2]) == KEYS[:1]
    tier.moved([Batch(succeeded=KEYS[:1])], "load")
    tier.moved([Batch(unreadable=KEYS[:1])], "load")
    assert tier.rest_s(KEYS[0]) == FAILED_S_MIN


def test_forgotten_blocks_get_the_shortest_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "KEYS_MAX", 1)
    tier = TierHealth(Circuit("test", failures_max=3, probe_every_s=5))
    for _ in range(3):
        tier.moved([Batch(unreadable=KEYS)], "load")
    assert [tier.rest_s(key) for key in KEYS] == [FAILED_S_MIN] * 3
