"""run_all: coroutines that wait for sockets and threads, side by side in one thread."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtiers.tiers.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from kvtiers.tiers.stores.s3.polling import AT_ONCE_FIRST, in_thread, readable, run_all
from tests.clock import Clock

NAMES = [f"n{i}" for i in range(20)]
HANG_S = 600.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_run_all_returns_results_and_store_errors_by_name() -> None:
    async def work(name: str) -> str:
        if name == "n3":
            raise StoreUnavailableError("broken")
        return await in_thread("test", lambda: name + name)

    outcomes = run_all(work, NAMES, 5, time.monotonic)
    error = outcomes.pop("n3")
    assert isinstance(error, StoreUnavailableError)
    assert error.__traceback__ is None
    assert outcomes == {name: name + name for name in NAMES if name != "n3"}


def test_run_all_of_no_names_does_nothing() -> None:
    async def work(name: str) -> None:
        raise AssertionError

    assert run_all(work, [], 5, time.monotonic) == {}


def test_other_exception_ends_run_all_and_closes_the_other_coroutines(pair: tuple[socket.socket, ...]) -> None:
    closed = []

    async def work(name: str) -> None:
        if name == "n1":
            raise ZeroDivisionError
        try:
            await readable(pair[0], time.monotonic() + HANG_S)
        finally:
            closed.append(name)

    with pytest.raises(ZeroDivisionError) as caught:
        run_all(work, NAMES, 5, time.monotonic)
    assert caught.tb is not None  # its frames keep the coroutines
    assert closed == ["n0"]


@pytest.mark.parametrize("at_once_max", [1, 3, 20])
def test_run_all_runs_as_many_at_once_as_allowed_and_no_more(at_once_max: int) -> None:
    """The calls end only once so many run, so more than AT_ONCE_FIRST begin because nothing happens."""
    running, most = set[str](), 0
    all_run = threading.Barrier(at_once_max)

    async def work(name: str) -> None:
        nonlocal most
        running.add(name)
        most = max(most, len(running))
        await in_thread("test", lambda: all_run.wait(HANG_S))
        running.remove(name)

    assert AT_ONCE_FIRST < 20
    names = [f"n{i}" for i in range(3 * at_once_max)]
    assert run_all(work, names, at_once_max, time.monotonic) == dict.fromkeys(names)
    assert most == at_once_max


def test_time_of_one_coroutine_passes_while_another_is_always_busy() -> None:
    clock = Clock(0.0)
    turns = 0

    async def work(name: str) -> int:
        nonlocal turns
        near, far = socket.socketpair()
        with near, far:
            if name == "late":
                await readable(near, 5.0)
                return turns
            far.send(b"x")  # near stays readable
            while turns < 100:
                turns += 1
                clock.advance(1.0)
                await readable(near, 1000.0)
        return -1

    outcomes = run_all(work, ["late", "busy"], 2, clock)
    assert outcomes["late"] in (5, 6)


def raising(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("target", "error"),
    [("threading.Thread.start", RuntimeError()), ("socket.socketpair", OSError(errno.EMFILE, "too many files"))],
)
def test_in_thread_without_a_thread_or_descriptor_runs_in_the_callers(
    monkeypatch: pytest.MonkeyPatch, target: str, error: Exception
) -> None:
    monkeypatch.setattr(target, raising(error))

    async def work(name: str) -> str:
        return await in_thread("test", lambda: threading.current_thread().name)

    assert run_all(work, NAMES, 5, time.monotonic) == dict.fromkeys(NAMES, threading.current_thread().name)


def test_in_thread_raises_what_the_call_raises() -> None:
    def fail() -> None:
        raise StoreTimeoutError("late")

    async def work(name: str) -> None:
        await in_thread("test", fail)

    outcomes: dict[str, StoreError | None] = run_all(work, NAMES, 5, time.monotonic)
    assert {type(outcome) for outcome in outcomes.values()} == {StoreTimeoutError}
