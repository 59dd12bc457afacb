"""NfsStore: the contract, what it must not use, ESTALE, litter of other hosts, and what it says about mounts.

On a local folder; real NFS is in ``tests/nfs``.
"""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtiers.tiers.errors import BlobNotFoundError, StoreFullError, StoreUnavailableError
from kvtiers.tiers.store import Store
from kvtiers.tiers.stores import vectored_io
from kvtiers.tiers.stores.files import cleanup, mounts
from kvtiers.tiers.stores.files.mounts import mount_findings
from kvtiers.tiers.stores.files.nfs import NfsStore
from kvtiers.tiers.stores.files.publish import private_name
from kvtiers.tiers.testing.contract import as_parts, fetch, list_keys, make_data
from kvtiers.tiers.testing.faults import SyscallFaults, run_in_child
from tests.tiers.stores.files.root_folder import FolderContract


class TestNfsStore(FolderContract):
    def make_store(self) -> Store:
        return NfsStore(self.tmp_path / "root")


def test_nfs_store_uses_no_call_that_nfs_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real_open = os.open

    def record(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        opened.append(flags)
        return real_open(path, flags, *rest, dir_fd=dir_fd)

    with SyscallFaults() as calls:
        store = NfsStore(tmp_path / "root")
        monkeypatch.setattr(os, "open", record)
        store.put("f/a", as_parts(b"1"))
        store.put("f/a", as_parts(b"2"), overwrite=True)
        store.delete("f/a")
        monkeypatch.undo()
    assert not [flags for flags in opened if flags & os.O_TMPFILE == os.O_TMPFILE or flags & os.O_DIRECT]
    assert opened, "the seam must have seen the calls"
    assert not {"fsync", "fdatasync"} & set(calls.calls)


def test_nfs_put_publishes_the_name_only_after_a_successful_close(tmp_path: Path) -> None:
    store = NfsStore(tmp_path / "root")
    store.put("f/first", as_parts(b"1"))
    with SyscallFaults() as dry:
        store.put("f/a", as_parts(b"1"))
    written = dry.calls.index("pwritev")
    assert dry.calls.index("close", written) < dry.calls.index("link")
    with (
        SyscallFaults(at=dry.calls.index("close", written), error=errno.EDQUOT),
        pytest.raises(StoreFullError),
    ):
        store.put("f/b", as_parts(b"1"))
    assert list_keys(store) == ["f/a", "f/first"]
    assert os.listdir(tmp_path / "root" / ".tmp") == []


def test_sweep_keeps_files_of_other_hosts_while_quota_is_full(tmp_path: Path) -> None:
    """Reading the server's clock takes a file."""
    store = NfsStore(tmp_path / "root")
    store.put("f/a", as_parts(b"1"), overwrite=True)
    left = tmp_path / "root" / ".tmp" / f"elsewhere-{private_name()}"
    left.touch()
    os.utime(left, (0, 0))
    with SyscallFaults() as dry:
        assert store.sweep(remove=False) == 1
    at = len(dry.calls) - 1 - dry.calls[::-1].index("open")
    with SyscallFaults(at=at, error=errno.EDQUOT) as faults:
        assert store.sweep() == 0
    assert faults.failed == ["open"]
    assert store.sweep() == 1


OPERATIONS: dict[str, tuple[Callable[[NfsStore], object], object]] = {
    "get": (lambda store: fetch(store, "f/a", 5000), make_data(5000)),
    "size": (lambda store: store.size("f/a"), 5000),
    "tail": (lambda store: store.get_tail("f/a", 4), (5000, make_data(5000)[-4:])),
    "put": (lambda store: store.put("f/b", as_parts(b"1")), True),
    "overwrite": (lambda store: store.put("f/a", as_parts(make_data(5000)), overwrite=True), True),
    "delete": (lambda store: store.delete("f/c"), None),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_call_that_meets_estale_once_is_retried(tmp_path: Path, name: str) -> None:
    call, answer = OPERATIONS[name]
    place = tmp_path / "0"
    prepare(place)
    gc.collect()  # of what earlier tests left in cycles: its end would be counted, too
    with SyscallFaults() as dry:
        first = NfsStore(place)  # kept, or the end of its life would be counted where the collector has the time for it
        call(first)
    opening = prepare_calls(place)
    for n in range(opening, len(dry.calls)):
        place = tmp_path / str(n + 1)
        prepare(place)
        store = NfsStore(place)
        with SyscallFaults(at=n - opening, error=errno.ESTALE) as faults:
            assert call(store) == answer
        assert len(faults.failed) == 1
        assert fetch(store, "f/a", 5000) == make_data(5000)


def prepare(place: Path) -> None:
    store = NfsStore(place)
    for key in ("f/a", "f/c", "f/d"):
        store.put(key, as_parts(make_data(5000)))
    store.close()


def prepare_calls(place: Path) -> int:
    """System calls of opening a store that has been there before."""
    with SyscallFaults() as dry:
        store = NfsStore(place)
        calls = len(dry.calls)
    store.close()
    return calls


def test_lasting_estale_is_a_miss_for_reads_and_an_error_for_puts(tmp_path: Path) -> None:
    prepare(tmp_path)
    store = NfsStore(tmp_path)
    with SyscallFaults(at=0, error=errno.ESTALE, forever=True):
        with pytest.raises(BlobNotFoundError):
            fetch(store, "f/a", 5000)
        assert store.size("f/a") is None
        assert store.get_tail("f/a", 4) is None
        store.delete("f/a")
        with pytest.raises(StoreUnavailableError):
            store.put("f/b", as_parts(b"1"))
    assert fetch(store, "f/a", 5000) == make_data(5000)


def test_get_that_meets_estale_while_reading_opens_the_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was removed and stored anew by another host: the second read finds the new one."""
    prepare(tmp_path)
    store = NfsStore(tmp_path)
    real, errors = vectored_io.transfer, [errno.ESTALE]

    def stale(*arguments: object) -> int:
        if errors:
            raise OSError(errors.pop(), "stale")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(vectored_io, "transfer", stale)
    assert fetch(store, "f/a", 5000) == make_data(5000)
    assert not errors


@pytest.mark.parametrize("call", ["open", "stat", "scandir"])
def test_blob_removed_during_a_listing_hides_no_other_blob(tmp_path: Path, call: str) -> None:
    place = tmp_path / "root"
    keys = [f"{folder}/{n}" for folder in "abc" for n in range(3)]
    store = NfsStore(place)
    for key in keys:
        store.put(key, as_parts(b"1"))
    with SyscallFaults() as dry:
        assert list_keys(store) == keys
    root_is_open = dry.calls.index("scandir") + 1
    for number, name in enumerate(dry.calls[root_is_open:], root_is_open):
        if name != call:
            continue
        with SyscallFaults(at=number, error=errno.ESTALE) as faults:
            found = list_keys(store)
        assert faults.failed == [call]
        gone = set(keys) - set(found)
        assert len(gone) == (1 if call == "stat" else 3)
        assert len({key[0] for key in gone}) == 1


def test_listing_of_a_vanished_root_fails(tmp_path: Path) -> None:
    store = NfsStore(tmp_path / "root")
    for key in ("a/0", "b/0"):
        store.put(key, as_parts(b"1"))
    listing = store.keys()
    assert next(listing).key in ("a/0", "b/0")
    with SyscallFaults(at=0, error=errno.ESTALE, forever=True), pytest.raises(StoreUnavailableError):
        list(listing)


# ---- D2: litter ------------------------------------------------------------------------------------------------------


def test_age_of_leftovers_is_measured_by_the_servers_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is days ahead must not remove what another host is writing now."""
    prepare(tmp_path)
    live = tmp_path / ".tmp" / "other-host-0badcafe-4026531836-1-2-0123abcd-4"
    old = tmp_path / ".tmp" / "other-host-0badcafe-4026531836-1-2-0123abcd-5"
    for path in (live, old):
        path.write_bytes(b"half a blob")
    an_hour_ago = time.time() - cleanup.STALE_AGE_S_MAX - 60
    os.utime(old, (an_hour_ago, an_hour_ago))
    monkeypatch.setattr(time, "time", lambda: 1e10)
    NfsStore(tmp_path)
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == [live.name]


def test_files_of_dead_writers_on_the_same_host_are_removed_at_once(tmp_path: Path) -> None:
    prepare(tmp_path)

    def die_writing() -> None:
        store = NfsStore(tmp_path)
        store.put("f/w", as_parts(b"1"))
        with SyscallFaults() as dry:
            store.put("f/x", as_parts(b"1"))
        with SyscallFaults(at=dry.calls.index("link"), kill=True):
            store.put("f/y", as_parts(b"1"))

    assert run_in_child(die_writing) == -9
    (orphan,) = (tmp_path / ".tmp").iterdir()
    assert os.uname().nodename in orphan.name
    NfsStore(tmp_path)
    assert list((tmp_path / ".tmp").iterdir()) == []


# ---- mount_findings --------------------------------------------------------------------------------------------------

GOOD = (
    "rw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,softerr,proto=tcp,nconnect=4,timeo=50,retrans=2,sec=sys,"
    "clientaddr=192.0.2.6,lookupcache=pos,local_lock=none,addr=192.0.2.5"
)


def findings(tmp_path: Path, options: str, *, own: str = "rw,noatime", path: str = "/mnt/a/kv") -> list[str]:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "36 22 0:48 / /mnt rw shared:2 - tmpfs tmpfs rw\n"
        "37 36 0:49 / /mnt/a ro shared:3 - ext4 /dev/hidden ro\n"
        f"38 36 0:50 / /mnt/a {own} shared:4 master:1 - nfs4 server:/export {options}\n"
        f"39 36 0:51 / /mnt/with\\040space {own} - nfs server:/export {options}\n"
    )
    return mount_findings(path, mountinfo=str(table))


def test_good_mount_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ("lookupcache=pos,", "", "lookupcache=pos"),
        ("lookupcache=pos", "lookupcache=none", "lookupcache=none"),
        ("softerr", "hard", "hard"),
        ("vers=4.2", "vers=3", "vers=3"),
        ("timeo=50", "timeo=50,noac", "noac"),
        ("timeo=50", "timeo=50,acdirmin=600,acdirmax=600", "acdirmax=600"),
        ("wsize=1048576", "wsize=32768", "wsize=32768"),
    ],
)
def test_unsafe_mount_options_are_named(tmp_path: Path, good: str, bad: str, expected: str) -> None:
    assert good in GOOD
    finding, recommended = findings(tmp_path, GOOD.replace(good, bad))
    assert finding.startswith("/mnt/a: ")
    assert expected in finding
    assert "recommended" in recommended
    assert "lookupcache=pos" in recommended


