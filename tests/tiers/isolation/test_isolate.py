"""ProcessIsolatedStore: the contract, and what only processes do: hang, die, be killed, be left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtiers.tiers.errors import (
    BlobNotFoundError,
    RegionError,
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreThrottledError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from kvtiers.tiers.isolation.mapped_file import open_mapped_file
from kvtiers.tiers.isolation.pool import WorkersUnavailableError
from kvtiers.tiers.isolation.process import SCRATCH_KEEP_BYTES, MappedRegion, WorkerProcess
from kvtiers.tiers.isolation.store import ProcessIsolatedStore, StoreRecipe
from kvtiers.tiers.isolation.worker import FrameReader, StrayBytesError, decode_error, encode_error, pack_frame
from kvtiers.tiers.store import Capabilities, Store, SupportsQuarantine, SupportsTail
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.stores.memory import MemoryStore
from kvtiers.tiers.testing.contract import as_parts, fetch, list_keys, make_data
from kvtiers.tiers.testing.faults import fork, run_in_child
from tests.leaks import open_fds
from tests.processes import deadline, is_gone, kill_workers
from tests.tiers.isolation.misbehaving_store import (
    HeldStore,
    IntrudingStore,
    OddStore,
    OptionsDataclass,
    PlainStore,
)
from tests.tiers.stores.files.root_folder import FolderContract
from tests.waiting import wait_for

WAIT_S_MAX = 120.0
BLOCK_BYTES = 64 << 10

Make = Callable[..., ProcessIsolatedStore]


@pytest.fixture(scope="class")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="class")
def kept() -> Iterator[list[ProcessIsolatedStore]]:
    """The store that the last test left open, if any: starting its workers takes longer than most tests."""
    kept: list[ProcessIsolatedStore] = []
    yield kept
    for store in kept:
        store.close()


class TestNfsStoreInProcesses(FolderContract):
    """Parts outside of any region: through the scratch file."""

    store_class: type[Store] = NfsStore

    @pytest.fixture(autouse=True)
    def _use_tmp_path(self, place: Path) -> None:
        self.tmp_path = place

    @pytest.fixture
    def store(self, _use_tmp_path: None, kept: list[ProcessIsolatedStore]) -> Iterator[Store]:
        if not kept:
            kept.append(self.make_store())
        yield kept[0]
        if kept[0]._pool.closed:
            kept.clear()
        for entry in self.root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def make_store(self) -> ProcessIsolatedStore:
        recipe = StoreRecipe.of(self.store_class, root_dir=self.root)
        return ProcessIsolatedStore(recipe, deadline_s=WAIT_S_MAX)


@pytest.mark.full
class TestLocalStoreInProcesses(TestNfsStoreInProcesses):
    store_class = LocalStore


class Region:
    """Shared memory of 8 blocks."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test-region", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 8 * BLOCK_BYTES)
        self.mapping = mmap.mmap(self.fd, 8 * BLOCK_BYTES)
        self.view = memoryview(self.mapping)

    def block(self, index: int) -> memoryview:
        return self.view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region()
    yield region
    os.close(region.fd)


@pytest.fixture
def make(tmp_path: Path, region: Region) -> Iterator[Make]:
    """Makes stores, and closes them."""
    made: list[ProcessIsolatedStore] = []

    def make(store_class: type[Store] = LocalStore, **options: object) -> ProcessIsolatedStore:
        limits = {name: options.pop(name) for name in ("n_workers", "deadline_s", "close_s") if name in options}
        limits.setdefault("deadline_s", WAIT_S_MAX)
        limits.setdefault("n_workers", 1)
        recipe = StoreRecipe.of(store_class, **{"root_dir": tmp_path / "root", **options})
        made.append(ProcessIsolatedStore(recipe, region=region.view, **limits))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in made:
        store.close()


