"""The storage checks of ``kvtiers doctor``. Each check uses small real blobs and removes them again.

- Every store: put a blob, put it again, replace it, read all of it and its end, list and delete it. This needs every
  right that the tier needs.
- Folders: also test what publishing and direct I/O need.
- Tiers that are read_only: write nothing; list and read existing blocks.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from ...tiers.builtin import key_ids
from ...tiers.capacity.walker import is_block
from ...tiers.config.tier_options import BoundedTierConfig, FsTierConfig, NfsTierConfig, TierConfig
from ...tiers.errors import StoreConfigError, StoreError, printable
from ...tiers.store import Store, SupportsTail
from ...tiers.stores.files.mounts import file_system_type
from ...tiers.tools.neighbors import Namespace, differing_fields, namespaces_in, shown_values
from ...tiers.tools.seal_kinds import count_misses, sample_seals, unknown_keys
from .findings import Finding, Level, of_error

PROBE_FOLDER = "kvtiers-doctor"
CLOCK_SKEW_S_MAX = 5.0
LISTED_MAX = 2000  # a check must not list a bucket of millions
LOST_AND_FOUND = "lost+found"
REFUSED_SHOWN_MAX = 5
READ_BYTES_MAX = 256 << 20  # larger blobs are not blocks
_WRITERS = "check that an engine with the same location and prefix writes here"


def examine_folder(where: str, config: FsTierConfig | NfsTierConfig) -> Iterator[Finding]:
    """Check a root folder's permissions and file system, and what publishing needs. The folder must exist."""
    root = config.root_dir
    kind = file_system_type(root)
    status = os.lstat(root)
    # Users who can write to the folder can make an engine load arbitrary KV. With keys they can only cause misses.
    level: Level = "problem" if config.encrypt == "none" else "note"
    keys = (
        "" if level == "note" else "; or set encrypt: aes-gcm, which accepts only blocks that were written with a key"
    )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Finding(
            level, where, "mode", f"other users can write to {root} (mode {stat.S_IMODE(status.st_mode):o})",
            f"chmod 700 {root}{keys}",
        )  # fmt: skip
    if status.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:  # root may check the folder of an engine's user
        yield Finding(
            level, where, "owner", f"{root} belongs to uid {status.st_uid}, who can also write to it",
            f"chown it to uid {os.geteuid()}{keys}",
        )  # fmt: skip
    if kind in ("overlay", "overlayfs"):
        yield Finding(
            "problem", where, "file system", f"{root} is in a container's layer: lost with the container, and slow",
            "mount a volume there",
        )  # fmt: skip
    elif kind in ("tmpfs", "ramfs"):
        yield Finding(
            "note", where, "file system", f"{root} is on {kind}: its blocks take memory and are lost at a reboot"
        )
    else:
        yield Finding("ok", where, "file system", f"{root} is on {kind or 'an unknown file system'}")
    yield from _refused_folders(where, root)
    if config.read_only:
        return
    yield _unnamed_files(where, root, expected=isinstance(config, FsTierConfig))
    yield _rename(where, root)
    yield _direct_io(where, root)


