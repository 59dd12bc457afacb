"""Converts pydantic's errors to sentences about the mistakes of a configuration and the accepted values."""

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
_MAY_HOLD_SECRETS = {"options", "storage_options", "url", "endpoint_url", "keys_file", "keys_env"}
_CREDENTIAL = re.compile(
    r"secret|passw|passphrase|token|credential|connection_?string|(access|api|account|private|sas|shared)_?key|signature"
)
_CREDENTIALS = (
    "credentials do not belong here: S3's come from the environment, ~/.aws/credentials (choose a profile) or a role, "
    "those of fsspec drivers from their own environment variables, keys for encrypt from keys_file or keys_env "
    "(docs/security.md)"
)
#: Options of commits before 0.1.0 that have a successor.
_REPLACED = {
    "auth": "write encrypt: aes-gcm, which authenticates as well",
    "request_timeout": "a request may take two thirds of job_deadline_s",
    "sse_kms_key_id": "write sse: with the key's ARN or id",
    "addressing_style": "for virtual, write endpoint_url: https://BUCKET.HOST",
    "role_arn": "write the role into a profile of ~/.aws/config, and profile: its name",
    "verify": "write the server's certificate authority into ca_bundle",
}
_ACCEPTED = "{shown} is not accepted; write {accepted}"
_TOO_SHORT = "{shown} is too short; write at least {min_length} character(s)"
_TOO_LONG = "{shown} is too long; write at most {max_length} characters"
#: pydantic's error type -> our message. ``accepted`` describes accepted values; other names are in the error's context.
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


def explain(error: ValidationError, model: type[BaseModel], data: object) -> list[tuple[str, str]]:
    """Explain pydantic's errors, as (field, message).

    Args:
        data: the validated data. pydantic's errors hold values whose variables were replaced, which may be secret.
    """
    schema = _schema_of(model)
    items = error.errors(include_url=False)
    # A misspelt key that is required is one mistake, not two.
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"]
    meant = {(*loc[:-1], _meant_key(loc, schema)) for loc in unknown}
    told = [item for item in items if item["type"] != "missing" or item["loc"] not in meant]
    return [_explain_one(item, schema, data) for item in told]


def _meant_key(loc: tuple[int | str, ...], schema: dict[str, Any]) -> str:
    return did_you_mean(str(loc[-1]), _schema_at(schema, loc[:-1]).get("properties", {}))


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _explain_one(item: ErrorDetails, schema: dict[str, Any], data: object) -> tuple[str, str]:
    loc, kind = item["loc"], item["type"]
    path = ""
    for part in loc:
        is_index = isinstance(part, int) and isinstance(data, list | tuple)
        path = f"{path}[{part}]" if is_index else join(path, str(part))
        data = _child(data, part)
    if kind == "extra_forbidden":
        return path, _unknown_key(str(loc[-1]), _schema_at(schema, loc[:-1]))
    shown = kind_of(data) if _MAY_HOLD_SECRETS.intersection(loc) else show(data)
    context = item.get("ctx", {})
    cause = context.get("error")
    if isinstance(data, str) and "$" in data and not (isinstance(cause, VariableError) or AS_WRITTEN & {*loc}):
        shown += ", with its variables replaced,"
    accepted = in_words(_schema_at(schema, loc))
    words = _WORDS.get(kind, _ACCEPTED if accepted else _OTHERS)
    plain = f"{item['msg'][:1].lower()}{item['msg'][1:]}"
    return path, words.format(**context, shown=shown, accepted=accepted, plain=plain)


def did_you_mean(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return the known name that was probably meant; "": no known name is similar."""
    normal = re.sub(r"[-\s]+", "_", name.lower())
    return next(iter(get_close_matches(normal, list(known), 1, CLOSE)), "")


def _unknown_key(name: str, owner: dict[str, Any]) -> str:
    known: dict[str, Any] = owner.get("properties", {})
    if successor := _REPLACED.get(name):
        return f"was removed: {successor}"
    if _CREDENTIAL.search(name.lower()):
        return f"is not a known key; {_CREDENTIALS}"
    if meant := did_you_mean(name, known):
        return f"is not a known key; did you mean {meant}?"
    return f"is not a known key; accepted: {', '.join(sorted(known))}"


def value_in_words(schema: Mapping[str, Any], value: object) -> str:
    """Format a field's value with the unit from its JSON schema: "4 MiB", "10s"."""
    for each in schema.get("anyOf", (schema,)):
        kind = each.get("type", "")
        if isinstance(value, int | float) and not isinstance(kind, str) and (known := _KINDS.get(" ".join(kind))):
            return known[1](value)
    return str(value)


def in_words(schema: Mapping[str, Any]) -> str:
    """Describe a field's accepted values, from its JSON schema: "a duration above 0s, up to 1d"."""
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
#: Type in JSON schema -> its name, and a function that formats its bounds.
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
    """Format a value for an error message: the value if it is short and printable, otherwise only its kind."""
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
    """Name the kind of a value, but not its content, which may be secret."""
    kinds = {dict: "a mapping", list: "a list", str: "a text", int: "a number", bytes: "binary", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _child(data: object, part: int | str) -> object:
    """Return an entry of a mapping or an item of a list; None: it does not exist."""
    if isinstance(data, dict):
        return data.get(part)
    return data[part] if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data) else None


def _schema_at(schema: dict[str, Any], loc: tuple[int | str, ...]) -> dict[str, Any]:
    """Return the JSON schema of a field; {}: it has no schema."""
    found: dict[str, Any] = schema
    for part in loc:
        found = found.get("items", {}) if isinstance(part, int) else found.get("properties", {}).get(part, {})
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    return found