def environment() -> dict[str, str]:
    """For a process that is to find what this one does."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
    return {**os.environ, "PYTHONPATH": path}


def wait_for_idle(store: ProcessIsolatedStore, count: int) -> None:
    """Until so many workers are idle."""
    wait_for(lambda: len(store._pool.idle) == count, within_s=WAIT_S_MAX)


# ---- the region ------------------------------------------------------------------------------------------------------


def test_blocks_go_through_the_region(make: Make, region: Region, tmp_path: Path) -> None:
    store = make()
    data, trailer = make_data(BLOCK_BYTES), make_data(4096, seed=1)
    region.block(3)[:] = data
    store.put("f/a", [region.block(3), memoryview(trailer)])
    assert (tmp_path / "root/f/a").read_bytes() == data + trailer
    found = bytearray(4096)
    before = bytes(region.view)
    store.get_into("f/a", [region.block(5), memoryview(found)])
    assert region.block(5) == data
    assert found == trailer
    start, end = 5 * BLOCK_BYTES, 6 * BLOCK_BYTES
    assert bytes(region.view[:start]) + bytes(region.view[end:]) == before[:start] + before[end:]
    assert store.kills == 0


def test_only_parts_inside_the_region_are_not_carried(region: Region) -> None:
    mapped = MappedRegion(region.view)
    beyond = memoryview(bytearray(10))
    segments, outside = mapped.locate([region.block(0), region.block(7), region.view[5:7], beyond, region.view[0:0]])
    assert segments == [(0, BLOCK_BYTES), (7 * BLOCK_BYTES, BLOCK_BYTES), (5, 2), (-1, 10), (-1, 0)]
    assert [part.nbytes for part in outside] == [10, 0]
    mapped.close()


def test_frames_that_arrive_together_and_in_pieces_are_read_one_by_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = FrameReader(theirs)
        assert frames.is_empty()
        ours.sendall(pack_frame(["first"], b"raw") + pack_frame({}) + pack_frame("third" * 40_000, bytes(100_000))[:9])
        content, raw, _ = frames.receive()
        assert (content, bytes(raw)) == (["first"], b"raw")
        assert not frames.is_empty()
        content, raw, _ = frames.receive()
        assert (content, bytes(raw)) == ({}, b"")
        rest = pack_frame("third" * 40_000, bytes(100_000))[9:]
        sending = threading.Thread(target=ours.sendall, args=(rest,))
        sending.start()
        content, raw, _ = frames.receive()
        sending.join()
        assert (content, bytes(raw)) == ("third" * 40_000, bytes(100_000))
        assert frames.is_empty()
        ours.sendall(pack_frame("half")[:-1])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            frames.receive()


def test_frame_with_another_tag_or_with_bytes_inside_is_refused() -> None:
    tag, frame = bytes(range(16)), pack_frame([1], tag=bytes(range(16)))
    for sent, accepted in (
        (frame, True),
        (pack_frame([1]), False),
        (frame[:-20] + b"\n" + frame[-20:], False),
        (b"\n" + frame, False),
        (b"\xff" * 64, False),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(sent)
            if accepted:
                assert FrameReader(theirs).receive(tag=tag)[0] == [1]
                continue
            with pytest.raises(StrayBytesError):
                FrameReader(theirs).receive(tag=tag)


def test_a_large_call_leaves_no_memory_behind(make: Make) -> None:
    """The scratch file keeps what it needs for the next calls, and no more."""
    store = make(n_workers=1)
    large = make_data(SCRATCH_KEEP_BYTES + 1)
    store.put("large", [memoryview(large)])
    assert fetch(store, "large", len(large)) == large
    (worker,) = store._pool.workers
    assert os.fstat(worker._scratch_fd).st_size == 0


def test_a_region_of_several_kinds(tmp_path: Path) -> None:
    """memfd; a file; one whose name and descriptor are gone; a view that begins inside a page."""
    fd = os.memfd_create("r", os.MFD_CLOEXEC)
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    (tmp_path / "file").write_bytes(bytes(3 * mmap.PAGESIZE))
    file_fd = os.open(tmp_path / "file", os.O_RDWR)
    for kind, mapping in (
        ("memfd", mmap.mmap(fd, 2 * mmap.PAGESIZE, offset=mmap.PAGESIZE)),
        ("file", mmap.mmap(file_fd, 3 * mmap.PAGESIZE)),
    ):
        view = memoryview(mapping)[100:]
        try:
            found, offset = open_mapped_file(view)
        except RegionError:
            if kind != "file":  # overlayfs and btrfs show another device in /proc/self/maps than fstat does
                raise
            continue
        view[:5] = b"hello"
        assert os.pread(found, 5, offset) == b"hello"
        os.close(found)
    os.close(fd)
    os.close(file_fd)


def test_looking_for_the_regions_file_drops_no_lock_of_the_process(tmp_path: Path, region: Region) -> None:
    probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    mapping = mmap.mmap(-1, mmap.PAGESIZE)  # shared memory without a name or descriptor: all of them are looked at
    with (tmp_path / "lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for view in (region.view, memoryview(mapping)):
            try:
                os.close(open_mapped_file(view)[0])
            except RegionError:
                pass  # it takes a capability
            done = subprocess.run([sys.executable, "-c", probe, file.name], stderr=subprocess.PIPE, check=False)
            assert b"BlockingIOError" in done.stderr


def test_a_region_that_cannot_be_mapped_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    private = bytearray(4 * BLOCK_BYTES)
    with caplog.at_level(logging.WARNING):
        store = ProcessIsolatedStore(
            StoreRecipe.of(LocalStore, root_dir=tmp_path),
            region=memoryview(private),
            n_workers=1,
            deadline_s=WAIT_S_MAX,
        )
    assert len([r for r in caplog.records if "cannot map the region" in r.getMessage()]) == 1
    try:
        private[:BLOCK_BYTES] = make_data(BLOCK_BYTES)
        view = memoryview(private)
        store.put("a", [view[:BLOCK_BYTES]])
        store.get_into("a", [view[BLOCK_BYTES : 2 * BLOCK_BYTES]])
        assert private[BLOCK_BYTES : 2 * BLOCK_BYTES] == make_data(BLOCK_BYTES)
        assert len(caplog.records) == 1
    finally:
        store.close()


def test_what_a_worker_prints_does_not_come_into_the_region_of_an_engine_without_stderr(tmp_path: Path) -> None:
    """The file of the region takes the lowest number that is free, 2."""
    code = f"""
