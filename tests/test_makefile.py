from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pythons

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_setup_finds_constraints_in_folder_with_space_in_name(tmp_path: Path) -> None:
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


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("arguments", "folder"),
    [((), ".venv"), ((f"PYTHON={sys.executable}",), f".venv-{sys.version_info[0]}.{sys.version_info[1]}")],
    ids=["usual", "named"],
)
def test_make_setup_with_named_python_uses_separate_environment(
    arguments: tuple[str, ...], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    command = ["make", "--dry-run", "--always-make", "setup", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    made = [line for line in done.stdout.splitlines() if " -m venv " in line]
    assert [line.rpartition(" ")[2] for line in made] == [folder]
    assert all(line.startswith(sys.executable) for line in made if arguments)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_image_without_docker_and_podman_says_what_is_missing() -> None:
    done = subprocess.run(["make", "image", "DOCKER="], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "make image needs docker or podman, and neither is installed here" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("name", "ignores"), [("docker", False), ("podman", True)])
def test_image_is_built_from_the_dockerfile_and_started(name: str, ignores: bool, tmp_path: Path) -> None:
    program = tmp_path / name
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    command = ["make", "image", f"DOCKER={program}", "IMAGE=x:1"]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ignore = "--ignorefile docs/Dockerfile.dockerignore " if ignores else ""
    built, started = (tmp_path / "calls").read_text().splitlines()
    assert " ".join(built.split()) == f"build -f docs/Dockerfile {ignore}-t x:1 ."
    assert started == "run --rm --entrypoint kvtiers x:1 --version"


def test_pythons_skips_interpreters_that_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts a shim for each version on the PATH. The shim fails if no setting selects that version."""
    shims = tmp_path / "shims"
    shims.mkdir()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    shim = shims / f"python{version}"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(shims))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert pythons.find_interpreter(version) is None
    assert pythons.run_tests(version, []).startswith(f"skipped: no python{version} runs here")
    real = tmp_path / "versions" / f"{version}.9" / "bin"
    real.mkdir(parents=True)
    (real / "python").symlink_to(sys.executable)
    assert pythons.find_interpreter(version) == str(real / "python")


def test_pythons_fails_if_a_supported_version_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"3.12": "passed", "3.13": "failed (status 1)", pythons.NEXT_VERSION: "failed to install: pip"}
    monkeypatch.setattr(pythons, "run_tests", lambda version, _: results[version])
    assert list(pythons.main("3.11", [])) == ["3.13"]
    assert capsys.readouterr().out.splitlines() == [f"Python {name}: {result}" for name, result in results.items()]


def test_supported_python_versions_match_project_metadata() -> None:
    assert pythons.supported_versions() == ["3.11", "3.12", "3.13"]
