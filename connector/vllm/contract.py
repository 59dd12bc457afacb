"""Checks at an engine's start that the installed vLLM has everything that kvtiers uses.

The check runs before any other module of ``connector.vllm`` is imported. If vLLM renamed or removed something, or
changed a signature, the engine refuses to start, and the error names the change. A release that kvtiers was not tested
with starts if nothing changed.

- ``contract.json``: what kvtiers reads, sets and calls. ``tests/vllm/contract_reader.py`` makes it from the source of
  ``connector.vllm`` and describes its entries.
- ``implements``: the methods that vLLM calls. Each class that inherits from one of vLLM's is compared with it when its
  module is imported.

Tested releases before the newest may lack what the code can do without.
"""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger
from .versions import TESTED, VERSION, release

logger = get_logger(__name__)

SHOWN_MAX = 10  # changes that an error lists

#: Place in vLLM (a module, or a class as ``module:Class``) -> what kvtiers uses of it.
USED: Mapping[str, list[str]] = json.loads(Path(__file__).with_name("contract.json").read_text())

#: Method -> first release of vLLM that calls it.
SINCE: Mapping[str, tuple[int, int]] = {
    "get_load_source": (0, 32),
    "get_transfer_results": (0, 31),
    "on_reset_flushed": (0, 33),
}

#: Public methods that only kvtiers calls, in classes that inherit from vLLM's.
OWN = frozenset(
    {
        "note",
        "note_resets",
        "note_uses",
        "options_of",
        "report",
        "step_of",
        "take_failed_blocks",
        "take_failed_requests",
        "take_stats",
    }
)

_C = TypeVar("_C", bound=type)


def check_contract(version: str = VERSION) -> None:
    """Refuse a vLLM that lacks something kvtiers uses. Log a warning for a release not tested with kvtiers.

    Raises:
        ConfigError: lists what is missing or changed.
    """
    installed = _tested(version)
    _refuse(changes(installed), version)
    if installed is None:
        logger.warning(
            "vLLM %s was not tested with kvtiers (%s to %s were). It has everything that kvtiers uses, so the engine "
            "starts. It does not read blocks that other releases stored",
            version,
            TESTED[0],
            TESTED[-1],
        )


def implements(cls: _C) -> _C:
    """Decorator: compare a class with the vLLM classes that it inherits from.

    vLLM calls every public method except ``OWN``. So vLLM's class must have the method, with the same parameter names
    in the same order. Only parameters that have a default in kvtiers may be missing in vLLM.

    Raises:
        ConfigError: lists what changed.
    """
    _refuse(changed_methods(cls, _tested(VERSION)), VERSION)
    return cls


def _tested(version: str) -> tuple[int, int] | None:
    """The release; None for an untested release, which must have everything."""
    installed = release(version)
    return installed if installed is not None and "{}.{}".format(*installed) in TESTED else None


def _refuse(changed: Iterator[str], version: str) -> None:
    if found := list(dict.fromkeys(changed)):
        more = f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise ConfigError(
            f"version {version!r} lacks what kvtiers uses of vLLM: {'; '.join(found[:SHOWN_MAX])}{more}. Install a "
            f"release that kvtiers was tested with ({TESTED[0]} to {TESTED[-1]}), or a newer kvtiers",
            field="vllm",
        )


