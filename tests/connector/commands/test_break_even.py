"""``kvtiers check --write --model`` compares a storage's speed with the model's prefill."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtiers.connector.commands.break_even import BLOB_BYTES_MAX, BYTES_MAX, compare_speeds
from kvtiers.connector.commands.findings import Finding
from kvtiers.connector.commands.model_size import size_of
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.tier_options import TierConfig
from kvtiers.tiers.stores.memory import MemoryStore
from tests.clock import Clock
from tests.connector.commands.model_configs import LLAMA_8B
from tests.connector.commands.test_model_size import write
from tests.connector.commands.test_storage_commands import run, write_tiers

ROOT = Path(__file__).parents[3]
TOKEN_BYTES = 128 << 10  # of Llama 3.1 8B


class PacedStore(MemoryStore):
    """A store that reads at a speed, by a test's clock."""

    def __init__(self, clock: Clock, bytes_per_s: float, put_s: float = 0.0) -> None:
        super().__init__()
        self.clock, self.bytes_per_s, self.put_s = clock, bytes_per_s, put_s
        self.puts = 0

    def put(self, *arguments: Any, **options: Any) -> Any:
        self.puts += 1
        self.clock.advance(self.put_s)
        return super().put(*arguments, **options)

    def get_into(self, key: str, buffers: Any) -> Any:
        self.clock.advance(sum(map(len, buffers)) / self.bytes_per_s)
        return super().get_into(key, buffers)


def compared(tmp_path: Path, store: PacedStore, *speeds: float, threads: int = 1) -> list[Finding]:
    tier = parse_tier({"type": "memory", "n_read_threads": threads})
    assert isinstance(tier, TierConfig)
    return list(compare_speeds(tier, store, size_of(write(tmp_path, LLAMA_8B), None), speeds, store.clock))


@pytest.mark.parametrize(
    ("speeds", "level", "words"),
    [
        ((), "note", "break-even is a prefill of 1,000 tokens/s"),
        ((500.0,), "ok", "1,000 tokens in 1 s; computing them takes 2 s at 500 tokens/s"),
        ((500.0, 5000.0), "note", "slower than computing at some of these speeds"),
        ((5000.0, 20_000.0), "warning", "computing them takes 0.2 s at 5,000 tokens/s, 0.05 s at 20,000 tokens/s"),
    ],
)
def test_check_compares_storage_with_prefill_speed(
    speeds: tuple[float, ...], level: str, words: str, tmp_path: Path
) -> None:
    store = PacedStore(Clock(), 1000 * TOKEN_BYTES)
    (found,) = compared(tmp_path, store, *speeds)
    assert (found.level, found.check) == (level, "break-even")
    assert words in found.message
    assert bool(found.fix) == (level == "warning" or not speeds)
    assert list(store.keys()) == []


@pytest.mark.parametrize(("put_s", "puts"), [(1.0, 1), (0.1, BYTES_MAX // BLOB_BYTES_MAX)])
def test_check_puts_one_blob_where_puts_are_slow(put_s: float, puts: int, tmp_path: Path) -> None:
    """A check must not take minutes."""
    store = PacedStore(Clock(), 1e9, put_s)
    compared(tmp_path, store, threads=16)
    assert store.puts == puts


def test_model_without_full_attention_layers_is_not_compared(tmp_path: Path) -> None:
    sizing = dataclasses.replace(size_of(write(tmp_path, LLAMA_8B), None), token_bytes=0)
    tier = parse_tier({"type": "memory"})
    assert isinstance(tier, TierConfig)
    assert list(compare_speeds(tier, PacedStore(Clock(), 1.0), sizing, ())) == []


def test_hung_read_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    """``check`` leaves a thread behind whose storage hangs."""
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from tests.clock import Clock\n"
        "from tests.connector.commands.test_break_even import PacedStore, compared\n"
        "hangs = threading.Event()\n"
        "class HungStore(PacedStore):\n"
        "    def get_into(self, *_):\n"
        "        hangs.set()\n"
        "        threading.Event().wait()\n"
        "arguments = Path(sys.argv[1]), HungStore(Clock(), 1.0)\n"
        "threading.Thread(target=compared, args=arguments, daemon=True).start()\n"
        "assert hangs.wait(60)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, timeout=120, check=True)


@pytest.mark.parametrize(("speed", "verdict"), [("0.001", "usable"), ("1e12", "usable, with 1 warning")])
def test_check_warns_of_storage_below_the_break_even(speed: str, verdict: str, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    config = write_tiers(tmp_path / "c.yaml", f"type: fs, root_dir: {root}, min_free: 0")
    Path(config).write_text(Path(config).read_text().replace("1MiB", "64MiB"))
    model = write(tmp_path, LLAMA_8B)
    code, out = run("check", config, "--write", "--model", model, "--prefill", speed)
    assert code == 0, out
    assert ("loading is slower than computing" in out) == (speed == "1e12")
    assert out.splitlines()[-1] == f"{config} is {verdict}"
    assert "break-even" not in run("check", config, "--model", model)[1].partition("An engine that uses")[2]
    assert [path for path in root.rglob("*") if path.is_file()] == []
