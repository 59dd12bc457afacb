"""What is installed: one import package, whole, in the wheel and in the sdist."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvtiers
import kvtiers.vllm

ROOT = Path(__file__).parents[1]


def modules_of_the_checkout() -> set[str]:
    """With the only files of the package that are not modules."""
    found = {f"kvtiers/{path.name}" for path in (ROOT / "kvtiers").iterdir() if path.is_file()}
    for part in ("tiers", "connector"):
        found |= {f"kvtiers/{path.relative_to(ROOT)}" for path in (ROOT / part).rglob("*.py")}
    return found | {f"kvtiers/connector/vllm/{name}.json" for name in ("contract", "counting")}


def build(source: Path, kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout: what git ignores is not known")
def test_wheel_and_sdist_hold_every_module_once(tmp_path: Path) -> None:
    expected = modules_of_the_checkout()
    assert len(expected) > 150
    assert names_in_wheel(build(ROOT, "wheel", tmp_path / "wheel")) == expected
    with tarfile.open(build(ROOT, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("kvtiers-*")
    assert names_in_wheel(build(unpacked, "wheel", tmp_path / "again")) == expected


def test_every_public_name_is_there() -> None:
    assert [name for name in kvtiers.__all__ if getattr(kvtiers, name, None) is None] == []


def test_the_names_for_vllm_are_lazy() -> None:
    """Each module that has them needs vLLM, which these tests run without."""
    for module in kvtiers.vllm._MODULES.values():
        assert (ROOT / "connector" / "vllm" / module.replace(".", "/")).with_suffix(".py").is_file()
    with pytest.raises(AttributeError, match=r"module 'kvtiers\.vllm' has no attribute 'Nobody'"):
        kvtiers.vllm.Nobody  # noqa: B018
    with pytest.raises(AttributeError, match="module 'kvtiers' has no attribute 'nobody'"):
        kvtiers.nobody  # noqa: B018


@pytest.mark.parametrize("name", ["tiers", "connector"])
def test_no_part_is_imported_by_itself(name: str) -> None:
    with pytest.raises(ImportError, match=f"^import kvtiers\\.{name}$"):
        importlib.import_module(name)


def test_the_command_line_is_the_package() -> None:
    done = subprocess.run([sys.executable, "-m", "kvtiers", "--help"], capture_output=True, text=True, check=True)
    assert "KV-cache tiers for LLM servers." in done.stdout
