"""Types for config values with a syntax of their own: sizes, durations and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import CoreSchema
from pydantic_core.core_schema import float_schema, int_schema, no_info_before_validator_function

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_UNIT_WORDS = {word: f"{word[0].upper()}iB" for word in ("kilo", "meg", "gig", "tera", "peta")}
# At most 40 digits, so that a float cannot overflow.
_NUMBER = r"\d{1,40}(?:\.\d{1,40})?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*")
SIZE_MAX = 1 << 60

_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SECOND_WORDS = {
    "msec": "ms",
    "milli": "ms",
    "millisecond": "ms",
    "sec": "s",
    "second": "s",
    "minute": "m",
    "hour": "h",
    "hr": "h",
    "day": "d",
    "week": "w",
}
DURATION_S_MAX = 100 * 365 * 86_400
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_EXPORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):(/.*)", re.ASCII)


class OutOfRangeError(ValueError):
    """A number that no size or duration may have. A field may accept less."""


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
            meant = _meant(value, _UNITS, _UNIT_WORDS) or "a number and a unit, such as 10GiB"
            raise ValueError(f"is not a size; write {meant}")
        size = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if not 0 <= size <= SIZE_MAX:
        raise OutOfRangeError("is out of range; accepted is 0 up to 1024PiB")
    return size


def parse_duration(value: object) -> float:
    """Parse a duration in seconds: "500ms", "10s", "30m", "12h", "7d", "2w" or a number of seconds.

    Raises:
        ValueError: says what would be accepted.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value  # no float() yet: it raises OverflowError for a large int
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in _SECONDS:
            meant = _meant(value, _SECONDS, _SECOND_WORDS) or "a number and a unit, such as 500ms, 10s, 30m, 12h or 7d"
            raise ValueError(f"is not a duration; write {meant}")
        seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 <= seconds <= DURATION_S_MAX:
        raise OutOfRangeError("is out of range; accepted is 0s up to 100 years")
    return float(seconds)


def _meant(value: object, units: Iterable[str], words: Mapping[str, str]) -> str:
    """The value that was probably meant, only if all of it is understood: the amount must not change. "": none."""
    near = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if near is None or len(near[1]) > 25:
        return ""
    unit = near[2].lower()
    found = [each for each in units if each.lower() == unit] or [
        words[word] for word in (unit, unit.rstrip("s")) if word in words
    ]
    return f"{near[1]}{found[0]}" if found else ""


def show_size(size: int) -> str:
    """A size as it may be written, exactly: "64MiB", "4097"."""
    powers = (power for power in range(5, 0, -1) if size and not size % (1 << 10 * power))
    return next((f"{size >> 10 * power}{' KMGTP'[power]}iB" for power in powers), str(size))


def show_duration(seconds: float) -> str:
    """A duration as it may be written, exactly to the millisecond: "1d", "90s", "500ms"."""
    milliseconds = round(seconds * 1000)
    if not milliseconds:
        return "0s"
    units = ((unit, round(1000 * _SECONDS[unit])) for unit in ("d", "h", "m", "s", "ms"))
    return next(f"{milliseconds // of_unit}{unit}" for unit, of_unit in units if not milliseconds % of_unit)


def _expand_home(value: object) -> object:
    if not isinstance(value, str):
        return value
    path = os.path.expanduser(value)
    if "\0" in path:
        raise ValueError("contains a NUL character, which a path cannot contain")
    if path.startswith("~"):
        raise ValueError("begins with the home folder of an unknown user; write ./ before a folder of that name")
    return path


def absolute(path: str, info: ValidationInfo) -> str:
    """Make a path absolute. It is relative to the folder of the file that it is written in, else to the process's.

    Done when the path is parsed, so that a later change of directory or a process started elsewhere finds the same.
    """
    return os.path.abspath(os.path.join((info.context or {}).get("folder") or "", path))


def _reject_remote(value: object) -> object:
    """Reject what mounts or clients take, and a folder is not: ``server:/export`` and URLs."""
    if not isinstance(value, str):
        return value
    if _URL.match(value):
        raise ValueError("is a URL, not a folder; write the folder's path, or use type: s3 or type: fsspec")
    if (export := _EXPORT.fullmatch(value)) is not None:
        raise ValueError(
            f"is an NFS export, not a folder; mount it (mount -t nfs {export[0]} /mnt/kv) and write the mount point, "
            "such as /mnt/kv"
        )
    return value


def matching(pattern: str, accepted: str) -> Any:
    """Restrict a text to a pattern; ``accepted`` says in words what matches."""
    return Field(pattern=pattern, json_schema_extra={"x-accepted": accepted})


@dataclass(frozen=True, slots=True)
class SizeIn:
    """The type of a field for a size in bytes, of ``least`` or more."""

    least: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_before_validator_function(parse_size, int_schema(ge=self.least, le=SIZE_MAX))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return _in_schema("integer", _UNITS) | {"minimum": self.least, "maximum": SIZE_MAX}


@dataclass(frozen=True, slots=True)
class DurationIn:
    """The type of a field for a duration in seconds, from ``least`` (or above it) to ``most``."""

    least: float = 0
    most: float = DURATION_S_MAX
    above: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        schema = float_schema(gt=self.least) if self.above else float_schema(ge=self.least)
        schema["le"] = self.most
        return no_info_before_validator_function(parse_duration, schema)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.above else "minimum"
        return _in_schema("number", _SECONDS) | {lower: self.least, "maximum": self.most}


def _in_schema(kind: str, units: Iterable[str]) -> dict[str, Any]:
    """JSON schema of a number that may have a unit. In JSON schema, a pattern applies to strings only."""
    unit = "|".join(filter(None, units))
    return {"type": [kind, "string"], "pattern": rf"^\s*{_NUMBER}\s*({unit})?\s*$"}


Size = Annotated[int, SizeIn()]
ExpandedPath = Annotated[str, BeforeValidator(_expand_home), Field(min_length=1, max_length=3072)]
AbsolutePath = Annotated[ExpandedPath, AfterValidator(absolute), Field(json_schema_extra={"x-accepted": "a path"})]
Folder = Annotated[AbsolutePath, BeforeValidator(_reject_remote)]
