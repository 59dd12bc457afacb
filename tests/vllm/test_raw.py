"""``format: vllm-raw`` and vLLM's own fs tier on one root, behind vLLM's own manager."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.file_mapper import FileMapper as VllmsFileMapper

from kvtiers.connector.commands.cli import app
from kvtiers.connector.vllm import translate
from kvtiers.tiers.blocks.file_mapper import FORMAT_SEALED, FORMAT_VLLM_RAW, VllmFileMapper, strict_fields
from tests.vllm.engines import VllmConfig, keys, offloading_config
from tests.vllm.test_tier import Engine
from tests.waiting import PATIENT

SOME = keys(5)
HITS, MISSES = [LookupResult.HIT] * len(SOME), [LookupResult.MISS] * len(SOME)


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(tier: dict[str, Any], **changes: Any) -> Engine:
        made.append(Engine(f"pytest-{os.getpid()}-{len(made)}-raw", tier, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def vllms(root: Path) -> dict[str, Any]:
    """vLLM's own tier."""
    return {"type": "fs", "module_path": None, "root_dir": str(root)}


def ours(root: Path, **options: Any) -> dict[str, Any]:
    fixed = {"type": "fs", "root_dir": str(root), "min_free": 0, "format": FORMAT_VLLM_RAW}
    return {"tier": {**fixed, **PATIENT, **options}}


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith("kvtiers-")
    }


def check(engine: Engine) -> None:
    assert engine.find(SOME) == HITS
    for index, key in enumerate(SOME):
        assert engine.read(key) == bytes([1 + index]) * 4096


def test_the_same_files_byte_for_byte(engines: Any, tmp_path: Path) -> None:
    engines(vllms(tmp_path / "vllm")).store(SOME)
    engines(ours(tmp_path / "ours")).store(SOME)
    assert contents(tmp_path / "ours") == contents(tmp_path / "vllm")
    assert len(contents(tmp_path / "ours")) == len(SOME) + 1


def test_vllms_own_tier_loads_what_ours_stored(engines: Any, tmp_path: Path) -> None:
    engines(ours(tmp_path)).store(SOME)
    check(engines(vllms(tmp_path)))


def test_ours_loads_what_vllms_own_stored_where_that_is_allowed(engines: Any, tmp_path: Path) -> None:
    engines(vllms(tmp_path)).store(SOME)
    check(engines(ours(tmp_path, unverified="allow")))
    denied = engines(ours(tmp_path))
    assert denied.find(SOME) == MISSES
    denied.store(SOME)
    check(engines(ours(tmp_path)))
    check(engines(vllms(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp_size": 2, "world_size": 2, "rank": 1},
        {"tp_size": 2, "world_size": 2, "is_parallelism_agnostic": True},
        {"pp_size": 2, "dcp_size": 2, "world_size": 4},
    ],
)
def test_names_are_those_of_the_installed_file_mapper(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The second layer group and other chunk sizes, too."""

    class Spec:
        config = offloading_config({}, **changes)
        blocks_per_chunk = 4

    vllms_own = VllmsFileMapper.from_offloading_spec(str(tmp_path), Spec, 4, True)
    spec = translate.engine_spec(Spec.config, VllmConfig())
    object.__setattr__(spec, "vllm_layout", translate.vllm_layout(Spec))
    mapper = VllmFileMapper.from_offloading_spec(str(tmp_path), spec, extra_fields=strict_fields(spec))
    for key in [*keys(20), *keys(20, first=100)]:
        assert mapper.get_file_name(key) == vllms_own.get_file_name(key)
    assert mapper.get_config_file_path() == vllms_own.get_config_file_path()
    assert mapper.get_namespace_files()[mapper.relative_config_name] == vllms_own.get_run_config()


def test_a_root_of_vllms_moves_to_sealed_blocks_and_back(engines: Any, tmp_path: Path) -> None:
    raw, sealed, back = tmp_path / "raw", tmp_path / "sealed", tmp_path / "back"
    engines(vllms(raw)).store(SOME)
    engines(ours(raw))  # leaves its identity
    config = tmp_path / "c.yaml"

    def migrate(*tiers: str) -> tuple[int, dict[str, Any]]:
        config.write_text("region: {size: 1MiB}\ntiers:\n" + "".join(f"- {{type: fs, {tier}}}\n" for tier in tiers))
        result = CliRunner().invoke(app, ["migrate", str(config), "--json"])
        return result.exit_code, json.loads(result.output)["result"] if result.exit_code == 0 else {}

    code, _ = migrate(f"root_dir: {raw}, format: vllm-raw", f"root_dir: {sealed}")
    assert code == 1  # nothing proves them
    code, result = migrate(f"root_dir: {raw}, format: vllm-raw, unverified: allow", f"root_dir: {sealed}")
    assert (code, result["copied"]) == (0, len(SOME))
    check(engines(ours(sealed, format=FORMAT_SEALED)))
    assert migrate(f"root_dir: {sealed}", f"root_dir: {back}, format: vllm-raw")[0] == 1  # nobody knows vLLM's folder
    engines(ours(back))
    code, result = migrate(f"root_dir: {sealed}", f"root_dir: {back}, format: vllm-raw")
    assert (code, result["copied"]) == (0, len(SOME))
    assert contents(back) == contents(raw)
    check(engines(ours(back)))
    check(engines(vllms(back)))


def test_a_block_damaged_under_both_is_a_miss_for_ours(engines: Any, tmp_path: Path) -> None:
    engines(ours(tmp_path)).store(SOME)
    path = next(path for path in tmp_path.rglob("*.bin"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    assert os.getxattr(path, "user.kvtiers.seal")
    assert sorted(engines(ours(tmp_path)).find(SOME), key=str) == sorted([*HITS[1:], LookupResult.MISS], key=str)