import mmap, os
from kvtiers.tiers.isolation.store import ProcessIsolatedStore, StoreRecipe
region = os.memfd_create("region")
os.ftruncate(region, mmap.PAGESIZE)
mapping = mmap.mmap(region, mmap.PAGESIZE)
recipe = StoreRecipe({PlainStore.__module__!r}, "PlainStore", {{"root_dir": {str(tmp_path)!r}}})
store = ProcessIsolatedStore(recipe, region=memoryview(mapping), n_workers=1, deadline_s={WAIT_S_MAX})
assert store.size("print") is None
store.close()
print("unchanged" if bytes(mapping) == bytes(len(mapping)) else bytes(mapping[:20]))
"""
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (0, b"unchanged\n")


# ---- recipes and what a store can do ---------------------------------------------------------------------------------


def test_extras_are_those_of_the_store(make: Make) -> None:
    local = make()
    assert isinstance(local, SupportsTail)
    assert isinstance(local, SupportsQuarantine)
    assert local.capabilities == LocalStore.capabilities
    assert make(NfsStore).capabilities == NfsStore.capabilities
    plain = make(PlainStore)
    assert not isinstance(plain, SupportsTail)
    assert not isinstance(plain, SupportsQuarantine)
    assert plain.capabilities == Capabilities(exclusive_create=False, shared=False, latency_bound=True)


def test_options_arrive_as_they_were(make: Make, tmp_path: Path) -> None:
    options = OptionsDataclass(name="ключ", count=3, inner={"a": [1, 2.5, None, True]})
    store = make(PlainStore, root_dir=tmp_path / "x", options=options)
    assert fetch(store, "options", len(repr(options).encode())).decode() == repr(options)


def test_an_option_that_cannot_be_handed_over_is_named() -> None:
    with pytest.raises(StoreConfigError, match=r"'clock\.inner'"):
        ProcessIsolatedStore(StoreRecipe.of(LocalStore, clock={"inner": time.time}))


def test_the_constructors_error_comes_out(make: Make, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("no folder")
    before = set(psutil.Process().children())
    with pytest.raises(StoreConfigError, match="root_dir"):
        make()
    wait_for(lambda: set(psutil.Process().children()) <= before)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="no_such_module"):
        ProcessIsolatedStore(StoreRecipe("no_such_module", "Store"), deadline_s=WAIT_S_MAX)


def test_errors_keep_their_class_key_and_text(make: Make) -> None:
    store = make(PlainStore, n_workers=1)
    for kind in ("StoreFullError", "BlobCorruptError", "StoreThrottledError", "StoreError"):
        with pytest.raises(StoreError) as caught:
            store.put(f"raise/{kind}", as_parts(b""))
        assert type(caught.value).__name__ == kind
        assert caught.value.key == f"raise/{kind}"
        assert str(caught.value) == f"as told (key 'raise/{kind}')"


def test_what_is_no_store_error_becomes_one(make: Make) -> None:
    store = make(PlainStore, n_workers=1)
    for kind in ("ZeroDivisionError", "ConnectionResetError", "TimeoutError", "EOFError"):
        with pytest.raises(StoreError, match=kind):
            store.put(f"raise/{kind}", as_parts(b""))
    assert store.kills == 0


def test_odd_answers_cost_no_worker(make: Make) -> None:
    store = make(OddStore, n_workers=1)
    assert store.put("f/a", as_parts(b"1234")) is True
    assert store.size("f/a") == 4
    with pytest.raises(StoreError, match="object is not JSON serializable"):
        store.size("object")
    with pytest.raises(StoreUnavailableError, match="404"):
        fetch(store, "their/error", 1)
    with pytest.raises(BlobNotFoundError, match="none") as caught:
        fetch(store, "bytes/key", 1)
    assert caught.value.key == "b'bytes/key'"
    assert isinstance(store, SupportsTail)
    with pytest.raises(StoreError, match="TypeError"):
        store.get_tail("f/a", 1)
    with pytest.raises(StoreError, match="bytes is not JSON serializable"):
        list_keys(store)
    assert fetch(store, "f/a", 4) == b"1234"
    assert store.kills == 0


def test_a_subclass_of_other_people_arrives_as_what_it_is_one_of() -> None:
    class TheirError(StoreThrottledError):
        pass

    assert type(decode_error(encode_error(TheirError("slow", key="k")))) is StoreThrottledError


# ---- hangs -----------------------------------------------------------------------------------------------------------


def test_a_hung_call_times_out_and_the_next_one_works(make: Make, region: Region) -> None:
    store = make(PlainStore, n_workers=1)
    (victim,) = store.worker_pids
    with deadline(store, 1.0), pytest.raises(StoreTimeoutError) as caught:
        store.get_into("hang", [region.block(0)])
    assert caught.value.key == "hang"
    assert caught.value.retryable
    assert not psutil.pid_exists(victim), "the call must not return before its worker is reaped"
    assert (store.stuck_calls, store.kills) == (0, 1)
    store.put("a", as_parts(b"1"))
    (replacement,) = store.worker_pids
    assert replacement != victim


def test_every_call_has_the_deadline(make: Make, region: Region) -> None:
    store = make(n_workers=1)
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", [region.block(0)]),
        lambda: store.put("a", [memoryview(bytearray(BLOCK_BYTES))]),
        lambda: store.get_into("a", [region.block(0)]),
        lambda: store.size("a"),
        lambda: store.delete("a"),
        lambda: getattr(store, "get_tail")("a", 1),  # noqa: B009 - an extra
    ]
    for call in calls:
        wait_for_idle(store, 1)
        for pid in store.worker_pids:
            os.kill(pid, signal.SIGSTOP)
        with deadline(store, 1.0), pytest.raises(StoreTimeoutError):
            call()
    assert list_keys(store) == []


def test_a_listing_that_hangs(make: Make) -> None:
    store = make(PlainStore)
    listing = store.keys("hang")
    assert next(listing).key == "first"
    with deadline(store, 1.0), pytest.raises(StoreTimeoutError):
        list(listing)
    assert store.stuck_calls == 0


def test_a_listing_that_nobody_finishes_gives_up_its_worker(make: Make) -> None:
    store = make(PlainStore, n_workers=1)
    pids = store.worker_pids
    assert len(list_keys(store)) == 512
    assert store.worker_pids == pids
    listing = store.keys()
    assert next(listing).key == "first"
    with deadline(store, 0.1), pytest.raises(StoreTimeoutError, match="no worker was free"):
        store.size("a")
    del listing
    gc.collect()
    assert len(list_keys(store)) == 512  # from the start
    assert store.worker_pids != pids


def test_a_stuck_call_is_seen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is not reaped yet, as in state D: the call stays, and is counted."""
    store = make(PlainStore, n_workers=1)
    (worker,) = store._pool.workers
    may_be_reaped = threading.Event()
    real_wait = worker.process.wait

    def wait(timeout: float | None = None) -> int:
        assert may_be_reaped.wait(WAIT_S_MAX)
        return real_wait(timeout)

    monkeypatch.setattr(worker.process, "wait", wait)
    with ThreadPoolExecutor(1) as pool, deadline(store, 1.0):
        call = pool.submit(store.size, "hang")
        wait_for(lambda: store.stuck_calls == 1, within_s=WAIT_S_MAX)
        assert not call.done()
        may_be_reaped.set()
        with pytest.raises(StoreTimeoutError):
            call.result(WAIT_S_MAX)
    assert store.stuck_calls == 0