def changed_methods(cls: type, installed: tuple[int, int] | None) -> Iterator[str]:
    """Each difference between a class' methods and those of its vLLM base classes, as one sentence."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("vllm.")]
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"{bases[0].__name__}.{name} is new and abstract"
    for name, ours in vars(cls).items():
        is_private = name.startswith("_") and name != "__init__"
        if is_private or name in OWN or not isinstance(ours, FunctionType | classmethod):
            continue
        base = next((base for base in bases if name in vars(base)), None)
        if base is None or (theirs := _parameters(base, name)) is None:
            if name != "__init__" and (installed is None or installed >= SINCE.get(name, installed)):
                yield f"{bases[0].__name__}.{name} is gone"
            continue
        known = _parameters(cls, name) or []
        optional = {each.name for each in known if each.default is not inspect.Parameter.empty}
        names = [each.name for each in theirs]
        if names != [each.name for each in known if each.name in names or each.name not in optional]:
            yield _takes(base, name, theirs, ", ".join(map(_shown, known)))


def changes(installed: tuple[int, int] | None) -> Iterator[str]:
    """Each difference between the installed vLLM and ``USED``, as one sentence.

    Args:
        installed: the release. None: an untested release, which must have every entry.
    """
    may_lack = installed is not None and installed != release(TESTED[-1])
    for place, entries in USED.items():
        needed = [entry.lstrip("?") for entry in entries if not (may_lack and entry.startswith("?"))]
        owner, problem = _find(place) if needed else (None, "")
        if problem:
            yield problem
        elif needed:
            for entry in needed:
                yield from _changed_function(owner, entry) if entry.endswith(")") else _gone(owner, entry)


def _find(place: str) -> tuple[Any, str]:
    """The module or class of a place and "", or None and why it cannot be found."""
    module_name, _, name = place.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as e:
        return None, f"{module_name} cannot be imported ({e})"
    if not name:
        return module, ""
    return (getattr(module, name), "") if hasattr(module, name) else (None, f"{module_name}.{name} is gone")


def _gone(owner: Any, name: str) -> Iterator[str]:
    # hasattr: a module may create an attribute on first use, as vllm.platforms does.
    if not hasattr(owner, name) and name not in attributes(owner):
        yield f"{owner.__name__}.{name} is gone"


def _changed_function(owner: Any, entry: str) -> Iterator[str]:
    """Report a function that rejects the arguments that kvtiers passes, or requires others."""
    name, _, arguments = entry.removesuffix(")").partition("(")
    parameters = _parameters(owner, name)
    if parameters is None:
        yield f"{owner.__name__}.{name} is gone"
        return
    passed = arguments.split(", ")
    by_place, by_name = passed.count("_"), [each[:-1] for each in passed if each.endswith("=")]
    try:  # what kvtiers passes by * or ** has a default
        inspect.Signature(parameters).bind(*range(by_place), **dict.fromkeys(by_name))
    except TypeError:
        yield _takes(owner, name, parameters, arguments)


def _parameters(owner: Any, name: str) -> list[inspect.Parameter] | None:
    """A function's parameters without ``self``; None if the function does not exist."""
    function = owner if name == "__init__" else getattr(owner, name, None)
    if not callable(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    is_bound = name == "__init__" or isinstance(inspect.getattr_static(owner, name), classmethod | staticmethod)
    return parameters[1:] if isinstance(owner, type) and not is_bound else parameters


def _takes(owner: Any, name: str, theirs: list[inspect.Parameter], known: str) -> str:
    full_name = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
    return f"{full_name} takes ({', '.join(map(_shown, theirs))}), and kvtiers expects ({known})"


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}="


def attributes(owner: Any) -> frozenset[str]:
    """Attribute names of a module or class, including those that a class's constructor assigns."""
    names = set(dir(owner))
    for cls in getattr(owner, "__mro__", ()):
        names.update(vars(cls).get("__annotations__", ()))
        for maker in ("__init__", "__post_init__"):
            code = getattr(inspect.unwrap(vars(cls).get(maker, object.__init__)), "__code__", None)
            names.update(_stored(code) if code is not None else ())
    return frozenset(names)


def _stored(code: CodeType) -> Iterator[str]:
    """Attributes that a method assigns to its object, not those that it reads or assigns to another object."""
    own = code.co_varnames[0]
    for before, each in pairwise(dis.get_instructions(code)):
        loaded = before.argval[-1:] if isinstance(before.argval, tuple) else (before.argval,)  # 3.13 loads two at once
        if each.opname == "STORE_ATTR" and own in loaded:
            yield each.argval
