"""What a configuration's mistakes are told as, variables, units and relative paths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.tiers.config.deployment import DeploymentConfig, json_schema, load_config, parse_config, parse_tier
from kvtiers.tiers.config.mistakes import _REPLACED, _schema_at, _schema_of
from kvtiers.tiers.config.tier_options import TIER_MODELS
from kvtiers.tiers.config.values import parse_duration, parse_size, show_duration, show_size
from kvtiers.tiers.config.variables import escape, expand
from kvtiers.tiers.errors import ConfigError

REGION = {"size": "64MiB"}
FS = {"type": "fs", "root_dir": "/kv"}
S3 = {"type": "s3", "bucket": "bucket"}
CANARY = "CANARYCANARY"


def told(data: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return str(caught.value)


def told_of(tier: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_tier(tier)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "must be a mapping with the keys blocks_per_chunk, handler, identity, metrics, region, tiers"),
        ([], "a mapping with the keys"),
        ({}, "region: is required"),
        ({"region": 3}, "region: 3 is not accepted"),
        ({"region": {}}, "region.size: is required"),
        ({"region": {"size": 4095}}, "region.size: 4095 is not accepted; write a size from 4KiB to 1024PiB"),
        ({"region": {"size": 1 << 20_000}}, "region.size: a number is not accepted; write a size from 4KiB to 1024PiB"),
        ({"region": {"size": 1 << 20, "evict_policy": "lru"}}, "did you mean eviction_policy?"),
        *(
            ({"region": REGION, name: value}, expected)
            for name, value, expected in (
                ("Tiers", [], "Tiers: is not a known key; did you mean tiers?"),
                ("blocks-per-chunk", 1, "blocks-per-chunk: is not a known key; did you mean blocks_per_chunk?"),
                ("blocks_per_chunk", True, "blocks_per_chunk: true is not a number"),
                ("identity", {"ignored": []}, "identity.ignored: is not a known key; did you mean ignore?"),
                ("metrics", {"adress": "::1"}, "metrics.adress: is not a known key; did you mean address?"),
                ("metrics", {"port": True}, "metrics.port: true is not a number"),
                ("handler", {"pinned": True}, "handler.pinned: is not a known key; accepted: method, pin"),
                ("eviction_policy", "lru", "eviction_policy: is not a known key; accepted: blocks_per_chunk, "),
                ("root_dir", "/x", "root_dir: is not a known key; accepted: blocks_per_chunk, "),
                ("tiers", {}, "tiers: {} is not a list"),
                ("tiers", {"type": "fs"}, "tiers: a mapping is not a list of tiers; begin each"),
                ("tiers", None, "tiers: nothing is not a list of tiers; begin each"),
                ("tiers", "s3://id:key@b/kv", "tiers: '***@b/kv' is not a list"),
                ("tiers", [3], "tiers[0]: 3 is not a mapping"),
                ("tiers", ["s3://id:k/ey@b/kv"], "tiers[0]: '***@b/kv' is not a mapping"),
                ("tiers", [{}], "tiers[0].type: is required; accepted: fs"),
                ("tiers", [FS, FS | {"n_threads": 1}], "tiers[1].n_threads: is not a known key; did you mean n_read_"),
                (1, 2, "1: is not a text; keys are text"),
            )
        ),
        (
            {"region": REGION, "tiers": [FS | {"name": "a"}, {"type": "memory", "name": "a"}]},
            "'a' is the name of 2 tiers; names must differ",
        ),
        (
            {"region": REGION, "tiers": [FS | {"name": "fs1"}, FS | {"root_dir": "/kv2"}]},
            "'fs1' is the name of 2 tiers, for one of them by default; names must differ",
        ),
    ],
)
def test_config_error_names_the_field_and_the_accepted_values(data: object, expected: str) -> None:
    assert expected in told(data)


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ({"type": "me:key@b?sig=key"}, "type: '***@b?***' is not a tier type"),
        ({"type": "nsf"}, "type: 'nsf' is not a tier type; accepted: fs, "),
        ({"type": "redis"}, "type: 'redis' is not a tier type; accepted: fs, fsspec, "),
        ({"type": "fs"}, "root_dir: is required"),
        ({"type": "fsspec"}, "url: is required; write a URL"),
        ({"type": "s3", "bucket": "https://id:key@h/b"}, "bucket: '***@h/b' is not a valid bucket name"),
        (FS | {"root_dir": 3}, "root_dir: 3 is not accepted"),
        (FS | {"root_dir": ""}, "root_dir: '' is too short"),
        (FS | {"root_dir": b"kv\0"}, "root_dir: binary is not text"),
        (FS | {"root_dir": "~nobody-here/kv"}, "root_dir: '~nobody-here/kv' begins with the home"),
        (FS | {"root_dir": "/a\0b"}, "root_dir: '/a\\x00b' contains a NUL"),
        (FS | {"root_dir": "a" * 4000}, f"root_dir: '{'a' * 76}…' is too long; write at most 3072 characters"),
        (S3 | {"ca_bundle": ""}, "ca_bundle: '' is too short; write at least 1 character(s)"),
        (FS | {"lookup_deadline_s": True}, "lookup_deadline_s: true is not a duration"),
        (FS | {"n_read_threads": True}, "n_read_threads: true is not a number"),
        (FS | {"isolation": False}, "isolation: false is not accepted; write auto, thread or process"),
        (FS | {"max_byte": 1}, "max_byte: is not a known key; did you mean max_bytes?"),
        (FS | {"max_bytes": 4096}, "max_bytes: 4096 bytes do not hold a block; write at least 1MiB"),
        (FS | {"zzz": 1}, "zzz: is not a known key; accepted: children"),
        (FS | {"bucket": "b"}, "bucket: is not a known key; accepted: children"),
        ({"type": "fsspec", "url": "gs://$NOT_SET/kv"}, "url: a text names the variable $NOT_SET, which is not set"),
    ],
)
def test_tier_config_error_names_the_field_and_the_accepted_values(tier: dict[str, Any], expected: str) -> None:
    assert told_of(tier).startswith(expected)


@pytest.mark.parametrize(
    "name",
    [
        *("access_key_id", "secret_access_key", "aws_secret_access_key", "session_token", "password", "AccessKey"),
        *("api_key", "account_key", "sas_token", "connection_string", "client_secret", "credentials"),
    ],
)
def test_error_for_credentials_in_a_config_says_where_to_put_them_and_hides_them(name: str) -> None:
    places: list[tuple[object, str]] = [
        ({"region": REGION, name: CANARY}, name),
        ({"region": REGION | {name: CANARY}}, f"region.{name}"),
        *(({"region": REGION, "tiers": [tier | {name: CANARY}]}, f"tiers[0].{name}") for tier in (FS, S3)),
    ]
    for data, path in places:
        message = told(data)
        assert message.startswith(f"{path}: is not a known key; credentials do not belong here: ")
        assert CANARY not in message


def test_top_level_keys_for_yaml_anchors_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "x-limits: &limits {max_bytes: 1GiB, ttl: 1d}\n"
        "region: {size: 1MiB}\ntiers: [{<<: *limits, type: fs, root_dir: /kv}]"
    )
    (tier,) = load_config(path).tiers
    assert (dict(tier)["max_bytes"], dict(tier)["ttl"]) == (1 << 30, 86_400)
    assert "tiers[0].x-foo: is not a known key" in told({"region": REGION, "tiers": [FS | {"x-foo": 1}]})


# ---- sizes and durations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("10s", 10), ("1.5 s", 1.5), ("2min", 120), ("7d", 604_800), ("45", 45), ("3h", 10_800), (7, 7)],
)
def test_duration_with_or_without_unit_is_parsed(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


DURATIONS = [
    ("promotion_wait_s", "region"),
    *(
        (name, tier_type)
        for tier_type, model in TIER_MODELS.items()
        for name in model.model_fields
        if name.endswith(("_s", "_timeout")) or name == "ttl"
    ),
]
PLACES: dict[str, dict[str, Any]] = {
    "fs": {"root_dir": "/kv"},
    "nfs": {"root_dir": "/kv"},
    "s3": {"bucket": "bucket"},
    "fsspec": {"url": "gs://b/kv"},
    "memory": {},
    "store": {"module_path": "my_stores"},
}


@pytest.mark.parametrize(("name", "where"), DURATIONS)
def test_every_duration_option_accepts_units(name: str, where: str) -> None:
    for text, seconds in (("3s", 3), ("3", 3), (3, 3), ("3000ms", 3)):
        if where == "region":
            assert getattr(parse_config({"region": {**REGION, name: text}}).region, name) == seconds
        else:
            assert getattr(parse_tier({"type": where, **PLACES[where], name: text}), name) == seconds


@pytest.mark.parametrize("value", ["10 secs", "much", "", "1,5s", "2 months", "1:30", None, True, [], "-1s", "1e3"])
def test_invalid_duration_error_shows_accepted_forms(value: object) -> None:
    with pytest.raises(
        ValueError, match="is not a duration; write a number and a unit, such as 500ms, 10s, 30m, 12h or 7d$"
    ):
        parse_duration(value)


@pytest.mark.parametrize("name", _REPLACED)
def test_removed_option_is_told_its_successor(name: str) -> None:
    assert told_of(S3 | {name: 1}) == f"{name}: was removed: {_REPLACED[name]}"


def test_out_of_range_value_error_names_the_accepted_range() -> None:
    assert told_of(FS | {"job_deadline_s": "2d"}) == (
        "job_deadline_s: '2d' is not accepted; write a duration above 0s, up to 1d"
    )
    assert told_of(FS | {"ttl": "500ms"}) == "ttl: '500ms' is not accepted; write a duration from 1s to 36500d, or null"
    assert (
        told_of({"type": "memory", "max_bytes": -1})
        == "max_bytes: -1 is not accepted; write a size from 1 to 1024PiB, or null"
    )
    for outside in (-1, float("nan"), float("inf"), 10**400, "200000w"):
        assert told_of(FS | {"ttl": outside}).endswith("is not accepted; write a duration from 1s to 36500d, or null")
    assert told_of(S3 | {"children": "x"}) == "children: 'x' is not accepted; write a whole number from 1 to 64"


@given(st.integers(0, 1 << 60))
def test_shown_size_parses_back_to_the_same_size(size: int) -> None:
    assert parse_size(show_size(size)) == size


@given(st.integers(0, 10**12))
def test_shown_duration_parses_back_to_the_same_duration(milliseconds: int) -> None:
    assert parse_duration(show_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


# ---- variables -------------------------------------------------------------------------------------------------------


def test_variables_are_expanded_in_every_text_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZE": "2GiB", "TTL": "2d", "NAME": "near", "ROOT": "/mnt/kv", "N": "7", "TYPE": "fs"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NOT_SET", "EMPTY"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("NOT_SET")
    tier = {
        "type": "${TYPE}",
        "root_dir": "${ROOT}/${NOT_SET:-model}/$$x",
        "max_bytes": "$SIZE",
        "ttl": "$TTL",
        "name": "${NAME}-${EMPTY:-1}",
        "n_read_threads": "$N",
        "isolation": "${NOT_SET:-thread}",
    }
    config = parse_config({"region": {"size": "${NOT_SET:-64MiB}"}, "identity": {"ignore": ["a_$N"]}, "tiers": [tier]})
    (got,) = config.tiers
    names = ("root_dir", "max_bytes", "ttl", "name", "n_read_threads", "isolation")
    assert [getattr(got, name) for name in names] == ["/mnt/kv/model/$x", 2 << 30, 172_800, "near-1", 7, "thread"]
    assert (config.region.size, config.identity.ignore) == (64 << 20, ("a_7",))


def test_expanded_values_are_not_expanded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier is parsed again by each constructor, and a dump may be loaded again."""
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("PASSWORD", "a$HOME")
    tier = parse_tier(FS | {"root_dir": "/$$HOME/a"})
    url = parse_tier({"type": "fsspec", "url": "sftp://me:$PASSWORD@host/kv"})
    assert (tier.root_dir, url.url) == ("/$HOME/a", "sftp://me:a$HOME@host/kv")  # type: ignore[union-attr]
    for again in (dict(tier), tier.model_dump(mode="json")):
        assert parse_tier(again) == tier
    assert parse_tier(dict(url)) == url


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (FS | {"max_bytes": "$NOT_SET"}, "max_bytes: '$NOT_SET' names the variable $NOT_SET, which is not set;"),
        (FS | {"name": "a${EMPTY}"}, "name: 'a${EMPTY}' names the variable ${EMPTY}, which is empty"),
        (FS | {"root_dir": "/a/${B"}, "root_dir: '/a/${B' has a '${' that does not begin a variable"),
        ({"type": "$NOT_SET"}, "type: '$NOT_SET' names the variable $NOT_SET, which is not set"),
        ({"type": "$SECRET"}, "type: '$SECRET', with its variables replaced, is not a tier type;"),
        (FS | {"max_bytes": "$SECRET"}, "max_bytes: '$SECRET', with its variables replaced, is not a size;"),
        (FS | {"isolation": "$SECRET"}, "isolation: '$SECRET', with its variables replaced, is not accepted;"),
        (FS | {"encrypt": "aes-gcm", "keys_env": "$SECRET"}, "keys_env: a text is not accepted; write a var"),
    ],
)
def test_unusable_variable_error_names_the_variable_but_not_its_value(
    monkeypatch: pytest.MonkeyPatch, tier: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("SECRET", CANARY)
    monkeypatch.setenv("EMPTY", "")
    message = told_of(tier)
    assert message.startswith(expected)
    assert CANARY not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/kv/$(POD_NAME)", "has a '$' that does not begin a variable; write ${NAME}"),
        ("/kv/${POD-x}", "has a '${' that does not begin a variable; write ${NAME}"),
        ("/kv/$", "has a '$' that does not begin a variable; write ${NAME}"),
        ("/kv/$-x", "and $$ for a dollar"),
        ("/kv/$(date +%F)", "has a '$' that does not begin a variable"),
    ],
)
def test_dollar_without_variable_is_refused(text: str, expected: str) -> None:
    assert expected in told_of(FS | {"root_dir": text})
    assert expected in told_of({"type": "fsspec", "url": f"gs://b{text}"})
    in_login = parse_tier({"type": "fsspec", "url": f"sftp://me:{text[4:]}@host/kv"})
    assert in_login.url == f"sftp://me:{text[4:]}@host/kv"  # type: ignore[union-attr]
    assert parse_tier(FS | {"root_dir": text.replace("$", "$$")}).root_dir == text  # type: ignore[union-attr]


