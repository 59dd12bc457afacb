from __future__ import annotations

import functools
import json
import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtiers.tiers.builtin import BuiltInTier, _tier_options
from kvtiers.tiers.config.deployment import json_schema, load_config, parse_config, parse_tier
from kvtiers.tiers.config.tier_options import (
    TIER_MODELS,
    ExternalTierConfig,
    FsTierConfig,
    MemoryTierConfig,
    TierConfig,
)
from kvtiers.tiers.config.values import parse_duration, parse_size
from kvtiers.tiers.config.yaml_file import read_yaml
from kvtiers.tiers.errors import ConfigError, StoreFullError, public_url
from tests.identity import FakeSpec

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
REGION = {"size": "64MiB"}
ROW_BYTES = 4096


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    config = load_config(path)
    assert config.tiers
    assert config.region.size >= 1 << 20


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_tier_of_a_shipped_config_is_bounded_or_has_a_no_bound_comment(path: Path) -> None:
    unbounded = []
    for tier in load_config(path).tiers:
        options = dict(tier)
        # Memory ends with its process: a bound in bytes is enough.
        if not options.get("max_bytes") or not (options.get("ttl") or options["type"] == "memory"):
            unbounded.append(tier)
    assert len(re.findall(r"^ *# No bound: .+", path.read_text(), re.MULTILINE)) == len(unbounded)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 << 30),
        ("10 GiB", 10 << 30),
        ("1.5MiB", 3 << 19),
        ("2K", 2048),
        ("2KB", 2000),
        ("4096", 4096),
        (4096, 4096),
        ("7B", 7),
        (0, 0),
        ("1024PiB", 1 << 60),
    ],
)
def test_size_with_or_without_unit_is_parsed(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("10 Gigs", "", "-1", "1e3", "GiB", None, True, 1.5, [], "10gib", "9" * 400, f"{'9' * 400}.0B", "much"),
        *("1,5GiB", "1e9 GiB", "1_000MiB", "10 pages", "1.5.2GiB"),
    ],
)
def test_invalid_size_error_shows_an_accepted_form(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number and a unit, such as 10GiB$"):
        parse_size(text)


@pytest.mark.parametrize("text", ["12:00", "1:30:00", "-1:00", "1:30.5", "2026-11-27", "0x10", ".inf"])
def test_yaml_time_or_date_is_read_as_text(tmp_path: Path, text: str) -> None:
    """In YAML 1.1 12:00 is 720, to the base 60: a ttl of twelve hours would be one of twelve minutes."""
    path = tmp_path / "c.yaml"
    path.write_text(f"region: {{size: 1MiB}}\ntiers: [{{type: fs, root_dir: /kv, ttl: {text}}}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"tiers[0].ttl: '{text}' is not a duration; write a number and a unit")
    path.write_text(f"name: {text}\nport: 80")
    assert read_yaml(path) == {"name": text, "port": 80}


FS = {"type": "fs", "root_dir": "/kv"}
S3 = {"type": "s3", "bucket": "bucket"}


def test_config_error_lists_all_mistakes() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"region": {"size": "x"}, "tiers": [{"type": "zzz"}, FS | {"min_free": "lots"}]})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "region.size",
        "tiers[0].type",
        "tiers[1].min_free",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"region: [", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"!!python/object/apply:os.system ['true']", "is not valid YAML"),
        *(
            (text, "an escape is not a valid character, or a value does not fit its tag")
            for text in (b"!!timestamp x", b"a: !!int ''", b"!!float x", b"!!bool maybe", b'name: "\\U00110000"')
        ),
        (b"a: !!binary x", "failed to decode base64 data"),
        (b"region:\n\tsize: 1MiB\n", r"a line is indented with a tab, which .*; use spaces \(line 2, column 1\)"),
        (
            b"region:\n  size: 1MiB\n\ttiers: []\n",
            "a line is indented with a tab, which YAML does not allow; use spaces",
        ),
        (b"a: 1\0", r"character 5 is U\+0000, which YAML does not allow; save it as UTF-8"),
        ("a: é".encode("latin-1"), "byte 4 is not utf-8; save the file as UTF-8"),
        ("a: 1".encode("utf-16-le"), r"character 2 is U\+0000, which YAML does not allow"),
        (b"# " + b"x" * (1 << 20), "is larger than"),
        *((text, ": is empty; it must be a mapping with the keys blocks_per_chunk") for text in (b"", b"# nothing")),
        (b"tiers:\n- {type: fs, ttl: 1d,\n   ttl: 2d}\n", r"the key 'ttl' occurs twice, first in line 2 \(line 3, "),
        (b"tiers: [{root_dir: '/x', \"root_dir\": /y}]", "'root_dir' occurs twice"),
        *((opening * 5000, "is not valid YAML: it is nested too deeply") for opening in (b"[", b"- ", b"? ", b"{a: ")),
    ],
)
def test_invalid_config_file_error_names_the_cause(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load_config(path)


def test_yaml_anchor_repeated_often_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("x-limits: &limits {ttl: 1d, max_bytes: 1GiB}\ntiers:\n" + "- {<<: *limits, type: fs}\n" * 500)
    assert read_yaml(path)["tiers"] == [{"ttl": "1d", "max_bytes": "1GiB", "type": "fs"}] * 500  # type: ignore[index]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_yaml_with_byte_order_mark_is_accepted(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: é", encoding=encoding)
    assert read_yaml(path) == {"a": "é"}


def test_yaml_keys_override_merged_keys(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    # PyYAML merges what is deeper before it makes a dict of it.
    path.write_text("tiers: [{near: &near {<<: {a: 0, b: 1}, a: 1}}]\nfar: {<<: *near, b: 2}\n")
    assert read_yaml(path) == {"tiers": [{"near": {"a": 1, "b": 1}}], "far": {"a": 1, "b": 2}}


def test_missing_config_file_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")


def test_home_and_variables_in_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("KV_ROOT", "/mnt/kv")
    for given, expected in (("~/kv", "/home/x/kv"), ("$KV_ROOT/a", "/mnt/kv/a"), ("./~x/kv", f"{os.getcwd()}/~x/kv")):
        tier = parse_tier(FS | {"root_dir": given})
        assert isinstance(tier, FsTierConfig)
        assert tier.root_dir == expected
    for url, expected in (("file://$KV_ROOT/a", "file:///mnt/kv/a"), ("sftp://me:a$b@host/", "sftp://me:a$b@host/")):
        assert parse_tier({"type": "fsspec", "url": url}).url == expected  # type: ignore[union-attr]


def test_unnamed_tiers_of_one_type_get_distinct_names() -> None:
    more = [FS | {"root_dir": "/b"}, FS | {"root_dir": "/c", "name": "far"}]
    config = parse_config({"region": REGION, "tiers": [FS, {"type": "memory"}, *more]})
    assert [getattr(tier, "name", None) for tier in config.tiers] == ["fs0", None, "fs2", "far"]


def test_endpoint_from_the_environment_counts_when_s3_tiers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio:9000")
    other = S3 | {"endpoint_url": "https://minio:9000"}
    with pytest.raises(ConfigError, match=r"tiers\[1\].*: is the place of tiers\[0\].bucket, too"):
        parse_config({"region": REGION, "tiers": [S3, other]})


def test_relative_paths_become_absolute_when_a_tier_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that replace others, and engines started elsewhere, would use another one."""
    monkeypatch.chdir(tmp_path)
    for given in ("kv", "./kv", "../" + tmp_path.name + "/kv"):
        assert dict(parse_tier(FS | {"root_dir": given}))["root_dir"] == f"{tmp_path}/kv"
    assert dict(parse_tier(S3 | {"ca_bundle": "ca.pem"}))["ca_bundle"] == f"{tmp_path}/ca.pem"


FSSPEC = {"type": "fsspec", "url": "gs://b/kv"}
AT_MINIO = {"storage_options": {"client_kwargs": {"endpoint_url": "http://MINIO:9000"}}}


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([FS, FS], ["tiers[1].root_dir: is the place of tiers[0].root_dir, too"]),
        ([FS, {"type": "nfs", "root_dir": "/a/../kv/"}], ["tiers[1].root_dir: is the place of tiers[0].root_dir, too"]),
        ([FS, FS | {"root_dir": "//kv"}], ["tiers[1].root_dir: is the place of tiers[0].root_dir, too"]),
        ([FS, {"type": "nfs", "root_dir": "//kv"}], ["tiers[1].root_dir: is the place of tiers[0].root_dir, too"]),
        ([FS | {"root_dir": "/kv/inner"}, FS], ["tiers[0].root_dir: is inside tiers[1].root_dir"]),
        ([FS | {"root_dir": "/"}, FS], ["tiers[1].root_dir: is inside tiers[0].root_dir"]),
        ([S3, S3], ["tiers[1].bucket: is the place of tiers[0].bucket, too"]),
        ([S3, S3 | {"prefix": "a"}], ["tiers[1].prefix: is inside tiers[0].bucket"]),
        ([S3 | {"prefix": "a/b"}, S3 | {"prefix": "a"}], ["tiers[0].prefix: is inside tiers[1].prefix"]),
        ([FS, FSSPEC | {"url": "file:///kv"}], ["tiers[1].url: is the place of tiers[0].root_dir, too"]),
        ([FSSPEC | {"url": "local:///kv/a"}, FS], ["tiers[0].url: is inside tiers[1].root_dir"]),
        ([FSSPEC | {"url": "file:///kv"}, FS | {"root_dir": "/kv/a"}], ["tiers[1].root_dir: is inside tiers[0].url"]),
        ([FSSPEC, FSSPEC | {"url": "gs://b/kv/"}], ["tiers[1].url: is the place of tiers[0].url, too"]),
        ([FSSPEC, FSSPEC | {"url": "gs://b/kv/x"}], ["tiers[1].url: is inside tiers[0].url"]),
        (
            [FS, {"type": "nope"}, FS | {"root_dir": "/kv/a"}],
            ["tiers[1].type: 'nope' is not", "tiers[2].root_dir: is inside tiers[0].root_dir"],
        ),
    ],
)
def test_tiers_with_equal_or_nested_places_are_refused(tiers: list[dict[str, Any]], expected: list[str]) -> None:
    """The outer one's collector would remove the inner one's blocks, and count them."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"region": REGION, "tiers": tiers})
    told = str(caught.value).splitlines()
    assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected


@pytest.mark.parametrize(
    "tiers",
    [
        [FS, FS | {"root_dir": "/kv2"}],
        [{"type": "memory"}, {"type": "memory"}],
        [S3 | {"prefix": "a"}, S3 | {"prefix": "ab"}, S3 | {"endpoint_url": "https://minio:9000"}],
        [
            S3,
            FSSPEC | {"url": "s3://bucket"} | AT_MINIO,
            FSSPEC | {"url": "gs://bucket"},
            FSSPEC | {"url": "s3://other"},
        ],
        [FSSPEC | {"url": "sftp://a/kv"}, FSSPEC | {"url": "sftp://b/kv"}],
        [FSSPEC | {"url": "hf://datasets/o/a@main/kv"}, FSSPEC | {"url": "hf://datasets/o/b@main/kv"}],
        [FS | {"root_dir": "/"}, FSSPEC | {"url": "simplecache::s3://kv"}, FSSPEC],
    ],
)
def test_tiers_with_similar_but_distinct_places_are_accepted(tiers: list[dict[str, Any]]) -> None:
    assert len(parse_config({"region": REGION, "tiers": tiers}).tiers) == len(tiers)


@pytest.mark.parametrize("module_path", [None, ""])
def test_empty_module_path_is_treated_as_absent(module_path: str | None) -> None:
    assert isinstance(parse_tier({**FS, "module_path": module_path}), FsTierConfig)
    with pytest.raises(ConfigError, match=r"max_bites: is not a known key"):
        parse_tier({**FS, "module_path": module_path, "max_bites": "5GiB"})
    with pytest.raises(ConfigError, match=r"type: 'nosuch' is not a tier type"):
        parse_tier({"type": "nosuch", "module_path": module_path})
    mine = parse_tier({"type": "mine", "module_path": module_path, "place": "p"}, registered=["mine"])
    assert (mine.type, mine.model_dump()["module_path"]) == ("mine", None)


def test_external_tiers_keep_their_options() -> None:
    tier = parse_tier({"type": "MyTier", "module_path": "my.module", "anything": [1]})
    assert isinstance(tier, ExternalTierConfig)
    assert dict(tier) == {"type": "MyTier", "module_path": "my.module", "anything": [1]}
    assert dict(parse_tier({"type": "mine", "x": 1}, registered=["mine"]))["x"] == 1


def test_possible_secrets_are_masked_in_config_dumps_and_reprs() -> None:
    tiers = [
        {"type": "fsspec", "url": "ftp://me:CANARY@host/a?sig=CANARY", "storage_options": {"key": "CANARY"}},
        {"type": "Mine", "module_path": "m", "password": "CANARY"},
    ]
    config = parse_config({"region": REGION, "tiers": tiers})
    shown = [config.model_dump_json(), str(config.model_dump()), repr(config), str(config), f"{config.tiers}"]
    assert not [text for text in shown if "CANARY" in text]
    assert "ftp://***@host/a?***" in shown[0]
    urls = {
        "ftp://me:pa/CANARY@host/x": "ftp://***@host/x",
        "ftp://me:p#CANARY@host/x": "ftp://***@host/x",
        "ftp://me:CAN@ARY@host/x": "ftp://***@host/x",
        "ftp://me:CANARY?CANARY@host/x?CANARY": "ftp://***@?***",
        "https://host/x?sig=a@CANARY": "https://***@?***",
        "zip://a::https://me:CANARY@host/x": "zip://***@host/x",
        "gs://bucket/kv": "gs://bucket/kv",
    }
    assert {url: public_url(url) for url in urls} == urls
    assert [dict(tier)["type"] for tier in config.tiers] == ["fsspec", "Mine"]
    assert str([dict(tier) for tier in config.tiers]).count("CANARY") == 4


KEY, HEX_KEY = "CANARYCANARY", "CA" * 32


@pytest.mark.parametrize(
    "tiers",
    [
        f"- {{type: fsspec, url: 'az://x', storage_options: account_key={KEY}}}",
        f"- {{type: fsspec, url: 'az://x', storage_options: [{{account_key: {KEY}}}]}}",
        f"- {{type: fsspec, storage_options: {{account_key: {KEY}}}}}",
        f"- {{type: fsspec, url: ['ftp://me:{KEY}@host']}}",
        f"- {{type: fsspec, url: 'ftp://me:{KEY}@host/{'x' * 4000}'}}",
        f"- [{{type: fsspec, storage_options: {{account_key: {KEY}}}}}]",
        f"  {{type: fsspec, storage_options: {{account_key: {KEY}}}}}",
        f"- {{type: s3, bucket: kvb, endpoint_url: 'me:{KEY}@host'}}",
        f"- {{type: s3, bucket: kvb, endpoint_url: 'https://me:{KEY}@host:99999'}}",
        f"- {{type: s3, bucket: kvb, endpoint_url: 'https://host/?signature={KEY}'}}",
        f"- {{type: s3, bucket: kvb, profile: {{aws_secret_access_key: {KEY}}}}}",
        f"- {{type: fs, root_dir: /x, encrypt: aes-gcm, keys_env: '{KEY}!'}}",
        *(f"- {{type: fs, root_dir: /x, encrypt: aes-gcm, {name}: {HEX_KEY}}}" for name in ("keys_env", "keys_file")),
        *(f"- {{type: fs, root_dir: /x, {name}: '{HEX_KEY}'}}" for name in ("encrypt", "ttl", "min_free", HEX_KEY)),
        f"- {{type: fs, root_dir: /x, encrypt: 'aes-gcm with {'the key of ' * 3}{HEX_KEY}'}}",
        f"- {{type: '{HEX_KEY}'}}",
        *(f"- {{type: fsspec, storage_options: {{account_key: {text}" for text in (KEY, f"@{KEY}}}", f"'{KEY}' x}}")),
        *(f"- {{type: fsspec, storage_options: {{account_key: {mark}{KEY}}}}}" for mark in ("*", "! !", "!x!", "!!")),
        *(f"- {{type: {tag} {KEY}}}" for tag in ("!!int", "!!float", "!!bool", "!!timestamp")),
    ],
)
def test_config_errors_do_not_repeat_possible_secrets(tmp_path: Path, tiers: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"region: {{size: 64MiB}}\ntiers:\n{tiers}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__context__)
    assert "CANARY" not in told
    assert HEX_KEY[:16] not in told
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith((f"{path}: is not valid YAML: ", "tiers"))


def test_yaml_syntax_error_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("region: {size: 64MiB}\ntiers:\n  - {type: fs, root_dir: @x}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: is not valid YAML: found character '@' that cannot start any token (line 3, column 26)"
    )


def test_json_schema_accepts_the_shipped_configs() -> None:
    json.dumps(json_schema())
    for path in CONFIGS:
        schema_validator().validate(yaml.safe_load(path.read_text()))
    assert not schema_validator().is_valid({"region": {"size": []}})


PLACES = {
    "fs": {"root_dir": "/kv"},
    "fsspec": {"url": "gs://bucket/kv"},
    "memory": {},
    "nfs": {"root_dir": "/mnt/kv"},
    "s3": {"bucket": "bucket"},
    "store": {"module_path": "my_stores"},
}


@pytest.mark.parametrize(
    "typo",
    [
        {"max_bites": "3GiB"},
        {"max_bytes": "3 Gigs"},
        {"isolation": "nonsense"},
        {"n_read_threads": 1.5},
        {"type": ["fs"]},
        {"module_path": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("tier_type", TIER_MODELS)
def test_json_schema_rejects_a_typo_in_each_tier_type(tier_type: str, typo: dict[str, Any]) -> None:
    good = {"type": tier_type, **PLACES[tier_type]}
    is_valid = schema_validator().is_valid
    assert is_valid({"region": REGION, "tiers": [good, {**good, "max_bytes": "1.5 GiB"}]})
    assert not is_valid({"region": REGION, "tiers": [good | typo]})
    if PLACES[tier_type]:
        assert not is_valid({"region": REGION, "tiers": [{"type": tier_type}]})


@functools.cache
def schema_validator() -> Any:
    """Made once: checking the schema itself takes half a second."""
    import jsonschema

    schema = json_schema()
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


@pytest.mark.parametrize("tier", [{"type": "Mine", "module_path": "a.b", "k": 1}, {"type": "registered", "k": 1}])
def test_json_schema_accepts_external_tiers(tier: dict[str, Any]) -> None:
    schema_validator().validate({"region": REGION, "tiers": [tier]})


@pytest.mark.parametrize(
    "text", ["4096", " 10 GiB ", "1.5MB", "7B", "2K", "10gib", "1e9", "1,5GiB", "7d", "90 min", "h"]
)
def test_json_schema_accepts_exactly_the_sizes_and_durations_that_parse(text: str) -> None:
    for key, read in (("max_bytes", parse_size), ("ttl", parse_duration)):
        config = {"region": REGION, "tiers": [{**FS, key: text}]}
        try:
            read(text)
        except ValueError:
            assert not schema_validator().is_valid(config)
        else:
            schema_validator().validate(config)


#: Every key that all tiers share, with a value that is not its default, and where it must arrive.
SHARED_KEYS: dict[str, tuple[Any, str, Any]] = {
    "name": ("far", "name", "far"),
    "load": ("never", "load", "never"),
    "lookup_deadline_s": (0.7, "lookup.deadline_s", 0.7),
    "job_deadline_s": (33.0, "job_deadline_s", 33.0),
}


@pytest.mark.parametrize("key", sorted(SHARED_KEYS))
def test_each_shared_key_reaches_the_tier_options(key: str) -> None:
    value, place, expected = SHARED_KEYS[key]
    tier = parse_tier({"type": "memory", key: value})
    assert isinstance(tier, TierConfig)
    arrived: Any = _tier_options(tier)
    default: Any = _tier_options(MemoryTierConfig())
    for part in place.split("."):
        arrived, default = getattr(arrived, part), getattr(default, part)
    assert arrived == expected
    assert arrived != default


def test_lookup_wait_is_at_least_15_s_and_at_least_lookup_deadline_s() -> None:
    totals = [_tier_options(MemoryTierConfig(lookup_deadline_s=seconds)).lookup.total_s for seconds in (1.0, 60.0)]
    assert totals == [15.0, 60.0]


def test_every_shared_key_of_the_tier_config_has_a_test() -> None:
    # type chooses the model; the others have tests of their own
    elsewhere = {"type", "children", "parallel_agnostic", "isolation", "encrypt", "keys_file", "keys_env"}
    elsewhere |= {"n_read_threads", "n_write_threads"}
    assert set(TierConfig.model_fields) == set(SHARED_KEYS) | elsewhere


def test_tier_option_counts_stay_within_their_limits() -> None:
    """An option is there only if a user knows a reason to set it."""
    counts = {tier_type: len(model.model_fields) for tier_type, model in TIER_MODELS.items()}
    names = {name for model in TIER_MODELS.values() for name in model.model_fields}
    print(len(names), "options in all;", counts)
    assert len(names) <= 35
    assert counts["s3"] <= 25
    assert counts["fs"] <= 19


def test_parallel_agnostic_option_reaches_the_mapper() -> None:
    spec = FakeSpec().changed("parallel", tp_size=2, is_parallelism_agnostic=True)
    view = memoryview(bytearray(4096)).cast("b", (1, 4096))
    sizes = []
    for agnostic in (False, True):
        tier = BuiltInTier(spec, view, "memory", parallel_agnostic=agnostic)
        sizes.append(tier.mapper.get_run_config()["tp_size"])
        tier.shutdown()
    assert sizes == [2, 1]


def test_fs_options_reach_the_store(tmp_path: Path) -> None:
    view = memoryview(bytearray(4096)).cast("b", (1, 4096))
    full = BuiltInTier(FakeSpec(), view, "fs", root_dir=str(tmp_path / "full"), min_free=1 << 59)
    with pytest.raises(StoreFullError):
        full.store.put("a/b", [memoryview(b"x")])
    full.shutdown()
    tier = BuiltInTier(FakeSpec(), view, "fs", root_dir=str(tmp_path / "kv"), min_free=0)
    tier.store.put("a/b", [memoryview(b"x")])
    tier.shutdown()
    assert (tmp_path / "kv" / "a" / "b").read_bytes() == b"x"
    with pytest.raises(ConfigError, match="n_read_threads"):
        BuiltInTier(FakeSpec(), view, "fs", root_dir=str(tmp_path), n_read_threads=0)
