"""Checks of both ``kvtiers check`` and ``kvtiers doctor``: errors that stop an engine, and contradicting options.

``check`` stops here. ``doctor`` goes on with the tests of ``doctor_storage``, which write to the storage.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...tiers.builtin import check_needs_no_sharing, make_seal, record_keys
from ...tiers.capacity.usage import read_usage
from ...tiers.config.deployment import DeploymentConfig
from ...tiers.config.open_store import open_store, open_tool_store, tool_recipe
from ...tiers.config.tier_options import (
    BoundedTierConfig,
    ExternalTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
)
from ...tiers.config.values import show_size
from ...tiers.config.variables import AS_WRITTEN
from ...tiers.errors import (
    ConfigError,
    KVTiersError,
    StoreConfigError,
    StoreFullError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ...tiers.registry import SecondaryTierFactory
from ...tiers.store import Store
from ...tiers.stores.custom import find_factory
from ...tiers.stores.files.mounts import (
    file_system_type,
    is_mount_point,
    missing_mount,
    mount_findings,
    unmounted_point,
)
from ...tiers.stores.fsspec_driver import LOCAL, OptionsError, check_drivers, misspelt_options
from ..region.region_file import free_bytes, running_regions
from .output import human_bytes

Level = Literal["ok", "note", "warning", "problem"]

INODES_FREE_MIN = 100_000
TRIAL_FOLDER = "kvtiers-check"
FSSPEC_CALL_S_MAX = 3.0  # for each call of the trial; drivers retry for longer than `kvtiers check` waits
#: Text that a template engine, or a person, was meant to replace.
_PLACEHOLDER = re.compile(r"\{\{.*?\}\}|<[^<>]+>|%\(\w+\)s|%[A-Z][A-Z_]{2,}%")
_VARIABLE = re.compile(r"\$(\w+|\{\w+(:-[^{}]*)?\}|\(\w+\))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: a note is worth knowing, a warning is worth fixing, and a problem must be fixed: it stops the engine, or
            its blocks are lost, not stored or not safe.
        where: ``host``, ``engine``, ``config`` or ``tiers[0] fs``.
        check: the option at fault, or the name of the check in a word or two.
        message: the result.
        fix: what to do; "" if nothing is needed.
    """

    level: Level
    where: str
    check: str
    message: str
    fix: str = ""


def shared_memory(region_bytes: int) -> Finding:
    """Check that /dev/shm has room for the region."""
    takes = f"the region takes {human_bytes(region_bytes)}"
    try:
        free = free_bytes("/dev/shm")
        if free is None:
            return Finding("ok", "host", "/dev/shm", f"has no size limit, {takes}")
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding(
            "problem", "host", "/dev/shm", "does not exist: engine processes cannot share a region", "mount it"
        )
    text = f"{human_bytes(free)} of {human_bytes(total)} free, {takes}"
    if free >= region_bytes:
        return Finding("ok", "host", "/dev/shm", text)
    with suppress(OSError):  # /proc may be hidden
        for header in running_regions():
            geometry = header.geometry
            if geometry.size_bytes <= region_bytes < geometry.size_bytes + geometry.row_stride:
                text += f"; a running engine (pid {header.creator}) uses a region of this size"
                return Finding("ok", "host", "/dev/shm", text)
    fix = "lower region.size, or make it larger: --shm-size (Docker), an emptyDir with medium: Memory (Kubernetes)"
    if total >= region_bytes:
        fix += "; if an engine with this file is running, its region uses it: run this command as the engine's user"
    return Finding("problem", "host", "/dev/shm", text, fix)


def config_findings(deployment: DeploymentConfig) -> Iterator[Finding]:
    """Check what concerns no single tier."""
    if deployment.metrics.port is not None:
        yield from _refusals("engine", lambda: importlib.import_module("kvtiers.tiers.exporter"))
    if not deployment.tiers:
        yield Finding(
            "warning", "config", "tiers",
            "the list is empty, so blocks are kept only in the region and are lost at exit",
            "add a tier, such as type: fs with a root_dir",
        )  # fmt: skip


