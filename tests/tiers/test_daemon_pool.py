"""DaemonPool: threads that may never come back."""

from __future__ import annotations

import threading
import weakref

import pytest

from kvtiers.tiers.daemon_pool import DaemonPool


def test_shutdown_cancels_waiting_calls_and_later_calls() -> None:
    pool, begun, let_go = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def hang() -> str:
        begun.set()
        let_go.wait(120)
        return "late"

    running = pool.submit(hang)
    assert begun.wait(120)
    waiting = pool.submit(int)
    pool.shutdown(0.0)  # waits for nothing that hangs
    assert not running.done()
    assert waiting.cancelled()
    assert pool.submit(int).cancelled()
    let_go.set()
    assert running.result(120) == "late"


def test_exception_of_a_call_is_raised_to_its_caller() -> None:
    pool = DaemonPool(2, "test")
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(120)
    assert pool.submit(divmod, 7, 2).result(120) == (3, 1)
    pool.shutdown(120)


def test_cancelled_call_keeps_no_reference_to_its_function() -> None:
    pool, begun, let_go = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return let_go.wait(60)

    running = pool.submit(hang)
    assert begun.wait(60)
    held = threading.Event()
    kept = weakref.ref(held)
    waiting = [pool.submit(held.is_set) for _ in range(2)]
    del held
    waiting[0].cancel()
    assert kept() is not None
    waiting[1].cancel()
    assert kept() is None
    let_go.set()
    assert running.result(60)
    assert pool.submit(lambda: 7).result(60) == 7
    pool.shutdown(60)
