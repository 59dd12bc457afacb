"""Finds the engine's options that belong to the namespace ("count"), and converts their values to JSON types.

Every field of every config object counts, unless a table says why it does not. An option that no table lists counts,
too, so it starts a new namespace: the cache is cold, but no token is wrong. A field at its default does not count, so
that releases with more or fewer fields agree.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Literal

from ...tiers.plain_logs import get_logger, log_once
from .model_files import value_digest

logger = get_logger(__name__)


class Shown(str):
    """A text that is safe to log: an option's choice, a number or a name in code. Equal to the same ``str``."""

    __slots__ = ()


class Counts(enum.Enum):
    """Whether an option belongs to the namespace. An UNKNOWN option does, with a warning in the log."""

    YES = enum.auto()
    NO = enum.auto()
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True)
class Tables:
    """Lists which fields of an engine's config classes count.

    Attributes:
        ignored: class -> fields that cannot change the meaning of stored KV. ``*``: all fields.
        counting: class -> fields that count.
    """

    ignored: Mapping[str, Collection[str]]
    counting: Mapping[str, Collection[str]]

    def counts(self, owner: type, name: str) -> Counts:
        """Whether a field of a class counts."""
        classes = [cls.__name__ for cls in owner.__mro__]
        if any(not {name, "*"}.isdisjoint(self.ignored.get(each, ())) for each in classes):
            return Counts.NO
        return Counts.YES if any(name in self.counting.get(each, ()) for each in classes) else Counts.UNKNOWN


def counted(config: Any, tables: Tables, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value, in JSON types, of the fields that count and are not at their defaults.

    Args:
        config: a dataclass. Its fields may be dataclasses.
        within: prefix of the names, with a dot at its end.
    """
    owner: Any = type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if tables.counts(owner, field.name) is Counts.NO:
            continue
        place = f"{within}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from counted(value, tables, f"{place}.")
        elif (plain := _plain(value, place, tables)) != _plain(default(field), place, tables):
            is_choice = isinstance(plain, str) and plain in _choices(owner, field.name)
            yield place, Shown(plain) if is_choice else plain


def unknown(config: Any, tables: Tables, names: Collection[str]) -> Iterator[str]:
    """Yield the names from ``counted`` that no table lists."""
    for name in names:
        *path, last = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part, None)
        fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
        if any(field.name == last for field in fields) and tables.counts(type(owner), last) is Counts.UNKNOWN:
            yield name


def identity_digest(found: Mapping[str, Any]) -> str | None:
    """Digest of the options that count; None if all options are at their defaults."""
    return f"engine:{value_digest(found)}" if found else None


def readable(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the options with texts that are safe to log: digests replace values that may be secrets."""
    return {name: _shown(value) for name, value in found.items()}


def default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field."""
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # In a pydantic dataclass, the default may be a FieldInfo.
    if (factory := getattr(value, "default_factory", None)) is not None:
        return factory()
    return getattr(value, "default", value)


@cache
def _choices(owner: type, name: str) -> frozenset[Any]:
    """The values that a field's type lists."""
    try:
        left = [typing.get_type_hints(owner).get(name)]
    except Exception:  # noqa: BLE001 - a type that is imported for type checkers only
        return frozenset()
    found: set[Any] = set()
    while left:
        kind = left.pop()
        if typing.get_origin(kind) is Literal:
            found.update(typing.get_args(kind))
        else:
            left += typing.get_args(kind)
    return frozenset(found)


def _plain(value: Any, place: str, tables: Tables) -> Any:
    """Convert a value to JSON types. The result is the same in every process and for every order of keys."""
    if isinstance(value, enum.Enum):
        plain = value.value if isinstance(value, bool | int | float | str) else f"{type(value).__name__}.{value.name}"
        return Shown(plain) if isinstance(plain, str) else plain
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {
            str(name): _plain(each, place, tables)
            for name, each in sorted(value.items(), key=lambda item: str(item[0]))
        }
    if isinstance(value, list | tuple):
        return [_plain(each, place, tables) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(each, place, tables)) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(counted(value, tables))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return Shown(f"{value.__module__}.{value.__qualname__}")
    if type(value).__module__ == "torch":  # a dtype or a device
        return Shown(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if "PydanticUndefined" not in kind and kind != "dataclasses._MISSING_TYPE":  # these mean "no value"
        text = f"{place} is a {kind}: only its type is part of the namespace, not its value"
        log_once(logger, logging.WARNING, text)
    return kind


def _shown(value: Any) -> str:
    is_shown = value is None or isinstance(value, bool | int | float | Shown)
    return str(value) if is_shown else f"({value_digest(value)[:8]})"
