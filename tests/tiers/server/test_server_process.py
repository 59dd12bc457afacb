"""Servers in processes: whatever a store's library does, its tier keeps working, and no slot gets wrong bytes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers import connections
from kvtiers.tiers.base import JobMetadata
from kvtiers.tiers.blocks.keys import OffloadKey
from kvtiers.tiers.builtin import BuiltInTier
from kvtiers.tiers.child_process import ChildProcess
from kvtiers.tiers.frames import Seats
from kvtiers.tiers.testing.faults import fork
from tests.identity import FakeSpec
from tests.leaks import open_fds
from tests.processes import is_gone
from tests.promises import Record
from tests.tier_limits import tier_limits
from tests.tiers.server.process_bench import COUNT, DEADLINE_S, KEYS, ROW_BYTES, ROWS, SEATS, Bench
from tests.waiting import PATIENT, wait_for

METHODS = ("put", "get", "size")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Makes tiers that restart dead servers after a short pause."""
    monkeypatch.setattr(connections, "PAUSE_S", (0.01, 0.05))
    made: list[Bench] = []

    def make(*arguments: Any) -> Bench:
        made.append(Bench(tmp_path / "kv", *arguments))
        return made[-1]

    yield make
    for bench in made:
        pids = bench.pids
        bench.tier.shutdown()
        wait_for(lambda pids=pids: all(map(is_gone, pids)))  # type: ignore[misc]


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    bench = make()
    assert bench.works()
    return bench


# ---- a library that misbehaves ---------------------------------------------------------------------------------------


def test_hanging_call_ends_its_process_at_the_deadline_and_tier_works_again(bench: Bench) -> None:
    for method in METHODS:
        (victim,) = bench.pids
        bench.remove_some()
        bench.provoke(method, "hang", DEADLINE_S)
        if method == "size":  # a lookup has its own, shorter deadline
            wait_for(lambda pid=victim: bench.has_lost(pid))  # type: ignore[misc]
        assert not psutil.pid_exists(victim), "the job was reported before its process was reaped"
        wait_for(bench.works)
        assert bench.pids != [victim]


@pytest.mark.parametrize("what", ["SystemExit", "MemoryError", "KeyboardInterrupt", "ZeroDivisionError", "EOFError"])
def test_exception_of_the_store_fails_only_its_blocks(bench: Bench, what: str) -> None:
    for number, method in enumerate(METHODS, 1):
        bench.provoke(method, what)
        wait_for(bench.works)
        assert bench.kills == (number if what == "MemoryError" else 0)


@pytest.mark.parametrize("what", ["fork", "fork-in-c"])
def test_fork_made_by_a_library_sends_no_answer_and_ends(bench: Bench, what: str) -> None:
    pids = bench.pids
    for method in METHODS:
        bench.provoke(method, what)
    forks = bench.forks()
    assert len(forks) == len(METHODS)
    wait_for(bench.works)
    assert bench.pids == pids
    assert bench.kills == 0
    if what == "fork-in-c":  # Python may hang in it, as it was not told of the fork
        bench.tier.shutdown()
    wait_for(lambda: all(map(is_gone, forks)))


@pytest.mark.parametrize("what", ["late-child", "late-session"])
def test_child_of_a_killed_process_cannot_write_into_the_region(bench: Bench, what: str) -> None:
    """Also a child that leaves the process group, and so outlives the process."""
    bench.provoke("get", what, DEADLINE_S)
    (child,) = bench.forks()
    try:
        if what == "late-child":
            wait_for(lambda: is_gone(child))
        wait_for(bench.works)
        before = bench.rows.copy()
        Path(f"{bench.root}.go").touch()
        wait_for(lambda: is_gone(child))
        assert np.array_equal(bench.rows, before)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("is_hung", [False, True], ids=["ends", "is killed"])
def test_program_that_a_library_started_ends_with_its_process(bench: Bench, is_hung: bool) -> None:
    bench.provoke("get", "program")
    (program,) = bench.forks()
    assert bench.works()
    assert not is_gone(program)
    if is_hung:
        bench.provoke("get", "hang", DEADLINE_S)
    else:
        bench.tier.shutdown()
    wait_for(lambda: is_gone(program))


def test_process_that_ends_itself_or_writes_into_its_descriptors_is_replaced(bench: Bench) -> None:
    """What it writes reaches neither the engine, as an answer, nor the region."""
    before = bench.rows[:COUNT].copy()
    for number, (method, what) in enumerate(product(METHODS, ("exit", "write")), 1):
        (victim,) = bench.pids
        bench.remove_some()
        bench.provoke(method, what)
        wait_for(lambda pid=victim: bench.has_lost(pid))  # type: ignore[misc]
        wait_for(bench.works)
        assert bench.kills == number
        assert np.array_equal(bench.rows[:COUNT], before)


