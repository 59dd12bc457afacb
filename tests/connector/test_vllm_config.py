"""``kvtiers vllm-config``: the JSON that vLLM gets for a deployment."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtiers.connector.commands.cli import app
from kvtiers.connector.commands.session import ExitCode
from kvtiers.connector.ranks.place import chunk_of, rank_tier, seconds_of, staging_bytes
from kvtiers.connector.vllm_config import connector_options, deployment_from, keeps_storage, vllm_config
from kvtiers.tiers.config.deployment import parse_tier
from kvtiers.tiers.config.tier_options import FsspecTierConfig, FsTierConfig, NfsTierConfig, S3TierConfig
from kvtiers.tiers.errors import ConfigError

# The embedded server lives inside the demo's process: no engine could reach it.
CONFIGS = sorted(path for path in (Path(__file__).parents[2] / "configs").glob("*.yaml") if "embedded" not in path.name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_gives_json_for_ways_spec_and_tier(path: Path) -> None:
    ways = vllm_config(path)
    assert {"spec", "tier"} <= set(ways)
    assert json.loads(json.dumps(ways)) == ways


def test_way_tier_has_an_indexed_entry_for_each_tier(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "blocks_per_chunk: 4\nregion: {size: 1GiB, eviction_policy: arc}\n"
        "tiers: [{type: fs, root_dir: /mnt/a}, {type: s3, bucket: kvs, endpoint_url: 'http://127.0.0.1:9000'}]\n"
    )
    ways = vllm_config(path)
    extra = connector_options(ways["tier"]["kv_connector_extra_config"])
    assert extra["cpu_bytes_to_use"] == 1 << 30
    assert extra["eviction_policy"] == "arc"
    assert extra["blocks_per_chunk"] == 4
    assert [entry["index"] for entry in extra["secondary_tiers"]] == [0, 1]
    assert {entry["config_file"] for entry in extra["secondary_tiers"]} == {str(path)}
    # Told beforehand, vLLM 0.33 counts windows in such chunks, and models that have some could not fall back to one.
    assert "blocks_per_chunk" not in ways["spec"]["kv_connector_extra_config"]
    shared = ways["shared_storage"]["kv_connector_extra_config"]
    assert shared == {"tier": {"type": "fs", "root_dir": "/mnt/a"}, "blocks_per_chunk": 4}
    assert chunk_of(shared) == chunk_of({"config_file": str(path), "index": 0}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sse": "AES256"},
        {"sse": "arn:aws:kms:eu-west-1:123456789012:key/k"},
        {"storage_class": "STANDARD_IA", "job_deadline_s": 5.0},
        {"ca_bundle": "/etc/ca.pem", "max_bytes": 1 << 40},
    ],
)
def test_s3_tier_with_all_its_options_is_given_to_each_rank(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "s3.yaml"
    tier = {"type": "s3", "bucket": "kvs", "prefix": "team", "endpoint_url": "http://127.0.0.1:9000", **options}
    path.write_text(f"region: {{size: 1GiB}}\ntiers: [{json.dumps(tier)}]\n")
    ways = vllm_config(path)
    assert "index" not in connector_options(ways["tier"]["kv_connector_extra_config"])["secondary_tiers"][0]
    extra = ways["shared_storage"]["kv_connector_extra_config"]
    assert extra == {"tier": tier}
    for place in (rank_tier(json.loads(json.dumps(extra))), rank_tier({"config_file": str(path)})):
        assert isinstance(place, S3TierConfig)
        assert {name: getattr(place, name) for name in tier} == tier
    assert ways["shared_storage"]["kv_load_failure_policy"] == "recompute"


def test_config_with_memory_tier_only_does_not_support_shared_storage(tmp_path: Path) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text("region: {size: 64MiB}\ntiers: [{type: memory}]\n")
    assert set(vllm_config(path)) == {"spec", "tier"}


@pytest.mark.parametrize(
    ("tier", "key"),
    [
        ("{type: memory, max_bytes: 1MiB}", "type"),
        ("{type: Mine, module_path: mine, max_bytes: 1MiB}", "type"),
    ],
)
def test_tier_unreadable_by_other_processes_does_not_support_shared_storage(
    tmp_path: Path, tier: str, key: str
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"region: {{size: 1GiB}}\ntiers: [{tier}]\n")
    assert set(vllm_config(path)) == {"spec", "tier"}
    with pytest.raises(ConfigError, match=f"^config_file: .* tier of each rank: {key}: "):
        rank_tier({"config_file": str(path)})
    told = CliRunner().invoke(app, ["vllm-config", str(path), "--way", "shared_storage"], env={"COLUMNS": "300"})
    assert told.exit_code == ExitCode.BAD_INPUT
    assert f"this file does not support shared_storage: tiers[0].{key}: " in told.output


@pytest.mark.parametrize(
    "tier", ["{type: fs, root_dir: /mnt/a, ttl: 7d, read_only: true}", "{type: s3, bucket: kvs, read_only: true}"]
)
def test_read_only_tier_stays_read_only_and_has_no_limits_on_each_rank(tmp_path: Path, tier: str) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"region: {{size: 1GiB}}\ntiers: [{tier}]\n")
    extra = vllm_config(path)["shared_storage"]["kv_connector_extra_config"]
    for place in (rank_tier(extra), rank_tier({"config_file": str(path)})):
        assert place.read_only
        assert place.capacity_policy() is None


def test_limits_of_a_tier_apply_on_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(
        "region: {size: 1GiB}\ntiers: [{type: fs, root_dir: /mnt/a, max_bytes: 1GiB, ttl: 7d, min_free: 5GiB}]\n"
    )
    extra = vllm_config(path)["shared_storage"]["kv_connector_extra_config"]
    for place in (rank_tier(json.loads(json.dumps(extra))), rank_tier({"config_file": str(path)})):
        assert isinstance(place, FsTierConfig)
        assert place.root_dir == "/mnt/a"
        policy = place.capacity_policy()
        assert policy is not None
        assert (policy.max_bytes, policy.ttl_s) == (1 << 30, 7 * 86_400.0)
        assert policy.min_free_bytes == 5 << 30


def test_shared_storage_path_may_be_folder_mount_bucket_or_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(path: str, **beside: object) -> object:
        return rank_tier({"shared_storage_path": path, **beside})

    folder = place("/mnt/a/", ttl="7d", min_free="5GiB")
    assert isinstance(folder, FsTierConfig)
    assert (folder.root_dir, folder.ttl, folder.min_free) == ("/mnt/a", 7 * 86_400.0, 5 << 30)
    assert place("file:///mnt/a", ttl="7d", min_free="5GiB") == folder
    bucket = place("s3://kvs/team/a/", read_only=True)
    assert isinstance(bucket, S3TierConfig)
    assert (bucket.bucket, bucket.prefix, bucket.read_only) == ("kvs", "team/a", True)
    s3fs = place("s3://kvs/team", storage_options={"anon": True})
    assert isinstance(s3fs, FsspecTierConfig)
    assert (s3fs.url, s3fs.storage_options) == ("s3://kvs/team", {"anon": True})
    assert isinstance(place("gs://kvs/team"), FsspecTierConfig)
    monkeypatch.setattr("kvtiers.connector.ranks.place.file_system_type", lambda folder: "nfs4")
    for mount in (place("/mnt/a"), rank_tier({"tier": {"type": "nfs", "root_dir": "/mnt"}})):
        assert isinstance(mount, NfsTierConfig)


def test_shared_storage_path_may_be_a_link_and_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    place = rank_tier({"shared_storage_path": str(tmp_path / "link" / "kv")})
    assert isinstance(place, FsTierConfig)
    assert place.root_dir == str(tmp_path / "disk" / "kv")


def test_staging_chunk_and_lookup_deadline_of_a_rank_have_defaults() -> None:
    assert staging_bytes({}) == 1 << 30
    assert staging_bytes({"cpu_bytes_to_use": "2MiB"}) == 2 << 20
    assert chunk_of({}) == 1
    assert rank_tier({"shared_storage_path": "/a"}).lookup_deadline_s == 0.2
    assert rank_tier({"tier": {"type": "fs", "root_dir": "/a"}, "lookup_deadline_s": "3s"}).lookup_deadline_s == 3.0


@pytest.mark.parametrize(
    ("read", "extra", "field"),
    [
        (staging_bytes, {"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use"),
        (chunk_of, {"blocks_per_chunk": 0}, "blocks_per_chunk"),
    ],
)
def test_invalid_size_or_number_is_refused_by_name(read: Any, extra: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        read(extra)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"shared_storage_path": "/a", "read_only": "yes, please"}, "^read_only: 'yes, please' "),
        ({"shared_storage_path": "s3://UP..PER/a"}, "^shared_storage_path: 'UP..PER' is not a valid bucket name"),
        ({"shared_storage_path": "s3://"}, "^shared_storage_path: '' is not a valid bucket name"),
        ({"shared_storage_path": "gs://b/a", "storage_options": "anon"}, "^storage_options: "),
        ({"tier": {"type": "fs", "root_dir": "/a"}, "ttl": "7d"}, "^ttl: is an option of the tier; write it there"),
        ({"config_file": "/a.yaml", "read_only": True}, "^read_only: is an option .*, not beside config_file"),
        (
            {"shared_storage_path": "/a", "max_byte": "1GiB"},
            "^max_byte: is not an option of Shared.*accepted are .*max_bytes",
        ),
        ({"shared_storage_path": "s3://bucket/a", "min_free": "1GiB"}, "^min_free: "),
        ({"tier": "fs"}, "^tier: 'fs' is not a mapping; a tier has a type"),
        ({"tier": {"type": "fs"}}, "^tier.root_dir: is required"),
        ({"tier": {"type": "memory"}}, "^tier.type: memory cannot be shared by processes"),
    ],
)
def test_invalid_option_of_rank_tier_is_refused_under_the_name_the_user_wrote(
    extra: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        rank_tier(extra)


@pytest.mark.parametrize(
    "tier",
    [
        {"type": "fsspec", "url": "sftp://me:CANARY@host/kv"},
        {"type": "fsspec", "url": "gs://bucket/kv?token=CANARY"},
        {"type": "fsspec", "url": "s3://bucket/kv", "storage_options": {"key": "id", "secret": "CANARY"}},
    ],
)
@pytest.mark.parametrize("before", [[], [{"type": "memory"}]])
def test_secret_is_not_printed_and_connector_reads_it_from_config_file(
    tmp_path: Path, tier: dict[str, object], before: list[dict[str, object]]
) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text(json.dumps({"region": {"size": "1GiB"}, "tiers": [*before, tier]}))
    ways = vllm_config(path)
    assert "CANARY" not in json.dumps(ways)
    extra = ways["shared_storage"]["kv_connector_extra_config"]
    assert extra == {"config_file": str(path)} | ({"index": 1} if before else {})
    place = rank_tier(extra)
    assert isinstance(place, FsspecTierConfig)
    assert "CANARY" in place.url + json.dumps(place.storage_options)
    assert "CANARY" not in repr(place)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"config_file": "/a.yaml", "shared_storage_path": "/a"},
        {"shared_storage_path": ""},
        {"tier": {"type": "fs", "root_dir": "/a"}, "config_file": "/a.yaml"},
    ],
)
def test_connector_with_no_path_or_with_several_sources_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="shared_storage_path"):
        rank_tier(extra)


def test_mistake_in_config_file_is_refused_by_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("region: {size: 10 Gigs}\n")
    with pytest.raises(ConfigError, match="region.size"):
        vllm_config(path)


def test_vllm_config_does_not_import_vllm() -> None:
    assert "vllm" not in sys.modules


SPEC = {"spec_name": "KVTiersSpec", "spec_module_path": "kvtiers.vllm", "blocks_per_chunk": 4}


def test_printed_options_of_way_spec_are_accepted_by_spec(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("blocks_per_chunk: 4\nregion: {size: 1GiB}\ntiers: [{type: fs, root_dir: /mnt/a}]\n")
    read = deployment_from(vllm_config(path)["spec"]["kv_connector_extra_config"] | {"storage_after_reset": "keep"})
    assert [tier.model_dump()["root_dir"] for tier in read.tiers if isinstance(tier, FsTierConfig)] == ["/mnt/a"]
    inline = {"cpu_bytes_to_use": "1GiB", "eviction_policy": "arc", "tiers": [{"type": "fs", "root_dir": "/mnt/a"}]}
    of_vllm = {"block_size": 64, "offload_prompt_only": False, "self_describing_kv_events": True}
    read = deployment_from(SPEC | inline | of_vllm)
    assert (read.region.size, read.region.eviction_policy, len(read.tiers)) == (1 << 30, "arc", 1)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "10 Gigs"}, "region.size"),
        ({"cpu_bytes_to_use": "1GiB", "tiers": [{"type": "nosuch"}]}, r"tiers\[0\].type"),
        ({"cpu_bytes_to_use": "1GiB", "eviction_policy": "fifo"}, "region.eviction_policy"),
        ({"cpu_bytes_to_use": "1GiB", "identity": {"ignor": []}}, "identity.ignor"),
        ({"cpu_bytes_to_use": "1GiB", "identity": {"ignore": "VLLM_A"}}, "identity.ignore"),
        ({"config_file": "/nowhere.yaml"}, "/nowhere.yaml"),
        ({"config_file": "/x.yaml", "cpu_bytes_to_use": 1}, "config_file"),
        ({"config_file": "/x.yaml", "eviction_policy": "lru"}, "config_file"),
        ({"cpu_bytes_to_use": "1GiB", "secondary_tiers": [{"type": "memory"}]}, "secondary_tiers"),
        ({"cpu_bytes_to_use": "1GiB", "tier": {"type": "memory"}}, "tier"),
    ],
)
def test_invalid_option_of_way_spec_is_refused_by_field(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        deployment_from(extra)


@pytest.mark.parametrize("name", ["Tiers", "teirs", "metrics", "handler", "region", "promotion_wait_s"])
@pytest.mark.parametrize("beside", [{"config_file": "/x.yaml"}, {"cpu_bytes_to_use": "1GiB", "tiers": []}])
def test_unread_option_of_way_spec_is_refused(name: str, beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: is not an option of KVTiersSpec; accepted are config_file, "):
        deployment_from(SPEC | beside | {name: {}})


def test_unknown_option_that_newer_vllm_may_read_is_ignored_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read = deployment_from(SPEC | {"cpu_bytes_to_use": "1GiB", "tiers": [], "unheard_of": 2})
    assert read.region.size == 1 << 30
    assert "unheard_of in kv_connector_extra_config is not read by KVTiersSpec" in caplog.text


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens", "kv_load_tiers"])
def test_request_option_given_to_an_engine_is_refused(name: str) -> None:
    ways: list[tuple[Any, dict[str, Any]]] = [
        (connector_options, {"cpu_bytes_to_use": "1GiB", "tiers": []}),
        (connector_options, {"way": "tier", "cpu_bytes_to_use": "1GiB", "tiers": []}),
        (rank_tier, {"shared_storage_path": "/mnt/a"}),
    ]
    for take, extra in ways:
        with pytest.raises(ConfigError, match=rf"^{name}: .*kv_transfer_params"):
            take({**extra, name: 0})


def test_engine_without_tiers_logs_warning_and_misspelled_tiers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"^teirs: is not an option of KVTiersSpec \(tiers is absent\); "):
        deployment_from(SPEC | {"cpu_bytes_to_use": "1GiB", "teirs": [{"type": "memory"}]})
    with caplog.at_level(logging.WARNING):
        assert not deployment_from(SPEC | {"cpu_bytes_to_use": "1GiB"}).tiers
    assert "blocks are kept only in the region" in caplog.text


@pytest.mark.parametrize(("extra", "keeps"), [({}, False), ("off", False), (False, False), ("keep", True)])
def test_storage_is_kept_after_reset_only_if_option_says_keep(extra: Any, keeps: bool) -> None:
    assert keeps_storage(extra if extra == {} else {"storage_after_reset": extra}) is keeps


def test_dollar_in_path_is_read_equally_by_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way parses the options again, and must not expand what was a dollar."""
    monkeypatch.setenv("HOME", "/elsewhere")
    root = f"{tmp_path}/a$HOME/$$b"
    tier = {"type": "fs", "root_dir": root.replace("$", "$$"), "min_free": 0}
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"region": {"size": "1MiB"}, "tiers": [tier]}))
    shared = json.loads(json.dumps(vllm_config(path)["shared_storage"]["kv_connector_extra_config"]))
    for options in (shared, {"config_file": str(path)}, {"tier": tier}):
        place = rank_tier(options)
        assert isinstance(place, FsTierConfig)
        assert place.root_dir == root
    monkeypatch.setenv("ROOT", root)
    by_path = rank_tier({"shared_storage_path": "$ROOT/x"})
    assert dict(by_path)["root_dir"] == f"{root}/x".replace("$", "$$")
    with pytest.raises(ConfigError, match=r"shared_storage_path: names the variable \$NOT_SET, which is not set"):
        rank_tier({"shared_storage_path": "$NOT_SET/x"})
    inline = {"cpu_bytes_to_use": "${SIZE:-1MiB}", "tiers": [tier]}
    (parsed,) = deployment_from(inline).tiers
    (entry,) = connector_options({"way": "tier", **inline})["secondary_tiers"]
    for again in (parsed, parse_tier(entry["tier"])):
        assert isinstance(again, FsTierConfig)
        assert again.root_dir == root


@pytest.mark.parametrize(("value", "seconds"), [(2, 2.0), ("500ms", 0.5), ("1m", 60.0)])
def test_connector_durations_accept_units(value: object, seconds: float) -> None:
    assert seconds_of({"load_deadline_s": value}, "load_deadline_s", 5.0) == seconds
    assert seconds_of({}, "load_deadline_s", 5.0) == 5.0


@pytest.mark.parametrize("value", [0, -1, "soon", None, True, float("nan"), float("inf")])
def test_invalid_connector_duration_is_refused_by_field(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        seconds_of({"load_deadline_s": value}, "load_deadline_s", 5.0)
    assert caught.value.field == "load_deadline_s"