def examine_store(
    where: str, config: TierConfig, store: Store, now: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Put, put again, replace, read, list and delete a blob. Stops at the first operation that is refused."""
    if isinstance(config, BoundedTierConfig) and config.read_only:
        yield from _reading(where, config, store)
        return
    key = f"{PROBE_FOLDER}/{secrets.token_hex(8)}"
    first, second = bytes(4096), bytes([1]) * 4096
    got = bytearray(4096)
    try:
        began = time.perf_counter()
        store.put(key, [memoryview(first)])
        put_s = time.perf_counter() - began
        try:
            began = time.perf_counter()
            store.get_into(key, [memoryview(got)])
            get_s = time.perf_counter() - began
            if got not in (first, second):
                yield _damaged_reads(where)
                return
            yield _latency(where, config, put_s, get_s)
            yield from _semantics(where, key, store, (first, second), got)
            yield from _listing(where, key, store, now)
        finally:
            (error,) = store.delete_many([key])
            if error is not None:
                raise error
        if store.size(key) is not None:
            yield Finding("problem", where, "delete", "a deleted blob still exists", "check versioning and locks")
        yield Finding("ok", where, "rights", "blobs can be put, read, listed, replaced and deleted")
    except StoreConfigError as e:
        yield of_error(where, e, config)
    except StoreError as e:
        yield of_error(where, e, config, "rights")


def examine_namespaces(where: str, store: Store) -> Iterator[Finding]:
    """Compare the namespaces of each model, and name the fields that keep replicas from sharing blocks."""
    by_model: dict[str, list[Namespace]] = {}
    namespaces, is_cut = namespaces_in(store)
    for namespace in namespaces:
        by_model.setdefault(namespace.model, []).append(namespace)
    for model, found in sorted(by_model.items()):
        if len(found) == 1 and is_cut:
            yield Finding(
                "note", where, "namespaces", f"{model}: one was found, but only a part of the storage was listed",
                "kvtiers ls lists all of it",
            )  # fmt: skip
            continue
        if len(found) == 1:
            yield Finding("ok", where, "namespaces", f"{model}: one, so all replicas that write here share blocks")
            continue
        values = "; ".join(f"{name}: {', '.join(shown_values(found, name))}" for name in differing_fields(found))
        yield Finding(
            "note", where, "namespaces",
            f"{model}: {'at least ' if is_cut else ''}{len(found)}, which share no blocks. They differ in {values}",
            "give replicas that should share blocks the same values; others may be removed if no engine uses them",
        )  # fmt: skip


def examine_seals(where: str, config: TierConfig, store: Store) -> Iterator[Finding]:
    """Sample stored blocks, and say which of them engines with this configuration cannot load."""
    seals = sample_seals(store)
    if not seals:
        return
    count = sum(seals.values())
    ids = key_ids(config)
    if ids is None:
        yield Finding("note", where, "keys", "the keys cannot be read, so stored blocks are not compared with them")
    misses = count_misses(seals, config.encrypt, ids)
    if not misses:
        yield Finding("ok", where, "blocks", f"engines with this configuration can load all {count} sampled blocks")
        return
    told = "; ".join(f"{number} of {count} sampled blocks are {reason}" for reason, number in misses.items())
    is_problem = bool(unknown_keys(seals, ids)) or sum(misses.values()) == count
    yield Finding(
        "problem" if is_problem else "note", where, "blocks",
        f"{told}: they are misses",
        "add a missing key to the tier's keys, after the first one; remove blocks that no engine uses (kvtiers rm)",
    )  # fmt: skip


def _reading(where: str, config: TierConfig, store: Store) -> Iterator[Finding]:
    try:
        some = itertools.islice(store.keys(), LISTED_MAX)
        info = next((info for info in some if info.size <= READ_BYTES_MAX and is_block(info.key)), None)
        if info is None:
            yield Finding("problem", where, "blocks", "there are none, and the tier is read_only: no hits", _WRITERS)
            return
        store.get_into(info.key, [memoryview(bytearray(info.size))])
        yield Finding("ok", where, "rights", "blobs can be listed and read; read_only needs no other rights")
    except StoreError as e:
        yield of_error(where, e, config, "rights")


def _damaged_reads(where: str) -> Finding:
    return Finding(
        "problem", where, "reads",
        f"host {socket.gethostname()} read other bytes of a blob than it had written",
        "check this host's memory and network (dmesg, ECC and NIC errors, proxies), and run doctor on another host",
    )  # fmt: skip


def _latency(where: str, config: TierConfig, put_s: float, get_s: float) -> Finding:
    text = f"put {put_s * 1e3:.1f} ms, get {get_s * 1e3:.1f} ms for 4 KiB"
    if get_s > config.lookup_deadline_s:
        return Finding(
            "problem", where, "latency", f"{text}: lookups without an answer miss after {config.lookup_deadline_s} s",
            "raise lookup_deadline_s, or use storage with a lower latency",
        )  # fmt: skip
    return Finding("ok", where, "latency", text)


def _semantics(where: str, key: str, store: Store, contents: tuple[bytes, bytes], got: bytearray) -> Iterator[Finding]:
    """Check that a put of an existing blob changes nothing, unless it is told to replace the blob."""
    first, second = contents
    store.put(key, [memoryview(second)])
    store.get_into(key, [memoryview(got)])
    if got not in contents:
        yield _damaged_reads(where)
        return
    if got == first:
        yield Finding("ok", where, "conditional put", "the first writer of a block wins")
    elif store.capabilities.exclusive_create:
        yield Finding(
            "problem", where, "conditional put",
            "the storage ignores If-None-Match: every replica writes every block again",
            "harmless, since blocks with the same key are equal, but it wastes writes: update the server",
        )  # fmt: skip
    else:
        yield Finding("note", where, "conditional put", "the last writer of a block wins, which is harmless here")
    store.put(key, [memoryview(second)], overwrite=True)
    store.get_into(key, [memoryview(got)])
    if got not in contents:
        yield _damaged_reads(where)
    elif got != second:
        yield Finding(
            "problem", where, "replace", "a replaced blob still has its old content: bad blocks cannot be repaired",
            "look for a cache between this machine and the storage",
        )  # fmt: skip
    if isinstance(store, SupportsTail):
        found = store.get_tail(key, 16)
        if found != (len(got), bytes(got[-16:])):
            yield Finding(
                "problem",
                where,
                "ranges",
                f"reading the last 16 bytes gave {found!r:.60}",
                "use a server that supports range requests",
            )


def _listing(where: str, key: str, store: Store, now: Callable[[], float]) -> Iterator[Finding]:
    began = now()
    store.put(key, [memoryview(bytes(4096))], overwrite=True)
    ended = now()
    info = next((info for info in store.keys(key) if info.key == key), None)
    if info is None:
        yield Finding(
            "problem", where, "listing", "a blob that was just put is not listed", "the listing is stale or forbidden"
        )
        return
    skew_s = info.mtime - min(max(info.mtime, began), ended)
    if abs(skew_s) > CLOCK_SKEW_S_MAX:
        text = f"the storage's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
        yield Finding(
            "problem", where, "clock", text,
            "run NTP on both: ages of blocks depend on both clocks, and S3 refuses a skew of 15 minutes",
        )  # fmt: skip
    else:
        yield Finding("ok", where, "clock", f"within {CLOCK_SKEW_S_MAX:.0f} s of the storage's clock")


def _refused_folders(where: str, root: str) -> Iterator[Finding]:
    """Find folders that this user cannot read: listings skip them, and looking up their blocks fails."""
    refused = []
    looked_at = 0
    left = deque([""])  # outer folders first: usually the cause is a command run as root, which made some of these
    while left and looked_at < LISTED_MAX:
        outer = left.popleft()
        with suppress(OSError), os.scandir(os.path.join(root, outer)) as entries:
            for name in sorted(os.path.join(outer, e.name) for e in entries if e.is_dir(follow_symlinks=False)):
                looked_at += 1
                if os.access(os.path.join(root, name), os.R_OK | os.X_OK):
                    left.append(name)
                elif os.path.lexists(os.path.join(root, name)):  # otherwise an engine has just removed it
                    refused.append(name)
    if LOST_AND_FOUND in refused:
        refused.remove(LOST_AND_FOUND)
        yield Finding("note", where, "folders", f"{LOST_AND_FOUND} belongs to the file system; listings skip it")
    if refused:
        shown = ", ".join(map(printable, refused[:REFUSED_SHOWN_MAX])) + (
            ", …" if len(refused) > REFUSED_SHOWN_MAX else ""
        )
        yield Finding(
            "problem", where, "folders",
            f"uid {os.getuid()} cannot read {len(refused)} of the folders in {root}: {shown}; their blocks are not "
            "loaded, counted or removed",
            f"chown -R {os.getuid()}:{os.getgid()} {root}, and run kvtiers commands as the engine's user",
        )  # fmt: skip


def _unnamed_files(where: str, root: str, *, expected: bool) -> Finding:
    """Check O_TMPFILE and linkat, with which a writer that is killed while publishing a block leaves nothing behind."""
    name = os.path.join(root, f".{secrets.token_hex(8)}")
    try:
        fd = os.open(root, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:  # with a dir_fd Python calls linkat, which can follow the link in /proc; plain link cannot
                os.link(f"/proc/self/fd/{fd}", os.path.basename(name), dst_dir_fd=root_fd, follow_symlinks=True)
            finally:
                os.close(root_fd)
            os.unlink(name)
        finally:
            os.close(fd)
    except OSError as e:
        text = f"no O_TMPFILE with linkat ({errno.errorcode.get(e.errno or 0, e)})"
        if not expected:
            return Finding("ok", where, "publishing", f"{text}: uses private names and link or rename, as usual on NFS")
        return Finding(
            "note",
            where,
            "publishing",
            f"{text}: blocks are published from private names; those of killed writers are removed later",
        )
    return Finding("ok", where, "publishing", "O_TMPFILE and linkat: a writer that is killed leaves nothing behind")


def _rename(where: str, root: str) -> Finding:
    """Check a rename over a file that another process has open, which is how a bad block is replaced."""
    old, new = (os.path.join(root, f".{secrets.token_hex(8)}") for _ in range(2))
    try:
        for name, content in ((old, b"old"), (new, b"new")):
            with open(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as f:
                f.write(content)
        with open(old, "rb") as reader:
            os.rename(new, old)
            with open(old, "rb") as f:
                replaced = f.read() == b"new"
            kept = reader.read() == b"old"
    except OSError as e:
        fix = ""
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = f"give uid {os.getuid()} the right to read and write {root}"
        elif e.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            fix = "use another file system"
        elif e.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "make room"
        return Finding("problem", where, "atomic rename", f"could not be tested: {e.strerror}", fix)
    finally:
        for name in (old, new):
            try:
                os.unlink(name)
            except OSError:
                pass
    if replaced and kept:
        return Finding("ok", where, "atomic rename", "a block that is being read can be replaced")
    return Finding("problem", where, "atomic rename", "a reader saw the new file", "use another file system")


def _direct_io(where: str, root: str) -> Finding:
    name = os.path.join(root, f".{secrets.token_hex(8)}")
    try:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.close(fd)
    except OSError as e:
        return Finding(
            "note", where, "O_DIRECT", f"not supported ({errno.errorcode.get(e.errno or 0, e)}), and not needed"
        )
    finally:
        try:
            os.unlink(name)
        except OSError:
            pass
    return Finding("ok", where, "O_DIRECT", "supported, but not used: blocks go through the page cache")
