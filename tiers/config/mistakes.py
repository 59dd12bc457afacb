"""A configuration's mistakes in words: from pydantic's errors to sentences that say what would be accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..errors import ConfigError, printable, quoted, without_keys
from .values import show_duration, show_size
from .variables import AS_WRITTEN, VariableError

CLOSE = 0.7  # difflib's ratio: "teirs" is 0.8 of "tiers"; at 0.6, unrelated keys are suggested
CLOSE_SHORT = 0.6  # for names of up to 4 letters that begin alike: "nsf" is 0.67 of "nfs", but "path" 0.75 of "auth"
_MAY_HOLD_SECRETS = {"options", "storage_options", "url", "endpoint_url", "keys_file", "keys_env"}
_CREDENTIAL = re.compile(
    r"secret|passw|passphrase|token|credential|connection_?string|(access|api|account|private|sas|shared)_?key|signature"
)
#: Where credentials belong, by the tier's type; "": everywhere else.
_CREDENTIALS: Mapping[str, str] = {
    "s3": "S3's come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), ~/.aws/credentials (choose a "
    "profile) or a role",
    "fsspec": "leave them to the environment variables that the driver reads, or else write them into storage_options",
    "store": "leave them to the environment variables that the store reads, or else write them into options",
    "": "keys for encrypt come from keys_file or keys_env, and S3's credentials from the environment, "
    "~/.aws/credentials or a role",
}
#: Keys of other programs, and the key that is meant, where the model has it.
_MEANT = {
    **dict.fromkeys(("path", "dir", "directory", "folder", "root"), "root_dir"),
    **dict.fromkeys(("size", "capacity", "limit", "max_size", "size_limit"), "max_bytes"),
    **dict.fromkeys(("expire", "expiry", "max_age"), "ttl"),
}
#: Keys of earlier versions -> what became of them.
_REMOVED = {
    "auth": "write encrypt: aes-gcm in its place, which authenticates as well; blocks stored with gmac are not found",
    "format": "every tier stores sealed blocks. Leave it out; blocks stored with vllm-raw are not found",
    "unverified": "blocks without a seal are never loaded. Leave it out",
    **dict.fromkeys(("gc_high", "gc_low"), "the collector finds its marks below max_bytes by itself. Leave it out"),
    "gc_every_s": "the collector lists a little at a time, at a pace of its own. Leave it out",
    "task_bytes": "jobs are divided by what their blocks cost. Leave it out",
    "lookup_threads": "each process of a tier answers lookups on a thread of its own. Leave it out",
    "seal_checksum": "new blocks carry xxh3_64, and blocks with xxh3_128 are still read. Leave it out",
    "trace": "a process that exports OpenTelemetry spans has them of every tier. Leave it out",
    **dict.fromkeys(
        (
            "jobs_max", "max_bytes_in_flight", "lookup_total_s", "present_ttl_s", "absent_ttl_s", "lookup_cache_keys",
            "circuit_failures", "circuit_probe_s", "shutdown_s", "n_threads_max", "worker_memory", "connect_timeout",
            "retries", "store_kernel_bytes_max", "load_kernel_bytes_max", "kernel_copies_min",
        ),
        "it is a constant now. Leave it out",
    ),
    "request_timeout": "it is two thirds of job_deadline_s. Leave it out, or change job_deadline_s",
    "client": "kvtiers has a client of its own, and boto3 is used where that cannot be. Leave it out",
    "checksum": "crc64nvme is sent, and payloads are signed where a server refuses it. Leave it out",
    "sse_kms_key_id": "write sse: with the key's ARN or id, which means aws:kms",
    "addressing_style": "the bucket is part of the host on AWS and where endpoint_url has it before its host, else of "
    "the path. Leave it out, or write endpoint_url: https://BUCKET.HOST for virtual",
    "role_arn": "write the role into a profile of ~/.aws/config (role_arn, source_profile), and profile: its name",
    "verify": "certificates are always verified; write the server's certificate authority into ca_bundle",
    "embedded": "only the demo has such a server; it starts it for endpoint_url: https://kvtiers-demo.invalid",
}  # fmt: skip
_ACCEPTED = "{shown} is not accepted; write {accepted}"
_TOO_SHORT = "{shown} is too short; write at least {min_length} character(s)"
_TOO_LONG = "{shown} is too long; write at most {max_length} characters"
#: pydantic's error type -> our words. ``accepted`` is what the field accepts; other names are in the error's context.
_WORDS: Mapping[str, str] = {
    "invalid_key": "is not a text; keys are text",
    "missing": "is required; write {accepted}",
    "string_too_long": _TOO_LONG,
    "string_too_short": _TOO_SHORT,
    "too_long": _TOO_LONG,
    "too_short": _TOO_SHORT,
    "value_error": "{shown} {error}",
}
_OTHERS = "{shown} is not accepted: {plain}"


class Mistakes(ConfigError):
    """ConfigError with one line per mistake; ``found`` holds (field, message) pairs."""

    def __init__(self, found: list[tuple[str, str]]) -> None:
        found = [(printable(without_keys(field)), printable(without_keys(message))) for field, message in found]
        self.found = found
        if len(found) == 1:
            super().__init__(found[0][1], field=found[0][0])
        else:
            super().__init__("\n".join(f"{field}: {message}" for field, message in found))


def explain(
    error: ValidationError, model: type[BaseModel], data: object, homes: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Explain pydantic's errors, as (field, message).

    Args:
        data: what was validated. pydantic's errors hold values whose variables were replaced, which may be secret.
        homes: known key -> where it belongs, for keys that are written elsewhere.
    """
    schema = _schema_of(model)
    items = error.errors(include_url=False)
    # A misspelt key that is required is one mistake, not two.
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"]
    meant = {(*loc[:-1], _meant_key(loc, schema)) for loc in unknown}
    told = [item for item in items if item["type"] != "missing" or item["loc"] not in meant]
    return [_explain_one(item, schema, data, homes) for item in told]


