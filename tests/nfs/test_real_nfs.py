"""NfsStore on real NFS: a kernel with a server and two clients is booted in a process (User-Mode-Linux)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BOOT_S_MAX = 840  # pytest ends a test after 900


def why_not() -> str | None:
    tools = ("linux.uml", "modprobe", "ip", "rpc.nfsd", "rpc.mountd", "rpcbind", "mount.nfs")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages: see tests/nfs/boot.sh)"
    return "not root" if os.geteuid() else None


@pytest.mark.full
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("3", "softerr,timeo=10,retrans=2,lookupcache=pos"),
        ("4.2", "softerr,timeo=10,retrans=2,lookupcache=pos"),
        ("4.2", "hard,lookupcache=pos"),
    ],
    ids=lambda value: value.split(",")[0],
)
def test_nfs_store_tests_pass_on_real_mount(version: str, options: str) -> None:
    # Short and without symbolic links: it is part of the kernel's command line.
    with tempfile.TemporaryDirectory(prefix="kvtiers-uml-", dir="/tmp") as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", str(HERE / "on_nfs.py")]
        booted = subprocess.run(
            [str(HERE / "boot.sh"), version, options, folder, *command],
            cwd=HERE.parents[1],
            env={**os.environ, "NFS_VERSION": version, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=BOOT_S_MAX,
            check=False,
        )
        logs = {name: (Path(folder) / name) for name in ("boot.log", "console", "output")}
        texts = {name: path.read_text(errors="replace")[-6000:] if path.exists() else "" for name, path in logs.items()}
    print(texts["output"])
    assert booted.returncode == 0, "\n".join(f"--- {name}\n{text}" for name, text in texts.items())
