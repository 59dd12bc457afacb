"""Ending in time, whatever the storage does."""

from __future__ import annotations

import threading
import time

import pytest

from connector.vllm import ending


def test_drain_returns_when_idle_and_gives_up_in_time() -> None:
    answers = iter([False, False, True])
    assert ending.drain(lambda: next(answers), 10.0)
    ticks = iter(range(100))
    assert not ending.drain(lambda: False, 3.0, clock=lambda: float(next(ticks)))


def test_a_stuck_call_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    began = time.monotonic()
    with caplog.at_level("WARNING"):
        assert not ending.call_within(release.wait, 0.05, "the tier")
    assert time.monotonic() - began < 60
    assert "left behind" in caplog.text
    release.set()


def test_a_call_that_raises_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with caplog.at_level("WARNING"):
        assert ending.call_within(fail, 10.0, "the tier")
    assert "did not end cleanly" in caplog.text
