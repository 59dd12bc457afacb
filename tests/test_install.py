"""pip finds what each extra needs without a constraints file: in an empty environment and beside vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ["", *PROJECT["optional-dependencies"]]
HANG_S = 600.0
# Gigabytes to download, and none of them requires a package that the extras disagree about.
LARGE = {"torch": "2.13.0", "triton": "3.9.0", "vllm": "0.32.0"}
# Pulled in by the extras. An environment that only vLLM was installed into has none of them.
OURS = ("aiobotocore", "boto3", "botocore", "fsspec", "s3fs", "s3transfer")
# pip walks from the newest boto3 back to one that aiobotocore accepts. A release of anything else that pip looks at
# and drops is a conflict that the dependencies should not have; a few come and go with the index.
RELEASES_DROPPED_MAX = 10
BOTO3_RELEASES_DROPPED_MAX = 150

pytestmark = [pytest.mark.full, pytest.mark.timeout(HANG_S + 60.0)]


def run_pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pip as a user has it: without the constraints that make sets for this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=HANG_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    probe = run_pip("download", "--quiet", "--retries", "0", "--no-deps", "--dest", str(folder / "probe"), "s3fs")
    if probe.returncode != 0:
        pytest.skip(f"no package index answers: {probe.stderr.strip()[-300:]}")
    built = run_pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    assert built.returncode == 0, built.stderr
    return next(folder.glob("kvtiers-*.whl"))


def environment_with(folder: Path, packages: dict[str, str]) -> Path:
    """A virtual environment in which pip sees these packages installed. Returns its interpreter.

    They are names and versions only: installing vLLM takes gigabytes, and a dry run reads nothing else.
    """
    venv.create(folder, with_pip=False)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    for name, version in packages.items():
        info = site_packages / f"{re.sub(r'[-.]', '_', name)}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty but for the packages that are too large for a test to download."""
    return environment_with(tmp_path_factory.mktemp("empty"), LARGE)


@pytest.fixture(scope="module")
def beside_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = (ROOT / "tests" / "e2e" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return environment_with(
        tmp_path_factory.mktemp("vllm"), LARGE | {name: pinned[name] for name in pinned if name not in OURS}
    )


def releases_looked_at(output: Sequence[str]) -> Counter[str]:
    """How many releases of each package pip downloaded or took from its cache."""
    found = set()
    for line in output:
        file = re.match(r"\s*(?:Downloading|Using cached|Processing) (\S+)", line)
        if file is not None:
            name, _, rest = file[1].rpartition("/")[2].partition("-")
            found.add((name.lower(), rest.partition("-")[0]))
    return Counter(name for name, _ in found)


@pytest.mark.parametrize("place", ["empty", "beside_vllm"])
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra or "none")
def test_pip_resolves_each_extra(extra: str, place: str, wheel: Path, request: pytest.FixtureRequest) -> None:
    python: Path = request.getfixturevalue(place)
    wanted = f"kvtiers[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    done = run_pip("--python", str(python), "install", "--dry-run", wanted)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    chosen = next(line for line in lines if line.startswith("Would install"))
    assert "kvtiers-" in chosen
    if extra in ("fsspec", "dev"):
        assert {"aiobotocore", "s3fs"} <= {word.rpartition("-")[0] for word in chosen.split()}
    dropped = {name: count - 1 for name, count in releases_looked_at(lines).items() if count > 1}
    assert dropped.pop("boto3", 0) <= BOTO3_RELEASES_DROPPED_MAX
    assert sum(dropped.values()) <= RELEASES_DROPPED_MAX, f"pip tried many releases: {dropped}"