def test_who_waits_for_a_worker_has_a_deadline_too(make: Make) -> None:
    store = make(PlainStore, n_workers=1)
    with ThreadPoolExecutor(4) as pool, deadline(store, 1.0):
        calls = [pool.submit(store.size, "hang") for _ in range(4)]
        for call in calls:
            with pytest.raises(StoreTimeoutError):
                call.result(WAIT_S_MAX)
    assert store.size("a") is None


def test_a_store_that_hangs_at_its_start(make: Make, tmp_path: Path) -> None:
    """Known to be one that may come back, it starts without its storage."""
    gate = tmp_path / "hang-at-start"
    gate.touch()
    store = make(PlainStore, root_dir=tmp_path, deadline_s=1.0)
    assert store.capabilities == PlainStore.capabilities
    with pytest.raises(StoreTimeoutError):
        store.size("a")
    gate.unlink()
    store.deadline_s = WAIT_S_MAX
    assert store.size("a") is None  # from workers that may have begun while it hung


def test_a_worker_that_was_just_started_is_the_last_to_be_used(make: Make, tmp_path: Path) -> None:
    """It makes its store at its start, which may take longer than a call may."""
    store = make(PlainStore, root_dir=tmp_path, n_workers=2)
    wait_for_idle(store, 2)
    for _ in range(2):  # the calls are the other one's
        taken = store._pool.take(WAIT_S_MAX)
        store.size("a")
        store._pool.idle.insert(0, taken)
    (tmp_path / "hang-at-start").touch()
    with pytest.raises(StoreUnavailableError):
        store.size("die")
    wait_for_idle(store, 2)
    assert store.size("a") is None
    assert store.kills == 1
    (tmp_path / "hang-at-start").unlink()


