"""Runs the tests of the tiers on each version of Python that this machine has: ``make test-pythons``.

Each version gets an environment of its own in build/pythons, without PyTorch (several GB), which the tiers do not use.
Needs nothing but the standard library.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "build" / "pythons"
#: A version that kvtiers does not claim to support. It is tried if it is installed, and failures are only reported.
NEXT_VERSION: Final = "3.14"
_CLASSIFIER: Final = "Programming Language :: Python :: "
#: Fails on an interpreter of another version, or one that cannot make an environment.
_IS_USABLE: Final = "import ensurepip, ssl, sys, venv; sys.exit('{}' != '%d.%d' % sys.version_info[:2])"
_FILES: Final = ("pyproject.toml", "constraints.txt")


def supported_versions() -> list[str]:
    """The versions that pyproject.toml names, such as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [name.removeprefix(_CLASSIFIER) for name in project["classifiers"] if name.startswith(_CLASSIFIER)]
    return [name for name in names if name[-1].isdecimal()]


def find_interpreter(version: str) -> str | None:
    """A Python of this version that runs and can make an environment: from the PATH, or of pyenv."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    installed = sorted(glob.glob(f"{glob.escape(pyenv)}/versions/{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *installed):
        if path is not None and _runs(path, "-c", _IS_USABLE.format(version)):
            return path
    return None


def make_environment(interpreter: str, version: str) -> Path:
    """Make the version's environment, or keep the one of an earlier run. Returns its Python.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    folder = FOLDER / version
    python = folder / "bin" / "python"
    wanted = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in _FILES)).hexdigest()
    stamp = folder / ".stamp"
    if not stamp.exists() or stamp.read_text() != wanted or not _runs(str(python), "-c", ""):
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = {**os.environ, "PIP_CONSTRAINT": "constraints.txt"}  # not an absolute path (see Makefile)
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--progress-bar",
            "off",
            "--editable",
            ".[dev-tiers]",
        ]
        subprocess.run(install, cwd=ROOT, env=constraints, check=True)
        stamp.write_text(wanted)
    return python


def run_tests(version: str, options: list[str]) -> str:
    """Run the tests on one version. Returns the result in words: "passed", "failed …" or "skipped: …"."""
    interpreter = find_interpreter(version)
    if interpreter is None:
        return f"skipped: no python{version} runs here (looked on the PATH and among pyenv's versions)"
    print(f"Python {version}: {interpreter}", flush=True)
    try:
        python = make_environment(interpreter, version)
    except subprocess.CalledProcessError as e:
        return f"failed to install: {' '.join(map(str, e.cmd))}"
    cache = f"cache_dir={FOLDER / version / '.pytest_cache'}"  # of its own: it has the list of failed tests
    command = [str(python), "-m", os.environ.get("PYTEST", "pytest"), "-o", cache, *options]
    done = subprocess.run(command, cwd=ROOT, check=False)
    return "passed" if done.returncode == 0 else f"failed (status {done.returncode})"


def main(done_version: str, options: list[str]) -> Iterator[str]:
    """Yield the results that count as failures.

    Args:
        done_version: the version that ``make test`` ran on; its tests are not repeated.
        options: options for pytest.
    """
    supported = supported_versions()
    results = {
        version: run_tests(version, options) for version in (*supported, NEXT_VERSION) if version != done_version
    }
    for version, result in results.items():
        print(f"Python {version}: {result}")
        if version in supported and result.startswith("failed"):
            yield version


def _runs(*command: str) -> bool:
    """Whether a command succeeds. pyenv has a shim for every installed version; it fails for versions not selected."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(1 if list(main(f"{sys.version_info[0]}.{sys.version_info[1]}", sys.argv[1:])) else 0)
