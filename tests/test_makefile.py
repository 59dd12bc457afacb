from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_setup_finds_its_constraints_in_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    """pip takes PIP_CONSTRAINT for several files, with spaces between them."""
    root = tmp_path / "check out"
    (root / "bin").mkdir(parents=True)
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    pip = root / "bin" / "pip"
    pip.write_text('#!/bin/sh\nfor file in $PIP_CONSTRAINT; do test -f "$file" || exit 1; done\n')
    pip.chmod(0o755)
    command = ["make", "setup", "BIN=bin", "VENV=.", "PYTHON=true"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (root / ".stamp").exists()
