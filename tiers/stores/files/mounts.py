"""Reads the mount table: finds a path's file system and bad NFS options. Touches no mount, because it may hang."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RECOMMENDED_OPTIONS = (
    "vers=4.2,proto=tcp,softerr,timeo=50,retrans=2,lookupcache=pos,noatime,nconnect=4,rsize=1048576,wsize=1048576"
)
TRANSFER_BYTES_MIN = 256 << 10
MOUNTINFO = "/proc/self/mountinfo"  # see proc(5)
FSTAB = "/etc/fstab"
#: File systems that belong to one host. Other shared file systems (CephFS, Lustre, FUSE) may be intended.
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
NAMES_CACHED_S_MAX = 60  # the default of acdirmax


@dataclass(frozen=True, slots=True)
class _Mount:
    point: str
    type: str
    options: dict[str, str]


def mount_findings(root_dir: str | os.PathLike[str], *, mountinfo: str = MOUNTINFO) -> list[str]:
    """List the bad options of a folder's NFS mount, in words. Empty if there are none, or the mount is not NFS.

    Accesses nothing inside the mount, which may hang.

    Args:
        root_dir: the folder; it need not exist.
    """
    mount = _mount_of(os.path.abspath(root_dir), _read_mounts(mountinfo))
    if mount is None or mount.type not in ("nfs", "nfs4"):
        return []
    found = list(_find_bad_options(mount.options))
    if found:
        found.append(f"recommended: mount -t nfs -o {RECOMMENDED_OPTIONS} SERVER:/EXPORT {mount.point}")
    return [f"{mount.point}: {finding}" for finding in found]


def file_system_type(path: str | os.PathLike[str], *, mountinfo: str = MOUNTINFO) -> str:
    """Type of a path's file system, such as ``ext4``; "" if unknown. Accesses no mount that may hang."""
    mount = _mount_of(os.path.abspath(path), _read_mounts(mountinfo))
    return mount.type if mount is not None else ""


def is_mount_point(path: str, *, mountinfo: str = MOUNTINFO) -> bool:
    """Whether ``path`` is a mount point, according to the kernel's table, because the mount itself may hang."""
    return any(mount.point == path for mount in _read_mounts(mountinfo))


def missing_mount(root_dir: str | os.PathLike[str]) -> str:
    """A warning if an NFS folder is on this host's own file system, as when its mount is missing; otherwise ""."""
    kind = file_system_type(root_dir)
    if kind not in _LOCAL:
        return ""
    return (
        f"{os.fspath(root_dir)} is not on an NFS mount ({kind}); if the mount is missing, mount it before the engine "
        "starts: other hosts do not see blocks stored here. For this host's own disk, use type: fs"
    )


def unmounted_point(path: str, *, mountinfo: str = MOUNTINFO, fstab: str = FSTAB) -> str:
    """The mount point in /etc/fstab that contains ``path``, if nothing is mounted there; otherwise ""."""
    mounted = {mount.point for mount in _read_mounts(mountinfo)}
    try:
        with open(fstab, encoding="utf-8", errors="surrogateescape") as f:
            lines = [line.split() for line in f if not line.lstrip().startswith("#")]
    except OSError:
        return ""
    points = [_unescape(words[1]).rstrip("/") for words in lines if len(words) > 1 and words[1].startswith("/")]
    return next((p for p in points if p and f"{path}/".startswith(f"{p}/") and mounted and p not in mounted), "")


def _find_bad_options(options: dict[str, str]) -> Iterator[str]:
    if "ro" in options:
        yield "ro: nothing can be stored"
    if "hard" in options:
        yield (
            "hard: a call to a dead server waits forever. Keep isolation: process, so that its workers can be killed, "
            "or mount with softerr"
        )
    lookupcache = options.get("lookupcache", "all")
    if lookupcache == "none":
        yield "lookupcache=none: every open asks the server for each folder of the path; lookupcache=pos is enough"
    elif lookupcache != "pos":
        yield (
            "lookupcache=pos is missing: a block that was looked up before another host stored it stays a miss on this "
            f"host for up to {options.get('acdirmax', NAMES_CACHED_S_MAX)} s"
        )
    version = options.get("vers", "")
    if version.startswith("3"):
        yield f"vers={version}: a block that another host deletes during a read is a miss (ESTALE); use vers=4.2"
    if "noac" in options:
        yield "noac: attributes are not cached, and every write waits for the server's disk"
    if int(options.get("acdirmax", NAMES_CACHED_S_MAX)) > NAMES_CACHED_S_MAX:
        yield f"acdirmax={options['acdirmax']} (or actimeo): other hosts' changes are seen up to that many seconds late"
    for name in ("rsize", "wsize"):
        if int(options.get(name, TRANSFER_BYTES_MIN)) < TRANSFER_BYTES_MIN:
            yield f"{name}={options[name]}: too many small requests for each block; use 1048576"


def _read_mounts(mountinfo: str) -> list[_Mount]:
    """The mount table; empty if it cannot be read, because /proc may be hidden."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as f:
            return [_parse_mount(line) for line in f]
    except OSError:
        return []


def _parse_mount(line: str) -> _Mount:
    """Parse a line like ``36 35 0:49 / /mnt/a rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2,hard``."""
    before, _, after = line.rstrip("\n").partition(" - ")
    point, own = before.split(" ")[4:6]
    kind, _, options = after.split(" ", 2)
    pairs = (option.partition("=") for option in f"{own},{options}".split(","))
    return _Mount(_unescape(point), kind, {name: value for name, _, value in pairs})


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _mount_of(path: str, mounts: Sequence[_Mount]) -> _Mount | None:
    return _follow(path, mounts)[1]


def _follow(path: str, mounts: Sequence[_Mount]) -> tuple[str, _Mount | None]:
    """Resolve a path's links; return it with its mount. Follows only links on this host's own file systems."""
    for _ in range(40):  # Linux follows at most this many links
        mount = _innermost(path, mounts)
        parts = path.strip("/").split("/")
        prefixes = ["/" + "/".join(parts[: i + 1]) for i in range(len(parts))]
        for prefix in prefixes:
            inner = _innermost(prefix, mounts)
            if inner is not None and inner.type not in _LOCAL:  # it may hang: NFS, FUSE, CephFS, …
                return path, mount
            if os.path.islink(prefix):
                target = os.path.join(os.path.dirname(prefix), os.readlink(prefix))
                path = os.path.normpath(target + path[len(prefix) :])
                break
        else:
            return path, mount
    return path, None


def _innermost(path: str, mounts: Sequence[_Mount]) -> _Mount | None:
    within = [m for m in mounts if m.point == "/" or path == m.point or path.startswith(m.point + "/")]
    # If several file systems are mounted at one point, the last one is visible.
    return max(enumerate(within), key=lambda item: (len(item[1].point), item[0]))[1] if within else None