def _meant_key(loc: tuple[int | str, ...], schema: dict[str, Any]) -> str:
    return did_you_mean(str(loc[-1]), _schema_at(schema, loc[:-1]).get("properties", {}))


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _explain_one(item: ErrorDetails, schema: dict[str, Any], data: object, homes: Mapping[str, str]) -> tuple[str, str]:
    loc, kind = item["loc"], item["type"]
    path = ""
    for part in loc:
        is_index = isinstance(part, int) and isinstance(data, list | tuple)
        path = f"{path}[{part}]" if is_index else join(path, str(part))
        data = _child(data, part)
    if kind == "extra_forbidden":
        return path, _unknown_key(str(loc[-1]), _schema_at(schema, loc[:-1]), homes)
    shown = kind_of(data) if _MAY_HOLD_SECRETS.intersection(loc) else show(data)
    context = item.get("ctx", {})
    cause = context.get("error")
    if isinstance(data, str) and "$" in data and not (isinstance(cause, VariableError) or AS_WRITTEN & {*loc}):
        shown += ", with its variables replaced,"
    accepted = in_words(_schema_at(schema, loc))
    words = _WORDS.get(kind, _ACCEPTED if accepted else _OTHERS)
    if kind == "string_type" and (looks := _looks_like(data)):
        words += f"; put a text that looks like {looks} in quotes"
    plain = f"{item['msg'][:1].lower()}{item['msg'][1:]}"
    return path, words.format(**context, shown=shown, accepted=accepted, plain=plain)


