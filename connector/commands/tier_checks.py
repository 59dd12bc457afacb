"""Checks of ``kvtiers check`` on one tier: its options, and whether an engine could open its storage.

``storage_checks`` goes on with the opened storage.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from ...tiers.builtin import check_needs_no_sharing, make_seal
from ...tiers.capacity.usage import read_usage
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
    shown_place,
)
from ...tiers.config.values import human_bytes, show_size
from ...tiers.config.variables import AS_WRITTEN
from ...tiers.errors import BlobNotFoundError, KVTiersError, StoreConfigError
from ...tiers.registry import SecondaryTierFactory
from ...tiers.stores.custom import find_factory
from ...tiers.stores.files.mounts import (
    file_system_type,
    is_mount_point,
    missing_mount,
    mount_findings,
    unmounted_point,
)
from ...tiers.stores.fsspec_driver import LOCAL, check_drivers
from .findings import Finding, of_error, of_text

INODES_FREE_MIN = 100_000
TRIAL_FOLDER = "kvtiers-check"
FSSPEC_CALL_S_MAX = 8.0  # for each call of the trial; drivers retry for longer than `kvtiers check` waits
#: Text that a template engine, or a person, was meant to replace.
_PLACEHOLDER = re.compile(r"\{\{.*?\}\}|<[^<>]+>|%\(\w+\)s|%[A-Z][A-Z_]{2,}%")
_VARIABLE = re.compile(r"\$(\w+|\{\w+(:-[^{}]*)?\}|\(\w+\))", re.ASCII)


def trial_key() -> str:
    """The name of a blob that nobody has stored."""
    return f"{TRIAL_FOLDER}/{secrets.token_hex(8)}"


def tier_findings(tier: TierConfig | ExternalTierConfig) -> Iterator[Finding]:
    """Check a tier's options, and whether its storage can be used at all. Writes nothing."""
    if isinstance(tier, ExternalTierConfig):
        yield from _refusals(lambda: SecondaryTierFactory.find_class(tier.type, tier.module_path))
        return
    yield from keys(tier)
    yield from _placeholders(tier)
    if isinstance(tier, S3TierConfig):
        yield from _refusals(lambda: _try_bucket(tier), tier)
    elif isinstance(tier, FsspecTierConfig):
        yield from _url(tier)
    elif isinstance(tier, StoreTierConfig):
        refused = _refusals(lambda: find_factory(tier.module_path), tier, "module_path")
        yield from refused or _refusals(lambda: _try_store(tier), tier, "options")
    elif isinstance(tier, FsTierConfig | NfsTierConfig):
        if isinstance(tier, NfsTierConfig):
            yield from mount_options(tier)
        yield from _folder(tier, Path(tier.root_dir), "root_dir")


def root_of(tier: TierConfig) -> str | None:
    """The local folder that holds a tier's blobs, if there is one."""
    if isinstance(tier, FsTierConfig | NfsTierConfig):
        return tier.root_dir
    if isinstance(tier, FsspecTierConfig) and tier.url.partition("://")[0] in LOCAL:
        return tier.url.partition("://")[2]
    return None


def keys(tier: TierConfig) -> Iterator[Finding]:
    """Check that the keys of a protected tier can be read, and that nobody else can."""
    refused = _refusals(lambda: make_seal(tier))
    if not refused and tier.encrypt != "none":
        yield Finding("ok", "keys", f"readable; encrypt is {tier.encrypt}")
    yield from refused


def mount_options(config: NfsTierConfig) -> Iterator[Finding]:
    """Check a mount's options. Touches nothing in the mount, which may hang."""
    findings = mount_findings(config.root_dir)
    recommended = next((f.partition("recommended: ")[2] for f in findings if "recommended: " in f), "")
    for finding in findings:
        if "recommended: " not in finding:
            stops = finding.endswith("nothing can be stored") and not config.read_only
            yield Finding("problem" if stops else "warning", "mount options", finding, recommended)
    if missing := missing_mount(config.root_dir):
        yield of_text("problem", "root_dir", missing)
    elif not findings and file_system_type(config.root_dir).startswith("nfs"):
        yield Finding("ok", "mount options", "as recommended")


def _refusals(call: Callable[[], object], config: TierConfig | None = None, field: str = "") -> list[Finding]:
    """The error that would also stop an engine's start, if there is one."""
    try:
        call()
    except KVTiersError as e:
        return [of_error(e, config, field)]
    return []


def _placeholders(tier: TierConfig) -> Iterator[Finding]:
    """Find text that was meant to be replaced before the engine reads the file, and would be taken as it is written."""
    for name, value in tier:
        if isinstance(value, str) and name not in AS_WRITTEN and (found := _PLACEHOLDER.search(value)):
            text = f"holds {found[0]}, which looks like a placeholder and is used as it is written"
            yield Finding("warning", name, text, "replace it; environment variables are written ${NAME}")
        for option, inner in value.items() if name in AS_WRITTEN and isinstance(value, dict) else ():
            if isinstance(inner, str) and (variable := _VARIABLE.fullmatch(inner)):
                text = f"{option} is {variable[0]}, but variables are not replaced in {name}"
                yield Finding("warning", name, text, "write the value, or leave it to the driver's environment")


