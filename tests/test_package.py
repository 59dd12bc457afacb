"""What is installed: one import package, whole, in the wheel and in the sdist."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvtiers
import kvtiers.vllm
from kvtiers import version

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


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("kind", ["branch", "packed", "detached", "worktree"])
def test_version_of_a_checkout_ends_with_its_commit(kind: str, tmp_path: Path) -> None:
    def git(*arguments: str, folder: Path = tmp_path / "a") -> str:
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | own)
        return done.stdout.strip()

    (tmp_path / "a").mkdir()
    git("init", "--initial-branch", "some/branch")
    git("commit", "--allow-empty", "--message", "first")
    checkout = tmp_path / "a"
    if kind == "packed":
        git("pack-refs", "--all")
    elif kind == "detached":
        git("checkout", "--detach")
    elif kind == "worktree":
        checkout = tmp_path / "b"
        git("worktree", "add", "-b", "other", str(checkout))
        git("commit", "--allow-empty", "--message", "second", folder=checkout)
    assert version.built_version(checkout) == f"{version.RELEASE}+g{git('rev-parse', 'HEAD', folder=checkout)[:10]}"


def test_version_without_git_is_the_release(tmp_path: Path) -> None:
    assert version.built_version(tmp_path) == version.RELEASE
    (tmp_path / ".git").mkdir()
    assert version.built_version(tmp_path) == version.RELEASE
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/unborn\n")
    assert version.built_version(tmp_path) == version.RELEASE


def test_wheel_knows_the_commit_that_it_was_built_from(tmp_path: Path) -> None:
    """Also a wheel that is built from an sdist, far from git's files."""
    wanted = version.built_version()
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("kvtiers-*")
    for number, source in enumerate((ROOT, unpacked)):
        site = tmp_path / f"site{number}"
        with zipfile.ZipFile(build(source, "wheel", tmp_path / f"wheel{number}")) as archive:
            archive.extractall(site)
        code = "import kvtiers; print(kvtiers.__version__, kvtiers.__file__)"
        command = [sys.executable, "-c", code]
        environment = os.environ | {"PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [wanted, str(site / "kvtiers" / "__init__.py")]


def test_every_public_name_exists() -> None:
    assert [name for name in kvtiers.__all__ if getattr(kvtiers, name, None) is None] == []


def test_lazy_vllm_names_have_module_files_and_unknown_name_raises() -> None:
    """Each module that has them needs vLLM, which these tests run without."""
    for module in kvtiers.vllm._MODULES.values():
        assert (ROOT / "connector" / "vllm" / module.replace(".", "/")).with_suffix(".py").is_file()
    with pytest.raises(AttributeError, match=r"module 'kvtiers\.vllm' has no attribute 'Nobody'"):
        kvtiers.vllm.Nobody  # noqa: B018
    with pytest.raises(AttributeError, match="module 'kvtiers' has no attribute 'nobody'"):
        kvtiers.nobody  # noqa: B018


@pytest.mark.parametrize("name", ["tiers", "connector"])
def test_top_level_import_of_subpackage_is_refused_with_full_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"^import kvtiers\\.{name}$"):
        importlib.import_module(name)


def test_python_m_kvtiers_runs_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "kvtiers", "--help"], capture_output=True, text=True, check=True)
    assert "KV-cache tiers for LLM servers." in done.stdout
