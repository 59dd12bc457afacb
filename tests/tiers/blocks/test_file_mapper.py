from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtiers.tiers.blocks.file_mapper import FileMapper, parse_block_name, strict_fields
from kvtiers.tiers.blocks.keys import make_offload_key
from kvtiers.tiers.errors import ConfigError
from tests.identity import FakeSpec, block_key

GOLDEN = Path(__file__).parents[2] / "golden" / "file_mapper.json"

ARGS: dict[str, Any] = {
    "root_dir": "/kv",
    "model_name": "meta-llama/Llama-3.1-8B",
    "hash_block_size": 16,
    "gpu_blocks_per_file": 4,
    "tp_size": 2,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "rank": 1,
    "dtype": "bfloat16",
    "kv_cache_groups": [{"block_size": 16, "layer_names": ["a", "b"]}],
}


def mapper(**changes: Any) -> FileMapper:
    return FileMapper(**{**ARGS, **changes})


def test_golden_paths_are_unchanged() -> None:
    """Released paths never change: a fleet would lose its cache, or worse, mix two layouts."""
    for case in json.loads(GOLDEN.read_text()):
        key = make_offload_key(bytes.fromhex(case["hash"]), case["group"])
        made = FileMapper(**case["args"])
        assert made.get_file_name(key) == case["file"]
        assert made.get_config_file_path() == case["config"]


def test_golden_block_names_are_parsed_back_into_keys() -> None:
    for case in json.loads(GOLDEN.read_text()):
        found = parse_block_name(case["file"].removeprefix(f"{case['args']['root_dir']}/"))
        assert found is not None
        assert found.offload_key == make_offload_key(bytes.fromhex(case["hash"]), case["group"])
        assert f"{case['args']['root_dir']}/{found.path}" == case["file"]


def test_digest_is_sha256_of_the_ten_fields_as_canonical_json() -> None:
    fields = {name: value for name, value in ARGS.items() if name not in ("root_dir", "rank")}
    fields["inference_engine"] = "vllm"
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = make_offload_key(bytes.fromhex("abcde" + "0" * 59), 7)
    base = f"/kv/meta-llama_Llama-3.1-8B_{digest[:12]}"
    assert mapper().get_file_name(key) == f"{base}_r1/abc/de_g7/{'abcde' + '0' * 59}.bin"
    assert mapper().get_config_file_path() == f"{base}/config.json"
    assert mapper().fingerprint.hex() == digest
    assert mapper().get_run_config() == fields


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"},
        {"hash_block_size": 32},
        {"gpu_blocks_per_file": 1},
        {"tp_size": 1},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"dtype": "float16"},
        {"kv_cache_groups": None},
        {"inference_engine": "other"},
        {"extra_fields": {"model_revision": "1"}},
    ],
)
def test_each_field_changes_the_digest(change: dict[str, Any]) -> None:
    assert mapper(**change).fingerprint != mapper().fingerprint
    assert mapper(**change).base_path != mapper().base_path


def test_rank_is_in_the_path_but_not_in_the_digest() -> None:
    one, two = mapper(rank=0), mapper(rank=1)
    assert one.get_config_file_path() == two.get_config_file_path()
    assert one.get_file_name(block_key(1)) != two.get_file_name(block_key(1))


def test_parallel_agnostic_mapper_gives_one_path_for_all_parallel_layouts() -> None:
    wide = mapper(parallel_agnostic=True, tp_size=8, pp_size=4, pcp_size=2, dcp_size=2, rank=5)
    assert wide.get_file_name(block_key(1)) == mapper(tp_size=1, rank=0).get_file_name(block_key(1))


def test_mapper_fields_come_from_the_offloading_spec() -> None:
    fields = FileMapper.from_offloading_spec("/kv", FakeSpec().changed("cache", blocks_per_chunk=4)).get_run_config()
    assert (fields["gpu_blocks_per_file"], fields["dtype"]) == (4, "float32")


def test_parallel_agnostic_takes_effect_only_if_the_spec_is_parallelism_agnostic() -> None:
    wide = FakeSpec().changed("parallel", tp_size=2, world_size=2)
    assert FileMapper.from_offloading_spec("", wide, parallel_agnostic=True).get_run_config()["tp_size"] == 2
    agnostic = wide.changed("parallel", is_parallelism_agnostic=True)
    assert FileMapper.from_offloading_spec("", agnostic, parallel_agnostic=True).get_run_config()["tp_size"] == 1


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", {"revision": "other"}),
        ("cache", {"hash_algorithm": "xxhash"}),
        ("", {"kv_cache_layout": "HND"}),
        ("", {"canonical_layout": True}),
    ],
)
def test_strict_fields_separate_specs_with_equal_ten_fields(part: str, change: dict[str, Any]) -> None:
    one, two = FakeSpec(), FakeSpec().changed(part, **change)
    plain = [FileMapper.from_offloading_spec("", spec).fingerprint for spec in (one, two)]
    strict = [FileMapper.from_offloading_spec("", s, extra_fields=strict_fields(s)).fingerprint for s in (one, two)]
    assert plain[0] == plain[1]
    assert strict[0] != strict[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", ""),
        ("model_name", "a\x00b"),
        ("model_name", "a\nb"),
        ("model_name", "m" * 300),
        ("model_name", "é" * 150),
        ("model_name", ".hidden"),
        ("model_name", "../up"),
        ("model_name", "a\\b"),
        ("model_name", "\ud800"),
        ("hash_block_size", 0),
        ("gpu_blocks_per_file", -1),
        ("tp_size", True),
        ("rank", -1),
    ],
)
def test_invalid_identity_field_error_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="accepted|not encodable") as caught:
        mapper(**{field: value})
    assert caught.value.field == field


def test_model_names_with_dots_and_slashes_stay_one_folder() -> None:
    assert mapper(model_name="a/../b").base_path.count("/") == 2


def test_extra_fields_that_shadow_a_field_or_are_not_json_are_refused() -> None:
    with pytest.raises(ConfigError, match="extra_fields"):
        mapper(extra_fields={"dtype": "x"})
    with pytest.raises(ConfigError, match="JSON"):
        mapper(extra_fields={"x": object()})


def test_spec_without_parallel_sizes_gets_sizes_of_1_and_rank_0() -> None:
    model = SimpleNamespace(name="m", dtype="float16")
    config = SimpleNamespace(model=model, cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1))
    made = FileMapper.from_offloading_spec("/r", SimpleNamespace(config=config))
    fields = made.get_run_config()
    assert [fields[f"{name}_size"] for name in ("tp", "pp", "pcp", "dcp")] == [1, 1, 1, 1]
    assert made.rank == 0