def tier_findings(where: str, tier: TierConfig | ExternalTierConfig, *, touch_mounts: bool = True) -> Iterator[Finding]:
    """Check a tier's options, and whether its storage can be used at all. Creates no folder.

    Args:
        touch_mounts: also look into a folder on an NFS mount, which may hang.
    """
    if isinstance(tier, ExternalTierConfig):
        yield from _refusals(where, lambda: SecondaryTierFactory.find_class(tier.type, tier.module_path))
        return
    yield from keys(where, tier)
    yield from _placeholders(where, tier)
    if isinstance(tier, S3TierConfig):
        yield from _refusals(where, lambda: _try_bucket(tier), tier)
    elif isinstance(tier, FsspecTierConfig):
        yield from _url(where, tier)
    elif isinstance(tier, StoreTierConfig):
        refused = list(_refusals(where, lambda: find_factory(tier.module_path), tier, "module_path"))
        yield from refused or _refusals(where, lambda: _try_store(tier), tier, "options")
    elif isinstance(tier, FsTierConfig | NfsTierConfig):
        if isinstance(tier, NfsTierConfig):
            yield from mount_options(where, tier)
        if touch_mounts or not is_mount(tier):
            yield from _folder(where, tier, Path(tier.root_dir), "root_dir")


def is_mount(tier: TierConfig) -> bool:
    """Whether a tier's folder is on an NFS mount, which may hang when it is touched."""
    return isinstance(tier, NfsTierConfig) and file_system_type(tier.root_dir).startswith("nfs")


def keys(where: str, tier: TierConfig) -> Iterator[Finding]:
    """Check that the keys of a protected tier can be read, and that nobody else can."""
    refused = list(_refusals(where, lambda: make_seal(tier)))
    if not refused and tier.encrypt != "none":
        yield Finding("ok", where, "keys", f"readable; encrypt is {tier.encrypt}")
    yield from refused


def mount_options(where: str, config: NfsTierConfig) -> Iterator[Finding]:
    """Check a mount's options. Touches nothing in the mount, which may hang."""
    findings = mount_findings(config.root_dir)
    recommended = next((f.partition("recommended: ")[2] for f in findings if "recommended: " in f), "")
    for finding in findings:
        if "recommended: " not in finding:
            stops = finding.endswith("nothing can be stored") and not config.read_only
            yield Finding("problem" if stops else "warning", where, "mount options", finding, recommended)
    if missing := missing_mount(config.root_dir):
        yield of_text("problem", where, "root_dir", missing)
    elif not findings and is_mount(config):
        yield Finding("ok", where, "mount options", "as recommended")


def of_text(level: Level, where: str, check: str, text: str, fix: str = "") -> Finding:
    """A Finding of a message that ends with what to do after its last semicolon, as this project's errors do."""
    message, found, last = text.rpartition("; ")
    return Finding(level, where, check, message, last) if found else Finding(level, where, check, text, fix)


def no_answer(where: str, config: TierConfig | ExternalTierConfig, seconds: float) -> Finding:
    """The problem that a tier's storage does not answer in time."""
    fix = _FIX_OF_SILENCE.get(config.type, "check that its storage answers")
    return Finding("problem", where, "storage", f"no answer within {seconds:g} s", fix)


_REMOTE = "check that the server is up, and that this machine can reach it"
#: Tier type -> what to do if its storage does not answer.
_FIX_OF_SILENCE = {
    "fs": "check that the disk or mount answers (ls, dmesg)",
    "nfs": "check that the server is up and that the mount does not hang",
    "s3": _REMOTE,
    "fsspec": _REMOTE,
}


def of_error(where: str, error: Exception, config: TierConfig | None = None, field: str = "") -> Finding:
    """Turn an error into a problem with a fix.

    Only the error knows its cause, so the fix comes from its message. ``_fix_of`` adds a fix that holds for any cause.
    """
    if isinstance(error, ConfigError):
        return of_text("problem", where, error.field or field or "storage", error.message, "correct this option")
    if isinstance(error, OptionsError):
        field = "storage_options"
    text = str(error) if isinstance(error, KVTiersError) else f"cannot be accessed: {getattr(error, 'strerror', error)}"
    return of_text("problem", where, field or "storage", text, _fix_of(config, error))


