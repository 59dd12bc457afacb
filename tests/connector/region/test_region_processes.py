"""SharedOffloadRegion between real processes: joining, dying at every step, restarting (D3)."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvtiers.connector.region.region_file import reap_stale_regions, region_path
from kvtiers.connector.region.shared_region import SharedOffloadRegion
from kvtiers.tiers.errors import RegionError
from kvtiers.tiers.testing.faults import fork as fork_process
from tests.promises import Record
from tests.waiting import wait_for

PAGE = os.sysconf("SC_PAGESIZE")
NUM_BLOCKS = 16
TIMEOUT_S = 120.0


@dataclass
class Child:
    """A forked process. It writes lines to a pipe; the parent waits for them."""

    pid: int
    lines: int  # descriptor

    def read_line(self) -> str:
        """The next line, or "" when the child is gone."""
        line = b""
        poll = select.poll()
        poll.register(self.lines, select.POLLIN)
        while not line.endswith(b"\n"):
            assert poll.poll(TIMEOUT_S * 1000), "the child says nothing"
            byte = os.read(self.lines, 1)
            if not byte:
                break
            line += byte
        return line.decode().strip()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Exit status; negative is a signal."""
        os.close(self.lines)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork(run: Callable[[Callable[[str], None]], None]) -> Child:
    """Run ``run(say)`` in a child that then waits to be killed."""
    lines, end = os.pipe()
    pid = fork_process()
    if pid:
        os.close(end)
        return Child(pid, lines)
    try:
        run(lambda line: void(os.write(end, f"{line}\n".encode())))
        signal.pause()
    except BaseException as e:
        os.write(end, f"{type(e).__name__}: {e}\n".encode())
        traceback.print_exc()
    finally:
        os._exit(1)


def void(_: object) -> None:
    return None


def join(directory: str, rank: int | None, *, num_workers: int = 2, num_blocks: int = NUM_BLOCKS) -> Child:
    """A process that maps the region and says so."""

    def run(say: Callable[[str], None]) -> None:
        region = SharedOffloadRegion("x", num_blocks, PAGE, num_workers, rank, directory=directory)
        say("mapped")
        signal.pause()
        region.cleanup()

    return fork(run)


def end(*children: Child) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.wait()


@pytest.fixture
def directory() -> Iterator[str]:
    """A folder on the real /dev/shm, so that the kernel's tmpfs is what is tested."""
    path = Path(f"/dev/shm/kvtiers-test-{os.getpid()}-{os.urandom(4).hex()}")
    path.mkdir(mode=0o700)
    yield str(path)
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


def assert_engine_starts(directory: str) -> None:
    """Scheduler and two workers, all at once, see one region; then nothing is left of the name."""
    children = [join(directory, rank) for rank in (1, None, 0)]
    assert [child.read_line() for child in children] == ["mapped"] * 3
    assert os.listdir(directory) == []
    end(*children)


SCRIPT = """
import os, sys
from kvtiers.connector.region.shared_region import SharedOffloadRegion
directory, rank, num_workers = sys.argv[1], None if sys.argv[2] == "None" else int(sys.argv[2]), int(sys.argv[3])
region = SharedOffloadRegion("engine", 8, 1000, num_workers, rank, directory=directory)
rows = region.create_kv_memoryview().cast("B")
stride = region.geometry.row_stride
if rank is not None:
    for block in range(8):
        rows[block * stride + rank * 1000] = 10 * block + rank + 1
print("written", flush=True)
sys.stdin.readline()
print([rows[b * stride + w * 1000] for b in range(8) for w in range(num_workers)], flush=True)
region.cleanup()
"""


