"""Whether a request loads or is computed: single decisions, and a simulated engine over a grid of links and speeds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import pytest

from kvtiers.connector.core.decisions import REASONS, TRIAL_EVERY
from kvtiers.connector.core.guard import GuardedTier
from kvtiers.connector.core.manager import BlockManager
from kvtiers.connector.core.options import ManagerOptions
from kvtiers.connector.core.slots import Slots
from kvtiers.tiers.base import ReqContext
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.errors import ConfigError
from kvtiers.tiers.metrics import Metrics
from tests.clock import Clock
from tests.connector.core.scripted_tier import ScriptedTier, make_view
from tests.connector.core.simulated_engine import PARALLEL, Engine, Link
from tests.identity import block_key

TOKEN_BYTES = 64 << 10
BLOCK_TOKENS = 50
FAST, SLOW = 1e9, 5e6  # bytes per second


def engine(
    bandwidth: float = FAST,
    latency_s: float = 0.0005,
    tokens_per_s: float = 2000,
    load: str = "auto",
    *,
    at_once: int = 1,
    block_tokens: int = BLOCK_TOKENS,
    num_slots: int = 4096,
) -> Engine:
    link = Link(bandwidth / TOKEN_BYTES / block_tokens, latency_s, at_once)
    work_s = 0.2 / tokens_per_s / 8000
    return Engine([link], 0.002, 1 / tokens_per_s, work_s, load, num_slots=num_slots, block_tokens=block_tokens)


def warm(of: Engine, tokens: int = 2000, requests: int = 10) -> list[float]:
    """Compute three prompts, then send prompts that are stored; returns the seconds to their first tokens."""
    for _ in range(3):
        of.first_token_s(tokens, stored=False)
        of.rest(0.5)
    times = []
    for _ in range(requests):
        times.append(of.first_token_s(tokens))
        of.rest(0.5)
    return times


def decisions(of: Engine, tier: str = "tier0") -> dict[str, int]:
    value = of.manager.metrics.value
    counts = {reason: int(value("kvtiers_load_decisions_total", tier, reason)) for reason in REASONS}
    return {reason: count for reason, count in counts.items() if count}


# ---- decisions


def test_hits_are_loaded_while_the_speed_of_the_engine_is_unknown() -> None:
    slow = engine(SLOW)
    slow.first_token_s(500)
    assert decisions(slow) == {"unknown": 1}
    assert slow.tiers[0].loaded > 0


def test_hits_are_loaded_over_a_fast_link_and_computed_over_a_slow_link() -> None:
    fast, slow = engine(FAST), engine(SLOW)
    assert warm(fast)[-1] < 0.4 * fast.compute_s(2000)
    assert decisions(fast)["faster"] >= 8
    assert warm(slow)[-1] == pytest.approx(slow.compute_s(2000))
    assert decisions(slow)["slower"] >= 8


def test_tier_too_slow_for_the_whole_prompt_gets_no_lookups() -> None:
    """A lookup takes the link's latency, too."""
    far = engine(FAST, latency_s=1.0)
    assert warm(far)[-1] == pytest.approx(far.compute_s(2000))
    asked = len(far.tiers[0].asked)
    assert far.first_token_s(2000) == pytest.approx(far.compute_s(2000))
    assert len(far.tiers[0].asked) == asked > 0


def test_load_always_and_never_override_the_expected_times() -> None:
    always, never = engine(SLOW, load="always"), engine(FAST, load="never")
    assert warm(always, requests=2)[-1] > 2 * always.compute_s(2000)
    assert decisions(always) == {"always": 2}
    assert warm(never, requests=2)[-1] == pytest.approx(never.compute_s(2000))
    assert decisions(never) == {"never": 5}
    assert never.tiers[0].loaded == 0


def test_tier_that_becomes_fast_is_used_again_after_a_trial() -> None:
    healed = engine(SLOW)
    warm(healed)
    healed.tiers[0].link.blocks_per_s *= FAST / SLOW
    times = [healed.first_token_s(2000) for _ in range(3 * TRIAL_EVERY)]
    assert decisions(healed)["trial"] >= 1
    assert times[-1] < 0.4 * healed.compute_s(2000)


