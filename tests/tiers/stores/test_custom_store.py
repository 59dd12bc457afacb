"""Stores of other people behind ``type: store``: an SQLite store gets limits, processes, keys and every command."""

from __future__ import annotations

import importlib.metadata
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from kvtiers.connector.commands import check
from kvtiers.connector.commands.cli import app
from kvtiers.tiers.config.deployment import ENTRY_POINT_GROUP, STORE_ENTRY_POINT_GROUP, json_schema, parse_config
from kvtiers.tiers.config.tier_options import StoreTierConfig
from kvtiers.tiers.errors import ConfigError, KVTiersError, StoreConfigError, StoreFullError
from kvtiers.tiers.store import Store, client_errors, fill_parts
from kvtiers.tiers.stores.custom import make_custom_store
from kvtiers.tiers.testing.contract import StoreContract
from tests.identity import block_key
from tests.tiers.stores.sqlite_store import SqliteStore
from tests.tiers.stores.test_read_only import KEYS, Bench, present
from tests.waiting import PATIENT, wait_for

MODULE = "tests.tiers.stores.sqlite_store"
ROW_BYTES = 8192
REGION = {"size": "1MiB"}


class TestSqliteStore(StoreContract):
    """The guide's example passes the suite."""

    def make_store(self) -> Store:
        return SqliteStore(str(self.tmp_path / "kv.db"))

    def reopen(self, store: Store) -> Store:
        return SqliteStore(str(self.tmp_path / "kv.db"))

    def plant(self, store: Store, key: str, data: bytes) -> None:
        with sqlite3.connect(self.tmp_path / "kv.db") as connection:
            connection.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)", (key, len(data), time.time(), data))

    def peek(self, store: Store, key: str) -> bytes | None:
        with sqlite3.connect(self.tmp_path / "kv.db") as connection:
            row = connection.execute("SELECT blob FROM blobs WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])


# ---- the hook --------------------------------------------------------------------------------------------------------


def make_nothing(options: Mapping[str, Any]) -> object:
    return options


def make_of_words(options: Mapping[str, Any]) -> Store:
    raise ValueError(f"{sorted(options)}\x1b[2J")


make_store = "no function"


@pytest.mark.parametrize(
    ("module_path", "said"),
    [
        ("no.such.module", "no.such.module cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (__name__, "has no function make_store(options) that returns a kvtiers.Store"),
        (f"{__name__}:make_others", "has no function make_others(options)"),
        (f"{__name__}:make_nothing", "make_nothing returned a dict, not a kvtiers.Store"),
        (f"{__name__}:make_of_words", "make_of_words failed with its options: ValueError: ['a']\\x1b[2J"),
    ],
)
def test_invalid_store_function_error_names_the_function_and_the_reason(module_path: str, said: str) -> None:
    with pytest.raises(StoreConfigError) as caught:
        make_custom_store(module_path, {"a": 1})
    assert said in str(caught.value)


def test_config_errors_of_the_store_function_are_shown(tmp_path: Path) -> None:
    with pytest.raises(StoreConfigError, match="^accepted is path, a file; not nothing$"):
        make_custom_store(MODULE, {})
    (tmp_path / "text").write_text("no database, whatever its length is " * 100)
    with pytest.raises(KVTiersError, match="file is not a database"):
        make_custom_store(MODULE, {"path": str(tmp_path / "text")})


def test_fill_parts_fills_all_parts_or_leaves_them_unchanged() -> None:
    buffer = bytearray(6)
    parts = [memoryview(buffer)[:2], memoryview(buffer)[2:].cast("b")]
    fill_parts(parts, b"abcdef", key="k")
    assert bytes(buffer) == b"abcdef"
    with pytest.raises(KVTiersError, match=r"5 bytes are stored, 6 were asked for \(key 'k'\)"):
        fill_parts(parts, b"12345", key="k")
    assert bytes(buffer) == b"abcdef"


def test_errors_of_the_client_become_store_errors() -> None:
    def classify(e: Exception) -> type[StoreFullError] | None:
        return StoreFullError if isinstance(e, OSError) else None

    with (
        pytest.raises(StoreFullError, match=r"OSError: no room \(key 'k'\)") as caught,
        client_errors(classify, key="k"),
    ):
        raise OSError("no room")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(KeyError), client_errors(classify):
        raise KeyError
    with pytest.raises(StoreConfigError), client_errors(classify):
        raise StoreConfigError("ours")


# ---- the tier --------------------------------------------------------------------------------------------------------


def tier_of(tmp_path: Path, **options: Any) -> dict[str, Any]:
    where = {"type": "store", "module_path": MODULE, "options": {"path": str(tmp_path / "kv.db")}}
    return where | PATIENT | options


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


@pytest.mark.parametrize("options", [{}, {"isolation": "process"}, {"isolation": "thread", "max_bytes": "4MiB"}])
def test_custom_store_blocks_load_in_another_engine(
    tmp_path: Path, benches: list[Bench], options: dict[str, Any]
) -> None:
    first, second = (Bench(**tier_of(tmp_path, **options)) for _ in range(2))
    benches += [first, second]
    wanted, tier = first.fill(1), first.tier()
    wait_for(
        lambda: first.run(tier, KEYS, is_load=False).success
    )  # before the first measurement a bound grants nothing
    other = second.tier()
    assert present(other, KEYS[0])
    assert second.run(other, KEYS, is_load=True).success
    assert np.array_equal(second.rows, wanted)


def test_custom_store_works_with_limits_keys_and_all_commands(
    tmp_path: Path, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", "a1" * 32)
    monkeypatch.setattr("kvtiers.tiers.config.tier_options.REMOTE_POLL_S", 0.25)
    tier = tier_of(tmp_path, max_bytes="1MiB", encrypt="aes-gcm", keys_env="KEYS", name="lite")
    benches.append(bench := Bench(**tier))
    running = bench.tier()
    wait_for(lambda: bench.run(running, KEYS, is_load=False).success)
    for start in range(8, 200, 8):  # more than the bound: the collector makes room, or blocks are dropped
        bench.run(running, [block_key(number) for number in range(start, start + 8)], is_load=False)

    def is_within_bound() -> bool:
        with sqlite3.connect(tmp_path / "kv.db") as connection:
            (held,) = connection.execute(
                "SELECT sum(size) FROM blobs WHERE key NOT LIKE '\\_kvtiers/%' ESCAPE '\\'"
            ).fetchone()
        return bool(held <= 1 << 20)

    wait_for(is_within_bound)  # what was put before the collector's first look comes on top

    config = tmp_path / "kv.yaml"
    config.write_text(yaml.safe_dump({"region": REGION, "tiers": [tier]}))
    found = check.examine(parse_config({"region": REGION, "tiers": [tier]}), writes=True).findings
    assert [finding for finding in found if finding.level == "problem"] == []
    runner = CliRunner()
    for command in ("ls", "du", "gc", "verify"):
        done = runner.invoke(app, [command, str(config), "--json"])
        assert done.exit_code == 0, done.output
        if command == "du":
            (of_tier,) = json.loads(done.stdout)["result"]["tiers"]
            assert of_tier["tier"] == "lite"
            assert of_tier["where"] == MODULE
            assert of_tier["blocks"] > 0


def test_custom_memory_store_with_processes_is_refused() -> None:
    """Each process would have its own."""
    tier = {"type": "store", "module_path": "tests.tiers.server.hostile_store:make_memory"}
    with pytest.raises(ConfigError, match=r"^isolation: needs other processes, .*; write thread$"):
        Bench(**tier).tier(isolation="process")
    with pytest.raises(ConfigError, match=r"^max_bytes: needs other processes, .*; leave it out$"):
        Bench(**tier).tier(isolation="thread", max_bytes="1MiB")
    Bench(**tier).tier(isolation="thread").shutdown()


# ---- the config ------------------------------------------------------------------------------------------------------


def test_package_registers_its_store_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("sqlite", f"{MODULE}:make_store", STORE_ENTRY_POINT_GROUP)
    others = {ENTRY_POINT_GROUP: (), STORE_ENTRY_POINT_GROUP: (entry,)}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: others[group])
    raw = {"type": "sqlite", "options": {"path": str(tmp_path / "kv.db")}}
    (tier,) = parse_config({"region": REGION, "tiers": [raw]}).tiers
    assert isinstance(tier, StoreTierConfig)
    assert (tier.name, tier.module_path) == ("sqlite", f"{MODULE}:make_store")
    Bench(**raw).tier().shutdown()
    assert (tmp_path / "kv.db").exists()
    with pytest.raises(ConfigError, match="accepted: fs, fsspec, memory, nfs, s3, sqlite, store"):
        parse_config({"region": REGION, "tiers": [{"type": "sqlit"}]})


def test_custom_store_options_are_not_shown_in_dumps_reprs_or_errors() -> None:
    raw = {"type": "store", "module_path": MODULE, "options": {"password": "hush"}}
    config = parse_config({"region": REGION, "tiers": [raw]})
    assert "hush" not in repr(config) + json.dumps(config.model_dump(mode="json"))
    with pytest.raises(ConfigError, match=r"^tiers\[0\].options: a text is not accepted"):
        parse_config({"region": REGION, "tiers": [raw | {"options": "hush"}]})
    with pytest.raises(ConfigError, match=r"tiers\[0\].module_path: '../x.py' is not accepted"):
        parse_config({"region": REGION, "tiers": [raw | {"module_path": "../x.py"}]})
    with pytest.raises(ConfigError, match=r"tiers\[0\].path: is not a known key; accepted: .*options"):
        parse_config({"region": REGION, "tiers": [{"type": "store", "module_path": MODULE, "path": "/x"}]})


def test_two_tiers_of_one_store_are_refused() -> None:
    raw = {"type": "store", "module_path": MODULE, "options": {"path": "/kv.db"}}
    with pytest.raises(ConfigError, match=r"tiers\[1\].options: is the place of tiers\[0\].options"):
        parse_config({"region": REGION, "tiers": [raw, raw]})
    parse_config({"region": REGION, "tiers": [raw, raw | {"options": {"path": "/other.db"}}]})


def test_json_schema_defines_the_custom_store_tier() -> None:
    assert "StoreTierConfig" in json_schema()["$defs"]
