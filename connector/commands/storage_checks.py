"""Checks of ``kvtiers check`` on an open storage: its file system or bucket, its blocks, and its behavior.

Only ``try_folder`` and ``try_store`` write. They put small blobs, put them again, replace, read, list and delete them,
which takes every right that a tier needs.
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
from ...tiers.config.tier_options import (
    BoundedTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
    shown_place,
)
from ...tiers.errors import StoreConfigError, StoreError, printable
from ...tiers.store import Store, SupportsTail
from ...tiers.stores.files.mounts import file_system_type
from ...tiers.tools.neighbors import Namespace, differing_fields, namespaces_in, shown_values
from ...tiers.tools.seal_kinds import count_misses, sample_seals, unknown_keys
from .findings import Finding, Level, of_error
from .tier_checks import trial_key

CLOCK_SKEW_S_MAX = 5.0
LISTED_MAX = 2000  # a check must not list a bucket of millions
LOST_AND_FOUND = "lost+found"
REFUSED_SHOWN_MAX = 5
READ_BYTES_MAX = 256 << 20  # larger blobs are not blocks
MODELS_MAX = 5  # whose blocks are described


def examine_storage(tier: TierConfig, store: Store, sizes: dict[str, int], *, writes: bool) -> Iterator[Finding]:
    """Examine a tier's storage and the blocks there. For the arguments, see ``check.examine_tier``."""
    is_read_only = isinstance(tier, BoundedTierConfig) and tier.read_only
    if isinstance(tier, FsTierConfig | NfsTierConfig):
        yield from examine_folder(tier)
        if writes and not is_read_only:
            yield from try_folder(tier.root_dir)
    if isinstance(tier, S3TierConfig):
        yield from examine_bucket(tier, store)
    if isinstance(tier, FsspecTierConfig):
        absent = list(examine_container(tier, store))
        yield from absent
        if absent:
            return
    if is_read_only:
        yield from examine_reading(tier, store)
    elif writes:
        yield from try_store(tier, store)
    namespaces, is_cut = namespaces_in(store)
    if isinstance(tier, FsspecTierConfig):
        yield Finding("ok", "storage", "answers")
    if isinstance(tier, StoreTierConfig):
        text = f"answers; {tier.module_path} opens this store and may create folders even without --write"
        yield Finding("ok", "storage", text)
    yield from examine_namespaces(namespaces, is_cut)
    yield from examine_seals(tier, store)
    for namespace in namespaces:
        block = next((info for info in store.keys(f"{namespace.name}_r0/") if is_block(info.key)), None)
        if block is not None:
            sizes[namespace.model] = block.size
        if len(sizes) == MODELS_MAX:
            return


# ---- checks that read
# -------------------------------------------------------------------------------------------------


def examine_folder(config: FsTierConfig | NfsTierConfig) -> Iterator[Finding]:
    """Check a root folder's permissions and file system. The folder must exist."""
    root = config.root_dir
    kind = file_system_type(root)
    status = os.lstat(root)
    # Users who can write to the folder can make an engine load arbitrary KV. With keys they can only cause misses.
    level: Level = "problem" if config.encrypt == "none" else "note"
    keys = (
        "" if level == "note" else "; or set encrypt: aes-gcm, which accepts only blocks that were written with a key"
    )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"other users can write to {root} (mode {stat.S_IMODE(status.st_mode):o})"
        yield Finding(level, "mode", text, f"chmod 700 {root}{keys}")
    if status.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:  # root may check the folder of an engine's user
        text = f"{root} belongs to uid {status.st_uid}, who can also write to it"
        yield Finding(level, "owner", text, f"chown it to uid {os.geteuid()}{keys}")
    if kind in ("overlay", "overlayfs"):
        text = f"{root} is in a container's layer: lost with the container, and slow"
        yield Finding("problem", "file system", text, "mount a volume there")
    elif kind in ("tmpfs", "ramfs"):
        text = f"{root} is on {kind}: its blocks take memory and are lost at a reboot"
        yield Finding("note", "file system", text)
    else:
        yield Finding("ok", "file system", f"{root} is on {kind or 'an unknown file system'}")
    yield from _refused_folders(root)


def examine_bucket(config: S3TierConfig, store: Store) -> Iterator[Finding]:
    """Check a bucket that is known to answer."""
    from ...tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    assert isinstance(store, S3Store)
    try:
        keeps_versions = store.keeps_versions()
    except StoreError:  # no versioning, or no right to read its settings, which a tier does not need
        keeps_versions = False
    yield Finding("ok", "bucket", f"{config.bucket} exists, and the credentials are valid")
    if keeps_versions and not config.read_only:
        text = "the bucket keeps deleted blocks, so max_bytes and ttl free no space"
        fix = "use a bucket without versioning, or expire noncurrent versions with a lifecycle rule for the prefix"
        yield Finding("problem", "versioning", text, fix)
    if config.allow_insecure:
        text = "http is allowed, which sends blocks and signatures in clear text"
        yield Finding("problem", "TLS", text, "use https")