def did_you_mean(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The known name that was probably meant; "" if none is close."""
    normal = re.sub(r"[-\s]+", "_", name.lower())
    if (meant := _MEANT.get(normal, "")) in known:
        return meant
    if len(normal) > 4:
        return next(iter(get_close_matches(normal, list(known), 1, CLOSE)), "")
    alike = [each for each in known if each[:1] == normal[:1]]
    return next(iter(get_close_matches(normal, alike, 1, CLOSE_SHORT)), "")


def _unknown_key(name: str, owner: dict[str, Any], homes: Mapping[str, str]) -> str:
    known: dict[str, Any] = owner.get("properties", {})
    if became := _REMOVED.get(name):
        return f"was removed: {became}"
    if _CREDENTIAL.search(name.lower()):
        tier_type = known.get("type", {}).get("const", "")
        where = _CREDENTIALS.get(tier_type, _CREDENTIALS[""])
        return f"is not a known key; credentials do not belong here: {where} (docs/security.md)"
    if meant := did_you_mean(name, known):
        return f"is not a known key; did you mean {meant}?"
    if name in homes:
        return f"is not a known key here; it belongs {homes[name]}"
    return f"is not a known key; accepted: {', '.join(sorted(known))}"


def value_in_words(schema: Mapping[str, Any], value: object) -> str:
    """A field's value, in the unit that its JSON schema tells: "4 MiB", "10s"."""
    for each in schema.get("anyOf", (schema,)):
        kind = each.get("type", "")
        if isinstance(value, int | float) and not isinstance(kind, str) and (known := _KINDS.get(" ".join(kind))):
            return known[1](value)
    return str(value)


def in_words(schema: Mapping[str, Any]) -> str:
    """What a field accepts, from its JSON schema: "a duration above 0s, up to 1d"."""
    if "anyOf" in schema:
        options = [in_words(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(options) + (", or null" if len(options) < len(schema["anyOf"]) else "")
    if "x-accepted" in schema:
        return str(schema["x-accepted"])
    if "enum" in schema or "const" in schema:
        *others, last = map(str, schema.get("enum", (schema.get("const"),)))
        return f"{', '.join(others)} or {last}" if others else last
    kind = schema.get("type", "")
    word, write = _KINDS.get(kind if isinstance(kind, str) else " ".join(kind), ("", str))
    return word + _range_in_words({name: write(schema[name]) for name in _BOUNDS if name in schema})


_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
#: JSON schema's type -> it in words, and how its bounds are written.
_KINDS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "boolean": ("true or false", str),
    "integer": ("a whole number", str),
    "number": ("a number", "{:g}".format),
    "string": ("a text", str),
    "array": ("a list", str),
    "object": ("a mapping", str),
    "integer string": ("a size", show_size),
    "number string": ("a duration", show_duration),
}


def _range_in_words(bounds: Mapping[str, str]) -> str:
    least, above = bounds.get("minimum"), bounds.get("exclusiveMinimum")
    most, below = bounds.get("maximum"), bounds.get("exclusiveMaximum")
    upper = f"up to {most}" if most else f"below {below}" if below else ""
    if least:
        return f" from {least} {upper.replace('up to', 'to')}" if upper else f" of {least} or more"
    return " " + ", ".join(filter(None, (above and f"above {above}", upper))) if above or upper else ""


def join(parent: str, child: str) -> str:
    """Join the paths of a field and its parent."""
    return f"{parent}.{child}" if parent and child else parent or child


def show(value: object) -> str:
    """A value as an error message may show it: short and printable, otherwise only its kind."""
    if isinstance(value, bool) or value is None:
        return kind_of(value) if value is None else str(value).lower()
    if value and not isinstance(value, (int, float, str)):
        return kind_of(value)
    try:
        text = quoted(value) if isinstance(value, str) else repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        return kind_of(value)
    return text if len(text) <= 80 else text[:77] + ("…'" if isinstance(value, str) else "…")


def kind_of(value: object) -> str:
    """The kind of a value, without its content, which may be secret."""
    kinds = {dict: "a mapping", list: "a list", str: "a text", int: "a number", bytes: "binary", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _looks_like(value: object) -> str:
    """The type that YAML gave to text without quotes; "" if the value cannot come from such text."""
    if isinstance(value, bool):
        return "true or false (yes, no, on, off)"
    return "a number" if isinstance(value, int | float) else ""


def _child(data: object, part: int | str) -> object:
    """An entry of a mapping or an item of a list; None if there is none."""
    if isinstance(data, dict):
        return data.get(part)
    return data[part] if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data) else None


def _schema_at(schema: dict[str, Any], loc: tuple[int | str, ...]) -> dict[str, Any]:
    """The JSON schema of a field; {} if it has none."""
    found: dict[str, Any] = schema
    for part in loc:
        found = found.get("items", {}) if isinstance(part, int) else found.get("properties", {}).get(part, {})
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    return found