def test_trial_costs_less_than_half_of_computing() -> None:
    slow = engine(SLOW)
    warm(slow)
    times = warm(slow, requests=2 * TRIAL_EVERY)
    assert decisions(slow)["trial"] >= 2
    assert max(times) < 1.5 * slow.compute_s(2000)


def test_load_that_falls_behind_is_given_up_and_blocks_that_arrived_are_used() -> None:
    dropped = engine(3e8)
    usual_s = warm(dropped)[-1]
    dropped.tiers[0].link.slow_at = dropped.clock.now + usual_s / 2
    dropped.tiers[0].link.slow_share = 0.01
    request = dropped.send(2000)
    dropped.run()
    assert decisions(dropped)["behind"] == 1
    assert request.first_token_s < 1.3 * dropped.compute_s(2000)
    assert 0 < request.loaded < request.tokens - BLOCK_TOKENS
    assert dropped.manager.slots.counts().quarantined > 0
    dropped.rest(1000)
    assert dropped.manager.slots.counts().quarantined == 0


def test_declined_request_keeps_the_reason_and_the_expected_seconds() -> None:
    slow = engine(SLOW)
    warm(slow)
    request = slow.send(2000)
    slow.manager.note_request(request.req_id, request.tokens, 0)
    assert slow.manager.lookup(request.keys[0], ReqContext(request.req_id)) is False
    declined = slow.manager._waits.by_id[request.req_id].declined[0]
    assert declined.reason == "slower"
    assert declined.compute_s == pytest.approx(slow.compute_s(2000), rel=0.05)
    assert declined.load_s > 5 * declined.compute_s


def test_fastest_tier_is_asked_before_an_earlier_tier() -> None:
    both = Engine([Link(100, 0.05), Link(5000, 0.0005)], 0.002, 1 / 500, block_tokens=BLOCK_TOKENS)
    first = both.tiers[0].absent
    for _ in range(2):
        both.first_token_s(2000, stored=False)
    for _ in range(3):
        both.first_token_s(2000)  # from the first tier
        request = both.send(2000)
        first.update(request.keys)  # from the second one
        both.run()
    loaded = [tier.loaded for tier in both.tiers]
    both.first_token_s(2000)
    assert both.tiers[0].loaded == loaded[0]
    assert both.tiers[1].loaded > loaded[1]


def test_tier_with_invalid_load_option_is_refused() -> None:
    tier = ScriptedTier(make_view(4))
    tier.load = "sometimes"
    with pytest.raises(ConfigError, match="load.*'sometimes'.*'auto', 'always' or 'never'"):
        assert GuardedTier(tier, Metrics()).load
    with pytest.raises(ConfigError, match="'sometimes'"):
        BlockManager(Slots(4), [tier], ManagerOptions(), clock=Clock())


def step_that_judges_s(requests: int) -> float:
    """CPU seconds of the end of a step in which so many requests learn that a tier has their 300 blocks."""
    tier = ScriptedTier(make_view(64), auto=False)
    tier.liar = True
    manager = BlockManager(Slots(64), [tier], ManagerOptions(), clock=Clock())
    manager.decisions.steps.prefill.learn(1000, 1000 * 500, 0.5)
    for number in range(requests):
        context = ReqContext(f"r{number}")
        manager.note_request(context.req_id, 4800, 0)
        for at in range(300):
            assert manager.lookup(block_key(number * 300 + at), context) is None
    began = time.thread_time()
    manager.on_schedule_end()
    assert manager.metrics.value("kvtiers_load_decisions_total", "scripted", "unknown") == requests
    return time.thread_time() - began


def test_step_time_grows_less_than_tenfold_for_four_times_the_waiting_requests() -> None:
    """Each request once took a copy of all hits that waited: 200 requests held a step up for more than a second."""
    few_s = min(step_that_judges_s(75) for _ in range(3))
    assert step_that_judges_s(300) < 10 * few_s


# ---- the simulation


