"""Compares an installed engine with the names, calls and overridden methods that kvtiers uses."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any


def changed_methods(
    cls: type, package: str, own: Collection[str], may_lack: Callable[[str], bool] = lambda _: False
) -> Iterator[str]:
    """Yield each difference between a class's methods and those of its base classes in the engine, as a sentence.

    The engine calls every public method of ``cls``. So the engine's base class must have each of these methods, with
    the same parameter names in the same order. Only parameters that have a default in kvtiers may be missing in the
    engine.

    Args:
        package: the engine's top package.
        own: public methods that only kvtiers calls.
        may_lack: tells whether a release may lack a method, by its name.
    """
    bases = [base for base in cls.__mro__ if base.__module__.startswith(f"{package}.")]
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"{bases[0].__name__}.{name} is new and abstract"
    for name, ours in vars(cls).items():
        is_private = name.startswith("_") and name != "__init__"
        if is_private or name in own or not isinstance(ours, FunctionType | classmethod):
            continue
        base = next((base for base in bases if name in vars(base)), None)
        if base is None or (theirs := _parameters(base, name)) is None:
            if name != "__init__" and not may_lack(name):
                yield f"{bases[0].__name__}.{name} is gone"
            continue
        known = _parameters(cls, name) or []
        optional = {each.name for each in known if each.default is not inspect.Parameter.empty}
        names = [each.name for each in theirs]
        if names != [each.name for each in known if each.name in names or each.name not in optional]:
            yield _takes(base, name, theirs, ", ".join(map(_shown, known)))


def differences(used: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield each name or call that kvtiers uses and that the installed engine lacks or has changed, as a sentence.

    Args:
        used: place (a module, or a class as ``module:Class``) -> names, or calls as ``name(_, key=)``.
    """
    for place, entries in used.items():
        owner, problem = _find(place)
        if problem:
            yield problem
            continue
        for entry in entries:
            yield from _changed_function(owner, entry) if entry.endswith(")") else _gone(owner, entry)


def _find(place: str) -> tuple[Any, str]:
    """Find the module or class of a place. Returns it and "", or None and the reason why it was not found."""
    module_name, _, name = place.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as e:
        return None, f"{module_name} cannot be imported ({e})"
    if not name:
        return module, ""
    return (getattr(module, name), "") if hasattr(module, name) else (None, f"{module_name}.{name} is gone")


def _gone(owner: Any, name: str) -> Iterator[str]:
    # hasattr: a module may create an attribute on first use.
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
    try:  # arguments that kvtiers passes by * or ** have defaults in the engine
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
    """Names of the attributes that a method assigns to its own object."""
    own = code.co_varnames[0]
    for before, each in pairwise(dis.get_instructions(code)):
        loaded = before.argval[-1:] if isinstance(before.argval, tuple) else (before.argval,)  # 3.13 loads two at once
        if each.opname == "STORE_ATTR" and own in loaded:
            yield each.argval
