"""Reads from the source of ``connector.vllm`` what it uses of vLLM: ``python -m tests.vllm.contract_reader`` writes it.

The result, ``connector/vllm/contract.json``, is what ``contract.check_contract`` checks at an engine's start.
``tests/vllm/test_contract.py`` fails if the file is not what this module reads.

Types are inferred, not run: parameters of methods that vLLM calls have the types that vLLM's class gives them, fields
and return values those that vLLM annotates, and kvtiers' functions take the types that their callers pass. An
expression without a known type is left out, so a helper that takes vLLM's objects from a container may need an
annotation.

Entries:

- ``name``: kvtiers reads the attribute, sets it on vLLM's object, or imports it.
- ``name(_, key=)``: kvtiers calls it with these arguments.
- ``?`` before an entry: the code works without it (``getattr`` with a default, ``hasattr``, an import in a function).

Left out is what the code tries: the body of a ``try`` with a handler for any error that does not raise, and what is
read if ``hasattr`` is false, which only older releases have.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import pkgutil
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.vllm.contract_types import (
    NOTHING,
    PACKAGE,
    Value,
    Values,
    class_of,
    fields_of,
    held,
    instances,
    is_for_type_checkers,
    is_ours,
    is_vllms,
    item_of,
    itself,
    owners,
    place_of,
    type_of_attribute,
)

FILE = Path(__file__).parents[2] / "connector" / "vllm" / "contract.json"
_CONTAINERS = (list, tuple, set, frozenset, sorted, reversed, iter)


@dataclass(frozen=True)
class Function:
    """A function or method of kvtiers."""

    node: ast.FunctionDef
    module: Any
    cls: type | None = None


# ---- kvtiers' source -----------------------------------------------------------------------------------------------


class Reader:
    """Reads the modules of ``connector.vllm`` until no type is new; then ``used`` has what they use.

    Args:
        modules: their names; all of ``connector.vllm`` if there are none.

    Attributes:
        used: place -> entries, without their ``?``.
        optional: places and names that may be missing.
        problems: what kvtiers reads although vLLM does not have it.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        from kvtiers.connector.vllm import contract

        self.has: Callable[[type], Iterable[str]] = cache(contract.attributes)
        self.used: dict[str, set[str]] = defaultdict(set)
        self.optional: set[tuple[str, str]] = set()
        self.problems: set[str] = set()
        self._is_tried = False
        self._is_guarded = False  # by hasattr
        self._is_needed: dict[tuple[str, str], bool] = {}  # False: all calls are tried
        self._functions: dict[tuple[str, str], Function] = {}
        self._taken: dict[tuple[str, str, str], Values] = defaultdict(frozenset)
        self._returned: dict[tuple[str, str], Values] = defaultdict(frozenset)
        self._stored: dict[tuple[type, str], Values] = defaultdict(frozenset)
        self._env: dict[str, Values] = {}
        self._now: Function | None = None
        self._trees: list[tuple[Any, ast.Module]] = []
        for name in modules or [*modules_of(PACKAGE), "kvtiers.vllm"]:
            if name != contract.__name__:
                module = importlib.import_module(name)
                self._trees.append((module, ast.parse(Path(str(module.__file__)).read_text())))

    def read(self) -> dict[str, list[str]]:
        """Return place -> entries."""
        for module, tree in self._trees:
            self._note_functions(module, tree)
        before, now = None, self._read_all()
        while before != now:
            before, now = now, self._read_all()
        return {
            place: sorted(f"?{each}" if (place, each.partition("(")[0]) in self.optional else each for each in entries)
            for place, entries in sorted(self.used.items())
            if entries
        }

    def _read_all(self) -> Any:
        self.used.clear()
        self.optional.clear()
        self.problems.clear()
        for module, tree in self._trees:
            self._note_imports(module, tree)
            self._read_body(
                Function(ast.FunctionDef(name="", args=_NO_ARGUMENTS, body=tree.body, decorator_list=[]), module)
            )
        for function in self._functions.values():
            self._read_body(function)
        return dict(self._taken), dict(self._returned), dict(self._stored), dict(self._is_needed)

    def _note_functions(self, module: Any, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self._functions[module.__name__, node.name] = Function(node, module)
            elif isinstance(node, ast.ClassDef):
                cls = vars(module)[node.name]
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        self._functions[module.__name__, f"{node.name}.{each.name}"] = Function(each, module, cls)

    def _note_imports(self, module: Any, tree: ast.Module) -> None:
        at_top = {id(each) for each in tree.body}
        skipped = (node for node in ast.walk(tree) if _has_fallback(node) or is_for_type_checkers(node))
        tried = {id(each) for node in skipped for each in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and is_vllms(types.ModuleType(node.module or "")):
                for alias in node.names if id(node) not in tried else ():
                    thing = getattr(importlib.import_module(node.module or ""), alias.name)
                    if not inspect.ismodule(thing) and not isinstance(thing, types.FunctionType):
                        self._use(node.module or "", alias.name, may_lack=id(node) not in at_top)

    def _use(self, place: str, entry: str, *, may_lack: bool = False) -> None:
        if self._is_tried:
            return
        self.used[place].add(entry)
        if may_lack or self._is_guarded:
            self.optional.add((place, entry.partition("(")[0]))

    def _overrides(self, cls: type, name: str) -> None:
        """kvtiers gives an attribute that vLLM's class has another value: vLLM must still read it."""
        base = next((base for base in cls.__mro__ if is_vllms(base) and name in self.has(base)), None)
        if base is not None and not name.startswith("_"):
            self._use(place_of(base), name)

    # -- functions

    def _read_body(self, function: Function) -> None:
        self._now, self._env = function, {}
        self._is_tried = not self._is_needed.get((function.module.__name__, _qualified(function)), True)
        arguments = function.node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._env[each.arg] = self._argument(function, each)
        for _ in range(2):  # a name may be assigned behind a loop's beginning
            for node in function.node.body:
                self._statement(node)

    def _argument(self, function: Function, each: ast.arg) -> Values:
        cls, name = function.cls, function.node.name
        if cls is not None and each.arg in ("self", "cls"):
            return frozenset({Value("a", (cls, cls.__module__)) if each.arg == "self" else Value("is", cls)})
        found = self._taken[function.module.__name__, _qualified(function), each.arg]
        if each.annotation is not None:
            found |= instances(ast.unparse(each.annotation), function.module)
        for base in cls.__mro__ if cls is not None else ():
            theirs = inspect.getattr_static(base, name, None) if is_vllms(base) else None
            hints = getattr(getattr(theirs, "__func__", theirs), "__annotations__", {})
            if each.arg in hints and is_vllms(theirs if isinstance(theirs, types.FunctionType) else base):
                found |= instances(hints[each.arg], sys.modules[base.__module__])
        return found

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef) and self._now is not None:
            for each in node.body:
                if isinstance(each, ast.Assign):
                    self._overrides(vars(self._now.module)[node.name], ast.unparse(each.targets[0]))
        elif isinstance(node, ast.FunctionDef):
            for each in node.body if self._now is not None and self._now.node.name else ():  # nested in a function
                self._statement(each)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names if not node.level else ():
                if is_vllms(types.ModuleType(node.module or "")):
                    thing = getattr(importlib.import_module(node.module or ""), alias.name)
                    is_late = self._now is not None and bool(self._now.node.name)
                    self._assign(alias.asname or alias.name, frozenset({Value("is", thing, may_lack=is_late)}))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            values = self._value(node.value) if node.value is not None else NOTHING
            if isinstance(node, ast.AnnAssign) and self._now is not None:
                values |= instances(ast.unparse(node.annotation), self._now.module)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._bind(target, values)
        elif isinstance(node, ast.For):
            self._bind(node.target, self._elements(self._value(node.iter)))
            self._block(node.body)
            self._block(node.orelse)
        elif isinstance(node, ast.If):
            self._value(node.test)
            before, self._is_guarded = self._is_guarded, self._is_guarded or _asks_hasattr(node.test)
            self._block(node.body)
            self._is_guarded = before
            self._block(node.orelse, is_tried=_asks_hasattr(node.test))
        elif isinstance(node, ast.Try):
            self._block(node.body, is_tried=_has_fallback(node))
            for handler in node.handlers:
                self._block(handler.body)
            self._block(node.orelse, is_tried=_has_fallback(node))
            self._block(node.finalbody)
        elif isinstance(node, ast.Assert):
            self._value(node.test)
            self._env |= self._narrowed(node.test)
        elif isinstance(node, ast.Return) and self._now is not None:
            self._returned[self._now.module.__name__, _qualified(self._now)] |= self._value(node.value)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._statement(child)
                else:
                    self._value(child)

    def _block(self, body: list[ast.stmt], *, is_tried: bool = False) -> None:
        before = self._is_tried
        self._is_tried |= is_tried
        for node in body:
            self._statement(node)
        self._is_tried = before

    def _assign(self, name: str, values: Values) -> None:
        self._env[name] = self._env.get(name, NOTHING) | values

    def _bind(self, target: ast.expr, values: Values) -> None:
        if isinstance(target, ast.Name):
            self._assign(target.id, values)
        elif isinstance(target, ast.Tuple):
            for index, each in enumerate(target.elts):
                self._bind(each, frozenset().union(*(item_of(value, index) for value in values)))
        elif isinstance(target, ast.Attribute):
            for owner in self._value(target.value):
                cls = class_of(owner)
                if cls is not None and is_ours(cls):
                    self._stored[cls, target.attr] |= values
                    self._overrides(cls, target.attr)
                elif cls is not None:
                    self._attribute(owner, target.attr)
        else:
            self._value(target)

    # -- expressions

    def _value(self, node: ast.AST | None) -> Values:
        match node:
            case ast.Name(id=name):
                if name in self._env:
                    return self._env[name]
                thing = vars(self._now.module).get(name, getattr(builtins, name, None)) if self._now else None
                return itself(thing)
            case ast.Attribute(value=value, attr=attr):
                return frozenset().union(*(self._attribute(each, attr) for each in self._value(value)))
            case ast.Call():
                return self._call(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(test)
                before, self._is_tried = self._is_tried, self._is_tried or _asks_hasattr(test)
                found = self._value(orelse)
                self._is_tried = before
                outer = self._env
                self._env = outer | self._narrowed(test)
                found |= self._value(body)
                self._env = outer
                return found
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, found := self._value(value))
                return found
            case ast.Subscript(value=value, slice=at):
                self._value(at)
                index = at.value if isinstance(at, ast.Constant) and isinstance(at.value, int) else 0
                whole = self._value(value)
                return (
                    whole if isinstance(at, ast.Slice) else frozenset().union(*(item_of(each, index) for each in whole))
                )
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for each in node.generators:
                    self._bind(each.target, self._elements(self._value(each.iter)))
                    for test in each.ifs:
                        self._value(test)
                if isinstance(node, ast.DictComp):
                    self._value(node.key)
                    return held(self._value(node.value), dict)
                return held(self._value(node.elt), list)
            case ast.Tuple(elts=elements) if not any(isinstance(each, ast.Starred) for each in elements):
                return frozenset({Value("tuple", tuple(map(self._value, elements)))})
            case ast.List(elts=elements) | ast.Set(elts=elements) | ast.Tuple(elts=elements):
                return held(frozenset().union(*(self._value(each) for each in elements)), list)
            case ast.Starred(value=value):
                return self._elements(self._value(value))
            case ast.BoolOp(op=op, values=values):
                outer, found = self._env, NOTHING
                for operand in values:
                    found |= self._value(operand)
                    if isinstance(op, ast.And):
                        self._env = self._env | self._narrowed(operand)
                self._env = outer | {name: self._env[name] for name in self._env.keys() - outer.keys()}
                return found
            case ast.Lambda(body=body):
                return self._value(body)
        for child in ast.iter_child_nodes(node) if node is not None else ():
            self._value(child)
        return NOTHING

    def _narrowed(self, test: ast.expr) -> dict[str, Values]:
        """What a name is if ``isinstance(name, Class)`` or ``type(name) is Class``."""
        match test:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kind]):
                pass
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=name)]), comparators=[kind]):
                pass
            case _:
                return {}
        classes = [each.of for each in self._value(kind) if each.kind == "is" and isinstance(each.of, type)]
        return {name: frozenset(Value("a", (cls, cls.__module__)) for cls in classes)} if classes else {}

    def _attribute(self, owner: Value, name: str, *, may_lack: bool = False, is_called: bool = False) -> Values:
        thing = owner.of
        may_lack |= owner.may_lack
        if owner.kind == "is" and inspect.ismodule(thing):
            if not is_vllms(thing):
                return itself(getattr(thing, name, None))
            if not inspect.ismodule(getattr(thing, name, None)):
                self._use(thing.__name__, name, may_lack=may_lack)
            return itself(getattr(thing, name, None), may_lack=may_lack)
        cls = thing if owner.kind == "is" and isinstance(thing, type) else class_of(owner)
        if owner.kind == "is" and cls is None and is_vllms(type(thing)) and not callable(thing):
            cls = next(base for base in reversed(type(thing).__mro__) if name in self.has(base))  # of every platform
        if owner.kind == "held":
            return self._container_method(owner, name)
        if cls is None or (name.startswith("__") and name != "__init__"):
            return NOTHING
        if is_ours(cls):
            return self._own_attribute(cls, name, may_lack=may_lack, is_called=is_called)
        if cls is not None and not is_vllms(cls):
            return self._container_method(owner, name)
        found = NOTHING
        having = owners(cls, name, self.has)
        if not having and not may_lack and not self._is_tried and not _is_elsewhere(cls, name, self.has):
            at = self._now.module.__name__ if self._now else ""
            self.problems.add(f"{at} reads {name} of {cls.__name__}, which has no such attribute")
        for each in having:
            static = inspect.getattr_static(each, name, None)
            is_method = isinstance(static, types.FunctionType | classmethod | staticmethod)
            if not (is_method and is_called):
                self._use(place_of(each), name, may_lack=may_lack)
            if is_method:
                found |= {Value("method", each, name, may_lack)}
            else:
                found |= type_of_attribute(each, name, static, may_lack)
        return found

    def _own_attribute(self, cls: type, name: str, *, may_lack: bool, is_called: bool) -> Values:
        for base in cls.__mro__:
            if (base.__module__, f"{base.__name__}.{name}") in self._functions:
                node = self._functions[base.__module__, f"{base.__name__}.{name}"].node
                is_property = "property" in map(ast.unparse, node.decorator_list)
                returned = self._results(self._functions[base.__module__, f"{base.__name__}.{name}"])
                return returned if is_property else frozenset({Value("method", base, name)})
            if is_ours(base) and ((base, name) in self._stored or name in vars(base) or name in fields_of(base)):
                return self._stored[base, name] | fields_of(base).get(name, NOTHING)
            if is_vllms(base) and name in self.has(base) and name not in dir(object):
                owner = Value("a", (base, base.__module__))
                return self._attribute(owner, name, may_lack=may_lack, is_called=is_called)
        return NOTHING

    def _container_method(self, owner: Value, name: str) -> Values:
        """The methods of mappings that return what they hold."""
        if name not in ("get", "pop", "values", "items", "setdefault"):
            return NOTHING
        return frozenset({Value("method", owner, name)})

    def _elements(self, values: Values) -> Values:
        return frozenset().union(*(item_of(each, None) for each in values))

    # -- calls

    def _call(self, node: ast.Call) -> Values:
        match node.func:
            case ast.Name(id="getattr" | "hasattr" as called) if isinstance(node.args[1], ast.Constant):
                may_lack = called == "hasattr" or len(node.args) > 2
                default = self._value(node.args[2]) if len(node.args) > 2 else NOTHING
                owner = self._value(node.args[0])
                name = str(node.args[1].value)
                return default.union(*(self._attribute(each, name, may_lack=may_lack) for each in owner))
            case ast.Name(id="super"):
                cls = self._now.cls if self._now else None
                bases = [base for base in cls.__mro__[1:] if is_vllms(base)] if cls is not None else []
                return frozenset({Value("a", (bases[0], bases[0].__module__))}) if bases else NOTHING
            case ast.Name(id="type"):
                return frozenset(Value("is", cls) for each in self._value(node.args[0]) if (cls := class_of(each)))
        given = [self._value(each) for each in node.args]
        named = {each.arg: self._value(each.value) for each in node.keywords}
        callee = self._callee(node.func)
        text = ast.unparse(node.func)
        if text in ("dataclasses.replace", "replace", "copy.copy"):
            for each in given[0]:
                for field in named if is_vllms(class_of(each) or object) else ():
                    self._attribute(each, field or "")
            return given[0]
        if text == "dict.fromkeys":
            return held(given[1], dict) if len(given) > 1 else NOTHING
        if text in ("enumerate", "zip"):
            each_of = [NOTHING, *map(self._elements, given)] if text == "enumerate" else map(self._elements, given)
            return held(frozenset({Value("tuple", tuple(each_of))}), list)
        found = NOTHING
        for each in callee:
            found |= self._called(each, node, given, named)
        return found

    def _callee(self, node: ast.expr) -> Values:
        """What is called. A method's entry has its arguments, so the name alone is none."""
        if isinstance(node, ast.Attribute):
            owners = self._value(node.value)
            return frozenset().union(*(self._attribute(each, node.attr, is_called=True) for each in owners))
        return self._value(node)

    def _called(self, callee: Value, node: ast.Call, given: list[Values], named: Mapping[str | None, Values]) -> Values:
        thing = callee.of
        if isinstance(thing, Value):  # of a container
            inside = item_of(thing, "value")
            if callee.name == "values":
                return held(inside, list)
            if callee.name == "items":
                return held(frozenset({Value("tuple", (NOTHING, inside))}), list)
            return inside.union(*given[1:]) if callee.name in ("get", "pop", "setdefault") else NOTHING
        if callee.kind == "method":
            if is_ours(thing):
                return self._pass(self._functions[thing.__module__, f"{thing.__name__}.{callee.name}"], given, named)
            self._use(place_of(thing), f"{callee.name}({_arguments(node)})", may_lack=callee.may_lack)
            static = inspect.getattr_static(thing, callee.name)
            hints = getattr(getattr(static, "__func__", static), "__annotations__", {})
            return instances(hints.get("return"), sys.modules[thing.__module__], may_lack=callee.may_lack)
        if callee.kind != "is":
            return NOTHING
        if any(thing is each for each in _CONTAINERS):
            return held(self._elements(given[0]), list) if given else NOTHING
        if isinstance(thing, type):
            if is_ours(thing):
                maker = self._functions.get((thing.__module__, f"{thing.__name__}.__init__"))
                if maker is not None:
                    self._pass(maker, given, named)
                else:  # a dataclass
                    for name, values in [*zip(fields_of(thing), given, strict=False), *named.items()]:
                        self._stored[thing, str(name)] |= values
            elif is_vllms(thing) and not hasattr(thing, "__members__"):
                self._use(place_of(thing), f"__init__({_arguments(node)})", may_lack=callee.may_lack)
            return frozenset({Value("a", (thing, thing.__module__))})
        if isinstance(thing, types.FunctionType | type(cache(len))):
            function = inspect.unwrap(thing)
            if (own := self._functions.get((function.__module__, function.__qualname__))) is not None:
                return self._pass(own, given, named)
            if is_vllms(function):
                self._use(function.__module__, f"{function.__name__}({_arguments(node)})", may_lack=callee.may_lack)
                return instances(function.__annotations__.get("return"), sys.modules[function.__module__])
        return NOTHING

    def _pass(self, function: Function, given: list[Values], named: Mapping[str | None, Values]) -> Values:
        names = [each.arg for each in function.node.args.args]
        if function.cls is not None and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        for name, values in [*zip(names, given, strict=False), *named.items()]:
            self._taken[function.module.__name__, _qualified(function), str(name)] |= values
        key = (function.module.__name__, _qualified(function))
        self._is_needed[key] = self._is_needed.get(key, False) or not self._is_tried
        return self._results(function)

    def _results(self, function: Function) -> Values:
        hint = ast.unparse(function.node.returns) if function.node.returns is not None else None
        return self._returned[function.module.__name__, _qualified(function)] | instances(hint, function.module)