def test_storage_options_and_external_tier_options_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "b")
    tier = parse_tier({"type": "fsspec", "url": "gs://$A", "storage_options": {"token": "pa$A$$"}})
    assert (dict(tier)["url"], dict(tier)["storage_options"]) == ("gs://b", {"token": "pa$A$$"})
    assert dict(parse_tier({"type": "Mine", "module_path": "m", "x": "$A"}))["x"] == "$A"


@given(st.text(alphabet="a$${}:-_@/?"))
def test_escaped_text_expands_to_itself(text: str) -> None:
    assert expand(escape(text), {}) == text


def test_json_schema_accepts_variables() -> None:
    import jsonschema

    tier = FS | {"max_bytes": "$SIZE", "n_read_threads": "${N:-4}", "ttl": "$TTL", "name": "kv-$NAME"}
    jsonschema.validate({"region": {"size": "$S"}, "tiers": [tier], "x-any": 1}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"region": {"size": "$S"}, "tiers": [tier | {"isolation": "nonsense"}]}, json_schema())


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_relative_path_in_a_config_file_is_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "elsewhere").mkdir()
    tiers = [
        {"type": "fs", "root_dir": "kv", "encrypt": "aes-gcm", "keys_file": "keys"},
        {"type": "nfs", "root_dir": "../mnt"},
        S3 | {"ca_bundle": "./ca.pem"},
        {"type": "fsspec", "url": "file://far"},
        {"type": "fsspec", "url": "local://near"},
        {"type": "fsspec", "url": "simplecache::gs://b/kv"},
    ]
    (tmp_path / "etc" / "c.yaml").write_text(yaml.safe_dump({"region": REGION, "tiers": tiers}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config("../etc/c.yaml")
    got = [dict(tier) for tier in config.tiers]
    etc = f"{tmp_path}/etc"
    assert (got[0]["root_dir"], got[0]["keys_file"]) == (f"{etc}/kv", f"{etc}/keys")
    assert (got[1]["root_dir"], got[2]["ca_bundle"]) == (f"{tmp_path}/mnt", f"{etc}/ca.pem")
    assert [tier["url"] for tier in got[3:]] == [f"file://{etc}/far", f"local://{etc}/near", "simplecache::gs://b/kv"]
    assert [parse_tier(tier) for tier in got] == list(config.tiers)


def test_relative_path_in_tier_options_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like every path on a command line: vLLM's options have no file."""
    monkeypatch.chdir(tmp_path)
    assert dict(parse_tier({"type": "fs", "root_dir": "kv"}))["root_dir"] == f"{tmp_path}/kv"


@pytest.mark.parametrize("export", ["server:/export", "10.0.0.1:/a/b", "[fe80::1]:/e", "kv-1.local:/"])
def test_nfs_export_as_root_dir_error_says_to_mount_the_export(export: str) -> None:
    message = told_of({"type": "nfs", "root_dir": export})
    assert message.startswith(f"root_dir: '{export}' is an NFS export, not a folder; mount it (mount -t nfs {export} ")
    assert dict(parse_tier({"type": "nfs", "root_dir": f"./{export}"}))["root_dir"].endswith(export.rstrip("/"))
    assert "is a URL, not a folder" in told_of({"type": "fs", "root_dir": "s3://bucket/kv"})


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3//{}@bucket/x",
            "memory//x",
            "s3:{}@bucket/x",
            "s3:/bucket/x",
            "bucket/{}@x",
            "kv",
            "://bucket/x",
            "memory",
        ),
        *(
            "zip://a::s3//{}@bucket/x",
            "zip::x",
            "sftp:{}@host/kv",
            "/kv/{}",
            "~/kv",
            "./kv",
            "file:/kv",
            "//me:{}@host/kv",
        ),
        *("simplecache::/kv", "s3:/{}@bucket/x", "$HOME", "-s3://bucket"),
    ],
)
def test_fsspec_url_without_its_protocol_is_refused_and_not_shown(url: str) -> None:
    message = told_of({"type": "fsspec", "url": url.format(f"me:{CANARY}")})
    assert message.startswith("url: a text")
    assert "is not a URL; write protocol://bucket/folder, or file:///folder" in message
    assert CANARY not in message


