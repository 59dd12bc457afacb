"""LocalStore when its writers are killed (W3) and when there are many of them (W5).

0 bad blobs, 0 leftovers after a restart. Children are forked, so that one death costs milliseconds.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtiers.tiers.errors import BlobNotFoundError
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.testing.contract import as_parts, fetch, make_data
from kvtiers.tiers.testing.faults import SyscallFaults, run_in_child, start_child, wait_child
from tests.files import files_below
from tests.promises import Record
from tests.tiers.stores.files.root_folder import use_private_names

BLOB_BYTES = 40_000


def make_blob(key: str, version: int) -> bytes:
    """A blob that says whose it is: the digest of key and body, then the body."""
    body = make_data(BLOB_BYTES - 32, seed=version)
    return hashlib.sha256(key.encode() + body).digest() + body


def is_blob_of(key: str, data: bytes) -> bool:
    return len(data) == BLOB_BYTES and hashlib.sha256(key.encode() + data[32:]).digest() == data[:32]


@pytest.fixture(params=["unnamed files", "private names"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], LocalStore]:
    """Opens the place as a process that starts would."""

    def open_store() -> LocalStore:
        return use_private_names(LocalStore(tmp_path / "root"), request.param == "private names")

    return open_store


def check_after_restart(store: LocalStore, root: Path) -> dict[str, bytes]:
    """Every file below the root is a listed and whole blob. Returns the blobs."""
    blobs = {}
    for info in store.keys():  # noqa: SIM118 - a Store is no dict
        blobs[info.key] = fetch(store, info.key, info.size)
        assert is_blob_of(info.key, blobs[info.key]), f"{info.key} is bad"
    found = {str(path.relative_to(root)) for path, _ in files_below(root)}
    assert found == set(blobs), "something was left over"
    return blobs


OPERATIONS: dict[str, Callable[[LocalStore], object]] = {
    "put": lambda store: store.put("f/new", as_parts(make_blob("f/new", 2), 4096)),
    "put into a new folder": lambda store: store.put("g/h/new", as_parts(make_blob("g/h/new", 2), 4096)),
    "overwrite": lambda store: store.put("f/old", as_parts(make_blob("f/old", 2), 4096), overwrite=True),
    "delete": lambda store: store.delete("f/old"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_store_killed_at_any_system_call_leaves_whole_blobs(
    open_store: Callable[[], LocalStore], tmp_path: Path, name: str
) -> None:
    operation = OPERATIONS[name]
    root = tmp_path / "root"
    old = make_blob("f/old", 1)
    left_over = 0
    n = 0
    while True:
        store = open_store()
        store.put("f/old", as_parts(old))

        def work(store: LocalStore = store, n: int = n) -> None:
            with SyscallFaults(at=n, kill=True):
                operation(store)

        status = run_in_child(work)
        assert status in (0, -signal.SIGKILL)
        left_over += any(root.glob(".tmp/*"))

        blobs = check_after_restart(open_store(), root)
        changed = blobs != {"f/old": old}
        if changed:
            # What the operation would have made of it, whole; nothing between.
            operation(store)
            assert check_after_restart(store, root) == blobs
        for key in [*blobs, "f/new", "g/h/new"]:
            store.delete(key)
        if status == 0:
            assert changed
            break
        n += 1
    assert n >= 3
    if name == "overwrite":
        assert left_over, "no death left a private file: the test does not show that they are swept"


@pytest.mark.parametrize("kills", [25, pytest.param(100, marks=pytest.mark.full)])
def test_store_killed_at_random_leaves_whole_blobs_and_no_private_files(
    open_store: Callable[[], LocalStore], tmp_path: Path, kills: int, record: Record
) -> None:
    """On each of the two ways, with 100 deaths each."""
    randoms = random.Random(7)
    keys = [f"f{i % 3}/{i}" for i in range(12)]
    root = tmp_path / "root"
    seen: set[str] = set()
    for round_ in range(kills):
        read_fd, write_fd = os.pipe()

        def work(seed: int = round_, write_fd: int = write_fd) -> None:
            store = open_store()
            choices = random.Random(seed)
            while True:
                key = choices.choice(keys)
                if choices.random() < 0.1:
                    store.delete(key)
                else:
                    blob = make_blob(key, choices.randrange(8))
                    store.put(key, as_parts(blob, 4096), overwrite=choices.random() < 0.5)
                os.write(write_fd, b".")

        child = start_child(work)
        os.close(write_fd)
        for _ in range(randoms.randrange(1, 12)):  # it dies in the operation after, wherever that is by then
            os.read(read_fd, 1)
        os.kill(child, signal.SIGKILL)
        assert wait_child(child) == -signal.SIGKILL
        os.close(read_fd)
        seen |= check_after_restart(open_store(), root).keys()
    assert seen == set(keys)
    record("W3", kills=kills, bad_blocks=0, left_over=0)
    record("D2", kills=kills, private_files_left=0)


def test_many_processes_on_the_same_keys_read_only_whole_blobs(
    open_store: Callable[[], LocalStore], tmp_path: Path, record: Record
) -> None:
    """W5 in small: a reader sees whole blobs of that key or none, and nothing but BlobNotFoundError comes out."""
    keys = [f"f/{i}" for i in range(4)]

    def work(seed: int) -> None:
        store = open_store()
        choices = random.Random(seed)
        found = 0
        for _ in range(400):
            key = choices.choice(keys)
            action = choices.random()
            if action < 0.3:
                store.put(key, as_parts(make_blob(key, choices.randrange(4)), 4096))
            elif action < 0.5:
                store.put(key, as_parts(make_blob(key, choices.randrange(4)), 4096), overwrite=True)
            elif action < 0.6:
                store.delete(key)
            else:
                try:
                    assert is_blob_of(key, fetch(store, key, BLOB_BYTES))
                    found += 1
                except BlobNotFoundError:
                    pass
        assert found

    children = [start_child(functools.partial(work, seed)) for seed in range(6)]
    assert [wait_child(child) for child in children] == [0] * 6
    check_after_restart(open_store(), tmp_path / "root")
    record("W5", processes=6, operations=6 * 400, keys=4, wrong=0, exceptions=0)
