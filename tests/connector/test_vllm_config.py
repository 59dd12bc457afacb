"""``kvtiers vllm-config``: the JSON that vLLM gets for a deployment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from connector.vllm_config import vllm_config
from tiers.errors import ConfigError

# The embedded server lives inside the demo's process: no engine could reach it.
CONFIGS = sorted(path for path in (Path(__file__).parents[2] / "configs").glob("*.yaml") if "embedded" not in path.name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_gives_json_for_two_ways_at_least(path: Path) -> None:
    ways = vllm_config(path)
    assert {"spec", "tier"} <= set(ways)
    assert json.loads(json.dumps(ways)) == ways


def test_each_tier_behind_vllms_spec_has_an_entry_and_an_index(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "blocks_per_chunk: 4\nregion: {size: 1GiB, eviction_policy: arc}\n"
        "tiers: [{type: fs, root_dir: /mnt/a}, {type: s3, bucket: kvs, endpoint_url: 'http://127.0.0.1:9000'}]\n"
    )
    ways = vllm_config(path)
    extra = ways["tier"]["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 1 << 30
    assert extra["eviction_policy"] == "arc"
    assert extra["blocks_per_chunk"] == 4
    assert [entry["index"] for entry in extra["secondary_tiers"]] == [0, 1]
    assert {entry["config_file"] for entry in extra["secondary_tiers"]} == {str(path)}
    assert ways["spec"]["kv_connector_extra_config"]["blocks_per_chunk"] == 4
    assert ways["shared_storage"]["kv_connector_extra_config"] == {"shared_storage_path": "/mnt/a/prefixes"}


def test_a_bucket_becomes_a_url_with_its_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "s3.yaml"
    path.write_text(
        "region: {size: 1GiB}\ntiers: [{type: s3, bucket: kvs, prefix: team, endpoint_url: 'http://127.0.0.1:9000'}]\n"
    )
    ways = vllm_config(path)
    assert "index" not in ways["tier"]["kv_connector_extra_config"]["secondary_tiers"][0]
    assert ways["shared_storage"]["kv_connector_extra_config"] == {
        "shared_storage_path": "s3://kvs/team/prefixes",
        "storage_options": {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9000"}},
    }
    assert ways["shared_storage"]["kv_load_failure_policy"] == "recompute"


def test_memory_alone_has_no_place_to_share(tmp_path: Path) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text("region: {size: 64MiB}\ntiers: [{type: memory}]\n")
    assert set(vllm_config(path)) == {"spec", "tier"}


def test_a_mistake_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("region: {size: 10 Gigs}\n")
    with pytest.raises(ConfigError, match="region.size"):
        vllm_config(path)


def test_it_needs_no_vllm() -> None:
    assert "vllm" not in sys.modules