# ---- deaths ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_idle_costs_no_call(make: Make) -> None:
    store = make(n_workers=2)
    store.put("a", as_parts(b"1"))
    for _ in range(5):
        wait_for_idle(store, 2)
        kill_workers(store)
        assert fetch(store, "a", 1) == b"1"


def test_a_worker_that_dies_in_a_call(make: Make) -> None:
    store = make(PlainStore, n_workers=1)
    with pytest.raises(StoreUnavailableError, match="died"):
        store.size("die")
    assert store.size("a") is None
    assert store.kills == 1


def test_workers_killed_at_random(make: Make, region: Region) -> None:
    store = make(n_workers=3)
    for i in range(8):
        region.block(i)[:] = make_data(BLOCK_BYTES, seed=i)
    ended = threading.Event()
    killed: list[int] = []

    def work(i: int) -> int:
        """Only StoreError, and never wrong bytes."""
        succeeded = 0
        target = bytearray(BLOCK_BYTES)
        for n in range(60):
            try:
                store.put(f"f{n % 3}/{i}-{n}", [region.block(i)])
                store.get_into(f"f{n % 3}/{i}-{n}", [memoryview(target)])
            except StoreUnavailableError:
                continue
            assert target == make_data(BLOCK_BYTES, seed=i)
            succeeded += 1
        return succeeded

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(work, i) for i in range(4)]
        while not ended.is_set() and len(killed) < 20:
            pids = store.worker_pids
            if pids:
                pid = pids[len(killed) % len(pids)]
                with contextlib.suppress(ProcessLookupError):  # it is dead, and is being replaced
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            ended.wait(0.02)
            if all(call.done() for call in calls):
                ended.set()
        assert sum(call.result(WAIT_S_MAX) for call in calls) > 0
    assert store.stuck_calls == 0
    wait_for(lambda: all(map(is_gone, killed)))  # one that is dying may take a request
    for i in range(4):
        try:
            assert fetch(store, f"f0/{i}-0", BLOCK_BYTES) == make_data(BLOCK_BYTES, seed=i)
        except BlobNotFoundError:
            pass
    wait_for_idle(store, 3)


def test_a_fork_that_lives_does_not_hold_up_the_end(make: Make) -> None:
    store = make(close_s=2 * WAIT_S_MAX)
    store.put("f/a", [memoryview(b"data")])
    pids = store.worker_pids
    read_end, write_end = os.pipe()
    child = fork()
    if not child:
        store.close()  # of what is its parent's
        os.read(read_end, 1)
        os._exit(0)
    try:
        assert store.size("f/a") == 4
        started_at = time.monotonic()
        store.close()
        # Idle workers see the end, and are not waited for until they are killed.
        assert time.monotonic() - started_at < WAIT_S_MAX
        assert all(is_gone(pid) for pid in pids)
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


