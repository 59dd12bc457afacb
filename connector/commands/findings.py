"""Checks of both ``kvtiers check`` and ``kvtiers doctor``: errors that stop an engine, and contradicting options.

``check`` stops here. ``doctor`` goes on with the tests of ``doctor_storage``, which write to the storage.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtiers.connector.commands.output import human_bytes
from kvtiers.connector.region.region_file import free_bytes
from kvtiers.tiers.builtin import make_seal
from kvtiers.tiers.config.deployment import DeploymentConfig
from kvtiers.tiers.config.open_store import open_store, open_tool_store
from kvtiers.tiers.config.tier_options import (
    ExternalTierConfig,
    FsspecTierConfig,
    FsTierConfig,
    NfsTierConfig,
    S3TierConfig,
    StoreTierConfig,
    TierConfig,
)
from kvtiers.tiers.config.values import show_size
from kvtiers.tiers.errors import ConfigError, KVTiersError, StoreError, StoreFullError, StorePermissionError
from kvtiers.tiers.registry import SecondaryTierFactory
from kvtiers.tiers.stores.files.mounts import file_system_type, missing_mount, mount_findings
from kvtiers.tiers.stores.fsspec_driver import check_drivers
from kvtiers.tiers.tracing import make_job_tracer

Level = Literal["ok", "note", "warning", "problem"]

INODES_FREE_MIN = 100_000
NO_ANSWER = "check that the server is up and that the mount does not hang"


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
    if free < region_bytes:
        return Finding(
            "problem", "host", "/dev/shm", text,
            "lower region.size, or make it larger: --shm-size (Docker), an emptyDir with medium: Memory (Kubernetes)",
        )  # fmt: skip
    return Finding("ok", "host", "/dev/shm", text)


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
    if tier.trace:
        yield from _refusals(where, lambda: make_job_tracer(tier.type))
    for field, message, fix in tier.contradictions():
        yield Finding("warning", where, field, message, fix)
    if isinstance(tier, S3TierConfig):
        yield from _refusals(where, lambda: _try_bucket(tier), tier)
    elif isinstance(tier, FsspecTierConfig):
        yield from _refusals(where, lambda: check_drivers(tier.url), tier, "url")
    elif isinstance(tier, StoreTierConfig):
        yield from _refusals(where, lambda: _try_store(tier), tier, "options")
    elif isinstance(tier, FsTierConfig | NfsTierConfig):
        if isinstance(tier, NfsTierConfig):
            yield from mount_options(where, tier)
        if touch_mounts or not is_mount(tier):
            yield from _folder(where, tier)


def is_mount(tier: TierConfig) -> bool:
    """Whether a tier's folder is on an NFS mount, which may hang when it is touched."""
    return isinstance(tier, NfsTierConfig) and file_system_type(tier.root_dir).startswith("nfs")


def keys(where: str, tier: TierConfig) -> Iterator[Finding]:
    """Check that the keys of a protected tier can be read, and that nobody else can."""
    refused = list(_refusals(where, lambda: make_seal(tier)))
    if not refused and tier.protection != "none":
        yield Finding("ok", where, "keys", f"readable; protection is {tier.protection}")
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
        yield of_text("warning", where, "root_dir", missing)
    elif not findings and is_mount(config):
        yield Finding("ok", where, "mount options", "as recommended")


def of_text(level: Level, where: str, check: str, text: str, fix: str = "") -> Finding:
    """A Finding of a message that ends with what to do after its last semicolon, as this project's errors do."""
    message, found, last = text.rpartition("; ")
    return Finding(level, where, check, message, last) if found else Finding(level, where, check, text, fix)


def of_error(where: str, error: Exception, config: TierConfig | None = None, field: str = "") -> Finding:
    """The problem that an error is, with what to do about it."""
    if isinstance(error, ConfigError):
        fix = getattr(error, "fix", "")
        if fix:
            return Finding("problem", where, error.field, error.message, fix)
        return of_text("problem", where, error.field or field or "storage", error.message, _fix_of(config, error))
    text = str(error) if isinstance(error, KVTiersError) else f"cannot be accessed: {getattr(error, 'strerror', error)}"
    return of_text("problem", where, field or "storage", text, _fix_of(config, error))


def _fix_of(config: TierConfig | None, error: Exception) -> str:
    if isinstance(error, StoreError) and error.retryable:
        return NO_ANSWER
    if isinstance(error, StoreFullError):
        return "make room, or lower min_free"
    if isinstance(config, S3TierConfig):
        if isinstance(error, StorePermissionError):
            return "docs/security.md has a policy with the required rights"
        return "correct bucket, endpoint_url, region or the credentials"
    if isinstance(config, FsTierConfig | NfsTierConfig):
        rights = "read" if config.read_only else "read and write"
        return f"give uid {os.getuid()} the right to {rights} {config.root_dir}"
    if isinstance(config, FsspecTierConfig):
        return "check the url, and the credentials of its driver in storage_options or the environment"
    if isinstance(config, StoreTierConfig):
        return f"check the options of {config.module_path}, and whether its storage answers"
    return "correct this option, or leave it out"


def _refusals(
    where: str, call: Callable[[], object], config: TierConfig | None = None, field: str = ""
) -> Iterator[Finding]:
    """The error that would also stop an engine's start, if there is one."""
    try:
        call()
    except KVTiersError as e:
        yield of_error(where, e, config, field)


def _try_bucket(tier: S3TierConfig) -> None:
    from kvtiers.tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    with closing(open_store(tier)) as store:
        assert isinstance(store, S3Store)
        store.try_out(read_only=tier.read_only)


def _try_store(tier: StoreTierConfig) -> None:
    with closing(open_tool_store(tier, read_only=True)) as store:
        store.size("kvtiers-check")


def _folder(where: str, tier: FsTierConfig | NfsTierConfig) -> Iterator[Finding]:
    root = Path(tier.root_dir)
    uid = os.getuid()

    def problem(message: str, fix: str) -> Finding:
        return Finding("problem", where, "root_dir", message, fix)

    try:
        if root.is_symlink():
            yield problem(f"{root} is a symbolic link", "write the folder that it points to")
            return
        existing = root
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            yield problem(f"{existing} is not a folder", "write another root_dir, or move that file away")
        elif tier.read_only and existing != root:
            yield problem(
                f"{root} does not exist, and the tier is read_only: nothing can be loaded",
                "write the writers' root_dir",
            )
        elif tier.read_only:
            if not os.access(root, os.R_OK | os.X_OK):
                yield problem(f"{root} is not readable for uid {uid}", f"give uid {uid} the right to read it")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield problem(
                f"{existing} is not writable for uid {uid}",
                f"give uid {uid} the right to write, or write another root_dir",
            )
        else:
            yield from _space(where, tier, existing)
    except OSError as e:  # no permission to search a parent folder, or a name that is too long
        yield problem(f"{root} cannot be accessed by uid {uid}: {e.strerror}", "write another root_dir")


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