@pytest.mark.parametrize("num_workers", [1, 3])
def test_two_or_four_processes_share_one_region(directory: str, num_workers: int) -> None:
    ranks = [*range(num_workers), None]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, directory, str(rank), str(num_workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
    assert os.listdir(directory) == []  # the last one to map it removed the name
    expected = [10 * block + rank + 1 for block in range(8) for rank in range(num_workers)]
    for process in processes:
        out, _ = process.communicate("\n", timeout=TIMEOUT_S)
        assert out == f"{expected}\n"
        assert process.returncode == 0


def test_no_region_file_is_left_after_all_processes_are_killed(directory: str) -> None:
    children = [join(directory, rank) for rank in (None, 0, 1)]
    for child in children:
        assert child.read_line() == "mapped"
    end(*children)
    assert os.listdir(directory) == []


def test_engine_starts_whenever_the_engine_before_was_killed(directory: str, record: Record) -> None:
    moments = random.Random(3)
    for _ in range(20):
        children = [join(directory, rank, num_blocks=2048) for rank in (None, 0, 1)]
        # Kill after a random number of processes has mapped, all of them included, or at a random instant.
        for child in moments.sample(children, moments.randint(0, 3)):
            assert child.read_line() == "mapped"
        if moments.random() < 0.5:
            time.sleep(moments.random() * 0.02)
        end(*children)
        assert len(os.listdir(directory)) <= 1
        assert_engine_starts(directory)
    record("D3", restarts=20, failed=0)


def test_reaper_removes_only_regions_of_dead_engines(directory: str) -> None:
    dead = join(directory, 0)
    assert dead.read_line() == "mapped"
    path = region_path(directory, "x")
    assert reap_stale_regions(directory) == []  # its creator lives
    end(dead)
    other = Path(directory, "somebody_elses.mmap")
    other.touch()
    assert reap_stale_regions(directory) == [path]
    assert os.listdir(directory) == [other.name]
    alive = join(directory, None)
    assert alive.read_line() == "mapped"
    assert reap_stale_regions(directory) == []
    end(alive)


def test_start_of_an_engine_removes_region_of_a_dead_engine(directory: str) -> None:
    dead = join(directory, 0)
    assert dead.read_line() == "mapped"
    end(dead)
    region = SharedOffloadRegion("another", NUM_BLOCKS, PAGE, 1, 0, directory=directory)
    assert os.listdir(directory) == [os.path.basename(region_path(directory, "another"))]
    region.cleanup()


def test_region_of_a_zombie_creator_is_stale(directory: str) -> None:
    creator = join(directory, 0)
    assert creator.read_line() == "mapped"
    creator.kill()
    os.waitid(os.P_PID, creator.pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped
    assert_engine_starts(directory)
    creator.wait()


def test_a_reused_pid_does_not_keep_a_region_alive(directory: str) -> None:
    def run(say: Callable[[str], None]) -> None:
        os.getpid = os.getppid  # alive, but somebody else
        SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 0, directory=directory)
        say("mapped")

    impostor = fork(run)
    assert impostor.read_line() == "mapped"
    end(impostor)
    assert_engine_starts(directory)


def test_region_with_pid_unknown_here_is_not_stale(directory: str) -> None:
    """As in containers that share /dev/shm, each with PIDs of its own."""

    def run(say: Callable[[str], None]) -> None:
        os.getpid = lambda: 1 << 30
        SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 0, directory=directory)
        say("mapped")
        signal.pause()

    elsewhere = fork(run)
    assert elsewhere.read_line() == "mapped"
    assert reap_stale_regions(directory) == []
    others = [join(directory, rank) for rank in (1, None)]
    assert [child.read_line() for child in others] == ["mapped"] * 2
    assert os.listdir(directory) == []  # all three have one file
    end(elsewhere, *others)


def test_region_of_another_pid_namespace_stays_while_its_process_lives(directory: str) -> None:
    script = (
        "import sys; from kvtiers.connector.region.shared_region import SharedOffloadRegion\n"
        f"region = SharedOffloadRegion('x', {NUM_BLOCKS}, {PAGE}, 2, 0, directory=sys.argv[1])\n"
        "print('mapped', flush=True); sys.stdin.readline()\n"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", script, directory]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if not process.stdout.readline():
        pytest.skip(f"cannot make a PID namespace: {process.stderr.read()}")
    try:
        another = SharedOffloadRegion("another", NUM_BLOCKS, PAGE, 1, 0, directory=directory)  # looks for stale ones
        assert os.path.exists(region_path(directory, "x"))
        another.cleanup()
        scheduler = SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, None, directory=directory)
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
    assert wait_for(lambda: reap_stale_regions(directory)) == [region_path(directory, "x")]
    scheduler.cleanup()