def cells(*, full: bool) -> Iterator[tuple[float, float, float, int]]:
    """Tokens per second, bytes per second, latency and tokens of a prompt."""
    if full:
        speeds: tuple[float, ...] = (300, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
        links: tuple[float, ...] = (5e6, 1e7, 2.5e7, 5e7, 1e8, 2e8, 3e8, 5e8, 1e9)
        yield from itertools.product(
            speeds, links, (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05), (200, 800, 2000, 4000, 8000)
        )
    else:
        yield from itertools.product((500, 10_000), (5e6, 1e8, 1e9), (0.0005, 0.02), (200, 2000, 8000))


def first_token_ratios(*, full: bool) -> dict[tuple[float, float, float, int], float]:
    """Median of the requests after the first ten, divided by the better of always and never."""
    ratios = {}
    for cell in cells(full=full):
        speed, link, latency_s, tokens = cell
        here = engine(link, latency_s, speed, block_tokens=200)
        usual_s = statistics.median(warm(here, tokens, 20)[10:])
        always = engine(link, latency_s, speed, "always", block_tokens=200)
        ratios[cell] = usual_s / min(always.first_token_s(tokens), here.compute_s(tokens))
    return ratios


def check(ratios: dict[tuple[float, float, float, int], float]) -> None:
    worse = {cell: ratio for cell, ratio in ratios.items() if ratio > 1.05}
    assert len(worse) <= 0.01 * len(ratios), worse
    assert max(ratios.values()) < 1.2, worse


def test_first_token_is_as_early_as_by_the_faster_of_loading_and_computing() -> None:
    check(first_token_ratios(full=False))


@pytest.mark.full
def test_first_token_is_as_early_as_by_the_faster_way_in_thousands_of_cells() -> None:
    check(first_token_ratios(full=True))


@pytest.mark.parametrize("at_once", [1, PARALLEL])
def test_first_token_is_at_most_30_percent_later_when_the_link_drops_to_a_tenth(at_once: int) -> None:
    """Where a load of 39 blocks is worth it, and takes longer than a few times the latency."""
    ratios = {}
    for speed, link, tokens, part in itertools.product((500, 2000), (1e8, 3e8), (2000, 8000), (0.05, 0.5, 0.9)):
        here = engine(link, 0.0005, speed, at_once=at_once, block_tokens=tokens // 40)
        compute_s = here.compute_s(tokens)
        if warm(here, tokens, 12)[-1] > 0.95 * compute_s:
            continue
        load_s = 39 * tokens // 40 * TOKEN_BYTES / link
        here.tiers[0].link.slow_at = here.clock.now + 0.001 + part * load_s
        rest_s = here.compute_s(tokens // 40)
        always_s = 0.001 + part * load_s + 10 * (1 - part) * load_s + rest_s
        ratios[speed, link, tokens, part] = here.first_token_s(tokens) / min(always_s, compute_s)
    assert len(ratios) > 10
    assert max(ratios.values()) < 1.3, ratios


def run_all(
    of: Engine, requests: int, tokens: int, prefix: list[OffloadKey] | None = None
) -> tuple[float, list[float]]:
    """Send requests at once; returns the seconds to the last first token, and those of each."""
    warm(of, tokens=2000, requests=3)
    began = of.clock.now
    sent = [of.send(tokens, stored=prefix is None, prefix=prefix) for _ in range(requests)]
    of.run()
    return of.clock.now - began, [request.first_token_s for request in sent]


def test_fifty_requests_load_shared_prefix_once_and_lose_no_time_without_hits() -> None:
    prefix = [block_key(10**7 + number) for number in range(200)]
    took_s = {}
    for load, hits in itertools.product(("auto", "never"), (True, False)):
        here = engine(FAST, 0.005, 5000, load)
        if not hits:
            here.tiers[0].absent.update(prefix)
        loaded = here.tiers[0].loaded
        took_s[load, hits], _ = run_all(here, 50, 10_300, prefix)
        assert here.tiers[0].loaded - loaded <= 200 + 3 * 39
    assert took_s["auto", True] < 0.2 * took_s["never", True]
    assert took_s["auto", False] < took_s["never", False] / 0.95


@pytest.mark.parametrize("bandwidth", [2e7, 1e8, 3e8, 1e9, 3e9])
def test_fifty_requests_in_region_of_two_prompts_are_as_early_as_by_computing(bandwidth: float) -> None:
    waits_s = {}
    for load in ("auto", "never"):
        here = engine(bandwidth, 0.005, 5000, load, block_tokens=200, num_slots=80)
        _, waits_s[load] = run_all(here, 50, 8000)
    pairs = zip(sorted(waits_s["auto"]), sorted(waits_s["never"]), strict=True)
    assert max(auto - never for auto, never in pairs) < 0.2