def test_url_as_s3_bucket_error_names_the_bucket_and_prefix_options() -> None:
    assert told_of({"type": "s3", "bucket": "s3://b1/a/b/"}) == (
        "bucket: 's3://b1/a/b/' is a URL; write bucket: b1 and prefix: a/b"
    )
    assert told_of({"type": "s3", "bucket": "s3://b1"}) == "bucket: 's3://b1' is a URL; write bucket: b1"
    assert CANARY not in told_of({"type": "s3", "bucket": f"s3://me:{CANARY}@b1/a"})


# ---- any mistake -----------------------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {
        "region": {"size": "64MiB", "eviction_policy": "arc", "promotion_wait_s": 0.5, "instance_id": "a"},
        "blocks_per_chunk": 4,
        "handler": {"method": "copy", "pin": False},
        "metrics": {"port": 9400, "address": "127.0.0.1"},
        "identity": {"ignore": ["VLLM_X"]},
        "tiers": [
            FS | {"name": "near", "max_bytes": "10GiB", "ttl": "7d", "read_only": False, "encrypt": "none"},
            S3 | {"region": "us-east-1", "job_deadline_s": "5s", "allow_insecure": True, "sse": "AES256"},
        ],
    },
    {
        "region": {"size": 4096},
        "tiers": [{"type": "nfs", "root_dir": "/mnt/kv", "min_free": "1GiB", "job_deadline_s": 3}],
    },
    {"region": {"size": "1MiB"}, "tiers": [{"type": "memory", "lookup_deadline_s": "200ms"}]},
    {
        "region": {"size": "1GiB"},
        "tiers": [
            {"type": "fsspec", "url": "gs://b/kv", "storage_options": {"project": "p"}, "max_bytes": "1GiB"},
            {"type": "store", "module_path": "my_stores", "options": {"path": "/x"}, "isolation": "auto"},
        ],
    },
]