def test_reaper_without_free_descriptors_removes_no_live_region(directory: str) -> None:
    alive = join(directory, 0)
    assert alive.read_line() == "mapped"

    def run(say: Callable[[str], None]) -> None:
        open_file = os.open
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 64  # the tests before may have left many open
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        def take_the_last(*args: Any, **kwargs: Any) -> int:
            fd = open_file(*args, **kwargs)
            with contextlib.suppress(OSError):
                while True:
                    os.dup(fd)
            return fd

        os.open = take_the_last
        say(str(reap_stale_regions(directory)))

    reaper = fork(run)
    assert reaper.read_line() == "[]"
    end(alive, reaper)


def test_rank_of_dead_engine_is_taken_until_its_forked_child_ends(directory: str) -> None:
    def run(say: Callable[[str], None]) -> None:
        SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 0, directory=directory)
        heir = fork_process()
        if heir:
            say(str(heir))
        signal.pause()

    engine = fork(run)
    heir = int(engine.read_line())
    engine.kill()
    os.waitpid(engine.pid, 0)
    try:
        with pytest.raises(RegionError, match=f"rank 0 is process {engine.pid} already, or a process that"):
            SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 0, directory=directory)
    finally:
        os.kill(heir, signal.SIGKILL)
    assert engine.read_line() == ""  # the pipe's last holder is gone
    os.close(engine.lines)
    assert_engine_starts(directory)


def test_mismatch_is_reported_while_the_creator_still_allocates(directory: str) -> None:
    def run(say: Callable[[str], None]) -> None:
        def allocate(fd: int, offset: int, length: int) -> NoReturn:
            say("allocating")
            signal.pause()
            raise AssertionError

        os.posix_fallocate = allocate
        SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 0, directory=directory)

    creator = fork(run)
    assert creator.read_line() == "allocating"
    with pytest.raises(RegionError, match="num_blocks 16 .* this process has 17"):
        SharedOffloadRegion("x", NUM_BLOCKS + 1, PAGE, 2, 1, directory=directory)
    # Same geometry: it waits, but not for ever.
    with pytest.raises(RegionError, match=f"waited 0.05 s for process {creator.pid}"):
        SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 1, directory=directory, join_timeout_s=0.05)
    # A creator that dies there is noticed by whoever waits.
    joiner = join(directory, 1)
    end(creator)
    assert joiner.read_line() == "mapped"
    end(joiner)


#: Every call that changes or reads shared state on the way to a region.
STEPS: list[tuple[Any, str]] = [
    (os, "open"),
    (os, "fchmod"),
    (os, "ftruncate"),
    (os, "link"),
    (os, "posix_fallocate"),
    (os, "pwrite"),
    (os, "pread"),
    (os, "unlink"),
    (os, "close"),
    (fcntl, "flock"),
    (fcntl, "fcntl"),
    (mmap, "mmap"),
]


def die_before_step(steps: int) -> None:
    """Make this process kill itself instead of taking step number ``steps`` (from 0)."""
    left = [steps]

    def arm(module: Any, name: str) -> None:
        original = getattr(module, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return original(*args, **kwargs)

        setattr(module, name, step)

    for module, name in STEPS:
        arm(module, name)


@pytest.mark.parametrize("killed", ["creator", "joiner", "last"])
def test_engine_starts_after_sigkill_before_any_step_of_the_engine_before(directory: str, killed: str) -> None:
    """At whatever step a process dies, who waits for it starts anew, and the next engine starts."""
    ranks: dict[str, list[int | None]] = {"creator": [], "joiner": [1], "last": [1, None]}

    for steps in range(100):

        def run(say: Callable[[str], None], steps: int = steps) -> None:
            die_before_step(steps)
            SharedOffloadRegion("x", NUM_BLOCKS, PAGE, 2, 0, directory=directory)
            say("mapped")

        earlier = [join(directory, rank) for rank in ranks[killed]]
        assert all(child.read_line() == "mapped" for child in earlier)
        victim = fork(run)
        waiting = join(directory, 1) if killed == "creator" else None
        survived = victim.read_line() == "mapped"
        if waiting is not None:
            assert waiting.read_line() == "mapped"
            end(waiting)
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
        end(*earlier)
        assert len(os.listdir(directory)) <= 1
        if steps % 2:  # both ways to get rid of what is left
            reap_stale_regions(directory)
            assert os.listdir(directory) == []
        assert_engine_starts(directory)
        if survived:
            assert steps > 5
            return
    raise AssertionError("it never came to an end")
