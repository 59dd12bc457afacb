"""bench over real folders: that it measures every hop and leaves nothing; not how fast this machine is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kvtiers.connector.commands.bench import _FileCeiling
from kvtiers.tiers.capacity.records import OWN_PREFIX
from kvtiers.tiers.stores.files.local import LocalStore
from kvtiers.tiers.stores.files.publish import PRIVATE_FOLDER
from tests.connector.commands.test_storage_commands import NAMES, result_of, root, write_tiers
from tests.connector.commands.test_storage_commands import run as run_command

__all__ = ["root"]  # a fixture

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> str:
    tiers = "\n".join(
        (
            f"- {{type: fs, name: disk, root_dir: {tmp_path}/kv, min_free: 0, isolation: thread}}",
            f"- {{type: fsspec, url: 'file://{tmp_path}/other'}}",
            "- {type: memory, max_bytes: 64MiB}",
        )
    )
    path = tmp_path / "c.yaml"
    path.write_text(f"region: {{size: 2MiB}}\ntiers:\n{tiers}\n")
    return str(path)


run = partial(run_command, "bench")


def test_bench_measures_every_hop_and_leaves_nothing(config: str, tmp_path: Path) -> None:
    code, out = run(config, "--block-size", "128KiB", "--json")
    assert code == 0, out
    hops = result_of(out)["hops"]
    assert [hop["name"] for hop in hops] == [
        "copy of the region",
        "checksums",
        *(f"region {way} {tier}" for tier in ("disk", "fsspec", "memory") for way in ("to", "from")),
    ]
    assert all(hop["bytes_per_s"] > 0 for hop in hops)
    assert [hop["ceiling_is"] for hop in hops[2:5]] == ["plain files", "plain files", "client alone"]
    left = [os.path.join(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    assert left == [config]
    assert [path.name for path in (tmp_path / "kv").iterdir() if not path.name.startswith(".")] == []


def test_leftovers_of_killed_bench_are_removed_by_the_next_store(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvtiers.connector.commands.bench import _FileCeiling\n"
        "_FileCeiling(Path(sys.argv[1]), 1).write((0, b'row'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], cwd=ROOT).returncode == -9
    (left,) = (tmp_path / "kv" / PRIVATE_FOLDER).iterdir()
    assert left.read_bytes() == b"row"
    LocalStore(tmp_path / "kv").close()
    assert not left.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_bench_ended_by_signal_leaves_nothing(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def end(self: _FileCeiling, row: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(_FileCeiling, "read", end)
    inherited = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored, which stays so
    try:
        code, out = run(config, "--block-size", "128KiB")
        assert code == 128 + number, out
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)
    left = [os.path.join(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    assert left == [config]


def test_bench_of_one_tier_prints_only_that_tier(config: str) -> None:
    code, out = run(config, "--tier", "memory", "--block-size", "64KiB", "--total", "256KiB")
    assert code == 0, out
    assert "region from memory" in out
    assert "disk" not in out
    assert "not measured" not in out


def test_bench_reports_foreign_tier_as_skipped(tmp_path: Path) -> None:
    code, out = run(write_tiers(tmp_path / "c.yaml", "type: Mine, module_path: mine"), "--block-size", "64KiB")
    assert code == 0, out
    assert "kvtiers bench: skipping Mine, which is not a built-in tier type" in out


def test_wrong_arguments_of_bench_are_bad_input(config: str, tmp_path: Path) -> None:
    for args, expected in (
        ((str(tmp_path / "none.yaml"),), "none.yaml"),
        ((config, "--block-size", "big"), "--block-size"),
        ((config, "--tier", "nobody"), "accepted: disk, fsspec, memory"),
        ((config, "--block-size", "4MiB"), "--block-size: 4 MiB; accepted is 1 B up to the region's size, 2 MiB"),
        ((config, "--block-size", "0"), "--block-size"),
        ((config, "--total", "10"), "--total: 10 B is less than one block; write at least the value of --block-size"),
        ((config, "--total", "x"), "--total: 'x' is not a size"),
    ):
        code, out = run(*args)
        assert code == 2, out
        assert expected in out


def test_bench_fails_if_tier_is_too_small_for_the_blocks(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("region: {size: 2MiB}\ntiers:\n- {type: memory, max_bytes: 1MiB}\n")
    code, out = run(str(path), "--block-size", "256KiB")
    assert code == 1
    assert "of 8 blocks could be" in out


def test_bench_of_full_tier_fails_and_names_min_free(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    tier = f"{{type: fs, root_dir: {tmp_path}/kv, min_free: 900PiB, isolation: thread}}"
    path.write_text(f"region: {{size: 2MiB}}\ntiers:\n- {tier}\n")
    code, out = run(str(path), "--block-size", "256KiB")
    assert code == 1
    assert "of 8 blocks could be stored: 266240 bytes would leave less than min_free_bytes" in out
    assert "; a smaller --total may fit" in out


def test_bench_keeps_max_bytes_and_existing_blocks_of_a_tier(root: Path) -> None:
    """``root``: ten blocks of 4 KiB."""
    path = root.parent / "c.yaml"
    options = f"type: fs, root_dir: {root}, min_free: 0, ttl: 1h, max_bytes: 1MiB"
    path.write_text(f"region: {{size: 2MiB}}\ntiers:\n- {{{options}}}\n")
    before = {name: (root / name).stat() for name in NAMES}
    code, out = run(str(path), "--block-size", "64KiB", "--total", "1MiB")
    assert code == 2
    assert "--total: needs 1.1 MiB, and max_bytes of fs leaves 98" in out
    code, out = run(str(path), "--block-size", "64KiB", "--total", "768KiB")
    assert code == 0, out
    assert {name: (root / name).stat().st_mtime for name in NAMES} == {n: s.st_mtime for n, s in before.items()}
    assert not (root / OWN_PREFIX).exists()  # nothing of it is accounted