def paths_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every key that a model reads."""
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = []
    for name, value in children:
        if isinstance(name, str):
            found.append((*path, name))
        if name not in ("options", "storage_options", "ignore"):
            found += paths_of(value, (*path, name))
    return found


def schema_of(config: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    if path[0] == "tiers" and len(path) > 1:
        return _schema_at(_schema_of(TIER_MODELS[config["tiers"][path[1]]["type"]]), path[2:])
    return _schema_at(_schema_of(DeploymentConfig), path)


def wrong_values(schema: dict[str, Any]) -> list[Any]:
    options = schema.get("anyOf", [schema])
    kinds = {
        kind for each in options for kind in ([each["type"]] if isinstance(each.get("type"), str) else each["type"])
    }
    wrong: list[Any] = [b"\xff"]
    wrong += [] if "array" in kinds else [["x"]]
    wrong += [] if "object" in kinds else [{"x": "y"}]
    if not kinds & {"string"} or {"integer", "number"} & kinds:
        wrong += ["many", "-1 potato"]
    if {"integer", "number", "object", "array"} & kinds:
        wrong += [True]
    for each in options:
        if "minimum" in each or "exclusiveMinimum" in each:
            wrong.append(each.get("minimum", each.get("exclusiveMinimum")) - 1)
        if "maximum" in each:
            wrong.append(each["maximum"] + 1)
        if "enum" in each or "const" in each or "pattern" in each:
            wrong += ["no such/value", 10**30 if "enum" in each else "\n"]
    return wrong


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_error_for_any_single_mistake_names_the_field(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(GOOD)))
    parse_config(config)
    path = data.draw(st.sampled_from(paths_of(config)))
    owner: Any = config
    for part in path[:-1]:
        owner = owner[part]
    name = path[-1]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(name) - 1))
        letter = data.draw(st.sampled_from("qxQ _-é\x1b"))
        wrong_name = data.draw(st.sampled_from([name[:at] + name[at + 1 :], name[:at] + letter + name[at:]]))
        if not wrong_name or wrong_name in schema_of(config, path[:-1] or ("region",)).get("properties", {}):
            return
        if (len(path) == 1 and (wrong_name.startswith("x-") or wrong_name in DeploymentConfig.model_fields)) or (
            name == "type" and "module_path" in owner
        ):
            return
        owner[wrong_name] = owner.pop(name)
        expected = {name, wrong_name.encode("unicode_escape").decode(), wrong_name}
    else:
        owner[name] = data.draw(st.sampled_from(wrong_values(schema_of(config, path))))
        if name == "type" and "module_path" in owner and isinstance(owner[name], str):
            return  # a class in that module
        expected = {name}
    message = told(config)  # anything but a ConfigError is a traceback for the user
    fields = [line.partition(": ")[0] for line in message.splitlines()]
    assert any(field.rpartition(".")[2] in expected or field in expected for field in fields), (fields, message)
    assert all(line.isprintable() for line in message.split("\n"))


def test_misspelled_required_key_gives_a_single_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"regoin": {"size": "1MiB"}, "tiers": [{"type": "fs", "root_dirr": "/x"}]})
    assert str(caught.value).split("\n") == [
        "regoin: is not a known key; did you mean region?",
        "tiers[0].root_dirr: is not a known key; did you mean root_dir?",
    ]