def test_process_that_exceeds_its_memory_limit_is_replaced(make: Callable[..., Bench]) -> None:
    bench = make(SEATS, 256 << 20)
    for number, method in enumerate(METHODS, 1):
        assert bench.works()
        bench.provoke(method, "hoard")
        wait_for(bench.works)
        assert bench.kills == number


# ---- processes that die ----------------------------------------------------------------------------------------------


def kill_at_random(tmp_path: Path, kills: int) -> int:
    """Kill servers under load; returns the number of jobs. A failed assertion: wrong bytes, or a lost job."""
    dice = random.Random(5)
    view = SharedOffloadRegion.anonymous(ROWS, ROW_BYTES).create_kv_memoryview()
    rows = np.asarray(view)
    with tier_limits(circuit_probe_s=0.001):
        options: dict[str, Any] = {"min_free": 0, **PATIENT}
        tier = BuiltInTier(FakeSpec(), view, "fs", root_dir=str(tmp_path / "kv"), **options)
    free = list(range(ROWS))
    content = np.random.default_rng(2).integers(-128, 128, (COUNT, ROW_BYTES), np.int8)
    under_way: dict[int, tuple[bool, list[OffloadKey], list[int]]] = {}
    jobs = killed = good = 0

    def book() -> bool:
        """Book what has ended. Whether nothing is under way."""
        nonlocal good
        tier.on_schedule_end()
        for result in tier.get_finished():
            is_load, keys, blocks = under_way.pop(result.job_id)  # KeyError: it was reported twice
            assert set(result.successful_keys) <= set(keys)
            if is_load:
                for key, block in zip(keys, blocks, strict=True):
                    if key in result.successful_keys:
                        assert np.array_equal(rows[block], content[KEYS.index(key)]), "wrong bytes"
            good += result.success
            free.extend(blocks)
        return not under_way

    def submit(*, is_load: bool, count: int) -> None:
        nonlocal jobs
        keys = dice.sample(KEYS, count)
        blocks = [free.pop() for _ in keys]
        rows[blocks] = 0 if is_load else content[[KEYS.index(key) for key in keys]]
        jobs += 1
        under_way[jobs] = is_load, keys, blocks
        (tier.submit_load if is_load else tier.submit_store)(JobMetadata(jobs, keys, np.array(blocks, np.int32)))

    try:
        while killed < kills:
            if len(free) >= 32:
                submit(is_load=dice.random() < 0.6, count=dice.randrange(1, 33))
            tier.lookup(dice.choice(KEYS))
            book()
            if dice.random() < 0.1 and good > killed // 4 and tier._channel.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(tier._channel.pids), signal.SIGKILL)
                    killed += 1
        wait_for(book)
        assert sorted(free) == list(range(ROWS)), "a slot is lost"

        def moves_all(*, is_load: bool) -> bool:
            before = good
            submit(is_load=is_load, count=COUNT)
            wait_for(book)
            return good > before

        wait_for(lambda: moves_all(is_load=False) and moves_all(is_load=True))
    finally:
        tier.shutdown()
    return jobs


def test_random_kills_of_server_processes_lose_no_job_and_give_no_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", (0.01, 0.05))
    record("S3", kills=20, jobs=kill_at_random(tmp_path, 20), missing=0, twice=0)


@pytest.mark.full
def test_200_random_kills_of_server_processes_lose_no_job_and_give_no_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", (0.01, 0.05))
    record("W3", kills=200, jobs=kill_at_random(tmp_path, 200), bad=0)


