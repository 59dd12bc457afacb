"""exit_on_signals: what is temporary goes, however many signals come."""

from __future__ import annotations

import os
import signal

import pytest

from kvtiers.connector.commands.signals import exit_on_signals


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_end_the_clean_up_of_the_first(first: signal.Signals, second: signal.Signals) -> None:
    """A service manager or a shell that closes sends both."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    cleaned_up: list[bool] = []

    def work() -> None:
        with exit_on_signals():
            try:
                os.kill(os.getpid(), first)
            finally:
                os.kill(os.getpid(), second)
                cleaned_up.append(True)

    try:
        with pytest.raises(SystemExit, match=str(128 + first)):
            work()
        assert not {signal.getsignal(number) for number in numbers} & {signal.SIG_IGN, signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert cleaned_up == [True]


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
