"""What file system a path is on, and what is unwise about an NFS mount. Nothing in one is touched: it may hang."""

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
#: One host's own. What else hosts share (CephFS, Lustre, FUSE) may be meant.
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
NAMES_CACHED_S_MAX = 60  # acdirmax's default


@dataclass(frozen=True, slots=True)
class _Mount:
    point: str
    type: str
    options: dict[str, str]


def mount_findings(root_dir: str | os.PathLike[str], *, mountinfo: str = MOUNTINFO) -> list[str]:
    """What is unwise about the NFS mount a folder is on, for an operator; empty where nothing is, or it is no NFS.

    Looks at nothing inside the mount, which may hang.

    Args:
        root_dir: need not exist.

    Raises:
        OSError: ``mountinfo`` cannot be read.
    """
    mount = _mount_of(os.path.abspath(root_dir), _read_mounts(mountinfo))
    if mount is None or mount.type not in ("nfs", "nfs4"):
        return []
    found = list(_judge(mount.options))
    if found:
        found.append(f"recommended: mount -t nfs -o {RECOMMENDED_OPTIONS} SERVER:/EXPORT {mount.point}")
    return [f"{mount.point}: {finding}" for finding in found]


def file_system_type(path: str | os.PathLike[str], *, mountinfo: str = MOUNTINFO) -> str:
    """Type of a path's file system, such as ``ext4``; "" where it is not known. Asks no mount that may hang."""
    try:
        mount = _mount_of(os.path.abspath(path), _read_mounts(mountinfo))
    except OSError:  # /proc may be hidden
        return ""
    return mount.type if mount is not None else ""


def is_mount_point(path: str, *, mountinfo: str = MOUNTINFO) -> bool:
    """Whether something is mounted right there, by the kernel's table: it may not answer itself."""
    try:
        return any(mount.point == path for mount in _read_mounts(mountinfo))
    except OSError:
        return False


def missing_mount(root_dir: str | os.PathLike[str]) -> str:
    """What to say of a folder that is on this host's own file system, as where a mount is missing; else ""."""
    kind = file_system_type(root_dir)
    if kind not in _LOCAL:
        return ""
    return (
        f"{os.fspath(root_dir)} is on no NFS mount ({kind}); if a mount is missing, mount it before the engine starts: "
        "no other host finds what is stored here. For this host's own disk there is type: fs"
    )


def _judge(options: dict[str, str]) -> Iterator[str]:
    if "ro" in options:
        yield "ro: nothing can be stored"
    if "hard" in options:
        yield (
            "hard: a call to a dead server waits for ever. Keep isolation: process, whose workers can be killed then, "
            "or mount with softerr"
        )
    lookupcache = options.get("lookupcache", "all")
    if lookupcache == "none":
        yield "lookupcache=none: every open asks the server for each folder on the way; lookupcache=pos is enough"
    elif lookupcache != "pos":
        yield (
            "no lookupcache=pos: a block that was asked for before another host stored it stays a miss here for up to "
            f"{options.get('acdirmax', NAMES_CACHED_S_MAX)} s"
        )
    version = options.get("vers", "")
    if version.startswith(("2", "3")):
        yield f"vers={version}: a block deleted elsewhere while it is read fails (ESTALE) and is a miss; use vers=4.2"
    if "noac" in options:
        yield "noac: no attribute is cached and every write waits for the server's disk"
    if int(options.get("acdirmax", NAMES_CACHED_S_MAX)) > NAMES_CACHED_S_MAX:
        yield f"acdirmax={options['acdirmax']} (or actimeo): changes by other hosts are seen that many seconds late"
    if "sync" in options:
        yield "sync: every write waits for the server's disk"
    if options.get("proto", "tcp").startswith("udp"):
        yield "proto=udp: lost packets stall whole blocks, and above 1 Gbit/s data may be corrupted (nfs(5))"
    for name in ("rsize", "wsize"):
        if int(options.get(name, TRANSFER_BYTES_MIN)) < TRANSFER_BYTES_MIN:
            yield f"{name}={options[name]}: many small requests a block; 1048576 is usual"


def _read_mounts(mountinfo: str) -> list[_Mount]:
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as f:
        return [_parse_mount(line) for line in f]


def _parse_mount(line: str) -> _Mount:
    """``36 35 0:49 / /mnt/a rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2,hard``."""
    before, _, after = line.rstrip("\n").partition(" - ")
    point, own = before.split(" ")[4:6]
    kind, _, options = after.split(" ", 2)
    pairs = (option.partition("=") for option in f"{own},{options}".split(","))
    return _Mount(_unescape(point), kind, {name: value for name, _, value in pairs})


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _mount_of(path: str, mounts: Sequence[_Mount]) -> _Mount | None:
    """The mount a path is on. Symbolic links are followed as far as this host's own file systems have them."""
    for _ in range(40):  # as many links as Linux follows
        mount = _innermost(path, mounts)
        parts = path.strip("/").split("/")
        prefixes = ["/" + "/".join(parts[: i + 1]) for i in range(len(parts))]
        for prefix in prefixes:
            inner = _innermost(prefix, mounts)
            if inner is not None and inner.type not in _LOCAL:  # it may hang: NFS, FUSE, CephFS, …
                return mount
            if os.path.islink(prefix):
                target = os.path.join(os.path.dirname(prefix), os.readlink(prefix))
                path = os.path.normpath(target + path[len(prefix) :])
                break
        else:
            return mount
    return None


def _innermost(path: str, mounts: Sequence[_Mount]) -> _Mount | None:
    within = [m for m in mounts if m.point == "/" or path == m.point or path.startswith(m.point + "/")]
    # Of several at one point the last one is on top.
    return max(enumerate(within), key=lambda item: (len(item[1].point), item[0]))[1] if within else None