def run_engine(code: str, root: Path, *, stderr: str = "") -> subprocess.Popen[bytes]:
    """An engine of its own with a bench; its standard error is closed if ``stderr`` is "2>&-"."""
    text = f"import os, sys, time\nfrom pathlib import Path\nfrom {Bench.__module__} import *\n{code}"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
    command = ["sh", "-c", f'exec "$@" {stderr}', "sh", sys.executable, "-c", text, str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("is_hung", [False, True], ids=["idle", "hung"])
def test_process_ends_with_the_engine_although_a_fork_holds_its_socket(tmp_path: Path, is_hung: bool) -> None:
    code = f"""
bench = Bench(Path(sys.argv[1]))
assert bench.works()
fork = os.fork()
if not fork:
    time.sleep(600)
    os._exit(0)
if {is_hung}:
    bench.how.write_text("get hang")
    bench.tier.submit_load(JobMetadata(99, KEYS, np.arange(COUNT, dtype=np.int32)))
    wait_for(lambda: bench.tier._channel.poll() or not bench.how.exists())
print(fork, *bench.pids, flush=True)
time.sleep(600)
"""
    engine = run_engine(code, tmp_path / "kv")
    assert engine.stdout is not None
    fork, *pids = map(int, engine.stdout.readline().split())
    try:
        assert len(pids) == 1
        engine.kill()
        engine.wait()
        assert not is_gone(fork)
        wait_for(lambda: all(map(is_gone, pids)))
    finally:
        os.kill(fork, signal.SIGKILL)
        engine.stdout.close()


def test_fork_of_the_engine_does_not_keep_its_processes_alive_after_shutdown(bench: Bench) -> None:
    """The child also holds the engine's end of the socket."""
    read_end, write_end = os.pipe()
    child = fork()
    if not child:
        bench.tier.shutdown()  # of what is its parent's
        os.read(read_end, 1)
        os._exit(0)
    try:
        assert bench.works()
        pids = bench.pids
        bench.tier.shutdown()
        wait_for(lambda: all(map(is_gone, pids)))
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("stderr", ["", "2>&-"], ids=["stderr", "no stderr"])
def test_library_output_reaches_neither_standard_output_nor_the_region(tmp_path: Path, stderr: str) -> None:
    """Without standard error, the region's file would get descriptor 2, the lowest number that is free."""
    code = """
bench = Bench(Path(sys.argv[1]))
assert bench.works()
before = bench.rows[:COUNT].copy()
bench.provoke("get", "print")
assert bench.works()
assert np.array_equal(bench.rows[:COUNT], before)
bench.tier.shutdown()
print("unchanged")
"""
    engine = run_engine(code, tmp_path / "kv", stderr=stderr)
    output, _ = engine.communicate()
    assert (engine.returncode, output) == (0, b"unchanged\n")


def test_storage_processes_do_not_get_the_key_variables(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.tiers.child_process.KEY_VARIABLES", {"KEYS"})
    monkeypatch.setenv("KEYS", "CANARY")
    monkeypatch.setenv("OTHER", "CANARY")
    bench = make()
    assert bench.works()
    for pid in bench.pids:
        seen = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"OTHER=CANARY" in seen
        assert b"KEYS=CANARY" not in seen


def test_storage_processes_ignore_sigint_and_sigterm(bench: Bench) -> None:
    """Ctrl-C, and the signal that systemd sends to stop a service. The engine must finish its stores first."""
    pids = bench.pids
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
        assert bench.works()
    assert bench.pids == pids


def test_process_starts_although_the_engine_has_over_1024_open_files(make: Callable[..., Bench]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < 1024:
            held.append(os.dup(held[0]))
        assert make().works()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_kill_and_close_do_not_wait_for_a_process_that_is_reaped_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take seconds for it, and the scheduler's thread asks whether the process has ended."""
    process = subprocess.Popen(["sleep", "600"], process_group=0)
    may_reap, really_wait = threading.Event(), process.wait

    def wait() -> int:
        assert may_reap.wait(120)
        return really_wait()

    monkeypatch.setattr(process, "wait", wait)
    ours, theirs = socket.socketpair()
    with theirs:
        server = ChildProcess(process, ours, bytes(16))
        assert not server.has_ended()
        assert server.kill()
        wait_for(lambda: is_gone(process.pid))
        assert not server.has_ended()
        server.kill()
        server.close()
        assert not server.has_ended()
        may_reap.set()
        wait_for(server.has_ended)


def test_tier_shut_down_during_hung_calls_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    first = Bench(tmp_path / "first")  # what is imported and cached once
    first.tier.shutdown()
    fds = open_fds()
    bench = Bench(tmp_path / "kv", [Seats(1, 1, 1, 0), Seats(1, 0, 0, 1)])
    assert bench.works()
    pids = bench.pids
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # as if its system call did not return
    bench.tier.shutdown_s = 0.4
    bench.tier.submit_load(JobMetadata(99, KEYS, np.arange(COUNT, dtype=np.int32)))
    bench.tier.shutdown()
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))
    assert [result.job_id for result in bench.tier.get_finished()] == [99]
    del bench
    assert {re.sub(r"\d+", "", name) for _, name in open_fds() - fds} <= {"/memfd:kvtiers-region (deleted)"}
