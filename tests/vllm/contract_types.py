"""The types of vLLM's objects, for ``contract_reader``: by vLLM's annotations, and by what its constructors assign."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

PACKAGE = "kvtiers.connector.vllm"


class Value(NamedTuple):
    """What an expression may be.

    Attributes:
        kind: "is" (the object itself), "a" (an instance of the type), "method" (of the class, by ``name``).
        may_lack: releases without it are known.
    """

    kind: str
    of: Any
    name: str = ""
    may_lack: bool = False


Values = frozenset[Value]
NOTHING: Values = frozenset()


def is_vllms(thing: Any) -> bool:
    """Whether a module or class is vLLM's."""
    name = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None) or ""
    return str(name).partition(".")[0] == "vllm"


def is_ours(thing: Any) -> bool:
    """Whether a function or class is of ``connector.vllm``."""
    return str(getattr(thing, "__module__", "")).startswith(PACKAGE)


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@cache
def names_for_types(module: Any) -> dict[str, Any]:
    """A module's names, and those that it imports for type checkers only."""
    found: dict[str, Any] = dict(vars(typing))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if is_for_type_checkers(node):
            for each in ast.walk(node):
                if isinstance(each, ast.ImportFrom) and each.module:
                    name = "." * each.level + each.module
                    for alias in each.names:
                        try:
                            imported = importlib.import_module(name, module.__package__)
                            found[alias.asname or alias.name] = getattr(imported, alias.name)
                        except (ImportError, AttributeError):
                            continue
    found |= vars(module)
    return found


def resolved(hint: Any, module: Any) -> Any:
    """A type from an annotation; None if it names what cannot be imported."""
    for _ in range(3):
        if not isinstance(hint, str | typing.ForwardRef):
            return hint
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        try:
            hint = eval(text, names_for_types(module))
        except Exception:
            return None
    return None


def parts(hint: Any, module: Any) -> Iterator[Any]:
    """The members of a union that may be, or hold, objects of vLLM."""
    hint = resolved(hint, module)
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated, typing.Final, typing.ClassVar):
        for each in typing.get_args(hint):
            yield from parts(each, module)
    elif isinstance(hint, typing.TypeVar):
        yield from parts(hint.__bound__, module) if hint.__bound__ else ()
    elif hint is not None and hint is not type(None) and hint is not Any:
        yield hint


def instances(hint: Any, module: Any, *, may_lack: bool = False) -> Values:
    """Instances of an annotated type."""
    try:
        return frozenset(Value("a", (each, module.__name__), may_lack=may_lack) for each in parts(hint, module))
    except TypeError:  # not hashable
        return NOTHING


@cache
def fields_of(cls: type) -> Mapping[str, Values]:
    """The types of a class' own attributes, by its annotations and by what its constructor assigns."""
    module = sys.modules[cls.__module__]
    found = {name: instances(hint, module) for name, hint in vars(cls).get("__annotations__", {}).items()}
    maker = vars(cls).get("__init__")
    if not isinstance(maker, types.FunctionType) or not is_vllms(cls):
        return found
    try:
        node = ast.parse(inspect.cleandoc("\n" + inspect.getsource(maker))).body[0]
    except (OSError, SyntaxError):
        return found
    taken = getattr(maker, "__annotations__", {})
    for each in ast.walk(node):
        if not isinstance(each, ast.AnnAssign | ast.Assign):
            continue
        target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
        if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
            continue
        if isinstance(each, ast.AnnAssign):
            found.setdefault(target.attr, instances(ast.unparse(each.annotation), module))
            continue
        values = each.value.values if isinstance(each.value, ast.BoolOp) else [each.value]
        for name in (value.id for value in values if isinstance(value, ast.Name) and value.id in taken):
            found.setdefault(target.attr, instances(taken[name], module))
    return found


def owners(cls: type, name: str, has: Callable[[type], Iterable[str]]) -> list[type]:
    """The class, if it has the attribute, or else the subclasses of vLLM's that do, without their own subclasses."""
    if name in has(cls):
        return [cls]
    found: list[type] = []
    left: list[type] = list(type.__subclasses__(cls))
    while left:
        each = left.pop()
        if is_vllms(each) and name in has(each):
            found.append(each)
        else:
            left += type.__subclasses__(each)
    return found


@cache
def place_of(cls: type) -> str:
    """Where a class is, by the first package that has it: classes are moved between a package's modules."""
    names = cls.__module__.split(".")
    packages = [".".join(names[: end + 1]) for end in range(1, len(names))]
    module = next(name for name in packages if vars(sys.modules[name]).get(cls.__qualname__) is cls)
    return f"{module}:{cls.__qualname__}"


def class_of(value: Value) -> type | None:
    """The class of an instance."""
    if value.kind != "a":
        return None
    hint = value.of[0]
    return hint if isinstance(hint, type) and typing.get_origin(hint) is None else typing.get_origin(hint)


def itself(thing: Any, *, may_lack: bool = False) -> Values:
    if isinstance(thing, tuple):  # of classes, for isinstance
        return NOTHING
    try:
        hash(thing)
    except TypeError:
        return NOTHING
    return frozenset({Value("is", thing, may_lack=may_lack)}) if thing is not None else NOTHING


def item_of(value: Value, index: Any) -> Values:
    """What a container holds. index: a number, None for any, "value" for a mapping's values."""
    if value.kind == "tuple":
        return value.of[index] if isinstance(index, int) and index < len(value.of) else frozenset().union(*value.of)
    if value.kind == "held":
        return frozenset(value.of)
    if value.kind != "a":
        return NOTHING
    hint, module = value.of
    of, origin = typing.get_args(hint), typing.get_origin(hint)
    if not of or not isinstance(origin, type):
        return NOTHING
    if issubclass(origin, Mapping):
        return instances(of[0] if index is None else of[1], sys.modules[module])
    if origin is tuple and isinstance(index, int) and index < len(of) and of[-1] is not ...:
        return instances(of[index], sys.modules[module])
    return instances(of[0], sys.modules[module])


def held(values: Values, container: type) -> Values:
    values = frozenset(
        each for each in values if each.kind != "held" or not any(inside.kind == "held" for inside in each.of)
    )
    if not values:
        return NOTHING
    return frozenset({Value("held", tuple(sorted(values, key=repr)), container.__name__)})


def type_of_attribute(cls: type, name: str, static: Any, may_lack: bool) -> Values:
    for base in cls.__mro__:
        if name in (fields := fields_of(base)):
            return frozenset(each._replace(may_lack=may_lack) for each in fields[name])
    function = getattr(static, "fget", getattr(static, "func", None))
    if function is not None:
        return instances(getattr(function, "__annotations__", {}).get("return"), sys.modules[cls.__module__])
    return instances(type(static), sys.modules[cls.__module__]) if is_vllms(type(static)) else NOTHING
