"""Waits of the scheduler's thread."""

from __future__ import annotations

from kvtiers.connector.core.pacing import PAUSE_S, SHORT_STEP_S, Pacer, drain


def test_pacer_pauses_only_between_short_steps_while_a_load_runs() -> None:
    now = [0.0]
    slept: list[float] = []
    pacer = Pacer(clock=lambda: now[0], sleep=slept.append)
    pacer.step_ended(loading=True)
    assert slept == []  # the first step: nothing is known of its length
    now[0] += SHORT_STEP_S / 2
    pacer.step_ended(loading=True)
    assert slept == [PAUSE_S]
    now[0] += SHORT_STEP_S / 2
    pacer.step_ended(loading=False)
    assert slept == [PAUSE_S]
    now[0] += SHORT_STEP_S * 2  # it computed something
    pacer.step_ended(loading=True)
    assert slept == [PAUSE_S]


def test_pacer_pauses_while_a_request_waits_for_a_lookup() -> None:
    now = [0.0]
    slept: list[float] = []
    pacer = Pacer(clock=lambda: now[0], sleep=slept.append)
    for answer, pauses in ((None, 0), (None, 1), (True, 1), (False, 1), (None, 2)):
        pacer.asked(True)
        pacer.asked(answer)
        pacer.step_ended(loading=False)
        assert len(slept) == pauses
        now[0] += SHORT_STEP_S / 2


def test_drain_returns_true_when_idle_and_false_after_its_timeout() -> None:
    answers = iter([False, False, True])
    assert drain(lambda: next(answers), 10.0)
    ticks = iter(range(100))
    assert not drain(lambda: False, 3.0, clock=lambda: float(next(ticks)))