def examine_container(config: FsspecTierConfig, store: Store) -> Iterator[Finding]:
    """Say that a URL's bucket or container is absent: to reads, that looks like one without blocks."""
    has_container = getattr(store, "has_container", None)
    if has_container is not None and has_container() is False:
        text = f"the bucket or container of {shown_place(config)} does not exist"
        yield Finding("problem", "url", text, "create it, or correct the URL or storage_options")


def examine_reading(config: TierConfig, store: Store) -> Iterator[Finding]:
    """Read a stored block, which is all that a read_only tier has a right to."""
    try:
        some = itertools.islice(store.keys(), LISTED_MAX)
        info = next((info for info in some if info.size <= READ_BYTES_MAX and is_block(info.key)), None)
        if info is None:
            text = "no blocks are stored, and the tier is read_only: nothing can be loaded"
            fix = "check that an engine with the same location and prefix writes here"
            yield Finding("warning", "blocks", text, fix)
            return
        store.get_into(info.key, [memoryview(bytearray(info.size))])
        yield Finding("ok", "rights", "blobs can be listed and read; read_only needs no other rights")
    except StoreError as e:
        yield of_error(e, config, "rights")


def examine_namespaces(namespaces: list[Namespace], is_cut: bool) -> Iterator[Finding]:
    """Compare the namespaces of each model, and name the fields that keep replicas from sharing blocks."""
    by_model: dict[str, list[Namespace]] = {}
    for namespace in namespaces:
        by_model.setdefault(namespace.model, []).append(namespace)
    for model, found in sorted(by_model.items()):
        if len(found) == 1 and is_cut:
            text = f"{model} has at least one namespace; only a part of the storage was listed"
            yield Finding("note", "namespaces", text, "kvtiers ls lists all of it")
            continue
        if len(found) == 1:
            yield Finding("ok", "namespaces", f"{model} has one namespace: all replicas that write here share blocks")
            continue
        values = "; ".join(f"{name}: {', '.join(shown_values(found, name))}" for name in differing_fields(found))
        least = "at least " if is_cut else ""
        text = f"{model} has {least}{len(found)} namespaces, which share no blocks. They differ in {values}"
        fix = "give replicas that should share blocks the same values; others may be removed if no engine uses them"
        yield Finding("note", "namespaces", text, fix)


def examine_seals(config: TierConfig, store: Store) -> Iterator[Finding]:
    """Sample stored blocks, and say which of them engines with this configuration cannot load."""
    seals = sample_seals(store)
    if not seals:
        return
    count = sum(seals.values())
    ids = key_ids(config)
    if ids is None:
        yield Finding("note", "keys", "the keys cannot be read, so stored blocks are not compared with them")
    misses = count_misses(seals, config.encrypt, ids)
    if not misses:
        yield Finding("ok", "blocks", f"engines with this configuration can load all {count} sampled blocks")
        return
    told = "; ".join(f"{number} of {count} sampled blocks are {reason}" for reason, number in misses.items())
    level: Level = "problem" if unknown_keys(seals, ids) or sum(misses.values()) == count else "note"
    fix = "add a missing key to the tier's keys, after the first one; remove blocks that no engine uses (kvtiers rm)"
    yield Finding(level, "blocks", f"{told}: they are misses", fix)


def _refused_folders(root: str) -> Iterator[Finding]:
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
        yield Finding("note", "folders", f"{LOST_AND_FOUND} belongs to the file system; listings skip it")
    if refused:
        shown = ", ".join(map(printable, refused[:REFUSED_SHOWN_MAX]))
        shown += ", …" if len(refused) > REFUSED_SHOWN_MAX else ""
        text = f"uid {os.getuid()} cannot read {len(refused)} of the folders in {root}: {shown}"
        text += "; their blocks are not loaded, counted or removed"
        fix = f"chown -R {os.getuid()}:{os.getgid()} {root}, and run kvtiers commands as the engine's user"
        yield Finding("problem", "folders", text, fix)


# ---- checks that write
# ------------------------------------------------------------------------------------------------


def try_folder(root: str) -> Iterator[Finding]:
    """Rename over a file that another process has open, which is how a bad block is replaced."""
    old, new = (os.path.join(root, f".{secrets.token_hex(8)}") for _ in range(2))
    try:
        for name, content in ((old, b"old"), (new, b"new")):
            with open(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as f:
                f.write(content)
        with open(old, "rb") as reader:
            os.rename(new, old)
            with open(old, "rb") as f:
                is_replaced = f.read() == b"new" and reader.read() == b"old"
    except OSError as e:
        fixes = {errno.ENOSPC: "make room", errno.EDQUOT: "make room"}
        fixes |= dict.fromkeys((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP), "use another file system")
        rights = f"give uid {os.getuid()} the right to read and write {root}"
        fixes |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), rights)
        text = f"could not be tested: {e.strerror}"
        yield Finding("problem", "atomic rename", text, fixes.get(e.errno or 0, ""))
        return
    finally:
        for name in (old, new):
            with suppress(OSError):
                os.unlink(name)
    if is_replaced:
        yield Finding("ok", "atomic rename", "a block that is being read can be replaced")
    else:
        yield Finding("problem", "atomic rename", "a reader saw the new file", "use another file system")