def test_read_only_mount_is_a_finding(tmp_path: Path) -> None:
    assert "ro: " in findings(tmp_path, GOOD, own="ro")[0]


def test_mount_findings_apply_to_paths_on_the_mount_and_to_links_to_it(tmp_path: Path) -> None:
    bad = GOOD.replace("softerr", "hard")
    assert findings(tmp_path, bad, path="/mnt/with space")[0].startswith("/mnt/with space: hard")
    assert findings(tmp_path, bad, path="/mnt/a/not/yet/there")
    assert findings(tmp_path, bad, path="/mnt/a/../a")
    for other in ("/mnt/ab", "/mnt", "/", str(tmp_path)):
        assert findings(tmp_path, bad, path=other) == []
    link = tmp_path / "link"
    link.symlink_to("/mnt/a")
    assert findings(tmp_path, bad, path=str(link / "kv"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert findings(tmp_path, bad, path=str(loop)) == []


def test_mounts_are_unknown_if_proc_is_hidden(tmp_path: Path) -> None:
    assert mounts.file_system_type(tmp_path, mountinfo=str(tmp_path / "none")) == ""
    assert not mounts.is_mount_point("/", mountinfo=str(tmp_path / "none"))


def test_this_machines_mounts_can_be_read(tmp_path: Path) -> None:
    assert isinstance(mount_findings(tmp_path), list)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "ceph", "lustre"])
def test_mount_findings_make_no_call_on_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An engine looks at mounts while it starts."""
    table = tmp_path / "mountinfo"
    table.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 22 0:48 / {tmp_path}/far rw - {kind} server:/export {GOOD}\n"
    )
    asked: list[str] = []

    def islink(path: str) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(os.path, "islink", islink)
    assert mounts.file_system_type(tmp_path / "far" / "kv", mountinfo=str(table)) == kind
    assert str(tmp_path) in asked
    assert not [path for path in asked if path.startswith(f"{tmp_path}/far")]
