"""Make the environment of the tests with SGLang and LMCache: ``python -m tests.engines.make_env FOLDER``.

FOLDER becomes a virtual environment with both (3 minutes, 7 GB, most of it PyTorch's CUDA build, which torchvision
needs). What is there already is left alone, so a second call is quick. Packages come from where pip is configured to
get them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import venv
from pathlib import Path

ENGINES = ("sglang==0.5.23", "lmcache==0.5.6")
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def make_env(folder: Path) -> Path:
    """Make the environment, or complete it. Returns its interpreter.

    Raises:
        subprocess.CalledProcessError: pip could not install something; it has said what.
    """
    folder = folder.absolute()
    python, stamp = folder / "bin" / "python", folder / ".complete"
    wanted = "\n".join((_REQUIREMENTS.read_text(), *ENGINES))
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # setup's constraints are for another set of packages.
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        subprocess.run([*pip, "-r", str(_REQUIREMENTS)], check=True, env=environment)
        subprocess.run([*pip, *ENGINES], check=True, env=environment)
        stamp.write_text(wanted)
    return python


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(make_env(parser.parse_args().folder))


if __name__ == "__main__":
    main()