def _try_bucket(tier: S3TierConfig) -> None:
    from ...tiers.stores.s3.store import S3Store  # here, because it imports the S3 clients

    with closing(open_store(tier)) as store:
        assert isinstance(store, S3Store)
        store.check()
        with suppress(BlobNotFoundError):  # blocks move by another client than the request of ``check``
            store.get_into(trial_key(), [memoryview(bytearray(1))])


def _url(tier: FsspecTierConfig) -> Iterator[Finding]:
    if refused := _refusals(lambda: check_drivers(tier.url), tier, "url"):
        yield from refused
        return
    if (root := root_of(tier)) is not None:
        yield from _folder(tier, Path(root), "url")
    else:
        yield from _refusals(lambda: _try_url(tier), tier)


def _try_url(tier: FsspecTierConfig) -> None:
    from ...tiers.stores.fsspec import FsspecStore  # here, because it imports numpy

    _, options = tool_recipe(tier, read_only=True)  # opened so, it does not remove old temporary files
    with closing(FsspecStore(**options, request_timeout_s=FSSPEC_CALL_S_MAX)) as store:
        store.size(trial_key())  # an engine's first call
        if tier.read_only and not any(store.keys()):
            text = f"{shown_place(tier)} holds nothing, and the tier is read_only: nothing can be loaded"
            raise StoreConfigError(f"{text}; use the URL of the engines that write")


def _try_store(tier: StoreTierConfig) -> None:
    with closing(open_store(tier)) as store:
        if not store.capabilities.shared:
            check_needs_no_sharing(tier.capacity_policy(), in_processes=tier.isolation != "thread")
        store.size(trial_key())


def _folder(tier: BoundedTierConfig, root: Path, field: str) -> Iterator[Finding]:
    uid = os.getuid()

    def problem(message: str, fix: str) -> Finding:
        return Finding("problem", field, message, fix)

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
                yield from _link_to_nothing(existing, field)
            if isinstance(tier, FsTierConfig | NfsTierConfig):
                yield from _space(tier, existing)
    except OSError as e:  # no permission to search a parent folder, or a name that is too long
        yield problem(f"{root} cannot be accessed by uid {uid}: {e.strerror}", f"use another {field}")


def _link_to_nothing(folder: Path, field: str) -> Iterator[Finding]:
    """Find a symbolic link to an empty folder, which is often the mount point of a disk that is not mounted."""
    target = folder.resolve()
    if target == folder or any(target.iterdir()) or is_mount_point(str(target)):
        return
    text = f"a symbolic link leads to {target}, which is empty and not a mount point"
    yield Finding("warning", field, text, "if a disk belongs there, mount it before the engine starts")


def _removable_bytes(tier: FsTierConfig | NfsTierConfig) -> int:
    """Bytes that a collector may remove to make room, by its last measurement; 0 if the tier has no collector."""
    if tier.capacity_policy() is None:
        return 0
    try:
        with closing(open_tool_store(tier, read_only=True)) as store:
            usage = read_usage(store)
    except (KVTiersError, OSError):  # there is no root yet
        return 0
    return 0 if usage is None else usage.bytes


def _space(tier: FsTierConfig | NfsTierConfig, folder: Path) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{human_bytes(free)} free, {human_bytes(tier.min_free)} must stay free"
    if not total:
        if tier.min_free:
            yield Finding(
                "warning", "min_free",
                f"the file system of {folder} does not report its size (a FUSE mount?), so no free space is kept",
                "set max_bytes",
            )  # fmt: skip
    elif free < tier.min_free:
        own = _removable_bytes(tier)
        if own >= tier.min_free - free:
            text += f": the collector of running engines makes room by removing some of this tier's {human_bytes(own)}"
            yield Finding("ok", "min_free", text)
        else:
            yield Finding("problem", "min_free", f"{text}: nothing is stored", "make room, or lower min_free")
    elif status.f_files > 0 and status.f_favail < INODES_FREE_MIN:
        yield Finding(
            "warning", "min_free", f"{text}, but only {status.f_favail} inodes are free",
            "raise blocks_per_chunk to make fewer files, or use a file system with more inodes",
        )  # fmt: skip
    else:
        yield Finding("ok", "min_free", text)
    usable = max(0, total - tier.min_free)
    if total and tier.max_bytes is not None and tier.max_bytes > usable:
        unit = 1 << (30 if usable >> 30 else 20)
        yield Finding(
            "warning", "max_bytes",
            f"{human_bytes(tier.max_bytes)} is more than the file system of {folder} has ({human_bytes(total)}, less "
            f"min_free = {human_bytes(tier.min_free)}): the disk is full before the collector starts",
            f"write at most {show_size(usable // unit * unit)}",
        )  # fmt: skip
