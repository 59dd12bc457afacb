"""What commands do and refuse with a tier that is only read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtiers.connector.commands.check import examine_tier
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.tier_options import FsTierConfig
from tests.connector.commands.test_storage_commands import ok, run, write_tiers
from tests.connector.commands.test_verify_command import NAMES, flip, root
from tests.tiers.stores.test_read_only import tree

__all__ = ["root"]  # a fixture


@pytest.fixture
def config(root: Path, tmp_path: Path) -> str:
    near = f"type: fs, name: near, root_dir: {tmp_path}/near, min_free: 0"
    shared = f"type: fs, name: shared, root_dir: {root}, read_only: true, ttl: 1s"
    return write_tiers(tmp_path / "c.yaml", near, shared)


def test_read_only_tier_is_listed_verified_and_copied_from(config: str, root: Path) -> None:
    before = tree(root)
    assert len(ok("ls", config, "--tier", "shared", "-q").splitlines()) == len(NAMES)
    assert "all blocks are intact" in ok("verify", config, "--tier", "shared")
    assert f"copied: {len(NAMES)} blocks" in ok("copy", config, "--from", "shared", "--to", "near")
    assert tree(root) == before


def test_gc_removes_nothing_from_read_only_tier(config: str, root: Path) -> None:
    for name in NAMES:
        os.utime(root / name, (0, 0))
    assert "the tier is read_only" in ok("gc", config, "--tier", "shared")
    assert all((root / name).exists() for name in NAMES)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("verify", "--repair"), "--repair: shared is read_only"),
        (("copy", "--from", "near", "--to", "shared"), "shared is read_only"),
        (("bench",), "read_only: tier shared only loads, and bench must store blocks"),
    ],
)
def test_commands_that_write_to_read_only_tier_are_refused(
    command: tuple[str, ...], said: str, config: str, root: Path
) -> None:
    flip(root / NAMES[0], 5)
    before = tree(root)
    code, out = run(command[0], config, *command[1:])
    assert (code, said in " ".join(out.split())) == (2, True)
    assert tree(root) == before


def test_check_describes_read_only_tier_and_reports_missing_root(config: str, root: Path) -> None:
    out = " ".join(ok("check", config).split())
    assert "Every stored block goes to each of these tiers that is not read_only" in out
    assert "only loads (read_only); the engines that write to its storage enforce the limits" in out
    root.rename(root.with_name("elsewhere"))
    code, out = run("check", config)
    assert code == 1
    assert f"tiers[1] fs, root_dir: {root} does not exist, and the tier is read_only" in " ".join(out.split())


def test_check_with_write_of_read_only_tier_only_reads(root: Path) -> None:
    tier = parse_tier({"type": "fs", "root_dir": str(root), "read_only": True, "min_free": "1000TiB"})
    assert isinstance(tier, FsTierConfig)
    before = tree(root)
    findings = list(examine_tier(tier, {}, writes=True))
    assert "problem" not in [finding.level for finding in findings]
    assert next(finding for finding in findings if finding.check == "rights").level == "ok"
    assert tree(root) == before


@pytest.mark.parametrize("files", [(), ("m_aaaaaaaaaaaa/config.json", "_kvtiers/usage/one")])
def test_check_warns_of_read_only_tier_without_blocks(tmp_path: Path, files: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    for name in files:  # of a writer that has stored no block
        (tmp_path / "empty" / name).parent.mkdir(parents=True)
        (tmp_path / "empty" / name).write_text("{}")
    tier = parse_tier({"type": "fs", "root_dir": str(tmp_path / "empty"), "read_only": True})
    findings = list(examine_tier(tier, {}, writes=False))
    assert [finding.check for finding in findings if finding.level == "warning"] == ["blocks"]
