"""RankLoads: requests load what the ranks have only while that takes less time than computing it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from kvtiers.connector.core.decisions import REASONS, TRIAL_EVERY
from kvtiers.connector.core.guard import GuardedTier
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.ranks.loads import RankLoads
from kvtiers.tiers.metrics import Metrics
from tests.clock import Clock
from tests.connector.core.scripted_tier import ScriptedTier, make_view

BLOCK_TOKENS = 16
TOKENS = 1600
STEP_S = 0.002


class Engine:
    """Requests one after the other, on simulated time.

    Args:
        block_s: seconds of the slowest rank per block.
        token_s: seconds to compute a token.
        lookup_s: seconds until the scheduler's tier has answered.
    """

    def __init__(self, block_s: float, token_s: float, lookup_s: float = 0.0, load: str = "auto") -> None:
        self.block_s, self.token_s, self.lookup_s = block_s, token_s, lookup_s
        self.clock = Clock()
        self.metrics = Metrics()
        tier = ScriptedTier(make_view(4), "scripted")
        tier.load = load
        options = ManagerOptions(blocks_per_token=1 / BLOCK_TOKENS)
        self.loads = RankLoads(GuardedTier(tier, self.metrics), options, self.metrics, clock=self.clock)
        self.number = 0

    def first_token_s(self, *, stored: int = TOKENS) -> float:
        """Answer a request of which storage has ``stored`` tokens. Returns the seconds until it is computed."""
        self.number += 1
        req_id, began = f"r{self.number}", self.clock()
        self.loads.note_request(req_id, TOKENS, 0)
        if self.loads.is_declined(req_id):
            stored = 0
        elif self.lookup_s:
            self.clock.advance(self.lookup_s)
            self.loads.note_answers(req_id)
            self.loads.note_request(req_id, TOKENS, 0)
        loaded = stored if self.loads.accept(req_id, stored) else 0
        if loaded:
            loaded = self.load(req_id, loaded // BLOCK_TOKENS)
        self.compute(req_id, loaded)
        self.loads.forget(req_id)
        self.clock.advance(0.5)
        return self.clock() - 0.5 - began

    def load(self, req_id: str, blocks: int) -> int:
        """Load blocks; returns the tokens that arrived."""
        began = self.clock()
        self.loads.begin(req_id, blocks)
        while self.clock() - began < blocks * self.block_s:
            self.clock.advance(STEP_S)
            if req_id in self.loads.take_late():
                self.loads.end(req_id, failed=True)
                return min(blocks, int((self.clock() - began) / self.block_s)) * BLOCK_TOKENS
        self.loads.end(req_id, failed=False)
        return blocks * BLOCK_TOKENS

    def compute(self, req_id: str, loaded: int) -> None:
        steps = self.loads.decisions.steps
        steps.began([(req_id, TOKENS - loaded, loaded)], self.clock())
        self.clock.advance((TOKENS - loaded) * self.token_s + STEP_S)
        steps.ended(self.clock())

    def warm(self, requests: int = 12) -> list[float]:
        for _ in range(3):
            self.first_token_s(stored=0)
        return [self.first_token_s() for _ in range(requests)]

    def decided(self) -> dict[str, int]:
        value = self.metrics.value
        counts = {reason: int(value("kvtiers_load_decisions_total", "scripted", reason)) for reason in REASONS}
        return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize("lookup_s", [0.0, 0.02])
@pytest.mark.parametrize("block_s", [0.0005, 0.002, 0.0045, 0.006, 0.02, 0.1])
@pytest.mark.parametrize("token_s", [0.00003, 0.0003])
def test_first_tokens_are_as_soon_as_with_the_better_of_always_and_never(
    block_s: float, token_s: float, lookup_s: float
) -> None:
    auto, always, never = (
        statistics.median(Engine(block_s, token_s, lookup_s, load).warm(30)[10:])
        for load in ("auto", "always", "never")
    )
    if lookup_s and auto > 1.05 * min(always, never):
        # Without a lookup, it is not known that there is nothing to gain, so the lookups' time is the price.
        assert auto <= min(always, never) + lookup_s + STEP_S
        return
    assert auto <= 1.05 * min(always, never)


def test_too_slow_tier_is_not_asked_and_is_tried_again_after_some_requests() -> None:
    engine = Engine(block_s=0.02, token_s=0.0003)
    engine.warm(4)
    engine.loads.note_request("r", TOKENS, 0)
    assert engine.loads.is_declined("r")
    assert not engine.loads.accept("r", TOKENS)
    engine.warm(2 * TRIAL_EVERY)
    assert engine.decided()["trial"] >= 1


def test_tier_that_became_fast_is_used_again() -> None:
    engine = Engine(block_s=0.02, token_s=0.0003)
    engine.warm()
    engine.block_s = 0.0005
    engine.warm(3 * TRIAL_EVERY)
    assert engine.first_token_s() < 0.1 * TOKENS * engine.token_s + 0.06


def test_load_that_takes_twice_as_long_as_computing_is_given_up() -> None:
    engine = Engine(block_s=0.001, token_s=0.0003)
    engine.warm()
    assert engine.decided().keys() <= {"faster", "unknown"}
    engine.block_s = 0.1  # 10 s for all of it
    assert engine.first_token_s() <= 3 * TOKENS * engine.token_s + 0.1
    assert engine.decided()["behind"] == 1


def test_request_that_waits_for_gpu_blocks_is_decided_about_and_counted_once() -> None:
    engine = Engine(block_s=0.0005, token_s=0.0003)
    engine.warm()
    before = sum(engine.decided().values())
    for _ in range(5):
        engine.loads.note_request("r", TOKENS, 0)
        assert engine.loads.accept("r", TOKENS)
    assert sum(engine.decided().values()) == before + 1


def test_declined_request_that_was_preempted_is_decided_about_again() -> None:
    engine = Engine(block_s=0.02, token_s=0.0003)
    engine.warm(4)
    engine.loads.note_request("r", TOKENS, 0)
    assert not engine.loads.accept("r", 0)
    engine.compute("r", 0)
    for _ in range(20):
        engine.loads.decisions.ways[0].learn(TOKENS // BLOCK_TOKENS, 0.01)
    engine.loads.note_request("r", TOKENS + 1, 0)
    assert not engine.loads.is_declined("r")
    assert engine.loads.accept("r", TOKENS)
    assert not engine.loads.decisions.steps.are_decodes  # its tokens count as a prompt once more


def test_waiting_requests_whose_prefix_others_compute_cause_no_more_trials() -> None:
    engine = Engine(block_s=0.02, token_s=0.0003)
    engine.warm(4)
    for computed in range(0, 4 * TRIAL_EVERY * BLOCK_TOKENS, BLOCK_TOKENS):
        engine.loads.note_request("r", TOKENS, computed)
        assert not engine.loads.accept("r", 0)
    assert "trial" not in engine.decided()


@pytest.mark.parametrize(("load", "accepted"), [("always", True), ("never", False)])
def test_load_always_and_never_do_not_depend_on_times(load: str, accepted: bool) -> None:
    engine = Engine(block_s=0.02, token_s=0.0003, load=load)
    engine.warm(4)
    engine.loads.note_request("r", TOKENS, 0)
    assert not engine.loads.is_declined("r")  # lookups tell what need not be stored
    assert engine.loads.accept("r", TOKENS) == accepted
    assert set(engine.decided()) == {load}


def test_loads_that_a_reset_or_the_end_of_a_request_forgets_leave_the_line() -> None:
    engine = Engine(block_s=0.0005, token_s=0.0003)
    engine.warm()
    ends: list[Callable[[], None]] = [lambda: engine.loads.forget("r"), engine.loads.reset]
    for end in ends:
        engine.loads.note_request("r", TOKENS, 0)
        engine.loads.accept("r", TOKENS)
        engine.loads.begin("r", 100)
        assert engine.loads._in_line == 100
        end()
        engine.loads.end("r", failed=False)  # the ranks report it later
        assert engine.loads._in_line == 0