class _DamagedReadError(Exception):
    """Other bytes were read than any that were written."""


def try_store(config: TierConfig, store: Store, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Put, put again, replace, read, list and delete a blob. Stops at the first operation that is refused."""
    key = trial_key()
    try:
        try:
            yield from _semantics(config, key, store)
            yield from _listing(key, store, now)
        finally:
            (error,) = store.delete_many([key])
            if error is not None:
                raise error
        store.delete(key)  # a request of another kind than that of delete_many
        if store.size(key) is not None:
            yield Finding("problem", "delete", "a deleted blob still exists", "check versioning and locks")
        yield Finding("ok", "rights", "blobs can be put, read, listed, replaced and deleted")
        if isinstance(config, S3TierConfig):
            yield _checksum(is_refused=getattr(store, "checksum_refused", False))
    except _DamagedReadError:
        text = f"host {socket.gethostname()} read other bytes of a blob than it had written"
        fix = "check this host's memory and network (dmesg, ECC and NIC errors, proxies), and run check on another host"
        yield Finding("problem", "reads", text, fix)
    except StoreConfigError as e:
        yield of_error(e, config)
    except StoreError as e:
        yield of_error(e, config, "rights")


def _latency(config: TierConfig, put_s: float, get_s: float) -> Finding:
    text = f"put {put_s * 1e3:.1f} ms, get {get_s * 1e3:.1f} ms for 4 KiB"
    if get_s <= config.lookup_deadline_s:
        return Finding("ok", "latency", text)
    text += f": lookups without an answer miss after {config.lookup_deadline_s} s"
    return Finding("problem", "latency", text, "raise lookup_deadline_s, or use storage with a lower latency")


def _semantics(config: TierConfig, key: str, store: Store) -> Iterator[Finding]:
    """Check that a put of an existing blob changes nothing, unless it is told to replace the blob."""
    first, second = bytes([1]) * 4096, bytes([2]) * 4096
    got = bytearray(4096)

    def get() -> bytes:
        store.get_into(key, [memoryview(got)])
        if got not in (first, second):
            raise _DamagedReadError
        return bytes(got)

    began = time.perf_counter()
    store.put(key, [memoryview(first)])
    put_s = time.perf_counter() - began
    began = time.perf_counter()
    get()
    yield _latency(config, put_s, time.perf_counter() - began)
    store.put(key, [memoryview(second)])
    if get() == first:
        yield Finding("ok", "conditional put", "the first writer of a block wins")
    elif store.capabilities.exclusive_create:
        text = "the storage ignores If-None-Match: every replica writes every block again"
        fix = "update the server; until then loads stay correct, because blocks with the same key are equal"
        yield Finding("warning", "conditional put", text, fix)
    else:
        yield Finding("note", "conditional put", "the last writer of a block wins, which is harmless here")
    store.put(key, [memoryview(second)], overwrite=True)
    if get() != second:
        text = "a replaced blob still has its old content: bad blocks cannot be repaired"
        yield Finding("problem", "replace", text, "look for a cache between this machine and the storage")
    if isinstance(store, SupportsTail):
        found = store.get_tail(key, 16)
        if found != (len(got), bytes(got[-16:])):
            text = f"reading the last 16 bytes gave {found!r:.60}"
            yield Finding("problem", "ranges", text, "use a server that supports range requests")


def _listing(key: str, store: Store, now: Callable[[], float]) -> Iterator[Finding]:
    began = now()
    store.put(key, [memoryview(bytes(4096))], overwrite=True)
    ended = now()
    info = next((info for info in store.keys(key) if info.key == key), None)
    if info is None:
        text = "a blob that was just put is not listed"
        yield Finding("problem", "listing", text, "the listing is stale or forbidden")
        return
    skew_s = info.mtime - min(max(info.mtime, began), ended)
    if abs(skew_s) > CLOCK_SKEW_S_MAX:
        text = f"the storage's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
        fix = "run NTP on both: ages of blocks depend on both clocks, and S3 refuses a skew of 15 minutes"
        yield Finding("problem", "clock", text, fix)
    else:
        yield Finding("ok", "clock", f"within {CLOCK_SKEW_S_MAX:.0f} s of the storage's clock")


def _checksum(*, is_refused: bool) -> Finding:
    from ...tiers.stores.s3.put_form import CHECKSUM  # here, because it imports the S3 clients

    if is_refused:
        text = f"the server rejects {CHECKSUM} or unsigned payloads; payloads are signed instead"
        return Finding("note", "checksums", text, "update the server, to save one rejected request at each start")
    return Finding("ok", "checksums", f"the server accepts {CHECKSUM}")