def test_where_no_worker_can_be_started_it_is_said(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("", str(tmp_path / "none"), "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(WorkersUnavailableError):
            make()


def test_workers_do_not_see_the_keys(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.tiers.isolation.process.KEY_VARIABLES", {"KEYS"})
    monkeypatch.setenv("KEYS", "CANARY")
    monkeypatch.setenv("OTHER", "CANARY")
    store = make()
    store.put("f/a", [memoryview(b"data")])
    for pid in store.worker_pids:
        seen = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"OTHER=CANARY" in seen
        assert b"KEYS=CANARY" not in seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_whole_service_are_the_engines(make: Make, number: signal.Signals) -> None:
    """Ctrl-C, and what systemd stops a service with: the engine has stores to finish."""
    store = make(n_workers=2)
    store.put("f/a", [memoryview(b"data")])
    wait_for_idle(store, 2)
    first = store._pool.take(WAIT_S_MAX)
    assert store.size("f/a") == 4  # by the other one: a worker that is starting does not ignore signals yet
    store._pool.give_back(first)
    pids = store.worker_pids
    for pid in pids:
        os.kill(pid, number)
    assert store.size("f/a") == 4
    assert store.worker_pids == pids


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    """SIGKILL of the parent: idle workers see the socket close, hung ones get the kernel's signal."""
    code = f"""
import sys, threading, time
from kvtiers.tiers.isolation.store import ProcessIsolatedStore, StoreRecipe
recipe = StoreRecipe({PlainStore.__module__!r}, "PlainStore", {{"root_dir": {str(tmp_path)!r}}})
store = ProcessIsolatedStore(recipe, n_workers=2, deadline_s=600.0)
threading.Thread(target=store.size, args=("hang",), daemon=True).start()
while len(store._pool.idle) != 1 or len(store._pool.workers) != 2:
    time.sleep(0.01)
print(*store.worker_pids, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment())
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: all(is_gone(pid) for pid in pids), within_s=WAIT_S_MAX)


def test_workers_of_an_engine_with_many_open_files(make: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < 1024:
            held.append(os.dup(held[0]))
        store = make(n_workers=1)
        assert store.put("a", as_parts(b"1"))
        assert store.size("a") == 1
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_path_in_sys_path_is_ignored_as_imports_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    assert make(n_workers=1).put("a", as_parts(b"1"))


def test_whatever_hinders_a_start_the_next_one_is_tried(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(n_workers=1)
    store.put("a", as_parts(b"1"))

    def fail(*_: object) -> None:
        raise TypeError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "start", fail)
        kill_workers(store)
        with pytest.raises(StoreUnavailableError, match="TypeError: not today"):
            store.size("a")
    assert store.size("a") == 1


def test_a_failed_start_refuses_nobody_whom_a_living_worker_will_serve(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(n_workers=2)
    store.put("a", as_parts(b"1"))
    wait_for_idle(store, 2)
    busy = store._pool.take(WAIT_S_MAX)
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise OSError("too many open files")

    monkeypatch.setattr(WorkerProcess, "start", fail)
    store._pool.idle[0].process.kill()
    store._pool.idle[0].process.wait()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.size, "a")
        assert failed.wait(WAIT_S_MAX)
        wait_for(lambda: not store._pool._starting, within_s=WAIT_S_MAX)
        store._pool.give_back(busy)
        assert call.result(WAIT_S_MAX) == 1


def test_the_thread_that_first_called_may_end(make: Make) -> None:
    """PR_SET_PDEATHSIG is about the thread that started the process, which must not be a caller's."""
    made: list[ProcessIsolatedStore] = []
    thread = threading.Thread(target=lambda: made.append(make(PlainStore, n_workers=1)))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreUnavailableError):
        pool.submit(made[0].size, "die").result()
    assert made[0].size("a") is None
    pids = made[0].worker_pids
    for _ in range(20):
        made[0].size("a")
    assert made[0].worker_pids == pids
    assert made[0].kills == 1


def test_a_fork_is_refused(make: Make) -> None:
    store = make()

    def use() -> None:
        with pytest.raises(StoreClosedError, match="fork"):
            store.size("a")

    assert run_in_child(use) == 0
    assert store.size("a") is None


# ---- libraries that break the rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["fork", "fork-in-c"])
def test_fork_that_returns_from_a_library_answers_nothing(make: Make, region: Region, tmp_path: Path, key: str) -> None:
    store = make(IntrudingStore)
    data = make_data(BLOCK_BYTES)
    store.put(key, [memoryview(data)])
    store.put("other", [memoryview(data[::-1])])
    for _ in range(3):
        store.get_into(key, [region.block(0)])
        store.get_into("other", [region.block(1)])
        assert (bytes(region.block(0)), bytes(region.block(1))) == (bytes(data), bytes(data[::-1]))
    assert store.kills == 0
    forks = [int(pid) for pid in (tmp_path / "root.forks").read_text().split()]
    assert len(forks) == 3
    wait_for(lambda: all(map(is_gone, forks)), within_s=WAIT_S_MAX)


@pytest.mark.parametrize("key", ["late-child", "late-session"])
def test_child_of_a_killed_worker_cannot_write_into_the_region(
    make: Make, region: Region, tmp_path: Path, key: str
) -> None:
    """Also a child that leaves the worker's process group, and so outlives the worker."""
    store = make(IntrudingStore)
    store.put(key, [region.block(0)])
    with deadline(store, 2.0), pytest.raises(StoreTimeoutError):
        store.get_into(key, [region.block(0)])
    wait_for((tmp_path / "root.forks").exists, within_s=WAIT_S_MAX)
    (child,) = map(int, (tmp_path / "root.forks").read_text().split())
    try:
        if key == "late-child":
            assert is_gone(child)
        (tmp_path / "root.go").touch()
        wait_for(lambda: is_gone(child), within_s=WAIT_S_MAX)
        assert bytes(region.block(0)) == bytes(BLOCK_BYTES)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_process_that_a_library_started_ends_with_its_worker(make: Make, tmp_path: Path) -> None:
    store = make(IntrudingStore, close_s=2 * WAIT_S_MAX)
    store.put("program", [memoryview(b"data")])
    assert fetch(store, "program", 4) == b"data"
    (program,) = map(int, (tmp_path / "root.forks").read_text().split())
    assert not is_gone(program)
    store.close()  # the worker ends by itself
    wait_for(lambda: is_gone(program), within_s=WAIT_S_MAX)


@pytest.mark.parametrize("key", ["stray-before", "stray-answer", "stray-null"])
def test_bytes_that_are_not_the_answer_fail_the_call_and_end_the_worker(make: Make, region: Region, key: str) -> None:
    store = make(IntrudingStore)
    data = make_data(BLOCK_BYTES)
    store.put("good", [memoryview(data)])
    with pytest.raises(StoreUnavailableError, match="are not the requested answer"):
        store.get_into(key, [region.block(0)])
    assert store.kills == 1
    store.get_into("good", [region.block(1)])
    assert region.block(1) == data


def test_bytes_that_arrive_between_calls_end_the_worker(make: Make, tmp_path: Path) -> None:
    store = make(IntrudingStore)
    with pytest.raises(BlobNotFoundError):
        store.get_into("stray-later", [memoryview(bytearray(4))])
    (tmp_path / "root.go").touch()
    wait_for((tmp_path / "root.wrote").exists, within_s=WAIT_S_MAX)
    with pytest.raises(StoreUnavailableError, match="although no request was open"):
        store.size("good")
    assert store.size("good") is None
    assert store.kills == 1


def test_put_gets_read_only_parts(make: Make, region: Region) -> None:
    store = make(IntrudingStore)
    with pytest.raises(StoreError, match="cannot modify read-only memory"):
        store.put("scribble", [region.block(0), memoryview(bytearray(10))])
    assert bytes(region.block(0)) == bytes(BLOCK_BYTES)


def test_size_that_is_a_list_is_an_error(make: Make) -> None:
    with pytest.raises(StoreError, match="a size is a number or None, not a list"):
        make(IntrudingStore).size("list")


def test_fork_of_a_process_with_own_output_writes_nothing() -> None:
    """The collector and the workers of ``verify``."""
    script = """
import os
from kvtiers.tiers.isolation.worker import end_if_forked, own_output
output, pid = own_output(), os.getpid()
child = os.fork()
end_if_forked(pid)
output.write(f"answer {os.waitpid(child, 0)[1] != 0}")
output.flush()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "answer True"


# ---- close, leaks ----------------------------------------------------------------------------------------------------


def test_close_with_everything_hung(make: Make) -> None:
    store = make(PlainStore, n_workers=3, deadline_s=600.0, close_s=1.0)
    wait_for_idle(store, 3)
    pids = store.worker_pids
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(store.size, "hang") for _ in range(2)]
        wait_for_idle(store, 1)
        os.kill(store._pool.idle[0].process.pid, signal.SIGSTOP)
        store.close()
        for call in calls:
            with pytest.raises(StoreClosedError):
                call.result(WAIT_S_MAX)
    wait_for(lambda: all(map(is_gone, pids)))
    assert store.stuck_calls == 0


def test_close_does_not_wait_for_a_start_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(n_workers=1, close_s=0.5)
    may_start, starting = threading.Event(), threading.Event()
    real_start = WorkerProcess.start

    def start(*arguments: Any) -> WorkerProcess:
        starting.set()
        assert may_start.wait(WAIT_S_MAX)
        return real_start(*arguments)

    monkeypatch.setattr(WorkerProcess, "start", start)
    for pid in store.worker_pids:
        os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.size, "a")
        assert starting.wait(WAIT_S_MAX)
        store.close()
        assert not may_start.is_set()
        with pytest.raises(StoreError):
            call.result(WAIT_S_MAX)
        may_start.set()
    wait_for(lambda: not store._pool.workers, within_s=WAIT_S_MAX)


ENDING_ENGINE = f"""
import atexit, sys, threading, time
from kvtiers.tiers.isolation.store import ProcessIsolatedStore, StoreRecipe
from kvtiers.tiers.isolation.process import WorkerProcess
recipe = StoreRecipe({PlainStore.__module__!r}, "PlainStore", {{"root_dir": sys.argv[1]}})
store = ProcessIsolatedStore(recipe, n_workers=1, deadline_s={WAIT_S_MAX})
store.size("a")
"""


def run_to_its_end(code: str, root_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENDING_ENGINE + code, str(root_dir)],
        capture_output=True,
        env=environment(),
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )


def test_a_store_works_until_the_end_of_its_process(tmp_path: Path) -> None:
    """Functions of ``atexit`` are called when threads that are no daemons have ended."""
    done = run_to_its_end('atexit.register(lambda: print(store.size("slow"), store.kills))', tmp_path)
    assert (done.returncode, done.stdout) == (0, "4 0\n"), done.stderr


def test_a_start_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    code = """
starting = threading.Event()
def hang(*arguments):
    starting.set()
    threading.Event().wait()
WorkerProcess.start = hang
threading.Thread(target=store.size, args=("die",), daemon=True).start()
assert starting.wait(120)
print("end")
"""
    done = run_to_its_end(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_close_lets_running_calls_end(make: Make, tmp_path: Path) -> None:
    store = make(HeldStore, n_workers=1, close_s=2 * WAIT_S_MAX)
    hold = tmp_path / "root.hold"
    hold.touch()
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(store.put, "a", as_parts(b"1234"))
        wait_for(lambda: not store._pool.idle and not store._pool._starting)
        closing = pool.submit(store.close)
        wait_for(lambda: store._pool.closed)
        assert not call.done()
        hold.unlink()
        assert call.result(WAIT_S_MAX) is True
        closing.result(WAIT_S_MAX)


def test_nothing_leaks(make: Make, region: Region) -> None:
    make(n_workers=1).close()  # what is imported and cached once
    fds, threads = open_fds(), set(threading.enumerate())
    store = make(PlainStore, n_workers=2, close_s=WAIT_S_MAX)
    for _ in range(3):
        with deadline(store, 1.0), pytest.raises(StoreTimeoutError):
            store.get_into("hang", [region.block(0)])
        with pytest.raises(StoreUnavailableError):
            store.size("die")
        assert next(store.keys()).key == "first"
    pids = store.worker_pids
    store.close()
    wait_for(lambda: set(threading.enumerate()) <= threads)
    wait_for(lambda: all(map(is_gone, pids)))
    assert open_fds() <= fds


def test_the_region_is_let_go(tmp_path: Path) -> None:
    region = Region()
    recipe = StoreRecipe.of(LocalStore, root_dir=tmp_path)
    store = ProcessIsolatedStore(recipe, region=region.view, n_workers=1, deadline_s=WAIT_S_MAX, close_s=WAIT_S_MAX)
    store.put("a", [region.block(0)])
    store.close()
    region.view.release()
    region.mapping.close()
    os.close(region.fd)


def test_a_worker_imports_little(make: Make) -> None:
    store = make(PlainStore, n_workers=1)
    loaded = set(fetch(store, "modules", store.size("modules") or 0).decode().split())
    assert "kvtiers.tiers.isolation.worker" in loaded
    assert (
        not {"torch", "pydantic", "numpy", "yaml", "boto3", "typer", "kvtiers.tiers.config.deployment", "pytest"}
        & loaded
    )
    code = "import sys, kvtiers.tiers.stores.files.nfs; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert "kvtiers.tiers.stores.files.nfs" in loaded
    assert not {"torch", "pydantic", "numpy", "yaml", "boto3", "typer", "kvtiers.tiers.config.deployment"} & loaded


def test_memory_store_works_too() -> None:
    """One worker, so that it is one memory."""
    store = ProcessIsolatedStore(StoreRecipe.of(MemoryStore), n_workers=1, deadline_s=WAIT_S_MAX)
    store.put("a", as_parts(b"1234"))
    assert fetch(store, "a", 4) == b"1234"
    store.close()


def test_what_a_child_logs_says_which_process_and_when(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import logging
from kvtiers.tiers.isolation.worker import log_to_stderr
log_to_stderr("kvtiers-worker", logging.INFO)
logging.getLogger("kvtiers.tiers.capacity.room").info("the storage is full")
logging.getLogger("elsewhere").info("not of ours")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"\(kvtiers-worker pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[.*:\d+\] the storage is full", line
    )
