"""The example in docs/writing-a-store.md is a test file that passes, and fails where the store is bad."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from kvtiers.connector.spec import DeploymentSpec
from kvtiers.tiers.config.deployment import parse_config
from kvtiers.tiers.testing.fuse import why_no_fuse
from tests.identity import CONFIG

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-store.md"
RUN_S_MAX = 600  # ends a run that hangs


def example() -> str:
    found = re.findall(r"<!-- tested -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = found
    return str(code)


def test_the_yaml_of_the_guide_is_a_tier(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    recipe = recipe.replace("my_stores.sqlite ", "tests.tiers.stores.sqlite_store ").replace("/var/lib", str(tmp_path))
    (tier,) = yaml.safe_load(textwrap.dedent(recipe))
    other = tier | {"name": "heavy", "options": {"path": str(tmp_path / "other.db")}}
    data = {"region": {"size": "4MiB"}, "tiers": [tier, other]}
    spec = DeploymentSpec(CONFIG, parse_config(data), 65_536)
    try:
        spec.get_manager()
        labels = [dict(each.labels) for each in spec.metrics.snapshot() if each.name == "kvtiers_circuit_closed"]
    finally:
        spec.shutdown()
    assert sorted(each["tier"] for each in labels) == ["heavy", "lite"]


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_my_store.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}"]
    return subprocess.run(
        [*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )


def test_the_example_passes(tmp_path: Path) -> None:
    ended = run(tmp_path, example())
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"\d+ passed", ended.stdout)


@pytest.mark.full
@pytest.mark.skipif(bool(why_no_fuse()), reason=str(why_no_fuse()))
def test_the_example_finds_a_store_that_publishes_too_early(tmp_path: Path) -> None:
    bad = """
import os


class MyStore(MyStore):
    def put(self, key, parts, *, overwrite=False):
        path = os.path.join(self.root_dir, key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            for part in parts:
                for start in range(0, part.nbytes, 1000):
                    file.write(part[start : start + 1000])


OLD, NEW ="""
    code = example().replace("OLD, NEW =", bad, 1)
    ended = run(tmp_path, code)
    assert ended.returncode == 1
    assert "test_what_fails_is_not_published" in ended.stdout
