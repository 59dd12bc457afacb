"""run_all: coroutines that wait for sockets and threads, side by side in one thread."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtiers.tiers.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from kvtiers.tiers.stores.s3.polling import AT_ONCE_FIRST, Threads, readable, run_all
from tests.clock import Clock

NAMES = [f"n{i}" for i in range(20)]
HANG_S = 600.0


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads("test") as threads:
        yield threads


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_run_all_returns_results_and_store_errors_by_name(threads: Threads) -> None:
    async def work(name: str) -> str:
        if name == "n3":
            raise StoreUnavailableError("broken")
        return await threads.run(lambda: name + name)

    outcomes = run_all(work, NAMES, 5, time.monotonic)
    error = outcomes.pop("n3")
    assert isinstance(error, StoreUnavailableError)
    assert error.__traceback__ is None
    assert outcomes == {name: name + name for name in NAMES if name != "n3"}


def test_run_all_of_no_names_does_nothing() -> None:
    async def work(name: str) -> None:
        raise AssertionError

    assert run_all(work, [], 5, time.monotonic) == {}


def test_non_store_exception_ends_run_all_and_closes_the_other_coroutines(pair: tuple[socket.socket, ...]) -> None:
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
def test_run_all_reaches_but_never_exceeds_at_once_max(threads: Threads, at_once_max: int) -> None:
    """The calls end only once so many run, so more than AT_ONCE_FIRST begin because nothing happens."""
    running, most = set[str](), 0
    all_run = threading.Barrier(at_once_max)

    async def work(name: str) -> None:
        nonlocal most
        running.add(name)
        most = max(most, len(running))
        await threads.run(lambda: all_run.wait(HANG_S))
        running.remove(name)

    assert AT_ONCE_FIRST < 20
    names = [f"n{i}" for i in range(3 * at_once_max)]
    assert run_all(work, names, at_once_max, time.monotonic) == dict.fromkeys(names)
    assert most == at_once_max


def test_coroutine_times_out_while_another_coroutine_is_always_busy() -> None:
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
def test_call_without_a_thread_or_descriptor_runs_last_in_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch, threads: Threads, pair: tuple[socket.socket, ...], target: str, error: Exception
) -> None:
    """Others may hold what the call needs."""
    monkeypatch.setattr(target, raising(error))
    order = []

    async def work(name: str) -> str:
        if name == "n3":
            await readable(pair[0], time.monotonic() + 0.01)
            order.append("n3")
            return ""
        return await threads.run(lambda: order.append("call") or threading.current_thread().name)  # type: ignore[func-returns-value]

    outcomes = run_all(work, NAMES, 5, time.monotonic)
    assert outcomes == {**dict.fromkeys(NAMES, threading.current_thread().name), "n3": ""}
    assert order == ["n3", *["call"] * 19]


def test_threads_are_used_again_and_end_with_their_context() -> None:
    used = set[threading.Thread]()

    async def work(name: str) -> None:
        await own.run(lambda: used.add(threading.current_thread()))

    with Threads("test") as own:
        run_all(work, NAMES, 2, time.monotonic)
        assert 1 <= len(used) <= 2
    for thread in used:
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_thread_of_an_interrupted_call_ends_after_the_call() -> None:
    running, released = threading.Event(), threading.Event()
    used = []

    def call() -> None:
        used.append(threading.current_thread())
        running.set()
        released.wait(HANG_S)

    async def work(name: str) -> None:
        await own.run(call)

    def interrupt() -> float:
        running.wait(HANG_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Threads("test") as own:
        run_all(work, ["n1"], 1, interrupt)
    released.set()
    used[0].join(HANG_S)
    assert not used[0].is_alive()


def test_store_error_of_a_call_in_a_thread_is_the_outcome_of_its_name(threads: Threads) -> None:
    def fail() -> None:
        raise StoreTimeoutError("late")

    async def work(name: str) -> None:
        await threads.run(fail)

    outcomes: dict[str, StoreError | None] = run_all(work, NAMES, 5, time.monotonic)
    assert {type(outcome) for outcome in outcomes.values()} == {StoreTimeoutError}