def _fix_of(config: TierConfig | None, error: Exception) -> str:
    is_folder = isinstance(config, FsTierConfig | NfsTierConfig)
    if isinstance(error, StoreFullError):
        return "make room, or lower min_free" if is_folder else "make room in the storage"
    if isinstance(config, FsTierConfig | NfsTierConfig) and isinstance(error, StorePermissionError | PermissionError):
        rights = "read" if config.read_only else "read and write"
        return f"give uid {os.getuid()} the right to {rights} {config.root_dir}"
    if isinstance(error, StorePermissionError):
        if isinstance(config, S3TierConfig):
            return "docs/security.md has a policy with the required rights"
        return "give these credentials the right to read, write, list and delete"
    if config is not None and isinstance(error, StoreUnavailableError | StoreTimeoutError):
        return _FIX_OF_SILENCE.get(config.type, "")
    return ""


def _refusals(
    where: str, call: Callable[[], object], config: TierConfig | None = None, field: str = ""
) -> Iterator[Finding]:
    """The error that would also stop an engine's start, if there is one."""
    try:
        call()
    except KVTiersError as e:
        yield of_error(where, e, config, field)


def _try_bucket(tier: S3TierConfig) -> None:
    from ...tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    with closing(open_store(tier)) as store:
        assert isinstance(store, S3Store)
        store.try_out(read_only=tier.read_only)


def _url(where: str, tier: FsspecTierConfig) -> Iterator[Finding]:
    refused = list(_refusals(where, lambda: check_drivers(tier.url), tier, "url"))
    if refused:
        yield from refused
        return
    for name, meant in misspelt_options(tier.url, tier.storage_options).items():
        text = f"the driver's constructor has no parameter {name}"
        yield Finding("warning", where, "storage_options", text, f"did you mean {meant}?")
    protocol, _, path = tier.url.partition("://")
    if protocol in LOCAL:
        yield from _folder(where, tier, Path(path), "url")
    else:
        yield from _refusals(where, lambda: _try_url(tier), tier)


def _try_url(tier: FsspecTierConfig) -> None:
    from ...tiers.stores.fsspec import FsspecStore  # here, because it imports numpy

    _, options = tool_recipe(tier, read_only=True)  # opened so, it does not remove old temporary files
    with closing(FsspecStore(**options, request_timeout_s=FSSPEC_CALL_S_MAX)) as store:
        store.try_out(read_only=tier.read_only)


def _placeholders(where: str, tier: TierConfig) -> Iterator[Finding]:
    """Find text that was meant to be replaced before the engine reads the file, and would be taken as it is written."""
    for name, value in tier:
        if isinstance(value, str) and name not in AS_WRITTEN and (found := _PLACEHOLDER.search(value)):
            text = f"holds {found[0]}, which looks like a placeholder and is used as it is written"
            yield Finding("warning", where, name, text, "replace it; environment variables are written ${NAME}")
        for option, inner in value.items() if name in AS_WRITTEN and isinstance(value, dict) else ():
            if isinstance(inner, str) and (variable := _VARIABLE.fullmatch(inner)):
                text = f"{option} is {variable[0]}, but variables are not replaced in {name}"
                yield Finding("warning", where, name, text, "write the value, or leave it to the driver's environment")


def _try_store(tier: StoreTierConfig) -> None:
    with closing(open_store(tier)) as store:
        if not store.capabilities.shared:
            check_needs_no_sharing(tier.capacity_policy(), in_processes=tier.isolation != "thread")
        try:
            _try_key(store, f"{TRIAL_FOLDER}/{secrets.token_hex(8)}", read_only=tier.read_only)
        except KVTiersError:
            raise
        except Exception as e:  # a user's store may raise anything, and the text may be secret
            text = f"a call of {tier.module_path}'s store raised {type(e).__name__}"
            raise StoreConfigError(f"{text}; let it raise a StoreError (docs/writing-a-store.md)") from e


def _try_key(store: Store, key: str, *, read_only: bool) -> None:
    store.size(key)
    if read_only:
        return
    got = bytearray(len(key))
    store.put(key, [memoryview(key.encode())], overwrite=True)
    try:
        store.get_into(key, [memoryview(got)])
        if got != key.encode():
            raise StoreConfigError("the store returned other bytes than were written")
    finally:
        store.delete(key)


