"""The part of an engine's configuration that belongs to its namespace: everything except the fields in ``uncounted``.

Every field of every config object that vLLM hands over counts, and so does every variable of vLLM's that is set. An
option that kvtiers does not know therefore starts a new namespace. The price is a cold cache, never a wrong token. A
field at its default does not count, so that releases with more or fewer fields agree. ``conditions`` has the options
that count only in some engines, ``variables`` those of the environment.

The scheduler's process computes the identity when vLLM creates its connector. The workers of SharedStorageConnector
use the scheduler's identity, because their configs differ: they have ranks, and loading the model changes them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import os
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Literal

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from ..model_files import value_digest
from . import conditions, variables, versions
from .logs import log_once
from .uncounted import FORMER, FORMER_ON_CPU, IGNORED, IGNORED_VARIABLES, USUAL
from .variables import PREFIX, Shown

logger = get_logger(__name__)

#: Releases that share blocks if nothing else differs (tested by ``make e2e``). Options with the same name have the same
#: default in all of them. Every other release has namespaces of its own.
ERA = frozenset((0, minor) for minor in range(28, 34))

_DEVICE = "device_config.device_type"
FOREIGN_MAX = 10  # names of variables in one log line


def identity(
    vllm_config: Any, environ: Mapping[str, str] = os.environ, *, ignore: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options of an engine that count and are not at their defaults: name -> JSON value.

    Args:
        vllm_config: vLLM's VllmConfig.
        ignore: names of options that do not count, because the operator says that they do not change the KV.

    Raises:
        ConfigError: the config is not a dataclass, so its fields are unknown; or a name in ``ignore`` is not an option.
    """
    if not dataclasses.is_dataclass(vllm_config):
        raise ConfigError(
            f"is {type(vllm_config).__name__}, which is not a dataclass, so its fields are unknown",
            field="vllm_config",
        )
    found = dict(_counted(vllm_config, "")) | dict(variables.counted(environ, _ignored_variables()))
    without_effect = tuple(conditions.without_effect(vllm_config))
    found = {name: value for name, value in found.items() if not name.startswith(without_effect)}
    if _DEVICE in found:
        found[_DEVICE] = Shown(found[_DEVICE])
        former = {**FORMER, **(FORMER_ON_CPU if found[_DEVICE] == "cpu" else {})}
        found |= {name: Shown(value) if isinstance(value, str) else value for name, value in former.items()}
    found |= conditions.with_effect(vllm_config)
    if versions.release() not in ERA:
        found["vllm"] = Shown(versions.VERSION)
    for name in ignore:
        if name not in found:
            _check_option(vllm_config, name)
    return {name: value for name, value in sorted(found.items()) if name not in ignore}


def identity_digest(found: Mapping[str, Any]) -> str | None:
    """Digest of an ``identity``; None if it is empty, so all options are at their defaults."""
    return f"engine:{value_digest(found)}" if found else None


def readable(found: Mapping[str, Any]) -> dict[str, str]:
    """An ``identity`` that is safe to show: digests replace values that may be secrets."""
    return {name: _shown(value) for name, value in found.items()}


def log_identity(found: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Log the options that count and that vLLM did not derive itself, and the ``VLLM_*`` variables that are not vLLM's.

    Call this in the scheduler's process. It logs once per process.
    """
    chosen = {name: value for name, value in found.items() if not _is_derived(name, value)}
    if chosen:
        shown = ", ".join(f"{name}={value}" for name, value in readable(chosen).items())
        log_once(logger, logging.INFO, f"part of the namespace, as not at its default: {shown}")
    names = variables.foreign(environ, _ignored_variables())
    if names:
        more = f" and {len(names) - FOREIGN_MAX} more" if len(names) > FOREIGN_MAX else ""
        text = f"not part of the namespace, as vLLM {versions.VERSION} has no such variables: "
        log_once(logger, logging.INFO, f"{text}{', '.join(names[:FOREIGN_MAX])}{more}")


def is_ignored(owner: type, name: str) -> bool:
    """Whether ``uncounted.IGNORED`` lists a field of a config class."""
    return any(not {name, "*"}.isdisjoint(_ignored_fields(cls.__name__)) for cls in owner.__mro__)


def _is_derived(name: str, value: Any) -> bool:
    """Whether vLLM gives an option this value where nothing else is asked for."""
    former = [table[name] for table in (FORMER, FORMER_ON_CPU) if name in table]
    return value in (*former, *USUAL.get(name, ()))


def _check_option(vllm_config: Any, name: str) -> None:
    """Refuse a misspelled option, which would silently have no effect."""
    if name.startswith(PREFIX) or name == "vllm":
        return
    at = vllm_config
    for part in name.split("."):
        names = [field.name for field in dataclasses.fields(at)] if dataclasses.is_dataclass(at) else []
        if part not in names:
            if at is None:  # this engine does not have the object
                return
            accepted = difflib.get_close_matches(part, names, n=3) or names
            raise ConfigError(
                f"{name} is not an option of vLLM {versions.VERSION}: {part} is not accepted, "
                f"{type(at).__name__} has {', '.join(accepted)}",
                field="identity.ignore",
            )
        at = getattr(at, part, None)


def _counted(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    owner: Any = type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if is_ignored(owner, field.name):
            continue
        place = f"{path}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _counted(value, f"{place}.")
        elif (plain := _plain(value, place)) != _plain(_default(field), place):
            is_choice = isinstance(plain, str) and plain in _choices(owner, field.name)
            yield place, Shown(plain) if is_choice else plain


def _default(field: dataclasses.Field[Any]) -> Any:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # A pydantic dataclass may have its FieldInfo there.
    if (factory := getattr(default, "default_factory", None)) is not None:
        return factory()
    return getattr(default, "default", default)


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


def _plain(value: Any, place: str) -> Any:
    """Convert a value to JSON types. The result is the same in every process and for every order of keys."""
    if isinstance(value, enum.Enum):
        plain = value.value if isinstance(value, bool | int | float | str) else f"{type(value).__name__}.{value.name}"
        return Shown(plain) if isinstance(plain, str) else plain
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each, place) for name, each in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_plain(each, place) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(each, place)) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_counted(value, ""))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return Shown(f"{value.__module__}.{value.__qualname__}")
    if type(value).__module__ == "torch":  # a dtype or a device
        return Shown(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if "PydanticUndefined" not in kind and kind != "dataclasses._MISSING_TYPE":  # no value: nothing is left out
        text = f"{place} is a {kind}: only its type is part of the namespace, not its value"
        log_once(logger, logging.WARNING, text)
    return kind


def _shown(value: Any) -> str:
    is_shown = value is None or isinstance(value, bool | int | float | Shown)
    return str(value) if is_shown else f"({value_digest(value)[:8]})"


@cache
def _ignored_fields(owner: str) -> frozenset[str]:
    return frozenset(name for names in IGNORED.get(owner, {}).values() for name in names.split())


@cache
def _ignored_variables() -> frozenset[str]:
    return frozenset(name for names in IGNORED_VARIABLES.values() for name in names.split())
