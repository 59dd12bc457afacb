"""Types for config values with a syntax of their own: sizes, durations and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
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
# At most 40 digits, so that a float cannot overflow.
_NUMBER = r"\d{1,40}(?:\.\d{1,40})?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*")
SIZE_MAX = 1 << 60

_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
DURATION_S_MAX = 100 * 365 * 86_400
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_EXPORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):(/.*)", re.ASCII)


def parse_size(value: object) -> int:
    """Parse a size in bytes: "10GiB", "1.5 MiB", "4096" or 4096. KiB, MiB, … are powers of 1024, KB, MB, … of 1000.

    A number may be out of a field's range.

    Raises:
        ValueError: says what would be accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError("is not a size; write a number and a unit, such as 10GiB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def parse_duration(value: object) -> float:
    """Parse a duration in seconds: "500ms", "10s", "30m", "12h", "7d", "2w" or a number of seconds.

    A number may be out of a field's range.

    Raises:
        ValueError: says what would be accepted.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value  # no float() here: it raises OverflowError for a large int
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _SECONDS:
        raise ValueError("is not a duration; write a number and a unit, such as 500ms, 10s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def show_size(size: int) -> str:
    """Format a size exactly, as a configuration accepts it: "64MiB", "4097"."""
    powers = (power for power in range(5, 0, -1) if size and not size % (1 << 10 * power))
    return next((f"{size >> 10 * power}{' KMGTP'[power]}iB" for power in powers), str(size))


def human_bytes(size: float) -> str:
    """Format a size with few digits, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_duration(seconds: float) -> str:
    """Format a duration to the millisecond, as a configuration accepts it: "1d", "90s", "500ms"."""
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
    """Make a path absolute. It is relative to the folder of its configuration file, or else to the working directory.

    Call this when the path is parsed, so that the path stays the same after a change of directory and in other
    processes.
    """
    return os.path.abspath(os.path.join((info.context or {}).get("folder") or "", path))


def _reject_remote(value: object) -> object:
    """Reject ``server:/export`` and URLs, which are not folders."""
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
    """Restrict a text to a pattern; ``accepted`` describes the pattern in words."""
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