_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def modules_of(package: str) -> Iterator[str]:
    """Names of a package and of all modules in it."""
    yield package
    for each in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        yield from modules_of(each.name) if each.ispkg else (each.name,)


def _qualified(function: Function) -> str:
    return f"{function.cls.__name__}.{function.node.name}" if function.cls is not None else function.node.name


def _is_elsewhere(cls: type, name: str, has: Callable[[type], Iterable[str]]) -> bool:
    """Whether ``cls`` inherits the attribute from its own bases, or a kvtiers subclass of ``cls`` defines it.

    Then vLLM need not have it.
    """
    is_pythons = any(name in vars(base) for base in cls.__mro__)
    below: list[type] = type.__subclasses__(cls)
    return is_pythons or any(is_ours(each) and name in has(each) for each in below)


def _arguments(node: ast.Call) -> str:
    return ", ".join(
        [
            *("*_" if isinstance(each, ast.Starred) else "_" for each in node.args),
            *(f"{each.arg}=" if each.arg else "**_" for each in node.keywords),
        ]
    )


def _asks_hasattr(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "hasattr"


def _has_fallback(node: ast.AST) -> bool:
    """Whether a ``try`` goes on after any error."""
    return isinstance(node, ast.Try) and any(
        (handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException", "ImportError"))
        and not any(isinstance(each, ast.Raise) for each in ast.walk(handler))
        for handler in node.handlers
    )


def load() -> None:
    """Import what may define subclasses, so that they are found whatever else has imported."""
    import vllm.distributed.kv_transfer.kv_connector.v1 as connectors
    import vllm.v1.kv_offload as offload

    found = pkgutil.iter_modules(connectors.__path__, f"{connectors.__name__}.")
    for name in (*(each.name for each in found), *modules_of(offload.__name__)):
        try:
            importlib.import_module(name)
        except Exception:  # a library of one connector is missing
            continue


def read() -> dict[str, list[str]]:
    """Place in vLLM -> what ``connector.vllm`` uses of it.

    Raises:
        AssertionError: kvtiers reads what the installed vLLM does not have.
    """
    load()
    reader = Reader()
    used = reader.read()
    assert not reader.problems, sorted(reader.problems)
    return used


def main() -> None:
    """Write the file. Needs the newest tested release."""
    FILE.write_text("{}")  # with the old list the package may not be importable
    lines = (f"{json.dumps(place)}: {json.dumps(entries)}" for place, entries in read().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