def _folder(where: str, tier: BoundedTierConfig, root: Path, field: str) -> Iterator[Finding]:
    uid = os.getuid()

    def problem(message: str, fix: str) -> Finding:
        return Finding("problem", where, field, message, fix)

    try:
        if field == "root_dir" and root.is_symlink():
            yield problem(f"{root} is a symbolic link", "write the folder that it points to")
            return
        existing = root
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.exists():
            yield problem(
                f"{existing} is a symbolic link to {os.readlink(existing)}, which does not exist",
                "mount the disk that it leads to, or correct the link",
            )
        elif not existing.is_dir():
            yield problem(f"{existing} is not a folder", f"use another {field}, or move that file away")
        elif point := unmounted_point(os.path.realpath(existing)):
            yield problem(f"{root} is below {point}, which is in /etc/fstab and is not mounted", f"mount {point}")
        elif tier.read_only and existing != root:
            yield problem(
                f"{root} does not exist, and the tier is read_only: nothing can be loaded",
                f"use the {field} of the engines that write",
            )
        elif tier.read_only:
            if not os.access(root, os.R_OK | os.X_OK):
                yield problem(f"{root} is not readable for uid {uid}", f"give uid {uid} the right to read it")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield problem(
                f"{existing} is not writable for uid {uid}",
                f"give uid {uid} the right to write, or use another {field}",
            )
        else:
            if existing != root:
                yield from _link_to_nothing(where, existing, field)
            if isinstance(tier, FsTierConfig | NfsTierConfig):
                yield from _space(where, tier, existing)
    except OSError as e:  # no permission to search a parent folder, or a name that is too long
        yield problem(f"{root} cannot be accessed by uid {uid}: {e.strerror}", f"use another {field}")


def _link_to_nothing(where: str, folder: Path, field: str) -> Iterator[Finding]:
    """Find a symbolic link to an empty folder, which is often the mount point of a disk that is not mounted."""
    target = folder.resolve()
    if target == folder or any(target.iterdir()) or is_mount_point(str(target)):
        return
    text = f"a symbolic link leads to {target}, which is empty and not a mount point"
    yield Finding("warning", where, field, text, "if a disk belongs there, mount it before the engine starts")


def _removable_bytes(tier: FsTierConfig | NfsTierConfig) -> int:
    """Bytes that a collector may remove to make room, by its last measurement; 0 if the tier has no collector."""
    if tier.capacity_policy() is None:
        return 0
    try:
        with closing(open_tool_store(tier, read_only=True)) as store:
            usage = read_usage(store, keys=record_keys(tier))
    except (KVTiersError, OSError):  # there is no root yet
        return 0
    return 0 if usage is None else usage.bytes


def _space(where: str, tier: FsTierConfig | NfsTierConfig, folder: Path) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{human_bytes(free)} free, {human_bytes(tier.min_free)} must stay free"
    if not total:
        if tier.min_free:
            yield Finding(
                "warning", where, "min_free",
                f"the file system of {folder} does not report its size (a FUSE mount?), so no free space is kept",
                "set max_bytes",
            )  # fmt: skip
    elif free < tier.min_free:
        own = _removable_bytes(tier)
        if own >= tier.min_free - free:
            text += f": the collector of running engines makes room by removing some of this tier's {human_bytes(own)}"
            yield Finding("ok", where, "min_free", text)
        else:
            yield Finding("problem", where, "min_free", f"{text}: nothing is stored", "make room, or lower min_free")
    elif status.f_files > 0 and status.f_favail < INODES_FREE_MIN:
        yield Finding(
            "warning", where, "min_free", f"{text}, but only {status.f_favail} inodes are free",
            "raise blocks_per_chunk to make fewer files, or use a file system with more inodes",
        )  # fmt: skip
    else:
        yield Finding("ok", where, "min_free", text)
    usable = max(0, total - tier.min_free)
    if total and tier.max_bytes is not None and tier.max_bytes > usable:
        unit = 1 << (30 if usable >> 30 else 20)
        yield Finding(
            "warning", where, "max_bytes",
            f"{human_bytes(tier.max_bytes)} is more than the file system of {folder} has ({human_bytes(total)}, less "
            f"min_free = {human_bytes(tier.min_free)}): the disk is full before the collector starts",
            f"write at most {show_size(usable // unit * unit)}",
        )  # fmt: skip
