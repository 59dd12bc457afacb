"""What loading and computing cost: fits, the engine's steps, and a tier's way."""

from __future__ import annotations

import pytest

from kvtiers.connector.core.worth import Fit, Prefill, Steps, Way


def test_fit_finds_the_coefficients_of_samples_of_different_sizes() -> None:
    fit = Fit(3)
    for tokens, context in ((100, 0), (800, 0), (800, 4000), (300, 2000), (50, 9000)) * 3:
        work = tokens * (context + tokens / 2)
        fit.add((1.0, tokens, work), 0.01 + 2e-4 * tokens + 3e-8 * work, 0.95)
    assert fit.seconds((1.0, 2000, 2000 * 1000)) == pytest.approx(0.01 + 0.4 + 0.06, rel=0.03)


def test_fit_of_samples_of_one_size_is_proportional_to_the_size() -> None:
    fit = Fit(2)
    for _ in range(5):
        fit.add((1.0, 10.0), 0.5, 0.9)
    assert fit.seconds((1.0, 10.0)) == pytest.approx(0.5, rel=0.01)
    assert fit.seconds((1.0, 40.0)) == pytest.approx(2.0, rel=0.01)


def test_fit_has_no_negative_coefficient() -> None:
    fit = Fit(2)
    fit.add((1.0, 1.0), 1.0, 0.9)
    fit.add((1.0, 10.0), 0.5, 0.9)  # more blocks took less time
    assert fit.seconds((1.0, 0.0)) > 0
    assert fit.seconds((0.0, 1.0)) == 0


def test_fit_forgets_and_cuts_off_a_single_slow_sample() -> None:
    fit = Fit(2)
    for blocks in (1, 5) * 10:
        fit.add((1.0, blocks), 0.1 * blocks, 0.9)
    fit.add((1.0, 5.0), 100.0, 0.9)
    assert fit.seconds((1.0, 5.0)) < 2 * 0.5
    for blocks in (1, 5) * 15:
        fit.add((1.0, blocks), 0.1 * blocks, 0.9)
    assert fit.seconds((1.0, 5.0)) == pytest.approx(0.5, rel=0.05)


def test_step_times_exclude_idle_time_of_the_engine() -> None:
    steps = Steps(1000)
    now = 0.0
    for number in range(6):
        name = f"r{number}"
        steps.expect(name, 500)
        steps.began([(name, 500, 0)], now)
        now += 0.25
        steps.ended(now)
        now += 60.0  # nothing to do
    assert steps.prefill.seconds(500, 0) == pytest.approx(0.25, rel=0.01)


def test_step_scheduled_during_another_step_begins_at_its_end() -> None:
    steps = Steps(1000)
    steps.expect("a", 2000)
    steps.began([("a", 1000, 0)], 0.0)
    steps.began([("a", 1000, 1000)], 0.01)
    steps.ended(1.0)
    steps.ended(2.0)
    assert steps.prefill.seconds(2000, 0) == pytest.approx(2.0, rel=0.02)


def test_steps_without_prompt_tokens_are_not_learned_from() -> None:
    steps = Steps(1000)
    steps.began([], 0.0)
    steps.ended(5.0)
    steps.began([("generates", 1, 700)], 5.0)
    steps.ended(9.0)
    assert not steps.prefill.is_known


def test_queue_counts_begun_prompts_and_prompts_waiting_only_for_the_engine() -> None:
    steps = Steps(1000)
    steps.expect("a", 1000)
    steps.began([("a", 1000, 0)], 0.0)
    steps.ended(1.0)
    steps.expect("long", 4000)
    steps.expect("declined", 1000)
    steps.expect("loads", 1000)
    steps.began([("long", 1000, 0)], 1.0)
    assert steps.running_s == pytest.approx(1.0, rel=0.01)
    assert steps.queued_s("") == pytest.approx(3.0, rel=0.01)
    steps.queue("declined", 0)
    assert steps.queued_s("") == pytest.approx(4.0, rel=0.01)
    assert steps.queued_s("declined") == pytest.approx(3.0, rel=0.01)
    steps.forget("long")
    assert steps.queued_s("") == pytest.approx(1.0, rel=0.01)
    steps.began([("declined", 400, 0)], 3.0)
    assert steps.queued_s("") == pytest.approx(0.6, rel=0.01)
    steps.began([("declined", 600, 400)], 4.0)
    assert steps.queued_s("") == 0


def test_prefill_counts_the_steps_of_a_long_prompt_and_its_context() -> None:
    prefill = Prefill(1000)
    for tokens, context in ((1000, 0), (500, 0), (1000, 3000), (200, 7000)) * 5:
        work = tokens * (context + tokens / 2)
        prefill.learn(tokens, work, 0.02 + 1e-4 * tokens + 1e-8 * work)
    assert prefill.seconds(4000, 0) == pytest.approx(4 * 0.02 + 0.4 + 0.08, rel=0.03)
    assert prefill.doubt(1000) < 0.1
    assert prefill.doubt(10**6) == 0.5


def test_way_separates_latency_from_bandwidth() -> None:
    way = Way()
    for blocks in (1, 8, 32) * 4:
        way.learn(blocks, 0.05 + 0.01 * blocks)
    assert way.knows(1000)
    assert way.latency_s == pytest.approx(0.05, rel=0.1)
    assert way.seconds(100) == pytest.approx(1.05, rel=0.05)
    assert way.blocks_in(0.5) == pytest.approx(50, rel=0.1)


def test_way_known_from_one_size_is_not_extrapolated() -> None:
    way = Way()
    way.learn(10, 1.0)
    assert way.knows(15)
    assert not way.knows(100)
    assert way.seconds(100) == pytest.approx(1.0, rel=0.01)  # at least
    assert way.seconds(1) == pytest.approx(0.1, rel=0.01)


def test_way_follows_a_link_that_drops_to_a_tenth_within_ten_jobs_and_back() -> None:
    way = Way()
    for blocks in (1, 8, 32) * 10:
        way.learn(blocks, 0.05 + 0.01 * blocks)
    before = way.seconds(32)
    for _ in range(10):
        way.learn(8, 10 * 0.13)
    assert way.seconds(32) > 5 * before
    for _ in range(20):
        way.learn(8, 0.13)
    assert way.seconds(32) < 1.5 * before


def test_way_with_an_occasional_slow_load_is_known_after_45_000_loads() -> None:
    way = Way()
    for number in range(45_000):
        way.learn(8, 1.0 if number % 8 else 6.0)
    assert 1.0 < way.seconds(8) < 2.0


def test_late_blocks_make_a_way_slower_but_never_faster() -> None:
    way = Way()
    way.learn_late(40, 3, 2.0)
    assert way.seconds(40) == pytest.approx(20.0, rel=0.01)
    way.learn_late(40, 39, 0.1)
    assert way.seconds(40) == pytest.approx(20.0, rel=0.01)
