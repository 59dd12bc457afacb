"""The store in docs/writing-a-store.md passes the page's test, is a tier by the page's YAML, and works in commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from kvtiers.connector.spec import DeploymentSpec
from kvtiers.tiers.config.deployment import parse_config
from tests.identity import CONFIG

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-store.md"
STORE = "my_stores/sqlite.py"
RUN_S_MAX = 600  # ends a run that hangs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the page's files, as a reader has them."""
    files = re.findall(r"<!-- tested: (\S+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert STORE in dict(files)
    for name, code in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


def tier_of(folder: Path) -> dict[str, object]:
    (recipe,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tier,) = yaml.safe_load(textwrap.dedent(recipe))
    return {**tier, "options": {"path": str(folder / "kv.db")}}


def run(folder: Path, module: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    places = ["-c", "/dev/null", f"--rootdir={folder}", str(folder)]
    return run(folder, "pytest", "-q", "-p", "no:cacheprovider", *places, *options)


def test_store_of_the_page_passes_the_contract(project: Path) -> None:
    ended = run_tests(project)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"\d\d passed", ended.stdout)


def test_contract_finds_a_put_that_always_overwrites(project: Path) -> None:
    store = project / STORE
    store.write_text(store.read_text(encoding="utf-8").replace('"IGNORE"', '"REPLACE"'), encoding="utf-8")
    ended = run_tests(project, "-x")
    assert ended.returncode == 1, ended.stdout
    assert "1 failed" in ended.stdout


def test_store_of_the_page_is_a_tier(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    tier = tier_of(project)
    other = tier | {"name": "heavy", "options": {"path": str(project / "other.db")}}
    data = {"region": {"size": "4MiB"}, "tiers": [tier, other]}
    spec = DeploymentSpec(CONFIG, parse_config(data), 65_536)
    try:
        spec.get_manager()
        labels = [dict(each.labels) for each in spec.metrics.snapshot() if each.name == "kvtiers_circuit_closed"]
    finally:
        spec.shutdown()
    assert sorted(each["tier"] for each in labels) == ["heavy", "lite"]


def test_commands_find_the_store_of_the_page_by_pythonpath(project: Path) -> None:
    config = project / "mine.yaml"
    config.write_text(yaml.safe_dump({"region": {"size": "4MiB"}, "tiers": [tier_of(project)]}), encoding="utf-8")
    ended = run(project, "kvtiers", "check", "--write", str(config))
    assert ended.returncode == 0, ended.stdout + ended.stderr
