"""``kvtiers vllm-config``: the JSON that vLLM gets for a deployment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from connector.cli import EXIT_BAD_INPUT, app
from connector.vllm_config import shared_place, vllm_config
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


@pytest.mark.parametrize(
    ("tier", "key"),
    [
        ("{type: fs, root_dir: /mnt/a, max_bytes: 1GiB}", "max_bytes"),
        ("{type: fs, root_dir: /mnt/a, ttl: 7d}", "ttl"),
        ("{type: fs, root_dir: /mnt/a, auth: gmac, keys_env: K}", "auth"),
        ("{type: fs, root_dir: /mnt/a, encrypt: aes-gcm, keys_env: K}", "encrypt"),
        ("{type: s3, bucket: kvs, sse: AES256}", "sse"),
        ("{type: s3, bucket: kvs, sse: 'aws:kms', sse_kms_key_id: k}", "sse"),
        ("{type: s3, bucket: kvs, role_arn: 'arn:aws:iam::123456789012:role/kv'}", "role_arn"),
        ("{type: s3, bucket: kvs, storage_class: EXPRESS_ONEZONE}", "storage_class"),
        ("{type: s3, bucket: kvs, embedded: true}", "embedded"),
        ("{type: nfs, root_dir: /mnt/a}", "type"),
        ("{type: memory, max_bytes: 1MiB}", "type"),
        ("{type: Mine, module_path: mine, max_bytes: 1MiB}", "type"),
    ],
)
def test_what_would_not_hold_for_prefix_files_leaves_the_way_out(tmp_path: Path, tier: str, key: str) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"region: {{size: 1GiB}}\ntiers: [{tier}]\n")
    assert set(vllm_config(path)) == {"spec", "tier"}
    with pytest.raises(ConfigError, match=f"^config_file: .* prefixes: {key}: "):
        shared_place({"config_file": str(path)})
    told = CliRunner().invoke(app, ["vllm-config", str(path), "--way", "shared_storage"], env={"COLUMNS": "300"})
    assert told.exit_code == EXIT_BAD_INPUT
    assert f"this file offers no shared_storage: tiers[0].{key}: " in told.output


@pytest.mark.parametrize(
    "tier", ["{type: fs, root_dir: /mnt/a, ttl: 7d, read_only: true}", "{type: s3, bucket: kvs, read_only: true}"]
)
def test_a_place_that_is_only_read_needs_no_bound_and_stays_so(tmp_path: Path, tier: str) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"region: {{size: 1GiB}}\ntiers: [{tier}]\n")
    extra = vllm_config(path)["shared_storage"]["kv_connector_extra_config"]
    assert extra["read_only"] is True
    assert shared_place(extra)["read_only"] is True
    assert shared_place({"config_file": str(path)})["read_only"] is True
    path.write_text(path.read_text().replace("true", "false").replace("ttl: 7d, ", ""))
    assert "read_only" not in vllm_config(path)["shared_storage"]["kv_connector_extra_config"]
    with pytest.raises(ConfigError, match="^read_only: 'yes' is not accepted"):
        shared_place({"shared_storage_path": "/a", "read_only": "yes"})


def test_what_s3fs_can_be_told_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s3.yaml"
    path.write_text(
        "region: {size: 1GiB}\ntiers: [{type: s3, bucket: kvs, endpoint_url: 'https://minio:9000', "
        "ca_bundle: /etc/ca.pem, addressing_style: path}]\n"
    )
    assert vllm_config(path)["shared_storage"]["kv_connector_extra_config"]["storage_options"] == {
        "client_kwargs": {"endpoint_url": "https://minio:9000", "verify": "/etc/ca.pem"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }


@pytest.mark.parametrize(
    "tier",
    [
        {"type": "fsspec", "url": "sftp://me:CANARY@host/kv"},
        {"type": "fsspec", "url": "gs://bucket/kv?token=CANARY"},
        {"type": "fsspec", "url": "s3://bucket/kv", "storage_options": {"key": "id", "secret": "CANARY"}},
    ],
)
@pytest.mark.parametrize("before", [[], [{"type": "memory"}]])
def test_no_secret_is_printed_and_the_connector_finds_it(
    tmp_path: Path, tier: dict[str, object], before: list[dict[str, object]]
) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text(json.dumps({"region": {"size": "1GiB"}, "tiers": [*before, tier]}))
    ways = vllm_config(path)
    assert "CANARY" not in json.dumps(ways)
    extra = ways["shared_storage"]["kv_connector_extra_config"]
    assert extra == {"config_file": str(path)} | ({"index": 1} if before else {})
    assert "CANARY" in json.dumps(shared_place(extra))


@pytest.mark.parametrize(
    "extra", [{}, {"config_file": "/a.yaml", "shared_storage_path": "/a"}, {"shared_storage_path": ""}]
)
def test_a_connector_needs_a_path_or_a_file(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="shared_storage_path"):
        shared_place(extra)


def test_a_mistake_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("region: {size: 10 Gigs}\n")
    with pytest.raises(ConfigError, match="region.size"):
        vllm_config(path)


def test_it_needs_no_vllm() -> None:
    assert "vllm" not in sys.modules
