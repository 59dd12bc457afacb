"""Types for config values with a syntax of their own: sizes, durations and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from kvtiers.tiers.errors import public_url

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_UNIT_WORDS = ("kilo", "meg", "gig", "tera", "peta")
# At most 40 digits, so that a float cannot overflow.
_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([A-Za-z]*)\s*")
_SIZE_MAX = 1 << 60
_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})", re.ASCII)  # as in os.path.expandvars, which keeps unset ones


def parse_size(value: object) -> int:
    """Parse a size in bytes: "10GiB", "1.5 MiB", "4096" or 4096. KiB, MiB, … are powers of 1024, KB, MB, … of 1000.

    Raises:
        ValueError: says what would be accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"is not a size; write {_suggested_size(value)}")
        size = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if not 0 <= size <= _SIZE_MAX:
        raise ValueError("is out of range; accepted is 0 up to 1024PiB")
    return size


def _suggested_size(value: object) -> str:
    """The size that was probably meant, only if all of it is understood (the amount must not change); or an example."""
    near = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    if near is not None:
        number, unit = near[1], near[2].lower()
        meant = [each for each in _UNITS if each.lower() == unit]
        meant += [f"{word[0].upper()}iB" for word in _UNIT_WORDS if unit.rstrip("s") == word]
        if meant:
            return f"{number}{meant[0]}"
    return "a number and a unit, such as 10GiB"


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_DURATION_S_MAX = 100 * 365 * 86_400


def parse_duration(value: object) -> float:
    """Parse a duration in seconds: "7d", "12h", "90 min", "30s", "2w" or a number of seconds.

    Raises:
        ValueError: says what would be accepted.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value  # no float() yet: it raises OverflowError for a large int
    else:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in _SECONDS:
            raise ValueError("is not a duration; write 7d, 12h, 30min or a number of seconds")
        seconds = float(match[1]) * _SECONDS[match[2]]
    if not 1 <= seconds <= _DURATION_S_MAX:
        raise ValueError("is out of range; accepted is 1s up to 100 years")
    return float(seconds)


def _expand_path(value: object) -> object:
    if not isinstance(value, str):
        return value
    for named in _VARIABLE.findall(public_url(value)):
        if os.environ.get(named.strip("${}")) == "":
            raise ValueError(f"names the variable {named}, which is empty")
    path = os.path.expanduser(os.path.expandvars(value))
    if "\0" in path:
        raise ValueError("contains a NUL character, which a path cannot contain")
    unset = _VARIABLE.search(public_url(path))  # a password may have a dollar sign
    if unset is not None:
        raise ValueError(f"names the variable {unset[0]}, which is not set")
    if path.startswith("~"):
        raise ValueError("begins with the home folder of an unknown user; write ./ before a folder of that name")
    return path


def _in_schema(kind: str, number: str, units: Iterable[str]) -> dict[str, Any]:
    """JSON schema of a number that may have a unit. In JSON schema, a pattern applies to strings only."""
    unit = "|".join(filter(None, units))
    return {"type": [kind, "string"], "pattern": rf"^\s*{number}\s*({unit})?\s*$"}


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(json_schema_extra=_in_schema("integer", r"\d{1,40}(\.\d{1,40})?", _UNITS)),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(json_schema_extra=_in_schema("number", r"\d+(\.\d+)?", _SECONDS)),
]
#: Made absolute when parsed, so that a later change of directory or a process started elsewhere finds the same folder.
AbsolutePath = Annotated[
    str,
    BeforeValidator(_expand_path),
    Field(min_length=1, max_length=3072),
    AfterValidator(os.path.abspath),
]
ExpandedPath = Annotated[str, BeforeValidator(_expand_path), Field(min_length=1, max_length=3072)]
